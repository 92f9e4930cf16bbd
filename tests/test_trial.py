"""Machine code must doubt: whatever is not as it should be, Python alone runs, and says why."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse import errors
from autofuse.hot import native, verdict
from autofuse.supply.disk import DiskCache
from autofuse.supply.service import HungError, LostError

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="there is no machine code for Python 3.10"
)
CRASH = "gave no answer"
WHY = {  # breakage -> what is said of it; "" where the trial itself crashes
    "nothing": "",
    "lists_elsewhere": CRASH,
    "lists_at_no_pointer": CRASH,
    "tuples_elsewhere": "tuples have their items elsewhere",
    "types_elsewhere": f"left to Python by handler|{CRASH}",
    "types_at_no_address": CRASH,
    "calls_elsewhere": "is not run by Python",
    "functions_run_by_another": "relieve .* is not run by Python",
    "counts_elsewhere": "left to Python by flush",
    "other_count_of_references": "counts references in another way",
    "other_getter": "has other ops_eager",
    "other_method": CRASH,
    "tensors_elsewhere": CRASH,
    "versions_elsewhere": "left to Python by flush|was modified in place",
    "getters_have_moved": "is no method_descriptor",
    "no_such_getter": "requires_grad",
    "weak_references_elsewhere": "other results than in Python|left to Python",
    "no_such_c_function": "Python has no function PyList_NoSuchFunction",
    "counts_twice": "has other (flushes|ops_eager)",
    "leaves_all_to_python": "left to Python by handler",
    "keeps_a_reference": "references are not given back|left to Python by flush",
    # what is there in place of a freed one differs
    "gives_a_reference_back_twice": f"has other (flushes|ops_eager)|TypeError|ValueError|{CRASH}",
    "ends_in_an_assertion": "AssertionError: not so",
    "of_a_type_that_is_missing": "AttributeError: 'NoneType'",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the trial says of every breakage, from one process for all."""
    environment = {**os.environ, "AUTOFUSE_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}
    command = [sys.executable, "-W", "ignore", str(HERE / "breakages.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("breakage", WHY)
def test_no_breakage_passes_the_trial(breakage, said):
    status, text = said[breakage]
    if breakage == "nothing":
        assert (status, text) == (0, "")
        return
    text = CRASH if status < 0 else text  # as `verdict` says it
    assert re.search(WHY[breakage], text), (status, text)


def test_every_breakage_is_expected(said):
    assert said.keys() == WHY.keys()


# --- from import to report -----------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    """A copy of the package with one line changed, and a function that runs a program with it."""

    def copy(file, old, new):
        package = tmp_path / "with" / "autofuse"
        shutil.copytree(Path(autofuse.__file__).parent, package)
        text = (package / file).read_text()
        assert text.count(old) == 1
        (package / file).write_text(text.replace(old, new))
        directory = tmp_path / "kernels"

        def run(program, *more):
            environment = {key: v for key, v in os.environ.items() if key[:8] != "AUTOFUSE"}
            environment |= {"PYTHONPATH": str(package.parent), "AUTOFUSE_CACHE_DIR": str(directory)}
            command = [
                sys.executable,
                *(["-c", textwrap.dedent(program)] if program else []),
                *more,
            ]
            return subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
            )

        return run

    return copy


PROGRAM = """
import torch, autofuse
from autofuse.hot import native
x = autofuse.wrap(torch.ones(4))
for _ in range(4):
    assert (torch.exp(x * 2.0) - x).tolist() == (torch.exp(torch.ones(4) * 2.0) - 1).tolist()
native._follow(), setattr(autofuse.config, "native", True)
print(native.active(), native.absent)
"""
# of a process that could try nothing
ALONE = "import sys\nsys.executable = ''\n"


def test_machine_code_that_crashes_is_not_used(copied):
    run = copied("hot/values.py", "    return x[1]", "    x = x - x\n    return x[1]")
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False the process that tried it gave no answer: it was ended by")
    assert done.stderr.count("recording and launching are left to Python: the process") == 1
    again = run(ALONE + PROGRAM)  # the verdict is kept
    assert again.stdout == done.stdout and again.stderr == done.stderr
    report = run("", "-m", "autofuse", "report")
    (line,) = [x for x in report.stdout.splitlines() if x.startswith("machine code")]
    assert "gave no answer" in line, report.stdout


def test_machine_code_that_differs_is_not_used(copied):
    run = copied("hot/values.py", "    number = 1\n", "    number = 2\n")
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert re.match("False run 1 of 'operators' has other (flushes|ops_eager) than", done.stdout)
    assert "left to Python: run 1" in done.stderr


# --- verdicts ------------------------------------------------------------------------------------


@pytest.fixture
def tries(monkeypatch, tmp_path):
    """The verdicts that trying gives, and those given so far."""
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path))
    given = []

    class Tries(list):
        def __call__(self):
            given.append(self.pop(0))
            return given[-1]

    made = Tries()
    made.given = given
    monkeypatch.setattr(verdict, "_tried", made)
    return made


