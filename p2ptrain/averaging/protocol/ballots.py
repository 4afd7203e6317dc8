"""A voter's own votes: one body in each view of a round, also after a restart.

A hostile leader could otherwise show two rosters to two halves, and complete both with one voter's signatures.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Body, Head, Name, Present
from p2ptrain.disk import replace_file
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Hash, Message, from_bytes, to_bytes

MAX_LINEAGES = 64


class _Vote(Message, frozen=True, array_like=True):
    lineage: Hash
    body: Hash
    view: Present
    members: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)]


class _Record(Message, frozen=True):
    votes: tuple[_Vote, ...]
    tip: Head | None = None


class Ballots:
    """The last votes of this peer, by the lineage that they extend; in ``path``, if given, before they are sent.

    Raises:
        IntegrityError: The file is damaged.

    Attributes:
        tip: The newest head to which valid certificates led this peer as a voter; its state may not be here.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._votes: dict[bytes, _Vote] = {}
        self._lock = Lock()
        self.tip: Head | None = None
        if path is not None and path.is_file():
            try:
                record = from_bytes(_Record, path.read_bytes())
            except IntegrityError as error:
                raise IntegrityError(
                    f"the votes in {path} are damaged ({error}): without them, this peer could vote twice; restore the"
                    " file, or delete it if no round is in progress"
                ) from error
            self._votes = {vote.lineage: vote for vote in record.votes}
            self.tip = record.tip

    def members_before(self, body: Body) -> tuple[str, ...]:
        """Return the roster that this peer voted for in an earlier view of a body's round; empty if there is none."""
        last = self._votes.get(body.lineage)
        return last.members if last is not None and last.view < body.view else ()

    def vote(self, body: Body, signers: Collection[str] | None = None) -> bool:
        """Record a vote, on disk before this returns; return False if this peer voted for another body of its view.

        Safe from any thread: a member signs its own attempt while it answers other members' requests.

        Args:
            signers: Of the body, if this peer did not take part in its attempt. Most members of the roster that it
                voted for before must be among them: so they gave that one up.

        Raises:
            OSError: The vote cannot be written, and must not be sent.
        """
        with self._lock:
            last = self._votes.get(body.lineage)
            if last is not None and last.body == body.body_hash:
                return True
            if last is not None and not _gives_way(last, body, signers):
                return False
            votes = [vote for vote in self._votes.values() if vote is not last]
            votes = [*votes, _Vote(body.lineage, body.body_hash, body.view, body.members)][-MAX_LINEAGES:]
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._path, to_bytes(_Record(tuple(votes), self.tip)), synced=True)
            self._votes = {vote.lineage: vote for vote in votes}
            return True


def _gives_way(last: _Vote, body: Body, signers: Collection[str] | None) -> bool:
    """True if a voter may vote for a body after its last vote in that round."""
    if body.view <= last.view:
        return False
    return signers is None or 2 * len(set(last.members).intersection(signers)) > len(last.members)
