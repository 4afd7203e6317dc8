"""An event loop on its own thread, and a peer on it, for synchronous programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import SIGNED_FILE, Manifest, SignedManifest
from p2ptrain.network.admission import entrance
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer import Peer
from p2ptrain.node.site.policy import SitePolicy
from p2ptrain.runtime import real_runtime
from p2ptrain.training.bridge import Bridge

T = TypeVar("T")

JOIN_SECONDS = 30.0
CLOSE_SECONDS = 10.0
"""Timeout of leaving a held context."""


class LoopThread:
    """A uvloop event loop that runs until `stop`.

    The network daemon dies with the thread that started it, so this thread lives as long as the peer. It is a daemon
    thread, so a script that does not close its swarm can exit.

    Attributes:
        loop: The event loop.
    """

    def __init__(self) -> None:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; interrupting the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def holding(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an asynchronous context on the loop for the block; one task enters and leaves it."""
        opened: Future[T] = Future()
        close = asyncio.Event()

        async def hold() -> None:
            try:
                async with context as value:
                    opened.set_result(value)
                    await close.wait()
            except BaseException as error:
                if opened.done():
                    raise
                opened.set_exception(error)

        held = asyncio.run_coroutine_threadsafe(hold(), self.loop)
        try:
            value = opened.result()
        except BaseException:
            held.cancel()
            raise
        try:
            yield value
        finally:
            self.loop.call_soon_threadsafe(close.set)
            held.result(CLOSE_SECONDS)

    def stop(self) -> None:
        """Cancel the loop's tasks, end it, and join the thread; idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(JOIN_SECONDS)


class PeerThread:
    """A trainer whose network runs on a thread of its own.

    Attributes:
        thread: Runs the peer's event loop.
        peer: The running peer.
        close: Ends the peer and the thread; idempotent. The identity stays locked until its owner closes it, too.
    """

    def __init__(
        self,
        run_dir: Path | None,
        name: str,
        network: Libp2pSettings,
        *,
        link: str | None = None,
        manifest: Manifest | None = None,
        policy: Path | None = None,
    ) -> None:
        """Join the swarm of ``link``, or start that of ``manifest``.

        ``run_dir`` holds the key; None makes a new one.

        Raises:
            LinkError: The link is malformed.
            ConfigError: The policy is invalid, or forbids to take part.
            IdentityError: The key is unusable or in use.
            P2PTrainError: As from `Peer.start`.
        """
        parsed = SwarmLink.parse(link) if link is not None else None
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock, ExitStack() as resources:
            identity = Identity.create_or_load(run_dir / IDENTITY_FILE) if run_dir is not None else Identity.ephemeral()
            lock.callback(identity.close)
            signed = SignedManifest.create(manifest, identity, identity.peer_id) if manifest is not None else None
            runtime = real_runtime("sync", run_dir)
            resources.callback(runtime.close)
            self.thread = LoopThread()
            resources.callback(self.thread.stop)
            invite, issuer = entrance(signed.manifest, identity) if signed is not None else (b"", b"")
            rules = SitePolicy.load(policy) if policy is not None else None
            options = PeerOptions("trainer", name, "cpu", run_dir, network, invite=invite, policy=rules, issuer=issuer)
            self.peer = self.thread.call(Peer.start(identity, options, runtime, link=parsed, signed=signed))
            resources.callback(lambda: self.thread.call(self.peer.close()))
            if run_dir is not None:
                self.peer.signed.keep(run_dir / SIGNED_FILE)
            self.thread.call(self._vote())
            lock.pop_all()
            self.close = resources.pop_all().close

    async def _vote(self) -> None:
        """Vote on the others' rounds from now on, if this peer founded the swarm; it may train later, or never."""
        from p2ptrain.node.roles.founder import vote_as_founder

        vote_as_founder(self.peer)

    def bridge(self) -> Bridge:
        """Return a bridge that ends with the network: without it, a peer would take itself for the last one.

        Raises:
            TemporaryError: The thread has ended.
        """
        if self.thread.loop.is_closed():
            raise TemporaryError("the swarm is closed: call Swarm.join again to go on")
        bridge, lost = Bridge(self.thread.loop), self.peer.network.lost
        self.thread.loop.call_soon_threadsafe(lost.add_done_callback, lambda lost: bridge.cancel(lost.result()))
        return bridge
