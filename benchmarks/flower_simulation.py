"""Flower's simulation in `benchmarks.bench_simulation`. The argument is `benchmarks.simulation_task.Options` as JSON.

It runs in an environment with ``flwr[simulation]``. Sites are Flower's `ClientApp`, which Ray runs in one actor a core.
An actor loads samples and model once. The server measures after each round, as `p2ptrain simulate` does.
"""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.answers import say
from benchmarks.simulation_task import Options, Trainer

sites = ClientApp()
server = ServerApp()


@lru_cache
def trainer(values: int, folder: str) -> Trainer:
    """Return the one trainer of this process."""
    return Trainer(values, folder)


@sites.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train one site from the server's parameters."""
    config, site = message.content["config"], int(context.node_config["partition-id"])
    own = trainer(config["values"], config["folder"])
    own.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own.train(site, config["steps"])
    metrics = MetricRecord({"num-examples": len(own.trained[site])})
    content = RecordDict({"arrays": ArrayRecord(own.model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Average all sites in each round, and say the accuracy."""
    options = Options(**json.loads(sys.argv[1]))
    own = trainer(options.values, options.folder)

    def measure(round_: int, arrays: ArrayRecord) -> MetricRecord:
        own.model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = own.accuracy()
        if round_:
            say(round=round_, at=time.monotonic(), accuracy=accuracy)
        return MetricRecord({"accuracy": accuracy})

    FedAvg(fraction_evaluate=0.0, min_train_nodes=options.sites, min_available_nodes=options.sites).start(
        grid, ArrayRecord(own.model.state_dict()), options.rounds, evaluate_fn=measure,
        train_config=ConfigRecord({"values": options.values, "folder": options.folder, "steps": options.steps}),
    )  # fmt: skip


def main() -> None:
    """Run all rounds."""
    options = Options(**json.loads(sys.argv[1]))
    ray = {
        "num_cpus": options.cores, "include_dashboard": False, "log_to_driver": False, "_temp_dir": options.folder,
        "_node_ip_address": "127.0.0.1",
    }  # fmt: skip
    backend = {"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, sites, options.sites, backend_config=backend)


if __name__ == "__main__":
    from benchmarks import flower_simulation  # Actors import it by name; what `__main__` has, each call gets anew.

    flower_simulation.main()
