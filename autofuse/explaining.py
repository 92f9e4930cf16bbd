"""Explaining: what autofuse did with a region of a program, why, and what would help.

A Report is an Observer with a memory. It holds no values: what it keeps of a tensor is its dtype,
shape and who held it.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import re
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CellType, FrameType, GeneratorType
from typing import Any, TextIO

import torch

from . import observe
from . import report as _report
from .api import _call
from .chain import DEAD, Chain, _all_recorders
from .compile import target_of
from .launch import Runner
from .logs import assembly
from .observe import Flush, Lookup, Observer, spelled
from .plan import CONST
from .position import PACKAGE, TORCH, Position, frames, is_inside, shown, user_position
from .shell import Held, Lost, Meta, NoTorchFunction, Tensor
from .source import Source
from .trie import Node

# reads of values that make the host wait for the device; `ops_eager` counts them as ops too
_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal",
          "allclose", "is_nonzero", "argwhere", "__bool__", "__int__", "__float__", "__index__",
          "__complex__", "__array__", "__repr__", "__format__", "__contains__")  # fmt: skip
_SYNCS = {*_READS, "_local_scalar_dense"}


@dataclass(frozen=True, slots=True)
class LiveOut:
    """A value that was written to memory because something outside the chain could see it."""

    op: str
    what: str  # "float32[8, 16]"
    nbytes: int
    position: Position | None  # of the flush
    holders: tuple[str, ...]  # "variable h", "list outs", "attribute h of Cell", "C++", ...
    last: bool  # it is what its chain ends with


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that ran, and how often; one entry for each set of sizes."""

    name: str
    launches: int
    reads: tuple[str, ...]  # "float32[8, 16]"
    writes: tuple[str, ...]
    bytes_read: int  # of one launch
    bytes_written: int
    backward: bool
    target: str  # "sm_90" or "cpu"
    kernel: Source

    @property
    def source(self) -> str:
        """The text that was compiled."""
        return self.kernel.text

    @property
    def ptx(self) -> str:
        """The PTX, made again with the compiler; of a CPU kernel its LLVM IR."""
        return assembly(self.kernel, self.target)[1]


@dataclass(frozen=True, slots=True)
class Sync:
    """A read that made the host wait."""

    name: str  # "item", "bool", ...
    position: Position | None
    text: str  # "loss.item()", as the program says it


