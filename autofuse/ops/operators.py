"""Operators: which rows Python's operators and the methods for dtypes stand for."""

from __future__ import annotations

import torch

from . import activations as _activations  # noqa: F401 - they add their rows
from . import channels as _channels  # noqa: F401
from . import extremes as _extremes  # noqa: F401
from . import groups as _groups  # noqa: F401
from . import likelihood as _likelihood  # noqa: F401
from . import losses as _losses  # noqa: F401
from . import moves as _moves  # noqa: F401
from . import norms as _norms  # noqa: F401
from . import special as _special  # noqa: F401
from . import truths as _truths  # noqa: F401

# --- casts: `x.to(dtype)`, `x.float()` and so on; one to the dtype x has is x itself ------------

CAST_METHODS = {
    "double": torch.float64, "float": torch.float32, "half": torch.float16,
    "bfloat16": torch.bfloat16, "long": torch.int64, "int": torch.int32, "short": torch.int16,
    "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}  # fmt: skip

# --- Python's operators -------------------------------------------------------------------------

BINARY_OPERATORS = {
    "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div",
    "__mod__": "remainder",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
}  # fmt: skip
# with a tensor on the left Python asks the subclass on the right first; the operands' order then
# decides layout and error text, so that a scalar and a tensor are two cases
REFLECTED_OPERATORS = {
    "__radd__": ("add", "add"), "__rsub__": ("sub", "rsub"), "__rmul__": ("mul", "mul"),
    "__rtruediv__": ("div", None),
    "__rand__": ("bitwise_and", "bitwise_and"), "__ror__": ("bitwise_or", "bitwise_or"),
    "__rxor__": ("bitwise_xor", "bitwise_xor"),
}  # fmt: skip
UNARY_OPERATORS = {"__neg__": "neg", "__abs__": "abs", "__invert__": "bitwise_not"}
SPELLED_OPERATORS = {"__pow__": "pow", "__floordiv__": "floor_divide"}
INPLACE_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div",
    "__idiv__": "div", "__imod__": "remainder", "__ipow__": "pow",
    "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift", "__irshift__": "bitwise_right_shift",
}  # fmt: skip
