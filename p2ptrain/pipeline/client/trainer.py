"""Training loop of a peer that feeds a pipeline with batches of the manifest's text.

Each trainer reads all windows of the text in its own order, pass after pass (`p2ptrain.training.data.windows.permute`).
A pipeline's trainers share no lineage that could assign positions.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p2ptrain.errors import DeadlineError, P2PTrainError, TemporaryError
from p2ptrain.manifest import Manifest
from p2ptrain.pipeline.client.sender import Accepted, LostError, MicrobatchSender
from p2ptrain.pipeline.messages import IDS, Payload, pack
from p2ptrain.tasks import Tasks
from p2ptrain.training.data.corpus import Corpus, Tokens
from p2ptrain.training.data.windows import ReadingPosition, Sampler
from p2ptrain.training.evaluate import mean_and_error
from p2ptrain.training.loop import TrainingProgress
from p2ptrain.training.metrics import MetricsWriter

logger = logging.getLogger(__name__)

POSITION_FILE = "reading.json"
MAX_FAILURES = 4
"""Consecutive microbatches that fail after all retries, until training ends with an error."""
HELD_OUT_WINDOWS, GLANCE_WINDOWS = 64, 16
GLANCE_SECONDS = 15.0
HELD_OUT_SECONDS = 60.0
PACE_SECONDS = 15.0
DRAIN_SECONDS = 15.0


@dataclass(frozen=True)
class SendingOptions:
    """Settings of a trainer.

    Attributes:
        credits: Microbatches in flight.
        run_dir: Stores the reading position.
        last_round: Maps the trainer's first round to the round at which it leaves; 0 for never.
    """

    credits: int
    run_dir: Path
    last_round: Callable[[int], int]


class PipelineTrainer:
    """Sends microbatches until stopped, or until the last round.

    Attributes:
        rounds: Number of rounds that ended.
        stopping: Set it to send nothing new; `run` ends after the microbatches in flight, or after `DRAIN_SECONDS`.
    """

    def __init__(
        self,
        sender: MicrobatchSender,
        manifest: Manifest,
        corpus: Corpus,
        metrics: MetricsWriter,
        options: SendingOptions,
        on_progress: Callable[[TrainingProgress], None],
    ) -> None:
        self.progress = TrainingProgress()
        self.rounds = 0
        self.stopping = asyncio.Event()
        self._on_progress = on_progress
        self._sender = sender
        self._spec = manifest.training
        self._context = manifest.model.context
        self._corpus = corpus
        seed = int.from_bytes(hashlib.sha256(f"{manifest.data.seed} {sender.peer_id}".encode()).digest()[:7], "big")
        self._sampler = Sampler(corpus.train, manifest.model.context, seed)
        order = f"{seed} {self._sampler.num_windows}"
        self._position = ReadingPosition(options.run_dir / POSITION_FILE, order)
        self._metrics = metrics
        self._options = options
        self._round = -1
        self._last_round: int | None = None
        self._losses: list[float] = []
        self._marks = deque([(asyncio.get_running_loop().time(), 0)])
        self._failures = 0
        self._is_paused = False

    def pause(self, paused: bool) -> None:
        """Send nothing new while paused; microbatches in flight complete."""
        self._is_paused = paused

    def finish(self) -> None:
        """End `run` after the round in progress."""
        self._last_round = max(1, self._sender.round + 1)

    async def run(self) -> None:
        """Run the training loop.

        Raises:
            TemporaryError: `MAX_FAILURES` microbatches in a row failed.
        """
        self.progress.held_out_loss_before = await self._held_out(HELD_OUT_WINDOWS)
        try:
            await self._send_until_done()
        finally:
            self._position.save()
        self.progress.held_out_loss_after = await self._held_out(HELD_OUT_WINDOWS)

    async def _send_until_done(self) -> None:
        pending: set[asyncio.Task[None]] = set()
        async with Tasks() as tasks:
            stopping = tasks.call(self.stopping.wait(), "stop")
            tasks.keep(self._glance, "held-out")
            tasks.keep(self._follow_rounds, "rounds")
            while not self.stopping.is_set() and not self._is_done():
                while len(pending) < self._options.credits and not self._is_paused:
                    pending.add(tasks.call(self._one(), "microbatch"))
                waiting: set[asyncio.Future[Any]] = {*pending, stopping}
                await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for sent in [task for task in pending if task.done()]:
                    pending.discard(sent)
                    sent.result()
            if pending and not self._is_done():
                await asyncio.wait(pending, timeout=DRAIN_SECONDS)
        self._note_round()

    async def _follow_rounds(self) -> None:
        while True:
            await self._sender.round_after(self._round)
            self._note_round()

    def _is_done(self) -> bool:
        if self._last_round is None and self._sender.round >= 0:
            self._last_round = self._options.last_round(self._sender.round)
        return 0 < (self._last_round or 0) <= self._sender.round

    async def _one(self) -> None:
        size = self._spec.local_batch
        first = self._position.take(size)
        windows = [self._sampler.order.at(first + row) for row in range(size)]
        try:
            accepted = await self._send(windows, first)
        except LostError as error:
            logger.info("%s", error)
        except TemporaryError as error:
            self._failures += 1
            self.progress.note = str(error)
            self._on_progress(self.progress)
            logger.warning("%s", error)
            if self._failures >= MAX_FAILURES:
                raise
        else:
            self._failures, self.progress.note = 0, ""
            self._count(accepted, size * self._context)

    async def _send(self, windows: Sequence[int], position: int) -> Accepted:
        return await self._sender.send(*self._batch(self._corpus.train, windows), position)

    def _batch(self, text: Tokens, windows: Sequence[int]) -> tuple[Payload, Payload, int, int]:
        """Return the data for `MicrobatchSender.send`, and their samples and tokens, for windows of a text."""
        context = self._context
        rows = [text[window * context : (window + 1) * context + 1] for window in windows]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return pack(tokens[:, :-1], IDS), pack(tokens[:, 1:], IDS), len(windows), len(windows) * context

    def _count(self, accepted: Accepted, tokens: int) -> None:
        self._losses.append(accepted.loss)
        self.progress.loss = accepted.loss
        self.progress.tokens += tokens
        now = asyncio.get_running_loop().time()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self.progress.tokens))
            while len(self._marks) > 2 and now - self._marks[1][0] > PACE_SECONDS:
                self._marks.popleft()
            since, before = self._marks[0]
            self.progress.tokens_per_second = (self.progress.tokens - before) / (now - since)
            self._on_progress(self.progress)

    def _note_round(self) -> None:
        before, self._round = self._round, self._sender.round
        if before in (-1, self._round):
            return
        losses, self._losses = self._losses, []
        self.rounds += 1
        loss = statistics.fmean(losses) if losses else None
        pace = self.progress.tokens_per_second
        logger.info(
            "round %d: %s, %d microbatches of this trainer%s", self._round,
            f"loss {loss:.3f}" if loss is not None else "-", len(losses), f", {pace:.0f} tokens/s" if pace else "",
        )  # fmt: skip
        self._metrics.write("step", loss=loss, tokens_per_second=pace, step=self._round)
        self._on_progress(self.progress)

    # The held-out loss

    async def _glance(self) -> None:
        """Measure the held-out loss from time to time, on a few fixed windows."""
        while True:
            await asyncio.sleep(GLANCE_SECONDS)
            if self._is_paused:
                continue
            await self._held_out(GLANCE_WINDOWS)

    async def _held_out(self, max_windows: int) -> float | None:
        """Return the mean loss over windows spread over the held-out text; None if measuring failed."""
        tokens, size = self._corpus.held_out, self._spec.local_batch
        available = (len(tokens) - 1) // self._context
        count = min(max_windows, available)
        starts = [slot * available // count for slot in range(count)]
        losses: list[float] = []
        means: list[float] = []
        try:
            async with asyncio.timeout(HELD_OUT_SECONDS):
                for first in range(0, count, size):
                    windows = starts[first : first + size]
                    means.append(await self._sender.evaluate(*self._batch(tokens, windows)))
                    losses += [means[-1]] * len(windows)
        except (P2PTrainError, DeadlineError, TimeoutError) as error:
            logger.info("the held-out loss was not measured: %s", error)
            return None
        loss = statistics.fmean(losses)
        self._metrics.write(
            "held_out", round=max(0, self._sender.round), loss=loss, windows=count,
            standard_error=mean_and_error(means)[1], state="shared",
        )  # fmt: skip
        return loss
