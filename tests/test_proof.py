"""Kernels that reduce are compared before they are used, on a GPU that is not verified."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_groups import kernels  # noqa: F401
from test_reductions import CPU, emulated, launched, recorded, recording, table  # noqa: F401

import autofuse
from autofuse import errors
from autofuse.chain import verified
from autofuse.record import ways
from autofuse.run import proof
from autofuse.run.proof import Proof, made_up
from autofuse.supply.disk import DiskCache
from support import assert_same, forget_all, needs_cuda

ROUNDS = len(proof._ROUNDS)


@pytest.fixture
def unverified(monkeypatch, tmp_path):
    """Nobody has compared anything; kernels are compiled in the background."""
    monkeypatch.setattr(autofuse.config, "compile", "background")
    monkeypatch.setattr(verified, "COMPARED", {"cpu", "cuda"})
    monkeypatch.setattr(verified, "is_verified", lambda *_: False)
    monkeypatch.setattr(verified, "DiskCache", lambda: DiskCache(tmp_path))
    monkeypatch.setattr(verified, "_compared", {})
    for name, said in (("get_device_capability", (8, 6)), ("get_device_name", "a GPU")):
        asked = getattr(torch.cuda, name)
        monkeypatch.setattr(
            torch.cuda, name, lambda of, asked=asked, said=said: said if of == CPU else asked(of)
        )
    errors._said.clear()
    forget_all("test")
    yield
    forget_all("test")
    errors._said.clear()


def largest(x, y):
    """Which has one result in any order."""
    return (x * y).amax(-1) + 1.0


def total(x, y):
    return (x * y).sum(-1) + 1.0


DIFFERENTIATED = {
    "softmax": lambda x, y: torch.softmax(x * y, -1) * y,
    "layer_norm": lambda x, y: F.relu(F.layer_norm(x * y, x.shape[-1:])) + y,
    "moments": lambda x, y: x * (x * y).var(-1, keepdim=True),
}


def launches(program, *args):
    """How many kernels a call launches, beside proofs; its result has eager's bits."""
    before = autofuse.stats().kernels_launched
    with torch.no_grad():
        out = autofuse.unwrap(autofuse.materialize(program(*map(autofuse.wrap, args))))
        assert_same(out, program(*args), None)
    return autofuse.stats().kernels_launched - before


def test_they_are_used_once_all_kinds_of_values_gave_the_same(kernels, unverified):  # noqa: F811
    x, y = table(5, 40), table(5, 40, 1)
    found = [launches(largest, x, y) for _ in range(ROUNDS + 4)]
    assert found == [0] * (ROUNDS + 1) + [1] * 3


def test_compiled_at_once_they_are_compared_at_once(kernels, unverified, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "compile", "now")
    x, y = table(5, 40), table(5, 40, 1)
    assert [launches(largest, x, y) for _ in range(3)] == [0, 1, 1]


def test_what_was_found_is_kept(kernels, unverified, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "compile", "now")
    x, y = table(5, 40), table(5, 40, 1)
    assert launches(largest, x, y) == 0
    verified._compared.clear()  # as in another process
    forget_all("test")
    assert launches(largest, x, y) == 1
    assert launches(largest, x[:4], y[:4]) == 1  # as many rows, to a power of two
    assert launches(largest, x[:2], y[:2]) == 0  # others are compared
    assert launches(largest, x[:, :36].contiguous(), y[:, :36].contiguous()) == 0


def test_other_bits_turn_a_kind_off(kernels, unverified, monkeypatch, capfd):  # noqa: F811
    """Said once, and kept: torch adds in another order on a CPU."""
    monkeypatch.setattr(autofuse.config, "compile", "now")
    x, y = table(3, 1000), table(3, 1000, 1)
    for _ in range(4):
        assert launches(total, x, y) == 0
    said = capfd.readouterr().err
    assert said.count("a kernel of sum has given other bits than eager's on a GPU") == 1
    verified._compared.clear()  # as in another process
    forget_all("test")
    autofuse.reset_stats()
    launched.clear()
    launches(total, x, y)
    assert not [name for name, *_ in launched if "rows" in name]
    assert ("sum", verified.refusal(CPU, "sum")) in autofuse.stats().eager_ops
    launches(largest, x, y)
    assert launches(largest, x, y) == 1  # another kind


