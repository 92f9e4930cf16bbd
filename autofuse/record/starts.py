"""Starts: where chains that begin alike pay, for not all do that begin with an op.

A residual `x + y` may end in a product here and begin a long chain there. Where `policy.make_eager`
finds that a chain has paid which begins with its op, the verdict is of the instruction at which one
begins: there the op is recorded, or run as eager PyTorch for a while. What has paid need not go on
to: where what is recorded loses again and again, it is asked anew.
"""

from __future__ import annotations

from ..chain.state import Chain, Node
from ..chain.trie import eager_node
from ..run.runner import Runner
from .origins import instruction
from .policy import TRIES

_MOST = 256  # of an op that are told apart
_DOUBTS = 8  # one in so many runs of a chain that loses asks anew where it has begun


def at_start(stand: Node) -> tuple[Node, int | None]:
    """What an op is recorded as that would begin a chain where the program is: `stand.starts`.

    And that instruction, if it is not known yet whether chains pay there.
    """
    assert stand.starts is not None and stand.returns is not None
    start = instruction()[0]
    node = stand.starts.get(start)
    if node is not None:
        return node, None
    (_, _, node) = stand.returns
    assert node is not None
    return node, start


def tell_start(chain: Chain, runner: Runner) -> None:
    """Let what begins where `chain` has begun be recorded from now on, or be eager for a while."""
    start, chain.start = chain.start, None
    first = runner.nodes[0]
    assert start is not None and first.parent is not None and first.op is not None
    stand = _stand_of(first)
    if stand is None or stand.starts is None:  # the chain has begun otherwise after all
        return
    if len(stand.starts) >= _MOST:
        stand.starts.clear()
    if not runner.short:
        stand.starts[start] = first
    elif runner.runs >= TRIES:
        eager = eager_node(first.recorder, first.parent, first.op, runner.short, first.meta)
        eager.returns = (stand, start, None)
        stand.starts[start] = eager


def doubt_starts(runner: Runner) -> None:
    """Ask anew at the instructions where what begins as the chain of `runner`, which loses, pays.

    It has begun at one of them: which one nobody has looked for, as where it pays.
    """
    if runner.runs % _DOUBTS or not runner.runs:
        return
    first = runner.nodes[0]
    stand = _stand_of(first)
    if stand is not None and stand.starts is not None:
        for start, node in list(stand.starts.items()):
            if node is first:
                stand.starts.pop(start, None)


def _stand_of(first: Node) -> Node | None:
    """What stands where chains that begin with `first` do."""
    assert first.parent is not None
    return first.parent.next.get(first.key)
