"""The rate-limited namespaces of the benchmarks: their rates, and that nothing of them stays."""

import subprocess

import pytest

from benchmarks.bench_links import TcpSwarm
from benchmarks.namespaces import LimitedNetwork, why_unavailable
from tests.support.tools import needed

pytestmark = needed(why_unavailable(), "ip", "tc")

RATE = 40e6
NUM_BYTES = 1_000_000


def namespaces(network: LimitedNetwork) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    own = {place.prefix[-1] for place in network.places}
    return [line.split()[0] for line in listed.splitlines() if line.split()[0] in own]


def test_nothing_goes_faster_than_the_limit_in_either_direction() -> None:
    with LimitedNetwork(3) as network, TcpSwarm(network, None) as tcp:
        network.limit(RATE)
        seconds = tcp.exchange(NUM_BYTES)
    # Two others send to each peer, and it to them; a token bucket may be full at the start.
    assert seconds > 0.9 * 2 * 8 * NUM_BYTES / RATE


def test_hosts_are_removed_when_what_uses_them_fails() -> None:
    network = LimitedNetwork(2)

    def fail() -> None:
        with network:
            assert len(namespaces(network)) == 2
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert namespaces(network) == []
