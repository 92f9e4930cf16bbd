"""Machine code on disk: the next process links it, and nothing that is not exactly right for it."""

import builtins
import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import autofuse
from autofuse.hot import native
from autofuse.hot.c import Address, C, load
from autofuse.hot.code import Code, key_of, offset_of
from autofuse.hot.machine import Machine
from autofuse.supply.disk import DiskCache

HERE = Path(__file__).parent
needs_machine_code = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="there is no machine code for Python 3.10"
)


class Pair:
    __slots__ = ("first", "second")


class Moved:
    __slots__ = ("earlier", "first", "second")


def is_first(pair: Pair, x):
    return pair.first is x


def is_marker(x):
    return x is MARKER


def is_marker_too(x):
    return x is MARKER or x is None


def times(x):
    return load(x) * FACTOR + WHERE


def asked(x) -> object:
    if x is MARKER:
        return True
    return False


def otherwise(function, args, flags, names) -> object:
    return None


MARKER, OTHER, FACTOR, WHERE = object(), object(), 3, Address(1000)
takes_a_word = C("word", 1)
FUNCTIONS = [is_first, is_marker, times, asked, otherwise]
NAMES = {**vars(builtins), **globals()}


# --- what it is kept under -----------------------------------------------------------------------


def key(functions=FUNCTIONS, entries=(("is_marker", 8),), facts=("LLVM 1",), **names):
    return key_of(functions, {**NAMES, **names}, entries, facts)


def again():
    def is_marker(x):
        return x is MARKER

    return is_marker


def test_other_objects_of_the_next_process_have_the_same_key():
    assert key() == key() == key(MARKER=object(), WHERE=Address(7), Pair=Moved, unused=1)


@pytest.mark.parametrize(
    "change",
    [
        {"functions": [is_first, times]},
        {"functions": [is_first, is_marker_too, times]},
        {"functions": [is_first, again(), times]},  # another line of another text
        {"entries": ()},
        {"entries": (("times", 8),)},
        {"entries": (("is_marker", 16),)},
        {"facts": ("LLVM 2",)},
        {"facts": ("LLVM 1", "x86-64")},
        {"FACTOR": 4},
        {"FACTOR": Address(3)},
        {"WHERE": 1000},
        {"MARKER": load},  # two names of one object
        {"load": C("word", 1)},
        {"load": C("int", 1)},
    ],
)  # fmt: skip
def test_what_machine_code_depends_on_changes_the_key(change):
    assert key(**change) != key()


def test_signatures_of_c_functions_change_the_key():
    assert len({key(load=C(result, n)) for result in ("word", "int") for n in (1, 2)}) == 4


def test_all_of_it_comes_back_from_bytes():
    code = Code(b"\n\0binary\n", ("MARKER",), (("Pair", "first", 16),))
    assert Code.from_bytes(code.to_bytes()) == code


# --- from one Machine to the next ----------------------------------------------------------------


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """What was compiled, by names of functions; there is an empty cache directory."""
    from autofuse.hot import compiler

    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    compiled, seen = compiler.compiled, []

    def counted(functions, *rest):
        seen.append([f.__name__ for f in functions])
        return compiled(functions, *rest)

    monkeypatch.setattr(compiler, "compiled", counted)
    return seen


def make(data=8, facts=("LLVM 1",), **names):
    """A Machine, with what it may keep kept."""
    namespace = {**NAMES, **names}
    machine = Machine(FUNCTIONS, namespace, [("asked", 0)], "otherwise", facts, data)
    if machine.is_new:
        machine.keep()
    return machine


def call(machine, name, *words):
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(words))
    return kind(machine.address(name))(*words)


def test_the_second_finds_it_and_links_its_own_objects(compiles):
    word, pair = ctypes.c_int64(5), Pair()
    pair.first = word
    for marker, where, data in ((MARKER, WHERE, id(MARKER)), (OTHER, Address(2), id(MARKER))):
        machine = make(data, MARKER=marker, WHERE=where)
        found = [call(machine, "is_marker", id(x)) for x in (MARKER, OTHER)]
        assert found == [marker is MARKER, marker is OTHER]
        assert call(machine, "times", ctypes.addressof(word)) == 15 + where
        assert call(machine, "is_first", id(pair), id(word)) == 1
        entered = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_int64] * 4)(machine.entry(0))
        assert entered(0, 0, 0, 0) is (marker is MARKER)
    assert len(compiles) == 1


def test_without_facts_nothing_is_kept(compiles, tmp_path):
    assert not make(facts=()).is_new
    assert not (tmp_path / "kernels").exists()


