"""The command line but for `cache`, which test_cache.py has: what is printed, exit statuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse.__main__ import main
from autofuse.cli import diagnose as diagnosis
from autofuse.cli.diagnose import OPS, SelfTest, cuda_target, facts, self_test
from autofuse.ops.coverage import EAGER, coverage
from autofuse.settings.config import SETTINGS
from support import DEVICES


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The environment of a command: a cache of its own, no other setting."""
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
        if setting.field:
            monkeypatch.setattr(autofuse.config, setting.name, setting.default)
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    return monkeypatch


@pytest.fixture
def quick(place):
    """Without the compiler's answer and with a short self-test."""
    place.setattr(diagnosis, "cuda_target", lambda target: "not asked")
    place.setattr("autofuse.__main__.self_test", lambda device: self_test(device, 0.01))
    return place


def test_the_folder_of_a_clone_does_not_stand_for_the_package(tmp_path):
    """Where somebody works beside a clone called autofuse, which is installed from there."""
    clone = Path(__file__).parent.parent
    (tmp_path / "autofuse").symlink_to(clone, target_is_directory=True)
    command = [sys.executable, "-c", "import autofuse; print(autofuse.fuse)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "function fuse" in done.stdout, done.stderr


def test_without_a_command_all_are_named(capsys):
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("report", "coverage", "settings", "cache"))


# report


