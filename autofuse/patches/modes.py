"""Modes: places of PyTorch that change how a thread or the process computes."""

from __future__ import annotations

import torch

from ..record.flush import flush_thread
from ..record.modes import reopen, reopen_all
from .around import closed_between, closed_inside, reopened_after


def patch_modes() -> None:
    """Inside these nothing is recorded: they see, or change, every single op."""
    from torch._functorch import eager_transforms, vmap
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode

    for owner in (
        TorchFunctionMode,
        TorchDispatchMode,
        torch.autocast,
        torch.autograd.graph.saved_tensors_hooks,
    ):
        closed_inside(owner, keep=DeviceContext)
    for name in ("__enter__", "__exit__"):
        reopened_after(torch.inference_mode, name, "inference mode", reopen, flush=flush_thread)
    reopened_after(torch, "set_default_dtype", "default dtype", reopen_all)
    reopened_after(torch, "set_anomaly_enabled", "anomaly mode", reopen_all)
    for module in (eager_transforms, vmap):  # a level of torch.func owns every new tensor
        for kind in ("grad", "jvp", "vmap", "func"):
            closed_between(module, f"_{kind}_increment_nesting", f"_{kind}_decrement_nesting")
