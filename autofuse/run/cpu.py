"""Running kernels on the CPU, in chunks over as many threads as torch uses."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import get_ident
from typing import Any

import torch

from ..chain.state import Chain
from ..inside import inside, serving
from ..kernel.plan import Piece
from ..layout import is_dense
from ..program.program import Ref
from ..torch_private import NoModes, address_of, count_write
from .generated import declared, log_of, result_of, tuple_of
from .runner import Runner, check_inputs
from .settle import WRITING, bump, publish, settle, writes_of
from .views import viewer
from .words import Answer

_CHUNK = 1 << 15  # elements below which a second thread costs more than it saves
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(  # started as they are needed
            os.cpu_count(), "autofuse", initializer=_serve
        )
    return _pool


def _serve() -> None:
    inside[get_ident()] = serving[get_ident()] = True


def forget_threads() -> None:
    """After a fork: the child has none of the parent's threads."""
    global _pool
    _pool = None


class CpuRunner(Runner):
    """Runs a program's kernels on the CPU, in chunks over as many threads as torch uses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._entries = [kernel.entry for kernel in self.kernels]
        self._offsets = [piece.offsets if any(piece.offsets) else () for piece in self.pieces]
        self._bases, self._viewer = viewer(self.nodes, self.views) if self.views else ([], None)

    def answering(
        self, given: list[Ref | None], numbers: list[str], places: list[tuple[int, int]]
    ) -> Answer:
        """A function of `Answer`'s kind; places as for CUDA."""
        consts_of = eval(f"lambda c: {tuple_of(numbers)}", {"log": log_of})
        pick = eval(f"lambda inputs, made: {result_of(given, 'made[{}]')}")

        def answer(incoming: Any, saved: Any, consts: list[Any]) -> tuple[Any, ...]:
            inputs = (*incoming, *saved)
            with NoModes():
                addresses = [address_of(inputs[n]) + at for n, at in places]
                values = self._compute(addresses, consts_of(consts), None)
            self.others += 1
            return pick(inputs, values)

        return answer

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        with NoModes():
            check_inputs(chain)
            addresses = list(map(address_of, chain.inputs))
            values = self._compute(addresses, chain.consts, chain)
            if chain.bumps is not None:
                bump(chain, values)
            if self.attach is not None:
                made = [values[index] for index in self.made]
                views = self.attach(chain.inputs, chain.consts, chain.late, *made)
                if self.attach_views:
                    values |= zip([node.index for node in self.views], views, strict=True)
        publish(chain, values)
        settle(chain, self.visible, believed=True)

    def _compute(
        self, addresses: list[int], consts: Sequence[Any], chain: Chain | None
    ) -> dict[int, torch.Tensor]:
        """The values of `made`, by node index, and of what is in place.

        The last piece may write to `chain.into`, and one that is alone to what it reads.
        """
        values: dict[int, torch.Tensor] = {}
        outs: dict[int, torch.Tensor] = {}
        for pack, _, (shape, stride, dtype) in self.memory:
            value = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            values[pack[0]] = value
            outs |= zip(pack, (value,) if len(pack) == 1 else value, strict=True)
        if self._viewer is not None and not self.attach_views:
            views = self._viewer(*[values[base] for base in self._bases])
            values |= zip([node.index for node in self.views], views, strict=True)
        into = chain.into if chain is not None and self.writes else None
        if into is not None:
            outs[self.live[-1]] = into
            dense = is_dense(into.shape, into.stride())  # or what takes its place is a large hole
            if dense and _shares(self.pieces[-1])[1] > 1:  # not in one step, and so not in place
                outs[self.live[-1]] = values[self.live[-1]] = torch.empty_strided(
                    into.shape, into.stride(), dtype=into.dtype
                )
        overwrites = into is not None and outs[self.live[-1]] is into
        if self.placed and chain is not None:
            alone = len(self.pieces) == 1 and _shares(self.pieces[0])[1] < 2
            for step, position in self.placed.items():
                memory, like = chain.inputs[position], self.inputs[position]
                if not alone:  # not in one step, and so not in place
                    memory = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
                values[step] = outs[step] = memory
            overwrites |= alone
        for piece, entry, offsets in zip(self.pieces, self._entries, self._offsets, strict=True):
            pointers = [
                addresses[~ref] if ref < 0 else address_of(outs[ref])
                for ref in (*piece.loads, *piece.stores)
            ]
            if offsets:
                pointers = list(map(operator.add, pointers, offsets))
            scalars = [consts[const] for const in piece.consts]
            arguments = (*pointers, *scalars, piece.numel, *piece.numbers)
            steps, chunks = _shares(piece)
            if overwrites and piece is self.pieces[-1]:
                assert chain is not None
                self._write(chain, values, entry, steps, arguments)
            else:
                self._loop(entry, steps, chunks, arguments)
        return values

    @staticmethod
    def _write(
        chain: Chain,
        values: dict[int, torch.Tensor],
        entry: Any,
        steps: int,
        arguments: tuple[Any, ...],
    ) -> None:
        """Run the kernel that writes to memory that is there, in a step that nothing interrupts."""
        into = chain.into
        done: list[None] = []
        # runs when `done` takes its result
        run = itertools.starmap(entry, [declared(entry, 0, steps, *arguments)])
        # C would make one, in the midst of which Python 3.11 may collect
        written = iter(writes_of(chain, values))
        bump(chain, values)
        if chain.values is None:
            try:
                # no Python runs from here...
                chain.values = WRITING
                chain.into = None
                done += run
            finally:
                chain.values = None
                chain.into = into
                if done:
                    chain.values = values
                    chain.into = chain.bumps = None
                    count_write(written)  # ...to its end

    @staticmethod
    def _loop(entry: Any, steps: int, chunks: int, arguments: tuple[Any, ...]) -> None:
        if chunks < 2:
            entry(0, steps, *arguments)
            return
        cuts = [steps * k // chunks for k in range(chunks + 1)]
        jobs = [
            _threads().submit(entry, cuts[k], cuts[k + 1], *arguments) for k in range(1, chunks)
        ]
        entry(cuts[0], cuts[1], *arguments)
        wait(jobs)
        for job in jobs:
            job.result()


def _shares(piece: Piece) -> tuple[int, int]:
    """The steps of the loop, and how many threads share them."""
    columns = piece.numbers[piece.plan.rank - 2] if piece.plan.rank > 1 else 1
    steps = piece.numel // columns
    return steps, min(torch.get_num_threads(), piece.numel // _CHUNK, steps)
