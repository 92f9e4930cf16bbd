"""Modes: when recording stops and starts again, and what is then forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch

from .. import hooks
from ..chain.claims import begun, using, writing
from ..chain.liveness import DEAD, counts_of
from ..chain.state import OwnRecorders, Recorder, all_recorders, make_current, this_thread
from ..inside import helping, inside, is_owned, serving, whatever_interrupts
from ..settings.config import config, watch
from ..supply import kernels as compiling
from .flush import flush, flush_all


def wake(*reason: object) -> None:
    """Let every recorder that rests record again."""
    for recorder in all_recorders:
        if recorder.resting:
            recorder.resting = False
            renew(recorder, "wake")


def renew(recorder: Recorder, reason: str) -> None:
    """Flush, and start an empty chain under the modes of this moment."""
    flush(recorder, reason)
    while not recorder.open():  # something was recorded in the middle
        flush(recorder, reason)


def end(recorder: Recorder) -> None:
    """Its thread has gone: only values that somebody holds stay pending.

    They keep their recorder; whoever needs one first flushes it, as any other thread's.
    """
    recorder.ended = True
    recorder.thread = -1  # its number is used again; a value of it is another thread's now
    taken = False
    try:
        taken = recorder.acquire(blocking=False)
        if taken:  # else somebody flushes it; a fork may have lost who
            if recorder.chain and max(counts_of(recorder.chain)) <= DEAD:
                flush(recorder, "end of a thread")
            recorder.leave()
    finally:
        if taken:
            recorder.release()


def regrade() -> None:
    """After a change of grad mode: what was recorded before keeps the mode it was recorded in."""
    for recorder in list(this_thread.recorders.values()):
        if recorder.grad is not torch.is_grad_enabled():
            renew(recorder, "grad mode")


def leave_thread() -> None:
    """End this thread's recorders now: it is about to end itself."""
    make_current(None)
    this_thread.recorders = OwnRecorders()


def close_thread(reason: str) -> None:
    """Record nothing in this thread until the matching `reopen_thread`."""
    mine = this_thread.__dict__  # of which each attribute of a `local` takes 0.15 us
    mine["closed"] = mine.get("closed", 0) + 1
    try:
        reopen(reason, True)
    except BaseException:  # nothing has changed, for the recorders before it neither
        this_thread.closed -= 1
        for recorder in list(this_thread.recorders.values()):
            if recorder.off is not (this_thread.closed > 0) and not recorder.chain:
                recorder.off = this_thread.closed > 0
                recorder.open()
        raise


def run_closed(reason: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `run` where this thread records nothing; however that ends, it is as it was before."""
    mine = this_thread.__dict__
    before = mine.get("closed", 0)
    try:
        close_thread(reason)
        return run(*args, **kwargs)
    finally:
        mine["closed"] = before  # no Python runs before that
        try:
            end_closed()
        except BaseException:  # an interrupt may come before `whatever_interrupts` has begun
            whatever_interrupts(partial(reopen, "reopen"))
            raise


def end_closed() -> None:
    """Go on as `closed` says, which has changed; to be repeated after an interrupt."""
    reopen("reopen", True)


def reopen_thread() -> None:
    """Undo one `close_thread`; torch also ends levels of torch.func that have failed to begin."""
    if not this_thread.closed:
        return
    this_thread.closed -= 1
    reopen("reopen", True)


def look_on() -> None:
    """A mode of torch functions begins: what is recorded until `look_away` is told to it first."""
    this_thread.lookers += 1
    try:
        reopen("mode")
    except BaseException:
        this_thread.lookers -= 1
        raise


def look_away() -> None:
    """Undo one `look_on`."""
    this_thread.lookers -= 1
    reopen("mode")


class closed(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Record nothing in this thread inside; a context manager and a decorator."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __enter__(self) -> None:
        close_thread(self.reason)

    def __exit__(self, *exc: object) -> None:
        reopen_thread()


def reopen(reason: str, in_modes: bool = False) -> None:
    """Flush this thread's chains and start new ones under the modes of this moment.

    in_modes: that have not changed since the last time; where the thread was closed and stays so,
    there is nothing to do.
    """
    mine = this_thread.__dict__
    closes = mine.get("closed", 0) > 0
    for recorder in [*mine.get("recorders", {}).values()]:
        if in_modes and closes and recorder.off and recorder.chain is recorder.closed:
            recorder.nowhere.likely = ()
            continue
        if closes or recorder.shut is not None:
            change = recorder.close if closes else recorder.reopen
            if change():
                continue
            flush(recorder, reason)
            if change():
                continue
        recorder.off = closes
        recorder.nowhere.likely = ()
        renew(recorder, reason)


def reopen_all(reason: str) -> None:
    """The same for every thread, where a mode of the process has changed."""
    for recorder in all_recorders:
        renew(recorder, reason)


def forget(recorder: Recorder) -> None:
    """Drop the trie of `recorder`, whose chain is empty; kernels stay."""
    recorder.forget()
    renew(recorder, "limit")


def forget_all(reason: str) -> None:
    """Flush everything, and drop every trie."""
    flush_all(reason)
    for recorder in list(all_recorders):
        forget(recorder)


def forget_kernels() -> None:
    """Let every recorder drop its trie, and with it kernels, where it next sees something new."""
    for recorder in all_recorders:
        recorder.size = config.max_trie


def forget_threads() -> None:
    """After a fork: what other threads had pending does not exist here."""
    for threads in (inside, helping, serving, writing, using):
        for ident in set(threads) - {get_ident()}:
            del threads[ident]
    begun.value = 0
    for recorder in all_recorders:
        if not is_owned(recorder.lock):
            recorder.relock()  # another thread may have held it
        if recorder is not this_thread.recorders.get(recorder.device):
            end(recorder)


watch(wake)
watch(reopen_all)
compiling.on_news.append(wake)
compiling.on_evict.append(forget_kernels)
hooks.thread_ended = end
hooks.thread_ends = leave_thread
