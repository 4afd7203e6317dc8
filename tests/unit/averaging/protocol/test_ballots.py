"""A voter's own votes: one body a view, in memory, in its file, and in several threads."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.context import ballots_in
from p2ptrain.averaging.protocol.ballots import MAX_LINEAGES, Ballots
from p2ptrain.averaging.protocol.certificate import Body, genesis
from p2ptrain.errors import IntegrityError, ResourceError

SWARM = b"s" * 32
HEAD = genesis(SWARM, b"d" * 32)


def make_body(
    name: str, view: int = 0, lineage: bytes = b"l" * 32, members: str = "abcd", round_: int = 3, levels: int = 1,
    is_reduced: bool = False,
) -> Body:  # fmt: skip
    """A result whose ``name`` tells it from others of its round."""
    size = len(members)
    return Body(
        SWARM, round_, lineage, b"d" * 32, 0, 0, name.encode() * 32, tuple(members), ((0, 10, 1),), "fp32/1",
        (0,) * (size + 1), (b"h" * 32,) * size, size, 0, levels, (1,) * size, view=view, is_reduced=is_reduced,
        table=bytes(32 if levels == 1 else 0),
    )  # fmt: skip


@pytest.fixture(params=["in memory", "in a file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "votes" if request.param == "in a file" else None


def restarted(ballots: Ballots, path: Path | None) -> Ballots:
    return ballots if path is None else Ballots(path)


def test_a_voter_votes_for_one_body_of_a_view(path: Path | None) -> None:
    ballots = Ballots(path)
    assert ballots.vote(make_body("x"))
    ballots = restarted(ballots, path)
    assert ballots.vote(make_body("x")), "the same one again"
    assert not ballots.vote(make_body("y"))
    ballots = restarted(ballots, path)
    assert ballots.vote(make_body("y", view=2))
    ballots = restarted(ballots, path)
    assert not any(ballots.vote(make_body("x", view=view)) for view in range(3)), "never back to an earlier view"
    assert ballots.vote(make_body("x", lineage=b"m" * 32)), "another round"


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 3)), max_size=12))
def test_whatever_it_is_asked_a_voter_never_votes_for_two_bodies_of_a_view(asked: list[tuple[str, int]]) -> None:
    ballots, voted = Ballots(), dict[int, str]()
    for name, view in asked:
        if ballots.vote(make_body(name, view)):
            assert voted.setdefault(view, name) == name
            assert view == max(voted)


@pytest.mark.parametrize(("signers", "votes"), [("ab", False), ("abxyz", False), ("abc", True), ("abcd", True)])
def test_a_light_voter_votes_for_a_later_view_only_if_most_of_the_earlier_roster_did(
    path: Path | None, signers: str, votes: bool
) -> None:
    ballots = Ballots(path)
    assert ballots.vote(make_body("x"), "abc")
    ballots = restarted(ballots, path)
    assert ballots.vote(make_body("y", view=1, members="bcde"), signers) == votes
    assert not ballots.vote(make_body("z"), "abcd"), "most signatures help no body of the same view"


def test_a_vote_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("no folder")
    ballots = Ballots(tmp_path / "gone" / "votes")
    with pytest.raises(ResourceError, match="this peer cannot keep its vote"):
        ballots.vote(make_body("x"))


def test_a_full_disk_is_logged_once_however_often_a_vote_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone").write_text("no folder")
    ballots = Ballots(tmp_path / "gone" / "votes")
    for _ in range(3):
        with pytest.raises(ResourceError):
            ballots.vote(make_body("x"))
    (tmp_path / "gone").unlink()
    assert ballots.vote(make_body("x"))
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_two_threads_do_not_vote_for_two_bodies_of_a_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member signs in a thread, while it answers another member's request for a vote in another."""
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.05))
    ballots = Ballots(tmp_path / "votes")
    with ThreadPoolExecutor(4) as pool:
        voted = list(pool.map(lambda name: ballots.vote(make_body(name)), "wxyz"))
    assert voted.count(True) == 1
    again = Ballots(tmp_path / "votes")
    assert [again.vote(make_body(name)) for name in "wxyz"] == voted


def test_votes_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    ballots = Ballots(tmp_path / "votes")
    lineages = [number.to_bytes(32, "big") for number in range(MAX_LINEAGES + 10)]
    for round_, lineage in enumerate(lineages):
        assert ballots.vote(make_body("x", lineage=lineage, round_=round_))
    assert (tmp_path / "votes").stat().st_size < 200 * MAX_LINEAGES
    ballots = Ballots(tmp_path / "votes")
    for round_, lineage in enumerate(lineages):
        assert not ballots.vote(make_body("y", lineage=lineage, round_=round_)), "nor for one that it forgot"
    assert ballots.vote(make_body("x", lineage=b"m" * 32, round_=len(lineages)))
    assert ballots.next_view(lineages[3], 3) == 1
    assert ballots.vote(make_body("y", view=1, lineage=lineages[3], round_=3)), "it goes back that far"
    assert not ballots.vote(make_body("z", view=1, lineage=lineages[3], round_=3))


def test_the_tip_is_kept_with_the_votes(tmp_path: Path) -> None:
    ballots = Ballots(tmp_path / "votes")
    ballots.tip = replace(HEAD, round=7, full=7)
    ballots.vote(make_body("x"))
    assert Ballots(tmp_path / "votes").tip == ballots.tip


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"\x00" + data])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, damage: object) -> None:
    """To begin without votes could mean to vote twice."""
    ballots = ballots_in(tmp_path, SWARM)
    ballots.vote(make_body("x"))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(IntegrityError, match=file.name):
        ballots_in(tmp_path, SWARM)


def test_a_write_that_broke_off_leaves_the_votes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballots = Ballots(tmp_path / "votes")
    ballots.vote(make_body("x"))

    def full(file: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match="full"):
            ballots.vote(make_body("y", view=1))
    assert Ballots(tmp_path / "votes").vote(make_body("z", view=1))


def test_each_swarm_has_votes_of_its_own(tmp_path: Path) -> None:
    ballots_in(tmp_path, SWARM).vote(make_body("x"))
    assert not ballots_in(tmp_path, SWARM).vote(make_body("y"))
    assert ballots_in(tmp_path, b"t" * 32).vote(make_body("y"))
    assert ballots_in(None, SWARM).vote(make_body("y"))
