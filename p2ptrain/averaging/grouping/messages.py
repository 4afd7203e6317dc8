"""Messages by which peers form groups.

`p2ptrain.averaging.grouping.matchmaker` sends tickets and probes, `p2ptrain.averaging.grouping.reporting` sends reports;
`p2ptrain.averaging.grouping.coordinator` answers most of them. Each ``head`` is the sender's, without proof.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.membership import MAX_AVOIDED_PEERS
from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Count, Head, Name, Positive, Ticket
from p2ptrain.averaging.timing.deadlines import Keepalive
from p2ptrain.averaging.timing.goal import LONGEST_BATCH_SECONDS
from p2ptrain.network.schema import Message

JOIN, PROBE, REPORT = "group.join", "group.probe", "group.report"
TAKE_ON, STEPS, PASS, MOVED = "group.take_on", "group.steps", "group.pass", "group.moved"

MAX_TRIED = 8
MAX_GOSSIP = 16
MAX_REASON_LENGTH = 200
LONGEST_WAIT_SECONDS = 60.0
Samples = Annotated[int, Meta(ge=0, lt=1 << 40)]
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_BATCH_SECONDS)]
Failures = Annotated[tuple[tuple[Name, Positive], ...], Meta(max_length=MAX_GOSSIP)]


class Join(Message, frozen=True):
    """A ticket for the leader of a round.

    Attributes:
        tried: Peers to which the leader must not redirect the sender.
        hops: How often the sender was redirected.
        avoid: Peers with which rounds broke for the sender.
    """

    ticket: Ticket
    head: Head
    tried: Annotated[tuple[Name, ...], Meta(max_length=MAX_TRIED)]
    hops: Count
    avoid: Annotated[tuple[Name, ...], Meta(max_length=MAX_AVOIDED_PEERS)]


class Answer(Message, frozen=True, tag=True):
    """A leader's answer to a ticket."""


class Waiting(Answer, Keepalive, frozen=True, tag="waiting"):
    """The final answer will come."""


class Formed(Answer, frozen=True, tag="formed"):
    """The group stands; its tickets are in the order of the roster."""

    tickets: Annotated[tuple[Ticket, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]


class Redirected(Answer, frozen=True, tag="redirected"):
    """Another peer leads this round."""

    peer: Name


class Behind(Answer, frozen=True, tag="behind"):
    """This peer is further on, or on a lineage that wins."""

    peer: Name


class Refused(Answer, frozen=True, tag="refused"):
    """No group for this ticket.

    Attributes:
        mismatch: Whether the sender's state differs from the group's.
        alone: Whether no other peer came to the leader.
    """

    reason: Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
    mismatch: bool = False
    alone: bool = False


class Probe(Message, frozen=True):
    """The sender is in this round, which is perhaps to be closed; where do you stand?"""

    key: Key
    closing: bool


class ProbeReply(Message, frozen=True):
    """Where a peer stands; none of it is to be trusted.

    Attributes:
        leader: The leader that it follows in the group of the probe; empty for none.
        failures: Leaders of that group that failed, as it sees it, and how often.
        is_averaging: Whether it is in an attempt to end that round.
    """

    head: Head
    leader: Name
    failures: Failures
    is_averaging: bool


class BatchReport(Message, frozen=True):
    """How far a trainer is in a round with a global batch; see `p2ptrain.averaging.timing.goal.Report`."""

    head: Head
    samples: Samples
    batch_samples: Samples
    batch_seconds: Seconds

    def __post_init__(self) -> None:
        if self.batch_samples > self.samples:
            raise ValueError("a batch of more samples than there are")


class BatchAdvice(Message, frozen=True):
    """Close the round, or wait and ask again; otherwise compute another local batch."""

    closing: bool
    wait: bool = False


class TakeOn(Message, frozen=True):
    """How far a host is in a round with a global batch, and how much others ask of it.

    Attributes:
        samples: Samples that it has done for the round.
        held: Samples that it has taken on for the round, done or not.
        wanted: Samples that others would like it to take on.
    """

    head: Head
    samples: Samples
    held: Samples
    wanted: Samples


class Grant(Message, frozen=True):
    """Close the round, or take on so many of the samples that were asked for."""

    closing: bool
    granted: Samples


class StepsReport(Message, frozen=True):
    """How far a trainer is in a round of local steps; see `p2ptrain.averaging.timing.goal.StepReport`."""

    head: Head
    steps: Samples
    seconds: Seconds
    age: Seconds
    is_stepping: bool


class StepsAdvice(Message, frozen=True):
    """Close the round, or close it in so many seconds; None where that is not known."""

    closing: bool
    closes_in: Seconds | None = None


class Pass(Message, frozen=True):
    """The sender has nothing for the round after its head."""

    head: Head


class AwaitMove(Message, frozen=True):
    """Answer once you are further on than this head, or after this time."""

    head: Head
    seconds: Annotated[float, Meta(ge=0.0, le=LONGEST_WAIT_SECONDS)]


class Ahead(Message, frozen=True):
    """Tells whether the sender is further on than a head: the round after that is over."""

    is_ahead: bool
