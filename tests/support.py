"""What the tests share: devices, inputs, and the comparison with eager PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import autofuse
from autofuse.dispatch.nested import mapped
from autofuse.dispatch.protocol import HANDLERS
from autofuse.hot import native
from autofuse.kernel.plan import Piece, make_pieces
from autofuse.lines import OURS
from autofuse.ops import autocast
from autofuse.program.program import Output, Program
from autofuse.record import costs, origins
from autofuse.record.modes import forget_all
from autofuse.run import cpu
from autofuse.torch_private import AUTOCASTS, ExcludedKey, NoTorchFunction

HAS_CUDA = torch.cuda.is_available()
NO_GPU = "needs a CUDA device; torch.cuda.is_available() is False here"
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason=NO_GPU)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]

# products of axes that do not meet in the code, whole: on a GPU, or where this is set
WIDE = bool(os.environ.get("AUTOFUSE_TEST_WIDE"))

NATIVE = [native.active()]  # what `config.native` may be: what AUTOFUSE_NATIVE says, or both
if NATIVE[0] and "AUTOFUSE_NATIVE" not in os.environ:
    NATIVE.insert(0, False)
TIERS = ["kernels", "short", "waiting"]  # see the fixture

SAVED_US = {code: dict(saved) for code, saved in costs.SAVED_US.items()}  # before tests have theirs

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -2.5, 1e-3, 7.25, 88.0, -88.0, 1e30, -1e30, 1e-41,
           float("inf"), float("-inf"), float("nan"))  # fmt: skip


def failable_launches(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], set[int]]:
    """What has been launched since the list was cleared, and the numbers of those that fail."""
    calls: list[int] = []
    failing: set[int] = set()

    def first(entry: int) -> int:
        calls.append(entry)
        return len(calls) in failing

    before_launches(monkeypatch, first)
    return calls, failing


def around_runs(monkeypatch: pytest.MonkeyPatch, around: Callable[[Any, Any], None]) -> None:
    """Let `around`, of its run and a chain, stand for each run of kernels on the CPU, by Python."""
    bind = cpu.CpuRunner.bind

    def bound(self: Any) -> Any:
        bind(self)
        run = self.run
        self.run, self.words = (lambda chain: around(run, chain)), None
        return self

    monkeypatch.setattr(cpu.CpuRunner, "bind", bound)
    forget_all("test")


def before_launches(monkeypatch: pytest.MonkeyPatch, first: Callable[[int], int]) -> None:
    """Let `first` run before each launch on the CPU, of an entry; where it gives 1, that fails."""
    words = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 11)
    kernels: list[Any] = []

    @words
    def launch(*args: int) -> int:
        return first(args[0]) or words(kernels[0].launch)(*args)

    standing: Any = cpu.LAUNCH(ctypes.cast(launch, ctypes.c_void_p).value)
    standing.calls = launch

    def launcher(kernel: Any) -> Any:
        kernels.append(kernel)
        return standing

    monkeypatch.setattr(cpu, "launcher", launcher)
    forget_all("test")


def skip_unless_wide(device: str) -> None:
    """In a test of a product that is swept axis by axis elsewhere, or here beside this."""
    if device == "cpu" and not WIDE:
        pytest.skip("the whole product runs on a GPU, or where AUTOFUSE_TEST_WIDE is set")


def random_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    wild: bool = False,
) -> torch.Tensor:
    """Values of every sign and size; with `wild` any bit pattern of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    if not dtype.is_floating_point:
        low, high = (0, 100) if dtype is torch.uint8 else (-50, 50)
        if wild:
            info = torch.iinfo(dtype)
            low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)
    if wild:
        bits = _BITS[dtype.itemsize]
        info = torch.iinfo(bits)
        low, high = (info.min, info.max) if bits is not torch.int64 else (-(2**62), 2**62)
        raw = torch.randint(low, high, shape, generator=generator).to(bits).view(dtype)
        flat = raw.view(-1)
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        flat[: min(len(special), flat.numel())] = special[: flat.numel()]
        return raw.to(device)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    return values.to(dtype).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal bit patterns (on the CPU equal values), or both NaN."""
    if not a.dtype.is_floating_point:
        return a == b
    if a.device.type == "cpu":  # torch's own vector body and scalar tail differ in zeros' signs
        return (a == b) | (a.isnan() & b.isnan())
    bits = _BITS[a.dtype.itemsize]
    a, b = a.contiguous(), b.contiguous()
    return (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())


def assert_same(got: Any, want: Any, rtol: float | None, what: str = "") -> None:
    """Equal values (bit for bit unless rtol is given), dtype, shape, strides; containers too."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: {type(got)} is not a tensor"
        got, want = autofuse.unwrap(got), autofuse.unwrap(want)
        assert got.dtype is want.dtype, f"{what}: dtype {got.dtype} is not {want.dtype}"
        assert got.shape == want.shape, f"{what}: shape {got.shape} is not {want.shape}"
        assert got.stride() == want.stride(), f"{what}: stride {got.stride()} not {want.stride()}"
        assert got.device == want.device
        assert got.requires_grad == want.requires_grad
        got, want = got.detach(), want.detach()
        if rtol is not None and got.dtype.is_floating_point:
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True)
            return
        same = same_bits(got, want)
        if not bool(same.all()):
            where = (~same).nonzero()[0].tolist()
            raise AssertionError(
                f"{what}: {int((~same).sum())} of {same.numel()} elements differ, "
                f"first at {where}: "
                f"{got[tuple(where)].item()!r} is not {want[tuple(where)].item()!r}"
            )
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, rtol, what)
    else:
        assert got == want, f"{what}: {got!r} is not {want!r}"


