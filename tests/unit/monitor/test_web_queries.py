"""What can be asked of the JSON API: searched, sorted, paged, limited, and of columns."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.monitor.store import ALL_SERIES
from p2ptrain.monitor.web import COLUMNS, TABLE_COLUMNS
from p2ptrain.status.views import Event
from tests.support.coroutines import on_loop
from tests.support.web.served import served as report_of
from tests.support.web.site import served
from tests.support.web.watched import START, report, trainer

ADA, BOB = trainer("a", name="Ada"), trainer("b", name="bob", loss=None)


@on_loop
async def test_peers_are_searched_sorted_and_paged() -> None:
    async with served(ADA, BOB, replace(ADA, peer="c", name="cat", loss=1.0)) as site:

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


@on_loop
async def test_the_table_has_a_cell_for_each_column() -> None:
    async with served(ADA, BOB) as site:
        table = await site.json("/peers/table")
        assert table["columns"] == list(TABLE_COLUMNS)
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        assert [(row["peer"], row["loss"]) for row in rows] == [("a", 2.5), ("b", None)]


@on_loop
async def test_rounds_go_on_in_the_past_without_a_gap_or_a_repetition() -> None:
    async with served() as site:
        for first in range(0, 80, 8):
            told = tuple(report(first + index) for index in range(8))
            site.source.records = [trainer("a", round=first + 8, last_rounds=told)]
            site.source.time += 10.0
            await site.watch.look()
        numbers: list[int] = []
        while page := (await site.json("/rounds", limit=30, before=numbers[-1] if numbers else 1 << 62))["rounds"]:
            numbers += [view["round"] for view in page]
        assert numbers == list(range(79, -1, -1))


@on_loop
async def test_events_and_leaders_are_limited() -> None:
    async with served(ADA, BOB) as site:
        await site.store.add_events(Event(START + number, "joined", "a", str(number)) for number in range(9))
        assert [event["text"] for event in (await site.json("/events", limit=2))["events"]] == ["8", "7"]
        assert [event["text"] for event in (await site.json("/events", since=START + 8))["events"]] == ["8"]
        assert [each["peer"] for each in (await site.json("/leaders", limit=1))["leaders"]] == ["a"]


@on_loop
async def test_series_have_all_columns_or_those_that_are_asked_for() -> None:
    async with served(ADA, BOB) as site:
        assert set((await site.json("/series"))["series"]) == set(ALL_SERIES)
        asked = await site.json("/series", window="day", names="loss,,peers")
        assert asked == {"step": 120, "at": asked["at"], "series": {"loss": [2.5], "peers": [2.0]}}


@on_loop
async def test_peers_that_serve_are_found_by_how_much_and_percentiles_are_columns() -> None:
    async with served() as site:
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
