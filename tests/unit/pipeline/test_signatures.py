"""A host in the middle of a route that sends what no trainer signed: the next host refuses it, and knows its sender.

The forger of these tests is a peer that has seen a trainer's hop to the second stage, as the host before it does.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.admission import OpenGate
from p2ptrain.network.identity import Identity
from p2ptrain.network.schema import to_wire
from p2ptrain.pipeline import signatures
from p2ptrain.pipeline.messages import IDS, Hop, HopRequest, MicrobatchId, Payload, pack, unpack
from p2ptrain.pipeline.signatures import MAX_FORGERIES, MicrobatchSigner, MicrobatchVerifier, NotSignedError
from p2ptrain.runtime import real_runtime
from tests.support.coroutines import simulated
from tests.support.sim.peers import SWARM, Member, until
from tests.support.sim.stage_hosts import (
    Hosts,
    RefusedError,
    bits,
    check_untouched,
    hosts,
    parts,
    send_and_settle,
    send_raw,
)

Forge = Callable[[Hop, Member], Hop]


def doubled(hop: Hop) -> Hop:
    """Each sample twice, so that it weighs twice as much."""
    inputs, targets = (unpack(each).repeat(2, *[1] * (len(each.shape) - 1)) for each in (hop.inputs, hop.targets))
    return replace(
        hop, samples=2 * hop.samples, tokens=2 * hop.tokens, inputs=pack(inputs, hop.inputs.codec),
        targets=pack(targets, IDS),
    )  # fmt: skip


def reshaped(hop: Hop) -> Hop:
    """The same bytes as twice as many samples of half the length."""

    def halved(each: Payload) -> Payload:
        samples, length, *rest = each.shape
        return replace(each, shape=(2 * samples, length // 2, *rest))

    return replace(hop, samples=2 * hop.samples, inputs=halved(hop.inputs), targets=halved(hop.targets))


def with_number(hop: Hop, number: int) -> Hop:
    return replace(hop, id=hop.id._replace(number=number))


def signed_by(forger: Member, hop: Hop) -> Hop:
    return MicrobatchSigner(forger.peer.signer, SWARM).sign(hop, None)


def with_signature(hop: Hop, **changes: Any) -> Hop:
    return replace(hop, signature=msgspec.structs.replace(hop.signature, **changes))


def signed_with_a_foreign_key(hop: Hop, forger: Member) -> Hop:
    """Signed by the forger's key, shown with the trainer's voucher for another one."""
    return with_signature(signed_by(forger, with_number(hop, 7)), voucher=hop.signature.voucher)


def vouched_for_by_the_forger(hop: Hop, forger: Member) -> Hop:
    """The trainer's key and signature, with a voucher of the forger for them, in the forger's name."""
    voucher = forger.peer.signer.sign(signatures._voucher_message(SWARM, hop.signature.key, b""))
    return with_signature(replace(hop, id=hop.id._replace(trainer=forger.rpc.peer_id)), voucher=voucher)


FORGERIES: dict[str, Forge] = {
    "invented, with another one's signature": lambda hop, forger: with_number(hop, 7),
    "invented, with the forger's key": lambda hop, forger: signed_by(forger, with_number(hop, 7)),
    "invented, with the trainer's voucher for another key": signed_with_a_foreign_key,
    "inflated": lambda hop, forger: doubled(hop),
    "as more and shorter samples": lambda hop, forger: reshaped(hop),
    "replayed in a later round": lambda hop, forger: replace(hop, id=hop.id._replace(round=1)),
    "in another trainer's name": lambda hop, forger: replace(hop, id=hop.id._replace(trainer=forger.rpc.peer_id)),
    "in the forger's name, with the trainer's key": vouched_for_by_the_forger,
    "with another credential": lambda hop, forger: with_signature(hop, credential=b"a pass"),
    "with another position": lambda hop, forger: with_signature(hop, position=1 << 40),
    "with other targets": lambda hop, forger: replace(hop, targets=pack(1 - unpack(hop.targets).clamp(0, 1), IDS)),
    "as an evaluation": lambda hop, forger: replace(hop, requires_grad=False),
    "with its loss elsewhere": lambda hop, forger: replace(hop, returns_output=True),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
@simulated(hosts, seed=41)
async def test_a_forged_microbatch_is_refused_before_it_is_computed_and_blames_its_sender(
    swarm: Hosts, forge: Forge
) -> None:
    trainer, last, forger = swarm.trainers[0], swarm.hosts[1], await swarm.add_trainer("forger")
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    before, passes = bits(last), last.sum.passes
    sent = parts(forge(swarm.hidden(trainer, 1), forger))
    with pytest.raises(Exception, match=r"sent microbatch") as caught:
        await send_raw(forger.rpc, last, *sent, seconds=5.0)
    assert not isinstance(caught.value, RefusedError), "it is no refusal of an honest microbatch"
    assert last.rpc.refusals == {(forger.rpc.peer_id, "NotSignedError"): 1}
    assert (bits(last), last.sum.passes) == (before, passes)
    await send_and_settle(swarm, trainer, 1, swarm.hosts)
    check_untouched(swarm, 0, 1)


@simulated(hosts, seed=42)
async def test_a_settled_microbatch_is_taken_neither_again_nor_in_the_next_round(swarm: Hosts) -> None:
    trainer, (first, last), forger = swarm.trainers[0], swarm.hosts, await swarm.add_trainer("forger")
    await send_and_settle(swarm, trainer, 0, [first, last])
    sent = parts(swarm.hidden(trainer, 0))
    with pytest.raises(RefusedError, match="settled already"):
        await send_raw(forger.rpc, last, *sent)
    await last.host.close_round(1.0)
    last.host.begin_round(1)
    with pytest.raises(RefusedError, match="came too late"):
        await send_raw(forger.rpc, last, *sent)
    assert last.sum.passes == 1


@simulated(hosts, seed=43)
async def test_a_joining_caller_with_other_targets_is_refused_and_the_honest_one_is_served(swarm: Hosts) -> None:
    """The microbatch under way is not blamed for a second caller of the same one."""
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    forger = await swarm.add_trainer("forger")
    hop = swarm.hop(trainer, 0, last)
    sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
    await until(lambda: last.host.ledger.num_running == 1)
    forged = replace(swarm.hidden(trainer, 0), targets=pack(torch.zeros(hop.targets.shape, dtype=torch.int64), IDS))
    sent = parts(forged)
    with pytest.raises(Exception, match="other targets"):
        await send_raw(forger.rpc, last, *sent)
    assert [leg.host for leg in (await sending).legs] == [first.id, last.id]
    assert last.rpc.refusals == {(forger.rpc.peer_id, "NotSignedError"): 1}


@simulated(hosts, (0, 1, 1), seed=45)
async def test_a_copy_at_another_host_counts_only_if_the_trainer_settles_it_there(swarm: Hosts) -> None:
    trainer, (first, last, other), forger = swarm.trainers[0], swarm.hosts, await swarm.add_trainer("forger")
    await send_and_settle(swarm, trainer, 0, [first, last])
    sent = parts(swarm.hidden(trainer, 0))
    await send_raw(forger.rpc, other, *sent)
    assert other.sum.passes == 1
    assert await swarm.settle(forger, other, 0) == [False]
    assert await other.host.close_round(1.0) == []
    assert not other.sum.values.any()


@simulated(hosts, seed=46)
async def test_an_evaluation_is_repeated_for_two_rounds_at_most(swarm: Hosts) -> None:
    trainer, host = swarm.trainers[0], swarm.hosts[1]
    forger = await swarm.add_trainer("forger")
    sent = parts(swarm.hidden(trainer, 0, requires_grad=False))
    for round in (1, 2):
        await send_raw(forger.rpc, host, *sent)
        await host.host.close_round(1.0)
        host.host.begin_round(round)
    with pytest.raises(RefusedError, match="came too late"):
        await send_raw(forger.rpc, host, *sent)


@simulated(hosts, seed=47)
async def test_a_flood_of_forgeries_costs_few_checks_and_others_are_still_served(
    swarm: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, last = swarm.trainers[0], swarm.hosts[1]
    forger, checked = await swarm.add_trainer("forger"), list[HopRequest]()
    fault = MicrobatchVerifier._fault

    def counting(verifier: MicrobatchVerifier, request: HopRequest, is_known: bool) -> str:
        checked.append(request)
        return fault(verifier, request, is_known)

    monkeypatch.setattr(MicrobatchVerifier, "_fault", counting)
    sent = parts(with_number(swarm.hidden(trainer, 1), 7))
    for _ in range(4 * MAX_FORGERIES):
        with pytest.raises(PeerRefusedError, match="sent microbatch"):
            await send_raw(forger.rpc, last, *sent)
    assert len(checked) == MAX_FORGERIES
    assert last.rpc.refusals == {(forger.rpc.peer_id, "NotSignedError"): 4 * MAX_FORGERIES}
    await send_and_settle(swarm, trainer, 1, swarm.hosts)


class Door(OpenGate):
    """Lets in whoever shows its own name, and remembers those."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        if credential == peer.encode():
            self.known.add(peer)
        return "" if peer in self.known else "it has no pass"


