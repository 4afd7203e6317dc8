"""Where a peer stands in matchmaking, and the question by which peers tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.client import Rpc

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0


@dataclass
class Place:
    """Where this peer stands, for both sides of matchmaking.

    Attributes:
        head: Its head.
        peer: Its id.
        cells: Who averages where.
        participates: Whether it trains: a leader then waits for itself too.
        following: The group for which it handed in a ticket, and to whom.
        closing: The group that should be formed with what this peer has.
        running: The attempt that this peer is in: which group, who put it together, and its members.
        on_close: Called when the round in progress is to be closed with what this peer has, each time that it is said.
    """

    head: Head
    peer: str
    cells: Cells
    participates: bool = False
    following: tuple[Key, str] | None = None
    closing: Key | None = None
    running: tuple[Key, str, tuple[str, ...]] | None = None
    on_close: Callable[[], None] = lambda: None

    @property
    def key(self) -> Key:
        """The group of level 0 in which it averages in the round in progress."""
        return self.cells.key_of(self.head, self.peer)

    def is_of(self, key: Key) -> bool:
        """Whether a group is one of the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def passed_over(self, key: Key, peer: str) -> list[str]:
        """Who leads no more for a peer that hands in another ticket for a group: its attempt broke, perhaps only there.

        This peer may be in that attempt still. It must not send the other back to the leader of what broke.
        """
        if self.running is None or self.running[0] != key or peer not in self.running[2]:
            return []
        return [self.running[1]]

    def close(self, key: Key) -> None:
        """Close the round in progress with what this peer has, if it is this one."""
        if key == self.key:
            self.closing = key
            self.on_close()


def probe_seconds(spec: AveragingSpec) -> float:
    """How long a peer may take to answer: a grace period, which was chosen for the round trips of the swarm."""
    return min(max(LEAST_PROBE_SECONDS, spec.grace_seconds), MOST_PROBE_SECONDS)


@dataclass(frozen=True)
class Said:
    """What a peer says of itself when it is nudged; none of it is to be trusted.

    Attributes:
        head: Where it is.
        leader: Whom it follows in the round that it was asked about; empty for nobody.
        failed: Which leaders failed in that round, as it sees it.
        is_averaging: Whether it is in an attempt to end that round.
    """

    head: Head
    leader: str
    failed: object
    is_averaging: bool


async def nudge(rpc: Rpc, peer: str, key: Key, closing: bool, timeout_seconds: float) -> Said:
    """Tell a peer that this one is in a round, and whether it is being closed.

    Raises:
        PeerError: It cannot be reached, refuses, or answers nonsense.
        IntegrityError: Its head is malformed.
        DeadlineError: No answer in time.
    """
    reply = await rpc.call(peer, "rally.nudge", {"key": list(key), "closing": closing}, dict, timeout_seconds)
    leader = reply.get("leader")
    return Said(
        Head.from_dict(reply.get("head")),
        leader if isinstance(leader, str) else "",
        reply.get("failed"),
        reply.get("averaging") is True,
    )
