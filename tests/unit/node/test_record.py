"""A peer's record is put together from what its parts know."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.nat.reach import Standing
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.reports.record import OwnRecord
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop


def make_record(network: Any) -> OwnRecord:
    options = PeerOptions("trainer", "ada", "cpu", None, Libp2pSettings())
    return OwnRecord("Qm", options, Runtime(random.Random(0), lambda: 5.0), network)


@on_loop
async def test_each_part_sets_its_own_fields_and_the_most_urgent_note_is_told() -> None:
    network = SimpleNamespace(
        rpc=SimpleNamespace(traffic=SimpleNamespace(sent=1, received=2)),
        transport=SimpleNamespace(num_refused=3),
        reach=SimpleNamespace(standing=Standing("relay", ("/ip4/192.0.2.1/tcp/1",), "no relay is known")),
        clock_note="",
    )
    own = make_record(network)
    blank = own.describe()
    own.parts.append(lambda record: replace(record, loss=2.5))
    own.parts.append(lambda record: replace(record, failovers=record.failovers + 1))
    assert own.describe() == replace(blank, loss=2.5, failovers=1)
    assert PeerRecord.from_payload("Qm", own.describe().to_payload()) == own.describe()
    notes = [own.describe().note]
    network.clock_note = "clock 9 s ahead"
    notes.append(own.describe().note)
    own.note = "paused"
    assert [*notes, own.describe().note] == ["no relay is known", "clock 9 s ahead", "paused"]
