"""torch's LSTM learns to add two numbers of a sequence."""

import argparse

import torch
from torch import nn


class Adder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        states, _ = self.lstm(x)
        return self.head(states[:, -1]).squeeze(-1)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Adder(args.hidden).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        values = torch.rand(64, args.length)
        marks = torch.zeros(64, args.length)
        for row, at in enumerate(torch.randint(args.length, (64, 2)).tolist()):
            marks[row, at] = 1.0
        x, target = torch.stack((values, marks), -1), (values * marks).sum(1)
        loss = nn.functional.mse_loss(model(x.to(args.device)), target.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
