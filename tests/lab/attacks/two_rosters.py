"""Lead, show two halves of the swarm two rosters, this peer in both, and vote for both results."""

import asyncio

from p2ptrain.averaging.grouping.messages import Formed
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.network.rpc.channel import Channel
from tests.lab.stranger import Member, forever, roster_of

COLLECT_SECONDS = 1.5


async def attack(member: Member) -> None:
    tickets: dict[str, Ticket] = {}
    rosters: dict[bytes, list[Roster]] = {}
    member.vote_for(lambda body: True)
    async with asyncio.TaskGroup() as tasks:

        async def lead(channel: Channel, ticket: Ticket) -> None:
            tickets[channel.remote] = ticket
            await asyncio.sleep(COLLECT_SECONDS)
            same = [each for each in tickets.values() if each.lineage == ticket.lineage]
            if ticket.lineage == member.sync.head.lineage and ticket.lineage not in rosters and len(same) > 1:
                same.sort(key=lambda each: each.peer)
                rosters.clear()
                rosters[ticket.lineage] = [roster_of([*same[half::2], member.ticket()]) for half in (0, 1)]
                for roster in rosters[ticket.lineage]:
                    tasks.create_task(member.average(roster))
            for roster in rosters.get(ticket.lineage, ()):
                if ticket in roster.tickets:
                    await channel.send(Formed(roster.tickets))
                    return
            await forever()

        member.lead(lead)
        await forever()
