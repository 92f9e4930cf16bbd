"""Backward: the autograd nodes that a flush leaves behind, and the kernel of each one's backward.

The forward kernel computes with grad off; then each Segment gets one. Its backward applies the
derivative rules of the op table in the order in which eager's engine would, as one kernel; under
`create_graph` as differentiable torch ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from .. import hooks
from ..chain.meta import Meta, guard_of, make_meta, plain_meta
from ..chain.shell import Tensor
from ..chain.state import Node, Recorder
from ..errors import ColdKernelError, NotReadyError, warn_once
from ..inside import is_foreign
from ..layout import contiguous
from ..ops.autocast import casts_in, is_half
from ..ops.reductions import Reduction
from ..ops.row import since
from ..program.program import CONST, Ref
from ..run.eager import HOLDING
from ..run.generated import defined, numbered, operand_of, tuple_of
from ..run.runner import Runner
from ..run.views import Calls, number_of_view
from ..run.words import Answer
from ..torch_private import (
    NoModes,
    above_autograd,
    apply_of,
    autocast_is_on,
    detach,
    dispatch_modes,
    in_functorch,
    is_batched,
    keys_of,
    permute,
    pop_hooks,
    push_hooks,
    set_grad_enabled,
    top_hooks,
)
from .nodes import node_name, noder
from .rules import Expected, sweep, written
from .segments import Outline, Segment
from .tape import Tape, UnfusedError
from .telling import bares, telling

Laid = tuple[tuple[int, Meta] | None, ...]  # how tensors lie: dispatch keys and Meta of each
_Key = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # of a gradient: dtype, shape, stride
Layout = tuple[Answer, Laid, Laid]  # for gradients of the outs and saved tensors that lie so


class Backward:
    """The backward of one autograd node; the same for every run of a program."""

    __slots__ = ("answers", "apply", "frees", "guard", "is_cast", "layouts", "recorder", "saved",
                 "segment", "straight", "tip", "told", "usual")  # fmt: skip

    def __init__(self, recorder: Recorder, segment: Segment, tip: Node) -> None:
        """tip: where the chain ends."""
        self.recorder, self.segment, self.tip = recorder, segment, tip
        self.frees, self.told = segment.frees, segment.told
        root = segment.nodes[segment.root]
        assert root.op is not None
        self.apply = _function(node_name(root.op, any(ref >= CONST for ref in root.args)))
        # under autocast torch's ops do it, with the casts of eager's derivatives
        self.is_cast = any(
            casts_in(
                use.rule,
                recorder.device.type,
                [segment.meta_of(ref).dtype for ref in (use.ref, *use.reads) if ref < CONST],
            )
            or ((use.ref, index) in segment.spread and is_half(segment.meta_of(index).dtype))
            for index in segment.steps
            for use in segment.uses[index]
        )
        self.answers: dict[tuple[Meta | None, ...], Answer | Expected | None] = {}
        self.layouts: dict[tuple[_Key | None, ...], Layout] = {}
        self.usual: tuple[Layout, ...] = ()  # the last ones, which machine code knows
        self.straight: dict[tuple[bool, ...], Callable[..., Any]] = {}  # see `written`
        # of what is saved the Metas, and how many values of such lie in it; a guard of all, where
        # hooks are told of it
        self.saved = [
            (segment.meta_of(ref), len(segment.pack) if ref in segment.pack else 1)
            for ref in segment.saved
        ]
        self.guard: Callable[..., bool] | None = None

    def gradients(
        self, grads: Sequence[Any], saved: Sequence[torch.Tensor], consts: list[Any]
    ) -> tuple[Any, ...]:
        """None, then the gradients for `sinks`: from those of `outs` and the values of `saved`."""
        # a hook may have left one pending; C++ holds it, so that it cannot become
        grads = [hooks.value_of(g) if g.__class__ is Tensor else g for g in grads]
        incoming = tuple([g for g in grads if g is not None])
        if not incoming:
            return (None,) * (1 + len(self.segment.sinks))
        answer = expected = None
        if torch.is_grad_enabled():
            if self.segment.detours:
                raise RuntimeError(
                    "create_graph=True needs values between the Inputs and a live tensor of the "
                    "chain, which autofuse.config.recompute = 'inputs' does not keep; set it to "
                    "'free' before the forward pass"
                )
            self.tip.swept += 1
            if self.tip.swept == MANY_SWEEPS:  # from now on these count for whether it pays
                self.tip.forget_runners()
        elif self.may_launch(saved):
            with NoModes():
                key = tuple([
                    plain_meta(g) if id(g.__class__) in _READ and not is_batched(g) else None
                    for g in grads
                ])  # fmt: skip
                if len(grads) - key.count(None) == len(incoming):  # no sparse one, no other class
                    answer = self._answer(key)
                    expected = self.answers[key]
        if answer is not None:
            try:
                with NoModes():
                    result = answer(incoming, saved, consts)
            except NotReadyError:
                pass
            except Exception as error:  # a real one, such as no memory, comes again below
                if isinstance(error, ColdKernelError) or is_foreign(error):
                    raise
                warn_once(f"autofuse: a backward runs as torch ops, its kernel failed: {error!r}")
            else:
                if hooks.differentiated is not None:
                    hooks.differentiated(self, grads, saved, consts, result[1:])
                return result
        with NoModes():
            key = (autocast_is_on(), *[g is None for g in grads])
            straight = self.straight.get(key)
            if straight is None:
                straight = self.straight[key] = written(self.segment, key)
            result = straight(grads, saved, consts)
            if isinstance(expected, Expected):
                expected.compare(straight, grads, saved, consts)
            return result

    def may_launch(self, saved: Sequence[torch.Tensor]) -> bool:
        """Whether nobody is told of its ops or casts for them in this moment, and hooks have given
        back what a kernel can read."""
        if in_functorch() or dispatch_modes():
            return False
        if self.is_cast and torch.is_autocast_enabled(self.recorder.device.type):
            return False
        return self.is_laid_out(saved)

    def is_laid_out(self, saved: Sequence[torch.Tensor]) -> bool:
        """Whether hooks give tensors back as they got them, but for the values."""
        if not saved or (self.guard is not None and self.guard(*saved)):
            return True
        for (want, values), x in zip(self.saved, saved, strict=True):
            fits = x.__class__ is torch.Tensor if self.told else id(x.__class__) in _READ
            meta = plain_meta(x) if fits else None
            if meta is None or meta.dtype is not want.dtype or meta.device is not want.device:
                return False
            if values > 1 and not (meta.flat and meta.nbytes == values * want.nbytes):
                return False
            if values == 1 and not _lies_as(meta, want):
                return False
        if self.told:
            self.guard = guard_of(saved)
        return True

    def expect(self, layout: Layout) -> None:
        """Let machine code look for `layout` first, and for a few others after it."""
        others = [other for other in self.usual if other is not layout]
        self.usual = (layout, *others[: FEW_LAYOUTS - 1])

    def prepare(self) -> None:
        """Ask for the kernel for a gradient of the root alone, laid out as its value is.

        And for those of parts, which other kernels compute.
        """
        expected: list[Meta | None] = [None] * len(self.segment.outs)
        for k, index in enumerate(self.segment.outs):
            meta = self.segment.meta_of(index)
            if index == self.segment.root:
                expected[k] = make_meta(meta.dtype, meta.shape, meta.stride, meta.device)
            elif index in self.segment.parts and self.segment.nodes[index].base >= 0:
                stride = contiguous(meta.shape)
                expected[k] = make_meta(meta.dtype, meta.shape, stride, meta.device)
        self._answer(tuple(expected))

    def _answer(self, key: tuple[Meta | None, ...]) -> Answer | None:
        """The kernel for incoming gradients of these Metas; None if torch's ops have to do it."""
        try:
            if key not in self.answers:
                self.answers[key] = self._build(key)
            answer = self.answers[key]
            if not isinstance(answer, Expected):
                return answer
            arrived = answer.ready()
        except Exception as error:
            if isinstance(error, ColdKernelError) or is_foreign(error):
                raise
            warn_once(f"autofuse: a backward runs as torch ops, its kernel failed: {error!r}")
            self.answers[key] = None
            return None
        if arrived is not None or answer.is_refused:
            self.answers[key] = arrived
        return arrived

    def _build(self, key: tuple[Meta | None, ...]) -> Expected | None:
        """What a backward kernel has to compute; None if torch has to do it."""
        segment = self.segment
        seeds: dict[int, Ref | None] = dict.fromkeys(segment.outs)
        metas: list[Meta] = []
        for index, meta in zip(segment.outs, key, strict=True):
            if meta is not None:
                if index in segment.pack:  # second derivatives through it
                    return None
                seeds[index] = ~len(metas)
                metas.append(meta)
        places = [(k, 0) for k in range(len(metas))]
        values: dict[Ref, Ref] = {}
        for k, ref in enumerate(segment.saved, len(metas)):
            for n, one in enumerate(segment.pack if ref in segment.pack else [ref]):
                meta = segment.meta_of(one)
                values[one] = ~len(places)
                places.append((k, n * meta.nbytes))
                metas.append(meta)
        tape = Tape(self.recorder, metas, places, segment.nodes[-1])
        try:
            gradients = len(key) - key.count(None)
            return Expected(tape, sweep(segment, tape, seeds, values), gradients)
        except UnfusedError:
            return None


