"""Reductions in chains on CUDA: their bits against eager's, their time against torch.compile's.

    python bench/reductions.py [--jobs 12] [--seconds 120] [--only softmax] [--no-times]
        [--out FILE]

Every program below runs over rows of 2 to 20,000 columns (powers of two and their neighbours, odd
sizes, few and many rows), of random values, of values of very different sizes, and with infinities,
NaN and signed zeros among them; over rows that begin anywhere; over a few so long that several
blocks share each; and in float32, bfloat16 and float16. A result that differs in a bit is a
mismatch, NaNs being equal. That the reductions ran in kernels is read off autofuse's counters. The
proof of a GPU and a torch: a run that finds nothing, after which the two belong into `VERIFIED` of
autofuse/chain/verified.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import autofuse
from autofuse.chain import verified
from autofuse.cli.verify import DTYPES, PROGRAMS, Case, Outcome, Values, compare, make, set_up

sys.path[:0] = [str(Path(__file__).parent)]
from timing import Call, machine, measured  # noqa: E402

COLUMNS = (
    *(2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 130, 131, 132, 200),
    *(255, 256, 257, 260, 384, 511, 512, 513, 768, 1000, 1023, 1024, 1025, 1028, 1500, 1536),
    *(2047, 2048, 2049, 2052, 2500, 3072, 4095, 4096, 4097, 4100, 5000, 8160, 8192, 9216, 9220),
    *(12288, 20000),
)
ROWS = (1, 2, 3, 16, 70)
TIMED = ("relu(layer_norm(x)) + res", "softmax(x * s + mask)", "RMSNorm as written",
         "h, layer_norm(h = x + res)", "sum(x) + 1", "x - mean",
         "mean of squares, of all")  # fmt: skip
TIMED_SIZES = (
    (torch.float32, 8192, 1024),
    (torch.float32, 8192, 1023),
    (torch.bfloat16, 8192, 1024),
    (torch.bfloat16, 16384, 4096),
    (torch.float32, 4096, 4096),
)


# --- bits -----------------------------------------------------------------------------------------


def cases(seed: str) -> Iterator[Case]:
    """In an order of its own for each seed."""
    found: list[Case] = [
        (rows, columns, kind, 0)
        for columns in COLUMNS
        for rows in ROWS
        for kind in (("plain", "wide", "special") if rows in (3, 70) else ("plain",))
    ]
    found += [(rows, columns, "plain", shift) for columns in (64, 131, 260, 1024)
              for rows in (3, 40) for shift in range(1, 9)]  # fmt: skip
    found += [(8192, 1024, "plain", 0), (2048, 4096, "wide", 0), (300, 8200, "plain", 0)]
    # which blocks share: of all, or each row
    found += [(rows, columns, kind, 0)
              for rows, columns in ((1, 131072), (1, 140003), (1, 1 << 20), (2, 262148),
                                    (3, 200001), (40, 140000), (150, 131080), (1, 5000003),
                                    (1, 1 << 24))
              for kind in ("plain", "wide", "special")]  # fmt: skip
    found += [(rows, columns, "plain", shift) for rows, columns in ((1, 300001), (3, 131076))
              for shift in range(1, 9)]  # fmt: skip
    random.Random(seed).shuffle(found)
    return iter(found)


def compare_for(name: str, dtype: torch.dtype, seconds: float) -> Outcome:
    """All cases of a program in a dtype, or as many as there is time for."""
    set_up()
    until = time.time() + seconds
    over = itertools.takewhile(lambda case: time.time() < until, cases(f"{name} {dtype}"))
    return compare(name, dtype, over)


def compare_all(jobs: int, seconds: float, only: str) -> list[Outcome]:
    pairs = [(name, dtype) for name in PROGRAMS for dtype in DTYPES if only in name]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        each = seconds * jobs / len(pairs)
        return list(pool.map(compare_for, *zip(*pairs, strict=True), [each] * len(pairs)))


# --- time -----------------------------------------------------------------------------------------


def outside(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as one of this file's functions: torch.compile leaves autofuse's own as they are."""
    code = fn.__code__.replace(co_filename=__file__)
    return FunctionType(code, {**fn.__globals__, "__name__": __name__, "__file__": __file__})


def times(only: str) -> Iterator[dict[str, Any]]:
    """us on the device, cold cache: autofuse's too as parts of eager's and torch.compile's."""
    set_up()
    for name in TIMED:
        if only not in name:
            continue
        fn = PROGRAMS[name]
        for dtype, rows, columns in TIMED_SIZES:
            values = make(dtype, (rows, columns, "plain", 0))
            wrapped = Values(*map(autofuse.wrap, values))
            torch._dynamo.reset()  # or it compiles for sizes that vary, or not at all
            compiled = torch.compile(outside(fn), dynamic=False)
            calls = {
                "eager": Call(lambda fn=fn, values=values: fn(values)),
                "autofuse": Call(
                    lambda fn=fn, wrapped=wrapped: autofuse.materialize(fn(wrapped))
                ),
                "torch.compile": Call(
                    lambda compiled=compiled, values=values: compiled(values)
                ),
            }  # fmt: skip
            with torch.no_grad(), verified.assumed():
                series, failed = measured(calls, "cuda", "device", rounds=5, round_s=0.01)
            us = {call: round(one.median, 1) for call, one in series.items()}
            parts = {
                f"of {other}": round(us["autofuse"] / us[other], 3)
                for other in ("eager", "torch.compile")
                if other in us and "autofuse" in us
            }
            which = {"program": name, "dtype": str(dtype), "shape": [rows, columns]}
            yield {**which, **us, **parts, **failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="for the bits")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    known = verified.is_verified(torch.__version__, torch.version.cuda, capability)
    print(machine("cuda"), "known" if known else "not among those that are known", flush=True)
    outcomes = compare_all(arguments.jobs, arguments.seconds, arguments.only)
    for one in outcomes:
        print(f"{one.program:32} {one.dtype:9} {one.cases:4} cases {one.reduced:4} reduced "
              f"{one.kernels:5} kernels {one.elements:10} elements {len(one.wrong):3} wrong "
              f"{one.left or ''}", flush=True)  # fmt: skip
        for line in one.wrong[:6]:
            print(f"    {line}")
    found = []
    for one in () if arguments.no_times else times(arguments.only):
        print(json.dumps(one), flush=True)
        found.append(one)
    for other in ("eager", "torch.compile"):
        parts = sorted(one[f"of {other}"] for one in found if f"of {other}" in one)
        few = sum(part <= 1.05 for part in parts)
        print(f"parts of {other}'s time: {parts}, {few} of {len(parts)} at most 1.05")
    if arguments.out is not None:
        result = {"machine": machine("cuda"), "bits": list(map(asdict, outcomes)), "times": found}
        arguments.out.write_text(json.dumps(result, indent=1))
    sys.exit(any(one.wrong for one in outcomes))


if __name__ == "__main__":
    main()
