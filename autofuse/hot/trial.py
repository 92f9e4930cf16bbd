"""A trial of machine code: programs that run as Python and as machine code, and are compared.

It runs in a process of its own, which `verdict` starts, over kernels for the CPU, which are
launched as those for CUDA are.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import torch

from .. import api
from ..chain import state
from ..chain.shell import Tensor
from ..dispatch import protocol
from ..observe import counters as report
from ..ops.arithmetic import OPS
from ..ops.reductions import DEVICES
from ..record import flush, in_place, modes, record, writes
from ..settings.config import config
from ..supply.worker import send
from ..torch_private import NoTorchFunction
from . import native
from .called import Called

# --- programs ------------------------------------------------------------------------------------


class _State:
    """What the programs work on."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        plain = [torch.randn(4, 6, generator=generator) for _ in range(3)]
        self.plain = plain[2]
        self.w, self.v = map(api.wrap, plain[:2])
        self.row = api.wrap(torch.full((6,), 3.0))
        self.p = torch.nn.Parameter(torch.ones(6))
        self.index = api.wrap(torch.tensor([2, 0]))

    def values(self) -> list[Any]:
        return _plain([self.w, self.v, self.row, self.p, self.plain])


def _operators(s: _State) -> Any:
    """Recorded by operators and torch's functions, with numbers, new Inputs and the same twice."""
    t = (s.w * 2.0 + s.p) * s.v - 3 + True
    t = torch.where(t > 0, torch.sin(t), t * t)
    kept = t * s.plain
    return api.materialize(t - s.row, kept)


def _by_hand(s: _State) -> Any:
    """The functions in front of recording and flushing, called as C calls them."""
    t = Called(record.record)(OPS["mul"], (s.w, 2.0))
    u = Called(Tensor.__torch_function__)(torch.add, (Tensor,), (t, s.v))
    x = Called(protocol.ask_overrides)(torch.nn.functional.silu, (u,), u)
    Called(flush.flush)(state.this_thread.current, "trial")
    return t, u, x


def _eager(s: _State) -> Any:
    """Functions that flush, run eagerly and begin a chain; of plain tensors too."""
    x = torch.mm(s.w * 0.5, torch.t(s.v)) - 1.0
    both = torch.cat([x, x * 2.0], dim=1)
    some = torch.add(x, both[:, 2:6], alpha=2), torch.topk(both, 2), torch.chunk(x, 2)
    return torch.mm(x, s.w), torch.cumsum(x, 0), torch.sum(s.plain, dim=0), *some


def _beside(s: _State) -> Any:
    """Methods, indices and lists of plain tensors, beside which something is wrapped."""
    h, across = s.plain, torch.t(s.v)
    some = h[s.index], h[:, s.index], s.p[s.index], torch.cat([h, s.w]), torch.mm(h, mat2=across)
    h.index_add_(0, s.index, s.w[:2])
    return h.mm(across), h.mul(s.w), *some


def _total(x: torch.Tensor) -> torch.Tensor:
    """The sum of all, by an op that is not recorded."""
    return torch.sum(x, dtype=torch.float32)


def _reductions(s: _State) -> Any:
    """Recorded, and let go of: no kernel reduces rows on a CPU."""
    facts = []
    for reduce in (
        lambda: torch.softmax(s.w * 2.0, -1),
        lambda: torch.mean(s.w, dim=(-1,), keepdim=True),
        lambda: torch.amax(s.w, 1, True),
        lambda: torch.layer_norm(s.w, (6,), s.p, s.row, 0.5),
        lambda: torch.sum(s.v, 0),
        lambda: torch.mean(s.w),
        lambda: torch.var(s.v, (0, 1), keepdim=True),
    ):
        y = reduce()
        facts.append((api.is_pending(y), y.shape, y.stride()))
        del y
        Called(flush.flush)(state.this_thread.current, "trial")
    return facts


def _views(s: _State) -> Any:
    """Views of a pending value that are only read, and that somebody holds; parts of it stored."""
    upper, lower = Called(Tensor.chunk)(s.w * 2.0 + s.v, 2, dim=0)
    middle = torch.narrow(s.v - s.w, 1, 1, 4)
    product = upper * lower
    both = torch.stack([s.w, s.v])
    return (
        upper,
        product,
        torch.t(product),
        torch.sin(middle),
        both,
        torch.cat([both[0] + 1.0, s.w]),
        Called(Tensor.expand_as)(product[:1], upper) * lower,
        operator.getitem(product, (0, 1)),
        operator.getitem(product, [0, 1]),
    )


