"""Messages by which peers form groups.

`p2ptrain.averaging.grouping.matchmaker` sends tickets, `p2ptrain.averaging.grouping.reporting` sends reports, and
`p2ptrain.averaging.grouping.coordinator` answers most of them. Each ``head`` is the sender's, without proof.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.membership import MAX_AVOIDED_PEERS
from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Count, Head, Name, Ticket
from p2ptrain.averaging.timing.deadlines import Keepalive
from p2ptrain.averaging.timing.goal import LONGEST_BATCH_SECONDS
from p2ptrain.network.schema import Message

JOIN, PROBE, REPORT = "group.join", "group.probe", "group.report"
TAKE_ON, STEPS, PASS, MOVED = "group.take_on", "group.steps", "group.pass", "group.moved"

MAX_TRIED = 8
MAX_REASON_LENGTH = 200
LONGEST_WAIT_SECONDS = 60.0
MAX_JOIN_BYTES = 256 * 1024
"""A delegate shows the credentials of all peers that join by its cells: here of about 700."""
Samples = Annotated[int, Meta(ge=0, lt=1 << 40)]
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_BATCH_SECONDS)]


class Join(Message, frozen=True):
    """A ticket for the leader of a round, whose turn it is for the sender (`Leaders.turn`).

    The leader must not redirect the sender to peers in ``tried``; rounds with those in ``avoid`` broke for the sender.
    """

    ticket: Ticket
    head: Head
    tried: Annotated[tuple[Name, ...], Meta(max_length=MAX_TRIED)]
    turn: Count
    avoid: Annotated[tuple[Name, ...], Meta(max_length=MAX_AVOIDED_PEERS)]


class Answer(Message, frozen=True, tag=True):
    """A leader's answer to a ticket."""


class Waiting(Answer, Keepalive, frozen=True, tag="waiting"):
    """Keepalive: the final answer is pending."""


class Formed(Answer, frozen=True, tag="formed"):
    """The group has formed; the tickets are in the order of the roster. See `Roster`."""

    tickets: Annotated[tuple[Ticket, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    is_reduced: bool = False


class Later(Answer, frozen=True, tag="later"):
    """The turn of the ticket is over for the peer that should lead it."""


class Redirected(Answer, frozen=True, tag="redirected"):
    """Another peer leads this round: in the sender's turn, or because the sender yields to it.

    Without a member table, it goes before the sender.
    """

    peer: Name


class Behind(Answer, frozen=True, tag="behind"):
    """``peer`` has a head that wins over the ticket's."""

    peer: Name


class Refused(Answer, frozen=True, tag="refused"):
    """No group for this ticket: the sender's state differs from the group's, no other peer came, or another reason."""

    reason: Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
    mismatch: bool = False
    alone: bool = False


class Probe(Message, frozen=True):
    """Request for the receiver's position; says that the sender is in this round, and whether the round closes."""

    key: Key
    closing: bool


class ProbeReply(Message, frozen=True):
    """A peer's position, by its own account.

    Attributes:
        leader: The leader that it follows in the group of the probe; empty for none.
        turn: `Leaders.turn` of that group.
    """

    head: Head
    leader: Name
    turn: Count


class BatchReport(Message, frozen=True):
    """A trainer's progress in a round with a global batch; see `p2ptrain.averaging.timing.goal.BatchProgress`."""

    head: Head
    samples: Samples
    batch_samples: Samples
    batch_seconds: Seconds

    def __post_init__(self) -> None:
        if self.batch_samples > self.samples:
            raise ValueError("a batch of more samples than there are")


class BatchAdvice(Message, frozen=True):
    """Instruction to close the round, to wait and ask again, or else to compute another local batch."""

    closing: bool
    wait: bool = False


class TakeOn(Message, frozen=True):
    """A host's progress in a round with a global batch, and its request for more.

    Of the ``held`` samples that it has admitted, it has computed ``samples``; trainers ask it to admit ``wanted`` more.
    """

    head: Head
    samples: Samples
    held: Samples
    wanted: Samples


class Grant(Message, frozen=True):
    """Instruction to close the round, or to admit ``granted`` of the wanted samples."""

    closing: bool
    granted: Samples


class StepsReport(Message, frozen=True):
    """A trainer's progress in a round of local steps; see `p2ptrain.averaging.timing.goal.StepProgress`."""

    head: Head
    steps: Samples
    seconds: Seconds
    age: Seconds
    is_stepping: bool


class StepsAdvice(Message, frozen=True):
    """Instruction to close the round now, or in ``closes_in`` seconds; None if unknown."""

    closing: bool
    closes_in: Seconds | None = None


class Pass(Message, frozen=True):
    """The sender has no work for the round after its head, and joins it all the same if it ``may_join``."""

    head: Head
    may_join: bool = False


class Passed(Message, frozen=True):
    """Reply to `Pass`: as `Ahead`; or the round needs the peer all the same, because too few others have work."""

    is_ahead: bool = False
    is_needed: bool = False


class AwaitMove(Message, frozen=True):
    """Request to answer once the receiver's head wins over this one, or after this time."""

    head: Head
    seconds: Annotated[float, Meta(ge=0.0, le=LONGEST_WAIT_SECONDS)]


class Ahead(Message, frozen=True):
    """Tells whether the sender's head wins over the one in question, whose round is then over."""

    is_ahead: bool
