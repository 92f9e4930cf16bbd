"""The hot path as machine code: recording an op and running a chain when everything is known.

Each machine function stands for a Python one and does the same to the same objects; where it meets
anything it does not expect it gives the call to that one, having changed nothing. It runs without
the interpreter: nothing interrupts it, and other threads run only where it says so. It is made of
`values`, `inputs`, `record`, `launch`, `flush`, `call`, `write`, `lend` and `builtins`, in the
language of `compiler`.

The Python functions stay what they are, to whoever looks at them; machine code is what their
vectorcall leads to (PyFunction_SetVectorcall, which asks for the same behaviour). The interpreter
of Python 3.11 runs the body of a function that it calls itself, and looks there only in calls from
C, as of operators and torch.*: C stands before methods there, too.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import hashlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import torch

from .. import api, hooks, lending, torch_private
from ..chain import liveness, state
from ..chain.shell import Tensor
from ..dispatch import eager, handlers, nested, protocol, unrecorded
from ..dtypes import CODES
from ..errors import warn_once
from ..kernel.llvm import processor
from ..record import flush, numbers, ranges, record, writes
from ..run import cuda, words
from ..settings.config import config, watch
from ..torch_private import TensorBase, count_write, raw_version_of
from . import builtins as _builtins
from . import c, call, inputs, lend, values, write
from . import flush as _flush
from . import launch as _launch
from . import record as _record
from .machine import Machine
from .verdict import verdict

_STAGES = (values, inputs, _record, _launch, _flush, call, write, lend, _builtins)
_Function = Callable[..., Any]


# what machine code relies on in this package: folders and modules beside them
_RELIED = ("api", "chain", "dispatch", "hooks", "hot", "inside", "kernel/llvm", "lending",
           "record", "run", "torch_private")  # fmt: skip


class _Calls:
    """Where functions have the address of what runs them, and the address that Python's have."""

    def __init__(self) -> None:
        def probe() -> None: ...

        words = _words(probe)
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
            _words(function)[self.place] = address
        else:
            self._make(function, address)

    def check(self, function: _Function) -> None:
        """Refuse a function that something else runs already."""
        if type(function) is not types.FunctionType or _words(function)[self.place] != self.python:
            raise NotImplementedError(f"{function!r} is not run by Python")


