"""LLVM on this machine: object files from Sources, and linking them. Needs no GPU, knows no torch.

CPU kernels are LLVM IR of our own, compiled by numba's LLVM: without numba's front end, which costs
0.3 s to import and 35 ms a kernel.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

from ..errors import BuildError
from ..inside import in_another_thread
from .source import Source

_P = ParamSpec("_P")
_R = TypeVar("_R")


def undisturbed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let no signal handler run in the middle of it: the main thread, where they run, only waits.

    What one raises there would leave llvmlite's lock taken, and every other compile waiting.
    Raises BusyError where that lasts: the main thread may have been in LLVM itself.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        return in_another_thread(lambda: function(*args, **kwargs), _WAIT_SECONDS)

    return call


_WAIT_SECONDS = 10.0


def compile_object(source: Source) -> bytes:
    """An object file with the kernel, for the processor of this machine."""
    from llvmlite import binding as llvm

    from .emit_cpu import emit_cpu  # 20 ms, which nobody needs whose kernels are on disk

    machine = _own_machine()
    module = parsed(str(emit_cpu(source, converts_halves())), machine)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    # without LLVM 22's vectorizer of straight code, which gains nothing in loops: of the addresses
    # of six strided results it made a vector before its parts, and the next pass ended the process
    tuning.loop_vectorization = tuning.loop_unrolling = True
    tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    module.verify()  # what LLVM made wrong raises, and the chain runs as torch ops
    return machine.emit_object(module)


def parsed(text: str, machine: Any) -> Any:
    """LLVM's module for the text of one, verified, for `machine`."""
    from llvmlite import binding as llvm

    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    return module


@cache
def processor() -> tuple[str, str]:
    """This machine's processor and its features, as LLVM calls them."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def converts_halves() -> bool:
    """Whether this machine's processor has instructions from float16 to float32 and back."""
    arch = platform.machine().lower()
    return arch in ("aarch64", "arm64") or "+f16c" in processor()[1].split(",")


def target_machine(opt: int = 3, features: str | None = None) -> Any:
    """LLVM's description of this machine; an engine made with it takes it over."""
    from llvmlite import binding as llvm

    cpu, features = processor()[0], processor()[1] if features is None else features
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu,
        features=features,
        opt=opt,
        reloc="static" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _own_machine() -> Any:
    """That for kernels. Vectors are as long as torch's: LLVM would take half, and 43 us not 31.

    (For tanh and sigmoid of 16,384 elements on an Emerald Rapids; torch takes 30.)
    """
    features = processor()[1]
    wide = "+avx512f" in features.split(",")
    return target_machine(features=features + ",-prefer-256-bit" * wide)


# --- linking -------------------------------------------------------------------------------------

_numbers = count()
_retired: list[Any] = []  # libraries of llvmlite's that nothing needs


class Linked:
    """Keeps functions linked; once it has gone, they go with the next `link`, see `undisturbed`."""

    library: Any = None

    def __del__(self, retired: list[Any] = _retired) -> None:
        retired.append(self.library)


@undisturbed
def link(
    binary: bytes, names: Sequence[str], symbols: Mapping[str, int] | None = None
) -> tuple[list[int], Linked]:
    """The addresses of functions of an object file in this process, while what it gives is held.

    symbols: addresses of what it does not define, besides what the process exports.

    Raises BuildError where the object file calls what this process does not have: LLVM's MCJIT
    would call address 0.
    """
    from llvmlite import binding as llvm

    _retired.clear()
    jit, linked = _linker(), Linked()
    builder = llvm.JITLibraryBuilder().add_object_img(binary).add_current_process()
    for name, address in (symbols or {}).items():
        builder.import_symbol(name, address)
    for name in names:
        builder.export_symbol(name)
    try:
        library = linked.library = builder.link(jit, f"autofuse {next(_numbers)}")
    except RuntimeError as error:
        raise BuildError(f"LLVM cannot link it: {error}") from None
    return [library[name] for name in names], linked


@cache
def _linker() -> Any:
    from llvmlite import binding as llvm

    jit = llvm.create_lljit_compiler(target_machine())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(jit))  # for ever: what it has linked lives in it
    return jit


def forget_threads() -> None:
    """After a fork: another thread may have held LLVM's lock."""
    _linker.cache_clear()
