"""Send a wave through two slits, eagerly and fused, and draw it.

    pip install -e ".[examples]" && python examples/wave.py [--out wave.png] [--device cuda]

The wave equation on a grid, fourteen pointwise ops per step on views of two fields. A step's views
have names, so that the chain is not all that holds them, and runs as one kernel; the sine of the
time is another number in every step and no reason to compile. Sums and products are all there is,
so that both ways have the same bits, on the CPU too.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

import autofuse

SIZE = 600, 900  # cells down and across
EDGE = 60  # cells along the border in which waves die away
SOURCE, WALL = 90, 220  # columns: where the wave comes from, and where the slits are
LENGTH = 26.0  # cells per wave
SPEED2 = 0.4  # the square of cells per step; stable up to 0.5
PICTURES = 3


def step(
    now: torch.Tensor, before: torch.Tensor, keep: torch.Tensor, source: torch.Tensor, push: float
) -> torch.Tensor:
    """The next field, written over the one before; the border stays as it is.

    keep: what is kept of the motion, 0 in the wall, and source: where `push` is added, of the cells
    inside the border.
    """
    here, was = now[1:-1, 1:-1], before[1:-1, 1:-1]
    up, down, left, right = now[:-2, 1:-1], now[2:, 1:-1], now[1:-1, :-2], now[1:-1, 2:]
    bend = up + down + left + right - 4.0 * here
    was.copy_((here + keep * (here - was) + SPEED2 * bend) * (keep > 0) + source * push)
    return before


def basin(device: str, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`keep` and `source` of a basin with a wall and two slits."""
    height, width = size
    down = torch.arange(1, height - 1, device=device)[:, None]
    across = torch.arange(1, width - 1, device=device)[None]
    border = torch.minimum(
        torch.minimum(down, height - 1 - down), torch.minimum(across, width - 1 - across)
    )
    keep = 1 - 0.12 * (1 - (border / EDGE).clamp(max=1)) ** 2
    apart = (down - height // 2).abs()
    slit = (apart > 45) & (apart < 75)
    keep = torch.where((across >= WALL) & (across < WALL + 6) & ~slit, 0.0, keep)
    return keep, (across == SOURCE).expand_as(keep).float()


@torch.no_grad()
def simulate(
    device: str, steps: int, size: tuple[int, int], fused: bool
) -> tuple[torch.Tensor, float]:
    """Fields at PICTURES moments, [PICTURES, down, across], and the seconds it took."""
    keep, source = basin(device, size)
    now, before = torch.zeros(size, device=device), torch.zeros(size, device=device)
    advance = autofuse.fuse(step) if fused else step
    pictures = []
    start = time.perf_counter()
    for k in range(steps):
        push = 0.3 * math.tanh(k / 60) * math.sin(k * 2 * math.pi * math.sqrt(SPEED2) / LENGTH)
        now, before = advance(now, before, keep, source, push), now
        if (k + 1) * PICTURES // steps > k * PICTURES // steps:
            pictures.append(now.clone())
    result = torch.stack(pictures).cpu()  # waits for the device
    return result, time.perf_counter() - start


def draw(pictures: torch.Tensor, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(pictures), figsize=(5 * len(pictures), 3.8))
    for axis, field in zip(axes, pictures, strict=True):
        axis.imshow(field.numpy(), cmap="RdBu", vmin=-1.2, vmax=1.2)
        axis.set_axis_off()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--size", type=int, nargs=2, default=SIZE, help="cells down and across")
    parser.add_argument("--out", type=Path, default=Path("wave.png"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":  # a second thread whose core others use costs eager's ops many times
        torch.set_num_threads(1)  # what it gains where the core is free
    size = tuple(args.size)
    eager, eager_s = simulate(args.device, args.steps, size, fused=False)
    autofuse.reset_stats()
    fused, fused_s = simulate(args.device, args.steps, size, fused=True)
    stats = autofuse.stats()
    bits = "same bits" if torch.equal(eager, fused) else "OTHER BITS"
    title = (
        f"{args.steps} steps on {size[0]} x {size[1]} cells, {args.device}: eager {eager_s:.2f} s, "
        f"fused {fused_s:.2f} s, {bits}"
    )
    print(title)
    print(f"{stats.ops_recorded} ops recorded, {stats.kernels_launched} kernels launched")
    try:
        draw(fused, title, args.out)
    except ModuleNotFoundError as error:
        print(f'no picture: {error}; pip install -e ".[examples]"')
    else:
        print(f"{args.out} written")


if __name__ == "__main__":
    main()
