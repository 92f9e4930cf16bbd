"""The order in which gradients of one tensor add up, whatever stands between recording and flush.

The engine adds them in the reverse order of the ops that used the tensor. Programs mix ops that are
recorded, ops on plain tensors, of which autofuse sees nothing, and ops that it sees and does not
record. Bits are compared, so that one exchange of two additions shows; on the CPU for arithmetic.
"""

import copy
import os
import random

import pytest
import torch
from torch import nn

import autofuse
from autofuse import torch_private as sequence
from autofuse.grad import owners
from autofuse.record.modes import forget_all
from autofuse.record.numbers import ORDER
from support import DEVICES, NATIVE, assert_same, elsewhere, functions_called

COUNT = int(os.environ.get("AUTOFUSE_TEST_ORDERS", "20"))
SEED = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261122"))
SHAPE = (6, 40)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request):
    was = autofuse.config.native
    autofuse.config.native = request.param
    yield request.param
    autofuse.config.native = was


def tensors(count, device, seed):
    """Values from 0.5 to 1.5, of which products and quotients stay of that size."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(SHAPE, generator=generator) + 0.5).to(device) for _ in range(count)]


class Doubled(torch.autograd.Function):
    """A node in Python, of the user's."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


# --- programs -------------------------------------------------------------------------------------

RECORDED = ["{w} * {a}", "{w} + {a}", "{a} - {w}", "{w} / {a}", "{a} * {w}", "-{w}", "{w} * 0.75",
            "torch.mul({w}, {a})", "torch.where(torch.gt({w}, {a}), {w}, {a})", "{w}.abs()",
            "torch.add({w}, {a}, alpha=0.5)", "{w}.clamp(0.6, 1.4)"]  # fmt: skip
ON_CUDA = ["torch.tanh({w})", "{w}.sigmoid()", "torch.sin({w}) * {a}", "{w}.exp() + {a}"]
UNSEEN = ["{p} * {q}", "{p} + {q}", "{p} / {q}", "-{p}", "{p}.square()", "Doubled.apply({p})"]
SEEN = ["{w}.t().contiguous().t()", "{w}.cumsum(1)", "torch.cumsum({w}, 0)", "{w}.view(6, 40)",
        "torch.stack([{w}, {w} + {a}]).sum(0)", "Doubled.apply({w})",
        "{w}.unbind(0)[2].expand(6, 40)", "{w} @ ({p}.t() @ {q}) / 64",
        "F.linear({w}, {p}.t() @ {q}) / 64"]  # fmt: skip


def make_program(rng, device):
    """The source of `run(x, y, p, q, r)`; x and y are wrapped, the others are Parameters.

    r: [40], the others as SHAPE.
    """
    recorded = RECORDED + (ON_CUDA if device == "cuda" else [])
    wrapped, plain, lines = ["x", "y"], ["p", "q"], []
    for k in range(rng.randint(4, 16)):
        draw = rng.random()
        pool = UNSEEN if draw < 0.3 else SEEN if draw < 0.4 else recorded
        rule = rng.choice(pool).format(
            w=rng.choice(wrapped[-4:]), a=rng.choice([*wrapped, *plain, "r"]),
            p=rng.choice(plain), q=rng.choice([*plain, "r"] if draw < 0.3 else plain),
        )  # fmt: skip
        if "sum" in rule:
            rule = f"({rule}) / 8"
        if pool is UNSEEN:
            lines.append(f"u{k} = {rule}")
            plain.append(f"u{k}")
        else:
            lines.append(f"v{k} = {rule}")
            wrapped.append(f"v{k}")
        if rng.random() < 0.1 and len(wrapped) > 4:
            victim = wrapped.pop(rng.randrange(2, len(wrapped)))
            lines.append(f"del {victim}")
    kept = [n for n in wrapped[2:] if rng.random() < 0.3]
    kept += [n for n in plain[2:] if rng.random() < 0.2] or [wrapped[-1]]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(x, y, p, q, r):\n{body}    return [{', '.join(dict.fromkeys(kept))}]\n"


