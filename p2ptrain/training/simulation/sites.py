"""Rounds of simulated sites: real local steps, and the averaging's real arithmetic, in one process.

All sites take ``training.every`` steps in each round, one site after the other, on one copy of the model. A site keeps
what a peer keeps: inner optimizer, personal tensors, compression error, momentum, and its place in its own data.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from p2ptrain.averaging.arithmetic import RoundMean, Update, average_round, draw_groups
from p2ptrain.averaging.vector.error_feedback import ErrorFeedback
from p2ptrain.errors import DivergedError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.runtime import Runtime
from p2ptrain.training.data.windows import SampleOrder
from p2ptrain.training.evaluate import mean_and_error
from p2ptrain.training.gradients import clip_gradients
from p2ptrain.training.learning_rate import WrappedOptimizer, manifest_optimizer
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.simulation.tasks import Task
from p2ptrain.training.site import Site
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.layout import vector_codec

EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class RoundReport:
    """One round.

    Attributes:
        loss: Mean over sites of the training loss of the last local step.
        pooled: The metric over the held-out samples of all sites, after the round.
        by_site: The mean of the metric at each site.
        sent_bytes: By site.
        left_out: Sites whose cell was full.
    """

    round: int
    loss: float
    pooled: Evaluation | None
    by_site: dict[str, float]
    sent_bytes: dict[str, int]
    left_out: int


class SimulatedSite:
    """One site's data and local state."""

    def __init__(self, name: str, train: torch.Tensor, held_out: torch.Tensor) -> None:
        """``train`` and ``held_out`` are rows of the task's samples, int64."""
        self.name, self.train, self.held_out = name, train, held_out
        self.steps = 0
        self.contributed = False
        self.carry: torch.Tensor | None = None
        self.personal: dict[str, torch.Tensor] = {}
        self.work: LocalContribution
        self.wrapped: WrappedOptimizer
        self.site: Site
        self.feedback: ErrorFeedback


def split_sites(parts: Sequence[np.ndarray], fraction: float) -> list[SimulatedSite]:
    """Return a site for each part of the samples; the last ``fraction`` of each part, at least two, is held out."""
    sites = []
    for number, part in enumerate(parts):
        rows, held = torch.from_numpy(np.ascontiguousarray(part)), max(2, round(fraction * len(part)))
        sites.append(SimulatedSite(f"site{number:05d}", rows[:-held], rows[-held:]))
    return sites


