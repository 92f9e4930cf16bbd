"""What CPU kernels call: every function is there, or the kernel is refused; float16 needs none."""

import itertools
import platform

import pytest
import torch
from test_ops import tolerance

import autofuse
from autofuse.kernel import llvm as build
from autofuse.supply import kernels as compile
from autofuse.supply import toolchain
from cases import (
    FLOAT_CALLS,
    FLOAT_TO_INT,
    INT_CALLS,
    INT_PAIR_CALLS,
    INT_SHIFTS,
    PAIR_CALLS,
    TRIPLE_CALLS,
    WIDE_CALLS,
)
from support import FLOATS, INTS, assert_same, outcome, random_tensor

SIZES = range(1, 68)
SMALLEST = ("", "+fxsr,+mmx,+sse,+sse2,+x87")  # processor and features of the first x86-64


@pytest.fixture(params=["own", "smallest"])
def processor(request, monkeypatch):
    """This machine's processor, or one without instructions for float16 and fused products."""
    if request.param == "own":
        yield
        return
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the other processor is an x86-64")
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(build, "processor", lambda: SMALLEST)
        assert not build.converts_halves()
        yield
    forget()


def forget():
    """Whatever was made for another processor."""
    build._own_machine.cache_clear()
    toolchain.compilers.cache_clear()
    compile.clear_kernels()


def groups(dtype):
    """(names, functions of x, y, z) of a chain each, of all ops of a dtype."""
    if dtype.is_floating_point:
        calls = [FLOAT_CALLS, FLOAT_TO_INT, PAIR_CALLS, TRIPLE_CALLS]
        calls += [WIDE_CALLS] if dtype.itemsize > 2 else []
    else:
        calls = [INT_PAIR_CALLS, *([INT_CALLS, INT_SHIFTS] if dtype is not torch.bool else [])]
    takes = {id(PAIR_CALLS): 2, id(INT_PAIR_CALLS): 2, id(INT_SHIFTS): 2, id(TRIPLE_CALLS): 3}
    rows = [
        (name, call, takes.get(id(table), 1)) for table in calls for name, call in table.items()
    ]
    ones = [torch.ones(2, dtype=dtype)] * 3
    rows = [row for row in rows if outcome(row[1], ones[: row[2]])[1] is None]  # bool - bool
    while rows:
        yield rows[:8]
        rows = rows[8:]


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.bool), ids=str)
def test_all_ops_of_all_small_sizes(dtype, processor, request):
    """In chains of several results, where LLVM moves their ends into each other."""
    if request.node.callspec.params["processor"] == "smallest" and dtype is not torch.float16:
        pytest.skip("what differs there is float16")
    operands = [random_tensor((SIZES[-1],), dtype, "cpu", seed) for seed in range(3)]
    if not dtype.is_floating_point:
        operands = [x.clamp(max=120) for x in operands] if dtype is not torch.bool else operands
    with torch.no_grad():
        for rows, size in itertools.product(groups(dtype), SIZES):
            plain = [x[:size] for x in operands]
            ours = [autofuse.wrap(x) for x in plain]
            got = [call(*ours[:takes]) for _, call, takes in rows]
            for (name, call, takes), value in zip(rows, autofuse.materialize(got), strict=True):
                rtol = tolerance(name, dtype) if dtype.is_floating_point else 2e-6
                assert_same(value, call(*plain[:takes]), rtol, f"{name} of {size}")
    assert autofuse.stats().replays == 0


def every_half():
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)


def between_halves():
    """Each float16, what lies halfway to the next, and the float32 numbers beside these."""
    exact = every_half().float()
    exact = exact[exact.isfinite()].sort().values
    halfway = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, torch.tensor([65520.0, -65520.0])])
    ends = torch.tensor([float("inf"), -float("inf")])
    beside = [torch.nextafter(halfway, end) for end in ends]
    tiny = torch.tensor([1e-45, 1e-40, 2**-25, 2**-24 * 0.75, 3.4e38])
    return torch.cat([halfway, *beside, tiny, -tiny, ends, torch.tensor([float("nan")])])


def bits_of(x):
    return torch.where(x.isnan(), torch.tensor(0x7E00, dtype=torch.int16), x.view(torch.int16))


def test_float16_is_converted_as_eager_does(processor):
    every, x = every_half(), between_halves()
    wide = torch.cat([x.double(), x.double() * (1 + 2**-40), x.double() * (1 - 2**-40)])
    for value in (x, wide):  # float64 goes by float32, and is so rounded twice
        got = autofuse.wrap(value).half()
        assert autofuse.is_pending(got)
        assert torch.equal(bits_of(autofuse.unwrap(got)), bits_of(value.half()))
    for kind in (torch.float32, torch.float64):
        got = autofuse.unwrap(autofuse.wrap(every).to(kind) * 1.0)
        assert_same(got, every.to(kind) * 1.0, None)
        assert torch.equal(got.signbit(), every.to(kind).signbit())
    got = autofuse.unwrap(-(autofuse.wrap(every) * 0.37))
    assert torch.equal(bits_of(got), bits_of(-(every * 0.37)))


# --- what is not there ---------------------------------------------------------------------------


def calls_nothing(source):
    """An object file for a kernel that calls a function which no process has."""
    from llvmlite import binding as llvm

    text = """
        declare double @no_such_function(double)
        define void @NAME() {
            %1 = call double @no_such_function(double 1.0)
            ret void
        }
        define void @launch() {
            ret void
        }
    """
    machine = build.target_machine()
    module = llvm.parse_assembly(text.replace("NAME", source.name))
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return machine.emit_object(module)


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """A function that forgets all kernels and chains but for the disk, which is empty."""
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path))

    def begin():
        compile.clear_kernels()
        autofuse.record.modes.forget(autofuse.chain.state.recorder_for(torch.device("cpu")))
        autofuse.errors._said.clear()
        autofuse.reset_stats()

    begin()
    yield begin
    autofuse.config.compile_after = 2
    begin()


@pytest.mark.parametrize("mode", ["now", "disk", "background"])
def test_a_kernel_that_calls_what_is_not_there_is_refused(mode, cold, monkeypatch, capfd):
    """Whoever has compiled it; its chain runs as eager ops, and a reason is given."""
    x = torch.rand(23)

    def program(x):
        return torch.erf(x * 3) - x

    def run():
        got = autofuse.materialize(program(autofuse.wrap(x)))
        assert_same(got, program(x), 1e-6)

    with monkeypatch.context() as patch:
        patch.setattr("autofuse.supply.build.compile_object", calls_nothing)
        run()
    if mode != "now":  # what was built is on disk
        cold()
    if mode == "background":
        monkeypatch.setattr(compile._cache(), "get", lambda key: None)  # the worker finds it
        autofuse.config.compile, autofuse.config.compile_after = "background", 1
        run()
        assert autofuse.wait(60)
    run()
    stats = autofuse.stats()
    assert (stats.replays, stats.kernels_launched) == (2 if mode == "now" else 1, 0)
    said = capfd.readouterr().err
    assert "LLVM cannot link it" in said and "no_such_function" in said


def test_machine_code_that_calls_what_is_not_there_is_refused():
    from autofuse.hot import c, machine

    def function(x):
        return no_such_function(x)  # noqa: F821

    with pytest.raises(NotImplementedError, match="Python has no function no_such_function"):
        machine.Machine([function], {"no_such_function": c.C("word", 1)})
