"""Unbounded programs: memory stays flat and kernels stay few."""

import copy
import gc
import weakref

import pytest
import torch

import autofuse
from autofuse.hot import native
from autofuse.record import modes, origins, policy, seldom
from support import DEVICES, HAS_CUDA, assert_same, functions_called, kernels_made

device_param = pytest.mark.parametrize("device", DEVICES)


@device_param
def test_a_sum_that_is_never_read(device):
    """10,000 steps: at most 4 kernels, nodes and Inputs bounded."""
    xs = [torch.randn(16, device=device) for _ in range(10)]
    acc = autofuse.wrap(torch.zeros(16, device=device))
    longest = 0
    recorder = autofuse.chain.state.recorder_for(xs[0].device)
    for k in range(10_000):
        acc = acc + xs[k % 10]
        longest = max(longest, len(recorder.chain))
    assert longest <= autofuse.config.max_nodes
    assert len(recorder.chain.inputs) <= autofuse.config.max_inputs
    assert kernels_made() <= 4
    want = torch.zeros(16, device=device)
    for k in range(10_000):
        want = want + xs[k % 10]
    assert_same(acc, want, None)


@device_param
def test_a_full_chain_ends_by_machine_code(device):
    """Python finds out once at which op."""
    if not native.active():
        pytest.skip("there is none")
    x = torch.randn(16, device=device)

    def run(steps):
        h = autofuse.wrap(x)
        for _ in range(steps):
            h = (h * 0.5 + x).tanh()
        return h

    counts = []
    for _ in range(4):
        autofuse.reset_stats()
        want = autofuse.materialize(run(100)).tolist()
        counts.append(autofuse.stats().flushes["limit"])
    assert counts == counts[:1] * 4 and counts[0] > 2
    called = functions_called(lambda: run(100))
    assert not {"record", "_miss", "record_fresh"} & {*called}
    before = autofuse.config.max_nodes, autofuse.config.loop_nodes
    autofuse.config.max_nodes = autofuse.config.loop_nodes = 1000
    try:  # what was found out was for other settings
        autofuse.reset_stats()
        assert_same(autofuse.materialize(run(100)), torch.tensor(want, device=device), 1e-5)
        assert "limit" not in autofuse.stats().flushes
    finally:
        autofuse.config.max_nodes, autofuse.config.loop_nodes = before


@device_param
def test_an_op_that_comes_again_at_another_place_is_no_loop(device, on, always):
    """A formula is one chain; one of a loop ends where an instruction of it comes again."""
    x = torch.randn(16, device=device)

    def formula(x):
        y = x * 0.5
        y = (y + x).tanh() * x + (y - x).tanh() * y - (y + 2.0).sigmoid() * 3.0
        z = (y - x).neg() * 0.5 + (y + x).abs() * 0.25 - (x - 1.0).tanh() * y
        return (y * z + x).tanh() * 0.5 - (z - y).sigmoid() * x + (y + z).sin() * 2.0 - (x * y) * z

    def loop(x):
        for _ in range(16):
            x = (x * 0.5 + (x * 0.25).tanh()) - x * 0.125
        return x

    def limits(run):
        for _ in range(2):
            autofuse.reset_stats()
            assert_same(autofuse.materialize(run(autofuse.wrap(x))), run(x), 1e-5)
        return autofuse.stats()

    stats = limits(formula)
    assert stats.ops_recorded == 38 and stats.kernels_launched == 1
    stats = limits(loop)  # 6 ops are a turn, of which three are a product
    assert stats.flushes == {"limit": 3, "materialize": 1} and stats.kernels_launched == 4


