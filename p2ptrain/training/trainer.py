"""The training loop of a peer that trains the manifest's own model: an ordinary loop around `SwarmOptimizer`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from p2ptrain.errors import CheckpointError, P2PTrainError, ResourceError
from p2ptrain.jobs import Jobs, untold
from p2ptrain.manifest import Manifest
from p2ptrain.training.checkpoint import LoadedCheckpoint, save_checkpoint
from p2ptrain.training.data import Sampler
from p2ptrain.training.evaluate import Evaluation, held_out_loss, language_model_loss
from p2ptrain.training.learning_rate import learning_rate_factor
from p2ptrain.training.metrics import MetricsWriter
from p2ptrain.training.optimizer import PAUSE_SECONDS, SwarmOptimizer
from p2ptrain.training.sync import RoundResult, Synchronizer
from p2ptrain.training.text import Corpus

logger = logging.getLogger(__name__)

EVALUATION_SECONDS = 20.0
GLANCE_SECONDS = 10.0
"""Between two short looks at the held-out loss; they take less than a fiftieth of the time, or are further apart."""
GLANCE_WINDOWS = 16


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where and how often to save.

    Attributes:
        directory: Holds one folder per checkpoint.
        every_rounds: Save when so many rounds were committed since the last; 0 saves at the end only.
        keep_last: Checkpoints to keep.
    """

    directory: Path
    every_rounds: int
    keep_last: int


@dataclass
class Progress:
    """What the loop did so far; read by other threads, written by the loop alone."""

    loss: float | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    note: str = ""