class Report(Observer):
    """What `explain` found; a context manager around the region it is about.

    Covers the whole process, as `stats` does, while it is open. `print` it.

    flushes: every run of a chain: its ops, Inputs, reason, position, microseconds.
    stored: the values that were written to memory, and who held them.
    syncs: the reads that made the host wait.
    looked_up_kernels: kernels that were needed or arrived: hit, soft miss or hard miss.
    kernels: what was launched, with text, PTX, and bytes; known when the region has ended.
    launches, bytes_saved, values_elided: kernels launched; dead intermediates that never got
        memory, and their bytes.
    ops_eager: ops that ran as plain PyTorch, by (op, reason).
    pending: ops that were recorded inside and had not run at its end.
    result: of the function that was explained.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self.flushes: list[Flush] = []
        self.stored: list[LiveOut] = []
        self.syncs: list[Sync] = []
        self.lookups: list[Lookup] = []
        self.kernels: list[KernelUse] = []
        self.ops_eager: Counter[tuple[str, str]] = Counter()
        self.launches = self.bytes_saved = self.values_elided = self.pending = 0
        self.open = False
        self._held: dict[object, tuple[str, ...]] = {}  # by place and trie node: gc takes 20 ms
        self._runs: dict[Runner, int] = {}  # before the region
        self._totals: Counter[str] = Counter()

    # --- the region ---

    def __enter__(self) -> Report:
        if self.open or self.flushes or self._runs:
            raise RuntimeError("this report is about another region; call autofuse.explain() again")
        self.open = True
        self._runs = {runner: runner.runs for runner in _runners()}
        self._totals = _report._sum()
        _watch_reads()
        observe.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.open = False
        observe.remove(self)
        _unwatch_reads()
        after = _report._sum()
        self.launches = after["kernels_launched"] - self._totals["kernels_launched"]
        self.bytes_saved = after["bytes_elided"] - self._totals["bytes_elided"]
        self.values_elided = after["nodes_elided"] - self._totals["nodes_elided"]
        self.pending = sum(len(recorder.chain) for recorder in list(_all_recorders))
        used: Counter[KernelUse] = Counter()
        for runner in _runners():
            runs = runner.runs - self._runs.get(runner, 0)
            if runs > 0:
                used.update(dict.fromkeys(_uses(runner), runs))
        self.kernels = [replace(use, launches=runs) for use, runs in used.most_common()]
        self._runs, self._held = {}, {}

    # --- events ---

    def flushing(self, flush: Flush, chain: Chain, alive: Sequence[int], node: Node) -> None:
        self.flushes.append(flush)
        shells = [chain[index] for index in flush.live]
        for index, who in zip(flush.live, self._holders(flush, shells, alive, node), strict=True):
            meta = flush.values[index]
            self.stored.append(
                LiveOut(
                    flush.ops[index],
                    spelled(meta),
                    meta.nbytes,
                    flush.position,
                    who,
                    index == len(flush.ops) - 1,
                )
            )

    def flushed(self, flush: Flush) -> None:
        if flush.eager:
            for op in flush.ops:
                self.ops_eager[op, flush.eager] += 1

    def looked_up(self, lookup: Lookup) -> None:
        self.lookups.append(lookup)

    def ran_eagerly(self, name: str, reason: str) -> None:
        self.ops_eager[name, reason] += 1
        if name in _SYNCS:
            self.read(name)

    def read(self, name: str) -> None:
        """Note a read that makes the host wait."""
        position = user_position()
        self.syncs.append(Sync(name.strip("_"), position, _said(name, position)))

    def _holders(
        self, flush: Flush, shells: list[Tensor], alive: Sequence[int], node: Node
    ) -> list[tuple[str, ...]]:
        """Who holds each of the live `shells` of a chain that ends with `node`."""
        keys = [(flush.position, node, index) for index in flush.live]
        if not all(key in self._held for key in keys):
            counts = [alive[index] - DEAD for index in flush.live]
            found = holders(shells, counts)
            if flush.reason == "fuse":  # the outermost fused call has just returned it
                found = [("the result of the call",) if who == (_ARGUMENT,) else who
                         for who in found]  # fmt: skip
            self._held.update(zip(keys, found, strict=True))
        return [self._held[key] for key in keys]

    # --- what it comes to ---

    @property
    def ops_fused(self) -> Counter[str]:
        """Ops that were computed by kernels, or not at all because nobody could see them."""
        fused = (flush for flush in self.flushes if not flush.eager and not flush.raised)
        return Counter(op for flush in fused for op in flush.ops)

    @property
    def ops_seen(self) -> Counter[str]:
        """Every op on a wrapped tensor that ran, fused or not."""
        seen = self.ops_fused
        for (op, _), count in self.ops_eager.items():
            seen[op] += count
        return seen

    @property
    def chains(self) -> list[int]:
        """Ops of each chain that ran."""
        return [len(flush.ops) for flush in self.flushes]

    @property
    def median_chain(self) -> float:
        """Median of `chains`; 0 if there is none."""
        return statistics.median(self.chains or [0])

    @property
    def longest_chain(self) -> int:
        """The longest of `chains`; 0 if there is none."""
        return max(self.chains, default=0)

    @property
    def reasons(self) -> Counter[tuple[str, Position | None]]:
        """Flushes by reason and the user's file and line."""
        return Counter((flush.reason, flush.position) for flush in self.flushes)

    @property
    def advice(self) -> list[str]:
        """What would help, in plain words."""
        return [*_advice(self)]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<autofuse report: {_summary(self)}>"


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Report:
    """What autofuse does with `fn(*args, **kwargs)`, or with the region of a `with` statement.

    fn: a function or module, run once as `autofuse.fuse` would run it; its result is
        `report.result`. Without it, `with autofuse.explain() as report:` explains what is inside.

    Results are what they are without it; the region runs slower, because lines of the program and
    holders of values are looked up. A first run compiles: explain a second one to see steady state.
    Raises whatever the function raises.
    """
    report = Report()
    if fn is not None:
        with report:
            report.result = _call(fn, args, kwargs)
    return report


