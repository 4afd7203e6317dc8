"""Random schedules of calls and faults: each wait ends by its deadline, with a typed result, leaving nothing."""

import asyncio
import hashlib
import random
from typing import Any

import pytest

from p2ptrain.errors import DeadlineError, PeerError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, simulate
from tests.support.sim.peers import SWARM

NUM_PEERS = 6
LATE_SECONDS = 6.0
"""How long after its deadline a caller may still be busy: letting go of a stream takes up to five."""


class Traffic:
    """Peers that call each other all the time, and faults that strike them."""

    def __init__(self, network: SimulatedNetwork, seed: int) -> None:
        self.network = network
        self.random = random.Random(seed)
        self.outcomes: list[str] = []
        self.rpcs: dict[str, Rpc] = {}

    async def start(self, peer: SimulatedPeer) -> None:
        rpc = self.rpcs[peer.name] = Rpc(peer.transport, peer.runtime, SWARM)
        rpc.serve("work", dict, self._work(peer))
        rpc.serve_channel("echo", dict, self._echo)
        await rpc.start()
        for _ in range(4):
            peer.spawn(self._talk(peer, rpc))

    def _work(self, peer: SimulatedPeer) -> Any:
        async def work(caller: str, request: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(request["seconds"])
            return {"number": request["number"], "by": peer.incarnation}

        return work

    async def _echo(self, channel: Channel, request: dict[str, Any]) -> None:
        data = await channel.receive_bytes(request["size"], 20)
        await channel.send_bytes(data)

    async def _talk(self, peer: SimulatedPeer, rpc: Rpc) -> None:
        chance = peer.runtime.random
        while True:
            await asyncio.sleep(chance.random())
            other = chance.choice([p.peer_id for p in self.network.peers.values() if p.name != peer.name])
            timeout_seconds = chance.choice([0.01, 0.3, 3.0, 20.0])
            # Its own stalls are no fault of the code under test: whoever is stopped may be late.
            started, stalls = self.network.loop.time(), self._stalls(peer)
            try:
                if chance.random() < 0.5:
                    await self._call(rpc, other, timeout_seconds, chance)
                else:
                    await self._exchange(rpc, other, timeout_seconds, chance)
                self.outcomes.append("ok")
            except (PeerError, DeadlineError) as error:
                self.outcomes.append(type(error).__name__)
            late = self.network.loop.time() - started - timeout_seconds
            assert late < LATE_SECONDS or self._stalls(peer) != stalls, f"{late:.1f} s late"

    def _stalls(self, peer: SimulatedPeer) -> int:
        return sum(event[1] in ("stall", "resume") and event[2] == peer.name for event in self.network.trace)

    async def _call(self, rpc: Rpc, other: str, timeout_seconds: float, chance: random.Random) -> None:
        number, seconds = chance.random(), chance.choice([0.0, 0.1, 5.0])
        reply = await rpc.call(other, "work", {"number": number, "seconds": seconds}, dict, timeout_seconds)
        assert reply["number"] == number

    async def _exchange(self, rpc: Rpc, other: str, timeout_seconds: float, chance: random.Random) -> None:
        data = chance.randbytes(chance.choice([0, 10, 100_000, 1_000_000]))
        try:
            async with asyncio.timeout(timeout_seconds):
                async with rpc.open(other, "echo", {"size": len(data)}, timeout_seconds) as channel:
                    await channel.send_bytes(data)
                    assert bytes(await channel.receive_bytes(len(data), timeout_seconds)) == data
        except TimeoutError:
            raise DeadlineError("the exchange took too long") from None

    async def strike(self) -> None:
        network, chance = self.network, self.random
        peer = network.peers[chance.choice(list(network.peers))]
        match chance.randrange(7):
            case 0 if peer.alive:
                network.crash(peer)
            case 0 | 1 if not peer.alive:
                await self.start(network.restart(peer))
            case 2 if peer.alive:
                network.stall(peer, chance.choice([0.5, 5, 15]))
            case 3:
                half = list(network.peers.values())[: chance.randrange(1, NUM_PEERS)]
                network.partition(half)
            case 4 | 5:
                network.heal()
                network.mend(peer)
            case 6:
                network.cut(peer)

    async def run(self) -> None:
        for number in range(NUM_PEERS):
            await self.start(self.network.add_peer(f"peer{number}"))
        for _ in range(25):
            await asyncio.sleep(self.random.uniform(0, 8))
            await self.strike()
        self.network.heal()
        for peer in list(self.network.peers.values()):
            self.network.mend(peer)
            self.network.resume(peer)
        for peer in list(self.network.peers.values()):
            if self.random.random() < 0.5:
                self.network.crash(peer)
            elif peer.alive:
                for task in self.network.loop.pending_tasks(peer):
                    task.cancel()
                await self.rpcs[peer.name].close()
                await peer.close()


def run_schedule(seed: int) -> tuple[str, list[str]]:
    """Return a digest of all that happened on the network, and the outcomes of the calls."""

    async def main(network: SimulatedNetwork) -> tuple[str, list[str]]:
        traffic = Traffic(network, seed)
        await traffic.run()
        return hashlib.sha256(repr(network.trace).encode()).hexdigest(), traffic.outcomes

    model = LinkModel(loss=0.01, up_bytes_per_second=5e6, down_bytes_per_second=5e6)
    return simulate(main, seed, model=model, settle_seconds=30.0)


@pytest.mark.fault(36)
@pytest.mark.parametrize("seed", range(8))
def test_every_wait_ends_by_its_deadline_with_a_typed_result(seed: int) -> None:
    _, outcomes = run_schedule(seed)
    assert outcomes.count("ok") > 20
    assert len(set(outcomes)) >= 3
