"""Tiers: chains run as eager ops until their kernel is there, and nobody can tell by the values."""

import contextlib
import gc
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import weakref
from dataclasses import replace

import pytest
import torch

import autofuse
from autofuse import config
from autofuse.chain.claims import writing
from autofuse.chain.state import this_thread
from autofuse.grad.backward import Backward
from autofuse.hot import native
from autofuse.kernel.source import Source
from autofuse.kernel.text import source_of
from autofuse.ops.row import OPS as ROWS
from autofuse.program.program import CONST, Pointwise, Program, Spec
from autofuse.record import flush, policy
from autofuse.record.modes import forget_all
from autofuse.supply import kernels as compile
from autofuse.supply import load
from autofuse.supply import service as background
from autofuse.supply.disk import DiskCache
from autofuse.supply.load import target_of
from autofuse.supply.service import BACKLOG, Job, Service, enough_workers
from autofuse.supply.toolchain import compilers, key_of
from autofuse.torch_private import in_functorch
from support import DEVICES, assert_same, functions_called, pieces_of

both = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def cold(tmp_path, monkeypatch):
    """Nothing in memory, an empty directory on disk, and the background compiler."""
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    forget()
    monkeypatch.setattr(config, "compile", "background")
    monkeypatch.setattr(config, "compile_after", 1)
    monkeypatch.setattr(config, "workers", 1)
    autofuse.errors._said.clear()
    autofuse.reset_stats()
    yield
    forget()


def forget():
    """As a new process begins, but for the disk."""
    compile.clear_kernels()
    forget_all("test")


def chain(x):
    return (x * 2 + 1).abs() - x


WAITS = "waiting for its kernel"


def run_many(x):
    """Chains of many kinds."""
    for k in range(20):
        y = autofuse.wrap(x)
        for _ in range(k + 2):
            y = y * 0.5 + x
        autofuse.materialize(y)


def run(x):
    """One run of the chain, checked."""
    assert_same(autofuse.materialize(chain(autofuse.wrap(x))), chain(x), None)


def jobs(count):
    """Sources of kernels that differ in their number of ops."""
    view, add = Spec("f32", (4,), (1,)), ROWS["add"]
    steps = tuple(Pointwise(add, (k - 1, CONST + k), "f32", view) for k in range(count))
    sources = []
    for k in range(count):
        program = Program(steps[: k + 1], (view,), (float,) * (k + 1))
        (piece,) = pieces_of(program, "cpu", k)
        sources.append(source_of(piece.plan))
    return sources


# --- tiers ---------------------------------------------------------------------------------------


@both
def test_eager_until_the_kernel_is_there(device):
    x = torch.randn(64, device=device)
    run(x)
    assert autofuse.stats().eager_flushes == 1 and autofuse.stats().kernels_launched == 0
    assert autofuse.wait()
    run(x)
    stats = autofuse.stats()
    assert (stats.eager_flushes, stats.kernels_launched) == (1, 1)
    assert (stats.kernels_compiled, stats.kernels_loaded, stats.replays) == (1, 0, 0)


@both
def test_a_chain_is_worth_a_kernel_from_its_nth_run_on(device, monkeypatch):
    monkeypatch.setattr(config, "compile_after", 3)
    x = torch.randn(64, device=device)
    for _ in range(2):
        run(x)
    assert compile.outstanding() == 0 and autofuse.wait(timeout=0)
    run(x)
    assert autofuse.wait() and autofuse.stats().kernels_compiled == 1
    run(x)
    assert autofuse.stats().kernels_launched == 1


@both
def test_from_disk_a_chain_is_fused_at_once(device):
    x = torch.randn(64, device=device)
    run(x)
    autofuse.wait()
    forget()
    autofuse.reset_stats()
    run(x)
    stats = autofuse.stats()
    assert (stats.kernels_loaded, stats.kernels_compiled, stats.eager_flushes) == (1, 0, 0)


@both
def test_wait_has_a_timeout(device, monkeypatch):
    monkeypatch.setattr(Service, "submit", lambda self, job: None)
    run(torch.randn(64, device=device))
    start = time.monotonic()
    assert not autofuse.wait(timeout=0.05)
    assert 0.04 < time.monotonic() - start < 5


def trained(x, w):
    y = torch.clamp(x * w + 1, -1, 1).abs() * x
    return [y, *torch.autograd.grad((y * y).sum(), (x, w))]


@both
def test_training_switches_in_the_middle(device, monkeypatch):
    """Forward and backward: the same gradients before and after, the backward's kernel ready."""
    monkeypatch.setattr(config, "always_fuse", True)
    torch.manual_seed(0)
    leaves = [torch.randn(64, device=device, requires_grad=True) for _ in range(2)]
    want = trained(*leaves)
    for k in range(4):
        if k == 2:
            assert autofuse.wait()
        got = trained(*[autofuse.wrap(leaf.detach().clone().requires_grad_()) for leaf in leaves])
        for ours, theirs in zip(got, want, strict=True):
            assert_same(autofuse.unwrap(ours).detach(), theirs.detach(), None)
    stats = autofuse.stats()
    assert stats.eager_flushes >= 2 and stats.kernels_launched >= 4 and stats.replays == 0


@both
def test_what_rests_records_again_when_there_is_news(device, monkeypatch):
    monkeypatch.setattr(Service, "submit", lambda self, job: None)
    fused = autofuse.fuse(chain)
    x = torch.randn(64, device=device)
    run_many(x)
    assert autofuse.chain.state.this_thread.current.resting
    compile.stir()  # as when a kernel has come
    before = autofuse.stats().eager_flushes
    fused(x)
    assert autofuse.stats().eager_flushes == before + 1


