"""The swarm's peers in one peer's view: records of the directory, corrected by own observations.

A record proves that a peer lived when it wrote the record. A failed dial or a silent stream makes the peer a *suspect*.
No round waits for a suspect until it acts (a ticket, a report, a probe), or until a record written after its silence
arrives and a backoff has passed, which doubles with each failure. Failures ban no peer, and suspicion is not gossiped.

Three judgements outlast a peer's own signs of life:

* A *convicted* peer falsified a mean, or voted twice in one view, and never joins this peer's groups.
* An *avoided* peer broke rounds repeatedly, and stays out for a while. If another peer may have broken all of them, the
  two are kept apart, and the leader leaves one of them out. Otherwise two peers that reach all others but not each
  other would break every round, and so would a peer that blames another one each time.
* A *mistrusted* peer lacked the state that it announced, and is not followed for a while. If it also stalled this peer,
  it is *doubted* until it has answered a question on which no round depends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.protocol import table
from p2ptrain.buffers import Bounded
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Backoff

FIRST_SUSPICION_SECONDS = 2.0
LONGEST_SUSPICION_SECONDS = 60.0
RECORD_DELAY_SECONDS = 5.0
"""Maximum delay from a record's writing to its arrival: the interval of `p2ptrain.node.presence`, and a look-up. A
record that arrives within this time of a silence may be older than the silence."""
BREAKS_BEFORE_AVOIDING = 2
GOOD_ROUND = 0.25
"""Breaks or misses of a peer that a round with it takes back."""
MOST_MISSES = 8
MOST_EXCUSED_BREAKS = 8
"""Breaks of which another peer may be the cause. Another one leads after a failed attempt, if another may lead."""
FIRST_AVOIDANCE_SECONDS = 15.0
LONGEST_AVOIDANCE_SECONDS = 240.0
FIRST_MISTRUST_SECONDS = 5.0
LONGEST_MISTRUST_SECONDS = 240.0
MAX_AVOIDED_PEERS = 16
MAX_KNOWN_PEERS = 4096
UNKNOWN_SUSPICION_SECONDS = 30.0
"""Backoff for a peer without a record."""
ARRIVING_STATES = ("starting", "syncing")
"""States of a peer that will send tickets."""
ACTIVE_STATES = ("training", "paused")
"""States of a peer that sends tickets; a paused one keeps looking for a group."""
HOLDING_STATES = (*ACTIVE_STATES, "resting")
"""States of a peer from which others go on: one that its owner paused follows the rounds, and may be the only one."""


@dataclass
class _Known:
    record: PeerRecord
    sequence: int
    expires_at: float
    suspicion: Backoff = field(default_factory=lambda: Backoff(FIRST_SUSPICION_SECONDS, LONGEST_SUSPICION_SECONDS))
    suspect_until: float = 0.0
    suspect_sequence: int = -1
    suspected_at: float = 0.0
    reason: str = ""
    rounds_missed: int = 0
    breaks: float = 0.0
    excuses: frozenset[str] = frozenset()
    avoidance: Backoff = field(default_factory=lambda: Backoff(FIRST_AVOIDANCE_SECONDS, LONGEST_AVOIDANCE_SECONDS))
    avoid_until: float = 0.0
    mistrust: Backoff = field(default_factory=lambda: Backoff(FIRST_MISTRUST_SECONDS, LONGEST_MISTRUST_SECONDS))
    mistrust_until: float = 0.0
    is_doubted: bool = False


@dataclass
class _Absence:
    """A peer that this one waited for in vain as a leader: how often, and the first round that waits for it again."""

    misses: float = 0.0
    patient_from: int = 0


class Membership:
    """One peer's view of the others; lists of peers are sorted by id and without this peer."""

    def __init__(self, own_id: str, runtime: Runtime) -> None:
        self._own_id = own_id
        self._runtime = runtime
        self._known: dict[str, _Known] = {}
        self._absences = Bounded[str, _Absence](MAX_KNOWN_PEERS)
        self._convicted: set[str] = set()
        self._silent_strangers: dict[str, float] = {}

    def update(self, record: PeerRecord, sequence: int, expires_at: float) -> None:
        """Store a verified record; ignore older sequences."""
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
        """Drop a peer that says that it has left."""
        self._known.pop(peer, None)

    def forget_expired(self) -> None:
        now = self._runtime.now()
        self._known = {peer: known for peer, known in self._known.items() if known.expires_at > now}

    def records(self) -> list[PeerRecord]:
        """Return all unexpired records, suspects' included."""
        now = self._runtime.now()
        return [self._known[peer].record for peer in sorted(self._known) if self._known[peer].expires_at > now]

    def suspect(self, peer: str, reason: str) -> None:
        """Record that a peer did not answer; rounds do not wait for it until it shows signs of life."""
        if (known := self._known.get(peer)) is None:
            now = self._runtime.now()
            self._silent_strangers = {each: until for each, until in self._silent_strangers.items() if until > now}
            if len(self._silent_strangers) < MAX_KNOWN_PEERS:
                self._silent_strangers[peer] = now + UNKNOWN_SUSPICION_SECONDS
            return
        known.suspect_until = self._runtime.now() + known.suspicion.next()
        known.suspect_sequence = known.sequence
        known.suspected_at = self._runtime.now()
        known.reason = reason

    def heard_from(self, peer: str) -> None:
        """Record that a peer acted (a ticket, a report): suspicion ends at once."""
        self._silent_strangers.pop(peer, None)
        if (known := self._known.get(peer)) is not None:
            known.suspicion.reset()
            known.suspect_until = 0.0
            known.suspect_sequence = -1
            known.rounds_missed = 0
            known.reason = ""

    def answered(self, peer: str) -> None:
        """Record that a peer answered or probed this one: suspicion ends, but rounds that it missed still count."""
        if (known := self._known.get(peer)) is not None:
            known.suspect_until, known.suspect_sequence = 0.0, -1

    def broke_with(self, peer: str, reason: str, *excuses: str, share: float = 1.0) -> None:
        """Record that an attempt broke on a peer: it is a suspect, and from the second time on also avoided.

        While another peer may have caused all its breaks, the two are only kept apart; see `conflicts`.

        Args:
            excuses: Other peers of which one may have caused this, such as the leader, or a member that accuses it.
            share: Share of a break for which it counts.
        """
        self.suspect(peer, reason)
        if (known := self._known.get(peer)) is not None:
            others = frozenset(excuses) - {""} if known.breaks < MOST_EXCUSED_BREAKS else frozenset()
            known.excuses = known.excuses & others if known.breaks else others
            known.breaks += share
            if known.breaks >= BREAKS_BEFORE_AVOIDING:
                known.avoid_until = self._runtime.now() + known.avoidance.next()

    def finished_with(self, peers: Collection[str]) -> None:
        """Record that a round worked with these peers; two that are kept apart were both in it, or stay apart.

        Each such round takes back a part of a break, so that no peer may break every second round.
        """
        for known in (self._known[peer] for peer in peers if peer in self._known):
            if known.breaks < BREAKS_BEFORE_AVOIDING or not known.excuses or not known.excuses.isdisjoint(peers):
                known.breaks = max(0.0, known.breaks - GOOD_ROUND)
                known.avoid_until = 0.0
                if not known.breaks:
                    known.avoidance.reset()

    def conflicts(self, peer: str) -> frozenset[str]:
        """Return the peers with which a peer shares no group for now, because rounds with both broke."""
        known = self._known.get(peer)
        return known.excuses if known is not None and known.avoid_until > self._runtime.now() else frozenset()

    def convict(self, peer: str) -> None:
        """Exclude a peer from this peer's groups for good: there is evidence that it lied."""
        self._convicted.add(peer)

    def is_convicted(self, peer: str) -> bool:
        return peer in self._convicted

    def avoided(self) -> list[str]:
        """Return the peers that this peer cannot share a group with: convicted ones first, then the latest; bounded."""
        now = self._runtime.now()
        convicted = sorted(self._convicted & self._known.keys())
        others = sorted(self._known.keys() - self._convicted)
        avoided = [peer for peer in others if self._known[peer].avoid_until > now and not self._known[peer].excuses]
        avoided.sort(key=lambda peer: -self._known[peer].avoid_until)
        return [*convicted, *avoided][:MAX_AVOIDED_PEERS]

    def mistrust(self, peer: str, *, stalled: bool = False) -> None:
        """Record that a peer lacked the state that it announced; with ``stalled``, also doubt it."""
        if (known := self._known.get(peer)) is not None:
            known.is_doubted |= stalled
            known.mistrust_until = self._runtime.now() + known.mistrust.next()

    def kept_promise(self, peer: str) -> None:
        if (known := self._known.get(peer)) is not None:
            known.mistrust.reset()
            known.is_doubted = False

    def vouch(self, peer: str) -> None:
        """End the doubt: the peer showed the state that it announces. The backoff of `mistrust` keeps growing."""
        if (known := self._known.get(peer)) is not None:
            known.is_doubted = False

    def is_doubted(self, peer: str) -> bool:
        """True if the peer stalled this one with a state that it could not serve, and has not recovered since."""
        known = self._known.get(peer)
        return known is not None and known.is_doubted

    def is_mistrusted(self, peer: str) -> bool:
        """True if the peer's announcements do not count now."""
        known = self._known.get(peer)
        return known is not None and self._runtime.now() < known.mistrust_until

    def may_follow(self, peer: str) -> bool:
        """True if the peer has a record, and its announcements count now."""
        return peer in self._known and not self.is_mistrusted(peer)

    def is_unannounced(self, peer: str) -> bool:
        """True if no record says yet that this peer trains."""
        known = self._known.get(peer)
        return known is None or known.record.state in ARRIVING_STATES

    def missed_round(self, peer: str) -> None:
        """Record that a peer answered but did not join in time: rounds do not wait for it until it acts."""
        if (known := self._known.get(peer)) is not None:
            known.rounds_missed += 1
            known.reason = "answers, but did not join the last round"

    def waited_for(self, missing: Collection[str], members: Collection[str], round_: int) -> None:
        """Record which peers did not join a group that waited for them, and which did.

        From the second miss on no group waits for a peer, for twice as many rounds each time, whatever it reports
        meanwhile. A round with it takes back a part of a miss: one that is far away misses a round now and then, and
        none is waited for in vain in every second round.
        """
        for peer in self._absences.keys() & set(members):
            absence = self._absences[peer]
            absence.misses, absence.patient_from = absence.misses - GOOD_ROUND, 0
            if absence.misses <= 0:
                del self._absences[peer]
        for peer in missing:
            absence = self._absences[peer] = self._absences.get(peer) or _Absence()
            absence.misses = min(absence.misses + 1, MOST_MISSES)
            absence.patient_from = round_ + 1 + int(2**absence.misses) * (absence.misses > 1)

    def is_worth_waiting_for(self, peer: str, round_: int) -> bool:
        """True unless groups waited for this peer in vain lately; see `waited_for`."""
        absence = self._absences.get(peer)
        return absence is None or round_ >= absence.patient_from

    def is_suspect(self, peer: str) -> bool:
        """True if the peer presumably does not answer, or is convicted."""
        known = self._known.get(peer)
        if peer in self._convicted:
            return True
        if known is None:
            return self._silent_strangers.get(peer, 0.0) > self._runtime.now()
        if known.suspect_sequence < 0:
            return False
        return self._runtime.now() < known.suspect_until or known.sequence <= known.suspect_sequence

    def is_resting(self, peer: str) -> bool:
        """True if the peer's record says that it sends no tickets now."""
        known = self._known.get(peer)
        return known is not None and known.record.state not in (*ACTIVE_STATES, *ARRIVING_STATES)

    def may_answer(self, peer: str) -> bool:
        """True unless the peer is suspect, or its record has expired; this peer itself is not asked about."""
        known = self._known.get(peer)
        return not self.is_suspect(peer) and (known is None or known.expires_at > self._runtime.now())

    def suspects(self) -> list[str]:
        """Return the peers that presumably do not answer."""
        return [peer for peer in sorted(self._known) if self.is_suspect(peer)]

    def why_not_expected(self, peer: str) -> str:
        """Return the reason why rounds do not wait for a peer; empty if they do."""
        known = self._known.get(peer)
        if known is None or known.expires_at <= self._runtime.now():
            return "no record"
        if known.record.state not in ACTIVE_STATES:
            return known.record.state
        if peer in self._convicted:
            return "was proved to have lied"
        if self.is_suspect(peer) or known.rounds_missed:
            return known.reason
        return ""

    def expected(self) -> list[str]:
        """Return the peers that a round waits for: training, not suspect, not absent from the last round."""
        return [peer for peer in sorted(self._known) if not self.why_not_expected(peer)]

    def trainers(self) -> list[str]:
        """Return the peers that train by their records, suspects included."""
        active = [record.peer for record in self.records() if record.state in ACTIVE_STATES]
        return [peer for peer in active if peer not in self._convicted]

    def present(self) -> list[str]:
        """Return the peers that train or soon will, without suspects."""
        trainers = [record for record in self.records() if record.role == "trainer"]
        present = [record.peer for record in trainers if record.state in (*ACTIVE_STATES, *ARRIVING_STATES)]
        return [peer for peer in present if not self.is_suspect(peer)]

    def alive_trainers(self) -> list[str]:
        """Return the peers that train, absent ones included, without suspects."""
        return [peer for peer in self.trainers() if not self.is_suspect(peer)]

    def trusted_records(self) -> list[PeerRecord]:
        """Return the records of peers that hold a state, neither suspected nor mistrusted, ordered by peer id."""
        return [
            record
            for record in self.records()
            if record.state in HOLDING_STATES
            and not self.is_suspect(record.peer)
            and not self.is_mistrusted(record.peer)
        ]


def rank(peer: str, key: Key) -> bytes:
    """Return a peer's rank in a group, 32 bytes; among leaders, `Table.order` counts missed turns first."""
    return table.rank(peer, key.lineage, key.level, key.cell)
