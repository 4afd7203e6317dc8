"""A company's swarm, by the files of examples/company: the organizer's pass admits a member, and no stranger."""

from pathlib import Path

from tests.support.processes.daemons import ROOT, wait_until
from tests.support.processes.files import committed, write_text
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS

FOLDER = ROOT / "examples" / "company"


def adapted(directory: Path, name: str) -> str:
    """Return a file of the example for loopback, any ports, and a folder in place of the machine's."""
    text = (FOLDER / name).read_text()
    for theirs, ours in {
        "/srv/company/text": str(directory / "text"),
        "/var/lib/p2ptrain": str(directory),
        "/ip4/10.0.0.5/tcp/31337": "/ip4/127.0.0.1/tcp/0",
        "/ip4/0.0.0.0/tcp/31337": "/ip4/127.0.0.1/tcp/0",
        "31338": "0",
    }.items():
        text = text.replace(theirs, ours)
    return text


def test_a_member_with_a_pass_trains_and_a_stranger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_text(tmp_path / "text" / "some.txt")
    swarm = init(tmp_path / "company")
    (swarm / "run.toml").write_text(adapted(tmp_path, "run.toml").replace("hidden = 128", "hidden = 32"))
    seed, member, stranger = (tmp_path / f"{name}.toml" for name in ("seed", "member", "stranger"))
    seed.write_text(adapted(tmp_path, "seed.toml"))
    ends = '[stop_after]\nrounds = 2\n[resources]\ndevice = "cpu"\nthreads = 1\n'
    member.write_text(adapted(tmp_path, "member.toml") + ends)
    stranger.write_text(member.read_text().replace(f"{tmp_path}/member", f"{tmp_path}/stranger"))
    link_file = swarm / "bootstrap" / "link.txt"
    with nothing_left_behind():
        with seeding(swarm):
            pass  # It has signed the manifest.
        link_file.unlink()
        with background_command(tmp_path / "seed.log", "peer", seed):
            wait_until(link_file.exists, PATIENCE_SECONDS)
            link = link_file.read_text().strip()
            assert "invite=" not in link
            refused = run_command("peer", member, "--link", link)
            assert refused.returncode == 3, refused.stderr
            peer = refused.stderr.split("--peer ")[1].split("'")[0]
            made = run_command("invite", swarm, "--peer", peer).stdout.split()[-1]
            done = run_command("peer", member, "--link", made)
            assert done.returncode == 0, done.stderr
            assert len(committed(tmp_path / "member")) >= 2
            for given in (link, made):
                refused = run_command("peer", stranger, "--link", given)
                assert refused.returncode == 3, refused.stderr
                assert "does not admit this peer" in refused.stderr
                assert not committed(tmp_path / "stranger")
