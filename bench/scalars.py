"""Python numbers as operands and options, fused against eager: the axis of `exhaustive --numbers`.

Every case of tests/cases.py's NUMERIC (each op with each of its numeric parameters, on either
side) in every spelling that torch has (function, in place, `out=`, and the function's gradients)
is called with `--count` numbers, or as many tuples where it takes several, over 2^`--log2` operand
patterns, in kernels and as the eager ops that stand in while there are none. What eager raises has
to be raised with the same type and text.

The numbers of a dtype are the same for all cases and runs: bools; small ints, powers of two and
their neighbours past 2^24, 2^53, 2^63 and 2^64; NaN, infinities, zeros; the limits of all floating
dtypes and what rounds to them or beyond; decimal fractions, powers of 0.9 and 0.999; then random
ones of every magnitude, floats that are no float32 and ints of 1 to 64 bits. The first operands
hold every number and its multiples, as far as the dtype does, with their neighbours, the special
values of `exhaustive`, and random bits, half of them of moderate size; all patterns of 8 and 16
bits where there is one operand.

Comparisons stay on the device: each number ors what differs into one tensor, which is read once per
case, dtype, spelling and tier. Where it is not zero a second run looks at every number.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import exhaustive
import torch

import autofuse
import cases
from autofuse.record.modes import forget_all
from autofuse.supply.kernels import clear_kernels

Numbers = tuple[Any, ...]
FLOATS, INTS = exhaustive.FLOATS, exhaustive.INTS
DTYPES = (*FLOATS, *INTS, torch.bool)
TIERS = ("kernel", "eager")
GRADIENTS = "gradients"  # of the function, all in one: a spelling like those below
SPELLINGS = ("function", "in-place", "out=", GRADIENTS)
SEED = 20261122

# --- numbers --------------------------------------------------------------------------------------


def edges() -> list[Any]:
    """Numbers at which something changes, for every dtype the same."""
    ints = [*range(-20, 21), 100, -100, 255, 1000, 10**6, 10**9, 10**12, 2**70, -(2**70), 2**1024]
    for k in range(3, 65):
        ints += [sign * (1 << k) + near for sign in (1, -1) for near in (-1, 0, 1)]
    floats = [0.0, -0.0, math.nan, math.inf, -math.inf, math.pi, math.e, 1 / 3, 2 / 3, 169.0, 13.0]
    floats += [n / 10 for n in range(-25, 26)] + [n / 100 for n in range(1, 100, 7)]
    floats += [n + 0.5 for n in range(-6, 6)]
    floats += [base**t for base in (0.9, 0.99, 0.999) for t in range(1, 16)]
    floats += [1 - base**t for base in (0.9, 0.999) for t in range(1, 16)]
    for dtype in FLOATS:
        limits = torch.finfo(dtype)
        least = limits.smallest_normal * limits.eps
        floats += [sign * factor * limits.max for sign in (1, -1)
                   for factor in (1, 1 - limits.eps, 1 + limits.eps / 8, 1 + limits.eps / 4,
                                  1 + limits.eps / 2, 1 + limits.eps, 2)]  # fmt: skip
        floats += [sign * factor * least for sign in (1, -1)
                   for factor in (0.25, 0.5, 0.5 + 1e-9, 1, 1.5, 2.5)]  # fmt: skip
        floats += [limits.smallest_normal, limits.smallest_normal - least, 1 + limits.eps,
                   1 + limits.eps / 2, 1 - limits.eps / 4]  # fmt: skip
    floats += [sign * 2.0**k for k in range(-160, 140, 3) for sign in (1, -1)]
    floats += [2.0**k for k in (*range(-1074, -160, 61), *range(140, 1024, 61))]
    floats += [10.0**k for k in range(-45, 41, 2)]
    unlike = {(type(x), repr(x)): x for x in (True, False, *ints, *floats)}
    return list(unlike.values())


def _drawn(random_: random.Random, integral: bool) -> Any:
    """A random number; half of those for integers are ints."""
    sign = random_.choice((1, -1))
    kind = random_.random() - (0.3 if integral else 0.0)
    if kind < 0.2:
        return sign * random_.getrandbits(random_.randrange(1, 65))
    if kind < 0.25:
        return random_.randrange(-1000, 1000)
    if kind < 0.35:
        return sign * math.ldexp(1 + random_.random(), random_.randrange(-1074, 1024))
    if kind < 0.55:
        return sign * math.ldexp(1 + random_.random(), random_.randrange(-150, 128))
    if kind < 0.75:
        return sign * math.ldexp(1 + random_.random(), random_.randrange(-26, 17))
    if kind < 0.9:
        return random_.gauss(0, 3)
    return round(random_.gauss(0, 30), random_.randrange(1, 4))


@cache
def numbers_for(
    dtype: torch.dtype, count: int, several: int = 1, whole: Numbers = ()
) -> tuple[Numbers, ...]:
    """`count` tuples of `several` numbers, evenly out of 4,096 or more.

    whole: out of these instead; no more than there are.
    """
    full = max(count, 4096)
    random_ = random.Random(f"{SEED} {dtype} {several}")
    integral = not dtype.is_floating_point
    if whole:
        single = list(whole)
        count = min(count, len(single))
    else:
        single = edges()
        single += [_drawn(random_, integral) for _ in range(full - len(single))]
    made = [(x,) for x in single]
    if several > 1:
        made = []
        for _ in range(full):
            drawn = [random_.choice(single) for _ in range(several)]
            how = random_.random()
            if how < 0.15:
                drawn = [_drawn(random_, integral) for _ in range(several)]
            elif how < 0.25:
                drawn = drawn[:1] * several
            if how < 0.55 and not any(x != x for x in drawn):
                drawn.sort()
            made.append(tuple(drawn))
    return tuple(made[k * len(made) // count] for k in range(count))


# --- operands -------------------------------------------------------------------------------------


@cache
def operands_for(
    dtype: torch.dtype, tensors: int, log2: int, device: str
) -> tuple[torch.Tensor, ...]:
    """The operand patterns of a dtype."""
    width = 1 if dtype is torch.bool else 8 * dtype.itemsize
    if width * tensors <= min(log2, 16):
        base = torch.arange(1 << width * tensors, dtype=torch.int64, device=device)
        base = base.repeat(max(1, 64 >> width * tensors))
        parts = [(base >> k * width) & ((1 << width) - 1) for k in range(tensors)]
        if dtype is torch.bool:
            return tuple(part.bool() for part in parts)
        return tuple(part.to(exhaustive.BITS[width]).view(dtype) for part in parts)
    size = 1 << log2
    special = exhaustive.combined(dtype, tensors, device)
    chunks = list(exhaustive.random_bits(dtype, tensors, log2, device))
    drawn = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    generator = torch.Generator("cpu").manual_seed(SEED)
    made = []
    for k in range(tensors):
        near = _near(dtype, device)[: size // 4]
        if k:
            near = near[torch.randperm(len(near), generator=generator).to(device)]
        made.append(torch.cat([special[k][: size // 4], near, drawn[k]])[:size].contiguous())
    return tuple(made)


def _near(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every number, and its multiples, in the dtype, and the neighbours of these."""
    values = []
    for (x,) in numbers_for(dtype, 4096):
        with suppress(OverflowError):
            values.append(float(x))
    base = torch.tensor(values, dtype=torch.float64)
    base = torch.cat([base * factor for factor in (1, 2, 3, 7, 0.5, 1.5, -1)])
    if dtype is torch.bool:
        return (base > 0).to(device)
    if dtype.is_floating_point:
        cast = base.to(dtype)
        bits = cast.view(exhaustive.BITS[8 * dtype.itemsize])
    else:
        limits = torch.iinfo(dtype)
        base = torch.nan_to_num(base).clamp(limits.min / 2, limits.max / 2)
        cast = bits = base.to(torch.int64).to(dtype)
    near = torch.stack([bits, bits + 1, bits - 1]).view(dtype)
    return near.T.reshape(-1).to(device)


