"""Walks over programs: what follows from what. A program is given as the operands of its steps."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from .program import CONST, Ref

Args = Sequence[Sequence[Ref]]


def needed(args: Args, wanted: Iterable[int], given: Container[Ref] = ()) -> list[int]:
    """The steps that `wanted` follow from, and these, ascending; those of `given` are at hand."""
    found = set(wanted)
    stack = list(found)
    while stack:
        for ref in args[stack.pop()]:
            if 0 <= ref < CONST and ref not in found and ref not in given:
                found.add(ref)
                stack.append(ref)
    return sorted(found)


def sources(args: Args, step: int, given: Container[Ref] = ()) -> set[Ref]:
    """The Inputs, and the values of `given`, from which `step` is computed, be it given or not."""
    found, seen, stack = set(), {step}, [step]
    while stack:
        for ref in args[stack.pop()]:
            if ref < 0 or ref in given:
                found.add(ref)
            elif ref < CONST and ref not in seen:
                seen.add(ref)
                stack.append(ref)
    return found