def kernels_made() -> int:
    """Kernels that were not in memory since the last reset of the counters."""
    stats = autofuse.stats()
    return stats.kernels_compiled + stats.kernels_loaded


def pieces_of(program: Program, device: str, *steps: int) -> tuple[Piece, ...]:
    """The Pieces of `program` where `steps` have memory of their own."""
    return make_pieces(replace(program, outputs=tuple(map(Output, steps))), device)


def copied(value: Any) -> Any:
    """An independent copy with the same strides."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n)
        base = torch.empty(max(size, 0), dtype=t.dtype, device=t.device)
        out = base.as_strided(t.shape, t.stride())
        if t.numel():
            base.copy_(t.as_strided((size,), (1,)))
        return out

    return mapped(value, copy)


def outcome(fn: Callable[..., Any], args: Any) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, error)."""
    try:
        result = fn(*args)
        autofuse.materialize(result)
        return result, None
    except Exception as error:  # compared with eager's by the caller
        return None, error


def assert_told_alike(program: Callable[..., Any], x: torch.Tensor) -> None:
    """`program`, given a leaf as itself and wrapped, says what eager's says, or raises as that."""

    def told(wrap: Callable[[Any], Any]) -> Any:
        leaf = x.detach().clone().requires_grad_()
        try:
            said = program(wrap(leaf), leaf)
        except RuntimeError as error:
            return str(error)
        return [autofuse.unwrap(one) if isinstance(one, torch.Tensor) else one for one in said]

    want = told(lambda leaf: leaf)
    for _ in range(2):
        assert_same(told(autofuse.wrap), want, None)


