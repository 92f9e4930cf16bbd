"""Losses of classes: torch's values, and a gradient that one kernel computes.

Without a GPU kernels that reduce rows run thread by thread, as in test_reductions.py, those of the
gradients on the CPU; the rest is torch's either way.
"""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from test_reductions import emulated, launched, recorded, recording, table  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

import autofuse
from autofuse.grad import rules
from autofuse.kernel.rows import RowPlan
from autofuse.record import policy
from autofuse.run.cpu import CpuRunner
from autofuse.supply.kernels import Order
from support import assert_same, cuda_autocast_on_cpu, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = 50257  # of which no kernel is known to add as torch does, for a row's place decides
_filled = Order.filled


@pytest.fixture
def kernels(emulated, monkeypatch):  # noqa: F811
    """Gradients are computed by kernels, too, where these reduce no rows; which are these."""
    found, emulate = [], Order.filled

    def filled(order):
        if any(isinstance(plan, RowPlan) for plan, _ in order.wanted):
            return emulate(order)
        return _filled(order)

    def answering(runner, *args):
        answer = CpuRunner.answering(runner, *args)

        def call(*values):
            found.append([piece.plan.name for piece in runner.pieces])
            return answer(*values)

        return call

    counting = type("Counting", (CpuRunner,), {"answering": answering})
    monkeypatch.setattr(Order, "filled", filled)
    monkeypatch.setattr(rules, "runner_class", lambda device: counting)
    monkeypatch.setattr(autofuse.config, "compile", "now")
    return found


def classes(n):
    return torch.tensor([1 % n, 0, n - 1, -100, n // 2])


def gradient(logarithms, t, g, how, ignored=-100):
    """Of the logits, as CUDA's kernels compute it: in float32, rounded to the dtype by each op."""
    dtype, counted = g.dtype, t != ignored
    if how == "mean":
        g = g / counted.sum().to(dtype)
    g = torch.where(counted, -g, 0.0).to(logarithms.dtype)
    one = torch.zeros(logarithms.shape, dtype=torch.bool)
    one[counted] = one[counted].scatter(1, t[counted, None], True)
    each = torch.where(one, g[:, None], 0.0).double()
    share = logarithms.float().exp().double()
    return (each - share * g[:, None].double()).to(logarithms.dtype)


def trained(call, x, t, how, wrap=True):
    """The loss, and its gradient for x."""
    x = x.clone().requires_grad_()
    loss = call(autofuse.wrap(x) if wrap else x, t, reduction=how)
    loss = autofuse.unwrap(autofuse.materialize(loss)) if wrap else loss
    assert loss._version == 0
    g = torch.linspace(0.75, 1.5, max(loss.numel(), 2))[: loss.numel()].view(loss.shape)
    loss.backward(g.to(loss.dtype))
    return loss.detach(), g.to(loss.dtype), x.grad


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 37, 40, LONG])
def test_the_gradient_is_one_kernel(kernels, n, dtype, how):
    for _ in range(3):  # the last ones by machine code
        launched.clear()
        kernels.clear()
        x, t = table(5, n, dtype=dtype), classes(n)
        loss, g, grad = trained(F.cross_entropy, x, t, how)
        logarithms = torch.log_softmax(x, -1)
        if 1 < n < LONG:
            assert [name for name, _, _ in launched] == ["af_rows_log_softmax"]
            launched.clear()
            logarithms = torch.log_softmax(autofuse.wrap(x), -1)
            logarithms = autofuse.unwrap(autofuse.materialize(logarithms))
        assert len(launched) == (1 < n < LONG)
        assert_same(loss, F.nll_loss(logarithms, t, reduction=how), None)
        assert_same(grad, gradient(logarithms, t, g, how), None if dtype.itemsize < 4 else 2e-7)
        (names,) = kernels
        assert len(names) == 1 and names[0].endswith("log_softmax_backward")


def test_what_is_before_it_is_in_its_kernels(kernels):
    """A cast and a scale: what the gradient kernel gives is the first operand's."""

    def call(x, t, **options):
        return F.cross_entropy(x.float() * 0.5, t, **options)

    x, t = table(5, 40, dtype=torch.bfloat16), classes(40)
    loss, _, grad = trained(call, x, t, "mean")
    assert [name for name, _, _ in launched] == ["af_rows_to_f32_mul_log_softmax"]
    ((name,),) = kernels
    assert "log_softmax_backward" in name
    want, _, theirs = trained(call, x, t, "mean", wrap=False)
    assert_same(loss, want, 1e-6)
    assert_same(grad, theirs, 1e-2)


