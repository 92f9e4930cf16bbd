"""Training steps: eager, torch.compile and autofuse in one run.

    python bench/training.py [--rounds 7] [--steps 50] [--compile] [--threads] [--autocast]
                             [--device cuda]

Forward + backward of an LSTM cell, a GRU cell and one with a layer norm, written as plain ops
(64x256), an MLP with layer norm and GELU, norms and a softmax between ops (8192x1024), residual
blocks, blocks of gated halves, a rotary embedding, blocks of newer networks with norms and gates
as people write them; chains of 1 to 10 ops; peak memory of a 10-op chain. Fused calls have found
the better way before they are timed. Times are medians over interleaved rounds with the 20th and
80th percentile; ratios are to eager.

--threads: forward + backward also with `backward_thread` the other way: eager in the calling
thread, autofuse in the engine's.
--autocast: other models, whose forward runs under autocast to bfloat16: an MLP with GELU and
residuals (64x1024), the recurrent cells, one of them checkpointed every 10 steps, a GPT block
(8x256x512); on a GPU also the peak memory of a step of each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.record.contest import NO_STEPS
from timing import in_thread, interleaved, machine, settle, synchronize

BATCH, HIDDEN, STEPS = 64, 256, 50


class LstmCell(nn.Module):
    """x, h, c: [B, H]; returns (h, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HIDDEN, 4 * HIDDEN) * HIDDEN**-0.5)
        self.u = nn.Parameter(torch.randn(HIDDEN, 4 * HIDDEN) * HIDDEN**-0.5)
        self.b = nn.Parameter(torch.zeros(4 * HIDDEN))

    def forward(self, x, h, c):
        gates = x @ self.w + h @ self.u + self.b  # [B, 4H]
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GruCell(nn.Module):
    """x, h: [B, H]; returns (h,)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN) * HIDDEN**-0.5)
        self.u = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN) * HIDDEN**-0.5)
        self.b = nn.Parameter(torch.zeros(3 * HIDDEN))

    def forward(self, x, h):
        xr, xz, xn = (x @ self.w + self.b).chunk(3, 1)
        hr, hz, hn = (h @ self.u).chunk(3, 1)
        r = torch.sigmoid(xr + hr)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return ((1 - z) * n + z * h,)


class NormCell(nn.Module):
    """A cell with a layer norm; x, h: [B, H]; returns (h,)."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = (nn.Parameter(torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5) for _ in "wu")
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x, h):
        return (torch.relu(self.norm(x @ self.w + h @ self.u)) + h,)


class Rows(nn.Module):
    """Norms and a softmax between pointwise ops, no matmul; x: [B, H]."""

    def __init__(self, kind: str, width: int = 1024) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width) if kind == "layer norm" else None
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        h = x * self.scale
        if self.kind == "softmax":
            return (torch.softmax(h + x, -1) * x,)
        if self.kind == "RMSNorm":  # as people write it
            return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale,)
        assert self.norm is not None
        return (torch.relu(self.norm(h)) + x,)


class Mlp(nn.Module):
    """Three layers with layer norm, GELU and scaling; x: [B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.gelu(norm(layer(x)) * self.scale) * 0.5 + x
        return (x,)


class Residual(nn.Module):
    """Blocks x + scale * silu(a) * b; x: [B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((HIDDEN,), 0.1) for _ in range(3))

    def forward(self, x):
        for layer, scale in zip(self.wide, self.scales, strict=True):
            a, b = layer(x).chunk(2, 1)
            x = x + scale * (F.silu(a) * torch.tanh(b) - 0.1 * a)
        return (x,)


