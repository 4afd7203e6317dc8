"""A peer put together: daemon, directory, RPC, presence; and synchronisation, when it trains.

Everything that is started here is ended by `Peer.close`, in the opposite order, whatever state it is in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain._version import __version__
from p2ptrain.averaging.membership import Membership
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
from p2ptrain.manifest import MAX_MANIFEST_BYTES, NO_AUXILIARIES, PROTOCOL_VERSION, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p import Libp2pSettings, Libp2pTransport
from p2ptrain.network.libp2p_directory import Libp2pDirectory
from p2ptrain.network.link import MAX_ADDRESSES, SwarmLink
from p2ptrain.network.records import PeerRecord, StageReport
from p2ptrain.network.rpc import OTHER_PROTOCOL, OTHER_SWARM, Rpc, RpcLimits
from p2ptrain.network.serving_report import ServingReport
from p2ptrain.node.contacts import MAX_KNOWN_ADDRESSES, dialable, known_addresses, remember_addresses
from p2ptrain.node.presence import Presence
from p2ptrain.node.progress import JobBook
from p2ptrain.node.reach import Reach
from p2ptrain.node.relaying import relay_settings
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.averaging.lending import Lender
    from p2ptrain.training.hosted_stage import HostedStage
    from p2ptrain.training.state import SharedState
    from p2ptrain.training.sync import Synchronizer

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
FIRST_DIAL_SECONDS = 5.0
MANIFEST_SECONDS = 10.0
CLOCK_WARNING_SECONDS = 5.0
REMEMBER_SECONDS = 5.0
EMPTY_HASH = bytes(32)


@dataclass(frozen=True)
class PeerOptions:
    """How a peer appears and listens.

    Attributes:
        role: ``bootstrap``, ``trainer``, ``stage``, ``auxiliary``, or ``client`` (looks only).
        name: For people.
        device: What it computes on, for its record.
        run_dir: Where it keeps the addresses of peers that it has met; None keeps none.
        network: How its daemon listens.
        upload_bandwidth: Bytes per second that it may send, which also decides about share sizes; 0 sets no limit.
        download_bandwidth: Bytes per second that it may receive; 0 sets no limit.
    """

    role: str
    name: str
    device: str
    run_dir: Path | None
    network: Libp2pSettings
    upload_bandwidth: int = 0
    download_bandwidth: int = 0


@dataclass(frozen=True)
class Pace:
    """How training goes: the last loss, if any is known, and tokens: a second, and for the round in progress."""

    loss: float | None = None
    tokens_per_second: float = 0.0
    round_tokens: int = 0


@dataclass
class Status:
    """What the parts of a peer report about it, for its record; functions are asked each time, from the event loop."""

    state: str = "starting"
    pace: Callable[[], Pace] = Pace
    failovers: Callable[[], int] = int
    serving: Callable[[], ServingReport | None] = lambda: None
    note: str = ""
    started_at: float = field(default=0.0)


class Peer:
    """One running peer. Make it with `start`, end it with `close`.

    Attributes:
        signed: The swarm's manifest.
        transport, directory, rpc, reach, presence, membership: Its parts.
        status: What its record says; `presence.changed` publishes it.
        jobs: What it does that takes long.
        synchronizer: When it trains.
        lender: When it lends its bandwidth.
        hosted: The stages that it hosts; ``intended``: what its record says before it does;
            ``next_stage``: where its record says that it goes.
    """

    def __init__(self, identity: Identity, options: PeerOptions, runtime: Runtime) -> None:
        self.identity = identity
        self.options = options
        self.runtime = runtime
        self.status = Status(started_at=runtime.now())
        self.jobs = JobBook(asyncio.get_running_loop())
        self.synchronizer: Synchronizer | None = None
        self.lender: Lender | None = None
        self.hosted: list[HostedStage] = []
        self._closes_hosted = False
        self.intended: tuple[StageReport, ...] = ()
        self.next_stage: Callable[[], int | None] = lambda: None
        self.signed: SignedManifest
        self.transport: Libp2pTransport
        self.directory: Libp2pDirectory
        self.rpc: Rpc
        self.presence: Presence
        self.membership = Membership(identity.peer_id, runtime)
        self.reach: Reach
        self._tasks = Tasks()
        self._network_lost: Callable[[str], None] = lambda reason: None
        self._clock_note = ""
        self._stack = AsyncExitStack()

    @property
    def manifest(self) -> Manifest:
        """What the swarm agreed on."""
        return self.signed.manifest

    @property
    def swarm(self) -> bytes:
        """The manifest's digest, 32 bytes."""
        return self.signed.manifest.digest

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
        """Start the daemon, meet the swarm, get and check its manifest, and publish this peer's record.

        Args:
            identity: This peer's key; locked by the caller.
            options: Role, name and network.
            runtime: Time, chance, arithmetic.
            link: Where to find the swarm; None starts one.
            signed: The manifest, where it is known already; required without a link.

        Raises:
            BootstrapError: Nobody that the link or former runs name answers.
            ManifestError: What peers sent is not the link's manifest.
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
        from dataclasses import replace

        assert link is not None or signed is not None
        digest = link.digest if link is not None else signed.manifest.digest if signed is not None else b""
        own = f"/p2p/{self.identity.peer_id}"
        met = known_addresses(self.options.run_dir) if self.options.run_dir is not None else []
        known = [*(link.addresses if link is not None else ()), *met]
        addresses = tuple(dict.fromkeys(a for a in known if not a.endswith(own)))[:MAX_KNOWN_ADDRESSES]
        settings = replace(relay_settings(self.options.network), bootstrap=addresses)
        self.transport = await self._start_transport(settings)
        self._stack.push_async_callback(lambda: self.transport.close())
        limits = RpcLimits(
            up_bytes_per_second=self.options.upload_bandwidth, down_bytes_per_second=self.options.download_bandwidth
        )
        self.rpc = Rpc(self.transport, self.runtime, digest, limits)
        self._stack.push_async_callback(self.rpc.close)
        await self.rpc.start()
        self.signed = signed or await self._fetch_manifest(digest, addresses)
        self.rpc.serve("manifest", self._serve_manifest)
        self.reach = Reach(
            self.identity, settings, self.rpc, lambda: self.transport, self._move, self.membership, self.runtime
        )
        await self.reach.settle()
        self.directory = await self._start_directory()
        self._stack.push_async_callback(lambda: self.directory.close())
        self._follow_clocks()
        self.presence = Presence(self.directory, self.runtime, digest, self.identity, self.membership, self.describe)
        if self.options.role != "client":
            await self.presence.start()
            self._tasks.keep(self._watch_reach, "reach")
            self._tasks.keep(self._keep_remembering, "remember-peers")
        else:
            await self.presence.refresh()

    # All that knows of daemons; simulations put their own network here.

    async def _start_transport(self, settings: Libp2pSettings) -> Libp2pTransport:
        return await Libp2pTransport.start(self.identity, settings)

    async def _start_directory(self) -> Libp2pDirectory:
        return await Libp2pDirectory.start(
            self.transport,
            self.rpc.swarm,
            self.identity,
            self.transport.settings.bootstrap,
            self.runtime,
            client_mode=self.options.role == "client" or self.reach.is_outbound_only,
        )

    async def _move(self, settings: Libp2pSettings) -> None:
        """Start the daemon again with other settings. What is under way with other peers breaks; all else goes on."""
        from dataclasses import replace

        met = [address for record in self.membership.records() for address in dialable(record.addresses)]
        bootstrap = tuple(dict.fromkeys([*self.options.network.bootstrap, *settings.bootstrap, *met]))
        settings = replace(settings, bootstrap=bootstrap[:MAX_KNOWN_ADDRESSES])
        joined = hasattr(self, "presence")
        if joined:
            await self.directory.close()
        await self.transport.close()
        self.transport = await self._start_transport(settings)
        self.transport.on_lost(self._network_lost)
        await self.rpc.move(self.transport)
        if joined:
            self.directory = await self._start_directory()
            self._follow_clocks()
            self.presence.use(self.directory)

    async def _watch_reach(self) -> None:
        try:
            await self.reach.watch(self.presence.changed)
        except P2PTrainError as error:
            self._network_lost(str(error))

    def on_network_lost(self, callback: Callable[[str], None]) -> None:
        """Have ``callback(reason)`` called on the event loop when the network daemon is gone for good."""
        self._network_lost = callback
        self.transport.on_lost(callback)

    def _follow_clocks(self) -> None:
        """Go by the clock of the peers that were there first, so that records do not expire on arrival."""
        self._correct_clock()
        if self.transport.settings.bootstrap:  # They may be slow to answer, and this clock may yet be set.
            self.directory.on_clock_measured = self._correct_clock

    def _correct_clock(self) -> None:
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
        """Get the manifest from any peer at ``addresses``; all of them are tried before this gives up."""
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
                        peer, "manifest", {}, MANIFEST_SECONDS, max_reply_bytes=2 * MAX_MANIFEST_BYTES
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
            patience *= 2  # A dial that is given up begins anew; some peers answer seconds late.
            await asyncio.sleep(0.5)
        shown = ", ".join(addresses[:3]) or "no address"
        raise BootstrapError(
            f"none of the swarm's known peers answers ({shown}): {failure}. Check that the bootstrap peer runs and "
            "that this machine can reach it, or ask the organizer for a new link"
        )

    async def _keep_remembering(self) -> None:
        """Store the addresses of present peers again and again: a crash leaves no time for it."""
        while True:
            await asyncio.sleep(REMEMBER_SECONDS)
            await self._remember_peers()

    async def _remember_peers(self) -> None:
        if self.options.run_dir is not None:
            await asyncio.to_thread(remember_addresses, self.options.run_dir, self.membership.records())

    @property
    def link(self) -> SwarmLink:
        """The swarm link through this peer."""
        return SwarmLink(self.swarm, tuple(_dialable(self.reach.standing.addresses))[:MAX_ADDRESSES])

    def train(self, state: SharedState) -> Synchronizer:
        """Take part in averaging with this state; the synchronizer is closed with the peer.

        Raises:
            ManifestError: The manifest names a codec that this version does not have.
        """
        from p2ptrain.training.encoding import vector_codec
        from p2ptrain.training.sync import Synchronizer

        self._warm_up_codecs()
        self.synchronizer = Synchronizer(
            self.rpc, self.runtime, self.identity, self.swarm, self.manifest, state,
            vector_codec(self.manifest.averaging, state.layout), self.membership, self.options.upload_bandwidth,
            self.jobs,
        )  # fmt: skip
        self._stack.push_async_callback(self.synchronizer.close)
        self.synchronizer.averager.is_reachable = lambda: not self.reach.is_outbound_only
        self.synchronizer.on_change = self.presence.changed
        return self.synchronizer

    def host(self, stage: HostedStage) -> None:
        """Show a stage that this peer hosts; it is closed with the peer if it is among `hosted` then."""
        self._warm_up_codecs()
        if not self._closes_hosted:
            self._closes_hosted = True
            self._stack.push_async_callback(self._close_hosted)
        self.hosted.append(stage)
        self.synchronizer = stage.units[0].synchronizer
        for unit in stage.units:
            unit.synchronizer.averager.is_reachable = lambda: not self.reach.is_outbound_only
            unit.synchronizer.on_change = self.presence.changed

    async def _close_hosted(self) -> None:
        for stage in self.hosted:
            await stage.close()

    def on_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Have something that was started for this peer ended with it."""
        self._stack.push_async_callback(end)

    def lend(self) -> Lender:
        """Lend this peer's bandwidth to the trainers' averaging; what is returned is closed with the peer.

        Raises:
            ManifestError: The manifest names a codec that this version does not have, or admits no auxiliaries.
        """
        from p2ptrain.averaging.lending import Lender
        from p2ptrain.training.layout_wire import fetch_plan

        if not self.manifest.averaging.auxiliaries:
            raise ManifestError(NO_AUXILIARIES)
        self._warm_up_codecs()
        self.lender = Lender(
            self.rpc, self.runtime, self.identity, self.swarm, self.manifest.averaging, self.membership,
            lambda peer: fetch_plan(self.rpc, peer, self.manifest), self.options.upload_bandwidth,
        )  # fmt: skip
        self._stack.push_async_callback(self.lender.close)
        self.lender.is_reachable = lambda: not self.reach.is_outbound_only
        return self.lender

    def _warm_up_codecs(self) -> None:
        """Check that the manifest's codec is known here, and compile; meanwhile codecs give the same bits with torch.

        Raises:
            ManifestError: It is not.
        """
        from p2ptrain.codecs import codec_names, warm_up

        name = self.manifest.averaging.codec
        if name not in codec_names():
            raise ManifestError(f"averaging.codec = {name!r}: this version has {', '.join(codec_names())}")

        def warm() -> None:
            with self.jobs("preparing the codecs", ""):
                warm_up()

        self._tasks.start(asyncio.to_thread(warm), "warm-up")  # Without it, codecs go on with torch.

    def set_state(self, state: str) -> None:
        """Change the state that the record shows; a peer in ``training`` is waited for by the others."""
        self.status.state = state
        if self.synchronizer is not None and not self.hosted:
            self.synchronizer.averager.matchmaker.participates = state == "training"
        self.presence.changed()

    def describe(self) -> PeerRecord:
        """This peer's record as of now."""
        sync, lent = self.synchronizer, self.lender
        status, pace = self.status, self.status.pace()
        return PeerRecord(
            peer=self.identity.peer_id,
            name=self.options.name,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            role=self.options.role,
            state=status.state,
            device=self.options.device,
            round=sync.head.round if sync else lent.head.round if lent and lent.head else 0,
            lineage=sync.head.lineage if sync else EMPTY_HASH,
            digest=sync.head.digest if sync else EMPTY_HASH,
            lineage_tokens=sync.head.tokens if sync else 0,
            round_tokens=pace.round_tokens,
            loss=pace.loss,
            tokens_per_second=pace.tokens_per_second,
            bytes_sent=self.rpc.bytes_sent,
            bytes_received=self.rpc.bytes_received,
            reachability=self.reach.standing.reachability,
            addresses=self.reach.standing.addresses,
            started_at=status.started_at,
            last_rounds=tuple(sync.reports) if sync else (),
            direct_refusals=self.transport.direct.refusals.total(),
            trained_tokens=sync.trained_tokens if sync else 0,
            trained_rounds=sync.trained_rounds if sync else 0,
            stages=tuple(report for stage in self.hosted for report in stage.reports()) or self.intended,
            next_stage=self.next_stage(),
            clock_skew_seconds=-self.runtime.clock_offset_seconds,
            failovers=status.failovers(),
            serving=status.serving(),
            note=status.note or self.jobs.note() or self._clock_note or self.reach.standing.note,
        )

    async def close(self, farewell: bool = True) -> None:
        """Say goodbye and end everything that this peer started; idempotent."""
        await self._tasks.close()
        if hasattr(self, "presence"):
            self.status.state = "draining"
            await self.presence.close(farewell and self.options.role != "client")
            await self._remember_peers()
        await self._stack.aclose()


def _dialable(addresses: tuple[str, ...]) -> list[str]:
    """The addresses worth putting in a link: all of them if only loopback is there, else no loopback."""
    outside = [address for address in addresses if "/127.0.0.1/" not in address and "/ip6/::1/" not in address]
    return outside or list(addresses)


def _raise_if_final(failures: Sequence[PeerRefusedError | WrongPeerError]) -> None:
    """Raise the error behind the failures at all known addresses, if asking again cannot help.

    Raises:
        BootstrapError: Other peers than the named ones hold all addresses.
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
