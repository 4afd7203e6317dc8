"""A sample of what a swarm's model has learnt, drawn in this process from its checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch

    from p2ptrain.manifest import Manifest

PROMPT = "\n"
TEMPERATURE = 0.7
"""Of a model without settings of its own: after minutes of training, nonsense has too much probability."""
MAX_TOKENS = 160
BYTES_PER_PARAMETER = 12
"""Memory for a checkpoint, its model and the served copy, all in fp32."""


async def sample(run_dir: Path, name: str, manifest: Manifest, weights: Path | None) -> str:
    """Return text by the newest model of a swarm that ran in ``run_dir``, with a peer of this name.

    Raises:
        P2PTrainError: There is no complete checkpoint, the model reads no text, has adapters, or is too large.
    """
    from p2ptrain.models import num_parameters
    from p2ptrain.models.exact import exact_stage
    from p2ptrain.models.pretrained import end_marks, generation_settings, manifest_tokenizer
    from p2ptrain.models.stage import Stage
    from p2ptrain.pipeline.measure import available_memory
    from p2ptrain.serving.client.draft import Draft, Guesses
    from p2ptrain.serving.sampling import default_sampling
    from p2ptrain.serving.text import Text

    if manifest.lora is not None:
        raise UsageError("the swarm trained adapters alone")
    if num_parameters(manifest.model) * BYTES_PER_PARAMETER > available_memory():
        raise ResourceError("the model is too large to load beside what runs here")
    tokenizer = manifest_tokenizer(manifest, weights, [Path("/")])  # It is the user's own manifest.
    own = generation_settings(manifest, weights)
    text, model = Text(tokenizer, end_marks(manifest, own)), await asyncio.to_thread(_load, run_dir, name, manifest)
    assert isinstance(model, Stage)
    ids, drawn = text.encode(PROMPT), list[int]()
    most = min(MAX_TOKENS, manifest.model.context - len(ids))
    draft = Draft(exact_stage(model, manifest.model), manifest.model.context)
    sampling = default_sampling({"temperature": TEMPERATURE} | own)
    guesses = Guesses(draft, sampling, len(ids), len(ids) + most)
    while len(drawn) < most and text.end_ids.isdisjoint(drawn):
        drawn += await asyncio.to_thread(guesses.follow, [*ids, *drawn], 1)
    return text.decode(drawn)


def _load(run_dir: Path, name: str, manifest: Manifest) -> torch.nn.Module:
    from p2ptrain.cli.checkpoints import find_checkpoints, find_stage_checkpoints, read_model
    from p2ptrain.cli.stage_export import read_stages
    from p2ptrain.models import build_model

    if not manifest.in_stages:
        return read_model(find_checkpoints(run_dir / name)[-1])
    model = build_model(manifest.model)
    model.load_state_dict(read_stages(find_stage_checkpoints(run_dir), manifest, by_round=False)[0])
    return model
