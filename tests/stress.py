"""Everything that Python may run in the middle, at once, for a while: nothing may break.

    python tests/stress.py [--seconds 60] [--device cuda] [--threads 8] [--seed 0] [--engine]

The main thread records, reads, writes and trains. Meanwhile a signal handler runs 300 us after the
last one has ended, and some inside another, the garbage collector at every container, finalizers
and callbacks of weak references with it, and other threads hand pending values to each other,
switched every microsecond. Handlers, finalizers and callbacks record, read, write, train, flush and
raise. Every value is compared with eager PyTorch's, every write is counted. Prints one line of
counts; exits with 1 after a wrong value, a lost write, an error that nobody here has raised, or a
chain that can no longer be flushed.

--engine: every backward runs in one thread, and who asks for it waits in C, as torch has it on
CUDA.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.hot import native
from autofuse.record import origins, policy

N = 64


class Foreign(Exception):
    """What handlers, finalizers and callbacks raise."""


failures: list[str] = []
counts: Counter[str] = Counter()


def failed(what: str) -> None:
    failures.append(what)


def check(got: torch.Tensor, want: list[float], what: str) -> None:
    value = got.tolist()
    if value != want:
        failed(f"wrong value, {what}: {value[:3]} instead of {want[:3]}")


class Engine:
    """The one thread in which every backward runs, and those that are asked for there."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            total, done, errors = job
            try:
                total.backward()
            except BaseException as error:
                errors.append(error)
            del job, total
            done.release()

    def backward(self, total: torch.Tensor) -> None:
        if threading.current_thread() is self.thread:
            total.backward()
            return
        done, errors = threading.Lock(), []
        done.acquire()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # no handler runs in C
        try:
            self.jobs.put((total, done, errors))
            done.acquire()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if errors:
            raise errors[0]


