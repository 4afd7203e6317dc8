"""A small internet of network namespaces: public hosts on one wire, private ones behind gateways that translate.

Needs root, ``ip`` and ``nft``. Nothing outside the namespaces made here is touched, and there is no way out of them, so
hosts have addresses of the public internet: libp2p treats private ones differently.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.processes.daemons import ROOT
from tests.support.processes.tellers import Teller

WIRE = "45.10.0"
RULES = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade PORTS; }
}
table ip gate {
  chain in { type filter hook forward priority 0; iifname "wan" ct state new drop; }
  chain own { type filter hook input priority 0; iifname "wan" ct state new drop; }
}
"""
"""A gateway that lets connections out, behind its own address, and none in; what it was not asked for is dropped.

``PORTS`` is empty for a gateway that keeps a host's port, whoever it talks with, and ``fully-random`` for a symmetric
one, which takes another port for each connection.
"""


@functools.cache
def why_unavailable() -> str:
    """Why this machine cannot make the namespaces; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 and nftables"
    lab = Internet()
    try:
        with lab:
            lab.private("probe")
    except (OSError, subprocess.CalledProcessError) as error:
        output = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"network namespaces with translation cannot be made here: {output[:200]}"
    return ""


class Internet:
    """Hosts, made by `public` and `private`; a context manager that removes them and ends what runs in them."""

    def __init__(self) -> None:
        self._prefix = f"p2pt{os.getpid()}"
        self._namespaces: list[str] = []
        self._hosts = 0
        self._outside: dict[str, str] = {}
        self._ports: dict[str, str] = {}
        self._behind: set[str] = set()
        self._has_other_wire = False
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Internet:
        try:
            self._wire = self._namespace("wire")
            _run("ip", "-n", self._wire, "link", "add", "wire", "type", "bridge")
            _run("ip", "-n", self._wire, "link", "set", "wire", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def public(self, name: str) -> Host:
        """A host with an address that all others can dial."""
        namespace = self._namespace(name)
        return Host(namespace, self._plug_in(namespace))

    def private(self, name: str, *, symmetric: bool = False) -> Host:
        """A host behind a gateway of its own, which nobody outside can dial."""
        gate, host = self._namespace(f"{name}g"), self._namespace(name)
        self._outside[gate] = self._plug_in(gate)
        _run("ip", "-n", gate, "link", "add", "lan", "type", "veth", "peer", "name", "eth", "netns", host)
        _run("ip", "-n", gate, "address", "add", "192.168.7.1/24", "dev", "lan")
        _run("ip", "-n", gate, "link", "set", "lan", "up")
        _run("ip", "-n", host, "address", "add", "192.168.7.2/24", "dev", "eth")
        _run("ip", "-n", host, "link", "set", "eth", "up")
        _run("ip", "-n", host, "route", "add", "default", "via", "192.168.7.1")
        rules = RULES.replace("PORTS", "fully-random" if symmetric else "")
        _run("ip", "netns", "exec", gate, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _run("ip", "netns", "exec", gate, "nft", "-f", "-", text=rules)
        self._ports[host] = self._ports[gate]
        self._behind.add(host)
        return Host(host, "192.168.7.2")

    def _plug_in(self, namespace: str) -> str:
        self._hosts += 1
        address, port = f"{WIRE}.{self._hosts}", f"port{self._hosts}"
        _run("ip", "-n", namespace, "link", "add", "wan", "type", "veth", "peer", "name", port, "netns", self._wire)
        _run("ip", "-n", self._wire, "link", "set", port, "master", "wire", "up")
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "wan")
        _run("ip", "-n", namespace, "link", "set", "wan", "up")
        self._ports[namespace] = port
        return address

    def lengthen(self, megabits: float, delay_seconds: float, loss: float) -> None:
        """Put `tests.lab.relay` into every cable: once, when all hosts are there; the delay is one end's."""
        cables = []
        for namespace in [name for name in self._ports if name not in self._behind]:
            number = self._ports[namespace].removeprefix("port")
            for here, device in ((namespace, "wan"), (self._wire, f"port{number}")):
                _run("ip", "netns", "exec", here, sys.executable, "-m", "tests.lab.relay", "--plain", device)
            names = f"near{number}", f"far{number}"
            _run("ip", "-n", self._wire, "link", "set", f"port{number}", "nomaster")
            _run("ip", "-n", self._wire, "link", "add", names[0], "type", "veth", "peer", "name", names[1])
            _run("ip", "-n", self._wire, "link", "set", names[0], "up")
            _run("ip", "-n", self._wire, "link", "set", names[1], "master", "wire", "up")
            cables.append((f"port{number}", names[0], megabits, delay_seconds, loss))
        self._ports = {name: port.replace("port", "far") for name, port in self._ports.items()}
        command = ["ip", "netns", "exec", self._wire, sys.executable, "-m", "tests.lab.relay", json.dumps(cables)]
        self._relay = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "ready\n"

    def unplug(self, host: Host) -> None:
        """Pull the cable of a public host: nothing gets through any more, and nobody is told."""
        _run("ip", "-n", self._wire, "link", "set", self._ports[host.namespace], "down")

    def plug_in(self, host: Host) -> None:
        _run("ip", "-n", self._wire, "link", "set", self._ports[host.namespace], "up")

    def lose(self, host: Host, percent: int) -> None:
        """Lose so many of a hundred packets that come to a public host, by chance; 0 ends that."""
        rules = "add table ip loss\ndelete table ip loss\n"
        if percent:
            rules += f"""
            table ip loss {{
              chain in {{
                type filter hook prerouting priority -200;
                iifname "wan" numgen random mod 100 < {percent} counter drop
              }}
            }}
            """
        _run("ip", "netns", "exec", host.namespace, "nft", "-f", "-", text=rules)

    def lost_packets(self, host: Host) -> int:
        """How many packets `lose` has lost since it was last called."""
        command = host.command("nft", "list", "table", "ip", "loss")
        listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
        return int(listed.partition("counter packets ")[2].split()[0])

    def part(self, *hosts: Host) -> None:
        """Put public hosts on a wire of their own: they reach each other, and none of the others."""
        if not self._has_other_wire:
            _run("ip", "-n", self._wire, "link", "add", "other", "type", "bridge")
            _run("ip", "-n", self._wire, "link", "set", "other", "up")
            self._has_other_wire = True
        for host in hosts:
            _run("ip", "-n", self._wire, "link", "set", self._ports[host.namespace], "master", "other")

    def heal(self, *hosts: Host) -> None:
        for host in hosts:
            _run("ip", "-n", self._wire, "link", "set", self._ports[host.namespace], "master", "wire")

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        return namespace

    def _remove(self) -> None:
        if self._relay is not None and self._relay.stdout is not None:
            self._relay.kill()
            self._relay.wait()
            self._relay.stdout.close()
        for namespace in reversed(self._namespaces):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", namespace)
        self._namespaces.clear()

    def forward(self, host: Host, port: int) -> str:
        """Have the gateway of a private host forward a TCP port to it; returns the gateway's address outside."""
        gate = f"{host.namespace}g"
        rules = f"""
        table ip nat {{
          chain forwarded {{
            type nat hook prerouting priority -100;
            iifname "wan" tcp dport {port} dnat to {host.address}
          }}
        }}
        insert rule ip gate in iifname "wan" tcp dport {port} accept
        """
        _run("ip", "netns", "exec", gate, "nft", "-f", "-", text=rules)
        return self._outside[gate]


