"""The yardstick's process: a DHT and a ``hivemind.averaging.DecentralizedAverager`` with one fp32 vector.

It may run in a virtual environment of its own, so it imports hivemind, torch, NumPy and, of this project,
`benchmarks.vectors` and `benchmarks.answers` alone. What is timed excludes matchmaking: ``form`` calls
``step(wait=False, require_trigger=True)``, which finds the group and then waits at stage ``AWAITING_TRIGGER``; ``go``
calls ``allow_allreduce()`` and answers once the mean is there. `benchmarks.swarms.HivemindSwarm` is the other end.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import NoCompression, Uniform8BitQuantization, quantization
from hivemind.p2p import P2P

from benchmarks.answers import say
from benchmarks.vectors import initial_vector, quality

CODECS = {"fp32": NoCompression, "int8": Uniform8BitQuantization}
"""By p2ptrain's codec: hivemind's of the same precision. This 8-bit one is its fastest."""
MATCHMAKING_SECONDS = 2.0
"""hivemind's default is 5: a group that is not full waits for so long."""
REQUEST_SECONDS = 1.0
ROUND_SECONDS = 120.0


def patch_decoder() -> None:
    """Let hivemind 1.1.12 decode with NumPy 2.4, where ``int`` of a one-element array is an error.

    The original, with ``.item()``: an int64 codebook size, the codebook, and one index a value.
    """

    def extract(self: Any, serialized_tensor: Any) -> Any:
        data = serialized_tensor.buffer
        size = np.frombuffer(data, count=1, dtype=np.int64).item()
        # Copies only because torch warns of read-only arrays; the codebook has 256 entries.
        codebook = torch.from_numpy(np.frombuffer(data, offset=8, count=size, dtype=self.codebook_dtype).copy())
        indices = np.frombuffer(data, offset=8 + 4 * size, dtype=self.indices_dtype).astype(np.int64)
        decoded = codebook[torch.from_numpy(indices).reshape(tuple(serialized_tensor.size))]
        return decoded.requires_grad_(serialized_tensor.requires_grad)

    quantization.Quantization.extract = extract  # type: ignore[method-assign, unused-ignore]


class Peer:
    """One peer; each method but `close` is a command, and returns its answer.

    Args:
        options: ``index``, ``peers``, ``values``, ``codec``, ``listen`` (a multiaddr), ``initial`` (multiaddrs of the
            first peer), ``min_group`` and ``chunk_seconds`` (how long a silent member is waited for, or None).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        # Sockets go to the parent's folder, not to /tmp: daemons that are killed leave them behind.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
        self._num_peers = options["peers"]
        self._dht = hivemind.DHT(
            initial_peers=options["initial"],
            start=True,
            host_maddrs=[options["listen"]],
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
        )
        self._averager = DecentralizedAverager(
            [initial_vector(options["index"], options["values"])],
            self._dht,
            start=True,
            prefix="baseline",
            target_group_size=options["peers"],
            min_group_size=options["min_group"],
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=REQUEST_SECONDS,
            compression=CODECS[options["codec"]](),
            allreduce_timeout=ROUND_SECONDS,
            next_chunk_timeout=options["chunk_seconds"],
        )
        self._step: Any = None

    def hello(self) -> dict[str, Any]:
        """How to reach this peer, and what it runs on."""
        versions = {"hivemind": hivemind.__version__, "torch": torch.__version__, "numpy": np.__version__}
        return {
            "addresses": [str(address) for address in self._dht.get_visible_maddrs()],
            "versions": {**versions, "python": platform.python_version()},
        }

    def form(self, delay: float, seconds: float) -> dict[str, Any]:
        """Look for a group for so many seconds, after a delay."""
        time.sleep(delay)
        ready = time.monotonic()
        # The timeout is that of the whole step, the wait for the trigger included.
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=seconds + ROUND_SECONDS)
        while self._step.stage != AveragingStage.AWAITING_TRIGGER and not self._step.done():
            if time.monotonic() > ready + seconds:
                self._step.cancel()
                return {"ready": ready, "stood": time.monotonic(), "formed": False}
            time.sleep(0.01)
        return {"ready": ready, "stood": time.monotonic(), "formed": not self._step.done()}

    def go(self) -> dict[str, Any]:
        """Average with the group that `form` found."""
        try:
            self._step.allow_allreduce()
            group = self._step.result(timeout=ROUND_SECONDS)
        except Exception as error:  # hivemind raises what it likes; the parent says what it was.
            return {"failed": f"{type(error).__name__}: {error}"}
        # CLOCK_MONOTONIC is one clock for all processes of a machine.
        return {"finished": time.monotonic(), "members": len(group)}

    def check(self) -> dict[str, Any]:
        """See `quality`."""
        with self._averager.get_tensors() as (result,):
            return quality(result, self._num_peers)

    def close(self) -> None:
        """End the processes that hivemind started."""
        self._averager.shutdown()
        self._dht.shutdown()


def main() -> None:
    """Answer commands on stdin until it closes."""
    patch_decoder()
    peer = Peer(json.loads(sys.argv[1]))
    commands: dict[str, Callable[..., dict[str, Any]]] = {"form": peer.form, "go": peer.go, "check": peer.check}
    say(**peer.hello())
    for line in sys.stdin:
        arguments = json.loads(line)
        say(**commands[arguments.pop("do")](**arguments))
    peer.close()


if __name__ == "__main__":
    main()
