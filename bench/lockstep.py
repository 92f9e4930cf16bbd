"""This checkout against another one, in lockstep: whether a change has made the host slower.

    python bench/lockstep.py OTHER [--device cuda] [--rounds 40] [--iterations 200] [ROW ...]

OTHER: the folder of a checkout, such as `git worktree add OTHER COMMIT` makes. Each runs in a
process of its own and they take turns on one core, call by call, so that what else the machine
does meets both: two runs of bench/overhead.py one after another differ by 10 % and more on a shared
host, these ratios by 1 to 2 %. us per iteration, which end with the last launch and not with the
kernels; a ratio is the median over pairs of turns, 1.02 where this checkout takes 2 % longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM_UP = 30  # iterations: kernels are there, and machine code has seen the counts


class Side:
    """A checkout and the process that runs it."""

    def __init__(self, checkout: Path, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--serve", str(checkout), "--device", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_path(checkout))},
        )  # fmt: skip
        self.rows = self._said().split("\t")

    def _said(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[-3]!r} has ended: {self.process.wait()}")
        return line.rstrip("\n")

    def us(self, row: str, iterations: int) -> float:
        """us per iteration of `row`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{row}\t{iterations}\n")
        self.process.stdin.flush()
        return float(self._said())

    def pin(self, core: int) -> None:
        """Run its Python on one core; threads that torch and CUDA have are left alone."""
        os.sched_setaffinity(self.process.pid, {core})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _path(checkout: Path) -> list[str]:
    """Where its process finds modules: its own first, never this checkout's."""
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [str(checkout), *(entry for entry in others if Path(entry).resolve() != ROOT)]


# --- what runs, in a process of its own ----------------------------------------------------------


def rows(device: str) -> dict[str, Callable[[], object]]:
    """Iterations by name, of the autofuse that is imported."""
    import torch
    from overhead import function_chain, operator_chain

    import autofuse

    autofuse.config.compile = "now"
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x, y, h = (torch.randn(64, 256, device=device) for _ in range(3))
    weight, bias = torch.randn(256, 256, device=device) / 16, torch.randn(256, device=device)
    w, v, state = autofuse.wrap(x), autofuse.wrap(y), [autofuse.wrap(h)]
    leaf = autofuse.wrap(torch.randn(64, 256, device=device, requires_grad=True))

    def write() -> None:
        w.mul_(1.0).add_(0.0)

    grid, column = autofuse.wrap(torch.zeros(66, 258, device=device)), autofuse.wrap(x[:, 0])

    def slices() -> None:
        grid[1:-1, 1:-1] = w * 0.5 + v
        grid[1:-1, 1:-1] -= w * 0.5
        grid[1:-1, 3] = column * 2.0 + 1.0

    def recur() -> None:
        z = state[0] @ weight
        state[0] = torch.tanh(torch.sigmoid(z) * bias + z * 0.5)

    cell = [autofuse.wrap(torch.randn(64, 64, device=device)) for _ in range(2)]
    mixing = torch.randn(64, 256, device=device) / 8

    def lstm() -> None:
        hidden, memory = cell
        i, f, g, o = (w + hidden @ mixing + bias).chunk(4, 1)
        memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
        cell[:] = torch.sigmoid(o) * torch.tanh(memory), memory

    def lstm_with_gates() -> None:
        hidden, memory = cell
        i, f, g, o = (w + hidden @ mixing + bias).chunk(4, 1)
        memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
        cell[:] = torch.sigmoid(o) * torch.tanh(memory), memory
        autofuse.materialize(cell[0], memory)

    def gated() -> torch.Tensor:
        a, b = (w * 2.0 + bias).chunk(2, 1)
        return a * torch.sigmoid(b)

    def halves() -> None:
        autofuse.materialize(gated())

    def views() -> None:
        whole, front, turned = w[1:], w[:, :128].unsqueeze(0), v.t()
        del whole, front, turned

    def flushes() -> None:
        for _ in range(4):
            autofuse.materialize(w * v + 1.0)

    def train() -> None:
        with torch.enable_grad():
            ((leaf * 2.0 + v).tanh() * v).sum().backward()
        leaf.grad = None

    found: dict[str, Callable[[], object]] = {}
    for form, make in (("operators", operator_chain), ("torch.*", function_chain)):
        for length in (1, 5, 20):
            chain = make(length)
            found[f"{length} ops, {form}"] = lambda chain=chain: autofuse.materialize(chain(w, v))
    return {
        **found, "RNN step": recur, "LSTM step": lstm,
        "LSTM, gates held": lstm_with_gates, "GLU of halves": halves,
        "4 views of memory": views, "4 flushes of 2 ops": flushes, "2 writes": write,
        "3 writes into slices": slices,
        "a step of training": train,
    }  # fmt: skip


def serve(checkout: Path, device: str) -> None:
    """Name the rows; then, for each row and number that comes, say how long an iteration takes."""
    import torch

    import autofuse

    if Path(autofuse.__file__).resolve().parent.parent != checkout.resolve():
        raise SystemExit(f"{autofuse.__file__} is not of {checkout}")
    known = rows(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for run in known.values():
        for _ in range(WARM_UP):
            run()
    print("\t".join(known), flush=True)
    for line in sys.stdin:
        row, _, number = line.partition("\t")
        run, iterations = known[row], int(number)
        wait()
        start = time.perf_counter()
        for _ in range(iterations):
            run()
        elapsed = time.perf_counter() - start
        wait()
        print(elapsed / iterations * 1e6, flush=True)


# --- the comparison ------------------------------------------------------------------------------


def compare(other: Path, device: str, rounds: int, iterations: int, wanted: list[str]) -> None:
    """Print a line for each row of both."""
    from machine import machine

    print(machine(device))
    theirs, ours = sides = Side(other, device), Side(ROOT, device)
    try:
        if hasattr(os, "sched_setaffinity"):
            for side in sides:
                side.pin(max(os.sched_getaffinity(0)))
        for row in ours.rows:
            if row not in theirs.rows or (wanted and row not in wanted):
                continue
            turns = []
            for k in range(rounds):
                order = sides if k % 2 else sides[::-1]
                us = {side: side.us(row, iterations) for side in order}
                turns.append((us[theirs], us[ours]))
            before, now = (statistics.median(times) for times in zip(*turns, strict=True))
            ratio = statistics.median(ours / theirs for theirs, ours in turns)
            print(f"{row:20s} {before:9.2f} us there, {now:9.2f} us here, ratio {ratio:.3f}")
    finally:
        for side in sides:
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=200)
    args = parser.parse_intermixed_args()
    if args.serve is not None:
        serve(args.serve, args.device)
        return
    if args.other is None:
        parser.error("which checkout?")
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    compare(args.other.resolve(), device, args.rounds, args.iterations, args.rows)


if __name__ == "__main__":
    main()
