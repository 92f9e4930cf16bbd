"""Verified: where reductions were found to have eager's bits, and so where they are recorded.

The order in which torch adds is no promise of torch's, and its compiler decides what it contracts:
both may differ by torch's version and by the GPU. So reductions are recorded with a torch and on a
GPU for which all their kinds have been compared with eager's, or for which a user of this machine
has done so: `python -m autofuse verify` keeps what it finds beside the kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ..ops.reductions import DEVICES, NODES, NODES_OF_ALL
from ..settings.config import config, watch
from ..supply.disk import DiskCache
from ..supply.load import processors_of
from ..supply.toolchain import compilers

# (torch version, its CUDA version, compute capability): bench/reductions.py found no difference
VERIFIED = {((2, 11), "13.0", (9, 0))}
SAME = b"the same bits"
# has those on which reductions are recorded, for machine code
wanted: dict[torch.device, bool] = {}
_met: set[torch.device] = set()  # of the types on which they may be
_assumed: list[bool] = []  # while they are being compared


def meet(device: torch.device) -> None:
    """Find out whether reductions are recorded on `device`, on which a thread begins to record."""
    if device.type in DEVICES and device not in _met:
        refusal(device)  # which takes time and is kept: an interrupt leaves it to the next to ask
        try:
            _met.add(device)
            _follow()
        except BaseException:
            _met.discard(device)
            raise


def is_verified(version: str, cuda: str | None, capability: tuple[int, int]) -> bool:
    """Whether this torch on such a GPU is one of those that the authors have compared."""
    return (tuple(map(int, version.split(".")[:2])), cuda, capability) in VERIFIED


def refusals() -> list[str]:
    """Why reductions are left to eager PyTorch on devices that were met."""
    asked = sorted(_met, key=str) if config.reductions else []
    return [reason for device in asked if (reason := refusal(device))]


def refusal(device: torch.device) -> str:
    """Why reductions on `device` are left to eager PyTorch; empty where they are not."""
    return "" if _assumed or device.type != "cuda" else _refusal(device)


@cache
def _refusal(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    kept = DiskCache().get(key_of(device))
    if kept is not None and kept != SAME:
        return "a reduction, of which `python -m autofuse verify` found other bits than eager's"
    if kept == SAME or is_verified(torch.__version__, torch.version.cuda, capability):
        return ""
    release = ".".join(torch.__version__.split(".")[:2])
    place = f"torch {release} on compute capability {'.'.join(map(str, capability))}"
    return f"a reduction, not compared with {place}: `python -m autofuse verify` does"


def keep(device: torch.device, same: bool) -> str:
    """Keep what a comparison has found on a GPU such as `device`; why that cannot be, if so."""
    payload = SAME if same else b"other bits"
    about = {"name": "reductions", "target": payload.decode(), "source": ""}
    unsaved = DiskCache().put(key_of(device), payload, about)
    _refusal.cache_clear()
    _follow()
    return unsaved


def key_of(device: torch.device) -> str:
    """Of all that decides the bits of eager's reductions and of ours."""
    facts = (
        "reductions over any axes, softmax, interleaved and shared rows, gradients, and batch_norm",
        (*NODES, *NODES_OF_ALL),
        torch.__version__, torch.version.cuda,
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device),
        processors_of(device), compilers("cuda"),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@contextmanager
def assumed() -> Iterator[None]:
    """Record reductions meanwhile, to compare them."""
    _assumed.append(True)
    _follow()
    try:
        yield
    finally:
        _assumed.pop()
        _follow()


def _follow(*reason: object) -> None:
    """Do what `config.reductions` says, on the devices that were met."""
    for device in tuple(_met):
        while True:  # another thread may follow another change meanwhile
            wants = config.reductions and not refusal(device)
            if wants is (device in wanted):
                break
            if wants:
                wanted[device] = True
            else:
                wanted.pop(device, None)


watch(_follow)