def test_a_place_of_such_a_kind_is_recorded_no_more(kernels, unverified, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x, y = table(3, 1000), table(3, 1000, 1)
    for _ in range(ROUNDS + 8):
        assert launches(total, x, y) == 0
    eager = autofuse.stats().eager_ops
    assert any(reason == ways.UNLIKE for _, reason in eager), eager


def nearly(got, want):
    """As `bits_differ`: a CPU's functions and orders are others."""
    got, want = got.double(), want.double()
    finite = got.isfinite() & want.isfinite()
    most = torch.where(finite, want, 0.0).abs().amax()
    return finite & ((got - want).abs() > 1e-3 * most)


def gradients_of(program, x, y, g, wrap):
    out = autofuse.unwrap(autofuse.materialize(program(wrap(x), wrap(y))))
    return torch.autograd.grad(out, (x, y), g)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "moments"])
def test_gradients_are_compared_too(kernels, unverified, name, same, monkeypatch):  # noqa: F811
    """After the forward pass, whose kernels have to be used for that."""
    monkeypatch.setattr(proof, "bits_differ", nearly)
    x, y = (table(5, 12, k).requires_grad_() for k in (0, 1))
    g = table(5, 12, 2)
    program = DIFFERENTIATED[name]
    want, counts = gradients_of(program, x, y, g, lambda t: t), []
    for _ in range(2 * ROUNDS + 8):
        before = autofuse.stats().kernels_launched
        ours = gradients_of(program, x, y, g, autofuse.wrap)
        counts.append(autofuse.stats().kernels_launched - before)
        for got, one in zip(ours, want, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
        if not same and any(counts):
            monkeypatch.setattr(proof, "bits_differ", lambda got, want: torch.ones(1) > 0)
    assert counts[: ROUNDS + 1] == [0] * (ROUNDS + 1)
    forward = counts[ROUNDS + 1]  # with gradients that reduce nothing
    assert counts[ROUNDS + 1 : 2 * ROUNDS + 1] == [forward] * ROUNDS
    assert counts[-1] > forward if same else counts[-1] == forward, counts


def test_one_that_cannot_be_compared_stays_unused(kernels, unverified, monkeypatch, capfd):  # noqa: F811
    """No memory, say; which is not kept."""
    monkeypatch.setattr(autofuse.config, "compile", "now")

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "made_up", fail)
        x, y = table(5, 40), table(5, 40, 1)
        for _ in range(3):
            assert launches(largest, x, y) == 0
    assert capfd.readouterr().err.count("could not be compared with eager's: RuntimeError") == 1
    forget_all("test")
    assert [launches(largest, x, y) for _ in range(2)] == [0, 1]


