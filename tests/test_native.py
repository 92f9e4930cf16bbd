"""The hot path as machine code and as Python: both are there, and do the same."""

import builtins
import contextlib
import functools
import gc
import operator
import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch._functorch.utils as functorch_utils
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse import lending
from autofuse.chain import meta as metas
from autofuse.chain import state
from autofuse.chain.meta import plain_meta
from autofuse.chain.shell import alias
from autofuse.dispatch import handlers as tensor
from autofuse.dispatch import protocol
from autofuse.dispatch.protocol import HANDLERS
from autofuse.errors import ColdKernelError, NotReadyError
from autofuse.hot import c, native
from autofuse.hot.c import GIVEN
from autofuse.ops.row import OPS
from autofuse.record import flush as flushing
from autofuse.record import in_place, joins, modes, numbers, record, writes
from autofuse.run import cpu
from autofuse.torch_private import keys_of
from support import DEVICES, assert_same, failable_launches, functions_called, let_fail

# where machine code has to be: Python 3.10 has the function that it calls most in headers alone
SUPPORTED = (
    (sys.implementation.name, sys.platform, platform.machine()) == ("cpython", "linux", "x86_64")
    and (3, 11) <= sys.version_info < (3, 14)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
OFF = os.environ.get("AUTOFUSE_NATIVE") == "0"
pytestmark = pytest.mark.skipif(
    OFF or not (SUPPORTED or native.active()),
    reason="AUTOFUSE_NATIVE is 0" if OFF else f"no machine code here: {native.absent}",
)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def as_python():
    autofuse.config.native = False
    yield
    autofuse.config.native = True


@pytest.fixture(autouse=True)
def by_itself(alone):
    """Beside threads that have recorded anything Python writes."""


def from_c(function):
    """`function`, called from C: Python 3.11 runs the bodies of others by itself."""
    return functools.partial(function)


# --- it is in use, and by which calls ----------------------------------------------------------


def test_it_is_in_use():
    """Where it is not, everything works and is slower by half: nothing else would tell."""
    assert native.active(), native.absent


@pytest.mark.parametrize("before", [
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_device('meta')",
    "torch.inference_mode().__enter__()",
    "torch.set_grad_enabled(False)",
])  # fmt: skip
def test_it_is_in_use_whatever_is_on_where_autofuse_is_imported(before):
    if not native.active():
        pytest.skip("machine code is off here")
    program = f"import torch\n{before}\nimport autofuse\nfrom autofuse.hot import native\n"
    program += "print(native.active(), native.absent)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert told.stdout.startswith("True"), told.stdout


def test_in_a_thread_that_has_recorded_nothing_ops_pass_from_the_second_on():
    names = []

    def run():
        x = autofuse.wrap(torch.ones(4, 4))
        for _ in range(2):
            names.append(functions_called(lambda: (x[0], torch.mm(x, x), x.view(-1))))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    first, second = names
    assert "run_eager" in first and second == []


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0


@pytest.mark.parametrize("hot", [False, True], ids=["Python", "machine code"])
def test_a_fused_call_looks_into_no_module(hot, device, always, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", hot)
    fused, x = autofuse.fuse(Scaled()), torch.rand(4, 4, device=device)
    for _ in range(4):
        names = functions_called(lambda: fused(x))
    assert not {"enter", "is_container"}.intersection(names) and "call_fused" in names
    assert_same(fused(x), Scaled()(x), 1e-6)


@pytest.mark.parametrize("of", ["vmap", "jvp", "grad"])
def test_in_a_thread_that_has_been_in_levels_of_torch_func_alone_too(of, device, always):
    """Its wrapped tensors are met there first, where nothing is recorded."""
    names, results = [], []
    plain = torch.rand(4, 4, device=device)

    def transformed(function, x):
        if of == "vmap":
            return torch.vmap(function)(x)
        row, ones = plain[2], torch.ones(4, device=device)
        if of == "jvp":
            return torch.func.jvp(function, (row,), (ones,))[1]
        return torch.func.grad(lambda row: function(row).sum())(row)

    def run():
        x = autofuse.wrap(plain.clone())

        def level(row):
            names.append(functions_called(lambda: results.append(torch.mm(x, x)[0] + row)))
            return x[1] * row

        for _ in range(3):
            results.append(transformed(level, x))
        results.append(x * 2.0 + 1.0)  # and records outside of them
        pending.append(autofuse.is_pending(results[-1]))

    pending = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "run_eager" in names[0] and "run_eager" not in names[2] and pending == [True]
    want = transformed(lambda row: plain[1] * row, plain)
    for result in (results[1], results[3], results[5]):
        assert_same(autofuse.materialize(result), want, None)
    assert_same(autofuse.materialize(results[-1]), plain * 2.0 + 1.0, 1e-6)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Operands:
    """What the programs below compute with."""

    def __init__(self):
        self.x, self.v, self.w = (autofuse.wrap(torch.ones(4, 4)) for _ in range(3))
        self.plain, self.flags = torch.eye(4), autofuse.wrap(torch.ones(3, dtype=torch.bool))

    def flush(self):
        self.x * 2.0
        from_c(flushing.flush)(state.this_thread.current, "test")

    def inplace(self):
        made = self.x * 2.0
        from_c(in_place.record_inplace)(OPS["add"], made, (made, self.v))

    def write(self):
        made = self.v * 2.0
        from_c(writes.record_write)(OPS["sub"], self.w, (self.w, made))

    def flush_thread(self):
        self.x * 2.0
        from_c(flushing.flush_thread)("test")

    def lend(self):
        lent = []
        from_c(lending.lend)((self.plain, 1.0, self.x), lent)
        from_c(lending.restore)(lent)

    def give(self):
        with modes.closed("test"):
            from_c(functorch_utils.unwrap_dead_wrappers)((self.x, 1.0, {}))

    def answer(self):
        leaf = torch.nn.Parameter(self.plain.clone())
        with torch.enable_grad():
            (self.x * leaf + 1.0).sigmoid().sum().backward()


ONLY = (autofuse.Tensor,)
# machine functions: the Python function that each stands for, and a call from C that leads there
ENTERED = {
    "handler": ("handler", lambda o: from_c(autofuse.Tensor.__mul__)(o.x, 2.0)),
    "reflected": ("reflected", lambda o: from_c(autofuse.Tensor.__rmul__)(o.x, o.plain)),
    "record": ("record", lambda o: from_c(record.record)(OPS["add"], (o.x, o.v))),
    "record_inplace": ("record_inplace", Operands.inplace),
    "record_write": ("record_write", Operands.write),
    "flush": ("flush", Operands.flush),
    "materialize": ("materialize", lambda o: from_c(autofuse.materialize)(o.x * 2.0)),
    "flush_pending": ("flush_thread", Operands.flush_thread),
    "lending": ("lend", Operands.lend),
    "restoring": ("restore", Operands.lend),
    "becoming_plain": (
        "become_plain", lambda o: from_c(lending.become_plain)(autofuse.wrap(o.plain))
    ),
    "follows": ("number_next", lambda o: from_c(numbers.number_next)(
        state.recorder_for(o.x.device).chain)),
    "answer": ("answer", Operands.answer),
    "keeping": ("forward", Operands.answer),
    "differentiating": ("apply_backward", Operands.answer),
    "applying": ("apply", lambda o: from_c(Through.apply)(o.x)),
    "giving": ("call", Operands.give),
    "writing": ("call", lambda o: from_c(autofuse.Tensor.mul_)(o.w, o.v)),
    "passing": ("call", lambda o: from_c(autofuse.Tensor.mm)(o.x, o.plain)),
    "running": ("call", lambda o: from_c(autofuse.Tensor.unique)(o.x)),
    "turning": ("_rmatmul", lambda o: from_c(autofuse.Tensor.__rmatmul__)(o.x, o.plain)),
    "altering": ("call", lambda o: from_c(autofuse.Tensor.requires_grad_)(o.w, False)),
    "granting": ("call", lambda o: from_c(vars(autofuse.Tensor)["grad"].fset)(o.w, None)),
    "setting_attribute": (
        "__setattr__", lambda o: from_c(autofuse.Tensor.__setattr__)(o.w, "one", None)
    ),
    "spelling": (
        "spelled", lambda o: from_c(protocol.OPTIONS[torch.nn.functional.relu])(o.w, inplace=True)
    ),
    "joining": ("call", lambda o: from_c(torch.cat)((o.x, o.x))),
    "reducing": ("call", lambda o: from_c(autofuse.Tensor.sum)(o.x)),
    "composing": ("call", lambda o: from_c(HANDLERS[torch.nn.functional.normalize])(o.x)),
    "viewing": ("call", lambda o: from_c(autofuse.Tensor.t)(o.x)),
    "returning": ("call", lambda o: from_c(autofuse.Tensor.contiguous)(o.x)),
    "making": ("call", lambda o: from_c(HANDLERS[torch.zeros_like])(o.x * 2.0)),
    "getting": ("get", lambda o: from_c(vars(autofuse.Tensor)["shape"].fget)(o.x)),
    "asking": ("read", lambda o: from_c(autofuse.Tensor.size)(o.x, 0)),
    "setting": ("call", lambda o: from_c(autofuse.Tensor.__setitem__)(o.w, 0, 1.0)),
    "copying": ("call", lambda o: from_c(autofuse.Tensor.copy_)(o.w[1], o.v[0] * 2.0)),
    "unread": ("call", lambda o: from_c(torch.Tensor.add_)(o.plain, 0.0)),
    "announcing": ("call", lambda o: from_c(torch.instance_norm)(
        o.plain[None], None, None, None, None, True, 0.1, 1e-5, False)),
    "placing": ("set_", lambda o: from_c(torch.Tensor.grad.fset)(o.plain, None)),
    "taking": ("get", lambda o: from_c(torch.Tensor.grad.fget)(o.plain)),
    "torch_function": (
        "torch_function", lambda o: from_c(protocol.torch_function)(torch.tanh, ONLY, (o.x,))
    ),
    "ask_overrides": (
        "ask_overrides",
        lambda o: from_c(protocol.ask_overrides)(torch.nn.functional.silu, (o.x,), o.x),
    ),
}  # fmt: skip


def python_functions(program, on, monkeypatch):
    """Python functions of autofuse that run in the fifth run of `program`, native `on` or not."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    autofuse.config.native = on
    operands = Operands()
    try:
        with torch.no_grad():
            autofuse.materialize(operands.x * 1.0)  # a thread that never records has no recorder
            for _ in range(4):
                program(operands)
                flushing.flush_all("test")
            return functions_called(lambda: program(operands))
    finally:
        autofuse.config.native = True


def test_a_name_means_the_same_in_every_stage():
    """Their namespaces are one; a stage's name for another thing would hide it."""
    names = {**vars(builtins), **native._given(), "PYTHON": None}
    for stage in (native.c, *native._STAGES):
        for name, value in vars(stage).items():
            if not name.startswith("__") and value is not GIVEN:
                assert names.setdefault(name, value) is value, (stage.__name__, name)


def test_chains_of_inference_tensors_are_recorded_by_machine_code(device):
    """Beside tensors that were made in no such mode, of the same sizes."""
    if not native.active():
        pytest.skip("there is none")
    outer, weight = (
        torch.randn(4, 4, device=device),
        torch.nn.Parameter(torch.ones(4, device=device)),
    )
    with torch.inference_mode():
        inner = torch.randn(4, 4, device=device)

        def program():
            h = torch.mm(w, matrix) * outer + inner
            return torch.tanh(h * weight) - w

        w, matrix = autofuse.wrap(inner.clone()), torch.eye(4, device=device)
        want = torch.tanh((torch.mm(inner, matrix) * outer + inner) * weight) - inner
        for _ in range(4):
            got = autofuse.unwrap(autofuse.materialize(program()))
        assert_same(got, want, 1e-6 if device == "cpu" else None)
        assert got.is_inference()
        results = []
        assert functions_called(lambda: results.append(program())) == []
        assert autofuse.is_pending(results[0])
        outer.add_(0)  # a write that autofuse sees: what is recorded has read the value of before
        assert_same(autofuse.unwrap(autofuse.materialize(results[0])), got, None)


def test_a_wrapped_inference_tensor_is_one(device):
    """Wherever it is wrapped: what eager forbids outside is forbidden."""
    with torch.inference_mode():
        x = torch.ones(3, device=device)
        inside = autofuse.wrap(x)
    for w in (autofuse.wrap(x), inside):  # torch writes, and then raises
        assert w.is_inference() and (w * 2.0).tolist() == (x * 2.0).tolist()
        for forbidden in (
            lambda t: t.add_(1.0),
            lambda t: t._version,
            lambda t: t.requires_grad_(),
        ):
            with pytest.raises(RuntimeError) as here:
                forbidden(w)
            with pytest.raises(RuntimeError) as there:
                forbidden(x)
            assert str(here.value) == str(there.value)
        before = x.tolist()
        with torch.inference_mode():
            w.mul_(2.0)
        assert x.tolist() == [2 * one for one in before]


@pytest.mark.parametrize("grad", [False, True])
def test_wrapped_tensors_of_all_kinds_are_known_apart(grad, device, monkeypatch):
    """A chain reads what they are, by C++ or by Python, wherever like ones have come before."""
    x = torch.randn(6, 4, device=device)
    kinds = [x, x.t(), x[:, ::2], x[1:], x.half(), x.double(), x[None], x[0], x.int(), x.bool(),
             x.clone().requires_grad_(), torch._neg_view(x), x[0, 0], x[:0]]  # fmt: skip
    with torch.inference_mode():
        kinds.append(x.clone())
    one = autofuse.wrap(torch.ones((), device=device))
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    order = torch.randint(len(kinds), (300,), generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        for k in order.tolist():
            w = alias(kinds[k])  # of which nothing is known
            y = w * 2
            if not kinds[k].is_neg():
                assert w._af is plain_meta(kinds[k])
            assert torch.equal(autofuse.unwrap(y), kinds[k] * 2)
            assert_same(kinds[k] * one, kinds[k] * autofuse.unwrap(one), None)  # reflected
            assert_same(torch.sub(2.5 + w, one), 2.5 + kinds[k] - 1.0, None)


def test_every_machine_function_has_its_line_here():
    assert ENTERED.keys() == {name for name, _, _ in native._hot()}


@pytest.mark.parametrize("name", ENTERED)
def test_each_machine_function_runs_instead_of_the_one_it_stands_for(name, monkeypatch):
    stands_for, program = ENTERED[name]
    assert stands_for in python_functions(program, False, monkeypatch)
    assert stands_for not in python_functions(program, True, monkeypatch)


def differentiable(device):
    """A leaf, what a chain makes of it, and the Backward of that, which machine code has run."""
    leaf = torch.rand(4, 4, device=device).requires_grad_()
    y = autofuse.materialize((autofuse.wrap(leaf) * 2.0 + 1.0).sigmoid())
    for _ in range(3):
        torch.autograd.grad(y, leaf, torch.ones_like(y), True)
    return leaf, y, y.grad_fn.work[0]


def test_gradients_of_several_layouts_need_python_once_each(device, always, monkeypatch):
    leaf, y, _ = differentiable(device)
    plain = leaf.detach().clone().requires_grad_()
    eager = (plain * 2.0 + 1.0).sigmoid()
    dense, spread = torch.ones(4, 4, device=device), torch.ones((), device=device).expand(4, 4)
    for g in (dense, spread, dense.t(), dense, spread):
        found = []
        for _ in range(4):
            run = lambda _: found.append(torch.autograd.grad(y, leaf, g, True)[0])  # noqa: B023, E731
            names = python_functions(run, True, monkeypatch)
        assert "apply_backward" not in names
        (want,) = torch.autograd.grad(eager, plain, g, True)
        for one in found:
            assert_same(one, want, 1e-6)
    for g in (dense, spread, dense.t()) * 2:  # by turns, as in a loop's last steps and others
        run = lambda _: torch.autograd.grad(y, leaf, g, True)  # noqa: B023, E731
        assert "apply_backward" not in python_functions(run, True, monkeypatch)


def gated(x):
    """A value and one of it and of a part beside it; the node of the first has further outputs."""
    gate, part = (x * 2.0).chunk(2, 1)
    state = torch.sigmoid(gate) * 3.0
    return state, torch.sigmoid(part) * torch.tanh(state)


def materialized(x):
    return [autofuse.materialize(value) for value in gated(autofuse.wrap(x))]


def test_gradients_of_several_values_of_a_node_need_python_once_each(device, always, monkeypatch):
    """Of the value that it is named after and of a part that what comes later reads, too."""
    leaf = torch.rand(4, 8, device=device).requires_grad_()
    plain = leaf.detach().clone().requires_grad_()

    found = materialized(leaf)
    assert len(found[0].grad_fn.work[0].segment.outs) > 1
    wanted = gated(plain)
    dense, spread = torch.rand(4, 4, device=device), torch.ones((), device=device).expand(4, 4)
    for given in (
        [dense, dense], [dense, None], [None, dense], [spread, dense], [dense.t(), spread],
        [dense, dense],
    ):  # fmt: skip
        of = [k for k in range(2) if given[k] is not None]

        def gradient(values, x):
            some = [values[k] for k in of], x, [given[k] for k in of]  # noqa: B023
            return torch.autograd.grad(*some, retain_graph=True)[0]

        got = []
        for _ in range(4):
            run = lambda _: got.append(gradient(found, leaf))  # noqa: B023, E731
            names = python_functions(run, True, monkeypatch)
        if given[1] is not None:  # without the part's gradient torch joins what there is
            assert not {"apply_backward", "gradients"}.intersection(names), given
        want = gradient(wanted, plain)
        for one in got:
            assert_same(one, want, 1e-6)


@pytest.mark.parametrize("hot", [False, True], ids=["Python", "machine code"])
def test_errors_of_a_backwards_kernel(hot, device, always, monkeypatch, capsys):
    """Torch computes what a kernel cannot; what is no error of ours comes through."""
    monkeypatch.setattr(autofuse.config, "native", hot)
    for error, comes in (
        (NotReadyError("x"), False), (RuntimeError("no kernel"), False),
        (ColdKernelError("x"), True), (KeyboardInterrupt(), True),
    ):  # fmt: skip
        monkeypatch.setattr(autofuse.errors, "_said", set())
        leaf, y, backward = differentiable(device)
        want = torch.autograd.grad(y, leaf, torch.ones_like(y), True)

        def fail(*args, error=error):
            raise error

        let_fail(backward, fail)
        if comes:
            with pytest.raises(type(error)):
                torch.autograd.grad(y, leaf, torch.ones_like(y), True)
        else:
            assert_same(torch.autograd.grad(y, leaf, torch.ones_like(y), True), want, 1e-6)
        backward.layouts.clear()  # other nodes have it, too
        backward.usual = ()
        told = "the kernel of a backward failed" in capsys.readouterr().err
        assert told is (type(error) is RuntimeError)


@pytest.mark.skipif(not hasattr(torch.Tensor, "rename"), reason="torch without named tensors")
@pytest.mark.filterwarnings("ignore:Named tensors", "ignore:Autograd was passed a named grad")
@pytest.mark.parametrize("named", [[0], [1], [0, 1]], ids=str)
def test_gradients_with_names_are_not_taken_for_none(named, device, always):
    leaf, ones = torch.rand(4, 8, device=device).requires_grad_(), torch.ones(4, 4, device=device)
    plain = leaf.detach().clone().requires_grad_()
    for _ in range(3):  # kernels for both gradients and for the second alone are known
        torch.autograd.grad(materialized(leaf), leaf, [ones, ones])
        torch.autograd.grad(materialized(leaf)[1], leaf, ones)
    given = [ones.rename("a", "b") if k in named else ones for k in range(2)]
    for of in ([0, 1], [1]):
        want, *found = (
            torch.autograd.grad([values[k] for k in of], x, [given[k] for k in of], True)[0]
            for values, x in ((gated(plain), plain), *[(materialized(leaf), leaf)] * 3)
        )
        for one in found:
            assert one.names == want.names
            assert_same(one.rename(None), want.rename(None), 1e-6)


@pytest.mark.parametrize("hot", [False, True], ids=["Python", "machine code"])
@pytest.mark.parametrize("first", [False, True], ids=["known", "first"])
def test_modes_see_nothing_of_a_node_that_eager_would_not(hot, first, device, always, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", hot)
    modes.forget_all("test")
    leaf, ones = torch.rand(4, 8, device=device).requires_grad_(), torch.ones(4, 4, device=device)
    for _ in range(0 if first else 4):
        torch.autograd.backward(materialized(leaf), [ones, ones])
    leaf.grad, seen = None, []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    values, eager = materialized(leaf), gated(leaf.detach().clone().requires_grad_())
    assert len(values[0].grad_fn.work[0].segment.outs) > 1
    with Looking():
        torch.autograd.backward(values, [ones, ones])
    ours, seen[:] = [*seen], []
    with Looking():
        torch.autograd.backward(eager, [ones, ones])
    assert ours == seen


@pytest.mark.parametrize("hot", [False, True], ids=["Python", "machine code"])
@pytest.mark.parametrize(
    "unpack",
    [
        lambda t: t.double(),
        lambda t: t.t().contiguous().t() if t.ndim == 2 else t.double(),
        lambda t: torch._neg_view(-t),
        lambda t: t[None],
        lambda t: torch.nn.Parameter(t.clone()),
        lambda t: autofuse.wrap(t.clone()),
        lambda t: autofuse.wrap(t.clone()) * 1.0,
    ],
    ids=[
        "another dtype",
        "other strides",
        "negated",
        "a dimension more",
        "a parameter",
        "wrapped",
        "pending",
    ],
)
def test_hooks_on_what_a_node_has_saved_may_give_it_back_in_another_form(
    unpack, hot, device, always, monkeypatch
):
    """They come once a kernel for its layout is known, of which nobody else is told."""
    monkeypatch.setattr(autofuse.config, "native", hot)
    leaf, ones = torch.rand(4, 8, device=device).requires_grad_(), torch.ones(4, 4, device=device)
    plain = leaf.detach().clone().requires_grad_()
    want = torch.autograd.grad(gated(plain), plain, [ones, ones])[0]
    for _ in range(4):
        torch.autograd.grad(materialized(leaf), leaf, [ones, ones])
    met = []
    for which in range(2):
        values = materialized(leaf)
        backward, _ = values[which].grad_fn.work
        assert len(backward.segment.pack) == (0, 2)[which]  # two values in one tensor
        for saved in values[which].grad_fn._raw_saved_tensors:
            saved.register_hooks(torch.Tensor.detach, lambda t: met.append(t) or unpack(t))
        assert_same(torch.autograd.grad(values, leaf, [ones, ones])[0], want, 1e-6)
        assert len(met) > which


@pytest.mark.parametrize(
    "usual",
    [
        (7,), ((),), ((1, 2, 3),), ((int, (1,), ()),), ((int, ((1,),), ()),),
        ((int, ((1, 2),), ()),), ((int, (), 7),),
    ],
    ids=str,
)  # fmt: skip
def test_machine_code_checks_what_it_is_to_know_of_a_node(usual, device, always):
    leaf, y, backward = differentiable(device)
    want = torch.autograd.grad(y, leaf, torch.ones_like(y), True)
    backward.usual = usual
    try:
        assert_same(torch.autograd.grad(y, leaf, torch.ones_like(y), True), want, None)
    finally:
        backward.usual = ()  # other nodes have it, too


@pytest.mark.parametrize("hot", [False, True], ids=["Python", "machine code"])
@pytest.mark.parametrize("work", [7, (), (1, 2), (None, ())], ids=str)
def test_who_writes_into_a_node_gets_an_error(work, hot, device, always, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", hot)
    leaf, y, _ = differentiable(device)
    y.grad_fn.work = work
    with pytest.raises((TypeError, ValueError, AttributeError)):
        torch.autograd.grad(y, leaf, torch.ones_like(y))


# where Python, and no C, asks for what is pending
ASKING = {
    "autofuse.materialize": lambda o: autofuse.materialize(o.x * 2.0),
    "repr": lambda o: repr(o.x * 2.0),
    "Function.apply": lambda o: Kept.apply(o.x * 2.0),
    "inference mode": lambda o: inferred(o.x * 2.0),
    "flush_thread": lambda o: (o.x * 2.0, flushing.flush_thread("test")),
}


def inferred(x):
    with torch.inference_mode():
        return x


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()


@pytest.mark.parametrize("name", ASKING)
def test_what_python_asks_for_is_flushed_by_machine_code(name, monkeypatch):
    program = ASKING[name]
    assert "flush" in python_functions(program, False, monkeypatch)
    assert "flush" not in python_functions(program, True, monkeypatch)


# what people write, and the first Python function that runs where there is no machine code
WRITTEN = {
    "x * 2.0": ("handler", lambda o: o.x * 2.0),
    "torch.sigmoid(x)": ("torch_function", lambda o: torch.sigmoid(o.x)),
    "torch.mm(x, plain)": ("torch_function", lambda o: torch.mm(o.x, o.plain)),
    "x @ plain": ("call", lambda o: o.x @ o.plain),
    "w *= v": ("call", lambda o: operator.imul(o.w, o.v)),
    "x.sigmoid()": ("handler", lambda o: o.x.sigmoid()),
    "Tensor.sigmoid(x)": ("handler", lambda o: autofuse.Tensor.sigmoid(o.x)),
    "x.size(0)": ("read", lambda o: o.x.size(0)),
    "x.mm(plain)": ("call", lambda o: o.x.mm(o.plain)),
    "w.mul_(v)": ("call", lambda o: o.w.mul_(o.v)),
    "F.mish(x)": ("ask_overrides", lambda o: torch.nn.functional.mish(o.x)),
    "F.relu(x)": ("ask_overrides", lambda o: torch.nn.functional.relu(o.x)),
    "F.normalize(x)": ("ask_overrides", lambda o: torch.nn.functional.normalize(o.x)),
    "torch.cdist(x, x)": ("ask_overrides", lambda o: torch.cdist(o.x, o.x)),
    "x.unique()": ("call", lambda o: o.x.unique()),
    "w.zero_()": ("call", lambda o: o.w.zero_()),
    "w.copy_(v)": ("call", lambda o: o.w.copy_(o.v)),
    "torch.roll of tuples": ("torch_function", lambda o: torch.roll(o.x, (1, 2), (0, 1))),
    "torch._is_all_true": ("torch_function", lambda o: torch._is_all_true(o.flags)),
}


# values that views are taken of, and ops in place on them
VIEWED = {
    "a view that is read": lambda x, g: operator.iadd(x * g[:, None], x),
    "a view of its operand": lambda x, g: operator.imul((x * 2.0)[1:] + 1.0, 2.0),
    "a view that is gone": lambda x, g: operator.iadd(one_of((x * 2.0), lambda y: y[1:]), x),
    "twice": lambda x, g: operator.iadd(x * g[:, None], x).mul_(g[:, None]),
    "by a function": lambda x, g: F.relu(x * g[:, None], inplace=True),
    "a join before it": lambda x, g: torch.cat([x * 2.0, x + g[:, None]]).add_(1.0),
}


def one_of(y, view):
    view(y)
    return y


@pytest.mark.parametrize("name", VIEWED)
def test_ops_in_place_beside_views_take_no_python(name, monkeypatch):
    """Unless somebody holds a view of what is written, who sees that; see test_views."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, g = autofuse.wrap(torch.rand(4, 6)), autofuse.wrap(torch.rand(4))
    want = VIEWED[name](autofuse.unwrap(x), autofuse.unwrap(g))
    got = []

    def program():
        got[:] = [VIEWED[name](x, g * 1.0)]

    assert_recorded_without_python(program)
    assert_same(autofuse.unwrap(autofuse.materialize(got[0])), want, 1e-6)


@pytest.mark.parametrize("text", WRITTEN)
def test_what_runs_by_machine_code_alone(text, monkeypatch):
    first, program = WRITTEN[text]
    assert python_functions(program, False, monkeypatch)[0] == first
    assert not python_functions(program, True, monkeypatch)


def test_gradients_of_wrapped_tensors_take_no_more_python():
    def functions(x, y):
        def program():
            torch.autograd.grad(y, x, retain_graph=True)
            torch.autograd.grad([y], [x, x], torch.ones(()), retain_graph=True)
            y.backward(retain_graph=True)

        for _ in range(4):
            program()
        return functions_called(program)

    x = torch.ones(3, requires_grad=True)
    plain = functions(x, torch.dot(x, x))
    w = autofuse.wrap(torch.ones(3, requires_grad=True))
    assert functions(w, torch.dot(w, w)) == plain


# --- it does what Python does ------------------------------------------------------------------


def steps(w, v, p, row):
    """What machine code does: operators, torch functions, new Inputs, in-place ops, a matmul."""
    for k in range(4):
        t = (w * 2.0 + p) * v
        t = torch.where(t > 0, torch.sin(t), t @ t.t() if k == 9 else t)
        t.mul_(k + 1)
        yield autofuse.materialize(t)
        yield torch.mm(w, v.t()) - 1
        w.add_(v, alpha=0.5)
        w.addcmul_(v.exp(), v)
        p.mul_(row * 0.5 - p)
        p.sub_(row)


def run(device="cpu"):
    torch.manual_seed(0)
    x, z = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    w, v, p = autofuse.wrap(x), autofuse.wrap(z), torch.nn.Parameter(torch.ones(6, device=device))
    row = autofuse.wrap(torch.full((6,), 3.0, device=device))
    with torch.no_grad():
        values = [t.tolist() for t in steps(w, v, p, row)]
        return values + [w.tolist(), w._version, p.tolist(), p._version]


def test_same_results_and_counters(device):
    got = []
    for on in (True, False, True):
        autofuse.config.native = on
        assert native.active() is on
        run(device)
        autofuse.reset_stats()
        got.append((run(device), autofuse.stats()))
    assert got[0][0] == got[1][0] == got[2][0]
    assert got[0][1] == got[1][1] == got[2][1]


def assert_recorded_without_python(program):
    with torch.no_grad():
        for _ in range(3):
            program()
            flushing.flush_all("test")
        assert functions_called(program) == []
        flushing.flush_all("test")


@pytest.mark.parametrize("count", (2, 5, 70))
def test_inputs_have_their_slots_when_python_asks(count, monkeypatch, device):
    """Machine code adds Inputs and looks through them; it knows no more than 64 by number."""
    monkeypatch.setattr(autofuse.config, "max_inputs", 100)
    monkeypatch.setattr(autofuse.config, "max_nodes", 1000)
    monkeypatch.setattr(autofuse.config, "loop_nodes", 1000)
    xs = [autofuse.wrap(torch.full((4,), float(k), device=device)) for k in range(count)]
    with torch.no_grad():
        for run in range(4):
            total = xs[0] * 1.0
            for x in [*xs[1:], *xs]:  # each again, when it is known
                total = total + x
            chain = state.recorder_for(xs[0].device).chain
            assert chain.slots == {id(x): ~k for k, x in enumerate(xs)} and len(chain) == 2 * count
            if run % 2:  # Python goes on where machine code was, and the other way round
                autofuse.config.native = False
                total = total + xs[-1]
                autofuse.config.native = True
                total = total - xs[-1]
                assert chain.slots == {id(x): ~k for k, x in enumerate(xs)}
            assert autofuse.materialize(total).tolist() == [count * (count - 1.0)] * 4


def test_other_holders_of_a_value_lead_to_another_runner(device):
    """A flush tries the reference counts of the last one first."""
    x = autofuse.wrap(torch.ones(4, device=device))
    with torch.no_grad():
        for k in range(12):
            middle = x * 2.0
            end = middle + 1.0
            more = [middle] * (k % 3)
            if k % 2:
                del middle
                kept = more[:1]
            else:
                kept = [middle, *more]
                del middle
            autofuse.materialize(end)
            assert end.tolist() == [3.0] * 4
            assert all(m.tolist() == [2.0] * 4 for m in kept)


def test_recording_runs_no_python():
    x = autofuse.wrap(torch.randn(8))

    def program():
        y = torch.sigmoid(x) * 2.0
        return y - x

    assert_recorded_without_python(program)


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), -1e9, 3.4e38, 1e39])
@pytest.mark.parametrize("method", ["masked_fill", "masked_fill_"])
def test_numbers_that_are_not_finite_fit(value, method, always):
    """As scores are masked; a finite one that does not is torch's error."""
    x, mask = torch.randn(4, 6), torch.rand(4, 6) > 0.5
    w, m, called = autofuse.wrap(x), autofuse.wrap(mask), []

    def run(value):
        called.append(getattr(w * 2.0, method)(m, value))

    with torch.no_grad():
        for _ in range(4):
            run(-1.0 if value == 1e39 else value)
            autofuse.materialize(called.pop())
        if value == 1e39:
            with pytest.raises(RuntimeError, match="without overflow"):
                run(value)
            return
        assert functions_called(lambda: run(value)) == []
    want = getattr(x * 2.0, method)(mask, value)
    assert_same(autofuse.unwrap(autofuse.materialize(called.pop())), want, None)


def test_operands_of_many_sizes_need_no_python(device):
    """More Metas meet where chains begin than a place of Python's knows."""
    x, kinds = torch.randn(40, 6, device=device), []
    for k in range(1, 31):
        kinds += [x[:k], x[:k].int(), x[:, :1].expand(40, k).t()[:, :6], torch.nn.Parameter(x[:k])]
    wrapped = list(map(autofuse.wrap, kinds))
    modes.forget_all("test")
    with torch.no_grad():
        for w, one in (*zip(wrapped, kinds, strict=True),) * 6:
            autofuse.materialize(w * 2)
            autofuse.materialize(wrapped[0] + one)
        for one in kinds:
            w, made = autofuse.wrap(one), []  # of which nothing is known
            names = functions_called(lambda w=w, made=made: made.append(w * 2))
            got = autofuse.materialize(made[0])
            names += functions_called(lambda one=one, made=made: made.append(wrapped[0] + one))
            assert not names, one.shape
            assert_same(autofuse.unwrap(got), one * 2, None)
            assert_same(autofuse.unwrap(autofuse.materialize(made[1])), kinds[0] + one, None)


def test_writes_need_little_python(device):
    """Of a write to a plain tensor `boundaries` is told; the chain that wrote is used again."""
    ones = torch.ones(8, device=device)
    w, p, memory = autofuse.wrap(ones), torch.nn.Parameter(ones.clone()), ones.clone()

    def program(target):
        return lambda: operator.isub(target, w * 2.0)

    modes.forget_all("test")  # or the trie may be full in the middle
    with torch.no_grad():
        for target, told in ((p, {"call", "_asks_us", "flush_readers"}),
                             (autofuse.wrap(memory), set())):  # fmt: skip
            for _ in range(4):
                program(target)()
                assert state.this_thread.current.spare is not None
            assert {*functions_called(program(target))} <= told


_OPTIONS = {
    "relu6": lambda x, m, z: F.relu6(x, inplace=True),
    "leaky_relu": lambda x, m, z: F.leaky_relu(x, 0.2, inplace=True),
    "hardtanh": lambda x, m, z: F.hardtanh(x, -0.5, 0.5, True),
    "clamp_": lambda x, m, z: x.clamp_(-0.25, max=0.75),
    "add_": lambda x, m, z: x.add_(z, alpha=0.5),
    "addcmul_": lambda x, m, z: x.addcmul_(z, z, value=-0.0),
    "masked_fill_": lambda x, m, z: x.masked_fill_(m, -0.0),
    "setitem": lambda x, m, z: operator.setitem(x, m, 0.0),
    "setitem of an int": lambda x, m, z: operator.setitem(x, m, -2),
}


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("concrete", [False, True])
def test_writes_with_options_need_no_python(name, concrete, device):
    """What a chooser has said of such a call is kept: of what is pending, and of memory."""
    write, x, z = _OPTIONS[name], torch.randn(4, 8, device=device), torch.randn(8, device=device)
    w = autofuse.wrap(x)
    modes.forget_all("test")

    def program(x, z, names=None):
        y = x.clone() if concrete else x * 2.0
        if concrete:
            autofuse.materialize(y)
        z, m = z + 1.0, x > 0.0
        if names is None:
            write(y, m, z)
        else:
            names += functions_called(lambda: write(y, m, z))
        return y

    with torch.no_grad():
        for _ in range(6):
            names = []
            got = program(w, autofuse.wrap(z), names)
            assert_same(autofuse.unwrap(autofuse.materialize(got)), program(x, z), None)
        # before Python 3.12 torch's own functions, which are in Python, call ours by its body
        inlined = concrete and sys.version_info < (3, 12) and name in vars(F)
        assert inlined or {*names} <= {"<lambda>"}, names


_SHAPED = {
    "cat": lambda y, z, x: torch.cat((y, z), 1),
    "cat, by its name": lambda y, z, x: torch.cat([y, z, y], dim=-1),
    "cat of what lies in memory": lambda y, z, x: torch.cat([x, y, x]),
    "cat of views": lambda y, z, x: torch.cat((y[1:], y[:1], z)),
    "cat of joins": lambda y, z, x: torch.cat((torch.cat((y, z)), x)),
    "stack": lambda y, z, x: torch.stack([y, x, z], 1),
    "split": lambda y, z, x: torch.split(y, 2, dim=1)[1] * 3.0,
    "split by sizes": lambda y, z, x: y.split([1, 3], 0)[1] - 1.0,
    "expand_as": lambda y, z, x: y[:1].expand_as(x) * z,
    "view_as": lambda y, z, x: y.t().reshape(8, 4).t().reshape_as(x) + z,
    "permute": lambda y, z, x: y.permute(dims=(1, 0)) + 1.0,
}  # fmt: skip


_TWICE = {"cat, by its name", "cat of what lies in memory"}  # whose gradients are torch's


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", _SHAPED)
def test_joins_and_views_need_no_python(name, grad, device, always):
    """What has been joined and viewed so before: by keywords, lists and other tensors, too."""
    make, x = _SHAPED[name], torch.randn(4, 8, device=device, requires_grad=grad)
    allowed = {"<lambda>", "split"} if "split" in name else {"<lambda>"}  # torch's own
    modes.forget_all("test")
    with torch.set_grad_enabled(grad):
        want = make(x * 2.0, x + 1.0, x)
        for _ in range(6):
            w, names = autofuse.wrap(x.detach().requires_grad_(grad)), []  # nothing is known of it
            y, z = w * 2.0, w + 1.0
            made = []
            names = functions_called(lambda y=y, z=z, w=w, made=made: made.append(make(y, z, w)))
            recorded = autofuse.is_pending(made[0])
            got = autofuse.unwrap(autofuse.materialize(made[0]))
            assert_same(got.detach(), want.detach(), None)
            if grad:
                found = torch.autograd.grad(got, w, torch.ones_like(got))
                assert_same(found, torch.autograd.grad(want, x, torch.ones_like(want), True), 1e-6)
        assert recorded is not (grad and name in _TWICE)
        assert {*names} <= allowed or not recorded, names


def test_joins_are_torchs_where_nothing_is_kept_for_backward(device, always, monkeypatch):
    """Also once machine code has recorded such a one."""
    x = autofuse.wrap(torch.randn(4, 8, device=device)).requires_grad_()
    for _ in range(4):
        joined = torch.cat((x * 2.0, x + 1.0))
    assert autofuse.is_pending(joined)
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    for _ in range(4):
        assert not autofuse.is_pending(torch.cat((x * 2.0, x + 1.0)))


_INDICES = [(0, 1), [0, 1], (), [], (1,), [1], [1, 2], torch.Size([1, 2]), slice(0, 2),
            (slice(0, 2),), ([0, 1],), ((0, 1),), (0, [1]), [0], 0, True, [True] * 4]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_indices_that_look_alike_are_told_apart(seed, device):
    """A list is another index than a tuple, True another than 1, whichever came first."""
    x = torch.randn(4, 4, device=device)
    order = torch.randperm(len(_INDICES), generator=torch.Generator().manual_seed(seed)).tolist()
    modes.forget_all("test")
    with torch.no_grad():
        for k in order * 4:
            y = autofuse.wrap(x) * 2.0
            got = autofuse.materialize(y[_INDICES[k]] + 1.0)
            assert_same(autofuse.unwrap(got), (x * 2.0)[_INDICES[k]] + 1.0, None, f"{_INDICES[k]}")


@pytest.mark.parametrize("make", [
    lambda y: y.view_as((2, 8)), lambda y: y.view_as(16), lambda y: y.expand_as([4, 4]),
    lambda y: y.split([1, 2]), lambda y: y.split((1, 3), dim=2), lambda y: torch.cat((y, y), 2),
    lambda y: torch.cat([y, y[:, :2]]), lambda y: torch.stack((y, y[:2])),
])  # fmt: skip
def test_errors_of_views_and_joins_are_eagers(make, device):
    x = torch.randn(4, 4, device=device)
    with pytest.raises(Exception) as want:
        make(x * 2.0)
    with torch.no_grad():
        for _ in range(6):
            with pytest.raises(want.type):
                make(autofuse.wrap(x) * 2.0)


def test_an_error_in_the_middle_of_a_join_is_raised(device):
    """What an operand of it needs may flush, and the flush fail."""
    x, more = autofuse.wrap(torch.randn(4, 6, device=device)), torch.randn(4, 6, device=device)

    def program(stale):
        others = [torch.randn(4, 6, device=device) for _ in range(29)]
        total = x * 2.0
        for other in others:
            total = total + other  # of as many Inputs the next one cuts the chain
        if stale:
            torch._C._increment_version([others[0]])  # what an extension in C++ does
        return autofuse.materialize(torch.cat([total, more]))

    with torch.no_grad():
        for _ in range(8):
            program(False)
        for _ in range(3):
            with pytest.raises(autofuse.StaleInputError):
                program(True)
        program(False)


def test_metas_that_are_forgotten_are_found_again(monkeypatch):
    """All are, once there are very many; machine code knows those that come again."""
    monkeypatch.setattr(metas, "_metas", {})
    x = autofuse.wrap(torch.randn(4, 6))
    with torch.no_grad():
        for k in range(12):
            if k == 6:
                metas._metas.update({(k,): None for k in range(70_000)})
                autofuse.materialize(autofuse.wrap(torch.randn(3, 71, 5, 2)) * 2.0)  # a new one
                assert len(metas._metas) < 100
            w = autofuse.wrap(torch.randn(4, 6))
            made = []
            names = functions_called(lambda w=w, made=made: made.append(w * x))
            autofuse.materialize(made[0])
        assert not names


def test_a_write_of_several_kernels_needs_no_python(device):
    """The one that writes is the last, until which all can be repeated."""
    x, row = torch.randn(6, 8, device=device), torch.randn(8, device=device)
    memory, want = x.clone(), x.clone()
    target = autofuse.wrap(memory)  # written at once, for another sees it
    w, r = autofuse.wrap(x), autofuse.wrap(row)

    def program(target, w, r, kept):
        weight = r * 0.5 - 1.0
        kept.append(weight)  # of another shape, and seen: it has a kernel
        target += w * weight + target
        return target

    with torch.no_grad():
        for k in range(8):
            launches, kept, known = autofuse.stats().kernels_launched, [], []
            names = functions_called(lambda kept=kept: program(target, w, r, kept))
            assert autofuse.stats().kernels_launched == launches + 2
            program(want, x, row, known)
            assert_same(autofuse.unwrap(target), want, None)
            assert_same(autofuse.unwrap(kept[0]), known[0], None)
            assert k < 4 or {*names} <= {"program"}, names


def test_a_write_whose_last_launch_fails_is_repeated(monkeypatch):
    """As each of its launches that fails is, before anything is written."""
    calls, failing = failable_launches(monkeypatch)
    x, row = autofuse.wrap(torch.randn(6, 8)), autofuse.wrap(torch.randn(8))
    target, want, kept = autofuse.wrap(torch.randn(6, 8)), None, []
    with torch.no_grad():
        for k in range(12):
            want = autofuse.unwrap(target) + autofuse.unwrap(x) * (autofuse.unwrap(row) - 0.5)
            calls.clear()
            failing.clear()
            failing |= {8: {1}, 9: {2}}.get(k, set())
            weight = row - 0.5
            kept.append(weight)
            target += x * weight
            assert len(calls) == {8: 3, 9: 4}.get(k, 2), "each is launched in the end"
            assert_same(autofuse.unwrap(target), want, None)
            assert_same(autofuse.unwrap(weight), autofuse.unwrap(row) - 0.5, None)
            assert k < 8 or len(set(calls)) == 2
    modes.forget_all("test")


def all_operands(piece):
    return (True,) * (len(piece.loads) + len(piece.stores))


@pytest.mark.parametrize("graded", [False, True])
def test_operands_that_begin_anywhere_are_launched_without_python(graded, device, monkeypatch):
    """What moves 16 bytes at a time has another kernel for them, once Python has got it."""
    if device == "cpu":  # no kernel there moves 16 bytes at a time
        monkeypatch.setattr(cpu.CpuRunner, "vectors_of", staticmethod(all_operands))
    memory = torch.randn(2, 80, device=device)
    x, y = memory[:, :64].contiguous().view(128).requires_grad_(graded), torch.randn(128).to(device)

    def program(begin):
        z = memory.view(160)[begin : begin + 128]
        return lambda: from_c(autofuse.materialize)((autofuse.wrap(x) * 0.5 + z) / 3.0 - y)

    with torch.set_grad_enabled(graded):
        for k, begin in enumerate((0, 1, 2, 3, 4, 5, 8, 31)):
            run = program(begin)
            for _ in range(4 if k < 2 else 0):  # by Python at first
                run()
            made = []
            names = {*functions_called(lambda run=run, made=made: made.append(run()))}
            assert not names & {"run", "flush", "_run"}, f"{begin}: {names}"
            want = (x * 0.5 + memory.view(160)[begin : begin + 128]) / 3.0 - y
            assert_same(autofuse.unwrap(made[0]), want, None)
            if graded:
                run = torch.autograd.grad(autofuse.unwrap(made[0]), x, want)
                assert_same(run[0], torch.autograd.grad(want, x, want)[0], None)


def test_another_device_of_the_thread_does_not_matter():
    """A write stays with machine code where nothing is pending on the thread's other devices."""
    from autofuse.chain.state import recorder_for

    memory = torch.ones(4)
    w, v = autofuse.wrap(memory), autofuse.wrap(torch.ones(4))
    (w + 1.0).tolist()
    recorder_for(torch.device("cpu", 0))
    try:
        for _ in range(3):
            operator.imul(w, v)
        assert functions_called(lambda: operator.imul(w, v)) == []
    finally:
        del state.this_thread.recorders[torch.device("cpu", 0)]


def test_python_alone_where_it_is_off(as_python):
    x = autofuse.wrap(torch.randn(8))
    assert "handler" in functions_called(lambda: x + 1.0)


def test_other_settings_change_no_function(monkeypatch):
    monkeypatch.setattr(native._native.calls, "set", None)
    monkeypatch.setattr(autofuse.config, "relaxed", True)


def test_functions_stay_functions():
    import inspect

    add = autofuse.Tensor.__add__
    assert inspect.isfunction(add) and add.__code__ and add.__name__ == "__add__"
    assert [*inspect.signature(flushing.flush).parameters] == [
        "recorder",
        "reason",
        "into",
        "node",
        "chain_id",
    ]
    assert add(autofuse.wrap(torch.ones(2))) is NotImplemented  # as torch's
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        flushing.flush(None)
    with pytest.raises(TypeError):
        protocol.torch_function()


def test_calls_by_hand():
    w = autofuse.wrap(torch.ones(4))
    torch_function = from_c(autofuse.Tensor.__torch_function__)
    add_ = from_c(autofuse.Tensor.add_)
    for _ in range(3):
        assert torch_function(torch.add, (autofuse.Tensor,), [w, 1.0]).tolist() == [2.0] * 4
        assert add_(w, other=0.0) is w
        with pytest.raises(TypeError):  # as torch's
            add_(self=w, other=0.0)


def test_errors_of_eager_ops_pass():
    w = autofuse.wrap(torch.randn(4, 6))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(w, w)
        with pytest.raises(RuntimeError, match="The size of tensor a"):
            w.add_(torch.ones(5))
        assert torch._C._is_torch_function_enabled()
        assert (w + 1.0).tolist() == (autofuse.unwrap(w) + 1.0).tolist()


def test_references_are_given_back(device):
    """A step that is repeated holds no more objects, and none of them more often."""
    x, z = torch.randn(16, device=device), torch.randn(16, device=device)
    w, v, one = autofuse.wrap(x), autofuse.wrap(z), 1234.5
    matrix = autofuse.wrap(torch.randn(16, 16, device=device))
    pair, given = (x, z), {"of": [x, one]}

    @autofuse.fuse
    def scaled(pair, given, factor):
        return pair[0] * given["of"][0] * factor

    def step():
        t = torch.tanh(w * v + one)
        u = autofuse.materialize(t - x)
        scaled(pair, given, one), torch.chunk(w, 2), w[0]
        with torch.no_grad():
            w.mul_(0.5)
            w.add_(v * 2.0)
            return u @ matrix

    watched = [w, v, x, z, one, matrix, pair, given, given["of"], *tensor.HOT[0],
               protocol.torch_function, autofuse.Tensor, torch.Tensor, None, True, False, float,
               int, "write", "materialize", 0, 1, state.this_thread.current,
               state.counts]  # fmt: skip

    def held():
        gc.collect()
        return [sys.getrefcount(item) for item in watched]

    for _ in range(5):
        step()
    flushing.flush_all("test")
    before, objects = held(), len(gc.get_objects())
    for _ in range(200):
        step()
    flushing.flush_all("test")
    grown = [after - first for first, after in zip(before, held(), strict=True)]
    assert all(abs(count) < 20 for count in grown), grown
    assert len(gc.get_objects()) - objects < 50


def collected_within(program, value):
    """What `program()` returns, where the garbage collector and a finalizer run in the middle."""

    class Reading:
        def __init__(self):
            self.itself = self

        def __del__(self):
            with contextlib.suppress(RuntimeError):  # in the middle of a flush
                value.tolist()

    held = [(k, k + 1, k + 2) for k in range(3000)]  # Python keeps no tuple of this size in reserve
    before = gc.get_threshold()
    Reading()
    gc.set_threshold(1)
    try:
        return program()
    finally:
        gc.set_threshold(*before)
        del held


def test_finalizers_that_flush():
    """Up to Python 3.11 they run wherever a tuple is made, and so within machine code."""
    w, matrix = autofuse.wrap(torch.ones(4, 4)), torch.eye(4)
    inputs = [autofuse.wrap(torch.full((4, 4), float(k))) for k in range(12)]

    def many():
        t = w
        for x in inputs:
            t = (t + x) * 1.0
        return t

    with torch.no_grad():
        want = (many() - inputs[9]).tolist()
        for k in range(3):
            torch.mm(many(), matrix)
            many() - inputs[9 - k]
        for _ in range(3):
            t = many()
            assert collected_within(lambda t=t: torch.mm(t, matrix), t).tolist() == t.tolist()
            t = many()
            assert collected_within(lambda t=t: t - inputs[9], t).tolist() == want


def test_values_that_finalizers_record(monkeypatch):
    """They may run in every Python function, also in one that machine code calls."""
    w, matrix, made = autofuse.wrap(torch.ones(4, 4)), torch.eye(4), []
    begin = state.Chain.__init__

    def init(self, tip):
        if not made:
            made.append(w + 1.0)
        begin(self, tip)

    with torch.no_grad():
        for k in range(4):
            t = w * 2.0
            if k == 3:
                t._af.recorder.spare = None
                monkeypatch.setattr(state.Chain, "__init__", init)
            assert torch.mm(t, matrix).tolist() == [[2.0] * 4] * 4
    assert made[0].tolist() == [[2.0] * 4] * 4


def test_values_that_come_alive_while_another_thread_has_the_lock():
    w, matrix, got = autofuse.wrap(torch.ones(4, 4)), torch.eye(4), []
    with torch.no_grad():
        for k in range(4):
            t = w * 2.0
            seen = weakref.ref(t)
            recorder, t = t._af.recorder, t + 1.0
            locked = threading.Event()

            def look(recorder=recorder, seen=seen, locked=locked):
                with recorder.lock:
                    locked.set()
                    time.sleep(0.1)
                    got.append(seen())

            thread = threading.Thread(target=look)
            if k == 3:
                thread.start()
                locked.wait()
            assert torch.mm(t, matrix).tolist() == [[3.0] * 4] * 4
            if k == 3:
                thread.join()
    assert got[0].tolist() == [[2.0] * 4] * 4


class Interrupting:
    """A Python function that is interrupted the first time."""

    def __init__(self, function):
        self.function, self.left = function, 1

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args)


def test_interrupts_in_python_functions_that_it_calls(monkeypatch):
    w, p, matrix = autofuse.wrap(torch.ones(4, 4)), torch.ones(4, 4), torch.eye(4)
    leaf = torch.nn.Parameter(torch.ones(4, 4))

    def backward():
        leaf.grad = None
        (w * leaf + 1.0).sum().backward()
        return leaf.grad

    def flushed():
        t = w * 2.0
        return torch.mm(t, matrix) * 0.5

    def programs():
        runners = [runner for each in state.all_recorders for runner in each.runners]
        return [runner.words for runner in runners if runner.words is not None]

    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    others = programs()  # of earlier tests
    for _ in range(4):
        backward(), w + p, flushed()
        flushing.flush_all("test")
    recorder = state.this_thread.current
    recorder.spare = None
    with monkeypatch.context() as patch:
        patch.setattr(state.Chain, "__init__", lambda *args: Interrupting(None)())
        with pytest.raises(KeyboardInterrupt):
            flushed()
    flushing.flush_all("test")  # what the interrupted one has left
    for program in programs():
        if program not in others and program.numbers is not None and program.runs:
            program.numbers = Interrupting(program.numbers)
            with pytest.raises(KeyboardInterrupt):
                backward()
    assert torch._C._is_torch_function_enabled()
    assert torch.equal(backward(), torch.ones(4, 4)) and (w + p).tolist() == [[2.0] * 4] * 4
    assert flushed().tolist() == [[1.0] * 4] * 4


def test_an_interrupt_in_the_middle_of_lending(monkeypatch):
    """What was lent before it is known, and held as often as it was."""
    first, lent = torch.ones(2), []
    with torch.inference_mode():
        second = torch.ones(2)
    lending.lendable_keys[:] = [keys_of(first).raw_repr()]  # Python is asked about the second
    monkeypatch.setattr(lending, "_can_be_lent", Interrupting(lending._can_be_lent))
    counts = sys.getrefcount(first), sys.getrefcount(second)
    with pytest.raises(KeyboardInterrupt):
        from_c(lending.lend)([first, {}, second, first], lent)
    assert type(first) is autofuse.Tensor and type(second) is torch.Tensor
    assert [x is first for x in lent] == [True] and lending.loans[id(first)] == 1
    from_c(lending.restore)(lent)
    assert type(first) is torch.Tensor and not lent and id(first) not in lending.loans
    assert (sys.getrefcount(first), sys.getrefcount(second)) == counts


def test_a_flush_without_kernels_is_no_launch(device):
    """Nor does it end a row of flushes that wait, by machine code too."""
    w, matrix = autofuse.wrap(torch.ones(4, 4, device=device)), torch.eye(4, device=device)
    with torch.no_grad():
        for _ in range(4):
            w * 2.0
            torch.mm(w, matrix)
            from_c(flushing.flush)(state.this_thread.current, "test")
            before = state.this_thread.current.launches
        w * 2.0
        from_c(flushing.flush)(state.this_thread.current, "test")
    assert state.this_thread.current.launches == before


def test_an_op_that_is_better_off_eager_stays_in_machine_code():
    x = autofuse.wrap(torch.ones(1 << 17))  # lgamma of so much is faster as torch's
    with torch.no_grad():
        for _ in range(150):
            torch.lgamma(x)
        assert functions_called(lambda: torch.lgamma(x)) == []


def test_an_op_that_is_eager_for_a_while_is_recorded_again(monkeypatch):
    """By machine code after as many runs as in Python."""
    x, p = autofuse.wrap(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    rounds = []
    for on in (True, False):
        autofuse.config.native = on
        flushing.flush_all("test")
        modes.forget(state.recorder_for(x.device))
        recorded = []
        for k in range(120):
            y = x * p
            if autofuse.is_pending(y):
                recorded.append(k)
                autofuse.materialize(y)
        rounds.append(recorded)
    autofuse.config.native = True
    assert rounds[0] == rounds[1] and rounds[0][-1] > 100


@pytest.mark.parametrize("self", [7, None, [1.0], "x"])
def test_a_method_of_the_class_with_another_self(self):
    """C's function behind `x[i]` is called for tensors alone."""
    for index in (torch.arange(3), autofuse.wrap(torch.arange(3))):
        for _ in range(3):
            with pytest.raises(TypeError):
                from_c(type(index).__getitem__)(self, index)


@pytest.mark.parametrize("block", [
    torch.no_grad, functools.partial(torch.autocast, "cpu", torch.bfloat16),
])  # fmt: skip
def test_ops_are_recorded_without_python_where_modes_come_and_go(block, always):
    """The next op ends the chain, and begins another in the modes that there are then."""
    x, p = autofuse.wrap(torch.rand(8)), torch.rand(8, requires_grad=True)

    def step():
        with block():
            inner = (x * p + 1.0) * x
        return inner, (inner * p - 1.0) * x, x * 2.0

    for _ in range(8):
        held = step()
    assert not {"record", "regrade", "renew"}.intersection(functions_called(step))
    autofuse.reset_stats()
    inner, outer, _ = held = step()
    reason = "grad mode" if block is torch.no_grad else "autocast"
    assert autofuse.stats().flushes[reason] == 2
    assert inner.requires_grad is (block is not torch.no_grad) and outer.requires_grad
    got = [autofuse.unwrap(y).detach() for y in held]
    x = autofuse.unwrap(x)
    assert_same(got, [y.detach() for y in step()], 1e-6)


def test_rooms_hold_as_many_operands_as_are_recorded():
    """Words of the stack, of which a function of machine code says how many it has."""
    hot = Path(native.__file__).parent
    most = c.MOST_OPERANDS
    wanted = {
        ("record.py", "key"): most + 1,  # and the op
        ("inputs.py", "marks"): 2 * most,
        ("join.py", "parts"): most,
    }
    for (file, name), words in wanted.items():
        found = re.search(rf"\b{name} = room\((\d+)\)", (hot / file).read_text())
        assert found and int(found[1]) >= words, file
    assert joins._MOST == most
