"""Losses of classes, forward and backward: time, memory and bits, against eager.

    python bench/classes.py [--rounds 7] [--iterations 5] [--compile] [--size 8192x50257]

`F.cross_entropy` of logits as language models have them: in float32, in bfloat16 under autocast,
and in bfloat16 that the program makes float32, with as many classes as usual vocabularies have
(GPT-2's 50,257 in rows that are no whole vectors). Variants take turns; a wrapped leaf stands for
logits that an op before gave. Peaks of memory are what a step allocates beyond what there was.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
from timing import interleaved, machine

SIZES = ((1024, 32000), (8192, 32000), (8192, 50257), (8192, 50304), (4096, 128256))
KINDS = ("float32", "bfloat16", "bfloat16, autocast", "bfloat16, made float32")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(kind: str) -> Loss:
    """The loss of logits of this kind and classes."""
    if kind == "bfloat16, made float32":
        return lambda x, t: F.cross_entropy(x.float(), t)
    return lambda x, t: F.cross_entropy(x, t)


def stepping(loss_of_x: Loss, x: torch.Tensor, t: torch.Tensor, kind: str) -> Callable[[], None]:
    """A function that differentiates the loss once; `x` may be wrapped."""
    device = x.device.type

    def step() -> None:
        x.grad = None
        casts = contextlib.nullcontext()
        with torch.autocast(device, torch.bfloat16) if kind.endswith("autocast") else casts:
            loss = loss_of_x(x, t)
        loss.backward()

    return step


def peak_of(step: Callable[[], None]) -> float:
    """MB that a step allocates at most beyond what there was, on a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def row(
    kind: str, rows: int, columns: int, device: str, rounds: int, iterations: int, compiled: bool
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device).to(dtype)
    t = torch.randint(columns, (rows,), device=device)
    leaves = {name: x.clone().requires_grad_() for name in ("eager", "autofuse", "compile")}
    autofuse.wrap(leaves["autofuse"])
    loss = loss_of(kind)
    calls = {name: stepping(loss, leaves[name], t, kind) for name in ("eager", "autofuse")}
    if compiled:
        torch._dynamo.reset()
        calls["compile"] = stepping(torch.compile(loss), leaves["compile"], t, kind)
    for _ in range(12):
        for step in calls.values():
            step()
    autofuse.wait()
    for step in calls.values():
        step()
    grads = [leaves[name].grad for name in ("eager", "autofuse")]
    same = torch.equal(*(grad.view(torch.uint8) for grad in grads))  # type: ignore[union-attr]
    del grads
    peaks = {name: peak_of(step) for name, step in calls.items()}
    series = interleaved(calls, device, rounds, iterations)
    eager = series["eager"].median
    parts = [f"{name} {series[name].median / eager:.3f}" for name in calls if name != "eager"]
    memory = ", ".join(f"{name} {mb:.0f}" for name, mb in peaks.items())
    print(f"{kind:24} {rows}x{columns}: eager {eager:.0f} us, of that {', '.join(parts)}; "
          f"MB {memory}; gradient's bits {'same' if same else 'DIFFER'}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", action="append", help="rows and classes, instead of the usual")
    options = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in options.size or ()] or SIZES
    print(machine(options.device))
    for kind in KINDS:
        for rows, columns in sizes:
            row(kind, rows, columns, options.device, options.rounds, options.iterations,
                options.compile)  # fmt: skip
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
