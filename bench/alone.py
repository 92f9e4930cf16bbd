"""Eager in a process that never imports autofuse, for run.py: does the import cost eager anything?

    python bench/alone.py [--device cuda] [--only TEXT] [--scale 1] [--rounds 7] [--round-ms 20]

Importing autofuse puts a test in front of in-place methods and of some others, which eager code in
the same process pays for too. Prints one JSON line per host-bound workload: its label and device,
then median, 20th and 80th percentile in us per step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing  # noqa: E402
from workloads import Workload, chosen  # noqa: E402

Figures = tuple[float, float, float]  # median, 20th and 80th percentile in us per step


def measure(workload: Workload, device: str, args: argparse.Namespace) -> Figures | None:
    program = workload.make(device, args.scale)
    call = timing.Call(program.runner(program.fn, program.args))
    with torch.set_grad_enabled(program.grad):
        series, _ = timing.measured(
            {"eager": call}, device, "host", args.rounds, args.round_ms / 1e3
        )  # fmt: skip
    if "eager" not in series:
        return None
    times = series["eager"]
    return times.median / program.steps, times.p20 / program.steps, times.p80 / program.steps


def ask(args: argparse.Namespace, seconds: float) -> tuple[dict[tuple[str, str], Figures], str]:
    """Figures by (label, device) from a process of its own, and why they are not complete."""
    command = [
        sys.executable, __file__, "--device", args.device, "--scale", str(args.scale),
        "--rounds", str(args.rounds), "--round-ms", str(args.round_ms),
        *(["--only", *args.only] if args.only else []),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
        lines = done.stderr.decode().strip().splitlines() if done.returncode else []
        out, why = done.stdout, lines[-1][:160] if lines else ""
    except subprocess.TimeoutExpired as error:
        out, why = error.stdout or b"", f"ended after {seconds:.0f} s"
    found: dict[tuple[str, str], Figures] = {}
    for line in out.decode().splitlines(keepends=True):
        if line.endswith("\n"):  # the last may be cut
            label, device, median, p20, p80 = json.loads(line)
            found[label, device] = median, p20, p80
    return found, why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--round-ms", type=float, default=timing.ROUND_S * 1e3)
    args = parser.parse_args()
    for workload, device in chosen(args.device, args.only):
        if workload.clock == "host" and (figures := measure(workload, device, args)):
            rounded = (round(us, 4) for us in figures)
            print(json.dumps([workload.label, device, *rounded]), flush=True)
    assert "autofuse" not in sys.modules


if __name__ == "__main__":
    main()
