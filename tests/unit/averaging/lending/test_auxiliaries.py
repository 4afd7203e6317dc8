"""What auxiliaries may own, and what they have no say in: shares, tickets, rosters, certificates."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.allreduce.bandwidth import (
    LEAST_LENT,
    MOST_LENT,
    MOST_LENT_UNSEEN,
    Speeds,
    lent_at_most,
    owner_weights,
    plan_shares,
)
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.pending_group import Rally, agrees_with_itself, roster_from_wire
from p2ptrain.averaging.lending.ticket import AuxiliaryTicket
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Roster, Ticket, vote
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.global_batch import GlobalBatch
from p2ptrain.averaging.vector.reduce import OwnShare
from p2ptrain.averaging.vector.streaming import Growing
from p2ptrain.codecs import get_codec
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import AveragingSpec, Manifest, parse_manifest
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.runtime import Runtime
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
VERIFIER = NamedSigner("verifier")
HEAD = Head(3, b"l" * 32, 100, 40, b"d" * 32)
KEY = Key(HEAD.round, HEAD.lineage)
SPEC = AveragingSpec(auxiliaries=2, group_size=8)
CELLS = Cells(8)


def member(peer: str, *, layout: bytes = b"y" * 32, rates: bytes = b"") -> Ticket:
    ticket = Ticket(peer, 3, HEAD.lineage, HEAD.digest, layout, 10, 2, 0, True, rates, peer.encode().ljust(16, b"-"))
    return ticket.signed(SWARM, NamedSigner(peer))


def lender(peer: str, *, layout: bytes = b"y" * 32, round_: int = 3) -> AuxiliaryTicket:
    ticket = AuxiliaryTicket(peer, round_, HEAD.lineage, 0, layout, 0, peer.encode().ljust(16, b"-"))
    return ticket.signed(SWARM, NamedSigner(peer))


MEMBERS = tuple(member(peer) for peer in "abc")
LENDERS = (lender("x"), lender("z"))


# --- shares -----------------------------------------------------------------------------------------------------------


def told(seen: dict[str, float]) -> bytes:
    """What a member says of others' rates."""
    speeds = Speeds()
    for peer, rate in seen.items():
        speeds.observe(peer, 1 << 20, (1 << 20) / rate, 1)
    return speeds.told()


def test_one_or_two_members_need_no_auxiliary() -> None:
    for tickets in (MEMBERS[:1], MEMBERS[:2]):
        assert owner_weights(Roster(tickets, LENDERS), [5] * len(tickets) + [9, 9])[-2:] == [0, 0]


@given(
    st.lists(st.integers(1, 1 << 30), min_size=3, max_size=3), st.lists(st.integers(1, 1 << 40), min_size=2, max_size=2)
)
def test_an_auxiliary_never_adds_to_a_members_work(members: list[int], lent: list[int]) -> None:
    for rates in (b"", told({**dict.fromkeys("abc", 1e6), "x": 1e8, "z": 1e8})):
        tickets = tuple(member(peer, rates=rates) for peer in "abc")
        alone, beside = (
            owner_weights(Roster(tickets), members),
            owner_weights(Roster(tickets, LENDERS), [*members, *lent]),
        )
        assert sum(alone) == sum(beside) == 1
        assert all(with_ <= without for with_, without in zip(beside, alone, strict=False))
        assert LEAST_LENT <= sum(beside[3:]) <= MOST_LENT
        assert beside[3] * lent[1] == beside[4] * lent[0]


def test_auxiliaries_own_half_until_their_speed_is_known_and_never_everything() -> None:
    usual = dict.fromkeys("abc", 1e6)
    unseen = Roster(tuple(member(peer, rates=told(usual)) for peer in "abc"), LENDERS)
    seen = Roster(tuple(member(peer, rates=told({**usual, "x": 1e9, "z": 1e9})) for peer in "abc"), LENDERS)
    for roster, most in ((unseen, MOST_LENT_UNSEEN), (seen, MOST_LENT)):
        rates, weights, bounds = plan_shares(roster, 80_000, 1)
        assert weights == owner_weights(roster, rates)
        assert len(bounds) == 6
        assert sum(weights[3:]) == most
        assert weights[3] == weights[4]


def test_an_auxiliary_that_was_seen_to_be_slow_owns_little() -> None:
    slow = told({**dict.fromkeys("abc", 1e6), "x": 1e4, "z": 1e9})
    weights = owner_weights(*_with_rates(slow))
    assert weights[3] < Fraction(1, 1000)
    assert weights[3] + weights[4] == MOST_LENT


