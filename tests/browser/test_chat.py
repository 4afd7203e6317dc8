"""The chat page: it streams, stops, tells errors and its speed, works by keyboard, and takes text as text."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from p2ptrain.node.thread import LoopThread
from p2ptrain.serving.errors import NoHostError
from p2ptrain.serving.http.serve import serving_http
from tests.support.generators import MODEL, Repeater, tokenizer
from tests.support.web.hostile_text import PAYLOADS
from tests.support.web.visits import DESKTOP, PHONE, Visit, screenshot, visiting

pytestmark = pytest.mark.timeout(240)

SIZES = {"desktop": DESKTOP, "phone": PHONE}
ANSWER = "Grüße! The swarm computes this together:\n\n1. each peer has some layers,\n2. tokens travel. 世界 😀"
PATIENCE_SECONDS = 60.0


class Served:
    """A server on another thread's event loop, and its generator."""

    def __init__(self, generator: Repeater, url: str, thread: LoopThread) -> None:
        self.generator, self.url, self._thread = generator, url, thread

    def until(self, running: int) -> None:
        async def wait() -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self.generator.until(running)

        self._thread.call(wait())

    def allow(self, steps: int) -> None:
        """Release ``steps`` tokens."""
        semaphore = self.generator.steps
        assert semaphore is not None
        for _ in range(steps):
            self._thread.loop.call_soon_threadsafe(semaphore.release)


@contextlib.contextmanager
def served(generator: Repeater, **options: Any) -> Iterator[Served]:
    """Serve a generator on loopback, from a thread: a browser drives the main one."""
    thread = LoopThread()
    try:
        with thread.holding(serving_http(generator, tokenizer(), port=0, **options)) as (url, _):
            yield Served(generator, url, thread)
    finally:
        thread.stop()


def open_page(visit: Visit) -> None:
    visit.open("/")
    expect(visit.page.locator("#model")).to_have_text(MODEL)


def ask(visit: Visit, text: str) -> None:
    """Write and send a message with the keyboard; the prompt has the focus."""
    expect(visit.page.locator("#prompt")).to_be_focused()
    visit.page.keyboard.type(text)
    visit.page.keyboard.press("Enter")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_conversation_is_streamed_told_its_speed_and_free_of_barriers(
    browser: Browser, pictures: Path, size: str, colours: str
) -> None:
    generator = Repeater(ANSWER.encode(), steps=asyncio.Semaphore(0))
    with (
        served(generator) as server,
        visiting(browser, server.url, is_dark=colours == "dark", size=SIZES[size]) as visit,
    ):
        page = visit.page
        open_page(visit)
        screenshot(page, pictures / f"chat-empty-{size}-{colours}.png")
        ask(visit, "How does it work?")
        expect(page.locator("#state")).to_have_text("Waiting for the first token …")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("#send")).to_be_hidden()
        server.allow(20)
        expect(page.locator(".assistant .text")).to_have_text(ANSWER[:18])
        server.allow(1000)
        expect(page.locator("#send")).to_be_visible()
        assert page.locator(".assistant .text").inner_text() == ANSWER
        expect(page.locator("#state")).to_contain_text("tokens/s")
        assert f"{len(ANSWER.encode()) + 1} tokens" in page.locator("#state").inner_text()
        ask(visit, "And then?")
        expect(page.locator("#messages > li")).to_have_count(4)
        expect(page.locator("#send")).to_be_visible()
        said = bytes(generator.opened[1][0]).decode()
        assert said == f"user: How does it work?\nassistant: {ANSWER}\nuser: And then?\nassistant: "
        visit.assert_no_sideways_scrolling()
        screenshot(page, pictures / f"chat-{size}-{colours}.png")
        page.locator("summary").click()
        visit.assert_no_sideways_scrolling()
        screenshot(page, pictures / f"chat-settings-{size}-{colours}.png")
        found = Axe().run(page)
        barriers = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
        assert not barriers, found.generate_report()


