"""The section of docs/performance.md with the peers, Markdown made of results and nothing else.

What is faster, by how much, where autofuse loses to eager and to whom else: all is read off the
cells. `replaced` puts the section between the page's markers.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable

from results import Cell, Results

BEGIN, END = "<!-- performance -->\n", "<!-- /performance -->"
OURS = "autofuse"
AHEAD = 0.95  # of another's time, to be called ahead of it
NAMED = 6  # rows at most, where another peer is ahead
UNSTEADY = 2.0  # times its 20th percentile that the 80th is, of what is no figure
Row = tuple[str, dict[str, Cell]]  # a workload and its cells by peer


def markdown(results: Results, file: str) -> str:
    """The section; file: the name of the results in bench/results/."""
    parts = [_head(results, file)]
    for device in _unique(cell.device for cell in results.cells):
        measured = [(workload, cells) for workload, on, cells in results.rows() if on == device]
        rows = [(workload, _steady(cells)) for workload, cells in measured]
        rows = [row for row in rows if row[1]]
        where = "" if device == results.cells[0].device else " on this machine's CPU"
        parts += [_table(rows, f"us per step{where}"), _verdict(rows, where), _left_out(measured)]
    return "\n".join(part for part in parts if part)


def sections_of(page: str) -> list[str]:
    """What stands between the markers of `page`."""
    return [part.split(END)[0] for part in page.split(BEGIN)[1:]]


def file_of(section: str) -> str:
    """The name of the file of results that `section` was made of."""
    return section.partition("`bench/results/")[2].partition("`")[0]


def replaced(page: str, section: str) -> str:
    """`page` with `section` in place of that of the same results, or else of its first one."""
    sections = sections_of(page)
    old = next((x for x in sections if file_of(x) == file_of(section)), sections[0])
    return page.replace(BEGIN + old + END, BEGIN + section + END, 1)


def _is_steady(cell: Cell) -> bool:
    return cell.p20 is None or cell.p80 is None or cell.p80 <= UNSTEADY * cell.p20


def _steady(cells: dict[str, Cell]) -> dict[str, Cell]:
    """`cells` without those whose rounds differ too much; none where eager's do."""
    found = {name: cell for name, cell in cells.items() if _is_steady(cell)}
    return found if "eager" in found or "eager" not in cells else {}


def _left_out(rows: list[Row]) -> str:
    """Who was slow in some rounds: a compiler that begins again, or others on the machine."""
    named = [
        f"{_short(workload)}, {name} ({_us(cell.p20 or 0)} to {_us(cell.p80 or 0)})"
        for workload, cells in rows
        for name, cell in cells.items()
        if not _is_steady(cell)
    ]
    if not named:
        return ""
    text = (
        "- Left out, for the 80th percentile is more than twice the 20th, in us, and with eager's "
        f"the row: {'; '.join(named)}."
    )
    return _filled(text)


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False) + "\n"  # fmt: skip


def _filled(point: str) -> str:
    """A line of a list."""
    return _fill(point, "  ")


# --- the head ------------------------------------------------------------------------------------


def _head(results: Results, file: str) -> str:
    head = results.head
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    driver = f", driver {head['driver']}" if "driver" in head else f", {head['threads']} threads"
    scale = head.get("scale", 1.0)
    text = (
        f"`python bench/run.py` on one {head['machine']}{driver}; {versions}; commit "
        f"{head['commit']}, {head['date']}; `bench/results/{file}`. "
    )
    if scale != 1:
        text += f"**A trial at {scale:g} of all sizes and lengths, no measurement.** "
    if "sm_mhz" in head.get("clocks", {}):
        low, high = head["clocks"]["sm_mhz"]
        text += f"The GPU ran at {low} to {high} MHz. "
    text += (
        "All variants of a row took turns in the same rounds. Eager's column is the median in us "
        "per step, the others are ratios to it, so that less than 1 is faster than eager. Rows of "
        "2^22 and more are times on the device with the L2 cache flushed, the others are wall "
        "clock. 64x256 and float32 where nothing else is said."
    )
    if any(cell.peer == "eager alone" for cell in results.cells):
        text += " `eager alone` never imports autofuse, in a process and rounds of its own."
    return _fill(text)


