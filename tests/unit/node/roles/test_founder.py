"""A founder's votes on the units of a pipeline."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.averaging.context import PeerContext
from p2ptrain.network.records.record import StageReport
from p2ptrain.node.roles import founder
from p2ptrain.runtime import real_runtime
from tests.support.records import record_of
from tests.support.sim.pipelines import make_manifest


def test_in_a_pipeline_a_founder_expects_each_unit_s_hosts_on_its_first_roster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer, which sends microbatches and averages nothing, would delay the beginning."""
    contexts = list[PeerContext]()
    monkeypatch.setattr(founder, "LightVotes", contexts.append)
    manifest = make_manifest(2).model_copy(update={"founders": ("me",)})
    listeners = list[Any]()
    peer: Any = SimpleNamespace(
        manifest=manifest, identity=SimpleNamespace(peer_id="me"), runtime=real_runtime(), membership=None,
        presence=SimpleNamespace(listeners=listeners), rpc=SimpleNamespace(scoped=lambda scope: scope),
    )  # fmt: skip
    founder.vote_as_founder(peer)
    now = peer.runtime.now()
    stages = (StageReport(0, 0, bytes(32), bytes(32), 0),)
    records = [record_of("trainer"), record_of("host", role="stage", stages=stages)]
    for listener in listeners:
        listener([(record, 1, now + 60.0) for record in records])
    assert [context.membership.present() for context in contexts] == [["host"], [], []]
