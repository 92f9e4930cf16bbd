"""Machine code that stands before torch's C: who is asked, and that nobody can tell."""

import copy
import ctypes
import functools
import inspect
import operator
import os
import pickle
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.dispatch.methods import made_no_sequence
from autofuse.hot import called, native
from autofuse.hot.places import vectorcall_of as runs
from support import assert_same

# calls of each builtin, with arguments of a seed each
COUNT = int(os.environ.get("AUTOFUSE_TEST_CALLS", "12"))

pytestmark = pytest.mark.skipif(
    not native.active(), reason=f"machine code is off: {native.absent or 'AUTOFUSE_NATIVE=0'}"
)


def builtins():
    """The builtins that machine code stands before."""
    assert native._native is not None, native.absent
    return native._native.builtins.functions


def methods():
    """The methods of tensors in C that it stands before."""
    assert native._native is not None, native.absent
    return native._native.descriptors.functions


def subscript_of(cls):
    """What C indexes objects of `cls` by: mp_subscript, as typeslots.h numbers it."""
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    return slot_of(cls, 5)


@pytest.fixture
def w():
    wrapped = autofuse.wrap(torch.linspace(0.1, 0.9, 12).view(3, 4))
    autofuse.materialize(wrapped + 1)  # a thread that never records has no recorder
    return wrapped


@pytest.fixture(autouse=True)
def native_again():
    yield
    autofuse.config.native = True


CALLS = {
    "recorded": lambda w: torch.sigmoid(w),
    "recorded with a number": lambda w: torch.mul(w, 2.0),
    "with keywords": lambda w: torch.add(w, w, alpha=2),
    "bounds": lambda w: torch.clamp(w, min=0.2),
    "a choice": lambda w: torch.where(w > 0.5, w, 0.0),
    "a product": lambda w: torch.mm(w, w.t()),
    "torch.nn": lambda w: torch._C._nn.gelu(w),
    "in place": lambda w: torch.sigmoid_(w.clone()),
    "a sum": lambda w: torch.sum(w, -1),
    "a sum with keywords": lambda w: torch.sum(w, dim=-1, keepdim=True),
    "a list": lambda w: torch.cat([w, w]),
    "a tuple with a keyword": lambda w: torch.stack((w, w), dim=1),
    "several results": lambda w: torch.topk(w, 2),
    "views": lambda w: torch.chunk(w, 2, 1),
    "a shape": lambda w: torch.permute(w, (1, 0)),
}


# of h [3, 4] plain, and beside it x [3, 4] and i [2], which are wrapped
BESIDE = {
    "an index": lambda h, x, i: h[i],
    "an index of several": lambda h, x, i: h[:, i],
    "a mask": lambda h, x, i: h[x > 0.5],
    "of a parameter": lambda h, x, i: torch.nn.Parameter(h, requires_grad=False)[i],
    "a method": lambda h, x, i: h.mm(x.t()),
    "a method with numbers": lambda h, x, i: h.index_add(0, i, x[:2]),
    "a method with keywords": lambda h, x, i: h.index_select(dim=0, index=i),
    "a method of the table": lambda h, x, i: h.mul(x),
    "a method of a list": lambda h, x, i: h.index_put([torch.tensor([0, 1]), i], x[0, :2]),
    "a method of torch's class": lambda h, x, i: torch.Tensor.add(h, x, alpha=2),
    "a plain one in place": lambda h, x, i: h.index_add_(0, i, x[:2]),
    "a plain one by an operator": lambda h, x, i: operator.iadd(h, x),
    "a plain one's item": lambda h, x, i: (operator.setitem(h, 0, x[0]), h)[1],
    "a plain one's items": lambda h, x, i: (operator.setitem(h, (slice(None), i), 0.5), h)[1],
    "a plain one that is given": lambda h, x, i: torch.add(h, x, alpha=2, out=h),
    "a builtin": lambda h, x, i: torch.mm(h, x.t()),
    "a builtin with a keyword": lambda h, x, i: torch.mm(h, mat2=x.t()),
    "a list": lambda h, x, i: torch.cat([h, x]),
    "a list with a keyword": lambda h, x, i: torch.stack((h, torch.ones(3, 4), x), dim=1),
}


