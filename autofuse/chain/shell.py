"""The tensor subclass as an object: what a shell is, and the moves it can make.

A wrapped tensor is an instance of `Tensor` in one of two states. Concrete: an ordinary tensor with
memory, only its Python class differs. Pending: a shell without memory, whose `_af` is the trie
node that will compute it. A pending shell *becomes* concrete by exchanging its TensorImpl with
that of the computed result; identity, weak references and attributes stay. The object that held
the result is left with the empty impl and serves as a shell again, so that steady state creates
none (0.2 us for the exchange against 0.84 us for a new shell; one H200 machine, torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from ..dtypes import CODES
from ..kernel.plan import View
from ..layout import Ints, contiguous

NoTorchFunction = torch._C.DisableTorchFunctionSubclass
NoModes = torch._C.DisableTorchFunction  # modes, such as a default device, see nothing either
swap = torch._C._swap_tensor_impl
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)

_devices: dict[torch.device, torch.device] = {}


def same_device(device: torch.device) -> torch.device:
    """One object per device, so that `is` will do."""
    return _devices.setdefault(device, device)


Check = Callable[[torch.Tensor], bool]


class Meta:
    """What is known of a concrete tensor without reading its values; one object per content."""

    __slots__ = ("checks", "device", "dtype", "flat", "inference", "nbytes", "ndim",
                 "requires_grad", "shape", "stride", "ungraded", "view")  # fmt: skip
    recorder = None  # a concrete tensor belongs to no chain
    index = -1

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Ints,
        stride: Ints,
        device: torch.device,
        requires_grad: bool,
        inference: bool,
    ) -> None:
        self.dtype, self.shape, self.stride = dtype, shape, stride
        self.device = same_device(device)
        self.requires_grad, self.inference = requires_grad, inference
        self.ndim = len(shape)
        self.flat = stride == contiguous(shape)
        self.nbytes = dtype.itemsize
        for size in shape:
            self.nbytes *= size
        self.view = View(CODES[dtype], tuple(shape), tuple(stride))
        self.ungraded: Meta | None = None  # the same of a result made under no_grad, once needed
        self.checks: dict[type, Check | None] = {}  # tests for this content, see `_check`


class _Unknown:
    """State of a concrete tensor whose Meta has not been read yet."""

    recorder = None
    index = -1
    device = None


class Held(_Unknown):
    """State of a computed shell that C++ still holds: it keeps its value beside itself."""

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real


class Lost(_Unknown):
    """State of a shell whose value can no longer be computed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


UNKNOWN = _Unknown()


class _Absent:
    """An attribute that the base class has and this one has not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")


class Tensor(torch.Tensor):
    """A tensor whose pointwise ops are recorded and run later as one fused kernel.

    Made by `autofuse.wrap` and `autofuse.fuse`; behaves as the `torch.Tensor` it stands for. The
    dispatch of its ops is installed by `autofuse.tensor`.
    """

    _af: Any = UNKNOWN  # a trie Node while pending; a Meta or UNKNOWN when concrete
    __dlpack_c_exchange_api__ = _Absent()  # C functions that read memory; __dlpack__ asks for it

    def __setattr__(self, name: str, value: object) -> None:
        # an attribute of the user's must not stay on a shell that is used again
        _leave_pending(self)
        torch.Tensor.__setattr__(self, name, value)


Tensor.__module__ = "torch"  # torch's own messages name the class
torch.Tensor._af = UNKNOWN  # type: ignore[attr-defined] - another thread may take the class away
_leave_pending = lambda tensor: tensor  # noqa: E731 - set by chain, which knows how to flush
_set = torch.Tensor.__setattr__
use_count = torch.Tensor._use_count  # type: ignore[attr-defined]

address_of = torch._C.TensorBase.data_ptr  # type: ignore[attr-defined] - unpatched
requires_grad_of = torch.Tensor.requires_grad.__get__
raw_version_of = torch.Tensor._version.__get__  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1 for an inference tensor, which has none."""
    try:
        return raw_version_of(tensor)
    except RuntimeError:
        return -1


_metas: dict[tuple[Any, ...], Meta] = {}


def make_shell(meta: Meta, state: object) -> Tensor:
    """A new pending shell that reports `meta`."""
    shell = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        Tensor, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device
    )
    _set(shell, "_af", state)
    return shell


def make_meta(
    dtype: torch.dtype, shape: Ints, stride: Ints, device: torch.device, requires_grad: bool = False
) -> Meta:
    """The Meta of a result."""
    key = (dtype, shape, stride, device, requires_grad, torch.is_inference_mode_enabled())
    meta = _metas.get(key)
    if meta is None:
        meta = _metas[key] = Meta(*key)
    return meta


def plain_meta(tensor: torch.Tensor) -> Meta | None:
    """The Meta of a tensor of torch's own class; None if autofuse cannot read such a tensor."""
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor._is_zerotensor():
        return None
    return fresh_meta(tensor)


def fresh_meta(tensor: torch.Tensor) -> Meta | None:
    """`plain_meta` for the result of an op that makes dense tensors."""
    key = (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        requires_grad_of(tensor),
        tensor.is_inference(),
    )
    meta = _metas.get(key)
    return _new_meta(key) if meta is None else meta


class Place(Protocol):
    """Where tensors of a few Metas are likely to be met again and again."""

    likely: tuple[Any, ...]  # a check, its Meta, a check, its Meta, ...


_MOST = 8  # Metas at a place: the layers of a model call the same functions


def likely_meta(tensor: torch.Tensor, place: Place) -> Meta | None:
    """`plain_meta`, in one call (0.2 us instead of 1.4) for what was met twice.

    torch.compile's guards test class, dispatch keys, dtype, device, sizes, strides and
    requires_grad, and so every flag that `plain_meta` looks at; but for inference tensors, which
    they tell only where the mode is that of their making: a place belongs to one inference mode.
    """
    meta = met(tensor, place)
    return learned(tensor, place) if meta is None else meta


