"""Groups of settings that refuse unknown and unused keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator


class Need(NamedTuple):
    """A condition on another setting of the section, without which a key is unused.

    Attributes:
        setting: The other setting's key.
        is_met: True for a value of ``setting`` that meets the condition.
        words: The condition for error messages.
    """

    setting: str
    is_met: Callable[[Any], bool]
    words: str


class Section(BaseModel):
    """A frozen group of settings, which refuses unknown keys and explicitly set unused ones; dumps omit unused keys.

    Attributes:
        needs: The conditions of keys that are not always used, by key.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True,
        allow_inf_nan=False,  # Neither comes through the wire format of a manifest.
    )  # fmt: skip
    needs: ClassVar[dict[str, Need]] = {}

    @property
    def unused(self) -> set[str]:
        """The keys that have no effect with the other settings."""
        return {key for key, need in self.needs.items() if not need.is_met(getattr(self, need.setting))}

    @model_validator(mode="after")
    def _uses_what_is_given(self) -> Section:
        for key in sorted(self.needs.keys() & self.unused & self.model_fields_set):
            need = self.needs[key]
            raise ValueError(
                f"{key} is used with {need.words} alone, and {need.setting} is {getattr(self, need.setting)!r}:"
                f" remove {key}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = self.unused
        return {key: value for key, value in handler(self).items() if key not in unused}
