"""What the sites told: a line for each change, and none outlives a policy that forbids it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.site.site_reports import SiteReports
from tests.support.records import record_of

MEASURED = Evaluation("accuracy", 3, 0.75, 0.1, 8)
SPENT = PrivacyLoss(1.5, 8.0, 1e-5)


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def at_once(*records: PeerRecord) -> list[tuple[PeerRecord, int, float]]:
    return [(record, 1, 9e9) for record in records]


def test_each_change_is_told_once(tmp_path: Path) -> None:
    reports, silent = SiteReports(tmp_path / "sites.jsonl"), record_of("QmSilent")
    first = replace(record_of("QmOne"), round=3, evaluation=MEASURED)
    for records in ([silent], [silent, first], [first], [replace(first, round=4)], [silent], [first]):
        reports.learn(at_once(*records))
    reports.learn(at_once(replace(first, round=4, privacy=SPENT)))
    reports.learn(at_once(replace(first, round=5, evaluation=None)))
    lines = told(tmp_path / "sites.jsonl")
    assert [(each["peer"], each["round"], each["privacy"]) for each in lines] == [
        ("QmOne", 3, None),
        ("QmOne", 4, {"epsilon": 1.5, "limit": 8.0, "delta": 1e-05}),
        ("QmOne", 5, None),
    ]
    assert [each["evaluation"] and each["evaluation"]["mean"] for each in lines] == [0.75, 0.75, None]


def test_a_site_with_a_policy_tells_anew_what_its_record_holds(tmp_path: Path) -> None:
    path = tmp_path / "sites.jsonl"
    SiteReports(path).learn(at_once(replace(record_of("QmOwn"), evaluation=MEASURED)))
    again = SiteReports(path, "QmOwn")
    for _ in range(2):
        again.learn(at_once(record_of("QmOwn"), record_of("QmOther")))
    assert [(each["peer"], each["evaluation"] is None) for each in told(path)] == [("QmOwn", False), ("QmOwn", True)]
