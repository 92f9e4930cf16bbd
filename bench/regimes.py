"""Which regime a workload is in at which size, and where the crossover lies.

    python bench/regimes.py [--device cuda] [--only TEXT] [--peers eager autofuse] [--svg FILE]

The batch is doubled from size to size. Where the wall clock is well above the time on the device,
the device waits for the host: *host*-bound. Where it is not, and twice the batch costs the device
about the same, one pass through its pipelines is what takes time: *latency*-bound. Where twice the
batch costs about twice, memory (or arithmetic, in matmuls) is: *bandwidth*-bound. On the CPU, which
has one clock, the first two are one. The crossover is where the floor of the small sizes meets the
line of the large ones. Drawn in the terminal, and as an SVG beside the results.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
import drawing  # noqa: E402
import machine  # noqa: E402
import programs  # noqa: E402
import timing  # noqa: E402
import workloads  # noqa: E402
from peers import PEERS, Unsuited  # noqa: E402
from results import DIRECTORY  # noqa: E402
from workloads import Program, Setup, Workload  # noqa: E402

GROWTH = 2**0.5  # of time when the batch is doubled: halfway between none and all, on a log scale
WAITING = 1.2  # wall clock over device time, from which on the device waits for the host
WIDTH = workloads.HIDDEN


@dataclass(frozen=True, slots=True)
class Point:
    """One size: the batch, wall clock and device time in us (None on the CPU)."""

    batch: int
    wall: float
    device: float | None = None

    @property
    def busy(self) -> float:
        """The time that grows with the batch."""
        return self.wall if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class Sweep:
    """One workload and peer over the sizes; regimes: one per point."""

    workload: str
    peer: str
    points: tuple[Point, ...]
    regimes: tuple[str, ...]
    crossover: float | None  # a batch; None if the largest is not bandwidth-bound


def regime(point: Point, growth: float) -> str:
    """growth: what doubling the batch does to the time on the device."""
    if point.device is not None and point.wall > WAITING * point.device:
        return "host"
    if growth >= GROWTH:
        return "bandwidth"
    return "latency" if point.device is not None else "host"


def sweep(workload: str, peer: str, points: list[Point]) -> Sweep:
    """What two or more points, each of twice the batch of the last, say."""
    growths = [b.busy / a.busy for a, b in zip(points, points[1:], strict=False)]
    growths.append(growths[-1])
    names = tuple(regime(point, growth) for point, growth in zip(points, growths, strict=True))
    last, crossover = points[-1], None
    if names[-1] == "bandwidth":
        crossover = min(point.wall for point in points) * last.batch / last.wall
    return Sweep(workload, peer, tuple(points), names, crossover)


# --- measuring -----------------------------------------------------------------------------------


def sde(s: Setup, batch: int) -> Program:
    return workloads.heston(s, paths=batch * WIDTH, steps=1)


def rows_of(maker, s: Setup, batch: int, **more) -> Program:
    return maker(s, shape=(batch, WIDTH), **more)


# name -> maker(setup, batch=), largest log2 of the batch, key in handwritten.py
SWEEPS = {
    "5 ops": (functools.partial(rows_of, workloads.chain, length=5), 18, ("chain", 5)),
    "20 ops": (functools.partial(rows_of, workloads.chain, length=20), 18, ("chain", 20)),
    "GLU of halves, 5 ops": (
        functools.partial(rows_of, workloads.halves, fn=programs.glu), 17, ("GLU of halves, 5 ops",)
    ),
    "SDE step, 30 ops": (sde, 17, ("heston",)),
    "RNN step": (functools.partial(workloads.rnn, steps=1), 16, ("rnn",)),
}  # fmt: skip


def measure(
    name: str,
    peers: list[str],
    device: str,
    smallest: int,
    largest: int,
    rounds: int,
    round_s: float,
) -> list[Sweep]:
    """Sweeps of one workload from batch 2^smallest to 2^largest; peers take turns at each size."""
    maker, limit, key = SWEEPS[name]
    points: dict[str, list[Point]] = {peer: [] for peer in peers}
    for log2 in range(smallest, min(largest, limit) + 1):
        batch = 1 << log2
        workload = Workload(name, functools.partial(maker, batch=batch), str(batch), key=key)
        for peer, point in _at(workload, batch, peers, device, rounds, round_s).items():
            points[peer].append(point)
    return [sweep(name, peer, seen) for peer, seen in points.items() if len(seen) > 1]


@torch.no_grad()
def _at(
    workload: Workload, batch: int, peers: list[str], device: str, rounds: int, round_s: float
) -> dict[str, Point]:
    calls: dict[str, timing.Call] = {}
    for peer in PEERS:
        if peer.name not in peers or peer.missing(device):
            continue
        try:
            calls[peer.name] = peer.prepare(workload, workload.make(device))
        except Unsuited as error:
            print(f"{workload.label}, {peer.name}: {error}")
        except Exception as error:  # a peer's own failure is a result
            print(f"{workload.label}, {peer.name}: {timing.reason(error)}")
    wall, failed = timing.measured(calls, device, "host", rounds, round_s)
    for peer, why in failed.items():
        print(f"{workload.label}, {peer}: {why}")
    if device != "cuda":
        return {peer: Point(batch, times.median) for peer, times in wall.items()}
    left = {peer: calls[peer] for peer in wall if calls[peer].on_stream}
    busy, _ = timing.measured(left, device, "device", rounds, round_s, flush=False)
    return {
        peer: Point(batch, times.median, busy[peer].median if peer in busy else None)
        for peer, times in wall.items()
    }


# --- showing -------------------------------------------------------------------------------------


def show(found: Sweep) -> str:
    """A line per size, then the bar with the crossover under it."""
    lines = [f"\n{found.workload}, {found.peer}"]
    for point, name in zip(found.points, found.regimes, strict=True):
        device = f"{point.device:11.2f}" if point.device is not None else " " * 10 + "-"
        lines.append(f"  batch {point.batch:7d}  wall {point.wall:11.2f} us  device {device} us"
                     f"  {name}-bound")  # fmt: skip
    batches = [point.batch for point in found.points]
    lines += ["  " + line for line in drawing.bar(batches, found.regimes, found.crossover)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="workloads whose name has this")
    parser.add_argument("--peers", nargs="*", default=["eager", "autofuse"])
    parser.add_argument("--smallest", type=int, default=4, help="log2 of the batch")
    parser.add_argument("--largest", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=10)
    parser.add_argument("--svg", type=Path, help="default: bench/results/regimes_<machine>.svg")
    args = parser.parse_args(argv)
    autofuse.config.compile = "now"  # what is measured is not the way there
    autofuse.config.max_kernels_per_line = 1 << 30
    print(machine.machine(args.device))
    print("regimes: " + ", ".join(f"{mark} {name}" for name, mark in drawing.MARKS.items()))
    sweeps = []
    for name in SWEEPS:
        if not args.only or any(text in name for text in args.only):
            for found in measure(name, args.peers, args.device, args.smallest, args.largest,
                                 args.rounds, args.round_ms / 1e3):  # fmt: skip
                print(show(found), flush=True)
                sweeps.append(found)
    path = args.svg or DIRECTORY / f"regimes_{machine.slug(machine.name(args.device))}.svg"
    commit = machine.head_commit()
    path.write_text(drawing.svg(sweeps, f"{machine.machine(args.device)}, commit {commit}"))
    print(f"\n{path.name} written")


if __name__ == "__main__":
    main()