# --- one case in one dtype, spelling and tier -----------------------------------------------------


@dataclass
class Swept:
    """What one spelling of a case did with its numbers in one dtype and tier."""

    op: str
    dtype: str
    spelling: str
    tier: str
    status: str = "swept"  # or "not in torch"
    numbers: int = 0
    patterns: int = 0
    fused: int = 0  # numbers with which the call was recorded
    raised: int = 0  # with which eager raises
    wrong: int = 0  # numbers whose results differ, or errors
    mismatches: int = 0  # elements that differ
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        words = f"{self.op:26s} {self.dtype:9s} {self.spelling:9s} {self.tier:7s}"
        words += f"{self.seconds:6.2f} s  {self.numbers} numbers, {self.fused} fused, "
        words += f"{self.raised} raise: {self.wrong} wrong, {self.mismatches} elements"
        return "\n    ".join([words, *self.examples])


_directory = os.environ.get("AUTOFUSE_CACHE_DIR", "")
_no_kernels = tempfile.TemporaryDirectory(prefix="autofuse-none-")


def configure(tier: str) -> None:
    """Have kernels for everything, or for nothing: none from before, and none on disk."""
    config = autofuse.config
    mode = "now" if tier == "kernel" else "background"
    if config.compile == mode and config.always_fuse:
        return
    config.always_fuse, config.max_kernels_per_line = True, 1 << 30
    config.compile, config.compile_after = mode, 1 if tier == "kernel" else 1 << 30
    os.environ["AUTOFUSE_CACHE_DIR"] = _directory if tier == "kernel" else _no_kernels.name
    clear_kernels()
    forget_all("bench")


