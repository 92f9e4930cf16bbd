"""THE table of workloads: what is timed, at which size, dtype and device. Knows no peer.

A row names a maker; `row.make(device, scale)` gives a Program: the function that a user would hand
to a compiler, its arguments, and the ordinary code around it (a loop, a backward). A new workload
is one row, and a function in programs.py. `scale` shrinks sizes and loops, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import programs

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A function with its arguments, and how it is run."""

    fn: Function  # the unit that a user hands to a compiler
    args: tuple[Any, ...]  # tensors, Parameters, or lists of them
    calls: int = 1  # of fn in a run; from the second on, its results replace the leading args
    steps: int = 1  # a run's time is divided by these
    wrt: tuple[int, ...] = ()  # args whose gradients a run computes; then under grad
    cotangents: tuple[torch.Tensor, ...] = ()
    grad: bool = False  # autograd is on during a run
    mutates: bool = False  # a run writes to its args
    nbytes: int = 0  # what one kernel would have to read and write

    def runner(self, fn: Function, args: tuple[Any, ...]) -> Callable[[], Any]:
        """A run with `fn` in the place of self.fn, and `args` in that of self.args."""
        if self.wrt:
            weights = [args[k] for k in self.wrt]
            return lambda: torch.autograd.grad(_tuple(fn(*args)), weights, self.cotangents)
        if self.calls == 1:
            return functools.partial(fn, *args)
        return lambda: _loop(fn, args, self.calls)


def _loop(fn: Function, args: tuple[Any, ...], calls: int) -> Any:
    result = fn(*args)
    if isinstance(result, (tuple, list)):
        fixed = args[len(result) :]
        for _ in range(calls - 1):
            result = fn(*result, *fixed)
        return result
    fixed = args[1:]
    for _ in range(calls - 1):
        result = fn(result, *fixed)
    return result


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


