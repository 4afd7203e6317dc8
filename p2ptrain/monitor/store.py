"""The history in one SQLite file: series at three resolutions, rounds, events, and contributions of peers.

Percentiles of latencies cannot be aggregated over time. So each bucket of their histograms is a series of counts, and
the percentiles of a step are computed from the counts in it.

All tables are bounded by age or number, so the file stays below a few tens of megabytes. A damaged file is renamed and
replaced by a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiosqlite

from p2ptrain.errors import ResourceError
from p2ptrain.network.records.serving import NO_COUNTS, Latencies
from p2ptrain.status.serving import Amount, Value
from p2ptrain.status.stages import TRAINING_ROLES
from p2ptrain.status.views import Event, PeerView, RoundView, plain

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3


class Resolution(NamedTuple):
    """The length of a chart, its step, and the retention time of its points, in seconds."""

    length: int
    step: int
    keep: int


WINDOWS = {
    "hour": Resolution(3600, 10, 2 * 3600),
    "day": Resolution(86400, 120, 26 * 3600),
    "week": Resolution(7 * 86400, 900, 8 * 86400),
}
SERIES = (
    "loss", "tokens_per_second", "peers", "training", "compute_seconds", "matchmaking_seconds", "transfer_seconds",
    "aborted", "sent_per_second", "received_per_second", "served_tokens_per_second", "served_prompt_tokens_per_second",
    "served_requests", "served_failures", "sessions",
)  # fmt: skip
COUNTED = ("aborted", "served_requests", "served_failures")
"""Series of event counts, summed over a step; the others are averaged."""
PERCENTILES = {
    f"{kind}_{name}": (kind, share)
    for kind in ("first_token_seconds", "token_seconds")
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
}
"""Series of latencies and quantile of each percentile."""
ALL_SERIES = (*SERIES, *PERCENTILES)
MAX_EVENTS = 5_000
MAX_ROUNDS = 2_000
MAX_PEERS = 20_000
MAX_EVENT_CHARS = 300
MAX_CONTRIBUTED = 1 << 62
"""Limit of reported contributions; < 2**63, beyond which SQLite's integer sums become floats."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE points (
    series TEXT, step INTEGER, at INTEGER, total REAL NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (series, step, at)
) WITHOUT ROWID;
CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, peer TEXT NOT NULL,
    text TEXT NOT NULL);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, view TEXT NOT NULL);
