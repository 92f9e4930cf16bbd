"""Which kind of Runner computes on which device."""

from __future__ import annotations

from typing import Any

import torch

from .cpu import CpuRunner
from .cuda import CudaRunner
from .launching import LaunchingRunner

RUNNERS: dict[str, Any] = {"cuda": CudaRunner, "cpu": CpuRunner}


def runner_class(device: torch.device) -> type[LaunchingRunner]:
    """The kind of Runner that computes on `device`."""
    return RUNNERS[device.type]
