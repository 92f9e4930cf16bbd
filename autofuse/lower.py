"""Lowering: from a kernel's source text to LLVM IR, inside one numba intrinsic.

The whole body is one intrinsic because numba's front end costs 7 ms per op and lane for text, but
35 ms flat this way (10 ops x 4 lanes: 245 against 35 ms), and because every type is then chosen
here: nothing becomes float64 by a Python literal. Knows LLVM IR; nothing of torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .codegen import const_code, render
from .dtypes import ITEMSIZE, carried
from .plan import BROADCAST, STRIDED, UNIT, Operand, Plan

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
CARRIED = {"f64": F64, "f32": F32, "i64": I64, "i32": I32, "i16": I16, "i8": I8, "u8": I8, "b1": I1}
STORED = {**CARRIED, "f16": I16, "bf16": I16, "b1": I8}
THREADS_PER_BLOCK = 128  # eager's block size on sm_90; 4-element threads reach copy bandwidth

_INT_COMPARE = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">="}


@dataclass(frozen=True, slots=True)
class Value:
    """An LLVM value and the type code that says how to read its bits."""

    ir: Any
    code: str

    @property
    def floating(self) -> bool:
        return self.code in ("f32", "f64")


Literal = int | float


class Cuda:
    """What differs on CUDA: libdevice, contraction control, hardware conversions."""

    # libdevice names, `f` appended for float32; the IEEE forms where libdevice has a choice
    FUNCTIONS = {"abs": "fabs", "round": "nearbyint"}
    ROUNDED = {
        ("sqrt", "f32"): "fsqrt_rn",
        ("sqrt", "f64"): "dsqrt_rn",
        **{(op, "f32"): f"f{op}_rn" for op in ("add", "sub", "mul")},
        **{(op, "f64"): f"d{op}_rn" for op in ("add", "sub", "mul")},
    }

    SIXTH = 0.16666667163372039794921875  # float32's, in float64 too

    def __init__(self, builder: ir.IRBuilder, capability: tuple[int, int]) -> None:
        self.builder, self.capability = builder, capability

    def call(self, name: str, args: list[Value]) -> Any:
        code = args[0].code
        symbol = self.ROUNDED.get((name, code))
        if symbol is None:
            symbol = self.FUNCTIONS.get(name, name) + ("f" if code == "f32" else "")
        return _external(self.builder, f"__nv_{symbol}", [arg.ir for arg in args])

    def exact(self, name: str, a: Any, b: Any, code: str) -> Any:
        """add, sub or mul that neither LLVM nor ptxas contracts with its neighbours."""
        return self.call(name, [Value(a, code), Value(b, code)])

    def barrier(self, value: Any) -> Any:
        """Ends an op: what follows does not contract with `value`."""
        kind = "f" if value.type == F32 else "d"
        signature = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(signature, "", f"={kind},0", [value], False)

    def round16(self, value: Any, code: str) -> Any:
        """float32 `value` rounded to bfloat16 or float16, as float32."""
        builder = self.builder
        if code == "f16":
            return self.from_half(self.to_half(value))
        if self.capability < (8, 0):
            return _round_bf16(builder, value)
        # one F2FP instruction; the scalar conversion compiles to two slower ones
        word = builder.asm(
            ir.FunctionType(I32, [F32]),
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;",
            "=r,f",
            [value],
            False,
        )
        return builder.bitcast(word, F32)

    def to_half(self, value: Any) -> Any:
        return self.builder.asm(
            ir.FunctionType(I16, [F32]), "cvt.rn.f16.f32 $0, $1;", "=h,f", [value], False
        )

    def from_half(self, bits: Any) -> Any:
        # LLVM's own fpext would be looked through: copysign would then see the sign of a NaN
        return self.builder.asm(
            ir.FunctionType(F32, [I16]), "cvt.f32.f16 $0, $1;", "=f,h", [bits], False
        )

    def pointer(self, address: Any, pointee: ir.Type) -> Any:
        return self.builder.inttoptr(address, pointee.as_pointer(1))  # global memory


class Cpu:
    """What differs on the CPU: libm, and LLVM contracts nothing on its own."""

    INTRINSICS = {
        "sqrt", "sin", "cos", "exp", "exp2", "log", "log2", "log10", "fma", "pow",
        "floor", "ceil", "trunc", "copysign",
    }  # fmt: skip
    SIXTH = 1 / 6
    RENAMED = {"abs": "fabs", "round": "nearbyint", "fmax": "maxnum", "fmin": "minnum"}

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def call(self, name: str, args: list[Value]) -> Any:
        values = [arg.ir for arg in args]
        kind = values[0].type
        if name == "rsqrt":
            return self.builder.fdiv(ir.Constant(kind, 1.0), self.call("sqrt", args))
        if name == "fmod":
            return self.builder.frem(*values)
        if name in self.INTRINSICS or name in self.RENAMED:
            symbol = f"llvm.{self.RENAMED.get(name, name)}.{args[0].code}"
        else:
            symbol = name + ("f" if kind == F32 else "")
        return _external(self.builder, symbol, values)

    def exact(self, name: str, a: Any, b: Any, code: str) -> Any:
        return getattr(self.builder, f"f{name}")(a, b)

    def barrier(self, value: Any) -> Any:
        return value

    def round16(self, value: Any, code: str) -> Any:
        if code == "bf16":
            return _round_bf16(self.builder, value)
        return self.builder.fpext(self.builder.fptrunc(value, F16), F32)

    def to_half(self, value: Any) -> Any:
        return self.builder.bitcast(self.builder.fptrunc(value, F16), I16)

    def from_half(self, bits: Any) -> Any:
        return self.builder.fpext(self.builder.bitcast(bits, F16), F32)

    def pointer(self, address: Any, pointee: ir.Type) -> Any:
        return self.builder.inttoptr(address, pointee.as_pointer())


def _external(builder: ir.IRBuilder, symbol: str, args: list[Any]) -> Any:
    module = builder.module
    signature = ir.FunctionType(args[0].type, [arg.type for arg in args])
    function = module.globals.get(symbol)
    if function is None:
        function = ir.Function(module, signature, symbol)
    return builder.call(function, args)


def _round_bf16(builder: ir.IRBuilder, value: Any) -> Any:
    """Round to nearest even in integer arithmetic; NaN becomes the quiet NaN."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.and_(
        builder.add(builder.add(bits, I32(0x7FFF)), odd), ir.Constant(I32, 0xFFFF0000)
    )
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.bitcast(builder.select(nan, I32(0x7FC00000), rounded), F32)


