"""Autograd: the graph nodes that a flush leaves behind, and the kernel of each one's backward.

The forward kernel computes with grad off. Then every value that somebody can see gets an autograd
node of its own, in the order of recording. A Segment is what such a node differentiates through:
the dead ops between its root and the tensors that a graph of their own leads on from. Its backward
applies the derivative rules of the op table in the order in which eager's engine would, as one
kernel; under `create_graph` as differentiable torch ops.

What is saved is what eager would save: of the values the rules read, the visible ones and the
Inputs; a dead one is computed again where it follows from these, and otherwise stored by the
forward kernel. A stored one is a further output of its segment's node, so that second derivatives
flow through it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..chain import shell as _shell
from ..chain.shell import Meta, NoTorchFunction, Tensor, make_meta, plain_meta
from ..chain.trie import Node
from ..errors import ColdKernelError, NotReadyError, warn_once
from ..inside import is_foreign
from ..kernel.plan import CONST, Ref
from ..layout import is_dense
from ..ops.row import Op
from ..run.launch import Answer, Runner, compiled
from ..settings.config import config
from .rules import Expected, Tape, Torch, UnfusedError, sweep

if TYPE_CHECKING:
    from ..record.chain import Recorder


@dataclass(frozen=True, slots=True)
class Use:
    """A differentiable operand of a step: the rule for its gradient, and what the rule reads."""

    ref: Ref
    rule: ast.expr
    reads: frozenset[Ref]


def _uses(node: Node, meta_of: Callable[[Ref], Meta]) -> Iterator[Use]:
    """The operands of `node` that get a gradient, in order."""
    assert node.op is not None
    for ref, rule in zip(node.args, node.op.rules, strict=True):
        if ref < CONST and rule is not None and meta_of(ref).requires_grad:
            named = node.named()
            yield Use(ref, rule, frozenset(named[n] for n in _names(rule) if n in named))


@cache
def _names(rule: ast.expr) -> frozenset[str]:
    """The names that a rule reads; a called row is none."""
    called = {id(tree.func) for tree in ast.walk(rule) if isinstance(tree, ast.Call)}
    return frozenset(
        tree.id for tree in ast.walk(rule) if isinstance(tree, ast.Name) and id(tree) not in called
    )


# --- what a flush has to leave behind: pure, from the program and its live-outs ------------------


@dataclass(slots=True, eq=False)
class Graph:
    """The segments of a flush, in order, and the dead values that its kernel stores for them."""

    segments: list[Segment]
    stored: tuple[int, ...]
    saved_bytes: int

    def prepare(self) -> None:
        """Ask for the kernels of the backward that is to be expected."""
        for segment in self.segments:
            segment.prepare()


def graph_of(
    recorder: Recorder, nodes: list[Node], inputs: tuple[Meta, ...], live: tuple[int, ...]
) -> Graph | None:
    """The autograd side of a flush; None if the engine would add gradients in another order."""

    def meta_of(ref: Ref) -> Meta:
        meta = nodes[ref].meta if ref >= 0 else inputs[~ref]
        assert meta is not None
        return meta

    uses = [list(_uses(node, meta_of)) if meta_of(node.index).requires_grad else []
            for node in nodes]  # fmt: skip
    owner = _owners(uses, meta_of, [index for index in live if meta_of(index).requires_grad])
    roots = sorted(index for index, root in owner.items() if index == root)
    if not _in_order(uses, owner, roots):
        return None
    memory = {*live, *roots}
    saved_refs: set[Ref] = set()
    segments = []
    for root in roots:
        steps = [index for index in sorted(owner) if owner[index] == root]
        saved = _saved(nodes, uses, steps, memory)
        detours = config.recompute == "inputs" and bool(memory & _path(nodes, uses, steps))
        extras = [ref for ref in saved if ref >= 0 and ref not in memory]
        memory.update(extras)
        saved_refs.update(saved)
        segments.append(Segment(recorder, nodes, uses, steps, meta_of, saved, extras, detours))
    stored = tuple(sorted(memory - set(live)))
    return Graph(segments, stored, sum(meta_of(ref).nbytes for ref in saved_refs))


def _owners(
    uses: list[list[Use]], meta_of: Callable[[Ref], Meta], live: list[int]
) -> dict[int, int]:
    """The root of the segment that each differentiated step belongs to.

    Beside the live values, a dead one is a root if two segments meet in it or if it is broadcast:
    its gradient is complete only after both, or after a reduction.
    """
    owner = {index: index for index in live}
    for index in range(len(uses) - 1, -1, -1):
        if index in owner:
            for use in uses[index]:
                ref = use.ref
                if ref >= 0 and owner.get(ref) != ref:
                    alone = owner.setdefault(ref, owner[index]) == owner[index]
                    if not alone or meta_of(ref).shape != meta_of(index).shape:
                        owner[ref] = ref
    return owner


def _in_order(uses: list[list[Use]], owner: dict[int, int], roots: list[int]) -> bool:
    """Whether node after node adds to every gradient in the order in which op after op does."""
    by_op = sorted(owner, reverse=True)
    by_node = sorted(owner, key=lambda index: (owner[index], index), reverse=True)
    orders = []
    for sequence in (by_op, by_node):
        added: dict[Ref, list[int]] = {}
        for index in sequence:
            for use in uses[index]:
                if use.ref < 0 or use.ref in roots:
                    added.setdefault(use.ref, []).append(index)
        orders.append(added)
    return orders[0] == orders[1]


def _saved(
    nodes: list[Node], uses: list[list[Use]], steps: list[int], memory: set[int]
) -> list[Ref]:
    """The values that the backward of `steps` is given; the others it needs follow from them."""
    reads = {ref for index in steps for use in uses[index] for ref in use.reads if ref < CONST}
    kept = {ref for index in steps for ref in _kept(nodes[index]) if ref < 0 or ref in memory}
    if config.recompute == "inputs":
        computed = (_sources(nodes, ref, set()) for ref in reads if ref >= 0)
        return sorted({ref for ref in reads if ref < 0}.union(*computed))
    saved = {ref for ref in reads if ref < 0 or ref in memory}
    for ref in sorted(reads - saved):
        if not _sources(nodes, ref, memory | saved) <= saved:
            saved.add(ref)
    return sorted(saved | kept)


def _kept(node: Node) -> list[Ref]:
    """What eager's node saves whether a rule reads it or not: tensors, and numbers as tensors."""
    assert node.op is not None
    named = node.named()
    return [named[name] for name in node.op.keeps.split()]


