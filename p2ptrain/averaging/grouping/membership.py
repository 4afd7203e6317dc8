"""Who is there, as far as this peer can tell: records from the directory, corrected by what it saw itself.

A record says that a peer lived when it wrote it; a failed dial or a silent stream says that it does not answer *now*.
A suspect is not waited for until it proves otherwise: by a ticket or report of its own at once, by a record that was
written after it fell silent, after a back-off that doubles with every failure. Nobody is ever banned for failing, and
suspicion is not gossiped, so a false accusation harms nobody.

Three things outlast a peer's word that it is well. A peer that was proved to have lied
(`p2ptrain.averaging.verification.evidence`) never comes into this peer's groups again. A peer with which rounds broke
again and again stays out of them for a while (`Membership.broke_with`): two peers that reach everybody but each other
would otherwise break every round of the swarm. And a peer whose record turned out to promise too much is not followed
for a while (`Membership.mistrust`); if it let this one wait as well, then only once it has shown, to a question that
nobody waits for, that it holds what it announces (`Membership.vouch`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.runtime import Runtime

FIRST_SUSPICION_SECONDS = 2.0
LONGEST_SUSPICION_SECONDS = 60.0
RECORD_DELAY_SECONDS = 5.0
"""A record may be seen so long after it was written: `p2ptrain.node.presence` looks every 2 seconds, with look-ups of
some seconds. What is seen within this time proves nothing about a peer that fell silent."""
BREAKS_BEFORE_AVOIDING = 2
FIRST_AVOIDANCE_SECONDS = 15.0
LONGEST_AVOIDANCE_SECONDS = 240.0
FIRST_MISTRUST_SECONDS = 5.0
LONGEST_MISTRUST_SECONDS = 240.0
MAX_AVOIDED_PEERS = 16
MAX_KNOWN_PEERS = 4096
ANSWER_SECONDS = 2.0
"""A peer that answered is not asked again about the same round for so long: others wait longer for a leader."""
SILENCE_SECONDS = 10.0
"""A peer that did not answer is not asked again about any round for so long."""
ARRIVING_STATES = ("starting", "syncing")
"""States of a peer that will hand in tickets."""
ACTIVE_STATES = ("training", "paused")
"""States of a peer that hands in tickets; one that is paused keeps asking for a group."""


@dataclass
class _Known:
    record: PeerRecord
    sequence: int
    expires_at: float
    failures: int = 0
    suspect_until: float = 0.0
    suspect_sequence: int = -1
    suspected_at: float = 0.0
    reason: str = ""
    rounds_missed: int = 0
    breaks: int = 0
    broke_under: set[str] = field(default_factory=set)
    avoid_until: float = 0.0
    broken_promises: int = 0
    mistrust_until: float = 0.0
    is_doubted: bool = False


class Membership:
    """The peers of a swarm, seen from one of them."""

    def __init__(self, own_id: str, runtime: Runtime) -> None:
        self._own_id = own_id
        self._runtime = runtime
        self._known: dict[str, _Known] = {}
        self._convicted: set[str] = set()

    def update(self, record: PeerRecord, sequence: int, expires_at: float) -> None:
        """Take in a verified record; older sequences are ignored."""
        if record.peer == self._own_id:
            return
        known = self._known.get(record.peer)
        if known is None:
            if len(self._known) >= MAX_KNOWN_PEERS:
                return
            self._known[record.peer] = _Known(record, sequence, expires_at)
        elif sequence > known.sequence:
            known.record, known.sequence, known.expires_at = record, sequence, expires_at
            if known.suspect_sequence >= 0 and self._runtime.now() < known.suspected_at + RECORD_DELAY_SECONDS:
                known.suspect_sequence = sequence

    def forget(self, peer: str) -> None:
        """Drop a peer that says that it is no longer one of these."""
        self._known.pop(peer, None)

    def forget_expired(self) -> None:
        """Drop peers whose records ran out."""
        now = self._runtime.now()
        self._known = {peer: known for peer, known in self._known.items() if known.expires_at > now}

    def records(self) -> list[PeerRecord]:
        """The unexpired records of other peers, suspects included, ordered by peer id."""
        now = self._runtime.now()
        return [self._known[peer].record for peer in sorted(self._known) if self._known[peer].expires_at > now]

    def suspect(self, peer: str, reason: str) -> None:
        """Note that a peer did not answer: it is not waited for until it shows signs of life."""
        known = self._known.get(peer)
        if known is None:
            return
        known.failures += 1
        pause = min(FIRST_SUSPICION_SECONDS * 2 ** min(known.failures - 1, 16), LONGEST_SUSPICION_SECONDS)
        known.suspect_until = self._runtime.now() + pause
        known.suspect_sequence = known.sequence
        known.suspected_at = self._runtime.now()
        known.reason = reason

    def heard_from(self, peer: str) -> None:
        """Note that a peer acted (a ticket, a report): suspicion ends at once."""
        known = self._known.get(peer)
        if known is not None:
            known.failures = 0
            known.suspect_until = 0.0
            known.suspect_sequence = -1
            known.rounds_missed = 0
            known.reason = ""

    def answered(self, peer: str) -> None:
        """Note that a peer answered: it is waited for, unless it stayed away from the last round."""
        known = self._known.get(peer)
        if known is not None:
            known.suspect_until, known.suspect_sequence = 0.0, -1

    def broke_with(self, peer: str, reason: str, leader: str = "") -> None:
        """Note that an attempt broke on a peer: it is a suspect, and after a second time also avoided.

        Args:
            peer: With which it broke.
            reason: How.
            leader: Who put the group together, where that could be the cause: then only a second leader's group that
                breaks on the same peer tells that it is the peer. Empty when the peer did wrong for certain.
        """
        self.suspect(peer, reason)
        known = self._known.get(peer)
        if known is not None:
            known.breaks += 1
            known.broke_under.add(leader or f"itself {known.breaks}")
            if len(known.broke_under) >= BREAKS_BEFORE_AVOIDING:
                doubled = FIRST_AVOIDANCE_SECONDS * 2 ** min(known.breaks - BREAKS_BEFORE_AVOIDING, 16)
                known.avoid_until = self._runtime.now() + min(doubled, LONGEST_AVOIDANCE_SECONDS)

    def finished_with(self, peer: str) -> None:
        """Note that a round came to its end with a peer in it."""
        known = self._known.get(peer)
        if known is not None:
            known.breaks = 0
            known.broke_under.clear()
            known.avoid_until = 0.0

    def convict(self, peer: str) -> None:
        """Note that a peer was proved to have lied: it stays out of this peer's groups for good."""
        self._convicted.add(peer)

    def is_convicted(self, peer: str) -> bool:
        """Whether a peer was proved to have lied."""
        return peer in self._convicted

    def avoided(self) -> list[str]:
        """Peers that this peer cannot be in one group with, convicted ones first, then the latest; bounded."""
        now = self._runtime.now()
        convicted = sorted(self._convicted & self._known.keys())
        avoided = [peer for peer in sorted(self._known.keys() - self._convicted) if self._known[peer].avoid_until > now]
        avoided.sort(key=lambda peer: -self._known[peer].avoid_until)
        return [*convicted, *avoided][:MAX_AVOIDED_PEERS]

    def mistrust(self, peer: str, *, stalled: bool = False) -> None:
        """Note that a peer did not hold the state that it announced: it is not followed for a while.

        Args:
            peer: Which.
            stalled: Whether that took long to find out; then it is doubted as well.
        """
        known = self._known.get(peer)
        if known is not None:
            pause = min(FIRST_MISTRUST_SECONDS * 2 ** min(known.broken_promises, 16), LONGEST_MISTRUST_SECONDS)
            known.broken_promises += 1
            known.is_doubted |= stalled
            known.mistrust_until = self._runtime.now() + pause

    def kept_promise(self, peer: str) -> None:
        """Note that a peer held what it announced."""
        known = self._known.get(peer)
        if known is not None:
            known.broken_promises = 0
            known.is_doubted = False

    def vouch(self, peer: str) -> None:
        """Note that a peer showed that it holds what it announces: it may be followed; failing again counts on."""
        known = self._known.get(peer)
        if known is not None:
            known.is_doubted = False

    def is_doubted(self, peer: str) -> bool:
        """Whether a peer has let this one wait for what it did not hold, and has not kept its word since."""
        known = self._known.get(peer)
        return known is not None and known.is_doubted

    def is_mistrusted(self, peer: str) -> bool:
        """Whether what the peer announces is not to be relied on now."""
        known = self._known.get(peer)
        return known is not None and self._runtime.now() < known.mistrust_until

    def is_news(self, peer: str) -> bool:
        """Whether no record has told yet that this peer trains."""
        known = self._known.get(peer)
        return known is None or known.record.state in ARRIVING_STATES

    def missed_round(self, peer: str) -> None:
        """Note that a peer answered but did not join in time: the next rounds do not wait for it until it acts."""
        known = self._known.get(peer)
        if known is not None:
            known.rounds_missed += 1
            known.reason = "answers, but did not join the last round"

    def is_suspect(self, peer: str) -> bool:
        """Whether the peer is presumed not to answer."""
        known = self._known.get(peer)
        if peer in self._convicted:
            return True
        if known is None or known.suspect_sequence < 0:
            return False
        return self._runtime.now() < known.suspect_until or known.sequence <= known.suspect_sequence

    def suspects(self) -> list[str]:
        """Other peers that are presumed not to answer; sorted."""
        return [peer for peer in sorted(self._known) if self.is_suspect(peer)]

    def why_not_expected(self, peer: str) -> str:
        """The reason for not waiting for a peer; empty when it is expected."""
        known = self._known.get(peer)
        if known is None or known.expires_at <= self._runtime.now():
            return "no record"
        if known.record.state not in ACTIVE_STATES:
            return known.record.state
        if peer in self._convicted:
            return "was proved to have falsified a mean"
        if self.is_suspect(peer) or known.rounds_missed:
            return known.reason
        return ""

    def expected(self) -> list[str]:
        """Other peers that a round waits for: training, not suspect, not absent from the last round; sorted."""
        return [peer for peer in sorted(self._known) if not self.why_not_expected(peer)]

    def trainers(self) -> list[str]:
        """Other peers that train by their last account, those included that are presumed not to answer; sorted."""
        return [
            record.peer
            for record in self.records()
            if record.state in ACTIVE_STATES and record.peer not in self._convicted
        ]

    def present(self) -> list[str]:
        """Other peers that train or are about to, and are not suspects; sorted."""
        return [
            record.peer
            for record in self.records()
            if record.role == "trainer"
            and record.state in (*ACTIVE_STATES, *ARRIVING_STATES)
            and not self.is_suspect(record.peer)
        ]

    def alive_trainers(self) -> list[str]:
        """Other peers that train and are not suspects, absent ones included; sorted."""
        now = self._runtime.now()
        return [
            peer
            for peer in sorted(self._known)
            if self._known[peer].expires_at > now
            and self._known[peer].record.state in ACTIVE_STATES
            and not self.is_suspect(peer)
        ]

    def trusted_records(self) -> list[PeerRecord]:
        """Return the records of training peers that are neither suspected nor mistrusted, ordered by peer id."""
        return [
            record
            for record in self.records()
            if record.state in ACTIVE_STATES
            and not self.is_suspect(record.peer)
            and not self.is_mistrusted(record.peer)
        ]


