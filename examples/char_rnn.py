"""Train a character-level recurrent model on Python's own documentation, eagerly and fused.

    python examples/char_rnn.py [--steps 60] [--device cuda]

The cell is written as plain matmuls and pointwise ops. Training runs once as it is and once under
`autofuse.fuse`, where every step's pointwise ops are one kernel forward and one backward; the
losses are compared, and then text is sampled without grad.
"""

from __future__ import annotations

import argparse
import sys
import time
from pydoc_data.topics import topics

import torch
from torch import nn

import autofuse

LENGTH = 32  # characters per training sequence


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
        print(f"\r{text:60s}", end="", file=sys.stderr, flush=True)


def train(
    data: torch.Tensor, characters: int, steps: int, fused: bool
) -> tuple[CharModel, list[float], float]:
    """Returns the model, the loss of every step and the steps per second."""
    torch.manual_seed(0)
    model = CharModel(characters, 128).to(data.device)
    if fused:
        model = autofuse.fuse(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        at = torch.randint(len(data) - LENGTH - 1, (32,), generator=generator).tolist()
        batch = torch.stack([data[k : k + LENGTH + 1] for k in at])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 9:
            progress(f"{'fused' if fused else 'eager'}: step {step + 1}, loss {loss.item():.3f}")
    values = torch.stack(losses).tolist()
    return model, values, steps / (time.perf_counter() - start)


@torch.no_grad()
def sample(model: CharModel, alphabet: str, length: int, fused: bool) -> tuple[str, float]:
    """Text from 64 parallel samples (the first is returned), and steps per second."""
    device = model.head.weight.device
    step = autofuse.fuse(model.step) if fused else model.step
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
    return "T" + "".join(alphabet[k] for k in indices), length / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    data, alphabet = load_text(args.device)
    print(f"{len(data)} characters, alphabet of {len(alphabet)}, on {args.device}")

    _, eager_losses, eager_rate = train(data, len(alphabet), args.steps, fused=False)
    model, fused_losses, fused_rate = train(data, len(alphabet), args.steps, fused=True)
    stats = autofuse.stats()
    progress("")
    difference = max(abs(a - b) for a, b in zip(eager_losses, fused_losses, strict=True))
    print(
        f"loss after {args.steps} steps: eager {eager_losses[-1]:.4f}, fused {fused_losses[-1]:.4f}"
    )
    tolerance = 0.0 if args.device == "cuda" else 1e-4  # the CPU's tanh is not torch's
    print(f"losses agree: {difference <= tolerance} (largest difference {difference:.1e})")
    print(f"training steps/s: eager {eager_rate:.1f}, fused {fused_rate:.1f}")
    print(
        f"{stats.ops_recorded} ops recorded, {stats.kernels_launched} kernels launched forward and "
        f"backward, {stats.bytes_elided} bytes of intermediates never allocated"
    )

    sample(model, alphabet, 5, fused=False)  # warm-up, the kernel's compilation included
    sample(model, alphabet, 5, fused=True)
    plain, eager_rate = sample(model, alphabet, 200, fused=False)
    autofuse.reset_stats()
    text, fused_rate = sample(model, alphabet, 200, fused=True)
    sampling = autofuse.stats()
    print(f"sampled text agrees: {text == plain}\n---\n{text}\n---")
    print(f"sampling steps/s: eager {eager_rate:.0f}, fused {fused_rate:.0f}")
    print(f"{sampling.ops_recorded} ops recorded, {sampling.kernels_launched} kernels launched")
    print(f"{sampling.bytes_elided} bytes of intermediates never allocated")


if __name__ == "__main__":
    main()