@given(st.integers(3, 20), st.floats(0.01, 4.0))
def test_members_keep_what_makes_both_halves_of_a_round_shortest(count: int, ratio: float) -> None:
    up = 1_000_000
    least = float(lent_at_most([up] * count, [round(count * up / ratio)]))

    def seconds(lent: float) -> float:
        own = (1 - lent) / count
        return (1 - own) + max((count - 1) * own, (1 - own) * ratio)

    best = min(seconds(lent / 1000) for lent in range(63, 876))  # Between the limits.
    assert seconds(least) <= best * 1.001


def _with_rates(rates: bytes) -> tuple[Roster, list[int]]:
    roster = Roster(tuple(member(peer, rates=rates) for peer in "abc"), LENDERS)
    return roster, plan_shares(roster, 80_000, 1)[0]


# --- tickets and rosters ----------------------------------------------------------------------------------------------


def test_a_ticket_survives_the_wire() -> None:
    assert AuxiliaryTicket.from_wire(LENDERS[0].to_wire(), SWARM, VERIFIER) == LENDERS[0]


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "y"},
        {"peer": ""},
        {"round": -1},
        {"round": 4},
        {"round": True},
        {"lineage": b"short"},
        {"layout": "y" * 32},
        {"present": -1},
        {"present": 1 << 20},
        {"bandwidth": 1.5},
        {"bandwidth": -1},
        {"nonce": b"short"},
        {"proof": b"x" * 5000},
    ],
)
def test_a_changed_or_impossible_ticket_is_refused(change: dict[str, object]) -> None:
    ticket = replace(LENDERS[0], **change)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        AuxiliaryTicket.from_wire(ticket.to_wire(), SWARM, VERIFIER)


@pytest.mark.parametrize("garbage", [None, [], "ticket", [1] * 8, {"peer": "x"}, MEMBERS[0].to_wire()])
def test_garbage_in_place_of_a_ticket_is_refused(garbage: object) -> None:
    with pytest.raises(IntegrityError):
        AuxiliaryTicket.from_wire(garbage, SWARM, VERIFIER)


def test_a_ticket_of_another_swarm_is_refused() -> None:
    with pytest.raises(IntegrityError):
        AuxiliaryTicket.from_wire(LENDERS[0].to_wire(), b"t" * 32, VERIFIER)


def test_a_rosters_name_covers_its_auxiliaries_and_its_majority_does_not_count_them() -> None:
    alone, helped = Roster(MEMBERS), Roster(MEMBERS, LENDERS)
    other = Roster(MEMBERS, (LENDERS[0], replace(LENDERS[1], nonce=b"o" * 16)))
    assert len({alone.group_id, helped.group_id, other.group_id}) == 3
    assert alone.majority == helped.majority == 2
    assert helped.owners == ("a", "b", "c", "x", "z")
    assert [helped.index_of(peer) for peer in "cxy"] == [2, 3, -1]
    assert [helped.has_member(index) for index in (2, 3, -1)] == [True, False, False]


def wire(tickets: Sequence[Ticket], lenders: Sequence[AuxiliaryTicket]) -> dict[str, object]:
    return {"tickets": [t.to_wire() for t in tickets], "auxiliaries": [t.to_wire() for t in lenders]}


def test_a_leaders_answer_becomes_the_roster() -> None:
    roster = roster_from_wire(wire(MEMBERS, LENDERS), MEMBERS[1], SPEC, SWARM, VERIFIER)
    assert roster == Roster(MEMBERS, LENDERS)
    assert agrees_with_itself(roster, CELLS)


def test_more_auxiliaries_than_the_manifest_admits_are_refused() -> None:
    with pytest.raises(IntegrityError, match="more than 2"):
        roster_from_wire(wire(MEMBERS, [lender(peer) for peer in "uvw"]), MEMBERS[0], SPEC, SWARM, VERIFIER)
    with pytest.raises(IntegrityError, match="more than 0"):
        roster_from_wire(wire(MEMBERS, LENDERS), MEMBERS[0], AveragingSpec(), SWARM, VERIFIER)


@pytest.mark.parametrize(
    ("tickets", "lenders"),
    [
        (MEMBERS, LENDERS[::-1]),
        (MEMBERS, (LENDERS[0], LENDERS[0])),
        (MEMBERS, (lender("a"),)),
        (MEMBERS, (lender("x", layout=b"n" * 32),)),
        (MEMBERS, (lender("x", round_=4),)),
        (MEMBERS[:2], LENDERS),
    ],
    ids=["not in order", "twice", "a member", "another layout", "another round", "too few members"],
)
def test_a_roster_whose_auxiliaries_do_not_fit_does_not_agree_with_itself(
    tickets: tuple[Ticket, ...], lenders: tuple[AuxiliaryTicket, ...]
) -> None:
    assert not agrees_with_itself(Roster(tickets, lenders), CELLS)


