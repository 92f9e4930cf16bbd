"""Every fused spelling against eager over whole input spaces: bits on CUDA, ulp on the CPU.

    python bench/exhaustive.py [--device cuda] [--ops exp,add] [--dtypes float32,bfloat16]
        [--log2 32] [--seconds 600] [--short] [--out DIR] [--commit HASH]

The cases are the tables of tests/cases.py. A space of at most 32 bits is walked whole: every value
of 8 to 32 bits, every pair of 8 and 16 bits. Beyond that come random bits (2^32 pairs of float32,
2^28 of the rest; every other chunk of moderate size) and every combination of special values. On
CUDA a mismatch is a different bit pattern, NaNs being equal; on the CPU it is a different value,
and the largest difference in units in the last place is given, over 2^24 patterns spread evenly.
`--log2` bounds the size of a space. That a case ran fused is read off autofuse's counters.

The short expressions of 16-bit ops are in use on the targets of `PROVEN` in autofuse/kernel/text.py
alone. A run with `--short --dtypes float16,bfloat16` that finds no difference proves those of this
GPU.

`--numbers` sweeps Python numbers as operands and options instead: see `scalars`. All of it, 12
processes on one H100, takes about eight minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import autofuse
from autofuse.kernel import text as codegen
from autofuse.supply.load import target_of

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
import cases  # noqa: E402
from timing import machine, synchronize  # noqa: E402

Operands = tuple[torch.Tensor, ...]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
GROUPS = (  # title, calls, operands, dtypes
    ("One float", cases.FLOAT_CALLS, 1, FLOATS),
    ("Float to integer, where it fits", cases.FLOAT_TO_INT, 1, FLOATS),
    ("One wide float", cases.WIDE_CALLS, 1, FLOATS[:2]),
    ("Two floats", cases.PAIR_CALLS, 2, FLOATS),
    ("Two wide floats", {"nextafter": torch.nextafter}, 2, FLOATS[:2]),
    ("Three floats", cases.TRIPLE_CALLS, 3, FLOATS),
    ("One integer", cases.INT_CALLS, 1, INTS),
    ("Two integers", cases.INT_PAIR_CALLS, 2, (*INTS, torch.bool)),
    ("Integer shifts", cases.INT_SHIFTS, 2, INTS),
    ("Integer division, also by zero", cases.INT_DIVISIONS, 2, INTS),
)
BITS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
CHUNK = {"cuda": 26, "cpu": 22}  # log2 of the elements at once
LOG2 = {"cuda": 32, "cpu": 24}  # of the largest space
SPECIAL = (
    *(0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 20.0, 88.5, 104.0, 1e4, 1e9),
    *(math.pi, math.pi / 2, 1e-3, 1e-7, 1e-41, 1e30, math.inf),
)
FAR = torch.iinfo(torch.int64).max  # the distance of a number from NaN
NEAR = 4  # ulp: what a tolerance may be; results beyond it are counted apart


# --- spaces ---------------------------------------------------------------------------------------


def specials(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Values at which functions change their ways, of both signs; the limits; NaN."""
    if dtype is torch.bool:
        return torch.tensor([False, True], device=device)
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        values = {low, low + 1, *range(-9 if low else 0, 18), high - 1, high}
        return torch.tensor(sorted(values), dtype=dtype, device=device)
    limits = torch.finfo(dtype)
    near = (limits.tiny, limits.smallest_normal * limits.eps, limits.max, 1 + limits.eps,
            1 - limits.eps / 2)  # fmt: skip
    values = torch.tensor([*SPECIAL, *near], dtype=torch.float64)
    return torch.cat([values, -values, values.new_tensor([math.nan])]).to(dtype).to(device)


