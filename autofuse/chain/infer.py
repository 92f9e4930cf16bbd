"""Inference: what an op makes of its operands, by eager's rules, or why it stays eager.

Pure: from the table's row and what is known of the operands to dtype, shape, strides.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from .. import layout
from ..dtypes import CODES, Wide
from ..kernel.source import carried
from ..kernel.text import parse
from ..ops.autocast import cast_of
from ..ops.row import Op
from ..program.program import CONST, Ref
from .meta import Meta, make_meta

# what torch's loops do faster than ones that call libm (bench/cpu.py): ops, and functions of
# their expressions, by the type they compute in; a chain of small tensors is dispatch in the main
_SLOW = {
    "f32": frozenset("lgamma digamma erfinv fmod".split()),
    "f64": frozenset(
        "expm1 log10 log1p sinh cosh tanh atanh sin cos tan asin acos atan atan2 erf erfc pow "
        "lgamma digamma erfinv".split()
    ),
}
_LARGE = 1 << 16  # elements
_WIDEST = (1 << 31) - 1  # bytes, up to which torch's kernels for channels are one and the same
_NARROW = ("i32", "i16", "i8", "u8")  # than an int may be


@cache
def _is_slow(op: Op, common: str) -> bool:
    statements = parse(op.expression(common, "cpu"))
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return not _SLOW.get(carried(common), frozenset()).isdisjoint({op.name, *names})


def _stride(
    op: Op, device: torch.device, common: torch.dtype, shape: layout.Ints, views: list[Meta | type]
) -> layout.Ints:
    """The strides that eager gives to the result of `op`; views: its operands, Consts by class."""
    tensors = [view for view in views if isinstance(view, Meta)]
    first = tensors[0]
    if first.flat and 0 not in shape and all(meta.shape == shape and meta.flat for meta in tensors):
        return first.stride
    if device.type in op.contiguous:
        return layout.contiguous(shape)
    if op.carries(common) and first.shape == shape:
        return layout.copied_stride(shape, first.stride)
    if op.strides is not None and not op.carries(common):
        return op.strides(first.shape, first.stride)
    # torch copies an operand that is promoted: on the CPU, and where its kernel does not promote
    apart = op.scalars_apart and len(tensors) == 1
    copies = device.type == "cpu" or apart or op.selects
    strides: list[tuple[layout.Ints, layout.Ints]] = []
    for view, role in zip(views, op.roles, strict=True):
        if not isinstance(view, Meta):
            if role == "promote" and not op.scalars_apart:
                strides.append(((), ()))
        elif copies and role == "promote" and view.dtype is not common:
            strides.append((view.shape, layout.copied_stride(view.shape, view.stride)))
        else:
            strides.append((view.shape, view.stride))
    return layout.result_stride(shape, strides[::-1] if op.reversed else strides)


def _reason_of_channels(op: Op, args: Sequence[Ref], views: list[Meta | type]) -> str:
    """Why an op over channels is eager; empty if it is not."""
    x, *others = views
    assert isinstance(x, Meta)
    given = x.shape, x.stride
    # what is both, torch takes for one or the other
    is_last = layout.is_channels_last(*given) and not layout.is_contiguous(*given)
    if not (x.flat or is_last) or x.ndim < 2 or not 0 < x.nbytes <= _WIDEST:
        return "channels of another layout"
    numbers = [
        (ref, view)
        for ref, view, role in zip(args[1:], others, op.roles[1:], strict=True)
        if role == "channel"
    ]
    dtypes = {view.dtype for _, view in numbers if isinstance(view, Meta)}
    if len(dtypes) > 1 or not dtypes <= {x.dtype, torch.float32}:
        return "operands of channels in other dtypes"
    for ref, view in numbers:
        if not isinstance(view, Meta) or view.shape != x.shape[1:2] or not view.flat:
            return "operands of channels of another shape"
        if 0 <= ref < CONST:
            return "operands of channels that are not in memory"
    return ""


class Cut(str):
    """Why another chain begins with an op: its operands are in memory there."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """An op after some program, as far as its operands decide."""

    args: tuple[Ref, ...]
    common: str  # type code the operands are converted to
    meta: Meta  # of the result
    inputs: tuple[Meta, ...]  # the program's, and those that this op brings
    consts: tuple[type, ...]
    limits: tuple[float, float] | None  # of Consts that have to fit a dtype


def referred(
    operands: Sequence[int | Meta | type],
    metas: Sequence[Meta],
    inputs: list[Meta],
    consts: list[type],
) -> tuple[list[Ref], list[Meta | type]]:
    """What a step's operands refer to, and what they are; as `infer` has them.

    inputs, consts: of the program before, to which those are added that are new.
    """
    args: list[Ref] = []
    kinds: list[Meta | type] = []
    for operand in operands:
        kind: Meta | type
        if isinstance(operand, int):
            args.append(operand)
            kind = metas[operand] if operand >= 0 else inputs[~operand]
        elif isinstance(operand, Meta):
            args.append(~len(inputs))
            inputs.append(operand)
            kind = operand
        else:
            args.append(CONST + len(consts))
            consts.append(int if operand is Wide else operand)
            kind = operand
        kinds.append(kind)
    return args, kinds


def infer(
    op: Op,
    operands: Sequence[int | Meta | type],
    metas: Sequence[Meta],
    inputs: tuple[Meta, ...],
    consts: tuple[type, ...],
    device: torch.device,
    grad_mode: bool,
    relaxed: bool,
    autocast: bool = False,
) -> Inferred | str | torch.dtype:
    """What `op` makes of `operands`, or why it has to run as eager PyTorch.

    operands: as in an edge of the trie. metas: of the program's pending values, by index. inputs,
    consts: the program's. grad_mode: whether it is recorded in grad mode. autocast: whether under
    autocast, which may have to cast operands first: then this gives the dtype.
    """
    reads, numbers = list(inputs), list(consts)
    args, views = referred(operands, metas, reads, numbers)
    tensors = [view for view in views if isinstance(view, Meta)]
    if any(meta.device is not device for meta in tensors):
        return "operands on several devices"
    if autocast:
        cast = cast_of(op.name, device.type, [meta.dtype for meta in tensors])
        if cast is not None:
            return cast
    if op.by_channel:
        reason = _reason_of_channels(op, args, views)
        if reason:
            return reason
        shape: layout.Ints | None = tensors[0].shape
    else:
        shape = layout.broadcast([meta.shape for meta in tensors])
        if op.move is not None and shape is not None:
            shape = op.move.shape_of(shape)
    if shape is None:
        return "shapes that do not broadcast"
    dtypes = tuple(
        (view.dtype, view.ndim) if isinstance(view, Meta) else (view, 0) for view in views
    )
    resolved = op.resolve(dtypes)
    if resolved is None:
        return "dtypes that are not fused"
    common, result = resolved
    code = CODES[common]
    if Wide in views and code in ("f32", "f16", "bf16"):
        return "an int that float64 would round first"
    if device.type == "cpu" and code in ("f16", "bf16"):
        if any(meta.ndim == 0 and meta.dtype is not common for meta in tensors):
            return "a wider 0-d tensor, which the CPU does not round"
    if not (op.identical or relaxed):
        return "other bits than eager's; config.relaxed fuses it"
    if device.type == "cpu" and op.divides(code):
        return "integer division, which raises on the CPU"
    if device.type == "cpu" and math.prod(shape) >= _LARGE and _is_slow(op, code):
        return "a large tensor on the CPU, where eager is faster"
    stride = _stride(op, device, common, shape, views)
    graph = grad_mode and result.is_floating_point and any(meta.requires_grad for meta in tensors)
    if graph and not op.grad:
        return "no derivative rule"
    if graph and any(meta.inference for meta in tensors):
        return "an inference tensor, which autograd cannot save"
    limits = None
    if op.fits and common is not torch.bool:
        info = torch.finfo(common) if common.is_floating_point else torch.iinfo(common)
        limits = (max(info.min, -info.max), info.max)  # `sub` negates its alpha
    elif op.result == "bool" and code in _NARROW and (int in views or Wide in views):
        info = torch.iinfo(common)  # what torch compares is the number modulo 2 ** bits
        limits = (info.min, info.max)
    meta = make_meta(result, shape, stride, device, graph)
    return Inferred(tuple(args), code, meta, tuple(reads), tuple(numbers), limits)
