"""Pending values written into views of memory: by their own kernel, or not before it is done."""

import itertools

import pytest
import torch
from reduced import REDUCED
from test_reductions import recorded, recording  # noqa: F401

import autofuse
from autofuse.hot import native
from autofuse.layout import is_injective, meets, reach
from autofuse.record import writes as recording_writes
from autofuse.run.devices import runner_class
from support import (
    DEVICES,
    DTYPES,
    WIDE,
    assert_same,
    assert_same_as_eager,
    outcome,
    random_tensor,
    same_bits,
)

W = autofuse.wrap
device_param = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.usefixtures("on")


def set_item(x, key, value):
    x[key] = value


def fused_writes():
    """Writes by kernels that are counted since the last reset; no eager op may be among them."""
    stats = autofuse.stats()
    copies = [name for name, _ in stats.eager_ops if name in ("__setitem__", "copy_")]
    assert not copies, stats.eager_ops
    return stats.flushes.get("write", 0)


# keys of [4, 6, 3] that make views, and the shape of what they select
KEYS = {
    "1": 1, "-1": -1, ":": slice(None), "1:3": slice(1, 3), "::2": slice(None, None, 2),
    "1::2": slice(1, None, 2), "...": ..., "None": None, "()": (), "(1,)": (1,),
    "1, 2": (1, 2), "1, 2, 0": (1, 2, 0), ":, 3": (slice(None), 3), "..., 1": (..., 1),
    ":, ::3": (slice(None), slice(None, None, 3)), "1:, None, 2": (slice(1, None), None, 2),
    "-1, ..., 1:": (-1, ..., slice(1, None)), ":, 1:-1, :2": (slice(None), slice(1, -1), slice(2)),
}  # fmt: skip
TARGETS = {
    "wrapped": lambda x: W(x),
    "plain": lambda x: x,
    "parameter": lambda x: torch.nn.Parameter(x),
    "wrapped view": lambda x: W(x)[:],
}


@device_param
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("target", TARGETS)
def test_an_item_is_written_by_the_kernel_of_the_value(target, held, device):
    with torch.no_grad():
        for name, key in KEYS.items():
            memory = torch.zeros(4, 6, 3, device=device)
            want = memory.clone()
            shape = want[key].shape
            for given in dict.fromkeys((shape, shape[1:], (1,) * len(shape), ())):
                a = random_tensor(tuple(given), torch.float32, device)
                x, w = TARGETS[target](memory), W(a)
                for _ in range(3):  # the third time everything is known
                    autofuse.reset_stats()
                    value = w * 2.0 + 1.0
                    before = x._version
                    if held:
                        x[key] = value
                    else:
                        del value
                        x[key] = w * 2.0 + 1.0
                    assert fused_writes() == 1, name
                    assert x._version == before + 1
                want[key] = a * 2.0 + 1.0
                assert_same(memory, want, None, name)
                if held:
                    assert_same(value, a * 2.0 + 1.0, None, name)
                assert type(x) is not autofuse.Tensor or target.startswith("wrapped")


SPELLINGS = {
    "copy_": lambda x, v: x[1:3].copy_(v),
    "torch.Tensor.copy_": lambda x, v: torch.Tensor.copy_(x[1:3], v),
    "add_": lambda x, v: x[:, 1:-1].add_(v[0, 0]),
    "iadd": lambda x, v: set_item(x, slice(1, 3), x[1:3].__iadd__(v)),
    "imul": lambda x, v: x.__getitem__((..., 1)).__imul__(v[0, :, 0]),
    "sub_ with alpha": lambda x, v: x[::2].sub_(v, alpha=0.5),
    "of a transposed": lambda x, v: x.mT[1:3].mul_(v.mT),
    "of a reversed": lambda x, v: x.permute(2, 1, 0)[:, :, 1:3].div_(v.permute(2, 1, 0)),
    "out": lambda x, v: torch.add(v, 1.0, out=x[::2]),
    "diagonal": lambda x, v: x[:, :3, 0].diagonal().add_(v[0, :3, 0]),
}


