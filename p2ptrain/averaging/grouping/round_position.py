"""Where a peer stands in matchmaking, and the probe by which peers tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.messages import PROBE, Probe, ProbeReply
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.endpoint import Rpc

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0


@dataclass
class RoundPosition:
    """Where this peer stands, for both sides of matchmaking.

    Attributes:
        head: Its head.
        peer: Its id.
        cells: Who averages where.
        participates: Whether it trains: a leader then waits for itself too.
        following: The group for which it handed in a ticket, and the leader.
        closing: The group that should be formed with what this peer has.
        running: The attempt that this peer is in: which group, its leader, and its members.
        on_close: Called each time that another peer says that the round in progress is to be closed.
    """

    head: Head
    peer: str
    cells: Cells
    participates: bool = field(default=False, init=False)
    following: tuple[Key, str] | None = field(default=None, init=False)
    closing: Key | None = field(default=None, init=False)
    running: tuple[Key, str, tuple[str, ...]] | None = field(default=None, init=False)
    on_close: Callable[[], None] = lambda: None

    @property
    def key(self) -> Key:
        """The group of level 0 in which it averages in the round in progress."""
        return self.cells.key_of(self.head, self.peer)

    @property
    def is_closing(self) -> bool:
        """Whether the round in progress should be closed with what this peer has."""
        return self.closing == self.key

    def is_of(self, key: Key) -> bool:
        """Return True if a group is one of the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def is_ahead_of(self, head: Head) -> bool:
        """Return True if this peer is further on than a head, or on a lineage that wins: that round is over."""
        return is_ahead(self.head, head)

    def passed_over(self, key: Key, peer: str) -> list[str]:
        """Return the leader that leads no more for a peer with another ticket for a group: its attempt broke there.

        This peer may be in that attempt still. It must not redirect the other to the leader of a broken attempt.
        """
        if self.running is None or self.running[0] != key or peer not in self.running[2]:
            return []
        return [self.running[1]]

    def close(self, key: Key) -> None:
        """Close the round in progress with what this peer has, if it is this one."""
        if key == self.key:
            self.closing = key
            self.on_close()


def is_ahead(head: Head, other: Head) -> bool:
    """Return True if a head is of another lineage, or further on in the same, and wins over the other."""
    return head.lineage != other.lineage and head.outranks(other)


def probe_seconds(spec: AveragingSpec) -> float:
    """Return how long a peer may take to answer: a grace period, which fits the round trips of the swarm."""
    return min(max(LEAST_PROBE_SECONDS, spec.grace_seconds), MOST_PROBE_SECONDS)


async def probe(rpc: Rpc, peer: str, key: Key, timeout_seconds: float, *, closing: bool = False) -> ProbeReply:
    """Tell a peer that this one is in a round, and whether it is being closed; return where the peer stands.

    Raises:
        PeerError: It cannot be reached, refuses, or answers nonsense.
        DeadlineError: No answer in time.
    """
    return await rpc.call(peer, PROBE, Probe(key, closing), ProbeReply, timeout_seconds)
