"""Ops that autofuse does not record, and metadata: what they give, raise and leave is eager's."""

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import operator
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autofuse
from autofuse.chain.state import this_thread
from autofuse.dispatch.protocol import HANDLERS, HOT
from autofuse.hot import native
from autofuse.record.flush import flush_all
from support import DEVICES, NATIVE, assert_same, elsewhere, functions_called


def set_item(x, i, value):
    x[i] = value


def set_real(x):
    x.real = 2.0


def delete_item(x):
    del x[0]


def drawn(draw):
    """What `draw` gives after a fixed seed."""
    torch.manual_seed(5)
    return draw()


# of x [4, 6] float, i [2] long, m [4] bool
PROGRAMS = {
    "x[1]": lambda x, i, m: x[1],
    "x[-1, 2:]": lambda x, i, m: x[-1, 2:],
    "x[None, ..., 0]": lambda x, i, m: x[None, ..., 0],
    "x[:, None]": lambda x, i, m: x[:, None],
    "x[i]": lambda x, i, m: x[i],
    "x[m]": lambda x, i, m: x[m],
    "x[i, 1:3]": lambda x, i, m: x[i, 1:3],
    "x[[0, 2]]": lambda x, i, m: x[[0, 2]],
    "x[True]": lambda x, i, m: x[True],
    "x[9]": lambda x, i, m: x[9],
    "x['a']": lambda x, i, m: x["a"],
    "x[1] = 0.5": lambda x, i, m: set_item(x, 1, 0.5),
    "x[:, 3] = row": lambda x, i, m: set_item(x, (slice(None), 3), x[:, 0]),
    "x[0] = pending": lambda x, i, m: set_item(x, 0, x[1] * 2.0 + 1.0),
    "x[i] = pending": lambda x, i, m: set_item(x, i, x[1] * 2.0 + 1.0),
    "x[m] = 0": lambda x, i, m: set_item(x, m, 0),
    "x[..., None] = 1": lambda x, i, m: set_item(x, (..., None), 1),
    "x[[0, 1], :2] = 2": lambda x, i, m: set_item(x, ([0, 1], slice(2)), 2),
    "x[0] = plain": lambda x, i, m: set_item(x, 0, torch.ones(6)),
    "x[0] = wrong": lambda x, i, m: set_item(x, 0, torch.ones(7)),
    "x[9] = 1": lambda x, i, m: set_item(x, 9, 1),
    "x[0] = 'a'": lambda x, i, m: set_item(x, 0, "a"),
    "x[0] = parameter": lambda x, i, m: set_item(x, 0, torch.nn.Parameter(torch.ones(6))),
    "what read it": lambda x, i, m: (y := x * 2.0, set_item(x, 0, 7.0), y),
    "what reads it": lambda x, i, m: (x * 2.0, set_item(x, 0, 7.0), x * 2.0),
    "del x[0]": lambda x, i, m: delete_item(x),
    "x.T": lambda x, i, m: (x.T, x.mT, x.H, x.mH),
    "x[None].mT": lambda x, i, m: x[None].mT,
    "x.real": lambda x, i, m: x.real,
    "x.imag": lambda x, i, m: x.imag,
    "x.real = 2": lambda x, i, m: set_real(x),
    "view": lambda x, i, m: (x.view(-1), x.view(2, 12), x.view_as(x)),
    "view(5)": lambda x, i, m: x.view(5),
    "chunk": lambda x, i, m: x.chunk(4, 1),
    "chunk(0)": lambda x, i, m: x.chunk(0),
    "split": lambda x, i, m: (*x.split(3, 1), *x.split([1, 3]), *torch.split(x, 2)),
    "split(-1)": lambda x, i, m: x.split(-1),
    "unbind": lambda x, i, m: (*x.unbind(), *torch.unbind(x, 1), *x),
    "tensor_split": lambda x, i, m: x.tensor_split((1, 3), 1),
    "empty chunk": lambda x, i, m: x[:0].chunk(2),
    "a, b = chunk": lambda x, i, m: [y * 2.0 + 1.0 for y in x.chunk(2, 1)],
    "cat": lambda x, i, m: (torch.cat([x, x]), torch.cat((x, x), 1), torch.hstack([x, x])),
    "cat wrong": lambda x, i, m: torch.cat([x, x[0]]),
    "stack": lambda x, i, m: torch.stack([x, x], dim=1),
    "numbers": lambda x, i, m: (bool(x[0, 0]), float(x[0, 1]), int(x[0, 2]), x[0, 3].item()),
    "index": lambda x, i, m: ([0, 1, 2][i[0]], x.tolist(), x[0].tolist()),
    "bool of many": lambda x, i, m: bool(x),
    "index of a float": lambda x, i, m: [0, 1][x[0, 0]],
    "layer_norm": lambda x, i, m: (F.layer_norm(x, (6,)), F.layer_norm(x, (6,), x[0], x[1])),
    "layer_norm wrong": lambda x, i, m: F.layer_norm(x, (5,)),
    "group_norm": lambda x, i, m: F.group_norm(x, 3),
    "batch_norm": lambda x, i, m: F.batch_norm(x, x[0], x[1].abs()),
    "softmax": lambda x, i, m: (F.softmax(x, -1), F.log_softmax(x, 0, dtype=torch.float64)),
    "softmax wrong": lambda x, i, m: F.softmax(x, 5),
    "cross_entropy": lambda x, i, m: (F.cross_entropy(x[:2], i),
                                      F.cross_entropy(x[:2], i, reduction="sum")),
    "cross_entropy wrong": lambda x, i, m: F.cross_entropy(x, i),
    "nll_loss": lambda x, i, m: F.nll_loss(x[:2], i, reduction="none"),
    "dropout": lambda x, i, m: (F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, False)),
    "dropout in place": lambda x, i, m: F.dropout(x, 1.0, True, True) is x,
    "dropout of C": lambda x, i, m: (torch.dropout(x, 0.5, False), torch.dropout(x, 0.0, True)),
    "dropout of C wrong": lambda x, i, m: torch.dropout(x, 0.0, 1),
    "dropout of C alone": lambda x, i, m: torch.alpha_dropout(x, 0),
    "dropout wrong": lambda x, i, m: F.dropout(x, 2.0),
    "dropout of no kind": lambda x, i, m: F.dropout(x, 0.5, None),
    "dropout by a number": lambda x, i, m: F.dropout(x, 0.5, 0),
    "dropout by a tensor": lambda x, i, m: F.dropout(x, 0.5, torch.tensor(False)),
    "dropout by text": lambda x, i, m: F.alpha_dropout(x, 0, "no"),
    "dropout of a tensor": lambda x, i, m: F.dropout(x, torch.tensor(0.0), False),
    "embedding": lambda x, i, m: F.embedding(i, x),
    "plain @ x": lambda x, i, m: (torch.ones(3, 4) @ x, torch.ones(4) @ x, torch.ones(2, 3, 4) @ x),
    "parameter @ x": lambda x, i, m: torch.nn.Parameter(torch.ones(3, 4)) @ x,
    "plain @ x wrong": lambda x, i, m: torch.ones(3, 5) @ x,
    "plain @ integers": lambda x, i, m: torch.ones(3, 2) @ i,
    "[1.0] @ x": lambda x, i, m: [1.0] @ x,
    "x.__rmatmul__(plain)": lambda x, i, m: x.__rmatmul__(torch.ones(3, 4)),
    "x.__rmatmul__(2)": lambda x, i, m: x.__rmatmul__(2),
    "einsum": lambda x, i, m: (torch.einsum("ij,kj->ik", x, x), torch.einsum("ij->j", [x]),
                               torch.einsum("ij,ij,ik->jk", x, x, x)),
    "einsum wrong": lambda x, i, m: torch.einsum("ij,jk", x, x),
    "pad": lambda x, i, m: (F.pad(x, (1, 1)), F.pad(x, (1, 0), value=2.0)),
    "interpolate": lambda x, i, m: F.interpolate(x[None], scale_factor=2.0),
    "norm": lambda x, i, m: (x.norm(), torch.norm(x, dim=1), x.norm(p=1, dim=0, keepdim=True)),
    "gather": lambda x, i, m: torch.gather(x, 1, x.argmax(1, keepdim=True)),
    "linear": lambda x, i, m: F.linear(x, x, x[:, 0]),
    "sums": lambda x, i, m: (x.sum(), x.mean(-1, keepdim=True), torch.sum(x, dim=0), x.max(1)),
    "out=None": lambda x, i, m: torch.sum(x, dim=0, out=None),
    "out=": lambda x, i, m: torch.sum(x, dim=0, out=torch.empty(6)),
    "likes": lambda x, i, m: (torch.zeros_like(x), torch.full_like(x, 2.0), torch.ones_like(i)),
    "grad_fn": lambda x, i, m: (x.grad_fn is None, x.sum().grad_fn is None),
    "contiguous": lambda x, i, m: (x.contiguous() is x, x.t().contiguous()),
    # functions in Python
    "pooling": lambda x, i, m: (F.adaptive_avg_pool2d(x[None], 2), F.max_pool2d(x[None], 2),
                                F.max_pool2d(x[None], 2, return_indices=True),
                                F.max_pool1d(x, 2), F.adaptive_max_pool2d(x[None], (2, 3))),
    "pooling wrong": lambda x, i, m: F.adaptive_avg_pool2d(x, (1, 2, 3)),
    "normalize": lambda x, i, m: (F.normalize(x), F.normalize(x, dim=0, eps=1.0)),
    "normalize wrong": lambda x, i, m: F.normalize(x, dim=7),
    "rms_norm": lambda x, i, m: (F.rms_norm(x, (6,)), F.rms_norm(x, (6,), x[0], eps=1e-3)),
    "instance_norm": lambda x, i, m: F.instance_norm(x[None]),
    "tensordot": lambda x, i, m: (torch.tensordot(x, x, ([0, 1], [0, 1])),
                                  torch.tensordot(x, x.t(), 1)),
    "cdist": lambda x, i, m: torch.cdist(x, x[:2], p=1.0),
    "meshgrid": lambda x, i, m: torch.meshgrid(x[0], x[1], indexing="ij"),
    "block_diag": lambda x, i, m: torch.block_diag(x, *[x[0]] * 20),
    "atleast": lambda x, i, m: (torch.atleast_2d(x[0], [x]), torch.atleast_1d(x) is x),
    "unique": lambda x, i, m: (x.round().unique(), *torch.unique(i, return_inverse=True)),
    "unfold": lambda x, i, m: F.unfold(x[None, None], 2),
    "grid_sample": lambda x, i, m: F.grid_sample(x[None, None], x[None, :, :2, None].expand(
        1, 4, 2, 2), align_corners=False),
    "losses": lambda x, i, m: (F.smooth_l1_loss(x, x.detach()), F.huber_loss(x, x[0].expand(4, 6)),
                               F.binary_cross_entropy_with_logits(x, x.sigmoid())),
    "is_shared": lambda x, i, m: x.is_shared(),
    # in place
    "fill_": lambda x, i, m: (x.fill_(2.0) is x, x.zero_() is x, torch.fill_(x, 3) is x),
    "fill_ by a tensor": lambda x, i, m: x.fill_(x[0, 0]),
    "copy_": lambda x, i, m: (x.copy_(x.detach() + 1.0) is x, x.copy_(i[0]), x.copy_(m[:, None])),
    "copy_ wrong": lambda x, i, m: x.copy_(x[:, :5]),
    "copy_ of a parameter": lambda x, i, m: x.copy_(torch.nn.Parameter(torch.ones(6))),
    "what read it, copy_": lambda x, i, m: (y := x * 2.0, x.copy_(torch.ones(6)), y, x * 2.0),
    "what read it, zero_": lambda x, i, m: (y := x * 2.0, x.zero_(), y, x * 2.0),
    "zero_ of a view": lambda x, i, m: (y := x * 2.0, x[1].zero_(), y, x * 2.0),
    "index_add_": lambda x, i, m: (x.index_add_(0, i, torch.ones(2, 6), alpha=2),
                                   x.index_copy_(0, i, torch.ones(2, 6)), x.index_fill_(1, i, 3.0)),
    "index_add_ wrong": lambda x, i, m: x.index_add_(0, i, torch.ones(3, 6)),
    "scatter_": lambda x, i, m: (x.scatter_(0, i[:, None], 2.0),
                                 x.scatter_add_(0, i[:, None], torch.ones(2, 1)),
                                 x.scatter_reduce_(0, i[:, None], torch.ones(2, 1), "amax"),
                                 x.index_reduce_(0, i, torch.ones(2, 6), "prod")),
    "put_": lambda x, i, m: (x.put_(i, torch.ones(2)),
                             x.masked_scatter_(m[:, None], torch.ones(24))),
    "products_": lambda x, i, m: (x.addmm_(x.detach(), torch.ones(6, 6), beta=2),
                                  x[0].addmv_(torch.ones(6, 4), torch.ones(4)),
                                  x.addr_(torch.ones(4), torch.ones(6)),
                                  x[None].baddbmm_(torch.ones(1, 4, 2), torch.ones(1, 2, 6)),
                                  x.addbmm_(torch.ones(1, 4, 2), torch.ones(1, 2, 6))),
    "cumsum_": lambda x, i, m: (x.cumsum_(0), x.cumprod_(1), x.tril_(1), x.triu_(-1),
                                x.renorm_(2, 0, 1.0), x.fill_diagonal_(7.0)),
    "drawn_": lambda x, i, m: drawn(lambda: (
        x.uniform_(), x.normal_(1.0, 2.0), x.bernoulli_(0.5), x.exponential_(), x.random_(),
        x.random_(3, to=9), x.cauchy_(), x.log_normal_(), x.geometric_(0.5))),
    "relu in place": lambda x, i, m: (F.relu(x, inplace=True) is x,
                                      F.elu(x, 0.5, inplace=True) is x),
    "all in place": lambda x, i, m: drawn(lambda: [f(x[1:], inplace=True).shape for f in (
        F.relu6, F.celu, F.selu, F.hardswish, F.hardsigmoid, F.silu, F.mish, F.leaky_relu,
        F.rrelu, F.hardtanh, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)]),
    "in place or not": lambda x, i, m: (F.relu(x, inplace=False), F.leaky_relu(x, inplace=None),
                                        F.threshold(x, 0.1, 20.0, inplace=True) is x),
    "in place wrong": lambda x, i, m: F.elu(x, "a", inplace=True),
    "what read it, relu": lambda x, i, m: (y := x * 2.0, F.relu(x, inplace=True), y, x * 2.0),
    "relu, pending": lambda x, i, m: (y := x * 2.0, F.relu(y, inplace=True) is y, y + 1.0),
    "relu of a leaf": lambda x, i, m: F.relu(torch.nn.Parameter(torch.ones(2)), inplace=True),
    "zero_ of integers": lambda x, i, m: (i.zero_(), i.fill_(2.5), m.fill_(2), i.copy_(x[0, :2])),
}  # fmt: skip


def flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def facts(t, kinds):
    """What can be seen of a tensor, or of anything else."""
    if not isinstance(t, torch.Tensor):
        return repr(t)
    kinds.append(type(t) is autofuse.Tensor)
    t = autofuse.unwrap(t)
    node = None if t.grad_fn is None or "autofuse" in str(type(t.grad_fn)) else t.grad_fn.name()
    told = (t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_contiguous(), t.requires_grad,
            t.is_inference(), repr(t.tolist()))  # fmt: skip
    return (*told, None if t.is_inference() else t._version, node is None or node)


@pytest.fixture(autouse=True)
def always_fuse(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


def operands(kind, grad):
    """x, i and m of a program."""
    base = torch.linspace(-1.5, 2.0, 24).view(4, 6)
    if grad:
        base = base.requires_grad_() * 1.0
    x, i, m = base, torch.tensor([2, 0]), torch.tensor([True, False, True, False])
    if kind != "plain":
        x, i, m = (autofuse.wrap(t) for t in (x, i, m))
    if kind != "wrapped":
        x, m = x * 1.0, ~(~m)
        assert kind == "plain" or autofuse.is_pending(x)
    return x, i, m


def outcome(program, kind, grad=False, mode=None):
    """What a program gives or raises and leaves of its arguments, and which results are wrapped."""
    x, i, m = operands(kind, grad)
    kinds = []
    try:
        with mode or contextlib.nullcontext():
            result = program(x, i, m)
    except Exception as error:
        result = (type(error), str(error))
    told = [facts(t, kinds) for t in flat(result)]
    return told, [facts(t, kinds)[:8] for t in (x, i, m)], kinds


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_and_raises_what_eager_does(name, grad, on):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of what is deprecated
        autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)  # a thread that never records...
        want = outcome(PROGRAMS[name], "plain", grad)
        for kind in ("wrapped", "pending", "pending", "wrapped", "wrapped"):
            got = outcome(PROGRAMS[name], kind, grad)
            for a, b in zip(got[0], want[0], strict=True):
                assert a[:8] == b[:8], (name, kind)
            assert got[1] == want[1], (name, kind)


