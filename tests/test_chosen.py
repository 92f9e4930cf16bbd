"""What choosers have said of calls: found again by all that may decide it, and by nothing less."""

import gc
import random
import signal
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.dispatch import protocol
from autofuse.dispatch.chosen import Choices, chosen_by
from autofuse.hot import native
from autofuse.ops import row as rows
from support import assert_same, functions_called

W = autofuse.wrap
X = torch.linspace(-2.0, 2.0, 24).view(4, 6)
Y = torch.linspace(3.0, -1.0, 24).view(4, 6)
MASK = X > 0.5

# calls that a key must tell apart, or must not mix up: in this order, and in the other
ALIKE = {
    "operands that are one": [
        lambda x, y: torch.addcmul(x, y, y), lambda x, y: torch.addcmul(x, y, x),
        lambda x, y: torch.addcmul(x, x, y), lambda x, y: torch.addcmul(y, x, x),
        lambda x, y: torch.addcmul(x, x * 1, y), lambda x, y: torch.addcmul(x, x, x),
    ],
    "signs of zero": [
        lambda x, y: (x * 0).clamp(min=0.0), lambda x, y: (x * 0).clamp(min=-0.0),
        lambda x, y: x.masked_fill(MASK, -0.0), lambda x, y: x.masked_fill(MASK, 0.0),
        lambda x, y: x.nan_to_num(0.0, -0.0, 0.0), lambda x, y: x.nan_to_num(-0.0, 0.0, -0.0),
        lambda x, y: x.clamp(-0.0, 0.0), lambda x, y: x.clamp(0.0, -0.0),
        lambda x, y: x.clamp(0.0, 0.0), lambda x, y: torch.where(x > 0, x, -0.0),
        lambda x, y: torch.where(x > 0, x, 0.0), lambda x, y: x ** -0.0, lambda x, y: x ** 0.0,
        lambda x, y: F.elu(x, 0.0), lambda x, y: F.elu(x, -0.0),
        lambda x, y: F.leaky_relu(x, -0.0), lambda x, y: F.leaky_relu(x, 0.0),
    ],
    "classes of numbers": [
        lambda x, y: torch.add(x, y, alpha=1), lambda x, y: torch.add(x, y, alpha=1.0),
        lambda x, y: torch.add(x, y, alpha=True), lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x**2, lambda x, y: x**2.0, lambda x, y: x ** True, lambda x, y: x**3,
        lambda x, y: x.long() ** 2, lambda x, y: x.long().clamp(1), lambda x, y: x.clamp(1),
        lambda x, y: x.long().clamp(True), lambda x, y: x.long().clamp(1.0),
        lambda x, y: torch.where(x > 0, x, 1), lambda x, y: torch.where(x > 0, x, True),
        lambda x, y: torch.where(x > 0, x.long(), 1), lambda x, y: torch.where(x > 0, 1.0, 2),
    ],
    "keywords": [
        lambda x, y: x.clamp(min=0.5), lambda x, y: x.clamp(max=0.5), lambda x, y: x.clamp(0.5),
        lambda x, y: torch.clamp(x, max=0.5), lambda x, y: torch.clamp(max=0.5, input=x),
        lambda x, y: torch.clamp(x, min=0.5, max=1.0), lambda x, y: torch.clamp(x, 0.5, max=1.0),
        lambda x, y: torch.clamp(x, max=1.0, min=0.5), lambda x, y: torch.clamp(x, 1.0, 0.5),
        lambda x, y: F.gelu(x, approximate="tanh"), lambda x, y: F.gelu(x, approximate="none"),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(x, y, rounding_mode=None),
        lambda x, y: F.leaky_relu(x.clone(), 0.5, inplace=True), lambda x, y: F.leaky_relu(x, 0.5),
        lambda x, y: F.leaky_relu(x, 0.5, False), lambda x, y: F.leaky_relu(x, 0.5, inplace=False),
        lambda x, y: torch.clamp(x, 0.5, out=torch.empty(4, 6)),
    ],
    "dtypes": [
        lambda x, y: x.to(torch.float64), lambda x, y: x.to(torch.float32), lambda x, y: x.float(),
        lambda x, y: x.half().float(), lambda x, y: x.half(), lambda x, y: x.double().float(),
        lambda x, y: x.to(y), lambda x, y: x.to(y.half()), lambda x, y: x.half().to(y),
        lambda x, y: x.to("cpu"), lambda x, y: x.to("cpu", torch.float64), lambda x, y: x.bool(),
        lambda x, y: x.to(torch.device("cpu")), lambda x, y: x.type_as(y),
        lambda x, y: x.type_as(y.double()), lambda x, y: x.to(torch.float32, copy=True),
        lambda x, y: x.to(dtype=torch.float16), lambda x, y: x.to(torch.float16, True),
        lambda x, y: x.double().clamp(min=0.1), lambda x, y: x.half().clamp(min=0.1),
        lambda x, y: x.float(memory_format=torch.contiguous_format),
    ],
    "shapes": [
        lambda x, y: torch.lerp(x, y, 0.1), lambda x, y: torch.lerp(x.T, y.T, 0.1),
        lambda x, y: torch.lerp(x, y[:1], 0.1), lambda x, y: torch.lerp(x[:1], y, 0.1),
        lambda x, y: torch.lerp(x, y, y), lambda x, y: torch.lerp(x, y, y[0, 0]),
        lambda x, y: x.clamp(y), lambda x, y: x.clamp(y[0]), lambda x, y: x.clamp(y, x),
        lambda x, y: x.clamp(min=y[0, 0]), lambda x, y: F.rrelu(x), lambda x, y: F.rrelu(x.T),
    ],
}  # fmt: skip