def _writes(s: _State) -> Any:
    """In place: at once, into memory that a chain reads or not, and of what is pending."""
    w = operator.iadd(s.w, 0.5)
    operator.imul(w, s.v)
    operator.isub(s.w, torch.exp(s.v) * 0.25)
    Called(Tensor.addcmul_)(s.w, s.v * 0.5, s.v)
    operator.imul(s.p, s.row * 0.5 - s.p)
    t = s.w * 2.0
    Called(Tensor.mul_)(t, 3.0)
    operator.iadd(t, s.v)
    Called(Tensor.clamp_)(t, -0.5, max=2.0)
    operator.setitem(t, t > 1.0, -0.0)  # type: ignore[arg-type]
    return t, w is s.w


def _writes_by_hand(s: _State) -> Any:
    t = s.w * 2.0
    done = Called(in_place.record_inplace)(OPS["mul"], t, (t, 3.0))
    u = s.v * 0.5
    wrote = Called(writes.record_write)(OPS["add"], s.w, (s.w, u))
    return done, wrote, t, u


def _attributes(s: _State) -> Any:
    """What is read and set of tensors that have their values."""
    w = Called(Tensor.requires_grad_)(Called(Tensor.detach)(s.w))
    with torch.enable_grad():
        _total(torch.tanh(torch.sigmoid(w) * s.v + 1.0)).backward()
        gradient = w.grad
        w.grad = None
        made = (w + 1.0).requires_grad
    w.data = s.v * 0.5
    w.grad = gradient
    w.mark = s
    w.requires_grad = False
    with torch.enable_grad():
        return gradient, made, w, w.grad is gradient, w.data, (w + 1.0).requires_grad


def _slices(s: _State) -> Any:
    """Pending values into views of memory: strided, also where it is read, there or elsewhere."""
    w, v = s.w, s.v
    w[1:3, ::2] = v[1:3, ::2] * 2.0
    w[..., 0] -= v[:, 0] * 0.5
    w[2] = torch.exp(w[2])
    w[1:] = w[:-1] * 0.5
    Called(Tensor.copy_)(w[0], v[0] + 1.0)
    return w._version


def _gradients(s: _State) -> Any:
    """A backward that launches a kernel."""
    s.p.grad = None
    with torch.enable_grad():
        _total(torch.tanh(torch.sigmoid(s.w) * s.p + 1.0)).backward()
    return s.p.grad


def _seen(s: _State) -> Any:
    """Views under grad that somebody holds, of what nobody does."""
    s.p.grad = None
    with torch.enable_grad():
        t = torch.tanh(s.w * s.p + 1.0)
        flat, turned = Called(Tensor.view)(t, -1), torch.t(t)
        del t
        Called(flush.flush)(state.this_thread.current, "trial")
        _total(flat * 2.0).backward()
    return flat, turned, s.p.grad


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> Any:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * 3.0, None


def _functions(s: _State) -> Any:
    """Functions of users, in which nothing is recorded, and what follows them."""
    s.p.grad = None
    apply = Called(_Scaled.apply)
    with torch.enable_grad():
        made = apply(s.p, 2.0), apply(s.w, 2.0), apply(s.w * s.p, 2.0)
        _total(made[0] + made[2]).backward()
    return made, api.is_pending(s.w + 1.0), s.p.grad


def _told(s: _State) -> Any:
    """Hooks are told of what is saved once a flush is over; also of what nobody sees."""
    s.p.grad = None
    with torch.enable_grad():
        with torch.autograd.graph.save_on_cpu():
            t = torch.tanh(torch.sigmoid(s.w) * s.p + 1.0) * s.v
            Called(flush.flush)(state.this_thread.current, "trial")
        _total(t).backward()
    return s.p.grad


def _errors(s: _State) -> Any:
    said = []
    for call in (
        lambda: torch.mm(s.w, s.w),
        lambda: Called(Tensor.add_)(s.w, torch.ones(5)),
        lambda: s.w + torch.ones(5),
        lambda: torch.sin(s.w, no=1),
    ):
        try:
            api.materialize(call())
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    return said, torch._C._is_torch_function_enabled()


def _weak(s: _State) -> Any:
    """Values that only weak references know die with the chain, others do not."""
    t = s.w * 2.0
    u = t + 1.0
    refs = weakref.ref(t), weakref.ref(u)
    del t
    Called(flush.flush)(state.this_thread.current, "trial")
    return u, [ref() is None for ref in refs]


def _stale(s: _State) -> Any:
    """An Input that is written behind the chain's back, and one whose memory is replaced."""
    said = []
    for k in range(2):
        x = s.plain.clone()
        y = s.w + x
        with NoTorchFunction():
            if k == 0:
                torch._C._increment_version([x])
            else:
                x.data = torch.zeros(4, 6)
        try:
            Called(flush.flush)(state.this_thread.current, "trial")
        except Exception as error:
            said.append((type(error).__name__, str(error)))
        del y
    return said


