"""Compilation: from Plans to Kernels, by the cheapest way there is: memory, disk, a compiler.

A kernel that was ever compiled on this machine is loaded at once. Another one is compiled where
`config.compile` says: "now", or in the background, and until it is there its chains run as the
eager ops they were recorded from. Nothing here is on the launch path.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .background import Answer, Job, forget_service, say_unsaved, service
from .cache import DiskCache
from .codegen import source_of
from .config import config, watch
from .errors import ColdKernelError, KernelError, warn_once
from .load import Module, load
from .plan import Plan
from .source import Parameters, Source, difference, nearest


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A compiled Plan, loaded on one device."""

    plan: Plan
    source: Source
    parameters: Parameters
    module: Module  # stays loaded as long as this is held

    @property
    def entry(self) -> Any:
        """A CUfunction on CUDA; a callable on the CPU."""
        return self.module.entry


class Request:
    """A kernel that is not there yet."""

    __slots__ = ("asked", "device", "error", "key", "plan", "source", "state")

    def __init__(self, plan: Plan, source: Source, key: str, device: torch.device) -> None:
        self.plan, self.source, self.key, self.device = plan, source, key, device
        self.asked = 0  # chains that would have used it
        self.state = "rare"  # then "queued", or "failed"; "refused" is a line's kernel too many
        self.error = ""


_kernels: dict[tuple[Plan, torch.device], Kernel | Request] = {}
_lock = threading.RLock()
_done = threading.Condition(_lock)
_news = 0
_queued = 0  # requests that are with the background compiler
_forbidden = 0  # `no_compile` blocks that are open
_positions: dict[tuple[str, int], list[Source]] = defaultdict(list)  # asked for, by user's line
_on_news: list[Callable[[], None]] = []
_on_evict: list[Callable[[], None]] = []
counts: Counter[str] = Counter()  # kernels: compiled, loaded (from disk), found (in memory)


class Order:
    """The kernels that something needs, asked for again and again until they are there."""

    __slots__ = ("asked", "device", "plans", "seen")

    def __init__(self, plans: list[Plan], device: torch.device) -> None:
        self.plans, self.device = plans, device
        self.asked = 0
        self.seen = -1  # `_news` when we last looked

    def filled(self) -> list[Kernel] | None:
        """The kernels; None while some are not there, which are then asked for.

        Raises KernelError if one cannot be had, and ColdKernelError inside `no_compile`.
        """
        if self.seen == _news and self.asked >= config.compile_after:
            return None  # 0.1 us; finding kernels by their Plans takes 10 and more
        self.seen = _news
        self.asked += 1
        found = [_kernel_for(plan, self.device) for plan in self.plans]
        ready = [kernel for kernel in found if kernel is not None]
        return ready if len(ready) == len(found) else None


def _stir(*reason: object) -> None:
    """What was waited for may be there, or is to be had in another way; called without locks."""
    global _news
    _news += 1
    for listener in _on_news:
        listener()


def news() -> int:
    """Another number whenever it is worth asking again."""
    return _news


def outstanding() -> int:
    """Kernels that are with the background compiler."""
    return _queued


def on_news(listener: Callable[[], None]) -> None:
    """Call `listener` whenever it is worth asking again, in any thread."""
    _on_news.append(listener)


def _kernel_for(plan: Plan, device: torch.device) -> Kernel | None:
    kernel = _kernels.get((plan, device))
    if isinstance(kernel, Kernel):
        counts["found"] += 1
        return kernel
    with _lock:
        request = _kernels.get((plan, device))
        if isinstance(request, Kernel):
            counts["found"] += 1
            return request
        if request is None:
            source = source_of(plan)
            request = Request(plan, source, key_of(source, device), device)
            binary = _cache().get(request.key)
            if binary is not None:
                counts["loaded"] += 1
                return _publish(request, binary)
            if _forbidden:
                raise ColdKernelError(_cold(request))
            _kernels[plan, device] = request
            if _too_many(request.source):
                request.state = "refused"
        elif _forbidden:
            raise ColdKernelError(_cold(request))
        return _advance(request)


