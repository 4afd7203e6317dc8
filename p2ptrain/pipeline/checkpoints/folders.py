"""Where a host keeps what it saves of a stage, in a run directory's folder of checkpoints."""

from __future__ import annotations

TIED_FOLDER = "tied"
"""Of what two stages share, beside those of stages."""


def stage_folder(stage: int) -> str:
    """The folder of a stage."""
    return f"stage-{stage}"


def unit_folder(unit: int, num_stages: int) -> str:
    """The folder of a unit; see `p2ptrain.pipeline.plan.Unit`."""
    return stage_folder(unit) if unit < num_stages else TIED_FOLDER