@both
def test_a_chain_that_waits_is_not_recorded_for_a_while(device, monkeypatch):
    """Whatever others there are, whose kernels are there; once its own is, it is."""
    jobs, submit = [], Service.submit
    monkeypatch.setattr(Service, "submit", lambda self, job: jobs.append((self, job)))
    x = torch.randn(64, device=device)
    other = lambda: autofuse.materialize(autofuse.wrap(x).sin().cos().sin().cos())  # noqa: E731
    with torch.no_grad():
        config.compile = "now"
        other()
        config.compile = "background"
        for _ in range(policy.TRIES + 2):
            run(x)
            other()
        assert not autofuse.chain.state.this_thread.current.resting
        autofuse.reset_stats()
        for _ in range(policy.WAITED // 4):
            run(x)
            other()
        stats = autofuse.stats()
        assert stats.eager_flushes == 0 and stats.kernels_launched == policy.WAITED // 4
        assert sum(n for (_, why), n in stats.eager_ops.items() if why == WAITS) >= policy.WAITED
        for service, job in jobs:
            submit(service, job)
        assert autofuse.wait()  # from when on it is one kernel, as in a capture that follows
        run(x)
        assert autofuse.stats().kernels_launched == stats.kernels_launched + 1
        assert not policy._waiting


@both
def test_writes_on_either_tier(device):
    """Into memory, on pending values, with version counters."""
    for _ in range(3):
        plain, x = (torch.arange(6.0, device=device) for _ in range(2))
        w = autofuse.wrap(x)
        for t in (plain, w):
            y = t * 2
            t += y + 1
            y.mul_(3).add_(t)
            t.copy_(y * 0.5)
        assert_same(w, plain, None)
        assert x._version == plain._version
        autofuse.wait()
    assert autofuse.stats().eager_flushes and autofuse.stats().kernels_launched


OPS = ["a + b", "a * b", "a - 2", "b * 0.5 + a", "a.abs()", "-b", "torch.maximum(a, b)",
       "torch.where(a > b, a, b)", "a.clamp(-1, 1)", "a / 4", "(a > 0) * b"]  # fmt: skip
SWITCHES = ["autofuse.wait()", "forget()", "config.compile = 'now'", "autofuse.materialize(a)",
            "config.compile = 'background'", "compile.clear_kernels()", "a += b",
            "kernels.clear()", "config.compile_after = 2", "del b; b = a"]  # fmt: skip


@both
@pytest.mark.parametrize("seed", range(12))
def test_values_never_depend_on_the_tier(device, seed):
    """A random loop, repeated, in which the tier is switched at random points."""
    rng = random.Random(seed)
    body = []
    for _ in range(12):
        body.append(f"a, b = b, {rng.choice(OPS)}")
        if rng.random() < 0.35:
            body.append(rng.choice(SWITCHES))
    x = torch.randn(33, generator=torch.Generator().manual_seed(seed)).to(device)
    results = []
    for wrap in (lambda t: t.clone(), lambda t: autofuse.wrap(t.clone())):
        space = {"torch": torch, "autofuse": autofuse, "config": config, "compile": compile,
                 "forget": forget, "kernels": DiskCache()}  # fmt: skip
        space |= {"a": wrap(x), "b": wrap(x * 1.5)}
        for _ in range(4):
            exec("\n".join(body), space)
        results.append([autofuse.unwrap(space["a"]), autofuse.unwrap(space["b"])])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs, None)


# --- no_compile ----------------------------------------------------------------------------------


@both
def test_no_compile_names_the_nearest_kernel(device, monkeypatch):
    monkeypatch.setattr(config, "compile", "now")
    x = torch.randn(64, device=device)
    run(x)
    w = autofuse.wrap(x)
    with autofuse.no_compile():
        run(x)  # known
        y = (w * 2 + 1).neg() - w
        with pytest.raises(autofuse.ColdKernelError) as caught:
            autofuse.materialize(y)
    said = str(caught.value)
    assert "af_mul_add_neg_sub" in said and "nearest known one is af_mul_add_abs_sub" in said
    assert "op 3 of 4 is neg, not abs" in said and "def af_mul_add_neg_sub(" in caught.value.source
    assert autofuse.is_pending(y)
    assert_same(y, (x * 2 + 1).neg() - x, None)


@both
def test_no_compile_holds_while_a_kernel_is_being_made(device, monkeypatch):
    x = torch.randn(64, device=device)
    run(x)
    monkeypatch.setattr(Service, "submit", lambda self, job: None)
    with autofuse.no_compile(), pytest.raises(autofuse.ColdKernelError):
        x = torch.randn(64, device=device)
        autofuse.materialize(autofuse.wrap(x) * 3 + 2 - x)


@both
def test_fused_calls_run_as_they_are_until_their_kernels_are_there(device, monkeypatch):
    """Where a contest is still to be decided; op by op, what is recorded would only cost."""
    monkeypatch.setattr(config, "measure", True)
    x, recorded = torch.randn(1 << 16, device=device), []

    @autofuse.fuse
    def function(x):
        recorded.append(isinstance(x, autofuse.Tensor))
        return chain(x)

    function(x)
    assert compile.outstanding() == 1
    with monkeypatch.context() as busy:
        busy.setattr(autofuse.fused, "outstanding", lambda: 1)  # however fast the compiler is
        for _ in range(10):
            assert_same(function(x), chain(x), None)
        assert recorded == [True] + [False] * 10
    autofuse.wait()
    function(x)
    assert recorded[-1] and autofuse.stats().kernels_launched == 1


@both
def test_no_compile_reaches_the_thread_of_backward(device, monkeypatch):
    monkeypatch.setattr(config, "always_fuse", True)
    monkeypatch.setattr(config, "compile", "now")
    foreseen, foresee = [], flush._foresee  # whose values have torch's nodes

    def watched_foresee(*args):
        foreseen.append("".join(traceback.format_stack()))
        return foresee(*args)

    monkeypatch.setattr(flush, "_foresee", watched_foresee)
    x = autofuse.wrap(torch.randn(64, device=device, requires_grad=True))
    y = (x * 2 + 1).abs() * x
    autofuse.materialize(y)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1, stats  # or there would be torch's nodes, without kernels
    assert not foreseen, foreseen
    seen = []
    gradients = Backward.gradients

    def watched(self, grads, *rest):
        classes = [type(grad) for grad in grads]
        seen.append((classes, torch.is_grad_enabled(), in_functorch(), dict(self.answers)))
        return gradients(self, grads, *rest)

    monkeypatch.setattr(Backward, "gradients", watched)
    until = time.monotonic() + 60
    while time.monotonic() < until:  # torch's ops run while another thread is at the kernels
        with autofuse.no_compile():
            try:
                y.sum().backward(retain_graph=True)
            except autofuse.ColdKernelError:
                return
        time.sleep(0.05)
    work = getattr(y.grad_fn, "work", None)  # of a node of autofuse: its Backward, and numbers
    raise AssertionError(
        f"no backward has asked for its kernel: {y.grad_fn} {work and vars(work[0])}"
        f" {seen[-1:]} {compile._lock} {threading.enumerate()} {autofuse.stats()}"
    )