Call = Callable[[Numbers], torch.Tensor]


def _prepared(case: cases.Numeric, spelling: str, operands: Any, dtypes: Any) -> Call:
    """A function of the numbers alone.

    A write has something pending to be fused with. dtypes: of `out`, by the classes of the numbers.
    """
    if spelling == GRADIENTS:
        return _gradients(case, operands)
    call = case.spellings[spelling]
    first, rest = operands[0], operands[1:]
    if spelling == "function":
        return lambda numbers: call(*operands, *numbers)

    def inplace(numbers: Numbers) -> torch.Tensor:
        target = first.clone()
        result = call(target, *rest, *numbers)
        assert result is target, "an in-place op gives its operand"
        return result

    def out(numbers: Numbers) -> torch.Tensor:
        made = torch.empty(first.shape, dtype=dtypes(numbers), device=first.device)
        result = call(first.clone(), *rest, *numbers, out=made)
        assert autofuse.unwrap(result) is made, "a function gives its `out`"
        return made

    return inplace if spelling == "in-place" else out


def _gradients(case: cases.Numeric, operands: Any) -> Call:
    """The operands' gradients, one after the other, of a result that is computed before."""
    leaves = [x.detach().requires_grad_() for x in operands]
    incoming = autofuse.unwrap(operands[0]).flip(0)

    def gradients(numbers: Numbers) -> torch.Tensor:
        with torch.enable_grad():
            result = autofuse.materialize(case.call(*leaves, *numbers))
        made = torch.autograd.grad(result, leaves, incoming.to(result.dtype))
        return torch.cat([autofuse.unwrap(gradient) for gradient in made])

    return gradients


def spellings_of(case: cases.Numeric, dtype: torch.dtype) -> list[str]:
    """Those that there may be."""
    return [*case.spellings, *[GRADIENTS] * dtype.is_floating_point]


