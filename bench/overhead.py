"""What recording, flushing and launching cost, against eager, on the device at hand.

    python bench/overhead.py [--device cuda] [--rounds 9] [--iterations 1000] [--large 67108864]

Chains of 1 to 20 ops on 64x256 and 1x64 float32 in operator form and in torch.* form, the RNN
step (one matmul and five pointwise ops), training steps of chains of up to 10 ops between products
with backward in either thread, what fused calls take beside their ops, and the bandwidth of a 5-op
chain, of rows that are no whole vectors and of norms of images. Variants are interleaved; figures
are medians with the 20th and 80th percentile in brackets.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import autofuse

sys.path.insert(0, str(Path(__file__).parent))
from timing import Series, host_us, interleaved, machine

Chain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def operator_chain(length: int) -> Chain:
    """`length` ops as operators and methods, cycling through the five of the design figures."""
    ops = ["t = t.sigmoid()", "t = t * y", "t = t + x", "t = -t", "t = t.tanh()"]
    return _chain([ops[k % 5] for k in range(length)])


def function_chain(length: int) -> Chain:
    """The same ops in torch.* form."""
    ops = ["t = torch.sigmoid(t)", "t = torch.mul(t, y)", "t = torch.add(t, x)",
           "t = torch.neg(t)", "t = torch.tanh(t)"]  # fmt: skip
    return _chain([ops[k % 5] for k in range(length)])


def _chain(lines: list[str]) -> Chain:
    space: dict[str, object] = {"torch": torch}
    exec(
        "def chain(x, y):\n    t = x\n" + "".join(f"    {s}\n" for s in lines) + "    return t\n",
        space,
    )
    return space["chain"]  # type: ignore[return-value]


def row(name: str, series: dict[str, Series]) -> None:
    eager, fused = series["eager"], series["fused"]
    print(f"{name:34s} eager {eager}   fused {fused}   ratio {fused.median / eager.median:.3f}")


@torch.no_grad()
def chains(device: str, rounds: int, iterations: int) -> None:
    materialize = autofuse.materialize
    for shape in ((64, 256), (1, 64)):
        x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
        wx, wy = autofuse.wrap(x), autofuse.wrap(y)
        for form, make in (("operators", operator_chain), ("torch.*", function_chain)):
            for length in (1, 2, 5, 10, 20):
                chain = make(length)
                calls = {
                    "eager": lambda chain=chain: chain(x, y),
                    "fused": lambda chain=chain: materialize(chain(wx, wy)),
                }
                name = f"{length} ops, {form}, {shape[0]}x{shape[1]}"
                row(name, interleaved(calls, device, rounds, iterations))


@torch.no_grad()
def rnn_step(device: str, rounds: int, iterations: int) -> None:
    h, w = torch.randn(64, 256, device=device), torch.randn(256, 256, device=device) / 16
    b = torch.randn(256, device=device)

    def step(h: torch.Tensor) -> torch.Tensor:
        z = h @ w
        return torch.tanh(torch.sigmoid(z) * b + z * 0.5)

    state = {"eager": h, "fused": autofuse.wrap(h)}

    def run(which: str) -> None:
        state[which] = step(state[which])

    calls = {"eager": lambda: run("eager"), "fused": lambda: run("fused")}
    row("RNN step (1 mm + 5 ops)", interleaved(calls, device, rounds, iterations))


def training(device: str, rounds: int, iterations: int) -> None:
    """Forward + backward of 20 chains between products, by `backward_thread`, every length fused;
    in the caller's thread also where a checkpoint computes all of them twice.

    What `record.policy` takes a flush and a Python node under grad to cost is what a fused chain of
    no ops would cost beside the product, and what it takes an eager op with its gradient to cost,
    the rise of eager's; and what hooks of saved tensors cost follows from how long a chain has to
    be in a checkpoint to take as long as eager's.
    """
    autofuse.config.always_fuse, autofuse.config.measure = True, False
    x, y = (torch.randn(64, 64, device=device) for _ in range(2))
    w, g = torch.randn(64, 64, device=device, requires_grad=True), torch.ones(64, 64, device=device)
    wx, wy = autofuse.wrap(x.clone()), autofuse.wrap(y.clone())
    lengths, chains = (0, 1, 2, 3, 5, 10), 20

    def run(chain: Chain, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(chains):
            x = chain(x @ w, y)
        return x

    def step(chain: Chain, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.autograd.grad(run(chain, x, y), w, g)

    def again(chain: Chain, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.autograd.grad(checkpoint(run, chain, x, y, use_reentrant=False), w, g)

    for thread, step_, name in (
        ("engine", step, "engine"),
        ("caller", step, "caller"),
        ("caller", again, "checkpoint"),
    ):
        autofuse.config.backward_thread = thread
        each: dict[str, list[float]] = {"eager": [], "fused": []}
        for length in lengths:
            chain = operator_chain(length)
            calls = {
                "eager": lambda chain=chain, step=step_: step(chain, x, y),
                "fused": lambda chain=chain, step=step_: step(chain, wx, wy),
            }
            series = interleaved(calls, device, rounds, max(iterations // chains, 1))
            row(f"{chains} chains of {length} and backward, {name}", series)
            for side, times in each.items():
                times.append(series[side].median / chains)
        for side, (product, *times) in each.items():
            rise, start = statistics.linear_regression(lengths[1:], times)
            print(f"{side}, {name}: a chain {start - product:.1f} us and {rise:.2f} us per op")
    autofuse.config.backward_thread, autofuse.config.always_fuse = "auto", False
    autofuse.config.measure = True


@dataclass
class State:
    h: torch.Tensor
    c: torch.Tensor
    step: int = 0


class Cell(torch.nn.Module):
    """Takes and gives tensors in containers of every kind."""

    def forward(self, x: torch.Tensor, layers: Any, options: Any, state: State) -> Any:
        h = state.h * options["scale"] + layers[0]
        c = state.c * layers[1][0] - layers[2]
        return {"h": h, "state": State(h + x, c, state.step + 1), "layers": [h, c], "count": 2}


def calls(device: str, rounds: int, iterations: int) -> None:
    """What a fused call takes beside its ops, and one that is left alone: minima of short rounds.

    The ops are the function's own of wrapped tensors, and one flush.
    """

    def arguments(make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
        x, *more = (make(torch.randn(8, device=device)) for _ in range(7))
        return x, [more[0], (more[1],), more[2]], {"scale": 2.0, "bias": more[3]}, State(*more[4:6])

    def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y + x

    def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x * y
        return z + x, z - y

    def flushed(run: Callable[..., Any], *args: Any) -> None:
        result = run(*args)
        autofuse.materialize(result["h"] if isinstance(result, dict) else result)

    x, y = torch.randn(8, device=device), torch.randn(8, device=device)
    given, wrapped = (x, y), (autofuse.wrap(x.clone()), autofuse.wrap(y.clone()))
    cell, nested, nested_wrapped = Cell(), arguments(lambda t: t), arguments(autofuse.wrap)
    rows = {
        "a fused call of two ops and two tensors": (two, given, wrapped),
        "of three ops and two results": (pair, given, wrapped),
        "of a module with 7 tensors in containers": (cell.forward, nested, nested_wrapped),
    }
    settings = autofuse.config.measure, autofuse.config.always_fuse
    with torch.no_grad():
        autofuse.config.measure, autofuse.config.always_fuse = False, True
        for name, (run, args, others) in rows.items():
            fused = autofuse.fuse(run)
            series = interleaved(
                {"call": lambda: fused(*args), "ops": lambda: flushed(run, *others)},  # noqa: B023
                device, 10 * rounds, max(1, iterations // 10),
            )  # fmt: skip
            call, ops = min(series["call"].times), min(series["ops"].times)
            print(f"{name}: {call:.2f} us, beside its ops {call - ops:.2f}")
        autofuse.config.measure, autofuse.config.always_fuse = True, False
        function = autofuse.fuse(lambda x, y: None)
        for _ in range(1000):
            function(x, y)
        series = interleaved(
            {"call": lambda: function(x, y)}, device, 10 * rounds, iterations // 10
        )
        print(f"one that is left alone: {min(series['call'].times):.2f} us")
    autofuse.config.measure, autofuse.config.always_fuse = settings


@torch.no_grad()
def parts(device: str, iterations: int) -> None:
    """us per recorded op, per flush with launch, and the hit rate."""
    x, y = (autofuse.wrap(torch.randn(64, 256, device=device)) for _ in range(2))
    lengths = (5, 25)  # below the length at which an unrolled loop is cut
    times = []
    autofuse.reset_stats()
    for length in lengths:
        for make in (operator_chain, function_chain):
            chain = make(length)
            series = interleaved(
                {"chain": lambda chain=chain: autofuse.materialize(chain(x, y))},
                device, 5, iterations // 4,
            )  # fmt: skip
            times.append(series["chain"].median)
    operator, function = ((times[k + 2] - times[k]) / (lengths[1] - lengths[0]) for k in (0, 1))
    stats = autofuse.stats()
    needed = stats.cache_hits + stats.kernels_compiled
    print(f"per recorded op: {operator:.2f} us as operators, {function:.2f} us as torch.*")
    print(f"a flush with its launch and two Inputs: {times[0] - 5 * operator:.2f} us")
    print(f"hit rate {stats.cache_hits / needed:.5f} ({stats.kernels_compiled} compiled)")


@torch.no_grad()
def growth(device: str, count: int) -> None:
    """1,000 sizes, 1,000 scalars, and a sum of 10,000 terms that nobody reads."""
    chain = operator_chain(5)
    inputs = [torch.randn(64 + k, 64, device=device) for k in range(count)]
    autofuse.reset_stats()
    times: dict[str, list[float]] = {"eager": [], "fused": []}
    for x in inputs:
        w = autofuse.wrap(x)
        times["eager"].append(host_us(lambda x=x: chain(x, x), device, 1))
        fused = lambda w=w: autofuse.materialize(chain(w, w))  # noqa: E731
        times["fused"].append(host_us(fused, device, 1))
    later = sorted(f / e for e, f in zip(times["eager"][10:], times["fused"][10:], strict=True))
    print(f"{count} sizes: {autofuse.stats().kernels_compiled} kernels compiled; first sight of a "
          f"size against eager: median {statistics.median(later):.2f}, "
          f"95% below {later[len(later) * 95 // 100]:.2f}, worst {later[-1]:.2f}")  # fmt: skip
    w = autofuse.wrap(inputs[0])
    autofuse.reset_stats()
    for k in range(count):
        autofuse.materialize(w * (k + 0.5) + 1.25)
    print(f"{count} scalars: {autofuse.stats().kernels_compiled} kernels compiled")
    autofuse.reset_stats()
    acc = w
    for _ in range(10 * count):
        acc = acc + inputs[0]
    autofuse.materialize(acc)
    stats = autofuse.stats()
    print(f"sum of {10 * count} terms: {stats.kernels_compiled} kernels compiled, "
          f"{stats.kernels_launched} launched")  # fmt: skip


@torch.no_grad()
def bandwidth(device: str, numel: int, rounds: int) -> None:
    x, y = torch.randn(numel, device=device), torch.randn(numel, device=device)
    out = torch.empty_like(x)
    wx, wy = autofuse.wrap(x), autofuse.wrap(y)
    chain = operator_chain(5)
    iterations = 20 if device == "cuda" else 1
    series = interleaved(
        {
            "copy": lambda: out.copy_(x),
            "eager": lambda: chain(x, y),
            "fused": lambda: autofuse.materialize(chain(wx, wy)),
        },
        device, rounds, iterations,
    )  # fmt: skip
    nbytes = {"copy": 8 * numel, "fused": 12 * numel, "eager": (8 + 12 + 12 + 8 + 8) * numel}
    rates = {name: nbytes[name] / series[name].median / 1e6 for name in series}
    for name, rate in rates.items():
        print(f"5-op chain on {numel} float32: {name:6s} {series[name]} us, {rate:.3f} TB/s")
    print(f"fused bytes/s against copy: {rates['fused'] / rates['copy']:.3f}")


@torch.no_grad()
def odd_rows(device: str, numel: int, rounds: int) -> None:
    """By rows that are whole vectors and rows that are not, and from where no vector begins."""
    iterations = 20 if device == "cuda" else 1
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (4096, 4095, 513, 511, 49, 0):
            flat = torch.randn(numel + 1, device=device).to(dtype)
            x = flat[1:] if columns == 0 else flat[: numel // columns * columns].view(-1, columns)
            b = torch.randn(columns or 1, device=device).to(dtype)
            w = autofuse.wrap(x)
            series = interleaved(
                {"eager": lambda x=x, b=b: torch.relu(x + b) * 1.5,
                 "fused": lambda w=w, b=b: autofuse.materialize(torch.relu(w + b) * 1.5)},
                device, rounds, iterations,
            )  # fmt: skip
            rate = 2 * x.numel() * x.element_size() / series["fused"].median / 1e6
            where = f"in rows of {columns}" if columns else "at the second element"
            row(f"3 ops on {str(dtype)[6:]} {where}, {rate:.3f} TB/s", series)


def beside_eager(
    name: str, program: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], device: str,
    rounds: int,
) -> None:  # fmt: skip
    """`program` of plain tensors and of wrapped ones, in turns, as a row."""
    wrapped = [autofuse.wrap(x.clone()) for x in tensors]  # memory that nobody else can reach
    series = interleaved(
        {"eager": lambda: program(*tensors),
         "fused": lambda: autofuse.materialize(program(*wrapped))},
        device, rounds, 20 if device == "cuda" else 1,
    )  # fmt: skip
    row(name, series)


@torch.no_grad()
def images(device: str, numel: int, rounds: int) -> None:
    """What stands between convolutions in evaluation, and copies into another layout."""
    for dtype, layout in (
        (torch.float32, torch.contiguous_format), (torch.float32, torch.channels_last),
        (torch.bfloat16, torch.contiguous_format), (torch.bfloat16, torch.channels_last),
    ):  # fmt: skip
        shape = (max(numel // (256 * 56 * 56), 1), 256, 56, 56)
        x, y = (torch.randn(shape, device=device).to(dtype, memory_format=layout) for _ in "xy")
        norm = torch.nn.BatchNorm2d(256).to(device).eval()
        programs = {
            "relu(batch_norm(x))": lambda x, y, norm=norm: torch.relu(norm(x)),
            "relu(batch_norm(x) + y)": lambda x, y, norm=norm: torch.relu(norm(x) + y),
            "relu(x + y).flatten(2).transpose(1, 2).contiguous()": lambda x, y: (
                torch.relu(x + y).flatten(2).transpose(1, 2).contiguous()
            ),
        }
        for name, program in programs.items():
            name = f"{name} of {str(dtype)[6:]}, {str(layout)[6:]}"
            beside_eager(name, program, (x, y), device, rounds)


@torch.no_grad()
def groups(device: str, numel: int, rounds: int) -> None:
    """What a diffusion model has before its convolutions: of a small image, and of `numel` / 2."""
    side = max(1, math.isqrt(numel // 256))
    for shape in ((2, 320, 64, 64), (1, 128, side, side)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, device=device).to(dtype)
            norm = torch.nn.GroupNorm(32, shape[1]).to(device, dtype)
            name = f"silu(group_norm(x)) of {list(shape)} {str(dtype)[6:]}"
            beside_eager(name, lambda x, norm=norm: F.silu(norm(x)), (x,), device, rounds)


def _norm_of_channels(x: torch.Tensor) -> torch.Tensor:
    apart = x - x.mean(1, keepdim=True)
    return apart / torch.sqrt(apart.pow(2).mean(1, keepdim=True) + 1e-6)


def columns(device: str, numel: int, rounds: int) -> None:
    """Reductions over a dimension that others follow: of `numel` / 8 elements, of which most have
    few rows and some, of a gradient of a bias, many; and of a small one."""
    batch = max(1, numel >> 19)
    tokens, images, few = (batch // 4 or 1, 512, 512), (batch // 4 or 1, 256, 32, 32), (64, 32, 64)
    programs = {
        f"(x * w).sum(1) of {list(tokens)}": (tokens, lambda x, w: (x * w).sum(1)),
        f"(x * w).sum(0) of {[tokens[0] * 512, 512]}":
            ((tokens[0] * 512, 512), lambda x, w: (x * w).sum(0)),
        f"LayerNorm of channels of {list(images)}": (images, lambda x, w: _norm_of_channels(x * w)),
        f"softmax(x * w, 1) of {list(images)}": (images, lambda x, w: torch.softmax(x * w, 1)),
        f"(x * w).sum(1) of {list(few)}": (few, lambda x, w: (x * w).sum(1)),
    }  # fmt: skip
    for name, (shape, program) in programs.items():
        for dtype in (torch.float32, torch.bfloat16):
            x, w = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            beside_eager(f"{name} {str(dtype)[6:]}", program, (x, w), device, rounds)


@torch.no_grad()
def axes(device: str, numel: int, rounds: int) -> None:
    """Reductions over several dimensions, or of tensors that lie in another order, of `numel` / 8
    elements: a loss with a weight for each example, statistics of channels, what squeezes images
    to their channels, and rows that are transposed."""
    batch = max(1, numel >> 19)
    images, tokens = (batch // 4 or 1, 256, 32, 32), (batch // 4 or 1, 512, 512)
    last = torch.channels_last
    programs = {
        f"(w * (x - y) ** 2).mean() of {list(images)}, w of examples":
            (images, lambda x, y: (y[:, :1, :1, :1] * (x - y) ** 2).mean()),
        f"mean and variance of channels of x * y, {list(images)}": (images, _scaled_by_statistics),
        f"relu(x * y).mean((2, 3)) of {list(images)}":
            (images, lambda x, y: torch.relu(x * y).mean((2, 3))),
        f"relu(x * y).mean((2, 3)) of {list(images)}, channels_last":
            (images, lambda x, y: torch.relu(x * y).mean((2, 3))),
        f"(x.mT * y.mT).sum(-1) of {list(tokens)}":
            (tokens, lambda x, y: (x.mT * y.mT).sum(-1)),
    }  # fmt: skip
    for name, (shape, program) in programs.items():
        for dtype in (torch.float32, torch.bfloat16):
            x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            if name.endswith("channels_last"):
                x, y = x.to(memory_format=last), y.to(memory_format=last)
            beside_eager(f"{name} {str(dtype)[6:]}", program, (x, y), device, rounds)


def _scaled_by_statistics(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * y
    apart = h - h.mean((0, 2, 3), True)
    return apart * torch.rsqrt((apart * apart).mean((0, 2, 3), True) + 1e-5)


@torch.no_grad()
def extremes(device: str, numel: int, rounds: int) -> None:
    """What is largest and where, and how many hold, of `numel` / 8 elements."""
    shape = (max(1, numel >> 13), 1024)
    programs = {
        f"x - x.max(-1, True).values of {list(shape)}":
            lambda x, y: x * y - (x * y).max(-1, True).values,
        "(x * y).argmax(-1) of it": lambda x, y: (x * y).argmax(-1),
        "(x - y).abs().max() of it": lambda x, y: (x - y).abs().max(),
        "(x > y).sum() of it": lambda x, y: (x > y).sum(),
    }  # fmt: skip
    for name, program in programs.items():
        for dtype in (torch.float32, torch.bfloat16):
            x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            beside_eager(f"{name} {str(dtype)[6:]}", program, (x, y), device, rounds)


@torch.no_grad()
def rolls(device: str, numel: int, rounds: int) -> None:
    """A step of a wave solver with periodic borders, of 256 x 256 and of `numel` / 4 elements."""
    for side in (256, max(8, int((numel // 4) ** 0.5))):
        for dtype in (torch.float32, torch.bfloat16):
            u, before = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            beside_eager(
                f"a wave of {side}x{side} {str(dtype)[6:]}", _waved, (u, before), device, rounds
            )


def _waved(u: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    around = torch.roll(u, 1, 0) + torch.roll(u, -1, 0) + torch.roll(u, 1, 1) + torch.roll(u, -1, 1)
    return 2.0 * u - before + 0.1 * (around - 4.0 * u)


@torch.no_grad()
def makers(device: str, numel: int, rounds: int) -> None:
    """Tensors made as pending values are: a sampler's noise, and a frame around a stencil."""
    for n in (1 << 14, numel // 16):
        for name, program in (("noise", _noisy), ("zeros to write to", _bordered)):
            x = torch.randn(n // 64, 64, device=device)
            beside_eager(f"{name} of {n}", program, (x, x), device, rounds)


def _noisy(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = x + 0.1 * (mean - x) + 0.3 * torch.randn_like(x)
    return x


def _bordered(u: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        change = torch.zeros_like(u)
        change[1:-1] = u[:-2] + u[2:] - 2.0 * u[1:-1]
        u = u + speed * change
    return u


@torch.no_grad()
def in_place(device: str, numel: int, rounds: int) -> None:
    """State that is updated in place: of an optimizer, of particles, a sum before an activation."""
    for n in (1 << 14, numel // 4):
        for step, count in ((_adam, 4), (_kicked, 3), (_residual, 2)):
            tensors = [torch.rand(n, device=device) for _ in range(count)]
            beside_eager(f"{step.__name__[1:]} of {n}", step, tensors, device, rounds)


def _adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)
    return p


def _kicked(x: torch.Tensor, v: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
    v += 0.01 * (force - x)
    v *= 0.999
    x += 0.01 * v
    return x


def _residual(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.flip(x, (0,))  # which is not recorded: its result is in memory
    out += y
    return torch.relu_(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--sizes", type=int, default=1000)
    parser.add_argument("--large", type=int, default=1 << 26)
    args = parser.parse_args()
    autofuse.config.compile = "now"  # what is measured is not the way there
    print(machine(args.device))
    chains(args.device, args.rounds, args.iterations)
    rnn_step(args.device, args.rounds, args.iterations)
    training(args.device, args.rounds, args.iterations)
    calls(args.device, args.rounds, args.iterations)
    parts(args.device, args.iterations)
    growth(args.device, args.sizes)
    bandwidth(args.device, args.large, args.rounds)
    odd_rows(args.device, args.large, args.rounds)
    images(args.device, args.large, args.rounds)
    groups(args.device, args.large, args.rounds)
    columns(args.device, args.large, args.rounds)
    axes(args.device, args.large, args.rounds)
    extremes(args.device, args.large, args.rounds)
    rolls(args.device, args.large, args.rounds)
    makers(args.device, args.large, args.rounds)
    in_place(args.device, args.large, args.rounds)


if __name__ == "__main__":
    main()
