"""Check mode: what a kernel computes is also computed by eager ops, and compared.

Every flush that launches a kernel, and every backward. On CUDA every bit counts. On the CPU values
of sums, products, quotients, comparisons and selections have to be equal; where a function stands
in the chain, eager is run again with the results of its functions moved by some units in the last
place, and those of ops that read them by one rounding, and the kernel may be as far away as that
carries. A backward is compared with its derivative rules run as torch ops, which is how it runs
until its kernel is there.

Results, versions and graphs stay what they are without it. Chains under `config.relaxed` and what a
CUDA graph captures are not compared.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from .. import hooks
from ..chain.shell import Held
from ..chain.state import Chain, Node, Recorder
from ..dtypes import CODES
from ..errors import MismatchError
from ..grad.backward import Backward
from ..grad.rules import written
from ..grad.straight import Caller, eager_of
from ..kernel.text import calls_functions
from ..lines import shown, user_position
from ..ops.row import Op
from ..program.program import CONST, Ref
from ..program.walk import needed
from ..record.flush import without_modes
from ..run.proof import bits_differ
from ..settings.config import config, watch
from ..supply.kernels import capturing
from ..torch_private import NoTorchFunction, address_of, autocast_is_on, set_grad_enabled
from . import events
from .events import Flush, Observer, spelled


class _Case:
    """What a kernel has computed, and how eager computes it."""

    what: list[str]  # each result in words
    want: list[torch.Tensor]
    into: torch.Tensor | None = None  # memory that takes the last result, however it lies there

    def __init__(
        self, recorder: Recorder, inputs: list[torch.Tensor], consts: Sequence[Any]
    ) -> None:
        self.recorder, self.inputs, self.consts = recorder, inputs, list(consts)

    def eager(self, call: Caller) -> list[torch.Tensor]:
        """The results by what `call` gives for ops."""
        raise NotImplementedError

    def about(self) -> str:
        """What the kernel is there for, in words."""
        raise NotImplementedError


class _Forward(_Case):
    """What one flush is compared with."""

    def __init__(self, flush: Flush, chain: Chain, node: Node) -> None:
        self.flush, self.into, self.nodes = flush, chain.into, node.path()
        into, placed = self.into, [*(chain.placed or {}).values()]
        self.shells = [chain[index] for index in flush.live]
        inputs = [*map(_plain, chain.inputs)]
        for k, x in enumerate(inputs):
            if k in placed or (into is not None and address_of(x) == address_of(into)):
                inputs[k] = x.clone()
        super().__init__(node.recorder, inputs, chain.consts)
        self.what = [f"the result of op {index}, {flush.ops[index]}" for index in flush.live]
        self.want = self.eager(eager_of)

    def got(self) -> list[torch.Tensor]:
        """What the flush has left in the live-outs."""
        reals: list[torch.Tensor] = []
        for shell in self.shells:
            reals.append(shell._af.real if isinstance(shell._af, Held) else shell)
        if self.into is not None:
            reals[-1] = self.into
        return [_plain(real) for real in reals]

    def eager(self, call: Caller) -> list[torch.Tensor]:
        values: dict[Ref, Any] = {~k: x for k, x in enumerate(self.inputs)}
        values |= {CONST + k: number for k, number in enumerate(self.consts)}
        for index in needed([node.args for node in self.nodes], self.flush.live):
            node = self.nodes[index]
            assert node.op is not None
            values[index] = call(node.op)(*[values[ref] for ref in node.args])
        return [values[index] for index in self.flush.live]

    def about(self) -> str:
        flush = self.flush
        return (
            f"for {', '.join(flush.ops)} over {_listed(self.inputs)}, needed by "
            f"{flush.reason!r} at {shown(flush.position)}"
        )


class _Backward(_Case):
    """What the kernel of one autograd node is compared with."""

    def __init__(
        self,
        backward: Backward,
        grads: Sequence[Any],
        saved: Sequence[torch.Tensor],
        consts: Sequence[Any],
        result: Sequence[torch.Tensor | None],
    ) -> None:
        self.backward, self.segment = backward, backward.segment
        self.grads = [None if g is None else _plain(g) for g in grads]
        self.saved = [_plain(x) for x in saved]
        inputs = [*(g for g in self.grads if g is not None), *self.saved]
        super().__init__(backward.recorder, inputs, consts)
        self.given = [k for k, gradient in enumerate(result) if gradient is not None]
        sinks = self.segment.sinks
        self.what = [f"gradient {k}, for {self._operand(sinks[k])}" for k in self.given]
        self.want = self.eager(eager_of)

    def _operand(self, ref: int) -> str:
        return f"Input {~ref}" if ref < 0 else f"the result of op {ref}, {self._names([ref])}"

    def _names(self, indices: Sequence[int]) -> str:
        ops = (self.segment.nodes[index].op for index in indices)
        return ", ".join(op.name for op in ops if op is not None)

    def eager(self, call: Caller) -> list[torch.Tensor]:
        key = (autocast_is_on(), *[g is None for g in self.grads])
        straight = written(self.segment, key, call)
        gradients = straight(self.grads, self.saved, self.consts)[1:]
        assert [k for k, g in enumerate(gradients) if g is not None] == self.given
        return [gradients[k] for k in self.given]

    def about(self) -> str:
        return (
            f"for the backward of {self._names(self.segment.steps)} over {_listed(self.inputs)}, "
            f"run at {shown(user_position())}"
        )


class Check(Observer):
    """Compares every flush and every backward with eager."""

    def __init__(self) -> None:
        self.cases: dict[int, _Forward] = {}  # by id of the Flush

    def flushing(self, flush: Flush, chain: Chain, refcounts: Sequence[int], node: Node) -> None:
        if flush.live and not node.relaxed and not capturing(flush.device):
            make = lambda: _Forward(flush, chain, node)  # noqa: E731
            self.cases[id(flush)] = _alone(node.recorder, make)

    def flushed(self, flush: Flush) -> None:
        case = self.cases.pop(id(flush), None)
        if case is not None and not flush.raised and not flush.eager:
            _alone(case.recorder, lambda: _compare(case, case.got()))

    def backward(
        self,
        backward: Backward,
        grads: Sequence[Any],
        saved: Sequence[torch.Tensor],
        consts: list[Any],
        result: Sequence[torch.Tensor | None],
    ) -> None:
        """After a kernel has made the gradients `result`; see `hooks.differentiated`."""
        if backward.segment.nodes[0].relaxed or capturing(backward.recorder.device):
            return

        def compare() -> None:
            case = _Backward(backward, grads, saved, consts, result)
            _compare(case, [_plain(gradient) for gradient in result if gradient is not None])

        _alone(backward.recorder, compare)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A handle for the memory of a concrete `tensor` that neither records nor has a graph."""
    plain = torch.Tensor.detach(tensor)  # not the method, which is counted
    plain.__class__ = torch.Tensor
    return plain