def _runners() -> list[Runner]:
    return [runner for recorder in list(_all_recorders) for runner in list(recorder.runners)]


def _uses(runner: Runner) -> list[KernelUse]:
    """What one run of `runner` launches."""
    found = []
    for piece, kernel in zip(runner.pieces, runner.kernels, strict=False):
        reads = [runner.inputs[~ref] if ref < 0 else runner.nodes[ref].meta for ref in piece.loads]
        writes = [runner.nodes[index].meta for index in piece.stores]
        moved = [[meta for meta in metas if meta is not None] for metas in (reads, writes)]
        found.append(
            KernelUse(
                name=kernel.source.name,
                launches=1,
                reads=tuple(map(spelled, moved[0])),
                writes=tuple(map(spelled, moved[1])),
                bytes_read=sum(meta.nbytes for meta in moved[0]),
                bytes_written=sum(meta.nbytes for meta in moved[1]),
                backward=not runner.recorded,
                target=target_of(runner.device),
                kernel=kernel.source,
            )
        )
    return found


# --- reads of plain tensors, which autofuse does not see otherwise --------------------------------

_open_reports = 0
_reads_lock = threading.Lock()
# reads inside one that is noted already
_INNER = (PACKAGE, *(TORCH + name for name in ("_tensor.py", "_tensor_str.py")))


def _watch_reads() -> None:
    global _open_reports
    with _reads_lock:
        _open_reports += 1
        if _open_reports == 1:
            for name in _READS:
                if hasattr(torch.Tensor, name):
                    _originals[name] = torch.Tensor.__dict__.get(name)
                    setattr(torch.Tensor, name, _noting(name, getattr(torch.Tensor, name)))


def _unwatch_reads() -> None:
    global _open_reports
    with _reads_lock:
        _open_reports -= 1
        if not _open_reports:
            for name, original in _originals.items():
                if original is None:  # it was inherited
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, original)
            _originals.clear()


_originals: dict[str, Any] = {}


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__class__ is not Tensor:  # a wrapped one tells by itself
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith(_INNER):
                for observer in list(observe._observers):
                    if isinstance(observer, Report):
                        observer.read(name)
        return method(self, *args, **kwargs)

    call.__name__ = name
    return call


_AS_METHOD = r"([\w.]+(?:\[[^\]]*\])?)\.{name}\("


def _said(name: str, position: Position | None) -> str:
    """The read as the program says it: `loss.item()`."""
    line = linecache.getline(*position).strip() if position is not None else ""
    found = re.search(_AS_METHOD.replace("{name}", re.escape(name)), line)
    if found:
        return f"{found.group(1)}.{name}()"
    return line.rstrip(":") if name.startswith("_") and line else f"{name.strip('_')}()"


# --- who holds a value ----------------------------------------------------------------------------


_ARGUMENT = "an argument of the call"


