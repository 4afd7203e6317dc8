"""The task that sites train: a model, samples with labels to deal them by, a loss and a metric."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from p2ptrain.errors import ConfigError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.models import build_model, check_reads_text, whole
from p2ptrain.models.pretrained import weights_folder
from p2ptrain.training.data.corpus import load_tokenizer, read_documents
from p2ptrain.training.evaluate import language_model_loss, window_losses
from p2ptrain.training.simulation.texts import label_documents

FUNCTION = "task"


@dataclass(frozen=True)
class Task:
    """The model and data of all sites.

    Attributes:
        samples: Tensors of equal first dimension, such as inputs and labels; a batch is a row selection of each.
        labels: By which `partition` deals the samples, ``[num_samples]``.
        loss: Called with the model and a batch; returns the mean.
        metric: Called with the model and a batch without gradients; returns one value for each sample, ``[batch]``.
        metric_name: At most 32 characters.
        optimizer: Makes a site's optimizer; None for the manifest's AdamW.
    """

    model: nn.Module
    samples: tuple[torch.Tensor, ...]
    labels: npt.NDArray[np.integer]
    loss: Callable[..., torch.Tensor]
    metric: Callable[..., torch.Tensor]
    metric_name: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


def classification(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Task:
    """Return the task of a classifier: cross-entropy, and accuracy on held-out samples.

    Args:
        model: Inputs ``[batch, ...]`` to logits ``[batch, classes]``.
        inputs: ``[num_samples, ...]``.
        labels: Class numbers, int64, ``[num_samples]``.
    """

    def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_batch: torch.Tensor = functional.cross_entropy(model(inputs), labels)
        return of_batch

    def is_right(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        right: torch.Tensor = model(inputs).argmax(-1) == labels
        return right.float()

    return Task(model, (inputs, labels), labels.numpy(), loss, is_right, "accuracy")


def text_task(manifest: Manifest, source: str) -> Task:
    """Return the task of the manifest's language model on a text, cut into windows of its context.

    A window's label is the first folder of the document in which it begins, or the document where there is no second
    folder.

    Raises:
        ConfigError: The text cannot be read, is too short, or does not fit the model's vocabulary.
        UsageError: The model does not read text.
    """
    spec, context = manifest.model, manifest.model.context
    check_reads_text(spec)
    encode, vocabulary = load_tokenizer(manifest.data.tokenizer)
    if vocabulary > spec.vocabulary:
        raise ConfigError(f"the tokenizer has {vocabulary} tokens: set model.vocabulary to at least that")
    documents = list(read_documents(source))
    tokens = [encode(document.content) for document in documents]
    text = np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64)
    starts = np.arange(0, len(text) - context, context)
    if not len(starts):
        raise ConfigError(f"{source} has {len(text)} tokens, too few for a context of {context}: give more text")
    owners = np.searchsorted(np.cumsum([len(each) for each in tokens]), starts, side="right")
    labels = label_documents([document.name for document in documents])[owners]
    windows = torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]))
    model = build_model(spec, weights_folder(spec, whole(spec)))
    return Task(model, (windows,), labels, language_model_loss, window_losses, "loss")


def script_task(path: Path, manifest: Manifest) -> Task:
    """Return what ``task(manifest)`` of a script returns.

    Raises:
        UsageError: The file cannot be loaded, has no such function, or the function returns no `Task`.
    """
    if not path.is_file():
        raise UsageError(f"--script {path}: there is no such file")
    try:
        function = runpy.run_path(str(path)).get(FUNCTION)
        task = function(manifest) if callable(function) else None
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"--script {path}: {error}: correct the script, or install what it imports") from error
    if not isinstance(task, Task):
        raise UsageError(f"--script {path}: define {FUNCTION}(manifest) to return a Task; see docs/how-to/simulate.md")
    return task
