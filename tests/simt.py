"""Kernels for CUDA without a GPU: their LLVM IR as numpy, all threads at once, in lockstep.

What runs is the very IR that is compiled. Each segment of it, a basic block or a part of one up to
a barrier or a shuffle, is a function over those threads that stand before it, with an array for
each value. Memory is checked: every access lies in a buffer and is aligned to its size, and shared
memory is read where it was written, with a barrier in between if by another thread; threads of a
warp meet at shuffles, those of a block at barriers. Of what happens between two of these, no order
is promised.
"""

import ctypes
from functools import cache

import numpy as np
from llvmlite import ir

from autofuse.kernel.emit import emit_cuda
from autofuse.kernel.row_emit import emit_rows
from autofuse.kernel.source import THREADS_PER_BLOCK, Parameters

KINDS = {"u64": ir.IntType(64), "i64": ir.IntType(64), "i32": ir.IntType(32),
         "f32": ir.FloatType(), "f64": ir.DoubleType()}  # fmt: skip
F32, F64, U32, U64, I64 = np.float32, np.float64, np.uint32, np.uint64, np.int64
ALL = slice(None)  # threads
WARP = 32
AT_ONCE = 1 << 15  # threads, of whole blocks


def module_of(source, capability=(9, 0)):
    """The kernel of `source` as an LLVM module of one function."""
    module = ir.Module("simt")
    kinds = [KINDS[code] for code in Parameters.of(source).codes]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "kernel")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit = emit_rows if source.rows is not None else emit_cuda
    emit(source, builder, capability, list(function.args))
    builder.ret_void()
    return function


# --- arithmetic of float32, of numbers and of arrays ----------------------------------------------


def fma(a, b, c):
    product, c = F64(a) * F64(b), F64(c)  # exact
    total = product + c
    halfway = total.view(I64) & 0x1FFFFFFF == 0x10000000  # between two of float32, as it seems
    if halfway.any():
        part = total - product
        rest = (product - (total - part)) + (c - part)  # what the sum has lost
        nearer = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
        total = np.where(halfway & (rest != 0), nearer, total)
    return F32(total)


def saturated(a, b, c):
    value = fma(a, b, c)
    return F32(np.where(value == value, np.clip(value, F32(0), F32(1)), F32(0)))


def downward(a, b, c):
    exact = F64(a) * F64(b) + F64(c)
    near = F32(exact)
    return F32(np.where(F64(near) > exact, np.nextafter(near, F32(-np.inf)), near))


def ex2(x):
    with np.errstate(all="ignore"):
        return F32(np.exp2(F64(x)))


def log(x):
    with np.errstate(all="ignore"):
        return F32(np.log(F64(x)))


def lg2(x):
    with np.errstate(all="ignore"):
        return F32(np.log2(F64(x)))


def exp_parts(x):
    """Two factors of the exponential."""
    scaled = saturated(x, bits_float(0x3BBB989D), bits_float(0x3F000000))
    whole = downward(scaled, bits_float(0x437C0000), bits_float(0x4B400001))
    rest = fma(x, bits_float(0x3FB8AA3B), F32(12583039.0) - whole)
    rest = fma(x, bits_float(0x32A57060), rest)
    return bits_float(float_bits(whole) << U32(23)), ex2(rest)


def exp(x):
    power, fraction = exp_parts(x)
    return F32(power * fraction)


def bits_float(bits):
    return U32(bits).view(F32)


def float_bits(value):
    return F32(value).view(U32)


def fmax(a, b):
    return F32(np.where(a != a, b, np.where(b > a, b, a)))


def bf16(x):
    """The word whose upper half is `x` as bfloat16."""
    bits = float_bits(x)
    rounded = bits + U32(0x7FFF) + (bits >> U32(16) & U32(1)) & U32(0xFFFF0000)
    return np.where(x != x, U32(0x7FFF0000), rounded)


def half_bits(x):
    with np.errstate(all="ignore"):
        return U32(np.float16(x).view(np.uint16))


