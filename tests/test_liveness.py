"""What gets memory: read off reference counts, proved by counters."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

import autofuse
from autofuse.record import record
from support import DEVICES, assert_same

pytestmark = pytest.mark.parametrize("device", DEVICES)


def wrapped(device, *shape):
    return autofuse.wrap(torch.randn(*shape, device=device))


def test_a_loop_stores_only_the_last_value(device):
    a, b, h = (wrapped(device, 8, 4) for _ in range(3))
    for _ in range(4):
        h = torch.addcmul(b, h, a) * 0.5
    autofuse.materialize(h)
    stats = autofuse.stats()
    assert stats.live_outs_stored == 1 and stats.nodes_elided == 7
    assert stats.kernels_launched == 1
    assert stats.bytes_elided == 7 * 8 * 4 * 4


def test_a_held_intermediate_is_another_output_of_the_same_kernel(device):
    x = wrapped(device, 8, 4)
    y = x * 2
    z = y + 1
    autofuse.materialize(z)
    assert not autofuse.is_pending(y)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.live_outs_stored == 2
    assert_same(y, autofuse.unwrap(x) * 2, None)


def test_a_chain_of_dead_results_launches_nothing(device):
    x = wrapped(device, 8, 4)
    (x * 2).neg()
    autofuse.record.flush.flush_all("test")
    stats = autofuse.stats()
    assert stats.kernels_launched == 0 and stats.live_outs_stored == 0
    assert stats.nodes_elided == 2


def test_values_in_containers_and_attributes_are_alive(device):
    x = wrapped(device, 6)
    holder = type("Holder", (), {})()
    kept = {"list": [x + 1], "nested": ((x + 2,),)}
    holder.value = x + 3
    last = x + 4
    autofuse.materialize(last)
    assert autofuse.stats().live_outs_stored == 4
    plain = autofuse.unwrap(x)
    for got, add in ((kept["list"][0], 1), (kept["nested"][0][0], 2), (holder.value, 3)):
        assert_same(got, plain + add, None)


def test_values_in_closures_generators_and_cycles_are_alive(device):
    x = wrapped(device, 6)

    def outer():
        inner = x * 3
        return lambda: inner

    def stream():
        value = x * 4
        yield value
        yield value

    read, values, cycle = outer(), stream(), []
    next(values)
    cycle.append((cycle, x * 5))
    autofuse.materialize(x * 6)
    plain = autofuse.unwrap(x)
    assert autofuse.stats().live_outs_stored == 4
    assert_same(read(), plain * 3, None)
    assert_same(next(values), plain * 4, None)
    assert_same(cycle[0][1], plain * 5, None)


def test_a_weak_reference_keeps_nothing_and_dies_with_the_value(device):
    x = wrapped(device, 6)
    for _ in range(3):
        y = x * 2
        ref = weakref.ref(y)
        z = y + 1
        del y
        autofuse.materialize(z)
        gc.collect()
        assert ref() is None
    assert autofuse.stats().live_outs_stored == 3


def test_a_weak_reference_to_a_live_value_stays(device):
    x = wrapped(device, 6)
    y = x * 2
    ref = weakref.ref(y)
    autofuse.materialize(y)
    assert ref() is y


def test_a_weak_reference_of_cpp(device):
    """torch exchanges no tensor that has one: its value is kept beside it."""
    x = wrapped(device, 6)
    for _ in range(4):
        y = x * 2
        ref = torch._C._WeakTensorRef(y)
        autofuse.materialize(y)
        assert_same(y + 1, autofuse.unwrap(x) * 2 + 1, None)
        assert not ref.expired()
        del y
        gc.collect()
        assert ref.expired()
    stats = autofuse.stats()
    assert stats.kernels_launched == 8 and sum(stats.flushes.values()) == 8


def test_a_value_beside_its_shell_stays_what_it_is(device):
    """Others have it, when C++ lets go of the shell: the caller, and a chain that reads it."""
    x = wrapped(device, 6)
    y = x * 2
    ref = torch._C._WeakTensorRef(y)
    value = autofuse.unwrap(y)
    pending = y + 1
    del ref
    want = autofuse.unwrap(x) * 2
    assert_same(y.sum(), want.sum(), None)
    assert type(value) is torch.Tensor
    assert_same([value, pending, y], [want, want + 1, want], None)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Items(list):
    pass


@pytest.mark.parametrize("make", [Pair, lambda *xs: Items(xs), lambda *xs: list(xs)])
def test_a_value_beside_its_shell_in_a_container(make, device):
    x = wrapped(device, 6)
    y = x * 2
    ref = torch._C._WeakTensorRef(y)
    values = make(y, x)
    assert_same(torch.cat(values), torch.cat([autofuse.unwrap(x) * 2, autofuse.unwrap(x)]), None)
    assert values[0] is y and not ref.expired()


def test_identity_and_attributes_survive_the_flush(device):
    x = wrapped(device, 6)
    y = x * 2
    same, number = y, id(y)
    autofuse.materialize(y)
    assert same is y and id(y) == number
    z = x * 3
    z.note = "mine"
    assert z.note == "mine"
    w = x * 3  # the same place in the same program: nothing of z may show
    assert not hasattr(w, "note")
    assert_same(w, autofuse.unwrap(x) * 3, None)


def test_steady_state_creates_no_shells(device, monkeypatch):
    x, make, made = wrapped(device, 8, 4), record.make_shell, []

    def counting(*arguments):
        made.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(record, "make_shell", counting)
    for k in range(20):
        autofuse.materialize(((x * 2.0).neg() + x - 3.0).abs())
        assert len(made) <= 5, k  # one per op, the first time
    assert made


def test_a_value_that_cpp_holds_is_alive(device):
    x = wrapped(device, 6)
    p = torch.zeros(6, device=device)
    y = x * 2
    p.grad = y
    del y
    autofuse.materialize(x * 3)
    assert_same(p.grad, autofuse.unwrap(x) * 2, None)


def test_every_live_shape_is_stored_once(device):
    """Live values of several shapes: one kernel each, none computed twice."""
    row, full = wrapped(device, 4), wrapped(device, 8, 4)
    bias = row * 2
    out = full + bias
    autofuse.materialize(out)
    stats = autofuse.stats()
    assert stats.kernels_launched == 2 and stats.live_outs_stored == 2
    assert_same(bias, autofuse.unwrap(row) * 2, None)
    assert_same(out, autofuse.unwrap(full) + autofuse.unwrap(row) * 2, None)


def test_a_dead_value_of_another_shape_stays_inside(device):
    row, full = wrapped(device, 4), wrapped(device, 8, 4)
    out = full + row * 2
    autofuse.materialize(out)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.nodes_elided == 1


def test_gradients_that_are_taken_away_end_no_chain(device):
    """As `zero_grad` does before `backward`; what was recorded has read them as they were."""
    p = torch.nn.Parameter(torch.full((4,), 3.0, device=device))
    p.grad = torch.full((4,), 2.0, device=device)
    other = torch.nn.Parameter(torch.ones(4, device=device))
    w = autofuse.wrap(torch.ones(4, device=device))
    with torch.no_grad():
        seen = w * p.grad + p
    loss = (w * p).square()
    torch.optim.SGD([p, other], 0.1).zero_grad()
    p.grad = given = torch.zeros(4, device=device)
    assert autofuse.is_pending(loss) and p.grad is given
    loss.sum().backward()
    assert p.grad is given and p.grad.tolist() == [6.0] * 4
    assert seen.tolist() == [5.0] * 4