def kept():
    """What is known of all functions."""
    return [data[2] for name, _, data in protocol.HOT if name == "spelling"]


@pytest.fixture(autouse=True)
def nothing_known():
    for choices in kept():
        choices.clear()


def outcome(call, *operands):
    try:
        return call(*operands)
    except Exception as error:
        return type(error), str(error)


@pytest.fixture(params=["as it is", "pending"])
def pending(request):
    """What makes a wrapped tensor: of memory, or of an op that has not run."""
    return W if request.param == "as it is" else lambda x: W(x) * 1


@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("grad", [False, True])
def test_calls_that_look_alike(alike, grad, pending, on):
    calls = ALIKE[alike]
    rng = random.Random(7)
    for order in (calls, calls[::-1], *(rng.sample(calls, len(calls)) for _ in range(4))):
        for call in order:
            x, y = (t.clone().requires_grad_(grad) for t in (X, Y))
            got, want = outcome(call, pending(x), pending(y)), outcome(call, x, y)
            if isinstance(want, tuple):
                assert got == want
                continue
            close = 1e-6 if want.is_floating_point() else None  # of functions, on a CPU
            close = 1e-2 if want.dtype is torch.float16 else close
            assert_same(got, want, close)
            assert got.requires_grad is want.requires_grad
            zeros = (want == 0) & (autofuse.unwrap(got) == 0)
            assert torch.equal(want.signbit() & zeros, autofuse.unwrap(got).signbit() & zeros)


def test_what_is_handed_back_is_the_argument(pending, on):
    for _ in range(3):
        x, y = pending(X), pending(Y)
        assert x.to(torch.float32) is x and x.float() is x and x.type_as(y) is x and x.to(y) is x
        assert x.to(torch.float32, copy=True) is not x


def test_grad_mode_is_told_apart(on):
    x = X.clone().requires_grad_()
    for _ in range(3):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert_same(F.rrelu(W(x)), F.rrelu(x), None)
                assert W(x).clamp(min=0.5).requires_grad is torch.is_grad_enabled()