def _path(nodes: list[Node], uses: list[list[Use]], steps: list[int]) -> set[Ref]:
    """The values outside `steps` that its rules read, and those before them."""
    path: set[Ref] = set()
    stack = [ref for index in steps for use in uses[index] for ref in use.reads]
    while stack:
        ref = stack.pop()
        if 0 <= ref < CONST and ref not in path:
            path.add(ref)
            stack.extend(nodes[ref].args)
    return path - set(steps)


def _sources(nodes: list[Node], ref: Ref, given: set[Ref]) -> set[Ref]:
    """The Inputs and the values of `given` from which the value `ref` is computed."""
    sources, seen, stack = set(), {ref}, [ref]
    while stack:
        for operand in nodes[stack.pop()].args:
            if operand < 0 or operand in given:
                sources.add(operand)
            elif operand < CONST and operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return sources


def pays(nodes: list[Node], graph: Graph) -> bool:
    """Whether fusing a chain under grad costs less than running its ops, forward and backward.

    In us on one NVIDIA H200 machine (bench/training.py, chains of 3 to 10): the host needs 7 for
    an op, 3.5 for its node's every gradient and 7.5 for a kernel of its backward, against 25 for a
    flush, 2.6 for a recorded op and 50 for a Python node in the engine's thread, forward and
    backward; the device moves 4 MB in 1, three tensors for an op, of which fusing saves two.
    """
    eager = 7.0 * len(nodes)
    fused = 25.0 + 2.6 * len(nodes)
    traffic = 0.0
    for segment in graph.segments:
        fused += 50.0
        for index in segment.steps:
            kernels = 0
            for use in segment.uses[index]:
                here = sum(isinstance(tree, _KERNELS) for tree in ast.walk(use.rule))
                kernels += here
                eager += 3.5 + 7.5 * here
            traffic += 3 * (1 + kernels) * segment.meta_of(index).nbytes / 4e6
    return max(fused, traffic / 3) < max(eager, traffic)


_KERNELS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Compare)