def half_float(bits):
    return F32(np.uint16(bits).view(np.float16))


LIBDEVICE = {
    "__nv_fadd_rn": lambda a, b: F32(a + b), "__nv_fsub_rn": lambda a, b: F32(a - b),
    "__nv_fmul_rn": lambda a, b: F32(a * b), "__nv_fmaf": fma,
    "__nv_dadd_rn": lambda a, b: F64(a + b), "__nv_dsub_rn": lambda a, b: F64(a - b),
    "__nv_dmul_rn": lambda a, b: F64(a * b),
    "__nv_fsqrt_rn": lambda a: F32(np.sqrt(a)), "__nv_rsqrtf": lambda a: F32(1 / np.sqrt(F64(a))),
    "__nv_fabsf": abs, "__nv_expf": exp, "__nv_logf": log, "__nv_fmaxf": fmax,
    "__nv_fminf": lambda a, b: -fmax(-a, -b), "__nv_tanhf": lambda a: F32(np.tanh(F64(a))),
    "__nv_log1pf": lambda a: F32(np.log1p(F64(a))),
}  # fmt: skip
ASSEMBLY = {
    "": lambda *all: all if len(all) > 1 else all[0],
    "ex2.approx.ftz.f32 $0, $1;": ex2,
    "fma.rn.sat.f32 $0, $1, 0f3BBB989D, 0f3F000000;":
        lambda x: saturated(x, bits_float(0x3BBB989D), bits_float(0x3F000000)),
    "fma.rm.f32 $0, $1, 0f437C0000, 0f4B400001;":
        lambda x: downward(x, bits_float(0x437C0000), bits_float(0x4B400001)),
    "fma.rn.f32 $0, $1, 0f3FB8AA3B, $2;": lambda x, y: fma(x, bits_float(0x3FB8AA3B), y),
    "fma.rn.f32 $0, $1, 0f32A57060, $2;": lambda x, y: fma(x, bits_float(0x32A57060), y),
    # the last bits of these are lost to 16 bits
    "rcp.approx.ftz.f32 $0, $1;": lambda a: F32(1 / a),
    "div.full.f32 $0, $1, $2;": lambda a, b: F32(a / b),
    "lg2.approx.f32 $0, $1;": lg2,
    "sqrt.approx.f32 $0, $1;": lambda a: F32(np.sqrt(a)),
    "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;": bf16,
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda low, high: bf16(low) >> U32(16) | bf16(high),
    "cvt.rn.f16x2.f32 $0, $2, $1;": lambda low, high: half_bits(low) | half_bits(high) << U32(16),
    "cvt.rn.f16.f32 $0, $1;": half_bits,
    "cvt.f32.f16 $0, $1;": half_float,
}  # fmt: skip


def pair(kind):
    def unpack(word):
        halves = word & U32(0xFFFF), word >> U32(16)
        return [half_float(h) if kind == "f16" else bits_float(h << U32(16)) for h in halves]

    def run(a, b, c):
        low, high = (fma(*xs) for xs in zip(*map(unpack, (a, b, c)), strict=True))
        return ASSEMBLY[f"cvt.rn.{kind}x2.f32 $0, $2, $1;"](low, high)

    return run


for _kind in ("f16", "bf16"):
    ASSEMBLY[f"fma.rn.{_kind}x2 $0, $1, $2, $3;"] = pair(_kind)


# --- memory ---------------------------------------------------------------------------------------


