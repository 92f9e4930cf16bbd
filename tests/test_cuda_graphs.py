"""CUDA graphs, streams and devices: what is captured, what is refused, what comes before what."""

import pytest
import torch
from torch import nn

import autofuse
from autofuse import errors
from autofuse.patches import around, streams
from autofuse.record.modes import forget_all
from autofuse.supply import kernels as compiling
from autofuse.supply import load
from autofuse.supply.service import Service
from support import DEVICES, assert_same, needs_cuda

W = autofuse.wrap


def forget_everything():
    """Every kernel in memory, and every chain that was ever recorded here."""
    compiling.clear_kernels()
    forget_all("test")


@pytest.fixture
def cold(monkeypatch):
    """No kernel is there, in memory or on disk."""
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "0")
    forget_everything()
    yield
    forget_everything()


def gate(x, y):
    h = torch.sigmoid(x) * y
    return torch.tanh(h + 1.5) - x


def rare(x, y):
    return ((x - y).abs() * 0.375 + y).neg().square() - 0.625


@pytest.mark.parametrize("device", DEVICES)
def test_a_cold_chain_in_a_capture_is_an_error_that_names_it(device, cold, monkeypatch):
    """The state of a capture is feigned here; TestCapture has real ones."""
    x, y = torch.randn(64, device=device), torch.randn(64, device=device)
    monkeypatch.setattr(compiling, "capturing", lambda device: True)
    value = rare(W(x), W(y))
    with pytest.raises(autofuse.ColdKernelError) as caught:
        autofuse.materialize(value)
    said = str(caught.value)
    assert "af_sub_abs_mul_add_neg" in said and "a CUDA graph is being captured" in said
    with pytest.raises(autofuse.ColdKernelError):  # the value went with the capture
        value.tolist()
    monkeypatch.setattr(compiling, "capturing", lambda device: False)
    assert_same(rare(W(x), W(y)), rare(x, y), 1e-6)
    monkeypatch.setattr(compiling, "capturing", lambda device: True)
    assert_same(rare(W(x), W(y)), rare(x, y), 1e-6)  # warm now


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runs", [0, 3], ids=["never run", "kernel on its way"])
def test_a_capture_says_what_it_took_as_eager_ops(runs, device, cold, monkeypatch, capsys):
    monkeypatch.setattr(autofuse.config, "compile", "background")
    monkeypatch.setattr(Service, "submit", lambda self, job: None)
    monkeypatch.setattr(load, "_captured", False)
    monkeypatch.setattr(errors, "_said", set())
    x, y = torch.randn(64, device=device), torch.randn(64, device=device)
    for _ in range(runs):
        assert_same(rare(W(x), W(y)), rare(x, y), 1e-6)
    streams._begin_capture()
    monkeypatch.setattr(compiling, "capturing", lambda device: True)
    assert_same(rare(W(x), W(y)), rare(x, y), 1e-6)
    assert autofuse.stats().kernels_launched == 0
    said = capsys.readouterr().err
    assert "captured af_sub_abs_mul_add_neg" in said and "as eager ops" in said


def test_what_ends_a_capture_ends_it_though_a_flush_fails(monkeypatch):
    """Or the process would be left with a capture, or a stream, that nobody can end."""
    ended = []

    class Graph:
        def capture_end(self):
            ended.append(True)

    def fail():
        raise autofuse.ColdKernelError("stream")

    around.around(Graph, "capture_end", fail, anyway=True)
    with pytest.raises(autofuse.ColdKernelError):
        Graph().capture_end()
    assert ended == [True]


