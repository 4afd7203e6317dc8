"""Peers say what they like, in every field that there is: it stays text, with scripts and without."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser

from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.views import (
    Alert,
    CurvePoint,
    Event,
    GroupView,
    HostedView,
    RoundView,
    SiteCurve,
    Snapshot,
    SwarmView,
)
from tests.support.processes.daemons import wait_until
from tests.support.web.hostile_text import PAYLOADS, filled_text_fields, poisoned, text_fields
from tests.support.web.visits import PHONE, Visit, visiting
from tests.support.web.watched import (
    LINEAGE,
    START,
    SWARM,
    FakeSource,
    aborted,
    host,
    report,
    result,
    rounds_of,
    snapshot_of,
    trainer,
)
from tests.support.web.web_thread import ServedPage, served_page

pytestmark = pytest.mark.timeout(240)

TOLD = (report(6, contributed=False, reason="late"), aborted(7, "no quorum"), report(7), aborted(8, "too few"))
RECORD = trainer(
    "a", note="a note", diverged=True, last_rounds=TOLD, addresses=("/ip4/198.51.100.1/tcp/1",),
    clock_skew_seconds=60.0, stages=host("a", 0).stages, credential=b"a pass", revocations=b"a list",
    doubts=("b",), banned=("b",), evaluation=Evaluation("loss", 6, 2.5, 0.1, 64),
    privacy=PrivacyLoss(1.5, 8.0, 1e-5),
)  # fmt: skip
HOSTED = HostedView(RECORD.stages[0], (0, 4), False)
PLAIN = frozenset({"peer", "role", "state"})
UNEXPECTED = """() => [...document.querySelectorAll('*')].filter((each) =>
    ['IMG', 'IFRAME', 'OBJECT', 'EMBED', 'BASE', 'FRAME', 'APPLET', 'STYLE'].includes(each.tagName)
    || (each.tagName === 'SCRIPT' && !each.getAttribute('src')?.startsWith('/static/'))
    || (each.tagName === 'LINK' && !each.getAttribute('href').startsWith('/static/'))
    || (each.tagName === 'META' && each.hasAttribute('http-equiv'))
    || (each.hasAttribute('href') && !/^[/#]/.test(each.getAttribute('href')))
    || [...each.attributes].some(({ name, value }) => name.startsWith('on') || name === 'srcdoc'
        || (name === 'style' && /color|url/.test(value) && !value.includes('var(--')))
).map((each) => each.outerHTML.slice(0, 300))"""
UNFENCED = """() => [...document.querySelectorAll('.name, q, code, h1')].filter((each) =>
    getComputedStyle(each).unicodeBidi !== 'isolate').map((each) => each.outerHTML.slice(0, 200))"""


def lines(text: str) -> str:
    """As the text of a page is compared: what HTML cannot hold or shows as one space is left out."""
    return "".join(text.replace("\x00", "").replace("\ufffd", "").split())


def records(payload: str, number: int) -> list[PeerRecord]:
    """One peer all of whose text is hostile, its id included, and one that passes for a trainer."""
    return [poisoned(RECORD, payload), poisoned(replace(RECORD, peer=f"plain-{number}"), payload, PLAIN)]


def hostile_swarm(payload: str) -> SwarmView:
    return poisoned(replace(SWARM, manifest={"model": {"family": "x"}, "data": {"source": "y"}}), payload)


def hostile_snapshot(payload: str) -> Snapshot:
    """All that a snapshot can hold, hostile at every depth."""
    rounds = rounds_told()
    usual = snapshot_of([RECORD, replace(RECORD, peer="b", digest=b"x" * 32)], rounds)
    filled = replace(
        usual,
        swarm=hostile_swarm("x"),
        headline=replace(usual.headline, reasons=("a reason",)),
        alerts=(Alert("rule", "critical", "a", "text"), Alert("other", "warning", "b", "text")),
        groups=(GroupView(0, (("a", "counted"), ("b", "late"), ("c", "delegate"), ("d", "absent"))),),
        stages=tuple(replace(each, risk="a risk", syncing=("c",)) for each in usual.stages),
        peers=tuple(replace(each, hosting=(HOSTED,)) for each in usual.peers),
        sites=(SiteCurve("a", "Ada", "loss", (CurvePoint(5, 2.5, 0.1), CurvePoint(6, 2.4, None))),),
    )
    assert text_fields(Snapshot) - filled_text_fields(filled) == set(), "these fields are not tried: fill them"
    return poisoned(filled, payload)


def rounds_told() -> list[RoundView]:
    """Of every outcome: certified after a broken try, aborted, and missed by somebody."""
    records = [trainer(peer, round=9, last_rounds=TOLD) for peer in "abc"]
    return rounds_of(*records, usual=9, certified=result(7, LINEAGE))


@dataclass
class Stage:
    """A page whose peers the test replaces."""

    source: FakeSource
    served: ServedPage

    def put(self, payload: str, number: int) -> None:
        """Show hostile peers alone: some present, some that left."""

        async def look(watch: Watch, store: Store) -> None:
            for told in ([trainer("honest")], records(payload, number), records(payload, number)):
                self.source.records = told
                self.source.time += 10.0
                await watch.look()
            await store.contribute(poisoned(watch.snapshot, payload, PLAIN).peers if watch.snapshot else (), START, 1.0)
            await store.add_events([Event(START, payload, f"gone-{number}", payload)])

        self.served.do(look)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    source = FakeSource()
    with served_page(source, hostile_swarm(PAYLOADS["script"]), bootstraps=[PAYLOADS["handler"]]) as served:
        yield Stage(source, served)


def assert_only_text(visit: Visit) -> None:
    """No element is there that the page did not mean to have, and what is peers' is fenced off from text around it."""
    visit.check()
    assert visit.page.evaluate(UNEXPECTED) == []
    assert visit.page.evaluate(UNFENCED) == []
    visit.assert_no_sideways_scrolling()


def shown(visit: Visit, selector: str) -> list[str]:
    return [lines(text) for text in visit.page.locator(selector).all_text_contents()]


def peer_path(peer: str) -> str:
    return f"/peers/{quote(peer, safe='')}"


def test_no_field_that_holds_text_is_left_out() -> None:
    """A field that is added later is filled with hostile text by its type alone; one that is empty here fails."""
    assert text_fields(PeerRecord) - filled_text_fields(RECORD) == set()
    assert {"PeerRecord.note", "RoundReport.reason", "PeerRecord.addresses"} <= text_fields(PeerRecord)
    hostile_snapshot("x")


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("scripts", ["with scripts", "without scripts"])
def test_what_peers_say_stays_text(browser: Browser, stage: Stage, kind: str, scripts: str) -> None:
    payload, number = PAYLOADS[kind], list(PAYLOADS).index(kind)
    with_scripts = scripts == "with scripts"
    stage.put(payload, number)
    with visiting(browser, stage.served.url, size=PHONE, with_scripts=with_scripts) as visit:
        visit.open("/")
        if with_scripts:
            visit.wait_until_live()
            visit.page.locator("#peer-table thead button").first.wait_for(state="attached")
        assert lines(payload) in shown(visit, "#peer-table tbody th")
        assert lines(payload) in shown(visit, "#leader-table tbody th")
        assert lines(payload)[:250] in "".join(shown(visit, "#event-list"))
        assert_only_text(visit)
        for path in (peer_path(f"plain-{number}"), peer_path(f"gone-{number}")):
            visit.open(path)
            assert lines(payload)[:250] in "".join(shown(visit, "main"))
            assert_only_text(visit)
        visit.open(f"/?search={quote(payload[:90])}")
        assert_only_text(visit)
        if "/" not in payload:
            visit.open(peer_path(payload))
            assert_only_text(visit)


@pytest.mark.parametrize("scripts", ["with scripts", "without scripts"])
def test_nothing_in_a_snapshot_is_trusted_whoever_put_it_there(browser: Browser, stage: Stage, scripts: str) -> None:
    with_scripts = scripts == "with scripts"
    with visiting(browser, stage.served.url, with_scripts=with_scripts) as visit:
        visit.open("/")
        for payload in PAYLOADS.values():
            stage.served.show(hostile_snapshot(payload))
            if not with_scripts:
                visit.open("/")
            wait_until(lambda text=payload: shown(visit, "#summary") == [lines(text)], 30)  # type: ignore[misc]
            assert lines(f"critical {payload}") in shown(visit, "#alerts li")
            assert any(lines(payload) in row for row in shown(visit, "#round-table tbody tr"))
            assert_only_text(visit)
            if not with_scripts:
                assert lines(payload) in shown(visit, "#command")
                assert lines(payload) in shown(visit, ".manifest dd")
