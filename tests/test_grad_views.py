"""Views of pending values under grad: steps of a chain, with the gradients that eager gives.

Values, gradients, layouts, versions and names of nodes are compared, and by counters that nothing
ended the chain.
"""

import pytest
import torch
from test_views import CASES, LAYOUTS, SHAPE, assert_seen_alike, parts_of

import autofuse
from autofuse.hot import native
from autofuse.record import flush
from autofuse.record import views as viewing
from autofuse.record.modes import forget_all
from support import (
    DEVICES,
    FLOATS,
    WIDE,
    assert_same,
    assert_told_alike,
    functions_called,
    random_tensor,
    skip_unless_wide,
)

W = autofuse.wrap


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Here one value is seen in more ways than a program would."""
    monkeypatch.setattr(viewing, "WAYS", 1 << 10)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    yield
    forget_all("test")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def seeds_of(results):
    """Gradients for those of `results` that have a graph, all different."""
    return [
        random_tensor(tuple(x.shape), x.dtype, x.device.type, 3 + k)
        for k, x in enumerate(results) if x.requires_grad
    ]  # fmt: skip


def differentiated(run, leaves, layout, wrap, create_graph=False):
    """What `run` of leaves gives, and its gradients with respect to these and to what it gives."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = run(*[wrap(layout(x)) for x in leaves])
    roots = [x for x in results if x.requires_grad]
    grads = torch.autograd.grad(
        roots, [*leaves, *roots], seeds_of(results), allow_unused=True, create_graph=create_graph
    )
    return results, list(grads), leaves


def assert_differentiated_alike(run, leaves, layout=lambda x: x):
    """Twice, the second time from caches."""
    want, slopes, _ = differentiated(run, leaves, layout, lambda x: x)
    for _ in range(2):
        got, found, _ = differentiated(run, leaves, layout, W)
        assert_seen_alike(got, want)
        assert_same(found, slopes, None)


def read_only(case):
    """Dead views, of a value that a rule reads and of one that none does."""

    def run(x, y):
        read = [part * part + part for part in parts_of(case(x * y + x))]
        return [*read, *(3.0 - part.relu() for part in parts_of(case(x + y)))]

    return run


def held(case):
    """Views that somebody holds, of a value that somebody holds, and of one that nobody does."""

    def run(x, y):
        base = x * y
        parts = parts_of(case(base))
        others = parts_of(case(base - y))
        return [base, *parts, *(part * 2.0 for part in parts), *others, *(-o for o in others)]

    return run


@pytest.mark.parametrize("kind", [read_only, held])
@pytest.mark.parametrize("name", CASES)
def test_every_view_in_every_layout(device, on, kind, name):
    leaves = [random_tensor(SHAPE, torch.float32, device, k) for k in range(2)]
    for layout in LAYOUTS.values():
        assert_differentiated_alike(kind(CASES[name]), leaves, layout)


# one of each kind that a rule or an index map tells apart
KINDS = {"chunk", "uneven chunk", "torch.split", "unbind", "int", "steps", "transpose", "expand",
         "reshape across", "diagonal", "unfold", "flat of transposed"}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_every_view_in_every_dtype(device, name, dtype):
    """float32 for all of them in every layout above; the maps do not know of dtypes."""
    if name not in KINDS:
        skip_unless_wide(device)
    leaves = [random_tensor(SHAPE, dtype, device, k) for k in range(2)]
    assert_differentiated_alike(read_only(CASES[name]), leaves)
    assert_differentiated_alike(held(CASES[name]), leaves)


