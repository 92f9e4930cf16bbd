"""What is known of tensors without reading their values: one Meta per content."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..dtypes import CODES
from ..layout import Ints, contiguous, is_dense, reach
from ..ops.views import WriteOp
from ..program.program import Spec
from ..torch_private import (
    NoModes,
    TensorGuards,
    function_modes,
    in_functorch,
    keys_of,
    requires_grad_of,
)

_devices: dict[torch.device, torch.device] = {}


def same_device(device: torch.device) -> torch.device:
    """One object per device, so that `is` will do."""
    return _devices.setdefault(device, device)


Check = Callable[[torch.Tensor], bool]
# of `by_size`: how many, and Metas in one, of other dtypes and gradients of the same sizes...
BUCKETS, EACH = 1024, 8
MASK, MIXED = 0x7FFFFFFF, 0x9E3779B1  # ...and what makes a number of sizes, see `_keep`


class Meta:
    """What is known of a concrete tensor without reading its values; one object per content."""

    __slots__ = ("checks", "dense", "device", "dtype", "flat", "inference", "keys", "kept",
                 "nbytes", "ndim", "reach", "requires_grad", "shape", "spec", "stand_in", "stride",
                 "ungraded", "write")  # fmt: skip
    recorder: None = None  # a concrete tensor belongs to no chain
    index: int = -1

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Ints,
        stride: Ints,
        device: torch.device,
        requires_grad: bool,
        inference: bool,
    ) -> None:
        self.dtype: torch.dtype = dtype
        self.shape: Ints = shape
        self.stride: Ints = stride
        self.device: torch.device = same_device(device)
        self.requires_grad: bool = requires_grad
        self.inference: bool = inference
        self.ndim: int = len(shape)
        self.flat: bool = stride == contiguous(shape)
        self.dense: bool = is_dense(shape, stride)
        self.nbytes: int = dtype.itemsize * math.prod(shape)
        # bytes from the first element to past the last
        self.reach: int = dtype.itemsize * reach(shape, stride)
        self.spec: Spec = Spec(CODES[dtype], tuple(shape), tuple(stride))
        self.ungraded: Meta | None = None  # the same of a result made under no_grad, once needed
        self.write: WriteOp | None = None  # to memory like this, once needed
        self.stand_in: torch.Tensor | None = None  # one like this without memory, once needed
        self.checks: dict[type, Check | None] = {}  # tests for this content, see `_check`
        # torch's dispatch keys of such tensors, once there is a test; `hot` has its own
        self.keys: int = -1
        self.kept: bool = False  # in `by_size`


class Unknown:
    """State of a concrete tensor whose Meta has not been read yet."""

    recorder = None
    index = -1
    device = None


UNKNOWN = Unknown()


def remember(tensor: torch.Tensor, state: Any) -> None:
    """Let that be known of a concrete tensor of ours; where it is pending by now that stays so."""
    its = tensor.__dict__
    # no Python runs from here...
    if "_af" not in its or its["_af"].recorder is None:
        its["_af"] = state  # ...to here


_metas: dict[tuple[Any, ...], Meta] = {}
# where `hot` finds them: those with a test, by their sizes and strides, the last one first
by_size: list[Meta | None] = [None] * (BUCKETS * EACH)


def _keep(meta: Meta) -> None:
    """Let `hot` know of it, where `hot.inputs.of_size` looks."""
    mixed = meta.ndim
    for number in (*meta.shape, *meta.stride):
        mixed = (mixed * 31 + number) & MASK
    first = ((mixed * MIXED >> 20) & (BUCKETS - 1)) * EACH
    last = by_size[first + EACH - 1]
    if last is not None:
        last.kept = False
    by_size[first : first + EACH] = [meta, *by_size[first : first + EACH - 1]]
    meta.kept = True


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
    with NoModes():
        return None if is_special(tensor) else fresh_meta(tensor)


def fresh_meta(tensor: torch.Tensor) -> Meta | None:
    """`plain_meta` for the result of an op that makes dense tensors."""
    with NoModes():
        key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
               requires_grad_of(tensor), tensor.is_inference())  # fmt: skip
    meta = _metas.get(key)
    return _new_meta(key) if meta is None else meta


class Place(Protocol):
    """Where tensors of a few Metas are likely to be met again and again."""

    likely: tuple[Any, ...]  # a check, its Meta, a check, its Meta, ...


_MOST = 16  # Metas at a place: what all layers of a model give and take meets where chains begin


def likely_meta(tensor: torch.Tensor, place: Place) -> Meta | None:
    """`plain_meta`, in one call (0.2 us; torch's own accessors take 1.4) for what was met twice.

    torch.compile's guards test class, dispatch keys, dtype, device, sizes, strides and
    requires_grad, and so every flag that `plain_meta` looks at; but for inference tensors, which
    they tell only in the inference mode of their making. A nested tensor, which has no strides to
    test, would end the process.
    """
    meta = met(tensor, place)
    return learned(tensor, place) if meta is None else meta


def met(tensor: torch.Tensor, place: Place) -> Meta | None:
    """The Meta of a plain tensor, if `place` has a check for it."""
    likely = place.likely
    if likely and is_nested(tensor):
        return None
    for k in range(0, len(likely), 2):
        if likely[k](tensor):
            meta = likely[k + 1]
            if torch.is_inference_mode_enabled() and keys_of(tensor).raw_repr() != meta.keys:
                continue  # its guard was made in no such mode, as that of the other kind
            if not meta.kept:  # others have taken its place
                _keep(meta)
            return meta
    return None


def is_nested(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is nested, without a word to modes."""
    if not function_modes():
        return tensor.is_nested
    with NoModes():
        return tensor.is_nested


def learned(tensor: torch.Tensor, place: Place) -> Meta | None:
    """The Meta of a plain tensor without a check at `place`, which has one next time."""
    meta = plain_meta(tensor)
    if meta is not None:
        _learn(tensor, meta, place)
    return meta


def _learn(tensor: torch.Tensor, meta: Meta, place: Place) -> None:
    """Have a check for such tensors at `place`.

    With more Metas than there is room for each has its own slot, so that those met in turns do not
    all drive each other out.
    """
    check = _check(tensor, meta)
    if check is not None:
        pairs = list(zip(place.likely[::2], place.likely[1::2], strict=True))
        pairs = [pair for pair in pairs if pair[1] is not meta]  # its check was for other modes
        if len(pairs) < _MOST:
            pairs.append((check, meta))
        else:
            pairs[id(meta) // 64 % _MOST] = (check, meta)
        place.likely = tuple([item for pair in pairs for item in pair])


def _check(tensor: torch.Tensor, meta: Meta) -> Check | None:
    """The test for tensors of the class and the Meta of `tensor`, in the modes of this moment.

    None the first time: to make one takes as long as `plain_meta`, and sizes may never come again.
    """
    cls = tensor.__class__
    if TensorGuards is None or cls not in meta.checks:
        meta.checks[cls] = None
        return None
    check = meta.checks[cls]
    if check is None or not check(tensor):  # under other modes
        guards = TensorGuards(
            tensor, dynamic_dims_sizes=[list(meta.shape)], dynamic_dims_strides=[list(meta.stride)]
        )
        check = meta.checks[cls] = guards.check
        meta.keys = keys_of(tensor).raw_repr()
    if not meta.kept:  # also where others have taken its place since
        _keep(meta)
    return check


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """One test for as many tensors with the classes and Metas of these, in these modes."""
    if TensorGuards is None:
        return None
    with NoModes():
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check


_READERS = tuple(
    getattr(torch.Tensor, name).__get__ for name in ("dtype", "shape", "device", "requires_grad")
)
_dtype_of, _shape_of = _READERS[:2]
_stride_of, _is_inference = torch.Tensor.stride, torch.Tensor.is_inference
_layout_of = torch.Tensor.layout.__get__  # type: ignore[attr-defined]
_nested_of = torch.Tensor.is_nested.__get__  # type: ignore[attr-defined]
_is_neg, _is_zero = torch.Tensor.is_neg, torch.Tensor._is_zerotensor
_has_names = getattr(torch.Tensor, "has_names", lambda tensor: False)


def is_special(tensor: torch.Tensor) -> bool:
    """Whether there is more to its values or its ops than dtype, sizes and strides say.

    Inside torch.func nobody records, and what it makes of nested tensors has no sizes.
    """
    if _layout_of(tensor) is not torch.strided or in_functorch() or _nested_of(tensor):
        return True
    return _is_neg(tensor) or _is_zero(tensor) or _has_names(tensor)


def lies_as(tensor: torch.Tensor, meta: Meta) -> bool:
    """Whether the memory of a tensor of ours is still as `meta` says that it remembers.

    C's functions can change it without a word to anybody. In `NoModes`.
    """
    dtype, shape = _dtype_of(tensor), _shape_of(tensor)
    return shape == meta.shape and _stride_of(tensor) == meta.stride and dtype is meta.dtype


def still_lies_as(tensor: torch.Tensor, meta: Meta) -> bool:
    """`lies_as`, in any mode."""
    with NoModes():
        return lies_as(tensor, meta)


def concrete_meta(tensor: torch.Tensor, place: Place | None = None) -> Meta | None:
    """The Meta of a wrapped concrete tensor, remembered on it until an op may change it.

    place: where others like it are likely to come.
    """
    if in_functorch():
        place = None  # nested ones inside vmap end the process
    with NoModes():
        meta = None if place is None else met(tensor, place)
        if meta is None:
            if is_special(tensor):
                return None
            dtype, shape, device, requires_grad = [read(tensor) for read in _READERS]
            key = (dtype, shape, _stride_of(tensor), device, requires_grad, _is_inference(tensor))
            meta = _metas.get(key) or _new_meta(key)
            if meta is None:
                return None
            if place is not None:
                _learn(tensor, meta, place)
    remember(tensor, meta)
    return meta


def _new_meta(key: tuple[Any, ...]) -> Meta | None:
    dtype, shape, stride, device, requires_grad, inference = key
    if dtype not in CODES or device.type not in ("cpu", "cuda"):
        return None
    if len(_metas) > 65536:
        _metas.clear()
        for known in by_size:
            if known is not None:
                known.kept = False
        by_size[:] = [None] * len(by_size)
    meta = _metas[key] = Meta(dtype, tuple(shape), stride, device, requires_grad, inference)
    return meta
