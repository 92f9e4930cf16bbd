"""Workloads written by hand for peers that take no PyTorch code: jiterator, CuPy, JAX.

A version is found by the key of its row in workloads.py; `None` means that nobody wrote one. CuPy
and JAX share one text over their array modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads import CHAIN

Key = tuple[Any, ...]

# --- jiterator: C++, all ops of a workload in one expression --------------------------------------

SIGMOID = "T(1) / (T(1) + exp(-({})))"
_C = {"sigmoid": SIGMOID.format("t"), "mul": "t * y", "add": "t + x", "neg": "-t",
      "tanh": "tanh(t)"}  # fmt: skip
_HALVES = f"return a * ({SIGMOID.format('b')}) + tanh(a) * T(0.5);"
_HESTON = """
    T dt = T(1) / T(252), root_dt = T(0.0629940788348712);
    T positive = v > T(0) ? v : T(0), root = sqrt(positive);
    T dw_v = u * root_dt, dw_s = (u * T(-0.7) + z * T(0.714142842854285)) * root_dt;
    T jump = expm1(u * T(0.1)) * T(fabs(z) > T(3));
    T drift = (T(0.03) - positive * T(0.5)) * dt;
    T next = s * exp(drift + root * dw_s + jump * T(0.5) - T(1e-5));
    v_out = v + (T(0.04) - positive) * T(1.5) * dt + root * dw_v * T(0.3);
    s_out = next < T(1e6) ? next : T(1e6);"""


def jiterator(key: Key) -> tuple[str, int, Callable[..., tuple[Any, ...]]] | None:
    """Source, outputs, and what makes the source's operands of the workload's arguments."""

    def code(operands: str, body: str) -> str:
        names = ", ".join(f"T {name}" for name in operands.split())
        return f"template <typename T> T fused({names}) {{ {body} }}"

    match key:
        case ("chain", length):
            body = "".join(f"t = {_C[CHAIN[k % len(CHAIN)]]}; " for k in range(length))
            operands = "x y" if length > 1 else "x"
            return code(operands, f"T t = x; {body}return t;"), 1, lambda x, y: (x, y)[:length]
        case ("bias and gate, 6 ops",):
            gate = SIGMOID.format("x * scale + bias")
            return (code("x y bias scale", f"return ({gate}) * y + (x - bias);"), 1,
                    lambda *args: args)  # fmt: skip
        case ("GLU of halves, 5 ops",):
            return code("a b", _HALVES), 1, lambda x: tuple(x.chunk(2, -1))
        case ("every second column, 5 ops",):
            return code("a b", _HALVES), 1, lambda x: (x[:, ::2], x[:, 1::2])
        case ("heston",):
            head = "template <typename T> void fused(T s, T v, T z, T u, T& s_out, T& v_out)"
            return f"{head} {{{_HESTON}\n}}", 2, lambda *args: args
    return None


# --- CuPy and JAX: the array API -----------------------------------------------------------------


def arrays(key: Key, xp: Any, fuse: Callable[[Any], Any]) -> Callable[..., Any] | None:
    """The workload over the module `xp`, each of its pointwise parts made by `fuse`."""

    def sigmoid(t: Any) -> Any:
        return 1 / (1 + xp.exp(-t))

    @fuse
    def gate(a, b):
        return a * sigmoid(b) + xp.tanh(a) * 0.5

    match key:
        case ("chain", length):
            ops = {
                "sigmoid": lambda t, x, y: sigmoid(t), "mul": lambda t, x, y: t * y,
                "add": lambda t, x, y: t + x, "neg": lambda t, x, y: -t,
                "tanh": lambda t, x, y: xp.tanh(t),
            }  # fmt: skip

            @fuse
            def chain(x, y):
                t = x
                for k in range(length):
                    t = ops[CHAIN[k % len(CHAIN)]](t, x, y)
                return t

            return chain
        case ("bias and gate, 6 ops",):

            @fuse
            def bias_gate(x, y, bias, scale):
                return sigmoid(x * scale + bias) * y + (x - bias)

            return bias_gate
        case ("GLU of halves, 5 ops",):
            return lambda x: gate(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :])
        case ("every second column, 5 ops",):
            return lambda x: gate(x[:, ::2], x[:, 1::2])
        case ("heston",):

            @fuse
            def heston(s, v, z, u):
                dt, root_dt, kappa, theta, sigma, rho = 1 / 252, 252**-0.5, 1.5, 0.04, 0.3, -0.7
                positive = xp.maximum(v, 0.0)
                root = xp.sqrt(positive)
                dw_v = u * root_dt
                dw_s = (u * rho + z * (1 - rho**2) ** 0.5) * root_dt
                jump = xp.expm1(u * 0.1) * (xp.abs(z) > 3.0)
                drift = (0.03 - positive * 0.5) * dt
                s = s * xp.exp(drift + root * dw_s + jump * 0.5 - 1e-5)
                v = v + (theta - positive) * kappa * dt + root * dw_v * sigma
                return xp.minimum(s, 1e6), v

            return heston
    return None


def jax(key: Key, jax: Any) -> Callable[..., Any] | None:
    """The workload as a function for jax.jit."""
    xp = jax.numpy
    if key == ("rnn",):
        return lambda h, w, b: _rnn_step(xp, jax.nn.sigmoid, h, w, b)
    if key == ("rnn loop",):

        def loop(h, w, b):
            for _ in range(5):
                h = _rnn_step(xp, jax.nn.sigmoid, h, w, b)
            return h

        return loop
    return arrays(key, xp, lambda fn: fn)


def _rnn_step(xp: Any, sigmoid: Callable[[Any], Any], h: Any, w: Any, b: Any) -> Any:
    z = h @ w
    return xp.tanh(sigmoid(z) * b + z * 0.5)
