"""One owner in four returns a false mean; the others find it, go on without it, and tell everybody."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.vector.chunks import CHUNK_VALUES
from p2ptrain.averaging.verification.opening import TWO_MEANS, Rules, verify_evidence
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim import false_owners
from tests.support.sim.averagers import AveragingPeer, start_averagers
from tests.support.sim.false_owners import Corrupt, corrupt_rounds, falsify
from tests.support.sim.peers import SWARM, until

CHUNKS = 2
"""In each share of four."""
NUM_VALUES = 4 * CHUNKS * CHUNK_VALUES
SPEC = AveragingSpec(codec="int8", grace_seconds=1.0, round_seconds=20.0, spot_checks=3)
"""Each of the three others checks one chunk of each share: both chunks with a probability of 3 in 4."""
RULES = Rules(SWARM, SPEC, get_codec("int8"), NUM_VALUES)

PROVABLE: dict[str, Corrupt] = {
    "one chunk": falsify([1]),
    "all chunks": falsify(None),
    "a factor": false_owners.weigh_falsely,
    "a contributor less": false_owners.leave_one_out,
    "a longer part of its own": false_owners.understate_own_norm,
}
UNPROVABLE: dict[str, Corrupt] = {
    "forged parts": false_owners.with_answer(false_owners.forge_parts),
    "half an answer": false_owners.with_answer(lambda answer: answer[: len(answer) // 2]),
    "no answer where it is false": false_owners.refuse,
    "silence where it is false": false_owners.fall_silent,
    "signatures that are none where it is false": false_owners.claim_signatures,
    "fewer contributors than agreed": false_owners.state_fewer,
}


async def start(
    network: SimulatedNetwork, corrupt: Corrupt, spec: AveragingSpec = SPEC, parts: Sequence[tuple[Codec, int]] = ()
) -> tuple[list[AveragingPeer], AveragingPeer]:
    """Four peers that averaged once, one of which is hostile from now on; the honest ones and that one."""
    peers = [network.add_peer(f"p{i}") for i in range(4)]
    started = await start_averagers(network, peers, spec, NUM_VALUES, parts=parts)
    await asyncio.gather(*(each.round() for each in started))
    honest, evil = started[:3], started[3]
    corrupt_rounds(evil.averager, corrupt)
    return honest, evil


async def average_honestly(honest: list[AveragingPeer], evil: AveragingPeer, rounds: int) -> None:
    """So many rounds; the hostile peer tries to take part in each."""
    for _ in range(rounds):
        trying = asyncio.create_task(evil.try_round())
        await asyncio.gather(*(each.round() for each in honest))
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)


async def average_until_convicted(honest: list[AveragingPeer], evil: AveragingPeer) -> str:
    """Rounds until all know what the hostile peer did; its id. One chunk may be missed, once in four rounds."""
    for _ in range(8):
        await average_honestly(honest, evil, 1)
        if any(each.averager.evidence.convicted for each in honest):
            break
    accused = evil.peer.peer_id
    await until(lambda: all(each.membership.is_convicted(accused) for each in honest), 10)
    return accused


async def go_on(honest: list[AveragingPeer], evil: AveragingPeer) -> None:
    """Two more rounds, which are right."""
    await average_honestly(honest, evil, 2)
    assert_right(honest, evil)


def assert_right(honest: list[AveragingPeer], evil: AveragingPeer) -> None:
    """The last round of the honest has one result, of which no share is the hostile peer's."""
    results = [each.outcomes[-1].result for each in honest]
    for result in results:
        assert result.certificate.body == results[0].certificate.body
        assert result.means == results[0].means
        assert evil.peer.peer_id not in result.certificate.body.members


@pytest.mark.fault(34)
@pytest.mark.parametrize("lie", PROVABLE.values(), ids=PROVABLE.keys())
@simulated(seed=1)
async def test_a_false_mean_convicts_its_owner_before_everybody(network: SimulatedNetwork, lie: Corrupt) -> None:
    honest, evil = await start(network, lie)
    accused = await average_until_convicted(honest, evil)
    assert honest[0].outcomes[-1].attempts == 2
    assert_right(honest, evil)
    for each in honest:
        evidence = each.averager.evidence.convicted[accused]
        assert verify_evidence(evidence, SWARM, lambda share: RULES, each.peer.signer)[0] == accused
        assert accused in each.membership.avoided()
    await go_on(honest, evil)
    assert all(each.outcomes[-1].attempts == 1 for each in honest)


@simulated(seed=4)
async def test_two_means_of_one_share_convict_its_owner_though_each_passes_every_check(
    network: SimulatedNetwork,
) -> None:
    honest, evil = await start(network, false_owners.state_two_means, SPEC.model_copy(update={"spot_checks": 64}))
    accused = evil.peer.peer_id
    for _ in range(3):
        await asyncio.gather(*(each.try_round() for each in (*honest, evil)))
    await until(lambda: all(list(each.averager.evidence.convicted) == [accused] for each in honest), 10)
    for each in honest:
        evidence = each.averager.evidence.convicted[accused]
        assert verify_evidence(evidence, SWARM, lambda share: RULES, each.peer.signer) == (accused, TWO_MEANS)
    await go_on(honest, evil)