class Setup:
    """Where and how large: what a maker builds its arguments with. Never zeros: zeros are faster
    to multiply and to move than what anybody computes with."""

    def __init__(self, device: str, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> None:
        self.device, self.dtype, self.scale = device, dtype, scale
        self._generator = torch.Generator(device).manual_seed(seed)

    def size(self, full: int, least: int = 2) -> int:
        """`full`, scaled, and even."""
        return max(least, round(full * self.scale) // 2 * 2) if self.scale != 1 else full

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        values = torch.randn(
            shape, device=self.device, dtype=self.dtype, generator=self._generator
        )  # fmt: skip
        return values if std == 1.0 else values.mul_(std)

    def weight(self, *shape: int) -> torch.nn.Parameter:
        """A weight whose product with a normal input is of its size."""
        return torch.nn.Parameter(self.normal(*shape, std=shape[0] ** -0.5))

    def bias(self, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.normal(*shape, std=0.1))


# --- pointwise chains ----------------------------------------------------------------------------

# the five ops of a chain, over and over; also the key of the versions in handwritten.py
CHAIN = ("sigmoid", "mul", "add", "neg", "tanh")
FORMS = {
    "operators": {
        "sigmoid": "t.sigmoid()", "mul": "t * y", "add": "t + x", "neg": "-t", "tanh": "t.tanh()",
    },
    "torch.*": {
        "sigmoid": "torch.sigmoid(t)", "mul": "torch.mul(t, y)", "add": "torch.add(t, x)",
        "neg": "torch.neg(t)", "tanh": "torch.tanh(t)",
    },
}  # fmt: skip


@functools.cache
def chain_function(length: int, form: str = "operators") -> Function:
    """`length` ops of x and y, cycling through the five, as source without a loop."""
    lines = [f"    t = {FORMS[form][CHAIN[k % len(CHAIN)]]}\n" for k in range(length)]
    space: dict[str, Any] = {"torch": torch, "__name__": "chains"}
    exec(f"def chain(x, y):\n    t = x\n{''.join(lines)}    return t\n", space)
    return space["chain"]


def chain(s: Setup, length: int, shape: tuple[int, ...], form: str = "operators") -> Program:
    shape = tuple(map(s.size, shape))
    x, y = s.normal(*shape), s.normal(*shape)
    operands = 3 if length > 1 else 2
    nbytes = operands * x.numel() * x.element_size()
    return Program(chain_function(length, form), (x, y), nbytes=nbytes)


def bias_gate(s: Setup, shape: tuple[int, int]) -> Program:
    rows, width = map(s.size, shape)
    x, y = s.normal(rows, width), s.normal(rows, width)
    args = (x, y, s.normal(width), s.normal(width))
    return Program(programs.bias_gate, args, nbytes=3 * x.numel() * x.element_size())


def halves(s: Setup, fn: Function, shape: tuple[int, int]) -> Program:
    rows, width = map(s.size, shape)
    x = s.normal(rows, 2 * width)
    return Program(fn, (x,), nbytes=x.numel() * x.element_size() * 3 // 2)


# --- loops ---------------------------------------------------------------------------------------

BATCH, HIDDEN = 64, 256


def rnn(s: Setup, steps: int, batch: int = BATCH) -> Program:
    batch, hidden = s.size(batch), s.size(HIDDEN)
    args = (s.normal(batch, hidden), s.normal(hidden, hidden, std=hidden**-0.5), s.normal(hidden))
    if steps == 5:  # short enough to hand the whole loop to a compiler
        return Program(programs.rnn_loop_5, args, steps=5)
    steps = s.size(steps) if steps > 1 else 1
    return Program(programs.rnn_step, args, calls=steps, steps=steps)


def heston(s: Setup, paths: int, steps: int) -> Program:
    paths, steps = s.size(paths), s.size(steps)
    args = (s.normal(paths) + 100, s.normal(paths).abs() * 0.04, s.normal(paths), s.normal(paths))
    return Program(programs.heston_step, args, calls=steps, steps=steps)


def rk4(s: Setup) -> Program:
    batch, width, hidden, steps = s.size(256), s.size(32), s.size(64), s.size(10)
    args = (
        s.normal(batch, width), s.normal(width, hidden, std=width**-0.5), s.normal(hidden, std=0.1),
        s.normal(hidden, width, std=hidden**-0.5), s.normal(width, std=0.1),
    )  # fmt: skip
    return Program(programs.rk4_step, args, calls=steps, steps=steps)


# --- cells ---------------------------------------------------------------------------------------


def cell(
    s: Setup,
    step: Function,
    sequence: Function,
    gates: int,
    states: int = 1,
    backward: bool = False,
) -> Program:
    """`step` 20 times without grad, or `sequence` over 5 steps and the gradients of its weights."""
    batch, hidden = s.size(BATCH), s.size(HIDDEN)
    start = tuple(s.normal(batch, hidden) for _ in range(states))
    wide = gates * hidden
    weights = [s.weight(hidden, wide), s.weight(hidden, wide), s.bias(wide)]
    if step is programs.norm_cell:
        weights.append(torch.nn.Parameter(s.normal(wide, std=0.1) + 1))
    if not backward:
        steps = s.size(20)
        args = (*start, s.normal(batch, hidden), *(w.detach() for w in weights))
        return Program(step, args, calls=steps, steps=steps)
    args = (*start, s.normal(5, batch, hidden), *weights)
    wrt = tuple(range(states + 1, len(args)))
    cotangents = tuple(s.normal(batch, hidden) for _ in range(states))
    return Program(sequence, args, steps=5, wrt=wrt, cotangents=cotangents, grad=True)


lstm = functools.partial(cell, step=programs.lstm_cell, sequence=programs.lstm_sequence, gates=4,
                         states=2)  # fmt: skip
gru = functools.partial(cell, step=programs.gru_cell, sequence=programs.gru_sequence, gates=3)
norm = functools.partial(cell, step=programs.norm_cell, sequence=programs.norm_sequence, gates=1)


# --- training ------------------------------------------------------------------------------------


def adam(s: Setup, count: int) -> Program:
    count, width = s.size(count), s.size(256)
    shapes = [(width, width) if k % 2 == 0 else (width,) for k in range(count)]
    params = [s.weight(*shape) for shape in shapes]
    grads, means = ([s.normal(*shape, std=std) for shape in shapes] for std in (1.0, 0.1))
    squares = [s.normal(*shape).abs_() for shape in shapes]
    return Program(programs.adam_step, (params, grads, means, squares), mutates=True)


def ddpg(s: Setup) -> Program:
    batch, hidden, state, action = s.size(128), s.size(256), 17, 6

    def mlp(inputs: int, outputs: int) -> list[torch.nn.Parameter]:
        sizes = [(hidden, inputs), (hidden, hidden), (outputs, hidden)]
        return [p for n, m in sizes for p in (s.weight(n, m), s.bias(n))]

    actor, critic = mlp(state, action), mlp(state + action, 1)
    slow = [[p.detach() + 0.01 * s.normal(*p.shape) for p in net] for net in (actor, critic)]
    kept = [
        [s.normal(*p.shape).abs_().mul_(0.01) for _ in range(2) for p in net]
        for net in (actor, critic)
    ]
    end = (s.normal(batch, 1) > 1).to(s.dtype)
    data = [s.normal(batch, state), s.normal(batch, action), s.normal(batch, 1),
            s.normal(batch, state), end]  # fmt: skip
    args = (data, actor, critic, *slow, *kept)
    return Program(programs.ddpg_update, args, grad=True, mutates=True)


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    maker: Callable[..., Program]
    shape: str  # as it is shown
    dtype: torch.dtype = torch.float32
    clock: str = "host"  # or "device": what bounds it at this size
    key: tuple[Any, ...] = ()  # of its versions in handwritten.py
    leave_out: dict[str, str] = field(default_factory=dict, hash=False)  # peer -> why

    @property
    def label(self) -> str:
        return f"{self.name}, {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def make(self, device: str, scale: float = 1.0) -> Program:
        """The same values at every call."""
        return self.maker(Setup(device, self.dtype, scale))


SMALL, MIDDLE, LARGE = (BATCH, HIDDEN), (1024, 1024), (1 << 16, 1 << 10)
SHOWN = {SMALL: "64x256", MIDDLE: "2^20", LARGE: "2^26"}
_SAME = "compiles to the same as its operators"
_NO_LAUNCHES = {"torch.compile, reduce-overhead": "left out: launches cost nothing at this size"}
_IN_PLACE = {"torch.compile, reduce-overhead": "left out: no graphs of what writes to its inputs"}
COMPILERS = (
    "torch.compile", "torch.compile, reduce-overhead", "torch.jit", "CUDA graph", "jiterator",
    "cupy.fuse", "JAX jit", "JAX fori_loop",
)  # fmt: skip


def _chain(length: int, shape: tuple[int, ...], dtype=torch.float32, form="operators") -> Workload:
    maker = functools.partial(chain, length=length, shape=shape, form=form)
    name = f"{length} op{'s' if length > 1 else ''}" + (", torch.*" if form == "torch.*" else "")
    leave_out = dict.fromkeys(COMPILERS, _SAME) if form == "torch.*" else {}
    if length in (1, 10, 40):
        leave_out = leave_out | {"torch.compile, reduce-overhead": "left out: like 5 and 20 ops"}
    clock, more = _by_size(shape)
    return Workload(name, maker, SHOWN[shape], dtype, clock, ("chain", length), leave_out | more)


def _of_x(name: str, maker: Callable[..., Program], shape: tuple[int, int], dtype=torch.float32,
          **more: Any) -> Workload:  # fmt: skip
    maker = functools.partial(maker, shape=shape, **more)
    clock, leave_out = _by_size(shape)
    return Workload(name, maker, SHOWN[shape], dtype, clock, (name,), leave_out)


def _by_size(shape: tuple[int, ...]) -> tuple[str, dict[str, str]]:
    return ("device", _NO_LAUNCHES) if shape == LARGE else ("host", {})


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
WORKLOADS: tuple[Workload, ...] = (
    *(_chain(n, SMALL) for n in (1, 2, 5, 10, 20, 40)),
    *(_chain(n, SMALL, form="torch.*") for n in (1, 2, 5, 20)),
    _of_x("bias and gate, 6 ops", bias_gate, SMALL),
    _of_x("GLU of halves, 5 ops", halves, SMALL, fn=programs.glu),
    Workload("RNN loop of 5", functools.partial(rnn, steps=5), "64x256", key=("rnn loop",)),
    Workload("RNN loop of 100", functools.partial(rnn, steps=100), "64x256", key=("rnn",)),
    Workload("RNN loop of 10,000", functools.partial(rnn, steps=10_000), "64x256", key=("rnn",)),
    Workload("SDE step, 30 ops", functools.partial(heston, paths=4096, steps=50), "4096",
             key=("heston",)),
    Workload("neural ODE, RK4 step", rk4, "256x32"),
    Workload("LSTM cell, forward", lstm, "64x256"),
    Workload("GRU cell, forward", gru, "64x256"),
    Workload("layer-norm cell, forward", norm, "64x256"),
    _chain(5, MIDDLE),
    _chain(5, LARGE), _chain(5, LARGE, bf16), _chain(5, LARGE, f16),
    _chain(1, LARGE), _chain(20, LARGE), _chain(20, LARGE, bf16),
    _of_x("bias and gate, 6 ops", bias_gate, LARGE),
    _of_x("bias and gate, 6 ops", bias_gate, LARGE, bf16),
    _of_x("GLU of halves, 5 ops", halves, LARGE, fn=programs.glu),
    _of_x("GLU of halves, 5 ops", halves, LARGE, bf16, fn=programs.glu),
    _of_x("every second column, 5 ops", halves, LARGE, fn=programs.every_second),
    Workload("SDE step, 30 ops", functools.partial(heston, paths=1 << 22, steps=10), "2^22",
             clock="device", key=("heston",), leave_out=_NO_LAUNCHES),
    Workload("LSTM cell, forward + backward", functools.partial(lstm, backward=True), "64x256"),
    Workload("GRU cell, forward + backward", functools.partial(gru, backward=True), "64x256"),
    Workload("layer-norm cell, forward + backward", functools.partial(norm, backward=True),
             "64x256"),
    Workload("Adam, 100 parameters", functools.partial(adam, count=100), "256x256, 256",
             leave_out=_IN_PLACE),
    Workload("DDPG update", ddpg, "128x256", leave_out=_IN_PLACE),
)  # fmt: skip
# on the CPU of a machine with a GPU
ON_CPU = tuple(row for row in WORKLOADS if row.name.startswith("RNN loop"))


def chosen(device: str, only: list[str]) -> list[tuple[Workload, str]]:
    """(workload, device) of a run, in its order."""
    rows = [(row, device) for row in WORKLOADS]
    if device == "cuda":
        rows += [(row, "cpu") for row in ON_CPU]
    return [(row, on) for row, on in rows if not only or any(t in row.label for t in only)]