def test_a_mode_is_told_of_calls_that_are_known(on):
    class Told(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            told.append(function.__name__)
            return function(*args, **(kwargs or {}))

    told, w = [], W(X)
    for _ in range(2):
        assert_same(torch.clamp(w, min=0.5), torch.clamp(X, min=0.5), None)
    with Told():
        assert_same(torch.clamp(w, min=0.5), torch.clamp(X, min=0.5), None)
    assert told.count("clamp") >= 1


def test_numbers_without_end_are_not_kept(on):
    w = W(X)
    for k in range(600):
        assert_same(torch.add(w, w, alpha=k / 8), torch.add(X, X, alpha=k / 8), None)
    assert max(map(len, kept())) <= 260


@pytest.mark.skipif(not native.active(), reason="machine code is off")
@pytest.mark.parametrize(
    "call",
    [
        lambda w, v: w**2, lambda w, v: w.clamp(min=0.5), lambda w, v: torch.clamp(w, 0.1, 0.7),
        lambda w, v: w.to(torch.float64), lambda w, v: w.type_as(v), lambda w, v: w.double(),
        lambda w, v: torch.where(w > v, w, v), lambda w, v: torch.add(w, v, alpha=3),
        lambda w, v: torch.lerp(w, v, 0.25), lambda w, v: w.masked_fill(w.bool(), 1.0),
        lambda w, v: F.gelu(w, approximate="tanh"), lambda w, v: w.clone(),
    ],
)  # fmt: skip
def test_no_python_runs_for_a_call_that_is_known(call):
    """Recorded, and where it is left eager."""
    w, v = W(X) * 1, W(Y) * 1
    autofuse.materialize(w, v)
    for always in (True, False):
        autofuse.config.always_fuse = always
        for _ in range(300):
            autofuse.materialize(call(w, v))
        frames = []

        def entered(frame, event, arg, frames=frames):
            if event == "call":
                frames.append(frame.f_code.co_qualname)

        before = sys.getprofile()
        sys.setprofile(entered)
        try:
            call(w, v)
        finally:
            sys.setprofile(before)
        assert len(frames) == 1, (always, frames)


@pytest.mark.skipif(not native.active(), reason="machine code is off")
@pytest.mark.parametrize("call", [
    lambda w, v: F.mse_loss(w, v), lambda w, v: F.smooth_l1_loss(w, v, reduction="sum"),
    lambda w, v: w**1.000001, lambda w, v: w.long() ** 2.5,
    lambda w, v: torch.pow(w, float("inf")), lambda w, v: F.huber_loss(w, v),
])  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_what_a_chooser_leaves_to_torch_it_is_not_asked_again(call, grad):
    x = X.abs().requires_grad_(grad)
    w, v = W(x), W(Y)
    for _ in range(20):
        autofuse.materialize(call(w, v))
    autofuse.reset_stats()
    made = []
    called = functions_called(lambda: made.append(call(w, v)))
    assert "spelled" not in called and "chosen_by" not in called
    assert sum(autofuse.stats().eager_ops.values()) <= 2  # a cast is one, too
    want = call(x, Y)
    assert_same(made[0], want, 1e-6)
    assert made[0].requires_grad is want.requires_grad


@pytest.mark.parametrize("wrong", [
    lambda x: torch.clamp(x, min=0.5, inplace=False), lambda x: F.gelu(x, inplace=False),
    lambda x: torch.clamp(x, min=0.5, inplace=True), lambda x: torch.pow(x, 2, inplace=None),
    lambda x: torch.clamp(x, min=0.5, out=False), lambda x: torch.add(x, x, alpha=2, out=False),
    lambda x: x.clamp(min=0.5, out=None), lambda x: x.clamp(0.5, foreign=1),
])  # fmt: skip
def test_keywords_that_a_function_does_not_have(wrong, on):
    for _ in range(3):
        got, want = outcome(wrong, W(X)), outcome(wrong, X)
        assert isinstance(want, tuple) and got == want


@pytest.mark.skipif(not native.active(), reason="machine code is off")
def test_what_changes_while_a_chooser_is_asked_is_not_kept():
    """What runs in the middle, a handler of signals, say, sees other tensors than the key says."""
    w = W(torch.randn(5, 7))
    for _ in range(3):
        autofuse.materialize(w * 1.0)
    w.to(torch.float64)  # the second time it is asked

    def interfere(frame, event, arg):
        if event == "call" and frame.f_code is Choices.__call__.__code__:
            sys.setprofile(None)
            w.data = torch.randn(5, 7, dtype=torch.float64)

    before = sys.getprofile()
    sys.setprofile(interfere)
    try:
        w.to(torch.float64)
    finally:
        sys.setprofile(before)
    v = W(torch.randn(5, 7))
    for _ in range(3):
        autofuse.materialize(v * 1.0)
        assert v.to(torch.float64).dtype is torch.float64 and v.dtype is torch.float32


def test_what_a_handler_of_signals_raises_while_a_chooser_is_asked():
    def interrupted():
        signal.raise_signal(signal.SIGALRM)  # runs it at once

    def late(number, frame):
        raise RuntimeError("deadline")

    before = signal.signal(signal.SIGALRM, late)
    try:
        for asked in (Choices(interrupted), lambda: chosen_by(interrupted, (), {})):
            with pytest.raises(RuntimeError, match="deadline"):
                asked()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not native.active(), reason="machine code is off")
def test_what_is_met_once_is_not_asked_for(monkeypatch):
    asked = []
    choose = rows.SPELLINGS["lerp"]
    (choices,) = {
        id(data[2]): data[2] for name, _, data in protocol.HOT
        if name == "spelling" and data[0] is torch.lerp
    }.values()  # fmt: skip
    monkeypatch.setattr(choices, "choose", lambda *args: asked.append(args) or choose(*args))
    w = W(X)
    for k in range(2000):
        autofuse.materialize(torch.lerp(w, w, k / 8192))
    assert asked == []
    for _ in range(20):
        autofuse.materialize(torch.lerp(w, w, 0.75))
    assert len(asked) == 1


def test_nothing_is_held_of_what_a_chooser_fails_of():
    """Not until the collector comes: what is alive is stored."""

    def choose(x):
        return x.nothing

    gc.disable()
    try:
        for asked in (Choices(choose), lambda x: chosen_by(choose, (x,), {})):
            x = torch.ones(3)
            gone = weakref.ref(x)
            assert asked(x) is None
            del x
            assert gone() is None
    finally:
        gc.enable()


def test_of_a_chooser_that_fails_nothing_is_known():
    def choose(*args):
        raise TypeError

    choices = Choices(choose)
    assert choices(1) is None and choices("cpu") is None and choices(torch.device("cpu")) is None
