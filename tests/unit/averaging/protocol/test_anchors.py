"""Anchors: whose signatures count for which head, what they bind a peer to, and what its file keeps."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.protocol.anchors import Anchor, AnchorBook, follows
from p2ptrain.averaging.protocol.certificate import Certificate, Head, genesis, vote
from p2ptrain.averaging.protocol.table import founding_table
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import MAX_ANCHOR_KEYS, AveragingSpec
from p2ptrain.network.schema import from_bytes, to_bytes, to_wire
from tests.support.signers import NamedSigner
from tests.unit.averaging.protocol.test_table import make_body

SWARM = b"s" * 32
VERIFIER = NamedSigner("verifier")
EVERY = 4
KEYS = ("k1", "k2", "k3")


def lineage(rounds: int, *, digest: bytes = b"d" * 32, reduced: Sequence[int] = ()) -> list[Head]:
    """The heads of a lineage of so many rounds; ``digest`` makes another one."""
    heads = [genesis(SWARM, b"d" * 32, founding_table(["a", "b", "c"]))]
    for number in range(rounds):
        head = heads[-1]
        body = make_body(head.table, number, "abc", is_reduced=number in reduced)
        body = replace(
            body, lineage=head.lineage, digest=head.digest, tokens_before=head.tokens, samples_before=head.samples
        )
        body = head.table.completed(body)
        proofs = tuple((peer, NamedSigner(peer).sign(vote(body.body_hash))) for peer in "abc")
        heads.append(head.after(Certificate(body, proofs), hashlib.sha256(digest + head.digest).digest()))
    return heads


HEADS = lineage(3 * EVERY)
OTHERS = lineage(3 * EVERY, digest=b"e" * 32)
ANCHORED = HEADS[EVERY]


def read(data: bytes) -> Certificate:
    return Certificate.from_bytes(data, SWARM, VERIFIER)


def make_book(name: str = "me", path: Path | None = None, quorum: int = 2, swarm: bytes = SWARM) -> AnchorBook:
    return AnchorBook(swarm, NamedSigner(name), read, KEYS, quorum, EVERY, path)


def sign(head: Head, *keys: str, swarm: bytes = SWARM) -> Anchor:
    statement = Anchor(head, ()).statement(swarm)
    return Anchor(head, tuple((key, NamedSigner(key).sign(statement)) for key in keys))


def adopted(head: Head, path: Path | None = None) -> AnchorBook:
    book = make_book(path=path)
    complete = book.check(sign(head, "k1", "k2"))
    assert complete is not None
    book.adopt(complete, is_off=False)
    return book


# --- signatures


def test_the_signatures_of_a_quorum_make_an_anchor_in_whatever_order_they_come() -> None:
    assert make_book().check(sign(ANCHORED, "k1", "k3")) == sign(ANCHORED, "k1", "k3")
    book = make_book()
    assert book.check(sign(ANCHORED, "k3")) is None
    assert book.check(sign(ANCHORED, "k3")) is None, "the same one again"
    assert book.check(sign(OTHERS[EVERY], "k2")) is None, "of another head"
    assert book.check(sign(ANCHORED, "k1")) == sign(ANCHORED, "k1", "k3")


def test_two_halves_of_the_keys_that_sign_two_heads_anchor_neither() -> None:
    book = AnchorBook(SWARM, VERIFIER, read, ["k1", "k2", "k3", "k4"], every=EVERY)
    assert book.check(sign(ANCHORED, "k1", "k2")) is None
    assert book.check(sign(OTHERS[EVERY], "k3", "k4")) is None


@pytest.mark.parametrize(("keys", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_of_the_keys_sign_unless_the_manifest_says_how_many(keys: int, quorum: int) -> None:
    names = [f"k{number}" for number in range(keys)]
    book = AnchorBook(SWARM, VERIFIER, read, names, every=EVERY)
    assert book.check(sign(ANCHORED, *names[: quorum - 1])) is None if quorum > 1 else True
    assert AnchorBook(SWARM, VERIFIER, read, names, every=EVERY).check(sign(ANCHORED, *names[:quorum])) is not None


@pytest.mark.parametrize(
    ("anchor", "reason"),
    [
        (sign(ANCHORED, "k1", "k2", swarm=b"t" * 32), "does not match"),
        (sign(ANCHORED, "k1", "stranger"), "not signed by the keys"),
        (Anchor(ANCHORED, ()), "not signed by the keys"),
        (Anchor(ANCHORED, sign(ANCHORED, "k1").proofs * 2), "not signed by the keys"),
        (Anchor(replace(ANCHORED, digest=b"x" * 32), sign(ANCHORED, "k1", "k2").proofs), "does not match"),
        (Anchor(HEADS[2 * EVERY], sign(ANCHORED, "k1", "k2").proofs), "does not match"),
        (sign(HEADS[EVERY + 1], "k1", "k2"), "of a round that has none"),
        (sign(HEADS[0], "k1", "k2"), "of a round that has none"),
        (sign(lineage(EVERY, reduced=[EVERY - 1])[-1], "k1", "k2"), "of a round that has none"),
        (sign(replace(ANCHORED, lineage=b"x" * 32), "k1", "k2"), "does not follow from its certificate"),
        (sign(replace(ANCHORED, certificate=HEADS[EVERY - 1].certificate), "k1", "k2"), "another member table"),
        (sign(replace(ANCHORED, table=HEADS[1].table), "k1", "k2"), "another member table"),
        (sign(replace(ANCHORED, certificate=b""), "k1", "k2"), "no message"),
    ],
)  # fmt: skip
def test_an_anchor_that_is_forged_or_of_no_certified_head_is_refused(anchor: Anchor, reason: str) -> None:
    book = make_book()
    with pytest.raises(IntegrityError, match=reason):
        book.check(anchor)
    assert book.check(sign(ANCHORED, "k3")) is None, "and none of its signatures is kept"


def test_an_anchor_of_one_unit_is_none_of_another() -> None:
    with pytest.raises(IntegrityError, match="does not match"):
        make_book(swarm=b"u" * 32).check(sign(ANCHORED, "k1", "k2"))


def test_an_anchor_with_too_many_signatures_is_refused_unread() -> None:
    anchor = sign(ANCHORED, *(f"k{number}" for number in range(MAX_ANCHOR_KEYS + 1)))
    with pytest.raises(IntegrityError, match="proofs"):
        from_bytes(Anchor, to_bytes(anchor))


@given(position=st.integers(0, 100_000), flip=st.integers(1, 255))
def test_flipping_any_byte_of_an_anchor_never_changes_what_it_says(position: int, flip: int) -> None:
    data = bytearray(to_bytes(sign(ANCHORED, "k1", "k2")))
    data[position % len(data)] ^= flip
    with contextlib.suppress(IntegrityError):
        taken = make_book().check(from_bytes(Anchor, bytes(data)))
        assert taken is None or taken.head == ANCHORED


# --- what an anchor binds a peer to


def test_a_head_past_the_anchor_is_proved_from_there() -> None:
    book, behind, past = adopted(ANCHORED), HEADS[1], HEADS[EVERY + 2]
    assert book.start_for(past, OTHERS[-1]) == past
    assert book.start_for(behind, OTHERS[-1]) == ANCHORED
    assert book.start_for(behind, HEADS[2]) == behind, "before the anchor, as all have restarted from checkpoints"
    with pytest.raises(IntegrityError, match="before the newest anchor"):
        book.start_for(past, HEADS[2])
    book.adopt(sign(HEADS[2 * EVERY], "k1", "k2"), is_off=True)
    assert book.start_for(OTHERS[-1], HEADS[-1]) == HEADS[2 * EVERY]
    assert not book.is_past(OTHERS[-1])
    book.moved()
    assert book.is_past(HEADS[-1])


def test_a_certificate_that_parts_from_the_anchor_is_told() -> None:
    book = adopted(ANCHORED)
    assert not make_book().parts(read(OTHERS[EVERY].certificate))
    for head, parts in [(HEADS[EVERY], False), (OTHERS[EVERY], True), (OTHERS[EVERY + 1], False), (OTHERS[1], False)]:
        assert book.parts(read(head.certificate)) == parts


@pytest.mark.parametrize(("head", "is_off"), [(ANCHORED, False), (OTHERS[EVERY], True)])
def test_a_peer_that_comes_to_the_round_of_an_anchor_on_another_lineage_is_off(head: Head, is_off: bool) -> None:
    book = adopted(ANCHORED)
    book.reached(head)
    assert book.is_off == is_off


def test_certificates_that_a_voter_follows_do_not_tell_where_its_state_is() -> None:
    book = make_book("k1")
    book.adopt(sign(ANCHORED, "k2", "k3"), is_off=True)
    book.sign(ANCHORED)
    assert book.is_off
    assert book.lineage_at(EVERY) is None


def test_a_peer_remembers_the_lineage_of_its_last_head_that_could_be_anchored(tmp_path: Path) -> None:
    book = make_book(path=tmp_path / "anchors")
    for head in OTHERS[: EVERY + 2]:
        book.reached(head)
    for each in (book, make_book(path=tmp_path / "anchors")):
        assert each.lineage_at(EVERY) == OTHERS[EVERY].lineage
        assert each.lineage_at(2 * EVERY) is None
    book.moved()
    assert book.lineage_at(EVERY) is None


def test_two_anchors_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    book = adopted(ANCHORED, tmp_path / "anchors")
    assert not book.conflict
    book.contradict(sign(OTHERS[2 * EVERY], "k1", "k2"))
    for each in (book, make_book(path=tmp_path / "anchors")):
        assert f"{ANCHORED.lineage.hex()[:8]} of round {EVERY}" in each.conflict
        assert f"{OTHERS[2 * EVERY].lineage.hex()[:8]} of round {2 * EVERY}" in each.conflict
        assert str(tmp_path / "anchors") in each.conflict


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (HEADS[EVERY - 2 : EVERY + 3], True),
        (HEADS[EVERY:], True),
        ([*HEADS[1:3], *OTHERS[3 : EVERY + 2]], False),
        (HEADS[1 : EVERY - 1], False),
        (HEADS[EVERY + 1 :], None),
        (OTHERS[EVERY + 1 :], None),
    ],
)
def test_a_path_of_certificates_follows_from_the_anchor_excludes_it_or_does_not_tell(
    path: Sequence[Head], expected: bool | None
) -> None:
    """One that ends before the anchor excludes it where its end is not on this peer's lineage."""
    lineages = {head.round: head.lineage for head in path}
    assert follows(ANCHORED, lineages) is expected
    assert follows(None, lineages)


