"""CUDA: from a Source to PTX and a cubin. Needs no GPU, knows no torch.

Kernels are compiled by numba.cuda, one intrinsic holding the whole body, and assembled by
nvJitLink, because a driver refuses PTX newer than itself but takes any cubin of its CUDA major
version.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import BuildError
from .emit import emit_cuda
from .row_emit import emit_rows
from .source import Parameters, Source


def capability_of(target: str) -> tuple[int, int]:
    """(9, 0) of sm_90."""
    number = int(target.removeprefix("sm_"))
    return number // 10, number % 10


def compile_ptx(source: Source, target: str) -> str:
    """PTX of the kernel, which is named as its Source is, for a target as `sm_90`."""
    from numba import cuda, types
    from numba.core.extending import intrinsic

    numba_types = {"u64": types.uint64, "i64": types.int64, "i32": types.int32,
                   "f32": types.float32, "f64": types.float64}  # fmt: skip
    capability = capability_of(target)
    signature = tuple(numba_types[code] for code in Parameters.of(source).codes)
    names = ", ".join(f"p{k}" for k in range(len(signature)))

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit = emit_cuda if source.rows is None else emit_rows
        emit(source, builder, capability, list(args))
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
    if source.rows is not None:  # or registers might not do for a large block
        ptx = re.sub(
            r"(\.visible \.entry [^{]*\))", rf"\1\n.maxntid {source.rows.block}, 1, 1", ptx
        )
    if source.relaxed:
        return ptx
    # ptxas may contract a plain mul with an add across ops; NVVM has contracted what it should
    return re.sub(r"\bmul\.f(32|64)\b", r"mul.rn.f\1", ptx)


def assemble(ptx: str, target: str) -> bytes:
    """A cubin from PTX."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={target}"]
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
