"""The benchmarks run, on the CPU and tiny, so that they cannot rot: workloads, peers, results."""

import dataclasses
import functools
import json
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

import autofuse
from support import DEVICES, assert_same

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import alone
import compare
import drawing
import first_contact
import handwritten
import machine
import peers
import programs
import regimes
import run
import tables
import timeline
import training
from results import Cell, Results, load
from timing import Call
from workloads import ON_CPU, WORKLOADS, Workload, chosen

ROOT = Path(__file__).parent.parent
SCALE = 0.02
LIMITS = run.Limits(rounds=2, round_s=1e-4, scale=SCALE)
BY_LABEL = {row.label: row for row in WORKLOADS}
KEYED = {row.key: row for row in reversed(WORKLOADS) if row.key and row.dtype is torch.float32}
CHAIN = BY_LABEL["5 ops, 64x256 float32"]
each_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda row: row.label)
each_key = pytest.mark.parametrize("key", KEYED, ids=str)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of two libraries that wait for each other's are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(value):
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)]


# workloads


def test_labels_are_unique():
    assert len(BY_LABEL) == len(WORKLOADS) and set(ON_CPU) <= set(WORKLOADS) and len(ON_CPU) == 3


@each_workload
def test_arguments_are_the_same_at_every_call_and_never_zeros(workload):
    first, second = (tensors(workload.make("cpu", SCALE).args) for _ in range(2))
    assert all(map(torch.equal, first, second)) and len(first) == len(second)
    for t in first:
        assert t.dtype is workload.dtype
        assert t.numel() < 4 or len(t.unique()) > 1


@each_workload
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_values_under_autofuse(workload, device):
    """Through the wrapped form and the decorator, arguments that are written to included."""
    rtol = 2e-5 if workload.dtype is torch.float32 else 2e-2
    programs_ = [workload.make(device, SCALE) for _ in range(3)]
    with torch.set_grad_enabled(programs_[0].grad):
        eager, *ours = (
            (prepare(workload, program).run(), program)
            for prepare, program in zip(
                (peers.eager, peers.wrapped, peers.fused), programs_, strict=True
            )
        )
        want = peers.arrays_of(eager[0])
        assert want and all(t.isfinite().all() for t in want)
        for result, program in ours:
            assert_same(peers.arrays_of(result), want, None if device == "cuda" else rtol)
            if program.mutates:
                got, expected = ([t.detach() for t in tensors(p.args)] for p in (program, eager[1]))
                assert_same(got, expected, None if device == "cuda" else rtol)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_a_chain_has_the_ops_that_its_name_says(length):
    assert count(BY_LABEL[f"{length} op{'s' * (length > 1)}, 64x256 float32"]) == length


@pytest.mark.parametrize(
    "label, ops",
    [
        ("SDE step, 30 ops, 4096 float32", 30),
        ("bias and gate, 6 ops, 64x256 float32", 6),
        ("GLU of halves, 5 ops, 64x256 float32", 5),
        ("every second column, 5 ops, 2^26 float32", 5),
        ("RNN loop of 100, 64x256 float32", 5),
    ],
)
def test_a_step_has_the_pointwise_ops_that_are_said(label, ops):
    assert count(BY_LABEL[label]) == ops


def count(workload):
    """Pointwise ops of one call of a workload's function."""

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.seen += torch.Tag.pointwise in func.tags
            return func(*args, **(kwargs or {}))

    program = workload.make("cpu", SCALE)
    with torch.no_grad(), Counting():
        program.fn(*program.args)
    return Counting.seen


def test_a_loop_feeds_its_results_back():
    program = BY_LABEL["LSTM cell, forward, 64x256 float32"].make("cpu", 0.1)
    h, c, *fixed = program.args
    for _ in range(program.calls):
        h, c = programs.lstm_cell(h, c, *fixed)
    assert program.calls == program.steps == 2
    assert_same(program.runner(program.fn, program.args)(), (h, c), None)


# versions written by hand


@each_key
def test_array_versions_compute_the_workload(key):
    """CuPy's and JAX's text, over NumPy's functions of the same names."""
    fn = handwritten.arrays(key, np, lambda fn: fn)
    if fn is None:
        assert key[0].startswith("rnn")
        fn = functools.partial(handwritten._rnn_step, np, lambda z: 1 / (1 + np.exp(-z)))
        if key == ("rnn loop",):
            pytest.skip("five of the steps that are tested as ('rnn',); needs JAX")
    program = KEYED[key].make("cpu", SCALE)
    got = fn(*(t.numpy() for t in program.args))
    want = program.fn(*program.args)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        torch.testing.assert_close(torch.from_numpy(np.asarray(a)), b, rtol=1e-4, atol=1e-4)


