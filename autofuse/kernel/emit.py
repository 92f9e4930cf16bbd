"""Kernels around element functions: indices, loads, stores and parameters, as LLVM IR.

The whole body is emitted into one numba intrinsic because numba's front end costs 7 ms per op and
lane for text, but 35 ms flat this way (10 ops x 4 lanes: 245 against 35 ms).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .lower import Element
from .source import BROADCAST, ITEMSIZE, THREADS_PER_BLOCK, UNIT, Operand, Parameters, Source
from .targets import CARRIED, I32, I64, STORED, VOID, Cpu, Cuda, Value, special_register


def emit_cuda(
    source: Source, builder: ir.IRBuilder, capability: tuple[int, int], params: list[Any]
) -> None:
    """Emit a whole kernel: the work of one thread, a group of `source.lanes` elements."""
    emitter = _Emitter(source, builder, Cuda(builder, capability), params)
    group = cuda_index(builder)
    group = group if source.wide else builder.trunc(group, I32)
    lanes = emitter.word(source.lanes)
    first = builder.mul(group, lanes) if source.rank == 1 else group
    with builder.if_then(builder.icmp_unsigned("<", first, emitter.count)):
        emitter.work(emitter.walks(group, emitter.sizes), group)


def emit_cpu(source: Source, halves: bool) -> ir.Module:
    """A module with one function (start, stop, *parameters) over rows, or over columns.

    start and stop count columns where there is one axis, rows where there are more.
    halves: whether the processor converts float16.
    """
    parameters = Parameters.of(source)
    kinds = [CARRIED.get(code, I64) for code in parameters.codes]  # a pointer is a number
    module = ir.Module(source.name)
    function = ir.Function(module, ir.FunctionType(VOID, [I64, I64, *kinds]), source.name)
    start, stop, *params = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    zero = builder.ashr(start, I64(63))
    emitter = _Emitter(source, builder, Cpu(builder, halves, zero), params)
    if source.rank == 1:
        with _loop(builder, start, stop) as column:
            emitter.work([column], column)
    else:
        columns = emitter.sizes[-1]
        with _loop(builder, start, stop) as row:
            outer = emitter.walks(row, emitter.sizes[:-1])
            with _loop(builder, I64(0), columns) as column:
                emitter.work([*outer, column], column)
    builder.ret_void()
    return module


@contextmanager
def _loop(builder: ir.IRBuilder, start: Any, stop: Any) -> Iterator[Any]:
    """`for position in range(start, stop)` around what is built inside."""
    before = builder.block
    head = builder.append_basic_block("head")
    builder.branch(head)
    builder.position_at_end(head)
    position = builder.phi(I64)
    position.add_incoming(start, before)
    body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", position, stop), body, after)
    builder.position_at_end(body)
    yield position
    position.add_incoming(builder.add(position, I64(1), flags=["nsw"]), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


class _Emitter:
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
        self.strides = iter(rest)
        self.element = Element(builder, target)

    def _index(self, value: Any) -> Any:
        if value.type == self.word:
            return value
        return self.builder.zext(value, self.word)  # never negative

    def work(self, walks: list[Any], group: Any) -> None:
        """The work at one position of the loop, given per axis and as the number of the group."""
        source, builder = self.source, self.builder
        operands = [*source.loads, *source.stores]
        places = [self._offset(operand, walks) for operand in operands]
        function = ast.parse(source.text).body[0]
        assert isinstance(function, ast.FunctionDef)
        consts = [Value(*const) for const in zip(self.consts, source.consts, strict=True)]
        partial = source.lanes > 1 and source.rank == 1
        start = builder.mul(group, self.word(source.lanes))
        if partial:
            full = builder.icmp_unsigned(
                "<=", builder.add(start, self.word(source.lanes)), self.count
            )
        else:
            full = None
        reads = [
            (operand, pointer, *place)
            for operand, pointer, place in zip(source.loads, self.pointers, places, strict=False)
        ]
        lanes = self._guarded(full, reads, start)
        lanes = [[*lane, *consts] for lane in lanes]
        results = []
        for k in range(0, len(lanes), 2):
            results += self.element.run(function, lanes[k : k + 2])
        writes = list(
            zip(
                source.stores,
                self.pointers[len(source.loads) :],
                [offset for offset, _ in places[len(source.loads) :]],
                strict=True,
            )
        )
        bits = [
            [self.element.storable(lane[k], operand.code) for lane in results]
            for k, (operand, _, _) in enumerate(writes)
        ]
        if full is None:
            for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                self._store(operand, pointer, offset, values)
            return
        with builder.if_else(full) as (then, otherwise):
            with then:
                for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                    self._store(operand, pointer, offset, values)
            with otherwise:
                for lane in range(source.lanes):
                    position = builder.add(start, self.word(lane))
                    with builder.if_then(builder.icmp_unsigned("<", position, self.count)):
                        for (operand, pointer, offset), values in zip(writes, bits, strict=True):
                            at = builder.add(offset, self.word(lane))
                            builder.store(values[lane], self._at(operand, pointer, at))

    def walks(self, position: Any, sizes: list[Any]) -> list[Any]:
        """`position` taken apart, one number per axis; `sizes` are those of all but the first."""
        builder, walks = self.builder, []
        for size in reversed(sizes):
            quotient = builder.udiv(position, size)
            walks.append(builder.sub(position, builder.mul(quotient, size)))
            position = quotient
        return [position, *reversed(walks)]

    def _offset(self, operand: Operand, walks: list[Any]) -> tuple[Any, Any]:
        """(element offset of an operand's first lane, distance of the lanes).

        Called once each, in parameter order.
        """
        builder = self.builder
        offset, distance = self.word(0), self.word(1)
        for axis, (how, walk) in enumerate(zip(operand.axes, walks, strict=True)):
            if how == BROADCAST:
                continue
            stride = self.word(1) if how == UNIT else next(self.strides)
            if axis == len(walks) - 1:
                walk, distance = builder.mul(walk, self.word(self.source.lanes)), stride
            step = walk if how == UNIT else builder.mul(walk, stride)
            offset = step if axis == 0 else builder.add(offset, step)
        return offset, distance

    def _at(self, operand: Operand, pointer: Any, offset: Any) -> Any:
        base = self.target.pointer(pointer, STORED[operand.code])
        return self.builder.gep(base, [offset])

    def _guarded(
        self, full: Any, reads: list[tuple[Operand, Any, Any, Any]], start: Any
    ) -> list[list[Value]]:
        """Carried values of every load, per lane; lanes past the end read as zero."""
        lanes, builder = self.source.lanes, self.builder
        repeated = [
            self._load_one(operand, pointer, offset) if operand.axes[-1] == BROADCAST else None
            for operand, pointer, offset, _ in reads
        ]
        moving = [read for read, value in zip(reads, repeated, strict=True) if value is None]
        operands = [operand for operand, *_ in moving]
        if full is None:
            bits = [self._load(*read) for read in moving]
        else:
            with builder.if_else(full) as (then, otherwise):
                with then:
                    fast = [self._load(*read) for read in moving]
                    fast_end = builder.block
                with otherwise:
                    slow = [self._tails(*read, start) for read in moving]
                    slow_end = builder.block
            bits = []
            for whole, tail in zip(fast, slow, strict=True):
                merged = []
                for a, b in zip(whole, tail, strict=True):
                    phi = builder.phi(a.type)
                    phi.add_incoming(a, fast_end)
                    phi.add_incoming(b, slow_end)
                    merged.append(phi)
                bits.append(merged)
        moved = iter([self._items(*pair) for pair in zip(operands, bits, strict=True)])
        columns = []
        for (operand, *_), value in zip(reads, repeated, strict=True):
            column = [value] * lanes if value is not None else next(moved)
            columns.append([self.element.loaded(item, operand.code) for item in column])
        return [[column[lane] for column in columns] for lane in range(lanes)]

    def _load_one(self, operand: Operand, pointer: Any, offset: Any) -> Any:
        return self.builder.load(self._at(operand, pointer, offset))

    def _tails(
        self, operand: Operand, pointer: Any, offset: Any, distance: Any, start: Any
    ) -> list[Any]:
        """What `_load` reads, of the last group."""
        lanes = range(self.source.lanes)
        items = [self._tail(operand, pointer, offset, distance, start, k) for k in lanes]
        return self._packed(items) if self._narrow(operand) else items

    def _tail(
        self, operand: Operand, pointer: Any, offset: Any, distance: Any, start: Any, lane: int
    ) -> Any:
        """Element `lane` of the last, incomplete group; zero past the end."""
        builder = self.builder
        position = builder.add(start, self.word(lane))
        before = builder.block
        zero = ir.Constant(STORED[operand.code], 0)
        with builder.if_then(builder.icmp_unsigned("<", position, self.count)):
            value = self._load_one(operand, pointer, self._lane(offset, distance, lane))
            inside = builder.block
        phi = builder.phi(zero.type)
        phi.add_incoming(zero, before)
        phi.add_incoming(value, inside)
        return phi

    def _narrow(self, operand: Operand) -> bool:
        """Whether lanes of an operand are moved in 32-bit words, which hold several of them."""
        kind = STORED[operand.code]
        narrow = isinstance(kind, ir.IntType) and kind.width < 32 and operand.axes[-1] == UNIT
        return narrow and self.source.lanes > 1 and self._words(operand)[1] > 0

    def _items(self, operand: Operand, loaded: list[Any]) -> list[Any]:
        """The lanes of what `_load` has read."""
        if not self._narrow(operand):
            return loaded
        return self._unpacked(loaded, STORED[operand.code])

    def _words(self, operand: Operand) -> tuple[int, int]:
        """(16-byte or smaller accesses, 4-byte words in each) for one group of lanes."""
        nbytes = self.source.lanes * ITEMSIZE[operand.code]
        return max(1, nbytes // 16), min(4, nbytes // 4)

    def _lane(self, offset: Any, distance: Any, lane: int) -> Any:
        builder = self.builder
        return builder.add(offset, builder.mul(distance, self.word(lane)))

    def _load(self, operand: Operand, pointer: Any, offset: Any, distance: Any) -> list[Any]:
        """One value per lane, or words that hold several."""
        lanes, builder = self.source.lanes, self.builder
        if lanes == 1:
            return [self._load_one(operand, pointer, offset)]
        if operand.axes[-1] != UNIT:
            return [
                self._load_one(operand, pointer, self._lane(offset, distance, lane))
                for lane in range(lanes)
            ]
        accesses, words = self._words(operand)
        each = lanes // accesses
        values: list[Any] = []
        for k in range(accesses):
            at = builder.add(offset, self.word(k * each))
            kind = STORED[operand.code]
            narrow = self._narrow(operand)
            vector = ir.VectorType(I32, words) if narrow else ir.VectorType(kind, each)
            place = builder.bitcast(self._at(operand, pointer, at), self._vector_pointer(vector))
            packed = builder.load(place, align=each * ITEMSIZE[operand.code])
            values += [builder.extract_element(packed, I32(k)) for k in range(vector.count)]
        return values

    def _store(self, operand: Operand, pointer: Any, offset: Any, values: list[Any]) -> None:
        lanes, builder = self.source.lanes, self.builder
        if lanes == 1:
            builder.store(values[0], self._at(operand, pointer, offset))
            return
        accesses, words = self._words(operand)
        each = lanes // accesses
        for k in range(accesses):
            part = values[k * each : (k + 1) * each]
            kind: Any = part[0].type
            if words and isinstance(kind, ir.IntType) and kind.width < 32:
                part, kind = self._packed(part), I32
            vector = ir.Constant(ir.VectorType(kind, len(part)), ir.Undefined)
            for lane, value in enumerate(part):
                vector = builder.insert_element(vector, value, I32(lane))
            at = builder.add(offset, self.word(k * each))
            place = self._at(operand, pointer, at)
            place = builder.bitcast(place, self._vector_pointer(vector.type))
            builder.store(vector, place, align=each * ITEMSIZE[operand.code])

    def _unpacked(self, words: list[Any], kind: ir.IntType) -> list[Any]:
        """The 8- or 16-bit integers in 32-bit words; NVVM splits a load of 16-bit vectors."""
        builder, bits = self.builder, kind.width
        return [
            builder.trunc(builder.lshr(word, I32(place)), kind)
            for word in words
            for place in range(0, 32, bits)
        ]

    def _packed(self, values: list[Any]) -> list[Any]:
        """8- or 16-bit integers as 32-bit words, the first in the low bits."""
        builder, bits = self.builder, values[0].type.width
        words = []
        for k in range(0, len(values), 32 // bits):
            word = I32(0)
            for place, value in enumerate(values[k : k + 32 // bits]):
                wide = builder.zext(value, I32)
                word = builder.or_(word, builder.shl(wide, I32(place * bits)))
            words.append(word)
        return words

    def _vector_pointer(self, vector: Any) -> Any:
        return vector.as_pointer(1) if isinstance(self.target, Cuda) else vector.as_pointer()


def cuda_index(builder: ir.IRBuilder) -> Any:
    """Global thread index as i64."""
    block = builder.zext(special_register(builder, "ctaid.x"), I64)
    thread = builder.zext(special_register(builder, "tid.x"), I64)
    return builder.add(builder.mul(block, I64(THREADS_PER_BLOCK)), thread)
