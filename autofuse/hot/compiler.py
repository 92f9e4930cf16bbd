"""The compiler of machine code: from Python functions of 64-bit words to an object file.

The subset: assignments, arithmetic, comparisons (by word), `if`, `while`, `return`, and calls of
each other, of C functions by their names (`C`) and of pointers (`call_pointer`). A name that is no
local means what it means in the given namespace: a number itself, any other object its address. A
local that is annotated with a class that has slots reads an attribute without a new reference, and
assigns it as Python does. It takes 0.2 to 0.3 s, most of it in Python; nothing here knows what it
is used for.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from ..kernel.llvm import parsed, target_machine
from .c import GIVEN, C
from .code import Code, address_of, data_symbol, entry_symbol, name_symbol, offset_of

WORD, INT, DOUBLE = ir.IntType(64), ir.IntType(32), ir.DoubleType()
_KINDS = {"word": WORD, "int": INT, "double": DOUBLE, "void": ir.VoidType()}
# LLVM may not take it for another object than any other; a movabs loads its address, as a constant
_ANYWHERE = ir.ArrayType(ir.IntType(8), 0)

# bytes of bytecode below which a function becomes a part of those that call it: a chain of 20
# operators takes 7.1 us and not 7.5, the import 15 ms more (CPU, 3.12)
_SMALL = 250


def compiled(
    functions: Sequence[Callable[..., Any]], names: Mapping[str, Any], entries: Sequence[str]
) -> Code:
    """The object code of `functions`, and of the k-th of `entries` with one word before its
    arguments, which data_symbol(k) stands for."""
    module = _Module(functions, names)
    machine = target_machine(opt=0)  # 35 ms; 100 to 200 otherwise, for code that C's calls fill
    text = [str(module.ir)]
    for k, name in enumerate(entries):
        words = ", ".join(["i64"] * (len(module.functions[name].args) - 1))
        passed = "".join(f", i64 %{n}" for n in range(words.count("i64")))
        first = f"ptrtoint (ptr @{data_symbol(k)} to i64)"
        text.append(f"@{data_symbol(k)} = external global {_ANYWHERE}\n")
        call = f"%r = tail call i64 @{name}(i64 {first}{passed})"
        text.append(f"define i64 @{entry_symbol(k)}({words}) {{\n  {call}\n  ret i64 %r\n}}\n")
    optimized = parsed("".join(text), machine)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(1))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.run(optimized, builder)
    return Code(machine.emit_object(optimized), tuple(module.named), tuple(module.slots))


class _Module:
    """Functions as LLVM IR."""

    def __init__(self, functions: Sequence[Callable[..., Any]], names: Mapping[str, Any]) -> None:
        self.names = names
        self.named: list[str] = []
        self.slots: dict[tuple[str, str, int], None] = {}
        self._symbols: dict[int, Any] = {}  # by address: of two names for one object one is used
        self.ir = ir.Module("autofuse")
        self.functions = {f.__name__: self._declared(f) for f in functions}
        for function in functions:
            _Body(self, function)

    def _declared(self, function: Callable[..., Any]) -> ir.Function:
        arity = function.__code__.co_argcount
        made = ir.Function(self.ir, ir.FunctionType(WORD, [WORD] * arity), function.__name__)
        if len(function.__code__.co_code) < _SMALL:
            made.attributes.add("alwaysinline")
        return made

    def word(self, name: str) -> Any:
        """What a name of the namespace stands for, as a constant."""
        value = self.names[name]
        assert value is not GIVEN
        if value.__class__ is int:
            return WORD(value)
        symbol = self._symbols.get(address_of(value))
        if symbol is None:
            self.named.append(name)
            symbol = ir.GlobalVariable(self.ir, _ANYWHERE, name_symbol(name))
            self._symbols[address_of(value)] = symbol
        return symbol.ptrtoint(WORD)

    def offset(self, cls: str, slot: str) -> int:
        """Where instances of the class of that name have the slot."""
        offset = offset_of(self.names[cls], slot)
        self.slots[cls, slot, offset] = None
        return offset


class _Body:
    """One function on its way to LLVM IR."""

    def __init__(self, module: _Module, function: Callable[..., Any]) -> None:
        self.module = module
        self.ir = module.functions[function.__name__]
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.builder = ir.IRBuilder(self.ir.append_basic_block())
        self.places: dict[str, Any] = {}
        self.classes: dict[str, str] = {}  # by locals, as the namespace calls them
        self.loops: list[tuple[Any, Any]] = []  # (where `continue` goes, where `break` goes)
        names = {node.id for node in ast.walk(tree)
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}  # fmt: skip
        for name in sorted(names | {arg.arg for arg in tree.args.args}):
            self.places[name] = self.builder.alloca(WORD, name=name)
        for arg, value in zip(tree.args.args, self.ir.args, strict=True):
            self.builder.store(value, self.places[arg.arg])
            self._annotate(arg.arg, arg.annotation)
        self._run(tree.body)
        if not self._ended:
            self.builder.ret(WORD(0))

    # --- statements ---

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            write = getattr(self, f"_{type(statement).__name__}", None)
            if write is None:
                raise NotImplementedError(ast.unparse(statement))
            write(statement)
            if self._ended:
                return

    def _Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _Assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        self._assign(target, self._word(node.value))

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        assert isinstance(node.target, ast.Name) and node.value is not None
        self._annotate(node.target.id, node.annotation)
        self._assign(node.target, self._word(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name)
        left = ast.Name(node.target.id, ast.Load())
        self._assign(node.target, self._binary(node.op, left, node.value))

    def _If(self, node: ast.If) -> None:
        then, after = self._block(), self._block()
        otherwise = self._block() if node.orelse else after
        self.builder.cbranch(self._truth(node.test), then, otherwise)
        for block, body in ((then, node.body), (otherwise, node.orelse)):
            if body:
                self.builder.position_at_end(block)
                self._run(body)
                if not self._ended:
                    self.builder.branch(after)
        self.builder.position_at_end(after)

    def _While(self, node: ast.While) -> None:
        test, body, after = self._block(), self._block(), self._block()
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(self._truth(node.test), body, after)
        self.builder.position_at_end(body)
        self.loops.append((test, after))
        self._run(node.body)
        self.loops.pop()
        if not self._ended:
            self.builder.branch(test)
        self.builder.position_at_end(after)

    def _Break(self, node: ast.Break) -> None:
        self.builder.branch(self.loops[-1][1])

    def _Continue(self, node: ast.Continue) -> None:
        self.builder.branch(self.loops[-1][0])

    def _Return(self, node: ast.Return) -> None:
        self.builder.ret(WORD(0) if node.value is None else self._word(node.value))

    @property
    def _ended(self) -> bool:
        block = self.builder.block
        return block is not None and block.is_terminated

    def _block(self) -> Any:
        return self.ir.append_basic_block()

    def _annotate(self, name: str, annotation: ast.expr | None) -> None:
        if isinstance(annotation, ast.Name):
            if isinstance(self.module.names.get(annotation.id), type):
                self.classes[name] = annotation.id

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.builder.store(value, self.places[target.id])
            return
        assert isinstance(target, ast.Attribute)
        place = self._slot(target)
        before = self.builder.load(place)
        self._c("Py_IncRef", C("void", 1), [value])
        self.builder.store(value, place)
        self._c("Py_DecRef", C("void", 1), [before])

    def _slot(self, node: ast.Attribute) -> Any:
        assert isinstance(node.value, ast.Name)
        offset = self.module.offset(self.classes[node.value.id], node.attr)
        address = self.builder.add(self._word(node.value), WORD(offset))
        return self.builder.inttoptr(address, WORD.as_pointer())

    # --- expressions ---

    def _word(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value.type == INT:
            return self.builder.sext(value, WORD)
        if value.type == ir.IntType(1):
            return self.builder.zext(value, WORD)
        return value

    def _truth(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value.type == ir.IntType(1):
            return value
        return self.builder.icmp_signed("!=", value, value.type(0))

    def _value(self, node: ast.expr) -> Any:
        builder = self.builder
        match node:
            case ast.Constant(value=bool() | None as value):
                return self.module.word(str(value))
            case ast.Constant(value=int(value)):
                return WORD(value)
            case ast.Name(id=name):
                if name in self.places:
                    return builder.load(self.places[name])
                return self.module.word(name)
            case ast.Attribute():
                return builder.load(self._slot(node))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return builder.not_(self._truth(operand))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return builder.not_(self._word(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return builder.neg(self._word(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, left, right)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                sign = {"Is": "==", "IsNot": "!=", "Eq": "==", "NotEq": "!=", "Lt": "<",
                        "LtE": "<=", "Gt": ">", "GtE": ">="}[type(op).__name__]  # fmt: skip
                a, b = self._word(left), self._word(right)
                if a.type == DOUBLE:
                    return builder.fcmp_ordered(sign, a, b)
                return builder.icmp_signed(sign, a, b)
            case ast.BoolOp(op=op, values=values):
                return self._shortcut(isinstance(op, ast.And), values)
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._call(name, args)
        raise NotImplementedError(ast.unparse(node))

    def _binary(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Any:
        make = {"Add": "add", "Sub": "sub", "Mult": "mul", "BitAnd": "and_", "BitOr": "or_",
                "LShift": "shl", "RShift": "ashr"}[type(op).__name__]  # fmt: skip
        return getattr(self.builder, make)(self._word(left), self._word(right))

    def _shortcut(self, every: bool, values: list[ast.expr]) -> Any:
        """`and` or `or`, of truths."""
        end = self._block()
        edges = []
        for k, value in enumerate(values):
            truth = self._truth(value)
            edges.append((truth, self.builder.block))
            if k + 1 == len(values):
                self.builder.branch(end)
                break
            further = self._block()
            self.builder.cbranch(truth, *((further, end) if every else (end, further)))
            self.builder.position_at_end(further)
        self.builder.position_at_end(end)
        result = self.builder.phi(ir.IntType(1))
        for truth, block in edges:
            result.add_incoming(truth, block)
        return result

    def _call(self, name: str, args: list[ast.expr]) -> Any:
        builder = self.builder
        if name in _BUILTINS:
            return getattr(self, f"_{name}")(*args)
        known = self.module.functions.get(name)
        if known is not None:
            return builder.call(known, [self._word(arg) for arg in args])
        return self._c(name, self.module.names[name], [self._word(arg) for arg in args])

    def _c(self, name: str, kind: C, args: list[Any]) -> Any:
        assert len(args) == kind.arity, name
        function = self.module.ir.globals.get(name)
        if function is None:
            if not hasattr(ctypes.pythonapi, name):
                raise NotImplementedError(f"Python has no function {name}")
            signature = ir.FunctionType(_KINDS[kind.result], [WORD] * kind.arity)
            function = ir.Function(self.module.ir, signature, name)
        return self.builder.call(function, args)

    def _pointer(self, address: ast.expr, kind: ir.Type = WORD) -> Any:
        return self.builder.inttoptr(self._word(address), kind.as_pointer())

    def _load(self, address: ast.expr) -> Any:
        return self.builder.load(self._pointer(address))

    def _load32(self, address: ast.expr) -> Any:
        return self.builder.zext(self.builder.load(self._pointer(address, INT)), WORD)

    def _store(self, address: ast.expr, value: ast.expr) -> Any:
        return self.builder.store(self._word(value), self._pointer(address))

    def _store_double(self, address: ast.expr, value: ast.expr) -> Any:
        return self.builder.store(self._value(value), self._pointer(address, DOUBLE))

    def _store_float(self, address: ast.expr, value: ast.expr) -> Any:
        narrow = self.builder.fptrunc(self._value(value), ir.FloatType())
        return self.builder.store(narrow, self._pointer(address, ir.FloatType()))

    def _reciprocal(self, value: ast.expr) -> Any:
        return self.builder.fdiv(DOUBLE(1.0), self._value(value))

    def _call_pointer(self, address: ast.expr, *args: ast.expr) -> Any:
        signature = ir.FunctionType(WORD, [WORD] * len(args))
        function = self.builder.inttoptr(self._word(address), signature.as_pointer())
        return self.builder.call(function, [self._word(arg) for arg in args])

    def _room(self, count: ast.expr) -> Any:
        """The address of some words that live until the function returns."""
        assert isinstance(count, ast.Constant)
        with self.builder.goto_entry_block():
            place = self.builder.alloca(WORD, count.value)
        return self.builder.ptrtoint(place, WORD)


_BUILTINS = {"load", "load32", "store", "store_double", "store_float", "reciprocal",
             "call_pointer", "room"}  # fmt: skip
