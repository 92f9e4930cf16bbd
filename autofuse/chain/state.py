"""State: what is recorded, as data: nodes of the trie, the open chain, and whose they are.

Every thread and device has its own Recorder, with a trie and one open Chain. What may happen to
them, and when, stands in `record.flush`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any
from weakref import ref

import torch

from .. import hooks
from ..ops.row import Op
from ..ops.views import JoinOp, ViewOp
from ..program.program import Output, Ref, RowsOf
from ..settings.config import config, watch
from ..sole import frees
from ..supply.load import enter_context
from ..torch_private import KINDS, Hooks, autocast_is_on, stream_reader, top_hooks
from . import verified
from .meta import Meta, same_device
from .refusal import Refusal
from .shell import Tensor


class Node:
    """One recorded op at one place of one program. Also the state of the shells it hands out."""

    __slots__ = ("apart", "args", "autocast", "base", "by_outputs", "cast", "common", "consts",
                 "cuts", "fresh_bytes", "grad_mode", "holds_grad", "index", "inputs",
                 "into", "key", "known_views", "likely", "limits", "long", "looked_on", "made_at",
                 "meta", "next", "of", "offset", "op", "parent", "pinned_limit", "reason",
                 "recent", "recorder", "refusal", "relaxed", "returns", "rows", "runners", "saves",
                 "shell", "skips", "starts", "swept", "told", "turns", "unread", "usual", "viewed",
                 "views", "writers")  # fmt: skip

    def __init__(
        self, recorder: Recorder, parent: Node | None, op: Op | None, grad_mode: bool = False
    ) -> None:
        self.recorder, self.parent, self.op = recorder, parent, op
        # whether it is recorded in grad mode
        self.grad_mode: bool = grad_mode if parent is None else parent.grad_mode
        self.relaxed: bool = config.relaxed if parent is None else parent.relaxed
        self.autocast: bool = False if parent is None else parent.autocast  # recorded under it
        # when hooks are told what autograd saves, AT_ONCE or LATER; then, what eager's node does
        self.told: str = "" if parent is None else parent.told
        # whether these hooks read no values of what they are told of
        self.unread: bool = False if parent is None else parent.unread
        # under modes of torch functions: whoever is told of an op records it, and not before; keys
        # have the op in a tuple, where the hot path never looks
        self.looked_on: bool = False if parent is None else parent.looked_on
        self.turns: list[Node | None] | None = None  # of a root, by 2 * grad mode + autocast
        self.saves: tuple[Ref, ...] = ()
        self.cast: torch.dtype | None = None  # of operands, which have to be cast before
        # the rows of the chain, once one is reduced
        self.rows: RowsOf | None = None if parent is None else parent.rows
        self.index: int = -1 if parent is None else parent.index + 1
        self.args: tuple[Ref, ...] = ()
        self.common = ""
        self.meta: Meta | None = None
        # of a view: the node whose memory its value lies in, and where in that; else -1
        self.base, self.offset = -1, 0
        # of a statistic: the reduction, and which one of it; see `steps`
        self.of: tuple[int, int] | None = None
        # of an op in place on a sole tensor: the Input whose memory its value gets
        self.into: Ref | None = None
        # whether views or joins are among the nodes
        self.viewed: bool = False if parent is None else parent.viewed
        self.views: dict[Any, tuple[ViewOp, ...]] = {}  # ops of its views, by how they are asked
        # the same for machine code, by its own keys: an op, or several
        self.known_views: dict[tuple[Any, ...], ViewOp | tuple[ViewOp, ...]] = {}
        # where an Input was last met by what was to be written after it: see `writes.reads_apart`
        self.apart: tuple[Meta, Meta, int] | None = None
        self.cuts = ""  # why this op begins another chain, if it does
        self.inputs: tuple[Meta, ...] = () if parent is None else parent.inputs
        self.consts: tuple[type, ...] = () if parent is None else parent.consts
        self.limits: tuple[float, float] | None = None  # of Consts that have to fit a dtype
        self.holds_grad = False if parent is None else parent.holds_grad  # an Input's graph goes on
        self.likely: tuple[Any, ...] = ()  # plain operands and targets of the next op
        self.fresh_bytes = 0  # of the Inputs that this op brings
        self.pinned_limit = 0  # bytes that only the chain may keep alive
        self.next: dict[tuple[Any, ...], Node] = {}
        self.recent: Node | None = None  # the one that followed last time
        self.key: tuple[Any, ...] = ()  # the edge that leads here
        self.shell: Tensor | None = None  # free unless it stands in the open chain
        # the Runners of the program that ends here, by reference counts of its shells...
        self.runners: dict[tuple[int, ...], Any] = {}
        self.usual: tuple[int, ...] | None = None  # those counts at the last flush, as there
        self.writers: dict[tuple[int, ...], Any] = {}  # ...where the last value goes to memory
        # that is there; and by outputs, also those that wait for kernels
        self.by_outputs: dict[tuple[Output, ...], Any] = {}
        # of `policy.make_eager`: after which node it stands, by which edge, in place of what; at a
        # start: of which, by which instruction, in place of nothing...
        self.returns: tuple[Node, Any, Node | None] | None = None
        # ...or the nodes to take by instructions, where chains that begin so pay at some of them
        self.starts: dict[int, Node] | None = None
        self.swept = 0  # backwards of the chain that ends here under `create_graph`
        self.skips = 0  # how often that was not recorded, of what is, how often that may be
        self.long = False  # a chain that begins here has paid as a fused one
        self.made_at = 0  # the address of the instruction by which it was first recorded
        self.reason = ""  # why this op is eager here, if it is
        self.refusal: Refusal | None = None  # the same, counted

    def named(self) -> dict[str, Ref]:
        """The operands by the names that the op's rules use, and the result as `out`."""
        assert self.op is not None
        return dict(zip(self.op.names, self.args, strict=True), out=self.index)

    def path(self) -> list[Node]:
        """The nodes of the program that ends here, in order."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.op is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def forget_runners(self) -> None:
        """Let the next flush build, or ask for, what runs it."""
        self.runners.clear()
        self.writers.clear()
        self.by_outputs.clear()


# when hooks of saved tensors are told, see `grad.saves`; the second where the function that is has
# the attribute TOLD_LATER, which is the hook itself, and UNREAD where that reads no values
AT_ONCE, LATER, TOLD_LATER, UNREAD = "at once", "later", "_autofuse_told_later", "_autofuse_unread"


class Untold:
    """What the nodes of a flush have saved and the hook `pack` has not been told of yet."""

    __slots__ = ("inputs", "pack", "saved")

    def __init__(
        self, inputs: list[torch.Tensor], pack: Callable[[Any], Any], saved: list[list[Any]]
    ) -> None:
        self.inputs, self.pack = inputs, pack  # inputs: the list of the chain
        self.saved = saved  # the first last: [tensor, False]; or [what `pack` returned, True]

    def tell(self, one: list[Any]) -> None:
        """Tell the hook of one that was saved."""
        if not one[1]:
            one[:] = self.pack(one[0]), True


class Chain(list):  # type: ignore[type-arg]
    """A chain, open or taken by a flush: its shells in order, and what they read.

    Its recorder's `running` is it from being taken until it is done or open again; `values` is None
    until they are known, WRITING while C writes memory that is read too.
    """

    __slots__ = ("bumps", "consts", "first", "hooks", "inputs", "into", "known", "late", "marks",
                 "pinned", "placed", "start", "stream", "tip", "tried", "values")  # fmt: skip

    def __init__(self, tip: Node) -> None:
        self.tip = tip
        self.inputs: list[torch.Tensor] = []
        self.known: dict[int, int] = {}  # `slots`, or less: machine code adds Inputs without it
        self.marks: list[int] = []  # version and address of each Input when it was recorded
        self.consts: list[Any] = []
        self.bumps: dict[int, int] | None = None  # node index -> in-place ops its handle has seen
        # memory that takes the last value, see `record_write`; None again once it has
        self.into: torch.Tensor | None = None
        # node index -> position of the Input that the memory of its handle stands in meanwhile
        self.placed: dict[int, int] | None = None
        self.values: dict[int, torch.Tensor] | None = None  # what a flush gives away, by node index
        self.pinned = 0  # bytes of Inputs since the last look at who holds them
        self.stream = 0
        self.first = 0  # under grad: the number of its first op, see `record.numbers`
        self.late: int | None = None  # that, where nodes made now would come too late
        self.tried: list[Any] | None = None  # Origins of Inputs that are on trial
        # the instruction that it begins at, while it is not known whether it pays there
        self.start: int | None = None
        self.hooks: Hooks | None = None  # its recorder's, once a flush has taken it

    @property
    def slots(self) -> dict[int, int]:
        """The id of each Input -> ~its position."""
        if len(self.known) != len(self.inputs):
            self.known = {id(x): ~k for k, x in enumerate(self.inputs)}
        return self.known

    def emptied(self) -> Chain:
        """Itself without its contents, to be used again: 0.2 us less than a new one."""
        self.inputs, self.consts = [], []  # autograd may keep those of the last flush
        self.known.clear()
        self.marks.clear()
        self.bumps = self.placed = self.into = self.values = self.tried = None
        self.hooks = self.start = None
        self.pinned = 0
        return self


class Recorder:
    """What one thread records on one device."""

    __slots__ = ("__weakref__", "acquire", "autocast", "chain", "closed", "device", "ended",
                 "frees", "grad", "home", "hooks", "ident", "inference", "joins", "keeps",
                 "kind", "last_wait", "launches", "lock", "looked_on", "nowhere", "off",
                 "reading", "release", "resting", "roots", "running", "runners", "shut", "size",
                 "sizes", "spare", "stream", "thread", "untold", "waits")  # fmt: skip

    def __init__(self, device: torch.device, ident: int, off: bool) -> None:
        self.device, self.off = device, off
        self.kind = KINDS[device.type]
        self.thread = ident  # whose it is; -1 once that has ended
        self.ident = ident  # the same, or 0 while a flush has taken the chain; -1 after `leave`
        self.relock()
        self.ended = False  # its thread has gone
        self.stream = stream_reader(device)
        enter_context(device)
        self.nowhere = Node(self, None, None)  # after which nothing is ever recorded
        self.grad = self.inference = self.autocast = self.looked_on = False
        self.hooks: Hooks | None = None  # of saved tensors
        self.untold: list[Untold] = []
        self.resting = False  # records nothing until there is news of kernels; see `policy.rest`
        self.launches = 0  # flushes that ran a kernel, or waited for it
        self.waits = self.last_wait = 0  # flushes in a row that waited; `launches` at the last
        self.roots: dict[object, list[Node | None]] = {}  # by the other modes: `Node.turns`
        self.joins: dict[object, JoinOp | None] = {}  # by torch's name, dimension and Metas
        self.keeps = True  # whether backward may keep what lies between Inputs and results
        self.size = 0  # nodes in the trie
        self.sizes: dict[object, Any] = {}  # of ops that begin chains; see `seldom.Sizes`
        self.runners: list[Any] = []  # `run.runner.Runner`s
        self.reading = False  # an op that is being recorded looks at tensors that it is to read
        self.running: Chain | None = None  # taken by a flush that is not done; `ident` is 0 then
        self.chain = Chain(self.nowhere)
        self.closed = Chain(self.nowhere)  # the open chain from `close` to `reopen`
        self.shut: tuple[Chain, Node] | None = None  # what that has put aside
        self.open()

    def relock(self) -> None:
        """Have a lock that nobody holds."""
        self.lock = threading.RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def open(self) -> bool:
        """Start an empty chain where the modes of this moment say: the trie is theirs alone.

        False, with the chain left open, where something is pending.
        """
        grad, inference, autocast, hooks = self.grad, self.inference, self.autocast, self.hooks
        looked_on = self.looked_on
        if self.thread == get_ident():  # another thread's modes are not those of its recorder
            grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            autocast = autocast_is_on() and torch.is_autocast_enabled(self.device.type)
            hooks = top_hooks()
            looked_on = this_thread.lookers > 0
        told, unread = "", False
        if hooks is not None:
            told = LATER if hasattr(hooks[0], TOLD_LATER) else AT_ONCE
            unread = hasattr(hooks[0], UNREAD)
        dtype = torch.get_default_dtype()
        rest = inference, told, unread, looked_on, self.resting, dtype, _settings
        turns = self.roots.get(rest)
        if turns is None:
            turns = self.roots.setdefault(rest, [None] * 4)
        root = turns[2 * grad + autocast]
        if root is None:
            root = turns[2 * grad + autocast] = Node(self, None, None, grad and not inference)
            root.turns = turns
            root.autocast, root.told = autocast, told
            root.unread, root.looked_on = unread, looked_on
            root.reason = "waiting for kernels" if self.resting else ""
        # of memory in which ops in place are recorded, see `sole`; 0 for none: on a CPU it does not
        # pay, where such an op allocates nothing (1.16 of eager's time, `bench/overhead.py`)
        self.frees = frees(self.device) if self.kind or config.always_fuse else 0
        # under anomaly mode every op has to have its own autograd node
        off = self.off or not config.enabled or torch.is_anomaly_enabled()
        chain = Chain(home := self.nowhere if off else root)
        if not self.chain:
            keeps = config.recompute != "inputs"
            # no Python runs from here...
            self.grad = grad
            self.inference = inference
            self.keeps = keeps
            self.autocast = autocast
            self.hooks = hooks
            self.looked_on = looked_on
            self.home = home
            self.spare: Chain | None = None
            self.shut = None
            self.chain = chain
            # ...to here
            return True
        return False

    def close(self) -> bool:
        """Record nothing until `reopen`: 1 us for both, twice `open` takes 5.

        False, with nothing changed, where something is pending, or recording is off already.
        """
        if not self.ident == self.thread == get_ident():
            return False
        shut = self.chain, self.home
        # no Python runs from here...
        if self.off or self.reading or self.chain:
            return False
        if self.chain is shut[0] and self.home is shut[1]:
            self.off = True
            self.nowhere.likely = ()  # in torch.vmap a check would meet what has no sizes
            self.shut, self.home, self.chain = shut, self.nowhere, self.closed
            # ...to here
            return True
        return False

    def reopen(self) -> bool:
        """Undo `close`; False, with nothing changed, if another chain was opened meanwhile."""
        # no Python runs from here...
        shut = self.shut
        if shut is not None and self.chain is self.closed and not self.reading:
            self.off = False
            self.chain, self.home = shut
            self.shut = None
            # ...to here
            return True
        return False

    def totals(self) -> Counter[str]:
        """What its runners have done so far."""
        total: Counter[str] = Counter()
        for runner in self.runners:
            runs = runner.runs
            total["bytes_saved_for_backward"] += runs * runner.saved_bytes
            total["kernels_launched"] += runs * len(runner.kernels)
            total["cache_hits"] += max(0, runs - 1) * bool(runner.kernels)
            total["eager_flushes"] += runs * runner.waiting
            if not runner.recorded:
                continue
            total["ops_recorded"] += runs * len(runner.nodes)
            if runner.elides:
                total["nodes_elided"] += runs * runner.elided
                total["bytes_elided"] += runs * runner.elided_bytes
            total["live_outs_stored"] += runs * runner.stored
        return total

    def forget(self) -> None:
        """Drop the trie, whose open chain is empty or goes on as it is; kernels stay."""
        counts.forgotten.update(self.totals())
        for table in (self.runners, self.roots, self.joins, self.sizes):
            table.clear()
        self.size = 0

    def leave(self) -> None:
        """Once nothing is pending any more, be nothing that holds something.

        Undone by hand, for a cycle would wait for the garbage collector.
        """
        if not self.ident:  # in the middle of a flush, which does this at its end
            return
        self.ident = -1
        if self.chain:
            return
        nodes = [node for turns in self.roots.values() for node in turns if node is not None]
        self.forget()
        for node in nodes:
            nodes += node.next.values()
            if node.returns is not None and node.returns[2] is not None:
                nodes.append(node.returns[2])
            if node.starts is not None:
                node.starts.clear()
            node.next.clear()
            node.forget_runners()
            node.recent = node.returns = node.shell = node.turns = None
        self.spare = self.shut = None
        self.home = self.nowhere = self.chain.tip = self.closed.tip = _NOWHERE


_NOWHERE = Node(None, None, None)  # type: ignore[arg-type] - where recorders end


class _AllRecorders:
    """All recorders that there are: their threads hold them, and values that are pending."""

    def __init__(self) -> None:
        self.refs: list[ref[Recorder]] = []

    def add(self, recorder: Recorder) -> None:
        self.refs.append(ref(recorder, self.refs.remove))

    def __iter__(self) -> Iterator[Recorder]:
        for known in self.refs[:]:  # other threads add and remove
            recorder = known()
            if recorder is not None:
                yield recorder


class OwnRecorders(dict):  # type: ignore[type-arg]
    """A thread's recorders by device; goes when the thread goes."""

    def __del__(self) -> None:
        for recorder in self.values():
            hooks.thread_ended(recorder)


