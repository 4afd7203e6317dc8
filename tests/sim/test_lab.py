"""The laboratory: some of its scenarios, each beside the undisturbed run of its seed; `make chaos` runs them all."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.fuzz.targets import TARGETS
from tests.lab import chaos
from tests.lab.__main__ import run
from tests.lab.scenario import (
    KNOWN_ROUNDS,
    SCENARIOS,
    Attackers,
    Expect,
    Measured,
    Peers,
    Scenario,
    Verdict,
    read_scenario,
)

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(SCENARIOS.glob("*.toml"))
QUICK = ("cables", "two_rosters", "takeover_download", "takeover_replay")
LEADERS = ("keepalives", "probing")
SLOW_LEADERS = ("closing", "never_joins", "phantom_leader", "silent_leader")


@pytest.mark.parametrize("name", QUICK)
def test_a_scenario_holds_or_fails_as_known(name: str) -> None:
    verdict = run(SCENARIOS / f"{name}.toml", "simulated", 1)
    assert verdict.is_as_expected, str(verdict)


@pytest.mark.fault(44)
@pytest.mark.parametrize("name", [*LEADERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LEADERS)])
def test_members_that_lead_badly_or_are_waited_for_in_vain_are_known_after_three_rounds(name: str) -> None:
    verdict = run(SCENARIOS / f"{name}.toml", "simulated", 1)
    assert verdict.is_as_expected, str(verdict)


def test_random_faults_and_strangers_break_no_promise() -> None:
    verdict = chaos.play(0, chaos.harmless_attacks())
    assert verdict.is_as_expected, str(verdict)


def test_every_scenario_can_be_read_and_each_of_the_attacks_has_one() -> None:
    scenarios = [read_scenario(path) for path in ALL]
    attacks = {group.attack for scenario in scenarios for group in scenario.attackers}
    assert attacks == {path.stem for path in (SCENARIOS.parent / "attacks").glob("*.py")}


def test_the_page_of_faults_names_the_scenarios_that_do_not_hold() -> None:
    _, _, page = (ROOT / "docs" / "reference" / "faults.md").read_text().partition("## Known failures")
    failing = {path.stem for path in ALL if read_scenario(path).known_failure}
    assert set(re.findall(r"`(\w+)`", page)) == failing


def test_the_examples_of_the_page_are_a_scenario_and_an_attack(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "lab.md").read_text()
    toml, attack = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("toml", "python"))
    (tmp_path / "scenario.toml").write_text(toml)
    scenario = read_scenario(tmp_path / "scenario.toml")
    assert [name for name, _ in scenario.named()] == ["b0", "t0", "t1", "t2", "t3"]
    assert scenario.timeline() == [(60, "kill", ("t1",)), (80, "restart", ("t1",))]
    found: dict[str, object] = {}
    exec(compile(attack, "attack", "exec"), found)
    assert callable(found["attack"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('promise = "x"\npeers = [{ count = 0 }]', "count"),
        ('promise = "x"\npeers = [{ count = 2 }]\nunknown = 1', "unknown"),
        ('promise = "x"\npeers = [{ count = 1, role = "bootstrap" }]', "nobody trains"),
        ('promise = "x"\npeers = [{ count = 2 }]\nattackers = [{ attack = "nonsense" }]', "nonsense"),
        ('promise = "x"\npeers = [{ count = 2 }]\nfaults = [{ kind = "kill", at = 1, peers = ["t2"] }]', "t2"),
        ('promise = "x"\npeers = [{ count = 2 }]\nfaults = [{ kind = "heal", at = 1, seconds = 2 }]', "heal"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_with_the_reason(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_scenario(path)


BROKEN: dict[str, Callable[[Measured], Measured]] = {
    "rounds a minute": lambda run: replace(run, ends=[]),
    "of the undisturbed rounds": lambda run: replace(run, ends=run.ends[::2]),
    "slow rounds": lambda run: replace(run, ends=[end for end in run.ends if end < 15 or end % 10 > 6]),
    "MB more memory": lambda run: replace(run, peak_mb=400.0),
    "lineages": lambda run: replace(run, lineages=2),
    "no honest peer signed": lambda run: replace(run, foreign_rounds=1),
    "a problem": lambda run: replace(run, problems=["a problem"]),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_whatever_breaks_an_expectation_is_a_violation(complaint: str) -> None:
    scenario = Scenario("x", (Peers(2),), attackers=(Attackers("flood"),), expect=Expect(rounds_per_minute=1.0))
    good = Measured(60.0, ends=[float(second) for second in range(1, 61)], tokens=100, peak_mb=100.0, lineages=1)
    assert Verdict("x", "simulated", 1, scenario, good, good).outcome == "holds"
    verdict = Verdict("x", "simulated", 1, scenario, BROKEN[complaint](good), good)
    assert verdict.outcome == "FAILS"
    assert any(complaint in violation for violation in verdict.violations)
    known = msgspec.structs.replace(scenario, known_failure="because")
    assert Verdict("x", "simulated", 1, known, BROKEN[complaint](good), good).is_as_expected
    assert not Verdict("x", "simulated", 1, known, good, good).is_as_expected


def test_what_attackers_cost_before_they_are_known_does_not_count() -> None:
    """Each of three slow rounds takes six seconds in place of one."""
    scenario = Scenario("x", (Peers(2),), attackers=(Attackers("flood"),))
    good = Measured(60.0, ends=[float(second) for second in range(1, 61)], lineages=1)
    slowed = replace(good, ends=[end for end in good.ends if end < 20 or end > 36 or end % 6 == 0])
    verdict = Verdict("x", "simulated", 1, scenario, slowed, good)
    assert len(verdict.slow) == KNOWN_ROUNDS
    assert slowed.rounds_per_minute() < scenario.expect.share * good.rounds_per_minute()
    assert verdict.share == 1.0
    assert verdict.outcome == "holds"


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_stands_its_corpus(name: str) -> None:
    """`make fuzz` looks for more."""
    from tests.fuzz.__main__ import corpus

    inputs = [*TARGETS[name].seeds(), *corpus(name)]
    assert inputs
    for data in inputs:
        TARGETS[name].run(data)