def size_of(kind):
    if isinstance(kind, (ir.ArrayType, ir.VectorType)):
        return kind.count * size_of(kind.element)
    if isinstance(kind, ir.IntType):
        return max(1, kind.width // 8)
    return 4 if isinstance(kind, ir.FloatType) else 8


def shape_of(kind):
    return (kind.count,) if isinstance(kind, ir.VectorType) else ()


def dtype_of(kind):
    """Of one value of a type, of one element of a vector, or of what a shuffle gives."""
    if isinstance(kind, ir.VectorType):
        return dtype_of(kind.element)
    if isinstance(kind, ir.LiteralStructType):
        return dtype_of(kind.elements[0])
    if isinstance(kind, ir.IntType):
        return np.dtype(bool if kind.width == 1 else f"u{size_of(kind)}")
    if isinstance(kind, ir.PointerType):
        return np.dtype(U64)
    return np.dtype({ir.FloatType: F32, ir.DoubleType: F64}[type(kind)])


class Memory:
    """Buffers at addresses that are multiples of 2 ** 32."""

    def __init__(self, buffers):
        self.buffers = buffers  # base -> bytes, as a numpy array of uint8

    def words(self, addresses, size, dtype):
        """The memory at `addresses`, of `size` bytes each, as an array; where in it they are."""
        base = int(addresses[0]) >> 32 << 32
        offsets, buffer = addresses - U64(base), self.buffers[base]
        assert int(offsets.max()) + size <= buffer.size, "beyond the buffer"
        whole = buffer[: buffer.size // dtype.itemsize * dtype.itemsize]
        return whole.view(dtype), offsets // U64(dtype.itemsize)

    def place(self, addresses, kind):
        size, dtype = size_of(kind), dtype_of(kind)
        assert not (addresses % U64(size)).any(), "not aligned"
        words, places = self.words(addresses, size, dtype)
        for count in shape_of(kind):
            places = places[:, None] + np.arange(count, dtype=U64)
        return words, places.astype(I64)

    def load(self, addresses, kind):
        words, places = self.place(addresses, kind)
        return words[places]

    def store(self, addresses, kind, values):
        words, places = self.place(addresses, kind)
        words[places] = values
        there, given = words[places], np.broadcast_to(values, places.shape)
        same = (there == given) | ((there != there) & (given != given))
        assert same.all(), "other values by several threads"


class ProcessMemory(Memory):
    """That of this process, which nobody checks but for alignment."""

    FIRST = 1 << 12
    EVERY = np.frombuffer((ctypes.c_uint8 * ((1 << 47) - FIRST)).from_address(FIRST), np.uint8)

    def __init__(self):
        super().__init__({})

    def words(self, addresses, size, dtype):
        return self.EVERY.view(dtype), (addresses - U64(self.FIRST)) // U64(dtype.itemsize)


class SharedMemory(Memory):
    """That of several blocks, of which each begins `size` bytes after another.

    Between two barriers of a block no two threads may use a byte that one of them writes.
    """

    NOBODY, SEVERAL = -1, -2

    def __init__(self, size, blocks):
        self.size, self.turn = size, np.zeros(blocks, I64)  # barriers that a block has passed
        self.bytes = np.zeros(size * blocks, np.uint8)
        # of each byte: the last thread that has written it, or read it, and when
        self.writer, self.reader = (np.full(size * blocks, self.NOBODY) for _ in range(2))
        self.written, self.read = (np.full(size * blocks, -1) for _ in range(2))

    def words(self, addresses, size, dtype):
        return self.bytes.view(dtype), addresses // U64(dtype.itemsize)

    def load(self, addresses, kind, threads):
        each, now, own = self.used(addresses, kind, threads)
        assert (self.writer[each] != self.NOBODY).all(), "nothing was written there"
        others = (self.written[each] == now) & (self.writer[each] != own)
        assert not others.any(), "read beside a write of another thread"
        several = (self.read[each] == now) & (self.reader[each] != own)
        _, which, times = np.unique(addresses, return_inverse=True, return_counts=True)
        several |= (times[which] > 1)[:, None]
        self.reader[each], self.read[each] = np.where(several, self.SEVERAL, own), now
        return super().load(addresses, kind)

    def store(self, addresses, kind, values, threads):
        each, now, own = self.used(addresses, kind, threads)
        for when, who in ((self.written, self.writer), (self.read, self.reader)):
            others = (when[each] == now) & (who[each] != own)
            assert not others.any(), "written beside a use by another thread"
        assert len(np.unique(addresses)) == len(addresses), "written by several threads"
        self.writer[each], self.written[each] = own, now
        super().store(addresses, kind, values)

    def used(self, addresses, kind, threads):
        """The bytes of each access, in which turn of its block that is, and by whom."""
        each = addresses.astype(I64)[:, None] + np.arange(size_of(kind))
        return each, self.turn[each // self.size], np.broadcast_to(threads[:, None], each.shape)


# --- from IR to Python ----------------------------------------------------------------------------

SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
FLOATS = {"fadd": "+", "fsub": "-", "fmul": "*", "fdiv": "/"}
INTEGERS = {"add": "+", "sub": "-", "mul": "*", "udiv": "//", "and": "&", "or": "|",
            "xor": "^", "shl": "<<", "lshr": ">>"}  # fmt: skip
BARRIER, SHUFFLE = "llvm.nvvm.barrier0", "llvm.nvvm.shfl.sync.i32"
REGISTERS = {"tid.x": "tid[i]", "ctaid.x": "ctaid[i]", "nctaid.x": "nctaid", "tid.z": "U32(0)"}


def waits_at(instruction):
    """BARRIER or SHUFFLE where threads wait for each other there, else None."""
    callee = getattr(instruction, "callee", None)
    name = getattr(callee, "name", None)
    return name if name in (BARRIER, SHUFFLE) else None


class Segment:
    """Instructions that threads run together; `waits`: what is between them and the next ones."""

    def __init__(self, block, instructions):
        self.block, self.instructions = block, instructions
        self.waits = waits_at(instructions[-1])


class Translation:
    """A kernel as functions of Python, `steps`, one for each segment.

    Of the threads `i` that are to run it, n at a time, each gives who goes on where. Values that
    other segments use are kept in lists, `v`.
    """

    def __init__(self, function):
        self.space = {"np": np, "F32": F32, "U32": U32, "U64": U64, "put": put, "part": part,
                      "spread": spread}  # fmt: skip
        self.names, self.shared, self.size = {}, {}, 0  # where its variables are in shared memory
        for shared in function.module.global_values:
            if isinstance(shared, ir.GlobalVariable):
                self.shared[shared.name] = self.size
                self.size += -(-size_of(shared.value_type) // 16) * 16
        for k, arg in enumerate(function.args):
            self.names[id(arg)] = f"args[{k}]"
        self.segments, self.first = [], {}
        for block in function.blocks:
            self.first[id(block)] = len(self.segments)
            own = []
            for instruction in block.instructions:
                own.append(instruction)
                if waits_at(instruction) or instruction is block.terminator:
                    self.segments.append(Segment(block, own))
                    own = []
        self.kept = {}  # of values that other segments use, their number and type
        self._find_kept()
        for segment in self.segments:
            for instruction in segment.instructions:
                self.names[id(instruction)] = f"x{len(self.names)}"
        self.steps = [self.step(k, segment) for k, segment in enumerate(self.segments)]

    def _find_kept(self):
        made = {id(it): segment for segment in self.segments for it in segment.instructions}
        last = {id(segment.block): segment for segment in self.segments}

        def keep(value):
            self.kept.setdefault(id(value), (len(self.kept), value.type))

        def read(value, segment):
            if made.get(id(value), segment) is not segment:
                keep(value)

        for segment in self.segments:
            for it in segment.instructions:
                if isinstance(it, ir.instructions.PhiInstr):
                    keep(it)
                    for value, block in it.incomings:
                        read(value, last[id(block)])
                    continue
                for value in it.operands:
                    read(value, segment)
                if waits_at(it) == SHUFFLE:
                    for value in (it, *(value for value in it.args if id(value) in made)):
                        keep(value)

    def step(self, k, segment):
        self.segment, self.there = segment, set()  # values that are at hand
        head = "v, i, n, all, args, tid, block, ctaid, nctaid, memory, shared"
        lines = [f"def segment{k}({head}):"]
        self.line = lambda text: lines.append(f"    {text}")
        for it in segment.instructions:
            self.instruction(it, k)
            if not isinstance(it, ir.instructions.PhiInstr):
                self.there.add(id(it))
        exec("\n".join(lines), self.space)
        return self.space[f"segment{k}"]

    def value(self, value):
        if isinstance(value, ir.GlobalVariable):
            return f"U64({self.shared[value.name]})"
        if isinstance(value, ir.Constant):
            name = f"k{len(self.space)}"
            self.space[name] = self.constant(value)
            return name
        name = self.names[id(value)]
        if id(value) in self.kept and id(value) not in self.there:
            self.there.add(id(value))
            self.line(f"{name} = v[{self.kept[id(value)][0]}][i]")
        return name

    def constant(self, value):
        kind, constant = value.type, value.constant
        if isinstance(kind, ir.VectorType):
            return np.zeros((1, *shape_of(kind)), dtype_of(kind))
        if constant is ir.Undefined:
            constant = 0
        if isinstance(kind, ir.IntType) and kind.width > 1:
            constant = int(constant) & (1 << kind.width) - 1
        return dtype_of(kind).type(constant)

    def signed(self, value):
        return f"({self.value(value)}).view({self.named(np.dtype(f'i{size_of(value.type)}'))})"

    def named(self, thing):
        name = f"n{len(self.space)}"
        self.space[name] = thing
        return name

    def taken(self, target):
        """What threads take along from this segment to another block: where it is kept, and it."""
        for phi in target.instructions:
            if isinstance(phi, ir.instructions.PhiInstr):
                (value,) = [v for v, block in phi.incomings if block is self.segment.block]
                yield self.kept[id(phi)][0], self.value(value)

    def go(self, target, test):
        """Those of the threads go on there for which `test` holds, with what they take along."""
        taken = list(self.taken(target))
        self.line(f"among = {test}")
        self.line("if among.any():")
        self.line("    own = i if among.all() else all[i][among]")
        if taken:
            places, values = zip(*taken, strict=True)
            parts = ", ".join(f"part({value}, among, n)" for value in values)
            self.line(f"    for at, x in zip({places}, ({parts},)): put(v, at, own, x)")
        self.line(f"    went.append(({self.first[id(target)]}, own))")

    def instruction(self, it, k):
        kinds = ir.instructions
        name, ops = self.names[id(it)], it.operands
        match it:
            case kinds.PhiInstr():
                return  # whoever comes here has put it there
            case kinds.ConditionalBranch():
                condition, yes, no = ops
                self.line(f"yes, went = spread({self.value(condition)}, n), []")
                self.go(yes, "yes")
                self.go(no, "~yes")
                self.line("return went")
                return
            case kinds.Branch():
                self.line("went = []")
                self.go(ops[0], "spread(True, n)")
                self.line("return went")
                return
            case kinds.Ret():
                self.line("return []")
                return
            case kinds.StoreInstr():
                value, pointer = ops
                kind, where = self.named(value.type), self.memory_of(pointer)
                at = f"spread({self.address(pointer)}, n)"
                by = ", all[i]" if where == "shared" else ""
                self.line(f"{where}.store({at}, {kind}, {self.value(value)}{by})")
                return
            case kinds.CallInstr() if waits_at(it):
                self.line(f"return [({k + 1}, i)]")
                return
            case kinds.CallInstr():
                text = self.call(it)
            case _:
                text = self.expression(it)
        self.line(f"{name} = {text}")
        if id(it) in self.kept:
            self.line(f"put(v, {self.kept[id(it)][0]}, i, {name})")

    def memory_of(self, pointer):
        return "shared" if pointer.type.addrspace == 3 else "memory"

    def address(self, pointer):
        own = f" + block[i] * U64({self.size})" if pointer.type.addrspace == 3 else ""
        return self.value(pointer) + own

    def call(self, it):
        callee = it.callee
        args = ", ".join(map(self.value, it.args))
        if isinstance(callee, ir.InlineAsm):
            made = f"{self.named(ASSEMBLY[callee.asm])}({args})"
            return made if not callee.asm else self.of_type(made, it.type)
        register = callee.name.removeprefix("llvm.nvvm.read.ptx.sreg.")
        if register in REGISTERS:
            return REGISTERS[register]
        return f"{self.named(LIBDEVICE[callee.name])}({args})"

    def of_type(self, text, kind):
        return f"({text}).astype({self.named(dtype_of(kind))})"

    def expression(self, it):
        kinds, ops = ir.instructions, it.operands
        value = self.value
        match it:
            case kinds.SelectInstr():
                condition, a, b = map(value, ops)
                if isinstance(it.type, ir.VectorType):
                    condition = f"spread({condition}, n)[:, None]"
                return self.of_type(f"np.where({condition}, {a}, {b})", it.type)
            case kinds.LoadInstr():
                at, kind = f"spread({self.address(ops[0])}, n)", self.named(it.type)
                where = self.memory_of(ops[0])
                return f"{where}.load({at}, {kind}{', all[i]' if where == 'shared' else ''})"
            case kinds.GEPInstr():
                pointer, *indices = ops
                index, kind = indices[-1], pointer.type.pointee
                kind = kind.element if isinstance(kind, ir.ArrayType) else kind
                far = f"{self.signed(index)}.astype(np.int64) * np.int64({size_of(kind)})"
                return f"{value(pointer)} + ({far}).view(np.uint64)"
            case kinds.ExtractElement():
                return f"{value(ops[0])}[..., {value(ops[1])}]"
            case kinds.InsertElement():
                vector, element, place = map(value, ops)
                self.line(f"made = spread({vector}, n, {it.type.count}).copy()")
                self.line(f"made[:, {place}] = {element}")
                return "made"
            case kinds.ExtractValue():
                (which,) = it.indices  # of a shuffle nobody reads another one
                many = isinstance(ops[0].callee, ir.InlineAsm)
                return f"{value(ops[0])}[{which}]" if many else value(ops[0])
            case kinds.ICMPInstr() | kinds.FCMPInstr():
                return self.compare(it)
            case kinds.CastInstr():
                return self.cast(it)
        name, (a, b) = it.opname, map(value, ops)
        return f"{a} {FLOATS[name] if name in FLOATS else INTEGERS[name]} {b}"

    def compare(self, it):
        a, b = it.operands
        op = it.op
        if isinstance(it, ir.instructions.ICMPInstr):
            x, y = map(self.signed if op.startswith("s") else self.value, (a, b))
            return f"{x} {SIGNS[op if op in SIGNS else op[1:]]} {y}"
        x, y = self.value(a), self.value(b)
        nan = f"(({x} != {x}) | ({y} != {y}))"
        if op == "uno":
            return nan
        test = f"({x} {SIGNS[op[1:]]} {y})"
        return f"~{nan} & {test}" if op[0] == "o" else f"{nan} | {test}"

    def cast(self, it):
        (a,) = it.operands
        x, to, name = self.value(a), it.type, it.opname
        if name in ("inttoptr", "ptrtoint"):
            return x
        if name == "trunc" and to.width == 1:
            return f"({x} & {self.named(dtype_of(a.type).type(1))}) != 0"
        if name in ("zext", "trunc", "uitofp", "fpext", "fptrunc"):
            return self.of_type(x, to)
        if name in ("sitofp", "sext"):
            wide = np.dtype(f"i{size_of(to)}") if name == "sext" else dtype_of(to)
            wide = f"{self.signed(a)}.astype({self.named(wide)})"
            return f"{wide}.view({self.named(dtype_of(to))})"
        if name == "fptosi":
            signed = self.named(np.dtype(f"i{size_of(to)}"))
            return f"({x}).astype({signed}).view({self.named(dtype_of(to))})"
        assert name == "bitcast", name
        if isinstance(to, ir.PointerType):
            return x
        return f"({x}).view({self.named(dtype_of(to))})"


def spread(x, n, *more):
    """One of `x` for each of n threads."""
    return np.broadcast_to(x, (n, *more))


def part(x, among, n):
    """What those of n threads have that are `among` them; numbers are everybody's."""
    return x[among] if isinstance(x, np.ndarray) and x.shape[:1] == (n,) else x


def put(v, place, i, x):
    if i is ALL:
        v[place] = v[place].copy()
    v[place][i] = x


@cache
def translated(source):
    """The kernel of `source`, ready to run."""
    return Translation(module_of(source))


# --- running --------------------------------------------------------------------------------------


def run(source, blocks, params, buffers=None, memory=None):
    """Run a kernel of `blocks` blocks with these parameters, in buffers or other memory."""
    threads = source.rows.block if source.rows is not None else THREADS_PER_BLOCK
    codes = Parameters.of(source).codes
    execute(translated(source), codes, blocks, threads, params, memory or Memory(buffers))


def execute(kernel, codes, blocks, threads, params, memory):
    """Run a Translation over so many blocks of threads; codes: the types of its parameters."""
    args = []
    for code, value in zip(codes, params, strict=True):
        kind = dtype_of(KINDS[code]).type
        args.append(kind(value if code[0] == "f" else int(value) & np.iinfo(kind).max))
    each = max(1, AT_ONCE // threads)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, each):
            Running(kernel, first, min(each, blocks - first), threads, blocks, args, memory).run()


class Running:
    """Some blocks of a kernel while they run."""

    def __init__(self, kernel, first, blocks, count, every, args, memory):
        self.kernel, self.count, self.threads = kernel, count, blocks * count
        self.all = np.arange(self.threads)
        self.block, self.shared = self.all // count, SharedMemory(kernel.size, blocks)
        self.values = [
            np.zeros((self.threads, *shape_of(kind)), dtype_of(kind))
            for _, kind in kernel.kept.values()
        ]
        self.given = (
            self.all, args, U32(self.all % count), U64(self.block), U32(self.block + first),
            U32(every), memory, self.shared,
        )  # fmt: skip

    def run(self):
        ready, waiting = {0: [ALL]}, {}
        while ready:
            at = min(ready)  # who is behind goes first, so that threads meet again
            threads = self.together(ready.pop(at))
            n = self.threads if threads is ALL else len(threads)
            went = self.kernel.steps[at](self.values, threads, n, *self.given)
            queue = waiting if self.kernel.segments[at].waits else ready
            for where, own in went:
                queue.setdefault(where, []).append(own)
            if not ready:
                ready = self.met(waiting)
        assert not waiting, "some threads wait for others that have ended or wait elsewhere"

    def together(self, parts):
        if len(parts) == 1:
            return parts[0]
        found = np.sort(np.concatenate(parts))
        return ALL if len(found) == self.threads else found

    def met(self, waiting):
        """Who of those that wait can go on, and where; they wait no more."""
        found = {}
        for where in list(waiting):
            segment = self.kernel.segments[where - 1]
            each = WARP if segment.waits == SHUFFLE else self.count
            threads = self.all[self.together(waiting.pop(where))]
            group = threads // each
            whole = np.bincount(group, minlength=self.threads // each)[group] == each
            go, stay = threads[whole], threads[~whole]
            if len(stay):
                waiting[where] = [stay]
            if len(go):
                if segment.waits == SHUFFLE:
                    self.shuffle(segment.instructions[-1], go)
                else:
                    self.shared.turn[np.unique(self.block[go])] += 1
                found[where] = [ALL if len(go) == self.threads else go]
        return found

    def shuffle(self, call, threads):
        kernel = self.kernel

        def given(value):
            if isinstance(value, ir.Constant):
                return kernel.constant(value)
            return self.values[kernel.kept[id(value)][0]]

        mask, mode, value, by, clamp = map(given, call.args)
        assert int(mask) == 0xFFFFFFFF and int(clamp) == WARP - 1
        lane = self.all % WARP
        by = np.broadcast_to(by, self.threads).astype(I64)
        there = {0: by, 2: lane + by, 3: lane ^ by}[int(mode)]
        source = self.all - lane + np.where(there < WARP, there, lane)
        moved = np.broadcast_to(value, self.threads)[source]
        self.values[kernel.kept[id(call)][0]][threads] = moved[threads]
