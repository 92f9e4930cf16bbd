"""Advice: what would help, in plain words, and the microseconds that it would gain.

The figures are those that `record.policy` decides by, measured once, and no measurement of the
program at hand: of a read they leave out how long the host waits for the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..chain.verified import refusals
from ..lines import Position, shown
from ..ops.reductions import REDUCTIONS, ROW_COMPOSITES
from ..record.origins import STAYS
from ..record.policy import ASIDE, FLUSH_US, LONE, SHORT, us_moved, us_recorded
from ..record.seldom import SELDOM
from ..settings.config import config
from .events import FAILED, REFUSED, WAITS, Flush
from .findings import Findings
from .spelling import listed, plural, sized

_SHORT = SHORT, LONE  # how a reason begins


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the us that doing so would gain in a region like this; None: not known."""

    text: str
    us: float | None = None


def advice_on(report: Findings) -> list[Advice]:
    """What would help, first what gains most."""
    kind = _device_type(report)
    found = [one for advise in _ADVISERS for one in advise(report, kind)]
    return sorted(found, key=lambda one: (one.us is None, -(one.us or 0.0)))


def _device_type(report: Findings) -> str:
    """Where most chains ran, or would."""
    ran = Counter(flush.device.type for flush in report.flushes)
    if ran:
        return ran.most_common(1)[0][0]
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- one function for each kind of advice ---------------------------------------------------------

_TESTS = ("bool", "is_nonzero")
_SIZES = ("getitem", "masked_select", "nonzero", "argwhere", "unique")


def _reads(report: Findings, kind: str) -> Iterable[Advice]:
    """Reads that come again: all but one of them and of the chains that they end would go."""
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
            ended = [flush for flush in report.flushes if flush.position == sync.position
                     and flush.reason.strip("_") == sync.name]  # fmt: skip
            flushes = max(0, len(ended) - 1) * FLUSH_US[kind]
            yield Advice(said[-1], us_recorded(count - 1, kind) + flushes)


def _not_recorded(report: Findings, kind: str) -> Iterable[Advice]:
    """What was not recorded at all."""
    aside, plain, seldom = map(report.eager_for, (ASIDE, STAYS, SELDOM))
    if aside:
        yield Advice(
            f"{plural(aside.total(), 'fused call')} ran as plain PyTorch, each "
            f"{'; '.join(f'{reason} ({name})' for name, reason in aside)}; "
            "autofuse.explain(function, ...) runs one as if fused and says why; "
            "config.measure = False fuses every call",
        )
    if plain:
        yield Advice(
            f"{plural(plain.total(), 'result')} of eager ops stayed plain tensors "
            f"({listed([name for name, _ in plain.elements()])}): no chain that pays begins with "
            "them; config.measure = False wraps them all",
        )
    if seldom:
        yield Advice(
            f"{plural(seldom.total(), 'op')} ({listed([name for name, _ in seldom.elements()])}) "
            "ran eagerly, for their operands have sizes that have not come often, and a chain is "
            "planned for exact sizes; pad to a few sizes, or config.measure = False records all",
        )
    short = report.eager_for(*_SHORT)
    if not (report.chains or report.pending or aside or plain or seldom or short):
        yield Advice(
            "nothing was recorded: there is no op of the table on a wrapped tensor here; "
            "autofuse.wrap the tensors, or autofuse.fuse the function"
        )


def _gain(flushes: Iterable[Flush]) -> float:
    """us by which kernels for these cost less than their ops."""
    return sum(max(0.0, flush.gain) for flush in flushes)


def _waited(report: Findings, kind: str) -> Iterable[Advice]:
    waited = [flush for flush in report.flushes if flush.eager == WAITS]
    if waited:
        yield Advice(
            f"{plural(len(waited), 'chain')} ran as eager ops while kernels were compiled; "
            "run it again after autofuse.wait()",
            _gain(waited),
        )


