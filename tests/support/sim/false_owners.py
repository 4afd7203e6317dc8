"""Owners that return another mean than they should, and what they say when somebody asks."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from p2ptrain.averaging.allreduce.member import Member
from p2ptrain.averaging.allreduce.messages import Signatures
from p2ptrain.averaging.allreduce.runner import GroupResult
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.allreduce.spot_checks import SpotChecks
from p2ptrain.averaging.averager import Averager
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.protocol.certificate import Head, Roster
from p2ptrain.averaging.vector.chunks import CHUNK_VALUES, mean_root
from p2ptrain.averaging.vector.reduce import EncodedStream
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.averaging.verification.audit import Audit
from p2ptrain.averaging.verification.opening import Answer, Opening
from p2ptrain.errors import IntegrityError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import from_bytes, to_bytes

Corrupt = Callable[[AllReduceSession], None]
Answering = Callable[[Sequence[int]], Awaitable[bytes]]
"""Gives the answer to a check of these chunks."""


def corrupt_rounds(averager: Averager, corrupt: Corrupt) -> None:
    """Let ``corrupt`` change each attempt of a peer before it begins, but those in which it is alone."""
    prepare = averager._runner.prepare

    def prepare_lie(roster: Roster, head: Head, vector: Tensor, below: GroupResult | None) -> AllReduceSession:
        session = prepare(roster, head, vector, below)
        if isinstance(session.verifier, SpotChecks):
            corrupt(session)
        return session

    averager._runner.prepare = prepare_lie  # type: ignore[method-assign]


def falsify(chunks: Sequence[int] | None) -> Corrupt:
    """Change a value in some chunks of the own share's mean; in all of them for None."""

    def corrupt(session: AllReduceSession) -> None:
        share = session.share
        reduce_piece = share.reduce_piece

        def reduce_falsely(
            low: int, high: int, weights: Mapping[int, float], exact: Tensor, encoded: bytearray | memoryview
        ) -> None:
            reduce_piece(low, high, weights, exact, encoded)
            for start in range(low, high, CHUNK_VALUES):
                if chunks is None or start // CHUNK_VALUES in chunks:
                    encoded[share._codec.encoded_bytes(start) + 10] ^= 1

        share.reduce_piece = reduce_falsely  # type: ignore[method-assign]

    return corrupt


def weigh_falsely(session: AllReduceSession) -> None:
    """Double the first contributor's weight at the cost of the others'."""
    share = session.share
    weights = share.weights

    def doubled(contributors: Sequence[int], claims: Sequence[Claim]) -> dict[int, float]:
        (chosen, first), *others = weights(contributors, claims).items()
        return {chosen: 2 * first} | {index: weight * (1 - 2 * first) / (1 - first) for index, weight in others}

    share.weights = doubled  # type: ignore[method-assign]


def leave_one_out(session: AllReduceSession) -> None:
    """Give the first other contributor no weight, and say that it has some."""
    share, own = session.share, session.own.index
    weights = share.weights

    def without(contributors: Sequence[int], claims: Sequence[Claim]) -> dict[int, float]:
        return weights(contributors, claims) | {next(index for index in contributors if index != own): 0.0}

    share.weights = without  # type: ignore[method-assign]


def state_fewer(session: AllReduceSession) -> None:
    """Reduce without the first other contributor, and say so in the statement."""
    leave_one_out(session)
    audit, own = audit_of(session), session.own.index
    state = audit.state

    async def state_without(contributors: Sequence[int], mean_root: bytes) -> None:
        dropped = next(index for index in contributors if index != own)
        await state([index for index in contributors if index != dropped], mean_root)

    audit.state = state_without  # type: ignore[method-assign]


def audit_of(session: AllReduceSession) -> Audit:
    assert isinstance(session.verifier, SpotChecks)
    return session.verifier.audit


def answering(chunks: Sequence[int] | None, answer: Callable[[Sequence[int], Answering], Awaitable[bytes]]) -> Corrupt:
    """Falsify these chunks, and answer checks with ``answer(what is asked for, what would answer honestly)``."""

    def corrupt(session: AllReduceSession) -> None:
        falsify(chunks)(session)
        audit = audit_of(session)
        honest = audit.answer

        async def answered(asked: Sequence[int]) -> bytes:
            return await answer(asked, honest)

        audit.answer = answered  # type: ignore[method-assign, assignment]

    return corrupt


def with_answer(change: Callable[[bytes], bytes]) -> Corrupt:
    """Falsify all chunks, and answer checks with something else."""

    async def changed(chunks: Sequence[int], honest: Answering) -> bytes:
        return change(await honest(chunks))

    return answering(None, changed)


