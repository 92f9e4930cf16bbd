"""A module of machine code: the functions that it declares, and what names mean in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from . import c
from .c import GIVEN, C
from .code import address_of, name_symbol, offset_of

WORD, INT, DOUBLE = ir.IntType(64), ir.IntType(32), ir.DoubleType()
_KINDS = {"word": WORD, "int": INT, "double": DOUBLE, "new": WORD, "void": ir.VoidType()}
# LLVM may not take it for another object than any other; a movabs loads its address, as a constant
ANYWHERE = ir.ArrayType(ir.IntType(8), 0)

# bytes of bytecode below which a function becomes a part of those that call it: a chain of 20
# operators takes 7.1 us and not 7.5, the import 15 ms more (CPU, 3.12)
_SMALL = 250
# what stands beside a way of few instructions, which would save the registers that this needs
_APART = "_beside"


class Module:
    """Functions of a namespace as LLVM IR, which `body` fills."""

    def __init__(self, functions: Sequence[Callable[..., Any]], names: Mapping[str, Any]) -> None:
        self.names = names
        self.named: list[str] = []  # names of objects whose addresses stand in the code
        self.slots: dict[tuple[str, str, int], None] = {}  # as `Code.slots`
        self._symbols: dict[int, Any] = {}  # by address: of two names for one object one is used
        self.ir = ir.Module("autofuse")
        self.functions = {f.__name__: self._declared(f) for f in functions}
        # functions that give new references, not words
        self.giving = {f.__name__ for f in functions
                       if f.__annotations__.get("return") in ("object", object)}  # fmt: skip

    def _declared(self, function: Callable[..., Any]) -> ir.Function:
        arity = function.__code__.co_argcount
        made = ir.Function(self.ir, ir.FunctionType(WORD, [WORD] * arity), function.__name__)
        apart = function.__name__.endswith(_APART)
        if len(function.__code__.co_code) < _SMALL and not apart:
            made.attributes.add("alwaysinline")
        return made

    def c(self, name: str) -> ir.Function:
        """The C function of that name, as `c` lists it."""
        function = self.ir.globals.get(name)
        if function is None:
            if not hasattr(ctypes.pythonapi, name):
                raise NotImplementedError(f"Python has no function {name}")
            kind: C = vars(c)[name]
            signature = ir.FunctionType(_KINDS[kind.result], [WORD] * kind.arity)
            function = ir.Function(self.ir, signature, name)
        return function

    def word(self, name: str) -> Any:
        """What a name of the namespace stands for, as a constant."""
        value = self.names[name]
        assert value is not GIVEN
        if value.__class__ is int:
            return WORD(value)
        symbol = self._symbols.get(address_of(value))
        if symbol is None:
            self.named.append(name)
            symbol = ir.GlobalVariable(self.ir, ANYWHERE, name_symbol(name))
            self._symbols[address_of(value)] = symbol
        return symbol.ptrtoint(WORD)

    def offset(self, cls: str, slot: str) -> int:
        """Where instances of the class of that name have the slot."""
        offset = offset_of(self.names[cls], slot)
        self.slots[cls, slot, offset] = None
        return offset
