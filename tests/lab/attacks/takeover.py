"""Take the swarm over: a certificate that only strangers sign, with a state of zeros that belongs to it.

It counts more tokens than the swarm's lineage, and is offered for download or for replay.
"""

import asyncio

import torch

from tests.lab.stranger import Stranger

MOVE_ON_SECONDS = 4.0
"""How often a certificate for replay follows the swarm's head."""


async def attack(
    stranger: Stranger, tokens_before: int = 1 << 60, tokens: int = 10**9, signers: int = 1, replay: bool = False
) -> None:
    state, keys = stranger.new_state(), [stranger.signer, *(stranger.new_signer() for _ in range(signers - 1))]
    with torch.no_grad():
        state.vector.zero_()
    while True:
        parent = await stranger.head()
        result = stranger.forge(parent, state, tokens, None if replay else tokens_before, keys)
        stranger.go_on(state, parent, result)
        stranger.offer(state, *([(result, parent)] if replay else []))
        await stranger.pretend(state.head)
        await asyncio.sleep(MOVE_ON_SECONDS)
