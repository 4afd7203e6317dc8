"""A swarm that admits peers by invites: real processes, from the link to the ban."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.network.link import SwarmLink
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, set_options, write_role
from tests.support.processes.swarmlet import (
    Seed,
    background_command,
    init,
    nothing_left_behind,
    run_command,
    seeding,
)
from tests.support.processes.tellers import PATIENCE_SECONDS

MODEL = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64, "context": 32}


@pytest.fixture
def seed(tmp_path: Path) -> Iterator[Seed]:
    swarm = init(tmp_path / "swarm", *set_options(model=MODEL, training={"every": 4}))
    with nothing_left_behind(), seeding(swarm) as seed:
        yield seed


def said(*arguments: str | Path) -> str:
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def members(plain: str) -> dict[str, list[str]]:
    """The cells of each peer's row, by its name."""
    rows = [line.split() for line in said("members", plain).splitlines()[1:]]
    return {row[1]: row for row in rows}


def round_of(plain: str, name: str) -> int:
    row = members(plain).get(name)
    return int(row[3]) if row is not None and "not" not in row else -1


@pytest.mark.fault(37)
def test_an_invite_lets_in_until_it_is_revoked_and_a_ban_throws_out(tmp_path: Path, seed: Seed) -> None:
    plain = str(SwarmLink.parse(seed.link).plain)

    def refused(link: str, why: str) -> None:
        name = f"refused-{why.split()[-1]}"
        join = ("join", link, "--yes", "--minutes", "1", "--listen", LOOPBACK, "--run-dir", tmp_path / name)
        done = run_command(*join)
        assert done.returncode == 3, done.stderr
        assert f"does not admit this peer: {why}; ask its organizer for an invite link" in done.stderr
        assert "p2ptrain invite DIR --peer Qm" in done.stderr

    refused(plain, "it has neither an invite to this swarm nor a pass")
    ada = write_role(tmp_path / "ada.toml", "trainer", link=seed.link)
    with background_command(tmp_path / "ada.log", "peer", ada) as process:
        wait_until(lambda: round_of(plain, "ada") > 0, PATIENCE_SECONDS)
        assert "1 peers that the invite let in stay" in said("revoke", seed.directory, seed.link)
        wait_until(lambda: "revoked" in _told_by(seed.link, tmp_path), PATIENCE_SECONDS)
        refused(seed.link, "its invite was revoked")

        link = said("invite", seed.directory, "--expires", "1h").split()[-1]
        bob = write_role(tmp_path / "bob.toml", "trainer", link=link, stop_after={"rounds": 5})
        before = round_of(plain, "ada")
        assert run_command("peer", bob).returncode == 0
        assert round_of(plain, "ada") > before
        # Its pass is in the run directory, so the plain link is enough now.
        again = write_role(tmp_path / "bob.toml", "trainer", link=plain, stop_after={"rounds": 1})
        assert run_command("peer", again).returncode == 0

        assert process.poll() is None
        said("ban", seed.directory, members(plain)["ada"][0])
        assert process.wait(PATIENCE_SECONDS) == 3
    assert "the organizer has banned this peer" in (tmp_path / "ada.log").read_text()
    assert "not" in members(plain).get("ada", ["not"])


def _told_by(link: str, tmp_path: Path) -> str:
    """Return what a newcomer hears of the invite in a link."""
    role = write_role(tmp_path / "newcomer.toml", "trainer", link=link, stop_after={"rounds": 1})
    return run_command("peer", role).stderr


def test_a_pass_for_one_peer_admits_it_and_nobody_else(tmp_path: Path, seed: Seed) -> None:
    plain = str(SwarmLink.parse(seed.link).plain)
    join = ("--yes", "--rounds", "1", "--listen", LOOPBACK, "--run-dir", tmp_path / "ada")
    peer = run_command("join", plain, *join).stderr.split("--peer ")[1].split("'")[0]
    link = said("invite", seed.directory, "--peer", peer).split()[-1]
    done = run_command("join", link, *join)
    assert done.returncode == 0, done.stderr
    other = run_command("join", link, *join[:-1], tmp_path / "bob")
    assert other.returncode == 3
    assert "its pass is not signed for this peer and swarm" in other.stderr


@pytest.mark.fault(37)
def test_a_seed_of_an_open_swarm_lets_in_so_many_peers_of_a_network_and_no_more(tmp_path: Path) -> None:
    admission = {"mode": "open", "puzzle_bits": 4, "peers_per_network": 1}
    swarm = init(tmp_path / "swarm", *set_options(model=MODEL, training={"every": 4}, admission=admission))

    with nothing_left_behind(), seeding(swarm) as open_seed:

        def join(name: str) -> tuple[int, str]:
            options = ("--yes", "--rounds", "1", "--listen", LOOPBACK, "--run-dir", tmp_path / name)
            done = run_command("join", open_seed.link, *options)
            return done.returncode, done.stderr

        assert join("ada")[0] == 0
        code, why = join("bob")
        assert code == 3, why
        assert "the 1 places of its network 127.0.0.0/24 are taken at its seed" in why
        assert "p2ptrain invite DIR --peer Qm" in why
        assert join("ada")[0] == 0  # It keeps its pass.
        assert "pass" in said("members", open_seed.link)
