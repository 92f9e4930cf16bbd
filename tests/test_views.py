"""Views of pending values: index maps of a kernel where only a chain reads them, torch's own views
of their base where somebody holds them; and writes to what they share."""

import os
import random
import sys
import time

import pytest
import torch

import autofuse
from autofuse.kernel.again import completed
from autofuse.kernel.plan import make_pieces
from autofuse.ops.arithmetic import OPS
from autofuse.ops.views import ATTRIBUTES, VIEWS
from autofuse.program.program import ALIAS, STORED, Output, Pointwise, Program, Spec, View
from autofuse.record import flush
from autofuse.record import views as viewing
from autofuse.record.modes import forget_all
from support import (
    DEVICES,
    DTYPES,
    WIDE,
    assert_same,
    outcome,
    pieces_of,
    random_tensor,
    same_bits,
)

COUNT = int(os.environ.get("AUTOFUSE_TEST_VIEWS", "12"))  # of random programs, of ten blocks each
W = autofuse.wrap
WAYS = viewing.WAYS
SHAPE = 4, 6, 2


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Here one value is seen in more ways than a program would."""
    monkeypatch.setattr(viewing, "WAYS", 1 << 10)


# by name: a view of a tensor of SHAPE, or several
CASES = {
    "chunk": lambda x: x.chunk(3, 1),
    "torch.chunk": lambda x: torch.chunk(x, 4),
    "uneven chunk": lambda x: x.chunk(4, dim=1),
    "split": lambda x: x.split(2, 1),
    "torch.split": lambda x: torch.split(x, [1, 3]),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 5], 1),
    "tensor_split": lambda x: x.tensor_split(4, 1),
    "tensor_split at": lambda x: torch.tensor_split(x, (1, 3), dim=1),
    "hsplit": lambda x: x.hsplit(2),
    "vsplit": lambda x: x.vsplit(2),
    "dsplit": lambda x: x.dsplit(2),
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": lambda x: torch.unbind(x),
    "iteration": lambda x: tuple(x),
    "int": lambda x: x[1],
    "negative int": lambda x: x[-1],
    "slice": lambda x: x[1:3],
    "open slice": lambda x: x[2:],
    "empty slice": lambda x: x[3:3],
    "steps": lambda x: x[::2, 1::3],
    "None": lambda x: x[None, :, None],
    "Ellipsis": lambda x: x[..., 0],
    "all of it": lambda x: x[...],
    "tuple": lambda x: x[1:, 2, ::2],
    "mixed": lambda x: x[None, 0, ..., 1:, None],
    "one element": lambda x: x[3, 5, 1],
    "select": lambda x: x.select(1, 2),
    "torch.select": lambda x: torch.select(x, -1, 0),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "transpose": lambda x: x.transpose(0, 2),
    "torch.transpose": lambda x: torch.transpose(x, -1, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "torch.permute": lambda x: torch.permute(x, (1, 0, 2)),
    "movedim": lambda x: x.movedim(0, -1),
    "moveaxis": lambda x: torch.moveaxis(x, (0, 1), (2, 0)),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "T": lambda x: x[0].T,
    "H": lambda x: x[:, :, 0].H,
    "t": lambda x: x[1].t(),
    "adjoint": lambda x: x.adjoint(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[1:2].squeeze(),
    "squeeze one": lambda x: x[1:2, :, :1].squeeze(0),
    "squeeze several": lambda x: x[1:2, :, :1].squeeze((0, 2)),
    "expand": lambda x: x[:, :1].expand(4, 5, 2),
    "expand in front": lambda x: x.expand(3, -1, -1, -1),
    "expand_as": lambda x: x[0].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x[0, 0], (3, 2)),
    "flatten": lambda x: x.flatten(),
    "flatten two": lambda x: torch.flatten(x, 1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "view": lambda x: x.view(2, 2, 3, 4) if x.is_contiguous() else x.reshape(4, 6, 2),
    "reshape to less": lambda x: x.reshape(4, -1),
    "reshape to more": lambda x: x.reshape(2, 2, 6, 2, 1),
    "reshape across": lambda x: x.reshape(8, 6),
    "reshape_as": lambda x: x.reshape_as(x),
    "view_as": lambda x: x.view_as(x),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "diagonal beside": lambda x: torch.diagonal(x, 1),
    "unfold": lambda x: x.unfold(1, 3, 1),
    "chunk of transposed": lambda x: x.transpose(0, 1).chunk(2),
    "slice of flat": lambda x: x.flatten()[3:20:2],
    "flat slice": lambda x: x[1:3].flatten(),
    "flat of transposed": lambda x: x.transpose(0, 1).reshape(-1),
    "flat of joined": lambda x: x.flatten(0, 1).t(),
}

# by name: a tensor of SHAPE that is not contiguous, or is
LAYOUTS = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(SHAPE),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
}


def parts_of(value):
    return value if isinstance(value, tuple) else (value,)


def assert_seen_alike(got, want):
    """Two lists of tensors are alike in values, layout, versions, and in what they share."""
    assert_same(got, want, None)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.storage_offset() == theirs.storage_offset()
        assert ours._version == theirs._version
    assert sharing(got) == sharing(want)


def sharing(tensors):
    """Which of them share memory, and which are each one's base."""
    storages = [x.untyped_storage().data_ptr() if x.numel() else id(x) for x in tensors]
    bases = [x._base for x in tensors]
    return (
        [storages.index(one) for one in storages],
        [None if b is None else next((k for k, x in enumerate(tensors) if x is b), "gone")
         for b in bases],
    )  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_every_view_function_has_a_case():
    text = " ".join(CASES)
    missing = [name for name in (*VIEWS, *ATTRIBUTES) if name not in text]
    assert missing == ["__getitem__"]


