"""Validated settings of the libp2p transport, and p2pd's command line for them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from p2ptrain.config import NetworkSection
from p2ptrain.network.link import check_address, check_peer_address
from p2ptrain.network.reachability import host_of

MAX_UNARY_BYTES = 16 << 20
"""Largest directory message; hivemind's default of 4 MiB is less than all records of a full key."""


class Libp2pSettings(NetworkSection):
    """A role file's section ``network``, with further settings that only code changes."""

    find_peers: bool = True
    """True to look up peers' addresses at other daemons; otherwise only addresses of `Libp2pTransport.connect` are
    dialled."""
    startup_timeout_seconds: float = 15.0
    """Timeout of each attempt."""
    max_streams: int = 1024
    """Most parallel incoming streams; the transport refuses more."""
    direct_from_bytes: int = 2 << 20
    """Least ``expected_bytes`` of a stream for a direct connection; from about 2 MB on it repays its setup."""

    @model_validator(mode="before")
    @classmethod
    def _is_consistent(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name, check in (
            ("listen", check_address), ("announce", check_address), ("bootstrap", check_peer_address),
            ("trusted_relays", check_peer_address),
        ):  # fmt: skip
            for address in values.get(name, ()):
                check(address)
        if values.get("relay") and values.get("force_reachability") is None:
            values = {**values, "force_reachability": "public"}  # See `p2ptrain.node.nat.relaying`.
        return values

    def changed(self, **changes: Any) -> Self:
        """Return a validated copy with changes."""
        return type(self)(**{**dict(self), **changes})

    @property
    def direct_hosts(self) -> tuple[str, ...]:
        """The daemon's IP addresses, for direct connections; empty if direct is off or the peer is private."""
        if self.direct == "off" or self.force_reachability == "private":
            return ()
        return tuple(dict.fromkeys(filter(None, map(host_of, self.listen))))

    def daemon_arguments(self) -> list[str]:
        """Return p2pd's arguments, without its sockets and its key."""
        switches = {
            "connManager": True,
            "dhtServer": self.find_peers,
            "tls": True,
            "natPortMap": self.nat_port_map,
            "autonat": self.auto_nat,
            "relay": True,
            "relayService": self.relay,
            "autoRelay": bool(self.trusted_relays),
            # Discovery would delay the use of trusted relays by minutes.
            "relayDiscovery": False,
        }
        arguments = [f"-{name}={int(value)}" for name, value in switches.items()]
        arguments += [f"-persistentConnMaxMsgSize={MAX_UNARY_BYTES}"]
        for name, addresses in (
            ("hostAddrs", self.listen),
            ("announceAddrs", self.announce),
            ("trustedRelays", self.trusted_relays),
        ):
            if addresses:
                arguments.append(f"-{name}={','.join(addresses)}")
        if not self.listen:
            arguments.append("-noListenAddrs=1")
        if self.force_reachability is not None:
            arguments.append(f"-forceReachability{self.force_reachability.capitalize()}=1")
        return arguments

    def daemon_environment(self) -> dict[str, str]:
        """Return p2pd's additional environment variables."""
        # p2pd starts two relay services. With one thread the one with generous limits starts last, and serves; see
        # `p2ptrain.node.nat.relaying`.
        threads = {"GOMAXPROCS": "1"} if self.relay else {}
        # By default a daemon dials from the port at which it listens. If two dial each other within a round trip, TCP
        # opens one connection, both begin the handshake, it fails, and libp2p dials neither again for 5 s. Only hole
        # punching, for private peers, depends on that port.
        ports = {} if self.force_reachability == "private" else {"LIBP2P_TCP_REUSEPORT": "false"}
        return {"GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "nocolor", **threads, **ports}