@pytest.mark.parametrize("name", [*CALLS, *BESIDE])
def test_torch_does_not_look_for_overrides(name, w, monkeypatch, alone):
    def call(wrap):
        plain = autofuse.unwrap(w).clone()
        if name in CALLS:
            return CALLS[name](wrap(plain))
        return BESIDE[name](plain, wrap(plain * 0.5), wrap(torch.tensor([2, 0])))

    def asked(*args, **kwargs):
        raise AssertionError("torch has looked for overrides")

    want = call(lambda x: x)
    call(autofuse.wrap)
    monkeypatch.setattr(autofuse.Tensor, "__torch_function__", asked)
    got = call(autofuse.wrap)
    monkeypatch.undo()
    for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert type(a) is (torch.Tensor if "a plain one" in name else autofuse.Tensor)
        assert_same(a, b, 1e-6, name)


def test_it_can_be_switched_off():
    found, others = builtins(), methods()
    assert torch.sigmoid in found and torch.sum in found and len(found) > 300
    assert torch.Tensor.mm in others and torch.Tensor.add in others and len(others) > 300
    as_ever = runs(torch.Tensor.__add__)  # which Python asks a wrapped tensor for first
    classes = torch.Tensor, torch.nn.Parameter
    for on in (True, False, True):
        autofuse.config.native = on
        assert [bool(runs(f)) for f in found] == [on] * len(found)
        assert [runs(f) != as_ever for f in others] == [on] * len(others)
        assert [subscript_of(cls) != subscript_of(torch._C.TensorBase) for cls in classes] == [
            on
        ] * 2


def test_who_looks_on_leaves_indexing_as_it_was():
    classes = torch.Tensor, torch.nn.Parameter
    before = [subscript_of(cls) for cls in classes]
    assert subscript_of(torch._C.TensorBase) not in before
    for _ in range(2):
        with autofuse.explain():
            float(autofuse.wrap(torch.ones(3))[1])
        assert [subscript_of(cls) for cls in classes] == before


def test_functions_stay_what_they_are():
    def facts():
        return [
            (f, f.__name__, repr(f), hash(f), f.__self__, f.__doc__, copy.deepcopy(f) is f)
            for f in builtins()
        ] + [
            (f, f.__name__, repr(f), hash(f), f.__objclass__, f.__doc__, inspect.isroutine(f),
             vars(torch._C.TensorBase)[f.__name__] is f)
            for f in methods()
        ] + [
            pickle.dumps(torch.sigmoid), torch.overrides.is_tensor_method_or_property(torch.sum),
            pickle.dumps(torch.Tensor.mm), torch.Tensor.__getitem__,
            "__getitem__" in vars(torch.Tensor),
        ]  # fmt: skip

    on = facts()
    autofuse.config.native = False
    assert on == facts()
    assert pickle.loads(pickle.dumps(torch.sigmoid)) is torch.sigmoid
    assert pickle.loads(pickle.dumps(torch.Tensor.mm)) is torch.Tensor.mm


def test_classes_of_others_are_indexed_by_torch(w):
    class Later(torch.Tensor):
        pass

    class Counting(torch.Tensor):
        def __getitem__(self, index):
            return "counted", super().__getitem__(index)

    plain, i = torch.arange(4.0), autofuse.wrap(torch.tensor([1, 1]))
    assert subscript_of(Later) == subscript_of(Other) == subscript_of(torch._C.TensorBase)
    assert plain.as_subclass(Later)[1].item() == 1.0
    assert plain.as_subclass(Later)[i].tolist() == [1.0, 1.0]
    said, got = plain.as_subclass(Counting)[i]
    assert said == "counted" and got.tolist() == [1.0, 1.0]