def layouts(device, tier):
    """All of them where kernels run; eager ops, of the other tiers, know nothing of index maps."""
    every = tier == "kernels" or device == "cuda" or WIDE
    return LAYOUTS.values() if every else (LAYOUTS["contiguous"], LAYOUTS["permuted"])


@pytest.mark.parametrize("name", CASES)
def test_a_view_that_is_held_is_eagers(device, on, tier, name):
    case = CASES[name]
    x = random_tensor(SHAPE, torch.float32, device)

    def run(x, layout):
        base = layout(x) * 2.0
        parts = parts_of(case(base))
        return [base, *parts, *(part + 1.0 for part in parts)]

    for layout in layouts(device, tier):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert_seen_alike(run(W(x), layout), run(x.clone(), layout))


@pytest.mark.parametrize("name", CASES)
def test_a_view_that_is_only_read_is_eagers(device, on, tier, name):
    case = CASES[name]
    x = random_tensor(SHAPE, torch.float32, device)

    def run(x, layout):
        y = layout(x)
        read = [part * 3.0 - part for part in parts_of(case(y * 2.0 + y))]
        again = [x.neg() for x in read]
        return [*again, *(one.abs() for one in parts_of(case(y * y)))]

    for layout in layouts(device, tier):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert_seen_alike(run(W(x), layout), run(x.clone(), layout))


@pytest.mark.parametrize("name", CASES)
def test_a_contiguous_copy_of_a_view_is_eagers(device, on, tier, name):
    """And what views and writes make of it; where the view is contiguous, it is no copy."""
    case = CASES[name]
    x = random_tensor(SHAPE, torch.float32, device)

    def run(x, layout):
        base = layout(x) * 2.0
        parts = [part.contiguous() for part in parts_of(case(base))]
        again = [part.view(-1)[:5] * 2.0 for part in parts]
        if not torch.is_grad_enabled():
            for part in parts[:1]:
                part.add_(1.0)
        clones = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return [base, *parts, *again, *clones]

    for layout in layouts(device, tier):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert_seen_alike(run(W(x), layout), run(x.clone(), layout))


def test_a_contiguous_copy_ends_no_chain(device, on, always):
    """A shuffle of channels: what is put side by side is read in another order by one kernel."""
    a, b = (random_tensor((2, 4, 3, 3), torch.float32, device) for _ in range(2))

    def shuffled(a, b):
        x = torch.cat([a * 2.0, b.relu()], 1)
        return x.view(2, 2, 4, 3, 3).transpose(1, 2).contiguous().view(2, 8, 3, 3) + 1.0

    def turned(a, b):
        return (a * 2.0 + b).permute(0, 2, 3, 1).contiguous().view(-1) * 3.0

    def named(a, b):
        return (a * 2.0 + b).transpose(0, 1).contiguous(memory_format=torch.contiguous_format) * 3.0

    for call, kernels in ((shuffled, 3), (turned, 1), (named, 1)):
        for _ in range(3):
            autofuse.reset_stats()
            got = autofuse.materialize(call(W(a), W(b)))
            stats = autofuse.stats()
            assert stats.kernels_launched <= kernels and stats.ops_eager == 0, stats
            assert_same(got, call(a, b), None)


