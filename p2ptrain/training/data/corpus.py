"""The swarm's text as tokens: its sources, its encoding, and its held-out part.

Every peer reads the text on its own machine. Peers with equal corpus fingerprints read the same samples for the same
positions (`p2ptrain.training.data.windows`). Sources:

- ``stdlib``: the sources of the Python standard library, without downloads. Only modules of every build of one Python
  version; no tests, no site-packages, and no generated tables, which would lower the held-out loss. Another version of
  Python (or a patched one) has another fingerprint.
- ``path:DIR_OR_FILE``: text files below a folder, or one file.
- ``datasets:OWNER/NAME`` or ``datasets:OWNER/NAME:CONFIG``: the ``text`` column of a Hugging Face data set (needs
  ``datasets``).

Whole documents are held out, so held-out text is never trained on. Each document ends with an end mark: byte 0 for the
byte tokenizer, else the tokenizer's end-of-sequence token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import DataSpec
from p2ptrain.models.tokenizers import END_OF_TEXT
from p2ptrain.progress import Progress, no_progress

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""One-dimensional token ids in the smallest of uint8, uint16 and uint32 that holds them; may be memory-mapped."""

_CACHE_VERSION = 1
_MIN_DOCUMENTS = 50
_MIN_WINDOWS = 16
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages"})
_OPTIONAL_MODULES = frozenset({"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"})
_GENERATED_MODULES = frozenset({"encodings", "msilib", "pydoc_data"})


