"""Fast paths of torch, which it takes with tensors of no subclass, or of ours.

Attention and encoders compute all of a layer in one kernel of torch's where no argument has a
`__torch_function__`; its bits are others than those of the layer's ops. Optimizers and the clipping
of gradients go through all parameters at once where these are of classes that a list names, and so
with other bits than one after the other: a leaf that was wrapped is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from ..chain.shell import Tensor
from ..torch_private import has_torch_function

_ASKS, _NAME = "has_torch_function", "_has_torch_function_beside_autofuse"
_MODULES = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder


def _has_others(values: Sequence[Any]) -> bool:
    """`torch.overrides.has_torch_function`, but of tensors of ours, as if they were plain."""
    return has_torch_function([None if x.__class__ is Tensor else x for x in values])


def patch_fast_paths() -> None:
    """Let these modules ask so, and the lists name the class of wrapped tensors.

    The modules' methods stay what they are, with the text that torch.jit reads: in their code,
    another attribute of `torch.overrides` is named.
    """
    for place in (optimizer, _foreach_utils):
        place._foreach_supported_types.append(Tensor)  # pyright: ignore[reportArgumentType]
    setattr(torch.overrides, _NAME, _has_others)
    for module in _MODULES:
        forward: Any = module.forward
        code = getattr(forward, "__code__", None)  # somebody's patch may have none
        if code is not None and _ASKS in code.co_names:
            names = tuple([_NAME if name == _ASKS else name for name in code.co_names])
            forward.__code__ = code.replace(co_names=names)