@pytest.mark.parametrize("n", [40, LONG])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(kernels, dtype, n):
    """torch computes log_softmax as the logits are, and casts what it gives."""

    def call(x, t, **options):
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(x, t, **options)

    x, t = table(5, n, dtype=dtype), classes(n)
    with cuda_autocast_on_cpu():
        for _ in range(3):
            kernels.clear()
            loss, g, grad = trained(call, x, t, "mean")
    assert loss.dtype is torch.float32
    assert len(kernels) == 1
    logarithms = torch.log_softmax(x, -1)
    if n < LONG:
        logarithms = torch.log_softmax(autofuse.wrap(x), -1)
        logarithms = autofuse.unwrap(autofuse.materialize(logarithms))
    assert_same(loss, F.nll_loss(logarithms.float(), t), None)
    assert_same(grad, gradient(logarithms, t, g, "mean"), None)


@pytest.mark.parametrize("ignored", [-100, 0, 7, 1 << 40])
def test_classes_that_are_ignored(kernels, ignored):
    """Whichever: none may be left, of which the mean is no number."""
    x = table(5, 40).requires_grad_()
    for t in (torch.tensor([7, 0, 39, 7, 7]), torch.full((5,), ignored % 40)):
        found = []
        for wrap in (False, True, True):
            loss = F.cross_entropy(autofuse.wrap(x * 1.0) if wrap else x * 1.0, t,
                                   ignore_index=ignored)  # fmt: skip
            loss = autofuse.unwrap(autofuse.materialize(loss)) if wrap else loss
            found.append([loss.detach(), *torch.autograd.grad(loss, x)])
        for got in found[1:]:
            assert_same(got, found[0], 1e-6)


@pytest.mark.parametrize("name", ["nll_loss", "NLLLoss", "CrossEntropyLoss"])
def test_spellings(kernels, name):
    call = {
        "nll_loss": lambda x, t: F.nll_loss(F.log_softmax(x, dim=1), t),
        "NLLLoss": lambda x, t: torch.nn.NLLLoss()(x.log_softmax(-1), t),
        "CrossEntropyLoss": lambda x, t: torch.nn.CrossEntropyLoss()(x, t),
    }[name]
    x, t = table(5, 40).requires_grad_(), classes(40)
    want = call(x, t)
    theirs = torch.autograd.grad(want, x)
    for _ in range(3):
        kernels.clear()
        loss = autofuse.materialize(call(autofuse.wrap(x * 1.0), t))
        assert loss.grad_fn.name() == want.grad_fn.name()
        loss = autofuse.unwrap(loss)
        assert_same([loss.detach(), *torch.autograd.grad(loss, x)], [want.detach(), *theirs], 1e-6)
        assert len(kernels) == 1


def test_the_logarithms_may_be_seen(kernels):
    """And read by more than the loss; then both have nodes."""

    def run(x, t):
        logarithms = F.log_softmax(x * 0.5, -1)
        loss = F.nll_loss(logarithms, t)
        return loss, logarithms, (logarithms.exp() * logarithms).sum(-1).mean()

    x, t = table(5, 40).requires_grad_(), classes(40)
    found = []
    for wrap in (False, True, True):
        values = run(autofuse.wrap(x * 1.0) if wrap else x * 1.0, t)
        values = [autofuse.unwrap(autofuse.materialize(v)) for v in values] if wrap else values
        names = [value.grad_fn.name() for value in values[:2]]
        total = values[0] + values[2] * 0.25 + values[1].sum() * 0.5
        found.append([*[v.detach() for v in values], *torch.autograd.grad(total, x)])
        assert names == ["NllLossBackward0", "LogSoftmaxBackward0"] or wrap
    for got in found[1:]:
        assert_same(got, found[0], 1e-5)


@pytest.mark.parametrize("n", [40, LONG])
def test_second_derivatives(kernels, n):
    x, t = table(5, n).requires_grad_(), classes(n)
    found = []
    for wrap in (False, True, True):
        loss = F.cross_entropy((autofuse.wrap(x * 1.0) if wrap else x * 1.0) * 1.5, t)
        loss = autofuse.unwrap(autofuse.materialize(loss)) if wrap else loss
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([g.detach(), *torch.autograd.grad(g.square().sum(), x)])
    for got in found[1:]:
        assert_same(got, found[0], 1e-5)