CREATE TABLE contributions (
    peer TEXT PRIMARY KEY, name TEXT NOT NULL, tokens INTEGER NOT NULL, rounds INTEGER NOT NULL, seconds REAL NOT NULL,
    first_seen REAL NOT NULL, last_seen REAL NOT NULL,
    started_at REAL NOT NULL, run_tokens INTEGER NOT NULL, run_rounds INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX contributions_by_tokens ON contributions (tokens);
CREATE INDEX contributions_by_time ON contributions (last_seen);
"""


@dataclass(frozen=True)
class Contribution:
    """A peer's reported contribution, summed over its restarts.

    Attributes:
        tokens: Tokens in committed rounds.
        rounds: Committed rounds with its contribution.
        seconds: Observed training time.
    """

    peer: str
    name: str
    tokens: int
    rounds: int
    seconds: float
    first_seen: float
    last_seen: float


class _UnusableError(Exception):
    """The file cannot be used for this swarm."""


class Store:
    """The history; create it with `open`.

    All methods raise `ResourceError` if the file can no longer be read or written.
    """

    def __init__(self, database: aiosqlite.Connection) -> None:
        self._database = database
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path | None, swarm: str, now: float) -> Store:
        """Open or create the history; rename a file that is damaged or of another swarm.

        Args:
            path: None keeps the history in memory.
            swarm: The manifest's digest in hexadecimal.
            now: Wall-clock seconds, for the new name of a renamed file.

        Raises:
            ResourceError: The file cannot be written.
        """
        if path is None:
            return await cls._opened(":memory:", swarm)
        try:
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            try:
                return await cls._opened(str(path), swarm)
            except sqlite3.OperationalError:
                raise  # The disk is full, or the file is locked or read-only: it may be intact.
            except (sqlite3.DatabaseError, _UnusableError) as error:
                await asyncio.to_thread(_set_aside, path, now, error)
                return await cls._opened(str(path), swarm)
        except (OSError, sqlite3.Error) as error:
            raise ResourceError(f"--db {path}: {error}; choose a file that can be written") from error

    @classmethod
    async def _opened(cls, path: str, swarm: str) -> Store:
        # Not opened by aiosqlite: after a failure to open, its thread may outlive the loop.
        connection = await asyncio.to_thread(sqlite3.connect, path, check_same_thread=False)
        database = await aiosqlite.Connection(lambda: connection, iter_chunk_size=64)
        try:
            (found,) = await database.execute_fetchall("PRAGMA quick_check(1)")
            if found[0] != "ok":
                raise _UnusableError("it is damaged")
            ((version,),) = await database.execute_fetchall("PRAGMA user_version")
            tables = {name for (name,) in await database.execute_fetchall("SELECT name FROM sqlite_master")}
            if version == 0 and not tables:
                await database.executescript(_SCHEMA)
                await database.execute("INSERT INTO facts VALUES ('swarm', ?)", (swarm,))
                await database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                await database.commit()
            elif "contributions" not in tables:
                raise _UnusableError("it is another program's")
            elif version != SCHEMA_VERSION:
                raise _UnusableError(f"it is of version {version}, this is {SCHEMA_VERSION}")
            if swarm not in [row[0] for row in await database.execute_fetchall("SELECT value FROM facts")]:
                raise _UnusableError("it is of another swarm")
            await database.execute("PRAGMA journal_mode = WAL")  # Writes to the file.
            await database.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            await database.close()
            raise
        return cls(database)

    async def close(self) -> None:
        async with self._exclusively():
            await self._database.close()

    @contextlib.asynccontextmanager
    async def _exclusively(self) -> AsyncIterator[None]:
        async with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    await self._database.rollback()
                raise ResourceError(f"history cannot be kept: {error}; see that its disk has room") from error

    async def _write(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        if values := list(rows):
            async with self._exclusively():
                await self._database.executemany(statement, values)
                await self._database.commit()

    async def _read(self, statement: str, *values: Any) -> list[Any]:
        async with self._exclusively():
            return list(await self._database.execute_fetchall(statement, values))

    async def add_points(self, at: float, values: Mapping[str, Value]) -> None:
        """Add one value of each series at every resolution."""
        await self._write(
            "INSERT INTO points VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET total = total + excluded.total, count = count + excluded.count",
            (
                (stored, window.step, int(at) // window.step * window.step, total, weight)
                for series, value in values.items()
                for stored, total, weight in _stored(series, value)
                for window in WINDOWS.values()
            ),
        )

    async def series(self, window: str, names: Iterable[str], now: float) -> dict[str, Any]:
        """Return columns for a chart: the times ``at``, ascending, and a value of each series per time.

        Values are sums for `COUNTED` series, quantiles for `PERCENTILES`, else means; None if missing.

        Args:
            window: Key of `WINDOWS`.
            names: Members of `ALL_SERIES`.
            now: End of the window, in seconds since the epoch.
        """
        length, step, _ = WINDOWS[window]
        wanted = list(names)
        percentiles = {name: PERCENTILES[name] for name in wanted if name in PERCENTILES}
        buckets = {
            _bucket(kind, number): (kind, number)
            for kind, _ in percentiles.values()
            for number in range(len(NO_COUNTS))
        }
        stored = [*wanted, *buckets]
        rows = await self._read(
            f"SELECT series, at, total, count FROM points WHERE series IN ({','.join('?' * len(stored))})"
            " AND step = ? AND at >= ?",
            *stored, step, now - length,
        )  # fmt: skip
        values: dict[tuple[str, int], float | None] = {}
        counts: dict[tuple[str, int], list[int]] = defaultdict(lambda: [*NO_COUNTS])
        for series, at, total, count in rows:
            if series in buckets:
                kind, number = buckets[series]
                counts[kind, at][number] = int(total)
            else:
                values[series, at] = total if series in COUNTED else total / count
        for (kind, at), each in counts.items():
            latencies = Latencies(tuple(each))
            values |= {(name, at): latencies.quantile(share) for name, (of, share) in percentiles.items() if of == kind}
        times = sorted({at for _, at in values})
        return {
            "step": step, "at": times, "series": {name: [values.get((name, at)) for at in times] for name in wanted},
        }  # fmt: skip

    async def add_events(self, events: Iterable[Event]) -> None:
        rows = ((each.at, each.kind, each.peer, each.text[:MAX_EVENT_CHARS]) for each in events)
        await self._write("INSERT INTO events (at, kind, peer, text) VALUES (?, ?, ?, ?)", rows)

    async def events(self, since: float, limit: int) -> list[Event]:
        """Return the newest events after ``since``, newest first."""
        return await self._events("at >= ?", since, limit)

    async def events_of(self, peer: str, limit: int) -> list[Event]:
        return await self._events("peer = ?", peer, limit)

    async def _events(self, condition: str, value: object, limit: int) -> list[Event]:
        statement = f"SELECT at, kind, peer, text FROM events WHERE {condition} ORDER BY id DESC LIMIT ?"
        return [Event(*row) for row in await self._read(statement, value, limit)]

    async def add_rounds(self, rounds: Iterable[RoundView]) -> None:
        rows = ((view.round, json.dumps(view, separators=(",", ":"), default=plain)) for view in rounds)
        await self._write("INSERT OR REPLACE INTO rounds VALUES (?, ?)", rows)

    async def rounds(self, before: int, limit: int) -> list[dict[str, Any]]:
        """Return rounds with numbers below ``before``, newest first, as plain values of `RoundView`."""
        statement = "SELECT view FROM rounds WHERE round < ? ORDER BY round DESC LIMIT ?"
        return [json.loads(text) for (text,) in await self._read(statement, before, limit)]

    async def contribute(self, peers: Iterable[PeerView], now: float, seconds: float) -> None:
        """Update the contributions of the current peers.

        Args:
            now: Wall-clock seconds.
            seconds: Time since the last call, added to the training time of peers that train.
        """
        rows = (
            (
                record.peer, peer.name, tokens, rounds, seconds if record.state == "training" else 0.0, now, now,
                record.started_at, tokens, rounds,
            )
            for peer in peers
            for record in [peer.record]
            if record.role in TRAINING_ROLES
            for tokens in [min(MAX_CONTRIBUTED, record.trained_tokens)]
            for rounds in [min(MAX_CONTRIBUTED, record.trained_rounds)]
        )  # fmt: skip
        # A record's counts begin at its peer's start: counts before a restart are kept, and increases are added.
        # Within a run the maximum so far is kept, so that a peer gains nothing by counting down and up again.
        is_same_run = "(excluded.started_at = started_at)"  # 1 or 0
        await self._write(
            f"""INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
            ON CONFLICT DO UPDATE SET
                tokens = min({MAX_CONTRIBUTED}, tokens + max(0, excluded.run_tokens - run_tokens * {is_same_run})),
                rounds = min({MAX_CONTRIBUTED}, rounds + max(0, excluded.run_rounds - run_rounds * {is_same_run})),
                run_tokens = max(excluded.run_tokens, run_tokens * {is_same_run}),
                run_rounds = max(excluded.run_rounds, run_rounds * {is_same_run}),
                seconds = seconds + excluded.seconds, name = excluded.name, last_seen = excluded.last_seen,
                started_at = excluded.started_at""",
            rows,
        )

    async def leaders(self, limit: int) -> list[Contribution]:
        """Return the contributions with the most tokens, in descending order."""
        return await self._contributions("ORDER BY tokens DESC, peer LIMIT ?", limit)

    async def contribution(self, peer: str) -> Contribution | None:
        """Return one peer's contribution; None if the history does not know it."""
        found = await self._contributions("WHERE peer = ?", peer)
        return found[0] if found else None

    async def _contributions(self, clause: str, value: object) -> list[Contribution]:
        columns = "peer, name, tokens, rounds, seconds, first_seen, last_seen"
        return [Contribution(*row) for row in await self._read(f"SELECT {columns} FROM contributions {clause}", value)]

    async def prune(self, now: float) -> None:
        """Delete old rows and rows beyond the limits; call it every few minutes."""
        async with self._exclusively():
            for _, step, keep in WINDOWS.values():
                await self._database.execute("DELETE FROM points WHERE step = ? AND at < ?", (step, now - keep))
            for table, key, age, limit in (
                ("events", "id", "id", MAX_EVENTS),
                ("rounds", "round", "round", MAX_ROUNDS),
                ("contributions", "peer", "last_seen", MAX_PEERS),
            ):
                newest = f"SELECT {key} FROM {table} ORDER BY {age} DESC LIMIT ?"
                await self._database.execute(f"DELETE FROM {table} WHERE {key} NOT IN ({newest})", (limit,))
            await self._database.commit()
            await self._database.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")


def _stored(series: str, value: Value) -> Iterator[tuple[str, float, float]]:
    """Yield the stored series of a value, with the total and the weight to add to each."""
    if isinstance(value, Latencies):
        yield from ((_bucket(series, number), count, 0) for number, count in enumerate(value.counts) if count)
    else:
        yield (series, *value) if isinstance(value, Amount) else (series, value, 1)


def _bucket(series: str, number: int) -> str:
    """Return the name of the series that counts the latencies in one bucket."""
    return f"{series}:{number}"


def _set_aside(path: Path, now: float, reason: Exception) -> None:
    aside = path.with_name(f"{path.name}.{int(now)}.aside")
    logger.warning("%s cannot be used (%s): set aside as %s", path, reason, aside.name)
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.replace(aside.with_name(aside.name + suffix))
