"""A neural ODE on spirals by Runge-Kutta of fourth order, as with torchdiffeq."""

import argparse

import torch
from torch import nn


class ODEFunc(nn.Module):
    """dy/dt of a damped, driven oscillator with learnt constants; y: [B, 2]."""

    def __init__(self):
        super().__init__()
        self.damping = nn.Parameter(torch.tensor(0.1))
        self.stiffness = nn.Parameter(torch.tensor(2.0))

    def forward(self, t, y):
        x, v = y[:, 0], y[:, 1]
        force = torch.sin(x) * self.stiffness + self.damping * v * (1 + x * x)
        return torch.stack((v * torch.exp(-0.01 * x * x), -force + 0.3 * torch.tanh(v - x)), 1)


def rk4_step(func, t, dt, y):
    k1 = func(t, y)
    k2 = func(t + dt / 2, y + dt * k1 / 2)
    k3 = func(t + dt / 2, y + dt * k2 / 2)
    k4 = func(t + dt, y + dt * k3)
    return y + (k1 + 2 * k2 + 2 * k3 + k4) * (dt / 6)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    func = ODEFunc().to(args.device)
    y = torch.randn(args.batch, 2, device=args.device)
    with torch.no_grad():
        for k in range(args.steps):
            y = rk4_step(func, 0.01 * k, 0.01, y)
    print(f"mean {y.mean().item():.3f}")


if __name__ == "__main__":
    main()