def test_what_somebody_sets_as_getitem_is_called(monkeypatch):
    """And machine code neither stands before it nor takes it away."""
    plain, i = torch.arange(4.0), autofuse.wrap(torch.tensor([1, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__getitem__", lambda self, index: ("theirs", index))
        assert plain[i] == ("theirs", i)
        for on in (False, True, False):
            autofuse.config.native = on
            assert plain[2] == ("theirs", 2)
    for cls in (torch.Tensor, torch.nn.Parameter):  # which CPython leaves sequences in C's eyes
        assert made_no_sequence(cls)
    for on in (False, True):
        autofuse.config.native = on
        assert plain[2].item() == 2.0 and plain[i].tolist() == [1.0, 1.0]


# --- others who have a say --------------------------------------------------------------------


class Other(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "other", func.__name__


class Duck:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "duck", func.__name__


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return "mode", func.__name__


@pytest.mark.parametrize("cls", [Other, Duck])
def test_another_class_is_asked(cls, w):
    other = torch.ones(3, 4).as_subclass(Other) if cls is Other else Duck()
    kind = cls.__name__.lower()
    assert torch.add(w, other) == (kind, "add")
    assert torch.add(other, w) == (kind, "add")
    assert torch.cat([w, other]) == (kind, "cat")
    assert torch.stack((w, w, other), dim=1) == (kind, "stack")
    assert torch.add(w, other=other) == (kind, "add")
    assert torch.where(w > 0.5, w, other) == (kind, "where")
    assert torch.sum(other) == (kind, "sum")
    plain = torch.ones(3, 4)
    for wrapped in (w, w * 2.0):
        assert torch.cat([plain, wrapped, other]) == (kind, "cat")
        assert plain.addmm(wrapped, other) == (kind, "addmm")
        assert plain.addmm(mat1=wrapped, mat2=other) == (kind, "addmm")
        assert plain[wrapped > 0.5, other] == (kind, "__getitem__")
        assert plain[other, wrapped > 0.5] == (kind, "__getitem__")


def test_a_mode_is_asked(w):
    plain, mask = torch.ones(3, 4), autofuse.wrap(torch.ones(3, 4)) > 0.5
    with Mode():
        assert plain.mul(w) == plain.mul(other=w) == ("mode", "mul")
        assert plain[mask] == plain[0, mask] == ("mode", "__getitem__")
        assert torch.sigmoid(w) == ("mode", "sigmoid")
        assert torch.sum(w, dim=0) == ("mode", "sum")
        assert torch.cat([w, w]) == ("mode", "cat")
    assert autofuse.is_pending(torch.sigmoid(w))


@pytest.mark.parametrize(
    "off", [torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction]
)
def test_where_torch_functions_are_off_nothing_is_recorded(off, w):
    with off():
        y, total = torch.sigmoid(w), torch.sum(w)
        plain = torch.ones(3, 4)
        beside = plain.mul(w), plain.mm(w.t()), plain[w > 0.5], torch.cat([plain, w])
        assert {type(x) for x in (y, total, *beside)} == {torch.Tensor}
    assert torch.equal(y, torch.sigmoid(autofuse.unwrap(w)))


def test_another_thread_has_a_state_of_its_own(w):
    seen = []

    def work():
        v = autofuse.wrap(torch.ones(3))
        seen.extend([autofuse.is_pending(torch.sigmoid(v)), torch.sum(v).item()])

    with torch._C.DisableTorchFunctionSubclass():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True, 3.0]


@pytest.mark.parametrize("x", [3, None, [1.0]])
def test_what_is_no_tensor_is_not_indexed_as_one(x):
    """Whoever calls the protocol by hand may pass anything; C behind `getitem` looks at nothing."""
    index = autofuse.wrap(torch.tensor([1, 0]))
    getitem = torch.Tensor.__getitem__
    with torch.no_grad():
        torch.ones(3)[index]
        with pytest.raises(TypeError, match="requires a 'torch._C.TensorBase' object"):
            autofuse.Tensor.__torch_function__(getitem, (autofuse.Tensor,), (x, index))


def test_calls_by_way_of_others(w):
    plain = autofuse.unwrap(w).clone()
    for call in (
        lambda x: list(map(torch.sigmoid, [x, x]))[1],
        lambda x: functools.partial(torch.mul, x)(3.0),
        lambda x: torch.sigmoid(*(x,)),
        lambda x: torch.add(x, **{"other": x, "alpha": 3}),
        lambda x: functools.reduce(torch.add, [x, x, x]),
        lambda x: torch.sigmoid.__call__(x),
        lambda x: torch.sigmoid(input=x),
        lambda x: list(map(torch.Tensor.mul, [plain, x], [x, plain]))[0],
        lambda x: functools.partial(torch.Tensor.mul, plain)(x),
        lambda x: functools.partial(plain.mul)(x),
        lambda x: operator.methodcaller("mul", x)(plain),
        lambda x: torch.Tensor.mul(*(plain, x)),
        lambda x: torch.Tensor.mul(plain, **{"other": x}),
        lambda x: torch.Tensor.mul.__call__(plain, x),
        lambda x: torch.Tensor.mul.__get__(plain)(x),
        lambda x: operator.getitem(plain, x > 0.5),
        lambda x: plain.__getitem__(x > 0.5),
        lambda x: torch.Tensor.__getitem__(plain, (0, x[0] > 0.5)),
    ):
        assert torch.equal(autofuse.unwrap(call(w)), call(plain))


# --- what may be given ------------------------------------------------------------------------

_SKIPPED = {
    "dropout",
    "dropout_",
    "feature_dropout",
    "alpha_dropout",
    "bernoulli",
    "binomial",
    "multinomial",
    "normal",
    "poisson",
    "feature_alpha_dropout",
    "native_dropout",
    "fbgemm_pack_gemm_matrix_fp16",  # gives an address
    "rrelu",
    "rrelu_",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "rand_like",
    "randn_like",
    "empty_like",
    *(
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "resize",
        "set_",
    ),
}  # fmt: skip - they draw numbers, or leave what is there


def _given(rng, make):
    """Arguments that some function may know what to do with, and most do not."""
    kinds = [
        make, make, make,
        lambda: rng.choice([0, 1, 2, -1, 3]), lambda: rng.choice([0.5, 2.0, float("nan"), -1e300]),
        lambda: rng.choice([True, False]), lambda: None, lambda: (1, 0), lambda: [1, 0],
        lambda: rng.choice(["mean", "trunc", "no such thing"]), lambda: torch.float64,
        lambda: [make(), make()], lambda: (make(), 1.0), lambda: 1j, lambda: object,
        lambda: 1 << 70, lambda: slice(None), lambda: torch.strided,
    ]  # fmt: skip
    args = [make()] + [rng.choice(kinds)() for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 2, 3]))]
    if rng.random() < 0.1:
        args = [rng.choice(kinds)() for _ in range(rng.choice([0, 1, 2]))]
    elif rng.random() < 0.1:
        args = [rng.choice([2, 0.5, True]), args[0]]
    keys = ["dim", "keepdim", "alpha", "min", "other", "out", "dtype", "value", "no_such", "input"]
    kwargs = {key: rng.choice(kinds)() for key in rng.sample(keys, rng.choice([0, 0, 0, 1, 2]))}
    if rng.random() < 0.1:
        kwargs = {"out": make()}
    return args, kwargs


