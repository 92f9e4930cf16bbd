"""Logs, dumps, check mode and the progress line: what they say, and that results stay the same."""

import ast
import contextlib
import inspect
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse import hooks, progress
from autofuse.chain import state
from autofuse.kernel import text as codegen
from autofuse.observe import check
from autofuse.observe import events as observe
from autofuse.ops import row as op
from autofuse.record import flush as flushing
from autofuse.record import modes
from autofuse.supply import build
from autofuse.supply import kernels as compile
from support import elsewhere, pieces_of, random_tensor

HERE = Path(__file__).name


@pytest.fixture
def settings(monkeypatch):
    """Set fields of the config; what they were comes back."""

    def set_(**fields):
        for name, value in fields.items():
            monkeypatch.setattr(autofuse.config, name, value)

    yield set_
    monkeypatch.undo()
    assert hooks.flushing is None and hooks.looked_up is None


def line_of(text: str, function) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(k for k, line in enumerate(lines) if text in line)


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    event, *words = shlex.split(record.getMessage())
    return {"event": event, **dict(word.split("=", 1) for word in words)}


# --- logs -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_on_disk")
def test_a_line_per_event(settings, caplog):
    settings(logs={"flush", "kernel", "cache"})
    x, y = autofuse.wrap(torch.randn(8, 16)), torch.randn(16)

    def run():
        return autofuse.materialize((x * y + 2.25).neg())

    run()
    run()
    said = [fields_of(record) for record in caplog.records]
    assert [line["event"] for line in said] == ["kernel", "cache", "flush", "flush"]
    kernel, cache, first, second = said
    where = (inspect.getsourcefile(run), line_of("materialize", run))
    for line in said:
        assert line["at"].endswith(f"{HERE}:{where[1]}")
        assert line["ops"] == "mul,add,neg"
        assert line["shapes"] == "float32[8x16],float32[16]->float32[8x16]"
        assert float(line["us"]) > 0
    assert [line["outcome"] for line in said] == ["hard miss"] * 3 + ["hit"]
    assert kernel["name"] == cache["name"] == "af_mul_add_neg" and kernel["target"] == "cpu"
    assert first["reason"] == second["reason"] == "materialize"
    assert first["kernels"] == "1" and first["ran"] == "fused"
    assert {record.name for record in caplog.records} == {
        "autofuse.flush", "autofuse.kernel", "autofuse.cache"
    }  # fmt: skip


def test_a_soft_miss(settings, caplog):
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize((x * 2.75).sin().cos().exp2())
    compile.clear_kernels()
    modes.forget_kernels()
    flushing.flush_all("test")
    settings(logs="flush,cache")
    autofuse.materialize((x * 2.75).sin().cos().exp2() + 0)  # another chain
    caplog.clear()
    state.this_thread.current.roots.clear()
    state.this_thread.current.open()
    autofuse.materialize((x * 2.75).sin().cos().exp2())
    said = [fields_of(record) for record in caplog.records]
    assert [(line["event"], line["outcome"]) for line in said] == [
        ("cache", "soft miss"), ("flush", "soft miss")
    ]  # fmt: skip


@pytest.mark.usefixtures("nothing_on_disk")
def test_only_what_is_asked_for(settings, caplog):
    settings(logs={"kernel"})
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize(x * 2)
    autofuse.materialize((x * 2.5).cosh().cos().sin())
    assert {record.name for record in caplog.records} == {"autofuse.kernel"}


@pytest.mark.usefixtures("nothing_on_disk")
def test_flushes_that_run_eagerly_say_why(settings, caplog):
    settings(logs="flush", compile="background", compile_after=1000)
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize((x * 2.5).cosh().tan().sin())
    x * 2  # nobody will see it
    flushing.flush_all("test")
    waiting, dead = (fields_of(record) for record in caplog.records)
    assert waiting["ran"] == "eager" and waiting["why"] == "its kernel is not there yet"
    assert waiting["outcome"] == "hard miss" and waiting["kernels"] == "0"
    assert dead["ran"] == "nothing"


