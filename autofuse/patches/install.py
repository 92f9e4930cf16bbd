"""Boundaries: the places outside autofuse where something must be flushed first.

Most of PyTorch reaches a wrapped tensor through `__torch_function__`. These modules cover the rest:
code that takes tensors without asking (user autograd Functions, jit, torch.func), writes to plain
memory that a pending op still has to read, changes of stream or of a thread's modes, and forks.
Each patch is one test of an empty list where nothing is pending (0.1 us).
"""

from __future__ import annotations

import os
from functools import cache

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import lending
from ..record import modes
from ..record.flush import flush_all
from ..run import cpu
from ..supply import kernels
from .calls import patch_calls
from .checkpoint import patch_checkpoints
from .compile import patch_compile
from .fast_paths import patch_fast_paths
from .memory import patch_attributes, patch_inplace
from .modes import patch_modes
from .streams import patch_cuda, patch_distributed, patch_profiler


@cache
def install() -> None:
    """Patch PyTorch's boundaries; a second call does nothing."""
    patch_inplace()
    patch_attributes()
    patch_calls()
    patch_modes()
    patch_checkpoints()
    patch_compile()
    patch_fast_paths()
    patch_distributed()
    patch_cuda()
    patch_profiler()
    register_optimizer_step_pre_hook(lambda *args: flush_all("optimizer"))
    os.register_at_fork(
        before=lambda: flush_all("fork"),
        after_in_child=lambda: [
            module.forget_threads() for module in (modes, cpu, kernels, lending)
        ],
    )