def test_gradients_through_a_contiguous_copy(device, on):
    x = random_tensor((4, 6), torch.float32, device)
    w = random_tensor((6, 4), torch.float32, device)

    def trained(own):
        leaf = x.clone().requires_grad_()
        y = ((own(leaf) * 2.0).t().contiguous() * own(w)).sin()
        autofuse.unwrap(autofuse.materialize(y)).backward(w)
        return leaf.grad

    for _ in range(3):
        assert_same(trained(autofuse.wrap), trained(lambda x: x), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_dtype(device, name, dtype):
    x = random_tensor(SHAPE, dtype, device)

    def run(x):
        base = x == x if dtype is torch.bool else x + x
        parts = parts_of(CASES[name](base))
        return [*parts, *(part == part for part in parts)]

    assert_seen_alike(run(W(x)), run(x.clone()))


def test_views_of_one_value_end_no_chain(device, on, always):
    x = random_tensor(SHAPE, torch.float32, device)
    for name, case in CASES.items():
        plain = x * 2.0
        if parts_of(case(plain))[0]._base is not plain:  # a copy
            continue
        autofuse.reset_stats()
        base = W(x) * 2.0
        parts = parts_of(case(base))
        stats = autofuse.stats()
        assert autofuse.is_pending(base), name
        assert all(map(autofuse.is_pending, parts)), name
        assert stats.ops_eager == 0 and not stats.flushes, name
        flush.flush_all("test")


def test_an_lstm_cell_is_one_kernel_after_its_products(device, on):
    gates, c = (random_tensor((8, n), torch.float32, device) for n in (64, 16))

    def cell(gates, c):
        i, f, g, o = (gates + 1.0).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    autofuse.reset_stats()
    got = cell(W(gates), W(c))
    autofuse.materialize(got)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.live_outs_stored == 2 and stats.ops_eager == 0
    assert_same(got, cell(gates, c), 1e-6)

    def kept(gates, c):
        gates = gates + 1.0
        return cell(gates, c), gates.chunk(4, 1), gates

    autofuse.reset_stats()
    got, parts, whole = kept(W(gates), W(c))
    autofuse.materialize((got, parts, whole))
    assert autofuse.stats().kernels_launched == 1  # which stores the whole in four parts
    plain = gates + 1.0
    assert_seen_alike([whole, *parts], [plain, *plain.chunk(4, 1)])

    def held(gates, c):
        i, f, g, o = parts = (gates + 1.0).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c], parts

    autofuse.reset_stats()
    got, parts = held(W(gates), W(c))
    autofuse.materialize((got, parts))
    assert autofuse.stats().kernels_launched == 1  # which stores the gates in four parts
    assert_seen_alike(parts, (gates + 1.0).chunk(4, 1))
    assert_same(got, held(gates, c)[0], 1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_view_that_only_a_chain_reads_gets_no_memory():
    x = W(torch.randn(1 << 20, 4, device="cuda"))

    def run():
        a, b, c, d = (x * 2.0).unbind(1)
        return (a + b) * (c - d)

    autofuse.materialize(run())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = autofuse.materialize(run())
    assert torch.cuda.max_memory_allocated() - before == kept.nbytes == 1 << 22


def test_what_is_allocated(device, on, monkeypatch):
    """Memory for results and for what somebody holds a view of, and for nothing else."""
    x = W(random_tensor((64, 64), torch.float32, device))

    def stored(*held):
        autofuse.reset_stats()
        autofuse.materialize(held)
        return autofuse.stats().live_outs_stored, autofuse.stats().kernels_launched

    y = x * 2.0
    z = y[:32] + y[32:]
    del y
    assert stored(z) == (1, 1)
    y = x * 2.0
    v = y[:32]
    del y
    assert stored(v) == (1, 1)
    assert v._base.shape == (64, 64)
    y = x * 2.0
    v, w = y.chunk(2)
    assert stored(v, w, y) == (1, 1)
    y = x * 2.0
    v, w = y.chunk(2, 1)
    z = v * w
    assert stored(v, w, z) == (2, 1)  # the halves where they belong, and their product
    y = x * 2.0
    z = y[1:] - y[:-1]
    assert stored(z, y) == (2, 2)
    y = x * 2.0
    z = y.t() + y
    assert stored(z, y) == (2, 1)


def test_a_value_read_at_several_places_is_computed_there(device, on):
    x = random_tensor((6, 32), torch.float32, device)

    def run(x):
        y = x * 3.0 + 1.0
        return y[:, 1:] - y[:, :-1]

    autofuse.reset_stats()
    got = run(W(x))
    autofuse.materialize(got)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.live_outs_stored == 1
    assert_same(got, run(x), None)


def test_what_would_be_computed_too_often_is_stored(device):
    """Iterated stencils: the lines of one kernel would grow as the square of their number."""
    x = random_tensor((64, 64), torch.float32, device)

    def run(x):
        for _ in range(8):
            x = x[1:-1, 1:-1] + 0.25 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2])
        return x

    autofuse.reset_stats()
    got = run(W(x) * 1.0)
    autofuse.materialize(got)
    assert 2 < autofuse.stats().kernels_launched < 16
    assert_same(got, run(x * 1.0), None)