def test_what_is_unloaded_in_a_flush_flushes_nothing(monkeypatch):
    """Values in the middle of a flush are made by torch's ops, and so are their gradients."""
    done = []
    driver = types.SimpleNamespace(
        cuCtxSynchronize=lambda: done.append("synchronized"), cuModuleUnload=done.append
    )
    monkeypatch.setattr(load, "_captured", False)
    monkeypatch.setattr(load, "_retired", [("a module", torch.device("cuda:0"))])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: done.append("flushed"))
    load._unload_retired(driver)
    assert done == ["synchronized", "a module"]


@both
def test_no_compile_raises_every_time_and_stands_in_nobodys_way(device, monkeypatch):
    monkeypatch.setattr(config, "compile_after", 2)
    x = torch.randn(64, device=device)
    y = chain(autofuse.wrap(x))
    with autofuse.no_compile():
        for _ in range(3):
            with pytest.raises(autofuse.ColdKernelError):
                autofuse.materialize(y)
    autofuse.materialize(y)
    compile.clear_kernels()
    for _ in range(3):
        run(x)
    assert autofuse.wait()
    run(x)
    assert autofuse.stats().kernels_launched == 1


def test_a_block_that_cannot_be_entered_leaves_nothing_behind():
    x = torch.randn(64)
    recorders = autofuse.chain.state.this_thread.recorders
    others = dict(recorders)
    recorders.clear()
    other = autofuse.chain.state.recorder_for(
        torch.device("cpu", 0)
    )  # comes before the one that fails
    recorders.update(others)
    with pytest.raises(autofuse.ColdKernelError), autofuse.no_compile():
        y = chain(autofuse.wrap(x))
        with autofuse.disabled():
            raise AssertionError("is not reached")
    assert_same(y, chain(x), None)
    assert autofuse.wait()  # after many chains that waited for kernels nothing is recorded
    assert autofuse.is_pending(autofuse.wrap(x) * 2)
    assert not other.off and other.home is not other.nowhere
    del recorders[torch.device("cpu", 0)]


@pytest.mark.parametrize("block", [torch.no_grad, torch.enable_grad,
                                   lambda: torch.set_grad_enabled(False)])  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_a_block_is_left_whatever_is_pending(block, before):
    """The next op in another mode meets what kept the chain from running, and later ones do not."""
    x = torch.randn(64)
    with torch.set_grad_enabled(before):
        inside = block()
        inside.__enter__()
        changes = torch.is_grad_enabled() is not before
        w = autofuse.wrap(x)
        with autofuse.no_compile():
            y = chain(w)
            inside.__exit__(None, None, None)
            assert torch.is_grad_enabled() is before and autofuse.is_pending(y)
            if changes:
                with pytest.raises(autofuse.ColdKernelError):
                    w * 2.0
        assert_same([y, w * 2.0], [chain(x), x * 2.0], None)


# --- the eager tier ------------------------------------------------------------------------------


