"""One owner's share in memory: parts, commitments, a statement and openings, honest or not."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.protocol.certificate import Roster, Ticket, genesis
from p2ptrain.averaging.vector.chunks import SumTree, chunk_values, mean_tree
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.averaging.verification.audit import Audit
from p2ptrain.averaging.verification.opening import Rules
from p2ptrain.codecs import Codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
HEAD = genesis(SWARM, b"d" * 32)
VERIFIER = NamedSigner("anybody")


def claims(*tokens: int) -> list[Claim]:
    """Of contributors with full trust."""
    return [Claim(count) for count in tokens]


@dataclass
class Group:
    """Members of one roster of which each owns an equal share; nothing is sent, all is computed here.

    ``part_codecs`` says how a member's parts travel, where not as the mean does.
    """

    spec: AveragingSpec
    codec: Codec
    vectors: Sequence[Tensor]
    part_codecs: dict[int, Codec] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        names = [f"member{index}" for index in range(len(self.vectors))]
        tokens = self.tokens or [10] * len(names)
        tickets = [
            Ticket(name, 0, HEAD.lineage, HEAD.digest, b"y" * 32, count, 1, 0, True, b"", b"n" * 16)
            for name, count in zip(names, tokens, strict=True)
        ]
        self.names, self.roster = names, Roster(tuple(tickets))
        size = len(self.vectors[0])
        block = self.codec.block_size
        cuts = [round(size * i / len(names)) // block * block for i in range(len(names))]
        self.bounds = (*cuts, size)
        self.rules = Rules(SWARM, self.spec, self.codec, size)

    def audit(self, index: int) -> tuple[Audit, OwnShare]:
        """A member's side; for a running loop."""
        attempt = Attempt(self.roster, HEAD, self.bounds, self.codec, SWARM, self.spec)
        attempt.contributors = tuple(range(len(self.names)))
        low, high = self.bounds[index : index + 2]
        share = OwnShare(
            self.codec.part(low, high), self.spec, self.vectors[index][low:high], index, len(self.names),
            chunk=chunk_values(self.codec), audited=True,
        )  # fmt: skip
        share.measure_own()
        runtime, signer = Runtime(random.Random(self.seed + index)), NamedSigner(self.names[index])
        return Audit(attempt, share, runtime, signer), share

    async def reduced(self, owner: int) -> tuple[Audit, OwnShare, bytearray]:
        """An owner that has everybody's part and commitment, and its mean, which it did not state yet."""
        audit, share = self.audit(owner)
        low, high = self.bounds[owner : owner + 2]
        for index in range(len(self.names)):
            if index == owner:
                continue
            whole = self.part_codecs.get(index, self.codec)
            codec = whole.part(low, high)
            sender, _ = self.audit(index)
            part = codec.encode(self.vectors[index][low:high])
            sent, came = sender.new_check(codec), share.new_check(codec)
            for check in (sent, came):
                check(memoryview(part), 0, high - low)
            tree = await audit.admit(index, whole.name, came, await sender.commit(owner, whole.name, sent))
            share.add(index, part, came, tree)
        data = bytearray(share._codec.encoded_bytes(high - low))
        given = claims(*(ticket.tokens for ticket in self.roster.tickets))
        await share.reduce(audit._runtime, range(len(self.names)), given, EncodedStream(data))
        return audit, share, data

    def tree(self, owner: int, mean: bytearray) -> SumTree:
        low, high = self.bounds[owner : owner + 2]
        return mean_tree(self.codec.part(low, high), mean, high - low, chunk_values(self.codec))

    async def check(self, owner: int, audit: Audit, mean: bytearray, chunks: list[int], checker: int = 0) -> None:
        """The owner states ``mean``; another member has chunks of it opened and checks them."""
        tree = self.tree(owner, mean)
        await audit.state(range(len(self.names)), tree.root[0])
        other, _ = self.audit(checker)
        other._attempt.means[owner] = mean
        other.hear(owner, await audit.statement, tree)
        await other.check(owner, chunks, await audit.answer(chunks))


def run_check(group: Group, owner: int, falsify: Callable[[OwnShare, bytearray], None], chunks: list[int]) -> None:
    """Let an owner reduce, change what it has, state it, and be checked; raises what the check raises."""

    async def main() -> None:
        audit, share, mean = await group.reduced(owner)
        falsify(share, mean)
        await group.check(owner, audit, mean, chunks, checker=(owner + 1) % len(group.names))

    asyncio.run(main())


def vectors(count: int, size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(count)]
