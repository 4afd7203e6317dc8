"""Follow the head of a simulated peer's state."""

from collections.abc import Callable

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.training.sync.replica import Replica


def watch_head(replica: Replica, watch: Callable[[], None]) -> None:
    """Call ``watch`` after each change of a replica's head."""
    move = replica._set_head

    def move_and_watch(head: Head) -> None:
        move(head)
        watch()

    replica._set_head = move_and_watch  # type: ignore[method-assign]
