"""Spot checks of one attempt: commitments and openings of each member, and its checks before it signs.

The members together check ``averaging.spot_checks`` random chunks of every share, drawn after its owner has stated the
mean. If a fraction ``f`` of a share's chunks is false and the honest members draw ``k`` chunks, they catch the owner
with probability ``1 - (1 - f)**k`` per round. A checked chunk has one of three outcomes:

==================  ====================================================================================================
right               the member sends `Clear`, and signs once the others' checks passed or timed out
false               the member has evidence (`p2ptrain.averaging.verification.opening`): the attempt fails, and the
                    owner is excluded for good
not shown           the member does not sign, and complains about the chunk; the others check this chunk before they
                    sign. An owner thus cannot avoid checks by silence towards some members
==================  ====================================================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.vector.chunks import NODE, PartCheck, SumTree, chunk_values, leaf_hash
from p2ptrain.averaging.vector.reduce import OwnShare
from p2ptrain.averaging.vector.rules import MIN_FOR_MEDIAN
from p2ptrain.averaging.verification.opening import (
    MAX_CHUNKS,
    MAX_STATEMENT_BYTES,
    TWO_MEANS,
    Answer,
    ChunkKey,
    Commitment,
    FalseChunk,
    Opened,
    Opening,
    Rules,
    Slice,
    Statement,
    TwoMeans,
    digest_of,
    judge,
    keys_message,
)
from p2ptrain.codecs import Codec
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import from_bytes, to_bytes
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

OVERHEAD_BYTES = 4096  # bound on the signature, names and framing of one contributor in an answer


class FalseMeanError(IntegrityError):
    """The owner with this index signed a mean that does not follow from the parts; ``evidence`` convinces any peer."""

    def __init__(self, owner: int, message: str, evidence: bytes) -> None:
        super().__init__(message)
        self.owner = owner
        self.evidence = evidence


class Audit:
    """One member's side of the spot checks in one attempt, as owner (`statement` is its own) and as checker."""

    def __init__(self, attempt: Attempt, share: OwnShare, runtime: Runtime, signer: Signer) -> None:
        """``share`` is this member's as an owner."""
        self._attempt = attempt
        self._share = share
        self._index = attempt.roster.index_of(signer.peer_id)
        self._runtime = runtime
        self._signer = signer
        self._rules = Rules(attempt.swarm, attempt.spec, attempt.codec, attempt.bounds[-1])
        self._commitments: dict[int, Commitment] = {}
        self._mean_trees: dict[int, SumTree] = {}
        self._stated: list[Commitment] = []
        self._heard: dict[int, Statement] = {}
        self._readable = True
        self.statement: asyncio.Future[Statement] = asyncio.get_running_loop().create_future()

    # --- as a contributor -----------------------------------------------------------------------------------------

    def new_check(self, codec: Codec) -> PartCheck:
        """Return the check that prepares the commitment to a part while it is encoded in ``codec``."""
        measured = len(self._attempt.roster.tickets) >= MIN_FOR_MEDIAN
        return PartCheck(codec, self._rules.spec, self._chunk, measured=measured, hashed=True)

    async def commit(self, owner: int, codec: str, check: PartCheck) -> Commitment:

        def sign() -> Commitment:
            root = SumTree(check.leaves).root
            claim = self._attempt.claims([self._index])[0]
            commitment = Commitment(self._slice(owner), self._signer.peer_id, codec, *claim, root)
            return commitment.signed(self._attempt.swarm, self._signer)

        return await self._runtime.offload(sign)

    # --- as an owner ----------------------------------------------------------------------------------------------

    async def admit(self, sender: int, codec: str, check: PartCheck, said: Commitment) -> SumTree:
        """Keep the commitment to a checked part, and return the part's tree; raise `IntegrityError` if it differs."""

        def verify() -> SumTree:
            tree, peer = SumTree(check.leaves), self._attempt.roster.members[sender]
            claim = self._attempt.claims([sender])[0]
            expected = Commitment(self._slice(self._index), peer, codec, *claim, tree.root, proof=said.proof)
            if said != expected:
                raise IntegrityError("commits to another part than it sent")
            said.verify(self._attempt.swarm, self._signer)
            self._commitments[sender] = said
            return tree

        return await self._runtime.offload(verify)

    async def state(self, contributors: Sequence[int], mean_root: bytes) -> None:
        """Sign that the own share's mean has this root; `answer` waits for this."""

        def sign() -> Statement:
            root, claim = self._share.trees[self._index].root, self._attempt.claims([self._index])[0]
            self._commitments[self._index] = Commitment(
                self._slice(self._index), self._signer.peer_id, "", *claim, root
            )
            self._stated = [self._commitments[index] for index in contributors]
            statement = Statement(self._slice(self._index), mean_root, digest_of(self._stated))
            return statement.signed(self._attempt.swarm, self._signer)

        statement = await self._runtime.offload(sign)
        if not self.statement.done():
            self.statement.set_result(statement)

    async def answer(self, chunks: Sequence[int]) -> bytes:
        """Return the signed openings of chunks of the own share; raise `IntegrityError` if that is impossible."""
        if max(chunks) >= self._attempt.num_chunks(self._index):
            raise IntegrityError("asks for chunks that are not there")
        async with asyncio.timeout(self._rules.spec.round_seconds):
            statement = await asyncio.shield(self.statement)
        if not self._readable or not self._share.parts.keys() >= self._needed():
            raise IntegrityError("this attempt is over here")
        # It reads the contribution on the state thread, which refills that for the next round after this call.
        return await self._runtime.compute(self._open, statement, chunks)

    def _needed(self) -> set[int]:
        return {self._attempt.roster.index_of(each.sender) for each in self._stated} - {self._index}

    def _open(self, statement: Statement, chunks: Sequence[int]) -> bytes:
        openings: list[Opening] = []
        keys: list[ChunkKey] = []
        share = statement.share
        for chunk in chunks:
            low, high = self._rules.span(share.low, share.high, chunk)
            own, own_proof, others = b"", b"", []
            for each in self._stated:
                index = self._attempt.roster.index_of(each.sender)
                proof = self._share.trees[index].proof(chunk)
                if index == self._index:
                    own, own_proof = self._share.own[low:high].numpy().tobytes(), proof
                else:
                    codec, part = self._share.parts[index]
                    others.append((bytes(part[codec.encoded_bytes(low) : codec.encoded_bytes(high)]), proof))
            openings.append(Opening(own, own_proof, tuple(others)))
            keys.append((chunk, leaf_hash(own)))
        proof = self._signer.sign(keys_message(self._attempt.swarm, statement, keys))
        return to_bytes(Answer(Opened(statement, tuple(self._stated), tuple(keys), proof), tuple(openings)))

    def stop_reading(self) -> None:
        """Open no more chunks: the contribution may change from now on."""
        self._readable = False

    # --- as a checker ---------------------------------------------------------------------------------------------

    def draw(self, owner: int, checkers: int) -> list[int]:
        """Return random chunks of an owner's share for this member to check; no other member can predict them.

        ``checkers`` is the number of members that check this share in time, this one included.
        """
        count = self._attempt.num_chunks(owner)
        each, rest = divmod(self._rules.spec.spot_checks, checkers)
        random = self._runtime.random
        return random.sample(range(count), min(each + (random.random() * checkers < rest), count, MAX_CHUNKS))

    def max_answer_bytes(self, owner: int, num_chunks: int) -> int:
        contributors, count = len(self._attempt.roster.tickets), self._attempt.num_chunks(owner)
        largest = 4 * min(self._chunk, self._attempt.size(owner)) + NODE.size * count.bit_length() + 64
        return OVERHEAD_BYTES * (contributors + 1) + num_chunks * contributors * largest

    def hear(self, owner: int, said: Statement, tree: SumTree) -> None:
        """Keep an owner's statement about the mean with this tree; raise `IntegrityError` if it is about another."""
        said.verify(self._attempt.swarm, self._signer)
        if said.share != self._slice(owner) or said.root != tree.root[0]:
            raise IntegrityError("speaks of another mean than it sent")
        self._mean_trees[owner] = tree
        self._heard[owner] = said

    @property
    def most_chunks(self) -> int:
        """Maximum number of chunks that a member may draw of one share."""
        return min(self._rules.spec.spot_checks, MAX_CHUNKS)

    @property
    def max_statements_bytes(self) -> int:
        return len(self._attempt.roster.tickets) * MAX_STATEMENT_BYTES

    def heard_statements(self) -> tuple[Statement, ...]:
        return tuple(self._heard.values())

    def compare(self, others: Sequence[Statement]) -> None:
        """Compare the statements that another member received with this member's.

        Raises:
            FalseMeanError: An owner stated two means of one share.
            IntegrityError: A signature is invalid.
        """
        heard = {each.share: each for each in self._heard.values()}
        for said in others:
            said.verify(self._attempt.swarm, self._signer)
            if said.share in heard and heard[said.share].differs(said):
                owner = self._attempt.roster.index_of(said.author)
                raise FalseMeanError(owner, TWO_MEANS, to_bytes(TwoMeans(heard[said.share], said)))

    async def check(self, owner: int, chunks: Sequence[int], answer: bytes | bytearray | memoryview) -> None:
        """Check an owner's answer.

        Raises:
            FalseMeanError: A chunk of the mean is false.
            IntegrityError: The answer does not match the question.
        """
        await self._runtime.offload(self._check, owner, chunks, answer)

    def _check(self, owner: int, chunks: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        attempt, mean = self._attempt, self._attempt.means[owner]
        answer = from_bytes(Answer, data)
        opened, openings = answer.opened, answer.openings
        opened.verify(self._rules, self._signer)
        tree = self._mean_trees[owner]
        if opened.statement.share != self._slice(owner) or opened.statement.root != tree.root[0]:
            raise IntegrityError("opens another mean than it sent")
        if [chunk for chunk, _ in opened.keys] != list(chunks):
            raise IntegrityError("opens other chunks than were asked for")
        assert attempt.contributors is not None
        assert mean is not None
        senders = [attempt.roster.members[index] for index in attempt.contributors]
        agreed = [(peer, *claim) for peer, claim in zip(senders, attempt.claims(attempt.contributors), strict=True)]
        if [(each.sender, each.tokens, each.trust) for each in opened.commitments] != agreed:
            raise IntegrityError("made its mean of other contributions than was agreed")
        codec = attempt.mean_codec_of(owner)
        for position, chunk in enumerate(chunks):
            low, high = self._rules.span(attempt.bounds[owner], attempt.bounds[owner + 1], chunk)
            piece = bytes(memoryview(mean)[codec.encoded_bytes(low) : codec.encoded_bytes(high)])
            fault = judge(opened, position, openings[position], piece, self._rules)
            if fault:
                evidence = FalseChunk(opened, position, openings[position], piece, tree.proof(chunk))
                raise FalseMeanError(owner, fault, to_bytes(evidence))

    # --- helpers --------------------------------------------------------------------------------------------------

    @property
    def _chunk(self) -> int:
        return chunk_values(self._rules.codec)

    def _slice(self, owner: int) -> Slice:
        roster, bounds = self._attempt.roster, self._attempt.bounds
        first = roster.tickets[0]
        low, high = bounds[owner], bounds[owner + 1]
        return Slice(first.round, first.level, roster.group_id, roster.members[owner], low, high)