@device_param
def test_fresh_inputs_are_not_pinned_without_bound(device):
    """Inputs that only the chain holds: at most a few times the largest of them."""
    acc = autofuse.wrap(torch.zeros(1 << 20, device=device))
    recorder = autofuse.chain.state.recorder_for(autofuse.unwrap(acc).device)
    most = 0
    for _ in range(100):
        acc = acc + torch.ones(1 << 20, device=device)
        most = max(most, sum(x.numel() * 4 for x in recorder.chain.inputs))
    assert most <= 4 * (4 << 20)
    assert kernels_made() <= 4
    assert float(acc[0]) == 100.0


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="peak memory is read from the CUDA allocator")
def test_peak_memory_of_an_unread_sum():
    def peak(start):
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        acc = start
        for _ in range(200):
            acc = acc + torch.ones(1 << 20, device="cuda")
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base

    zero = torch.zeros(1 << 20, device="cuda")
    peak(autofuse.wrap(zero))
    eager = peak(zero)
    assert peak(autofuse.wrap(zero)) <= 2 * eager


@device_param
@pytest.mark.parametrize("ops", [4, 5])
def test_an_unrolled_loop_settles_on_few_kernels(ops, device):
    """Also one of 5 ops, which do not divide `config.max_nodes`: not one kernel per phase."""
    a, b = (torch.randn(16, device=device) for _ in range(2))
    h = autofuse.wrap(torch.randn(16, device=device))
    for _ in range(300):
        h = (h * 0.5 + a).abs() - b
        h = h.tanh() if ops == 5 else h
    autofuse.materialize(h)
    stats = autofuse.stats()
    assert kernels_made() <= 3
    assert stats.ops_recorded == 300 * ops and stats.kernels_launched <= 300 * ops // 30 + 2


@device_param
def test_the_trie_is_bounded(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "max_trie", 50)
    recorder = autofuse.chain.state.recorder_for(torch.zeros(1, device=device).device)
    for size in range(1, 200):
        x = autofuse.wrap(torch.full((size,), 2.0, device=device))
        assert (x * 3 + 1).tolist() == [7.0] * size
        assert recorder.size <= 52
    assert autofuse.stats().ops_recorded == 398


@device_param
def test_objects_do_not_accumulate(device):
    x = autofuse.wrap(torch.randn(8, 8, device=device))

    def step():
        return ((x * 2.0 + 1.0).neg() @ autofuse.unwrap(x)).abs().sum().item()

    for _ in range(20):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        step()
    gc.collect()
    assert len(gc.get_objects()) - before < 50


def test_a_class_of_modules_goes_with_its_modules():
    """It may be made in a function, and hold what that has."""

    def make():
        class Scaled(torch.nn.Module):
            def forward(self, x):
                return x * weight + 1.0

        weight = torch.randn(8)
        first, second = autofuse.fuse(Scaled()), autofuse.fuse(Scaled())
        assert type(first) is type(second) is type(copy.deepcopy(first))
        first(weight)
        return weakref.ref(weight), weakref.ref(Scaled), weakref.ref(type(first))

    held = make()
    gc.collect()  # the fused class, and then
    gc.collect()  # the one that it was made of
    assert [ref() for ref in held] == [None] * 3


def test_a_trie_that_is_forgotten_in_the_middle_of_a_flush(monkeypatch):
    """The flush goes on with its kernel; the eager ops do not run beside it."""
    x = torch.rand(8)
    w = autofuse.wrap(x)
    autofuse.materialize((w * 2.0 + 1.0).exp())
    autofuse.reset_stats()
    for k in range(4):
        monkeypatch.setattr(autofuse.config, "max_trie", 2)
        assert (w * 2.0 + 1.0).exp().tolist() == autofuse.materialize(
            (w * 2.0 + 1.0).exp()
        ).tolist()
        assert autofuse.stats().kernels_launched == 2 * k + 2


@pytest.fixture
def measured(monkeypatch):
    """What costs too much is not recorded."""
    monkeypatch.setattr(autofuse.config, "measure", True)
    modes.forget_all("test")
    yield
    modes.forget_all("test")