@pytest.mark.cuda
@needs_cuda
class TestCapture:
    def inputs(self):
        return (torch.randn(64, 64, device="cuda") for _ in range(2))

    def test_replay_of_a_fused_function(self):
        x, y = self.inputs()
        fused = autofuse.fuse(gate)
        fused(x, y)  # warm
        autofuse.reset_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused(x, y)
        assert autofuse.stats().kernels_launched == 1
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert_same(out, gate(x, y), None)

    def test_what_is_pending_at_the_end_is_captured(self):
        x, y = self.inputs()
        a, b = W(x), W(y)
        autofuse.materialize(gate(a, b))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gate(a, b)
        assert not autofuse.is_pending(out)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same(out, gate(x, y), None)

    def test_what_is_pending_at_the_start_is_not_captured(self):
        x, y = self.inputs()
        a, b = W(x), W(y)
        autofuse.materialize(gate(a, b))
        before = gate(a, b)
        want = gate(x, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gate(a, b)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same(before, want, None)
        assert_same(out, gate(x, y), None)

    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # eager's, at the end
    def test_forward_and_backward_in_one_graph(self, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        x, y = self.inputs()
        y.requires_grad_()
        fused = autofuse.fuse(gate)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.autograd.grad(fused(x, y).sum(), y)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused(x, y)
            (grad,) = torch.autograd.grad(out.sum(), y)
        x.copy_(torch.randn_like(x))
        graph.replay()
        want = gate(x, y)
        assert_same(out.detach(), want.detach(), None)
        assert_same(grad, torch.autograd.grad(want.sum(), y)[0], None)

    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
    def test_make_graphed_callables(self, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)

        class Gate(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(64, 64)

            def forward(self, x):
                return gate(self.linear(x), x)

        torch.manual_seed(0)
        plain = Gate().cuda()
        fused = autofuse.fuse(Gate().cuda())
        fused.load_state_dict(plain.state_dict())
        x, _ = self.inputs()
        graphed = torch.cuda.make_graphed_callables(fused, (x.clone(),))
        results = []
        for module in (graphed, plain):
            out = module(x)
            out.sum().backward()
            # copies: the next replay may use the memory of what the last one has made
            results.append([out.detach().clone(), *(p.grad.clone() for p in module.parameters())])
        for ours, theirs in zip(*results, strict=True):  # matmuls may choose otherwise in a graph
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
    @pytest.mark.parametrize("when", ["inside", "at the end"])
    def test_a_cold_chain_is_refused_and_nothing_is_broken(self, when, cold):
        x, y = self.inputs()
        a, b = W(x), W(y)
        stream = torch.cuda.current_stream()
        with pytest.raises(autofuse.ColdKernelError, match="af_sub_abs_mul_add_neg"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                out = rare(a, b)
                if when == "inside":
                    autofuse.materialize(out)
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        autofuse.materialize(rare(a, b))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = rare(a, b)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same(out, rare(x, y), None)

    def test_kernels_from_disk_may_be_loaded_in_a_capture(self):
        x, y = self.inputs()
        autofuse.materialize((W(x) * 0.375 - y).abs().square())
        forget_everything()  # but for the disk
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = (W(x) * 0.375 - y).abs().square()
        graph.replay()
        assert_same(out, (x * 0.375 - y).abs().square(), None)


@pytest.mark.cuda
@needs_cuda
class TestStreams:
    def test_an_event_stands_behind_what_was_recorded_before_it(self):
        """A stream that waits for the event reads the finished value."""
        x = W(torch.zeros(1 << 22, device="cuda"))
        autofuse.materialize((x + 1) * 2)
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        for k in range(5):
            y = (x + float(k)) * 2
            event.record()
            side.wait_event(event)
            with torch.cuda.stream(side):
                total = autofuse.unwrap(y).sum()
            side.synchronize()
            assert total.item() == 2.0 * k * (1 << 22)

    def test_side_streams_record_and_launch_for_themselves(self):
        x = torch.ones(1 << 20, device="cuda")
        w = W(x)
        autofuse.materialize((w * 2 + 1).neg())
        streams = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for k, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append((w * float(k) + 1).neg())
        for k, (stream, y) in enumerate(zip(streams, results, strict=True)):
            assert not autofuse.is_pending(y)
            torch.cuda.current_stream().wait_stream(stream)
            assert_same(y, -(x * float(k) + 1), None)

    def test_record_stream_of_a_pending_value(self):
        """Its memory is not handed out again while the side stream still reads it."""
        x = W(torch.ones(1 << 20, device="cuda"))
        side = torch.cuda.Stream()
        y = x * 3 + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            total = y.sum()
        y.record_stream(side)
        del y
        other = x * 0 - 5  # wants memory of that size
        autofuse.materialize(other)
        side.synchronize()
        assert total.item() == 4.0 * (1 << 20)

    def test_pinned_memory_and_asynchronous_copies(self):
        host = torch.arange(1024.0).pin_memory()
        w = W(host.to("cuda", non_blocking=True))
        back = torch.empty(1024).pin_memory()
        back.copy_(w * 2 + 1, non_blocking=True)
        torch.cuda.synchronize()
        assert_same(back, host * 2 + 1, None)
        pinned = (W(torch.arange(8.0)) * 2).pin_memory()
        assert pinned.is_pinned() and pinned.tolist() == (torch.arange(8.0) * 2).tolist()


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, {torch.cuda.device_count()} here"
)
class TestTwoDevices:
    def test_a_chain_on_each(self):
        xs = [torch.randn(1024, device=f"cuda:{k}") for k in range(2)]
        ys = [torch.sigmoid(W(x) * 2) + 1 for x in xs]  # recorded side by side
        assert all(map(autofuse.is_pending, ys))
        for x, y in zip(xs, ys, strict=True):
            assert y.device == x.device
            assert_same(y, torch.sigmoid(x * 2) + 1, None)
        assert autofuse.stats().kernels_launched == 2
        assert torch.cuda.current_device() == 0

    def test_the_device_that_is_not_current(self):
        x = torch.randn(1024, device="cuda:1")
        with torch.cuda.device(0):
            y = torch.sigmoid(W(x) * 2) + 1
        with torch.cuda.device(1):
            z = torch.sigmoid(W(x) * 2) + 1
            autofuse.materialize(y, z)
        assert_same(y, torch.sigmoid(x * 2) + 1, None)
        assert_same(z, torch.sigmoid(x * 2) + 1, None)

    def test_training_over_two_devices(self, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        grads = []
        for wrap in (lambda t: t, W):
            a = torch.linspace(-1, 1, 64, device="cuda:0").requires_grad_()
            b = torch.linspace(-2, 2, 64, device="cuda:1").requires_grad_()
            h = torch.tanh(wrap(a) * 2) + 1
            y = torch.sigmoid(wrap(b) * 3) * h.to("cuda:1")
            y.sum().backward()
            grads.append((a.grad, b.grad))
        assert_same(grads[1], grads[0], None)
