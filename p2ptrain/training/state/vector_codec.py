"""How a model's vector is encoded: the manifest's codecs, laid over the model's tensors."""

from __future__ import annotations

from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.manifest import AveragingSpec
from p2ptrain.training.state.layout import Layout


def vector_codec(spec: AveragingSpec, layout: Layout) -> Codec:
    """The codec of vectors of this layout: ``spec.codec``, with ``spec.small_tensors`` for small tensors if it is set.

    Raises:
        IncompatibleError: This version lacks one of the codecs.
    """
    codec = get_codec(spec.codec)
    if not spec.small_tensors:
        return codec
    sizes = [entry.num_values for entry in layout.entries]
    return by_size(codec, get_codec(spec.small_tensors), sizes, spec.small_values)
