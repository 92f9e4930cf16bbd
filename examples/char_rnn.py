"""Train a character-level recurrent model on Python's own documentation, eagerly and fused.

    python examples/char_rnn.py [--steps 120] [--device cuda]

The cell is written as plain matmuls and pointwise ops. Two copies of the model are trained on the
same batches in turns, ten steps as they are and ten under `autofuse.fuse`, where every step's
pointwise ops are one kernel forward and one backward. In the first half of the steps kernels are
compiled and `fuse` measures which way costs less, per function and size; the second half is what it
keeps to. Losses and weights are compared, and then text is sampled without grad.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import nn

import autofuse

LENGTH = 32  # characters per training sequence
BATCH = 32  # sequences per step
TURN = 10  # steps of one copy, before it is the other's turn
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class GatedCell(nn.Module):
    """h' = (1 - z) h + z n with z = sigmoid(gates), n = tanh(candidate); x, h: [B, H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        scale = hidden**-0.5
        self.input_weight = nn.Parameter(torch.randn(hidden, 2 * hidden) * scale)
        self.hidden_weight = nn.Parameter(torch.randn(hidden, 2 * hidden) * scale)
        self.bias = nn.Parameter(torch.zeros(2 * hidden))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        from_x = x @ self.input_weight  # [B, 2H]
        from_h = h @ self.hidden_weight  # [B, 2H]
        gates = from_x + from_h + self.bias
        z, n = gates.chunk(2, -1)
        z = torch.sigmoid(z - 1.0)
        n = torch.tanh(n)
        return h * (1.0 - z) + z * n


class CharModel(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.cell = GatedCell(hidden)
        self.head = nn.Linear(hidden, characters)
        self.hidden = hidden

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: int64 [B, T]; returns float32 logits [B, T, characters]."""
        h = self.embedding.weight.new_zeros(text.shape[0], self.hidden)
        states = []
        for x in self.embedding(text).unbind(1):
            h = self.cell(x, h)
            states.append(h)
        return self.head(torch.stack(states, 1))

    def step(self, character: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of sampling: character int64 [B], h float32 [B, H]."""
        h = self.cell(self.embedding(character), h)
        return self.head(h), h


def load_text(device: str) -> tuple[torch.Tensor, str]:
    """Python's documentation as int64 indices into an alphabet."""
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: k for k, character in enumerate(alphabet)}
    return torch.tensor([index[c] for c in text], device=device), alphabet


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:79s}", end="" if text else "\r", file=sys.stderr, flush=True)


