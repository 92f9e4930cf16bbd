"""Reductions in chains on CUDA: their bits against eager's, their time against torch.compile's.

    python bench/reductions.py [--jobs 12] [--seconds 120] [--only softmax] [--no-times]
        [--out FILE]

Every program below runs over rows of 2 to 20,000 columns (powers of two and their neighbours, odd
sizes, few and many rows), of random values, of values of very different sizes, and with infinities,
NaN and signed zeros among them; over rows that begin anywhere; and in float32, bfloat16 and
float16. A result that differs in a bit is a mismatch, NaNs being equal. That the reductions ran in
kernels is read off autofuse's counters. The proof of a GPU and a torch: a run that finds nothing,
after which the two belong into `VERIFIED` of autofuse/chain/rowwise.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import autofuse
from autofuse.chain import rowwise

sys.path[:0] = [str(Path(__file__).parent)]
from timing import Call, machine, measured  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = (
    *(2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 130, 131, 132, 200),
    *(255, 256, 257, 260, 384, 511, 512, 513, 768, 1000, 1023, 1024, 1025, 1028, 1500, 1536),
    *(2047, 2048, 2049, 2052, 2500, 3072, 4095, 4096, 4097, 4100, 5000, 8160, 8192, 9216, 9220),
    *(12288, 20000),
)
ROWS = (1, 2, 3, 16, 70)


@dataclass(frozen=True, slots=True)
class Values:
    """What the programs read: x and y of the rows' shape, w and b of one row, one number a row."""

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    number: torch.Tensor

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        return Values(*(function(getattr(self, name)) for name in self.__dataclass_fields__))


def _softmax_written(v: Values) -> Any:
    e = (v.x - v.x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _norm_of_sum(v: Values) -> Any:
    h = v.x + v.y
    return h, F.layer_norm(h, v.x.shape[-1:], v.w, v.b, 1e-5)


def _rms_written(v: Values) -> Any:
    return v.x * torch.rsqrt(v.x.pow(2).mean(-1, keepdim=True) + 1e-6) * v.w


def _rms_in_float32(v: Values) -> Any:
    h = v.x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return v.w * h.to(v.x.dtype)


def _numbers(v: Values) -> Any:
    total = (v.x * v.y).sum(-1)
    return total, (v.x - v.y).mean(-1, keepdim=True) * v.number


PROGRAMS: dict[str, Callable[[Values], Any]] = {
    "softmax(x * s + mask)": lambda v: F.softmax(v.x * 0.125 + v.y, -1),
    "log_softmax(x + y)": lambda v: F.log_softmax(v.x + v.y, -1),
    "softmax(x) * y": lambda v: torch.softmax(v.x, -1) * v.y,
    "-log_softmax(x)": lambda v: -torch.log_softmax(v.x, -1),
    "relu(layer_norm(x)) + res": lambda v: (
        F.relu(F.layer_norm(v.x, v.x.shape[-1:], v.w, v.b)) + v.y
    ),
    "h, layer_norm(h = x + res)": _norm_of_sum,
    "layer_norm(x * y), no weights": lambda v: F.layer_norm(v.x * v.y, v.x.shape[-1:]),
    "rms_norm(x + res)": lambda v: F.rms_norm(v.x + v.y, v.x.shape[-1:], v.w, 1e-6),
    "rms_norm(x), no weight, * y": lambda v: F.rms_norm(v.x, v.x.shape[-1:]) * v.y,
    "RMSNorm as written": _rms_written,
    "RMSNorm in float32": _rms_in_float32,
    "x - mean": lambda v: v.x - v.x.mean(-1, keepdim=True),
    "x / sum(abs(x))": lambda v: v.x / v.x.abs().sum(-1, keepdim=True),
    "softmax as written": _softmax_written,
    "extrema": lambda v: ((v.x * v.y).amin(-1), (v.x + v.y).amax(-1, keepdim=True) - v.x),
    "numbers of rows": _numbers,
    "sum(x) + 1": lambda v: v.x.sum(-1) + 1.0,
}
TIMED = ("relu(layer_norm(x)) + res", "softmax(x * s + mask)", "RMSNorm as written",
         "h, layer_norm(h = x + res)", "sum(x) + 1")  # fmt: skip
TIMED_SIZES = (("float32", 8192, 1024), ("bfloat16", 8192, 1024), ("bfloat16", 16384, 4096))


# --- bits -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """One program in one dtype."""

    program: str
    dtype: str
    cases: int = 0
    elements: int = 0
    kernels: int = 0
    reduced: int = 0  # cases in which no reduction was left to eager PyTorch
    wrong: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)  # reasons