def _outcome(call: Call, numbers: Numbers) -> torch.Tensor | Exception:
    try:
        return call(numbers)
    except AssertionError:
        raise
    except Exception as error:  # compared with eager's by the caller
        return error


def _differs(got: Any, want: Any, tolerance: int | None) -> tuple[int, int, str]:
    """(elements that differ, the first of them, what differs besides), reading the device."""
    if isinstance(want, Exception) or isinstance(got, Exception):
        same = type(got) is type(want) and str(got) == str(want)
        return (0, 0, "") if same else (0, 0, f"{_said(got)}, eager {_said(want)}")
    for trait in ("dtype", "shape", "device"):
        if getattr(got, trait) != getattr(want, trait):
            return 0, 0, f"{trait} {getattr(got, trait)}, eager {getattr(want, trait)}"
    if tolerance is None:
        mask = exhaustive.differing(got, want)
    else:
        mask = exhaustive.ulps(got, want) > tolerance
    found = 0 if mask is None else int(mask.count_nonzero())
    return found, int(mask.int().argmax()) if found else 0, ""  # type: ignore[union-attr]


def _said(result: Any) -> str:
    if isinstance(result, Exception):
        return f"raises {type(result).__name__}: {str(result).splitlines()[0][:120]}"
    return f"gives {result.dtype}"


