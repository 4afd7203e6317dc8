"""Evidence against owners that falsified a mean: kept, shown to whoever asks, and brought to whoever should know.

Evidence convinces anybody (`p2ptrain.averaging.verification.opening.verify_evidence`), so nobody's word is taken for
it, and whoever has it may pass it on. A peer that finds or receives some brings it to all trainers that it knows; and
each asks the members of its groups now and then. One name, ``evidence``, serves three requests::

    {"list": True}                  {"accused": [peers]}
    {"get": peer}                   {"bytes": n}, and the evidence
    {"offer": peer, "bytes": n}     {"wanted": whether}; then the evidence comes

The cost of liars is bounded: a piece has at most `MAX_EVIDENCE_BYTES`, one is received and verified at a time, and a
peer that brought some that convicts nobody is not listened to any more. It is useless to convict identities of one's
own in numbers: what is kept of each beyond the last few is its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from p2ptrain.averaging.grouping.membership import MAX_KNOWN_PEERS, Membership
from p2ptrain.averaging.verification.opening import MAX_EVIDENCE_BYTES, RulesOf, verify_evidence
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
TRANSFER_SECONDS = 30.0
ASK_AGAIN_SECONDS = 600.0
MAX_KEPT_BYTES = 2 * MAX_EVIDENCE_BYTES
MAX_TOLD = 64
"""Peers that evidence is brought to."""
MAX_LISTED = 64
MAX_NAME_LENGTH = 128


class EvidenceStore:
    """What this peer can prove about others.

    Attributes:
        convicted: By peer, the oldest first: the evidence; empty where only the name is kept.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        verifier: Signer,
        swarm: bytes,
        rules_of: RulesOf,
        membership: Membership,
        on_conviction: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            rpc: To tell and to ask.
            runtime: For arithmetic.
            verifier: Checks signatures.
            swarm: The manifest's digest, 32 bytes.
            rules_of: What the swarm agreed on for an attempt.
            membership: Keeps convicted peers out.
            on_conviction: Called once for each peer, with what it did.
        """
        self._rpc = rpc
        self._runtime = runtime
        self._verifier = verifier
        self._swarm = swarm
        self._rules_of = rules_of
        self._membership = membership
        self._on_conviction = on_conviction
        self.convicted: OrderedDict[str, bytes] = OrderedDict()
        self._ask_again_at: dict[str, float] = {}
        self._liars: set[str] = set()
        self._receiving = asyncio.Lock()
        self._tasks = Tasks()

    def serve(self) -> None:
        """Show others what is known here, and take in what they bring."""
        self._rpc.serve_channel("evidence", dict, self._serve)

    async def add(self, evidence: bytes) -> str:
        """Take in evidence, and bring it to the others if it is news; returns whom it convicts.

        Raises:
            IntegrityError: Nobody.
        """
        peer, fault = await self._runtime.offload(
            verify_evidence, evidence, self._swarm, self._rules_of, self._verifier
        )
        if peer not in self.convicted and peer != self._rpc.peer_id:
            self.convicted[peer] = evidence
            self._forget_some()
            self._membership.convict(peer)
            self._on_conviction(peer, fault)
            for other in [p for p in self._membership.present() if p != peer][:MAX_TOLD]:
                self._start(self._offer(other, peer, evidence))
        return peer

    def add_soon(self, evidence: bytes) -> None:
        """As `add`, without waiting for it."""

        async def add() -> None:
            await self.add(evidence)

        self._start(add())

    def show(self, to: str, accused: str) -> None:
        """Bring a peer what is known here about another one, if anything is."""
        if evidence := self.convicted.get(accused):
            self._start(self._offer(to, accused, evidence))

    def _forget_some(self) -> None:
        kept = sum(map(len, self.convicted.values()))
        for peer, evidence in self.convicted.items():
            if kept <= MAX_KEPT_BYTES:
                break
            kept -= len(evidence)
            self.convicted[peer] = b""
        while len(self.convicted) > MAX_KNOWN_PEERS:
            self.convicted.popitem(last=False)

    def ask(self, peers: Iterable[str]) -> None:
        """Learn what peers can prove, unless they were asked lately."""
        now = asyncio.get_running_loop().time()
        for peer in peers:
            if now >= self._ask_again_at.get(peer, now) and len(self._ask_again_at) < MAX_KNOWN_PEERS:
                self._ask_again_at[peer] = now + ASK_AGAIN_SECONDS
                self._start(self._fetch_all(peer))

    def _start(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except (PeerError, DeadlineError, IntegrityError) as error:
                logger.debug("evidence was not passed on: %s", error)

        self._tasks.start(run(), "evidence")

    async def close(self) -> None:
        """End everything that was started."""
        await self._tasks.close()

    async def _offer(self, to: str, accused: str, evidence: bytes) -> None:
        request = {"offer": accused, "bytes": len(evidence)}
        async with self._rpc.open(to, "evidence", request, CALL_SECONDS, expected_bytes=len(evidence)) as channel:
            if (await channel.receive(dict, TRANSFER_SECONDS)).get("wanted") is True:
                await channel.send_bytes(evidence)
                await channel.receive(dict, TRANSFER_SECONDS)

    async def _fetch_all(self, peer: str) -> None:
        async with self._rpc.open(peer, "evidence", {"list": True}, CALL_SECONDS) as channel:
            accused = (await channel.receive(dict, CALL_SECONDS)).get("accused")
        for name in accused[:MAX_LISTED] if isinstance(accused, list) else []:
            if type(name) is str and len(name) <= MAX_NAME_LENGTH and self._wants(name, peer):
                async with self._rpc.open(peer, "evidence", {"get": name}, CALL_SECONDS) as channel:
                    size = (await channel.receive(dict, CALL_SECONDS)).get("bytes")
                    await self._receive(channel, size)

    def _wants(self, accused: str, source: str) -> bool:
        return accused not in self.convicted and accused != self._rpc.peer_id and source not in self._liars

    async def _receive(self, channel: Channel, size: Any) -> None:
        """Receive and verify evidence; whoever brings none that convicts is not listened to again."""
        try:
            if type(size) is not int or not 0 < size <= MAX_EVIDENCE_BYTES:
                raise IntegrityError("evidence of an impossible size")
            async with self._receiving:
                await self.add(bytes(await channel.receive_bytes(size, TRANSFER_SECONDS)))
        except IntegrityError:
            if len(self._liars) < MAX_KNOWN_PEERS:
                self._liars.add(channel.remote)
            raise

    async def _serve(self, channel: Channel, request: dict[str, Any]) -> None:
        if request.get("list") is True:
            await channel.send({"accused": [peer for peer, kept in self.convicted.items() if kept][-MAX_LISTED:]})
        elif type(wanted := request.get("get")) is str:
            evidence = self.convicted.get(wanted, b"")
            if not evidence:
                raise PeerRefusedError(self._rpc.peer_id, "there is no such evidence here")
            await channel.send({"bytes": len(evidence)})
            await channel.send_bytes(evidence)
        elif type(accused := request.get("offer")) is str:
            wanted_here = self._wants(accused, channel.remote) and not self._receiving.locked()
            await channel.send({"wanted": wanted_here})
            if wanted_here:
                await self._receive(channel, request.get("bytes"))
                await channel.send({"done": True})
        else:
            raise IntegrityError("malformed request for evidence")
