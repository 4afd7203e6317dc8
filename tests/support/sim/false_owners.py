"""Owners that return another mean than they should, and what they say when somebody asks."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from p2ptrain.averaging.allreduce.session import Butterfly
from p2ptrain.averaging.averager import Averager
from p2ptrain.averaging.commit.provenance import Origin
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.vector.reduce import CHUNK_VALUES, chunk_values, mean_tree
from p2ptrain.averaging.vector.streaming import Growing
from p2ptrain.averaging.verification.audit import Audit
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.network.rpc.channel import Channel

Corrupt = Callable[[Butterfly], None]


def corrupt_rounds(averager: Averager, corrupt: Corrupt) -> None:
    """Let ``corrupt`` change each attempt of a peer before it begins."""
    prepare = averager._attempts.prepare

    def prepare_lie(roster: Roster, head: Head, vector: Tensor, origin: Origin | None) -> Butterfly:
        butterfly = prepare(roster, head, vector, origin)
        corrupt(butterfly)
        return butterfly

    averager._attempts.prepare = prepare_lie  # type: ignore[method-assign]


def falsify(chunks: Sequence[int] | None) -> Corrupt:
    """Change a value in some chunks of the own share's mean; in all of them for None."""

    def corrupt(butterfly: Butterfly) -> None:
        share = butterfly.exchange.share
        reduce_piece = share.reduce_piece

        def reduce_falsely(
            low: int, high: int, contributors: Sequence[int], weights: list[float], exact: Tensor,
            encoded: bytearray | memoryview,
        ) -> None:  # fmt: skip
            reduce_piece(low, high, contributors, weights, exact, encoded)
            for start in range(low, high, CHUNK_VALUES):
                if chunks is None or start // CHUNK_VALUES in chunks:
                    encoded[share._codec.encoded_bytes(start) + 10] ^= 1

        share.reduce_piece = reduce_falsely  # type: ignore[method-assign]

    return corrupt


def weigh_falsely(butterfly: Butterfly) -> None:
    """Double the first contributor's weight at the cost of the others'."""
    share = butterfly.exchange.share
    weights = share.weights

    def doubled(contributors: Sequence[int], tokens: Sequence[int]) -> list[float]:
        first, *others = weights(contributors, tokens)
        return [2 * first, *(weight * (1 - 2 * first) / (1 - first) for weight in others)]

    share.weights = doubled  # type: ignore[method-assign]


def leave_one_out(butterfly: Butterfly) -> None:
    """Give the first other contributor no weight, and say that it has some."""
    share, own = butterfly.exchange.share, butterfly.exchange.index
    weights = share.weights

    def without(contributors: Sequence[int], tokens: Sequence[int]) -> list[float]:
        dropped = next(at for at, index in enumerate(contributors) if index != own)
        return [0.0 if at == dropped else weight for at, weight in enumerate(weights(contributors, tokens))]

    share.weights = without  # type: ignore[method-assign]


def state_fewer(butterfly: Butterfly) -> None:
    """Reduce without the first other contributor, and say so in the statement."""
    leave_one_out(butterfly)
    audit, own = butterfly.exchange.audit, butterfly.exchange.index
    if audit is None:  # Alone, there is nobody to lie to.
        return
    state = audit.state

    async def state_without(contributors: Sequence[int], tree: Any) -> None:
        dropped = next(index for index in contributors if index != own)
        await state([index for index in contributors if index != dropped], tree)

    audit.state = state_without  # type: ignore[method-assign]


def with_answer(answer: Callable[[bytes], bytes]) -> Corrupt:
    """Falsify all chunks, and answer checks with something else."""

    def corrupt(butterfly: Butterfly) -> None:
        falsify(None)(butterfly)
        audit = butterfly.exchange.audit
        if audit is None:  # Alone, there is nobody to lie to.
            return
        honest = audit.answer

        async def answered(chunks: Any) -> bytes:
            return answer(await honest(chunks))

        audit.answer = answered  # type: ignore[method-assign]

    return corrupt


def forge_parts(answer: bytes) -> bytes:
    """Show other parts than were sent: those of which the mean would be right, say."""
    statement, commitments, keys, proof, openings = msgpack.unpackb(answer)
    for opening in openings:
        opening[2][0][0] = bytes(len(opening[2][0][0]))
    return canonical_bytes([statement, commitments, keys, proof, openings])


