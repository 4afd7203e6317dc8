"""The choice of a version and of hosts, also among records that lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.models.exact import PAGE
from p2ptrain.network.records.serving import ServedStage
from p2ptrain.serving.client.routes import (
    FORGET_SECONDS,
    Host,
    Needs,
    Paces,
    Plan,
    Prefix,
    RecentPrefixes,
    choose,
    longest,
    sides,
)
from p2ptrain.serving.messages import MAX_CANDIDATES

SESSION = bytes(16)


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def host(
    peer: str, stage: int, *rounds: int, of: int = 2, arithmetic: str = "a", mark: int = 0, free: int = 9,
    sessions: int = 0, seconds: float | None = 0.0, context: int = 512, base: float = 0.0, row: float = 0.0,
) -> Host:  # fmt: skip
    versions = tuple((round_, digest(mark)) for round_ in rounds)
    served = ServedStage(stage, of, versions, arithmetic, context, free, sessions, "", 9, base, row)
    return Host(peer, served, seconds)


def plan(*hosts: Host, **options: object) -> Plan:
    found = choose(hosts, 2, SESSION, **options)  # type: ignore[arg-type]
    assert isinstance(found, Plan)
    return found


def test_the_newest_round_counts_that_all_stages_have_in_one_arithmetic() -> None:
    hosts = (host("a", 0, 4, 5), host("b", 1, 4), host("c", 1, 5, arithmetic="b"))
    assert plan(*hosts).version.round == 4
    assert plan(*hosts).route == (("a",), ("b",))
    assert plan(*hosts, host("d", 1, 5)).version.round == 5


def test_hosts_are_mixed_where_all_stages_have_some_and_no_arithmetic_in_common() -> None:
    first, second = host("a", 0, 4), host("b", 1, 4, arithmetic="b")
    assert sides([first, second], 2) == [{"a"}, {"b"}]
    assert choose([first, second], 2, SESSION) == 0
    assert sides([first], 2) == sides([first, host("b", 1, arithmetic="b")], 2) == []  # It serves nothing yet.
    assert sides([first, second, host("c", 1, 5)], 2) == []  # A version that both have will come.


def test_most_hosts_have_the_right_digest() -> None:
    found = plan(host("a", 0, 4), host("b", 1, 4, mark=1), host("c", 1, 4, mark=2), host("d", 1, 4, mark=1))
    assert found.version.digests == (digest(0), digest(1))
    assert sorted(found.route[1]) == ["b", "d"]


def test_near_idle_and_free_hosts_come_first() -> None:
    hosts = [
        host("full", 1, 4, free=0),
        host("far", 1, 4, seconds=0.2),
        host("busy", 1, 4, sessions=10),
        host("idle", 1, 4),
    ]
    assert plan(host("a", 0, 4), *hosts).route[1] == ("idle", "busy", "far", "full")


def test_what_is_not_known_of_a_host_is_the_median_of_the_others() -> None:
    """A host that was never dialled, or tells no costs, is neither before those that are good nor behind all."""
    first = host("a", 0, 4, base=1.0, row=0.1)
    trips = [host("near", 1, 4, seconds=0.01), host("new", 1, 4, seconds=None), host("far", 1, 4, seconds=0.3)]
    assert plan(first, *trips, host("middle", 1, 4, seconds=0.1)).route[1] == ("near", "middle", "new", "far")
    costs = [host("fast", 1, 4, base=0.01, row=0.001), host("silent", 1, 4), host("slow", 1, 4, base=3.0, row=0.1)]
    assert plan(first, *costs).route[1] == ("fast", "silent", "slow")
    assert plan(first, *costs, host("crowded", 1, 4, base=0.01, row=0.1, sessions=99)).route[1][-1] == "crowded"


def test_a_route_that_is_slower_than_its_hosts_claim_is_left_for_a_while() -> None:
    paces = Paces()
    for _ in range(20):
        paces.note({"liar": 0.01 + paces.excess("liar", 5.0), "honest": 0.05 + paces.excess("honest", 5.0)}, 0.66, 5.0)
        paces.note({"other": 0.05, "honest": 0.05 + paces.excess("honest", 5.0)}, 0.1, 5.0)
    assert paces.excess("liar", 5.0) > 0.5 > 0.05 > paces.excess("honest", 5.0)
    assert paces.excess("liar", 5.0 + FORGET_SECONDS) == pytest.approx(paces.excess("liar", 5.0) / 2)
    assert paces.excess("other", 5.0) == paces.excess("nobody", 5.0) == 0.0


def test_hosts_that_have_the_prefix_come_first_unless_they_are_much_worse() -> None:
    def first(rows: int, **settings: float) -> str:
        hosts = (host("a", 0, 4), host("idle", 1, 4), host("had", 1, 4, **settings))  # type: ignore[arg-type]
        return plan(*hosts, needs=Needs(prefix=Prefix(rows, ("gone", "had")))).route[1][0]

    assert first(64) == first(512, sessions=10) == first(512, seconds=0.15) == "had"
    assert first(64, sessions=10) == first(512, sessions=30) == first(1 << 20, seconds=0.3) == "idle"
    assert first(512, free=0) == "idle"


def test_the_longest_known_prefix_of_the_same_salt_is_found() -> None:
    recent, pages = RecentPrefixes(), [digest(number) for number in range(4)]
    assert recent.find(b"", pages) is None
    recent.note(b"", pages[:2], ("a",))
    recent.note(b"", pages[:1], ("b",))
    assert recent.find(b"", pages) == Prefix(2 * PAGE, ("a",))
    assert recent.find(b"", [pages[0], pages[3]]) == Prefix(PAGE, ("b",))
    assert recent.find(b"", []) is recent.find(b"", pages[2:]) is recent.find(b"salt", pages) is None


def test_the_least_recently_used_prefixes_are_forgotten() -> None:
    recent = RecentPrefixes(most=4)
    for number in range(9):
        recent.note(b"", [digest(number), digest(100 + number)], (str(number),))
    assert [each for each in range(9) if recent.find(b"", [digest(each)])] == [7, 8]
    assert recent.find(b"", [digest(8), digest(108)]) == Prefix(2 * PAGE, ("8",))


def test_a_stage_without_host_is_named_and_candidates_are_bounded() -> None:
    assert choose([host("a", 0, 4)], 2, SESSION) == 1
    assert choose([host("a", 1, 4)], 2, SESSION) == 0
    many = [host(f"b{number}", 1, 4) for number in range(20)]
    assert len(plan(host("a", 0, 4), *many).route[1]) == MAX_CANDIDATES


def test_a_version_that_is_gone_is_not_replaced() -> None:
    hosts = (host("a", 0, 4, 5), host("b", 1, 4, 5))
    old = plan(host("a", 0, 3), host("b", 1, 3)).version
    assert choose(hosts, 2, SESSION, only=old) == 0
    assert plan(*hosts, only=plan(host("a", 0, 4), host("b", 1, 4)).version).version.round == 4


@pytest.mark.parametrize("stage", [2, 7, 1 << 40])
def test_a_host_of_a_stage_that_the_model_does_not_have_is_ignored(stage: int) -> None:
    assert choose([host("a", 0, 4), host("liar", stage, 4)], 2, SESSION) == 1
    assert plan(host("a", 0, 4), host("b", 1, 4), host("liar", stage, 4)).route == (("a",), ("b",))


def test_a_host_with_a_short_context_is_left_out_of_long_sessions_only() -> None:
    hosts = (host("a", 0, 4, context=100), host("b", 1, 4, context=2), host("c", 1, 4, context=50), host("d", 7, 4))
    assert longest(hosts, 2) == 50
    assert longest(hosts[:2], 3) == 0
    assert plan(*hosts, needs=Needs(50)).route == (("a",), ("c",))
    assert sorted(plan(*hosts, needs=Needs(2)).route[1]) == ["b", "c"]
    assert choose(hosts, 2, SESSION, Needs(51)) == 1


@given(
    st.lists(
        st.builds(
            host, st.sampled_from("abcdefgh"), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2),
            of=st.integers(1, 3), arithmetic=st.sampled_from("xy"), mark=st.integers(0, 1), free=st.integers(0, 1),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_a_plan_names_only_hosts_that_serve_its_version(hosts: list[Host]) -> None:
    found = choose(hosts, 2, SESSION)
    if isinstance(found, int):
        assert found in (0, 1)
        return
    for number, peers in enumerate(found.route):
        key = (found.version.round, found.version.digests[number])
        able = {
            each.peer
            for each in hosts
            if (each.served.stage, each.served.num_stages) == (number, 2)
            and each.served.arithmetic == found.version.arithmetic
            and key in each.served.versions
        }
        assert peers
        assert set(peers) <= able


def test_one_record_of_a_huge_round_moves_no_client_of_a_model_in_one_stage() -> None:
    def round_of(*hosts: Host) -> int:
        found = choose(hosts, 1, SESSION)
        assert isinstance(found, Plan)
        return found.version.round

    liar, honest = host("liar", 0, 4, 1 << 52, of=1), [host(each, 0, 4, 5, of=1) for each in "abc"]
    for number in (1, 2, 3):
        assert round_of(liar, *honest[:number]) == 5
    assert round_of(*honest, host("late", 0, 3, 4, of=1)) == 5
    assert round_of(*honest, host("early", 0, 5, 6, of=1)) == 5
    assert round_of(liar) == 1 << 52  # There is no other.
