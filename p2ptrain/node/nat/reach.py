"""Reachability of this peer: direct, through a relay, or only over connections that it opens.

::

    ask up to 3 known peers to dial back
      | one succeeds ────────▶ direct (announce the observed address if the daemon does not know it)
      | none, relays known ──▶ restart the daemon as private, with reservations at the relays;
      |                        test that each relay carries more than a default relay ──▶ relay
      | none, no relay ──────▶ outbound only: search for a relay with backoff

`p2ptrain.node.nat.probing` asks the peers, `p2ptrain.node.nat.relaying` tests relays. A private peer also connects to
all trainers, if possible by hole punching (`p2ptrain.node.nat.contacts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.errors import P2PTrainError, PeerError, TemporaryError
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport, Reachability
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.reachability import ProbeReport, Scope, as_multiaddr, host_of, judge, scope
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.transport import Transport
from p2ptrain.node.nat.contacts import Contacts, dialable
from p2ptrain.node.nat.probing import CONTACT_SECONDS, ProbeServer, ask_back
from p2ptrain.node.nat.relaying import RELAY_ATTEMPTS, RETRY_ATTEMPTS, carrier, serve_carry, why_no_relay
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Backoff

logger = logging.getLogger(__name__)

MAX_RELAYS = 3
WATCH_SECONDS = 2.0
LOST_SECONDS = 6.0
"""Grace without a reservation at any relay, before the search for others."""
FIRST_SEARCH_PAUSE_SECONDS = 10.0
LONGEST_SEARCH_PAUSE_SECONDS = 300.0

OUTBOUND_NOTE = "cannot be dialled, and no relay is known: reached only by peers that it is connected to"


@dataclass
class Standing:
    """A peer's reachability, as its record shows it."""

    reachability: Reachability = "unknown"
    addresses: tuple[str, ...] = ()
    note: str = ""


class FixedReach:
    """Reachability of a peer whose transport is not libp2p: direct, at the transport's addresses."""

    is_outbound_only = False

    def __init__(self, transport: Transport) -> None:
        self.standing = Standing()
        self._transport = transport

    async def settle(self) -> None:
        self.standing = Standing("direct", tuple(await self._transport.addresses()))

    async def watch(self, on_change: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            before = self.standing
            await self.settle()
            if self.standing != before:
                on_change()


@dataclass
class _Search:
    """Times of the search for relays, or of a relay's self-test."""

    lost_since: float | None = None
    next_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_SEARCH_PAUSE_SECONDS, LONGEST_SEARCH_PAUSE_SECONDS))

    def tried(self) -> None:
        self.next_at = asyncio.get_running_loop().time() + self.backoff.next()


