"""Running kernels on the CPU: in the thread that launches them, or in as many as torch uses."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor, wait
from threading import get_ident, local
from typing import Any

import torch

from ..inside import inside, serving
from ..kernel.plan import Piece
from ..kernel.source import Parameters
from ..supply.load import Kernel
from ..torch_private import EMPTY_STRIDED
from .launching import LaunchingRunner
from .slots import Part, Slots

_CHUNK = 1 << 15  # elements below which a second thread costs more than it saves
# of what launches, as of cuLaunchKernel, but that all are words; and of the function it launches.
# Both give the GIL up while they run. Parameters are bytes: what runs in the middle has others
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 9, ctypes.c_char_p, ctypes.c_int64)
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
_pool: ThreadPoolExecutor | None = None
_asking: set[int] = set()  # threads that are giving work to the pool, which holds locks meanwhile
_thread = local()


class _Serving:
    """The thread that makes it serves as long as it lives, which is as long as the thread does."""

    def __init__(self) -> None:
        self.ident = get_ident()
        inside[self.ident] = serving[self.ident] = True

    def __del__(self) -> None:  # a later thread may have this ident
        serving.pop(self.ident, None)
        inside.pop(self.ident, None)


def _serve() -> None:
    _thread.serving = _Serving()


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(  # started as they are needed
            os.cpu_count(), "autofuse", initializer=_serve
        )
    return _pool


def forget_threads() -> None:
    """After a fork: the child has none of the parent's threads."""
    global _pool
    _pool = None
    _asking.clear()


class _Slots(Slots):
    """Parameters as a kernel of the CPU takes them, one after another."""

    def __init__(self, piece: Piece, parameters: Parameters) -> None:
        super().__init__(piece, parameters)
        self.blocks, self.threads = _steps(piece), 1
        self.fixed = self.buffer.raw[self.varying.size :]

    def _address(self, slots: int) -> int:
        return ctypes.addressof(self.buffer)

    def packed_wide(self, *values: Any) -> bytes:
        """All parameters, of Python numbers of any size."""
        return self.varying.pack(*self.narrowed(values)) + self.fixed


def launcher(kernel: Kernel) -> Any:
    """What launches kernels, as it comes with one."""
    return LAUNCH(kernel.launch)


def _empty_strided(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def run_in_threads(
    entry: int, steps: int, numel: int, parameters: bytes, needed: tuple[object, ...]
) -> None:
    """Run a kernel, in chunks of its steps over as many threads as torch uses.

    needed: the kernel, and what it reads and writes. Each thread holds them, for an interrupt lets
    the others go on.
    """
    global _pool
    run, ident = _ENTRY(entry), get_ident()

    def work(start: int, stop: int, needed: tuple[object, ...]) -> None:
        run(start, stop, parameters)

    chunks = min(torch.get_num_threads(), numel // _CHUNK, steps)
    if chunks < 2 or ident in _asking:  # a signal handler in the middle would wait for itself
        return run(0, steps, parameters)
    cuts = [steps * k // chunks for k in range(chunks + 1)]
    jobs = []
    try:
        _asking.add(ident)
        for k in range(1, chunks):
            jobs.append(_threads().submit(work, cuts[k], cuts[k + 1], needed))
    except RuntimeError:  # the main thread has ended, or no thread can be started
        _threads().shutdown()  # it may have taken the job, which is over then
        _pool = None
    finally:
        _asking.discard(ident)
    run(cuts[0], cuts[1], parameters)
    if len(jobs) + 1 < chunks:
        run(cuts[len(jobs) + 1], steps, parameters)
    wait(jobs)
    for job in jobs:
        job.result()
    return None


class CpuRunner(LaunchingRunner):
    """Runs a program's kernels on the CPU."""

    # 1.6 us against 3.9 us for torch.empty_strided
    empty_strided = staticmethod(EMPTY_STRIDED["cpu"] or _empty_strided)
    context = False
    private = True
    run_in_threads = staticmethod(run_in_threads)

    def launcher(self) -> Any:
        return launcher(self.kernels[0]) if self.kernels else None

    @staticmethod
    def part_of(kernel: Kernel, piece: Piece) -> Part:
        return kernel.entry, _Slots(piece, kernel.parameters), kernel

    @staticmethod
    def in_threads(piece: Piece) -> bool:
        return min(piece.numel // _CHUNK, _steps(piece)) > 1

    def _generate_parameters(
        self, k: int, slots: Any, arguments: str, space: dict[str, Any]
    ) -> list[str]:
        space[f"pack{k}"], space[f"fixed{k}"] = slots.varying.pack, slots.fixed
        return [
            f"params = pack{k}({arguments}) + fixed{k}",
            f"params = slots{k}.packed_wide({arguments})",
        ]


def _steps(piece: Piece) -> int:
    """Of the loop that threads may share: over rows, or over columns where there is one axis."""
    columns = piece.numbers[piece.plan.rank - 2] if piece.plan.rank > 1 else 1
    return piece.numel // columns
