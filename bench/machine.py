"""The machine: hardware, versions, clocks and commit, for the head of a result.

Reads only: nothing is set, and neither hosts nor paths are named.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
PACKAGES = ("numba", "numba-cuda", "triton", "cupy-cuda13x", "cupy-cuda12x", "cupy", "jax")
# of nvidia-smi, by the name in the results
QUERIES = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}


def machine(device: str) -> str:
    """Hardware and versions in a line."""
    import numba

    python = ".".join(map(str, sys.version_info[:3]))
    return f"{name(device)}; torch {torch.__version__}, numba {numba.__version__}, Python {python}"


def name(device: str) -> str:
    """What the device is called by its maker."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found.group(1).strip() if found else platform.processor() or "CPU"


def slug(text: str) -> str:
    """A name as part of a file's: "NVIDIA H200" as "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\(\w+\)", "", text.lower())).strip("_")


def facts(device: str, commit: str = "") -> dict[str, Any]:
    """The head of a result."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    head: dict[str, Any] = {
        "machine": name(device),
        "cpu": name("cpu"),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": commit or head_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        head["cuda"] = torch.version.cuda
        head["driver"] = str(clocks().get("driver", "unknown"))
    return head


def head_commit() -> str:
    """The checked-out commit, with a + if files differ from it; "unknown" without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def clocks() -> dict[str, Any]:
    """What nvidia-smi says of driver, clocks, temperature and power now; empty without it."""
    query = [
        "nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits",
        f"--id={torch.cuda.current_device() if torch.cuda.is_available() else 0}",
    ]  # fmt: skip
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split("\n")[0].split(", ")
    if done.returncode or len(values) != len(QUERIES):
        return {}
    return {key: _number(value) for key, value in zip(QUERIES, values, strict=True)}


def _number(text: str) -> float | str:
    """A reading; the driver's version and "[N/A]" stay text."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text
