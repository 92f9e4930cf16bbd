"""explain, Report and show: what they say, by content, and that nobody pays for them otherwise."""

import inspect
import io
import linecache
import threading
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse import hooks
from autofuse.chain.refusal import watchers
from autofuse.observe import events as observe
from autofuse.observe import explain as explaining
from autofuse.observe import holders, reads
from autofuse.record import policy
from autofuse.record.modes import forget_all
from autofuse.supply import kernels as compiling
from support import write_unseen

HERE = Path(__file__).name


def line_of(text: str, function) -> int:
    """The line of `function` that contains `text`."""
    lines, start = inspect.getsourcelines(function)
    return start + next(k for k, line in enumerate(lines) if text in line)


def at(text: str, function) -> str:
    return f"{HERE}:{line_of(text, function)}"


def rnn(x, w, outs):
    h = torch.tanh(x + 1.0)
    for _ in range(3):
        z = torch.sigmoid(h @ w * 2.0 + x)
        h = z * h + (1 - z) * x
        outs.append(h)
    return h


def training_step(steps: int):
    p = torch.nn.Parameter(torch.randn(4, 4))
    x = autofuse.wrap(torch.randn(4, 4))
    for _ in range(steps):
        loss = (torch.tanh(torch.sigmoid(x * p * 2) * x.exp() * p) + p).square().sum()
        loss.backward()
        loss.item()


def test_an_rnn_loop():
    outs: list[torch.Tensor] = []
    report = autofuse.explain(rnn, torch.randn(8, 8), torch.randn(8, 8), outs)
    assert report.ops_fused == {
        "add": 7, "tanh": 1, "mul": 9, "sigmoid": 3, "rsub": 3
    }  # fmt: skip
    assert report.ops_eager == {("__matmul__", "not in the table"): 3}
    assert report.ops_seen.total() == 26
    assert report.chains == [2, 7, 7, 7] and report.median_chain == 7 and report.longest_chain == 7
    here = (inspect.getsourcefile(rnn), line_of("h @ w", rnn))
    assert report.reasons["__matmul__", here] == 3
    assert sum(report.reasons.values()) == 4 and report.launches == 4
    assert (
        report.values_elided == 1 + 5 + 5 + 6 and report.bytes_saved == 17 * 256
    )  # the last z is gone
    assert [use.launches for use in report.kernels] == [2, 1, 1]
    use = report.kernels[0]
    assert use.name == "af_mul_add_sigmoid_mul_rsub_mul_add" and use.name in use.source
    assert use.reads == ("float32[8, 8]",) * 3 and use.bytes_read == 3 * 256
    assert use.writes == ("float32[8, 8]",) * 2 and use.bytes_written == 2 * 256
    assert "define" in use.ptx and use.target == "cpu"  # LLVM IR: there is no PTX for a CPU
    assert torch.equal(report.result, outs[-1]) and type(report.result) is torch.Tensor
    assert report.stored[-1].holders == ("list outs",)
    returned = autofuse.explain(lambda x: x * 2, torch.ones(2))
    assert [out.holders for out in returned.stored] == [("the result of the call",)]
    text = str(report)
    assert "26 ops seen, 23 fused in 4 launches, 3 run eagerly" in text
    assert "chains: 4, median 7 ops, longest 7" in text
    assert f"3 x __matmul__ at {Path('tests') / at('h @ w', rnn)}" in text.replace(
        str(Path(__file__).parent.parent) + "/", ""
    )
    assert "3 x __matmul__: not in the table" in text and "host reads" not in text


def test_who_held_the_live_outs():
    class Cell:
        pass

    cell = Cell()

    def step(x):
        kept = [x * 2]
        named = kept[0] + 1
        cell.h = named * 3
        table = {"a": cell.h - 1}
        (table["a"] * 2).sum()

    report = autofuse.explain(step, torch.randn(4))
    assert [(out.op, out.holders) for out in report.stored] == [
        ("mul", ("list kept",)),
        ("add", ("variable named",)),
        ("mul", ("attribute h of Cell",)),
        ("sub", ("dict table",)),
        ("mul", ("an argument of the call",)),
    ]
    assert [out.last for out in report.stored] == [False] * 4 + [True]
    assert "because variable named holds it" in " ".join(report.advice)


