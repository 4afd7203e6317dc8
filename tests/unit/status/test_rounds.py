"""How rounds went: many tellers put together, certificates above them, and liars who change nothing."""

from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.network.records.record import PeerRecord, RoundReport
from p2ptrain.status.rounds import MAX_ABSENCES, MAX_ROUNDS, OPEN_ROUNDS, SwarmRounds
from p2ptrain.status.stages import WHOLE
from p2ptrain.status.views import RoundView
from tests.support.web.watched import LINEAGE, START, aborted, chain, digest_after, report, result, trainer


def tell(book: SwarmRounds, peer: str, *reports: RoundReport, usual: int = 8, at: float = START) -> int:
    """How many rounds count as committed since a peer told of these."""
    return learn(book, trainer(peer, round=usual, last_rounds=reports), at, usual)


def learn(book: SwarmRounds, record: PeerRecord, at: float, usual: int) -> int:
    before = book.committed
    book.learn(record, at, {WHOLE: usual})
    assert book.settle({WHOLE: usual}) == (book.committed > before)
    return book.committed - before


def a_book(*, first: int = 0) -> SwarmRounds:
    """A book that began to watch while the swarm worked towards round ``first``."""
    book = SwarmRounds(4, 1)
    tell(book, "watched-first", usual=first)
    return book


def told(**reports: RoundReport) -> SwarmRounds:
    """A book to which each of these peers told of one round."""
    book = a_book()
    for peer, each in reports.items():
        tell(book, peer, each)
    return book


def view_of(book: SwarmRounds, round_: int) -> RoundView:
    [view] = [view for view in book.views() if view.round == round_]
    return view


def test_what_several_peers_tell_of_a_round_becomes_one_view_with_medians() -> None:
    book = a_book()
    for index, peer in enumerate("abc"):
        times = {"compute_seconds": 10.0 * index, "matchmaking_seconds": 0.1 * index, "transfer_seconds": 2.0 * index}
        tell(book, peer, report(7, seconds=1.0 + index, **times))
    [view] = book.views()
    assert (view.round, view.committed, view.verified) == (7, True, False)
    assert (view.seconds, view.compute_seconds, view.matchmaking_seconds, view.transfer_seconds) == (2, 10, 0.1, 2)
    assert (view.members, view.contributors, view.tokens, view.levels) == (3, 3, None, 1)
    assert (view.agrees, view.digests) == (True, ((digest_after(7).hex(), 3),))
    assert view.absences == ()


def test_one_peer_of_many_does_not_make_up_sizes_or_times() -> None:
    lie = report(7, members=2**62, contributors=2**62, seconds=1e18, compute_seconds=1e18)
    view = view_of(told(a=report(7), b=report(7), c=report(7), liar=lie), 7)
    assert (view.members, view.contributors, view.seconds, view.compute_seconds) == (3, 3, 2.0, 3.0)


def test_peers_with_different_states_after_a_round_do_not_agree() -> None:
    assert view_of(told(a=report(7)), 7).agrees is None, "one peer has nobody to agree with"
    view = view_of(told(a=report(7), b=report(7, digest=b"x" * 32), c=report(7)), 7)
    assert view.agrees is False
    assert view.digests == ((digest_after(7).hex(), 2), ((b"x" * 32).hex(), 1))


@pytest.mark.parametrize(
    ("absent", "kind"),
    [
        (report(7, contributed=False, reason="late: this peer's work waits for the next round"), "late"),
        (report(7, contributed=False, reason="this peer was too far off: it was dropped"), "dropped"),
        (aborted(7), "aborted"),
    ],
)
def test_a_peer_whose_work_is_not_in_a_round_is_named_with_the_reason(absent: RoundReport, kind: str) -> None:
    [absence] = view_of(told(a=report(7), b=report(7), x=absent), 7).absences
    assert (absence.peer, absence.name, absence.kind, absence.reason) == ("x", "x's laptop", kind, absent.reason)