@each_key
def test_jiterator_takes_the_source(key):
    from torch.cuda.jiterator import _CodeParser

    found = handwritten.jiterator(key)
    if found is None:
        assert key[0].startswith("rnn")
        return
    code, outputs, operands = found
    parsed = _CodeParser(code)
    assert parsed.function_name == "fused" and parsed.return_type == ("T", "void")[outputs - 1]
    count = len(operands(*KEYED[key].make("cpu", SCALE).args))
    assert parsed.function_params.count("T") == count + (outputs if outputs > 1 else 0)


@pytest.mark.parametrize("key", [("rnn",), ("rnn loop",), ("chain", 5), ("heston",)], ids=str)
def test_jax_versions(key):
    pytest.importorskip("jax", reason="a peer's version needs the peer: JAX is not installed")
    workload = KEYED[key]
    program = workload.make("cpu", SCALE)
    want = peers.arrays_of(peers.eager(workload, program).run())
    for prepare in (peers.jax, peers.jax_loop) if program.calls > 1 else (peers.jax,):
        call = prepare(workload, program)
        result = call.run()
        call.wait(result, "cpu")
        for a, b in zip(peers.arrays_of(result), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# peers


def cells_of(workload, *names, limits=LIMITS):
    chosen = tuple(peer for peer in peers.PEERS if peer.name in names)
    return {cell.peer: cell for cell in run.bench(workload, chosen, "cpu", limits)}


def test_names_are_known():
    names = {peer.name for peer in peers.PEERS}
    assert len(names) == len(peers.PEERS)
    for row in WORKLOADS:
        assert set(row.leave_out) <= names, row.label
    assert {tables.OURS, "eager", "autofuse.fuse"} <= names and set(compare.OURS) <= names


def test_a_peer_that_is_missing_says_why():
    for peer in peers.PEERS:
        why = peer.missing("cpu")
        assert why == "" or why in ("not installed", "needs CUDA"), (peer.name, why)
    assert not any(peer.missing("cpu") for peer in peers.PEERS[:4])
    cells = cells_of(CHAIN, "eager", "CUDA graph")
    assert cells["CUDA graph"].reason == "needs CUDA" and cells["CUDA graph"].median is None


@pytest.mark.parametrize("label", [
    "5 ops, 64x256 float32", "GLU of halves, 5 ops, 64x256 float32",
    "RNN loop of 100, 64x256 float32", "GRU cell, forward + backward, 64x256 float32",
])  # fmt: skip
def test_jit_has_the_values_of_eager(label):
    cells = cells_of(BY_LABEL[label], "eager", "torch.jit")
    cell = cells["torch.jit"]
    assert cell.median and cell.same_bits and cell.note in ("scripted", "traced"), cell


@pytest.mark.parametrize("label", [
    "5 ops, 64x256 float32", "LSTM cell, forward, 64x256 float32",
    "LSTM cell, forward + backward, 64x256 float32",
])  # fmt: skip
def test_compile_has_the_values_of_eager(label, monkeypatch):
    """Both modes, without their compiler: what is theirs here is how they are called."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, mode=None: real(fn, backend="eager"))
    for peer in peers.PEERS[3:5]:
        free = dataclasses.replace(peer, missing=lambda device: "")
        cells = {
            c.peer: c for c in run.bench(BY_LABEL[label], (peers.PEERS[0], free), "cpu", LIMITS)
        }
        assert cells[peer.name].same_bits and cells[peer.name].median, cells[peer.name]


def peer_of(prepare):
    return peers.Peer("torch.jit", prepare)  # any name of the table


def test_a_peer_that_fails_is_a_reason_in_its_cell():
    def raises(workload, program):
        raise ArithmeticError("no such luck\nbecause")

    def fails_later(workload, program):
        left = [5]

        def call():
            left[0] -= 1
            return 1 / left[0]

        return Call(call)

    def hangs(workload, program):
        time.sleep(20)

    limits = dataclasses.replace(LIMITS, patience=0.2)
    for prepare, reason in (
        (raises, "ArithmeticError: no such luck"),
        (fails_later, "ZeroDivisionError: division by zero"),
        (hangs, "TimeoutError: no result after 0 s"),
    ):
        eager, failed = run.bench(CHAIN, (peers.PEERS[0], peer_of(prepare)), "cpu", limits)
        assert eager.median and failed.median is None and failed.reason == reason


def test_what_a_peer_wrote_while_it_prepared_is_undone():
    """So that the first result is the first step's."""
    workload = BY_LABEL["Adam, 100 parameters, 256x256, 256 float32"]

    def hasty(workload, program):
        call = peers.eager(workload, program)
        call.run()
        return call

    _, cell = run.bench(workload, (peers.PEERS[0], peer_of(hasty)), "cpu", LIMITS)
    assert cell.same_bits


def test_other_bits_are_said():
    def off(workload, program):
        return Call(lambda: workload.make("cpu", SCALE).fn(*program.args) + 1)

    _, cell = run.bench(CHAIN, (peers.PEERS[0], peer_of(off)), "cpu", LIMITS)
    assert cell.same_bits is False


# a run and its results


def test_a_run_writes_results_and_the_section(tmp_path, capsys):
    run.main([
        "--device", "cpu", "--scale", str(SCALE), "--rounds", "2", "--round-ms", "0.1",
        "--only", "5 ops, 64x256", "SDE step, 30 ops, 4096", "--out", str(tmp_path),
        "--peers", "eager", "autofuse", "torch.jit", "CUDA graph", "--commit", "0123abc",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert (
        "without CUDA graph: needs CUDA" in out
        and out.count("eager alone ") >= 3
        and "ratios to it" in out
    )
    (path,) = tmp_path.iterdir()
    results = load(path)
    assert results.head["commit"] == "0123abc" and results.head["machine"] == machine.name("cpu")
    assert len(results.cells) == 3 * 5 and path.stem == machine.slug(machine.name("cpu"))
    for cell in results.cells:
        assert cell.median if cell.peer in ("eager", "autofuse") else cell.median or cell.reason
        if cell.median:
            assert cell.p20 <= cell.median <= cell.p80 and cell.ratio
    again = tmp_path / "again.json"
    results.save(again)
    assert again.read_text() == path.read_text() and json.loads(again.read_text())
    section = tables.markdown(results, path.name)
    run.main(["--page", str(path)])
    assert capsys.readouterr().out == section
    page = tmp_path / "performance.md"
    page.write_text(f"text\n{tables.BEGIN}old\n{tables.END}\n")
    run.main(["--page", str(path), "--into", str(page)])
    assert page.read_text() == f"text\n{tables.BEGIN}{section}{tables.END}\n"
    for text in (path.read_text(), out):  # hardware and versions, no place or person
        assert str(ROOT) not in text and str(Path.home()) not in text


def test_the_budget(tmp_path, capsys):
    run.main([
        "--device", "cpu", "--scale", str(SCALE), "--rounds", "1", "--round-ms", "0.1",
        "--only", "5 ops, 64x256", "--out", str(tmp_path), "--budget", "0",
        "--name", "x", "--no-alone",
    ])  # fmt: skip
    cells = {cell.peer: cell for cell in load(tmp_path / "x.json").cells}
    assert cells["eager"].median and cells["autofuse"].median
    assert cells["torch.jit"].reason == "left out: the budget of 0 s was spent"


def test_eager_alone_never_imports_autofuse():
    """Its process asserts that; what it measured before it was ended is kept."""
    words = ["--device", "cpu", "--scale", str(SCALE), "--rounds", "1", "--round-ms", "0.1"]
    args = run.parser().parse_args([*words, "--only", "SDE step, 30 ops"])
    figures, why = alone.ask(args, 60)
    assert why == "" and list(figures) == [("SDE step, 30 ops, 4096 float32", "cpu")]
    assert all(us > 0 for us in figures["SDE step, 30 ops, 4096 float32", "cpu"])
    assert alone.ask(args, 0.01) == ({}, "ended after 0 s")


def test_the_run_on_a_gpu_also_has_loops_on_the_cpu():
    rows = chosen("cuda", [])
    assert [row for row, device in rows if device == "cpu"] == list(ON_CPU)
    assert [row for row, _ in chosen("cpu", [])] == list(WORKLOADS)
    assert [row.label for row, _ in chosen("cpu", ["SDE step, 30 ops, 4"])] == [
        "SDE step, 30 ops, 4096 float32"
    ]


def test_machine():
    head = machine.facts("cpu", "abc")
    assert head["commit"] == "abc" and head["versions"]["torch"] == torch.__version__
    assert machine.slug("NVIDIA H200") == "nvidia_h200"
    assert machine.slug("Intel(R) Xeon(R) CPU @ 2.50GHz") == "intel_xeon_cpu_2_50ghz"
    assert machine._number("1980") == 1980 and machine._number("580.65.06") == "580.65.06"


def test_clocks_are_read_from_what_nvidia_smi_says(monkeypatch):
    said = "580.65.06, 1980, 1980, 3201, 41, 119.52\n"
    answer = machine.subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **more: answer)
    assert machine.clocks() == {
        "driver": "580.65.06", "sm_mhz": 1980, "sm_max_mhz": 1980, "memory_mhz": 3201,
        "temperature_c": 41, "power_w": 119.52,
    }  # fmt: skip
    answer.stdout = "Failed to initialize NVML\n"
    assert machine.clocks() == {}

    def missing(*args, **more):
        raise FileNotFoundError

    monkeypatch.setattr(machine.subprocess, "run", missing)
    assert machine.clocks() == {} and machine.head_commit() == "unknown"


# the section of docs/performance.md


def cell(workload, peer, median, ratio, spread=0.02, **more):
    low, high = median * (1 - spread), median * (1 + spread)
    return Cell(workload, "cpu", peer, "host", median, low, high, ratio, **more)


def results_of(*cells):
    head = {"machine": "CPU", "threads": 1, "versions": {"torch": "2"}, "commit": "abc",
            "date": "2026-01-01"}  # fmt: skip
    return Results(head, list(cells))


def test_the_section_says_where_autofuse_loses():
    text = tables.markdown(results_of(
        cell("one", "eager", 10.0, 1.0), cell("one", "autofuse", 17.2, 1.72),
        cell("two", "eager", 10.0, 1.0), cell("two", "autofuse", 9.7, 0.97),
        cell("three", "eager", 100.0, 1.0), cell("three", "autofuse", 30.0, 0.3, same_bits=True),
        cell("three", "torch.compile", 20.0, 0.2, same_bits=False),
        Cell("three", "cpu", "JAX jit", reason="not installed"),
    ), "x.json")  # fmt: skip
    flat = " ".join(text.split())
    assert "faster than eager in 2 of these 3 rows" in flat and "the best 0.30 (three)" in flat
    assert "It loses to eager, and should not be used, in: one 1.72." in flat
    assert "Nothing is gained, or little, in: two 0.97." in flat
    assert "behind in 1 (its time over autofuse's): three 0.67." in flat
    assert "autofuse 1 of 1, torch.compile 0 of 1" in flat and "JAX" not in text
    assert "| three | 100 | **0.30** | 0.20 |" in text and "commit abc" in flat


def test_what_differs_from_round_to_round_is_no_figure():
    text = tables.markdown(results_of(
        cell("one", "eager", 10.0, 1.0), cell("one", "autofuse", 5.0, 0.5),
        Cell("one", "cpu", "torch.jit", "host", 90.0, 4.0, 300.0, 9.0),
        Cell("two", "cpu", "eager", "host", 10.0, 4.0, 9.0, 1.0), cell("two", "autofuse", 5.0, 0.5),
    ), "x.json")  # fmt: skip
    flat = " ".join(text.split())
    assert "faster than eager in 1 of these 1 rows" in flat and "| one | 10.0 | **0.50** |" in text
    assert "the row: one, torch.jit (4.0 to 300); two, eager (4.0 to 9.0)." in flat


def test_the_page_has_the_sections_of_the_results_that_it_names():
    page = (ROOT / "docs" / "performance.md").read_text()
    sections = tables.sections_of(page)
    assert sections
    for section in sections:
        name = tables.file_of(section)
        path = ROOT / "bench" / "results" / name
        assert section == tables.markdown(load(path), name), (
            "replace what stands between the page's markers by what `python bench/run.py --page "
            f"bench/results/{name}` prints; --into docs/performance.md does it"
        )
        other = section.replace("us per step", "US PER STEP")
        assert tables.replaced(page, other) == page.replace(section, other) != page


# what changed


def test_a_planted_change_is_found_and_noise_is_not(tmp_path, capsys):
    rng = random.Random(0)
    names = [f"workload {k}" for k in range(50)]

    def measured(slow=(), fast=()):
        cells = []
        for name in names:
            factor = 1.3 if name in slow else 0.7 if name in fast else 1.0
            for peer, us in (("eager", 30.0), ("autofuse", 12.0 * factor)):
                times = sorted(us * rng.gauss(1, 0.02) for _ in range(7))
                cells.append(Cell(name, "cpu", peer, "host", times[3], times[1], times[5],
                                  times[3] / 30.0))  # fmt: skip
        return results_of(*cells)

    old = measured()
    for _ in range(10):
        quiet = compare.compare(old, measured())
        assert not quiet.slower and not quiet.faster and not quiet.failed
    for ratios in (False, True):
        found = compare.compare(old, measured(names[:2], names[2:3]), ratios=ratios)
        assert {c.new.workload for c in found.slower} == set(names[:2]) and found.failed
        assert [c.new.workload for c in found.faster] == names[2:3]
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    old.save(paths[0])
    measured(names[:1]).save(paths[1])
    assert compare.main([str(path) for path in paths]) == 1
    out = capsys.readouterr().out
    assert "slower: 1\n  workload 0 on cpu, autofuse: " in out and "faster: 0" in out
    assert compare.main([str(paths[0])] * 2) == 0


def test_a_change_below_the_least_one_does_not_count():
    old, new = (results_of(cell("x", "autofuse", us, 1.0, 0.001)) for us in (100.0, 103.0))
    assert not compare.compare(old, new).slower
    assert len(compare.compare(old, new, least=0.02).slower) == 1


def test_another_host_is_told_from_another_program():
    old = results_of(cell("x", "eager", 10.0, 1.0), cell("x", "autofuse", 5.0, 0.5))
    new = results_of(cell("x", "eager", 20.0, 1.0), cell("x", "autofuse", 10.0, 0.5))
    times, ratios = (compare.compare(old, new, ratios=ratios) for ratios in (False, True))
    assert len(times.slower) == 2 and times.drift == 2.0 and not ratios.slower
    assert "eager itself takes 2.00 of its time before" in compare.report(old, new, times)


def test_a_lost_figure_is_found():
    old = results_of(cell("x", "autofuse", 5.0, 0.5), Cell("x", "cpu", "JAX jit", reason="no"))
    new = results_of(Cell("x", "cpu", "autofuse", reason="died"), cell("x", "JAX jit", 3.0, 0.3))
    found = compare.compare(old, new)
    assert [c.reason for c in found.lost] == ["died"] and found.failed
    assert [c.peer for c in found.gained] == ["JAX jit"]
    assert "autofuse: died" in compare.report(old, new, found)


# regimes


def points(host, floor, slope):
    """A host of `host` us, a device of `floor` us or `slope` us per row."""
    batches = [1 << k for k in range(4, 16)]
    busy = [max(floor, slope * batch) for batch in batches]
    return [regimes.Point(n, max(host, us), us) for n, us in zip(batches, busy, strict=True)]


def test_host_bound_then_bandwidth_bound():
    found = regimes.sweep("x", "eager", points(host=32.0, floor=4.0, slope=1 / 32))
    assert set(found.regimes) == {"host", "bandwidth"}
    assert list(found.regimes) == sorted(found.regimes, key=("host", "bandwidth").index)
    assert found.crossover == pytest.approx(1024)


def test_latency_bound_then_bandwidth_bound():
    found = regimes.sweep("x", "CUDA graph", points(host=1.0, floor=16.0, slope=1 / 32))
    assert found.regimes[0] == "latency" and found.regimes[-1] == "bandwidth"
    assert "host" not in found.regimes and found.crossover == pytest.approx(512)


def test_no_crossover_where_none_is_reached():
    found = regimes.sweep("x", "eager", points(host=1e6, floor=4.0, slope=1 / 32))
    assert set(found.regimes) == {"host"} and found.crossover is None
    assert "no crossover" in regimes.show(found)


def test_with_one_clock_flat_is_host_bound():
    seen = [regimes.Point(p.batch, p.wall) for p in points(32.0, 4.0, 1 / 32)]
    found = regimes.sweep("x", "eager", seen)
    assert set(found.regimes) == {"host", "bandwidth"} and found.crossover == pytest.approx(1024)


def test_the_bar_and_its_arrow():
    marks, arrow = drawing.bar([16, 32, 64], ["host", "latency", "bandwidth"], 32.0)
    assert marks == "16 ░░░░▒▒▒▒████ 64"
    assert arrow.index("^") == marks.index("▒") and arrow.endswith("at a batch of 32")


def test_the_svg_is_well_formed():
    sweeps = [
        regimes.sweep(f"{name} & <5>", peer, points(32.0, 4.0, 1 / 32))
        for name in ("a", "b", "c") for peer in ("eager", "autofuse")
    ]  # fmt: skip
    root = ElementTree.fromstring(drawing.svg(sweeps, "caption"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}polyline")) == 3 * 2 * 2  # wall and device
    texts = [t.text for t in root.iter(f"{space}text")]
    assert "a & <5>" in texts and "autofuse" in texts and "caption" in texts


def test_regimes_runs(tmp_path, capsys):
    regimes.main([
        "--device", "cpu", "--smallest", "1", "--largest", "3", "--rounds", "1",
        "--round-ms", "0.1", "--svg", str(tmp_path / "r.svg"),
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("-bound") == 2 * len(regimes.SWEEPS) * 3
    ElementTree.parse(tmp_path / "r.svg")


# timeline


class Event:
    """What torch.profiler knows of one range."""

    def __init__(self, name, begin, end, device=DeviceType.CPU, children=()):
        self.name, self.device_type, self.cpu_children = name, device, list(children)
        self.time_range = SimpleNamespace(start=begin, end=end)


def profile_of_a_turn():
    inside = [Event("aten::matmul", 110, 130), Event("autofuse: add, tanh", 130, 140),
              Event("cudaDeviceSynchronize", 140, 180)]  # fmt: skip
    on_device = [
        Event("sm90_xmma_gemm_f32", 125, 150, DeviceType.CUDA),
        Event("af_add_tanh", 150, 170, DeviceType.CUDA),
        Event("autofuse: add, tanh", 150, 170, DeviceType.CUDA),  # the range, repeated
        Event("later", 300, 310, DeviceType.CUDA),
    ]
    return [Event(timeline.TURN, 100, 190, children=inside), *inside, *on_device]


def test_a_turn_is_read_from_a_profile():
    (turn,) = timeline.turns_of("fused", profile_of_a_turn())
    assert [(span.begin, span.end, span.kind) for span in turn.host] == [
        (10, 30, "matmul"), (30, 40, "fused"), (40, 80, "wait"),
    ]  # fmt: skip
    assert [(span.name, span.kind) for span in turn.device] == [
        ("sm90_xmma_gemm_f32", "matmul"), ("af_add_tanh", "fused"),
    ]  # fmt: skip
    assert turn.us == 80
    assert timeline.Span("void at::native::vectorized_elementwise_kernel", 0, 1).kind == "eager"
    assert timeline.heading(turn) == "fused: 80 us, 2 kernels"


def test_the_timeline_is_drawn():
    turns = timeline.turns_of("a < b", profile_of_a_turn())
    text = timeline.draw(turns, ["caption & more"])
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    drawn = [one for one in root.iter(f"{space}rect") if one.get("class") in timeline.KINDS]
    assert len(drawn) == 5 + 3  # spans, and the legend
    right = max(float(one.get("x")) + float(one.get("width")) for one in drawn[:5])
    assert right <= timeline.WIDTH - timeline.RIGHT
    said = [one.text for one in root.iter(f"{space}text")]
    assert "caption & more" in said and "a < b: 80 us, 2 kernels" in said
    for longest in (3.0, 80.0, 999.0, 30_000.0):
        assert 3 <= longest / timeline.tick(longest) <= 10


def test_timeline_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timeline, "SHAPE", (16, 16))
    monkeypatch.setattr(timeline, "TURNS", 3)
    path = tmp_path / "t.svg"
    before = autofuse.config.compile, autofuse.config.measure
    try:
        timeline.main(["--device", "cpu", "--steps", "2", "--svg", str(path)])
    finally:
        autofuse.config.compile, autofuse.config.measure = before
    ElementTree.parse(path)
    names = re.findall("<title>(.*?): [0-9.]+ us</title>", path.read_text())
    assert sum(name.startswith("autofuse: af_add_sigmoid") for name in names) == 2
    assert names.count("aten::matmul") == 4 and names.count("aten::tanh") == 2
    title = re.search("<title>(.*?)</title>", path.read_text()).group(1)
    assert title.startswith("eager: ") and f": {title}](t.svg)" in capsys.readouterr().out


def test_every_sweep_makes_the_batch_that_is_asked_for():
    for name, (maker, limit, key) in regimes.SWEEPS.items():
        row = Workload(name, functools.partial(maker, batch=8), "8", key=key)
        program = row.make("cpu")
        first = program.args[0]
        assert first.numel() % (8 * regimes.WIDTH) == 0 and program.steps == 1, name
        assert limit <= 18 and (key in KEYED), name


def test_autofuse_compiles_at_once_in_every_benchmark():
    """What is measured is not the way there."""
    for path in ("run.py", "regimes.py", "overhead.py", "training.py"):
        assert 'autofuse.config.compile = "now"' in (ROOT / "bench" / path).read_text()
    assert autofuse.config.compile == "now"


@pytest.mark.parametrize("name", ["LSTM cell", "LSTM cell, checkpoint every 10", "GRU cell"])
def test_training_under_autocast(name, monkeypatch, capsys):
    monkeypatch.setattr(training, "STEPS", 12)
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(training, "HIDDEN", 8)
    training.measure(name, "cpu", 1, 1, False, False, autocast=True)
    out = capsys.readouterr().out
    assert f"{name}: same bits" in out and out.count("forward + backward") == 2
    assert "checkpoint" in name or autofuse.stats().ops_recorded > 100


@pytest.mark.parametrize("name", training.AUTOCAST)
def test_results_under_autocast_are_like_the_last_input(name, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(training, "BATCH", 4)
    inputs = training.states(name, "cpu")
    if inputs[0].dim() == 3 and len(inputs) == 1:
        inputs[0] = inputs[0][:1, :3]
    model = training.AUTOCAST[name]()
    outs = training.stepper(model, inputs, False, autocast=True)()
    last = inputs[-1]
    assert all(out.shape == last.shape and out.dtype is last.dtype for out in outs)
    assert torch.stack([g.norm() for g in training.stepper(model, inputs, True, True)()]).min() > 0


def test_two_checkouts_in_lockstep():
    """This one against itself, in another process."""
    command = [sys.executable, ROOT / "bench/lockstep.py", ROOT, "--device", "cpu",
               "--rounds", "2", "--iterations", "1", "5 ops, operators", "RNN step"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (_, *said) = done.stdout.splitlines()
    assert [line[:20].rstrip() for line in said] == ["5 ops, operators", "RNN step"]
    assert all(0.01 < float(line.rpartition("ratio ")[2]) < 100 for line in said), said


FEW = {
    "ode": ["--batch", "8", "--steps", "2"], "mlp": ["--epochs", "1", "--width", "8"],
    "conv": ["--steps", "2", "--batch-size", "2"], "swish": ["--size", "8", "--steps", "2"],
    "lstm": ["--steps", "2", "--length", "3", "--hidden", "4"],
}  # fmt: skip


@pytest.mark.parametrize("program", first_contact.PROGRAMS)
@pytest.mark.parametrize("way", ["plain", "fused"])
def test_programs_of_strangers_run(program, way):
    """They know nothing of autofuse, and the one module of each can be fused."""
    assert "autofuse" not in (first_contact.PLACE / f"{program}.py").read_text()
    assert first_contact.timed(program, way, [*FEW[program], "--device", "cpu"]) > 0


@pytest.mark.parametrize("ratios, word", [
    ((3.0, 0.5, 0.6), "faster"), ((0.5, 1.5, 1.2), "slower"), ((1.0, 0.5, 1.1), "no difference"),
    ((1.0, 0.99, 0.98), "no difference"), ((1.0, 1.08, 1.09), "no difference"),
])  # fmt: skip
def test_what_is_measured_of_programs_of_strangers(ratios, word, monkeypatch):
    times = iter([text for ratio in ratios for text in ("2.0", str(2.0 * ratio))])
    monkeypatch.setattr(
        first_contact.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=next(times))
    )
    said, counted = first_contact.measured("ode", [], 2)
    assert said.startswith(word) and counted == list(ratios[1:])
