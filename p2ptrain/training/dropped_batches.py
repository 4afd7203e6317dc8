"""Batches whose gradient is not finite: dropped before they count, logged, and fatal if there are many.

One bad batch would stay in the inner optimizer's moments for good. Many in a row mean a broken peer. It first resets
its model and inner optimizer; if that does not help, training ends.
"""

from __future__ import annotations

import logging

from p2ptrain.errors import DivergedError

logger = logging.getLogger(__name__)

DROPS_TO_BEGIN_ANEW = 5
"""Consecutive drops after which the live model is reset from the shared state; < `MAX_DROPS`."""
MAX_DROPS = 25
"""Consecutive drops that end training."""


class DroppedBatches:
    """Counts dropped batches; ``in_a_row`` since the last batch that counted."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def note(self, round_: int) -> None:
        """Count and log a dropped batch; raise `DivergedError` for the last of `MAX_DROPS` in a row."""
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= MAX_DROPS:
            raise DivergedError(
                f"the gradients of {self.in_a_row} batches in a row are not finite, though the model was set anew from"
                f" the state of round {round_}: look for bad samples, lower the learning rate, or compute in fp32"
            )
        if self.total & (self.total - 1) == 0:  # Log the first, second, fourth and so on.
            logger.warning(
                "round %d: the gradient of this batch is not finite: it was dropped, and does not count (%d so far);"
                " look for bad samples, or lower the learning rate",
                round_, self.total,
            )  # fmt: skip
