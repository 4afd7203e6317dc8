"""What a site notes of what leaves it."""

import math
from pathlib import Path

from p2ptrain.averaging.context import Sending
from p2ptrain.manifest import Manifest
from p2ptrain.node.site.chain import Chain, read_chain
from p2ptrain.node.site.departures import Departures
from tests.support.records import record_of
from tests.support.signers import NamedSigner


def test_a_loss_that_is_not_finite_keeps_nothing_from_the_log(tmp_path: Path) -> None:
    path, site = tmp_path / "left.jsonl", NamedSigner("site")
    chain, _ = Chain.go_on(path, site, lambda: 7.0)
    departures = Departures(Manifest(), None, chain)
    departures.withheld(record_of("site", loss=math.nan))
    departures.sending(Sending(3, 0, 10, "int8", 5, ("other",)))
    (entry,) = read_chain(path, site).entries
    assert entry["metrics"] == {"loss": None, "evaluation": None}
