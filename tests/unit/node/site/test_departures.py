"""What a site notes of what leaves it."""

import math
from pathlib import Path

from p2ptrain.averaging.context import Sending
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.node.site.chain import Chain, read_chain
from p2ptrain.node.site.departures import Departures
from tests.support.records import record_of
from tests.support.signers import NamedSigner


def test_an_entry_tells_what_the_newest_record_does_of_the_samples(tmp_path: Path) -> None:
    path, site = tmp_path / "left.jsonl", NamedSigner("site")
    departures = Departures(Manifest(), None, Chain.go_on(path, site, lambda: 7.0)[0])
    measured, spent = Evaluation("auc", 3, 0.9, None, 64), PrivacyLoss(1.5, 8.0, 1e-5)
    for record in (record_of("site", loss=2.0, evaluation=measured, privacy=spent), record_of("site", loss=math.nan)):
        departures.withheld(record)
        departures.sending(Sending(3, 0, 10, "int8", 5, ("other",)))
    first, second = (entry["metrics"] for entry in read_chain(path, site).entries)
    assert (first["loss"], first["evaluation"]["mean"], first["privacy"]["epsilon"]) == (2.0, 0.9, 1.5)
    assert second == {"loss": None, "evaluation": None, "privacy": None}, "JSON has no NaN"