def program_of(last, rows=64, columns=64, heavy=False):
    """exp or neg of one Input, and `last` of two views of it."""
    whole = Spec("f32", (rows, columns), (columns, 1))
    half = Spec("f32", (rows - 1, columns), (columns, 1))
    steps = (
        Pointwise(OPS["exp" if heavy else "neg"], (~0,), "f32", whole),
        View((0,), half, 0),
        View((0,), half, columns),
        Pointwise(OPS[last], (1, 2), "f32", half),
    )
    return Program(steps, (whole,), (), (Output(3),))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_where_computing_again_costs_more_than_memory(where):
    """By bytes and counts: a launch outweighs small tensors, a trip through memory cheap ops."""
    small = completed(program_of("add", rows=8, columns=8, heavy=True), where)
    assert small.live == (3,)
    cheap = completed(program_of("add", rows=1 << 14, columns=1 << 10), where)
    heavy = completed(program_of("add", rows=1 << 14, columns=1 << 10, heavy=True), where)
    if where == "cuda":  # 16 million elements: a trip of 134 MB, 45 us; an op 4.7 us, a function 38
        assert cheap.live == heavy.live == (3,)
    else:
        assert cheap.live == (3,) or cheap.live == (0, 3)
        assert heavy.live == (0, 3)


def turned(rows, columns, inputs=2, apart=False):
    """What several Inputs make, transposed and copied; apart: the Inputs are transposed, too."""
    lies, seen = (
        Spec("f32", (rows, columns), (columns, 1)),
        Spec("f32", (columns, rows), (1, columns)),
    )
    copied = Spec("f32", (columns, rows), (rows, 1))
    given = Spec("f32", (rows, columns), (1, rows)) if apart else lies
    steps = [Pointwise(OPS["neg"], (~0,), "f32", lies)]
    for k in range(1, inputs):
        steps.append(Pointwise(OPS["add"], (k - 1, ~k), "f32", lies))
    last = len(steps)
    steps += [
        View((last - 1,), seen, 0),
        Pointwise(OPS["clone_contiguous"], (last,), "f32", copied),
    ]
    return Program(tuple(steps), (given,) * inputs, (), (Output(last + 1),))


def test_what_would_be_read_across_rows_is_stored_first():
    """Of several tensors, each element of which takes a line of a cache; on a GPU, and where that
    takes longer than another launch."""
    assert completed(turned(4096, 4096, 1), "cuda").live == (2,)
    assert completed(turned(4096, 4096, 2), "cuda").live == (1, 3)
    assert completed(turned(4096, 4096, 3), "cuda").live == (2, 4)
    assert completed(turned(64, 64, 3), "cuda").live == (4,)
    assert completed(turned(4096, 4096, 3), "cpu").live == (4,)
    # these are read along the rows of the copy, and across those of what would be stored
    assert completed(turned(4096, 4096, 3, apart=True), "cuda").live == (4,)
    # of a few columns one line of a cache has all
    assert completed(turned(1 << 22, 4, 3), "cuda").live == (4,)
    (piece,) = pieces_of(turned(64, 64, 3), "cuda", 4)
    assert [line.op.name for line in piece.plan.lines] == ["neg", "add", "add", "clone_contiguous"]
    first, second = make_pieces(completed(turned(4096, 4096), "cuda"), "cuda")
    assert (first.stores, second.stores) == ((1,), (3,)), "each along its rows"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_of_one_element_without_dimensions(device):
    """A loop without axes, of which the view alone is wanted, its base, or both."""
    one, none = Spec("f32", (1,), (1,)), Spec("f32", (), ())
    steps = (
        Pointwise(OPS["add"], (~0, ~1), "f32", one),
        View((0,), none, 0),
        Pointwise(OPS["clone_contiguous"], (1,), "f32", none),
    )
    for outputs in ((Output(2),), (Output(0), Output(2)), (Output(1, ALIAS), Output(2))):
        program = completed(Program(steps, (one, one), (), outputs), device)
        assert {k for piece in make_pieces(program, device) for k in piece.stores} >= {2}


def test_plans_of_views():
    program = program_of("add")
    (piece,) = pieces_of(program, "cuda", 3)
    assert [line.op.name for line in piece.plan.lines] == ["neg", "neg", "add"]
    assert piece.loads == (~0, ~0) and piece.offsets == (0, 64 * 4, 0)
    held = Program(program.steps, program.inputs, (), (Output(1, ALIAS), Output(3)))
    assert completed(held, "cuda").outputs == (Output(0, STORED), Output(1, ALIAS), Output(3))


# --- writes to what they share -------------------------------------------------------------------

