"""Proofs: whether kernels that reduce have eager's bits, on a GPU that is not verified.

A kernel that is new there is compared before it is used. The chain runs as the eager ops that it
was recorded from, and each time both run once more over made-up values of another kind: on the
same stream, and the host reads what was found of it when that is over, so that it waits for
nothing. What was found is kept beside the kernels, for kernels with the numbers that decide an
order; how many rows there are counts by powers of two, for what it can decide of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from ..chain import verified
from ..chain.state import Node
from ..chain.steps import statistics_of
from ..errors import warn_once
from ..inside import is_foreign
from ..kernel.plan import Piece
from ..layout import reach
from ..ops.reductions import Reduction
from ..ops.row import Op
from ..program.program import ALIAS, STORED, Output
from ..settings.config import config
from ..supply.kernels import capturing
from ..supply.load import Kernel
from ..supply.toolchain import key_of
from ..torch_private import NoModes
from .devices import runner_class
from .eager import Operands, replayed, replaying

Compute = Callable[[Sequence[torch.Tensor]], Sequence[Any]]  # of operands; tensors, or None
KINDS = ("plain", "wide", "special")
_ROUNDS = 2 * KINDS
_MOST_FAILURES = 3  # of comparisons for which there was no memory: that may come
_SPECIAL = (math.inf, -math.inf, math.nan, -0.0, 0.0, 1e-40, -3e-41)


class Proof:
    """That of the kernels of one program; `holds` is None until it is known."""

    def __init__(self, device: torch.device, names: Iterable[str], about: Hashable) -> None:
        """names: of the reductions. about: all that decides an order."""
        self.device, self.names, self.about = device, tuple(names), about
        self.round = 0
        # whether a bit differs, in memory of the host, once an event on CUDA has come
        self._found: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._failures = 0  # for want of memory
        self.holds: bool | None = None
        if verified.is_proven(device, about):
            self.holds = True
        elif any(verified.refusal(device, name) for name in self.names):
            self.holds = False

    def go_on(self, ours: Compute, eager: Compute, like: Sequence[torch.Tensor]) -> None:
        """Compare what both give of values like these, unless the last comparison goes on."""
        with NoModes(), torch.no_grad():
            while self.holds is None:
                if capturing(self.device):
                    return warn_once(
                        f"autofuse: a CUDA graph has captured a chain of {', '.join(self.names)} "
                        "as eager ops, for its kernel was not compared with these yet. Run the "
                        f"chain {config.compile_after} times, call autofuse.wait(), and run it "
                        f"{len(_ROUNDS) + 1} times more before the capture."
                    )
                found = self._found
                if found is not None and not self._ended(*found):
                    return
                if self.round == len(_ROUNDS):
                    return self._close(True)
                try:
                    self._begin(ours, eager, like)
                except torch.OutOfMemoryError:
                    self._failures += 1
                    if self._failures > _MOST_FAILURES:
                        self.holds = False  # in this process
                    return
                except Exception as error:
                    if is_foreign(error):
                        raise
                    warn_once(
                        f"autofuse: a kernel of {', '.join(self.names)} stays unused, for it could "
                        f"not be compared with eager's: {error!r}"
                    )
                    self.holds = False
                if config.compile != "now":
                    return

    def _begin(self, ours: Compute, eager: Compute, like: Sequence[torch.Tensor]) -> None:
        generator = torch.Generator(self.device).manual_seed(self.round)
        operands = [made_up(x, _ROUNDS[self.round], generator) for x in like]
        found = [
            bits_differ(got, want).any()
            for got, want in zip(ours(operands), eager(operands), strict=True)
            if want is not None
        ]
        on_cuda = self.device.type == "cuda"
        differs, event = torch.empty((), dtype=torch.bool, pin_memory=on_cuda), None
        differs.copy_(torch.stack(found).any(), non_blocking=True)
        if on_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        # an interrupt before this leaves the round to the next call
        self._found, self.round = (differs, event), self.round + 1

    def _ended(self, differing: torch.Tensor, event: torch.cuda.Event | None) -> bool:
        """Whether the last comparison is over; what it has found counts then."""
        if event is not None:
            if config.compile == "now":
                event.synchronize()
            elif not event.query():
                return False
        differs, self._found = bool(differing), None
        if differs:
            self._close(False)
        return not differs

    def _close(self, same: bool) -> None:
        self.holds = same
        verified.keep(self.device, same, self.about)
        if not same:
            for name in self.names:
                verified.keep(self.device, False, name)
            warn_once(
                f"autofuse: a kernel of {', '.join(self.names)} has given other bits than eager's "
                f"on {torch.cuda.get_device_name(self.device)} with torch {torch.__version__}; "
                "reductions of this kind are eager there from now on"
            )


def by_both(
    tip: Node, outputs: Sequence[Output], pieces: Sequence[Piece], kernels: Sequence[Kernel]
) -> tuple[Callable[..., Sequence[Any]], Callable[..., Sequence[Any]]]:
    """What gives `outputs` of the program that ends at `tip`, of its Inputs and Consts: `kernels`
    of `pieces`, and eager ops. Without those that lie in others' memory, or are torch's."""
    nodes = tip.path()
    steps = [*nodes, *statistics_of(nodes)]
    stored = tuple([
        Output(output.step, STORED) for output in outputs
        if output.kind != ALIAS and not _is_outside(steps, output.step)
    ])  # fmt: skip
    live = tuple([output.step for output in stored])
    runner = runner_class(tip.recorder.device)(tip, stored, tuple(pieces), kernels)
    numbers = [f"c[{k}]" for k in range(len(tip.consts))]
    answer = runner.answering([*live], numbers, [(k, 0) for k in range(len(tip.inputs))])
    ops = replaying(steps, live)

    def eager(inputs: Sequence[torch.Tensor], consts: Sequence[Any]) -> Sequence[Any]:
        operands = Operands(inputs, consts)
        return [None, *replayed(operands, nodes, live, None, None, ops, grad=False).values()]

    return lambda inputs, consts: answer(inputs, (), consts), eager


def _is_outside(steps: Sequence[Node], index: int) -> bool:
    """Whether torch's own op gives this, once the kernels have run."""
    node = steps[index]
    op = node.op if node.of is None else steps[node.of[0]].op
    return isinstance(op, Reduction) and op.outside is not None


