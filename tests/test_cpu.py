"""The CPU backend's own promises: units in the last place, threads, what it leaves to eager."""

import gc
import math
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import inside
from autofuse.kernel.polynomials import DOUBLE, SINGLE
from autofuse.ops.row import since
from autofuse.record import modes
from autofuse.run import cpu
from autofuse.supply.kernels import clear_kernels
from support import SPECIAL

PAIRS = {"pow", "atan2", "hypot"}
MADE_OF_THEM = {  # name -> (function, the ulp it may be away from eager)
    "sigmoid": (torch.sigmoid, 2),
    "silu": (F.silu, 2),
    "softplus": (F.softplus, 2),
    "elu": (F.elu, 2),
    "selu": (F.selu, 2),
    "celu": (lambda x: F.celu(x, 1.3), 2),
    "pow_1.7": (lambda x: x**1.7, 2),
    "rpow": (lambda x: 2.5**x, 2),
    "sinc": (torch.sinc, 2),
    "logsigmoid": (F.logsigmoid, 2),
    "mish": (lambda x: F.mish(x.clamp(min=-87.0)), 4),  # below, torch's own exp is off: subnormal
}
CANCELLING = {  # a sum of nearly opposite terms: in ulp of the terms, whose size is x
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanhshrink": F.tanhshrink,
}


def patterns(seed: int = 0) -> torch.Tensor:
    """2^20 float32 bit patterns, evenly strided, with special values; a multiple of 64."""
    bits = torch.arange(-(2**31), 2**31, 2**12) + (1237 * seed + 77) % 4096
    values = bits.to(torch.int32).view(torch.float32)
    nan = values.isnan()
    values = torch.where(nan, float("nan"), values)  # quiet ones
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]


def usual(seed: int = 0) -> torch.Tensor:
    return torch.randn(1 << 18, generator=torch.Generator().manual_seed(seed)) * 4


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers that count the float32 numbers; both zeros are 0."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def ulp_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in float32 numbers; NaN is at none from NaN only."""
    apart = (ordered(a) - ordered(b)).abs()
    apart[a.isnan() & b.isnan()] = 0
    apart[a.isnan() ^ b.isnan()] = 2**32
    return int(apart.max())


def fused(function, *args):
    result = function(*map(autofuse.wrap, args))
    assert autofuse.is_pending(result)
    return autofuse.unwrap(result)


@pytest.mark.parametrize("name", sorted({*SINGLE, *DOUBLE}))
def test_a_function_is_right_over_all_of_float32(name):
    """Within 2 ulp of eager, and within 1 of the float64 function rounded."""
    function = getattr(torch, name)
    count = 2 if name in PAIRS else 1
    for make in (patterns, usual):
        args = [make(seed) for seed in range(count)]
        got, eager = fused(function, *args), function(*args)
        exact = function(*(x.double() for x in args)).float()
        if name in ("sinh", "cosh") and not since(2, 14):  # they overflow early, see their rows
            exact = torch.where(eager.isinf(), eager, exact)
        from_eager, from_exact = ulp_apart(got, eager), ulp_apart(got, exact)
        print(f"{name}: {from_eager} ulp from eager, {from_exact} from exact")
        assert from_eager <= 2 and from_exact <= 1
        zero = got == 0
        assert torch.equal(got[zero].signbit(), exact[zero].signbit())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sinh", "cosh"])
def test_they_overflow_where_vectors_of_eagers_do(name, dtype):
    """Versions of torch and dtypes differ there."""
    function = getattr(torch, name)
    limits = [11.79, 88.722, 88.7228393, 89.0, 89.415, 709.782712893384, 710.475]
    near = [
        torch.tensor(limit * (1 + k * 2.0**-bits))
        for limit in limits
        for k in range(-64, 64)
        for bits in (8, 16, 23)
    ]
    x = torch.stack(near).double()
    exact = torch.cat([torch.tensor(limits).double() + k * 2.0**-43 for k in range(-64, 64)])
    x = torch.cat([x, -x, exact, -exact, torch.tensor([torch.inf, -torch.inf, torch.nan] * 64)])
    x = x.to(dtype)
    got, eager = fused(function, x), function(x)
    assert x.numel() % 64 == 0
    assert torch.equal(got.isinf(), eager.isinf()) and torch.equal(got.isnan(), eager.isnan())
    assert torch.equal(got.signbit()[eager.isinf()], eager.signbit()[eager.isinf()])
    if dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(got.nan_to_num(), eager.nan_to_num())