@both
def test_a_version_moves_before_another_op_saves_the_value(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    w = torch.randn(4, 6, device=device)
    results = []
    for wrap in (lambda t: t, autofuse.wrap):
        leaf = wrap(x.detach().clone().requires_grad_())
        c = wrap(w) * 2.0
        c.add_(1.0)
        y = c * leaf
        y.sum().backward()
        results.append(autofuse.unwrap(leaf.grad))
        assert c._version == 1
    assert_same(results[1], results[0], None)


def test_the_modes_of_another_thread_do_not_reach_a_chain():
    """Autocast would make a float32 loss of the bfloat16 one."""
    w, t = (torch.randn(64).bfloat16() for _ in range(2))
    loss = torch.nn.functional.mse_loss
    y = loss(autofuse.wrap(w), t, reduction="none") * 2

    def read():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autofuse.materialize(y)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert_same(y, loss(w, t, reduction="none") * 2, None)


def test_news_that_comes_twice_loses_nothing(monkeypatch):
    """Two wake the same recorder; between them its thread has recorded."""
    x = torch.randn(64)
    monkeypatch.setattr(Service, "submit", lambda self, job: None)
    run_many(x)
    recorder = autofuse.chain.state.recorder_for(x.device)
    assert recorder.resting
    autofuse.record.modes.wake()
    assert not recorder.resting
    y = autofuse.wrap(x) * 2
    recorder.resting = True  # as the other one has seen it
    late = threading.Thread(target=autofuse.record.modes.wake)
    late.start()
    late.join()
    assert_same(y, x * 2, None)


def test_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(config, "max_kernels", 4)
    monkeypatch.setattr(config, "compile_after", 100)
    for size in range(1, 40):
        x = autofuse.wrap(torch.ones(8))
        for _ in range(size):
            x = x + 0.5
        autofuse.materialize(x)
        assert len(compile._requests) <= 17


# --- keys that keep changing ---------------------------------------------------------------------


@both
def test_a_line_that_keeps_asking_is_left_to_eager(device, monkeypatch, capsys):
    monkeypatch.setattr(config, "max_kernels_per_line", 3)
    monkeypatch.setattr(config, "compile", "now")
    x = autofuse.wrap(torch.ones(8, device=device))
    for k in range(1, 8):
        y = x
        for _ in range(k):
            y = y + 1.5
        autofuse.materialize(y)
        assert y.tolist() == [1 + 1.5 * k] * 8
    assert autofuse.stats().kernels_compiled == 3 and autofuse.stats().eager_flushes == 4
    said = capsys.readouterr().err
    assert said.count("has asked for 3 kernels") == 1
    assert __file__ in said and "4 ops, not 3" in said
    autofuse.materialize(x * 2)  # another line
    assert autofuse.stats().kernels_compiled == 4


@both
def test_loaded_kernels_are_bounded(device, monkeypatch):
    monkeypatch.setattr(config, "max_kernels", 4)
    monkeypatch.setattr(config, "compile", "now")
    kernels = weakref.WeakSet()
    x = autofuse.wrap(torch.ones(8, device=device))
    for _ in range(2):
        for k in range(1, 10):
            y = x
            for _ in range(k):
                y = y * 1.5
            assert y.tolist() == [1.5**k] * 8
            kernels.update(compile.kernels())
            assert len(compile.kernels()) <= 4
    del y
    gc.collect()
    assert len(kernels) <= 8  # what is loaded: those of the table, and those still in a trie
    assert autofuse.stats().kernels_compiled == 9 and autofuse.stats().kernels_loaded >= 5


# --- the processes -------------------------------------------------------------------------------


def job(source, done, target="cpu"):
    return Job(source.to_json(), target, key_of(source, target), done)


def ask(service, source, target="cpu", patience=60.0):
    """The service's answer to one job."""
    answers = []
    service.submit(job(source, answers.append, target))
    end = time.monotonic() + patience
    while not answers:
        assert time.monotonic() < end
        time.sleep(0.005)
    return answers[0]


def processes(service):
    return [worker.process for worker in service.running]


@pytest.fixture
def service(tmp_path):
    made = Service(1, DiskCache(tmp_path / "own"))
    yield made
    made.close()


def test_a_worker_builds_for_a_gpu_without_one(service):
    source = replace(jobs(1)[0], device="cuda")
    answer = ask(service, source, "sm_90")
    assert answer.built and not answer.error and answer.binary[:4] == b"\x7fELF"
    assert b"af_add" in answer.binary


def test_an_error_of_the_compiler_is_told(service):
    source = replace(jobs(1)[0], text="nonsense")
    answer = ask(service, source)
    assert "Error" in answer.error and not answer.binary
    assert ask(service, jobs(1)[0]).built  # by the same worker
    assert service.lost == 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ["killed", "hanging", "idle"])
def test_a_lost_worker_is_replaced(service, how, monkeypatch):
    first, second, third = jobs(3)
    assert ask(service, first).built
    (process,) = processes(service)
    if how == "idle":  # nothing is lost with it
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert ask(service, second).built
    else:
        if how == "hanging":
            monkeypatch.setattr(background, "HANG_SECONDS", 0.3)
        os.kill(process.pid, signal.SIGSTOP)
        if how == "killed":
            threading.Timer(0.3, process.kill).start()
        assert "died or did not answer" in ask(service, second).error
        monkeypatch.undo()
    assert ask(service, third).built and processes(service)[0].pid != process.pid


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_at_the_terminal_is_not_the_workers(service):
    first, second = jobs(2)
    assert ask(service, first).built
    (process,) = processes(service)
    os.kill(process.pid, signal.SIGINT)
    assert ask(service, second).built and processes(service) == [process]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_chain_whose_worker_died_stays_eager(capsys):
    x = torch.randn(64)
    autofuse.materialize(autofuse.wrap(x) * 2 + 1)
    assert autofuse.wait()
    (process,) = processes(background._service)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped, which takes a moment
    run(x)
    while background._service.idle:  # until its thread has taken the job
        time.sleep(0.01)
    time.sleep(0.5)  # and has asked the worker, or it would find that it died idle
    process.kill()
    autofuse.wait()
    for _ in range(3):
        run(x)
    assert autofuse.stats().kernels_launched == 0 and autofuse.stats().replays == 3
    assert capsys.readouterr().err.count("died or did not answer") == 1
    assert_same(autofuse.wrap(x) * 4, x * 4, None)
    assert autofuse.wait() and autofuse.stats().kernels_compiled == 2


def test_workers_that_keep_dying_are_given_up(service, monkeypatch):
    broken = background.BOOT.replace("main(answers", "worker._serve = None; main(answers").replace(
        "import main", "import main; from autofuse.supply import worker"
    )
    monkeypatch.setattr(background, "BOOT", broken)
    sources = jobs(5)
    for source in sources:
        assert ask(service, source).error
    assert not service.running and not service.unavailable
    assert "keep dying" in ask(service, sources[0]).error


def test_a_process_that_does_not_start_is_none(service, monkeypatch):
    monkeypatch.setattr(background, "BOOT", "raise SystemExit(3)")
    assert ask(service, jobs(1)[0]).refused and "does not start" in service.unavailable


def test_without_threads_kernels_are_compiled_here(monkeypatch, capsys):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background.threading.Thread, "start", refused)
    x = torch.randn(64)
    run(x)
    run(x)
    monkeypatch.undo()
    assert autofuse.wait(timeout=0) and autofuse.stats().kernels_launched == 1
    assert "can't start new thread" in capsys.readouterr().err


def test_an_odd_path_does_not_stop_the_service(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, pathlib.Path("/nowhere"), None])
    run(torch.randn(64))
    assert autofuse.wait(timeout=60) and autofuse.stats().kernels_compiled == 1


def test_packages_that_changed_since_the_start_compile_nothing(service):
    (source,) = jobs(1)
    answers = []
    service.submit(Job(source.to_json(), "cpu", "0" * 64, answers.append))
    while not answers:
        time.sleep(0.005)
    assert "have changed" in answers[0].error


def test_without_processes_kernels_are_compiled_here(monkeypatch, capsys):
    def refused(*args, **kwargs):
        raise OSError("no processes today")

    monkeypatch.setattr(background.subprocess, "Popen", refused)
    x = torch.randn(64)
    run(x)
    assert autofuse.wait()
    run(x)
    run(x)
    assert autofuse.stats().kernels_compiled == 1 and autofuse.stats().kernels_launched == 2
    assert capsys.readouterr().err.count("no processes today") == 1


