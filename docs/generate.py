"""Pages of the site that are made from the code, and hooks by which ``make docs`` adds and checks them.

`pages` makes the reference of commands, settings, records, messages and the Python API; no such page is in git.
mkdocs calls the functions that begin with ``on_``: links to files beside the documentation become plain names, and a
site that would load anything from another host fails to build.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec.inspect as shapes

from p2ptrain.cli.main import COMMANDS, parser_of
from p2ptrain.config import PeerConfig
from p2ptrain.manifest import Manifest
from p2ptrain.manifest.sections import Section
from p2ptrain.network.records import record

ROOT = Path(__file__).resolve().parents[1]
API = {
    "A swarm": ("p2ptrain.node.swarm.Swarm", "p2ptrain.training.checkpoints.SavePolicy"),
    "Training": (
        "p2ptrain.training.optimizer.SwarmOptimizer", "p2ptrain.pipeline.client.remote_model.PipelineModule",
        "p2ptrain.manifest.LoraSpec", "p2ptrain.manifest.PrivateSpec",
        "p2ptrain.network.records.evaluation.Evaluation",
    ),
    "Generating": ("p2ptrain.node.serving.language_model.LanguageModel",),
    "The manifest": ("p2ptrain.manifest.Manifest", "p2ptrain.manifest.SignedManifest"),
    "Extensions": (
        "p2ptrain.codecs.base.Codec", "p2ptrain.averaging.vector.rules.Rule", "p2ptrain.models.family.Family",
        "p2ptrain.network.directory.Directory", "p2ptrain.network.transport.Transport",
    ),
    "Errors": ("p2ptrain.errors",),
}  # fmt: skip
"""Objects of the page on the Python API, by title."""
_LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|srcset|data)=["']?\s*(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|prefetch|preconnect|modulepreload|manifest))"""
    r"""[^>]*?\bhref=["']?\s*(?:https?:)?//"""
    r"""|(?:@import\s*["']?|\burl\(\s*["']?)(?:https?:)?//"""
    r"""|class=["']?mermaid\b"""
)
"""Text of HTML or CSS with which a browser loads from another host; the theme fetches mermaid's program from one."""


def pages() -> dict[str, str]:
    """Return the generated pages as Markdown, by their paths below ``docs``."""
    return {
        "reference/cli.md": _commands(),
        "reference/run-toml.md": _settings(
            "run.toml",
            Manifest,
            "The settings of a swarm, which all peers agree on. `p2ptrain init --all DIR` writes them.",
        ),
        "reference/peer-toml.md": _settings(
            "peer.toml",
            PeerConfig,
            "The settings of one peer: a role file for `p2ptrain peer FILE`, or options of `join`.",
        ),
        "reference/records.md": _records(),
        "reference/messages.md": _messages(),
        "reference/python.md": _api(),
    }


def foreign_loads(site: Path) -> list[str]:
    """Return the places of a built site at which a browser would load something from another host."""
    files = [path for kind in ("html", "css") for path in sorted(site.rglob(f"*.{kind}"))]
    found = [(path, match) for path in files for match in _LOADS.finditer(path.read_text(encoding="utf-8"))]
    return [f"{path.relative_to(site)}: {match[0][:100]}" for path, match in found]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside of the documentation, such as examples, by the files' names."""
    folder = os.path.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join("docs", folder, link[2].partition("#")[0]))
        if "://" in link[2] or path.startswith("docs"):
            return link[0]
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Replace the two colons before an example, which docstrings have in the form of reStructuredText."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def on_post_build(config: Any, **_: Any) -> None:
    """Raise if the site loads anything from another host."""
    if found := foreign_loads(Path(config["site_dir"])):
        raise SystemExit("the site would load from other hosts:\n" + "\n".join(found))