def _outcome(function, seed, leaves):
    """What a call gives or raises, and what it leaves of its arguments."""
    rng, tensors = random.Random(seed), []

    def make():
        base = torch.linspace(-2, 2, 12).view(3, 4)
        if rng.random() < 0.2:
            base = torch.arange(12).view(3, 4)
        tensors.append(rng.choice(leaves)(base))
        return tensors[-1]

    args, kwargs = _given(rng, make)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        said, _, _ = str(error).partition("Exception raised from")  # where, in C++
        result = (type(error).__name__, said)
    if isinstance(result, torch.Tensor):
        result = [result]
    told = []
    for x in (*result, *tensors) if isinstance(result, (list, tuple)) else (result, *tensors):
        if isinstance(x, torch.Tensor):
            x = autofuse.unwrap(x)
            values = repr(x.tolist()) if x.layout is torch.strided and x.is_cpu else x.device
            told.append((str(x.dtype), tuple(x.shape), x.layout, values))
        else:
            told.append(x if isinstance(x, str) else repr(type(x)))
    return told


_LEAVES = (torch.clone, lambda x: autofuse.wrap(x.clone()), lambda x: autofuse.wrap(x.clone()) * 1)


def _different(calls, leaves, beside=None):
    """Calls, as (function, seed), that give or say something else by machine code."""
    outcomes = []
    for on, kinds in ((True, leaves), (False, leaves), (False, _LEAVES[:1] * len(leaves))):
        autofuse.config.native = on
        outcomes.append([])
        for f, seed in calls:
            pending = beside * 2 if beside is not None else None
            outcomes[-1].append(_outcome(f, f"{f.__name__} {seed}", kinds))
            del pending
    return [
        (f.__name__, seed, here, there, eager)
        for (f, seed), here, there, eager in zip(calls, *outcomes, strict=True)
        if here not in (there, eager)  # eager's are better where torch's protocol says less
    ]


