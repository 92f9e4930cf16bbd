"""Launching: one Runner per program, live-outs and exact shapes; nothing is left to compute.

A Runner holds its kernels, the layout of its outputs and their packed parameters, so that a run is:
check the Inputs, allocate, write pointers and scalars, launch. CUDA kernels go through the driver's
cuLaunchKernel (3.0 us against 126 us for numba's own launch of three torch tensors); its parameter
array is made once and only the slots are rewritten.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache, partial
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from ..chain.shell import (
    UNKNOWN,
    Meta,
    NoTorchFunction,
    Tensor,
    address_of,
    become,
    fresh_meta,
    gave,
    is_shell,
    raw_version_of,
    swap,
    use_count,
    version_of,
)
from ..errors import AutofuseError, KernelError, NotReadyError, StaleInputError
from ..inside import inside
from ..kernel.plan import UNIT, Piece, Ref, unvectorised
from ..kernel.source import THREADS_PER_BLOCK, Parameters
from ..supply.kernels import Kernel, Order
from ..supply.load import enter_context

if TYPE_CHECKING:
    from ..chain.trie import Node
    from ..record.chain import Chain

# as `native_flush.sent` tells them apart; 2 more for a reciprocal
_CONST_KINDS = {"f32": 0, "f64": 1, "i64": 4}
_FORMATS = {"u64": "Q", "i64": "q", "i32": "i4x", "f32": "f4x", "f64": "d"}


def stream_reader(device: torch.device) -> Callable[[], int]:
    """A function that gives the raw handle of the current stream; 0 on the CPU."""
    if device.type != "cuda":
        return int
    return partial(torch._C._cuda_getCurrentRawStream, device.index)


WRITING: dict[int, torch.Tensor] = {}  # `Chain.values` while C writes to memory that is read too
_copy = torch._C.TensorBase.copy_  # type: ignore[attr-defined]
count_write: Callable[[list[torch.Tensor]], None] = torch._C._increment_version  # in C


def settle(
    chain: Chain, owners: Sequence[Node], believed: bool = False, again: bool = False
) -> None:
    """Give the live shells of `chain` its values, and the memory that it writes to the last one.

    believed: they are what their nodes say. again: go on where that was interrupted.
    """
    values = chain.values
    assert values is not None
    with NoTorchFunction():
        if chain.into is not None:
            write_out(chain, values[chain.tip.index])
        for owner in owners:
            shell, meta = chain[owner.index], owner.meta
            if shell is None:
                continue
            real = values[owner.index]
            assert meta is not None
            if again and is_shell(real):
                owner.shell = gave(shell, real, UNKNOWN, owner)
            else:
                if not believed and fresh_meta(real) is not meta:
                    meta = UNKNOWN  # never believed to be what it is not
                owner.shell = become(shell, real, meta, owner)
            chain[owner.index] = None


def write_out(chain: Chain, value: torch.Tensor) -> None:
    """Write the last value of `chain` where it belongs; its op was recorded under no_grad."""
    grad = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        # no Python runs from here...
        into, chain.into = chain.into, None
        if into is not None:  # who runs in the middle may have been faster
            _copy(into, value)  # ...to its end
    finally:
        torch._C._set_grad_enabled(grad)


def bump(chain: Chain, reals: dict[int, torch.Tensor]) -> None:
    """Give each value the version that its in-place ops have made, before it is saved."""
    for index, times in (chain.bumps or {}).items():
        for _ in range(times if index in reals else 0):
            increment_version(reals[index])


def publish(chain: Chain, values: dict[int, torch.Tensor]) -> None:
    """Let `values` be what the flush of `chain` gives away, unless others were faster."""
    others = chain.values is not None and chain.values is not WRITING
    if not others:
        # no Python runs from here...
        chain.values = values
        chain.bumps = None
        # ...to here


class Runner:
    """Computes the live-outs `live` of one program; counts what that saved."""

    run: Callable[[Chain], None]  # computes and settles
    bare: Callable[[Chain], None] | None = None  # `run` without the range a profiler sees
    attach: Callable[..., None] | None = None  # takes inputs, consts, late, what `made` names
    copied = False  # the last live value is computed apart and copied to the memory of `chain.into`
    packs: tuple[tuple[int, ...], ...] = ()  # live-outs that share one tensor, one after another
    program: Program | None = None  # `run` for the machine code of `native`
    recorded = True  # its ops were recorded, not made by autograd
    saved_bytes = 0  # kept for backward
    waiting = False  # for kernels
    ops: Callable[..., list[torch.Tensor]] | None = None  # the same by eager ops, once needed

    def __init__(
        self,
        device: torch.device,
        nodes: list[Node],
        inputs: tuple[Meta, ...],
        live: tuple[int, ...],
        pieces: tuple[Piece, ...],
        into: bool,
        kernels: Sequence[Kernel] = (),
    ) -> None:
        self.device, self.nodes, self.inputs, self.live = device, nodes, inputs, live
        self.into = into  # the last live value goes to the memory of `chain.into`
        self.owners = [nodes[index] for index in (live[:-1] if into else live)]
        self.visible = self.owners  # those that have a shell to settle
        self.pieces, self.kernels = pieces, kernels
        self.others = 0  # runs but those of `program`
        dead = [node for node in nodes if node.index not in set(live)]
        self.elided = len(dead) + into
        self.elided_bytes = sum(node.meta.nbytes for node in dead if node.meta is not None)

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.others + (0 if self.program is None else self.program.runs)

    def made(self) -> list[int]:
        """The owners in order, a pack by its first."""
        inner = {index for pack in self.packs for index in pack[1:]}
        return [owner.index for owner in self.owners if owner.index not in inner]

    def ready(self) -> Runner:
        """What to run from now on; a runner that waits for kernels asks for them."""
        return self

    def check(self, chain: Chain) -> None:
        """Raise StaleInputError if an Input changed since it was recorded."""
        marks = chain.marks
        with NoTorchFunction():
            for k in range(len(self.inputs)):
                x = chain.inputs[k]
                version = version_of(x)
                if version != marks[2 * k] or address_of(x) != marks[2 * k + 1]:
                    raise StaleInputError(self._stale(k, marks[2 * k], version))

    def _stale(self, position: int, before: int, now: int) -> str:
        readers = [node for node in self.nodes if ~position in node.args]
        name = readers[0].op.name if readers and readers[0].op else "an op"
        meta = self.inputs[position]
        what = f"version {before} -> {now}" if before != now else "its memory was replaced"
        return (
            f"an Input of shape {meta.shape} was modified in place ({what}) after {name!r} "
            "recorded a read of it and before the recorded ops ran. Call "
            "autofuse.materialize(result) before the write, or write through the wrapped tensor."
        )


class FailedRunner(Runner):
    """Stands for a kernel that could not be built; `error` decides what becomes of its chains."""

    def __init__(self, *args: Any, error: AutofuseError) -> None:
        super().__init__(*args)
        self.kind, self.reason = type(error), str(error)  # a traceback keeps the chain's values

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        self.check(chain)
        raise self.kind(self.reason)


# computes gradients: (incoming gradients, saved tensors, the chain's Consts) -> a tuple that
# begins with None
Answer = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], list[Any]], tuple[Any, ...]]


def _answer(given: list[Ref | None], made: str) -> str:
    """The expression for an Answer's result; given: a result, an incoming one as ~k, or None."""
    items = [
        "None" if ref is None else f"inputs[{~ref}]" if ref < 0 else made.format(ref)
        for ref in given
    ]
    return f"(None, {''.join(item + ', ' for item in items)})"