# --- bodies and certificates ------------------------------------------------------------------------------------------


def make_body(auxiliaries: tuple[str, ...] = ("x", "z")) -> Body:
    size = 3 + len(auxiliaries)
    return Body(
        SWARM, 3, HEAD.lineage, 500, 60, b"g" * 32, ("a", "b", "c"), ((0, 100, 8), (2, 100, 9)), "int8/1",
        tuple(range(size + 1)), tuple(hashlib.sha256(bytes([i])).digest() for i in range(size)), 3, 0, 1, (1, 1, 1),
        (), auxiliaries,
    )  # fmt: skip


def certify(body: Body, signers: str) -> bytes:
    proofs = tuple((peer, NamedSigner(peer).sign(vote(body.body_hash))) for peer in signers)
    return Certificate(body, proofs).to_bytes()


def test_only_members_signatures_make_a_certificate() -> None:
    assert Certificate.from_bytes(certify(make_body(), "ac"), SWARM, VERIFIER).body == make_body()
    for signers in ("axz", "xz", "x"):
        with pytest.raises(IntegrityError, match="not a majority"):
            Certificate.from_bytes(certify(make_body(), signers), SWARM, VERIFIER)


def test_auxiliaries_move_neither_the_data_nor_the_count_of_tokens() -> None:
    helped, alone = make_body(), make_body(())
    assert (helped.tokens, helped.next_samples) == (alone.tokens, alone.next_samples)
    assert helped.next_head(b"d" * 32, b"").members == ("a", "b", "c")


@pytest.mark.parametrize(
    "changes",
    [
        {"auxiliaries": ("x",)},
        {"auxiliaries": ("x", "x")},
        {"auxiliaries": ("a", "x")},
        {"auxiliaries": ("x", 3)},
        {"contributors": ((0, 100, 8), (3, 100, 8))},
        {"level": 1, "levels": 2, "children": (b"c" * 32,) * 3},
    ],
    ids=["bounds of another number", "twice", "a member", "no name", "one contributes", "above level 0"],
)
def test_a_body_that_misplaces_auxiliaries_is_malformed(changes: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        Body.from_bytes(replace(make_body(), **changes).to_bytes())  # type: ignore[arg-type]


# --- the leader -------------------------------------------------------------------------------------------------------


def form(
    members: Sequence[Ticket], offers: Sequence[AuxiliaryTicket], *, avoid: str = "", **changes: int
) -> dict[str, dict[str, object]]:
    """What members and auxiliaries hear from a rally to which all of them came."""

    async def main() -> dict[str, dict[str, object]]:
        rally = Rally(HEAD, KEY, SPEC.model_copy(update=changes), GlobalBatch(0, {}))
        answers = {ticket.peer: rally.lend(ticket) for ticket in offers}
        answers |= {ticket.peer: rally.add(ticket, 0.0, frozenset(avoid)) for ticket in members}
        rally.form(lambda peer: peer != "suspect")
        return {peer: await answer for peer, answer in answers.items()}

    return asyncio.run(main())


def test_auxiliaries_that_are_there_come_along_and_everybody_gets_the_same_roster() -> None:
    heard = form(MEMBERS, LENDERS)
    assert all(answer == heard["a"] for answer in heard.values())
    assert roster_from_wire(heard["x"], LENDERS[0], SPEC, SWARM, VERIFIER) == Roster(MEMBERS, LENDERS)


def test_auxiliaries_do_not_make_a_group() -> None:
    async def main() -> None:
        rally = Rally(HEAD, KEY, SPEC, GlobalBatch(0, {}))
        rally.lend(LENDERS[0])
        assert rally.situation(["a", "b"], 0.0).ready == 0
        assert rally.situation(["a", "b"], 0.0).missing == 2
        rally.add(MEMBERS[0], 0.0)
        assert rally.situation(["a", "b"], 0.0).ready == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("offers", "members", "avoid", "mismatch"),
    [
        ([lender("suspect")], MEMBERS, "", False),
        ([lender("x")], MEMBERS, "x", False),
        ([lender("x")], MEMBERS[:2], "", False),
        ([lender("x", layout=b"n" * 32)], MEMBERS, "", True),
        ([lender("a")], MEMBERS, "", None),
    ],
    ids=["a suspect", "avoided by a member", "two members", "another layout", "a member"],
)
def test_a_group_forms_without_auxiliaries_that_do_not_fit(
    offers: list[AuxiliaryTicket], members: Sequence[Ticket], avoid: str, mismatch: bool | None
) -> None:
    heard = form(members, offers, avoid=avoid)
    assert heard["b"]["kind"] == "roster"
    assert "auxiliaries" not in heard["b"]
    if mismatch is not None:
        assert heard[offers[0].peer]["kind"] == "refused"
        assert heard[offers[0].peer]["mismatch"] is mismatch


