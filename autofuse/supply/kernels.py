"""Kernels: from Plans, by the cheapest way there is: memory, disk, a compiler.

A kernel that was ever compiled on this machine is loaded at once. Another one is compiled where
`config.compile` says: "now", or in the background, and until it is there its chains run as the
eager ops they were recorded from. Nothing here is on the launch path.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from threading import get_ident

import torch

from .. import hooks
from ..errors import ColdKernelError, KernelError, warn_once
from ..inside import BusyError, inside, is_foreign, is_owned, patience
from ..kernel.rows import AnyPlan, source_of
from ..kernel.source import Source, difference, nearest
from ..lines import Position, shown, user_position
from ..progress import progress
from ..settings.config import config, watch
from .disk import DiskCache
from .load import Kernel, load, target_of
from .service import Job, Service, forget_service, service
from .toolchain import Built, key_of

Wanted = tuple[AnyPlan, torch.device]


class Request:
    """A kernel that is not there yet; hashed by identity."""

    __slots__ = ("asked", "begun", "device", "error", "key", "position", "source", "state",
                 "target", "wanted")  # fmt: skip

    def __init__(self, wanted: Wanted) -> None:
        plan, self.device = self.wanted = wanted
        self.target = target_of(self.device)
        self.source = source_of(plan, self.target)
        self.key = key_of(self.source, self.target)
        self.asked = 0  # chains that would have used it
        self.begun = time.perf_counter()  # when it was asked for
        self.position: Position | None = None  # where, if somebody listens
        self.state = "rare"  # then "queued", or "failed"; "refused" is a line's kernel too many
        self.error = ""


_kernels: dict[Wanted, Kernel] = {}
_requests: dict[Wanted, Request] = {}
_lock = threading.RLock()
_done = threading.Condition(_lock)
_news = 0
_queued: set[Request] = set()  # that are with the background compiler
_forbidden = 0  # `no_compile` blocks that are open
positions: dict[Position, list[Source]] = defaultdict(list)  # asked for, by user's line
on_news: list[Callable[[], None]] = []  # called whenever it is worth asking again, in any thread
on_evict: list[Callable[[], None]] = []  # called to let go of kernels where there are too many
counts: Counter[str] = Counter()  # kernels: compiled, loaded (from disk), found (in memory)


class Order:
    """The kernels that something needs, asked for again and again until they are there."""

    __slots__ = ("counted", "seen", "wanted")

    def __init__(self, plans: list[AnyPlan], device: torch.device, counted: bool = True) -> None:
        self.wanted = [(plan, device) for plan in plans]
        self.counted = counted  # among the kernels that a line of the program may ask for
        self.seen = -1  # `_news` when there was nothing left to ask for

    @property
    def quiet(self) -> bool:
        """Whether asking is of no use: 0.1 us; finding kernels by their Plans takes 10 and more."""
        return self.seen == _news or sys.is_finalizing()  # then nothing can be imported any more

    @property
    def refused(self) -> bool:
        """Whether the line that needs them has had its share of kernels."""
        return "refused" in self._states()

    def _states(self) -> list[str]:
        """Of the requests for those that are not there."""
        requests = map(_requests.get, self.wanted)
        return [request.state for request in requests if request is not None]

    def filled(self) -> list[Kernel] | None:
        """The kernels; None while some are not there, which are then asked for.

        Raises KernelError if one cannot be had, and ColdKernelError inside `no_compile`.
        """
        if self.quiet:
            return None
        now = _news
        look_up = _kernel_for if hooks.looked_up is None else _told
        try:
            found = [look_up(wanted, self.counted)[0] for wanted in self.wanted]
        except BusyError:
            return None
        ready = [kernel for kernel in found if kernel is not None]
        if len(ready) == len(found):
            return ready
        if all(state in ("queued", "refused") for state in self._states()):
            self.seen = now
        return None


def stir(*reason: object) -> None:
    """What was waited for may be there, or is to be had in another way; called without locks."""
    global _news
    _news += 1
    for tell in on_news:
        tell()


def news() -> int:
    """Another number whenever it is worth asking again."""
    return _news


def outstanding() -> int:
    """Kernels that are with the background compiler."""
    return len(_queued)


_WAIT_SECONDS = 5.0
_HIT, _SOFT, _HARD = "hit", "soft miss", "hard miss"


def _kernel_for(wanted: Wanted, counted: bool) -> tuple[Kernel | None, str]:
    """The kernel if it is to be had now; and where it was, see `hooks.looked_up`.

    Raises BusyError where another thread is at it, and this one has waited long enough: ask again.
    """
    ident, lock = get_ident(), _lock
    nested, owned = ident in inside, is_owned(lock)
    leave = int if owned else lock.release
    try:
        inside[ident] = True  # by no context manager, whose own steps may be interrupted
        if not (owned or lock.acquire(False) or lock.acquire(timeout=patience(_WAIT_SECONDS))):
            raise BusyError
        return _looked_up(wanted, counted)
    finally:
        try:
            leave()  # at once: an interrupt may have come before it was told whether it was taken
        except RuntimeError as error:
            if is_foreign(error):
                raise  # otherwise the lock was not taken
        finally:
            if not nested:
                inside.pop(ident, None)


def _looked_up(wanted: Wanted, counted: bool) -> tuple[Kernel | None, str]:
    """`_kernel_for` with the lock held."""
    kernel = _kernels.get(wanted)
    if kernel is not None:
        counts["found"] += 1
        return kernel, _HIT
    known = _requests.get(wanted)
    request = known or Request(wanted)
    binary = None if known else _cache().get(request.key)
    if binary is not None:
        return _publish(request, binary, built=False), _SOFT
    if _forbidden:
        raise _cold(request, "no_compile() is active")
    if not known:
        if len(_requests) >= 4 * config.max_kernels:
            for key, old in list(_requests.items()):  # a finalizer may look up others meanwhile
                if old not in _queued:
                    _requests.pop(key, None)
        _requests[wanted] = request
    return _advance(request, counted)


def _told(wanted: Wanted, counted: bool) -> tuple[Kernel | None, str]:
    """`_kernel_for`, and who looks is told how it went."""
    plan, device = wanted
    begun, outcome = time.perf_counter(), _HARD
    kernel, request = None, _requests.get(wanted)
    try:
        kernel, outcome = found = _kernel_for(wanted, counted)
        return found
    finally:
        now = time.perf_counter()
        source = source_of(plan, target_of(device)) if kernel is None else kernel.source
        asked = begun if request is None else request.begun
        tell = hooks.looked_up
        if tell is not None:
            if kernel is not None and outcome is not _HIT:
                tell(True, source, device, outcome, (now - asked) * 1e6)
            tell(False, source, device, outcome, (now - begun) * 1e6)


def _advance(request: Request, counted: bool) -> tuple[Kernel | None, str]:
    """The kernel of `request` if it is to be had now; otherwise see to it that it will be."""
    request.asked += 1
    if request.state == "failed":
        raise KernelError(request.error)
    if request.state == "refused":
        return None, _HARD
    compiler = _compiler(request.device)
    early = compiler is not None and request.asked < config.compile_after
    due = request.state == "rare" and not early
    if due and counted and _too_many(request):
        return None, _HARD
    if compiler is None:
        if capturing(request.device):
            raise _cold(request, "a CUDA graph is being captured")
        return _compile_now(request)
    if due:
        _submit(request, compiler)
    if capturing(request.device):
        warn_once(
            f"autofuse: a CUDA graph has captured {request.source.name} as eager ops, for "
            f"its kernel is not there yet. Run the chain {config.compile_after} times "
            "before the capture and call autofuse.wait()."
        )
    return None, _HARD


def _compiler(device: torch.device) -> Service | None:
    """What compiles for `device` in the background; None where this process does, at once."""
    mode = config.compile
    if mode == "auto":
        mode = "background" if device.type == "cuda" else "now"
    if mode == "now" or config.workers == 0:
        return None
    compiler = service(config.workers, _cache())
    if not compiler.unavailable:
        return compiler
    warn_once(f"autofuse: kernels are compiled in this process: {compiler.unavailable}")
    return None


def capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _compile_now(request: Request) -> tuple[Kernel, str]:
    from .build import build_once

    with progress(f"compiling {request.source.name}"):
        made = build_once(request.source, request.target, request.key, _cache())
    _say_unsaved(made)
    return _publish(request, made.binary, made.built), _HARD if made.built else _SOFT


def _say_unsaved(made: Built) -> None:
    """Say once why kernels do not stay on disk."""
    if made.unsaved:
        warn_once(f"autofuse: compiled kernels are not kept on disk: {made.unsaved}")


def _submit(request: Request, compiler: Service) -> None:
    queued = _queued
    done = partial(_deliver, request, queued)
    job = Job(request.source.to_json(), request.target, request.key, done)
    request.begun = time.perf_counter()
    request.position = None if hooks.looked_up is None else user_position()
    request.state = "queued"
    queued.add(request)
    try:
        compiler.submit(job)
    except BaseException:  # interrupted: asked for again next time
        request.state = "rare"
        queued.discard(request)
        raise


def _deliver(request: Request, queued: set[Request], answer: Built) -> None:
    """Take what the background compiler has made; in its thread. Whatever fails, `wait` returns."""
    kernel, error = None, answer.error
    if not error:
        try:
            kernel = load(answer.binary, request.source, request.device)
        except Exception as failure:
            error = f"{request.source.name}: {failure}"
    try:
        tell = hooks.looked_up
        if kernel is not None and tell is not None and queued is _queued:  # before `wait` returns
            outcome = _HARD if answer.built else _SOFT
            us = (time.perf_counter() - request.begun) * 1e6
            tell(True, request.source, request.device, outcome, us, request.position)
    finally:
        if _took(request, kernel, error, answer, queued):
            stir()
    _say_unsaved(answer)


def _took(
    request: Request, kernel: Kernel | None, error: str, answer: Built, queued: set[Request]
) -> bool:
    """Keep the kernel, or what became of it; False if it was forgotten meanwhile."""
    with _lock:
        if queued is not _queued:
            return False
        request.state, request.error = "failed", error or "no memory for it"
        try:
            if kernel is not None:
                _keep(request, kernel, answer.built)
            elif answer.refused:
                request.state = "rare"  # compiled in this process, when it is needed next
        finally:
            queued.discard(request)
            _done.notify_all()
    return True


def _publish(request: Request, binary: bytes, built: bool) -> Kernel:
    return _keep(request, load(binary, request.source, request.device), built)


def _keep(request: Request, kernel: Kernel, built: bool) -> Kernel:
    counts["compiled" if built else "loaded"] += 1
    if len(_kernels) >= config.max_kernels:
        _kernels.clear()  # unloaded unless somebody holds them; they come back from disk
        for forget in on_evict:
            forget()
    _kernels[request.wanted] = kernel
    _requests.pop(request.wanted, None)
    return kernel


@cache
def _cache() -> DiskCache:
    return DiskCache()


_cache()  # a bad setting is said at import


# --- kernels that keep changing ------------------------------------------------------------------


def _too_many(request: Request) -> bool:
    """Whether the line that needs this kernel has had its share, which refuses it."""
    position = user_position(in_file=True)
    if position is None:
        return False
    asked = positions[position]
    if request.source in asked[: config.max_kernels_per_line]:  # its compile was interrupted
        return False
    if len(asked) < config.max_kernels_per_line:
        asked.append(request.source)
        return False
    request.state = "refused"
    if len(asked) > config.max_kernels_per_line:
        return True
    asked.append(request.source)  # one more than there may be: the warning is out
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
    with progress(f"waiting for {outstanding()} kernels"), _done:
        return _done.wait_for(lambda: not _queued, timeout)


class no_compile:  # noqa: N801 - used like a function
    """Raise ColdKernelError where a kernel would have to be compiled; a context manager.

    For the whole process, so that the threads of a backward are covered.
    """

    def __enter__(self) -> None:
        global _forbidden
        with _lock:
            _forbidden += 1
        try:
            stir()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        global _forbidden
        with _lock:
            _forbidden -= 1


def _cold(request: Request, why: str) -> ColdKernelError:
    """What is raised for a kernel that may not be compiled."""
    source, where = request.source, shown(user_position())
    text = f"no kernel for {source.name}, which is needed at {where}, and {why}.\n"
    like = nearest(source, [kernel.source for kernel in kernels()])
    text += "Cause: it is neither in memory nor on disk"
    if like is not None:
        text += f"; the nearest known one is {like.name}, here: {difference(like, source)}"
    text += f".\nRun the chain {config.compile_after} times before and call autofuse.wait()."
    return ColdKernelError(text, source.text)


def kernels() -> list[Kernel]:
    """Every kernel loaded in this process."""
    return list(_kernels.values())


def clear_kernels() -> None:
    """Forget every kernel and every request, and what the background compiler is doing."""
    global _queued
    with _lock:
        _kernels.clear()
        _requests.clear()
        positions.clear()
        _queued = set()  # an answer to a request of the old one is dropped
        _cache.cache_clear()
        old = forget_service()
        _done.notify_all()
    stir()
    if old is not None:
        old.close()


def forget_threads() -> None:
    """After a fork: locks are free, and what the parent has asked for must be asked for again."""
    global _lock, _done, _queued
    _lock = threading.RLock()
    _done = threading.Condition(_lock)
    for request in _queued:
        request.state = "rare"
    _queued = set()
    old = forget_service()
    if old is not None:
        old.abandon()
    for name in ("autofuse.supply.build", "autofuse.kernel.llvm"):  # each may be there alone
        if name in sys.modules:
            sys.modules[name].forget_threads()
    stir()


watch(stir)