@pytest.mark.filterwarnings("ignore")  # of functions that say once that they are deprecated
@pytest.mark.parametrize("leaves", [*[(leaf,) for leaf in _LEAVES], _LEAVES],
                         ids=["plain", "wrapped", "pending", "some of each"])  # fmt: skip
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside a pending op"])
def test_any_call_gives_or_says_the_same(beside, leaves, w):
    if beside and len(leaves) == 1 and leaves[0] is not torch.clone:
        pytest.skip("one is pending before the call all the same")
    calls = [(f, seed) for f in builtins() if f.__name__ not in _SKIPPED for seed in range(COUNT)]
    differ = _different(calls, leaves, w if beside else None)
    assert not differ, (len(differ), differ[:5])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaves", [_LEAVES[:1], _LEAVES], ids=["plain", "some of each"])
def test_any_method_gives_or_says_the_same(leaves, w):
    calls = [
        (f, seed) for f in methods() if f.__name__ not in _SKIPPED for seed in range(COUNT * 2 // 3)
    ]
    differ = _different(calls, leaves, w)
    assert not differ, (len(differ), differ[:5])


def _draws(name):
    words = "dropout", "gumbel", "fractional", "lowrank"
    return name in _SKIPPED or any(word in name for word in words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaves", [_LEAVES[:1], _LEAVES], ids=["plain", "some of each"])
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside a pending op"])
def test_any_function_in_python_gives_or_says_the_same(beside, leaves, w):
    calls = [(f, seed) for f in called.asking() if not _draws(f.__name__) for seed in range(COUNT)]
    differ = _different(calls, leaves, w if beside else None)
    assert not differ, (len(differ), differ[:5])


IN_PYTHON = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python 3.11 runs functions in Python by itself"
)
ASKING = {
    F.embedding: lambda x: F.embedding(torch.tensor([1, 0]), x),
    F.interpolate: lambda x: F.interpolate(x[None], scale_factor=2.0),
    F.kl_div: lambda x: F.kl_div(x, target=x, reduction="sum"),
    F.grid_sample: lambda x: F.grid_sample(x[None, None], x[:, :2][None, None],
                                           align_corners=False),
    F.triplet_margin_loss: lambda x: F.triplet_margin_loss(x, x * 2.0, x + 1.0),
    torch.einsum: lambda x: torch.einsum("ij,kj->ik", x, x),
    torch.cdist: lambda x: torch.cdist(x, x + 1.0),
    torch.block_diag: lambda x: torch.block_diag(x, x),
    torch.tensordot: lambda x: torch.tensordot(x, x.t(), dims=1),
    torch.autograd.grad: lambda x: torch.autograd.grad((x * 2.0).sum(), x)[0],
}  # fmt: skip


@IN_PYTHON
@pytest.mark.parametrize("function", ASKING, ids=lambda function: function.__name__)
def test_functions_in_python_are_called_once(function):
    assert function in called.asking()
    plain = torch.rand(3, 4, requires_grad=function is torch.autograd.grad)
    wrapped = autofuse.wrap(plain.detach().clone().requires_grad_(plain.requires_grad))
    want = ASKING[function](plain)
    ASKING[function](wrapped)
    times = []

    def profile(frame, event, argument):
        times.append(event == "call" and frame.f_code is function.__code__)

    sys.setprofile(profile)
    try:
        got = ASKING[function](wrapped)
    finally:
        sys.setprofile(None)
    assert sum(times) == 1 and type(got) is type(wrapped) is autofuse.Tensor
    assert_same(got, want, 1e-6)


WRITING = {
    "relu": lambda x: F.relu(x, True),
    "silu": lambda x: F.silu(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, True),
    "elu": lambda x: F.elu(x, 1.0, True),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5, True),
    "threshold": lambda x: F.threshold(x, 0.5, 0.25, True),
    "dropout": lambda x: F.dropout(x, 0.0, True, True),
    "batch_norm": lambda x: (F.batch_norm(x * 2.0, x[0], x[1].exp(), None, None, True), x)[1],
    "relu, not": lambda x: F.relu(x, False),
    "leaky_relu, not": lambda x: F.leaky_relu(x, 0.1, False),
    "dropout, not": lambda x: F.dropout(x, 0.0, True, False),
}