def forge_parts(data: bytes) -> bytes:
    """Show other parts than were sent: those of which the mean would be right, say."""
    answer, openings = from_bytes(Answer, data), []
    for opening in answer.openings:
        (part, proof), *others = opening.parts
        openings.append(Opening(opening.own, opening.own_proof, ((bytes(len(part)), proof), *others)))
    return to_bytes(Answer(answer.opened, tuple(openings)))


async def _refused(chunks: Sequence[int], honest: Answering) -> bytes:
    if 0 in chunks:
        raise IntegrityError("no")
    return await honest(chunks)


async def _silent(chunks: Sequence[int], honest: Answering) -> bytes:
    if 0 in chunks:
        await asyncio.sleep(3600)
    return await honest(chunks)


refuse = answering([0], _refused)
"""Falsify the first chunk, and refuse to show that one; all others are shown."""
fall_silent = answering([0], _silent)
"""The same, but never answer."""


def complain(session: AllReduceSession) -> None:
    """Say of the first share that is checked that its owner did not show a chunk."""
    checks = session.verifier
    assert isinstance(checks, SpotChecks)
    examine = checks._examine

    async def examined(owner: Member, chunks: Sequence[int], channel: Channel) -> bool:
        right = await examine(owner, chunks, channel)
        if not checks.faults:
            checks._find_fault(owner, chunks or [0], "nothing", late=False)
        return right

    checks._examine = examined  # type: ignore[method-assign]


def claim_signatures(session: AllReduceSession) -> None:
    """Falsify the first chunk, and say that a majority has signed the result to who asks for that one."""
    falsify([0])(session)
    checks = session.verifier
    assert isinstance(checks, SpotChecks)
    honest = checks.open_chunks

    async def claimed(channel: Channel, chunks: Sequence[int]) -> bool:
        if 0 not in chunks:
            return await honest(channel, chunks)
        await channel.send(Signatures(tuple((member.peer, b"no signature") for member in session.members)))
        return False

    checks.open_chunks = claimed  # type: ignore[method-assign]


def state_two_means(session: AllReduceSession, delay_seconds: float = 0.0) -> None:
    """Tell one member of another mean than the rest, maybe later: each is right for another part of the owner's own."""
    audit = audit_of(session)
    attempt, index, context = session.attempt, session.own.index, session.context
    victim, served = session.others[0], session.incoming
    share, twin, twin_served = copy.copy(session.share), copy.copy(session), copy.copy(served)
    vector = 0.5 * session.contribution.vector
    share.own = vector[attempt.bounds[index] : attempt.bounds[index + 1]]
    twin.own_mean = asyncio.get_running_loop().create_future()
    twin.verifier = copy.copy(session.verifier)
    twin_audit = Audit(attempt, share, context.runtime, context.signer)
    twin_audit._commitments = audit._commitments
    twin.verifier.audit = twin_audit  # type: ignore[attr-defined]
    twin_served._session = twin
    reduce, serve, give = session._reduce, served._serve_member, twin_served._give_mean

    async def give_late(*arguments: Any) -> None:
        await asyncio.sleep(delay_seconds)
        await give(*arguments)

    async def reduce_twice() -> None:
        await reduce()
        assert attempt.contributors is not None
        share.parts, share.trees = session.share.parts, dict(session.share.trees)
        share.measure_own()
        if share.norms().keys() < set(attempt.contributors):  # The session has ended meanwhile.
            raise AttemptFailedError("its parts are gone")
        codec, size = share._codec, len(share.own)
        mean = EncodedStream(bytearray(codec.encoded_bytes(size)))
        await share.reduce(context.runtime, attempt.contributors, [Claim(10)] * len(attempt.contributors), mean)
        twin.own_mean.set_result(mean)
        await twin_audit.state(attempt.contributors, mean_root(codec, mean.data, size, attempt.chunk))

    async def serve_another(channel: Channel, member: Member, *rest: Any) -> None:
        await (twin_served._serve_member if member is victim else serve)(channel, member, *rest)

    twin_served._give_mean = give_late  # type: ignore[method-assign, assignment]
    session._reduce = reduce_twice  # type: ignore[method-assign]
    served._serve_member = serve_another  # type: ignore[method-assign, assignment]


def understate_own_norm(session: AllReduceSession) -> None:
    """Let the own part count in full though it is a hundred times as long as it says."""
    share = session.share
    measure = share.measure_own

    def measure_falsely() -> None:
        measure()
        share.own = share.own * 100  # Only here: what is sent to others is not changed.

    share.measure_own = measure_falsely  # type: ignore[method-assign]
    assert torch.isfinite(share.own).all()
