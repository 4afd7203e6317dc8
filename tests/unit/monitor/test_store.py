"""The past in a file: means per step, bounds, restarts of peers and of the monitor, and files that are not ours."""

import asyncio
import contextlib
import filecmp
import functools
import json
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ResourceError
from p2ptrain.monitor import store as store_module
from p2ptrain.monitor.store import COUNTED, MAX_CONTRIBUTED, MAX_EVENT_CHARS, SERIES, WINDOWS, Contribution, Store
from p2ptrain.network.records.serving import Latencies
from p2ptrain.status.serving import Amount
from p2ptrain.status.views import Event, RoundView
from tests.support.coroutines import on_loop, on_loop_within
from tests.support.web.stores import open_store, peer
from tests.support.web.watched import START, SWARM, report, rounds_of, trainer

OTHER_SWARM = "cd" * 32
ON_THE_WEEK = START - START % 900
NASTY = ["Robert'); DROP TABLE contributions;--", "\"quoted\" 'twice'", "100%_*?", "\u202e\U0001f600", ""]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


def round_view(number: int) -> RoundView:
    [view] = rounds_of(trainer("a", last_rounds=(report(number),)), usual=number + 1)
    return view


@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [
        ("loss", {0: 1.0, 5: 2.0, 10: 6.0, 130: 9.0}, {"hour": [1.5, 6.0, 9.0], "day": [3.0, 9.0], "week": [4.5]}),
        ("aborted", {0: 1.0, 5: 0.0, 10: 2.0, 130: 1.0}, {"hour": [1.0, 2.0, 1.0], "day": [3.0, 1.0], "week": [4.0]}),
        (
            "served_tokens_per_second",
            {0: Amount(100.0, 10.0), 10: Amount(0.0, 20.0), 30: Amount(500.0, 30.0)},
            {"hour": [10.0, 0.0, 500 / 30], "day": [10.0], "week": [10.0]},
        ),
    ],
    ids=["a mean", "a count", "a rate"],
)
@on_loop_within(open_store)
async def test_of_the_values_of_one_step_each_window_keeps_what_they_come_to(
    store: Store, name: str, told: dict[int, float | Amount], expected: dict[str, list[float]]
) -> None:
    for seconds, value in told.items():
        await store.add_points(ON_THE_WEEK + seconds, {name: value})
    for window, (_, step, _) in WINDOWS.items():
        series = await store.series(window, [name], ON_THE_WEEK + 200)
        at = sorted({int(ON_THE_WEEK) + seconds // step * step for seconds in told})
        assert series == {"step": step, "at": at, "series": {name: expected[window]}}


@settings(max_examples=15)
@given(
    points=st.lists(
        st.tuples(st.floats(0, 3500), st.dictionaries(st.sampled_from(SERIES), st.floats(-1e12, 1e12), max_size=3)),
        max_size=12,
    )
)
@on_loop
async def test_every_column_is_as_long_as_the_times_and_each_mean_lies_between_what_was_added(
    points: list[tuple[float, dict[str, float]]],
) -> None:
    async with open_store() as store:
        for seconds, values in points:
            await store.add_points(ON_THE_WEEK + seconds, values)
        series = await store.series("hour", SERIES, ON_THE_WEEK + 3500)
        assert series["at"] == sorted(set(series["at"]))
        for name, column in series["series"].items():
            assert len(column) == len(series["at"])
            added = [values[name] for _, values in points if name in values]
            kept = [value for value in column if value is not None]
            assert (not kept) == (not added)
            slack = 1e-6 * (1.0 + max(map(abs, added), default=0.0))
            if name in COUNTED:
                assert abs(sum(kept) - sum(added)) <= slack
                continue
            assert all(min(added) - slack <= value <= max(added) + slack for value in kept)


@settings(max_examples=20)
@given(
    told=st.lists(st.tuples(st.integers(0, 3000), st.lists(st.floats(0, 100), max_size=20)), min_size=1, max_size=30)
)
@on_loop
async def test_percentiles_of_a_step_are_those_of_all_samples_in_it_however_long_it_is(
    told: list[tuple[int, list[float]]],
) -> None:
    async with open_store() as store:
        for seconds, samples in told:
            await store.add_points(ON_THE_WEEK + seconds, {"token_seconds": Latencies.of(samples)})
        names = ["token_seconds_p50", "token_seconds_p99", "first_token_seconds_p50"]
        for window, (_, step, _) in WINDOWS.items():
            series = await store.series(window, names, ON_THE_WEEK + 3000)
            expected: dict[int, list[float]] = {}
            for seconds, samples in told:
                if samples:
                    expected.setdefault(int(ON_THE_WEEK) + seconds // step * step, []).extend(samples)
            assert series["at"] == sorted(expected)
            for name, share in (("token_seconds_p50", 0.5), ("token_seconds_p99", 0.99)):
                assert series["series"][name] == [Latencies.of(expected[at]).quantile(share) for at in series["at"]]
            assert series["series"]["first_token_seconds_p50"] == [None] * len(expected)


@on_loop
async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "not yet there" / "history.db"
    view = round_view(7)
    async with open_store(path) as store:
        await store.add_points(START, {"loss": 2.5})
        await store.add_events([Event(START, "joined", "a", "Ada joined"), Event(START + 1, "left", "a", "Ada left")])
        await store.add_rounds([view, round_view(6)])
        await store.contribute([peer(trained_tokens=5)], START, 10.0)
    async with open_store(path) as store:
        assert (await store.series("hour", ["loss"], START + 60))["series"] == {"loss": [2.5]}
        assert [event.kind for event in await store.events(0.0, 10)] == ["left", "joined"]
        assert [event.kind for event in await store.events(START + 1, 10)] == ["left"]
        assert len(await store.events(0.0, 1)) == 1
        assert await store.rounds(1 << 62, 1) == [json.loads(json.dumps(asdict(view)))]
        assert [each["round"] for each in await store.rounds(7, 9)] == [6]
        assert await store.contribution("a") == Contribution("a", "a's laptop", 5, 8, 10.0, START, START)
    assert [each.name for each in path.parent.iterdir()] == ["history.db"], "nothing else is left there"


@on_loop_within(open_store)
async def test_a_round_of_which_more_is_known_replaces_what_was_kept(store: Store) -> None:
    await store.add_rounds([round_view(7)])
    await store.add_rounds([replace(round_view(7), verified=True)])
    assert [each["verified"] for each in await store.rounds(100, 10)] == [True]


async def fill(path: Path, swarm: str = SWARM.digest) -> None:
    async with open_store(path, swarm) as store:
        await store.add_events([Event(START, "joined", "a", "x" * 200)] * 200)


async def set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """Open a store over a file that cannot be used; where the file is now."""
    async with open_store(path) as store:
        assert await store.events(0.0, 10) == []
        await store.add_events([Event(START, "joined", "b", "new")])
    async with open_store(path) as store:
        assert [event.text for event in await store.events(0.0, 10)] == ["new"]
    aside = path.with_name(f"{path.name}.{int(START)}.aside")
    assert aside.name in caplog.text
    return aside


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def execute(path: Path, *commands: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        for command in commands:
            database.execute(command)
        database.commit()


def version(number: int) -> Callable[[Path], None]:
    return lambda path: execute(path, f"PRAGMA user_version = {number}")


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(b"this is no database" * 1000),
    **{f"cut at {share}": functools.partial(cut, share=share) for share in (0.01, 0.3, 0.6, 0.95)},
    "damaged pages": damage,
    **{f"version {number}": version(number) for number in (0, 1, 99)},
}


@pytest.mark.parametrize("name", UNUSABLE)
@on_loop
async def test_a_file_that_cannot_be_used_is_set_aside_and_kept(
    path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    await fill(path)
    UNUSABLE[name](path)
    shutil.copy(path, copy := path.with_name("copy"))
    assert filecmp.cmp(await set_aside(path, caplog), copy, shallow=False)
    assert "version" not in name or name in caplog.text


@on_loop
async def test_another_programs_database_is_not_written_to(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    execute(path, "CREATE TABLE bookmarks (url TEXT)")
    shutil.copy(path, copy := path.with_name("copy"))
    assert filecmp.cmp(await set_aside(path, caplog), copy, shallow=False)


@on_loop
async def test_the_history_of_another_swarm_is_set_aside_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await fill(path, OTHER_SWARM)
    async with open_store(await set_aside(path, caplog), OTHER_SWARM) as store:
        assert len(await store.events(0.0, 1000)) == 200


def test_a_file_that_another_program_holds_is_left_where_it_is(path: Path) -> None:
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("CREATE TABLE theirs (x)")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.0))
        with pytest.raises(ResourceError, match="locked"):
            asyncio.run(Store.open(path, SWARM.digest, START))
    holder.close()
    assert [each.name for each in path.parent.iterdir()] == ["history.db"]


def test_a_path_that_cannot_be_a_file_is_told_to_the_operator(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path in (tmp_path, tmp_path / "a file" / "history.db", tmp_path / ("x" * 300)):
        with pytest.raises(ResourceError, match="choose a file that can be written"):
            asyncio.run(Store.open(path, SWARM.digest, START))
    assert [each.name for each in tmp_path.iterdir()] == ["a file"]


def test_a_file_that_cannot_be_opened_leaves_no_thread_that_answers_a_closed_loop(tmp_path: Path) -> None:
    async def fail() -> None:
        with pytest.raises(ResourceError):
            await Store.open(tmp_path, SWARM.digest, START)

    died: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", died.append)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # So that the threads take turns as they do on a busy machine.
        try:
            for _ in range(100):
                asyncio.run(fail())
        finally:
            sys.setswitchinterval(interval)
    assert not died


@on_loop
async def test_a_store_that_fails_says_so_and_can_still_be_closed(path: Path) -> None:
    async with open_store(path) as store:
        execute(path, "DROP TABLE events")
        with pytest.raises(ResourceError, match="events"):
            await store.add_events([Event(START, "joined", "a", "text")])
        with pytest.raises(ResourceError, match="events"):
            await store.events(0.0, 1)
        await store.add_points(START, {"loss": 1.0})


@pytest.mark.parametrize("nasty", NASTY)
@on_loop_within(open_store)
async def test_text_is_only_text(store: Store, nasty: str) -> None:
    await store.contribute([peer("a"), peer(nasty, name=nasty)], START, 1.0)
    await store.add_events([Event(START, nasty, nasty, nasty)])
    found = await store.contribution(nasty)
    assert found is not None
    assert found.name == nasty
    assert await store.events(0.0, 10) == [Event(START, nasty, nasty, nasty)]
    assert await store.contribution("' OR 1=1 --") is None
    assert (await store.series("hour", [nasty], START))["series"] == {nasty: []}
    assert len(await store.leaders(10)) == 2


@on_loop_within(open_store)
async def test_long_text_is_cut(store: Store) -> None:
    await store.add_events([Event(START, "alert", "", "x" * 10_000)])
    assert [len(event.text) for event in await store.events(0.0, 1)] == [MAX_EVENT_CHARS]


@on_loop
async def test_pruning_keeps_the_newest_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in [("MAX_EVENTS", 5), ("MAX_ROUNDS", 4), ("MAX_PEERS", 3)]:
        monkeypatch.setattr(store_module, name, bound)
    async with open_store() as store:
        now = START + 30 * 86400
        await store.add_points(START, {"loss": 1.0})
        await store.add_points(now - 3 * 3600, {"loss": 2.0})
        await store.add_points(now, {"loss": 3.0})
        for at in (START, now):
            await store.add_points(at, {"token_seconds": Latencies.of([1.0, 2.0])})
        await store.add_events(Event(START + number, "joined", "a", str(number)) for number in range(20))
        await store.add_rounds(round_view(number) for number in range(20))
        for number in range(20):
            await store.contribute([peer(f"p{number:02}")], START + number, 1.0)
        for _ in range(2):
            await store.prune(now)
            assert [event.text for event in await store.events(0.0, 99)] == ["19", "18", "17", "16", "15"]
            assert [each["round"] for each in await store.rounds(99, 99)] == [19, 18, 17, 16]
            assert [each.peer for each in await store.leaders(99)] == ["p17", "p18", "p19"]
            kept = {window: (await store.series(window, ["loss"], now))["series"]["loss"] for window in WINDOWS}
            assert kept == {"hour": [3.0], "day": [2.0, 3.0], "week": [2.0, 3.0]}
        cursor = await store._database.execute("SELECT count(*) FROM points")
        # Losses in three windows of now and two of three hours ago; latencies of two buckets in three windows of now.
        assert list(await cursor.fetchall()) == [(5 + 6,)]


@on_loop
async def test_pruning_moves_what_was_written_into_the_file(path: Path) -> None:
    async with open_store(path) as store:
        await store.add_events([Event(START, "joined", "a", "x" * 200)] * 200)
        log = path.with_name("history.db-wal")
        assert log.stat().st_size > 0
        await store.prune(START)
        assert log.stat().st_size == 0


async def contributions(*told: tuple[float, int, int]) -> Contribution:
    """What is kept after a peer told these (start, tokens, rounds), one after the other."""
    async with open_store() as store:
        kept = [Contribution("a", "", 0, 0, 0.0, START, START)]
        for started_at, tokens, rounds in told:
            now = peer(started_at=started_at, trained_tokens=tokens, trained_rounds=rounds)
            await store.contribute([now], START, 10.0)
            kept += await store.leaders(1)
            assert kept[-1].tokens >= kept[-2].tokens, "what was given is not taken back"
        return kept[-1]


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ([(1.0, 100, 1), (1.0, 150, 2), (1.0, 150, 2)], 150),
        ([(1.0, 100, 1), (2.0, 0, 0), (2.0, 30, 1)], 130),
        ([(1.0, 100, 1), (2.0, 200, 1)], 300),
        ([(1.0, 100, 1), (1.0, 0, 0), (1.0, 100, 1), (1.0, 0, 0), (1.0, 110, 1)], 110),
        ([(1.0, 2**63 - 1, 1), (2.0, 2**63 - 1, 1), (3.0, 2**63 - 1, 2)], MAX_CONTRIBUTED),
    ],
    ids=["grows", "restarts", "restarts and is ahead", "goes up and down", "claims more than there can be"],
)
@on_loop
async def test_contributions_add_up_over_restarts(told: list[tuple[float, int, int]], tokens: int) -> None:
    kept = await contributions(*told)
    assert kept.tokens == tokens
    assert type(kept.tokens) is int
    assert kept.seconds == 10.0 * len(told)


@on_loop_within(open_store)
async def test_only_who_trains_contributes_and_only_training_counts_as_time(store: Store) -> None:
    peers = [peer("a"), peer("b", state="paused"), peer("c", role="bootstrap")]
    await store.contribute(peers, START, 10.0)
    await store.contribute(peers, START + 10.0, 10.0)
    a, b = await store.contribution("a"), await store.contribution("b")
    assert a is not None
    assert b is not None
    assert (a.seconds, a.first_seen, a.last_seen, b.seconds) == (20.0, START, START + 10.0, 0.0)
    assert await store.contribution("c") is None


@on_loop_within(open_store)
async def test_who_gave_most_comes_first(store: Store) -> None:
    given_by = [("a", 1), ("c", 9), ("b", 9)]
    await store.contribute([peer(name, trained_tokens=tokens) for name, tokens in given_by], START, 0.0)
    assert [each.peer for each in await store.leaders(2)] == ["b", "c"]
