"""Alerts reach a real server on this machine; one that fails is asked again, but not for ever."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from p2ptrain.monitor import watch as watch_module
from p2ptrain.monitor import webhook as webhook_module
from p2ptrain.monitor.watch import HOLD_SECONDS, watching
from p2ptrain.monitor.webhook import ATTEMPTS, MAX_WAITING, Webhook
from p2ptrain.status.views import Event
from tests.support.coroutines import on_loop
from tests.support.processes.daemons import free_port
from tests.support.web.stores import watched

BEGAN, ENDED = Event(1.0, "alert", "a", "Ada is \u2026 <b>"), Event(2.0, "cleared", "a", "over: Ada")


class Server(ThreadingHTTPServer):
    """Keeps what is posted, and answers with each of ``answers`` in turn, then with success.

    Attributes:
        answers: HTTP statuses, or raw bytes instead of an answer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posted: list[tuple[str, Any]] = []
        self.answers: list[int | bytes] = []
        self.release = threading.Event()
        self.release.set()

    @property
    def url(self) -> str:
        """Where to post."""
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Content-Type"], json.loads(body)))
        self.server.release.wait(30)
        answer = self.server.answers.pop(0) if self.server.answers else 204
        if isinstance(answer, bytes):
            self.wfile.write(answer)
            return
        self.send_response(answer)
        self.send_header("Location", "/moved")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(webhook_module, "PAUSE_SECONDS", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


def test_what_began_and_ended_together_is_one_post_for_people_and_programs(server: Server) -> None:
    asyncio.run(Webhook(server.url, "tiny").send([BEGAN, ENDED]))
    events = [
        {"at": 1.0, "kind": "alert", "peer": "a", "text": "Ada is \u2026 <b>"},
        {"at": 2.0, "kind": "cleared", "peer": "a", "text": "over: Ada"},
    ]
    text = "tiny: Ada is \u2026 <b>\ntiny: over: Ada"
    assert server.posted == [("application/json", {"text": text, "swarm": "tiny", "events": events})]


@pytest.mark.parametrize("answer", [500, 404, b"SSH-2.0-OpenSSH\r\n", b"", b"HTTP/1.1 abc\r\n\r\n"])
@pytest.mark.parametrize("times", [1, 100])
def test_a_server_that_fails_is_asked_again_so_many_times(
    server: Server, caplog: pytest.LogCaptureFixture, answer: int | bytes, times: int
) -> None:
    server.answers = [answer] * times
    asyncio.run(Webhook(server.url, "tiny").send([BEGAN]))
    assert len(server.posted) == min(times + 1, ATTEMPTS)
    assert caplog.text.count("did not take an alert") == min(times, ATTEMPTS)
    assert server.url not in caplog.text, "it may hold a secret"


@pytest.mark.parametrize(("answer", "is_taken"), [(301, False), (302, False), (303, False), (307, True), (308, True)])
def test_a_server_that_moved_has_taken_an_alert_if_the_redirect_kept_it(
    server: Server, caplog: pytest.LogCaptureFixture, answer: int, is_taken: bool
) -> None:
    server.answers = [answer] if is_taken else [answer] * ATTEMPTS
    asyncio.run(Webhook(server.url, "tiny").send([BEGAN]))
    assert caplog.text.count("it has moved: start the monitor with its new address") == (0 if is_taken else ATTEMPTS)


def test_a_server_that_is_not_there_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook_module, "PAUSE_SECONDS", 0.0)
    asyncio.run(Webhook(f"http://127.0.0.1:{free_port()}/", "tiny").send([BEGAN]))
    assert caplog.text.count("did not take an alert") == ATTEMPTS


@on_loop
async def test_what_comes_while_too_much_waits_is_dropped_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.release.clear()
    webhook = Webhook(server.url, "tiny")
    async with asyncio.TaskGroup() as group:
        for _ in range(MAX_WAITING):
            group.create_task(webhook.send([BEGAN]))
        await asyncio.sleep(0)
        await webhook.send([BEGAN, ENDED])
        assert "2 events are not sent" in caplog.text
        server.release.set()
    assert len(server.posted) == MAX_WAITING
    await webhook.send([ENDED])
    assert len(server.posted) == MAX_WAITING + 1, "there is room again"


@on_loop
async def test_the_end_does_not_wait_for_a_server_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr(watch_module, "LAST_WORDS_SECONDS", 0.2)
    monkeypatch.setattr(webhook_module, "TIMEOUT_SECONDS", 3600.0)
    server.release.clear()
    notify = Webhook(server.url, "tiny").send
    async with asyncio.timeout(30), watched(bootstraps=["gone"], notify=notify) as swarm, watching(swarm.watch):
        while not server.posted:
            swarm.source.time += HOLD_SECONDS
            await swarm.watch.look()


@on_loop
async def test_the_end_lets_an_alert_out_that_is_on_its_way(server: Server) -> None:
    notify = Webhook(server.url, "tiny").send
    async with watched(bootstraps=["gone"], notify=notify) as swarm, watching(swarm.watch):
        swarm.source.time += HOLD_SECONDS
        await swarm.watch.look()
    assert len(server.posted) == 1
