"""A multilayer perceptron trained on made-up data."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(64, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    target = (x[:, :10].cumsum(1) + 0.1 * torch.randn(4096, 10)).argmax(1)
    x, target = x.to(args.device), target.to(args.device)
    model = MLP(args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for _ in range(args.epochs):
        for rows in torch.randperm(len(x)).split(args.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), target[rows])
            loss.backward()
            optimizer.step()
    print(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
