"""`Peer`: daemon, directory, RPC and presence; and synchronization, when it trains.

`Peer.close` ends all of them in reverse order of their start, also after a failed start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain._version import __version__
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.errors import (
    BootstrapError,
    DeadlineError,
    IncompatibleError,
    ManifestError,
    P2PTrainError,
    PeerError,
    PeerRefusedError,
    WrongPeerError,
)
from p2ptrain.manifest import MAX_MANIFEST_BYTES, PROTOCOL_VERSION, Manifest, SignedManifest
from p2ptrain.network.directory import Directory
from p2ptrain.network.factory import LIBP2P, DirectoryOptions, TransportOptions, start_directory, start_transport
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.link import MAX_ADDRESSES, SwarmLink
from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.network.records.serving import ServingReport
from p2ptrain.network.rpc.endpoint import OTHER_PROTOCOL, OTHER_SWARM, Rpc, RpcLimits
from p2ptrain.network.transport import Transport
from p2ptrain.node.nat.contacts import MAX_KNOWN_ADDRESSES, dialable, known_addresses, remember_addresses
from p2ptrain.node.nat.reach import FixedReach, Reach
from p2ptrain.node.nat.relaying import relay_settings
from p2ptrain.node.presence import Presence
from p2ptrain.node.progress import JobBook
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.pipeline.stage.hosted_stage import HostedStage
    from p2ptrain.training.state.shared_state import SharedState
    from p2ptrain.training.sync.synchronizer import Synchronizer

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
FIRST_DIAL_SECONDS = 5.0
MANIFEST_SECONDS = 10.0
CLOCK_SECONDS = 2.0
CLOCK_WARNING_SECONDS = 5.0
EMPTY_HASH = bytes(32)


@dataclass(frozen=True)
class PeerOptions:
    """A peer's role, name and network.

    Attributes:
        role: ``bootstrap``, ``trainer``, ``stage``, or ``client`` (read-only).
        name: For people.
        device: Compute device, for the record.
        run_dir: Keeps the addresses of known peers; None keeps none.
        directory: Where peers find each other; empty for the link's directory, or else the DHT.
        upload_bandwidth: Limit in bytes per second, which also determines share sizes; 0 for none.
        download_bandwidth: Limit in bytes per second; 0 for none.
    """

    role: str
    name: str
    device: str
    run_dir: Path | None
    network: Libp2pSettings
    upload_bandwidth: int = 0
    download_bandwidth: int = 0
    directory: str = ""
    transport: str = LIBP2P


@dataclass(frozen=True)
class Pace:
    """Training progress: last loss if known, tokens per second, and tokens for the current round."""

    loss: float | None = None
    tokens_per_second: float = 0.0
    round_tokens: int = 0


@dataclass(frozen=True)
class Activity:
    """A role's part of the record; each callable runs on the event loop, once for each record.

    Attributes:
        failovers: Number of host failures met by the microbatch sender.
        next_stage: See `PeerRecord`.
    """

    pace: Callable[[], Pace] = Pace
    failovers: Callable[[], int] = int
    next_stage: Callable[[], int | None] = lambda: None
    serving: Callable[[], ServingReport | None] = lambda: None


@dataclass
class Status:
    """A peer's state, for its record."""

    started_at: float
    state: str = "starting"
    note: str = ""


