"""Ops that autofuse does not record: what they cost on wrapped tensors, above plain ones.

    python bench/passing.py [--device cuda] [--rounds 15] [--iterations 300] [--grad] [--only TEXT]

us per call, medians of rounds in which plain and wrapped take turns; 64 x 256 float32, concrete,
without grad or, with --grad, leaves that require it. `stays` is wrapped where results have come to
stay plain, and the program's row is us per op of one that only passes on. Of `h` plain, another
argument is wrapped. `process` is plain tensors of a process that has not imported autofuse, in
turns with this one's.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Row = Callable[[Any], object]


class Step(torch.autograd.Function):
    """1 where x is positive, as programs write it whose steps have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.view(-1)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.Tensor.t, x, use_reentrant=False)


def differentiated(x: torch.Tensor) -> None:
    with torch.enable_grad():
        x.sum().backward()


def slope(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf.sum(), leaf)[0]


def packed(x: torch.Tensor) -> None:
    with saved_tensors_hooks(str, str):
        pass


class Looking(torch.overrides.TorchFunctionMode):
    """A mode that passes everything on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        return function(*args, **kw or {})


def looked_at(x: torch.Tensor) -> torch.Tensor:
    with Looking():
        return x.view(-1)


def rows(device: str) -> dict[str, Row]:
    """Calls by name, of a tensor [64, 256]."""
    x = torch.randn(64, 256, device=device)
    w, b = torch.randn(256, 256, device=device), torch.randn(256, device=device)
    linear = torch.nn.Linear(256, 256, device=device)
    norm = torch.nn.LayerNorm(256, device=device)
    batch_norm = torch.nn.BatchNorm1d(256, device=device).eval()
    first, mask = torch.zeros(64, 1, dtype=torch.long, device=device), x > 0
    return {
        "x[:, 3]": lambda x: x[:, 3],
        "x[3]": lambda x: x[3],
        "x[mask]": lambda x: x[mask],
        "x[first[:, 0]]": lambda x: x[first[:, 0]],
        "x[:, 3] = 0.5": lambda x: operator.setitem(x, (slice(None), 3), 0.5),
        "x[3] = x[4]": lambda x: operator.setitem(x, 3, x[4]),
        "x.view(-1)": lambda x: x.view(-1),
        "x.t()": lambda x: x.t(),
        "x.T": lambda x: x.T,
        "x.permute(1, 0)": lambda x: x.permute(1, 0),
        "x.reshape(-1)": lambda x: x.reshape(-1),
        "x.unsqueeze(0)": lambda x: x.unsqueeze(0),
        "x.transpose(0, 1)": lambda x: x.transpose(0, 1),
        "torch.transpose(x, 0, 1)": lambda x: torch.transpose(x, 0, 1),
        "x.chunk(4, 1)": lambda x: x.chunk(4, 1),
        "x.split(64, 1)": lambda x: x.split(64, 1),
        "x[:4].unbind()": lambda x: x[:4].unbind(),
        "x.contiguous()": lambda x: x.contiguous(),
        "x.sum(-1)": lambda x: x.sum(-1),
        "x.sum(0)": lambda x: x.sum(0),
        "x.mean(-1, keepdim=True)": lambda x: x.mean(-1, keepdim=True),
        "torch.sum(x)": torch.sum,
        "x.argmax(1)": lambda x: x.argmax(1),
        "torch.mm(x, w)": lambda x: torch.mm(x, w),
        "x @ w": lambda x: x @ w,
        "torch.bmm": lambda x: torch.bmm(x.view(1, 64, 256), w.view(1, 256, 256)),
        "F.linear(x, w, b)": lambda x: F.linear(x, w, b),
        "nn.Linear": linear,
        "torch.cat([x, x])": lambda x: torch.cat([x, x]),
        "torch.stack([x, x])": lambda x: torch.stack([x, x]),
        "torch.gather(x, 1, first)": lambda x: torch.gather(x, 1, first),
        "x.gather(1, x.argmax())": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        "torch.zeros_like(x)": torch.zeros_like,
        "torch.roll(x, 1, 0)": lambda x: torch.roll(x, 1, 0),
        "torch.softmax(x, -1)": lambda x: torch.softmax(x, -1),
        "F.softmax(x, -1)": lambda x: F.softmax(x, -1),
        "F.layer_norm": lambda x: F.layer_norm(x, (256,)),
        "nn.LayerNorm": norm,
        "F.rms_norm": lambda x: F.rms_norm(x, (256,)),
        "nn.BatchNorm1d, eval": batch_norm,
        "F.cross_entropy": lambda x: F.cross_entropy(x, first[:, 0]),
        "F.dropout": lambda x: F.dropout(x, 0.5, True),
        "F.embedding": lambda x: F.embedding(first, x),
        "torch.einsum": lambda x: torch.einsum("ij,jk->ik", x, w),
        "autograd.Function": lambda x: Step.apply(x),
        "inference mode": inferred,
        "checkpoint": checkpointed,
        "x.shape": lambda x: x.shape,
        "x.size(0)": lambda x: x.size(0),
        "x.dim()": lambda x: x.dim(),
        "x.ndim": lambda x: x.ndim,
        "x.stride()": lambda x: x.stride(),
        "x.device": lambda x: x.device,
        "x.dtype": lambda x: x.dtype,
        "x.is_cuda": lambda x: x.is_cuda,
        "x.requires_grad": lambda x: x.requires_grad,
        "bool(x[0, 0] > 9)": lambda x: bool(x[0, 0] > 9),
        "x.data": lambda x: x.data,
        "x.grad": lambda x: x.grad,
        "x.grad = None": lambda x: setattr(x, "grad", None),
        "x.detach().requires_grad_()": lambda x: x.detach().requires_grad_(),
        "torch.autograd.grad": slope,
        "x[0, 0].item()": lambda x: x[0, 0].item(),
        "x[0, :4].tolist()": lambda x: x[0, :4].tolist(),
    }


def beside(device: str) -> dict[str, tuple[Row, Any]]:
    """Calls by name on a plain tensor `h`, and what they are given beside it, which is wrapped."""
    h, x, o = (torch.randn(64, 256, device=device) for _ in range(3))
    w, b = torch.randn(256, 256, device=device), torch.randn(256, device=device)
    i, first = torch.arange(64, device=device), torch.zeros(64, 1, dtype=torch.long, device=device)
    image, filters = torch.randn(1, 4, 8, 8, device=device), torch.randn(4, 4, 3, 3, device=device)
    return {
        "h[i]": (lambda i: h[i], i),
        "h[:, i]": (lambda i: h[:, i], i),
        "h[i, :]": (lambda i: h[i, :], i),
        "h[:, mask]": (lambda mask: h[:, mask], b > 1),
        "h.index_add(0, i, x)": (lambda given: h.index_add(0, *given), (i, x)),
        "h.index_add(0, j, x)": (lambda x: h.index_add(0, i, x), x),
        "h.index_select(0, i)": (lambda i: h.index_select(0, i), i),
        "h.index_select(dim=0, index=i)": (lambda i: h.index_select(dim=0, index=i), i),
        "h.gather(1, first)": (lambda first: h.gather(1, first), first),
        "h.scatter_add(0, first, x)": (lambda given: h.scatter_add(0, *given), (first, x)),
        "h.mm(w)": (lambda w: h.mm(w), w),
        "h.matmul(w)": (lambda w: h.matmul(w), w),
        "h @ w": (lambda w: h @ w, w),
        "h.view_as(x)": (lambda x: h.view_as(x), x),
        "h.type_as(x)": (lambda x: h.type_as(x), x),
        "h += x": (lambda x: operator.iadd(h, x), x),
        "h.add_(x)": (lambda x: h.add_(x), x),
        "h.addcmul_(x, x)": (lambda x: h.addcmul_(x, x), x),
        "h.copy_(x)": (lambda x: h.copy_(x), x),
        "h.masked_fill_(mask, 0)": (lambda mask: h.masked_fill_(mask, 0.0), b > 1),
        "h.index_add_(0, i, x)": (lambda given: h.index_add_(0, *given), (i, x)),
        "h.scatter_(1, first, x)": (lambda given: h.scatter_(1, *given), (first, x)),
        "h[3] = x": (lambda x: operator.setitem(h, 3, x), b),
        "h[i] = 0": (lambda i: operator.setitem(h, i, 0.0), i),
        "h[:, mask] = 0": (lambda mask: operator.setitem(h, (slice(None), mask), 0.0), b > 1),
        "torch.add(h, x, out=h)": (lambda x: torch.add(h, x, out=h), x),
        "torch.mm(h, w, out=o)": (lambda w: torch.mm(h, w, out=o), w),
        "torch.mm(h, w)": (lambda w: torch.mm(h, w), w),
        "torch.mm(h, mat2=w)": (lambda w: torch.mm(h, mat2=w), w),
        "torch.cat([h, x])": (lambda x: torch.cat([h, x]), x),
        "torch.stack((h, x), 1)": (lambda x: torch.stack((h, x), 1), x),
        "torch.conv2d": (lambda filters: torch.conv2d(image, filters), filters),
        "torch.index_select": (lambda i: torch.index_select(h, 0, i), i),
        "F.linear(h, w, b)": (lambda given: F.linear(h, *given), (w, b)),
        "F.embedding(i, h)": (lambda i: F.embedding(i, h), i),
        "F.layer_norm(h, ..., b)": (lambda b: F.layer_norm(h, (256,), b), b),
        "F.cross_entropy(h, i)": (lambda i: F.cross_entropy(h, i), i),
    }


# which eager refuses of a leaf that requires grad, or whose graph grows with every call
_WRITES = {"x[:, 3] = 0.5", "x[3] = x[4]", "h += x", "h.add_(x)", "h.addcmul_(x, x)", "h.copy_(x)",
           "h.index_add_(0, i, x)", "h.scatter_(1, first, x)", "h[3] = x",
           "torch.add(h, x, out=h)", "torch.mm(h, w, out=o)"}  # fmt: skip
_OPS = 47  # of `program`


def program(x: Any) -> Any:
    """Ops that are not recorded, each on what others gave."""
    for _ in range(3):
        x = x.view(64, 4, 64).transpose(0, 1)[:, 8:].unsqueeze(2).reshape(4, -1)
        left, right = x.chunk(2, 1)
        x = torch.cat([right, left], 1).view(56, 4, 64)[:, 0]
        x = torch.cat([x.t(), x[:8].t()], 1).repeat(4, 1).t()
    return x.sum(-1)


def plain_rows(device: str) -> dict[str, Row]:
    """Calls by name of a plain tensor of one element, where only the host counts."""
    t = torch.ones(1, device=device)
    t.requires_grad_(False)
    m, i = t.view(1, 1), torch.zeros(1, dtype=torch.long, device=device)
    leaf = torch.ones(1, device=device, requires_grad=True)
    return {
        "t.add_(1)": lambda _: t.add_(1),
        "t[0] = 1": lambda _: operator.setitem(t, 0, 1),
        "t.data_ptr()": lambda _: t.data_ptr(),
        "t.grad": lambda _: t.grad,
        "t.requires_grad": lambda _: t.requires_grad,
        "t.grad = None": lambda _: setattr(t, "grad", None),
        "t[0]": lambda _: t[0],
        "t[0:1]": lambda _: t[0:1],
        "t[i]": lambda _: t[i],
        "t[:, i]": lambda _: m[:, i],
        "t.mm(t)": lambda _: m.mm(m),
        "t.sum(0)": lambda _: t.sum(0),
        "t.sum(dim=0)": lambda _: t.sum(dim=0),
        "t.view(1)": lambda _: t.view(1),
        "t.size(0)": lambda _: t.size(0),
        "t.index_select(0, i)": lambda _: t.index_select(0, i),
        "t.index_add(0, i, t)": lambda _: t.index_add(0, i, t),
        "torch.sigmoid(t)": lambda _: torch.sigmoid(t),
        "torch.mm(t, t)": lambda _: torch.mm(m, m),
        "torch.add(t, t)": lambda _: torch.add(t, t),
        "torch.add(t, t, alpha=2)": lambda _: torch.add(t, t, alpha=2),
        "torch.sum(t, 0)": lambda _: torch.sum(t, 0),
        "torch.cat([t, t])": lambda _: torch.cat([t, t]),
        "torch.relu_(t)": lambda _: torch.relu_(t),
        "F.relu(t)": lambda _: F.relu(t),
        "F.linear(t, t[None])": lambda _: F.linear(t, t[None]),
        "F.layer_norm(t, (1,))": lambda _: F.layer_norm(t, (1,)),
        "autograd.Function": lambda _: Step.apply(t),
        "autograd.Function, grad": lambda _: Step.apply(leaf),
        "backward": lambda _: differentiated(leaf),
        "inference mode": lambda _: inferred(t),
        "saved_tensors_hooks": lambda _: packed(t),
        "TorchFunctionMode": lambda _: looked_at(t),
        "checkpoint": lambda _: checkpointed(leaf),
        "nn.Parameter(t)": lambda _: torch.nn.Parameter(t),
    }


def leaves_of(x: Any, grad: bool, wrap: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """Concrete copies of a tensor or several, wrapped or not, which require grad where they can."""
    if isinstance(x, tuple):
        return tuple(leaves_of(item, grad, wrap) for item in x)
    leaf = x.clone().requires_grad_(grad and x.is_floating_point())
    return leaf if wrap is None else wrap(leaf)


def us_of(call: Row, x: Any, iterations: int) -> float:
    begun = time.perf_counter()
    for _ in range(iterations):
        call(x)
    return (time.perf_counter() - begun) / iterations * 1e6


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def serve(device: str) -> None:
    """Time plain rows of a process without autofuse, as told on standard input."""
    torch.set_num_threads(1)
    calls = plain_rows(device)
    for line in sys.stdin:
        name, iterations = line.rstrip("\n").split("\t")
        synchronize(device)
        print(us_of(calls[name], None, int(iterations)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.device)
    import autofuse

    torch.set_num_threads(1)
    torch.set_grad_enabled(given.grad)
    device, n = given.device, given.iterations
    plain = torch.randn(64, 256, device=device)

    def wrapped(leaf: torch.Tensor) -> Any:
        made = autofuse.wrap(leaf)
        autofuse.materialize(made + 1)  # as after any chain
        return made

    calls = {name: (call, plain) for name, call in rows(device).items()}
    calls |= {"a program, per op": (program, plain)} | beside(device)
    print(f"{'':31} plain us  wrapped, more  stays, more")
    for name, (call, x) in calls.items():
        if given.only not in name or (given.grad and name in _WRITES):
            continue
        operands, others = (leaves_of(x, given.grad, wrap) for wrap in (None, wrapped))
        times = []
        for _ in range(2 + given.rounds):
            autofuse.config.measure = False
            here, there = us_of(call, operands, n), us_of(call, others, n)
            synchronize(device)
            autofuse.config.measure = True
            times.append((here, there - here, us_of(call, others, n) - here))
            synchronize(device)
        ops = _OPS if call is program else 1
        columns = zip(*times[2:], strict=True)  # by then results stay plain
        without, more, stays = (statistics.median(column) / ops for column in columns)
        print(f"{name:31} {without:8.2f} {more:+14.2f} {stays:+12.2f}", flush=True)
    other = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--device", device],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdin is not None and other.stdout is not None
    autofuse.materialize(autofuse.wrap(plain) + 1)  # which has been in use
    print(f"\n{'':26}  process  with autofuse, more")
    for name, call in plain_rows(device).items():
        if given.only not in name:
            continue
        pairs = []
        for k in range(1 + 3 * given.rounds):
            other.stdin.write(f"{name}\t{n}\n")
            other.stdin.flush()
            there = float(other.stdout.readline())
            synchronize(device)
            here = us_of(call, None, n)
            if k:  # the first warms up
                pairs.append((there, here))
        without = statistics.median(a for a, _ in pairs)
        more = statistics.median(b - a for a, b in pairs)
        print(f"{name:26} {without:8.3f} {more:+9.3f}", flush=True)
    other.stdin.close()
    other.wait()


if __name__ == "__main__":
    main()
