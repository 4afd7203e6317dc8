"""The configuration of one peer; settings of the whole swarm are in the manifest (`p2ptrain.manifest`).

Precedence, lowest first: the defaults below, a TOML role file (see ``peers/``), the command line.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import explain
from p2ptrain.manifest.sections import Section

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(?i)^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(bytes|byte|bits|bit|b)?(?:/s|ps)?\s*$")


def parse_size(value: Any) -> int:
    """Return the bytes of a number, or of text such as ``4GB`` (powers of ten) or ``4GiB`` (powers of two).

    Raises `ValueError`, with an example, for other values.
    """
    return _parse_quantity(value, "a size such as '4GB' or '512MiB'", bits_allowed=False)


def parse_rate(value: Any) -> int:
    """Return the bytes per second of a number, or of text such as ``20Mbit`` or ``2.5MB`` (``/s`` may follow).

    A small ``b`` is a bit, as in ``20Mbps``. Raises as `parse_size`.
    """
    return _parse_quantity(value, "a rate such as '20Mbit' or '2.5MB'", bits_allowed=True)


def _parse_quantity(value: Any, wanted: str, *, bits_allowed: bool) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} is not {wanted}")
        return int(value)
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not {wanted}")
    number, prefix, unit = match.groups()
    is_bits = (unit or "").lower().startswith("bit") or (bits_allowed and unit == "b")  # As in Mbps.
    if is_bits and not bits_allowed:
        raise ValueError(f"{value!r} is in bits; give {wanted}")
    return int(float(number) * _UNITS[(prefix or "").lower()] / (8 if is_bits else 1))


def check_multiaddr(text: str) -> str:
    """Return ``text``; raise `ValueError`, with an example, unless it is a multiaddr."""
    from multiaddr import Multiaddr

    try:
        Multiaddr(text)
    except Exception as error:  # Its codecs raise many kinds.
        raise ValueError(f"{text!r} is not a multiaddr; one looks like '/ip4/0.0.0.0/tcp/31337'") from error
    return text


def check_device(text: str) -> str:
    """Return ``text``; raise `ValueError`, with the devices that are allowed, unless it names one."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise ValueError(f"{text!r} is not a device: give auto, cpu, cuda, or cuda:N for one of several GPUs")
    return text


_WINDOW = re.compile(r"^\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*$")


def parse_schedule(text: str) -> list[tuple[int, int]]:
    """Return the windows of a schedule such as ``22:00-07:00,12:00-13:00``, in minutes of the day from and to.

    A window whose end comes before its beginning goes across midnight. Raises `ValueError`, with an example.
    """
    windows = []
    for part in text.split(",") if text.strip() else []:
        numbers = [int(number) for number in match.groups()] if (match := _WINDOW.match(part)) else []
        first, end = (60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]) if numbers else (0, 0)
        if first == end or max(first, end) > 24 * 60 or first == 24 * 60 or max(numbers[1], numbers[3]) > 59:
            raise ValueError(f"{part.strip()!r} is no time of the day such as '22:00-07:00'; several by commas")
        windows.append((first, end))
    return windows


def _check_schedule(text: str) -> str:
    parse_schedule(text)
    return text


Size = Annotated[int, BeforeValidator(parse_size)]
Rate = Annotated[int, BeforeValidator(parse_rate)]
Address = Annotated[str, AfterValidator(check_multiaddr)]

KIND_PATTERN = r"^[a-z][a-z0-9+.-]{0,63}(:[!$%'-;@-~]{0,1000})?$"
"""A transport or directory, ``KIND`` or ``KIND:DETAILS``, in characters that are valid in a link."""