# --- the table -----------------------------------------------------------------------------------


def _short(workload: str) -> str:
    """A label without what most have; `_head` says what that is."""
    return workload.removesuffix(" float32").removesuffix(", 64x256")


def _peers(rows: list[Row]) -> list[str]:
    """Peers with at least one figure, in the order of the cells."""
    names = _unique(name for _, cells in rows for name in cells)
    return [n for n in names if any(n in cells and cells[n].median for _, cells in rows)]


def _table(rows: list[Row], unit: str) -> str:
    peers = [name for name in _peers(rows) if name != "eager"]
    lines = [f"| {unit} | eager | {' | '.join(peers)} |", "|---" * (len(peers) + 2) + "|"]
    for workload, cells in rows:
        base = cells.get("eager")
        if base is None or base.median is None:
            continue
        figures = [_ratio(cells.get(name)) for name in peers]
        lines.append(f"| {_short(workload)} | {_us(base.median)} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _ratio(cell: Cell | None) -> str:
    if cell is None or cell.ratio is None:
        return ""
    text = f"{cell.ratio:.2f}"
    return f"**{text}**" if cell.peer == OURS else text


# --- what follows from it ------------------------------------------------------------------------


def _verdict(rows: list[Row], where: str) -> str:
    ours = {w: cells[OURS] for w, cells in rows if OURS in cells and cells[OURS].ratio is not None}
    if not ours:
        return ""
    ratios = {workload: cell.ratio or 0.0 for workload, cell in ours.items()}
    faster = [w for w, ratio in ratios.items() if ratio < 1]
    slower = sorted((w for w, ratio in ratios.items() if ratio > 1), key=lambda w: -ratios[w])
    best = min(ratios, key=lambda w: ratios[w])
    lines = [
        f"- autofuse is faster than eager in {len(faster)} of these {len(ours)} rows{where}; the "
        f"median ratio is {statistics.median(ratios.values()):.2f}, the best {ratios[best]:.2f} "
        f"({_short(best)})."
    ]
    if slower:
        named = "; ".join(f"{_short(w)} {ratios[w]:.2f}" for w in slower)
        lines.append(f"- It loses to eager, and should not be used, in: {named}.")
    near = sorted((w for w in faster if ratios[w] > AHEAD), key=lambda w: -ratios[w])
    if near:
        named = "; ".join(f"{_short(w)} {ratios[w]:.2f}" for w in near)
        lines.append(f"- Nothing is gained, or little, in: {named}.")
    lines += _against(rows, ours)
    lines += _bits(rows)
    return "".join(map(_filled, lines))


def _against(rows: list[Row], ours: dict[str, Cell]) -> list[str]:
    """For every other peer, where it is ahead of autofuse."""
    lines = []
    for name in _peers(rows):
        if name in ("eager", "eager alone", OURS, "autofuse.fuse"):
            continue
        both = {
            workload: (cells[name].median, ours[workload].median)
            for workload, cells in rows
            if workload in ours and name in cells and cells[name].median
        }
        ahead = {
            workload: theirs / mine
            for workload, (theirs, mine) in both.items()
            if theirs and mine and theirs < AHEAD * mine
        }
        behind = sum(
            1 for theirs, mine in both.values() if theirs and mine and mine < AHEAD * theirs
        )
        text = f"- {name}: autofuse is ahead of it in {behind} of {len(both)} rows"
        if ahead:
            worst = sorted(ahead, key=lambda workload: ahead[workload])[:NAMED]
            named = "; ".join(f"{_short(workload)} {ahead[workload]:.2f}" for workload in worst)
            most = "" if len(ahead) <= NAMED else f"the {NAMED} furthest, "
            text += f", behind in {len(ahead)} ({most}its time over autofuse's): {named}"
        lines.append(text + ".")
    return lines


def _bits(rows: list[Row]) -> list[str]:
    """Whose results are eager's bit for bit."""
    counts = []
    for name in _peers(rows):
        seen = [cells[name].same_bits for _, cells in rows if name in cells]
        known = [same for same in seen if same is not None]
        if known:
            counts.append(f"{name} {sum(known)} of {len(known)}")
    return [f"- Rows with eager's bits: {', '.join(counts)}."] if counts else []
