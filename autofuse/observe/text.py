"""Wording: findings and a pending expression as text. Knows no more than they hold."""

from __future__ import annotations

from collections import Counter
from typing import Any, TextIO

import torch

from ..chain.shell import Held, Lost, Tensor
from ..chain.state import Node
from ..inside import patient
from ..lines import shown
from ..program.program import CONST
from ..program.walk import needed
from ..record.origins import STAYS
from ..record.policy import ASIDE
from ..torch_private import NoModes
from .advice import advice_on
from .events import spelled
from .findings import Findings
from .spelling import listed, plural, sized


def summary(report: Findings) -> str:
    """What a report comes to, in a line."""
    seen = report.ops_seen.total()
    told = report.eager_for(ASIDE).total() + report.eager_for(STAYS).total()  # no ops of theirs
    eager = report.ops_eager.total() - told
    return (
        f"{plural(seen, 'op')} seen, {seen - eager} fused in "
        f"{plural(report.launches, 'launch')}, {eager} run eagerly"
    )


def lines_of(report: Findings) -> list[str]:
    """What `print` says of a report."""
    lines = [f"autofuse: {summary(report)}" + (" so far" if report.open else "")]
    if report.flushes:
        lines.append(
            f"chains: {len(report.chains)}, median {plural(report.median_chain, 'op')}, "
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
        f"{listed(use.reads)} ({sized(use.bytes_read)}), writes "
        f"{listed(use.writes)} ({sized(use.bytes_written)})"
        for use in report.kernels
    ))  # fmt: skip
    if report.values_elided:
        lines.append(
            f"saved: {plural(report.values_elided, 'intermediate')}, "
            f"{sized(report.bytes_saved)} that never got memory"
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
        lines.append(f"still pending: {plural(report.pending, 'op')}")
    return lines + _section("advice", (one.text for one in advice_on(report)), limit=99)


def _section(title: str, items: Any, limit: int = 10) -> list[str]:
    found = list(items)
    more = [f"  and {len(found) - limit} more"] if len(found) > limit else []
    return [f"{title}:", *(f"  {item}" for item in found[:limit]), *more] if found else []


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
    with patient(recorder.lock):
        chain = recorder.running or recorder.chain
        consts = list(chain.consts)
        meta = node.meta
        if x._af is not node or meta is None:
            return expression(x)  # another thread has just run it
    nodes = node.path()
    used = [nodes[index] for index in needed([one.args for one in nodes], [node.index])]
    inputs = sorted({~ref for one in used for ref in one.args if ref < 0})
    lines = [
        f"pending, {spelled(meta)} on {recorder.device}: "
        f"{plural(len(used), 'op')} over {plural(len(inputs), 'Input')}"
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