class _Recorders:
    """What a thread finds that asks first; no `__init__`, whose middle would find nothing.

    Nor a `__getattr__`: with one every attribute takes 80 ns, without 35.
    """

    def __get__(self, local: Any, owner: type) -> dict[torch.device, Recorder]:
        return local.__dict__.setdefault("recorders", OwnRecorders())


class _Local(threading.local):
    """This thread's recorders, and how many reasons it has to record nothing."""

    current: Recorder | None = None  # the one used last; see `make_current`
    closed = 0
    applies = 0  # of these, the `apply`s of Functions
    lookers = 0  # modes of torch functions that have been entered
    depth = 0  # fused calls on the stack
    plain = False  # the innermost of them records nothing, as its contest has it
    recorders = _Recorders()


this_thread = _Local()
_find_dict = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))


def make_current(recorder: Recorder | None) -> None:
    """Let `recorder` be the one that this thread used last.

    Machine code looks into what CPython keeps for a thread, which lives as long: a `local` takes
    five times that, 0.1 us an op.
    """
    this_thread.current = recorder
    own = ctypes.cast(_find_dict(), ctypes.py_object).value
    if recorder is None:
        own.pop("autofuse_current", None)
    else:
        own["autofuse_current"] = recorder


# which combination of those settings this is that a trie is of
_settings = 0
_combinations: dict[tuple[object, ...], int] = {}


