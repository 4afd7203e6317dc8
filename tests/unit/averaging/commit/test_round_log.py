"""Results kept, served and fetched."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from p2ptrain.averaging.commit.round_log import MAX_CERTIFICATES, Result, RoundLog
from p2ptrain.averaging.protocol.certificate import Certificate, vote
from p2ptrain.averaging.protocol.certificate_chain import AskChain, Chain
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averaging import NUM_VALUES, SPEC, RosterMember, make_roster, stop
from tests.support.sim.peers import Member, members


async def certify(swarm: list[Member], codec: str | Codec = "fp32") -> tuple[list[RosterMember], Result]:
    """One certified round of all members; kept by the first."""
    vectors = [torch.full((NUM_VALUES,), float(index)) for index in range(len(swarm))]
    roster = make_roster(swarm, vectors, [10] * len(swarm), codec)
    certificate = (await asyncio.gather(*(each.run() for each in roster)))[0]
    await stop(roster, linger=True)
    result = Result(certificate, [mean or b"" for mean in roster[0].attempt.means])
    roster[0].history.add(result)
    return roster, result


def with_rounds(count: int) -> AveragingSpec:
    return SPEC.model_copy(update={"history_rounds": count})


def following(result: Result, swarm: list[Member]) -> Result:
    """A made-up result of the round after, signed by all."""
    body = result.certificate.body
    after = replace(
        body, round=body.round + 1, lineage=body.next_lineage, tokens_before=body.tokens_before + body.tokens
    )
    proofs = tuple((m.rpc.peer_id, m.peer.signer.sign(vote(after.body_hash))) for m in swarm)
    return Result(Certificate(after, tuple(sorted(proofs))), result.means)


def test_a_laggard_gets_the_chain_and_the_means() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            second = following(result, swarm)
            roster[0].history.add(second)
            source, reader = roster[0].member.rpc.peer_id, roster[1].history
            chain = await reader.certificates_after(source, result.certificate.body.lineage)
            assert [certificate.body.round for certificate in chain] == [0, 1]
            body = result.certificate.body
            assert await reader.fetch_means([source], body, 5.0) == result.means
            assert await reader.certificates_after(source, b"?" * 32) == []

    simulate(main, seed=1)


def test_means_in_several_codecs_are_fetched_and_those_cut_within_blocks_refused() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            codec = by_size(get_codec("fp32"), get_codec("bf16"), [15, 10, 35], 10)
            roster, result = await certify(swarm, codec)
            source, reader = roster[0].member.rpc.peer_id, roster[1].history
            body = result.certificate.body
            assert await reader.fetch_means([source], body, 5.0) == result.means
            other = by_size(get_codec("int8"), get_codec("bf16"), [15, 10, 35], 10)
            reader._parts = [(other, NUM_VALUES)]
            misfit = replace(body, codec=f"{other.name}/1")
            with pytest.raises(ProtocolError, match="within blocks"):
                await reader.fetch_means([source], misfit, 5.0)

    simulate(main, seed=6)


def test_old_certificates_are_forgotten_one_by_one() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            history = roster[0].history
            results = [result]
            for _ in range(MAX_CERTIFICATES + 1):
                results.append(following(results[-1], swarm))
            for each in results:
                history.add(each)
            lineages = [each.certificate.body.lineage for each in results]
            assert history.proofs(lineages[1]) == []
            assert len(history.proofs(lineages[2])) == MAX_CERTIFICATES

    simulate(main, seed=6)


def test_the_newest_result_is_kept_whatever_its_size_and_the_oldest_go_first() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            member = roster[1].member
            context, parts = roster[1].session.context, [(roster[1].attempt.codec, NUM_VALUES)]
            history = RoundLog(replace(context, spec=with_rounds(2)), parts, 10**9)
            results = [result]
            for _ in range(3):
                results.append(following(results[-1], swarm))
            for each in results:
                history.add(each)
            assert history.chain(results[1].certificate.body.lineage) == []
            assert len(history.chain(results[2].certificate.body.lineage)) == 2
            assert history.proofs(results[0].certificate.body.lineage) == [each.certificate for each in results]
            start, peer = results[0].certificate.body.lineage, member.rpc.peer_id
            asker = roster[0].history
            assert await asker.certificates_after(peer, start) == []
            assert len(await asker.certificates_after(peer, start, proofs=True)) == 4
            tiny = RoundLog(replace(context, spec=with_rounds(8)), parts, 1)
            for each in results:
                tiny.add(each)
            assert tiny.chain(results[2].certificate.body.lineage) == []
            assert len(tiny.chain(results[3].certificate.body.lineage)) == 1
            tiny.clear()
            assert tiny.chain(results[3].certificate.body.lineage) == []
            assert tiny.proofs(results[0].certificate.body.lineage) == []

    simulate(main, seed=2)


@pytest.mark.parametrize("num_fit", [1, 2, 3])
def test_as_many_results_are_kept_as_fit_into_the_bytes(num_fit: int) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            max_bytes = (num_fit + 1) * result.num_bytes - 1
            context = replace(roster[1].session.context, spec=with_rounds(8))
            history = RoundLog(context, [(roster[1].attempt.codec, NUM_VALUES)], max_bytes)
            results = [result]
            for _ in range(4):
                results.append(following(results[-1], swarm))
            for each in results:
                history.add(each)
            kept = [each for each in results if history.chain(each.certificate.body.lineage)]
            assert kept == results[-num_fit:]

    simulate(main, seed=2)


def test_a_result_that_is_not_kept_is_refused_with_the_reason() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            roster[0].history.clear()
            roster[0].history.attempts.clear()
            with pytest.raises(PeerRefusedError, match="not kept here"):
                await roster[1].history.fetch_means([roster[0].member.rpc.peer_id], result.certificate.body, 5.0)

    simulate(main, seed=3)


def test_a_source_that_sends_other_means_is_found_out() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            roster[0].history.add(Result(result.certificate, [bytes(len(mean)) for mean in result.means]))
            source, reader = roster[0].member.rpc.peer_id, roster[1].history
            with pytest.raises(IntegrityError, match="do not match its certificate"):
                await reader.fetch_means([source], result.certificate.body, 5.0)
            reader._parts = [(roster[1].attempt.codec, NUM_VALUES + 1)]
            with pytest.raises(ProtocolError, match="another size"):
                await reader.fetch_means([source], result.certificate.body, 5.0)

    simulate(main, seed=4)


@pytest.mark.parametrize("certificate", [b"garbage", b""])
def test_a_malformed_certificate_is_a_protocol_error(certificate: bytes) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, _ = await certify(swarm)

            async def lie(peer: str, request: AskChain) -> Chain:
                return Chain((certificate,))

            roster[0].member.rpc.serve("history.after", AskChain, lie)
            with pytest.raises(ProtocolError):
                await roster[1].history.certificates_after(roster[0].member.rpc.peer_id, b"l" * 32)

    simulate(main, seed=5)


def test_a_history_that_does_not_connect_is_refused() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            roster, result = await certify(swarm)
            certificate = following(result, swarm).certificate.to_bytes()

            async def lie(peer: str, request: AskChain) -> Chain:
                return Chain((certificate,))

            roster[0].member.rpc.serve("history.after", AskChain, lie)
            with pytest.raises(ProtocolError, match="does not connect"):
                await roster[1].history.certificates_after(
                    roster[0].member.rpc.peer_id, result.certificate.body.lineage
                )

    simulate(main, seed=6)
