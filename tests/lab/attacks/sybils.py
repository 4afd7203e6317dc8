"""Vote the swarm over: Sybils, as many as a round needs, sign a certificate of their own roster."""

from tests.lab.stranger import Stranger, load_attack


async def attack(stranger: Stranger, voters: int = 8, replay: bool = False) -> None:
    await load_attack("takeover")(stranger, signers=voters, replay=replay)