def test_in_a_comprehension_over_the_name_of_a_closure():
    """Where Python 3.13.0 crashes if it is asked for that name."""

    def step(x):
        y = x * 2.0
        out = y + 1.0
        reads = lambda: out  # noqa: E731
        found = [autofuse.materialize(y * out) for out in range(2)]
        return reads() + found[0] + found[1]

    report = autofuse.explain(step, torch.ones(3))
    assert report.result.tolist() == [5.0, 5.0, 5.0]
    assert {"variable y"} < {holder for out in report.stored for holder in out.holders}


def test_a_temporary_and_a_closure():
    def step(x):
        def inner():
            return y

        y = x * 2
        inner()
        autofuse.materialize(x + 1, y)
        autofuse.materialize(x + 1, x + 2)

    report = autofuse.explain(step, torch.randn(4))
    assert [out.holders for out in report.stored] == [
        ("variable y",), ("an argument of the call",), *[("an argument of the call",)] * 2
    ]  # fmt: skip


def test_a_generator_and_an_object_of_cpp():
    def values(x):
        y = x * 2
        yield y
        yield y + 1

    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as report:
        kept = values(x)
        next(kept)
        autofuse.materialize(x + 1)
        linear = torch.nn.Linear(4, 4)
        linear.hidden = x * 3
        autofuse.materialize(x + 1)
    held = [out.holders for out in report.stored]
    assert held[0] == ("generator values",) and ("attribute hidden of Linear",) in held


def test_looking_at_frames_keeps_nothing_alive():
    def step(x):
        y = x * 2
        autofuse.materialize(x + 1)
        del y
        z = x * 3  # the name is used again
        z = z + 1
        return autofuse.materialize(z * 2)

    with autofuse.explain() as report:
        x = autofuse.wrap(torch.randn(4))
        step(x)
    assert [flush.live for flush in report.flushes] == [(0, 1), (1, 2)]


def test_a_read_in_a_loop():
    def loop():
        x = autofuse.wrap(torch.randn(4))
        total = 0.0
        for _ in range(5):
            loss = (x * 2 + 1).neg().sum()
            total += loss.item()
        if loss > 0:
            pass
        return total

    with autofuse.explain() as report:
        loop()
    where = at("loss.item()", loop)
    reads = [sync for sync in report.syncs if sync.name == "item"]
    assert len(reads) == 5 and reads[0].text == "loss.item()"
    assert reads[0].position == (inspect.getsourcefile(loop), line_of("loss.item()", loop))
    (advice,) = [text for text in report.advice if "loss.item()" in text]
    assert advice.startswith("loss.item() at ") and where in advice
    assert advice.endswith("reads a value every step (5 times); move it out of the loop")
    assert [sync.text for sync in report.syncs if sync.name == "bool"] == ["if loss > 0"]
    assert f"5 x loss.item() at {reads[0].position[0]}".rpartition("/")[2] in str(report)


def test_reads_of_plain_tensors_are_seen():
    plain = torch.ones(3)

    @autofuse.fuse
    def f(x):
        return (x * 2 + 1).neg()

    with autofuse.explain() as report:
        for _ in range(2):
            loss = f(plain)
            float(loss[0])
            loss.tolist()
            repr(loss)
            if loss[0]:
                pass
        loss.cpu().numpy()
    names = [sync.name for sync in report.syncs]
    assert names == ["float", "tolist", "repr", "bool"] * 2 + ["cpu", "numpy"]
    assert any("tests a value every step" in text for text in report.advice)
    assert "item" not in torch.Tensor.__dict__ and not reads._originals


