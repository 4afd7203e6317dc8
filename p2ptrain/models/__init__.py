"""Model families: a manifest's model to an ``nn.Module``, its size, and its Hugging Face form."""

from p2ptrain.models.registry import (
    build_model,
    estimate_memory_bytes,
    export_hugging_face,
    model_families,
    num_parameters,
)

__all__ = ["build_model", "estimate_memory_bytes", "export_hugging_face", "model_families", "num_parameters"]
