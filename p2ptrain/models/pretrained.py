"""Pretrained models: the location of their files, and their entry in a manifest."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from p2ptrain.errors import ConfigError, ManifestError, TemporaryError, UsageError
from p2ptrain.manifest import DataSpec, Manifest, ModelSpec, explain
from p2ptrain.models import FAMILIES, check_reads_text, get_family, model_blocks
from p2ptrain.models.blocks import Span, stage_shapes, stage_ties
from p2ptrain.models.tokenizers import END_OF_TEXT, byte_tokenizer, load_pretrained_tokenizer
from p2ptrain.progress import Progress, no_progress

CONFIG = "config.json"
NO_SETTINGS: Mapping[str, Any] = {}
MAX_NAMED = 8
"""Tokens that a model's own settings may name to end a text; a session takes 16."""
GENERATION = "generation_config.json"
CONTEXT = 512
"""Default tokens per sample, unless the model has fewer or learned positions."""


def weights_folder(spec: ModelSpec, span: Span, given: Path | None = None, jobs: Progress = no_progress) -> Path | None:
    """Return the folder with the pretrained parameters of a span; None if the model starts from initial values.

    The local folder ``given`` wins over the manifest's source. Only files with parameters of the span are downloaded.

    Raises:
        ConfigError: The files are not available.
        TemporaryError: The hub does not answer.
    """
    if not spec.weights:
        return None
    if given is not None:
        return given
    scheme, _, place = spec.weights.partition(":")
    if scheme != "hub":
        raise ConfigError(not_given("model.weights", spec.weights))
    blocks = model_blocks(spec)
    ties = stage_ties(blocks, span)
    names = {ties.get(name, name) for name in stage_shapes(blocks, span)}
    # The digest check needs whole blocks.
    return _download(place, {name for block in blocks if names & block.shapes.keys() for name in block.shapes}, jobs)


def not_given(key: str, source: str) -> str:
    return (
        f"the swarm's {key} is {source}, which every peer brings: ask its organizer for a copy, and give its folder"
        " with --weights"
    )


def local_data(manifest: Manifest, given: Path | None, allowed: Sequence[Path], own: Path | None = None) -> DataSpec:
    """Return the manifest's data settings with `local_tokenizer`; raise `ConfigError` as it, for the text, too.

    ``own`` is the volunteer's text, for a swarm whose peers each bring theirs.
    """
    source = manifest.data.source
    if (source == "own") != (own is not None):
        raise ConfigError(
            f"--data {own}: this swarm trains on {source}, not on text of each peer's own: leave --data out"
            if own is not None
            else "each peer of this swarm trains on text of its own: name it with --data DIR_OR_FILE"
        )
    if own is not None:
        source = f"path:{own}"
    else:
        _check_allowed("data.source", source, allowed)
    tokenizer = local_tokenizer(manifest, given, allowed)
    return manifest.data.model_copy(update={"source": source, "tokenizer": tokenizer})


def local_tokenizer(manifest: Manifest, given: Path | None, allowed: Sequence[Path]) -> str:
    """Return the manifest's tokenizer, or ``path:…`` of the local folder of the pretrained model whose it is.

    Args:
        given: That folder, as the volunteer gave it.
        allowed: Files and folders that the manifest may name, with all below them.

    Raises:
        ConfigError: Every peer has to supply the tokenizer, and this one did not; or it lies outside ``allowed``.
    """
    name = manifest.data.tokenizer
    if given is not None and name == manifest.model.weights:
        return f"path:{given}"
    if name.startswith("local:"):
        raise ConfigError(not_given("data.tokenizer", name))
    _check_allowed("data.tokenizer", name, allowed)
    return name


def manifest_tokenizer(manifest: Manifest, given: Path | None = None, allowed: Sequence[Path] = ()) -> Any:
    """Return the transformers tokenizer of `local_tokenizer`; raise `UsageError`, too, if the model reads no text."""
    check_reads_text(manifest.model)
    name = local_tokenizer(manifest, given, allowed)
    return byte_tokenizer(manifest.model.context) if name == "bytes" else load_pretrained_tokenizer(name)


