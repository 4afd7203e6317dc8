"""Rounds in which a part of the sites is drawn: the others follow and vote, and nobody waits for them."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from p2ptrain.averaging.grouping.messages import PASS, Ahead, Pass
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.manifest import MASKED_DEFAULTS, AdmissionSpec, PrivateSpec, SecureAggregationSpec
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.training.sync.synchronizer import SIT_OUT_SECONDS
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner
from tests.support.sim.product_peers import Begin, ProductSwarm

STEPS, STEP_SECONDS, SHARE = 4, 0.5, 0.3
SITES = [f"site{number}" for number in range(8)]


class Rounds:
    """The heads of a swarm of which sites are drawn, and who trained in its rounds."""

    def __init__(self, begin: Begin, network: SimulatedNetwork, **options: object) -> None:
        self.ids = {name: SimulatedSigner(network.seed, name, {}).peer_id for name in SITES}
        members = AdmissionSpec(mode="allowlist", members=tuple(self.ids.values()))
        self.swarm: ProductSwarm = begin(
            network, {"every": STEPS, "warmup_steps": 0}, private=PrivateSpec(participation=SHARE), admission=members,
            **options,
        )  # fmt: skip
        self.heads: dict[bytes, Head] = {}
        self.liar = ""
        self.trained: set[tuple[str, bytes]] = set()
        self.swarm.before_step = self._look
        for name in SITES:
            words = "\n".join(f"{name}{number:05d}" for number in range(200))
            (self.swarm.folder / f"{name}.txt").write_text(words)

    def start(self, rounds: int) -> None:
        for name in SITES:
            self.swarm.start(name, rounds, data=self.swarm.folder / f"{name}.txt")

    def _look(self, name: str, trainer: object) -> None:
        for each in self.swarm.nodes.values():
            if (synchronizer := each.held.synchronizer) is not None:
                self.heads[synchronizer.head.lineage] = synchronizer.head
        self.trained.add((self.ids[name], self.swarm.sync(name).head.lineage))

    def check(self) -> list[int]:
        """Check that no site but those that are drawn trained; return the numbers of those that contributed."""
        numbers, reduced = [], {head.lineage for head in self.heads.values() if head.is_reduced}
        for head in sorted(self.heads.values(), key=lambda head: head.round)[1:]:
            body = Certificate.from_bytes(head.certificate, self.swarm.manifest.digest, Signs("")).body
            reduced |= {body.lineage} if body.is_reduced else set()
            undrawn = self.heads[body.lineage].table.undrawn(body.lineage, SHARE, 1)
            trained = {peer for peer, lineage in self.trained if lineage == body.lineage} - {self.liar}
            assert undrawn.isdisjoint(trained) or body.lineage in reduced
            assert undrawn.isdisjoint(body.members) or body.lineage in reduced
            numbers.append(sum(body.peers[index] for index, *_ in body.contributors))
        return numbers


class Signs(NamedSigner):
    """Believes all signatures: those of certificates that peers hold were verified."""

    def verify(self, peer: str, message: bytes, proof: bytes) -> bool:
        return True


MASKED = {"secure_aggregation": SecureAggregationSpec(), **MASKED_DEFAULTS}


@pytest.mark.parametrize(("seed", "options"), [(1, {"min_peers": 2}), (2, {"group_size": 4}), (3, MASKED)])
@simulated()
async def test_rounds_train_those_that_are_drawn_and_stay_full_by_the_votes_of_all(
    network: SimulatedNetwork, seed: int, options: dict[str, Any], begin: Begin
) -> None:
    rounds = Rounds(begin, network, **options)
    rounds.start(12)
    await rounds.swarm.end()
    assert len(rounds.swarm.heads()) == 1, "also those that were not drawn have the last result"
    assert not any(head.is_reduced for head in rounds.heads.values())
    numbers = rounds.check()
    assert numbers[0] == min(len(SITES), options.get("group_size", 64)), "all are new"
    assert set(numbers[2:]) in ({3}, {3, 4}), "three are drawn, and one that was not for 8 rounds comes, too"
    assert network.loop.time() < 12 * (STEPS * STEP_SECONDS + 3.0) + 10.0, "nobody is waited for in vain"


@pytest.mark.parametrize("killed", [2, 3])
@simulated(seed=5)
async def test_without_sites_that_were_drawn_the_others_go_on(
    network: SimulatedNetwork, killed: int, begin: Begin
) -> None:
    rounds = Rounds(begin, network)
    rounds.start(10)
    await rounds.swarm.until(lambda: rounds.swarm.round("site0") == 3)
    head = rounds.swarm.sync("site0").head
    drawn = sorted({*rounds.ids.values()} - head.table.undrawn(head.lineage, SHARE, 1))
    dead = [name for name in SITES if rounds.ids[name] in drawn[:killed]]
    for name in dead:
        await rounds.swarm.kill(name)
    alive = [name for name in SITES if name not in dead]
    await rounds.swarm.until(lambda: all(rounds.swarm.tasks[name].done() for name in alive), 300.0)
    heads = [rounds.swarm.sync(name).head for name in alive]
    assert {(each.round, each.lineage) for each in heads} == {(10, heads[0].lineage)}
    assert heads[0].is_reduced == (killed == 3), "a full round needs two thirds of the voters"


@simulated(seed=6)
async def test_a_site_that_comes_back_sits_out_as_the_others_do(network: SimulatedNetwork, begin: Begin) -> None:
    rounds = Rounds(begin, network)
    rounds.start(14)
    await rounds.swarm.until(lambda: rounds.swarm.round("site0") == 3)
    await rounds.swarm.kill("site1")
    await asyncio.sleep(4.0)
    rounds.swarm.start("site1", 14, data=rounds.swarm.folder / "site1.txt")
    await rounds.swarm.end()
    assert len(rounds.swarm.heads()) == 1
    rounds.check()


@simulated(seed=7)
async def test_a_peer_that_says_that_it_is_ahead_and_is_not_is_asked_again_after_a_pause(
    network: SimulatedNetwork, begin: Begin
) -> None:
    rounds, asked = Rounds(begin, network), Counter[tuple[str, bytes]]()
    rounds.start(8)
    await rounds.swarm.until(lambda: all(rounds.swarm.round(name) >= 2 for name in SITES), 120.0)
    for name in SITES[:3]:
        rpc = rounds.swarm.sync(name).replica.context.rpc

        async def lie(peer: str, request: Pass) -> Ahead:
            asked[peer, request.head.lineage] += 1
            return Ahead(is_ahead=True)

        rpc.serve(PASS, Pass, lie)
    began = network.loop.time()
    await rounds.swarm.end()
    assert 0 < max(asked.values()) <= (network.loop.time() - began) / SIT_OUT_SECONDS
    assert len(rounds.swarm.heads()) == 1
    rounds.check()


@pytest.mark.parametrize(("blind", "options"), [(0, {"min_peers": 2}), (0, MASKED), (5, {"min_peers": 2})])
@simulated(seed=8)
async def test_a_site_that_trains_and_leads_as_if_all_were_drawn_gets_into_no_other_round(
    network: SimulatedNetwork, blind: int, options: dict[str, Any], begin: Begin
) -> None:
    rounds = Rounds(begin, network, **options)
    rounds.start(12)
    await rounds.swarm.until(lambda: all(rounds.swarm.round(name) >= 2 for name in SITES), 120.0)
    rounds.liar = rounds.ids["site1"]
    object.__setattr__(rounds.swarm.sync("site1").replica.context, "participation", 1.0)
    for name in SITES[:blind]:  # More than a third of the voters are left.
        context = rounds.swarm.sync(name).replica.context
        own = context.sitting_out
        object.__setattr__(context, "sitting_out", lambda head, there=(), own=own: frozenset() if there else own(head))
    await rounds.swarm.end()
    assert len(rounds.swarm.heads()) == 1
    # In its turns to lead it costs attempts, and a full round now and then.
    assert blind or 2 * sum(head.is_reduced for head in rounds.heads.values()) < len(rounds.heads)
    undrawn = [h for h in rounds.heads.values() if rounds.liar in h.table.undrawn(h.lineage, SHARE, 1)]
    assert {(rounds.liar, head.lineage) for head in undrawn if head.round > 3} & rounds.trained
    rounds.check()
