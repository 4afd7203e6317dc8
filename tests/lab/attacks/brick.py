"""Brick the swarm: a lineage with so many tokens that no later head fits into its range."""

from tests.lab.stranger import Stranger, load_attack


async def attack(stranger: Stranger) -> None:
    await load_attack("takeover")(stranger, tokens_before=(1 << 62) - 2, tokens=1)