class World:
    """Tensors that everybody uses, and what eager PyTorch makes of them."""

    def __init__(self, device: str, seed: int, engine: Engine | None) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        x, z = torch.rand(N, generator=generator), torch.rand(N, generator=generator)
        self.x, self.z = x.to(device), z.to(device)
        self.w, self.v = autofuse.wrap(self.x), autofuse.wrap(self.z)
        self.device = device
        with torch.no_grad():
            self.chain = (self.x * 2.0 + self.z).abs() - self.x
            self.chains = [(self.x * float(k) - self.z).tolist() for k in range(64)]
            halves = self.chain.view(2, -1)
            self.softmax = torch.softmax(halves, -1).tolist()
            self.normal = F.layer_norm(halves, (N // 2,)).tolist()
            self.chain = self.chain.tolist()
        p = torch.nn.Parameter(self.x.clone())
        (p * self.z * 2.0).abs().sub(self.z).sum().backward()
        self.gradient = p.grad.tolist()
        self.engine = engine
        self.touched = autofuse.wrap(torch.zeros(N, device=device))  # by handlers alone
        self.touches = [0, 0]  # begun, and done: what raises in the middle may have been done
        self.depth: dict[int, int] = {}  # of actions, by thread
        self.armed = False  # a signal handler may raise
        self.rings = True  # and comes again
        self.over = False  # torch does not count references to tensors while Python ends

    # --- what handlers do ---

    def record(self) -> None:
        self.kept = (self.w * 2.0 + self.v).abs() - self.w

    def read(self) -> None:
        check((self.w * 2.0 + self.v).abs() - self.w, self.chain, "in the middle")

    def function(self) -> None:
        with torch.no_grad():
            check(
                torch.sub(torch.abs(torch.add(self.w * 2.0, self.v)), self.w), self.chain, "torch.*"
            )

    def call(self) -> None:
        functions(self)

    def pass_on(self) -> None:
        """Ops that are not recorded: views, items, lists, metadata, Python functions of torch."""
        with torch.no_grad():
            y = (self.w * 2.0 + self.v).abs() - self.w
            if tuple(y.shape) != (N,) or y.size(0) != N or y.dim() != 1 or y.requires_grad:
                failed("metadata of a pending value")
            a, b = y.chunk(2)
            check(torch.cat([b, a]), self.chain[N // 2 :] + self.chain[: N // 2], "joined")
            rows = autofuse.wrap(torch.zeros(3, N, device=self.device))
            for k in range(3):
                rows[k] = y if k else (self.w * 2.0 + self.v).abs() - self.w
            read = rows[1] * 1.0
            rows[:, :3] = 0.0
            check(read, self.chain, "read before an item is set")
            check(rows[2], [0.0] * 3 + self.chain[3:], "set")
            check(rows.T[:, 0], [0.0] * 3 + self.chain[3:], "transposed")
            read, row = rows[2] * 1.0 + 0.0, rows.view(-1)[2 * N :]
            row.mul_(0.0)
            check(rows[2], [0.0] * N, "written by a view")
            check(read, [0.0] * 3 + self.chain[3:], "read before a view is written")
            counts["plain" if type(row) is torch.Tensor else "wrapped"] += 1
            halves = torch.stack(y.split(N // 2))
            check(F.softmax(halves, -1), self.softmax, "softmax")
            check(F.layer_norm(halves, (N // 2,)), self.normal, "layer norm")
            if y[0].item() != self.chain[0] or bool(y[0] != self.chain[0]):
                failed("an item")

    def copy(self) -> None:
        value = (self.w * 2.0 + self.v).abs() - self.w
        check(copy.deepcopy(value), self.chain, "copied")
        check(copy.copy(value), self.chain, "copied at once")
        check(pickle.loads(pickle.dumps(value)), self.chain, "pickled")

    def write(self) -> None:
        """The values stay what they are, the versions do not."""
        if threading.current_thread() is not threading.main_thread():
            return  # eager PyTorch does not order writes and reads of several threads either
        with torch.no_grad():
            self.w.mul_(1.0)
            self.z.add_(0.0)

    def count(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        with torch.no_grad():
            self.touches[0] += 1
            self.touched.add_(self.w * 0.0 + 1.0)
            self.touches[1] += 1

    def train(self) -> None:
        with torch.enable_grad():
            if not (torch.nn.Parameter(self.x.clone()) * 1.0).requires_grad:
                return  # inside a __torch_dispatch__ no op has a gradient
        p, v = torch.nn.Parameter(self.x.clone()), autofuse.wrap(self.z.clone())
        with torch.enable_grad():
            self.backward((v * p * 2.0).abs().sub(v).sum())
        check(p.grad, self.gradient, "gradient in the middle")

    def backward(self, total: torch.Tensor) -> None:
        total.backward() if self.engine is None else self.engine.backward(total)

    def flush(self) -> None:
        autofuse.record.flush.flush_all("test")

    def fail(self) -> None:
        if self.armed or threading.current_thread() is not threading.main_thread():
            self.armed = False
            raise Foreign

    def anything(self, *more: object) -> None:
        depth = self.depth.get(threading.get_ident(), 0)
        if depth > 2 or self.over:  # what runs in the middle of what runs in the middle
            return
        self.depth[threading.get_ident()] = depth + 1
        grad = torch.is_grad_enabled()
        try:
            self.something()
        finally:
            torch._C._set_grad_enabled(grad)  # what comes in no_grad's __enter__ leaves it off
            self.depth[threading.get_ident()] = depth

    def handler(self, number: int, frame: object) -> None:
        """Leaves 300 us to what it interrupts, and lets some be interrupted itself."""
        if not self.rings:
            return
        if self.random.random() < 0.25:
            signal.setitimer(signal.ITIMER_REAL, 0.0003)
        try:
            self.anything()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0003 * self.rings)

    def something(self) -> None:
        action = self.random.choice(ACTIONS)
        counts["actions"] += 1
        try:
            getattr(self, action)()
        except Foreign:
            raise
        except BaseException as error:
            failed(f"{action}: {''.join(traceback.format_exception(error))}")


ACTIONS = 3 * ["record", "read", "function", "write", "count", "train", "flush", "call"]
ACTIONS += ["fail", "copy", "pass_on"]


class Garbage:
    """A cycle whose finalizer does anything, with a pending value and a watched one."""

    value = world = None  # where what makes it is interrupted

    def __init__(self, world: World) -> None:
        self.world = world
        self.me = self
        self.value = world.w * 3.0 - world.v
        self.watch = weakref.ref(self.value, world.anything)

    def __del__(self) -> None:
        counts["finalizers"] += 1
        if self.world is None or self.world.over:
            return
        if self.value is not None and self.world.random.random() < 0.5:
            check(self.value, self.world.chains[3], "of a finalizer")
        self.world.anything()


# --- what the main thread does ----------------------------------------------------------------


def values(world: World) -> None:
    w, v = world.w, world.v
    for k in range(1, 6):
        y = w * float(k) - v
        held = [y, y + 0.0, (y + 0.0) * 1.0]
        check(held[world.random.randrange(3)], world.chains[k], "of the main thread")
    check((w * 2.0 + v).abs() - w, world.chain, "a chain of the main thread")


def sums(world: World) -> None:
    w, v = world.w, world.v
    total = ((w * 2.0 + v).abs() - w).max().item()
    if total != max(world.chain):
        failed(f"wrong maximum: {total}")


def writes(world: World) -> None:
    with torch.no_grad():
        for target in (torch.zeros(N, device=world.device), autofuse.wrap(world.x.clone())):
            start, done = target.tolist(), 0
            try:
                for k in range(9):
                    one = world.w * 0.0 + 1.0
                    if k % 3 == 0:
                        target.add_(one)
                    elif k % 3 == 1:
                        target[:] = target + one
                    else:
                        target.view(2, -1).T.add_(one.view(2, -1).T)
                    done += 1
            finally:
                now = target.tolist()
                exact = []
                for k in (done, done + 1):
                    value = torch.tensor(start)
                    for _ in range(k):
                        value = value + 1.0
                    exact.append(value.tolist())
                if now not in exact[: 1 if done == 9 else 2]:
                    failed(f"a write was lost or doubled: {done} done, {now[:2]} from {start[:2]}")
        y = world.w * 2.0
        y += world.v
        z = y.abs()
        y.mul_(0.0)
        check(z - world.w, world.chain, "renamed")
        check(y, [0.0] * N, "renamed and written")


def gradients(world: World) -> None:
    p, v = torch.nn.Parameter(world.x.clone()), autofuse.wrap(world.z.clone())
    world.backward((v * p * 2.0).abs().sub(v).sum())
    check(p.grad, world.gradient, "gradient of the main thread")


def saved(world: World) -> None:
    """Nodes that save what eager's do, of which torch's own hooks are told after the flush."""
    p, v = torch.nn.Parameter(world.x.clone()), autofuse.wrap(world.z.clone())
    with torch.autograd.graph.save_on_cpu():
        y = (v * p * 2.0).abs()
        total = y.sub(v).sum()
    world.backward(total)
    check(p.grad, world.gradient, "gradient of what is saved on the CPU")


@autofuse.fuse
def again(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda p: (v * p * 2.0).abs().sub(v), p, use_reentrant=True)


def checkpoints(world: World) -> None:
    """Both of their runs, of which either may end in the middle.

    Not those that work by hooks: what a handler trains in the middle they take for their own.
    """
    p, v = torch.nn.Parameter(world.x.clone()), world.z.clone()
    world.backward(again(p, v).sum())
    check(p.grad, world.gradient, "gradient of a checkpoint")


@autofuse.fuse
def fused(x: torch.Tensor, z: torch.Tensor, *items: Any) -> Any:
    return (x * 2.0 + z).abs() - x, items


def functions(world: World) -> None:
    """Fused calls, which lend the same tensors as those of handlers and other threads."""
    x, z = world.x, world.z
    for items in ((), ([x, (z,)],), ({"x": x, "z": [z, x]}, None)):
        got, same = fused(x, z, *items)
        check(got, world.chain, "of a fused function")
        if not all(a is b for a, b in zip(same, items, strict=True)):
            failed("a fused function got other arguments")


def passed(world: World) -> None:
    for _ in range(3):
        world.pass_on()


PROGRAMS = [values, passed, sums, writes, gradients, saved, checkpoints, functions]


def run(world: World, program) -> None:
    """Run `program` where signal handlers may raise."""
    world.armed = True
    Garbage(world)
    program(world)
    world.armed = False


# --- threads ------------------------------------------------------------------------------------


def produce(world: World, pipe: queue.Queue, until: float) -> None:
    """Hand over pending values, and go on with them."""
    w, v = autofuse.wrap(world.x.clone()), autofuse.wrap(world.z.clone())
    k = 0
    while time.monotonic() < until and not failures:
        k = k % 63 + 1
        y = w * float(k) - v
        with suppress(queue.Full):
            pipe.put((k, y), timeout=1)
        for _ in range(k % 5):
            y = y + 1.0
        if k % 8 == 0:
            time.sleep(0.005)  # or there is no turn for the main thread
    with suppress(queue.Full):
        pipe.put(None, timeout=10)


def consume(world: World, pipe: queue.Queue, until: float) -> None:
    while (item := pipe.get(timeout=120)) is not None:
        k, y = item
        z = y + 0.0 if k % 2 else y
        check(z, world.chains[k], "from another thread")
        if k % 4 == 0:
            functions(world)
        counts["handed over"] += 1


def guarded(world: World, job, pipe, until: float) -> None:
    try:
        job(world, pipe, until)
    except BaseException as error:
        failed(f"a thread: {''.join(traceback.format_exception(error))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    args = parser.parse_args()
    faulthandler.enable()  # says which thread aborts
    faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
    torch.set_num_threads(1)
    pickle.loads(pickle.dumps(torch.ones(1)))  # or threads meet what torch imports half done
    autofuse.config.compile, autofuse.config.max_kernels_per_line = "now", 1 << 30
    world = World(args.device, args.seed, Engine() if args.engine else None)
    for program in PROGRAMS:  # their kernels are there
        for _ in range(3):
            program(world)
    pending = world.w * 2.0
    with torch._C.DisableTorchFunction():
        torch.add(pending, world.v)  # torch imports DTensor here, and cannot be interrupted

    def unraisable(info) -> None:
        module = str(getattr(info.object, "__module__", ""))
        if info.exc_type is not Foreign and not module.startswith("llvmlite"):
            # llvmlite's finalizers know nothing of objects that were interrupted while made
            text = "".join(
                traceback.format_exception(info.exc_type, info.exc_value, info.exc_traceback)
            )
            failed(f"{info.object!r}: {text}")

    sys.unraisablehook = unraisable
    until = time.monotonic() + args.seconds
    threads = []
    for _ in range(args.threads // 2):
        pipe: queue.Queue = queue.Queue(64)
        for job in (produce, consume):
            thread = threading.Thread(target=guarded, args=(world, job, pipe, until), daemon=True)
            threads.append(thread)
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    if args.seed % 2:
        autofuse.config.always_fuse = True
    else:  # fused calls change their way, results stay plain or not, short chains of grad are ops
        policy.FLUSH_US.update(cuda=0.0, cpu=0.0)
        origins.FIRST, origins.ENOUGH, origins.PAUSE, origins.GROWTH = 4, 2, 2, 1
        origins.forget()
        origins.is_inexact = lambda *facts: world.random.random() < 1e-4
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGALRM, world.handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    gc.set_threshold(1)
    while time.monotonic() < until and not failures:
        program = world.random.choice(PROGRAMS)
        try:
            run(world, program)
            counts[program.__name__] += 1
        except BaseException as error:
            world.armed = False
            torch._C._set_grad_enabled(True)  # what comes in no_grad's __enter__ leaves it off
            counts["raised"] += 1
            if type(error) is not Foreign:
                failed(f"{program.__name__}: {''.join(traceback.format_exception(error))}")
    world.rings = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)
    for thread in threads:
        thread.join(150)
        if thread.is_alive():
            failed("a thread does not end")
    for program in PROGRAMS:  # whatever was is over
        program(world)
    if world.engine is not None:
        world.engine.jobs.put(None)
        world.engine.thread.join(60)
    if autofuse.lending.loans or {type(world.x), type(world.z)} != {torch.Tensor}:
        failed(f"arguments stay wrapped: {autofuse.lending.loans}")
    world.over = True
    begun, done = world.touches
    touched = set(world.touched.tolist())
    if len(touched) != 1 or not done <= touched.pop() <= begun:
        failed(f"handlers wrote {world.touched[:2]}, {done} to {begun} times")
    machine = "machine code" if native.active() else "Python"
    print(f"{sys.version.split()[0]}, torch {torch.__version__}, {machine}, {args.device}: "
          f"{dict(counts)}, {len(failures)} failures")  # fmt: skip
    for what in failures[:5]:
        print(what)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
