"""Settling: giving the live shells of a chain its values, and its memory what it writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..chain.meta import UNKNOWN, fresh_meta
from ..chain.shell import become, gave
from ..chain.state import Chain, Node
from ..sole import ONES, REFERENCES, frees, reach_of
from ..torch_private import NoModes, copy_to, grad_setter, is_shell, raw_version_of

WRITING: dict[int, torch.Tensor] = {}  # `Chain.values` while C writes to memory that is read too


def settle(
    chain: Chain, visible: Sequence[Node], believed: bool = False, again: bool = False
) -> None:
    """Give the live shells of `chain` its values, and the memory that it writes to the last one.

    believed: they are what their nodes say. again: go on where that was interrupted.
    """
    values = chain.values
    assert values is not None
    with NoModes():
        if chain.into is not None:
            write_out(chain, values[chain.tip.index])
        for node in visible:
            shell, meta = chain[node.index], node.meta
            if shell is None:
                continue
            real = values[node.index]
            assert meta is not None
            if chain.placed is not None and node.index in chain.placed:
                real = put_back(chain, node.index, chain.placed[node.index], real)
            if again and is_shell(real):
                node.shell = gave(shell, real, UNKNOWN, node)
            else:
                if not believed and fresh_meta(real) is not meta:
                    meta = UNKNOWN  # never believed to be what it is not
                node.shell = become(shell, real, meta, node)
            chain[node.index] = None


def put_back(chain: Chain, index: int, position: int, value: torch.Tensor) -> torch.Tensor:
    """What the handle of node `index` gets back: the Input at `position`, once it has `value`.

    Its versions are those that were, and as many as ops in place on the handle have made. Where
    somebody who came in the middle keeps hold of `value`, that is what the handle has from then on;
    where somebody wrote to it, it is copied once more, as often as somebody comes to write.
    """
    memory = chain.inputs[position]
    if value is memory or is_shell(memory):
        return memory
    assert chain.values is not None
    before = chain.marks[2 * position]
    reach = reach_of(value, chain.tip.inputs[position].nbytes, frees(value.device))
    while reach is not None:
        written = raw_version_of(value)
        while raw_version_of(memory) < before + written - 1:
            increment_version(memory)
        copy_to(memory, value)  # no kernel has written there
        inner, owner, autograd, known = reach
        # no Python runs from here...
        if not inner[REFERENCES] & ONES == owner[REFERENCES] & ONES == 1:
            break
        if not inner[autograd] == owner[known] == 0:
            break
        if value._version == written:  # otherwise who runs in the middle has written to it
            chain.values[index] = memory  # for who asks from here on
            # ...to here
            return memory
    for _ in range(before):  # who has asked has the other memory
        increment_version(value)
    return value


def write_out(chain: Chain, value: torch.Tensor) -> None:
    """Write the last value of `chain` where it belongs; its op was recorded under no_grad."""
    grad, set_grad = torch.is_grad_enabled(), grad_setter()
    try:
        set_grad(False)
        # no Python runs from here...
        into, chain.into = chain.into, None
        if into is not None:  # who runs in the middle may have been faster
            copy_to(into, value)  # ...to its end
    finally:
        set_grad(grad)


def bump(chain: Chain, reals: dict[int, torch.Tensor]) -> None:
    """Give each new value the version that its in-place ops have made, before it is saved."""
    for index, times in (chain.bumps or {}).items():
        if index in reals and not _is_memory(chain, index, reals[index]):
            for _ in range(times):
                increment_version(reals[index])


def _is_memory(chain: Chain, index: int, real: torch.Tensor) -> bool:
    """Whether `real`, the value of a node in place, is the Input that it has overwritten."""
    position = (chain.placed or {}).get(index)
    return position is not None and chain.inputs[position] is real


def writes_of(chain: Chain, reals: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Whose memory the kernels of `chain` write to, as often as that counts as a write."""
    written = [] if chain.into is None else [chain.into]
    for index in chain.placed or ():
        if index in reals and _is_memory(chain, index, reals[index]):
            written += [reals[index]] * (chain.bumps or {}).get(index, 0)
    return written


def publish(chain: Chain, values: dict[int, torch.Tensor]) -> None:
    """Let `values` be what the flush of `chain` gives away, unless others were faster."""
    others = chain.values is not None and chain.values is not WRITING
    if not others:
        # no Python runs from here...
        chain.values = values
        chain.bumps = None
        # ...to here