def _alone(recorder: Recorder, compute: Callable[[], Any]) -> Any:
    """`compute()` after what runs on the device, without a graph and other threads' modes."""
    results = []

    def run(chain: Any) -> None:
        if recorder.device.type == "cuda":  # what runs there may be on a stream of another thread
            torch._C._cuda_synchronize()
        was = torch.is_grad_enabled()
        set_grad_enabled(False)  # `torch.no_grad` would start new chains
        try:
            with NoTorchFunction():
                results.append(compute())
        finally:
            set_grad_enabled(was)

    without_modes(run, recorder, recorder.chain)
    return results[0]


# --- comparison -----------------------------------------------------------------------------------


def _compare(case: _Case, got: list[torch.Tensor]) -> None:
    """Raise MismatchError if `got` is not what eager gives."""
    found = _difference(case, got)
    if found:
        raise MismatchError(_message(case, got, found))


def _difference(case: _Case, got: list[torch.Tensor]) -> str:
    """What differs from eager, in words; empty if nothing does."""
    moved: list[list[torch.Tensor]] = []
    singles: list[list[torch.Tensor]] = []
    for k, (what, ours, theirs) in enumerate(zip(case.what, got, case.want, strict=True)):
        if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
            return f"{what}, is {_spelled(ours)}, in eager {_spelled(theirs)}"
        into = case.into is not None and k == len(got) - 1
        if not into and ours.stride() != theirs.stride():
            return f"{what}, has strides {ours.stride()}, in eager {theirs.stride()}"
        same = _same(ours, theirs)
        if bool(same.all()):
            continue
        if ours.device.type == "cpu":
            moved = moved or [case.eager(_Nudging(cycle(signs))) for signs in _SIGNS]
            same |= _within(ours, theirs, [run[k] for run in moved])
            if not bool(same.all()):  # what moves together may have cancelled
                singles = singles or _singly_moved(case)
                same |= _reached(ours, theirs, [run[k] for run in singles])
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
    if a.device.type == "cpu":  # torch's own vector body and scalar tail differ in zeros' signs
        return (a == b) | (a.isnan() & b.isnan())
    return ~bits_differ(a, b)


