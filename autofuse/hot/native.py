"""The hot path as machine code: recording an op and running a chain when everything is known.

Each machine function stands for a Python one and does the same to the same objects; where it meets
anything it does not expect it gives the call to that one, having changed nothing. It runs without
the interpreter: nothing interrupts it, and other threads run only where it says so. Its parts:
`values`, `inputs`, `eager`, `record`, `launch`, `flush`, `call`, `handle`, `choice`, `view`,
`in_place`, `write`, `attribute`, `spell`, `reduce`, `join`, `graph`, `lend`, `apply` and
`builtins`, in the language of `body`.

The Python functions stay what they are, to whoever looks at them; machine code is what their
vectorcall leads to (PyFunction_SetVectorcall, which asks for the same behaviour). The interpreter
of Python 3.11 runs the body of a function that it calls itself, and looks there only in calls from
C, as of operators and torch.*: C stands before methods and before what flushes there, too.
"""

from __future__ import annotations

import builtins as _python
import ctypes
import hashlib
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import torch

from .. import api, fused, hooks, inside, lending
from ..chain import claims, liveness, refusal, state, verified
from ..chain.shell import Tensor
from ..dispatch import eager, nested, protocol, unrecorded
from ..dtypes import CODES
from ..errors import warn_once
from ..grad import backward
from ..kernel.llvm import processor
from ..ops.row import OPS
from ..record import flush, in_place, modes, numbers, origins, ranges, record, writes
from ..run import launching, words
from ..settings.config import config, watch
from ..torch_private import (
    DeviceContext,
    TensorBase,
    count_write,
    function_mode_at,
    in_functorch,
)
from . import apply as _apply
from . import attribute, c, call, called, choice, inputs, lend, overrides, values, view, write
from . import builtins as _builtins
from . import eager as _eager
from . import flush as _flush
from . import graph as _graph
from . import handle as _handle
from . import in_place as _in_place
from . import join as _join
from . import launch as _launch
from . import record as _record
from . import reduce as _reduce
from . import spell as _spell
from .machine import Machine
from .places import (
    cells_of,
    entry_of,
    field_of,
    of_closures,
    of_functions,
    of_tensors,
    of_weakrefs,
    vectorcall_of,
    words_of,
)
from .verdict import verdict

_STAGES = (
    values, inputs, _eager, _record, _launch, _flush, choice, view, call, _handle, overrides,
    _in_place, write, attribute, _spell, _reduce, _join, _graph, lend, _apply, _builtins,
)  # fmt: skip
_Function = Callable[..., Any]


# what machine code relies on in this package: folders and modules beside them
_RELIED = ("api", "chain", "dispatch", "fused", "grad", "hooks", "hot", "inside", "kernel/llvm",
           "lending", "ops", "patches", "record", "run", "torch_private")  # fmt: skip


class _Calls:
    """Where functions have the address of what runs them, and the address that Python's have."""

    def __init__(self) -> None:
        def probe() -> None: ...

        words = words_of(probe)
        if sys.version_info < (3, 12):
            python = ctypes.cast(ctypes.pythonapi._PyFunction_Vectorcall, ctypes.c_void_p).value
            found = [k for k, word in enumerate(words) if word == python]
        else:
            self._make = ctypes.pythonapi.PyFunction_SetVectorcall
            self._make.restype, self._make.argtypes = None, (ctypes.py_object, ctypes.c_void_p)
            before, mark = list(words), id(probe)
            self._make(probe, mark)  # which nobody calls
            found = [k for k, word in enumerate(words) if word == mark != before[k]]
            self._make(probe, before[found[0]] if found else None)
        if len(found) != 1:
            raise NotImplementedError("functions keep what runs them elsewhere")
        self.place, self.python = found[0], words[found[0]]

    def set(self, function: _Function, address: int) -> None:
        """Let `address` run `function` from now on."""
        if sys.version_info < (3, 12):
            words_of(function)[self.place] = address
        else:
            self._make(function, address)

    def check(self, function: _Function) -> None:
        """Refuse a function that something else runs already."""
        if (
            type(function) is not types.FunctionType
            or words_of(function)[self.place] != self.python
        ):
            raise NotImplementedError(f"{function!r} is not run by Python")


class _Fields:
    """Objects of C's whose own field, their vectorcall, has what runs them, and what is set there.

    Of torch's builtins it is empty, for CPython calls them by their class, and honoured as soon as
    it is set; methods have a function of CPython's there. Object, name and identity stay.
    """

    def __init__(self, functions: Sequence[Any], before: int) -> None:
        """before: what they all have there."""
        probe, mark = functions[0], id(functions)
        self.functions, self.before = functions, before
        self.place = field_of(type(probe))
        words_of(probe)[self.place] = mark  # which nobody calls
        honoured = vectorcall_of(probe) == mark
        words_of(probe)[self.place] = before
        if not honoured or any(vectorcall_of(function) != before for function in functions):
            raise NotImplementedError(f"{type(probe).__name__} is not run by what is set there")

    def set(self, address: int) -> None:
        """Let `address` run them from now on; 0: what has run them."""
        for function in self.functions:
            words_of(function)[self.place] = address or self.before


