"""Whole programs as users write them, before and after the one line that autofuse asks for.

    python bench/zoo.py [--only NAME ...] [--rounds 25] [--steps N] [--device cuda] [--out FILE]

The programs (zoo_*.py) know nothing of autofuse. Each runs eagerly, with its step given to
`autofuse.fuse`, with the tensors that it starts from given to `autofuse.wrap`, and each once more
with `config.measure = False`, where every call is fused and every result wrapped. They go on from
the same seed and take turns, once fused calls have found their way and results have come to stay
plain or not, which each row finds anew; a row's figure is the median over the rounds of the ratio
to eager. Eager runs twice: what the second run takes of the first is by chance. Results,
parameters, buffers and gradients after some steps, and after all that was timed, are compared with
eager's: on CUDA bit for bit, on the CPU the largest difference is said. Writes
bench/results/zoo_<machine>.json, row by row, and prints the table, worst first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import autofuse
from autofuse.record import origins

sys.path.insert(0, str(Path(__file__).parent))
import machine  # noqa: E402
import timing  # noqa: E402
import zoo_calculus  # noqa: E402, F401 - registers its rows
import zoo_cells  # noqa: E402, F401
import zoo_learning  # noqa: E402, F401
import zoo_networks  # noqa: E402, F401
import zoo_others  # noqa: E402, F401
import zoo_physics  # noqa: E402, F401
from peers import arrays_of, wrapped_args  # noqa: E402
from results import DIRECTORY, Cell, Results  # noqa: E402
from training import count_kernels  # noqa: E402
from zoo_row import ROWS, Row  # noqa: E402

AGAIN = "eager, again"  # what differs from eager by chance
EVERY, ALL = "autofuse.fuse, every call", "autofuse, every result"  # without `config.measure`
# a peer, and its column
VARIANTS = {"eager": "eager", AGAIN: "eager again", "autofuse.fuse": "fuse", EVERY: "every call",
            "autofuse": "wrap", ALL: "every result"}  # fmt: skip
LIMITS = {
    "autofuse.fuse": 1.02,
    EVERY: 1.02,
    "autofuse": 1.05,
    ALL: 1.05,
}  # of eager's time, from which on it loses
CHECKED = 6  # steps whose outcome is compared
REPEATS = 4  # of eager, to see whether it gives the same bits
PASSES = 12  # of CHECKED steps each, at most, until no new kernel is needed
ROUND_S = 0.01  # of one variant in one round: short, for what else a host does comes and goes
FEWEST, MOST = 1, 100  # steps of it
_AHEAD = 1 << 14  # nodes, more than the checked steps of a program make in backward


class Run:
    """A program from its beginning on, in one variant, with random numbers of its own."""

    def __init__(self, row: Row, peer: str, device: str, seed: int = 0, size: str = "full") -> None:
        if device == "cuda":
            _number_above_the_engine()
        start = row.make(device, seed, size)
        self.step, self.state, self.modules = start.step, start.state, start.modules
        self._feeds, self._grad, self._wrapped = start.feeds, row.grad, peer in ("autofuse", ALL)
        self.result: Any = None  # of the last step
        self._measures = peer not in (EVERY, ALL)
        # where PyTorch runs backward
        self._thread = "engine" if peer in ("eager", AGAIN) else "auto"
        self._numbers = _random_state(device)
        if peer.startswith("autofuse.fuse"):
            self.step = autofuse.fuse(self.step)
        elif self._wrapped:
            self.state = wrapped_args(self.state)

    @contextlib.contextmanager
    def drawing_on(self) -> Iterator[None]:
        """Draw what follows the random numbers that it has drawn, whoever has drawn since."""
        torch.set_rng_state(self._numbers[0])
        if self._numbers[1] is not None:
            torch.cuda.set_rng_state(self._numbers[1])
        yield
        self._numbers = _random_state("cpu" if self._numbers[1] is None else "cuda")

    def advance(self, steps: int) -> None:
        """So many steps, computed to their end where somebody reads their results."""
        autofuse.config.measure = self._measures
        vars(autofuse.config)["backward_thread"] = self._thread  # set by name, it ends every chain
        with torch.set_grad_enabled(self._grad):
            for _ in range(steps):
                self.result = result = self.step(*self.state)
                if self._feeds:
                    results = result if isinstance(result, (tuple, list)) else (result,)
                    self.state = (*results[: self._feeds], *self.state[self._feeds :])
                elif self._wrapped:
                    autofuse.materialize(result)
            if self._wrapped:
                autofuse.materialize(self.result)

    def outcome(self) -> list[torch.Tensor]:
        """All that the steps gave or changed, as copies."""
        seen: list[Any] = [self.result, self.state]
        for module in self.modules:
            seen += [*module.parameters(), *module.buffers()]
            seen += [p.grad for p in module.parameters() if p.grad is not None]
        return [t.clone() for t in arrays_of(seen)]


def _number_above_the_engine() -> None:
    """Let the nodes that this thread makes have higher numbers than those of the engine's thread.

    In the order of these numbers gradients of gradients add up, so that eager's own bits depend on
    how many nodes each thread has made since the process began.
    """
    x = torch.ones(1, device="cuda", requires_grad=True)
    (slope,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    of_engine: Any = slope.grad_fn
    while (x * x).grad_fn._sequence_nr() < of_engine._sequence_nr() + _AHEAD:
        pass


def _random_state(device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the CPU's generator, and of the GPU's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None


# --- comparing -----------------------------------------------------------------------------------


def same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Also dtypes and strides; any NaN is as good as another."""
    return len(got) == len(want) and all(
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and bool(_equal(a, b).all())
        for a, b in zip(got, want, strict=True)
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


def apart(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference, in units in the last place of its tensor's largest value."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if not b.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else math.inf)
        elif b.numel():
            unit = b.abs().max().item() * torch.finfo(b.dtype).eps or 1.0
            units = ((a - b).abs() / unit).masked_fill(_equal(a, b), 0.0)
            worst = max(worst, units.nan_to_num(math.inf).max().item())
    return worst


@dataclasses.dataclass(slots=True)
class Check:
    """What CHECKED steps gave in every variant, cold and with all kernels there."""

    same: dict[str, bool]  # as eager's, by peer, in every pass
    apart: dict[str, float]
    failed: dict[str, str]
    first_s: dict[str, float]
    repeats: bool = True  # eager gives the same bits each time...
    deterministic: bool = False  # ...or with torch.use_deterministic_algorithms
    us: float = 0.0  # of a step of eager's


def check(row: Row, device: str, size: str = "full", steps: int = CHECKED) -> Check:
    """Run every variant until it needs no new kernel, and compare each pass with eager's."""
    found = Check({}, {}, {}, {})
    first_us, want = _run_eager(row, device, size, steps)
    found.first_s["eager"] = first_us / 1e6
    for _ in range(REPEATS):
        us, again = _run_eager(row, device, size, steps)
        found.us, found.repeats = us / steps, found.repeats and same_bits(again, want)
    try:
        if not found.repeats:  # sums by atomic additions, in whatever order they come
            torch.use_deterministic_algorithms(True, warn_only=True)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                _, want = _run_eager(row, device, size, steps)
                _, again = _run_eager(row, device, size, steps)
            remain = any("deterministic implementation" in str(one.message) for one in told)
            found.deterministic = same_bits(again, want) and not remain  # twice may be by chance
        for peer in list(VARIANTS)[1:]:
            try:
                _check_one(found, want, row, peer, device, size, steps)
            except Exception as error:  # a variant's failure is a result
                found.failed[peer] = timing.reason(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def _run_eager(row: Row, device: str, size: str, steps: int) -> tuple[float, list[torch.Tensor]]:
    """How long it took, in us, and what it gave."""
    run = Run(row, "eager", device, size=size)
    return timing.host_us(lambda: run.advance(steps), device, 1), run.outcome()


def _check_one(
    found: Check, want: list[torch.Tensor], row: Row, peer: str, device: str, size: str, steps: int
) -> None:
    found.same[peer], found.apart[peer] = True, 0.0
    for count in range(PASSES):
        before = _kernels_made()
        run = Run(row, peer, device, size=size)
        seconds = timing.host_us(lambda: run.advance(steps), device, 1) / 1e6
        autofuse.wait()
        got = run.outcome()
        found.same[peer] &= same_bits(got, want)
        found.apart[peer] = max(found.apart[peer], apart(got, want))
        found.first_s.setdefault(peer, seconds)
        if count and _kernels_made() == before:
            return


def _kernels_made() -> int:
    stats = autofuse.stats()
    return stats.kernels_compiled + stats.kernels_loaded


# --- measuring -----------------------------------------------------------------------------------


def measure(row: Row, device: str, rounds: int, steps: int = 0, size: str = "full") -> list[Cell]:
    """The cells of a row; steps: timed in a round, 0 for as many as take ROUND_S."""
    if row.needs and importlib.util.find_spec(row.needs) is None:
        return [Cell(row.name, device, peer, reason="not installed") for peer in VARIANTS]
    origins.forget()  # modules of torch and of packages are several rows'
    found = check(row, device, size)
    steps = steps or min(MOST, max(FEWEST, math.ceil(ROUND_S * 1e6 / found.us)))
    peers = [peer for peer in VARIANTS if peer not in found.failed]
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    runs = {peer: Run(row, peer, device, size=size) for peer in peers}
    for run in runs.values():
        with run.drawing_on():
            run.advance(timing.settling(found.us))
    gc.collect()
    gc.freeze()  # or a collection of all that was made so far meets one of them
    for k in range(rounds):
        turn = k % len(peers)  # nobody always follows the same neighbour
        for peer in peers[turn:] + peers[:turn]:
            run = runs[peer]
            with run.drawing_on():
                times[peer].append(timing.host_us(lambda: run.advance(steps), device, 1) / steps)
    gc.unfreeze()
    want = runs["eager"].outcome()
    for peer in peers[1:] if found.repeats else ():
        found.same[peer] &= same_bits(runs[peer].outcome(), want)
    return [_cell(row, device, peer, times, found) for peer in VARIANTS]


def _cell(row: Row, device: str, peer: str, times: dict[str, list[float]], found: Check) -> Cell:
    if peer in found.failed:
        return Cell(row.name, device, peer, reason=found.failed[peer])
    series = timing.Series(times[peer])
    ratios = [ours / eager for ours, eager in zip(times[peer], times["eager"], strict=True)]
    same, note = None, ""
    if peer != "eager" and device == "cpu":
        note = f"{found.apart[peer]:.3g} ulp apart" if found.apart[peer] else ""
    elif peer != "eager" and (found.repeats or found.deterministic):
        same = found.same[peer]
        note = "" if found.repeats else f"{_SAME[same]}, deterministic"
    elif peer != "eager":
        note = "eager differs from itself"
    return Cell(row.name, device, peer, median=round(series.median, 2), p20=round(series.p20, 2),
                p80=round(series.p80, 2), ratio=round(statistics.median(ratios), 4),
                first_s=round(found.first_s[peer], 3), same_bits=same, note=note)  # fmt: skip


def kernels_of(row: Row, peer: str, device: str) -> int:
    """Kernels of one step in the steady state."""
    run = Run(row, peer, device)
    run.advance(timing.SETTLED)  # so that this is the better way's
    return count_kernels(lambda: run.advance(1))


# --- showing -------------------------------------------------------------------------------------


def line(cells: Iterable[Cell]) -> str:
    """What is known of a row as soon as it is measured."""
    cells = list(cells)
    parts = []
    for cell in cells:
        if cell.median is None:
            parts.append(f"{VARIANTS[cell.peer]} - {cell.reason}")
        elif cell.peer == "eager":
            parts.append(f"{cell.median:10.1f} us")
        else:
            parts.append(f"{VARIANTS[cell.peer]} {cell.ratio:.3f} {_bits(cell)}")
    if all(cell.reason == "not installed" for cell in cells):
        parts = ["not installed"]
    return f"{cells[0].workload:38s}{'  '.join(parts)}"


_SAME = {True: "same", False: "OTHER", None: "-"}


def _bits(cell: Cell | None) -> str:
    if cell is None or cell.median is None:
        return cell.reason if cell else ""
    return cell.note or _SAME[cell.same_bits]


def markdown(results: Results) -> str:
    """The table, worst ratio first, and what follows from it."""
    rows = [(name, cells) for name, _, cells in results.rows() if cells["eager"].median]
    columns = [f"{VARIANTS[peer]}" for peer in LIMITS]
    counted = any(cell.kernels is not None for cell in results.cells)
    heads = ["program", "eager, us", VARIANTS[AGAIN], *columns]
    heads += ["kernels", *(f"of {name}" for name in columns)] if counted else []
    heads += [f"bits of {name}" for name in columns]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, cells in sorted(rows, key=lambda row: -_worst(row[1])):
        eager = cells["eager"]
        assert eager.median is not None
        ours = [cells[peer] for peer in LIMITS]
        fields = [name, f"{eager.median:.0f}", _ratio(cells[AGAIN])]
        fields += [_ratio(cell) for cell in ours]
        if counted:
            fields += [str(c.kernels) if c.kernels is not None else "" for c in (eager, *ours)]
        fields += [_bits(cell) for cell in ours]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join([*lines, "", *_verdict(rows), *_absent(results)]) + "\n"


def _ratio(cell: Cell) -> str:
    return f"{cell.ratio:.2f}" if cell.ratio is not None else "-"


def _worst(cells: dict[str, Cell]) -> float:
    """What a row is sorted by: what users get; one that failed comes first."""
    ratios = [cells[peer].ratio for peer in LIMITS if peer not in (EVERY, ALL)]
    return math.inf if None in ratios else max(r for r in ratios if r is not None)


def _verdict(rows: list[tuple[str, dict[str, Cell]]]) -> list[str]:
    lines = []
    for peer, limit in LIMITS.items():
        cells = [cells[peer] for _, cells in rows]
        ratios = {cell.workload: cell.ratio for cell in cells if cell.ratio is not None}
        if not ratios:
            continue
        worst = max(ratios, key=lambda name: ratios[name])
        over = sum(ratio > limit for ratio in ratios.values())
        known = [cell for cell in cells if cell.same_bits is not None]
        text = (
            f"- {VARIANTS[peer]}: median {statistics.median(ratios.values()):.3f}, worst "
            f"{ratios[worst]:.3f} ({worst}), {over} of {len(ratios)} over {limit}"
        )
        if known:
            text += f"; eager's bits in {sum(bool(c.same_bits) for c in known)} of {len(known)}"
        failed = [f"{c.workload} ({c.reason})" for c in cells if c.reason]
        lines.append(text + (f"; FAILED: {'; '.join(failed)}" if failed else "") + ".")
    return lines


def _absent(results: Results) -> list[str]:
    absent = [name for name, _, cells in results.rows() if cells["eager"].reason]
    return [f"- Not installed: {'; '.join(absent)}."] if absent else []


# --- a run ---------------------------------------------------------------------------------------


def chosen(only: list[str]) -> list[Row]:
    names = [text for words in only for text in words.split(",")]
    rows = [row for row in ROWS if not names or any(text in row.name for text in names)]
    if not rows:
        raise SystemExit(f"no program's name has {' or '.join(names)}")
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=0, help="per round; default: those of 10 ms")
    parser.add_argument("--only", nargs="*", default=[], help="programs whose name has this")
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--out", type=Path, help="default: bench/results/zoo_<machine>.json")
    args = parser.parse_args(argv)
    autofuse.config.compile = "now"  # what is measured is not the way there
    begun = time.perf_counter()
    print(machine.machine(args.device), flush=True)
    results = Results(machine.facts(args.device) | {"rounds": args.rounds})
    path = args.out or DIRECTORY / f"zoo_{machine.slug(results.head['machine'])}.json"
    rows = chosen(args.only)
    for row in rows:
        cells = measure(row, args.device, args.rounds, args.steps, args.size)
        print(line(cells), flush=True)
        results.cells += cells
        results.head["seconds"] = round(time.perf_counter() - begun)
        results.save(path)
    if args.device == "cuda":  # after all timing: the profiler's hooks stay and cost
        by_name = {row.name: row for row in rows}
        results.cells = [_counted(cell, by_name[cell.workload]) for cell in results.cells]
        results.save(path)
    print(f"\n{markdown(results)}\n{path.name} written after {time.perf_counter() - begun:.0f} s")


def _counted(cell: Cell, row: Row) -> Cell:
    if cell.median is None or cell.peer == AGAIN:
        return cell
    return dataclasses.replace(cell, kernels=kernels_of(row, cell.peer, cell.device))


if __name__ == "__main__":
    main()
