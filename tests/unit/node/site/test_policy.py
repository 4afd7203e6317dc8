"""A site's policy against manifests, tensors and records."""

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import Manifest, parse_manifest
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.node.site.policy import DEMANDS, SitePolicy
from tests.support.records import record_of

OPEN = """leave = ["*"]
samples = "exact"
training_loss = true
held_out_metrics = true
"""


def policy(folder: Path, text: str) -> SitePolicy:
    path = folder / "policy.toml"
    path.write_text(text)
    return SitePolicy.load(path)


def private(section: dict[str, Any] | None = None, **others: Any) -> Manifest:
    return parse_manifest({"data": {"source": "own"}, "private": section or {}, **others}, "a")


def test_a_policy_that_allows_all_refuses_no_private_swarm_and_every_other(tmp_path: Path) -> None:
    allows = policy(tmp_path, OPEN)
    assert allows.refusals(private({"weights": "samples"})) == []
    (reason,) = allows.refusals(Manifest())
    assert "no section [private]" in reason


@pytest.mark.parametrize(
    ("line", "section", "others", "words"),
    [
        ('samples = "no"', {"weights": "bucketed"}, {}, "private.weights = 'bucketed' tells more"),
        ('samples = "bucketed"', {"weights": "samples"}, {}, "private.weights = 'samples' tells more"),
        ("min_sites = 3", {"weights": "equal"}, {"averaging": {"min_peers": 2}}, "averaging.min_peers = 2"),
        ('stay = ["*.bn*"]', {"weights": "equal"}, {}, "no private.personal"),
        ('require = ["dp"]', {"weights": "equal"}, {}, "no section [differential_privacy]"),
        ('require = ["secure_aggregation"]', {"weights": "equal"}, {}, "no section [secure_aggregation]"),
    ],
)
def test_a_manifest_that_would_send_more_is_refused_with_the_line_and_the_setting(
    tmp_path: Path, line: str, section: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    rules = policy(tmp_path, f'# of our hospital\nleave = ["*"]\n{line}\n')
    (reason,) = rules.refusals(private(section, **others))
    assert f"policy.toml, line 3: {line}" in reason
    assert words in reason
    with pytest.raises(ConfigError, match="line 3"):
        rules.check(private(section, **others))


@pytest.mark.parametrize(("demand", "section"), DEMANDS.items())
def test_a_demand_is_met_by_a_section_of_the_manifest(tmp_path: Path, demand: str, section: str) -> None:
    rules = policy(tmp_path, f'require = ["{demand}"]\n')
    assert len(rules.refusals(private({"weights": "equal"}))) == 1
    assert rules.refusals(private({"weights": "equal"}, **{section: {}})) == []


@pytest.mark.parametrize(
    ("line", "section", "others"),
    [
        ('samples = "no"', {"weights": "equal"}, {}),
        ('samples = "bucketed"', {"weights": "bucketed"}, {}),
        ("min_sites = 3", {"weights": "equal"}, {"averaging": {"min_peers": 3}}),
        ('stay = ["*.bn*"]', {"weights": "equal", "personal": ["*.bn*"]}, {}),
    ],
)
def test_a_manifest_that_sends_no_more_is_allowed(
    tmp_path: Path, line: str, section: dict[str, Any], others: dict[str, Any]
) -> None:
    assert policy(tmp_path, f'leave = ["*"]\n{line}\n').refusals(private(section, **others)) == []


def test_the_file_allows_nothing_that_it_does_not_name(tmp_path: Path) -> None:
    rules = policy(tmp_path, "")
    (reason,) = rules.refusals(private())
    assert "has no line samples" in reason
    with pytest.raises(ConfigError, match="no line leave = …"):
        rules.check_tensors(["a"])
    record = record_of("a", loss=1.0, evaluation=Evaluation("auc", 1, 0.5, 0.1, 8), privacy=PrivacyLoss(1.0, 8.0, 1e-5))
    kept = rules.withheld(record)
    assert (kept.loss, kept.evaluation, kept.privacy) == (None, None, None)
    assert policy(tmp_path, OPEN).withheld(record) == record


def test_a_tensor_that_the_policy_keeps_is_refused_by_name(tmp_path: Path) -> None:
    rules = policy(tmp_path, 'leave = ["layers.*"]\nstay = ["*.bn.*"]\n')
    rules.check_tensors(["layers.0.weight"])
    with pytest.raises(ConfigError, match=r"line 2: stay.*'layers\.0\.bn\.bias'"):
        rules.check_tensors(["layers.0.weight", "layers.0.bn.bias"])
    with pytest.raises(ConfigError, match=r"line 1: leave.*'embed'"):
        rules.check_tensors(["layers.0.weight", "embed"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("leav = 1", "leave"),
        ('samples = "some"', "samples"),
        ('leave = "*"', r"leave: Input should be a list, such as \["),
        ("leave = [", "policy.toml"),
        ("held_out_metrics = true", "tells the rounded number of held-out samples"),
    ],
)
def test_an_invalid_policy_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        policy(tmp_path, text)


def test_a_missing_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory; give the path"):
        SitePolicy.load(tmp_path / "none.toml")
