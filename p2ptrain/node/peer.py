"""`Peer`: the parts of one peer, in the order of their start; `Peer.close` ends them in reverse.

::

    network    transport, RPC, reachability, directory, clock    `p2ptrain.node.peer_network`
    signed     the manifest, given or asked for                  `p2ptrain.node.meeting`
    admission  who is in, by the manifest; this peer must be     `p2ptrain.network.admission`
    record     what the parts tell of this peer                  `p2ptrain.node.reports.record`
    presence   publishes the record, reads those of others       `p2ptrain.node.presence`
    held       the shared state, once a role holds one           `p2ptrain.node.roles.held`
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.manifest import SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.meeting import Entry, ask_for_manifest, serve_manifest
from p2ptrain.node.options import PeerOptions, Starters
from p2ptrain.node.peer_network import PeerNetwork
from p2ptrain.node.presence import Presence
from p2ptrain.node.reports.record import OwnRecord
from p2ptrain.node.roles.held import HeldState
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks


class Peer:
    """One running peer. Make it with `start`, end it with `close`.

    It is the `p2ptrain.averaging.context.Owner` of its averaging.

    Attributes:
        signed: The swarm's manifest, with its organizer's signature; ``swarm``: its digest, 32 bytes.
        admission: Decides who is in the swarm.
        entry: This peer's own admission.
        jobs: Its long-running jobs.
        on_close: Registers a function that `close` awaits, before those that were registered earlier.
    """

    def __init__(
        self, identity: Identity, options: PeerOptions, runtime: Runtime, starters: Starters | None = None
    ) -> None:
        self.identity = identity
        self.options = options
        self.runtime = runtime
        self.membership = Membership(identity.peer_id, runtime)
        self.network = PeerNetwork(identity, options, runtime, self.membership, starters or Starters())
        self.record = OwnRecord(identity.peer_id, options, runtime, self.network)
        self.jobs = self.record.jobs
        self.held = HeldState(self)
        self.record.parts.append(self.held.describe)
        self._is_present = False
        self._tasks = Tasks()
        self._stack = AsyncExitStack()
        self.on_close = self._stack.push_async_callback

    @classmethod
    async def start(
        cls,
        identity: Identity,
        options: PeerOptions,
        runtime: Runtime,
        *,
        link: SwarmLink | None = None,
        signed: SignedManifest | None = None,
        starters: Starters | None = None,
    ) -> Peer:
        """Start the network, join the swarm, fetch and verify its manifest, and publish this peer's record.

        Args:
            identity: This peer's key; locked by the caller.
            link: Where to find the swarm; None starts one.
            signed: The manifest, if known; required without a link.

        Raises:
            BootstrapError: No peer of the link or of earlier runs answers.
            ManifestError: A peer sent another manifest than the link's.
            NotAdmittedError: The swarm does not admit this peer.
            ResourceError: The daemon does not start.
        """
        peer = cls(identity, options, runtime, starters)
        try:
            await peer._start(link, signed)
        except BaseException:
            await peer.close(farewell=False)
            raise
        return peer

    async def _start(self, link: SwarmLink | None, signed: SignedManifest | None) -> None:
        network = self.network
        self.swarm = link.digest if link is not None else signed.manifest.digest if signed is not None else b""
        self.on_close(network.close)
        known = await network.connect(self.swarm, link)
        self.rpc = network.rpc
        self.signed = signed or await ask_for_manifest(network.transport, self.rpc, known, self.identity)
        self.manifest = self.signed.manifest
        await self.held.check_departures()
        serve_manifest(self.rpc, self.signed)
        contacts = dict.fromkeys(address.rpartition("/")[2] for address in known)
        self.entry = Entry(self.manifest, self.rpc, self.options, tuple(contacts))
        self.rpc.gate = self.admission = self.entry.admission
        self.entry.issue_passes(lambda peer: network.transport.hosts_of(peer))
        if self.options.role != "client":
            network.invite = await self.entry.enter(link)
        await network.join()
        self.presence = Presence(
            lambda: network.directory,
            self.rpc,
            self.identity,
            self.membership,
            lambda: self.held.departures.withheld(self.record.describe()),
        )
        self.presence.exchange.contacts.update(contacts)
        self.record.parts.append(self.entry.describe)
        self._is_present = True
        self._tasks.keep(network.follow_clocks, "clock")
        if self.options.role == "client":
            await self.presence.refresh()
            return
        await self.presence.start()
        self.entry.check()
        self.presence.listeners.append(self.entry.check_later)
        self._tasks.keep(lambda: self.entry.follow_revocations(self.presence.changed), "revocations")
        self._tasks.keep(lambda: self.entry.keep_pass(self.presence.changed), "pass")
        self._tasks.keep(lambda: network.reach.watch(self.presence.changed, network.lose), "reach")
        self._tasks.keep(network.keep_remembering, "remember-peers")

    @property
    def is_reachable(self) -> bool:
        """See `Owner`."""
        return not self.network.reach.is_outbound_only

    def state_changed(self) -> None:
        """See `Owner`."""
        self.presence.changed()

    def set_state(self, state: str) -> None:
        """Change the state in the record; rounds wait for a peer in ``training``."""
        self.record.state = state
        if self.held.synchronizer is not None and not self.held.stages:
            self.held.synchronizer.participate(state == "training")
        self.presence.changed()

    async def close(self, farewell: bool = True) -> None:
        """Publish a farewell and end everything that this peer started; idempotent."""
        await self._tasks.close()
        if self._is_present:
            if farewell and self.held.synchronizer is not None:
                await self.held.synchronizer.hand_over()
            self.record.state = "draining"
            await self.presence.close(farewell and self.options.role != "client")
            await self.network.remember_peers()
        await self._stack.aclose()
