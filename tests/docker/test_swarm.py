"""A swarm in containers: it learns, outlives what is done to its containers, and comes back from its volumes."""

import json
import math
import time
from typing import Any

import pytest

from tests.support.containers.compose import Containers, docker, inspect

pytestmark = pytest.mark.timeout(900)

PAUSE_SECONDS = 30.0
CUT_SECONDS = 15.0
RECORD_SECONDS = 30.0
"""How long others believe the last that a peer said."""
ALL = ("slow-1", "trainer-1", "trainer-2", "trainer-3")


def test_all_peers_find_each_other_and_learn_the_same(swarm: Containers) -> None:
    swarm.wait_until("all peers", lambda: set(swarm.peers()) == {"bootstrap", *ALL})
    assert {peer["reachability"] for peer in swarm.peers().values()} <= {"direct", "unknown"}  # No relay is needed.
    swarm.wait_for_work_of("trainer-1", "trainer-2", "trainer-3")
    swarm.wait_until("a loss well below chance", lambda: (swarm.api("headline")["loss"] or 9) < 0.75 * math.log(256))
    assert swarm.api("headline")["health"] == "healthy"
    assert any(each["verified"] for each in swarm.api("rounds")["rounds"])
    swarm.check_states()


def test_a_slow_peer_takes_part_without_setting_the_pace(swarm: Containers) -> None:
    swarm.wait_until("work of the slow peer", lambda: swarm.peers()["slow-1"]["trained_tokens"] > 0)
    peers = swarm.peers()
    assert peers["slow-1"]["trained_tokens"] < peers["trainer-1"]["trained_tokens"]


def test_containers_say_how_they_are(swarm: Containers) -> None:
    for container in swarm.ids():
        swarm.wait_until("health", lambda: inspect(container, "{{.State.Health.Status}}") == "healthy")  # noqa: B023
        assert inspect(container, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}") == "true [ALL]"
    # The organizer's key is in the volume of the bootstrap peer, which nobody else has.
    look = "find / -xdev -name organizer.key; find /data /link -name organizer.key"
    for container in [*swarm.ids("trainer"), swarm.only("monitor")]:
        assert "organizer.key" not in docker("exec", container, "sh", "-c", look, check=False)
        mounted = inspect(container, "{{range .Mounts}}{{.Name}} {{end}}")
        assert "bootstrap" not in mounted


def test_nothing_gets_out_of_their_network(swarm: Containers) -> None:
    dial = "import socket; socket.create_connection(('203.0.113.1', 80), 5)"
    said = docker("exec", swarm.ids("trainer")[0], "python3", "-I", "-c", dial, check=False)
    assert "Network is unreachable" in said or "timed out" in said, said


@pytest.mark.fault(1)
def test_a_killed_trainer_is_not_missed_and_comes_back(swarm: Containers) -> None:
    victim, identity = swarm.names()["trainer-2"], swarm.peers()["trainer-2"]["peer"]
    docker("kill", victim)
    swarm.wait_for_rounds(3)
    swarm.wait_until("only three trainers", lambda: "trainer-2" not in swarm.peers(), RECORD_SECONDS + 30)
    docker("start", victim)
    swarm.wait_for_work_of(*ALL[1:])
    assert swarm.peers()["trainer-2"]["peer"] == identity
    swarm.check_states()


@pytest.mark.fault(13)
def test_training_goes_on_without_the_bootstrap_peer(swarm: Containers) -> None:
    bootstrap, identity = swarm.only("bootstrap"), swarm.peers()["bootstrap"]["peer"]
    docker("kill", bootstrap)
    swarm.wait_for_rounds(3)
    docker("start", bootstrap)
    since = time.time()
    swarm.wait_until("the bootstrap peer's new record", lambda: swarm.peers()["bootstrap"]["started_at"] > since - 5)
    assert swarm.peers()["bootstrap"]["peer"] == identity
    swarm.wait_for_rounds(2)


@pytest.mark.fault(16)
def test_a_paused_trainer_is_left_out_and_catches_up(swarm: Containers) -> None:
    victim = swarm.names()["trainer-1"]
    swarm.pause(victim)
    try:
        until = time.monotonic() + PAUSE_SECONDS
        swarm.wait_for_rounds(3)
        time.sleep(max(0.0, until - time.monotonic()))  # A pause of this length is what is tested.
    finally:
        docker("unpause", victim)
    before = swarm.peers()["trainer-2"]["round"]
    swarm.wait_until("it caught up", lambda: swarm.peers()["trainer-1"]["round"] > before)
    swarm.wait_for_work_of(*ALL[1:])
    swarm.check_states()


