"""Programs with a loop over time: recurrent, state-space, spiking, liquid. Plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo_row import Start, program, trainer


class Reader(nn.Module):
    """A cell over a sequence with a linear readout; x: [T, B, D] -> [B, classes]."""

    def __init__(self, cell: nn.Module, hidden: int, classes: int = 10) -> None:
        super().__init__()
        self.cell, self.hidden = cell, hidden
        self.readout = nn.Linear(hidden, classes)

    def forward(self, x):
        state = self.cell.start(x[0].shape[0], x.device)
        for t in range(x.shape[0]):
            output, state = self.cell(x[t], state)
        return self.readout(output)


def reader(cell, tiny: bool, training: bool, steps: int = 20) -> Start:
    """A Reader of `cell(inputs, hidden)` on random sequences with random labels."""
    steps, batch, inputs, hidden = (3, 4, 5, 8) if tiny else (steps, 64, 64, 128)
    model = Reader(cell(inputs, hidden), hidden)
    x, labels = torch.randn(steps, batch, inputs), torch.randint(10, (batch,))
    if not training:
        return Start(model, (x,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = trainer(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
    return Start(step, (x, labels), (model,))


# --- gated ---------------------------------------------------------------------------------------


class Lstm(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)

    def start(self, batch, device):
        zeros = torch.zeros(batch, self.hidden, device=device)
        return zeros, zeros

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], dim=-1)).chunk(4, dim=-1)
        c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


@program("LSTM by hand", "inference", "training")
def lstm(tiny, training):
    return reader(Lstm, tiny, training)


class Gru(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.w_x = nn.Linear(inputs, 3 * hidden)
        self.w_h = nn.Linear(hidden, 3 * hidden)

    def start(self, batch, device):
        return torch.zeros(batch, self.hidden, device=device)

    def forward(self, x, h):
        gx, gh = self.w_x(x), self.w_h(h)
        rx, zx, nx = gx.split(self.hidden, dim=1)
        rh, zh, nh = gh.split(self.hidden, dim=1)
        r = (rx + rh).sigmoid()
        z = (zx + zh).sigmoid()
        n = (nx + r * nh).tanh()
        h = n + z * (h - n)
        return h, h


@program("GRU by hand", "inference", "training")
def gru(tiny, training):
    return reader(Gru, tiny, training)


class MinimalGated(nn.Module):
    """One gate that both forgets and updates."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.forget = nn.Linear(inputs + hidden, hidden)
        self.candidate = nn.Linear(inputs + hidden, hidden)
        self.hidden = hidden

    def start(self, batch, device):
        return torch.zeros(batch, self.hidden, device=device)

    def forward(self, x, h):
        f = torch.sigmoid(self.forget(torch.cat((x, h), 1)))
        new = torch.tanh(self.candidate(torch.cat((x, f * h), 1)))
        h = (1 - f) * h + f * new
        return h, h


@program("minimal gated unit", "training")
def minimal_gated(tiny, training):
    return reader(MinimalGated, tiny, training)


class SLstm(nn.Module):
    """Exponential gates with a normalizer and a stabilizer, after xLSTM's scalar cell."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.w = nn.Linear(inputs, 4 * hidden)
        self.r = nn.Parameter(torch.randn(hidden, 4 * hidden) / math.sqrt(hidden))

    def start(self, batch, device):
        return [torch.zeros(batch, self.hidden, device=device) for _ in range(4)]

    def forward(self, x, state):
        h, c, n, m = state
        z, i, f, o = (self.w(x) + h @ self.r).chunk(4, -1)
        log_f = F.logsigmoid(f)
        m_new = torch.maximum(log_f + m, i)
        i_gate = torch.exp(i - m_new)
        f_gate = torch.exp(log_f + m - m_new)
        c = f_gate * c + i_gate * torch.tanh(z)
        n = f_gate * n + i_gate
        h = torch.sigmoid(o) * c / n.clamp(min=1e-6)
        return h, [h, c, n, m_new]


@program("sLSTM", "inference", "training")
def slstm(tiny, training):
    return reader(SLstm, tiny, training)


# --- state space ---------------------------------------------------------------------------------


class SelectiveScan(nn.Module):
    """A Mamba-like mixer whose scan is a loop; x: [B, L, D]."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width, bias=False)
        self.select = nn.Linear(width, 2 * states + 1, bias=False)
        self.delta = nn.Linear(1, width)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width, bias=False)
        self.states = states

    def forward(self, x):
        u, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(u)
        dt, b, c = self.select(u).split([1, self.states, self.states], dim=-1)
        dt = F.softplus(self.delta(dt))  # [B, L, D]
        a = -torch.exp(self.log_a)  # [D, N]
        h = torch.zeros(*u.shape[::2], self.states, device=x.device)  # [B, D, N]
        ys = []
        for t in range(u.shape[1]):
            decay = torch.exp(dt[:, t].unsqueeze(-1) * a)
            drive = dt[:, t].unsqueeze(-1) * b[:, t].unsqueeze(1) * u[:, t].unsqueeze(-1)
            h = decay * h + drive
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, dim=1) + u * self.skip
        return x + self.out(y * F.silu(gate))


