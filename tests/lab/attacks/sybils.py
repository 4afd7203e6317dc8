"""Sign nothing but the results of rosters of this peer's own kind, and lead to no others."""

import asyncio

from p2ptrain.averaging.grouping.messages import Formed
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.network.rpc.channel import Channel
from tests.lab.scenario import HOSTILE
from tests.lab.stranger import Member, forever, roster_of


async def attack(member: Member) -> None:
    def own_kind() -> set[str]:
        records = member.sync.replica.context.membership.records()
        return {member.peer_id, *(record.peer for record in records if record.name.startswith(HOSTILE))}

    member.vote_for(lambda body: own_kind().issuperset(body.members))
    async with asyncio.TaskGroup() as tasks:

        async def lead(channel: Channel, ticket: Ticket) -> None:
            if channel.remote not in own_kind():
                await forever()
            roster = roster_of([ticket, member.ticket()])
            tasks.create_task(member.average(roster))
            await channel.send(Formed(roster.tickets))

        member.lead(lead)
        await forever()