def met(tensor: torch.Tensor, place: Place) -> Meta | None:
    """The Meta of a plain tensor, if `place` has a check for it."""
    likely = place.likely
    for k in range(0, len(likely), 2):
        if likely[k](tensor):
            return likely[k + 1]
    return None


def learned(tensor: torch.Tensor, place: Place) -> Meta | None:
    """The Meta of a plain tensor without a check at `place`, which has one next time.

    With more Metas than there is room for each has its own slot, so that those met in turns do not
    all drive each other out.
    """
    meta = plain_meta(tensor)
    check = None if meta is None else _check(tensor, meta)
    if check is not None:
        pairs = list(zip(place.likely[::2], place.likely[1::2], strict=True))
        pairs = [pair for pair in pairs if pair[1] is not meta]  # its check was for other modes
        if len(pairs) < _MOST:
            pairs.append((check, meta))
        else:
            pairs[id(meta) // 64 % _MOST] = (check, meta)
        place.likely = tuple([item for pair in pairs for item in pair])
    return meta


def _check(tensor: torch.Tensor, meta: Meta) -> Check | None:
    """The test for tensors of the class and the Meta of `tensor`, in the modes of this moment.

    None the first time: to make one takes as long as `plain_meta`, and sizes may never come again.
    """
    cls = tensor.__class__
    if _Guards is None or cls not in meta.checks:
        meta.checks[cls] = None
        return None
    check = meta.checks[cls]
    if check is None or not check(tensor):  # under other modes
        guards = _Guards(
            tensor, dynamic_dims_sizes=[list(meta.shape)], dynamic_dims_strides=[list(meta.stride)]
        )
        check = meta.checks[cls] = guards.check
    return check


_READERS = tuple(
    getattr(torch.Tensor, name).__get__ for name in ("layout", "dtype", "shape", "device",
                                                     "requires_grad")
)  # fmt: skip
_stride_of, _is_neg, _is_zero, _is_inference = (
    torch.Tensor.stride,
    torch.Tensor.is_neg,
    torch.Tensor._is_zerotensor,
    torch.Tensor.is_inference,
)


def concrete_meta(tensor: Tensor) -> Meta | None:
    """The Meta of a wrapped concrete tensor, remembered on it until an op may change it."""
    with NoTorchFunction():
        layout, dtype, shape, device, requires_grad = [read(tensor) for read in _READERS]
        if layout is not torch.strided or _is_neg(tensor) or _is_zero(tensor):
            return None
        key = (dtype, shape, _stride_of(tensor), device, requires_grad, _is_inference(tensor))
    meta = _metas.get(key) or _new_meta(key)
    if meta is not None:
        tensor.__dict__["_af"] = meta
    return meta


def _new_meta(key: tuple[Any, ...]) -> Meta | None:
    dtype, shape, stride, device, requires_grad, inference = key
    if dtype not in CODES or device.type not in ("cpu", "cuda"):
        return None
    if len(_metas) > 65536:
        _metas.clear()
    meta = _metas[key] = Meta(dtype, tuple(shape), stride, device, requires_grad, inference)
    return meta


def become(shell: Tensor, real: torch.Tensor, meta: Any, node: object) -> Tensor | None:
    """Give `shell` the value `real`; returns the object that can serve as a shell of `node`.

    Returns None where C++ holds the shell: the value is then kept beside it. Call it without
    torch functions on.
    """
    if use_count(shell) == 1:
        try:
            swap(shell, real)
        except RuntimeError:  # C++ has a weak reference
            if not is_shell(shell):
                raise  # from a signal handler, after the exchange
        else:
            return gave(shell, real, meta, node)
    _set(shell, "_af", Held(real))
    return None


def gave(shell: Tensor, real: torch.Tensor, meta: Any, node: object) -> Tensor:
    """The rest of `become`, once they are exchanged."""
    shell.__dict__["_af"] = meta  # 0.04 us, __setattr__ 0.09 us
    real.__class__ = Tensor
    real.__dict__["_af"] = node
    return real  # type: ignore[return-value]


is_shell = torch._C.TensorBase._python_dispatch.__get__  # type: ignore[attr-defined]
# functions hold what they are given; a method would see what another thread exchanges it for
_detach, _permute = torch._C._VariableFunctions.detach, torch._C._VariableFunctions.permute


def plain_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor of torch's own class over the same memory, version counter and autograd history.

    None where there is no memory behind `tensor`: another thread may exchange it at any moment.
    """
    was, grad = torch.is_grad_enabled(), tensor.requires_grad
    dims = (*range(tensor.ndim),)
    try:
        torch._C._set_grad_enabled(True)  # or the alias would say so and lead nowhere
        if grad:
            # no Python runs from the test to the end of the call
            return _permute(tensor, dims) if not tensor._python_dispatch else None
        return _detach(tensor) if not tensor._python_dispatch else None
    finally:
        torch._C._set_grad_enabled(was)


def alias(tensor: torch.Tensor) -> Tensor:
    """A wrapped tensor over the same memory, version counter and autograd history."""
    tangent = forward_ad._current_level >= 0  # which detach would drop
    with NoTorchFunction():
        if tensor.requires_grad and not torch.is_inference_mode_enabled():
            with torch.enable_grad():  # or the alias would say so and lead nowhere
                other = torch.ops.aten.alias.default(tensor)
        else:
            other = torch.ops.aten.alias.default(tensor) if tangent else tensor.detach()
    other.__class__ = Tensor
    return other  # type: ignore[return-value]
