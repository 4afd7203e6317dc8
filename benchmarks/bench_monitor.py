"""How the status page bears a swarm of 2,000 peers and 50 viewers: snapshots, the API, a browser, and memory over time.

The swarm is made up (`tests.support.web.made_up_swarm`), the web application, the history and the watch are real, in a
process of their own. Viewers do what the page's scripts do, at the same pace: each holds a stream of changes, and asks
for the table, the charts and the lists. Where there is Chromium, it loads the page. ``--soak-minutes 10`` then goes on
and samples the server's resident memory; a slope near zero is what is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, progress
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch
from p2ptrain.network.records.record import Look
from p2ptrain.status.tracker import SwarmTracker
from tests.support.web.made_up_swarm import MadeUpSwarm

LOOKS = 12
START_SECONDS = 120.0
ASKED = {
    "/api/v1/peers/table": 15.0,
    "/api/v1/series?window=hour": 10.0,
    "/api/v1/events?limit=300&since=0": 10.0,
    "/api/v1/rounds?limit=500": 10.0,
    "/api/v1/leaders?limit=20": 30.0,
    "/api/v1/events?limit=30": 30.0,
    "/api/v1/groups": 20.0,
}
"""What a page of a large swarm asks for, and how often in seconds (`p2ptrain/monitor/static`)."""
SAMPLE_SECONDS = 5.0
PAGE_LOADS = 5
SNAPSHOT_GOAL, API_GOAL, PAGE_GOAL = 1.0, 0.1, 2.0
"""Seconds: the median snapshot; 95 % of answers; the median page."""


class TimedSource:
    """A made-up swarm that notes how long it takes to make it up, so that this is not counted."""

    def __init__(self, swarm: MadeUpSwarm) -> None:
        self._swarm = swarm
        self.seconds = 0.0

    def now(self) -> float:
        return self._swarm.now()

    async def look(self) -> Look:
        started = time.perf_counter()
        seen = await self._swarm.look()
        self.seconds = time.perf_counter() - started
        return seen

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        return await self._swarm.certificates_after(peer, lineage)


async def measure_snapshots(num_peers: int) -> Measured:
    """Seconds from records to a snapshot that is shown and remembered, the first look, which is longer, included."""
    source = TimedSource(MadeUpSwarm(num_peers))
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(Path(folder) / "history.sqlite", source._swarm.swarm.digest, source.now())
        watch = Watch(source, SwarmTracker(source._swarm.swarm, source.now()), store)
        values = []
        for _ in range(LOOKS):
            started = time.perf_counter()
            await watch.look()
            values.append(time.perf_counter() - started - source.seconds)
            await asyncio.sleep(1.0)  # Peers publish meanwhile.
        await store.close()
    return Measured(tuple(values))


@dataclass
class Viewing:
    """What viewers saw.

    Attributes:
        seconds: By path: from each question to the end of its answer.
        events: Snapshots that came through streams; ``stream_bytes``: their size.
        failures: Answers that were not 200, or did not come.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in ASKED})
    events: int = 0
    stream_bytes: int = 0
    failures: int = 0

    @property
    def all(self) -> Measured:
        return Measured(tuple(value for values in self.seconds.values() for value in values))


async def view(url: str, num_viewers: int, seconds: float) -> Viewing:
    """Let so many viewers look at the page for a while."""
    seen = Viewing()
    # The server closes what is idle for 5 s: what is asked then would be lost, where a browser asks again.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for number in range(num_viewers):
                    group.create_task(_follow(client, seen))
                    for path, every in ASKED.items():
                        group.create_task(_ask(client, path, every, number / num_viewers, seen))
    return seen


async def _follow(client: httpx.AsyncClient, seen: Viewing) -> None:
    async with client.stream("GET", "/api/v1/stream") as answer:
        seen.failures += answer.status_code != 200
        async for part in answer.aiter_raw():
            seen.events += part.count(b"event: snapshot")
            seen.stream_bytes += len(part)


async def _ask(client: httpx.AsyncClient, path: str, every: float, phase: float, seen: Viewing) -> None:
    await asyncio.sleep(phase * every)
    while True:
        started = time.perf_counter()
        try:
            async with client.stream("GET", path) as answer:
                async for _ in answer.aiter_raw():  # Not decompressed: that is the browser's time.
                    pass
                seen.failures += answer.status_code != 200
        except httpx.TransportError:
            seen.failures += 1
        seen.seconds[path].append(time.perf_counter() - started)
        await asyncio.sleep(every)


