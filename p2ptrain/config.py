"""What one peer is told: its role file and the options that change it.

A `PeerConfig` concerns this machine alone; what the whole swarm agrees on is in the manifest (`p2ptrain.manifest`).
Values come from three places, the later winning: the defaults below, a TOML role file (see ``peers/``), and overrides
from the command line. `PeerConfig.source_of` says which place a value came from.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import explain, register_root
from p2ptrain.manifest.sections import Section

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(?i)^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(bytes|byte|bits|bit|b)?(?:/s|ps)?\s*$")


def parse_size(value: Any) -> int:
    """Bytes from a number of bytes or from text such as ``4GB`` (powers of ten) or ``4GiB`` (powers of two).

    Raises:
        ValueError: It is neither; the message shows an example.
    """
    return _parse_quantity(value, "a size such as '4GB' or '512MiB'", bits_allowed=False)


def parse_rate(value: Any) -> int:
    """Bytes per second from a number, or from text such as ``20Mbit`` or ``2.5MB`` (``/s`` may follow).

    Raises:
        ValueError: It is neither; the message shows an example.
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
    is_bits = (unit or "").lower().startswith("bit")
    if is_bits and not bits_allowed:
        raise ValueError(f"{value!r} is in bits; give {wanted}")
    return int(float(number) * _UNITS[(prefix or "").lower()] / (8 if is_bits else 1))


def check_multiaddr(text: str) -> str:
    """Return ``text`` if it is a multiaddr.

    Raises:
        ValueError: It is not; the message shows an example.
    """
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    try:
        Multiaddr(text)
    except (Error, ValueError) as error:
        raise ValueError(f"{text!r} is not a multiaddr; one looks like '/ip4/0.0.0.0/tcp/31337'") from error
    return text


Size = Annotated[int, BeforeValidator(parse_size)]
Rate = Annotated[int, BeforeValidator(parse_rate)]
Address = Annotated[str, AfterValidator(check_multiaddr)]


KIND_PATTERN = r"^[a-z][a-z0-9+.-]{0,63}(:[!$%'-;@-~]{0,1000})?$"
"""A transport or directory: ``KIND`` or ``KIND:DETAILS``, of characters that may stand in a link."""