FEW_LAYOUTS = 3  # as of a loop's first step, of its last one and of those between
MANY_SWEEPS = 8  # backwards of a chain under `create_graph`, after which more of them will come
# classes of gradients whose memory is theirs
_READ = set(map(id, (torch.Tensor, torch.nn.Parameter, Tensor)))


class Fused(torch.autograd.Function):
    """The autograd node of a segment; `_function` makes one class per op name."""

    @staticmethod
    def forward(ctx: Any, holder: Any, *sinks: torch.Tensor) -> Any:
        outs, ctx.to_save, ctx.work = holder  # as save_for_backward does
        ctx.materialize_grads = False
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """As torch's compiled autograd calls it, which gives the saved tensors itself."""
        backward, consts = ctx.work
        return backward.gradients(grads, ctx.saved_tensors, consts)


def apply_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """What the engine calls of a node: None, then the gradients for its sinks."""
    backward, consts = ctx.work
    # raises if they are freed or were written
    saved = ctx.saved_tensors if backward.frees else ()
    if (
        torch.is_grad_enabled()
        or hooks.differentiated is not None
        or not backward.may_launch(saved)
    ):
        return backward.gradients(grads, saved, consts)
    # --- hot path: gradients of layouts that were seen before ---
    with NoModes():
        keys = tuple([None if g is None else _key_of(g) for g in grads])
    if ... in keys:
        return backward.gradients(grads, saved, consts)
    layout = backward.layouts.get(keys)
    if layout is not None:
        backward.expect(layout)
        try:
            with NoModes():
                return layout[0](tuple([g for g in grads if g is not None]), saved, consts)
        except Exception as error:
            return after_error(error, backward, grads, saved, consts)
    result = backward.gradients(grads, saved, consts)
    laid = _laid_of(grads)
    answer = backward.answers.get(tuple([None if one is None else one[1] for one in laid]))
    known = answer is not None and not isinstance(answer, Expected)
    if known and laid.count(None) == keys.count(None):  # none with names, which no kernel reads
        layout = backward.layouts[keys] = answer, laid, _laid_of(saved)
        backward.expect(layout)
    return result


