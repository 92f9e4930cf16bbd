"""autofuse: eager PyTorch, with chains of pointwise ops run as one kernel each."""

import sys
from typing import TYPE_CHECKING, Any

from .api import disabled, is_pending, materialize, unwrap, wrap
from .chain.shell import Tensor
from .errors import AutofuseError, ColdKernelError, KernelError, MismatchError, StaleInputError
from .fused import fuse
from .hot import native
from .observe import check, logs
from .observe.counters import Stats, reset_stats, stats
from .ops.coverage import coverage
from .patches.install import install as _install_patches
from .settings.config import config
from .supply.kernels import no_compile, wait

if TYPE_CHECKING:
    from .observe.explain import Report, explain
    from .observe.text import show

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "autofuse needs Python's global lock, which this free-threaded build has switched off; "
        "PYTHON_GIL=1 switches it on"
    )

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
    "coverage",
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


def __getattr__(name: str) -> Any:
    if name in ("Report", "explain", "show"):  # 20 ms of import that only they need
        from .observe import explain as explaining
        from .observe import text as wording

        return getattr(wording if name == "show" else explaining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install_patches()
native.install()
check.install()
logs.install()
