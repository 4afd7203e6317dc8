"""`SwarmOptimizer`: an ordinary ``torch.optim.Optimizer`` whose steps are shared with the swarm.

With ``every = H`` each `SwarmOptimizer.step` is an inner step. A round is due after H steps per peer on average
(`p2ptrain.averaging.timing.goal`). The swarm then averages the pseudo-gradient (start of the round minus now)
and applies the outer step (DiLoCo, arXiv 2311.08105). With P fragments this happens every H / P steps, to one fragment
at a time (Streaming DiLoCo, arXiv 2501.18512).

With ``every = 1`` each call adds a local batch's gradient to an accumulator that ``zero_grad`` does not touch. When the
global batch is full, the swarm averages the gradient, and the wrapped optimizer takes the same step on all peers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from p2ptrain.errors import DivergedError, UsageError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss, measured_part
from p2ptrain.training.bridge import Bridge
from p2ptrain.training.evaluate import mean_and_error
from p2ptrain.training.gradients import clip_gradients
from p2ptrain.training.learning_rate import SwarmScheduler, WrappedOptimizer
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.optimizer_checks import check_layout_is_kept
from p2ptrain.training.private.site import Site
from p2ptrain.training.sync.standstill import Standstill
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer

logger = logging.getLogger(__name__)

KEEPS_BUDGET = "this site is alone: it keeps the last of its privacy budget until another one trains"
SPENT_BUDGET = "its privacy budget is spent"
"""The note of a site at rest: without its epsilon, which its policy may keep."""
PAUSE_SECONDS = 1.0
"""Retry interval while the swarm is below its minimum of peers."""
MARK_SECONDS = 1.0
PACE_SECONDS = 15.0
"""Window of the tokens-per-second measurement."""
DROPS_TO_RESET = 5
"""Consecutive dropped batches after which the live model is reset from the shared state; < `MAX_DROPS`."""
MAX_DROPS = 25
"""Consecutive dropped batches that end training."""
USE_SCHEDULE = (
    "give Swarm.optimizer a schedule=lambda round: factor in place of a scheduler of this peer; opt.scheduler() is for"
    " training loops that want to step one"
)


class SwarmOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer so that its steps are shared; made by `Swarm.optimizer`.

    Its parameter groups and learning rates are those of the wrapped optimizer, whose ``clip_norm`` limits the gradient
    in each inner step (``every = H``); with ``every = 1`` the shared stepper clips. `count` overrides the sizes of one
    local batch. While a step's post hook runs (`register_step_post_hook`), model and shared state do not change.

    Attributes:
        inner: The wrapped optimizer.
        work: The local work since the last contribution.
        last_result: The last synchronisation's result; None before the first.
        total_steps: Local batches of this peer, those before a restart included.
        total_tokens: Tokens of this peer's batches in this process.
        dropped_batches: Number of batches dropped because their gradient was not finite.
        loss: Loss of a recent batch, for monitoring: from the closure, the caller, or the model's outputs.
        samples_per_step: Samples in one local batch.
        site: This peer's part in a private swarm; None in others.
        evaluation: The last measurement that this peer reports; None before the first.
        on_pause: Called by `step` with each result below the swarm's minimum of peers, if the manifest pauses then. It
            sleeps a while, and returns True to wait longer.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        wrapped: WrappedOptimizer,
        synchronizer: Synchronizer,
        bridge: Bridge,
        spec: TrainingSpec,
        tokens_per_step: int,
        site: Site | None = None,
    ) -> None:
        inner = wrapped.optimizer
        super().__init__(inner.param_groups, inner.defaults)
        self._are_groups_final = True
        self.inner = inner
        self.state = inner.state
        self.last_result: RoundResult | None = None
        self.module = module
        self.synchronizer = synchronizer
        self._bridge = bridge
        self.site = site
        self._every = spec.every
        self._steps_per_round = spec.steps_per_round
        self._clip_norm = wrapped.clip_norm
        self._rates = wrapped.rates
        self._warned_of_rates, self._told_why_it_rests = False, ""
        self.dropped_batches = self._drops_in_a_row = 0
        self._overlap_steps = spec.overlap_steps
        mixing = spec.mixing if spec.overlap_steps else None
        own = None if spec.every == 1 else inner
        self.work = LocalContribution(
            module,
            synchronizer.state,
            accumulate=spec.every == 1,
            mixing=mixing,
            inner=own,
            corrects_drift=site is not None and site.corrects_drift,
        )
        self._running_round: Future[RoundResult] | None = None
        self.samples_per_step = spec.local_batch
        self._default_tokens = tokens_per_step
        self._counted: tuple[int, int] | None = None
        self._first_step = 0
        self.total_tokens = self.total_steps = 0
        self._loss: float | None = None
        self.evaluation: Evaluation | None = None
        self._is_loss_set = False
        self._loss_seen_at = -MARK_SECONDS
        self._loss_watch = LossWatch(module)
        self._batch_began = time.monotonic()
        self._marks = deque([(self._batch_began, 0)])
        self.on_pause: Callable[[RoundResult], bool] = self._sleep
        self._standstill = Standstill()

    @property
    def round(self) -> int:
        return self.synchronizer.head.round

    @property
    def committed(self) -> bool:
        return self.last_result is not None and self.last_result.committed

    @property
    def is_round_running(self) -> bool:
        return self._running_round is not None

    @property
    def steps_in_round(self) -> int:
        """Local steps of the round in progress, without those pending from earlier ones."""
        return max(0, self.work.steps - self._first_step)

    @property
    def tokens_per_second(self) -> float:
        """Recent tokens per second, round waits included; safe from any thread."""
        since, before = self._marks[0]
        seconds = time.monotonic() - since
        return (self.total_tokens - before) / seconds if seconds >= MARK_SECONDS else 0.0

    def _mark(self, now: float) -> None:
        if now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((now, self.total_tokens))
            while len(self._marks) > 2 and now - self._marks[1][0] > PACE_SECONDS:
                self._marks.popleft()

    @property
    def loss(self) -> float | None:
        return self._loss

    @loss.setter
    def loss(self, value: float | torch.Tensor | None) -> None:
        self._loss, self._is_loss_set = None if value is None else _number(value), value is not None

    def _record_loss(self, given: Any, now: float) -> None:
        """Record a batch's loss; from a GPU at most every `MARK_SECONDS`, because reading it waits for the GPU."""
        observed = self._loss_watch.take()
        loss = observed if given is None and not self._is_loss_set else given
        is_near = not isinstance(loss, torch.Tensor) or loss.device.type == "cpu"
        if loss is not None and (is_near or now - self._loss_seen_at >= MARK_SECONDS):
            self._loss = _number(loss)
            self._loss_seen_at = now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `UsageError`: peers share the parameters of the time when this optimizer was made."""
        if getattr(self, "_are_groups_final", False):
            raise UsageError(
                "a swarm's optimizer takes no more parameters: add the group to the torch optimizer before"
            )
        super().add_param_group(param_group)

    def count(self, samples: int, tokens: int) -> None:
        """Set the size of the next local batch, if it differs from the default."""
        self._counted = samples, tokens = int(samples), int(tokens)  # Which may be tensors, such as a mask's sum.
        if samples < 1 or tokens < 1:
            raise ValueError(f"a batch has at least one sample and token, not {samples} and {tokens}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count one local batch, and synchronise when the round is due; return the closure's loss, if any.

        If the manifest pauses below the minimum of peers, the call waits for more peers, and warns meanwhile. With
        ``overlap_steps`` a due round starts here and runs while the caller computes; a later call applies its result.
        Where a part of the sites is drawn for a round, the others wait here until they are, and drop this batch.
        A batch whose gradient is not finite takes no step and does not count.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
            DivergedError: Too many batches or contributions of this peer were dropped in a row.
            UsageError: With ``every = 1``: other code than the swarm's schedule changed a learning rate.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._record_loss(loss, time.monotonic())
        samples, tokens = self._counted or (self.samples_per_step, self._default_tokens)
        self._counted = None
        self._follow_schedule()
        if self.sit_out():
            while self.sit_out():
                pass
            if self.site is not None and self.site.privacy is not None:
                self.site.privacy.clear(self._trained())
            return loss
        if self.is_spent or self.saves_budget:
            return self._rest(loss)
        if self.site is not None:
            self.site.adjust(self.module, self.synchronizer.state, self._trained())
        limit = self._clip_norm if self._every > 1 and self._clip_norm else math.inf
        if math.isfinite(clip_gradients(self._trained(), limit)):
            self._take_step(samples, tokens)
        else:
            self._drop_batch()
        self._poll_running_round()
        if self._running_round is None and self._is_due(samples, time.monotonic() - self._batch_began):
            if self._overlap_steps:
                self._start_round()
            else:
                self._synchronize_when_enough()
        self._batch_began = time.monotonic()
        self._mark(self._batch_began)
        return loss

    @property
    def privacy(self) -> PrivacyLoss | None:
        """This site's loss of privacy so far; None without differential privacy."""
        return None if self.site is None or self.site.privacy is None else self.site.privacy.budget.loss

    @property
    def is_spent(self) -> bool:
        """True once one more step would exceed this site's privacy budget: `step` then only follows the swarm."""
        return self.site is not None and self.site.privacy is not None and self.site.privacy.budget.is_spent

    @property
    def others_train(self) -> bool:
        """True if other peers train, by their records: one that does not answer for a moment is not gone."""
        return bool(self.synchronizer.replica.context.membership.trainers())

    @property
    def saves_budget(self) -> bool:
        """True while this site keeps its last steps for rounds with others, which are none yet: `step` then waits.

        Peers that never shared a round with a member cannot end one. So a founder that spent all alone would leave a
        swarm that no newcomer can continue.
        """
        if self.site is None or self.site.privacy is None:
            return False
        return self.site.privacy.budget.is_low and self.synchronizer.is_alone()

    def _rest(self, loss: Any) -> Any:
        """Hand in the pending work, then follow the others' rounds; take no step."""
        assert self.site is not None
        assert self.site.privacy is not None
        self.site.privacy.clear(self._trained())
        why = KEEPS_BUDGET
        if self.is_spent:
            why = f"the privacy budget is spent ({self.privacy}): this site contributes no more, and follows"
        if why != self._told_why_it_rests:
            self._told_why_it_rests = why
            logger.warning("%s", why)
        if self._running_round is not None or self.work.tokens:
            self.synchronize()
        else:
            self.follow()
            self._bridge.sleep(PAUSE_SECONDS)
        return loss

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _take_step(self, samples: int, tokens: int) -> None:
        self._drops_in_a_row = 0
        if self._every == 1:
            self._check_layout()
            self.work.add_gradients(self._trained(), tokens)
        else:
            self.inner.step()
            self.work.stepped(keeps_buffers=self.site is not None and self.site.privacy is not None)
        if self.site is None:
            self.work.add_step(samples, tokens)
        else:  # Certificates tell both counts, and a batch may be all of a site's samples.
            self.work.add_step(1, self.site.weight)
        self.total_tokens += tokens
        self.total_steps += 1

    def _drop_batch(self) -> None:
        """Count and log a batch whose gradient is not finite: it would stay in the inner optimizer's moments for good.

        Many in a row mean a broken peer, which resets its model and inner optimizer. If that does not help, raise
        `DivergedError`.
        """
        self.dropped_batches += 1
        self._drops_in_a_row += 1
        if self._drops_in_a_row >= MAX_DROPS:
            raise DivergedError(
                f"the gradients of {self._drops_in_a_row} batches in a row are not finite, though the model was set"
                f" anew from the state of round {self.round}: look for bad samples, lower the learning rate, or compute"
                " in fp32"
            )
        if self.dropped_batches & (self.dropped_batches - 1) == 0:  # Log the first, second, fourth and so on.
            logger.warning(
                "round %d: the gradient of this batch is not finite: it was dropped, and does not count (%d so far);"
                " look for bad samples, or lower the learning rate",
                self.round, self.dropped_batches,
            )  # fmt: skip
        self.work.restore_buffers()
        if self._drops_in_a_row == DROPS_TO_RESET:
            if self._running_round is not None:
                self.synchronize()
            self._bridge.wait(self.synchronizer.replica.reset(self.work))
            logger.warning("round %d: this peer begins anew from the state of the swarm", self.round)

    @property
    def _swarm_step(self) -> int:
        """The step that the learning rate follows; steps beyond the manifest's stay at the round's last step."""
        round_ = self.round + int(self.is_round_running)
        return round_ * self._steps_per_round + min(self.work.steps, self._steps_per_round - 1)

    def _follow_schedule(self) -> None:
        if change := self._rates.change():
            if self._every == 1:
                raise UsageError(f"{change}, and with every = 1 all peers need the rate of the round: {USE_SCHEDULE}")
            if not self._warned_of_rates:
                self._warned_of_rates = True
                effect = "the swarm's schedule" if self._rates.are_scheduled else "a peer that joins later"
                logger.warning("%s; %s sets another one: %s", change, effect, USE_SCHEDULE)
        if self._every == 1 or self._rates.are_scheduled:
            self._rates.set(self._swarm_step)

    def scheduler(self) -> SwarmScheduler:
        """Return the swarm's schedule as a torch scheduler, for training loops that step one."""
        return SwarmScheduler(self, self._rates, lambda: self._swarm_step)

    def _synchronize_when_enough(self) -> None:
        result = self.synchronize()
        while result.paused and self.on_pause(result):
            result = self.synchronize()

    def _start_round(self) -> None:
        """Start a round under compute; return once it has read the contribution."""
        self._check_layout()
        self.work.steps = 0
        self.work.model_lock.reserve()
        try:
            self._running_round = self._bridge.start(self.synchronizer.synchronize(self.work))
            self._running_round.add_done_callback(lambda _: self.work.model_lock.end_reservation())
            self.work.model_lock.acquire(self._bridge.is_over)
        except BaseException:
            self.work.model_lock.end_reservation()
            raise

    def _poll_running_round(self) -> None:
        """Lend the model to a round under compute; wait for its result once it is due."""
        if self._running_round is None:
            return
        self.work.model_lock.release()
        if self._running_round.done() or self.work.steps >= self._overlap_steps:
            self._synchronize_when_enough()
        else:
            self.work.model_lock.acquire(self._bridge.is_over)

    def _sleep(self, result: RoundResult) -> bool:
        self._bridge.sleep(PAUSE_SECONDS)
        return True

    def _is_due(self, batch_samples: int, batch_seconds: float) -> bool:
        if self._every > 1:
            self.synchronizer.pacing.note(self.steps_in_round, batch_seconds, self._bridge.call_soon)
            return self.synchronizer.is_due(self.steps_in_round)
        if self.synchronizer.position.is_closing:
            return True
        return self._bridge.wait(self.synchronizer.pacing.report_batch(self.work.samples, batch_samples, batch_seconds))

    def synchronize(self) -> RoundResult:
        """Contribute the pending work now, or finish a round under compute; return the result.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
            UsageError: Parameters were frozen or unfrozen since this optimizer was made.
        """
        self._check_layout()
        self.work.model_lock.release()
        running, self._running_round = self._running_round, None
        if running is not None:
            self.last_result = self._bridge.finish(running)
        else:
            if self._overlap_steps:
                self.work.steps = 0
            self.last_result = self._bridge.wait(self.synchronizer.synchronize(self.work))
        if warning := self._standstill.note(self.last_result, time.monotonic()):
            logger.warning("%s", warning)
        steps = 0 if self._overlap_steps else self.work.steps
        if self.last_result.committed or self.work.steps == 0:
            self._first_step = steps
        else:  # Retry after a part of a round's steps.
            self._first_step = self.work.steps + max(1, self._steps_per_round // 4) - self._steps_per_round
        if self._every > 1:
            self.synchronizer.pacing.note(self.steps_in_round, call_soon=self._bridge.call_soon)
        return self.last_result

    def follow(self) -> None:
        """Take over the other peers' rounds without contributing; pending work stays, as far as it cannot count twice.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
        """
        self._bridge.wait(self.synchronizer.follow_swarm(self.work))

    def sit_out(self) -> bool:
        """Follow the others for a while if this peer is not drawn for the round in progress; return False if it is.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
        """
        if self.synchronizer.replica.context.participation == 1 or self._running_round is not None:
            return False
        return self._bridge.wait(self.synchronizer.sit_out(self.work))

    def _check_layout(self) -> None:
        layout = self.synchronizer.state.layout
        own = [entry for entry in layout.personal if entry.kind == "param"]
        check_layout_is_kept(self.module, (entry.name for entry in [*layout.parameter_entries, *own]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the live gradients, but not those accumulated for the global batch."""
        self.inner.zero_grad(set_to_none)

    def report(self, values: Sequence[float], metric: str = "loss") -> Evaluation:
        """Publish the mean of a metric over this peer's held-out samples; return what others see of it.

        It is the mean over a fixed random part of them, so that it does not tell their number: `measured_part`.

        Args:
            values: The metric of each sample, such as its loss, or 1 if it was classified correctly. They stay here.
            metric: Its name, at most 32 characters.

        Raises:
            UsageError: There are no values, their mean is not finite or above 1e12, or the name does not print.
        """
        part = measured_part(values) if values else []
        found = Evaluation.of(metric, self.round, *mean_and_error(part), len(part)) if part else None
        if found is None or not metric.isprintable() or not metric:
            raise UsageError(
                f"report of {len(values)} values as {metric!r}: give values up to 1e12 and a printable name"
            )
        self.evaluation = found
        return found

    def evaluations(self) -> dict[str, Evaluation]:
        """Return each peer's last reported measurement, by peer id; `p2ptrain.pooled` makes one of them."""
        context = self.synchronizer.replica.context
        found = {record.peer: record.evaluation for record in context.membership.records()}
        found[context.rpc.peer_id] = self.evaluation
        return {peer: each for peer, each in found.items() if each is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the counts and gradients not contributed yet."""
        work = self.work
        own = {"pending": list(work.pending), "samples": work.samples, "steps": work.steps}
        return {**self.inner.state_dict(), "p2ptrain": {**own, "accumulated": work.accumulated}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the output of `state_dict`, or a plain state of the wrapped optimizer.

        With ``every = 1`` the wrapped optimizer keeps its state and settings: they are those of the swarm's round. A
        script that begins a swarm with others loads them before `Swarm.optimizer`.
        """
        values = dict(state_dict)
        own = values.pop("p2ptrain", None)
        if self._every > 1:
            self.inner.load_state_dict(values)
            self.param_groups = self.inner.param_groups
            self.state = self.inner.state
            self._rates.change()  # Loaded rates do not count as a change by other code.
        if own is not None:
            self.work.pending, self.work.samples, self.work.steps = own["pending"], own["samples"], own["steps"]
            if self.work.accumulated is not None and own["accumulated"] is not None:
                self.work.accumulated.copy_(own["accumulated"])


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


class LossWatch:
    """Reads the ``loss`` of a model's outputs, as the models of transformers have it, by a forward hook.

    Outputs without a loss, and forward passes without gradients, are ignored.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._total: torch.Tensor | None = None
        self._count = 0
        self._are_parts = False
        if not isinstance(module, torch.jit.ScriptModule):  # Which takes no hooks.
            module.register_forward_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad or not module.training:
            return
        value = loss.detach().reshape(())
        self._total = value if self._total is None else self._total + value
        self._count += 1
        # In transformers' Trainer each microbatch's sum is divided by the tokens of all microbatches.
        self._are_parts = kwargs.get("num_items_in_batch") is not None

    def take(self) -> torch.Tensor | None:
        """Return the loss of the microbatches since the last call, on the model's device; None for none."""
        total, count = self._total, self._count
        self._total, self._count = None, 0
        return total if total is None or self._are_parts else total / count
