"""Lead, and show two halves of the swarm two rosters, this peer in both."""

import asyncio
from dataclasses import replace

from p2ptrain.averaging.grouping.messages import JOIN, Formed, Join
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.network.rpc.channel import Channel
from tests.lab.stranger import Stranger

COLLECT_SECONDS = 1.5


async def attack(stranger: Stranger) -> None:
    tickets: dict[str, Ticket] = {}

    async def lead(channel: Channel, request: Join) -> None:
        tickets[channel.remote] = request.ticket
        await asyncio.sleep(COLLECT_SECONDS)
        same = [t for t in tickets.values() if (t.round, t.lineage) == (request.ticket.round, request.ticket.lineage)]
        half = sorted(ticket.peer for ticket in same).index(channel.remote) % 2
        shown = [ticket for index, ticket in enumerate(sorted(same, key=lambda t: t.peer)) if index % 2 == half]
        own = replace(request.ticket, peer=stranger.peer_id, nonce=stranger.random.randbytes(16))
        shown.append(own.signed(stranger.swarm, stranger.signer))
        await channel.send(Formed(tuple(sorted(shown, key=lambda ticket: ticket.peer))))

    stranger.act_alive()
    stranger.rpc.serve_channel(JOIN, Join, lead)
    await stranger.pose()