def test_of_many_absences_only_some_are_kept() -> None:
    book = told(**{f"p{number}": aborted(7) for number in range(MAX_ABSENCES + 5)})
    assert len(view_of(book, 7).absences) == MAX_ABSENCES


def test_a_round_is_committed_when_most_who_tell_of_it_say_so() -> None:
    book = told(a=aborted(7))
    assert tell(book, "b", report(7)) == 0, "one of two is no majority"
    assert not view_of(book, 7).committed
    assert tell(book, "c", report(7)) == 1
    assert view_of(book, 7).committed
    assert tell(book, "d", report(7)) == 0, "it is told once"
    assert (book.committed, book.aborted) == (1, 1)


def test_who_failed_and_then_succeeded_took_part() -> None:
    book = told(a=aborted(7))
    assert tell(book, "a", aborted(7), report(7)) == 1
    tell(book, "a", aborted(7, "again"))
    assert view_of(book, 7).committed
    assert view_of(book, 7).absences == ()


def test_what_broke_before_a_round_succeeded_is_told() -> None:
    book = a_book()
    tell(book, "a", aborted(7, "no quorum"), aborted(7, "no quorum", seconds=3.0), report(7))
    tell(book, "b", report(7))
    tell(book, "c", aborted(7, "too few peers"))
    tell(book, "c", aborted(7, "too few peers"), aborted(7, "no quorum", seconds=3.0), report(7))
    for _ in range(2):
        view = view_of(book, 7)
        assert view.committed
        assert (view.broken_tries, view.broken_peers, view.broken_reason) == (2, 2, "no quorum")
        assert book.aborted == 1
        tell(book, "a", report(7), report(8), usual=9)  # Records are past it now.


def test_of_old_rounds_only_the_view_is_kept() -> None:
    book = a_book()
    for round_ in range(OPEN_ROUNDS + 5):
        tell(book, "a", report(round_), usual=round_ + 1)
        tell(book, "b", aborted(round_, "too few"), report(round_), usual=round_ + 1)
        if round_ == 2:
            before = view_of(book, 2)
    assert view_of(book, 2) == before
    assert [view.round for view in book.views()] == list(range(OPEN_ROUNDS + 4, -1, -1))
    assert sum(len(entry.reports) for entry in book._books[WHOLE]._entries.values()) == 2 * OPEN_ROUNDS
    assert tell(book, "late", aborted(2), usual=OPEN_ROUNDS + 5) == 0
    assert view_of(book, 2) == before
    proof = result(2, LINEAGE)
    assert not book.certify(proof, START), "it was known to be committed"
    proven = view_of(book, 2)
    assert (proven.verified, proven.tokens, proven.lineage) == (True, proof.tokens, proof.lineage.hex())
    assert replace(proven, tokens=None) == replace(
        before, verified=True, lineage=proof.lineage.hex(), members=proven.members, contributors=proven.contributors
    )
    assert book.committed == OPEN_ROUNDS + 5


def test_a_certificate_that_comes_late_proves_a_round_of_which_most_said_otherwise() -> None:
    book = a_book()
    tell(book, "a", aborted(0), usual=1)
    for round_ in range(1, OPEN_ROUNDS + 3):
        tell(book, "a", report(round_), usual=round_ + 1)
    assert not view_of(book, 0).committed
    assert book.certify(result(0, LINEAGE), START)
    assert view_of(book, 0).committed
    assert book.committed == OPEN_ROUNDS + 3


def test_rounds_before_the_first_look_are_shown_but_not_counted() -> None:
    book = a_book(first=8)
    assert tell(book, "a", report(6), report(7)) == 0
    assert [view.round for view in book.views()] == [7, 6]
    assert (book.committed, book.aborted) == (0, 0)
    assert tell(book, "a", report(7), aborted(8), report(8), usual=9) == 1
    assert (book.committed, book.aborted) == (1, 1)


