"""The part of a swarm's view that its manifest and link determine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from p2ptrain.errors import IncompatibleError, UsageError
from p2ptrain.manifest import MAX_PIPELINE_STAGES, Manifest, SignedManifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.progress import round_goal
from p2ptrain.status.views import SwarmView


def swarm_view(signed: SignedManifest, link: SwarmLink, records: Sequence[PeerRecord] = ()) -> SwarmView:
    """Return a swarm's view; arguments and errors are those of `stage_spans`."""
    manifest = signed.manifest
    spans = stage_spans(manifest, records)
    return SwarmView(
        name=manifest.name,
        digest=manifest.digest.hex(),
        link=str(link.plain),
        command=f"p2ptrain join {shlex.quote(str(link.plain))}",
        signer=manifest.organizer,
        manifest=manifest.model_dump(mode="json"),
        protocol=manifest.protocol,
        num_blocks=spans[-1][1],
        group_size=manifest.averaging.group_size,
        max_weight=manifest.averaging.max_weight,
        spans=spans,
        goal=round_goal(manifest),
        missing=what_is_missing(manifest),
    )


def stage_spans(manifest: Manifest, records: Sequence[PeerRecord] = ()) -> tuple[tuple[int, int], ...]:
    """Return each stage's first block and the one after its last; one span for a model that is not cut.

    If this machine does not know the model, its stages have no blocks, (0, 0). ``records`` then tell the number of
    stages, if the manifest leaves it to the model.

    Raises:
        ManifestError: The model cannot be cut as the manifest says.
    """
    pipeline = manifest.pipeline
    if not manifest.in_stages:
        return ((0, manifest.model.layers),)
    if not what_is_missing(manifest):
        from p2ptrain.pipeline.plan import PipelinePlan

        return tuple((span.start, span.stop) for span in PipelinePlan(manifest).spans)
    hosted = max((record.stages[0].unit + 1 for record in records if record.stages), default=0)
    number = min(max(2, hosted), MAX_PIPELINE_STAGES) if pipeline.stages == "auto" else pipeline.stages
    if pipeline.cuts:
        number = len(pipeline.cuts) + 1
    return ((0, 0),) * number if number > 1 else ((0, manifest.model.layers),)


def what_is_missing(manifest: Manifest) -> str:
    """Return why stages are shown without their blocks, for people; empty if blocks are known."""
    if not manifest.in_stages:
        return ""
    from p2ptrain.models import get_family

    try:
        get_family(manifest.model)
    except (IncompatibleError, UsageError) as error:
        return f"stages are shown without their blocks: {error}"
    return ""


def bootstraps(link: SwarmLink) -> list[str]:
    """Return the distinct ids of the peers that a link names."""
    return list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in link.addresses))
