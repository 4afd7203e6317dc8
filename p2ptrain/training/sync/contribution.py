"""The input of a synchronisation, and its outcome."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.state.layout import Fragment


class Contribution(Protocol):
    """A peer's local work since its last contribution: the live model's side of a synchronisation.

    The caller holds `model_lock`, and calls the methods off the event loop, one at a time. With P fragments a token
    contributes to each fragment in turn, and weighs 1 / P each time. A fragment of None is the whole vector.
    """

    @property
    def model_lock(self) -> AbstractAsyncContextManager[object]:
        """Keeps other threads off the live model; reusable."""

    @property
    def tokens(self) -> int:
        """Tokens of work not contributed yet, over all fragments; 0 if there is nothing to contribute."""

    @property
    def samples(self) -> int:
        """Samples read since the last contribution to any fragment."""

    def tokens_of(self, fragment: Fragment) -> int:
        """Return the weight of a fragment's contribution, in tokens; 0 if there is nothing to contribute."""

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write shared minus live values, or the mean gradient, into ``out`` (fp32, ``[fragment.num_values]``)."""

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the live model from the shared state, which has just changed in ``fragment``.

        Args:
            contributed: True if the state includes the work. Then only work done since stays pending.
            carry: Without ``contributed``: the output of `collect` from before the change, to put on top of the new
                state; None drops the work.
            fragment: The part of the state that changed.
            counted: With ``contributed``: the tokens and samples that the state includes.
        """

    def begin_anew(self) -> None:
        """Set the live model from the shared state; drop all local work and the local optimizer's state."""


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one synchronisation. A failure is a value, not an exception.

    Attributes:
        committed: True if the shared state moved on: a certified result was applied, or this peer caught up.
        round: The round in progress afterwards.
        reason: Why it failed, or a remark.
        contributed: True if the result includes this peer's work.
        members: Size of the group, of which ``contributors`` contributed.
        paused: True if the swarm is below its minimum of peers.
        seconds: Duration, which includes ``matchmaking_seconds``, and ``transfer_seconds`` to reduce and sign.
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