def with_sizes(sizes, device):
    """Chains over so many elements each; how many ops of them were recorded."""
    autofuse.reset_stats()
    for n in sizes:
        x = torch.randn(n, 3, device=device)
        out = torch.relu(autofuse.wrap(x) * 2.0 + 1.0) - 0.5
        assert_same(autofuse.unwrap(out), torch.relu(x * 2.0 + 1.0) - 0.5, None)
    return autofuse.stats()


@device_param
@pytest.mark.parametrize("grad", [False, True])
def test_sizes_that_never_come_again_are_not_recorded(measured, device, grad, monkeypatch):
    """As of batches that are cut to their longest text, or of what an expert of many gets."""
    recorder = autofuse.chain.state.recorder_for(torch.zeros(1, device=device).device)
    with torch.set_grad_enabled(grad):
        first = with_sizes(range(1, 1 + seldom._FREE), device)
        assert first.ops_recorded > 0
        assert ("mul", seldom.SELDOM) not in first.eager_ops
        with_sizes(range(20, 90), device)  # chains begin with the others, too, where one is not
        before = recorder.size
        found = with_sizes(range(100, 300), device)
    assert found.ops_recorded == 0
    assert sum(n for (_, reason), n in found.eager_ops.items() if reason == seldom.SELDOM) >= 200
    assert recorder.size == before
    # of what comes once more for each _FREE that there are it is
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            again = with_sizes([777], device)
        assert again.ops_recorded > 0
        assert with_sizes([3], device).ops_recorded > 0
        monkeypatch.setattr(autofuse.config, "measure", False)
        assert with_sizes([500], device).ops_recorded == 4


def test_no_call_counts_whose_sizes_may_come_often(measured, monkeypatch):
    """In a contest: how it does with chains nobody knows until they are recorded."""
    with_sizes(range(1, 90), "cpu")
    origins.forget()
    monkeypatch.setattr(origins.trials, "left", 1 << 20)  # results are on no trial
    monkeypatch.setattr(origins.trials, "new", 1 << 20)
    for n in range(905, 910):
        before = policy.kernel_news()
        assert with_sizes([n], "cpu").ops_recorded == 0
        assert not policy.is_settled(before)
    while with_sizes([905], "cpu").ops_recorded < 4:
        pass
    before = policy.kernel_news()
    with_sizes([905], "cpu")
    assert policy.is_settled(before)


def test_what_explain_says_of_sizes_that_seldom_come(measured):
    with_sizes(range(1, 90), "cpu")
    report = autofuse.explain(lambda x: x * 2.0 + 1.0, autofuse.wrap(torch.randn(101, 3)))
    assert any("sizes that have not come often" in line for line in report.advice), report


def test_of_so_many_sizes_those_are_remembered_that_came_last(monkeypatch):
    monkeypatch.setattr(seldom, "_REMEMBERED", 8)
    sizes = seldom.Sizes()
    assert [sizes.admit(k) for k in range(4 * seldom._FREE)].count(True) == seldom._FREE
    assert len(sizes.seen) <= 8
    sizes = seldom.Sizes()
    sizes.recorded = 4 * seldom._FREE  # so that one has to come four times before
    came = [
        sizes.admit(7000) for k in range(5) if not any(map(sizes.admit, range(10 * k, 10 * k + 5)))
    ]
    assert came == [False] * 4 + [True]  # with five others between each and the next
    assert not any(sizes.admit(8000) or any(map(sizes.admit, range(k, k + 9)))
                   for k in range(1000, 1200, 10))  # fmt: skip


def test_the_more_sizes_there_are_the_more_often_one_has_to_come():
    sizes = seldom.Sizes()
    needed = []
    for k in range(1, 200):
        times = 1
        while not sizes.admit(k):
            times += 1
        needed.append(times)
    assert needed == sorted(needed)
    assert needed[0] == 1
    assert needed[-1] == seldom._OFTEN + 1