WRITES = {
    "add_": lambda x, k: x.add_(k + 1.0),
    "mul_ by itself": lambda x, k: x.mul_(x),
    "relu_": lambda x, k: x.relu_(),
    "+=": lambda x, k: x.__iadd__(0.5),
    "[...] =": lambda x, k: x.__setitem__(..., 7.0 + k),
    "copy_": lambda x, k: x.copy_(x.neg()),
    "zero_": lambda x, k: x.zero_(),
}
SIMPLE = ["chunk", "int", "slice", "steps", "transpose", "unsqueeze", "flatten", "expand in front",
          "reshape to more", "diagonal", "unfold"]  # fmt: skip


def levels(x, first, second):
    """A value, a view of it, and a view of that."""
    one = parts_of(CASES[first](x))[-1]
    two = one if second is None else one[..., :1].transpose(0, -1) if one.ndim else one[None]
    return one, two


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("first", SIMPLE)
@pytest.mark.parametrize("second", [None, "view"])
def test_writes_and_reads_of_two_levels(device, on, first, second, write):
    """Each of a value, its view and the view of that is written, and all are read after it.

    Before the write too: what was recorded then has the old value. Whoever lets go of one changes
    nothing for the others.
    """
    x = random_tensor(SHAPE, torch.float32, device)

    def run(x, target, gone):
        base = x * 2.0
        held = [base, *levels(base, first, second)]
        before = [one + 1.0 for one in held]
        del base
        written = held[target]
        if gone is not None:
            held[gone] = None
        WRITES[write](written, target)
        held = [one for one in held if one is not None]
        after = [one * 3.0 for one in held]
        versions = [one._version for one in held]
        return [*held, *before, *after], versions

    for target in range(3):
        for gone in (None, 0, 1, 2):
            ours, theirs = (
                outcome(lambda t=target, g=gone, x=x: run(x, t, g), ()) for x in (W(x), x.clone())
            )
            if theirs[1] is not None:  # of memory that overlaps itself
                assert type(ours[1]) is type(theirs[1]) and str(ours[1]) == str(theirs[1])
                continue
            assert ours[1] is None, ours[1]
            assert ours[0][1] == theirs[0][1], (target, gone)
            assert_seen_alike(ours[0][0], theirs[0][0])


def test_a_pending_base_is_renamed_where_nobody_holds_a_view(device, on):
    x = W(random_tensor((4, 4), torch.float32, device))
    y = x * 2.0
    z = y[0] + y[1]
    y.add_(1.0)
    assert autofuse.is_pending(y) and y._version == 1
    v = y[2]
    assert autofuse.is_pending(v) and v._version == 1
    autofuse.reset_stats()
    autofuse.materialize((z, y, v))
    plain = autofuse.unwrap(x) * 2.0
    assert_same(z, plain[0] + plain[1], None)
    assert_same(v, plain[2] + 1.0, None)
    assert v._version == y._version == 1
    y.add_(1.0)
    assert v._version == y._version == 2
    y = x * 2.0
    y.add_(1.0)
    v = y[2]
    del y
    autofuse.materialize(v)
    assert v._version == 1


def test_memory_written_by_what_reads_it_elsewhere(device, on):
    """A kernel that writes where another of its threads still has to read would be a race."""
    for write in (
        lambda x, y: x.add_(y.t()),
        lambda x, y: x.copy_(y.t()),
        lambda x, y: x[1:].copy_(y[:-1]),
        lambda x, y: x.mul_(y.flatten().view(64, 64)),
        lambda x, y: torch.add(y, y.t(), out=x),
    ):
        plain = random_tensor((64, 64), torch.float32, device)
        x = W(plain.clone())
        with torch.no_grad():
            write(x, x * 2.0)
            write(plain, plain * 2.0)
        assert_same(x, plain, None)


# --- errors, modes, threads, gradients -----------------------------------------------------------