def test_what_follows_is_another_chain(kernels):
    x, t = table(5, 40).requires_grad_(), classes(40)
    found = []
    for wrap in (False, True, True):
        autofuse.reset_stats()
        loss = F.cross_entropy(autofuse.wrap(x * 1.0) if wrap else x * 1.0, t, reduction="none")
        total = (loss * 0.5 + 1.0).view(5, 1)
        total = autofuse.unwrap(autofuse.materialize(total)) if wrap else total
        found.append([total.detach(), *torch.autograd.grad(total.sum(), x)])
        if wrap:
            assert autofuse.stats().flushes["rows"] == 1
    for got in found[1:]:
        assert_same(got, found[0], 1e-6)


LOGITS, CLASSES = table(5, 40), classes(40)
NOT_RECORDED = {
    "weights": lambda x: F.cross_entropy(x, CLASSES, torch.ones(40)),
    "label smoothing": lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x, torch.softmax(LOGITS, -1)),
    "old options": lambda x: F.cross_entropy(x, CLASSES, size_average=False),
    "a batch of images": lambda x: F.cross_entropy(x.view(1, 5, 40), torch.zeros(1, 40).long()),
    "one row": lambda x: F.cross_entropy(x[0], CLASSES[0]),
    "classes of 8 bits": lambda x: F.cross_entropy(x, CLASSES.clamp(min=0).to(torch.uint8)),
    "classes with gaps": lambda x: F.cross_entropy(x, CLASSES.repeat_interleave(2)[::2]),
    "of C": lambda x: torch._C._nn.nll_loss(x.log_softmax(-1), CLASSES),
    "other columns": lambda x: F.nll_loss(x.log_softmax(0), CLASSES),
    "logarithms in memory": lambda x: F.nll_loss(LOGITS.clone().requires_grad_(), CLASSES),
    "no gradient": lambda x: F.cross_entropy(x.detach(), CLASSES),
}
WRONG = {
    "fewer classes": lambda x: F.cross_entropy(x, CLASSES[:3]),
    "floats for classes": lambda x: F.nll_loss(x.log_softmax(-1), CLASSES.float()),
    "no such reduction": lambda x: F.cross_entropy(x, CLASSES, reduction="middle"),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", NOT_RECORDED)
def test_torch_alone_knows(recorded, name):  # noqa: F811
    for _ in range(3):
        x = LOGITS.clone().requires_grad_()
        want = NOT_RECORDED[name](x)
        loss = NOT_RECORDED[name](autofuse.wrap(x * 1.0))
        assert not autofuse.is_pending(loss)
        assert_same(autofuse.unwrap(loss), want, None)
        if want.requires_grad:
            assert loss.grad_fn.name() == want.grad_fn.name()


@pytest.mark.parametrize("name", WRONG)
def test_errors(recorded, name):  # noqa: F811
    texts = []
    for wrap in (False, True, True):
        x = LOGITS.clone().requires_grad_()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            WRONG[name](autofuse.wrap(x * 1.0) if wrap else x * 1.0)
        texts.append((caught.type, str(caught.value)))
    assert texts[1:] == texts[:1] * 2


def test_hooks_are_told_of_what_eager_saves(recorded):  # noqa: F811
    x = LOGITS.clone().requires_grad_()
    found = []
    for wrap in (False, True, True):
        told = []
        with saved_tensors_hooks(
            lambda t, told=told: told.append(tuple(t.shape)) or t, lambda t: t
        ):
            loss = F.cross_entropy(autofuse.wrap(x * 1.0) if wrap else x * 1.0, CLASSES)
            loss = autofuse.unwrap(autofuse.materialize(loss)) if wrap else loss
        found.append((told, torch.autograd.grad(loss, x)[0]))
    for told, grad in found[1:]:
        assert told[-4:] == found[0][0][-4:]
        assert_same(grad, found[0][1], None)


def test_small_ones_stay_eager(recorded, monkeypatch):  # noqa: F811
    """The host pays more for a chain of what torch computes."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x = autofuse.wrap(table(5, 40).requires_grad_() * 1.0)
    assert not autofuse.is_pending(F.cross_entropy(x, CLASSES))
    assert not autofuse.is_pending(F.nll_loss(F.log_softmax(x, -1), CLASSES))
    assert "a small loss of classes" in str(autofuse.stats().eager_ops)
    monkeypatch.setattr(policy, "_CLASSES_BYTES", 4 * 5 * 40)
    assert autofuse.is_pending(F.cross_entropy(x, CLASSES))
    assert not policy.takes_classes(4 * 5 * 39)


def test_of_logarithms_over_another_dimension_it_is_torchs(kernels):
    """Whose gradient has more than one element a row."""
    x = LOGITS.clone().requires_grad_()
    found = []
    for wrap in (False, True, True):
        h = autofuse.wrap(x) * 1.5 if wrap else x * 1.5
        loss = F.nll_loss(F.log_softmax(h, 0), CLASSES)
        assert not autofuse.is_pending(loss)
        found.append(torch.autograd.grad(autofuse.unwrap(loss), x)[0])
    for grad in found[1:]:
        assert_same(grad, found[0], 1e-5)


@pytest.mark.parametrize("name", ["cross_entropy", "of rows that torch reduces", "layer_norm"])
def test_reports(kernels, name, tmp_path):
    """Of what nodes save besides values of ops, as the number of classes that count."""
    n = LONG if name.startswith("of") else 40

    def run(x):
        h = autofuse.wrap(x) if n == LONG else autofuse.wrap(x) * 1.5
        if name == "layer_norm":
            loss = F.layer_norm(h, (n,)).relu().sum()
        else:
            loss = F.cross_entropy(h, classes(n))
        autofuse.unwrap(autofuse.materialize(loss)).backward()

    report = autofuse.explain(run, table(5, n).requires_grad_() * 1.0)
    report.html(tmp_path / "report.html")
    assert "keeps for backward" in (tmp_path / "report.html").read_text()


# --- softmax that is told to compute in float32 ---------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "F.softmax"])
def test_rows_that_are_cast_first(emulated, name):  # noqa: F811
    """As attention is often written; torch casts bfloat16 first, and float16 in the reduction."""
    call = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "F.softmax": F.softmax}[
        name
    ]
    x = table(5, 40).bfloat16()
    for _ in range(3):
        launched.clear()
        got = call(autofuse.wrap(x) * 0.5, -1, dtype=torch.float32).to(torch.bfloat16)
        got = autofuse.unwrap(autofuse.materialize(got))
        assert len(launched) == 1
        want = call((autofuse.wrap(x) * 0.5).float(), -1).bfloat16()
        assert_same(got, autofuse.unwrap(autofuse.materialize(want)), None)
    launched.clear()
    assert not autofuse.is_pending(call(autofuse.wrap(x.half()), -1, dtype=torch.float32))
    assert not autofuse.is_pending(call(autofuse.wrap(x), -1, dtype=torch.float64))
    assert autofuse.is_pending(call(autofuse.wrap(x.float()), -1, dtype=torch.float32))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("n", [1000, LONG])
def test_another_thread_computes_it_on_its_stream(always, monkeypatch, n):
    """What torch computes comes after the kernel, whatever stream is current there."""
    monkeypatch.setattr(autofuse.config, "compile", "now")
    x, t = torch.randn(512, n, device="cuda"), torch.randint(n, (512,), device="cuda")
    want = F.cross_entropy((x * 1.5).requires_grad_(), t).item()
    stream, pending = torch.cuda.Stream(), []
    for _ in range(5):
        torch.cuda.synchronize()

        def record():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # the kernel waits behind it
                h = autofuse.wrap(x.clone().requires_grad_()) * 1.5
                pending.append(F.cross_entropy(h, t))
                taken.wait(30)  # before the stream is left, which flushes

        taken = threading.Event()
        thread = threading.Thread(target=record)
        thread.start()
        while not pending:
            time.sleep(0.001)
        loss = autofuse.materialize(pending.pop())
        taken.set()
        thread.join()
        torch.cuda.synchronize()
        assert abs(autofuse.unwrap(loss).item() - want) < 1e-5
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_bits_on_cuda(always, monkeypatch, dtype, how, autocast):
    """Of rows that a kernel reduces, that are cut to vectors, or not, and that torch reduces."""
    monkeypatch.setattr(autofuse.config, "compile", "now")
    monkeypatch.setattr(autofuse.config, "max_kernels_per_line", 1 << 20)
    for n in (1, 3, 32, 333, 1000, 1024, 1025, 4096, 5003, 32000, LONG):
        rows = max(min(64, (1 << 20) // n), 2)
        x = (torch.randn(rows, n, device="cuda") * 4).to(dtype)
        t = torch.randint(n, (rows,), device="cuda")
        t[::3] = -100
        found = []
        for wrap in (False, True):
            a = x.clone().requires_grad_()
            with torch.autocast("cuda", autocast or dtype, enabled=autocast is not None):
                loss = F.cross_entropy((autofuse.wrap(a) if wrap else a) * 0.5, t, reduction=how)
            loss = autofuse.unwrap(loss) if wrap else loss
            g = torch.linspace(0.75, 1.5, max(loss.numel(), 2), device="cuda")[: loss.numel()]
            loss.backward(g.view(loss.shape).to(loss.dtype))
            found.append([loss.detach(), a.grad])
        assert_same(found[1], found[0], None)
