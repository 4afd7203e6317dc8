"""Writing TOML: role files for child processes, and the commented ``run.toml`` of an organizer."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, get_args

from pydantic import BaseModel

_COMMENT_WIDTH = 110


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text of plain values, with one level of sections after the values at the top."""
    lines = [f"{key} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for key, section in values.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_value(value)}" for name, value in section.items())]
    return "\n".join(lines) + "\n"


def commented_toml(settings: BaseModel) -> str:
    """TOML text of a settings object, every field preceded by its documentation.

    Made from the fields themselves, so that it cannot differ from what is accepted. A section that is left out is
    written with examples, all of it as comments.
    """
    plain, sections = [], []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        optional = next((kind for kind in get_args(field.annotation) if hasattr(kind, "model_fields")), None)
        if value is None and optional is not None:
            keys = {
                key: each.examples[0] if each.examples else each.default for key, each in optional.model_fields.items()
            }
            lines = to_toml({name: keys}).strip().splitlines()
            sections.append("\n".join([*_comment(_heading(optional)), *(f"# {line}" for line in lines), ""]))
        elif isinstance(value, BaseModel):
            sections.append("\n".join([*_comment(_heading(type(value))), f"[{name}]", commented_toml(value)]))
        else:
            plain.append("\n".join([*_comment(field.description or ""), f"{name} = {_value(value)}"]))
    return "\n".join([*plain, "", *sections]).rstrip("\n") + "\n"


def _heading(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip()


def _comment(text: str) -> list[str]:
    flat = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(flat, _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # inf and nan are spelled alike in TOML
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise ValueError(f"TOML has no form for {value!r}")
