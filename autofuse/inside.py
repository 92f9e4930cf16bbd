"""Threads that others may have to wait for: they wait for nobody themselves.

A thread is inside while it flushes a chain, compiles a kernel, or works for one that does. What
then runs in the middle of it must not wait for another such thread, which may be waiting for this.
Nor must what runs in the middle of a backward: on CUDA that may be a thread of torch's, and the one
that called it waits, whatever it is inside of; nor what runs in a thread of `in_another_thread`.
What no signal handler may interrupt runs in another thread (`in_another_thread`), and what
interrupts all the same is told from failures of our own (`is_foreign`). Whether others wait
themselves, and so are in the middle of nothing of torch's, their frames say (`others_wait`).
"""

from __future__ import annotations

import atexit
import inspect
import signal
import sys
from _signal import getsignal  # type: ignore[import-not-found]  # of CPython's C
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import RLock, _active, get_ident
from traceback import clear_frames
from types import FrameType
from typing import Any, TypeVar

from . import hooks

_R = TypeVar("_R")

inside: dict[int, bool] = {}  # the idents of these threads; in one step of Python each


@contextmanager
def being_inside() -> Iterator[None]:
    """Count this thread as one that is inside."""
    ident = get_ident()
    already = ident in inside
    try:
        inside[ident] = True
        yield
    finally:
        if not already:
            inside.pop(ident, None)


is_owned = type(RLock())._is_owned  # type: ignore[attr-defined] - by this thread


def patience(seconds: float) -> float:
    """How long this thread may wait for one that is inside: `seconds`, or not at all."""
    from torch._C import _current_graph_task_id  # type: ignore[attr-defined] - not in workers

    return seconds if get_ident() not in helping and _current_graph_task_id() < 0 else 0.0


@contextmanager
def patient(lock: Any, seconds: float = 2.0) -> Iterator[None]:
    """Hold `lock` if it is to be had in that time: who has it may wait for this thread."""
    taken = lock.acquire(timeout=patience(seconds))
    try:
        yield
    finally:
        if taken:
            lock.release()


# threads of autofuse's own, which know no tensor of the program's
serving: dict[int, bool] = {}
threads: dict[int, Any] = _active  # all that Python has begun and knows by name
helping: dict[int, bool] = {}  # threads of `in_another_thread`, whose callers hold locks meanwhile
_running: set[LockType] = set()  # taken while such a thread runs


@atexit.register
def _await_threads() -> None:
    """Python ends threads where they are, which C++ takes for an error."""
    for done in list(_running):
        done.acquire(timeout=10.0)


# where threads wait that have something to do now and then, in C: functions of Python that call
# nothing given to them, so that they are in the middle of nothing else
_WAITS = {
    "threading": ("Condition.wait", "Thread._wait_for_tstate_lock", "Thread.join"),
    "selectors": ("SelectSelector.select", "PollSelector.select", "EpollSelector.select"),
    "socket": ("socket.accept", "SocketIO.readinto"),
    "subprocess": ("Popen._try_wait",),
    "concurrent.futures.thread": ("_worker",),
    "multiprocessing.connection": ("Connection._recv",),
    "torch._inductor.compile_worker.subproc_pool": ("_recv_msg",),
    "torch._inductor.compile_worker.timer": ("Timer.check",),
}
_THREADED = ("torch.utils.data.", "torch._inductor.", "tqdm.")  # packages with such threads
# by the ident of a thread that has looked: whether all others waited, since a tensor was last lent.
# Whatever they do afterwards with one that is lent they do with a wrapped tensor, where it is seen;
# so does a thread that begins afterwards.
others_waited: dict[int, bool] = {}


def others_wait() -> bool:
    """Whether no thread but this can be in the middle of C with a tensor that is lent, as a plain
    one. They are looked at once for all that is lent, which takes 1 us and 1 more for each."""
    own = get_ident()
    if own not in others_waited:
        _look(own)
    return others_waited.get(own, False)


def _look(own: int) -> None:
    others_waited[own] = others_waited[~own] = False
    if all(
        ident == own or ident in serving or _waits(frame)
        for ident, frame in sys._current_frames().items()
    ):
        others_waited[own] = True
    if others_waited.pop(~own, None) is None:  # something has been lent meanwhile
        others_waited.pop(own, None)


