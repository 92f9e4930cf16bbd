"""Positions: which line of the user's program is running. Imports nothing of autofuse."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import torch

Position = tuple[str, int]  # file, line

PACKAGE, TORCH = (os.path.dirname(path) + os.sep for path in (__file__, torch.__file__))
OURS = (PACKAGE, "<autofuse")  # how the names of our files begin, and of code made while running
_INSIDE = (*OURS, TORCH, contextlib.__file__, threading.__file__)


def is_inside(frame: FrameType) -> bool:
    """Whether `frame` runs code of autofuse or torch, or what decorators and threads begin with."""
    return frame.f_code.co_filename.startswith(_INSIDE)


def frames() -> Iterator[FrameType]:
    """The frames of this thread, from the caller's caller outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_position(in_file: bool = False) -> Position | None:
    """File and line of the user's code that is running; None in a thread of torch's.

    in_file: pass over code that is in no file, such as what `exec` runs.
    """
    for frame in frames():
        name = frame.f_code.co_filename
        if not is_inside(frame) and not (in_file and name.startswith("<")):
            return name, frame.f_lineno
    return None


def shown(position: Position | None) -> str:
    """`position` as people read it: `train.py:57`, `Cell In[3]:2`."""
    if position is None:
        return "a thread of torch's"
    name, line = position
    return f"{named(name)}:{line}"


def named(file: str) -> str:
    """A file as people call it, relative if it is below here; a notebook's cell by its number."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and not os.path.exists(file):  # a cell is compiled as a file of no place
        compiler = getattr(ipython.get_ipython(), "compile", None)
        called = getattr(compiler, "format_code_name", lambda _: None)(file)
        if called:
            return " ".join(called)
    return file.removeprefix(os.getcwd() + os.sep)
