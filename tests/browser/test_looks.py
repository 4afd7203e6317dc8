"""Pages as people see them: no serious barrier, nothing cut off on a phone, all of it within the keyboard's reach."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from p2ptrain.monitor.store import Store
from p2ptrain.status.views import Event
from tests.support.web.made_up_swarm import MadeUpSwarm, fill
from tests.support.web.visits import DESKTOP, PHONE, Visit, screenshot, visiting
from tests.support.web.watched import trainer, views_of
from tests.support.web.web_thread import ServedPage, served_page

pytestmark = pytest.mark.timeout(240)

SIZES = {"desktop": DESKTOP, "phone": PHONE}
SERIOUS = ("serious", "critical")
ROUND_SECONDS = 20.0
GONE = "12D3KooWGone"


class Clock:
    """Time that passes round by round, and has come to the present with the fifth look."""

    def __init__(self) -> None:
        self.time = time.time() - 5 * ROUND_SECONDS

    def __call__(self) -> float:
        return self.time

    def pass_a_round(self) -> None:
        self.time += ROUND_SECONDS


@dataclass(frozen=True)
class Sites:
    """A swarm with trouble of every kind, one without anybody, one in which some serve, and a private one."""

    busy: ServedPage
    empty: ServedPage
    serving: ServedPage
    private: ServedPage

    def paths(self) -> dict[str, tuple[ServedPage, str]]:
        astray = next(peer for peer in self.busy.snapshot().peers if peer.agrees is False)
        server = next(peer for peer in self.serving.snapshot().peers if peer.record.serving is not None)
        return {
            "home": (self.busy, "/"),
            "search-nothing": (self.busy, "/?search=nobody-of-this-name"),
            "empty": (self.empty, "/"),
            "peer": (self.busy, f"/peers/{quote(astray.record.peer, safe='')}"),
            "departed": (self.busy, f"/peers/{GONE}"),
            "serving": (self.serving, "/"),
            "private": (self.private, "/"),
            "server": (self.serving, f"/peers/{quote(server.record.peer, safe='')}"),
        }


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    clock = Clock()
    swarm = MadeUpSwarm(24, clock=clock, num_astray=1)
    nobody = MadeUpSwarm(0)
    later = Clock()
    serves = MadeUpSwarm(9, clock=later, serves=True)
    last = Clock()
    measures = MadeUpSwarm(7, clock=last, measures=True)

    async def prepare(store: Store) -> None:
        await fill(store, swarm)
        await store.contribute(views_of(trainer(GONE, name="gone-1")), swarm.now() - 3600, 600.0)
        await store.add_events([Event(swarm.now() - 3500, "left", GONE, "gone-1 left")])

    async def remember(store: Store) -> None:
        await fill(store, serves)

    with (
        served_page(
            swarm, swarm.swarm, bootstraps=["nobody"], prepare=prepare, first_looks=5, between_looks=clock.pass_a_round
        ) as busy,
        served_page(nobody, nobody.swarm) as empty,
        served_page(serves, serves.swarm, prepare=remember, first_looks=5, between_looks=later.pass_a_round) as serving,
        served_page(measures, measures.swarm, first_looks=5, between_looks=last.pass_a_round) as private,
    ):
        yield Sites(busy, empty, serving, private)


def settle(visit: Visit, path: str) -> None:
    """Open a page, and wait until its scripts are done with the first drawing."""
    visit.open(path)
    if path.startswith("/peers/"):
        return
    visit.wait_until_live()
    visit.page.locator("#peer-table thead button").first.wait_for(state="attached")
    visit.page.locator("#chart-grid:not([hidden]) canvas, #charts-state:not([hidden])").first.wait_for()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nobody_meets_a_serious_barrier_and_nothing_sticks_out(
    browser: Browser, sites: Sites, pictures: Path, size: str, colours: str
) -> None:
    for name, (site, path) in sites.paths().items():
        with visiting(browser, site.url, is_dark=colours == "dark", size=SIZES[size]) as visit:
            settle(visit, path)
            visit.assert_no_sideways_scrolling()
            screenshot(visit.page, pictures / f"{name}-{size}-{colours}.png")
            for details in visit.page.locator("summary").all()[:3]:
                details.click()
            found = Axe().run(visit.page)
            barriers = [each for each in found.response["violations"] if each["impact"] in SERIOUS]
            assert not barriers, f"{name}: {found.generate_report()}"
            visit.assert_no_sideways_scrolling()


def test_a_private_swarm_shows_a_curve_of_each_site_and_the_pooled_one_with_its_band(
    browser: Browser, sites: Sites
) -> None:
    curves = sites.private.snapshot().sites
    assert len(curves) > 5
    with visiting(browser, sites.private.url) as visit:
        settle(visit, "/")
        visit.page.locator("#site-grid svg").first.wait_for()
        assert visit.page.locator("#site-grid h3").all_inner_texts() == [curve.name for curve in curves]
        for each, curve in zip(visit.page.locator("#site-grid .site").all(), curves, strict=True):
            line, band = (each.locator(shape).get_attribute("points") or "" for shape in ("polyline", "polygon"))
            assert (len(line.split()), len(band.split())) == (len(curve.points), 2 * len(curve.points))
            assert f"{curve.metric} {curve.points[-1].mean:.3f}" in each.inner_text()
            ends = [sign * 1.96 * (point.error or 0.0) + point.mean for point in curve.points for sign in (-1, 1)]
            assert f"scale {min(ends):.3f} to {max(ends):.3f}" in each.inner_text()
        pooled = sites.private.snapshot().headline.evaluation
        assert pooled is not None
        assert visit.page.locator("#n-evaluation").inner_text() == f"{pooled.mean:.3f}"
        assert visit.page.locator("#to-sites").is_visible()
    with visiting(browser, sites.private.url, with_scripts=False) as visit:
        visit.open("/")
        assert visit.page.locator("#site-grid h3").all_inner_texts() == [curve.name for curve in curves]
    with visiting(browser, sites.busy.url) as visit:
        settle(visit, "/")
        assert not visit.page.locator("#sites").is_visible()
        assert not visit.page.locator("#to-sites").is_visible()


@pytest.mark.parametrize("size", SIZES)
def test_without_scripts_the_page_is_whole_and_as_free_of_barriers(
    browser: Browser, sites: Sites, pictures: Path, size: str
) -> None:
    for name, (site, path) in sites.paths().items():
        with visiting(browser, site.url, size=SIZES[size], with_scripts=False) as visit:
            visit.open(path)
            visit.assert_no_sideways_scrolling()
            screenshot(visit.page, pictures / f"{name}-{size}-without-scripts.png")
    with visiting(browser, sites.busy.url, size=SIZES[size], with_scripts=False) as visit:
        visit.open("/")
        snapshot = sites.busy.snapshot()
        assert visit.names() == {peer.name for peer in snapshot.peers}
        rounds = visit.page.locator("#round-table tbody th").all_inner_texts()
        assert rounds == [str(view.round) for view in snapshot.rounds[: len(rounds)]]
        assert len(rounds) >= 5
        assert visit.page.locator("#command").inner_text() == snapshot.swarm.command
        assert visit.page.locator("#leader-table tbody tr").count() > 5
        assert visit.page.locator("#event-list li").count() > 3
        assert not visit.page.locator("button[data-copy]").first.is_visible(), "it would do nothing"
        visit.page.locator("#search-text").fill(snapshot.peers[3].name)
        visit.page.locator("#search button").click()
        visit.page.wait_for_url("**search=**")
        assert snapshot.peers[3].name in visit.names()
        assert len(visit.names()) < len(snapshot.peers)


CONTROLS = """() => [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
    .filter((each) => each.checkVisibility({ visibilityProperty: true }))"""
NOTE_FOCUS = """() => {
    const here = document.activeElement, style = getComputedStyle(here), box = here.getBoundingClientRect();
    window.reached ??= new Set();
    const seen = window.reached.has(here);
    window.reached.add(here);
    const isMarked = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
    const isInView = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    return { tag: here.tagName, text: here.outerHTML.slice(0, 200), seen, isMarked, isInView };
}"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["home", "peer", "departed", "search-nothing", "serving"])
def test_everything_is_within_the_keyboards_reach_and_shows_where_one_is(
    browser: Browser, sites: Sites, size: str, kind: str
) -> None:
    site, path = sites.paths()[kind]
    with visiting(browser, site.url, size=SIZES[size]) as visit:
        settle(visit, path)
        number = len(visit.page.evaluate(f"({CONTROLS})().map(String)"))
        for _ in range(number + 20):
            visit.page.keyboard.press("Tab")
            here = visit.page.evaluate(NOTE_FOCUS)
            if here["tag"] == "BODY" or here["seen"]:
                break
            assert here["isMarked"], f"nothing shows that the focus is at {here['text']}"
            assert here["isInView"], f"the focus is out of sight at {here['text']}"
        missed = visit.page.evaluate(
            f"({CONTROLS})().filter((each) => !window.reached.has(each)).map((each) => each.outerHTML.slice(0, 200))"
        )
        assert missed == []


@pytest.mark.parametrize("with_scripts", [True, False])
def test_the_stages_of_a_pipeline_are_seen_with_what_is_wrong(
    browser: Browser, pictures: Path, with_scripts: bool
) -> None:
    swarm = MadeUpSwarm(10, num_stages=4, bare_stages=[2])

    async def prepare(store: Store) -> None:
        await fill(store, swarm)
        await store.add_events([Event(swarm.now() - 900, "failover", "", "a host of a stage failed: others went on")])

    with (
        served_page(swarm, swarm.swarm, prepare=prepare) as site,
        visiting(browser, site.url, size=PHONE, with_scripts=with_scripts) as visit,
    ):
        settle(visit, "/") if with_scripts else visit.open("/")
        page, snapshot = visit.page, site.snapshot()
        assert "stage 2 has no host" in page.locator("#summary").inner_text()
        boxes = page.locator("#stages > li").all_inner_texts()
        assert [box.split("\n")[0].strip() for box in boxes] == [
            f"Stage {stage.number} blocks {stage.blocks[0]}\N{EN DASH}{stage.blocks[1] - 1}"
            for stage in snapshot.stages
        ]
        assert [stage.risk in box for stage, box in zip(snapshot.stages, boxes, strict=True)] == [True] * 4
        assert page.locator("#stages > .uncovered").count() == 1
        assert page.locator("#blocks tbody tr").count() == sum(len(stage.hosts) for stage in snapshot.stages)
        held = page.locator("#blocks tbody tr").first.locator("rect.held").count()
        assert held == snapshot.stages[0].blocks[1]
        assert "stage 0" in page.locator("#peer-table").inner_text()
        assert page.locator("#event-list .failover").count() == 1
        assert page.locator("#chart-key .failover").count() == 1
        visit.assert_no_sideways_scrolling()
        screenshot(page, pictures / f"pipeline-{'live' if with_scripts else 'without-scripts'}.png")
        found = Axe().run(page) if with_scripts else None
        barriers = [each for each in found.response["violations"] if each["impact"] in SERIOUS] if found else []
        assert not barriers


@pytest.mark.parametrize("with_scripts", [True, False])
def test_whether_anybody_serves_is_said_and_who(browser: Browser, sites: Sites, with_scripts: bool) -> None:
    with visiting(browser, sites.busy.url, with_scripts=with_scripts) as visit:
        settle(visit, "/") if with_scripts else visit.open("/")
        assert visit.page.locator("#serving-state").inner_text() == "No peer serves this model now."
        assert not visit.page.locator("#serving-now").is_visible()
        assert not visit.page.locator("#serving-grid").is_visible()
        assert visit.page.locator("#peer-table thead th", has_text="Serves").count() == 0
    with visiting(browser, sites.serving.url, with_scripts=with_scripts) as visit:
        settle(visit, "/") if with_scripts else visit.open("/")
        serving = sites.serving.snapshot().serving
        assert not visit.page.locator("#serving-state").is_visible()
        assert visit.page.locator("#s-peers").inner_text() == str(serving.peers)
        assert " s" in visit.page.locator("#s-first-p50").inner_text()
        assert "ms" in visit.page.locator("#s-token-p50").inner_text()
        if with_scripts:
            visit.page.locator("#serving-grid canvas").nth(2).wait_for()
            label = visit.page.get_by_role("img", name="Time to the first token").get_attribute("aria-label")
            said = re.search(r"half within: now ([\d.]+) s", label or "")
            assert said is not None, label
            assert 0.3 < float(said[1]) < 0.7, "made up as 0.38 to 0.58 s, in waves"
            visit.page.locator("#peer-table thead button", has_text="Serves").click()
            visit.page.locator("#peer-table thead button", has_text="Serves").click()
        names = [peer.name for peer in sites.serving.snapshot().peers if peer.record.serving is not None]
        if with_scripts:
            assert visit.page.locator("#peer-table tbody th").first.inner_text() in names