def holders(shells: list[Tensor], counts: list[int]) -> list[tuple[str, ...]]:
    """Who holds each of `shells`, which have so many references from outside autofuse.

    First the variables of the frames on the stack, then, where they do not account for every
    reference, what the garbage collector knows.
    """
    names: list[dict[str, None]] = [{} for _ in shells]
    ours = {id(shells)}  # containers of autofuse's own
    theirs: dict[int, str] = {}  # id of a container in a variable -> its name
    arguments: set[int] = set()
    modules: set[int] = set()
    for frame in frames():
        inside = is_inside(frame)
        for name, value in _variables(frame, modules):
            if isinstance(value, (list, tuple, dict, set)):
                if inside:
                    ours.add(id(value))
                    if isinstance(value, tuple):
                        arguments.update(
                            k for k, shell in enumerate(shells) if any(x is shell for x in value)
                        )
                else:
                    theirs.setdefault(id(value), name)
            for k, shell in enumerate(shells):
                if value is shell and inside:
                    arguments.add(k)
                elif value is shell:
                    names[k][f"variable {name}"] = None
    ours.difference_update(theirs)
    if any(len(found) < count for found, count in zip(names, counts, strict=True)):
        missing = [
            k for k, (found, count) in enumerate(zip(names, counts, strict=True))
            if len(found) < count
        ]  # fmt: skip
        _add_containers(names, [(k, shells[k]) for k in missing], ours, theirs)
    for k, shell in enumerate(shells):
        if not names[k]:
            in_c = torch.Tensor._use_count(shell) > 1  # type: ignore[attr-defined]
            name = "C++" if in_c else _ARGUMENT if k in arguments else "a temporary"
            names[k][name] = None
    return [tuple(found) for found in names]