def gradients(run, leaves, wrap, how):
    """Of a sum of what the program keeps, for its leaves and for what it keeps."""
    x, y, *others = [t.detach().clone() for t in leaves]
    leaves = [x.requires_grad_(), y.requires_grad_(), *map(nn.Parameter, others)]
    x, y, p, q, r = leaves
    if how == "parameters alone":  # require grad
        x.requires_grad_(False)
        y.requires_grad_(False)
    kept = run(wrap(x), wrap(y), p, q, r)
    seen = []
    if how == "hooks":
        for k, t in enumerate([p, *kept]):
            if t.requires_grad:
                t.register_hook(lambda g, k=k: (seen.append(k), g * 1.1)[1])
    roots = [t for t in kept if t.requires_grad]
    if not roots:
        return []
    loss = sum((t * t.detach()).sum() for t in roots)
    if how == "backward":
        loss.backward()
        return [t.grad for t in leaves]
    targets = [t for t in leaves if t.requires_grad] + roots
    grads = torch.autograd.grad(loss, targets, allow_unused=True, retain_graph=how == "twice")
    if how == "twice":
        grads += torch.autograd.grad(loss, targets, allow_unused=True)
    return [*grads, sorted(seen)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["backward", "twice", "hooks", "parameters alone"])
def test_random_programs(device, how, tier, native):
    rng = random.Random(SEED)  # the same programs for all, and so the same kernels
    for number in range(COUNT):
        source = make_program(rng, device)
        space = {"torch": torch, "F": nn.functional, "Doubled": Doubled}
        exec(source, space)
        leaves = tensors(5, device, number)
        leaves[4] = leaves[4][0]
        want = gradients(space["run"], leaves, lambda t: t, how)
        for _ in range(2):  # the second time from the caches
            got = gradients(space["run"], leaves, autofuse.wrap, how)
            try:
                assert_same(got, want, None)
            except AssertionError as error:
                raise AssertionError(f"program {number} of {SEED}\n{source}\n{error}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_chains_that_few_nodes_would_differentiate_in_another_order(
    device, native, always, monkeypatch
):
    """More of their ops have nodes, and they are fused."""
    searched, real = [], owners.Owners.late

    def late(self):
        found = real(self)
        searched.append(bool(found))
        return found

    monkeypatch.setattr(owners.Owners, "late", late)
    forget_all("test")  # what is known is not searched for again
    rng, divided = random.Random(SEED), 0
    for number in range(COUNT):
        names, lines = ["x", "y", "p"], []
        for k in range(rng.randint(8, 24)):
            rule = rng.choice(RECORDED).format(w=rng.choice(names[-6:]), a=rng.choice(names[-9:]))
            lines.append(f"    v{k} = {rule}\n")
            names.append(f"v{k}")
        kept = [name for name in names[3:-1] if rng.random() < 0.4] + names[-1:]
        source = f"def run(x, y, p):\n{''.join(lines)}    return [{', '.join(kept)}]\n"
        space = {"torch": torch}
        exec(source, space)
        grads, launched = [], 0
        for wrap in (lambda t: t, autofuse.wrap, autofuse.wrap):
            x, y, p = [t.requires_grad_() for t in tensors(3, device, number)]
            searched.clear()
            autofuse.reset_stats()
            out = space["run"](*map(wrap, (x, y, p)))
            loss = sum((t * t.detach()).sum() for t in out)
            divided += searched[:3] == [True] * 3
            grads.append([*out, *torch.autograd.grad(loss, [x, y, p, *out], allow_unused=True)])
            launched = autofuse.stats().kernels_launched
        assert_same(grads[1:], [grads[0]] * 2, None, f"program {number} of {SEED}\n{source}")
        assert launched > 1, source
    assert divided


# --- what the engine does, on which all of it rests -----------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_runs_the_highest_number_first(device):
    """And a tensor's gradients are added as they come; for nodes in C++ and in Python."""
    for use in (lambda p, g: p * g, lambda p, g: Scaled.apply(p, g)):
        p, *gs = (t.requires_grad_(k == 0) for k, t in enumerate(tensors(4, device, 0)))
        for numbers, want in (
            (None, (gs[2] + gs[1]) + gs[0]),
            ((3, 2, 1), (gs[0] + gs[1]) + gs[2]),
            ((1, 3, 2), (gs[1] + gs[2]) + gs[0]),
        ):
            uses = [use(p, g) for g in gs]
            for t, number in zip(uses, numbers or (), strict=bool(numbers)):
                t.grad_fn._set_sequence_nr(sequence.peek() + number)
            (grad,) = torch.autograd.grad(uses, p, [torch.ones_like(p)] * 3)
            assert torch.equal(grad, want)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        (scale,) = ctx.saved_tensors
        return g * scale, None


def test_every_thread_counts_for_itself():
    before, seen = sequence.peek(), []

    def work():
        seen.append(sequence.take())
        seen.append(sequence.take())

    assert elsewhere(work) is None
    assert sequence.peek() == before and seen[1] == seen[0] + 1


