"""Streams: CUDA's streams and graphs, collectives, and profilers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ..errors import warn_once
from ..record import contest
from ..record.flush import flush_thread
from ..record.ranges import annotate
from ..settings.config import config, watch
from ..supply import kernels
from ..supply.load import keep_modules
from .around import around

# --- collectives ---------------------------------------------------------------------------------


_COLLECTIVES = (
    "broadcast allreduce allreduce_coalesced reduce allgather _allgather_base allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced gather scatter "
    "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single "
    "reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single recv recv_anysource"
).split()


def patch_distributed() -> None:
    """Collectives write to memory and do not count it as a write."""
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            around(torch.distributed.ProcessGroup, name, partial(flush_thread, "collective"))


# --- streams, events, graphs ---------------------------------------------------------------------


_CAPTURE_ENDS = "capture_end", "capture_end_pre"  # the second is torch 2.14's, of the first


def patch_cuda() -> None:
    """Work that is pending when a stream, an event or a graph is used belongs before it."""
    cuda = torch.cuda
    for owner, names, ends in (
        (cuda, "set_stream synchronize set_device", False),
        (cuda.StreamContext, "__enter__", False),
        (cuda.Event, "record wait synchronize query elapsed_time", False),
        (cuda.Stream, "wait_event wait_stream record_event synchronize query", False),
        (cuda.CUDAGraph, "capture_begin replay", False),
        (cuda.StreamContext, "__exit__", True),
        *((cuda.CUDAGraph, name, True) for name in _CAPTURE_ENDS),
        (cuda.graph, "__exit__", True),
    ):
        for name in names.split():
            around(owner, name, partial(flush_thread, "stream"), anyway=ends)
    around(cuda.CUDAGraph, "capture_begin", _begin_capture)
    _pause_contests(cuda.CUDAGraph)


def _begin_capture() -> None:
    """A graph holds its kernels; a chain that still waits for one asks again, to say so."""
    keep_modules()
    kernels.stir()


def _pause_contests(graph: Any) -> None:
    """Measure nothing while any thread captures a `graph`, which may also fail to begin or end."""
    begin = graph.capture_begin

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            contest.pause(id(self))
            return begin(self, *args, **kwargs)
        except BaseException:
            contest.resume(id(self))
            raise

    def resuming(end: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(end)
        def capture_end(self: Any) -> None:
            try:
                end(self)
            finally:
                contest.resume(id(self))

        return capture_end

    graph.capture_begin = capture_begin
    for name in _CAPTURE_ENDS:
        if hasattr(graph, name):
            setattr(graph, name, resuming(getattr(graph, name)))


# --- profilers -----------------------------------------------------------------------------------


def patch_profiler() -> None:
    """While a profiler runs, every flush is a range of its own; NVTX's if that is set."""
    from torch.autograd import profiler

    for name, on in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        around(profiler, name, partial(annotate, profiler.record_function, on))
    watch(_follow_nvtx)
    _follow_nvtx()


def _follow_nvtx(*reason: object) -> None:
    if config.nvtx and not hasattr(torch._C, "_nvtx"):
        warn_once(
            f"autofuse: config.nvtx has no effect: torch {torch.__version__} is built without "
            "CUDA, and NVTX is not there; torch.profiler shows the same ranges"
        )
        return
    annotate(torch.cuda.nvtx.range, config.nvtx)
