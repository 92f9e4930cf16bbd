"""Check mode: every flush that launches a kernel is also run as eager ops, and compared.

On CUDA every bit counts. On the CPU values of sums, products, quotients, comparisons and selections
have to be equal; where a function stands in the chain, eager is run again with the results of its
functions moved by some units in the last place, and the kernel may be as far away as that carries.
Results, versions and graphs stay what they are without it; backward kernels are not compared, nor
are chains under `config.relaxed`.
"""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from . import observe
from .chain import Chain
from .codegen import parse
from .compile import capturing
from .config import config, watch
from .errors import MismatchError
from .observe import Flush, Observer, spelled
from .op import Op
from .plan import CONST
from .position import shown
from .shell import Held, NoTorchFunction
from .trie import Node

Values = dict[int, torch.Tensor]  # by node index


class _Work:
    """What one flush is compared with."""

    def __init__(self, chain: Chain, node: Node, live: Sequence[int]) -> None:
        self.nodes, self.live, self.into = node.path(), live, chain.into
        self.shells = [chain[index] for index in live]
        self.consts = list(chain.consts)
        with NoTorchFunction():
            inputs = [_plain(x) for x in chain.inputs]
            self.inputs = [
                x.clone() if self.into is not None and source is self.into else x
                for x, source in zip(inputs, chain.inputs, strict=True)
            ]
            self.want = _quietly(lambda: _evaluate(self.nodes, live, self.inputs, self.consts))

    def got(self) -> list[torch.Tensor]:
        """What the flush has left in the live-outs."""
        reals: list[torch.Tensor] = []
        for shell in self.shells:
            reals.append(shell._af.real if isinstance(shell._af, Held) else shell)
        if self.into is not None:
            reals[-1] = self.into
        return [_plain(real) for real in reals]


class Check(Observer):
    """Compares every flush with eager."""

    def __init__(self) -> None:
        self.work: dict[int, _Work] = {}  # by id of the Flush

    def flushing(self, flush: Flush, chain: Chain, alive: Sequence[int], node: Node) -> None:
        if flush.live and not node.relaxed and not capturing(flush.device):
            _synchronize(flush.device)
            self.work[id(flush)] = _Work(chain, node, flush.live)

    def flushed(self, flush: Flush) -> None:
        work = self.work.pop(id(flush), None)
        if work is None or flush.raised or flush.eager:
            return
        _synchronize(flush.device)
        with NoTorchFunction():
            got = _quietly(work.got)
            found = _quietly(lambda: _difference(work, got))
        if found:
            raise MismatchError(_message(flush, work, got, found))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A handle for the memory of a concrete `tensor` that neither records nor has a graph."""
    plain = torch.Tensor.detach(tensor)  # not the method, which is counted
    plain.__class__ = torch.Tensor
    return plain


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":  # the flush of another thread runs on a stream of its own
        torch._C._cuda_synchronize()


def _quietly(compute: Callable[[], Any]) -> Any:
    """Without a graph; `torch.no_grad` would start new chains."""
    was = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return compute()
    finally:
        torch._C._set_grad_enabled(was)


def _evaluate(
    nodes: list[Node],
    live: Sequence[int],
    inputs: Sequence[torch.Tensor],
    consts: Sequence[Any],
    nudged: Callable[[Node, torch.Tensor, list[Any]], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The live-outs by the eager ops of `nodes`; nudged: changes what an op gives."""
    needed = set(live)
    for node in reversed(nodes):
        needed.update(node.args if node.index in needed else ())
    values: Values = {}
    for node in nodes:
        if node.index in needed:
            assert node.op is not None and node.op.eager is not None
            operands = [
                consts[ref - CONST] if ref >= CONST else values[ref] if ref >= 0 else inputs[~ref]
                for ref in node.args
            ]
            value = node.op.eager(*operands)
            values[node.index] = value if nudged is None else nudged(node, value, operands)
    return [values[index] for index in live]


