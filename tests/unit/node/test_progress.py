import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from p2ptrain.manifest import DataSpec
from p2ptrain.node.reports.jobs import JobBook
from p2ptrain.training.data import corpus
from tests.support.coroutines import on_loop


@on_loop
async def test_jobs_are_known_while_they_go_on_from_any_thread() -> None:
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


@on_loop
async def test_only_jobs_that_last_are_logged_and_each_twice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("p2ptrain.node.reports.jobs.SILENT_SECONDS", 0.05)
    book = JobBook(asyncio.get_running_loop())
    with book("a short job"):
        pass
    with book("a long job") as advance:
        async with asyncio.timeout(10):
            while not caplog.messages:
                advance(1, 2)
                await asyncio.sleep(0.01)
    assert [message.split(" took ")[0] for message in caplog.messages] == ["a long job …", "a long job"]


@on_loop
async def test_a_job_that_fails_is_over() -> None:
    book = JobBook(asyncio.get_running_loop())
    with pytest.raises(ValueError, match="broken"), book("downloading the state"):
        raise ValueError("broken")
    assert book.running() == ()


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


@on_loop
async def test_no_record_tells_how_much_text_a_peer_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.node.reports.jobs.TOLD_SECONDS", 0.0)
    (tmp_path / "text").write_text("a letter\n" * 1000)
    book, notes, load = JobBook(asyncio.get_running_loop()), list[str](), corpus.load_tokenizer

    def told(name: str) -> tuple[corpus.Encoder, int]:
        encode, size = load(name)

        def noted(content: bytes) -> corpus.Tokens:
            notes.append(book.note())
            return encode(content)

        return noted, size

    monkeypatch.setattr(corpus, "load_tokenizer", told)
    corpus.load_corpus(DataSpec(source=f"path:{tmp_path / 'text'}"), 8, 256, jobs=book)
    assert set(notes) == {""}
