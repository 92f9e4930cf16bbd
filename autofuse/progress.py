"""Progress: a line on stderr while somebody waits for a compiler. Imports nothing of autofuse."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

PATIENCE = 1.0  # seconds before anything is said


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on a terminal what takes longer than a second, and for how long; wipe it at the end."""
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, stream, done), daemon=True)
    try:
        thread.start()  # 0.1 ms, where a compile takes 20 and more
    except RuntimeError:  # no more threads: nothing is said
        yield
        return
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(what: str, stream: TextIO, done: threading.Event) -> None:
    begun, said = time.monotonic(), False
    with contextlib.suppress(OSError, ValueError):  # there may be no stderr any more
        while not done.wait(PATIENCE):
            said = True
            stream.write(f"\rautofuse: {what}, {time.monotonic() - begun:.0f} s")
            stream.flush()
        if said:
            stream.write("\r\x1b[K")
            stream.flush()
