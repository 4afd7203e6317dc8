"""TOML output: role files of child processes, and an organizer's commented ``run.toml``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, get_args

from pydantic import BaseModel

from p2ptrain.manifest.sections import Section

_COMMENT_WIDTH = 110


def to_toml(values: Mapping[str, Any]) -> str:
    """Return TOML text of plain values, with one level of sections after the top-level values."""
    lines = [f"{key} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for key, section in values.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_value(value)}" for name, value in section.items())]
    return "\n".join(lines) + "\n"


def commented_toml(
    settings: Section, is_written: Callable[[str, Any, Any], bool] | None = None, prefix: str = ""
) -> str:
    """Return TOML text of settings, with every key's docstring as a comment above the key.

    Unused keys are omitted. If all keys are written, unused sections and missing optional keys and sections are written
    as comments, the latter two with example values.

    Args:
        settings: All settings, or a section.
        is_written: True for a dotted key, its value and its default to write; None writes all.
        prefix: The section's name and a dot.
    """
    plain, sections = [], []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        optional = next((kind for kind in get_args(field.annotation) if hasattr(kind, "model_fields")), None)
        if isinstance(value, Section) and name in settings.unused:
            if is_written is None:
                sections.append(_as_comments(name, type(value), value.model_dump()))
        elif name in settings.unused:
            continue
        elif value is None and optional is not None:
            keys = {
                key: each.examples[0] if each.examples else each.default for key, each in optional.model_fields.items()
            }
            if is_written is None:
                sections.append(_as_comments(name, optional, keys))
        elif value is None:
            if is_written is None and field.examples:
                lines = [*_comment(field.description or ""), f"# {name} = {_value(field.examples[0])}"]
                plain.append("\n".join(lines))
        elif isinstance(value, Section):
            text = commented_toml(value, is_written, f"{name}.").strip()
            if text or optional is not None:  # An optional section has its effect by being there.
                sections.append("\n".join([*_comment(_heading(type(value))), f"[{name}]", text, ""]))
        elif is_written is None or is_written(
            f"{prefix}{name}", value, field.get_default(call_default_factory=True, validated_data=dict(settings))
        ):
            plain.append("\n".join([*_comment(field.description or ""), f"{name} = {_value(value)}"]))
    return "\n".join([*plain, "", *sections]).rstrip("\n") + "\n"


def _as_comments(name: str, kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return a section without effect as comments; without the ``# `` it is valid TOML."""
    lines = to_toml({name: values}).strip().splitlines()
    return "\n".join([*_comment(_heading(kind)), *(f"# {line}" for line in lines), ""])


def _heading(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip()


def _comment(text: str) -> list[str]:
    flat = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(flat, _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # TOML spells inf and nan as Python does.
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise ValueError(f"TOML has no form for {value!r}")