class Gated(nn.Module):
    """Blocks of two halves, one of which lets the other through; x: [B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((2 * HIDDEN,), 0.5) for _ in range(3))

    def forward(self, x):
        for layer, scale in zip(self.wide, self.scales, strict=True):
            a, b = (layer(x) * scale).chunk(2, 1)
            x = x + a * torch.sigmoid(b)
        return (x,)


class Rotary(nn.Module):
    """A rotary embedding of a scaled projection; x: [B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        angles = torch.randn(2, BATCH, HIDDEN // 2).repeat(1, 1, 2)
        self.cos, self.sin = (nn.Buffer(x) for x in (angles.cos()[0], angles.sin()[1]))

    def forward(self, x):
        q = self.layer(x) * 0.125
        a, b = q.chunk(2, 1)
        return (q * self.cos + torch.cat((-b, a), 1) * self.sin,)


class Chain(nn.Module):
    """`length` pointwise ops over x: [B, H]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(BATCH, HIDDEN))
        self.length = length

    def forward(self, x):
        w = self.w
        for k in range(self.length):
            op = ("mul", "sigmoid", "add", "tanh", "neg")[k % 5]
            x = x * w if op == "mul" else x + w if op == "add" else getattr(torch, op)(x)
        return (x,)


class Unrolled(nn.Module):
    """`steps` steps of a cell; x: [T, B, H], states: [B, H]; returns the last states."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x, *states):
        for step in x.unbind(0):
            states = self.cell(step, *states)
        return states


class Checkpointed(Unrolled):
    """The same, of which only every tenth state is kept for backward."""

    def forward(self, x, *states):
        run = functools.partial(checkpoint, super().forward, use_reentrant=False)
        for part in x.split(10):
            states = run(part, *states)
        return states


class WideMlp(nn.Module):
    """Three layers with GELU, scaling and residuals; x: [B, 4H]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * HIDDEN, 4 * HIDDEN) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((4 * HIDDEN,), 0.1) for _ in range(3))

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = F.gelu(layer(x)) * scale * 0.5 + x
        return (x,)


class GptBlock(nn.Module):
    """Causal attention of 8 heads and an MLP, each after a norm and with a residual; x: [B, T, C].

    GELU is written out, as in the code of GPT-2.
    """

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, 2)
        q, k, v = (part.view(batch, length, 8, width // 8).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.norms[1](x))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h * h * h)))
        return (x + self.down(h),)


class RmsNorm(nn.Module):
    """As people write it, in float32; x: [..., C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.type_as(x)


class LlamaBlock(nn.Module):
    """Attention with normed queries and keys, and a gated MLP, after norms; x: [B, T, C]."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.norms = nn.ModuleList(RmsNorm(n) for n in (width, width, size, size))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        before, after, of_q, of_k = self.norms
        q, k, v = self.qkv(before(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k, v = of_q(q).transpose(1, 2), of_k(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = after(x)
        return (x + self.down(F.silu(self.gate(h)) * self.up(h)),)


class ConvNext(nn.Module):
    """A convolution by channel, a norm over channels as written, and an MLP; x: [B, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.weight, self.bias = (nn.Parameter(torch.ones(width, 1, 1)) for _ in range(2))
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x):
        h = self.conv(x)
        apart = h - h.mean(1, keepdim=True)
        h = apart / torch.sqrt(apart.pow(2).mean(1, keepdim=True) + 1e-6)
        return (x + self.down(F.gelu(self.up(self.weight * h + self.bias))),)


class ChannelGates(nn.Module):
    """Two convolutions whose channels are scaled by what they are on average; x: [B, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        for conv in self.convs:
            h = conv(x)
            x = F.relu(x + h * torch.sigmoid(h.mean((2, 3), keepdim=True)))
        return (x,)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM cell": lambda: Unrolled(LstmCell()),
    "GRU cell": lambda: Unrolled(GruCell()),
    "layer-norm cell": lambda: Unrolled(NormCell()),
    "MLP, layer norm, GELU": Mlp,
    **{
        f"{kind} between ops, 8192x1024": functools.partial(Rows, kind)
        for kind in ("layer norm", "softmax", "RMSNorm")
    },
    "residual blocks": Residual,
    "gated halves": Gated,
    "rotary embedding": Rotary,
    "Llama block, 4x64x256": functools.partial(LlamaBlock, 256),
    "Llama block, 8x256x512": functools.partial(LlamaBlock, 512),
    "ConvNeXt block, 8x64x28x28": functools.partial(ConvNext, 64),
    "gates by channel, 8x32x32x32": functools.partial(ChannelGates, 32),
    **{f"chain of {n}": functools.partial(Chain, n) for n in (1, 2, 3, 5, 10)},
}

AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "MLP, GELU, residuals, 64x1024": WideMlp,
    "LSTM cell": lambda: Unrolled(LstmCell()),
    "GRU cell": lambda: Unrolled(GruCell()),
    "LSTM cell, checkpoint every 10": lambda: Checkpointed(LstmCell()),
    "GPT block, 8x256x512": GptBlock,
}


def states(name: str, device: str) -> list[torch.Tensor]:
    """The inputs of a model: a sequence and zero states for a cell, otherwise x.

    The last one has the shape of the results.
    """
    generator = torch.Generator().manual_seed(0)
    if "cell" not in name:
        *_, last = name.split(", ")  # sizes, where they are other ones
        shape = [int(n) for n in last.split("x")] if "x" in last else [BATCH, HIDDEN]
        return [torch.randn(shape, generator=generator).to(device)]
    x = torch.randn(STEPS, BATCH, HIDDEN, generator=generator).to(device)
    count = 2 if "LSTM" in name else 1
    return [x, *(torch.zeros(BATCH, HIDDEN, device=device) for _ in range(count))]


def stepper(
    model: nn.Module, inputs: list[torch.Tensor], backward: bool, autocast: bool = False
) -> Callable[[], object]:
    parameters = list(model.parameters())
    gradient = torch.ones_like(inputs[-1])
    kind = inputs[0].device.type

    def forward() -> Any:
        if not autocast:
            return model(*inputs)
        with torch.autocast(kind, torch.bfloat16):
            return model(*inputs)

    def both() -> object:
        outs = forward()
        return torch.autograd.grad(outs, parameters, [gradient] * len(outs))

    return both if backward else forward


def measure(
    name: str,
    device: str,
    rounds: int,
    steps: int,
    compiled: bool,
    threads: bool,
    autocast: bool = False,
) -> None:
    torch.manual_seed(0)
    make = (AUTOCAST if autocast else MODELS)[name]
    eager = make().to(device)
    fused = autofuse.fuse(make().to(device))
    fused.load_state_dict(eager.state_dict())
    variants = {"eager": eager, "autofuse": fused}
    if compiled:
        variants["torch.compile"] = torch.compile(eager)
    inputs = states(name, device)
    cold = {}
    for label, model in variants.items():
        start = time.perf_counter()
        stepper(model, inputs, True, autocast)()
        synchronize(device)
        cold[label] = time.perf_counter() - start
    want, again, got = (stepper(x, inputs, True, autocast)() for x in (eager, eager, fused))
    same = str(all(map(torch.equal, want, got)))
    if not all(map(torch.equal, want, again)):
        same = "of no two steps of eager's"
    print(f"\n{name}: same bits {same}; first step " +
          ", ".join(f"{label} {seconds:.2f} s" for label, seconds in cold.items()))  # fmt: skip
    per = STEPS if "cell" in name else 1
    both = {label: stepper(model, inputs, True, autocast) for label, model in variants.items()}
    for what, backward in (("forward", False), ("forward + backward", True)):
        steps_of = {k: stepper(model, inputs, backward, autocast) for k, model in variants.items()}
        calls = {
            label: in_thread("auto" if label == "autofuse" else "engine", call)
            for label, call in steps_of.items()
        }
        if threads and backward:
            calls["eager, caller"] = in_thread("caller", steps_of["eager"])
            calls["autofuse, engine"] = in_thread("engine", steps_of["autofuse"])
        settle(calls["autofuse"], device, 0 if backward else NO_STEPS)
        series = interleaved(calls, device, rounds, max(3, steps // per))
        for times in series.values():
            times.times = [us / per for us in times.times]
        base = series["eager"].median
        for label, times in series.items():
            print(f"  {what:20s}{label:18s}{times} us  {times.median / base:5.2f}", flush=True)
    if device == "cuda":  # after all timing: the profiler's hooks stay and cost
        COUNTED.append((name, per, both))
    if device == "cuda" and autocast:
        peaks = {label: peak(call) for label, call in both.items()}
        print("  peak memory of a step: " + ", ".join(
            f"{label} {n / 2**20:.1f} MiB ({n / peaks['eager']:.2f})" for label, n in peaks.items()
        ))  # fmt: skip


COUNTED: list[tuple[str, int, dict[str, Callable[[], object]]]] = []


def count_kernels(call: Callable[[], object]) -> int:
    """Kernels that one call launches, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.name.startswith(("Mem", "cuda")) for e in events)


def peak(call: Callable[[], object]) -> int:
    """Bytes that `call` has in use at most beside what is there before."""
    for _ in range(2):  # the first may compile
        gc.collect()  # checkpoints leave cycles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        most = torch.cuda.max_memory_allocated() - before
    return most


def ten_ops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x * w + 0.5)
    y = torch.tanh(y * w) * y
    return F.silu(y * 2.0 - w) + y


def memory(device: str) -> None:
    """Peak of forward + backward of ten ops over 2^24 float32, in multiples of one tensor."""
    size = 1 << 24
    tensors = [torch.randn(size, device=device, requires_grad=True) for _ in range(2)]
    gradient = torch.ones(size, device=device)
    print("\npeak memory of forward + backward, 10 ops on 2^24 float32, in tensors of 64 MiB")
    results = {}
    for label in ("eager", "autofuse", "autofuse, recompute='inputs'"):
        autofuse.config.recompute = "inputs" if "inputs" in label else "free"
        call = ten_ops if label == "eager" else autofuse.fuse(lambda x, w: ten_ops(x, w))
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = call(*tensors)
            kept = torch.cuda.memory_allocated() - before
            grads = torch.autograd.grad(y, tensors, gradient)
            peak = torch.cuda.max_memory_allocated() - before
            del y, grads
        results[label] = peak
        ratio = peak / results["eager"]
        unit = size * 4
        print(f"  {label:30s}{peak / unit:6.1f}  {ratio:5.2f}  after forward {kept / unit:.1f}")
        autofuse.record.flush.flush_all("bench")
    autofuse.config.recompute = "free"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--threads", action="store_true", help="backward in the other thread too")
    parser.add_argument("--autocast", action="store_true", help="models under autocast instead")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    autofuse.config.compile = "now"  # what is measured is not the way there
    print(machine(args.device))
    for name in AUTOCAST if args.autocast else MODELS:
        if args.only in name:
            measure(name, args.device, args.rounds, args.steps, args.compile, args.threads,
                    args.autocast)  # fmt: skip
    if args.device == "cuda":
        if not args.autocast:
            memory(args.device)
        print("\nkernels of one step, forward + backward")
        for name, per, calls in COUNTED:
            counts = {label: count_kernels(call) / per for label, call in calls.items()}
            print(f"  {name:24s}" + ", ".join(f"{k} {n:.1f}" for k, n in counts.items()))


if __name__ == "__main__":
    main()
