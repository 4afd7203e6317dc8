"""The running sessions of this peer, and the streams that the other members open to them."""

from __future__ import annotations

import asyncio
import contextlib

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import GAVE_UP, Bring, Request
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.commit.result_chunks import Source
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.averaging.timing.deadlines import keepalive_seconds
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel

ROSTER_WAIT_SECONDS = 5.0  # how long another member's stream waits for this peer to learn the roster
MAX_REQUEST_BYTES = 1 << 20  # a delegate's request holds the certificate of its group's result


class RunningSessions:
    """Serves the streams of the other members.

    Attributes:
        by_group: The sessions, until they are closed.
    """

    def __init__(self, context: PeerContext, cells: Cells, round_log: RoundLog) -> None:
        self._context = context
        self._cells = cells
        self._round_log = round_log
        self.by_group: dict[bytes, AllReduceSession] = {}
        self._roster_arrived = asyncio.Event()
        context.rpc.serve_channel(ALLREDUCE, Request, self.serve, max_request_bytes=MAX_REQUEST_BYTES)

    def add(self, session: AllReduceSession) -> None:
        """Keep a new session; the other members may open their streams from now on."""
        self._round_log.remember(session.attempt)
        self.by_group[session.attempt.roster.group_id] = session
        event, self._roster_arrived = self._roster_arrived, asyncio.Event()
        event.set()

    async def serve(self, channel: Channel, request: Request) -> None:
        channel.heartbeat.beat(keepalive_seconds(self._context.spec.grace_seconds))
        session = await self._session_of(request.group)
        roster, source = session.attempt.roster, None
        if roster.tickets[0].level and isinstance(request, Bring):
            try:
                source = await self._context.runtime.offload(
                    self._check_credential, roster, channel.remote, request.credential
                )
            except (IntegrityError, ProtocolError) as error:
                session.refuse(channel.remote, f"stands for nobody: {error}")
                raise ProtocolError(channel.remote, f"stands for nobody: {error}") from error
            session.attempt.children[roster.index_of(channel.remote)] = request.credential
        await session.incoming.serve(channel, request, source)

    async def _session_of(self, group: bytes) -> AllReduceSession:
        """Return the session of a group; wait up to `ROSTER_WAIT_SECONDS` for one that is new.

        Raises:
            PeerRefusedError: This peer is not in that group, or has left it.
        """
        known = self._round_log.attempts
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROSTER_WAIT_SECONDS):
                while group not in self.by_group and group not in known:
                    await self._roster_arrived.wait()
        if group not in self.by_group:
            reason = GAVE_UP if group in known else "this peer is not in that group"
            raise PeerRefusedError(self._context.rpc.peer_id, reason)
        return self.by_group[group]

    def _check_credential(self, roster: Roster, peer: str, raw: bytes) -> Source:
        """Return a delegate's group result; raise `IntegrityError` unless its certificate and ticket agree."""
        index = roster.index_of(peer)
        if index < 0 or not raw:
            raise IntegrityError("its result's certificate is missing")
        ticket = roster.tickets[index]
        body = self._context.certificate(raw).body
        if (
            (body.body_hash, body.tokens, body.most_samples, sum(body.peers), body.census)
            != (ticket.child, ticket.tokens, ticket.samples, ticket.peers, ticket.census)
            or (body.round, body.lineage, body.level + 1) != (ticket.round, ticket.lineage, ticket.level)
            or peer not in body.members
        ):
            raise IntegrityError("its ticket says otherwise than its result's certificate")
        if len({self._cells.key_of(ticket, member, body.level) for member in body.members}) != 1:
            raise IntegrityError("its result is not one of a cell")
        return self._round_log.source_of(peer, body)