class Host:
    """A machine in an `Internet`: the name of its namespace, and its IPv4 address as it sees it itself."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def received_bytes(self) -> int:
        path = "/sys/class/net/wan/statistics/rx_bytes"
        return int(subprocess.run(self.command("cat", path), check=True, capture_output=True, text=True).stdout)


class NatPeer(Teller):
    """A process of `tests.support.processes.nat_peer` on a host; a context manager."""

    def __init__(self, host: Host, directory: Path, name: str, **options: Any) -> None:
        run_dir = directory / name
        run_dir.mkdir()
        values = json.dumps({"name": name, "run_dir": str(run_dir), **options})
        super().__init__(
            name, host.command(sys.executable, "-m", "tests.support.processes.nat_peer", values), run_dir / "log"
        )

    def wait_until_reached(self, how: str, since: int = 0) -> dict[str, Any]:
        """Its first standing, since event number ``since``, with this reachability."""
        return self.wait_for("standing", lambda standing: standing["reached"] == how, since)

    @property
    def joined(self) -> dict[str, Any]:
        return self.wait_for("joined")

    def order(self, *order: Any) -> Any:
        since = len(self.events)
        self.tell(json.dumps(order))
        return self.wait_for("answer", since=since)["result"]

    def __enter__(self) -> NatPeer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def _run(*arguments: str, text: str = "") -> None:
    subprocess.run(arguments, cwd=ROOT, input=text, text=True, capture_output=True, check=True, timeout=20)
