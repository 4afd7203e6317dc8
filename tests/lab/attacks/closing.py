"""Tell everybody that the round closes, as soon as it has begun."""

from tests.lab.stranger import Stranger, load_attack


async def attack(stranger: Stranger) -> None:
    await load_attack("probing")(stranger, closing=True, every_seconds=0.25)
