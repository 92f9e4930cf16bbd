"""The same loop eagerly and fused, on one timeline: what torch.profiler has seen, as an SVG.

    python bench/timeline.py [--device cuda] [--steps 4] [--svg docs/timeline.svg]

A turn is a few steps of a small recurrent loop, a matmul and nine pointwise ops each. Of a number
of profiled turns each way that of the median length is drawn: above, what the host was at, below,
what ran on the device. The profiler takes time of its own; what a turn takes without it stands in
the caption.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
import machine  # noqa: E402
import timing  # noqa: E402

TURN = "one turn of the loop"
TURNS = 9  # profiled, of each way
SHAPE = 256, 512
DEFAULT = Path(__file__).parent.parent / "docs" / "timeline.svg"

Ways = dict[str, Callable[[], object]]


def loop(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        z = torch.sigmoid(h @ w + x)
        h = z * h + (1 - z) * torch.tanh(h * 2 - x)
    return h


# --- profiling -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """What ran from `begin` to `end`, in us."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """matmul, fused or eager; or wait, of the host for the device."""
        if "ynchronize" in self.name:
            return "wait"
        if self.name.startswith(("autofuse", "af_")):
            return "fused"
        products = ("aten::mm", "aten::matmul", "gemm", "cutlass", "nvjet", "splitK")
        return "matmul" if any(part in self.name for part in products) else "eager"

    @property
    def label(self) -> str:
        """Short enough for a box."""
        if self.kind in ("matmul", "wait"):
            return self.kind
        if self.kind == "fused":
            return "one kernel" if self.name.startswith("af_") else "nine ops"
        return self.name.removeprefix("aten::") if "aten::" in self.name else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; device is empty where there is none beside the host."""

    way: str
    host: tuple[Span, ...]
    device: tuple[Span, ...]

    @property
    def us(self) -> float:
        """From its beginning to its last result."""
        return max(span.end for span in (*self.host, *self.device))


def profiled(way: str, call: Callable[[], object], device: str) -> Turn:
    """The turn of the median length of TURNS."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):  # the first time the profiler sets itself up
        with profile(activities=activities, acc_events=True) as prof:
            for _ in range(TURNS):
                with record_function(TURN):
                    call()
                    timing.synchronize(device)
    turns = sorted(turns_of(way, prof.events()), key=lambda turn: turn.us)
    return turns[len(turns) // 2]


def turns_of(way: str, events: Sequence) -> list[Turn]:
    """The turns among the events of a profile, each beginning at 0."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    names = {event.name for event in host}  # the profiler repeats ranges of the host on the device
    on_device = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and event.name not in names
    ]
    found = []
    for turn in host:
        if turn.name != TURN:
            continue
        begin, end = turn.time_range.start, turn.time_range.end
        spans = (
            tuple(
                Span(event.name, event.time_range.start - begin, event.time_range.end - begin)
                for event in sorted(some, key=lambda event: event.time_range.start)
                if begin <= event.time_range.start <= end
            )
            for some in (turn.cpu_children, on_device)
        )
        found.append(Turn(way, *spans))
    return found


# --- drawing -------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 960, 74, 12
LANE, GAP, TOP = 26, 4, 30  # height of a lane, between two, and above the first
KINDS = {
    "eager": "an eager op or kernel", "matmul": "the matmul", "fused": "recorded ops, fused",
    "wait": "the host waits",
}  # fmt: skip
STYLE = """
.paper { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, sans-serif }
.faint { fill: #59636e } .lane { fill: #f0f2f5 } .tick { stroke: #d1d9e0 }
.eager { fill: #e0a458 } .matmul { fill: #8aa1b8 } .fused { fill: #2e8b57 } .wait { fill: #d5dbe1 }
.in { fill: #10151a; font-size: 10px } .fused + .in { fill: #ffffff }
.way { font-weight: 600; font-size: 13px }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9aa4af } .lane { fill: #1b222b }
.tick { stroke: #3d444d } .wait { fill: #39434e } .wait + .in { fill: #e6edf3 }
}
"""