def _variables(frame: FrameType, modules: set[int]) -> list[tuple[str, Any]]:
    """The local variables of `frame`, and those of its module unless it is among `modules`."""
    variables, module = frame.f_locals, frame.f_globals
    found = list(variables.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # up to 3.12 this is a copy that stays with the frame, and would keep the values alive
        if sys.getrefcount(variables) <= _COPY:
            variables.clear()
    if id(module) not in modules and variables is not module and not is_inside(frame):
        modules.add(id(module))
        found += [(f"{name} (global)", value) for name, value in list(module.items())]
    return found


def _calibrate() -> int:
    """References to the copy that nobody else holds."""
    variables = sys._getframe().f_locals
    count = sys.getrefcount(variables)
    variables.clear()
    return count


_COPY = _calibrate()


def _add_containers(
    names: list[dict[str, None]],
    missing: list[tuple[int, Tensor]],
    ours: set[int],
    theirs: dict[int, str],
) -> None:
    """Add to `names` the containers and objects that refer to the `missing` shells."""
    ours.add(id(missing))
    for referrer in gc.get_referrers(*(shell for _, shell in missing)):
        if id(referrer) in ours or isinstance(referrer, (Chain, Node, FrameType)):
            continue
        referents = set(map(id, gc.get_referents(referrer)))
        for k, shell in missing:
            name = _as_holder(referrer, shell, theirs) if id(shell) in referents else ""
            if name and not (name == "a closure" and names[k]):  # its variable is named
                names[k][name] = None


def _as_holder(referrer: Any, shell: Tensor, theirs: dict[int, str]) -> str:
    """What `referrer` is called as the holder of `shell`; empty if it is none of the user's."""
    kind = type(referrer).__name__
    if isinstance(referrer, tuple) and id(referrer) not in theirs:
        return ""  # mostly the arguments of a call
    if id(referrer) in theirs:
        return f"{kind} {theirs[id(referrer)]}"
    if isinstance(referrer, dict):
        name = next((key for key, value in referrer.items() if value is shell), None)
        owned = (o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer)
        owner = next(owned, None)
        return "a dict" if owner is None else f"attribute {name} of {type(owner).__name__}"
    if isinstance(referrer, (list, set)):
        return f"a {kind}"
    if isinstance(referrer, GeneratorType):
        inside = referrer.gi_frame is not None and is_inside(referrer.gi_frame)
        return "" if inside else f"generator {referrer.__name__}"
    if isinstance(referrer, CellType):
        return "a closure"
    for name, value in list((getattr(referrer, "__dict__", None) or {}).items()):
        if value is shell:
            return f"attribute {name} of {kind}"
    return "" if type(referrer).__module__.startswith("autofuse") else f"a {kind}"


# --- the report in words --------------------------------------------------------------------------


def _plural(count: float, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:g} {noun}{ending}"


def _listed(items: Sequence[str]) -> str:
    counted = Counter(items).items()
    return ", ".join(f"{n} x {item}" if n > 1 else item for item, n in counted) or "nothing"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _summary(report: Report) -> str:
    seen, eager = report.ops_seen.total(), report.ops_eager.total()
    return (
        f"{_plural(seen, 'op')} seen, {seen - eager} fused in "
        f"{_plural(report.launches, 'launch')}, {eager} run eagerly"
    )


def _lines(report: Report) -> list[str]:
    lines = [f"autofuse: {_summary(report)}" + (" so far" if report.open else "")]
    if report.flushes:
        lines.append(
            f"chains: {len(report.chains)}, median {_plural(report.median_chain, 'op')}, "
            f"longest {report.longest_chain}"
        )
    lines += _section("flushes", (
        f"{count} x {reason} at {shown(position)}"
        for (reason, position), count in report.reasons.most_common()
    ))  # fmt: skip
    lines += _section("run eagerly", (
        f"{count} x {op}: {reason}" for (op, reason), count in report.ops_eager.most_common()
    ))  # fmt: skip
    lines += _section("kernels", (
        f"{use.name}{' (backward)' if use.backward else ''}: {use.launches} x, reads "
        f"{_listed(use.reads)} ({_bytes(use.bytes_read)}), writes "
        f"{_listed(use.writes)} ({_bytes(use.bytes_written)})"
        for use in report.kernels
    ))  # fmt: skip
    if report.values_elided:
        lines.append(
            f"saved: {_plural(report.values_elided, 'intermediate')}, "
            f"{_bytes(report.bytes_saved)} that never got memory"
        )
    stored = Counter((out.what, out.op, out.position, out.holders) for out in report.stored)
    lines += _section("stored", (
        f"{count} x {what}, of {op}, at {shown(position)}, held by {', '.join(who)}"
        for (what, op, position, who), count in stored.most_common()
    ))  # fmt: skip
    lines += _section("host reads", (
        f"{count} x {sync.text} at {shown(sync.position)}"
        for sync, count in Counter(report.syncs).most_common()
    ))  # fmt: skip
    if report.pending:
        lines.append(f"still pending: {_plural(report.pending, 'op')}")
    return lines + _section("advice", report.advice, limit=99)


def _section(title: str, items: Any, limit: int = 10) -> list[str]:
    found = list(items)
    more = [f"  and {len(found) - limit} more"] if len(found) > limit else []
    return [f"{title}:", *(f"  {item}" for item in found[:limit]), *more] if found else []


_TESTS = ("bool", "is_nonzero")


def _advice(report: Report) -> list[str]:
    said = []
    for sync, count in Counter(report.syncs).most_common():
        if count > 1:
            where = f"{sync.text} at {shown(sync.position)}"
            if sync.name in _TESTS:
                cure = "keep the choice on the device with torch.where, or test less often"
                said.append(f"{where} tests a value every step ({count} times); {cure}")
            else:
                said.append(
                    f"{where} reads a value every step ({count} times); move it out of the loop"
                )
    recorded = sum(report.chains)
    if not recorded and not report.pending:
        said.append(
            "nothing was recorded: there is no op of the table on a wrapped tensor here; "
            "autofuse.wrap the tensors, or autofuse.fuse the function"
        )
    waited = [flush for flush in report.flushes if "not there yet" in flush.eager]
    if waited:
        said.append(
            f"{_plural(len(waited), 'chain')} ran as eager ops while kernels were compiled; "
            "run it again after autofuse.wait()"
        )
    if recorded and report.median_chain <= 2:
        said.append(
            f"median chain is {_plural(report.median_chain, 'op')}: little to gain here"
            + _what_cuts(report)
        )
    failed = [flush for flush in report.flushes if flush.eager.startswith("its kernel failed")]
    if failed:
        said.append(
            f"{_plural(len(failed), 'chain')} ran as eager ops: {failed[0].eager}; "
            "AUTOFUSE_LOGS=kernel says more, and it is worth a bug report"
        )
    off = sum(n for (_, reason), n in report.ops_eager.items() if reason == "recording is off")
    if off:
        said.append(
            f"{_plural(off, 'op')} ran where nothing is recorded (autocast, anomaly mode, "
            "torch.func, a mode, autofuse.disabled)"
        )
    said += _kept(report)
    return said


def _what_cuts(report: Report) -> str:
    """What ends most chains, for advice on short ones."""
    ((reason, position), count), *_ = report.reasons.most_common()
    total = len(report.flushes)
    return f"; {count} of {total} chains end with {reason!r} at {shown(position)}"


def _kept(report: Report) -> list[str]:
    """Intermediates that were stored only because variables still held them."""
    kept: Counter[tuple[str, str, Position | None]] = Counter()
    nbytes = Counter[tuple[str, str, Position | None]]()
    for out in report.stored:
        if not out.last and all(who.startswith("variable ") for who in out.holders):
            key = (out.op, " and ".join(out.holders), out.position)
            kept[key] += 1
            nbytes[key] += out.nbytes
    return [
        f"a result of {op} in the middle of a chain is stored because {who} holds it at "
        f"{shown(position)} ({_plural(count, 'time')}, {_bytes(nbytes[op, who, position])}); "
        "`del` it after its last use if nothing needs it later"
        for (op, who, position), count in kept.items()
    ]


# --- show -----------------------------------------------------------------------------------------


def show(x: torch.Tensor, file: TextIO | None = None) -> None:
    """Print what a pending tensor is going to be computed from; nothing runs.

    x: any tensor. file: where to print, default stdout. Raises TypeError for what is no tensor.
    """
    print(expression(x), file=file)


def expression(x: torch.Tensor) -> str:
    """The text that `show` prints."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"autofuse.show takes a tensor, not {type(x).__name__}")
    if not isinstance(x, Tensor):
        return (
            f"a plain tensor, {_about(x)}: nothing is recorded of it; "
            "autofuse.wrap makes a tensor that records"
        )
    node = x._af
    if isinstance(node, Lost):
        return f"lost: {node.error}"
    if not isinstance(node, Node):
        return f"concrete, {_about(node.real if isinstance(node, Held) else x)}: nothing is pending"
    recorder = node.recorder
    with recorder.lock:
        chain = recorder.chain
        consts = list(chain.consts)
        if x._af is not node or not isinstance(node.meta, Meta):
            return expression(x)  # another thread has just run it
    nodes = node.path()
    needed = {node.index}
    for one in reversed(nodes):
        if one.index in needed:
            needed.update(ref for ref in one.args if 0 <= ref < CONST)
    used = [one for one in nodes if one.index in needed]
    inputs = sorted({~ref for one in used for ref in one.args if ref < 0})
    lines = [
        f"pending, {spelled(node.meta)} on {recorder.device}: "
        f"{_plural(len(used), 'op')} over {_plural(len(inputs), 'Input')}"
    ]
    lines += [f"  x{k}: {spelled(node.inputs[k])}" for k in inputs]
    for one in used:
        operands = [
            repr(consts[ref - CONST]) if ref >= CONST else f"v{ref}" if ref >= 0 else f"x{~ref}"
            for ref in one.args
        ]
        assert one.op is not None and one.meta is not None
        lines.append(
            f"  v{one.index} = {one.op.name}({', '.join(operands)})  # {spelled(one.meta)}"
        )
    return "\n".join(lines)


def _about(x: torch.Tensor) -> str:
    with NoTorchFunction():
        dtype, shape, device = x.dtype, tuple(x.shape), x.device
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"
