"""Flower's processes in `benchmarks.bench_federated`: the server, or one site. The argument is `Options` as JSON.

It runs in an environment with Flower. These are Flower's oldest calls, which its documentation calls deprecated: one
process for the server and for each site, and one connection between the two. Its newer daemons start more processes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.compat.client.app import start_numpy_client
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from benchmarks.answers import say
from benchmarks.federated_task import Options, Task


class Strategy(FedAvg):  # type: ignore[misc]
    """Begins with all sites, and then goes on with those that are left."""

    def aggregate_fit(self, *results: Any) -> Any:
        """See `FedAvg`."""
        self.min_available_clients = self.min_fit_clients = 2
        return super().aggregate_fit(*results)


class Site(NumPyClient):  # type: ignore[misc]
    """One site."""

    def __init__(self, options: Options) -> None:
        self._task, self._steps, self._round = Task(options), options.steps, -1

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Take on the server's parameters, and train."""
        task = self._task
        with torch.no_grad():
            for own, theirs in zip(task.model.parameters(), parameters, strict=True):
                own.copy_(torch.from_numpy(theirs))
        self._round += 1
        if self._round:
            say(round=self._round, at=time.monotonic(), accuracy=task.accuracy(self._round))
        for _ in range(self._steps):
            task.backward()
            task.optimizer.step()
            task.optimizer.zero_grad()
        return [each.detach().numpy() for each in task.model.parameters()], task.num_samples, {}


def main() -> None:
    """Serve, or train until the server ends."""
    options = Options(**json.loads(sys.argv[1]))
    if options.site >= 0:
        start_numpy_client(server_address=options.address, client=Site(options))
        return
    initial = [each.detach().numpy() for each in Task(options).model.parameters()]
    strategy = Strategy(
        min_fit_clients=options.sites, min_available_clients=options.sites, fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(initial),
    )  # fmt: skip
    start_server(server_address=options.address, config=ServerConfig(num_rounds=options.rounds + 1), strategy=strategy)


if __name__ == "__main__":
    main()
