"""Kernels for CUDA without a GPU: their LLVM IR as Python, one thread after another, in lockstep.

What runs is the very IR that is compiled. Memory is checked: every access lies in a buffer and is
aligned to its size; threads of a warp meet at shuffles, those of a block at barriers.
"""

import math
from functools import cache

import numpy as np
from llvmlite import ir

from autofuse.kernel.emit import emit_cuda
from autofuse.kernel.row_emit import emit_rows
from autofuse.kernel.source import THREADS_PER_BLOCK, Parameters

KINDS = {"u64": ir.IntType(64), "i64": ir.IntType(64), "i32": ir.IntType(32),
         "f32": ir.FloatType(), "f64": ir.DoubleType()}  # fmt: skip
F32 = np.float32
SHARED = 1 << 60


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


# --- arithmetic of float32 ------------------------------------------------------------------------


def fma(a, b, c):
    return F32(float(a) * float(b) + float(c))  # the product is exact


def saturated(a, b, c):
    value = fma(a, b, c)
    return F32(0) if value != value else min(max(value, F32(0)), F32(1))


def downward(a, b, c):
    exact = float(a) * float(b) + float(c)
    near = F32(exact)
    return np.nextafter(near, F32(-np.inf)) if float(near) > exact else near


def ex2(x):
    with np.errstate(all="ignore"):
        return F32(np.exp2(np.float64(x)))


def log(x):
    with np.errstate(all="ignore"):
        return F32(np.log(np.float64(x)))


def lg2(x):
    with np.errstate(all="ignore"):
        return F32(np.log2(np.float64(x)))


def exp_parts(x):
    """Two factors of the exponential."""
    scaled = saturated(x, bits_float(0x3BBB989D), bits_float(0x3F000000))
    whole = downward(scaled, bits_float(0x437C0000), bits_float(0x4B400001))
    rest = fma(x, bits_float(0x3FB8AA3B), F32(12583039.0) - whole)
    rest = fma(x, bits_float(0x32A57060), rest)
    return bits_float(float_bits(whole) << 23 & 0xFFFFFFFF), ex2(rest)


def exp(x):
    power, fraction = exp_parts(x)
    return F32(power * fraction)


def bits_float(bits):
    return np.uint32(bits & 0xFFFFFFFF).view(F32)


def float_bits(value):
    return int(F32(value).view(np.uint32))


def fmax(a, b):
    return b if a != a else a if b != b else max(a, b)


