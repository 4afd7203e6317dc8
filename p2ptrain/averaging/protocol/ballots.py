"""Votes: a voter's own, one body in each view of a round, and those of others, so that a second one there shows.

* `Ballots` holds also after a restart. A hostile leader could otherwise show two rosters to two halves, and complete
  both with one voter's signatures. A vote, the tip that it follows, and the lineages that it gives up are one record.
  So a crash leaves all of them or none.
* `SeenVotes` needs no further message. A liar may vote for one body before half of the voters, and for another before
  the rest. A member that is asked for its vote sees those of another roster; and two certificates of one round meet
  where a peer chooses between lineages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Lock
from typing import Annotated, NamedTuple

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Body, Count, Head, Name, lineage_after
from p2ptrain.buffers import Bounded
from p2ptrain.disk import WriteLog, replace_file
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.network.schema import Hash, Message, from_bytes, to_bytes

MAX_LINEAGES = 64
MAX_ROUNDS = 64
MAX_RESULTS = 8
"""Limit of the results of one round that are kept, the latest."""
MAX_FOUND = 256


class _Vote(Message, frozen=True, array_like=True):
    lineage: Hash
    body: Hash
    view: Count
    members: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)]
    leaving: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    full: Count = 0  # The round after it, if one of this peer's votes there was for a full result.


class _Record(Message, frozen=True):
    votes: tuple[_Vote, ...]
    tip: Head | None = None
    lost: Annotated[tuple[Hash, ...], Meta(max_length=MAX_LINEAGES)] = ()
    forgotten: tuple[Count, Count] = (0, 0)  # Bounds of the votes for full results that ``votes`` has no more.


class Ballots:
    """The last votes of this peer, by the lineage that they extend; in ``path``, if given, before they are sent.

    Of older ones it keeps a bound on rounds, and the latest view. A swarm that goes back that far votes in later views.

    Raises:
        IntegrityError: The file is damaged.

    Attributes:
        tip: The newest head to which valid certificates led this peer as a voter; its state may not be here.
        lost: Lineages that this peer gave up, because nobody showed their state. No certificate alone leads there.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._log = WriteLog("votes", path)
        self._votes: dict[bytes, _Vote] = {}
        self._lock = Lock()
        self._lost: tuple[bytes, ...] = ()
        self._forgotten = 0, 0
        self.tip: Head | None = None
        if path is not None and path.is_file():
            try:
                record = from_bytes(_Record, path.read_bytes())
            except IntegrityError as error:
                raise IntegrityError(
                    f"the votes in {path} are damaged ({error}): without them, this peer could vote twice, and be"
                    " convicted; restore the file, or delete it if no round is in progress"
                ) from error
            self._votes = {vote.lineage: vote for vote in record.votes}
            self.tip, self._lost, self._forgotten = record.tip, record.lost, record.forgotten

    @property
    def lost(self) -> frozenset[bytes]:
        return frozenset(self._lost)

    def has_voted_for(self, body: Body) -> bool:
        last = self._votes.get(body.lineage)
        return last is not None and last.body == body.body_hash

    def results_after(self, *lineages: bytes) -> tuple[bytes, ...]:
        """Return the lineages that this peer's last votes in the rounds after these lead to."""
        last = (self._votes.get(lineage) for lineage in lineages)
        return tuple(lineage_after(vote.lineage, vote.body) for vote in last if vote is not None)

    def roster_after(self, lineage: bytes) -> tuple[frozenset[str], frozenset[str]]:
        """Return the roster of the result that this peer voted for last after a lineage, and who of it left then."""
        last = self._votes.get(lineage)
        return (frozenset(last.members), frozenset(last.leaving)) if last is not None else (frozenset(), frozenset())

    def rivals(self, body: Body, head: Head) -> tuple[list[bytes], frozenset[str]]:
        """Return where this peer voted for full results that a body excludes, and the rosters of those results.

        Those are of earlier views of the body's round, and those that the reduced rounds before its head left out. Each
        is named by the lineage before it, the newest first.
        """
        found = [
            vote
            for vote in reversed(self._votes.values())
            if (vote.lineage == body.lineage and vote.view < body.view)
            or (head.is_reduced and vote.full > head.full and vote.lineage != body.lineage)
        ]
        return [vote.lineage for vote in found], frozenset[str]().union(*(vote.members for vote in found))

    def may_vote(self, body: Body, signers: Collection[str] | None = None) -> bool:
        """True if this peer may vote for a body after its last vote in that round; arguments as of `vote`."""
        last = self._votes.get(body.lineage)
        if self.has_voted_for(body):
            return True
        if body.view < self.next_view(body.lineage, body.round):
            return False
        if last is None or signers is None:
            return True
        return 2 * len(set(last.members).intersection(signers)) > len(last.members)

    def next_view(self, lineage: bytes, round_: int) -> int:
        """Return the first view after this peer's votes in a round, which follows a lineage."""
        last, (full, view) = self._votes.get(lineage), self._forgotten
        return max(0 if last is None else last.view + 1, view + 1 if round_ < full else 0)

    def vote(
        self,
        body: Body,
        signers: Collection[str] | None = None,
        *,
        tip: Head | None = None,
        lost: Collection[bytes] = (),
        leaving: Collection[str] = (),
    ) -> bool:
        """Record a vote, on disk before this returns; return False if this peer voted for another body of its view.

        Safe from any thread: a member signs its own attempt while it answers other members' requests.

        Args:
            signers: Of the body, if this peer did not take part in its attempt. Most members of the roster that it
                voted for before must be among them: so they gave that one up.
            tip: The head before the body, which becomes the tip; by default, the tip stays.
            lost: Lineages that this vote gives up.
            leaving: Members that leave the swarm with this result.

        Raises:
            ResourceError: The vote cannot be written, and must not be sent.
        """
        with self._lock:
            last = self._votes.get(body.lineage)
            if self.has_voted_for(body):
                return True  # A member may have recorded it meanwhile, as its own attempt's.
            if not self.may_vote(body, signers):
                return False
            votes = [vote for vote in self._votes.values() if vote is not last]
            left = tuple(peer for peer in body.members if peer in leaving)
            full = max(last.full if last is not None else 0, body.round + 1 if body.is_full else 0)
            votes.append(_Vote(body.lineage, body.body_hash, body.view, body.members, left, full))
            forgotten = self._forgotten
            for each in votes[:-MAX_LINEAGES]:
                if each.full:
                    forgotten = max(forgotten[0], each.full), max(forgotten[1], each.view)
            votes = votes[-MAX_LINEAGES:]
            tip = self.tip if tip is None else tip
            given_up = dict.fromkeys([*self._lost, *lost])
            lost = tuple(each for each in given_up if each not in (body.lineage, body.next_lineage))[-MAX_LINEAGES:]
            if self._path is not None:
                try:
                    with self._log.writing():
                        self._path.parent.mkdir(parents=True, exist_ok=True)
                        replace_file(self._path, to_bytes(_Record(tuple(votes), tip, lost, forgotten)), synced=True)
                except OSError as error:
                    raise ResourceError(f"this peer cannot keep its vote: {error.strerror or error}") from error
            self._votes, self.tip, self._lost = {vote.lineage: vote for vote in votes}, tip, lost
            self._forgotten = forgotten
            return True


