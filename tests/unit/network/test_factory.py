"""Configuration chooses the directory and the transport, by one factory."""

import asyncio
import random
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from p2ptrain.config import NetworkSection
from p2ptrain.errors import ConfigError, IncompatibleError
from p2ptrain.network.factory import DirectoryOptions, TransportOptions, start_directory, start_transport
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.transport import Transport
from p2ptrain.runtime import Runtime
from tests.support.packages import install
from tests.support.signers import NamedSigner

MODULE = """
async def start(options):
    return options.name
"""


def directory_options(name: str) -> DirectoryOptions:
    return DirectoryOptions(name, cast(Transport, None), b"s" * 32, NamedSigner("a"), Runtime(random.Random(0)))


def test_packages_bring_kinds_that_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {group: {"mine": "brought_kinds:start"} for group in ("p2ptrain.directories", "p2ptrain.transports")}
    install(tmp_path, monkeypatch, "brings-kinds", {"brought_kinds": MODULE}, points)
    assert asyncio.run(start_directory(directory_options("mine://a/b"))) == "mine://a/b"  # type: ignore[comparison-overlap]
    with Identity.ephemeral() as identity:
        started = asyncio.run(start_transport(TransportOptions("mine", identity, Libp2pSettings())))
    assert started == "mine"  # type: ignore[comparison-overlap]


def test_a_kind_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(IncompatibleError, match=r"unknown directory 'carrier'; .* libp2p, http, https.*directories"):
        asyncio.run(start_directory(directory_options("carrier:pigeon")))
    with pytest.raises(ConfigError, match="the DHT needs the libp2p transport"):
        asyncio.run(start_directory(directory_options("libp2p")))


@pytest.mark.parametrize("name", ["https://lab.example/swarm", "http://[::1]:80", "libp2p", "redis:a,b", ""])
def test_names_of_kinds_are_valid(name: str) -> None:
    assert NetworkSection(directory=name).directory == name


@pytest.mark.parametrize(
    "name", ["HTTP://x", "https://a?b", "https://a b", "https://a&b", "https://a=b", "/path", "a\n"]
)
def test_names_that_would_change_a_link_are_not(name: str) -> None:
    with pytest.raises(ValidationError):
        NetworkSection(directory=name)
