"""Results kept, served and fetched."""

import asyncio
from dataclasses import replace

import pytest
import torch

from p2ptrain.averaging.commit import round_log
from p2ptrain.averaging.commit.result_chunks import ChunkHashes
from p2ptrain.averaging.commit.round_log import MAX_CERTIFICATES, Result, RoundLog
from p2ptrain.averaging.protocol.certificate import AskChain, Certificate, Chain, head_through, vote
from p2ptrain.averaging.protocol.table import Census
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.rpc.channel import Channel
from tests.support.coroutines import simulated
from tests.support.sim.averaging import HEAD, NUM_VALUES, SPEC, RosterMember, make_roster, stop
from tests.support.sim.peers import Member, members


async def certify(swarm: list[Member], codec: str | Codec = "fp32") -> tuple[list[RosterMember], Result]:
    """One certified round of all members; kept by the first."""
    vectors = [torch.full((NUM_VALUES,), float(index)) for index in range(len(swarm))]
    roster = make_roster(swarm, vectors, [10] * len(swarm), codec)
    certificate = (await asyncio.gather(*(each.run() for each in roster)))[0]
    await stop(roster, linger=True)
    result = Result(certificate, [mean or b"" for mean in roster[0].attempt.means])
    roster[0].history.add(result, HEAD)
    return roster, result


def following(swarm: list[Member], result: Result, count: int = 1) -> list[Result]:
    """A result, and made-up ones of as many rounds after it, signed by all."""
    results, table = [result], HEAD.table.check(result.certificate)
    bits = bytes([(1 << len(swarm)) - 1])
    for _ in range(count):
        body = results[-1].certificate.body
        after = replace(
            body, round=body.round + 1, lineage=body.next_lineage, tokens_before=body.tokens_before + body.tokens,
            census=Census(bits, bits, bytes(1)),
        )  # fmt: skip
        table = table.after(after)
        after = replace(after, table=table.hash)
        proofs = sorted((m.rpc.peer_id, m.peer.signer.sign(vote(after.body_hash))) for m in swarm)
        results.append(Result(Certificate(after, tuple(proofs)), result.means))
    return results


def lineages(results: list[Result]) -> list[bytes]:
    """The lineage that each result extends."""
    return [each.certificate.body.lineage for each in results]


def filled(each: RosterMember, results: list[Result], max_rounds: int, max_bytes: int, full: int = 0) -> RoundLog:
    """A history of a member that all results were added to."""
    spec = SPEC.model_copy(update={"history_rounds": max_rounds})
    context = replace(each.session.context, spec=spec)
    history = RoundLog(context, [(each.attempt.codec, NUM_VALUES)], max_bytes)
    for result in results:
        history.add(result, replace(HEAD, full=full))
    return history


@simulated(members, 2, seed=6)
async def test_means_in_several_codecs_are_fetched_and_those_cut_within_blocks_refused(swarm: list[Member]) -> None:
    codec = by_size(get_codec("fp32"), get_codec("bf16"), [15, 10, 35], 10)
    roster, result = await certify(swarm, codec)
    source, reader, body = roster[0].member.rpc.peer_id, roster[1].history, result.certificate.body
    assert await reader.fetch_means([source], body, 5.0) == result.means
    other = by_size(get_codec("int8"), get_codec("bf16"), [15, 10, 35], 10)
    reader._parts = [(other, NUM_VALUES)]
    with pytest.raises(ProtocolError, match="within blocks"):
        await reader.fetch_means([source], replace(body, codec=f"{other.name}/1"), 5.0)


@simulated(members, 2, seed=6)
async def test_old_certificates_are_forgotten_one_by_one(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    results = following(swarm, result, MAX_CERTIFICATES + 1)
    history = filled(roster[1], results, 8, 10**9, full=results[-1].certificate.body.round + 1)
    assert [len(history.proofs(lineage)) for lineage in lineages(results)[1:3]] == [0, MAX_CERTIFICATES]


@pytest.mark.parametrize("signatures", [2 * MAX_CERTIFICATES + 1, 10**9])
@simulated(members, 2, seed=6)
async def test_those_since_the_newest_full_round_are_kept_for_longer_but_not_without_bound(
    swarm: list[Member], signatures: int
) -> None:
    roster, result = await certify(swarm)
    results = following(swarm, result, MAX_CERTIFICATES + 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_log, "MAX_REDUCED_SIGNATURES", signatures)
        history = filled(roster[1], results, 8, 10**9)
    lengths = [len(history.proofs(lineage)) for lineage in lineages(results)]
    assert max(lengths) == (MAX_CERTIFICATES if signatures < 10**9 else len(results))


@simulated(members, 2, seed=6)
async def test_a_chain_is_looked_for_from_the_best_start_that_the_peer_knows_and_through_several_replies(
    swarm: list[Member],
) -> None:
    roster, result = await certify(swarm)
    results = following(swarm, result, 6)
    filled(roster[1], results, 8, 10**9)
    asker, peer = roster[0].history, roster[1].member.rpc.peer_id
    certificates = [each.certificate for each in results]
    unknown = replace(HEAD, lineage=b"u" * 32)
    later, earlier = (head_through(HEAD, certificates[:count]) for count in (3, 2))
    goal = certificates[-1].body.next_lineage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_log, "MAX_CHAIN_BYTES", 1)
        found = await asker.certificates_after(peer, unknown, later, earlier, proofs=True, until=goal)
        assert found == certificates[3:]
        assert await asker.certificates_after(peer, earlier, proofs=True) == certificates[2:3]
    assert await asker.certificates_after(peer, unknown, proofs=True, until=goal) == []