def _commands() -> str:
    lines = [
        "# Commands",
        "",
        "Each command prints this with `--help`, and ends with one of these [exit codes](exit-codes.md).",
    ]
    lines += ["", "| command | what it does |", "| --- | --- |"]
    lines += [f"| [`p2ptrain {name}`](#p2ptrain-{name}) | {_cell(text)} |" for name, text in COMMANDS.items()]
    for name in COMMANDS:
        parser = parser_of(name)
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        lines += [
            "",
            f"## p2ptrain {name}",
            "",
            _prose(parser.description or ""),
            "",
            "```text",
            *_wrapped(usage),
            "```",
        ]
        for group in parser._action_groups:
            rows = [_option(each) for each in group._group_actions if each.dest != "help"]
            if rows and group.title != "log":
                lines += ["", f"| {group.title} | |", "| --- | --- |", *rows]
    lines += ["", "Every command also takes `--log-format text|json` and `--log-level debug|info|warning|error`."]
    return "\n".join(lines) + "\n"


def _option(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    names = [f"{name} {value}" if action.nargs != 0 else name for name in action.option_strings] or [str(value)]
    return f"| {', '.join(f'`{name}`' for name in names)} | {_cell(action.help or '')} |"


def _wrapped(usage: str, width: int = 100) -> list[str]:
    """Return the usage in lines that do not cut an option from its value."""
    lines = [""]
    for part in re.findall(r"\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]|\S+", usage):
        if lines[-1] and len(lines[-1]) + len(part) >= width:
            lines.append("   ")
        lines[-1] += f"{' ' if lines[-1] else ''}{part}"
    return lines


def _settings(title: str, kind: type[Section], text: str) -> str:
    schema = kind.model_json_schema()
    sections = schema["$defs"]
    lines = [f"# {title}", "", text, "", "An unknown key is refused, with the nearest valid one.", ""]
    plain, inner = {}, []
    for key, field in schema["properties"].items():
        if section := re.search(r"#/\$defs/(\w+)", json.dumps(field)):
            shown = sections[section[1]]
            inner += ["", f"## [{key}]", "", _prose(shown.get("description", "")), "", *_keys(shown)]
        else:
            plain[key] = field
    lines += _keys({"properties": plain})
    return "\n".join([*lines, *inner]) + "\n"


def _keys(schema: Mapping[str, Any]) -> list[str]:
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in schema["properties"].items():
        default = "" if field.get("default") is None else f"`{json.dumps(field['default'], ensure_ascii=False)}`"
        lines.append(f"| `{key}` | {_value(field)} | {default} | {_cell(field.get('description', ''))} |")
    return lines


def _value(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_value(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(each)}`" for each in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_value(field.get('items', {}))}"
    kinds = {"integer": "whole number", "string": field.get("format", "text")}
    kind = str(kinds.get(field.get("type", ""), field.get("type", "text")))
    return kind + "".join(_bound(sign, field.get(key)) for key, sign in _BOUNDS.items())


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _bound(sign: str, value: int | float | None) -> str:
    """Return a bound in words; large powers of two as such."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f" {sign} {value:g}"
    if sign == "≤" and value > 1 << 20 and (value + 1).bit_count() == 1:
        sign, value = "<", value + 1
    return f" {sign} 2^{value.bit_length() - 1}" if value > 1 << 20 and value.bit_count() == 1 else f" {sign} {value:,}"


def _records() -> str:
    text = f"""# Records

Each peer signs a record of itself, at most {record.MAX_RECORD_BYTES:,} bytes, and the peers of a swarm exchange them.
[How peers find each other](../explanation/network.md#records) explains it.
`p2ptrain status --json` prints records as JSON.
"""
    modules = [record.__name__, "p2ptrain.network.records.serving"]
    return text + "".join(_schemas_of(module) for module in modules)


def _messages() -> str:
    """Return the page of all messages: modules that define one, in the order of their paths."""
    text = """# Messages

Peers send msgpack, and read it with these schemas: `p2ptrain/network/schema.py` refuses values out of bounds.
Unknown fields are ignored, so later versions may add fields. Each heading is a module of the package.
"""
    for path in sorted((ROOT / "p2ptrain").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "/records/" not in str(path) and re.search(
            r"^class \w+\(\w+, frozen=True", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            text += _schemas_of(module)
    return text


def _schemas_of(module: str) -> str:
    """Return a section with a table for each message and bounded dataclass of a module."""
    imported = import_module(module)
    names = [node.name for node in ast.parse(inspect.getsource(imported)).body if isinstance(node, ast.ClassDef)]
    kinds = [(name, getattr(imported, name)) for name in names if not name.startswith("_")]
    parts = [part for name, kind in kinds if _is_schema(kind) for part in _schema(name, kind)]
    if not parts:
        return ""
    summary = (imported.__doc__ or "").partition("\n\n")[0]
    return "\n".join(["", f"## {module.removeprefix('p2ptrain.')}", "", _prose(summary), "", *parts, ""])


def _is_schema(kind: type) -> bool:
    from p2ptrain.network.schema import Message

    is_record = kind.__module__.startswith("p2ptrain.network.records") and hasattr(kind, "__dataclass_fields__")
    is_record = is_record and kind not in (record.Look, record.Sighting)  # Of a reader: they are not sent.
    return issubclass(kind, Message) or is_record


def _schema(name: str, kind: type) -> Iterator[str]:
    info = shapes.type_info(kind)
    assert isinstance(info, (shapes.StructType, shapes.DataclassType))
    tag = (
        f" (tag `{info.tag}`)" if isinstance(info, shapes.StructType) and info.tag and not kind.__subclasses__() else ""
    )
    text = inspect.getdoc(kind) or ""
    about, _, attributes = text.partition("Attributes:\n")
    described = dict(re.findall(r"^ {4}(\w+): ((?:.+\n?(?: {8}.+\n?)*))", attributes, flags=re.MULTILINE))
    yield from (f"### {name}{tag}", "", _prose(about), "")
    if info.fields:
        yield from ("| field | value | meaning |", "| --- | --- | --- |")
        for field in info.fields:
            optional = "" if field.required else " (optional)"
            yield f"| `{field.name}` | {_shape(field.type)}{optional} | {_cell(described.get(field.name, ''))} |"
        yield ""


def _shape(kind: Any) -> str:
    """Return a type of msgspec in words, with its bounds."""
    bounds = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    shown = "".join(_bound(sign, getattr(kind, key, None)) for key, sign in bounds)
    low, high = getattr(kind, "min_length", None), getattr(kind, "max_length", None)
    length = f" of {low}" if low == high and low else f" up to {high}" if high is not None else ""
    if options := re.fullmatch(r"\^\(([\w|]+)\)\$", getattr(kind, "pattern", None) or ""):
        return ", ".join(f"`{each}`" for each in options[1].split("|"))
    match kind:
        case shapes.UnionType():
            return " or ".join(_shape(each) for each in kind.types)
        case shapes.StructType() | shapes.DataclassType() | shapes.NamedTupleType():
            return str(kind.cls.__name__)
        case shapes.ListType() | shapes.VarTupleType():
            return f"list{length} of {_shape(kind.item_type)}"
        case shapes.TupleType():
            return f"[{', '.join(map(_shape, kind.item_types))}]"
        case shapes.DictType():
            return f"map{length} of {_shape(kind.key_type)} to {_shape(kind.value_type)}"
        case shapes.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case shapes.EnumType():
            return ", ".join(f"`{each.value}`" for each in kind.cls)
    names = {
        "IntType": "int",
        "FloatType": "float",
        "StrType": "text",
        "BytesType": "bytes",
        "BoolType": "bool",
        "NoneType": "nil",
    }
    return f"{names.get(type(kind).__name__, 'any')}{length}{shown}"


def _api() -> str:
    lines = ["# Python API", ""]
    lines += ["`import p2ptrain` loads neither torch nor the network; names are imported at first use."]
    lines += ["[Your own script](../tutorials/your-own-script.md) and [generation](python-api.md) show it at work."]
    for title, names in API.items():
        lines += ["", f"## {title}", *(f"\n::: {name}" for name in names)]
    return "\n".join(lines) + "\n"


def _prose(text: str) -> str:
    """Return a docstring as Markdown."""
    text = inspect.cleandoc(text).strip()
    text = re.sub(
        r"::\n\n((?:    .*\n?|\n)+)", lambda match: f":\n\n```text\n{inspect.cleandoc(match[1])}\n```\n", text
    )
    return text.replace("``", "`") if "```" not in text else text


def _cell(text: str) -> str:
    """Return a text for one cell of a table."""
    parts = " ".join(text.replace("``", "`").replace("%%", "%").split()).split("`")
    return "`".join(part if i % 2 else part.replace("|", "&#124;").replace("<", "&lt;") for i, part in enumerate(parts))
