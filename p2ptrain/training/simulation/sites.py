"""A simulated site: its samples, its local steps, and what a peer keeps from round to round.

A site keeps its inner optimizer, personal tensors, compression error, momentum, and its place in its own data. All
sites share one copy of the model, which each sets anew before its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.averaging.arithmetic import Update
from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback
from p2ptrain.errors import DivergedError
from p2ptrain.manifest import Manifest
from p2ptrain.training.data.windows import SampleOrder
from p2ptrain.training.gradients import clip_gradients
from p2ptrain.training.learning_rate import WrappedOptimizer, manifest_optimizer
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.private.site import Site
from p2ptrain.training.simulation.tasks import Task
from p2ptrain.training.state.layout import vector_codec
from p2ptrain.training.state.shared_state import SharedState


class SimulatedSite:
    """One site of a simulation.

    Attributes:
        train, held_out: Rows of the task's samples, int64.
        personal: Its personal tensors after its last step.
    """

    def __init__(
        self,
        name: str,
        rows: npt.NDArray[np.int64],
        manifest: Manifest,
        task: Task,
        state: SharedState,
        make_site: Callable[[str, int], Site],
    ) -> None:
        """The last ``data.held_out_fraction`` of ``rows``, at least two, are held out.

        ``make_site`` is called with the name and the number of training samples.
        """
        held = max(2, round(manifest.data.held_out_fraction * len(rows)))
        self.name = name
        self.train, self.held_out = torch.from_numpy(rows[:-held]), torch.from_numpy(rows[-held:])
        self.personal = state.layout.read_personal(task.model)
        self._task, self._state, self._spec, self._averaging = task, state, manifest.training, manifest.averaging
        self._site = site = make_site(name, len(self.train))
        self._order = SampleOrder(len(self.train), manifest.data.seed)
        self._wrapped = (
            WrappedOptimizer(task.optimizer(task.model), None, self._spec.clip_norm)
            if task.optimizer is not None
            else manifest_optimizer(task.model, self._spec)
        )
        self._trained = [each for group in self._wrapped.optimizer.param_groups for each in group["params"]]
        self._work = LocalContribution(
            task.model, state, accumulate=False, inner=self._wrapped.optimizer, corrects_drift=site.corrects_drift
        )
        codec = vector_codec(self._averaging, state.layout)
        self._feedback = ErrorFeedback(
            state.layout.num_values,
            codec,
            self._averaging.feedback_decay,
            self._averaging.worker_momentum,
            state.layout.num_parameters,
        )
        self._carry: torch.Tensor | None = None
        self._live = state.layout.new_vector() if site.corrects_drift else None
        self._steps = 0

    @property
    def epsilon(self) -> float | None:
        """The privacy that it has lost; None without differential privacy."""
        return None if self._site.privacy is None else self._site.privacy.budget.loss.epsilon

    @property
    def is_spent(self) -> bool:
        """True once one more step would exceed its privacy budget."""
        return self._site.privacy is not None and self._site.privacy.budget.is_spent

    def step(self, round_: int) -> float:
        """Take a round's local steps, fewer if the privacy budget ends; return the loss of the last.

        Raises:
            DivergedError: A gradient is not finite.
        """
        task, size, privacy = self._task, self._spec.local_batch, self._site.privacy
        self._state.layout.write_personal(self.personal, task.model)
        self._work.adopt(False, self._carry)
        loss = torch.zeros(())
        for step in range(self._spec.every):
            if self.is_spent:
                break
            self._wrapped.rates.set(round_ * self._spec.every + step)
            drawn = None if privacy is None else privacy.draw()
            rows = self.train[drawn or [self._order.at(self._steps * size + row) for row in range(size)]]
            loss = task.loss(task.model, *(each[rows] for each in task.samples))
            loss.backward()  # type: ignore[no-untyped-call]
            self._site.adjust(task.model, self._state, self._trained)
            if not math.isfinite(clip_gradients(self._trained, self._spec.clip_norm or math.inf)):
                raise DivergedError(
                    f"round {round_}: a gradient of {self.name} is not finite: lower training.learning_rate"
                )
            self._wrapped.optimizer.step()
            self._work.stepped(keeps_buffers=privacy is not None)
            self._wrapped.optimizer.zero_grad()
            self._work.add_step(size, self._site.weight)
            self._steps += 1
        self.personal = self._state.layout.read_personal(task.model)
        if self._live is not None:
            self._state.layout.read(task.model, self._live)
        return float(loss.detach())

    def contribute(self) -> Update:
        """Return the update after `step`.

        Raises:
            DivergedError: The update is not finite.
        """
        update = self._state.layout.new_vector()
        self._work.collect(update)
        self._carry = update * self._averaging.late_decay
        self._feedback.add_to(update)
        if not bool(torch.isfinite(update.sum(dtype=torch.float64))):
            raise DivergedError(f"the update of {self.name} is not finite: lower training.learning_rate")
        return Update(self.name, update, int(min(self._work.tokens, self._averaging.max_weight)))

    def settle(self, encoded: Sequence[Encoded]) -> None:
        """Record the encoding error and the drift of an update that the state now counts; else, carry it on."""
        if encoded:
            self._carry = None
            self._feedback.update(encoded)
            if self._live is not None:
                self._state.layout.write(self._live, self._task.model)
                self._work.adopt(True, None)

    def sit_out(self) -> None:
        """Decay what waits for a later round, while a round goes by without this site."""
        if self._carry is not None:
            self._carry.mul_(self._averaging.late_decay)