class Element:
    """Lowers the statements of an element function, for one lane at a time."""

    def __init__(self, builder: ir.IRBuilder, target: Cuda | Cpu) -> None:
        self.builder, self.target = builder, target
        self.names: dict[str, Value] = {}

    def run(self, function: ast.FunctionDef, args: list[Value]) -> list[Value]:
        """The values that `function` returns for `args`."""
        self.names = {arg.arg: value for arg, value in zip(function.args.args, args, strict=True)}
        for statement in function.body:
            if isinstance(statement, ast.Return):
                value = statement.value
                results = value.elts if isinstance(value, ast.Tuple) else [value]
                return [self.names[result.id] for result in results]  # type: ignore[union-attr]
            if isinstance(statement, ast.AnnAssign):
                target, code = statement.target, statement.annotation
                assert isinstance(target, ast.Name) and isinstance(code, ast.Name)
                assert statement.value is not None
                self.names[target.id] = self.op(statement.value, code.id)
            else:
                assert isinstance(statement, ast.Assign)
                assert isinstance(statement.targets[0], ast.Name)
                value = self.typed(self.eval(statement.value), "f32")
                self.names[statement.targets[0].id] = value
        raise AssertionError("an element function returns")

    def op(self, tree: ast.expr, code: str) -> Value:
        """One op: a lone + - * is exact; anything else contracts within, and ends here."""
        lone = (
            isinstance(tree, ast.BinOp)
            and isinstance(tree.op, (ast.Add, ast.Sub, ast.Mult))
            and isinstance(tree.left, ast.Name)
            and isinstance(tree.right, ast.Name)
        )
        value = self.eval(tree, exact=lone)
        value = self.convert(self.typed(value, carried(code)), code)
        if value.floating and code not in ("f16", "bf16") and not lone:
            value = Value(self.target.barrier(value.ir), value.code)
        return value

    def eval(self, tree: ast.expr, exact: bool = False) -> Value | Literal:
        match tree:
            case ast.Constant(value=value):
                assert type(value) in (int, float)
                return value  # type: ignore[return-value]
            case ast.Name(id="inf"):
                return float("inf")
            case ast.Name(id="sixth"):  # torch's 1 / 6
                return self.target.SIXTH
            case ast.Name(id=name):
                return self.names[name]
            case ast.BinOp():
                return self.binary(tree, exact)
            case ast.UnaryOp(op=ast.USub()):
                value = self.eval(tree.operand)
                if not isinstance(value, Value):
                    return -value
                return Value(self.negated(value), value.code)
            case ast.UnaryOp(op=ast.Invert()):
                value = self.typed(self.eval(tree.operand), "i64")
                return Value(self.builder.not_(value.ir), value.code)
            case ast.Compare():
                return self.compare(tree)
            case ast.BoolOp():
                parts = [self.truth(value) for value in tree.values]
                join = self.builder.and_ if isinstance(tree.op, ast.And) else self.builder.or_
                result = parts[0]
                for part in parts[1:]:
                    result = join(result, part)
                return Value(result, "b1")
            case ast.IfExp():
                condition = self.truth(tree.test)
                a, b = self.unify(self.eval(tree.body), self.eval(tree.orelse))
                return Value(self.builder.select(condition, a.ir, b.ir), a.code)
            case ast.Call(func=ast.Name(id=name)):
                return self.call(name, tree.args)
        raise AssertionError(f"not part of the kernel language: {ast.dump(tree)}")

    def negated(self, value: Value) -> Any:
        if value.floating:  # NVVM's dialect has no fneg; it reads this form as one
            return self.builder.fsub(ir.Constant(value.ir.type, -0.0), value.ir)
        return self.builder.neg(value.ir)

    def binary(self, tree: ast.BinOp, exact: bool) -> Value | Literal:
        a, b = self.eval(tree.left), self.eval(tree.right)
        if not isinstance(a, Value) and not isinstance(b, Value):
            return eval(compile(ast.Expression(tree), "constant", "eval"))
        a, b = self.unify(a, b)
        builder = self.builder
        name = {
            ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
            ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
        }[type(tree.op)]  # fmt: skip
        if not a.floating:
            assert name != "div", "integer division has no expression"
            return Value(getattr(builder, name)(a.ir, b.ir), a.code)
        if exact:
            return Value(self.target.exact(name, a.ir, b.ir, a.code), a.code)
        return Value(getattr(builder, f"f{name}")(a.ir, b.ir), a.code)

    def compare(self, tree: ast.Compare) -> Value:
        a, b = self.unify(self.eval(tree.left), self.eval(tree.comparators[0]))
        sign = _INT_COMPARE[type(tree.ops[0]).__name__]
        builder = self.builder
        if a.floating:
            compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        elif a.code in ("u8", "b1"):
            compare = builder.icmp_unsigned
        else:
            compare = builder.icmp_signed
        return Value(compare(sign, a.ir, b.ir), "b1")

    def call(self, name: str, trees: list[ast.expr]) -> Value:
        args = [self.eval(tree) for tree in trees]
        if name in STORED:
            return self.convert(self.typed(args[0], carried(name)), name)
        if name == "clip":  # std::min(std::max(x, low), high) of hardswish and hardsigmoid
            x, low = self.unify(args[0], args[1])
            x = Value(
                self.builder.select(self.builder.fcmp_ordered("<", x.ir, low.ir), low.ir, x.ir),
                x.code,
            )
            x, high = self.unify(x, args[2])
            below = self.builder.fcmp_ordered("<", high.ir, x.ir)
            return Value(self.builder.select(below, high.ir, x.ir), x.code)
        code = next(arg.code for arg in args if isinstance(arg, Value))
        typed = [self.typed(arg, code) for arg in args]
        return Value(self.target.call(name, typed), code)

    def truth(self, tree: ast.expr) -> Any:
        value = self.eval(tree)
        assert isinstance(value, Value) and value.code == "b1"
        return value.ir

    def typed(self, value: Value | Literal, code: str) -> Value:
        if isinstance(value, Value):
            return value
        kind = CARRIED[code]
        return Value(ir.Constant(kind, float(value) if code[0] == "f" else int(value)), code)

    def unify(self, a: Value | Literal, b: Value | Literal) -> tuple[Value, Value]:
        code = a.code if isinstance(a, Value) else b.code if isinstance(b, Value) else "f32"
        left, right = self.typed(a, code), self.typed(b, code)
        assert left.code == right.code, f"{left.code} meets {right.code} without a conversion"
        return left, right

    def convert(self, value: Value, code: str) -> Value:
        """`value` as type `code`, rounded to it; conversions follow c10::convert on CUDA."""
        source, own = value.code, carried(code)
        builder, x = self.builder, value.ir
        target = CARRIED[own]
        floating = target in (F32, F64)
        if source == own:
            pass
        elif code == "b1":
            zero = ir.Constant(x.type, 0)
            x = (
                builder.fcmp_unordered("!=", x, zero)
                if value.floating
                else (builder.icmp_unsigned("!=", x, zero))
            )
        elif value.floating and floating:
            x = builder.fpext(x, target) if target == F64 else builder.fptrunc(x, target)
        elif value.floating:
            wide = I64 if own in ("i64", "u8") else I32
            x = builder.fptosi(x, wide)
            x = x if wide == target else builder.trunc(x, target)
        elif floating:
            convert = builder.uitofp if source in ("u8", "b1") else builder.sitofp
            x = convert(x, target)
        elif x.type.width >= target.width:
            x = x if x.type == target else builder.trunc(x, target)
        else:
            x = (builder.zext if source in ("u8", "b1") else builder.sext)(x, target)
        if code in ("f16", "bf16"):
            x = self.target.round16(x, code)
        return Value(x, own)

    # --- memory -------------------------------------------------------------------------------

    def loaded(self, bits: Any, code: str) -> Value:
        """The carried value of what was read from memory."""
        builder = self.builder
        if code == "bf16":
            return Value(builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32), "f32")
        if code == "f16":
            return Value(self.target.from_half(bits), "f32")
        if code == "b1":
            return Value(builder.icmp_unsigned("!=", bits, I8(0)), "b1")
        return Value(bits, code)

    def storable(self, value: Value, code: str) -> Any:
        """The bits to write for a carried value that is already rounded to `code`."""
        builder = self.builder
        if code == "bf16":
            return builder.trunc(builder.lshr(builder.bitcast(value.ir, I32), I32(16)), I16)
        if code == "f16":
            return self.target.to_half(value.ir)
        return builder.zext(value.ir, I8) if code == "b1" else value.ir


