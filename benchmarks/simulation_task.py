"""The task of `benchmarks.bench_simulation`: a network learns digits at many unlike sites.

`p2ptrain simulate` takes it from a script that calls `classifier`; Flower's actors from the file of `write_parts`. Only
`classifier` imports p2ptrain: Flower's processes run in an environment of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.federated_task import BATCH, digits, new_model

if TYPE_CHECKING:
    from p2ptrain.training.simulation.rounds import Simulation
    from p2ptrain.training.simulation.tasks import Task

RATE = 0.1
PARTS = "parts.json"


@dataclass(frozen=True)
class Options:
    """A run, alike for all contenders.

    Attributes:
        values: Parameters of the model, about.
        steps: Local steps a round.
        cores: That the run may use.
        folder: With the files of the run.
    """

    sites: int
    values: int
    rounds: int
    steps: int
    cores: int
    folder: str = ""


class Trainer:
    """All sites' samples, and one model, whose steps and accuracy are those of `classifier`."""

    def __init__(self, values: int, folder: str) -> None:
        torch.set_num_threads(1)
        self._inputs, self._targets = digits()
        self.model = new_model(values)
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE)
        sites = json.loads((Path(folder) / PARTS).read_text())
        self.trained = [torch.tensor(site["train"]) for site in sites]
        self._held_out = torch.tensor([row for site in sites for row in site["held_out"]])

    def train(self, site: int, steps: int) -> None:
        """Take local steps on random batches of a site's samples."""
        rows = self.trained[site]
        for drawn in torch.randint(len(rows), (steps, BATCH)):
            batch = rows[drawn]
            loss = torch.nn.functional.cross_entropy(self.model(self._inputs[batch]), self._targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of all sites' held-out digits that the model tells."""
        rows = self._held_out
        return float((self.model(self._inputs[rows]).argmax(1) == self._targets[rows]).double().mean())


def classifier(values: int) -> Task:
    """Return the task of `p2ptrain simulate`, on one thread of torch."""
    from p2ptrain.training.simulation.tasks import classification

    torch.set_num_threads(1)
    task = classification(new_model(values), *digits())
    return replace(task, optimizer=lambda model: torch.optim.SGD(model.parameters(), RATE))


def write_parts(simulation: Simulation, folder: str) -> None:
    """Write the rows that each site trains on, and those that it holds out."""
    sites = [{"train": site.train.tolist(), "held_out": site.held_out.tolist()} for site in simulation.sites]
    (Path(folder) / PARTS).write_text(json.dumps(sites))