def test_no_workers_means_now(monkeypatch):
    monkeypatch.setattr(config, "workers", 0)
    run(torch.randn(64))
    assert autofuse.stats().kernels_launched == 1 and background._service is None


def test_eight_services_build_each_kernel_once(tmp_path):
    services = [Service(1, DiskCache(tmp_path / "shared")) for _ in range(8)]
    answers, sources = [], jobs(3)
    try:
        for source in sources:
            for service in services:
                service.submit(job(source, answers.append))
        end = time.monotonic() + 120
        while len(answers) < 24 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        for service in services:
            service.close()
    assert len(answers) == 24 and not any(answer.error for answer in answers)
    assert sum(answer.built for answer in answers) == 3


def test_two_workers_share_the_work(tmp_path):
    service = Service(2, DiskCache(tmp_path / "own"))
    answers = []
    for source in jobs(6):
        service.submit(job(source, answers.append))
    assert len(service.threads) == 2
    end = time.monotonic() + 60
    while len(answers) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    service.close()
    assert len(answers) == 6 and all(answer.built for answer in answers)


def test_further_workers_end_when_there_is_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.2)
    service, answers, sources = Service(2, DiskCache(tmp_path / "own")), [], jobs(12)
    for part in (sources[:6], sources[6:]):
        before = len(answers)
        for source in part:
            service.submit(job(source, answers.append))
        end = time.monotonic() + 60
        while (len(answers) < before + 6 or len(service.running) != 1) and time.monotonic() < end:
            time.sleep(0.01)
        assert len(answers) == before + 6 and len(service.running) == len(service.threads) == 1
        assert service.idle == 1
    service.close()
    assert all(answer.built for answer in answers)


def test_few_kernels_start_one_worker(tmp_path):
    service, answers = Service(4, DiskCache(tmp_path / "own"), BACKLOG), []
    for source in jobs(BACKLOG):
        service.submit(job(source, answers.append))
    assert len(service.threads) == 1
    service.close()


@pytest.mark.parametrize(
    "processors, share, workers",
    [(1, None, 1), (2, None, 1), (8, None, 4), (16, "max 100000", 8), (128, None, 8),
     (64, "200000 100000", 1), (64, "900000 100000", 4), (64, "unreadable", 8)],
)  # fmt: skip
def test_workers_by_the_number_of_processors(processors, share, workers, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: range(processors), raising=False)
    if share is not None:
        (tmp_path / "cpu.max").write_text(share)
    monkeypatch.setattr(background, "SHARE", tmp_path / "cpu.max")
    assert enough_workers() == workers
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert enough_workers() == workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processors))
    assert enough_workers() == 1


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["now", "background"])
def test_a_kernel_that_cannot_be_kept_works_all_the_same(mode, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "file"))
    compile._cache.cache_clear()
    monkeypatch.setattr(config, "compile", mode)
    x = torch.randn(64)
    run(x)
    assert autofuse.wait()
    run(x)
    assert autofuse.stats().kernels_launched and autofuse.stats().kernels_compiled == 1
    assert capsys.readouterr().err.count("not kept on disk") == 1


def test_a_kernel_that_cannot_be_loaded_is_not_counted(monkeypatch):
    def broken(*args):
        raise autofuse.KernelError("cannot be loaded")

    monkeypatch.setattr(config, "compile", "now")
    monkeypatch.setattr(compile, "load", broken)
    for _ in range(2):  # compiled, and from disk
        run(torch.randn(64))
        forget()
    stats = autofuse.stats()
    assert (stats.kernels_compiled, stats.kernels_loaded, stats.replays) == (0, 0, 2)


def test_a_damaged_entry_is_built_again():
    x = torch.randn(64)
    run(x)
    autofuse.wait()
    (entry,) = DiskCache().directory.glob("*.kernel")
    data = bytearray(entry.read_bytes())
    data[-20] ^= 1
    entry.write_bytes(data)
    forget()
    autofuse.reset_stats()
    run(x)
    autofuse.wait()
    run(x)
    assert autofuse.stats().kernels_compiled == 1 and autofuse.stats().kernels_launched == 1


@both
def test_what_a_key_on_disk_holds(device, monkeypatch):
    """Structure, target, compilers and options; not sizes, scalars or names of variables."""
    one = replace(jobs(1)[0], device=device)
    target = target_of(torch.zeros(0, device=device).device)
    key = key_of(one, target)
    assert key == key_of(Source.from_json(one.to_json()), target)
    assert key != key_of(one, "sm_75")
    for change in ({"lanes": 8}, {"wide": True}, {"relaxed": True}, {"text": one.text + " "},
                   {"name": "af_other"}, {"consts": ()}, {"rank": 2}):  # fmt: skip
        assert key_of(replace(one, **change), target) != key
    compilers.cache_clear()
    generator = autofuse.supply.toolchain._GENERATOR
    monkeypatch.setattr(autofuse.supply.toolchain, "_GENERATOR", generator.with_name("run"))
    assert key_of(one, target) != key
    compilers.cache_clear()
    monkeypatch.undo()
    if device == "cuda":
        monkeypatch.setenv("NUMBA_OPT", "1")
        assert key_of(one, target) != key
        compilers.cache_clear()


# --- processes of the user's ---------------------------------------------------------------------


