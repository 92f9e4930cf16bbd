"""Injected failures: values stay right, torch's errors reach the user, the next call works."""

import pytest
import torch

import autofuse
from autofuse.record.modes import forget_all
from autofuse.supply import build
from autofuse.supply.kernels import clear_kernels
from support import DEVICES, assert_same, before_launches, elsewhere, failable_launches

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def cold(capsys):
    clear_kernels()
    forget_all("test")
    autofuse.errors._said.clear()
    yield
    clear_kernels()
    forget_all("test")


def program(x):
    y = x * 2
    z = torch.addcmul(y, x, x, value=0.5).clamp(-1, 1).to(torch.float64)
    return y, torch.where(z > 0, z, 0.5) ** 2, (x + 1).mul_(3)


def check(x):
    got = autofuse.materialize(*program(autofuse.wrap(x)))
    for ours, theirs in zip(got, program(x), strict=True):
        assert_same(ours, theirs, 1e-6 if x.device.type == "cpu" else None)


def test_compile_error(device, monkeypatch, capsys):
    def broken(*args):
        raise ValueError("no compiler today")

    monkeypatch.setattr(build, "build", broken)
    x = torch.randn(64, device=device)
    check(x)
    check(x)
    assert autofuse.stats().replays == 2 and autofuse.stats().kernels_launched == 0
    said = capsys.readouterr().err
    assert said.count("no compiler today") == 1
    monkeypatch.undo()
    check(torch.randn(65, device=device))
    assert autofuse.stats().kernels_launched > 0


def test_launch_error(device, monkeypatch, capsys):
    x = torch.randn(64, device=device)
    check(x)
    recorder = autofuse.chain.state.recorder_for(x.device)
    runs = [(runner, runner.run) for runner in recorder.runners]

    def broken(chain):
        raise autofuse.KernelError("cannot launch")

    for runner, _ in runs:
        runner.run, runner.words = broken, None
    check(x)
    assert autofuse.stats().replays == 1
    for runner, run in runs:
        runner.run = run
    check(x)
    assert autofuse.stats().replays == 1


@pytest.mark.parametrize("kind", ["fake", "inference"])
def test_a_replay_in_another_thread_is_without_its_modes(device, kind, monkeypatch, capsys):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def broken(*args):
        raise ValueError("no compiler today")

    monkeypatch.setattr(build, "build", broken)
    x = torch.randn(64, device=device)
    y = autofuse.wrap(x) * 2

    def work():
        with FakeTensorMode() if kind == "fake" else torch.inference_mode():
            autofuse.materialize(y)

    assert elsewhere(work) is None
    assert not autofuse.is_pending(y) and not y.is_inference()
    assert_same(y, x * 2, None)


def test_out_of_memory_is_torchs_error_and_nothing_is_lost(device, monkeypatch):
    x = torch.randn(64, device=device)
    w = autofuse.wrap(x)
    y = w * 2
    error = torch.OutOfMemoryError("out of memory")

    def full(*args, **kwargs):
        raise error

    recorder = autofuse.chain.state.recorder_for(x.device)
    monkeypatch.setattr(autofuse.record.failures, "run_ops", full)
    monkeypatch.setattr(autofuse.record.flush, "runner_for", lambda *args: _Full(full))
    with pytest.raises(torch.OutOfMemoryError):
        autofuse.materialize(y)
    assert autofuse.is_pending(y) and len(recorder.chain) == 1
    monkeypatch.undo()
    assert_same(y, x * 2, None)


def test_a_write_that_ran_out_of_memory_is_not_made_up_for_later(device, monkeypatch):
    x, memory = torch.randn(64, device=device), torch.zeros(64, device=device)
    w = autofuse.wrap(x)
    y = w * 2

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(autofuse.record.failures, "run_ops", full)
    monkeypatch.setattr(autofuse.record.flush, "runner_for", lambda *args: _Full(full))
    with pytest.raises(torch.OutOfMemoryError):
        autofuse.wrap(memory).add_(y)
    monkeypatch.undo()
    assert_same(w * 3, x * 3, None)
    assert_same(y, x * 2, None)
    assert not memory.any()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_write_whose_kernel_fails_counts_once(device, monkeypatch, capsys, wrapped):
    """And where the eager ops fail too it counts not at all: what the chain still holds stays."""
    if device == "cuda":
        pytest.skip("launches are made to fail on a CPU, whose text is the same")
    x, w = torch.ones(64), autofuse.wrap(torch.full((64,), 3.0))
    target = autofuse.wrap(x) if wrapped else x

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    for _ in range(2):
        target.add_(w * 2.0)
        y = w + x
        target.add_(w * 2.0)
    version, value = x._version, x.tolist()
    y = w + x
    with monkeypatch.context() as patch:
        before_launches(patch, lambda entry: 1)
        patch.setattr(autofuse.record.failures, "run_ops", full)
        with pytest.raises(torch.OutOfMemoryError):
            target.add_(w * 2.0)
    assert x._version == version and x.tolist() == value
    assert_same(y, torch.full((64,), 3.0) + x, None)
    with monkeypatch.context() as patch:
        before_launches(patch, lambda entry: 1)
        target.add_(w * 2.0)
    assert x._version == version + 1 and x[0] == value[0] + 6.0
    assert "cannot launch" in capsys.readouterr().err


