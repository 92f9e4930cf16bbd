"""Starts: one instruction begins chains that pay and chains that do not, of the same first op."""

from itertools import pairwise

import pytest
import torch

import autofuse
from autofuse.chain.state import this_thread
from autofuse.record import policy, ways
from autofuse.record.modes import forget_all
from support import assert_same

SHORT_US = 7.0


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """Three ops gain 0.3 us as one kernel, under grad 1.3, and fewer lose."""
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 6.0)
    monkeypatch.setitem(policy.SHORT_US, "cpu", SHORT_US)
    margin = lambda nodes, outline, first=0: 1.3 * (len(nodes) - first - 2)  # noqa: E731
    for module in (policy, ways):
        monkeypatch.setattr(module, "margin", margin)
    forget_all("test")


@pytest.fixture
def short(monkeypatch):
    """How many chains have run as the ops that they are."""
    ran = [0]

    class Counted(ways.ShortRunner):
        def run(self, chain):
            ran[0] += 1
            super().run(chain)

    monkeypatch.setattr(ways, "ShortRunner", Counted)
    return ran


def wrapped(grad=False):
    return autofuse.wrap(torch.randn(4, 4, requires_grad=grad))


def net(x, y, layers, more=2):
    """Residual layers: a chain begins with each, which is longer in all but the last."""
    for k in range(layers):
        x = autofuse.materialize(x) + y
        for _ in range(more if k < layers - 1 else 0):
            x = x * 0.5
    return autofuse.materialize(x)


def chain(x, more):
    """A chain that begins with one and the same instruction."""
    z = x + x
    recorded = autofuse.is_pending(z)
    for _ in range(more):
        z = z * 0.5
    autofuse.materialize(z)
    return recorded


def told_apart(x):
    """Let the op of `chain` be told apart by instructions, by others; what is known of them."""
    for k in range(8):
        z = x + x
        for _ in range(k % 2 * 24):
            z = z * 0.5
        autofuse.materialize(z)
    (stand,) = [node for node in this_thread.current.home.next.values() if node.starts is not None]
    return stand.starts


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layers", [2, 12])
def test_what_loses_in_the_last_layer_is_recorded_in_none(layers, grad, short, on, monkeypatch):
    """Where it gains less in the others; none of the ops that follow there is tried often."""
    monkeypatch.setitem(policy.SHORT_US, "cpu", 20.0 if grad else SHORT_US)
    x, y = wrapped(grad), wrapped()
    want = net(autofuse.unwrap(x), autofuse.unwrap(y), layers)
    for k in range(1100):
        if k == 100:
            assert 0 < short[0] < 30
            short[0] = 0
        made = net(x, y, layers)
        if k % 50 < 2:
            assert_same(autofuse.unwrap(made), want, None)
    assert short[0] < 30


@pytest.mark.parametrize("grad", [False, True])
def test_what_pays_in_sum_is_recorded(grad, short, on, monkeypatch):
    """In eleven layers, though it loses in the last; whether it does is asked ever more rarely."""
    asked, tell = [], policy.Balance.tell

    def told(balance, *args):
        asked.append(k)
        return tell(balance, *args)

    monkeypatch.setattr(policy.Balance, "tell", told)
    x, y = wrapped(grad), wrapped()
    for k in range(1000):  # noqa: B007 - `told` reads it
        autofuse.reset_stats()
        net(x, y, 12, more=8)
        if k != 3:  # where the last chain was the third that lost, and nothing is known of others
            assert autofuse.stats().ops_recorded == 11 * 9 + 1
    assert short[0] == 1000
    steps = sorted(set(asked))
    begun = [steps[0], *(b for a, b in pairwise(steps) if b > a + 1)]
    pauses = [b - a for a, b in pairwise(begun)]
    assert pauses == pytest.approx([3, 12, 48, 192, 192, 192, 192], abs=2)


@pytest.mark.parametrize("pays", [False, True])
def test_a_place_that_changes_its_mind_is_followed(pays, short, on):
    x = wrapped()
    told_apart(x)
    for _ in range(3):
        recorded = [chain(x, 24 * pays) for _ in range(500)]
        assert recorded.count(not pays) < 15
        pays = not pays


def test_a_place_that_has_lost_for_long_is_followed(on):
    x = wrapped()
    told_apart(x)
    for _ in range(10000):
        chain(x, 0)
    recorded = [chain(x, 24) for _ in range(6400)]
    assert not recorded[0]
    assert all(recorded[recorded.index(True) :])


def test_a_place_where_chains_lose_is_asked_ever_more_rarely(on):
    x = wrapped()
    told_apart(x)
    recorded = [k for k in range(16000) if chain(x, 0)]
    assert len(recorded) % policy.TRIES == 0
    pauses = [b - a - 1 for a, b in pairwise(recorded) if b > a + 1]
    assert pauses == pytest.approx([100, 400, 1600, 6400, 6400], abs=2)


def test_ops_that_begin_no_long_chain_are_tried_ever_more_rarely(on):
    x = wrapped()
    recorded = [k for k in range(6000) if chain(x, 1)]
    assert recorded[:5] == [0, 1, 2, 3, 105]
    pauses = [b - a - 1 for a, b in pairwise(recorded[3:])]
    assert pauses == pytest.approx([100, 400, 1600, 1600, 1600], abs=2)


def test_a_new_place_is_known_soon(on):
    """After one chain that pays, or as many that lose as are tried anywhere."""
    x = wrapped()
    starts = told_apart(x)
    known = len(starts)
    assert chain(x, 24) and len(starts) == known + 1
    recorded = []
    for _ in range(policy.TRIES + 2):
        z = x + x
        recorded.append(autofuse.is_pending(z))
        autofuse.materialize(z)
    assert recorded == [True] * policy.TRIES + [False] * 2


def test_chains_that_lose_one_after_the_other_count_together(on):
    """However much was gained before the first of them."""
    x = wrapped()
    told_apart(x)
    for _ in range(40):
        recorded = [chain(x, more) for more in (24, 24, 24, 24, 24, 24, 24, 24, 0, 0, 0)]
    assert not any(recorded)


def test_places_have_verdicts_of_their_own(on):
    """Though nobody knows at which of them a chain has begun that loses where others pay."""
    x = wrapped()
    told_apart(x)
    lost = []
    for _ in range(400):
        z = x + x
        assert autofuse.is_pending(z)
        for _ in range(24):
            z = z * 0.5
        autofuse.materialize(z)
        lost.append(chain(x, 0))
    assert lost[:3] == [True] * 3 and lost.count(True) == 2 * policy.TRIES