def end_marks(manifest: Manifest, own: Mapping[str, Any] = NO_SETTINGS) -> tuple[int, ...]:
    """Return the tokens that end a text, beside the tokenizer's own; the byte tokenizer has none of its own.

    ``own`` are the model's `generation_settings`, which may name some.
    """
    given = own.get("eos_token_id")
    named = given if isinstance(given, list) else [given]
    named = [each for each in named if type(each) is int and 0 <= each < manifest.model.vocabulary][:MAX_NAMED]
    return tuple(dict.fromkeys([END_OF_TEXT, *named] if manifest.data.tokenizer == "bytes" else named))


def generation_settings(manifest: Manifest, given: Path | None = None) -> dict[str, Any]:
    """Return the pretrained model's own generation settings, by transformers' names; empty without such a file.

    ``given`` is the model's local folder.
    """
    from transformers.utils.hub import cached_file

    scheme, _, place = manifest.model.weights.partition(":")
    if manifest.data.tokenizer != manifest.model.weights or (given is None and scheme != "hub"):
        return {}
    name, _, revision = (str(given), "", "") if given is not None else place.partition("@")
    try:
        found = json.loads(Path(str(cached_file(name, GENERATION, revision=revision or None))).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_allowed(key: str, source: str, allowed: Sequence[Path]) -> None:
    """Raise `ConfigError` if the manifest names a path outside ``allowed``, with symlinks resolved."""
    kind, _, name = source.partition(":")
    place = Path(os.path.expanduser(name)).absolute()

    def is_below(folder: Path) -> bool:
        # Names are compared first, so that no place elsewhere is touched, not even to resolve it.
        return place.is_relative_to(folder.absolute()) and place.resolve().is_relative_to(folder.resolve())

    if kind == "path" and not any(map(is_below, allowed)):
        raise ConfigError(
            f"the swarm's {key} is {source!r}, a path on this machine that is not allowed: if you trust the swarm with"
            f" what is there, add --allow-path {shlex.quote(str(place))}; never allow a folder with private files"
        )


def describe_pretrained(source: str, context: int = 0, jobs: Progress = no_progress) -> ModelSpec:
    """Return the manifest entry of a pretrained model.

    Args:
        source: ``hub:OWNER/NAME``, ``hub:OWNER/NAME@REVISION``, or a folder, recorded by its name alone.
        context: Tokens per sample; 0 selects `CONTEXT`, or fewer if the model has fewer.

    Raises:
        ConfigError: It does not exist, or cannot be read.
        ManifestError: This version does not support such a model; the message says why.
        TemporaryError: The hub does not answer.
    """
    from p2ptrain.models.weights import Weights, add_parameter, block_digest

    scheme, _, place = source.partition(":")
    if scheme == "hub":
        folder = _download(place, None, jobs)
        if "@" not in place:  # Pin the newest revision.
            source = f"{source}@{folder.name}"
    elif "://" in source:
        raise UsageError(f"--model {source}: give the folder of a model, or hub:OWNER/NAME")
    else:
        folder = Path(source).expanduser()
        # The manifest must not reveal the organizer's path.
        source = f"local:{re.sub(r'[^a-zA-Z0-9_.-]', '-', folder.absolute().name) or 'model'}"
    spec = _spec_of(folder, context)
    weights, digests = Weights(folder), []
    blocks = model_blocks(spec)
    with jobs("reading the model", "blocks") as advance:
        for block in blocks:
            digest = block_digest()
            for name, shape in block.shapes.items():
                add_parameter(digest, name, weights.read(name, shape))
            digests.append(digest.hexdigest())
            advance(len(digests), len(blocks))
    return ModelSpec.model_validate({**spec.model_dump(), "weights": source, "weight_digests": digests})


def longest_context(folder: Path) -> int:
    """Return the positions for which a pretrained model was made; a manifest's context is that of training samples."""
    from transformers import AutoConfig

    theirs: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return int(get_family(ModelSpec(family=theirs.model_type)).from_hugging_face(theirs).get("context", 0))


def served_context(spec: ModelSpec, given: Path | None, wanted: int) -> int:
    """Return the most positions of a session: those that are wanted, if the model can have them.

    If ``wanted`` is 0, those of a pretrained model itself, which is in the folder ``given``, or of a training sample.
    """
    if not wanted:
        wanted = longest_context(given) if spec.weights and given is not None else spec.context
    return min(wanted, spec.context) if get_family(spec).has_fixed_context else wanted


def _spec_of(folder: Path, context: int) -> ModelSpec:
    """Return a model's settings, if this version computes the same as transformers."""
    from transformers import AutoConfig

    path = folder / CONFIG
    try:
        kind = json.loads(path.read_text())["model_type"]
        theirs: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path} cannot be read: {reason}; is it the folder of a Hugging Face model?") from error
    if kind not in FAMILIES.names():
        known = ", ".join(FAMILIES.names())
        raise ManifestError(f"{folder} holds a model of the family {kind!r}, and this version has {known}")
    family = get_family(ModelSpec(family=kind))
    settings = family.from_hugging_face(theirs)
    longest = settings.get("context", 0)
    if context and not longest:
        raise ManifestError(f"a model of the family {kind!r} has no context: leave --context out")
    if context > longest:
        raise ManifestError(f"a context of {context} tokens is more than this model's, {longest}")
    if context and context < longest and family.has_fixed_context:
        raise ManifestError(f"this model's positions are parameters: its context is {longest} tokens, not {context}")
    if longest and not family.has_fixed_context:
        settings["context"] = context or min(longest, CONTEXT)
    try:
        spec = ModelSpec.model_validate({"family": kind, **settings})
    except ValidationError as error:
        raise ManifestError(explain(error, str(path), ModelSpec)) from error
    ours = family.hugging_face(spec)
    for key in family.only_settings:
        found, only = getattr(theirs, key), getattr(ours, key)
        # Files of other formats are rounded to fp32.
        is_same = math.isclose(found, only, rel_tol=1e-6) if isinstance(found, float) else found == only
        if not is_same:
            raise ManifestError(f"{path}: {key} = {found!r}, and this version computes {only!r} alone")
    return spec


