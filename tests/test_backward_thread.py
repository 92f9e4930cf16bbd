"""The thread in which backward runs: PyTorch's own, or the one that called it."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autofuse
from support import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def engine_again(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    yield
    assert torch.autograd.is_multithreading_enabled()
    autofuse.config.backward_thread = "engine"


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    ).to(device)


def run(net, x, wrapped, between=lambda x: x):
    x = autofuse.wrap(x) if wrapped else x
    h = between(net[0](x).tanh() * 0.5 + 1.0)
    return ((net[3](net[2](net[1](h))) - 1.0).square() * 0.1).sum()


def gradients(net, total, **options):
    net.zero_grad()
    total.backward(**options)
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_where_it_runs_and_what_it_gives(device, wrapped):
    net, x, seen = model(device), torch.randn(16, 8, device=device), []

    def hook(gradient):
        seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled()))

    def between(h):
        h.register_hook(hook)
        return h

    want = gradients(net, run(net, x, wrapped, between))
    autofuse.config.backward_thread = "caller"
    got = gradients(net, run(net, x, wrapped, between))
    assert all(map(torch.equal, got, want))
    here = threading.get_ident()
    assert seen[1] == (here, False)
    assert (seen[0][0] == here) is (device == "cpu") and seen[0][1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(device, reentrant):
    net, x = model(device), torch.randn(16, 8, device=device, requires_grad=True)

    def again(h):
        return checkpoint(lambda h: autofuse.unwrap(torch.sigmoid(h) * 2.0), h,
                          use_reentrant=reentrant)  # fmt: skip

    found = []
    for place in ("engine", "caller"):
        autofuse.config.backward_thread = place
        x.grad = None
        found.append([*gradients(net, run(net, x, True, again)), x.grad])
    assert all(map(torch.equal, *found))


def test_twice_and_second_derivatives(device):
    x = torch.linspace(-1, 1, 8, device=device, requires_grad=True)
    found = []
    for place in ("engine", "caller"):
        autofuse.config.backward_thread = place
        y = ((autofuse.wrap(x) * 2.0).tanh() * x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad((gradient * gradient).sum(), x)
        found.append([*first, gradient, *second])
    assert all(map(torch.equal, *found))


def test_what_a_hook_raises_and_what_it_leaves(device):
    def fail(gradient):
        raise KeyError("mine")

    autofuse.config.backward_thread = "caller"
    for wrapped in (False, True):
        x = torch.ones(8, device=device, requires_grad=True)
        y = (autofuse.wrap(x) if wrapped else x) * 2.0
        y.register_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            y.sum().backward()
        assert torch.autograd.is_multithreading_enabled()


def test_a_choice_of_the_program_stays(device):
    x, seen = torch.ones(8, device=device, requires_grad=True), []
    for place in ("engine", "caller"):
        autofuse.config.backward_thread = place
        with torch.autograd.set_multithreading_enabled(False):
            y = autofuse.wrap(x) * 2.0
            y.register_hook(lambda g: seen.append(threading.get_ident()))
            y.sum().backward()
            assert not torch.autograd.is_multithreading_enabled()
    assert seen == [threading.get_ident()] * 2


def test_several_threads_each_run_their_own(device):
    autofuse.config.backward_thread = "caller"
    errors = []

    def work(seed):
        torch.manual_seed(seed)
        x = torch.randn(64, device=device, requires_grad=True)
        for _ in range(20):
            x.grad, seen = None, []
            y = (autofuse.wrap(x) * 2.0).tanh()
            y.register_hook(lambda g, seen=seen: seen.append(threading.get_ident()))
            (y * y).sum().backward()
            if seen != [threading.get_ident()] or x.grad is None:
                errors.append(seen)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
