"""A deterministic network of many peers in one process, in virtual time, from a seed; see `simulate`."""

from __future__ import annotations

from p2ptrain.network.simulated.directory import SimulatedDirectory
from p2ptrain.network.simulated.links import LinkModel
from p2ptrain.network.simulated.loop import SimulationDeadlock, SimulationError, VirtualTimeLoop
from p2ptrain.network.simulated.network import SimulatedNetwork, SimulatedPeer, SimulatedSigner, simulate
from p2ptrain.network.simulated.transport import SimulatedTransport

__all__ = [
    "LinkModel",
    "SimulatedDirectory",
    "SimulatedNetwork",
    "SimulatedPeer",
    "SimulatedSigner",
    "SimulatedTransport",
    "SimulationDeadlock",
    "SimulationError",
    "VirtualTimeLoop",
    "simulate",
]
