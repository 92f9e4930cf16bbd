"""Coverage: which of the ops that torch tags as pointwise are fused, and why the others are not."""

from __future__ import annotations

import torch

from .losses import LOGITS
from .operators import BINARY_OPERATORS
from .reductions import REDUCTIONS, ROW_COMPOSITES
from .row import COMPOSITES, OPS, PLAIN, SPELLINGS

_SERIES = "a series that is summed until it converges"
_STEPS = "a recurrence of as many steps as the data say"
_PIECES = "a piecewise approximation without a device function"

EAGER: dict[str, str] = {  # base name -> why it runs eagerly
    "frexp": "two results",
    "ldexp": "what torch makes of it differs between its versions",
    "equal": "its result is a Python bool",
    "_conj_physical": "for complex tensors alone",
    "gcd": "a loop of as many turns as the data say",
    "lcm": "a loop of as many turns as the data say",
    "igamma": _SERIES,
    "igammac": _SERIES,
    "mvlgamma": "a sum over an axis that it adds",
    "native_dropout_backward": "called by autograd alone, for a dropout that drew random numbers",
    "special_zeta": _SERIES,
    "special_erfcx": _PIECES,
    "special_log_ndtr": _PIECES,
    "special_airy_ai": _PIECES,
    **dict.fromkeys(
        (f"special_bessel_{kind}" for kind in ("j0", "j1", "y0", "y1")),
        "other bits than eager's; fused by config.relaxed",
    ),
    **{f"special_{kind}": _PIECES for kind in (
        "spherical_bessel_j0",
        "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1",
        "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    )},
    **{f"special_{kind}": _STEPS for kind in (
        *(f"chebyshev_polynomial_{letter}" for letter in "tuvw"),
        *(f"shifted_chebyshev_polynomial_{letter}" for letter in "tuvw"),
        "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
        "legendre_polynomial_p",
    )},
}  # fmt: skip


def pointwise() -> dict[str, list[torch._ops.OpOverload]]:
    """Every aten op that has `torch.Tag.pointwise`: its overloads by base name, `add_` as `add`."""
    found: dict[str, list[torch._ops.OpOverload]] = {}
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}  # dir() is not complete
    for name in sorted(name[6:] for name in names if name.startswith("aten::")):
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, kind) for kind in packet.overloads()):
            if torch.Tag.pointwise in overload.tags:
                found.setdefault(_base(name), []).append(overload)
    return found


def _base(name: str) -> str:
    if name.startswith("__i"):
        return "__" + name[3:]
    return name if name.startswith("__") else name.rstrip("_")


def coverage() -> dict[str, str]:
    """Base name of every pointwise op of torch -> "fused", or why it runs eagerly.

    "fused" says that the op has a row; what a row does not take (dtypes: `Op.accepts`) is eager.
    """
    known = {*OPS, *PLAIN, *SPELLINGS, *COMPOSITES, *BINARY_OPERATORS}
    table = {}
    for name in sorted(pointwise()):
        bare = name.removeprefix("special_")
        fused = bare in known and (bare not in OPS or OPS[bare].identical)
        table[name] = "fused" if fused else EAGER.get(name, "new to autofuse")
    return table


_ORDER = "a reduction whose order was not reproduced"
EAGER_REDUCTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("var_mean", "std_mean", "prod", "nansum", "cumsum", "cumprod", "instance_norm",
         "softmin"),
        _ORDER,
    ),
    "median": "a reduction of another kind",
}  # fmt: skip
CHANNELS = "fused in evaluation, without a gradient, on CUDA; else eager"
GROUPS = "fused for contiguous tensors on CUDA"
LAST = "fused over the last dimension of contiguous tensors on CUDA"
OVER = "fused over any dimensions on CUDA"


def look_up(name: str) -> tuple[str, str] | None:
    """(name, state) of an op as it is called: `torch.special.i0`, `add_`, `mse_loss`; None if there
    is none, among the pointwise ones, those that autofuse fuses besides, and reductions."""
    bare = name.rpartition(".")[2]
    own = dict.fromkeys((*PLAIN, *SPELLINGS, *COMPOSITES), "fused") | {
        LOGITS: OVER, "batch_norm": CHANNELS,
    }  # fmt: skip
    last = dict.fromkeys(("layer_norm", "rms_norm"), LAST)
    reduced = dict.fromkeys((*REDUCTIONS, *ROW_COMPOSITES), OVER) | last | {"group_norm": GROUPS}
    for table in (coverage(), own, reduced, EAGER_REDUCTIONS):
        for known in (bare, f"special_{bare}", f"linalg_{bare}", _base(bare)):
            if known in table:
                return known, table[known]
    return None
