"""Hooks: what one stage needs of a later one, by name. Imports nothing of autofuse.

A stage that does what a hook says puts its function here when it is imported, or, where somebody
looks on, while they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# record.flush: what has the value of a tensor, which is made concrete if it is pending
value_of: Callable[[Any], Any] = lambda tensor: tensor  # noqa: E731
# record.modes: a thread has gone; of a recorder of its
thread_ended: Callable[[Any], None] = lambda recorder: None  # noqa: E731
# record.modes: this thread is about to end, and lets go of all that it records
thread_ends: Callable[[], None] = lambda: None  # noqa: E731
# hot.native: `fuse` has made this function
fused: Callable[[Callable[..., Any]], None] = lambda call: None  # noqa: E731
# hot.native: torch's own `__getitem__` is back in its classes
indexing_is_torchs: Callable[[], None] = lambda: None  # noqa: E731
# observe.events, while somebody looks: before a flush, of its recorder, chain, last node, reference
# counts and reason; gives what is told how it went, a `record.flush.Watch`
flushing: Callable[..., Any] | None = None
# observe.events, while somebody looks: a kernel is needed (`made` is False) or has arrived; given
# made, Source, device, where it was ("hit": in memory, "soft miss": on disk, "hard miss": to be
# compiled), for how many us who needs it was held up or had asked for it, and the user's line
# where that asked for it, if it was noted; called without the locks of supply.kernels
looked_up: Callable[..., None] | None = None
# observe.check, in check mode: of an autograd node, what a kernel has made of the gradients that
# came in, the saved tensors and the Consts, before the engine takes it
differentiated: Callable[..., None] | None = None
