"""autofuse: eager PyTorch, with chains of pointwise ops run as one kernel each."""

from . import boundaries, check, logs
from .api import disabled, fuse, is_pending, materialize, unwrap, wrap
from .compile import no_compile, wait
from .config import config
from .errors import (
    AutofuseError,
    ColdKernelError,
    KernelError,
    MismatchError,
    StaleInputError,
)
from .explaining import Report, explain, show
from .report import Stats, reset_stats, stats
from .shell import Tensor

__version__ = "0.1.0"
__all__ = [
    "AutofuseError",
    "ColdKernelError",
    "KernelError",
    "MismatchError",
    "Report",
    "StaleInputError",
    "Stats",
    "Tensor",
    "config",
    "disabled",
    "explain",
    "fuse",
    "is_pending",
    "materialize",
    "no_compile",
    "reset_stats",
    "show",
    "stats",
    "unwrap",
    "wait",
    "wrap",
]

boundaries.install()
check.install()
logs.install()