WRONG = {
    "int": lambda x: x[4],
    "negative": lambda x: x[-5],
    "too many": lambda x: x[0, 0, 0, 0],
    "step": lambda x: x[::0],
    "backwards": lambda x: x[::-1],
    "select": lambda x: x.select(1, 9),
    "narrow": lambda x: x.narrow(0, 3, 2),
    "transpose": lambda x: x.transpose(0, 5),
    "permute": lambda x: x.permute(0, 1),
    "twice": lambda x: x.permute(0, 1, 1),
    "chunk": lambda x: x.chunk(0),
    "split": lambda x: x.split([1, 2]),
    "view": lambda x: x.view(5, 5),
    "view of transposed": lambda x: x.transpose(0, 1).view(-1),
    "reshape": lambda x: x.reshape(7, -1),
    "expand": lambda x: x.expand(4, 5, 2),
    "squeeze": lambda x: x.squeeze(7),
    "unflatten": lambda x: x.unflatten(1, (4, 2)),
    "float": lambda x: x[1.0],
    "string": lambda x: x["a"],
    "expand_as": lambda x: x.expand_as(x[0]),
    "no argument": lambda x: x.select(1),
    "keyword": lambda x: x.transpose(0, 1, dim=2),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_eagers(device, on, name):
    x = random_tensor(SHAPE, torch.float32, device)
    _, want = outcome(lambda: WRONG[name](x * 2.0), ())
    y = W(x) * 2.0
    _, got = outcome(lambda: WRONG[name](y), ())
    assert want is not None and type(got) is type(want) and str(got) == str(want)
    assert_same(y, x * 2.0, None)


def test_indices_that_are_no_views(device, on):
    x = random_tensor(SHAPE, torch.float32, device)
    for index in (1, True, 1, [0, 1], torch.tensor([1, 0], device=device), x > 0, ([0], [1])):
        for _ in range(2):
            got, want = (W(x) * 2.0)[index], (x * 2.0)[index]
            assert_same(got, want, None)


def test_calls_that_look_alike(device, on):
    """Each means something else of the same node."""
    x = random_tensor(SHAPE, torch.float32, device)
    calls = [
        lambda y: y.tensor_split((1, 3), 1),
        lambda y: y.tensor_split((1, 3, 1)),
        lambda y: y.tensor_split(2, 1),
        lambda y: y.split(2, 1),
        lambda y: y.chunk(2, 1),
        lambda y: (y[1:3], y[1, 3:], y[(slice(1, 3),)]),
        lambda y: (y[1], y[1:], y[:1], y[::1], y[None, 1], y[1, None]),
        lambda y: (y.permute(1, 0, 2), y.permute((1, 0, 2)), y.transpose(1, 0), y.movedim(1, 0)),
        lambda y: (y.expand(4, 6, 2), y.view(4, 6, 2), y.reshape(4, 6, 2), y.view((4, 6, 2))),
        lambda y: (y.select(0, 1), y.narrow(0, 1, 1), y.unsqueeze(1), y.squeeze(1)),
    ]
    for _ in range(3):
        for call in calls:
            assert_same(call(W(x) * 2.0), call(x * 2.0), None)


def test_machine_code_records_what_was_recorded_before(on):
    """With ints, slices and tuples of these, and in one call for several."""
    if not on:
        pytest.skip("there is machine code for this")
    x = W(random_tensor(SHAPE, torch.float32))
    calls = []
    for _ in range(3):
        y = x * 2.0
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name))
        try:
            parts = *y.chunk(2, 1), y[1:, 0], y[2], y.T if y.ndim == 2 else y.mT, y.unsqueeze(0)
        finally:
            sys.setprofile(None)
        assert all(map(autofuse.is_pending, parts))
        del y, parts
        flush.flush_all("test")
        before, calls = calls, []
    assert "record_view" not in before


def test_views_made_in_no_grad_mode_say_so(device, on):
    """torch keeps of a view in which mode it was made, and whether it is one of several."""
    x = random_tensor((4, 4), torch.float32, device)
    other = torch.ones(4, device=device, requires_grad=True)

    def run(x, pick, grad):
        with torch.set_grad_enabled(grad):
            view = pick(x * 2.0)
        view.add_(other)
        return view

    for pick in (lambda y: y[0], lambda y: y.unbind()[1], lambda y: y.chunk(2)[0]):
        for grad in (True, False):
            ours, theirs = (outcome(lambda x=x: run(x, pick, grad), ()) for x in (W(x), x.clone()))
            assert type(ours[1]) is type(theirs[1]) and str(ours[1]) == str(theirs[1])
            if theirs[1] is None:
                assert_same(ours[0].detach(), theirs[0].detach(), None)


def test_inference_mode(device, on):
    x = random_tensor(SHAPE, torch.float32, device)
    with torch.inference_mode():
        view = (W(x) * 2.0)[1:, ::2]
        got = view + 1.0
    assert got.is_inference() and view.is_inference()
    assert_same(view, (x * 2.0)[1:, ::2], None)


def gradients(fn, x, wrapped):
    leaf = x.clone().requires_grad_()
    out = fn(W(leaf) if wrapped else leaf)
    (out * out).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eagers(device, on, name):
    x = random_tensor(SHAPE, torch.float32, device)

    def run(x):
        parts = parts_of(CASES[name](x * 2.0))
        return torch.cat([(part * 3.0).flatten() for part in parts])

    got, want = (gradients(run, x, wrapped) for wrapped in (True, False))
    assert bool(same_bits(got, want).all())


