"""A script's share of a data set: a torch sampler that goes by the swarm's position in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.utils.data import Sampler

from p2ptrain.training.data.windows import Place, Shares


@dataclass(frozen=True)
class DataPosition:
    """Where a peer stands in the data.

    Attributes:
        round: The round in progress.
        cursor: Positions that the lineage consumed before it.
        place: The peer's place among those that read; None for a newcomer.
        waiting: Samples that the peer has trained on and not contributed.
    """

    round: int
    cursor: int
    place: Place | None
    waiting: int


class SwarmSampler(Sampler[int]):
    """Gives this peer's share of a data set, sample by sample; made by `Swarm.sampler`.

    The swarm goes through the data in passes, each in an order of its own. Peers of one round read every n-th position
    each, from where the lineage stands, so none of them reads what another reads. After a restart a peer goes on where
    the swarm is. A newcomer reads samples drawn at random until it has contributed once.

    A `torch.utils.data.DataLoader` draws in the script's process, with any number of workers. What its workers have
    read ahead (``num_workers * prefetch_factor`` batches) was drawn by the places of that time: while no peer comes or
    goes no sample is read twice in a pass; when one does, at most so many may be, and as many left out.

    One iteration ends after as many samples as the data set has; the next one goes on, and does not begin the pass
    anew.
    ``samples_per_step`` of `Swarm.optimizer` must be the samples of one step, or peers skip or repeat some.
    """

    def __init__(self, num_samples: int, seed: int, peer: str, read: Callable[[], DataPosition]) -> None:
        """
        Args:
            num_samples: Size of the data set, the same on all peers.
            seed: Of the orders, the same on all peers.
            peer: This peer's id.
            read: Returns where this peer stands now.

        Raises:
            ValueError: There are no samples.
        """
        if num_samples < 1:
            raise ValueError("the data set is empty: give the swarm some samples")
        self._shares = Shares(num_samples, seed)
        self._peer = peer
        self._read = read
        self._last: int | None = None
        self._newcomer_round = -1
        self._newcomer_draws = 0

    def __len__(self) -> int:
        """Samples of one iteration: the size of the data set."""
        return self._shares.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield indices of samples, each as late as it is asked for."""
        for _ in range(len(self)):
            yield self._draw()

    def _draw(self) -> int:
        now = self._read()
        if now.place is None:
            if now.round != self._newcomer_round:
                self._newcomer_round, self._newcomer_draws = now.round, now.waiting
            self._newcomer_draws += 1
            return self._shares.of_newcomer(self._peer, now.round, self._newcomer_draws - 1)
        rank, count = now.place
        first = now.cursor + rank
        if self._last is None:
            self._last = first + count * (now.waiting - 1)  # Read before a restart.
        # The first position of this peer's that it has not drawn yet. It may have drawn ahead of the round.
        ahead = max(0, -(-(self._last + 1 - first) // count))
        self._last = first + count * ahead
        return self._shares.at(self._last)
