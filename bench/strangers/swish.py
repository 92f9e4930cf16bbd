"""Swish with a learnt slope on large tensors, and what else is written element by element."""

import argparse

import torch
from torch import nn


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, y):
        gate = x * torch.sigmoid(self.beta * x)
        return (gate * y + 0.1 * x * x - (x - y).abs()).clamp(-10, 10)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    swish = Swish().to(args.device)
    x, y = (torch.randn(args.size, device=args.device) for _ in range(2))
    with torch.no_grad():
        for _ in range(args.steps):
            x = swish(x, y)
    print(f"mean {x.mean().item():.3f}")


if __name__ == "__main__":
    main()
