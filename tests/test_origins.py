"""Origins: results of ops that are not recorded stay plain where wrapping them only loses."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

import autofuse
from autofuse.chain.state import counts
from autofuse.record import contest, origins, policy
from support import functions_called


@pytest.fixture(autouse=True)
def measured(on, monkeypatch):
    """Results may stay plain, ops and kernels cost what they do on a GPU, and nothing is new."""
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 10.0)
    monkeypatch.setitem(policy._OP_US, "cpu", 6.0)
    monkeypatch.setitem(policy._PLAIN_US, "cpu", 6.0)
    monkeypatch.setitem(policy.PASSED_US, "cpu", 1.5)
    autofuse.config.measure = True
    autofuse.materialize(autofuse.wrap(torch.ones(3)) + 1.0)  # a thread that records
    origins.forget()
    with torch.no_grad():
        yield
    autofuse.config.measure = False


@pytest.fixture
def again(monkeypatch):
    """There are trials again, as on a GPU, and soon."""
    monkeypatch.setattr(origins, "is_inexact", lambda *args: False)
    monkeypatch.setattr(origins, "GROWTH", 2)


def is_wrapped(x):
    return type(x) is autofuse.Tensor


def passed_on(x):
    h = torch.mm(x, x).t()[:, 1:]
    return torch.cat([h, h[:, :1]], 1).contiguous().view(-1).view(x.shape)


def fed(x, ops=6):
    h = torch.mm(x, x).t()
    for _ in range(ops):
        h = h * 0.5
    return h


def run(function, *args, times=200):
    for _ in range(times):
        result = function(*args)
    return result


def test_results_stay_plain_where_only_eager_ops_meet_them():
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)
    assert is_wrapped(passed_on(y))
    result = run(passed_on, y)
    assert not is_wrapped(result) and torch.equal(result, passed_on(x))
    assert is_wrapped(y)
    before = autofuse.stats().eager_ops["t", "not in the table"]
    run(passed_on, y)
    assert autofuse.stats().eager_ops["t", "not in the table"] == before


def test_results_that_are_never_used_stay_plain():
    y = autofuse.wrap(torch.randn(6, 6))
    assert not is_wrapped(run(lambda: y[1]))
    assert not any(map(is_wrapped, run(lambda: y.chunk(2))))
    assert not is_wrapped(run(lambda: y.max(1), times=400).values)


def test_results_are_wrapped_where_chains_pay():
    """Also those that lead there by another eager op."""
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)
    for _ in range(300):
        result = fed(y)
        assert autofuse.is_pending(result)
    assert torch.equal(result, fed(x))
    assert origins.origins and not any(origin.plain for origin in origins.origins.values())


def test_what_is_read_in_a_loop_is_worth_what_all_its_turns_gain():
    """Where its readers were tried before it, too: each time it is read it costs, and gains."""
    y, w = autofuse.wrap(torch.randn(6, 6)), torch.randn(6, 6)
    h = []

    def program():
        h[:] = [torch.mm(y, w)]
        out = y
        for k in range(40):
            out = out * 0.5 + h[0][k % 6]
        return out

    for _ in range(60):
        result = program()
        assert autofuse.is_pending(result)
        autofuse.materialize(result)
    assert is_wrapped(h[0])
    nets = [origin.net for origin in origins.origins.values()]
    assert len(nets) >= 2 and min(nets) > 0, nets


def test_a_chain_that_gains_less_than_it_costs_to_lead_there():
    y = autofuse.wrap(torch.randn(6, 6))

    def program():
        h = y.t()
        for _ in range(20):
            h = h.t()
        return fed(h, 2)  # 6 * 2 us for 10 and some

    assert not is_wrapped(run(program))


def test_others_find_an_origin_that_has_begun(monkeypatch):
    """Another thread, or a handler, asks whether the trial is over in the middle of that."""
    begin, asked = origins.Origin.begin, []

    def interrupted(origin, device):
        asked.append(origins.trials.is_over())
        begin(origin, device)

    monkeypatch.setattr(origins.Origin, "begin", interrupted)
    run(passed_on, autofuse.wrap(torch.randn(6, 6)))
    assert asked


def test_what_is_read_beside_wrapped_tensors_alone_is_wrapped():
    """Such an op passes on what it is given whatever becomes of this one."""
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)
    seen = []

    def program(a):
        h = a.t()
        seen.append(h)
        return torch.mm(h, a).sum()

    result = run(program, y)
    assert is_wrapped(seen[-1]) and not is_wrapped(result) and torch.equal(result, program(x))
    run(lambda: seen.append(y.t()) or torch.mm(seen[-1], x).sum())
    assert not is_wrapped(seen[-1])


@pytest.mark.parametrize("lead", range(19, 31, 3))
def test_it_does_not_matter_where_a_trial_begins(lead):
    """In the middle of blocks, say, each of which begins with what the one before has made."""
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    y = autofuse.wrap(x)

    def block(x):
        x = torch.mm(torch.mm(x, w).t(), w).t()
        return torch.mm(fed(torch.mm(x, w).t()), w)

    def program(x):
        for _ in range(4):
            x = block(x)
        return x

    run(lambda: y[0], times=lead)
    run(program, y, times=40)
    autofuse.reset_stats()
    result = program(y)
    stats = autofuse.stats()
    assert stats.ops_recorded == 24 and stats.kernels_launched == 4
    assert torch.allclose(autofuse.unwrap(result), program(x))


@pytest.mark.parametrize("order", [*itertools.permutations(range(5))])
def test_results_lead_on_in_whichever_order_they_come(order):
    """Each is read by the op that makes the next, and the last by a chain; or not."""
    for pays in (True, False):
        trials = origins.Trials()
        parts = {key: trials.enter(key, 0, torch.device("cpu")) for key in order}
        for key, part in parts.items():
            part.made = part.whole.made = origins.ENOUGH
            part.gain = 10.0 * pays if key == 4 else -1.5
            part.after = {parts[key + 1]: 1.0} if key < 4 else {}
        trials.end()
        assert [origins.origins[key].plain for key in range(5)] == [not pays] * 4 + [False]
        origins.forget()


def test_joins_of_results_on_trial_are_recorded():
    """Or else a trial would not see what chains gain that go through them."""
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    y = autofuse.wrap(x)

    def program(x):
        a, b = torch.mm(x, w).chunk(2, 1)
        return (torch.cat((-b, a * 2.0), 1) * w + torch.cat((a, -b), 1)).sin()

    for _ in range(60):
        autofuse.reset_stats()
        result = program(y)
        assert autofuse.is_pending(result)
        autofuse.materialize(result)
        assert ("cat", "not in the table") not in autofuse.stats().eager_ops
    assert counts.trials and torch.allclose(autofuse.unwrap(result), program(x))


def test_what_joins_alone_read_has_its_part_in_what_chains_gain():
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    y = autofuse.wrap(x)
    made = []

    def program():
        made[:] = [torch.mm(y, w)]
        return ((torch.cat((y * 2.0, made[0]), 1) * 0.5 + 1.0).sin() * 3.0).cos()

    for _ in range(90):
        autofuse.materialize(program())
    assert origins.origins and is_wrapped(made[0])
    assert all(origin.net > 0 for origin in origins.origins.values())


def test_branches_that_lose_hide_none_that_pays():
    y = autofuse.wrap(torch.randn(6, 6))

    def program():
        h = y.t()
        return h.t().t().t().t().t(), fed(h)

    lost, paid = run(program, times=400)
    assert not is_wrapped(lost) and is_wrapped(paid)


def test_ops_that_are_better_off_eager_pass_on_as_well():
    """One that chains begin with, too short to pay."""
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)
    result = run(lambda: (y * 2.0).sum(0).view(2, 3), times=90)
    assert not is_wrapped(result) and torch.equal(result, (x * 2.0).sum(0).view(2, 3))


def test_results_that_live_on_are_waited_for():
    """What is made first and used later."""
    y = autofuse.wrap(torch.randn(6, 6))
    for _ in range(4):
        rows = [y[k % 6] for k in range(100)]
        assert all(map(is_wrapped, rows))
        total = 0.0
        for row in rows:
            total = total + row * 0.5
        autofuse.materialize(total)
        del row
        rows = None
    assert all(not origin.plain for origin in origins.origins.values())


def test_a_program_changes_its_mind(again):
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)

    def program(fuses):
        h = y.t()
        h = h.view(-1) if h.is_contiguous() else h.reshape(-1)
        return (((h * 0.5 + 1.0) * 2.0 - 1.0) * h + h) if fuses else h.sum(0)

    wants = [program(fuses) for fuses in (False, True)]
    before = origins.trials.count
    for fuses in (False, True, False):
        ways = []
        for _ in range(3000):
            result = program(fuses)
            ways.append(is_wrapped(result))
            assert torch.allclose(autofuse.unwrap(result), autofuse.unwrap(wants[fuses]))
        assert sum(ways[-400:]) > 300 if fuses else sum(ways[-400:]) < 100
    assert origins.trials.count > before + 5 and origins.trials.pause > 2 * origins.PAUSE


def test_where_bits_may_differ_it_is_decided_once():
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    run(program)
    (origin,) = origins.origins.values()
    assert origin.plain and origin.once
    before = counts.trials
    run(program, times=5000)
    assert counts.trials == before and origins.trials.left > 0


def test_settings_wrap_every_result():
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    for name, value in (("measure", False), ("always_fuse", True), ("check", True)):
        assert not is_wrapped(run(program))
        before = getattr(autofuse.config, name)
        setattr(autofuse.config, name, value)
        try:
            assert is_wrapped(run(program))
        finally:
            setattr(autofuse.config, name, before)


def test_nothing_is_on_trial_while_a_graph_is_captured_or_kernels_are_compiled(monkeypatch):
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    decided = lambda: y.t()  # noqa: E731
    run(decided)
    contest.pause(1)
    try:
        assert is_wrapped(run(program)) and not is_wrapped(run(decided))
    finally:
        contest.resume(1)
    with monkeypatch.context() as patch:
        patch.setattr(origins.compiling, "outstanding", lambda: 1)
        assert is_wrapped(run(program))
    with monkeypatch.context() as patch:
        patch.setattr(origins.compiling, "capturing", lambda device: True)
        assert is_wrapped(run(program))
    with autofuse.disabled():
        assert is_wrapped(run(program)) and is_wrapped(run(decided))
    assert not is_wrapped(run(program))


def test_fused_calls_are_compared_once_nothing_is_on_trial():
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    before = policy.kernel_news()
    run(program, times=origins.FIRST + 1)
    assert not policy.is_settled(before)
    run(program)
    before = policy.kernel_news()
    program()
    assert policy.is_settled(before)


def test_what_is_written_by_out_stays_wrapped():
    """Of such a write to a plain tensor nobody knows that a pending op has yet to read it."""
    y, a = autofuse.wrap(torch.zeros(4, 4)), torch.ones(4)

    def program(k):
        pending = y * 1.0 + 0.0
        torch.mul(a, float(k), out=y[1].view(4))
        return pending

    for k in range(200):
        assert program(k).tolist()[1] == [max(k - 1.0, 0.0)] * 4
    assert all(not origin.plain for origin in origins.origins.values())


def test_writes_by_out_among_plain_tensors_are_seen_by_machine_code(on):
    """Else the program is told of it, and never given another value."""
    y, a = autofuse.wrap(torch.zeros(4, 4)), torch.ones(4)
    row = lambda: y[1]  # noqa: E731
    assert not is_wrapped(run(row))
    for k, write in enumerate(
        (
            lambda out: torch.mul(a, 3.0, out=out),
            lambda out: torch.mv(torch.eye(4), a, out=out),
            lambda out: torch.max(torch.eye(4), 1, out=(out, torch.empty(4, dtype=torch.long))),
        )
    ):
        before, pending = autofuse.unwrap(y).clone(), y * 1.0 + 0.0
        out = row()
        write(out)
        assert torch.equal(autofuse.unwrap(y)[1], out) and not is_wrapped(out)
        if on:
            assert autofuse.is_pending(pending) is False, k
            assert pending.tolist() == before.tolist()
        else:
            with pytest.raises(autofuse.StaleInputError):
                autofuse.materialize(pending)


def test_statistics_that_are_written_keep_nothing_wrapped():
    y = autofuse.wrap(torch.randn(4, 3))
    norm = torch.nn.BatchNorm1d(3).eval()
    assert not is_wrapped(run(lambda: norm(y.view(4, 3)).view(-1)))


def test_writes_to_results_that_stay_plain_are_seen(on):
    y = autofuse.wrap(torch.zeros(4, 4))
    row = lambda: y[1]  # noqa: E731
    assert not is_wrapped(run(row))
    for k, write in enumerate(
        (
            lambda r: r.add_(1),
            lambda r: r.__setitem__(0, 9.0),
            lambda r: torch.relu_(r.neg_()),
            lambda r: r.copy_(y[0]),
        )
    ):
        before, pending = autofuse.unwrap(y).clone(), y * 1.0 + 0.0
        write(row())
        assert autofuse.is_pending(pending) is False, k
        assert pending.tolist() == before.tolist()


def test_gradients_are_eagers():
    def program(p):
        h = torch.mm(p, p)[:, 1:]
        return (h.t() @ h).sum() + (torch.sigmoid(p) * p).sum()

    with torch.enable_grad():
        p = torch.randn(5, 5, requires_grad=True)
        program(p).backward()
        want, p.grad = p.grad, None
        wrapped = autofuse.wrap(p.detach().clone().requires_grad_())
        for _ in range(150):
            wrapped.grad = None
            loss = program(wrapped)
            loss.backward()
            torch.testing.assert_close(autofuse.unwrap(wrapped.grad), want)
    assert any(origin.plain for origin in origins.origins.values())


def test_second_derivatives_are_eagers():
    def program(x):
        h = x.t()
        for _ in range(3):
            h = h.t()
        (g,) = torch.autograd.grad((h * h * h).sum(), x, create_graph=True)
        (g.t().t() * x).sum().backward()

    x = torch.randn(5, 5, requires_grad=True)
    y = autofuse.wrap(x.detach().clone().requires_grad_())
    with torch.enable_grad():
        program(x)
        for _ in range(100):
            y.grad = None
            program(y)
            torch.testing.assert_close(autofuse.unwrap(y.grad), x.grad)
    assert any(origin.plain for origin in origins.origins.values())


@torch._dynamo.config.patch(error_on_recompile=True)
def test_nothing_but_the_class_is_seen():
    """Copies and pickles are plain anyway, and so is what torch.compile gets."""
    y = autofuse.wrap(torch.randn(6, 6))
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    program = lambda: y.t()  # noqa: E731
    for wrapped in (True, False):
        result = program()
        assert isinstance(result, autofuse.Tensor) is wrapped is autofuse.is_pending(result * 2 + 1)
        assert isinstance(result, torch.Tensor) and result.shape == (6, 6)
        for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
            assert type(other) is torch.Tensor and torch.equal(other, autofuse.unwrap(y).t())
        assert type(compiled(result)) is type(autofuse.unwrap(result)) is torch.Tensor
        assert autofuse.unwrap(result).data_ptr() == y.data_ptr()
        run(program)


def test_who_looks_on_changes_no_place():
    """Machine code leaves everything to Python then, which finds the same instructions."""
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: (y.t(), torch.mm(y, y), F.layer_norm(y, (6,)), (y * 2.0).sum(0))  # noqa: E731
    assert not any(map(is_wrapped, run(program, times=90)))
    known = set(origins.origins)
    with autofuse.explain():
        assert not any(map(is_wrapped, program()))
    assert set(origins.origins) == known and len(known) == 5


def test_places_hold_nothing_and_are_bounded(monkeypatch):
    monkeypatch.setattr(origins, "_MOST", 20)
    codes, tensors = [], []
    x = autofuse.wrap(torch.randn(6, 6))
    h = x
    for k in range(100):
        space = {}
        exec(f"def program(x): return x.t()  # {k}", space)
        codes.append(weakref.ref(space["program"].__code__))
        h = space["program"](h)
        tensors.append(weakref.ref(h))
        del space
    del h
    gc.collect()
    assert len(origins.origins) <= 20
    assert not any(ref() for ref in (*codes, *tensors))
    assert sum(type(x) is origins.Origin for x in gc.get_objects()) <= 41


def test_explain_says_so():
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    run(program)
    with autofuse.explain() as report:
        run(program, times=3)
    (advice,) = [text for text in report.advice if "stayed plain" in text]
    assert advice.startswith("3 results of eager ops stayed plain tensors (3 x t)")
    assert "config.measure = False wraps them all" in advice
    assert report.ops_seen["t"] == 3


def test_the_program_is_found_behind_handlers(on):
    """Machine code meets functions of autofuse's between, and must not take them for origins."""
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.max(1)  # noqa: E731
    assert not is_wrapped(run(program).values)
    (origin,) = origins.origins.values()
    origin.once, origins.trials.left, origins.trials.new = False, 1000, 500
    run(program)
    assert origins.trials.left == 800 and origins.trials.new == 500