class Reach:
    """Determines and maintains this peer's reachability; ``move`` restarts the daemon with other settings."""

    def __init__(
        self,
        settings: Libp2pSettings,
        rpc: Rpc,
        transport: Callable[[], Libp2pTransport],
        move: Callable[[Libp2pSettings], Awaitable[None]],
        membership: Membership,
        runtime: Runtime,
    ) -> None:
        self.standing = Standing()
        self._settings = settings
        self._rpc = rpc
        self._transport = transport
        self._move = move
        self._membership = membership
        self._runtime = runtime
        self._verdict: Reachability | None = None
        self._proven: tuple[str, ...] = ()
        self._carrier = ""
        self._was_restarted = False
        self._search = _Search()
        self._contacts = Contacts(transport, rpc, membership)
        self._probes = ProbeServer(rpc, transport)
        serve_carry(rpc, lambda peer: peer == self._carrier)

    @property
    def is_outbound_only(self) -> bool:
        """True if other peers reach this peer only over connections that it opened."""
        return self._is_private and self.standing.reachability == "unknown"

    @property
    def _is_private(self) -> bool:
        return self._verdict in ("relay", "unknown")

    @property
    def asks(self) -> bool:
        """True if probes decide: not for loopback swarms or relays, nor where the owner stated the reachability."""
        settings = self._settings
        outside = any(scope(address) is not Scope.LOOPBACK for address in settings.listen)
        said = settings.announce or settings.force_reachability is not None
        return settings.auto_nat and outside and not said and not settings.relay

    async def settle(self) -> None:
        """Determine the reachability; restart the daemon if it has to listen or announce differently."""
        if self._settings.relay:
            await self._be_relay(RELAY_ATTEMPTS)
        elif self.asks and self._settings.bootstrap:
            reports = await ask_back(self._rpc, self._transport(), self._settings.bootstrap)
            success, reason = judge(reports)
            if success is not None:
                await self._be_direct(success, reason)
            elif reason:
                await self._be_private(reports, reason)
        await self.refresh()

    async def refresh(self) -> bool:
        """Update `standing`; return True if it changed, or if the daemon was restarted meanwhile."""
        transport, note = self._transport(), ""
        addresses, reachability = await transport.addresses(), self._verdict or await transport.reachability()
        if self._is_private:
            relays = await self._live_relays()
            addresses = [a for a in addresses if "/p2p-circuit" not in a or _relay_of(a) in relays]
            reachability, note = ("relay", "") if relays else ("unknown", OUTBOUND_NOTE)
        before, was_restarted = self.standing, self._was_restarted
        self.standing, self._was_restarted = Standing(reachability, tuple(addresses), note), False
        return self.standing != before or was_restarted

    async def watch(self, on_change: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        """Until cancelled, keep a private peer connected, replace its lost relays, and retry a relay's self-test.

        Args:
            on_change: Called when this peer's record has to be published again.
            on_lost: Called with the reason if the daemon does not start again.
        """
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            is_private, fails_to_relay = self._is_private, self._settings.relay and not self._probes.is_relay
            if not is_private and not fails_to_relay:
                continue
            try:
                if fails_to_relay:
                    await self._try_again_to_relay()
                if is_private:
                    await self._contacts.keep()
                    await self._keep_relays()
                if await self.refresh():
                    on_change()
            except (TemporaryError, PeerError) as error:
                logger.debug("looking after this peer's reachability: %s", error)
            except P2PTrainError as error:
                on_lost(str(error))
                return

    async def _restart(self, **changes: Any) -> None:
        await self._move(self._transport().settings.changed(**changes))
        self._was_restarted = True

    # Probes

    async def _be_direct(self, report: ProbeReport, reason: str) -> None:
        self._verdict = "direct"
        logger.info("reachable directly: %s", reason)
        own = await self._transport().addresses()
        if scope(as_multiaddr(report.observed)) is not Scope.PUBLIC or report.observed in map(host_of, own):
            return
        # The gateway forwards the port; the daemon does not know its external address.
        port = report.reachable[0]
        inside = [address.partition("/p2p/")[0] for address in own if scope(address) is Scope.PRIVATE]
        outside = f"{as_multiaddr(report.observed)}/tcp/{port}"
        listen = tuple(f"{address.rpartition('/tcp/')[0]}/tcp/{port}" for address in self._settings.listen)
        await self._restart(listen=listen, announce=(outside, *inside))

    async def _be_private(self, reports: Sequence[ProbeReport], reason: str) -> None:
        """Restart as a private peer with up to `MAX_RELAYS` relays: configured ones, then reporting relays."""
        routes = {check_peer_address(address): address for address in self._settings.trusted_relays}
        reporting = {report.peer for report in reports if report.is_relay}
        for remote, address in await self._transport().connections():
            if host_of(address) and remote in reporting:
                routes.setdefault(remote, f"{address}/p2p/{remote}")
        if not routes:
            if self._verdict is None:
                logger.warning(
                    "%s, and no relay is known: others reach this peer only while it is connected to them; "
                    "forward a port and --announce it, or have the organizer run 'seed --relay'", reason,
                )  # fmt: skip
            self._verdict = "unknown"
            return
        self._verdict = "relay"
        relays = tuple(routes.values())[:MAX_RELAYS]
        logger.info("%s: taking a place at %d relays", reason, len(relays))
        await self._restart(trusted_relays=relays, force_reachability="private", auto_nat=True)
        self._proven = await self._prove(relays)
        if not self._proven:
            logger.warning("no relay carries data to this peer: others reach it only while it is connected to them")

    # Relays

    async def _live_relays(self) -> set[str]:
        """Return the tested relays at which this peer has a reservation, as far as its daemon knows."""
        transport = self._transport()
        connected, reserved = await transport.connected_peers(), await transport.reserved_relays()
        return {
            peer
            for address in self._proven
            # The daemon does not list reservations at relays without a public address.
            if (peer := check_peer_address(address)) in connected
            and (peer in reserved or scope(address) is not Scope.PUBLIC)
        }

    async def _prove(self, relays: Sequence[str]) -> tuple[str, ...]:
        """Return the relays that carry data to this peer."""
        proven = []
        async with carrier(self._runtime, self._rpc.swarm) as stranger:
            self._carrier = stranger.peer_id
            for relay in relays:
                try:
                    await self._transport().connect([relay], CONTACT_SECONDS)
                    reason = await stranger.why_not(relay, self._rpc.peer_id)
                except PeerError as error:
                    reason = str(error)
                if reason:
                    logger.warning("relay %s is not used: %s", check_peer_address(relay)[-8:], reason)
                else:
                    proven.append(relay)
        self._carrier = ""
        return tuple(proven)

    async def _be_relay(self, attempts: int) -> None:
        """Test whether the daemon relays data, at most ``attempts`` times; restart it between two tests."""
        reason = ""
        for number in range(attempts):
            if number:
                await self._restart()
            reason = await why_no_relay(self._transport(), self._runtime, self._rpc.swarm)
            if not reason:
                self._probes.is_relay = True
                logger.info("this peer relays for others")
                return
            logger.debug("the daemon does not relay: %s", reason)
        logger.warning("this peer does not relay for others yet: %s; it goes on trying", reason)

    async def _try_again_to_relay(self) -> None:
        """Repeat the self-test with backoff, since each attempt breaks this peer's streams."""
        if asyncio.get_running_loop().time() >= self._search.next_at:
            await self._be_relay(RETRY_ATTEMPTS)
            self._search.tried()

    async def _keep_relays(self) -> None:
        """Search for relays with backoff while this peer has no reservation."""
        search, now = self._search, asyncio.get_running_loop().time()
        if self._proven and await self._live_relays():
            search.lost_since = None
            search.backoff.reset()
            return
        if search.lost_since is None:
            search.lost_since = now
            if self._proven:
                logger.warning("lost the last relay: looking for another")
        if now < max(search.next_at, search.lost_since + LOST_SECONDS):
            return
        addresses = [address for record in self._membership.records() for address in dialable(record)]
        known = list(dict.fromkeys([*self._settings.bootstrap, *addresses]))
        self._runtime.random.shuffle(known)
        reports = await ask_back(self._rpc, self._transport(), known)
        if any(report.is_relay for report in reports):
            await self._be_private(reports, "a relay answers")
        search.tried()


def _relay_of(address: str) -> str:
    return address.partition("/p2p-circuit")[0].rpartition("/p2p/")[2]
