"""The background compiler: worker processes and the threads that wait for them.

A thread per worker hands it one job after another and gives the answer to the job's `done`. A
worker that dies or does not answer is replaced, and its job fails; three in a row end the service.
Where no process can be started the service is `unavailable`, and the caller compiles by itself.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .cache import DiskCache
from .errors import warn_once
from .worker import BOOT, receive, send

HANG_SECONDS = 120.0  # for one kernel; the largest take 2
START_SECONDS = 30.0  # for a process; it takes 0.1
FAILURES = 3  # workers lost in a row
# a compiler has no use for numpy's threads; starting 16 of them delays steps by 8 ms
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One kernel to compile; `done` is called once, in a thread of the service."""

    source: str  # as JSON
    target: str
    key: str
    compilers: tuple[str, ...]  # which the worker must have too
    done: Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a job: a binary, or an error."""

    binary: bytes = b""
    built: bool = False  # here and now; otherwise another process had done it
    unsaved: str = ""  # why it is not on disk
    error: str = ""
    refused: bool = False  # there is no service: nothing was tried


class Service:
    """Up to `workers` processes, started when there is work for them."""

    def __init__(self, workers: int, cache: DiskCache) -> None:
        self.workers, self.cache = workers, cache
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()  # None ends a thread
        self.unavailable = ""  # why there are no processes
        if not sys.executable or getattr(sys, "frozen", False):
            self.unavailable = "no Python interpreter is known that could be started"
        self.lost = 0  # workers in a row
        self.idle = 0  # threads that wait for a job
        self.processes: list[subprocess.Popen[bytes]] = []
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.closing = False

    def submit(self, job: Job) -> None:
        """Have `job` done; returns at once."""
        with self.lock:
            self.jobs.put(job)
            if self.jobs.qsize() > self.idle and len(self.threads) < self.workers:
                name = f"autofuse compiler {len(self.threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    if not self.threads:
                        self.unavailable = f"no thread can be started: {error}"
                else:
                    self.threads.append(thread)
        if not self.threads:  # the job is refused, in this thread
            self._serve(once=True)

    def _serve(self, once: bool = False) -> None:
        process: subprocess.Popen[bytes] | None = None
        while True:
            with self.lock:
                self.idle += 1
            job = self.jobs.get()
            with self.lock:
                self.idle -= 1
            if job is None or self.closing:
                if process is not None:
                    self._drop(process)
                return
            if process is not None and process.poll() is not None:
                self._drop(process)  # it died while it had nothing to do
                process = None
            if process is None and not self.unavailable and self.lost < FAILURES:
                process = self._start()
            if process is None:
                refused = bool(self.unavailable)
                reason = self.unavailable or "the compiler's processes keep dying"
                job.done(Answer(error=reason, refused=refused))
                if once:
                    return
                continue
            answer = self._ask(process, job)
            if answer is None:
                self._drop(process)
                process = None
                if self.closing:
                    return
                self.lost += 1
                answer = Answer(error="the compiler's process died or did not answer")
            else:
                self.lost = 0
            job.done(answer)

    def _start(self) -> subprocess.Popen[bytes] | None:
        # a fresh interpreter, not a fork: no CUDA state, no locks of ours
        command = [sys.executable, "-c", BOOT, str(Path(__file__).parent)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **_ONE_THREAD}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=environment, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self.unavailable = f"no process can be started: {error}"
            return None
        self.processes.append(process)
        directory = self.cache.directory
        settings = {
            "path": [path for path in sys.path if isinstance(path, str)],
            "maxsize": self.cache.maxsize,
            "directory": directory and str(directory),
        }
        if self._exchange(process, settings, START_SECONDS) is None:
            self._drop(process)
            if not self.closing:
                self.unavailable = "the compiler's process does not start"
            return None
        return process

    def _ask(self, process: subprocess.Popen[bytes], job: Job) -> Answer | None:
        """The worker's answer; None if it is lost."""
        question = {"source": job.source, "target": job.target, "key": job.key,
                    "compilers": job.compilers}  # fmt: skip
        frame = self._exchange(process, question, HANG_SECONDS)
        if frame is None:
            return None
        header, binary = frame
        return Answer(
            binary, header.get("built", False), header.get("unsaved", ""), header.get("error", "")
        )

    @staticmethod
    def _exchange(
        process: subprocess.Popen[bytes], question: dict[str, Any], seconds: float
    ) -> tuple[dict[str, Any], bytes] | None:
        """What the process answers, or None; after `seconds` it is killed."""
        assert process.stdin is not None and process.stdout is not None
        watch = threading.Timer(seconds, process.kill)
        watch.daemon = True
        try:
            watch.start()
            send(process.stdin, question)  # type: ignore[arg-type]
            return receive(process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError):  # a broken pipe, other bytes, no thread
            return None
        finally:
            watch.cancel()

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        with self.lock:
            if process in self.processes:
                self.processes.remove(process)

    def close(self) -> None:
        """End the workers, whatever they are doing; their jobs are forgotten."""
        self.closing = True
        for process in list(self.processes):
            process.kill()
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join(5.0)

    def abandon(self) -> None:
        """After a fork: the workers are the parent's, and so is what they are doing."""
        for process in self.processes:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
            process.returncode = 0  # not ours to wait for


_service: Service | None = None


def service(workers: int, cache: DiskCache) -> Service:
    """This process's service."""
    global _service
    if _service is None:
        _service = Service(workers, cache)
        atexit.register(_service.close)
    return _service


def forget_service(forked: bool = False) -> Callable[[], None]:
    """Start anew with the next job; gives what closes the old one.

    forked: in a child, which has none of the threads and lets go of the processes.
    """
    global _service
    old, _service = _service, None
    if old is None:
        return lambda: None
    atexit.unregister(old.close)
    if forked:
        old.abandon()
    return old.close


def say_unsaved(reason: str) -> None:
    """Say once why kernels do not stay on disk."""
    warn_once(f"autofuse: compiled kernels are not kept on disk: {reason}")
