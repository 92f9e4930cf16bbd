"""A fused chain against eager on the CPU, per transcendental function.

    python bench/cpu.py [names] [--size 10000000] [--threads 2] [--rounds 7] [--dtype float32]

The chain is `f(x) * y + g(y) - 0.5`: five ops, two of them transcendental, first with one function
twice, then with some pairs. Variants are interleaved; a ratio is the fused median over eager's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
from timing import interleaved, machine

Function = Callable[[torch.Tensor], torch.Tensor]

ANYWHERE = (
    "exp exp2 expm1 sigmoid tanh sin cos tan sinh cosh asinh atan erf erfc silu mish softplus elu "
    "gelu lgamma digamma i0 i0e i1 i1e sinc logsigmoid tanhshrink"
).split()
POSITIVE = "log log2 log10 log1p sqrt rsqrt".split()
BELOW_1 = "asin acos atanh erfinv".split()
INSIDE = "logit ndtri entr".split()
CHOSEN: dict[str, Function] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "pow_1.7": lambda x: x**1.7,
    "rpow": lambda x: 2.5**x,
    "pow": lambda x: torch.pow(x, x),
    "fmod": lambda x: torch.fmod(x, 0.7),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "xlogy": lambda x: torch.xlogy(x, x.abs()),
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "hypot": lambda x: torch.hypot(x, x + 1),
}
PAIRS = [
    ("exp", "tanh"), ("sigmoid", "tanh"), ("silu", "gelu"), ("exp", "log"), ("sin", "cos"),
    ("softplus", "tanh"), ("erf", "exp"), ("log1p", "expm1"), ("pow_1.7", "exp"), ("tan", "exp"),
]  # fmt: skip


def function(name: str) -> Function:
    places = (torch, F, torch.special)
    return CHOSEN.get(name) or next(getattr(p, name) for p in places if hasattr(p, name))


def operand(name: str, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of the function's domain."""
    generator = torch.Generator().manual_seed(seed)
    if name in BELOW_1:
        return (torch.rand(size, generator=generator) * 1.9 - 0.95).to(dtype)
    if name in INSIDE:
        return (torch.rand(size, generator=generator) * 0.98 + 0.01).to(dtype)
    x = torch.randn(size, generator=generator) * 2
    if name in POSITIVE or name.startswith("pow"):
        x = x.abs_().add_(0.01)
    return (x.abs_().add_(1.01) if name == "acosh" else x).to(dtype)


def measure(first: str, second: str, args: argparse.Namespace) -> float:
    """The fused time over eager's, printed."""
    f, g = function(first), function(second)
    dtype = getattr(torch, args.dtype)
    x, y = operand(first, args.size, dtype, 0), operand(second, args.size, dtype, 1)
    wx, wy = autofuse.wrap(x), autofuse.wrap(y)
    calls = {
        "eager": lambda: f(x) * y + g(y) - 0.5,
        "fused": lambda: autofuse.materialize(f(wx) * wy + g(wy) - 0.5),
    }
    series = interleaved(calls, "cpu", args.rounds, max(1, args.iterations), warm=2)
    eager, fused = series["eager"].median / 1e3, series["fused"].median / 1e3
    name = first if first == second else f"{first}, {second}"
    ratio = fused / eager
    times = f"eager {eager:9.3f} ms   fused {fused:9.3f} ms"
    print(f"{name:16s} {times}   ratio {ratio:.2f}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--size", type=int, default=10**7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    autofuse.config.max_kernels_per_line = 1 << 30  # every case is called from one line
    torch.set_num_threads(args.threads)
    print(f"{machine('cpu')}; {args.size} {args.dtype}, {args.threads} threads")
    names = args.names or [*ANYWHERE, *POSITIVE, *BELOW_1, *INSIDE, "acosh", *CHOSEN]
    chains = [(name, name) for name in names] + ([] if args.names else PAIRS)
    slow = [pair for pair in chains if measure(*pair, args) > 1]
    print("slower than eager:", ", ".join(" and ".join(sorted(set(p))) for p in slow) or "none")


if __name__ == "__main__":
    with torch.no_grad():
        main()