def test_of_many_offers_as_many_are_taken_as_the_manifest_admits() -> None:
    offers = [lender(f"l{i}") for i in range(10)]
    heard = form(MEMBERS, offers)
    taken = [ticket.peer for ticket in offers if heard[ticket.peer]["kind"] == "roster"]
    assert len(taken) == SPEC.auxiliaries
    assert "auxiliaries" not in form(MEMBERS, offers, auxiliaries=0)["a"]


def record(peer: str, role: str) -> PeerRecord:
    return PeerRecord(
        peer=peer, name=peer, version="0", protocol=1, role=role, state="lending", device="cpu", round=0,
        lineage=bytes(32), digest=bytes(32), lineage_tokens=0, round_tokens=0, loss=None, tokens_per_second=0.0,
        bytes_sent=0, bytes_received=0, reachability="direct", addresses=(), started_at=0.0, last_rounds=(),
    )  # fmt: skip


def test_an_auxiliary_with_which_a_group_broke_waits_longer_each_time_whatever_it_says() -> None:
    runtime = Runtime(random.Random(1))
    now = 1000.0
    runtime.now = lambda: now  # type: ignore[method-assign]
    membership = Membership("own", runtime)
    for sequence, (peer, role) in enumerate((("x", "auxiliary"), ("t", "trainer"))):
        membership.update(record(peer, role), sequence, now + 1e6)
    assert membership.may_lend("x")
    assert not membership.may_lend("t")
    assert not membership.may_lend("unknown")
    assert not membership.expected()
    assert not membership.alive_trainers()
    waits, sequences = [], itertools.count(2)
    for attempt in range(5):
        membership.broke_with("x", "stalled", f"leader{attempt}")
        began = now
        while not membership.may_lend("x"):
            now += 0.5
            membership.update(record("x", "auxiliary"), next(sequences), now + 1e6)
        waits.append(now - began)
    assert waits == sorted(waits)
    assert waits[-1] >= 60
    membership.convict("x")
    assert not membership.may_lend("x")


# --- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_an_auxiliary_adds_nothing_to_a_mean_but_what_its_last_one_lost(kept: bool) -> None:
    codec, size = get_codec("fp32"), 1000
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(size, generator=generator) for _ in range(3)]
    lost = torch.randn(size, generator=generator) * kept
    share = OwnShare(codec, AveragingSpec(aggregation="mean"), lost, 3, 3)
    share.measure_own()
    for index, vector in enumerate(vectors):
        check, part = share.new_check(codec), codec.encode(vector)
        check(memoryview(part), 0, size)
        share.add(index, part, check)
    assert share.judge() == {0, 1, 2}
    mean = Growing(bytearray(codec.encoded_bytes(size)))
    asyncio.run(_reduce(share, mean))
    out = torch.empty(size)
    codec.decode_into(mean.data, out)
    expected = (vectors[0] + vectors[1] + 2 * vectors[2]) / 4 + lost
    torch.testing.assert_close(out, expected)


async def _reduce(share: OwnShare, mean: Growing) -> None:
    await share.reduce(Runtime(random.Random(1)), [0, 1, 2], [10, 10, 20], mean)


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_no_swarm_takes_auxiliaries_unless_its_manifest_says_so() -> None:
    assert Manifest().averaging.auxiliaries == 0


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_auxiliaries_do_not_go_with_codecs_whose_means_wait_for_later_rounds(codec: str) -> None:
    with pytest.raises(Exception, match=f"auxiliaries = 2 does not go with codec = '{codec}'"):
        parse_manifest({"averaging": {"codec": codec, "auxiliaries": 2}}, "run.toml")


@pytest.mark.parametrize(("codec", "fits"), [("int8", True), ("fp16", True), ("int4", False), ("int4a", False)])
def test_where_means_are_checked_auxiliaries_go_with_codecs_that_lose_little(codec: str, fits: bool) -> None:
    values = {"averaging": {"codec": codec, "auxiliaries": 2, "spot_checks": 4}}
    if fits:
        assert parse_manifest(values, "run.toml").averaging.auxiliaries == 2
    else:
        with pytest.raises(Exception, match="with spot_checks does not go"):
            parse_manifest(values, "run.toml")
