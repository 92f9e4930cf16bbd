"""Recording: from an op and its operands to a node of the trie, and the shell of its value.

What holds wherever Python may run stands in `flush`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import is_autocast_enabled

from ..chain.claims import begun, writing
from ..chain.liveness import ALONE, counts_of
from ..chain.meta import (
    UNKNOWN,
    Meta,
    lies_as,
    likely_meta,
    plain_meta,
    remember,
    still_lies_as,
)
from ..chain.refusal import Refusal, refusal_of
from ..chain.shell import Held, Lost, Tensor, make_shell
from ..chain.state import (
    LATER,
    Chain,
    Node,
    Recorder,
    counts,
    make_current,
    recorder_for,
    this_thread,
)
from ..chain.trie import eager_node, extend
from ..dtypes import EXACT, Wide
from ..grad.saves import saved_by
from ..inside import inside
from ..ops.arithmetic import CASTS
from ..ops.autocast import casts
from ..ops.row import Op
from ..settings.config import config
from ..supply.load import processors_of
from ..torch_private import (
    NoModes,
    address_of,
    autocast_is_on,
    item_of,
    looked_on,
    raw_version_of,
    requires_grad_of,
)
from .flush import flush
from .modes import forget, regrade, renew
from .numbers import ORDER, follows
from .origins import Origin, instruction, is_on_trial, meta_of_concrete
from .policy import is_narrow, is_small_loss, skipped
from .seldom import SELDOM, comes_often
from .starts import at_start

_Parameter = torch.nn.Parameter
_INT64 = 1 << 63
OFF = "recording is off"


# --- hot path: per recorded op, budget 0.5 us ------------------------------------------------


def record(op: Op, operands: Sequence[Any]) -> Tensor | Refusal | None:
    """Record `op` over tensors and Python scalars; if it has to run as eager PyTorch, why, or None.

    That is what it is counted under once it has run.
    """
    recorder = this_thread.current
    if recorder is None:
        return _record_elsewhere(op, operands)
    chain = recorder.chain  # before `ident`: during a flush the new chain may not be used
    tip = chain.tip
    if not recorder.ident:
        return _record_elsewhere(op, operands)
    if recorder.off and tip is recorder.nowhere:
        recorder.reading = False
        return refusal_of(op.name, OFF)
    if recorder.grad is not torch.is_grad_enabled():
        regrade()
        return record(op, operands)
    if recorder.autocast is not (autocast_is_on() and is_autocast_enabled(recorder.device.type)):
        renew(recorder, "autocast")
        return record(op, operands)
    if tip is recorder.nowhere:  # after a look at modes, which may have come while it was closed
        # where every op has to have its own autograd node
        return refusal_of(op.name, "anomaly mode" if torch.is_anomaly_enabled() else OFF)
    if tip.looked_on and looked_on():  # eager PyTorch tells modes, and comes back without them
        recorder.reading = False
        return None
    edge: list[Any] = [(op,) if tip.looked_on else op]
    xs: list[torch.Tensor] = []  # new Inputs
    metas: list[Meta] = []
    consts: list[Any] = []
    tried: list[Origin] | None = None
    start: int | None = None
    on_host = False
    for x in operands:
        cls = x.__class__
        if cls is Tensor:
            state = x._af
            if state.recorder is recorder:
                edge.append(state.index)
                continue
        elif cls is float or cls is int or cls is bool:
            if cls is int and not -EXACT <= x <= EXACT:
                if not -_INT64 <= x < _INT64:
                    recorder.reading = False
                    return None
                cls = Wide
            edge.append(cls)
            consts.append(x)
            continue
        slot = slot_in(chain, x)
        if slot is _CHANGED:
            flush(recorder, "a changed operand")
            return record(op, operands)
        if slot is not None:
            edge.append(slot)
            continue
        recorder.reading = True  # before the look at what it is
        state = x._af if cls is Tensor else None
        if state is None or state.__class__ is not Meta or state.device is not recorder.device:
            if is_on_trial(state, x):
                tried = [*(tried or ()), state.origin]
            x, state = _input(x, recorder)
            if state is _SCALAR:
                if op.one_device:
                    recorder.reading = False
                    return None
                edge.append(x.__class__)
                consts.append(x)
                on_host = True
                continue
            if state is None or state.device is not recorder.device:
                return _record_elsewhere(op, operands)
        for k, known in enumerate(xs):
            if known is x:
                edge.append(~(len(tip.inputs) + k))
                break
        else:
            xs.append(x)
            metas.append(state)
            edge.append(state)
    if on_host and all(operand.__class__ is type for operand in edge[1:]):
        return _record_elsewhere(op, operands)
    key = tuple(edge)
    node = tip.next.get(key)
    if node is None:
        if recorder.chain is not chain or chain.tip is not tip:
            return record(op, operands)
        node = _miss(recorder, tip, op, key)
        if node is None:  # the chain had to be cut first
            return record(op, operands)
    if node.starts is not None:
        node, start = at_start(node)
    shell = node.shell
    if shell is None:
        if node.reason:
            skipped(node)
            recorder.reading = False
            return node.refusal
        if node.cuts:
            flush(recorder, node.cuts)
            return record(op, operands)
        if node.cast is not None:
            recorder.reading = False
            return _record_cast(op, operands, node.cast, recorder.device)
        shell = _shell_of(node)
    if on_host and node.meta is not None and not node.meta.shape:
        return refuse(recorder, op, "0-d tensors on two devices, which promote each other")
    if consts and node.limits is not None:
        low, high = node.limits
        if not all(low <= value <= high or not math.isfinite(value) for value in consts):
            return refuse(recorder, op, "a scalar that does not fit")
    if node.holds_grad and not follows(chain):
        flush(recorder, ORDER)
        return record(op, operands)
    if xs:
        done = record_fresh(recorder, chain, tip, node, shell, xs, metas, consts)
        if done is None:
            return refuse(recorder, op, "in the middle of a write")
        if not done:
            return record(op, operands)
        if tried is not None:
            chain.tried = [*(chain.tried or ()), *tried]
        if start is not None:
            chain.start = start
        if chain.pinned > node.pinned_limit:
            relieve(recorder, chain)
        return shell
    if recorder.chain is chain and chain.tip is tip and node.shell is shell:
        # no Python runs from here...
        chain.consts += consts
        chain.tip = node
        chain.append(shell)
        # ...to here
        return shell
    return record(op, operands)


def record_fresh(
    recorder: Recorder,
    chain: Chain,
    tip: Node,
    node: Node,
    shell: Tensor,
    xs: Sequence[torch.Tensor],
    metas: Sequence[Meta],
    consts: Sequence[Any],
) -> bool | None:
    """Append `node`, whose new Inputs are `xs`, to `chain` if that is still open and ends at `tip`.

    False, with nothing done, if it does not, if memory was written meanwhile, or if one of `xs` is
    not as its Meta any more: a view comes to require grad when its base is written. None in the
    middle of a write, which has looked for those that read its memory: this one is to run now.
    """
    if writing or begun.value > 0:  # before a version is read; later writes find `reading`
        return None
    known = len(tip.inputs)
    stream = chain.stream if known else recorder.stream()
    marks: list[int] = []
    slots = {}
    with NoModes():
        for x, meta in zip(xs, metas):  # noqa: B905 - strict costs 0.1 us
            if (recorder.grad and requires_grad_of(x) is not meta.requires_grad) or (
                x.__class__ is Tensor and not lies_as(x, meta)
            ):
                remember(x, UNKNOWN)
                return False
            try:
                marks += (raw_version_of(x), address_of(x))
            except RuntimeError:  # an inference tensor has no version
                marks += (-1, address_of(x))
            slots[id(x)] = ~(known + len(slots))
    if (
        recorder.reading
        and recorder.chain is chain
        and chain.tip is tip
        and node.shell is shell
        and recorder.ident
    ):
        # no Python runs from here...
        chain.stream = stream
        chain.inputs += xs
        chain.marks += marks
        chain.known |= slots
        chain.consts += consts
        chain.pinned += node.fresh_bytes
        chain.tip = node
        recorder.reading = False
        chain.append(shell)
        # ...to here
        return True
    return False


_CHANGED = object()  # in place of a slot


def slot_in(chain: Chain, x: Any) -> Any:
    """~position of `x` among the Inputs; None if it is none, _CHANGED, no key of any edge, if it is
    not any more as it was when it became one.
    """
    slot = chain.slots.get(id(x))
    if slot is None:
        return None
    return slot if still_lies_as(x, chain.tip.inputs[~slot]) else _CHANGED


def _shell_of(node: Node) -> Tensor:
    """The shell of a node that has none, or got one meanwhile."""
    assert node.meta is not None
    shell = make_shell(node.meta, node, node.offset)
    if node.shell is None:
        node.shell = shell
    return node.shell


# --- end of the hot path ---------------------------------------------------------------------

_SCALAR: Any = object()


def refuse(recorder: Recorder, op: Op, reason: str) -> Refusal:
    """Say why `op` is not recorded: its operands are not read after all."""
    recorder.reading = False
    return refusal_of(op.name, reason)


def _record_cast(
    op: Op, operands: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> Tensor | Refusal | None:
    """Record `op` after casts of the operands that autocast makes `dtype`."""
    cast = []
    for x in operands:
        if isinstance(x, torch.Tensor) and casts(x, device):
            x = record(CASTS[dtype], (x,))
            if not isinstance(x, Tensor):
                return None
        cast.append(x)
    return record(op, cast)


def _record_elsewhere(op: Op, operands: Sequence[Any]) -> Tensor | Refusal | None:
    """Record with another recorder than the one used last, or None."""
    ident = get_ident()
    chosen: Recorder | None = None
    for x in operands:
        if x.__class__ is Tensor:
            found = x._af.recorder
            if found is not None:
                if found.ident != ident:
                    flush(found, "another thread")
                    if x._af.recorder is not None:  # from a finalizer, in the middle of a flush
                        return None
                elif chosen is None:
                    chosen = found
    if chosen is None:
        chosen = _concrete_recorder(operands)
    if chosen is not None and not chosen.ident and ident not in inside:
        flush(chosen, "interrupt")  # goes on with one that was interrupted
        if chosen.ident:
            return record(op, operands)
    current = this_thread.current
    if current is not None:
        current.reading = False
    if chosen is None or chosen is current or not chosen.ident:
        return None
    if current is not None and current.hooks is not None and current.ident == ident:
        flush(current, "saved tensor hooks")  # they are told of one op after the other
    make_current(chosen)
    return record(op, operands)


def _concrete_recorder(operands: Sequence[Any]) -> Recorder | None:
    """The recorder for operands none of which is pending; a CPU scalar follows the others."""
    chosen = None
    for x in operands:
        if isinstance(x, torch.Tensor):
            state = x._af if x.__class__ is Tensor else None
            meta = state if state.__class__ is Meta else _input(x, None)[1]
            if meta is None:
                return None
            if chosen is None or chosen.ndim == 0 and meta.device != chosen.device:
                chosen = meta
    return None if chosen is None else recorder_for(chosen.device)


def _input(x: Any, recorder: Recorder | None) -> tuple[Any, Meta | None]:
    """(tensor to read, its Meta), (Python number, _SCALAR), or (x, None) where x is unreadable."""
    cls = x.__class__
    meta: Meta | None
    if cls is Tensor:
        state = x._af
        if state.__class__ is Meta:
            meta = state
        elif state.__class__ is Lost:
            raise state.error
        elif state.__class__ is Held:
            x = state.real
            meta = plain_meta(x)
        elif state.recorder is not None:  # pending on another device
            flush(state.recorder, "another device")
            return (x, None) if x._af is state else _input(x, recorder)
        else:
            meta = meta_of_concrete(x, state, None if recorder is None else recorder.chain.tip)
    elif cls is torch.Tensor or cls is _Parameter:
        meta = plain_meta(x) if recorder is None else likely_meta(x, recorder.chain.tip)
    else:
        return x, None
    if meta is None or recorder is None or meta.device is recorder.device:
        return x, meta
    if meta.ndim == 0 and meta.device.type == "cpu" and not meta.requires_grad:
        # torch reads such an operand on the host; its dtype only matters within its category
        default = meta.dtype is torch.get_default_dtype() or meta.dtype in (torch.int64, torch.bool)
        if not default:
            return x, None
        with NoModes():  # no op of the program's
            return item_of(x), _SCALAR
    return x, None


# how many times `config.loop_nodes` ops are cut where the first op comes again by an instruction
# that is new: a turn of a loop may be longer
_ANYWHERE = 1.5


def _miss(recorder: Recorder, tip: Node, op: Op, key: tuple[Any, ...]) -> Node | None:
    """A new edge at `tip`, where the open chain ends; None where all edges had to be forgotten."""
    path = tip.path()
    new_inputs = sum(isinstance(operand, Meta) for operand in key[1:])
    full = len(path) >= config.max_nodes or (
        len(tip.inputs) + new_inputs > config.max_inputs and len(path) > 0
    )
    here, _ = instruction()
    looped = len(path) >= config.loop_nodes and path[0].key[0] == key[0] and (
        len(path) >= _ANYWHERE * config.loop_nodes or here in [node.made_at for node in path]
    )  # fmt: skip
    if recorder.size >= config.max_trie and not path:
        forget(recorder)
        return None
    if full or looped:
        node = eager_node(recorder, tip, op, "")
        node.cuts, node.key = "limit", key
        recorder.size += 1
        return tip.next.setdefault(key, node)
    if not path and not comes_often(tip, key):
        counts.refused += 1
        return eager_node(recorder, tip, op, SELDOM)
    metas = [node.meta for node in path if node.meta is not None]
    with NoModes():  # which have not to do with how it is found out what eager makes of it
        node = extend(recorder, tip, op, key[1:], metas)
    reason = tip.reason
    if tip.told and not node.reason and node.meta is not None and node.meta.requires_grad:
        saves = saved_by(node) if tip.told is LATER else None
        if saves is None:
            reason = "saved tensor hooks"  # which eager tells at once what its node saves
        elif any(path[ref].base >= 0 for ref in saves if 0 <= ref < len(path)):
            node = eager_node(recorder, tip, op, "")
            node.cuts = "saved tensor hooks"  # which are told of torch's view
        else:
            node.saves = saves
    if reason and not node.reason:
        node = eager_node(recorder, tip, op, reason)
    elif tip.viewed and node.holds_grad and config.recompute == "inputs":  # go through no views
        node = eager_node(recorder, tip, op, "")
        node.cuts = "gradient of a view"
    elif not node.reason and node.meta is not None and is_small_loss(node):
        node = eager_node(recorder, tip, op, "a small loss of classes")
    elif node.rows is not None and path and is_narrow(node, processors_of(recorder.device)[0]):
        node = eager_node(recorder, tip, op, "")
        node.cuts = "narrow rows"
    node.key, node.made_at = key, here
    recorder.size += 1
    return tip.next.setdefault(key, node)  # another may stand in a chain by now


def relieve(recorder: Recorder, chain: Chain) -> None:
    """Flush if Inputs that only this chain keeps alive have come to much memory."""
    refcounts = counts_of(chain.inputs)
    metas = chain.tip.inputs
    placed = [*(chain.placed or {}).values()]  # which eager has, too
    dead = [
        meta.nbytes
        for k, (meta, held) in enumerate(zip(metas, refcounts, strict=False))
        if held <= ALONE and k not in placed
    ]
    chain.pinned = sum(dead)
    if chain.pinned > chain.tip.pinned_limit:
        flush(recorder, "memory")
