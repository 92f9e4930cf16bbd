"""The trie of recorded ops: recording walks it, and a node of it is a whole program.

Every thread and device has its own trie. An edge is (op, operands): a pending operand as its
index, a known Input as ~k, a new Input as its Meta, a Python scalar as its class. Sizes are part of
a Meta, so a node knows every shape, stride and dtype exactly and a flush has nothing left to
compute; sizes and scalar values are not part of a kernel, so that a new size costs a few new nodes
and no compile.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .. import layout
from ..dtypes import CODES, Wide
from ..kernel.plan import CONST, Program, Ref, Step
from ..kernel.source import carried
from ..kernel.text import parse
from ..ops.row import Op
from ..settings.config import config
from .shell import Meta, Tensor, make_meta

if TYPE_CHECKING:
    from ..record.chain import Recorder


class Node:
    """One recorded op at one place of one program. Also the state of the shells it hands out."""

    __slots__ = ("args", "common", "consts", "counted", "fresh_bytes", "graded",
                 "holds_grad", "index", "inputs", "key", "likely", "limits", "long", "meta",
                 "next", "op", "parent", "pinned_limit", "reason", "recent", "recorder",
                 "relaxed", "returns", "runners", "shell", "skips")  # fmt: skip

    def __init__(
        self, recorder: Recorder, parent: Node | None, op: Op | None, graded: bool = False
    ) -> None:
        self.recorder, self.parent, self.op = recorder, parent, op
        self.graded: bool = graded if parent is None else parent.graded  # recorded in grad mode
        self.relaxed: bool = config.relaxed if parent is None else parent.relaxed
        self.index: int = -1 if parent is None else parent.index + 1
        self.args: tuple[Ref, ...] = ()
        self.common = ""
        self.meta: Meta | None = None
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
        self.runners: dict[tuple[int, ...], Any] = {}  # by reference counts, then by live-outs
        self.returns: tuple[Any, ...] | None = None  # of `make_eager`: what it stands for
        self.skips = 0  # how often that was not recorded
        self.long = False  # a chain that begins here has paid as a fused one
        self.reason = ""  # why this op is eager here, if it is
        self.counted = ("", "")  # what is counted then

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

    def program(self) -> Program:
        """The program that ends here."""
        steps = []
        for node in self.path():
            assert node.op is not None and node.meta is not None
            steps.append(Step(node.op, node.args, node.common, node.meta.view))
        return Program(
            tuple(steps), tuple(meta.view for meta in self.inputs), self.consts, self.relaxed
        )


def needed_by(nodes: Sequence[Node], live: Iterable[int]) -> set[int]:
    """Indices of the nodes of a program that its values `live` follow from, and theirs."""
    needed = set(live)
    for node in reversed(nodes):
        if node.index in needed:
            needed.update(node.args)
    return needed


def make_eager(node: Node, reason: str) -> None:
    """Let the op of `node`, where a chain begins with it, run as eager PyTorch for a while."""
    tip = node.parent
    assert tip is not None and node.op is not None
    for key, known in tip.next.items():
        if known is node:
            tip.next[key] = eager = eager_node(node.recorder, tip, node.op, reason)
            eager.meta, eager.key = node.meta, key  # what the result is going to be
            tip.recent = None
            eager.returns = (tip, key, node)
            return


def record_again(eager: Node) -> None:
    """End what `make_eager` has begun: longer chains may begin here by now."""
    assert eager.returns is not None
    tip, key, node = eager.returns
    tip.next[key], tip.recent = node, None


def eager_node(recorder: Recorder, tip: Node, op: Op, reason: str) -> Node:
    """A node that says: run this op as eager PyTorch."""
    node = Node(recorder, None, op)
    node.index = tip.index
    node.reason, node.counted = reason, (op.name, reason)
    return node


# what torch's loops do faster than ones that call libm (bench/cpu.py): ops, and functions of
# their expressions, by the type they compute in; a chain of small tensors is dispatch in the main
_SLOW = {
    "f32": frozenset("lgamma digamma erfinv fmod".split()),
    "f64": frozenset(
        "expm1 log10 log1p sinh cosh tanh atanh sin cos tan asin acos atan atan2 erf erfc pow "
        "lgamma digamma erfinv".split()
    ),
}
_LARGE = 1 << 16  # elements


@cache
def _is_slow(op: Op, common: str) -> bool:
    statements = parse(op.expression(common, "cpu"))
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return not _SLOW.get(carried(common), frozenset()).isdisjoint({op.name, *names})


def _stride(
    op: Op, device: torch.device, common: torch.dtype, shape: layout.Ints, views: list[Meta | type]
) -> layout.Ints:
    """The strides that eager gives to the result of `op`; views: as in `extend`."""
    tensors = [view for view in views if isinstance(view, Meta)]
    first = tensors[0]
    if first.flat and 0 not in shape and all(meta.shape == shape and meta.flat for meta in tensors):
        return first.stride
    if device.type in op.contiguous:
        return layout.contiguous(shape)
    if op.carries(common) and first.shape == shape:
        return layout.copied_stride(shape, first.stride)
    if op.strides is not None and not op.carries(common):
        return op.strides(first.shape, first.stride)
    # torch copies an operand that is promoted: on the CPU, and where its kernel does not promote
    apart = op.scalars_apart and len(tensors) == 1
    copies = device.type == "cpu" or apart or op.selects
    strides: list[tuple[layout.Ints, layout.Ints]] = []
    for view, role in zip(views, op.roles, strict=True):
        if not isinstance(view, Meta):
            if role == "promote" and not op.scalars_apart:
                strides.append(((), ()))
        elif copies and role == "promote" and view.dtype is not common:
            strides.append((view.shape, layout.copied_stride(view.shape, view.stride)))
        else:
            strides.append((view.shape, view.stride))
    return layout.result_stride(shape, strides[::-1] if op.reversed else strides)


def extend(
    recorder: Recorder, tip: Node, op: Op, operands: Sequence[int | Meta | type], metas: list[Meta]
) -> Node:
    """The node for `op` after `tip`; not yet an edge of it.

    operands: as in an edge. metas: the Metas of the program's pending values, by index.
    """
    args: list[Ref] = []
    inputs, consts = list(tip.inputs), list(tip.consts)
    views: list[Meta | type] = []
    for operand in operands:
        if isinstance(operand, int):
            args.append(operand)
            views.append(metas[operand] if operand >= 0 else inputs[~operand])
        elif isinstance(operand, Meta):
            args.append(~len(inputs))
            inputs.append(operand)
            views.append(operand)
        else:
            args.append(CONST + len(consts))
            consts.append(int if operand is Wide else operand)
            views.append(operand)
    tensors = [view for view in views if isinstance(view, Meta)]
    device = recorder.device
    if any(meta.device is not device for meta in tensors):
        return eager_node(recorder, tip, op, "operands on several devices")
    shape = layout.broadcast([meta.shape for meta in tensors])
    if shape is None:
        return eager_node(recorder, tip, op, "shapes that do not broadcast")
    dtypes = tuple(
        (view.dtype, view.ndim) if isinstance(view, Meta) else (view, 0) for view in views
    )
    resolved = op.resolve(dtypes)
    if resolved is None:
        return eager_node(recorder, tip, op, "dtypes that are not fused")
    common, result = resolved
    if Wide in views and CODES[common] in ("f32", "f16", "bf16"):
        return eager_node(recorder, tip, op, "an int that float64 would round first")
    if device.type == "cpu" and CODES[common] in ("f16", "bf16"):
        if any(meta.ndim == 0 and meta.dtype is not common for meta in tensors):
            return eager_node(recorder, tip, op, "a wider 0-d tensor, which the CPU does not round")
    if not (op.identical or tip.relaxed):
        return eager_node(recorder, tip, op, "other bits than eager's; config.relaxed fuses it")
    if device.type == "cpu" and op.divides(CODES[common]):
        return eager_node(recorder, tip, op, "integer division, which raises on the CPU")
    if device.type == "cpu" and math.prod(shape) >= _LARGE and _is_slow(op, CODES[common]):
        return eager_node(recorder, tip, op, "a large tensor on the CPU, where eager is faster")
    stride = _stride(op, device, common, shape, views)
    graph = tip.graded and result.is_floating_point and any(meta.requires_grad for meta in tensors)
    if graph and not op.grad:
        return eager_node(recorder, tip, op, "no derivative rule")
    if graph and any(meta.inference for meta in tensors):
        return eager_node(recorder, tip, op, "an inference tensor, which autograd cannot save")
    node = Node(recorder, tip, op)
    node.args, node.common = tuple(args), CODES[common]
    node.meta = make_meta(result, shape, stride, device, graph)
    node.inputs, node.consts = tuple(inputs), tuple(consts)
    fresh = node.inputs[len(tip.inputs) :]
    node.fresh_bytes = sum(meta.nbytes for meta in fresh)
    largest = max((meta.nbytes for meta in inputs), default=0)
    node.pinned_limit = max(config.pinned_bytes, 2 * largest)
    if op.fits and common is not torch.bool:
        info = torch.finfo(common) if common.is_floating_point else torch.iinfo(common)
        node.limits = (max(info.min, -info.max), info.max)  # `sub` negates its alpha
    node.holds_grad |= graph
    return node
