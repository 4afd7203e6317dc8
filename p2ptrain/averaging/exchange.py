"""What one member's streams and its state machine tell each other in the course of one attempt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt
from p2ptrain.averaging.audit import Audit, FalseMeanError
from p2ptrain.averaging.certificate import Certificate
from p2ptrain.averaging.openings import MAX_CHUNKS
from p2ptrain.averaging.origins import Origin
from p2ptrain.averaging.patience import patience_seconds
from p2ptrain.averaging.pieces import Growing
from p2ptrain.averaging.reduction import OwnShare, chunk_values
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, dense_codec
from p2ptrain.errors import DeadlineError, IntegrityError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.frames import Message
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

FORWARD_SECONDS = 0.5
"""How long signatures and certificates may take to get about before somebody does without them."""
GAVE_UP = "gave up"
"""What a member is refused with that has half of a mean from one that gave up, or comes when that one has gone."""
ANSWER_SHARE = 0.75
"""How much of what the late are usually waited for an owner may take to answer a check; less than
`p2ptrain.averaging.vouching.CLEAR_SHARE`, so that a complaint is there before the others sign."""


class Exchange:
    """Everything that the streams of an attempt and `p2ptrain.averaging.butterfly` share.

    Streams write down what came; the state machine decides, and lets the streams go on.

    Attributes:
        attempt: The roster and where to leave what is learnt.
        vector: This member's contribution, fp32, shape ``[bounds[-1]]``; not changed.
        rpc: To reach the others.
        runtime: For arithmetic.
        signer: Signs the body.
        spec: Quorum, grace, deadline, and the rule by which shares are reduced.
        part_codec: How this member's own parts are encoded.
        origin: What they come from, above level 0.
        began: When the attempt did, in the loop's time.
        index: This member's place among the roster's owners; an auxiliary's is behind the members'.
        lends: Whether it is an auxiliary: all but its own share, and what comes for it, is then left unused.
        share: What came for the own share.
        part_changed: Set when a part came or was refused.
        masks: By owner: whose part it holds completely.
        arrived_at: By owner: when it had this member's part, in the loop's time.
        agreed: Set when a mask came, or something that changes who can agree.
        told: By member: who contributed, as an auxiliary hears it.
        result: The round's certificate, once an auxiliary was told.
        own_mask: Once it is closed.
        own_mean: Once it begins to be made.
        own_proof: Set once this member has signed.
        certified: Set once a majority has.
        given_up: Whom this member blames, once it has given up.
        gave_up: By member that gave up: whom it blames.
        lost: By member: why the stream to it broke.
        served: By member: the stream that it opened.
        opening: Members to which no stream stands yet, or ever did.
        silent: Members whose stream stood and said nothing for long.
        cut_short: Those that ended the stream while this member's part was still on its way: perhaps it took too long.
        unencodable: Why this member's own part cannot be encoded; empty while it can.
        broken: Which background task of this member failed, and how; empty while none did.
        tasks: The background tasks of this attempt; a failure ends the attempt.
        refused: By other member: why its part was refused. The round goes on without it.
        contradicts: By member that signed another result, where nobody else owns a share: what it did.
        refused_by: By owner, this member included: why this member's own part was refused.
        sent_parts: By share: the encoded parts that this member sent, kept for error feedback; under a sparse codec
            that of its own share too.
        audit: The spot checks; None when the manifest switches them off, or nobody else is there.
        agreed_on: Set once the contributors are.
        checked: Owners whose share passed this member's checks.
        faults: By owner that did not pass them: what it did, and whether it was only late.
        evidence: Of a false mean, once this member has found one.
        on_evidence: Called with it, even when the round is over.
        own_complaints: Chunks that owners did not show to this member: (owner, chunk).
        complaints: The same from others, which this member has yet to look into.
        outvoted: Owners that just passed signatures on in place of chunks that this member asked for.
        unshown: By such an owner: which, once it is clear that nobody told it and this member of different means.
        own_clear: Set once this member's checks are through.
        cleared: Members that say so of theirs.
        slow_to_clear: Peers that took too long in an earlier round, and are not waited for; outlives the attempt.
        accused: By member that others proved guilty of a false mean: what it did.
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
        origin: Origin | None = None,
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
        self.began = loop.time()
        self.part_codec = part_codec or attempt.codec
        self.origin = origin
        self.index = attempt.roster.index_of(rpc.peer_id)
        low, high = attempt.bounds[self.index : self.index + 2]
        # Sparse parts are few enough that all members see all of them, and hold them against what they sent.
        attempt.audited = spec.spot_checks > 0 and len(attempt.roster.tickets) > 1 and not attempt.codec.sparse
        self.lends = not attempt.roster.has_member(self.index)
        self.share = OwnShare(
            dense_codec(attempt.codec).part(low, high), spec, vector[low:high], self.index, len(attempt.roster.tickets),
            attempt.codec.part(low, high) if attempt.codec.sparse else None, attempt.lists_parts,
            chunk=chunk_values(attempt.codec), audited=attempt.audited,
        )  # fmt: skip
        self.part_changed = asyncio.Event()
        self.masks: dict[int, frozenset[int]] = {}
        self.arrived_at: dict[int, float] = {}
        self.agreed = asyncio.Event()
        self.told: dict[int, tuple[int, ...]] = {}
        self.result: Certificate | None = None
        self.own_mask: asyncio.Future[frozenset[int]] = loop.create_future()
        self.own_mean: asyncio.Future[Growing] = loop.create_future()
        self.own_proof = asyncio.Event()
        self.certified = asyncio.Event()
        self.given_up: asyncio.Future[list[int]] = loop.create_future()
        self.gave_up: dict[int, frozenset[int]] = {}
        self.lost: dict[str, str] = {}
        self.served: dict[str, Channel] = {}
        self.opening: set[str] = set()
        self.silent: set[str] = set()
        self.cut_short: set[str] = set()
        self.unencodable = ""
        self.broken = ""
        self.tasks = Tasks(self.fail)
        self.refused: dict[str, str] = {}
        self.contradicts: dict[str, str] = {}
        self.refused_by: dict[int, str] = {}
        self.sent_parts: dict[int, Buffer] = attempt.sent_parts if attempt.lists_parts else {}
        self.audit = Audit(attempt, self.share, self.index, runtime, signer, spec, vector) if attempt.audited else None
        self.agreed_on = asyncio.Event()
        self.checked: set[int] = set()
        self.faults: dict[int, tuple[str, bool]] = {}
        self.evidence = b""
        self.own_complaints: list[tuple[int, int]] = []
        self.complaints: list[tuple[int, int]] = []
        self.outvoted: set[int] = set()
        self.unshown: dict[int, list[int]] = {}
        self.on_evidence: Callable[[bytes], None] = lambda evidence: None
        self.own_clear = asyncio.Event()
        self.cleared: set[int] = set()
        self.slow_to_clear: set[str] = set()
        self.accused: dict[str, str] = {}
        self._passed_on: list[tuple[str, Any]] = []

    def changed(self) -> None:
        """Let the state machine look again."""
        self.attempt.changed.set()
        self.agreed.set()

    def fail(self, error: Exception) -> None:
        """End the attempt: a background task of this member failed."""
        self.broken = f"a part of this peer failed ({error!r}): see the log"
        self.changed()

    def note_silent(self, peer: str) -> None:
        """Wait for nothing more from a member whose stream stands and says nothing."""
        self.silent.add(peer)
        self.part_changed.set()

    def refuse(self, peer: str, reason: str) -> None:
        """Do without a member's part."""
        self.refused[peer] = reason
        self.part_changed.set()

    def hear_contributors(self, peer: str, sender: int, contributors: Any) -> None:
        """As an auxiliary: take down whom a member counts; what most say is so, because most sign the result.

        Raises:
            ProtocolError: It counts somebody whose part this owner has not.
        """
        mask = self.own_mask.result()
        if not isinstance(contributors, list) or not all(type(i) is int and i in mask for i in contributors):
            raise ProtocolError(peer, "counts contributions that are not here")
        self.told[sender] = tuple(sorted(set(contributors)))
        self.agreed.set()

    def agreed_contributors(self) -> tuple[int, ...]:
        """As an auxiliary: whom a majority of the members counts; nobody as long as there is none."""
        said = Counter(self.told.values()).most_common(1)
        return said[0][0] if said and said[0][1] >= self.attempt.roster.majority else ()

    def hear_result(self, raw: Any) -> None:
        """As an auxiliary: take down the certificate of this attempt.

        Raises:
            IntegrityError: It is none.
        """
        certificate = Certificate.from_bytes(raw if type(raw) is bytes else b"", self.attempt.swarm, self.signer)
        if certificate.body.group_id != self.attempt.roster.group_id:
            raise IntegrityError("a certificate is of another group")
        self.result = certificate
        self.changed()

    @property
    def clears(self) -> bool:
        """Whether members wait for each other's checks; of two, both have to sign anyway."""
        return self.audit is not None and len(self.attempt.roster.tickets) > 2

    def excused(self) -> set[int]:
        """Members whose checks are not waited for: lost, too late the last time, or too slow to own a share."""
        attempt, excused = self.attempt, self.lost.keys() | self.slow_to_clear
        return {
            index
            for index, ticket in enumerate(attempt.roster.tickets)
            if ticket.peer in excused or (ticket.reachable and not attempt.size(index))
        }

    def checkers_of(self, owner: int) -> int:
        """How many members can check an owner's share in time, this one included."""
        excused = self.excused()
        members = range(len(self.attempt.roster.tickets))
        return sum(i == self.index or (i != owner and i not in excused) for i in members)

    @property
    def max_complaints(self) -> int:
        """Chunks that one member may ask the others to look at: those that it draws of one share at the most."""
        return min(self.spec.spot_checks, MAX_CHUNKS)

    def note_gave_up(self, index: int, blamed: list[Any], complaints: Any = None) -> None:
        """Take down whom a member blames that gave up, and what it could not check."""
        size = len(self.attempt.means)
        if isinstance(complaints, list) and index not in self.gave_up:
            self.complaints += [(e[0], e[1]) for e in complaints[: self.max_complaints] if self._is_complaint(e)]
            self.attempt.disputed |= bool(complaints)
        self.gave_up[index] = frozenset(i for i in blamed[:size] if type(i) is int and 0 <= i < size)
        self.changed()

    def _is_complaint(self, entry: Any) -> bool:
        """Whether this is a chunk of another member's share."""
        if not (isinstance(entry, list) and len(entry) == 2 and all(type(i) is int and i >= 0 for i in entry)):
            return False
        owner, chunk = entry
        attempt = self.attempt
        if owner >= len(attempt.means) or owner == self.index:
            return False
        return bool(chunk < attempt.num_chunks(owner))

    def farewell(self) -> Message:
        """What a member that gave up says in place of what it owes."""
        complaints = [list(complaint) for complaint in self.own_complaints]
        return {"gave up": self.given_up.result(), "complaints": complaints}

    def note_clear(self, index: int) -> None:
        """Take down that a member's checks are through."""
        self.cleared.add(index)
        self.slow_to_clear.discard(self.attempt.roster.members[index])
        self.changed()

    def signatures(self) -> Message:
        """All of the result that this member has, for others."""
        return {"proofs": [[peer, proof] for peer, proof in sorted(self.attempt.proofs.items())]}

    def note_signatures(self, proofs: Any) -> None:
        """Take in signatures that another member passes on; those that are none are left out by `certificate`."""
        for entry in proofs[: len(self.attempt.roster.tickets)] if isinstance(proofs, list) else []:
            if isinstance(entry, list) and len(entry) == 2 and entry[0] in self.attempt.roster.members:
                self._passed_on.append((entry[0], entry[1]))
        self.changed()

    def certificate(self) -> Certificate | None:
        """The certificate, once a majority is known to have signed what this member holds."""
        if self.attempt.body is not None:
            for peer, proof in self._passed_on:
                self.attempt.add_proof(peer, proof, self.signer)
            self._passed_on.clear()
        return self.attempt.certificate()

    def find_fault(self, owner: int, chunks: list[int], reason: str, *, late: bool) -> None:
        """Take down that chunks of an owner's share did not pass, and tell the others which, should this be the end."""
        self.faults.setdefault(owner, (reason, late))
        self.attempt.disputed = True
        self.own_complaints += [(owner, chunk) for chunk in chunks[: self.max_complaints - len(self.own_complaints)]]
        self.changed()

    def find_guilty(self, error: FalseMeanError, chunks: list[int]) -> None:
        """Take down evidence against an owner, and the chunks that showed it, if any did."""
        if not self.evidence:
            self.evidence = error.evidence
            self.on_evidence(error.evidence)
        self.faults.pop(error.owner, None)
        self.find_fault(error.owner, chunks, str(error), late=False)

    async def examine(self, owner: int, chunks: list[int], channel: Channel) -> bool:
        """Receive an owner's answer to a check, and judge it; what is wrong with it is left in `faults`.

        Returns:
            Whether all is right there; it is neither when the owner has given up, or says that a majority has signed.

        Raises:
            PeerLostError, PeerRefusedError: It does not answer, for whatever reason.
        """
        if not chunks or self.audit is None:
            return True
        loop = asyncio.get_running_loop()
        elapsed = loop.time() - self.began
        seconds = patience_seconds(elapsed, self.spec.grace_seconds)
        # Of two members nobody signs before the other, so that a slow link may take its time.
        seconds = ANSWER_SHARE * seconds if self.clears else seconds + elapsed
        limit = self.audit.max_answer_bytes(owner, len(chunks))
        try:
            reply = await channel.receive(seconds)
            if isinstance(blamed := reply.get("gave up"), list):
                self.note_gave_up(owner, blamed, reply.get("complaints"))
                return False
            if "proofs" in reply:
                self.outvoted.add(owner)
                self.note_signatures(reply["proofs"])
                return False
            size = reply.get("opening")
            if type(size) is not int or not 0 < size <= limit:
                raise IntegrityError("announces an answer of an impossible size")
            await self.audit.check(owner, chunks, await channel.receive_bytes(size, seconds))
            return True
        except FalseMeanError as error:
            self.find_guilty(error, chunks)
        except DeadlineError as error:
            self.find_fault(owner, chunks, str(error), late=True)
        except (IntegrityError, ProtocolError) as error:
            self.find_fault(owner, chunks, str(error), late=False)
        return False
