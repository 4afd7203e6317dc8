"""Peers in network namespaces of their own, on one wire with no way out, whose links have a limited rate.

Needs root, ``ip`` and ``tc`` with ``tbf``. Each peer's upload is limited where it leaves the peer, its download where
it leaves the wire for the peer, so neither takes from the other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess

from benchmarks.harness import undisturbed
from benchmarks.swarms import Place

COMMAND_SECONDS = 20.0
BURST_SECONDS = 0.002
"""What may leave at once, in seconds of the rate: above a timer's slack, far below a round."""
LEAST_BURST_BYTES = 8_192
QUEUE_SECONDS = 0.05
"""What may wait in front of a limit, in seconds of the rate: a router's buffer, some round trips long."""


@functools.cache
def why_unavailable() -> str:
    """Why this machine cannot make such a network; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with LimitedNetwork(1) as network:
            network.limit(100e6)
    except RuntimeError as error:
        return f"rate-limited network namespaces cannot be made here: {error}"
    return ""


class LimitedNetwork:
    """Hosts on one wire; a context manager that removes them. End what runs in them first.

    The addresses are of the public internet, which libp2p treats as what they stand for; nothing leaves the namespaces.
    """

    def __init__(self, hosts: int) -> None:
        self._num_hosts = hosts
        self._prefix = f"p2pbench{os.getpid()}"
        self._namespaces: list[str] = []

    @property
    def places(self) -> tuple[Place, ...]:
        """Where peers can be started, one a host."""
        return tuple(
            Place(f"/ip4/{self.address(index)}/tcp/0", ("ip", "netns", "exec", self._name(index)))
            for index in range(self._num_hosts)
        )

    def address(self, index: int) -> str:
        """A host's."""
        return f"45.10.0.{index + 1}"

    def limit(self, bits_per_second: float) -> dict[str, int]:
        """Give every host this rate in both directions; returns what `tbf` was told, in bytes."""
        rate = bits_per_second / 8
        settings = {
            "burst": max(LEAST_BURST_BYTES, int(rate * BURST_SECONDS)),
            "limit": max(4 * LEAST_BURST_BYTES, int(rate * QUEUE_SECONDS)),
        }
        words = [word for name, value in settings.items() for word in (name, str(value))]
        for index in range(self._num_hosts):
            for namespace, device in ((self._name(index), "wan"), (self._wire, f"port{index}")):
                _run(
                    "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf",
                    "rate", f"{int(bits_per_second)}bit", *words,
                )  # fmt: skip
        return settings

    def sent_bytes(self) -> list[int]:
        """By host: what left it so far, headers included."""
        names = [self._name(index) for index in range(self._num_hosts)]
        shown = [json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", "wan")) for name in names]
        return [links[0]["stats64"]["tx"]["bytes"] for links in shown]

    @property
    def _wire(self) -> str:
        return f"{self._prefix}-wire"

    def _name(self, index: int) -> str:
        return f"{self._prefix}-{index}"

    def _add(self, namespace: str) -> None:
        self._namespaces.append(namespace)
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _build(self) -> None:
        self._add(self._wire)
        _run("ip", "-n", self._wire, "link", "add", "wire", "type", "bridge")
        _run("ip", "-n", self._wire, "link", "set", "wire", "up")
        for index in range(self._num_hosts):
            name, port = self._name(index), f"port{index}"
            self._add(name)
            _run("ip", "-n", name, "link", "add", "wan", "type", "veth", "peer", "name", port, "netns", self._wire)
            _run("ip", "-n", self._wire, "link", "set", port, "master", "wire", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(index)}/24", "dev", "wan")
            _run("ip", "-n", name, "link", "set", "wan", "up")

    def __enter__(self) -> LimitedNetwork:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            for namespace in reversed(self._namespaces):
                with contextlib.suppress(RuntimeError):
                    _run("ip", "netns", "delete", namespace)
            self._namespaces.clear()


def _run(*arguments: str) -> str:
    """What a command printed.

    Raises:
        RuntimeError: It failed; says what it said.
    """
    try:
        return subprocess.run(arguments, text=True, capture_output=True, check=True, timeout=COMMAND_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise RuntimeError(f"{' '.join(arguments)}: {said[:200]}") from error
