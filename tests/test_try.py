"""`python -m autofuse try`: a program plain and fused, in processes of their own."""

import os
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
    assert "runs `python model.py --steps 9` twice" in asides
    rows = dict(line.split(maxsplit=1) for line in said.splitlines() if "advice" not in line)
    assert rows["plain"].endswith("s, exit status 0") and rows["fused"].endswith("exit status 0")
    assert "of the plain run's" in rows["time"]
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
    assert re.search(r"^again +\S+ s, exit status 0$", said, re.M)
    assert "differs, but so it does between two runs of the program as it is" in said


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
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
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


# what is said


def ran(stdout=b"1\n", seconds=1.0, status=0, files=None, **facts):
    return Run(status, seconds, stdout, files or {}, facts)


COUNTS = {"ops_recorded": 12, "kernels_launched": 3, "kernels_compiled": 1, "kernels_loaded": 0}


@pytest.mark.parametrize(
    "plain, fused, status, said",
    [
        (ran(), ran(**COUNTS, calls=1), 0, ["1.00 of the plain run's: no different",
            "3 launched for 12 ops recorded; 1 compiled in this run, 0 loaded", "the same, 2 bytes",
            "advice    none"]),
        (ran(b"0.1\n"), ran(b"0.2\n", **COUNTS, cuda=False), 1, ["instead of '0.1'; on a CPU "]),
        (ran(b"0.1\n"), ran(b"0.2\n", **COUNTS, cuda=True), 1, ["is '0.2' instead of '0.1'\n"]),
        (ran(seconds=1.8), ran(seconds=2.0, **COUNTS), 0, ["of the plain run's: no different"]),
        (ran(seconds=18.0), ran(seconds=20.0, **COUNTS), 0, ["1.11 of the plain run's: slower"]),
        (ran(), ran(seconds=0.5, **COUNTS), 0, ["0.50 of the plain run's: faster"]),
        (ran(seconds=0.1), ran(seconds=0.9, **COUNTS), 0, ["9.00 of the plain run's: too short"]),
        (ran(), ran(seconds=2.0, **COUNTS), 0, ["2.00 of the plain run's: slower"]),
        (ran(b"a\nb\n"), ran(b"a\nc\n"), 1, ["line 2 of stdout is 'c' instead of 'b'",
            "not known: the process ended without a word"]),
        (ran(b"a\n"), ran(b"a\nb\n"), 1, ["4 bytes on stdout instead of 2"]),
        (ran(), ran(status=-11), 1, ["exit status -11 instead of 0"]),
        (ran(files={"m.pt": b"1"}), ran(files={"m.pt": b"2"}), 0, ["other bytes in m.pt"]),
        (ran(), ran(**(COUNTS | {"ops_recorded": 0}), calls=3), 0, ["none: nothing was recorded",
            "no op of the table met a tensor"]),
        (ran(), ran(**(COUNTS | {"ops_recorded": 0}), calls=0), 0, ["no module of torch.nn was"]),
        (ran(), ran(**COUNTS, calls=9, advice=["do this"]), 0, ["advice    do this"]),
    ],
)  # fmt: skip
def test_what_is_said(capsys, plain, fused, status, said):
    assert _compared({"plain": plain, "fused": fused}) == status
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


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