@simulated(hosts, seed=48)
async def test_a_later_stage_takes_microbatches_of_admitted_trainers_alone_and_blames_no_host(swarm: Hosts) -> None:
    """A host in the middle could make up any number of trainers otherwise, each with its share of the next host."""
    (first, last), guest = swarm.hosts, await swarm.add_trainer("guest")
    last.rpc.gate = Door(first.id)
    with pytest.raises(RefusedError, match="no trainer of this swarm: it has no pass"):
        await send_raw(first.rpc, last, *parts(swarm.hidden(guest, 0)))
    assert last.rpc.refusals == {(first.id, "BadMicrobatchError"): 1}
    signer = MicrobatchSigner(guest.peer.signer, SWARM, guest.rpc.peer_id.encode())
    await send_raw(first.rpc, last, *parts(signer.sign(swarm.hidden(guest, 1), None)))
    last.rpc.gate = Door(first.id, guest.rpc.peer_id)  # As known from its record.
    await send_raw(first.rpc, last, *parts(swarm.hidden(guest, 2)))
    last.rpc.gate = Door(first.id)  # Its pass was revoked.
    with pytest.raises(RefusedError, match="it has no pass"):
        await send_raw(first.rpc, last, *parts(swarm.hidden(guest, 3)))


@simulated(hosts, seed=44)
async def test_a_trainers_voucher_is_verified_once_and_one_key_is_remembered_of_few_trainers(
    swarm: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "MAX_KEYS", 2)
    trainer, host, others = swarm.trainers[0], swarm.hosts[0], [await swarm.add_trainer(name) for name in "abc"]
    verifier, vouched = MicrobatchVerifier(host.peer.signer, SWARM, host.peer.runtime), list[str]()
    verify = host.peer.signer.verify

    def counting(peer_id: str, message: bytes, proof: bytes) -> bool:
        vouched.append(peer_id)
        return verify(peer_id, message, proof)

    monkeypatch.setattr(host.peer.signer, "verify", counting)
    for number in range(5):
        await verifier.check("caller", swarm.hop(trainer, number).request)
    assert vouched == [trainer.rpc.peer_id]
    for _ in range(5):  # Processes of one trainer, one after the other.
        await verifier.check("caller", signed_by(trainer, swarm.hop(trainer, 1)).request)
    assert len(vouched) == 6
    assert len(verifier._keys) == 1
    for other in others:
        await verifier.check("caller", swarm.hop(other, 0).request)
    assert list(verifier._keys) == [other.rpc.peer_id for other in others[1:]]


def test_a_signature_counts_in_its_swarm_alone_and_is_checked_beside_the_event_loop() -> None:
    threads = set[str]()

    class Watched(Identity):
        def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
            threads.add(threading.current_thread().name)
            return super().verify(peer_id, message, proof)

    async def check(request: HopRequest, swarm: bytes) -> None:
        await MicrobatchVerifier(host, swarm, runtime).check("caller", request)

    runtime = real_runtime()
    with Identity.ephemeral() as trainer, Watched.ephemeral() as host:
        tokens = pack(torch.zeros(1, 2, dtype=torch.int64), IDS)
        hop = Hop(MicrobatchId(trainer.peer_id, 3, 1), 0, 1, 2, (), tokens, tokens)
        request = MicrobatchSigner(trainer, SWARM).sign(hop, 5).request
        asyncio.run(check(request, SWARM))
        with pytest.raises(NotSignedError, match="does not vouch"):
            asyncio.run(check(request, bytes(32)))
    runtime.close()
    assert to_wire(request)["signature"]["position"] == 5
    assert all(name.startswith("pool-") for name in threads)
