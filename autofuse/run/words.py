"""Words: a run of kernels as data, for the machine code of `hot`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import NotReadyError

# computes gradients: (incoming gradients, saved tensors, the chain's Consts) -> a tuple that
# begins with None
Answer = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], list[Any]], tuple[Any, ...]]


# Words begin with these, by their places
(RUNS, INPUTS, ARGUMENTS, POINTERS, OUTPUTS, PLACES, DEVICE, LAUNCH, MADE, BUSY, OWNED,
 PLACED, PLACED_AT, READY, FIRST) = range(15)  # fmt: skip
# at DEVICE: there is one of its kind; the CPU, for which threads need no context; and that alone,
# while torch has one thread of it
ANY, HOST, ALONE = -1, -2, -3


class Words:
    """A run as data, for `hot.launch`: words, some of them addresses of objects.

    Counters and scratch come first (runs, Inputs, room for arguments, pointers and outputs, how
    many pointers, the device if there are several, what launches, tensors made so far, whether it
    is running, how many of these are values of steps, before scratch, how many Inputs are
    overwritten and where it says by which steps and which, room for launches that are ready: what,
    blocks, threads, parameters), then what is read one after another: Inputs, live shells, outputs,
    pieces.
    """

    __slots__ = ("address", "attach", "attach_views", "bases", "copied", "kept", "memory",
                 "numbers", "private", "python", "results", "stream", "viewer")  # fmt: skip

    def __init__(self, words: list[int], kept: list[object]) -> None:
        self.memory = (ctypes.c_int64 * len(words))(*words)
        self.address = ctypes.addressof(self.memory)
        self.kept = kept  # the objects whose addresses are among the words
        self.attach: object = None  # as the runner's
        self.attach_views = False
        # what makes views that somebody holds, which come after the outputs, and of which of these
        self.viewer: Callable[..., Any] | None = None
        self.bases: tuple[int, ...] = ()
        # which step is copied to memory that is there, and which output that is; None for none
        self.copied: tuple[int, int] | None = None
        # of an Answer: its Consts, if any, from those of the chain, the current stream, which
        # result or incoming gradient (~k) goes where, and itself in Python
        self.numbers: Callable[[Any], tuple[Any, ...]] | None = None
        self.stream: Callable[[], int] | None = None
        self.results: tuple[int | None, ...] = ()
        self.python: Answer | None = None
        self.private = False  # whether that may run while another thread is at it

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.memory[RUNS]


def answer(program: Words, incoming: Any, saved: Any, consts: list[Any]) -> tuple[Any, ...]:
    """The Answer that `program` stands for.

    Raises NotReadyError where another thread is at it, or what this has interrupted: there is one
    place for the parameters of its launches.
    """
    assert program.python is not None
    if program.private:
        return program.python(incoming, saved, consts)
    memory, was = program.memory, 1
    try:
        # no Python runs from here...
        was = memory[BUSY]
        memory[BUSY] = 1
        # ...to here
        if was:
            raise NotReadyError("a kernel that is being launched just then")
        return program.python(incoming, saved, consts)
    finally:
        if not was:
            memory[BUSY] = 0