# --- one autograd node ---------------------------------------------------------------------------

# set by `check`: told what a kernel has made of the gradients that came in, the saved tensors and
# the Consts, before the engine takes it
observer: Callable[[Segment, Sequence[Any], Sequence[torch.Tensor], list[Any],
                    Sequence[Any]], None] | None = None  # fmt: skip


class Segment:
    """What one autograd node differentiates through; the same for every run of a program."""

    def __init__(
        self,
        recorder: Recorder,
        nodes: list[Node],
        uses: list[list[Use]],
        steps: list[int],
        meta_of: Callable[[Ref], Meta],
        saved: list[Ref],
        extras: list[int],
        detours: bool,
    ) -> None:
        self.detours = detours  # second derivatives would go past a live value's own node
        self.recorder, self.nodes, self.uses, self.meta_of = recorder, nodes, uses, meta_of
        self.steps = steps  # node indices, ascending; the last is the root
        self.root = steps[-1]
        self.pack = _pack([index for index in extras if meta_of(index).requires_grad], meta_of)
        packed = self.pack[1:]
        self.saved = [ref for ref in saved if ref not in packed]
        graphs = [i for i in extras if meta_of(i).requires_grad and i not in packed]
        self.outs = [self.root, *graphs]  # the node's outputs, a pack by its first
        self.inside = set(steps[:-1])
        outside = [
            (use.ref, meta_of(use.ref).shape == meta_of(index).shape)
            for index in reversed(steps) for use in uses[index] if use.ref not in self.inside
        ]  # fmt: skip
        # What gets a gradient, in the order of adding: one slot per use, so that the engine adds
        # them between those of uses elsewhere; to save memory, one per tensor.
        reduced = {ref for ref, same in outside if not same}
        self.summed: list[Ref] = []
        if config.recompute == "inputs":
            self.summed = list(dict.fromkeys(ref for ref, _ in outside if ref not in reduced))
        self.slots = [ref for ref, _ in outside if ref not in self.summed] + self.summed
        self.frees = bool(saved) or any(
            ref >= CONST
            for index in steps
            for ref in (*_kept(nodes[index]), *_numbers_read(nodes[index], uses[index]))
        )
        op = nodes[self.root].op
        assert op is not None
        self.apply = _function(_torch_name(op))
        self.answers: dict[tuple[Meta | None, ...], Answer | Expected | None] = {}
        self.direct: dict[tuple[int, ...], Answer] = {}  # by strides of the root's gradient

    def backward(
        self, grads: Sequence[Any], saved: Sequence[torch.Tensor], consts: list[Any]
    ) -> tuple[Any, ...]:
        """None, then the gradients for `slots`: from those of `outs` and the values of `saved`."""
        grads = [_concrete(g) if g.__class__ is Tensor else g for g in grads]
        incoming = [g for g in grads if g is not None]
        if not incoming:
            return (None,) * (1 + len(self.slots))
        answer = None
        if torch.is_grad_enabled():
            if self.detours:
                raise RuntimeError(
                    "create_graph=True needs values between the Inputs and a live tensor of the "
                    "chain, which autofuse.config.recompute = 'inputs' does not keep; set it to "
                    "'free' before the forward pass"
                )
        elif not torch._C._are_functorch_transforms_active():
            with NoTorchFunction():
                key = tuple([plain_meta(g) if g.__class__ in _READ else None for g in grads])
            if len(grads) - key.count(None) == len(incoming):  # no sparse one, no other class
                answer = self._answer(key, grads)
        if answer is not None:
            try:
                result = answer(incoming, saved, consts)
            except NotReadyError:
                pass
            except ColdKernelError:
                raise
            except Exception as error:  # a real one, such as no memory, comes again below
                if is_foreign(error):
                    raise
                warn_once(f"autofuse: a backward runs as torch ops, its kernel failed: {error!r}")
            else:
                if observer is not None:
                    observer(self, grads, saved, consts, result[1:])
                return result
        with NoTorchFunction():
            return (None, *self.by_torch(Torch(consts), grads, saved))

    def by_torch(
        self, algebra: Torch, grads: Sequence[Any], saved: Sequence[torch.Tensor]
    ) -> list[Any]:
        """The gradients for `slots`, as `backward` gives them, by torch's ops."""
        values = dict(zip(self.saved, saved, strict=True))
        seeds = dict(zip(self.outs, grads, strict=True))
        if self.pack:
            values |= zip(self.pack, torch.unbind(values[self.pack[0]]), strict=True)
            more = seeds[self.pack[0]]
            parts = [None] * len(self.pack) if more is None else torch.unbind(more)
            seeds |= zip(self.pack, parts, strict=True)
        return sweep(self, algebra, seeds, values)

    def prepare(self) -> None:
        """Ask for the kernel for a gradient of the root alone, laid out as its value is."""
        meta = self.meta_of(self.root)
        gradient = make_meta(meta.dtype, meta.shape, meta.stride, meta.device)
        rest = [None] * (len(self.outs) - 1)
        self._answer((gradient, *rest), [gradient, *rest])

    def _answer(self, key: tuple[Meta | None, ...], grads: Sequence[Any]) -> Answer | None:
        """The kernel for incoming gradients of these Metas; None if torch's ops have to do it."""
        try:
            if key not in self.answers:
                self.answers[key] = self._build(key, grads)
            answer = self.answers[key]
            if not isinstance(answer, Expected):
                return answer
            arrived = answer.ready()
        except ColdKernelError:
            raise
        except Exception as error:
            if is_foreign(error):
                raise
            warn_once(f"autofuse: a backward runs as torch ops, its kernel failed: {error!r}")
            self.answers[key] = None
            return None
        if arrived is not None:
            self.answers[key] = arrived
        return arrived

    def _build(self, key: tuple[Meta | None, ...], grads: Sequence[Any]) -> Expected | None:
        """What a backward kernel has to compute; None if torch has to do it."""
        metas = [meta for meta in key if meta is not None]
        if len(metas) != sum(g is not None for g in grads):
            return None  # a gradient that autofuse cannot read, such as a sparse one
        if self.pack and grads[self.outs.index(self.pack[0])] is not None:
            return None  # second derivatives through a pack
        position = iter(range(len(metas)))
        seeds = {
            index: None if meta is None else ~next(position)
            for index, meta in zip(self.outs, key, strict=True)
        }
        places = [(k, 0) for k in range(len(metas))]
        values: dict[Ref, Ref] = {}
        for k, ref in enumerate(self.saved, len(metas)):
            inner = self.pack if self.pack and ref == self.pack[0] else [ref]
            for n, one in enumerate(inner):
                values[one] = ~len(places)
                places.append((k, n * self.meta_of(one).nbytes))
                metas.append(self.meta_of(one))
        tape = Tape(self.recorder, metas, self.nodes[0].relaxed)
        try:
            return Expected(tape, sweep(self, tape, seeds, values), places)
        except UnfusedError:
            return None


