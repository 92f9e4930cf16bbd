"""Functions that autofuse does not record: what has to be known of each to run it safely."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from ..chain.refusal import refusal_of
from ..torch_private import TensorBase

Plain = torch.Tensor

# C functions do not look at the class once torch functions are off; Python ones may. Changing the
# class of a tensor that another thread uses at the same time is best kept rare.
IN_C = {type(torch.add), type(Plain.add), type(Plain.__getitem__),
         type(Plain.shape.__get__)}  # type: ignore[attr-defined]  # fmt: skip
# functions that do, and that tell modes of what it has by their name
_EXACT_CLASS = {"numpy", "_make_subclass", "as_subclass", "is_contiguous", "__reduce_ex__"}
COPIES = {"__reduce_ex__", "__deepcopy__", "__setstate__"}
# functions in Python that stand between chains, and such of C's that only modules of torch call
PASSED = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd", "adaptive_avg_pool2d",
          "chain_matmul", "einsum", "embedding", "group_norm", "instance_norm", "layer_norm",
          "log_softmax", "max_pool1d", "max_pool2d", "norm", "softmax", "split", "tensordot",
          "unflatten"}  # fmt: skip
# Python functions that only pass their tensors on to C
LIKE_C = {F.layer_norm, F.group_norm, F.embedding, F.cross_entropy, F.nll_loss, F.relu, F.silu,
           F.mish, F.elu, F.glu, F.dropout, F.batch_norm, F.rms_norm, F.pad,
           F.interpolate, torch.einsum, torch.norm, torch.split, Plain.norm,
           Plain.split}  # fmt: skip


# methods and functions that write the values of their first argument, and nothing else of it
WRITERS = {"addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "bernoulli_", "cauchy_", "cumprod_",
           "cumsum_", "exponential_", "fill_", "fill_diagonal_", "geometric_", "index_add_",
           "index_copy_", "index_fill_", "index_reduce_", "log_normal_", "masked_scatter_",
           "normal_", "put_", "random_", "renorm_", "scatter_", "scatter_add_", "scatter_reduce_",
           "tril_", "triu_", "uniform_", "zero_"}  # fmt: skip

TARGETS = {"out", "inplace"}  # keywords by which a function may write


class Known:
    """What `run_eager` has to know of a function."""

    __slots__ = ("asks", "in_c", "lends", "name", "out_of_tensors", "own", "refusal", "targets",
                 "to_out", "writes")  # fmt: skip

    def __init__(self, func: Callable[..., Any]) -> None:
        self.name = getattr(func, "__name__", "function")
        self.refusal = refusal_of(self.name, "not in the table")
        like_c = func in LIKE_C and not _is_patch(func)
        self.in_c = like_c or (func.__class__ in IN_C and self.name not in _EXACT_CLASS)
        # whether it tells modes of its call before it looks at its tensors
        in_torch = func.__class__ in IN_C or asks_for_overrides(func)
        self.asks = in_torch and self.name not in _EXACT_CLASS
        # torch's: what it reads is among its arguments
        self.own = self.in_c or func.__class__ in IN_C or _is_torch_own(func)
        # running statistics are written in training alone
        self.targets = TARGETS | {"training"} if func is F.batch_norm else TARGETS
        self.to_out = False  # whether a kernel has written its result where `out` says
        self.out_of_tensors = self.name == "where"  # whether it takes none with numbers
        self.writes = _writes(self.name, func) and func is not F.batch_norm
        # whether it runs on wrapped tensors whose class is a plain one's meanwhile
        alone = self.writes or self.name in _EXACT_CLASS | COPIES
        self.lends = self.own and not (self.in_c or alone)


known_functions: dict[Any, Known] = {}  # torch's; machine code asks
# torch's methods in Python, some of which its decorators have made
_METHODS = {func for func in vars(Plain).values() if func.__class__ is FunctionType}


def known_of(func: Callable[..., Any]) -> Known:
    """What is known of `func`."""
    known = known_functions.get(func)
    if known is None:
        known = Known(func)
        if known.own:
            known_functions[func] = known  # others may be made by the thousand
    return known


def _is_torch_own(func: Callable[..., Any]) -> bool:
    """Whether it is a function of a module of torch, and not one made there for somebody."""
    module = getattr(func, "__module__", None) or ""
    if module.partition(".")[0] != "torch" or _is_patch(func):
        return False
    there = getattr(sys.modules.get(module), getattr(func, "__name__", ""), None)
    return there is func or func in _METHODS or getattr(func, "__closure__", func) is None


def _is_patch(func: Any) -> bool:
    """Whether somebody else wrote it, or what it wraps, though torch's names lead to it."""
    while func is not None and func.__class__ not in IN_C:
        names = getattr(func, "__globals__", None)  # which functools.wraps leaves as they are
        module = type(func).__module__ if names is None else names.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "autofuse"):
            return True
        func = getattr(func, "__wrapped__", None)
    return False


def asks_for_overrides(function: Any) -> bool:
    """Whether it does so itself, in Python."""
    return isinstance(function, FunctionType) and any(
        name.startswith("has_torch_function") for name in function.__code__.co_names
    )


EXPORTS = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage",
           "from_dlpack", "to_dlpack")  # fmt: skip


def _writes(name: str, func: Callable[..., Any]) -> bool:
    """Whether `func`, or who gets hold of memory by it, may write to its arguments."""
    if name in EXPORTS or name == "asarray":  # which may also change `requires_grad`
        return True
    if getattr(func, "__self__", None) is TensorBase.grad:  # which is memory of another tensor
        return False
    if name.endswith("_") and (not name.endswith("__") or name[:3] == "__i" or "set" in name):
        return name not in ("__index__", "__int__", "__invert__")
    module = getattr(func, "__module__", None) or ""
    return module.startswith("torch._ops") or any(text in name for text in _WRITERS)


# in names of functions that write to an argument which is not called `out`
_WRITERS = ("batch_norm", "fused_moving_avg_obs_fake_quant", "fbgemm_linear_fp16_weight",
            "rrelu_with_noise")  # fmt: skip
