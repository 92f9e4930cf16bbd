"""`python -m autofuse try`: a user's program as it is and with its modules fused, side by side."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .turns import FASTER, PAIRS, SLOWER, Told, told

COPIED = 64 << 20  # bytes of the working directory that each run gets a copy of; links to the rest
_LINKED = {"__pycache__", "node_modules"}
_CHILD = Path(__file__).with_name("child.py")
NO_FILE, MISSED, INTERRUPTED = 2, 124, 130  # exit statuses, as Python and shells have them
PLAIN, FUSED = "plain", "fused"  # the runs
_MOST = 5  # files and pieces of advice that are named


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program."""

    status: int | None  # None where it did not end in time
    seconds: float  # of the script; of its process where that ended without facts
    wall: float  # seconds of its process
    stdout: bytes
    files: dict[str, str]  # digests of what it left in its directory; "" of a link
    facts: dict[str, Any]  # of child.py; empty where the process ended without them


Runs = dict[str, list[Run]]


def attempt(program: Sequence[str], timeout: float, limit: float, once: bool = False) -> int:
    """Run `program` plain and fused in turns, and print what differs; the exit status.

    program: a script and its arguments, or "-m", a module and its arguments. timeout: seconds for
    each run. limit: seconds after which no more turns begin. once: fused alone, a single time.
    Where stdout, the status or files differ, it runs plain a second time at least, for not every
    program says the same twice. The status is the program's own where it fails by itself, 1 where
    fusing makes a difference, 124 where a run took too long, 130 after Ctrl-C, else 0.
    """
    if program[0] != "-m" and not os.path.exists(program[0]):
        _say(f"there is no file {program[0]!r} here")
        return NO_FILE
    shown = " ".join(["python", *program])
    each = "in a fresh process and in a copy of this directory"
    if once:
        _say(f"runs `{shown}` once, with the calls of its modules fused, {each}")
    else:
        _say(f"runs `{shown}` in turns as it is and with the calls of its modules fused, until a "
             f"difference stands out of the noise: twice at least, {2 * PAIRS} times at most, no "
             f"more turns after {limit:g} s (--limit), each {each}")  # fmt: skip
    runs: Runs = {PLAIN: [], FUSED: []}
    for way in [FUSED] if once else _turns(runs, limit):
        try:
            with tempfile.TemporaryDirectory(prefix="autofuse-try-") as top:
                run = _run(program, way, Path(top, way), timeout)
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED
        if run.status is None:
            _say(f"{way}: not done after {timeout:g} s; --timeout sets how long it may take")
            return MISSED
        print(f"{way:9s} {run.seconds:.2f} s, exit status {run.status}", flush=True)
        if run.status and (once or way == PLAIN):
            _say("the program failed" if once else "the program fails by itself")
            return run.status if run.status > 0 else 128 - run.status
        if run.facts.get("imports") and not runs[way]:
            _say("the program imports autofuse: what it fuses by itself is fused in both")
        runs[way].append(run)
    return _compared(runs)


def _turns(runs: Runs, limit: float) -> Iterator[str]:
    """The ways of running it, one after another; `runs` has what became of those before."""
    plain, fused = runs[PLAIN], runs[FUSED]
    while not plain or not (_is_enough(runs) or sum(run.wall for run in plain + fused) >= limit):
        yield PLAIN
        yield FUSED
    differs = not _agree(plain[0], fused[0]) or plain[0].files != fused[0].files
    if len(plain) == 1 and differs:
        _say("outputs differ: runs it as it is once more, to see whether it repeats itself")
        yield PLAIN


def _is_enough(runs: Runs) -> bool:
    """Whether more runs would tell nothing more of which is faster."""
    fused = runs[FUSED][-1]
    if fused.status or not fused.facts.get("calls"):
        return True
    return _told(runs).word is not None


def _told(runs: Runs) -> Told:
    pairs = len(runs[FUSED])  # there may be a plain run more
    return told(*([run.seconds for run in runs[way][:pairs]] for way in (PLAIN, FUSED)))