def test_trials_become_rare(again, monkeypatch):
    monkeypatch.setattr(origins, "GROWTH", 4)
    y = autofuse.wrap(torch.randn(6, 6))
    ends = []
    for k in range(12000):
        before = origins.trials.count
        y.t()
        if origins.trials.count > before:
            ends.append(k)
    pauses = [later - end - 8 for end, later in zip(ends, ends[1:], strict=False)]
    assert ends[0] < 48 and pauses == pytest.approx([128, 512, 2048, 8192], abs=1)


@pytest.mark.parametrize("often", [1, 60])
def test_new_instructions_are_judged_soon_and_alone(often, again, on):
    """After any number of trials; the others, of which there may be many more, are not tried."""
    x = torch.randn(6, 6)
    y = autofuse.wrap(x)
    known = lambda: y.t()  # noqa: E731
    run(known, times=3000)
    for name in ("a", "b", "c"):
        origins.trials.left = 1 << 20
        space = {}
        exec(f"def new(y): return y[1]  # {name}", space)
        results = []
        for _ in range(origins.FIRST + 3 * origins.ENOUGH):
            assert not is_wrapped(run(known, times=often))
            result = space["new"](y)
            results.append(is_wrapped(result))
            assert torch.equal(result, x[1])
        assert results[0] and not results[-1]


