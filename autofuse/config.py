"""Settings: their types, defaults and environment names. Imports nothing of autofuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_CHOICES = {"recompute": ("free", "inputs"), "compile": ("auto", "background", "now")}


@dataclass
class Config:
    """Settings of this process; assign to a field of `autofuse.config` to change one.

    enabled: record ops at all (`AUTOFUSE=0` starts a process with plain eager).
    max_nodes: a chain is cut at this many ops.
    loop_nodes: from this many ops on, a chain is cut where the op that began it comes again, so
        that an unrolled loop settles on one chain instead of one per phase.
    max_inputs: a chain is cut at this many Inputs; 32 pointers and their strides stay far below
        the 4 KB of a kernel's parameters.
    pinned_bytes: Inputs that nobody but the chain may still hold are tolerated up to this size,
        or up to twice the largest of them, whichever is more.
    recompute: what backward computes again instead of keeping it. "free": what follows from the
        tensors that eager would keep. "inputs": everything, from the chain's Inputs alone, and
        the gradients of one tensor's several uses are added up inside: less memory, but an Input
        that is written in place before backward is then an error, and a sum with gradients from
        elsewhere may round in another order than eager's.
    always_fuse: fuse chains under grad even where eager ops cost less, as in chains of one op.
    relaxed: let ops of a chain contract with each other, leave out the rounding of float16 and
        bfloat16 values that are not stored, and fuse ops that are not bit-identical to eager.
        The results are nearer to the exact ones, and no longer eager's.
    compile: where a chain's kernel is compiled. "background": in processes of their own, while the
        chain runs as the eager ops it was recorded from. "now": here, at once. "auto": in the
        background for CUDA, where both give the same bits, now for the CPU, where they need not.
        (`AUTOFUSE_COMPILE`)
    compile_after: how often a chain has to run before it is worth a compile in the background.
    workers: processes that compile in the background; 0 compiles here.
    max_kernels: loaded kernels before all are forgotten; those still in use are loaded again.
    max_kernels_per_line: kernels that one line of a program may ask for; further chains run as
        eager ops there.
    max_trie: recorded ops remembered per thread and device before the memory of them is dropped.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"config.{name} = {value!r} is not valid; use one of {_CHOICES[name]}")
        object.__setattr__(self, name, value)
        for changed in _watchers:
            changed("config")

    enabled: bool = True
    max_nodes: int = 64
    loop_nodes: int = 30
    max_inputs: int = 30
    pinned_bytes: int = 2 << 20
    max_trie: int = 8192
    always_fuse: bool = False
    relaxed: bool = False
    recompute: Literal["free", "inputs"] = "free"
    compile: Literal["auto", "background", "now"] = "auto"
    compile_after: int = 2
    workers: int = 1
    max_kernels: int = 2048
    max_kernels_per_line: int = 64


_watchers: list[Callable[[str], None]] = []  # called after a change


def watch(changed: Callable[[str], None]) -> None:
    """Call `changed("config")` whenever a setting is assigned to."""
    _watchers.append(changed)


def _from_environment() -> Config:
    value = os.environ.get("AUTOFUSE", "1")
    if value not in ("0", "1"):
        raise ValueError(f"AUTOFUSE={value!r} is not valid; use 0 (plain eager) or 1 (the default)")
    settings: dict[str, Any] = {"enabled": value == "1"}
    if "AUTOFUSE_COMPILE" in os.environ:
        settings["compile"] = os.environ["AUTOFUSE_COMPILE"]
    return Config(**settings)


config = _from_environment()
