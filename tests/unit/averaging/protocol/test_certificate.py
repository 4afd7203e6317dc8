"""Tickets, bodies and certificates bind a round, and a certificate extends one lineage."""

import contextlib
import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Roster, Ticket, genesis, vote
from p2ptrain.averaging.protocol.table import MAX_COUNT, Census, founding_table
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.admission import OpenGate
from p2ptrain.network.schema import from_wire, to_wire
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
VERIFIER = NamedSigner("verifier")


def make_ticket(peer: str, **fields: Any) -> Ticket:
    ticket = Ticket(peer, 3, b"l" * 32, b"d" * 32, b"y" * 32, 100, 8, 0, True, b"", b"n" * 16)
    return replace(ticket, **fields).signed(SWARM, NamedSigner(peer))


def make_body(members: str = "abc", contributors: tuple[int, ...] = (0, 2)) -> Body:
    size = len(members)
    return Body(
        SWARM, 3, b"l" * 32, b"d" * 32, 500, 60, b"g" * 32, tuple(members),
        tuple((i, 100, 8 + i) for i in contributors), "int8/1", tuple(range(size + 1)),
        tuple(hashlib.sha256(bytes([i])).digest() for i in range(size)),
        size, 0, 1, (1,) * size, table=bytes(32),
    )  # fmt: skip


def certify(body: Body, signers: str, signed: Body | None = None) -> bytes:
    """The body in wire form, with signatures of it, or of another one."""
    message = vote((signed or body).body_hash)
    return Certificate(body, tuple((peer, NamedSigner(peer).sign(message)) for peer in signers)).to_bytes()


def verified(data: bytes, swarm: bytes = SWARM) -> Body:
    return Certificate.from_bytes(data, swarm, VERIFIER).body


