"""Numbers: gradients add up in eager's order, for autograd's nodes are numbered as eager's are.

Of the nodes that are ready the engine runs the one with the highest number first. A node takes the
next number when it is made, in eager PyTorch where its op runs. A recorded op uses one up in the
same place: that of op k of a chain is `Chain.first` + k. Its node, which a flush makes later, is
given it if others have been made since (`Chain.late`). Every thread counts for itself.
"""

from __future__ import annotations

from functools import partial

from ..chain.state import Chain, this_thread
from ..torch_private import peek, take

ORDER = "order of gradients"  # why a chain ends

# --- hot path: per recorded op under grad ----------------------------------------------------


def number_next(chain: Chain) -> bool:
    """Number the op that `chain` gets next; False if the chain has to end first.

    Then another node has been made since its last op. That one's gradients come between those of
    the ops before and after, where no node that stands for both could add them.
    """
    first = take() - len(chain)
    if chain.tip.holds_grad:
        return first == chain.first
    chain.first = first
    return True


follows = partial(number_next)  # C calls it, so that Python 3.11 too runs its machine code


def is_next(chain: Chain) -> bool:
    """Whether no node has been made since the last op of `chain`."""
    return peek() == chain.first + len(chain)


def pass_over(first: int) -> None:
    """Let the nodes made since its last op not end the chain that begins with number `first`.

    They add to no gradient that ops of the chain add to.
    """
    recorder = this_thread.current
    if recorder is not None and recorder.chain.first == first:
        recorder.chain.first = peek() - len(recorder.chain)
