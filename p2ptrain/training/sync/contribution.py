"""The input of a synchronisation, and its outcome."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.state.fragments import Fragment


class Contribution(Protocol):
    """A peer's work since it last contributed; the live model's side of a synchronisation.

    All methods run off the event loop, one at a time, while `at_rest` is held. Where rounds synchronise one
    fragment each, a token has a share in every fragment's next contribution and counts there as much: 1 / P of a token.
    """

    @property
    def tokens(self) -> int:
        """Tokens that are not contributed yet, over all fragments; 0 when there is nothing to contribute."""

    @property
    def samples(self) -> int:
        """Samples read since the last contribution to any fragment."""

    def tokens_of(self, fragment: Fragment) -> int:
        """Weight of a fragment's contribution; 0 when there is nothing to contribute to it."""

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write the contribution (fp32, ``[fragment.num_values]``): start minus now, or the mean gradient.

        Args:
            out: Where to.
            fragment: To which fragment; None for the whole vector.
        """

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the live model from the shared state, which has just changed.

        Args:
            contributed: Whether the work is part of that state; it is then forgotten, but for what was done since.
            carry: Otherwise, what `collect` gave before the change, to be put on top of the new state;
                None drops the work.
            fragment: What of the state changed; None for all of it.
            counted: With ``contributed``: the tokens and samples that are in the state.
        """

    def begin_anew(self) -> None:
        """Set the live model from the shared state, and forget all local work and the local optimizer's state."""

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """While it is held, no other thread touches the live model; for whoever calls the methods above."""


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one synchronisation. A failure is a value, not an exception.

    Attributes:
        committed: Whether a certified result was applied.
        round: The round in progress afterwards.
        reason: Why not, or how it went, in words.
        contributed: Whether this peer's work is in the result.
        members: Size of the group.
        contributors: How many of them contributed.
        paused: Whether the swarm is below its minimum of peers.
        seconds: Duration of the whole synchronisation.
        matchmaking_seconds: Of which finding a group.
        transfer_seconds: Of which reducing and signing.
    """

    committed: bool
    round: int
    reason: str
    contributed: bool = False
    members: int = 0
    contributors: int = 0
    paused: bool = False
    seconds: float = 0.0
    matchmaking_seconds: float = 0.0
    transfer_seconds: float = 0.0