@pytest.mark.parametrize("wrap", [autofuse.wrap, lambda x: x], ids=["wrapped", "plain"])
def test_shapes_that_depend_on_values_are_reads(wrap):
    def loop(x):
        for _ in range(3):
            x[x > 0]
            x[0], x[torch.tensor([1, 2])]
            x.nonzero()

    with autofuse.explain() as report:
        loop(wrap(torch.ones(4)))
    assert [sync.text for sync in report.syncs] == ["x[x > 0]", "x.nonzero()"] * 3
    mask, nonzero = (text for text in report.advice if "makes a size of values" in text)
    assert mask.startswith("x[x > 0] at ") and at("x[x > 0]", loop) in mask
    assert "every step (3 times); keep the shape, with torch.where" in mask
    assert nonzero.startswith("x.nonzero() at ")
    assert torch.Tensor.__getitem__.__name__ == "__getitem__" and not reads._originals


def test_moves_to_the_host_are_reads():
    class Away:
        is_cuda = True

    here = torch.ones(2)
    for args, options, waits in (
        (("cpu",), {}, True), ((torch.device("cpu"), torch.float64), {}, True), ((here,), {}, True),
        ((), {"device": "cpu"}, True), (("cpu",), {"non_blocking": True}, False),
        (("cuda",), {}, False), ((torch.float64,), {}, False), ((), {"dtype": torch.half}, False),
    ):  # fmt: skip
        assert reads._to_host(Away(), *args, **options) is waits, (args, options)
    assert not reads._to_host(here, "cpu")


def test_one_line_is_advised_on_once():
    def loop(x):
        for _ in range(2):
            print(float(x), f"{x:.3f}", file=io.StringIO())

    with autofuse.explain() as report:
        loop(torch.ones(()))
    assert [sync.name for sync in report.syncs] == ["float", "format"] * 2
    assert len([text for text in report.advice if "reads a value" in text]) == 1


@pytest.mark.parametrize("ops", [1, 2])
def test_chains_that_are_too_short_are_said_to_be(ops, monkeypatch):
    """Also once their ops are not recorded any more."""
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 100.0)
    forget_all("test")
    w = autofuse.wrap(torch.ones(3, 5))

    def short():
        for _ in range(10):
            y = w * 2
            y = y + 1 if ops > 1 else y
            autofuse.materialize(y)
            del y

    short()
    with autofuse.explain() as report:
        short()
    (advice,) = report.advice
    assert not report.chains and report.ops_eager
    assert "little to gain here" in advice, advice


def test_a_program_with_a_fused_module_in_it():
    """explain(fn) shows what the program does without it: the module is the outermost call."""
    module = autofuse.fuse(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid(), Gate()))

    def train(steps):
        for _ in range(steps):
            loss = module(torch.ones(2, 4)).sum()
            loss.backward()
        return loss

    report = autofuse.explain(train, 3)
    assert report.ops_fused["sigmoid"] + report.ops_fused["tanh"] == 6
    assert not any("nothing was recorded" in text for text in report.advice)
    assert type(report.result) is torch.Tensor


class Gate(torch.nn.Module):
    def forward(self, x):
        return (torch.tanh(x * 2 + 1) * x - x).exp() * x


def test_printing_a_wrapped_tensor_is_one_read():
    x = autofuse.wrap(torch.ones(3))
    with autofuse.explain() as report:
        repr(x * 2)
    assert [sync.name for sync in report.syncs] == ["repr"]


def test_a_training_step():
    training_step(1)
    with autofuse.explain() as report:
        training_step(2)
    assert report.flushes and all(flush.reason == "sum" for flush in report.flushes)
    backward = [use for use in report.kernels if use.backward]
    assert backward and report.launches == sum(use.launches for use in report.kernels)
    assert ("sum", "not in the table") in report.ops_eager
    assert "(backward)" in str(report)
    where = at("loss.item()", training_step)
    assert any(where in text and "reads a value every step" in text for text in report.advice)


def test_short_chains_under_grad_are_eager_and_said_so():
    forget_all("test")  # else other tests have found that out
    p = torch.nn.Parameter(torch.randn(4))
    with autofuse.explain() as report:
        for _ in range(3):
            (autofuse.wrap(torch.ones(4)) * p).sum()
    assert report.ops_eager["mul", "a chain of one op"] == 3
    assert report.launches == 0 and not report.ops_fused
    assert "little to gain here" in " ".join(report.advice)