def _say(text: str) -> None:
    print(f"autofuse try: {text}", file=sys.stderr, flush=True)


def _run(program: Sequence[str], way: str, place: Path, timeout: float) -> Run:
    """Run `program` in a copy of the working directory, which is made at `place`."""
    place.mkdir()
    _copy(Path.cwd(), place, COPIED, place.parent)
    before = _state(place)
    facts, out = place.with_suffix(".json"), place.with_suffix(".out")
    command = [sys.executable, str(_CHILD), way, str(facts), *program]
    path = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(one) for one in path.split(os.pathsep) if one]
    if way == "fused":
        paths.append(str(Path(__file__).parents[2]))  # where this package was found
    begun = time.perf_counter()
    with out.open("wb") as stdout:
        process = subprocess.Popen(
            command, cwd=place, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            raise
        finally:
            _signal(process, signal.SIGKILL)  # and what it has started
            process.wait()
    wall = time.perf_counter() - begun
    known = json.loads(facts.read_text()) if facts.exists() else {}
    after = _state(place)
    written = {
        name: "" if after[name][0] else _digest(place / name)
        for name in sorted(after)
        if after[name] != before.get(name)
    }
    return Run(status, known.get("seconds", wall), wall, out.read_bytes(), written, known)


def _digest(path: Path) -> str:
    """Of what is in the file, which may be a checkpoint of gigabytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _copy(source: Path, target: Path, budget: int, without: Path) -> int:
    """Copy what lies in `source`, files first, and link what `budget` does not allow; what is
    left of it."""
    with os.scandir(source) as found:
        entries = sorted(found, key=lambda entry: (entry.is_dir(), entry.name))
    for entry in entries:
        copy = target / entry.name
        if Path(entry.path) == without:  # a temporary directory of this call
            continue
        if entry.is_file(follow_symlinks=False) and entry.stat().st_size <= budget:
            shutil.copy2(entry.path, copy)
            budget -= entry.stat().st_size
        elif (
            entry.is_dir(follow_symlinks=False)
            and entry.name not in _LINKED
            and not entry.name.startswith(".")
            and not (Path(entry.path) / "pyvenv.cfg").exists()
            and budget > 0
        ):
            copy.mkdir()
            budget = _copy(Path(entry.path), copy, budget, without)
        else:
            copy.symlink_to(entry.path)
    return budget


def _state(place: Path) -> dict[str, tuple[bool, int, int]]:
    """Of every file below `place`: whether it is a link, its time and its size."""
    return {
        str(path.relative_to(place)): (path.is_symlink(), info.st_mtime_ns, info.st_size)
        for path in _files(place)
        for info in (path.lstat(),)
    }


def _files(place: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name not in _LINKED]
        yield from (Path(folder, name) for name in names)


def _compared(runs: Runs) -> int:
    """Print what fused runs are beside plain ones, if there were any; the exit status."""
    plain, fused = runs[PLAIN], runs[FUSED]
    same = True
    if plain:
        print("time      " + _time(runs))
    print("kernels   " + _kernels(fused))
    if plain:
        odd = next((run for run in fused if run.status != plain[0].status), None)
        # a status is never by chance here: no plain run has another
        repeats = odd is not None or all(_agree(plain[0], run) for run in plain)
        odd = odd or next((run for run in fused if not _agree(plain[0], run)), None)
        same = odd is None or not repeats  # as far as anybody can tell
        if odd is not None and not repeats:
            print("output    differs, but so it does between two runs of the program as it is: "
                  "chance, or a clock; a seed would help to compare")  # fmt: skip
        else:
            print("output    " + _output(plain[0], odd or fused[0]))
        if plain[0].files or fused[0].files:
            print("files     " + _files_written(runs))
    advice = fused[-1].facts.get("advice", [])
    for text in advice[:_MOST]:
        print(f"advice    {text}")
    if not advice:
        print("advice    " + _without_advice(fused[-1].facts))
    return 0 if same else 1


def _time(runs: Runs) -> str:
    """How long the fused runs took beside the plain ones, and what can be told of that."""
    facts = runs[FUSED][-1].facts
    if any("seconds" not in run.facts for run in runs[PLAIN] + runs[FUSED]):
        return "not known: the process ended without a word"
    if runs[FUSED][-1].status:
        return "not compared, for the fused run failed"
    if not facts.get("calls"):
        return "not compared, for there was nothing to fuse"
    found = _told(runs)
    pairs = "1 pair of runs" if found.pairs == 1 else f"{found.pairs} pairs of runs"
    counted = f", by {pairs}" + ", the first not counted" * (len(runs[FUSED]) > 1)
    said = f"{found.ratio:.2f} of the plain runs'"
    if found.low:
        said += f" ({found.low:.2f} to {found.high:.2f}{counted})"
    if found.word is None and found.low:
        return f"{said}: no difference that can be told so far; --limit lets it run more often"
    if found.word is None:
        return f"{said}{counted}: not enough to tell; --limit lets it run more often"
    if not facts.get("ops_recorded") and found.word != SLOWER:
        chance = ", and the rest is chance" if found.word == FASTER else ""
        return f"{said}: no difference, for nothing was fused{chance}"
    return f"{said}: {found.word}"


def _files_written(runs: Runs) -> str:
    """Which files have other bytes after a fused run, those aside that differ by themselves."""

    def changed(others: list[Run]) -> list[str]:
        names = {name for run in (first, *others) for name in run.files}
        return sorted(
            name for name in names
            if any(run.files.get(name) != first.files.get(name) for run in others)
        )  # fmt: skip

    first = runs[PLAIN][0]
    chance = changed(runs[PLAIN])
    other = [name for name in changed(runs[FUSED]) if name not in chance]
    more = f" and {len(other) - _MOST} more" if len(other) > _MOST else ""
    said = f"other bytes in {', '.join(other[:_MOST])}{more}" if other else "the same"
    said += f", {len(first.files)} written" * (not other)
    return said + f"; {len(chance)} differ without fusing too" * bool(chance)


def _agree(one: Run, other: Run) -> bool:
    """Whether two runs have the same to say."""
    return one.status == other.status and one.stdout == other.stdout


def _kernels(fused: list[Run]) -> str:
    facts = fused[-1].facts
    if "ops_recorded" not in facts:
        return "not known: the process ended without a word"
    ops, launched = facts["ops_recorded"], facts["kernels_launched"]
    if not ops:
        return "none: nothing was recorded"
    compiled = fused[0].facts["kernels_compiled"]
    return f"{launched} launched for {ops} ops recorded; {compiled} compiled in the first run"


def _output(plain: Run, fused: Run) -> str:
    if plain.status != fused.status:
        return f"exit status {fused.status} instead of {plain.status}"
    if plain.stdout == fused.stdout:
        return f"the same, {len(plain.stdout)} bytes on stdout"
    lines = zip(plain.stdout.splitlines(), fused.stdout.splitlines(), strict=False)
    number, was, now = next(
        ((k, a, b) for k, (a, b) in enumerate(lines, 1) if a != b), (0, b"", b"")
    )
    if not number:
        return f"{len(fused.stdout)} bytes on stdout instead of {len(plain.stdout)}"
    texts = (line.decode(errors="replace")[:200] for line in (now, was))
    said = f"line {number} of stdout is {next(texts)!r} instead of {next(texts)!r}"
    on_host = fused.facts.get("ops_recorded") and not fused.facts.get("cuda", True)
    return said + "; on a CPU functions may differ in the last places" * bool(on_host)


def _without_advice(facts: dict[str, Any]) -> str:
    if not facts.get("calls"):
        return "no module of torch.nn was called; decorate the functions that compute"
    if not facts.get("ops_recorded"):
        return "no op of the table met a tensor; autofuse.explain says what did"
    return "none"
