"""A text that is dealt to the sites of a private swarm on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import Manifest
from p2ptrain.models.pretrained import local_data
from p2ptrain.training.data.corpus import cut, load_corpus, read_documents
from p2ptrain.training.simulation.partition import partition

PIECE_BYTES = 4096
"""Least size of a sample that is dealt; it ends with its line."""


def label_documents(names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return a number for each document: that of its first folder, or of the document if all lie in one folder."""
    folders = [name.split("/")[0] for name in names]
    return np.unique(np.array(folders if len(set(folders)) > 1 else names), return_inverse=True)[1]


def deal_text(
    manifest: Manifest, source: str, form: str, files: Sequence[Path], weights: Path | None, allowed: Sequence[Path]
) -> None:
    """Write one file for each site with its part of ``source``; each piece of the text is in one file.

    Args:
        form: See `partition`, whose seed is the manifest's ``data.seed``.
        weights: See `local_data`, as for ``allowed``.

    Raises:
        ConfigError: The text cannot be read, or the smallest part is too short to train on.
        UsageError: The form is unknown, or there are fewer pieces than the sites need.
    """
    documents = list(read_documents(source))
    pieces = [list(cut(document, PIECE_BYTES)) for document in documents]
    labels = np.repeat(label_documents([document.name for document in documents]), list(map(len, pieces)))
    contents = [piece.content for of_document in pieces for piece in of_document]
    for file, part in zip(files, partition(form, labels, len(files), manifest.data.seed), strict=True):
        file.write_bytes(b"".join(contents[index] for index in sorted(part)))
    smallest = min(files, key=lambda file: file.stat().st_size)
    try:
        spec = local_data(manifest, weights, allowed, smallest)
        load_corpus(spec, manifest.model.context, manifest.model.vocabulary)
    except ConfigError as error:
        raise ConfigError(f"{error}; the sites share {source!r}: fewer --peers or another --partition help") from error