_ULP = 32  # how far a function may be from eager's on the CPU; docs/cpu.md has what was measured
_ULP_READ = 2  # a rounding on either side, of what reads such a result
_ULP_NARROW = 4  # an op on 16-bit floats, which eager rounds on the way: of its operands, too
# differences of greater numbers: what is small is the error in terms of 1
_CANCELLING = {"lgamma", "digamma", "logaddexp", "logaddexp2", "gelu", "gelu_tanh", "logit",
               "logit_clamped"}  # fmt: skip
_SIGNS = ((1,), (-1,), (1, -1), (-1, 1))  # which way ops are moved: up, down, and by turns
_TWO_ORDERS = {"smooth_l1_loss_backward"}  # in torch's vector body and in its scalar tail


@cache
def _is_exact(op: Op, common: str) -> bool:
    """Whether the CPU kernel of `op` computes what eager's does."""
    if op.name in _TWO_ORDERS:
        return False
    return common not in ("f16", "bf16") and not calls_functions(op, common)


class _Nudging:
    """A Caller that moves the results that may differ from eager's, each as `signs` say."""

    def __init__(self, signs: Iterator[int]) -> None:
        self.signs = signs
        self.inexact: dict[int, torch.Tensor] = {}  # these results, by id
        self.moved = 0  # how many of them were, or could be, moved

    def __call__(self, op: Op) -> Callable[..., torch.Tensor]:
        return partial(self._apply, op)

    def _apply(self, op: Op, *operands: Any) -> torch.Tensor:
        value = eager_of(op)(*operands)
        size = self._size(op, operands, value)
        if size is not None:
            self.moved += 1
            sign = next(self.signs)
            if sign:
                value = (value.double() + sign * size).to(value.dtype)
        if size is not None or any(id(x) in self.inexact for x in operands):
            self.inexact[id(value)] = value
        return value

    def _size(self, op: Op, operands: tuple[Any, ...], value: torch.Tensor) -> torch.Tensor | None:
        """How far `value` may be from eager's besides what operands carry; None if not at all."""
        if not value.dtype.is_floating_point:
            return None
        resolved = op.resolve(tuple(
            (x.dtype, x.ndim) if isinstance(x, torch.Tensor) else (type(x), 0) for x in operands
        ))  # fmt: skip
        assert resolved is not None  # or there would be no kernel
        common = CODES[resolved[0]]
        info = torch.finfo(value.dtype)
        if _is_exact(op, common):
            reads = any(id(x) in self.inexact for x in operands)
            return _ULP_READ * info.eps * (value.double().abs() + info.tiny) if reads else None
        size = value.double().abs() + (1 if op.name in _CANCELLING else info.tiny)
        if op.name.endswith("_backward"):  # a gradient times a derivative: such a difference
            size = size + operands[0].double().abs()
        ulp = _ULP * info.eps
        if common in ("f16", "bf16"):
            ulp = _ULP_NARROW * torch.finfo(resolved[0]).eps
            for x in operands:
                size = size + abs(x.double() if isinstance(x, torch.Tensor) else x)
        return ulp * size if ulp else None