@simulated(members, 2, seed=2)
async def test_the_oldest_results_go_first_and_their_certificates_stay(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    results = following(swarm, result, 3)
    history, starts = filled(roster[1], results, 2, 10**9), lineages(results)
    assert [len(history.chain(start)) for start in starts] == [0, 0, 2, 1]
    assert history.proofs(starts[0]) == [each.certificate for each in results]
    asker, peer = roster[0].history, roster[1].member.rpc.peer_id
    start = replace(HEAD, lineage=starts[0])
    assert await asker.certificates_after(peer, start) == []
    assert len(await asker.certificates_after(peer, start, proofs=True)) == 4
    history.begin_at(HEAD)
    assert not any(history.chain(start) or history.proofs(start) for start in starts)


@pytest.mark.parametrize("num_fit", [0, 1, 2, 3])
@simulated(members, 2, seed=2)
async def test_as_many_results_are_kept_as_fit_into_the_bytes_and_the_newest_always(
    swarm: list[Member], num_fit: int
) -> None:
    roster, result = await certify(swarm)
    results = following(swarm, result, 4)
    history = filled(roster[1], results, 8, (num_fit + 1) * result.num_bytes - 1)
    kept = [each for each in results if history.chain(each.certificate.body.lineage)]
    assert kept == results[-max(1, num_fit) :]


@simulated(members, 2, seed=3)
async def test_a_result_that_is_not_kept_is_refused_with_the_reason(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    roster[0].history.begin_at(HEAD)
    roster[0].history.attempts.clear()
    with pytest.raises(PeerRefusedError, match="not kept here"):
        await roster[1].history.fetch_means([roster[0].member.rpc.peer_id], result.certificate.body, 5.0)


@simulated(members, 2, seed=4)
async def test_a_source_that_sends_other_means_is_found_out(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    roster[0].history.add(Result(result.certificate, [bytes(len(mean)) for mean in result.means]), HEAD)
    source, reader = roster[0].member.rpc.peer_id, roster[1].history
    with pytest.raises(IntegrityError, match="do not match its certificate"):
        await reader.fetch_means([source], result.certificate.body, 5.0)
    reader._parts = [(roster[1].attempt.codec, NUM_VALUES + 1)]
    with pytest.raises(ProtocolError, match="another size"):
        await reader.fetch_means([source], result.certificate.body, 5.0)


@pytest.mark.fault(43)
@simulated(members, 2, seed=4)
async def test_more_hashes_than_a_result_has_chunks_are_not_read(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    source, reader = roster[0].member.rpc, roster[1].history

    async def lie(channel: Channel, request: Open) -> None:
        await channel.send(ChunkHashes((bytes(32),) * 10_000))

    source.serve_channel("chunks.result", Open, lie)
    with pytest.raises(IntegrityError, match="bytes"):
        await reader.fetch_means([source.peer_id], result.certificate.body, 5.0)


@simulated(members, 2, seed=5)
async def test_a_chain_that_is_malformed_or_does_not_connect_is_refused(swarm: list[Member]) -> None:
    roster, result = await certify(swarm)
    gap = following(swarm, result)[1].certificate.to_bytes()
    for certificate, refusal in ((b"garbage", "sent a history"), (b"", "sent a history"), (gap, "does not connect")):

        async def lie(peer: str, request: AskChain, certificate: bytes = certificate) -> Chain:
            return Chain((certificate,))

        roster[0].member.rpc.serve("history.after", AskChain, lie)
        with pytest.raises(ProtocolError, match=refusal):
            await roster[1].history.certificates_after(roster[0].member.rpc.peer_id, HEAD)
