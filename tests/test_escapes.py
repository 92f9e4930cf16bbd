"""Every way a pending value is seen from outside: it runs first, and the result is eager's."""

import copy
import io
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import autofuse
from support import DEVICES, assert_same, assert_same_as_eager, needs_cuda

READS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool(t.max() > 100),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.abs().sum()),
    "format": lambda t: f"{t.mean():.3f}",
    "repr": repr,
    "str": str,
    "len": len,
    "iter": lambda t: [row.tolist() for row in t],
    "contains": lambda t: 0.0 in t,
    "numpy": lambda t: t.cpu().numpy().tolist(),
    "asarray": lambda t: np.asarray(t.cpu()).tolist(),
    "index": lambda t: [1, 2, 3][(t[0, 0] * 0).int()],
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "storage": lambda t: t.untyped_storage().nbytes(),
    "grad": lambda t: t.grad,
    "grad_fn": lambda t: t.grad_fn,
    "is_leaf": lambda t: t.is_leaf,
    "version": lambda t: t._version,
    "metadata": lambda t: (t.shape, t.stride(), t.dtype, t.device, t.ndim, t.numel(), t.size(0),
                           t.is_contiguous(), t.storage_offset(), t.layout, t.requires_grad,
                           t.nbytes, t.itemsize, t.is_floating_point(), t.dim(), len(t)),
    "hash": lambda t: len({t, t}),
}  # fmt: skip