# what of the machine code each has to be run by, on its last run; _errors and _stale end in Python
_PROGRAMS: tuple[tuple[Callable[[_State], Any], str], ...] = (
    (_operators, "handler record flush"),
    (_by_hand, "record flush torch_function ask_overrides handler"),
    (_eager, "handler passing viewing flush"),
    (_beside, "handler passing viewing joining writing flush"),
    (_reductions, "reducing handler flush"),
    (_views, "handler record joining flush"),
    (_writes, "handler writing setting flush"),
    (_writes_by_hand, "record_inplace record_write handler flush"),
    (_slices, "handler writing setting copying flush"),
    (_attributes, "handler passing altering granting setting_attribute flush keeping"),
    (_gradients, "keeping differentiating answer"),
    (_seen, "flush keeping answer"),
    (_functions, "applying"),
    (_told, "flush answer"),
    (_weak, "flush"),
    (_errors, ""),
    (_stale, ""),
)
RUNS = 5  # of a program: chains get their runners, counts of writes become usual


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with NoTorchFunction():  # autofuse would have to think anew of what it has lent
            facts = (value.dtype, value.stride(), value.requires_grad, value._version)
            return (value.detach().tolist(), *facts)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _run(program: Callable[[_State], Any], on: bool) -> tuple[list[dict[str, Any]], set[str]]:
    """What RUNS runs return and leave, and which functions were Python's in the last."""
    native.switch(on)
    modes.forget_all("trial")
    report.reset_stats()
    operands, outcomes, hot, entered = _State(), [], native.hot(), set[str]()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in hot:
            entered.add(hot[frame.f_code])

    for k in range(RUNS):
        sys.setprofile(profile if k == RUNS - 1 else None)
        try:
            result = api.materialize(program(operands))
            flush.flush_all("trial")
        finally:
            sys.setprofile(None)
        counted = asdict(report.stats())
        for name in ("kernels_compiled", "kernels_loaded", "cache_hits"):  # the second way has them
            del counted[name]
        outcomes.append({"results": _plain(result), "operands": operands.values(), **counted})
    return outcomes, entered


def _differences() -> Iterator[str]:
    """What machine code does that Python does not, in words."""
    for program, names in _PROGRAMS:
        name = program.__name__[1:]
        want, _ = _run(program, False)
        got, entered = _run(program, True)
        for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            for what in ours:
                if ours[what] != theirs[what]:
                    yield f"run {k} of {name!r} has other {what} than in Python"
        missed = sorted(entered & {*names.split()})
        if missed:
            yield f"{name!r} was left to Python by {', '.join(missed)}"
    yield from _references()


def _references() -> Iterator[str]:
    """Objects that machine code holds more often after many runs, or less often."""
    native.switch(True)
    s = _State()
    one = 1234.5

    def step() -> None:
        t = torch.sin(s.w * s.v + one)
        api.materialize(t - s.plain)
        operator.imul(s.w, 0.5)
        operator.iadd(s.w, s.v * 2.0)
        torch.mm(s.w, torch.t(s.v))
        torch.layer_norm(s.w, (6,), s.p, s.row, 0.5)
        torch.sum(s.w, dim=-1, keepdim=True)
        operator.getitem(s.plain, s.index)
        s.plain.mm(torch.t(s.v))
        torch.cat([s.plain, s.w])
        with torch.enable_grad():
            _total(torch.sigmoid(s.w) * s.p).backward()
        s.p.grad = None

    watched = [s.w, s.v, s.plain, s.p, one, Tensor, torch.Tensor, None, True, False,
               float, int, state.this_thread.current, state.counts]  # fmt: skip
    for _ in range(RUNS):
        step()

    def held() -> tuple[list[int], int]:
        flush.flush_all("trial")
        gc.collect()
        return [sys.getrefcount(x) for x in watched], sys.getallocatedblocks()

    runs, grown, more = 100, [0], 0
    before, blocks = held()
    for _ in range(10):  # memory that is kept for later grows by less each time
        for _ in range(runs):
            step()
        after, now = held()
        grown, more = [a - b for a, b in zip(after, before, strict=True)], now - blocks
        before, blocks = after, now
        if more < runs and all(abs(count) < runs // 2 for count in grown):
            return
    yield f"references are not given back: {grown}, {more} pieces of memory in {runs} runs"


def differences() -> str:
    """Why machine code is not to be trusted here; "" if it is."""
    try:
        native.make(native.facts_here())
        config.compile, config.always_fuse = "now", True
        DEVICES.add("cpu")  # on which reductions are recorded nowhere else
        with torch.no_grad():
            return next(_differences(), "")
    except Exception as error:  # that is the answer
        return f"{type(error).__name__}: {error}"


def main(answers: BinaryIO) -> None:
    """Say it to who has started this process."""
    reason = differences()
    key, code = ("", b"") if reason else native.compiled()
    send(answers, {"reason": reason, "key": key}, code)
    os._exit(0)
