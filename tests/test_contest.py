"""Contests: which way a fused call takes, by a simulated clock and by the real one."""

import dataclasses
import functools
import gc
import random
import sys
import threading
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch

import autofuse
from autofuse import fused as fusing
from autofuse import lending
from autofuse.dispatch.nested import tensors_in
from autofuse.hot import native
from autofuse.patches import streams
from autofuse.record import contest as contests
from autofuse.record import policy
from autofuse.record.contest import BLOCK, COLD, FIRST, FUSED, LOOKS, NO_STEPS, PLAIN, Contest
from support import DEVICES, OURS


class Machine:
    """A clock and what calls cost on it, in each way."""

    def __init__(self, fused, plain, noise=0.0, late=0):
        self.costs, self.noise, self.late = [fused, plain], noise, late
        self.now, self.asked, self.random = 0.0, 0, random.Random(0)

    def mark(self):
        return self.now

    def between(self, begin, end):
        self.asked += 1
        return None if self.asked <= self.late else end - begin

    def run(self, way):
        self.now += self.costs[way] * self.random.lognormvariate(0.0, self.noise)


def play(contest, machine, calls, settled=lambda k: True, step=lambda k: 0, news=None):
    """The ways of so many calls."""
    ways = []
    for k in range(calls):
        if contest.left > 0:
            contest.left -= 1
            ways.append(contest.way)
            machine.run(contest.way)
            continue
        begun = contest.begin(step(k), news)
        way = contest.way
        ways.append(way)
        machine.run(way)
        contest.end(begun, way, lambda: settled(k) or way == PLAIN)  # noqa: B023
    return ways


@pytest.mark.parametrize(
    "fused, plain",
    [(10.0, 20.0), (20.0, 10.0), (10.0, 10.1), (10.0, 10.4), (10.0, 10.6), (10.4, 10.0)],
)
@pytest.mark.parametrize("once", [False, True])
def test_the_better_way_stays(fused, plain, once):
    """Fused is better where it gains so much that it is no chance."""
    machine = Machine(fused, plain, noise=0.0)
    contest = Contest(machine, once=once)
    ways = play(contest, machine, 400)
    better = FUSED if 1 - fused / plain > (0.05 if once else 0.02) else PLAIN
    begun = 100 + COLD
    assert set(ways[:begun]) == {FUSED, PLAIN} and set(ways[begun:]) == {better}
    assert contest.costs == pytest.approx((fused, plain)) and ways[0] == FUSED


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_decide(seed):
    machine = Machine(13.0, 10.0, noise=0.2)
    machine.random.seed(seed)
    contest = Contest(machine)
    assert set(play(contest, machine, 300)[-100:]) == {PLAIN}


@pytest.mark.parametrize("fused, plain", [(10.0, 20.0), (10.0, 14.0)])
def test_a_clear_gain_is_decided_after_a_block_of_each(fused, plain):
    machine = Machine(fused, plain, noise=0.02)
    contest = Contest(machine)
    ways = play(contest, machine, 100)
    first = COLD + 2 * (BLOCK + 1) + 2  # the one in the middle that notices, and one that begins
    assert set(ways[first:]) == {FUSED} and contest.costs is not None


def test_a_slow_first_block_decides_nothing():
    """Fused calls that find nothing in caches at first."""
    machine = Machine(30.0, 20.0)
    contest = Contest(machine)
    play(contest, machine, COLD + 2 * (BLOCK + 1))
    machine.costs[FUSED] = 10.0
    assert play(contest, machine, 60)[-1] == FUSED


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("waits", [0, 7])
def test_the_first_calls_of_a_kernel_do_not_count(once, waits):
    """On a GPU a call of two ops takes 20 us at first and 10 later, eager ones 13."""
    machine = Machine(10.0, 13.0)
    contest = Contest(machine, once=once)
    for k in range(waits + COLD + 60):
        machine.costs[FUSED] = 20.0 if k < waits + COLD else 10.0
        play(contest, machine, 1, settled=lambda _, k=k: not 5 <= k < 5 + waits)
    assert contest.way == FUSED and contest.costs == pytest.approx((10.0, 13.0))


def test_a_block_of_each_decides_nothing_by_chance():
    """What is slower wins by chance once in a hundred times, and is measured again."""
    wrong = 0
    for seed in range(300):
        machine = Machine(11.0, 10.0, noise=0.2)
        machine.random.seed(seed)
        contest = Contest(machine)
        ways = play(contest, machine, COLD + 2 * (BLOCK + 1) + 10)
        wrong += ways[-1] == FUSED and contest.left > 0
    assert wrong <= 3, wrong


def test_outliers_do_not_decide():
    machine = Machine(10.0, 12.0)
    contest = Contest(machine)
    ways = []
    for k in range(200):
        machine.now += 0.0
        ways += play(contest, machine, 1)
        if ways[-1] == FUSED and k % 7 == 0:
            machine.costs[FUSED] = 1e6
        else:
            machine.costs[FUSED] = 10.0
    assert set(ways[-50:]) == {FUSED}


