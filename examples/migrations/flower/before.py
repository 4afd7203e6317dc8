"""Two spirals with Flower: a ServerApp and two NumPyClients, simulated on this machine.

python before.py
"""

from typing import Any

import torch
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ROUNDS = 10


def spirals(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two spirals, ``[size, 2]``, and the spiral of each, ``[size]``."""
    label = torch.randint(0, 2, (size,))
    angle = 6.0 * torch.rand(size).sqrt()
    turn = angle + torch.pi * label
    return torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6.0, label


def make_model() -> nn.Module:
    """Return a network that tells the spirals apart."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def weights_of(model: nn.Module) -> list[Any]:
    """Return the model's tensors as arrays."""
    return [value.numpy() for value in model.state_dict().values()]


class Site(NumPyClient):
    """A site with points of its own."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.train, self.held_out = TensorDataset(*spirals(640)), spirals(128)
        self.model = make_model()

    def set_weights(self, weights: list[Any]) -> None:
        """Take on the server's weights."""
        names = self.model.state_dict().keys()
        self.model.load_state_dict({name: torch.tensor(each) for name, each in zip(names, weights, strict=True)})

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Train for one epoch."""
        self.set_weights(parameters)
        opt = torch.optim.AdamW(self.model.parameters(), 1e-2)
        for points, label in DataLoader(self.train, batch_size=32, shuffle=True):
            cross_entropy(self.model(points), label).backward()
            opt.step()
            opt.zero_grad()
        return weights_of(self.model), len(self.train), {}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Measure the loss on points that the site held out."""
        self.set_weights(parameters)
        points, label = self.held_out
        with torch.no_grad():
            loss = cross_entropy(self.model(points), label)
        return float(loss), len(label), {}


def client_fn(context: Context) -> Client:
    """Make the site of one node."""
    return Site(int(context.node_config["partition-id"])).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    """Make the server."""
    strategy = FedAvg(min_available_clients=2, initial_parameters=ndarrays_to_parameters(weights_of(make_model())))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


if __name__ == "__main__":
    run_simulation(ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn), num_supernodes=2)
