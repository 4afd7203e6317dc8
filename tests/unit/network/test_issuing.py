"""A seed gives passes to few newcomers of each network, and remembers them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import AdmissionSpec, Manifest, SignedManifest
from p2ptrain.network.admission import NO_PASS, Admission, Issuer, Revocations, mark, solve
from p2ptrain.network.issuing import PASS, PASS_SECONDS, PASSES_FILE, AskPass, PassIssuer, PassReply, network_of
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import to_bytes
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.signing import seeds_issuing_key
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner
from tests.support.sim.peers import members

ORGANIZER = NamedSigner("organizer")
SPEC = AdmissionSpec(mode="open", puzzle_bits=3, peers_per_network=2)
MANIFEST = SignedManifest.create(Manifest(admission=SPEC), ORGANIZER, "seed").manifest
NEAR, ALSO_NEAR, FAR = "192.0.2.7", "192.0.2.200", "198.51.100.1"


class Newcomers:
    """Callers of a seed, and how much later than at first they call.

    Attributes:
        hosts: By caller, from where it is connected; `NEAR` unless given.
    """

    def __init__(self, seed: Rpc, callers: list[Rpc], folder: Path) -> None:
        self.now = 1e9
        self.hosts: dict[str, list[str]] = {}
        self.admission = Admission(MANIFEST, lambda: self.now)
        self._seed, self._callers, self._folder = seed, callers, folder
        self.restart()

    def restart(self) -> None:
        runtime = self._seed.runtime
        runtime.clock = lambda: self.now
        key = seeds_issuing_key(ORGANIZER).private_bytes_raw()
        PassIssuer(key, self.admission, self._hosts_of, runtime, self._folder).serve(self._seed)

    async def _hosts_of(self, peer: str) -> list[str]:
        return self.hosts.get(peer, [NEAR])

    def peer(self, number: int) -> str:
        return self._callers[number].peer_id

    async def ask(self, number: int, wrong: bool = False) -> str:
        """Return why a caller is not in the swarm; empty if it got a pass that admits it."""
        peer = self.peer(number)
        nonce = solve(MANIFEST.digest, peer, SPEC.puzzle_bits).nonce
        question = AskPass(nonce + (1 << 62 if wrong else 0))
        reply = await self._callers[number].call(self._seed.peer_id, PASS, question, PassReply, 5)
        return reply.refusal or Admission(MANIFEST, lambda: self.now).admitted(peer, reply.credential)


@asynccontextmanager
async def newcomers(network: SimulatedNetwork, folder: Path, number: int = 4) -> AsyncIterator[Newcomers]:
    async with members(network, number + 1) as (seed, *callers):
        yield Newcomers(seed.rpc, [caller.rpc for caller in callers], folder)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.0/24"),
        ("::ffff:192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
    ],
)
def test_a_network_is_as_large_as_what_one_owner_usually_holds(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.fault(37)
@simulated()
async def test_only_so_many_of_a_network_get_a_pass_and_others_are_told_when_there_is_room(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    async with newcomers(network, tmp_path) as callers:
        callers.hosts = {callers.peer(1): [ALSO_NEAR], callers.peer(3): [FAR, NEAR]}
        assert await callers.ask(0) == await callers.ask(1) == ""
        callers.now += PASS_SECONDS / 4
        why = await callers.ask(2)
        assert re.search(r"2 places of its network 192\.0\.2\.0/24 are taken .* free within 5\.2 days", why), why
        assert await callers.ask(3) == ""  # It has another network, too.
        assert await callers.ask(0) == ""  # It has a place already.
        callers.restart()
        assert "are taken" in await callers.ask(2)
        callers.now += PASS_SECONDS * 3 / 4  # The pass of the second one ends, and the first one asked for another.
        assert await callers.ask(2) == ""
        assert "are taken" in await callers.ask(1)


@pytest.mark.fault(37)
@simulated()
async def test_a_seed_lets_in_nobody_without_a_solution_without_an_address_or_after_a_ban(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    async with newcomers(network, tmp_path) as callers:
        assert "puzzle is wrong" in await callers.ask(0, wrong=True)
        callers.hosts[callers.peer(1)] = []
        assert "over a relay" in await callers.ask(1)
        banned = Revocations(sequence=1, banned=(mark(callers.peer(2)),))
        signature = Issuer(MANIFEST, ORGANIZER).sign(banned)
        assert callers.admission.learn(signature)
        assert "banned" in await callers.ask(2)
        assert await callers.ask(0) == await callers.ask(3) == ""  # None of these took a place.


@pytest.mark.fault(37)
def test_neither_a_pass_of_another_key_nor_the_solution_alone_lets_contribute() -> None:
    admission = Admission(MANIFEST, lambda: 1e9)
    solution = to_bytes(solve(MANIFEST.digest, "bob", SPEC.puzzle_bits))
    assert admission.admitted("bob", solution) == NO_PASS
    assert admission.admitted("bob", solution, contributes=False) == ""  # It may ask for answers.
    assert admission.admitted("bob") == NO_PASS
    mallory = NamedSigner("mallory")
    own = Issuer(SignedManifest.create(MANIFEST, mallory).manifest, mallory).pass_for("bob")
    assert "not signed" in admission.admitted("carol", to_bytes(own))
    passed = to_bytes(Issuer(MANIFEST, ORGANIZER).pass_for("dan"))
    assert admission.admitted("dan", passed) == ""  # The organizer's passes count, whatever the network.


@simulated()
async def test_a_damaged_file_of_passes_is_refused_at_the_start(network: SimulatedNetwork, tmp_path: Path) -> None:
    async with newcomers(network, tmp_path) as callers:
        assert await callers.ask(0) == ""
        file = tmp_path / PASSES_FILE
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(ConfigError, match=r"passes\.bin is damaged .*: move it away"):
            callers.restart()
