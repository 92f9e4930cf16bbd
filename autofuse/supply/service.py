"""The background compiler: worker processes and the threads that wait for them.

A thread per worker hands it one job after another and gives the answer to the job's `done`,
whatever happens. A worker that dies, does not answer or answers something else is replaced, and its
job fails; after some in a row there are pauses, which grow, and jobs fail at once. A worker that
does not even start is tried again, with pauses, before its job fails. Where no process can be
started at all the service is `unavailable`, and the caller compiles by itself.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from ..errors import warn_once
from ..inside import being_inside, serving
from .disk import DiskCache
from .toolchain import Built
from .worker import BOOT, receive, send

HANG_SECONDS = 120.0  # for one kernel; the largest take 2
START_SECONDS = 30.0  # for a process; it takes 0.1
IDLE_SECONDS = 30.0  # without a job, before a further worker ends: each keeps 120 MB
# a worker takes as long to be ready for its first kernel as it takes for so many, 1 s
BACKLOG = 10
FAILURES = 3  # workers lost in a row
PAUSES = (0.2, 1.0)  # s, before a process that did not start is tried again
REST_SECONDS, MOST_REST_SECONDS = 10.0, 600.0  # after so many; twice as long after each further one
SHARE = Path("/sys/fs/cgroup/cpu.max")  # us of us that a container may run, or "max" of some
# a compiler has no use for numpy's threads; starting 16 of them delays steps by 8 ms
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

lost: Counter[str] = Counter()  # workers of this process, by what became of them


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One kernel to compile; `done` is called once, in a thread of the service."""

    source: str  # as JSON
    target: str
    key: str  # to the worker too: it must have the same compilers
    done: Callable[[Built], None]


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A process that compiles, and where its stderr goes."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    @staticmethod
    def begin(command: list[str], environment: dict[str, str]) -> Worker:
        """A fresh interpreter for `-c command`, not a fork: no CUDA state, no locks of ours.

        It is told where packages are, and our settings.
        """
        ours = ("PYTHONPATH", "AUTOFUSE")
        inherited = {key: text for key, text in os.environ.items() if not key.startswith(ours)}
        errors: IO[bytes]
        try:
            errors = tempfile.TemporaryFile(buffering=0)
        except OSError:  # no room: nobody will know what it writes
            errors = open(os.devnull, "r+b", buffering=0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                env={**inherited, "CUDA_VISIBLE_DEVICES": "", **_ONE_THREAD, **environment},
            )  # fmt: skip
        except BaseException:
            errors.close()
            raise
        return Worker(process, errors)

    def ask(self, question: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """What it answers; it is killed after `seconds`. Raises LostError."""
        process, hung = self.process, []
        assert process.stdin is not None and process.stdout is not None

        def kill() -> None:
            hung.append(True)
            process.kill()

        watch = threading.Timer(seconds, kill)
        watch.daemon = True
        try:
            watch.start()
            send(process.stdin, question)  # type: ignore[arg-type]
            frame = receive(process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError) as error:  # a broken pipe, no frame, no thread
            raise LostError(self._fate(f"its answer cannot be read: {error}")) from None
        finally:
            watch.cancel()
        if frame is None:
            if hung:
                raise HungError(f"it did not answer in {seconds:g} s")
            raise LostError(self._fate("it closed its pipe"))
        return frame

    def _fate(self, otherwise: str) -> str:
        """How it has ended, with the last line that it wrote, or `otherwise`."""
        try:
            status = self.process.wait(2.0)  # its pipe is closed, it is about to end
        except subprocess.TimeoutExpired:
            return otherwise
        text = f"it was ended by signal {-status}" if status < 0 else f"it ended with {status}"
        with suppress(OSError):
            size = self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(0, size - 2000))
            *_, last = self.errors.read().decode(errors="replace").strip().split("\n")
            return f"{text}: {last.strip()}" if last else text
        return text

    def drop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.release()

    def release(self) -> None:
        """Close this process's ends of its pipes."""
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                with suppress(OSError):  # what it did not take
                    stream.close()


