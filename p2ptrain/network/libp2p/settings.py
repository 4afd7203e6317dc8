"""How a peer's libp2p daemon is set up: checked settings, and the command line that they mean for p2pd."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from p2ptrain.config import NetworkSection
from p2ptrain.network.libp2p.daemon import MAX_UNARY_BYTES
from p2ptrain.network.link import check_address, check_peer_address
from p2ptrain.network.reachability import host_of


class Libp2pSettings(NetworkSection):
    """A role file's section ``network``, with what only code changes."""

    find_peers: bool = True
    """Ask other daemons for the addresses of peers, and dial those that it hears of; without that, only what
    `Libp2pTransport.connect` was told is dialled."""
    startup_timeout_seconds: float = 15.0
    """For each of three attempts to start the daemon."""
    max_streams: int = 1024
    """Incoming streams at a time; more are refused."""
    direct_from_bytes: int = 2 << 20
    """How much a stream must be expected to carry to go past the daemon: what a connection costs beyond a stream
    between the daemons is what 2 or 3 MB cost less, and other streams use it afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _names_addresses(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name, check in (
            ("listen", check_address), ("announce", check_address), ("bootstrap", check_peer_address),
            ("trusted_relays", check_peer_address),
        ):  # fmt: skip
            for address in values.get(name, ()):
                check(address)
        return values

    def changed(self, **changes: Any) -> Self:
        """A checked copy."""
        return type(self)(**{**dict(self), **changes})

    @property
    def direct_hosts(self) -> tuple[str, ...]:
        """The IP addresses to listen at for direct connections: the daemon's, unless others cannot dial them anyway."""
        if self.direct == "off" or self.force_reachability == "private":
            return ()
        return tuple(dict.fromkeys(filter(None, map(host_of, self.listen))))

    def daemon_arguments(self) -> list[str]:
        """p2pd's command line for these settings, without its sockets and its key."""
        switches = {
            "connManager": True,
            "dhtServer": self.find_peers,
            "tls": True,
            "natPortMap": self.nat_port_map,
            "autonat": self.auto_nat,
            "relay": True,
            "relayService": self.relay,
            "autoRelay": bool(self.trusted_relays),
            # Discovery waits for minutes before it takes the relays that it was given.
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
        """Variables of p2pd's environment for these settings."""
        # With one thread, of its two relay services the one that carries starts last and answers: see
        # `p2ptrain.node.nat.relaying`.
        return {"GOMAXPROCS": "1"} if self.relay else {}
