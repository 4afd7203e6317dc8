"""Compare two served versions of a real model that is fine-tuned: values that change, and the size of a patch.

A patch is the exclusive or of two versions, its bytes of one significance side by side, compressed by zlib at level 1.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from benchmarks.findings import Section
from benchmarks.serving_speculation import TEXT
from p2ptrain.models import build_model
from p2ptrain.models.int8 import quantize
from p2ptrain.models.pretrained import describe_pretrained
from p2ptrain.models.tokenizers import load_pretrained_tokenizer
from p2ptrain.training.evaluate import language_model_loss

RATES = (1e-6, 1e-5, 1e-4)
FIRST_STEPS, WINDOW = 3, 64


def patch_bytes(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return the size of the patch from one tensor to another of its dtype and shape."""
    one, other = (each.reshape(-1, 1).numpy().view(np.uint8) for each in (old, new))
    return len(zlib.compress((one ^ other).T.tobytes(), 1))


def compare(old: torch.Tensor, new: torch.Tensor) -> Counter[str]:
    """Return, for a parameter of two versions, the values and unchanged ones by format, and bytes of the patches."""
    formats = {"fp32": (old, new), "bf16": (old.bfloat16(), new.bfloat16())}
    if old.dim() == 2:
        formats["int8"] = quantize(old)[0], quantize(new)[0]
    found: Counter[str] = Counter()
    for name, (one, other) in formats.items():
        found[f"{name} values"] += one.numel()
        found[f"{name} unchanged"] += int((one == other).sum())
        if name != "bf16":
            found[f"{name} bytes"] += one.nbytes
            found[f"{name} patch"] += patch_bytes(one, other)
    return found


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> None:
    """Take a step on each of the ids ``[batches, window + 1]``."""
    for batch in batches:
        optimizer.zero_grad()
        language_model_loss(model, batch[None]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def versions(folder: Path, num_steps: int) -> Section:
    """Fine-tune by AdamW from a folder's model at some learning rates; compare two versions, ``num_steps`` apart."""
    spec = describe_pretrained(str(folder))
    tokenizer = load_pretrained_tokenizer(f"path:{folder}")
    text = "".join(path.read_text() for path in sorted(TEXT.glob("*.md")))
    batches = torch.tensor(tokenizer.encode(text, add_special_tokens=False)).unfold(0, WINDOW + 1, WINDOW)
    section = Section(
        f"Two versions, {num_steps} AdamW steps apart", ("rate", "fp32 kept, %", "bf16", "int8", "patch, fp32", "int8")
    )
    for rate in RATES:
        model = build_model(spec, folder)
        optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.01)
        train(model, optimizer, batches[:FIRST_STEPS])
        before = [each.detach().clone() for each in model.parameters()]
        train(model, optimizer, batches[FIRST_STEPS:][:num_steps])
        total: Counter[str] = Counter()
        for old, new in zip(before, model.parameters(), strict=True):
            total += compare(old, new.detach())
        kept = [
            f"{100 * total[f'{name} unchanged'] / total[f'{name} values']:.2f}" for name in ("fp32", "bf16", "int8")
        ]
        sizes = [f"{total[f'{name} patch'] / total[f'{name} bytes']:.3f}" for name in ("fp32", "int8")]
        section.rows.append((f"{rate:g}", *kept, *sizes))
        section.results[f"{rate:g}"] = dict(total)
    return section