def _refused(report: Findings, kind: str) -> Iterable[Advice]:
    refused: dict[Position | None, list[Flush]] = defaultdict(list)
    for flush in report.flushes:
        if flush.eager == REFUSED:
            refused[flush.position].append(flush)
    for position, flushes in refused.items():
        yield Advice(
            f"{plural(len(flushes), 'chain')} ran as eager ops at {shown(position)}, where no two "
            f"runs record the same ops: after {config.max_kernels_per_line} kernels none is "
            "compiled for this line any more; make what keeps changing constant (a message on "
            "stderr names it), or raise autofuse.config.max_kernels_per_line",
            _gain(flushes),
        )


def _short(report: Findings, kind: str) -> Iterable[Advice]:
    """Short chains: with the next one each would be one flush less."""
    if sum(report.chains) and report.median_chain <= 2:
        ((reason, position), count), *_ = report.reasons.most_common()
        total = len(report.flushes)
        yield Advice(
            f"median chain is {plural(report.median_chain, 'op')}: little to gain here; "
            f"{count} of {total} chains end with {reason!r} at {shown(position)}",
            (count - 1) * FLUSH_US[kind],
        )
    short = report.eager_for(*_SHORT)
    if short and not report.chains:  # these ops are not recorded any more
        lines: Counter[Position | None] = Counter()
        for (line, _, reason), count in list(report.eager_lines.items()):
            if reason.startswith(_SHORT):
                lines[line] += count
        ((position, count), *_) = lines.most_common()
        yield Advice(
            f"{plural(short.total(), 'op')} ran at once, for chains with them are too short to "
            f"pay: little to gain here; {count} of them at {shown(position)}"
        )


def _failed(report: Findings, kind: str) -> Iterable[Advice]:
    failed = [flush for flush in report.flushes if flush.eager.startswith(FAILED)]
    if failed:
        yield Advice(
            f"{plural(len(failed), 'chain')} ran as eager ops: {failed[0].eager}; "
            "AUTOFUSE_LOGS=kernel says more, and it is worth a bug report",
            _gain(failed),
        )


def _at_once(report: Findings, kind: str) -> Iterable[Advice]:
    """Ops that something keeps from being recorded."""
    off = report.eager_for("recording is off").total()
    if off:
        yield Advice(
            f"{plural(off, 'op')} ran where nothing is recorded (torch.func, a mode, "
            "autofuse.disabled)",
            us_recorded(off, kind),
        )
    for reason, why in (
        ("anomaly mode", "which looks at the backward of every op"),
        ("saved tensor hooks", "which may tell when they are called; torch's own may not"),
    ):
        told = report.eager_for(reason).total()
        if told:
            text = f"{plural(told, 'op')} ran at once under {reason}, {why}"
            yield Advice(text, us_recorded(told, kind))


def _kept(report: Findings, kind: str) -> Iterable[Advice]:
    """Intermediates that were stored only because variables still held them."""
    kept: dict[tuple[str, str, Position | None], list[int]] = defaultdict(list)
    for out in report.stored:
        if not out.last and all(who.startswith("variable ") for who in out.holders):
            kept[out.op, " and ".join(out.holders), out.position].append(out.nbytes)
    for (op, who, position), nbytes in kept.items():
        yield Advice(
            f"a result of {op} in the middle of a chain is stored because {who} holds it at "
            f"{shown(position)} ({plural(len(nbytes), 'time')}, {sized(sum(nbytes))}); "
            "`del` it after its last use if nothing needs it later",
            us_moved(sum(nbytes), kind),
        )


def _unverified(report: Findings, kind: str) -> Iterable[Advice]:
    """Reductions where none is recorded, for nobody has compared them with eager's."""
    ended = [name for name, _ in report.eager_for("not in the table").elements()]
    ended = [name for name in ended if name in REDUCTIONS or name in ROW_COMPOSITES]
    for reason in refusals() if ended else ():
        yield Advice(
            f"reductions ended chains ({listed(ended)}), which those of contiguous tensors need "
            f"not: {reason}"
        )


_ADVISERS: tuple[Callable[[Findings, str], Iterable[Advice]], ...] = (
    _reads, _not_recorded, _waited, _refused, _short, _failed, _at_once, _kept, _unverified,
)  # fmt: skip
