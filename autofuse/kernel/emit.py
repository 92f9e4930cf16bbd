"""Kernels around element functions: indices, loads, stores and parameters, as LLVM IR.

The whole body is emitted into one numba intrinsic because numba's front end costs 7 ms per op and
lane for text, but 35 ms flat this way (10 ops x 4 lanes: 245 against 35 ms).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from llvmlite import ir

from .lower import Element
from .source import (
    BROADCAST,
    ITEMSIZE,
    PADDED,
    ROLLED,
    THREADS_PER_BLOCK,
    UNIT,
    WARP,
    Operand,
    Parameters,
    Source,
)
from .targets import I1, I32, I64, STORED, Cpu, Cuda, Value, joined, special_register


def emit_cuda(
    source: Source, builder: ir.IRBuilder, capability: tuple[int, int], params: list[Any]
) -> None:
    """Emit a whole kernel: the work of one thread, a group of `source.lanes` elements."""
    emitter = Emitter(source, builder, Cuda(builder, capability), params)
    group = cuda_index(builder)
    group = group if source.wide else builder.trunc(group, I32)
    lanes = emitter.word(source.lanes)
    whole = source.rank == 1 and not source.spaced  # the count is of elements
    first = builder.mul(group, lanes) if whole else group
    with builder.if_then(builder.icmp_unsigned("<", first, emitter.count)):
        emitter.work(emitter.walks(group, emitter.sizes), group)


@dataclass(frozen=True, slots=True)
class _Turn:
    """How an operand goes along an axis on which it begins somewhere in the middle, or outside."""

    how: int  # ROLLED or PADDED
    position: Any  # on the axis, of the first lane
    stride: Any
    start: Any  # of the first element of the loop
    size: Any


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one thread finds an operand."""

    operand: Operand
    pointer: Any
    offset: Any  # of its first lane, in elements
    distance: Any  # of its lanes
    begin: Any  # where the row begins, in elements
    turn: _Turn | None = None  # how it goes along the row, if it begins there elsewhere
    beyond: Any = I1(0)  # whether the row is in no memory, as it may be if it is padded

    @property
    def kind(self) -> Any:
        return STORED[self.operand.code]