class Peer:
    """One running peer. Make it with `start`, end it with `close`.

    Attributes:
        signed: The swarm's manifest, with its organizer's signature; ``swarm``: its digest, 32 bytes.
        status, activity: Parts of the record; `presence.changed` publishes a change.
        network_lost: Resolves to the reason when the network daemon is gone for good.
        jobs: Its long-running jobs.
        synchronizer: Set once it trains.
        hosted: The stages that it hosts; ``intended``: the stages in its record before it hosts any.
    """

    def __init__(self, identity: Identity, options: PeerOptions, runtime: Runtime) -> None:
        self.identity = identity
        self.options = options
        self.runtime = runtime
        self.status = Status(started_at=runtime.now())
        self.jobs = JobBook(asyncio.get_running_loop())
        self.synchronizer: Synchronizer | None = None
        self.hosted: list[HostedStage] = []
        self._closes_hosted = False
        self.intended: tuple[StageReport, ...] = ()
        self.activity = Activity()
        self.network_lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.signed: SignedManifest
        self.manifest: Manifest
        self.swarm: bytes
        self.transport: Transport
        self.directory: Directory
        self.rpc: Rpc
        self.presence: Presence
        self.membership = Membership(identity.peer_id, runtime)
        self.reach: Reach | FixedReach
        self._tasks = Tasks()
        self._clock_note = ""
        self._directory_name = options.directory
        self._bootstrap: tuple[str, ...] = ()
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
    ) -> Peer:
        """Start the daemon, join the swarm, fetch and verify its manifest, and publish this peer's record.

        Args:
            identity: This peer's key; locked by the caller.
            link: Where to find the swarm; None starts one.
            signed: The manifest, if known; required without a link.

        Raises:
            BootstrapError: No peer of the link or of earlier runs answers.
            ManifestError: A peer sent another manifest than the link's.
            ResourceError: The daemon does not start.
        """
        peer = cls(identity, options, runtime)
        try:
            await peer._start(link, signed)
        except BaseException:
            await peer.close(farewell=False)
            raise
        return peer

    async def _start(self, link: SwarmLink | None, signed: SignedManifest | None) -> None:
        assert link is not None or signed is not None
        digest = link.digest if link is not None else signed.manifest.digest if signed is not None else b""
        self.swarm = digest
        own = f"/p2p/{self.identity.peer_id}"
        met = known_addresses(self.options.run_dir) if self.options.run_dir is not None else []
        known = [*(link.addresses if link is not None else ()), *self.options.network.bootstrap, *met]
        addresses = tuple(dict.fromkeys(a for a in known if not a.endswith(own)))[:MAX_KNOWN_ADDRESSES]
        self._directory_name = self._directory_name or (link.directory if link is not None else "") or LIBP2P
        self._bootstrap = addresses
        settings = relay_settings(self.options.network).changed(bootstrap=addresses)
        await self._use_transport(settings)
        self._stack.push_async_callback(lambda: self.transport.close())
        limits = RpcLimits(
            up_bytes_per_second=self.options.upload_bandwidth, down_bytes_per_second=self.options.download_bandwidth
        )
        self.rpc = Rpc(self.transport, self.runtime, digest, limits)
        self._stack.push_async_callback(self.rpc.close)
        await self.rpc.start()
        self.signed = signed or await self._fetch_manifest(digest, addresses)
        self.manifest = self.signed.manifest
        self.rpc.serve("manifest", dict, self._serve_manifest)
        self.reach = self._make_reach(settings)
        await self.reach.settle()
        self.directory = await self._start_directory()
        self._stack.push_async_callback(lambda: self.directory.close())
        self._correct_clock()
        self.presence = Presence(self.directory, self.runtime, digest, self.identity, self.membership, self.describe)
        if self.options.role != "client":
            await self.presence.start()
            self._tasks.keep(self._watch_reach, "reach")
            self._tasks.keep(self._follow_clocks, "clock")
        else:
            await self.presence.refresh()

    # Only these methods start daemons; simulations override them.

    async def _start_transport(self, settings: Libp2pSettings) -> Transport:
        return await start_transport(TransportOptions(self.options.transport, self.identity, settings))

    async def _start_directory(self) -> Directory:
        client_mode = self.options.role == "client" or self.reach.is_outbound_only
        return await start_directory(
            DirectoryOptions(
                self._directory_name, self.transport, self.rpc.swarm, self.identity, self.runtime, self._bootstrap,
                client_mode,
            )
        )  # fmt: skip

    def _make_reach(self, settings: Libp2pSettings) -> Reach | FixedReach:
        if not isinstance(self.transport, Libp2pTransport):
            return FixedReach(self.transport)

        def transport() -> Libp2pTransport:
            assert isinstance(self.transport, Libp2pTransport)
            return self.transport

        return Reach(settings, self.rpc, transport, self._move, self.membership, self.runtime)

    async def _move(self, settings: Libp2pSettings) -> None:
        """Restart the daemon with other settings. Streams break; everything else continues."""
        met = [address for record in self.membership.records() for address in dialable(record.addresses)]
        bootstrap = tuple(dict.fromkeys([*self.options.network.bootstrap, *settings.bootstrap, *met]))
        self._bootstrap = bootstrap[:MAX_KNOWN_ADDRESSES]
        settings = settings.changed(bootstrap=self._bootstrap)
        joined = hasattr(self, "presence")
        if joined:
            await self.directory.close()
        await self.transport.close()
        await self._use_transport(settings)
        await self.rpc.move(self.transport)
        if joined:
            self.directory = await self._start_directory()
            self._correct_clock()
            self.presence.use(self.directory)

    async def _use_transport(self, settings: Libp2pSettings) -> None:
        self.transport = await self._start_transport(settings)
        self.transport.on_lost(self._lose_network)

    def _lose_network(self, reason: str) -> None:
        if not self.network_lost.done():
            self.network_lost.set_result(reason)

    async def _watch_reach(self) -> None:
        try:
            await self.reach.watch(self.presence.changed)
        except P2PTrainError as error:
            self._lose_network(str(error))

    async def _follow_clocks(self) -> None:
        while True:  # Peers may answer late, and the machine's clock may be set meanwhile.
            await asyncio.sleep(CLOCK_SECONDS)
            self._correct_clock()

    def _correct_clock(self) -> None:
        """Follow the clock of the peers that were there first, so that records do not expire on arrival."""
        skew = self.directory.clock_skew_seconds
        if skew is None or abs(skew + self.runtime.clock_offset_seconds) < CLOCK_WARNING_SECONDS:
            return
        self.runtime.clock_offset_seconds = -skew
        if abs(skew) < CLOCK_WARNING_SECONDS:
            self._clock_note = ""
            logger.info("this machine's clock agrees with the swarm's again")
            return
        way = "ahead of" if skew > 0 else "behind"
        self._clock_note = f"clock {abs(skew):.0f} s {way} the swarm's: corrected"
        logger.warning(
            "this machine's clock is %.0f s %s the swarm's: corrected for this run; set it right with "
            "`timedatectl set-ntp true`", abs(skew), way,
        )  # fmt: skip

    async def _serve_manifest(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"manifest": self.signed.to_bytes()}

    async def _fetch_manifest(self, digest: bytes, addresses: tuple[str, ...]) -> SignedManifest:
        """Fetch the manifest from any peer at ``addresses``; retry all of them for `CONNECT_SECONDS`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_SECONDS
        failure: Exception | None = None
        patience, is_first = FIRST_DIAL_SECONDS, True
        while loop.time() < deadline:
            refusals: list[PeerRefusedError | WrongPeerError] = []
            for address in addresses:
                try:
                    peer = await self.transport.connect(
                        [address], max(FIRST_DIAL_SECONDS, min(patience, deadline - loop.time()))
                    )
                    reply = await self.rpc.call(
                        peer, "manifest", {}, dict, MANIFEST_SECONDS, max_reply_bytes=2 * MAX_MANIFEST_BYTES
                    )
                    data = reply.get("manifest")
                    if type(data) is not bytes:
                        raise ManifestError("a peer sent something else than a manifest: ask the organizer for a link")
                    return SignedManifest.from_bytes(data, digest, self.identity)
                except (PeerError, DeadlineError) as error:
                    failure = failure if isinstance(failure, WrongPeerError) else error
                    refusals += [error] if isinstance(error, PeerRefusedError | WrongPeerError) else []
            if refusals and len(refusals) == len(addresses):
                _raise_if_final(refusals)
            if is_first and failure is not None:
                seconds_left = deadline - loop.time()
                logger.warning("nobody answers yet (%s): asking for another %.0f s", failure, seconds_left)
            is_first = False
            patience *= 2  # A retry dials from the start, and some peers answer seconds late.
            await asyncio.sleep(0.5)
        shown = ", ".join(addresses[:3]) or "no address"
        raise BootstrapError(
            f"none of the swarm's known peers answers ({shown}): {failure}. Check that the bootstrap peer runs and "
            "that this machine can reach it, or ask the organizer for a new link"
        )

    def remember_peers(self) -> None:
        if self.options.run_dir is not None:
            remember_addresses(self.options.run_dir, self.membership.records())

    @property
    def link(self) -> SwarmLink:
        """A swarm link through this peer."""
        addresses = tuple(_dialable(self.reach.standing.addresses))[:MAX_ADDRESSES]
        return SwarmLink(self.swarm, addresses, self._directory_name if self._directory_name != LIBP2P else "")

    def train(self, state: SharedState) -> Synchronizer:
        """Join averaging with this state; `close` also closes the synchronizer.

        Raises:
            IncompatibleError, ManifestError: See `check_extensions`.
        """
        from p2ptrain.training.sync.replica import Replica
        from p2ptrain.training.sync.synchronizer import Synchronizer

        self._warm_up_codecs()
        context = PeerContext(self.rpc, self.runtime, self.identity, self.swarm, self.manifest.averaging)
        replica = Replica(context, self.manifest.training, state, self.membership)
        self.synchronizer = Synchronizer(replica, self.options.upload_bandwidth, self.jobs)
        self._stack.push_async_callback(self.synchronizer.close)
        self.synchronizer.averager.is_reachable = lambda: not self.reach.is_outbound_only
        self.synchronizer.replica.on_change = self.presence.changed
        return self.synchronizer

    def host(self, stage: HostedStage) -> None:
        """Publish a stage that this peer hosts; `close` closes it if it is still in `hosted`."""
        self._warm_up_codecs()
        if not self._closes_hosted:
            self._closes_hosted = True
            self._stack.push_async_callback(self._close_hosted)
        self.hosted.append(stage)
        self.synchronizer = stage.units[0].synchronizer
        for unit in stage.units:
            unit.synchronizer.averager.is_reachable = lambda: not self.reach.is_outbound_only
            unit.synchronizer.replica.on_change = self.presence.changed

    async def _close_hosted(self) -> None:
        for stage in self.hosted:
            await stage.close()

    def _warm_up_codecs(self) -> None:
        """Check the manifest's codec and rule, then compile codecs in the background; torch gives the same bits."""
        from p2ptrain.codecs import warm_up
        from p2ptrain.node.extensions import check_extensions

        check_extensions(self.manifest)

        def warm() -> None:
            with self.jobs("preparing the codecs", ""):
                warm_up()

        self._tasks.start(asyncio.to_thread(warm), "warm-up")  # If it fails, codecs keep using torch.

    def set_state(self, state: str) -> None:
        """Change the state in the record; rounds wait for a peer in ``training``."""
        self.status.state = state
        if self.synchronizer is not None and not self.hosted:
            self.synchronizer.averager.matchmaker.participates = state == "training"
        self.presence.changed()

    def describe(self) -> PeerRecord:
        sync, status, activity, pace = self.synchronizer, self.status, self.activity, self.activity.pace()
        return PeerRecord(
            peer=self.identity.peer_id,
            name=self.options.name,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            role=self.options.role,
            state=status.state,
            device=self.options.device,
            round=sync.head.round if sync else 0,
            lineage=sync.head.lineage if sync else EMPTY_HASH,
            digest=sync.head.digest if sync else EMPTY_HASH,
            lineage_tokens=sync.head.tokens if sync else 0,
            round_tokens=pace.round_tokens,
            loss=pace.loss,
            tokens_per_second=pace.tokens_per_second,
            bytes_sent=self.rpc.traffic.sent,
            bytes_received=self.rpc.traffic.received,
            reachability=self.reach.standing.reachability,
            addresses=self.reach.standing.addresses,
            started_at=status.started_at,
            last_rounds=tuple(sync.reports) if sync else (),
            direct_refusals=self.transport.num_refused,
            trained_tokens=sync.replica.trained_tokens if sync else 0,
            trained_rounds=sync.replica.trained_rounds if sync else 0,
            stages=tuple(report for stage in self.hosted for report in stage.reports()) or self.intended,
            next_stage=activity.next_stage(),
            clock_skew_seconds=-self.runtime.clock_offset_seconds,
            failovers=activity.failovers(),
            serving=activity.serving(),
            note=status.note or self.jobs.note() or self._clock_note or self.reach.standing.note,
        )

    async def close(self, farewell: bool = True) -> None:
        """Publish a farewell and end everything that this peer started; idempotent."""
        await self._tasks.close()
        if hasattr(self, "presence"):
            self.status.state = "draining"
            await self.presence.close(farewell and self.options.role != "client")
            self.remember_peers()
        await self._stack.aclose()


