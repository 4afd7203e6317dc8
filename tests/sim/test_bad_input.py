"""Every kind of bad input that a member of a group can send: refused before it counts, told of, and gone on without.

Four members, of which the first owns no share and sends its parts by hand. The others' round is as if it were not
there: the same attempt, without a wait, and bit for bit the mean of the other three.
"""

import asyncio
import contextlib
import math
import re
import struct
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Bring, FromOwner, Request
from p2ptrain.averaging.allreduce.streams import ANOTHER_RESULT, BAD_ANSWER, BAD_SIGNATURE
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.codecs import PartList, get_codec
from p2ptrain.errors import PeerError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.lying import LyingChannel
from tests.support.sim.averaging import NUM_VALUES, SPEC, RosterMember, make_roster, stop
from tests.support.sim.hostile import BAD_MESSAGES
from tests.support.sim.peers import members

BOUNDS = (0, 0, 20, 40, NUM_VALUES)
HONEST = (1, 2, 3)
EXACT = SPEC.model_copy(update={"aggregation": "mean"})

Send = Callable[[Channel, bytes], Awaitable[None]]
"""Sends something in place of a part, of which the right bytes are given."""


def changed(change: Callable[[bytes], bytes]) -> Send:
    async def send(channel: Channel, part: bytes) -> None:
        await channel.send_bytes(change(part))

    return send


def number(value: float, at: int = 0) -> Send:
    """An fp32 number somewhere in the part: a value, or a block's scale."""
    return changed(lambda part: part[:at] + struct.pack("<f", value) + part[at + 4 :])


