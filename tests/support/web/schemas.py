"""Whether a value is what the OpenAPI document says."""

from collections.abc import Iterator
from typing import Any

from p2ptrain.monitor.openapi import document


def misfits(
    value: Any, schema: dict[str, Any] | bool, at: str = "$", components: dict[str, Any] | None = None
) -> Iterator[str]:
    """Where a value differs from an OpenAPI schema, as far as our documents use the language.

    ``components`` has the schemas that others refer to; by default those of the monitor's document.
    """
    components = document()["components"]["schemas"] if components is None else components
    if isinstance(schema, bool):
        if not schema:
            yield f"{at}: is not there"
        return
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        yield from misfits(value, components[name], at, components)
    for each in schema.get("allOf", []):
        yield from misfits(value, each, at, components)
    if "anyOf" in schema and not any(not list(misfits(value, each, at, components)) for each in schema["anyOf"]):
        yield f"{at}: {value!r} is none of {schema['anyOf']}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    kinds: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list,
        "object": dict,
    }  # fmt: skip
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind in ("integer", "number"))):
        yield f"{at}: {value!r} is no {kind}"
        return
    if kind == "array":
        inner = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if len(inner) != len(value):
            yield f"{at}: has {len(value)} items, not {len(inner)}"
        for index, (each, of_each) in enumerate(zip(value, inner, strict=False)):
            yield from misfits(each, of_each, f"{at}[{index}]", components)
    if kind == "object":
        yield from (f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value)
        for name, each in value.items():
            of_each = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            yield from misfits(each, of_each, f"{at}.{name}", components)
