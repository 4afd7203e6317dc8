"""Writing TOML: role files for child processes, and the commented ``run.toml`` of an organizer."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

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

    Made from the fields themselves, so that it cannot differ from what is accepted.
    """
    plain, sections = [], []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            heading = (type(value).__doc__ or "").strip()
            sections.append("\n".join([*_comment(heading), f"[{name}]", commented_toml(value)]))
        else:
            plain.append("\n".join([*_comment(field.description or ""), f"{name} = {_value(value)}"]))
    return "\n".join([*plain, "", *sections]).rstrip("\n") + "\n"


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
