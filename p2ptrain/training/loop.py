"""The training loop of a peer that trains the manifest's own model: an ordinary loop around `SwarmOptimizer`."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.errors import CheckpointError, P2PTrainError, ResourceError, TemporaryError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.evaluation import Evaluation
from p2ptrain.training.checkpoints.saving import Saver
from p2ptrain.training.data.corpus import Corpus
from p2ptrain.training.data.windows import Sampler
from p2ptrain.training.evaluate import held_out_loss, language_model_loss
from p2ptrain.training.metrics import MetricsWriter
from p2ptrain.training.optimizer import KEEPS_BUDGET, PAUSE_SECONDS, SPENT_BUDGET, SwarmOptimizer
from p2ptrain.training.sync.synchronizer import NOT_DRAWN, RoundResult
from p2ptrain.training.worth import WorthAudits

logger = logging.getLogger(__name__)

NOT_SAVED = "a checkpoint was not saved: this peer's log tells why"
"""The note of a failure to save: the record is public, and the error names folders of this machine."""
REPORT_SECONDS = 2.0
EVALUATION_SECONDS = 20.0
FOLLOW_SECONDS = 1.0
"""Interval at which a resting trainer takes over the others' rounds."""
GLANCE_SECONDS = 10.0
"""Least interval of short held-out measurements; longer if they would take over 1/50 of the time."""
GLANCE_WINDOWS = 16
AUDIT_SHARE = 0.02
"""Most of the time that audits of other peers' work take."""


@dataclass
class TrainingProgress:
    """The loop's progress; only the loop writes it, other threads may read it."""

    loss: float | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    note: str = ""
    is_resting: bool = False