def test_slots_that_are_elsewhere_have_it_compiled_again(compiles):
    for cls in (Pair, Moved, Moved, Pair):
        x = cls()
        x.first, x.second = MARKER, OTHER
        machine = make(Pair=cls)
        assert call(machine, "is_first", id(x), id(MARKER)) == 1
    assert len(compiles) == 3 and offset_of(Pair, "first") != offset_of(Moved, "first")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def damaged(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def anothers(path):
    """The entry of another key."""
    make(FACTOR=4)
    (other,) = {*path.parent.glob("*.kernel")} - {path}
    other.replace(path)


def writable(path):
    path.chmod(0o666)


def a_link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.skipif(sys.platform == "win32", reason="modes and links of Unix")
@pytest.mark.parametrize("harm", [truncated, damaged, emptied, anothers, writable, a_link])
def test_what_is_not_exactly_that_is_compiled_again(harm, compiles, tmp_path):
    make()
    (path,) = (tmp_path / "kernels").glob("*.kernel")
    before = path.read_bytes()
    harm(path)
    del compiles[:]
    for _ in range(2):
        assert call(make(), "times", id(MARKER)) != 0
    assert len(compiles) == 1
    assert path.read_bytes() == before and not path.is_symlink()


# --- from one process to the next ----------------------------------------------------------------

PROGRAM = """
import os, sys, torch
from llvmlite import binding
real, emitted = binding.targets.TargetMachine.emit_object, []
binding.targets.TargetMachine.emit_object = lambda *args: [emitted.append(1), real(*args)][1]
import autofuse
from autofuse.hot import native
assert native.active(), native.absent
assert ("autofuse.hot.compiler" in sys.modules) == bool(emitted)
print(len(emitted))
x = autofuse.wrap(torch.ones(4))
for _ in range(4):
    assert (torch.exp(x * 2.0) - x).tolist() == (torch.exp(torch.ones(4) * 2.0) - 1).tolist()
"""


def run(directory, program=PROGRAM, **more):
    """How many object files a fresh process makes until `import autofuse` is done."""
    environment = {k: v for k, v in os.environ.items() if k[:8] != "AUTOFUSE"}
    environment |= {"AUTOFUSE_CACHE_DIR": str(directory), **more}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, cwd=HERE.parent,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left to Python" not in done.stderr
    return int(done.stdout)


def kept(directory):
    """The entries with object code, as paths."""
    entries = (e for e in DiskCache(directory).entries() if e.about["target"] == "object file")
    return [Path(directory) / f"{entry.key}.kernel" for entry in entries]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache directory that a process has filled: with what the trial's process has compiled."""
    directory = tmp_path_factory.mktemp("machine") / "kernels"
    assert run(directory) == 0
    assert len(kept(directory)) == 1
    return directory


@pytest.fixture
def directory(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "kernels"))


@needs_machine_code
def test_the_import_of_a_second_process_compiles_nothing(directory):
    (path,) = kept(directory)
    before = path.read_bytes()
    assert run(directory) == run(directory) == 0
    assert kept(directory) == [path] and path.read_bytes() == before


@needs_machine_code
def test_other_sources_have_it_compiled_again(directory, tmp_path):
    package = tmp_path / "autofuse"
    shutil.copytree(Path(native.__file__).parents[1], package)
    values = package / "hot" / "values.py"
    values.write_text(values.read_text() + "# another text\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + PROGRAM
    assert run(directory, program) == 0
    assert len(kept(directory)) == 2
    assert run(directory) == 0
    assert len(kept(directory)) == 2


@needs_machine_code
@pytest.mark.parametrize("changed", [False, True])
def test_sources_that_change_meanwhile_are_not_kept(changed, monkeypatch, tmp_path):
    """Half of what was compiled may be of each text."""
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path))
    for module in (native.flush, native.record):  # as tried with launches over kernels of the CPU
        name = module.__name__.rpartition(".")[2]
        function = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(function, "func", function))
    before = autofuse.config.native
    autofuse.config.native = False
    try:
        facts = native.facts_here()
        monkeypatch.setattr(native, "facts_here", lambda: [*facts, "more"] if changed else facts)
        native._Native(facts)
    finally:
        autofuse.config.native = before
    assert len([*DiskCache().entries()]) == (not changed)


@needs_machine_code
def test_a_cache_that_keeps_nothing(directory):
    (path,) = kept(directory)
    path.unlink()
    before = {*directory.iterdir()}
    assert run(directory, AUTOFUSE_CACHE_MAXSIZE="0") == 1
    assert {*directory.iterdir()} == before


@needs_machine_code
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes of Unix")
def test_a_cache_that_others_may_write_to_is_not_used(directory):
    directory.chmod(0o777)
    assert run(directory) == 1
