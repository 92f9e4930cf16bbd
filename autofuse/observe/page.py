"""Page: a report as HTML, in one piece: no scripts, nothing that is loaded from elsewhere.

Whatever comes from the program, its lines, its files' names, what it calls things, is escaped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape

from ..kernel.source import Source
from ..lines import named, shown
from .advice import advice_on
from .events import Flush, spelled
from .findings import Findings, KernelUse
from .listing import Group, Line, Tally, groups, listings, tallies, texts
from .spelling import listed, plural, sized
from .style import PAGE, STYLE
from .text import summary

MOST_CHAINS, MOST_LINES = 300, 3000  # that are shown; the page says how many more there are

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>autofuse: {title}</title>
<style>{page}</style>
</head>
<body>
{fragment}
</body>
</html>
"""
_FRAGMENT = """<style>{style}</style>
<main class="autofuse">
<header>
<h1>What autofuse did</h1>
<p class="faint">{summary}</p>
<dl class="figures">{figures}</dl>
</header>
<section aria-label="advice"><h2>What would help</h2>{advice}</section>
<section aria-label="source"><h2>The program, line by line</h2>{source}</section>
<section aria-label="chains"><h2>Chains</h2>{chains}</section>
{backward}
</main>"""
# kind of mark -> its sign, and what it means
_KINDS = {
    "recorded": ("●", "recorded: a kernel computes it"),
    "ended": ("■", "ends a chain: a value is needed"),
    "eager": ("▲", "ran eagerly, as plain PyTorch"),
    "waits": ("◆", "waits: the host reads a value"),
}


def document(report: Findings) -> str:
    """The page of a report, for a file."""
    title = escape(summary(report))
    return _DOCUMENT.format(title=title, page=PAGE, fragment=fragment(report))


def fragment(report: Findings, prefix: str = "") -> str:
    """The same for a page that is there, such as a notebook's. prefix: of the ids in it."""
    found = groups(report.flushes)
    return _FRAGMENT.format(
        style=STYLE,
        summary=escape(summary(report) + (" so far" if report.open else "")),
        figures="".join(_figure(name, value) for name, value in _figures(report)),
        advice=_advice(report),
        source=_sources(tallies(report)),
        chains=_chains(found, prefix),
        backward=_backward([use for use in report.kernels if use.backward]),
    )


def _figures(report: Findings) -> Iterable[tuple[str, str]]:
    seen, fused = report.ops_seen.total(), report.ops_fused.total()
    yield "ops seen", f"{seen:,}"
    yield "of these fused", f"{fused:,}"
    yield "kernel launches", f"{report.launches:,}"
    yield "median chain", plural(report.median_chain, "op")
    yield "never got memory", sized(report.bytes_saved)
    yield "host reads", f"{len(report.syncs):,}"
    if report.pending:
        yield "still pending", plural(report.pending, "op")


def _figure(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


# --- advice ---------------------------------------------------------------------------------------


def _advice(report: Findings) -> str:
    found = advice_on(report)
    if not found:
        return "<p>Nothing that autofuse knows of.</p>"
    rows = []
    for one in found:
        us = "not known" if one.us is None else f"{one.us:,.0f} µs" if one.us >= 10 else (
            f"{one.us:.2g} µs")  # fmt: skip
        rows.append(f'<tr><td class="us">{us}</td><td class="advised">{escape(one.text)}</td></tr>')
    return (
        '<table><thead><tr><th scope="col" class="us">would save</th>'
        f'<th scope="col">what to do</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        '<p class="faint">Over the region that this report is about, by the costs of ops, flushes '
        "and memory that autofuse decides by; of a read, without the time for which the host waits "
        "for the device.</p>"
    )


# --- source ---------------------------------------------------------------------------------------


def _sources(counted: Mapping[tuple[str, int], Tally]) -> str:
    if not counted:
        return "<p>No line of the program recorded anything or ran an op.</p>"
    legend = "".join(f"<li>{_chip(kind, text)}</li>" for kind, (_, text) in _KINDS.items())
    parts, left = [f'<ul class="legend" aria-label="what the signs mean">{legend}</ul>'], MOST_LINES
    for name, lines in listings(dict(counted)):
        if left <= 0:
            parts.append(f"<p>{escape(named(name))} is left out: this page is long enough.</p>")
            continue
        few, left = lines[:left], left - len(lines)
        parts.append(f"<h3>{escape(named(name))}</h3>")
        parts.append(f'<ol class="source">{"".join(map(_line, few))}</ol>')
        if len(few) < len(lines):
            parts.append(f"<p>{plural(len(lines) - len(few), 'line')} more are left out.</p>")
    return "".join(parts)


def _line(line: Line) -> str:
    if line.text is None:
        return '<li><span class="number" aria-hidden="true">⋮</span></li>'
    chips = [] if line.tally is None else list(_chips(line.tally))
    kind = f' class="{chips[-1][0]}"' if chips else ""  # the last tells most
    told = "".join(_chip(*chip) for chip in chips)
    told = f' <span class="chips">{told}</span>' if chips else ""
    return (
        f'<li{kind}><span class="number">{line.number}</span> '
        f"<code>{escape(line.text)}</code>{told}</li>"
    )


def _chips(tally: Tally) -> Iterable[tuple[str, str]]:
    """The chips of a line, (kind, words), the one that costs most last."""
    if tally.recorded:
        yield "recorded", f"recorded {tally.recorded.total():,}"
    if tally.ended:
        chains = plural(tally.ended.total(), "chain")
        yield "ended", f"ends {chains}: {_most(tally.ended)}"
    if tally.eager:
        why = Counter({f"{op} ({reason})": n for (op, reason), n in tally.eager.items()})
        yield "eager", f"eager {tally.eager.total():,}: {_most(why)}"
    if tally.waited:
        yield "waits", f"waits {tally.waited.total():,}: {_most(tally.waited)}"


def _most(counted: Counter[str], limit: int = 3) -> str:
    more = len(counted) - limit
    said = "; ".join(name for name, _ in counted.most_common(limit))
    return f"{said}; and {more} more" if more > 0 else said


def _chip(kind: str, text: str) -> str:
    sign = _KINDS[kind][0]
    return f'<span class="chip {kind}"><span aria-hidden="true">{sign} </span>{escape(text)}</span>'


# --- chains ---------------------------------------------------------------------------------------


def _chains(found: list[Group], prefix: str) -> str:
    if not found:
        return "<p>No chain ran.</p>"
    first = texts(found)
    few = found[:MOST_CHAINS]
    parts = [
        '<p class="faint">Each block is a chain, as often as it ran; ops with a thick edge are '
        "those whose values got memory. Open one for what it reads and for its kernel.</p>",
        *(_chain(number, group, first, prefix) for number, group in enumerate(few)),
    ]
    if len(found) > len(few):
        others = found[len(few) :]
        ran = sum(group.count for group in others)
        parts.append(f"<p>{plural(len(others), 'other chain')}, run {ran:,} times, are left out: "
                     "this page is long enough.</p>")  # fmt: skip
    return "".join(parts)


def _chain(number: int, group: Group, first: Mapping[Source, int], prefix: str) -> str:
    flush = group.flush
    kernels = "".join(_kernel(source, first[source], number, prefix) for source in flush.sources)
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(group)
    )
    return (
        f'<details class="chain" id="{escape(prefix)}chain-{number + 1}"><summary>'
        f'<span class="ops">{_ops(flush)}</span><span class="told">{escape(_told(group))}</span>'
        f'</summary><div class="inside"><dl class="facts">{facts}</dl>{kernels}</div></details>'
    )


