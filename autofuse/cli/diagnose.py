"""What a bug report needs: versions, devices, the disk cache, settings, and a self-test.

Reads everything, imported by no stage; nothing here runs unless it is asked for.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..api import materialize, wrap
from ..chain import verified
from ..hot import native
from ..kernel.cuda import assemble, capability_of
from ..observe.counters import stats
from ..settings.config import SETTINGS, changed, config
from ..supply.disk import DiskCache
from ..supply.load import target_of
from ..supply.service import Service

OPS = 5  # of the chain of the self-test
SHAPE = (64, 256)
_Chain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A chain of `OPS` ops against eager, with the default settings, compiled in this process."""

    device: str
    failure: str = ""  # what went wrong; the figures are then 0
    record_us: float = 0.0  # per op
    flush_us: float = 0.0  # allocation and launch; on the CPU with the kernel's run
    eager_us: float = 0.0  # the chain


def facts() -> Iterator[tuple[str, str]]:
    """Everything but the self-test, as (name, text); the compiler's answer takes 2 s.

    Raises ValueError if a setting of the environment is not valid.
    """
    for name in ("autofuse", "torch", "numba", "numba-cuda"):
        yield name, _version(name)
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    target = "sm_80"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            own = target_of(torch.device("cuda", index))
            yield f"GPU {index}", f"{torch.cuda.get_device_name(index)}, {own}"
            yield f"reductions on GPU {index}", reductions(torch.device("cuda", index))
        target = target_of(torch.device("cuda", torch.cuda.current_device()))
        yield "driver", f"{_driver()}; torch is made for CUDA {torch.version.cuda}"
    else:
        yield "GPU", "none: torch.cuda.is_available() is False"
    yield "CUDA target", cuda_target(target)
    yield "machine code", "in use" if native.active() else native.absent or "switched off"
    cache = DiskCache()
    why = Service(1, cache).trial()
    yield "background compiler", f"does not start: {why}" if why else "starts"
    yield "cache", str(cache.directory or "none: no home directory is known")
    yield "kept there", _kept(cache)
    settings = [f"{variable}={text}" for variable, text in changed(os.environ).items()]
    yield "settings", " ".join(settings) or "the defaults"


def reductions(device: torch.device) -> str:
    """Whether those on a GPU are fused, and from when on, or why not."""
    if not config.reductions:
        return "eager: AUTOFUSE_REDUCTIONS is 0"
    why = verified.refusal(device)
    if why or verified.is_trusted(device):
        return f"eager: {why}" if why else "fused"
    return "fused, each kernel once it was compared; `python -m autofuse verify` compares all"


def _version(package: str) -> str:
    if package == "autofuse":
        from .. import __version__

        return f"{__version__} in {Path(__file__).parents[1]}"
    if package == "torch":
        return torch.__version__  # with its build, which the package's may lack
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known, nvidia-smi failed ({type(error).__name__})"
    return done.stdout.split("\n")[0].strip()


def _nothing() -> None:
    """The smallest kernel there is."""


def cuda_target(target: str) -> str:
    """Whether numba compiles for CUDA, tried out, and where its target is; or why it does not."""
    try:
        from numba import cuda

        ptx, _ = cuda.compile_ptx(_nothing, (), cc=capability_of(target))
        assemble(ptx, target)
    except Exception as error:  # whatever is missing or does not fit is the answer
        return f"not usable: {type(error).__name__}: {error}"
    return f"compiles for {target}; in {Path(cuda.__file__).parent}"


def _kept(cache: DiskCache) -> str:
    if why := cache.refusal():
        return f"nothing: {why}"
    if not cache.maxsize:
        return "nothing: AUTOFUSE_CACHE_MAXSIZE is 0"
    sizes = [entry.nbytes for entry in cache.entries()]
    return f"{len(sizes)} kernels, {sum(sizes)} of at most {cache.maxsize} bytes"


def self_test(device: str, seconds: float = 1.0) -> SelfTest:
    """Run the chain eagerly and fused: compare the bits, measure for about `seconds`."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SHAPE, generator=generator).to(device) for _ in range(2))
    chain = _chain_cuda if device == "cuda" else _chain_cpu
    try:
        with _defaults(compile="now"), torch.no_grad():
            if failure := _compare(chain, x, y):
                return SelfTest(device, failure)
            return SelfTest(device, "", *_measure(chain, x, y, seconds))
    except Exception as error:  # the report is about whatever goes wrong
        return SelfTest(device, f"{type(error).__name__}: {error}")


def _chain_cuda(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (-(x.sigmoid() * y + x)).tanh()


def _chain_cpu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (-(x.relu() * y + x)).abs()  # ops that have eager's bits there, too


@contextmanager
def _defaults(**others: Any) -> Iterator[None]:
    before = dict(vars(config))
    try:
        for setting in SETTINGS:
            if setting.field:
                setattr(config, setting.name, others.get(setting.name, setting.default))
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _compare(chain: _Chain, x: torch.Tensor, y: torch.Tensor) -> str:
    before = stats()
    got = materialize(chain(wrap(x), wrap(y)))
    after = stats()
    recorded = after.ops_recorded - before.ops_recorded
    if recorded != OPS:
        return f"{recorded} of {OPS} ops were recorded"
    if after.replays != before.replays or after.kernels_launched == before.kernels_launched:
        return "the chain ran as eager ops, because its kernel failed; the reason is on stderr"
    bits = [value.view(torch.int32) for value in (got, chain(x, y))]
    differ = int((bits[0] != bits[1]).sum())
    return f"{differ} of {x.numel()} elements have other bits than eager's" if differ else ""


def _measure(
    chain: _Chain, x: torch.Tensor, y: torch.Tensor, seconds: float
) -> tuple[float, float, float]:
    """us per op recorded, per flush, and of the eager chain: medians."""
    clock, a, b = time.perf_counter, wrap(x), wrap(y)
    recording, flushing, eager = [], [], []
    deadline = clock() + seconds
    while clock() < deadline or len(eager) < 20:
        start = clock()
        value = chain(a, b)
        recorded = clock()
        materialize(value)
        flushed = clock()
        chain(x, y)
        eager.append(clock() - flushed)
        recording.append(recorded - start)
        flushing.append(flushed - recorded)
        del value
    if x.is_cuda:
        torch.cuda.synchronize()
    record, flush, plain = (statistics.median(s) * 1e6 for s in (recording, flushing, eager))
    return record / OPS, flush, plain
