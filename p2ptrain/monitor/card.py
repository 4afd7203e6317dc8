"""The model card of an export: ``README.md`` in Hugging Face's form (https://huggingface.co/docs/hub/model-cards).

It holds facts of the manifest, the checkpoint's heads and the peers' metrics, and leaves out what these do not tell. Of
a private swarm it holds what the sites' records told, and no metrics of a site.
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
from p2ptrain.models import get_family, has_hugging_face_form, num_parameters
from p2ptrain.monitor.report import METRICS, Line, read_lines, read_sites
from p2ptrain.network.records.evaluation import CONFIDENCE, Evaluation, pooled
from p2ptrain.node.site.site_reports import SITES_FILE, SiteReport
from p2ptrain.status.formats import human_count
from p2ptrain.training.checkpoints.files import CheckpointInfo, describe_checkpoint
from p2ptrain.training.checkpoints.saving import saved_layout

CARD_FILE = "README.md"
MAX_NAMED_PEERS = 100
OF_OWN_LOOP = {"learning_rate", "warmup_steps", "schedule", "final_rate", "weight_decay", "clip_norm"}
"""Settings that p2ptrain's own training loop follows, and no script."""
TORCH_SNIPPET = """\
from safetensors.torch import load_file

model = make_model()  # as the swarm's script makes it
missing, unexpected = model.load_state_dict(load_file('model.safetensors'), strict=False)
assert not unexpected, unexpected
print('tensors that were not trained, or are others by a second name:', missing)"""


