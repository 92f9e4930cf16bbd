"""The first iterations of a fresh process: eager, torch.compile, autofuse cold and warm.

    python bench/cold_start.py [--device cuda] [--processes 5] [--seconds 4] [--workload NAME]
                                [--compile] [--json F]
    python bench/cold_start.py --imports [--processes 21]

Every figure is of a process of its own: `cold` has an empty cache directory, `warm` the one that a
cold process has filled. Timing begins after torch's own CUDA initialisation and after
`import autofuse`; every iteration ends with a synchronize. Printed are medians over the processes
of the first iteration, the first 5, the first 100, the longest after the first, and how long after
the first iteration a kernel was in use. `--slowdown` times an eager loop while kernels are being
compiled against the same loop before and after. `--imports` times `import autofuse` after `import
torch`, without CUDA, least and median: with a warm cache, with one that has lost machine code, and
without machine code. A full garbage collection in the middle, for which torch's import has made the
objects and which would come soon after without autofuse, is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import machine, synchronize

MODES = ("eager", "cold", "warm")
WORKLOADS = ("RNN step", "LSTM cell, forward + backward")


def rnn(mode: str, device: str) -> Callable[[], object]:
    """One matmul and five pointwise ops on 64x256 float32, no grad."""
    h, w = torch.randn(64, 256, device=device), torch.randn(256, 256, device=device) / 16
    b = torch.randn(256, device=device)

    def step(h: torch.Tensor) -> torch.Tensor:
        z = h @ w
        return torch.tanh(torch.sigmoid(z) * b + z * 0.5)

    if mode == "compile":
        step = torch.compile(step)
    if mode in ("cold", "warm"):
        import autofuse

        h = autofuse.wrap(h)
    state = [h]

    def run() -> None:
        with torch.no_grad():
            state[0] = step(state[0])
            if mode in ("cold", "warm"):
                autofuse.materialize(state[0])

    return run


def lstm(mode: str, device: str) -> Callable[[], object]:
    """One step of an LSTM cell in plain ops on 64x256 float32, and its backward."""
    import training

    model = training.LstmCell().to(device)
    if mode == "compile":
        model = torch.compile(model)
    if mode in ("cold", "warm"):
        import autofuse

        model = autofuse.fuse(model)
    x, h, c = (torch.randn(64, 256, device=device) for _ in range(3))
    parameters = list(model.parameters())
    ones = torch.ones_like(x)

    def run() -> None:
        outs = model(x, h, c)
        torch.autograd.grad(outs, parameters, [ones, ones])

    return run


def child(mode: str, workload: str, device: str, seconds: float) -> None:
    """Time iterations for at least `seconds` and 100 times; prints one line of JSON."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize()
    result: dict[str, object] = {}
    if mode in ("cold", "warm"):
        start = time.perf_counter()
        import autofuse

        result["import_s"] = time.perf_counter() - start
    run = (rnn if workload == WORKLOADS[0] else lstm)(mode, device)
    synchronize(device)
    times: list[float] = []
    begin = last = time.perf_counter()
    while len(times) < 100 or last - begin < seconds:
        run()
        synchronize(device)
        now = time.perf_counter()
        times.append(now - last)
        if mode in ("cold", "warm") and "fused_s" not in result:
            if autofuse.stats().kernels_launched:
                result["fused_s"] = now - begin
        last = now = time.perf_counter()
    result["times"] = times[:20000]
    print(json.dumps(result))