def test_a_view_beside_a_gradient(device, on):
    """A view without a gradient among the operands of what has one."""
    x = random_tensor(SHAPE, torch.float32, device)
    mask = random_tensor(SHAPE, torch.float32, device, seed=1)

    def run(x):
        keep = (W(mask) if isinstance(x, autofuse.Tensor) else mask) * 0.5
        part = keep[1:]
        y = x[1:] * part + part.neg()
        return y * y

    got, want = (gradients(run, x, wrapped) for wrapped in (True, False))
    assert bool(same_bits(got, want).all())


def test_a_function_mode_is_told(device, on):
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **kwargs or {})

    x = random_tensor(SHAPE, torch.float32, device)
    said = []
    for value in (W(x), x):
        with Names() as mode:
            y = (value * 2.0).chunk(2)[0].t if value is None else (value * 2.0).chunk(2)[0]
            z = y.transpose(0, 1) + 1.0
        said.append(mode.names)
        assert_same(z, (x * 2.0).chunk(2)[0].transpose(0, 1) + 1.0, None)
    assert said[0] == said[1]


def test_another_threads_value(device, on):
    import threading

    x = random_tensor(SHAPE, torch.float32, device)
    y = W(x) * 2.0
    found = []
    thread = threading.Thread(target=lambda: found.append(y[1:].chunk(3, 1)))
    thread.start()
    thread.join()
    assert_same(found[0], (x * 2.0)[1:].chunk(3, 1), None)


def test_the_same_view_twice(device, on):
    y = W(random_tensor(SHAPE, torch.float32, device)) * 2.0
    views = [y[0], y[0], *y.chunk(2), *y.chunk(2)]
    flush.flush_all("test")
    assert len({id(one) for one in views}) == 6 and len({one.data_ptr() for one in views}) == 2
    assert_same(views[0], views[1], None)
    assert_same(views[2:4], views[4:], None)


def test_weak_references_and_attributes(device, on):
    import weakref

    y = W(random_tensor(SHAPE, torch.float32, device)) * 2.0
    v = y[1]
    ref, name = weakref.ref(v), id(v)
    flush.flush_all("test")
    assert ref() is v and id(v) == name and not autofuse.is_pending(v)
    v.note = 1
    assert v.note == 1


def test_a_failed_kernel_leaves_eagers_values(device, on, monkeypatch):
    x = random_tensor(SHAPE, torch.float32, device)
    y = W(x) * 2.0
    v = y[1:, 0]
    w = v + y[1:, 1]
    del y

    def refuse(*args):
        raise autofuse.KernelError("no kernel")

    from autofuse.record import ways

    monkeypatch.setattr(ways, "make_pieces", refuse)
    autofuse.reset_stats()
    autofuse.materialize((v, w))
    assert autofuse.stats().replays == 1
    plain = x * 2.0
    assert_seen_alike([v, w], [plain[1:, 0], plain[1:, 0] + plain[1:, 1]])


# --- random programs -----------------------------------------------------------------------------


class Programs:
    """Random programs of ops, views, writes and reads, the same for plain and wrapped tensors."""

    OPS = [
        lambda a, b: a * 2.0,
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: b.neg(),
        lambda a, b: torch.relu(a) + 1.0,
        lambda a, b: torch.where(a > b, a, b),
    ]
    WRITES = [
        lambda a, b: a.add_(1.0),
        lambda a, b: a.mul_(b),
        lambda a, b: a.copy_(b),
        lambda a, b: a.neg_(),
        lambda a, b: a.__isub__(b),
        lambda a, b: a.__setitem__(0, 2.0),
    ]

    def __init__(self, seed, x):
        self.rng, self.tensors = random.Random(seed), [x]

    def view(self, x):
        """A random view of `x`; several for some."""
        rng, n = self.rng, x.ndim
        kind = rng.choice("slice int none transpose chunk unbind reshape flatten expand".split())
        axis = rng.randrange(n) if n else 0
        if n == 0 or kind == "none":
            return x.unsqueeze(axis) if n < 5 or not x.shape[-1] else x[..., 0]
        size = x.shape[axis]
        index = [slice(None)] * axis
        if kind == "slice":
            start, step = rng.randrange(size + 1), rng.choice((1, 1, 2))
            return x[(*index, slice(start, rng.choice((None, size)), step))]
        if kind == "int":
            at = rng.randrange(size) if size else None
            return x[(*index, at)] if size else x.unsqueeze(0)
        if kind == "transpose":
            return x.transpose(axis, rng.randrange(n))
        if kind == "chunk":
            return rng.choice(x.chunk(rng.randrange(1, 4), axis))
        if kind == "unbind":
            return rng.choice(x.unbind(axis)) if size else x
        if kind == "reshape":
            return x.reshape(*x.shape[:axis], -1) if x.numel() else x
        if kind == "flatten":
            return x.flatten(axis)
        if n < 4 and x.numel() < 512:
            return x.expand(2, *x.shape)
        return x.permute(*range(n - 1, -1, -1))

    def step(self):
        rng, tensors = self.rng, self.tensors
        a = rng.choice(tensors)
        b = rng.choice([x for x in tensors if x.shape == a.shape])
        kinds = "op", "view", "join", "write", "drop", "read"
        kind = rng.choices(kinds, (8, 10, 2, 3, 3, 1))[0]
        if kind == "op":
            tensors.append(rng.choice(self.OPS)(a, b))
        elif kind == "view":
            tensors.append(self.view(a))
        elif kind == "join" and a.ndim and a.numel() < 512:
            dim = rng.randrange(a.ndim)
            tensors.append(rng.choice((torch.cat, torch.stack))((a, b), dim))
        elif kind == "write":
            write = rng.choice(self.WRITES)
            try:
                write(a, b)
            except (RuntimeError, IndexError) as error:
                return str(error)
        elif kind == "drop" and len(tensors) > 2:
            tensors.pop(rng.randrange(1, len(tensors)))
        elif kind == "read" and a.numel():
            return a.flatten()[0].item()
        return None