class Training:
    """A model with its optimizer and its batches; two of them see the same ones."""

    def __init__(self, data: torch.Tensor, characters: int, fused: bool) -> None:
        torch.manual_seed(0)
        self.data = data
        self.model = CharModel(characters, 128).to(data.device)
        if fused:
            self.model = autofuse.fuse(self.model)  # the one line
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[torch.Tensor] = []
        self.turns: list[float] = []  # s per step

    def step(self) -> None:
        last = len(self.data) - LENGTH - 1
        at = torch.randint(last, (BATCH,), generator=self.generator).tolist()
        batch = torch.stack([self.data[k : k + LENGTH + 1] for k in at])
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def turn(self, steps: int) -> float:
        """Train so many steps; returns the last loss, for which the device is waited."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        loss = self.losses[-1].item()
        self.turns.append((time.perf_counter() - start) / steps)
        return loss

    def rates(self) -> tuple[float, float]:
        """Steps per second in the first half, and in the second: by the median of its turns."""
        half = len(self.turns) // 2
        first, second = self.turns[:half] or self.turns, self.turns[half:]
        return len(first) / sum(first), 1 / statistics.median(second)


def train(data: torch.Tensor, characters: int, steps: int) -> tuple[Training, Training]:
    """An eager and a fused copy, trained in turns."""
    eager, fused = (Training(data, characters, fused) for fused in (False, True))
    for done in range(0, steps, TURN):
        for one in (eager, fused):
            loss = one.turn(min(TURN, steps - done))
        times = f"eager {eager.turns[-1] * 1e3:.1f}, fused {fused.turns[-1] * 1e3:.1f} ms per step"
        progress(f"step {len(fused.losses)} of {steps}, loss {loss:.3f}, {times}")
        if 2 * len(fused.losses) < steps:
            autofuse.wait()  # for kernels that were asked for, so that the second half has them
    progress("")
    return eager, fused


@torch.no_grad()
def sample(model: CharModel, step: Step, alphabet: str, length: int) -> tuple[str, float]:
    """Text from 64 parallel samples (the first is returned), and seconds per step."""
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(2)
    character = torch.full((64,), alphabet.index("T"), device=device)
    h = torch.zeros(64, model.hidden, device=device)
    text = []
    start = time.perf_counter()
    for _ in range(length):
        logits, h = step(character, h)
        character = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
        text.append(character[0])
    indices = torch.stack(text).tolist()
    return "T" + "".join(alphabet[k] for k in indices), (time.perf_counter() - start) / length


def way_of(step: Callable[[], object]) -> str:
    """Which way `step`, of which `fuse` knows by now what it costs, runs."""
    with autofuse.explain() as report:
        step()
    if report.launches:
        return f"fused, in {report.launches} launches"
    why = dict.fromkeys(why for _, why in report.ops_eager if why != "not in the table")
    return "plain: " + ("; ".join(why) or "fuse measures it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":  # on tensors this small a second thread gains a fifth where its core
        torch.set_num_threads(1)  # is free, and costs twenty times as much where it is not
    data, alphabet = load_text(args.device)
    print(f"{len(data)} characters, alphabet of {len(alphabet)}, on {args.device}")

    eager, fused = train(data, len(alphabet), args.steps)
    stats = autofuse.stats()
    exact = args.device == "cuda"  # the CPU's tanh is not torch's
    want, got = (torch.stack(one.losses) for one in (eager, fused))
    print(f"loss after {args.steps} steps: eager {want[-1].item():.4f}, fused {got[-1].item():.4f}")
    difference = (want - got).abs().max().item()
    agree = torch.equal(want, got) if exact else difference <= 1e-4
    print(f"losses agree: {agree} (largest difference {difference:.1e})")
    pairs = zip(eager.model.parameters(), fused.model.parameters(), strict=True)
    same = sum(int((a == b).sum()) for a, b in pairs)
    weights = sum(weight.numel() for weight in fused.model.parameters())
    print(f"weights with the same bits: {same} of {weights}")
    (first, rate), (fused_first, fused_rate) = eager.rates(), fused.rates()
    print(f"training steps/s, first half: eager {first:.1f}, fused {fused_first:.1f}")
    print(f"training steps/s, second half: eager {rate:.1f}, fused {fused_rate:.1f}, "
          f"of eager's time {rate / fused_rate:.2f}")  # fmt: skip
    print(
        f"{stats.ops_recorded} ops recorded, {stats.kernels_launched} kernels launched forward and "
        f"backward, {stats.bytes_elided} bytes of intermediates never allocated"
    )
    print(f"a step now runs {way_of(lambda: fused.turn(1))}")

    model = fused.model
    steps = model.step, autofuse.fuse(model.step)
    for step in steps:  # warm-up, compiling and measuring included
        sample(model, step, alphabet, 100)
    autofuse.wait()
    turns = [[sample(model, step, alphabet, 100) for step in steps] for _ in range(5)]
    (plain, _), (text, _) = turns[-1]
    print(f"sampled text agrees: {text == plain}\n---\n{text}\n---")
    eager_rate, fused_rate = (
        1 / statistics.median(s for _, s in way) for way in zip(*turns, strict=True)
    )
    print(f"sampling steps/s: eager {eager_rate:.0f}, fused {fused_rate:.0f}")
    now = way_of(lambda: sample(model, steps[1], alphabet, 1))
    print(f"a step of sampling now runs {now}")


if __name__ == "__main__":
    main()