def test_report(quick, capsys, tmp_path):
    quick.setattr(autofuse.config, "relaxed", True)
    assert main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[:12].strip(): line[13:] for line in lines if line[:12].strip()}
    assert said["autofuse"].startswith(autofuse.__version__)
    assert said["torch"] == torch.__version__
    assert said["numba"][0].isdigit() and said["numba-cuda"]
    assert said["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert said["CUDA target"] == "not asked"
    assert said["cache"] == str(tmp_path / "kernels")
    assert re.fullmatch(r"\d+ kernels, \d+ of at most 268435456 bytes", said["kept there"])
    assert said["settings"] == f"AUTOFUSE_RELAXED=1 AUTOFUSE_CACHE_DIR={tmp_path / 'kernels'}"
    assert re.fullmatch(r"passed on \w+: eager's bits from a chain of 5 ops", said["self-test"])
    figures = re.search(r"([\d.]+) us per op recorded, ([\d.]+) us per flush", lines[-2])
    assert figures and all(float(figure) > 0 for figure in figures.groups())
    if not torch.cuda.is_available():
        assert said["GPU"] == "none: torch.cuda.is_available() is False"


def test_report_of_a_cache_that_keeps_nothing(quick, capsys):
    quick.setenv("AUTOFUSE_CACHE_MAXSIZE", "0")
    assert dict(facts())["kept there"] == "nothing: AUTOFUSE_CACHE_MAXSIZE is 0"


def test_report_of_a_bad_setting(quick, capsys):
    quick.setenv("AUTOFUSE_CACHE_MAXSIZE", "lots")
    assert main(["report"]) == 2
    assert "suffix K, M or G" in capsys.readouterr().err


def test_a_failed_self_test_is_the_exit_status(quick, capsys):
    quick.setattr("autofuse.__main__.self_test", lambda device: SelfTest(device, "no luck"))
    assert main(["report"]) == 1
    assert re.search(r"self-test +FAILED on \w+: no luck", capsys.readouterr().out)


def test_the_cuda_target_is_tried_out():
    pytest.importorskip("numba_cuda")
    assert cuda_target("sm_90").startswith("compiles for sm_90; in ")


def test_why_there_is_no_cuda_target(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert cuda_target("sm_90").startswith("not usable: ModuleNotFoundError: ")


# the self-test


@pytest.mark.parametrize("device", DEVICES)
def test_self_test_runs_with_the_defaults_and_puts_settings_back(place, device):
    autofuse.config.enabled, autofuse.config.max_nodes = False, 2
    before = dict(vars(autofuse.config))
    result = self_test(device, 0.01)
    assert result.failure == "" and result.device == device
    assert result.record_us > 0 and result.flush_us > 0 and result.eager_us > 0
    assert vars(autofuse.config) == before


def test_self_test_sees_other_bits(place):
    def chain(x, y):
        return x * 2 if type(x) is torch.Tensor else -x + x + x + y - y

    place.setattr(diagnosis, "_chain_cpu", chain)
    assert re.fullmatch(
        r"\d+ of 16384 elements have other bits than eager's", self_test("cpu", 0.01).failure
    )


def test_self_test_sees_that_nothing_was_recorded(place):
    place.setattr(diagnosis, "_chain_cpu", lambda x, y: x.cumsum(0))
    assert self_test("cpu", 0.01).failure == f"0 of {OPS} ops were recorded"


def test_self_test_sees_a_kernel_that_fails(place, capsys):
    def fail(*args):
        raise RuntimeError("no compiler today")

    place.setattr("autofuse.supply.build.build_once", fail)
    place.setattr(diagnosis, "_chain_cpu", lambda x, y: ((x * y).frac() + x).frac() - y)
    assert "its kernel failed; the reason is on stderr" in self_test("cpu", 0.01).failure
    assert "no compiler today" in capsys.readouterr().err


def test_self_test_reports_an_error(place):
    place.setattr(diagnosis, "_chain_cpu", lambda x, y: x.view(-3))
    assert self_test("cpu", 0.01).failure.startswith("RuntimeError: ")


# coverage


def test_coverage_lists_every_op_under_its_state(capsys):
    assert main(["coverage"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    listed, state = {}, ""
    for line in lines:
        if line.startswith("  "):
            listed.update(dict.fromkeys(re.findall(r"\w+", line), state))
        else:
            state, count = re.fullmatch(r"(?:eager: )?(.+) \((\d+)\)", line).groups()
            assert int(count) == [*coverage().values()].count(state)
    assert listed == coverage()
    assert lines[0].startswith("fused (")
    fused = [*coverage().values()].count("fused")
    assert last == (
        f"{fused} of the {len(listed)} pointwise ops of torch {torch.__version__} are fused"
    )


@pytest.mark.parametrize(
    "name, text",
    [
        ("sigmoid", "sigmoid: fused"),
        ("add_", "add: fused"),
        ("torch.special.i1", "special_i1: fused"),
        ("Tensor.mse_loss", "mse_loss: fused"),
        ("igamma", f"igamma: eager: {EAGER['igamma']}"),
        ("bessel_j0", "special_bessel_j0: eager: other bits than eager's; fused by config.relaxed"),
    ],
)
def test_coverage_of_one_op(name, text, capsys):
    assert main(["coverage", "--op", name]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_coverage_of_an_op_that_is_not_pointwise(capsys):
    assert main(["coverage", "--op", "sigmod"]) == 1
    said = capsys.readouterr().err
    assert "no pointwise op" in said and "the nearest name is 'sigmoid'" in said


# settings


def test_settings_lists_them_all(place, capsys):
    autofuse.config.max_nodes = 7
    assert main(["settings"]) == 0
    said = capsys.readouterr().out
    for setting in SETTINGS:
        assert f"\n{setting.variable} (" in f"\n{said}"
    assert "AUTOFUSE_MAX_NODES (a whole number, 1 or more; default: 64)\n" in said
    assert "  config.max_nodes = 7\n" in said and "config.cache_dir" not in said


def test_settings_as_markdown(capsys):
    assert main(["settings", "--markdown"]) == 0
    title, line, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(SETTINGS) and {row.count(" | ") for row in (title, *rows)} == {4}
    assert line == "|---|---|---|---|---|"
    assert rows[0] == (
        "| `enabled` | `AUTOFUSE` | 0 or 1 | `1` | record ops at all; 0 is plain eager |"
    )
