"""The benchmarks' clocks, on a device that exists in virtual time: host, launch queue, device.

What is asked: is an injected delay seen, and where it belongs; is a launch that returns at once
mistaken for its execution; do variants take turns; does one that fails leave the others alone.
"""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from support import NO_GPU

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import timing
from timing import Call, Series, device_us, host_us, measured

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU),
]


class Simulated:
    """A host and an asynchronous device; times in us. Launching costs the host, work the device."""

    MHZ = 1000.0

    def __init__(self):
        self.now = 0.0  # of the host
        self.free = 0.0  # when the device has done what is queued
        self.flushes = 0
        self.slept = False

    def launch(self, host, device):
        self.now += host
        self.free = max(self.free, self.now) + device

    def call(self, host, device):
        return lambda: self.launch(host, device)

    def synchronize(self):
        self.now = max(self.now, self.free)

    def sleep(self, cycles):
        self.slept = True
        self.launch(1.0, cycles / self.MHZ)

    def zero_(self):  # of the buffer that flushes the L2 cache
        self.flushes += 1
        self.launch(2.0, 60.0)


@pytest.fixture
def device(monkeypatch):
    simulated = Simulated()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = max(simulated.free, simulated.now)

        def elapsed_time(self, other):
            return (other.time - self.time) / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", simulated.sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    monkeypatch.setattr(timing, "_cache", lambda: simulated)
    monkeypatch.setattr(timing, "_sleep_mhz", lambda: Simulated.MHZ)
    monkeypatch.setattr(time, "perf_counter", lambda: simulated.now / 1e6)
    return simulated


# wall clock


def test_an_injected_delay_is_seen():
    quick = host_us(lambda: None, "cpu", 20)
    slow = host_us(lambda: time.sleep(0.002), "cpu", 20)
    assert slow >= 2000 > quick


@pytest.mark.parametrize("host, work, want", [(5.0, 50.0, 50.0), (50.0, 5.0, 50.0)])
def test_wall_clock_is_of_what_bounds_the_loop(device, host, work, want):
    """With one wait at the end, host and device overlap; the slower one is what is seen."""
    assert host_us(device.call(host, work), "cuda", 1000) == pytest.approx(want, rel=0.02)


def test_a_launch_is_not_mistaken_for_its_execution(device):
    assert host_us(device.call(5.0, 400.0), "cuda", 1) == pytest.approx(405.0)
    assert device_us(device.call(5.0, 400.0), "cuda", 10) == pytest.approx(400.0)


def test_the_wait_of_another_library_is_used():
    """Its results are there when it says so, not when torch's device is idle."""
    waited = []

    def finish(result):
        waited.append(result)
        time.sleep(0.05)

    us = host_us(Call(lambda: "result", finish), "cpu", 2)
    assert waited == ["result"] and us >= 25_000


# CUDA events


def test_a_host_delay_is_no_device_time(device):
    """The queue is kept full: launches that take the host longer than the device still queue up."""
    call = device.call(30.0, 3.0)
    assert host_us(call, "cuda", 100) == pytest.approx(30.0, rel=0.01)
    for flush in (True, False):
        assert device_us(call, "cuda", 100, flush) == pytest.approx(3.0, rel=0.02)
    assert device.slept


def test_the_cache_is_flushed_before_every_call_and_not_timed(device):
    assert device_us(device.call(4.0, 7.0), "cuda", 25) == pytest.approx(7.0)
    assert device.flushes == 25
    assert device_us(device.call(4.0, 7.0), "cuda", 25, flush=False) == pytest.approx(7.0)
    assert device.flushes == 25


def test_the_sleep_is_bounded(device):
    device_us(device.call(1e5, 10.0), "cuda", timing.QUEUE)
    assert device.now < timing.QUEUE * 1e5 + 2e5 + timing.SLEEP_S * 1e6 + 1e5


