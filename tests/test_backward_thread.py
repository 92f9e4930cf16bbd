"""The thread in which backward runs: PyTorch's own, or the one that called it."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.chain.state import counts
from autofuse.patches import calls
from support import DEVICES, needs_cuda

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import training

ROOT = Path(__file__).parent.parent
PLACES = ("engine", "caller", "auto")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """The process seems to use one, a CPU's nodes stand in for its, and nothing was wrapped yet."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(autofuse.config, "backward_thread", "auto")
    monkeypatch.setattr(calls, "gpus_in_use", lambda: 1)
    monkeypatch.setattr(counts, "in_use", False)
    yield
    assert torch.autograd.is_multithreading_enabled()


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


def look(seen):
    """A hook that notes its thread, and whether others might have got it."""

    def hook(gradient):
        seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled()))

    return hook


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_where_it_runs_and_what_it_gives(device, wrapped):
    net, x, seen, found = model(device), torch.randn(16, 8, device=device), [], []

    def between(h):
        h.register_hook(look(seen))
        return h

    for place in PLACES:
        autofuse.config.backward_thread = place
        found.append(gradients(net, run(net, x, wrapped, between)))
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    engine, caller, auto = seen
    here = threading.get_ident()
    assert engine == (engine[0], True) and (engine[0] == here) is (device == "cpu")
    assert caller == (here, False)
    assert auto == (caller if wrapped else engine)


@pytest.mark.parametrize("name", training.MODELS)
def test_bits_of_training_steps(device, name, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 4)
    torch.manual_seed(0)
    net = autofuse.fuse(training.MODELS[name]().to(device))
    step, found = training.stepper(net, training.states(name, device), True), []
    for place in ("engine", "auto"):
        autofuse.config.backward_thread = place
        with sdpa_kernel(SDPBackend.MATH):  # another's gradients differ from run to run
            found.append(step())
    assert autofuse.stats().kernels_launched > 0
    assert all(map(torch.equal, *found))


def fused(device):
    """The sum of a fused chain, and its hook's notes."""
    seen, x = [], torch.ones(8, device=device, requires_grad=True)
    y = autofuse.wrap(x) * 2.0 + 1.0
    y.register_hook(look(seen))
    return y.sum(), seen


def test_it_is_the_caller_from_the_first_wrapped_tensor_or_fused_call_on(device, monkeypatch):
    function = autofuse.fuse(lambda x: x @ x)
    for use in (autofuse.wrap, function):
        monkeypatch.setattr(counts, "in_use", False)
        x, places = torch.ones(8, 8, device=device, requires_grad=True), []
        for _ in range(2):
            y, seen = x @ x, []
            y.register_hook(look(seen))
            y.sum().backward()
            places.append(seen[0][1])  # whether others may get it
            use(torch.ones(8, 8, device=device))
        assert places == [True, False]


