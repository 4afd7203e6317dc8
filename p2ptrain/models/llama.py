"""The Llama family, from transformers' own blocks (Touvron et al., *LLaMA*, 2023), so that exports load anywhere.

Initial parameters come from integers alone (`deterministic_normal_`), because torch's normal generator gives other bits
on a CPU with other vector instructions, and peers must start from equal bits.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import ModelSpec

_EMBEDDING_STD = 0.02
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def config(spec: ModelSpec) -> LlamaConfig:
    """The transformers configuration of ``spec``."""
    return LlamaConfig(
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.context,
        tie_word_embeddings=spec.tied_embeddings,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def build(spec: ModelSpec) -> LlamaForCausalLM:
    """See `p2ptrain.models.registry.build_model`."""
    settings = config(spec)
    settings._attn_implementation = "sdpa"  # 12% faster than eager on a CPU
    with torch.random.fork_rng(devices=[]):  # the constructor draws initial values that are replaced below
        model = LlamaForCausalLM(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # norms stay at 1
                deterministic_normal_(parameter, _initial_std(name, parameter, spec), f"{spec.initial_seed} {name}")
    model.train()
    return model


def _initial_std(name: str, parameter: torch.Tensor, spec: ModelSpec) -> float:
    """0.02 for embeddings, ``fan_in ** -0.5`` for linear layers, less for those that write to the residual stream.

    The last is GPT-2's ``1 / sqrt(2 * layers)`` (Radford et al., 2019, section 2.3).
    """
    if "embed_tokens" in name or "lm_head" in name:
        return _EMBEDDING_STD
    std = 1 / math.sqrt(parameter.shape[1])
    return std / math.sqrt(2 * spec.layers) if name.endswith(_RESIDUAL_OUTPUTS) else std


def deterministic_normal_(parameter: torch.Tensor, std: float, key: str) -> None:
    """Fill a contiguous fp32 CPU tensor in place with nearly normal values of mean 0 that depend on ``key`` alone.

    Each value is a sum of four 16-bit integers from Philox (whose stream NumPy keeps stable across versions), so it
    lies within 3.5 ``std``; there is one rounding, in the multiplication at the end, which IEEE 754 defines.
    """
    seed = int.from_bytes(hashlib.sha256(f"initial {key}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=seed).random_raw(parameter.numel()).astype("<u8", copy=False)
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32) - 2 * 65535
    variance = 4 * (65536**2 - 1) / 12  # of four independent uniform integers below 65536
    values = sums.astype(np.float32) * np.float32(std / variance**0.5)
    parameter.copy_(torch.from_numpy(values).view(parameter.shape))


def export(model: nn.Module, spec: ModelSpec, directory: Path, tokenizer: str) -> None:
    """See `p2ptrain.models.registry.export_hugging_face`."""
    exporter = load_tokenizer(tokenizer, spec.context)
    settings = config(spec)
    settings.architectures = ["LlamaForCausalLM"]
    settings.dtype = torch.float32
    # the byte tokenizer has no special tokens, but documents end with byte 0 (`p2ptrain.training.text`)
    settings.eos_token_id = 0 if tokenizer == "bytes" else exporter.eos_token_id
    state = {
        name: value.detach().to("cpu", torch.float32).contiguous()
        for name, value in model.state_dict().items()
        if not (spec.tied_embeddings and name == "lm_head.weight")
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    settings.save_pretrained(directory)
    GenerationConfig.from_model_config(settings).save_pretrained(directory)
    exporter.save_pretrained(directory)


def load_tokenizer(name: str, context: int) -> Any:
    """The transformers tokenizer of a manifest's ``data.tokenizer``.

    Raises:
        ConfigError: It cannot be read.
    """
    if name == "bytes":
        return byte_tokenizer(context)
    from transformers import AutoTokenizer

    folder = Path(name.removeprefix("path:")).expanduser()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"data.tokenizer: {folder} holds no usable tokenizer: {reason}") from error


def byte_tokenizer(context: int) -> Any:
    """A transformers tokenizer with 256 tokens: token ``i`` is byte ``i`` of the text's UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, model_max_length=context, clean_up_tokenization_spaces=False
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (the table of GPT-2's ``encoder.py``).

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