def _pack(indices: list[int], meta_of: Callable[[Ref], Meta]) -> list[int]:
    """`indices` if their values can lie in one tensor, which makes one output of a node of them.

    A further output costs 3 us: its allocation, its autograd state, its saved variable.
    """
    metas = {id(meta_of(index)) for index in indices}
    if len(indices) < 2 or len(metas) != 1:
        return []
    meta = meta_of(indices[0])
    whole = meta.nbytes and meta.nbytes % 16 == 0 and is_dense(tuple(meta.shape), meta.stride)
    return indices if whole else []


_READ = (torch.Tensor, torch.nn.Parameter, Tensor)  # gradients whose memory is theirs


def _concrete(g: Tensor) -> torch.Tensor:
    """A gradient that a hook has left pending, computed; C++ holds it, so that it cannot become."""
    return _shell._leave_pending(g)


def _numbers_read(node: Node, uses: list[Use]) -> list[Ref]:
    """The Python numbers that rules read and eager has made operands, which it saves as tensors."""
    op = node.op
    assert op is not None
    operands = [
        ref for ref, role in zip(node.args, op.roles, strict=True)
        if role == "promote" and not op.scalars_apart
    ]  # fmt: skip
    return [ref for use in uses for ref in use.reads if ref >= CONST and ref in operands]


class _Fused(torch.autograd.Function):
    """The autograd node of a segment; `_function` makes one class per op name."""

    @staticmethod
    def forward(ctx: Any, holder: Any, *slots: torch.Tensor) -> Any:
        outs, ctx.to_save, ctx.work = holder  # as save_for_backward does
        ctx.materialize_grads = False
        return outs


