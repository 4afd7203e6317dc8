"""How a peer's libp2p daemon is set up: checked settings, and the command line that they mean for p2pd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p2ptrain.network.libp2p.daemon import MAX_UNARY_BYTES
from p2ptrain.network.link import check_address, check_peer_address
from p2ptrain.network.reachability import host_of


@dataclass(frozen=True)
class Libp2pSettings:
    """How a peer's daemon listens and what it does for others. Multiaddrs are text.

    Attributes:
        listen: Where to listen; port 0 takes any free one.
        announce: Where others are told to dial; empty: wherever the daemon listens.
        bootstrap: Peers to stay connected with, each address ending in ``/p2p/<id>``.
        nat_port_map: Ask the gateway to open a port (UPnP, NAT-PMP).
        auto_nat: Help others to find out whether they can be reached, and take part in hole punching.
        relay: Serve as a relay for peers that cannot be reached.
        trusted_relays: Relays to be reached through, each ending in ``/p2p/<id>``; used when this peer's reachability
            is private.
        force_reachability: ``private`` takes the relays at once, ``public`` never; None lets the daemon find out.
        find_peers: Ask other daemons for the addresses of peers, and dial those that it hears of; without that, only
            what `Libp2pTransport.connect` was told is dialled.
        startup_timeout_seconds: For each of three attempts to start the daemon.
        max_streams: Incoming streams at a time; more are refused.
        direct: Whether streams that carry much go over connections without the daemons where peers can reach each
            other (`p2ptrain.network.libp2p.direct`); ``off`` neither dials such connections nor listens for them.
        direct_port: The TCP port to listen at for those; 0 takes any free one.
        direct_from_bytes: How much a stream must be expected to carry for that: what a connection costs beyond a stream
            between the daemons is what 2 or 3 MB cost less, and other streams use it afterwards.
    """

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    nat_port_map: bool = False
    auto_nat: bool = False
    relay: bool = False
    trusted_relays: tuple[str, ...] = ()
    force_reachability: Literal["private", "public"] | None = None
    find_peers: bool = True
    startup_timeout_seconds: float = 15.0
    max_streams: int = 1024
    direct: Literal["auto", "off"] = "auto"
    direct_port: int = 0
    direct_from_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        for address in (*self.listen, *self.announce):
            check_address(address)
        for address in (*self.bootstrap, *self.trusted_relays):
            check_peer_address(address)

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
