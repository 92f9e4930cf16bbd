"""Overwriting: whether kernels may store a value in memory that they read."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.program import Ref
from .plan import Piece, Plan
from .source import NUMBERS, PADDED, ROLLED


def stored_last(pieces: Sequence[Piece], step: int) -> tuple[Piece, ...]:
    """`pieces`, that which stores `step` as the last one where no other reads what it stores."""
    storing = [piece for piece in pieces if step in piece.stores]
    others = [piece for piece in pieces if step not in piece.stores]
    if len(storing) != 1 or any(ref in storing[0].stores for x in others for ref in x.loads):
        return tuple(pieces)
    return (*others, *storing)


def is_overwritten(pieces: Sequence[Piece], step: int, read: Ref) -> bool:
    """Whether one of `pieces` can store `step` in the memory of the Input `read`.

    It is the last that reads it, and reads each element where it stores it, by the same thread.
    """
    storing = [k for k, piece in enumerate(pieces) if step in piece.stores]
    if len(storing) != 1 or any(read in piece.loads for piece in pieces[storing[0] + 1 :]):
        return False
    piece = pieces[storing[0]]
    if not isinstance(piece.plan, Plan) or piece.stores.count(step) != 1:
        return False
    stored, *loaded = [
        walk for ref, walk in zip((*piece.loads, *piece.stores), _walks(piece), strict=True)
        if ref == step or ref == read
    ][::-1]  # fmt: skip
    return all(walk == stored for walk in loaded) and {ROLLED, PADDED}.isdisjoint(stored[1])


def _walks(piece: Piece) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """How the operands of a kernel go through memory: from which byte on, along which axes."""
    plan, at = piece.plan, piece.plan.rank - 1 + piece.plan.spaced
    walks = []
    operands = [*plan.loads, *(operand for _, operand in plan.stores)]
    for operand, offset in zip(operands, piece.offsets, strict=True):
        end = at + sum(NUMBERS.get(axis, 0) for axis in operand.axes)
        walks.append((offset, operand.axes, piece.numbers[at:end]))
        at = end
    return walks
