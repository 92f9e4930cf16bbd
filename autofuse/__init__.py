"""autofuse: eager PyTorch, with chains of pointwise ops run as one kernel each."""

from . import boundaries
from .api import disabled, fuse, is_pending, materialize, unwrap, wrap
from .config import config
from .errors import AutofuseError, KernelError, StaleInputError
from .report import Stats, reset_stats, stats
from .shell import Tensor

__version__ = "0.1.0"
__all__ = [
    "AutofuseError",
    "KernelError",
    "StaleInputError",
    "Stats",
    "Tensor",
    "config",
    "disabled",
    "fuse",
    "is_pending",
    "materialize",
    "reset_stats",
    "stats",
    "unwrap",
    "wrap",
]

boundaries.install()
