"""``p2ptrain serve`` ends when it is told to, and when its network does."""

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from p2ptrain.cli.commands.serving import serve, talking
from p2ptrain.cli.main import main
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving import client
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text
from tests.support.generators import COMPLETIONS, Repeater, completion, tokenizer

LINK = SwarmLink(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'a' * 44}",))
QUICK_SECONDS = 20.0
"""Less than the server's time for answers in progress."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command over a generator, and ``beside(url)`` on a thread."""

    def run(generator: Repeater, beside: Callable[[str], None], lost: str = "") -> int:
        urls, made = queue.SimpleQueue[str](), tokenizer()

        @contextlib.asynccontextmanager
        async def generating(*_: Any) -> AsyncIterator[Any]:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            if lost:
                loop.call_later(0.2, future.set_result, lost)
            yield SimpleNamespace(generator=generator, peer=SimpleNamespace(network=SimpleNamespace(lost=future)))

        def text_of(*_: Any) -> tuple[Text, Any, Sampling]:
            return Text(made), made, Sampling()

        def say(text: str, flush: bool) -> None:
            urls.put(text.partition("chat: ")[2].split()[0])

        monkeypatch.setattr(client, "generating", generating)
        monkeypatch.setattr(talking, "text_of", text_of)
        monkeypatch.setattr(serve, "print", say, raising=False)
        thread = threading.Thread(target=lambda: beside(urls.get(timeout=QUICK_SECONDS)))
        thread.start()
        try:
            return main(["serve", str(LINK), "--port", "0"])
        finally:
            thread.join()

    return run


def test_a_second_signal_does_not_wait_for_the_answers_in_progress(served: Callable[..., int]) -> None:
    generator, began = Repeater(steps=asyncio.Semaphore(0)), time.monotonic()

    def beside(url: str) -> None:
        asking = threading.Thread(target=ask, args=[url])
        asking.start()
        while not generator.running:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while "stopping" not in httpx.get(f"{url}health").text:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        asking.join()

    def ask(url: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}{COMPLETIONS[1:]}", json=completion(), timeout=60)

    assert served(generator, beside) == 130
    assert time.monotonic() - began < QUICK_SECONDS
    assert not generator.running


def test_it_ends_with_its_network_so_that_somebody_starts_it_again(
    served: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def beside(url: str) -> None:
        deadline = time.monotonic() + QUICK_SECONDS
        with contextlib.suppress(httpx.TransportError):  # It has ended.
            while time.monotonic() < deadline:
                httpx.get(f"{url}metrics")
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    assert served(Repeater(), beside, lost="the network daemon ended (signal 9)") == 75
    assert "the network daemon ended (signal 9): start this command again" in capsys.readouterr().err
