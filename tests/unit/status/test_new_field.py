"""A field that is added to a peer's record is on the wire, in snapshots, in JSON and in its document, by that alone."""

import json
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Any

import pytest

from p2ptrain.monitor.openapi import document
from p2ptrain.monitor.web import to_json
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status import views
from tests.support.web.schemas import misfits
from tests.support.web.watched import snapshot_of, trainer

Extended: Any = make_dataclass("PeerRecord", [("mood", str, "")], bases=(PeerRecord,), frozen=True)


@pytest.fixture
def with_mood(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let views hold records with one more field."""
    monkeypatch.setattr(views, "PeerRecord", Extended)
    for made_once in (views.fields_of, document):
        made_once.cache_clear()
    yield
    for made_once in (views.fields_of, document):
        made_once.cache_clear()


@pytest.mark.usefixtures("with_mood")
def test_a_new_field_is_everywhere() -> None:
    told = Extended(**vars(trainer("a")), mood="calm")
    received = Extended.from_payload("a", told.to_payload())
    shown = json.loads(to_json(snapshot_of([received])))
    assert shown["peers"][0]["record"]["mood"] == "calm"
    schemas = document()["components"]["schemas"]
    assert schemas["PeerRecord"]["properties"]["mood"] == {"type": "string"}
    assert list(misfits(shown, schemas["Snapshot"])) == []


def test_all_of_a_record_is_shown_but_addresses_and_credentials() -> None:
    record = views.plain(trainer("a", addresses=("/ip4/10.1.2.3/tcp/1",)))
    assert set(vars(trainer("a"))) - set(record) == {"addresses", "credential", "revocations"}