@program("selective scan", "inference", "training")
def selective_scan(tiny, training):
    batch, length, width, states = (2, 4, 6, 3) if tiny else (16, 32, 64, 16)
    model = SelectiveScan(width, states)
    x, target = torch.randn(batch, length, width), torch.randn(batch, length, width)
    if not training:
        return Start(model, (x,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Start(trainer(model, lambda m, x, y: F.mse_loss(m(x), y), optimizer), (x, target),
                 (model,))  # fmt: skip


class Diagonal(nn.Module):
    """A diagonal state space in real arithmetic, S5-like; a step of x: [B, D]."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.rand(hidden).log())
        self.angle = nn.Parameter(torch.rand(hidden) * math.pi)
        self.b_re, self.b_im = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden)
        self.c_re, self.c_im = (nn.Parameter(torch.randn(hidden) * 0.5) for _ in range(2))
        self.hidden = hidden

    def start(self, batch, device):
        zeros = torch.zeros(batch, self.hidden, device=device)
        return zeros, zeros.clone()

    def forward(self, x, state):
        re, im = state
        radius = torch.exp(-torch.exp(self.log_rate))
        cos, sin = radius * torch.cos(self.angle), radius * torch.sin(self.angle)
        gain = torch.sqrt(1 - radius**2)
        re, im = (
            cos * re - sin * im + gain * self.b_re(x),
            sin * re + cos * im + gain * self.b_im(x),
        )
        y = F.gelu(re * self.c_re - im * self.c_im)
        return y, (re, im)


@program("diagonal state space", "inference", "training")
def diagonal(tiny, training):
    return reader(Diagonal, tiny, training)


# --- spiking -------------------------------------------------------------------------------------


class Spike(torch.autograd.Function):
    """A step forward, a fast sigmoid's slope backward."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (10.0 * v.abs() + 1.0) ** 2


class Lif(nn.Module):
    """Leaky integrate and fire with a synaptic current and a soft reset."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, hidden)
        self.beta = nn.Parameter(torch.full((hidden,), 0.9))
        self.hidden = hidden

    def start(self, batch, device):
        return tuple(torch.zeros(batch, self.hidden, device=device) for _ in range(3))

    def forward(self, x, state):
        current, v, spikes = state
        current = 0.8 * current + self.fc(x)
        v = self.beta.clamp(0, 1) * v + current - spikes.detach() * 1.0
        spikes = Spike.apply(v - 1.0)
        return spikes, (current, v, spikes)


@program("spiking LIF", "inference", "training")
def lif(tiny, training):
    return reader(Lif, tiny, training, steps=25)


class AdaptiveLif(nn.Module):
    """A recurrent spiking cell whose threshold rises with every spike; hard reset by where."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.fc, self.rec = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)
        self.hidden = hidden

    def start(self, batch, device):
        return tuple(torch.zeros(batch, self.hidden, device=device) for _ in range(3))

    def forward(self, x, state):
        v, z, a = state
        v = torch.where(z > 0, torch.zeros_like(v), v * 0.95)
        v += self.fc(x) + self.rec(z)
        threshold = 1.0 + 0.2 * a
        z = Spike.apply((v - threshold) / threshold)
        a = 0.97 * a + z
        return v, (v, z, a)


@program("adaptive spiking", "training")
def adaptive_lif(tiny, training):
    return reader(AdaptiveLif, tiny, training)


# --- liquid --------------------------------------------------------------------------------------


class LiquidTime(nn.Module):
    """A liquid time constant cell: a fused Euler solver, several sub-steps per input."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.sense = nn.Linear(inputs, hidden)
        self.rec = nn.Linear(hidden, hidden)
        self.tau = nn.Parameter(torch.rand(hidden) + 0.5)
        self.a = nn.Parameter(torch.randn(hidden))
        self.hidden = hidden

    def start(self, batch, device):
        return torch.zeros(batch, self.hidden, device=device)

    def forward(self, x, v):
        sensed = self.sense(x)
        dt = 1.0 / 4
        for _ in range(4):
            f = torch.sigmoid(sensed + self.rec(v))
            v = (v + dt * f * self.a) / (1 + dt * (1 / F.softplus(self.tau) + f))
        return v, v


@program("liquid time constant", "inference", "training")
def liquid(tiny, training):
    return reader(LiquidTime, tiny, training, steps=10)


class ClosedForm(nn.Module):
    """Closed-form continuous time: two heads mixed by a gate of the elapsed time."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.backbone = nn.Linear(inputs + hidden, hidden)
        self.ff1, self.ff2 = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.time_a, self.time_b = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.hidden = hidden

    def start(self, batch, device):
        return torch.zeros(batch, self.hidden, device=device)

    def forward(self, x, h, elapsed=0.7):
        z = 1.7159 * torch.tanh(0.666 * self.backbone(torch.cat([x, h], 1)))
        ff1, ff2 = torch.tanh(self.ff1(z)), torch.tanh(self.ff2(z))
        t = torch.sigmoid(self.time_a(z) * elapsed + self.time_b(z))
        h = ff1 * (1.0 - t) + t * ff2
        return h, h


@program("closed-form continuous", "training")
def closed_form(tiny, training):
    return reader(ClosedForm, tiny, training)