def sweep(
    op: str,
    dtype: torch.dtype,
    spelling: str,
    tier: str,
    *,
    device: str = "cpu",
    count: int = 4096,
    log2: int = 20,
    tolerance: int | None = None,
) -> Swept:
    """Compare one spelling of a case, fused, with eager.

    tolerance: units in the last place that results may differ by, zeros and NaNs being equal; bits
    if not given. `configure(tier)` comes before.
    """
    case = cases.NUMERIC[op]
    result = Swept(op, str(dtype)[6:], spelling, tier)
    if device == "cpu" and dtype in (torch.int32, torch.int64) and op in cases.DIVISIONS:
        result.status = "not on the CPU, where torch's least int by -1 ends the process"
        return result
    start = time.perf_counter()
    numbers = numbers_for(dtype, count, case.numbers, case.whole)
    operands = operands_for(dtype, case.tensors, log2, device)
    result.patterns = len(operands[0])
    known: dict[tuple[type, ...], torch.dtype] = {}

    def dtypes(given: Numbers) -> torch.dtype:
        key = tuple(map(type, given))
        if key not in known:
            small = [x[:8] for x in operands]
            made = _outcome(lambda n: case.call(*small, *n), given)
            known[key] = dtype if isinstance(made, Exception) else made.dtype
        return known[key]

    eager = _prepared(case, spelling, operands, dtypes)
    wrapped = _prepared(case, spelling, [autofuse.wrap(x.clone()) for x in operands], dtypes)

    def fused(given: Numbers) -> torch.Tensor:
        return autofuse.unwrap(autofuse.materialize(wrapped(given)))

    sample = numbers[:: max(1, len(numbers) // 64)]
    if all(isinstance(_outcome(eager, given), Exception) for given in sample):
        result.status, numbers = "not in torch", sample
    result.numbers = len(numbers)
    suspects = list(numbers)
    autofuse.reset_stats()
    if device != "cpu":
        suspects = _suspects(numbers, eager, fused, result)
    for given in suspects:
        want, got = _outcome(eager, given), _outcome(fused, given)
        if device == "cpu":
            result.raised += isinstance(want, Exception)
        found, where, what = _differs(got, want, tolerance)
        if not found and not what:
            continue
        result.wrong += 1
        result.mismatches += found
        if len(result.examples) < 4:
            shown = ", ".join(map(repr, given))
            if found:
                inputs = ", ".join(exhaustive.shown(x[where]) for x in operands)
                what = f"{found} differ: {inputs} gives {exhaustive.shown(got[where])}"
                what += f", eager {exhaustive.shown(want[where])}"
            result.examples.append(f"({shown}): {what}")
    if device == "cpu" or not result.fused:
        result.fused = _fused(result)
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def _fused(result: Swept) -> int:
    """How many of its numbers ran in its tier."""
    stats = autofuse.stats()
    if result.tier == "eager" and stats.kernels_launched:
        raise RuntimeError(f"{result.op} of {result.dtype} ran kernels in the eager tier")
    runs = stats.kernels_launched if result.tier == "kernel" else stats.eager_flushes
    if result.spelling == GRADIENTS and result.tier == "kernel":
        runs //= 2  # forward and backward
    return min(runs, result.numbers)


def _suspects(
    numbers: tuple[Numbers, ...], eager: Call, fused: Call, result: Swept
) -> list[Numbers]:
    """The numbers to look at one by one: those that raise, all if an element's bits differ."""
    apart: dict[torch.dtype, torch.Tensor] = {}
    scratch: dict[torch.dtype, torch.Tensor] = {}
    looked = []
    for given in numbers:
        want, got = _outcome(eager, given), _outcome(fused, given)
        if isinstance(want, Exception):
            result.raised += 1
        if isinstance(want, Exception) or isinstance(got, Exception):
            if _differs(got, want, None)[2]:
                looked.append(given)
            continue
        if got.dtype != want.dtype or got.shape != want.shape:
            looked.append(given)
            continue
        kind = exhaustive.BITS[8 * want.dtype.itemsize]
        if kind not in apart:
            apart[kind] = torch.zeros(want.shape, dtype=kind, device=want.device)
            scratch[kind] = torch.empty_like(apart[kind])
        torch.bitwise_xor(got.view(kind), want.view(kind), out=scratch[kind])
        apart[kind].bitwise_or_(scratch[kind])
    result.fused = _fused(result)
    if any(int(bits.count_nonzero()) for bits in apart.values()):  # NaNs, it may be
        counted = torch.stack([_counted(_outcome(fused, n), _outcome(eager, n)) for n in numbers])
        looked += [numbers[k] for k in counted.nonzero().flatten().tolist()]
    return looked


def _counted(got: Any, want: Any) -> torch.Tensor:
    """How many elements differ, NaNs being equal; left on the device."""
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return torch.zeros((), dtype=torch.int64, device="cuda")  # looked at before
    if got.dtype != want.dtype or got.shape != want.shape:
        return torch.zeros((), dtype=torch.int64, device="cuda")
    kind = exhaustive.BITS[8 * want.dtype.itemsize]
    different = got.view(kind) != want.view(kind)
    if want.dtype.is_floating_point:
        different &= (got == got) | (want == want)
    return different.count_nonzero()


# --- the table ------------------------------------------------------------------------------------


Job = tuple[str, str, str, str, argparse.Namespace]  # op, dtype, spelling, tier


def _task(job: Job) -> Swept:
    """One sweep, in a process of several."""
    op, name, spelling, tier, args = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    configure(tier)
    tolerance = 0 if args.device == "cpu" else None
    with torch.no_grad():
        return sweep(op, getattr(torch, name), spelling, tier, device=args.device,
                     count=args.count, log2=args.log2 or 20, tolerance=tolerance)  # fmt: skip


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Those that were asked for; functions in kernels come first."""
    ops, dtypes = (set(filter(None, names.split(","))) for names in (args.ops, args.dtypes))
    names = [str(dtype)[6:] for dtype in DTYPES]
    return [
        (op, name, spelling, tier, args)
        for tier in args.tiers.split(",")
        for spelling in args.spellings.split(",")
        for name in names if not dtypes or name in dtypes
        for op, case in cases.NUMERIC.items()
        if (not ops or op in ops) and spelling in spellings_of(case, getattr(torch, name))
    ]  # fmt: skip


def _all(args: argparse.Namespace) -> Iterator[Swept]:
    jobs = _jobs(args)
    deadline = time.perf_counter() + args.seconds
    os.environ["AUTOFUSE_CACHE_MAXSIZE"] = "0"  # the eager tier is to find no kernel on disk
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        left = pool.imap_unordered(_task, jobs)
        for k in range(len(jobs)):
            rest = max(1.0, deadline - time.perf_counter())
            try:
                yield left.next(None if math.isinf(rest) else rest)
            except multiprocessing.TimeoutError:
                print(f"{len(jobs) - k} sweeps were not reached in time")
                return


def summary(swept: list[Swept]) -> str:
    """What was swept, in a sentence."""
    there = [result for result in swept if result.status == "swept"]
    pairs = sum(result.numbers * result.patterns for result in there)
    wrong = sum(bool(result.wrong) for result in swept)
    return (
        f"{len(there)} cases, {sum(r.numbers for r in there)} numbers, {pairs:.4g} elements: "
        f"{wrong} cases differ"
    )


def markdown(swept: list[Swept], head: str) -> str:
    """One table per tier: a row per case, a column per dtype; then every example."""
    lines = ["# Python numbers: fused against eager", "", f"{head}.", "", f"{summary(swept)}.", ""]
    lines += ["In a cell: the numbers with which a result differs in any bit, or an error in its "
              "type or text, over all spellings; in brackets the share of the numbers with which "
              "the function was recorded, where that is not all that eager takes."]  # fmt: skip
    names = [str(dtype)[6:] for dtype in DTYPES if any(r.dtype == str(dtype)[6:] for r in swept)]
    for tier in TIERS:
        rows = [result for result in swept if result.tier == tier]
        if not rows:
            continue
        lines += ["", f"## {tier.capitalize()} tier", ""]
        lines += [*exhaustive._row("op", "spellings", *names), "|---" * (len(names) + 2) + "|"]
        for op in cases.NUMERIC:
            of = [result for result in rows if result.op == op]
            spelled = [s for s in SPELLINGS if any(r.spelling == s for r in of)]
            cells = [_cell([r for r in of if r.dtype == name]) for name in names]
            if of:
                lines += exhaustive._row(op, ", ".join(spelled), *cells)
    bad = [result for result in swept if result.wrong]
    if bad:
        lines += ["", "## What differs", ""]
        lines += [*exhaustive._row("op", "dtype", "spelling", "tier", "numbers", "first"),
                  "|---" * 6 + "|"]  # fmt: skip
    for r in bad:
        first = r.examples[0] if r.examples else ""
        lines += exhaustive._row(r.op, r.dtype, r.spelling, r.tier, f"{r.wrong}", first)
    return "\n".join(lines) + "\n"


def _cell(results: list[Swept]) -> str:
    there = [result for result in results if result.status == "swept"]
    wrong = sum(result.wrong for result in results)
    if not there:
        return f"{wrong} wrong errors" if wrong else "-"
    function = there[0]
    takes = function.numbers - function.raised
    share = "" if function.fused >= takes else f" ({function.fused / max(1, takes):.0%})"
    return f"{wrong}{share}"


def run(args: argparse.Namespace) -> list[Swept]:
    """Sweep what `exhaustive --numbers` was asked for; print and write the table."""
    head = exhaustive.versions(args.device, args.commit)
    print(head)
    swept: list[Swept] = []
    try:
        for result in _all(args):
            swept.append(result)
            if result.wrong or result.seconds > 20:
                print(result, flush=True)
    finally:  # what there is, also after an interrupt
        order = {name: k for k, name in enumerate(cases.NUMERIC)}
        swept.sort(key=lambda r: (r.tier, order[r.op], r.dtype, r.spelling))
        print(summary(swept))
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "numbers.md").write_text(markdown(swept, head))
            record = {"head": head, "results": [*map(asdict, swept)]}
            (args.out / "numbers.json").write_text(json.dumps(record, indent=0))
    return swept