class NetworkSection(Section):
    """How this peer is reached, and whom it asks first."""

    listen: tuple[Address, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen at; port 0 takes any free port."""
    announce: tuple[Address, ...] = ()
    """Multiaddrs to tell others instead of those listened at, for a forwarded port."""
    bootstrap: tuple[Address, ...] = ()
    """Multiaddrs, each ending in ``/p2p/<id>``, of peers to ask in addition to those in the link."""
    nat_port_map: bool = False
    """Ask the gateway, by UPnP or NAT-PMP, to forward a port."""
    relay: bool = False
    """Relay for peers of this swarm that cannot be reached directly."""
    auto_nat: bool = False
    """Find out from other peers whether this one can be reached; behind NAT use relays and hole punching."""
    trusted_relays: tuple[Address, ...] = ()
    """Multiaddrs, each ending in ``/p2p/<id>``, of relays to use besides those of the swarm."""
    force_reachability: Literal["public", "private"] | None = None
    """Skip finding out, and take this as the answer."""
    direct: Literal["auto", "off"] = "auto"
    """``auto`` moves bulk data over connections of its own, past the daemon, where peers can reach each other."""
    direct_port: int = Field(0, ge=0, le=65535)
    """TCP port to listen at for those, on the addresses of ``listen``; 0 takes any free one."""
    directory: str = Field("", pattern=rf"^$|{KIND_PATTERN}")
    """Where peers find each other: ``libp2p`` (their own DHT), ``https://…`` of a server such as
    examples/http_directory.py, or a kind that an installed package brings. Empty takes the link's."""
    transport: str = Field("libp2p", pattern=KIND_PATTERN)
    """What carries streams between peers: ``libp2p``, or a kind that an installed package brings."""


class ResourcesSection(Section):
    """What this peer may use of its machine."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """``auto`` (the first GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int = Field(0, ge=0, le=4096)
    """CPU threads for tensor arithmetic; 0 takes one per core."""
    max_memory: Size = 0
    """Resident memory, of all processes of this peer, that it may use: ``4GB``. In bytes; 0 sets no limit."""
    up: Rate = 0
    """Bandwidth to send with: ``20Mbit``. In bytes per second; 0 sets no limit."""
    down: Rate = 0
    """Bandwidth to receive with: ``100Mbit``. In bytes per second; 0 sets no limit."""


class CheckpointsSection(Section):
    """When state is written to disk."""

    every_rounds: int = Field(10, ge=0, le=1 << 40)
    """Rounds between checkpoints; 0 writes only the one at the end."""
    keep_last: int = Field(3, ge=1, le=10_000)
    """How many checkpoints are kept."""


class LogSection(Section):
    """What is written to standard error."""

    format: Literal["text", "json"] = "text"
    """``text`` for people or ``json``, one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are shown."""


class MetricsSection(Section):
    """What this peer tells programs on its own machine."""

    port: int = Field(0, ge=0, le=65535)
    """Serve Prometheus metrics at ``http://127.0.0.1:PORT/metrics``, and ``/healthz``; 0 serves none."""


class StopAfterSection(Section):
    """When this peer drains and leaves by itself."""

    rounds: int = Field(0, ge=0, le=1 << 40)
    """Leave once the swarm has committed this many rounds since this peer took on its state; 0 goes on."""
    at_round: int = Field(0, ge=0, le=1 << 40)
    """Leave once the swarm has committed this many rounds in all; 0 goes on."""
    minutes: float = Field(0.0, ge=0, le=1e9, allow_inf_nan=False)
    """Leave this long after training started; 0 goes on."""


class PipelineSection(Section):
    """What this peer does in a swarm whose model is cut into stages."""

    stage: int = Field(-1, ge=-1, le=255)
    """The stage to host; -1 lets the peer choose the one that needs it most."""
    credits: int = Field(8, ge=1, le=1024)
    """Microbatches that a trainer has under way at a time: more hide more latency."""


@register_root
class PeerConfig(Section):
    """Everything that one peer is told by its owner. Paths in a role file are relative to that file's folder."""

    role: Literal["bootstrap", "trainer", "stage", "both"]
    """``bootstrap`` serves the manifest and the directory; ``trainer`` trains, too. Where the model is cut into
    stages, ``stage`` hosts one, ``trainer`` sends microbatches through all of them, and ``both`` does both."""
    name: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9 ._-]*$")
    """A name for people, shown in the status; the end of the peer's id if empty."""
    run_dir: Path = Path("runs/peer")
    """Where this peer keeps its key, checkpoints, metrics and ``summary.json``."""
    link: str = ""
    """The swarm link, ``p2ptrain://…``."""
    manifest: Path | None = None
    """A signed manifest as ``p2ptrain seed`` writes it (``manifest.bin``); fetched by the link if not given."""
    weights: Path | None = None
    """Where this machine has the pretrained model with which the swarm begins, if not where the manifest says."""
    summary: Path | None = None
    """Where else to write the summary, besides ``summary.json`` in ``run_dir``."""
    drain_seconds: float = Field(45.0, ge=3, le=86400, allow_inf_nan=False)
    """The time from SIGTERM to the end of the process: a third of it for the round in progress, the rest for saving.
    ``TimeoutStopSec`` of systemd and ``stop_grace_period`` of compose should be longer."""
    network: NetworkSection = NetworkSection()
    resources: ResourcesSection = ResourcesSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    log: LogSection = LogSection()
    metrics: MetricsSection = MetricsSection()
    stop_after: StopAfterSection = StopAfterSection()
    pipeline: PipelineSection = PipelineSection()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _knows_its_swarm(self) -> PeerConfig:
        if not self.link and self.manifest is None:
            raise ValueError("give the swarm's link, or its signed manifest (manifest.bin)")
        return self

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> PeerConfig:
        """Read a role file and apply what the command line says.

        Args:
            path: A TOML role file, or None for defaults and overrides alone.
            overrides: Values by dotted key, such as ``{"network.relay": True}``; None means not given.

        Raises:
            ConfigError: The file cannot be read, a key is unknown or a value cannot be used; one line that says where
                the value came from and, for an unknown key, the nearest valid one.
        """
        values = read_toml(path) if path is not None else {}
        sources = {key: str(path) for key, _ in _leaves(values)}
        for key, value in (overrides or {}).items():
            if value is not None:
                _put(values, key, value)
                sources[key] = "command line"
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            at = _dotted(error.errors()[0]["loc"])
            default = str(path) if path is not None else "command line"
            raise ConfigError(explain(error, _nearest_source(sources, at, default))) from error
        if path is not None:
            config = config._relative_to(path.parent, sources)
        config._sources = sources
        return config

    def _relative_to(self, folder: Path, sources: Mapping[str, str]) -> PeerConfig:
        paths = {
            key: folder / value
            for key in ("run_dir", "manifest", "weights", "summary")
            if (value := getattr(self, key)) is not None and sources.get(key, "command line") != "command line"
        }
        return self.model_copy(update=paths)

    def source_of(self, key: str) -> str:
        """Where the value of a dotted key such as ``resources.threads`` came from.

        Returns:
            ``default``, the path of the role file, or ``command line``.
        """
        return _nearest_source(self._sources, key, "default")


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file") from error
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


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            return  # the file has a value where a section belongs: validation says so
        values = inner
    values[last] = value


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _nearest_source(sources: Mapping[str, str], key: str, default: str) -> str:
    """The source of ``key``, or of the list that it is an element of."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return default
