"""What else a program uses, beside fused code: each gives what eager PyTorch gives."""

import copy
import functools
import io
import pickle
import shutil
import subprocess
import sys
import sysconfig
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import autofuse
from support import DEVICES, assert_same, needs_cuda, write_unseen

W = autofuse.wrap
device_param = pytest.mark.parametrize("device", DEVICES)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())


def pair():
    """The same model twice, the second one fused."""
    return net(), autofuse.fuse(net())


def assert_same_gradients(ours, theirs):
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


# --- autocast ------------------------------------------------------------------------------------

# one of every list of autocast: lower precision, float32, promotion, neither; and a loss
AUTOCAST = (
    lambda h, x: h, lambda h, x: torch.tanh(h) * x, lambda h, x: F.gelu(h) + 1,
    lambda h, x: h.exp(), lambda h, x: h**2,
    lambda h, x: 2 / (h + 3), lambda h, x: torch.softmax(h, -1),
    lambda h, x: torch.addcmul(x, h, h), lambda h, x: torch.mm(h, h), lambda h, x: h.sum(),
    lambda h, x: torch.cat([h, x]), lambda h, x: F.mse_loss(h.float(), x),
    lambda h, x: h.clone().mul_(2), lambda h, x: torch.atan2(h, x),
)  # fmt: skip


@device_param
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_has_eagers_lists_and_dtypes(dtype, device):
    linear = nn.Linear(4, 4).to(device)

    def f(x):
        y = x * 2 + 1  # before, and fused
        with torch.autocast(device, dtype=dtype):
            results = [op(linear(y), x) for op in AUTOCAST]
        return [*results, torch.tanh(results[0]) + 1, y]  # after, and fused again

    x = torch.rand(4, 4, device=device)
    want = f(x)
    for got in (f(W(x)), autofuse.fuse(f)(x)):
        for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            assert ours.dtype is theirs.dtype, k
            assert_same(ours, theirs, 1e-2)
    assert autofuse.stats().kernels_launched > 0


@device_param
def test_training_under_autocast_with_a_grad_scaler(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    models = [model.to(device) for model in pair()]
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    x = torch.linspace(-1, 1, 16, device=device).reshape(4, 4)
    scales = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
        for k in range(4):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = model(x).square().mean()
            error = autofuse.fuse(lambda t: (t * 2 + 1).log())(loss)  # float32, and fused
            scaler.scale(error * float("inf") if k == 1 else error).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**9] * 2
    rtol = 1.3e-6 if device == "cuda" else 1e-2  # bfloat16, which the CPU's kernels round otherwise
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 100)


# --- torch.compile, jit, custom ops, C++ -------------------------------------------------------


def curve(x):
    return torch.tanh(x * 2) + 1


@pytest.fixture
def compiled():
    """torch.compile without a code generator."""
    torch._dynamo.reset()
    return lambda f, **options: torch.compile(f, backend="aot_eager", **options)


