"""The emulator of a GPU's threads that other tests run kernels in: `simt`."""

import numpy as np
import pytest
import simt
from llvmlite import ir

U32, U64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
BASE = 1 << 32


def kernel(make):
    """The kernel that `make(builder, tid, pointer)` makes, of one parameter."""
    module = ir.Module("kernel")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [U64]), "kernel")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    tid = builder.call(declared(module, "llvm.nvvm.read.ptx.sreg.tid.x", U32), [])
    make(builder, tid, builder.inttoptr(function.args[0], U32.as_pointer()))
    if not builder.block.is_terminated:
        builder.ret_void()
    return simt.Translation(function)


def declared(module, name, result, *params):
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, params), name)


def barrier(builder):
    builder.call(declared(builder.module, simt.BARRIER, ir.VoidType()), [])


def shuffle(builder, mode, value, by):
    result = ir.LiteralStructType((U32, ir.IntType(1)))
    function = declared(builder.module, simt.SHUFFLE, result, *[U32] * 5)
    moved = builder.call(function, [U32(-1), U32(mode), value, U32(by), U32(31)])
    return builder.extract_value(moved, 0)


def shared(builder, count):
    kind = ir.ArrayType(U32, count)
    variable = ir.GlobalVariable(builder.module, kind, "variable", addrspace=3)
    return lambda place: builder.gep(variable, [U32(0), place])


def stored(make, blocks=1, threads=64, size=None, at=BASE):
    """What a kernel has stored, of 32 bits each."""
    memory = np.zeros(blocks * threads if size is None else size, np.uint32)
    buffers = {BASE: memory.view(np.uint8)}
    simt.execute(kernel(make), ["u64"], blocks, threads, [at], simt.Memory(buffers))
    return memory.tolist()


def put(builder, pointer, place, value):
    builder.store(value, builder.gep(pointer, [place]))


def test_threads_take_their_own_ways_and_meet_again():
    """Each goes through a loop as often as its number says, two values taking turns."""

    def make(builder, tid, pointer):
        before, loop, after = builder.block, *map(builder.append_basic_block, ("loop", "after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        turn, a, b = (builder.phi(U32) for _ in range(3))
        following = builder.add(turn, U32(1))
        for phi, first, again in ((turn, 0, following), (a, 1, b), (b, 2, a)):
            phi.add_incoming(U32(first), before)
            phi.add_incoming(again, loop)
        builder.cbranch(builder.icmp_unsigned("<", turn, tid), loop, after)
        builder.position_at_end(after)
        xor = shuffle(builder, 3, a, 1)
        put(builder, pointer, tid, builder.add(builder.mul(a, U32(1000)), xor))

    mine = [1 if k % 2 == 0 else 2 for k in range(64)]
    assert stored(make) == [1000 * mine[k] + mine[k ^ 1] for k in range(64)]


@pytest.mark.parametrize("blocks", [1, 3, 2 * simt.AT_ONCE // 64 + 1])
def test_blocks_have_shared_memory_of_their_own(blocks):
    def make(builder, tid, pointer):
        slot = shared(builder, 64)
        name = "llvm.nvvm.read.ptx.sreg.ctaid.x"
        block = builder.call(declared(builder.module, name, U32), [])
        first = builder.mul(block, U32(64))
        builder.store(builder.add(first, tid), slot(tid))
        barrier(builder)
        other = builder.load(slot(builder.sub(U32(63), tid)))
        put(builder, pointer, builder.add(first, tid), other)

    assert stored(make, blocks) == [64 * b + 63 - k for b in range(blocks) for k in range(64)]


@pytest.mark.parametrize("mode,by,want", [
    (0, 5, lambda lane: 5),
    (2, 3, lambda lane: lane + 3 if lane + 3 < 32 else lane),
    (3, 16, lambda lane: lane ^ 16),
])  # fmt: skip
def test_shuffles(mode, by, want):
    def make(builder, tid, pointer):
        put(builder, pointer, tid, shuffle(builder, mode, tid, by))

    assert stored(make) == [k // 32 * 32 + want(k % 32) for k in range(64)]


def test_who_waits_for_one_that_has_gone_is_found():
    def make(builder, tid, pointer):
        with builder.if_then(builder.icmp_unsigned("<", tid, U32(40))):
            barrier(builder)

    with pytest.raises(AssertionError, match="wait for others"):
        stored(make)


def test_a_shuffle_without_all_of_the_warp_is_found():
    def make(builder, tid, pointer):
        with builder.if_then(builder.icmp_unsigned("<", tid, U32(33))):
            put(builder, pointer, tid, shuffle(builder, 3, tid, 1))

    with pytest.raises(AssertionError, match="wait for others"):
        stored(make)


def test_memory_is_checked():
    def make(builder, tid, pointer):
        put(builder, pointer, tid, tid)

    assert stored(make) == [*range(64)]
    with pytest.raises(AssertionError, match="beyond the buffer"):
        stored(make, size=63)
    with pytest.raises(AssertionError, match="not aligned"):
        stored(make, size=65, at=BASE + 2)

    def unwritten(builder, tid, pointer):
        slot = shared(builder, 64)
        with builder.if_then(builder.icmp_unsigned("!=", tid, U32(7))):
            builder.store(tid, slot(tid))
        barrier(builder)
        put(builder, pointer, tid, builder.load(slot(tid)))

    with pytest.raises(AssertionError, match="nothing was written there"):
        stored(unwritten)


def races(builder, tid, pointer, barriers):
    """Neighbours exchange a word, twice over the same memory."""
    slot, value = shared(builder, 65), tid
    for k in range(2):
        builder.store(value, slot(tid))
        if 2 * k in barriers:
            barrier(builder)
        value = builder.load(slot(builder.xor(tid, U32(1))))
        if 2 * k + 1 in barriers:
            barrier(builder)
    put(builder, pointer, tid, value)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_exchanges_without_a_barrier_are_found(missing):
    def make(builder, tid, pointer):
        races(builder, tid, pointer, {0, 1, 2, 3} - {missing})

    if missing is None:
        assert stored(make) == [*range(64)]
        return
    with pytest.raises(AssertionError, match="another thread"):
        stored(make)


def test_what_several_threads_write_is_one_value():
    assert stored(lambda builder, tid, at: put(builder, at, U32(0), U32(7)))[0] == 7
    with pytest.raises(AssertionError, match="several threads"):
        stored(lambda builder, tid, at: put(builder, at, U32(0), tid))


@np.errstate(all="ignore")
def test_sums_of_products_are_rounded_once():
    one, most = np.float32(1), np.float32(np.inf)
    assert simt.fma(np.float32(4097), np.float32(4097), np.float32(2**-30)) == 16785410
    assert simt.fma(np.float32(4097), np.float32(4097), np.float32(-(2**-30))) == 16785408
    assert np.isnan(simt.fma(most, one, -most)) and simt.fma(np.float32(3e38), most, one) == most


def test_numbers_wrap_and_keep_their_sign():
    def make(builder, tid, pointer):
        below = builder.sub(tid, U32(3))  # of the first three, beyond the end
        is_below = builder.icmp_signed("<", below, U32(0))
        wide = builder.sext(below, U64)
        near = builder.gep(pointer, [builder.add(wide, U64(3))])
        number = builder.bitcast(builder.sitofp(below, F32), U32)
        builder.store(builder.select(is_below, number, below), near)

    want = [int(np.float32(k - 3).view(np.uint32)) for k in range(3)] + [*range(61)]
    assert stored(make) == want
