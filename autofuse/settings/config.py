"""Settings: one typed table of what may be set, here or in the environment.

A field of `Config` is a row: its type, which says what it may be, default and help. Its name in the
environment is `AUTOFUSE_` and its own in capitals, but for `AUTOFUSE` itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ..errors import warn_once
from .fields import Bytes, Kind, kind_of
from .sizes import DEFAULT_MAXSIZE, parse_size


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: Kind
    default: Any
    help: str
    field: bool  # of `Config`; otherwise what the environment says at the start stays

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return "AUTOFUSE" if self.name == "enabled" else f"AUTOFUSE_{self.name.upper()}"

    def read(self, text: str) -> Any:
        """The value of a text of the environment; ValueError says what is valid."""
        try:
            return self.kind.read(text)
        except ValueError:
            raise ValueError(
                f"{self.variable}={text!r} is not valid; use {self.kind.texts} "
                f"(default: {self.kind.show(self.default) or 'none'})"
            ) from None

    def check(self, value: Any) -> Any:
        """What is kept of an assigned value; ValueError or TypeError says what is valid."""
        try:
            return self.kind.check(value)
        except (ValueError, TypeError) as error:
            failure = TypeError if isinstance(error, TypeError) else ValueError
            raise failure(
                f"config.{self.name} = {value!r} is not valid; use {self.kind.values}"
            ) from None


def _row(default: Any, help: str, least: int = 1) -> Any:
    return field(default=default, metadata={"help": " ".join(help.split()), "least": least})


# fmt: off
@dataclass
class Config:
    """Settings of this process; assign to a field of `autofuse.config` to change one.

    `python -m autofuse settings` lists them with their names in the environment.
    """

    def __setattr__(self, name: str, value: object) -> None:
        value = _field(name).check(value)
        try:
            object.__setattr__(self, name, value)
        finally:  # an interrupt may come in between
            for tell in _watchers:
                tell("config")

    enabled: bool = _row(True, "record ops at all; 0 is plain eager")
    compile: Literal["auto", "background", "now"] = _row("auto", """
        where a chain's kernel is compiled. `background`: in processes of their own, while the chain
        runs as the eager ops it was recorded from; `now`: here, at once; `auto`: in the background
        for CUDA, where both give the same bits, now for the CPU, where they need not""")
    compile_after: int = _row(2, """
        how often a chain has to run before it is worth a compile in the background""")
    workers: int | None = _row(None, """
        processes that compile in the background, counted when the first kernel is asked for; with
        0 this one does. None: one, and more where many kernels wait for it, up to one for each
        two processors that this process may use, and eight""", least=0)
    max_kernels: int = _row(2048, """
        loaded kernels before all are forgotten; those still in use are loaded again""")
    max_kernels_per_line: int = _row(64, """
        kernels that one line of a program may ask for; further chains run as eager ops there""")
    recompute: Literal["free", "inputs"] = _row("free", """
        what backward computes again instead of keeping it. `free`: what follows from the tensors
        that eager would keep. `inputs`: everything, from the chain's Inputs alone, and gradients of
        one tensor's several uses are added up inside: less memory, but an Input that is written in
        place before backward is then an error, and a sum with gradients from elsewhere may round in
        another order than eager's""")
    backward_thread: Literal["auto", "engine", "caller"] = _row("auto", """
        where backward runs on CUDA. `engine`: in PyTorch's own threads. `caller`: in the thread
        that called it, of plain tensors too, which saves handing each node to another core;
        gradients have the same bits where one device computes them. `auto`: like `caller` once
        the process has wrapped a tensor or called a fused function, while it uses one GPU and
        `torch.distributed` is not initialized, but for backward with `create_graph=True`, whose
        nodes are numbered by thread; otherwise like `engine`""")
    reductions: bool = _row(True, """
        record reductions on CUDA; 0 leaves them to eager PyTorch, and they end a chain""")
    always_fuse: bool = _row(False, """
        fuse chains of one op, and short ones on the CPU and under grad, though eager ops cost less
        """)
    measure: bool = _row(True, """
        time fused calls and the same calls without autofuse in turns, on the stream and without
        waiting for it, and keep to what costs less; measured again at growing intervals, but once
        only where results may differ, as on the CPU. Results of ops that run eagerly stay plain
        where no chain that pays begins with them, and chains of sizes that seldom come are not
        recorded. 0 fuses every call, wraps every result and records all""")
    relaxed: bool = _row(False, """
        let ops of a chain contract with each other, leave out the rounding of 16-bit values that
        are not stored, fuse ops that are not bit-identical to eager; results are nearer to the
        exact ones, and no longer eager's""")
    max_nodes: int = _row(64, "a chain is cut at this many ops")
    loop_nodes: int = _row(30, """
        from this many ops on, a chain is cut where the op that began it comes again by an
        instruction that the chain has been at before, and from 1.5 times as many on by any other,
        so that a loop settles on one chain instead of one per phase""")
    max_inputs: int = _row(30, """
        a chain is cut at this many Inputs, long before the 4 KB that a kernel's parameters may
        have""")
    pinned_bytes: Bytes = _row(2 << 20, """
        Inputs that nobody but the chain may still hold are tolerated up to this size, or up to
        twice the largest of them, whichever is more""")
    max_trie: int = _row(8192, """
        recorded ops remembered per thread and device before the memory of them is dropped""")
    logs: frozenset[Literal["flush", "kernel", "cache"]] = _row(frozenset(), """
        one line per event to the loggers `autofuse.flush` (a chain ran), `autofuse.kernel` (a
        kernel arrived), `autofuse.cache` (one was looked up)""")
    check: bool = _row(False, """
        run every chain and every backward that launches a kernel as eager ops too, compare, and
        raise `MismatchError` where they differ""")
    dump_dir: Path | None = _row(None, """
        where the source and PTX (CPU: LLVM IR) of kernels are kept""")
    native: bool = _row(True, """
        record and launch by machine code, where everything is as expected; 0 is Python alone, for
        debuggers and profilers of Python""")
    nvtx: bool = _row(False, """
        make every flush an NVTX range, as `torch.profiler` shows it, for Nsight Systems""")


