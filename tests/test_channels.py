"""batch_norm in evaluation, which a kernel computes beside what comes before and after it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_reductions import recorded, recording  # noqa: F401

import autofuse
from autofuse.dispatch import chosen
from autofuse.ops import channels
from support import (
    assert_same,
    assert_same_as_eager,
    copied,
    cuda_autocast_on_cpu,
    needs_cuda,
)

SHAPES = [(4, 6), (2, 3, 5), (2, 6, 4, 3), (3, 5, 7, 1), (2, 4, 1, 1), (1, 3, 2, 2, 3)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernels(recording, on):  # noqa: F811
    """What is recorded on the CPU, kernels compute there, at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autofuse.config, "compile", "now")
        yield


def numbers(shape, dtype=torch.float32, seed=0, kind="plain", device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    if kind == "wide":
        x = x * torch.exp(6 * torch.randn(shape, generator=generator, device=device))
    if kind == "special":  # subnormal numbers, too
        chance = torch.rand(shape, generator=generator, device=device) * 30
        for k, number in enumerate((torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -3e-41)):
            x[(chance > k) & (chance < k + 1)] = number
    return x.to(dtype)


def arguments(shape, dtype=torch.float32, own=None, kind="plain", device="cpu"):
    """x, statistics and weights, in the order of F.batch_norm."""
    own, c = own or dtype, shape[1]
    x, m, v, w, b = (
        numbers(shape if k == 0 else (c,), dtype if k == 0 else own, k, kind, device)
        for k in range(5)
    )
    return x, m, v.abs(), w, b


def fused_in(call, *args):
    """What `call` gives of wrapped tensors, from one kernel and no eager op, thrice."""
    for _ in range(3):  # the last ones by machine code
        autofuse.reset_stats()
        got = autofuse.materialize(call(*map(autofuse.wrap, args)))
        found = autofuse.stats()
        assert (found.kernels_launched, found.ops_eager) == (1, 0), found.eager_ops
    return autofuse.unwrap(got)


# --- on the CPU, whose kernels compute it as CUDA's do --------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
def test_it_is_one_kernel_with_what_is_around_it(kernels, shape, dtype, last):
    if last and (len(shape) != 4 or 1 in shape[1:3]):
        pytest.skip("not a layout of its own")

    def block(x, m, v, w, b):
        return torch.relu(F.batch_norm(x * 2.0, m, v, w, b, False, 0.1, 1e-3) + x)

    for own in dict.fromkeys((dtype, torch.float32)):
        x, *more = arguments(shape, dtype, own)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            got = fused_in(block, x, *more)
            want = block(x, *more)
        assert_same(got, want, {4: 1e-5, 2: 2e-2}[dtype.itemsize])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_a_module_in_evaluation(kernels, affine, training):
    norm = torch.nn.BatchNorm2d(6, affine=affine)
    norm.train()(numbers((8, 6, 3, 3)) * 3 + 1)
    norm.train(training)
    x = numbers((2, 6, 4, 4), seed=1)
    block = lambda x: norm(x).sigmoid() * x  # noqa: E731
    with torch.no_grad():
        if training:
            got, before = autofuse.wrap(x), norm.num_batches_tracked.item()
            got = block(got)
            assert_same(got, block(x), 1e-6)
            assert norm.num_batches_tracked.item() == before + 2
            return
        assert_same(fused_in(block, x), block(x), 1e-5)


def test_a_kernel_of_its_own_pays(kernels, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    from autofuse.record import policy

    monkeypatch.setitem(policy.FLUSH_US, "cpu", policy.FLUSH_US.get("cuda") or 10.1)
    monkeypatch.setitem(policy._OP_US, "cpu", 6.1)
    with torch.no_grad():
        args = arguments((2, 6, 4, 4))
        assert_same(fused_in(F.batch_norm, *args), F.batch_norm(*args), 1e-5)


def test_rows_are_reduced_in_the_same_kernel(recorded):  # noqa: F811
    """A pool after it: what is read by channels stands beside rows that are two dimensions."""
    x, *more = arguments((2, 6, 4, 4))
    with torch.no_grad():
        for dim in (-1, (2, 3), (-2, -1)):
            y = torch.relu(F.batch_norm(autofuse.wrap(x), *more)).mean(dim)
            chain = y._af.recorder.chain
            assert len(chain) == 3
            assert_same(y, torch.relu(F.batch_norm(x, *more)).mean(dim), 1e-6)


def test_one_tensor_is_numbers_of_channels_and_itself(kernels):
    """An Input has one shape in a kernel: where it would have two, another chain begins."""
    x, m, v, w, b = arguments((4, 6, 6))
    calls = {
        "before": lambda x, m, v, w, b: F.batch_norm(x * w, m, v, w, b),
        "after": lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b) * w + m,
        "of several ranks": lambda x, m, v, w, b: (
            F.batch_norm(x, m, v, w, b).sum() + F.batch_norm(x[0], m, v, w, b)
        ),
        "twice the same": lambda x, m, v, w, b: (
            F.batch_norm(x, m, v, w, b) * F.batch_norm(x, m, v, w, b, False, 0.1, 1e-3)
        ),
        "as all of them": lambda x, m, v, w, b: F.batch_norm(x * 2, v, v, v, v) + v,
    }
    with torch.no_grad():
        for call in calls.values():
            for _ in range(3):
                got = call(*map(autofuse.wrap, (x, m, v, w, b)))
                assert_same(got, call(x, m, v, w, b), 1e-5)
        assert fused_in(calls["twice the same"], x, m, v, w, b) is not None


def test_what_is_not_recorded(recorded):  # noqa: F811
    """Another layout, numbers that are pending, a gradient: eager's, with a reason."""
    x, m, v, w, b = arguments((4, 6, 5, 3))
    cases = {
        "channels of another layout": lambda: F.batch_norm(
            autofuse.wrap(x.transpose(2, 3)), m, v, w, b
        ),
        "operands of channels that are not in memory": lambda: F.batch_norm(
            autofuse.wrap(x), m, v, autofuse.wrap(w) * 2, b
        ),
        "no derivative rule": lambda: F.batch_norm(
            autofuse.wrap(x), m, v, w.clone().requires_grad_(), b
        ),
    }
    for reason, call in cases.items():
        with torch.set_grad_enabled(reason == "no derivative rule"):
            autofuse.reset_stats()
            assert sorted(autofuse.materialize(call()).shape) == sorted(x.shape)
            assert ("batch_norm", reason) in autofuse.stats().eager_ops
    for options in ({"training": True}, {"weight": None}, {"bias": None}, {"eps": 1}):
        with torch.no_grad():
            given = {"weight": w, "bias": b} | options
            for _ in range(3):
                y = F.batch_norm(autofuse.wrap(x), m.clone(), v.clone(), **given)
            assert_same(y, F.batch_norm(x, m.clone(), v.clone(), **given), 1e-5)


def test_errors_are_eagers(kernels):
    x, m, v, w, b = arguments((4, 6, 5, 3))
    calls = (
        (x, m[:5], v, w, b), (x, m, v, w[:, None], b), (x, None, v, w, b), (x[0, 0, 0], m, v, w, b),
        (x, m, v, w, b, False, 0.1, -1.0), (x, m, v, w, b, False, "0.1", 1e-5),
        (x.long(), m, v, w, b), (x, m, v, w, b, 2), (x, m.double(), v, w, b), (x[:0], m, v, w, b),
    )  # fmt: skip
    for args in calls:
        with torch.no_grad():
            for _ in range(3):
                assert_same_as_eager(F.batch_norm, *copied(args), rtol=1e-5)


def test_under_grad_of_another_operand(kernels):
    """A chain under grad holds it where it needs no gradient itself."""
    x, m, v, w, b = arguments((4, 6, 5, 3))
    g = numbers(x.shape, seed=9)

    def trained(own):
        scale = torch.ones(5, 3).requires_grad_()
        y = (F.batch_norm(own(x), m, v, w, b) * own(scale)).tanh()
        autofuse.unwrap(autofuse.materialize(y)).backward(g)
        return scale.grad

    for _ in range(3):
        assert_same(trained(autofuse.wrap), trained(lambda x: x), 1e-4)


def test_in_place_writes_are_seen(kernels):
    """Statistics that change between two calls, and while one is pending."""
    x, m, v, w, b = arguments((4, 6, 5, 3))

    def steps(x, m, v, w, b):
        first = F.batch_norm(x, m, v, w, b)
        m.add_(1.0)
        second = F.batch_norm(x, m, v, w, b) + first
        w[:3] = 2.0
        return first, second, F.batch_norm(second, m, v, w, b)

    with torch.no_grad():
        for _ in range(3):
            assert_same_as_eager(steps, x, m, v, w, b, rtol=1e-4)


def test_under_autocast_it_is_computed_as_it_comes(kernels):
    x, *more = arguments((4, 6, 5, 3), torch.bfloat16, torch.float32)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), cuda_autocast_on_cpu(), autocast:
        got = fused_in(lambda x: torch.relu(F.batch_norm(x, *more)), x)
    assert_same(got, torch.relu(F.batch_norm(x, *more)), 2e-2)