async def last_half_first(channel: Channel, part: bytes) -> None:
    await channel.send_bytes(part[len(part) // 2 :])
    await channel.send_bytes(part[: len(part) // 2])


async def half_of_it_twice(channel: Channel, part: bytes) -> None:
    half = part[: len(part) // 2]
    await channel.send_bytes(half, more=True)
    await channel.send_bytes(half, more=True)
    await channel.send_bytes(part[len(part) // 2 :])


async def a_message_in_the_middle(channel: Channel, part: bytes) -> None:
    await channel.send_bytes(part[: len(part) // 2], more=True)
    await channel.send({"mask": [0, 1, 2, 3]})
    await channel.send_bytes(part[len(part) // 2 :])


@dataclass(frozen=True)
class Case:
    """What is sent with a part, and how the refusal reads; ``named`` is another codec than the round's."""

    send: Send
    reason: str
    codec: str = "fp32"
    named: str | None = None


CASES = {
    "truncated": Case(changed(lambda part: part[:-1]), "bytes"),
    "empty": Case(changed(lambda part: b""), "bytes"),
    "oversized": Case(changed(lambda part: part + part), "bytes"),
    "far too long": Case(changed(lambda part: part * 10_000), "bytes"),
    "chunks reordered": Case(last_half_first, "bytes"),
    "a chunk duplicated": Case(half_of_it_twice, "bytes"),
    "a message among chunks": Case(a_message_in_the_middle, "message"),
    "not a number": Case(number(math.nan, at=8), "finite"),
    "infinite": Case(number(math.inf), "finite"),
    "minus infinite": Case(number(-math.inf), "finite"),
    "beyond the bound": Case(number(1.02e6), "max_value"),
    "below the bound": Case(number(-1.02e6), "max_value"),
    "infinite in fp16": Case(changed(lambda part: b"\x00\x7c" + part[2:]), "finite", "fp16"),
    "not a number in bf16": Case(changed(lambda part: b"\xc0\x7f" + part[2:]), "finite", "bf16"),
    "scale not a number": Case(number(math.nan), "scale", "int8"),
    "scale infinite": Case(number(math.inf), "scale", "int8"),
    "scale negative": Case(number(-1.0), "scale", "int4"),
    "scale beyond the bound": Case(number(1e7), "max_value", "int8"),
    "topk scale infinite": Case(number(math.inf), "scale|finite", "topk"),
    **{
        f"in codec {name!r}": Case(changed(lambda part: part), "not allowed beside int8", "int8", name)
        for name in ("zip9", "fp32/2", "", "fp32", "bf16")
    },
}


async def run_roster(
    network: SimulatedNetwork, codec: str, evil: Callable[[RosterMember, RosterMember], Coroutine[Any, Any, None]]
) -> tuple[list[RosterMember], list[Certificate]]:
    """A roster whose first member does ``evil(itself, other)`` to each other instead of taking part."""
    async with members(network, 4) as swarm:
        generator = torch.Generator().manual_seed(3)
        vectors = [torch.randn(NUM_VALUES, generator=generator) for _ in swarm]
        roster = make_roster(swarm, vectors, [10] * 4, codec, BOUNDS, spec=EXACT)
        others = [asyncio.create_task(evil(roster[0], roster[i])) for i in HONEST]
        certificates = await asyncio.gather(*(roster[i].run() for i in HONEST))
        network.record("certified")
        await stop(roster, linger=True)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return roster, certificates


def assert_went_on_without_it(roster: list[RosterMember], certificates: list[Certificate]) -> None:
    """The three others hold one certificate of their own three, and the mean that they alone make."""
    assert {certificate.body for certificate in certificates} == {certificates[0].body}
    assert [index for index, *_ in certificates[0].body.contributors] == [*HONEST]
    for low, high, owner in ((0, 20, 1), (20, 40, 2), (40, NUM_VALUES, 3)):
        codec, exact = roster[1].attempt.codec, torch.zeros(high - low)
        if codec.sparse:  # Then the mean is the list of the parts.
            parts = [codec.encode(roster[i].session.contribution.vector[low:high]) for i in HONEST]
            listed = bytearray(PartList(codec, len(parts)).encoded_bytes(high - low))
            PartList(codec, len(parts)).write([1 / 3] * 3, parts, listed)
            assert all(roster[i].attempt.means[owner] == listed for i in HONEST)
            continue
        order = [owner, *(i for i in HONEST if i != owner)]
        for i in order:
            values = roster[i].session.contribution.vector[low:high]
            if i == owner:
                exact = values * torch.tensor(1 / 3)
            else:
                codec.accumulate_into(codec.encode(values), 1 / 3, exact)
        for i in HONEST:
            assert roster[i].attempt.means[owner] == codec.encode(exact)


def certified_at(network: SimulatedNetwork) -> float:
    return next(float(str(event[0])) for event in network.trace if event[1] == "certified")


async def bring(rpc: Rpc, other: RosterMember, header: object, send: Send, part: bytes) -> None:
    """Open a stream as a member does, send something for a part, and wait for the refusal."""
    async with rpc.open(other.member.rpc.peer_id, ALLREDUCE, header, 5.0) as channel:
        await send(channel, part)
        while True:
            await channel.receive(FromOwner, 60.0)


def part_for(evil: RosterMember, other: RosterMember) -> bytes:
    attempt = evil.attempt
    index = attempt.roster.index_of(other.member.rpc.peer_id)
    return bytes(attempt.codec.encode(evil.session.contribution.vector[BOUNDS[index] : BOUNDS[index + 1]]))


@pytest.mark.fault(32)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@simulated(seed=20)
async def test_a_bad_part_is_refused_before_it_counts_and_the_round_goes_on_at_once(
    network: SimulatedNetwork, case: Case
) -> None:
    async def evil(itself: RosterMember, other: RosterMember) -> None:
        header = Bring(itself.attempt.roster.group_id, case.codec if case.named is None else case.named)
        with pytest.raises(PeerError):
            await bring(itself.member.rpc, other, header, case.send, part_for(itself, other))

    roster, certificates = await run_roster(network, case.codec, evil)
    assert_went_on_without_it(roster, certificates)
    peer = roster[0].member.rpc.peer_id
    for i in HONEST:
        assert list(roster[i].refused) == [peer]
        assert re.search(case.reason, roster[i].refused[peer])
        assert roster[i].member.rpc.refusals[peer, "ProtocolError"] == 1
    assert certified_at(network) < SPEC.grace_seconds, "nobody waited for what will not come"


@simulated(seed=22)
async def test_a_part_that_is_cut_off_is_waited_for_no_longer_than_a_late_one(network: SimulatedNetwork) -> None:
    """That a stream ends is no lie, and its other end may only have lost its network: nobody is blamed."""

    async def evil(itself: RosterMember, other: RosterMember) -> None:
        header, part = Bring(itself.attempt.roster.group_id, "fp32"), part_for(itself, other)
        async with itself.member.rpc.open(other.member.rpc.peer_id, ALLREDUCE, header, 5.0) as channel:
            await channel.send_bytes(part[: len(part) // 2], more=True)

    roster, certificates = await run_roster(network, "fp32", evil)
    assert_went_on_without_it(roster, certificates)
    assert all(roster[i].refused == {} for i in HONEST)
    assert certified_at(network) < SPEC.grace_seconds + 2.0


@pytest.mark.parametrize("streams", [1, 2])
@simulated(seed=23)
async def test_a_part_that_comes_twice_counts_once(network: SimulatedNetwork, streams: int) -> None:
    """On the stream that brought it, or on another."""

    async def evil(itself: RosterMember, other: RosterMember) -> None:
        header, part = Bring(itself.attempt.roster.group_id, "fp32"), part_for(itself, other)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(streams):
                peer = other.member.rpc.peer_id
                channel = await stack.enter_async_context(itself.member.rpc.open(peer, ALLREDUCE, header, 5.0))
                with contextlib.suppress(PeerError):
                    for _ in range(3 - streams):
                        await channel.send_bytes(part)
            await asyncio.sleep(60.0)

    roster, certificates = await run_roster(network, "fp32", evil)
    assert {certificate.body for certificate in certificates} == {certificates[0].body}
    assert [index for index, *_ in certificates[0].body.contributors] == [0, 1, 2, 3]
    exact = torch.stack([each.session.contribution.vector for each in roster]).double().mean(0)
    for i in HONEST:
        for owner, (low, high) in ((1, (0, 20)), (2, (20, 40)), (3, (40, NUM_VALUES))):
            mean, found = roster[i].attempt.means[owner], torch.empty(high - low)
            assert mean is not None
            get_codec("fp32").decode_into(mean, found)
            torch.testing.assert_close(found.double(), exact[low:high], rtol=0, atol=1e-6)
        assert roster[i].member.rpc.refusals[roster[0].member.rpc.peer_id, "ProtocolError"] == streams - 1


def test_a_scale_of_zero_makes_zeros_whatever_the_codes() -> None:
    """No division by it: what such a part adds is nothing."""
    for name in ("int8", "int4"):
        codec, vector = get_codec(name), torch.linspace(-1, 1, 300)
        encoded, out, total = codec.encode(vector), torch.full((300,), math.nan), torch.ones(300)
        for block in range(-(-300 // codec.block_size)):
            struct.pack_into("<f", encoded, codec.encoded_bytes(block * codec.block_size), 0.0)
        codec.validate(encoded, 300)
        codec.decode_into(encoded, out)
        codec.accumulate_into(encoded, 0.5, total)
        assert torch.equal(out, torch.zeros(300))
        assert torch.equal(total, torch.ones(300))


WELL_FORMED = {"another body": ANOTHER_RESULT, "a forged signature": BAD_SIGNATURE}


@pytest.mark.parametrize("name", BAD_MESSAGES)
@simulated(seed=24)
async def test_what_an_owner_answers_wrongly_is_counted_against_it(network: SimulatedNetwork, name: str) -> None:
    lie, cause = BAD_MESSAGES[name], WELL_FORMED.get(name, BAD_ANSWER)
    async with members(network, 4) as swarm:
        roster = make_roster(swarm, [torch.randn(NUM_VALUES) for _ in swarm], [10] * 4)
        evil, serve = roster[0], roster[0].session.incoming.serve
        for each in roster[1:]:  # What it signs is there before the others have signatures enough.
            network.set_latency(evil.member.peer, each.member.peer, 0.001)

        async def lying(channel: Channel, request: Request) -> None:
            await serve(LyingChannel(channel, lie, lambda data: data), request)  # type: ignore[arg-type]

        evil.member.rpc.serve_channel(ALLREDUCE, Request, lying)
        runs = [asyncio.create_task(each.run()) for each in roster]
        results = await asyncio.gather(*runs[1:], return_exceptions=True)
        await stop(roster, linger=True)
        runs[0].cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        peer = evil.member.rpc.peer_id
        assert [roster[i].member.rpc.refusals[peer, cause] for i in HONEST] == [1, 1, 1]
        for result in results:
            if "mask" in name:  # Who contributes cannot be agreed on without it: another attempt is due.
                assert isinstance(result, AttemptFailedError)
                assert result.suspects == (peer,)
            else:  # Its signature is not needed.
                assert isinstance(result, Certificate)
                assert peer not in dict(result.proofs)
