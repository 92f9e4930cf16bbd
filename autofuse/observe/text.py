"""Wording: findings, advice and a pending expression as text. Knows no more than they hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TextIO

import torch

from ..chain.shell import Held, Lost, Tensor
from ..chain.state import Node
from ..lines import Position, shown
from ..program.program import CONST
from ..program.walk import needed
from ..record.origins import STAYS
from ..record.policy import ASIDE
from ..settings.config import config
from ..torch_private import NoModes
from .events import FAILED, REFUSED, WAITS, spelled
from .findings import Findings


def _plural(count: float, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:g} {noun}{ending}"


def _listed(items: Sequence[str]) -> str:
    counted = Counter(items).items()
    return ", ".join(f"{n} x {item}" if n > 1 else item for item, n in counted) or "nothing"


def _bytes(count: float) -> str:
    if count == 1:
        return "1 byte"
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _eager_for(reason: str, report: Findings) -> Counter[tuple[str, str]]:
    """What ran as plain PyTorch for a reason that begins so."""
    counted = list(report.ops_eager.items())
    return Counter({which: n for which, n in counted if which[1].startswith(reason)})


def summary(report: Findings) -> str:
    seen = report.ops_seen.total()
    told = _eager_for(ASIDE, report).total() + _eager_for(STAYS, report).total()  # no ops of theirs
    eager = report.ops_eager.total() - told
    return (
        f"{_plural(seen, 'op')} seen, {seen - eager} fused in "
        f"{_plural(report.launches, 'launch')}, {eager} run eagerly"
    )


def lines_of(report: Findings) -> list[str]:
    lines = [f"autofuse: {summary(report)}" + (" so far" if report.open else "")]
    if report.flushes:
        lines.append(
            f"chains: {len(report.chains)}, median {_plural(report.median_chain, 'op')}, "
            f"longest {report.longest_chain}"
        )
    lines += _section("flushes", (
        f"{count} x {reason} at {shown(position)}"
        for (reason, position), count in report.reasons.most_common()
    ))  # fmt: skip
    lines += _section("run eagerly", (
        f"{count} x {op}: {reason}" for (op, reason), count in report.ops_eager.most_common()
    ))  # fmt: skip
    lines += _section("kernels", (
        f"{use.name}{' (backward)' if use.backward else ''}: {use.launches} x, reads "
        f"{_listed(use.reads)} ({_bytes(use.bytes_read)}), writes "
        f"{_listed(use.writes)} ({_bytes(use.bytes_written)})"
        for use in report.kernels
    ))  # fmt: skip
    if report.values_elided:
        lines.append(
            f"saved: {_plural(report.values_elided, 'intermediate')}, "
            f"{_bytes(report.bytes_saved)} that never got memory"
        )
    stored = Counter((out.what, out.op, out.position, out.holders) for out in report.stored)
    lines += _section("stored", (
        f"{count} x {what}, of {op}, at {shown(position)}, held by {', '.join(who)}"
        for (what, op, position, who), count in stored.most_common()
    ))  # fmt: skip
    lines += _section("host reads", (
        f"{count} x {sync.text} at {shown(sync.position)}"
        for sync, count in Counter(report.syncs).most_common()
    ))  # fmt: skip
    if report.pending:
        lines.append(f"still pending: {_plural(report.pending, 'op')}")
    return lines + _section("advice", advice_on(report), limit=99)


def _section(title: str, items: Any, limit: int = 10) -> list[str]:
    found = list(items)
    more = [f"  and {len(found) - limit} more"] if len(found) > limit else []
    return [f"{title}:", *(f"  {item}" for item in found[:limit]), *more] if found else []


_TESTS = ("bool", "is_nonzero")
_SIZES = ("getitem", "masked_select", "nonzero", "argwhere", "unique")


def advice_on(report: Findings) -> list[str]:
    """What would help, in plain words."""
    said: list[str] = []
    for sync, count in Counter(report.syncs).most_common():
        what, cure = "reads a value", "move it out of the loop"
        if sync.name in _TESTS:
            what = "tests a value"
            cure = "keep the choice on the device with torch.where, or test less often"
        elif sync.name in _SIZES:
            what = "makes a size of values"
            cure = "keep the shape, with torch.where or a product with the mask, or " + cure
        where = f"{sync.text} at {shown(sync.position)}"
        if count > 1 and not any(text.startswith(where) for text in said):
            said.append(f"{where} {what} every step ({count} times); {cure}")
    recorded = sum(report.chains)
    aside = _eager_for(ASIDE, report)
    if aside:
        said.append(
            f"{_plural(aside.total(), 'fused call')} ran as plain PyTorch, each "
            f"{'; '.join(f'{reason} ({name})' for name, reason in aside)}; "
            "autofuse.explain(function, ...) runs one as if fused and says why; "
            "config.measure = False fuses every call"
        )
    plain = _eager_for(STAYS, report)
    if plain:
        said.append(
            f"{_plural(plain.total(), 'result')} of eager ops stayed plain tensors "
            f"({_listed([name for name, _ in plain.elements()])}): no chain that pays begins with "
            "them; config.measure = False wraps them all"
        )
    if not recorded and not report.pending and not aside and not plain:
        said.append(
            "nothing was recorded: there is no op of the table on a wrapped tensor here; "
            "autofuse.wrap the tensors, or autofuse.fuse the function"
        )
    waited = [flush for flush in report.flushes if flush.eager == WAITS]
    if waited:
        said.append(
            f"{_plural(len(waited), 'chain')} ran as eager ops while kernels were compiled; "
            "run it again after autofuse.wait()"
        )
    refused = Counter(flush.position for flush in report.flushes if flush.eager == REFUSED)
    for position, count in refused.items():
        said.append(
            f"{_plural(count, 'chain')} ran as eager ops at {shown(position)}, where no two runs "
            f"record the same ops: after {config.max_kernels_per_line} kernels none is compiled "
            "for this line any more; make what keeps changing constant (a message on stderr names "
            "it), or raise autofuse.config.max_kernels_per_line"
        )
    if recorded and report.median_chain <= 2:
        said.append(
            f"median chain is {_plural(report.median_chain, 'op')}: little to gain here"
            + _what_cuts(report)
        )
    failed = [flush for flush in report.flushes if flush.eager.startswith(FAILED)]
    if failed:
        said.append(
            f"{_plural(len(failed), 'chain')} ran as eager ops: {failed[0].eager}; "
            "AUTOFUSE_LOGS=kernel says more, and it is worth a bug report"
        )
    off = _eager_for("recording is off", report).total()
    if off:
        said.append(
            f"{_plural(off, 'op')} ran where nothing is recorded (torch.func, a mode, "
            "autofuse.disabled)"
        )
    for reason, why in (
        ("anomaly mode", "which looks at the backward of every op"),
        ("saved tensor hooks", "which may tell when they are called; torch's own may not"),
    ):
        told = _eager_for(reason, report).total()
        if told:
            said.append(f"{_plural(told, 'op')} ran at once under {reason}, {why}")
    said += _kept(report)
    return said


def _what_cuts(report: Findings) -> str:
    """What ends most chains, for advice on short ones."""
    ((reason, position), count), *_ = report.reasons.most_common()
    total = len(report.flushes)
    return f"; {count} of {total} chains end with {reason!r} at {shown(position)}"


def _kept(report: Findings) -> list[str]:
    """Intermediates that were stored only because variables still held them."""
    kept: dict[tuple[str, str, Position | None], list[int]] = defaultdict(list)
    for out in report.stored:
        if not out.last and all(who.startswith("variable ") for who in out.holders):
            kept[out.op, " and ".join(out.holders), out.position].append(out.nbytes)
    return [
        f"a result of {op} in the middle of a chain is stored because {who} holds it at "
        f"{shown(position)} ({_plural(len(nbytes), 'time')}, {_bytes(sum(nbytes))}); "
        "`del` it after its last use if nothing needs it later"
        for (op, who, position), nbytes in kept.items()
    ]


# --- show -----------------------------------------------------------------------------------------


def show(x: torch.Tensor, file: TextIO | None = None) -> None:
    """Print what a pending tensor is going to be computed from; nothing runs.

    x: any tensor. file: where to print, default stdout. Raises TypeError for what is no tensor.
    """
    print(expression(x), file=file)


def expression(x: torch.Tensor) -> str:
    """The text that `show` prints."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"autofuse.show takes a tensor, not {type(x).__name__}")
    if not isinstance(x, Tensor):
        return (
            f"a plain tensor, {_about(x)}: nothing is recorded of it; "
            "autofuse.wrap makes a tensor that records"
        )
    node = x._af
    if isinstance(node, Lost):
        return f"lost: {node.error}"
    if not isinstance(node, Node):
        return f"concrete, {_about(node.real if isinstance(node, Held) else x)}: nothing is pending"
    recorder = node.recorder
    with recorder.lock:
        chain = recorder.chain
        consts = list(chain.consts)
        meta = node.meta
        if x._af is not node or meta is None:
            return expression(x)  # another thread has just run it
    nodes = node.path()
    used = [nodes[index] for index in needed([one.args for one in nodes], [node.index])]
    inputs = sorted({~ref for one in used for ref in one.args if ref < 0})
    lines = [
        f"pending, {spelled(meta)} on {recorder.device}: "
        f"{_plural(len(used), 'op')} over {_plural(len(inputs), 'Input')}"
    ]
    lines += [f"  x{k}: {spelled(node.inputs[k])}" for k in inputs]
    for one in used:
        operands = [
            repr(consts[ref - CONST]) if ref >= CONST else f"v{ref}" if ref >= 0 else f"x{~ref}"
            for ref in one.args
        ]
        assert one.op is not None and one.meta is not None
        lines.append(
            f"  v{one.index} = {one.op.name}({', '.join(operands)})  # {spelled(one.meta)}"
        )
    return "\n".join(lines)


def _about(x: torch.Tensor) -> str:
    with NoModes():
        return f"{spelled(x)} on {x.device}"
