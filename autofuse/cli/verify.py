"""Verifying: reductions in chains against eager's, bit for bit, on the GPU at hand.

Programs of every kind of reduction, with pointwise ops before and after it, and their gradients,
over rows whose sizes meet every kernel that torch has for them.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..api import materialize, unwrap, wrap
from ..chain import verified
from ..observe.counters import reset_stats, stats
from ..ops.reductions import NODES
from ..run.proof import bits_differ, filled
from ..settings.config import config
from ..supply.service import enough_workers
from ..torch_private import has_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (2, 7, 33, 64, 100, 128, 131, 256, 1000, 1023, 1024, 1032, 2050, 4096, 5000, 9000)
ROWS = (1, 3, 70)
Case = tuple[int, int, str, int]  # rows, columns, kind of values, elements before the first row


class Values(NamedTuple):
    """What the programs read: x and y of the rows' shape, w and b of one row, one number a row.

    Of the rows' shape too: padded, with elements between its rows, and turned, a transposed one.
    """

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    number: torch.Tensor
    padded: torch.Tensor
    turned: torch.Tensor


def _softmax_written(v: Values) -> Any:
    e = (v.x - v.x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _norm_of_sum(v: Values) -> Any:
    h = v.x + v.y
    return h, F.layer_norm(h, v.x.shape[-1:], v.w, v.b, 1e-5)


def _rms_written(v: Values) -> Any:
    return v.x * torch.rsqrt(v.x.pow(2).mean(-1, keepdim=True) + 1e-6) * v.w


def _norm_written(v: Values) -> Any:
    h = v.x * v.y
    centred = h - h.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-5) * v.w + v.b


def _rms_in_float32(v: Values) -> Any:
    h = v.x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return v.w * h.to(v.x.dtype)


def _norm_by_std(v: Values) -> Any:
    """A LayerNorm as it was written before torch had one."""
    h = v.x + v.y
    mean, std = h.mean(-1, keepdim=True), h.std(-1, keepdim=True)
    return v.w * (h - mean) / (std + 1e-6) + v.b


def _numbers(v: Values) -> Any:
    total = (v.x * v.y).sum(-1)
    return total, (v.x - v.y).mean(-1, keepdim=True) * v.number


def _with_three_dims(v: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y as [B, S, N]."""
    rows = v.x.shape[0]
    dims = (-1, 2 if rows % 2 == 0 else rows)
    return v.x.unflatten(0, dims), v.y.unflatten(0, dims)


def _three_dims(v: Values) -> Any:
    """Rows of [B, S, N] beside [B, 1, N], which repeats."""
    x, y = _with_three_dims(v)
    h = x + y[:, :1]
    return h - h.mean(-1, keepdim=True), h.amin(-1)


def _two_dims(v: Values) -> Any:
    """Rows along the last two of [B, S, N]."""
    x, y = _with_three_dims(v)
    h = x * y
    return h.mean((1, 2)) * 2.0, h - h.amax((-2, -1), keepdim=True)


