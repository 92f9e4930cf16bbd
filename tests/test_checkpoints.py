"""What autograd saves, where hooks are told of it, and what torch.utils.checkpoint runs twice.

The programs compute what the CPU's kernels compute with eager's bits, so that all is compared
exactly: what hooks were given and in which order, values and gradients.
"""

import functools
import gc
import random
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from reduced import REDUCED
from test_autograd_order import COUNT, SEED, Doubled, gradients, make_program, tensors
from test_reductions import recorded, recording  # noqa: F401
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import autofuse
from support import DEVICES, assert_same

WAYS = ["fuse", "wrap"]


def leaves(device, count=3, shape=(4, 6)):
    generator = torch.Generator().manual_seed(3)
    made = [(torch.rand(shape, generator=generator) + 0.5).to(device) for _ in range(count)]
    return [x.requires_grad_() for x in made]


def compared(program, way, device, count=3, steps=1, rtol=None):
    """Run `program` of `count` leaves in eager PyTorch and by autofuse, and compare what it gives.

    Values, gradients, and whatever else it returns. The last step's counters.
    """
    seen = []
    for run in ("eager", way):
        for _ in range(steps):
            torch.manual_seed(0)
            xs = leaves(device, count)
            autofuse.reset_stats()
            if run == "fuse":
                result, *others = autofuse.fuse(program)(*xs)
            else:
                first = autofuse.wrap(xs[0]) if run == "wrap" else xs[0]
                result, *others = program(first, *xs[1:])
            result.sum().backward()
        seen.append((result.detach(), [x.grad for x in xs], *others))
    assert_same(seen[1], seen[0], rtol)
    return autofuse.stats()


# --- hooks of the program's ----------------------------------------------------------------------


def arithmetic(x, w, b):
    """Ops of which eager saves both operands, one, none, and the result."""
    scale = w.detach() * 2.0 + 1.0  # no gradient leads here: nothing is saved
    y = x * w + b
    y = torch.where(y > 1.0, y * scale, y / w)
    return (y * y).relu() * 0.5 - x, y


class Told:
    """What hooks were given, in order; conditions stay what they are."""

    def __init__(self, xs, change=lambda t: t, back=lambda t: t):
        self.xs, self.change, self.back, self.events = xs, change, back, []

    def pack(self, t):
        leaf = [k for k, x in enumerate(self.xs) if x is t]
        facts = leaf, t.requires_grad, t.is_leaf, t._version, torch.is_grad_enabled()
        self.events.append(("pack", *facts, autofuse.unwrap(t.detach()).clone()))
        return self.change(t) if t.is_floating_point() else t

    def unpack(self, packed):
        self.events.append(("unpack", packed.dtype, packed.device.type))
        return self.back(packed) if packed.is_floating_point() else packed


CHANGES = {
    "kept": (lambda t: t, lambda t: t),
    "cloned": (lambda t: t.clone(), lambda t: t),
    "halved": (lambda t: t.to(torch.float16), lambda t: t.to(torch.float32)),
    "mutated": (lambda t: t * 2.0, lambda t: t.add_(1.0)),
    "another": (torch.zeros_like, torch.ones_like),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_are_told_what_eager_tells_them(change, way, device, tier):
    def program(*xs):
        before = xs[0] * xs[1] + 0.25  # pending when the hooks come
        told = Told(xs, *CHANGES[change])
        with saved_tensors_hooks(told.pack, told.unpack):
            z, y = arithmetic(before, xs[1], xs[2])
            count = len(told.events)
        after = z * y * xs[0]
        return after, count, told.events

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["save_on_cpu", "checkpoint"])
def test_where_nodes_would_add_gradients_in_another_order_each_op_has_one(how, way, device, tier):
    """What is used first leads to what is seen last, and the other way round."""

    def block(x, w, b):
        base, part = x * w, x[:, :3] * 2.0
        early, late = base * base, base * b
        seen = late * 0.3
        del base, late
        return seen, early * 0.7, part

    def program(*xs):
        if how == "checkpoint":
            a, b, c = checkpoint(block, *xs, use_reentrant=False)
        else:
            with save_on_cpu():
                a, b, c = block(*xs)
        return torch.cat((a + b, c), 1), a, b, c

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_saves_nothing_is_fused_under_hooks(device, always):
    x, y = leaves(device, 2)
    x, packed = autofuse.wrap(x.detach()), []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        z = (x * 2.0 + 1.0).relu() * x
        assert autofuse.is_pending(z) and not packed
        eager = y * z
        assert len(packed) == 1 and eager.requires_grad
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.ops_recorded == 4
    assert stats.eager_ops["mul", "saved tensor hooks"] == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_raises_raises_where_eager_does(way, device, tier):
    def program(x, w, b):
        lines, packed = [], []

        def pack(t):
            packed.append(t)
            if len(packed) == 4:
                raise KeyError("full")
            return t

        y = x
        with pytest.raises(KeyError, match="full"), saved_tensors_hooks(pack, lambda t: t):
            for k in range(5):
                lines.append(k)
                y = y * w
        return y * b, lines, len(packed)

    compared(program, way, device)