@pytest.mark.skipif(True not in NATIVE, reason="there is one way")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ways_do_the_same(name, grad):
    """Versions, views, nodes and classes too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("wrapped", "pending"):
            ways = []
            for way in (False, True):
                autofuse.config.native = way
                try:
                    outcome(PROGRAMS[name], kind, grad)
                    ways.append(outcome(PROGRAMS[name], kind, grad))
                finally:
                    autofuse.config.native = True
            assert ways[0] == ways[1], (name, kind)


METADATA = {
    "attributes": lambda x: [getattr(x, name) for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda",
        "is_cpu", "is_sparse", "itemsize", "nbytes", "names", "output_nr", "is_quantized")],
    "methods": lambda x: [x.size(), x.size(0), x.size(dim=-1), x.stride(), x.stride(1), x.dim(),
                          x.numel(), x.nelement(), x.ndimension(), x.storage_offset(), len(x),
                          x.is_contiguous(), x.is_contiguous(memory_format=torch.channels_last),
                          x.element_size(), x.is_floating_point(), x.is_complex(), x.is_signed(),
                          x.is_inference(), x.get_device()],
    "functions": lambda x: [torch.numel(x), torch.is_floating_point(x), torch.is_complex(x)],
    "size(9)": lambda x: x.size(9),
    "size('a')": lambda x: x.size("a"),
    "dim(1)": lambda x: x.dim(1),
    "x.shape = 1": lambda x: setattr(x, "shape", 1),
    "x.is_leaf = 1": lambda x: setattr(x, "is_leaf", 1),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_eagers_and_runs_nothing(name, grad, on):
    def told(x):
        try:
            return METADATA[name](x)
        except Exception as error:
            return type(error), str(error)

    base = torch.ones(2, 3, 1, 1, requires_grad=grad)
    want, wrapped = told(base * 1.0), autofuse.wrap(base * 1.0)
    assert told(wrapped) == want
    pending = wrapped * 1.0
    assert told(pending) == want
    if "=" not in name:
        assert autofuse.is_pending(pending)
    leaf = torch.ones(3)
    assert told(autofuse.wrap(leaf)) == told(leaf)


def test_getters_refuse_what_is_no_tensor(on):
    shape = vars(autofuse.Tensor)["shape"].fget
    with pytest.raises(TypeError):
        shape(5)
    with pytest.raises(TypeError):
        shape()
    with pytest.raises(TypeError):
        autofuse.Tensor.size()
    with pytest.raises(TypeError):
        autofuse.Tensor.size(5)


# --- who looks on -----------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs or {})


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


SEEN = ["x[1]", "x[1] = 0.5", "x.T", "chunk", "unbind", "cat", "layer_norm", "softmax", "einsum",
        "cross_entropy", "embedding", "batch_norm", "norm", "numbers", "plain @ x",
        "[1.0] @ x"]  # fmt: skip


@pytest.mark.parametrize("kind", [Functions, Ops])
@pytest.mark.parametrize("name", SEEN)
def test_a_mode_is_told_of_the_ops_of_eager(name, kind, on):
    def told(tensors):
        mode = kind()
        outcome(PROGRAMS[name], tensors, mode=mode)
        return mode.seen

    for _ in range(3):  # then their Metas are known
        assert told("wrapped") == told("pending") == told("plain")


class Declining(Functions):
    """One that has nothing to say."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return NotImplemented


DECLINED = {
    "[1.0] @ x": lambda x: [1.0] @ x,
    "None - x": lambda x: None - x,
    "'a' // x": lambda x: "a" // x,
    "x ** None": lambda x: x**None,
    "x // object": lambda x: x // object(),
    "x + x": lambda x: x + x,
    "torch.sigmoid": lambda x: torch.sigmoid(x),
    "torch.mm": lambda x: torch.mm(x, torch.ones(6, 2)),
    "x.sum": lambda x: x.sum(),
    "x[0]": lambda x: x[0],
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "einsum": lambda x: torch.einsum("ij->j", x),
    "plain @ x": lambda x: torch.ones(3, 4) @ x,
}


@pytest.mark.parametrize("kind", [Functions, Declining])
@pytest.mark.parametrize("name", DECLINED)
def test_who_declines_is_not_asked_for_ever(name, kind, on):
    """torch asks the class of an operand next, which is in no mode's place."""

    def told(tensors):
        mode, x = kind(), operands(tensors, False)[0]
        try:
            with mode:
                DECLINED[name](x)
        except TypeError as error:
            return len(mode.seen), str(error).partition("\n")[0][:60]
        return len(mode.seen), None

    want = told("plain")
    for tensors in ("wrapped", "pending"):
        got = told(tensors)  # an operator tells of itself before
        assert got[0] <= want[0] + 2 and (got[1] is None) == (want[1] is None), (got, want)


def test_a_mode_may_come_back_to_itself(on):
    """With the same operands, and another class beside: nobody has declined."""

    class Other(torch.Tensor):
        pass

    class Back(TorchFunctionMode):
        deep = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.deep += 1
            if self.deep == 1:
                with self:
                    return args[0].mm(args[1])
            if self.deep == 2:
                met.append(type(torch.sin(other)))
            return func(*args, **kwargs or {})

    met, other = [], torch.ones(3, 3).as_subclass(Other)
    x = autofuse.wrap(torch.ones(3, 3))
    with Back():
        result = x.mm(other)
    assert type(result) is Other and met == [Other]


