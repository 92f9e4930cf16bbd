"""Logs and dumps: what runs, as lines of the standard `logging` module, and kernels as files.

`config.logs` names the loggers that speak: `autofuse.flush`, one line per run of a chain,
`autofuse.cache`, one per kernel that is needed, `autofuse.kernel`, one per kernel that arrives. A
line is made of `key=value` fields; values with spaces are quoted as for a shell.
"""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import warn_once
from ..kernel.source import Source, walk
from ..lines import shown
from ..settings.config import config, watch
from ..supply.load import target_of
from ..supply.toolchain import key_of
from . import events
from .events import Flush, Lookup, Observer, spelled


class Log(Observer):
    """Writes the events of `names`."""

    def __init__(self, names: frozenset[str]) -> None:
        self.loggers = {name: logging.getLogger(f"autofuse.{name}") for name in names}
        self.handlers: list[tuple[logging.Logger, logging.Handler]] = []
        for logger in self.loggers.values():
            logger.setLevel(logging.INFO)
            if not logger.hasHandlers():  # the program has not set up logging: say it on stderr
                handler = logging.StreamHandler(sys.stderr)
                handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
                logger.addHandler(handler)
                self.handlers.append((logger, handler))

    def close(self) -> None:
        """Be silent again."""
        for logger in self.loggers.values():
            logger.setLevel(logging.NOTSET)
        for logger, handler in self.handlers:
            logger.removeHandler(handler)

    def _say(self, event: str, **fields: object) -> None:
        said = (f"{key}={shlex.quote(str(value))}" for key, value in fields.items())
        line = " ".join((event, *said))
        # handlers have locks of their own, and may need values that are pending
        events.unlocked(partial(self.loggers[event].info, "%s", line))

    def flushed(self, flush: Flush) -> None:
        if "flush" not in self.loggers:
            return
        ran = "raised" if flush.raised else "eager" if flush.eager else "fused"
        self._say(
            "flush",
            at=shown(flush.position),
            reason=flush.reason,
            ops=",".join(flush.ops),
            shapes=_shapes(flush),
            kernels=flush.kernels,
            ran=ran if flush.live or flush.raised else "nothing",
            **({"why": flush.eager} if flush.eager else {}),
            outcome=flush.outcome,
            us=f"{flush.us:.1f}",
        )

    def looked_up(self, lookup: Lookup) -> None:
        event, source = "kernel" if lookup.made else "cache", lookup.source
        if event not in self.loggers:
            return
        self._say(
            event,
            at=shown(lookup.position),
            name=source.name,
            ops=",".join(source.ops()),
            shapes=_shapes(lookup.flush) if lookup.flush is not None else _walks(source),
            target=target_of(lookup.device),
            outcome=lookup.outcome,
            us=f"{lookup.us:.1f}",
        )


def _shapes(flush: Flush) -> str:
    """`float32[8, 16],float32[16]->float32[8, 16]`: Inputs and what was stored."""
    stored = ",".join(spelled(flush.values[index]) for index in flush.live)
    return f"{','.join(map(spelled, flush.inputs))}->{stored}".replace(", ", "x")


def _walks(source: Source) -> str:
    """`f32 stridedxunit->f32 unit`: the operands of a kernel, which knows no sizes."""
    sides = (source.loads, source.stores)
    return "->".join(",".join(f"{x.code} {walk(x.axes)}" for x in side) for side in sides)


class Dump(Observer):
    """Keeps every kernel that arrives as files: `<name>-<key>.py` and `.ptx` (CPU: `.ll`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def looked_up(self, lookup: Lookup) -> None:
        """What cannot be written is said once."""
        if not lookup.made:
            return
        source, target = lookup.source, target_of(lookup.device)
        stem = f"{source.name}-{key_of(source, target)[:12]}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{stem}.py").write_text(source.text)
            suffix, text = assembly(source, target)
            (self.directory / f"{stem}{suffix}").write_text(text)
        except Exception as error:  # a missing compiler, a full disk: the program goes on
            warn_once(f"autofuse: cannot write {stem} to {self.directory}: {error}")


def assembly(source: Source, target: str) -> tuple[str, str]:
    """(".ptx", PTX) of a CUDA kernel, (".ll", LLVM IR) of a CPU kernel; compiles it again.

    target: as `sm_90`, or `cpu`.
    """
    from ..kernel import cuda, llvm
    from ..kernel.emit_cpu import emit_cpu
    from ..supply import build

    with build.compiler_lock:
        if source.device == "cpu":
            return ".ll", str(emit_cpu(source, llvm.converts_halves()))
        return ".ptx", cuda.compile_ptx(source, target)


_SERVED: dict[str, Callable[[Any], Observer]] = {"logs": Log, "dump_dir": Dump}  # by setting
_active: dict[str, tuple[object, Observer]] = {}  # setting -> (its value, who serves it)
_lock = threading.RLock()  # threads may assign at the same time


def _configure(*reason: object) -> None:
    """Follow the settings."""
    with _lock:
        for name, make in _SERVED.items():
            value = getattr(config, name)
            was, observer = _active.get(name, (None, None))
            if (was or None) == (value or None):
                continue
            if observer is not None:
                events.remove(observer)
                if isinstance(observer, Log):
                    observer.close()
                del _active[name]
            if value:
                made = make(value)
                _active[name] = value, made
                events.add(made)


def install() -> None:
    """Follow the settings from now on."""
    watch(_configure)
    _configure()
