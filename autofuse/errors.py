"""The failures that autofuse itself reports, one class per failure. Imports nothing of autofuse.

A message has three lines: what happened with which op at which line of the program, the cause, and
the cure.

The first paragraph of a class says what happened, the second what to do; docs/troubleshooting.md
has them as a table. What eager PyTorch would raise is raised by torch, at the same line.
"""

import sys
from contextlib import suppress


class AutofuseError(RuntimeError):
    """Base class of every error that autofuse raises on its own account.

    Catch the class below it that you expect.
    """


class StaleInputError(AutofuseError):
    """An Input of a pending chain was modified behind autofuse's back before the chain ran.

    Call `autofuse.materialize(result)` before the write, or write through the wrapped tensor.
    """


class LostGradientError(AutofuseError):
    """C++ code called with a pending value that requires grad what autograd cannot look at again.

    Call `autofuse.materialize(tensor)` before handing it over.
    """


class KernelError(AutofuseError):
    """A kernel could not be compiled, loaded or launched; the chain then runs as eager ops.

    Seen only as a message on stderr; `python -m autofuse report` says what is amiss.
    """


class ColdKernelError(AutofuseError):
    """A kernel would have to be compiled inside `no_compile` or while a CUDA graph is captured.

    Run the code once before, with the same dtypes and layouts, and call `autofuse.wait()`.
    """

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source: str = source  # the kernel's text


class MismatchError(AutofuseError):
    """Check mode has found that a kernel computes something else than eager PyTorch.

    Report it with the program that the message names; meanwhile run these lines in
    `autofuse.disabled()`.
    """


class BuildError(Exception):
    """A compiler did not give a kernel; caught inside."""


class NotReadyError(AutofuseError):
    """A kernel that is still being compiled is needed in the middle of a run; caught inside."""


_said: set[str] = set()


def warn_once(message: str) -> None:
    """Warn on stderr, once per message."""
    if message not in _said:
        _said.add(message)
        with suppress(OSError, ValueError):  # there may be no stderr any more
            print(message, file=sys.stderr)
