"""Room for what is being received, or waits for its round: bounded as a whole, and for each peer that sends.

What a host has taken on is in its ledger's accounts. Before that a stranger has said no more than how much it is about
to send; so nothing is received that there is no room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2ptrain.pipeline.messages import FullError
from p2ptrain.pipeline.stage.ledger import Limits


class ReceiveBuffer:
    """Accounts of bytes.

    Args:
        limits: As much again as the ledger may keep, and as much of it for one sender.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Held for all."""
        return self._held.total()

    @contextmanager
    def hold(self, sender: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Room for so many bytes, until the end of the block or until the function that it gives is called.

        Raises:
            FullError: There is none now.
        """
        limits, mine = self._limits, self._held[sender]
        if self.num_bytes + num_bytes > limits.max_bytes:
            raise FullError("too much is being sent here: come again, or go to another host")
        if mine and mine + num_bytes > limits.max_share * limits.max_bytes:
            raise FullError("too much of this peer's is on its way here: wait for some of it")
        self._held[sender] += num_bytes
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._held[sender] -= num_bytes
                if not self._held[sender]:
                    del self._held[sender]

        try:
            yield release
        finally:
            release()
