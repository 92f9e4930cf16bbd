"""The compiler's process: Sources in, binaries out. Knows no torch and touches no GPU.

It is started with this package's directory as its argument, reads frames from stdin and answers on
stdout; what compilers print goes to stderr. It ends when its stdin does, which is when its parent
ends, whatever it is doing then. A frame is two lengths, a JSON object and bytes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<II")
# stands for the package, whose own __init__ would import torch
BOOT = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = [path for path in sys.path if path]
import types
package = types.ModuleType("autofuse")
package.__path__ = [sys.argv[1]]
sys.modules["autofuse"] = package
from autofuse.worker import main
main()
"""


def send(stream: BinaryIO, header: dict[str, Any], payload: bytes = b"") -> None:
    """Write one frame."""
    text = json.dumps(header).encode()
    stream.write(_LENGTHS.pack(len(text), len(payload)) + text + payload)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream."""
    lengths = _read(stream, _LENGTHS.size)
    if lengths is None:
        return None
    header, payload = (_read(stream, count) for count in _LENGTHS.unpack(lengths))
    return None if header is None or payload is None else (json.loads(header), payload)


def _read(stream: BinaryIO, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        more = stream.read(count - len(data))
        if not more:
            return None
        data += more
    return data


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if hasattr(os, "nice"):
        os.nice(5)  # the program that asked comes first
    hello = receive(sys.stdin.buffer)
    if hello is None:
        return
    settings, _ = hello
    sys.path[:] = settings["path"]
    send(answers, {"ready": True})
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def listen() -> None:
        while (frame := receive(sys.stdin.buffer)) is not None:
            requests.put(frame[0])
        os._exit(0)  # in the middle of a compile too

    threading.Thread(target=listen, daemon=True).start()
    from .cache import DiskCache

    cache = DiskCache(settings["directory"], settings["maxsize"])
    while True:
        send(answers, *_serve(requests.get(), cache))


def _serve(request: dict[str, Any], cache: Any) -> tuple[dict[str, Any], bytes]:
    try:
        from .build import build_once
        from .source import Source
        from .toolchain import compilers

        source = Source.from_json(request["source"])
        if list(compilers(source.device)) != request["compilers"]:
            return {"error": "the packages that compile have changed since Python started"}, b""
        made = build_once(source, request["target"], request["key"], cache)
        return {"built": made.built, "unsaved": made.unsaved}, made.binary
    except Exception as error:  # the parent reports it
        return {"error": f"{type(error).__name__}: {error}"}, b""