def _key_of(gradient: Any) -> Any:
    """By what it is known how a gradient lies, modes being off; ... where no kernel may read it."""
    cls = gradient.__class__
    if cls is not torch.Tensor or gradient.layout is not torch.strided or gradient.is_neg():
        return ...
    if gradient._is_zerotensor() or is_batched(gradient):
        return ...
    return gradient.dtype, gradient.shape, gradient.stride()


def _lies_as(meta: Meta, want: Meta) -> bool:
    """Whether tensors of one Meta lie in memory as those of another, but for sizes of 1 before."""
    more = meta.ndim - want.ndim
    if more < 0 or meta.shape[:more].count(1) != more:
        return False
    return meta.shape[more:] == want.shape and meta.stride[more:] == want.stride


def _laid_of(tensors: Sequence[Any]) -> Laid:
    """How they lie, None for none and for what autofuse cannot read."""
    metas = [None if x is None else plain_meta(x) for x in tensors]
    pairs = zip(tensors, metas, strict=True)
    return tuple([None if meta is None else (keys_of(x).raw_repr(), meta) for x, meta in pairs])


def after_error(
    error: BaseException, backward: Backward, grads: Sequence[Any], saved: Any, consts: Any
) -> tuple[Any, ...]:
    """The gradients of a node whose Answer has run into `error`, which is raised again where it is
    no failure of a kernel."""
    if not isinstance(error, Exception) or isinstance(error, ColdKernelError) or is_foreign(error):
        raise error
    if not isinstance(error, NotReadyError):
        backward.layouts.clear()
        backward.usual = ()
        warn_once(f"autofuse: the kernel of a backward failed: {error!r}")
    return backward.gradients(grads, saved, consts)


