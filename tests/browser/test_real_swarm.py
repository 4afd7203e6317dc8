"""The page beside a swarm of real processes: it shows who is there, and follows as they come and are killed."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from p2ptrain.network.link import SwarmLink
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import set_options
from tests.support.processes.swarmlet import Swarmlet, init, nothing_left_behind, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.web.monitors import NEXT_LOOK_SECONDS, RECORD_SECONDS, StatusPage, monitoring
from tests.support.web.visits import Visit, screenshot, visiting

pytestmark = pytest.mark.timeout(400)

TRAINERS = ("first", "second", "third")
SEED = "bootstrap"
SERVER, SERVES = "third", 4.0
"""Who publishes that it serves, too, and how many requests a second."""
STEP_SECONDS = 0.5
CUSTOM = set_options(
    model={"family": "custom"}, data={"source": "custom"}, training={"every": 4, "local_batch": 4},
    averaging={"grace_seconds": 2, "round_seconds": 15},
)  # fmt: skip
COLOURED = """(canvas, name) => {
    const wanted = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
    // Of a copy: Chromium warns of who reads from a canvas that is drawn on again and again.
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4) {
        found += data[i + 3] > 100
            && Math.abs(data[i] - red) + Math.abs(data[i + 1] - green) + Math.abs(data[i + 2] - blue) < 60;
    }
    return found;
}"""
"""Pixels of a canvas in one of the page's colours, or close to it."""
LINES = {
    "Loss": "--accent", "Tokens per second": "--accent", "Peers": "--accent", "Time per round": "--compute",
    "Traffic": "--accent",
}  # fmt: skip
"""Charts that cannot be empty, and the colour of a line in each."""
SERVED = ("Served tokens per second", "Time to the first token", "Time per further token")


@dataclass(frozen=True)
class Watched:
    swarm: Swarmlet
    link: str
    page: StatusPage


@pytest.fixture(scope="module")
def watched(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("swarm")
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left_behind())
        link = stack.enter_context(seeding(init(folder / "organizer", *CUSTOM))).link
        swarm = stack.enter_context(Swarmlet(folder))
        workers = [
            swarm.start(name, link, step_seconds=STEP_SECONDS, serves=SERVES if name == SERVER else 0.0)
            for name in TRAINERS
        ]
        for worker in workers:
            worker.wait_for_commit(len(workers), timeout_seconds=2 * PATIENCE_SECONDS)
        page = stack.enter_context(monitoring(link, folder / "history.sqlite", folder / "monitor.log"))
        yield Watched(swarm, link, page)


def live(visit: Visit) -> Visit:
    visit.open("/")
    visit.wait_until_live()
    return visit


def test_everybody_is_there(browser: Browser, watched: Watched) -> None:
    with visiting(browser, watched.page.url) as visit:
        page = live(visit).page
        wait_until(lambda: visit.names() == {SEED, *TRAINERS}, NEXT_LOOK_SECONDS)
        assert page.locator("#n-peers").inner_text() == "4"
        wait_until(lambda: page.locator("#n-training").inner_text() == "3", PATIENCE_SECONDS)
        assert set(page.locator("#blocks tbody th").all_inner_texts()) == set(TRAINERS)
        assert page.locator("#round-table tbody tr").filter(has_text="3 of 3").count() > 0
        page.locator("#peer-table").get_by_role("link", name="second", exact=True).click()
        page.locator("#connection.live").wait_for()
        assert page.locator("h1").inner_text() == "second"
        api = {peer["name"]: peer["record"]["peer"] for peer in watched.page.api("peers")["peers"]}
        assert page.get_by_text(api["second"]).count() == 1


def test_one_click_copies_what_a_volunteer_types(browser: Browser, watched: Watched) -> None:
    rights = ("clipboard-read", "clipboard-write")
    with visiting(browser, watched.page.url, permissions=rights) as visit:
        page = live(visit).page
        plain = str(SwarmLink.parse(watched.link).plain)  # A page that anybody may see lets in nobody.
        for what, copied in (("command", watched.page.api("join")["command"]), ("link", plain)):
            page.get_by_role("button", name=f"Copy the {what}").click()
            page.get_by_text("Copied.").wait_for()
            assert page.evaluate("navigator.clipboard.readText()") == copied
    assert SwarmLink.parse(copied) == SwarmLink.parse(plain)


def wait_for_lines(page: Page, colours: dict[str, str]) -> None:
    """Wait until each of these charts, by title, has a line of its colour."""
    charts = {title: page.locator(".chart", has_text=title).locator("canvas").first for title in colours}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while empty := [title for title, canvas in charts.items() if canvas.evaluate(COLOURED, colours[title]) < 20]:
        assert time.monotonic() < deadline, f"no line is in {empty}"
        page.wait_for_timeout(500)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_charts_have_data(browser: Browser, watched: Watched, pictures: Path, is_dark: bool) -> None:
    with visiting(browser, watched.page.url, is_dark=is_dark) as visit:
        page = live(visit).page
        page.locator("#chart-grid:not([hidden])").wait_for(timeout=1000 * PATIENCE_SECONDS)
        wait_for_lines(page, LINES)
        page.get_by_role("button", name="Day").click()
        assert page.get_by_role("button", name="Day").get_attribute("aria-pressed") == "true"
        screenshot(page, pictures / f"real-swarm-{'dark' if is_dark else 'light'}.png")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_charts_of_what_is_served_have_data(browser: Browser, watched: Watched, is_dark: bool) -> None:
    with visiting(browser, watched.page.url, is_dark=is_dark) as visit:
        page = live(visit).page
        page.locator("#serving-now:not([hidden])").wait_for()
        assert page.locator("#s-peers").inner_text() == "1"
        page.locator("#serving-grid:not([hidden])").wait_for(timeout=1000 * PATIENCE_SECONDS)
        wait_for_lines(page, dict.fromkeys(SERVED, "--accent"))
        records = [peer["record"] for peer in watched.page.api("peers")["peers"]]
        (server,) = [record for record in records if record["serving"] is not None]
        assert server["name"] == SERVER
        visit.open(f"/peers/{server['peer']}")
        assert "95 % within" in page.locator('[data-fact="first_token"]').inner_text()


def test_who_joins_and_who_is_killed_is_seen_without_loading_the_page_again(browser: Browser, watched: Watched) -> None:
    with visiting(browser, watched.page.url) as visit:
        page = live(visit).page
        wait_until(lambda: visit.names() == {SEED, *TRAINERS}, NEXT_LOOK_SECONDS)
        page.evaluate("window.stayed = true")
        fourth = watched.swarm.start("fourth", watched.link, step_seconds=STEP_SECONDS)
        fourth.wait_for("training", timeout_seconds=2 * PATIENCE_SECONDS)
        wait_until(lambda: visit.names() == {SEED, *TRAINERS, "fourth"}, NEXT_LOOK_SECONDS + 5)
        peers = watched.page.api("peers")["peers"]
        fourth_id = next(peer["record"]["peer"] for peer in peers if peer["name"] == "fourth")
        fourth.wait_for_commit(len(TRAINERS) + 1)
        fourth.signal_all(signal.SIGKILL)
        wait_until(lambda: visit.names() == {SEED, *TRAINERS}, 2 * RECORD_SECONDS)
        assert page.locator("#n-peers").inner_text() == "4"
        assert page.evaluate("window.stayed") is True
        page = visit.open(f"/peers/{fourth_id}")
        assert page.get_by_text("It is not in the swarm now").count() == 1
        assert page.get_by_text("fourth left").count() == 1