@pytest.mark.parametrize("pending", [False, True], ids=["", "pending"])
@pytest.mark.parametrize("name", WRITING)
def test_what_arguments_say_by_their_places_is_written(name, pending):
    """After what has read it before."""

    def run(wrap):
        x = wrap(torch.linspace(-1.0, 1.0, 12).view(3, 4))
        x = x * 1.0 if pending else x
        read = x * 2.0
        result = WRITING[name](x)
        return read, x, result, torch.tensor(result is x)

    want = run(lambda x: x)
    for _ in range(3):
        assert_same(run(autofuse.wrap), want, 1e-6)


@IN_PYTHON
@pytest.mark.parametrize("module", (torch.nn.ReLU(), torch.nn.SiLU(), torch.nn.LeakyReLU(0.1),
                                    torch.nn.ELU(), torch.nn.Hardtanh()), ids=repr)  # fmt: skip
def test_modules_of_functions_in_python_record_without_them(module, w, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    name = torch.nn.functional.leaky_relu if "Leaky" in repr(module) else None
    function = name or getattr(F, type(module).__name__.lower())
    assert autofuse.is_pending(module(w))
    times = []

    def profile(frame, event, argument):
        times.append(event == "call" and frame.f_code is function.__code__)

    sys.setprofile(profile)
    try:
        got = module(w)
    finally:
        sys.setprofile(None)
    assert not sum(times) and autofuse.is_pending(got)
    assert_same(got, module(autofuse.unwrap(w)), 1e-6)


@IN_PYTHON
def test_functions_in_python_can_be_patched_and_switched_off(w, monkeypatch):
    before, calls = F.embedding, []

    def mine(*args, **kwargs):
        calls.append(args)
        return before(*args, **kwargs)

    monkeypatch.setattr(F, "embedding", mine)
    for on in (True, False, True):
        autofuse.config.native = on
        assert F.embedding(torch.tensor([1]), w).tolist() == [w[1].tolist()]
        as_ever = runs(mine)
        assert [runs(f) != as_ever for f in called.asking()] == [on] * len(called.asking())
    assert len(calls) == 3


def test_any_index_gives_or_says_the_same(w):
    def index(rng, make):
        kinds = [
            lambda: rng.choice([0, 1, -1, 7]), lambda: slice(rng.choice([None, 1]), None),
            lambda: None, lambda: ..., lambda: True, lambda: [0, 1], lambda: 0.5,
            lambda: make().long().flatten() % 3, lambda: make() > 0, lambda: make()[0] > 0,
            lambda: make(), lambda: [make() > 0], lambda: make().flatten()[0].long() % 3,
        ]  # fmt: skip
        if rng.random() < 0.5:
            return rng.choice(kinds)()
        return tuple(rng.choice(kinds)() for _ in range(rng.choice([0, 1, 2, 2, 3])))

    differ, raised, seeds = [], 0, 160 * COUNT
    for seed in range(seeds):
        outcomes = []
        for on, kinds in ((True, _LEAVES), (False, _LEAVES), (False, _LEAVES[:1])):
            autofuse.config.native = on
            rng = random.Random(seed)
            plain = torch.linspace(-2, 2, 12).view(3, 4)
            key = index(
                rng, lambda rng=rng, kinds=kinds: rng.choice(kinds * (3 // len(kinds)))(plain)
            )
            pending = w * 2
            try:
                got = autofuse.unwrap(torch.linspace(0, 1, 12).view(3, 4)[key])
                outcomes.append((got.shape, got.tolist()))
            except Exception as error:
                outcomes.append((type(error), str(error)))
            del pending
        raised += isinstance(outcomes[0][0], type)
        if outcomes[0] not in outcomes[1:]:
            differ.append((seed, *outcomes))
    assert not differ, (len(differ), differ[:5])
    assert 0.1 < raised / seeds < 0.9
