"""A deterministic network of many peers in one process, in virtual time, from a seed; see `simulate`."""

from __future__ import annotations

from p2ptrain.network.simulated.links import LinkModel
from p2ptrain.network.simulated.loop import SimulationDeadlock, SimulationError, VirtualTimeLoop
from p2ptrain.network.simulated.network import SimulatedNetwork, SimulatedPeer, simulate

__all__ = [
    "LinkModel",
    "SimulatedNetwork",
    "SimulatedPeer",
    "SimulationDeadlock",
    "SimulationError",
    "VirtualTimeLoop",
    "simulate",
]
