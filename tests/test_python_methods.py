"""Methods that torch has written in Python, and ops that stand eager: little runs, counted once."""

import operator

import pytest
import torch
import torch.nn.functional as F
from test_reductions import recording  # noqa: F401
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.dispatch.unrecorded import Known, known_functions, known_of
from autofuse.ops.row import OPS
from autofuse.record import policy
from autofuse.record.modes import forget_all
from support import NATIVE, assert_same, functions_called

X = torch.linspace(-2.0, 2.0, 24).view(4, 6)

METHODS = {
    "x ** 2": lambda x: x**2,
    "x ** 2.5": lambda x: x.abs() ** 2.5,
    "x ** complex": lambda x: x ** (1 + 2j),
    "x // 2": lambda x: x // 2,
    "2 // x": lambda x: 2 // x,
    "2 % x": lambda x: 2 % x,
    "2 << x": lambda x: 2 << x.long().abs(),
    "2 >> x": lambda x: 2 >> x.long().abs(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "unflatten wrong": lambda x: x.unflatten(1, (2, 2)),
    "x ** 'a'": lambda x: x ** "a",
    "'a' ** x": lambda x: "a" ** x,
    "x // 'a'": lambda x: x // "a",
    "[] // x": lambda x: [] // x,
    "'%s' % x": lambda x: "%s" % x.sum(),  # noqa: UP031
    "x.__rpow__": lambda x: x.__rpow__("a"),
    "plain // x": lambda x: torch.ones(4, 6) // x,
    "x // plain": lambda x: x // torch.ones(4, 6),
}  # fmt: skip

UNDERIVED = {"x // 2", "2 // x", "2 % x", "plain // x", "x // plain"}  # torch says so in backward


def outcome(call, x):
    try:
        return call(x)
    except Exception as error:
        return type(error), str(error)


def same(got, want):
    if isinstance(want, torch.Tensor):
        assert_same(autofuse.unwrap(got), want, 1e-6 if want.is_floating_point() else None)
    else:
        assert got is want or got == want


def test_what_torch_has_written_in_python_is_its_own():
    for function in vars(torch.Tensor).values():
        if callable(function) and not isinstance(function, type):
            known = known_of(function)
            assert known.own or known.writes, function


def test_a_patch_of_somebody_is_not(monkeypatch):
    def patch(self, other):
        return self

    decorate = torch._tensor._handle_torch_function_and_wrap_type_error_to_not_implemented
    monkeypatch.setattr(torch.Tensor, "__rmod__", decorate(patch))
    patched = torch.Tensor.__rmod__
    assert patched.__module__ != "torch._tensor" and not known_of(patched).own
    patched.__module__ = "torch._tensor"
    assert not known_of(patched).own and patched not in known_functions


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["wrapped", "pending"])
@pytest.mark.parametrize("name", METHODS)
def test_results_and_errors_are_eagers(name, kind, grad, on, tier):
    for _ in range(3):
        x, y = X.clone().requires_grad_(grad), X.clone().requires_grad_(grad)
        w = autofuse.wrap(x) if kind == "wrapped" else autofuse.wrap(x) * 1.0
        got, want = outcome(METHODS[name], w), outcome(METHODS[name], y * 1.0)
        same(got, want)
        if isinstance(want, torch.Tensor):
            assert got.requires_grad is want.requires_grad
            if want.requires_grad and want.dtype is X.dtype and name not in UNDERIVED:
                for result in (got, want):
                    result.sum().backward()
                assert_same(x.grad, y.grad, 1e-5)


@pytest.mark.parametrize("name", ["x // 2", "2 // x", "2 % x", "unflatten"])
def test_a_method_is_known_once(name, on, monkeypatch):
    made = []
    before = Known.__init__
    w = autofuse.wrap(X)
    monkeypatch.setattr(Known, "__init__", lambda *args: made.append(args) or before(*args))
    for _ in range(3):
        autofuse.materialize(METHODS[name](w))
    assert made == []


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["wrapped", "pending"])
@pytest.mark.parametrize("name", ["2 // x", "2 % x", "unflatten"])
def test_what_no_chain_takes_runs_as_torch_does(name, kind, grad):
    autofuse.config.native = True
    w = autofuse.wrap(X.clone().requires_grad_(grad))
    for _ in range(20):
        x = w * 1.0 if kind == "pending" else w
        METHODS[name](x)
    x = w * 1.0 if kind == "pending" else w
    autofuse.reset_stats()
    called = functions_called(lambda: METHODS[name](x))
    if kind == "wrapped":
        assert called == [] and list(autofuse.stats().eager_ops.values()) == [1]
    assert "run_eager" not in called  # a flush of a CPU's is Python's


