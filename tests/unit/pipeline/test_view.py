"""What a peer knows of a pipeline: routes and memberships follow what hosts say of themselves."""

from dataclasses import replace
from random import Random

import pytest

from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.pipeline.messages import Hop, Reply
from p2ptrain.pipeline.placement import StageNeed, best_move
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.routing.hop import Tell
from p2ptrain.pipeline.routing.router import Router
from p2ptrain.pipeline.view import LEAST_PAUSE_SECONDS, SILENT_SECONDS, PipelineView
from p2ptrain.runtime import Runtime
from tests.support.sim.pipelines import make_manifest
from tests.support.web.watched import trainer as host_record

OWN = "m-self"
LATER = 1e12
"""When records expire."""


async def take(hop: Hop, tell: Tell) -> Reply:
    raise AssertionError("nobody calls it here")


def make_view(num_stages: int = 3, *, tied: bool = False, clock: list[float] | None = None) -> PipelineView:
    now = clock if clock is not None else [1000.0]
    plan = PipelinePlan(make_manifest(num_stages, tied=tied))
    return PipelineView(plan, OWN, Runtime(random=Random(0), clock=lambda: now[0]))


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def view(clock: list[float]) -> PipelineView:
    return make_view(clock=clock)


@pytest.fixture
def router(view: PipelineView) -> Router:
    return view.new_router()


def record(peer: str, *units: int, state: str = "training", speed: float = 10.0, round: int = 4) -> PeerRecord:
    stages = tuple(StageReport(unit, round, bytes([unit]) * 32, b"d" * 32, 99, speed) for unit in units)
    return host_record(peer, state=state, round=0, role="stage", stages=stages)


def told(view: PipelineView, *records: PeerRecord, sequence: int = 1, expires_at: float = LATER) -> None:
    view.update([(each, sequence, expires_at) for each in records])


def routes(router: Router) -> list[set[str]]:
    return [set(stage.hosts) for stage in router.stages]


def test_hosts_are_in_the_routes_and_memberships_of_what_they_host() -> None:
    view = make_view(tied=True)
    early = view.membership(0)
    told(view, record("a", 0, 3), record("b", 1), record("c", 2, 3))
    assert routes(view.new_router()) == [{"a"}, {"b"}, {"c"}]
    assert early.expected() == ["a"]
    assert [view.membership(unit).expected() for unit in range(4)] == [["a"], ["b"], ["c"], ["a", "c"]]
    (seen,) = view.membership(1).records()
    assert (seen.role, seen.round, seen.lineage, seen.lineage_tokens) == ("trainer", 4, bytes([1]) * 32, 99)
    assert view.membership(1) is view.membership(1)


def test_who_leaves_a_stage_leaves_its_routes_and_its_membership_at_once(view: PipelineView, router: Router) -> None:
    told(view, record("a", 0), record("b", 0), record("c", 1))
    told(view, record("b", 1), sequence=2)
    assert routes(router) == [{"a"}, {"b", "c"}, set()]
    assert [view.membership(unit).expected() for unit in range(2)] == [["a"], ["b", "c"]]
    told(view, record("b"), sequence=3)
    assert routes(router) == [{"a"}, {"c"}, set()]
    assert view.membership(1).expected() == ["c"]
    told(view, record("b", 0), sequence=4)
    assert view.membership(0).expected() == ["a", "b"]


def test_what_is_older_than_what_is_known_changes_nothing(view: PipelineView, router: Router) -> None:
    told(view, record("a", 1), sequence=5)
    for sequence in (4, 5):
        told(view, record("a", 0), sequence=sequence)
        assert routes(router) == [set(), {"a"}, set()]
        assert view.membership(0).records() == []


def test_a_record_that_ran_out_takes_its_peer_along(view: PipelineView, router: Router, clock: list[float]) -> None:
    told(view, record("a", 0), expires_at=1010.0)
    told(view, record("b", 0), expires_at=1030.0)
    membership = view.membership(0)
    clock[0] = 1020.0
    told(view)
    assert routes(router)[0] == {"b"}
    assert membership.expected() == ["b"]
    assert [host.peer for host in view.hosts()] == ["b"]


def test_only_those_that_take_part_are_in_routes_and_waited_for(view: PipelineView, router: Router) -> None:
    for sequence, state in enumerate(("starting", "syncing", "training", "paused", "draining"), 1):
        told(view, record("a", 0, state=state), sequence=sequence)
        takes_part = state in ("training", "paused")
        assert routes(router)[0] == ({"a"} if takes_part else set()), state
        assert view.membership(0).expected() == (["a"] if takes_part else []), state


def test_own_hosts_are_in_the_routes_as_long_as_they_take_part(view: PipelineView, router: Router) -> None:
    told(view, record("a", 0))
    view.local.hosts[0], view.local.hosts[2] = take, take
    view.refresh_routes()
    assert routes(router) == [{"a", OWN}, set(), {OWN}]
    assert routes(view.new_router()) == [{"a", OWN}, set(), {OWN}], "also in routers made later"
    told(view, record("b", 1), sequence=2)
    assert routes(router) == [{"a", OWN}, {"b"}, {OWN}]
    router.failed(OWN, "was full")
    view.refresh_routes()
    assert routes(router)[0] == {"a", OWN}, "it knows best itself whether it is there"
    del view.local.hosts[0]
    view.refresh_routes()
    assert routes(router) == [{"a"}, {"b"}, {OWN}]


def test_what_the_directory_says_of_itself_is_not_news_to_a_peer(view: PipelineView, router: Router) -> None:
    told(view, record(OWN, 0))
    assert routes(router)[0] == set()
    assert view.membership(0).records() == []
    assert view.hosts() == []


