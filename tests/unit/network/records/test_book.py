"""The book of records: bounded, and what strangers make up gives way to who is known."""

import random

import pytest

from p2ptrain.network.records import book as books
from p2ptrain.network.records.book import Held, RecordBook
from p2ptrain.network.records.record import RECORD_KIND, seal_record
from p2ptrain.runtime import Runtime
from tests.support.records import record_of
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
NOW = 1000.0


def sealed(peer: str, sequence: int = 1, seconds: float = 30.0) -> bytes:
    return seal_record(RECORD_KIND, SWARM, record_of(peer).to_payload(), sequence, NOW + seconds, NamedSigner(peer))


def make_book(owner: str = "me", learnt: list[Held] | None = None) -> RecordBook:
    runtime = Runtime(random.Random(1), clock=lambda: NOW)
    return RecordBook(SWARM, NamedSigner(owner), runtime, (learnt if learnt is not None else []).append)


def test_only_newer_records_are_told() -> None:
    learnt = list[Held]()
    book = make_book(learnt=learnt)
    for sequence in (2, 1, 2, 3):
        assert book.take(sealed("a", sequence))
    assert [held.sequence for held in learnt] == [2, 3]
    assert not book.take(b"nonsense")
    assert not book.take(b"nonsense")
    assert (len(book), book.rejected) == (1, 1)


def test_a_peer_that_two_met_peers_have_met_is_known_and_one_liar_makes_nobody_known() -> None:
    book, partners = make_book(), {name: make_book(name) for name in ("a", "b")}
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
    assert book.known() == ["a", "b", "friend"]
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
