"""Policy: when an op or a chain is better off without a kernel of its own, and for how long.

All thresholds of recording stand here, but for `seldom`; what the types of operands forbid is in
`chain.infer`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..chain.state import Node, Recorder, counts, this_thread
from ..chain.trie import eager_node, is_run, key_alone
from ..grad.backward import MANY_SWEEPS
from ..grad.segments import Outline
from ..kernel.again import FUNCTION
from ..kernel.text import calls_functions
from ..ops.reductions import Reduction
from ..run.runner import Runner
from ..settings.config import config
from ..supply import kernels as compiling
from .contest import Contest, clock_of
from .costs import ARITHMETIC_US, ops_of, shapes_of, stored_of, traffic, us_saved

# What chains cost the host, in us: on one NVIDIA H200 machine (bench/overhead.py), where the device
# has its own time, and on a CPU, one thread. A flush, which runs one kernel, an eager op (on a CPU
# 1.3 plain and 1.1 more for a wrapped tensor), and one that is recorded, without grad...
FLUSH_US = {"cuda": 10.1, "cpu": 4.0}
# ...and what it costs more for each further result and for each further shape of these, which takes
# another kernel: where nothing of ours is in the caches of the host, as between convolutions, 23 us
# for 2.5 results of 1.75 shapes (Res2Net's blocks, by the line; H100)
_RESULT_US, _SHAPE_US = {"cuda": 2.0, "cpu": 1.0}, {"cuda": 4.0, "cpu": 2.0}
_OP_US = {"cuda": 6.1, "cpu": 2.4}
_RECORDED_US = 0.3
_PLAIN_US = {"cuda": 6.1, "cpu": 1.3}  # an eager op on plain tensors
# What one costs more on wrapped tensors, and what it costs that its result is wrapped at all: 0.4
# to 1.4 again and again (bench/passing.py, with machine code). With other things in the caches of
# the host it is twice that on a CPU, and on the host of an H100 no more of an op, slower there too
PASSED_US = {"cuda": 0.9, "cpu": 0.8}
WRAPPED_US = 0.1
MIXED_US = 0.3  # what one costs more on a plain tensor beside a wrapped one
# What a chain that runs as the ops it is costs beside them: to record it, to flush it in Python and
# `ways.ShortRunner`. On a CPU 6 to 8, alone in a loop; in programs on hosts of GPUs, where those 40
# frames of Python are not in the caches, 40 to 150
SHORT_US = {"cuda": 60.0, "cpu": 7.0}


@dataclass(frozen=True, slots=True)
class _GradCosts:
    """...and under grad, forward and backward."""

    op: float
    gradient: float  # by its node
    kernel: float  # of its backward
    flush: float
    recorded: float  # an op
    node: float  # a Python node, in the caller's thread; see `training` of bench/overhead.py
    given: float  # what torch does for a reduction: its node, or the gradients of weights
    hooks: float  # what is told later to hooks of saved tensors, such as a checkpoint's...
    saved: float  # ...and by each tensor that they are told of


_GRAD_US = {
    # in 20 chains between products on the host of an H100 (torch 2.11) an eager op with its
    # gradient takes 17.7; on that of an H200 19.8, a fused chain 26.2 and 1.7 per op, by the line,
    # and two ops as long either way; where other things are in the caches of the host, as in
    # programs, both take more. In a checkpoint chains of 2 ops take 1.23 of eager's time there, of
    # 3 1.22, of 5 0.82
    "cuda": _GradCosts(op=7.0, gradient=2.0, kernel=7.5, flush=18.0, recorded=1.0, node=12.0,
                       given=10.0, hooks=25.0, saved=5.0),
    # on a CPU (AMD EPYC, torch 2.9) an eager op with its gradient takes as long as 5 plain ones, a
    # chain as 2 such ones; in a checkpoint it pays from 8 ops on, without from 4
    "cpu": _GradCosts(op=3.0, gradient=1.7, kernel=1.3, flush=7.0, recorded=0.9, node=10.0,
                      given=10.0, hooks=12.0, saved=2.5),
}  # fmt: skip
# what memory moves in 1 us; of a CPU, by what arithmetic on three tensors of float32 takes
_BYTES_PER_US = {"cuda": 4e6, "cpu": 12 * 1000 / ARITHMETIC_US}
# us that one processor of a GPU takes for an op on an element; how long others may do nothing
# meanwhile: about as long as one more flush takes
_ALONE_US, _IDLE_US = 37e-6, 10.0
# A chain that costs less as the ops it is runs as these (`ways.ShortRunner`), TRIES times. Then
# other nodes stand for its first and for all that would begin a chain after it (`make_eager`),
# whose ops are run at once (`dispatch.eager`) and not recorded any more, SKIPS times: longer chains
# may begin so by then (`skipped`). If none does, that is _GROWTH times as often from then on, up to
# _LONGEST times. Once one is fused, its first node is `long`: then it is told apart by instructions
# of the program whether what begins there pays (`starts`).
TRIES, SKIPS, _GROWTH, _LONGEST = 3, 100, 4, 16
# A verdict on an instruction stands until SKIPS ops were eager there or TRIES chains have lost, and
# _GROWTH times as long whenever it is the same again, up to so many times. Then it is asked until
# TRIES chains have lost there, or others have gained what so many lose, or so many have begun
_FIRMEST, _SURE, _MANY = 64, 4, 256
# A chain that has waited for its kernel a few times is not recorded at all for so many ops, or
# until any kernel has come: to run it as the ops it was recorded from takes 60 us more, in Python
WAITED = 24
_waiting: dict[Node, None] = {}  # what stands for such ops
# A loss of classes, whose ops torch computes, costs the host more by so many us (H100): where its
# rows have fewer bytes, what its gradient saves of memory is not worth that
_OUTSIDE_US, _CLASSES_BYTES = 60.0, 128 << 20
SHORT, LONE = "a short chain", "a chain of one op"  # which costs less as the ops it is
SHORT_UNDER_GRAD = SHORT + " under grad"
ASIDE = "a fused call that gains too little"  # and records nothing for now
_PATIENCE = 8  # flushes in a row that waited for kernels


def is_short(nodes: list[Node], results: Sequence[int], device_type: str) -> bool:
    """Whether the chain of `nodes` costs less as the ops it is; results: of which steps."""
    if config.always_fuse:
        return False
    return _gain(nodes, results, device_type, _OP_US[device_type]) <= 0


def are_alone(nodes: list[Node]) -> bool:
    """Whether these are reductions with nothing to fuse them with, of which torch's kernels are as
    fast: those that are one."""
    return not config.always_fuse and all(
        isinstance(node.op, Reduction) and node.op.costs == 1 and not node.op.of_classes
        for node in nodes
    )


def takes_classes(nbytes: int) -> bool:
    """Whether a loss of classes is recorded, of rows of so many bytes."""
    return config.always_fuse or nbytes >= _CLASSES_BYTES


def is_small_loss(node: Node) -> bool:
    """Whether `node` is a loss of classes that is better off eager."""
    if not (isinstance(node.op, Reduction) and node.op.of_classes):
        return False
    meta = node.path()[node.args[0]].meta
    return meta is not None and not takes_classes(meta.nbytes)


def is_narrow(node: Node, processors: int) -> bool:
    """Whether a row kernel that ends with `node` would compute so much for so few rows that another
    chain, which has all processors, had better begin with it.

    A row has one block, which computes what comes before a reduction for each of them again, and
    for what is stored.
    """
    assert node.rows is not None
    shape, row, each = node.rows.shape, node.rows.row, node.rows.interleaved
    rows, path = math.prod(shape) // math.prod(row), node.path()
    each = min(each, rows)
    rows = -(-rows // each)  # or blocks of interleaved ones
    if rows >= processors or node.rows.blocks > 1 or config.always_fuse:
        return False
    apart = node.rows.groups > 0  # what follows is in a kernel of its own
    if apart and not isinstance(node.op, Reduction):
        return False
    passes, ops = int(not apart), 0
    for known in path:
        assert known.op is not None and known.meta is not None
        if isinstance(known.op, Reduction):
            passes += len(known.op.reduces)
        elif known.meta.shape == shape:
            ops += FUNCTION if calls_functions(known.op, known.common) else 1
    here = _ALONE_US * math.prod(row) * each * ops * passes
    return here * (1 - rows / processors) > _IDLE_US


def gain_of(nodes: list[Node], results: Sequence[int]) -> float:
    """us by which the kernel of these costs less than their ops on plain tensors; under grad, where
    `pays` knows that it does, less than what it is."""
    device_type = nodes[0].recorder.device.type
    gain = _gain(nodes, results, device_type, _PLAIN_US[device_type])
    return max(gain, _OP_US[device_type]) if nodes[-1].holds_grad else gain


def _host(
    nodes: list[Node], results: Sequence[int], device_type: str, op_us: float
) -> tuple[float, float]:
    """us of the host for the ops of these on their own, and for their kernels."""
    ops, stored = ops_of(nodes), stored_of(nodes, results)
    fused = _RECORDED_US * ops + FLUSH_US[device_type]
    fused += _RESULT_US[device_type] * max(len(stored) - 1, 0)
    rows = nodes[-1].rows
    combines = rows is not None and (rows.blocks > 1 or rows.groups > 0)  # in a kernel of its own
    more = max(len(shapes_of(nodes, stored)) - 1, 0) + combines
    return op_us * ops, fused + _SHAPE_US[device_type] * more


def _gain(nodes: list[Node], results: Sequence[int], device_type: str, op_us: float) -> float:
    eager, fused = _host(nodes, results, device_type, op_us)
    if device_type == "cpu":
        return eager + us_saved(nodes) - fused
    every, once = traffic(nodes, results)
    return max(eager, us_moved(every, device_type)) - max(fused, us_moved(once, device_type))


def gain_at_start(runner: Runner) -> float:
    """us by which it costs less to have recorded the first op of a chain that `runner` runs.

    At most what the op costs, for what follows it may pay without it.
    """
    nodes, device_type = runner.nodes, runner.device.type
    first = nodes[0]
    if runner.short:
        return -SHORT_US[device_type]
    assert first.meta is not None
    if nodes[-1].holds_grad:
        costs = _GRAD_US[device_type]
        host = min(runner.margin, costs.op + costs.gradient - costs.recorded)
    else:
        eager, fused = _host(nodes, runner.made, device_type, _OP_US[device_type])
        saved = us_saved(nodes) if device_type == "cpu" else 0.0
        host = min(max(eager + saved - fused, 0.0), us_recorded(1, device_type))
    if device_type == "cpu":
        return host + us_saved([first])
    return host + us_moved(2 * first.meta.nbytes, device_type)


class Balance:
    """What chains gain that begin at one instruction: its sign decides whether they are recorded.

    It takes several, for one instruction may begin chains that pay and chains that do not, as the
    residual of all layers of a net does.
    """

    __slots__ = ("eager", "gain", "left", "lost", "times", "told")

    def __init__(self) -> None:
        self.eager: bool | None = None  # the last verdict
        self.times = 1  # how many times as long as a first one it stands
        self.left = 0  # until it is asked anew: ops that are eager, or chains that lose
        self.ask()

    def ask(self) -> None:
        """Ask anew: what was told before does not count."""
        self.gain, self.told, self.lost = 0.0, 0, 0  # us, chains, those of them that are short

    def tell(self, runner: Runner) -> bool:
        """Count a chain that `runner` runs; whether there is a verdict."""
        self.gain += gain_at_start(runner)
        self.told += 1
        self.lost += bool(runner.short)
        enough = _SURE * SHORT_US[runner.device.type]
        if self.eager is None and not self.lost:  # it is doubted soon
            enough = 0.0
        if self.lost < TRIES and self.told < _MANY and self.gain < enough:
            return False
        eager = self.gain < 0
        self.times = min(self.times * _GROWTH, _FIRMEST) if eager is self.eager else 1
        self.left = (SKIPS if eager else TRIES) * self.times
        self.eager = eager
        self.ask()
        return True


class Starts(dict[int, Node]):
    """What an op is recorded as at which instructions, or that it is eager there; `Node.starts`."""

    __slots__ = ("balances",)

    def __init__(self) -> None:
        self.balances: dict[int, Balance] = {}  # of these, and of those that are asked


def us_recorded(ops: int, device_type: str) -> float:
    """us by which so many recorded ops cost less than eager ones on wrapped tensors."""
    return (_OP_US[device_type] - _RECORDED_US) * ops


def us_moved(nbytes: int, device_type: str) -> float:
    """us that memory takes to move so many bytes."""
    return nbytes / _BYTES_PER_US[device_type]


def make_eager(nodes: list[Node], reason: str, ops: int = 0) -> None:
    """Let the ops of `nodes`, where a chain begins with one of them, run as eager PyTorch a while.

    Once the first does, what it gives is in memory, and with the next a chain would begin, which is
    shorter: each of them would be planned, for some ms, and tried by itself.

    ops: how many, wherever they stand, or until there is news of kernels; 0 for as many as it
    takes, and at some instructions alone.
    """
    first, root = nodes[0], nodes[0].parent
    assert root is not None
    if not ops and root.next.get(first.key) is first:  # which remembers how long it was before
        first.skips = min(first.skips * _GROWTH, SKIPS * _LONGEST) or SKIPS
    skips = SKIPS - (ops or max(first.skips, SKIPS))
    for node in nodes:
        if not is_run(node):
            continue
        key = key_alone(node, nodes)
        known = root.next.get(key)
        if known is None:
            root.recorder.size += 1
        elif known.returns is not None:
            known.skips = skips  # the first brings them all back
            continue
        elif known.shell is None:
            continue
        assert node.op is not None
        stand = eager_node(root.recorder, root, node.op, reason)
        if known is not None and known.long and not ops:
            stand.reason, stand.starts = "", Starts()
        stand.key, stand.returns, stand.skips = key, (root, key, known), skips
        if ops:
            _waiting[stand] = None
        root.next[key], root.recent = stand, None


def skipped(eager: Node) -> None:
    """Count that its op was not recorded, and end what `make_eager` has begun if that is time."""
    eager.skips += 1
    if eager.skips > SKIPS:
        _return(eager)


def _return(eager: Node) -> None:
    """Let what `eager` stands for be found again."""
    _waiting.pop(eager, None)
    returns, eager.returns = eager.returns, None
    if returns is None:
        return
    before, key, node = returns
    table: dict[Any, Node] = before.next if before.starts is None else before.starts
    if table.get(key) is eager:
        if node is None:
            table.pop(key, None)
        else:
            table[key] = node
    before.recent = None


def end_waits() -> None:
    """Record the chains again that wait for kernels: one has come, for whichever."""
    for eager in list(_waiting):  # in any thread: what races is speed
        _return(eager)


compiling.on_news.append(end_waits)


def rest(recorder: Recorder) -> None:
    """Where one flush after the other waits for kernels, record nothing until there is news.

    Recording and running the ops later costs up to twice what running them at once does.
    """
    following = recorder.launches == recorder.last_wait + 1
    recorder.waits = recorder.waits + 1 if following else 1
    recorder.last_wait = recorder.launches
    if recorder.waits < _PATIENCE:
        return
    before = compiling.news()
    if compiling.outstanding():
        recorder.resting, recorder.waits = True, 0
        if compiling.news() != before:  # `wake` may have come too early
            recorder.resting = False
        recorder.open()


def pays(nodes: list[Node], outline: Outline, first: int = 0) -> bool:
    """Whether fusing a chain under grad costs less than running its ops, forward and backward.

    first: where it were to begin, if the ops before were eager.
    """
    return margin(nodes, outline, first) > 0


def margin(nodes: list[Node], outline: Outline, first: int = 0) -> float:
    """By how many us: see `pays`.

    A GPU moves memory beside that, three tensors for an op, of which fusing saves two.
    """
    if config.always_fuse:
        return math.inf
    device_type = nodes[0].recorder.device.type
    costs = _GRAD_US[device_type]
    eager = costs.op * ops_of(nodes, first)
    fused = costs.flush + costs.recorded * len(nodes[first:])
    # under `create_graph` torch's ops run backward either way, ours by rules that Python applies
    swept = nodes[-1].swept >= MANY_SWEEPS
    if nodes[-1].told:
        fused += costs.hooks + costs.saved * sum(len(node.saves) for node in nodes[first:])
    traffic = 0.0
    for index, *_ in outline.reduced:  # the backward of which is eager's either way
        if index < first:
            continue
        rows = nodes[index].rows
        elements = math.prod(rows.shape if rows else ())
        fused += costs.given
        traffic += 2 * elements * nodes[index].meta.dtype.itemsize / _BYTES_PER_US["cuda"]  # type: ignore[union-attr]
    for segment in outline.segments:
        steps = [index for index in segment.steps if index >= first]
        fused += costs.node if steps else 0.0
        for index in steps:
            op = nodes[index].op
            assert op is not None
            if isinstance(op, Reduction) and op.of_classes:
                fused += _OUTSIDE_US
            elif isinstance(op, Reduction) and op.whole:
                fused += costs.given if any(use.part for use in segment.uses[index]) else 0.0
            kernels = 0
            for use in () if swept else segment.uses[index]:
                here = sum(isinstance(tree, _KERNELS) for tree in ast.walk(use.rule))
                here = 2 if index in segment.striped else here  # zeros, and a part of them
                here = 0 if op.name == "sum" else here  # a view of torch's
                kernels += here
                eager += costs.gradient + costs.kernel * here
            values = [index, *(use.ref for use in segment.uses[index])]
            moved = 3 * (1 + kernels) * max(segment.meta_of(ref).nbytes for ref in values)
            traffic += moved / _BYTES_PER_US["cuda"]
    if device_type == "cpu":
        return eager + us_saved(nodes[first:]) - fused
    return max(eager, traffic) - max(fused, traffic / 3)


def losing(nodes: list[Node], outline: Outline) -> int | None:
    """How many of a chain that does not pay to leave out, so that the rest does; None if none."""
    return next((k for k in range(1, len(nodes)) if pays(nodes, outline, k)), None)


_KERNELS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Compare)


def kernel_news() -> tuple[int, ...]:
    """Something else whenever this thread has waited for a kernel or any thread has got one, and
    whenever a result was on trial, for that takes its time too, or an op was not recorded of a size
    that may come often."""
    waits = [recorder.last_wait for recorder in list(this_thread.recorders.values())]
    return compiling.news(), counts.trials, counts.refused, *waits


def is_settled(before: tuple[int, ...]) -> bool:
    """Whether nothing has come of kernels since `kernel_news` gave `before`, nor is to come."""
    return not compiling.outstanding() and kernel_news() == before


def contest_for(device: torch.device, differentiated: bool) -> Contest:
    """Between fused calls on `device` and plain ones.

    differentiated: they leave a graph, so that what counts is a whole training step.
    """
    return Contest(clock_of(device), steps=differentiated, once=is_inexact(device, differentiated))


def is_inexact(device: torch.device, differentiated: bool) -> bool:
    """Whether what is fused may have other bits than what is not."""
    inputs = differentiated and config.recompute == "inputs"
    return device.type == "cpu" or config.relaxed or inputs


def measures() -> bool:
    """Whether fused calls may run as they are, and results stay plain, where that costs less."""
    return config.measure and not (config.always_fuse or config.check)


def aside(contest: Contest) -> str:
    """Why a call is not fused, with the figures that decided."""
    if contest.costs is None:
        return ASIDE
    fused, plain = contest.costs
    return f"{ASIDE}: {plain:.3g} us plain, {fused:.3g} fused"