# --- a key's signatures


def test_a_key_signs_the_head_of_every_nth_round_once_and_never_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "anchors"
    book = make_book("k1", path)
    for head in HEADS[: EVERY + 2]:
        book.reached(head)
    assert book.held() == (sign(ANCHORED, "k1"),)
    for each in (book, make_book("k1", path)):
        each.reached(OTHERS[EVERY])
        assert each.held() == (sign(ANCHORED, "k1"),)
    book.reached(HEADS[2 * EVERY])
    assert book.held() == (sign(HEADS[2 * EVERY], "k1"),)
    stranger = make_book("stranger")
    stranger.reached(ANCHORED)
    assert stranger.held() == ()


@pytest.mark.parametrize(
    "prepare",
    [
        lambda book: book.adopt(sign(ANCHORED, "k1", "k2"), is_off=True),
        lambda book: book.contradict(sign(OTHERS[EVERY], "k1", "k2")),
        lambda book: book.adopt(sign(HEADS[3 * EVERY], "k1", "k2"), is_off=False),
    ],
)
def test_a_key_signs_nothing_on_a_lineage_without_the_anchor_or_after_a_contradiction(
    prepare: Callable[[AnchorBook], None],
) -> None:
    book = make_book("k1")
    prepare(book)
    book.reached(OTHERS[2 * EVERY])
    assert all(anchor.head.round != 2 * EVERY for anchor in book.held())