def lend_machine_code(directory):
    """Put what its trial has left there for these tests into another cache directory.

    Or every process that has one of its own would try and compile it: 4 of its 6 s.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    for path in pathlib.Path(os.environ["AUTOFUSE_TEST_KERNELS"]).glob("*.kernel"):
        with path.open("rb") as file:
            if b'"name": "machine code"' in file.read(1000):
                shutil.copy2(path, directory)


def script(text, tmp_path, **options):
    """Run a program that has its own kernels; (exit status, stdout, stderr)."""
    head = """
        import os, signal, sys, time, torch, autofuse
        from autofuse.supply import kernels as compile, service as background
        autofuse.config.compile, autofuse.config.compile_after = "background", 1
        autofuse.config.always_fuse = True  # chains of small tensors too
        x = autofuse.wrap(torch.ones(8))
    """
    directory = tmp_path / "kernels"
    lend_machine_code(directory)
    environment = {**os.environ, "AUTOFUSE_CACHE_DIR": str(directory)}
    program = textwrap.dedent(head) + textwrap.dedent(text)
    done = subprocess.run(  # Python 3.12 warns of a fork beside threads
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        env=environment, capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def gone(pid):
    """Whether the process ends within 10 seconds."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.02)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_interpreter_ends_while_compiling(tmp_path):
    code, out, err = script(
        """
        for k in range(20):
            y = x
            for _ in range(k + 1):
                y = y * 1.5
            autofuse.materialize(y)
        while not background._service.running:
            time.sleep(0.001)
        print(background._service.running[0].process.pid, autofuse.wait(timeout=0))
        """,
        tmp_path,
    )
    assert (code, err) == (0, "")
    pid, waited = out.split()
    assert waited == "False" and gone(int(pid))


