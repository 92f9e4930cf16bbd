"""Streams: CUDA's streams and graphs, collectives, and profilers."""

from __future__ import annotations

from functools import partial

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
        (cuda.CUDAGraph, "capture_end", True),
        (cuda.graph, "__exit__", True),
    ):
        for name in names.split():
            around(owner, name, partial(flush_thread, "stream"), anyway=ends)
    around(cuda.CUDAGraph, "capture_begin", _begin_capture)
    around(cuda.CUDAGraph, "capture_end", after=contest.resume)


def _begin_capture() -> None:
    """A graph holds its kernels; a chain that still waits for one asks again, to say so."""
    keep_modules()
    contest.pause()
    kernels.stir()


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
