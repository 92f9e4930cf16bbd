"""Building: from a Source to a binary, a cubin or an object file. Needs no GPU, knows no torch.

CUDA kernels are compiled by numba.cuda, one intrinsic holding the whole body, and assembled by
nvJitLink, because a driver refuses PTX newer than itself but takes any cubin of its CUDA major
version. CPU kernels are LLVM IR of our own, compiled by numba's LLVM: without numba's front end,
which costs 0.3 s to import and 35 ms a kernel.
"""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

from .cache import DiskCache
from .emit import emit_cpu, emit_cuda
from .inside import in_another_thread
from .source import Parameters, Source

Capability = tuple[int, int]
_lock = threading.RLock()  # numba's typing and LLVM's contexts are not made for threads


def forget_threads() -> None:
    """After a fork: another thread may have held the lock, or LLVM's."""
    global _lock
    _lock = threading.RLock()
    _linker.cache_clear()


class BuildError(Exception):
    """The compiler did not give a kernel."""


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


@dataclass(frozen=True, slots=True)
class Made:
    """A binary and where it came from."""

    binary: bytes
    built: bool  # here and now; otherwise it was on disk
    unsaved: str = ""  # why it is not on disk


@undisturbed
def build_once(source: Source, target: str, key: str, cache: DiskCache) -> Made:
    """The binary of `source`; of many processes that want it at a time one builds."""
    with cache.building(key):
        binary = cache.get(key)
        if binary is not None:
            return Made(binary, False)
        binary = build(source, target)
        about = {"name": source.name, "target": target, "source": source.text}
        return Made(binary, True, cache.put(key, binary, about))


def build(source: Source, target: str) -> bytes:
    """The binary of `source` for a target as `sm_90`, or `cpu` for this machine's."""
    with _lock:
        if source.device == "cpu":
            return compile_object(source)
        capability = capability_of(target)
        return assemble(compile_ptx(source, capability), capability)


def capability_of(target: str) -> Capability:
    """(9, 0) of sm_90."""
    number = int(target.removeprefix("sm_"))
    return number // 10, number % 10


# --- CUDA ----------------------------------------------------------------------------------------


def compile_ptx(source: Source, capability: Capability) -> str:
    """PTX of the kernel, which is named as its Source is."""
    from numba import cuda, types
    from numba.core.extending import intrinsic

    numba_types = {
        "u64": types.uint64,
        "i64": types.int64,
        "i32": types.int32,
        "f32": types.float32,
        "f64": types.float64,
    }
    signature = tuple(numba_types[code] for code in Parameters.of(source).codes)
    names = ", ".join(f"p{k}" for k in range(len(signature)))

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_cuda(source, builder, capability, list(args))
        return context.get_dummy_value()

    space: dict[str, Any] = {"generate": generate, "void": types.void}
    exec(f"def body(typing, {names}):\n    return void({names}), generate\n", space)
    space["body"] = intrinsic(space["body"])
    exec(f"def kernel({names}):\n    body({names})\n", space)
    ptx, _ = cuda.compile_ptx(space["kernel"], signature, cc=capability)
    found = re.search(r"\.visible \.entry (\S+?)\(", ptx)
    if found is None:
        raise BuildError(f"numba produced no kernel for {source.name}")
    ptx = ptx.replace(found.group(1), source.name)
    ptx = re.sub(r"\.common \.global .*NumbaEnv.*\n", "", ptx)
    if source.relaxed:
        return ptx
    # ptxas may contract a plain mul with an add across ops; NVVM has contracted what it should
    return re.sub(r"\bmul\.f(32|64)\b", r"mul.rn.f\1", ptx)


def assemble(ptx: str, capability: Capability) -> bytes:
    """A cubin from PTX."""
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{capability[0]}{capability[1]}"]
    handle = nvjitlink.create(len(options), options)
    data = ptx.encode()
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "autofuse")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


# --- CPU -----------------------------------------------------------------------------------------


def compile_object(source: Source) -> bytes:
    """An object file with the kernel, for the processor of this machine."""
    from llvmlite import binding as llvm

    machine = _own_machine()
    module = llvm.parse_assembly(str(emit_cpu(source, converts_halves())))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = True
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


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


@cache
def _own_machine() -> Any:
    return target_machine()


def target_machine(opt: int = 3) -> Any:
    """LLVM's description of this machine; an engine made with it takes it over."""
    from llvmlite import binding as llvm

    cpu, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu,
        features=features,
        opt=opt,
        reloc="static" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "default",
        codemodel="jitdefault",
        jit=True,
    )


# --- linking -------------------------------------------------------------------------------------

_numbers = count()
_retired: list[Any] = []  # libraries of llvmlite's that nothing needs


class Linked:
    """Keeps functions linked; once it has gone, they go with the next `link`, see `undisturbed`."""

    library: Any = None

    def __del__(self, retired: list[Any] = _retired) -> None:
        retired.append(self.library)


@undisturbed
def link(binary: bytes, names: Sequence[str]) -> tuple[list[int], Linked]:
    """The addresses of functions of an object file in this process, while what it gives is held.

    Raises BuildError where the object file calls what this process does not have: LLVM's MCJIT
    would call address 0.
    """
    from llvmlite import binding as llvm

    _retired.clear()
    jit, linked = _linker(), Linked()
    builder = llvm.JITLibraryBuilder().add_object_img(binary).add_current_process()
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
