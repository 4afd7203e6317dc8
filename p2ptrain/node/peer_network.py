"""`PeerNetwork`: a peer's transport, RPC, reachability, directory and clock, which a move replaces in part."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.directory import Directory
from p2ptrain.network.factory import LIBP2P, DirectoryOptions, TransportOptions
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.link import MAX_ADDRESSES, SwarmLink
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.transport import Transport
from p2ptrain.node.nat.contacts import MAX_KNOWN_ADDRESSES, KnownPeers, dialable
from p2ptrain.node.nat.reach import FixedReach, Reach
from p2ptrain.node.options import PeerOptions, Starters
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

CLOCK_SECONDS = 2.0
CLOCK_WARNING_SECONDS = 5.0
REMEMBER_SECONDS = 5.0  # between stores of known addresses; a crash leaves no time for one


class PeerNetwork:
    """One peer's network: `connect`, then `join`, at last `close`.

    A move to other settings restarts the transport and the directory; RPC outlives it.

    Attributes:
        transport, reach: Set by `connect`; ``directory`` by `join`.
        lost: Resolves to the reason when the network daemon is gone for good.
        clock_note: About a corrected clock, for people; empty if it agrees with the swarm's.
        invite: Goes into ``link``; empty for none.
        close: Ends directory, RPC and transport; idempotent.
    """

    def __init__(
        self,
        identity: Identity,
        options: PeerOptions,
        runtime: Runtime,
        membership: Membership,
        starters: Starters,
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.clock_note = ""
        self.invite = b""
        self.transport: Transport
        self.rpc: Rpc
        self.reach: Reach | FixedReach
        self._directory: Directory | None = None
        self._identity = identity
        self._options = options
        self._membership = membership
        self._runtime = runtime
        self._starters = starters
        self._directory_name = LIBP2P
        self._bootstrap: tuple[str, ...] = ()
        self._known_peers = KnownPeers(options.run_dir)
        self._stack = AsyncExitStack()
        self.close = self._stack.aclose

    @property
    def directory(self) -> Directory:
        assert self._directory is not None
        return self._directory

    @property
    def link(self) -> SwarmLink:
        """A swarm link through this peer, without loopback addresses unless there are no others.

        It admits others if this peer has an invite.
        """
        addresses = self.reach.standing.addresses
        outside = [address for address in addresses if "/127.0.0.1/" not in address and "/ip6/::1/" not in address]
        directory = self._directory_name if self._directory_name != LIBP2P else ""
        return SwarmLink(self.rpc.swarm, tuple(outside or addresses)[:MAX_ADDRESSES], directory, self.invite)

    async def connect(self, swarm: bytes, link: SwarmLink | None) -> tuple[str, ...]:
        """Start the transport and RPC; return the addresses of the peers that link, role file and earlier runs name."""
        options = self._options
        named = link.addresses if link is not None else ()
        known = [*named, *options.network.bootstrap, *self._known_peers.addresses()]
        own = f"/p2p/{self._identity.peer_id}"
        self._bootstrap = tuple(dict.fromkeys(a for a in known if not a.endswith(own)))[:MAX_KNOWN_ADDRESSES]
        self._directory_name = options.network.directory or (link.directory if link is not None else "") or LIBP2P
        settings = options.network.changed(bootstrap=self._bootstrap)
        await self._start_transport(settings)
        self._stack.push_async_callback(lambda: self.transport.close())
        self.rpc = Rpc(self.transport, self._runtime, swarm, options.upload_bandwidth, options.download_bandwidth)
        self._stack.push_async_callback(self.rpc.close)
        await self.rpc.start()
        if isinstance(self.transport, Libp2pTransport):
            self.reach = Reach(settings, self.rpc, self._libp2p, self._move, self._membership, self._runtime)
        else:
            self.reach = FixedReach(self.transport)
        return self._bootstrap

    async def join(self) -> None:
        """Determine the reachability, then start the directory."""
        await self.reach.settle()
        await self._start_directory()
        self._stack.push_async_callback(lambda: self.directory.close())

    def _libp2p(self) -> Libp2pTransport:
        assert isinstance(self.transport, Libp2pTransport)
        return self.transport

    async def _move(self, settings: Libp2pSettings) -> None:
        """Restart the daemon with other settings. Streams break; everything else continues."""
        met = [address for record in self._membership.records() for address in dialable(record)]
        bootstrap = tuple(dict.fromkeys([*self._options.network.bootstrap, *settings.bootstrap, *met]))
        self._bootstrap = bootstrap[:MAX_KNOWN_ADDRESSES]
        if self._directory is not None:
            await self._directory.close()
        await self.transport.close()
        await self._start_transport(settings.changed(bootstrap=self._bootstrap))
        await self.rpc.move(self.transport)
        if self._directory is not None:
            await self._start_directory()

    async def _start_transport(self, settings: Libp2pSettings) -> None:
        name = self._options.network.transport
        self.transport = await self._starters.transport(TransportOptions(name, self._identity, settings))
        self.transport.on_lost(self.lose)

    async def _start_directory(self) -> None:
        client_mode = self._options.role == "client" or self.reach.is_outbound_only
        options = DirectoryOptions(
            self._directory_name, self.transport, self.rpc.swarm, self._identity, self._runtime, self._bootstrap,
            client_mode,
        )  # fmt: skip
        self._directory = await self._starters.directory(options)
        self._correct_clock()

    def lose(self, reason: str) -> None:
        """Resolve ``lost``; idempotent."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def follow_clocks(self) -> None:
        while True:  # Peers may answer late, and the machine's clock may be set meanwhile.
            await asyncio.sleep(CLOCK_SECONDS)
            self._correct_clock()

    def _correct_clock(self) -> None:
        """Follow the clock of the peers that were there first, so that records do not expire on arrival."""
        skew = self.directory.clock_skew_seconds
        if skew is None or abs(skew + self._runtime.clock_offset_seconds) < CLOCK_WARNING_SECONDS:
            return
        self._runtime.clock_offset_seconds = -skew
        if abs(skew) < CLOCK_WARNING_SECONDS:
            self.clock_note = ""
            logger.info("this machine's clock agrees with the swarm's again")
            return
        way = "ahead of" if skew > 0 else "behind"
        self.clock_note = f"clock {abs(skew):.0f} s {way} the swarm's: corrected"
        logger.warning(
            "this machine's clock is %.0f s %s the swarm's: corrected for this run; set it right with "
            "`timedatectl set-ntp true`", abs(skew), way,
        )  # fmt: skip

    async def keep_remembering(self) -> None:
        while True:
            await asyncio.sleep(REMEMBER_SECONDS)
            await self.remember_peers()

    async def remember_peers(self) -> None:
        """Save addresses of the present peers for the next start."""
        await asyncio.to_thread(self._known_peers.remember, self._membership.records())
