"""Measure the memory that a newcomer takes for a state: ``python -m tests.support.sim.newcomer_memory FOLDER``.

A simulated newcomer downloads a state of about 100 MB from one source in this process. Prints, as JSON, the state's
size and the most memory beyond what there was before: the newcomer's own state counts as there, mapped files do not.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path

import torch

from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

WIDTH = 3500
SAMPLE_SECONDS = 0.002
LINK = LinkModel(latency_seconds=(0.005, 0.02), up_bytes_per_second=50e6, down_bytes_per_second=50e6)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most memory that this process has had since `begin`, sampled on a thread."""

    def __init__(self) -> None:
        self.before = self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def begin(self) -> None:
        self.before = self.most = anonymous_bytes()
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.most = max(self.most, anonymous_bytes())

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most - self.before


async def download(network: SimulatedNetwork, folder: Path) -> dict[str, int]:
    """Let a newcomer, whose state is damaged, take all of it from a source."""
    swarm = SimulatedSwarm(network, make_manifest(), 1)
    peers = [network.add_peer(name) for name in ("source", "newcomer")]
    peers[1].runtime.scratch = folder
    source, newcomer = (SimulatedTrainer(peer, swarm.manifest, swarm.ledger, width=WIDTH) for peer in peers)
    newcomer.state.vector.zero_()
    for trainer in (source, newcomer):
        await trainer.rpc.start()
    peak = Peak()
    peak.begin()
    async with newcomer.sync.catch_up._lend(newcomer.work):
        await newcomer.sync.catch_up._download(source.peer.peer_id, keep_work=False)
    extra = peak.end()
    assert newcomer.state.tree().root == source.sync.head.digest
    num_bytes = sum(tensor.nbytes for _, tensor in newcomer.state.tensors())
    for trainer in (source, newcomer):
        await trainer.close()
    return {"state_bytes": num_bytes, "extra_bytes": extra}


def main() -> None:
    torch.set_num_threads(1)
    told: list[dict[str, int]] = []

    async def run(network: SimulatedNetwork) -> None:
        async with asyncio.timeout(600):
            told.append(await download(network, Path(sys.argv[1])))

    simulate(run, seed=1, model=LINK)
    print(json.dumps(told[0]))  # noqa: T201 - for the test that runs it


if __name__ == "__main__":
    main()