TRACED = {  # `a` is traced, `x` is closed over
    "operators": lambda a, x: (a * x, x * a, 1 / x - a, a @ x, x @ a, -x, x > a, x[a > 0]),
    "functions": lambda a, x: (torch.add(a, x, alpha=2), torch.where(a > 0, x, 1.0), F.gelu(x) * a,
                               torch.cat([a, x]), torch.stack([x, a]), torch.einsum("ij,jk", a, x)),
    "methods": lambda a, x: (a.sub(x), x.clone() * a, x.detach(), x.t() + a, x.double(), x.sin()),
    "reductions": lambda a, x: (a * x.sum(), torch.softmax(x, -1), torch.max(x, 0)[0] + a),
    "python": lambda a, x: (F.layer_norm(a, (4,), x[0], x[1]), F.linear(a, x, x[0])),
    "writes": lambda a, x: (a.clone().add_(x), a.clone().copy_(x), a.clone().__imul__(x),
                            torch.mul(a, x, out=torch.empty(4, 4)), a.neg_().sub_(x, alpha=2)),
    "items": lambda a, x: operator.setitem(a, 0, x[0]),
    "pending": lambda a, x: (a + x * 2, a - (x.tanh() + 1)),
}  # fmt: skip


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("name", TRACED)
def test_a_mode_of_dispatch_meets_plain_tensors(name, native):
    """It may know no class but torch's own, as what traces: it has no way to say of others."""
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    autofuse.config.native = native
    x, program = torch.arange(16.0).view(4, 4) - 3, TRACED[name]
    w = autofuse.wrap(x.clone())

    class Telling(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            told.append((func, [type(leaf) for leaf in tree_leaves((args, kwargs))]))
            return func(*args, **kwargs or {})

    for _ in range(3):
        seen = []
        for t in (x, w):
            graph = make_fx(functools.partial(program, x=t))(torch.ones(4, 4)).graph
            told = []
            with Telling():
                program(torch.ones(4, 4), t)
            seen.append(([node.target for node in graph.nodes], told))
        assert seen[0] == seen[1]


@pytest.mark.parametrize("native", NATIVE)
def test_what_a_mode_of_dispatch_does_beside_another_thread(native):
    """Whatever it calls in the middle of a write: by the ops that it is told of, and others."""
    autofuse.config.native = native
    done, recorded = threading.Event(), threading.Event()

    def other():
        autofuse.materialize(autofuse.wrap(torch.ones(3)) * 2 + 1)
        recorded.set()
        done.wait(60)

    class Writing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            torch.add(beside, 1.0, out=beside)
            return func(*args, **kwargs or {})

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert recorded.wait(60)
        results = []
        for wrap in (lambda t: t, autofuse.wrap):
            h, beside, w, seen = torch.ones(3, 4), torch.zeros(4), wrap(torch.full((3, 4), 2.0)), []
            pending = w * h + beside
            with Writing():
                for _ in range(3):
                    assert torch.add(h, w, out=h) is h
                    torch.mul(h, 0.5, out=h)
            results.append((pending, h, beside, seen))
        assert_same(results[1], results[0], None)
    finally:
        done.set()
        thread.join()


# modes are entered while `y`, computed from `x`, is pending; `a` requires no grad
TOLD = {
    "operators": lambda y, x, a: (2 - y, 2 / y, 2**y, y**2, -y, abs(y), y > a, 7 // y, y % 2),
    "functions": lambda y, x, a: (torch.sin(y), torch.add(y, a, alpha=2), F.gelu(y), F.glu(y),
                                  torch.isclose(y, a), F.softplus(y), torch.where(y > 1, y, a)),
    "casts": lambda y, x, a: (y.float(), y.double(), y.to(torch.float64), y.type_as(a), y.bool()),
    "writes": lambda y, x, a: (y.detach().add_(1), a.mul_(y.detach()), torch.sin(a, out=a)),
    "metadata": lambda y, x, a: (y.dtype, y.device, y.is_contiguous(), y._version, y.grad_fn,
                                 y.is_leaf, torch.is_floating_point(y), y.layout, y.is_nested),
    "gradients": lambda y, x, a: torch.autograd.grad(y.sum(), x, create_graph=True),
    "backward": lambda y, x, a: (y * a).sin().sum().backward(),
    "modes": lambda y, x, a: (torch.no_grad()(lambda: y * 2)(), torch.autocast("cpu")(y.sin)()),
    "parameters": lambda y, x, a: (torch.nn.Parameter(y), torch.nn.Linear(4, 4)(y)),
    "reads": lambda y, x, a: (y.tolist(), str(y), y.detach().numpy(), y.sum().item(), list(y)),
    "exports": lambda y, x, a: (torch.asarray(a),
                                torch.from_dlpack(a), copy.copy(y), copy.deepcopy(a)),
    "torch.func": lambda y, x, a: torch.func.grad(lambda t: (t * a).sum())(a),
}  # fmt: skip


@pytest.mark.parametrize("kind", [Functions, Ops])
@pytest.mark.parametrize("name", TOLD)
def test_a_mode_is_told_of_what_eager_does_alone(name, kind, on):
    autofuse.config.always_fuse = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of what is deprecated

            def told(wrap):
                a = wrap(torch.arange(4.0) + 1)
                x = wrap((torch.arange(4.0) + 1).requires_grad_())
                y = (x * 2 + 1).sigmoid()
                assert autofuse.is_pending(y) is (wrap is autofuse.wrap)
                with kind() as mode:
                    TOLD[name](y, x, a)
                return mode.seen

            expected = told(lambda t: t)
            for _ in range(3):
                assert told(autofuse.wrap) == expected
    finally:
        autofuse.config.always_fuse = False


def test_a_default_device_is_asked_about_what_makes_tensors_alone(on, monkeypatch):
    """Recording, passing, metadata and fused calls go on as without one."""
    asked = []
    answer = DeviceContext.__torch_function__

    def ask(self, func, types, args=(), kwargs=None):
        asked.append(func.__name__)
        return answer(self, func, types, args, kwargs)

    def program(x, i, m):
        y = torch.abs(torch.add(x, 1.0)) * x + F.hardtanh(F.relu(x - 1.0))
        z = y.sum() + torch.cat([y, x]).view(-1)[0] + F.layer_norm(y, (6,)).norm()
        y.add_(1.0)
        y[0] = z
        return y * z + torch.zeros(6), torch.einsum("ij->j", y), y.shape, y.dtype, len(y), y.dim()

    if not on:  # without machine code torch's functions ask modes before anybody

        def program(x, i, m):
            y = ((x + 1.0).abs() * x).clamp(-1, 1) + x
            z = y.sum() + y.view(-1)[0] + y.softmax(-1)[0, 0]
            y.add_(1.0)
            y[0] = z
            return y * z + torch.zeros(6), y.argmax(1), y.shape, y.dtype, len(y), y.dim()

    want = outcome(program, "plain")
    monkeypatch.setattr(DeviceContext, "__torch_function__", ask)
    for kind in ("wrapped", "pending", "wrapped", "pending"):
        with torch.device("cpu"):
            x, i, m = operands(kind, False)
            asked.clear()
            result = program(x, i, m)
            assert asked == ["zeros"]
            assert autofuse.is_pending(result[0])
        found = [facts(t, [])[:8] for t in flat(result)], [facts(t, [])[:8] for t in (x, i, m)]
        assert found == ([fact[:8] for fact in want[0]], want[1])
    fused = autofuse.fuse(lambda x: x * 2.0 + torch.ones(6))
    x = torch.ones(4, 6)
    with torch.device("cpu"):
        for measure in (False, True):
            monkeypatch.setattr(autofuse.config, "measure", measure)
            asked.clear()
            y = fused(x)
            assert set(asked) <= {"ones"} and len(asked) == 1 and type(y) is torch.Tensor
    autofuse.config.measure = False


def test_no_default_device_is_missed(on):
    """Functions that it is asked about have no handler; what hooks and modes do in the middle of an
    op that is not recorded is under the devices that they choose themselves."""
    assert not _device_constructors() & {*HANDLERS}
    packed = []

    def pack(tensor):
        with torch.device("meta"):
            packed.append(torch.empty(1).device.type)
        return tensor

    class Chooses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with torch.device("meta"):
                packed.append(torch.empty(1).device.type)
            return func(*args, **kwargs or {})

    x = autofuse.wrap(torch.rand(3, 6, requires_grad=True))
    with torch.device("cpu"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x.softmax(-1)
        with Chooses():
            x.sum()
    assert len(packed) >= 2 and {*packed} == {"meta"}


IN_PYTHON = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": lambda x: F.silu(x),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "mse_loss": lambda x: F.mse_loss(x, x + 1.0),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x + 1.0, reduction="none"),
    "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "norm": lambda x: torch.norm(x),
    "split": lambda x: torch.split(x, 2),
    "of another": lambda x: F.cosine_similarity(x, torch.ones(3, 6)),
    "a method": lambda x: x.norm(dim=0),
    "one that makes tensors": lambda x: torch.full_like(x, 2.0) + torch.ones(6),
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_default_device_asks_functions_in_python_about_plain_tensors_too(name, on):
    """Who answers for it has to call them without it, or it asks again."""
    x = torch.rand(3, 6)
    want = flat(IN_PYTHON[name](x))
    kinds = (torch.clone, lambda x: autofuse.wrap(x.clone()), lambda x: autofuse.wrap(x) * 1.0)
    hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.detach, torch.detach)
    for kind, within in itertools.product(kinds, (contextlib.nullcontext, hooks)):
        with torch.device("cpu"), within():
            got = flat(IN_PYTHON[name](kind(x)))
        for ours, theirs in zip(got, want, strict=True):
            assert_same(ours, theirs, 1e-6, name)


def test_metadata_asks_a_mode_as_a_plain_tensor_does(on):
    def functions(x):
        with Functions() as mode:
            x.shape, x.size(0), x.requires_grad, len(x)
        return mode.seen

    plain = torch.ones(2)
    assert functions(autofuse.wrap(plain)) == functions(plain)


def test_saved_tensors_go_through_hooks(on):
    x = autofuse.wrap(torch.randn(3, 6, requires_grad=True) * 1.0)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = F.layer_norm(x, (6,))
        z = F.softmax(x, -1)
    assert packed and type(x) is type(y) is autofuse.Tensor
    assert torch.equal(autofuse.unwrap(z), torch.softmax(autofuse.unwrap(x), -1))


def test_torch_functions_stay_off_where_they_were_off(on):
    x = autofuse.wrap(torch.ones(2, 2))
    for off in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
        with off():
            assert not torch._C._is_torch_function_enabled()
            x.shape, x.size(0), x.view(-1), x[0], x.chunk(2), F.softmax(x, 0)
            assert not torch._C._is_torch_function_enabled()
            with pytest.raises(RuntimeError):
                x.view(3)
            assert not torch._C._is_torch_function_enabled()
        assert torch._C._is_torch_function_enabled()
    with pytest.raises(RuntimeError):
        x.view(3)
    assert torch._C._is_torch_function_enabled()


def test_inference_tensors_have_views_of_their_own(on):
    with torch.inference_mode():
        inside = torch.ones(4, 4)
    plain = torch.ones(4, 4)
    for _ in range(3):  # the third time there is a check of what was met
        for base in (plain, inside):
            views = autofuse.wrap(base).chunk(2)
            assert [v.is_inference() for v in views] == [base.is_inference()] * 2
            assert autofuse.unwrap(views[0] * 2.0 + 1.0).tolist() == [[3.0] * 4] * 2


def test_views_of_different_shapes_have_their_own_meta(on):
    x = autofuse.wrap(torch.arange(10.0))
    for _ in range(4):
        for sizes in ([1, 2, 3, 4], [4, 4, 2], [10]):
            got = [y * 2.0 for y in x.split(sizes)]
            assert [y.shape[0] for y in got] == sizes
            assert torch.cat(got).tolist() == (autofuse.unwrap(x) * 2.0).tolist()
    flush_all("test")


def test_batch_norm_in_training_writes(on):
    x, mean, var = torch.randn(8, 3), torch.zeros(3), torch.ones(3)
    pending = autofuse.wrap(mean) * 2.0 + 1.0
    got = F.batch_norm(autofuse.wrap(x), mean, var, training=True)
    assert pending.tolist() == [1.0] * 3  # of the mean before
    want_mean, want_var = torch.zeros(3), torch.ones(3)
    want = F.batch_norm(x, want_mean, want_var, training=True)
    assert torch.equal(autofuse.unwrap(got), want)
    assert torch.equal(mean, want_mean) and torch.equal(var, want_var)
    assert mean._version == want_mean._version
    assert torch.equal(autofuse.unwrap(F.batch_norm(autofuse.wrap(x), mean, var)),
                       F.batch_norm(x, mean, var))  # fmt: skip


def test_setting_an_item_makes_it_require_grad(on):
    x, value = autofuse.wrap(torch.zeros(3, 2)), torch.ones(2, requires_grad=True)
    for k in range(3):
        x[k] = value * 1.0
        assert x.requires_grad and x._version == k + 1
    (x * 2.0).sum().backward()
    assert value.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("index", [1, (1, slice(None)), torch.tensor([1]), [1]], ids=str)
def test_setting_an_item_of_a_plain_tensor(index, on):
    """What has read it is read first, and the value is computed."""
    for make in (torch.zeros, lambda *size: torch.nn.Parameter(torch.zeros(*size))):
        target, x = make(3, 2), autofuse.wrap(torch.ones(2))
        with torch.no_grad():
            before = x + target
            target[index] = x * 2.0 + 1.0
            after = x + target
        assert before.tolist() == [[1.0, 1.0]] * 3
        assert after.tolist() == [[1.0, 1.0], [4.0, 4.0], [1.0, 1.0]]
        assert target._version == 1 and type(target) is not autofuse.Tensor


def as_is(x, t):
    """`t` wrapped, if x is."""
    return autofuse.wrap(t) if type(x) is autofuse.Tensor else t


# of h and o [4, 6] float, which are plain, beside x, i and m as of PROGRAMS
BESIDE = {
    "+=": lambda h, o, x, i, m: operator.iadd(h, x) is h,
    "-= row": lambda h, o, x, i, m: operator.isub(h, x[0]) is h,
    "*= itself": lambda h, o, x, i, m: (operator.imul(h, x), operator.imul(h, h)),
    "/=": lambda h, o, x, i, m: operator.itruediv(h, x) is h,
    "%=, //=": lambda h, o, x, i, m: (operator.imod(h, x + 9.0), operator.ifloordiv(h, x + 9.0)),
    "**=": lambda h, o, x, i, m: operator.ipow(h, x),
    "&=": lambda h, o, x, i, m: (b := h > 0, operator.iand(b, m[:, None]), operator.ixor(b, b)),
    "&= wrong": lambda h, o, x, i, m: operator.iand(h, x),
    "+= wrong": lambda h, o, x, i, m: operator.iadd(h, x[:, :5]),
    "+= of another dtype": lambda h, o, x, i, m: (
        operator.iadd(h, i[0]), operator.iadd(h.long(), x)),
    "+= a view of itself": lambda h, o, x, i, m: operator.iadd(h, as_is(x, h)[0]),
    "of a leaf": lambda h, o, x, i, m: operator.iadd(torch.nn.Parameter(h), x),
    "to a view": lambda h, o, x, i, m: operator.iadd(h[1:3].t()[2:], x[:4, :2]),
    "__iadd__ wrong": lambda h, o, x, i, m: (h.__iadd__(x, x)),
    "__iadd__ of two": lambda h, o, x, i, m: h.__iadd__(other=x),
    "all by keyword": lambda h, o, x, i, m: torch.clamp_(input=h, min=x),
    "methods": lambda h, o, x, i, m: (h.add_(x), h.mul_(other=x), h.sub_(x, alpha=2) is h),
    "add_ wrong": lambda h, o, x, i, m: h.add_(x, x, x),
    "add_ of nothing": lambda h, o, x, i, m: h.add_(no_such=x),
    "copy_": lambda h, o, x, i, m: (h.copy_(x), h[0].copy_(i[0]), h.copy_(x[0])),
    "masks": lambda h, o, x, i, m: (h.masked_fill_(m[:, None], 0.5),
                                    h.masked_scatter_(m[:, None], o)),
    "indices": lambda h, o, x, i, m: (h.index_add_(0, i, x[:2]), h.index_fill_(1, i, 2.0),
                                      h.scatter_(1, i[:, None], x), h.index_put_((i,), x[:2])),
    "lists": lambda h, o, x, i, m: torch._foreach_add_([h, o], [x, x]),
    "h[1] =": lambda h, o, x, i, m: set_item(h, 1, x[0]),
    "h[i] =": lambda h, o, x, i, m: (set_item(h, i, 0.5), set_item(h, i, x[:2])),
    "h[:, i] =": lambda h, o, x, i, m: (set_item(h, (slice(None), i), 0.5),
                                        set_item(h, (i, i), x[:2, 0])),
    "h[m] =": lambda h, o, x, i, m: (set_item(h, m, 0.5), set_item(h, m, x[:2]),
                                     set_item(h, (m, 0), i)),
    "h[h > 0] =": lambda h, o, x, i, m: set_item(h, x > 0, -1),
    "h[...] =": lambda h, o, x, i, m: (set_item(h, ..., x), set_item(h, None, x[0]),
                                       set_item(h, True, x), set_item(h, [0, 1], x[:2])),
    "h[9] =": lambda h, o, x, i, m: set_item(h, 9, x[0]),
    "h[0] = wrong": lambda h, o, x, i, m: set_item(h, 0, x[:, :5]),
    "h[x] =": lambda h, o, x, i, m: set_item(h, x, 1.0),
    "h[0, h[i]] =": lambda h, o, x, i, m: set_item(h, (0, [i]), 1.0),
    "h[i.item()] =": lambda h, o, x, i, m: set_item(h, i[1], x[0]),
    "i[1] = 0.5": lambda h, o, x, i, m: set_item(torch.zeros(2, 6, dtype=torch.long), 1, x[0]),
    "del h[0]": lambda h, o, x, i, m: delete_item(h),
    "a parameter's item": lambda h, o, x, i, m: set_item(torch.nn.Parameter(h), 0, x[0]),
    "out=": lambda h, o, x, i, m: (torch.add(h, x, out=o) is o, torch.mul(x, 2.0, out=o),
                                   torch.mm(h, x.t(), out=torch.empty(4, 4))),
    "out= itself": lambda h, o, x, i, m: (torch.add(h, x, alpha=2, out=h) is h,
                                          torch.sub(x, h, out=h[:4])),
    "out= what is wrapped": lambda h, o, x, i, m: torch.add(h, o, out=x) is x,
    "out= of another size": lambda h, o, x, i, m: (out := as_is(x, torch.empty(0)), torch.add(
        h, o, out=out), out.shape, out * 2.0, torch.sum(x, 0, out=out), out.shape, out * 2.0),
    "out= of another dtype": lambda h, o, x, i, m: torch.add(
        h, x, out=torch.empty(4, 6, dtype=torch.float64)),
    "out= wrong": lambda h, o, x, i, m: torch.add(h, x, out=torch.empty(4, 6, dtype=torch.long)),
    "out= no tensor": lambda h, o, x, i, m: torch.add(h, x, out=3),
    "out= several": lambda h, o, x, i, m: torch.max(x, 0, out=(
        torch.empty(6), torch.empty(6, dtype=torch.long))),
    "out= of a list": lambda h, o, x, i, m: torch.cat([h, x], out=torch.empty(8, 6)),
    "out= of a leaf": lambda h, o, x, i, m: torch.add(h, x, out=torch.nn.Parameter(o)),
    "what read it": lambda h, o, x, i, m: (y := x * h, operator.iadd(h, x), y, x * h),
    "what read it, an item": lambda h, o, x, i, m: (y := x * h, set_item(h, 1, x[0]), y, x * h),
    "what read it, a mask": lambda h, o, x, i, m: (y := x * h, set_item(h, m, 2.0), y, x * h),
    "what read it, out=": lambda h, o, x, i, m: (y := x * o, torch.add(h, x, out=o), y, x * o),
    "what read a view of it": lambda h, o, x, i, m: (
        y := x * h[1], operator.imul(h, x), z := x * h, set_item(h, (..., 0), x[:, 0]), y, z),
    "what others read": lambda h, o, x, i, m: (y := x * o, operator.iadd(h, x), y + h),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_writes_to_plain_tensors_are_eagers(name, grad, on):
    """What they leave, count, give and raise, beside what is wrapped."""

    def told(kind):
        h, o = torch.linspace(2.0, -1.0, 24).view(4, 6), torch.full((4, 6), 3.0)
        program = functools.partial(BESIDE[name], h, o)
        results, arguments, _ = outcome(program, kind, grad)
        left = [facts(t, [])[:9] for t in (h, o)]
        assert type(h) is type(o) is torch.Tensor
        return [result[:8] for result in results], [x[:7] for x in arguments], left

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
        want = told("plain")
        for kind in ("wrapped", "pending", "wrapped", "wrapped"):
            assert told(kind) == want, kind


def test_attributes_of_plain_tensors(on):
    p, x = torch.nn.Parameter(torch.ones(2)), autofuse.wrap(torch.ones(2))
    pending = x * p.detach()
    p.data = torch.full((2,), 3.0)
    assert pending.tolist() == [1.0, 1.0]
    for value in (torch.ones(2), None, autofuse.wrap(torch.ones(2)), x * 2.0):
        p.grad = value
        assert (p.grad is None) == (value is None)
    assert p.grad.tolist() == [2.0, 2.0]
    for wrong in (torch.ones(3), True, 1, "a"):
        with pytest.raises((TypeError, RuntimeError)) as here:
            p.grad = wrong
        with pytest.raises(type(here.value)) as there:
            torch._C.TensorBase.grad.__set__(p, wrong)
        assert str(here.value) == str(there.value)
    with pytest.raises((TypeError, RuntimeError)):
        torch.Tensor.grad.fget(5)
    p.requires_grad = False
    assert not p.requires_grad
    del p.grad
    assert p.grad is None


@pytest.mark.parametrize("grad", [False, True])
def test_arguments_are_wrapped_again(grad, on):
    """Torch may be lent them as plain ones: also after errors, twice the same, and in lists."""
    autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
    x, y = autofuse.wrap(torch.ones(2, 2)), autofuse.wrap(torch.zeros(2, 2))
    many = [autofuse.wrap(torch.ones(2, 2)) for _ in range(9)]
    gc.collect()  # what earlier tests have left
    kinds = sys.getrefcount(torch.Tensor), sys.getrefcount(autofuse.Tensor)
    with torch.set_grad_enabled(grad):
        for _ in range(50):
            torch.cat(many), torch.stack((x, y, x)), torch.mm(x, x), F.softmax(x, 0), x.mm(y)
            F.embedding(autofuse.wrap(torch.tensor([0])), x), torch.einsum("ij,jk->ik", [x, y])
            F.normalize(x), torch.cdist(x, x), torch.atleast_2d(many)
            torch.block_diag(*many, *many)
            for wrong in (lambda: torch.mm(x, y[0]), lambda: torch.cat([x, y[0]]),
                          lambda: F.softmax(x, 7), lambda: torch.cat([x, 1.0]),
                          lambda: F.normalize(x, dim=7), lambda: torch.block_diag(*many, 1),
                          lambda: torch.cdist(x, y, compute_mode="?")):  # fmt: skip
                with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)):
                    wrong()
    assert {type(t) for t in (x, y, *many)} == {autofuse.Tensor}
    assert abs(sys.getrefcount(torch.Tensor) - kinds[0]) < 20
    assert abs(sys.getrefcount(autofuse.Tensor) - kinds[1]) < 20


@pytest.mark.parametrize("inside", ("the program", "a Function", "a Function, hooks around it"))
@pytest.mark.parametrize("op", ("mm", "relu", "linear"))
def test_what_a_hook_meets_is_wrapped(on, op, inside):
    """Arguments are lent under grad where there are no hooks; a closed thread knows of them."""
    autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
    x, met = autofuse.wrap(torch.ones(2, 2)), []
    leaf = autofuse.wrap(torch.ones(2, 2, requires_grad=True))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: met.append(type(x)) or t, abs)

    def run():
        if op == "relu":
            torch.mm(torch.relu(torch.mm(leaf, x)), x)
        else:
            getattr(F if op == "linear" else torch, op)(leaf, x)

    class Running(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            with torch.enable_grad(), contextlib.nullcontext() if "around" in inside else hooks:
                run()
            return given.clone()

    for _ in range(6):  # a chain of one op comes to run at once
        run()
        met.clear()
        if inside == "the program":
            with hooks:
                run()
        else:
            with hooks if "around" in inside else contextlib.nullcontext():
                Running.apply(torch.ones(1))
        assert met and {*met} == {autofuse.Tensor}


LENT = """
import torch, warnings, autofuse
warnings.simplefilter("ignore")
autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
met, library = [], torch.library.Library("aten", "IMPL")
h = torch.ones(2, 2)
library.impl("mm", lambda *args: met.append(type(x)) or h.clone(), "CPU")
for grad in (False, True):
    x = autofuse.wrap(torch.ones(2, 2, requires_grad=grad))
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            torch.mm(x, h), h.mm(x)
    assert type(x) is autofuse.Tensor
print(len(met), {*met} == {torch.Tensor})
"""


@pytest.mark.skipif(not native.active(), reason="there is no machine code here")
def test_arguments_are_lent_where_nobody_can_meet_them():
    """Torch asks Python twice of each that is not whether it is a tensor: with gradients, too.

    In a process without other threads, which may meet them.
    """
    done = subprocess.run([sys.executable, "-c", LENT], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["12", "True"], done.stderr


def test_functions_in_python_meet_plain_tensors(on):
    """The same ones; what is in the middle, such as a hook, meets them too. And afterwards not."""
    x = autofuse.wrap(torch.ones(3))
    leaf = autofuse.wrap(torch.ones(3, requires_grad=True))
    autofuse.materialize(x + 1)
    met = []

    class Classes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met.append(type(x))
            return func(*args, **kwargs or {})

    with Classes():
        F.normalize(x, dim=0)
    assert met and set(met) == {torch.Tensor} and type(x) is autofuse.Tensor
    loss = torch.dot(leaf, leaf)
    loss.register_hook(lambda g: met.append((type(loss), type(leaf))))
    for gradients in (lambda: torch.autograd.grad(loss, leaf, retain_graph=True),
                      lambda: torch.autograd.grad([loss], [leaf], retain_graph=True),
                      lambda: loss.backward(retain_graph=True)):  # fmt: skip
        met.clear()
        given = gradients()
        ((of_loss, _),) = met
        assert of_loss is torch.Tensor
        assert type(loss) is type(leaf) is autofuse.Tensor
        assert given is None or {type(g) for g in given} == {autofuse.Tensor}
        assert given is None or given[0].tolist() == [2.0] * 3
    assert leaf.grad.tolist() == [2.0] * 3


def test_what_functions_in_python_let_a_hook_change_is_seen(on, monkeypatch):
    """What is known of an argument that is a plain tensor meanwhile may hold no more."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)

    def program(wrap):
        x, y = (wrap(torch.ones(size, 5, requires_grad=True)) for size in (3, 5))

        def pack(saved):
            if saved.shape == (5, 5):  # x itself is saved by then
                x.data = torch.ones(7)
            return saved

        with torch.no_grad():
            (x * 2.0 + 1.0).tolist()
        with torch.autograd.graph.saved_tensors_hooks(pack, abs):
            torch.tensordot(x, y, 1)
        with torch.no_grad():
            return (x * 2.0 + 1.0).tolist()

    for _ in range(4):
        assert program(autofuse.wrap) == program(lambda x: x) == [3.0] * 7


def test_functions_in_python_end_no_chain_under_grad(on, monkeypatch):
    """What they make takes numbers between those of its ops."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)

    def program(x, z):
        a = x * 2.0
        F.normalize(z)
        b = a + 1.0
        torch.cdist(z, z)
        return b * 3.0

    x, z = torch.randn(50, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    (want,) = torch.autograd.grad(program(x, z).sum(), x)
    for _ in range(5):
        leaf, other = (autofuse.wrap(t.detach().clone().requires_grad_()) for t in (x, z))
        before = autofuse.stats()
        result = program(leaf, other)
        autofuse.materialize(result)
        after = autofuse.stats()
        assert sum(after.flushes.values()) - sum(before.flushes.values()) == 1
        assert after.ops_recorded - before.ops_recorded == 3
        assert torch.equal(torch.autograd.grad(result.sum(), leaf)[0], want)


def test_a_thread_that_records_nothing_meets_no_plain_ones(on):
    """It may copy or save them while torch runs; what it does would meet another class halfway."""
    autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
    x, met, done = autofuse.wrap(torch.ones(256, 256)), set(), threading.Event()

    def look():
        while not done.is_set():
            met.add(type(x))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(200):
                torch.mm(x, x)
    finally:
        done.set()
        thread.join()
    assert met == {autofuse.Tensor}


def test_no_function_of_torch_in_c_goes_by_python():
    """Those that tensors come to, but for what writes to them or makes others like them."""
    ignored = torch.overrides.get_ignored_functions()
    makers = ignored - {torch.rand_like, torch.randn_like, torch.randint_like, torch.normal}
    passing = {handler for kind, handler, _ in HOT if kind == "passing"}
    found = 0
    for place in (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._fft):
        for name in dir(place):
            func = getattr(place, name)
            if name[0] != "_" != name[-1] and type(func) is type(torch.mm) and func not in makers:
                assert func in HANDLERS, name
                found += HANDLERS[func] in passing
    assert found > 390


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("kind", ["wrapped", "pending"])
def test_a_product_with_what_is_plain_runs_no_python(kind, monkeypatch):
    """Python asks the reflected operator of a subclass first, which torch writes in Python."""
    monkeypatch.setattr(autofuse.config, "native", True)
    plain, (x, _, _) = torch.ones(3, 4), operands("wrapped", False)
    want = plain @ autofuse.unwrap(x)
    for _ in range(50):  # its origin is judged
        plain @ x
    x = operands(kind, False)[0]
    made = []
    called = functions_called(lambda: made.append(plain @ x))
    assert not {"_rmatmul", "run_eager"} & {*called} and (called == [] or kind == "pending")
    assert_same(autofuse.unwrap(made[0]), want, 1e-6)


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("index", [
    lambda i, p: i, lambda i, p: p, lambda i, p: (..., i), lambda i, p: (p, slice(1, 3)),
    lambda i, p: (0, p), lambda i, p: (i, p),
])  # fmt: skip
def test_a_pending_value_is_indexed_by_a_tensor_as_machine_code(index, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", True)
    x, plain = torch.rand(3, 4), torch.tensor([0, 2, 1])
    w, i = autofuse.wrap(x), autofuse.wrap(plain)
    for _ in range(5):
        pending = w * 2.0
        made = []
        called = functions_called(lambda: made.append(pending[index(i, plain)]))  # noqa: B023
    assert not {"record_view", "run_eager", "call"} & {*called}  # but a flush of a CPU's
    assert_same(autofuse.unwrap(made[0]), (x * 2.0)[index(plain, plain)], None)


# of c and k [3, 4] complex, c wrapped and k plain, and x [3, 4] float, wrapped
UNREAD = {
    "c * c": lambda c, k, x: c * c,
    "c - k": lambda c, k, x: (c - k, k - c, torch.sub(c, k), torch.sub(k, c)),
    "c / x": lambda c, k, x: (c / x, x / c, torch.div(x, c), c * x, x + c),
    "x * k": lambda c, k, x: (x * k, k * x, torch.mul(x, k), torch.add(k, x)),
    "c * 2.0": lambda c, k, x: (c * 2.0, 2.0 * c, c - 1, 1 + c, torch.mul(c, 3.0)),
    "1 - c": lambda c, k, x: (1 - c, 2.0 / c),
    "c * 2j": lambda c, k, x: (c * 2j, 2j * c, c - 1j, 1j - c, torch.add(c, 2j)),
    "x * 2j": lambda c, k, x: (x * 2j, 2j * x, x - 1j, torch.mul(x, 1j)),
    "2j / x": lambda c, k, x: (2j / x, 2j / c, 1j - x, (0.1 + 0.7j) / x.double()),
    "2j / bfloat16": lambda c, k, x: (0.1 + 0.7j) / x.bfloat16(),
    "None / c": lambda c, k, x: None / c,
    "str + c": lambda c, k, x: "a" + c,
    "list - c": lambda c, k, x: [1.0, 2.0] - c,
    "tuple & c": lambda c, k, x: (1.0, 2.0) & c,
    "-c": lambda c, k, x: (-c, c.neg(), torch.neg(c), c.exp(), torch.sin(c), c.sqrt()),
    "abs(c)": lambda c, k, x: (abs(c), c.abs(), torch.abs(c) * 2.0 + 1.0),
    "c == c": lambda c, k, x: (c == k, c != 1j, torch.eq(c, x)),
    "c < c": lambda c, k, x: c < k,
    "c % 2": lambda c, k, x: c % 2,
    "~c": lambda c, k, x: ~c,
    "wrong": lambda c, k, x: c * k[:, :3],
    "to and fro": lambda c, k, x: torch.fft.irfft(torch.fft.rfft(x * 2.0 + 1.0) * 0.5) * x - 1.0,
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_what_no_kernel_reads_is_eagers(name, grad, pending, device, on):
    def run(wrap):
        c, k = (torch.randn(3, 4, dtype=torch.complex64, device=device) for _ in range(2))
        x = torch.randn(3, 4, device=device)
        for t in (c, x):
            t.requires_grad_(grad)
        leaves = c, x
        c, x = wrap(c), wrap(x)
        if pending:
            x = x * 2.0 + 1.0
        try:
            out = UNREAD[name](c, k, x)
        except Exception as error:
            return type(error), str(error)
        outs = [t for t in (out if isinstance(out, tuple) else (out,))]
        real = [torch.view_as_real(t) if t.is_complex() else t for t in outs]
        graded = [t for t in real if t.requires_grad]
        slopes = ()
        if graded:
            slopes = torch.autograd.grad(sum(t.sum() for t in graded), leaves, allow_unused=True)
        slopes = [g if g is None or not g.is_complex() else torch.view_as_real(g) for g in slopes]
        return [autofuse.unwrap(t)[0] for t in real], slopes

    torch.manual_seed(3)
    want = run(lambda t: t)
    for _ in range(4):  # origins are judged meanwhile, and calls like it are known
        torch.manual_seed(3)
        got = run(autofuse.wrap)
        assert_same(got, want, None if device == "cuda" else 1e-6)


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("name", [
    "c * c", "c - k", "c / x", "x * k", "c * 2.0", "1 - c", "c * 2j", "x * 2j", "-c", "c == c",
])  # fmt: skip
def test_what_no_kernel_reads_runs_no_python(name):
    """It stands between chains again and again, as what a Fourier transform gives."""
    autofuse.config.native = True
    c, k = torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    c, x = autofuse.wrap(c), autofuse.wrap(torch.randn(3, 4))
    for _ in range(300):  # origins are judged meanwhile
        UNREAD[name](c, k, x)
    assert not functions_called(lambda: UNREAD[name](c, k, x))


# of h [3, 4] plain, and x [3, 4], i [3], m [3, 4] wrapped and concrete
SETTLED = {
    "h += x": lambda h, x, i, m: operator.iadd(h, x),
    "h *= x": lambda h, x, i, m: operator.imul(h, x),
    "h[0] = x[0]": lambda h, x, i, m: operator.setitem(h, 0, x),
    "h[:, 0] = i": lambda h, x, i, m: operator.setitem(h, (slice(None), 0), i),
    "h[i] = x": lambda h, x, i, m: operator.setitem(h, i, x),
    "h[i, 0] = 1": lambda h, x, i, m: operator.setitem(h, (i, 0), 1.0),
    "h[:, i] = 1": lambda h, x, i, m: operator.setitem(h, (slice(None), i), 1.0),
    "h[m] = 0": lambda h, x, i, m: operator.setitem(h, m, 0.0),
    "out=": lambda h, x, i, m: torch.add(h, x, out=h),
    "out= of a keyword": lambda h, x, i, m: torch.add(x, other=h, out=h),
    "out= of a product": lambda h, x, i, m: torch.mul(x, 0.5, out=h),
    "out= of a sum": lambda h, x, i, m: torch.sum(x, 0, keepdim=False, out=h[0]),
    "out= what is wrapped": lambda h, x, i, m: torch.add(h, h, out=x),
    "a method": lambda h, x, i, m: operator.methodcaller("add_", x, alpha=2)(h),
    "a method of several": lambda h, x, i, m: operator.methodcaller("index_add_", 0, i, x)(h),
    "a function": lambda h, x, i, m: torch._C._VariableFunctions.sigmoid_(x),
}


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("name", SETTLED)
def test_a_write_with_nothing_pending_runs_no_python(name, alone):
    autofuse.config.native = True
    memory = torch.ones(4) if "x[0]" in name else torch.ones(3, 4)  # where x is not alone
    h, x, i = torch.ones(3, 4), autofuse.wrap(memory), autofuse.wrap(torch.arange(3))
    m = autofuse.wrap(torch.ones(3, 4, dtype=torch.bool))
    autofuse.materialize(x + 1)
    for _ in range(3):
        SETTLED[name](h, x, i, m)
    assert not functions_called(lambda: SETTLED[name](h, x, i, m))


def test_a_thread_that_only_writes_has_a_recorder():
    """By which machine code knows it."""
    found = []

    def work():
        h, x = torch.ones(3, 4), autofuse.wrap(torch.ones(3, 4))
        h += x
        found.append(this_thread.current)

    assert elsewhere(work) is None
    assert found[0] is not None


def test_what_is_let_pass_writes_to_no_argument():
    """By its schema in torch, and in the eyes of `run_eager`."""
    seen = 0
    for func in (facts[0] for kind, _, facts in HOT if kind == "passing"):
        if func.__name__ in ("retain_grad", "record_stream"):
            continue  # said of the object, not of its values
        with contextlib.suppress(RuntimeError):  # not every function is an operator
            schemas = torch._C._jit_get_schemas_for_operator(f"aten::{func.__name__}")
            seen += bool(schemas)
            for schema in schemas:
                for argument in schema.arguments:
                    if str(argument.type) not in ("Tensor", "Optional[Tensor]"):
                        continue  # TorchScript's lists
                    told = argument.is_out or argument.name == "out"
                    writes = argument.alias_info is not None and argument.alias_info.is_write
                    assert told or not writes, (func.__name__, argument.name)
    assert seen > 400


class Acting:
    """A number, as an index, for which Python runs."""

    def __init__(self, act):
        self.act = act

    def __index__(self):
        self.act()
        return 1


@pytest.mark.parametrize("change", [
    lambda w: w.set_(torch.full((1, 4), 5.0)), lambda w: w.resize_(1, 4),
    lambda w: w.data.fill_(7.0), lambda w: setattr(w, "data", torch.full((1, 4), 2.0).double()),
])  # fmt: skip
@pytest.mark.parametrize("beside", [False, True])
def test_what_python_does_to_a_wrapped_tensor_in_the_middle(change, beside, on, monkeypatch):
    """While it is lent, and beside another thread, where it is not."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    over = threading.Event()
    if beside:
        threading.Thread(target=over.wait, daemon=True).start()

    def run(wrap):
        h, w = torch.ones(4, 4), wrap(torch.ones(3, 4))
        with torch.no_grad():
            autofuse.materialize(w * 2 + 1)
            h[Acting(lambda: change(w)) :] = w
            return autofuse.unwrap(autofuse.materialize(w * 2 + 1)), h

    try:
        for got, want in zip(run(autofuse.wrap), run(lambda x: x), strict=True):
            assert_same(got, want, None)
    finally:
        over.set()


@pytest.mark.parametrize("where", ["plain", "wrapped"])
def test_writes_that_are_never_recorded_wait_for_what_they_read(where, on, alone):
    """Such as `index_add_`, of a pending value: what that is computed with, and then the write."""
    x, i = torch.randn(2, 6), torch.tensor([0, 3])
    w, out, want = autofuse.wrap(x), torch.zeros(4, 6), torch.zeros(4, 6)
    target = autofuse.wrap(out) if where == "wrapped" else out
    kind = type(target)
    for k in range(5):
        f = w * 2.0
        autofuse.reset_stats()
        names = functions_called(lambda f=f: target.index_add_(0, i, f, alpha=-1))
        assert not autofuse.is_pending(f) and type(target) is kind
        assert autofuse.stats().eager_ops == {("index_add_", "not in the table"): 1}
        assert autofuse.stats().flushes == {"index_add_": 1}
        if on and k == 4:
            assert "run_eager" not in names and "pending" not in names
        want.index_add_(0, i, x * 2.0, alpha=-1)
        assert torch.equal(out, want) and out._version == want._version
        read, before = w + out[:2], x + want[:2]
        target.index_fill_(0, i, 1.0)
        want.index_fill_(0, i, 1.0)
        assert torch.equal(autofuse.unwrap(autofuse.materialize(read)), before)
        assert torch.equal(out, want)
    for wrong in (lambda f: target.index_add_(0, i, f[:, :3] * 1.0),
                  lambda f: target.index_add_(2, i, f),
                  lambda f: target.index_add_(0, f, f)):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)) as here:
            wrong(w * 2.0)
        f = x * 2.0
        with pytest.raises(type(here.value)) as there:
            wrong(f)
        assert str(here.value) == str(there.value)