class _Subscripts:
    """What C indexes plain tensors by: a slot of their classes, of which subclasses get torch's.

    Somebody who sets `__getitem__` of a class has CPython fill it; then it is let be, until they
    say that they have taken it away.
    """

    def __init__(self, before: int) -> None:
        """before: what is in it."""
        self.places, self.before, self.now = [], before, before
        for cls in (torch.Tensor, torch.nn.Parameter):
            slots = words_of(cls)
            found = [k for k, slot in enumerate(slots) if slot == before]
            if len(found) != 1:
                raise NotImplementedError("classes of tensors have their slots elsewhere")
            self.places.append((slots, found[0]))

    def set(self, address: int) -> None:
        """Let `address` index them from now on; 0: torch."""
        address = address or self.before
        for slots, k in self.places:
            if slots[k] == self.now:
                slots[k] = address
        self.now = address

    def again(self) -> None:
        """Once more, where torch's are back."""
        for slots, k in self.places:
            if slots[k] == self.before:
                slots[k] = self.now


def _check_objects() -> None:
    """Refuse where objects do not lie as the stages read them. The last test follows a pointer."""

    def count(address: int) -> int:
        return ctypes.c_uint32.from_address(address).value

    held, shells = [object(), object(), object()], [object(), object()]
    for x in (held, held[0], (1, 2), {}, 1.5, 7, None, True, torch.empty(0), object, count, Tensor):
        if words_of(x)[1] != id(type(x)):
            raise NotImplementedError("objects have their type elsewhere")
    before = count(id(held[0]))
    more = [held[0]] * 3
    if count(id(held[0])) - before != len(more):
        raise NotImplementedError("objects have their reference count elsewhere")
    addresses = list(map(id, shells))
    if liveness.counts_of(shells) != tuple(count(a) + liveness.ALONE - 1 for a in addresses):
        raise NotImplementedError("Python counts references in another way")
    many = tuple(held)
    inside = (ctypes.c_uint64 * 3).from_address(id(many) + c.ITEMS)
    size = ctypes.c_int64.from_address(id(many) + c.SIZED).value
    if size != len(many) or list(inside) != list(map(id, held)):
        raise NotImplementedError("tuples have their items elsewhere")
    cut = slice(*held)
    if list((ctypes.c_uint64 * 3).from_address(id(cut) + c.SLICED)) != list(map(id, held)):
        raise NotImplementedError("slices have their ends elsewhere")
    if c.LISTED + 8 > list.__basicsize__ or not words_of(held)[c.LISTED // 8]:
        raise NotImplementedError("lists have another size")
    inside = (ctypes.c_uint64 * 3).from_address(words_of(held)[c.LISTED // 8])
    if list(inside) != list(map(id, held)):
        raise NotImplementedError("lists have their items elsewhere")


# machine functions that are given a descriptor of torch's, and which of its C functions they call
_ATTRIBUTES = {"getting": 1, "taking": 1, "placing": 2}


def _hot() -> list[tuple[str, _Function, tuple[object, ...]]]:
    """(machine function, the Python function it stands for, what it is given of that)."""
    return [
        ("record", record.record, ()),
        ("follows", numbers.number_next, ()),
        ("record_inplace", in_place.record_inplace, ()),
        ("record_write", writes.record_write, ()),
        ("flush", flush.flush, ()),
        ("flush_pending", flush.flush_thread, ()),
        ("materialize", api.materialize, ()),
        ("setting_attribute", Tensor.__setattr__, ()),
        ("lending", lending.lend, (lending.loans, lending.lendable_keys, lending.is_lendable)),
        ("restoring", lending.restore, (lending.loans,)),
        ("becoming_plain", lending.become_plain, ()),
        ("answer", words.answer, ()),
        ("keeping", backward.Fused.forward, ()),
        ("differentiating", backward.apply_backward, ()),
        ("torch_function", protocol.torch_function, (protocol.HANDLERS,)),
        ("ask_overrides", protocol.ask_overrides, ()),
        *protocol.HOT,
    ]


def _given() -> dict[str, Any]:
    """What the stages leave to be given."""
    return {
        "Plain": torch.Tensor, "Size": torch.Size,
        "Parameter": torch.nn.Parameter, "DeviceContext": DeviceContext,
        "function_mode_at": function_mode_at, "Builtin": type(len), "Function": types.FunctionType,
        "local": state.this_thread, "end_closed": modes.end_closed, "flushes": state.counts.flushes,
        "refusals": refusal.refusals, "watchers": refusal.watchers,
        "ranges": ranges.open_ranges, "hook_names": vars(hooks),
        "chain_flush": flush.flush, "tell": flush.tell,
        "inside": flush.inside, "is_foreign": flush.is_foreign,
        "others_writing": claims.writing, "using": claims.using,
        "serving": inside.serving,
        "others_waited": inside.others_waited,
        "BEGUN": c.Address(ctypes.addressof(claims.begun)),
        "all_recorders": state.all_recorders.refs,
        "lifted": eager.lifted, "relieve": record.relieve, "record_anew": record.record,
        "CLONE": OPS["clone"], "COUNTED": liveness.ALONE - 1,
        "SIMPLE": nested.SIMPLE_CLASSES, "TARGETS": unrecorded.TARGETS,
        "known_functions": unrecorded.known_functions,
        "HANDLERS": protocol.HANDLERS, "OPTIONS": protocol.OPTIONS,
        "indexed": protocol.HANDLERS[TensorBase.__getitem__],
        "reciprocal_of": protocol.HANDLERS[TensorBase.reciprocal],
        "SLOTS": tuple(~k for k in range(64)), "strided": torch.strided, "AT_ONCE": (False,),
        "CODED": tuple(CODES),
        "origins": origins.origins, "trials": origins.trials, "STAY": origins.STAY,
        "between": origins.between, "measuring": origins.measuring, "wanted": verified.wanted,
        "CPU": torch.device("cpu"),
        "ask_origin": origins.ask, "exactly": writes.reads_apart,
        "increment_version": count_write,
        "in_functorch": in_functorch, "after_error": backward.after_error,
        "gradients_of": backward.Backward.gradients,
        "Module": torch.nn.Module, "loans": lending.loans, "left_plain": fused.left_plain,
        "call_fused": fused.call_fused, "is_outermost": fused.is_outermost,
        "is_compiling": fused.is_compiling,
        "L1_LOSS": protocol.L1_LOSS,
        "entered": launching.entered_threads, "get_num_threads": torch.get_num_threads,
        "get_device": getattr(torch._C, "_cuda_getDevice", int),
        **of_functions(), **of_tensors(), **of_closures(), "WEAKREFS": of_weakrefs(),
    }  # fmt: skip


class _Native:
    """The compiled stages, and the functions that they stand for."""

    def __init__(self, facts: Sequence[str]) -> None:
        self.on = False
        _check_objects()
        self.hot, self.calls = _hot(), _Calls()
        builtins, methods = called.taken()
        self.asking = called.asking()
        given = {**_given(), "asking": self.asking}
        self.builtins, self.descriptors = _Fields(builtins, 0), _Fields(methods, given["METHOD"])
        self.subscripts = _Subscripts(given["GETITEM"])
        self.methods = called.methods(function for _, function, _ in self.hot)
        self.names = called.names([flush.flush, flush.flush_thread, record.record])
        for function in (*(function for _, function, _ in self.hot), *self.asking):
            self.calls.check(function)
        # one entry for all, which finds in a table what each is given, or one entry for each, which
        # takes 20 ns less and 0.2 ms more of every import
        shared = ("passing", "running", "reducing", "viewing", "joining", "returning", "making",
                  "unread", "announcing", "composing", "spelling")  # fmt: skip
        tables: dict[str, dict[_Function, tuple[Any, ...]]] = {name: {} for name in shared}
        entries: list[tuple[str, tuple[Any, ...]]]
        entries = [(name, (table,)) for name, table in tables.items()]
        self.runs: list[tuple[_Function, int]] = []  # and the number of the entry that runs it
        for name, function, data in self.hot:
            if name in _ATTRIBUTES:
                words = entry_of(data[0], types.GetSetDescriptorType, 5)
                data = (words[_ATTRIBUTES[name]], words[4], *data[1:])
            if name in tables:
                tables[name][function] = data
                self.runs.append((function, list(tables).index(name)))
            else:
                self.runs.append((function, len(entries)))
                entries.append((name, data))
        self.calling = len(entries)
        entries.append(("calling", cells_of(fused.fuse(lambda: None), "function", "owners")))
        self._kept = [data for _, data in entries]
        self._words, begun = _laid_out(entries)
        names = {**vars(_python), **vars(c)}
        for stage in _STAGES:
            names |= vars(stage)
        names |= {**given, "PYTHON": c.Address(self.calls.python)}
        data = ctypes.addressof(self._words)
        self.machine = Machine(_functions(), names, begun, "python", facts, data)
        # (key, code) where this process has compiled it
        self.compiled: tuple[str, bytes] = "", b""
        if self.machine.is_new and facts_here() == facts:  # nobody has replaced sources meanwhile
            self.compiled = self.machine.keep()
        # for ever: whoever reloads a module still holds functions that lead into it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def stand_before(self, made: _Function) -> None:
        """Let what `fuse` has made run as machine code, or not."""
        self.calls.set(made, self.machine.entry(self.calling) if self.on else self.calls.python)

    def switch(self, on: bool) -> None:
        """Let the functions run as machine code, or not: 2.6 ms."""
        if on is self.on:
            return
        self.on = on
        for function, k in self.runs:
            self.calls.set(function, self.machine.entry(k) if on else self.calls.python)
        for made in list(fused.calls):
            self.stand_before(made)
        address = self.machine.address("in_python") if on else self.calls.python
        for function in self.asking:
            self.calls.set(function, address)
        taken = {"builtin": self.builtins, "method": self.descriptors, "subscript": self.subscripts}
        for name, places in taken.items():
            places.set(self.machine.address(name) if on else 0)
        for name, ways in self.methods.items():
            setattr(Tensor, name, ways[on])
        for module, name, ways in self.names:
            if vars(module).get(name) is ways[not on]:  # else it has been loaded again
                setattr(module, name, ways[on])


def _laid_out(entries: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[Any, list[tuple[str, int]]]:
    """(array, entries): the data of all one after another, of each with a 0 behind: the addresses
    of objects, and numbers as they are; and how far behind the array's address that of each is."""
    words: list[int] = []
    begun = []
    for name, data in entries:
        begun.append((name, 8 * len(words)))
        words += [item if type(item) is int else id(item) for item in data]
        words.append(0)
    return (ctypes.c_int64 * len(words))(*words), begun


def _functions() -> list[_Function]:
    """All that the stages define."""
    return [
        function
        for stage in _STAGES
        for function in vars(stage).values()
        if isinstance(function, types.FunctionType) and function.__module__ == stage.__name__
    ]


_native: _Native | None = globals().get("_native")  # also if this module is loaded again
absent = ""  # why there is no machine code


def _follow(*reason: object) -> None:
    """Do what `config.native` says."""
    global absent
    if _native is None:
        if not config.native or absent:
            return
        absent = _refusal()
        if absent:
            return
        try:
            facts = facts_here()
            absent = verdict(facts)
            if not absent:
                make(facts)
        except Exception as error:  # no source text of the stages; another torch; another LLVM
            absent = f"{type(error).__name__}: {error}"
        if absent:
            warn_once(f"autofuse: recording and launching are left to Python: {absent}")
            return
    switch(config.native)


def make(facts: Sequence[str] = ()) -> None:
    """Make the machine code, which nothing runs yet. Raises whatever stands in its way.

    facts: what it relies on; with them it is looked for and kept on disk.
    """
    global _native
    if _native is None:
        _native = _Native(facts)
        hooks.fused = _native.stand_before
        hooks.indexing_is_torchs = _native.subscripts.again


def compiled() -> tuple[str, bytes]:
    """The code that this process has compiled, and its key on disk; empty where it was there."""
    assert _native is not None
    return _native.compiled


def switch(on: bool) -> None:
    """Let it run, or not."""
    assert _native is not None
    _native.switch(on)


def hot() -> dict[types.CodeType, str]:
    """The Python functions that machine code stands for: its names for them by their code."""
    assert _native is not None
    return {function.__code__: name for name, function, _ in _native.hot}


def _refusal() -> str:
    """Why this is no Python and no machine that it is made for."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "machine code is made for CPython with its global lock"
    if sys.version_info < (3, 11):
        return "machine code is made for Python 3.11 and later"  # PyObject_Vectorcall is a macro
    if sys.maxsize < 1 << 32 or sys.byteorder != "little":
        return "machine code is made for 64-bit little-endian machines"
    return ""


def facts_here() -> list[str]:
    """All that decides whether machine code does what Python does."""
    sources = hashlib.sha256()
    package = Path(__file__).parents[1]
    for name in _RELIED:
        for path in sorted([*package.glob(f"{name}.py"), *package.glob(f"{name}/*.py")]):
            sources.update(path.read_bytes())
    built = (getattr(sys, "abiflags", ""), getattr(torch.version, "git_version", ""))
    return [sys.version, torch.__version__, llvmlite.__version__, *map(str, built), *processor(),
            sources.hexdigest()]  # fmt: skip


def active() -> bool:
    """Whether the hot path runs as machine code."""
    return _native is not None and config.native


def install() -> None:
    """Follow `config.native` from now on."""
    watch(_follow)
    _follow()
