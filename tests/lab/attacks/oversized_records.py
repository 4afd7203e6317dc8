"""Fill the directory with records that are far too long, each with a key of its own."""

import asyncio

from p2ptrain.network.records.record import peers_key, seal_record, shard_of
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, count: int = 1250, record_bytes: int = 15_000) -> None:
    keys, sequence = [stranger.new_signer() for _ in range(count)], 0
    while True:
        sequence += 1
        for key in keys:
            expires_at = stranger.runtime.now() + 300.0
            sealed = seal_record(stranger.swarm, {}, sequence, expires_at, key).ljust(record_bytes)
            shard = peers_key(stranger.swarm, shard_of(key.peer_id))
            await stranger.directory.publish(shard, key.peer_id, sealed, expires_at, 5.0)
        await asyncio.sleep(60.0)
