"""Whether `python -m autofuse try` tells the truth of programs that a stranger would try it on.

    python bench/first_contact.py [programs] [--device cpu] [--pairs 6]

Each of bench/strangers/ is given to `try`, as it is, and is measured by itself too: its `main` in
turns with the forward of its module as it is and decorated, each time in a fresh process, the first
pair not counted. There it is faster or slower where all pairs say so and their median by more than
4 % and more than first calls take, which is no difference for `try` either. The exit status is the
number of programs of which the two say something else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

import autofuse
from autofuse.cli.turns import EQUAL, FASTER, FIRST, SAME, SLOWER
from machine import machine

PLACE = Path(__file__).parent / "strangers"
PROGRAMS = sorted(path.stem for path in PLACE.glob("*.py"))
ROOT = Path(autofuse.__file__).parents[1]


def loaded(program: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(program, PLACE / f"{program}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempted(program: str, arguments: list[str]) -> str:
    """What `try` says of the time."""
    command = [sys.executable, "-m", "autofuse", "try", f"{program}.py", *arguments]
    done = subprocess.run(command, cwd=PLACE, capture_output=True, text=True)
    found = re.search(r"^time +(.*)$", done.stdout, re.M)
    if found is None:
        raise RuntimeError(f"try said nothing of {program}:\n{done.stdout}{done.stderr}")
    return found[1]


def timed(program: str, way: str, arguments: list[str]) -> float:
    """Seconds of its `main`, in this process, the module's forward fused or "plain"."""
    module = loaded(program)
    (model,) = (
        one for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, torch.nn.Module)
    )  # fmt: skip
    if way == "fused":
        model.forward = autofuse.fuse(model.forward)
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        module.main(arguments)  # prints a value, and so waits for it
    return time.perf_counter() - begun


def measured(program: str, arguments: list[str], pairs: int) -> tuple[str, list[float]]:
    """(word, fused of plain time of each pair but the first)."""
    ratios, usual = [], []
    for _ in range(pairs + 1):
        plain, fused = (
            float(subprocess.run(
                [sys.executable, __file__, "--time", way, program, *arguments],
                check=True, stdout=subprocess.PIPE, text=True,
            ).stdout)
            for way in ("plain", "fused")
        )  # fmt: skip
        ratios.append(fused / plain)
        usual.append(plain)
    counted, margin = ratios[1:], max(SAME, FIRST / statistics.median(usual))
    median = statistics.median(counted)
    if max(counted) < 1 and median < 1 - margin:
        return FASTER, counted
    return (SLOWER if min(counted) > 1 and median > 1 + margin else EQUAL), counted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="program", help=", ".join(PROGRAMS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=6, help="that count, of its own measurement")
    parser.add_argument("--time", choices=["plain", "fused"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.time:
        print(timed(*args.programs, args.time, ["--device", args.device]))
        return 0
    print(machine(args.device), flush=True)
    wrong = 0
    for program in args.programs or PROGRAMS:
        arguments = ["--device", args.device]
        said = attempted(program, arguments)
        word, ratios = measured(program, arguments, args.pairs)
        agree = said.endswith(word) or (word == EQUAL and "no difference" in said)
        wrong += not agree
        print(f"{program:6s} try: {said}", flush=True)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{'':6s} own: {spread}: {word}{'' if agree else '  <- DIFFERS'}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
