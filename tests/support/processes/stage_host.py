"""A peer as ``p2ptrain join`` runs it, which says what its stage counts, one JSON object a line.

Run as ``python -m tests.support.processes.stage_host join …``. It says ``done`` with the microbatches that a committed
round of its stage has in it. It obeys one order a line on standard input:

``hold TRAINER``
    Keep the next microbatch of this trainer from its backward pass, and say ``held``; once.
``ledger``
    Say what is kept: microbatches that are not settled, and bytes, by trainer.
"""

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from typing import IO, Any

from p2ptrain.cli.main import main
from p2ptrain.pipeline.messages import Hop, MicrobatchId, Payload
from p2ptrain.pipeline.stage.device import Timed
from p2ptrain.pipeline.stage.gradients import Backward, StageGradients
from p2ptrain.pipeline.stage.host import StageHost


class Watch:
    def __init__(self, told: IO[str]) -> None:
        self._told = told
        self._host: StageHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held_trainer = ""
        self._patch()
        threading.Thread(target=self._listen, daemon=True).start()

    def _patch(self) -> None:
        begin, add, remember = StageHost.__init__, StageGradients.add, StageHost.remember_done

        def beginning(host: StageHost, *arguments: Any) -> None:
            self._host, self._loop = host, asyncio.get_running_loop()
            begin(host, *arguments)

        async def held(gradients: StageGradients, hop: Hop, back: Payload) -> Timed[Backward]:
            if hop.id.trainer == self._held_trainer:
                self._held_trainer = ""
                self._say("held", id=list(hop.id))
                await asyncio.Event().wait()  # Until it is given up.
            return await add(gradients, hop, back)

        def remembering(host: StageHost, round: int, ids: Iterable[MicrobatchId]) -> None:
            done = list(ids)
            self._say("done", round=round, ids=[list(id) for id in done])
            remember(host, round, done)

        StageHost.__init__ = beginning  # type: ignore[method-assign, assignment]
        StageGradients.add = held  # type: ignore[method-assign, assignment]
        StageHost.remember_done = remembering  # type: ignore[method-assign, assignment]

    def _listen(self) -> None:
        for line in sys.stdin:
            match line.split():
                case ["hold", trainer]:
                    self._held_trainer = trainer
                case ["ledger"]:
                    assert self._loop is not None
                    self._loop.call_soon_threadsafe(self._tell_ledger)

    def _tell_ledger(self) -> None:
        assert self._host is not None
        unsettled, held = Counter[str](), Counter[str]()
        for id, entry in self._host.ledger._unsettled.items():
            unsettled[id.trainer] += 1
            held[id.trainer] += entry.num_bytes
        self._say("ledger", unsettled=dict(unsettled), bytes=dict(held))

    def _say(self, event: str, **values: Any) -> None:
        self._told.write(json.dumps({"event": event, **values}) + "\n")
        self._told.flush()


if __name__ == "__main__":
    Watch(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # What the command prints goes to the log.
    sys.exit(main())
