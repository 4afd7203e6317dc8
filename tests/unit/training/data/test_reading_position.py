"""A trainer of a pipeline reads on where it ended, and reads no window twice."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from p2ptrain.manifest import Manifest, ModelSpec, TrainingSpec
from p2ptrain.pipeline.client.sender import Accepted, MicrobatchSender
from p2ptrain.pipeline.client.trainer import PipelineTrainer, SendingOptions
from p2ptrain.pipeline.messages import MicrobatchId, Payload, unpack
from p2ptrain.training.data.corpus import Corpus
from p2ptrain.training.data.windows import ReadingPosition
from p2ptrain.training.metrics import MetricsWriter

CONTEXT = 4


def test_a_reader_that_saved_goes_on_at_the_next_position(tmp_path: Path) -> None:
    first = ReadingPosition(tmp_path / "reading.json", "a")
    assert [first.take(3), first.take(2)] == [0, 3]
    first.save()
    assert ReadingPosition(tmp_path / "reading.json", "a").take(1) == 5


@pytest.mark.parametrize("num_taken", [1, 1024, 1025, 5000])
def test_a_reader_that_was_killed_repeats_nothing_and_skips_little(tmp_path: Path, num_taken: int) -> None:
    killed = ReadingPosition(tmp_path / "reading.json", "a")
    for _ in range(num_taken):
        killed.take(1)
    again = ReadingPosition(tmp_path / "reading.json", "a").take(1)
    assert num_taken <= again <= num_taken + ReadingPosition.RESERVED


@pytest.mark.parametrize("content", ["", "[]", "{", '{"order": "b", "next": 7}', '{"order": "a", "next": -7}'])
def test_a_file_that_says_nothing_of_this_order_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "reading.json").write_text(content)
    assert ReadingPosition(tmp_path / "reading.json", "a").take(1) == 0


def test_a_reader_goes_on_where_nothing_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    position = ReadingPosition(tmp_path / "missing" / "reading.json", "a")
    assert [position.take(1), position.take(1)] == [0, 1]
    assert caplog.text.count("a restart reads windows again") == 1


class _Feeder:
    """Accepts every microbatch, and notes the windows; the round is over after some."""

    def __init__(self, limit: int) -> None:
        self.windows: list[int] = []
        self.round = 0
        self.peer_id = "peer"
        self._limit = limit

    async def send(self, inputs: Payload, targets: Payload, samples: int, tokens: int) -> Accepted:
        await asyncio.sleep(0)
        self.windows += [int(row[0]) // CONTEXT for row in unpack(inputs)]
        self.round = int(len(self.windows) >= self._limit)
        return Accepted(MicrobatchId("peer", 0, len(self.windows)), 1.0, ())

    async def evaluate(self, *batch: object) -> float:
        return 1.0

    async def round_after(self, round: int) -> int:
        return await asyncio.Future[int]()


def _run(tmp_path: Path, microbatches: int) -> list[int]:
    """The windows that one process of a trainer reads."""
    manifest = Manifest(
        name="test",
        model=ModelSpec(context=CONTEXT, vocabulary=4096),
        training=TrainingSpec(every=1, global_batch=2, local_batch=2),
    )
    tokens = np.arange(1000 * CONTEXT + 1, dtype=np.uint16)
    corpus = Corpus(train=tokens, held_out=tokens[:100], fingerprint=bytes(32), vocabulary=4096)

    async def main() -> list[int]:
        feeder = _Feeder(2 * microbatches)
        trainer = PipelineTrainer(
            cast(MicrobatchSender, feeder), manifest, corpus, MetricsWriter(Path(os.devnull)),
            SendingOptions(1, tmp_path, last_round=lambda now: 1), lambda progress: None,
        )  # fmt: skip
        await trainer.run()
        return feeder.windows

    return asyncio.run(main())


def test_a_trainer_that_starts_again_reads_other_windows(tmp_path: Path) -> None:
    first, second = _run(tmp_path, 20), _run(tmp_path, 20)
    assert len(set(first)) >= 40
    assert not set(first) & set(second)