@dataclass(frozen=True, slots=True)
class Parameters:
    """Kernel parameters in order: load pointers, store pointers, Consts, count, then numbers.

    The count is of elements where the loop has one axis, of groups of lanes where it has more.
    """

    codes: tuple[str, ...]  # "u64" for pointers, otherwise a type code
    loads: int
    stores: int
    consts: int

    @staticmethod
    def of(plan: Plan) -> Parameters:
        """The parameters of `plan`'s kernel."""
        index = "i64" if plan.wide else "i32"
        operands = [*plan.loads, *(operand for _, operand in plan.stores)]
        strides = sum(axis == STRIDED for operand in operands for axis in operand.axes)
        consts = [const_code(plan, k) for k in range(len(plan.consts))]
        codes = ["u64"] * len(operands) + consts + [index] * (plan.rank + strides)
        return Parameters(tuple(codes), len(plan.loads), len(plan.stores), len(consts))


def emit(
    plan: Plan, builder: ir.IRBuilder, target: Cuda | Cpu, index: Any, params: list[Any]
) -> None:
    """Emit the work of loop position `index` (a group of `plan.lanes` elements)."""
    _Emitter(plan, builder, target, params).emit(index)


class _Emitter:
    def __init__(
        self, plan: Plan, builder: ir.IRBuilder, target: Cuda | Cpu, params: list[Any]
    ) -> None:
        self.plan, self.builder, self.target = plan, builder, target
        layout = Parameters.of(plan)
        self.word = I64 if plan.wide or isinstance(target, Cpu) else I32
        cut = layout.loads + layout.stores
        self.pointers, rest = params[:cut], params[cut:]
        self.consts, rest = rest[: layout.consts], rest[layout.consts :]
        rest = [self._index(value) for value in rest]
        self.count, rest = rest[0], rest[1:]
        self.sizes, rest = rest[: plan.rank - 1], rest[plan.rank - 1 :]
        self.strides = iter(rest)
        self.element = Element(builder, target)

    def _index(self, value: Any) -> Any:
        if value.type == self.word:
            return value
        return self.builder.zext(value, self.word)  # never negative

    def emit(self, group: Any) -> None:
        plan, builder = self.plan, self.builder
        group = group if group.type == self.word else builder.trunc(group, self.word)
        if isinstance(self.target, Cpu):
            self._work(group)  # the loop around it knows its bounds
            return
        first = builder.mul(group, self.word(plan.lanes)) if plan.rank == 1 else group
        with builder.if_then(builder.icmp_unsigned("<", first, self.count)):
            self._work(group)

    def _work(self, group: Any) -> None:
        plan, builder = self.plan, self.builder
        operands = [*plan.loads, *(operand for _, operand in plan.stores)]
        walks = self._walks(group)
        offsets = [self._offset(operand, walks) for operand in operands]
        function = ast.parse(render(plan)).body[0]
        assert isinstance(function, ast.FunctionDef)
        consts = [Value(value, const_code(plan, k)) for k, value in enumerate(self.consts)]
        partial = plan.lanes > 1 and plan.rank == 1
        start = builder.mul(group, self.word(plan.lanes))
        if partial:
            full = builder.icmp_unsigned(
                "<=", builder.add(start, self.word(plan.lanes)), self.count
            )
        else:
            full = None
        reads = list(zip(plan.loads, self.pointers, offsets, strict=False))
        lanes = self._guarded(full, reads, start)
        results = [self.element.run(function, [*lane, *consts]) for lane in lanes]
        writes = list(
            zip(
                (op for _, op in plan.stores),
                self.pointers[len(plan.loads) :],
                offsets[len(plan.loads) :],
                strict=True,
            )
        )
        bits = [
            [self.element.storable(lane[k], operand.code) for lane in results]
            for k, (operand, _, _) in enumerate(writes)
        ]
        if full is None:
            for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                self._store(operand, pointer, offset, values)
            return
        with builder.if_else(full) as (then, otherwise):
            with then:
                for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                    self._store(operand, pointer, offset, values)
            with otherwise:
                for lane in range(plan.lanes):
                    position = builder.add(start, self.word(lane))
                    with builder.if_then(builder.icmp_unsigned("<", position, self.count)):
                        for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                            at = builder.add(offset, self.word(lane))
                            builder.store(values[lane], self._at(operand, pointer, at))

    def _walks(self, group: Any) -> list[Any]:
        """Position on each axis; on the innermost one counted in lanes."""
        builder, walks = self.builder, []
        for size in reversed(self.sizes):
            quotient = builder.udiv(group, size)
            walks.append(builder.sub(group, builder.mul(quotient, size)))
            group = quotient
        return [group, *reversed(walks)]

    def _offset(self, operand: Operand, walks: list[Any]) -> Any:
        """Element offset of an operand; called once each, in parameter order."""
        builder = self.builder
        offset = self.word(0)
        for axis, (how, walk) in enumerate(zip(operand.axes, walks, strict=True)):
            if how == BROADCAST:
                continue
            if how == UNIT:
                step = builder.mul(walk, self.word(self.plan.lanes))
            else:
                step = builder.mul(walk, next(self.strides))
            offset = step if axis == 0 else builder.add(offset, step)
        return offset

    def _at(self, operand: Operand, pointer: Any, offset: Any) -> Any:
        base = self.target.pointer(pointer, STORED[operand.code])
        return self.builder.gep(base, [offset])

    def _guarded(
        self, full: Any, reads: list[tuple[Operand, Any, Any]], start: Any
    ) -> list[list[Value]]:
        """Carried values of every load, per lane; lanes past the end read as zero."""
        lanes, builder = self.plan.lanes, self.builder
        repeated = [
            self._load_one(operand, pointer, offset) if operand.axes[-1] == BROADCAST else None
            for operand, pointer, offset in reads
        ]
        moving = [read for read, value in zip(reads, repeated, strict=True) if value is None]
        if full is None:
            bits = [self._load(*read) for read in moving]
        else:
            with builder.if_else(full) as (then, otherwise):
                with then:
                    fast = [self._load(*read) for read in moving]
                    fast_end = builder.block
                with otherwise:
                    slow = [[self._tail(*read, start, k) for k in range(lanes)] for read in moving]
                    slow_end = builder.block
            bits = []
            for whole, tail in zip(fast, slow, strict=True):
                merged = []
                for a, b in zip(whole, tail, strict=True):
                    phi = builder.phi(a.type)
                    phi.add_incoming(a, fast_end)
                    phi.add_incoming(b, slow_end)
                    merged.append(phi)
                bits.append(merged)
        moved = iter(bits)
        columns = []
        for (operand, _, _), value in zip(reads, repeated, strict=True):
            column = [value] * lanes if value is not None else next(moved)
            columns.append([self.element.loaded(item, operand.code) for item in column])
        return [[column[lane] for column in columns] for lane in range(lanes)]

    def _load_one(self, operand: Operand, pointer: Any, offset: Any) -> Any:
        return self.builder.load(self._at(operand, pointer, offset))

    def _tail(self, operand: Operand, pointer: Any, offset: Any, start: Any, lane: int) -> Any:
        """Element `lane` of the last, incomplete group; zero past the end."""
        builder = self.builder
        position = builder.add(start, self.word(lane))
        before = builder.block
        zero = ir.Constant(STORED[operand.code], 0)
        with builder.if_then(builder.icmp_unsigned("<", position, self.count)):
            value = self._load_one(operand, pointer, builder.add(offset, self.word(lane)))
            inside = builder.block
        phi = builder.phi(zero.type)
        phi.add_incoming(zero, before)
        phi.add_incoming(value, inside)
        return phi

    def _words(self, operand: Operand) -> tuple[int, int]:
        """(16-byte or smaller accesses, 4-byte words in each) for one group of lanes."""
        nbytes = self.plan.lanes * ITEMSIZE[operand.code]
        return max(1, nbytes // 16), min(4, nbytes // 4)

    def _load(self, operand: Operand, pointer: Any, offset: Any) -> list[Any]:
        lanes, builder = self.plan.lanes, self.builder
        if lanes == 1:
            return [self._load_one(operand, pointer, offset)]
        accesses, words = self._words(operand)
        each = lanes // accesses
        values: list[Any] = []
        for k in range(accesses):
            at = builder.add(offset, self.word(k * each))
            kind = STORED[operand.code]
            narrow = words and isinstance(kind, ir.IntType) and kind.width < 32
            vector = ir.VectorType(I32, words) if narrow else ir.VectorType(kind, each)
            place = builder.bitcast(self._at(operand, pointer, at), self._vector_pointer(vector))
            packed = builder.load(place, align=each * ITEMSIZE[operand.code])
            items = [builder.extract_element(packed, I32(k)) for k in range(vector.count)]
            values += self._unpacked(items, kind) if narrow else items
        return values

    def _store(self, operand: Operand, pointer: Any, offset: Any, values: list[Any]) -> None:
        lanes, builder = self.plan.lanes, self.builder
        if lanes == 1:
            builder.store(values[0], self._at(operand, pointer, offset))
            return
        accesses, words = self._words(operand)
        each = lanes // accesses
        for k in range(accesses):
            part = values[k * each : (k + 1) * each]
            kind: Any = part[0].type
            if words and isinstance(kind, ir.IntType) and kind.width < 32:
                part, kind = self._packed(part), I32
            vector = ir.Constant(ir.VectorType(kind, len(part)), ir.Undefined)
            for lane, value in enumerate(part):
                vector = builder.insert_element(vector, value, I32(lane))
            at = builder.add(offset, self.word(k * each))
            place = self._at(operand, pointer, at)
            place = builder.bitcast(place, self._vector_pointer(vector.type))
            builder.store(vector, place, align=each * ITEMSIZE[operand.code])

    def _unpacked(self, words: list[Any], kind: ir.IntType) -> list[Any]:
        """The 8- or 16-bit integers in 32-bit words; NVVM splits a load of 16-bit vectors."""
        builder, bits = self.builder, kind.width
        return [
            builder.trunc(builder.lshr(word, I32(place)), kind)
            for word in words
            for place in range(0, 32, bits)
        ]

    def _packed(self, values: list[Any]) -> list[Any]:
        """8- or 16-bit integers as 32-bit words, the first in the low bits."""
        builder, bits = self.builder, values[0].type.width
        words = []
        for k in range(0, len(values), 32 // bits):
            word = I32(0)
            for place, value in enumerate(values[k : k + 32 // bits]):
                wide = builder.zext(value, I32)
                word = builder.or_(word, builder.shl(wide, I32(place * bits)))
            words.append(word)
        return words

    def _vector_pointer(self, vector: ir.VectorType) -> Any:
        return vector.as_pointer(1) if isinstance(self.target, Cuda) else vector.as_pointer()


def cuda_index(builder: ir.IRBuilder) -> Any:
    """Global thread index as i64."""

    def register(name: str) -> Any:
        symbol = f"llvm.nvvm.read.ptx.sreg.{name}"
        function = builder.module.globals.get(symbol)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(I32, []), symbol)
        return builder.call(function, [])

    block = builder.zext(register("ctaid.x"), I64)
    thread = builder.zext(register("tid.x"), I64)
    return builder.add(builder.mul(block, I64(THREADS_PER_BLOCK)), thread)
