"""Outside: what torch's own ops compute of a chain, once its kernels have run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..chain.state import Node, Recorder
from ..ops.reductions import Reduction
from ..torch_private import (
    AUTOGRAD_OF_VIEWS,
    ExcludedKey,
    back_to_stream,
    set_grad_enabled,
    stream_reader,
    to_stream,
)
from .generated import defined, operand_of


def finishing(
    steps: Sequence[Node], made: Sequence[int], attach: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """`attach` of a Runner, once torch has computed what is its own of `steps`; None if nothing is.

    It does that on the stream of the chain, in memory of their own, whose versions stay 0: these
    are new values, which get their nodes in `attach`. made: the steps that have memory.
    """
    space: dict[str, Any] = {}
    lines = []
    for node in steps:
        op = node.op
        if not isinstance(op, Reduction) or op.outside is None or node.index not in made:
            continue
        given = [node.index, *(x.index for x in steps if x.of and x.of[0] == node.index)]
        assert {*given} <= {*made}
        space[f"call{node.index}"] = op.outside
        operands = ", ".join(map(operand_of, (*given, *node.args)))
        lines.append(f"            call{node.index}({operands})\n")
    if not lines:
        return attach
    assert attach is not None, "it is recorded for its gradient"
    recorder = steps[0].recorder
    space |= {"excluded": ExcludedKey, "versions": AUTOGRAD_OF_VIEWS, "attach": attach,
              "get": torch.is_grad_enabled, "set_": set_grad_enabled, "back": back_to_stream,
              "aside": partial(_aside, recorder, stream_reader(recorder.device))}  # fmt: skip
    params = ", ".join(["inputs", "consts", "late", *(f"v{index}" for index in made)])
    source = (
        f"def finish({params}):\n"
        f"    was, before = get(), None\n    try:\n        set_(False); before = aside()\n"
        f"        with excluded(versions, True):\n{''.join(lines)}"
        f"    finally:\n        set_(was)\n        if before is not None: back(before)\n"
        f"    return attach({params})\n"
    )
    return defined(source, "finish", space)


def _aside(recorder: Recorder, current: Callable[[], int]) -> torch.cuda.Stream | None:
    """Make the stream of the chain that runs the current one: which was, if that is another.

    So it is where another thread computes what this one has recorded.
    """
    chain = recorder.running
    if chain is None or chain.stream == current():
        return None
    return to_stream(chain.stream, recorder.device)
