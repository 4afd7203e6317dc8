"""What one member's streams and its state machine tell each other in the course of one attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt
from p2ptrain.averaging.pieces import Growing
from p2ptrain.averaging.reduction import OwnShare
from p2ptrain.codecs import Codec, dense_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch


class Exchange:
    """Everything that `p2ptrain.averaging.streams` and `p2ptrain.averaging.butterfly` share.

    Streams write down what came; the state machine decides, and lets the streams go on.

    Attributes:
        attempt: The roster and where to leave what is learnt.
        vector: This member's contribution, fp32, shape ``[bounds[-1]]``; not changed.
        rpc: To reach the others.
        runtime: For arithmetic.
        signer: Signs the body.
        spec: Quorum, grace, deadline, and the rule by which shares are reduced.
        part_codec: How this member's own parts are encoded.
        index: This member's place in the roster.
        share: What came for the own share.
        part_changed: Set when a part came or was refused.
        masks: By owner: whose part it holds completely.
        arrived_at: By owner: when it had this member's part, in the loop's time.
        agreed: Set when a mask came, or something that changes who can agree.
        own_mask: Once it is closed.
        own_mean: Once it begins to be made.
        own_proof: Set once this member has signed.
        certified: Set once a majority has.
        given_up: Whom this member blames, once it has given up.
        gave_up: By member that gave up: whom it blames.
        lost: By member: why the stream to it broke.
        unencodable: Why this member's own part cannot be encoded; empty while it can.
        refused: By other member: why its part was refused. The round goes on without it.
        refused_by: By owner, this member included: why this member's own part was refused.
        sent_parts: By share: the encoded parts that this member sent, kept for error feedback; under a sparse codec
            that of its own share too.
    """

    def __init__(
        self,
        attempt: Attempt,
        vector: torch.Tensor,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        spec: AveragingSpec,
        part_codec: Codec | None,
        on_part: Callable[[str, int, float], None],
    ) -> None:
        """See `p2ptrain.averaging.butterfly.Butterfly`, whose arguments these are."""
        loop = asyncio.get_running_loop()
        self.attempt = attempt
        self.vector = vector
        self.rpc = rpc
        self.runtime = runtime
        self.signer = signer
        self.spec = spec
        self.on_part = on_part
        self.part_codec = part_codec or attempt.codec
        self.index = attempt.roster.index_of(rpc.peer_id)
        low, high = attempt.bounds[self.index : self.index + 2]
        self.share = OwnShare(
            dense_codec(attempt.codec).part(low, high), spec, vector[low:high], self.index, len(attempt.roster.tickets),
            attempt.codec.part(low, high) if attempt.codec.sparse else None, attempt.lists_parts,
        )  # fmt: skip
        self.part_changed = asyncio.Event()
        self.masks: dict[int, frozenset[int]] = {}
        self.arrived_at: dict[int, float] = {}
        self.agreed = asyncio.Event()
        self.own_mask: asyncio.Future[frozenset[int]] = loop.create_future()
        self.own_mean: asyncio.Future[Growing] = loop.create_future()
        self.own_proof = asyncio.Event()
        self.certified = asyncio.Event()
        self.given_up: asyncio.Future[list[int]] = loop.create_future()
        self.gave_up: dict[int, frozenset[int]] = {}
        self.lost: dict[str, str] = {}
        self.unencodable = ""
        self.refused: dict[str, str] = {}
        self.refused_by: dict[int, str] = {}
        self.sent_parts: dict[int, bytearray] = attempt.sent_parts if attempt.lists_parts else {}

    def changed(self) -> None:
        """Let the state machine look again."""
        self.attempt.changed.set()
        self.agreed.set()

    def refuse(self, peer: str, reason: str) -> None:
        """Do without a member's part."""
        self.refused[peer] = reason
        self.part_changed.set()

    def note_gave_up(self, index: int, blamed: list[Any]) -> None:
        """Take down whom a member blames that gave up."""
        size = len(self.attempt.means)
        self.gave_up[index] = frozenset(i for i in blamed[:size] if type(i) is int and 0 <= i < size)
        self.changed()
