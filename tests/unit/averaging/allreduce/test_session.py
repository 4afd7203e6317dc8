"""The all-reduce of one roster, against a mean computed here; and what it does with members that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Bring, Mask, Request, Signature
from p2ptrain.averaging.commit.attempt import AttemptFailedError, UnencodableError
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.sim.averaging import NUM_VALUES, SPEC, decoded, make_roster, run_all, stop
from tests.support.sim.peers import SWARM, Member, members
from tests.support.sim.simulated import simulated

TOKENS = [10, 20, 70]
MIXED = by_size(get_codec("fp32"), get_codec("bf16"), [15, 10, 30, 5], 10)
"""Its spans lie across the shares of three members."""


def contributors(certificates: Sequence[object]) -> list[tuple[int, ...]]:
    """Whose contributions each certificate counts."""
    return [
        tuple(index for index, *_ in each.body.contributors) for each in certificates if isinstance(each, Certificate)
    ]


def make_vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2), ("int8", 5e-2), ("int4", 0.8), (MIXED, 2e-2), ("topk", 4.0)],
    ids=lambda value: str(getattr(value, "name", value)),
)
@simulated(members, 3, seed=1)
async def test_everybody_holds_the_same_weighted_mean_and_a_certificate(
    swarm: list[Member], codec: str | Codec, tolerance: float
) -> None:
    vectors = make_vectors(3)
    roster = make_roster(swarm, vectors, TOKENS, codec, spec=SPEC.model_copy(update={"aggregation": "mean"}))
    certificates = await run_all(roster)
    expected = sum((v * (t / 100) for v, t in zip(vectors, TOKENS, strict=True)), torch.zeros(NUM_VALUES))
    for each, certificate in zip(roster, certificates, strict=True):
        torch.testing.assert_close(decoded(each), expected, rtol=0, atol=tolerance)
        assert each.attempt.means == roster[0].attempt.means
        assert isinstance(certificate, Certificate)
        assert certificate.body == roster[0].attempt.body
        Certificate.from_bytes(certificate.to_bytes(), SWARM, swarm[0].peer.signer)


@simulated(members, 1, seed=2)
async def test_a_lone_member_certifies_its_own(swarm: list[Member]) -> None:
    roster = make_roster(swarm, make_vectors(1), [10])
    certificate = await roster[0].run()
    await stop(roster)
    assert certificate.body.contributors == ((0, 10, 1),)
    torch.testing.assert_close(decoded(roster[0]), make_vectors(1)[0])


@simulated(members, 3, seed=3)
async def test_a_member_that_never_comes_fails_the_attempt_and_is_named(swarm: list[Member]) -> None:
    *present, absent = make_roster(swarm, make_vectors(3), TOKENS)
    absent.member.rpc.serve_channel(ALLREDUCE, Request, lambda channel, request: asyncio.sleep(60))
    for failure in await run_all(present):
        assert isinstance(failure, AttemptFailedError)
        assert failure.suspects == (absent.member.rpc.peer_id,)
    await stop([absent])
    assert max(each.ended_at for each in present) <= SPEC.round_seconds + 1


@pytest.mark.parametrize("missing", [Mask, Signature])
@simulated(members, 2, seed=4)
async def test_a_member_that_keeps_its_stream_but_stops_talking_is_named(swarm: list[Member], missing: type) -> None:
    roster = make_roster(swarm, make_vectors(2), [10, 10])
    honest, silent = roster
    send = silent.session.serve

    async def serve(channel, request):  # type: ignore[no-untyped-def]
        sending = channel.send
        channel.send = lambda message: asyncio.sleep(60) if isinstance(message, missing) else sending(message)
        await send(channel, request)

    silent.member.rpc.serve_channel(ALLREDUCE, Request, serve)
    other = asyncio.create_task(silent.run())
    with pytest.raises(AttemptFailedError) as failure:
        await honest.run()
    assert failure.value.suspects == (silent.member.rpc.peer_id,)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await stop(roster)


@pytest.mark.parametrize("rule", ["mean", "norm_clip", "centered_clip", "trimmed", "median"])
@simulated(members, 4, seed=8)
async def test_a_thousandfold_contribution_is_left_out_and_its_sender_told(swarm: list[Member], rule: str) -> None:
    vectors, spec = make_vectors(4), SPEC.model_copy(update={"aggregation": rule})
    loud_id = max(member.rpc.peer_id for member in swarm)
    vectors[next(i for i, member in enumerate(swarm) if member.rpc.peer_id == loud_id)] *= 1000
    roster = make_roster(swarm, vectors, [10] * 4, spec=spec)
    assert contributors(await run_all(roster)) == [(0, 1, 2)] * 4
    assert len({each.attempt.body for each in roster}) == 1
    assert float(decoded(roster[0]).abs().max()) < 10
    for each in roster[:3]:
        assert list(each.refused) == [loud_id]
        assert "times the group's median" in each.refused[loud_id]
        assert each.member.rpc.refusals[loud_id, "out of proportion"] == 1
        assert each.result.refusal == ""
    # It takes part otherwise, reduces its share without itself, and knows why.
    assert sorted(roster[3].refused_by) == [0, 1, 2, 3]
    assert "times the group's median" in roster[3].result.refusal


@simulated(members, 4, seed=9)
async def test_one_owner_s_word_is_not_enough_to_drop_a_contribution(swarm: list[Member]) -> None:
    roster = make_roster(swarm, make_vectors(4), [10] * 4)
    share = roster[0].session.share

    def slander() -> frozenset[int]:
        share.refused[2] = "smells"
        return frozenset({0, 1, 3})

    share.judge = slander  # type: ignore[method-assign]
    await run_all(roster)
    assert roster[2].attempt.contributors == (0, 1, 3)
    assert roster[2].refused_by == {0: "smells"}
    assert roster[2].result.refusal == ""


@simulated(members, 2, seed=10)
async def test_members_whose_bits_differ_in_scale_alone_all_count_in_a_pair(swarm: list[Member]) -> None:
    vectors = make_vectors(2)
    vectors[1] *= 1000  # Of two, nobody can say which is right.
    assert contributors(await run_all(make_roster(swarm, vectors, [10, 10]))) == [(0, 1)] * 2


@pytest.mark.parametrize("place", ["own share", "others' shares", "beyond the codec"])
@simulated(members, 2, seed=11)
async def test_an_update_beyond_a_limit_is_this_peer_s_own_fault(swarm: list[Member], place: str) -> None:
    vectors = [torch.zeros(NUM_VALUES), torch.zeros(NUM_VALUES)]
    for vector, member in zip(vectors, swarm, strict=True):
        is_first = member.rpc.peer_id == min(other.rpc.peer_id for other in swarm)
        if place == "beyond the codec":
            vector.fill_(1e6)
        else:
            vector[0 if is_first == (place == "own share") else -1] = 2e6
    failures = await run_all(make_roster(swarm, vectors, [10, 10], "fp16" if place == "beyond the codec" else "fp32"))
    assert all(isinstance(failure, UnencodableError) for failure in failures), failures


@simulated(members, 3, seed=7)
async def test_a_stranger_and_a_second_stream_are_refused(swarm: list[Member]) -> None:
    roster = make_roster(swarm[:2], make_vectors(2), [10, 10])
    target = roster[0].member.rpc.peer_id
    for caller in (swarm[2].rpc, roster[1].member.rpc):
        bring = Bring(roster[0].attempt.roster.group_id, "fp32")
        async with caller.open(target, ALLREDUCE, bring, 2.0), caller.open(target, ALLREDUCE, bring, 2.0):
            await asyncio.sleep(0.5)
        assert roster[0].member.rpc.refusals[caller.peer_id, "ProtocolError"] >= 1
    await stop(roster)


@simulated(members, 3, seed=3)
async def test_a_member_whose_background_task_fails_gives_up_at_once_and_says_so(
    swarm: list[Member], network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    roster = make_roster(swarm, make_vectors(3), TOKENS)

    def judge() -> frozenset[int]:
        raise ZeroDivisionError("a defect")

    roster[0].session.share.judge = judge  # type: ignore[method-assign]
    failure = (await run_all(roster))[0]
    assert isinstance(failure, AttemptFailedError)
    assert "a part of this peer failed (ZeroDivisionError" in str(failure)
    assert roster[0].ended_at < SPEC.round_seconds / 4
    network.loop.errors.clear()
    assert "mask failed" in caplog.text
