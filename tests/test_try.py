"""`python -m autofuse try`: a program plain and fused, in processes of their own."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autofuse.__main__ import main
from autofuse.cli import attempt
from autofuse.cli.attempt import Run, _compared, _copy
from autofuse.cli.turns import EQUAL, FASTER, PAIRS, SLOWER, TOO_SHORT, told

ROOT = Path(__file__).parent.parent

SCRIPT = """
import argparse, os, pathlib, sys
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--then", default="")
args = parser.parse_args()


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return ((self.inner(x) * 2 + 1) * x - 0.5).sigmoid() * x + x * 3 - 1


cell, x, total = Cell(), torch.ones(2048, 4), 0.0
torch.set_grad_enabled(False)
for _ in range(args.steps):
    total += cell(x).sum().item() * 0
print(total, type(cell(x)).__name__, __name__, pathlib.Path("data.txt").read_text())
pathlib.Path("written.txt").write_text("done")
pathlib.Path("data.txt").write_text("overwritten")
if args.then == "wait":
    print("waiting", file=sys.stderr, flush=True)
    import time; time.sleep(60)
if args.then:
    raise SystemExit(int(args.then))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the script `model.py`, from where autofuse is called."""
    (tmp_path / "model.py").write_text(SCRIPT)
    (tmp_path / "data.txt").write_text("read")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_a_script_runs_plain_and_fused(place, capfd):
    """Its arguments, its files, its module's calls and its `__main__` are what they are."""
    assert main(["try", "--timeout", "240", "model.py", "--steps", "9"]) == 0
    said, asides = capfd.readouterr()
    assert "runs `python model.py --steps 9` in turns" in asides
    assert "twice at least, 18 times at most, no more turns after 300 s" in asides
    rows = dict(line.split(maxsplit=1) for line in said.splitlines() if "advice" not in line)
    assert rows["plain"].endswith("s, exit status 0") and rows["fused"].endswith("exit status 0")
    assert "of the plain runs'" in rows["time"]
    assert rows["output"] == f"the same, {len('0.0 Tensor __main__ read') + 1} bytes on stdout"
    assert rows["files"] == "the same, 2 written"
    launched, ops = (int(rows["kernels"].split()[k]) for k in (0, 3))
    assert 0 < launched < ops
    assert re.search(r"item\(\).* at \S*model.py:23 reads a value every step \(3 times\)", said)
    assert (place / "data.txt").read_text() == "read" and not (place / "written.txt").exists()


def test_a_module_that_fails_fails(place, capfd):
    assert main(["try", "--once", "-m", "model", "--then", "3"]) == 3
    assert "python -m model --then 3` once" in capfd.readouterr().err


def test_a_run_that_takes_too_long_is_ended(place, capfd):
    assert main(["try", "--timeout", "0.2", "model.py"]) == 124
    assert "plain: not done after 0.2 s" in capfd.readouterr().err


def test_only_the_outermost_calls_are_fused(monkeypatch):
    """As where the model alone is fused; the modules in it pay nothing."""
    import torch

    monkeypatch.setattr(sys, "path", ["its own folder, which it takes away", *sys.path])
    from autofuse.cli.child import Clock, watched

    told = []
    plain = torch.nn.Module.__call__
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Tanh()))

    def fused(module, *args):
        told.append(module)
        return plain(module, *args)

    clock = Clock()
    monkeypatch.setattr(torch.nn.Module, "__call__", watched(plain, fused, clock, None))
    for _ in range(3):
        model(torch.ones(2))
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    model(torch.ones(2))
    assert told == [model] * 5 and clock.calls == 5 and clock.depth == 0


def test_a_program_that_does_not_repeat_itself(place, capfd):
    """It is run as it is once more, and fusing is not blamed."""
    (place / "chance.py").write_text("import time, torch; print(time.time_ns())")
    assert main(["try", "chance.py"]) == 0
    said, asides = capfd.readouterr()
    assert "outputs differ: runs it as it is once more" in asides
    assert len(re.findall(r"^plain +\S+ s, exit status 0$", said, re.M)) == 2
    assert "differs, but so it does between two runs of the program as it is" in said


def test_a_program_that_fuses_by_itself_is_told_so(place, capfd):
    """Once: what it has of autofuse is no difference between the ways."""
    (place / "own.py").write_text(
        "import autofuse, torch\nx = autofuse.wrap(torch.ones(4096))\nprint((x * 2 + x).sum())\n"
    )
    assert main(["try", "own.py"]) == 0
    assert capfd.readouterr().err.count("the program imports autofuse") == 1
    (place / "other.py").write_text("import torch\nprint('autofuse')\n")
    assert main(["try", "other.py"]) == 0
    assert "imports autofuse" not in capfd.readouterr().err


