"""Peers join while others train, while sources of state die, and while the bootstrap peer is down."""

import signal
from pathlib import Path

import pytest

from p2ptrain.network.link import SwarmLink
from p2ptrain.node.nat.contacts import KnownPeers
from p2ptrain.training.state.digest import CHUNK_BYTES
from tests.support.processes.daemons import port_of, refusing, wait_until
from tests.support.processes.files import checkpoints, round_of
from tests.support.processes.swarmlet import Swarmlet, Worker, check_states, nothing_left_behind, wait_for_agreement
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.processes.worker import DOWNLOADED_CHUNKS

LARGE = 500_000
"""Hidden width of a model with 5 million parameters: its state is 40 MB with the outer momentum."""
MATCHMAKING_SECONDS = 50.0
"""Above what a busy machine makes of a round, and below the patience of a test."""


def contributed_within(worker: Worker, num_rounds: int) -> bool:
    """Whether one of the first rounds that this worker committed has its work in it."""
    return any(event["contributed"] for event in [e for e in worker.rounds() if e["committed"]][:num_rounds])


def knows(worker: Worker, peer: str) -> bool:
    """Whether this worker would ask that peer if it began again after a crash."""
    return any(address.endswith(peer) for address in KnownPeers(worker.run_dir).addresses())


def bring_to_rest(*sources: Worker) -> tuple[int, set[str]]:
    """Hold two peers or more in the same round; return which it is, and the digests of their states."""
    last = max(source.rounds()[-1]["round"] for source in sources) + 3
    for source in sources:
        source.order(f"hold {last}")
    return last, {source.wait_for("round", lambda event: event["round"] >= last)["digest"] for source in sources}


@pytest.mark.fault(7)
def test_two_peers_that_join_at_once_in_the_middle_of_rounds_count_within_three(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"matchmaking_seconds": MATCHMAKING_SECONDS}) as swarm:
        first = swarm.start("a", step_seconds=0.25)
        first.wait_for_commit(1)
        mark = len(first.events)
        joiners = [swarm.start(name, link=first.link, step_seconds=0.25) for name in "bc"]
        for joiner in joiners:
            joiner.wait_for_commit(3)
        newest = first.wait_for_commit(3, since=mark)["round"]
        wait_for_agreement(first, *joiners, after_round=newest)
        for joiner in joiners:
            assert contributed_within(joiner, 3)
            assert joiner.wait_for("training")["round"] > 0, "it took on the swarm's state before its first step"
        # A round may wait a grace period for a peer that was announced but is not ready.
        assert max(event["seconds"] for event in first.rounds(mark)) < MATCHMAKING_SECONDS, "it waited for all of it"


@pytest.mark.fault(13)
def test_training_outlives_the_bootstrap_peer_and_who_knows_others_can_still_join(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        bootstrap = swarm.start("a")
        bootstrap.wait_for_commit(1)
        b, c = swarm.start("b"), swarm.start("c")
        for worker in (b, c):
            worker.wait_for_commit(3)
        link, b_id = bootstrap.link, b.wait_for("joined")["peer"]
        wait_until(lambda: knows(bootstrap, b_id) and knows(c, b_id), PATIENCE_SECONDS)
        bootstrap.kill()
        marks = [len(worker.events) for worker in (b, c)]
        for worker, mark in zip((b, c), marks, strict=True):
            worker.wait_for_commit(2, since=mark)
        c.kill()
        with refusing(port_of(link)):
            again, stranger = swarm.start("c", link=link), swarm.start("d", link=link)
            refusal = stranger.wait_for("error")
        assert again.wait_for("joined")["peer"] == c.wait_for("joined")["peer"]
        again.wait_for_commit(2)
        wait_for_agreement(b, again, after_round=b.rounds()[-1]["round"])
        assert refusal["kind"] == "BootstrapError"
        assert stranger.wait() == 4
        assert SwarmLink.parse(link).addresses[0] in refusal["message"]


@pytest.mark.fault(9)
def test_a_download_goes_on_from_another_source_when_one_dies_in_the_middle(tmp_path: Path) -> None:
    # With two peers at least in each round, both sources come to rest in the same one; with a short history, a
    # newcomer has to download the state.
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"min_peers": 2, "history_rounds": 1}) as swarm:
        a, b = swarm.start_all("a", "b", hidden=LARGE)
        _, at_rest = bring_to_rest(a, b)
        assert len(at_rest) == 1
        b.order("fault serving SIGKILL")
        newcomer = swarm.start("c", hidden=LARGE, hold=True)
        assert b.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert b.wait_for("fault")["phase"] == "serving"
        entered = newcomer.wait_for("training")
        assert entered["intact"]
        assert entered["resyncs"] == 1
        assert {entered["digest"]} == at_rest
        a.order("go")
        newcomer.order("go")
        a.wait_for_commit(2, after_round=entered["round"])
        newcomer.wait_for_commit(2)
        check_states(a, newcomer)


