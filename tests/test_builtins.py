"""Machine code that stands before torch's builtins: who is asked, and that nobody can tell."""

import copy
import ctypes
import functools
import pickle
import random
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.hot import native
from support import assert_same

pytestmark = pytest.mark.skipif(
    not native.active(), reason=f"machine code is off: {native.absent or 'AUTOFUSE_NATIVE=0'}"
)


def builtins():
    """The builtins that machine code stands before."""
    assert native._native is not None, native.absent
    return native._native.builtins.functions


def runs(function):
    """What CPython calls for `function`: its vectorcall."""
    find = ctypes.pythonapi.PyVectorcall_Function
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    return find(function)


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


@pytest.mark.parametrize("name", CALLS)
def test_torch_does_not_look_for_overrides(name, w, monkeypatch):
    want = CALLS[name](autofuse.unwrap(w).clone())

    def asked(*args, **kwargs):
        raise AssertionError("torch has looked for overrides")

    CALLS[name](w)
    monkeypatch.setattr(autofuse.Tensor, "__torch_function__", asked)
    got = CALLS[name](w)
    monkeypatch.undo()
    for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert type(a) is autofuse.Tensor
        assert_same(a, b, 1e-6, name)


def test_it_can_be_switched_off():
    found = builtins()
    assert torch.sigmoid in found and torch.sum in found and len(found) > 300
    assert all(map(runs, found))
    autofuse.config.native = False
    assert not any(map(runs, found))
    autofuse.config.native = True
    assert all(map(runs, found))


def test_functions_stay_what_they_are():
    def facts():
        return [
            (f, f.__name__, repr(f), hash(f), f.__self__, f.__doc__, copy.deepcopy(f) is f)
            for f in builtins()
        ] + [pickle.dumps(torch.sigmoid), torch.overrides.is_tensor_method_or_property(torch.sum)]

    on = facts()
    autofuse.config.native = False
    assert on == facts()
    assert pickle.loads(pickle.dumps(torch.sigmoid)) is torch.sigmoid


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


def test_a_mode_is_asked(w):
    with Mode():
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
        assert type(y) is torch.Tensor
        assert type(total) is torch.Tensor
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
        result = (type(error).__name__, str(error))
    if isinstance(result, torch.Tensor):
        result = [result]
    told = []
    for x in (*result, *tensors) if isinstance(result, (list, tuple)) else (result, *tensors):
        if isinstance(x, torch.Tensor):
            x = autofuse.unwrap(x)
            told.append((str(x.dtype), tuple(x.shape), x.layout, repr(x.tolist())))
        else:
            told.append(x if isinstance(x, str) else repr(type(x)))
    return told


_LEAVES = (torch.clone, lambda x: autofuse.wrap(x.clone()), lambda x: autofuse.wrap(x.clone()) * 1)


@pytest.mark.filterwarnings("ignore")  # of functions that say once that they are deprecated
@pytest.mark.parametrize("leaves", [*[(leaf,) for leaf in _LEAVES], _LEAVES],
                         ids=["plain", "wrapped", "pending", "some of each"])  # fmt: skip
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside a pending op"])
def test_any_call_gives_or_says_the_same(beside, leaves, w):
    if beside and len(leaves) == 1 and leaves[0] is not torch.clone:
        pytest.skip("one is pending before the call all the same")
    calls = [(f, seed) for f in builtins() if f.__name__ not in _SKIPPED for seed in range(12)]
    outcomes = []
    for on, kinds in ((True, leaves), (False, leaves), (False, _LEAVES[:1] * len(leaves))):
        autofuse.config.native = on
        outcomes.append([])
        for f, seed in calls:
            pending = w * 2 if beside else None
            outcomes[-1].append(_outcome(f, f"{f.__name__} {seed}", kinds))
            del pending
    differ = [
        (f.__name__, seed, here, there, eager)
        for (f, seed), here, there, eager in zip(calls, *outcomes, strict=True)
        if here not in (there, eager)  # eager's are better where torch's protocol says less
    ]
    assert not differ, (len(differ), differ[:5])
