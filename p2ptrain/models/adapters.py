"""Low-rank adapters on frozen stages (LoRA, Hu et al., 2021), built from peft's layers.

peft's layers wrap a stage's linear layers, in fp32 or int8. Adapters have peft's names in the whole model, whatever the
stages, so `export_adapters` can merge all stages into a folder for peft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.manifest import LoraSpec, ModelSpec
from p2ptrain.models import get_family, whole
from p2ptrain.models.building import deterministic_normal_
from p2ptrain.models.families.layers import Affine
from p2ptrain.models.int8 import Int8Linear
from p2ptrain.models.stage import Stage

if TYPE_CHECKING:
    from peft import LoraConfig

FILE = "adapter_model.safetensors"
_PREFIX, _NAME = "base_model.model.", "default"


def add_adapters(stage: Stage, spec: ModelSpec, lora: LoraSpec) -> None:
    """Put adapters around a stage's target layers, in place, and freeze everything else.

    Initial values depend on names and seed alone. A is nearly normal with peft's standard deviation
    ``(3 * inputs) ** -0.5``, and B is zero. Global generators are unchanged. The stage may be fp32 or int8, on any
    device; without a target layer it is only frozen. ``spec`` is the whole model's. Raises `UsageError` if a target
    names no linear layer of the whole model, or the stage has adapters already.
    """
    adapter_shapes(spec, lora)
    if adapter_parameters(stage):
        raise UsageError("this stage has adapters already")
    stage.requires_grad_(False)
    layers = _targets(stage, lora)
    if not layers:
        return
    from peft import inject_adapter_in_model

    config = _config(lora)
    config._register_custom_module({Int8Linear: _bridge(), Affine: _bridge()})
    inject_adapter_in_model(config, stage, adapter_name=_NAME, low_cpu_mem_usage=True)
    for name, layer in layers.items():
        device = layer.weight.device
        for kind, shape in _shapes(layer, lora).items():
            value = torch.zeros(shape)
            if kind == "lora_A":
                deterministic_normal_(value, (3 * shape[1]) ** -0.5, f"{lora.seed} {_peft_name(name, kind)}")
            stage.get_submodule(f"{name}.{kind}.{_NAME}").weight = nn.Parameter(value.to(device))


def adapter_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """Return a stage's adapters, by peft's names in the whole model."""
    suffixes = tuple(f".{kind}.{_NAME}.weight" for kind in ("lora_A", "lora_B"))
    return {
        _PREFIX + name.replace(f".{_NAME}.weight", ".weight"): parameter
        for name, parameter in stage.named_parameters()
        if name.endswith(suffixes)
    }


def adapter_shapes(spec: ModelSpec, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole model's adapters by name, without building it.

    Raises `UsageError` if a target names no linear layer (a tied head is none: it is the embeddings), and as
    `p2ptrain.models.get_family`.
    """
    with torch.device("meta"):
        model = get_family(spec).stage(spec, whole(spec))
    known = _linear_layers(model)
    for target in lora.targets:
        if not any(_matches(name, [target]) for name in known):
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise UsageError(f"the model has no linear layer {target!r} to adapt; there are {ends}")
    return {
        _peft_name(name, kind): shape
        for name, layer in _targets(model, lora).items()
        for kind, shape in _shapes(layer, lora).items()
    }


def adapter_layer(name: str) -> str:
    """Return the name of the layer that an adapter wraps."""
    return name.removeprefix(_PREFIX).rsplit(".", 2)[0]


def local_adapter_name(name: str) -> str:
    """Return an adapter's name in its stage, from its name in the whole model."""
    layer, kind, _ = name.removeprefix(_PREFIX).rsplit(".", 2)
    return f"{layer}.{kind}.{_NAME}.weight"


def export_adapters(
    values: Mapping[str, torch.Tensor], spec: ModelSpec, lora: LoraSpec, directory: Path, base: str | None = None
) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads; existing files are overwritten.

    Args:
        values: The `adapter_parameters` of all stages together.
        base: Folder or hub name of the model, recorded as the default for peft.

    Raises:
        UsageError: Adapters are missing or foreign; or transformers has no such model, or its module names differ from
            its files, as for ``vit``.
    """
    _check_shapes(values, adapter_shapes(spec, lora))
    family = get_family(spec)
    with torch.device("meta"):
        layers = _targets(family.stage(spec, whole(spec)), lora)
    _check_names(layers, family.hugging_face(spec))
    config = _config(lora)
    config.fan_in_fan_out = any(isinstance(layer, Affine) for layer in layers.values())
    config.task_type = "CAUSAL_LM" if family.reads_text else None
    config.base_model_name_or_path = base
    config.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(directory))
    held = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in values.items()}
    save_file(held, directory / FILE, metadata={"format": "pt"})


def _check_shapes(values: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(values.keys() | shapes.keys()):
        found = list(values[name].shape) if name in values else "missing"
        expected = list(shapes[name]) if name in shapes else "no adapter of this model"
        if found != expected:
            raise UsageError(
                f"what is to be exported: {name} is {found} and should be {expected}; were all stages and settings the"
                " same?"
            )


def _check_names(layers: Mapping[str, Any], settings: Any) -> None:
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, settings.architectures[0])(settings)
    for name in sorted(layers.keys() - dict(model.named_modules()).keys()):
        raise UsageError(f"transformers has no module {name!r} in its {type(model).__name__}: peft could not load this")


def _peft_name(layer: str, kind: str) -> str:
    return f"{_PREFIX}{layer}.{kind}.weight"


def _linear_layers(stage: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in stage.named_modules() if type(layer) in (nn.Linear, Affine, Int8Linear)}


def _targets(stage: nn.Module, lora: LoraSpec) -> dict[str, Any]:
    return {name: layer for name, layer in _linear_layers(stage).items() if _matches(name, lora.targets)}


def _matches(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _shapes(layer: Any, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    return {"lora_A": (lora.rank, layer.in_features), "lora_B": (layer.out_features, lora.rank)}


def _config(lora: LoraSpec) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))  # type: ignore[arg-type]


@cache
def _bridge() -> type[nn.Module]:
    """Return peft's linear adapter, extended to layers that peft does not know."""
    from peft.tuners.lora import Linear

    class Adapted(Linear):
        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
            return module.in_features, module.out_features  # type: ignore[return-value]

    return Adapted
