from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace

import pytest

from p2ptrain.manifest import Manifest, ModelSpec, PipelineSpec, TrainingSpec
from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.node.progress import JobBook, RoundGoal, round_goal, seconds_to_round, tokens_in_round
from tests.unit.cli.screen.test_table import COMMITTED, TRAINER


def test_jobs_are_known_while_they_go_on_from_any_thread() -> None:
    async def main() -> None:
        book = JobBook(asyncio.get_running_loop())
        began, end = threading.Event(), threading.Event()

        def work() -> None:
            with book("reading the text") as advance:
                advance(3, 10)
                began.set()
                end.wait(10)

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(10)
        with book("building the model", ""):
            assert [(job.name, job.done, job.total) for job in book.running()] == [
                ("reading the text", 3, 10), ("building the model", 0, 0),
            ]  # fmt: skip
        end.set()
        thread.join()
        assert book.running() == ()

    asyncio.run(main())


def test_only_jobs_that_last_are_logged_and_each_twice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr("p2ptrain.node.progress.SILENT_SECONDS", 0.05)
        book = JobBook(asyncio.get_running_loop())
        with book("a short job"):
            pass
        with book("a long job") as advance:
            async with asyncio.timeout(10):
                while not caplog.messages:
                    advance(1, 2)
                    await asyncio.sleep(0.01)
        assert [message.split(" took ")[0] for message in caplog.messages] == ["a long job …", "a long job"]

    asyncio.run(main())


def test_a_job_that_fails_is_over() -> None:
    async def main() -> None:
        book = JobBook(asyncio.get_running_loop())
        with pytest.raises(ValueError, match="broken"), book("downloading the state"):
            raise ValueError("broken")
        assert book.running() == ()

    asyncio.run(main())


def test_a_transfer_that_lasts_is_told_to_others_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    loop = asyncio.new_event_loop()
    book = JobBook(loop)
    loop.close()
    with book("reading text", "files") as files, book("downloading the state") as advance:
        files(1, 2)
        advance(5_000_000_000, 20_000_000_000)
        now[0] = 10.0
        assert book.note() == ""
        now[0] = 100.0
        advance(6_000_000_000, 20_000_000_000)
        assert book.note() == "downloading the state: 30 % of 20.00 GB, 10.00 MB/s"
    assert book.note() == ""


def test_the_next_round_is_told_from_the_last_ones() -> None:
    reports = [replace(COMMITTED, compute_seconds=seconds) for seconds in (9.0, 10.0, 30.0)]
    assert seconds_to_round(reports, 100.0, 104.0) == 6.0
    assert seconds_to_round(reports, 100.0, 200.0) == 0.0
    assert seconds_to_round([], 100.0, 104.0) is None
    assert seconds_to_round(reports, None, 104.0) is None


def test_a_round_is_due_at_a_number_of_tokens_that_the_peers_reach_together() -> None:
    model = ModelSpec(context=128)
    shared = round_goal(Manifest(name="x", model=model, training=TrainingSpec(every=1, global_batch=10)))
    own = round_goal(Manifest(name="x", model=model, training=TrainingSpec(every=4, local_batch=2)))
    assert (shared, own) == (RoundGoal(1280, True), RoundGoal(1024, False))
    records = [replace(TRAINER, round_tokens=700), replace(TRAINER, round_tokens=2000),
               replace(TRAINER, round=9), replace(TRAINER, state="syncing", round_tokens=500)]  # fmt: skip
    assert tokens_in_round(records, 5, shared) == (2700, 1280)
    assert tokens_in_round(records, 5, own) == (2700, 2048), "a fast peer does what a slow one does not"
    assert tokens_in_round(records, 6, own) == (0, 0)
    assert tokens_in_round(records, 5, RoundGoal(0, False)) == (2700, 0)


def test_the_round_of_a_pipeline_is_as_far_as_the_hosts_of_its_first_stage() -> None:
    manifest = Manifest(
        name="x", model=ModelSpec(context=128), training=TrainingSpec(every=1, global_batch=12),
        pipeline=PipelineSpec(stages=2),
    )  # fmt: skip
    goal = round_goal(manifest)
    assert goal == RoundGoal(1536, True, 128)

    def host(unit: int, round_: int, samples: int, state: str = "training") -> PeerRecord:
        stage = StageReport(unit, round_, bytes(32), bytes(32), 0, samples=samples)
        return replace(TRAINER, role="stage", state=state, round=round_, stages=(stage,))

    feeder = replace(TRAINER, round=0)
    records = [host(0, 5, 3), host(0, 5, 4), host(0, 4, 10), host(0, 5, 9, "draining"), host(1, 5, 10), feeder]
    assert tokens_in_round(records, 0, goal) == (7 * 128, 1536)
    assert tokens_in_round([host(1, 5, 10), feeder], 5, goal) == (0, 0)