def log_of(number: float) -> float:
    """The logarithm as C gives it."""
    return math.log(number) if number > 0 else float("-inf") if number == 0 else float("nan")


def reciprocal_of(number: float) -> float:
    """The reciprocal as C gives it."""
    return 1.0 / number if number else math.copysign(math.inf, number)


_entered: set[int] = set()  # threads of torch's engine in which a context is current


def _enter(device: torch.device) -> None:
    enter_context(device)
    _entered.add(get_ident())


def _packed(meta: Meta, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, stride) of a tensor for `count` values of one dense layout, one after another."""
    if count == 1:
        return tuple(meta.shape), tuple(meta.stride)
    return (count, *meta.shape), (meta.nbytes // meta.dtype.itemsize, *meta.stride)


def runner_class(device: torch.device) -> type[CudaRunner] | type[CpuRunner]:
    """The kind of Runner that computes on `device`."""
    return CudaRunner if device.type == "cuda" else CpuRunner


# --- CUDA ----------------------------------------------------------------------------------------


# a Program begins with these words, by their places in bytes
RUNS, INPUTS, ARGUMENTS, POINTERS, OUTPUTS, PLACES, DEVICE, LAUNCH, MADE, BUSY, FIRST = range(
    0, 88, 8
)


class Program:
    """A run as data, for `native_flush`: words, some of them addresses of objects.

    Counters and scratch come first (runs, Inputs, room for arguments, pointers and outputs, how
    many pointers, the device if there are several, cuLaunchKernel, outputs made, whether it is
    running), then what is read one after another: Inputs, live shells, outputs, pieces.
    """

    __slots__ = ("address", "attach", "kept", "numbers", "python", "results", "stream", "words")

    def __init__(self, words: list[int], kept: list[object]) -> None:
        self.words = (ctypes.c_int64 * len(words))(*words)
        self.address = ctypes.addressof(self.words)
        self.kept = kept  # the objects whose addresses are among the words
        self.attach: object = None  # as the runner's
        # of an Answer: its Consts from those of the chain, the current stream, which result or
        # incoming gradient (~k) goes where, and itself in Python
        self.numbers: Callable[[Any], tuple[Any, ...]] | None = None
        self.stream: Callable[[], int] | None = None
        self.results: tuple[int | None, ...] = ()
        self.python: Answer | None = None

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.words[0]


def answer(program: Program, incoming: Any, saved: Any, consts: list[Any]) -> tuple[Any, ...]:
    """The Answer that `program` stands for."""
    assert program.python is not None
    return program.python(incoming, saved, consts)


class _Slots:
    """The parameters of one launch: a buffer of 8-byte slots and the array that points at them."""

    def __init__(self, piece: Piece, parameters: Parameters) -> None:
        codes = parameters.codes
        varying = parameters.loads + parameters.stores + parameters.consts
        self.buffer = ctypes.create_string_buffer(8 * len(codes))
        address = ctypes.addressof(self.buffer)
        self.array = (ctypes.c_void_p * len(codes))(*(address + 8 * k for k in range(len(codes))))
        self.address = ctypes.addressof(self.array)
        self.pack = struct.Struct(
            "<" + "".join(_FORMATS[code] for code in codes[:varying])
        ).pack_into
        count = piece.numel if piece.plan.rank == 1 else piece.numel // piece.plan.lanes
        fixed = struct.Struct("<" + "".join(_FORMATS[code] for code in codes[varying:]))
        fixed.pack_into(self.buffer, 8 * varying, count, *piece.numbers)
        groups = -(-piece.numel // piece.plan.lanes)
        self.blocks = -(-groups // THREADS_PER_BLOCK)
        self.formats = [code for code in codes[:varying]]

    def pack_wide(self, *values: Any) -> None:
        """As `pack`, for a Python number beyond float32: infinity, as torch's conversion gives."""
        narrowed = [
            ctypes.c_float(value).value if code == "f32" else value
            for code, value in zip(self.formats, values, strict=True)
        ]
        self.pack(self.buffer, 0, *narrowed)


