"""`p2ptrain monitor` beside a swarm of real processes: what it shows is what happens."""

import signal
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes.daemons import port_of, refusing, wait_until
from tests.support.processes.swarmlet import Swarmlet, nothing_left_behind, run_command
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.web.monitors import NEXT_LOOK_SECONDS, RECORD_SECONDS, StatusPage, monitoring


def wait_for_verified_round(page: StatusPage) -> dict[str, Any]:
    """Return a round that is certified and that both peers have reported.

    A leader announces the certificate as soon as the round is over. Peers report their state with their next record.
    """
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        views = page.api("rounds")["rounds"]
        found[:] = [view for view in views if view["verified"] and view["agrees"] is not None]
        return bool(found)

    wait_until(is_there, PATIENCE_SECONDS)
    return found[0]


def test_the_page_follows_a_swarm_and_remembers_it(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        first, _ = swarm.start_all("first", "second")
        first.wait_for_commit(members=2)
        with monitoring(first.link, tmp_path / "history.sqlite", tmp_path / "monitor.log") as page:
            assert page.names() == {"first", "second"}
            certified = wait_for_verified_round(page)
            assert certified["members"] == certified["contributors"] == 2
            assert certified["tokens"] > 0
            assert certified["agrees"]
            (group,) = page.api("groups")["groups"]
            ids = {peer["record"]["peer"] for peer in page.api("peers")["peers"]}
            assert {peer for peer, _ in group["members"]} == ids
            assert page.get("healthz") == '{"status":"ok"}'
            assert "first" in page.get("")

            third = swarm.start("third", step_seconds=0.5, serves=4.0)
            third.wait_for("training")
            wait_until(lambda: page.names() == {"first", "second", "third"}, NEXT_LOOK_SECONDS + 5)
            wait_until(lambda: page.api("serving")["totals"]["requests"] > 0, PATIENCE_SECONDS)
            assert page.api("serving")["peers"] == 1
            third.signal_all(signal.SIGKILL)
            wait_until(lambda: page.names() == {"first", "second"}, RECORD_SECONDS + NEXT_LOOK_SECONDS)
            told = [(event["kind"], event["text"]) for event in page.api("events")["events"]]
            assert ("joined", "third joined") in told
            assert ("left", "third left") in told

            families = text_string_to_metric_families(page.get("metrics"))
            values = {sample.name: sample.value for family in families for sample in family.samples}
            assert values["p2ptrain_rounds_committed_total"] > 0
            assert values["p2ptrain_directory_up"] == 1
        with monitoring(first.link, tmp_path / "history.sqlite", tmp_path / "monitor.log") as page:
            assert "third left" in [event["text"] for event in page.api("events")["events"]]
            assert {leader["name"] for leader in page.api("leaders")["leaders"]} >= {"first", "second"}


def test_without_a_swarm_it_says_whom_it_asked(tmp_path: Path) -> None:
    with Swarmlet(tmp_path) as swarm:
        link = swarm.start_all("gone")[0].link
    with refusing(port_of(link)):
        done = run_command("monitor", link, "--port", "0")
    assert done.returncode == 4, done.stderr
    assert "nobody answers yet" in done.stderr  # Within seconds, before it gives up.
    assert "none of the swarm's known peers answers" in done.stderr
