"""Every workload against every peer, in one run.

    python bench/run.py [--only TEXT] [--peers NAMES] [--budget 330] [--commit HASH]
    python bench/run.py --page bench/results/FILE.json [--into docs/performance.md]

Writes bench/results/<machine>.json, workload by workload, and prints the Markdown of the section of
docs/performance.md, which `--page` makes of a file again. All peers of a workload take turns in the
same rounds (timing.py). What a peer cannot run, or fails at, is a reason in its cell. When the
budget is spent, what is left gets that as its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
import alone  # noqa: E402
import machine  # noqa: E402
import tables  # noqa: E402
import timing  # noqa: E402
from peers import PEERS, Peer, Unsuited, arrays_of  # noqa: E402
from results import DIRECTORY, Cell, Results, load  # noqa: E402
from workloads import Program, Workload, chosen  # noqa: E402


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured."""

    rounds: int = timing.ROUNDS
    round_s: float = timing.ROUND_S
    scale: float = 1.0
    patience: float = 60.0  # s for one peer's first result
    deadline: float = float("inf")  # of time.perf_counter()
    budget: float = float("inf")  # s, for the reason

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def patient(self) -> float:
        """s for the next first result, so that one compile does not outlast the budget by much."""
        return min(self.patience, max(self.left, 10.0))


@dataclass(slots=True)
class Prepared:
    """What is kept of a peer between its first result and the rounds."""

    call: timing.Call
    first_s: float
    same_bits: bool | None


@dataclass(slots=True)
class Bench:
    """One workload in one run: the peers that can, and the reasons of those that cannot."""

    workload: Workload
    device: str
    limits: Limits
    prepared: dict[str, Prepared] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    want: list[torch.Tensor] = field(default_factory=list)  # eager's first results
    program: Program | None = None

    def prepare(self, peer: Peer) -> None:
        """Let a peer compute its first result, or note why it does not."""
        name = peer.name
        why = self.workload.leave_out.get(name) or peer.missing(self.device)
        if not why and self.limits.left < 0 and name not in ("eager", "autofuse"):
            why = f"left out: the budget of {self.limits.budget:.0f} s was spent"
        if why:
            self.reasons[name] = why
            return
        try:
            with within(self.limits.patient):
                self.prepared[name] = self._first(peer)
        except Unsuited as error:
            self.reasons[name] = str(error)
        except Exception as error:  # a peer's own failure is a result
            self.reasons[name] = timing.reason(error)

    def _first(self, peer: Peer) -> Prepared:
        program = self.workload.make(self.device, self.limits.scale)
        before = _copied(program.args) if program.mutates else None
        timing.synchronize(self.device)
        start = time.perf_counter()
        call = peer.prepare(self.workload, program)
        if program.grad and not peer.name.startswith("autofuse"):
            call = dataclasses.replace(call, run=timing.in_thread("engine", call.run))
        if before is not None:
            _restore(program.args, before)
        result = call.run()
        call.wait(result, self.device)
        first_s = time.perf_counter() - start
        got = arrays_of(result)
        same = None
        if peer.name == "eager":
            self.want, self.program = [t.clone() for t in got], program
        elif self.want:
            same = len(got) == len(self.want) and all(map(torch.equal, got, self.want))
        if peer.name == "autofuse.fuse":
            timing.settle(call.run, self.device)
        return Prepared(call, first_s, same)

    def measure(self) -> list[Cell]:
        """The cells of all peers, from interleaved rounds."""
        limits, workload = self.limits, self.workload
        self.want = []
        calls = {name: prepared.call for name, prepared in self.prepared.items()}
        gc.collect()
        series, failed = timing.measured(
            calls, self.device, workload.clock, limits.rounds, limits.round_s
        )  # fmt: skip
        self.reasons.update(failed)
        base = series.get("eager")
        cells = []
        for peer in PEERS:
            about: dict[str, Any] = {"clock": workload.clock}
            if peer.name in series:
                about |= self._figures(self.prepared[peer.name], series[peer.name], base)
            elif peer.name in self.reasons:
                about["reason"] = self.reasons[peer.name]
            else:
                continue
            cells.append(Cell(workload.label, self.device, peer.name, **about))
        return cells

    def _figures(
        self, prepared: Prepared, times: timing.Series, base: timing.Series | None
    ) -> dict[str, Any]:
        assert self.program is not None
        steps, nbytes = self.program.steps, self.program.nbytes
        on_device = self.workload.clock == "device"
        clock = "device" if on_device and prepared.call.on_stream else "host"
        return {
            "clock": clock,
            "median": round(times.median / steps, 4),
            "p20": round(times.p20 / steps, 4),
            "p80": round(times.p80 / steps, 4),
            "ratio": round(times.median / base.median, 4) if base else None,
            "tbps": round(nbytes / times.median / 1e6, 3) if nbytes and on_device else None,
            "first_s": round(prepared.first_s, 3),
            "same_bits": prepared.same_bits,
            "note": prepared.call.note,
        }


