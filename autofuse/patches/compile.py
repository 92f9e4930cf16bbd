"""torch.compile: what it compiles sees plain tensors, and does not trace what records."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions

from .around import unwrapping
from .memory import ATTRIBUTES, write_attribute


def patch_compile() -> None:
    """A compiled function gets plain tensors: torch._dynamo would trace the shell itself."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda model: compile(model, **kwargs)
        compiled = original(model, **kwargs)
        _skip_tracing()
        if isinstance(compiled, torch.nn.Module):
            cls = type(compiled)
            if not hasattr(cls.__dict__.get("__call__"), "_autofuse"):
                cls.__call__ = unwrapping(cls.__call__, "compile")  # type: ignore[method-assign]
            return compiled
        return unwrapping(compiled, "compile")

    torch.compile = compile  # type: ignore[assignment]


@functools.cache
def _skip_tracing() -> None:
    """A wrapped tensor that a compiled function closes over breaks its graph.

    The ops on it run as torch's own, for torch._dynamo does not trace what records them. `api`,
    `fused` and `patches` stay open, so that a fused function is compiled as if it were not fused.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    for name in ATTRIBUTES:  # frames where torch has none
        attribute = getattr(torch.Tensor, name)
        for accessor in (attribute.fget, attribute.fset, attribute.fdel):
            skip_code(accessor.__code__)
    skip_code(write_attribute.__code__)
    skip_code(torch.Tensor.add_.__code__)  # of all functions in place
    package = Path(__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.parts[len(package.parts)] not in ("api.py", "fused.py", "patches"):
            trace_rules.SKIP_DIRS.append(path.as_posix())
    trace_rules.SKIP_DIRS.append("<autofuse")
    trace_rules._recompile_re()
    if torch.__version__ < "2.13":
        # there the tracer builds this set anew for each class that overrides, and cannot hash our
        # accessors; it takes one that is there already
        getters = get_default_nowrap_functions()
        torch._tensor.get_default_nowrap_functions = lambda: getters  # type: ignore[attr-defined]
