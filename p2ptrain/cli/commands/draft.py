"""``p2ptrain draft train MODEL --out DIR``

Make a draft of a served model: a model of 2 to 4 layers that guesses its next tokens, for 'p2ptrain generate', 'chat'
and 'serve' with --draft DIR. The hosts check the guesses, so answers stay the same and come sooner over long hops. The
draft learns from the model's own distributions, on a text like those that it will continue. Ctrl-C ends the training;
the best draft so far is in DIR, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch

    from p2ptrain.manifest import ModelSpec
    from p2ptrain.models.stage import Stage
    from p2ptrain.training.distill import Distillation, Progress, Read

MEASURE_SECONDS = 20.0
"""Interval of measurements, each of which keeps the draft if it is the best one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("train",), help="what to do")
    parser.add_argument(
        "model", metavar="MODEL",
        help="the served model: smollm2, a Hugging Face folder ('p2ptrain checkpoint export' writes one), or"
        " hub:OWNER/NAME",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the draft's folder")
    parser.add_argument("--layers", type=int, default=3, choices=(2, 3, 4), help="layers of the draft (default 3)")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE|DIR",
        help="text to learn on (default: the model writes it, which takes longer)",
    )
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="steps to take (default 2000)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples of 128 tokens a step (default 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of samples (default 0)")
    parser.add_argument("--max-minutes", type=float, metavar="N", help="end after this time (default: after --steps)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute (default auto)")


def run(arguments: argparse.Namespace) -> int:
    for name in ("steps", "batch"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} {getattr(arguments, name)}: give a number above 0")
    if not 0 <= arguments.seed < 1 << 63:
        raise UsageError(f"--seed {arguments.seed}: give a number from 0 to 2**63 - 1")
    if arguments.max_minutes is not None and not arguments.max_minutes > 0:
        raise UsageError(f"--max-minutes {arguments.max_minutes}: give a number above 0")
    if arguments.text is not None and not arguments.text.exists():
        raise UsageError(f"--text {arguments.text}: no such file or folder")
    _check_writable(arguments.out)
    import torch

    from p2ptrain.cli.screen.bars import bars
    from p2ptrain.models import build_model, check_reads_text
    from p2ptrain.training.distill import Distillation, draft_spec, freeze_ends

    device = torch.device(_device(arguments.device))
    folder, spec = _served(arguments)
    check_reads_text(spec)
    if spec.layers <= arguments.layers:
        raise UsageError(f"--layers {arguments.layers}: the model has {spec.layers} layers, and a draft has fewer")
    served = build_model(spec, folder, jobs=bars).requires_grad_(False).to(device)
    draft = _beginning(served, spec, arguments)
    freeze_ends(draft, spec)
    read, held_out = _text(served, spec, folder, arguments)
    save = partial(_save, draft, draft_spec(spec, arguments.layers), folder, arguments.out)
    return _train(Distillation(served, draft.to(device), arguments.steps), read, held_out, save, arguments)


def _check_writable(out: Path) -> None:
    """Raise `ConfigError` if `_save` could not write there; it writes beside the folder, and into one that exists."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for folder in (out.parent, out) if out.is_dir() else (out.parent,):
            tempfile.TemporaryDirectory(dir=folder, prefix=f".{out.name}-").cleanup()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: choose a folder that you may write to") from error


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _served(arguments: argparse.Namespace) -> tuple[Path, ModelSpec]:
    """Return the served model's folder and settings, with the context for which it was made."""
    from p2ptrain.cli.running import default_run_dir
    from p2ptrain.cli.screen.bars import bars
    from p2ptrain.models import whole
    from p2ptrain.models.pretrained import describe_pretrained, longest_context, weights_folder
    from p2ptrain.models.smollm2 import NAME, smollm2_folder

    source = str(smollm2_folder(default_run_dir("models"), bars)) if arguments.model == NAME else arguments.model
    spec = describe_pretrained(source, jobs=bars)
    folder = weights_folder(spec, whole(spec), None if source.startswith("hub:") else Path(source).expanduser(), bars)
    assert folder is not None
    if arguments.out.exists() and arguments.out.samefile(folder):
        raise UsageError(f"--out {arguments.out}: that is the model itself; choose another folder")
    return folder, spec.model_copy(update={"context": longest_context(folder)})