@pytest.mark.parametrize("name", MADE_OF_THEM)
def test_what_is_made_of_them_is_near_eager(name):
    function, limit = MADE_OF_THEM[name]
    for x in (patterns(), usual()):
        apart = ulp_apart(fused(function, x), function(x))
        print(f"{name}: {apart} ulp from eager")
        assert apart <= limit


@pytest.mark.parametrize("name", CANCELLING)
def test_cancelling_sums_are_right_in_ulp_of_their_terms(name):
    """No nearer to eager: a vector's body and its tail differ as much in torch's own kernels."""
    function, x = CANCELLING[name], usual()
    ulp = torch.nextafter(x.abs(), torch.tensor(torch.inf)) - x.abs()
    got, eager, exact = fused(function, x).double(), function(x).double(), function(x.double())
    ours, theirs, apart = (
        ((a - b).abs() / ulp).max().item() for a, b in ((got, exact), (eager, exact), (got, eager))
    )
    print(f"{name}: {apart:.1f} ulp of x from eager, {ours:.1f} (eager {theirs:.1f}) from exact")
    assert ours <= 2 and apart <= ours + theirs


def test_powers_of_special_values():
    special = torch.tensor([*SPECIAL, 2.5, -2.5, 5.0, 2.0**24 + 2, 3e38, -3e38, 1.0 - 2**-24])
    x = special.repeat_interleave(len(special)).repeat(64)
    y = special.repeat(len(special)).repeat(64)
    for function in (torch.pow, torch.atan2, torch.hypot):
        assert ulp_apart(fused(function, x, y), function(x, y)) <= 1, function.__name__


def test_the_hardest_circular_arguments():
    """Next to multiples of pi / 2, where a short reduction leaves nothing."""
    k = torch.arange(1, 4097, dtype=torch.float64)
    near = torch.cat([(k * torch.pi / 2).float(), torch.tensor([16367173 * 2.0**72] * 64)])
    for function in (torch.sin, torch.cos, torch.tan):
        assert ulp_apart(fused(function, near), function(near.double()).float()) <= 1


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch):
    """The threads that computed; every test begins without a pool."""
    monkeypatch.setattr(cpu, "_pool", None)
    seen = []

    real = cpu._ENTRY

    def entry(address):
        def run(start, stop, parameters):
            seen.append((threading.get_ident(), start, stop))
            return real(address)(start, stop, parameters)

        return run

    monkeypatch.setattr(cpu, "_ENTRY", entry)
    return seen


@pytest.mark.parametrize("count", [2, 3])
def test_a_large_tensor_takes_as_many_threads_as_torch(threads, used, count):
    threads(count)
    x = torch.randn(200_001)
    assert torch.equal(fused(lambda x: (x + 1) * x, x), (x + 1) * x)
    assert len(used) == count
    assert sorted((start, stop) for _, start, stop in used)[0][0] == 0
    covered = sorted((start, stop) for _, start, stop in used)
    assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))
    assert covered[-1][1] == x.numel()