def test_a_function_that_gains_nothing():
    def f(x):
        return ((x + 1).sum(), (x * 2).sum())

    report = autofuse.explain(f, torch.randn(4))
    assert report.median_chain == 1
    (advice,) = report.advice
    assert advice.startswith("median chain is 1 op: little to gain here")
    assert "chains end with 'sum' at " in advice and at("x + 1", f) in advice


def test_a_function_without_ops_of_the_table():
    report = autofuse.explain(lambda x, y: x @ y, torch.randn(2, 2), torch.randn(2, 2))
    (advice,) = report.advice
    assert advice.startswith("nothing was recorded") and "autofuse.wrap" in advice
    assert "chains:" not in str(report)


def test_where_recording_is_off():
    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as report, autofuse.disabled():
        x * 2
    assert report.ops_eager == {("mul", "recording is off"): 1}
    assert "1 op ran where nothing is recorded" in " ".join(report.advice)


@pytest.mark.parametrize("mode", ["anomaly mode", "saved tensor hooks"])
def test_modes_that_are_told_of_every_op_are_named(mode):
    x = autofuse.wrap(torch.ones(4, requires_grad=True))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    anomaly = torch.autograd.set_detect_anomaly(mode == "anomaly mode", check_nan=False)
    with anomaly, autofuse.explain() as report, hooks:
        (x * 2.0 + 1.0).relu()
    assert report.ops_eager["add", mode] == 1
    assert f"3 ops ran at once under {mode}" in " ".join(report.advice)


@pytest.mark.usefixtures("nothing_on_disk")
def test_a_kernel_that_fails(monkeypatch, capsys):
    from autofuse.supply import build

    def broken(source, target):
        raise autofuse.errors.BuildError("the compiler is away")

    monkeypatch.setattr(build, "build", broken)
    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as report:
        y = (x * 1.25).atan().cosh()
        autofuse.materialize(y)
    assert report.flushes[0].eager.startswith("its kernel failed: ")
    assert "the compiler is away" in " ".join(report.advice) and not report.ops_fused
    assert "the compiler is away" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_on_disk")
def test_a_chain_that_waits_for_its_kernel(monkeypatch):
    monkeypatch.setattr(autofuse.config, "compile", "background")
    monkeypatch.setattr(autofuse.config, "compile_after", 1000)
    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as report:
        autofuse.materialize((x * 1.75).asinh().cosh())
    assert report.ops_eager["asinh", "its kernel is not there yet"] == 1
    assert report.flushes[0].outcome == "hard miss" and report.launches == 0
    assert "1 chain ran as eager ops while kernels were compiled" in " ".join(report.advice)


@pytest.mark.usefixtures("nothing_on_disk")
@pytest.mark.parametrize("where", ["now", "background"])
def test_a_line_that_has_had_its_share_of_kernels(where, monkeypatch, capsys):
    monkeypatch.setattr(autofuse.config, "compile", where)
    monkeypatch.setattr(autofuse.config, "compile_after", 1)
    monkeypatch.setattr(autofuse.config, "max_kernels_per_line", 2)
    autofuse.supply.kernels.positions.clear()
    monkeypatch.setattr(autofuse.errors, "_said", set())
    x = autofuse.wrap(torch.randn(4))

    def grow():
        for k in range(5):
            y = x * 2.5 if where == "now" else x * 2.75 - 1
            for _ in range(k):
                y = y.asinh().cosh()
            autofuse.materialize(y)
        assert autofuse.wait(60)

    with autofuse.explain() as report:
        grow()
        grow()
    last = report.flushes[-1]
    assert last.eager == "its line has had its share of kernels (max_kernels_per_line)"
    assert last.outcome == "hard miss"
    (advice,) = [text for text in report.advice if "max_kernels_per_line" in text]
    assert "chains ran as eager ops at " in advice and at("materialize", grow) in advice
    assert "after 2 kernels none is compiled for this line any more" in advice
    assert "make what keeps changing constant" in advice
    assert f"cosh: {last.eager}" in str(report)
    assert "What keeps changing" in capsys.readouterr().err


