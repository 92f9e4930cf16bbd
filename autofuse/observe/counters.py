"""What autofuse did: counters. Reads everything, imported by no stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from ..chain.refusal import refusals
from ..chain.state import all_recorders, counts
from ..supply import kernels, service


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start or the last `reset_stats`, over all threads and devices.

    ops_recorded: ops that went into a chain.
    ops_eager: ops on wrapped tensors that ran as plain PyTorch.
    flushes: how often chains ran, by reason.
    kernels_launched: kernels.
    kernels_compiled, kernels_loaded: kernels that came from a compiler, and from disk.
    cache_hits: kernels that were needed and there already.
    eager_flushes: chains that ran as eager ops because their kernel was not there yet.
    nodes_elided, bytes_elided: dead intermediates that never got memory.
    live_outs_stored: values that were written to memory.
    bytes_saved_for_backward: of the tensors that the autograd nodes of fused chains keep.
    replays: chains that ran as eager ops because their kernel failed.
    eager_ops: eager ops on wrapped tensors, by name and reason.
    workers_lost: processes of the background compiler that died or did not answer, by reason.
    """

    ops_recorded: int = 0
    ops_eager: int = 0
    flushes: dict[str, int] = field(default_factory=dict)
    kernels_launched: int = 0
    kernels_compiled: int = 0
    kernels_loaded: int = 0
    cache_hits: int = 0
    nodes_elided: int = 0
    bytes_elided: int = 0
    live_outs_stored: int = 0
    bytes_saved_for_backward: int = 0
    eager_flushes: int = 0
    replays: int = 0
    eager_ops: dict[tuple[str, str], int] = field(default_factory=dict)
    workers_lost: dict[str, int] = field(default_factory=dict)


_base: Counter[str] = Counter()


def summed() -> Counter[str]:
    total = Counter(counts.forgotten)
    total["kernels_compiled"] = kernels.counts["compiled"]
    total["kernels_loaded"] = kernels.counts["loaded"]
    total["cache_hits"] = kernels.counts["found"]
    for recorder in all_recorders:
        total.update(recorder.totals())
        total["ops_recorded"] += len(recorder.chain)
    return total


def stats() -> Stats:
    """The counters; ops that are still pending count as recorded."""
    total = summed()
    total.subtract(_base)
    eager = {key: times for key, x in list(refusals.items()) if (times := x.times)}
    others: dict[str, Any] = {
        "ops_eager": sum(eager.values()),
        "flushes": dict(counts.flushes),
        "replays": counts.replays,
        "eager_ops": eager,
        "workers_lost": dict(service.lost),
    }
    names = (row.name for row in fields(Stats))
    return Stats(**{name: others.get(name, total[name]) for name in names})


def reset_stats() -> None:
    """Set every counter to zero; ops that are pending then count as not recorded."""
    _base.clear()
    _base.update(summed())
    counts.flushes.clear()
    for refusal in list(refusals.values()):
        refusal.reset()
    counts.replays = 0
    service.lost.clear()
