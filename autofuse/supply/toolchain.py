"""The toolchain: what decides a binary besides its Source, how it is called, what becomes of it.

Imports no compiler to say so, and no torch.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..kernel.source import Source

_PACKAGES = (
    "llvmlite", "numba", "numba-cuda", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit",
    "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc", "nvidia-nvvm-cu12",
    "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip
_GENERATOR = Path(__file__).parents[1] / "kernel"  # what makes a binary of a Source


@dataclass(frozen=True, slots=True)
class Built:
    """What became of a Source: a binary, or an error."""

    binary: bytes = b""
    built: bool = False  # here and now; otherwise it was on disk
    unsaved: str = ""  # why it is not on disk
    error: str = ""
    refused: bool = False  # there is no service: nothing was tried


@cache
def compilers(device_type: str) -> tuple[str, ...]:
    """Our generator, the packages that compile and their versions, options; for "cuda" or "cpu".

    A CUDA toolkit that is no package is known by its place.
    """
    from importlib.metadata import PackageNotFoundError, version

    generator = hashlib.sha256()
    for path in sorted(_GENERATOR.glob("*.py")):
        generator.update(path.read_bytes())
    facts = [generator.hexdigest()]
    if device_type == "cpu":
        from ..kernel.llvm import processor

        return (*facts, version("llvmlite"), *processor())
    for package in _PACKAGES:
        try:
            facts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    places = {name: os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")}
    for name, place in {**places, "default": "/usr/local/cuda"}.items():
        if place and os.path.exists(place):
            facts.append(f"{name}={os.path.realpath(place)}")
    numba = (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_"))
    return (*facts, *numba)


def key_of(source: Source, target: str) -> str:
    """The name of a kernel on disk: what it computes, for what, and with which compilers."""
    facts = (source.to_json(), target, *compilers(source.device))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