@cache
def _function(name: str) -> Callable[..., Any]:
    """`apply` of the Function whose nodes are called `name`."""
    cls = type(name.partition("Backward")[0], (Fused,), {})
    node = cls._backward_cls  # type: ignore[attr-defined]
    node.__name__ = node.__qualname__ = name
    node.apply = apply_backward  # past the Python layers of Function: 3 us less per backward
    return apply_of(cls)


class Graph:
    """What a flush leaves behind: the backwards of its nodes, in order."""

    def __init__(self, recorder: Recorder, outline: Outline, nodes: list[Node]) -> None:
        self.backwards = [Backward(recorder, segment, nodes[-1]) for segment in outline.segments]
        self.views = [nodes[index] for index in outline.views]
        self.reduced = [(nodes[index], (index, *more)) for index, *more in outline.reduced]
        self.bare = dict(
            zip(outline.bare, bares([nodes[k].meta for k in outline.bare]), strict=True)
        )
        self.stored = outline.stored  # dead values that its kernel stores for them
        self.saved_bytes = outline.saved_bytes
        self.packs = [segment.pack for segment in outline.segments if segment.pack]
        self.recorder, self.told = recorder, outline.told
        self.tells = any(segment.told for segment in outline.segments) or bool(outline.told)

    def prepare(self) -> None:
        """Ask for the kernels of the backward that is to be expected."""
        for backward in self.backwards:
            backward.prepare()

    def attach_to(self, runner: Runner) -> None:
        """Let `runner`, which also computes what is stored and has these packs, leave it behind."""
        runner.saved_bytes, runner.tells = self.saved_bytes, self.tells
        runner.attach_views = bool(runner.views)
        seen = [node.index for node in runner.views]
        attach = _attaching(self.backwards, runner.made, self.views, self.bare, seen, self.reduced)
        if self.tells:
            attach = telling(self.recorder, attach, runner, self.told)
        # to make a node of our own asks no dispatch key, but whether an operand requires grad
        runs_ops = self.tells or self.views or self.reduced or self.bare
        runner.attach = above_autograd(attach) if runs_ops else attach