@dataclass(frozen=True)
class Exported:
    """The model of one round.

    Attributes:
        heads: By stage folder, or one under an empty name for a model that is not cut.
        earlier: Heads of earlier checkpoints: a member that left in good order is in their tables alone.
        size: Number of parameters; 0 asks the model's family.
        reports: Of a private swarm's sites, oldest first.
    """

    manifest: Manifest
    heads: Mapping[str, Head]
    earlier: Sequence[Head] = ()
    size: int = 0
    reports: Sequence[SiteReport] = ()

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
    reports, size = read_sites([run_dir / SITES_FILE for run_dir in run_dirs]), 0
    if manifest.model.family == "custom":
        layout = saved_layout(parts[""])
        size = layout.num_parameters + sum(each.num_values for each in layout.personal if each.kind == "param")
    found = replace(exported, earlier=earlier, size=size, reports=reports)
    replace_file(folder / CARD_FILE, card(found, measured).encode())


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
    size, has_text = exported.size or num_parameters(model), manifest.data.source != "custom"
    counted = _counted(exported)
    front = json.dumps(_front_matter(manifest), indent=2, ensure_ascii=True)
    kind = f"Adapters of {', '.join(map(_code, lora.targets))}" if lora is not None else "Weights"
    whose = _code(manifest.data.source) if has_text else "given by the swarm's script"
    facts = {
        "family": _code(model.family),
        "parameters": f"{size:,}" + (", frozen" if lora is not None else ""),
        **{f"{key}": str(value) for key, value in _sizes(manifest).items()},
        "began with": _code(model.weights) if model.weights else "",
        "adapters": f"rank {lora.rank}, alpha {lora.alpha:g}" if lora is not None else "",
        "text" if has_text else "data": "each peer's own" if manifest.private else whose,
        "sites": f"{len(counted)}" if manifest.private else "",
        "personal tensors": f"{', '.join(map(_code, manifest.private.personal))}, of the site that exported them"
        if manifest.private and manifest.private.personal
        else "",
        "privacy": ""
        if (privacy := manifest.differential_privacy) is None
        else f"differential privacy of each sample at each site: ε at most {privacy.epsilon:g}, δ {privacy.delta:g}",
        "tokenizer": _code(manifest.data.tokenizer) if _reads_text(manifest) else "",
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
    training = manifest.training.model_dump(mode="json", exclude=None if has_text else OF_OWN_LOOP)
    training["rounds"] = training["rounds"] or "no limit"
    evaluation = _evaluation(measured, manifest, exported.round) if measured is not None else ""
    sections = [
        f"---\n{front}\n---",
        f"# {manifest.name}",
        f"{kind} of a {model.family} model with {human_count(size)} parameters, trained by the peers of a swarm,"
        f" after {exported.round:,} rounds. p2ptrain {__version__} exported them and wrote this page.",
        _table(facts),
        *_section("Load it", f"```python\n{_snippet(manifest)}\n```"),
        *_section("Evaluation", _of_sites(exported, counted) if manifest.private else evaluation),
        *_section("Privacy that is spent", _spent(exported, counted)),
        *_section("Training", _table({key: _code(value) for key, value in training.items()})),
        *_section("Averaging", _table(averaging)),
        *_section("Contributors", _contributors(counted)),
        "## Licence",
        "The swarm's organizer decides on the licence of these weights; this export grants none. The terms of the"
        f" {'text' if has_text else 'data'}{' and of the model that training began with' if model.weights else ''} hold"
        " besides.",
    ]
    return "\n\n".join(sections) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _reads_text(manifest: Manifest) -> bool:
    return manifest.model.family != "custom" and get_family(manifest.model).reads_text


def _front_matter(manifest: Manifest) -> dict[str, Any]:
    """Return the card's metadata; JSON is YAML, too."""
    source, _, dataset = manifest.data.source.partition(":")
    scheme, _, base = manifest.model.weights.partition(":")
    library = "peft" if manifest.lora is not None else "transformers"
    if not has_hugging_face_form(manifest.model):
        library = "pytorch"
    values: dict[str, Any] = {"library_name": library, "tags": ["p2ptrain"]}
    if library != "pytorch" and _reads_text(manifest):
        values["pipeline_tag"] = "text-generation"
    if source == "datasets":
        values["datasets"] = [dataset.partition(":")[0]]
    if scheme == "hub":
        values["base_model"] = base.partition("@")[0]
    return values


def _sizes(manifest: Manifest) -> dict[str, Any]:
    if manifest.model.family == "custom":
        return {}
    values = manifest.model.model_dump(mode="json")
    return {
        key: values[key] for key in ("layers", "hidden", "heads", "kv_heads", "vocabulary", "context") if key in values
    }


def _snippet(manifest: Manifest) -> str:
    """Return Python that loads the export from the working directory."""
    if not has_hugging_face_form(manifest.model):
        return TORCH_SNIPPET
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
    return (
        f"On text that no peer trains on, {which} a loss of {loss:.3f}{margin} nats a token, over"
        f" {windows or 0:.0f} samples of {manifest.model.context} tokens. A peer measured it during the run."
    )


def _of_sites(exported: Exported, counted: Collection[str]) -> str:
    """Return the sites' last measurements up to the round, for each metric pooled and by site; empty for none."""
    found: dict[str, dict[str, Evaluation]] = {}
    for report in exported.reports:
        for by_site in found.values() if report.evaluation is None else ():
            by_site.pop(report.peer, None)  # Its policy keeps them now.
        if report.evaluation is not None and report.evaluation.round <= exported.round and report.peer in counted:
            found.setdefault(report.evaluation.metric, {})[report.peer] = report.evaluation
    rows = []
    for by_site in sorted(found.values(), key=len, reverse=True):
        if (whole := pooled(by_site.values())) is not None:
            rows += [_measurement(f"{len(by_site)} sites", whole)] if len(by_site) > 1 else []
            rows += [_measurement(_code(peer), each) for peer, each in sorted(by_site.items())]
    if not rows:
        return ""
    return (
        "Each site measured its copy of the model on samples of its own that it held out, in the round that is named."
        " ± is half of the 95 % interval. The pooled mean weighs sites by their samples, which are rounded down to"
        " powers of two; its round is the earliest. These are the sites' own words: nobody else has the samples.\n\n"
        + _grid(("", "metric", "mean", "samples", "round"), rows[:MAX_NAMED_PEERS])
    )


def _measurement(whose: str, found: Evaluation) -> tuple[str, ...]:
    margin = f" ± {found.interval:.3f}" if found.interval is not None else ""
    return whose, _code(found.metric), f"{found.mean:.3f}{margin}", f"{found.samples:,}", f"{found.round:,}"


def _spent(exported: Exported, counted: Collection[str]) -> str:
    """Return each site's loss of privacy by the round, as its accountant told it; empty without any."""
    found: dict[str, tuple[str, ...]] = {}
    for report in exported.reports:
        if report.privacy is None:
            found.pop(report.peer, None)
        elif report.round <= exported.round and report.peer in counted:
            found[report.peer] = _code(report.peer), f"{report.privacy}", f"{report.round:,}"
    if not found:
        return ""
    rest = "" if len(found) == len(counted) else " Of other sites it is not known: the limit holds for them, too."
    rows = [row for _, row in sorted(found.items())]
    return f"As each site's accountant told it.{rest}\n\n{_grid(('site', 'spent', 'round'), rows[:MAX_NAMED_PEERS])}"


def _counted(exported: Exported) -> dict[str, int]:
    """Return the rounds in which each member's work counted."""
    counted: dict[str, int] = {}
    for head in (*exported.earlier, *exported.heads.values()):
        counted |= {peer: counted.get(peer, 0) for peer in head.members}
        for row in head.table.rows:
            if not row.is_witness:
                counted[row.peer] = max(counted.get(row.peer, 0), row.counted)
    return counted


def _contributors(counted: Mapping[str, int]) -> str:
    if not counted:
        return "The checkpoint names no members."
    ordered = sorted(counted.items(), key=lambda each: (-each[1], each[0]))
    names = [(_code(peer), f"{rounds:,}") for peer, rounds in ordered[:MAX_NAMED_PEERS]]
    rest = f"\n\nAnd {len(ordered) - MAX_NAMED_PEERS:,} more." if len(ordered) > MAX_NAMED_PEERS else ""
    return (
        f"The certificates behind the checkpoints name {len(ordered):,} member{'s' if len(ordered) != 1 else ''}. After"
        " each stands in how many rounds its work counted by then, without the one in which it joined. Members that"
        " left long before are not named."
        f"\n\n{_grid(('peer', 'rounds'), names)}{rest}"
    )


def _table(rows: Mapping[str, str]) -> str:
    """Return a table of the rows that have a value."""
    return _grid(("", ""), [row for row in rows.items() if row[1]])


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    return "\n".join(lines)


def _code(value: object) -> str:
    """Return a value in Markdown's code, in ASCII, with no character that ends the code, the cell or the line."""
    text = str(value).encode("unicode_escape").decode()
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