def test_clock_from_the_time_of_cycles(device):
    assert timing.sm_mhz() == pytest.approx(Simulated.MHZ)


def test_on_the_cpu_the_same_interface_is_wall_clock():
    for clock in (device_us, host_us):
        assert clock(lambda: time.sleep(0.001), "cpu", 3) >= 1000
    timing.keep_busy("cpu", 10.0)  # nothing to keep busy


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("clock", [pytest.param("cuda", marks=needs_cuda)])
def test_on_a_device_its_own_sleep_is_what_is_seen(clock, flush):
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other processes use the device, which takes turns")
    cycles = 1_000_000
    call = lambda: torch.cuda._sleep(cycles)  # noqa: E731
    for _ in range(40):  # others may use the device, whose clock goes down then
        want = cycles / timing.sm_mhz()
        seen = device_us(call, clock, 10, flush)
        if seen == pytest.approx(want, rel=0.1):
            break
    assert seen == pytest.approx(want, rel=0.1)
    assert want * 0.9 < min(host_us(call, clock, 50) for _ in range(3)) < want * 1.5


# rounds


def test_percentiles():
    series = Series([float(t) for t in (9, 1, 5, 3, 7, 2, 8, 4, 6, 10)])
    assert (series.median, series.p20, series.p80) == (5.5, 3, 8)
    assert Series([2.0, 1.0, 3.0]).p20 == 1 and Series([2.0, 1.0, 3.0]).p80 == 3
    assert Series([4.0]).p20 == Series([4.0]).p80 == Series([4.0]).median == 4


def test_variants_take_turns():
    seen = []
    calls = {name: (lambda name=name: seen.append(name)) for name in "AB"}
    timing.interleaved(calls, "cpu", rounds=3, iterations=1, warm=0)
    assert "".join(seen) == "ABABAB"
    seen.clear()
    measured({name: Call(call) for name, call in calls.items()}, "cpu", rounds=4, round_s=1e-5)
    turns = "".join(name for k, name in enumerate(seen) if k == 0 or seen[k - 1] != name)
    assert turns == "AB" * 5  # warm-up, then four rounds


def test_a_delay_of_one_variant_is_not_the_others(device):
    calls = {"A": Call(device.call(10.0, 1.0)), "B": Call(device.call(10.0, 300.0))}
    series, failed = measured(calls, "cuda")
    assert not failed and len(series["A"].times) == timing.ROUNDS
    assert series["A"].median == pytest.approx(10.0, rel=0.05)
    assert series["B"].median == pytest.approx(300.0, rel=0.05)
    series, _ = measured(calls, "cuda", "device")
    assert series["A"].median == pytest.approx(1.0, rel=0.05)
    assert series["B"].median == pytest.approx(300.0, rel=0.05)


def test_work_on_another_stream_is_measured_by_wall_clock(device):
    series, _ = measured({"A": Call(device.call(9.0, 1.0), on_stream=False)}, "cuda", "device")
    assert series["A"].median == pytest.approx(9.0, rel=0.05)


def test_a_call_that_fails_leaves_the_rounds():
    left = [6]  # 3 calls to warm up, and 5 rounds

    def dies():
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of luck\nat length")

    def fails():
        raise ValueError

    calls = {"dies": Call(dies), "fails": Call(fails), "lives": Call(lambda: None)}
    series, failed = measured(calls, "cpu", rounds=5, round_s=1e-6)
    assert list(series) == ["lives"] and len(series["lives"].times) == 5
    assert failed == {"dies": "RuntimeError: out of luck", "fails": "ValueError"}


def test_a_long_call_has_fewer_rounds_and_no_more_warm_up(device):
    calls = []

    def long():
        calls.append(None)
        device.launch(1.0, 1e6 * timing.LONG_S)

    series, _ = measured({"long": Call(long)}, "cuda")
    assert len(series["long"].times) == timing.LONG_ROUNDS
    assert len(calls) == 1 + timing.LONG_ROUNDS
