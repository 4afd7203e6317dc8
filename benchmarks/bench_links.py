"""A round over links of a limited rate: how much of the time is the links' own.

Four peers, each in a network namespace (`benchmarks.namespaces`), average an int8 vector. The *floor* of a round is the
payload that must leave a peer, divided by its rate: with n peers, 2 (n - 1) / n encoded vectors. Plain TCP moves as
many bytes between all on the same links (`benchmarks.tcp_peer`), in turn with p2ptrain and hivemind; Ethernet, IP and
TCP headers alone take 4 to 5 % there. Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.findings import Finding, Section, faster
from benchmarks.harness import Measured, progress
from benchmarks.namespaces import LimitedNetwork, why_unavailable
from benchmarks.swarms import HivemindSwarm, P2PTrainSwarm, Setup
from benchmarks.workers import Workers
from p2ptrain.codecs import get_codec

PEERS = 4
CODEC = "int8"
PORT = 7070
START_SECONDS = 30.0
EXCHANGE_SECONDS = 150.0
SETTLE_SECONDS = 0.5
FLOOR_SHARE = 0.82
TCP_SHARE = 0.95


class TcpSwarm(Workers):
    """Processes that exchange bytes over plain TCP."""

    def __init__(self, network: LimitedNetwork, log: str | None) -> None:
        super().__init__("benchmarks.tcp_peer", log)
        self._network = network

    def begin(self) -> None:
        addresses = [self._network.address(index) for index in range(len(self._network.places))]
        for address, place in zip(addresses, self._network.places, strict=True):
            options = json.dumps({"address": address, "port": PORT})
            self.start(options, command=(*place.prefix, sys.executable))
        self.hear_all(START_SECONDS)
        for worker, own in zip(self.all, addresses, strict=True):
            worker.tell(json.dumps({"do": "meet", "others": [other for other in addresses if other != own]}))
        self.hear_all(START_SECONDS)

    def exchange(self, num_bytes: int) -> float:
        """Seconds until so many bytes went from everybody to everybody.

        Raises:
            RuntimeError: A process failed or took too long.
        """
        started = time.monotonic()
        self.tell_all(json.dumps({"do": "exchange", "num_bytes": num_bytes}))
        answers = self.hear_all(EXCHANGE_SECONDS)
        for answer in answers:
            if "failed" in answer:
                raise RuntimeError(f"plain TCP failed: {answer['failed']}")
        return float(max(answer["finished"] for answer in answers) - started)


def compare(
    rates: Sequence[float], num_values: int, rounds: int, log: str | None, hivemind_python: str
) -> Section | None:
    """All rates, in bits per second; None where such links cannot be made."""
    if why := why_unavailable():
        sys.stdout.write(f"rate-limited links are left out: {why}\n")
        return None
    payload = 2 * (PEERS - 1) * get_codec(CODEC).encoded_bytes(num_values) / PEERS
    size = f"{PEERS} x {num_values / 1e6:g}M {CODEC}"
    section = Section(
        f"A round of {size} over limited links: {payload / 1e6:.1f} MB leave each peer",
        ("rate", "", "round (s)", "of the floor", "of plain TCP", "sent / payload"),
    )
    with LimitedNetwork(PEERS) as network, contextlib.ExitStack() as running:
        setup = Setup(PEERS, num_values, CODEC, places=network.places, log=log, hivemind_python=hivemind_python)
        tcp = running.enter_context(TcpSwarm(network, log))
        ours = running.enter_context(P2PTrainSwarm(setup))
        theirs = running.enter_context(HivemindSwarm(setup))
        contenders: dict[str, Callable[[], float]] = {
            "p2ptrain": lambda: ours.round().seconds,
            "plain TCP": lambda: tcp.exchange(int(payload) // (PEERS - 1)),
            "hivemind": lambda: theirs.round().seconds,
        }
        for rate in rates:
            progress(f"rounds over links of {_name(rate)}")
            settings = network.limit(rate)
            try:
                _add_rate(section, rate, payload, *_in_turn(network, contenders, rounds))
            except RuntimeError as error:
                section.failures[_name(rate)] = str(error)
                break
            section.notes.append(f"{_name(rate)}: tbf burst {settings['burst']} bytes, limit {settings['limit']} bytes")
    return section


def _in_turn(
    network: LimitedNetwork, contenders: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Seconds of each contender's rounds, and the bytes that left the busiest peer; after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, rounds):
        for name, run in contenders.items():
            time.sleep(SETTLE_SECONDS)
            before = network.sent_bytes()
            took = run()
            after = network.sent_bytes()
            if turn >= 0:
                seconds[name].append(took)
                sent[name].append(max(now - then for now, then in zip(after, before, strict=True)))
    return (
        {name: Measured(tuple(values)) for name, values in seconds.items()},
        {name: Measured(tuple(values)) for name, values in sent.items()},
    )


def _add_rate(
    section: Section, rate: float, payload: float, seconds: dict[str, Measured], sent: dict[str, Measured]
) -> None:
    floor = 8 * payload / rate
    tcp = seconds["plain TCP"].median
    for name, one in seconds.items():
        share, of_tcp = f"{floor / one.median:.3f}", f"{tcp / one.median:.3f}"
        section.rows.append((_name(rate), name, one, share, of_tcp, f"{sent[name].median / payload:.3f}"))
    ours, theirs = seconds["p2ptrain"].median, seconds["hivemind"].median
    section.findings += [
        Finding(f"{_name(rate)}: a round's floor in its time", floor / ours, "1", FLOOR_SHARE, at_least=True),
        Finding(f"{_name(rate)}: plain TCP's time in a round's", tcp / ours, "1", TCP_SHARE, at_least=True),
        faster(f"{_name(rate)}: round", ours, theirs),
    ]
    section.results[_name(rate)] = {
        "floor_seconds": floor,
        "payload_bytes": payload,
        "seconds": {name: one.to_json() for name, one in seconds.items()},
        "sent_bytes": {name: one.to_json() for name, one in sent.items()},
    }


def _name(rate: float) -> str:
    return f"{rate / 1e6:g} Mbit/s"
