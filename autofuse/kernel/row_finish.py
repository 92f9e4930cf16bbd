"""What row kernels store for each element, once what is reduced is known of its row. Pure."""

from __future__ import annotations

from functools import cache

from ..ops.row import Op
from .division import NORMS, SOFT

# how many numbers of a row; others have one
STATISTICS = {"softmax": 2, "log_softmax": 2, "layer_norm": 2, "rms_norm": 1, "group_norm": 2}


@cache
def finish(op: str, params: str, kernel: str, kept: bool) -> Op:
    """An op over operands and statistics of the row, in float32.

    kept: what softmax gives is at hand.
    """
    names = [param.partition(":")[0] for param in params.split()]
    if op in SOFT:
        if kept:
            return Op(op, "p", "p")
        soft = "exp(sub(x, m)) / s"
        soft = f"nan if s == 0 else {soft}" if kernel == "warp" else soft
        soft = "sub(sub(x, m), s)" if op == "log_softmax" else soft
        return Op(op, "x m s", soft)
    if op in NORMS:
        centred = "sub(x, m)" if op == "layer_norm" else "x"
        affine = {
            "layer_norm": {
                ("vectors", True): f"fma(mul(r, {centred}), w, b)",
                ("vectors", False): f"mul(r, {centred})",
                ("elements", True): f"fma(w, mul({centred}, r), b)",
                ("elements", False): f"fma({centred}, r, 0.0)",
            },
            "rms_norm": {
                ("vectors", True): "mul(mul(x, r), w)",
                ("vectors", False): "mul(x, r)",
                ("elements", True): "mul(mul(x, r), w)",
                ("elements", False): "mul(x, r)",
            },
        }[op][kernel, "w" in names]
        operands = " ".join(name for name in names if name != "eps")
        return Op(op, f"{operands} m r" if op == "layer_norm" else f"{operands} r", affine)
    return Op(op, "s", "s")
