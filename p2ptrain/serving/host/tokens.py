"""`TokenService`: tokens on their way from the last host, to the client and to the first host; logits to the client.

A client that cannot dial the last host asks the first one. Each host then opens the same service at the next stage's
host, and relays one message at a time: grants down the chain, tokens and logits up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from p2ptrain.errors import DeadlineError, PeerError, PeerRefusedError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.host.session import HostSession
from p2ptrain.serving.host.sessions import SessionBook
from p2ptrain.serving.link import OPEN_SECONDS
from p2ptrain.serving.messages import (
    AHEAD,
    FEED,
    FLOAT_BYTES,
    IDLE_SECONDS,
    LOGITS,
    MAX_LOGIT_ROWS,
    TOKENS,
    DrawnToken,
    Fed,
    FeedRequest,
    Grant,
    Listen,
    LogitRows,
    LogitsRequest,
)
from p2ptrain.tasks import Backoff, Tasks, together

FEED_PAUSE_SECONDS, LONGEST_FEED_PAUSE_SECONDS = 0.1, 10.0
"""Backoff between attempts to reach the first stage's host."""


class TokenService:
    """Serves or relays the tokens of the last stage, and takes those for the first, from construction on."""

    def __init__(self, rpc: Rpc, book: SessionBook) -> None:
        offer = book.offer
        self.names = [TOKENS, LOGITS] + [FEED] * (offer.number == 0)
        self._rpc = rpc
        self._executor = book.executor
        self._sessions = book.open
        self._number = offer.number
        self._tasks = Tasks()
        rpc.serve_channel(TOKENS, Listen, self._serve_tokens if offer.is_last else self._relay_tokens)
        rpc.serve_channel(LOGITS, LogitsRequest, self._serve_logits if offer.is_last else self._relay_logits)
        if not offer.number:
            rpc.serve_channel(FEED, FeedRequest, self._serve_feed)

    async def close(self) -> None:
        """Stop serving; idempotent."""
        for name in self.names:
            self._rpc.withdraw(name)
        await self._tasks.close()

    def start_feeding(self, session: HostSession) -> None:
        """Feed a session of the last stage's tokens to the first stage until it ends."""
        session.ends.append(self._tasks.start(self._feed(session), "feed").cancel)

    async def _serve_tokens(self, channel: Channel, request: Listen) -> None:
        """Send the client a session's tokens as they are drawn."""
        session = self._session_of(channel, request.session)
        session.listen(request.start)
        session.grant(request.until, request.feed)
        self._executor.wake()

        async def send_drawn() -> None:
            position = max(request.start, session.ticket.prompt)
            while session.failure is None:
                drawn = session.drawn
                while position in session.tokens:
                    await channel.send(session.message(position))
                    position += 1
                await drawn.wait()

        async with Tasks() as tasks:
            granting, sending = (
                tasks.call(self._take_grants(session, channel), "grant"),
                tasks.call(send_drawn(), "send"),
            )
            await asyncio.wait({granting, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending

    def _session_of(self, channel: Channel, id: bytes) -> HostSession:
        """Return a session of the client at the channel's other end, or of a host of the stage before that relays it.

        Raises `PeerRefusedError` if the peer there has none.
        """
        session = self._sessions.get(id)
        relays = session.ticket.route[self._number - 1] if session is not None and self._number else ()
        if session is None or channel.remote not in (session.ticket.client, *relays):
            raise PeerRefusedError(self._rpc.peer_id, "no such session of yours")
        return session

    async def _serve_logits(self, channel: Channel, request: LogitsRequest) -> None:
        """Send the client the logits of a session's rows as they are computed, until the session ends."""
        session = self._session_of(channel, request.session)
        journal, at = session.journal, request.start
        if not journal.row_bytes:
            raise PeerRefusedError(self._rpc.peer_id, "the session's ticket asks for no logits")
        while session.failure is None and (stage := self._executor.stages.get(session.key)) is not None:
            news, stop = session.news, min(journal.known, at + MAX_LOGIT_ROWS)
            if at >= stop:
                await news.wait()
                continue
            rows = torch.frombuffer(bytearray(journal.rows(at, stop)), dtype=torch.float32).view(stop - at, -1)
            found = await self._rpc.runtime.serve(stage.head, rows)
            await channel.send(LogitRows(stop - at))
            await channel.send_bytes((torch.cat(found, 1) if request.with_states else found[0]).numpy().tobytes())
            at = stop

    async def _take_grants(self, session: HostSession, channel: Channel) -> None:
        while True:
            grant = await channel.receive(Grant, IDLE_SECONDS)
            session.grant(grant.until, grant.feed)
            self._executor.wake()

    async def _relay_tokens(self, channel: Channel, request: Listen) -> None:
        """Relay tokens from the next stage to a caller, and the caller's grants to the next stage."""
        session = self._session_of(channel, request.session)

        async def grants(source: Channel) -> None:
            while True:
                await source.send(await channel.receive(Grant, IDLE_SECONDS))

        async def tokens(source: Channel) -> None:
            while True:
                token = await source.receive(DrawnToken, IDLE_SECONDS)
                if not self._number:
                    session.put_fed({token.position: token.id})
                    self._executor.wake()
                await channel.send(token)

        await self._relay(session, TOKENS, request, tokens, grants)

    async def _relay_logits(self, channel: Channel, request: LogitsRequest) -> None:
        """Relay logits from the next stage to a caller."""
        session = self._session_of(channel, request.session)

        async def logits(source: Channel) -> None:
            while True:
                message = await source.receive(LogitRows, IDLE_SECONDS)
                num_bytes = message.rows * (session.vocabulary + session.hidden * request.with_states) * FLOAT_BYTES
                data = await source.receive_bytes(num_bytes, IDLE_SECONDS)
                await channel.send(message)
                await channel.send_bytes(data)

        await self._relay(session, LOGITS, request, logits)

    async def _relay(
        self, session: HostSession, name: str, request: object, *work: Callable[[Channel], Coroutine[Any, Any, None]]
    ) -> None:
        """Run work on a channel to the next stage's host, until the host is replaced or the session ends.

        Raises `PeerRefusedError` if there is no such host, or it is lost: the client asks again.
        """
        stage = self._number + 1
        if not (host := session.later.get(stage, "")):
            raise PeerRefusedError(self._rpc.peer_id, f"stage {stage} has no host yet")

        async def relay() -> None:
            async with self._rpc.open(host, name, request, OPEN_SECONDS) as source:
                await together(name, [each(source) for each in work])

        async def until_replaced() -> None:
            while session.failure is None and session.later[stage] == host:
                await session.news.wait()

        async with Tasks() as tasks:
            relaying, replaced = tasks.call(relay(), "relay"), tasks.call(until_replaced(), "replaced")
            await asyncio.wait({relaying, replaced}, return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                try:
                    await relaying
                except (PeerError, DeadlineError) as error:
                    raise PeerRefusedError(self._rpc.peer_id, f"stage {stage}: {error}") from error

    async def _feed(self, session: HostSession) -> None:
        """Send drawn tokens to the first stage's host. It is a short cut: the client sends them, too."""
        now = asyncio.get_running_loop().time
        failed, retry_at, backoff = "", 0.0, Backoff(FEED_PAUSE_SECONDS, LONGEST_FEED_PAUSE_SECONDS)
        while session.failure is None:
            drawn, feed, began = session.drawn, session.feed, now()
            if not self._number:
                next_ = range(session.known, session.known + AHEAD)
                session.put_fed({at: session.tokens[at].id for at in next_ if at in session.tokens})
                self._executor.wake()
            elif feed != self._rpc.peer_id and (feed != failed or retry_at <= began):
                try:
                    await self._feed_to(feed, session)
                except (PeerError, DeadlineError):
                    if feed != failed or now() - began >= LONGEST_FEED_PAUSE_SECONDS:
                        backoff.reset()
                    failed, retry_at = feed, now() + backoff.next()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_at - began if retry_at > began else None):
                    await drawn.wait()

    async def _feed_to(self, feed: str, session: HostSession) -> None:
        """Send drawn tokens to one host, until another is to have them."""
        request = FeedRequest(session.ticket.session)
        async with self._rpc.open(feed, FEED, request, OPEN_SECONDS) as channel:
            position = session.ticket.prompt
            while session.failure is None and session.feed == feed:
                drawn = session.drawn
                while position in session.tokens or position < session.known:
                    if position in session.tokens:
                        await channel.send(Fed(position, session.tokens[position].id, session.journal.together))
                    position += 1
                await drawn.wait()

    async def _serve_feed(self, channel: Channel, request: FeedRequest) -> None:
        """Take a session's tokens from a host that its client chose for the last stage."""
        held = self._sessions.get(request.session)
        if held is None or channel.remote not in held.ticket.route[-1]:
            raise PeerRefusedError(self._rpc.peer_id, "no such session that you may feed")
        while (session := self._sessions.get(request.session)) is not None and session.failure is None:
            fed = await channel.receive(Fed, IDLE_SECONDS)
            session.together = fed.together
            session.put_fed({fed.position: fed.id})
            self._executor.wake()
