"""Hypothesis draws values from an OpenAPI schema, and values that differ from one in places."""

from typing import Any

from hypothesis import strategies as st

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
MAX_ITEMS = 3
"""Of drawn arrays and objects; bounds of schemas may be far above."""


def values(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draw values that fit a schema, as far as our documents use the language."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return st.deferred(lambda: values(components[name], components))
    if "anyOf" in schema:
        return st.one_of([values(each, components) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(least, most)
        case "number":
            return st.floats(least, most, allow_nan=False, exclude_min="exclusiveMinimum" in schema)
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 30), 30))
        case "array":
            inner = values(schema.get("items", {}), components)
            most_items = min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS)
            return st.lists(inner, min_size=schema.get("minItems", 0), max_size=most_items)
        case "object" if "properties" in schema:
            fields = {name: values(each, components) for name, each in schema["properties"].items()}
            needed = {name: fields.pop(name) for name in schema.get("required", [])}
            return st.fixed_dictionaries(needed, optional=fields)
        case "object":
            inner = values(schema.get("additionalProperties") or {}, components)
            return st.dictionaries(st.text(max_size=8), inner, max_size=MAX_ITEMS)
    return JUNK


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """Draw a value with junk in one place, or without one of its parts."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {each: inner for each, inner in value.items() if each != name}
        return {**value, name: draw(damaged(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(damaged(value[place])), *value[place + 1 :]]
    return draw(JUNK)
