"""First contact with a swarm: how long a newcomer asks, which depends on what its peers' addresses answer."""

import asyncio

import pytest

from p2ptrain.errors import BootstrapError, NotListeningError, PeerUnreachableError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.transport import SimulatedTransport
from p2ptrain.node.meeting import CONNECT_SECONDS, LISTEN_SECONDS, ask_for_manifest
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner
from tests.support.sim.peers import members

REFUSED = NotListeningError("seed", "none of its addresses answers (192.0.2.1 port 31337: Connection refused)")
SLOW = PeerUnreachableError("seed", "does not answer within the time allowed")


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ({"seed": REFUSED}, LISTEN_SECONDS),
        ({"seed": SLOW}, CONNECT_SECONDS),
        ({"seed": REFUSED, "other": SLOW}, CONNECT_SECONDS),
    ],
    ids=["refused", "slow", "one-of-two-is-slow"],
)
@simulated()
async def test_a_newcomer_asks_for_long_only_where_somebody_listens(
    network: SimulatedNetwork,
    answers: dict[str, PeerUnreachableError],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dials: list[list[str]] = []

    async def connect(transport: SimulatedTransport, addresses: list[str], timeout_seconds: float) -> str:
        dials.append(addresses)
        raise answers[addresses[0].rpartition("/")[2]]

    monkeypatch.setattr(SimulatedTransport, "connect", connect)
    known = [f"/ip4/192.0.2.{host}/tcp/31337/p2p/{peer}" for peer in answers for host in (1, 2)]
    async with members(network, 1) as (newcomer,):
        with pytest.raises(BootstrapError, match=r"none of the swarm's known peers answers .*try again"):
            await ask_for_manifest(newcomer.peer.transport, newcomer.rpc, known, NamedSigner("newcomer"))
    assert seconds <= asyncio.get_running_loop().time() < seconds + 1
    assert dials[: len(answers)] == [known[2 * i : 2 * i + 2] for i in range(len(answers))]  # All addresses at once.
