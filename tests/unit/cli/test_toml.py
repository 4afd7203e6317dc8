import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.cli.toml import commented_toml, to_toml
from p2ptrain.manifest import DataSpec, LoraSpec, Manifest, PrivateSpec, parse_manifest

SCALARS = st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text()
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
FLAT = st.dictionaries(KEYS, SCALARS | st.lists(SCALARS, max_size=3), max_size=4)


@given(FLAT, st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), FLAT, max_size=3))
def test_what_is_written_is_read_back(values: dict[str, Any], sections: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(values | sections)) == values | sections


def test_every_field_of_a_commented_manifest_is_explained_just_above_it() -> None:
    lines = commented_toml(Manifest()).splitlines()
    settings = [index for index, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    values = Manifest().model_dump(exclude_none=True)
    sections = [section for section in values.values() if isinstance(section, dict)]
    assert len(settings) == len(values) - len(sections) + sum(map(len, sections))
    for index in settings:
        assert lines[index - 1].startswith("# "), lines[index]


def test_a_section_that_is_left_out_is_there_as_comments_that_are_valid_without_their_marks() -> None:
    text = commented_toml(Manifest())
    assert parse_manifest(tomllib.loads(text), "text").lora is None
    section = text[text.index("# [lora]") :].partition("\n\n")[0]
    values = tomllib.loads("\n".join(line.removeprefix("# ") for line in section.splitlines()))
    lora = parse_manifest({**values, "training": {"every": 1}}, "text").lora
    assert lora is not None
    assert lora == LoraSpec(targets=lora.targets)


def test_an_optional_section_is_written_even_if_all_its_settings_have_their_defaults() -> None:
    manifest = Manifest(private=PrivateSpec(), data=DataSpec(source="own"))
    text = commented_toml(manifest, lambda key, value, default: value != default)
    assert parse_manifest(tomllib.loads(text), "text").private == PrivateSpec()
