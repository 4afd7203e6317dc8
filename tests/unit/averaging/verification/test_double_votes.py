"""Two votes of one view convict their voter before anybody, and no honest voter ever casts them."""

import contextlib
import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from p2ptrain.averaging.protocol import ballots as module
from p2ptrain.averaging.protocol.ballots import MAX_RESULTS, MAX_ROUNDS, Ballots, SeenVotes
from p2ptrain.averaging.protocol.certificate import Body, genesis, vote
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.averaging.verification.opening import TWO_VOTES, DoubleVote, Evidence, Rules, Slice, verify_evidence
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.network.schema import from_bytes, to_bytes
from tests.support.signers import NamedSigner
from tests.unit.averaging.protocol.test_ballots import SWARM, make_body

VOTERS = "abcdef"


def rules_of(share: Slice) -> Rules:
    raise AssertionError("votes need no rules")


def evidence_of(first: Body, second: Body, voter: str = "a") -> DoubleVote:
    signatures = [NamedSigner(voter).sign(vote(body.body_hash)) for body in (first, second)]
    return DoubleVote(voter, (first, second), (signatures[0], signatures[1]))


def verify(evidence: DoubleVote | bytes, swarm: bytes = SWARM) -> tuple[str, str]:
    data = evidence if isinstance(evidence, bytes) else to_bytes(evidence)
    return verify_evidence(data, swarm, rules_of, NamedSigner("anybody"))


EVIDENCE = evidence_of(make_body("x"), make_body("y"))
ENCODED = to_bytes(EVIDENCE)


def test_two_votes_of_one_view_convict_their_voter() -> None:
    assert verify(EVIDENCE) == ("a", TWO_VOTES)


@settings(max_examples=1000)
@given(st.integers(0, 8 * len(ENCODED) - 1))
def test_evidence_with_any_bit_flipped_convicts_nobody(bit: int) -> None:
    changed = bytearray(ENCODED)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        verify(bytes(changed))
    except IntegrityError:
        return
    assert from_bytes(Evidence, bytes(changed)) == EVIDENCE


ELSEWHERE = {
    "another view": make_body("y", view=1),
    "another round": make_body("y", lineage=b"m" * 32),
    "another swarm": replace(make_body("y"), swarm=b"t" * 32),
    "a reduced round": make_body("y", is_reduced=True),
    "a level below the last": make_body("y", levels=2),
    "the same": make_body("x"),
}


@pytest.mark.parametrize("other", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_what_an_honest_voter_may_sign_beside_its_vote_convicts_nobody(other: Body) -> None:
    for both in ((make_body("x"), other), (other, make_body("x"))):
        with pytest.raises(IntegrityError, match="exclude"):
            verify(evidence_of(*both))
    with pytest.raises(IntegrityError, match="exclude"):
        verify(evidence_of(other, replace(other, group_id=bytes(32)) if not other.is_full else other))


def test_evidence_is_of_one_swarm_and_one_voter() -> None:
    with pytest.raises(IntegrityError, match="exclude"):
        verify(EVIDENCE, b"t" * 32)
    others = evidence_of(*EVIDENCE.bodies, voter="b")
    for proofs in ((EVIDENCE.proofs[0], others.proofs[1]), EVIDENCE.proofs[::-1]):
        with pytest.raises(IntegrityError, match="does not match"):
            verify(structs.replace(EVIDENCE, proofs=proofs))


# --- honest voters ----------------------------------------------------------------------------------------------------

ASKED = st.tuples(
    st.sampled_from("xy"), st.integers(0, 1), st.integers(0, 3), st.sampled_from([False, False, False, True]),
    st.sampled_from(["member", "member", "light", "crash", "full disk", "restart"]),
)  # fmt: skip
"""A result's name, view, round and kind, and how the voter comes to it."""


@settings(max_examples=300, deadline=None)
@given(st.lists(ASKED, min_size=10, max_size=40))
def test_no_two_votes_of_an_honest_voter_convict_it_whatever_it_is_asked(
    asked: list[tuple[str, int, int, bool, str]],
) -> None:
    """Forwards and back beyond the votes that it keeps, in full and reduced rounds, and across crashes."""
    signed = dict[bytes, Body]()
    from_bytes(module._Record, to_bytes(module._Record(())))  # At its first use it takes its bounds, for good.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MAX_LINEAGES", 2)
        path = Path(folder) / "votes"
        ballots = Ballots(path)
        for name, view, round_, is_reduced, how in asked:
            body = make_body(name, view, bytes([round_]) * 32, round_=round_, is_reduced=is_reduced)
            if how == "restart":
                ballots = Ballots(path)
            elif how == "crash":
                ballots.vote(body)  # Its signature is never sent.
                ballots = Ballots(path)
            elif how == "full disk":
                with pytest.MonkeyPatch.context() as failing, contextlib.suppress(ResourceError):
                    failing.setattr(os, "fsync", fail)
                    ballots.vote(body)
            elif (is_reduced and how == "light") or ballots.vote(body):
                signed[body.body_hash] = body
    for first, second in itertools.combinations(signed.values(), 2):
        with pytest.raises(IntegrityError):
            verify(evidence_of(first, second))


def fail(file: int) -> None:
    raise OSError("the disk is full")


# --- what a peer sees -------------------------------------------------------------------------------------------------


def proofs_of(body: Body, voters: str) -> list[tuple[str, bytes]]:
    return [(voter, NamedSigner(voter).sign(vote(body.body_hash))) for voter in voters]


def seen_from(*lineages: bytes) -> SeenVotes:
    seen = SeenVotes()
    for lineage in lineages:
        table = Table(tuple(Row(voter, votes=True, elects=True) for voter in VOTERS))
        seen.follow(replace(genesis(SWARM, bytes(32), table), lineage=lineage))
    return seen


def test_a_peer_that_sees_two_votes_of_one_view_can_convict_those_that_voted_twice() -> None:
    seen, first, second = seen_from(b"l" * 32), make_body("x"), make_body("y")
    seen.add(first, proofs_of(first, "ab"))
    seen.add(first, proofs_of(first, "ace"))
    assert seen.take() == []
    seen.add(second, proofs_of(second, "acdz"))
    found = seen.take()
    assert [voter for voter, *_ in found] == ["a", "c"]
    for voter, one, other in found:
        assert verify(DoubleVote(voter, (one.body, other.body), (one.proofs[voter], other.proofs[voter])))[0] == voter
    assert seen.take() == []


def test_only_votes_that_could_count_are_kept_and_no_liar_displaces_them() -> None:
    seen, first, second = seen_from(b"l" * 32), make_body("x"), make_body("y")
    seen.add(first, proofs_of(first, "ab"))
    for number in range(2 * MAX_RESULTS):
        junk = replace(make_body("x"), group_id=number.to_bytes(32, "big"))
        seen.add(junk, proofs_of(junk, "awxyz"))
    assert seen.take() == []
    seen.add(second, proofs_of(second, "a"), is_own=True)
    assert [voter for voter, *_ in seen.take()] == ["a"]


def test_the_votes_kept_are_bounded() -> None:
    lineages = [number.to_bytes(32, "big") for number in range(MAX_ROUNDS + 3)]
    seen = seen_from(*lineages)
    for lineage in (*lineages, b"m" * 32):
        for number in range(2 * MAX_RESULTS):
            body = make_body("x", number, lineage)
            seen.add(body, proofs_of(body, "abc"))
    assert len(seen._rounds) == MAX_ROUNDS
    assert {len(results) for _, results in seen._rounds.values()} == {MAX_RESULTS}