@device_param
@pytest.mark.parametrize("target", ["wrapped", "plain", "parameter"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_views_of_memory_are_written_in_place(name, target, device):
    with torch.no_grad():
        a, memory = torch.randn(2, 6, 3, device=device), torch.randn(4, 6, 3, device=device)
        want, x, w = memory.clone(), TARGETS[target](memory), W(a)
        for turn in range(3):
            before = want._version, x._version
            SPELLINGS[name](want, a * 2.0 + 1.0)
            autofuse.reset_stats()
            SPELLINGS[name](x, w * 2.0 + 1.0)
            stats = autofuse.stats()
            assert stats.flushes == {"write": 1}, turn
            assert stats.kernels_launched + stats.eager_flushes >= 1, turn
            assert_same(memory, want, None)
            assert x._version - before[1] == want._version - before[0]


@device_param
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_cast_as_eager_casts_them(dtype, device):
    """Whatever bits the value has that `copy_` of a CPU and of CUDA define.

    By one of the views on a CPU, where every view meets every dtype of either side.
    """
    views = (slice(None), 2), (slice(1, 3), slice(None, None, 2)), slice(0, 2)
    for number, source in enumerate(DTYPES, DTYPES.index(dtype)):
        a = random_tensor((4, 7), source, device, wild=source.is_floating_point)
        if source.is_floating_point and not dtype.is_floating_point:
            a = random_tensor((4, 7), source, device)  # what C does not define nobody compares
            a = a.abs() if dtype is torch.uint8 else a
        one = number % len(views)
        for key in views if device == "cuda" or WIDE else views[one : one + 1]:
            want, memory = (torch.zeros(4, 7, dtype=dtype, device=device) for _ in range(2))
            value = a[key].clone()
            want[key] = torch.where(value == value, value, value)
            w = W(value)
            for _ in range(2):
                autofuse.reset_stats()
                memory[key] = torch.where(w == w, w, w)
                assert fused_writes() == 1, (source, key)
            assert bool(same_bits(memory, want).all()), (source, key)


def slices(size):
    """All slices of so many elements, forwards, but for those of none."""
    steps = (1, 2, 3)
    found = {
        tuple(range(size)[i:j:k]): slice(i, j, k)
        for k in reversed(steps) for i in range(size) for j in range(i + 1, size + 1)
    }  # fmt: skip
    return found


@device_param
def test_every_pair_of_slices_that_are_written_and_read(device):
    """Where no element is read that is written elsewhere, by one kernel; or after all are read."""
    pairs = 0
    for (i, target), (j, read) in itertools.product(slices(6).items(), repeat=2):
        if len(i) != len(j):
            continue
        memory = torch.arange(6.0, device=device)
        want = memory.clone()
        want[target] = want[read] * 2.0 + 1.0
        x = W(memory)
        autofuse.reset_stats()
        x[target] = x[read] * 2.0 + 1.0
        together = i == j or not {*i} & {*j}
        assert autofuse.stats().flushes == {"write" if together else "__setitem__": 1}, (i, j)
        assert_same(memory, want, None, f"{target} = {read}")
        pairs += 1
    assert pairs > 100


AXES = [slice(None), slice(0, 2), slice(1, 3), slice(0, 3, 2), slice(1, 2), slice(2, 3)]


@device_param
def test_every_pair_of_views_of_a_matrix_in_place(device):
    """Two levels: a view, transposed or not, of a view; read before, within and after."""
    grids = list(itertools.product(AXES, AXES, (False, True)))
    fused = 0
    for mine, its in itertools.product(grids, grids):

        def views(base, *ways):
            for rows, columns, turned in ways:
                part = base[rows][:, columns]
                yield part.mT if turned else part

        memory = torch.arange(9.0, device=device).reshape(3, 3)
        index = memory.long()
        target, read = views(index, mine, its)
        if target.shape != read.shape:
            continue
        want, x = memory.clone(), W(memory)
        (want_target, want_read), (target, read) = views(want, mine, its), views(x, mine, its)
        before = want * 0.5 + 1.0
        want_target += want_read * 2.0 + 1.0
        after = want * 3.0 + 1.0
        ours = x * 0.5 + 1.0
        del ours  # nobody holds it, and nobody asks for it
        held = x * 0.5 + 1.0
        held.tolist()
        autofuse.reset_stats()
        target += read * 2.0 + 1.0
        fused += autofuse.stats().flushes.get("write", 0)
        assert_same((held, memory, x * 3.0 + 1.0), (before, want, after), None, f"{mine} {its}")
        assert x._version == want._version == 1
    assert fused > 100


@device_param
def test_what_was_recorded_before_a_write_reads_what_was_there(device):
    """By the same kernel or by an earlier one; and what comes after reads what is there then."""

    def same(x, y):
        v = y * 2.0
        before = x[1:3] * 3.0
        x[1:3] = v
        return before, x * 1.0

    def other(x, y):
        v = y * 2.0
        before = x[0:2] * 3.0
        x[1:3] = v
        return before, v, x * 1.0

    def all_of_it(x, y):
        before = x * 3.0
        x[1:3] = y * 2.0
        return before, x * 1.0

    def larger(x, y):
        row = x[1] * 3.0
        table = y + row
        x[1] = row * 2.0
        return table, x * 1.0

    def smaller(x, y):
        total = x[1:3, :1] * 2.0
        x[1:3] = y + total
        return total, x * 1.0

    def turned(x, y):
        read = x[1:3, 1:3] * 2.0
        x[1:3, 1:3] = read.mT
        return read, x * 1.0

    def numbers(x, y):
        before = x + 1.0
        x[0] = 5.0
        within = x + 1.0
        x[1:3] = y
        after = x + 1.0
        x[:, 0] = y[:, 1:].sum() * 1.0
        return before, within, after, x * 1.0

    for f in (same, other, all_of_it, larger, smaller, turned, numbers):
        x, y = torch.randn(4, 6, device=device), torch.randn(2, 6, device=device)
        for _ in range(3):
            assert_same_as_eager(f, x, y)


@device_param
def test_writes_one_after_another_each_by_one_kernel(device):
    """A time loop, as an RNN's or an ODE's, and eight updates of a wave's fields on slices."""

    def loop(out, y, w):
        for t in range(out.shape[1]):
            y = (y * w).sin() + 0.1
            out[:, t] = y
        return y

    def wave(hx, hy, ez, w):
        for _ in range(2):
            hx[:-1, :] -= 0.5 * (ez[1:, :] - ez[:-1, :])
            hy[:, :-1] += 0.5 * (ez[:, 1:] - ez[:, :-1])
            ez[1:, 1:] += 0.5 * (hy[1:, 1:] - hy[1:, :-1] - hx[1:, 1:] + hx[:-1, 1:]) * w
            ez[4, 4] = w[0, 0] * 2.0 + 1.0

    arguments = [torch.zeros(6, 5), torch.randn(6), torch.randn(6)]
    fields = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(7, 7)]
    for f, given, writes in ((loop, arguments, 5), (wave, fields, 8)):
        given = [x.to(device) for x in given]
        for _ in range(2):
            autofuse.reset_stats()
            assert_same_as_eager(f, *given, rtol=1e-6)
            stats = autofuse.stats()
            assert stats.flushes["write"] == writes
            assert stats.kernels_launched + stats.eager_flushes == writes


@device_param
def test_large_views_are_written_by_many_threads(device):
    """On the CPU not in one step, and so by way of other memory."""

    def f(x, y):
        x[1:-1, 1:-1] = y * 2.0 + 1.0
        x[1:-1, 1:-1] -= y * 0.5
        x.T[::2, 2:].mul_((y * 3.0)[:300, :598])
        x[x > 4.0] = 4.0
        return x._version

    assert_same_as_eager(f, *(torch.randn(n, n, device=device) for n in (600, 598)))


@device_param
def test_errors_are_those_of_eager(device):
    v = lambda y: y * 2.0 + 1.0  # noqa: E731
    cases = {
        "index": lambda x, y: set_item(x, 9, v(y)),
        "dimensions": lambda x, y: set_item(x, (1, 2, 3), v(y)),
        "shape": lambda x, y: set_item(x, (slice(None), slice(2)), v(y)),
        "more dimensions": lambda x, y: set_item(x, 0, v(y)[None] * torch.ones(2, 1, 1).to(y)),
        "step": lambda x, y: set_item(x, slice(None, None, 0), v(y)),
        "negative step": lambda x, y: set_item(x, slice(None, None, -1), v(y)),
        "string": lambda x, y: set_item(x, "a", v(y)),
        "expanded": lambda x, y: set_item(x[:, :1].expand(4, 6), 0, v(y)[0]),
        "expanded in place": lambda x, y: x[:1].expand(4, 6).add_(v(y)),
        "a copy of more": lambda x, y: x[0].copy_(v(y)),
        "a result that does not fit": lambda x, y: x[0].add_(v(y)),
        "a float into ints": lambda x, y: x.int()[1:].add_(v(y)[1:]),
        "leaf": lambda x, y: set_item(x.requires_grad_(), 0, v(y)[0]),
        "a view of a leaf": lambda x, y: x.requires_grad_()[0].copy_(v(y)[0]),
    }
    for name, f in cases.items():
        x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
        mirror = x.clone(), y.clone()
        _, error = outcome(f, (x, y))
        _, failure = outcome(f, (W(mirror[0]), W(mirror[1])))
        assert repr(failure) == repr(error) != "None", name
        _, failure = outcome(f, (x.detach().clone(), W(mirror[1])))
        assert repr(failure) == repr(error), f"{name}, plain"
        assert_same(mirror[0].detach(), x.detach(), None, name)
        assert mirror[0]._version == x._version, name


@device_param
def test_what_eager_allows_and_no_kernel_does(device):
    """Leading sizes of 1, indices of other kinds, memory of another device, values with history."""

    def ones(x, y):
        x[0] = (y * 2.0)[None, :1]

    def lists(x, y):
        x[[0, 2]] = y[:2] * 2.0
        x[torch.tensor([1], device=x.device)] = y[0] * 3.0
        x[True] = y * 0.5

    def pending(x, y):
        z = x * 2.0
        z[1:3] = y[1:3] * 3.0
        return z, z._version

    def history(x, y):
        y = y.detach().requires_grad_()
        z = x * 1.0
        z[1:3] = y[1:3] * 3.0
        return z, torch.autograd.grad(z.sum(), y)

    def nothing(x, y):
        x[4:] = y[4:] * 2.0
        x[:, 6:] = y[:, :1] * 2.0

    def overlapping(x, y):
        x.flatten().as_strided((3, 2), (1, 1)).copy_((y * 0.0)[:3, :2])

    for f in (ones, lists, pending, history, nothing, overlapping):
        for _ in range(2):
            assert_same_as_eager(
                f, torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
            )


@device_param
def test_a_write_that_autograd_has_to_know_of(device):
    """Of a value with history, to memory that comes to require grad, by an op that reads such."""

    def value(x, y, p):
        x[1:3] = y[1:3] * p[1:3]
        return x

    def operand(x, y, p):
        x[:, 1:].addcmul_((y * 2.0)[:, 1:], p[:, 1:])
        return x

    def later(x, y, p):
        x[0] = y[0] * 2.0
        x[1] = p[1] * 2.0
        x[2] = y[2] * 2.0
        x[3:] += y[3:] * 2.0
        return x

    def by_an_alias(x, y, p):
        other = x.detach()
        row = x[2]
        row[1:] = y[2, 1:] * 2.0
        x[1] = p[1] * 2.0
        row[:3] = y[2, :3] * 2.0
        other[3] = y[3] * 2.0
        return x

    for f in (value, operand, later, by_an_alias):
        x, y = torch.zeros(4, 6, device=device), torch.randn(4, 6, device=device)
        for _ in range(3):
            p, q = (torch.ones(4, 6, device=device, requires_grad=True) for _ in range(2))
            want, got = f(x.clone(), y, p), f(W(x.clone()), W(y), W(q))
            want.sum().backward()
            got.sum().backward()
            assert_same((got.detach(), q.grad), (want.detach(), p.grad), None)
            assert got._version == want._version
            assert type(got.grad_fn) is type(want.grad_fn)


@device_param
def test_views_write_for_all_who_see_the_memory(device):
    """The base, other views and aliases, their versions, and chains that read them afterwards."""

    def f(x, y):
        row, flat, other = x[1], x.view(-1), x.detach()
        read = row * 2.0
        x[:, 2] = y[:, 0] * 2.0 + 1.0
        row[1:] = y[1, 1:] * 3.0 + 1.0
        flat[::5] += y.view(-1)[::5] * 2.0
        seen = row * 1.0, flat * 1.0, other * 1.0, read
        return (*seen, x._version, row._version, flat._version, other._version)

    for _ in range(2):
        assert_same_as_eager(f, torch.randn(4, 6, device=device), torch.randn(4, 6, device=device))


@device_param
@pytest.mark.parametrize("target", ["wrapped", "plain", "parameter", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_written_where_a_pending_mask_says(dtype, target, device):
    a = random_tensor((4, 6), dtype, device)
    if target == "parameter" and not dtype.is_floating_point:
        pytest.skip("no parameter has such a dtype")
    numbers = (0, 1, -2.5, 0.1, float("inf"), 1e30, 2**40, True, 70000)
    with torch.no_grad():
        for number in numbers:
            want, error = a.clone(), None
            try:
                want[want > 0] = number
            except (RuntimeError, OverflowError) as raised:
                error = raised
            for _ in range(2):
                memory = torch.stack((a, a), 1)[:, 0] if target == "strided" else a.clone()
                x = {**TARGETS, "strided": W}[target](memory)
                w, before = W(a), x._version
                autofuse.reset_stats()
                _, failure = outcome(set_item, (x, w > 0, number))
                assert repr(failure) == repr(error)
                assert bool(same_bits(memory, want).all()), number
                assert x._version - before == (error is None)
                fits = number is not True and abs(number) <= 100
                if dtype.is_floating_point and fits:
                    assert fused_writes() == 1, number


@device_param
def test_masks_of_pending_values_and_others(device):
    """A mask of fewer dimensions, an unsigned one, one of another shape; tensors as values."""

    def pending(x, y):
        z = x * 2.0
        held = z
        z[z > 0] = 0.25
        z[y > 0] = -1
        return z, z._version, held is z

    def memory(x, y):
        before = x * 3.0
        x[x > y] = 0.5
        x[(x * 2.0).abs() < 1.0] = 0
        return before, x._version, x * 1.0

    def others(x, y):
        x[(y > 0)[:, 0]] = 2.0
        x[(y > 0).any(0).expand(4, 6)] = 3.0
        x[y < 0] = (y * 2.0)[y < 0]
        x[y > 1] = x.sum() * 1.0
        return x._version

    def wrong(x, y):
        x[(y > 0)[:3]] = 2.0

    def turned(x, y):
        x.mT[(y > 0).mT] = 2.0
        return x * 1.0

    for f in (pending, memory, others, wrong, turned):
        for _ in range(2):
            x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
            autofuse.reset_stats()
            assert_same_as_eager(f, x, y)
            if f in (pending, memory, turned):
                fused_writes()


def test_layouts_meet_where_they_have_an_address_in_common():
    """Against their addresses, for all layouts of up to two axes in little memory."""
    layouts = [
        ((n, m), (s, t))
        for n, m in itertools.product((1, 2, 3), repeat=2)
        for s, t in itertools.product((0, 1, 2, 3, 5), repeat=2)
    ]

    def addresses(shape, stride, size, start):
        return {
            start + byte + size * sum(i * s for i, s in zip(at, stride, strict=True))
            for at in itertools.product(*map(range, shape))
            for byte in range(size)
        }

    for (shape, stride), (other, its) in itertools.product(layouts, layouts[::7]):
        mine = addresses(shape, stride, 1, 0)
        assert is_injective(shape, stride) <= (len(mine) == shape[0] * shape[1])
        assert reach(shape, stride) == max(mine) + 1
        for size, distance in itertools.product((1, 2), range(-9, 10, 3)):
            met = bool(mine & addresses(other, its, size, distance))
            strides = (*(size * s for s in its), 1)
            assert meets(distance, (*shape, 1), (*stride, 1), (*other, size), strides) is met


@device_param
@pytest.mark.parametrize("live", [False, True], ids=["alone", "beside a larger value"])
def test_a_write_between_other_elements_takes_no_memory_for_them(live, device, monkeypatch):
    """By several threads too, and where another value is computed after it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    made, kind = [], runner_class(torch.device(device))
    real = kind.empty_strided

    def spy(*args, **kwargs):
        tensor = real(*args, **kwargs)
        made.append(tensor.untyped_storage().nbytes())
        return tensor

    count, columns = 1 << 17, 64
    x, m = torch.rand(count, device=device), torch.rand(2, count, device=device)
    memory, want = (torch.zeros(count, columns, device=device) for _ in range(2))
    w, held = W(x), []
    monkeypatch.setattr(kind, "empty_strided", staticmethod(spy))
    for _ in range(3):
        z = w * 2.0 + 1.0
        if live:
            held.append(z + m)
        memory[:, 5] = z * 3.0
        held.clear()
    z = x * 2.0 + 1.0
    want[:, 5] = z * 3.0
    assert_same(memory, want, None)
    assert max(made, default=0) <= 2 * m.nbytes


# --- where memory is short -----------------------------------------------------------------------


def _total(xs, wrap):
    """Of a chain that alone keeps its Inputs; twice the largest of them may be kept."""
    total = wrap(xs[0].clone()) * 2.0
    for x in xs[1:]:
        total = total + x.clone()
    return total


def _into_memory(xs, wrap):
    memory = torch.zeros(4, 5, device=xs[0].device)
    wrap(memory).add_(_total(xs[:-1], wrap) - wrap(xs[-1].clone()))
    return memory


def _into_a_strided_view(xs, wrap):
    memory = torch.zeros(6, 7, device=xs[0].device)
    wrap(memory)[1:-1, 1:-1].add_(_total(xs[:-1], wrap) - wrap(xs[-1].clone()))
    return memory


def _into_an_item(xs, wrap):
    memory = torch.zeros(6, 7, device=xs[0].device)
    wrap(memory)[1:-1, 1:-1] = _total(xs, wrap)
    return memory


def _into_another_dtype(xs, wrap):
    memory = torch.zeros(4, 5, dtype=torch.float16, device=xs[0].device)
    wrap(memory)[:, 1:4] = _total([x[:, :3] for x in xs], wrap)
    return memory


def _into_a_pending_value(xs, wrap):
    total = seen = wrap(xs[0].clone()) * 2.0
    for x in xs[1:]:
        total += x.clone()
    assert seen is total
    return total


SHORT = [
    _into_memory, _into_a_strided_view, _into_an_item, _into_another_dtype, _into_a_pending_value
]  # fmt: skip


@device_param
@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("program", SHORT)
def test_where_a_chain_alone_keeps_much_memory(program, count, device, monkeypatch):
    """It may run for what the op reads that is to be written, or for that which writes it."""
    monkeypatch.setattr(autofuse.config, "pinned_bytes", 0)
    xs = [torch.arange(20.0, device=device).view(4, 5) + k for k in range(count)]
    with torch.no_grad():
        want = program(xs, lambda x: x)
        for _ in range(4):  # by Python at first
            assert_same(autofuse.unwrap(autofuse.materialize(program(xs, W))), want, None)


@device_param
@pytest.mark.parametrize("program", [_into_memory, _into_a_strided_view])
def test_what_is_written_at_once_need_not_run_for_its_memory_before(
    program, on, device, monkeypatch, alone
):
    if not (on and native.active()):
        pytest.skip("Python runs what is too much, and writes as eager PyTorch does")
    monkeypatch.setattr(autofuse.config, "pinned_bytes", 0)
    xs = [torch.arange(20.0, device=device).view(4, 5) + k for k in range(3)]
    with torch.no_grad():
        for _ in range(4):
            autofuse.reset_stats()
            program(xs, W)
    seen = autofuse.stats()
    assert seen.flushes == {"write": 1} and seen.kernels_launched == 1
    assert "add_" not in [name for name, _ in seen.eager_ops]


BETWEEN = {
    "add_": lambda x, y, z: x.add_(1.0),
    "of itself": lambda x, y, z: x.sub_(x.softmax(-1)),
    "row": lambda x, y, z: x[1].mul_(0.5),
    "column": lambda x, y, z: x.__setitem__((slice(None), 2), x.amax(-1)),
    "by a view": lambda x, y, z: x.t()[3:].add_(y.t()[3:]),
    "plain": lambda x, y, z: autofuse.unwrap(x).mul_(2.0),
    "data": lambda x, y, z: x.data.fill_(0.25),
    "out": lambda x, y, z: torch.sub(y, x.mean(-1, keepdim=True), out=x),
    "reduced out": lambda x, y, z: torch.sum(x * y, -1, out=x[:, 0]),
    "masked": lambda x, y, z: x.masked_fill_(x > y, 0.5),
    "copy_": lambda x, y, z: x.copy_(y.softmax(0)),
    "the result": lambda x, y, z: z.mul_(3.0),
    "a view of the result": lambda x, y, z: z.view(-1)[:1].add_(1.0),
    "of the result": lambda x, y, z: x.add_(z.sum()),
}


MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", BETWEEN)
def test_writes_between_the_recording_of_reductions_and_their_flush(recorded, on, between, mode):  # noqa: F811
    """Of an operand, of what shares its memory, and of the result; in eager's order, once each."""

    def run(call, wrap):
        x, y = torch.linspace(0.1, 2, 32).view(4, 8), torch.linspace(1, 0.5, 32).view(4, 8)
        w, b = torch.rand(8), torch.rand(8)
        x, y = wrap(x), wrap(y)
        rows = x[1:3]
        with mode():
            z = call(x, y, w, b)
            early, view = z * 2.0, z.view(-1)[:1]
            below = rows.sum(-1)
            BETWEEN[between](x, y, z)
            found = [z, early, view, below, x, y, rows, call(x * 0.5, y, w, b), rows.mean(0)]
            autofuse.materialize(*found)
        return [autofuse.unwrap(one) for one in found], [
            None if one.is_inference() else one._version for one in found
        ]

    turn = [*BETWEEN].index(between) + MODES.index(mode)
    some = [*REDUCED.items()][turn % 3 :: 3]  # all of them in three modes, and by Python or not
    for name, call in some:
        torch.manual_seed(0)
        want = run(call, lambda t: t)
        for _ in range(2):
            torch.manual_seed(0)
            assert_same(run(call, W), want, None, name)
    assert autofuse.stats().ops_recorded > 4 * len(some)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_who_is_interrupted_while_it_asks_what_is_read_writes_nothing(always, error):
    x, other = W(torch.arange(1.0, 9.0)), W(torch.ones(8))
    part, read = x[1:], x[:-1]

    def fail(*args):
        raise error("in the middle")

    with torch.no_grad():
        for _ in range(4):
            other[1:].div_(read * 2.0 + 1.0)  # as below, of other memory
        before = autofuse.unwrap(x).clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recording_writes, "_meet", fail)
            with pytest.raises(error, match="in the middle"):
                part.div_(read * 2.0 + 1.0)
        assert torch.equal(autofuse.unwrap(x), before)
        part.div_(read * 2.0 + 1.0)
    assert not torch.equal(autofuse.unwrap(x), before)