@contextlib.contextmanager
def server(num_peers: int, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The status page of a made-up swarm, in a process of its own.

    Yields:
        Its URL, and the process.
    """
    options = ["--peers", str(num_peers), "--port", "0", "--db", str(folder / "history.sqlite")]
    command = [sys.executable, "-m", "tests.support.web.made_up_swarm", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            timer = threading.Timer(START_SECONDS, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line.startswith("status page: "):
                raise RuntimeError("the status page did not start: see its error above")
            yield line.removeprefix("status page: ").strip(), psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def load_page(url: str) -> dict[str, Measured] | None:
    """Milliseconds until a browser has parsed the page, painted it first, and follows it; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright

        from tests.support.web.visits import CHROMIUM, HOW_TO_GET_ONE, launch, visiting
    except ImportError as error:
        progress(f"no page is loaded: {error}")
        return None
    if CHROMIUM is None:
        progress(f"no page is loaded: {HOW_TO_GET_ONE}")
        return None
    times: dict[str, list[float]] = {"parsed": [], "painted": [], "live": []}
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for _ in range(PAGE_LOADS + 1):
            with visiting(browser, url) as visit:
                started = time.perf_counter()
                page = visit.open("/")
                visit.wait_until_live()
                page.locator("#peer-table thead button").first.wait_for(state="attached")
                times["live"].append(1e3 * (time.perf_counter() - started))
                parsed, painted = page.evaluate(
                    "[performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd,"
                    " performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0]"
                )
                times["parsed"].append(parsed)
                times["painted"].append(painted)
        browser.close()
    return {name: Measured(tuple(values[1:])) for name, values in times.items()}  # The first one warms the browser.


def soak(url: str, process: psutil.Process, num_viewers: int, minutes: float) -> dict[str, Any]:
    """Resident bytes of the server while viewers come and go, a crowd a minute.

    Returns:
        Samples as (seconds, bytes), and the slope of a line through the last two thirds, in bytes an hour.
    """
    samples: list[tuple[float, int]] = []
    started = time.monotonic()

    async def sample() -> None:
        while True:
            samples.append((time.monotonic() - started, process.memory_info().rss))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def main() -> None:
        sampling = asyncio.create_task(sample())
        while (left := 60 * minutes - (time.monotonic() - started)) > 0:
            await view(url, num_viewers, min(60.0, left))
        sampling.cancel()

    asyncio.run(main())
    late = [(at, rss) for at, rss in samples if at > 20 * minutes]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope * 3600 if len(late) > 2 else 0.0
    return {"minutes": minutes, "samples": samples, "slope_bytes_per_hour": slope}


def snapshots(num_peers: int) -> Section:
    """From records to a snapshot that is shown and remembered."""
    found = asyncio.run(measure_snapshots(num_peers))
    return Section(
        f"Snapshots of {num_peers} peers", ("median", "longest"),
        [(f"{1e3 * found.median:.0f} ms", f"{1e3 * max(found.values):.0f} ms")],
        [Finding("a snapshot", found.median, "seconds", SNAPSHOT_GOAL)], found.to_json(),
    )  # fmt: skip


def page(num_peers: int, num_viewers: int, seconds: float, soak_minutes: float) -> Section:
    """The page and its API under viewers; with ``soak_minutes``, memory too."""
    section = Section(f"The status page of {num_peers} peers with {num_viewers} viewers", ("what", "measured"))
    with tempfile.TemporaryDirectory() as folder, server(num_peers, Path(folder)) as (url, process):
        progress("a browser")
        loads = load_page(url) or {}
        progress(f"{num_viewers} viewers")
        before = process.cpu_times()
        seen = asyncio.run(view(url, num_viewers, seconds))
        after = process.cpu_times()
        memory = process.memory_info().rss
        soaked = soak(url, process, num_viewers, soak_minutes) if soak_minutes else None
    cpu = (after.user + after.system - before.user - before.system) / seconds
    answers = seen.all.quantile(0.95)
    section.findings.append(Finding("95 % of answers to viewers", answers, "seconds", API_GOAL))
    for name, load in loads.items():
        section.findings.append(Finding(f"page {name}", load.median / 1e3, "seconds", PAGE_GOAL))
    section.rows += [
        ("API, median", f"{1e3 * seen.all.median:.1f} ms"),
        *(
            (f"  {path.partition('?')[0]}, 95 %", f"{1e3 * Measured(tuple(values)).quantile(0.95):.1f} ms")
            for path, values in seen.seconds.items()
            if values
        ),
        ("answers, of which failed", f"{len(seen.all.values)}, {seen.failures}"),
        ("snapshots streamed, each", f"{seen.events}, {seen.stream_bytes / max(1, seen.events) / 1e3:.1f} kB"),
        ("cores of the server", f"{cpu:.2f}"),
        ("memory of the server", f"{memory / 1e6:.0f} MB"),
    ]
    if soaked is not None:
        sizes = [rss for _, rss in soaked["samples"]]
        then, now = sizes[len(sizes) // 3] / 1e6, sizes[-1] / 1e6
        section.rows += [
            (f"memory after a third and all of {soak_minutes:g} min", f"{then:.0f}, {now:.0f} MB"),
            ("  growth over the last two thirds", f"{soaked['slope_bytes_per_hour'] / 1e6:+.1f} MB/h"),
        ]  # fmt: skip
    section.results |= {
        "page_milliseconds": {name: load.to_json() for name, load in loads.items()},
        "api_seconds": seen.all.to_json(),
        "failures": seen.failures,
        "cores": cpu,
        "memory_bytes": memory,
        "soak": soaked,
    }
    return section


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "200 peers, 5 viewers, 5 s")
    parser.add_argument("--peers", type=int, default=2000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long viewers look (default 60)")
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="then look so long at memory (default not)")
    options = parser.parse_args()
    if options.quick:
        options.peers, options.viewers, options.seconds = 200, 5, 5.0
    looked_at = partial(page, options.peers, options.viewers, options.seconds, options.soak_minutes)
    return run("monitor", {"snapshots": partial(snapshots, options.peers), "page": looked_at}, options)


if __name__ == "__main__":
    sys.exit(main())
