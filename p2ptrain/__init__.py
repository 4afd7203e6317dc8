"""Train and serve one model on volunteers' machines, over the internet.

::

    from p2ptrain import Swarm

    with Swarm.join(link) as swarm:
        opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 3e-4))

Public names are imported at first use: ``import p2ptrain`` alone loads neither torch nor the network.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from p2ptrain._version import __version__

if TYPE_CHECKING:
    from p2ptrain.errors import P2PTrainError
    from p2ptrain.manifest import LoraSpec, Manifest, SignedManifest
    from p2ptrain.network.records.evaluation import pooled
    from p2ptrain.node.swarm import Swarm
    from p2ptrain.training.checkpoints import SavePolicy

__all__ = ["LoraSpec", "Manifest", "P2PTrainError", "SavePolicy", "SignedManifest", "Swarm", "__version__", "pooled"]

_HOMES = {
    "LoraSpec": "p2ptrain.manifest",
    "Manifest": "p2ptrain.manifest",
    "P2PTrainError": "p2ptrain.errors",
    "SavePolicy": "p2ptrain.training.checkpoints",
    "SignedManifest": "p2ptrain.manifest",
    "Swarm": "p2ptrain.node.swarm",
    "pooled": "p2ptrain.network.records.evaluation",
}


if not TYPE_CHECKING:  # Else every name would be `Any` to a type checker.

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'p2ptrain' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