# --- comparison -----------------------------------------------------------------------------------

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _difference(work: _Work, got: list[torch.Tensor]) -> str:
    """What differs from eager, in words; empty if nothing does."""
    allowed: list[list[torch.Tensor]] | None = None
    for k, (index, ours, theirs) in enumerate(zip(work.live, got, work.want, strict=True)):
        op = work.nodes[index].op
        what = f"the result of op {index}, {op.name if op is not None else ''}"
        if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
            return f"{what}, is {_spelled(ours)}, in eager {_spelled(theirs)}"
        into = work.into is not None and index == work.live[-1]
        if not into and ours.stride() != theirs.stride():
            return f"{what}, has strides {ours.stride()}, in eager {theirs.stride()}"
        same = _same(ours, theirs)
        if bool(same.all()):
            continue
        if ours.device.type == "cpu":
            allowed = _nudged_runs(work) if allowed is None else allowed
            same |= _within(ours, theirs, [run[k] for run in allowed])
        if not bool(same.all()):
            where = tuple((~same).nonzero()[0].tolist())
            return (
                f"{what}, differs in {int((~same).sum())} of {same.numel()} elements, first at "
                f"{list(where)}: {ours[where].item()!r}, in eager {theirs[where].item()!r}"
            )
    return ""


def _spelled(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal bits (on the CPU equal values), or both NaN."""
    if not a.dtype.is_floating_point:
        return a == b
    nans = a.isnan() & b.isnan()
    if a.device.type == "cpu":  # torch's own vector body and scalar tail differ in zeros' signs
        return (a == b) | nans
    bits = _BITS[a.dtype.itemsize]
    return (a.contiguous().view(bits) == b.contiguous().view(bits)) | nans


_ULP = 32  # how far a function may be from eager's on the CPU; README has what was measured
_ULP_NARROW = 4  # an op on 16-bit floats, which eager rounds on the way: of its operands, too
_EXACT = {"abs", "floor", "ceil", "trunc", "round", "copysign", "fmax", "fmin", "clip", "own",
          "rnd", "by", "divide", "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8",
          "b1"}  # fmt: skip
# differences of greater numbers: what is small is the error in terms of 1
_CANCELLING = {"lgamma", "digamma", "logaddexp", "logaddexp2", "ndtr", "log_ndtr", "tanhshrink",
               "gelu", "gelu_tanh", "logit", "logit_clamped"}  # fmt: skip


@cache
def _is_exact(op: Op, common: str) -> bool:
    """Whether the CPU kernel of `op` computes what eager's does."""
    trees = [tree for part in parse(op.expression(common, "cpu")) for tree in ast.walk(part)]
    called = {
        tree.func.id
        for tree in trees
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
    }
    return common not in ("f16", "bf16") and called <= _EXACT


def _nudged_runs(work: _Work) -> list[list[torch.Tensor]]:
    """Eager, with the result of every inexact op moved: up, down, and by turns."""
    runs = []
    for move in (lambda k: 1, lambda k: -1, lambda k: (-1) ** k, lambda k: -((-1) ** k)):

        def nudged(node: Node, value: torch.Tensor, operands: list[Any], move: Any = move) -> Any:
            return _nudged(node, value, operands, move(node.index))

        runs.append(_evaluate(work.nodes, work.live, work.inputs, work.consts, nudged))
    return runs


def _nudged(node: Node, value: torch.Tensor, operands: list[Any], sign: int) -> torch.Tensor:
    op = node.op
    assert op is not None
    if not value.dtype.is_floating_point or _is_exact(op, node.common):
        return value
    info = torch.finfo(value.dtype)
    size = value.double().abs() + (1 if op.name in _CANCELLING else info.tiny)
    ulp = _ULP * info.eps
    if node.common in ("f16", "bf16"):
        ulp = (
            _ULP_NARROW * torch.finfo(torch.float16 if node.common == "f16" else torch.bfloat16).eps
        )
        for operand in operands:
            size = size + abs(operand.double() if isinstance(operand, torch.Tensor) else operand)
    return (value.double() + sign * ulp * size).to(value.dtype)


def _within(ours: torch.Tensor, theirs: torch.Tensor, runs: list[torch.Tensor]) -> torch.Tensor:
    """Elementwise: whether `ours` is as near to eager as the moved runs are, twice."""
    values = torch.stack([run.double() for run in runs])
    centre = theirs.double()
    low, high = values.amin(0), values.amax(0)
    inside = ours.double() >= centre - 2 * (centre - low)
    inside &= ours.double() <= centre + 2 * (high - centre)
    moved = (low != centre) | (high != centre)
    return moved & (inside | ~values.isfinite().all(0) | ~centre.isfinite())


# --- what is said -------------------------------------------------------------------------------


def _message(flush: Flush, work: _Work, got: list[torch.Tensor], found: str) -> str:
    directory = config.dump_dir or tempfile.gettempdir()
    os.makedirs(directory, exist_ok=True)
    handle, path = tempfile.mkstemp(".pt", "autofuse-mismatch-", directory)
    os.close(handle)
    saved = {"inputs": work.inputs, "consts": work.consts, "eager": work.want, "fused": got}
    with NoTorchFunction():
        torch.save(saved, path)
        code = _quietly(lambda: eager_code(work.nodes, work.live, work.inputs, work.consts))
    reads = ", ".join(map(spelled, flush.inputs))
    return (
        f"{found}. A kernel on {flush.device} for {', '.join(flush.ops)} over {reads}, needed by "
        f"{flush.reason!r} at {shown(flush.position)}, computes something else than eager PyTorch. "
        "Please report it with this code and the file that it reads; until then run those lines "
        f"inside autofuse.disabled().\n\n{_program(path, code)}"
    )


def _program(path: str, code: list[str]) -> str:
    lines = [
        "import torch",
        "",
        f"saved = torch.load({path!r})",
        'inputs = saved["inputs"]',
        *code,
        'fused = saved["fused"]  # what the kernel gave',
    ]
    return "\n".join(lines) + "\n"


def eager_code(
    nodes: list[Node], live: Sequence[int], inputs: list[torch.Tensor], consts: Sequence[Any]
) -> list[str]:
    """Lines of PyTorch that compute `results`, the live-outs, from `inputs`.

    The ops are run on `inputs`, and the calls of torch functions that this makes written down.
    """
    with _Writer(inputs, consts) as writer:
        values = _evaluate(nodes, live, inputs, consts)
    results = ", ".join(writer.spelled(value) for value in values)
    return [*writer.lines, f"results = [{results}]"]


_PLACES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch._C._nn": torch._C._nn,
           "torch.special": torch.special, "torch.Tensor": torch.Tensor}  # fmt: skip