def proof_of(
    nodes: Sequence[Node], pieces: Sequence[Piece], kernels: Sequence[Kernel], device: torch.device
) -> Proof | None:
    """What says whether `kernels` of `pieces` may be used; None where there is no need to ask."""
    names = sorted({node.op.name for node in nodes if _is_asked(node.op)})
    if not names or verified.is_trusted(device) or nodes[-1].relaxed:
        return None
    ops = [(node.op.name, getattr(node.op, "axes", ())) for node in nodes if _is_asked(node.op)]
    about = tuple(
        (key_of(kernel.source, "cuda"), piece.numbers, piece.numel.bit_length())
        for kernel, piece in zip(kernels, pieces, strict=True)
    )
    return Proof(device, names, (*ops, *about))


def _is_asked(op: object) -> TypeGuard[Op]:
    """Whether kernels of `op` have eager's bits where that was compared alone."""
    if isinstance(op, Reduction):
        return op.outside is None
    return isinstance(op, Op) and op.by_channel


def made_up(like: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Values of a kind (see `filled`) that lie as `like` does; numbers that are whole stay.

    These may be indices, which other values would not be.
    """
    if not like.dtype.is_floating_point or not like.numel():
        return like
    shape, stride = tuple(like.shape), like.stride()
    values = filled(reach(shape, stride), kind, generator, 8 * (shape or (1,))[-1])
    return values.to(like.dtype).as_strided(shape, stride)


def filled(count: int, kind: str, generator: torch.Generator, apart: int) -> torch.Tensor:
    """So many float32 numbers: "plain"; "wide", of very different sizes; "special", with
    infinities, NaN, zeros and subnormal numbers, each once in `apart`."""
    make: Any = {"device": generator.device, "generator": generator, "dtype": torch.float32}
    values = torch.randn(count, **make)
    if kind == "wide":
        values = values * torch.exp(4 * torch.randn(count, **make))
    if kind == "special":
        chance = torch.rand(count, **make) * apart
        for k, number in enumerate(_SPECIAL):
            values[(chance > k) & (chance < k + 1)] = number
    return values


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_differ(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of which elements a bit differs, NaNs being equal; of everything, if they are not alike."""
    if got is None or got.dtype != want.dtype or got.shape != want.shape:
        return torch.ones((), dtype=torch.bool, device=want.device)
    kind = _BITS[want.element_size()]
    bits = got.contiguous().view(kind) != want.contiguous().view(kind)
    return bits & ~(got.isnan() & want.isnan())
