"""The failures that autofuse itself reports, one class per failure. Imports nothing of autofuse."""


class AutofuseError(RuntimeError):
    """Base class of every error that autofuse raises on its own account."""


class StaleInputError(AutofuseError):
    """An Input of a pending chain was modified behind autofuse's back before the chain ran."""


class KernelError(AutofuseError):
    """A kernel could not be compiled, loaded or launched; the chain then runs as eager ops."""
