"""What binds a round: tickets, bodies, certificates, the lineage rule."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Roster, Ticket, genesis, vote
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.network.schema import from_wire, to_wire
from tests.support.signers import NamedSigner

SWARM = b"s" * 32


VERIFIER = NamedSigner("verifier")


def make_ticket(peer: str) -> Ticket:
    ticket = Ticket(peer, 3, b"l" * 32, b"d" * 32, b"y" * 32, 100, 8, 0, True, b"", b"n" * 16)
    return ticket.signed(SWARM, NamedSigner(peer))


def make_body(members: tuple[str, ...] = ("a", "b", "c"), contributors: tuple[int, ...] = (0, 2)) -> Body:
    size = len(members)
    return Body(
        SWARM, 3, b"l" * 32, 500, 60, b"g" * 32, members, tuple((i, 100, 8 + i) for i in contributors), "int8/1",
        tuple(range(size + 1)), tuple(hashlib.sha256(bytes([i])).digest() for i in range(size)),
        size, 0, 1, (1,) * size,
    )  # fmt: skip


def certify(body: Body, signers: tuple[str, ...]) -> bytes:
    proofs = tuple((peer, NamedSigner(peer).sign(vote(body.body_hash))) for peer in signers)
    return Certificate(body, proofs).to_bytes()


def take(values: object, swarm: bytes = SWARM) -> Ticket:
    """Return a ticket as a leader takes it."""
    ticket = from_wire(Ticket, values)
    ticket.verify(swarm, VERIFIER)
    ticket.check_weight(1e9)
    return ticket


def test_a_ticket_survives_the_wire() -> None:
    ticket = make_ticket("a")
    assert take(to_wire(ticket)) == ticket


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "b"},
        {"tokens": 101},
        {"round": 4},
        {"tokens": 0},
        {"tokens": 10**10},
        {"tokens": math.nan},
        {"lineage": b"short"},
        {"nonce": b""},
        {"samples": -1},
        {"proof": b"x" * 5000},
        {"level": 1},
        {"peers": 2},
    ],
)
def test_a_changed_or_impossible_ticket_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        take({**to_wire(make_ticket("a")), **change})


def test_a_ticket_of_another_swarm_is_refused() -> None:
    with pytest.raises(IntegrityError):
        take(to_wire(make_ticket("a")), b"t" * 32)


def test_a_new_nonce_makes_another_group() -> None:
    first = Roster((make_ticket("a"), make_ticket("b")))
    second = Roster((make_ticket("a"), replace(make_ticket("b"), nonce=b"m" * 16)))
    assert first.group_id != second.group_id


def test_a_majority_makes_a_certificate_and_less_does_not() -> None:
    body = make_body()
    assert Certificate.from_bytes(certify(body, ("a", "c")), SWARM, VERIFIER).body == body
    for signers in ((), ("a",), ("a", "a"), ("a", "stranger")):
        with pytest.raises(IntegrityError):
            Certificate.from_bytes(certify(body, signers), SWARM, VERIFIER)


@pytest.mark.parametrize("size", range(1, 9))
def test_a_certificate_needs_more_than_half_of_its_roster(size: int) -> None:
    members = tuple("abcdefgh"[:size])
    body = make_body(members, contributors=(0,))
    with pytest.raises(IntegrityError, match="not a majority"):
        Certificate.from_bytes(certify(body, members[: size // 2]), SWARM, VERIFIER)
    assert Certificate.from_bytes(certify(body, members[: size // 2 + 1]), SWARM, VERIFIER).body == body


def test_a_certificate_of_another_swarm_is_refused() -> None:
    data = certify(make_body(), ("a", "b", "c"))
    with pytest.raises(IntegrityError, match="another swarm"):
        Certificate.from_bytes(data, b"t" * 32, VERIFIER)


def test_signatures_of_another_body_do_not_count() -> None:
    body, other = make_body(), make_body(contributors=(0, 1))
    proofs = tuple((peer, NamedSigner(peer).sign(vote(other.body_hash))) for peer in ("a", "b", "c"))
    with pytest.raises(IntegrityError):
        Certificate.from_bytes(Certificate(body, proofs).to_bytes(), SWARM, VERIFIER)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_flipping_any_byte_of_a_certificate_never_changes_what_it_says(position: int, flip: int) -> None:
    body = make_body()
    data = bytearray(certify(body, ("a", "b", "c")))
    data[position % len(data)] ^= flip
    with contextlib.suppress(IntegrityError):
        assert Certificate.from_bytes(bytes(data), SWARM, VERIFIER).body == body


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_body(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Body.from_bytes(data)


def test_the_lineage_depends_on_every_field_of_the_body() -> None:
    body = make_body()
    others = [
        replace(body, round=4),
        replace(body, tokens_before=501),
        replace(body, contributors=((0, 100, 8),)),
        replace(body, hashes=(b"h" * 32, *body.hashes[1:])),
        replace(body, bounds=(0, 1, 1, 3)),
    ]
    assert len({b.next_lineage for b in [body, *others]}) == 1 + len(others)


def test_the_next_head_counts_contributors_only_and_advances_the_data_for_all_members() -> None:
    head = make_body().next_head(b"e" * 32, b"")
    assert head.tokens == 500 + 200
    assert head.samples == 60 + 3 * 10
    assert head.round == 4


def test_more_tokens_win_and_ties_have_one_winner() -> None:
    low, high = Head(9, b"a" * 32, 10, 0, b"d" * 32), Head(2, b"b" * 32, 11, 0, b"d" * 32)
    assert high.outranks(low)
    assert not low.outranks(high)
    x, y = genesis(SWARM, b"1" * 32), genesis(SWARM, b"2" * 32)
    assert x.outranks(y) != y.outranks(x)
    assert not x.outranks(x)


def test_a_head_survives_the_wire_and_garbage_does_not() -> None:
    head = make_body().next_head(b"e" * 32, b"cert")
    assert from_wire(Head, to_wire(head)) == head
    for change in ({"round": -1}, {"tokens": 1.5}, {"digest": b""}, {"members": [1]}, {"lineage": "x" * 32}):
        with pytest.raises(IntegrityError):
            from_wire(Head, {**to_wire(head), **change})


def certificate_with(proofs: object) -> bytes:
    return canonical_bytes({"body": to_wire(make_body()), "proofs": proofs})


@pytest.mark.parametrize("proof", [1 << 40, -1, None, "text", [1, 2], b"x" * 5000], ids=str)
def test_a_certificate_with_odd_signatures_is_refused_without_making_room_for_them(proof: object) -> None:
    """``bytes(2**40)`` would be a terabyte of zeros."""
    with pytest.raises(IntegrityError, match="proofs"):
        Certificate.from_bytes(certificate_with([["a", proof], ["b", proof]]), SWARM, VERIFIER)


def test_one_signature_repeated_is_not_checked_again_and_again() -> None:
    proof = NamedSigner("a").sign(vote(make_body().body_hash))
    for times, refusal in ((200, "more signatures than members"), (1000, "proofs")):
        with pytest.raises(IntegrityError, match=refusal):
            Certificate.from_bytes(certificate_with([["a", proof]] * times), SWARM, VERIFIER)


def test_numbers_that_are_no_integers_make_a_body_malformed() -> None:
    for wrong in (math.inf, math.nan, 1.5, True, "1"):
        values = {**to_wire(make_body()), "contributors": [[0, wrong, 1]]}
        with pytest.raises(IntegrityError):
            Body.from_bytes(canonical_bytes(values))


@pytest.mark.parametrize(
    "change",
    [
        {"members": ("a", "a", "c")},
        {"contributors": ((2, 1, 1), (0, 1, 1))},
        {"contributors": ((3, 1, 1),)},
        {"bounds": (0, 2, 1, 3)},
        {"bounds": (0, 1)},
        {"hashes": ()},
        {"level": 1},
        {"peers": (1, 1)},
        {"peers": (1, 1, 2)},
        {"present": 2},
        {"children": (b"c" * 32,)},
    ],
    ids=str,
)
def test_a_body_whose_fields_do_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="fit together"):
        Body.from_bytes(replace(make_body(), **change).to_bytes())


def test_samples_that_would_push_the_data_position_out_of_range_are_refused() -> None:
    ticket = replace(make_ticket("a"), samples=1 << 61).signed(SWARM, NamedSigner("a"))
    with pytest.raises(IntegrityError, match="samples"):
        take(to_wire(ticket))


def test_a_result_of_a_part_of_the_swarm_ends_no_round() -> None:
    body = replace(make_body(), levels=2)
    with pytest.raises(IntegrityError, match="does not end a round"):
        body.next_head(b"d" * 32, b"")
