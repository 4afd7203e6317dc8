"""The model card of an export: ``README.md`` in Hugging Face's form (https://huggingface.co/docs/hub/model-cards).

It holds facts of the manifest, the checkpoint's heads and the peers' metrics, and leaves out what these do not tell.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain._version import __version__
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.disk import replace_file
from p2ptrain.errors import CheckpointError
from p2ptrain.manifest import Manifest
from p2ptrain.models import get_family, num_parameters
from p2ptrain.monitor.report import METRICS, Line, read_lines
from p2ptrain.network.records.evaluation import CONFIDENCE
from p2ptrain.status.formats import human_count
from p2ptrain.training.checkpoints.files import CheckpointInfo, describe_checkpoint

CARD_FILE = "README.md"
MAX_NAMED_PEERS = 100


@dataclass(frozen=True)
class Exported:
    """The model of one round.

    Attributes:
        heads: By stage folder, or one under an empty name for a model that is not cut.
        earlier: Heads of earlier checkpoints: a member that left in good order is in their tables alone.
    """

    manifest: Manifest
    heads: Mapping[str, Head]
    earlier: Sequence[Head] = ()

    @property
    def round(self) -> int:
        return next(iter(self.heads.values())).round


def write_card(
    folder: Path,
    manifest: Manifest,
    parts: Mapping[str, CheckpointInfo],
    checkpoints: Sequence[Path],
    run_dirs: Sequence[Path],
) -> None:
    """Write the card of an exported model beside its weights; an existing one is replaced.

    Args:
        parts: The exported checkpoints, under the names of `Exported.heads`.
        checkpoints: Others, which tell of members that left.
        run_dirs: Folders that may hold a peer's metrics.
    """
    heads = {name: part.head for name, part in parts.items()}
    exported = Exported(manifest, heads)
    earlier = _heads(checkpoints, {part.swarm for part in parts.values()}, exported.round)
    measured = _measured([run_dir / METRICS for run_dir in run_dirs], exported.round)
    replace_file(folder / CARD_FILE, card(replace(exported, earlier=earlier), measured).encode())


def _heads(checkpoints: Sequence[Path], swarms: Collection[bytes], round_: int) -> list[Head]:
    """Return the heads of the intact checkpoints of these swarms, up to a round."""
    found = []
    for path in checkpoints:
        with contextlib.suppress(CheckpointError):
            info = describe_checkpoint(path)
            if info.swarm in swarms and info.head.round <= round_:
                found.append(info.head)
    return found


def card(exported: Exported, measured: Line | None) -> str:
    """Return the card's text, with a line of metrics about the held-out text if there is one."""
    manifest, heads = exported.manifest, exported.heads
    lora, model = manifest.lora, manifest.model
    size, has_text = num_parameters(model), manifest.data.source != "custom"
    front = json.dumps(_front_matter(manifest), indent=2, ensure_ascii=True)
    kind = f"Adapters of {', '.join(map(_code, lora.targets))}" if lora is not None else "Weights"
    facts = {
        "family": _code(model.family),
        "parameters": f"{size:,}" + (", frozen" if lora is not None else ""),
        **{f"{key}": str(value) for key, value in _sizes(manifest).items()},
        "began with": _code(model.weights) if model.weights else "",
        "adapters": f"rank {lora.rank}, alpha {lora.alpha:g}" if lora is not None else "",
        "text": "each peer's own" if manifest.private else _code(manifest.data.source) if has_text else "",
        "privacy": ""
        if (privacy := manifest.differential_privacy) is None
        else f"differential privacy of each sample at each site: ε at most {privacy.epsilon:g}, δ {privacy.delta:g}",
        "tokenizer": _code(manifest.data.tokenizer) if get_family(model).reads_text else "",
        "held out": f"{manifest.data.held_out_fraction:.1%} of the text, from seed {manifest.data.seed}"
        if has_text
        else "",
        "rounds done": f"{exported.round:,}",
        # A private swarm counts weights of sites in place of tokens.
        "tokens read": "" if manifest.private else f"{min(head.tokens for head in heads.values()):,}",
        "swarm": _code(manifest.digest.hex()),
        "organizer's key": _code(manifest.organizer),
        **{f"digest of {name or 'the state'}": _code(head.digest.hex()) for name, head in heads.items()},
    }
    averaging = {
        "codec": _code(manifest.averaging.codec),
        "rule": _code(manifest.averaging.aggregation),
        "packages": ", ".join(map(_code, manifest.packages)),
    }
    sections = [
        f"---\n{front}\n---",
        f"# {manifest.name}",
        f"{kind} of a {model.family} model with {human_count(size)} parameters, trained by the peers of a swarm,"
        f" after {exported.round:,} rounds. p2ptrain {__version__} exported them and wrote this page.",
        _table(facts),
        "## Load it",
        f"```python\n{_snippet(manifest)}\n```",
        *(["## Evaluation", _evaluation(measured, manifest, exported.round)] if measured is not None else []),
        "## Training",
        _table({key: _code(value) for key, value in manifest.training.model_dump(mode="json").items()}),
        "## Averaging",
        _table(averaging),
        "## Contributors",
        _contributors(exported),
        "## Licence",
        "The swarm's organizer decides on the licence of these weights; this export grants none. The terms of the text"
        f"{' and of the model that training began with' if model.weights else ''} hold besides.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(manifest: Manifest) -> dict[str, Any]:
    """Return the card's metadata; JSON is YAML, too."""
    source, _, dataset = manifest.data.source.partition(":")
    scheme, _, base = manifest.model.weights.partition(":")
    values: dict[str, Any] = {"library_name": "transformers" if manifest.lora is None else "peft", "tags": ["p2ptrain"]}
    if get_family(manifest.model).reads_text:
        values["pipeline_tag"] = "text-generation"
    if source == "datasets":
        values["datasets"] = [dataset.partition(":")[0]]
    if scheme == "hub":
        values["base_model"] = base.partition("@")[0]
    return values


def _sizes(manifest: Manifest) -> dict[str, Any]:
    values = manifest.model.model_dump(mode="json")
    return {
        key: values[key] for key in ("layers", "hidden", "heads", "kv_heads", "vocabulary", "context") if key in values
    }


def _snippet(manifest: Manifest) -> str:
    """Return Python that loads the export from the working directory."""
    settings: Any = get_family(manifest.model).hugging_face(manifest.model)
    name, reads_text = settings.architectures[0], get_family(manifest.model).reads_text
    if manifest.lora is not None:
        scheme, _, place = manifest.model.weights.partition(":")
        base = place.partition("@")[0] if scheme == "hub" else f"{place}"
        load = [
            "from peft import PeftModel", f"from transformers import {name}", "",
            f"base = {base!a}" + ("" if scheme == "hub" else "  # the folder of the model that training began with"),
            f"model = PeftModel.from_pretrained({name}.from_pretrained(base), '.')",
        ]  # fmt: skip
    elif reads_text:
        load = [
            f"from transformers import AutoTokenizer, {name}", "",
            "folder = '.'  # the folder of this file",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f"model = {name}.from_pretrained(folder)",
            "text = tokenizer('Once upon', return_tensors='pt')",
            "print(tokenizer.decode(model.generate(**text, max_new_tokens=20)[0]))",
        ]  # fmt: skip
    else:
        load = [f"from transformers import {name}", "", f"model = {name}.from_pretrained('.')"]
    return "\n".join(load)


def _measured(files: Sequence[Path], round_: int) -> Line | None:
    """Return the measurement of a round's weights with the most windows, or else the last one before of a peer's own.

    Peers measure the shared state when they begin and end, and their own copy of it meanwhile.
    """
    lines = [line for file in files for line in read_lines(file)[0] if line.kind == "held_out"]
    lines = [line for line in lines if line.number("loss") is not None and 0 < _round(line) <= round_]
    exact = [line for line in lines if _round(line) == round_ and line.values.get("state") == "shared"]
    return max(exact or lines, key=lambda line: (_round(line), line.number("windows") or 0), default=None)


def _round(line: Line) -> int:
    return int(line.number("round") or 0)


def _evaluation(measured: Line, manifest: Manifest, round_: int) -> str:
    loss, error, windows = (measured.number(name) for name in ("loss", "standard_error", "windows"))
    margin = f" ± {CONFIDENCE * error:.3f} (95 % confidence)" if error else ""
    is_exact = _round(measured) == round_ and measured.values.get("state") == "shared"
    which = "these weights have" if is_exact else f"one peer's copy had in round {_round(measured):,}"
    text = "text of its own that one peer held out" if manifest.private else "text that no peer trains on"
    return (
        f"On {text}, {which} a loss of {loss:.3f}{margin} nats a token, over"
        f" {windows or 0:.0f} samples of {manifest.model.context} tokens. A peer measured it during the run."
    )


def _contributors(exported: Exported) -> str:
    counted: dict[str, int] = {}
    for head in (*exported.earlier, *exported.heads.values()):
        counted |= {peer: counted.get(peer, 0) for peer in head.members}
        for row in head.table.rows:
            if not row.is_witness:
                counted[row.peer] = max(counted.get(row.peer, 0), row.counted)
    if not counted:
        return "The checkpoint names no members."
    ordered = sorted(counted.items(), key=lambda each: (-each[1], each[0]))
    names = {_code(peer): f"{rounds:,}" for peer, rounds in ordered[:MAX_NAMED_PEERS]}
    rest = f"\n\nAnd {len(ordered) - MAX_NAMED_PEERS:,} more." if len(ordered) > MAX_NAMED_PEERS else ""
    return (
        f"The certificates behind the checkpoints name {len(ordered):,} member{'s' if len(ordered) != 1 else ''}. After"
        " each stands in how many rounds its work counted by then, without the one in which it joined. Members that"
        " left long before are not named."
        f"\n\n{_table(names, ('peer', 'rounds'))}{rest}"
    )


def _table(rows: Mapping[str, str], titles: tuple[str, str] = ("", "")) -> str:
    """Return a table of the rows that have a value."""
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value]
    return "\n".join([f"| {titles[0]} | {titles[1]} |", "| --- | --- |", *lines])


def _code(value: object) -> str:
    """Return a value in Markdown's code, in ASCII, with no character that ends the code or the cell of a table."""
    text = str(value).encode("ascii", "backslashreplace").decode()
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
