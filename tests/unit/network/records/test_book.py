"""The book of records: bounded, and what strangers make up gives way to who is known."""

import logging
import random
from typing import Any

import pytest

from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.admission import BANNED, Admission, Issuer, OpenGate, Revocations, mark
from p2ptrain.network.records import book as books
from p2ptrain.network.records.book import Held, RecordBook, fingerprint_of
from p2ptrain.network.records.record import MAX_LIFETIME_SECONDS, seal_record
from p2ptrain.network.schema import to_bytes
from p2ptrain.runtime import Runtime
from tests.support.records import record_of
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
NOW = 1000.0


def sealed(peer: str, sequence: int = 1, seconds: float = 30.0, swarm: bytes = SWARM, **fields: Any) -> bytes:
    payload = record_of(peer, **fields).to_payload()
    return seal_record(swarm, payload, sequence, NOW + seconds, NamedSigner(peer))


def make_book(owner: str = "me", learnt: list[Held] | None = None) -> RecordBook:
    runtime = Runtime(random.Random(1), clock=lambda: NOW)
    return RecordBook(SWARM, NamedSigner(owner), runtime, OpenGate(), (learnt if learnt is not None else []).append)


@pytest.mark.fault(37)
def test_a_strangers_record_takes_no_place_and_a_seeds_record_tells_of_a_ban(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    organizer = NamedSigner("organizer")
    manifest = SignedManifest.create(Manifest(), organizer, "seed").manifest
    issuer, gate, learnt = Issuer(manifest, organizer), Admission(manifest, lambda: NOW), list[Held]()
    passed = {peer: to_bytes(issuer.pass_for(peer)) for peer in ("ada", "seed")}
    runtime = Runtime(random.Random(1), clock=lambda: NOW)
    book = RecordBook(manifest.digest, NamedSigner("me"), runtime, gate, learnt.append)

    def take(peer: str, sequence: int, **fields: Any) -> None:
        assert book.take(sealed(peer, sequence, swarm=manifest.digest, **fields))

    for sequence in (1, 2):
        take("seed", sequence)
        take("ada", sequence, credential=passed["ada"])
        take("eve", sequence, credential=passed["seed"])
        book.meet("eve")
    assert [held.record.peer for held in book.held()] == ["ada", "seed"]
    assert "eve" not in book.known()
    assert {peer: why for peer, (_, why) in book.strangers.items()} == {
        "eve": "its pass is not signed for this peer and swarm"
    }
    assert book.rejected == 1
    assert caplog.text.count("dropped the record") == 1
    take("seed", 3, revocations=issuer.sign(Revocations(1, banned=(mark("ada"),))))
    assert [held.record.peer for held in book.held()] == ["seed"]
    assert book.strangers["ada"][1] == BANNED
    take("seed", 4, revocations=issuer.sign(Revocations(2)))
    take("ada", 3, credential=passed["ada"])
    assert [held.record.peer for held in book.held()] == ["ada", "seed"]
    assert set(book.strangers) == {"eve"}


def test_the_strangers_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "MAX_STRANGERS", 2)
    manifest = SignedManifest.create(Manifest(), NamedSigner("organizer"), "seed").manifest
    runtime = Runtime(random.Random(1), clock=lambda: NOW)
    book = RecordBook(manifest.digest, NamedSigner("me"), runtime, Admission(manifest, lambda: NOW), lambda held: None)
    for number in range(5):
        book.take(sealed(f"stranger{number}", swarm=manifest.digest))
    assert set(book.strangers) == {"stranger0", "stranger1"}


def test_only_newer_records_are_told() -> None:
    learnt = list[Held]()
    book = make_book(learnt=learnt)
    for sequence in (2, 1, 2, 3):
        assert book.take(sealed("a", sequence))
    for _ in range(2):
        assert book.meet("a")
    assert book.take(sealed("b"))  # Hearsay counts only while nobody is met.
    for sequence in (4, 3, 5):
        assert book.take(sealed("a", sequence))
    assert [(held.record.peer, held.sequence) for held in learnt] == [("a", number) for number in (2, 3, 4, 5)]
    assert not book.take(b"nonsense")
    assert not book.take(b"nonsense")
    assert (len(book), book.rejected) == (2, 1)


def test_a_peer_that_two_met_peers_have_met_is_known_and_one_liar_makes_nobody_known() -> None:
    learnt = list[Held]()
    book, partners = make_book(learnt=learnt), {name: make_book(name) for name in ("a", "b")}
    book.take(sealed("seed"))
    assert book.meet("seed")
    learnt.clear()
    for name in (*partners, "stranger", "friend"):
        book.take(sealed(name))
    for name, partner in partners.items():
        book.meet(name)
        for other in ("stranger", "friend") if name == "a" else ("friend",):
            partner.take(sealed(other, 2))
            partner.meet(other)
    for _ in range(2):
        for name, partner in partners.items():
            book.missing(partner.offer(10), name)
    assert book.known() == ["a", "b", "friend", "seed"]
    assert [held.record.peer for held in learnt] == ["a", "b", "friend"]
    known, others = book.missing(partners["a"].offer(10), "a")
    assert (len(known), len(others)) == (1, 1)


@pytest.mark.fault(45)
def test_a_full_book_keeps_who_is_known_and_asks_for_no_record_that_it_would_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(books, "MAX_HELD", 8)
    book, liar = make_book(), make_book("liar")
    friends = [f"friend {number}" for number in range(5)]
    for name in ("me", *friends):
        book.take(sealed(name))
        book.meet(name)
    for number in range(100):
        book.take(sealed(f"stranger {number}"))
    assert len(book) == 8
    assert book.peers() > {"me", *friends}
    monkeypatch.setattr(books, "MAX_HELD", 1000)
    for number in range(100, 300):
        liar.take(sealed(f"stranger {number}"))
    monkeypatch.setattr(books, "MAX_HELD", 8)
    _, others = book.missing(liar.offer(1000), "liar")
    for value in liar.values(others):
        assert book.take(value)
    assert len(others) < 50

    assert book.peers() > {"me", *friends}


def test_a_record_that_lives_too_long_is_invalid_by_no_more_than_this_peers_clock() -> None:
    now = [NOW]
    runtime = Runtime(random.Random(1), clock=lambda: now[0])
    book = RecordBook(SWARM, NamedSigner("me"), runtime, OpenGate(), lambda held: None)
    value = sealed("a", seconds=MAX_LIFETIME_SECONDS + 1)
    assert book.take(value)
    assert len(book) == 0
    now[0] += 2.0
    assert book.take(value)
    assert (len(book), book.rejected) == (1, 0)


def test_a_partner_hands_over_its_own_record_and_those_that_were_asked_for() -> None:
    book = make_book()
    assert not book.take(sealed("a"), "b")
    assert not book.take(sealed("c"), wanted=[fingerprint_of("a")])
    assert book.take(sealed("a", 2), "a")
    assert book.take(sealed("c", 2), wanted=[fingerprint_of("c")])
    assert [book.has_met(peer) for peer in ("a", "b", "c")] == [True, False, False]


@pytest.mark.fault(45)
def test_whoever_comes_itself_is_met_however_full_the_book_is_with_hearsay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "MAX_HELD", 64)
    book = make_book()
    for number in range(200):
        book.take(sealed(f"ghost {number}"))
    callers = [f"caller {number}" for number in range(50)]
    for name in callers:
        assert book.take(sealed(name), name)
        assert book.meet(name)
    assert book.met() == sorted(callers)
    caller = make_book("late")
    assert caller.take(sealed("late"), "late")
    assert book.missing(caller.offer(1), "late")[0] == [fingerprint_of("late")]