@pytest.fixture
def short(monkeypatch):
    """An op alone is better off eager, as on a GPU."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 3.5)
    forget_all("test")
    yield
    forget_all("test")


# what is better off eager alone, and how it is spelled
ALONE = {
    "x ** 2": ("pow_2", lambda x: x**2),
    "x ** 2.0": ("pow_2", lambda x: x**2.0),
    "x // 2": ("floor_divide", lambda x: x // 2),
    "pow": ("pow_2", lambda x: torch.pow(x, 2)),
    "a method": ("pow_2", lambda x: x.pow(2)),
    "clamp": ("clamp_min", lambda x: x.clamp(min=0.5)),
    "F.leaky_relu": ("leaky_relu", lambda x: F.leaky_relu(x, 0.25)),
    "F.hardtanh": ("hardtanh", F.hardtanh),
    "F.smooth_l1_loss": ("smooth_l1", lambda x: F.smooth_l1_loss(x, -X, reduction="none")),
    "x * 2": ("mul", lambda x: x * 2.0),
    "plain + x": ("add", lambda x: torch.ones(4, 6) + x),
    "-x": ("neg", operator.neg),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_an_op_that_stands_alone_is_counted_once(name, grad, on, short):
    op, call = ALONE[name]
    x = X.clone().requires_grad_(grad)
    w = autofuse.wrap(x)
    for _ in range(4 * policy.TRIES):
        autofuse.materialize(call(w))
    autofuse.reset_stats()
    made = []
    called = functions_called(lambda: made.append(call(w)))
    (((counted, reason), times),) = autofuse.stats().eager_ops.items()
    row = OPS.get(op)  # some versions of torch differentiate otherwise
    ungraded = grad and row is not None and not row.grad
    why = "no derivative rule" if ungraded else "a chain of one op"
    assert (reason, times) == (why, 1) and counted.startswith(op[:4])
    assert not on or called == []
    assert_same(autofuse.unwrap(made[0]), call(x), 1e-6)


@pytest.mark.parametrize("call", [lambda x: F.softmax(x, -1), lambda x: x.softmax(-1),
                                  lambda x: x.sum(-1)])  # fmt: skip
def test_a_reduction_that_stands_alone_is_counted_once(call, on, recording, short):  # noqa: F811
    w = autofuse.wrap(X)
    for _ in range(4 * policy.TRIES):
        autofuse.materialize(call(w))
    autofuse.reset_stats()
    call(w)
    (((_, reason), times),) = autofuse.stats().eager_ops.items()
    assert (reason, times) == ("a chain of one op", 1)


REFUSED = {
    "a number that does not fit": lambda x: x == 300,
    "in place": lambda x: x.fmod_(300),
    "by a method": lambda x: x.ne(300),
    "out=": lambda x: torch.ne(x, 300, out=torch.empty(4, 6, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_chain_refuses_in_its_middle_is_counted_once(name, on):
    for _ in range(3):
        small = autofuse.wrap(X.to(torch.int8)) + 1
        autofuse.reset_stats()
        got = outcome(REFUSED[name], small)
        assert list(autofuse.stats().eager_ops.values()) == [1], autofuse.stats().eager_ops
        same(got, outcome(REFUSED[name], X.to(torch.int8) + 1))


def test_a_mode_is_told_of_a_method_as_torch_does(on):
    class Told(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            told.append(function.__name__)
            return function(*args, **(kwargs or {}))

    seen = []
    for x in (X, autofuse.wrap(X)):
        told: list[str] = []
        with Told():
            x**2, x // 2, 2 // x, 2 % x, x.unflatten(1, (2, 3))
        seen.append(told)
    assert seen[0] == seen[1]


TWICE = {
    "x * x": lambda x, y: x * x,
    "x * y, y * y": lambda x, y: x * y + y * y,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "addcmul of one": lambda x, y: torch.addcmul(y, y, y),
    "addcmul of the first": lambda x, y: torch.addcmul(x, y, x),
    "where": lambda x, y: torch.where(x > 0.0, y, y) * 2.0,
    "x ** x": lambda x, y: x.abs() ** x.abs(),
    "behind others": lambda x, y: (x * 2.0 + 1.0) * torch.lerp(y, y, y),
}


@pytest.mark.parametrize("kind", ["wrapped", "plain beside"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", TWICE)
def test_a_tensor_that_an_op_reads_twice_is_one_input(name, grad, kind, on, always):
    program, made = TWICE[name], []
    a, b, c, d = (t.clone().requires_grad_(grad) for t in (X, X + 1.0, X, X + 1.0))
    x, y = autofuse.wrap(a), autofuse.wrap(b) if kind == "wrapped" else b
    for _ in range(3):
        made[:] = [autofuse.materialize(program(x, y))]
    called = functions_called(lambda: made.append(program(x, y)))
    plain = grad and kind != "wrapped"  # what torch makes of that alone is an Input of its own
    assert not on or plain or called == []
    want = program(c, d)
    for got in made:
        assert_same(autofuse.unwrap(autofuse.materialize(got)).detach(), want.detach(), 1e-6)
    if grad:
        made[-1].sum().backward()
        want.sum().backward()
        for ours, theirs in ((a.grad, c.grad), (b.grad, d.grad)):
            assert (ours is None) is (theirs is None)
            if ours is not None:
                assert_same(ours, theirs, 1e-5)
