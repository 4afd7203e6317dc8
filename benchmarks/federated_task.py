"""The task of `benchmarks.bench_federated`: a wide layer learns digits at sites that each lack some.

`benchmarks.simulation_task` has the same digits and network. Imports nothing of p2ptrain: Flower's processes run in an
environment of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

PIXELS, DIGITS = 64, 10
HELD_OUT = 357
BATCH = 16
RATE = 0.02


@dataclass(frozen=True)
class Options:
    """A run, alike for all processes of it.

    Attributes:
        values: Parameters of the model, about.
        steps: Local steps a round.
        codec: Of p2ptrain's updates.
    """

    site: int
    sites: int
    values: int
    rounds: int
    steps: int
    address: str = ""
    codec: str = "fp32"


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images, fp32, ``[samples, PIXELS]``, and their digits, int64, ``[samples]``."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


def new_model(values: int) -> nn.Sequential:
    """Return a network of about so many parameters, with the same bits in each process."""
    width = max(1, (values - DIGITS) // (PIXELS + 1 + DIGITS))
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, DIGITS))


class Task:
    """One site's samples, model and optimizer."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)
        self._rounds = options.rounds
        inputs, targets = digits()
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        self._held_out = inputs[order[:HELD_OUT]], targets[order[:HELD_OUT]]
        own = order[HELD_OUT + max(0, options.site) :: options.sites]
        own = own[(targets[own] + options.site) % DIGITS >= 3]
        self._inputs, self._targets = inputs[own], targets[own]
        self.model = new_model(options.values)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)
        self._generator = torch.Generator().manual_seed(options.site)

    @property
    def num_samples(self) -> int:
        """Training samples of this site."""
        return len(self._inputs)

    def backward(self) -> None:
        """Compute the gradient of one batch."""
        rows = torch.randint(self.num_samples, (BATCH,), generator=self._generator)
        loss: torch.Tensor = cross_entropy(self.model(self._inputs[rows]), self._targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]

    def accuracy(self, round: int) -> float | None:
        """Return the share of held-out digits, the same at each site, that the model tells; None before the last round.

        It takes longer than the steps of a round, and each site would wait for all that share its cores.
        """
        if round < self._rounds:
            return None
        inputs, targets = self._held_out
        with torch.no_grad():
            return float((self.model(inputs).argmax(1) == targets).double().mean())