@pytest.mark.usefixtures("nothing_on_disk")
def test_a_kernel_from_the_background(settings, caplog):
    settings(logs="kernel", compile="background", compile_after=1)
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize((x * 2.5).cosh().sinh().sin())
    assert autofuse.wait(60)
    (line,) = (fields_of(record) for record in caplog.records)
    assert line["outcome"] == "hard miss" and float(line["us"]) > 1000
    assert line["at"].endswith(f"{HERE}:{line_of('sinh().sin', test_a_kernel_from_the_background)}")
    assert line["shapes"] == "f32 unit->f32 unit"


def test_code_in_no_file_is_shown(settings, caplog):
    settings(logs={"kernel"}, compile="background", compile_after=1)
    x = autofuse.wrap(torch.randn(8))
    exec("autofuse.materialize((x * 2.5).cosh().sinh().tan())", {"autofuse": autofuse, "x": x})
    assert autofuse.wait(60)
    (line,) = (fields_of(record) for record in caplog.records)
    assert line["at"] == "<string>:1"
    assert not any(name.startswith("<") for name, _ in compile.positions)  # not counted for it


@pytest.mark.parametrize("where", ["now", "background"])
def test_observers_are_told_without_locks(settings, where):
    free = []

    class Ours(observe.Observer):
        def looked_up(self, lookup):
            def take():
                free.append(compile._lock.acquire(timeout=10))
                compile._lock.release()

            thread = threading.Thread(target=take)
            thread.start()
            thread.join()

    settings(compile=where, compile_after=1)
    x, ours = autofuse.wrap(torch.randn(8)), Ours()
    observe.add(ours)
    try:
        function = torch.cosh if where == "now" else torch.sinh  # a kernel that is not there
        autofuse.materialize(function(x * 4.5).atan().tan().atan())
        assert autofuse.wait(60)
    finally:
        observe.remove(ours)
    assert free == [True, True]


@pytest.mark.parametrize("name", ["flush", "kernel", "cache"])
def test_a_handler_may_wait_for_a_thread_that_needs_a_value(settings, name):
    """As one that formats a pending tensor does, while another thread has the handler's lock."""
    done, main = [], threading.current_thread()

    class Unlocked(contextlib.nullcontext):
        acquire = release = lambda self: None

    class Waiting(logging.Handler):
        def createLock(self):  # noqa: N802 - logging's name
            self.lock = Unlocked()

        def emit(self, record):
            if threading.current_thread() is main and not autofuse.is_pending(x):
                y = x * 2  # pending in the chain of this thread
                thread = threading.Thread(target=lambda: done.append(y.tolist()), daemon=True)
                thread.start()
                thread.join(10)
                done.append(thread.is_alive())

    x, handler = autofuse.wrap(torch.ones(2)), Waiting()
    function = {"flush": torch.exp2, "kernel": torch.tan, "cache": torch.expm1}[name]
    logging.getLogger("autofuse").addHandler(handler)
    settings(logs={name}, max_nodes=4)
    try:
        autofuse.materialize(function(x) + 2.5)
        y = x
        for _ in range(5):  # a chain that is full is flushed in the middle of recording
            y = function(y) - 1
        autofuse.materialize(y)
    finally:
        autofuse.config.logs = ""
        logging.getLogger("autofuse").removeHandler(handler)
    assert True not in done and done.count([2.0, 2.0]) == done.count(False) > 1


@pytest.mark.usefixtures("nothing_on_disk")
def test_forbidden_kernels_are_hard_misses(settings, caplog):
    settings(logs={"flush", "kernel", "cache"})
    y = (autofuse.wrap(torch.randn(8)) * 4.5).sinh().atan().tan()
    with autofuse.no_compile(), pytest.raises(autofuse.ColdKernelError):
        autofuse.materialize(y)
    cache, flush = (fields_of(record) for record in caplog.records)
    assert cache["event"] == "cache" and cache["outcome"] == "hard miss"
    assert flush["ran"] == "raised" and flush["outcome"] == "hard miss"
    caplog.clear()
    autofuse.materialize(y)
    assert [fields_of(record)["event"] for record in caplog.records] == ["kernel", "cache", "flush"]


