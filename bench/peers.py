"""THE table of peers: what a user would pick instead of autofuse, and how each runs a workload.

A row says where it can be used at all (`missing`) and makes of a Program a Call to be timed
(`prepare`), which raises `Unsuited` for a workload that is not for it. What a peer needs besides
PyTorch is imported when it is asked for. Nothing is done within a call beyond what a user of that
peer needs for the workload.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import autofuse
import handwritten
from timing import Call, reason
from workloads import Program, Workload

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the device


class Unsuited(Exception):
    """A peer does not run a workload; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    prepare: Callable[[Workload, Program], Call]
    missing: Callable[[str], str] = lambda device: ""  # why it cannot be used on a device
    what: str = ""  # for the legend of a table


# --- eager and autofuse --------------------------------------------------------------------------


def eager(workload: Workload, program: Program) -> Call:
    return Call(program.runner(program.fn, program.args))


def wrapped_args(value: Any) -> Any:
    """`value` with its tensors wrapped, but for Parameters, which are recorded as they are."""

    def wrap(leaf: Any) -> Any:
        return autofuse.wrap(leaf) if type(leaf) is torch.Tensor else leaf

    return pytree.tree_map(wrap, value)


def wrapped(workload: Workload, program: Program) -> Call:
    run = program.runner(program.fn, wrapped_args(program.args))
    materialize = autofuse.materialize
    return Call(lambda: materialize(run()))


def fused(workload: Workload, program: Program) -> Call:
    @autofuse.fuse
    def whole(*args: Any) -> Any:
        return program.runner(program.fn, args)()

    return Call(functools.partial(whole, *program.args))


# --- torch's own ---------------------------------------------------------------------------------


def compiled(workload: Workload, program: Program) -> Call:
    return Call(program.runner(torch.compile(program.fn), program.args))


def compiled_graphs(workload: Workload, program: Program) -> Call:
    """Its results live in the graph's memory, so that a loop has to clone what it feeds back."""
    from torch._dynamo.utils import counters

    compiled = torch.compile(program.fn, mode="reduce-overhead")
    begin = torch.compiler.cudagraph_mark_step_begin

    def fn(*args: Any) -> Any:
        begin()
        results = compiled(*args)
        if isinstance(results, tuple):
            return tuple(t.clone() for t in results)
        return results.clone()

    run = program.runner(fn if program.calls > 1 else compiled, program.args)

    def once() -> Any:
        begin()
        return run()

    counters["inductor"].pop("cudagraph_skips", None)
    once()
    skipped = counters["inductor"]["cudagraph_skips"]
    return Call(run if program.calls > 1 else once, note="without graphs" if skipped else "")


