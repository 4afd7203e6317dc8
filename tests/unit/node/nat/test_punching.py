"""When a relayed connection is opened anew."""

import itertools

from p2ptrain.node.nat.contacts import FIRST_PAUSE_SECONDS, MAX_ATTEMPTS, HolePunching

RELAYED = "/ip4/45.10.0.1/tcp/31337/p2p/QmRelay/p2p-circuit"
DIRECT = "/ip4/45.10.0.7/tcp/4001"


def test_of_two_only_one_opens_anew() -> None:
    found = []
    for own, other in (("a", "b"), ("b", "a")):
        punching = HolePunching(own)
        assert punching.due({other: [RELAYED]}, 0.0) == []
        found += punching.due({other: [RELAYED]}, 10 * FIRST_PAUSE_SECONDS)
    assert found == ["b"]


def test_a_peer_that_can_be_dialled_is_dialled_at_once_whatever_the_ids() -> None:
    for own, other in (("a", "b"), ("b", "a")):
        punching = HolePunching(own)
        times = []
        for second in range(1000):
            for peer in punching.due({other: [RELAYED]}, float(second), dialable={other}):
                times.append(second)
                punching.tried(peer, float(second))
        assert times[0] == 0
        assert len(times) == MAX_ATTEMPTS  # It may be wrong about itself.
        assert punching.due({other: [DIRECT]}, 2e4, dialable={other}) == []


def test_a_direct_connection_is_left_alone() -> None:
    punching = HolePunching("a")
    for now in (0.0, 1e3, 1e6):
        assert punching.due({"b": [RELAYED, DIRECT], "c": [DIRECT]}, now) == []


def test_attempts_come_ever_more_rarely_and_end() -> None:
    punching = HolePunching("a")
    times = []
    for second in range(1000):
        for peer in punching.due({"b": [RELAYED]}, float(second)):
            times.append(second)
            punching.tried(peer, float(second))
    pauses = [later - earlier for earlier, later in itertools.pairwise([0, *times])]
    assert len(times) == MAX_ATTEMPTS
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(pauses))


def test_what_is_under_way_is_asked_about_again_at_once() -> None:
    punching = HolePunching("a")
    punching.due({"b": [RELAYED]}, 0.0)
    assert punching.due({"b": [RELAYED]}, 100.0) == punching.due({"b": [RELAYED]}, 101.0) == ["b"]


def test_a_peer_that_was_reached_directly_and_lost_gets_new_attempts() -> None:
    punching = HolePunching("a")
    for number in range(100):
        for peer in punching.due({"b": [RELAYED]}, 100.0 * number):
            punching.tried(peer, 100.0 * number)
    assert punching.due({"b": [RELAYED]}, 2e4) == []
    punching.due({"b": [DIRECT]}, 2e4)
    punching.due({"b": [RELAYED]}, 2e4 + 1)
    assert punching.due({"b": [RELAYED]}, 3e4) == ["b"]
