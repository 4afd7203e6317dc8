"""A watch turns looks into events, rates, trends and certificates, and survives failures."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import PeerUnreachableError, ResourceError
from p2ptrain.monitor import watch as watch_module
from p2ptrain.monitor.watch import HOLD_SECONDS, POINT_SECONDS, watching
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.health import FORK_SECONDS
from p2ptrain.status.tracker import GATHER_SECONDS, MIN_TREND_POINTS, TREND_SECONDS
from p2ptrain.status.views import Event
from tests.support.coroutines import on_loop, on_loop_within
from tests.support.web.stores import Watched, watched
from tests.support.web.watched import LINEAGE, START, FakeSource, chain, feeder, host, report, trainer

ADA, BOB, CAT = (trainer(peer) for peer in "abc")


@on_loop_within(watched, ADA, BOB)
async def test_who_joins_and_who_leaves_is_told_but_not_who_was_there_from_the_start(swarm: Watched) -> None:
    await swarm.look()
    assert await swarm.kinds() == []
    await swarm.look(ADA, replace(CAT, name=""))
    assert await swarm.kinds() == [("joined", "c"), ("left", "b")]
    assert [event.text for event in await swarm.store.events(0.0, 9)] == ["b's laptop left", "c joined"]


@on_loop_within(watched)
async def test_the_first_peer_of_an_empty_swarm_joins(swarm: Watched) -> None:
    await swarm.look()
    await swarm.look(ADA)
    assert await swarm.kinds() == [("joined", "a")]


@on_loop_within(watched, feeder("a", failovers=7), feeder("b"), host("c", 0))
async def test_a_host_that_failed_is_one_event_for_all_who_tell_of_it(swarm: Watched) -> None:
    async def failovers() -> list[Event]:
        return [event for event in await swarm.store.events(0.0, 99) if event.kind == "failover"]

    await swarm.look()
    await swarm.look(feeder("a", failovers=8), feeder("b"), host("c", 0), feeder("late", failovers=5))
    began = swarm.source.time
    later = [feeder("a", failovers=8), feeder("b", failovers=1), host("c", 0, failovers=2)]
    await swarm.look(*later, seconds=4.0)
    assert await failovers() == []
    await swarm.look(seconds=GATHER_SECONDS)
    [event] = await failovers()
    assert (event.at, event.text) == (began, "a host of a stage failed: a's laptop and 2 more went on with others")
    await swarm.look(feeder("a", failovers=1, started_at=START), feeder("b", failovers=1))
    for _ in range(2):
        await swarm.look(seconds=GATHER_SECONDS)
    texts = [event.text for event in await failovers()]
    assert texts == ["a host of a stage failed: a's laptop went on with others", event.text]


@on_loop_within(watched, ADA, BOB)
async def test_a_directory_that_does_not_answer_keeps_what_was_known_and_raises_an_alert(swarm: Watched) -> None:
    before = await swarm.look()
    swarm.source.records = None
    during = await swarm.look()
    assert [peer.record for peer in during.peers] == [peer.record for peer in before.peers]
    assert (during.directory_answers, [alert.rule for alert in during.alerts]) == (False, ["directory"])
    assert (await swarm.look(ADA, BOB)).alerts == ()
    assert await swarm.kinds() == [], "nobody left, and it was too short to tell of"


@on_loop_within(watched)
async def test_a_directory_that_does_not_answer_at_first_makes_nobody_join(swarm: Watched) -> None:
    swarm.source.records = None
    assert (await swarm.look()).headline.health == "empty"
    await swarm.look(ADA, BOB)
    assert await swarm.kinds() == []


def after(round_: int, lineage: bytes, peers: str = "abc") -> list[PeerRecord]:
    return [
        trainer(peer, round=round_, lineage=lineage, last_rounds=(report(round_ - 1),), lineage_tokens=1000 * round_)
        for peer in peers
    ]


@on_loop_within(watched, ADA, BOB, CAT)
async def test_certificates_are_fetched_once_for_what_is_new_and_from_who_has_it(swarm: Watched) -> None:
    results = chain(8, 2)
    goal = results[-1].body.next_lineage
    await swarm.look()
    assert swarm.source.asked == [], "what was before is not asked for"
    swarm.source.history = dict.fromkeys("ab", results)
    for _ in range(3):
        snapshot = await swarm.look(*after(10, goal, "ab"), CAT)
    [(peer, lineage)] = swarm.source.asked
    assert peer in "ab"
    assert lineage == LINEAGE
    assert (snapshot.rounds[0].round, snapshot.rounds[0].verified) == (9, True)
    assert [group.members[0] for group in snapshot.groups] == [("a", "counted")]


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), PeerUnreachableError("a", "it is gone")], ids=repr)
@on_loop_within(watched, ADA, BOB, CAT)
async def test_certificates_are_asked_for_again_after_a_failure_and_a_defect_is_logged(
    swarm: Watched, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(peer: str, lineage: bytes) -> Sequence[Certificate]:
        raise error

    results, ask = chain(8, 2), swarm.source.certificates_after
    later = [*after(10, results[-1].body.next_lineage, "ab"), CAT]
    await swarm.look()
    swarm.source.history = dict.fromkeys("ab", results)
    swarm.source.certificates_after = fail  # type: ignore[method-assign]
    await swarm.look(*later)
    assert not (await swarm.look()).rounds[0].verified
    swarm.source.certificates_after = ask  # type: ignore[method-assign]
    for _ in range(3):
        snapshot = await swarm.look()
    assert snapshot.rounds[0].verified
    is_defect = isinstance(error, ZeroDivisionError)
    assert ("certificates failed" in caplog.text and "ZeroDivisionError: a defect" in caplog.text) == is_defect


@on_loop_within(watched, ADA, BOB, CAT)
async def test_a_result_of_a_group_of_its_own_proves_nothing(swarm: Watched) -> None:
    real = chain(8, 1)
    forged = chain(2**50, 1, members=("a",))
    beyond = chain(2**50, 1, real[0].body.next_lineage, members=("a",))
    await swarm.look()
    for history in (forged, [*real, *beyond]):
        swarm.source.history = dict.fromkeys("abc", history)
        await swarm.look(*after(9, real[0].body.next_lineage))
        snapshot = await swarm.look()
        assert [view.round for view in snapshot.rounds] == [8]
    assert snapshot.rounds[0].verified, "what leads to where most are is real"


@on_loop_within(watched, ADA, BOB, CAT)
async def test_a_history_that_nobody_tells_is_given_up_and_the_next_one_is_asked_for(swarm: Watched) -> None:
    await swarm.look()
    lost = b"n" * 32
    for _ in range(watch_module.MAX_UNKNOWN + 3):
        await swarm.look(*after(50, lost))
    assert len(swarm.source.asked) == watch_module.MAX_UNKNOWN + 1
    results = chain(50, 1, lost)
    swarm.source.history = dict.fromkeys("abc", results)
    await swarm.look(*after(51, results[0].body.next_lineage))
    assert swarm.source.asked[-1][1] == lost
    assert (await swarm.look()).rounds[0].verified


@on_loop_within(watched)
async def test_traffic_is_what_counters_grew_by_and_nothing_after_a_restart(swarm: Watched) -> None:
    rates = []
    for sent, received, started_at in [(0, 0, 1.0), (500, 100, 1.0), (900, 100, 2.0), (100, 50, 2.0), (300, 50, 2.0)]:
        now = replace(ADA, bytes_sent=sent, bytes_received=received, started_at=started_at)
        [peer] = (await swarm.look(now)).peers
        rates.append((peer.rates.sent_per_second, peer.rates.received_per_second))
    assert rates == [(0, 0), (250, 50), (0, 0), (0, 0), (100, 0)]


@on_loop_within(watched, ADA)
async def test_no_traffic_is_kept_before_it_can_be_measured(swarm: Watched) -> None:
    """The chart of a monitor that starts again does not fall to 0."""
    for sent in (0, 800):
        await swarm.look(replace(ADA, bytes_sent=sent), seconds=POINT_SECONDS)
    series = await swarm.store.series("hour", ["peers", "sent_per_second"], swarm.source.time)
    assert series["series"]["peers"] == [1.0] * 2
    assert series["series"]["sent_per_second"] == [None, 800 / POINT_SECONDS]


@on_loop_within(watched, ADA)
async def test_a_record_that_is_read_twice_keeps_its_rates(swarm: Watched) -> None:
    await swarm.look()
    await swarm.look(replace(ADA, bytes_sent=ADA.bytes_sent + 400))
    swarm.source.published_at["a"] = swarm.source.time
    assert (await swarm.look()).peers[0].rates.sent_per_second == 200.0


@on_loop_within(watched, stall_seconds=1e9)
async def test_a_loss_that_rises_for_long_is_told(swarm: Watched) -> None:
    for phase, losses in enumerate([(2.0, 2.1), (2.4, 2.5)]):
        peers = [replace(peer, loss=loss) for peer, loss in zip((ADA, BOB), losses, strict=True)]
        for _ in range(2 * MIN_TREND_POINTS):
            snapshot = await swarm.look(*peers, seconds=TREND_SECONDS / MIN_TREND_POINTS / 2)
            rules = [alert.rule for alert in snapshot.alerts if alert.rule == "rising"]
            assert phase or not rules, "one window alone is no trend"
    assert rules == ["rising"]


@on_loop_within(watched)
async def test_a_swarm_has_forked_only_when_it_stays_so_for_a_minute(swarm: Watched) -> None:
    async def is_forked(cat: PeerRecord, seconds: float) -> bool:
        return "fork" in [alert.rule for alert in (await swarm.look(ADA, BOB, cat, seconds=seconds)).alerts]

    astray = replace(CAT, lineage=b"f" * 32)
    assert not await is_forked(astray, 2.0)
    assert not await is_forked(astray, FORK_SECONDS - 1.0)
    assert not await is_forked(CAT, 2.0)
    assert not await is_forked(astray, 2.0), "it counts from anew"
    assert await is_forked(astray, FORK_SECONDS)


@on_loop_within(watched, stall_seconds=60.0)
async def test_a_swarm_that_commits_nothing_is_told_of_and_a_liar_cannot_hide_it(swarm: Watched) -> None:
    for number in range(40):
        liar = trainer("liar", round=9 + number, last_rounds=(report(8 + number),), lineage_tokens=10**9 * number)
        snapshot = await swarm.look(ADA, BOB, CAT, liar)
    assert "no-round" in [alert.rule for alert in snapshot.alerts]
    assert snapshot.headline.committed == 0
    snapshot = await swarm.look(*after(9, b"n" * 32))
    assert (snapshot.alerts, snapshot.headline.committed) == ((), 1)


@on_loop_within(watched)
async def test_many_newcomers_do_not_hide_how_training_goes(swarm: Watched) -> None:
    newcomers = [trainer(f"new{i}", state="syncing", round=0, lineage_tokens=0, loss=None) for i in range(20)]
    for round_ in range(9, 13):
        snapshot = await swarm.look(*after(round_, b"%032d" % round_), *newcomers)
    assert snapshot.headline.committed == 3
    assert snapshot.headline.tokens_per_second == pytest.approx(500.0)


@on_loop
async def test_who_wants_to_know_is_told_of_alerts_that_begin_and_end() -> None:
    told: list[list[tuple[str, str]]] = []

    async def notify(events: Sequence[Event]) -> None:
        told.append([(event.kind, event.peer) for event in events])

    async with watched(ADA, BOB, bootstraps=["gone"], notify=notify) as swarm:
        for seconds in (0.0, HOLD_SECONDS, 2.0):
            await swarm.look(seconds=seconds)
        assert told == [[("alert", "gone")]]
        for seconds in (30.0, 30.0):
            await swarm.look(ADA, BOB, trainer("gone", role="bootstrap"), seconds=seconds)
        assert told == [[("alert", "gone")], [("cleared", "gone")]]
        assert [kind for kind, _ in await swarm.kinds()] == ["alert", "joined", "cleared"]


@on_loop
async def test_a_clock_that_is_set_back_leaves_no_hole_in_history_and_alerts() -> None:
    async with watched(ADA, bootstraps=["gone"]) as swarm:
        await swarm.look(seconds=3600.0)
        await swarm.look(seconds=-3600.0)
        began = swarm.source.time
        for _ in range(2):
            await swarm.look(seconds=POINT_SECONDS)
        series = await swarm.store.series("hour", ["peers"], began)
        assert len([at for at in series["at"] if at < began + 60.0]) == 3
        assert ("alert", "gone") in await swarm.kinds()
        contribution = await swarm.store.contribution("a")
    assert contribution is not None
    assert contribution.seconds == 2 * POINT_SECONDS


@on_loop_within(watched, *after(9, LINEAGE))
async def test_points_rounds_and_contributions_are_kept_every_few_seconds(swarm: Watched) -> None:
    for _ in range(6):
        await swarm.look(seconds=POINT_SECONDS / 2)
    series = await swarm.store.series("hour", ["loss", "peers", "compute_seconds"], swarm.source.time)
    assert series["series"] == {"loss": [2.5] * 3, "peers": [3.0] * 3, "compute_seconds": [3.0] * 3}
    assert [each["round"] for each in await swarm.store.rounds(100, 9)] == [8]
    kept = await swarm.store.contribution("a")
    assert kept is not None
    assert (kept.tokens, kept.seconds) == (500, 2 * POINT_SECONDS)


async def looks(source: FakeSource, number: int) -> None:
    async with asyncio.timeout(30):
        while source.num_looks < number:  # noqa: ASYNC110 - the fake has nothing to wait for
            await asyncio.sleep(0)


@on_loop_within(watched, ADA, BOB)
async def test_a_look_that_fails_is_not_the_last(
    swarm: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "LOOK_SECONDS", 0.0)
    source = swarm.source
    async with watching(swarm.watch):
        assert swarm.watch.snapshot is not None, "the first look is done"
        source.error = PeerUnreachableError("a", "it is gone")
        await looks(source, source.num_looks + 3)
    last = source.num_looks
    await asyncio.sleep(0)
    assert source.num_looks == last, "it ended"
    assert "a look at the swarm failed" in caplog.text


@on_loop_within(watched, ADA, BOB)
async def test_a_disk_that_is_full_does_not_hide_the_present(swarm: Watched, caplog: pytest.LogCaptureFixture) -> None:
    async def full(at: float, values: object) -> None:
        raise ResourceError("history cannot be kept: the disk is full")

    swarm.store.add_points = full  # type: ignore[method-assign]
    assert (await swarm.look()).headline.training == 2
    assert swarm.watch.snapshot is not None
    assert "the disk is full" in caplog.text
