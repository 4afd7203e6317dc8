"""Rounds of simulated sites: real local steps, and the averaging's real arithmetic, in one process.

All sites of a round take ``training.every`` steps, one site after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.averaging.arithmetic import average_round, draw_groups, draw_peers
from p2ptrain.codecs import CodecError
from p2ptrain.errors import DivergedError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.runtime import Runtime
from p2ptrain.training.evaluate import mean_and_error
from p2ptrain.training.private.site import simulated_sites
from p2ptrain.training.simulation.sites import SimulatedSite
from p2ptrain.training.simulation.tasks import Task
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.layout import vector_codec

EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class RoundReport:
    """One round.

    Attributes:
        loss: Mean over sites of the training loss of the last local step.
        pooled: The metric over the held-out samples of all sites, after the round; None if it is not finite.
        by_site: The mean of the metric at each site.
        sent_bytes: By site that has a place in a group.
        left_out: Number of sites whose cell was full.
        epsilon: By site, with differential privacy: the privacy that it has lost.
    """

    round: int
    loss: float
    pooled: Evaluation | None
    by_site: dict[str, float]
    sent_bytes: dict[str, int]
    left_out: int
    epsilon: dict[str, float] = field(default_factory=dict)


class Simulation:
    """Trains sites round by round.

    Attributes:
        state: The shared state of all sites.
        sites: In the order of their names.
    """

    def __init__(self, manifest: Manifest, task: Task, parts: Sequence[npt.NDArray[np.int64]], seed: int = 1) -> None:
        """
        Args:
            parts: The samples of each site, at least `p2ptrain.training.simulation.partition.LEAST`.
            seed: Of the groups and draws; with differential privacy, of noise and samples, too.

        Raises:
            UsageError: The manifest is not private, or has settings that a simulation lacks.
        """
        if manifest.private is None:
            raise UsageError("simulate trains sites of a private swarm: the manifest needs a section [private]")
        if manifest.training.fragments > 1 or manifest.training.overlap_steps:
            raise UsageError("simulate has no training.fragments or training.overlap_steps: leave them out")
        self.state = initial_state(task.model, None, manifest, bytes(32))
        make_site = simulated_sites(manifest, task.model, seed)
        self.sites = [
            SimulatedSite(f"site{number:05d}", part, manifest, task, self.state, make_site)
            for number, part in enumerate(parts)
        ]
        self._participation = manifest.private.participation
        self._last: dict[str, int] = {}
        self._spec, self._task, self._seed = manifest.averaging, task, seed
        self._codec = vector_codec(manifest.averaging, self.state.layout)
        self._runtime = Runtime(random.Random(seed))
        self._round = 0

    def run(self, rounds: int) -> Iterator[RoundReport]:
        """Yield the report of each round; end early once too few sites have privacy budget left.

        Raises:
            DivergedError: A site's gradients or update are not finite, or an update cannot be encoded.
        """
        for _ in range(rounds):
            if sum(not site.is_spent for site in self.sites) < min(self._spec.min_peers, len(self.sites)):
                return
            try:
                yield asyncio.run(self._run_round())
            except CodecError as error:
                raise DivergedError(f"round {self._round}: {error}: lower training.learning_rate") from error

    async def _run_round(self) -> RoundReport:
        lineage = hashlib.sha256(f"simulation {self._seed} {self._round}".encode()).digest()
        there, spec = [site.name for site in self.sites if not site.is_spent], self._spec
        names = draw_peers(there, self._last, self._participation, spec.min_peers, self._round, lineage)
        groups = draw_groups(names, spec.group_size, self._round, lineage, len(there))
        taking_part = set(names)
        placed = {name for group in groups.values() for name in group}
        updates, losses = {}, []
        for site in self.sites:
            if site.name in taking_part:
                losses.append(site.step(self._round))
                updates[site.name] = site.contribute()
            else:
                site.sit_out()
        result = await average_round(self._runtime, self._spec, self._codec, groups, updates)
        self.state.apply(result.vector, self._round)
        for site in self.sites:
            site.settle(result.encoded.get(site.name, ()))
        self._last |= dict.fromkeys(placed, self._round)
        self._round += 1
        measured = self._measure()
        return RoundReport(
            self._round, sum(losses) / len(losses), pooled(list(measured.values())),
            {name: each.mean for name, each in measured.items()}, dict(result.sent_bytes), len(names) - len(placed),
            {site.name: site.epsilon for site in self.sites if site.epsilon is not None},
        )  # fmt: skip

    def _measure(self) -> dict[str, Evaluation]:
        """Measure the shared parameters, with each site's personal ones, on its held-out samples."""
        model, layout, found = self._task.model, self.state.layout, {}
        layout.write(self.state.vector, model)
        model.eval()
        if layout.personal:
            values = []
            for site in self.sites:
                layout.write_personal(site.personal, model)
                values.append(self._values(site.held_out))
        else:
            together = self._values(torch.cat([site.held_out for site in self.sites]))
            values = list(torch.split(together, [len(site.held_out) for site in self.sites]))
        model.train()
        for site, each in zip(self.sites, values, strict=True):
            one = Evaluation.of(self._task.metric_name, self._round, *mean_and_error(each.tolist()), len(each))
            if one is not None:
                found[site.name] = one
        return found

    @torch.no_grad()
    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        metric, samples, model = self._task.metric, self._task.samples, self._task.model
        parts = torch.split(rows, EVALUATION_BATCH)
        return torch.cat([metric(model, *(each[part] for each in samples)) for part in parts])