OPS = {
    "mm": lambda t: t @ t.T,
    "torch.mm": lambda t: torch.mm(t, t.t()),
    "linear": lambda t: F.linear(t, t, None),
    "sum": lambda t: t.sum(0),
    "softmax": lambda t: F.softmax(t, -1),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "cat": lambda t: torch.cat([t, t], 1),
    "stack": lambda t: torch.stack((t, t)),
    "index": lambda t: t[1],
    "slice": lambda t: t[:, 1:3],
    "mask": lambda t: t[t > 0],
    "gather": lambda t: t[torch.zeros(2, dtype=torch.long, device=t.device)],
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(2, -1),
    "transpose": lambda t: t.T,
    "expand": lambda t: t[:1].expand(5, -1),
    "split": lambda t: t.split(2, 1),
    "unbind": lambda t: t.unbind(0),
    "chunk": lambda t: t.chunk(2, 1),
    "max_dim": lambda t: t.max(1),
    "sort": lambda t: t.sort(1),
    "cumsum": lambda t: t.cumsum(0),
    "dropout_eval": lambda t: F.dropout(t, training=False),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "contiguous": lambda t: t.T.contiguous(),
    "to_cpu": lambda t: t.cpu(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: _saved(t),
    "complex": lambda t: torch.complex(t, t) * 2,
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "foreach": lambda t: torch._foreach_add([t, t], 1.0),
    "norm": lambda t: t.norm(),
    "tril": lambda t: t.tril(),
    "as_tensor": lambda t: torch.as_tensor(t),
    "full": lambda t: torch.full((2,), t.sum().item()),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda t: t.new_zeros(2),
    "flip": lambda t: t.flip(0),
    "dlpack": lambda t: torch.from_dlpack(t),
}


def _saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


def pending(x):
    """A chain of two ops; the same bits on every device."""
    return x * 2 + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", READS)
def test_reading(name, device):
    x = torch.arange(12.0, device=device).reshape(3, 4) - 5
    want, got = READS[name](pending(x)), READS[name](pending(autofuse.wrap(x)))
    assert got == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_ops_outside_the_table(name, device):
    x = torch.randn(4, 4, device=device)
    assert_same_as_eager(lambda t: OPS[name](pending(t)), x)


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_other_ops_are_wrapped_again(device):
    x = autofuse.wrap(torch.randn(4, 4, device=device))
    y = x @ x
    assert isinstance(y, autofuse.Tensor) and not autofuse.is_pending(y)
    assert autofuse.is_pending(y * 2)
    values, indices = (x * 2).max(1)
    assert isinstance(values, autofuse.Tensor) and isinstance(indices, autofuse.Tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_values(device):
    def f(x, y):
        a, b = x * 2, y + 1
        both = torch.cat([a, b, x]) * 3
        nested = torch.block_diag(*[both, a - b])
        return both, nested, torch.stack((a, y)).sum(0) * a, torch.cat([a], dim=-1), a

    x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    assert_same_as_eager(f, x, y)
    assert_same_as_eager(f, x, y[:2])

    def gradients(x, y):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        a = torch.sigmoid(x * y) * x + x
        (torch.cat([x, a, y]) * torch.cat((x, x, y))).sum().backward()
        return x.grad, y.grad

    assert_same_as_eager(gradients, x, y, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_concrete_values_flush_nothing(device):
    x, y = (autofuse.wrap(torch.randn(4, 4, device=device)) for _ in range(2))
    z = x * 2
    view = y[1]
    assert autofuse.is_pending(z)
    assert_same(view, autofuse.unwrap(y)[1], None)


def test_user_autograd_function_receives_values():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert not autofuse.is_pending(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = autofuse.wrap(torch.randn(3))
    assert_same(Double.apply(x + 1), (autofuse.unwrap(x) + 1) * 2, None)


def test_jit_script_receives_values():
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() + x

    x = autofuse.wrap(torch.randn(3))
    plain = autofuse.unwrap(x)
    assert_same(scripted(x + 1), (plain + 1).tanh() + (plain + 1), None)


def test_torch_func_receives_values():
    x = autofuse.wrap(torch.randn(3, 4))
    plain = autofuse.unwrap(x)
    assert_same(torch.func.vmap(torch.sum)(x + 1), (plain + 1).sum(1), None)

    def loss(t):
        return (t * t).sum()

    assert_same(torch.func.grad(loss)(x + 1), 2 * (plain + 1), None)


def test_closed_over_wrapped_tensor_under_vmap():
    x = torch.randn(3, 4)
    w = autofuse.wrap(torch.randn(4))
    got = torch.func.vmap(lambda row: row * w + w * 2)(x)
    assert_same(got, x * autofuse.unwrap(w) + autofuse.unwrap(w) * 2, 1e-6)


def test_cpp_below_torch_function_gets_values():
    x = autofuse.wrap(torch.tensor([2.0, 3.0]))
    assert torch.tensor(x[0] * 2).item() == 4.0
    assert torch.full((2,), 1.0).add(torch.ones(2), alpha=float(x[0] + 1)).tolist() == [4.0, 4.0]
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.sum(x * 2).item() == 10.0


def test_gradients_are_computed_where_torch_functions_are_off():
    """As for a handler in the middle of an op: torch asks no class, and may seed by itself."""
    x, p = torch.tensor(3.0), torch.tensor(2.0, requires_grad=True)
    for off in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
        for seeds in ((), (torch.tensor(0.5),)):
            found = []
            for wrap in (lambda t: t, autofuse.wrap):
                w, p.grad = wrap(x), None
                with off():
                    (g,) = torch.autograd.grad(w * p * 2.0, p, *seeds)
                    torch.autograd.backward(w * p + p, *seeds)
                found.append([g, p.grad])
            assert_same(found[1], found[0], None)


def test_data_and_grad_of_plain_tensors_take_values():
    x = autofuse.wrap(torch.randn(3))
    p = torch.zeros(3)
    p.data = x * 2
    assert_same(p, autofuse.unwrap(x) * 2, None)
    p.grad = x * 3
    assert_same(p.grad, autofuse.unwrap(x) * 3, None)


def test_parameters_from_pending_values():
    x = autofuse.wrap(torch.randn(3))
    p = torch.nn.Parameter(x * 2)
    assert type(p) is torch.nn.Parameter
    assert_same(p.detach(), autofuse.unwrap(x) * 2, None)


def test_modes_see_every_op():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = autofuse.wrap(torch.randn(3))
    with Log():
        y = x * 2
        assert autofuse.is_pending(y) and len(seen) == 1
    assert autofuse.is_pending(y + 1)


def test_default_dtype_is_that_of_recording():
    x = autofuse.wrap(torch.arange(3))
    y = x / 2
    torch.set_default_dtype(torch.float64)
    try:
        z = x / 2
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype is torch.float32 and z.dtype is torch.float64
    assert_same(z, torch.arange(3, dtype=torch.float64) / 2, None)


@pytest.mark.parametrize("name", ["asarray", "tensor", "zeros"])
def test_what_makes_tensors_makes_them_on_the_default_device(name):
    """A function that stands in for one of torch's is one of those that the device is for."""
    args = ((2,),) if name == "zeros" else ([1.0],)
    with torch.device("meta"):
        assert getattr(torch, name)(*args).device.type == "meta"
        assert getattr(torch, name)(*args, device="cpu").device.type == "cpu"
    if name == "asarray":
        wrapped = autofuse.wrap(torch.ones(2)) * 2
        with torch.device("meta"):
            assert torch.asarray(wrapped).device.type == "meta"


def test_inference_mode_is_that_of_recording():
    x = autofuse.wrap(torch.randn(3))
    with torch.inference_mode():
        y = x * 2
    z = x * 2
    assert y.is_inference() and not z.is_inference()
    assert_same(z, autofuse.unwrap(x) * 2, None)
    assert (y + 1).tolist() == (autofuse.unwrap(x) * 2 + 1).tolist()


@pytest.mark.cuda
@needs_cuda
class TestStreams:
    def test_work_stays_on_the_recording_stream(self):
        x = autofuse.wrap(torch.randn(1 << 20, device="cuda"))
        side = torch.cuda.Stream()
        autofuse.materialize((x * 2).neg())  # compiled before the clock runs
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            z = (x * 2).neg()
        assert not autofuse.is_pending(z)
        assert not side.query()
        torch.cuda.current_stream().wait_stream(side)
        assert_same(z, -(autofuse.unwrap(x) * 2), None)

    def test_events_stand_behind_what_was_recorded_before(self):
        x = autofuse.wrap(torch.randn(1 << 20, device="cuda"))
        y = x * 2
        event = torch.cuda.Event()
        event.record()
        assert not autofuse.is_pending(y)
        event.synchronize()

    def test_synchronize_runs_what_is_pending(self):
        y = autofuse.wrap(torch.ones(4, device="cuda")) * 2
        torch.cuda.synchronize()
        assert not autofuse.is_pending(y)

    def test_graph_capture_and_replay(self):
        x = torch.randn(64, 64, device="cuda")
        w = autofuse.wrap(x)
        autofuse.materialize(torch.tanh(w * 2) + 1)  # warm
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = autofuse.unwrap(torch.tanh(w * 2) + 1)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(out, torch.tanh(x * 2) + 1, None)


def test_operator_module_and_python_scalars():
    x = torch.randn(3)
    for op in (operator.add, operator.sub, operator.mul, operator.truediv):
        assert_same_as_eager(lambda t, op=op: (op(t, 2.0), op(2.0, t), op(t, 3), op(3, t)), x)


SEEN = {  # by another look of autograd's
    "one op": lambda p, q, r: torch.exp(p),
    "after one without a gradient": lambda p, q, r: torch.mul(q, p),
    "of a list": lambda p, q, r: torch.cat([q, p]),
    "of two ops": lambda p, q, r: F.mse_loss(q, p),
    "several results": lambda p, q, r: torch.sort(p)[0] * torch.max(p, 0).values,
    "a comparison before it": lambda p, q, r: torch.where(torch.gt(p, 0), p, q),
    "beside what autograd knows": lambda p, q, r: torch.mul(r, p) * torch.mul(p, r),
    "of a list with what it knows": lambda p, q, r: torch.stack([p, r]),
    "of several ops": lambda p, q, r: F.cosine_similarity(p, torch.ones_like(p)),
    "of several ops beside what it knows": lambda p, q, r: F.cosine_similarity(p, r + q),
    "dropout": lambda p, q, r: F.dropout(p, 0.5),
    "complex numbers": lambda p, q, r: torch.fft.rfft(p).abs(),
}
UNSEEN = {
    "a write": lambda p, q, r: torch.zeros(3, 3).add_(p),
    "a view": lambda p, q, r: torch.select(p, 0, 1),
}


@pytest.mark.parametrize("name", SEEN | UNSEEN)
def test_no_gradient_is_lost_where_torch_functions_are_off(name, always):
    """It is the shell that C++ asks then; where another look does not help that is told."""
    program = (SEEN | UNSEEN)[name]
    x = torch.arange(1.0, 10.0).view(3, 3).requires_grad_()
    y = x.detach().clone().requires_grad_()
    q, p = autofuse.wrap(x.detach().clone()) * 3.0, autofuse.wrap(x) * 2.0
    r = torch.linspace(-1.0, 2.0, 9).view(3, 3).requires_grad_()
    assert autofuse.is_pending(p) and autofuse.is_pending(q)
    with torch._C.DisableTorchFunctionSubclass():
        if name in SEEN:
            torch.manual_seed(0)
            got = program(p, q, r)
            torch.manual_seed(0)
            want = program(y * 2.0, y.detach() * 3.0, r)
            assert_same(got, want, 1e-6)
            found, given = (
                torch.autograd.grad((result * result).sum(), [leaf, r], retain_graph=True,
                                    allow_unused=True)
                for result, leaf in ((got, x), (want, y))
            )  # fmt: skip
            for one, other in zip(found, given, strict=True):
                assert (one is None) == (other is None)
                assert one is None or assert_same(one, other, 1e-5) is None
        else:
            with pytest.raises(autofuse.errors.LostGradientError):
                program(p, q, r)
    (gradient,) = torch.autograd.grad((p * q).sum(), x)
    assert_same(gradient, x.detach() * 6.0, None)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        return x * 2.0

    @staticmethod
    def backward(ctx, g):
        return g * 2.0, None


@torch.jit.script
def scripted(x, y):
    return x * 2.0 + y


USES = {
    "Function": Doubled.apply,
    "script": scripted,
    "checkpoint": lambda z, r: checkpoint(lambda z, r: z * 2.0 + r, z, r, use_reentrant=True),
    "linear": F.linear,
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", USES)
def test_what_comes_of_it_has_its_graph_for_all(name, beside, always):
    """Also for who asks C, as `autograd.Function` does: beside another one that requires grad C++
    is given a shell."""
    found = []
    for wrap in (autofuse.wrap, lambda t: t):
        x = torch.arange(1.0, 10.0).view(3, 3).requires_grad_()
        r = torch.linspace(-1.0, 2.0, 9).view(3, 3).requires_grad_()
        p = wrap(x) * 2.0
        with torch._C.DisableTorchFunctionSubclass():
            z = torch.mul(r, p) if beside else torch.exp(p * 0.1)
        USES[name](z, r).sum().backward()
        found.append((x.grad, r.grad))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or assert_same(one, other, 1e-6) is None


class Plainly(torch.Tensor):
    """Does what torch does, whatever the other classes are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


PLAINLY = [
    torch.add, torch.mul, torch.maximum, torch.dot, lambda s, y: s - y,
    lambda s, y: s.clamp(y, y + 1), lambda s, y: torch.where(s > 0, s, y),
    lambda s, y: F.cosine_similarity(s, y, 0),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", ["wrap", "fuse"])
def test_pending_values_beside_a_class_that_asks_nobody(way, grad, on, monkeypatch):
    leaf = torch.tensor([0.5, -1.0, 2.0], requires_grad=grad)
    for function in PLAINLY:
        for always_fuse in (False, True, True):
            monkeypatch.setattr(autofuse.config, "always_fuse", always_fuse)
            x, s = torch.tensor([1.0, 2.0, -3.0], requires_grad=True), leaf.as_subclass(Plainly)
            want = function(s, x * 2.0 + 1.0)
            if way == "wrap":
                got = function(s, autofuse.wrap(x) * 2.0 + 1.0)
            else:
                got = autofuse.fuse(lambda x, f=function, s=s: f(s, x * 2.0 + 1.0))(x)
                assert type(got) is torch.Tensor
            assert_same(got, want, 1e-6)
            leaves = [x, leaf] if grad else [x]
            found, given = (torch.autograd.grad(one.sum(), leaves) for one in (got, want))
            for one, other in zip(found, given, strict=True):
                assert_same(one, other, 1e-6)
