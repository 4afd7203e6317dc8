"""A roster's masked all-reduce: the sum of the contributors, exact to the bit, and nothing else for anybody."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from p2ptrain.averaging.allreduce import messages
from p2ptrain.averaging.allreduce import unmasking as module
from p2ptrain.averaging.allreduce.messages import Mask
from p2ptrain.averaging.allreduce.unmasking import AGREED, Unmasking
from p2ptrain.averaging.commit.attempt import AttemptFailedError, UnencodableError
from p2ptrain.averaging.masking import keys
from p2ptrain.averaging.masking.codec import Grid, Stream, add_streams
from p2ptrain.averaging.masking.keys import OWN, PAIR, is_secret_of
from p2ptrain.averaging.masking.sharing import recover
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.masking import uniformity
from tests.support.sim.averaging import RosterMember, decoded, run_all, stop
from tests.support.sim.masking import SECURE, SPEC, make_masked_roster, make_vectors, plain_mean, unmasking
from tests.support.sim.peers import Member, members

Words = npt.NDArray[np.uint32]
LIKELY = 1e-6
"""A test of uniformity fails by chance once in a million times; seeds are fixed."""


def ordered(swarm: Sequence[Member], given: Sequence[Any]) -> list[Any]:
    """Return the values given for the members, in roster order."""
    return [given[i] for i in sorted(range(len(swarm)), key=lambda i: swarm[i].rpc.peer_id)]


def expect_mean(
    roster: Sequence[RosterMember], vectors: Sequence[torch.Tensor], tokens: Sequence[int], counted: Collection[int]
) -> None:
    expected = plain_mean(vectors, tokens, counted)
    for member in roster:
        assert torch.equal(decoded(member), expected)


class Heard:
    """All masked parts that owners receive, by owner and sender."""

    def __init__(self, roster: Sequence[RosterMember]) -> None:
        self.parts: dict[tuple[int, int], Words] = {}
        for owner, member in enumerate(roster):
            self._listen(owner, member)

    def _listen(self, owner: int, member: RosterMember) -> None:
        add = member.session.share.add

        def listening(index: int, part: Any, *given: Any) -> None:
            self.parts[owner, index] = np.frombuffer(bytes(part), np.uint32)
            add(index, part, *given)

        member.session.share.add = listening  # type: ignore[method-assign, assignment]


def separate(network: SimulatedNetwork, *apart: Member) -> None:
    """Cut the links between these members; each still reaches all others."""
    hidden, connected = {each.peer.name for each in apart}, network.connected
    network.connected = lambda first, second: not {first.name, second.name} <= hidden and connected(first, second)  # type: ignore[method-assign]


def leave_out(owner: RosterMember, late: Collection[int]) -> None:
    """Make an owner leave out these members' parts, as if they had come too late."""
    share = owner.session.share

    def judge(trust: Sequence[int]) -> frozenset[int]:
        share.refused.update(dict.fromkeys(late, "was late"))
        return frozenset(range(len(trust))) - frozenset(late)

    share.judge = judge  # type: ignore[method-assign]


# --- the sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "num_values"),
    [
        *((3, 1), (3, 60), (4, 1001), (5, 7), (7, 999), (8, 64)),
        *(pytest.param(count, 333, marks=pytest.mark.slow) for count in (16, 32)),
    ],
)
@simulated(seed=2)
async def test_the_sum_equals_that_of_plain_integers_to_the_bit(
    network: SimulatedNetwork, count: int, num_values: int
) -> None:
    async with members(network, count) as swarm:
        vectors, tokens = make_vectors(count, num_values), [10 + 3 * index for index in range(count)]
        vectors[0][0] = 1e4  # beyond the range
        roster = make_masked_roster(swarm, vectors, tokens)
        certificates = await run_all(roster)
        assert all(isinstance(each, Certificate) for each in certificates), certificates
        expect_mean(roster, ordered(swarm, vectors), ordered(swarm, tokens), range(count))
        assert len({member.attempt.body for member in roster}) == 1