@pytest.mark.fault(19)
def test_a_trainer_whose_cable_was_pulled_comes_back(swarm: Containers) -> None:
    victim, identity = swarm.names()["trainer-3"], swarm.peers()["trainer-3"]["peer"]
    docker("network", "disconnect", swarm.network, victim)
    until = time.monotonic() + CUT_SECONDS
    swarm.wait_for_rounds(2)
    time.sleep(max(0.0, until - time.monotonic()))  # As above.
    docker("network", "connect", swarm.network, victim)
    before = swarm.round()
    swarm.wait_until("a round with it", lambda: swarm.round() > before and identity in swarm.counted())
    swarm.check_states()


def test_a_late_joiner_takes_part(swarm: Containers) -> None:
    swarm.up(4, "--no-recreate")
    try:
        swarm.wait_for_work_of("trainer-4")
        swarm.check_states()
    finally:
        swarm.up(3, "--no-recreate")
    swarm.wait_until("four trainers", lambda: "trainer-4" not in swarm.peers() or len(swarm.names()) == 4)


def test_chaos_harms_only_trainers_and_mends_what_it_did(swarm: Containers) -> None:
    started = {each: inspect(each, "{{.State.StartedAt}}") for each in (swarm.only("bootstrap"), swarm.only("monitor"))}
    swarm.compose("--profile", "chaos", "up", "-d", "--no-build", "--no-recreate", "--scale", "trainer=3", "chaos")
    chaos = swarm.only("chaos")
    assert docker("wait", chaos) == "0", docker("logs", chaos)
    said = docker("logs", chaos)
    assert "all is mended" in said
    assert " for " in said  # Something was done.
    assert {each: inspect(each, "{{.State.StartedAt}}") for each in started} == started
    swarm.wait_for_work_of(*ALL[1:])
    swarm.check_states()


def test_all_of_it_comes_back_from_its_volumes(swarm: Containers) -> None:
    identities = {name: peer["peer"] for name, peer in swarm.peers().items() if name in ("bootstrap", *ALL)}
    swarm.compose("stop")
    check_good_end(swarm)
    reached = max(rounds_of(swarm, name)[-1]["round"] for name in ALL[1:])
    link = swarm_link(swarm)
    swarm.compose("--profile", "chaos", "down")  # Without its volumes.
    assert swarm.ids() == []
    swarm.up(3)
    swarm.wait_until("all peers", lambda: set(identities) <= set(swarm.peers()))
    assert {name: swarm.peers()[name]["peer"] for name in identities} == identities
    swarm.wait_until("rounds after the last one", lambda: swarm.round() > reached)
    assert swarm_link(swarm) == link
    # History is in a volume, too.
    assert min(each["round"] for each in swarm.api("rounds?limit=500")["rounds"]) < reached
    swarm.wait_for_work_of(*ALL[1:])
    swarm.check_states()


def test_all_end_in_good_order_and_agree(swarm: Containers) -> None:
    swarm.wait_for_rounds(1)
    swarm.compose("stop")
    check_good_end(swarm)
    digests: dict[int, set[str]] = {}
    for name in ALL:
        for event in rounds_of(swarm, name):
            digests.setdefault(event["round"], set()).add(event["digest"])
    assert len(digests) > 20
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}


def check_good_end(swarm: Containers) -> None:
    """Every container drained, and no log has a traceback."""
    for container in swarm.ids():
        name, code = inspect(container, "{{.Name}}"), inspect(container, "{{.State.ExitCode}}")
        log = docker("logs", container)
        assert code == "0", f"{name}: {code}\n{log[-2000:]}"
        assert "Traceback" not in log, f"{name}: {log[-4000:]}"
        assert "OOMKilled" not in inspect(container, "{{if .State.OOMKilled}}OOMKilled{{end}}")


def rounds_of(swarm: Containers, name: str) -> list[dict[str, Any]]:
    text = from_volume(swarm, "trainers", f"{name}/metrics.jsonl")
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [event for event in events if event["kind"] == "round" and event["committed"]]


def swarm_link(swarm: Containers) -> str:
    return from_volume(swarm, "link", "link.txt")


def from_volume(swarm: Containers, volume: str, path: str) -> str:
    """A file of a volume, which no running container needs to have."""
    mount = f"{swarm.project}_{volume}:/look:ro"
    return docker(
        "run", "--rm", "--network", "none", "--volume", mount, "--tmpfs", "/data", "--entrypoint", "cat",
        "p2ptrain-test", f"/look/{path}",
    )  # fmt: skip
