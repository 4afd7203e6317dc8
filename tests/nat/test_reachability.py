"""How peers reach each other through gateways that translate addresses: real daemons in network namespaces."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.nat import Host, Internet, NatPeer, why_unavailable
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "ip", "nft"), pytest.mark.timeout(300)]

MANY_BYTES = 4_000_000
"""Thirty times what a relay with libp2p's default limits carries."""
FIXED = ["/ip4/0.0.0.0/tcp/31337"]


class Lab(contextlib.ExitStack):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.net = self.enter_context(Internet())

    def peer(self, host: Host, name: str, **options: Any) -> NatPeer:
        return self.enter_context(NatPeer(host, self.directory, name, **options))

    def seed(self, name: str = "seed", **options: Any) -> NatPeer:
        return self.peer(self.net.public(name), name, listen=FIXED, **options)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as made:
        yield made


def eventually_answers(peer: NatPeer, expected: Any, *order: Any, timeout_seconds: float = 30.0) -> None:
    """Repeat an order until its result is ``expected``."""
    deadline = time.monotonic() + timeout_seconds
    while (result := peer.order(*order)) != expected:
        assert time.monotonic() < deadline, f"{peer.name}: {result}"
        time.sleep(0.2)


def wait_for_a_direct_connection(peer: NatPeer, other: str, timeout_seconds: float = 60.0) -> None:
    """Wait until a peer has a connection with ``other`` that no relay carries."""
    ways: list[str] = []
    deadline = time.monotonic() + timeout_seconds
    while not any("/p2p-circuit" not in way for way in ways):  # No connection at all is no direct one.
        assert time.monotonic() < deadline, f"{peer.name}: still relayed: {ways}"
        time.sleep(0.5)
        ways = peer.order("connections").get(other, [])


def test_a_peer_that_can_be_dialled_knows_before_it_has_joined(lab: Lab) -> None:
    seed = lab.seed()
    peer = lab.peer(lab.net.public("open"), "open", link=seed.joined["link"])
    first = peer.wait_for("standing")
    assert first["reached"] == "direct", f"{first} after {peer.joined['settle_seconds']:.1f} s"
    eventually_answers(seed, {"open": "direct"}, "peers")


def test_peers_behind_gateways_use_the_relay_of_the_swarm_without_being_told(lab: Lab) -> None:
    seed = lab.seed(relay=True)
    link = seed.joined["link"]
    left, right = (lab.peer(lab.net.private(name), name, link=link) for name in ("left", "right"))
    public = lab.peer(lab.net.public("public"), "public", link=link)
    for peer in (left, right):
        standing = peer.wait_until_reached("relay")
        assert any("/p2p-circuit" in address for address in standing["addresses"])
    eventually_answers(public, {"seed": "direct", "left": "relay", "right": "relay"}, "peers")
    for sender, receiver in ((left, right), (right, left), (public, left), (right, public)):
        eventually_answers(sender, "ok", "send", receiver.joined["peer"], MANY_BYTES)


def test_what_goes_to_or_from_a_peer_that_can_be_dialled_does_not_stay_with_the_relay(lab: Lab) -> None:
    host = lab.net.public("seed")
    seed = lab.peer(host, "seed", listen=FIXED, relay=True)
    link = seed.joined["link"]
    public = lab.peer(lab.net.public("public"), "public", link=link)
    insiders = [lab.peer(lab.net.private(name), name, link=link) for name in ("left", "right", "third")]
    for inside in insiders:
        inside.wait_until_reached("relay")
        eventually_answers(inside, "direct", "reachability", "public")
        eventually_answers(public, "relay", "reachability", inside.name)
        # The public peer opens a stream first: there is no other way than the relay.
        inside.order("disconnect", public.joined["peer"])
        eventually_answers(public, "ok", "send", inside.joined["peer"], 1000)
    for inside in insiders:
        wait_for_a_direct_connection(inside, public.joined["peer"])
        before = host.received_bytes()
        for sender, receiver in ((inside, public), (public, inside)):
            eventually_answers(sender, "ok", "send", receiver.joined["peer"], MANY_BYTES)
        assert host.received_bytes() - before < MANY_BYTES / 2, "the relay carried it"