def test_units_that_the_plan_does_not_have_are_in_no_routes(view: PipelineView) -> None:
    told(view, record("a", 2, 3, 70))
    assert routes(view.new_router()) == [set(), set(), {"a"}]
    assert [(host.peer, host.stage) for host in view.hosts()] == [("a", 2)]


def test_placement_counts_hosts_with_the_speed_that_they_tell_or_a_medium_one(view: PipelineView) -> None:
    assert view.medium_speed() == 1.0
    told(view, record("a", 0), record("b", 1, speed=15.0), record("c", 2, speed=0.0))
    needs = view.plan.needs
    speeds = {host.peer: host.speed for host in view.hosts()}
    assert speeds["a"] == 10.0 * needs[0].work
    assert speeds["b"] == 15.0 * needs[1].work
    assert speeds["c"] == view.medium_speed() == min(speeds["a"], speeds["b"])


@pytest.mark.parametrize("claim", [20.0, 1e4, 1e18])
def test_one_host_that_claims_to_be_fast_draws_nobody_away_from_its_stage(claim: float) -> None:
    view = make_view(2)
    work = [need.work for need in view.plan.needs]
    honest = [record(f"{stage}-{number}", stage, speed=10.0 / work[stage]) for stage in range(2) for number in range(4)]
    told(view, *honest, record("last", 1, speed=10.0 / work[1]), record("liar", 0, speed=claim))
    speeds = {host.peer: host.speed for host in view.hosts()}
    assert speeds == pytest.approx({**dict.fromkeys(speeds, 10.0), "liar": 20.0}, rel=0.3)
    assert best_move([StageNeed(1.0)] * 2, view.hosts()) is None


def test_those_that_are_still_deciding_count_for_those_with_larger_ids_alone(view: PipelineView) -> None:
    told(view, record("a", 0, state="starting"), record("z", 0, state="starting"))
    assert {host.peer for host in view.hosts()} == {"a"}
    told(view, replace(record("z", 0), state="syncing"), sequence=2)
    assert {host.peer for host in view.hosts()} == {"a", "z"}


def test_who_is_on_its_way_counts_where_it_goes_and_cannot_be_moved(view: PipelineView) -> None:
    moving, bound = replace(record("a", 0), next_stage=2), replace(record("b", 0), next_stage=0)
    told(view, moving, bound, record("c", 0), record("d", 1, state="syncing"))
    seen = {host.peer: (host.stage, host.stays) for host in view.hosts()}
    assert seen == {"a": (2, True), "b": (0, True), "c": (0, False), "d": (1, True)}
    assert {host.peer: host.leaves for host in view.hosts()} == {"a": 0, "b": None, "c": None, "d": None}
    told(view, replace(record("a", 0, 2), next_stage=2), sequence=2)
    assert [(host.peer, host.stage) for host in view.hosts() if host.peer == "a"] == [("a", 2)], "once"
    told(view, replace(record("a", 2), next_stage=70), sequence=3)
    assert "a" not in {host.peer for host in view.hosts()}, "there is no such stage"


def test_placement_does_without_who_falls_silent_while_others_are_heard(
    view: PipelineView, router: Router, clock: list[float]
) -> None:
    told(view, record("a", 0), record("b", 0))
    clock[0] += 100
    assert {host.peer for host in view.hosts()} == {"a", "b"}, "the directory may be away"
    told(view, record("a", 0), record("b", 0))
    assert {host.peer for host in view.hosts()} == {"a", "b"}, "nothing new of either"
    told(view, record("b", 0), sequence=2)
    assert {host.peer for host in view.hosts()} == {"b"}
    assert routes(router)[0] == {"a", "b"}, "it may be drawn as long as its record lasts"
    told(view, record("a", 0), sequence=2)
    assert {host.peer for host in view.hosts()} == {"a", "b"}


def test_it_is_known_when_somebody_said_last_that_it_goes_however_often_one_says_it(
    view: PipelineView, clock: list[float]
) -> None:
    stays, goes = record("a", 0), replace(record("a", 0), next_stage=1)
    told(view, stays, replace(record("b", 0), next_stage=0))
    assert view.last_departure < clock[0]
    told(view, goes, sequence=2)
    assert view.last_departure == 1000.0
    clock[0] += 5.0
    told(view, goes, sequence=3)
    assert view.last_departure == 1000.0, "it is still going"
    told(view, stays, sequence=4)
    told(view, goes, sequence=5)
    assert view.last_departure == 1000.0, "who keeps saying so holds nobody up"
    told(view, replace(record("b", 0), next_stage=2), sequence=5)
    assert view.last_departure == 1005.0
    clock[0] += LEAST_PAUSE_SECONDS
    told(view, stays, sequence=6)
    told(view, goes, sequence=7)
    assert view.last_departure == clock[0]


def test_a_round_is_over_when_all_hosts_of_another_stage_that_speak_are_through_with_it(
    view: PipelineView, clock: list[float]
) -> None:
    told(view, record("a", 0, round=4), record("b", 0, round=5), record("own stage's", 1, round=9))
    assert not view.is_over(4, 1), "one of the two hosts of stage 0 is not, and stage 1 does not count"
    assert view.is_over(3, 1)
    clock[0] += SILENT_SECONDS + 1.0
    told(view, record("b", 0, round=5), sequence=2)
    assert view.is_over(4, 1), "the other one fell silent"
    told(view, record("c", 0, round=0, state="syncing"), sequence=2)
    assert view.is_over(4, 1), "nor does one count that has not begun"
    assert not view.is_over(5, 1)
