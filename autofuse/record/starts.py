"""Starts: where chains that begin alike pay, for not all do that begin with an op.

A residual `x + y` may end in a product here and begin a long chain there. Where `policy.make_eager`
finds that a chain has paid which begins with its op, the verdict is of the instruction at which one
begins: there the op is recorded, or run as eager PyTorch for a while. One instruction may begin
chains of both kinds, and what has paid need not go on to: the verdict is on several chains in sum
(`policy.Balance`), and it is asked anew, ever more rarely while it stays the same.
"""

from __future__ import annotations

from ..chain.state import Chain, Node
from ..chain.trie import eager_node
from ..run.runner import Runner
from .origins import instruction
from .policy import SKIPS, Balance, Starts

_MOST = 4096  # of an op that are told apart
_LOST = "chains that gain too little begin here"


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
    """Count for where `chain` has begun what it gains, and decide on it if that is enough."""
    start, chain.start = chain.start, None
    first = runner.nodes[0]
    assert start is not None and first.parent is not None and first.op is not None
    stand = _stand_of(first)
    starts = None if stand is None else stand.starts
    if not isinstance(starts, Starts):  # the chain has begun otherwise after all
        return
    balance = starts.balances.get(start)
    if balance is None:
        if len(starts.balances) >= _MOST:
            starts.clear()
            starts.balances.clear()
        balance = starts.balances[start] = Balance()
    if not balance.tell(runner):
        return
    node = first
    if balance.eager:
        why = runner.short or _LOST
        node = eager_node(first.recorder, first.parent, first.op, why)
        assert stand is not None
        node.returns, node.skips = (stand, start, None), SKIPS - balance.left
    starts[start] = node


def doubt_starts(runner: Runner) -> None:
    """Ask anew where what begins as the chain of `runner`, which loses, has lost often enough.

    It has begun at one of these instructions: which one nobody has looked for, as where it pays.
    """
    first = runner.nodes[0]
    stand = _stand_of(first)
    starts = None if stand is None else stand.starts
    if not isinstance(starts, Starts):
        return
    for start, node in list(starts.items()):
        balance = starts.balances.get(start)
        if node is first and balance is not None:
            balance.left -= 1
            if balance.left <= 0:
                starts.pop(start, None)


def _stand_of(first: Node) -> Node | None:
    """What stands where chains that begin with `first` do."""
    assert first.parent is not None
    return first.parent.next.get(first.key)