def _attaching(
    backwards: list[Backward],
    computed: list[int],
    views: Sequence[Node] = (),
    bare: Mapping[int, torch.Tensor] = MappingProxyType({}),
    seen: Sequence[int] = (),
    reduced: Sequence[tuple[Node, tuple[int, ...]]] = (),
) -> Callable[..., Any]:
    """A function that makes the graph; of a chain's Inputs, Consts and `late`, and the values.

    It returns the views `seen`. Hooks that are on by then are told nothing, unless the nodes are
    made for them: the chain was recorded before, and a hook may keep a value that a shell is about
    to take away. reduced: what torch has nodes of, each with what its op returns.
    """

    def listed(refs: list[Ref]) -> str:
        return "".join(f"{operand_of(ref)}, " for ref in refs)

    space: dict[str, Any] = {"get": torch.is_grad_enabled, "set_": set_grad_enabled,
                             "hooks": top_hooks, "push": push_hooks, "pop": pop_hooks,
                             "holding": HOLDING}  # fmt: skip
    tells = any(backward.segment.told for backward in backwards)
    calls: list[tuple[int, str]] = []
    made = Calls(space)
    for node in views:
        calls += [(node.index, line) for line in made.lines_for(node)]
    for node, results in reduced:
        assert isinstance(node.op, Reduction)
        calls += _bared([node.index], bare, space, node.index)
        space[f"hang{node.index}"] = noder(node.op)
        call = f"hang{node.index}(({listed([*node.args])}), {listed([*results])})"
        calls.append((node.index, call))
    for k, backward in enumerate(backwards):
        segment = backward.segment
        calls += _bared(segment.outs, bare, space, segment.root)
        space |= {f"v{ref}": bare[ref] for ref in segment.saved if ref in bare}
        space[f"backward{k}"], space[f"apply{k}"] = backward, backward.apply
        outs = f"({listed(segment.outs)})" if len(segment.outs) > 1 else f"v{segment.root}"
        work = f"(backward{k}, consts)"
        if not segment.nodes[-1].consts:  # one object less for the garbage collector to visit
            work, space[f"work{k}"] = f"work{k}", (backward, ())
        saved = listed(segment.saved)
        if segment.told and not since(2, 13):
            saved, space["as_saved"] = saved.replace("inputs[", "as_saved(inputs["), _as_saved
            saved = saved.replace("], ", "]), ")
        holder = f"({outs}, ({saved}), {work})"
        calls.append((segment.root, f"apply{k}({holder}, {listed(segment.sinks)})"))
    params = ", ".join(f"v{index}" for index in computed)
    calls.sort(key=lambda call: call[0])
    body = "".join(f"            {call}\n" for _, call in calls)
    numbers = [numbered(backward.segment.root) for backward in backwards]
    numbers += [numbered(node.index) for node, _ in reduced]
    numbers += [number_of_view(node, space) for node in views if node.meta.requires_grad]  # type: ignore[union-attr]
    places = "".join(f"        {line}\n" for line in numbers)
    places = places or "        pass\n"  # hooks alone are told of its values
    result = f"    return {tuple_of(f'v{index}' for index in seen)}\n" if seen else ""
    source = (
        f"def attach(inputs, consts, late, {params}):\n"
        f"    was, told = get(), {None if tells else 'hooks()'}\n"
        f"    try:\n        if told: push(*holding)\n"
        f"        try:\n            if not was: set_(True)\n{body}"
        f"        finally:\n            if not was: set_(was)\n"
        f"    finally:\n        if told: pop()\n"
        f"    if late is not None:\n{places}{result}"
    )
    return defined(source, "attach", space)


def _bared(
    indices: Sequence[int], bare: Mapping[int, torch.Tensor], space: dict[str, Any], root: int
) -> list[tuple[int, str]]:
    """The statements that make tensors for what is bare of `indices`, with the node of `root`."""
    found = [index for index in indices if index in bare]
    space |= {"detach": detach, **{f"bare{index}": bare[index] for index in found}}
    return [(root, f"v{index} = detach(bare{index})") for index in found]


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or for a leaf a view of it: its hooks would go with what is unpacked of it.

    Before torch 2.13 an unpacked tensor that has been in Python takes them along.
    """
    if not (tensor.requires_grad and tensor.is_leaf):
        return tensor
    return permute(tensor, (*range(tensor.ndim),))
