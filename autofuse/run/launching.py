"""Runners that launch kernels: in Python that is generated per program, and as words.

A kernel is launched by a C function with the arguments of the driver's cuLaunchKernel, which on
CUDA is that itself (`cuda`) and on the CPU one that comes with each kernel (`cpu`); but for large
ones there, which threads share. Where its parameters lie is made once, and only the slots are
rewritten; on a CPU Python makes them anew, for what runs in the middle may launch the same.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ..chain.shell import Tensor
from ..errors import KernelError, StaleInputError
from ..kernel.plan import Piece
from ..program.program import Ref
from ..supply.load import Kernel, enter_context
from ..torch_private import (
    NoModes,
    address_of,
    count_write,
    raw_version_of,
    stream_reader,
    swap,
    use_count,
)
from .generated import declared, defined, log_of, reciprocal_of, result_of, tuple_of
from .runner import Runner, check_inputs
from .settle import WRITING, bump, settle, writes_of
from .slots import Part, Slots, Unaligned
from .views import viewer
from .words import ALONE, ANY, HOST, RUNS, Answer, Words, answer

# as `hot.launch.sent` tells them apart; 2 more for a reciprocal
_CONST_KINDS = {"f32": 0, "f64": 1, "i64": 4}


entered_threads: set[int] = set()  # threads of torch's engine in which a context is current


def _enter(device: torch.device) -> None:
    enter_context(device)
    entered_threads.add(get_ident())


class LaunchingRunner(Runner):
    """Runs a program's kernels by launching them, on a device that a class of its own knows.

    What it generates does not hold it: in a cycle it, and with it the recorder of a thread that has
    gone, would wait for the garbage collector.
    """

    empty_strided: Callable[..., torch.Tensor]  # (shape, stride, dtype): allocates
    context = True  # whether a thread needs one before it launches
    private = False  # whether the parameters of a launch by Python are its own
    run_in_threads: Callable[..., None] | None = None  # where `in_threads` says so
    _several = False  # whether there are other devices of this kind

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._launch = self.launcher()
        address = ctypes.cast(self._launch, ctypes.c_void_p).value  # type: ignore[arg-type]
        self._launch_address = address or 0
        self._parts = list(map(self.part_of, self.kernels, self.pieces))
        self._unaligned = Unaligned(self.pieces, self.device, self.part_of)

    def launcher(self) -> Any:
        """What launches, a function of ctypes with cuLaunchKernel's arguments; its result is 0."""
        raise NotImplementedError

    @classmethod
    def fail(cls, pieces: tuple[Piece, ...], *errors: int) -> None:
        """Raise what says so. errors: of a launch; of several, those before the one that failed."""
        names = ", ".join(piece.plan.name for piece in pieces)
        if 0 in errors:  # and they cannot be repeated
            raise StaleInputError(
                f"cannot launch all of {names}: some have written to what others read"
            )
        raise KernelError(f"cannot launch {names}: {list(map(cls.error_of, errors))}")

    @staticmethod
    def error_of(error: int) -> Any:
        """What the result of a launch means."""
        return error

    @staticmethod
    def part_of(kernel: Kernel, piece: Piece) -> Part:
        """What is launched for `piece`."""
        return int(kernel.entry), Slots(piece, kernel.parameters), kernel

    @staticmethod
    def in_threads(piece: Piece) -> bool:
        """Whether threads of the host may share `piece`, each of which may be interrupted."""
        return False

    @staticmethod
    def vectors_of(piece: Piece) -> tuple[bool, ...]:
        """Of each operand, whether the kernel of `piece` wants its address to be aligned."""
        return piece.plan.vectors

    _bases: Sequence[int] = ()  # steps that `views` lie in, and what makes these of their tensors
    _viewer: Callable[..., Any] | None = None

    def bind(self) -> LaunchingRunner:
        """Make ready for `run`; returns self."""
        if self.views:
            self._bases, self._viewer = viewer(self.nodes, self.views)
        if self.attach_views:
            self._viewer = None
        head = [
            "inputs = chain.inputs; stream = chain.stream; consts = chain.consts",
            *self._generate_check(),
        ]
        names: dict[str, Any] = {}
        self.run = self._generate("run(chain)", head, self._generate_settle(names), names)
        self.words = self._programmed()
        return self

    def _programmed(self) -> Words | None:
        """`run` as Words."""
        outputs = [*(pack[0] for pack, _, _ in self.memory), *(node.index for node in self.views)]
        outputs += self.placed
        assert not (self.attach_views and (self.placed or self.writes))  # which lie behind outputs
        visible = self.visible[:-1] if self.copied else self.visible
        if self.puts_back or (self.tells and not visible):
            return None
        if not {owner.index for owner in visible} <= {*outputs}:
            return None
        # where a launch fails all are repeated: the one that writes comes last
        if self.writes and any(self.live[-1] in p.stores for p in self.pieces[:-1]):
            return None
        kept: list[object] = []
        begin: list[int] = [not meta.inference for meta in self.inputs]
        begin.append(len(visible))
        for owner in visible:
            kept += [owner, owner.meta]
            begin += [owner.index, id(owner), id(owner.meta), outputs.index(owner.index)]
        program = self._program(begin, kept)
        program.attach, program.viewer = self.attach, self._viewer
        program.attach_views = self.attach_views
        if self.copied:
            program.copied = self.live[-1], outputs.index(self.live[-1])
        program.bases = tuple(map(outputs.index, self._bases))
        return program

    def _program(self, begin: list[int], kept: list[object]) -> Words:
        """Words with what its Inputs and live shells need."""
        places: dict[int, int] = {~k: k for k in range(len(self.inputs))}  # among the pointers
        for pack, _, _ in self.memory:
            for value in pack:
                places[value] = len(places)
        if self.writes:
            places[self.live[-1]] = len(places)
        places |= self.placed
        made = len(self.memory)
        sizes = made + 3, len(places), made + len(self.views) + len(self.placed)
        room = [(ctypes.c_int64 * n)() for n in sizes]
        device = self.device.index if self._several else ANY
        if not self.context:
            device = ALONE if any(map(self.in_threads, self.pieces)) else HOST
        placed = (ctypes.c_int64 * (2 * len(self.placed)))(*itertools.chain(*self.placed.items()))
        ready = (ctypes.c_int64 * (4 * len(self.pieces)))()
        kept += [placed, ready]
        pointers = len(places) - len(self.placed)
        words = [0, len(self.inputs), *map(ctypes.addressof, room), pointers, device,
                 self._launch_address, 0, 0, len(self.made), len(self.placed),
                 ctypes.addressof(placed), ctypes.addressof(ready), *begin, made]  # fmt: skip
        for pack, nbytes, arguments in self.memory:
            kept += [self.empty_strided, arguments]
            words += [id(self.empty_strided), id(arguments), len(pack), nbytes]
        words.append(len(self.pieces))
        others: list[int] = []  # where the kernels for pointers that are not aligned come
        for (entry, slots, _), piece in zip(self._parts, self.pieces, strict=True):
            words += [entry, slots.blocks, slots.threads, slots.address]
            words.append(ctypes.addressof(slots.buffer))
            others.append(len(words))
            words += [0, 0, 0, 0]
            refs, vectors = [*piece.loads, *piece.stores], self.vectors_of(piece)
            words.append(len(refs))
            for ref, offset, wide in zip(refs, piece.offsets, vectors, strict=True):
                words += [places[ref], offset, 15 if wide else 0]
            words.append(len(piece.consts))
            codes = slots.formats[len(refs) :]
            for const, code, inverse in zip(piece.consts, codes, piece.plan.inverted, strict=True):
                words += [const, _CONST_KINDS[code] + 2 * inverse]
        kept += [room, self._parts, self._unaligned, self._launch]
        program = Words([*map(int, words)], kept)
        self._unaligned.tell(program.memory, others)
        return program

    def answering(
        self, given: list[Ref | None], numbers: list[str], places: list[tuple[int, int]]
    ) -> Answer:
        """A function of `Answer`'s kind, for the current stream of the thread that calls it.

        places: of each Input, the tensor it lies in and the byte at which it begins there.
        """
        head = [
            "inputs = (*incoming, *saved)",
            *(["if get_ident() not in entered: enter()"] if self.context else []),
            f"stream = current(); memory[{RUNS}] += 1",
            f"consts = {tuple_of(numbers)}",
            *(f"p{k} = address(inputs[{n}]) + {at}" for k, (n, at) in enumerate(places)),
        ]
        end = [f"return {result_of(given, 'o{}')}"]
        names = {
            "get_ident": get_ident, "entered": entered_threads, "log": log_of,
            "enter": partial(_enter, self.device), "current": stream_reader(self.device),
        }  # fmt: skip
        program = self.words = self._program([number for place in places for number in place], [])
        names["memory"] = program.memory
        program.python = self._generate("answer(incoming, saved, c)", head, end, names)
        if numbers:
            program.numbers = eval(f"lambda c: {tuple_of(numbers)}", {"log": log_of})
        program.stream = stream_reader(self.device)
        results = [ref if ref is None or ref < 0 else self.made.index(ref) for ref in given]
        program.results = (None, *results)
        program.private = self.private
        return partial(answer, program)

    def _generate(
        self, signature: str, head: list[str], end: list[str], names: dict[str, Any]
    ) -> Callable[..., Any]:
        """A function without loops and calls that its program does not need.

        head: lines that name the `inputs`, their addresses `p0`..., `consts` and `stream`. end: the
        last ones. names: what these name.
        """
        space: dict[str, Any] = {
            **names,
            "NoModes": NoModes, "check": check_inputs, "fail": partial(self.fail, self.pieces),
            "writes_of": writes_of,
            "unaligned": self._unaligned, "launch": self._launch,
            "empty": self.empty_strided, "run_in_threads": self.run_in_threads,
            "version": raw_version_of, "address": address_of, "use_count": use_count,
            "swap": swap, "Tensor": Tensor, "settle": settle, "visible": self.visible,
            "reciprocal": reciprocal_of, "bump": bump,
        }  # fmt: skip
        lines = list(head)
        if self.writes:
            lines.append(f"into = chain.into; q{self.live[-1]} = address(into)")
        for (index, *others), nbytes, arguments in self.memory:
            layout = f"shape{index}", f"stride{index}", f"dtype{index}"
            space |= zip(layout, arguments, strict=True)
            lines.append(f"o{index} = empty({', '.join(layout)})")
            lines.append(f"q{index} = address(o{index})")
            for k, other in enumerate(others, 1):
                lines.append(f"q{other} = q{index} + {k * nbytes}")
        if self._viewer is not None:
            space["views"] = self._viewer
            bases = ", ".join(f"o{base}" for base in self._bases)
            lines.append(f"{self._named_views} = views({bases})")
        lines += [f"o{step} = i{k}; q{step} = p{k}" for step, k in self.placed.items()]
        # those that write what is read, here or elsewhere, come last
        first = 0 if self.placed else len(self.pieces) - 1 if self.writes else len(self.pieces)
        for k, piece in enumerate(self.pieces):
            lines += self._generate_piece(k, piece, space, at_once=k < first)
        if first < len(self.pieces):
            lines += self._generate_writing(range(first, len(self.pieces)), space)
        lines += end
        if self._several:
            space["device"], space["number"] = torch.cuda.device, self.device.index
            lines = ["with device(number):", *("    " + line for line in lines)]
        body = "".join(f"        {line}\n" for line in lines)
        source = f"def {signature}:\n    with NoModes():\n{body}"
        return defined(source, signature.partition("(")[0], space)

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

    def _generate_settle(self, space: dict[str, Any]) -> list[str]:
        """`settle`, unrolled: 0.3 us less for one live-out."""
        if self.writes or self.placed:
            lines = []
        elif not (self.visible or self.tells):
            return []
        else:
            lines = self._generate_made()
            if self.attach is not None:
                space["attach"] = self.attach
                names = ", ".join(f"o{index}" for index in self.made)
                call = f"attach(inputs, consts, chain.late, {names})"
                lines.append(f"{self._named_views} = {call}" if self.attach_views else call)
                if self.attach_views:
                    named = [f"{node.index}: o{node.index}, " for node in self.views]
                    lines.append(f"made |= {{{''.join(named)}}}")
            lines.append("if chain.values is None: chain.values = made; chain.bumps = None")
        shells = [f"s{owner.index}" for owner in self.visible]
        lines += [f"s{owner.index} = chain[{owner.index}]" for owner in self.visible]
        if self.puts_back:
            return [*lines, "settle(chain, visible)"]
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
        lines.append("else: settle(chain, visible)")
        return lines

    @property
    def _named_views(self) -> str:
        """What the views are called, to be assigned."""
        return tuple_of(f"o{node.index}" for node in self.views)[1:-1]

    def _generate_made(self) -> list[str]:
        """Lines that list the values which shells get, with their versions."""
        indices = {owner.index for owner in self.visible}.union(self._bases)
        if self.attach_views:  # they come later
            indices.difference_update(node.index for node in self.views)
        made = "".join(f"{index}: o{index}, " for index in sorted(indices))
        return [f"made = {{{made}}}", "if chain.bumps is not None: bump(chain, made)"]

    def _generate_piece(
        self, k: int, piece: Piece, space: dict[str, Any], at_once: bool
    ) -> list[str]:
        """Piece k, launched or only ready to be."""
        entry, slots, _ = self._parts[k]
        space[f"entry{k}"], space[f"slots{k}"], space[f"blocks{k}"] = entry, slots, slots.blocks
        pointers = [f"p{~ref}" if ref < 0 else f"q{ref}" for ref in (*piece.loads, *piece.stores)]
        for n, offset in enumerate(piece.offsets):
            pointers[n] += f" + {offset}" if offset else ""
        values = [*pointers]
        for const, inverse in zip(piece.consts, piece.plan.inverted, strict=True):
            values.append(f"reciprocal(consts[{const}])" if inverse else f"consts[{const}]")
        arguments = ", ".join(values)
        lines = [f"entry, blocks = entry{k}, blocks{k}"]
        lines += self._generate_parameters(k, slots, arguments, space)
        if piece.consts:
            *before, pack, wide = lines
            lines = [*before, f"try: {pack}", f"except OverflowError: {wide}"]
        else:
            lines.pop()
        vectors = self.vectors_of(piece)
        if any(vectors):
            wide = [f"({pointer})" for pointer in itertools.compress(pointers, vectors)]
            lines = [
                f"if ({' | '.join(wide)}) & 15:",
                f"    entry, blocks, params = unaligned({k}, {arguments})",
                "else:",
                *("    " + line for line in lines),
            ]
        arguments = f"entry, blocks, 1, 1, {slots.threads}, 1, 1, 0, stream, params, 0"
        if at_once and self.in_threads(piece):
            space[f"kernel{k}"] = self.kernels[k]
            held = [f"kernel{k}", "*inputs", *(f"o{pack[0]}" for pack, _, _ in self.memory)]
            arguments = f"entry, blocks, {piece.numel}, params, {tuple_of(held)}"
            return [*lines, f"run_in_threads({arguments})"]
        if at_once:
            return [*lines, f"error = launch({arguments})", "if error: fail(error)"]
        return [*lines, f"arguments{k} = declared(launch, {arguments})"]

    def _generate_parameters(
        self, k: int, slots: Any, arguments: str, space: dict[str, Any]
    ) -> list[str]:
        """Lines that give `params` of piece k; the last but one packs, the last any number, too."""
        space[f"pack{k}"], space[f"buffer{k}"] = slots.pack, slots.buffer
        space[f"params{k}"] = slots.address
        return [
            f"params = params{k}",
            f"pack{k}(buffer{k}, 0, {arguments})",
            f"slots{k}.pack_wide({arguments})",
        ]

    def _generate_writing(self, pieces: range, space: dict[str, Any]) -> list[str]:
        """The launches that write to memory that is there, which cannot be repeated.

        So no Python runs between the look at `values` and the end of the last one, not even a
        finalizer by the collector, nor before the writes are counted.
        """
        space |= {"count_write": count_write, "starmap": itertools.starmap, "WRITING": WRITING,
                  "declared": declared, "zeros": [0] * len(pieces), "not_": operator.not_,
                  "takewhile": itertools.takewhile}  # fmt: skip
        arguments = ", ".join(f"arguments{k}" for k in pieces)
        return [
            *self._generate_made(),
            "into, written = chain.into, iter(writes_of(chain, made))",
            f"errors = []; run = starmap(launch, [{arguments}])  # runs when `errors` takes it",
            *(
                ["run = takewhile(not_, run)  # and not after one that fails"]
                if len(pieces) > 1
                else []
            ),
            "if chain.values is None:",
            "    try:",
            "        chain.values = WRITING; chain.into = None; errors += run",
            "    finally:",
            "        chain.values = None; chain.into = into",
            "        if errors == zeros:",
            "            chain.values = made; chain.into = chain.bumps = None",
            "            count_write(written)",
            "    if errors != zeros: fail(*errors)",
        ]