@simulated(members, 5, seed=3)
async def test_values_beyond_the_range_are_told(swarm: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    vectors = make_vectors(5, 60)
    vectors[2][7:10] = 100.0
    await run_all(make_masked_roster(swarm, vectors, [10] * 5))
    assert "3 values of this peer's update were beyond secure_aggregation.range = 16" in caplog.text


@simulated(members, 4, seed=3)
async def test_an_update_that_is_not_finite_is_this_site_s_own_fault(swarm: list[Member]) -> None:
    vectors = make_vectors(4, 60)
    vectors[2][:] = float("nan")
    failures = await run_all(make_masked_roster(swarm, vectors, [10] * 4))
    assert [isinstance(failure, UnencodableError) for failure in ordered(swarm, failures)].count(True) == 1
    assert all(isinstance(failure, AttemptFailedError) for failure in failures)


@simulated(members, 6, seed=4)
async def test_members_that_cannot_reach_each_other_take_part(swarm: list[Member], network: SimulatedNetwork) -> None:
    """Owners forward their key shares, signatures and shares of masks."""
    separate(network, swarm[1], swarm[4])
    vectors, tokens = make_vectors(6, 200), [10] * 6
    roster = make_masked_roster(swarm, vectors, tokens, unreachable=[1, 4])
    for result in await run_all(roster):
        assert isinstance(result, Certificate), result
    expect_mean(roster, ordered(swarm, vectors), tokens, range(6))


@pytest.mark.parametrize("dies", ["before its key shares", "after its key shares"])
@simulated(members, 6, seed=5)
async def test_masks_with_a_member_that_dies_during_its_part_are_recovered(
    swarm: list[Member], network: SimulatedNetwork, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owns no share, so the others need nothing else of it."""
    real = Unmasking.before_part

    async def dying(verifier: Unmasking, channel: Channel) -> None:
        if verifier._session.context.rpc.peer_id == swarm[2].rpc.peer_id:
            if dies == "after its key shares":
                await real(verifier, channel)
                await asyncio.sleep(0.2)
            network.crash(swarm[2].peer)
        await real(verifier, channel)

    monkeypatch.setattr(Unmasking, "before_part", dying)
    vectors, tokens = make_vectors(6, 200), [10, 20, 30, 40, 50, 60]
    roster = make_masked_roster(swarm, vectors, tokens, unreachable=[2])
    lost = next(index for index, each in enumerate(roster) if each.member is swarm[2])
    runs = [each.member.peer.spawn(each.run()) for each in roster]
    results = await asyncio.gather(*runs, return_exceptions=True)
    others = [each for each in roster if each.member is not swarm[2]]
    await stop(others)
    if dies == "before its key shares":  # Nobody could remove the pairs' masks. Nothing was revealed.
        for each in others:
            assert isinstance(each.result.failure, AttemptFailedError)
            assert not each.attempt.is_spent
        return
    assert sum(isinstance(each, Certificate) for each in results) == 5
    counted = [index for index in range(6) if index != lost]
    assert others[0].attempt.contributors == tuple(counted)
    expect_mean(others, ordered(swarm, vectors), ordered(swarm, tokens), counted)


# --- liars ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("liars", [1, 2])
@simulated(members, 6, seed=6)
async def test_false_shares_of_a_few_do_not_stop_the_others(
    swarm: list[Member], liars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = {member.rpc.peer_id for member in swarm[:liars]}
    real = Unmasking._own_shares

    async def false(verifier: Unmasking, contributors: Collection[int]) -> tuple[bytes, ...]:
        shares = await real(verifier, contributors)
        is_lying = verifier._session.context.rpc.peer_id in lying
        return tuple(share[::-1] for share in shares) if is_lying else shares

    monkeypatch.setattr(Unmasking, "_own_shares", false)
    vectors, tokens = make_vectors(6, 60), [10] * 6
    roster = make_masked_roster(swarm, vectors, tokens)
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    expect_mean(roster, ordered(swarm, vectors), tokens, range(6))


@simulated(members, 6, seed=6)
async def test_with_false_shares_of_many_the_attempt_fails(
    swarm: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = {member.rpc.peer_id for member in swarm[:3]}
    real = Unmasking._own_shares

    async def false(verifier: Unmasking, contributors: Collection[int]) -> tuple[bytes, ...]:
        shares = await real(verifier, contributors)
        return tuple(share[::-1] for share in shares) if verifier._session.context.rpc.peer_id in lying else shares

    monkeypatch.setattr(Unmasking, "_own_shares", false)
    roster = make_masked_roster(swarm, make_vectors(6, 60), [10] * 6)
    failures = await run_all(roster)
    assert all(isinstance(failure, AttemptFailedError) for failure in failures)
    assert any("fewer than 4 of 6 members reveal right shares" in str(failure) for failure in failures)
    assert all(member.attempt.is_spent for member in roster)


class Told:
    """Whatever members reveal in their messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.revealed: list[messages.Revealed] = []
        real = Channel.send

        async def listening(channel: Channel, message: object) -> None:
            if isinstance(message, messages.Revealed):
                self.revealed.append(message)
            if isinstance(message, messages.AllRevealed):
                self.revealed += [each for _, each in message.revealed]
            await real(channel, message)

        monkeypatch.setattr(Channel, "send", listening)


@simulated(members, 6, seed=7)
async def test_an_owner_that_tells_two_sets_of_contributors_hears_no_share(
    swarm: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would learn a contribution from shares of both its masks."""
    told = Told(monkeypatch)
    roster = make_masked_roster(swarm, make_vectors(6, 60), [10] * 6)
    liar, victim, deceived = roster[0], 5, {roster[index].member.rpc.peer_id for index in (1, 2, 3)}
    serve = liar.session.incoming.serve

    async def lying(channel: Channel, request: messages.Request, source: Any = None) -> None:
        send = channel.send

        async def other(message: object, data: bytes = b"") -> None:
            if isinstance(message, Mask) and channel.remote in deceived:
                message = Mask(tuple(index for index in message.contributors if index != victim))
            await send(message)

        channel.send = other  # type: ignore[method-assign]
        await serve(channel, request, source)

    liar.session.incoming.serve = lying  # type: ignore[method-assign]
    for result in await run_all(roster):
        assert isinstance(result, AttemptFailedError), result
    sets = {member.attempt.contributors for member in roster}
    assert len(sets) == 2
    assert told.revealed == []
    assert not any(member.attempt.is_spent for member in roster)


@simulated(members, 6, seed=8)
async def test_a_member_signs_one_result_and_reveals_one_kind_of_share_of_each_member(
    swarm: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if others send it signatures of another set of contributors."""
    told = Told(monkeypatch)
    roster = make_masked_roster(swarm, make_vectors(6, 60), [10] * 6)
    honest = unmasking(roster[0])
    other_result = honest._masking.result_hash((0, 1, 2, 3), [b"h" * 32] * 6)
    forged = [(index, roster[index].member.peer.signer.sign(AGREED + other_result)) for index in range(1, 6)]
    honest._add_proofs(forged)
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    honest._add_proofs(forged)
    boxes = [unmasking(each)._own_boxes[0] for each in roster]
    own_kind = [honest._masking.open_box(dealer, box)[1] for dealer, box in enumerate(boxes)]
    pair_kind = [honest._masking.open_box(dealer, box)[0] for dealer, box in enumerate(boxes)]
    shares = {share for each in told.revealed for share in each.shares}
    assert shares.issuperset(own_kind)
    assert shares.isdisjoint(pair_kind)


@pytest.mark.parametrize("how", ["do not decrypt", "are too short"])
@simulated(members, 5, seed=9)
async def test_false_key_shares_are_noticed_before_anything_is_revealed(
    swarm: list[Member], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    roster = make_masked_roster(swarm, make_vectors(5, 60), [10] * 5)
    liar = unmasking(roster[2])
    if how == "are too short":
        monkeypatch.setattr(keys, "split", lambda *_: [b"short"] * 5)
        liar._own_boxes = liar._masking.boxes()
    else:
        liar._own_boxes = tuple(box[::-1] for box in liar._own_boxes)
    for index, failure in enumerate(await run_all(roster)):
        assert isinstance(failure, AttemptFailedError)
        if index != 2:
            assert roster[2].member.rpc.peer_id in failure.suspects
    assert told.revealed == []


@simulated(members, 6, seed=9)
async def test_false_key_shares_that_an_owner_forwards_are_not_blamed_on_their_dealer(
    swarm: list[Member], network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate(network, swarm[1], swarm[4])
    real, honest = Channel.send, swarm[5].rpc.peer_id
    vectors, tokens, forwarded = make_vectors(6, 200), [10] * 6, list[bytes]()
    roster = make_masked_roster(swarm, vectors, tokens, unreachable=[1, 4])
    senders = {id(each.session): each.member.rpc.peer_id for each in roster}

    async def lying(verifier: Unmasking, channel: Channel) -> bool:
        async def send(message: Any, data: bytes = b"") -> None:
            if isinstance(message, messages.ForwardedShares):
                forwarded.extend(box for box in message.boxes if box)
                message = messages.ForwardedShares(tuple(box[::-1] for box in message.boxes))
            await real(channel, message)

        if senders[id(verifier._session)] == honest:
            await asyncio.sleep(1.0)  # the false ones come first
        else:
            channel.send = send  # type: ignore[method-assign]
        return await mean_sent(verifier, channel)

    mean_sent = Unmasking.mean_sent
    monkeypatch.setattr(Unmasking, "mean_sent", lying)
    results = await run_all(roster)
    assert all(isinstance(result, Certificate) for result in results), results
    assert forwarded
    expect_mean(roster, ordered(swarm, vectors), tokens, range(6))


@simulated(members, 5, seed=9)
async def test_an_owner_that_falsifies_its_sum_for_some_hears_no_share(
    swarm: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    roster = make_masked_roster(swarm, make_vectors(5, 60), [10] * 5)
    liar = roster[1]
    serve = liar.session.incoming.serve
    deceived = {roster[index].member.rpc.peer_id for index in (0, 3)}

    async def lying(channel: Channel, request: messages.Request, source: Any = None) -> None:
        send = channel.send_bytes

        async def other(data: Any, **given: Any) -> None:
            await send(bytes(len(data)) if channel.remote in deceived else data, **given)

        channel.send_bytes = other  # type: ignore[method-assign]
        await serve(channel, request, source)

    liar.session.incoming.serve = lying  # type: ignore[method-assign]
    assert all(isinstance(result, AttemptFailedError) for result in await run_all(roster))
    assert told.revealed == []


@simulated(members, 9, seed=10)
async def test_a_sum_of_fewer_than_the_threshold_is_not_unmasked(
    swarm: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    roster = make_masked_roster(swarm, make_vectors(9, 90), [10] * 9)
    for member in roster:
        leave_out(member, {5, 6, 7, 8})
    failures = await run_all(roster)
    assert all(isinstance(failure, AttemptFailedError) for failure in failures)
    assert any("5 members contributed, and 6 must" in str(failure) for failure in failures)
    assert told.revealed == []


# --- what others learn ------------------------------------------------------------------------------------------------


@simulated(members, 5, seed=11)
async def test_owners_receive_nothing_but_noise(swarm: list[Member]) -> None:
    """Even of updates that are all alike, and in relation to each other."""
    vectors = [torch.full((5 * 4000,), 0.5) for _ in swarm]
    roster = make_masked_roster(swarm, vectors, [10] * 5)
    heard = Heard(roster)
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    assert len(heard.parts) == 5 * 4
    for owner in range(5):
        parts = [part for (to, _), part in heard.parts.items() if to == owner]
        for index, part in enumerate(parts):
            assert uniformity(part.view(np.uint8)) > LIKELY
            for other in parts[:index]:
                assert uniformity((part - other).view(np.uint8)) > LIKELY
                assert uniformity((part + other).view(np.uint8)) > LIKELY


@simulated(members, 6, seed=12)
async def test_a_coalition_below_the_threshold_learns_the_sum_of_the_others_alone(swarm: list[Member]) -> None:
    """Three of six, owners of shares among them, strip all masks that they know or recover after the round."""
    size, tokens = 6 * 6000, [10] * 6
    vectors = make_vectors(6, size)
    roster = make_masked_roster(swarm, vectors, tokens)
    heard = Heard(roster)
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    coalition, honest = [0, 2, 3], [1, 4, 5]
    maskings = [unmasking(each)._masking for each in roster]
    assert len(coalition) < maskings[0].threshold
    low, high = roster[0].attempt.bounds[:2]
    stripped = {}
    for victim in honest:
        # Masks with members of the coalition are theirs to know; the victim's own mask was revealed.
        known = [
            maskings[victim]._pair_stream(maskings[each]._common(victim, PAIR), victim, each) for each in coalition
        ]
        shares = {index: each.shares[victim] for index, each in unmasking(roster[0])._revealed.items()}
        seed = recover(shares, maskings[0].threshold, lambda found: True)
        assert seed is not None
        own = maskings[victim]._own_stream(seed)
        words = heard.parts[0, victim].copy()
        add_streams(words, [Stream(each.key, not each.negative) for each in (*known, own)], low)
        stripped[victim] = words
        assert uniformity(words.view(np.uint8)) > LIKELY
        plain = np.empty(high - low, np.uint32)
        Grid(SECURE.range).to_words(ordered(swarm, vectors)[victim][low:high].numpy(), 1 / 6, plain)
        assert uniformity((words - plain).view(np.uint8)) > LIKELY
    for one in honest:  # Also two of the three.
        for other in honest:
            if one < other:
                assert uniformity((stripped[one] + stripped[other]).view(np.uint8)) > LIKELY
    total = stripped[1] + stripped[4] + stripped[5]
    expected = np.zeros(high - low, np.uint32)
    for victim in honest:
        plain = np.empty(high - low, np.uint32)
        Grid(SECURE.range).to_words(ordered(swarm, vectors)[victim][low:high].numpy(), 1 / 6, plain)
        expected += plain
    assert np.array_equal(total, expected), "this sum follows from the mean and from their own contributions"


@simulated(members, 6, seed=13)
async def test_shares_of_a_coalition_below_the_threshold_recover_no_secret(swarm: list[Member]) -> None:
    """Before others reveal theirs; and after, no secret of which they revealed the other one."""
    roster = make_masked_roster(swarm, make_vectors(6, 60), [10] * 6)
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    maskings = [unmasking(each)._masking for each in roster]
    coalition, victim, threshold = [0, 2, 3], 5, maskings[0].threshold
    assert len(coalition) == threshold - 1
    for kind in (PAIR, OWN):
        shares = {
            member: maskings[member].open_box(victim, unmasking(roster[victim])._own_boxes[member])[kind - PAIR]
            for member in coalition
        }
        right = maskings[victim].public(victim, kind)
        assert recover(shares, threshold, lambda found, right=right: is_secret_of(right, found)) is None  # type: ignore[misc]
        if kind == PAIR:  # What the others revealed are shares of the victim's `OWN`.
            told = {index: each.shares[victim] for index, each in unmasking(roster[0])._revealed.items()}
            mixed = {**told, **shares}
            assert recover(mixed, threshold, lambda found, right=right: is_secret_of(right, found)) is None  # type: ignore[misc]
        guess = recover({**shares, victim: bytes(33)}, threshold, lambda found: True)
        assert guess is None or not is_secret_of(right, guess)


@simulated(members, 5, seed=14)
async def test_a_late_part_of_a_member_whose_pairs_were_revealed_stays_hidden(swarm: list[Member]) -> None:
    """It was slow, not dead: its own mask hides its part from those that recovered its masks with all others."""
    vectors = make_vectors(5, 5 * 4000)
    roster = make_masked_roster(swarm, vectors, [10] * 5)
    heard, late = Heard(roster), 4
    for member in roster:
        leave_out(member, {late})
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    expect_mean(roster, ordered(swarm, vectors), [10] * 5, [0, 1, 2, 3])
    maskings = [unmasking(each)._masking for each in roster]
    pairs = [maskings[late]._pair_stream(maskings[late]._common(index, PAIR), late, index) for index in range(4)]
    words = heard.parts[0, late].copy()
    add_streams(words, [Stream(each.key, not each.negative) for each in pairs], 0)
    assert uniformity(words.view(np.uint8)) > LIKELY
    plain = np.empty(len(words), np.uint32)
    Grid(SECURE.range).to_words(ordered(swarm, vectors)[late][: len(words)].numpy(), 1 / 5, plain)
    assert uniformity((words - plain).view(np.uint8)) > LIKELY
    assert not roster[late].attempt.is_spent
    assert roster[0].attempt.is_spent


def test_messages_of_the_largest_group_are_not_too_long() -> None:
    assert module.MAX_SHARES_BYTES > 32 * (32 * 36 + 2100)
    assert SPEC.group_size == 32
