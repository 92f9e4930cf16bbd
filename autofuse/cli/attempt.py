"""`python -m autofuse try`: a user's program as it is and with its modules fused, side by side."""

from __future__ import annotations

import contextlib
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

COPIED = 64 << 20  # bytes of the working directory that each run gets a copy of; links to the rest
_LINKED = {"__pycache__", "node_modules"}
_CHILD = Path(__file__).with_name("child.py")
NO_FILE, MISSED, INTERRUPTED = 2, 124, 130  # exit statuses, as Python and shells have them
PLAIN, FUSED, AGAIN = "plain", "fused", "again"  # the runs, the last as the first
# less is no difference between two runs: of the time, and seconds, as first calls take, which
# measure both ways
_NOISE, _FIRST = 0.05, 0.2
_SHORT = 1.0  # seconds, of which first calls and compiles are too much
_MOST = 5  # files and pieces of advice that are named


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program."""

    status: int | None  # None where it did not end in time
    seconds: float
    stdout: bytes
    files: dict[str, bytes | None]  # what it left in its directory; None where that is a link
    facts: dict[str, Any]  # of child.py; empty where the process ended without them


def attempt(program: Sequence[str], timeout: float, once: bool = False) -> int:
    """Run `program` plain and fused, and print what differs; the exit status.

    program: a script and its arguments, or "-m", a module and its arguments. timeout: seconds for
    each run. once: fused alone. Where stdout or the status differ, it runs plain once more, for not
    every program says the same twice. The status is the program's own where it fails by itself, 1
    where fusing makes a difference, 124 where a run took too long, 130 after Ctrl-C, else 0.
    """
    if program[0] != "-m" and not os.path.exists(program[0]):
        _say(f"there is no file {program[0]!r} here")
        return NO_FILE
    shown = " ".join(["python", *program])
    ways = [FUSED] if once else [PLAIN, FUSED]
    each = "in a fresh process and in a copy of this directory"
    if once:
        _say(f"runs `{shown}` once, with the calls of its modules fused, {each}")
    else:
        _say(f"runs `{shown}` twice, as it is and with the calls of its modules fused, each {each}")
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="autofuse-try-") as top:
        for way in ways:
            place = Path(top, way)
            try:
                run = runs[way] = _run(program, FUSED if way == FUSED else PLAIN, place, timeout)
            except KeyboardInterrupt:
                _say("interrupted")
                return INTERRUPTED
            if run.status is None:
                _say(f"{way}: not done after {timeout:g} s; --timeout sets how long it may take")
                return MISSED
            print(f"{way:9s} {run.seconds:.2f} s, exit status {run.status}")
            if run.status and way == ways[0]:
                _say("the program failed" if once else "the program fails by itself")
                return run.status if run.status > 0 else 128 - run.status
            if way == FUSED and not once and not _agree(runs[PLAIN], run):
                _say("outputs differ: runs it as it is once more, to see whether it repeats itself")
                ways.append(AGAIN)
    return _compared(runs)


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
    seconds = time.perf_counter() - begun
    known = json.loads(facts.read_text()) if facts.exists() else {}
    after = _state(place)
    written = {
        name: None if after[name][0] else (place / name).read_bytes()
        for name in sorted(after)
        if after[name] != before.get(name)
    }
    return Run(status, known.get("seconds", seconds), out.read_bytes(), written, known)


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


def _compared(runs: dict[str, Run]) -> int:
    """Print what a fused run is beside a plain one, if there was one; the exit status."""
    fused, plain, again = runs[FUSED], runs.get(PLAIN), runs.get(AGAIN)
    same = True
    if plain is not None:
        ratio = fused.seconds / max(plain.seconds, 1e-9)
        if max(plain.seconds, fused.seconds) < _SHORT:
            word = "too short to tell"
        elif abs(ratio - 1) <= _NOISE or abs(fused.seconds - plain.seconds) <= _FIRST:
            word = "no different"
        else:
            word = "faster" if ratio < 1 else "slower"
        print(f"time      {ratio:.2f} of the plain run's: {word}")
    print("kernels   " + _kernels(fused.facts))
    if plain is not None:
        same = _agree(plain, fused)
        if again is not None and not _agree(plain, again):
            same = True  # as far as anybody can tell
            print("output    differs, but so it does between two runs of the program as it is: "
                  "chance, or a clock; a seed would help to compare")  # fmt: skip
        else:
            print("output    " + _output(plain, fused))
        changed = [name for name in plain.files | fused.files
                   if plain.files.get(name, b"") != fused.files.get(name, b"")]  # fmt: skip
        if plain.files or fused.files:
            more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
            print("files     " + (
                f"other bytes in {', '.join(changed[:_MOST])}{more}" if changed
                else f"the same, {len(plain.files)} written"
            ))  # fmt: skip
    advice = fused.facts.get("advice", [])
    for text in advice[:_MOST]:
        print(f"advice    {text}")
    if not advice:
        print("advice    " + _without_advice(fused.facts))
    return 0 if same else 1


def _agree(one: Run, other: Run) -> bool:
    """Whether two runs have the same to say."""
    return one.status == other.status and one.stdout == other.stdout


def _kernels(facts: dict[str, Any]) -> str:
    if "ops_recorded" not in facts:
        return "not known: the process ended without a word"
    ops, launched = facts["ops_recorded"], facts["kernels_launched"]
    if not ops:
        return "none: nothing was recorded"
    compiled, loaded = facts["kernels_compiled"], facts["kernels_loaded"]
    made = f"{compiled} compiled in this run, {loaded} loaded from disk"
    return f"{launched} launched for {ops} ops recorded; {made}"


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
