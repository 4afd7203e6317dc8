"""A torch sampler of a script's share of a data set, by the swarm's position in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.utils.data import Sampler

from p2ptrain.training.data.windows import Place, SampleOrder


@dataclass(frozen=True)
class DataPosition:
    """A peer's position in the data.

    Attributes:
        round: The round in progress.
        cursor: Positions that the lineage consumed before this round.
        place: The peer's place among the readers; None for a newcomer.
        waiting: Samples that the peer has trained on and not contributed.
    """

    round: int
    cursor: int
    place: Place | None
    waiting: int


class SwarmSampler(Sampler[int]):
    """Yields this peer's share of a data set, sample by sample; made by `Swarm.sampler`.

    The swarm reads the data in passes, each in an order of its own. The n peers of a round read every n-th position
    each, from the lineage's cursor, so their samples do not overlap. After a restart a peer resumes at the swarm's
    position. A newcomer reads random samples until it has contributed once.

    The workers of a `torch.utils.data.DataLoader` read ``num_workers * prefetch_factor`` batches ahead. While
    membership is stable no sample is read twice in a pass. When a peer joins or leaves, at most the samples read ahead
    are read twice, and as many skipped.

    One iteration ends after as many samples as the data set has; the next one continues the pass. ``samples_per_step``
    of `Swarm.optimizer` must be the samples of one step, or peers skip or repeat some.
    """

    def __init__(self, num_samples: int, seed: int, peer: str, read: Callable[[], DataPosition]) -> None:
        """Make the sampler of one peer; raise `ValueError` if there are no samples.

        ``num_samples`` and ``seed``, which selects the orders, are the same on all peers. ``read`` returns this peer's
        present position.
        """
        if num_samples < 1:
            raise ValueError("the data set is empty: give the swarm some samples")
        self._order = SampleOrder(num_samples, seed)
        self._peer = peer
        self._read = read
        self._last: int | None = None
        self._newcomer_round = -1
        self._newcomer_draws = 0

    def __len__(self) -> int:
        return self._order.num_samples

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield self._draw()

    def _draw(self) -> int:
        now = self._read()
        if now.place is None:
            if now.round != self._newcomer_round:
                self._newcomer_round, self._newcomer_draws = now.round, now.waiting
            self._newcomer_draws += 1
            return self._order.of_newcomer(self._peer, now.round, self._newcomer_draws - 1)
        rank, count = now.place
        first = now.cursor + rank
        if self._last is None:
            self._last = first + count * (now.waiting - 1)  # Read before a restart.
        # This peer's next position; it may have drawn ahead of the round.
        ahead = max(0, -(-(self._last + 1 - first) // count))
        self._last = first + count * ahead
        return self._order.at(self._last)