def _ops(flush: Flush) -> str:
    stored = {*flush.live, *flush.kept}
    return " ".join(
        f'<span class="op stored">{escape(op)}</span>' if index in stored
        else f'<span class="op">{escape(op)}</span>'
        for index, op in enumerate(flush.ops)
    )  # fmt: skip


def _told(group: Group) -> str:
    flush = group.flush
    ran = (
        "raised" if flush.raised
        else "run as eager ops" if flush.eager
        else plural(flush.kernels, "kernel") if flush.live
        else "nobody needed it"
    )  # fmt: skip
    times = f", {group.count:,} times" if group.count > 1 else ""
    saved = f", {sized(group.saved)} never got memory" if group.saved else ""
    return (
        f"{plural(len(flush.ops), 'op')}: {ran}{times}{saved}; "
        f"ended by {flush.reason} at {shown(flush.position)}"
    )


def _facts(group: Group) -> Iterable[tuple[str, str]]:
    flush = group.flush
    lines = Counter(shown(line) for line in flush.lines if line is not None)
    if lines:
        yield "recorded at", ", ".join(f"{line} ({plural(n, 'op')})" for line, n in lines.items())
    yield "ended by", f"{flush.reason} at {shown(flush.position)}"
    yield "on", str(flush.device)
    yield "reads", listed([spelled(meta) for meta in flush.inputs])
    for name, which in (("stores", flush.live), ("keeps for backward", flush.kept)):
        if which:
            yield name, listed([f"{flush.ops[k]} {spelled(flush.values[k])}" for k in which])
    if flush.eager:
        yield "run as eager ops", flush.eager
    elif flush.live and not flush.raised:
        yield "never got memory", f"{sized(group.saved)} in {plural(group.count, 'run')}"
        yield "kernel was", _OUTCOMES[flush.outcome]


_OUTCOMES = {"hit": "in memory", "soft miss": "on disk", "hard miss": "compiled for this chain"}


def _kernel(source: Source, first: int, number: int, prefix: str) -> str:
    """The text of a kernel where it comes first, and the way there where it comes again."""
    if first != number and first < MOST_CHAINS:
        at = f"{escape(prefix)}chain-{first + 1}"
        return f'<p>Kernel {escape(source.name)}: <a href="#{at}">as of chain {first + 1}</a></p>'
    return _text(source.name, source.text)


def _text(name: str, text: str) -> str:
    label = escape(f"text of {name}")
    return (
        f'<details class="kernel"><summary>Kernel <code>{escape(name)}</code></summary>'
        f'<pre tabindex="0" role="region" aria-label="{label}"><code>{escape(text)}</code></pre>'
        "</details>"
    )


def _backward(uses: list[KernelUse]) -> str:
    if not uses:
        return ""
    parts = []
    for use in uses[:MOST_CHAINS]:
        parts.append(
            f'<p class="faint">{use.launches:,} times; reads {escape(listed(use.reads))}, writes '
            f"{escape(listed(use.writes))}</p>{_text(use.name, use.source)}"
        )
    return f'<section aria-label="backward"><h2>Kernels of backward</h2>{"".join(parts)}</section>'