class Trainer:
    """Trains until it is stopped, the manifest's rounds are done, or an error ends it."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: SwarmOptimizer,
        synchronizer: Synchronizer,
        manifest: Manifest,
        corpus: Corpus,
        peer: str,
        swarm: bytes,
        metrics: MetricsWriter,
        checkpoints: CheckpointPolicy,
        max_rounds: int = 0,
        evaluate: bool = True,
        jobs: Jobs = untold,
    ) -> None:
        """
        Args:
            module: The live model, on its device.
            optimizer: Shared with the swarm, around AdamW on ``module``.
            synchronizer: What ``optimizer`` synchronises with.
            manifest: Batch sizes and schedule.
            corpus: The text.
            peer: This peer's id: decides which samples it reads.
            swarm: The manifest's digest, for checkpoints.
            metrics: Gets a line per round and every few seconds.
            checkpoints: Where and how often to save.
            max_rounds: Stop when the swarm has reached this round; 0 for never.
            evaluate: Whether to measure held-out loss at the beginning and the end.
            jobs: Told how far that is.
        """
        self.progress = Progress()
        self.optimizer = optimizer
        self._module = module
        self._synchronizer = synchronizer
        self._spec = manifest.training
        self._context = manifest.model.context
        self._corpus = corpus
        self._sampler = Sampler(corpus.train, manifest.model.context, manifest.data.seed)
        self._peer = peer
        self._swarm = swarm
        self._metrics = metrics
        self._checkpoints = checkpoints
        synchronizer.last_round = max_rounds
        self._evaluate = evaluate
        self._jobs = jobs
        self._device = next(module.parameters()).device
        self._stop = threading.Event()
        self._steps = 0
        self._round = -1
        self._index = 0
        self._saved_round = synchronizer.head.round
        self._next_glance = 0.0
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self.on_progress: Callable[[], None] = lambda: None
        optimizer.on_pause = self._on_pause

    def stop(self) -> None:
        """Ask the loop to end after its current step; from any thread."""
        self._stop.set()

    def restore(self, checkpoint: LoadedCheckpoint) -> None:
        """Take up the local side of a checkpoint: inner optimizer, step count and residual; before `run`."""
        extra = checkpoint.extra
        self._steps = int(extra.get("steps", 0))
        if self._spec.every > 1 and "optimizer_layout" in extra:
            self.optimizer.inner.load_state_dict(_unflatten(extra["optimizer_layout"], checkpoint.local))
        residual = checkpoint.local.get("residual")
        if residual is not None and self._synchronizer.feedback.residual is not None:
            self._synchronizer.feedback.residual.copy_(residual)

    def run(self) -> Progress:
        """The loop; runs on the training thread.

        Raises:
            P2PTrainError: Something that training cannot go on with.
        """
        if self._evaluate:
            self.progress.held_out_loss_before = self._held_out()
        started, last_report, tokens_before = time.monotonic(), time.monotonic(), 0
        while not self._stop.is_set() and not self._is_done():
            loss = self._train_step()
            result = self._new_result()
            if result is not None:
                self._after_round(result, loss)
            now = time.monotonic()
            if now - last_report >= 2.0:
                rate = (self.optimizer.total_tokens - tokens_before) / (now - last_report)
                last_report, tokens_before = now, self.optimizer.total_tokens
                self.progress.loss, self.progress.tokens_per_second = float(loss), rate
                self.progress.tokens = self.optimizer.total_tokens
                self._metrics.write("step", loss=float(loss), tokens_per_second=rate, step=self._steps)
                self.on_progress()
        self._finish()
        elapsed = max(time.monotonic() - started, 1e-9)
        self.progress.tokens = self.optimizer.total_tokens
        self.progress.tokens_per_second = self.optimizer.total_tokens / elapsed
        return self.progress

    def _is_done(self) -> bool:
        return 0 < self._synchronizer.last_round <= self._synchronizer.head.round

    def _train_step(self) -> torch.Tensor:
        head = self._synchronizer.head
        if head.round != self._round:
            self._round, self._index = head.round, self.optimizer.samples_in_round  # Samples that were carried over.
        size = self._spec.local_batch
        batch = self._sampler.batch(head.samples, self._synchronizer.place, self._peer, head.round, self._index, size)
        self._index += size
        tokens = torch.from_numpy(batch).to(self._device, non_blocking=True)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * learning_rate_factor(self._rate_step(), warmup_steps=self._spec.warmup_steps)
        with torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else contextlib.nullcontext():
            loss = language_model_loss(self._module, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        return loss.detach()

    def _rate_step(self) -> int:
        return self._synchronizer.head.round if self._spec.every == 1 else self._steps

    def _new_result(self) -> RoundResult | None:
        result = self.optimizer.last_result
        self.optimizer.last_result = None
        return result

    def _after_round(self, result: RoundResult, loss: torch.Tensor) -> None:
        self.progress.loss = float(loss)
        self.progress.note = "" if result.committed else result.reason
        if result.committed:
            pace = self.progress.tokens_per_second  # 0 before it has been measured
            logger.info(
                "round %d: loss %.3f, %d of %d peers contributed, %.1f s%s%s",
                result.round, float(loss), result.contributors, result.members, result.seconds,
                f", {pace:.0f} tokens/s" if pace else "", f" ({result.reason})" if result.reason else "",
            )  # fmt: skip
        else:
            logger.warning("round %d was not committed: %s", result.round, result.reason)
        self._write_round(result)
        self.on_progress()
        due = self._checkpoints.every_rounds
        if result.committed and result.contributed and due and result.round - self._saved_round >= due:
            self._save()
        if self._evaluate and result.committed and time.monotonic() >= self._next_glance:
            self._glance()

    def _write_round(self, result: RoundResult) -> None:
        self._metrics.write(
            "round", round=result.round, committed=result.committed, reason=result.reason, seconds=result.seconds,
            matchmaking_seconds=result.matchmaking_seconds, transfer_seconds=result.transfer_seconds,
            members=result.members, contributors=result.contributors, loss=self.progress.loss,
            digest=self._synchronizer.head.digest.hex(), tokens=self.optimizer.total_tokens,
        )  # fmt: skip

    def _on_pause(self, result: RoundResult) -> bool:
        self.progress.note = result.reason
        self.on_progress()
        return not self._stop.wait(PAUSE_SECONDS)

    def _finish(self) -> None:
        """Hand in what is not contributed yet, save, and measure the shared state."""
        try:
            if self.optimizer.is_under_way:
                self._write_round(self.optimizer.synchronize())
            for _ in range(self._spec.fragments):
                if not self.optimizer.tokens_in_round or self._is_done() or self._is_left_alone():
                    break
                result = self.optimizer.synchronize()
                self._write_round(result)
                logger.info("last round: %s", "committed" if result.committed else result.reason)
                if not result.committed:
                    break
        except P2PTrainError as error:
            logger.info("the last local steps were not contributed: %s", error)
        self._synchronizer.state.layout.write(self._synchronizer.state.vector, self._module)
        with self._jobs("saving a checkpoint", ""):
            self._save()
        if self._evaluate:
            self.progress.held_out_loss_after = self._held_out()

    def _is_left_alone(self) -> bool:
        """Whether the others of the last round are gone: a round without them, right before the end, is only a fork."""
        return len(self._synchronizer.head.members) > 1 and not self._synchronizer.sees_others()

    def _held_out(self) -> float:
        with self._jobs("measuring the held-out loss", "windows") as advance:
            evaluation = held_out_loss(
                self._module, self._corpus.held_out, self._context, max_seconds=EVALUATION_SECONDS, advance=advance
            )
        self._write_held_out(evaluation)
        return evaluation.loss

    def _glance(self) -> None:
        """Measure the held-out loss on a few windows, always the same, for people who watch the training."""
        started = time.monotonic()
        size = min(GLANCE_WINDOWS, self._spec.local_batch)
        self._write_held_out(
            held_out_loss(
                self._module, self._corpus.held_out, self._context, max_windows=GLANCE_WINDOWS, batch_size=size,
                max_seconds=1.0,
            )
        )  # fmt: skip
        now = time.monotonic()
        self._next_glance = now + max(GLANCE_SECONDS, 50 * (now - started))

    def _write_held_out(self, evaluation: Evaluation) -> None:
        self._metrics.write(
            "held_out", round=self._synchronizer.head.round, loss=evaluation.loss, windows=evaluation.num_windows
        )

    def _save(self) -> None:
        state = self._synchronizer.state
        local: dict[str, torch.Tensor] = {}
        extra: dict[str, Any] = {"steps": self._steps}
        if self._spec.every > 1:
            extra["optimizer_layout"] = _flatten(self.optimizer.inner.state_dict(), local)
        if self._synchronizer.feedback.residual is not None:
            local["residual"] = self._synchronizer.feedback.residual
        try:
            save_checkpoint(
                self._checkpoints.directory, head=state.head, tensors=state.tensors(), local=local, extra=extra,
                swarm=self._swarm, keep_last=self._checkpoints.keep_last,
            )  # fmt: skip
            self._saved_round = state.head.round
        except (ResourceError, CheckpointError) as error:
            # A damaged state is found again, and healed, at the next synchronisation: training goes on.
            self.progress.note = str(error)
            logger.error("%s", error)


def _flatten(value: Any, tensors: dict[str, torch.Tensor], path: str = "optimizer") -> Any:
    """Replace the tensors of a state dict by references into ``tensors``, so that the rest is JSON."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _flatten(item, tensors, f"{path}.{key}")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_flatten(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]}
    return {"value": value}


def _unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `_flatten`."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dict" in value:
        return {key: _unflatten(item, tensors) for key, item in value["dict"]}
    if "list" in value:
        return [_unflatten(item, tensors) for item in value["list"]]
    return value["value"]
