"""Support code that a defect would turn into tests that pass without proving anything."""

import asyncio
import contextlib
import inspect
import subprocess
import time
from pathlib import Path

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.docker.changed import changed_paths, decide
from tests.support import seeds, summary, tools
from tests.support.coroutines import simulated
from tests.support.processes import preloaded, soak, swarmlet
from tests.support.sim.peers import Member, members


def test_a_missing_tool_skips_where_it_is_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tools.VARIABLE, "ip,nft")
    tools.unavailable("", "docker")
    with pytest.raises(pytest.skip.Exception, match="no engine"):
        tools.unavailable("no engine", "docker")
    assert [tools.needed(reason, "docker").args for reason in ("", "no engine")] == [(False,), (True,)]


@pytest.mark.parametrize("named", ["docker", "nft, docker", "all"])
def test_a_missing_tool_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv(tools.VARIABLE, named)
    tools.unavailable("", "docker")
    for use in (tools.unavailable, tools.needed):
        with pytest.raises(pytest.fail.Exception, match="P2PTRAIN_REQUIRE names docker: no engine"):
            use("no engine", "docker")


def test_a_misspelled_tool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tools.VARIABLE, "ip,dokcer")
    with pytest.raises(pytest.UsageError, match="dokcer is none of ip"):
        tools.required()


def test_changing_seeds_follow_from_the_variable_and_are_apart_from_fixed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for base in ("1", "2", "1"):
        monkeypatch.setenv(seeds.VARIABLE, base)
        seeds.base_seed.cache_clear()
        found.append([seeds.changing_seeds(name, 50) for name in ("small", "large")])
    monkeypatch.undo()
    seeds.base_seed.cache_clear()
    assert found[0] == found[2] != found[1]
    assert len({start for ranges in found for start in ranges}) == 4
    assert min(each.start for ranges in found for each in ranges) >= seeds.FIRST


@pytest.mark.parametrize(
    ("changed", "decision"),
    [
        (None, "image"),
        ([], "none"),
        (["p2ptrain/averaging/protocol/certificate.py", "README.md"], "none"),
        (["README.md", "constraints.txt"], "image"),
        (["constraints.txt", "deploy/container/entrypoint.sh"], "all"),
        (["compose.stages.yaml"], "all"),
    ],
)
def test_containers_are_tested_when_what_they_are_about_changed(changed: list[str] | None, decision: str) -> None:
    assert decide(changed)[0] == decision


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_changes_of_a_commit_are_those_since_the_one_before_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for number, name in enumerate(("first", "second", "third")):
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        assert changed_paths(tmp_path) == ((None, "HEAD~1") if not number else ([name], "HEAD~1"))
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert changed_paths(tmp_path)[0] == ["second", "third"]


REPORT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1" time="2.5">
<testcase name="a"><skipped message="no nft"/></testcase></testsuite></testsuites>"""


def test_the_last_line_of_a_summary_has_the_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lint.step").write_text("20 0")
    assert summary.main(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
    (tmp_path / "nat.step").write_text("100 2")
    (tmp_path / "nat.xml").write_text(REPORT)
    assert summary.main(tmp_path) == 1
    *_, reason, total = capsys.readouterr().out.splitlines()
    assert reason == "skipped in nat: 1 times: no nft"
    assert total == "3 passed, 2 failed, 1 skipped"


ALL_WELL = '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="0" time="2.5"/></testsuites>'


@pytest.mark.parametrize(("report", "step"), [("<testsuites><te", "20 0"), (ALL_WELL, "20 2"), ("", "20 1")])
def test_a_report_that_was_cut_off_and_a_step_that_failed_count_as_failures(
    tmp_path: Path, report: str, step: str
) -> None:
    (tmp_path / "ok.step").write_text("1 0")
    (tmp_path / "swarm.step").write_text(step)
    if report:
        (tmp_path / "swarm.xml").write_text(report)
    assert summary.main(tmp_path) == 1


def test_a_run_in_which_nothing_passed_has_failed(tmp_path: Path) -> None:
    assert summary.main(tmp_path) == 1


@pytest.mark.parametrize(("per_hour", "grows"), [(0.0, False), (600.0, True)])
def test_a_soak_fails_when_memory_grows_and_not_when_a_start_takes_some(per_hour: float, grows: bool) -> None:
    record = soak.Record()
    for second in range(0, 3600, 60):
        level = 500 + min(second, 300) + per_hour * second / 3600 + 5 * (second % 7)
        record.add(second, memory=level, files=40, threads=20, tasks=30, processes=5)
    lines = record.judge()
    assert lines[0].startswith("memory")
    assert bool(record.problems) == grows
    assert soak.growth(record.times, record.values["files"]).per_hour == 0


def test_a_soak_that_is_too_short_to_see_growth_fails() -> None:
    record = soak.Record()
    record.judge()
    assert record.problems


def test_a_server_that_all_tests_share_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[int] = set()
    monkeypatch.setattr(preloaded.SERVER, "process_ids", known)
    with contextlib.ExitStack() as stack:
        with swarmlet.nothing_left_behind():
            server = stack.enter_context(subprocess.Popen(["sleep", "100"]))
            stack.callback(server.kill)
            time.sleep(0.5)  # It is seen before its number is known.
            known.add(server.pid)
        assert server.poll() is None


def test_a_simulated_test_runs_to_its_end_and_fails_if_it_does() -> None:
    ended = []

    @simulated(members, 2, seed=range(2))
    async def test(swarm: list[Member], network: SimulatedNetwork, word: str) -> None:
        await asyncio.sleep(1.0)
        ended.append((len(swarm), network.loop.time() >= 1.0, word))
        assert word == "right"

    test(word="right", seed=0)
    with pytest.raises(AssertionError):
        test(word="wrong", seed=1)
    assert ended == [(2, True, "right"), (2, True, "wrong")]
    assert list(inspect.signature(test).parameters) == ["word", "seed"]