class _Builtins:
    """Builtins of torch, which CPython calls by their class, for their own field is empty.

    It is honoured as soon as it is set; object, name and identity stay what they are.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        runs = ctypes.pythonapi.PyVectorcall_Function
        runs.restype, runs.argtypes = ctypes.c_void_p, (ctypes.py_object,)
        kind = type(len)
        found = [k for k, word in enumerate(_words(len)) if word == runs(len)]
        self.functions = [f for f in functions if type(f) is kind and runs(f) is None]
        if len(found) != 1 or not self.functions:
            raise NotImplementedError("builtins keep what runs them elsewhere")
        self.place, probe = found[0], self.functions[0]
        before, mark = _words(probe)[self.place], id(probe)
        _words(probe)[self.place] = mark  # which nobody calls
        honoured = runs(probe) == mark
        _words(probe)[self.place] = before
        if before or not honoured:
            raise NotImplementedError("what is set to run builtins does not run them")

    def set(self, address: int) -> None:
        """Let `address` run them from now on; 0: Python."""
        for function in self.functions:
            _words(function)[self.place] = address


def _methods(functions: Iterable[_Function]) -> dict[str, tuple[_Function, Any]]:
    """Methods of wrapped tensors, by name, and what stands for them in Python 3.11: 0.5 us less.

    A cache of nothing is C that calls its function, and that the interpreter takes for a method.
    """
    if sys.version_info >= (3, 12):
        return {}
    hot = set(functions)
    return {
        name: (function, functools.lru_cache(maxsize=0)(function))
        for name, function in vars(Tensor).items()
        if not name.startswith("__") and function in hot  # C calls the others itself
    }


def _words(x: object) -> Any:
    """An object's own memory, in words."""
    return (ctypes.c_uint64 * (type(x).__basicsize__ // 8)).from_address(id(x))


def _check_objects() -> None:
    """Refuse where objects do not lie as the stages read them. The last test follows a pointer."""

    def count(address: int) -> int:
        return ctypes.c_uint32.from_address(address).value

    held, shells = [object(), object(), object()], [object(), object()]
    for x in (held, held[0], (1, 2), {}, 1.5, 7, None, True, torch.empty(0), object, count, Tensor):
        if _words(x)[1] != id(type(x)):
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
    if list(inside) != list(map(id, held)):
        raise NotImplementedError("tuples have their items elsewhere")
    if c.LISTED + 8 > list.__basicsize__ or not _words(held)[c.LISTED // 8]:
        raise NotImplementedError("lists have another size")
    inside = (ctypes.c_uint64 * 3).from_address(_words(held)[c.LISTED // 8])
    if list(inside) != list(map(id, held)):
        raise NotImplementedError("lists have their items elsewhere")


# machine functions that are given a descriptor of torch's, and which of its C functions they call
_ATTRIBUTES = {"getting": 1, "taking": 1, "placing": 2}


def _hot() -> list[tuple[str, _Function, tuple[object, ...]]]:
    """(machine function, the Python function it stands for, what it is given of that)."""
    return [
        ("record", record.record, ()),
        ("follows", numbers.number_next, ()),
        ("record_inplace", writes.record_inplace, ()),
        ("record_write", writes.record_write, ()),
        ("flush", flush.flush, ()),
        ("flush_pending", flush.flush_thread, ()),
        ("materialize", api.materialize, ()),
        ("lending", lending.lend, (lending.loans, lending.lendable_keys, lending.is_lendable)),
        ("restoring", lending.restore, (lending.loans,)),
        ("answer", words.answer, ()),
        ("torch_function", protocol.torch_function, (protocol.HANDLERS,)),
        ("ask_overrides", protocol.ask_overrides, (protocol.HANDLERS, protocol.OPTIONS)),
        *handlers.HOT,
    ]


def _given() -> dict[str, Any]:
    """What the stages leave to be given."""
    return {
        "Plain": torch.Tensor,
        "Parameter": torch.nn.Parameter, "Builtin": type(len), "Function": types.FunctionType,
        "local": state.this_thread, "counts": state.counts, "flushes": state.counts.flushes,
        "ranges": ranges.open_ranges, "hook_names": vars(hooks),
        "chain_flush": flush.flush, "inside": flush.inside, "is_foreign": flush.is_foreign,
        "others_writing": state.writing, "all_recorders": state.all_recorders.refs,
        "lifted": eager.lifted, "relieve": record.relieve, "COUNTED": liveness.ALONE - 1,
        "SIMPLE": nested.SIMPLE_CLASSES, "TARGETS": unrecorded.TARGETS,
        "SLOTS": tuple(~k for k in range(64)), "strided": torch.strided, "AT_ONCE": (False,),
        "increment_version": count_write,
        "entered": cuda.entered_threads, "get_device": getattr(torch._C, "_cuda_getDevice", int),
        **_places(), **_tensors(), "WEAKREFS": _weakrefs(),
    }  # fmt: skip


class _Native:
    """The compiled stages, and the functions that they stand for."""

    def __init__(self, facts: Sequence[str]) -> None:
        self.on = False
        _check_objects()
        self.hot, self.calls = _hot(), _Calls()
        self.builtins = _Builtins(protocol.HANDLERS)
        self.methods = _methods(function for _, function, _ in self.hot)
        for _, function, _ in self.hot:
            self.calls.check(function)
        # one entry for all, which finds in a table what each is given, or one entry for each, which
        # takes 20 ns less and 0.2 ms more of every import
        tables: dict[str, dict[_Function, tuple[Any, ...]]] = {"passing": {}, "unread": {}}
        entries: list[tuple[str, tuple[Any, ...]]] = [
            ("builtin", (protocol.HANDLERS, protocol.OPTIONS))
        ]
        entries += [(name, (table,)) for name, table in tables.items()]
        self.runs: list[tuple[_Function, int]] = []  # and the number of the entry that runs it
        for name, function, data in self.hot:
            if name in _ATTRIBUTES:
                words = _entry(data[0], types.GetSetDescriptorType, 5)
                data = (words[_ATTRIBUTES[name]], words[4], *data[1:])
            if name in tables:
                tables[name][function] = data
                self.runs.append((function, 1 + list(tables).index(name)))
            else:
                self.runs.append((function, len(entries)))
                entries.append((name, data))
        self._kept = [(name, data, _addresses(data)) for name, data in entries]
        names = {**vars(builtins), **vars(c)}
        for stage in _STAGES:
            names |= vars(stage)
        names |= {**_given(), "PYTHON": c.Address(self.calls.python)}
        begun = [(name, ctypes.addressof(words)) for name, _, words in self._kept]
        self.machine = Machine(_functions(), names, begun, facts)
        if self.machine.is_new and _facts() == facts:  # nobody has replaced sources meanwhile
            self.machine.keep()
        # for ever: whoever reloads a module still holds functions that lead into it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def switch(self, on: bool) -> None:
        """Let the functions run as machine code, or not: 2.6 ms."""
        if on is self.on:
            return
        self.on = on
        for function, k in self.runs:
            self.calls.set(function, self.machine.entry(k) if on else self.calls.python)
        self.builtins.set(self.machine.entry(0) if on else 0)
        for name, ways in self.methods.items():
            setattr(Tensor, name, ways[on])


def _addresses(data: tuple[Any, ...]) -> Any:
    """An array of the addresses of objects, and of numbers as they are."""
    words = [item if type(item) is int else id(item) for item in data]
    return (ctypes.c_int64 * (len(words) + 1))(*words)


def _functions() -> list[_Function]:
    """All that the stages define."""
    return [
        function
        for stage in _STAGES
        for function in vars(stage).values()
        if isinstance(function, types.FunctionType) and function.__module__ == stage.__name__
    ]


def _places() -> dict[str, int]:
    """Where C keeps what the functions call: getters and methods of torch's tensors."""
    base = TensorBase
    grad, layout = (
        _entry(vars(base)[name], types.GetSetDescriptorType, 5)
        for name in ("requires_grad", "layout")
    )
    users = _entry(vars(base)["_use_count"], types.MethodDescriptorType, 3)
    state = ("at", "impl", "PythonTorchFunctionTLS")
    peek, take, mode, disabled, modes, skips = (
        torch_private.c_function(*names)
        for names in (("at", "sequence_number", "peek"),
                      ("at", "sequence_number", "get_and_increment"),
                      ("c10", "GradMode", "is_enabled"), (*state, "get_disabled_state"),
                      (*state, "stack_len"), (*state, "peek_skip_next"))
    )  # fmt: skip
    switch = torch_private.c_function(
        *state[:3], "set_disabled_state", takes="NS0_26TorchFunctionDisabledStateE"
    )
    others = torch_private.c_function("c10", "impl", "TorchDispatchModeTLS", "stack_len")
    if not (peek and take and mode and disabled and modes and switch and others):
        raise NotImplementedError("torch's C++ hides its modes or the numbers of autograd's nodes")
    no_arguments = 0x0004
    if users[2] != no_arguments:
        raise NotImplementedError("torch's methods are called another way")
    places = {
        "GRAD_GETTER": grad[1], "GRAD_CLOSURE": grad[4],
        "LAYOUT_GETTER": layout[1], "LAYOUT_CLOSURE": layout[4],
        "USERS_METHOD": users[1],
        "GRAD_MODE": mode, "PEEK": peek, "TAKE": take,
        "FUNCTIONS_OFF": disabled, "SWITCH_OFF": switch, "FUNCTION_MODES": modes,
        "DISPATCH_MODES": others, "SKIPS_NEXT": skips,  # older ones skip nothing
    }  # fmt: skip
    # 0, for none, is 0 in every process
    return {name: place and c.Address(place) for name, place in places.items()}


def _tensors() -> dict[str, int]:
    """Where C++ has its part of a tensor, and in it the address of memory and the version."""
    tensor = torch.empty(1)
    address = torch_private.c_symbol("aoti_torch_get_data_ptr")
    counter = torch_private.c_function(
        "torch", "autograd", "impl", "version_counter", takes="RKN2at6TensorE"
    )
    if not (address and counter):
        raise NotImplementedError("torch's C++ hides the memory or the version of a tensor")
    inner = TensorBase._cdata.__get__(tensor)  # type: ignore[attr-defined]
    found = [8 * k for k, word in enumerate(_words(tensor)) if word == inner]
    if len(found) != 1:
        raise NotImplementedError("tensors have C++'s part elsewhere")
    counter_of = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(counter)
    at = ctypes.c_uint64.from_address(counter_of(id(tensor) + found[0])).value
    versions = (ctypes.c_uint32 * 6).from_address(at)  # after a vtable and two counts
    seen = []
    for _ in range(3):
        count_write([tensor])
        seen.append([word == raw_version_of(tensor) for word in versions])
    places = [4 * k for k in range(len(versions)) if all(same[k] for same in seen)]
    if len(places) != 1:
        raise NotImplementedError("tensors have their version elsewhere")
    return {
        "getitem": vars(TensorBase)["__getitem__"], "GETITEM": _slot(TensorBase, _MP_SUBSCRIPT),
        "TENSOR_AT": found[0], "VERSION_AT": places[0],
        "ADDRESS_OF": c.Address(address), "COUNTER_OF": c.Address(counter), **_contents(found[0]),
    }  # fmt: skip


_ASKED = {"DTYPE_OF": "dtype", "INDEX_OF": "device_index", "DIM_OF": "dim", "SIZES_OF": "sizes",
          "STRIDES_OF": "strides"}  # fmt: skip


def _contents(at: int) -> dict[str, int]:
    """How to find out what a tensor is, which has C++'s part `at` that place."""
    places = {name: torch_private.c_symbol(f"aoti_torch_get_{x}") for name, x in _ASKED.items()}
    requires = torch_private.c_symbol("_ZNK3c1010TensorImpl13requires_gradEv")
    if not (requires and all(places.values())):
        raise NotImplementedError("torch's C++ hides what tensors are")

    def asked(name: str, tensor: torch.Tensor) -> int:
        given = ctypes.c_int64(0)
        ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(places[name])
        failed = ask(id(tensor) + at, ctypes.addressof(given))
        return -2 if failed else given.value

    def byte(x: object, k: int) -> int:
        return ctypes.c_uint8.from_address(id(x) + object.__basicsize__ + k).value

    tensor = torch.empty(2, 3, 4)
    same = [asked("DTYPE_OF", torch.empty(0, dtype=x)) == byte(x, 0) for x in CODES]
    same += [
        asked("INDEX_OF", tensor) & 255 == byte(tensor.device, 1),
        asked("DIM_OF", tensor) == 3,
    ]
    same += [byte(torch.device("cuda:3"), 1) == 3]
    for name, told in (("SIZES_OF", tensor.shape), ("STRIDES_OF", tensor.stride())):
        first = asked(name, tensor)
        same += [first > 0 and tuple((ctypes.c_int64 * 3).from_address(first)) == told]
    with torch.inference_mode():
        kinds = [tensor, torch.empty(2)]
    kinds += [torch.empty(2, device="meta"), torch._neg_view(tensor)]
    found = list(range(26))
    for kind in kinds:
        inner = (ctypes.c_int64 * 26).from_address(_words(kind)[at // 8])
        found = [k for k in found if inner[k] == torch_private.keys_of(kind).raw_repr()]
    if len(found) != 1 or not all(same):
        raise NotImplementedError("tensors have what they are elsewhere")
    places["REQUIRES_GRAD"] = requires
    at_words = {"KEYS_AT": 8 * found[0], "NUMBER_AT": object.__basicsize__}
    return {name: c.Address(place) for name, place in places.items()} | at_words


def _entry(descriptor: Any, kind: type, size: int) -> list[int]:
    """The words of the PyGetSetDef or PyMethodDef behind a descriptor; the first is its name."""
    if type(descriptor) is not kind:
        raise NotImplementedError(f"torch's {descriptor} is no {kind.__name__}")
    definition = (ctypes.c_uint64 * 6).from_address(id(descriptor))[5]
    words = [int(word) for word in (ctypes.c_uint64 * size).from_address(definition)]
    if ctypes.string_at(words[0]) != descriptor.__name__.encode():
        raise NotImplementedError("descriptors have another layout")
    return words


_MP_SUBSCRIPT = 5  # of typeslots.h, which the stable ABI fixes


def _slot(kind: type, number: int) -> int:
    """C's function in a slot of a class."""
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    return c.Address(slot_of(kind, number))


def _weakrefs() -> int:
    """Where a tensor has its weak references, if any."""
    offset = Tensor.__weakrefoffset__
    tensor = torch.empty(0)
    word = ctypes.c_uint64.from_address(id(tensor) + offset)
    before, reference = word.value, weakref.ref(tensor)
    if before or word.value != id(reference):
        raise NotImplementedError("weak references are elsewhere")
    return offset


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
            facts = _facts()
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


def _facts() -> list[str]:
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