class Votes(NamedTuple):
    """Votes for one result: valid signatures, by voter."""

    body: Body
    proofs: dict[str, bytes]


class SeenVotes:
    """The votes for full results of this peer's last rounds; safe from any thread."""

    def __init__(self) -> None:
        self._rounds = Bounded[bytes, tuple[frozenset[str], deque[Votes]]](MAX_ROUNDS)  # By the lineage before it.
        self._found: dict[str, tuple[Votes, Votes]] = {}
        self._lock = Lock()

    def follow(self, head: Head) -> None:
        """Keep the votes in the round after a head of this peer, and in the last `MAX_ROUNDS` rounds."""
        with self._lock:
            _, seen = self._rounds.get(head.lineage, (None, deque[Votes](maxlen=MAX_RESULTS)))
            self._rounds[head.lineage] = head.table.electorate, seen

    def add(self, body: Body, proofs: Iterable[tuple[str, bytes]], *, is_own: bool = False) -> None:
        """Keep votes, whose signatures the caller has verified, and compare them with those that are known.

        A third of the electorate must have voted for the body, unless it ``is_own``, of an attempt of this peer. So one
        of them is honest, and no liar displaces other votes.
        """
        with self._lock:
            if (known := self._rounds.get(body.lineage)) is None:
                return
            electorate, seen = known
            votes = Votes(body, {peer: proof for peer, proof in proofs if peer in electorate})
            counts = is_own or 3 * len(votes.proofs) >= len(electorate)
            if not (body.is_full and votes.proofs and counts):
                return
            for each in seen:
                if each.body.excludes(body) and len(self._found) < MAX_FOUND:
                    self._found |= dict.fromkeys(each.proofs.keys() & votes.proofs.keys(), (each, votes))
            same = next((each for each in seen if each.body.body_hash == body.body_hash), None)
            if same is None:
                seen.append(votes)
            else:
                same.proofs.update(votes.proofs)

    def take(self) -> list[tuple[str, Votes, Votes]]:
        """Return the voters that voted twice, with both votes, and forget that they were found."""
        with self._lock:
            found, self._found = self._found, {}
        return [(peer, *both) for peer, both in sorted(found.items())]