def combined(dtype: torch.dtype, count: int, device: str) -> Operands:
    """All combinations of `count` special values, repeated up to a multiple of 64 elements."""
    values = specials(dtype, device)
    size = len(values) ** count
    index = torch.arange(-(-size // 64) * 64, device=device) % size
    return tuple(values[index // len(values) ** k % len(values)] for k in range(count))


def patterns(dtype: torch.dtype, count: int, log2: int, device: str) -> Iterator[Operands]:
    """2^log2 of the combinations of `count` bit patterns, which have 8, 16 or 32 bits, evenly."""
    bits = 8 * dtype.itemsize * count
    size = 1 << min(log2, CHUNK[torch.device(device).type])
    base = torch.arange(size, dtype=torch.int64, device=device)
    step = 1 << (bits - log2) | 1  # odd: the last bits vary too
    base = (base * step).to(BITS[bits])
    for start in range(0, 1 << log2, size):
        offset = (start * step + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        whole = (base + offset).view(dtype).view(size, count)
        yield tuple(part.contiguous() for part in whole.unbind(1))


def random_bits(dtype: torch.dtype, count: int, log2: int, device: str) -> Iterator[Operands]:
    """2^log2 random combinations; in every other chunk floats of 2^-16 to 2^16, small integers."""
    generator = torch.Generator(device).manual_seed(20261121)
    size = 1 << min(log2 - 1, CHUNK[torch.device(device).type])
    for number in range(1 << log2 - size.bit_length() + 1):
        raw = torch.empty(size * count * dtype.itemsize // 8, dtype=torch.int64, device=device)
        raw.random_(-(1 << 63), None, generator=generator)
        raw = raw.view(dtype)
        yield (moderate(raw) if number % 2 else raw).view(count, size).unbind(0)


def moderate(raw: torch.Tensor) -> torch.Tensor:
    """Random bits as values whose sums and products mean something."""
    width = 8 * raw.dtype.itemsize
    if not raw.dtype.is_floating_point:
        return raw >> width - 8
    mantissa = 1 - math.frexp(torch.finfo(raw.dtype).eps)[1]  # bits of it
    lowest = max((1 << width - 2 - mantissa) - 17, 0)  # exponent field
    kept = (1 << mantissa) - 1 | 31 << mantissa | -1 << width - 1
    return ((raw.view(BITS[width]) & kept) + (lowest << mantissa)).view(raw.dtype)


def space(dtype: torch.dtype, count: int, log2: int, device: str) -> tuple[str, Iterator[Operands]]:
    """What is walked, in words, and its chunks."""
    bits = 8 * dtype.itemsize * count
    combinations = combined(dtype, count, device)
    if dtype is torch.bool:
        return "all", iter([combinations])
    some = f"{len(specials(dtype, 'cpu')) ** count} special"
    if bits in BITS and bits <= 32:
        chunks = patterns(dtype, count, min(bits, log2), device)
        if bits <= log2:
            return f"all 2^{bits}", chunks
        return f"2^{log2} of 2^{bits}, {some}", itertools.chain([combinations], chunks)
    log2 = min(log2, 32 if dtype is torch.float32 and count == 2 else 28)
    chunks = random_bits(dtype, count, log2, device)
    return f"2^{log2} random, {some}", itertools.chain([combinations], chunks)


def fitting(x: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """`x` with 0 for what the integer dtype cannot hold: C++ leaves that conversion open."""
    wide, low, high = x.double(), float(torch.iinfo(target).min), float(torch.iinfo(target).max)
    return torch.where((wide > low - 1) & (wide < high + 1), x, torch.zeros_like(x))


# --- comparison -----------------------------------------------------------------------------------


def differing(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Mask of the elements whose bits differ, unless both are NaN; None if there are none."""
    bits = BITS[8 * want.dtype.itemsize]
    a, b = got.view(bits), want.view(bits)
    if torch.equal(a, b):  # the usual case: no mask of NaNs
        return None
    different = a != b
    if want.dtype.is_floating_point:
        different &= ~(got.isnan() & want.isnan())
    return different


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place, int64: how many numbers of the dtype lie between.

    Zeros of either sign are the same number, infinity follows the largest one, NaN equals NaN only
    (2^63 - 1 otherwise, as for integers and bools that differ at all).
    """
    if not want.dtype.is_floating_point:
        return (got != want) * FAR
    a, b = _ordered(got), _ordered(want)
    apart = torch.maximum(a, b) - torch.minimum(a, b)
    apart[apart < 0] = FAR  # float64 of opposite signs
    a, b = got.isnan(), want.isnan()
    return apart.masked_fill(a & b, 0).masked_fill(a ^ b, FAR)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the numbers; both zeros are 0."""
    bits = BITS[8 * values.dtype.itemsize]
    raw = values.contiguous().view(bits).to(torch.int64)
    return torch.where(raw < 0, torch.iinfo(bits).min - raw, raw)


def shown(value: torch.Tensor) -> str:
    """One element: its bits where they say more than its value."""
    if not value.dtype.is_floating_point:
        return str(value.item())
    width = 8 * value.dtype.itemsize
    raw = value.reshape(1).view(BITS[width]).item() % (1 << width)
    return f"{raw:#0{width // 4 + 2}x} ({value.item():.9g})"


# --- one case -------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one call did over its space in one dtype."""

    op: str
    dtype: str
    space: str = ""
    tested: int = 0  # elements
    status: str = "fused"
    mismatches: int = 0
    ulp: int = 0  # the largest distance; on the CPU only
    beyond: int = 0  # results further than NEAR apart
    example: dict[str, list[str] | str] = field(default_factory=dict)  # first, on the CPU worst
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing to see: the same, no op at all, or none that torch has for the dtype."""
        return self.status in ("fused", "no op", "not in torch") and not self.mismatches

    @property
    def cell(self) -> str:
        """For a table."""
        if self.status != "fused":
            return self.status
        if not self.ulp:
            return f"{self.mismatches}"
        largest = "NaN" if self.ulp == FAR else f"{self.ulp}"
        return largest + (f" ({self.beyond} beyond {NEAR})" if self.beyond else "")

    def __str__(self) -> str:
        words = f"{self.op:20s} {self.dtype:9s} {self.space:32s} {self.seconds:6.2f} s  "
        if self.status != "fused":
            return words + self.status
        words += f"{self.mismatches} of {self.tested} differ"
        words += f", by up to {self.cell} ulp" if self.ulp else ""
        return words + (f": {_spelled(self.example)}" if self.example else "")


def _spelled(example: dict[str, list[str] | str]) -> str:
    return f"{', '.join(example['input'])} gives {example['got']}, eager {example['want']}"


def measure(
    op: str,
    call: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    count: int = 1,
    *,
    device: str = "cpu",
    log2: int | None = None,
    exact: bool | None = None,
    eager: Callable[..., torch.Tensor] | None = None,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    deadline: float = math.inf,
) -> Result:
    """Compare `call` fused with `call` eager.

    count: operands. log2: of the largest space. exact: bits instead of ulp; as on CUDA if not
    given. eager: compare with this call instead. prepare: applied to each operand.
    deadline: on time.perf_counter; the walk ends there, with what it has tested.
    """
    exact = device == "cuda" if exact is None else exact
    eager = eager or call
    result = Result(op, str(dtype)[6:])
    probe = torch.ones(64, dtype=dtype, device=device)
    try:
        if eager(*(probe,) * count) is probe:
            result.status = "no op"
            return result
    except (RuntimeError, TypeError):
        result.status = "not in torch"
        return result
    _run_fused(result, call, (probe,) * count)
    if result.status != "fused":
        return result
    start = time.perf_counter()
    result.space, chunks = space(dtype, count, LOG2[device] if log2 is None else log2, device)
    for operands in chunks:
        if time.perf_counter() > deadline:
            result.space += f", {result.tested} reached"
            break
        if prepare is not None:
            operands = tuple(map(prepare, operands))
        got = _run_fused(result, call, operands)
        _compare(result, operands, got, eager(*operands), exact)
        result.tested += operands[0].numel()
        if result.status != "fused":
            break
    if not result.tested:
        result.status = "not reached"
    synchronize(device)
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def _run_fused(
    result: Result, call: Callable[..., torch.Tensor], operands: Operands
) -> torch.Tensor:
    """`call` of wrapped operands, as a plain tensor; `result` learns if it was not one kernel."""
    autofuse.reset_stats()
    got = autofuse.materialize(call(*map(autofuse.wrap, operands)))
    stats = autofuse.stats()
    if stats.ops_eager or stats.replays or not stats.ops_recorded or stats.kernels_launched != 1:
        names = sorted({name for name, _ in stats.eager_ops})
        result.status = f"not fused: {', '.join(names) or stats}"
    return autofuse.unwrap(got)


def _compare(
    result: Result, operands: Operands, got: torch.Tensor, want: torch.Tensor, exact: bool
) -> None:
    """Add a chunk to `result`."""
    for trait in ("dtype", "shape"):
        if getattr(got, trait) != getattr(want, trait):
            result.status = f"{trait} {getattr(got, trait)}, eager {getattr(want, trait)}"
            return
    if exact:
        different = differing(got, want)
        found = 0 if different is None else int(different.count_nonzero())
        if not found:
            return
        where = int(different.int().argmax())  # the first
        example = not result.mismatches
    else:
        apart = ulps(got, want)
        where = int(apart.argmax())
        worst, found = int(apart[where]), int(apart.count_nonzero())
        example = worst > result.ulp
        result.ulp = max(result.ulp, worst)
        result.beyond += int((apart > NEAR).count_nonzero())
    result.mismatches += found
    if example:
        result.example = {
            "input": [shown(x[where]) for x in operands],
            "got": shown(got[where]),
            "want": shown(want[where]),
        }


# --- the table ------------------------------------------------------------------------------------


def versions(device: str, commit: str) -> str:
    """Machine, versions and commit, for the head of a table."""
    words = [machine(device)]
    if device == "cuda":
        words.append(f"numba-cuda {importlib.metadata.version('numba-cuda')}")
        words.append(f"CUDA {torch.version.cuda}")
    if not commit:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ", ".join([*words, f"commit {commit or 'unknown'}"])


def summary(results: list[Result]) -> str:
    differ = sum(bool(result.mismatches) for result in results)
    other = sum(not (result.passed or result.mismatches) for result in results)
    tested = sum(result.tested for result in results)
    return f"{len(results)} cases, {tested:.4g} elements: {differ} cases differ, {other} not fused"


def markdown(groups: dict[str, list[Result]], head: str, ulp: bool) -> str:
    """One table per group: a row per op, sorted, a column per dtype; then every example."""
    results = [result for group in groups.values() for result in group]
    cell = "The largest difference in ulp" if ulp else "How many results differ in any bit"
    lines = ["# Fused against eager", "", f"{head}.", "", f"{summary(results)}. {cell}:"]
    for title, group in groups.items():
        dtypes = list(dict.fromkeys(result.dtype for result in group))
        cells = {(result.op, result.dtype): result.cell for result in group}
        spaces = {result.dtype: result.space for result in group if result.status == "fused"}
        lines += ["", f"## {title}", "", *_row("op", *dtypes), "|---" * (len(dtypes) + 1) + "|"]
        lines += _row("*inputs*", *(spaces.get(dtype, "") for dtype in dtypes))
        for op in sorted({result.op for result in group}):
            lines += _row(op, *(cells.get((op, dtype), "") for dtype in dtypes))
    bad = sorted((r for r in results if not r.passed), key=lambda r: (r.op, r.dtype))
    if bad:
        lines += ["", "## The largest of each" if ulp else "## The first of each", ""]
        lines += [*_row("op", "dtype", "differ", "inputs", "fused", "eager"), "|---" * 6 + "|"]
    for r in bad:
        example = r.example or {"input": [], "got": r.status, "want": ""}
        inputs = ", ".join(example["input"])
        share = f"{r.mismatches} of {r.tested}"
        lines += _row(r.op, r.dtype, share, inputs, example["got"], example["want"])
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def results(args: argparse.Namespace) -> Iterator[tuple[str, Result]]:
    """(title of the group, result) of every case that was asked for."""
    ops, dtypes = (set(filter(None, names.split(","))) for names in (args.ops, args.dtypes))
    deadline = time.perf_counter() + args.seconds
    for title, calls, count, kinds in GROUPS:
        for (op, call), dtype in itertools.product(calls.items(), kinds):
            if ops and op not in ops or dtypes and str(dtype)[6:] not in dtypes:
                continue
            prepare = None
            if calls is cases.FLOAT_TO_INT:
                prepare = functools.partial(fitting, target=getattr(torch, op.removeprefix("to_")))
            yield title, measure(
                op, call, dtype, count,
                device=args.device, log2=args.log2, prepare=prepare, deadline=deadline,
            )  # fmt: skip


@torch.no_grad()
def main(arguments: list[str] | None = None) -> dict[str, list[Result]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", default="", help="names, with commas; all if not given")
    parser.add_argument("--dtypes", default="", help="names, with commas")
    parser.add_argument("--log2", type=int, help="of the largest space, 8 at least")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--short", action="store_true", help="16-bit expressions, proven or not")
    parser.add_argument("--commit", default="", help="for the head; git is asked if not given")
    parser.add_argument("--out", type=Path, help="directory for exhaustive.md and .json")
    parser.add_argument("--numbers", action="store_true", help="sweep Python numbers, see scalars")
    parser.add_argument("--count", type=int, default=4096, help="with --numbers: of them")
    parser.add_argument("--tiers", default="kernel,eager", help="with --numbers")
    parser.add_argument("--spellings", default="function,in-place,out=,gradients",
                        help="with --numbers")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="with --numbers: processes")
    args = parser.parse_args(arguments)
    if args.numbers:
        import scalars

        return scalars.run(args)
    # or eager would be compared with itself
    autofuse.config.compile, autofuse.config.max_kernels_per_line = "now", 1 << 30
    autofuse.config.always_fuse = True  # one op too
    head = versions(args.device, args.commit)
    if args.short and args.device == "cuda":
        codegen.PROVEN |= {target_of(torch.device("cuda"))}
        head += ", short expressions"
    print(head)
    groups: dict[str, list[Result]] = {}
    try:
        for title, result in results(args):
            print(result, flush=True)
            groups.setdefault(title, []).append(result)
    finally:  # what there is, also after an interrupt
        print(summary([result for group in groups.values() for result in group]))
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            table = markdown(groups, head, args.device == "cpu")
            (args.out / "exhaustive.md").write_text(table)
            listed = {title: [*map(asdict, group)] for title, group in groups.items()}
            record = json.dumps({"head": head, "groups": listed}, indent=1)
            (args.out / "exhaustive.json").write_text(record)
    return groups


if __name__ == "__main__":
    main()
