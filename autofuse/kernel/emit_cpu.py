"""Kernels for the CPU: loops around element functions, and what calls them, as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .emit import Emitter
from .source import Parameters, Source
from .targets import CARRIED, I32, I64, VOID, Cpu


def emit_cpu(source: Source, halves: bool) -> ir.Module:
    """A module with a function (start, stop, parameters), and what launches such a one.

    start and stop count columns where there is one axis, rows where there are more. parameters: the
    address of slots of 8 bytes. halves: whether the processor converts float16.
    """
    parameters = Parameters.of(source)
    kinds = [CARRIED.get(code, I64) for code in parameters.codes]  # a pointer is a number
    module = ir.Module(source.name)
    function = ir.Function(module, ir.FunctionType(VOID, [I64, I64, *kinds]), "loop")
    function.linkage = "internal"
    function.attributes.add("noinline")
    start, stop, *params = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    zero = builder.ashr(start, I64(63))
    emitter = Emitter(source, builder, Cpu(builder, halves, zero), params)
    accesses = _Distinct(module, [], name=str(len(module.metadata)))
    if source.rank == 1:
        with _loop(builder, start, stop, accesses) as column:
            emitter.work([column], column)
    else:
        columns = emitter.sizes[-1]
        with _odometer(builder, start, stop, emitter.walks, emitter.sizes[:-1]) as outer:
            if len(source.stores) > 2:
                # parts of one value lie apart in a row and not over all rows, at which LLVM would
                # look before the loops, and not vectorise, if it knew what a row is
                unknown = ir.FunctionType(I64, [I64])
                outer = [builder.asm(unknown, "", "=r,0", [walk], False) for walk in outer]
            with _loop(builder, I64(0), columns, accesses) as column:
                emitter.work([*outer, column], column)
    builder.ret_void()
    for block in function.blocks:
        for instruction in block.instructions:
            if isinstance(instruction, (ir.LoadInstr, ir.StoreInstr)):
                instruction.set_metadata("llvm.access.group", accesses)
    _emit_entry(module, source.name, function)
    _emit_launch(module)
    return module


def _emit_entry(module: ir.Module, name: str, loop: ir.Function) -> None:
    """The function `name` (start, stop, parameters), which calls `loop` with the parameters."""
    entry = ir.Function(module, ir.FunctionType(VOID, [I64, I64, I64]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    start, stop, slots = entry.args
    values = []
    for k, parameter in enumerate(loop.args[2:]):
        slot = builder.inttoptr(builder.add(slots, I64(8 * k)), parameter.type.as_pointer())
        values.append(builder.load(slot))
    builder.call(loop, [start, stop, *values])
    builder.ret_void()


def _emit_launch(module: ir.Module) -> None:
    """`launch`: what cuLaunchKernel takes, as words; an entry, and how many steps it makes."""
    launch = ir.Function(module, ir.FunctionType(I32, [I64] * 11), "launch")
    builder = ir.IRBuilder(launch.append_basic_block())
    entry, steps, parameters = launch.args[0], launch.args[1], launch.args[9]
    kind = ir.FunctionType(VOID, [I64, I64, I64]).as_pointer()
    builder.call(builder.inttoptr(entry, kind), [I64(0), steps, parameters])
    builder.ret(I32(0))


class _Distinct(ir.MDValue):
    """Metadata that is equal to none other."""

    def descr(self, buf: list[str]) -> None:
        buf.append("distinct ")
        super().descr(buf)


@contextmanager
def _loop(
    builder: ir.IRBuilder, start: Any, stop: Any, accesses: ir.MDValue | None = None
) -> Iterator[Any]:
    """`for position in range(start, stop)` around what is built inside.

    accesses: to memory that no two iterations have in common, where one of them writes to it. What
    is overwritten has one place in each iteration; LLVM, which would look whether memory overlaps,
    would then not vectorise.
    """
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
    again = builder.branch(head)
    if accesses is not None:
        module = builder.module
        apart = module.add_metadata(
            [ir.MetaDataString(module, "llvm.loop.parallel_accesses"), accesses]
        )
        loop = _Distinct(module, [apart], name=str(len(module.metadata)))
        loop.operands = (loop, apart)
        again.set_metadata("llvm.loop", loop)
    builder.position_at_end(after)


@contextmanager
def _odometer(
    builder: ir.IRBuilder, start: Any, stop: Any, walks: Callable[..., list[Any]], sizes: list[Any]
) -> Iterator[list[Any]]:
    """The same loop, of which what is built inside gets the position as one number per axis.

    They count on: to take each position apart takes longer than a short row.
    """
    first = walks(start, sizes)
    before = builder.block
    with _loop(builder, start, stop) as position:
        body = builder.block
        builder.position_at_start(position.parent)
        numbers = [builder.phi(I64) for _ in first]
        builder.position_at_end(body)
        yield numbers
        carry, following = I64(1), []
        for number, size in zip(reversed(numbers), [*reversed(sizes), None], strict=True):
            value = builder.add(number, carry)
            if size is not None:
                full = builder.icmp_unsigned("==", value, size)
                carry = builder.zext(full, I64)
                value = builder.select(full, I64(0), value)
            following.append(value)
        for number, begin, value in zip(numbers, first, reversed(following), strict=True):
            number.add_incoming(begin, before)
            number.add_incoming(value, builder.block)
