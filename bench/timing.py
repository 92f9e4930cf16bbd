"""Time: how a call is measured. Owns warm-up, rounds, the launch queue, the L2 cache, percentiles.

A host-bound figure is wall clock over many calls with one final wait (`host_us`). A device figure
is CUDA events around calls whose launches were queued while the device was kept busy (`device_us`),
with the L2 cache flushed before each where memory is what is measured. Variants take turns within
every round, A B A B, so that a drift of clocks or of the machine meets them all. Knows neither
workloads nor peers. On the CPU both figures are wall clock.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from machine import machine as machine  # for the heads of the scripts

ROUNDS = 7
ROUND_S = 0.02  # of one variant in one round, where a call is shorter
LONG_S = 0.5  # a call as long as this gets LONG_ROUNDS
LONG_ROUNDS = 3
SETTLED = 120  # steps in which a fused call finds the better way,
SETTLED_S = 3.0  # unless they take longer
QUEUE = 200  # calls measured behind one sleep: the launch queue has 1024 places
L2_BYTES = 256 << 20  # written to flush the cache; the largest has 60 MB
SLEEP_S = 0.5  # at most, of the device, while launches are queued


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Call:
    """One variant: what is timed, and what waits until its last result is there.

    finish: given the last result; None waits for torch's device. on_stream: its work goes to
    torch's current stream, where CUDA events see it; other work is measured by wall clock.
    """

    run: Callable[[], object]
    finish: Callable[[object], object] | None = None
    on_stream: bool = True
    note: str = ""  # for its cell

    def wait(self, result: object, device: str) -> None:
        if self.finish is not None:
            self.finish(result)
        synchronize(device)


def in_thread(place: str, call: Callable[[], object]) -> Callable[[], object]:
    """`call` with this `config.backward_thread`: "engine" is what it is without autofuse."""
    import autofuse  # not above: `alone` measures eager in a process that never imports it

    settings = vars(autofuse.config)  # assigning to a field would end every chain

    def run() -> object:
        settings["backward_thread"] = place
        try:
            return call()
        finally:
            settings["backward_thread"] = "auto"

    return run


@dataclass(slots=True)
class Series:
    """Times of one variant over the rounds, in us."""

    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def p20(self) -> float:
        return sorted(self.times)[len(self.times) // 5]

    @property
    def p80(self) -> float:
        return sorted(self.times)[-1 - len(self.times) // 5]

    def __str__(self) -> str:
        return f"{self.median:9.2f} ({self.p20:.2f}-{self.p80:.2f})"


# --- one round of one variant --------------------------------------------------------------------


def host_us(call: Callable[[], object] | Call, device: str, iterations: int) -> float:
    """Wall-clock us per call over `iterations` calls with one wait at the end."""
    timed = call if isinstance(call, Call) else Call(call)
    run, result = timed.run, None
    synchronize(device)
    start = time.perf_counter()
    for _ in range(iterations):
        result = run()
    timed.wait(result, device)
    return (time.perf_counter() - start) / iterations * 1e6


def device_us(
    call: Callable[[], object], device: str, iterations: int, flush: bool = True
) -> float:
    """us per call on the device: the median of events around each call, launches queued ahead.

    flush: write L2_BYTES before every call, outside its events, so that it reads from memory;
    without, the calls run back to back between two events.
    """
    if device != "cuda":
        return host_us(call, device, iterations)
    cache = _cache() if flush else None
    iterations = max(1, min(iterations, QUEUE))
    marks = [_events() for _ in range(iterations if flush else 1)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()  # how long the host needs for one tells how long the device has to sleep
    seconds = (time.perf_counter() - start + 2e-5) * iterations * 1.5
    torch.cuda.synchronize()
    keep_busy(device, min(seconds, SLEEP_S))
    if cache is None:
        first, last = marks[0]
        first.record()
        for _ in range(iterations):
            call()
        last.record()
    else:
        for first, last in marks:
            cache.zero_()
            first.record()
            call()
            last.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) * 1e3 for first, last in marks]
    return statistics.median(times) if flush else times[0] / iterations


def keep_busy(device: str, seconds: float) -> None:
    """Let the device sleep this long on the current stream; the host goes on at once."""
    if device == "cuda":
        torch.cuda._sleep(int(seconds * _sleep_mhz() * 1e6))


def sm_mhz(cycles: int = 2_000_000) -> float:
    """The clock at which the device runs now, from the time that `cycles` of it take."""
    first, last = _events()
    torch.cuda._sleep(cycles)
    first.record()
    torch.cuda._sleep(cycles)
    last.record()
    torch.cuda.synchronize()
    return cycles / (first.elapsed_time(last) * 1e3)


@functools.cache
def _sleep_mhz() -> float:
    return sm_mhz()


@functools.cache
def _cache() -> torch.Tensor:
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device="cuda")


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


# --- rounds --------------------------------------------------------------------------------------


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    device: str,
    rounds: int = 9,
    iterations: int = 1000,
    warm: int = 10,
) -> dict[str, Series]:
    """Time every call in every round, A B A B, after `warm` calls or more of each."""
    series = {name: Series() for name in calls}
    for call in calls.values():
        for _ in range(max(warm, iterations // 10)):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            series[name].times.append(host_us(call, device, iterations))
    return series


def measured(
    calls: Mapping[str, Call],
    device: str,
    clock: str = "host",
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    flush: bool = True,
) -> tuple[dict[str, Series], dict[str, str]]:
    """Series of the calls that went through, and why the others did not, both by name.

    clock: "host" or "device", the latter with or without `flush`ing L2. Every call is warmed up for
    about a round, which also tells how many iterations a round has. A call that raises leaves the
    rounds, the others go on.
    """
    series: dict[str, Series] = {}
    failed: dict[str, str] = {}
    iterations: dict[str, int] = {}
    for name, call in calls.items():
        try:
            us = warm_up(call, device, round_s)
        except Exception as error:  # somebody else's compiler or launch; the reason is kept
            failed[name] = reason(error)
            continue
        iterations[name] = max(1, math.ceil(round_s * 1e6 / us))
        series[name] = Series()
        if us >= LONG_S * 1e6:
            rounds = min(rounds, LONG_ROUNDS)
    for _ in range(rounds):
        for name in list(series):
            call, count = calls[name], iterations[name]
            try:
                if count > 1:  # caches, threads and clocks are the last variant's
                    host_us(call, device, max(1, count // 10))
                if clock == "device" and call.on_stream:
                    us = device_us(call.run, device, count, flush)
                else:
                    us = host_us(call, device, count)
                series[name].times.append(us)
            except Exception as error:
                failed[name] = reason(error)
                del series[name]
    return series, failed


def warm_up(call: Call, device: str, seconds: float) -> float:
    """Run a call for about `seconds`, 3 times or more unless it is long; us of the last ones."""
    us = host_us(call, device, 1)
    count = 3 if us < LONG_S * 1e6 else 0
    while count and us * count < 1e6 * seconds / 4:
        us = host_us(call, device, count)
        count *= 4
    return host_us(call, device, count) if count else us


def settling(us: float, before: int = 0) -> int:
    """Steps of `us` each in which a fused call finds the better way, and `before` more."""
    return max(1, min(before + SETTLED, int(SETTLED_S * 1e6 / us)))


def settle(call: Callable[[], object], device: str, before: int = 0) -> None:
    """Run a fused call until it has found the better way, and `before` times more."""
    host_us(call, device, 1)  # which may compile
    host_us(call, device, settling(host_us(call, device, 1), before))


def reason(error: BaseException) -> str:
    """One line: the class of an error and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:160] if lines else type(error).__name__
