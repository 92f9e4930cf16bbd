"""Places: where C and C++ keep what machine code reads, as this Python and this torch have it.

They are found out at import; where one is not found, NotImplementedError says so, and there is no
machine code.
"""

from __future__ import annotations

import ctypes
import types
import weakref
from typing import Any

import torch

from .. import torch_private
from ..chain.shell import Tensor
from ..dtypes import CODES
from ..sole import PARTS
from ..torch_private import TensorBase, count_write, raw_version_of
from . import c


def words_of(x: object) -> Any:
    """An object's own memory, in words."""
    return (ctypes.c_uint64 * (type(x).__basicsize__ // 8)).from_address(id(x))


def vectorcall_of(function: object) -> int:
    """What CPython runs for a function of C's: what its vectorcall leads to; 0 for its class's."""
    find = ctypes.pythonapi.PyVectorcall_Function
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    return find(function) or 0


def field_of(kind: type) -> int:
    """Where functions of C's of a class have that, in words."""
    example = {type(len): len, types.MethodDescriptorType: list.append}[kind]
    found = [k for k, word in enumerate(words_of(example)) if word == vectorcall_of(example)]
    if len(found) != 1:
        raise NotImplementedError(f"{kind.__name__} has what runs it elsewhere")
    return found[0]


def of_functions() -> dict[str, int]:
    """Where C keeps what the functions call: getters and methods of torch's tensors."""
    base = TensorBase
    grad, layout = (
        entry_of(vars(base)[name], types.GetSetDescriptorType, 5)
        for name in ("requires_grad", "layout")
    )
    users = entry_of(vars(base)["_use_count"], types.MethodDescriptorType, 3)
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
    autocast = torch_private.c_function(
        "at", "autocast", "is_autocast_enabled", takes="N3c1010DeviceTypeE"
    )
    if not (peek and take and mode and disabled and modes and switch and others and autocast):
        raise NotImplementedError("torch's C++ hides its modes or the numbers of autograd's nodes")
    method = vars(base)["mm"]
    no_arguments, flags = 0x0004, entry_of(method, types.MethodDescriptorType, 3)[2]
    if users[2] != no_arguments or flags != c.WITH_KEYWORDS:
        raise NotImplementedError("torch's methods are called another way")
    places = {
        "GRAD_GETTER": grad[1], "GRAD_CLOSURE": grad[4],
        "LAYOUT_GETTER": layout[1], "LAYOUT_CLOSURE": layout[4],
        "USERS_METHOD": users[1], "METHOD": vectorcall_of(method),
        "GRAD_MODE": mode, "AUTOCAST": autocast, "PEEK": peek, "TAKE": take,
        "FUNCTIONS_OFF": disabled, "SWITCH_OFF": switch, "FUNCTION_MODES": modes,
        "DISPATCH_MODES": others, "SKIPS_NEXT": skips,  # older ones skip nothing
    }  # fmt: skip
    # 0, for none, is 0 in every process
    return {name: place and c.Address(place) for name, place in places.items()}


def of_tensors() -> dict[str, int]:
    """Where C++ has its part of a tensor, and in it the address of memory and the version."""
    tensor = torch.empty(1)
    address = torch_private.c_symbol("aoti_torch_get_data_ptr")
    counter = torch_private.c_function(
        "torch", "autograd", "impl", "version_counter", takes="RKN2at6TensorE"
    )
    if not (address and counter):
        raise NotImplementedError("torch's C++ hides the memory or the version of a tensor")
    inner = TensorBase._cdata.__get__(tensor)  # type: ignore[attr-defined]
    found = [8 * k for k, word in enumerate(words_of(tensor)) if word == inner]
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
        "setitem": vars(TensorBase)["__setitem__"], "SETITEM": _slot(TensorBase, _MP_ASS_SUBSCRIPT),
        "OWNER_AT": 0 if PARTS is None else 8 * PARTS.owner,
        "AUTOGRAD_AT": 0 if PARTS is None else 8 * PARTS.autograd,
        "KNOWN_AT": 0 if PARTS is None else 8 * PARTS.known,
        "TENSOR_AT": found[0], "VERSION_AT": places[0],
        "ADDRESS_OF": c.Address(address), "COUNTER_OF": c.Address(counter), **_contents(found[0]),
    }  # fmt: skip


def of_closures() -> dict[str, int]:
    """Where a function has its cells, and a cell what is in it."""
    inside = object()

    def probe() -> object:
        return inside

    cells = probe.__closure__
    assert cells is not None
    at = [8 * k for k, word in enumerate(words_of(probe)) if word == id(cells)]
    within = [8 * k for k, word in enumerate(words_of(cells[0])) if word == id(inside)]
    if len(at) != 1 or len(within) != 1:
        raise NotImplementedError("functions have what they close over elsewhere")
    return {"CLOSURE_AT": at[0], "CELL_AT": within[0]}


def cells_of(function: Any, *names: str) -> tuple[int, ...]:
    """Which of its cells have these variables."""
    return tuple(function.__code__.co_freevars.index(name) for name in names)


_ASKED = {"DTYPE_OF": "dtype", "INDEX_OF": "device_index", "DIM_OF": "dim", "SIZES_OF": "sizes",
          "STRIDES_OF": "strides", "BYTES_OF": "storage_size",
          "OFFSET_OF": "storage_offset"}  # fmt: skip


def _contents(at: int) -> dict[str, int]:
    """How to find out what a tensor is, which has C++'s part `at` that place."""
    places = {name: torch_private.c_symbol(f"aoti_torch_get_{x}") for name, x in _ASKED.items()}
    places["WIDTH_OF"] = torch_private.c_symbol("aoti_torch_dtype_element_size")
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

    with torch.inference_mode(False):  # whatever is on where autofuse is imported
        tensor = torch.empty(2, 3, 4, dtype=torch.float32, device="cpu")
    width = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_int32)(places["WIDTH_OF"])
    same = [asked("DTYPE_OF", torch.empty(0, dtype=x)) == byte(x, 0) for x in CODES]
    same += [width(byte(x, 0)) == x.itemsize for x in CODES]
    same += [
        asked("INDEX_OF", tensor) & 255 == byte(tensor.device, 1),
        asked("DIM_OF", tensor) == 3,
        asked("BYTES_OF", tensor[1]) == 96,
        asked("OFFSET_OF", tensor[1]) == 12,
        torch_private.keys_of(tensor).raw_repr() == torch_private.usual_keys("CPU"),
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
        inner = (ctypes.c_int64 * 26).from_address(words_of(kind)[at // 8])
        found = [k for k in found if inner[k] == torch_private.keys_of(kind).raw_repr()]
    if len(found) != 1 or not all(same):
        raise NotImplementedError("tensors have what they are elsewhere")
    places["REQUIRES_GRAD"] = requires
    at_words = {"KEYS_AT": 8 * found[0], "NUMBER_AT": object.__basicsize__}
    at_words["DENSE"] = torch_private.DENSE
    for backend in ("CPU", "CUDA"):
        at_words[f"{backend}_KEYS"] = torch_private.usual_keys(backend)
    return {name: c.Address(place) for name, place in places.items()} | at_words


def entry_of(descriptor: Any, kind: type, size: int) -> list[int]:
    """The words of the PyGetSetDef or PyMethodDef behind a descriptor; the first is its name."""
    if type(descriptor) is not kind:
        raise NotImplementedError(f"torch's {descriptor} is no {kind.__name__}")
    definition = (ctypes.c_uint64 * 6).from_address(id(descriptor))[5]
    words = [int(word) for word in (ctypes.c_uint64 * size).from_address(definition)]
    if ctypes.string_at(words[0]) != descriptor.__name__.encode():
        raise NotImplementedError("descriptors have another layout")
    return words


_MP_ASS_SUBSCRIPT, _MP_SUBSCRIPT = 3, 5  # of typeslots.h, which the stable ABI fixes


def _slot(kind: type, number: int) -> int:
    """C's function in a slot of a class."""
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    return c.Address(slot_of(kind, number))


def of_weakrefs() -> int:
    """Where a tensor has its weak references, if any."""
    offset = Tensor.__weakrefoffset__
    tensor = torch.empty(0)
    word = ctypes.c_uint64.from_address(id(tensor) + offset)
    before, reference = word.value, weakref.ref(tensor)
    if before or word.value != id(reference):
        raise NotImplementedError("weak references are elsewhere")
    return offset