@pytest.mark.parametrize("how", ["told", "save_on_cpu", "checkpoint", "reentrant", "detached"])
@pytest.mark.parametrize("name", REDUCED)
def test_reductions_under_hooks_and_in_checkpoints(recorded, on, always, name, how):  # noqa: F811
    """What hooks are told, gradients, and again what is computed of them."""

    def found(wrap):
        xs = [x.requires_grad_() for x in (*torch.rand(2, 4, 8).unbind(), *torch.rand(2, 8))]
        x, y, w, b = (wrap(x) for x in xs)
        told = Told(xs, *CHANGES["cloned"])

        def block(x, y, w, b):
            z = REDUCED[name](x * y, y, w, b)
            return z * 2.0, REDUCED[name](x - y * 0.5, y, w, b)

        before = x * 0.5
        if how == "told":
            with saved_tensors_hooks(told.pack, told.unpack):
                made = block(before, y, w, b)
        elif how == "save_on_cpu":
            with save_on_cpu():
                made = block(before, y, w, b)
        elif how == "detached":
            with torch.no_grad():
                made = block(before, y, w, b)
            made = (*made, (before * made[0].mean()).sum())
        else:
            made = checkpoint(block, before, y, w, b, use_reentrant=how == "reentrant")
        total = sum(one.sum() * 0.75 for one in made)
        total.backward()
        made = [autofuse.unwrap(one).detach() for one in (*made, total)]
        return made, [x.grad for x in xs], told.events

    torch.manual_seed(0)
    want = found(lambda t: t)
    for _ in range(2):
        torch.manual_seed(0)
        assert_same(found(autofuse.wrap), want, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_nested_hooks(way, device, tier):
    def program(x, w, b):
        events = []

        def hooks(name):
            return saved_tensors_hooks(
                lambda t: events.append((name, tuple(t.shape))) or t,
                lambda t: events.append((name, "back")) or t,
            )

        with hooks("outer"):
            y = x * w
            with hooks("inner"):
                z = y * b
            z = z * x
        return z * w, events

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_mutation_is_allowed_on_saved_tensors(way, device, tier):
    def program(x, w, b):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = x * w
            z = y * b
            y.mul_(3.0)
            gradients = torch.autograd.grad((z * y).sum(), (x, w, b))
        return x * w, gradients

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_mutated_is_cloned_as_in_eager(way, device, tier):
    """By operators, views, items, leaves and `out=`: as many tensors are cloned and kept."""

    def program(x, w, b):
        errors = []
        with torch.autograd.graph.allow_mutation_on_saved_tensors() as context:
            y = x * w
            z = y * b
            view = z.view(-1)[3:]
            q = z * z
            view += 1.0
            u = (y * 2.0).relu_()
            y[0] = 1.0
            with torch.no_grad():
                w.mul_(2.0)
                torch.mul(q, 3.0, out=q.detach())
            kept = len(context.cloned), len(context.original)
            gradients = torch.autograd.grad((z * y + u * q).sum(), (x, w, b))
            later = z * y
            with pytest.raises(RuntimeError, match="cannot be nested") as error:
                with torch.autograd.graph.allow_mutation_on_saved_tensors():
                    pass
            errors.append(str(error.value))
        with torch.no_grad():
            w.div_(2.0)
        with pytest.raises(AssertionError, match="outside of the") as error:
            later.sum().backward()
        return x * w, gradients, kept, [*errors, str(error.value)]

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_tensors_saved_on_the_cpu(way, device, tier):
    def program(x, w, b):
        with save_on_cpu():
            return arithmetic(x, w, b)

    compared(program, way, device)


def test_hooks_of_one_thread_are_not_those_of_another(always):
    x = autofuse.wrap(leaves("cpu", 1)[0])
    entered, over, packed = threading.Event(), threading.Event(), []

    def hook():
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            entered.set()
            over.wait(10)

    thread = threading.Thread(target=hook)
    thread.start()
    assert entered.wait(10)
    y = x * x + 1.0
    assert autofuse.is_pending(y)
    over.set()
    thread.join()
    y.sum().backward()
    assert not packed and torch.equal(x.grad, 2.0 * x.detach())


# --- hooks that cannot tell when they are called -------------------------------------------------


def patient(pack, unpack=lambda packed: packed):
    """Hooks as `save_on_cpu` has them, which are told when a flush is over."""
    hooks = object.__new__(save_on_cpu)
    saved_tensors_hooks.__init__(hooks, pack, unpack)
    return hooks


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request):
    was = autofuse.config.native
    autofuse.config.native = request.param
    yield
    autofuse.config.native = was