class Simulation:
    """Trains the sites round by round.

    Attributes:
        state: The shared state of all sites.
    """

    def __init__(self, manifest: Manifest, task: Task, sites: Sequence[SimulatedSite], seed: int = 1) -> None:
        """
        Raises:
            UsageError: The manifest is not private, or has fragments or overlap.
        """
        spec, private = manifest.training, manifest.private
        if private is None:
            raise UsageError("simulate trains sites: the manifest needs a section [private]")
        if spec.fragments > 1 or spec.overlap_steps:
            raise UsageError("simulate has no training.fragments or training.overlap_steps: leave them out")
        self.manifest, self._task, self._sites, self._seed = manifest, task, sites, seed
        self._module = task.model
        self.state = initial_state(task.model, None, manifest, bytes(32))
        self._codec = vector_codec(manifest.averaging, self.state.layout)
        self._runtime = Runtime(random.Random(seed))
        self._trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
        self.round = 0
        averaging = manifest.averaging
        for site in sites:
            weight = Site.of(private, len(site.train))
            assert weight is not None
            site.site = weight
            optimizer = task.optimizer
            site.wrapped = (
                manifest_optimizer(task.model, spec)
                if optimizer is None
                else WrappedOptimizer(optimizer(task.model), None, spec.clip_norm)
            )
            site.work = LocalContribution(task.model, self.state, accumulate=False, inner=site.wrapped.optimizer)
            site.personal = self.state.layout.read_personal(task.model)
            site.feedback = ErrorFeedback(
                self.state.layout.num_values, self._codec, averaging.feedback_decay, averaging.worker_momentum
            )

    def run(self, rounds: int) -> Iterator[RoundReport]:
        """Yield the report of each round.

        Raises:
            DivergedError: A site's gradients or update are not finite.
            CodecError: An update cannot be encoded.
        """
        for _ in range(rounds):
            yield asyncio.run(self._round())

    async def _round(self) -> RoundReport:
        spec, names = self.manifest.averaging, [site.name for site in self._sites]
        lineage = hashlib.sha256(f"simulation {self._seed} {self.round}".encode()).digest()
        groups = draw_groups(names, spec.group_size, self.round, lineage)
        present = {name for group in groups.values() for name in group}
        updates, losses = {}, []
        for site in self._sites:
            losses.append(self._train(site))
            update = self.state.layout.new_vector()
            site.work.collect(update)
            site.personal = self.state.layout.read_personal(self._module)
            site.contributed = site.name in present
            site.carry = None if site.contributed else update.mul_(spec.late_decay)
            if site.contributed:
                site.feedback.add_to(update)
                if not bool(torch.isfinite(update.sum(dtype=torch.float64))):
                    raise DivergedError(f"round {self.round}: the update of {site.name} is not finite")
                updates[site.name] = Update(site.name, update, int(min(site.work.tokens, spec.max_weight)))
        result = await average_round(self._runtime, spec, self._codec, groups, updates)
        self._apply(result)
        self.round += 1
        measured = self._measure()
        return RoundReport(
            self.round, sum(losses) / len(losses), pooled(list(measured.values())),
            {name: each.mean for name, each in measured.items()}, dict(result.sent_bytes), len(names) - len(present),
        )  # fmt: skip

    def _apply(self, result: RoundMean) -> None:
        for site in self._sites:
            if site.name in result.encoded:
                site.feedback.update(result.encoded[site.name])
            else:
                site.contributed = False
        self.state.apply(result.vector, self.round)

    def _train(self, site: SimulatedSite) -> float:
        """Take a site's local steps; return the loss of the last."""
        spec, work, layout = self.manifest.training, site.work, self.state.layout
        layout.write_personal(site.personal, self._module)
        work.adopt(site.contributed, site.carry)
        order = SampleOrder(len(site.train), self.manifest.data.seed)
        limit = spec.clip_norm or float("inf")
        loss = torch.zeros(())
        for step in range(spec.every):
            site.wrapped.rates.set(self.round * spec.every + min(step, spec.every - 1))
            first = site.steps * spec.local_batch
            rows = site.train[[order.at(first + row) for row in range(spec.local_batch)]]
            loss = self._task.loss(self._module, *(each[rows] for each in self._task.samples))
            loss.backward()  # type: ignore[no-untyped-call]
            site.site.pull(self._module, self.state)
            if not np.isfinite(clip_gradients(self._trained, limit)):
                raise DivergedError(
                    f"round {self.round}: a gradient of {site.name} is not finite: lower training.learning_rate"
                )
            site.wrapped.optimizer.step()
            site.wrapped.optimizer.zero_grad()
            work.add_step(spec.local_batch, site.site.weight)
            site.steps += 1
        return float(loss.detach())

    def _measure(self) -> dict[str, Evaluation]:
        """Measure the shared parameters, with each site's personal ones, on its held-out samples."""
        layout, found = self.state.layout, {}
        layout.write(self.state.vector, self._module)
        self._module.eval()
        if layout.personal:
            values = []
            for site in self._sites:
                layout.write_personal(site.personal, self._module)
                values.append(self._values(site.held_out))
        else:
            together = self._values(torch.cat([site.held_out for site in self._sites]))
            values = list(together.split([len(site.held_out) for site in self._sites]))
        self._module.train()
        for site, each in zip(self._sites, values, strict=True):
            one = Evaluation.of(self._task.metric_name, self.round, *mean_and_error(each.tolist()), len(each))
            if one is not None:
                found[site.name] = one
        return found

    @torch.no_grad()
    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        metric, samples = self._task.metric, self._task.samples
        return torch.cat(
            [metric(self._module, *(each[part] for each in samples)) for part in rows.split(EVALUATION_BATCH)]
        )
