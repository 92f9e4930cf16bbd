"""Building: a binary from a Source, by one of the many processes that want it at a time."""

from __future__ import annotations

import threading

from ..kernel.cuda import assemble, compile_ptx
from ..kernel.llvm import compile_object, undisturbed
from ..kernel.source import Source
from .disk import DiskCache
from .toolchain import Built

compiler_lock = threading.RLock()  # numba's typing and LLVM's contexts are not made for threads


@undisturbed
def build_once(source: Source, target: str, key: str, cache: DiskCache) -> Built:
    """The binary of `source`; of many processes that want it at a time one builds."""
    with cache.building(key):
        binary = cache.get(key)
        if binary is not None:
            return Built(binary)
        binary = build(source, target)
        about = {"name": source.name, "target": target, "source": source.text}
        return Built(binary, True, cache.put(key, binary, about))


def build(source: Source, target: str) -> bytes:
    """The binary of `source` for a target as `sm_90`, or `cpu` for this machine's."""
    with compiler_lock:
        if source.device == "cpu":
            return compile_object(source)
        return assemble(compile_ptx(source, target), target)


def forget_threads() -> None:
    """After a fork: another thread may have held the lock."""
    global compiler_lock
    compiler_lock = threading.RLock()
