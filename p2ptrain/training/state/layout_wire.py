"""A layout as it is told to peers that have no model: auxiliaries (`p2ptrain.averaging.lending.auxiliary`).

What a trainer tells need not be true. The fingerprint is computed from it here, and leaders take no auxiliary whose
fingerprint is not that of the members' tickets.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from p2ptrain.averaging.lending.auxiliary import Plan
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import Manifest
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.training.state.fragments import Fragments
from p2ptrain.training.state.layout import Entry, Layout
from p2ptrain.training.state.vector_codec import vector_codec

CALL = "layout.describe"
CALL_SECONDS = 10.0
MAX_REPLY_BYTES = 4 << 20
MAX_ENTRIES = 1 << 16
MAX_NAME_CHARS = 512
MAX_RULE_CHARS = 1 << 20
MAX_DIMENSIONS = 16
MAX_VALUES = 1 << 42


def serve_layout(rpc: Rpc, layout: Layout) -> None:
    """Tell whoever asks what the model's vector looks like."""

    async def describe(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"entries": layout_to_wire(layout), "rule": layout.rule}

    rpc.serve(CALL, describe)


async def fetch_plan(rpc: Rpc, peer: str, manifest: Manifest) -> Plan:
    """Ask a trainer for the layout; returns what an auxiliary has to know of the model.

    Raises:
        PeerError, DeadlineError: It failed.
        IntegrityError: It sent no layout, or none that fits the manifest.
    """
    reply = await rpc.call(peer, CALL, {}, CALL_SECONDS, max_reply_bytes=MAX_REPLY_BYTES)
    layout = layout_from_wire(reply.get("entries"), reply.get("rule"))
    try:
        fragments = Fragments(layout, manifest.training.fragments)
    except ValueError as error:
        raise IntegrityError(f"a layout does not fit the manifest: {error}") from error
    codecs = [vector_codec(manifest.averaging, fragment.layout) for fragment in fragments]
    return Plan(layout.fingerprint, codecs, [fragment.num_values for fragment in fragments])


def layout_to_wire(layout: Layout) -> list[Any]:
    """Plain values: what the fingerprint is made of."""
    return [[e.kind, e.name, list(e.shape), str(e.dtype).removeprefix("torch.")] for e in layout.entries]


def layout_from_wire(values: Any, rule: Any = "") -> Layout:
    """Check and rebuild what `layout_to_wire` made.

    Raises:
        IntegrityError: It is malformed, or larger than any model.
    """
    if not (isinstance(values, list) and 0 < len(values) <= MAX_ENTRIES):
        raise IntegrityError("a layout has an impossible number of tensors")
    if not (type(rule) is str and len(rule) <= MAX_RULE_CHARS):
        raise IntegrityError("a layout has no rule, or one that is too long")
    entries: list[Entry] = []
    for value in values:
        entries.append(_entry(value, entries[-1].end if entries else 0))
        if entries[-1].end > MAX_VALUES:
            raise IntegrityError("a layout is larger than any model")
    kinds = [entry.kind for entry in entries]
    named = {(entry.kind, entry.name) for entry in entries}
    if kinds != sorted(kinds, key=lambda kind: kind != "param") or kinds[0] != "param" or len(named) < len(entries):
        raise IntegrityError("a layout does not have parameters first, each tensor once")
    return Layout(tuple(entries), rule)


def _entry(value: Any, offset: int) -> Entry:
    if not (isinstance(value, list) and len(value) == 4):
        raise IntegrityError("a layout is malformed")
    kind, name, shape, dtype_name = value
    dtype = getattr(torch, dtype_name, None) if type(dtype_name) is str else None
    if not (
        kind in ("param", "buffer")
        and type(name) is str
        and len(name) <= MAX_NAME_CHARS
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= MAX_VALUES for size in shape)
        and isinstance(dtype, torch.dtype)
        and math.prod(shape) <= MAX_VALUES
    ):
        raise IntegrityError("a layout has fields out of range")
    return Entry(name, tuple(shape), dtype, kind, offset)
