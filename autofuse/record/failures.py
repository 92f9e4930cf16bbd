"""Failures: what becomes of a chain whose run has failed: it runs as eager ops, or is lost."""

from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Lost, become, set_attribute
from ..chain.state import Chain, counts
from ..errors import (
    ColdKernelError,
    NotReadyError,
    StaleInputError,
    warn_once,
)
from ..program.program import Ref
from ..run.eager import replayed, run_ops
from ..run.runner import Runner
from ..run.settle import publish, settle
from ..torch_private import NoModes, is_shell


def is_lost(runner: Runner, error: Exception) -> bool:
    """Whether a run has failed in such a way that nothing can compute its chain any more."""
    cold = isinstance(error, ColdKernelError) and not runner.kernels  # in the middle of a capture
    return cold or isinstance(error, StaleInputError)


def lose(chain: Chain, runner: Runner, error: Exception) -> None:
    """Say that the live-outs are lost, but for those that have their values.

    What was in place has its memory again, with what is in that.
    """
    chain.values = {}  # nobody computes them any more
    for index, position in (chain.placed or {}).items():
        shell, memory = chain[index], chain.inputs[position]
        if shell is not None and not is_shell(memory):
            node = chain.tip.path()[index]
            with NoModes():
                node.shell = become(shell, memory, UNKNOWN, node)
            chain[index] = None
    for owner in [*runner.owners, *runner.views]:
        shell = chain[owner.index]
        if shell is not None:
            set_attribute(shell, "_af", Lost(error))
            owner.shell = None
    chain.clear()
    chain.values = None


def _refused(chain: Chain) -> set[Ref]:
    """The Inputs whose graph autograd has given up: views that a write to their base has ended."""
    found = set()
    for k, x in enumerate(chain.inputs):
        try:
            if x.requires_grad:
                x.grad_fn  # noqa: B018 - made anew after such a write, or refused
        except RuntimeError:
            found.add(~k)
    return found


def _save(chain: Chain, runner: Runner, refused: set[Ref]) -> None:
    """Compute the live-outs that follow from no Input among `refused`."""
    for node in runner.nodes:
        if not refused.isdisjoint(node.args):
            refused.add(node.index)
    visible = [node for node in runner.visible if node.index not in refused]
    live = tuple(node.index for node in visible)
    if live and not runner.tells and chain.into is None:
        publish(chain, replayed(chain, runner.nodes, live, chain.bumps, chain.late))
        settle(chain, visible)


def recover(chain: Chain, runner: Runner, error: Exception) -> None:
    """After a failed run: compute the live-outs without the kernel."""
    try:
        run_ops(chain, runner)
    except Exception as failure:
        with NoModes():
            refused = set() if chain.values is not None else _refused(chain)
        if refused:
            _save(chain, runner, refused)
            lose(chain, runner, failure)
        raise failure from error  # where nothing is lost the next flush tries again
    counts.forgotten["ops_recorded"] += len(runner.nodes)
    counts.forgotten["live_outs_stored"] += runner.stored
    if isinstance(error, NotReadyError):
        counts.forgotten["eager_flushes"] += 1
        return
    counts.replays += 1
    warn_once(f"autofuse: a chain runs as eager ops because its kernel failed: {error!r}")