def run_of(source):
    space = {"torch": torch, "F": F, "Doubled": Doubled}
    exec(source, space)
    return space["run"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["backward", "twice", "hooks", "parameters alone"])
def test_patient_hooks_are_told_of_the_same_tensors_in_the_same_order(device, how, tier, native):
    """Programs of ops that are recorded, that are not, and that autofuse does not see."""
    rng = random.Random(SEED)
    for number in range(COUNT // 2):
        source = make_program(rng, device)
        values = tensors(5, device, number)
        values[4] = values[4][0]

        run = run_of(source)

        def result(wrap, run=run, values=values):
            told = []

            def pack(t):
                told.append((autofuse.unwrap(t.detach()).clone(), torch.is_grad_enabled()))
                return t.detach()

            def under_hooks(*args):
                with patient(pack):
                    return run(*args)

            return gradients(under_hooks, values, wrap, how), told

        want = result(lambda t: t)
        for _ in range(2):
            try:
                assert_same(result(autofuse.wrap), want, None)
            except AssertionError as error:
                raise AssertionError(f"program {number} of {SEED}\n{source}\n{error}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_what_patient_hooks_give_back_is_what_backward_reads(device, always):
    """Other values, another layout, another dtype."""
    x, w = leaves(device, 2)
    for change in (
        lambda t: t + 1.0,
        lambda t: t.t().contiguous().t(),
        lambda t: t.to(torch.float16),
        lambda t: torch.cat([t, t], 1)[:, ::2],
    ):
        results = []
        for wrap in (lambda t: t, autofuse.wrap):
            x.grad = w.grad = None
            with patient(lambda t: t.detach(), change):
                y = ((wrap(x) * w) * x).relu() * w
            y.sum().backward()
            results.append((x.grad, w.grad))
        assert_same(results[1], results[0], None)
    assert autofuse.stats().kernels_launched


@pytest.mark.parametrize("device", DEVICES)
def test_dead_values_are_saved_where_hooks_are_told(device, always):
    """Also those of ops whose results nobody has taken: eager's nodes were there, and have gone."""
    x, w = leaves(device, 2)
    told, results = [], []
    for wrap in (lambda t: t, autofuse.wrap):
        told.append([])
        with patient(lambda t: told[-1].append(t.detach().clone()) or t.detach()):
            wrap(x) * w
            y = (wrap(x) * w + 1.0).relu() * w
            (y * x).relu()
        results.append(y.detach())
    assert len(told[0]) == 10
    assert_same(told[1], told[0], None)
    assert_same(results[1], results[0], None)
    assert autofuse.stats().kernels_launched == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_error_of_a_patient_hook_comes_with_the_flush(device, tier):
    x, w = leaves(device, 2)
    told = []

    def pack(t):
        told.append(t)
        if len(told) == 3:
            raise KeyError("full")
        return t.detach()

    with patient(pack):
        y = autofuse.wrap(x) * w
        with pytest.raises(KeyError, match="full"):
            for _ in range(5):
                y = y * w
            autofuse.materialize(y)
    assert len(told) == 3
    (w * w).sum().backward()
    assert not any(recorder.chain for recorder in autofuse.chain.state.all_recorders)


def test_nothing_is_held_of_what_hooks_were_told(always):
    """Neither by autofuse nor, once it has gone, by what one of several nodes has saved."""
    x, w = leaves("cpu", 2)

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    there = []

    def pack(t):
        packed = Packed(t)
        there.append(weakref.ref(packed))
        return packed

    with patient(pack, lambda packed: packed.tensor):
        y = autofuse.wrap(x) * w
        z = (y * x).relu()
        autofuse.materialize(y, z)
    assert len(there) == 5 and all(ref() is not None for ref in there)
    y.sum().backward()
    gone = [ref() is None for ref in there]
    assert gone == [True, True, False, False, False]
    del y, z
    gc.collect()
    assert all(ref() is None for ref in there)
    hook = patient(pack)
    known = weakref.ref(hook.pack_hook)
    with hook:
        autofuse.wrap(x) * w
    del hook
    gc.collect()
    assert known() is None


def test_what_another_thread_needs_is_told_all_the_same(always):
    x, w = leaves("cpu", 2)
    told = []
    with patient(lambda t: told.append(t) or t.detach()):
        y = (autofuse.wrap(x) * w).relu() * x
        thread = threading.Thread(target=y.tolist)
        thread.start()
        thread.join()
        assert not told
    assert len(told) == 5
    y.sum().backward()
    assert torch.equal(w.grad, (x * x).detach())


def test_a_kernel_that_fails_leaves_what_is_saved_as_it_is(always, monkeypatch):
    x, w = leaves("cpu", 2)

    def fail(*args):
        raise RuntimeError("no loops")

    autofuse.record.modes.forget_all("test")
    monkeypatch.setattr(autofuse.record.ways, "make_pieces", fail)
    told = []
    with patient(lambda t: told.append(t) or t.detach()):
        y = (autofuse.wrap(x) * w).relu() * x
    monkeypatch.undo()
    y.sum().backward()
    assert len(told) == 5 and torch.equal(w.grad, (x * x).detach())
    assert autofuse.stats().replays == 1
    autofuse.record.modes.forget_all("test")


# --- checkpoints ---------------------------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])


def block(x, w, b):
    for _ in range(3):
        x = (x * w + b).relu() * 0.5
        x = torch.where(x > 1.0, x / w, x * b) - w
    return x


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_gives_what_it_gives_in_eager(way, device, reentrant, tier):
    def program(x, w, b):
        y = checkpoint(block, x * 2.0, w, b, use_reentrant=reentrant)
        return checkpoint(block, y + x, w, b, use_reentrant=reentrant) * 0.5, y.requires_grad

    compared(program, way, device, steps=3)


def test_a_chain_has_to_be_longer_where_hooks_are_told(on):
    """On the CPU four ops pay under grad, and eight where something saves what nodes do."""
    x, w = autofuse.wrap(torch.randn(4, 4)), torch.randn(4, 4, requires_grad=True)

    def kernels(ops, told):
        def run(x):
            y = x * w
            for k in range(ops - 1):
                y = y + w if k % 2 else y * w
            return y

        autofuse.record.modes.forget_all("test")
        for _ in range(8):
            autofuse.reset_stats()
            y = checkpoint(run, x, use_reentrant=False) if told else run(x)
            autofuse.materialize(y)
        return autofuse.stats().kernels_launched

    assert [kernels(ops, False) for ops in (2, 5, 12)] == [0, 1, 1]
    assert [kernels(ops, True) for ops in (2, 5, 12)] == [0, 0, 1]


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_in_checkpoints(device, reentrant, tier, native):
    rng = random.Random(SEED + 1)
    for number in range(COUNT // 2):
        source = make_program(rng, device)
        values = tensors(5, device, number)
        values[4] = values[4][0]

        run = run_of(source)

        def result(wrap, how, run=run, values=values):
            def checkpointed(*args):
                inner = lambda *args: tuple(run(*args))  # noqa: E731
                return list(checkpoint(inner, *args, use_reentrant=reentrant))

            return gradients(checkpointed, values, wrap, how)

        for how in ("backward",) if reentrant else ("backward", "twice", "parameters alone"):
            want = result(lambda t: t, how)
            for _ in range(2):
                try:
                    assert_same(result(autofuse.wrap, how), want, None)
                except AssertionError as error:
                    message = f"program {number} of {SEED + 1}, {how}\n{source}\n{error}"
                    raise AssertionError(message) from error


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_draws_the_same_numbers_again(way, device, reentrant, tier):
    def drawing(x, w, b):
        x = F.dropout(x * w + b, 0.5) * 2.0 + x
        return (x + torch.rand_like(x.detach())) * w

    def program(x, w, b):
        y = checkpoint(drawing, x, w, b, use_reentrant=reentrant)
        drawn = torch.rand(3)
        return y * x, drawn

    compared(program, way, device)


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_in_checkpoints(way, device, reentrant, tier):
    def inner(x, w, b):
        return (x * w + b) * x

    def outer(x, w, b):
        y = checkpoint(inner, x * w, w, b, use_reentrant=reentrant) * w
        return checkpoint(inner, y, b, w, use_reentrant=reentrant) + b * x

    def program(x, w, b):
        return (checkpoint(outer, x * 1.5, w, b, use_reentrant=reentrant) * w,)

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_under_hooks_and_hooks_in_a_checkpoint(way, device, tier):
    def program(x, w, b):
        told, inside = [], []

        def hooked(x, w, b):
            y = block(x, w, b)
            with saved_tensors_hooks(lambda t: inside.append(t.shape) or t, lambda t: t):
                return y * w * x

        with saved_tensors_hooks(lambda t: told.append(t.shape) or t, lambda t: t):
            y = checkpoint(hooked, x * w, w, b, use_reentrant=False)
            z = y * x
        return z, len(told), len(inside)

    compared(program, way, device)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.parametrize("way", ["eager", *WAYS])
def test_a_second_run_that_differs_is_told_as_in_eager(way, extra, early, tier):
    """Of another number of saved tensors, or of other ones."""

    def run(way):
        runs = []

        def changing(x, w):
            runs.append(None)
            for _ in range(3 if len(runs) == 1 else 3 + extra):
                x = x * w + 1.0
            return x * w[:2] if extra == 1 and len(runs) > 1 else x * w

        def program(x, w):
            return checkpoint(changing, x * 2.0, w, use_reentrant=False, early_stop=early)

        x, w = leaves("cpu", 2, (2, 6))
        if way == "fuse":
            y = autofuse.fuse(program)(x, w)
        else:
            y = program(autofuse.wrap(x) if way == "wrap" else x, w)
        try:
            y.sum().backward()
        except CheckpointError as error:
            return str(error), len(runs)
        return x.grad, w.grad, len(runs)

    got, want = run(way), run("eager")
    assert_same(got, want, None)


@REENTRANT
@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_a_checkpoint(way, reentrant, tier):
    class Error(Exception):
        pass

    def program(x, w, b):
        failing = []

        def fails(x, w):
            y = x * w
            if failing:
                raise Error
            failing.append(y.shape)
            return y * w

        y = checkpoint(fails, x * 2.0, w, use_reentrant=reentrant)
        with pytest.raises(Error):
            y.sum().backward()
        assert not any(recorder.chain for recorder in autofuse.chain.state.all_recorders)
        failing.clear()
        with pytest.raises(ZeroDivisionError):
            checkpoint(lambda x: [x * w, 1 // 0], x * w, use_reentrant=reentrant)
        x.grad = w.grad = None
        return x * w * b, len(failing)

    compared(program, way, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_through_a_checkpoint(way, device, tier):
    def program(x, w, b):
        y = checkpoint(lambda x, w: (x * w + 1.0) * x * w, x * b, w, use_reentrant=False)
        first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        return first[0] * first[1] + y, [g.detach() for g in first]

    compared(program, way, device, rtol=1e-6)  # as everywhere with second derivatives


@REENTRANT
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_without_grad(way, reentrant, always):
    x, w, b = leaves("cpu")
    with torch.no_grad():
        first = autofuse.wrap(x) if way == "wrap" else x
        run = autofuse.fuse(block) if way == "fuse" else block
        y = checkpoint(run, first.detach(), w, b, use_reentrant=reentrant)
    assert torch.equal(autofuse.unwrap(y), block(x, w, b).detach())
    assert autofuse.stats().kernels_launched


def products(x, w, b):
    """Chains between products."""
    y = ((x * w + b).relu() * 0.5) @ w.t()
    y = torch.where(y[:, :1] > 1.0, x / w, x * b) - w
    return (y @ w.t())[:, :1] * x


def policies(told):
    """Of selective checkpoints: lists of ops, and functions; each is told of its own calls."""
    mm, mul, relu = (getattr(torch.ops.aten, op) for op in ("mm", "mul", "relu"))

    def some(context, op, *args, **kwargs):
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        told.append((str(op), context.is_recompute, shapes))
        save = op is mm.default or op is mul.Tensor and len(shapes) == 2
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return {
        "products": [mm.default],
        "pointwise": [mm.default, relu.default, mul.Tensor],
        "nothing": [],
        "a function": some,
        "all": lambda *args, **kwargs: True,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", policies([]))
def test_a_selective_checkpoint_saves_and_asks_as_in_eager(policy, way, device, tier):
    def program(x, w, b):
        told = []
        select = functools.partial(create_selective_checkpoint_contexts, policies(told)[policy])

        def region(x, w, b):
            y = checkpoint(products, x * w, w, b, use_reentrant=False, context_fn=select)
            return checkpoint(products, y * 0.5, w, b, use_reentrant=False)

        y = region(x * 2.0, w, b)
        y = checkpoint(region, y, w, b, use_reentrant=False, context_fn=select)
        y = checkpoint(region, y, w, b, use_reentrant=False)
        return y * x, told

    compared(program, way, device, steps=2)


@pytest.mark.parametrize("way", ["eager", *WAYS])
def test_a_selective_checkpoint_raises_what_it_raises_in_eager(way, tier):
    """Where it is differentiated again, where it differs, and where what it keeps was written."""

    def errors(first, w, b):
        select = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        options = {"use_reentrant": False, "context_fn": select}
        said, runs = [], []

        def differs(x, w):
            runs.append(None)
            y = x @ w.t()
            return (y.sin() if len(runs) > 1 else y * y) * y

        def written(x, w):
            y = x @ w.t()
            z = y * y.detach()
            with torch.no_grad():
                y.detach().mul_(2.0)
            return z

        y = checkpoint(products, first * w, w, b, **options)
        y.sum().backward(retain_graph=True)
        for function, loss in ((None, y), (differs, None), (written, None)):
            try:
                y = loss if function is None else checkpoint(function, first * w, w, **options)
                y.sum().backward()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
        return said

    def run(way):
        x, w, b = leaves("cpu")
        if way == "fuse":
            return autofuse.fuse(errors)(x, w, b)
        return errors(autofuse.wrap(x) if way == "wrap" else x, w, b)

    want = run("eager")
    assert len({*want}) == 3, want
    assert run(way) == want


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", [True, False], ids=["same numbers", "other numbers"])
def test_a_sequence_of_checkpoints(keep, way, device, reentrant, tier):
    def program(x, w, b):
        steps = [
            lambda x: x * w, lambda x: (x + b).relu() * x, lambda x: F.dropout(x * b, 0.5) * 2.0,
            lambda x: x / w, lambda x: x * x - b,
        ]  # fmt: skip
        options = {"use_reentrant": reentrant, "preserve_rng_state": keep}
        return checkpoint_sequential(steps, 3, x * 2.0, **options) * w, torch.rand(3)

    compared(program, way, device, steps=2)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_run_writes_what_eagers_writes(way, early, tier):
    """It ends with the last tensor that is needed: what is written after that is written once."""

    def program(x, w, b):
        count, mean = torch.zeros(()), torch.zeros(4, 6)

        def counted(x, w, b):
            count.add_(1.0)
            y = block(x, w, b) * w
            count.add_(1.0)
            mean.mul_(0.5).add_(y.detach())
            y = y + 1.0
            count.add_(1.0)
            return y

        with set_checkpoint_early_stop(early):
            y = checkpoint(counted, x * 2.0, w, b, use_reentrant=False)
            z = checkpoint(counted, y, w, b, use_reentrant=False)
            gradients = torch.autograd.grad(z.sum(), (x, w, b), retain_graph=True)
        return z * x, gradients, count.item(), mean

    compared(program, way, "cpu")


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((6, 6), 0.125))
        self.b = torch.nn.Parameter(torch.full((6,), 0.25))

    def forward(self, x, h):
        return ((h @ self.w + x) * self.b + 0.5).relu() * 0.5 + h * self.b - x


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
def test_a_recurrent_net_with_checkpoints_runs_kernels(device, reentrant, always):
    """40 steps, checkpointed every 10: each step's chain is one kernel in both runs."""
    results, stats = [], None
    for fused in (False, True):
        cell = Cell().to(device)
        xs, h = leaves(device, 40), torch.zeros(4, 6, device=device)

        def steps(h, *xs, cell=cell):
            for x in xs:
                h = cell(x, h)
            return h

        def program(h, *xs, steps=steps):
            for k in range(0, 40, 10):
                h = checkpoint(steps, h, *xs[k : k + 10], use_reentrant=reentrant)
            return h

        autofuse.reset_stats()
        h = (autofuse.fuse(program) if fused else program)(h, *xs)
        forward = autofuse.stats().kernels_launched
        h.sum().backward()
        stats = autofuse.stats()
        results.append((h.detach(), [x.grad for x in xs], [p.grad for p in cell.parameters()]))
    assert_same(results[1], results[0], None)
    assert forward == 40
    assert stats.kernels_launched == 40 + 80  # again, and a backward for each


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_step_leaves_nothing_to_the_collector(device, reentrant, always):
    """The second run ends early by an exception, whose frames hold what it has computed."""

    def block(x, w):
        for _ in range(3):
            x = torch.tanh(x @ w + 1.0) * x
        return x

    def tensors_alive():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    def step():
        x, w = leaves(device, 2, (6, 6))
        run = autofuse.fuse(lambda x, w: checkpoint(block, x, w, use_reentrant=reentrant))
        run(x, w).sum().backward()

    step()
    gc.collect()
    collects = gc.isenabled()
    try:
        gc.disable()
        before = tensors_alive()
        for _ in range(5):
            step()
        assert tensors_alive() <= before + 3
    finally:
        if collects:
            gc.enable()