@pytest.mark.parametrize("way", ["Escape", "button", "leave"])
def test_stopping_ends_the_generation_and_keeps_the_text(browser: Browser, way: str) -> None:
    generator = Repeater(b"abcdef", steps=asyncio.Semaphore(2))
    with served(generator) as server, visiting(browser, server.url) as visit:
        open_page(visit)
        ask(visit, "Hi")
        expect(visit.page.locator(".assistant .text")).to_have_text("ab")
        server.until(running=1)
        if way == "leave":
            visit.page.goto("about:blank")
        elif way == "Escape":
            visit.page.keyboard.press("Escape")
        else:
            visit.page.locator("#stop").click()
        server.until(running=0)
        if way != "leave":
            expect(visit.page.locator("#state")).to_have_text("Stopped.")
            expect(visit.page.locator(".assistant .text")).to_have_text("ab")
            expect(visit.page.locator("#prompt")).to_be_focused()
            visit.page.locator("#new").click()
            expect(visit.page.locator("#messages > li")).to_have_count(0)


def test_settings_are_sent_and_lines_can_be_written(browser: Browser) -> None:
    generator = Repeater(b"abcdef")
    with served(generator) as server, visiting(browser, server.url) as visit:
        page = visit.page
        open_page(visit)
        page.locator("summary").click()
        for label, value in (
            ("Temperature", "0"),
            ("Longest answer", "3"),
            ("Seed", "7"),
            ("Instructions", "Be brief."),
        ):
            page.get_by_label(label).fill(value)
        page.locator("#prompt").focus()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        ask(visit, "two")
        expect(page.locator("#state")).to_contain_text("cut at its longest length")
        [(ids, sampling, length, _)] = generator.opened
        assert bytes(ids).decode() == "system: Be brief.\nuser: one\ntwo\nassistant: "
        assert (sampling.temperature, sampling.seed, length) == (0.0, 7, 3)


def test_a_failure_is_told_and_the_message_can_be_sent_again(browser: Browser) -> None:
    generator = Repeater(b"abc", failure=NoHostError(1, (4, 8)), fails_after=1)
    with served(generator) as server, visiting(browser, server.url) as visit:
        page = visit.page
        open_page(visit)
        ask(visit, "Hi")
        expect(page.locator("#state")).to_contain_text("no host serves stage 1")
        expect(page.locator(".assistant .text")).to_have_text("a")
        generator.failure = None
        ask(visit, "Again")
        expect(page.locator(".assistant .text").last).to_have_text("abc")


def test_a_key_is_asked_for(browser: Browser, tmp_path: Path, pictures: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("sk-0123456789abcdef\n")
    with served(Repeater(b"abc"), keys=path) as server, visiting(browser, server.url) as visit:
        page = visit.page
        visit.open("/")
        page.get_by_label("API key").fill("sk-0123456789abcdef")
        screenshot(page, pictures / "chat-key.png")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text(MODEL)
        expect(page.locator("#key-form")).to_be_hidden()
        ask(visit, "Hi")
        expect(page.locator(".assistant .text")).to_have_text("abc")
        # The browser itself notes the refusal without a key.
        visit.complaints = [each for each in visit.complaints if "401" not in each]


def test_text_of_people_and_models_stays_text(browser: Browser) -> None:
    for payload in PAYLOADS.values():
        text = payload.replace("\x00", "").strip()
        generator = Repeater(text.encode(errors="replace"), context=1 << 16)
        with served(generator) as server, visiting(browser, server.url) as visit:
            page = visit.page
            open_page(visit)
            page.locator("#prompt").fill(text)
            page.locator("#send").click()
            expect(page.locator("#state")).to_contain_text("tokens")
            expect(page.locator("#send")).to_be_visible()
            for role in ("user", "assistant"):
                assert page.locator(f".{role} .text").evaluate("(each) => each.childElementCount") == 0