def judge_results_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of eager ops become plain and wrapped again every few, whatever bits that changes."""
    for name, count in {"FIRST": 3, "ENOUGH": 1, "PAUSE": 1, "GROWTH": 1}.items():
        monkeypatch.setattr(origins, name, count)
    monkeypatch.setattr(origins, "is_inexact", lambda *facts: False)
    origins.forget()


def is_called_on(device: str, function: Callable[..., Any]) -> bool:
    """Whether sweeps over all functions of torch call `function` with whatever there is.

    Some of those that CUDA runs check values on the GPU, by asserts that end its use by the
    process, or end the process (quantile, bernoulli, what is fbgemm's). They only pass on, as all
    of the same handler do: that is swept on the CPU.
    """
    handler = HANDLERS.get(function)
    return device == "cpu" or getattr(handler, "__wrapped__", None) is not function


def write_unseen(plain: torch.Tensor) -> None:
    """A write to a vector of plain memory that no hook of autofuse is told of."""
    ones = torch.ones(*plain.shape, 4, device=plain.device)
    torch.ops.aten.linalg_vector_norm.out(ones, 2, [1], False, out=plain)


def elsewhere(work: Callable[[], object]) -> Exception | None:
    """Run `work` in another thread; the error it ended with, if any."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # the caller's to judge
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def assert_same_as_eager(
    fn: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    fused: bool = False,
    arguments: bool = True,
) -> None:
    """`fn` of wrapped tensors does what it does of plain ones: results, mutations, errors.

    rtol: relative tolerance on the CPU, where transcendental functions are not torch's; on CUDA
        every bit counts. fused: also demand that every op was recorded. arguments: compare what
        `fn` did to its arguments.
    """
    plain, mirror = copied(args), copied(args)
    wrapped = mapped(mirror, autofuse.wrap)
    want, error = outcome(fn, plain)
    before = autofuse.stats().ops_eager
    got, failure = outcome(fn, wrapped)
    if error is not None:
        assert type(failure) is type(error), f"{failure!r} is not {error!r}"
        assert str(failure) == str(error)
        return
    if failure is not None:
        raise failure
    if fused:
        ran = {k: n for k, n in autofuse.stats().eager_ops.items()}
        assert autofuse.stats().ops_eager == before, f"ran eagerly: {ran}"
    on_cuda = any(t.is_cuda for t in plain if isinstance(t, torch.Tensor))
    assert_same(got, want, None if on_cuda else rtol)
    results = [x if isinstance(x, tuple) else (x,) for x in (got, want)]
    for ours, theirs in zip(*results, strict=True):
        if isinstance(theirs, torch.Tensor) and not theirs.is_inference():
            assert ours._version == theirs._version, "version counter of a result"
    for ours, theirs in zip(mirror, plain, strict=True) if arguments else ():
        if isinstance(ours, torch.Tensor):
            assert_same(ours, theirs, None if on_cuda else rtol, "argument")
            assert ours._version == theirs._version, "version counter of an argument"


# --- autocast as on CUDA ---------------------------------------------------------------------

# of torch's kernels for autocast on CUDA those that make operands float32, the widest of their
# dtypes, and results float32: of the table's ops, and of others that stand between chains
_FLOAT32 = {"softmax", "layer_norm", "group_norm", "log_softmax", "cumprod", "norm", "dist",
            "logsumexp"}  # fmt: skip
_WIDEST = {"addcdiv", "addcmul", "atan2", "dot", "cross"}
_SUMS = {"sum", "cumsum", "linalg_vector_norm"}


def _cast_to(x: Any, dtype: torch.dtype) -> Any:
    half = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return torch.Tensor.to(x, dtype) if half else x  # not by a handler: this stands for C++


def _casting(name: str) -> Callable[..., Any]:
    """What autocast on CUDA does for the op of this name, for autocast on the CPU."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with NoTorchFunction(), ExcludedKey(AUTOCASTS[0], True):
            dtype = torch.float32
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if packet in _WIDEST:
                lower = torch.get_autocast_dtype("cpu")
                dtypes = {x.dtype for x in tensors if x.is_floating_point()}
                if not dtypes <= {lower, torch.float32, torch.float64}:
                    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
                dtype = torch.float32 if torch.float32 in dtypes else lower
            elif packet in _SUMS:
                half = tensors[0].dtype in (torch.float16, torch.bfloat16)
                if kwargs.get("dtype") is None and half:
                    kwargs["dtype"] = dtype
                return op(*args, **kwargs)
            args = tuple([_cast_to(x, dtype) for x in args])
            return op(*args, **{key: _cast_to(x, dtype) for key, x in kwargs.items()})

    return kernel


def compared_about(monkeypatch: Any, rtol: float, count: int | None) -> list[torch.Tensor]:
    """Have `verify` compare by a tolerance, as another order gives it; what it has compared.

    count: of the tensors of a program, where it gives several.
    """
    seen: list[torch.Tensor] = []

    def differing(got: Any, want: Any) -> int:
        if count is None:
            got, want = (got,), (want,)
        else:
            assert len(got) == len(want) == count
        for a, b in zip(got, want, strict=True):
            assert (a is None) is (b is None)
            if a is not None:
                assert_same(a, b, rtol)
                seen.append(a)
        return 0

    monkeypatch.setattr("autofuse.cli.verify.differing", differing)
    return seen


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Autocast casts on the CPU as it does on CUDA: in eager ops, in backward, in chains."""
    lists = [vars(autocast)[name] for name in ("FLOAT32", "ONE_DTYPE")]
    own = [table["cpu"] for table in lists]
    packets = (lists[0]["cuda"] - own[0]) | _FLOAT32 | _WIDEST | _SUMS
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in torch._C._dispatch_get_all_op_names():
            short = name.removeprefix("aten::")
            if (
                short.partition(".")[0] in packets
                and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
                and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
            ):
                library.impl(short, _casting(name), "AutocastCPU")
        for table in lists:
            table["cpu"] = table["cuda"]
        forget_all("test")
        yield
    finally:
        library._destroy()
        for table, before in zip(lists, own, strict=True):
            table["cpu"] = before
        forget_all("test")


def functions_called(program):
    """Names of the Python functions of autofuse that run in `program()`."""
    names = []

    def profile(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS):
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)
    return names


def let_fail(backward, fail):
    """Let `fail` stand for each Answer that `backward` gives at once."""
    for key, (_, *lies) in list(backward.layouts.items()):
        backward.layouts[key] = fail, *lies
    backward.usual = tuple((fail, *lies) for _, *lies in backward.usual)
