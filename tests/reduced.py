"""Reductions in chains: one table for tests of what comes in their middle.

Each is a function of x and y, [4, 8], and of w and b, [8]. What is computed is compared elsewhere;
here are handlers, modes, writes, views, hooks and checkpoints around it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Call = Callable[..., torch.Tensor]

CLASSES = torch.tensor([1, 0, 3, -100])

REDUCED: dict[str, Call] = {
    "sum": lambda x, y, w, b: x.sum(-1),
    "sum, kept": lambda x, y, w, b: y * x.sum(-1, keepdim=True),
    "sum of columns": lambda x, y, w, b: x.sum(0) * w,
    "mean of apart": lambda x, y, w, b: x.view(2, 2, 8).mean((0, 2)),
    "mean of all": lambda x, y, w, b: x.mean(),
    "amax": lambda x, y, w, b: x - x.amax(-1, keepdim=True),
    "var": lambda x, y, w, b: x.var(-1),
    "std": lambda x, y, w, b: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1),
    "softmax": lambda x, y, w, b: x.softmax(-1) * y,
    "softmax of columns": lambda x, y, w, b: x.softmax(0),
    "logsumexp": lambda x, y, w, b: x.logsumexp(-1),
    "layer_norm": lambda x, y, w, b: F.layer_norm(x, (8,), w, b) + y,
    "rms_norm": lambda x, y, w, b: F.rms_norm(x, (8,), w) * y,
    "group_norm": lambda x, y, w, b: F.group_norm(x.view(1, 8, 4), 2, w, b),
    "batch_norm": lambda x, y, w, b: (
        F.batch_norm(x, w.detach(), b.detach().abs(), w, b, False, 0.1, 1e-3) * y
    ),
    "any": lambda x, y, w, b: x * (x > y).any(-1, keepdim=True),
    "norm": lambda x, y, w, b: x.norm(dim=-1),
    "normalize": lambda x, y, w, b: F.normalize(x, dim=-1),
    "mse_loss": lambda x, y, w, b: F.mse_loss(x, y),
    "cross_entropy": lambda x, y, w, b: F.cross_entropy(x, CLASSES),
    "nll_loss": lambda x, y, w, b: F.nll_loss(F.log_softmax(x, -1), CLASSES, reduction="sum"),
}  # fmt: skip
