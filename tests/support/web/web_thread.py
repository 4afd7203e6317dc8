"""The status page over made-up peers, served from a thread: a browser drives the main one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Source, Watch
from p2ptrain.monitor.web import make_app
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.node.thread import LoopThread
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import Snapshot, SwarmView

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


class ServedPage:
    """A page and what it is made of; all of it lives on another thread's event loop."""

    def __init__(self, url: str, watch: Watch, store: Store, thread: LoopThread) -> None:
        self.url = url
        self._watch = watch
        self._store = store
        self._thread = thread

    def do(self, work: Callable[[Watch, Store], Awaitable[T]]) -> T:
        async def run() -> T:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await work(self._watch, self._store)

        return self._thread.call(run())

    def show(self, snapshot: Snapshot) -> None:
        """Let everybody see this snapshot."""

        async def change(watch: Watch, _: Store) -> None:
            watch.snapshot = snapshot
            async with watch._changed:
                watch._changed.notify_all()

        self.do(change)

    def snapshot(self) -> Snapshot:
        snapshot = self._watch.snapshot
        assert snapshot is not None
        return snapshot


class TimedSource(Source, Protocol):
    def now(self) -> float:
        """Return wall-clock seconds of the swarm's clock."""


@contextlib.contextmanager
def served_page(
    source: TimedSource,
    swarm: SwarmView,
    *,
    bootstraps: Sequence[str] = (),
    prepare: Callable[[Store], Awaitable[None]] | None = None,
    first_looks: int = 1,
    between_looks: Callable[[], None] = lambda: None,
) -> Iterator[ServedPage]:
    """Serve a page on loopback while the body runs.

    ``prepare`` fills the history. There are ``first_looks`` at the source before anybody sees the page;
    ``between_looks`` is called after each. The page shows what it has until `ServedPage.show`.
    """

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[ServedPage]:
        async with contextlib.AsyncExitStack() as stack:
            store = await Store.open(None, swarm.digest, source.now())
            stack.push_async_callback(store.close)
            if prepare is not None:
                await prepare(store)
            watch = Watch(source, SwarmTracker(swarm, source.now(), bootstraps), store)
            for _ in range(first_looks):
                await watch.look()
                await asyncio.sleep(0)  # Lets the certificates be fetched.
                between_looks()
            listener = listen("127.0.0.1", 0, "port")
            await stack.enter_async_context(serving(make_app(watch, store, source.now), listener))
            yield ServedPage(url_of(listener), watch, store, thread)

    thread = LoopThread()
    try:
        with thread.holding(opened()) as page:
            yield page
    finally:
        thread.stop()