def test_an_interrupted_comparison_counts_for_nothing(kernels, unverified, monkeypatch):  # noqa: F811
    """Whatever lies in the memory that it had taken for what it finds."""
    monkeypatch.setattr(proof, "bits_differ", lambda got, want: torch.ones(1) > 0)
    x, y = table(5, 40), table(5, 40, 1)
    stack, empty = torch.stack, torch.empty

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).zero_())
    launches(largest, x, y)
    for _ in range(ROUNDS):
        monkeypatch.setattr(torch, "stack", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            launches(largest, x, y)
        monkeypatch.setattr(torch, "stack", stack)
    for _ in range(ROUNDS + 4):
        assert launches(largest, x, y) == 0


def test_where_there_is_no_memory_it_is_tried_again(kernels, unverified, monkeypatch):  # noqa: F811
    x, y = table(5, 40), table(5, 40, 1)
    make, failures = proof.made_up, []

    def short_of_memory(*args):
        if len(failures) < 2:
            failures.append(args)
            raise torch.OutOfMemoryError
        return make(*args)

    monkeypatch.setattr(proof, "made_up", short_of_memory)
    found = [launches(largest, x, y) for _ in range(ROUNDS + 6)]
    assert len(failures) == 2 and found[-2:] == [1, 1]


class _Event:
    """Over when it is asked for the third time."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 2


def test_nobody_waits_for_a_comparison(unverified):
    """The next begins when the last is over, and nothing is read before."""
    made, begun = Proof(CPU, ["sum"], "about"), []
    begin = made._begin

    def begin_on_a_gpu(*args):
        begin(*args)
        made._found = made._found[0], _Event()

    made._begin = begin_on_a_gpu

    def compute(operands):
        begun.append(operands)
        return [x * 2.0 for x in operands]

    x = table(2, 3)
    asked = 0
    while made.holds is None:
        assert len(begun) == (asked + 2) // 3
        made.go_on(compute, lambda operands: [x * 2.0 for x in operands], [x])
        asked += 1
        assert asked < 100
    assert made.holds and len(begun) == ROUNDS and verified.is_proven(CPU, "about")


@pytest.mark.parametrize(
    "lying",
    [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x[0].expand(3, -1),
     lambda x: x[:0], lambda x: x[0, 0]],
)  # fmt: skip
@pytest.mark.parametrize("kind", proof.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_lie_as_the_operands_do(lying, kind, dtype):
    like = lying(torch.zeros(4, 6, dtype=dtype))
    made = made_up(like, kind, torch.Generator().manual_seed(0))
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), dtype)
    assert not like.numel() or made.unique().numel() > 1 or made.numel() == 1


def test_indices_and_masks_stay():
    for like in (torch.arange(5), torch.tensor([True, False])):
        assert made_up(like, "wide", torch.Generator()) is like


# --- on a GPU -------------------------------------------------------------------------------------

PROGRAMS = {
    "softmax": lambda x, y: torch.softmax(x * 0.125 + y, -1),
    "layer_norm": lambda x, y: F.relu(F.layer_norm(x + y, x.shape[-1:])) + y,
    "rms_norm": lambda x, y: F.rms_norm(x * y, x.shape[-1:]) + y,
    "sums": lambda x, y: (x * y).sum(-1, keepdim=True) * x,
    "columns": lambda x, y: x - (x * y).mean(0),
    "all": lambda x, y: (x - y).square().mean() + 1.0,
    "groups": lambda x, y: F.silu(F.group_norm(x * y, 4)) * 2.0,
    "channels": lambda x, y: F.relu(F.batch_norm(x * 2.0, y[0], y[1].abs()) + y),
    "moments": lambda x, y: (x * y).var(-1) + 1.0,
}


@pytest.fixture
def background(monkeypatch, always):
    """As on a user's machine: kernels come some time, and so do proofs."""
    monkeypatch.setattr(autofuse.config, "compile", "background")


def settled(step, at_most=60):
    """Calls of `step`, which says how many kernels it has launched, until it launches some."""
    for _ in range(at_most):
        count = step()
        autofuse.wait()
        torch.cuda.synchronize()
        if count:
            return count
    return 0


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_family_is_proven_on_cuda(name, dtype, unverified, background):
    x, y = (torch.randn(64, 512, device="cuda").to(dtype) for _ in range(2))
    assert settled(lambda: launches(PROGRAMS[name], x, y)) >= 1, autofuse.stats()
    launches(PROGRAMS[name], x[1:], y[1:])  # rows that begin elsewhere have eager's bits, too


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "sums"])
def test_gradients_are_proven_on_cuda(name, unverified, background):
    x, y = (torch.randn(64, 512, device="cuda", requires_grad=True) for _ in range(2))
    g = torch.randn(64, 512, device="cuda")
    want = torch.autograd.grad(PROGRAMS[name](x, y), (x, y), g)

    def step():
        before = autofuse.stats().kernels_launched
        out = autofuse.unwrap(autofuse.materialize(PROGRAMS[name](*map(autofuse.wrap, (x, y)))))
        for ours, theirs in zip(torch.autograd.grad(out, (x, y), g), want, strict=True):
            assert_same(ours, theirs, None)
        return autofuse.stats().kernels_launched - before

    assert settled(step) >= 1


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", ["sums", "all", "layer_norm"])
def test_a_wrong_order_is_found_on_cuda(name, unverified, background, monkeypatch, capfd):
    """One that is not torch's: half as many threads, or other vectors."""
    from dataclasses import replace

    from autofuse.kernel import rows

    scheme_of = rows.scheme_of

    def wrong(*args, **options):
        scheme = scheme_of(*args, **options)
        return replace(scheme, across=(scheme.across[0] // 2, scheme.across[1]))

    for user in ("kernel.rows", "chain.rowwise"):
        monkeypatch.setattr(f"autofuse.{user}.scheme_of", wrong, raising=False)
    x, y = (torch.randn(64, 2048, device="cuda") for _ in range(2))
    assert settled(lambda: launches(PROGRAMS[name], x, y), 20) == 0
    assert "has given other bits than eager's" in capfd.readouterr().err


@pytest.mark.cuda
@needs_cuda
def test_a_comparison_does_not_stall_on_cuda(unverified, background):
    """The host goes on while the device is busy with what came before."""
    x, y = (torch.randn(64, 512, device="cuda") for _ in range(2))
    for _ in range(4):
        launches(PROGRAMS["sums"], x, y)
        autofuse.wait()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    done.record()
    with warnings.catch_warnings(), torch.no_grad():
        for _ in range(3):
            out = autofuse.materialize(PROGRAMS["sums"](autofuse.wrap(x), autofuse.wrap(y)))
        assert not done.query(), "it waited"
    assert_same(autofuse.unwrap(out), PROGRAMS["sums"](x, y), None)
