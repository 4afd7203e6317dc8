from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import PeerConfig, parse_rate, parse_size
from p2ptrain.errors import ConfigError

ROLES = Path(__file__).resolve().parents[2] / "peers"
MINIMAL = {"role": "trainer", "link": "p2ptrain://x"}


def write(folder: Path, text: str) -> Path:
    path = folder / "role.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_sizes_are_bytes_and_rates_bytes_per_second() -> None:
    sizes = {"4GB": 4_000_000_000, "512MiB": 512 << 20, "1.5k": 1500, "7": 7, 12: 12, "1 gib": 1 << 30}
    rates = {
        "20Mbit": 2_500_000,
        "8bit/s": 1,
        "2.5MB": 2_500_000,
        "1Gbit/s": 125_000_000,
        "20 Mbps": 2_500_000,
        "8kb/s": 1000,
        "2 MB/s": 2_000_000,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    assert {text: parse_rate(text) for text in rates} == rates


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "4XB", "20Mbit", True, float("nan"), -1, None, [1]])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, 'role = "trainer"\nlink = "p2ptrain://x"\n[resources]\nthreads = 3\nup = "8Mbit"\n')
    config = PeerConfig.load(path, {"resources.up": "16Mbit", "resources.down": None})
    assert (config.resources.threads, config.resources.up, config.resources.down) == (3, 2_000_000, 0)


def test_paths_of_a_file_are_relative_to_it_and_those_of_the_command_line_are_not(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'role = "bootstrap"\nmanifest = "manifest.bin"\nrun_dir = "runs/a"\nallow_path = ["a", "/b"]\n'
    )
    config = PeerConfig.load(path, {"run_dir": "elsewhere"})
    assert config.allow_path == (tmp_path / "a", Path("/b"))
    assert config.manifest == tmp_path / "manifest.bin"
    assert config.run_dir == Path("elsewhere")


@pytest.mark.parametrize(
    ("text", "near"),
    [("[resources]\nthread = 1\n", "threads"), ("[resorces]\nthreads = 1\n", "resources"), ("roel = 1\n", "role")],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(tmp_path: Path, text: str, near: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"unknown key.*did you mean '{near}'") as caught:
        PeerConfig.load(path, MINIMAL)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_error_says_where_its_value_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, 'role = "trainer"\nlink = "p2ptrain://x"\n[resources]\nthreads = 3\n')
    with pytest.raises(ConfigError, match=r"^command line: resources\.threads"):
        PeerConfig.load(path, {"resources.threads": -1})
    with pytest.raises(ConfigError, match=r"^command line: network\.listen\.0: .*multiaddr"):
        PeerConfig.load(path, {"network.listen": ["127.0.0.1:80"]})


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cpu\n"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"resources\.device: .* is not a device: give auto, cpu, cuda, or cuda:N"):
        PeerConfig.load(None, {**MINIMAL, "resources.device": device})


def test_a_peer_must_know_its_swarm() -> None:
    with pytest.raises(ConfigError, match="link"):
        PeerConfig.load(None, {"role": "trainer"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"role = ", "not valid TOML"),
        (b"= 1", "not valid TOML"),
        (b"role = 'trainer", "not valid TOML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "role.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        PeerConfig.load(tmp_path / "role.toml")
    with pytest.raises(ConfigError, match="no such file"):
        PeerConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory; give the path of a TOML file"):
        PeerConfig.load(tmp_path)


@pytest.mark.parametrize("role", ["bootstrap", "trainer"])
def test_the_role_files_that_are_shipped_are_valid(role: str) -> None:
    assert PeerConfig.load(ROLES / f"{role}.toml").role == role


def test_the_trainers_role_file_shows_the_defaults() -> None:
    shown = PeerConfig.load(ROLES / "trainer.toml")
    default = PeerConfig.load(None, MINIMAL)
    for section in ("resources", "checkpoints", "log", "stop_after"):
        assert getattr(shown, section) == getattr(default, section)