class Emitter:
    def __init__(
        self, source: Source, builder: ir.IRBuilder, target: Cuda | Cpu, params: list[Any]
    ) -> None:
        self.source, self.builder, self.target = source, builder, target
        layout = Parameters.of(source)
        self.word = I64 if source.wide or isinstance(target, Cpu) else I32
        cut = layout.loads + layout.stores
        self.pointers, rest = params[:cut], params[cut:]
        self.consts, rest = rest[: layout.consts], rest[layout.consts :]
        rest = [self._index(value) for value in rest]
        self.count, rest = rest[0], rest[1:]
        self.sizes, rest = rest[: source.rank - 1], rest[source.rank - 1 :]
        self.columns, rest = (rest[0], rest[1:]) if source.spaced else (None, rest)
        self.inside: list[Any] = []  # of each lane, whether it is in its row, where they are spaced
        self.strides = iter(rest)
        self.element = Element(builder, target)

    def _index(self, value: Any) -> Any:
        if value.type == self.word:
            return value
        return self.builder.sext(value, self.word)  # strides of what is flipped are negative

    def work(self, walks: list[Any], group: Any) -> None:
        """The work at one position of the loop, given per axis and as the number of the group."""
        source, builder = self.source, self.builder
        if source.spaced:
            walks = [*walks[:-1], self._first(walks[-1])]
            self.inside = [
                builder.icmp_unsigned(
                    "<", builder.add(walks[-1], self.word(WARP * k)), self.columns
                )
                for k in range(source.lanes)
            ]
        operands = zip([*source.loads, *source.stores], self.pointers, strict=True)
        places = [self._place(operand, pointer, walks) for operand, pointer in operands]
        reads, writes = places[: len(source.loads)], places[len(source.loads) :]
        function = ast.parse(source.text).body[0]
        assert isinstance(function, ast.FunctionDef)
        consts = [Value(*const) for const in zip(self.consts, source.consts, strict=True)]
        start = builder.mul(group, self.word(source.lanes))
        full = None  # whether the group is, where the last one need not be
        if source.lanes > 1 and source.rank == 1 and not source.spaced:
            end = builder.add(start, self.word(source.lanes))
            full = builder.icmp_unsigned("<=", end, self.count)
        lanes = [[*lane, *consts] for lane in self._guarded(full, reads, start)]
        results = []
        for k in range(0, len(lanes), 2):
            results += self.element.run(function, lanes[k : k + 2])
        stores = [
            (place, [self.element.storable(lane[k], place.operand.code) for lane in results])
            for k, place in enumerate(writes)
        ]

        def store() -> None:
            for place, values in stores:
                self._store(place, values)

        if full is None:
            store()
            return
        with builder.if_else(full) as (then, otherwise):
            with then:
                store()
            with otherwise:
                for lane in range(source.lanes):
                    with self._inside(start, lane):
                        for place, values in stores:
                            at = builder.add(place.offset, self.word(lane))
                            builder.store(values[lane], self._at(place, at))

    def _inside(self, start: Any, lane: int) -> Any:
        """`if start + lane < count` around what is built inside."""
        position = self.builder.add(start, self.word(lane))
        return self.builder.if_then(self.builder.icmp_unsigned("<", position, self.count))

    def walks(self, position: Any, sizes: list[Any]) -> list[Any]:
        """`position` taken apart, one number per axis; `sizes` are those of all but the first."""
        builder, walks = self.builder, []
        for size in reversed(sizes):
            quotient = builder.udiv(position, size)
            walks.append(builder.sub(position, builder.mul(quotient, size)))
            position = quotient
        return [position, *reversed(walks)]

    def _place(self, operand: Operand, pointer: Any, walks: list[Any]) -> _Place:
        """Called once each, in parameter order."""
        builder, spaced = self.builder, self.source.spaced
        offset, distance = self.word(0), self.word(1)
        begin, turn, beyond = offset, None, I1(0)
        for axis, (how, walk) in enumerate(zip(operand.axes, walks, strict=True)):
            if how == BROADCAST:
                continue
            stride = self.word(1) if how == UNIT else next(self.strides)
            last = axis == len(walks) - 1
            if last:
                begin, distance = offset, stride
                if spaced:
                    distance = builder.mul(stride, self.word(WARP))
                else:
                    walk = builder.mul(walk, self.word(self.source.lanes))
            if how in (ROLLED, PADDED):
                found = _Turn(how, walk, stride, next(self.strides), next(self.strides))
                if how == PADDED and not last:
                    beyond = builder.or_(beyond, self._along(found, 0)[1])
                walk, turn = self._turned(found, 0), found if last else None
            step = walk if how == UNIT else builder.mul(walk, stride)
            offset = step if axis == 0 else builder.add(offset, step)
        return _Place(operand, pointer, offset, distance, begin, turn, beyond)

    def _turned(self, turn: _Turn, further: int) -> Any:
        """Which element of a rolled axis lies so many behind the first lane's; of a padded one the
        first, where that is none."""
        builder, (at, past) = self.builder, self._along(turn, further)
        again = builder.sub(at, turn.size) if turn.how == ROLLED else self.word(0)
        return builder.select(past, again, at)

    def _along(self, turn: _Turn, further: int) -> tuple[Any, Any]:
        """Where on the axis that would be, and whether past the end of its memory; what is before
        its beginning is, without a sign."""
        builder = self.builder
        at = builder.add(builder.add(turn.position, turn.start), self.word(further))
        return at, builder.icmp_unsigned(">=", at, turn.size)

    def _beyond(self, place: _Place, lane: int) -> Any:
        """Whether lane number `lane` of what is padded is in no memory."""
        turn = place.turn
        if turn is None or turn.how != PADDED:
            return place.beyond
        return self.builder.or_(place.beyond, self._along(turn, self._further(lane))[1])

    def _further(self, lane: int) -> int:
        """How many elements behind the first lane number `lane` is."""
        return WARP * lane if self.source.spaced else lane

    def _first(self, group: Any) -> Any:
        """The first of the spaced elements that a group of a row takes."""
        builder = self.builder
        warps = builder.and_(group, self.word(-WARP))
        return builder.add(group, builder.mul(warps, self.word(self.source.lanes - 1)))

    def _at(self, place: _Place, offset: Any) -> Any:
        base = self.builder.inttoptr(place.pointer, self.target.pointer_to(place.kind))
        return self.builder.gep(base, [offset])

    def _offset(self, place: _Place, lane: int) -> Any:
        """Which element lane number `lane` reads."""
        if place.operand.axes[-1] == BROADCAST:
            return place.offset
        at = self.builder.add(place.offset, self.builder.mul(place.distance, self.word(lane)))
        if place.turn is not None:
            along = self._turned(place.turn, self._further(lane))
            at = self.builder.add(place.begin, self.builder.mul(along, place.turn.stride))
        if not self.source.spaced:
            return at
        return self.builder.select(self.inside[lane], at, place.begin)  # what is read is not used

    def _lane(self, place: _Place, lane: int) -> Any:
        """What lane number `lane` reads."""
        return self.builder.load(self._at(place, self._offset(place, lane)))

    def _guarded(self, full: Any, reads: list[_Place], start: Any) -> list[list[Value]]:
        """Carried values of every load, per lane; lanes past the end read as zero."""
        lanes, builder = self.source.lanes, self.builder
        repeated = {  # what is read once for all lanes
            k: [builder.load(self._at(place, place.offset))] * lanes
            for k, place in enumerate(reads)
            if place.operand.axes[-1] == BROADCAST
        }
        moving = [place for k, place in enumerate(reads) if k not in repeated]
        if full is None:
            bits = [self._load(place) for place in moving]
        else:
            with builder.if_else(full) as (then, otherwise):
                with then:
                    fast = [self._load(place) for place in moving]
                    fast_end = builder.block
                with otherwise:
                    slow = [self._tail(place, start) for place in moving]
                    slow_end = builder.block
            bits = [
                [joined(builder, (a, fast_end), (b, slow_end)) for a, b in zip(*both, strict=True)]
                for both in zip(fast, slow, strict=True)
            ]
        moved = iter([
            unpacked(self.builder, items, place.kind) if self._narrow(place) else items
            for place, items in zip(moving, bits, strict=True)
        ])  # fmt: skip
        carried = [
            [self.element.loaded(x, place.operand.code) for x in repeated.get(k) or next(moved)]
            for k, place in enumerate(reads)
        ]
        if "beyond(" in self.source.text:
            carried = [
                [replace(value, beyond=self._beyond(place, n)) for n, value in enumerate(values)]
                for place, values in zip(reads, carried, strict=True)
            ]
        if "place(" in self.source.text:
            carried = [
                [replace(value, place=self._offset(place, n)) for n, value in enumerate(values)]
                for place, values in zip(reads, carried, strict=True)
            ]
        return [list(lane) for lane in zip(*carried, strict=True)]

    def _tail(self, place: _Place, start: Any) -> list[Any]:
        """What `_load` reads, of the last, incomplete group; zero past the end."""
        items = []
        for lane in range(self.source.lanes):
            inside = self._inside(start, lane)
            before = self.builder.block
            with inside:
                value = self._lane(place, lane), self.builder.block
            zero = ir.Constant(place.kind, 0), before
            items.append(joined(self.builder, zero, value))
        return packed(self.builder, items) if self._narrow(place) else items

    def _narrow(self, place: _Place) -> bool:
        """Whether lanes of an operand are moved in 32-bit words, which hold several of them."""
        kind = place.kind
        narrow = isinstance(kind, ir.IntType) and kind.width < 32 and not self.source.spaced
        return narrow and place.operand.axes[-1] == UNIT and self._accesses(place)[1] > 0

    def _accesses(self, place: _Place) -> tuple[int, int]:
        """(16-byte or smaller accesses, 4-byte words in each) for one group of lanes."""
        nbytes = self.source.lanes * ITEMSIZE[place.operand.code]
        return max(1, nbytes // 16), min(4, nbytes // 4)

    def _load(self, place: _Place) -> list[Any]:
        """One value per lane, or words that hold several."""
        lanes, builder, operand = self.source.lanes, self.builder, place.operand
        if lanes == 1:
            return [builder.load(self._at(place, place.offset))]
        if operand.axes[-1] != UNIT or self.source.spaced:
            return [self._lane(place, lane) for lane in range(lanes)]
        accesses, words = self._accesses(place)
        each = lanes // accesses
        narrow = self._narrow(place)
        vector = ir.VectorType(I32, words) if narrow else ir.VectorType(place.kind, each)
        values: list[Any] = []
        for k in range(accesses):
            at = self._vector_at(place, k * each, vector)
            packed = builder.load(at, align=each * ITEMSIZE[operand.code])
            values += [builder.extract_element(packed, I32(k)) for k in range(vector.count)]
        return values

    def _store(self, place: _Place, values: list[Any]) -> None:
        lanes, builder = self.source.lanes, self.builder
        if lanes == 1:
            builder.store(values[0], self._at(place, place.offset))
            return
        if self.source.spaced:
            for lane, value in enumerate(values):
                with builder.if_then(self.inside[lane]):
                    builder.store(value, self._at(place, self._offset(place, lane)))
            return
        accesses, _ = self._accesses(place)
        each = lanes // accesses
        for k in range(accesses):
            part = values[k * each : (k + 1) * each]
            part = packed(self.builder, part) if self._narrow(place) else part
            vector = ir.Constant(ir.VectorType(part[0].type, len(part)), ir.Undefined)
            for lane, value in enumerate(part):
                vector = builder.insert_element(vector, value, I32(lane))
            at = self._vector_at(place, k * each, vector.type)
            builder.store(vector, at, align=each * ITEMSIZE[place.operand.code])

    def _vector_at(self, place: _Place, lane: int, vector: Any) -> Any:
        """Where neighbours lie, the first of them lane number `lane`."""
        at = self._at(place, self.builder.add(place.offset, self.word(lane)))
        return self.builder.bitcast(at, self.target.pointer_to(vector))


def unpacked(builder: ir.IRBuilder, words: list[Any], kind: ir.IntType) -> list[Any]:
    """The 8- or 16-bit integers in 32-bit words; NVVM splits a load of 16-bit vectors."""
    return [
        builder.trunc(builder.lshr(word, I32(place)), kind)
        for word in words
        for place in range(0, 32, kind.width)
    ]


def packed(builder: ir.IRBuilder, values: list[Any]) -> list[Any]:
    """8- or 16-bit integers as 32-bit words, the first in the low bits."""
    bits = values[0].type.width
    words = []
    for k in range(0, len(values), 32 // bits):
        word = I32(0)
        for place, value in enumerate(values[k : k + 32 // bits]):
            wide = builder.zext(value, I32)
            word = builder.or_(word, builder.shl(wide, I32(place * bits)))
        words.append(word)
    return words


def cuda_index(builder: ir.IRBuilder) -> Any:
    """Global thread index as i64."""
    block = builder.zext(special_register(builder, "ctaid.x"), I64)
    thread = builder.zext(special_register(builder, "tid.x"), I64)
    return builder.add(builder.mul(block, I64(THREADS_PER_BLOCK)), thread)
