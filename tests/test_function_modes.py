"""Modes of torch functions: they are told what eager tells them; ops under them are recorded."""

import random
import threading

import pytest
import torch
import torch.nn.functional as F
from test_autograd_order import COUNT, SEED, Doubled, gradients, make_program, tensors
from torch.overrides import TorchFunctionMode

import autofuse
import cases
from autofuse.record.policy import FLUSH_US
from support import DEVICES, NATIVE, assert_same

W = autofuse.wrap


@pytest.fixture(params=NATIVE, ids=lambda on: "native" if on else "python", autouse=True)
def on(request, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", request.param)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


def facts(value):
    """What tells an argument from others, but for the class of a tensor."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            return str(value.dtype), tuple(value.shape), value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [facts(item) for item in value]
    return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value)


class Log(TorchFunctionMode):
    """Writes down what it is told of, and passes it on."""

    def __init__(self, told, name=""):
        super().__init__()
        self.told, self.name = told, name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        options = [(key, facts(value)) for key, value in (kwargs or {}).items()]
        self.told.append((self.name, func.__name__, facts(args), options))
        return func(*args, **kwargs or {})


def told_of(program, wrap, *args):
    """What a mode is told of, what comes of the program, and whether that was pending."""
    told = []
    args = [wrap(x.detach().clone().requires_grad_(x.requires_grad)) for x in args]
    with Log(told):
        result = program(*args)
        pending = isinstance(result, torch.Tensor) and autofuse.is_pending(result)
    return told, result, pending


def test_a_chain_under_a_mode_is_one_kernel():
    def program(x):
        y = (x * 2.0 + 1.0).relu() - torch.abs(x)
        y += x
        return torch.where(y > 1.0, y, x) * 0.5

    x = torch.linspace(-2, 2, 12)
    want, value, _ = told_of(program, torch.clone, x)
    for _ in range(3):
        autofuse.reset_stats()
        told, got, pending = told_of(program, W, x)
        assert told == want and type(got) is autofuse.Tensor and pending
        assert_same(got, value, None)
        stats = autofuse.stats()
        assert stats.kernels_launched == 1 and stats.ops_recorded == 9


def is_written(x, y):
    z = torch.zeros(3, 3)
    with torch.no_grad():
        z.copy_(x * y + 1)
        z[0] = (x * 2)[0]
    return z * x


def is_kept(x, y):
    a = x * y + 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        b = a.sigmoid() * a
    return b.chunk(3)[0] + 1


def is_held(x, y):
    a = (x * 2 + y).tanh()
    b = a[0]
    a.sum()
    return a, b, b * 2


def is_differentiated(x, y):
    a = (x * y + 1).sigmoid()
    if a.requires_grad:
        a.sum().backward()
    return a, F.layer_norm(a, (3,)).softmax(-1)


PROGRAMS = [is_written, is_kept, is_held, is_differentiated,
            lambda x, y: ((x * y + 1).sigmoid() - x).T[0].sum() * 2]  # fmt: skip


@pytest.mark.parametrize("setting", ["always_fuse", "measure", "check", "", "waiting"])
@pytest.mark.parametrize("way", ["fuse", "wrap"])
def test_a_mode_is_told_of_no_step_of_ours(way, setting, monkeypatch, request):
    """Such as grad mode, which is one, whatever becomes of a chain."""
    monkeypatch.setattr(autofuse.config, "always_fuse", setting in ("always_fuse", "waiting"))
    if setting == "waiting":
        request.getfixturevalue("eager_tier")
    elif setting and setting != "always_fuse":
        monkeypatch.setattr(autofuse.config, setting, True)
        monkeypatch.setitem(FLUSH_US, "cpu", 4.0)
    for program in PROGRAMS:
        function = autofuse.fuse(program) if way == "fuse" else program
        for k in range(12):
            x, y = torch.randn(3, 3).requires_grad_(k % 2 == 0), torch.randn(3)
            want, _, _ = told_of(program, lambda t: t, x, y)
            told, got, _ = told_of(function, W if way == "wrap" else lambda t: t, x, y)
            assert [name for _, name, *_ in told] == [name for _, name, *_ in want], k
            with Log(told := []):
                autofuse.materialize(got)
            assert not told, k


def test_what_was_pending_stays_so_in_a_handler_and_its_ops_are_recorded():
    class Scales(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            seen.append((autofuse.is_pending(args[0]), autofuse.is_pending(result)))
            return result * 2.0 if func is torch.sigmoid else result

    seen = []
    x = W(torch.ones(4))
    with Scales():
        y = x + 1.0
        z = torch.sigmoid(y)
        assert autofuse.is_pending(z)
    assert seen == [(False, True), (True, True)]
    assert_same(z, torch.sigmoid(torch.full((4,), 2.0)) * 2.0, 1e-6)
    assert autofuse.is_pending(x + 1.0)


def test_a_handler_may_read_write_hold_replace_and_raise():
    class Meddles(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = func.__name__
            if name == "relu":
                raise KeyError(name)
            if name == "abs":
                return "something else"
            if name == "neg":
                args = (args[0] + 1.0,)
            if name in ("mul", "__mul__"):
                sums.append(args[0].sum().item())
                args[0].add_(1.0)
            held.append(args)
            return func(*args, **kwargs or {})

    results = []
    for wrap in (torch.clone, W):
        sums, held = [], []
        x = wrap(torch.linspace(-2, 2, 12))
        with Meddles():
            y = -(x * 2.0) - 1.0
            with pytest.raises(KeyError, match="relu"):
                torch.relu(y)
            other = torch.abs(y)
            z = y * 3.0
        held = [[autofuse.unwrap(t) for t in args if isinstance(t, torch.Tensor)] for args in held]
        results.append([z + x, y, other, sums, *held])
    assert_same(results[1], results[0], None)


def test_modes_are_told_from_the_innermost_out():
    def program(x, told):
        with Log(told, "outer"):
            y = x * 2.0 + 1.0
            with Log(told, "inner"), torch.no_grad():
                z = F.softplus(y) - 2 / y
                with torch._C.DisableTorchFunction():
                    assert z.shape == y.shape
                with torch.device("cpu"):
                    z = z * torch.ones(4, 6)
            return z.type_as(y) + y.dtype.itemsize, y.sum()

    results = []
    for wrap in (lambda t: t, W, W):
        told = []
        x = wrap(torch.linspace(0.5, 2, 24).view(4, 6).requires_grad_())
        program(x, told)
        results.append(told)
    assert results[0] == results[1] == results[2]


def test_threads_have_modes_of_their_own():
    told, found = [], []
    x = W(torch.ones(4))

    def work():
        y = x * 3.0
        found.append(autofuse.is_pending(y))
        with Log(found):
            autofuse.materialize(pending)

    with Log(told):
        pending = x * 2.0
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        y = pending + 1.0
    assert found == [True] and len(told) == 2 and y.tolist() == [3.0] * 4


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_every_spelling_is_told_as_in_eager(device, grad):
    recorded = 0
    for table, count in (("FLOAT_CALLS", 1), ("PAIR_CALLS", 2), ("TRIPLE_CALLS", 3)):
        for name, call in getattr(cases, table).items():
            xs = [(torch.rand(3, 4, device=device) + 0.5) for _ in range(count)]
            xs[0].requires_grad_(grad)
            want, *_ = told_of(call, lambda t: t, *xs)
            for _ in range(2):
                told, _, pending = told_of(call, W, *xs)
                assert told == want, name
                recorded += pending
    assert recorded > 200


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_under_a_mode(device):
    """Ops that are recorded and that are not, views, writes, Functions; then backward."""
    rng = random.Random(SEED + 2)
    for number in range(COUNT // 2):
        source = make_program(rng, device)
        values = tensors(5, device, number)
        values[4] = values[4][0]
        space = {"torch": torch, "F": F, "Doubled": Doubled}
        exec(source, space)

        def result(wrap, run=space["run"], values=values):
            told = []

            def under(*args):
                with Log(told):
                    return run(*args)

            return gradients(under, values, wrap, "backward"), told

        want = result(lambda t: t)
        for _ in range(2):
            got = result(W)
            try:
                assert_same(got[0], want[0], None)
                assert got[1] == want[1]
            except AssertionError as error:
                raise AssertionError(
                    f"program {number} of {SEED + 2}\n{source}\n{error}"
                ) from error


@pytest.mark.parametrize("measure", [False, True])
def test_a_fused_call_tells_what_its_function_does(measure, monkeypatch):
    monkeypatch.setattr(autofuse.config, "measure", measure)

    def gate(x, y):
        z = torch.abs(x + y)
        return z * y + (1 - z) * x

    x, y = torch.linspace(-1, 1, 6), torch.linspace(0, 2, 6)
    want, value, _ = told_of(gate, torch.clone, x, y)
    fused = autofuse.fuse(gate)
    for _ in range(50):
        told, got, _ = told_of(fused, torch.clone, x, y)
        assert told == want and type(got) is torch.Tensor
        assert_same(got, value, None)
    assert measure or autofuse.stats().kernels_launched == 50


def test_modes_of_dtype_and_grad_change_in_a_mode():
    def program(x):
        y = x / 2
        torch.set_default_dtype(torch.float64)
        try:
            z = x / 2
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            a = y * 3.0
        with torch.inference_mode():
            b = y * 4.0
        with torch.autocast("cpu", torch.bfloat16):
            c = y * 5.0
        return [y, z, a, b, c, y + 1.0]

    want, values, _ = told_of(program, torch.clone, torch.arange(3))
    told, got, _ = told_of(program, W, torch.arange(3))
    assert told == want
    assert_same(got, values, None)
    assert autofuse.stats().ops_recorded >= 6