def make(dtype: torch.dtype, rows: int, columns: int, kind: str, shift: int = 0) -> Values:
    """Values of a kind: plain, wide or special; shift: elements by which rows begin late."""
    generator = torch.Generator("cuda").manual_seed(rows * 100003 + columns)

    def normal(*shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        values = torch.randn(count + shift, device="cuda", generator=generator)
        if kind == "wide":
            values = values * torch.exp(4 * torch.randn(count + shift, device="cuda",
                                                        generator=generator))  # fmt: skip
        if kind == "special":
            chance = torch.rand(count + shift, device="cuda", generator=generator)
            for k, number in enumerate((float("inf"), float("-inf"), float("nan"), -0.0, 0.0)):
                at = (chance * columns * 8 > k) & (chance * columns * 8 < k + 1)
                values[at] = number
        return values.to(dtype)[shift:].view(shape)

    return Values(normal(rows, columns), normal(rows, columns), normal(columns), normal(columns),
                  normal(rows, 1))  # fmt: skip


def cases(seed: str) -> Iterator[tuple[int, int, str, int]]:
    """(rows, columns, kind of values, shift), in an order of its own for each seed."""
    found = [
        (rows, columns, kind, 0)
        for columns in COLUMNS
        for rows in ROWS
        for kind in (("plain", "wide", "special") if rows in (3, 70) else ("plain",))
    ]
    found += [(rows, columns, "plain", shift) for columns in (64, 131, 1024) for rows in (3, 40)
              for shift in (1, 2, 3)]  # fmt: skip
    found += [(8192, 1024, "plain", 0), (2048, 4096, "wide", 0), (300, 8200, "plain", 0)]
    random.Random(seed).shuffle(found)
    return iter(found)


def differing(got: Any, want: Any) -> int:
    """Elements of which a bit differs."""
    if isinstance(want, tuple):
        return sum(differing(a, b) for a, b in zip(got, want, strict=True))
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    kind = {2: torch.int16, 4: torch.int32}[want.element_size()]
    bits = got.contiguous().view(kind) != want.contiguous().view(kind)
    return int((bits & ~(got.isnan() & want.isnan())).sum())


def compare(name: str, dtype: str, until: float) -> Outcome:
    """All cases of a program in a dtype, or as many as there is time for."""
    autofuse.config.measure, autofuse.config.always_fuse = False, True
    autofuse.config.compile, autofuse.config.max_kernels_per_line = "now", 1 << 30
    outcome, fn = Outcome(name, dtype), PROGRAMS[name]
    with torch.no_grad():
        for rows, columns, kind, shift in cases(name + dtype):
            if time.time() > until:
                break
            values = make(DTYPES[dtype], rows, columns, kind, shift)
            want = fn(values)
            autofuse.reset_stats()
            got = autofuse.unwrap(autofuse.materialize(fn(values.mapped(autofuse.wrap))))
            stats = autofuse.stats()
            wrong = differing(got, want)
            outcome.cases += 1
            outcome.kernels += stats.kernels_launched
            left = [reason for (_, reason) in stats.eager_ops if reason != "not in the table"]
            outcome.reduced += not left and stats.kernels_launched > 0
            for reason in left:
                outcome.left[reason] = outcome.left.get(reason, 0) + 1
            outcome.elements += rows * columns
            if wrong:
                outcome.wrong.append(f"[{rows}, {columns}] {kind} shift {shift}: {wrong} differ")
    return outcome


def compare_all(jobs: int, seconds: float, only: str) -> list[Outcome]:
    until = time.time() + seconds
    pairs = [(name, dtype) for name in PROGRAMS for dtype in DTYPES if only in name]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compare, *zip(*pairs, strict=True), [until] * len(pairs)))


# --- time -----------------------------------------------------------------------------------------


def times(only: str) -> list[dict[str, Any]]:
    """us on the device, with a cold cache, of eager, autofuse and torch.compile."""
    autofuse.config.measure, autofuse.config.always_fuse = False, True
    found = []
    for name in TIMED:
        if only not in name:
            continue
        fn = PROGRAMS[name]
        compiled = torch.compile(lambda *values, fn=fn: fn(Values(*values)), dynamic=False)
        for dtype, rows, columns in TIMED_SIZES:
            values = make(DTYPES[dtype], rows, columns, "plain")
            plain = [getattr(values, part) for part in Values.__dataclass_fields__]
            wrapped = values.mapped(autofuse.wrap)
            calls = {
                "eager": Call(lambda fn=fn, values=values: fn(values)),
                "autofuse": Call(
                    lambda fn=fn, wrapped=wrapped: autofuse.materialize(fn(wrapped))
                ),
                "torch.compile": Call(lambda plain=plain: compiled(*plain)),
            }  # fmt: skip
            with torch.no_grad():
                series, failed = measured(calls, "cuda", "device", rounds=5, round_s=0.01)
            us = {call: round(one.median, 1) for call, one in series.items()}
            found.append(
                {"program": name, "dtype": dtype, "shape": [rows, columns], **us, **failed}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="for the bits")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    version, capability = torch.__version__, torch.cuda.get_device_capability()
    release = tuple(map(int, version.split(".")[:2]))
    print(machine("cuda"), f"verified: {rowwise.is_verified(version, capability)}", flush=True)
    if not rowwise.is_verified(version, capability):
        print(f"({release}, {capability}) is not in VERIFIED: add it to compare", flush=True)
    outcomes = compare_all(arguments.jobs, arguments.seconds, arguments.only)
    for one in outcomes:
        print(f"{one.program:32} {one.dtype:9} {one.cases:4} cases {one.reduced:4} reduced "
              f"{one.kernels:5} kernels {one.elements:10} elements {len(one.wrong):3} wrong "
              f"{one.left or ''}", flush=True)  # fmt: skip
        for line in one.wrong[:6]:
            print(f"    {line}")
    found = [] if arguments.no_times else times(arguments.only)
    for one in found:
        print(json.dumps(one), flush=True)
    if arguments.out is not None:
        result = {"machine": machine("cuda"), "bits": list(map(asdict, outcomes)), "times": found}
        arguments.out.write_text(json.dumps(result, indent=1))
    sys.exit(any(one.wrong for one in outcomes))


if __name__ == "__main__":
    main()