SHAPES = {  # of operands
    "columns": [(61, 47, 41), (61, 1, 41), (1, 47, 1)],
    "short rows": [(251, 241, 3), (251, 1, 3), (251, 241, 1)],
    "four axes": [(13, 19, 23, 29), (13, 1, 23, 1), (1, 19, 1, 29)],
    "five axes": [(7, 9, 11, 13, 17), (7, 1, 11, 1, 17), (1, 9, 1, 13, 1)],
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_thread_begins_its_rows_where_another_ends(threads, used, name, turned, count):
    """Each goes through several axes, some of which are broadcast, from somewhere in the middle."""
    threads(count)
    xs = [torch.arange(float(math.prod(shape))).view(shape) for shape in SHAPES[name]]
    if turned:
        order = (*range(xs[0].ndim)[-2:], *range(xs[0].ndim)[:-2])
        xs = [x.permute(order) for x in xs]

    def program(x, y, z):
        return (x * 2.0 - y) * z, y + x[:1]

    got = [autofuse.unwrap(one) for one in autofuse.materialize(program(*map(autofuse.wrap, xs)))]
    for one, want in zip(got, program(*xs), strict=True):
        assert torch.equal(one, want) and one.stride() == want.stride()
    assert autofuse.stats().kernels_launched and (count == 1 or any(start for _, start, _ in used))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_broadcast_is_computed_once_where_that_pays(dtype):
    """Functions of it, that is, in loops of some size."""
    x, y = torch.rand(400, 1, dtype=dtype), torch.rand(400, 300, dtype=dtype)
    for function, kernels in ((lambda x, y: y * (x + 1.0) ** -1.5 + y, 2),
                              (lambda x, y: y * (x + 1.0) + y, 1)):  # fmt: skip
        for rows in (400, 4):
            autofuse.reset_stats()
            got = fused(function, x[:rows], y[:rows, : 300 if rows > 4 else 3])
            want = function(x[:rows], y[:rows, : 300 if rows > 4 else 3])
            torch.testing.assert_close(got, want)
            assert autofuse.stats().kernels_launched == (kernels if rows > 4 else 1)


def test_the_pool_follows_the_number_of_threads(threads, used):
    x = torch.randn(400_000)
    for count in (2, 4, 1, 3):
        threads(count)
        for _ in range(3):
            used.clear()
            fused(lambda x: (x - 1) * x, x)
            assert len(used) == count or len(used) <= count == 1  # 0 by machine code
            assert {ident for ident, _, _ in used} <= {threading.get_ident()} or count > 1


def test_a_write_takes_as_many_threads_as_there_are_then(threads, used):
    """Whatever they were when its chain came up first."""
    memory, x = torch.zeros(300_000), torch.rand(300_000)
    w = autofuse.wrap(x)
    for count in (1, 3, 1, 2):
        threads(count)
        for k in range(4):
            used.clear()
            memory.copy_(w * 2.0 + float(k))
            assert torch.equal(memory, x * 2.0 + float(k))
            assert len(used) == (count if count > 1 else 0)
    assert memory._version == 16


def test_a_job_that_no_thread_takes_is_not_done_later(threads, monkeypatch):
    """Where no further thread can be started, the pool has taken the job all the same."""
    threads(3)
    monkeypatch.setattr(cpu, "_pool", None)
    start, begun = threading.Thread.start, []

    def limited(thread):
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    x = torch.rand(200_001)
    for _ in range(3):
        begun.clear()
        y = fused(lambda x: (x + 1) * x, x)
        assert torch.equal(y, (x + 1) * x)
        y.zero_()
        time.sleep(0.05)
        assert not y.any()


def test_threads_hold_what_they_need_where_an_interrupt_lets_them_go_on(threads, monkeypatch):
    """The kernel, which is unloaded once nobody has it, and memory that others would get."""
    threads(2)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    real, go_on, begun, needed = cpu._ENTRY, threading.Event(), threading.Event(), []
    here = threading.get_ident()

    def entry(address):
        def run(start, stop, parameters):
            if threading.get_ident() == here:
                assert begun.wait(10)
                frame = sys._getframe(1)
                needed.extend(map(weakref.ref, frame.f_locals["needed"]))
                raise KeyboardInterrupt
            begun.set()
            assert go_on.wait(10)
            real(address)(start, stop, parameters)

        return run

    monkeypatch.setattr(cpu, "_ENTRY", entry)
    x = torch.rand(1 << 17)
    try:
        w = autofuse.wrap(x)
        autofuse.materialize(((w + 1.0) * w - w) / (w + 3.0) - w)  # a kernel of this test only
    except KeyboardInterrupt:
        pass
    modes.forget_all("test")
    clear_kernels()
    gc.collect()
    assert len(needed) == 3 and all(ref() is not None for ref in needed)
    assert {type(ref()).__name__ for ref in needed} == {"Kernel", "Tensor"}
    del x, w
    go_on.set()
    cpu._pool.shutdown()
    cpu.forget_threads()
    gc.collect()
    assert not any(isinstance(ref(), torch.Tensor) for ref in needed)  # the kernel is others', too


def test_a_handler_in_the_middle_of_giving_work_gives_none(threads, used, monkeypatch):
    """The pool's locks are not made for that: it would wait for itself."""
    threads(3)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = torch.randn(200_001).requires_grad_()
    y = autofuse.unwrap(autofuse.materialize((autofuse.wrap(x) + 1.0) * x))
    submit, asked, nested = cpu.ThreadPoolExecutor.submit, [], []

    def submits(*args):
        asked.append(args)
        if len(asked) == 1:
            with torch.no_grad():
                nested.append(fused(lambda x: x * x - 1, x.detach()))
            assert len(asked) == 1
            nested.append(None)
        return submit(*args)

    monkeypatch.setattr(cpu.ThreadPoolExecutor, "submit", submits)
    used.clear()
    (got,) = torch.autograd.grad(y, x, torch.ones_like(x))
    torch.testing.assert_close(got, 2 * x.detach() + 1.0)
    assert torch.equal(nested[0], x.detach() * x.detach() - 1) and not cpu._asking
    assert len(nested) == 2 and len(asked) > 1


def test_a_pool_that_takes_no_more_work_is_done_without(threads, used, capsys):
    """As at exit, in threads that outlive the main one."""
    threads(3)
    cpu._threads().shutdown()
    x = torch.randn(200_001)
    assert torch.equal(fused(lambda x: (x + 1) * x, x), (x + 1) * x)
    assert sorted(used)[0][1] == 0 and max(stop for _, _, stop in used) == x.numel()
    assert len(used) == 2 and not capsys.readouterr().err


def test_threads_of_the_pool_are_marked_as_long_as_they_live(threads, used):
    """A later thread may have the ident of one, and the number of them tells of others."""
    threads(3)
    x = torch.randn(200_001)
    for _ in range(2):
        before = {*threading.enumerate()}
        assert torch.equal(fused(lambda x: (x + 1) * x, x), (x + 1) * x)
        begun = {*threading.enumerate()} - before
        idents = {thread.ident for thread in begun}
        assert idents & {*inside.serving} and idents & {*inside.inside}
        cpu._pool = None  # its threads end where nobody has it
        gc.collect()
        for thread in begun:
            thread.join(20.0)
            assert not thread.is_alive()
        assert not idents & {*inside.serving, *inside.inside}


def test_a_small_tensor_stays_in_its_thread(threads, used):
    threads(4)
    launches = autofuse.stats().kernels_launched
    fused(lambda x: x + 1, torch.randn(10_000))
    assert not used and cpu._pool is None
    assert autofuse.stats().kernels_launched == launches + 1


@pytest.mark.parametrize(
    "function, dtype",
    [(torch.lgamma, torch.float32), (torch.erfinv, torch.bfloat16), (torch.tanh, torch.float64)],
)
def test_what_eager_does_faster_is_left_to_it_where_that_pays(function, dtype):
    """Only on large tensors: between small ones the saving is in the dispatch."""
    small, large = torch.rand(1000, dtype=dtype), torch.rand(100_000, dtype=dtype)
    assert autofuse.is_pending(function(autofuse.wrap(small)))
    autofuse.reset_stats()
    result = function(autofuse.wrap(large) * 0.5) + 1
    assert autofuse.is_pending(result)
    why = "a large tensor on the CPU, where eager is faster"
    assert (function.__name__, why) in autofuse.stats().eager_ops
    assert torch.equal(autofuse.unwrap(result), function(large * 0.5) + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("held", range(8))
@pytest.mark.parametrize("unit", [12, 8, 1])
def test_many_strided_results_of_one_kernel(unit, held, dtype):
    """LLVM's vectorizer of straight code made such code of their addresses as ended the process."""

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        values = [x + y]
        for k in range(held):
            values.append((values[-1] + 2, torch.relu(y), -values[-1], y.clone())[k % 4])
        return [torch.cat([values[-1], value], -1) for value in values]

    x = torch.randint(-9, 9, (2, 8, unit)).to(dtype)
    y = torch.randint(-9, 9, (8, 2, unit)).to(dtype).transpose(0, 1)
    before = autofuse.stats()
    results = program(autofuse.wrap(x), autofuse.wrap(y))
    got = [autofuse.unwrap(value) for value in results]
    assert autofuse.stats().kernels_launched > before.kernels_launched
    assert autofuse.stats().eager_flushes == before.eager_flushes
    for value, want in zip(got, program(x, y), strict=True):
        assert torch.equal(value, want) and value.stride() == want.stride()


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 24), (torch.float64, 53)])
def test_erfinv_next_to_1(dtype, bits, always):
    """Where erf of what is sought and 1 are the same but for the last digits."""
    x = torch.tensor([1.0 - 2.0**-k for k in range(1, bits + 1)], dtype=dtype)
    x = torch.cat([x, -x])
    got = autofuse.unwrap(torch.erfinv(autofuse.wrap(x.clone())))
    assert torch.allclose(got, torch.erfinv(x), rtol=4 * torch.finfo(dtype).eps, atol=0.0)