class NetworkSection(Section):
    """Addresses, reachability, directory and transport of this peer."""

    listen: tuple[Address, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen at; port 0 takes any free port."""
    announce: tuple[Address, ...] = ()
    """Multiaddrs to announce instead of those of ``listen``, such as a forwarded port."""
    bootstrap: tuple[Address, ...] = ()
    """Multiaddrs, each ending in ``/p2p/<id>``, of bootstrap peers besides those in the link."""
    nat_port_map: bool = False
    """Forward a port by UPnP or NAT-PMP."""
    relay: bool = False
    """Relay for peers of this swarm that are not directly reachable."""
    auto_nat: bool = False
    """Detect reachability with the help of other peers; behind NAT, use relays and hole punching."""
    trusted_relays: tuple[Address, ...] = ()
    """Multiaddrs, each ending in ``/p2p/<id>``, of relays besides those of the swarm."""
    force_reachability: Literal["public", "private"] | None = None
    """Use this reachability instead of detecting it."""
    direct: Literal["auto", "off"] = "auto"
    """``auto`` sends bulk data over direct connections, past the daemon, where peers can reach each other."""
    direct_port: int = Field(0, ge=0, le=65535)
    """TCP port for direct connections, on the addresses of ``listen``; 0 takes any free one."""
    directory: str = Field("", pattern=rf"^$|{KIND_PATTERN}")
    """The directory: ``libp2p`` (a DHT), the ``https://…`` URL of a server (examples/loops/http_directory.py), or a
    kind from an installed package. Empty takes the link's."""
    transport: str = Field("libp2p", pattern=KIND_PATTERN)
    """The transport of streams between peers: ``libp2p``, or a kind from an installed package."""


class ResourcesSection(Section):
    """Limits on the use of this machine."""

    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """``auto`` (the first GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int = Field(0, ge=0, le=4096)
    """CPU threads for tensor arithmetic; 0 takes one per core."""
    max_memory: Size = 0
    """Resident memory of all processes of this peer, in bytes or as ``4GB``; 0 sets no limit."""
    max_gpu_memory: Size = 0
    """Memory of the GPU that torch may take, in bytes or as ``8GB``; 0 sets no limit."""
    serving_share: float = Field(0.5, ge=0.01, le=1.0)
    """Share of time in which a batch of generation may compute while this peer trains; 1 sets no limit."""
    nice: int = Field(0, ge=0, le=19)
    """Added to the niceness of all processes of this peer and of their sessions, so that other programs go first;
    ``join`` adds 10. Linux derives the priority of disk accesses from it."""
    up: Rate = 0
    """Upload bandwidth, in bytes per second or as ``20Mbit``; 0 sets no limit."""
    down: Rate = 0
    """Download bandwidth, in bytes per second or as ``100Mbit``; 0 sets no limit."""


class CheckpointsSection(Section):
    """Frequency and number of checkpoints."""

    every_rounds: int = Field(10, ge=0, le=1 << 40)
    """Rounds between checkpoints; 0 writes only the final one."""
    keep_last: int = Field(3, ge=1, le=10_000)


class LogSection(Section):
    """The log on standard error."""

    format: Literal["text", "json"] = "text"
    """``json`` writes one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"


class MetricsSection(Section):
    """The metrics endpoint on loopback."""

    port: int = Field(0, ge=0, le=65535)
    """Serve ``/metrics`` (Prometheus) and ``/healthz`` at ``http://127.0.0.1:PORT``; 0 serves none."""


class StopAfterSection(Section):
    """Conditions under which this peer drains and leaves; 0 disables one."""

    rounds: int = Field(0, ge=0, le=1 << 40)
    """Rounds that the swarm commits after this peer took on its state."""
    at_round: int = Field(0, ge=0, le=1 << 40)
    """Rounds that the swarm commits in all."""
    minutes: float = Field(0.0, ge=0, le=1e9)
    """Time since training started."""


class PipelineSection(Section):
    """This peer's part in a swarm whose model is cut into stages."""

    stage: int = Field(-1, ge=-1, le=255)
    """The stage to host; -1 lets the peer choose the stage that needs a host most."""
    credits: int = Field(8, ge=1, le=1024)
    """Microbatches in flight per trainer; more hide more latency."""


class GuestSection(Section):
    """Reasons for which this peer pauses. It stays reachable meanwhile, and follows the swarm without contributing."""

    schedule: Annotated[str, AfterValidator(_check_schedule)] = ""
    """Hours in which it works, by local time, such as ``22:00-07:00,12:00-13:00``; empty for all hours."""
    only_when_idle: float = Field(0.0, ge=0, le=100)
    """Pause while other programs take more than so many percent of all cores' time; 0 sets no limit."""
    on_battery: bool = False
    """Work on a battery, too; else this peer pauses until the machine is plugged in."""
    gpu_celsius: float = Field(0.0, ge=0, le=150)
    """Pause while the GPU that this peer uses is hotter, until it is 10 degrees cooler; 0 sets no limit. It needs
    nvidia-ml-py (``p2ptrain[gpu]``)."""


class ServingSection(Section):
    """This peer's part in generation with the swarm's model."""

    enabled: bool = False
    """Serve the stage that this peer hosts, or the whole model that it trains, to those who generate."""
    weights: Literal["fp32", "int8"] = "fp32"
    """Precision of the served copy: ``fp32`` is exact, ``int8`` takes a quarter of the memory."""
    wire: Literal["fp32", "int8"] = "fp32"
    """Encoding of hidden states between stages: ``int8`` takes about a quarter of the bytes, and has other bits. A
    session stays within one, so hosts of all stages need the same value."""
    cache: Size = 512 * 10**6
    """Memory for keys, values and outputs of all sessions and prefixes, in bytes or as ``512MB``."""
    every_rounds: int = Field(10, ge=1, le=1 << 40)
    """Rounds from one served version of the weights to the next, or more if rounds are short. All hosts need the same
    value."""
    speculation: Literal["ngram", "off"] = "ngram"
    """``ngram``: a host of the first stage drafts tokens that followed the last ones before. No answer changes."""
    context: int = Field(0, ge=0, le=1 << 20)
    """Most tokens of a prompt and its answer; 0 takes the model's."""


class PeerConfig(Section):
    """The configuration of one peer. Paths in a role file are relative to that file's folder."""

    role: Literal["bootstrap", "trainer", "stage", "both", "server"]
    """``bootstrap`` serves the manifest and the directory; ``trainer`` trains, too. Where the model is cut into
    stages, ``stage`` hosts one, ``trainer`` sends microbatches through all of them, and ``both`` does both. ``server``
    serves a stage, or the whole model, and does not train."""
    name: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9 ._-]*$")
    """The name in the status; the end of the peer's id if empty."""
    run_dir: Path = Path("runs/peer")
    """Folder of the peer's key, checkpoints, metrics and ``summary.json``."""
    link: str = ""
    """The swarm link, ``p2ptrain://…``."""
    manifest: Path | None = None
    """Signed manifest (``manifest.bin``) as ``p2ptrain seed`` writes it; None fetches it by the link."""
    weights: Path | None = None
    """Local copy of the pretrained model; None takes the one that the manifest names."""
    data: Path | None = None
    """This peer's own text, a file or a folder, for a swarm with ``data.source = "own"``. It stays on this machine."""
    policy: Path | None = None
    """The site's policy, a TOML file that says what may leave this machine in a private swarm; None for none."""
    allow_path: tuple[Path, ...] = ()
    """Folders and files that the manifest may name as ``path:…`` for this peer to read, with all below them. List only
    those whose text the swarm may train on."""
    summary: Path | None = None
    """Another path for the summary, besides ``summary.json`` in ``run_dir``."""
    drain_seconds: float = Field(45.0, ge=3, le=86400)
    """Deadline from SIGTERM to the end of the process: a third for the round in progress, the rest for saving;
    < ``TimeoutStopSec`` of systemd and ``stop_grace_period`` of compose."""
    network: NetworkSection = NetworkSection()
    resources: ResourcesSection = ResourcesSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    log: LogSection = LogSection()
    metrics: MetricsSection = MetricsSection()
    stop_after: StopAfterSection = StopAfterSection()
    pipeline: PipelineSection = PipelineSection()
    serving: ServingSection = ServingSection()
    guest: GuestSection = GuestSection()

    @model_validator(mode="after")
    def _knows_its_swarm(self) -> PeerConfig:
        if not self.link and self.manifest is None:
            raise ValueError("give the swarm's link, or its signed manifest (manifest.bin)")
        return self

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> PeerConfig:
        """Return the configuration of a role file with overrides applied.

        Args:
            path: A TOML role file; None takes the defaults.
            overrides: Values by dotted key, such as ``{"network.relay": True}``; a value of None is ignored.

        Raises:
            ConfigError: The file cannot be read, a key is unknown or a value is invalid. The message names the value's
                source and, for an unknown key, the nearest valid one.
        """
        values = read_toml(path) if path is not None else {}
        sources = {key: str(path) for key, _ in _leaves(values)}
        for key, value in (overrides or {}).items():
            if value is not None:
                put(values, key, value)  # If the file has a value in place of a section, validation refuses it.
                sources[key] = "command line"
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"]))
            default = str(path) if path is not None else "command line"
            raise ConfigError(explain(error, _nearest_source(sources, at, default), cls)) from error
        return config if path is None else config._relative_to(path.parent, sources)

    def _relative_to(self, folder: Path, sources: Mapping[str, str]) -> PeerConfig:
        paths = {
            key: tuple(folder / each for each in value) if isinstance(value, tuple) else folder / value
            for key in ("run_dir", "manifest", "weights", "data", "policy", "allow_path", "summary")
            if (value := getattr(self, key)) is not None and sources.get(key, "command line") != "command line"
        }
        return self.model_copy(update=paths)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file; raise `ConfigError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"{path}: {str(error.strerror).lower()}; give the path of a TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def put(values: dict[str, Any], key: str, value: Any) -> bool:
    """Set the value of a dotted key; return False if there is a value in place of its section."""
    section, _, inner_key = key.partition(".")
    if not inner_key:
        values[key] = value
        return True
    inner = values.setdefault(section, {})
    return isinstance(inner, dict) and put(inner, inner_key, value)


def _nearest_source(sources: Mapping[str, str], key: str, default: str) -> str:
    """Return the source of ``key`` or of the nearest key that contains it."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return default
