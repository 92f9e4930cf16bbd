"""Sole tensors: those whose memory nobody else can reach, as Swift asks of a reference.

What is written there is seen through that one tensor and by nobody else, and so may be written
later. It is read where C++ has it; where it is not found at import, no tensor is ever sole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .torch_private import InferenceMode, NoModes, TensorBase, use_count

# words of C++'s part of a tensor that are looked at, and of what owns its memory
_INNER, _OWNER = 26, 16
# in both the word with two counts, of which the first is of the references that keep it...
REFERENCES, ONES = 1, (1 << 32) - 1
# ...and in the owner: the memory, what frees it, what that is called with, how many bytes it is
MEMORY, FREES, _GIVEN, BYTES = 2, 3, 4, 6


class Parts(NamedTuple):
    """Which words of C++'s part of a tensor are what."""

    owner: int  # of its memory
    autograd: int  # what autograd knows of it, or 0
    known: int  # of the owner's: its object in Python, or 0 where nobody has asked for one


def _words(address: int, count: int) -> Any:
    return (ctypes.c_uint64 * count).from_address(address)


def _inner(tensor: torch.Tensor) -> Any:
    return _words(TensorBase._cdata.__get__(tensor), _INNER)  # type: ignore[attr-defined]


def _changed(words: Any, change: Callable[[], Any]) -> list[int]:
    """Which of `words` are 0 before `change` and no more so afterwards."""
    before = [*words]
    change()
    return [k for k, word in enumerate(words) if word != before[k] == 0]


def _found() -> Parts | None:
    """None where a part of this torch is elsewhere."""
    tensor, other = torch.empty(3), torch.empty(5, dtype=torch.float64)
    foreign = torch.frombuffer(bytearray(8), dtype=torch.uint8)  # frees its memory another way
    storage = tensor.untyped_storage()
    owner, inner = _words(storage._cdata, _OWNER), _inner(tensor)
    places = [k for k, word in enumerate(inner) if word == storage._cdata]
    if len(places) != 1:
        return None
    owners = [_words(_inner(x)[places[0]], _OWNER) for x in (other, foreign)]
    alias = tensor.detach()  # beside `tensor` and `storage`
    counts = [owner[REFERENCES] & ONES, inner[REFERENCES] & ONES, use_count(alias)]
    own = owner[MEMORY] == owner[_GIVEN] == tensor.data_ptr() and owner[BYTES] == 12
    told = owners[0][FREES] == owner[FREES] != owners[1][FREES]
    autograd = _changed(inner, tensor.requires_grad_)
    known = _changed(owners[0], other.untyped_storage)
    if counts != [3, 1, 1] or not (own and told) or len(autograd) != 1 or not known:
        return None
    return Parts(places[0], autograd[0], known[-1])


with NoModes(), InferenceMode(False):
    PARTS = _found()


def frees(device: torch.device) -> int:
    """What frees the memory that torch gives on `device`; 0 where that is hidden."""
    if PARTS is None:
        return 0
    if not _frees.get(device):
        with NoModes(), InferenceMode(False):
            owner = _inner(torch.empty(1, device=device))[PARTS.owner]
            _frees[device] = _words(owner, _OWNER)[FREES] if owner else 0  # a mode may have made it
    return _frees[device]


_frees: dict[torch.device, int] = {}


class Reach(NamedTuple):
    """Words that say who can reach a tensor, and which of them."""

    inner: Any
    owner: Any
    autograd: int
    known: int

    # where no Python may run, this is written out
    def is_sole(self) -> bool:
        """Whether one reference keeps it and one its memory, of which nobody knows where it is, and
        autograd knows nothing of it."""
        inner, owner, autograd, known = self
        alone = inner[REFERENCES] & ONES == owner[REFERENCES] & ONES == 1
        return alone and inner[autograd] == owner[known] == 0


def reach_of(tensor: torch.Tensor, nbytes: int, frees: int) -> Reach | None:
    """Who can reach a concrete dense tensor of so many bytes.

    None where its memory is more than these, or not such as `frees` says.
    """
    if PARTS is None or not frees:
        return None
    with NoModes():
        inner = _inner(tensor)
    if not inner[PARTS.owner]:
        return None
    owner = _words(inner[PARTS.owner], _OWNER)
    if owner[FREES] != frees or owner[BYTES] != nbytes:
        return None
    return Reach(inner, owner, PARTS.autograd, PARTS.known)


def tell_place(tensor: torch.Tensor) -> None:
    """Let it be known that somebody has the address of `tensor`, which is concrete."""
    with NoModes():
        _storage_of(tensor)  # from now on it has an object in Python


_storage_of = TensorBase.untyped_storage  # type: ignore[attr-defined]
