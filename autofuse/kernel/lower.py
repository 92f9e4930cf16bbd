"""Lowering: from the statements of an element function to LLVM IR, one lane at a time.

Every type is chosen here: nothing becomes float64 by a Python literal. Knows the kernel language
and the primitives of a target; nothing of memory, indices or torch.
"""

from __future__ import annotations

import ast
import copy
import struct
import sys
from functools import reduce
from operator import add, mul, sub, truediv
from typing import Any

from llvmlite import ir

from .source import carried
from .targets import CARRIED, F32, F64, I8, I16, I32, I64, STORED, Cpu, Cuda, Value

_COMPARE = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">="}
_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "rem",
    ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "shr",
}  # fmt: skip
Literal = int | float


class Folded(float):
    """An expression of literals; float32 kernels fold theirs in float32, as a C++ compiler does."""

    single: float

    @classmethod
    def of(cls, operator: ast.operator, a: Literal, b: Literal) -> Folded:
        compute = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}[type(operator)]
        folded = cls(compute(a, b))
        folded.single = _single(compute(_single(a), _single(b)))
        return folded


def _single(value: Literal) -> float:
    value = value.single if isinstance(value, Folded) else value
    return struct.unpack("f", struct.pack("f", value))[0]


def _half(value: Literal, code: str) -> int | None:
    """The bits of a literal as float16 or bfloat16, None if it is neither."""
    single = "f" if code == "bf16" else "e"
    try:
        packed = struct.pack(single, value)
    except OverflowError:
        return None
    (back,) = struct.unpack(single, packed)
    bits = int.from_bytes(packed, sys.byteorder)
    if back != value or (code == "bf16" and bits & 0xFFFF):
        return None
    return bits >> 16 if code == "bf16" else bits


