"""Object code: compiled functions before they are linked, as every process may have them.

What differs from process to process stands in it as symbols: addresses of objects that functions
name, of C functions, and of what entries are given. The rest decides its key, or is looked at again
(`Code.fits`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .c import Address, C

# symbols: from where the words are that entries get, and the addresses of functions and entries
DATA, ADDRESSES = "data", "addresses"


@dataclass(frozen=True, slots=True)
class Code:
    """An object file, and what of a namespace it was compiled with."""

    binary: bytes
    names: tuple[str, ...]  # those with a `name_symbol`
    slots: tuple[tuple[str, str, int], ...]  # the name of a class, a slot, and where it is

    def to_bytes(self) -> bytes:
        return json.dumps([self.names, self.slots]).encode() + b"\n" + self.binary

    @classmethod
    def from_bytes(cls, data: bytes) -> Code:
        line, _, binary = data.partition(b"\n")
        names, slots = json.loads(line)
        return cls(binary, tuple(names), tuple(map(tuple, slots)))

    def fits(self, names: Mapping[str, Any]) -> bool:
        """Whether classes have their slots where they were."""
        return all(offset_of(names[cls], slot) == offset for cls, slot, offset in self.slots)


def key_of(
    functions: Sequence[Callable[..., Any]],
    names: Mapping[str, Any],
    entries: Sequence[tuple[str, int]],
    facts: Sequence[str],
) -> str:
    """Under what Code stays on disk; `facts` decide what a compiler makes of a source text.

    Of functions that is what runs here: their text may have been written anew since.
    """
    parts, used = [*facts, *map(str, entries)], {"None", "True", "False"}
    for function in functions:
        code = function.__code__
        used.update(code.co_names)
        says = (code.co_firstlineno, code.co_code, code.co_consts, code.co_names, code.co_varnames)
        parts.append(f"{function.__name__} {says}")
    firsts: dict[int, str] = {}
    for name in sorted(used & names.keys()):
        value = names[name]
        if value.__class__ is int:
            parts.append(f"{name}={value}")
        elif isinstance(value, C):
            parts.append(f"{name} takes {value.arity} gives {value.result}")
        else:  # two names of one object have one symbol
            parts.append(f"{name} is {firsts.setdefault(address_of(value), name)}")
    return hashlib.sha256("\0".join(("object code", *parts)).encode()).hexdigest()


def address_of(value: object) -> int:
    """What stands in machine code for an object: its address, of an Address the number."""
    return int(value) if isinstance(value, Address) else id(value)


def name_symbol(name: str) -> str:
    """What the object file calls the address of what a name stands for."""
    return f"name.{name}"


def offset_of(cls: type, slot: str) -> int:
    """Where an instance of `cls` holds the reference that is its attribute `slot`."""
    instance, marker = cls.__new__(cls), object()
    descriptor = cls.__dict__[slot]
    descriptor.__set__(instance, marker)
    words = (ctypes.c_uint64 * (cls.__basicsize__ // 8)).from_address(id(instance))
    found = [8 * k for k, word in enumerate(words) if word == id(marker)]
    descriptor.__delete__(instance)
    if len(found) != 1:
        raise NotImplementedError(f"{cls.__name__}.{slot} is not at one place of its instances")
    return found[0]