class _Full:
    def __init__(self, run):
        self.live, self.run, self.short, self.placed = (0,), run, "", {}


def test_an_op_after_a_failed_one_works(device):
    w = autofuse.wrap(torch.randn(4, device=device))
    y = w * 2
    with pytest.raises(RuntimeError):
        y + torch.ones(3, device=device)
    assert_same(y + 1, autofuse.unwrap(w) * 2 + 1, None)


def trained(x, w):
    y = torch.tanh(torch.sin(x * w) * w) + torch.cos(x)
    return [y, *torch.autograd.grad(y, (x, w), torch.ones_like(y).detach(), retain_graph=True)]


def check_gradients(device):
    results = []
    for wrap in (lambda t: t, autofuse.wrap):
        torch.manual_seed(0)
        x, w = (torch.randn(48, 3).to(device).requires_grad_() for _ in range(2))
        results.append([autofuse.unwrap(t) for t in trained(wrap(x), w)])
    assert_same(results[1], results[0], 1e-5 if device == "cpu" else None)


def test_compile_error_under_grad(device, monkeypatch, capsys):
    """Forward as the eager ops, with eager's graph."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)

    def broken(*args):
        raise ValueError("no compiler today")

    monkeypatch.setattr(build, "build", broken)
    check_gradients(device)
    assert "no compiler today" in capsys.readouterr().err
    assert autofuse.stats().replays == 1


def test_compile_error_in_backward(device, monkeypatch, capsys):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    working = build.build

    def broken(source, target):
        if "backward" in source.text:
            raise ValueError("no compiler for this")
        return working(source, target)

    monkeypatch.setattr(build, "build", broken)
    check_gradients(device)
    assert "no compiler for this" in capsys.readouterr().err
    assert autofuse.stats().kernels_launched == 1


def test_launch_error_in_backward(device, monkeypatch, capsys):
    """A kernel that was built and does not run: torch's ops do its work."""
    if device == "cuda":
        pytest.skip("launches are made to fail on a CPU, whose text is the same")
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    calls, failing = failable_launches(monkeypatch)
    check_gradients(device)
    assert len(calls) == 2
    calls.clear()
    failing |= {2, 3}  # by machine code, and by Python
    check_gradients(device)
    assert "cannot launch" in capsys.readouterr().err


def ended(make, device, wrap=lambda x: x):
    """A view that a write to its base has ended."""
    base = wrap(torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()) * 1
    with torch.set_grad_enabled(make != "no_grad"):
        view = base[0] if make == "no_grad" else getattr(torch, make)(base, 1)[0]
    base.mul_(torch.full((3,), 2.0, device=device, requires_grad=True))
    return view


@pytest.mark.parametrize("make", ["split", "unbind", "no_grad"])
@pytest.mark.parametrize("tier", ["now", "background"])
def test_what_autograd_refuses_ends_with_its_values(device, monkeypatch, make, tier):
    """A chain that it can never differentiate is not tried again; the rest of it is computed."""
    monkeypatch.setattr(autofuse.config, "compile", tier)
    with pytest.raises(RuntimeError) as wanted:
        ended(make, device) * 2
    p = torch.arange(3.0, device=device, requires_grad=True)
    before = autofuse.wrap(p) * 3 + 1
    view = ended(make, device, autofuse.wrap)
    for _ in range(2):
        kept = autofuse.wrap(p) * 5 + 1
        with pytest.raises(RuntimeError) as raised:
            after = (view * 2 + 1).sigmoid()
            after.tolist()
        assert str(raised.value) == str(wanted.value)
        with pytest.raises(RuntimeError):
            after.tolist()  # again, and only there
        assert_same(kept, p * 5 + 1, None)
        kept.sum().backward()
        assert torch.equal(p.grad, torch.full_like(p, 5.0))
        p.grad = None
    assert_same(before, p * 3 + 1, None)
    assert (autofuse.wrap(torch.ones(3, device=device)) * 2).tolist() == [2.0] * 3
