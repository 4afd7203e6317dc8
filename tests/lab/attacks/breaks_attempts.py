"""Join each round, and break it: fall silent about a mask that all wait for, or give up and blame another member."""

from typing import Any

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import GaveUp, Mask, Request
from tests.lab.stranger import Member, forever


async def attack(member: Member, blames: bool = False) -> None:
    serve = member.sync.averager._runner.sessions.serve

    async def broken(channel: Any, request: Request) -> None:
        send = channel.send

        async def send_or_break(message: object) -> None:
            if not isinstance(message, Mask):
                await send(message)
            elif blames:
                await send(GaveUp(tuple(index for index in message.contributors if index)[:1]))
            else:
                await forever()

        channel.send = send_or_break
        await serve(channel, request)

    member.rpc.serve_channel(ALLREDUCE, Request, broken)
    await forever()