def test_pending_ops_are_left_alone():
    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as report:
        y = x * 2 + 1
    assert autofuse.is_pending(y) and report.pending == 2 and not report.flushes
    assert "still pending: 2 ops" in str(report)
    assert "nothing was recorded" not in str(report)


@pytest.mark.usefixtures("nothing_on_disk")
def test_lookups_say_hit_and_hard_miss():
    def f(x):
        return (x * 1.125).exp().cos()

    first = autofuse.explain(f, torch.randn(3))
    second = autofuse.explain(f, torch.randn(5))
    assert [(look.made, look.outcome) for look in first.lookups] == [
        (True, "hard miss"), (False, "hard miss")
    ]  # fmt: skip
    assert [(look.made, look.outcome) for look in second.lookups] == [(False, "hit")]
    assert first.lookups[0].position == first.flushes[0].position


def test_nested_reports():
    x = autofuse.wrap(torch.randn(4))
    with autofuse.explain() as outer:
        autofuse.materialize(x + 1)
        with autofuse.explain() as inner:
            autofuse.materialize(x * 2)
            float(torch.ones(()))
        autofuse.materialize(x - 3)
    assert [flush.ops for flush in inner.flushes] == [("mul",)]
    assert [flush.ops for flush in outer.flushes] == [("add",), ("mul",), ("sub",)]
    assert len(inner.syncs) == len(outer.syncs) == 1
    assert hooks.flushing is None


def test_an_exception_inside():
    x = autofuse.wrap(torch.randn(4))
    with pytest.raises(ZeroDivisionError):
        with autofuse.explain() as report:
            autofuse.materialize(x * 2)
            raise ZeroDivisionError
    assert [flush.ops for flush in report.flushes] == [("mul",)] and report.launches == 1
    assert hooks.flushing is None and not watchers
    with pytest.raises(RuntimeError, match="another region"):
        with report:
            pass


def test_an_error_at_the_flush():
    plain = torch.randn(4)
    x = autofuse.wrap(plain)
    with autofuse.explain() as report:
        y = x * 2
        write_unseen(plain)
        with pytest.raises(autofuse.StaleInputError):
            y.sum()
    assert report.flushes[0].raised and not report.ops_fused
    assert "failed" not in str(report) and ("mul", "") not in report.ops_eager


def test_other_threads_are_seen():
    def work():
        x = autofuse.wrap(torch.randn(4))
        for _ in range(20):
            autofuse.materialize(x * 2 + 1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with autofuse.explain() as report:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(report.flushes) == 60 and report.launches == 60
    assert {flush.position for flush in report.flushes} == {
        (inspect.getsourcefile(work), line_of("materialize", work))
    }


def test_counters_go_on():
    x = autofuse.wrap(torch.randn(4))
    x.sum()
    with autofuse.explain():
        x.sum()
    x.sum()
    assert autofuse.stats().eager_ops == {("sum", "not in the table"): 3}


def test_nothing_is_paid_when_it_is_off(monkeypatch):
    training_step(3)  # kernels are there

    def forbidden(*args):
        raise AssertionError("a frame was walked")

    for module in (observe, explaining, compiling):
        monkeypatch.setattr(module, "user_position", forbidden)
    monkeypatch.setattr(holders, "frames", forbidden)
    monkeypatch.setattr(observe, "_Watch", forbidden)
    training_step(3)
    assert autofuse.stats().ops_recorded > 0
    with pytest.raises(AssertionError, match="a frame was walked"), autofuse.explain():
        (autofuse.wrap(torch.ones(3)) + 1).sum()


def test_results_are_the_same():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    plain = rnn(x, w, [])
    report = autofuse.explain(rnn, x, w, [])
    assert torch.allclose(report.result, plain, rtol=1e-5, atol=1e-6)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Sigmoid())
    report = autofuse.explain(module, x)
    assert report.result.requires_grad and type(module) is torch.nn.Sequential
    assert torch.allclose(report.result, module(x), rtol=1e-5, atol=1e-6)