def test_a_script_that_is_not_there(place, capsys):
    assert main(["try", "other.py", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "autofuse try: there is no file 'other.py' here\n"


def test_its_own_help_and_wrong_arguments(place, capfd):
    """Of a program that asks argparse, which leaves by SystemExit."""
    assert main(["try", "model.py", "--help"]) == 0
    said = capfd.readouterr().out
    assert "output    the same" in said and "no module of torch.nn was called" in said
    assert main(["try", "model.py", "--bogus"]) == 2
    said, asides = capfd.readouterr()
    assert "unrecognized arguments: --bogus" in asides
    assert asides.endswith("the program fails by itself\n") and "fused" not in said


def test_a_package(place, capfd):
    """Its modules import each other, and its arguments are its own."""
    package = place / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text("def answer():\n    return 42\n")
    (package / "__main__.py").write_text(
        "import sys, torch\nfrom .model import answer\n"
        "print(answer(), sys.argv[1:], __name__, torch.nn.Tanh()(torch.ones(2)).shape)"
    )
    assert main(["try", "-m", "package", "--alpha", "3"]) == 0
    expected = len("42 ['--alpha', '3'] __main__ torch.Size([2])") + 1
    assert f"output    the same, {expected} bytes on stdout" in capfd.readouterr().out


def test_interrupted(place):
    """By Ctrl-C: the program is gone, and nothing is left of it."""
    command = [sys.executable, "-m", "autofuse", "try", "model.py", "--then", "wait"]
    environment = {**os.environ, "TMPDIR": str(place / "tmp")}
    (place / "tmp").mkdir()
    # a shell has its background jobs ignore Ctrl-C, which a child would inherit
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting" in line:
            break
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and rest.endswith("autofuse try: interrupted\n")
    assert time.monotonic() - began < 40
    assert not list((place / "tmp").iterdir())


def test_without_a_program(capsys):
    assert main(["try"]) == 2
    assert "give a script" in capsys.readouterr().err


# which is faster


def trial(rng, ratio, spread, cold=1.0, seconds=10.0, hiccups=0.0):
    """(word, runs of each) for a program whose fused runs take `ratio` of the plain ones' time.

    spread: deviation of the logarithm of a run's time. cold: of the first run. hiccups: which part
    of the runs takes half as long again.
    """
    plain, fused = [], []
    while len(plain) <= PAIRS:
        for times, usual in ((plain, seconds * cold), (fused, seconds * ratio)):
            slow = 1.5 if rng.random() < hiccups else 1.0
            times.append(usual * rng.lognormvariate(0.0, spread) * slow)
            cold = 1.0
        word = told(plain, fused).word
        if word is not None:
            return word, len(plain)
    raise AssertionError("no end")


@pytest.mark.parametrize("spread", [0.005, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("hiccups", [0.0, 0.1])
def test_what_chance_does_is_no_difference(spread, hiccups):
    """Whatever the first run takes; what is faster is seldom called slower."""
    rng = random.Random(7)
    for cold in (1.0, 1.5, 5.0):
        words = [trial(rng, 1.0, spread, cold, hiccups=hiccups)[0] for _ in range(300)]
        assert words.count(EQUAL) >= 0.96 * len(words)
    for ratio, wrong in ((0.9, SLOWER), (1.1, FASTER)):
        words = [trial(rng, ratio, spread, 1.5, hiccups=hiccups)[0] for _ in range(300)]
        assert words.count(wrong) <= 0.02 * len(words)


@pytest.mark.parametrize("ratio, word", [(0.5, FASTER), (0.8, FASTER), (1.25, SLOWER)])
def test_a_difference_is_told_and_soon(ratio, word):
    rng = random.Random(7)
    for spread, runs in ((0.005, 4), (0.02, 5), (0.05, 7)):
        found = [trial(rng, ratio, spread, 3.0) for _ in range(300)]
        assert sum(said == word for said, _ in found) >= 0.99 * len(found)
        assert sum(count for _, count in found) <= runs * len(found)


def test_a_colder_first_run_is_not_slower():
    """As one pair had it, of a program in which nothing fused."""
    cold, warm = 14.0, 10.0
    assert told([cold], [warm]).word is None
    assert told([cold, warm], [warm, warm]).word is None
    found = told([cold, warm, warm], [warm, 1.001 * warm, warm])
    assert found.word == EQUAL and found.pairs == 2 and found.low < 1 < found.high


@pytest.mark.parametrize(
    "plain, fused, word",
    [
        ([0.5], [0.9], TOO_SHORT),
        ([0.5], [2.9], None),  # has kernels to compile
        ([0.5, 0.5], [2.9, 0.6], TOO_SHORT),
        ([0.9], [0.3], None),  # although first calls are fused calls' too
        ([0.9, 0.9, 0.9], [1.5, 0.3, 0.301], FASTER),
        ([0.2, 0.2, 0.2], [0.1, 0.1, 0.1], TOO_SHORT),
        ([2.0, 2.0, 2.0], [2.1, 2.1001, 2.1002], EQUAL),  # first calls may take that
        ([20.0, 20.0, 20.0], [21.0, 21.001, 21.002], SLOWER),
        ([20.0, 20.0, 20.0], [12.0, 12.0, 12.0], FASTER),
        ([20.0, 20.0, 29.0], [12.0, 12.0, 28.0], None),
        ([9.0, 6.0, 9.0], [9.0, 6.9, 10.36], None),  # two pairs that agree by chance
        ([20.0] * PAIRS, [12.0, 28.0] * (PAIRS // 2) + [20.0], EQUAL),
    ],
)
def test_words(plain, fused, word):
    assert told(plain, fused).word == word


# what is said


def ran(stdout=b"1\n", seconds=10.0, status=0, files=None, **facts):
    return Run(status, seconds, seconds, stdout, files or {}, {"seconds": seconds, **facts})


MUTE = Run(0, 10.0, 10.0, b"1\n", {}, {})


COUNTS = {"ops_recorded": 12, "kernels_launched": 3, "kernels_compiled": 1, "calls": 1}
UNFUSED = COUNTS | {"ops_recorded": 0}


def simulated(monkeypatch, *, plain, fused):
    """`try` runs what takes these seconds, with everything else as in `Run`s that may be given."""
    left = {"plain": [*plain], "fused": [*fused]}

    def run(program, way, place, timeout):
        one = left[way].pop(0)
        return (
            one if isinstance(one, Run) else ran(seconds=one, **(COUNTS if way == "fused" else {}))
        )

    monkeypatch.setattr(attempt, "_run", run)
    return left


def test_a_status_is_no_chance_where_stdout_is(capsys):
    runs = {"plain": [ran(b"1"), ran(b"2")], "fused": [ran(b"3", status=3), ran(b"4")]}
    assert _compared(runs) == 1
    assert "exit status 3 instead of 0" in capsys.readouterr().out


def test_it_runs_until_a_difference_stands_out(place, monkeypatch, capfd):
    left = simulated(monkeypatch, plain=[9.0] + [6.0] * 9, fused=[7.0] + [3.0] * 9)
    assert main(["try", "model.py"]) == 0
    said = capfd.readouterr().out
    assert "0.50 of the plain runs' (0.50 to 0.50, by 2 pairs of runs, the first not counted): " \
        "faster\n" in said  # fmt: skip
    assert len(left["plain"]) == len(left["fused"]) == 7
    assert [line.split()[0] for line in said.splitlines()[:6]] == ["plain", "fused"] * 3


def test_it_runs_no_longer_than_it_may(place, monkeypatch, capfd):
    """Where nothing can be told until then, that is what it says."""
    left = simulated(monkeypatch, plain=[90.0, 60.0, 80.0, 60.0], fused=[70.0, 64.0, 60.0, 66.0])
    assert main(["try", "--limit", "300", "model.py"]) == 0
    said = capfd.readouterr().out
    assert (
        "0.89 of the plain runs' (0.0" in said and "no difference that can be told so far" in said
    )
    assert len(left["plain"]) == len(left["fused"]) == 1
    simulated(monkeypatch, plain=[400.0], fused=[300.0])
    assert main(["try", "model.py"]) == 0
    said = capfd.readouterr().out
    assert "0.75 of the plain runs', by 1 pair of runs: not enough to tell; --limit" in said


def test_it_does_not_repeat_what_tells_nothing(place, monkeypatch, capfd):
    """A program without modules, and one of which a fused run fails."""
    nothing = ran(seconds=7.0, **UNFUSED | {"calls": 0})
    simulated(monkeypatch, plain=[9.0], fused=[nothing])
    assert main(["try", "model.py"]) == 0
    assert "not compared, for there was nothing to fuse" in capfd.readouterr().out
    failed = ran(status=3, **COUNTS)
    left = simulated(monkeypatch, plain=[9.0, 9.0, 9.0], fused=[failed, 7.0])
    assert main(["try", "model.py"]) == 1
    said = capfd.readouterr().out
    assert "not compared, for the fused run failed" in said
    assert "exit status 3 instead of 0" in said and len(left["plain"]) == 1


def test_a_program_that_fails_in_a_later_run_fails_by_itself(place, monkeypatch, capfd):
    simulated(monkeypatch, plain=[9.0, ran(status=3)], fused=[7.0])
    assert main(["try", "model.py"]) == 3
    assert "the program fails by itself" in capfd.readouterr().err


def pairs(ratio, **facts):
    """Runs of each way in turns, 10 s and so much of that."""
    return {
        "plain": [ran(seconds=10.0)] * 4, "fused": [ran(seconds=10.0 * ratio, **facts)] * 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "runs, status, said",
    [
        (pairs(1.0, **COUNTS), 0, ["1.00 of the plain runs' (1.00 to 1.00, by 3 pairs of runs, the "
            "first not counted): no difference that can be told", "3 launched for 12 ops recorded; "
            "1 compiled in the first run", "the same, 2 bytes", "advice    none"]),
        (pairs(0.5, **COUNTS), 0, ["counted): faster\n"]),
        (pairs(1.5, **COUNTS), 0, ["counted): slower\n"]),
        (pairs(0.5, **UNFUSED), 0, ["counted): no difference, for nothing was fused, and the rest "
            "is chance\n", "none: nothing was recorded", "no op of the table met a tensor"]),
        (pairs(1.0, **UNFUSED), 0, ["counted): no difference, for nothing was fused\n"]),
        (pairs(1.5, **UNFUSED), 0, ["counted): slower\n"]),
        ({"plain": [MUTE] * 2, "fused": [MUTE] * 2}, 0,
            ["time      not known: the process ended without a word",
            "kernels   not known: the process ended without a word"]),
    ],
)  # fmt: skip
def test_what_is_said_of_the_time(capsys, runs, status, said):
    assert _compared(runs) == status
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    "plain, fused, status, said",
    [
        ([ran(b"0.1\n")] * 2, ran(b"0.2\n", **COUNTS, cuda=False), 1,
            ["instead of '0.1'; on a CPU "]),
        ([ran(b"0.1\n")] * 2, ran(b"0.2\n", **COUNTS, cuda=True), 1,
            ["is '0.2' instead of '0.1'\n"]),
        ([ran(b"0.1\n"), ran(b"0.3\n")], ran(b"0.2\n"), 0, ["differs, but so it does between two"]),
        ([ran(b"a\nb\n")] * 2, ran(b"a\nc\n"), 1, ["line 2 of stdout is 'c' instead of 'b'"]),
        ([ran(b"a\n")] * 2, ran(b"a\nb\n"), 1, ["4 bytes on stdout instead of 2"]),
        ([ran()] * 2, ran(status=-11), 1, ["exit status -11 instead of 0"]),
        ([ran(files={"m.pt": b"1"})], ran(files={"m.pt": b"2"}), 0, ["other bytes in m.pt"]),
        ([ran(files={"m.pt": b"1", "log": b"1"}), ran(files={"m.pt": b"1", "log": b"2"})],
            ran(files={"m.pt": b"1", "log": b"3"}), 0,
            ["files     the same, 2 written; 1 differ without fusing too"]),
        ([ran()], ran(**UNFUSED | {"calls": 0}), 0, ["no module of torch.nn was"]),
        ([ran()], ran(**COUNTS, advice=["do this"]), 0, ["advice    do this"]),
    ],
)  # fmt: skip
def test_what_is_said_of_what_they_leave(capsys, plain, fused, status, said):
    assert _compared({"plain": plain, "fused": [fused]}) == status
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


def test_a_later_run_that_says_something_else_is_told_of(capsys):
    runs = pairs(1.0, **COUNTS)
    runs["fused"][2:] = [ran(b"2\n", **COUNTS)] * 2
    assert _compared(runs) == 1
    assert "line 1 of stdout is '2' instead of '1'" in capsys.readouterr().out


def test_large_files_and_environments_are_linked(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (".git", "env", "deep/er"):
        (source / folder).mkdir(parents=True)
    (source / "env" / "pyvenv.cfg").touch()
    (source / "small").write_bytes(b"1" * 10)
    (source / "large").write_bytes(b"1" * 100)
    (source / "deep" / "er" / "late").write_bytes(b"1" * 20)
    target.mkdir()
    assert _copy(source, target, 40, tmp_path) == 10
    links = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink()}
    assert links == {"large", ".git", "env"}
    assert (target / "deep" / "er" / "late").read_bytes() == b"1" * 20
    assert attempt.COPIED >= 1 << 20