def _singly_moved(case: _Case) -> list[list[torch.Tensor]]:
    """Runs with one result moved each: up and down, one after the other."""
    counting = _Nudging(repeat(0))
    case.eager(counting)
    runs = []
    for k in range(counting.moved):
        for sign in (1, -1):
            signs = [0] * counting.moved
            signs[k] = sign
            runs.append(case.eager(_Nudging(cycle(signs))))
    return runs


def _reached(ours: torch.Tensor, theirs: torch.Tensor, runs: list[torch.Tensor]) -> torch.Tensor:
    """Elementwise: whether `ours` is as near to eager as all single moves together carry."""
    centre = theirs.double()
    reach = torch.zeros_like(centre)
    for up, down in zip(runs[::2], runs[1::2], strict=True):
        apart = [
            (run.double() - centre).abs().masked_fill(_same(run, theirs), 0) for run in (up, down)
        ]
        reach += torch.maximum(*apart)
    return (reach != 0) & (((ours.double() - centre).abs() <= reach) | ~reach.isfinite())


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


def _message(case: _Case, got: list[torch.Tensor], found: str) -> str:
    directory = config.dump_dir or tempfile.gettempdir()
    os.makedirs(directory, exist_ok=True)
    handle, path = tempfile.mkstemp(".pt", "autofuse-mismatch-", directory)
    os.close(handle)
    saved = {"inputs": case.inputs, "consts": case.consts, "eager": case.want, "fused": got}
    torch.save(saved, path)
    program = [
        "import torch",
        "",
        f"saved = torch.load({path!r})",
        'inputs = saved["inputs"]',
        *eager_code(case),
        'fused = saved["fused"]  # what the kernel gave',
        "",
    ]
    code = Path(path).with_suffix(".py")
    code.write_text("\n".join(program))
    return (
        f"{found}.\n"
        f"Cause: a kernel on {case.recorder.device} {case.about()}, computes something else than "
        "eager PyTorch.\n"
        f"Please report it with {code} and the file that it reads; until then run those lines "
        "inside autofuse.disabled()."
    )


def _listed(inputs: list[torch.Tensor]) -> str:
    return ", ".join(map(spelled, inputs))


def eager_code(case: _Case) -> list[str]:
    """Lines of PyTorch that compute `results` from `inputs`.

    The ops are run, and the calls of torch functions that this makes written down.
    """
    with _Writer([(x, f"inputs[{k}]") for k, x in enumerate(case.inputs)]) as writer:
        values = case.eager(eager_of)
    results = ", ".join(map(writer.spelled, values))
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

    def __init__(self, known: Sequence[tuple[object, str]]) -> None:
        self.lines: list[str] = []
        self.known = [*known]  # values, with the expression that code has for each

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ == "__get__" and not isinstance(result, torch.Tensor):
            return result  # a dtype or shape
        said = [*map(self.spelled, args), *(f"{k}={self.spelled(v)}" for k, v in kwargs.items())]
        self.lines.append(f"v{len(self.lines)} = {_name_of(func)}({', '.join(said)})")
        name = f"v{len(self.lines) - 1}"
        self.known.append((result, name))
        if isinstance(result, (tuple, list)):
            self.known += [(part, f"{name}[{k}]") for k, part in enumerate(result)]
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
    events.remove(_check)
    hooks.differentiated = _check.backward if config.check else None
    if config.check:
        events.add(_check)


def install() -> None:
    """Follow the settings from now on."""
    watch(_configure)
    _configure()
