"""The parameters of launches, in slots; and of those whose operands begin anywhere."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..chain.verified import is_trusted
from ..errors import NotReadyError
from ..kernel.plan import Piece
from ..kernel.rows import RowPlan, launch_of, unvectorised
from ..kernel.source import Parameters
from ..supply.kernels import Order

_FORMATS = {"u64": "Q", "i64": "q", "i32": "i4x", "f32": "f4x", "f64": "d"}


class Slots:
    """The parameters of one launch: a buffer of 8-byte slots, and an array that points at them."""

    def __init__(self, piece: Piece, parameters: Parameters) -> None:
        codes = parameters.codes
        varying = parameters.loads + parameters.stores + parameters.consts
        self.buffer = ctypes.create_string_buffer(8 * len(codes))
        self.address = self._address(len(codes))
        self.formats = codes[:varying]
        self.varying, fixed = (
            struct.Struct("<" + "".join(_FORMATS[code] for code in part))
            for part in (self.formats, codes[varying:])
        )
        self.pack = self.varying.pack_into
        count, self.blocks, self.threads = launch_of(piece)
        fixed.pack_into(self.buffer, self.varying.size, count, *piece.numbers)

    def _address(self, slots: int) -> int:
        """What a launch takes as its parameters."""
        first = ctypes.addressof(self.buffer)
        self.array = (ctypes.c_void_p * slots)(*range(first, first + 8 * slots, 8))
        return ctypes.addressof(self.array)

    def narrowed(self, values: Sequence[Any]) -> list[Any]:
        """`values`; of a Python number beyond float32 infinity, as torch's conversion gives."""
        return [
            ctypes.c_float(value).value if code == "f32" else value
            for code, value in zip(self.formats, values, strict=True)
        ]

    def pack_wide(self, *values: Any) -> None:
        """As `pack`, for Python numbers of any size."""
        self.pack(self.buffer, 0, *self.narrowed(values))


Part = tuple[int, Slots, object]  # of a run: a kernel, its parameters, what has to stay for it


class Unaligned:
    """Pieces for pointers that are not 16-byte aligned: one element at a time.

    Where torch then reduces rows in another order, there is no kernel. Once one is there, the words
    of the run have it too.
    """

    def __init__(
        self, pieces: tuple[Piece, ...], device: torch.device, part_of: Callable[..., Part]
    ) -> None:
        self.pieces, self.device, self._part_of = pieces, device, part_of
        self._launches: dict[int, Part] = {}
        self._orders: dict[int, Order] = {}
        self._followers: list[tuple[ctypes.Array[ctypes.c_int64], list[int]]] = []

    def tell(self, memory: ctypes.Array[ctypes.c_int64], places: list[int]) -> None:
        """Have words in `memory` of each kernel that is there now or later.

        places: of each piece. There are four words: kernel, blocks, parameters, and where its
        operands lie; or zeros.
        """
        self._followers.append((memory, places))
        for k in self._launches:
            self._put(k, memory, places[k])

    def _put(self, k: int, memory: ctypes.Array[ctypes.c_int64], place: int) -> None:
        plan = self.pieces[k].plan
        if isinstance(plan, RowPlan) and any(plan.anchored):
            return
        entry, slots, _ = self._launches[k]
        words = slots.blocks, slots.address, ctypes.addressof(slots.buffer)
        memory[place + 1 : place + 4] = words
        memory[place] = entry  # by which who reads them knows that they are there

    def __call__(self, k: int, *values: Any) -> tuple[int, int, int]:
        """Kernel, blocks and parameters of piece k, with `values` as its operands."""
        plan = self.pieces[k].plan
        if isinstance(plan, RowPlan):
            elsewhere = any(value & 15 for value in itertools.compress(values, plan.anchored))
            if elsewhere or not is_trusted(self.device):
                raise NotReadyError(f"{plan.name}, of rows that begin elsewhere")
        if k not in self._launches:
            piece = unvectorised(self.pieces[k])
            order = self._orders.setdefault(k, Order([piece.plan], self.device))
            kernels = order.filled()
            if kernels is None:
                raise NotReadyError(f"{piece.plan.name}, one element at a time")
            (kernel,) = kernels
            self._launches[k] = self._part_of(kernel, piece)
            for memory, places in self._followers:
                self._put(k, memory, places[k])
        entry, slots, _ = self._launches[k]
        slots.pack_wide(*values)
        return entry, slots.blocks, slots.address