def bench(workload: Workload, peers: tuple[Peer, ...], device: str, limits: Limits) -> list[Cell]:
    """The cells of a workload."""
    torch.compiler.reset()
    grad = workload.make(device, min(limits.scale, 1e-3)).grad
    work = Bench(workload, device, limits)
    try:
        with torch.set_grad_enabled(grad):
            for peer in peers:
                work.prepare(peer)
            return work.measure()
    finally:
        del work
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value]


@torch.no_grad()
def _restore(value: Any, before: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.copy_(before)
        return
    for item, old in zip(value, before, strict=True):
        _restore(item, old)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError here after so many seconds, where signals can do that."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"no result after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10)  # again, where somebody swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- a run ---------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Results:
    start = time.perf_counter()
    limits = Limits(
        rounds=args.rounds,
        round_s=args.round_ms / 1e3,
        scale=args.scale,
        patience=args.patience,
        deadline=start + args.budget,
        budget=args.budget,
    )
    names = {"eager", *args.peers}  # whose ratios all others have
    peers = tuple(peer for peer in PEERS if not args.peers or peer.name in names)
    results = Results(machine.facts(args.device, args.commit))
    head = results.head | {"scale": args.scale, "rounds": args.rounds}
    results.head = head
    path = Path(args.out) / f"{args.name or machine.slug(head['machine'])}.json"
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for peer in peers:
        if why := peer.missing(args.device):
            print(f"without {peer.name}: {why}")
    on_cuda = args.device == "cuda"
    if on_cuda:
        head["clocks"] = {"idle": machine.clocks()}
    figures, why = alone.ask(args, args.budget / 4) if args.alone else ({}, "")
    if why:
        print(f"eager alone: {why}")
    seen = []
    for workload, device in chosen(args.device, args.only):
        print(f"\n{workload.label} on {device}, us by the {workload.clock}'s clock", flush=True)
        try:
            cells = bench(workload, peers, device, limits)
            if device == "cuda":
                seen.append(round(timing.sm_mhz()))
                head["clocks"]["sm_mhz"] = [min(seen), max(seen)]  # as its own kernels see it
        except Exception as error:  # such as a device that is lost; what was measured is kept
            cells = [Cell(workload.label, device, "eager", reason=timing.reason(error))]
        if (workload.label, device) in figures and cells[0].peer == "eager":
            cells.insert(1, _alone(figures[workload.label, device], cells[0]))
        results.cells += cells
        for cell in cells:
            print(f"  {cell}", flush=True)
        head["seconds"] = round(time.perf_counter() - start)
        results.save(path)
    if on_cuda and seen:
        timing.keep_busy("cuda", 0.5)
        head["clocks"]["busy"] = machine.clocks()
        torch.cuda.synchronize()
        results.save(path)
    print(f"\n{path.name} written after {time.perf_counter() - start:.0f} s")
    return results


def _alone(figures: alone.Figures, eager: Cell) -> Cell:
    median, p20, p80 = figures
    ratio = round(median / eager.median, 4) if eager.median else None
    return Cell(eager.workload, eager.device, "eager alone", "host", median, p20, p80, ratio)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", nargs="*", default=[], help="workloads whose label has this")
    options.add_argument("--peers", nargs="*", default=[], help="names, as in peers.py; and eager")
    options.add_argument("--no-alone", dest="alone", action="store_false",
                         help="without eager in a process that never imports autofuse")  # fmt: skip
    options.add_argument("--rounds", type=int, default=timing.ROUNDS)
    options.add_argument("--round-ms", type=float, default=timing.ROUND_S * 1e3)
    options.add_argument("--scale", type=float, default=1.0, help="of sizes and loops")
    options.add_argument("--budget", type=float, default=330.0, help="s, then peers are left out")
    options.add_argument("--patience", type=float, default=60.0, help="s for a first result")
    options.add_argument("--out", default=str(DIRECTORY), help="directory of the results")
    options.add_argument("--name", default="", help="of the file, if not the machine's")
    options.add_argument("--commit", default="", help="for the head; git is asked if not given")
    options.add_argument("--page", metavar="FILE", help="print the section of docs/ and end")
    options.add_argument("--into", metavar="PAGE", help="put it there between its markers")
    return options


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.page:
        section = tables.markdown(load(Path(args.page)), Path(args.page).name)
        if args.into:
            page = Path(args.into)
            page.write_text(tables.replaced(page.read_text(), section))
        else:
            print(section, end="")
        return
    logging.getLogger("torch").setLevel(logging.ERROR)  # compilers' advice
    autofuse.config.compile = "now"  # what is measured is not the way there
    autofuse.config.max_kernels_per_line = 1 << 30  # every workload is called from one line
    results = run(args)
    print(tables.markdown(results, "FILE"))


if __name__ == "__main__":
    main()