def _beginning(served: Stage, spec: ModelSpec, arguments: argparse.Namespace) -> Stage:
    """Return the draft in the output folder, or one of the served model's layers.

    Raises:
        ConfigError: The folder holds something else, or a draft of other settings.
    """
    from p2ptrain.models import build_model
    from p2ptrain.models.pretrained import CONFIG, describe_pretrained, longest_context
    from p2ptrain.training.distill import draft_spec, initial_draft

    out = arguments.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return initial_draft(served, spec, arguments.layers)
    if not (out / CONFIG).is_file():
        raise ConfigError(f"--out {out}: there is something else; choose another folder")
    found = describe_pretrained(str(out))
    found = found.model_copy(update={"weights": "", "weight_digests": [], "context": longest_context(out)})
    if found != draft_spec(spec, arguments.layers):
        raise ConfigError(
            f"--out {out}: that is no draft of {arguments.layers} layers of this model; choose another folder"
        )
    print(f"going on with the draft in {out}", flush=True)
    return build_model(found, out)


def _text(served: Stage, spec: ModelSpec, folder: Path, arguments: argparse.Namespace) -> tuple[Read, torch.Tensor]:
    """Return what reads samples to train on, and the samples to measure on."""
    from p2ptrain.cli.screen.bars import bars
    from p2ptrain.manifest import DataSpec
    from p2ptrain.models.tokenizers import load_pretrained_tokenizer
    from p2ptrain.training.data.corpus import load_corpus
    from p2ptrain.training.distill import HELD_OUT, WINDOW, read_samples, read_text

    tokenizer = f"path:{folder}"
    if arguments.text is None:
        vocabulary = min(spec.vocabulary, len(load_pretrained_tokenizer(tokenizer)))
        print("the model writes the text to learn on; with --text FILE a step takes less time", flush=True)
        return (
            read_samples(served, vocabulary, arguments.seed),
            read_samples(served, vocabulary, arguments.seed + 1)(HELD_OUT),
        )
    source = DataSpec(source=f"path:{arguments.text.absolute()}", tokenizer=tokenizer, held_out_fraction=0.05, seed=1)
    corpus = load_corpus(source, WINDOW, spec.vocabulary, jobs=bars)
    held_out = read_text(corpus.held_out, 1)(min(HELD_OUT, (len(corpus.held_out) - 1) // WINDOW))
    return read_text(corpus.train, arguments.seed), held_out


def _train(
    distillation: Distillation, read: Read, held_out: torch.Tensor, save: Callable[[], None],
    arguments: argparse.Namespace,
) -> int:  # fmt: skip
    """Train until the end or Ctrl-C, and keep the best draft; return the exit code."""
    from p2ptrain.models.weights import SINGLE

    best, began, code = -1.0, time.monotonic(), 0
    seconds = 60 * (arguments.max_minutes or 0.0)
    try:
        for progress in distillation.run(read, held_out, arguments.batch, seconds, MEASURE_SECONDS):
            print(_line(progress, time.monotonic() - began, arguments.steps), flush=True)
            if progress.acceptance > best:
                best = progress.acceptance
                save()
    except KeyboardInterrupt:
        if not (arguments.out / SINGLE).exists():
            raise
        print("interrupted: the same command goes on", flush=True)
        code = 130
    print(
        f"\nThe draft in {arguments.out} guesses {best:.0%} of the tokens right. To use it:\n\n"
        f"  p2ptrain chat LINK --draft {shlex.quote(str(arguments.out))}\n"
    )
    return code


def _line(progress: Progress, seconds: float, steps: int) -> str:
    if not progress.step:
        return f"before the training: acceptance {progress.acceptance:.1%}"
    return (
        f"step {progress.step} of {steps}: acceptance {progress.acceptance:.1%}, divergence {progress.loss:.2f},"
        f" {progress.tokens / seconds:,.0f} tokens/s"
    )


def _save(draft: Stage, spec: ModelSpec, folder: Path, out: Path) -> None:
    """Write the draft's folder, or exchange its weights, in one rename: an interruption leaves the draft before."""
    from p2ptrain.models import export_hugging_face
    from p2ptrain.models.weights import SINGLE

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        made = Path(scratch) / out.name
        export_hugging_face(draft, spec, made, f"path:{folder}")
        if (out / SINGLE).exists():
            (made / SINGLE).replace(out / SINGLE)
        else:
            made.rename(out)