def jit(workload: Workload, program: Program) -> Call:
    """torch.jit.script; where that fails torch.jit.trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what many use
        note = "scripted"
        try:
            fn = torch.jit.script(program.fn)
        except Exception:  # many classes of its own, and OSError without a source file
            if program.mutates:
                raise Unsuited("cannot be scripted, and a trace would keep its values") from None
            fn, note = torch.jit.trace(program.fn, program.args, check_trace=False), "traced"
    return Call(program.runner(fn, program.args), note=note)


def graph(workload: Workload, program: Program) -> Call:
    """A CUDA graph of one step, or of a whole run with its backward; eager kernels inside."""
    args = program.args
    if program.calls > 1:
        probe = program.fn(*args)
        count = len(probe) if isinstance(probe, tuple) else 1
        static = (*(t.clone() for t in args[:count]), *args[count:])

        def step() -> Any:
            results = program.fn(*static)
            for old, new in zip(static, results if count > 1 else (results,), strict=False):
                old.copy_(new)
            return static[:count]

        replay = _captured(step)

        def run() -> Any:
            for old, new in zip(static, args[:count], strict=False):
                old.copy_(new)
            for _ in range(program.calls):
                replay()
            return static[:count]

        return Call(run)
    return Call(_captured(program.runner(program.fn, args)))


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other libraries may use the device from threads of their own meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def jiterator(workload: Workload, program: Program) -> Call:
    found = handwritten.jiterator(workload.key)
    if found is None:
        raise Unsuited("pointwise ops only, written by hand")
    code, outputs, operands = found
    if outputs == 1:
        kernel = torch.cuda.jiterator._create_jit_fn(code)
    else:
        kernel = torch.cuda.jiterator._create_multi_output_jit_fn(code, outputs)

    def fn(*args: Any) -> Any:
        result = kernel(*operands(*args))
        return tuple(result) if outputs > 1 else result

    return Call(program.runner(fn, program.args))


# --- others --------------------------------------------------------------------------------------


def cupy(workload: Workload, program: Program) -> Call:
    import cupy

    fn = handwritten.arrays(workload.key, cupy, cupy.fuse)
    if fn is None:
        raise Unsuited("pointwise ops only, written by hand")
    if workload.dtype is torch.bfloat16:
        raise Unsuited("has no bfloat16")
    args = tuple(cupy.asarray(t.detach()) for t in program.args)
    return Call(program.runner(fn, args))  # on the null stream, which is torch's


def _jax_arguments(program: Program) -> tuple[Any, ...]:
    import jax

    # eager's float32 matmul is float32, JAX's would be TF32
    jax.config.update("jax_default_matmul_precision", "highest")
    return tuple(jax.dlpack.from_dlpack(t.detach().contiguous()) for t in program.args)


def jax(workload: Workload, program: Program) -> Call:
    import jax

    fn = handwritten.jax(workload.key, jax)
    if fn is None:
        raise Unsuited("written by hand for chains, SDE and RNN steps only")
    args = _jax_arguments(program)
    return Call(program.runner(jax.jit(fn), args), jax.block_until_ready, on_stream=False)


def jax_loop(workload: Workload, program: Program) -> Call:
    """The whole loop on the device, as jax.lax.fori_loop."""
    import jax

    fn = handwritten.jax(workload.key, jax) if program.calls > 1 else None
    if fn is None:
        raise Unsuited("written by hand for SDE and RNN loops only")
    args = _jax_arguments(program)

    def whole(*args: Any) -> Any:
        first = fn(*args)
        count = len(first) if isinstance(first, tuple) else 1

        def body(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            result = fn(*state, *args[count:])
            return result if count > 1 else (result,)

        return jax.lax.fori_loop(0, program.calls, body, args[:count])

    run = functools.partial(jax.jit(whole), *args)
    return Call(run, jax.block_until_ready, on_stream=False)


# --- the table -----------------------------------------------------------------------------------


def _cuda_only(device: str) -> str:
    return "" if device == "cuda" else "needs CUDA"


def _installed(package: str, cuda_only: bool = False) -> Callable[[str], str]:
    def missing(device: str) -> str:
        if importlib.util.find_spec(package) is None:
            return "not installed"
        return _cuda_only(device) if cuda_only else ""

    return missing


def _jax_missing(device: str) -> str:
    if why := _installed("jax")(device):
        return why
    try:
        import jax

        jax.devices(device)
    except Exception as error:  # a plugin that does not fit is another's, and a reason
        return f"no {device} device: {reason(error)}"
    return ""


PEERS: tuple[Peer, ...] = (
    Peer("eager", eager),
    Peer("autofuse", wrapped, what="tensors wrapped once, results materialized"),
    Peer("autofuse.fuse", fused, what="the same through the decorator, plain tensors in and out"),
    Peer("torch.compile", compiled),
    Peer("torch.compile, reduce-overhead", compiled_graphs, _cuda_only),
    Peer("torch.jit", jit, what="script, or trace where it cannot be scripted"),
    Peer("CUDA graph", graph, _cuda_only, "of one step, of eager ops"),
    Peer("jiterator", jiterator, _cuda_only, "one C++ expression, written by hand"),
    Peer("cupy.fuse", cupy, _installed("cupy", cuda_only=True), "written by hand"),
    Peer("JAX jit", jax, _jax_missing, "written by hand, of one step"),
    Peer("JAX fori_loop", jax_loop, _jax_missing, "written by hand, of the whole loop"),
)


def arrays_of(result: Any) -> list[torch.Tensor]:
    """The results of any peer as plain tensors."""
    leaves = [result] if hasattr(result, "__dlpack__") else pytree.tree_leaves(result)
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(autofuse.unwrap(leaf).detach())
        elif hasattr(leaf, "__dlpack__"):
            tensors.append(torch.from_dlpack(leaf))
    return tensors