def test_which_kernel_is_eagers_follows_cudnn(recorded, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    x, *more = arguments((2, 6, 4, 3))
    last = x.contiguous(memory_format=torch.channels_last)

    def formula(x, *more):
        y = F.batch_norm(autofuse.wrap(x), *more)
        op = y._af.op
        autofuse.materialize(y)
        return op.expr

    known = {name: formula for name, (formula, *_) in channels.KERNELS.items()}
    with torch.no_grad():
        for _ in range(3):
            assert formula(x, *more) == known["cudnn"]
            assert formula(last, *more) == known["cudnn, channels last"]
            assert formula(x, *more[:2]) == known["native, not affine"]
            assert formula(x[:, :, 0, 0].clone(), *more) == known["native"]
            assert formula(x.half(), *more) == known["cudnn"]
            assert formula(x.bfloat16(), *more) == known["native"]
            with torch.backends.cudnn.flags(enabled=False):
                assert formula(x, *more) == formula(last, *more) == known["native"]
            torch._C._set_cudnn_enabled(False)
            assert formula(x, *more) == known["native"]
            torch._C._set_cudnn_enabled(True)


def test_a_choice_of_before_is_not_kept(recorded, monkeypatch):  # noqa: F811
    """Where another thread turns cudnn off while a chooser is asked."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    x, *more = arguments((2, 6, 4, 3))

    def choose(*args):
        found = channels.batch_norm(*args)
        torch._C._set_cudnn_enabled(False)
        return found

    try:
        choices = chosen.Choices(choose)
        assert choices(x, *more) is None
        op, *places = choices(x, *more)
        assert op.expr == channels.KERNELS["native"][0] and places[:5] == [0, 1, 2, 3, 4]
    finally:
        torch._C._set_cudnn_enabled(True)


# --- on a GPU: the bits ---------------------------------------------------------------------------

AXES = [
    (shape, dtype, own, affine, cudnn)
    for shape in [(64, 48), (3, 16, 129), (8, 64, 28, 28), (4, 33, 7, 5), (2, 24, 1, 1),
                  (70000, 3, 2), (1, 9000, 2, 2), (2, 6, 3, 4, 5)]
    for dtype in DTYPES
    for own in dict.fromkeys((torch.float32, dtype))
    for affine, cudnn in itertools.product((False, True), (False, True))
]  # fmt: skip


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", ["plain", "wide", "special"])
@pytest.mark.parametrize("last", [False, True])
def test_the_bits_are_eagers(kind, last, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(autofuse.config, "compile", "now")
    for shape, dtype, own, affine, cudnn in AXES:
        x, *more = arguments(shape, dtype, own, kind, "cuda")
        if last and len(shape) != 4:
            continue
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        given = more if affine else more[:2]
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=cudnn):
            want = F.batch_norm(x, *given), torch.relu(F.batch_norm(x * 0.5, *given) + x)
            autofuse.reset_stats()
            w = autofuse.wrap(x)
            got = F.batch_norm(w, *given), torch.relu(F.batch_norm(w * 0.5, *given) + w)
            got = tuple(map(autofuse.materialize, got))
            one_of_each = len(shape) == 4 and (shape[1] == 1 or shape[2:] == (1, 1)) and last
            assert one_of_each or autofuse.stats().ops_eager == 0, autofuse.stats().eager_ops
            assert_same(got, want, None, f"{shape} {dtype} {own} {affine} {cudnn}")