@pytest.mark.fault(10)
def test_a_newcomer_whose_only_source_dies_waits_for_its_newest_checkpoint(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"history_rounds": 1}) as swarm:
        source = swarm.start("a", hidden=LARGE, save_rounds=1)
        source.wait_for_commit(after_round=2)
        source.order("fault serving SIGKILL")
        newcomer = swarm.start("b", hidden=LARGE)
        assert source.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        wait_until(
            lambda: "no peer that holds the swarm's state is there" in newcomer.log.read_text(), PATIENCE_SECONDS
        )
        saved = max(map(round_of, checkpoints(tmp_path / "a")))
        assert not newcomer.rounds(), "it trains, though it has no more than a part of the state"
        again = swarm.start("a", link=newcomer.link, hidden=LARGE, save_rounds=1)
        assert again.wait_for("training")["round"] >= saved
        entered = newcomer.wait_for("training")
        assert entered["intact"]
        assert entered["round"] >= saved
        together = newcomer.wait_for_commit(2)
        again.wait_for_commit(2, after_round=together["round"])
        check_states(again, newcomer)


def test_a_newcomer_that_is_killed_in_the_middle_of_its_download_goes_on_from_there(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"min_peers": 2, "history_rounds": 1}) as swarm:
        a, b = swarm.start_all("a", "b", hidden=LARGE, upload=4e6)
        _, at_rest = bring_to_rest(a, b)
        newcomer = swarm.start("c", hidden=LARGE, hold=True)
        newcomer.order("fault downloading SIGKILL")
        assert newcomer.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert newcomer.wait_for("fault")["phase"] == "downloading"
        again = swarm.start("c", hidden=LARGE, hold=True)
        entered = again.wait_for("training")
        assert entered["intact"]
        assert {entered["digest"]} == at_rest
        num_bytes = 2 * 4 * 10 * LARGE  # Parameters and outer momentum: 8 inputs, a bias and an output for each unit.
        assert entered["downloaded"] <= num_bytes - (DOWNLOADED_CHUNKS - 4) * (CHUNK_BYTES // 2)
        assert not list((tmp_path / "c").glob("download-*/*"))


def test_a_newcomer_without_room_for_the_state_ends_and_says_where_it_needs_some(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"min_peers": 2, "history_rounds": 1}) as swarm:
        a, b = swarm.start_all("a", "b", hidden=LARGE)
        last, _ = bring_to_rest(a, b)
        newcomer = swarm.start("c", prefix=("prlimit", "--fsize=1000000"), hidden=LARGE)
        refusal = newcomer.wait_for("error")
        assert refusal["kind"] == "ResourceError"
        assert str(tmp_path / "c") in refusal["message"]
        assert "free some space" in refusal["message"]
        assert newcomer.wait() == 7
        for source in (a, b):
            source.order("go")
        wait_for_agreement(a, b, after_round=last)