class TestCompile:
    def test_fused_code_inside_is_compiled_as_if_not_fused(self, compiled):
        x = torch.randn(4, requires_grad=True)
        inner = autofuse.fuse(curve)
        got = compiled(lambda t: inner(t).sum(), fullgraph=True)(x)
        (grad,) = torch.autograd.grad(got, x)
        assert_same(got, curve(x).sum(), 1e-6)
        assert_same(grad, torch.autograd.grad(curve(x).sum(), x)[0], 1e-6)
        model, fused = pair()
        batch = torch.randn(2, 4)
        assert_same(compiled(fused, fullgraph=True)(batch), model(batch), 1e-6)

    def test_a_compiled_callee_of_fused_code(self, compiled):
        callee = compiled(curve, fullgraph=True)
        x = torch.randn(4)
        got = autofuse.fuse(lambda t: callee(t * 3 + 1) * 2 - t)(x)
        assert_same(got, curve(x * 3 + 1) * 2 - x, 1e-6)
        assert autofuse.stats().kernels_launched > 0

    @pytest.mark.parametrize("pending", [False, True])
    def test_a_wrapped_tensor_that_is_closed_over(self, compiled, pending):
        x = torch.randn(4)
        w = W(x) * 2 if pending else W(x * 2)
        got = compiled(lambda t: (torch.tanh(t * w) + torch.sin(w)).sum())(x)
        assert_same(got, (torch.tanh(x * (x * 2)) + torch.sin(x * 2)).sum(), 1e-6)

    def test_a_wrapped_buffer_of_a_compiled_module(self, compiled):
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.register_buffer("scale", W(torch.full((4,), 3.0)) * 2)

            def forward(self, x):
                return torch.tanh(self.linear(x) * self.scale)

        model, x = Scale(), torch.randn(2, 4)
        want = torch.tanh(model.linear(x) * 6.0)
        assert_same(compiled(model)(x), want, 1e-6)
        model.compile(backend="aot_eager")
        assert_same(model(W(x) * 1), want, 1e-6)

    def test_wrapping_inside_a_compiled_function(self, compiled):
        x = torch.randn(4)
        assert_same(compiled(lambda t: autofuse.unwrap(curve(W(t))))(x), curve(x), 1e-6)

    @pytest.mark.parametrize("leaf", [W, nn.Parameter], ids=["wrapped", "Parameter"])
    @pytest.mark.parametrize("place", ["around", "inside"])
    def test_autograd_nodes_in_a_compiled_backward(self, compiled, place, leaf, monkeypatch):
        from torch._dynamo import compiled_autograd, config

        def trained(wrap, leaf):
            p = leaf((torch.arange(4.0) + 1).requires_grad_())
            for _ in range(2):
                y = wrap(torch.ones(4)) * p * 2 + 1
                loss = (torch.sigmoid(y) * p).sum()
                if place == "around":
                    with compiled_autograd._enable(compiled):
                        loss.backward()
                else:
                    compiled(lambda loss: loss.backward())(loss)
            return p.grad

        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        with warnings.catch_warnings(), config.patch(compiled_autograd=place == "inside"):
            warnings.simplefilter("ignore")  # torch hides one by replacing `showwarning`
            want = trained(lambda t: t, nn.Parameter)
            assert_same(trained(W, leaf), want, 1e-6)
        assert autofuse.stats().kernels_launched > 0

    def test_a_compiled_function_is_given_a_leaf_itself(self, compiled):
        x, y = torch.ones(4, requires_grad=True), W(torch.ones(4, requires_grad=True))
        for leaf in (x, y):
            seen = []
            leaf.register_hook(seen.append)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled(lambda t: (t * 2).sum() * t.is_leaf)(leaf).backward()
            assert leaf.grad.tolist() == [2.0] * 4 and len(seen) == 1
        assert type(y) is autofuse.Tensor

    def test_other_code_compiles_whole_as_ever(self, compiled):
        """What autofuse patches in torch breaks no graph."""
        model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU(inplace=True))

        def f(x):
            y = model(x).clone()
            with torch.no_grad():
                scale = y.detach().abs().mean()
            y += scale
            y[0] = 2
            return y.clamp_(-1, 3)

        x = torch.randn(3, 2, 5)
        state = copy.deepcopy(model.state_dict())
        got = compiled(f, fullgraph=True)(x)
        model.load_state_dict(state)
        assert_same(got, f(x), 1e-5)

    def test_export_and_fx(self):
        model, fused = pair()
        x = torch.randn(2, 4)
        exported = torch.export.export(fused, (W(x) * 1,)).module()
        assert_same(exported(W(x) * 2), model(x * 2), 1e-6)
        traced = torch.fx.symbolic_trace(fused)
        assert_same(traced(W(x) * 2), model(x * 2), 1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
class TestJit:
    def test_gradients_through_a_scripted_function(self):
        @torch.jit.script
        def scripted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) * y + 1

        grads = []
        for wrap in (lambda t: t, W):
            x = torch.linspace(-1, 1, 4).requires_grad_()
            scripted(wrap(x) * 2, wrap(torch.ones(4)) * 3).sum().backward()
            grads.append(x.grad)
        assert_same(grads[1], grads[0], 1e-6)

    def test_a_scripted_function_that_writes(self):
        @torch.jit.script
        def bump(x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

        memory = torch.zeros(3)
        for target in (memory, W(memory)):
            y = W(memory) * 2
            before = memory.clone()
            bump(target)
            assert_same(y, before * 2, None)
        assert memory.tolist() == [2.0] * 3

    def test_scripted_modules_and_traces(self):
        model = net()
        x = torch.randn(2, 4)
        scripted = torch.jit.script(model)
        assert_same(scripted(W(x) * 2), model(x * 2), 1e-6)
        for example in (W(x), W(x) * 1):
            traced = torch.jit.trace(autofuse.fuse(curve), (example,))
            assert_same(traced(W(x) * 2), curve(x * 2), 1e-6)

    @pytest.mark.parametrize("graded", [False, True])
    def test_what_a_forked_function_returns(self, graded, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)

        def told(wrap):
            x = wrap(torch.ones(4).requires_grad_(graded))
            y = x * 2.0
            futures = [torch.jit.fork(f) for f in (lambda: curve(y), lambda: y, lambda: y * 3.0)]
            made = [future.wait() for future in futures]  # which the futures hold as well
            made[0].sum(), made[1].sum()
            if graded:
                sum(z.sum() for z in made).backward()
            else:
                made[1].add_(1.0), made[2].resize_(2)
            facts = [(z.requires_grad, z.is_leaf, z._version, z.shape) for z in made]
            return facts, [z.grad_fn is None for z in made], made[1] is y, made, x.grad

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            want = told(lambda x: x)
            for _ in range(3):
                got = told(W)
                assert got[:3] == want[:3]
                torch.testing.assert_close(got[3:], want[3:])


@pytest.fixture(scope="module")
def library():
    """Custom ops that read and write memory behind torch's back."""

    @torch.library.custom_op("autofuse_tests::scale", mutates_args=())
    def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        assert type(x) is torch.Tensor
        return torch.from_numpy(x.detach().numpy() * np.float32(by))

    def setup(ctx, inputs, output):
        ctx.by = inputs[1]

    scale.register_autograd(lambda ctx, g: (g * ctx.by, None), setup_context=setup)

    @torch.library.custom_op("autofuse_tests::fill", mutates_args={"x"})
    def fill(x: torch.Tensor) -> None:
        x.detach().numpy().fill(7)

    return torch.ops.autofuse_tests


class TestCustomOps:
    def test_it_gets_values_and_gives_gradients(self, library):
        x = torch.ones(3, requires_grad=True)
        for op in (library.scale, library.scale.default):
            y = op(W(x) * 2, 3.0)
            assert_same(y.detach(), torch.full((3,), 6.0), None)
            (grad,) = torch.autograd.grad((y * 2).sum(), x)
            assert grad.tolist() == [12.0] * 3

    def test_what_it_writes_is_read_before(self, library):
        memory = W(torch.ones(3))
        y = memory * 2
        library.fill(memory)
        assert y.tolist() == [2.0] * 3 and (memory + 1).tolist() == [8.0] * 3
        pending = memory * 2
        library.fill(pending)
        assert (pending + 1).tolist() == [8.0] * 3

    def test_a_write_to_a_plain_tensor_that_is_still_read_is_an_error(self, library):
        memory = torch.ones(3)
        y = W(memory) * 2
        with pytest.raises(autofuse.StaleInputError, match="version 0 -> 1"):
            library.fill(memory)
            y.tolist()

    def test_aten_ops_by_their_own_names(self):
        x = torch.randn(3)
        for op in (torch.ops.aten.mul, torch.ops.aten.mul.Tensor):
            assert_same(op(W(x) * 2, W(x)), x * 2 * x, None)


_EXTENSION = r"""
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#define ENTRY(name, ...)                                 \
  static PyObject* name(PyObject*, PyObject* object) {   \
    HANDLE_TH_ERRORS                                     \
    at::Tensor x = THPVariable_Unpack(object);           \
    __VA_ARGS__;                                         \
    END_HANDLE_TH_ERRORS                                 \
  }
ENTRY(twice, return THPVariable_Wrap(x.add(x)))
ENTRY(bump, x.add_(1); Py_RETURN_NONE)
ENTRY(first, return PyFloat_FromDouble(x.data_ptr<float>()[0]))
ENTRY(peek, return PyFloat_FromDouble(x.const_data_ptr<float>()[0]))
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {"bump", bump, METH_O, ""},
  {"first", first, METH_O, ""}, {"peek", peek, METH_O, ""}, {nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "autofuse_extension", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_autofuse_extension() { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """A C++ extension that takes tensors without asking torch's Python side (20 s to compile)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: there is no g++ here")
    from importlib.util import module_from_spec, spec_from_file_location

    from torch.utils.cpp_extension import include_paths, library_paths

    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension.cpp").write_text(_EXTENSION)
    path = folder / "autofuse_extension.so"
    standard = "c++20" if torch.__version__ >= "2.12" else "c++17"
    includes = [f"-I{place}" for place in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{place}" for place in library_paths()]
    subprocess.run(
        [compiler, "-O0", f"-std={standard}", "-w", "-shared", "-fPIC", folder / "extension.cpp",
         "-o", path, *includes, *libraries, "-ltorch_python", "-ltorch_cpu", "-lc10"],
        check=True, timeout=300,
    )  # fmt: skip
    spec = spec_from_file_location("autofuse_extension", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExtension:
    def test_ops_get_values(self, extension):
        x = torch.randn(3)
        for argument in (W(x), W(x) * 1):
            assert_same(extension.twice(argument), x + x, None)
        pending = W(x) * 2
        extension.bump(pending)
        assert_same(pending, x * 2 + 1, None)

    def test_a_write_to_what_a_pending_op_reads_is_an_error(self, extension):
        memory = torch.ones(3)
        y = W(memory) * 2
        extension.bump(memory)
        with pytest.raises(autofuse.StaleInputError, match="version 0 -> 1"):
            y.tolist()

    def test_no_gradient_is_lost_but_with_an_error(self, extension, monkeypatch):
        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        x = W(torch.ones(3, requires_grad=True))
        for argument in (x * 2, autofuse.materialize(x * 2)):
            (gradient,) = torch.autograd.grad(extension.twice(argument).sum(), x)
            assert gradient.tolist() == [4.0] * 3
        with pytest.raises(RuntimeError, match="autofuse.materialize"):
            extension.bump(x * 2)

    def test_memory_is_there_or_it_is_an_error(self, extension):
        for read in (extension.first, extension.peek):
            assert read(W(torch.ones(3))) == 1.0
            pending = W(torch.ones(3)) * 2
            with pytest.raises(RuntimeError, match="not allocated yet"):
                read(pending)
            assert read(autofuse.materialize(pending)) == 2.0


AFTER_A_FAILURE = """
import torch, autofuse

def broken(t):
    torch._dynamo.graph_break()
    return t

try:
    torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(3))
except torch._dynamo.exc.Unsupported:
    w, held = autofuse.wrap(torch.ones(4, 4)), torch.ones(4, 4)
    autofuse.materialize(w * 1.0)
    for native in (True, False):
        autofuse.config.native = native
        assert all(type(torch.mm(w, w)) is autofuse.Tensor for _ in range(4))
        assert torch.add(w, w, out=held) is held and type(held) is torch.Tensor
    print("done")
"""


def test_results_are_wrapped_after_a_compilation_that_has_failed():
    """It leaves torch's hook for frames, by which calls hold what they are given once more."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_FAILURE], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("graded", [False, True])
def test_a_variable_of_a_wrapped_tensor_is_one(graded):
    """What code older than torch 0.4 makes of tensors; what comes after it fuses."""
    x = torch.ones(3)
    for source in (W(x), W(x) * 1.0):
        v = torch.autograd.Variable(source, requires_grad=graded)
        assert type(v) is autofuse.Tensor and isinstance(v, torch.autograd.Variable)
        assert v.requires_grad is graded and v.data_ptr() == source.data_ptr()
        y = v * 2.0 + 1.0
        assert autofuse.is_pending(y) and y.tolist() == [3.0] * 3
    v = torch.autograd.Variable(data=W(x))
    assert autofuse.is_pending(v * 2.0)
    assert type(torch.autograd.Variable(x, requires_grad=graded)) is torch.Tensor


SPARSE = {
    "coo": lambda v: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), v, (3,)),
    "coo of lists": lambda v: torch.sparse_coo_tensor([[0, 2]], values=v),
    "csr": lambda v: torch.sparse_csr_tensor([0, 1, 2], [0, 1], v, (2, 2)),
    "csc": lambda v: torch.sparse_csc_tensor([0, 1, 2], [0, 1], v, (2, 2)),
    "bsr": lambda v: torch.sparse_bsr_tensor([0, 1], [0], v.view(1, 1, 2) * 1.0, (1, 2)),
    "bsc": lambda v: torch.sparse_bsc_tensor([0, 1], [0], v.view(1, 2, 1) * 1.0, (2, 1)),
    "any": lambda v: torch.sparse_compressed_tensor(
        [0, 1, 2], [0, 1], v, (2, 2), layout=torch.sparse_csr
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_of_pending_values(name, graded, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, theirs = (torch.tensor([1.0, 3.0]).requires_grad_(graded) for _ in range(2))
    got, want = SPARSE[name](W(x) * 2.0), SPARSE[name](theirs * 2.0)
    assert got.layout is want.layout and got.requires_grad is graded
    assert torch.equal(got.to_dense(), want.to_dense())
    if graded and name in ("coo", "coo of lists", "csr"):
        got.to_dense().sum().backward()
        want.to_dense().sum().backward()
        assert torch.equal(x.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:torch.asarray")  # what is left out means other things by now
@pytest.mark.parametrize("graded", [None, False, True])
def test_arrays_of_wrapped_tensors(graded, monkeypatch):
    """`asarray` gives the tensor back, and may have changed whether it requires grad."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)

    def seen(w, y, leaf):
        y = w(y) if leaf else w(y) * 2.0
        z = torch.asarray(y) if graded is None else torch.asarray(y, requires_grad=graded)
        after = z * 2.0, y * 2.0
        return [(t.requires_grad, t.is_leaf, t.tolist()) for t in (y, z, *after)], z is y

    for needed in (False, True):
        for leaf in (False, True):
            x = torch.ones(3, requires_grad=needed)
            for _ in range(3):
                want = seen(lambda t: t, x.detach().clone().requires_grad_(needed), leaf)
                assert seen(W, x.detach().clone().requires_grad_(needed), leaf) == want


# --- data ---------------------------------------------------------------------------------------


class Samples(Dataset):
    """Makes its samples with a recorded op, in the process that asks for them."""

    def __init__(self):
        self.base = torch.arange(8.0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return W(self.base)[index] * 2 + 1


class TestData:
    want = torch.arange(8.0) * 2 + 1

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_workers(self, context):
        W(torch.ones(3)).mul(2).tolist()  # used before the fork
        loader = DataLoader(Samples(), batch_size=4, num_workers=1, multiprocessing_context=context)
        assert_same(torch.cat(list(loader)), self.want, None)

    def test_samples_that_are_not_collated(self):
        loader = DataLoader(Samples(), batch_size=None, num_workers=1)
        got = list(loader)
        assert [type(sample) for sample in got] == [torch.Tensor] * 8
        assert_same(torch.stack(got), self.want, None)

    def test_collate(self):
        x = torch.randn(2, 3)
        got = default_collate([{"x": row * 2, "k": (row[0], 1)} for row in W(x)])
        assert_same(got["x"], x * 2, None)
        assert_same(got["k"][0], x[:, 0].clone(), None)
        (batch,) = DataLoader(TensorDataset(W(x) * 2), batch_size=2)
        assert_same(batch[0], x * 2, None)

    @pytest.mark.cuda
    @needs_cuda
    def test_pinned_batches(self):
        for (batch,) in DataLoader(TensorDataset(W(self.want) * 1), 4, pin_memory=True):
            assert batch.is_pinned()
            got = autofuse.fuse(curve)(batch.to("cuda", non_blocking=True))
            assert_same(got.cpu(), curve(batch), 1e-6)

    def test_shared_memory(self):
        y = W(torch.ones(3)) * 2
        y.share_memory_()
        assert y.is_shared() and y.tolist() == [2.0] * 3


# --- copies and files --------------------------------------------------------------------------


class TestCopies:
    def test_state_dict_through_a_file(self):
        model, fused = pair()
        fused.register_buffer("scale", W(torch.ones(4)) * 2)
        file = io.BytesIO()
        torch.save(fused.state_dict(), file)
        file.seek(0)
        state = torch.load(file)  # weights only: nothing of autofuse is in it
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert state.pop("scale").tolist() == [2.0] * 4
        model.load_state_dict({name: W(value) * 3 for name, value in state.items()})
        for name, value in model.state_dict().items():
            assert_same(value, state[name] * 3, None)

    def test_assigned_state(self):
        model = net()
        state = {name: W(value) * 3 for name, value in model.state_dict().items()}
        want = {name: value * 3 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        for name, value in model.named_parameters():
            assert type(value) is nn.Parameter
            assert_same(value.detach(), want[name], None)

    def test_whole_models(self):
        model, fused = pair()
        file = io.BytesIO()
        torch.save(fused, file)
        file.seek(0)
        x = torch.randn(2, 4)
        for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(fused))):
            assert type(loaded) is type(fused)
            assert_same(loaded(x), model(x), 1e-6)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
    def test_containers_keep_what_is_one(self, copied):
        x = torch.randn(3)
        y = W(x) * 2
        got = copied({"a": y, "b": [y, W(x) + 1]})
        assert got["a"] is got["b"][0] and got["a"] is not y
        assert_same(got["a"], x * 2, None)
        assert_same(got["b"][1], x + 1, None)

    def test_averaged_models_and_functional_calls(self):
        model, fused = pair()
        x = torch.randn(2, 4)
        averages = [torch.optim.swa_utils.AveragedModel(m) for m in (model, fused)]
        for m, average in zip((model, fused), averages, strict=True):
            with torch.no_grad():
                m[0].weight.mul_(2)
            average.update_parameters(m)
        assert_same(averages[1](x), averages[0](x), 1e-6)
        doubled = {name: W(p.detach()) * 2 for name, p in fused.named_parameters()}
        plain = {name: p.detach() * 2 for name, p in model.named_parameters()}
        got = torch.func.functional_call(fused, doubled, (x,))
        assert_same(got, torch.func.functional_call(model, plain, (x,)), 1e-6)


# --- modules -------------------------------------------------------------------------------------


def test_hooks_of_modules():
    seen = ([], [])
    models, inputs = pair(), [torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_() for _ in "ab"]
    for model, x, log in zip(models, inputs, seen, strict=True):
        model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda m, args, out: out * 2 + 1)
        model[1].register_forward_hook(lambda m, args, out, log=log: log.append(out.sum().item()))
        model.register_forward_hook(lambda m, args, out: out * 3)
        model[2].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
        model[1].register_full_backward_hook(
            lambda m, grads, outs, log=log: log.append(outs[0].sum().item()) or (grads[0] * 0.5,)
        )
        model.register_full_backward_hook(
            lambda m, grads, outs, log=log: log.append(outs[0].sum().item())
        )
        model(x).sum().backward()
    assert len(seen[0]) == 3
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5)
    assert_same_gradients(models[1], models[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T * torch.tanh(x)


PARAMETRIZED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "own": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Symmetric()),
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_nn_utils(kind, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    models = []
    for make in (lambda m: m, autofuse.fuse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        PARAMETRIZED[kind](model[0])
        model = make(model)
        for _ in range(2):
            autofuse.fuse(lambda t: (t * 2 + 1) * t)(model(torch.eye(4))).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        models.append((model, norm))
    torch.testing.assert_close(models[1][1], models[0][1])
    assert_same_gradients(models[1][0], models[0][0])
    assert autofuse.stats().kernels_launched > 0


def test_clipping_of_gradients_that_are_pending():
    x = torch.linspace(-2, 2, 8)
    p = nn.Parameter(torch.zeros(8))
    p.grad = W(x) * 2
    norm = nn.utils.clip_grad_norm_([p], 1.0)
    torch.testing.assert_close(norm, (x * 2).norm())
    torch.testing.assert_close(p.grad.norm().item(), 1.0)


def test_parameters_as_one_vector():
    model = net()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(W(vector) * 2, model.parameters())
    assert_same(nn.utils.parameters_to_vector(model.parameters()).detach(), vector * 2, None)


# --- other arrays ------------------------------------------------------------------------------


def test_numpy():
    x = torch.randn(4)
    for array in (np.asarray(W(x) * 2), (W(x) * 2).numpy(), np.from_dlpack(W(x) * 2)):
        assert np.array_equal(array, (x * 2).numpy())
    np.testing.assert_allclose(W(x) * 2, x * 2)
    memory = np.arange(4.0)
    w = W(torch.from_numpy(memory))
    w.mul_(W(torch.ones(4, dtype=torch.float64)) * 2)
    assert memory.tolist() == [0.0, 2.0, 4.0, 6.0]


@device_param
def test_dlpack_capsules(device):
    x = torch.randn(4, device=device)
    for export in (torch.utils.dlpack.to_dlpack, torch.to_dlpack):
        for tensor in (W(x * 2), W(x) * 2):
            assert_same(torch.utils.dlpack.from_dlpack(export(tensor)), x * 2, None)
    w = W(x)
    y = w * 2
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(w)).zero_()
    assert_same(y, y.new_tensor(y.tolist()), None)
    assert bool((y != 0).all()) and not bool(x.any())


def test_no_table_of_c_functions_reads_a_pending_tensor():
    """By it other libraries take a tensor's memory without asking; without it they ask."""
    assert hasattr(torch.Tensor, "__dlpack__")
    for owner in (autofuse.Tensor, W(torch.ones(3)) * 2):
        assert not hasattr(owner, "__dlpack_c_exchange_api__")


@pytest.mark.cuda
@needs_cuda
def test_cuda_array_interface():
    x = torch.arange(8.0, device="cuda")
    y = W(x) * 2 + 1
    interface = y.__cuda_array_interface__
    assert interface["shape"] == (8,) and interface["data"][0] == y.data_ptr() != 0
    assert_same(torch.as_tensor(Exporting(W(x) * 2 + 1), device="cuda"), x * 2 + 1, None)


class Exporting:
    """What hands its memory on as CuPy arrays do, and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@pytest.mark.cuda
@needs_cuda
def test_cupy():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    x = torch.arange(8.0, device="cuda")
    for array in (cupy.asarray(W(x) * 2), cupy.from_dlpack(W(x) * 2)):
        assert array.tolist() == (x * 2).tolist()
    got = W(torch.as_tensor(cupy.arange(4, dtype="float32"), device="cuda")) * 2
    assert got.tolist() == [0.0, 2.0, 4.0, 6.0]


# --- asking and showing --------------------------------------------------------------------------


def test_comparisons_of_torch():
    x = torch.randn(4)
    for a, b in ((W(x) * 2, x * 2), (x * 2, W(x) * 2), (W(x) * 2, W(x) * 2)):
        assert torch.equal(a, b) and torch.allclose(a, b) and a.equal(b) and a.allclose(b)
        torch.testing.assert_close(a, b)
        assert not torch.equal(a, b + 1) and not torch.allclose(a, b + 1)
    with pytest.raises(AssertionError) as ours:
        torch.testing.assert_close(W(x) * 2, x * 3)
    with pytest.raises(AssertionError) as theirs:
        torch.testing.assert_close(x * 2, x * 3)
    assert str(ours.value) == str(theirs.value)


@device_param
def test_default_device(device):
    x = torch.randn(4, device=device)

    def f(x):
        return x * torch.full((4,), 2.0) + torch.ones(4)

    torch.set_default_device(device)
    try:
        y = f(W(x))
        assert autofuse.is_pending(y)
        assert_same(y, f(x), None)
        assert_same(autofuse.fuse(f)(x), f(x), None)
    finally:
        torch.set_default_device(None)
    with torch.device(device):
        y = f(W(x))
        assert autofuse.is_pending(y)


@device_param
def test_a_notebook_shows_the_value(device):
    pretty = pytest.importorskip("IPython.lib.pretty", reason="needs IPython").pretty
    from IPython.core.formatters import DisplayFormatter

    x = torch.randn(4, device=device)
    assert pretty({"a": [W(x) * 2]}) == pretty({"a": [x * 2]})
    shown, _ = DisplayFormatter().format(W(x) * 2)
    assert shown == {"text/plain": repr(x * 2)}


# --- profilers -----------------------------------------------------------------------------------


@device_param
class TestProfiler:
    def names(self, f, activities):
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            f()
        return [event.name for event in profile.events()]

    def test_every_flush_is_a_range(self, device):
        x = W(torch.randn(64, device=device))
        cpu = [torch.profiler.ProfilerActivity.CPU]

        def f():
            autofuse.materialize(torch.sigmoid(x * 2) + 1)

        f()  # a chain known before the profiler is, and one that is not
        for k in range(2):
            names = self.names(lambda: (f(), f(), autofuse.materialize(x * 2 - 3)), cpu)
            assert names.count("autofuse: af_mul_sigmoid_add") == 2, k
            assert names.count("autofuse: af_mul_sub") == 1
        short = W(torch.randn(4, device=device, requires_grad=True))
        names = self.names(lambda: autofuse.materialize(short * 2), cpu)
        assert "autofuse, eager: mul" in names

    def test_nothing_is_left_behind(self, device):
        x = W(torch.randn(64, device=device))
        autofuse.materialize(torch.sigmoid(x * 2) + 1)
        runners = [
            runner
            for recorder in autofuse.chain.state.all_recorders
            for runner in recorder.runners
            if runner.recorded
        ]
        before = [runner.run for runner in runners]
        self.names(
            lambda: autofuse.materialize(torch.sigmoid(x * 2) + 1, x - 7),
            [torch.profiler.ProfilerActivity.CPU],
        )
        assert [runner.run for runner in runners] == before
        recorders = autofuse.chain.state.all_recorders
        assert all(r.bare is None for recorder in recorders for r in recorder.runners)

    def test_a_step_that_was_trained_before(self, device):
        """The kernels of autograd belong to no flush."""
        x = torch.randn(64, 64, device=device, requires_grad=True)

        def step():
            self.chain(W(x)).sum().backward()

        for _ in range(3):
            step()
        x.grad = None
        names = self.names(step, [torch.profiler.ProfilerActivity.CPU])
        assert any(name.startswith("autofuse: af_mul_tanh") for name in names), names
        want = torch.autograd.grad(self.chain(x).sum(), x)[0]
        torch.testing.assert_close(x.grad, want)

    def chain(self, x):
        y = x * 2
        for _ in range(4):
            y = torch.tanh(y) * 0.5
        return y

    @pytest.mark.cuda
    @needs_cuda
    def test_kernels_have_readable_names(self, device):
        if device == "cpu":
            pytest.skip("no kernels of the CPU are traced")
        x = W(torch.randn(1 << 16, device=device))
        autofuse.materialize(torch.sigmoid(x * 2) + 1)

        def f():
            autofuse.materialize(torch.sigmoid(x * 2) + 1)
            torch.cuda.synchronize()

        names = self.names(f, list(torch.profiler.supported_activities()))
        assert any(name.startswith("af_mul_sigmoid_add") for name in names), names


class Nvtx:
    """Stands for torch._C._nvtx; keeps what is open and what was said."""

    def __init__(self):
        self.said, self.open = [], []

    def rangePushA(self, message):  # noqa: N802 - torch's name
        self.open.append(message)
        return len(self.open) - 1

    def rangePop(self):  # noqa: N802 - torch's name
        self.said.append((len(self.open) - 1, self.open.pop()))
        return len(self.open)


@device_param
class TestNvtx:
    @pytest.fixture
    def nvtx(self, monkeypatch):
        stub = Nvtx()
        monkeypatch.setattr(torch._C, "_nvtx", stub, raising=False)
        monkeypatch.setattr(torch.cuda.nvtx, "_nvtx", stub)
        yield stub
        autofuse.config.nvtx = False
        assert not stub.open and not autofuse.record.ranges.open_ranges

    def test_every_flush_is_a_range(self, device, nvtx):
        x = W(torch.randn(64, device=device))
        autofuse.materialize(torch.sigmoid(x * 2) + 1)
        assert not nvtx.said
        autofuse.config.nvtx = True
        autofuse.materialize(torch.sigmoid(x * 2) + 1)
        autofuse.materialize(x * 2 - 3)  # not known before
        short = W(torch.randn(4, device=device, requires_grad=True))
        autofuse.materialize(short * 2)
        want = ["autofuse: af_mul_sigmoid_add", "autofuse: af_mul_sub", "autofuse, eager: mul"]
        assert nvtx.said == [(0, name) for name in want]
        autofuse.config.nvtx = False
        autofuse.materialize(torch.sigmoid(x * 2) + 1)
        assert len(nvtx.said) == 3
        recorders = autofuse.chain.state.all_recorders
        assert all(r.bare is None for recorder in recorders for r in recorder.runners)

    def test_beside_a_profiler(self, device, nvtx):
        x = W(torch.randn(64, device=device))
        autofuse.config.nvtx = True
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            autofuse.materialize(x * 2 - 3)
        autofuse.materialize(x * 2 - 3)
        name = "autofuse: af_mul_sub"
        assert [event.name for event in profile.events()].count(name) == 1
        assert [text for _, text in nvtx.said] == [name] * 2

    def test_an_error_ends_the_range(self, device, nvtx):
        autofuse.config.nvtx = True
        plain = torch.randn(4, device=device)
        y = W(plain) * 2
        write_unseen(plain)
        with pytest.raises(autofuse.StaleInputError):
            y.tolist()
        assert [text for _, text in nvtx.said] == ["autofuse: af_mul"]

    def test_a_build_without_it_is_said(self, device, monkeypatch, capsys):
        monkeypatch.delattr(torch._C, "_nvtx", raising=False)
        monkeypatch.setattr(autofuse.errors, "_said", set())
        autofuse.config.nvtx = True
        try:
            said = capsys.readouterr().err
            autofuse.materialize(W(torch.randn(4, device=device)) * 2)
        finally:
            autofuse.config.nvtx = False
        assert f"config.nvtx has no effect: torch {torch.__version__} is built without CUDA" in said
        assert "torch.profiler shows the same ranges" in said


# --- patches of torch's functions ----------------------------------------------------------------


class Scaled:
    """Callable, and unhashable, as a dataclass is."""

    __hash__ = None  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs) * 3


def scaled(function, *args, **kwargs):
    return function(*args, **kwargs) * 3


def named(function):
    return functools.wraps(function)(functools.partial(scaled, function))


def wrapping(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs) * 3

    return call


PATCHES = {
    "function": lambda function: lambda *args, **kwargs: scaled(function, *args, **kwargs),
    "functools.wraps": wrapping,
    "torch.no_grad": lambda function: torch.no_grad()(wrapping(function)),
    "functools.partial": lambda function: functools.partial(scaled, function),
    "named partial": named,
    "object": Scaled,
}
PATCHED = {
    "softmax": (F, lambda x: nn.Softmax(-1)(x)),
    "silu": (F, lambda x: nn.SiLU()(x)),
    "relu": (F, lambda x: F.relu(x, inplace=False)),
    "normalize": (F, lambda x: F.normalize(x, dim=0)),
    "layer_norm": (F, lambda x: nn.LayerNorm(6, elementwise_affine=False)(x)),
    "max_pool1d": (F, lambda x: F.max_pool1d(x, 2)),  # which one made for a flag calls
    "einsum": (torch.functional, lambda x: torch.functional.einsum("ij,kj->ik", x, x)),
    "norm": (torch.functional, lambda x: torch.functional.norm(x, dim=1)),
    "unique": (torch.functional, lambda x: torch.functional.unique(x)),
}  # fmt: skip


@device_param
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("name", PATCHED)
def test_a_patch_of_a_function_of_torchs_is_called_once(name, patch, on, device, monkeypatch):
    """Torch's function names itself by a global, the patch, for whoever overrides it."""
    owner, call = PATCHED[name]
    x = torch.randn(4, 6, device=device)

    def compare():
        want = call(x)
        for _ in range(2):
            assert_same(call(W(x)), want, 1e-6)
            assert_same(call(W(x) * 1), want, 1e-6)
            assert_same(autofuse.fuse(call)(x), want, 1e-6)
        return want

    before = compare()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, PATCHES[patch](getattr(owner, name)))
        assert_same(compare(), before * 3, 1e-6)
    assert_same(compare(), before, 1e-6)


@device_param
@pytest.mark.parametrize("other", [torch.tanh, F.gelu])
def test_a_function_of_torchs_behind_one_in_c(other, on, device, monkeypatch):
    x, relu = torch.randn(4, 6, device=device), F.relu
    monkeypatch.setattr(F, "relu", other)
    for _ in range(2):
        assert_same(F.relu(W(x)), other(x), 1e-6)
        assert_same(relu(W(x)), relu(x), 1e-6)


# --- processes -----------------------------------------------------------------------------------


def _send(queue, x):
    y = W(x) * 2 + 1
    queue.put(autofuse.is_pending(y))
    queue.put(y.tolist())


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_wrapped_tensors_go_to_other_processes(start):
    context = torch.multiprocessing.get_context(start)
    queue = context.Queue()
    y = W(torch.ones(3)) + 1
    process = context.Process(target=_send, args=(queue, y))
    process.start()
    assert queue.get(timeout=60) is True
    assert queue.get(timeout=60) == [5.0] * 3
    process.join()
    assert process.exitcode == 0 and y.tolist() == [2.0] * 3


def test_python_without_torch_compile_stays_light():
    """Neither torch._dynamo nor torch.profiler's machinery is imported for their sake."""
    code = "import torch, sys; before = set(sys.modules); import autofuse; " \
           "print('torch._dynamo' in set(sys.modules) - before)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