class Absentees:
    """Tells which absent peers a leader asks before few peers end a round. Times are the event loop's.

    A peer that was stopped for a while goes on with old news: its deadlines have passed, nobody seems to answer, and it
    would end alone a round that the others have ended meanwhile. That makes two lineages, of which one is lost. So
    unless most of the peers came, each absent one that says that it trains is asked once more first. A silent one costs
    a few seconds, and not in each round. One that is ending the round with others is waited for, for a while.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Key, float]] = {}
        self._silences: dict[str, float] = {}

    def to_ask(self, key: Key, present: int, absent: Sequence[str], now: float) -> list[str]:
        """Return the peers to ask before a round ends without them.

        Args:
            key: Which group of which round.
            present: How many peers are here.
            absent: The others that say that they train, suspects included.
            now: The time.
        """
        self._answers = {
            peer: (about, until) for peer, (about, until) in self._answers.items() if about == key and until > now
        }
        self._silences = {peer: until for peer, until in self._silences.items() if until > now}
        known = self._answers.keys() | self._silences.keys()
        return [] if present > len(absent) else [peer for peer in absent if peer not in known]

    def answered(self, peer: str, key: Key, asked: float) -> None:
        """Note that a peer was asked then, and is neither ahead nor ending the round with others."""
        self._answers[peer] = (key, asked + ANSWER_SECONDS)

    def silent(self, peer: str, asked: float, now: float, patience_seconds: float) -> None:
        """Note that a peer was asked then, and did not answer in time.

        If that took much longer than it should have, it was this peer that stood still, and the answer may be waiting.
        """
        if now - asked <= 2 * patience_seconds:
            self._silences[peer] = asked + SILENCE_SECONDS

    def heard_from(self, peer: str) -> None:
        """Note that a peer is not silent any more."""
        self._silences.pop(peer, None)


def rank(peer: str, key: Key) -> bytes:
    """Return a peer's rank in a group, 32 bytes; the smallest leads. Differs from round to round."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (key.round, key.present, key.level, key.cell))
    return hashlib.sha256(key.lineage + numbers + peer.encode()).digest()
