"""Take part in each round, and sign no result."""

from tests.lab.stranger import Member, forever


async def attack(member: Member) -> None:
    member.vote_for(lambda body: False)
    await forever()