def test_a_call_that_is_left_as_it_is_has_the_thread_of_a_fused_one(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    monkeypatch.setattr(autofuse.config, "measure", True)
    function = autofuse.fuse(lambda x: (x * 2.0).tanh() * x)
    x, places = torch.ones(8, device=device, requires_grad=True), []
    for _ in range(200):
        y, seen = function(x), []
        y.register_hook(look(seen))
        y.sum().backward()
        places.append(seen[0][1])
    assert places == [False] * 200


@pytest.mark.parametrize("gpus", [0, 2])
def test_only_one_gpu_needs_no_thread_of_its_own(device, gpus, monkeypatch):
    monkeypatch.setattr(calls, "gpus_in_use", lambda: gpus)
    total, seen = fused(device)
    total.backward()
    assert seen[0][1]


def test_distributed_hooks_stay_in_their_threads(device):
    dist = torch.distributed
    total, seen = fused(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total.backward()
    finally:
        dist.destroy_process_group()
    total, later = fused(device)
    total.backward()
    assert seen[0][1] and not later[0][1]


SCRIPT = """
import sys, threading
import torch, autofuse
from autofuse.torch_private import gpus_in_use

autofuse.config.always_fuse, autofuse.config.compile = True, "now"
assert gpus_in_use() == 0
for index in range(int(sys.argv[1])):
    seen, x = [], torch.ones(8, device=f"cuda:{index}", requires_grad=True)
    assert gpus_in_use() == index + 1
    y = autofuse.wrap(x) * 2.0
    y.register_hook(lambda gradient: seen.append(threading.get_ident()))
    y.sum().backward()
    assert (seen == [threading.get_ident()]) is (index == 0)
"""


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gpu_is_in_use_from_its_first_tensor_on(gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices; here is one")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(gpus)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(device, reentrant):
    net, x = model(device), torch.randn(16, 8, device=device, requires_grad=True)

    def again(h):
        return checkpoint(lambda h: autofuse.unwrap(torch.sigmoid(h) * 2.0), h,
                          use_reentrant=reentrant)  # fmt: skip

    found = []
    for place in PLACES:
        autofuse.config.backward_thread = place
        x.grad = None
        found.append([*gradients(net, run(net, x, True, again)), x.grad])
    for got in found[1:]:
        assert all(map(torch.equal, found[0], got))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_inside_another_it_is_the_thread_of_that_node(device, place, wrapped):
    autofuse.config.backward_thread = place
    x, threads, inner = torch.ones(8, device=device, requires_grad=True), [], []

    def hook(gradient):
        threads.append(threading.get_ident())
        with torch.enable_grad():
            total, seen = fused(device)
        total.backward()
        inner.extend(seen)

    y = (autofuse.wrap(x) if wrapped else x) * 2.0
    y.register_hook(hook)
    y.sum().backward()
    assert [ident for ident, _ in inner] == threads
    assert x.grad.tolist() == [2.0] * 8


def test_twice_and_second_derivatives(device):
    x = torch.linspace(-1, 1, 8, device=device, requires_grad=True)
    found = []
    for place in PLACES:
        autofuse.config.backward_thread = place
        y = ((autofuse.wrap(x) * 2.0).tanh() * x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad((gradient * gradient).sum(), x)
        found.append([*first, gradient, *second])
    for got in found[1:]:
        assert all(map(torch.equal, found[0], got))


def test_a_backward_that_creates_a_graph_is_left_where_eager_numbers_its_nodes(device):
    """PyTorch numbers nodes by thread, and adds gradients up in the order of these numbers."""
    x = torch.linspace(-1, 1, 8, device=device, requires_grad=True)
    y = (autofuse.wrap(x) * 2.0).tanh() * x
    seen = []
    y.register_hook(look(seen))
    for create in (True, False, True):
        torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create)
    assert [others for _, others in seen] == [True, False, True]
    if device == "cuda":
        assert [ident == threading.get_ident() for ident, _ in seen] == [False, True, False]


@pytest.mark.parametrize("place", ["caller", "auto"])
def test_what_a_hook_raises_and_what_it_leaves(device, place):
    def fail(gradient):
        raise KeyError("mine")

    autofuse.config.backward_thread = place
    for wrapped in (False, True):
        x = torch.ones(8, device=device, requires_grad=True)
        y = (autofuse.wrap(x) if wrapped else x) * 2.0
        y.register_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            y.sum().backward()
        assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_the_middle(device, place):
    autofuse.config.backward_thread = place
    x = torch.ones(8, device=device, requires_grad=True)
    y = autofuse.wrap(x) * 2.0
    handle = y.register_hook(lambda gradient: signal.raise_signal(signal.SIGINT))
    total = y.sum()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # or it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            total.backward(retain_graph=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.autograd.is_multithreading_enabled()
    handle.remove()
    x.grad = None
    total.backward()
    assert x.grad.tolist() == [2.0] * 8


def test_a_function_finds_its_state_of_the_thread(device):
    state = threading.local()

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            state.factor = 3.0
            return x * state.factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * state.factor

    x = torch.ones(8, device=device, requires_grad=True)
    (Scale.apply(autofuse.wrap(x) * 2.0) * 0.5).sum().backward()
    assert x.grad.tolist() == [3.0] * 8


def profiled(total):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        total.backward()
    assert any("evaluate_function" in event.name for event in profile.events())


def with_anomalies_detected(total):
    with torch.autograd.set_detect_anomaly(True):
        total.backward()


def beside_a_transform(total):
    torch.func.grad(lambda x: (x * 2.0).tanh().sum())(torch.ones(8, device=total.device))
    total.backward()


@pytest.mark.parametrize("way", [profiled, with_anomalies_detected, beside_a_transform])
def test_modes_of_torch(device, way):
    x, found = torch.linspace(-1, 1, 8, device=device, requires_grad=True), []
    for place in PLACES:
        autofuse.config.backward_thread = place
        x.grad = None
        way(((autofuse.wrap(x) * 2.0).tanh() * x).sum())
        found.append(x.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("place", PLACES)
def test_streams_and_the_device_are_what_they_were(place):
    autofuse.config.backward_thread = place
    x, side, seen = torch.ones(8, device="cuda", requires_grad=True), torch.cuda.Stream(), []
    before = torch.cuda.current_stream(), torch.cuda.current_device()
    side.wait_stream(before[0])
    with torch.cuda.stream(side):
        y = autofuse.wrap(x) * 2.0
        y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
        total = y.sum()
    total.backward()
    assert seen == [side]
    assert (torch.cuda.current_stream(), torch.cuda.current_device()) == before
    assert x.grad.tolist() == [2.0] * 8


@pytest.mark.cuda
@needs_cuda
def test_nodes_of_a_cpu_beside_those_of_a_gpu():
    x, found = torch.linspace(-1, 1, 8, device="cuda", requires_grad=True), []
    for place in PLACES:
        autofuse.config.backward_thread = place
        h, seen = autofuse.wrap(x) * 2.0, []
        away = h.cpu().sin()
        away.register_hook(look(seen))
        found.append(torch.autograd.grad((away.cuda() + h * 3.0).sum(), x)[0])
        assert seen == [(threading.get_ident(), place == "engine")]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_choice_of_the_program_stays(device):
    x, seen = torch.ones(8, device=device, requires_grad=True), []
    for place in PLACES:
        autofuse.config.backward_thread = place
        with torch.autograd.set_multithreading_enabled(False):
            y = autofuse.wrap(x) * 2.0
            y.register_hook(lambda g: seen.append(threading.get_ident()))
            y.sum().backward()
            assert not torch.autograd.is_multithreading_enabled()
    assert seen == [threading.get_ident()] * 3


@pytest.mark.parametrize("place", ["caller", "auto"])
def test_several_threads_each_run_their_own(device, place):
    autofuse.config.backward_thread = place
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