def test_repr_and_an_open_report():
    with autofuse.explain() as report:
        autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
        assert "so far" in str(report)
    assert repr(report) == ("<autofuse report: 1 op seen, 1 fused in 1 launch, 0 run eagerly>")


# --- show -----------------------------------------------------------------------------------------


def test_show_of_a_pending_expression(capsys):
    x, y = autofuse.wrap(torch.randn(8, 16)), torch.randn(16)
    unrelated = x - 5
    z = (x * y + 1.5).neg()
    autofuse.show(z)
    assert capsys.readouterr().out == (
        "pending, float32[8, 16] on cpu: 3 ops over 2 Inputs\n"
        "  x0: float32[8, 16]\n"
        "  x1: float32[16]\n"
        "  v1 = mul(x0, x1)  # float32[8, 16]\n"
        "  v2 = add(v1, 1.5)  # float32[8, 16]\n"
        "  v3 = neg(v2)  # float32[8, 16]\n"
    )
    assert autofuse.is_pending(z) and autofuse.is_pending(unrelated)
    assert not autofuse.stats().flushes


def test_show_of_what_is_not_pending(capsys):
    autofuse.show(autofuse.wrap(torch.ones(2)))
    autofuse.show(torch.ones(2, 3))
    concrete, plain = capsys.readouterr().out.splitlines()
    assert concrete == "concrete, float32[2] on cpu: nothing is pending"
    assert plain.startswith("a plain tensor, float32[2, 3] on cpu") and "autofuse.wrap" in plain
    with pytest.raises(TypeError, match="takes a tensor, not list"):
        autofuse.show([1])


def test_show_after_an_inplace_op(capsys):
    x = autofuse.wrap(torch.ones(2))
    y = x * 2
    y += x
    autofuse.show(y)
    assert "v1 = add(v0, x0)" in capsys.readouterr().out
    assert autofuse.is_pending(y) and y.tolist() == [3.0, 3.0]


def test_source_lines_that_cannot_be_read():
    space: dict = {"autofuse": autofuse, "torch": torch}
    exec(compile("x = autofuse.wrap(torch.ones(()))\nv = (x + 1).item()", "<typed>", "exec"), space)
    with autofuse.explain() as report:
        exec(compile("v = (x + 1).item()", "<typed>", "exec"), space)
    assert report.syncs[0].text == "item()" and not linecache.getline("<typed>", 1)
    assert "item() at <typed>:1" in str(report)


def test_tensors_are_no_sequences_to_c_inside_and_after():
    class Mine(torch.Tensor):
        pass

    def made():
        total = torch.ones(2).sum()
        items = [
            total,
            torch.nn.Parameter(total, False),
            total.as_subclass(Mine),
            autofuse.wrap(total),
        ]
        return torch.tensor([*items, 1.0]), torch.as_tensor(items), torch.stack(items)[1:].tolist()

    want = [x.tolist() if isinstance(x, torch.Tensor) else x for x in made()]
    with autofuse.explain():
        assert [x.tolist() if isinstance(x, torch.Tensor) else x for x in made()] == want
        assert torch.ones(3)[1].item() == 1.0
    assert [x.tolist() if isinstance(x, torch.Tensor) else x for x in made()] == want


def test_views_count_the_memory_that_they_keep_once():
    x = autofuse.wrap(torch.ones(8, 4))
    with autofuse.explain() as report:
        a, b = (x * 2.0).chunk(2)
        c = a * b
        autofuse.materialize(c)
        y = x + 1.0
        rows = y[0], y[1]
        autofuse.materialize(y)
    assert [(out.op, out.nbytes) for out in report.stored] == [
        ("chunk", 128), ("mul", 64), ("add", 128),
    ]  # fmt: skip
    assert report.flushes[0].kernels == 1 and rows[0]._base is y
    del a, b