class Element:
    """Lowers the statements of an element function, for one lane or a pair of lanes at a time."""

    def __init__(self, builder: ir.IRBuilder, target: Cuda | Cpu) -> None:
        self.builder, self.target = builder, target
        self.lanes: list[dict[str, Value]] = []  # the named values of each lane
        self.names: dict[str, Value] = {}  # those of the lane at work
        self.stored: dict[str, str] = {}  # the type that the value of a name is rounded to

    def run(self, function: ast.FunctionDef, lanes: list[list[Value]]) -> list[list[Value]]:
        """What `function` returns for the arguments of one lane or of two."""
        params = [arg.arg for arg in function.args.args]
        self.lanes = [dict(zip(params, args, strict=True)) for args in lanes]
        self.stored = {arg.arg: arg.annotation.id for arg in function.args.args}  # type: ignore[union-attr]
        for statement in function.body:
            match statement:
                case ast.AnnAssign(
                    target=ast.Name(id=name), annotation=ast.Name(id=code), value=ast.expr() as tree
                ):
                    self.name(name, self.op(tree, code), code)
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Call(ast.Name(id=code), [tree])
                ) if code in STORED:
                    self.name(name, self.rounded(tree, code), code)
                case ast.Assign(targets=[ast.Name(id=name)], value=tree):
                    self.name(name, self.each(tree, "f32"))
                case ast.Return(value=value):
                    results = value.elts if isinstance(value, ast.Tuple) else [value]
                    return [[names[result.id] for result in results] for names in self.lanes]  # type: ignore[union-attr]
                case _:
                    raise AssertionError(f"not part of the kernel language: {ast.dump(statement)}")
        raise AssertionError("an element function returns")

    def name(self, name: str, values: list[Value], code: str | None = None) -> None:
        """Give the values of the lanes a name, and the type that they are rounded to."""
        for names, value in zip(self.lanes, values, strict=True):
            names[name] = value
        if code is not None:
            self.stored[name] = code

    def each(self, tree: ast.expr, code: str, exact: bool = False) -> list[Value]:
        """`tree` in every lane; literals are of type `code`."""
        values = []
        for names in self.lanes:
            self.names = names
            values.append(self.typed(self.eval(tree, exact), code))
        return values

    def op(self, tree: ast.expr, code: str) -> list[Value]:
        """One op: a lone + - * is exact; anything else contracts within, and ends here."""
        lone = (
            isinstance(tree, ast.BinOp)
            and isinstance(tree.op, (ast.Add, ast.Sub, ast.Mult))
            and isinstance(tree.left, ast.Name)
            and isinstance(tree.right, ast.Name)
        )
        # rounding again would lose the sign of a NaN
        if not isinstance(tree, ast.Constant) and self.selects(tree, code):
            return self.each(tree, code)
        values = self.rounded(tree, code, lone)
        if values[0].floating and code not in ("f16", "bf16") and not lone:
            values = [Value(self.target.barrier(value.ir), value.code) for value in values]
        return values

    def rounded(self, tree: ast.expr, code: str, exact: bool = False) -> list[Value]:
        """`tree` in every lane, as type `code`."""
        if len(self.lanes) == 1 or not self.target.pairs(code):
            return [self.convert(value, code) for value in self.each(tree, carried(code), exact)]
        assert isinstance(self.target, Cuda)
        tree = _Roundings(self).visit(copy.deepcopy(tree))
        match tree:
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() as op, left=left, right=right):
                pass
            case ast.UnaryOp(op=ast.USub(), operand=right):
                op, left = ast.Mult(), ast.Constant(-1)
            case _:
                op, left, right = None, tree, tree
        if op is not None and self.packs(left, code) and self.packs(right, code):
            name = _BINARY[type(op)]
            word = self.target.pair(name, self.packed(left, code), self.packed(right, code), code)
        else:
            low, high = (
                self.convert(value, carried(code)) for value in self.each(tree, carried(code))
            )
            word = self.target.round_pair(low.ir, high.ir, code)
        high = self.builder.lshr(word, I32(16))
        return [self.loaded(self.builder.trunc(half, I16), code) for half in (word, high)]

    def packs(self, tree: ast.expr, code: str) -> bool:
        """Whether the value of `tree` is one of type `code`, exactly."""
        match tree:
            case ast.Constant(value=int() | float() as value):
                return _half(value, code) is not None
            case ast.Name(id=name):
                return self.stored.get(name) == code
        return False

    def packed(self, tree: ast.expr, code: str) -> Any:
        """The 16 bits of `tree` in two lanes, as one word."""
        if isinstance(tree, ast.Constant):
            assert isinstance(tree.value, (int, float))
            half = _half(tree.value, code)
            assert half is not None
            return I32(half << 16 | half)
        low, high = (
            self.builder.zext(self.storable(value, code), I32) for value in self.each(tree, code)
        )
        return self.builder.or_(low, self.builder.shl(high, I32(16)))

    def selects(self, tree: ast.expr, code: str) -> bool:
        """Whether the value of `tree` is one of others that are rounded to `code`."""
        match tree:
            case ast.Name(id=name):
                return self.stored.get(name) == code
            case ast.Constant(value=int() | float() as value):
                return code in ("f16", "bf16") and _half(value, code) is not None
            case ast.IfExp():
                return self.selects(tree.body, code) and self.selects(tree.orelse, code)
            case ast.Call(func=ast.Name(id="fmax" | "fmin"), args=args):
                return all(self.selects(arg, code) for arg in args)
            case ast.Call(func=ast.Name(id=name)):  # rounded inside
                return name == code
        return False

    def eval(self, tree: ast.expr, exact: bool = False) -> Value | Literal:
        match tree:
            case ast.Constant(value=value):
                assert type(value) in (int, float)
                return value  # type: ignore[return-value]
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
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
                return Value(reduce(join, parts), "b1")
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
            return Folded.of(tree.op, a, b)
        a, b = self.unify(a, b)
        builder, name = self.builder, _BINARY[type(tree.op)]
        if name in ("div", "rem") and not a.floating:
            return self.divided(name, a, b)
        if name in ("shl", "shr"):
            return self.shifted(name, a, b)
        if not a.floating:
            return Value(getattr(builder, name)(a.ir, b.ir), a.code)
        if exact:
            return Value(self.target.exact(name, a, b), a.code)
        return Value(getattr(builder, f"f{name}")(a.ir, b.ir), a.code)

    def divided(self, name: str, a: Value, b: Value) -> Value:
        """C's `/` or `%`, in int or wider, as C computes them."""
        wide = "i64" if a.code == "i64" else "i32"
        x, y = (self.convert(value, wide).ir for value in (a, b))
        return self.convert(Value(self.target.divide(name, x, y), wide), a.code)

    def shifted(self, name: str, a: Value, b: Value) -> Value:
        """torch's shifts: by less than nothing or by all the bits, none or the sign is left."""
        builder, bits = self.builder, a.ir.type.width
        signed = a.code != "u8"
        most = bits - 1 if signed and name == "shr" else bits
        last = ir.Constant(b.ir.type, bits - 1)
        inside = builder.icmp_unsigned("<", b.ir, ir.Constant(b.ir.type, most))
        by = builder.select(inside, b.ir, last)
        if name == "shr" and signed:
            return Value(builder.ashr(a.ir, by), a.code)
        shifted = (builder.shl if name == "shl" else builder.lshr)(a.ir, by)
        return Value(builder.select(inside, shifted, ir.Constant(a.ir.type, 0)), a.code)

    def compare(self, tree: ast.Compare) -> Value:
        a, b = self.unify(self.eval(tree.left), self.eval(tree.comparators[0]))
        sign = _COMPARE[type(tree.ops[0]).__name__]
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
        if name == "place":  # of an operand, which is not read for it
            (operand,) = args
            assert isinstance(operand, Value) and operand.place is not None
            return self.convert(Value(operand.place, f"i{operand.place.type.width}"), "i64")
        if name == "beyond":
            (operand,) = args
            assert isinstance(operand, Value) and operand.beyond is not None
            return Value(operand.beyond, "b1")
        if name in STORED:
            return self.convert(self.typed(args[0], carried(name)), name)
        if name in ("horner", "chebyshev"):
            return getattr(self, name)(args[0], args[1:])
        code = next(arg.code for arg in args if isinstance(arg, Value))
        typed = [self.typed(arg, code) for arg in args]
        if name == "clip":  # std::min(std::max(x, low), high) of hardswish and hardsigmoid
            builder, (x, low, high) = self.builder, (arg.ir for arg in typed)
            x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
            return Value(builder.select(builder.fcmp_ordered("<", high, x), high, x), code)
        return Value(self.target.call(name, typed), code)

    def horner(self, x: Value, coefficients: list[Literal]) -> Value:
        """A polynomial, the highest power first."""
        first, *rest = (self.typed(c, x.code).ir for c in coefficients)
        for coefficient in rest:
            first = self.builder.fadd(self.builder.fmul(first, x.ir), coefficient)
        return Value(first, x.code)

    def chebyshev(self, x: Value, coefficients: list[Literal]) -> Value:
        """A Chebyshev series, the highest degree first, by Clenshaw's recurrence."""
        code = x.code
        b1, c, *rest = (self.typed(c, code) for c in coefficients)
        b0, b2 = self.fma(x, b1, c), b1
        for c in rest:  # ptxas contracts the product with the difference, NVVM does not
            step = self.fma(x, b0, Value(self.negated(b1), code))
            b0, b1, b2 = Value(self.builder.fadd(step.ir, c.ir), code), b0, b1
        half = self.typed(0.5, code).ir
        return Value(self.builder.fmul(half, self.builder.fsub(b0.ir, b2.ir)), code)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return Value(self.target.call("fma", [a, b, c]), a.code)

    def truth(self, tree: ast.expr) -> Any:
        value = self.eval(tree)
        assert isinstance(value, Value) and value.code == "b1"
        return value.ir

    def typed(self, value: Value | Literal, code: str) -> Value:
        if isinstance(value, Value):
            return value
        kind = CARRIED[code]
        if code == "f32" and isinstance(value, Folded):
            value = value.single
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
            differs = builder.fcmp_unordered if value.floating else builder.icmp_unsigned
            x = differs("!=", x, zero)
        elif value.floating and floating:
            x = builder.fpext(x, target) if target == F64 else self.target.narrowed(x)
        elif value.floating:
            wide = I64 if own in ("i64", "u8") else I32
            x = builder.fptosi(x, wide)
            x = x if wide == target else builder.trunc(x, target)
        elif floating:
            unsigned = source in ("u8", "b1")
            x = builder.zext(x, I32) if source == "b1" else x
            convert = builder.uitofp if unsigned else builder.sitofp
            # LLVM and ptxas know some integers (x == x), and would compute what follows their way
            x = convert(self.target.opaque(x), target)
        elif x.type.width >= target.width:
            x = x if x.type == target else builder.trunc(x, target)
        else:
            x = (builder.zext if source in ("u8", "b1") else builder.sext)(x, target)
        if code in ("f16", "bf16"):
            return self.target.round16(x, code)
        return Value(x, own)

    # --- memory -------------------------------------------------------------------------------

    def loaded(self, bits: Any, code: str) -> Value:
        """The carried value of what was read from memory."""
        builder = self.builder
        if code == "bf16":
            word = builder.shl(builder.zext(bits, I32), I32(16))
            return Value(builder.bitcast(word, F32), "f32", bits)
        if code == "f16":
            return Value(self.target.from_half(bits), "f32", bits)
        if code == "b1":
            return Value(builder.icmp_unsigned("!=", bits, I8(0)), "b1")
        return Value(bits, code)

    def storable(self, value: Value, code: str) -> Any:
        """The bits to write for a carried value that is already rounded to `code`."""
        builder = self.builder
        if value.bits is not None:
            return value.bits
        if code == "bf16":
            return builder.trunc(builder.lshr(builder.bitcast(value.ir, I32), I32(16)), I16)
        if code == "f16":
            return self.target.to_half(value.ir)
        return builder.zext(value.ir, I8) if code == "b1" else value.ir


class _Roundings(ast.NodeTransformer):
    """Gives the 16-bit roundings inside an expression names."""

    def __init__(self, element: Element) -> None:
        self.element = element

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        if not self.element.target.pairs(node.func.id):
            return self.generic_visit(node)  # type: ignore[return-value]
        name = f"{node.func.id}({ast.unparse(node.args[0])})"
        values = self.element.rounded(node.args[0], node.func.id)
        self.element.name(name, values, node.func.id)
        return ast.Name(name, ast.Load())
