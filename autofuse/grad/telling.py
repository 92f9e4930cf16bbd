"""Telling: hooks of saved tensors get to know what a flush's nodes save, once it is over.

And bare tensors, which stand for values that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe
from types import CodeType
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.state import TOLD_LATER, Node, Recorder, Untold
from ..program.program import Ref
from ..run.runner import Runner
from ..torch_private import InferenceMode, detach, pop_hooks, push_hooks


def bares(metas: Sequence[Meta | None]) -> list[torch.Tensor]:
    """What torch can make views of in place of values that nobody reads; one for each Meta."""
    made: dict[Meta | None, torch.Tensor] = {}
    with InferenceMode(False):
        for meta in metas:
            if meta not in made:
                assert meta is not None
                made[meta] = torch.empty_strided(
                    meta.shape, (0,) * meta.ndim, dtype=meta.dtype, device=meta.device
                )
    return [made[meta] for meta in metas]


def telling(
    recorder: Recorder,
    attach: Callable[..., Any],
    runner: Runner,
    told: tuple[tuple[Ref, int], ...],
) -> Callable[..., Any]:
    """`attach` where hooks are told of what the nodes save, once the flush is over.

    A node has a list for each tensor that it saves, into which then comes what the hook returns.
    """
    places = {index: k for k, index in enumerate(runner.made)}
    stands = _stands(told, runner.tip) if runner.tip.unread else None

    def attach_and_tell(inputs: Any, consts: Any, late: Any, *values: torch.Tensor) -> Any:
        assert recorder.running is not None and recorder.running.hooks is not None
        pack, unpack = recorder.running.hooks
        untold = Untold(inputs, getattr(pack, TOLD_LATER), [])
        kept: list[list[Any]] = []
        keep = partial(_keep, kept, attach.__code__, untold.pack, stands)
        give_back = partial(_give_back, untold.pack, unpack)
        try:
            push_hooks(keep, give_back)
            views = attach(inputs, consts, late, *values)
        finally:
            pop_hooks()
        for ref, place in reversed(told):
            if place >= 0:
                untold.saved.append(kept[place])
            elif stands is not None:
                untold.saved.append([stands[place, ref], False])
            else:
                value = inputs[~ref] if ref < 0 else values[places[ref]]
                untold.saved.append([detach(value), False])
        kept.clear()  # each goes with the node that has it
        # an interrupt may have undone it, and what comes in the middle of flushes is told later
        recorder.untold = [x for x in recorder.untold if x.inputs is not inputs] + [untold]
        return views

    return attach_and_tell


def _stands(told: tuple[tuple[Ref, int], ...], tip: Node) -> dict[Any, torch.Tensor]:
    """What hooks that read no values are told of, by its place, or -1 and the value."""
    nodes = tip.path()
    metas = [tip.inputs[~ref] if ref < 0 else nodes[ref].meta for ref, _ in told]
    keys = [place if place >= 0 else (place, ref) for ref, place in told]
    return dict(zip(keys, bares(metas), strict=True))


def _keep(
    kept: list[list[Any]],
    attach: CodeType,
    pack: Callable[[Any], Any],
    stands: dict[Any, torch.Tensor] | None,
    tensor: torch.Tensor,
) -> list[Any]:
    """What a node holds in place of `tensor`: detached, for shells may exchange it, as in a cycle.

    See `chain.state.Untold`. Called in C by what `attach` calls; or by an op of whatever runs in
    the middle of that, of which the hook is told at once.
    """
    if _getframe(1).f_code is not attach:
        return [pack(tensor), True]
    kept.append([detach(tensor) if stands is None else stands[len(kept)], False])
    return kept[-1]


def _give_back(pack: Callable[[Any], Any], unpack: Callable[[Any], Any], kept: list[Any]) -> Any:
    if not kept[1]:  # another thread differentiates what this one has not been told of
        kept[:] = pack(kept[0]), True
    return unpack(kept[0])
