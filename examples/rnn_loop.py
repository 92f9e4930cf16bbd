"""The small loop: h = f(h @ W) with five pointwise ops, many times, against eager.

python examples/rnn_loop.py [--iterations 10000] [--device cuda]
"""

from __future__ import annotations

import argparse
import time

import torch

import autofuse


def step(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = h @ w
    return torch.tanh(torch.sigmoid(z) * b + z * 0.5)  # five pointwise ops


def loop(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, iterations: int) -> torch.Tensor:
    for _ in range(iterations):
        h = step(h, w, b)
    return h


def timed(run, *args) -> tuple[torch.Tensor, float]:
    """(result, us per iteration), the device's queue included."""
    start = time.perf_counter()
    result = autofuse.materialize(run(*args))
    if result.is_cuda:
        torch.cuda.synchronize()
    return result, (time.perf_counter() - start) / args[-1] * 1e6


@torch.no_grad()
def compare(device: str, iterations: int) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 256, generator=generator).to(device)
    w = (torch.randn(256, 256, generator=generator) / 16).to(device)
    b = torch.randn(256, generator=generator).to(device)
    fused_loop = autofuse.fuse(loop)
    for run in (loop, fused_loop):
        run(h, w, b, 20)  # warm-up
    autofuse.reset_stats()
    eager, eager_us = timed(loop, h, w, b, iterations)
    fused, fused_us = timed(fused_loop, h, w, b, iterations)
    stats = autofuse.stats()
    same = torch.equal(eager, fused)
    distance = (eager - fused).abs().max().item()
    print(f"{device}: eager {eager_us:.1f} us, fused {fused_us:.1f} us per iteration, "
          f"ratio {fused_us / eager_us:.2f}")  # fmt: skip
    print(f"  same bits: {same} (largest difference {distance:.1e}), "
          f"{stats.ops_recorded} ops in {stats.kernels_launched} kernels")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    compare(args.device, args.iterations)
    if args.device != "cpu":
        compare("cpu", args.iterations // 10)


if __name__ == "__main__":
    main()