def fresh(mode: str, workload: str, args: argparse.Namespace, cache: str) -> dict[str, object]:
    """The figures of one fresh process, in ms."""
    command = [sys.executable, __file__, "--child", mode, "--workload", workload]
    command += ["--device", args.device, "--seconds", str(args.seconds)]
    environment = {**os.environ, "AUTOFUSE_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{mode}, {workload}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    ms = [1e3 * t for t in result["times"]]
    return {
        "first": ms[0], "first 5": sum(ms[:5]), "first 100": sum(ms[:100]),
        "longest later": max(ms[1:]), "later p99.9": sorted(ms[1:])[-1 - len(ms) // 1000],
        "late median": statistics.median(ms[-50:]),
        "fused after s": result.get("fused_s"), "import s": result.get("import_s"),
    }  # fmt: skip


def slowdown(device: str) -> None:
    """An eager loop beside the compilation of 40 kernels against the same loop without."""
    import autofuse

    autofuse.config.compile, autofuse.config.compile_after = "background", 1
    x = torch.randn(64, 256, device=device)

    def loop(seconds: float) -> list[float]:
        times, end = [], time.perf_counter() + seconds
        with autofuse.disabled():
            while (start := time.perf_counter()) < end:
                for _ in range(20):
                    torch.tanh(torch.sigmoid(x) * x + x).neg()
                synchronize(device)
                times.append((time.perf_counter() - start) / 20 * 1e6)
        return times

    loop(0.5)
    before = loop(2.0)
    w = autofuse.wrap(x)
    for k in range(40):
        y = w * 1.5
        for bit in range(6):
            y = y.sin() if k >> bit & 1 else y.sigmoid()
        autofuse.materialize(y)
    start, during = time.perf_counter(), []
    while not autofuse.wait(timeout=0):
        during += loop(0.1)
    took = time.perf_counter() - start
    after = loop(2.0)
    idle = statistics.median(before + after)
    busy = statistics.median(during)
    print(f"eager loop, us per iteration: idle {idle:.2f}, beside the compiler {busy:.2f} "
          f"({busy / idle:.3f}), longest {max(during):.1f} against {max(before + after):.1f}; "
          f"40 kernels in {took:.2f} s")  # fmt: skip


IMPORT = """
import gc, time, torch
full = []
def collecting(phase, info):
    if info["generation"] == 2:
        full.append(time.perf_counter() if phase == "start" else time.perf_counter() - full.pop())
gc.callbacks.append(collecting)
start = time.perf_counter()
import autofuse
took = time.perf_counter() - start
print(took - sum(full), sum(full))
"""


def imports(processes: int) -> None:
    """Print what `import autofuse` takes in fresh processes that take turns."""
    names = ("warm", "machine code to be compiled", "AUTOFUSE_NATIVE=0")
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "AUTOFUSE_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": "",
                       "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip  # else each compiles all modules

        def once(native: str) -> list[float]:
            command = [sys.executable, "-c", IMPORT]
            done = subprocess.run(command, env={**environment, "AUTOFUSE_NATIVE": native},
                                  stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
            return [1e3 * float(word) for word in done.stdout.split()]

        once("1"), once("0")  # the verdict, and bytecode
        for _ in range(processes):
            taken["warm"].append(once("1"))
            for entry in Path(cache).glob("*.kernel"):
                if b'"object file"' in entry.read_bytes()[:1000]:
                    entry.unlink()
            taken["machine code to be compiled"].append(once("1"))
            taken["AUTOFUSE_NATIVE=0"].append(once("0"))
    for name, results in taken.items():
        ours, full = zip(*results, strict=True)
        print(f"{name:28s} least {min(ours):.0f} ms, median {statistics.median(ours):.0f}; "
              f"full collections {statistics.median(full):.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each process")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, once")
    parser.add_argument("--slowdown", action="store_true", help="only the loop beside the compiler")
    parser.add_argument("--imports", action="store_true", help="only what the import takes")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--workload", default="", help="only this one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.workload, args.device, args.seconds)
    if args.slowdown:
        return slowdown(args.device)
    if args.imports:
        print(machine(args.device))
        return imports(args.processes)
    print(machine(args.device))
    everything = {}
    for workload in [args.workload] if args.workload else WORKLOADS:
        rows: dict[str, list[dict[str, object]]] = {mode: [] for mode in MODES}
        for _ in range(args.processes):
            with tempfile.TemporaryDirectory() as cache:
                for mode in MODES:  # warm after cold
                    rows[mode].append(fresh(mode, workload, args, cache))
        if args.compile:
            rows["compile"] = [fresh("compile", workload, args, "")]
        everything[workload] = rows
        print(f"\n{workload} (ms, median of {args.processes} processes; in brackets: of eager's)")
        for mode, results in rows.items():
            cells = []
            for name in results[0]:
                values = [r[name] for r in results if r[name] is not None]
                if values:
                    middle = statistics.median(values)
                    cell = f"{name} {middle:.3g}"
                    if name in rows["eager"][0] and rows["eager"][0][name] is not None:
                        middle /= statistics.median(r[name] for r in rows["eager"])
                        cell += f" ({middle:.2f})"
                    cells.append(cell)
            print(f"  {mode:8s}" + ", ".join(cells), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