@pytest.mark.parametrize("name", CASES)
def test_as_eager_ops(tier, name):
    """Whatever runs a chain, and with functions whose kernels round otherwise."""
    leaves = [random_tensor(SHAPE, torch.float32, "cpu", k) for k in range(2)]
    assert_differentiated_alike(held(CASES[name]), leaves)
    assert_differentiated_alike(read_only(CASES[name]), leaves)


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives_in_double_precision(name):
    case = CASES[name]

    def run(x, y):
        x, y = W(x), W(y)
        return tuple(
            autofuse.unwrap(part.sin() * part) for part in parts_of(case(x * y)) if part.numel()
        )

    leaves = [random_tensor(SHAPE, torch.float64, "cpu", k)[:, :, :2].requires_grad_()
              for k in range(2)]  # fmt: skip
    if not run(*leaves):
        return
    assert torch.autograd.gradcheck(run, leaves, fast_mode=not WIDE)
    small = [x.detach()[:4].clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradgradcheck(run, small, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_create_graph(device, name):
    leaves = [random_tensor(SHAPE, torch.float32, device, k) for k in range(2)]
    run = read_only(CASES[name])

    def twice(wrap):
        results, grads, xs = differentiated(run, leaves, lambda x: x, wrap, create_graph=True)
        grads = [g for g in grads[:2] if g.requires_grad]
        if not grads:
            return results
        return [*results, *torch.autograd.grad(grads, xs, seeds_of(grads), allow_unused=True)]

    # eager adds second derivatives of its own formulas up, op by op
    assert_same([autofuse.unwrap(x) for x in twice(W)], twice(lambda x: x), 1e-5)


def test_views_end_no_chain(device, on):
    leaves = [random_tensor(SHAPE, torch.float32, device, k).requires_grad_() for k in range(2)]
    x, y = map(W, leaves)
    for name, case in CASES.items():
        plain = leaves[0] * leaves[1]
        if parts_of(case(plain))[0]._base is not plain:  # a copy
            continue
        autofuse.reset_stats()
        base = x * y
        parts = parts_of(case(base))
        results = [part.neg() for part in parts]
        stats = autofuse.stats()
        assert all(map(autofuse.is_pending, (base, *parts, *results))), name
        assert stats.ops_eager == 0 and not stats.flushes, name
        flush.flush_all("test")


@pytest.mark.skipif(not native.active(), reason="there is no machine code here")
@pytest.mark.parametrize("base_too", (False, True))
def test_machine_code_flushes_views_that_somebody_holds(device, base_too):
    """As in a block of GPT-2, which views what it gives the next product."""
    leaf = random_tensor(SHAPE, torch.float32, device).requires_grad_()
    x, held = W(leaf), []

    def program():
        y = (x * 2.0).tanh()
        flat, turned, (first, _) = y.view(-1), y.transpose(0, 2), y.chunk(2, 1)
        torch.cumsum(flat, 0)
        held[:] = [flat, turned, first, *[y] * base_too]

    for _ in range(4):
        program()
    called = functions_called(program)
    assert "attach" in called and not {"flush", "_flush", "run", "settle"} & {*called}
    y = (leaf * 2.0).tanh()
    want = [y.view(-1), y.transpose(0, 2), y.chunk(2, 1)[0], *[y] * base_too]
    assert_seen_alike(held, want)
    assert [v.grad_fn.name() for v in held] == [v.grad_fn.name() for v in want]
    assert_same(
        torch.autograd.grad(held, leaf, seeds_of(held)),
        torch.autograd.grad(want, leaf, seeds_of(want)),
        None,
    )


def lstm_cell(gates, c):
    i, f, g, o = (gates + 1.0).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def test_an_lstm_cell_is_one_kernel_in_training(device, on):
    """The gates that only views read have no memory, though autograd has a node for them."""
    gates, c = (random_tensor((8, n), torch.float32, device).requires_grad_() for n in (64, 16))
    autofuse.materialize(lstm_cell(W(gates), W(c)))
    autofuse.reset_stats()
    h, new = autofuse.materialize(lstm_cell(W(gates), W(c)))
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.ops_eager == 0
    # h, c, its tanh, and what the sigmoids and the other tanh have given, as in eager
    assert stats.live_outs_stored == 7
    torch.autograd.grad((h, new), (gates, c), (h.detach(), new.detach()), retain_graph=True)
    autofuse.reset_stats()
    with torch.profiler.profile(acc_events=True) as profile:
        got = torch.autograd.grad((h, new), (gates, c), (h.detach(), new.detach()))
    assert autofuse.stats().kernels_launched == 2  # of h, and of c with all that led to the gates
    ops = {event.key for event in profile.key_averages()}
    assert not ops & {"aten::cat", "aten::copy_", "aten::zeros", "aten::mul"}
    h, new = lstm_cell(gates, c)
    want = torch.autograd.grad((h, new), (gates, c), (h.detach(), new.detach()))
    assert_same(got, want, 1e-5)


def test_the_base_of_views_that_a_rule_reads_is_stored_once(device, on):
    x = random_tensor((8, 64), torch.float32, device).requires_grad_()

    def run(x):
        a, b = (x + 1.0).chunk(2, 1)
        return a * b

    autofuse.reset_stats()
    autofuse.materialize(run(W(x)))
    assert autofuse.stats().live_outs_stored == 2 and autofuse.stats().kernels_launched == 1
    assert_differentiated_alike(lambda x: [run(x)], [x])


def halves(x):
    """Two values of which each reads a half that a rule reads."""
    a, b = (x * 2.0 + 1.0).chunk(2, 1)
    return [a * a.relu(), b * b]


def packed(x):
    """What is split is stored beside another value of its shape, in one tensor."""
    whole = (x.neg() * 0.1).exp() * (x * 2.0).exp()
    a, b = whole.chunk(2, 1)
    return [a * b]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_share_memory(device, on, dtype):
    x = random_tensor((4, 16), dtype, device).requires_grad_()
    for create_graph in (False, True):
        _, want, _ = differentiated(packed, [x], lambda x: x, lambda x: x, create_graph)
        _, got, _ = differentiated(packed, [x], lambda x: x, W, create_graph)
        assert_same(got, want, {2: 1e-1}.get(dtype.itemsize, 1e-4))


def test_in_check_mode(device, monkeypatch):
    """Every chain and every backward is compared with eager's."""
    monkeypatch.setattr(autofuse.config, "check", True)
    x, y = (random_tensor(SHAPE, torch.float32, device, k) for k in range(2))
    for name in ("chunk", "int", "transpose", "expand in front", "unbind"):
        assert_differentiated_alike(read_only(CASES[name]), [x, y])
        assert_differentiated_alike(held(CASES[name]), [x, y])
    assert_differentiated_alike(halves, [x])


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_parts_that_other_nodes_use(device, on, wanted, create_graph):
    """Those of one split whose gradients come, or do not come, from several nodes."""
    x = random_tensor((4, 6), torch.float32, device).requires_grad_()

    def run(wrap):
        results = halves(wrap(x))
        roots = [results[k] for k in wanted]
        (g,) = torch.autograd.grad(
            roots, x, seeds_of(roots), create_graph=create_graph, retain_graph=True
        )
        if not create_graph:
            return [g, *torch.autograd.grad(roots, x, seeds_of(roots))]
        return [g.detach(), *torch.autograd.grad(g, x, torch.ones_like(g))]

    for _ in range(2):
        assert_same(run(W), run(lambda x: x), 1e-6 if create_graph else None)


def names_of(tensor):
    """The nodes from that of `tensor` on, along the first edges."""
    found, node = [], tensor.grad_fn
    while node is not None:
        found.append(node.name().removesuffix("Backward"))
        node = node.next_functions[0][0] if node.next_functions else None
    return found


VIEWS_OF_PARTS = {
    "transposed": lambda x: x.t(),
    "in front": lambda x: x.unsqueeze(0),
    "a row": lambda x: x[0],
    "a part": lambda x: x.chunk(3, 1)[1],
    "of a view": lambda x: x.unsqueeze(0).transpose(1, 2),
}


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("held", [False, True], ids=["read", "held"])
@pytest.mark.parametrize("name", VIEWS_OF_PARTS)
def test_views_of_parts_of_which_another_is_used_before(device, on, name, held, first):
    """Nobody sees the parts themselves, or what they are parts of."""
    view = VIEWS_OF_PARTS[name]

    def run(x, weight):
        a, b = (x * 3.0).chunk(2, 1)
        used = None if first else a * 2.0
        seen = view(b)
        result = seen * 0.5 if held else seen * view(weight)  # whose gradient reads the view
        used = a * 2.0 if used is None else used
        del a, b
        return [used, result, *([seen] if held else [])]

    leaves = [
        random_tensor((3, 6), torch.float32, device),
        random_tensor((3, 3), torch.float32, device, 2),
    ]
    if not held:
        return assert_differentiated_alike(run, leaves)
    assert_differentiated_alike(lambda x: run(x, None), leaves[:1])


def test_a_held_view_has_eagers_node_and_base(device, on):
    x = random_tensor(SHAPE, torch.float32, device).requires_grad_()

    def run(x):
        base = x * 2.0
        return base, base.chunk(3, 1)[1], base[1:, 0], base.transpose(0, 1)

    got, want = autofuse.materialize(run(W(x))), run(x)
    for ours, theirs in zip(got, want, strict=True):
        assert names_of(ours)[:-1] == names_of(theirs)[:-1]
    for view in got[1:]:
        assert view._base is got[0] and view.grad_fn is not got[0].grad_fn
    assert got[1].data_ptr() - got[0].data_ptr() == want[1].data_ptr() - want[0].data_ptr()


def hooks(x, leaf):
    seen = []
    base = x * 3.0
    part, other = base.chunk(2, 1)
    part.register_hook(lambda g: seen.append(g.clone()))
    base.register_hook(lambda g: seen.append(g.clone()) or g * 2.0)
    (part * other + other).sum().backward()
    return [*seen, leaf.grad]


def retained(x, leaf):
    base = x * 3.0
    part, other = base.chunk(2, 1)
    part.retain_grad()
    base.retain_grad()
    (part * other).backward(torch.ones_like(other))
    return part.grad, base.grad, leaf.grad


def detached(x, leaf):
    base = x * x
    part = base[1:].detach()
    with torch.no_grad():
        mute = base[:1] * 2.0
    (base[1:] * part + mute).sum().backward()
    return part, mute, mute.requires_grad, part.requires_grad, leaf.grad


def mute_views(x, leaf):
    """Rules read views of what requires no grad."""
    mute = x.detach() * 2.0
    a, b = mute.chunk(2, 1)
    c, d = (x * 2.0).chunk(2, 1)
    (a * c + b * d * mute[:, :1]).sum().backward()
    return [leaf.grad]


def written_base(x, leaf):
    base = x * 2.0
    part = base[:, 0] * 1.0
    base.mul_(3.0)
    (part.sum() + base.sum()).backward()
    return [leaf.grad, base, base._version]


def written_view(x, leaf):
    base = x * 2.0
    part = base[1:, 0]
    read = base + 1.0
    part.mul_(3.0)
    (part.sum() + base.sum() + read.sum()).backward()
    return [leaf.grad, base, part, base._version, part._version]


def written_part(x, leaf):
    """Of several views that one call gives none may be written."""
    part, other = (x * 2.0).chunk(2, 1)
    part.add_(1.0)
    return [other]


def saved_and_written(x, leaf):
    """A rule reads a view of what is written before backward."""
    base = x * 2.0
    part = base[1:]
    result = part * part
    autofuse.materialize((base, result))
    base.add_(1.0)
    result.sum().backward()
    return [leaf.grad]


def twice(x, leaf):
    a, b = (x * x).chunk(2, 1)
    result = (a * b).sum()
    result.backward(retain_graph=True)
    result.backward()
    result.backward()
    return [leaf.grad]


def checkpointed(x, leaf):
    def block(x):
        a, b = (x * 2.0).chunk(2, 1)
        return a.relu() * b

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    return [leaf.grad]


def told_of_saves(x, leaf):
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        a, b = (x * 2.0).chunk(2, 1)
        result = a * b + x[:, :1] * a
    result.sum().backward()
    return [leaf.grad, seen]


def under_autocast(x, leaf):
    with torch.autocast(x.device.type, torch.bfloat16):
        a, b = (x * 2.0).chunk(2, 1)
        result = a * b.transpose(0, 1).transpose(0, 1)
        loss = torch.nn.functional.mse_loss(result, a)
    loss.backward()
    return [result, leaf.grad]


def some_parts(x, leaf):
    a, _, c = (x * 2.0).tensor_split(3, 1)
    b = (x + 1.0).unbind(1)[2]
    (a * c + b[:, None]).sum().backward()
    return [leaf.grad]


def outside_between(x, leaf):
    """A node of torch's own is made after the chain, and before it is flushed."""
    base = x * 2.0
    a, b = base.chunk(2, 1)
    other = leaf.cumsum(0)
    both = a[1:, 0] * b[1:, 0]
    (both.sum() + other.sum() * 3.0).backward()
    return [leaf.grad]


PROGRAMS = [hooks, retained, detached, mute_views, written_base, written_view, written_part,
            saved_and_written, twice, checkpointed, told_of_saves, under_autocast, some_parts,
            outside_between]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda run: run.__name__)
def test_whatever_is_done_with_them(device, on, tier, program):
    assert_told_alike(program, random_tensor((4, 6, 2), torch.float32, device))


@pytest.mark.parametrize("several", [False, True])
def test_numbers_of_their_nodes(device, on, several):
    """What is made when a later node is there has the place that eager's has."""
    x = random_tensor(SHAPE, torch.float32, device).requires_grad_()

    def run(x, leaf):
        base = x * 2.0
        view = base[1:, 0] if several else base.transpose(0, 1)
        result = view.neg()
        later = leaf.cumsum(0)
        return autofuse.materialize([base, view, result]) + [later]

    def order(results):
        nodes = []
        for one in results:
            nodes.append(one.grad_fn)
            if several and one is results[1]:
                nodes.append(one.grad_fn.next_functions[0][0])
        numbers = [node._sequence_nr() for node in nodes]
        assert len({*numbers}) >= len(results)
        return sorted(range(len(results)), key=lambda k: results[k].grad_fn._sequence_nr())

    assert order(run(W(x), x)) == order(run(x, x)) == [0, 1, 2, 3]


def test_two_threads(always):
    """Whoever needs a value flushes the chain of whoever recorded it, in its modes."""
    from support import elsewhere

    x = torch.randn(4, 6, requires_grad=True)
    a, b = (W(x) * 2.0).chunk(2, 1)
    result = a * b
    with torch.no_grad():
        assert elsewhere(lambda: autofuse.materialize(result)) is None
    (got,) = torch.autograd.grad(result.sum(), x)
    a, b = (x * 2.0).chunk(2, 1)
    (want,) = torch.autograd.grad((a * b).sum(), x)
    assert_same(got, want, None)


# --- values side by side -------------------------------------------------------------------------


def some(x, y):
    """Operands of joins: results, memory, views of both, one without a graph."""
    base = x * y
    return {
        "results": (x + y, x - y),
        "memory": (x, y, x * 2.0),
        "views": (base[:, 1:4], y[:, 1:4] * 1.0, x[:, 2:5]),
        "parts": (*base.split(2, 1)[::-1], x[:, :2]),
        "mute": (x.detach() * 2.0, base, y.detach()),
        "twice": (base, base),
        "memory twice": (x, base, x),
        "sums": (base, base + x),
    }


OPERANDS = [*some(torch.ones(SHAPE), torch.ones(SHAPE))]
JOINED = {
    "cat": lambda xs: torch.cat(xs),
    "cat along 1": lambda xs: torch.cat(xs, 1),
    "cat along -1": lambda xs: torch.cat(list(xs), dim=-1),
    "concat": lambda xs: torch.concat(xs, 2),
    "concatenate": lambda xs: torch.concatenate(xs, 1),
    "stack": lambda xs: torch.stack(xs),
    "stack along 1": lambda xs: torch.stack(xs, 1),
    "stack along -1": lambda xs: torch.stack(list(xs), dim=-1),
}


def joining(how, what):
    def run(x, y):
        joined = JOINED[how](some(x, y)[what])
        seen = JOINED[how](some(x, y)[what])
        return [joined * joined.relu(), seen, seen[1:] + 1.0]

    return run


@pytest.mark.parametrize("what", OPERANDS)
@pytest.mark.parametrize("how", JOINED)
def test_joins(device, on, how, what):
    leaves = [random_tensor(SHAPE, torch.float32, device, k) for k in range(2)]
    for layout in LAYOUTS.values():
        assert_differentiated_alike(joining(how, what), leaves, layout)


@pytest.mark.parametrize("what", OPERANDS)
@pytest.mark.parametrize("how", JOINED)
def test_joins_in_every_dtype(device, on, how, what):
    if how not in ("cat along 1", "stack along -1"):
        skip_unless_wide(device)
    for dtype in FLOATS:
        leaves = [random_tensor(SHAPE, dtype, device, k) for k in range(2)]
        assert_differentiated_alike(joining(how, what), leaves)


@pytest.mark.parametrize("what", OPERANDS)
@pytest.mark.parametrize("how", ["cat along 1", "stack", "stack along -1"])
def test_joins_as_eager_ops(tier, how, what):
    leaves = [random_tensor(SHAPE, torch.float32, "cpu", k) for k in range(2)]
    assert_differentiated_alike(joining(how, what), leaves)


@pytest.mark.parametrize("what", [x for x in OPERANDS if x != "mute"])
@pytest.mark.parametrize("how", JOINED)
def test_derivatives_of_joins_in_double_precision(how, what):
    def run(x, y):
        return tuple(map(autofuse.unwrap, joining(how, what)(W(x), W(y))))

    leaves = [random_tensor(SHAPE, torch.float64, "cpu", k).requires_grad_() for k in range(2)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_a_rotary_embedding_is_two_kernels_in_training(device, on):
    """The halves side by side, and what becomes of them; backward the same."""
    leaves = [random_tensor((8, 16), torch.float32, device, k) for k in range(3)]

    def run(q, cos, sin):
        q = q * 1.5
        a, b = q.chunk(2, -1)
        return [q * cos + torch.cat((-b, a), -1) * sin]

    assert_differentiated_alike(run, leaves)
    autofuse.reset_stats()
    x, *angles = [autofuse.wrap(x) for x in leaves]
    x.requires_grad_()
    (result,) = run(x, *angles)
    autofuse.materialize(result)
    assert autofuse.stats().kernels_launched == 2 and autofuse.stats().ops_eager <= 1


@pytest.mark.parametrize("name", ["chunk", "int", "transpose", "reshape to less"])
def test_where_only_inputs_are_kept(device, on, monkeypatch, name):
    """Rules go through no views there: the chain ends at them, and at ops that read some.

    A segment adds its gradients up first, which may have other bits.
    """
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    leaves = [random_tensor(SHAPE, torch.float32, device, k) for k in range(2)]

    def mute(x, y):
        first, second = (x.detach() * 2.0).chunk(2, 1)
        return [torch.stack((first, second)) * y[:, :3], first * y[:, 3:]]

    for run in (read_only(CASES[name]), held(CASES[name]), joining("cat", "mute"), mute):
        want, slopes, _ = differentiated(run, leaves, lambda x: x, lambda x: x)
        for _ in range(2):
            got, found, _ = differentiated(run, leaves, lambda x: x, W)
            assert_seen_alike(got, want)
            assert_same(found, slopes, 1e-5)
