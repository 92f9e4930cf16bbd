"""The compiler's process: Sources in, binaries out. Knows no torch and touches no GPU.

It is started with this package's directory as its argument, reads frames from stdin and answers on
what was its stdout; what anything prints goes to stderr. It ends when its stdin does, which is when
its parent ends, whatever it is doing then. A frame is a mark, two lengths, a SHA-256 of them and
what follows, a JSON object and bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

_MARK = b"autofuse"
_HEAD = struct.Struct("<8sII32s")
MOST_TEXT, MOST_BYTES = 1 << 24, 1 << 28  # that a frame may have; kernels take some 10 KB
# Nothing but the standard library is found before the parent has said where it finds packages, not
# even by -S's `site`, which may run a sitecustomize, and that comes after stdout is ours. The
# package's own __init__ would import torch.
BOOT = """
import sys
sys.path[:] = library = [path for path in sys.path if path]
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
import site, types
site.main()
package = types.ModuleType("autofuse")
package.__path__ = [sys.argv[1]]
sys.modules["autofuse"] = package
from autofuse.supply.worker import main
main(answers, library)
"""


class FrameError(ValueError):
    """What arrived is no frame."""


def send(stream: BinaryIO, header: dict[str, Any], payload: bytes = b"") -> None:
    """Write one frame."""
    text = json.dumps(header).encode()
    digest = _digest(text, payload)
    data = memoryview(_HEAD.pack(_MARK, len(text), len(payload), digest) + text + payload)
    while data:  # a pipe without a buffer may take a part
        data = data[stream.write(data) :]
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream. Raises FrameError."""
    head = _read(stream, _HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size or not head.startswith(_MARK):
        raise FrameError(f"it begins with {head!r}")
    _, size, more, digest = _HEAD.unpack(head)
    if size > MOST_TEXT or more > MOST_BYTES:
        raise FrameError(f"it has {size} and {more} bytes")
    text, payload = _read(stream, size), _read(stream, more)
    if len(text) != size or len(payload) != more or _digest(text, payload) != digest:
        raise FrameError("it ends early, or bytes of it have changed")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise FrameError(f"it is a {type(header).__name__}")
    return header, payload


def _digest(text: bytes, payload: bytes) -> bytes:
    lengths = struct.pack("<II", len(text), len(payload))
    return hashlib.sha256(lengths + text + payload).digest()


def _read(stream: BinaryIO, count: int) -> bytes:
    """`count` bytes, or those until the stream ends."""
    parts = []
    while count and (part := stream.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main(answers: BinaryIO, library: list[str]) -> None:
    """Serve until stdin ends; library: where the standard library is."""
    if hasattr(os, "nice"):
        os.nice(5)  # the program that asked comes first
    hello = receive(sys.stdin.buffer)
    if hello is None:
        return
    settings, _ = hello
    # a program's path may have a `queue.py` of its own, which it never imports
    sys.path[:] = [*library, *settings["path"]]
    send(answers, {"ready": True})
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def listen() -> None:
        try:
            while (frame := receive(sys.stdin.buffer)) is not None:
                requests.put(frame[0])
        finally:
            os._exit(0)  # in the middle of a compile too

    threading.Thread(target=listen, daemon=True).start()
    from .disk import DiskCache

    cache = DiskCache(settings["directory"], settings["maxsize"])
    while True:
        send(answers, *_serve(requests.get(), cache))


def _serve(request: dict[str, Any], cache: Any) -> tuple[dict[str, Any], bytes]:
    try:
        from ..kernel.source import Source
        from .build import build_once
        from .toolchain import key_of

        source, target = Source.from_json(request["source"]), request["target"]
        if key_of(source, target) != request["key"]:
            return {"error": "the packages that compile have changed since Python started"}, b""
        made = build_once(source, target, request["key"], cache)
        if len(made.binary) > MOST_BYTES:
            return {"error": f"the binary has {len(made.binary)} bytes"}, b""
        return {"built": made.built, "unsaved": made.unsaved}, made.binary
    except Exception as error:  # the parent reports it
        return {"error": f"{type(error).__name__}: {error}"}, b""