def test_what_is_never_made_again_is_seldom_on_trial(again):
    y = autofuse.wrap(torch.randn(6, 6))
    assert not is_wrapped(run(lambda: y.t(), times=50))
    tried, held = counts.trials, []
    for k in range(3000):
        space = {}
        exec(f"def once(y): return y[1]  # {k}", space)
        held.append((space["once"], space["once"](y)))
    assert counts.trials - tried < 1200


class Layer(torch.nn.Module):
    """Of which a program uses several, by one instruction."""

    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, features))

    def forward(self, x):
        return torch.mm(x.view(-1, 6), self.weight).view(-1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lost, self.paid, self.last = Layer(6), Layer(6), Layer(3)

    def forward(self, x, seen):
        seen.append(self.lost(x))
        h = self.paid(x)
        for _ in range(6):
            h = h * 0.5
        seen.append(h)
        return self.last(h).sum()


def test_callers_of_a_function_have_verdicts_of_their_own(on):
    x, seen, model = torch.randn(6, 6), [], Model()
    y = autofuse.wrap(x)
    with torch.no_grad():
        for _ in range(200):
            seen.clear()
            result = model(y, seen)
        lost, paid = seen
        assert not is_wrapped(lost) and is_wrapped(paid) and not is_wrapped(result)
        before = autofuse.stats().eager_ops["mm", "not in the table"]
        model(y, seen)
        assert autofuse.stats().eager_ops["mm", "not in the table"] - before == 2  # what `lost` has
        # is plain from its view on
        assert torch.equal(result, model(x, []))
    split = [origin for origin in origins.origins.values() if origin.parts is not None]
    assert split and all(len({p.plain for p in origin.parts.values()}) == 2 for origin in split)


def test_who_calls_elsewhere_finds_results_wrapped(on):
    """Where callers differ, and this one is new."""
    y, layer = autofuse.wrap(torch.randn(6, 6)), Layer(6)
    lost = lambda: layer(y)  # noqa: E731
    paid = lambda: fed(layer(y).view(6, 6))  # noqa: E731
    with torch.no_grad():
        run(lambda: (lost(), paid()))
        assert not is_wrapped(lost()) and autofuse.is_pending(paid())
        assert is_wrapped(layer(y))


def test_machine_code_finds_the_part_of_a_caller(on):
    """Python is asked about a caller that is new, and about no other."""
    if not on:
        pytest.skip("by Python alone it is Python that finds them")
    y, layer = autofuse.wrap(torch.randn(6, 6)), Layer(6)
    lost = lambda: layer(y)  # noqa: E731
    paid = lambda: fed(layer(y).view(6, 6))  # noqa: E731
    run(lambda: (lost(), autofuse.materialize(paid())))
    assert any(origin.parts for origin in origins.origins.values())
    for program in (lost, paid):
        assert functions_called(program) == []
    assert "ask" in functions_called(lambda: layer(y))


def test_callers_are_told_apart_up_to_a_number(monkeypatch, on):
    monkeypatch.setattr(origins, "_CALLERS", 4)
    y, layer, calls = autofuse.wrap(torch.randn(6, 6)), Layer(6), []
    for k in range(50):
        space = {}
        exec(f"def call(f, y): return f(y)  # {k}", space)
        calls.append(space["call"])
    with torch.no_grad():
        for _ in range(20):
            results = [call(layer, y) for call in calls]
            autofuse.materialize(fed(results[3].view(6, 6)))
    assert max(len(origin.parts or ()) for origin in origins.origins.values()) == 5


def test_a_caller_has_one_part_of_a_trial(monkeypatch):
    monkeypatch.setattr(origins, "_CALLERS", 2)
    origin = origins.Origin()
    origin.begin(torch.device("cpu"))
    first, second, other = [origin.part(caller) for caller in (10, 20, 30)]
    assert [origin.part(caller) for caller in (10, 20, 30, 40)] == [first, second, other, other]
    assert len({first, second, other}) == 3


def test_a_caller_is_found_while_a_write_makes_callers_one():
    """By `out`, in another thread or a finalizer: nobody is told apart any more."""

    class Parts(dict):
        def get(self, caller):
            origin.parts = None  # as `keep`
            return super().get(caller)

    origin = origins.Origin()
    for parts in (Parts(), Parts({7: origins.Origin()}), None):
        origin.parts = parts
        assert not origin.of(7).plain


@pytest.mark.parametrize("others_pay", [False, True])
def test_callers_beyond_that_number_share_a_verdict(others_pay, monkeypatch, on):
    """New ones too; each of those that are told apart keeps its own, whenever it calls."""
    monkeypatch.setattr(origins, "_CALLERS", 4)
    monkeypatch.setattr(origins, "ENOUGH", 100)  # the trial lasts for some rounds
    monkeypatch.setattr(origins.trials, "new", 0)  # and begins here
    y, layer, calls = autofuse.wrap(torch.randn(6, 6)), Layer(6), []
    for k in range(40):
        space = {}
        exec(f"def call(f, y): return f(y)  # {k}", space)
        calls.append(space["call"])
    with torch.no_grad():
        for _ in range(20):
            for k, call in enumerate(calls[:-1]):
                if (k < 4) is not others_pay:
                    autofuse.materialize(fed(call(layer, y).view(6, 6)))
                else:
                    call(layer, y)
        assert [is_wrapped(call(layer, y)) for call in calls] == [
            (k < 4) is not others_pay for k in range(40)
        ]


def new_frame_of_torch(function):
    """`function`, called by code of torch's that nobody has seen."""
    space = {"__name__": "torch.new", "function": function}
    exec("def call(*args): return function(*args)", space)
    return space["call"]


def test_new_frames_of_torch_change_no_callers_verdict(on):
    """As those of a hook that is registered later; machine code learns them too."""
    y, layer = autofuse.wrap(torch.randn(6, 6)), Layer(6)
    lost = lambda call: call(y)  # noqa: E731
    paid = lambda: fed(layer(y).view(6, 6))  # noqa: E731
    with torch.no_grad():
        run(lambda: (lost(layer), paid()))
        assert not is_wrapped(lost(layer)) and autofuse.is_pending(paid())
        layer.register_forward_hook(lambda module, args, result: None)
        assert not is_wrapped(lost(layer)) and autofuse.is_pending(paid())
        layer.forward = new_frame_of_torch(layer.forward)
        assert not is_wrapped(lost(layer)) and autofuse.is_pending(paid())


@pytest.mark.parametrize("first", [False, True])
def test_what_is_written_by_out_keeps_all_callers_wrapped(first, on):
    y, a = autofuse.wrap(torch.zeros(4, 4)), torch.ones(4)

    def row(k):
        return y[k]

    def program(k):
        if first:
            row(0)
        pending = y * 1.0 + 0.0
        torch.mul(a, float(k), out=row(1))
        if not first:
            row(2)
        return pending

    for k in range(200):
        assert program(k).tolist()[1] == [max(k - 1.0, 0.0)] * 4
    assert all(not x.plain and x.parts is None for x in origins.origins.values())


def test_one_trial_judges_all_depths_of_a_program():
    y = autofuse.wrap(torch.randn(6, 6))

    def program():
        h = y.t()
        for name in ("t", "contiguous", "t", "neg_", "t", "clone"):
            h = getattr(h, name)()
        return h.t().t().t().t().t().t().t().t().t()

    before = origins.trials.count
    assert not is_wrapped(run(program, times=14))
    assert origins.trials.count == before + 1


def test_a_step_of_many_results_leaves_nobody_unjudged():
    """An inner loop has had enough long before what stands outside it."""
    y = autofuse.wrap(torch.randn(6, 6))

    def program():
        for _ in range(100):
            y[1].view(2, 3).t()
        return y.t().contiguous()

    assert not is_wrapped(run(program, times=100))
    assert len(origins.origins) == 5


def test_what_was_on_trial_is_as_any_other_afterwards():
    y = autofuse.wrap(torch.randn(6, 6))
    program = lambda: y.t()  # noqa: E731
    run(program, times=origins.FIRST + 1)
    uses = (
        lambda h: h.view(-1) if h.is_contiguous() else h.t(),
        lambda h: torch.cat([h, h]),
        lambda h: F.layer_norm(h, (6,)),
        lambda h: (h * 2.0 + 1.0).tolist(),
    )
    held = [program() for _ in uses]
    assert all(type(h._af) is origins.Tried for h in held)
    run(program)
    assert not is_wrapped(program())
    for h, use in zip(held, uses, strict=True):
        use(h)
        assert type(h._af) is not origins.Tried


_sizes = itertools.count(6000, -1)


class Stage(torch.nn.Module):
    """Layers of a class with four products, each of which begins a chain that pays."""

    def __init__(self, layers, rows):
        super().__init__()
        self.layers, self.rows = layers, rows

    def forward(self, x):
        x, w = x[: self.rows], torch.full((3, 3), 0.1)
        for _ in range(self.layers):
            h = torch.mm(x, w).sin() * 0.5 + 0.25
            h = torch.mm(h, w).sin() * 0.5 + 0.25
            h = torch.mm(h, w).sin() * 0.5 + 0.25
            x = torch.mm(h, w).sin() * 0.5 + 0.25
        return x


class Net(torch.nn.Module):
    def __init__(self, layers, rows):
        super().__init__()
        self.first, self.second, self.third = map(Stage, layers, rows)

    def forward(self, x):
        x = self.first(x)
        x = self.second(x)
        return self.third(x)


@pytest.mark.parametrize(
    "known, layers", [(0, (3, 4, 6)), (100, (4, 4, 1)), (300, (1, 1, 1)), (300, (3, 4, 6))], ids=str
)
def test_trials_wait_for_sizes_that_come_often(known, layers, again, on):
    """Where many sizes are known a chain of new ones is not recorded at once; what reads results
    is no chain meanwhile, which says nothing of what will read them."""
    rows = [next(_sizes) for _ in range(3)]  # of which nothing is known
    x, net = torch.full((rows[0], 3), 0.1), Net(layers, rows)
    run(lambda: passed_on(autofuse.wrap(torch.ones(6, 6))), times=100)
    origins.trials.left = 1 << 20  # trials of all are rare by now
    for _ in range(known):
        y = autofuse.wrap(torch.full((next(_sizes), 3), 0.1))
        run(lambda y=y: autofuse.materialize(y.sin() * 0.5 + 0.25), times=17)
    run(lambda: autofuse.materialize(net(autofuse.wrap(x))), times=100)
    autofuse.reset_stats()
    autofuse.materialize(net(autofuse.wrap(x)))
    assert autofuse.stats().eager_ops["mm", "not in the table"] == 4 * sum(layers)


def test_a_caller_whose_only_result_is_not_read_yet_is_not_judged():
    origin = origins.Origin()
    origin.begin(torch.device("cpu"))
    others, last = origin.part(10), origin.part(20)
    states = [origins.Tried(others) for _ in range(origins.ENOUGH)], origins.Tried(last)
    others.made, last.made, origin.made = origins.ENOUGH, 1, origins.ENOUGH + 1
    others.net, last.net = -3.0, -0.1
    origin.judge()
    assert others.plain and not last.plain and not origin.plain
    del states
    origin.judge()
    assert last.plain and origin.plain


def test_what_was_put_off_is_forgotten_and_bounded(monkeypatch):
    trials, origin = origins.trials, origins.Origin()
    origin.begin(torch.device("cpu"))
    origin.part(10).early = True
    assert [trials._puts_off(7, origin) for _ in range(40)] == [k < 32 for k in range(40)]
    monkeypatch.setattr(origins, "_MOST", 8)
    for key in range(100):
        trials._puts_off(key, origin)
        assert len(trials.put_off) <= 8
    origins.forget()
    assert not trials.put_off
