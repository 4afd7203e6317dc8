"""Swarms whose newest state is lost go on from an older one, with their founders' votes, after a long wait."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.votes import VOTE, WAITS_BEFORE_GOING_BACK, AskVote, Vote
from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import at_end, simulated
from tests.support.records import record_of
from tests.support.sim.clubs import WAIT_SECONDS, Club, Saved, ask_for_votes, established, save, train
from tests.support.sim.peers import until
from tests.support.sim.strangers import forge, go_on_from
from tests.support.sim.trainers import SimulatedTrainer

WAIT = WAITS_BEFORE_GOING_BACK * WAIT_SECONDS


async def trained(
    network: SimulatedNetwork, mode: str, names: str, **averaging: object
) -> tuple[Club, list[SimulatedTrainer], list[Saved]]:
    """Return a swarm that cannot close a full round without the seed, and checkpoints of four rounds ago."""
    club = Club(network, mode, **averaging)
    trainers = list(await asyncio.gather(*(club.start(name) for name in names)))
    await club.average(*trainers, rounds=1 + ESTABLISHED)
    saved = [save(each) for each in trainers]
    await club.average(*trainers, rounds=4)
    return club, trainers, saved


def train_on(*trainers: SimulatedTrainer) -> None:
    for each in trainers:
        training = each.peer.spawn(train(each))

        async def end(training: asyncio.Task[None] = training) -> None:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)

        at_end(end)


async def until_full(trainers: Sequence[SimulatedTrainer], full: int, seconds: float) -> None:
    """Wait until all have gone on by full rounds, on one lineage."""
    await until(lambda: min(each.sync.head.full for each in trainers) > full, seconds, 1.0)
    for each in trainers:
        each.stop = True
    await asyncio.sleep(WAIT_SECONDS)
    heads = {each.sync.head.lineage for each in trainers if not each.sync.head.is_reduced}
    assert len(heads) == 1


@pytest.mark.fault(11)
@pytest.mark.parametrize(("mode", "names"), [("open", "abc"), ("open", "a"), ("invite", "a")])
@simulated(seed=1)
async def test_a_swarm_that_restarts_from_older_checkpoints_goes_on_after_a_wait(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture, mode: str, names: str
) -> None:
    club, trainers, saved = await trained(network, mode, names)
    lost, before = trainers[0].sync.head, saved[0][0]
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await asyncio.sleep(0.9 * WAIT)
    assert [each.sync.head.full for each in again] == [before.full] * len(again), "a holder may only be away"
    assert f"go on from round {before.round}, and this voter knows round {lost.round - 1}" in caplog.text
    await until_full(again, lost.full, WAIT)
    assert f"no peer shows the state of round {lost.round - 1}: this voter lets the swarm go on" in caplog.text


@simulated(seed=2)
async def test_the_founder_hears_of_it_when_the_swarm_has_gone_on_by_reduced_rounds(network: SimulatedNetwork) -> None:
    """Then no voter that the founder knows signed its head; and a newcomer believes it all the same."""
    club, trainers, saved = await trained(network, "invite", "a")
    network.cut(club.seed.peer)
    (again,) = await club.restart_all(trainers, saved)
    train_on(again)
    await until(lambda: again.sync.head.round > saved[0][0].round + 1, 10 * WAIT_SECONDS, 1.0)
    assert again.sync.head.is_reduced
    newcomer = await club.start("newcomer")
    assert await newcomer.sync.catch_up.follow(again.peer.peer_id, newcomer.work)
    network.mend(club.seed.peer)
    train_on(newcomer)
    await until_full([again, newcomer], again.sync.head.full + 1, 2 * WAIT)


@simulated(seed=3)
async def test_a_holder_that_comes_back_within_the_wait_keeps_its_rounds(network: SimulatedNetwork) -> None:
    club, (*trainers, holder), saved = await trained(network, "open", "abc")
    lost = holder.sync.head
    network.cut(holder.peer)
    again = await club.restart_all(trainers, saved[:-1])
    train_on(*again)
    await asyncio.sleep(0.7 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved[:-1]]
    network.mend(holder.peer)
    train_on(holder)
    await until_full([*again, holder], lost.full, WAIT)
    assert holder.sync.catch_up.resyncs == 0
    assert holder.sync.averager.round_log.lineage_at(holder.sync.head, lost.round) == lost.lineage


@simulated(seed=4)
async def test_the_founder_waits_for_a_holder_of_which_a_record_tells(network: SimulatedNetwork) -> None:
    club, trainers, saved = await trained(network, "open", "ab")
    lost = trainers[0].sync.head
    record = record_of("holder", round=lost.round, lineage_full=lost.full)
    club.seed.membership.update(record, 1, expires_at=math.inf)
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await asyncio.sleep(2 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved]
    assert "by its record peer holder holds a later state" in again[0].results[-1].reason
    club.seed.membership.forget("holder")
    await until_full(again, lost.full, 2 * WAIT)


@simulated(seed=5)
async def test_time_in_which_the_founder_heard_nobody_does_not_count(network: SimulatedNetwork) -> None:
    """A holder may have asked meanwhile."""
    club, trainers, saved = await trained(network, "open", "ab")
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await asyncio.sleep(WAIT_SECONDS)
    network.cut(club.seed.peer)
    await asyncio.sleep(2 * WAIT)
    network.mend(club.seed.peer)
    await asyncio.sleep(0.4 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved]


@simulated(seed=6)
async def test_nothing_goes_back_past_an_anchor(network: SimulatedNetwork, caplog: pytest.LogCaptureFixture) -> None:
    club, trainers, saved = await trained(network, "open", "ab", anchor_rounds=8)
    await club.average(*trainers)  # The founder signs once it sees the next certificate.
    assert saved[0][0].round < 8 < trainers[0].sync.head.round
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await asyncio.sleep(2 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved]
    assert "If its state is lost, delete" in caplog.text


@simulated(seed=7)
async def test_old_voters_lead_no_founder_forward(network: SimulatedNetwork) -> None:
    """Theirs was the electorate of a round that the founder signed; it has changed since."""
    club, (evil, *staying) = await established(network, "abc")
    evil.sync.participate(False)
    young = [await club.start(name) for name in "de"]
    await club.average(*staying, *young, rounds=1 + ESTABLISHED)
    for each in staying:
        await each.peer.spawn(each.close())
    await club.average(*young, rounds=10)
    for _ in range(40):
        go_on_from(evil, forge(evil, *staying))
    assert evil.sync.head.outranks(young[0].sync.head)
    forged = AskVote(forge(evil, *staying).certificate.to_bytes(), evil.sync.head)
    for _ in range(WAITS_BEFORE_GOING_BACK + 2):
        with pytest.raises(PeerRefusedError, match="does not know the round before"):
            await evil.rpc.call(club.seed.peer.peer_id, VOTE, forged, Vote, 5.0)
        await asyncio.sleep(WAIT_SECONDS)


@simulated(seed=7)
async def test_a_voter_whose_own_state_is_older_than_its_votes_votes_again(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    """As voters in a tree, which are on no roster of the last level."""
    club = Club(network)
    trainers = [await club.start(name, scratch=tmp_path / name) for name in "abcd"]
    await club.average(*trainers, rounds=1 + ESTABLISHED)
    saved, name = [save(each) for each in trainers], trainers[-1].peer.peer_id
    await club.average(*trainers, rounds=2)
    assert await ask_for_votes(trainers[0], forge(*trainers[:-1]).certificate, [name]), (
        "it keeps its tip with this vote"
    )
    a, *others = await club.restart_all(trainers, saved)
    earlier = forge(a, *others[:-1], view=1).certificate
    for _ in range(WAITS_BEFORE_GOING_BACK):
        assert not await ask_for_votes(a, earlier, [name])
        await asyncio.sleep(WAIT_SECONDS)
    assert await ask_for_votes(a, earlier, [name])


# --- a second vote in one round -------------------------------------------------------------------------------------


@pytest.mark.fault(20)
@pytest.mark.parametrize("holder", ["there", "gone"])
@simulated(seed=8)
async def test_a_voter_votes_again_only_if_nobody_holds_what_it_voted_for(
    network: SimulatedNetwork, holder: str
) -> None:
    club, (a, b, c) = await established(network)
    seed = club.seed.peer.peer_id
    first = forge(a, b)
    proofs = await ask_for_votes(a, first.certificate, [seed])
    certified = replace(first.certificate, proofs=tuple(sorted((*first.certificate.proofs, *proofs))))
    assert a.sync.head.table.why_invalid(certified.body, certified.signers) == ""
    second = forge(b, c, tokens=11, view=1).certificate
    go_on_from(a, replace(first, certificate=certified))
    assert b.sync.head == c.sync.head != a.sync.head
    request = AskVote(second.to_bytes())
    with pytest.raises(PeerRefusedError, match="voted for another result"):
        await c.rpc.call(seed, VOTE, request, Vote, 5.0)
    await asyncio.sleep(WAIT_SECONDS)
    if holder == "gone":
        network.crash(a.peer)
        assert await ask_for_votes(c, second, [seed])
        return
    with pytest.raises(PeerRefusedError, match=f"{a.peer.peer_id[-8:]} holds another result"):
        await c.rpc.call(seed, VOTE, request, Vote, 5.0)
    network.crash(a.peer)
    assert await ask_for_votes(c, second, [seed]), "nobody tells of it any more"