@pytest.mark.parametrize("block", range(10))
def test_random_programs(device, on, tier, block):
    seeds = random.Random(f"{block} {on} {tier}")
    for _ in range(COUNT):
        seed = seeds.randrange(1 << 40)
        shape = seeds.choice([(4, 6), (2, 3, 4), (8,), (1, 4, 1, 2)])
        x = random_tensor(shape, torch.float32, device)
        ours, theirs = Programs(seed, W(x.clone())), Programs(seed, x.clone())
        with torch.set_grad_enabled(seeds.random() < 0.3):
            for number in range(seeds.randrange(4, 30)):
                said = ours.step(), theirs.step()
                assert same_said(*said), (seed, number, said)
            # the first is wrapped, and so an alias of what was given
            got, want = ours.tensors[1:], theirs.tensors[1:]
            assert_same(got, want, None, f"seed {seed}")
            for mine, its in zip(got, want, strict=True):
                assert mine._version == its._version, seed
                assert mine.storage_offset() == its.storage_offset(), seed
            assert sharing(ours.tensors)[0] == sharing(theirs.tensors)[0], seed
            assert_same(ours.tensors, theirs.tensors, None, f"seed {seed}")


def same_said(a, b):
    return a == b or (a != a and b != b)


def halves(x, levels):
    y = x * 2.0
    for _ in range(levels):
        half = y.shape[0] // 2
        y = y[:half] + y[half:]
    return y


def windows(x, levels):
    y = x * 2.0
    for k in range(levels):
        y = y[: -(1 << k)] + y[1 << k :]
    return y


@pytest.mark.parametrize("program", [halves, windows])
def test_views_of_views_are_planned_in_no_time(program, always):
    """Each level doubles the places at which the first is read, of which there are 2^14."""
    x = torch.randint(0, 5, (1 << 15,)).float()
    begin = time.perf_counter()
    got = autofuse.unwrap(program(autofuse.wrap(x), 14))
    assert_same(got, program(x, 14), None)
    assert time.perf_counter() - begin < 20  # it would take 30 s


def test_indices_that_vary_are_soon_not_recorded(always, monkeypatch):
    """Each would be a program of its own."""
    monkeypatch.setattr(viewing, "WAYS", WAYS)
    forget_all("test")
    x = torch.randn(256, 4)
    w = autofuse.wrap(x)
    for k in range(100):
        got = autofuse.unwrap((w * 2.0)[k : k + 8] + 1.0)
        assert_same(got, (x * 2.0)[k : k + 8] + 1.0, None)
    (eager,) = [n for (name, _), n in autofuse.stats().eager_ops.items() if name == "__getitem__"]
    assert eager == 100 - WAYS
    before = autofuse.stats().kernels_launched
    assert_same(autofuse.unwrap((w * 2.0)[3:11] + 1.0), (x * 2.0)[3:11] + 1.0, None)
    assert autofuse.stats().kernels_launched == before + 1  # one of the first is still known


def test_what_views_repeat_is_stored_where_it_is_computed_more_often_than_it_has_elements(always):
    x, big = torch.randn(64), torch.randn(64, 4096)
    program = lambda x, big: big * (x * 2.0).exp().log()[:, None]  # noqa: E731
    assert_same(autofuse.unwrap(program(autofuse.wrap(x), big)), program(x, big), 1e-5)
    assert autofuse.stats().kernels_launched == 2
