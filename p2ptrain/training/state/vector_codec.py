"""The codec of a model's vector: the manifest's codecs, assigned to the model's tensors."""

from __future__ import annotations

from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.manifest import AveragingSpec
from p2ptrain.training.state.layout import Layout


def vector_codec(spec: AveragingSpec, layout: Layout) -> Codec:
    """Return ``spec.codec``, mixed with ``spec.small_tensors`` if set; raise `IncompatibleError` if one is unknown."""
    codec = get_codec(spec.codec)
    if not spec.small_tensors:
        return codec
    sizes = [entry.num_values for entry in layout.entries]
    return by_size(codec, get_codec(spec.small_tensors), sizes, spec.small_values)