def test_a_bad_name_is_said():
    with pytest.raises(
        ValueError, match="config.logs = 'flsh' is not valid; use a set of any of 'flush'"
    ):
        autofuse.config.logs = "flsh"
    assert autofuse.config.logs == frozenset()


def run_program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(autofuse.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
    )


PROGRAM = """
import torch, autofuse
autofuse.config.compile = "now"
x = autofuse.wrap(torch.ones(3))
print((x * 2 + 1).tolist())
"""


def test_environment(tmp_path):
    dump = tmp_path / "kernels"
    ran = run_program(PROGRAM, AUTOFUSE_LOGS="flush, kernel", AUTOFUSE_CHECK="1",
                      AUTOFUSE_ALWAYS_FUSE="1", AUTOFUSE_DUMP_DIR=str(dump),
                      AUTOFUSE_CACHE_DIR=str(tmp_path))  # fmt: skip
    assert ran.returncode == 0 and ran.stdout == "[3.0, 3.0, 3.0]\n"
    kernel, flush = ran.stderr.splitlines()
    assert re.search(r"autofuse\.kernel kernel at=<string>:5 name=af_mul_add ", kernel) or (
        "at='<string>:5'" in kernel
    )
    assert "reason=tolist ops=mul,add" in flush
    assert {path.suffix for path in dump.iterdir()} == {".py", ".ll"}
    failed = run_program("import autofuse", AUTOFUSE_CHECK="yes")
    assert "AUTOFUSE_CHECK='yes' is not valid; use 0 or 1" in failed.stderr
    failed = run_program("import autofuse", AUTOFUSE_LOGS="everything")
    assert "AUTOFUSE_LOGS='everything' is not valid; use any of flush, kernel" in failed.stderr


# --- dumps ----------------------------------------------------------------------------------------


def test_a_dump_directory(settings, tmp_path):
    settings(dump_dir=str(tmp_path / "new" / "kernels"))
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize((x * 3.5).sin().sinh().cos())
    files = sorted((tmp_path / "new" / "kernels").iterdir())
    assert [path.suffix for path in files] == [".ll", ".py"]
    assert files[0].stem == files[1].stem
    assert re.fullmatch(r"af_mul_sin_sinh_cos-[0-9a-f]{12}", files[0].stem)
    text = files[1].read_text()
    assert ast.parse(text) and "v0: f32 = x0 * c0  # mul" in text
    assert 'define void @"af_mul_sin_sinh_cos"' in files[0].read_text()


def test_ptx_is_dumped_for_cuda(tmp_path):
    from autofuse.observe.logs import assembly

    pytest.importorskip("numba.cuda")
    plan = cuda_plan()
    suffix, text = assembly(codegen.source_of(plan), "sm_90")
    assert suffix == ".ptx" and ".visible .entry af_neg(" in text


def cuda_plan():
    from autofuse.program.program import Pointwise, Program, Spec

    view = Spec("f32", (8,), (1,))
    program = Program((Pointwise(op.OPS["neg"], (~0,), "f32", view),), (view,), ())
    return pieces_of(program, "cuda", 0)[0].plan


