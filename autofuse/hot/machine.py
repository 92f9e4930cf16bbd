"""Machine code: functions in the language of `body`, linked into this process.

With a warm disk cache no LLVM compiles them: that takes some seconds, linking 5 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..kernel.llvm import link
from ..supply.disk import DiskCache
from .code import ADDRESSES, DATA, Code, address_of, key_of, name_symbol


class Machine:
    """The compiled `functions`, which find what they name in `names`."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        names: Mapping[str, Any],
        entries: Sequence[tuple[str, int]] = (),
        otherwise: str = "",
        facts: Sequence[str] = (),
        data: int = 0,
    ) -> None:
        """
        entries: functions that vectorcalls enter, and how far behind `data` the word is that each
            gets first. The others are the arguments, of the classes that they are annotated with,
            or, by these names, function (that is called), args (the address of the arguments),
            count (of those without a keyword), and names (of the others, or 0). They give a new
            reference; 0 without an error is left to
        otherwise: a function, which gets the call as it came.
        facts: all that decides what a compiler makes of a source text, sources of the compiler
            among it; with them code is looked for on disk.
        """
        names = {"None": None, "True": True, "False": False, **names}
        self._key = key_of(functions, names, entries, [*facts, otherwise]) if facts else ""
        self._new = b""
        code = _kept(self._key, names) if facts else None
        if code is None:
            from .compiler import compiled  # 2 ms

            code = compiled(functions, names, entries, otherwise)
            self._new = code.to_bytes() if facts else b""
        self._objects = [names[name] for name in code.names]  # whose addresses stand in the code
        symbols = {name_symbol(name): address_of(names[name]) for name in code.names}
        # one symbol for the data of all entries, one for all addresses: 10 ms less than with more
        (table,), self._linked = link(code.binary, [ADDRESSES], {**symbols, DATA: data})
        addresses = (ctypes.c_int64 * (len(functions) + len(entries))).from_address(table)
        named = zip((f.__name__ for f in functions), addresses, strict=False)
        self._addresses, self._entries = dict(named), addresses[len(functions) :]

    @property
    def is_new(self) -> bool:
        """Whether it was looked for on disk, is not there, and was not kept since."""
        return bool(self._new)

    def keep(self) -> tuple[str, bytes]:
        """Let other processes find it on disk: what they find, and under which key."""
        key, data, self._new = self._key, self._new, b""
        keep(key, data)
        return key, data

    def address(self, name: str) -> int:
        """Where the function called `name` begins."""
        return self._addresses[name]

    def entry(self, k: int) -> int:
        """Where the k-th entry begins."""
        return self._entries[k]


def keep(key: str, data: bytes) -> None:
    """Let every process find this code on disk."""
    DiskCache().put(key, data, {"name": "machine code", "target": "object file", "source": ""})


def _kept(key: str, names: Mapping[str, Any]) -> Code | None:
    """What is on disk under a key; None if that is nothing that is known to be right here."""
    payload = DiskCache().get(key)
    if payload is None:
        return None
    code = Code.from_bytes(payload)
    return code if code.fits(names) else None
