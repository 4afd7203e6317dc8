"""Groups of settings that refuse keys which they do not know or do not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator


class Need(NamedTuple):
    """What a key needs another setting to be.

    Attributes:
        setting: The other setting's key.
        is_met: True for a value of it under which the key is used.
        words: The condition, for people.
    """

    setting: str
    is_met: Callable[[Any], bool]
    words: str


class Section(BaseModel):
    """A frozen group of settings.

    It refuses unknown keys, and keys that its other settings leave unused. The latter are in no dump either.

    Attributes:
        needs: By key: what the key needs, where it is not always used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
    needs: ClassVar[dict[str, Need]] = {}

    @property
    def unused(self) -> set[str]:
        """The keys that have no meaning beside the other settings."""
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