class Trainer:
    """Trains until it is stopped, the swarm reaches ``Synchronizer.last_round``, or an error ends it.

    ``optimizer`` wraps AdamW; ``saver`` has restored it. ``on_progress`` is called on the training thread.

    Attributes:
        peer_id: Selects this peer's samples.
        audits: Of other peers' work; other threads may read the scores.
        is_saving: True while a checkpoint is written; safe from any thread.
        is_saved: True once the final checkpoint is written.
        unsaved: Why the last checkpoint was not written; None if it was.
    """

    def __init__(
        self,
        optimizer: SwarmOptimizer,
        saver: Saver,
        manifest: Manifest,
        corpus: Corpus,
        metrics: MetricsWriter,
        on_progress: Callable[[TrainingProgress], object],
    ) -> None:
        self.progress = TrainingProgress()
        self.optimizer = optimizer
        self.saver = saver
        self.peer_id = optimizer.synchronizer.replica.context.rpc.peer_id
        self.is_saving = self.is_saved = False
        self.unsaved: ResourceError | CheckpointError | None = None
        self._module = optimizer.module
        self._device = next(self._module.parameters()).device
        self._synchronizer = optimizer.synchronizer
        self._limit = optimizer.synchronizer.last_round
        self._jobs = optimizer.synchronizer.jobs
        self._spec = manifest.training
        self._is_private = manifest.private is not None
        self._context = manifest.model.context
        self._corpus = corpus
        self._sampler = Sampler(corpus.train, manifest.model.context, manifest.data.seed)
        self._metrics = metrics
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._is_paused = self._is_finishing = False
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._round = -1
        self._index = 0
        self._next_glance = self._next_audit = 0.0
        self.audits = WorthAudits(
            self._module, self._sampler, self._loss, self._spec.local_batch, random.SystemRandom()
        )
        optimizer.on_pause = self._on_pause

    def stop(self, seconds: float | None = None) -> None:
        """Ask the loop to end after its current step; safe from any thread.

        ``seconds`` is the time left to contribute, save and measure; None for no limit.
        """
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
        self._stop.set()
        self._wake.set()

    def pause(self, paused: bool) -> None:
        """Ask the loop to hand in its work after the current step and to rest, or to go on; safe from any thread."""
        self._is_paused = paused
        self._wake.set()

    def finish(self) -> None:
        """Ask the loop to end after the next round that has its work; safe from any thread."""
        self._is_finishing = True
        self._end_after_this_round()

    def run(self) -> TrainingProgress:
        """Train on the calling thread; raise `P2PTrainError` if training cannot continue."""
        self._rest_while_paused()
        self.progress.held_out_loss_before = self._measure()
        started = last_report = time.monotonic()
        tokens_before = 0
        while self._goes_on():
            try:
                if self._sits_out():
                    continue
                loss = self._train_step()
            except TemporaryError as error:
                if not self._stop.is_set():
                    raise
                logger.info("the round in progress is given up: %s", error)
                break
            result, self.optimizer.last_result = self.optimizer.last_result, None
            if result is not None:
                self._after_round(result, float(loss))
            now = time.monotonic()
            if now - last_report >= REPORT_SECONDS:
                rate = (self.optimizer.total_tokens - tokens_before) / (now - last_report)
                last_report, tokens_before = now, self.optimizer.total_tokens
                self._report(float(loss), rate)
        self._contribute_rest()
        with self._jobs("saving a checkpoint", ""):
            self._save()
        self.is_saved = self.unsaved is None
        self._measure_shared_state()
        self.progress.tokens = self.optimizer.total_tokens
        self.progress.tokens_per_second = self.optimizer.total_tokens / max(time.monotonic() - started, 1e-9)
        return self.progress

    def _goes_on(self) -> bool:
        """Rest while paused; return False once the loop should end."""
        self._rest_while_paused()
        return not self._stop.is_set() and not self._is_done() and not self.optimizer.is_spent

    def _rest_while_paused(self) -> None:
        """Hand in the pending work and save, then follow the swarm without training."""
        if self.optimizer.saves_budget:
            self._wait_for_others()
        if not self._rests() or self._stop.is_set():
            return
        if self.optimizer.is_spent:
            self.progress.note = SPENT_BUDGET
            logger.warning("%s: %s; this site contributes no more, and follows", SPENT_BUDGET, self.optimizer.privacy)
        self._contribute_rest()
        self._save()
        self._show_rest(True)
        while self._rests() and not self._stop.is_set() and not self._is_done():
            if self.optimizer.is_spent and not self.optimizer.others_train:
                break  # Nobody is left to follow.
            self._follow()
        self._show_rest(False)

    def _wait_for_others(self) -> None:
        """Keep the last of the privacy budget until another site trains; see `SwarmOptimizer.saves_budget`."""
        self.progress.note = KEEPS_BUDGET
        logger.warning("%s", KEEPS_BUDGET)
        self._contribute_rest()
        self._save()
        self._on_progress(self.progress)
        while self.optimizer.saves_budget and not (self._stop.is_set() or self._is_paused or self._is_done()):
            self._follow()
        self.progress.note = ""

    def _follow(self) -> None:
        """Take over the others' rounds, and wait a while."""
        before = self.optimizer.round
        try:
            self.optimizer.follow()
            if self._is_private and self.optimizer.round != before:
                self._glance()
        except TemporaryError:
            if not self._stop.is_set():
                raise
        self._wait_for_a_wish()

    def _sits_out(self) -> bool:
        """Follow the others for a while if this peer is not drawn for the round in progress; return False if it is."""
        before, sits_out = self.optimizer.round, self.optimizer.sit_out()
        if sits_out != (self.progress.note == NOT_DRAWN):
            self.progress.note = NOT_DRAWN if sits_out else ""
            self._on_progress(self.progress)
        if sits_out and self.optimizer.round != before:
            self._glance()
        return sits_out

    def _wait_for_a_wish(self) -> None:
        self._wake.wait(FOLLOW_SECONDS)
        self._wake.clear()

    def _rests(self) -> bool:
        return self._is_paused or self.optimizer.is_spent

    def _show_rest(self, is_resting: bool) -> None:
        self.progress.is_resting, self.progress.tokens_per_second = is_resting, 0.0
        self._on_progress(self.progress)

    def _end_after_this_round(self) -> None:
        last = self._synchronizer.head.round + 1
        self._synchronizer.last_round = min(last, self._limit) if self._limit else last

    def _is_done(self) -> bool:
        return 0 < self._synchronizer.last_round <= self._synchronizer.head.round

    def _train_step(self) -> torch.Tensor:
        head = self._synchronizer.head
        if head.round != self._round:
            self._round, self._index = head.round, self.optimizer.work.samples  # Samples carried over.
        size = self._spec.local_batch
        site = self.optimizer.site
        if site is not None and site.privacy is not None:
            batch = self._sampler.windows(site.privacy.draw())
        elif self._is_private:
            batches = self.optimizer.total_steps + self.optimizer.dropped_batches
            batch = self._sampler.of_site(batches * size, size)
        else:
            place = self._synchronizer.place
            batch = self._sampler.batch(head.samples, place, self.peer_id, head.round, self._index, size)
        self._index += size
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, batch: npt.NDArray[np.int64]) -> torch.Tensor:
        tokens = torch.from_numpy(batch).to(self._device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else contextlib.nullcontext():
            return language_model_loss(self._module, tokens)

    def _after_round(self, result: RoundResult, loss: float) -> None:
        self.progress.loss = loss
        self.progress.note = "" if result.committed else result.reason
        if result.committed:
            pace = self.progress.tokens_per_second  # 0 before it has been measured
            logger.info(
                "round %d: loss %.3f, %d of %d peers contributed, %.1f s%s%s",
                result.round, loss, result.contributors, result.members, result.seconds,
                f", {pace:.0f} tokens/s" if pace else "", f" ({result.reason})" if result.reason else "",
            )  # fmt: skip
        else:
            logger.warning("round %d was not committed: %s", result.round, result.reason)
        self._write_round(result)
        self._on_progress(self.progress)
        if self._is_finishing and not result.contributed:
            self._end_after_this_round()
        if result.committed and result.contributed and self.saver.is_due():
            self._save()
        if result.committed and time.monotonic() >= self._next_glance:
            self._glance()
        if result.committed and not self._is_private and time.monotonic() >= self._next_audit:
            self._audit()

    def _audit(self) -> None:
        """Audit the part of another peer that this one kept from the round, unless the last round had none."""
        claimed, self._synchronizer.claimed = self._synchronizer.claimed, None
        if claimed is None:
            return
        started = time.monotonic()
        difference = self.audits.audit(claimed)
        now = time.monotonic()
        self._next_audit = now + (now - started) / AUDIT_SHARE
        score = self.audits.scores[claimed.part.peer]
        self._metrics.write(
            "audit", round=claimed.round, peer=claimed.part.peer, difference=difference, audits=score.audits,
            deviations=score.deviations,
        )  # fmt: skip

    def _report(self, loss: float, rate: float) -> None:
        self.progress.loss, self.progress.tokens_per_second = loss, rate
        self.progress.tokens = self.optimizer.total_tokens
        self._metrics.write("step", loss=loss, tokens_per_second=rate, step=self.optimizer.total_steps)
        self._on_progress(self.progress)

    def _write_round(self, result: RoundResult) -> None:
        self._metrics.write(
            "round", round=result.round, committed=result.committed, reason=result.reason, seconds=result.seconds,
            matchmaking_seconds=result.matchmaking_seconds, transfer_seconds=result.transfer_seconds,
            members=result.members, contributors=result.contributors, contributed=result.contributed,
            loss=self.progress.loss,
            digest=self._synchronizer.head.digest.hex(), tokens=self.optimizer.total_tokens,
        )  # fmt: skip

    def _on_pause(self, result: RoundResult) -> bool:
        self.progress.note = result.reason
        self._on_progress(self.progress)
        return not (self._stop.wait(PAUSE_SECONDS) or self._is_paused)

    # --- the end

    def _contribute_rest(self) -> None:
        """Finish a round under compute, and contribute the pending work."""
        try:
            if self.optimizer.is_round_running:
                self._write_round(self.optimizer.synchronize())
            for _ in range(self._spec.fragments):
                if not self.optimizer.work.tokens or self._is_done() or self._is_left_alone():
                    break
                result = self.optimizer.synchronize()
                self._write_round(result)
                logger.info("the last work is handed in: %s", "committed" if result.committed else result.reason)
                if not result.committed:
                    break
        except P2PTrainError as error:
            logger.info("the last local steps were not contributed: %s", error)

    def _is_left_alone(self) -> bool:
        """True if the other peers of the last round are gone: a round without them would only fork the lineage."""
        others = self._synchronizer.replica.context.membership.alive_trainers()
        return len(self._synchronizer.head.members) > 1 and not others

    def _save(self) -> None:
        self.is_saving, self.unsaved = True, None
        try:
            self.saver.save()
        except (ResourceError, CheckpointError) as error:
            # Training continues: the next synchronisation detects and repairs a damaged state.
            self.progress.note, self.unsaved = NOT_SAVED, error
            logger.error("%s", error)
        finally:
            self.is_saving = False

    # --- the held-out loss

    def _measure_shared_state(self) -> None:
        """Measure the shared state at the end, in at most half of the drain's remaining time."""
        seconds = EVALUATION_SECONDS
        if self._deadline is not None:
            seconds = min(seconds, (self._deadline - time.monotonic()) / 2)
        if seconds > 0:
            self._synchronizer.state.layout.write(self._synchronizer.state.vector, self._module)
            self.progress.held_out_loss_after = self._measure(seconds)

    def _measure(self, seconds: float = EVALUATION_SECONDS) -> float:
        with self._jobs("measuring the held-out loss", "windows") as advance:
            return self._held_out_loss("shared", max_seconds=seconds, advance=advance)

    def _glance(self) -> None:
        """Measure the held-out loss on a few fixed windows, for monitoring."""
        started = time.monotonic()
        size = min(GLANCE_WINDOWS, self._spec.local_batch)
        self._held_out_loss("own", max_windows=GLANCE_WINDOWS, batch_size=size, max_seconds=1.0)
        now = time.monotonic()
        self._next_glance = now + max(GLANCE_SECONDS, 50 * (now - started))

    def _held_out_loss(self, state: Literal["shared", "own"], **options: Any) -> float:
        found = held_out_loss(self._module, self._corpus.held_out, self._context, **options)
        number = self._synchronizer.head.round
        self._metrics.write(
            "held_out", round=number, loss=found.loss, standard_error=found.error, windows=found.num_windows,
            state=state,
        )  # fmt: skip
        if self._is_private:
            self.optimizer.evaluation = Evaluation.of("loss", number, found.loss, found.error, found.num_windows)
        return found.loss