def _advance(request: Request) -> Kernel | None:
    """The kernel of `request` if it is to be had now; otherwise see to it that it will be."""
    request.asked += 1
    if request.state == "failed":
        raise KernelError(request.error)
    if request.state == "refused":
        return None
    mode = config.compile
    if mode == "auto":
        mode = "background" if request.device.type == "cuda" else "now"
    if mode == "background" and config.workers > 0:
        compiler = service(config.workers, _cache())
        if not compiler.unavailable:
            if request.state == "rare" and request.asked >= config.compile_after:
                _submit(request)
            return None
        warn_once(f"autofuse: kernels are compiled in this process: {compiler.unavailable}")
    return _compile_now(request)


def _compile_now(request: Request) -> Kernel:
    from .build import build_once

    made = build_once(request.source, target_of(request.device), request.key, _cache())
    counts["compiled" if made.built else "loaded"] += 1
    if made.unsaved:
        say_unsaved(made.unsaved)
    return _publish(request, made.binary)


def _submit(request: Request) -> None:
    global _queued
    request.state = "queued"
    _queued += 1
    target = target_of(request.device)
    generation = _generation

    def done(answer: Answer) -> None:
        if generation is _generation:
            _deliver(request, answer)

    job = Job(request.source.to_json(), target, request.key, done)
    service(config.workers, _cache()).submit(job)


def _deliver(request: Request, answer: Answer) -> None:
    """Take what the background compiler has made; in its thread."""
    global _queued
    module = None
    if answer.refused:
        request.state = "rare"  # compiled in this process, when it is needed next
    elif answer.error:
        request.error = f"{request.source.name}: {answer.error}"
    else:
        try:
            module = load(answer.binary, request.source, request.device)
        except Exception as error:
            request.error = f"{request.source.name}: {error}"
    with _lock:
        _queued -= 1
        if module is not None:
            counts["compiled" if answer.built else "loaded"] += 1
            _keep(request, module)
        elif request.error:
            request.state = "failed"
        _done.notify_all()
    _stir()
    if answer.unsaved:
        say_unsaved(answer.unsaved)


def _publish(request: Request, binary: bytes) -> Kernel:
    return _keep(request, load(binary, request.source, request.device))


def _keep(request: Request, module: Module) -> Kernel:
    if len(_kernels) >= config.max_kernels:
        _evict()
    source = request.source
    kernel = Kernel(request.plan, source, Parameters.of(source), module)
    _kernels[request.plan, request.device] = kernel
    return kernel


def _evict() -> None:
    """Forget every kernel; those that nobody holds are unloaded, the others come back from disk."""
    for key in [key for key, kernel in _kernels.items() if isinstance(kernel, Kernel)]:
        del _kernels[key]
    for forget in _on_evict:
        forget()


def on_evict(forget: Callable[[], None]) -> None:
    """Call `forget` when there are too many kernels, to let go of those it holds."""
    _on_evict.append(forget)


# --- what a key is -------------------------------------------------------------------------------


def target_of(device: torch.device) -> str:
    """What `build` compiles for: sm_90, or cpu."""
    return _capability(device) if device.type == "cuda" else "cpu"


@cache
def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def key_of(source: Source, device: torch.device) -> str:
    """The name of a kernel on disk: what it computes, for what, and with which compilers."""
    facts = (source.to_json(), target_of(device), *_compilers(device.type))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


