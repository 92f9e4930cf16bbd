"""A row of the zoo: a program's name, and what makes its step and all that the step starts from.

Knows neither clocks nor who runs the step. The programs are ordinary PyTorch, as its users write
it, in zoo_*.py, whose makers register here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Start:
    """A program at its beginning: `step(*state)` is one call.

    state: tensors, or lists and dicts of them. modules: their parameters, buffers and gradients
    are results too. feeds: what a step returns replaces so many leading ones of `state`.
    """

    step: Step
    state: tuple[Any, ...]
    modules: tuple[nn.Module, ...] = ()
    feeds: int = 0


class Maker(Protocol):
    def __call__(self, tiny: bool, training: bool) -> Start: ...


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    maker: Maker
    training: bool
    grad: bool  # on during its steps
    needs: str = ""  # a package without which it is absent

    def make(self, device: str, seed: int = 0, size: str = "full") -> Start:
        """The same values at every call; size: "full" or "tiny"."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.maker(size == "tiny", self.training)


ROWS: list[Row] = []


def program(
    name: str, *kinds: str, grad: bool = False, needs: str = ""
) -> Callable[[Maker], Maker]:
    """Register a maker: a row, or one for each of `kinds`, "inference" and "training"."""

    def register(maker: Maker) -> Maker:
        for kind in kinds or ("",):
            training = kind == "training"
            label = f"{name} ({kind})" if kind else name
            ROWS.append(Row(label, maker, training, grad or training, needs))
        return maker

    return register


def trainer(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer
) -> Step:
    """Forward, backward and optimizer; loss_of: takes the model and a batch."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
