"""Name a member that is gone as the leader, in each answer to a probe."""

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.membership import rank
from tests.lab.stranger import Member, forever


async def attack(member: Member) -> None:
    membership = member.sync.replica.context.membership

    def gone(key: Key) -> str:
        suspects = member.sync.head.table.leading.intersection(membership.suspects())
        return min(suspects, key=lambda peer: rank(peer, key), default=member.peer_id)

    member.name_leader(gone)
    await forever()