@dataclass(frozen=True)
class Document:
    """One text, and a name that is the same on every machine."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """Encoded text in two parts that share no document.

    Attributes:
        train: Tokens to train on, ``[num_train_tokens]``.
        held_out: Tokens to measure on, ``[num_held_out_tokens]``.
        fingerprint: SHA-256 over both parts, 32 bytes; equal on two machines exactly if their tokens are.
        vocabulary: Number of tokens in the tokenizer's vocabulary.
    """

    train: Tokens
    held_out: Tokens
    fingerprint: bytes
    vocabulary: int


def load_corpus(
    spec: DataSpec, context: int, vocabulary: int, cache: Path | None = None, jobs: Progress = no_progress
) -> Corpus:
    """Read, encode and split the text that ``spec`` names, or load it from the cache.

    ``cache`` is a folder, created as needed, that processes may share; None for no cache.

    Raises:
        ConfigError: The source or tokenizer is missing or unreadable, the text is empty or too short for several
            windows of ``context`` tokens, or the tokenizer exceeds the model's vocabulary.
    """
    encode, tokenizer_vocabulary = load_tokenizer(spec.tokenizer)
    if tokenizer_vocabulary > vocabulary:
        raise ConfigError(
            f"data.tokenizer {spec.tokenizer!r} has {tokenizer_vocabulary} tokens: "
            f"set model.vocabulary to at least that (it is {vocabulary})"
        )
    entry = None if cache is None else cache / _cache_key(spec)
    corpus = None if entry is None else _read_cache(entry)
    if corpus is None:
        corpus = _build(spec, encode, tokenizer_vocabulary, jobs)
        if entry is not None:
            corpus = _write_cache(entry, corpus)
    for name, part, windows in (("training", corpus.train, _MIN_WINDOWS), ("held-out", corpus.held_out, 1)):
        if len(part) < windows * context + 1:
            raise ConfigError(
                f"data.source {spec.source!r} is too short: {len(part)} {name} tokens, but model.context = {context} "
                f"needs {windows * context + 1}; give more text or a smaller context"
            )
    return corpus


def read_documents(source: str) -> Iterator[Document]:
    """Yield the non-empty documents of ``source``, in the same order on every machine.

    Raises:
        ConfigError: The source is unknown, missing, unreadable, or needs a package that is not installed.
    """
    kind, _, argument = source.partition(":")
    if source == "stdlib":
        return _standard_library()
    if kind == "path":
        return _path(Path(argument).expanduser())
    if kind == "datasets":
        return _data_set(argument)
    raise ConfigError(f"data.source {source!r} is for a script that reads text of its own: run the organizer's script")


def split_documents(documents: list[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Return training and held-out documents, each in order: a pure function of names, sizes, fraction and seed.

    Documents are held out in the order of a seeded hash of their names, up to ``fraction`` of the bytes. A document
    that would overshoot by more than half is skipped. A small number of documents is first cut at line ends into about
    100 pieces, so that one large file works.
    """
    total = sum(len(document.content) for document in documents)
    if len(documents) < _MIN_DOCUMENTS:
        documents = [piece for document in documents for piece in cut(document, max(1, total // (2 * _MIN_DOCUMENTS)))]
    target = total * fraction
    names = [f"held-out {seed} {document.name}" for document in documents]
    order = sorted(range(len(documents)), key=lambda index: hashlib.sha256(names[index].encode()).digest())
    held_out: set[int] = set()
    taken = 0
    for index in order:
        size = len(documents[index].content)
        if taken >= target:
            break
        if taken + size <= 1.5 * target:
            held_out.add(index)
            taken += size
    train = [document for index, document in enumerate(documents) if index not in held_out]
    return train, [documents[index] for index in sorted(held_out)]


def cut(document: Document, size: int) -> Iterator[Document]:
    """Yield contiguous pieces of at least ``size`` bytes (the last may be shorter), cut at line ends where possible."""
    content, start, number = document.content, 0, 0
    while start < len(content):
        newline = content.find(b"\n", start + size - 1, start + 2 * size)
        end = newline + 1 if newline >= 0 else start + size
        yield Document(f"{document.name}#{number}", content[start:end])
        start, number = end, number + 1


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = sys.stdlib_module_names - _OPTIONAL_MODULES - _GENERATED_MODULES
    names = [name for name in _files_below(root, ".py") if name.split("/")[0].removesuffix(".py") in modules]
    if not names:
        raise ConfigError(f"no standard library sources in {root}: set data.source to path:DIR_OR_FILE")
    return _read_files(root, names)


def _path(path: Path) -> Iterator[Document]:
    if path.is_file():
        return _read_files(path.parent, [path.name])
    if path.is_dir():
        return _read_files(path, _files_below(path, ""))
    raise ConfigError(f"data.source or --data: {path} does not exist: give an existing text file or folder")


def _files_below(root: Path, suffix: str) -> list[str]:
    """Return sorted POSIX paths of files relative to ``root``; skip hidden, test and package folders."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS and not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if name.endswith(suffix) and not name.startswith(".")]
    return sorted(found)


def _read_files(root: Path, names: list[str]) -> Iterator[Document]:
    for name in names:
        try:
            content = (root / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"data.source: cannot read {root / name}: {error.strerror}") from error
        if content and 0 not in content:  # A file with a zero byte is not text.
            yield Document(name, content)


def _data_set(argument: str) -> Iterator[Document]:
    from p2ptrain.models.tokenizers import hub_name

    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"data.source datasets:{argument} needs the package 'datasets': run pip install datasets"
        ) from error
    name, _, config = argument.partition(":")
    name = hub_name("data.source", name)
    try:
        rows = datasets.load_dataset(name, config or None, split="train", trust_remote_code=False)
    except Exception as error:  # The library raises errors of many kinds, its own and others'.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"data.source datasets:{argument} cannot be loaded: {reason}") from error
    if "text" not in rows.column_names:
        raise ConfigError(f"data.source datasets:{argument} has no column 'text', only {', '.join(rows.column_names)}")
    return (
        Document(f"{index}", row["text"].replace("\0", "").encode()) for index, row in enumerate(rows) if row["text"]
    )


Encoder = Callable[[bytes], Tokens]
"""Maps the content of one document to its tokens, end mark included."""


def load_tokenizer(name: str) -> tuple[Encoder, int]:
    """Return the encoder of ``data.tokenizer``, and its number of tokens; raise `ConfigError` if it is missing."""
    if name == "bytes":
        return lambda content: np.frombuffer(content + bytes([END_OF_TEXT]), dtype=np.uint8), 256
    from p2ptrain.models.tokenizers import load_pretrained_tokenizer

    tokenizer = load_pretrained_tokenizer(name)
    dtype = _smallest_dtype(len(tokenizer))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(content: bytes) -> Tokens:
        text = content.decode("utf-8", errors="replace")
        return np.asarray(tokenizer.encode(text, add_special_tokens=False, verbose=False) + end, dtype=dtype)

    return encode, len(tokenizer)


def _smallest_dtype(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32


def _build(spec: DataSpec, encode: Encoder, vocabulary: int, jobs: Progress) -> Corpus:
    with jobs("reading the text") as advance:
        documents, num_bytes = [], 0
        for document in read_documents(spec.source):
            documents.append(document)
            num_bytes += len(document.content)
            advance(num_bytes, 0)
    if not documents:
        raise ConfigError(f"data.source {spec.source!r} holds no text: give a file or folder with UTF-8 text")
    dtype = _smallest_dtype(vocabulary)
    encoded_bytes = 0
    # A long job in "bytes" is in the peer's public record, with its size: this one would tell how much text a site has.
    with jobs("turning the text into tokens", "bytes of text") as advance:

        def encoded(document: Document) -> Tokens:
            nonlocal encoded_bytes
            encoded_bytes += len(document.content)
            tokens = encode(document.content)
            advance(encoded_bytes, num_bytes)
            return tokens

        parts = [
            np.concatenate([np.empty(0, dtype), *map(encoded, part)])
            for part in split_documents(documents, spec.held_out_fraction, spec.seed)
        ]
    return Corpus(parts[0], parts[1], _fingerprint(parts[0], parts[1], vocabulary), vocabulary)


def _fingerprint(train: Tokens, held_out: Tokens, vocabulary: int) -> bytes:
    digest = hashlib.sha256(f"p2ptrain corpus {vocabulary} {len(train)} {len(held_out)}".encode())
    for part in (train, held_out):
        digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).view(np.uint8).data)
    return digest.digest()


def _cache_key(spec: DataSpec) -> str:
    """Hash the settings, Python's version, and names, sizes and times of the local files."""
    state: list[Any] = [_CACHE_VERSION, spec.source, spec.tokenizer, spec.held_out_fraction, spec.seed]
    roots = [text.partition(":")[2] for text in (spec.source, spec.tokenizer) if text.startswith("path:")]
    if spec.source == "stdlib":
        state += [sys.version, sysconfig.get_path("stdlib")]
    for root in (Path(root).expanduser() for root in roots):
        for file in [root] if root.is_file() else [root / name for name in _files_below(root, "")]:
            try:
                status = file.stat()
            except OSError:
                continue  # Reading the file will raise the error.
            state.append([str(file.absolute()), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _read_cache(entry: Path) -> Corpus | None:
    """Return the cached corpus, checked against its fingerprint; None if it is missing or damaged."""
    try:
        about = json.loads((entry / "corpus.json").read_text())
        train = np.load(entry / "train.npy", mmap_mode="r", allow_pickle=False)
        held_out = np.load(entry / "held_out.npy", mmap_mode="r", allow_pickle=False)
        vocabulary, fingerprint = int(about["vocabulary"]), bytes.fromhex(about["fingerprint"])
        if _fingerprint(train, held_out, vocabulary) != fingerprint:
            raise ValueError("the fingerprint does not match")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        logger.warning("ignoring the damaged corpus cache %s: %s", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    return Corpus(train, held_out, fingerprint, vocabulary)


def _write_cache(entry: Path, corpus: Corpus) -> Corpus:
    """Cache ``corpus`` in one rename and return it memory-mapped; return ``corpus`` itself if that fails."""
    folder = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".corpus-", dir=entry.parent))
        np.save(folder / "train.npy", corpus.train)
        np.save(folder / "held_out.npy", corpus.held_out)
        about = {"fingerprint": corpus.fingerprint.hex(), "vocabulary": corpus.vocabulary}
        (folder / "corpus.json").write_text(json.dumps(about))
        folder.rename(entry)
    except OSError as error:
        if not entry.is_dir():  # Else another process has cached it first.
            logger.warning("cannot cache the corpus in %s: %s", entry.parent, error)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return _read_cache(entry) or corpus