def _apply_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    segment, consts = ctx.work
    saved = ctx.saved_tensors if segment.frees else ()  # raises if they are freed or were written
    g = grads[0]
    if (
        g.__class__ is torch.Tensor
        and not torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
    ):
        # --- hot path: the gradient of the root alone, of a layout that was seen before ---
        if len(grads) == 1 or all(more is None for more in grads[1:]):
            answer = segment.direct.get(g.stride()) if g.layout is torch.strided else None
            if answer is not None and observer is None and not (g.is_neg() or g._is_zerotensor()):
                try:
                    return answer((g,), saved, consts)
                except NotReadyError:
                    pass
                except ColdKernelError:
                    raise
                except Exception as error:
                    if is_foreign(error):
                        raise
                    del segment.direct[g.stride()]
                    warn_once(f"autofuse: the kernel of a backward failed: {error!r}")
            result = segment.backward(grads, saved, consts)
            answer = segment.answers.get((plain_meta(g), *[None] * (len(grads) - 1)))
            if answer is not None and not isinstance(answer, Expected):
                segment.direct[g.stride()] = answer
            return result
    return segment.backward(grads, saved, consts)


def _torch_name(op: Op) -> str:
    """The torch function that an op stands for, as eager's node is named after it."""
    name = getattr(getattr(op.eager, "func", op.eager), "__name__", op.name)
    name = op.name.removesuffix("_scaled") if name == "<lambda>" else name
    return {"square": "pow", "to": "to_copy"}.get(name, name)


@cache
def _function(name: str) -> Callable[..., Any]:
    """`apply` of the Function whose nodes are called after the torch function `name`."""
    title = "".join(part.capitalize() for part in name.split("_"))
    cls = type(title, (_Fused,), {})
    node = cls._backward_cls  # type: ignore[attr-defined]
    node.__name__ = node.__qualname__ = f"{title}Backward0"
    node.apply = _apply_backward  # past the Python layers of Function: 3 us less per backward
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)


# --- the runner of a chain under grad ------------------------------------------------------------


def numbered(index: int) -> str:
    """The statement that gives the node of `v<index>` the number that its op has used up."""
    return f"v{index}.grad_fn._set_sequence_nr(late + {index})"


def graded(runner: Runner, graph: Graph, live: tuple[int, ...]) -> Runner:
    """`runner`, which computes `live` and what `graph` stores, made to leave `graph` behind."""
    runner.visible = [owner for owner in runner.owners if owner.index in live]
    runner.packs = tuple(tuple(segment.pack) for segment in graph.segments if segment.pack)
    runner.attach = _attaching(graph.segments, runner.made())
    runner.saved_bytes = graph.saved_bytes
    return runner


def _attaching(segments: list[Segment], computed: list[int]) -> Callable[..., None]:
    """A function that makes the graph; of a chain's Inputs, Consts and `late`, and the values."""

    def listed(refs: list[Ref]) -> str:
        return "".join(f"inputs[{~ref}], " if ref < 0 else f"v{ref}, " for ref in refs)

    space: dict[str, Any] = {"get": torch.is_grad_enabled, "set_": torch._C._set_grad_enabled}
    calls = []
    for k, segment in enumerate(segments):
        space[f"segment{k}"], space[f"apply{k}"] = segment, segment.apply
        outs = f"({listed(segment.outs)})" if len(segment.outs) > 1 else f"v{segment.root}"
        work = f"(segment{k}, consts)"
        if not segment.nodes[-1].consts:  # one object less for the garbage collector to visit
            work, space[f"work{k}"] = f"work{k}", (segment, ())
        holder = f"({outs}, ({listed(segment.saved)}), {work})"
        calls.append(f"apply{k}({holder}, {listed(segment.slots)})")
    params = ", ".join(f"v{index}" for index in computed)
    body = "".join(f"        {call}\n" for call in calls)
    places = "".join(f"        {numbered(segment.root)}\n" for segment in segments)
    source = (
        f"def attach(inputs, consts, late, {params}):\n"
        f"    was = get()\n    try:\n        set_(True)\n{body}    finally:\n        set_(was)\n"
        f"    if late is not None:\n{places}"
    )
    exec(compiled(source), space)
    return space["attach"]