@dataclass
class _Cache:
    """What `supply.disk`, which knows no config, reads in the environment alone."""

    cache_dir: Path | None = _row(None, """
        where compiled kernels stay, if not in the user's cache directory (`~/.cache/autofuse` on
        Linux); it must belong to you and be writable by nobody else""")
    cache_maxsize: Bytes = _row(parse_size(DEFAULT_MAXSIZE), """
        how many bytes they may have, least recently used go first; 0 keeps nothing""")
# fmt: on


def _settings(table: type[Config | _Cache]) -> Iterator[Setting]:
    types = get_type_hints(table, include_extras=True)
    for row in fields(table):
        kind = kind_of(types[row.name], row.metadata["least"])
        yield Setting(row.name, kind, row.default, row.metadata["help"], table is Config)


SETTINGS = (*_settings(Config), *_settings(_Cache))
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_watchers: list[Callable[[str], None]] = []  # called after a change


def watch(changed: Callable[[str], None]) -> None:
    """Call `changed("config")` whenever a setting is assigned to."""
    _watchers.append(changed)


def nearest(name: str, names: Iterable[str]) -> str:
    """Which of `names` was meant."""
    from difflib import get_close_matches  # only for a slip of the pen

    return get_close_matches(name, [*names], 1, 0.0)[0]


def _field(name: str) -> Setting:
    setting = _BY_NAME.get(name)
    if setting is None:
        like = nearest(name, (setting.name for setting in SETTINGS if setting.field))
        raise AttributeError(f"autofuse.config has no setting {name!r}; the nearest is {like!r}")
    if not setting.field:
        raise AttributeError(
            f"config.{name} cannot be assigned; set {setting.variable} before Python starts"
        )
    return setting


def read(environment: Mapping[str, str]) -> dict[str, Any]:
    """The values by setting that `environment` has; warns of names that are no settings.

    Raises ValueError if a value is not valid.
    """
    by_variable = {setting.variable: setting for setting in SETTINGS}
    for name in environment:
        ours = name == "AUTOFUSE" or name.startswith("AUTOFUSE_")
        if ours and name not in by_variable and not name.startswith("AUTOFUSE_TEST_"):
            warn_once(
                f"autofuse: {name} in the environment is no setting; "
                f"the nearest is {nearest(name, by_variable)}"
            )
    return {
        setting.name: setting.read(environment[variable])
        for variable, setting in by_variable.items()
        if variable in environment
    }


def changed(environment: Mapping[str, str]) -> dict[str, str]:
    """What differs from the defaults now, by its name in the environment, as it is written there.

    environment: for the settings that are no fields of `config`.
    """
    values = {**read(environment), **vars(config)}
    return {
        setting.variable: setting.kind.show(values[setting.name])
        for setting in SETTINGS
        if values.get(setting.name, setting.default) != setting.default
    }


config: Config = Config(**{k: v for k, v in read(os.environ).items() if _BY_NAME[k].field})
