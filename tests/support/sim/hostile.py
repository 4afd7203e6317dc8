"""Trainers that lie: what they send is changed on its way out, below the protocol code that would never say so."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Request
from p2ptrain.averaging.grouping.messages import JOIN, Join
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.network.rpc.channel import Channel
from tests.support.lying import BulkLie, Lie, LyingChannel, Message
from tests.support.sim.trainers import SimulatedTrainer


def lie_in_rounds(
    trainer: SimulatedTrainer, lie: Lie = lambda to, message: message, bulk_lie: BulkLie = lambda data: data
) -> None:
    """Change what a trainer sends in rounds, on the streams that it opens and on those that it serves."""
    serve, open_ = trainer.sync.averager._runner.sessions.serve, trainer.rpc.open

    async def lying_serve(channel: Channel, request: Request) -> None:
        await serve(LyingChannel(channel, lie, bulk_lie), request)  # type: ignore[arg-type]

    @asynccontextmanager
    async def lying_open(
        peer: str, name: str, request: Message, timeout_seconds: float, **options: Any
    ) -> AsyncIterator[Any]:
        async with open_(peer, name, request, timeout_seconds, **options) as channel:
            yield LyingChannel(channel, lie, bulk_lie) if name == ALLREDUCE else channel

    trainer.rpc.serve_channel(ALLREDUCE, Request, lying_serve)
    trainer.rpc.open = lying_open  # type: ignore[assignment,method-assign]


Lead = Callable[[list[Ticket], Ticket], object]
"""(all tickets so far, this one) -> the answer, maybe awaited."""


def lead_badly(trainer: SimulatedTrainer, answer: Lead) -> list[Ticket]:
    """Answer every ticket as told; the list fills with them."""
    tickets: list[Ticket] = []

    async def join(channel: Channel, request: Join) -> None:
        tickets.append(request.ticket)
        found = answer(tickets, request.ticket)
        await channel.send(await found if isinstance(found, Awaitable) else found)

    trainer.rpc.serve_channel(JOIN, Join, join)
    return tickets


async def never(*args: object) -> Any:
    await asyncio.sleep(3600)


def withhold(trainer: SimulatedTrainer, kind: type, instead: Callable[[str, Any], object] = lambda *_: None) -> None:
    """Fall silent in each attempt where a message of this kind is due on a stream that another member opened.

    Args:
        instead: Takes the member's id and the message, and returns another one to send instead of silence, or None.
    """
    serve = trainer.sync.averager._runner.sessions.serve

    async def silent(channel: Channel, request: Request) -> None:
        send = channel.send

        async def send_or_not(message: object, data: bytes = b"") -> None:
            if isinstance(message, kind) and (message := instead(channel.remote, message)) is None:
                await never()
            await send(message, data)

        channel.send = send_or_not  # type: ignore[method-assign]
        await serve(channel, request)

    trainer.rpc.serve_channel(ALLREDUCE, Request, silent)


def with_field(name: str, value: object) -> Lie:
    return lambda to, message: {**message, name: value} if name in message else message


def without_field(name: str) -> Lie:
    return lambda to, message: {key: value for key, value in message.items() if key != name} or {"nothing": 0}


BROKEN_PARTS: dict[str, BulkLie] = {
    "not finite": lambda data: b"\xff" * len(data),
    "too short": lambda data: data[:-1],
    "too long": lambda data: data + bytes(5000),
    "nothing": lambda data: b"",
}
"""Parts and means that no codec takes."""

BAD_MESSAGES: dict[str, Lie] = {
    "mask of nobody": with_field("contributors", []),
    "mask of one": with_field("contributors", [0]),
    "mask out of range": with_field("contributors", [0, 99]),
    "mask of words": with_field("contributors", "everybody"),
    "mask of nested lists": with_field("contributors", [[0], [1]]),
    "no mask": without_field("contributors"),
    "another body": with_field("body", b"b" * 32),
    "a body of words": with_field("body", "body"),
    "a forged signature": with_field("proof", b"p" * 32),
    "no signature": with_field("proof", None),
    "an endless signature": with_field("proof", b"p" * 60_000),
}
"""Messages of a round that are wrong."""


def boast(trainer: SimulatedTrainer) -> None:
    """Announce a head far ahead of everybody's."""
    describe = trainer.describe
    claim = {"round": 1000, "lineage": b"f" * 32, "digest": b"f" * 32, "lineage_tokens": 1 << 60}
    trainer.presence._describe = lambda: replace(describe(), **claim)  # type: ignore[arg-type]


def hide_in_leading(trainer: SimulatedTrainer) -> None:
    lead_badly(trainer, never)


HOSTILITIES: dict[str, Callable[[SimulatedTrainer], object]] = {
    **{name: partial(lie_in_rounds, bulk_lie=lie) for name, lie in BROKEN_PARTS.items()},
    **{name: partial(lie_in_rounds, lie=lie) for name, lie in BAD_MESSAGES.items()},
    "boasts": boast,
    "leads nobody": hide_in_leading,
}
"""What a hostile trainer can do from its start on."""