@pytest.mark.parametrize("delay_seconds", [0.3, 0.6, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5])
@simulated(seed=4)
async def test_whenever_an_owner_tells_one_member_of_another_mean_nobody_honest_is_blamed(
    network: SimulatedNetwork, delay_seconds: float
) -> None:
    """When the others have signed by then, they show signatures in place of chunks: of another result."""

    def late(session: AllReduceSession) -> None:
        false_owners.state_two_means(session, delay_seconds)

    honest, evil = await start(network, late, SPEC.model_copy(update={"spot_checks": 64}))
    for _ in range(3):
        await asyncio.gather(*(each.try_round() for each in (*honest, evil)))
    for each in honest:
        assert set(each.membership.avoided()) <= {evil.peer.peer_id}
        assert not each.averager.evidence.convicted.keys() - {evil.peer.peer_id}
        if delay_seconds < SPEC.grace_seconds:  # Nobody has gone on without it.
            assert each.averager.evidence.convicted


@pytest.mark.parametrize("lie", UNPROVABLE.values(), ids=UNPROVABLE.keys())
@simulated(seed=2)
async def test_who_does_not_show_what_is_false_brings_nothing_through_either(
    network: SimulatedNetwork, lie: Corrupt
) -> None:
    honest, evil = await start(network, lie, SPEC.model_copy(update={"spot_checks": 3 * CHUNKS}))
    for _ in range(6):
        await asyncio.gather(*(each.try_round() for each in (*honest, evil)))
    for each in honest:
        assert len(each.outcomes) >= 3
        assert not each.averager.evidence.convicted
        for body in (outcome.result.certificate.body for outcome in each.outcomes[1:]):
            index = body.members.index(evil.peer.peer_id) if evil.peer.peer_id in body.members else -1
            assert index < 0 or body.bounds[index] == body.bounds[index + 1]  # It owns nothing.


@simulated(seed=3)
async def test_owners_are_held_against_what_their_round_averages(network: SimulatedNetwork) -> None:
    parts = [(get_codec("int8"), NUM_VALUES), (get_codec("int4"), NUM_VALUES // 2)]

    def lie_about_the_shorter(session: AllReduceSession) -> None:
        if session.attempt.head.round % 2:
            falsify(None)(session)

    honest, evil = await start(network, lie_about_the_shorter, parts=parts)
    rules = [Rules(SWARM, SPEC, codec, size) for codec, size in parts]
    accused = await average_until_convicted(honest, evil)
    for each in honest:
        evidence = each.averager.evidence.convicted
        assert list(evidence) == [accused]
        found = verify_evidence(evidence[accused], SWARM, lambda share: rules[share.round % 2], each.peer.signer)
        assert found[0] == accused
    await go_on(honest, evil)


@pytest.mark.parametrize("seed", range(12))
@simulated()
async def test_a_newcomer_learns_of_the_evidence_in_its_first_rounds(network: SimulatedNetwork, seed: int) -> None:
    """Also if it follows the guilty, who keeps it waiting, mostly for one round: others show it the evidence."""
    honest, evil = await start(network, falsify(None))
    newcomer = honest.pop()
    newcomer.averager.evidence._ask_again_at.clear()
    for each in (*honest, evil):
        each.others.remove(newcomer)
        each.membership._known.pop(newcomer.peer.peer_id)
    others, newcomer.others = newcomer.others, []
    for _ in range(3):  # It is a member of their lineage, so its turn to lead may come, in which no group forms.
        await asyncio.gather(*(each.try_round() for each in (*honest, evil)))
    assert all(each.membership.is_convicted(evil.peer.peer_id) for each in honest)
    assert not newcomer.membership.is_convicted(evil.peer.peer_id)
    newcomer.others = [each for each in others if each is not evil]
    for each in honest:
        each.others.append(newcomer)
    for _ in range(3):
        await asyncio.gather(*(each.try_round() for each in (*honest, newcomer)))
    assert newcomer.membership.is_convicted(evil.peer.peer_id)


@pytest.mark.fault(40)
@pytest.mark.parametrize("seed", range(12))
@simulated(model=LinkModel(loss=0.02))
async def test_the_honest_are_never_accused_whatever_the_network_does(network: SimulatedNetwork, seed: int) -> None:
    dice = random.Random(seed)
    peers = [network.add_peer(f"p{i}") for i in range(dice.choice([2, 3, 5]))]
    started = await start_averagers(network, peers, SPEC, NUM_VALUES)

    async def disturb() -> None:
        for _ in range(3):
            await asyncio.sleep(dice.uniform(0.1, 1.5))
            network.stall(dice.choice(peers), dice.uniform(0.2, 3.0))
        if len(peers) > 3:
            await asyncio.sleep(dice.uniform(0.0, 1.0))
            network.crash(dice.choice(peers))

    disturbing = asyncio.create_task(disturb())
    for _ in range(5):
        await asyncio.gather(*(each.try_round() for each in started if each.peer.alive), return_exceptions=True)
    await disturbing
    for each in started:
        assert not each.averager.evidence.convicted
    assert max(len(each.outcomes) for each in started) >= 2