def packages() -> list[str]:
    """Where this process finds packages, but for the working directory."""
    return [os.path.abspath(path) for path in sys.path if path and isinstance(path, str)]


class LostError(Exception):
    """A worker is of no use any more."""


class HungError(LostError):
    """It took too long."""


class RefusedError(Exception):
    """There will be no worker."""


class Service:
    """Up to `workers` processes, started when there is work for them."""

    def __init__(self, workers: int, cache: DiskCache, backlog: int = 0) -> None:
        """backlog: kernels that wait for each worker before there is another."""
        self.workers, self.cache, self.backlog = workers, cache, backlog
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()  # None ends a thread
        self.unavailable = ""  # why there are no processes
        if not sys.executable or getattr(sys, "frozen", False):
            self.unavailable = "no Python interpreter is known that could be started"
        self.lost = 0  # workers in a row
        self.reason = ""  # what became of the last of these
        self.until = 0.0  # when another may be started
        self.idle = 0  # threads that wait for a job
        self.running: list[Worker] = []
        self.threads: list[threading.Thread] = []
        self.lock = threading.RLock()  # a signal handler may need a kernel in the middle of it
        self.closing = threading.Event()

    def submit(self, job: Job) -> None:
        """Have `job` done; returns at once."""
        with self.lock:
            self.jobs.put(job)
            waiting, threads = self.jobs.qsize(), len(self.threads)
            if waiting > max(self.idle, self.backlog * threads) and threads < self.workers:
                name = f"autofuse compiler {threads}"
                thread = threading.Thread(target=self._serve_alone, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    if not self.threads:
                        self.unavailable = f"no thread can be started: {error}"
                else:
                    self.threads.append(thread)
        if not self.threads:  # the job is refused, in this thread
            self._serve(once=True)

    def _serve_alone(self) -> None:
        """`_serve`, in a thread of its own."""
        ident = threading.get_ident()
        serving[ident] = True
        try:
            self._serve()
        finally:
            serving.pop(ident, None)

    @being_inside()  # finalizers that run here must not wait for who waits for a kernel
    def _serve(self, once: bool = False) -> None:
        worker: Worker | None = None
        while True:
            with self.lock:
                self.idle += 1
            job = self._next(worker)
            with self.lock:
                self.idle -= 1
            if job is None or self.closing.is_set():
                self._drop(worker)
                return
            try:
                if worker is not None and worker.process.poll() is not None:
                    self._drop(worker)  # it died while it had nothing to do
                    worker = None
                worker = worker or self._start()
                answer = self._ask(worker, job)
                self.lost = 0
            except BaseException as error:  # it is this job's, and the thread goes on
                self._drop(worker)
                worker = None
                if self.closing.is_set():
                    return
                answer = self._failure(error)
            try:
                job.done(answer)
            except BaseException as error:
                warn_once(
                    f"autofuse: taking what the background compiler made has failed: {error!r}"
                )
            job = answer = None  # not kept while there is nothing to do
            if once:
                return

    def _next(self, worker: Worker | None) -> Job | None:
        """The next job; None ends the thread, as all but the first do that get none for long."""
        thread = threading.current_thread()
        spare = worker is not None and thread is not self.threads[0]
        try:
            return self.jobs.get(timeout=IDLE_SECONDS if spare else None)
        except Empty:  # a job that comes now is the others'
            with self.lock:
                self.threads.remove(thread)
            return None

    def _failure(self, error: BaseException) -> Built:
        """The answer to a job that `error` has ended."""
        if isinstance(error, RefusedError):
            return Built(error=str(error), refused=bool(self.unavailable))
        if isinstance(error, LostError):
            self._count(str(error))
            return Built(error=f"the compiler's process died or did not answer: {error}")
        return Built(error=f"the background compiler failed: {error!r}")  # no memory, or our own

    def _count(self, reason: str) -> None:
        """One worker more was lost."""
        lost[reason] += 1
        with self.lock:
            self.lost, self.reason = self.lost + 1, reason
            further = self.lost - FAILURES
            if further >= 0:
                rest = min(REST_SECONDS * 2.0 ** min(further, 32), MOST_REST_SECONDS)
                self.until = time.monotonic() + rest

    def _start(self) -> Worker:
        """A worker that has said that it is ready. Raises RefusedError."""
        if self.unavailable:
            raise RefusedError(self.unavailable)
        if self.lost >= FAILURES and time.monotonic() < self.until:
            raise RefusedError(f"the compiler's processes keep dying: {self.reason}")
        for pause in (*PAUSES, None):
            try:
                return self._begin()
            except OSError as error:
                reason = f"no process can be started: {error}"
            except LostError as error:
                reason = f"the compiler's process does not start: {error}"
            if self.closing.is_set():
                break
            lost[reason] += 1
            if pause is None:
                self.unavailable = reason
            else:
                self.closing.wait(pause)
        raise RefusedError(self.unavailable)

    def trial(self) -> str:
        """Start a worker and end it: "" or why that does not work."""
        try:
            self._drop(self._begin())
        except (OSError, LostError) as error:
            return str(error)
        return ""

    def _begin(self) -> Worker:
        """A worker that has said that it is ready. Raises OSError or LostError."""
        directory, maxsize = self.cache.directory, self.cache.maxsize
        worker = Worker.begin([BOOT, str(Path(__file__).parents[1])], {})
        try:
            self.running.append(worker)
            settings = {"path": packages(), "maxsize": maxsize,
                        "directory": directory and str(directory)}  # fmt: skip
            worker.ask(settings, START_SECONDS)
        except BaseException:
            self._drop(worker)
            raise
        return worker

    def _ask(self, worker: Worker, job: Job) -> Built:
        """The worker's answer. Raises LostError."""
        question = {"source": job.source, "target": job.target, "key": job.key}
        header, binary = worker.ask(question, HANG_SECONDS)
        answer = Built(
            binary, header.get("built", False), header.get("unsaved", ""), header.get("error", "")
        )
        kinds = (answer.built.__class__, answer.unsaved.__class__, answer.error.__class__)
        if kinds != (bool, str, str) or bool(binary) == bool(answer.error):
            raise LostError(f"its answer makes no sense: {str(header)[:200]}")
        return answer

    def _drop(self, worker: Worker | None) -> None:
        if worker is None:
            return
        worker.drop()
        with self.lock:
            if worker in self.running:
                self.running.remove(worker)

    def close(self) -> None:
        """End the workers, whatever they are doing; their jobs are forgotten."""
        self.closing.set()
        for worker in list(self.running):
            worker.process.kill()
        threads = list(self.threads)  # some may be about to end
        for _ in threads:
            self.jobs.put(None)
        for thread in threads:
            thread.join(5.0)

    def abandon(self) -> None:
        """After a fork: threads and workers are the parent's, and so is what they are doing."""
        for worker in self.running:
            worker.release()
            worker.process.returncode = 0  # not ours to wait for


def enough_workers() -> int:
    """How many processes compile in the background where nobody has said how many.

    A training step of a hundred kernels, 60 to 200 ms each, runs as eager ops until they are there;
    a program has use for its other processors itself.
    """
    known = getattr(os, "sched_getaffinity", None)
    processors = os.cpu_count() or 1
    with suppress(OSError):
        processors = processors if known is None else len(known(0))
    with suppress(OSError, ValueError):
        quota, period = SHARE.read_text().split()
        processors = min(processors, int(quota) // int(period))
    with suppress(ValueError):  # each rank has its own
        processors //= max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(1, min(processors // 2, 8))


_service: Service | None = None


def service(workers: int | None, cache: DiskCache) -> Service:
    """This process's service; workers: None where nobody says how many."""
    global _service
    if _service is None:
        enough = workers is None
        _service = Service(enough_workers() if enough else workers, cache, BACKLOG * enough)
        atexit.register(_service.close)
    return _service


def forget_service() -> Service | None:
    """Start anew with the next job; gives the old one, which is to be closed or abandoned."""
    global _service
    old, _service = _service, None
    if old is not None:
        atexit.unregister(old.close)
    return old