def draw(turns: Sequence[Turn], caption: Sequence[str]) -> str:
    """Turns below each other, on one scale."""
    longest = max(turn.us for turn in turns)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    step, y = tick(longest), TOP
    foot = TOP + sum(TOP + (LANE + GAP) * (1 + bool(turn.device)) for turn in turns) - TOP + 14
    for k in range(int(longest / step) + 1):
        x = LEFT + k * step * scale
        parts.append(f'<text class="faint" x="{x:.1f}" y="{foot}" text-anchor="middle">'
                     f"{k * step:g}{' us' * (k == 0)}</text>")  # fmt: skip
    for turn in turns:
        lanes = [("host", turn.host)] + ([("device", turn.device)] if turn.device else [])
        parts.append(f'<text class="way" x="{LEFT}" y="{y - 8}">{escape(heading(turn))}</text>')
        for name, spans in lanes:
            parts.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{name}</text>')
            width = WIDTH - LEFT - RIGHT
            parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{width}" height="{LANE}"/>')
            parts += [
                f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + LANE}"/>'
                for x in (LEFT + k * step * scale for k in range(1, int(longest / step) + 1))
            ]
            parts += [box(span, y, scale) for span in spans]
            y += LANE + GAP
        y += TOP
    y = foot
    y += 22
    x = LEFT
    present = {span.kind for turn in turns for span in (*turn.host, *turn.device)}
    for kind in (kind for kind in KINDS if kind in present):
        parts.append(f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{KINDS[kind]}</text>')
        x += 40 + 6.6 * len(KINDS[kind])
    for line in caption:
        y += 18
        parts.append(f'<text class="faint" x="{LEFT}" y="{y}">{escape(line)}</text>')
    title = escape(summary(turns))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" '
        f'width="{WIDTH}" height="{y + 10}" role="img"><title>{title}</title>'
        f'<style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{y + 10}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def summary(turns: Sequence[Turn]) -> str:
    """What a picture shows, for who does not see it."""
    return "; ".join(map(heading, turns))


def heading(turn: Turn) -> str:
    kernels = [span for span in turn.device if not span.name.startswith(("Memcpy", "Memset"))]
    where = f", {len(kernels)} kernels" if turn.device else ""
    return f"{turn.way}: {turn.us:.0f} us{where}"


def box(span: Span, y: float, scale: float) -> str:
    """A span in its lane, with its name where there is room."""
    x, width = LEFT + span.begin * scale, max((span.end - span.begin) * scale - 0.6, 0.6)
    rect = (
        f'<rect class="{span.kind}" x="{x:.2f}" y="{y + 2}" width="{width:.2f}" '
        f'height="{LANE - 4}"><title>{escape(span.name)}: {span.end - span.begin:.1f} us</title>'
        "</rect>"
    )
    label = span.label
    if label and width > 5.8 * len(label) + 4:
        rect += f'<text class="in" x="{x + 3:.2f}" y="{y + 17}">{escape(label)}</text>'
    return f"<g>{rect}</g>"


def tick(longest: float) -> float:
    """us between two ticks, so that there are from 4 to 10."""
    step = 1.0
    while longest / step > 10:
        step *= 2.5 if str(step)[0] == "2" else 2.0
    return step


# --- both ----------------------------------------------------------------------------------------


def ways(device: str, steps: int) -> Ways:
    """The loop, eagerly and fused, ready to be timed."""
    autofuse.config.compile, autofuse.config.measure = "now", False  # shown is the fused way
    generator = torch.Generator().manual_seed(0)
    h, x = (torch.randn(*SHAPE, generator=generator).to(device) for _ in range(2))
    w = (torch.randn(SHAPE[1], SHAPE[1], generator=generator) / 32).to(device)
    fused = autofuse.fuse(loop)
    calls: Ways = {"eager": lambda: loop(h, x, w, steps), "fused": lambda: fused(h, x, w, steps)}
    a, b = (calls[way]() for way in ("eager", "fused"))
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if device == "cuda" and not torch.equal(a, b):
        raise AssertionError("the ways differ")
    return calls


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--svg", type=Path, default=DEFAULT)
    parser.add_argument("--commit", default="", help="for the caption; git is asked if not given")
    args = parser.parse_args(argv)
    calls = ways(args.device, args.steps)
    series = timing.interleaved(calls, args.device, rounds=9, iterations=100)
    plain = {way: statistics.median(times.times) for way, times in series.items()}
    turns = [profiled(way, call, args.device) for way, call in calls.items()]
    size = "x".join(map(str, SHAPE))
    caption = [
        f"{args.steps} steps of a recurrent loop on {size} float32, a matmul and nine pointwise "
        "ops each; seen by torch.profiler, which takes time itself.",
        f"Without it: eager {plain['eager']:.0f} us, fused {plain['fused']:.0f} us. "
        f"{machine.machine(args.device)}, "
        f"commit {args.commit or machine.head_commit()}",
    ]
    args.svg.write_text(draw(turns, caption))
    for turn in turns:
        print(f"{heading(turn)} with the profiler, {plain[turn.way]:.1f} us without")
    print(f"{args.svg.name} written; with its text, in a page:")
    print(f"![One loop on a timeline: {summary(turns)}]({args.svg.name})")


if __name__ == "__main__":
    main()
