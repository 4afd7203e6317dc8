"""The JSON API: it answers as its document says, explains what is wrong, can only be read, and streams changes."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from p2ptrain.monitor import web
from p2ptrain.monitor.openapi import document
from p2ptrain.monitor.store import ALL_SERIES
from p2ptrain.monitor.web import COLUMNS, STALE_SECONDS, TABLE_COLUMNS
from p2ptrain.network.http_server import HEADERS
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.status.views import Event
from tests.support.coroutines import on_loop, on_loop_within
from tests.support.web.hostile_text import PAYLOADS
from tests.support.web.schemas import misfits
from tests.support.web.served import served as report_of
from tests.support.web.site import Site, served
from tests.support.web.stream_reader import Reader
from tests.support.web.watched import START, aborted, chain, report, trainer

ADA, BOB = trainer("a", name="Ada"), trainer("b", name="bob", loss=None)
PATHS = [path for path in document()["paths"] if path != "/api/v1/stream"]


def schema_of(path: str, status: str = "200") -> dict[str, Any]:
    schema: dict[str, Any] = document()["paths"][path]["get"]["responses"][status]["content"]["application/json"][
        "schema"
    ]
    return schema


def test_the_checker_of_schemas_finds_what_is_wrong() -> None:
    schema = schema_of("/api/v1/headline")
    assert list(misfits({}, schema))
    assert list(misfits({"error": 5}, schema_of("/api/v1/headline", "default"))) == ["$.error: 5 is no string"]
    assert list(misfits([1, 2, 3], {"type": "array", "prefixItems": [{"type": "integer"}] * 2}))
    assert list(misfits(True, {"type": "integer"}))
    assert list(misfits("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}))


@pytest.mark.parametrize("path", PATHS)
@on_loop_within(served, *(trainer(peer) for peer in "abc"))
async def test_every_endpoint_answers_as_the_document_says(site: Site, path: str) -> None:
    results = chain(8, 1)
    site.source.history = dict.fromkeys("abc", results)
    told = (report(7), aborted(8), report(8))
    for _ in range(3):
        site.source.records = [
            trainer(
                peer,
                round=9,
                lineage=results[0].body.next_lineage,
                last_rounds=told,
                evaluation=Evaluation("auc", 9, 0.9, 0.02, 64),
            )
            for peer in "abc"
        ]
        await site.watch.look()
        await asyncio.sleep(0)
        site.source.time += 10.0
    response = await site.get(path.format(peer="a"))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(misfits(response.json(), schema_of(path))) == []
    filled = [key for key, value in response.json().items() if value not in ([], {}, 0)]
    assert filled, "an empty answer proves nothing"


@on_loop_within(served, ADA)
async def test_the_document_names_all_of_the_api_and_only_that(site: Site) -> None:
    answer = await site.json("/openapi.json")
    assert answer == json.loads(json.dumps(document()))
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(answer)))
    assert references == set(answer["components"]["schemas"])
    routes = {route.path for route in web._Web(site.watch, site.store, site.source.now).routes()}
    assert {path for path in routes if path.startswith("/api/")} - {"/api/v1/openapi.json"} == set(answer["paths"])


NONSENSE: dict[str, dict[str, tuple[str, ...]]] = {
    "/peers": {"limit": ("-1", "1e3", "9" * 30, "5001"), "offset": ("²", ""), "sort": ("password", "__class__")},
    "/rounds": {"before": ("last",), "limit": ("501",)},
    "/leaders": {"limit": ("x",)},
    "/events": {"since": ("yesterday", "nan", "inf"), "limit": ("1001",)},
    "/series": {"window": ("year",), "names": ("loss,cats",)},
}


@pytest.mark.parametrize("path", NONSENSE)
@on_loop_within(served, ADA)
async def test_what_makes_no_sense_is_refused_by_name(site: Site, path: str) -> None:
    for name, value in [(name, value) for name, values in NONSENSE[path].items() for value in values]:
        response = await site.get(f"/api/v1{path}", **{name: value})
        assert response.status_code == 400, (name, value)
        assert response.json()["error"].startswith(f"{name}: ")
        assert list(misfits(response.json(), schema_of(f"/api/v1{path}", "default"))) == []


@on_loop_within(served, ADA)
async def test_who_is_not_there_is_not_found(site: Site) -> None:
    for path in ("/api/v1/peers/nobody", "/api/v1/nothing", "/peers/nobody", "/nothing", "/static/nothing.js"):
        assert (await site.get(path)).status_code == 404, path
    assert "no such peer" in (await site.get("/api/v1/peers/nobody")).json()["error"]
    assert (await site.get("/static/../test_web.py")).status_code == 404
    assert (await site.get("/static/%2e%2e/secret")).status_code == 404


@on_loop_within(served, ADA, BOB)
async def test_who_has_left_has_a_page_of_what_is_remembered(site: Site) -> None:
    assert "gave" in (await site.get("/peers/a")).text
    site.source.records = [BOB]
    await site.watch.look()
    page = await site.get("/peers/a")
    assert page.status_code == 200
    for words in ("It is not in the swarm now", "Ada", "500 tokens in 8 rounds", "Ada left", "Seen last"):
        assert words in page.text, words
    assert (await site.get("/api/v1/peers/a")).status_code == 404


@on_loop_within(served, ADA, trainer("b", privacy=PrivacyLoss(1.001, 8.0, 1e-5)))
async def test_a_page_tells_a_sites_loss_of_privacy_rounded_up(site: Site) -> None:
    assert "ε 1.01 of 8, δ 1e-05" in (await site.get("/peers/b")).text
    assert "Privacy spent" not in (await site.get("/peers/a")).text
    told = (await site.get("/api/v1/peers/b")).json()["record"]["privacy"]
    assert told == {"epsilon": 1.001, "limit": 8.0, "delta": 1e-5}


@on_loop_within(served)
async def test_nothing_that_peers_say_becomes_markup(site: Site) -> None:
    for payload in PAYLOADS.values():
        site.source.records = [trainer("a", name=payload[:60], note=payload[:200])]
        await site.watch.look()
        for path in ("/", "/peers/a", f"/?search={quote(payload[:90])}"):
            page = (await site.get(path)).text
            assert "<img" not in page
            assert not re.search(r"<(script|iframe|svg|base|link)[^>]*(brokenInto|203)|<script>", page)
            assert not re.search(r"\s(on\w+|style)=", re.sub(r'"[^"]*"|>[^<]*<', "", page))


@on_loop_within(served, ADA, looks=0)
async def test_before_the_first_look_there_is_nothing_to_show(site: Site) -> None:
    for path in PATHS:
        response = await site.get(path.format(peer="a"))
        expected = 200 if path.rpartition("/")[2] in ("leaders", "events", "series") else 503
        assert response.status_code == expected, path
        assert expected == 200 or "first look" in response.json()["error"]
    for path in ("/", "/metrics", "/healthz"):
        assert (await site.get(path)).status_code == 503


@on_loop
async def test_every_answer_has_the_headers_that_protect_who_reads_it_and_explains_no_defect() -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("/home/operator/secret")

    async with served(ADA) as site:
        site.store.leaders = broken  # type: ignore[method-assign, assignment]
        statuses = set()
        for path in (
            "/", "/peers/a", "/healthz", "/metrics", "/static/style.css", "/static/missing", "/missing",
            "/api/v1/missing", "/api/v1/peers?limit=x", "/api/v1/leaders", *(path.format(peer="a") for path in PATHS),
        ):  # fmt: skip
            response = await site.client.get(path)
            statuses.add(response.status_code)
            assert {name: response.headers.get(name) for name in HEADERS} == HEADERS, path
            assert "set-cookie" not in response.headers
            assert "access-control-allow-origin" not in response.headers
            assert "secret" not in response.text
        assert statuses == {200, 400, 404, 500}


@on_loop_within(served, ADA)
async def test_history_that_cannot_be_read_is_said_so(site: Site) -> None:
    await site.store._database.execute("DROP TABLE events")
    response = await site.get("/api/v1/events")
    assert response.status_code == 503
    assert "history" in response.json()["error"]
    assert (await site.get("/api/v1/snapshot")).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@on_loop_within(served, ADA)
async def test_nothing_can_be_written(site: Site, method: str) -> None:
    for path in ("/", "/metrics", "/healthz", "/static/style.css", "/api/v1/stream", *PATHS):
        response = await site.client.request(method, path.format(peer="a"))
        assert response.status_code == 405, path
        if not path.startswith("/static"):
            assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}, path


@on_loop_within(served, ADA)
async def test_head_is_answered_without_a_body_also_by_the_stream(site: Site) -> None:
    for path in ("/healthz", "/api/v1/headline", "/api/v1/stream"):
        response = await site.client.head(path)
        assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")


@on_loop_within(served, ADA)
async def test_health_is_for_machines(site: Site) -> None:
    async def health() -> tuple[int, str]:
        response = await site.get("/healthz")
        return response.status_code, response.json()["status"]

    assert await health() == (200, "ok")
    site.source.time += STALE_SECONDS
    assert await health() == (503, "no fresh look")
    site.source.records = None
    await site.watch.look()
    assert await health() == (503, "the swarm's directory does not answer")
    site.source.records = [ADA]
    await site.watch.look()
    assert await health() == (200, "ok")


@on_loop_within(served, *(trainer(f"p{number}") for number in range(100)))
async def test_large_answers_are_compressed_and_small_ones_are_not(site: Site) -> None:
    assert (await site.get("/api/v1/peers/table")).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in (await site.get("/healthz")).headers


@on_loop_within(served, ADA)
async def test_answers_are_made_once_for_all_who_ask_between_two_looks(site: Site) -> None:
    before = (await site.get("/api/v1/snapshot")).content
    site.source.records = []
    assert (await site.get("/api/v1/snapshot")).content == before
    await site.watch.look()
    assert (await site.get("/api/v1/snapshot")).content != before


@on_loop_within(served, ADA, BOB, replace(ADA, peer="c", name="cat", loss=1.0))
async def test_peers_are_searched_sorted_and_paged(site: Site) -> None:
    async def names(**asked: object) -> list[str]:
        return [peer["name"] for peer in (await site.json("/peers", **asked))["peers"]]

    assert await names() == ["Ada", "bob", "cat"]
    assert await names(sort="-name") == ["cat", "bob", "Ada"]
    assert await names(sort="loss") == ["bob", "cat", "Ada"], "what is missing comes first"
    assert await names(search="BO") == ["bob"]
    assert await names(limit=1, offset=1) == ["bob"]
    assert await names(limit=0) == []
    assert await names(offset=9) == []
    assert (await site.json("/peers", search="b", limit=0))["total"] == 1
    for column in COLUMNS:
        assert len(await names(sort=f"-{column}")) == 3, column
    for column in ("hosting", "serving", "last_rounds", "nothing"):
        assert (await site.get("/api/v1/peers", sort=column)).status_code == 400, "of several values, or none"


@on_loop_within(served, ADA, BOB)
async def test_the_table_has_a_cell_for_each_column(site: Site) -> None:
    table = await site.json("/peers/table")
    assert table["columns"] == list(TABLE_COLUMNS)
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [(row["peer"], row["loss"]) for row in rows] == [("a", 2.5), ("b", None)]


@on_loop_within(served)
async def test_rounds_go_on_in_the_past_without_a_gap_or_a_repetition(site: Site) -> None:
    for first in range(0, 80, 8):
        told = tuple(report(first + index) for index in range(8))
        site.source.records = [trainer("a", round=first + 8, last_rounds=told)]
        site.source.time += 10.0
        await site.watch.look()
    numbers: list[int] = []
    while page := (await site.json("/rounds", limit=30, before=numbers[-1] if numbers else 1 << 62))["rounds"]:
        numbers += [view["round"] for view in page]
    assert numbers == list(range(79, -1, -1))


@on_loop_within(served, ADA, BOB)
async def test_events_and_leaders_are_limited(site: Site) -> None:
    await site.store.add_events(Event(START + number, "joined", "a", str(number)) for number in range(9))
    assert [event["text"] for event in (await site.json("/events", limit=2))["events"]] == ["8", "7"]
    assert [event["text"] for event in (await site.json("/events", since=START + 8))["events"]] == ["8"]
    assert [each["peer"] for each in (await site.json("/leaders", limit=1))["leaders"]] == ["a"]


@on_loop_within(served, ADA, BOB)
async def test_series_have_all_columns_or_those_that_are_asked_for(site: Site) -> None:
    assert set((await site.json("/series"))["series"]) == set(ALL_SERIES)
    asked = await site.json("/series", window="day", names="loss,,peers")
    assert asked == {"step": 120, "at": asked["at"], "series": {"loss": [2.5], "peers": [2.0]}}


@on_loop_within(served)
async def test_peers_that_serve_are_found_by_how_much_and_percentiles_are_columns(site: Site) -> None:
    for number in range(8):
        site.source.records = [
            trainer("a", serving=report_of(100 + 5.0 * number, 1.0)),
            trainer("b", serving=report_of(100 + 5.0 * number, 4.0)), trainer("c"),
        ]  # fmt: skip
        site.source.time += 5.0
        await site.watch.look()
    found = (await site.json("/peers", sort="-served_per_second"))["peers"]
    assert [peer["record"]["peer"] for peer in found] == ["b", "a", "c"]
    serving = await site.json("/serving")
    assert (serving["peers"], serving["totals"]["requests"]) == (2, 175)
    asked = await site.json("/series", names="first_token_seconds_p95,loss")
    assert any(value for value in asked["series"]["first_token_seconds_p95"])
    assert "What it serves" in (await site.get("/peers/b")).text
    assert "What it serves" not in (await site.get("/peers/c")).text
    home = (await site.get("/")).text
    assert 'data-key="served_per_second"' in home
    assert 'id="serving-state" class="muted" hidden' in home


ADA, BOB = trainer("a"), trainer("b")


@on_loop_within(served, ADA, BOB)
async def test_the_stream_tells_of_each_look_until_the_reader_goes(site: Site) -> None:
    reader = Reader(site.app)
    start = await reader.next()
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-encoding" not in headers, "compressed, it would wait for more"
    assert (await reader.snapshot())["headline"]["training"] == 2
    site.source.records = [ADA]
    await site.watch.look()
    assert (await reader.snapshot())["headline"]["training"] == 1
    await reader.leave()


@on_loop
async def test_a_quiet_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEARTBEAT_SECONDS", 0.0)
    async with served(ADA) as site:
        reader = Reader(site.app)
        told = [(await reader.next()).get("body", b"") for _ in range(10)]
        assert any(body.startswith(b":") for body in told)
        await reader.leave()


@pytest.mark.parametrize("limit", ["MAX_STREAMS", "MAX_ADDRESS_STREAMS"])
@on_loop
async def test_no_more_than_so_many_streams_and_room_again_when_one_ends(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, limit, 2)
    async with served(ADA) as site:
        readers = [Reader(site.app) for _ in range(5)]
        statuses = [(await reader.next())["status"] for reader in readers]
        assert statuses == [200, 200, 503, 503, 503], "also of those that come at once"
        assert (await site.get("/api/v1/stream")).status_code == 503
        await readers[0].leave()
        last = Reader(site.app)
        await last.snapshot()
        for reader in (last, *readers[1:]):
            await reader.leave()


@on_loop
async def test_streams_of_one_address_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_ADDRESS_STREAMS", 1)
    async with served(ADA) as site:
        readers = [
            Reader(site.app, address) for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "10.0.0.1")
        ]
        assert [(await reader.next())["status"] for reader in readers] == [200, 503, 200, 200]
        for reader in readers:
            await reader.leave()
