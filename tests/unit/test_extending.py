"""The package that docs/how-to/extend.md shows works as the page says."""

import importlib
import random
import re
import time
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from p2ptrain import manifest
from p2ptrain.averaging.vector.conformance import check_rule
from p2ptrain.averaging.vector.rules import RULES, Claim, get_rule
from p2ptrain.codecs import get_codec
from p2ptrain.codecs.conformance import check_codec, fingerprint
from p2ptrain.errors import ConfigError, IncompatibleError
from p2ptrain.manifest import Manifest, ModelSpec
from p2ptrain.models import FAMILIES, Span, build_model, build_stage, num_parameters
from p2ptrain.network.factory import DirectoryOptions, start_directory
from p2ptrain.network.records.record import peers_key, seal_record
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.transport import Transport
from p2ptrain.node.extensions import check_extensions, with_packages
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop, simulated
from tests.support.packages import install
from tests.support.signers import NamedSigner
from tests.support.sim.trainers import SimulatedSwarm, make_manifest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
MODULES = {text.split()[1].removesuffix(".py"): text for kind, text in BLOCKS if kind == "python"}
ENTRY_POINTS, RUN, NETWORK = (tomllib.loads(text) for kind, text in BLOCKS if kind == "toml")
LAB = {**RUN, "model": {"family": "mlp", "layers": 2, "hidden": 8, "classes": 3}}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: dict[str, dict[str, str]] = ENTRY_POINTS["project"]["entry-points"]
    install(tmp_path, monkeypatch, "lab-extensions", MODULES, points)


def test_seed_pins_the_package_and_peers_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_packages(Manifest.model_validate({**LAB, "packages": ()}))
    assert found.packages == ("lab-extensions==1.0",)
    assert Manifest.model_validate(LAB) == found
    with pytest.raises(IncompatibleError, match=r"pip install 'lab-extensions==2\.0'"):
        check_extensions(Manifest.model_validate({**LAB, "packages": ["lab-extensions==2.0"]}))


def test_the_codec_passes_the_tests_that_the_page_shows() -> None:
    codec = get_codec("sign")
    check_codec(codec)
    source = MODULES["test_lab_codec"].replace("FINGERPRINT", fingerprint(codec))
    names: dict[str, Any] = {}
    exec(source, names)
    for name, test in names.items():
        if name.startswith("test_"):
            test()


def test_the_rule_passes_its_check_and_counts_by_square_roots() -> None:
    spec = Manifest.model_validate(LAB).averaging
    check_rule(get_rule(spec))
    assert get_rule(spec).shares(spec, [Claim(1), Claim(4), Claim(1)]) == [0.25, 0.5, 0.25]


@simulated(seed=0)
async def test_peers_average_with_the_codec_and_the_rule(network: SimulatedNetwork) -> None:
    spec = make_manifest(codec="sign", aggregation="square_root", min_peers=3, spot_checks=2)
    swarm = SimulatedSwarm(network, spec, 0)
    for name in "abc":
        swarm.start(name)
    await swarm.until(lambda: swarm.in_agreement(3), 600.0, "rounds are committed")
    assert swarm.ledger.contributed.keys() == set("abc")
    await swarm.end()


def test_stages_of_the_family_are_its_model() -> None:
    spec = ModelSpec.model_validate(LAB["model"])
    whole, inputs = build_model(spec), torch.randn(5, 8)
    assert sum(each.numel() for each in whole.parameters()) == num_parameters(spec)
    stages = [build_stage(spec, span) for span in (Span(0, 1), Span(1, 3))]
    assert torch.equal(stages[1](stages[0](inputs)), whole(inputs))


@on_loop
async def test_peers_find_each_other_in_the_folder(tmp_path: Path) -> None:
    swarm, expires_at = b"s" * 32, time.time() + 60
    key = peers_key(swarm, 0)
    folder = tmp_path / "mounted"
    options = {
        name: DirectoryOptions(
            f"folder:{folder}", cast(Transport, None), swarm, NamedSigner(name), Runtime(random.Random(0))
        )
        for name in "ab"
    }
    with pytest.raises(ConfigError, match="is no folder"):
        await start_directory(options["a"])
    folder.mkdir()
    a, b = [await start_directory(each) for each in options.values()]
    assert await b.look_up(key, 5) == {}
    value = seal_record(swarm, {}, 1, expires_at, NamedSigner("a"))
    assert await a.publish(key, NamedSigner("a").peer_id, value, expires_at, 5)
    (folder / key / "liar").write_bytes(value[:-1] + b"?")
    found = await b.look_up(key, 5)
    assert found is not None
    assert [entry.value for entry in found.values()] == [value]
    await a.close()


def test_the_manifest_knows_which_names_are_p2ptrain_s_own() -> None:
    assert (FAMILIES.own, RULES.own) == (manifest.OWN_FAMILIES, manifest.RULES)


def test_the_page_names_entry_points_that_are_there() -> None:
    for group, points in ENTRY_POINTS["project"]["entry-points"].items():
        assert f"`{group}`" in PAGE
        for value in points.values():
            module, _, name = value.partition(":")
            assert hasattr(importlib.import_module(module), name)
    assert NETWORK["network"]["directory"].startswith("https:")