def test_a_place_that_changes_its_mind():
    """Asked again after a while, and later each time, in the way that was better first."""
    machine = Machine(20.0, 10.0)
    contest = Contest(machine)
    assert play(contest, machine, 200)[-1] == PLAIN
    machine.costs = [10.0, 20.0]
    ways = play(contest, machine, 1200)
    assert ways[0] == PLAIN and ways[-1] == FUSED
    first = ways.index(FUSED)
    assert FIRST // 2 < first <= FIRST + 2 * BLOCK
    machine.costs = [20.0, 10.0]
    ways = play(contest, machine, 4 * FIRST)
    assert 2 * FIRST < len(ways) - len([way for way in ways if way == PLAIN]) and ways[-1] == PLAIN


def test_asked_ever_more_rarely():
    machine = Machine(20.0, 10.0)
    contest = Contest(machine)
    ways = play(contest, machine, 100_000)
    assert ways.count(FUSED) < 150


def test_what_may_differ_is_decided_once():
    machine = Machine(20.0, 10.0)
    contest = Contest(machine, once=True)
    ways = play(contest, machine, 5000)
    changes = sum(a != b for a, b in zip(ways, ways[1:], strict=False))
    assert changes <= 4 and ways[-1] == PLAIN
    machine.costs = [1.0, 10.0]
    assert set(play(contest, machine, 5000)) == {PLAIN}


def test_calls_that_wait_for_kernels_do_not_count():
    machine = Machine(5.0, 10.0)
    contest = Contest(machine)
    costs = []
    for k in range(200):
        waits = k < 30
        machine.costs[FUSED] = 500.0 if waits else 5.0
        costs += play(contest, machine, 1, settled=lambda _, waits=waits: not waits)
        assert not waits or costs[-1] == FUSED
    assert contest.way == FUSED and contest.costs == pytest.approx((5.0, 10.0))


def test_a_slow_beginning_does_not_decide_for_ever():
    """Caches are cold, clocks low: whoever begins pays for that."""
    machine = Machine(9.0, 10.0)
    contest = Contest(machine, once=True)
    ways = []
    for k in range(100):
        machine.costs = [9.0, 10.0] if k > 7 else [30.0, 31.0]
        ways += play(contest, machine, 1)
    assert ways[-1] == FUSED and contest.left > 0


def test_what_never_settles_is_decided_all_the_same():
    machine = Machine(20.0, 10.0)
    contest = Contest(machine)
    assert play(contest, machine, 400, settled=lambda k: False)[-1] == PLAIN


def test_times_that_are_known_late_hold_nothing_up():
    machine = Machine(20.0, 10.0, late=200)
    contest = Contest(machine)
    ways = play(contest, machine, 400)
    assert ways[-1] == PLAIN and contest.costs == pytest.approx((20.0, 10.0))


def test_while_times_are_not_known_a_call_asks_for_one():
    machine = Machine(20.0, 10.0, late=1 << 30)
    contest = Contest(machine)
    play(contest, machine, COLD + 60)
    asked = machine.asked
    play(contest, machine, 10)
    assert machine.asked == asked + 10 and contest.costs is None


def test_to_ask_whether_all_is_settled_counts_for_no_way():
    """Of calls; what lies between two steps has it in it, either way."""
    for steps in (False, True):
        machine = Machine(9.0, 10.0)

        def settled(k):
            machine.now += 5.0  # noqa: B023
            return True

        contest = Contest(machine, steps=steps)
        play(contest, machine, 200, settled, step=lambda k: k)
        more = 5.0 if steps else 0.0
        assert contest.way == FUSED
        assert contest.costs == pytest.approx((9.0 + more, 10.0 + more))


def test_a_call_counts_for_the_way_it_went():
    """Whatever other threads make of the contest while it runs."""
    machine = Machine(5.0, 10.0)
    contest = Contest(machine)
    late = [contest.begin(0) for _ in range(20)]
    while contest.way == FUSED:
        play(contest, machine, 1)
    for begun in late:
        contest.end(begun, FUSED, lambda: True)
    play(contest, machine, 100)
    assert contest.costs == pytest.approx((5.0, 10.0))


def test_two_threads_may_decide_at_once():
    machine = Machine(20.0, 10.0, late=1 << 30)
    contest = Contest(machine)
    play(contest, machine, COLD + 60)
    machine.late = 0
    between = machine.between

    def meanwhile(begin, end):
        machine.between = between
        contest.begin(0)
        return between(begin, end)

    machine.between = meanwhile
    contest.begin(0)
    assert contest.way == PLAIN and contest.costs == pytest.approx((20.0, 10.0))
    contest._decide()  # by one that had still seen that all is measured
    assert contest.costs == pytest.approx((20.0, 10.0))


def test_nothing_against_nothing_is_decided():
    machine = Machine(0.0, 0.0)
    contest = Contest(machine)
    assert set(play(contest, machine, 200)[-50:]) == {FUSED} and contest.costs == (0.0, 0.0)