def test_a_first_look_at_a_liar_does_not_keep_later_rounds_from_counting() -> None:
    book = SwarmRounds(4, 1)
    tell(book, "liar", report(2**62))
    tell(book, "a", report(8), usual=9)
    assert book.committed == 1


@pytest.mark.parametrize("far", [9, 20, 10**6, 2**62, 2**63 - 1])
def test_a_round_that_most_have_not_reached_is_not_believed(far: int) -> None:
    book = a_book()
    honest = [report(round_) for round_ in range(8)]
    for peer in "abc":
        tell(book, peer, *honest)
    before = book.views()
    assert tell(book, "liar", report(far), aborted(far)) == 0
    assert book.views() == before
    assert book.committed == 8


def test_a_liar_with_eight_new_rounds_in_each_record_evicts_nothing() -> None:
    book = a_book()
    for first in range(0, 64, 8):
        tell(book, "a", *(report(round_) for round_ in range(first, first + 8)), usual=first + 8)
    before = [view.round for view in book.views()]
    for first in [*range(64, 10**6, 80_000), 2**62]:
        tell(book, "liar", *(report(first + index) for index in range(8)), usual=64)
    assert [view.round for view in book.views()] == before == list(range(63, 15, -1))


def test_a_fast_peers_round_is_learnt_when_the_others_are_there() -> None:
    book = a_book()
    fast = trainer("fast", round=9, last_rounds=(report(7), report(8)))
    assert learn(book, fast, START, 8) == 1
    assert learn(book, fast, START + 2.0, 9) == 1, "the same record is read again"


def test_attempts_at_the_round_in_progress_are_shown() -> None:
    book = a_book()
    tell(book, "a", report(7), aborted(8))
    assert [(view.round, view.committed) for view in book.views()] == [(8, False), (7, True)]


def test_bootstrap_peers_tell_nothing() -> None:
    book = a_book()
    assert learn(book, trainer("b", role="bootstrap", last_rounds=(report(7),)), START, 8) == 0
    assert book.views() == []


def test_when_earlier_rounds_ended_is_reckoned_backwards_and_not_beyond_the_beginning_of_time() -> None:
    book, endless = a_book(), a_book()
    tell(book, "a", report(5), report(6, seconds=1.0, compute_seconds=0.5), report(7), at=START)
    assert {view.round: START - view.at for view in book.views()} == {7: 0.0, 6: 5.0, 5: 6.5}
    tell(endless, "a", report(6), report(7, seconds=1e18))
    assert view_of(endless, 6).at == 0.0


def test_a_certificate_verifies_a_round_and_counts_its_members_and_tokens() -> None:
    book = told(a=report(7, members=9, contributors=9))
    book.certify(result(7, LINEAGE, "abcd"), START)
    view = view_of(book, 7)
    assert (view.verified, view.committed, view.lineage) == (True, True, LINEAGE.hex())
    assert (view.members, view.contributors, view.tokens, view.levels) == (4, 3, 300, 1)


def test_a_certificate_outweighs_those_who_say_that_their_attempt_broke() -> None:
    book = told(b=aborted(7), a=report(7))
    assert book.certify(result(7, LINEAGE), START + 9.0)
    assert (view_of(book, 7).committed, view_of(book, 7).at, book.committed) == (True, START + 9.0, 1)
    assert not book.certify(result(7, LINEAGE), START + 12.0), "it is told once"
    assert tell(book, "c", report(7)) == 0


def test_a_certificate_alone_is_no_view_until_a_peer_tells_of_the_round() -> None:
    book = a_book()
    assert not book.certify(result(7, LINEAGE), START)
    assert book.views() == []
    assert tell(book, "a", report(7), at=START + 1.0) == 1
    assert (view_of(book, 7).at, view_of(book, 7).verified) == (START + 1.0, True)


def test_the_group_of_a_small_swarm_has_one_cell() -> None:
    book = a_book()
    assert book.groups(["a", "b"]) == []
    book.certify(result(7, LINEAGE, ("b", "c", "a")), START)
    [group] = book.groups(["a", "b", "newcomer"])
    assert group.members == (("a", "late"), ("b", "counted"), ("c", "counted"))