def bf16(x):
    """The word whose upper half is `x` as bfloat16."""
    bits = float_bits(x)
    if x != x:
        return 0x7FFF0000
    return (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000


def half_bits(x):
    with np.errstate(all="ignore"):
        return int(np.float16(x).view(np.uint16))


def half_float(bits):
    return F32(np.uint16(bits).view(np.float16))


LIBDEVICE = {
    "__nv_fadd_rn": lambda a, b: F32(a + b), "__nv_fsub_rn": lambda a, b: F32(a - b),
    "__nv_fmul_rn": lambda a, b: F32(a * b), "__nv_fmaf": fma,
    "__nv_fsqrt_rn": lambda a: F32(np.sqrt(a)), "__nv_rsqrtf": lambda a: F32(1 / np.sqrt(float(a))),
    "__nv_fabsf": abs, "__nv_expf": exp, "__nv_logf": log, "__nv_fmaxf": fmax,
    "__nv_fminf": lambda a, b: -fmax(-a, -b), "__nv_tanhf": lambda a: F32(math.tanh(a)),
    "__nv_log1pf": lambda a: F32(np.log1p(np.float64(a))),
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
    "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;": bf16,
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda low, high: bf16(low) >> 16 | bf16(high),
    "cvt.rn.f16x2.f32 $0, $2, $1;": lambda low, high: half_bits(low) | half_bits(high) << 16,
    "cvt.rn.f16.f32 $0, $1;": half_bits,
    "cvt.f32.f16 $0, $1;": half_float,
}  # fmt: skip


def pair(name, kind):
    def unpack(word):
        halves = (word & 0xFFFF, word >> 16 & 0xFFFF)
        return [half_float(h) if kind == "f16" else bits_float(h << 16) for h in halves]

    def run(a, b, c):
        made = [fma(*xs) for xs in zip(*map(unpack, (a, b, c)), strict=True)]
        if kind == "f16":
            return half_bits(made[0]) | half_bits(made[1]) << 16
        return bf16(made[0]) >> 16 | bf16(made[1])

    return run


for _kind in ("f16", "bf16"):
    ASSEMBLY[f"fma.rn.{_kind}x2 $0, $1, $2, $3;"] = pair("fma", _kind)


# --- from IR to Python ----------------------------------------------------------------------------


def size_of(kind):
    if isinstance(kind, ir.VectorType):
        return kind.count * size_of(kind.element)
    if isinstance(kind, ir.IntType):
        return max(1, kind.width // 8)
    return {ir.FloatType: 4, ir.DoubleType: 8, ir.PointerType: 8}[type(kind)]


def dtype_of(kind):
    if isinstance(kind, ir.IntType):
        return np.dtype(f"u{size_of(kind)}")
    return np.dtype("f4" if isinstance(kind, ir.FloatType) else "f8")


class Memory:
    """Buffers at addresses that are far apart, and the shared memory of a block."""

    def __init__(self, buffers):
        self.buffers = buffers  # base -> bytes, as a numpy array of uint8
        self.shared = {}

    def place(self, address, kind):
        base = address >> 32 << 32
        size = size_of(kind)
        assert address % size == 0, "not aligned"
        offset = address - base
        buffer = self.buffers[base]
        assert offset + size <= buffer.size, "beyond the buffer"
        return buffer[offset : offset + size]

    def load(self, address, kind):
        if address >= SHARED:
            return self.shared[address]
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        found = self.place(address, kind).view(dtype_of(element))
        values = [int(v) if isinstance(element, ir.IntType) else v for v in found]
        return values if isinstance(kind, ir.VectorType) else values[0]

    def store(self, address, kind, value):
        if address >= SHARED:
            self.shared[address] = value
            return
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        values = value if isinstance(kind, ir.VectorType) else [value]
        self.place(address, kind)[:] = np.array(values, dtype_of(element)).view(np.uint8)


class Translation:
    def __init__(self, function):
        self.names, self.space = {}, {"F32": F32, "bits_float": bits_float,
                                      "float_bits": float_bits, "nan": F32(np.nan)}  # fmt: skip
        self.lines, self.shared = [], {}
        for k, arg in enumerate(function.args):
            self.names[id(arg)] = f"a{k}"
        blocks = {id(block): k for k, block in enumerate(function.blocks)}
        for block in function.blocks:
            for instruction in block.instructions:
                self.names[id(instruction)] = f"v{len(self.names)}"
        params = "".join(f", a{k}" for k in range(len(function.args)))
        self.line(0, f"def thread(memory, tid, ctaid, nctaid{params}):")
        self.line(1, "block = 0")
        self.line(1, "if False: yield")  # a generator, though nothing waits in it
        self.line(1, "while True:")
        self.blocks = blocks
        for k, block in enumerate(function.blocks):
            self.line(2, f"if block == {k}:")
            self.block = block
            for instruction in block.instructions:
                self.instruction(instruction)
            self.line(3, "continue")

    def line(self, depth, text):
        self.lines.append("    " * depth + text)

    def thread(self):
        exec("\n".join(self.lines), self.space)
        return self.space["thread"]

    def value(self, value):
        if isinstance(value, ir.GlobalVariable):
            return str(SHARED + (self.shared.setdefault(value.name, len(self.shared)) << 20))
        if isinstance(value, ir.Constant):
            constant = value.constant
            if isinstance(value.type, ir.VectorType):
                return f"([0] * {value.type.count})"
            if isinstance(value.type, ir.IntType):
                return str(int(constant) & (1 << value.type.width) - 1)
            name = f"k{len(self.space)}"
            self.space[name] = (F32 if isinstance(value.type, ir.FloatType) else float)(constant)
            return name
        return self.names[id(value)]

    def signed(self, value):
        width, text = value.type.width, self.value(value)
        return f"({text} - ({text} >> {width - 1} << {width}))"

    def go(self, target):
        for phi in target.instructions:
            if isinstance(phi, ir.instructions.PhiInstr):
                (value,) = [v for v, block in phi.incomings if block is self.block]
                yield f"t{self.names[id(phi)]} = {self.value(value)}"
        for phi in target.instructions:
            if isinstance(phi, ir.instructions.PhiInstr):
                name = self.names[id(phi)]
                yield f"{name} = t{name}"
        yield f"block = {self.blocks[id(target)]}"

    def instruction(self, it):
        kinds = ir.instructions
        name, ops = self.names[id(it)], it.operands
        match it:
            case kinds.PhiInstr():
                return
            case kinds.ConditionalBranch():
                condition, yes, no = ops
                self.line(3, f"if {self.value(condition)}:")
                for text in self.go(yes):
                    self.line(4, text)
                self.line(3, "else:")
                for text in self.go(no):
                    self.line(4, text)
            case kinds.Branch():
                for text in self.go(ops[0]):
                    self.line(3, text)
            case kinds.Ret():
                self.line(3, "return")
            case kinds.StoreInstr():
                value, pointer = ops
                kind = self.named(value.type)
                self.line(3, f"memory.store({self.value(pointer)}, {kind}, {self.value(value)})")
            case kinds.CallInstr():
                self.line(3, f"{name} = {self.call(it)}")
            case _:
                self.line(3, f"{name} = {self.expression(it)}")

    def named(self, thing):
        name = f"n{len(self.space)}"
        self.space[name] = thing
        return name

    def call(self, it):
        args = ", ".join(map(self.value, it.args))
        callee = it.callee
        if isinstance(callee, ir.InlineAsm):
            return f"{self.named(ASSEMBLY[callee.asm])}({args})"
        symbol = callee.name
        if symbol.startswith("llvm.nvvm.read.ptx.sreg."):
            register = symbol.rpartition("sreg.")[2]
            return {"tid.x": "tid", "ctaid.x": "ctaid", "nctaid.x": "nctaid", "tid.z": "0"}[
                register
            ]
        if symbol == "llvm.nvvm.barrier0":
            return "yield None"
        if symbol == "llvm.nvvm.shfl.sync.i32":
            return f"yield ({args})"
        return f"{self.named(LIBDEVICE[symbol])}({args})"

    def expression(self, it):
        kinds, ops = ir.instructions, it.operands
        value = self.value
        match it:
            case kinds.SelectInstr():
                condition, a, b = map(value, ops)
                return f"{a} if {condition} else {b}"
            case kinds.LoadInstr():
                return f"memory.load({value(ops[0])}, {self.named(it.type)})"
            case kinds.GEPInstr():
                pointer, *indices = ops
                index, kind = indices[-1], pointer.type.pointee
                kind = kind.element if isinstance(kind, ir.ArrayType) else kind
                return f"{value(pointer)} + {self.signed(index)} * {size_of(kind)}"
            case kinds.ExtractElement():
                return f"{value(ops[0])}[{value(ops[1])}]"
            case kinds.InsertElement():
                vector, element, place = map(value, ops)
                return f"[*{vector}[:{place}], {element}, *{vector}[{place} + 1:]]"
            case kinds.ExtractValue():
                (which,) = it.indices  # of a shuffle nobody reads another one
                many = isinstance(ops[0].callee, ir.InlineAsm)
                return f"{value(ops[0])}[{which}]" if many else value(ops[0])
            case kinds.ICMPInstr() | kinds.FCMPInstr():
                return self.compare(it)
            case kinds.CastInstr():
                return self.cast(it)
        name, args = it.opname, list(map(value, ops))
        if name in ("fadd", "fsub", "fmul", "fdiv"):
            sign = {"fadd": "+", "fsub": "-", "fmul": "*", "fdiv": "/"}[name]
            return f"F32({args[0]} {sign} {args[1]})"
        sign = {"add": "+", "sub": "-", "mul": "*", "udiv": "//", "and": "&", "or": "|",
                "xor": "^", "shl": "<<", "lshr": ">>"}[name]  # fmt: skip
        return f"({args[0]} {sign} {args[1]}) & {(1 << it.type.width) - 1}"

    def compare(self, it):
        a, b = it.operands
        op = it.op
        x, y = self.value(a), self.value(b)
        if isinstance(it, ir.instructions.ICMPInstr):
            if op.startswith("s"):
                x, y = self.signed(a), self.signed(b)
            signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
            return f"{x} {signs[op if op in signs else op[1:]]} {y}"
        nan = f"({x} != {x} or {y} != {y})"
        if op == "uno":
            return nan
        signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
        test = f"{x} {signs[op[1:]]} {y}"
        return f"(not {nan} and {test})" if op[0] == "o" else f"({nan} or {test})"

    def cast(self, it):
        (a,) = it.operands
        x, to, name = self.value(a), it.type, it.opname
        if name == "zext":
            return f"int({x})"
        if name == "inttoptr":
            return x
        if name == "trunc":
            return f"{x} & {(1 << to.width) - 1}"
        if name == "uitofp":
            return f"F32({x})"
        if name == "sitofp":
            return f"F32({self.signed(a)})"
        if name == "fptosi":
            return f"int({x}) & {(1 << to.width) - 1}"
        assert name == "bitcast", name
        if isinstance(to, ir.FloatType):
            return f"bits_float({x})"
        if isinstance(a.type, ir.FloatType):
            return f"float_bits({x})"
        return x


@cache
def _thread_of(source):
    return Translation(module_of(source)).thread()


# --- running --------------------------------------------------------------------------------------


def run(source, blocks, params, buffers=None, memory=None):
    """Run a kernel of `blocks` blocks with these parameters, in buffers or other memory."""
    thread, memory = _thread_of(source), memory or Memory(buffers)
    count = source.rows.block if source.rows is not None else THREADS_PER_BLOCK
    with np.errstate(all="ignore"):
        for block in range(blocks):
            memory.shared = {}
            threads = [thread(memory, tid, block, blocks, *params) for tid in range(count)]
            _run_block(threads)


def _run_block(threads):
    warps = [threads[k : k + 32] for k in range(0, len(threads), 32)]
    while True:
        ended = [_run_warp(warp) for warp in warps]
        if all(ended):
            return
        assert not any(ended), "some threads have ended, others wait at a barrier"


def _run_warp(warp):
    """Run the threads of a warp up to a barrier, or to their end."""
    sent = [None] * len(warp)
    while True:
        asked, ended = [], 0
        for thread, value in zip(warp, sent, strict=True):
            try:
                asked.append(thread.send(value))
            except StopIteration:
                ended += 1
        if ended:
            assert ended == len(warp), "some threads of a warp have ended, others have not"
            return True
        if asked[0] is None:
            assert all(one is None for one in asked)
            return False
        assert len(warp) == 32 and None not in asked, "a shuffle without all of the warp"
        sent = []
        for lane, (mask, mode, _, by, clamp) in enumerate(asked):
            assert mask == 0xFFFFFFFF and clamp == 31
            there = {0: by, 2: lane + by, 3: lane ^ by}[mode]
            sent.append(asked[there if there < 32 else lane][2])