@pytest.mark.parametrize("calls", [1, 7, 50])
def test_steps_count_with_what_lies_between_calls(calls):
    """A forward that costs less fused, with a backward that costs more."""
    machine = Machine(5.0, 10.0)
    contest = Contest(machine, steps=True)
    ways = []
    for step in range(200):
        ways += play(contest, machine, calls, step=lambda k, step=step: step)
        assert len(set(ways[-calls:])) == 1  # a step is all of one way
        machine.now += [100.0, 50.0][ways[-1]] * calls
        if ways[-1] == PLAIN and contest.left:
            break
    assert contest.way == PLAIN
    assert contest.costs == pytest.approx((105.0 * calls, 60.0 * calls))


def test_steps_in_which_something_is_prepared_do_not_count():
    """After the call: a kernel for backward, or results on trial in another fused call."""
    machine = Machine(5.0, 10.0)
    contest = Contest(machine, steps=True)
    for step in range(200):
        news = min(step, 40)
        play(contest, machine, 1, step=lambda k, step=step: step, news=news)
        machine.now += 500.0 if news == step else 50.0
    assert contest.left and contest.costs == pytest.approx((55.0, 60.0))


def test_a_step_with_calls_that_go_another_way_does_not_count():
    machine = Machine(5.0, 10.0)
    contest = Contest(machine, steps=True)
    for step in range(200):
        if step % 2 and not contest.left:
            for _ in range(50):
                contest.skip()
                machine.run(PLAIN)
        play(contest, machine, 1, step=lambda k, step=step: step // 2)
    assert contest.left == 0 and contest.costs is None
    for step in range(200, 300):
        play(contest, machine, 1, step=lambda k, step=step: step)
    assert contest.left and contest.costs == pytest.approx((5.0, 10.0))


def test_steps_of_many_calls_are_steps_from_the_second_on():
    """A cell that is called a thousand times before backward."""
    machine, calls = Machine(5.0, 10.0), 2 * NO_STEPS
    contest = Contest(machine, steps=True)
    for step in range(100):
        ways = play(contest, machine, calls, step=lambda k, step=step: step)
        machine.now += [100.0, 50.0][ways[-1]] * calls
        assert step < 8 or len(set(ways)) == 1
    assert contest.way == PLAIN
    assert contest.costs == pytest.approx((105.0 * calls, 60.0 * calls))


def test_steps_and_calls_are_not_compared_with_each_other():
    machine = Machine(10.0, 20.0)
    contest = Contest(machine, steps=True)
    steps = 3 * (BLOCK + 1) + 1  # two blocks of fused ones, one of plain ones
    for step in range(steps):
        play(contest, machine, 1, step=lambda k, step=step: step)
        machine.now += 1000.0
    while not contest.left:  # evaluated from now on
        play(contest, machine, 1, step=lambda k: steps - 1)
    assert contest.costs == pytest.approx((10.0, 20.0)) and contest.way == FUSED


def test_without_backward_calls_count():
    machine = Machine(20.0, 10.0)
    contest = Contest(machine, steps=True)
    ways = play(contest, machine, NO_STEPS + 200)
    assert set(ways[:NO_STEPS]) == {FUSED} and ways[-1] == PLAIN


# --- fused calls ---------------------------------------------------------------------------------


@pytest.fixture
def rigged(monkeypatch, alone):
    """A clock for every contest, on which fused calls cost what they are told to."""

    class Rigged:
        now, fused, plain, flushes = 0.0, 20.0, 10.0, 0

        def mark(self):
            flushes = sum(autofuse.stats().flushes.values())
            self.now += self.plain if flushes == self.flushes else self.fused
            self.flushes = flushes
            return self.now

        def between(self, begin, end):
            return end - begin

    clock = Rigged()
    monkeypatch.setattr(autofuse.config, "measure", True)
    monkeypatch.setattr(policy, "clock_of", lambda device: clock)
    yield clock
    autofuse.config.measure = False


@dataclasses.dataclass
class Result:
    value: torch.Tensor


def chain(x):
    return (x * 2 + 1).sigmoid() * x


def owners_of(function):
    cells = [cell.cell_contents for cell in function.__closure__]
    (owners,) = [cell for cell in cells if isinstance(cell, dict)]
    return owners


def sites_of(function, module=None):
    return owners_of(function)[(0 if module is None else id(module)) + 1].sites  # under grad


def contest_of(function, module=None):
    """The only one."""
    (site,) = sites_of(function, module).values()
    return site.contest


def flushes_of(function, *args):
    before = sum(autofuse.stats().flushes.values())
    function(*args)
    return sum(autofuse.stats().flushes.values()) - before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused, plain", [(10.0, 20.0), (20.0, 10.0)])
def test_a_fused_call_runs_the_better_way(rigged, device, fused, plain):
    rigged.fused, rigged.plain = fused, plain
    function, x = autofuse.fuse(chain), torch.randn(8, device=device)
    expected = chain(x)
    for _ in range(200):
        y = function(x)
        assert type(y) is torch.Tensor and type(x) is torch.Tensor
        torch.testing.assert_close(y, expected, rtol=0 if device == "cuda" else 1e-6, atol=0)
    assert flushes_of(function, x) == (fused < plain)
    for _ in range(LOOKS):  # after which every call's place is looked at again
        contest_of(function).free and function(x)
    with torch.no_grad():  # a place of its own
        assert flushes_of(function, x) == 1
    assert flushes_of(function, torch.randn(800, device=device)) == 1
    assert flushes_of(function, x) == (fused < plain)


def test_one_setting_fuses_every_call(rigged):
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    assert flushes_of(function, x) == 0
    for name, value in (("measure", False), ("always_fuse", True), ("check", True)):
        before = getattr(autofuse.config, name)
        setattr(autofuse.config, name, value)
        try:
            assert flushes_of(function, x) == 1
        finally:
            setattr(autofuse.config, name, before)
    assert flushes_of(function, x) == 0


@pytest.fixture
def exact(monkeypatch):
    """Ways may change here as on a GPU, where results are the same."""
    monkeypatch.setattr(policy, "is_inexact", lambda *_: False)


def test_plain_calls_are_granted_without_a_look(rigged, exact):
    """While all sites' calls are plain; what comes then, of another site too, waits so long."""
    function, x, large = autofuse.fuse(chain), torch.randn(8), torch.randn(800)
    for _ in range(100):
        function(x)
    contest = contest_of(function)
    while not contest.free:
        function(x)
    while contest.free:
        assert flushes_of(function, x) == 0
    left = contest.left
    assert flushes_of(function, x) == 0  # looked at, and the next are granted
    assert (contest.left, contest.free) == (left - LOOKS, LOOKS - 1)
    for count in range(1, LOOKS):
        assert contest.free == LOOKS - count
        assert flushes_of(function, large) == 0
    assert contest.free == 0 and len(sites_of(function)) == 1
    assert flushes_of(function, large) == 1 and len(sites_of(function)) == 2
    for _ in range(2 * LOOKS):  # the other's way is not known yet
        function(x)
    assert contest.free == 0


def test_nothing_is_granted_where_results_may_differ(rigged):
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    assert contest_of(function).way == PLAIN and contest_of(function).free == 0
    assert flushes_of(function, torch.randn(800)) == 1


@pytest.mark.parametrize("what", ["measure", "always_fuse", "check", "enabled"])
def test_settings_end_what_was_granted(rigged, exact, what):
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    while not contest_of(function).free:
        function(x)
    before = getattr(autofuse.config, what)
    setattr(autofuse.config, what, not before)
    try:
        assert flushes_of(function, x) == (what != "enabled")
    finally:
        setattr(autofuse.config, what, before)


def test_explain_sees_calls_that_were_granted(rigged, exact):
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    while not contest_of(function).free:
        function(x)
    with autofuse.explain() as report:
        for _ in range(5):
            function(x)
    (advice,) = report.advice
    assert advice.startswith("5 fused calls ran as plain PyTorch")


def test_granted_calls_leave_no_wrapped_result(rigged, exact):
    kept = {}
    function, x = autofuse.fuse(lambda x: kept.get("y", x) * 2), torch.randn(8)
    for _ in range(100):
        function(x)
    while not contest_of(function).free:
        function(x)
    kept["y"] = autofuse.wrap(torch.ones(8))
    for _ in range(LOOKS):  # then it is known whose they are
        assert type(function(x)) is torch.Tensor
    assert contest_of(function).way == FUSED and type(function(x)) is torch.Tensor


class Pair(NamedTuple):
    first: Any
    second: Any


def granted(function, *args, **kwargs):
    """Call it until its next calls are granted."""
    for _ in range(100):
        function(*args, **kwargs)
    while not contest_of(function).free:
        function(*args, **kwargs)


@pytest.mark.skipif(not native.active(), reason="machine code is off")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 runs functions' bodies itself")
@pytest.mark.parametrize(
    "give",
    [
        lambda x: x,
        lambda x: (x, 2.0),
        lambda x: [x],
        lambda x: 3,
        lambda x: Pair(x, (x, [x])),
        lambda x: [(x, 1), Pair(x, x)],
    ],
)
@pytest.mark.parametrize("take", [lambda x: x, lambda x: Pair(x, 1.0), lambda x: ((x, 2), x)])
def test_no_python_stands_before_what_was_granted(rigged, exact, give, take):
    function, x, frames = autofuse.fuse(give), take(torch.randn(8)), []
    granted(function, x)

    def entered(frame, event, arg):
        if event == "call":
            frames.append(frame.f_code)

    before, left = sys.getprofile(), contest_of(function).free
    sys.setprofile(entered)
    try:
        function(x)
    finally:
        sys.setprofile(before)
    ours = [code for code in frames if code.co_filename.startswith(OURS)]
    assert give.__code__ in frames and not ours and contest_of(function).free == left - 1


def test_arguments_results_and_errors_of_what_was_granted(rigged, exact, on):
    class Mine(torch.Tensor):
        pass

    def give(x, *more, error=None, **named):
        if error is not None:
            raise error
        return x, more, named

    function, x = autofuse.fuse(give), torch.randn(8)
    module, y = torch.nn.Identity(), autofuse.wrap(torch.ones(8))
    calls = [
        ((x,), {}), ((x, 1, None, 2.5, "s", x), {}), ((x,), {"named": x, "other": 3}),
        ((x, [x, x]), {}), ((x, (1, x)), {"named": {"k": [x]}}), ((x, module), {}),
        ((x, Pair(x, (x, y))), {}), ((x, Pair(x, [x])), {"named": (x, Pair(1, (x, (x, (x,)))))}),
        ((x, *range(12)), {}), ((x, object, slice(1)), {}), ((x, x.as_subclass(Mine)), {}),
        ((x, y), {}), ((x,), {"named": y}),
    ]  # fmt: skip
    for args, kwargs in calls:
        granted(function, x)
        for _ in range(2):
            got, want = function(*args, **kwargs), give(*args, **kwargs)
            assert [*map(id, tensors_in([got]))] == [*map(id, tensors_in([want]))]
            assert [*map(type, got[1])] == [*map(type, want[1])] and got[2].keys() == kwargs.keys()
    granted(function, x)
    for error in (ValueError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            function(x, error=error)
        assert raised.value is error
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        function()


def test_fused_calls_that_were_granted(rigged, exact, on):
    """They are as those that are looked at, whatever they take, give and raise."""

    def give(x, *more, error=None, **named):
        if error is not None:
            raise error
        return x * 2.0 + 1.0, x, more, named

    rigged.fused = 5.0
    function, x = autofuse.fuse(give), torch.randn(8)
    module, y = torch.nn.Identity(), autofuse.wrap(torch.ones(8))
    calls = [
        ((x,), {}), ((x, 1, None, 2.5, "s", x), {}), ((x,), {"named": x, "other": 3}),
        ((x, [x, x]), {}), ((x, (1, x)), {"named": {"k": [x]}}), ((x, module), {}),
        ((x, Pair(x, (x, 2))), {}), ((x, *range(12)), {}), ((x, torch.nn.Parameter(x)), {}),
        ((x, y), {}), ((x,), {"named": y}),
    ]  # fmt: skip
    for args, kwargs in calls:
        for _ in range(3):
            granted(function, x)
            contest = contest_of(function)
            free = contest.free
            got, want = function(*args, **kwargs), give(*args, **kwargs)
            assert contest.way == FUSED and contest.free == free - 1
            assert torch.equal(got[0], want[0]) and got[1] is x and type(x) is torch.Tensor
            assert [*map(id, tensors_in([got[1:]]))] == [*map(id, tensors_in([want[1:]]))]
            assert type(got[0]) is torch.Tensor and got[3].keys() == kwargs.keys()
            assert "_af" not in vars(x)
    for error in (ValueError("mine"), KeyboardInterrupt()):
        granted(function, x)
        with pytest.raises(type(error)) as raised:
            function(x, error=error)
        assert raised.value is error and type(x) is torch.Tensor
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        function()


def test_where_fused_calls_that_were_granted_are_part_of_others(rigged, exact, on):
    """Or of what is compiled, traced or not to be recorded."""
    rigged.fused = 5.0
    function, x = autofuse.fuse(chain), torch.randn(8)
    granted(function, x)
    outer = autofuse.fuse(lambda x: function(x) + function(x * 2.0))
    assert flushes_of(outer, x) == 1 and torch.allclose(outer(x), chain(x) + chain(x * 2.0))
    granted(function, x)
    with autofuse.disabled():
        assert flushes_of(function, x) == 0
    granted(function, x)
    traced = torch.jit.trace(lambda x: function(x) * 2.0, (x,), check_trace=False)
    assert torch.allclose(traced(x + 1.0), chain(x + 1.0) * 2.0)
    granted(function, x)
    assert flushes_of(function, x) == 1 and contest_of(function).free > 0


def test_what_interrupts_a_fused_call_that_was_granted_is_heard(rigged, exact, on):
    """Wherever it comes: the first function of Python that is called there runs signal handlers."""

    class Foreign(Exception):
        pass

    rigged.fused = 5.0
    function, x = autofuse.fuse(chain), torch.randn(8)
    for name in ("is_outermost", "is_compiling", "call_fused"):
        code, heard = getattr(fusing, name).__code__, []
        granted(function, x)

        def raises(frame, event, arg, code=code, heard=heard):
            if frame.f_code is code and event == "call" and not heard:
                heard.append(frame)
                raise Foreign

        before = sys.getprofile()
        sys.setprofile(raises)
        try:
            with pytest.raises(Foreign):
                function(x)
        finally:
            sys.setprofile(before)
        assert heard and type(x) is torch.Tensor and flushes_of(function, x) == 1


def test_what_was_granted_is_forgotten_while_the_call_begins(rigged, exact, on):
    """As a signal handler or another thread may: the call goes on as it was."""
    rigged.fused = 5.0
    function, x = autofuse.fuse(chain), torch.randn(8)
    granted(function, x)
    code, seen = fusing.is_outermost.__code__, []

    def forgets(frame, event, arg):
        if frame.f_code is code and event == "call":
            owners_of(function).clear()
            seen.append([fusing.Site() for _ in range(100)])  # where the other was

    before = sys.getprofile()
    sys.setprofile(forgets)
    try:
        got = function(x)
    finally:
        sys.setprofile(before)
    assert seen and type(got) is torch.Tensor and torch.allclose(got, chain(x))
    assert not owners_of(function) and flushes_of(function, x) == 1


def test_nothing_is_granted_any_more_where_the_way_changes(rigged, exact):
    function, x = autofuse.fuse(chain), torch.randn(8)
    granted(function, x)
    contest = contest_of(function)
    assert contest.way == PLAIN and contest.free > 0
    contest.keep_fused()
    assert contest.free == 0 and flushes_of(function, torch.randn(800)) == 1
    assert flushes_of(function, x) == 1


@pytest.mark.skipif(not native.active(), reason="machine code is off")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 runs functions' bodies itself")
def test_less_python_stands_before_fused_calls_that_were_granted(rigged, exact):
    rigged.fused = 5.0
    function, x, frames = autofuse.fuse(chain), torch.randn(8), []
    granted(function, x)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: frames.append((event, frame.f_code)))
    try:
        function(x)
    finally:
        sys.setprofile(before)
    called = [code for event, code in frames if event == "call"]
    assert fusing.call_fused.__code__ in called and chain.__code__ in called
    assert function.__code__ not in called and lending.become_plain.__code__ not in called


def test_what_was_granted_may_call_itself_and_be_forgotten(rigged, exact, on):
    def down(x, depth=0):
        return x if depth == 5 else made[0](x, depth + 1)

    made, x = [autofuse.fuse(down)], torch.randn(8)
    granted(made[0], x)
    assert made[0](x) is x
    gone = weakref.ref(made[0])
    assert made[0] in fusing.calls
    del made[0]
    gc.collect()
    assert gone() is None


def test_machine_code_stands_before_what_was_made_without_it(rigged, exact, monkeypatch):
    x = torch.randn(8)
    for native_first in (False, True):
        autofuse.config.native = native_first
        try:
            function = autofuse.fuse(chain)
            granted(function, x)
            autofuse.config.native = not native_first
            granted(function, x)
            assert flushes_of(function, x) == 0
            autofuse.config.measure = False
            assert flushes_of(function, x) == 1
            autofuse.config.measure = True
        finally:
            autofuse.config.native = True


def test_what_was_granted_locks_to_no_loop(rigged, exact):
    """A site that is called in turns with one whose way is known is looked at soon."""
    function, x, large = autofuse.fuse(chain), torch.randn(8), torch.randn(800)
    for _ in range(100):
        function(x)
    for turns in range(2, 9):
        sites = sites_of(function)
        for key in list(sites)[1:]:
            del sites[key]
        for k in range(turns * 2 * LOOKS):
            function(large if k % turns == 1 else x)
        assert len(sites) == 2, turns


def test_modules_of_one_class_are_places_of_their_own(rigged):
    class Gate(torch.nn.Module):
        def forward(self, x):
            return chain(x)

    first, second = autofuse.fuse(Gate()), autofuse.fuse(Gate())
    x = torch.randn(8)
    for _ in range(100):
        first(x)
    assert flushes_of(first, x) == 0 and flushes_of(second, x) == 1


def test_what_is_granted_is_a_modules_own(rigged, exact, on):
    """Whatever is known of others of its class: one that stays fused keeps no other from it."""

    class Gate(torch.nn.Module):
        def forward(self, x):
            return chain(x)

    x, forward = torch.randn(8), autofuse.fuse(Gate()).__class__.forward
    plain, fused = autofuse.fuse(Gate()), autofuse.fuse(Gate())
    for _ in range(100):
        plain(x)
    rigged.fused = 5.0
    for _ in range(100):
        fused(x)
    for _ in range(3 * LOOKS + 5):
        assert flushes_of(plain, x) == 0 and flushes_of(fused, x) == 1
    contest = contest_of(forward, plain)
    assert 0 < contest.free < LOOKS - 1 or contest.left % LOOKS == 0
    assert contest_of(forward, fused).way == FUSED
    with torch.no_grad():
        assert flushes_of(plain, x) == 1
    for _ in range(2):  # a place of its own, which keeps none of the others from it
        contest.free or plain(x)
    assert contest.free and len(owners_of(forward)) == 3
    del plain
    gc.collect()
    assert list(owners_of(forward)) == [id(fused) + 1]


def test_devices_are_places_of_their_own(rigged, monkeypatch):
    """A dry run on the CPU decides nothing, by the host's clock, for what runs on a GPU."""
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    assert flushes_of(function, x) == 0
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    assert flushes_of(function, x) == 1


def test_the_clock_is_of_the_device_that_works(monkeypatch):
    """Not of a CPU whose scalars come first, nor where results are on another device."""
    devices = []
    monkeypatch.setattr(
        policy, "clock_of", lambda d: devices.append(d.type) or contests.HostClock()
    )
    x, scalar = torch.randn(8), torch.tensor(2.0)
    autofuse.fuse(lambda x: chain(x).to("meta"))(x)
    autofuse.fuse(lambda scalar, x: x * scalar)(scalar, x.to("meta"))
    autofuse.fuse(lambda scalar, x: x * scalar)(scalar, x)
    assert devices == ["meta", "meta", "cpu"]


def test_a_training_step_is_what_counts(rigged):
    """All calls of a step take one way, and backward is part of what they cost."""
    function, p = autofuse.fuse(chain), torch.randn(8, requires_grad=True)
    ways = []
    for _ in range(60):
        h, step = p, set()
        for _ in range(5):
            h = function(h)
            step.add(contest_of(function).way)
        h.sum().backward()
        ways.append(step)
    assert all(len(step) == 1 for step in ways)
    assert {FUSED} in ways and {PLAIN} in ways
    assert contest_of(function).left > 0  # decided


def test_results_in_a_dataclass_are_results(rigged, monkeypatch):
    """They may have the graph of a training step, and be of what is wrapped elsewhere."""
    real, seen = autofuse.fused.contest_for, []
    monkeypatch.setattr(autofuse.fused, "contest_for", lambda *of: seen.append(of) or real(*of))
    state = autofuse.wrap(torch.randn(8))
    function, x = autofuse.fuse(lambda x: Result(chain(x) + state)), torch.randn(8)
    function(x.clone().requires_grad_())
    with torch.no_grad():
        for _ in range(100):
            assert type(function(x).value) is torch.Tensor
    assert seen == [(x.device, True), (x.device, False)]


def test_fused_calls_in_a_plain_one_are_plain(rigged):
    inner = autofuse.fuse(chain)
    outer = autofuse.fuse(lambda x: inner(x) + inner(x * 2))
    x = torch.randn(8)
    outer(x)
    counts = []
    while contest_of(outer) is None or not contest_of(outer).left:
        counts.append(flushes_of(outer, x))
    assert set(counts[:-1]) == {0, 1}
    assert flushes_of(outer, x) == 2  # from now on those inside are calls of their own


def test_an_error_of_the_function_is_no_measurement(rigged):
    def failing(x, fail):
        y = chain(x)
        if fail:
            raise ValueError("asked to")
        return y

    function, x = autofuse.fuse(failing), torch.randn(8)
    for k in range(200):
        if k % 3:
            function(x, False)
        else:
            with pytest.raises(ValueError, match="asked to"):
                function(x, True)
    assert flushes_of(function, x, False) == 0
    assert autofuse.chain.state.this_thread.depth == 0


def test_nothing_changes_while_a_graph_is_captured(rigged):
    function, x = autofuse.fuse(chain), torch.randn(8)
    contests.pause(1)
    try:
        assert [flushes_of(function, x) for _ in range(100)] == [1] * 100
    finally:
        contests.resume(1)
    for _ in range(100):
        function(x)
    assert flushes_of(function, x) == 0


def test_results_stay_plain_of_what_is_wrapped_elsewhere(rigged):
    """Not only until the plain call is found to cost less."""
    state = autofuse.wrap(torch.randn(8))
    function, x = autofuse.fuse(lambda x: [x * state + 1]), torch.randn(8)
    for _ in range(100):
        assert type(function(x)[0]) is torch.Tensor
    assert flushes_of(function, x) == 1 and contest_of(function).way == FUSED
    passing = autofuse.fuse(chain)
    for _ in range(100):
        assert type(passing(state)) is autofuse.Tensor
    assert contest_of(passing) is None or contest_of(passing).left < 1 << 40


@pytest.mark.parametrize(
    "make",
    [lambda h: h * 2, lambda h: (h * 2, 1), lambda h: [{"h": h * 2}], lambda h: Result(h * 2)],
)
def test_plain_calls_of_what_a_fused_one_has_stored(rigged, make):
    """Decided while there was nothing wrapped; another site's call has stored something since."""

    class Cell(torch.nn.Module):
        h = torch.zeros(8)

        def forward(self, x):
            self.h = self.h * 0.5 + x
            return make(self.h)

    cell, x = autofuse.fuse(Cell()), torch.randn(8)

    def classes():
        return {type(value) for value in tensors_in([cell(x)])}

    for _ in range(100):
        assert classes() == {torch.Tensor}
        cell.h = torch.zeros(8)
    assert flushes_of(cell, x) == 0
    with torch.no_grad():  # a site that is fused at first
        cell(x)
    assert type(cell.h) is autofuse.Tensor
    assert classes() == {torch.Tensor}
    assert flushes_of(cell, x) == 1  # fused from now on, which makes them plain
    assert classes() == {torch.Tensor}


def test_plain_calls_that_leave_wrapped_tensors_in_their_arguments(rigged):
    """Which they did not get there: the caller finds plain ones, and a plain result."""
    state = autofuse.wrap(torch.randn(8))

    def fill(x, values):
        values += [x * state, (x + state,)]
        return values[0] + 1

    function, x = autofuse.fuse(fill), torch.randn(8)
    for _ in range(100):
        values = []
        y = function(x, values)
        assert {type(value) for value in tensors_in([y, values])} == {torch.Tensor}


def test_a_thread_that_has_ended_lends_nothing(rigged):
    """What is wrapped is not its, but stored: the calls that meet it are fused from then on."""
    thread = threading.Thread(target=autofuse.fuse(chain), args=(torch.randn(8),))
    thread.start()
    thread.join()
    test_results_stay_plain_of_what_is_wrapped_elsewhere(rigged)


@pytest.mark.parametrize(
    "target", [functools.partial(chain), type("C", (), {"__call__": lambda self, x: chain(x)})()]
)
def test_explain_knows_callables_without_a_name(rigged, target):
    function, x = autofuse.fuse(target), torch.randn(8)
    for _ in range(100):
        function(x)
    with autofuse.explain() as report:
        function(x)
    assert "1 fused call ran as plain PyTorch" in report.advice[0]


def test_a_module_in_the_place_of_another_is_a_new_one(rigged):
    """Python gives the id of a module that is gone to the next."""
    function = autofuse.fuse(lambda module, x: module(x))
    module, x = torch.nn.Identity(), torch.randn(8)
    function(module, x)
    function(torch.nn.Identity(), x)
    assert [*owners_of(function)] == [id(module) + 1]
    del module
    assert not owners_of(function)


class Graph:
    """A CUDAGraph whose captures fail as told."""

    fails = ""

    def capture_begin(self, pool=None):
        assert contests.is_paused()
        if self.fails == "begin":
            raise RuntimeError("asked to")

    def capture_end(self):
        self.capture_end_pre()

    def capture_end_pre(self):
        assert contests.is_paused()
        if self.fails == "end":
            raise RuntimeError("asked to")


def test_captures_pause_contests_until_all_have_ended_or_failed():
    class Patched(Graph):
        capture_begin, capture_end = Graph.capture_begin, Graph.capture_end
        capture_end_pre = Graph.capture_end_pre

    streams._pause_contests(Patched)
    one, other = Patched(), Patched()
    one.capture_begin()
    other.capture_begin(pool=1)
    other.capture_end()
    assert contests.is_paused()
    one.fails = "end"
    with pytest.raises(RuntimeError, match="asked to"):
        one.capture_end()
    assert not contests.is_paused()
    other.capture_begin()
    other.capture_end_pre()
    assert not contests.is_paused()
    one.fails = "begin"
    with pytest.raises(RuntimeError, match="asked to"):
        one.capture_begin()
    assert not contests.is_paused()


def test_what_is_captured_before_it_is_decided_is_fused(rigged):
    """A graph goes on with what it has captured, whatever was being measured."""
    function, x = autofuse.fuse(chain), torch.randn(8)
    function(x)
    while contest_of(function).way == FUSED:
        function(x)
    contests.pause(1)
    try:
        assert flushes_of(function, x) == 1
    finally:
        contests.resume(1)
    for _ in range(100):
        function(x)
    assert contest_of(function).costs == (20.0, 10.0)


def test_a_plain_call_of_what_another_thread_lends_gives_plain_results(rigged):
    """While a fused call runs elsewhere its arguments are wrapped for everybody."""
    inside, go = threading.Event(), threading.Event()
    x = torch.randn(8)
    function = autofuse.fuse(chain)
    for _ in range(100):
        function(x)
    assert flushes_of(function, x) == 0

    @autofuse.fuse
    def slow(x):
        inside.set()
        assert go.wait(10)
        return x * 2

    thread = threading.Thread(target=slow, args=(x,))
    thread.start()
    assert inside.wait(10)
    y = function(x)
    assert type(y) is torch.Tensor and torch.allclose(y, chain(x.clone()))
    measured = autofuse.fuse(lambda items: chain(items[0]))
    for _ in range(60):  # fused all the time: there is nothing to compare
        measured([x])
    others, z = autofuse.fuse(chain), torch.randn(8)
    for _ in range(60 + COLD):  # nobody lends its argument
        others(z)
    assert contest_of(others).costs == (20.0, 10.0)
    assert flushes_of(others, z) == flushes_of(function, z) == 0
    go.set()
    thread.join()
    assert contest_of(measured).costs is None
    for _ in range(60):
        measured([x])
    assert contest_of(measured).costs == (20.0, 10.0)


def test_explain_says_with_which_figures(rigged):
    function, x = autofuse.fuse(chain), torch.randn(8)
    for _ in range(100):
        function(x)
    with autofuse.explain() as report:
        function(x)
        function(x)
    (advice,) = report.advice
    assert advice.startswith("2 fused calls ran as plain PyTorch")
    assert "gains too little: 10 us plain, 20 fused (chain)" in advice
    assert "config.measure = False fuses every call" in advice
    assert "0 ops seen" in str(report) and not report.ops_seen
    assert autofuse.explain(function, x).ops_seen.total() == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_stream_nothing_waits(monkeypatch):
    """A contest of real time decides, without one synchronisation."""
    monkeypatch.setattr(autofuse.config, "measure", True)
    function, x = autofuse.fuse(chain), torch.randn(1 << 22, device="cuda")
    expected = chain(x)
    for _ in range(3):
        function(x)
    autofuse.wait()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not see all that waits
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(300):
            y = function(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)
    contest = contest_of(function)
    assert contest.costs is not None and contest.way == FUSED  # 4 ops on 16 MB


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_capture_in_the_middle_of_a_contest(monkeypatch):
    monkeypatch.setattr(autofuse.config, "measure", True)
    function, x = autofuse.fuse(chain), torch.randn(64, device="cuda")
    for calls in range(1, 40):
        function(x)
        if calls % 5 == 0:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = function(x)
            graph.replay()
            assert torch.equal(y, chain(x))