def test_a_verdict_is_kept(tries):
    tries += [("", True), ("odd", True)]
    for facts, want in ((["a"], ""), (["b"], "odd")):
        assert verdict.verdict(facts) == want
        assert verdict.verdict(facts) == want
    assert not tries


def test_what_says_nothing_of_the_next_process_is_not_kept(tries):
    tries += [("interrupted", False), ("", True)]
    assert verdict.verdict(["a"]) == "interrupted"
    assert verdict.verdict(["a"]) == "" == verdict.verdict(["a"])


def test_a_damaged_verdict_is_none(tries, tmp_path):
    tries += [("odd", True), ("", True)]
    assert verdict.verdict(["a"]) == "odd"
    (entry,) = tmp_path.glob("*.kernel")
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    assert verdict.verdict(["a"]) == ""


def test_without_a_disk_cache_every_process_tries(tries, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "0")
    tries += [("", True), ("", True)]
    assert verdict.verdict(["a"]) == "" == verdict.verdict(["a"]) and not tries


@pytest.mark.parametrize("error, decided", [(LostError("x"), False), (HungError("x"), True)])
def test_a_trial_that_hangs_is_a_verdict(error, decided, monkeypatch):
    def ask(*args):
        raise error

    monkeypatch.setattr(verdict.Worker, "ask", ask)
    assert verdict._tried() == ("the process that tried it gave no answer: x", decided)


def test_a_trial_takes_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(verdict, "BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(verdict, "SECONDS", 0.3)
    reason, decided = verdict._tried()
    assert "did not answer in 0.3 s" in reason and decided


@pytest.mark.parametrize("where", ["executable", "Popen", "end"])
def test_a_trial_that_cannot_be_made_is_tried_again_by_the_next_process(where, monkeypatch):
    if where == "executable":
        monkeypatch.setattr(sys, "executable", "")
    elif where == "Popen":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    else:
        monkeypatch.setattr(verdict, "BOOT", "raise SystemExit('no torch here')")
    reason, decided = verdict._tried()
    assert reason and not decided
    assert where != "end" or "no torch here" in reason


@pytest.mark.parametrize(
    "what", ["Python", "torch", "llvmlite", "processor", "sources", "build of torch"]
)
def test_what_a_verdict_is_for(what, monkeypatch, tmp_path):
    before = native.facts_here()
    if what == "Python":
        monkeypatch.setattr(sys, "version", "4.0")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "4.0")
    elif what == "build of torch":
        monkeypatch.setattr(torch.version, "git_version", "another")
    elif what == "llvmlite":
        monkeypatch.setattr(native.llvmlite, "__version__", "4.0")
    elif what == "processor":
        monkeypatch.setattr(native, "processor", lambda: ("another", ""))
    else:
        shutil.copytree(Path(native.__file__).parents[1], tmp_path / "autofuse")
        file = tmp_path / "autofuse" / "hot" / "flush.py"
        file.write_text(file.read_text() + "#")
        monkeypatch.setattr(native, "__file__", str(file.with_name("native.py")))
    assert native.facts_here() != before


def test_sources_that_machine_code_is_made_of_are_among_its_facts():
    """And those of the objects that it reads or is given: modules with names in its code."""
    values = [value for stage in native._STAGES for value in vars(stage).values()]
    given = [*native._given().values()]
    ours = [module for name, module in sys.modules.items() if name.startswith("autofuse.")]
    owners = {getattr(value, "__module__", "") or "" for value in (*values, *given)}
    owners |= {module.__name__ for module in ours for value in given if value is vars(module)}
    owners = {name.split(".")[1] for name in owners if name.startswith("autofuse.")}
    assert {"chain", "hooks", "record"} <= owners <= {*native._RELIED}
    assert "torch_private" in native._RELIED  # C's functions do not say who gives them


