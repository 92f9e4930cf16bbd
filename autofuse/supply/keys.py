"""Keys: the names of kernels on disk."""

from __future__ import annotations

import hashlib
from functools import cache

import torch

from ..kernel.source import Source
from .toolchain import compilers


def target_of(device: torch.device) -> str:
    """What kernels are compiled for: sm_90, or cpu."""
    return _capability(device) if device.type == "cuda" else "cpu"


@cache
def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def key_of(source: Source, device: torch.device) -> str:
    """The name of a kernel on disk: what it computes, for what, and with which compilers."""
    facts = (source.to_json(), target_of(device), *compilers(device.type))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
