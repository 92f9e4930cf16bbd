"""Bodies: the language of machine code, from one Python function of 64-bit words to LLVM IR.

Words. There are assignments, arithmetic, comparisons (by word), `if`, `while`, `for` over `range`
and over tuples, `return`, and calls of each other, of C functions by their names (`C`) and of
pointers (`call_pointer`). A name that is no local means what it means in the namespace: a number
itself, any other object its address. `x[k]` is the word k places from the address x on.

Objects. A local that is annotated with a class that has slots reads an attribute without a new
reference, and assigns it as Python does; one that is annotated with tuple, list or dict, or what
is made of these, has items and a `len`. `int(x)` and `float(x)` are what C gets of a number.

References. What gives a new one is C's ("new"), a function that says `-> object`, a tuple display,
`kept(x)`. A local that is assigned one owns what it is assigned, and lets go of it when it is
assigned anew and when the function returns; so does an expression in whose middle one comes up.
What a function that says `-> object` returns is a new reference. A new reference that C does not
give, for there is an error, ends the function, which returns 0; but for `tried(call)`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .c import ITEMS, C
from .module import DOUBLE, INT, WORD, Module

_BIT = ir.IntType(1)


def write(module: Module, function: Callable[..., Any]) -> None:
    """Give the function that `module` declares its body."""
    _Body(module, function)


class _Body:
    """One function on its way to LLVM IR."""

    def __init__(self, module: Module, function: Callable[..., Any]) -> None:
        self.module = module
        self.ir = module.functions[function.__name__]
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.builder = ir.IRBuilder(self.ir.append_basic_block())
        self.places: dict[str, Any] = {}
        self.classes: dict[str, str] = {}  # by locals, as the namespace calls them
        self.loops: list[tuple[Any, Any]] = []  # (where `continue` goes, where `break` goes)
        self.gives = function.__name__ in module.giving
        for name in sorted(_stored(tree) | {arg.arg for arg in tree.args.args}):
            self.places[name] = self.builder.alloca(WORD, name=name)
        self.owners = self._owners(tree)
        self.held: dict[str, None] = {}  # those of them that may have one here, in order
        for name in self.owners:
            self.builder.store(WORD(0), self.places[name])
        for arg, value in zip(tree.args.args, self.ir.args, strict=True):
            self.builder.store(value, self.places[arg.arg])
            self._annotate(arg.arg, arg.annotation)
        assert not self.owners & {arg.arg for arg in tree.args.args}, "those are the caller's"
        self._run(tree.body)
        if not self._ended:
            self._return(WORD(0))

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
        if self._is_new(node.value):
            self._drop(self._new(node.value))
        elif not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _Assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        self._assign(target, node.value)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        assert isinstance(node.target, ast.Name) and node.value is not None
        self._annotate(node.target.id, node.annotation)
        self._assign(node.target, node.value)

    def _AugAssign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name)
        left = ast.Name(node.target.id, ast.Load())
        self._assign(node.target, ast.BinOp(left, node.op, node.value))

    def _If(self, node: ast.If) -> None:
        then, after = self._block(), self._block()
        otherwise = self._block() if node.orelse else after
        self.builder.cbranch(self._truth(node.test), then, otherwise)
        before, held = self.held, {} if node.orelse else self.held
        for block, body in ((then, node.body), (otherwise, node.orelse)):
            if body:
                self.held = dict(before)
                self.builder.position_at_end(block)
                self._run(body)
                if not self._ended:
                    self.builder.branch(after)
                    held = held | self.held
        self.held = held
        self.builder.position_at_end(after)

    def _While(self, node: ast.While) -> None:
        self._loop(node, lambda: self._truth(node.test), lambda: None)

    def _For(self, node: ast.For) -> None:
        """`for k in range(...)`, whose bounds stay what they are, and over the items of a tuple."""
        assert isinstance(node.target, ast.Name)
        builder, target, source = self.builder, node.target.id, node.iter
        start, ranged = WORD(0), isinstance(source, ast.Call)
        if isinstance(source, ast.Call):
            assert ast.unparse(source.func) == "range"
            *first, stop = map(self._word, source.args)
            start = first[0] if first else start
        else:
            assert self._class(source) is tuple, ast.unparse(source)
            stop = self._len(source)
        at = self._place()
        builder.store(start, at)

        def test() -> Any:
            return builder.icmp_signed("<", builder.load(at), stop)

        def begin() -> None:
            k = builder.load(at)
            builder.store(builder.add(k, WORD(1)), at)
            value = k if ranged else builder.load(self._item(source, k))
            builder.store(value, self.places[target])

        self._loop(node, test, begin)

    def _loop(
        self, node: ast.While | ast.For, holds: Callable[[], Any], begin: Callable[[], None]
    ) -> None:
        test, body, after = self._block(), self._block(), self._block()
        otherwise = self._block() if node.orelse else after
        self.held |= dict.fromkeys(sorted(_stored(node) & self.owners))
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.loops.append((test, after))
        self.builder.cbranch(holds(), body, otherwise)
        self.builder.position_at_end(body)
        begin()
        held = self.held
        self.held = dict(held)
        self._run(node.body)
        self.loops.pop()
        if not self._ended:
            self.builder.branch(test)
        # what the body has made besides its locals is there after any turn
        self.held = held | {name: None for name in self.places if name.startswith("?")}
        self.builder.position_at_end(otherwise)
        self._run(node.orelse)
        if node.orelse and not self._ended:
            self.builder.branch(after)
        self.builder.position_at_end(after)

    def _Break(self, node: ast.Break) -> None:
        self.builder.branch(self.loops[-1][1])

    def _Continue(self, node: ast.Continue) -> None:
        self.builder.branch(self.loops[-1][0])

    def _Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None or _is_zero(value):
            self._return(WORD(0))
        elif not self.gives:
            lost = self._is_new(value) or isinstance(value, ast.Name) and value.id in self.owners
            assert not lost, f"a new reference is lost: {ast.unparse(node)}"
            self._return(self._word(value))
        elif isinstance(value, ast.Name) and value.id in self.owners:
            word = self._word(value)
            self.held.pop(value.id, None)
            self._return(word)
        else:
            self._return(self._owned(value, failing=False))

    def _return(self, value: Any) -> None:
        for name in self.held:
            self._drop(self.builder.load(self.places[name]))
        self.builder.ret(value)

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

    def _assign(self, target: ast.expr, node: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id not in self.owners:
            self.builder.store(self._word(node), self.places[target.id])
        elif isinstance(target, ast.Name):
            value = self._owned(node)
            self._keep(target.id, value)
            if _is_zero(node):
                del self.held[target.id]
        elif isinstance(target, ast.Attribute):
            value = self._owned(node)
            place = self._slot(target)
            before = self.builder.load(place)
            self.builder.store(value, place)
            self._drop(before)
        elif not isinstance(target, ast.Subscript):
            raise NotImplementedError(ast.unparse(target))
        elif issubclass(self._class(target.value) or object, list):
            args = [self._word(target.value), self._word(target.slice), self._owned(node)]
            self._c("PyList_SetItem", args)
        else:
            own = self._class(target.value) is tuple  # a new one, whose items nothing was before
            value = self._owned(node) if own or self._is_new(node) else self._word(node)
            self.builder.store(value, self._item(target.value, self._word(target.slice)))

    # --- references ---

    def _owners(self, tree: ast.AST) -> set[str]:
        """The locals that are assigned new references in `tree`."""
        return {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and self._is_new(node.value)
        }

    def _is_new(self, node: ast.expr) -> bool:
        """Whether it is a reference of its own."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            return isinstance(node, ast.Tuple)
        name = node.func.id
        known = self.module.names.get(name)
        if isinstance(known, C):
            return known.result == "new"
        return name in self.module.giving or name in ("call_object", "kept", "tried")

    def _new(self, node: ast.expr, failing: bool = True) -> Any:
        """A reference of its own. failing: where an error has come instead, the function ends."""
        if isinstance(node, ast.Tuple):
            return self._tuple(node.elts)
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        name, args = node.func.id, node.args
        if name == "tried":
            return self._new(args[0], failing=False)
        if name == "kept":
            return self._owned(args[0])
        made = self._call(name, args)
        if failing and name not in self.module.giving:  # of which 0 may be no error
            self._end_without(made)
        return made

    def _tuple(self, items: list[ast.expr]) -> Any:
        assert not any(map(self._is_new, items)), "they would be lost without memory"
        made = self._c("PyTuple_New", [WORD(len(items))])
        self._end_without(made)
        for k, item in enumerate(items):
            place = self.builder.add(made, WORD(ITEMS + 8 * k))
            value = self._owned(item)
            self.builder.store(value, self.builder.inttoptr(place, WORD.as_pointer()))
        return made

    def _end_without(self, made: Any) -> None:
        """End the function where a new reference is 0."""
        with self.builder.if_then(self.builder.icmp_signed("==", made, WORD(0))):
            self._return(WORD(0))

    def _owned(self, node: ast.expr, failing: bool = True) -> Any:
        """The same of any expression, `kept` if need be."""
        if self._is_new(node):
            return self._new(node, failing)
        value = self._word(node)
        if not _is_zero(node):
            self._c("Py_IncRef", [value])
        return value

    def _keep(self, name: str, value: Any) -> None:
        """Let a local own a reference, in place of the one that it may have."""
        before = self.builder.load(self.places[name]) if name in self.held else None
        self.builder.store(value, self.places[name])
        self.held[name] = None
        if before is not None:
            self._drop(before)

    def _drop(self, value: Any) -> None:
        self._c("Py_DecRef", [value])

    def _place(self) -> Any:
        """Room for a word, which is 0 when the function begins."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(WORD)
            self.builder.store(WORD(0), place)
        return place

    def _slot(self, node: ast.Attribute) -> Any:
        assert isinstance(node.value, ast.Name)
        offset = self.module.offset(self.classes[node.value.id], node.attr)
        address = self.builder.add(self._word(node.value), WORD(offset))
        return self.builder.inttoptr(address, WORD.as_pointer())

    def _class(self, node: ast.expr) -> type | None:
        """Of what class an expression is said to be."""
        assert isinstance(node, ast.Name), ast.unparse(node)
        if node.id in self.places:
            return self.module.names[self.classes[node.id]] if node.id in self.classes else None
        return type(self.module.names[node.id])

    def _item(self, node: ast.expr, k: Any) -> Any:
        """Where item k of a tuple is, or the k-th word from an address on."""
        address = self._word(node)
        if self._class(node) is tuple:
            address = self.builder.add(address, WORD(ITEMS))
        address = self.builder.add(address, self.builder.shl(k, WORD(3)))
        return self.builder.inttoptr(address, WORD.as_pointer())

    # --- expressions ---

    def _word(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value.type == INT:
            return self.builder.sext(value, WORD)
        if value.type == _BIT:
            return self.builder.zext(value, WORD)
        return value

    def _truth(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value.type == _BIT:
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
            case ast.Subscript(value=items, slice=index):
                if issubclass(self._class(items) or object, list):
                    args = [self._word(items), self._word(index)]
                    return self._c("PyList_GetItem", args)
                return builder.load(self._item(items, self._word(index)))
            case _ if self._is_new(node):  # held until the function returns, or comes here again
                value = self._new(node)
                name = f"?{len(self.places)}"
                self.places[name] = self._place()
                if self.loops:
                    self.held[name] = None
                self._keep(name, value)
                return value
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
        result = self.builder.phi(_BIT)
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
        return self._c(name, [self._word(arg) for arg in args])

    def _c(self, name: str, args: list[Any]) -> Any:
        function = self.module.c(name)
        assert len(args) == len(function.args), name
        return self.builder.call(function, args)

    def _pointer(self, address: ast.expr, kind: ir.Type = WORD) -> Any:
        return self.builder.inttoptr(self._word(address), kind.as_pointer())

    def _load(self, address: ast.expr) -> Any:
        return self.builder.load(self._pointer(address))

    def _load32(self, address: ast.expr) -> Any:
        return self.builder.zext(self.builder.load(self._pointer(address, INT)), WORD)

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

    _call_object = _call_pointer

    def _borrowed(self, value: ast.expr) -> Any:
        return self._word(value)

    def _len(self, items: ast.expr) -> Any:
        kind = self._class(items)
        (name,) = (name for base, name in _SIZES.items() if issubclass(kind or object, base))
        return self._c(name, [self._word(items)])

    def _int(self, number: ast.expr) -> Any:
        return self._c("PyLong_AsLong", [self._word(number)])

    def _float(self, number: ast.expr) -> Any:
        return self._c("PyFloat_AsDouble", [self._word(number)])

    def _room(self, count: ast.expr) -> Any:
        """The address of some words that live until the function returns."""
        assert isinstance(count, ast.Constant)
        with self.builder.goto_entry_block():
            place = self.builder.alloca(WORD, count.value)
        return self.builder.ptrtoint(place, WORD)


def _stored(tree: ast.AST) -> set[str]:
    """The locals that are assigned to in `tree`."""
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}  # fmt: skip


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 0


_BUILTINS = {"load", "load32", "store_double", "store_float", "reciprocal", "borrowed",
             "call_pointer", "call_object", "room", "len", "int", "float"}  # fmt: skip
_SIZES = {tuple: "PyTuple_Size", list: "PyList_Size", dict: "PyDict_Size"}