def _waits(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits in C, and most likely not for torch's C,
    which may have called what waits: an `__index__`, or a function that another one has given it.
    """
    name: Any = frame.f_globals.get("__name__")
    for path in _WAITS.get(name, ()) if isinstance(name, str) else ():
        found: Any = sys.modules.get(name)
        for part in path.split("."):
            found = getattr(found, part, None)
        if getattr(found, "__code__", None) is frame.f_code:
            if frame.f_locals.get("initializer") is not None:  # which `_worker` may call
                return False
            names = [*islice(_names_of_others(frame), 2)]
            return not names or (len(names) == 1 and not names[0].startswith("__"))
    return False


def _names_of_others(frame: FrameType | None) -> Iterator[str]:
    """The functions in a thread that are of neither the standard library nor torch's own threads,
    from the innermost on."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if not isinstance(name, str) or not (
            name.partition(".")[0] in sys.stdlib_module_names or name.startswith(_THREADED)
        ):
            yield frame.f_code.co_name
        frame = frame.f_back


class BusyError(Exception):
    """What was waited for did not come."""


def in_another_thread(function: Callable[[], _R], seconds: float | None = None) -> _R:
    """Call `function` in a thread of its own, in the middle of which no signal handler runs.

    seconds: how long to wait for it; then, and when a handler of this thread raises, it goes on
    unheard, and this raises BusyError, or what the handler raised. None: however long it takes.
    """
    made: list[_R] = []
    errors: list[BaseException] = []
    over: list[bool] = []
    done = allocate_lock()
    done.acquire()

    def run() -> None:
        ident = get_ident()
        try:
            try:
                helping[ident] = True
                with being_inside():
                    made.append(function())
            finally:  # not when Python is ending too, which stops threads where they are
                hooks.thread_ends()
        except BaseException as error:  # raised below, in the thread that asked
            if seconds is not None:
                clear_frames(error.__traceback__)  # what they hold goes in this thread
            errors.append(error)
        finally:
            helping.pop(ident, None)
            threads.pop(ident, None)  # where something in it, such as a log, has asked for its name
            over.append(True)
            _running.discard(done)
            done.release()

    interrupt = None
    try:
        _running.add(done)
    except BaseException:
        _running.discard(done)
        raise
    try:
        start_new_thread(run, ())  # 0.1 ms; an interrupt would spoil one of `threading`
    except BaseException as error:
        if not is_foreign(error):  # Python is ending, or there are no more threads
            _running.discard(done)
            return function()
        if seconds is not None:
            raise
        interrupt = error
    while not over:
        try:
            ended = done.acquire(timeout=-1 if seconds is None else seconds)
            if not (ended or over):
                raise BusyError(f"not done after {seconds:.0f} s")
        except BaseException as error:
            if seconds is not None:
                raise
            interrupt = error
    if errors or interrupt is not None:
        raise errors.pop() if errors else interrupt  # type: ignore[misc]
    return made.pop()


_SIGNALS = signal.valid_signals()
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_foreign(error: BaseException) -> bool:
    """Whether `error` is not of what it has ended: an interrupt, or from a signal handler."""
    if not isinstance(error, Exception):
        return True
    # C's: `signal.getsignal` makes enums of numbers, 60 us for all of them (CPython 3.11, 3.12)
    handlers = {getattr(handler, "__code__", None) for handler in map(getsignal, _SIGNALS)}
    # not of the frame that has caught it, whose names, once looked at, would stay beside it: up to
    # Python 3.12 `f_locals` is kept with its frame, and among them is the error itself; there is no
    # frame where C has raised what machine code has caught
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in handlers:
            return True
        # of another kind, or no handler any more: it was given the frame that it interrupts
        if frame.f_back is not None and any(x is frame.f_back for x in _given_to(frame)):
            return True
        trace = trace.tb_next
    return False


def _given_to(frame: FrameType) -> Iterator[Any]:
    """The positional arguments of a function, of its names the only ones that are looked at.

    Others may lie elsewhere by then: of a generator, whose body is no handler's (CPython's
    gh-125723), and of comprehensions, which 3.13.0 takes for cells (gh-128396).
    """
    code = frame.f_code
    if code.co_flags & _GENERATES:
        return
    named, values = code.co_argcount, frame.f_locals
    yield from map(values.get, code.co_varnames[:named])
    if code.co_flags & inspect.CO_VARARGS:
        more = values.get(code.co_varnames[named + code.co_kwonlyargcount])
        yield from more if type(more) is tuple else ()  # it may be another by now


def whatever_interrupts(step: Callable[[], None]) -> None:
    """Call `step` again until it ends, and then raise what has interrupted it last."""
    interrupt = None
    while True:
        try:
            step()
            break
        except BaseException as error:
            if not is_foreign(error):
                raise
            interrupt = error
    if interrupt is not None:
        raise interrupt
