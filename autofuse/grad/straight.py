"""Straight code: derivative rules as one Python function of torch calls, op after op.

It is what a backward runs under `create_graph`, and wherever no kernel does: torch differentiates
its ops again. Nothing of it depends on sizes or dtypes, but for casts, of which it asks as it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..chain.meta import Meta
from ..ops.arithmetic import CASTS
from ..ops.reductions import Reduction
from ..ops.row import Op
from ..ops.views import ViewOp
from ..run.generated import defined, log_of, tuple_of
from ..torch_private import AUTOCASTS, ExcludedKey
from .reduced import Needs, Values, by_torch
from .strips import Striping
from .tape import Number, Numbers

Caller = Callable[[Op], Callable[..., torch.Tensor]]
_COMPUTED = re.compile(r"\bv\d+\b")


def eager_of(op: Op) -> Callable[..., torch.Tensor]:
    """The torch function of an op: the usual Caller."""
    assert op.eager is not None
    return op.eager


class Straight(Numbers):
    """Writes rules as lines of Python; a value is the name of a local."""

    def __init__(self, classes: Sequence[type], call: Caller, casting: bool) -> None:
        """classes: of the chain's Consts. casting: whether autocast is on."""
        super().__init__(classes)
        self.call, self.casting = call, casting
        self.lines: list[str] = []
        self.space: dict[str, Any] = {"log": log_of}
        self.names: dict[int, str] = {}  # of what is in `space`, by id

    def made(self, expression: str) -> str:
        """The local that holds the value of `expression`."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def named(self, thing: Any) -> str:
        """What the lines call `thing`."""
        if id(thing) not in self.names:
            name = self.names[id(thing)] = f"k{len(self.names)}"
            self.space[name] = thing  # which keeps it, so that its id stays its own
        return self.names[id(thing)]

    def function(self, given: Sequence[str | None]) -> Callable[..., tuple[Any, ...]]:
        """Of incoming gradients, saved tensors and Consts: None, then what is `given`.

        A value goes when nothing reads it any more.
        """
        result = tuple_of(["None", *map(str, given)])
        body, read = [f"    return {result}\n"], {*_COMPUTED.findall(result)}
        for line in reversed(self.lines):
            last = [name for name in dict.fromkeys(_COMPUTED.findall(line)) if name not in read]
            read.update(last)
            if last:
                body.append(f"    del {', '.join(last)}\n")
            body.append(f"    {line}\n")
        source = f"def straight(g, s, c):\n{''.join(reversed(body))}"
        return defined(source, "straight", self.space)

    def unbound(self, parts: Sequence[int], value: str | None) -> dict[int, str | None]:
        """What lies in `value`, by these; None if it is."""
        if value is None:
            return dict.fromkeys(parts)
        whole = self.made(f"{self.named(torch.unbind)}({value})")
        return {part: self.made(f"{whole}[{k}]") for k, part in enumerate(parts)}

    # --- as rules use it --------------------------------------------------------------------------

    def apply(self, op: Op, operands: Sequence[Any]) -> str:
        texts = [x.text if isinstance(x, Number) else x for x in operands]
        return self.made(f"{self.named(self.call(op))}({', '.join(texts)})")

    def again(self, op: Op, operands: Sequence[Any]) -> str:
        """The result of an op of the chain, whose casts by autocast are ops of it."""
        value = self.apply(op, operands)
        if self.casting:
            self.space |= {"excluded": ExcludedKey, "cpu": AUTOCASTS[0], "cuda": AUTOCASTS[1]}
            keys = "with excluded(cpu, True), excluded(cuda, True): "
            self.lines[-1] = keys + self.lines[-1]
        return value

    def cast(self, value: str, like: str) -> str:
        """`value` in the dtype of `like`."""
        call = self.call  # not `self`, which holds the space
        self.space["cast"] = lambda x, dtype: call(CASTS[dtype])(x)
        return self.made(
            f"{value} if {value}.dtype is {like}.dtype else cast({value}, {like}.dtype)"
        )

    def fitted(self, value: str, meta: Meta) -> str:
        """A gradient for what has this Meta; with its shape, also with its dtype."""
        cast, dtype = self.named(self.call(CASTS[meta.dtype])), self.named(meta.dtype)
        shape = self.named(meta.shape)
        return self.made(
            f"{cast}({value}) if {value}.dtype is not {dtype} and {value}.shape == {shape} "
            f"else {value}"
        )

    def view(self, op: ViewOp, value: str, base: Meta) -> str:
        """A view of the value `base` of the chain."""
        return self.apply(op, (value,))

    def padded(self, striping: Striping, k: int, g: str, shape: tuple[int, ...]) -> str:
        """A gradient of `shape` that is `g` in strip k and zero elsewhere."""
        start = striping.begin(k)
        where = shape, striping.dim, start, start + striping.sizes[k], 1
        call = self.named(torch.ops.aten.slice_backward.default)
        return self.made(f"{call}({g}, *{self.named(where)})")

    def join(self, op: ViewOp, parts: Sequence[str | None], metas: Sequence[Meta]) -> str | None:
        """The gradient of what `op` has split, from those of the parts, of these Metas."""
        if all(part is None for part in parts):
            return None
        zeros = self.named(torch.zeros)
        texts = [
            f"{zeros}({self.named(meta.shape)}, dtype={self.named(meta.dtype)}, "
            f"device={self.named(meta.device)})" if part is None else part
            for part, meta in zip(parts, metas, strict=True)
        ]  # fmt: skip
        call = self.named(torch.stack if op.name == "unbind" else torch.cat)
        return self.made(f"{call}([{', '.join(texts)}], {self.named(op.dim)})")

    def part(self, view: Callable[..., torch.Tensor], value: str) -> str:
        """What `view` gives of the gradient of a join."""
        return self.made(f"{self.named(view)}({value})")

    def reduced(
        self, op: Reduction, g: str, values: Values, metas: tuple[Meta, ...], needs: Needs
    ) -> tuple[str | None, ...]:
        """The gradients for the operands of a reduction, of these Metas."""
        call = by_torch(op, tuple(metas[0].shape), needs, tuple(values))
        operands = [x.text if isinstance(x, Number) else x for x in values.values()]
        found = self.made(f"{self.named(call)}({', '.join([g, *operands])})")
        return tuple([self.made(f"{found}[{k}]") if need else None for k, need in enumerate(needs)])
