"""The failures that autofuse itself reports, one class per failure. Imports nothing of autofuse."""

import sys
from contextlib import suppress


class AutofuseError(RuntimeError):
    """Base class of every error that autofuse raises on its own account."""


class StaleInputError(AutofuseError):
    """An Input of a pending chain was modified behind autofuse's back before the chain ran."""


class LostGradientError(AutofuseError):
    """C++ code took a pending value that requires grad where autograd cannot follow."""


class KernelError(AutofuseError):
    """A kernel could not be compiled, loaded or launched; the chain then runs as eager ops."""


class ColdKernelError(AutofuseError):
    """A kernel would have to be compiled inside `no_compile` or while a CUDA graph is captured."""


class MismatchError(AutofuseError):
    """Check mode has found that a kernel computes something else than eager PyTorch."""


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