def test_a_directory_that_cannot_be_written(settings, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    settings(dump_dir=str(tmp_path / "file" / "below"))
    x = autofuse.wrap(torch.randn(8))
    autofuse.materialize((x * 3.5).sin().sinh().tan())
    assert "autofuse: cannot write af_mul_sin_sinh_tan-" in capsys.readouterr().err


# --- check mode -----------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Kernels that compute x - y where the program says x * y."""
    real = build.build

    def wrong(source, target):
        from dataclasses import replace

        return real(replace(source, text=source.text.replace(" * ", " - ")), target)

    monkeypatch.setattr(build, "build", wrong)
    monkeypatch.setattr(
        "autofuse.supply.toolchain.compilers", lambda kind: (f"broken {time.time()}",)
    )
    compile.clear_kernels()
    yield
    compile.clear_kernels()
    for recorder in state.all_recorders:
        flushing.flush(recorder, "test")
        modes.forget(recorder)


@pytest.fixture
def fresh_trie():
    for recorder in list(state.all_recorders):
        flushing.flush(recorder, "test")
        modes.forget(recorder)


def code_of(message):
    """The program that the message of a MismatchError names."""
    return Path(re.search(r"report it with (\S+\.py) ", message).group(1)).read_text()


def test_a_broken_kernel_is_caught(settings, broken, fresh_trie, tmp_path):
    settings(check=True, dump_dir=str(tmp_path))
    x, y = torch.randn(4, 6), torch.randn(6)
    w = autofuse.wrap(x)
    with pytest.raises(autofuse.MismatchError) as caught:
        autofuse.materialize(w * y + 1.5)
    message = str(caught.value)
    line = line_of("w * y + 1.5", test_a_broken_kernel_is_caught)
    assert f"{HERE}:{line}" in message and "needed by 'materialize'" in message
    assert "the result of op 1, add, differs in" in message and "of 24 elements" in message
    assert "mul, add over float32[4, 6], float32[6]" in message
    assert "run those lines inside autofuse.disabled()" in message
    program = code_of(message)
    space: dict = {}
    exec(program, space)
    assert torch.equal(space["results"][0], x * y + 1.5)  # eager's
    assert torch.equal(space["saved"]["eager"][0], x * y + 1.5)
    assert torch.equal(space["fused"][0], x - y + 1.5)  # the kernel's
    kept = re.search(r"torch.load\((.+)\)", program).group(1)
    assert Path(ast.literal_eval(kept)).parent == tmp_path
    assert "autofuse" not in program.replace(kept, "")


def test_a_broken_write_is_caught_and_its_inputs_saved(settings, broken, fresh_trie, tmp_path):
    settings(check=True, dump_dir=str(tmp_path))
    plain = torch.randn(8)
    before = plain.clone()
    w = autofuse.wrap(plain)
    with pytest.raises(autofuse.MismatchError) as caught:
        w.add_(w * 3.0)
    space: dict = {}
    exec(code_of(str(caught.value)), space)
    assert torch.equal(space["results"][-1], before + before * 3.0)


def test_a_broken_kernel_under_grad_and_from_another_thread(settings, broken, fresh_trie, tmp_path):
    settings(check=True, dump_dir=str(tmp_path), always_fuse=True)
    p = torch.nn.Parameter(torch.randn(8))
    pending = autofuse.wrap(torch.randn(8)) * 2.0 * p * p * p

    def work():
        pending.sum()

    error = elsewhere(work)
    assert isinstance(error, autofuse.MismatchError) and f"{HERE}:" in str(error)


def test_a_broken_backward_is_caught(settings, monkeypatch, fresh_trie, tmp_path):
    """The forward kernel is right: it is the gradient that is told."""
    settings(check=True, dump_dir=str(tmp_path), always_fuse=True)
    real = build.build

    def wrong(source, target):
        from dataclasses import replace

        return real(replace(source, text=source.text.replace(" * ", " - ")), target)

    x, p = torch.randn(4, 6), torch.nn.Parameter(torch.randn(4, 6))

    def step():
        return ((autofuse.wrap(x) * p - 1.5).sin() * p).cos()

    y = step()
    autofuse.materialize(y)
    with monkeypatch.context() as patched:
        patched.setattr(build, "build", wrong)
        patched.setattr(
            "autofuse.supply.toolchain.compilers", lambda kind: (f"broken {time.time()}",)
        )
        y = step()
        with pytest.raises(autofuse.MismatchError) as caught:
            y.sum().backward()
    message = str(caught.value)
    line = line_of("y.sum().backward()", test_a_broken_backward_is_caught)
    assert f"{HERE}:{line}" in message and "of 24 elements, first at [" in message
    assert message.startswith("gradient 0, for Input 1, differs in")
    assert "a kernel on cpu for the backward of mul, sub, sin, mul, cos over float32[4, 6], " in (
        message
    )
    assert "run those lines inside autofuse.disabled()" in message
    space: dict = {}
    exec(code_of(message), space)
    for ours, eager in zip(space["results"], space["saved"]["eager"], strict=True):
        assert torch.equal(ours, eager)
    z = (x * p - 1.5).sin() * p
    want = torch.autograd.grad(z.cos().sum(), p)[0]
    assert torch.allclose(sum(space["results"]), want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(space["fused"][0], space["results"][0])
    autofuse.config.check = False
    assert hooks.differentiated is None


def test_every_backward_is_checked_and_gradients_stay(settings, monkeypatch):
    settings(check=True, always_fuse=True)
    checked = []
    real = hooks.differentiated
    monkeypatch.setattr(hooks, "differentiated", lambda *args: (checked.append(args), real(*args)))
    x, p = torch.randn(64), torch.randn(64)

    def gradients(wrap):
        leaf = p.clone().requires_grad_()
        y = (wrap(x) * leaf).sigmoid()
        z = torch.nn.functional.gelu(y * leaf) * y.exp()
        (z.sum() + y.sum()).backward()
        return leaf.grad

    want = gradients(lambda x: x)
    for turn in range(3):
        assert torch.allclose(gradients(autofuse.wrap), want, rtol=1e-4, atol=1e-6)
        assert len(checked) == 3 * (turn + 1)  # also where the layout of gradients is known


def test_a_small_error_of_a_gradient_is_caught(settings, monkeypatch, fresh_trie):
    settings(check=True, always_fuse=True)
    p = torch.nn.Parameter(torch.randn(4096))
    y = (autofuse.wrap(torch.randn(4096)) * p).sin()
    autofuse.materialize(y)
    monkeypatch.setattr(check, "_ULP", 0)  # cos is moved by nothing
    with pytest.raises(autofuse.MismatchError, match="gradient 0, for Input 1, differs"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["fake", "autocast", "inference", "function"])
def test_modes_of_another_thread_do_not_reach_the_comparison(settings, kind):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import BaseTorchFunctionMode

    settings(check=True)
    modes = {
        "fake": FakeTensorMode,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu"),
        "function": BaseTorchFunctionMode,
    }
    x = torch.rand(8, dtype=torch.bfloat16)
    pending = (autofuse.wrap(x) * 2.5 + 1).log()

    def work():
        with modes[kind]():
            autofuse.materialize(pending)

    assert elsewhere(work) is None
    assert autofuse.stats().kernels_launched == 1
    assert torch.allclose(autofuse.unwrap(pending), (x * 2.5 + 1).log(), rtol=1e-2, atol=1e-2)


def test_results_are_left_as_they_are(settings):
    settings(check=True)
    p = torch.nn.Parameter(random_tensor((8, 16), torch.float32))
    x = random_tensor((8, 16), torch.float32, seed=1)
    w = autofuse.wrap(x.clone())
    y = torch.tanh(torch.sigmoid(w * p * 2) * w.exp() * p) + p
    y.sum().backward()
    got = p.grad.clone()
    p.grad = None
    (torch.tanh(torch.sigmoid(x * p * 2) * x.exp() * p) + p).sum().backward()
    assert torch.allclose(got, p.grad, rtol=1e-5, atol=1e-6)
    assert y.grad_fn is not None and autofuse.stats().kernels_launched > 0
    w.mul_(w * 2.0 + 1)  # a write through a kernel
    assert w._version == 1 and torch.equal(autofuse.unwrap(w), x * (x * 2.0 + 1))
    assert autofuse.stats().replays == 0


def test_functions_may_differ_on_the_cpu_by_what_they_carry(settings):
    settings(check=True)
    x, y = random_tensor((1003,), torch.float32), random_tensor((1003,), torch.float32, seed=1)
    w = autofuse.wrap(x)
    for function in (
        lambda a: (a.exp() - a.exp().tanh()) / (a.sin() + 1.001),
        lambda a: a.tan().tan() > 0.3,
        lambda a: torch.lgamma(a).abs().log(),
        lambda a: (a.half() * 1.01).sigmoid() * a.half(),
        lambda a: torch.nn.functional.gelu(a * y),
        lambda a: (a.exp() * 10).to(torch.int64),
    ):
        autofuse.materialize(function(w))
    assert autofuse.stats().kernels_launched == 6


GATES = {
    "readme": lambda x, y, b: torch.sigmoid(x + b[0]) * y + (1 - torch.sigmoid(x + b[0])) * x,
    "gru": lambda x, y, n: (1 - torch.sigmoid(x)) * torch.tanh(n) + torch.sigmoid(x) * y,
    "lstm": lambda x, y, n: torch.sigmoid(n) * torch.tanh(torch.sigmoid(x) * y + n.tanh() * x),
}


@pytest.mark.parametrize("name", GATES)
def test_ops_round_otherwise_after_a_function_that_differs(settings, name):
    """Also where the function's own difference cancels: (1 - z) * t + z * y with y next to t."""
    settings(check=True, always_fuse=True)
    for seed in range(12):
        inputs = [random_tensor((64, 128), torch.float32, seed=3 * seed + k) for k in range(3)]
        autofuse.materialize(GATES[name](*map(autofuse.wrap, inputs)))
        leaf = inputs[0].clone().requires_grad_()
        GATES[name](*map(autofuse.wrap, (leaf, *inputs[1:]))).sum().backward()
    assert autofuse.stats().kernels_launched >= 24


@pytest.mark.parametrize("name", GATES)
def test_a_broken_gate_is_caught(settings, broken, fresh_trie, name):
    settings(check=True)
    inputs = [random_tensor((64, 128), torch.float32, seed=k) for k in range(3)]
    with pytest.raises(autofuse.MismatchError):
        autofuse.materialize(GATES[name](*map(autofuse.wrap, inputs)))


@pytest.mark.parametrize("ulps", [4, 400])
def test_how_far_a_gate_may_be_from_eager(settings, fresh_trie, monkeypatch, ulps):
    settings(check=True)
    inputs = [random_tensor((64, 128), torch.float32, seed=k).abs() for k in range(3)]
    got = check._Forward.got
    monkeypatch.setattr(
        check._Forward, "got", lambda self: [x * (1 + ulps * 2.0**-24) for x in got(self)]
    )
    with contextlib.nullcontext() if ulps < 10 else pytest.raises(autofuse.MismatchError):
        autofuse.materialize(GATES["gru"](*map(autofuse.wrap, inputs)))


def test_a_small_error_of_a_function_is_caught(settings, monkeypatch, fresh_trie):
    settings(check=True)
    monkeypatch.setattr(check, "_ULP", 0)
    x = autofuse.wrap(random_tensor((4096,), torch.float32))
    with pytest.raises(autofuse.MismatchError, match="op 1, sin, differs"):
        autofuse.materialize((x * 1.5).sin())


def test_relaxed_chains_are_not_checked(settings, broken):
    settings(check=True, relaxed=True)
    w = autofuse.wrap(torch.randn(4))
    autofuse.materialize(w * 3.0 + 1.5)


def test_every_row_can_be_written_down():
    """The code of a mismatch needs a name for every torch function that rows call."""
    scalars = {"opmath": 0.5, "common": 0.5}
    x = torch.rand(5) * 0.5 + 0.1
    others = []
    for row in op.OPS.values():
        operands = [
            torch.ones(5, dtype=torch.bool) if role == "bool" else scalars.get(role, x)
            for role in row.roles
        ]
        if row.name.endswith("_int") or row.accepts in ("i", "ib", "bi"):
            operands = [t.int() if isinstance(t, torch.Tensor) else 1 for t in operands]
        inputs = [t for t in operands if isinstance(t, torch.Tensor)]
        writer = check._Writer([(t, f"inputs[{k}]") for k, t in enumerate(inputs)])
        try:
            with writer:
                value = row.eager(*operands)
        except (TypeError, RuntimeError):
            others.append(row.name)  # takes other operands than these
            continue
        space = {"inputs": inputs, "torch": torch}
        exec("\n".join([*writer.lines, f"result = {writer.spelled(value)}"]), space)
        assert torch.equal(space["result"].nan_to_num(), value.nan_to_num()), row.name
    assert len(others) < 12, others


def test_writing_scalars_down():
    x, device = torch.randn(3), torch.device("cpu")
    with check._Writer([(x, "inputs[0]")]) as writer:
        torch.clamp(x, float("-inf"), max=2.5)
        torch.full((2,), float("nan"), dtype=torch.float64, device=device)
    assert writer.lines[0] == 'v0 = torch.clamp(inputs[0], float("-inf"), max=2.5)'
    assert "device=torch.device(type='cpu')" in writer.lines[1]


# --- events ---------------------------------------------------------------------------------------


def test_observers_come_and_go():
    class Ours(observe.Observer):
        def __init__(self):
            self.said = []

        def flushed(self, flush):
            self.said.append(flush.ops)

    first, second = Ours(), Ours()
    x = autofuse.wrap(torch.ones(2))
    observe.add(first)
    autofuse.materialize(x + 1)
    observe.add(second)
    autofuse.materialize(x * 2)
    observe.remove(first)
    observe.remove(first)
    autofuse.materialize(x - 3)
    observe.remove(second)
    autofuse.materialize(x / 4)
    assert first.said == [("add",), ("mul",)] and second.said == [("mul",), ("sub",)]
    assert hooks.flushing is None


def test_an_observer_that_raises_loses_nothing():
    class Ours(observe.Observer):
        def flushing(self, flush, chain, alive, node):
            raise KeyboardInterrupt

    ours = Ours()
    y = autofuse.wrap(torch.ones(2)) + 1
    observe.add(ours)
    try:
        with pytest.raises(KeyboardInterrupt):
            y.tolist()
    finally:
        observe.remove(ours)
    assert autofuse.is_pending(y) and y.tolist() == [2.0, 2.0]


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("nothing_on_disk")
def test_a_long_wait_is_said_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    real = build.build

    def slow(source, target):
        time.sleep(0.2)
        return real(source, target)

    monkeypatch.setattr(build, "build", slow)
    autofuse.materialize((autofuse.wrap(torch.ones(2)) * 7.5).sin().asinh().tan())
    text = terminal.getvalue()
    assert "\rautofuse: compiling af_mul_sin_asinh_tan, 0 s" in text
    assert text.endswith("\r\x1b[K")


def test_nothing_is_said_of_a_short_one_or_to_a_file(monkeypatch):
    for stream, patience in ((Terminal(), 5.0), (io.StringIO(), 0.0), (None, 0.0)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "PATIENCE", patience)
        with progress.progress("compiling"):
            time.sleep(0.02)
        assert stream is None or stream.getvalue() == ""


def test_what_is_pending_is_shown_though_somebody_holds_its_lock(on, monkeypatch, capsys):
    """Who may wait for this thread, as a handler in the middle of a flush does."""
    monkeypatch.setattr("autofuse.inside.patience", lambda seconds: min(seconds, 0.05))
    y = autofuse.wrap(torch.ones(3)) * 2.0
    lock, held, done = y._af.recorder.lock, threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(20)
        autofuse.show(y)
        assert "v0 = mul(x0, 2.0)" in capsys.readouterr().out
    finally:
        done.set()
        thread.join()
    assert autofuse.unwrap(autofuse.materialize(y)).tolist() == [2.0, 2.0, 2.0]
