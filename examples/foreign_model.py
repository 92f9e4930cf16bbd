"""A public model with its code unchanged: a small Llama of transformers, random weights.

    pip install transformers && python examples/foreign_model.py

One training step in eager PyTorch and one fused, compared; then what autofuse saw of it.
"""

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaModel

import autofuse


def step(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Forward and backward; the loss and the gradients."""
    hidden = model(tokens).last_hidden_state  # [batch, length, hidden]
    loss = hidden.square().mean()
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    eager = LlamaModel(LlamaConfig(**shape, **heads)).to(args.device)
    fused = autofuse.fuse(copy.deepcopy(eager))  # the one line
    tokens = torch.randint(100, (4, 32), device=args.device)

    for _ in range(3):  # the kernels are asked for
        step(fused, tokens)
    autofuse.wait()
    with autofuse.explain() as report:
        got = step(fused, tokens)
    want = step(eager, tokens)
    apart = max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))
    print(f"loss {got[0].item():.6f}; largest difference from eager: {apart:.2g}")
    print(report)


if __name__ == "__main__":
    main()