@pytest.mark.fault(39)
def test_peers_behind_gateways_punch_a_hole_once_enough_others_have_seen_them(lab: Lab) -> None:
    seed = lab.seed(relay=True)
    link = seed.joined["link"]
    for number in range(4):
        assert lab.peer(lab.net.public(f"open{number}"), f"open{number}", link=link, listen=FIXED).joined
    left, right = (lab.peer(lab.net.private(name), name, link=link) for name in ("left", "right"))
    for peer in (left, right):
        peer.wait_until_reached("relay")
    wait_for_a_direct_connection(left, right.joined["peer"], timeout_seconds=150)
    for sender, receiver in ((left, right), (right, left)):
        eventually_answers(sender, "ok", "send", receiver.joined["peer"], MANY_BYTES)
    ways = left.order("connections")[right.joined["peer"]]
    assert any("/p2p-circuit" not in way for way in ways), f"it did not last: {ways}"


def test_a_swarm_can_be_joined_through_a_relayed_peer(lab: Lab) -> None:
    seed = lab.seed(relay=True)
    inside = lab.peer(lab.net.private("inside"), "inside", link=seed.joined["link"])
    inside.wait_until_reached("relay")
    newcomer = lab.peer(lab.net.public("newcomer"), "newcomer", link=inside.joined["link"])
    eventually_answers(newcomer, {"seed": "direct", "inside": "relay"}, "peers")


def test_without_a_relay_a_peer_says_so_and_is_reached_over_its_own_connections(lab: Lab) -> None:
    seed = lab.seed()
    inside = lab.peer(lab.net.private("inside"), "inside", link=seed.joined["link"])
    standing = inside.wait_until_reached("unknown")
    assert "no relay" in standing["note"]
    public = lab.peer(lab.net.public("public"), "public", link=seed.joined["link"])
    eventually_answers(public, "ok", "send", inside.joined["peer"], MANY_BYTES)
    relay = lab.peer(lab.net.public("relay"), "relay", link=seed.joined["link"], listen=FIXED, relay=True)
    assert relay.joined
    inside.wait_until_reached("relay")


@pytest.mark.fault(39)
def test_when_a_relay_dies_another_one_is_taken(lab: Lab) -> None:
    seed = lab.seed()
    link = seed.joined["link"]
    first = lab.peer(lab.net.public("first"), "first", link=link, listen=FIXED, relay=True)
    inside, other = (lab.peer(lab.net.private(n), n, link=first.joined["link"]) for n in ("inside", "other"))
    inside.wait_until_reached("relay")
    other.wait_until_reached("relay")
    second = lab.peer(lab.net.public("second"), "second", link=link, listen=FIXED, relay=True)
    second_id, since = second.joined["peer"], (len(inside.events), len(other.events))
    first.kill()
    for peer, number in zip((inside, other), since, strict=True):
        peer.wait_until_reached("unknown", number)
        standing = peer.wait_until_reached("relay", number)
        assert any(f"{second_id}/p2p-circuit" in address for address in standing["addresses"])
    eventually_answers(inside, "ok", "send", other.joined["peer"], MANY_BYTES)


def test_a_forwarded_port_is_found_and_announced(lab: Lab) -> None:
    seed = lab.seed()
    host = lab.net.private("home")
    outside = lab.net.forward(host, 4001)
    home = lab.peer(host, "home", link=seed.joined["link"], listen=["/ip4/0.0.0.0/tcp/4001"])
    standing = home.wait_until_reached("direct")
    assert any(address.startswith(f"/ip4/{outside}/tcp/4001/") for address in standing["addresses"])
    public = lab.peer(lab.net.public("public"), "public", link=home.joined["link"])
    eventually_answers(public, {"seed": "direct", "home": "direct"}, "peers")
