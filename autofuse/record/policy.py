"""Policy: when an op or a chain is better off without a kernel of its own, and for how long.

All thresholds of recording stand here; what the types of operands forbid is in `chain.infer`.
"""

from __future__ import annotations

import ast

import torch

from ..chain.state import Node, Recorder, this_thread
from ..chain.trie import eager_node
from ..grad.segments import Outline
from ..settings.config import config
from ..supply import kernels as compiling
from .contest import Contest, clock_of

# ops from which a kernel costs less than they do: one op alone takes 10.4 us fused, 6.1 us eager,
# and no kernel has to be compiled for it (H200, bench/overhead.py)
SHORTEST = {"cuda": 2, "cpu": 1}
# A chain that costs less as the ops it is runs as these (`ways.ShortRunner`), TRIES times. Then
# another node stands for its first (`make_eager`), whose op is run at once (`dispatch.eager`) and
# not recorded any more, SKIPS times: longer chains may begin so by then (`record_again`). Once one
# is fused that does, its first node is `long`, and nothing of this happens.
TRIES, SKIPS = 3, 100
ASIDE = "a fused call that costs less as it is"  # and records nothing for now
_PATIENCE = 8  # flushes in a row that waited for kernels


def is_short(nodes: list[Node], device_type: str) -> bool:
    """Whether the chain of `nodes` costs less as the ops it is, while no longer one begins so."""
    return len(nodes) < SHORTEST[device_type] and not (nodes[0].long or config.always_fuse)


def make_eager(node: Node, reason: str) -> None:
    """Let the op of `node`, where a chain begins with it, run as eager PyTorch for a while."""
    tip = node.parent
    assert tip is not None and node.op is not None
    if tip.next.get(node.key) is node:
        eager = eager_node(node.recorder, tip, node.op, reason, node.meta)
        eager.key, eager.returns = node.key, (tip, node.key, node)
        tip.next[node.key], tip.recent = eager, None


def record_again(eager: Node) -> None:
    """End what `make_eager` has begun."""
    assert eager.returns is not None
    tip, key, node = eager.returns
    tip.next[key], tip.recent = node, None


def rest(recorder: Recorder) -> None:
    """Where one flush after the other waits for kernels, record nothing until there is news.

    Recording and running the ops later costs up to twice what running them at once does.
    """
    following = recorder.launches == recorder.last_wait + 1
    recorder.waits = recorder.waits + 1 if following else 1
    recorder.last_wait = recorder.launches
    if recorder.waits < _PATIENCE:
        return
    before = compiling.news()
    if compiling.outstanding():
        recorder.resting, recorder.waits = True, 0
        if compiling.news() != before:  # `wake` may have come too early
            recorder.resting = False
        recorder.open()


def pays(nodes: list[Node], outline: Outline) -> bool:
    """Whether fusing a chain under grad costs less than running its ops, forward and backward.

    In us on one NVIDIA H200 machine (bench/training.py, chains of 3 to 10): the host needs 7 for
    an op, 3.5 for its node's every gradient and 7.5 for a kernel of its backward, against 25 for a
    flush, 2.6 for a recorded op and 50 for a Python node in the engine's thread, forward and
    backward; the device moves 4 MB in 1, three tensors for an op, of which fusing saves two.
    """
    if config.always_fuse:
        return True
    eager = 7.0 * len(nodes)
    fused = 25.0 + 2.6 * len(nodes)
    traffic = 0.0
    for segment in outline.segments:
        fused += 50.0
        for index in segment.steps:
            kernels = 0
            for use in segment.uses[index]:
                here = sum(isinstance(tree, _KERNELS) for tree in ast.walk(use.rule))
                kernels += here
                eager += 3.5 + 7.5 * here
            traffic += 3 * (1 + kernels) * segment.meta_of(index).nbytes / 4e6
    return max(fused, traffic / 3) < max(eager, traffic)


_KERNELS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Compare)


def kernel_news() -> tuple[int, ...]:
    """Something else whenever this thread has waited for a kernel or any thread has got one."""
    waits = [recorder.last_wait for recorder in list(this_thread.recorders.values())]
    return compiling.news(), *waits


def is_settled(before: tuple[int, ...]) -> bool:
    """Whether nothing has come of kernels since `kernel_news` gave `before`, nor is to come."""
    return not compiling.outstanding() and kernel_news() == before


def contest_for(device: torch.device, differentiated: bool) -> Contest:
    """Between fused calls on `device` and plain ones.

    differentiated: they leave a graph, so that what counts is a whole training step.
    """
    inexact = device.type == "cpu" or config.relaxed  # the ways may have other bits
    inexact |= differentiated and config.recompute == "inputs"
    return Contest(clock_of(device), steps=differentiated, once=inexact)


def measures() -> bool:
    """Whether fused calls may run as they are where that costs less."""
    return config.measure and not (config.always_fuse or config.check)


def aside(contest: Contest) -> str:
    """Why a call is not fused, with the figures that decided."""
    if contest.costs is None:
        return ASIDE
    fused, plain = contest.costs
    return f"{ASIDE}: {plain:.3g} us, {fused:.3g} fused"