@linux
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    code, out, err = script(
        """
        autofuse.materialize(x * 2 + 1)
        autofuse.wait()
        print(background._service.running[0].process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert code == -signal.SIGKILL and gone(int(out))


@linux
def test_fork_after_use(tmp_path):
    """The child has a compiler of its own, for what was asked for before the fork too."""
    code, out, err = script(
        """
        autofuse.materialize(x * 2 + 1)
        autofuse.wait()
        autofuse.materialize(x * 3 + 2)  # being compiled
        child = os.fork()
        if not child:
            for _ in range(2):
                assert (x * 2 + 1).tolist() == [3.0] * 8
                assert (x * 3 + 2).tolist() == [5.0] * 8
                assert (x * 4 - 1).tolist() == [3.0] * 8
                assert autofuse.wait(timeout=60)
            stats = autofuse.stats()
            print(stats.kernels_launched, len(background._service.running), flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert autofuse.wait(timeout=60)
        assert (x * 3 + 2).tolist() == [5.0] * 8
        print(autofuse.stats().kernels_launched)
        """,
        tmp_path,
    )
    assert (code, err) == (0, ""), err
    launched, processes, parent = map(int, out.split())
    assert launched >= 4 and processes == 1 and parent >= 1


def test_a_warm_start_imports_no_compiler(tmp_path):
    text = """
        assert "numba" not in sys.modules
        assert (x * 2 + 1).tolist() == [3.0] * 8
        autofuse.wait()
        names = ("numba", "autofuse.kernel.emit", "autofuse.kernel.llvm")
        print(autofuse.stats().kernels_launched, *(name in sys.modules for name in names))
    """
    assert script(text, tmp_path)[1].split()[0] == "0"
    assert script(text, tmp_path)[1].split() == ["1", "False", "False", "True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_fork_after_kernels_came_from_disk(tmp_path):
    """Another thread may have held LLVM's lock, also where nothing was compiled."""
    text = """
        compile.config.compile = "now"
        y = autofuse.materialize((x * 2.5 + 1.5).exp())
        from autofuse.kernel import llvm
        built = "autofuse.supply.build" in sys.modules
        before = llvm._linker.cache_info().currsize
        if os.fork():
            os.wait()
        else:
            print(built, before, llvm._linker.cache_info().currsize)
    """
    assert script(text, tmp_path)[1].split() == ["True", "1", "0"]
    assert script(text, tmp_path)[1].split() == ["False", "1", "0"]


def test_a_worker_knows_no_torch():
    package = os.path.dirname(autofuse.__file__)
    text = background.BOOT.replace("main(answers, library)", "") + textwrap.dedent("""
        from autofuse.kernel import source
        from autofuse.supply import build, disk, worker
        print("torch" in sys.modules, "numba" in sys.modules, file=os.fdopen(answers.fileno(), "w"))
    """)
    done = subprocess.run(
        [sys.executable, "-S", "-c", text, package], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


class TestShortChains:
    """An op that nothing can be fused with costs least as the eager op it is."""

    @pytest.fixture(autouse=True)
    def as_on_cuda(self, monkeypatch):
        monkeypatch.setattr(autofuse.config, "compile", "now")
        forget_all("test")
        autofuse.record.policy.FLUSH_US.update(cuda=10.1, cpu=3.5)

    def test_one_op_has_no_kernel_and_soon_is_not_recorded(self):
        x = autofuse.wrap(torch.randn(5))
        for _ in range(8):
            y = torch.tanh(x)
            assert_same(y, torch.tanh(autofuse.unwrap(x)), None)
        stats = autofuse.stats()
        assert stats.kernels_compiled == stats.kernels_launched == 0
        assert stats.eager_ops["tanh", "a chain of one op"] >= 4
        assert not autofuse.is_pending(torch.tanh(x))

    def test_what_is_left_eager_is_recorded_again_after_a_while(self):
        """However it is spelled: longer chains may begin so by then."""
        x = autofuse.wrap(torch.ones(4))
        for op in (
            lambda: x > 9.0,
            lambda: x > 9,
            lambda: torch.add(x, x, alpha=2),
            lambda: x.clamp(0.0, 1.0),
        ):
            forget_all("test")
            recorded = []
            for _ in range(250):
                y = op()
                recorded.append(autofuse.is_pending(y))
                autofuse.materialize(y)
            first = recorded.index(False)
            assert first < 10 and True in recorded[first:]

    def test_a_short_chain_of_small_tensors_is_as_its_ops_are_on_a_cpu(self):
        """By length, size and functions, and the same at every run: the bits are eager's."""
        autofuse.record.policy.FLUSH_US.update(cpu=9.3)
        small, large = torch.randn(5), torch.randn(1 << 14)
        for x, n, fused in ((small, 2, 0), (small, 12, 1), (large, 2, 1), (large[:200], 2, 0)):
            forget_all("test")
            for _ in range(30):
                y, expected = autofuse.wrap(x), x
                autofuse.reset_stats()
                for _ in range(n):
                    y, expected = torch.tanh(y * 0.5), torch.tanh(expected * 0.5)
                autofuse.materialize(y)
                assert autofuse.stats().kernels_launched == fused
                assert fused or torch.equal(y, expected)

    def test_arithmetic_on_large_tensors_pays_from_some_ops_on(self):
        autofuse.record.policy.FLUSH_US.update(cpu=9.3)
        x = torch.randn(1 << 17)
        for n, fused in ((1, 0), (3, 1)):
            forget_all("test")
            autofuse.reset_stats()
            y = autofuse.wrap(x)
            for _ in range(n):
                y = y * 0.5
            autofuse.materialize(y)
            assert autofuse.stats().kernels_launched == fused

    def test_a_chain_that_begins_so_is_fused(self):
        x = autofuse.wrap(torch.randn(5))
        short, long = (lambda: torch.tanh(x)), (lambda: torch.tanh(x) * 2)
        for _ in range(8):
            autofuse.materialize(short())
        for _ in range(120):  # it is looked at again after 100
            autofuse.materialize(long())
        for _ in range(8):  # and stays so, whatever else begins with its first op
            before = autofuse.stats().kernels_launched
            autofuse.materialize(long())
            assert autofuse.stats().kernels_launched == before + 1
            autofuse.materialize(short())
            assert autofuse.stats().kernels_launched == before + 1
        assert not autofuse.is_pending(short()) and autofuse.is_pending(long())

    def test_unless_it_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        x = autofuse.wrap(torch.randn(5))
        autofuse.materialize(torch.tanh(x))
        assert autofuse.stats().kernels_launched == 1

    def test_inplace_and_grad(self):
        x = torch.randn(5)
        for _ in range(6):
            a, b = autofuse.wrap(x.clone()), x.clone()
            a.mul_(2).add_(1)
            b.mul_(2).add_(1)
            assert_same(a, b, None)
            p = torch.randn(5, requires_grad=True)
            (grad,) = torch.autograd.grad((autofuse.wrap(p) * 3).sum(), p)
            assert_same(grad, torch.full((5,), 3.0), None)

    CHAINS = {
        "functions": lambda x, y: torch.tanh(torch.exp(x)).sin().cos(),
        "numbers": lambda x, y: ((x * 2.0 + 1) ** 2 - 3.5) / 3,
        "an operand twice": lambda x, y: (x * x + x) * (x * x) * (x + x),
        "two operands": lambda x, y: (x * y + y) / (x * x + 3) - y,
        "conditions": lambda x, y: torch.where((x > y) & (y > 0), x * y, y * 2.0),
        "broadcasts": lambda x, y: (x * y[:1] + y[:, :1]) * x[0] - y,
        "views": lambda x, y: (x * 2.0)[1:] * (y + 1)[:-1] + (x * 3.0).T.T[1:],
        "integers": lambda x, y: ((x * 8).long() + (1 << 40)) * 3 - 7,
        "casts": lambda x, y: (x.half() * 2).float() + y,
        "options": lambda x, y: torch.nn.functional.elu(torch.add(x, y, alpha=2), alpha=0.5) * x,
    }

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("name", CHAINS)
    def test_of_a_chain_that_does_not_pay_no_op_is_tried_alone(self, name, grad, monkeypatch):
        """They are left eager together, and are recorded together again after a while."""
        policy = autofuse.record.policy
        policy.FLUSH_US.update(cpu=1e6)
        monkeypatch.setitem(policy._GRAD_US, "cpu", replace(policy._GRAD_US["cpu"], flush=1e6))
        x, y = (torch.randn(4, 4, requires_grad=grad) for _ in range(2))
        wrapped = [autofuse.wrap(t.detach().clone().requires_grad_(grad)) for t in (x, y)]
        chain, recorded = self.CHAINS[name], []
        for k in range(policy.TRIES + policy.SKIPS + 8):
            autofuse.reset_stats()
            made = autofuse.materialize(chain(*wrapped))
            recorded.append(autofuse.stats().ops_recorded)
            if k % 20 < 5:
                assert_same(autofuse.unwrap(made), chain(x, y), None)
        first, later = recorded[0], recorded[policy.TRIES + 1 :]
        assert recorded[: policy.TRIES + 1] == [first] * (policy.TRIES + 1) and first > 2
        assert 1 <= len(later) - later.count(0) <= 2 * policy.TRIES and later[:20] == [0] * 20

    @pytest.mark.parametrize("leading", [1, 3, 5])
    def test_what_pays_after_ops_that_do_not_is_fused(self, leading, monkeypatch):
        def margin(nodes, outline, first=0):
            return 6.5 - leading - (len(nodes) - first)

        def program(x):
            return torch.square(torch.neg(x * 2.0 + 1.0).abs() - 3.0)

        for module in (autofuse.record.policy, autofuse.record.ways):
            monkeypatch.setattr(module, "margin", margin)
        autofuse.record.policy.FLUSH_US.update(cpu=1e-3)
        x = torch.randn(4, requires_grad=True)
        for k in range(6):
            autofuse.reset_stats()
            w = program(autofuse.wrap(x.detach().clone().requires_grad_()))
            autofuse.materialize(w)
            stats, tried = autofuse.stats(), k <= autofuse.record.policy.TRIES
            assert stats.ops_recorded == (6 if tried else 6 - leading)
            assert stats.kernels_launched == (not tried)
            assert_same(autofuse.unwrap(w), program(x), None)

    @pytest.mark.parametrize("grad", [False, True])
    def test_what_pays_in_one_place_and_not_in_another_is_told_apart(self, grad, monkeypatch):
        """Both begin with the same op, of the same shapes; each goes its better way."""
        policy = autofuse.record.policy
        policy.FLUSH_US.update(cpu=6.0)  # between two ops and ten
        costs = replace(policy._GRAD_US["cpu"], flush=6.0, node=1.0, given=0.0)
        monkeypatch.setitem(policy._GRAD_US, "cpu", costs)
        x, y = (torch.randn(4, 4, requires_grad=grad) for _ in range(2))

        def short(x, y):
            return x + y

        def long(x, y):
            z = x + y
            for _ in range(12):
                z = z * 0.5 - 1.0
            return z

        w, v = (autofuse.wrap(t.detach().clone().requires_grad_(grad)) for t in (x, y))
        for k in range(40):
            launches = []
            for program in (long, short, short, long):
                autofuse.reset_stats()
                made = autofuse.materialize(program(w, v))
                launches.append(autofuse.stats().kernels_launched)
                if k > 10:
                    recorded = autofuse.stats().ops_recorded
                    assert recorded == (25 if program is long else 0), (k, program)
                if program is short or k % 10 == 0:
                    assert_same(autofuse.unwrap(made), program(x, y), None)
            assert launches == [1, 0, 0, 1]

    @pytest.mark.skipif(not native.active(), reason="by Python alone it is Python that finds them")
    def test_machine_code_finds_the_start_where_a_chain_begins(self):
        """What is recorded there, and what runs as eager PyTorch, without a call of Python."""
        autofuse.record.policy.FLUSH_US.update(cpu=6.0)
        w, v = (autofuse.wrap(torch.randn(4, 4)) for _ in range(2))
        made = []

        def short():
            made.append(w + v)

        def long():
            z = w + v
            for _ in range(12):
                z = z * 0.5 - 1.0
            made.append(z)

        for _ in range(40):
            for program in (long, short):
                program()
                autofuse.materialize(made.pop())
        assert functions_called(short) == [] and not autofuse.is_pending(made[-1])
        assert functions_called(long) == [] and autofuse.is_pending(made[-1])
        autofuse.materialize(made[-1])
        assert "at_start" in functions_called(lambda: w + v)  # an instruction that is new

    def test_a_place_that_is_called_both_ways_is_fused_where_it_pays(self):
        """One instruction stands for both: none of them is wrong."""
        autofuse.record.policy.FLUSH_US.update(cpu=6.0)
        x = torch.randn(4, 4)
        w = autofuse.wrap(x)
        for k in range(300):
            z, n = w + w, 24 if k % 2 else 0
            for _ in range(n):
                z = z * 1.0
            assert_same(autofuse.unwrap(autofuse.materialize(z)), x + x, None)
        autofuse.reset_stats()
        z = w + w
        for _ in range(24):
            z = z * 1.0
        assert_same(autofuse.unwrap(autofuse.materialize(z)), x + x, None)

    def test_a_place_where_chains_have_paid_and_only_lose_since_is_left_alone(self, monkeypatch):
        """As a rule the first backward tells that gradients are wanted of gradients, for ever."""
        autofuse.record.policy.FLUSH_US.update(cpu=6.0)
        monkeypatch.setitem(autofuse.record.policy.SHORT_US, "cpu", 1.0)
        w, recorded = autofuse.wrap(torch.randn(4, 4)), []
        for k in range(100):
            autofuse.reset_stats()
            z = w + w
            for _ in range(24 if k < 20 and k % 2 else 0):
                z = z * 1.0
            autofuse.materialize(z)
            recorded.append(autofuse.stats().ops_recorded)
        assert recorded[19] == 25 and sum(recorded[20:]) < 20

    def told_apart(self):
        """A wrapped tensor, and the chains that begin at the same op of it, by their starts."""
        autofuse.record.policy.FLUSH_US.update(cpu=6.0)
        w = autofuse.wrap(torch.randn(4, 4))
        for k in range(300):
            z = w + w
            for _ in range(24 if k % 2 else 0):
                z = z * 1.0
            autofuse.materialize(z)
        (stand,) = [node for node in this_thread.current.home.next.values() if node.starts]
        return w, stand.starts

    def test_what_is_not_recorded_after_all_begins_no_chain(self):
        """Or the verdict on another one would be of that instruction."""
        w, starts = self.told_apart()
        writing[0] = True  # another thread is in the middle of a write
        try:
            assert not autofuse.is_pending(w + w)
        finally:
            writing.clear()
        assert this_thread.current.chain.start is None
        known = len(starts)
        z = w + w
        assert autofuse.is_pending(z) and this_thread.current.chain.start is not None
        for _ in range(24):
            z = z * 1.0
        autofuse.materialize(z)
        assert len(starts) == known + 1

    def test_a_start_is_known_where_eager_ops_run_the_chain(self, monkeypatch):
        """Not because they cost less: Python would be asked about it again and again."""
        w, starts = self.told_apart()
        ways = autofuse.record.ways
        monkeypatch.setattr(ways, "_build_runner", lambda _, node, out: ways.EagerRunner(node, out))
        known = len(starts)
        for _ in range(2):
            z = (w + w) * 0.25
            autofuse.materialize(z)
            assert len(starts) == known + 1

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_second_derivatives_count_for_whether_it_pays(self, create_graph, monkeypatch):
        """Under `create_graph` no kernel runs backward, so that fewer chains pay."""
        policy = autofuse.record.policy
        costs = replace(policy._GRAD_US["cpu"], flush=20.0, node=1.0, op=1.0, recorded=0.0)
        monkeypatch.setitem(policy._GRAD_US, "cpu", replace(costs, gradient=9.0, kernel=9.0))
        policy.FLUSH_US.update(cpu=1e-3)
        recorded = []
        for _ in range(autofuse.grad.backward.MANY_SWEEPS + 16):
            leaf = torch.linspace(0.0, 1.0, 4).requires_grad_()
            want = torch.autograd.grad((((leaf * 2.0 + 1.0) * leaf) * 3.0).sum(), leaf)
            x = autofuse.wrap(torch.linspace(0.0, 1.0, 4).requires_grad_())
            autofuse.reset_stats()
            y = autofuse.materialize(((x * 2.0 + 1.0) * x) * 3.0)
            recorded.append(autofuse.stats().ops_recorded)
            got = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
            assert got[0].requires_grad is create_graph
            assert_same(autofuse.unwrap(got[0]).detach(), want[0], None)
        assert recorded[0] == 4 and recorded[-1] == (0 if create_graph else 4)
