"""Tokenizers of a manifest's ``data.tokenizer``, in transformers' form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError

END_OF_TEXT = 0
"""The byte tokenizer's end mark; text has no zero bytes."""


def load_pretrained_tokenizer(name: str) -> Any:
    """Return the transformers tokenizer of ``path:DIR`` or ``hub:OWNER/NAME[@REVISION]``; raises `ConfigError`."""
    kind, _, place = name.partition(":")
    if kind not in ("path", "hub") or not place:
        raise ConfigError(f"unknown data.tokenizer {name!r}: use bytes, path:DIR or hub:OWNER/NAME")
    folder = Path(place).expanduser()
    if kind == "path" and not folder.is_dir():
        raise ConfigError(f"data.tokenizer: {folder} is not a folder: give the folder of a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        if kind == "path":
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        repository, _, revision = place.partition("@")
        repository = hub_name("data.tokenizer", repository)
        return AutoTokenizer.from_pretrained(repository, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"data.tokenizer: {place} holds no usable tokenizer: {reason}") from error


def hub_name(key: str, name: str) -> str:
    """Return the name of a hub's repository; raise `ConfigError` if a loader would read a local folder instead."""
    if Path(name).exists():
        raise ConfigError(
            f"{key}: {name!r} is to come from the hub, but a folder here has that name: start in another folder"
        )
    return name


def byte_tokenizer(context: int) -> Any:
    """Return a transformers tokenizer with 256 tokens: token ``i`` is byte ``i`` of the text's UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, model_max_length=context, clean_up_tokenization_spaces=False
    )


def byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers (the table of GPT-2's ``encoder.py``).

    Printable Latin-1 maps to itself; the other bytes map to the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