def test_a_key_signs_no_reduced_head() -> None:
    book = make_book("k1")
    book.reached(lineage(EVERY, reduced=[EVERY - 1])[-1])
    assert book.held() == ()


# --- the file


def test_the_newest_anchor_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "anchors"
    book = adopted(ANCHORED, path)
    assert make_book(path=path).newest == book.newest == ANCHORED
    assert make_book(path=path).round == EVERY


def test_a_key_whose_machine_fails_as_it_signs_signs_no_second_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step that reaches the disk. Nothing is shown before all of them."""
    reached = list[str]()
    for step in range(3):
        path, steps = tmp_path / str(step) / "anchors", iter(range(4))

        def fail(descriptor: int, step: int = step, steps: Iterator[int] = steps, path: Path = path) -> None:
            if next(steps) == step:
                raise KeyboardInterrupt
            reached.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

        book = make_book("k1", path)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(KeyboardInterrupt) if step < 2 else contextlib.nullcontext():
            book.sign(ANCHORED)
        monkeypatch.undo()
        assert book.held() == (() if step < 2 else (sign(ANCHORED, "k1"),))
        again = make_book("k1", path)
        again.sign(OTHERS[EVERY])
        assert again.held() == ((sign(OTHERS[EVERY], "k1"),) if step < 1 else (sign(ANCHORED, "k1"),))
    assert reached == ["file", "file", "folder"]


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "anchors"
    adopted(ANCHORED, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(IntegrityError, match=rf"the anchors in .*{path.name} are damaged"):
        make_book(path=path)


def test_an_anchor_that_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("no folder")
    book = make_book("k1", tmp_path / "gone" / "anchors")
    book.adopt(sign(ANCHORED, "k1", "k2"), is_off=False)
    book.reached(ANCHORED)
    assert book.newest is None
    assert book.held() == ()


def test_a_peer_is_told_of_what_it_does_not_know() -> None:
    book = adopted(ANCHORED)
    assert book.held() == (sign(ANCHORED, "k1", "k2"),)
    assert book.held(ANCHORED.lineage) == ()
    book.contradict(sign(OTHERS[EVERY], "k1", "k2"))
    assert book.held(ANCHORED.lineage) == (sign(OTHERS[EVERY], "k1", "k2"),)


# --- the manifest


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"anchors": ("a", "b"), "anchor_quorum": 3}, "names 2 keys"),
        ({"anchor_quorum": 1}, "anchor_quorum is used with anchors alone"),
        ({"anchor_rounds": 8}, "anchor_rounds is used with anchors alone"),
        ({"anchors": ("no peer's id",)}, "anchors"),
        ({"anchors": tuple(f"p{number}" for number in range(MAX_ANCHOR_KEYS + 1))}, "anchors"),
        ({"anchors": ("a", "a", "b"), "anchor_quorum": 3}, "a key twice"),
        ({"anchors": ("a",), "anchor_rounds": 0}, "anchor_rounds"),
    ],
)
def test_a_manifest_with_impossible_anchors_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AveragingSpec.model_validate(values)


def test_a_manifest_without_anchors_has_no_trace_of_them() -> None:
    assert not [key for key in AveragingSpec().model_dump() if key.startswith("anchor")]
    assert not [key for key in to_wire(ANCHORED) if key.startswith("anchor")]