def _turned(v: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y as [N, M], of as many columns as they have rows."""
    x, y = (t.reshape(t.shape[::-1]) for t in (v.x, v.y))
    return x, y


def _logarithms_of_columns(v: Values) -> torch.Tensor:
    x, y = _turned(v)
    return torch.log_softmax(x * y, 0) * y


def _columns(v: Values) -> Any:
    x, y = _turned(v)
    return (v.x * v.y).sum(0) * v.w, (v.x - v.y).mean(0, keepdim=True), (x * y).std(0), x * y - 1.0


def _extrema_of_columns(v: Values) -> Any:
    x, y = _turned(v)
    return (x * y).amin(0), (x + y).amax(0, keepdim=True) - x, (v.x * v.y).any(0)


def _axes(v: Values) -> Any:
    """Over dimensions of [B, S, N] that do not follow each other, of [N, S, B] that lie so in
    memory, and beside what repeats along a part of a row; of rows with space between them."""
    x, y = _with_three_dims(v)
    turned = x.transpose(0, 2) * y.transpose(0, 2)
    whole = (x - x[:, :1] * 2.0).mean(), (v.padded * v.number).sum()
    return (x * y).sum((0, 2)), turned.mean(0) * 2.0, turned.amax((0, 1)), v.padded.sum(-1), *whole


def _statistics_of_channels(v: Values) -> Any:
    x, y = _with_three_dims(v)
    h = x * y
    apart = h - h.mean((0, 2), keepdim=True)
    return apart / (apart.square().mean((0, 2), keepdim=True) + 1e-5).sqrt(), h.var((0, 2))


def _norm_of_channels(v: Values) -> Any:
    """As ConvNeXt has it, of [N, C, L]."""
    columns = v.x.shape[1]
    shape = (columns // 4, 4) if columns % 4 == 0 else (columns, 1)
    h = v.x.unflatten(1, shape) + v.y.unflatten(1, shape)
    h = h - h.mean(1, keepdim=True)
    return h / torch.sqrt(h.pow(2).mean(1, keepdim=True) + 1e-6)


def _standardized(v: Values) -> Any:
    h = v.x - v.y
    return (h - h.mean()) / (h.std() + 1e-8)


def _saved(normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The statistics that autograd's node of a norm has saved."""
    materialize(normed)
    node, names = normed.grad_fn, ("_saved_result1", "_saved_result2")
    return tuple(getattr(node, name) for name in names if hasattr(node, name))


def _normed(x: torch.Tensor, v: Values, columns: int) -> torch.Tensor:
    """batch_norm by running statistics of so many channels."""
    m, w, b = v.w[:columns], v.w[-columns:], v.b[:columns]
    return F.batch_norm(x, m, unwrap(v.b)[-columns:].abs(), w, b)


def _channels(v: Values) -> Any:
    columns = v.x.shape[1]
    return F.relu(_normed(v.x * 0.5, v, columns) + v.y)


def _images(v: Values) -> Any:
    """As [N, C, L]."""
    columns = v.x.shape[1]
    shape = (columns // 2, 2) if columns % 2 == 0 else (columns, 1)
    x, y = v.x.unflatten(1, shape), v.y.unflatten(1, shape)
    return F.relu(_normed(x * 0.5, v, shape[0]) + y)


def _images_by_pixel(v: Values) -> Any:
    """As [N, C, 2, 1] in channels_last; odd columns are not two rows."""
    columns = v.x.shape[1]
    shape = (2, 1, columns // 2) if columns % 2 == 0 else (1, 1, columns)
    x, y = (t.unflatten(1, shape).permute(0, 3, 1, 2) for t in (v.x, v.y))
    return F.relu(_normed(x * 0.5, v, shape[2]) + y) if shape[0] == 2 else (x * 0.5, y * 0.5)


def _groups(v: Values) -> torch.Tensor:
    """As [N, 4, L] in two groups; odd columns as [N, C] in one."""
    columns = v.x.shape[1]
    shape, groups = ((4, columns // 4), 2) if columns % 4 == 0 else ((columns,), 1)
    x, y = v.x.unflatten(1, shape), v.y.unflatten(1, shape)
    w, b = v.w[: shape[0]], v.b[: shape[0]]
    return (F.relu(F.group_norm(x * y, groups, w, b, 1e-3)) + y).flatten(1)


def _layer_norm_saves(v: Values) -> Any:
    with torch.enable_grad():
        h = v.x.detach().requires_grad_() * v.y
        return _saved(F.layer_norm(h, v.x.shape[-1:], v.w, v.b, 1e-5))


def _rms_norm_saves(v: Values) -> Any:
    with torch.enable_grad():
        h = v.x.detach().requires_grad_() * v.y
        return _saved(F.rms_norm(h, v.x.shape[-1:], v.w, 1e-6))


def _gradients(program: Callable[[Values], Any]) -> Callable[[Values], Any]:
    """Those of x, y, w and b, of which `program` makes rows."""

    def differentiated(v: Values) -> Any:
        with torch.enable_grad():
            leaves = [unwrap(value).detach().requires_grad_() for value in v[:4]]
            plain = type(v.x) is torch.Tensor
            out = program(Values(*(leaves if plain else map(wrap, leaves)), *v[4:]))  # type: ignore[arg-type]
            g = unwrap(v.padded).contiguous()
            return torch.autograd.grad(unwrap(materialize(out)), leaves, g, allow_unused=True)

    return differentiated


DIFFERENTIATED: dict[str, Callable[[Values], Any]] = {
    "softmax(x * y) * y": lambda v: torch.softmax(v.x * v.y, -1) * v.y,
    "softmax(x * 0.125 + y)": lambda v: F.softmax(v.x * 0.125 + v.y, -1),
    "log_softmax(x + y) * y": lambda v: F.log_softmax(v.x + v.y, -1) * v.y,
    "log_softmax(x * y)": lambda v: F.log_softmax(v.x * v.y, -1),
    "relu(layer_norm(x * y)) + y": lambda v: (
        F.relu(F.layer_norm(v.x * v.y, v.x.shape[-1:], v.w, v.b)) + v.y
    ),
    "layer_norm(x + y), no weights": lambda v: F.layer_norm(v.x + v.y, v.x.shape[-1:]),
    "two layer norms": lambda v: (
        F.layer_norm(F.layer_norm(v.x + v.y, v.x.shape[-1:], v.w, v.b) * v.y, v.x.shape[-1:])
        + v.x
    ),
    "rms_norm(x + y) * y": lambda v: F.rms_norm(v.x + v.y, v.x.shape[-1:], v.w, 1e-6) * v.y,
    "rms_norm(x * y), no weight": lambda v: F.rms_norm(v.x * v.y, v.x.shape[-1:]),
    "RMSNorm as written": _rms_written,
    "relu(group_norm(x * y)) + y": _groups,
    "layer norm as written": _norm_written,
    "softmax as written, without amax": lambda v: (
        (lambda e: e / e.sum(-1, keepdim=True))((v.x * v.y * 0.125).exp())
    ),
    "x * sigmoid(mean(x * y))": lambda v: v.x * (v.x * v.y).mean(-1, keepdim=True).sigmoid(),
    "x * sum(x * y)": lambda v: v.x * (v.x * v.y).sum(-1, keepdim=True),
    "x - mean(x * y) * 2": lambda v: v.x - (v.x * v.y).mean(-1).mul(2.0).unsqueeze(-1),
    "normalize(x * y) * w": lambda v: F.normalize(v.x * v.y, dim=-1) * v.w,
    "x * var(x * y)": lambda v: v.x * (v.x * v.y).var(-1, keepdim=True),
    "x * std(x + y), biased": lambda v: v.x * (v.x + v.y).std(-1, keepdim=True, correction=0),
    "layer norm by std": _norm_by_std,
    "x * sum(x * y), of all": lambda v: v.x * (v.x * v.y).sum(),
    "h - mean(h = x * y), of all": lambda v: (lambda h: h - h.mean())(v.x * v.y),
    "x / norm(x + y), of all": lambda v: v.x / (v.x + v.y).norm(),
    "x - logsumexp(x * y)": lambda v: v.x - torch.logsumexp(v.x * v.y, -1, True),
    "softmax(x * y) of columns": lambda v: torch.softmax(v.x * v.y, 0) * v.y,
    "log_softmax of columns": lambda v: _logarithms_of_columns(v).view(v.x.shape),
    "x - mean(x * y) of columns": lambda v: v.x - (v.x * v.y).mean(0) * 2.0,
    "normalize(x * y) of columns": lambda v: F.normalize(v.x * v.y, dim=0) * v.w,
    "x * std(x + y) of columns": lambda v: v.x * (v.x + v.y).std(0, keepdim=True, correction=0),
    "x * mse_loss(x * y, y)": lambda v: v.x * F.mse_loss(v.x * v.y, v.y),
    "x * smooth_l1_loss(x * y, x)": lambda v: (
        v.x * F.smooth_l1_loss(v.x * v.y, v.x, reduction="sum", beta=0.5)
    ),
    "x * huber_loss(x * y, y)": lambda v: v.x * F.huber_loss(v.x * v.y, v.y, delta=0.75),
    "x * loss of logits(x * y, y)": lambda v: (
        v.x * F.binary_cross_entropy_with_logits(v.x * v.y, v.y)
    ),
}  # fmt: skip
PROGRAMS: dict[str, Callable[[Values], Any]] = {
    "softmax(x * s + mask)": lambda v: F.softmax(v.x * 0.125 + v.y, -1),
    "log_softmax(x + y)": lambda v: F.log_softmax(v.x + v.y, -1),
    "softmax(x) * y": lambda v: torch.softmax(v.x, -1) * v.y,
    "-log_softmax(x)": lambda v: -torch.log_softmax(v.x, -1),
    "relu(layer_norm(x)) + res": lambda v: (
        F.relu(F.layer_norm(v.x, v.x.shape[-1:], v.w, v.b)) + v.y
    ),
    "h, layer_norm(h = x + res)": _norm_of_sum,
    "layer_norm(x * y), no weights": lambda v: F.layer_norm(v.x * v.y, v.x.shape[-1:]),
    "rms_norm(x + res)": lambda v: F.rms_norm(v.x + v.y, v.x.shape[-1:], v.w, 1e-6),
    "rms_norm(x), no weight, * y": lambda v: F.rms_norm(v.x, v.x.shape[-1:]) * v.y,
    "RMSNorm as written": _rms_written,
    "RMSNorm in float32": _rms_in_float32,
    "x - mean": lambda v: v.x - v.x.mean(-1, keepdim=True),
    "x / sum(abs(x))": lambda v: v.x / v.x.abs().sum(-1, keepdim=True),
    "softmax as written": _softmax_written,
    "extrema": lambda v: ((v.x * v.y).amin(-1), (v.x + v.y).amax(-1, keepdim=True) - v.x),
    "numbers of rows": _numbers,
    "sum(x) + 1": lambda v: v.x.sum(-1) + 1.0,
    "mean(x + w)": lambda v: (v.x + v.w).mean(-1),
    "x * w / sum(x * w + b)": lambda v: v.x * v.w / (v.x * v.w + v.b).sum(-1, keepdim=True),
    "x + padded - amax": lambda v: v.x + v.padded - (v.x * v.padded).amax(-1, keepdim=True),
    "sum(x * turned) * turned": lambda v: (v.x * v.turned).sum(-1, keepdim=True) * v.turned,
    "rms_norm(x + padded) + w": lambda v: F.rms_norm(v.x + v.padded, v.x.shape[-1:], v.w) + v.w,
    "mean, amin of three dims": _three_dims,
    "x / norm(x + y)": lambda v: v.x / (v.x + v.y).norm(dim=-1, keepdim=True),
    "normalize(x * y) * w": lambda v: F.normalize(v.x * v.y, dim=-1) * v.w,
    "vector_norm(x) + 1": lambda v: torch.linalg.vector_norm(v.x, dim=-1) + 1.0,
    "var(x * y)": lambda v: (v.x * v.y).var(-1) + 1.0,
    "std(x + y), biased": lambda v: (v.x + v.y).std(-1, correction=0) * 2.0,
    "layer norm by std": _norm_by_std,
    "mean of squares, of all": lambda v: (v.x - v.y).square().mean(),
    "sum(x * y) + 1, of all": lambda v: (v.x * v.y).sum() + 1.0,
    "x / norm(x + y), of all": lambda v: v.x / torch.linalg.vector_norm(v.x + v.y),
    "extrema, of all": lambda v: (v.x - (v.x * v.y).amax(), (v.x + v.y).amin() * 2.0),
    "var(x * y) + 1, of all": lambda v: (v.x * v.y).var() + 1.0,
    "standardized, of all": _standardized,
    "h, sum(h = x * y), of all": lambda v: (lambda h: (h, h.sum() * 0.5))(v.x * v.y),
    "mean, amax of two dims": _two_dims,
    "logsumexp(x + y)": lambda v: torch.logsumexp(v.x + v.y, -1) * 2.0,
    "logsumexp(x * y), of all": lambda v: v.x - torch.logsumexp(v.x * v.y, (0, 1)),
    "mse_loss(x * 2, y)": lambda v: F.mse_loss(v.x * 2.0, v.y) + 1.0,
    "smooth_l1_loss(x, y)": lambda v: F.smooth_l1_loss(v.x, v.y, beta=0.5) + 1.0,
    "huber_loss(x * y, y), sum": lambda v: (
        F.huber_loss(v.x * v.y, v.y, reduction="sum", delta=0.75) + 1.0
    ),
    "l1_loss(x * y, y)": lambda v: F.l1_loss(v.x * v.y, v.y) * 2.0,
    "loss of logits(x * y, y)": lambda v: F.binary_cross_entropy_with_logits(v.x * v.y, v.y) * 2.0,
    "relu(group_norm(x * y)) + y": _groups,
    "group_norm(x + y), no weights": lambda v: F.group_norm(v.x + v.y, 1) * 2.0,
    "softmax(x + y) of columns": lambda v: torch.softmax(v.x + v.y, 0) * 2.0,
    "log_softmax of columns": _logarithms_of_columns,
    "numbers of columns": _columns,
    "extrema of columns": _extrema_of_columns,
    "norm of channels": _norm_of_channels,
    "reductions over other axes": _axes,
    "statistics of channels": _statistics_of_channels,
    "any, all": lambda v: ((v.x > v.y).any(-1), torch.isfinite(v.x * v.y).all()),
    "counts": lambda v: ((v.x > v.y).sum(-1) * 2, torch.isfinite(v.x * v.y).sum() + 1),
    "max, min": lambda v: ((v.x * v.y).max() * 2.0, v.x - (v.x + v.y).min()),
    "max, min over a dimension": lambda v: (*(v.x * v.y).max(-1), (v.x + v.y).argmin(-1) + 1),
    "batch_norm of columns": _channels,
    "batch_norm of images": _images,
    "batch_norm of channels_last": _images_by_pixel,
    "what layer_norm saves": _layer_norm_saves,
}
HAS_NODE = has_kernel(NODES["rms_norm"], "CUDA")  # elsewhere autograd takes it apart
if HAS_NODE:
    PROGRAMS["what rms_norm saves"] = _rms_norm_saves
PROGRAMS.update(
    (f"d {name}", _gradients(program))
    for name, program in DIFFERENTIATED.items() if HAS_NODE or "rms_norm" not in name
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """One program in one dtype."""

    program: str
    dtype: str
    cases: int = 0
    reduced: int = 0  # cases in which no op was left to eager PyTorch
    kernels: int = 0
    elements: int = 0
    wrong: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)  # why others were

    def __str__(self) -> str:
        text = f"{self.program:32} {self.dtype:9} {self.cases:4} sizes {self.kernels:4} kernels"
        differ = f"{len(self.wrong)} differ: {self.wrong[0]}" if self.wrong else "the same bits"
        return f"{text}  {differ}"


def make(dtype: torch.dtype, case: Case, device: str = "cuda") -> Values:
    """Values of a kind, see `run.proof`."""
    rows, columns, kind, shift = case
    generator = torch.Generator(device).manual_seed(rows * 100003 + columns)

    def normal(*shape: int) -> torch.Tensor:
        """Whose first element stands `shift` behind where memory begins."""
        count = math.prod(shape) + shift
        values = filled(count, kind, generator, 8 * columns)
        return values.to(dtype)[shift:].view(shape)

    return Values(normal(rows, columns), normal(rows, columns), normal(columns), normal(columns),
                  normal(rows, 1), normal(rows, columns + 3)[:, :columns],
                  normal(columns, rows).t())  # fmt: skip


def cases() -> Iterator[Case]:
    for columns in COLUMNS:
        for rows in ROWS:
            yield rows, columns, "plain", 0
        yield 3, columns, "wide", 0
        yield 3, columns, "special", 0
    for rows, columns in ((1, 131072), (1, 150001), (2, 262148), (40, 140000)):
        for kind in ("plain", "wide", "special"):
            yield rows, columns, kind, 0
    for columns in (64, 131, 257, 1024, 2050, 140001):
        for shift in (1, 2, 4, 7):
            yield 40, columns, "plain", shift


def differing(got: Any, want: Any) -> int:
    """Elements of which a bit differs, NaNs being equal."""
    if want is None or got is None:
        return int(got is not want)
    if isinstance(want, tuple):
        return sum(differing(a, b) for a, b in zip(got, want, strict=True))
    if (got.dtype, got.shape, got.stride()) != (want.dtype, want.shape, want.stride()):
        return want.numel()
    return int(bits_differ(got, want).sum())


def compare(
    name: str, dtype: torch.dtype, over: Iterable[Case], device: str = "cuda"
) -> Outcome:  # fmt: skip
    """A program in a dtype over some cases, chain by chain."""
    outcome, program = Outcome(name, str(dtype).removeprefix("torch.")), PROGRAMS[name]
    with torch.no_grad(), verified.assumed():
        for case in over:
            values = make(dtype, case, device)
            want = program(values)
            reset_stats()
            got = unwrap(materialize(program(Values(*map(wrap, values)))))
            found = stats()
            outcome.cases += 1
            outcome.elements += values.x.numel()
            outcome.kernels += found.kernels_launched
            left = [reason for (_, reason) in found.eager_ops if reason != "not in the table"]
            for reason in left:
                outcome.left[reason] = outcome.left.get(reason, 0) + 1
            kernels = 2 if name.startswith("d ") else 1  # of gradients in backward, too
            outcome.reduced += not left and found.kernels_launched >= kernels
            wrong = differing(got, want)
            if wrong:
                rows, columns, kind, shift = case
                outcome.wrong.append(f"[{rows}, {columns}] {kind}, shift {shift}: {wrong} elements")
    return outcome


def set_up() -> None:
    """Compile at once, and have every chain run in a kernel."""
    config.measure, config.always_fuse, config.reductions = False, True, True
    config.compile, config.max_kernels_per_line = "now", 1 << 30


def _begin(index: int) -> None:
    """In a process that compares on GPU `index`."""
    torch.cuda.set_device(index)
    set_up()


def verify() -> int:
    """Compare all kinds on the current GPU, print what is found and keep it; the exit status.

    In several processes, where there are processors, for most of the time goes into compiling.
    """
    if not torch.cuda.is_available():
        print("no GPU: reductions are recorded on CUDA alone")
        return 2
    index = torch.cuda.current_device()
    wrong, left = 0, []
    names, dtypes = zip(*itertools.product(PROGRAMS, DTYPES), strict=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(enough_workers(), context, _begin, (index,)) as pool:
        for outcome in pool.map(compare, names, dtypes, itertools.repeat([*cases()])):
            wrong += len(outcome.wrong)
            if not outcome.reduced:
                left.append(f"{outcome.program} in {outcome.dtype}")
            print(outcome, flush=True)
    device = torch.device("cuda", index)
    if left and not wrong:
        print(f"nothing is kept: no reduction ran in a kernel of {', '.join(left)}")
        return 2
    unsaved = verified.keep(device, same=not wrong)
    if unsaved:
        print(f"this is not kept on disk: {unsaved}")
    print("reductions stay eager here" if wrong else "reductions are fused here")
    return int(wrong > 0)
