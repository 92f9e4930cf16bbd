"""The zoo's programs run, and give eager's values in all variants; its table says who loses."""

import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse.chain.state import counts
from autofuse.record import origins, policy
from autofuse.record.modes import forget_all
from support import DEVICES, assert_same, judge_results_often

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import zoo
from peers import arrays_of
from results import Cell, Results, load
from zoo_row import ROWS, Row, Start

ROOT = Path(__file__).parent.parent

RECORD_NOTHING = {
    "Lion (training)", "average of weights (training)",  # matmuls and optimizers
    "residual blocks of an image net (training)",  # single ops under grad
    "torchvision's BasicBlock (inference)", "torchvision's BasicBlock (training)",  # single writes
    "torch_geometric's gated graph (inference)",  # modules of torch
    "adaptive spiking (training)",  # a state that is plain and written in place
    "checkpointed blocks (training)", "ensemble by vmap",  # docs/escapes.md
}  # fmt: skip
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture(autouse=True)
def double_precision():
    """On the CPU, where functions may differ: Adam divides gradients of nearly zero by
    themselves, and what a last place is to float32 would be a step of full size."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@each_row
@pytest.mark.parametrize("device", DEVICES)
def test_eager_values(row, device):
    if row.needs:
        pytest.importorskip(row.needs, reason=f"{row.needs}, whose model this is, is not installed")
    if device == "cuda":
        torch.set_default_dtype(torch.float32)
    eager = zoo.Run(row, "eager", device, size="tiny")
    eager.advance(2)
    assert all(t.isfinite().all() for t in eager.outcome())
    for peer in ("autofuse.fuse", "autofuse"):
        origins.forget()  # what rows of the same code have found...
        forget_all("test")  # ...and others of chains that are too short
        run = zoo.Run(row, peer, device, size="tiny")
        autofuse.reset_stats()
        run.advance(2)
        assert autofuse.stats().ops_recorded or row.name in RECORD_NOTHING
        assert_same(run.outcome(), eager.outcome(), None if device == "cuda" else 1e-9, peer)


@each_row
@pytest.mark.parametrize("device", DEVICES)
def test_eager_values_where_results_become_plain_and_wrapped_again(row, device, monkeypatch):
    if row.needs:
        pytest.importorskip(row.needs, reason=f"{row.needs}, whose model this is, is not installed")
    if device == "cuda":
        torch.set_default_dtype(torch.float32)
    judge_results_often(monkeypatch)
    outcomes = []
    for peer in ("eager", "autofuse"):
        run = zoo.Run(row, peer, device, size="tiny")
        run.advance(12)
        outcomes.append(run.outcome())
    assert_same(*reversed(outcomes), None if device == "cuda" else 1e-9)


@pytest.mark.parametrize("name", [
    "GPT blocks (inference)", "Llama blocks (training)", "sampling of tokens",
    "selective scan (inference)", "heat equation by slices", "shallow water by slices",
    "gated graph net (inference)",
])  # fmt: skip
def test_few_steps_have_results_on_trial(name, monkeypatch):
    """With what ops and kernels cost on a GPU, where trials come again."""
    costs = (policy.FLUSH_US, policy._OP_US, policy._PLAIN_US, policy._GRAD_US, policy.PASSED_US)
    for of_devices in costs:
        monkeypatch.setitem(of_devices, "cpu", of_devices["cuda"])
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 10.1)
    monkeypatch.setattr(origins, "is_inexact", lambda *facts: False)
    origins.forget()
    (row,) = [row for row in ROWS if row.name == name]
    run = zoo.Run(row, "autofuse", "cpu", size="tiny")
    tried, judged = [], []
    for _ in range(400):
        before = counts.trials
        run.advance(1)
        tried.append(counts.trials - before)
        judged.append(len(origins.origins))
    assert sum(tried[:16]) and sum(map(bool, tried[16:])) <= 0.05 * len(tried)
    assert judged[15] >= 0.75 * judged[-1] > 0  # the others are met where ops are tried as a chain


@pytest.mark.parametrize("path", [
    "bench/zoo_calculus.py", "bench/zoo_cells.py", "bench/zoo_learning.py",
    "bench/zoo_networks.py", "bench/zoo_others.py", "bench/zoo_physics.py", "bench/zoo_row.py",
])  # fmt: skip
def test_programs_know_nothing_of_autofuse(path):
    text = (ROOT / path).read_text()
    assert not re.search(r"^\s*(import|from) autofuse", text, re.M) and "autofuse." not in text


def test_names():
    """So that --only takes several with commas between them."""
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) and not any("," in name for name in names)
    only = zoo.chosen(["GRU,heat eq", "Gray"])
    assert [r.name for r in only] == [n for n in names if re.search("GRU|heat eq|Gray", n)]
    with pytest.raises(SystemExit, match="no program's name has zebra"):
        zoo.chosen(["zebra"])


@each_row
def test_a_row_starts_the_same_every_time(row):
    if row.needs:
        pytest.importorskip(row.needs, reason=f"{row.needs}, whose model this is, is not installed")
    starts = [row.make("cpu", 3, "tiny") for _ in range(2)]
    first, second = (arrays_of([s.state, *(list(m.parameters()) for m in s.modules)])
                     for s in starts)  # fmt: skip
    assert_same(second, first, None)


def row_of(step, needs=""):
    return Row("x", lambda tiny, training: Start(step, (torch.ones(4),)), False, False, needs)


def test_other_bits_are_said():
    def step(x):
        return x * (2.0 + isinstance(x, autofuse.Tensor))

    check = zoo.check(row_of(step), "cpu")
    assert check.repeats and [peer for peer, same in check.same.items() if same] == [zoo.AGAIN]
    assert check.apart["autofuse"] == 0.5 / torch.finfo(torch.float64).eps
    zero, one = torch.zeros(2), torch.ones(2)
    assert zoo.same_bits([one], [one.clone()]) and not zoo.same_bits([zero], [-zero])
    assert not zoo.same_bits([one.float()], [one]) and not zoo.same_bits([], [one])
    nan, far = one * float("nan"), float("inf")
    assert zoo.same_bits([nan], [-nan]) and not zoo.same_bits([nan], [one])
    assert zoo.apart([one > 0], [one > 1]) == zoo.apart([nan], [one]) == far
    assert zoo.apart([zero], [-zero]) == zoo.apart([nan, one * far], [nan, one * far]) == 0


def test_eager_that_differs_from_itself_is_no_measure():
    check = zoo.check(row_of(lambda x: x + time.perf_counter()), "cpu")
    assert not check.repeats and not check.deterministic


def test_what_has_no_deterministic_algorithm_is_no_measure():
    """That it repeats itself once may be by chance."""

    def step(x, more=0.0):
        if torch.are_deterministic_algorithms_enabled():
            warnings.warn("nll_loss2d does not have a deterministic implementation", stacklevel=2)
        else:
            more = time.perf_counter()
        return x + more

    check = zoo.check(row_of(step), "cpu")
    assert not check.repeats and not check.deterministic


def test_what_only_deterministic_algorithms_repeat_is_compared_with_them():
    def step(x, more=0.0):
        if not torch.are_deterministic_algorithms_enabled():
            more = time.perf_counter()
        return x + more + isinstance(x, autofuse.Tensor)

    cells = zoo.measure(row_of(step), "cpu", rounds=1, steps=1)
    check = zoo.check(row_of(step), "cpu")
    assert check.deterministic and not check.repeats
    assert [peer for peer, same in check.same.items() if same] == [zoo.AGAIN]
    assert not torch.are_deterministic_algorithms_enabled()
    assert zoo.check(row_of(lambda x: x + 1.0), "cpu").repeats
    assert len(cells) == len(zoo.VARIANTS)


def test_a_variant_that_fails_is_a_reason_in_its_cell():
    def step(x):
        if isinstance(x, autofuse.Tensor):
            raise ArithmeticError("no such luck")
        return x * 2

    eager, again, *ours = zoo.measure(row_of(step), "cpu", rounds=1, steps=1)
    assert eager.median and again.median and eager.ratio == 1
    assert [cell.reason for cell in ours] == ["ArithmeticError: no such luck"] * 4
    said = zoo.markdown(Results({}, [eager, again, *ours]))
    assert said.startswith("| program") and "not installed" not in said


def test_a_package_that_is_missing_is_said():
    cells = zoo.measure(row_of(None, needs="no_such_package"), "cpu", rounds=1)
    assert {cell.reason for cell in cells} == {"not installed"} and len(cells) == len(zoo.VARIANTS)
    assert zoo.line(cells).split() == ["x", "not", "installed"]
    assert zoo.markdown(Results({}, cells)).endswith("- Not installed: x.\n")


def test_losers_come_first():
    def cells(name, fuse, wrap, kernels):
        ratios = {
            "eager": 1.0,
            zoo.AGAIN: 0.99,
            "autofuse.fuse": fuse,
            zoo.EVERY: 2.0,
            "autofuse": wrap,
            zoo.ALL: 3.0,
        }
        return [Cell(name, "cuda", peer, median=100 * ratio, ratio=ratio, kernels=kernels,
                     same_bits=None if peer == "eager" else name != "worst")
                for peer, ratio in ratios.items()]  # fmt: skip

    found = [*cells("good", 0.5, 0.75, 3), *cells("worst", 1.03, 1.25, 4), *cells("even", 1, 1, 5)]
    _, _, *table, _, fuse, _, wrap, _ = zoo.markdown(Results({}, found)).splitlines()
    assert table == [
        f"| worst | 100 | 0.99 | 1.03 | 2.00 | 1.25 | 3.00 |{' 4 |' * 5}{' OTHER |' * 4}",
        f"| even | 100 | 0.99 | 1.00 | 2.00 | 1.00 | 3.00 |{' 5 |' * 5}{' same |' * 4}",
        f"| good | 100 | 0.99 | 0.50 | 2.00 | 0.75 | 3.00 |{' 3 |' * 5}{' same |' * 4}",
    ]
    bits = "eager's bits in 2 of 3."
    assert fuse == f"- fuse: median 1.000, worst 1.030 (worst), 1 of 3 over 1.02; {bits}"
    assert wrap == f"- wrap: median 1.000, worst 1.250 (worst), 1 of 3 over 1.05; {bits}"


def test_a_run_writes_results_and_prints_the_table(tmp_path, capsys):
    path = tmp_path / "zoo.json"
    zoo.main(["--device", "cpu", "--size", "tiny", "--rounds", "2", "--steps", "1",
              "--only", "Gray-Scott", "--out", str(path)])  # fmt: skip
    out = capsys.readouterr().out
    results = load(path)
    assert [cell.peer for cell in results.cells] == list(zoo.VARIANTS)
    assert all(cell.median and cell.ratio for cell in results.cells)
    assert zoo.markdown(results) in out and zoo.line(results.cells) in out