def test_a_tree_puts_peers_into_the_cells_in_which_they_averaged() -> None:
    peers, group_size = [f"peer-{number}" for number in range(12)], 4
    cells = Cells(group_size)
    before = result(7, LINEAGE, peers[:2], present=12, levels=2, level=1, peers=(6, 6), children=(b"c" * 32,) * 2)
    head = Head(8, before.next_lineage, 0, 0, b"d" * 32, present=before.present)
    after = replace(before, round=8, lineage=before.next_lineage, members=(peers[3], peers[4]))
    book = a_book()
    for peer in peers[:10]:
        late = peer == peers[5]
        tell(book, peer, report(8, contributed=not late), usual=9)
    book.certify(before, START)
    book.certify(after, START)
    shown = {peer: (group.cell, part) for group in book.groups(peers) for peer, part in group.members}
    assert {peer: cell for peer, (cell, _) in shown.items()} == {peer: cells.key_of(head, peer).cell for peer in peers}
    assert len({cell for cell, _ in shown.values()}) > 1
    parts = [shown[peers[number]][1] for number in (3, 4, 5, 6, 10)]
    assert parts == ["delegate", "delegate", "late", "counted", "absent"]
    assert view_of(book, 8).members == 12


def test_the_grid_is_not_drawn_from_a_result_that_is_not_the_one_before() -> None:
    tree = {"present": 12, "levels": 2, "level": 1, "peers": (6, 6), "children": (b"c" * 32,) * 2}
    book = a_book()
    book.certify(result(8, LINEAGE, "ab", **tree), START)
    assert book.groups(["a", "b"]) == [], "how many peers there were before is not known"
    book.certify(result(7, b"x" * 32, "ab", **tree), START)
    assert book.groups(["a", "b"]) == []


def test_what_is_remembered_is_bounded() -> None:
    book = a_book()
    for certificate in chain(0, 200):
        book.certify(certificate.body, START)
    for round_ in range(200):
        tell(book, f"peer-{round_}", report(round_), usual=round_ + 1)
    assert [view.round for view in book.views()] == list(range(199, 199 - MAX_ROUNDS, -1))
    assert tell(book, "late", report(100), usual=200) == 0
    assert len(book.views()) == MAX_ROUNDS


def test_names_of_peers_that_left_are_forgotten_with_their_rounds() -> None:
    book = a_book()
    tell(book, "gone", aborted(0), usual=1)
    tell(book, "a", aborted(0), usual=1)
    book.forget_peers(["a"])
    assert [absence.name for absence in view_of(book, 0).absences] == ["a's laptop", "gone's laptop"]
    for round_ in range(1, MAX_ROUNDS + 2):
        tell(book, "a", report(round_), usual=round_ + 1)
    book.forget_peers(["a"])
    tell(book, "a", report(1), usual=2)
    assert "gone" not in book._books[WHOLE]._names | book._books[WHOLE]._told


def test_a_swarm_that_starts_again_from_an_old_checkpoint_is_shown() -> None:
    book = a_book(first=500)
    for round_ in range(500, 505):
        tell(book, "a", report(round_), usual=round_ + 1)
    book.certify(result(504, LINEAGE), START)
    assert tell(book, "a", report(100), usual=101) == 0, "it was committed long ago, for all that is known"
    assert tell(book, "a", report(100), report(101), usual=102) == 1
    assert [view.round for view in book.views()] == [101, 100]


def test_certificates_prove_their_members_unless_they_name_delegates_alone() -> None:
    book = a_book()
    assert book.proven() is None
    book.certify(result(7, LINEAGE, "ab"), START)
    book.certify(result(8, LINEAGE, "bc"), START)
    tell(book, "phantom", report(7), report(8))
    assert book.proven() == frozenset("abc")
    book.certify(result(9, LINEAGE, "ab", levels=2), START)
    assert book.proven() is None