def take(values: object, swarm: bytes = SWARM) -> Ticket:
    """Return a ticket as a leader takes it."""
    ticket = from_wire(Ticket, values)
    ticket.verify(swarm, VERIFIER)
    ticket.check(OpenGate(), 1e9)
    return ticket


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "b"}, {"tokens": 101}, {"round": 4}, {"tokens": 0}, {"tokens": math.nan}, {"lineage": b"short"},
        {"nonce": b""}, {"samples": -1}, {"proof": b"x" * 5000}, {"level": 1}, {"peers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_changed_or_impossible_ticket_is_refused(change: dict[str, object]) -> None:
    ticket = make_ticket("a")
    assert take(to_wire(ticket)) == ticket
    for values, swarm in (({**to_wire(ticket), **change}, SWARM), (to_wire(ticket), b"t" * 32)):
        with pytest.raises(IntegrityError):
            take(values, swarm)


class Door(OpenGate):
    """Lets in whoever shows its own name, with 100 tokens at most."""

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        return "" if credential == peer.encode() else "it has no pass"

    def cap(self, peer: str) -> float:
        return 100


@pytest.mark.fault(37)
def test_a_ticket_shows_that_its_peer_or_each_that_joins_by_it_is_admitted() -> None:
    census = Census(joining=("a", "b"))
    upper = {"level": 1, "child": b"c" * 32, "peers": 2, "census": census, "tokens": 150}
    for changes in ({"credentials": (b"a",)}, {**upper, "credentials": (b"a", b"b")}):
        replace(make_ticket("a"), **changes).check(Door(), 1e9)
    for changes in (
        {},
        {"credentials": (b"b",)},
        {**upper, "credentials": (b"a",)},
        {**upper, "credentials": (b"b", b"a")},
    ):
        with pytest.raises(IntegrityError, match="no pass"):
            replace(make_ticket("a"), **changes).check(Door(), 1e9)
    with pytest.raises(IntegrityError, match="100 tokens of the peer's pass"):
        replace(make_ticket("a"), tokens=101, credentials=(b"a",)).check(Door(), 1e9)


def test_a_delegate_shows_the_credentials_of_those_that_join_in_their_order() -> None:
    lower = [replace(make_ticket(peer), credentials=(peer.encode(),)) for peer in "ba"]
    cell = Census(joining=("c", "d"))
    upper = replace(make_ticket("e"), level=1, child=b"c" * 32, census=cell, credentials=(b"c", b"d"))
    assert Roster((*lower, upper)).credentials_of("abcdx") == (b"a", b"b", b"c", b"d", b"")
    assert Roster((make_ticket("a"),)).credentials_of("a") == ()


@pytest.mark.parametrize(("field", "claim"), [("tokens", 10**10), ("samples", 1 << 61)])
def test_a_signed_ticket_that_claims_more_than_a_peer_can_do_is_refused(field: str, claim: int) -> None:
    with pytest.raises(IntegrityError, match=field):
        take(to_wire(make_ticket("a", **{field: claim})))


def test_a_new_nonce_makes_another_group() -> None:
    first, second = (Roster((make_ticket("a"), make_ticket("b", nonce=nonce * 16))) for nonce in (b"n", b"m"))
    assert first.group_id != second.group_id


@pytest.mark.parametrize("size", range(1, 9))
def test_a_certificate_needs_more_than_half_of_its_roster(size: int) -> None:
    members = "abcdefgh"[:size]
    body = make_body(members, contributors=(0,))
    assert verified(certify(body, members[: size // 2 + 1])) == body
    for signers in (members[: size // 2], members[: size // 2] + "s", ""):  # "s" is a stranger.
        with pytest.raises(IntegrityError, match="not a majority"):
            verified(certify(body, signers))


def test_a_certificate_of_another_swarm_is_refused() -> None:
    with pytest.raises(IntegrityError, match="another swarm"):
        verified(certify(make_body(), "abc"), b"t" * 32)


def test_signatures_of_another_body_do_not_count() -> None:
    with pytest.raises(IntegrityError):
        verified(certify(make_body(), "abc", signed=make_body(contributors=(0, 1))))


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_flipping_any_byte_of_a_certificate_never_changes_what_it_says(position: int, flip: int) -> None:
    body = make_body()
    data = bytearray(certify(body, "abc"))
    data[position % len(data)] ^= flip
    with contextlib.suppress(IntegrityError):
        assert verified(bytes(data)) == body


def certificate_with(proofs: object) -> bytes:
    return canonical_bytes({"body": to_wire(make_body()), "proofs": proofs})


@pytest.mark.parametrize("proof", [1 << 40, -1, None, "text", [1, 2], b"x" * 5000], ids=str)
def test_a_certificate_with_odd_signatures_is_refused_without_making_room_for_them(proof: object) -> None:
    """``bytes(2**40)`` would be a terabyte of zeros."""
    with pytest.raises(IntegrityError, match="proofs"):
        verified(certificate_with([["a", proof], ["b", proof]]))


@pytest.mark.parametrize(("times", "refusal"), [(2, "two signatures"), (200, "two signatures"), (1000, "proofs")])
def test_one_signature_repeated_is_not_checked_again_and_again(times: int, refusal: str) -> None:
    proof = NamedSigner("a").sign(vote(make_body().body_hash))
    with pytest.raises(IntegrityError, match=refusal):
        verified(certificate_with([["a", proof]] * times))


@pytest.mark.parametrize(
    "change",
    [
        {"members": ("a", "a", "c")}, {"contributors": ((2, 1, 1), (0, 1, 1))}, {"contributors": ((3, 1, 1),)},
        {"bounds": (0, 2, 1, 3)}, {"bounds": (0, 1)}, {"hashes": ()}, {"level": 1}, {"peers": (1, 1)},
        {"peers": (1, 1, 2)}, {"children": (b"c" * 32,)},
        {"level": 1, "levels": 3, "peers": (40_000, 40_000, 1), "children": (b"c" * 32,) * 3, "table": b""},
    ],
    ids=str,
)  # fmt: skip
def test_a_body_whose_fields_do_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="fit together"):
        Body.from_bytes(replace(make_body(), **change).to_bytes())


SPEC = AveragingSpec(min_peers=2, group_size=3, max_weight=1e4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"contributors": ()}, "nobody"),
        ({"members": tuple("abcd"), "peers": (1,) * 4, "bounds": (0,) * 5, "hashes": (b"h" * 32,) * 4}, "more members"),
        ({"contributors": ((0, 10_001, 8),)}, "tokens"),
        ({"contributors": ((0, 100, 10_001),)}, "samples"),
        ({"tokens_before": MAX_COUNT - 199}, "no room"),
        ({"samples_before": MAX_COUNT - 29}, "no room"),
        ({"round": MAX_COUNT}, "no room"),
    ],
    ids=str,
)  # fmt: skip
def test_a_result_that_breaks_the_manifests_bounds_is_not_allowed(change: dict[str, Any], why: str) -> None:
    make_body().check_allowed(SPEC)
    with pytest.raises(IntegrityError, match=why):
        replace(make_body(), **change).check_allowed(SPEC)


def test_a_round_of_fewer_peers_than_the_minimum_is_not_allowed_but_a_cell_of_them_is() -> None:
    alone = make_body("a", contributors=(0,))
    with pytest.raises(IntegrityError, match="fewer than 2 peers"):
        alone.check_allowed(SPEC)
    replace(alone, levels=2).check_allowed(SPEC)


@pytest.mark.parametrize(
    "change",
    [{"round": 4}, {"tokens": 501}, {"samples": 61}, {"lineage": b"m" * 32}, {"digest": b"e" * 32}],
    ids=str,
)
def test_a_result_follows_its_own_head_alone(change: dict[str, Any]) -> None:
    head = Head(3, b"l" * 32, 500, 60, b"d" * 32)
    make_body().check_follows(head)
    with pytest.raises(IntegrityError):
        make_body().check_follows(replace(head, **change))


@pytest.mark.parametrize("number", [math.inf, math.nan, 1.5, True, "1"], ids=str)
def test_numbers_that_are_no_integers_make_a_body_malformed(number: object) -> None:
    with pytest.raises(IntegrityError):
        Body.from_bytes(canonical_bytes({**to_wire(make_body()), "contributors": [[0, number, 1]]}))


def test_the_lineage_depends_on_every_field_of_the_body() -> None:
    body = make_body()
    changes: list[dict[str, Any]] = [
        {"round": 4}, {"digest": b"e" * 32}, {"tokens_before": 501}, {"contributors": ((0, 100, 8),)},
        {"hashes": (b"h" * 32, *body.hashes[1:])}, {"bounds": (0, 1, 1, 3)},
    ]  # fmt: skip
    assert len({replace(body, **change).next_lineage for change in [{}, *changes]}) == 1 + len(changes)


def test_the_next_head_counts_contributors_only_and_advances_the_data_for_all_members() -> None:
    table = founding_table("abc")
    certificate = Certificate(replace(make_body(), table=table.hash), ())
    head = certificate.next_head(b"e" * 32, table)
    assert (head.round, head.tokens, head.samples) == (4, 500 + 200, 60 + 3 * 10)
    with pytest.raises(IntegrityError, match="another member table"):
        certificate.next_head(b"e" * 32, founding_table("abd"))


def test_a_result_of_a_part_of_the_swarm_ends_no_round() -> None:
    with pytest.raises(IntegrityError, match="does not end a round"):
        founding_table("abc").check_body(replace(make_body(), levels=2))


def head_of(full: int, returned: int, round_: int, tokens: int, lineage: bytes = b"a" * 32) -> Head:
    return Head(round_, lineage, tokens, 0, b"d" * 32, full=full, returned=returned)


def test_a_full_round_wins_over_any_reduced_lineage_then_voters_rounds_tokens_and_hash_decide() -> None:
    order = [
        head_of(5, 0, 5, 10), head_of(5, 1, 900, 10**9), head_of(5, 2, 6, 10), head_of(5, 2, 6, 11),
        head_of(5, 2, 7, 1), head_of(6, 0, 6, 1), head_of(6, 0, 6, 1, b"A" * 32),
    ]  # fmt: skip
    for index, head in enumerate(order):
        assert [head.outranks(other) for other in order] == [True] * index + [False] * (len(order) - index)
    x, y = genesis(SWARM, b"1" * 32), genesis(SWARM, b"2" * 32)
    assert x.outranks(y) != y.outranks(x)