def refuse(butterfly: Butterfly) -> None:
    """Falsify the first chunk, and refuse to show that one; all others are shown."""
    falsify([0])(butterfly)
    audit = butterfly.exchange.audit
    if audit is None:  # Alone, there is nobody to lie to.
        return
    honest = audit.answer

    async def refused(chunks: Any) -> bytes:
        if 0 in chunks:
            raise IntegrityError("no")
        return await honest(chunks)

    audit.answer = refused  # type: ignore[method-assign]


def fall_silent(butterfly: Butterfly) -> None:
    """As `refuse`, but by never answering."""
    falsify([0])(butterfly)
    audit = butterfly.exchange.audit
    if audit is None:  # Alone, there is nobody to lie to.
        return
    honest = audit.answer

    async def silent(chunks: Any) -> bytes:
        if 0 in chunks:
            await asyncio.sleep(3600)
        return await honest(chunks)

    audit.answer = silent  # type: ignore[method-assign]


def complain(butterfly: Butterfly) -> None:
    """Say of the first share that is checked that its owner did not show a chunk."""
    exchange = butterfly.exchange
    examine = exchange.examine

    async def examined(owner: int, chunks: list[int], channel: Channel) -> bool:
        right = await examine(owner, chunks, channel)
        if not exchange.faults:
            exchange.find_fault(owner, chunks or [0], "nothing", late=False)
        return right

    exchange.examine = examined  # type: ignore[method-assign]


def claim_signatures(butterfly: Butterfly) -> None:
    """Falsify the first chunk, and say that a majority has signed the result to who asks for that one."""
    falsify([0])(butterfly)
    served = butterfly._served
    honest = served._open_chunks

    async def claimed(channel: Channel, chunks: Any) -> bool:
        if 0 not in chunks:
            return await honest(channel, chunks)
        await channel.send({"proofs": [[peer, b"no signature"] for peer in butterfly.attempt.roster.members]})
        return False

    served._open_chunks = claimed  # type: ignore[method-assign]


def state_two_means(butterfly: Butterfly, delay_seconds: float = 0.0) -> None:
    """Tell one member of another mean than the rest, maybe later: each is right for another part of the owner's own."""
    exchange, served = butterfly.exchange, butterfly._served
    if exchange.audit is None:  # Alone, there is nobody to lie to.
        return
    attempt, index = exchange.attempt, exchange.index
    victim = next(i for i in range(len(attempt.roster.tickets)) if i != index)
    share, twin, twin_served = copy.copy(exchange.share), copy.copy(exchange), copy.copy(served)
    vector = 0.5 * exchange.vector
    share._own = vector[attempt.bounds[index] : attempt.bounds[index + 1]]
    twin.own_mean = asyncio.get_running_loop().create_future()
    twin.audit = Audit(attempt, share, index, exchange.runtime, exchange.signer, exchange.spec, vector)
    twin.audit._commitments = exchange.audit._commitments
    twin_served._exchange = twin
    reduce, serve, give = butterfly._reduce_own_share, served._serve_member, twin_served._give_mean

    async def give_late(*arguments: Any) -> None:
        await asyncio.sleep(delay_seconds)
        await give(*arguments)

    async def reduce_twice() -> None:
        await reduce()
        assert attempt.contributors is not None
        assert twin.audit is not None
        share.parts, share.trees = exchange.share.parts, dict(exchange.share.trees)
        share.measure_own()
        codec, size = share._codec, len(share._own)
        mean = Growing(bytearray(codec.encoded_bytes(size)))
        await share.reduce(exchange.runtime, attempt.contributors, [10] * len(attempt.contributors), mean)
        twin.own_mean.set_result(mean)
        await twin.audit.state(attempt.contributors, mean_tree(codec, mean.data, size, chunk_values(codec)))

    async def serve_another(channel: Channel, sender: int, *rest: Any) -> None:
        await (twin_served._serve_member if sender == victim else serve)(channel, sender, *rest)

    twin_served._give_mean = give_late  # type: ignore[method-assign, assignment]
    butterfly._reduce_own_share = reduce_twice  # type: ignore[method-assign]
    served._serve_member = serve_another  # type: ignore[method-assign, assignment]


def understate_own_norm(butterfly: Butterfly) -> None:
    """Let the own part count in full though it is a hundred times as long as it says."""
    share = butterfly.exchange.share
    measure = share.measure_own

    def measure_falsely() -> None:
        measure()
        share._own = share._own * 100  # Only here: what is sent to others is not changed.
        audit = butterfly.exchange.audit
        assert audit is not None
        audit._own = share._own

    share.measure_own = measure_falsely  # type: ignore[method-assign]
    assert torch.isfinite(share._own).all()
