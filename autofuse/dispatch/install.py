"""The class as PyTorch and Python see it: everything that dispatch defines is put on it here."""

from __future__ import annotations

from ..chain.shell import Tensor
from .handlers import install_ops
from .metadata import install_metadata
from .methods import install_methods
from .protocol import torch_dispatch, torch_function
from .shapes import install_shapes

Tensor.__torch_function__ = staticmethod(torch_function)  # type: ignore[assignment]
Tensor.__torch_dispatch__ = staticmethod(torch_dispatch)  # type: ignore[assignment]
install_ops()
install_shapes()
install_metadata()
install_methods()