def _download(place: str, names: set[str] | None, jobs: Progress) -> Path:
    """Return the folder of a model from the hub, after downloading its missing files.

    ``place`` is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``. ``names`` None means all files, with settings and tokenizer.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    from p2ptrain.models.weights import INDEX, SINGLE, files_with

    name, _, revision = place.partition("@")

    def get(file: str) -> Path:
        with jobs(f"downloading {file} of {name}", ""):
            return Path(hub.hf_hub_download(name, file, revision=revision or None))

    disable_progress_bars()  # ``jobs`` shows progress.
    try:
        if names is None:
            with jobs(f"downloading {name}", ""):
                patterns = ["*.safetensors", "*.json", "tokenizer*", "*.txt"]
                return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
        try:
            index = get(INDEX)
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                raise
            return get(SINGLE).parent
        for file in sorted(files_with(index, names)):
            get(file)
        return index.parent
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(f"the hub has no model {place!r} for this machine: {_first(error)}") from error
    except LocalEntryNotFoundError as error:
        raise TemporaryError(
            f"{place!r} is not on this machine, and the hub does not answer: try again, or give its folder"
        ) from error
    except HfHubHTTPError as error:
        said = f"{place!r} cannot be downloaded: {_first(error)}"
        if error.response.status_code in (429, *range(500, 600)):
            raise TemporaryError(f"{said}: try again later, or give its folder") from error
        raise ConfigError(said) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place!r} cannot be downloaded: {_first(error)}") from error


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
