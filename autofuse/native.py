"""The hot path as machine code: recording an op and running a chain when everything is known.

Each machine function stands for a Python one and does the same to the same objects; where it meets
anything it does not expect it gives the call to that one, having changed nothing. It runs without
the interpreter: nothing interrupts it, and other threads run only where it says so. It is made of
`native_record`, `native_flush`, `native_call` and `native_write`, in the language of `machine`.

The Python functions stay what they are, to whoever looks at them; machine code is what their
vectorcall leads to (PyFunction_SetVectorcall, which asks for the same behaviour). The interpreter
of Python 3.11 runs the body of a function that it calls itself, and looks there only in calls from
C: operators and torch.* are recorded by machine code there, the rest is not.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import c, chain, launch, native_call, native_flush, native_record, native_write, tensor
from .config import config, watch
from .machine import Machine
from .shell import NoTorchFunction, Tensor

_STAGES = (native_record, native_flush, native_call, native_write)
_Function = Callable[..., Any]


def _vectorcall(function: _Function) -> ctypes.c_uint64:
    """Where `function` has the address of what runs it."""
    place = ctypes.c_uint64.from_address(id(type(function)) + 56).value  # tp_vectorcall_offset
    return ctypes.c_uint64.from_address(id(function) + place)


_python = _vectorcall(_vectorcall).value


def _set(function: _Function, address: int) -> None:
    """Let `address` run `function` from now on."""
    if sys.version_info < (3, 12):
        _vectorcall(function).value = address
        return
    make = ctypes.pythonapi.PyFunction_SetVectorcall
    make.restype, make.argtypes = None, (ctypes.py_object, ctypes.c_void_p)
    make(function, address)


def _hot() -> list[tuple[str, _Function, tuple[object, ...]]]:
    """(machine function, the Python function it stands for, what it is given of that)."""
    return [
        ("record", chain.record, ()),
        ("record_inplace", chain.record_inplace, ()),
        ("record_write", chain.record_write, ()),
        ("flush", chain.flush, ()),
        ("answer", launch.answer, ()),
        ("torch_function", tensor._torch_function, (tensor.HANDLERS,)),
        ("ask_overrides", tensor.ask_overrides, (tensor.HANDLERS,)),
        *tensor.HOT,
    ]


def _given() -> dict[str, Any]:
    """What the stages leave to be given."""
    return {
        "Chain": chain.Chain, "Recorder": chain.Recorder, "Plain": torch.Tensor,
        "Parameter": torch.nn.Parameter, "local": chain._local, "counts": chain.counts,
        "ranges": chain._ranges, "chain_names": vars(chain),
        "chain_flush": chain.flush, "finish": chain.finish, "inside": chain.inside,
        "others_writing": chain.writing, "all_recorders": chain._all_recorders,
        "relieve": chain.relieve, "hold": chain.hold, "COUNTED": chain.ALONE - 1,
        "is_grad_enabled": torch.is_grad_enabled,
        "function_modes": torch._C._len_torch_function_stack,
        "increment_version": torch._C._increment_version,
        "entered": launch._entered, "get_device": getattr(torch._C, "_cuda_getDevice", int),
        "NoTorchFunction": NoTorchFunction, **_places(),
        "enter": vars(NoTorchFunction)["__enter__"], "leave": vars(NoTorchFunction)["__exit__"],
    }  # fmt: skip


class _Native:
    """The compiled stages, and the functions that they stand for."""

    def __init__(self) -> None:
        self.on = False
        self.hot = _hot()
        entries, self._kept = [], []
        for name, _, data in self.hot:
            words = [item if type(item) is int else id(item) for item in data]
            entry = (ctypes.c_int64 * (len(words) + 1))(*words)
            self._kept += [data, entry]
            entries.append((name, ctypes.addressof(entry)))
        names = {**vars(builtins), **vars(c)}
        for stage in _STAGES:
            names |= vars(stage)
        self.machine = Machine(_functions(), {**names, **_given()}, entries)

    def switch(self, on: bool) -> None:
        """Let the functions run as machine code, or not: 2.6 ms."""
        if on is self.on:
            return
        self.on = on
        for k, (_, function, _) in enumerate(self.hot):
            _set(function, self.machine.entry(k) if on else _python)


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
    base = torch._C.TensorBase
    version, grad = (_entry(vars(base)[name], types.GetSetDescriptorType, 5)
                     for name in ("_version", "requires_grad"))  # fmt: skip
    address, users = (_entry(vars(base)[name], types.MethodDescriptorType, 3)
                      for name in ("data_ptr", "_use_count"))  # fmt: skip
    no_arguments = 0x0004
    if address[2] != no_arguments or users[2] != no_arguments:
        raise NotImplementedError("torch's methods are called another way")
    return {
        "VERSION_GETTER": version[1], "VERSION_CLOSURE": version[4],
        "GRAD_GETTER": grad[1], "GRAD_CLOSURE": grad[4],
        "ADDRESS_METHOD": address[1], "USERS_METHOD": users[1],
        "WEAKREFS": _weakrefs(), "PYTHON": _python,
    }  # fmt: skip


def _entry(descriptor: Any, kind: type, size: int) -> list[int]:
    """The words of the PyGetSetDef or PyMethodDef behind a descriptor; the first is its name."""
    if type(descriptor) is not kind:
        raise NotImplementedError(f"torch's {descriptor} is no {kind.__name__}")
    definition = (ctypes.c_uint64 * 6).from_address(id(descriptor))[5]
    words = [int(word) for word in (ctypes.c_uint64 * size).from_address(definition)]
    if ctypes.string_at(words[0]) != descriptor.__name__.encode():
        raise NotImplementedError("descriptors have another layout")
    return words


def _weakrefs() -> int:
    """Where a tensor has its weak references, if any."""
    offset = Tensor.__weakrefoffset__
    tensor = torch.empty(0)
    word = ctypes.c_uint64.from_address(id(tensor) + offset)
    before, reference = word.value, weakref.ref(tensor)
    if before or word.value != id(reference):
        raise NotImplementedError("weak references are elsewhere")
    return offset


_native: _Native | None = None
absent = ""  # why there is no machine code


def _follow(*reason: object) -> None:
    """Do what `config.native` says."""
    global _native, absent
    if _native is None:
        if not config.native or absent:
            return
        try:
            if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
                raise NotImplementedError("it is made for CPython with its global lock")
            if sys.maxsize < 1 << 32 or sys.byteorder != "little":
                raise NotImplementedError("it is made for 64-bit little-endian machines")
            _native = _Native()
        # no source text of the stages; another torch; another LLVM
        except (NotImplementedError, OSError, KeyError, RuntimeError) as error:
            absent = f"{type(error).__name__}: {error}"
            return
    _native.switch(config.native)


def active() -> bool:
    """Whether the hot path runs as machine code."""
    return _native is not None and config.native


def install() -> None:
    """Follow `config.native` from now on."""
    watch(_follow)
    _follow()
