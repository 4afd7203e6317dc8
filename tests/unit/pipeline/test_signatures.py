"""A host in the middle of a route that sends what no trainer signed: the next host refuses it, and knows its sender.

The forger of these tests is a peer that has seen a trainer's hop to the second stage, as the host before it does.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from p2ptrain.network.identity import Identity
from p2ptrain.network.schema import to_wire
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline import signatures
from p2ptrain.pipeline.messages import IDS, Hop, MicrobatchId, pack, unpack
from p2ptrain.pipeline.signatures import MicrobatchSigner, MicrobatchVerifier, NotSignedError
from tests.support.coroutines import simulated
from tests.support.sim.peers import SWARM, Member, until
from tests.support.sim.stage_hosts import (
    Hosts,
    RefusedError,
    bits,
    check_untouched,
    heads,
    hosts,
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


def with_number(hop: Hop, number: int) -> Hop:
    return replace(hop, id=hop.id._replace(number=number))


def signed_by(forger: Member, hop: Hop) -> Hop:
    return MicrobatchSigner(forger.peer.signer, SWARM).sign(hop, None)


def signed_with_a_foreign_key(hop: Hop, forger: Member) -> Hop:
    """Signed by the forger's key, shown with the trainer's voucher for another one."""
    forged = signed_by(forger, with_number(hop, 7))
    return replace(forged, signature=replace_voucher(forged, hop.signature.voucher))


def replace_voucher(hop: Hop, voucher: bytes) -> signatures.Signature:
    return signatures.Signature(**{**{name: getattr(hop.signature, name) for name in FIELDS}, "voucher": voucher})


FIELDS = ("position", "inputs", "targets", "key", "voucher", "value")

FORGERIES: dict[str, Forge] = {
    "invented, with another one's signature": lambda hop, forger: with_number(hop, 7),
    "invented, with the forger's key": lambda hop, forger: signed_by(forger, with_number(hop, 7)),
    "invented, with the trainer's voucher for another key": signed_with_a_foreign_key,
    "inflated": lambda hop, forger: doubled(hop),
    "with more tokens than it has": lambda hop, forger: replace(hop, samples=1),
    "replayed in a later round": lambda hop, forger: replace(hop, id=hop.id._replace(round=1)),
    "in another trainer's name": lambda hop, forger: replace(hop, id=hop.id._replace(trainer=forger.rpc.peer_id)),
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
    request, data = heads(forge(swarm.hidden(trainer, 1), forger))
    with pytest.raises(Exception, match=r"sent microbatch") as caught:
        await send_raw(forger.rpc, last, request, *data, seconds=5.0)
    assert not isinstance(caught.value, RefusedError), "it is no refusal of an honest microbatch"
    assert last.rpc.refusals == {(forger.rpc.peer_id, "NotSignedError"): 1}
    assert (bits(last), last.sum.passes) == (before, passes)
    await send_and_settle(swarm, trainer, 1, swarm.hosts)
    check_untouched(swarm, 0, 1)


@simulated(hosts, seed=42)
async def test_a_settled_microbatch_is_taken_neither_again_nor_in_the_next_round(swarm: Hosts) -> None:
    trainer, (first, last), forger = swarm.trainers[0], swarm.hosts, await swarm.add_trainer("forger")
    await send_and_settle(swarm, trainer, 0, [first, last])
    request, data = heads(swarm.hidden(trainer, 0))
    with pytest.raises(RefusedError, match="settled already"):
        await send_raw(forger.rpc, last, request, *data)
    await last.host.close_round(1.0)
    last.host.begin_round(1)
    with pytest.raises(RefusedError, match="came too late"):
        await send_raw(forger.rpc, last, request, *data)
    assert last.sum.passes == 1


@simulated(hosts, seed=43)
async def test_a_joining_caller_with_other_targets_is_refused_and_the_honest_one_is_served(swarm: Hosts) -> None:
    """What is under way is not blamed for a second caller of the same microbatch."""
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    forger = await swarm.add_trainer("forger")
    hop = swarm.hop(trainer, 0, last)
    sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
    await until(lambda: last.host.ledger.num_running == 1)
    forged = replace(swarm.hidden(trainer, 0), targets=pack(torch.zeros(hop.targets.shape, dtype=torch.int64), IDS))
    request, data = heads(forged)
    with pytest.raises(Exception, match="other targets"):
        await send_raw(forger.rpc, last, request, *data)
    assert [leg.host for leg in (await sending).legs] == [first.id, last.id]
    assert last.rpc.refusals == {(forger.rpc.peer_id, "NotSignedError"): 1}


@simulated(hosts, seed=44)
async def test_a_trainers_voucher_is_verified_once_and_few_are_remembered(
    swarm: Hosts, network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "MAX_KEYS", 2)
    trainer, host = swarm.trainers[0], swarm.hosts[0]
    verifier, vouched = MicrobatchVerifier(host.peer.signer, SWARM), list[str]()
    verify = host.peer.signer.verify

    def counting(peer_id: str, message: bytes, proof: bytes) -> bool:
        vouched.append(peer_id)
        return verify(peer_id, message, proof)

    monkeypatch.setattr(host.peer.signer, "verify", counting)
    for number in range(5):
        verifier.check("caller", swarm.hop(trainer, number).request)
    assert vouched == [trainer.rpc.peer_id]
    for _ in range(5):  # Processes of one trainer, one after the other.
        verifier.check("caller", signed_by(trainer, swarm.hop(trainer, 1)).request)
    assert len(vouched) == 6
    assert len(verifier._keys) == 2


def test_a_signature_counts_in_its_swarm_alone_and_real_identities_vouch() -> None:
    with Identity.ephemeral() as trainer, Identity.ephemeral() as host:
        tokens = pack(torch.zeros(1, 2, dtype=torch.int64), IDS)
        hop = Hop(MicrobatchId(trainer.peer_id, 3, 1), 0, 1, 2, (), tokens, tokens)
        request = MicrobatchSigner(trainer, SWARM).sign(hop, 5).request
        MicrobatchVerifier(host, SWARM).check("caller", request)
        with pytest.raises(NotSignedError, match="does not vouch"):
            MicrobatchVerifier(host, bytes(32)).check("caller", request)
        assert to_wire(request)["signature"]["position"] == 5