def test_a_number_is_used_up_with_and_without_the_function_of_c(monkeypatch):
    for take in (sequence.take, None):
        if take is None:
            monkeypatch.setattr(sequence, "c_function", lambda *names: 0)
            take = sequence.taker()
        number = sequence.peek()
        assert take() == number and take() == number + 1 and sequence.peek() == number + 2


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_without_a_graph_uses_no_number(device, native, always):
    x, p = tensors(2, device, 0)
    w, p, before = autofuse.wrap(x), nn.Parameter(p), sequence.peek()
    autofuse.materialize((w * 2 + x).abs())
    with torch.no_grad():
        autofuse.materialize((w * p + x).abs())
    assert sequence.peek() == before
    y = (w * p).abs() + x
    assert sequence.peek() == before + 3, "as many as eager"
    del y


# --- what stands between --------------------------------------------------------------------------


def flushes(reason=ORDER):
    return autofuse.chain.state.counts.flushes.get(reason, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_node_that_nobody_announced_ends_the_chain(device, native, always):
    x, p, q = tensors(3, device, 0)
    w, p, q = autofuse.wrap(x), nn.Parameter(p), nn.Parameter(q)
    for between, ends in ((lambda: p + q, 1), (lambda: x + x, 0), (lambda: p.detach() * 2, 0)):
        before = flushes()
        y = w * p
        kept = between()
        z = y + w
        assert flushes() == before + ends
        assert autofuse.is_pending(y) is not bool(ends)
        autofuse.materialize(z)
        del kept


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("program", [
    lambda w, p, q: (w * p, p + q, w * 2.0)[0] + w,
    lambda w, p, q: (lambda a, b: b + a)(w * p, p + q),
    lambda w, p, q: torch.atan2(*(w * p, p * q)), lambda w, p, q: 1.0 - (w * p, p + q)[0],
], ids=["an operator", "reflected", "a function", "of a number"])  # fmt: skip
def test_a_chain_that_ends_so_runs_no_python_but_its_flush(program, monkeypatch, always):
    monkeypatch.setattr(autofuse.config, "native", True)
    x, p, q = tensors(3, "cpu", 0)
    p, q = nn.Parameter(p), nn.Parameter(q)
    want = torch.autograd.grad(program(x, p, q).sum(), p)
    w = autofuse.wrap(x)
    for _ in range(4):
        got = torch.autograd.grad(autofuse.materialize(program(w, p, q)).sum(), p)
    assert_same(got, want, 1e-6)
    before, out = flushes(), []
    called = functions_called(lambda: out.append(program(w, p, q)))
    assert flushes() == before + 1
    assert not {"record", "handler", "reflected", "slot_in"} & {*called}, called


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_that_reads_no_input_does_not_end_the_chain(device, native, always):
    """As in a gated layer: silu(a(x)) * b(x), where b runs while silu is pending."""
    a, b = (nn.Linear(40, 40, device=device) for _ in range(2))
    outer = {
        "linear": lambda x: b(x),
        "view": lambda x: x.view(6, 40),
        "keywords": lambda x: torch.sum(x, dim=0, keepdim=True),
        "python": lambda x: torch.einsum("ij,kj->ik", x, b.weight),
    }
    for name, between in outer.items():
        (x,) = tensors(1, device, 0)
        w, before = autofuse.wrap(x), flushes()
        gate = torch.relu(a(w))
        up = between(w)
        y = gate * up
        assert flushes() == before and autofuse.is_pending(gate), name
        autofuse.materialize(y)


@pytest.mark.parametrize("device", DEVICES)
def test_order_when_another_thread_needs_the_value(device, tier, native):
    """Its own numbers begin at 0."""

    def program(wrap, read):
        x, p, q = tensors(3, device, 0)
        x, p, q = wrap(x), nn.Parameter(p), nn.Parameter(q)
        plain = [p / q]
        a = x * p + 0.25
        plain.append(q - p)
        read(a)
        b = x / p - 0.25
        plain.append(p * q)
        read(b)
        loss = (a * a).sum() + (b * b).sum() + sum((t * t).sum() for t in plain)
        loss.backward()
        return p.grad, q.grad

    def read(t):
        assert elsewhere(lambda: autofuse.materialize(t)) is None

    want = program(lambda t: t, lambda t: None)
    for _ in range(3):
        assert_same(program(autofuse.wrap, read), want, None)


# --- public models --------------------------------------------------------------------------------


class LiquidCell(nn.Module):
    """A liquid time-constant cell (Hasani et al., arXiv 2006.04439), solved in `unfolds` steps.

    inputs: [B, I], state: [B, H]; returns the next state. `cm` is read by recorded ops and, in
    every step, by one on plain tensors alone.
    """

    def __init__(self, size, hidden, unfolds, squash):
        super().__init__()
        self.unfolds, self.squash = unfolds, squash
        shapes = {"sensory": (size, hidden), "inner": (hidden, hidden)}
        for name, shape in shapes.items():
            for part in ("w", "mu", "sigma", "erev"):
                setattr(self, f"{name}_{part}", nn.Parameter(torch.rand(shape) + 0.1))
        for name in ("gleak", "vleak", "cm"):
            setattr(self, name, nn.Parameter(torch.rand(hidden) + 0.4))

    def gate(self, v, name):
        mu, sigma = getattr(self, f"{name}_mu"), getattr(self, f"{name}_sigma")
        return self.squash(sigma * (v.unsqueeze(-1) - mu))

    def synapse(self, v, name):
        activation = getattr(self, f"{name}_w") * self.gate(v, name)
        reverse = activation * getattr(self, f"{name}_erev")
        return reverse.sum(1), activation.sum(1)

    def forward(self, inputs, state):
        sensory_numerator, sensory_denominator = self.synapse(inputs, "sensory")
        cm = self.cm * self.unfolds
        for _ in range(self.unfolds):
            numerator, denominator = self.synapse(state, "inner")
            top = cm * state + self.gleak * self.vleak + (numerator + sensory_numerator)
            bottom = cm + self.gleak + (denominator + sensory_denominator)
            state = top / (bottom + 1e-8)
        return state


@pytest.mark.parametrize("device", DEVICES)
def test_a_liquid_network(device, tier, native):
    torch.manual_seed(0)
    squash = torch.sigmoid if device == "cuda" else lambda x: x / (1 + x.abs())
    plain = LiquidCell(5, 32, 4, squash).to(device)
    fused = autofuse.fuse(copy.deepcopy(plain))
    inputs = torch.rand(3, 8, 5, device=device)
    for _ in range(2):
        for model in (plain, fused):
            model.zero_grad()
            state = torch.full((8, 32), 0.1, device=device)
            for step in inputs:
                state = model(step, state)
            state.sum().backward()
        for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert_same(ours.grad, theirs.grad, None, name)


@pytest.mark.parametrize("device", DEVICES)
def test_twice_by_recorded_and_plain_ops(device, tier, native):
    def step(x, p, q):
        for _ in range(2):
            a = p * x
            b = p + q
            x = (a / b).sum(0)
        return x

    for seed in range(20):
        x, p, q = tensors(3, device, seed)
        grads = []
        for wrap in (lambda t: t, autofuse.wrap, autofuse.wrap):
            ours = [nn.Parameter(t.clone()) for t in (p, q)]
            step(wrap(x.clone()), *ours).square().sum().backward()
            grads.append([t.grad for t in ours])
        assert_same(grads[1:], [grads[0]] * 2, None, f"seed {seed}")


@pytest.mark.parametrize("device", DEVICES)
def test_with_create_graph(device, tier, native):
    """First derivatives have eager's bits; second ones run through other nodes than eager's."""
    rng = random.Random(SEED)
    for number in range(COUNT):
        source = make_program(rng, device)
        space = {"torch": torch, "F": nn.functional, "Doubled": Doubled}
        exec(source, space)
        results = []
        for wrap in (lambda t: t, autofuse.wrap):
            x, y, p, q, r = [nn.Parameter(t) for t in tensors(5, device, number)]
            kept = space["run"](wrap(x.detach()), wrap(y.detach()), p, q, r[0])
            loss = sum((t * t.detach()).sum() for t in kept if t.requires_grad)
            if not isinstance(loss, torch.Tensor):
                results.append(([], []))
                continue
            first = torch.autograd.grad(loss, [p, q], create_graph=True, allow_unused=True)
            penalty = sum((g.square().sum() for g in first if g is not None), torch.zeros(()))
            second = ()
            if penalty.requires_grad:
                second = torch.autograd.grad(penalty, [p, q], allow_unused=True)
            results.append(([g if g is None else g.detach() for g in first], list(second)))
        (want, wanted), (got, gotten) = results
        assert_same(got, want, None, source)
        for ours, theirs in zip(gotten, wanted, strict=True):
            assert (ours is None) == (theirs is None), source
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=source)