@pytest.mark.parametrize("name", native._RELIED)
def test_each_of_them_changes_the_facts(name, monkeypatch, tmp_path):
    before = native.facts_here()
    package = tmp_path / "autofuse"
    shutil.copytree(Path(native.__file__).parents[1], package)
    monkeypatch.setattr(native, "__file__", str(package / "hot" / "native.py"))
    assert native.facts_here() == before
    for file in sorted([*package.glob(f"{name}.py"), *package.glob(f"{name}/*.py")])[-1:]:
        file.write_text(file.read_text() + "#")
        assert native.facts_here() != before
        return
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize(
    "error",
    [AttributeError, TypeError, AssertionError, OSError, KeyError, MemoryError, SystemError],
)
def test_no_error_ends_the_import(error, monkeypatch, capsys):
    def broken(*args):
        raise error("not so")

    monkeypatch.setattr(autofuse.config, "native", True)
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "absent", "")
    monkeypatch.setattr(native, "verdict", broken)
    errors._said.clear()
    for _ in range(2):
        native._follow()
    assert not native.active() and "not so" in native.absent
    said = capsys.readouterr().err
    assert said.count("recording and launching are left to Python") == 1 and error.__name__ in said


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("implementation", type("Other", (), {"name": "pypy"}), "CPython with its global lock"),
        ("version_info", (3, 10, 0), "Python 3.11"),
        ("maxsize", 1 << 31, "64-bit"),
        ("byteorder", "big", "little-endian"),
    ],
)
def test_other_pythons_are_refused(name, value, why, monkeypatch):
    assert native._refusal() == ""
    monkeypatch.setattr(native.sys, name, value)
    assert why in native._refusal()


def test_pythons_without_a_global_lock_are_refused(monkeypatch):
    monkeypatch.setattr(native.sysconfig, "get_config_var", lambda name: 1)
    assert "global lock" in native._refusal()


@pytest.mark.skipif(not native.active(), reason="there is no machine code here")
def test_the_first_import_runs_what_was_tried(tmp_path):
    """It takes seconds to compile, and is compiled once: by the process that tries it."""
    text = """
        import sys, autofuse
        from autofuse.hot import native
        print(native.active(), native.compiled(), "autofuse.hot.compiler" in sys.modules)
    """
    environment = {**os.environ, "AUTOFUSE_CACHE_DIR": str(tmp_path), "AUTOFUSE_NATIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "('',", "b'')", "False"], done.stderr


def test_where_it_is_off_nothing_is_looked_at(tmp_path):
    program = """
        import ctypes, sys, torch
        ctypes.c_uint64.from_address = None
        import autofuse
        from autofuse.hot import native
        assert native._native is None and not native.absent and not native.active()
    """
    environment = {**os.environ, "AUTOFUSE_NATIVE": "0", "AUTOFUSE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True,
        text=True, cwd=HERE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.iterdir()]


def test_kept_verdicts_are_found_by_their_cache_alone(tries, tmp_path):
    tries += [("", True)]
    verdict.verdict(["a"])
    (entry,) = DiskCache(tmp_path).entries()
    assert (entry.about["name"], entry.about["target"]) == ("machine code", "as Python")


# --- modules that are loaded again ---------------------------------------------------------------

AGAIN = """
import faulthandler, gc, importlib, sys
faulthandler.enable()
import torch
gc.freeze()  # or each collection takes 0.3 s
import autofuse

def program():
    x, eye = autofuse.wrap(torch.ones(4)), torch.eye(4)
    for _ in range(3):
        t = torch.sigmoid(x * 2.0 + 1.0) - x
        t.mul_(2.0)
        got = torch.mv(eye, t).sum().item()
    p = torch.nn.Parameter(torch.ones(4))
    (torch.sigmoid(autofuse.wrap(torch.ones(4)) * p) * 3).sum().backward()
    return got

def check(native):
    autofuse.config.native = native
    assert program() == want

want = program()
modules = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "autofuse"}
"""


@pytest.mark.parametrize("how", ["each", "the package", "native", "a second copy"])
def test_loading_again_does_not_crash(how):
    """What functions lead to stays, whoever forgets it; the objects of before go on working."""
    text = {
        "each": """
            for name, module in modules.items():
                importlib.reload(module)
                gc.collect()
                check(True), check(False)
        """,
        "the package": """
            for _ in range(3):
                importlib.reload(autofuse)
                gc.collect()
                check(True), check(False)
        """,
        "native": """
            for _ in range(3):
                importlib.reload(autofuse.hot.native)
                importlib.reload(autofuse)
                gc.collect()
                check(True)
                assert autofuse.hot.native.active()
                check(False)
                assert not autofuse.hot.native._native.on
        """,
        "a second copy": """
            for name in modules:
                del sys.modules[name]
            del modules, autofuse
            gc.collect()
            import autofuse
            check(True), check(False)
            print(autofuse.hot.native.absent)
        """,
    }[how]
    environment = dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", AGAIN + textwrap.dedent(text)], env=environment,
        cwd=HERE.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