_PACKAGES = (
    "llvmlite", "numba", "numba-cuda", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit",
    "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc", "nvidia-nvvm-cu12",
    "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip
_GENERATOR = ("source", "polynomials", "targets", "lower", "emit", "build")


@cache
def _compilers(device_type: str) -> tuple[str, ...]:
    """What decides a binary besides its Source: our generator, the packages that compile, options.

    A CUDA toolkit that is no package is known by its place.
    """
    from importlib.metadata import PackageNotFoundError, version

    generator = hashlib.sha256()
    for name in _GENERATOR:
        generator.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    facts = [generator.hexdigest()]
    if device_type == "cpu":
        from .build import processor

        return (*facts, version("llvmlite"), *processor())
    for package in _PACKAGES:
        try:
            facts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    for name, value in sorted(os.environ.items()):
        if name in ("CUDA_HOME", "CUDA_PATH"):
            facts.append(f"{name}={os.path.realpath(value)}")
        elif name.startswith("NUMBA_"):
            facts.append(f"{name}={value}")
    return tuple(facts)


@cache
def _cache() -> DiskCache:
    return DiskCache()


_cache()  # a bad setting is said at import


# --- kernels that keep changing ------------------------------------------------------------------

_PACKAGE, _TORCH = (os.path.dirname(path) + os.sep for path in (__file__, torch.__file__))


def _position() -> tuple[str, int] | None:
    """File and line of the user's code that is running; None in a thread of torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, _TORCH, "<autofuse")):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def _too_many(source: Source) -> bool:
    """Whether the line that needs `source` has asked for its share of kernels before."""
    position = _position()
    if position is None:
        return False
    asked = _positions[position]
    if len(asked) < config.max_kernels_per_line:
        asked.append(source)
        return False
    if len(asked) > config.max_kernels_per_line:
        return True
    asked.append(source)  # one more than there may be: the warning is out
    name, line = position
    changes = [difference(a, b) for a, b in pairwise(asked[-9:])]
    most = max(reversed(changes), key=changes.count)
    warn_once(
        f"autofuse: {name}:{line} has asked for {len(asked) - 1} kernels, each for another chain; "
        f"new ones run as eager ops there. What keeps changing: {most}. "
        "Raise autofuse.config.max_kernels_per_line if that is meant."
    )
    return True


# --- the public side -----------------------------------------------------------------------------


def wait(timeout: float | None = None) -> bool:
    """Block until every kernel that was asked for is there; False if `timeout` (s) ran out first.

    Kernels are asked for when a chain has run `config.compile_after` times.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with _done:
        while _queued:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            _done.wait(left)
    return True


class no_compile:  # noqa: N801 - used like a function
    """Raise ColdKernelError where a kernel would have to be compiled; a context manager.

    For the whole process, so that the threads of a backward are covered.
    """

    def __enter__(self) -> None:
        global _forbidden
        with _lock:
            _forbidden += 1
        _stir()

    def __exit__(self, *exc: object) -> None:
        global _forbidden
        with _lock:
            _forbidden -= 1


def _cold(request: Request) -> str:
    """What is said of a kernel that may not be compiled."""
    known = [kernel.source for kernel in kernels()]
    like = nearest(request.source, known)
    text = f"no kernel for {request.source.name} in memory or on disk, and no_compile() is active."
    if like is not None:
        text += f" The nearest known one is {like.name}; here: {difference(like, request.source)}."
    return (
        f"{text} Run the chain {config.compile_after} times before and call autofuse.wait()."
        f"\n{request.source.text}"
    )


def kernels() -> list[Kernel]:
    """Every kernel loaded in this process."""
    return [kernel for kernel in list(_kernels.values()) if isinstance(kernel, Kernel)]


def clear_kernels() -> None:
    """Forget every kernel and every request, and what the background compiler is doing."""
    global _queued, _generation
    with _lock:
        _generation = object()
        _kernels.clear()
        _positions.clear()
        _queued = 0
        _done.notify_all()
    _stir()
    forget_service()
    _cache.cache_clear()


_generation = object()  # of requests; answers to those of an earlier one are dropped


def forget_threads() -> None:
    """After a fork: locks are free, and what the parent has asked for must be asked for again."""
    global _lock, _done, _queued, _generation
    _lock = threading.RLock()
    _done = threading.Condition(_lock)
    _queued, _generation = 0, object()
    _stir()
    for request in _requests():
        if request.state == "queued":
            request.state = "rare"
    forget_service(abandoned=True)


watch(_stir)


def _requests() -> Iterator[Request]:
    return (request for request in list(_kernels.values()) if isinstance(request, Request))
