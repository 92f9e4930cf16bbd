"""Verified: where reductions were found to have eager's bits.

The order in which torch adds is no promise of torch's, and its compiler decides what it contracts:
both may differ by torch's version and by the GPU. A GPU and a torch are verified if all kinds of
reductions have been compared with eager's there: by the authors, or by `python -m autofuse verify`,
which keeps what it finds beside the kernels. Elsewhere each kernel is compared before it is used
(`run.proof`), which is kept, too. A kind of which other bits were found is eager from then on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from ..ops.reductions import DEVICES, NODES, NODES_OF_ALL
from ..settings.config import config, watch
from ..supply.disk import DiskCache
from ..supply.load import processors_of
from ..supply.toolchain import compilers

# (torch version, its CUDA version, compute capability): bench/reductions.py found no difference
VERIFIED = {((2, 11), "13.0", (9, 0))}
COMPARED = {"cuda"}  # types of devices on which kernels reduce
SAME = b"the same bits"
# has those on which reductions are recorded, for machine code
wanted: dict[torch.device, bool] = {}
_met: set[torch.device] = set()  # of the types on which they may be
_assumed: list[bool] = []  # while they are being compared
_compared: dict[tuple[Hashable, ...], bool | None] = {}  # what `_found` has found


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


def refusal(device: torch.device, kind: str = "") -> str:
    """Why reductions on `device`, or those of one kind, are left to eager PyTorch; empty where they
    are not."""
    if _assumed or device.type not in COMPARED:
        return ""
    if _found(device) is False:
        return "a reduction, of which `python -m autofuse verify` found other bits than eager's"
    if kind and not is_trusted(device) and _found(device, kind) is False:
        return f"{kind}, of which a kernel has given other bits than eager's on this GPU"
    return ""


def is_trusted(device: torch.device) -> bool:
    """Whether kernels that reduce are used on `device` without comparing them first."""
    if _assumed or device.type not in COMPARED or _found(device):
        return True
    capability = torch.cuda.get_device_capability(device)
    return is_verified(torch.__version__, torch.version.cuda, capability)


def is_proven(device: torch.device, *kernels: Hashable) -> bool:
    """Whether `kernels` have given eager's bits on a GPU such as `device`."""
    return _found(device, *kernels) is True


def _found(device: torch.device, *about: Hashable) -> bool | None:
    """Whether the bits were the same in a comparison on a GPU such as `device`; None if there was
    none. about: what was compared, if that was not all there is."""
    key = device, *about
    if key not in _compared:
        kept = DiskCache().get(key_of(*key))
        _compared[key] = None if kept is None else kept == SAME
    return _compared[key]


def keep(device: torch.device, same: bool, *about: Hashable) -> str:
    """Keep what a comparison has found on a GPU such as `device`; why that cannot be, if so.

    about: what was compared, kernels or the name of a kind; all kinds if there is none.
    """
    payload = SAME if same else b"other bits"
    text = {"name": "reductions", "target": payload.decode(), "source": ""}
    unsaved = DiskCache().put(key_of(device, *about), payload, text)
    _compared[(device, *about)] = same
    _follow()
    return unsaved


def key_of(device: torch.device, *about: Hashable) -> str:
    """Of all that decides the bits of eager's reductions and of ours."""
    facts = (
        *about,
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
