"""What is timed, as ordinary PyTorch code: cells, solvers, optimizers. Knows no peer and no clock.

Every function takes and returns tensors (or lists of them), so that eager, a compiler or a fuser
may run it as it stands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# --- loops ---------------------------------------------------------------------------------------


def rnn_step(h, w, b):
    """One matmul and five pointwise ops; h: [B, H], w: [H, H], b: [H]."""
    z = h @ w
    return torch.tanh(torch.sigmoid(z) * b + z * 0.5)


def rnn_loop_5(h, w, b):
    for _ in range(5):
        h = rnn_step(h, w, b)
    return h


def heston_step(s, v, z, u):
    """Euler step of Heston's model under full truncation: 30 pointwise ops, s, v, z, u: [paths].

    s: price, v: variance, z, u: standard normal noise, drawn beforehand. The price jumps where z
    is large.
    """
    dt, root_dt, kappa, theta, sigma, rho = 1 / 252, 252**-0.5, 1.5, 0.04, 0.3, -0.7
    positive = torch.clamp(v, min=0.0)
    root = torch.sqrt(positive)
    dw_v = u * root_dt
    dw_s = (u * rho + z * (1 - rho**2) ** 0.5) * root_dt
    jump = torch.expm1(u * 0.1) * (z.abs() > 3.0)
    drift = (0.03 - positive * 0.5) * dt
    s = s * torch.exp(drift + root * dw_s + jump * 0.5 - 1e-5)
    v = v + (theta - positive) * kappa * dt + root * dw_v * sigma
    return torch.clamp(s, max=1e6), v


def node_field(y, w1, b1, w2, b2):
    return torch.tanh(y @ w1 + b1) @ w2 + b2


def rk4_step(y, w1, b1, w2, b2):
    """One Runge-Kutta step of a small neural ODE; y: [B, D], w1: [D, H], w2: [H, D]."""
    dt = 0.05
    k1 = node_field(y, w1, b1, w2, b2)
    k2 = node_field(y + k1 * (dt / 2), w1, b1, w2, b2)
    k3 = node_field(y + k2 * (dt / 2), w1, b1, w2, b2)
    k4 = node_field(y + k3 * dt, w1, b1, w2, b2)
    return y + (k1 + k2 * 2.0 + k3 * 2.0 + k4) * (dt / 6)


# --- cells ---------------------------------------------------------------------------------------


def lstm_cell(h, c, x, w, u, b):
    """h, c, x: [B, H], w, u: [H, 4H], b: [4H]."""
    gates = x @ w + h @ u + b
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(h, x, w, u, b):
    """h, x: [B, H], w, u: [H, 3H], b: [3H]."""
    xr, xz, xn = (x @ w + b).chunk(3, 1)
    hr, hz, hn = (h @ u).chunk(3, 1)
    r = torch.sigmoid(xr + hr)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


def norm_cell(h, x, w, u, b, gain):
    """A recurrent cell with layer norm in plain ops; h, x: [B, H], w, u: [H, H], b, gain: [H]."""
    z = x @ w + h @ u
    centred = z - z.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(variance + 1e-5) * gain + b
    return torch.tanh(normal) * 0.9 + h * 0.1


# the same over a short sequence xs: [T, B, H], for backward through time


def lstm_sequence(h, c, xs, w, u, b):
    for x in xs.unbind(0):
        h, c = lstm_cell(h, c, x, w, u, b)
    return h, c


def gru_sequence(h, xs, w, u, b):
    for x in xs.unbind(0):
        h = gru_cell(h, x, w, u, b)
    return h


def norm_sequence(h, xs, w, u, b, gain):
    for x in xs.unbind(0):
        h = norm_cell(h, x, w, u, b, gain)
    return h


# --- pointwise, with broadcast and strided operands ----------------------------------------------


def bias_gate(x, y, bias, scale):
    """x, y: [B, H], bias, scale: [H]; six ops."""
    z = torch.sigmoid(x * scale + bias)
    return z * y + (x - bias)


def glu(x):
    """x: [B, 2H], its halves strided; five ops."""
    a, b = x.chunk(2, -1)
    return a * torch.sigmoid(b) + torch.tanh(a) * 0.5


def every_second(x):
    """x: [B, 2H], neighbours taken apart; five ops."""
    a, b = x[:, ::2], x[:, 1::2]
    return a * torch.sigmoid(b) + torch.tanh(a) * 0.5


# --- training ------------------------------------------------------------------------------------


@torch.no_grad()
def adam_step(params, grads, means, squares):
    """Adam, parameter by parameter, in place; bias corrections as in its 10th step."""
    for p, g, m, v in zip(params, grads, means, squares):  # noqa: B905 - for torch.jit.script
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        denominator = (v.sqrt() / 0.0998).add_(1e-8)
        p.addcdiv_(m, denominator, value=-1e-3 / 0.6513)
    return params


def mlp(x, weights):
    """Three layers; weights: w1, b1, w2, b2, w3, b3."""
    w1, b1, w2, b2, w3, b3 = weights
    x = F.relu(F.linear(x, w1, b1))
    x = F.relu(F.linear(x, w2, b2))
    return F.linear(x, w3, b3)


def policy(state, weights):
    return torch.tanh(mlp(state, weights))


def value(state, action, weights):
    return mlp(torch.cat([state, action], 1), weights)


def ddpg_update(batch, actor, critic, slow_actor, slow_critic, actor_state, critic_state):
    """One update of an actor and a critic (DDPG), their optimizers and their slow copies.

    batch: state, action, reward, next state, end. actor, critic: the weights of an mlp, slow_*
    copies that follow them. *_state: what Adam keeps, means then squares.
    """
    state, action, reward, following, end = batch
    with torch.no_grad():
        target = value(following, policy(following, slow_actor), slow_critic)
        target = reward + 0.99 * (1 - end) * target
    critic_loss = F.mse_loss(value(state, action, critic), target)
    grads = torch.autograd.grad(critic_loss, critic)
    adam_step(critic, grads, critic_state[:6], critic_state[6:])
    actor_loss = -value(state, policy(state, actor), critic).mean()
    grads = torch.autograd.grad(actor_loss, actor)
    adam_step(actor, grads, actor_state[:6], actor_state[6:])
    with torch.no_grad():
        for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
            for s, f in zip(slow, fast, strict=True):
                s.mul_(0.995).add_(f, alpha=0.005)
    return critic_loss.detach(), actor_loss.detach()
