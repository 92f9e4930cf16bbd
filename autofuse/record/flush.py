"""Flushing: from a chain to its values. And the rule of what may be true wherever Python can run.

One open chain per thread and device. Python may run in the middle of all that happens here: signal
handlers, finalizers, callbacks of weak references, other threads. It runs where a call begins or
ends and where a loop turns, up to Python 3.11 also where a container is made, in 3.10 also where a
condition makes a jump; never between plain reads, comparisons and stores. So there is one rule:

- What was read of a chain may be another after any such place. Recording reads, prepares, and then
  in one stretch of plain code looks whether the chain is still the open one and ends where it did,
  and only then writes; otherwise it starts again. A chain is whole wherever Python can run.
- A flush takes its chain away in one such stretch. From then on the chain grows no more, and it is
  undone (made the open one again) or done, for its values are known (`values`) before any is given
  away: whatever interrupts giving them away, that is finished first.
- Whoever needs a value in the middle of the flush that makes it, or from another thread while it is
  itself inside a flush or a backward, waits for nobody: it computes the chain by eager ops
  (`_foresee`), and the flush gives those values away instead of its own. Two flushes can so never
  wait for each other.
- Whoever changes memory says so until that is done (`writing`; machine code, where nobody else
  has recorded anything, `begun`) and flushes its readers first; where an op is being recorded
  (`reading`) that op starts again, for it may have looked at the memory before. Whoever records a
  read of memory sets `reading`, then asks whether somebody writes, and only then reads the version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from threading import get_ident
from typing import Protocol
from weakref import getweakrefcount

import torch

from .. import hooks
from ..chain.claims import using
from ..chain.liveness import HELD_HERE
from ..chain.meta import UNKNOWN
from ..chain.shell import Held, Lost, Tensor, plain_alias
from ..chain.state import (
    LATER,
    TOLD_LATER,
    Chain,
    Node,
    Recorder,
    Untold,
    all_recorders,
    counts,
    this_thread,
)
from ..errors import ColdKernelError
from ..inside import (
    being_inside,
    in_another_thread,
    inside,
    is_foreign,
    is_owned,
    patience,
    whatever_interrupts,
)
from ..run.eager import replayed
from ..run.runner import Runner
from ..run.settle import WRITING, settle, write_out
from ..supply import kernels as compiling
from ..supply.load import enter_context
from ..torch_private import InferenceMode, NoModes, changes_results, detach, grad_setter
from .failures import is_lost, lose, recover
from .numbers import is_next
from .origins import credit
from .starts import doubt_starts, tell_start
from .ways import out_of_place, runner_for


class Watch(Protocol):
    """Looks at one flush: what `hooks.flushing` gives."""

    def failed(self, error: Exception) -> None: ...

    def ended(self, runner: Runner | None) -> None: ...  # None: the flush raised


def flush(
    recorder: Recorder, reason: str, into: torch.Tensor | None = None, node: Node | None = None,
    chain_id: int = 0,
) -> bool:  # fmt: skip
    """Run what `recorder` has pending: live values get memory, dead ones are forgotten.

    into: memory that takes the last value, that of `node` in the chain whose id is `chain_id`, for
    the caller holds it; nothing happens if that is no longer the last, or another chain has come to
    end like it. Returns whether this call has done it. In the middle of the flush that does it, and
    where this thread would have to wait for it from inside another one, values stay pending;
    `beside` knows them.
    """
    ident = get_ident()
    nested = ident in using
    try:
        using[ident] = True  # what this has made concrete stays so for who has asked for it
        return _flushed(recorder, reason, into, node, chain_id)
    finally:
        if not nested and ident in using:
            del using[ident]


def _flushed(
    recorder: Recorder, reason: str, into: torch.Tensor | None, node: Node | None, chain_id: int
) -> bool:
    """`flush`, in the middle of which no concrete tensor becomes pending."""
    while recorder.chain or not recorder.ident or recorder.reading:
        if recorder.spare is None:
            recorder.spare = Chain(recorder.home)
        nested = get_ident() in inside
        if nested and recorder.running is not None:
            if _foresee(recorder, recorder.running):
                return False
            continue
        if recorder.untold and not nested:  # what an interrupt has left
            tell(recorder)
        owned, taken, done = is_owned(recorder.lock), False, None
        acquire, leave = recorder.acquire, int if owned else recorder.release
        try:
            # another thread's flush is waited for; not for ever, for this one may hold a lock that
            # nobody knows of, such as llvmlite's, in the middle of which a handler runs
            taken = owned or acquire(False)
            if not taken and not nested:
                taken = acquire(timeout=patience(_WAIT_SECONDS))
            if taken:
                done = _flush(recorder, reason, into, node, chain_id, nested)
        finally:
            try:
                leave()  # at once: an interrupt may have come before `taken` was told
            except RuntimeError as error:
                if is_foreign(error):
                    raise  # otherwise the lock was not taken
        if recorder.untold:
            tell(recorder)
        if done is not None:
            return done
        if not taken and recorder.running is None:
            _take(recorder)
        if not taken and recorder.running is not None and _foresee(recorder, recorder.running):
            return False
    return False


_WAIT_SECONDS = 2.0


def _take(recorder: Recorder) -> None:
    """Take the chain of `recorder` for who holds its lock, but has no chain to compute.

    A handler may run in the middle of that, and wait for this thread. Whoever holds the lock next
    goes on with the chain, as after an interrupt.
    """
    # no Python runs from here...
    spare = recorder.spare
    if recorder.running is None and spare is not None and recorder.chain:
        recorder.running, recorder.chain, recorder.spare = recorder.chain, spare, None
        recorder.ident = 0  # a recording thread goes the slow path
        recorder.reading = False
        recorder.running.hooks = recorder.hooks
        spare.tip = recorder.home
    # ...to here


def tell(recorder: Recorder) -> None:
    """Tell hooks what the nodes of flushes have saved, as `grad.saves` says; in their own thread.

    Once one raises they are told nothing more, as in eager; after an interrupt the next call goes
    on, for the values are there.
    """
    if recorder.thread != get_ident():
        return
    nothing: list[Untold] = []
    untold = nothing
    was, set_grad = torch.is_grad_enabled(), grad_setter()
    try:
        set_grad(False)
        # no Python runs from here...
        untold, recorder.untold = recorder.untold, nothing
        # ...to here
        running = recorder.running
        for one in untold:
            if running is not None and one.inputs is running.inputs:
                recorder.untold = [*recorder.untold, one]  # in the middle of its flush
                continue
            if one.inputs is recorder.chain.inputs:  # undone, and to be run again
                one.saved.clear()
            while one.saved:
                one.tell(one.saved[-1])
                one.saved.pop()
    except BaseException as error:
        recorder.untold = untold + recorder.untold
        if not is_foreign(error):
            for one in untold:
                one.saved.clear()
        raise
    finally:
        set_grad(was)


def _foretell(recorder: Recorder, chain: Chain) -> None:
    """Let hooks be told of `chain`, unless its flush has come to that: others know its values.

    All of them, and have eager's nodes, which keep what they have saved.
    """
    assert chain.hooks is not None and chain.values is not None
    if any(one.inputs is chain.inputs for one in recorder.untold):
        return
    saved = []
    for node in chain.tip.path():
        for ref in node.saves:
            value = chain.inputs[~ref] if ref < 0 else chain.values[ref]
            saved.append([detach(value), False])
    untold = Untold(chain.inputs, getattr(chain.hooks[0], TOLD_LATER), saved[::-1])
    recorder.untold = [*recorder.untold, untold]


def _flush(
    recorder: Recorder, reason: str, into: torch.Tensor | None, node: Node | None, chain_id: int,
    nested: bool,
) -> bool | None:  # fmt: skip
    """`flush` with the lock held; None to try again. nested: the thread was inside already."""
    ident, open_ = get_ident(), recorder.chain
    same = node is None or id(open_) == chain_id
    # no Python runs from here...
    spare, recorder.spare = recorder.spare, None
    chain = interrupted = recorder.running
    same = same and (node is None or recorder.chain is open_ and open_.tip is node)
    same = same and (into is None or into._af.recorder is None)  # its memory is its own still
    if chain is None and spare is not None and same:
        chain, recorder.chain = recorder.chain, spare
        recorder.running = chain
        recorder.ident = 0  # a recording thread goes the slow path
        recorder.reading = False
        chain.into = into
        chain.hooks = recorder.hooks
        spare.tip = recorder.home
    grad, inference, home = recorder.grad, recorder.inference, recorder.home
    autocast = recorder.autocast
    # ...to here, and on to `try`: in Python 3.10 a test that jumps there would let it run
    if chain is not None:
        spare = open_ = None  # a traceback would hold them
        try:
            inside[ident] = True
            if chain:
                _run(recorder, chain, reason)
            # no Python runs from here...
            recorder.running = None
            recorder.ident = recorder.thread
            if not nested:
                inside.pop(ident, None)  # a fork in the middle has left none
            # ...to its end
        except BaseException:
            try:
                # no Python runs from here...
                if recorder.running is chain and chain.values is None:
                    recorder.running = None
                    chain.into = None  # the write of an op that raised is not tried again
                    if chain:  # its values are not lost
                        recorder.chain = chain
                        recorder.home = home  # somebody may have opened another, under other modes
                        recorder.grad = grad
                        recorder.inference = inference
                        recorder.autocast = autocast
                        recorder.hooks = chain.hooks
                if recorder.running is None:  # or else the next flush goes on with it
                    recorder.ident = recorder.thread
                # ...to here
            finally:
                if not nested:
                    inside.pop(ident, None)
            raise
        chain.clear()
        # no recording is in the middle of it; who writes holds it, and adds nothing to it
        if getrefcount(chain) == HELD_HERE + (into is not None):
            recorder.spare = chain.emptied()
        if recorder.ended:
            recorder.leave()
        return None if interrupted is not None and node is not None else True
    recorder.spare = spare
    return None if same else False


def _run(recorder: Recorder, chain: Chain, reason: str) -> None:
    """Flush `chain`, which was taken from `recorder`.

    If it raises and the chain is done all the same, `recorder.running` is None.
    """
    node, writes = chain.tip, chain.into is not None
    own = recorder.thread == get_ident()
    watch: Watch | None = None
    runner = None
    counted = False
    try:
        if chain.values is not None:  # an interrupt came while they were given away
            finish(recorder, chain)
            return
        if not own:
            enter_context(recorder.device)
        refcounts = tuple(map(getrefcount, chain))
        if node.holds_grad:
            chain.late = None if own and is_next(chain) else chain.first
        if hooks.flushing is not None:  # 0.02 us
            watch = hooks.flushing(recorder, chain, node, refcounts, reason)
        runner = (node.writers if writes else node.runners).get(refcounts)
        if runner is None:
            with NoModes():
                runner = runner_for(recorder, node, refcounts, writes)
        if runner.placed and not runner.placed.keys() <= (chain.placed or {}).keys():
            runner = out_of_place(runner)  # a handle has its memory still, which an op has taken
        if chain.tried is not None:
            credit(chain, runner)
        if chain.start is not None:
            tell_start(chain, runner)
        elif runner.short:
            doubt_starts(runner)
        counts.flushes[reason] = counts.flushes.get(reason, 0) + 1
        try:
            if (runner.live or runner.tells) and own:
                runner.run(chain)
            elif runner.live or runner.tells:
                without_modes(runner.run, recorder, chain)
            counted = True
            runner.others += 1
            if runner.pieces:  # also if they wait for their kernels
                recorder.launches += 1
        except Exception as error:
            if chain.values is not None or is_foreign(error):
                raise
            if isinstance(error, ColdKernelError) and not compiling.capturing(recorder.device):
                raise
            if watch is not None:
                watch.failed(error)
            counted = True
            if is_lost(runner, error):
                lose(chain, runner, error)
                raise
            if own:
                recover(chain, runner, error)
            else:  # no name for it here, which would be a cycle with the error's traceback
                without_modes(partial(recover, runner=runner, error=error), recorder, chain)
        let_go(chain)
    except BaseException as error:
        if watch is not None:
            watch.ended(None)
        if chain.values is None:  # nothing was given away or written: the next flush tries again
            raise
        if runner is not None and not counted:  # others were faster, or C++ holds a shell
            runner.others += 1
            if runner.pieces:
                recorder.launches += 1
        finish(recorder, chain)
        recorder.running = None
        if runner is None or is_foreign(error):
            raise
        return  # others were faster and have gone on: what this run met does not matter
    recorder.running = None
    if watch is not None:
        watch.ended(runner)


def let_go(chain: Chain) -> None:
    """Before anybody records again: no other value gets a shell that a weak reference knows."""
    for shell in chain:  # 0.05 us each
        if getweakrefcount(shell) and shell is not None:
            shell._af.shell = None  # the weak reference dies with the shell


def finish(recorder: Recorder, chain: Chain) -> None:
    """Give the values of `chain` away, which are known, whatever interrupts that."""

    def give() -> None:
        assert chain.values is not None
        if chain.tip.told is LATER and chain.tip.holds_grad:
            _foretell(recorder, chain)
        visible = [node for node in chain.tip.path() if node.index in chain.values]
        settle(chain, visible, again=True)
        let_go(chain)

    whatever_interrupts(give)


def _foresee(recorder: Recorder, chain: Chain) -> bool:
    """Know the values of `chain`, which a flush is at, before that flush does.

    They are made by eager ops, which change nothing, and so also while the flush goes on; what it
    writes to memory is written. False if it was over before they were known; `chain` may be pending
    again.
    """
    while chain.values is WRITING and recorder.running is chain:  # by another thread, in C
        time.sleep(0)
    if chain.values is None and chain:
        nodes, bumps = chain.tip.path(), chain.bumps
        values: list[dict[int, torch.Tensor]] = []

        def compute(chain: Chain) -> None:
            every, late = tuple(range(len(nodes))), chain.first if nodes[-1].holds_grad else None
            values.append(replayed(chain, nodes, every, bumps, late))

        without_modes(compute, recorder, chain)
        # it may have been given back, gone on, and been taken again
        if chain.values is None and recorder.running is chain and chain.tip is nodes[-1]:
            # no Python runs from here...
            chain.values = values[0]
            chain.bumps = None
            # ...to here
    if recorder.running is chain and chain and (chain.values is None or chain.values is WRITING):
        return _foresee(recorder, chain)
    if recorder.running is chain and chain.into is not None and chain.values is not None:
        with NoModes():  # who asks may be about to write there too, and comes after it
            write_out(chain, chain.values[chain.tip.index])
    return recorder.running is chain


def write_first(recorder: Recorder) -> None:
    """Let what a flush of `recorder` writes to memory be written now, in the middle of that flush.

    Before a read, for who has read may be about to write there, and that comes after it.
    """
    chain = recorder.running
    if chain is not None and chain.into is not None:
        _foresee(recorder, chain)


def beside(tensor: Tensor) -> torch.Tensor | None:
    """The value of `tensor` where it is beside it, after `flush_tensor`; None where it is its own.

    That is so where C++ holds the shell, and in the middle of the flush that makes the value.
    """
    state = tensor._af
    recorder = state.recorder
    if recorder is None:
        return state.real if state.__class__ is Held else None
    with NoModes():
        chain = recorder.running
        if chain is None:
            return None
        # no Python runs from here...
        values = chain.values
        same = recorder.running is chain and tensor._af is state
        # ...to here
        if not same:  # that flush is over
            return beside(tensor)
        if values is None or state.index not in values:
            return None
        apart = plain_alias(values[state.index])
        if apart is None:  # exchanged, which the flush is about to say
            tensor.__dict__["_af"] = UNKNOWN
        return apart


def without_modes(run: Callable[[Chain], None], recorder: Recorder, chain: Chain) -> None:
    """Run another thread's chain: the modes of this one must not reach its results."""
    if not changes_results() and torch.is_inference_mode_enabled() is recorder.inference:
        run(chain)
        return

    def alone() -> None:
        enter_context(recorder.device)
        with being_inside(), InferenceMode(recorder.inference):
            run(chain)

    in_another_thread(alone)  # until it ends, for the chain is that thread's


def flush_tensor(tensor: Tensor, reason: str) -> None:
    """Make `tensor` concrete."""
    state = tensor._af
    if state.recorder is not None:
        flush(state.recorder, reason)
    elif state.__class__ is Lost:
        raise state.error


def value_of(tensor: Tensor, reason: str = "attribute") -> torch.Tensor:
    """Make `tensor` concrete; returns what has its value."""
    flush_tensor(tensor, reason)
    apart = beside(tensor)
    return tensor if apart is None else apart


def flush_thread(reason: str) -> None:
    """Flush everything this thread has pending."""
    for recorder in [*this_thread.recorders.values()]:
        if recorder.chain or recorder.reading or recorder.running is not None:
            flush(recorder, reason)
        elif recorder.untold:
            tell(recorder)


def flush_all(reason: str) -> None:
    """Flush everything that any thread has pending."""
    for recorder in all_recorders:
        if recorder.chain or recorder.reading or not recorder.ident:
            flush(recorder, reason)


hooks.value_of = value_of