def _follow(*reason: object) -> None:
    global _settings
    now = (config.recompute, config.always_fuse, config.relaxed, config.max_nodes,
           config.max_inputs, config.loop_nodes, config.reductions)  # fmt: skip
    _settings = _combinations.setdefault(now, len(_combinations))


watch(_follow)
_follow()
all_recorders = _AllRecorders()


def is_alone() -> bool:
    """Whether no other thread has recorded anything."""
    return len(all_recorders.refs) == len(this_thread.recorders)


class Counts:
    """Counters that are not kept per runner."""

    __slots__ = ("backwards", "flushes", "forgotten", "in_use", "refused", "replays", "trials")

    def __init__(self) -> None:
        self.flushes: dict[str, int] = {}  # a Counter counts in twice the time
        self.replays = self.backwards = 0
        self.trials = 0  # results that were on trial, see `record.origins`
        self.refused = 0  # ops that were not recorded, of sizes that seldom come
        self.in_use = False  # something was wrapped, or a fused function called
        self.forgotten: Counter[str] = Counter()  # totals of runners that are gone


counts = Counts()


def recorder_for(device: torch.device) -> Recorder:
    """This thread's recorder for `device`."""
    recorder = this_thread.recorders.get(device)
    if recorder is None:
        device = same_device(device)
        recorder = Recorder(device, get_ident(), this_thread.closed > 0)
        all_recorders.add(recorder)
        verified.meet(device)
        # made in the middle, it may be
        recorder = this_thread.recorders.setdefault(device, recorder)
    return recorder