def _name_of(func: Any) -> str:
    """An expression for a torch function."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func}"
    name = func.__name__
    for place, owner in _PLACES.items():
        if getattr(owner, name, None) is func:
            return f"{place}.{name}"
    return resolve_name(func) or f"{func.__module__}.{func.__qualname__}"


class _Writer(TorchFunctionMode):
    """Writes calls of torch functions down."""

    def __init__(self, inputs: list[torch.Tensor], consts: Sequence[Any]) -> None:
        self.lines: list[str] = []
        self.known: list[tuple[object, str]] = [(x, f"inputs[{k}]") for k, x in enumerate(inputs)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        said = [*map(self.spelled, args), *(f"{k}={self.spelled(v)}" for k, v in kwargs.items())]
        self.lines.append(f"v{len(self.lines)} = {_name_of(func)}({', '.join(said)})")
        self.known.append((result, f"v{len(self.lines) - 1}"))
        return result

    def spelled(self, value: Any) -> str:
        """An expression for an argument."""
        if isinstance(value, torch.Tensor):
            return next(name for known, name in self.known if known is value)
        if isinstance(value, (tuple, list)):
            items = "".join(f"{self.spelled(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, float):
            return repr(value) if value - value == 0 else f'float("{value}")'
        return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)


_check = Check()


def _configure(*reason: object) -> None:
    """Follow `config.check`."""
    observe.remove(_check)
    if config.check:
        observe.add(_check)


def install() -> None:
    """Follow the settings from now on."""
    watch(_configure)
    _configure()