@lru_cache(maxsize=1024)
def compiled(source: str) -> CodeType:
    """Compiled once for all sizes: numbers and addresses reach it as names."""
    return compile(source, "<autofuse runner>", "exec")


@cache
def launcher() -> Callable[..., int]:
    """The driver's cuLaunchKernel, from its arguments as numbers to its result as one.

    By ctypes, for what cuda.bindings makes of the result is made by Python, in the middle of which
    a signal handler could ask for what has just been launched.
    """
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    function.argtypes = [pointer, *[number] * 7, *[pointer] * 3]
    function.restype = ctypes.c_int
    return function


def declared(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """The arguments as objects of the types that `function` of ctypes declares.

    Calling it with them makes no container, in the midst of which Python up to 3.11 may collect.
    """
    return tuple(kind(value) for kind, value in zip(function.argtypes, arguments, strict=True))


class CudaRunner(Runner):
    """Runs a program's kernels through the CUDA driver."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._launch = launcher()
        self._entry = ctypes.cast(self._launch, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        self._scalar: dict[int, tuple[Any, _Slots, Kernel]] = {}  # pieces without alignment
        self._orders: dict[int, Order] = {}  # of their kernels
        self._parts = [
            (int(kernel.entry), _Slots(piece, kernel.parameters))
            for kernel, piece in zip(self.kernels, self.pieces, strict=True)
        ]

    def settling(self) -> CudaRunner:
        """Make ready for `run`; returns self."""
        head = [
            "inputs = chain.inputs; stream = chain.stream; consts = chain.consts",
            *self._generate_check(),
        ]
        self.run = self._generate("run(chain)", head, self._generate_settling)
        self.program = self._programmed()
        return self

    def _programmed(self) -> Program | None:
        """`run` as a Program."""
        made = self.made()
        if not {owner.index for owner in self.visible} <= {*made}:
            return None
        if self.copied or (self.into and len(self.pieces) > 1):  # only one launch is one step
            return None
        kept: list[object] = []
        begin: list[int] = [not meta.inference for meta in self.inputs]
        begin.append(len(self.visible))
        for owner in self.visible:
            kept += [owner, owner.meta]
            begin += [owner.index, id(owner), id(owner.meta), made.index(owner.index)]
        program = self._program(begin, kept)
        program.attach = self.attach
        return program

    def _program(self, begin: list[int], kept: list[object]) -> Program:
        """A Program with what its Inputs and live shells need."""
        made = self.made()
        metas = {owner.index: owner.meta for owner in self.owners}
        packs = {pack[0]: pack for pack in self.packs}
        places: dict[int, int] = {~k: k for k in range(len(self.inputs))}  # among the pointers
        for index in made:
            for value in packs.get(index, (index,)):
                places[value] = len(places)
        if self.into:
            places[self.live[-1]] = len(places)
        room = [(ctypes.c_int64 * n)() for n in (len(made) + 3, len(places), len(made))]
        device = self.device.index if torch.cuda.device_count() > 1 else -1
        words = [0, len(self.inputs), *map(ctypes.addressof, room), len(places), device,
                 self._entry, 0, 0, *begin, len(made)]  # fmt: skip
        for index in made:
            meta, count = metas[index], len(packs.get(index, (index,)))
            assert meta is not None
            arguments = (*_packed(meta, count), meta.dtype)
            kept += [_empty_strided, arguments]
            words += [id(_empty_strided), id(arguments), count, meta.nbytes]
        words.append(len(self.pieces))
        for (entry, slots), piece in zip(self._parts, self.pieces, strict=True):
            words += [entry, slots.blocks, slots.address, ctypes.addressof(slots.buffer)]
            refs = [*piece.loads, *piece.stores]
            words.append(len(refs))
            for ref, wide in zip(refs, _wide(piece), strict=True):
                words += [places[ref], 15 if wide and piece.plan.lanes > 1 else 0]
            words.append(len(piece.consts))
            codes = slots.formats[len(refs) :]
            for const, code, inverse in zip(piece.consts, codes, piece.plan.inverted, strict=True):
                words += [const, _CONST_KINDS[code] + 2 * inverse]
        return Program([*map(int, words)], [*kept, room, self._parts])

    def answering(
        self, given: list[Ref | None], numbers: list[str], places: list[tuple[int, int]]
    ) -> Answer:
        """A function of `Answer`'s kind, for the current stream of the thread that calls it.

        places: of each Input, the tensor it lies in and the byte at which it begins there.
        """

        def head(space: dict[str, Any]) -> list[str]:
            return [
                "inputs = (*incoming, *saved)",
                "if get_ident() not in entered: enter()",
                "stream = current(); runner.others += 1",
                f"consts = ({''.join(text + ', ' for text in numbers)})",
                *(f"p{k} = address(inputs[{n}]) + {at}" for k, (n, at) in enumerate(places)),
            ]

        def end(space: dict[str, Any]) -> list[str]:
            space.update(
                get_ident=get_ident, entered=_entered, enter=partial(_enter, self.device),
                current=stream_reader(self.device), runner=self, log=log_of,
            )  # fmt: skip
            return [f"return {_answer(given, 'o{}')}"]

        program = self.program = self._program([number for place in places for number in place], [])
        program.python = self._generate("answer(incoming, saved, c)", head({}), end)
        numbers_of = f"lambda c: ({''.join(text + ', ' for text in numbers)})"
        program.numbers = eval(numbers_of, {"log": log_of})
        program.stream = stream_reader(self.device)
        made = self.made()
        results = [ref if ref is None or ref < 0 else made.index(ref) for ref in given]
        program.results = (None, *results)
        return partial(answer, program)

    def _unaligned(self, k: int, *values: Any) -> tuple[Any, int, int]:
        """Piece k for pointers that are not 16-byte aligned: one element per thread."""
        if k not in self._scalar:
            piece = unvectorised(self.pieces[k])
            order = self._orders.setdefault(k, Order([piece.plan], self.device))
            kernels = order.filled()
            if kernels is None:
                raise NotReadyError(f"{piece.plan.name}, one element per thread")
            (kernel,) = kernels
            self._scalar[k] = int(kernel.entry), _Slots(piece, kernel.parameters), kernel
        entry, slots, _ = self._scalar[k]
        slots.pack_wide(*values)
        return entry, slots.blocks, slots.address

    def _fail(self, error: int) -> None:
        from cuda.bindings import driver

        names = ", ".join(piece.plan.name for piece in self.pieces)
        raise KernelError(f"cannot launch {names}: {driver.CUresult(error)}")

    def _generate(
        self, signature: str, head: list[str], end: Callable[[dict[str, Any]], list[str]]
    ) -> Callable[..., Any]:
        """A function without loops and calls that its program does not need.

        head: lines that name the `inputs`, their addresses `p0`..., `consts` and `stream`.
        """
        space: dict[str, Any] = {
            "NoTorchFunction": NoTorchFunction, "check": self.check, "fail": self._fail,
            "unaligned": self._unaligned, "launch": self._launch, "empty": _empty_strided,
            "version": raw_version_of, "address": address_of, "use_count": use_count,
            "swap": swap, "Tensor": Tensor, "settle": settle, "owners": self.visible,
            "reciprocal": reciprocal_of,
        }  # fmt: skip
        lines = list(head)
        if self.into:
            lines.append(f"into = chain.into; q{self.live[-1]} = address(into)")
        metas = {owner.index: owner.meta for owner in self.owners}
        packs = {pack[0]: pack for pack in self.packs}
        for index in self.made():
            pack = packs.get(index, (index,))
            meta = metas[index]
            assert meta is not None
            space[f"shape{index}"], space[f"stride{index}"] = _packed(meta, len(pack))
            space[f"dtype{index}"] = meta.dtype
            lines.append(f"o{index} = empty(shape{index}, stride{index}, dtype{index})")
            lines.append(f"q{index} = address(o{index})")
            for k, inner in enumerate(pack[1:], 1):
                lines.append(f"q{inner} = q{index} + {k * meta.nbytes}")
        writing = len(self.pieces) - 1 if self.into else -1
        for k, piece in enumerate(self.pieces):
            lines += self._generate_piece(k, piece, space, writing=k == writing)
        lines += end(space)
        if torch.cuda.device_count() > 1:
            space["device"], space["number"] = torch.cuda.device, self.device.index
            lines = ["with device(number):", *("    " + line for line in lines)]
        body = "".join(f"        {line}\n" for line in lines)
        exec(compiled(f"def {signature}:\n    with NoTorchFunction():\n{body}"), space)
        return space[signature.partition("(")[0]]

    def _generate_check(self) -> list[str]:
        """The test for stale Inputs, and their addresses."""
        lines = ["marks = chain.marks"]
        lines += [f"i{k} = inputs[{k}]" for k in range(len(self.inputs))]
        versions = ["-1" if meta.inference else "version(i{})" for meta in self.inputs]
        fresh = ", ".join(
            f"{version.format(k)}, address(i{k})" for k, version in enumerate(versions)
        )
        lines += [f"if marks != [{fresh}]: check(chain)"]
        return lines + [f"p{k} = marks[{2 * k + 1}]" for k in range(len(self.inputs))]

    def _generate_settling(self, space: dict[str, Any]) -> list[str]:
        """`settle`, unrolled: 0.3 us less for one live-out."""
        if self.into:
            lines = []
        else:
            if not self.visible:
                return []
            made = "".join(f"{owner.index}: o{owner.index}, " for owner in self.visible)
            space["bump"] = bump
            lines = [f"made = {{{made}}}", "if chain.bumps is not None: bump(chain, made)"]
            if self.attach is not None:
                space["attach"] = self.attach
                names = ", ".join(f"o{index}" for index in self.made())
                lines.append(f"attach(inputs, consts, chain.late, {names})")
            lines.append("if chain.values is None: chain.values = made; chain.bumps = None")
        shells = [f"s{owner.index}" for owner in self.visible]
        lines += [f"s{owner.index} = chain[{owner.index}]" for owner in self.visible]
        simple = ["chain.values is made", "chain.into is None"]
        simple += [f"use_count({s}) == 1" for s in shells]
        lines += [f"if {' and '.join(simple)}:", "    pass"]
        for owner in self.visible:
            k = owner.index
            space[f"node{k}"], space[f"meta{k}"] = owner, owner.meta
            lines += [
                f"    swap(s{k}, o{k}); s{k}.__dict__['_af'] = meta{k}",
                f"    o{k}.__class__ = Tensor; o{k}.__dict__['_af'] = node{k}",
                f"    node{k}.shell = o{k}; chain[{k}] = None",
            ]
        lines.append("else: settle(chain, owners)")
        return lines

    def _generate_piece(
        self, k: int, piece: Piece, space: dict[str, Any], writing: bool
    ) -> list[str]:
        """Piece k; the one that writes to `into` comes last and cannot be repeated.

        So no Python runs there between the look at `values` and the end of the launch, not even a
        finalizer by the collector, nor before the write is counted.
        """
        entry, slots = self._parts[k]
        space[f"entry{k}"], space[f"pack{k}"] = entry, slots.pack
        space[f"buffer{k}"], space[f"slots{k}"] = slots.buffer, slots
        space[f"blocks{k}"], space[f"params{k}"] = slots.blocks, slots.address
        values = _addresses(piece)
        for const, inverse in zip(piece.consts, piece.plan.inverted, strict=True):
            values.append(f"reciprocal(consts[{const}])" if inverse else f"consts[{const}]")
        arguments = ", ".join(values)
        lines = [f"pack{k}(buffer{k}, 0, {arguments})"]
        if piece.consts:
            lines = [
                f"try: {lines[0]}",
                f"except OverflowError: slots{k}.pack_wide({arguments})",
            ]
        lines.append(f"entry, blocks, params = entry{k}, blocks{k}, params{k}")
        if piece.plan.lanes > 1:
            lines = [
                f"if ({' | '.join(_aligned(piece))}) & 15:",
                f"    entry, blocks, params = unaligned({k}, {arguments})",
                "else:",
                *("    " + line for line in lines),
            ]
        arguments = f"entry, blocks, 1, 1, {THREADS_PER_BLOCK}, 1, 1, 0, stream, params, 0"
        if not writing:
            return [*lines, f"error = launch({arguments})", "if error: fail(error)"]
        space |= {"count_write": count_write, "bump": bump, "starmap": itertools.starmap,
                  "WRITING": WRITING, "declared": declared, "zero": [0]}  # fmt: skip
        made = "".join(f"{owner.index}: o{owner.index}, " for owner in self.visible)
        return [
            *lines,
            f"made = {{{made}}}",
            "if chain.bumps is not None: bump(chain, made)",
            f"arguments, written = declared(launch, {arguments}), [into]",
            "errors = []; run = starmap(launch, [arguments])  # runs when `errors` takes it",
            "if chain.values is None:",
            "    try:",
            "        chain.values = WRITING; chain.into = None; errors += run",
            "    finally:",
            "        chain.values = None; chain.into = into",
            "        if errors == zero:",
            "            chain.values = made; chain.into = chain.bumps = None",
            "            count_write(written)",
            "    if errors[0]: fail(errors[0])",
        ]


def _addresses(piece: Piece) -> list[str]:
    """The names of the pointers that a piece is launched with."""
    loads = [f"p{~ref}" if ref < 0 else f"q{ref}" for ref in piece.loads]
    return loads + [f"q{index}" for index in piece.stores]


def _aligned(piece: Piece) -> list[str]:
    """Those of them that the kernel moves 16 bytes of at a time."""
    names = zip(_addresses(piece), _wide(piece), strict=True)
    return [name for name, wide in names if wide]


def _wide(piece: Piece) -> list[bool]:
    """Whether a kernel with several lanes moves 16 bytes at a time, by operand."""
    operands = [*piece.plan.loads, *(operand for _, operand in piece.plan.stores)]
    return [operand.axes[-1] == UNIT for operand in operands]


def _empty_strided(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


if torch.cuda.is_available():
    # inductor's allocation entry: 0.77 us against 1.49 us for torch.empty_strided
    _empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided)  # noqa: F811


# --- CPU -----------------------------------------------------------------------------------------

_CHUNK = 1 << 15  # elements below which a second thread costs more than it saves
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(  # started as they are needed
            os.cpu_count(), "autofuse", initializer=lambda: inside.update({get_ident(): True})
        )
    return _pool


def forget_threads() -> None:
    """After a fork: the child has none of the parent's threads."""
    global _pool
    _pool = None


class CpuRunner(Runner):
    """Runs a program's kernels on the CPU, in chunks over as many threads as torch uses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._entries = [kernel.entry for kernel in self.kernels]

    def settling(self) -> CpuRunner:
        """Make ready for `run`; returns self."""
        return self

    def answering(
        self, given: list[Ref | None], numbers: list[str], places: list[tuple[int, int]]
    ) -> Answer:
        """A function of `Answer`'s kind; places as for CUDA."""
        text = _answer(given, "made[{}]")
        space = {"log": log_of}
        consts_of = eval(f"lambda c: ({''.join(text + ', ' for text in numbers)})", space)
        pick = eval(f"lambda inputs, made: {text}", space)

        def answer(incoming: Any, saved: Any, consts: list[Any]) -> tuple[Any, ...]:
            inputs = (*incoming, *saved)
            with NoTorchFunction():
                addresses = [address_of(inputs[n]) + at for n, at in places]
                values = self._compute(addresses, consts_of(consts), None)
            self.others += 1
            return pick(inputs, values)

        return answer

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        with NoTorchFunction():
            self.check(chain)
            addresses = list(map(address_of, chain.inputs))
            values = self._compute(addresses, chain.consts, chain)
            if chain.bumps is not None:
                bump(chain, values)
            if self.attach is not None:
                made = [values[index] for index in self.made()]
                self.attach(chain.inputs, chain.consts, chain.late, *made)
        publish(chain, values)
        settle(chain, self.visible, believed=True)

    def _compute(
        self, addresses: list[int], consts: Sequence[Any], chain: Chain | None
    ) -> dict[int, torch.Tensor]:
        """The values of `made`, by node index; the last piece may write to `chain.into`."""
        metas = {owner.index: owner.meta for owner in self.owners}
        packs = {pack[0]: pack for pack in self.packs}
        values: dict[int, torch.Tensor] = {}
        outs: dict[int, torch.Tensor] = {}
        for index in self.made():
            pack = packs.get(index, (index,))
            meta = metas[index]
            assert meta is not None
            value = torch.empty_strided(
                *_packed(meta, len(pack)), dtype=meta.dtype, device=self.device
            )
            values[index] = value
            outs |= {index: value} if len(pack) == 1 else dict(zip(pack, value, strict=True))
        into = chain.into if chain is not None and self.into else None
        if into is not None:
            outs[self.live[-1]] = into
            if _chunks(self.pieces[-1]) > 1:  # not in one step, and so not in place
                outs[self.live[-1]] = values[self.live[-1]] = torch.empty_like(into)
        for piece, entry in zip(self.pieces, self._entries, strict=True):
            pointers = [
                addresses[~ref] if ref < 0 else address_of(outs[ref]) for ref in piece.loads
            ]
            pointers += [address_of(outs[index]) for index in piece.stores]
            scalars = [consts[const] for const in piece.consts]
            rank = piece.plan.rank
            columns = piece.numbers[rank - 2] if rank > 1 else 1
            steps = piece.numel // columns
            arguments = (*pointers, *scalars, piece.numel, *piece.numbers)
            chunks = _chunks(piece)
            if into is None or piece is not self.pieces[-1] or chunks > 1:
                self._loop(entry, steps, chunks, arguments)
            else:
                assert chain is not None
                self._write(chain, into, values, entry, steps, arguments)
        return values

    @staticmethod
    def _write(
        chain: Chain,
        into: torch.Tensor,
        values: dict[int, torch.Tensor],
        entry: Any,
        steps: int,
        arguments: tuple[Any, ...],
    ) -> None:
        """Run the kernel that writes to `into`, in one step that nothing interrupts."""
        done: list[None] = []
        # runs when `done` takes its result
        run = itertools.starmap(entry, [declared(entry, 0, steps, *arguments)])
        written = [into]
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


def _chunks(piece: Piece) -> int:
    """How many threads share the work."""
    columns = piece.numbers[piece.plan.rank - 2] if piece.plan.rank > 1 else 1
    return min(torch.get_num_threads(), piece.numel // _CHUNK, piece.numel // columns)