def _dialable(addresses: tuple[str, ...]) -> list[str]:
    """Return the addresses for a link: without loopback, unless there is no other."""
    outside = [address for address in addresses if "/127.0.0.1/" not in address and "/ip6/::1/" not in address]
    return outside or list(addresses)


def _raise_if_final(failures: Sequence[PeerRefusedError | WrongPeerError]) -> None:
    """Raise if a retry cannot help, given the failures at all known addresses.

    Raises:
        BootstrapError: Other peers than the link's hold the addresses.
        ManifestError: All peers belong to other swarms.
        IncompatibleError: All peers speak another protocol.
    """
    wrong = [failure for failure in failures if isinstance(failure, WrongPeerError)]
    refusals = [failure for failure in failures if isinstance(failure, PeerRefusedError)]
    if wrong and len(wrong) + sum(each.reason.startswith(OTHER_SWARM) for each in refusals) == len(failures):
        raise BootstrapError(
            f"the address of the link is held by peer {wrong[0].holder}, and the link names {wrong[0].peer}: "
            "ask the organizer for a new link"
        )
    if not refusals:
        return
    reason = refusals[0].reason
    if all(refusal.reason.startswith(OTHER_SWARM) for refusal in refusals):
        raise ManifestError(
            "the peers that the link names do not know its swarm: the link was changed, or the organizer started "
            "another swarm; ask for a new link"
        )
    if all(refusal.reason.startswith(OTHER_PROTOCOL) for refusal in refusals):
        raise IncompatibleError(f"the swarm refuses this version ({reason}): install the version that the swarm runs")
