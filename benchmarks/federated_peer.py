"""p2ptrain's process in `benchmarks.bench_federated`: one site of a private swarm. The argument is `Options` as JSON.

It says its link, then a line a round.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.answers import say
from benchmarks.federated_task import BATCH, Options, Task
from p2ptrain import Manifest, Swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def main() -> None:
    """Train until the last round."""
    options = Options(**json.loads(sys.argv[1]))
    task = Task(options)
    manifest = Manifest.model_validate({
        "name": "federated",
        "model": {"family": "custom"},
        "data": {"source": "custom"},
        "training": {"every": options.steps, "local_batch": BATCH},
        "averaging": {"codec": options.codec, "aggregation": "mean", "min_peers": 2},
        "private": {"weights": "samples"},
    })  # fmt: skip
    address = options.address
    with Swarm.join(address, listen=LOOPBACK) if address else Swarm.create(manifest, listen=LOOPBACK) as swarm:
        say(link=swarm.link)
        opt = swarm.optimizer(task.model, task.optimizer, site_samples=task.num_samples)
        while opt.round < options.rounds:
            before = opt.round
            task.backward()
            opt.step()
            opt.zero_grad()
            if opt.round != before:
                say(round=opt.round, at=time.monotonic(), accuracy=task.accuracy(opt.round))


if __name__ == "__main__":
    main()
