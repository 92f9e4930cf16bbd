"""Timing helpers: interleaved rounds, medians with the 20th and 80th percentile."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_us(call: Callable[[], object], device: str, iterations: int) -> float:
    """Wall-clock us per call over `iterations` calls with one synchronize at the end."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / iterations * 1e6


class Series:
    """Times of one variant over the rounds, in us."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def __str__(self) -> str:
        ordered = sorted(self.times)
        low, high = ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]
        return f"{self.median:9.2f} ({low:.2f}-{high:.2f})"


def interleaved(
    calls: dict[str, Callable[[], object]],
    device: str,
    rounds: int = 9,
    iterations: int = 1000,
    warm: int = 10,
) -> dict[str, Series]:
    """Time every call in every round, A B A B, after `warm` calls or more of each."""
    series = {name: Series() for name in calls}
    for call in calls.values():
        for _ in range(max(warm, iterations // 10)):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            series[name].times.append(host_us(call, device, iterations))
    return series


def machine(device: str) -> str:
    """Hardware and versions, for the head of a result."""
    import numba

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{name}; torch {torch.__version__}, numba {numba.__version__}, Python {python}"
