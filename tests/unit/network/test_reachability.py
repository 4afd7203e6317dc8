"""What multiaddrs say about reaching a peer, and what is concluded from what others say."""

import asyncio
import gc
import socket

import pytest
import uvloop

from p2ptrain.network import reachability
from p2ptrain.network.reachability import ProbeReport, answering, host_of, judge, speaks_libp2p, tcp_ports
from tests.support.coroutines import on_loop

PEER = "QmYGP5QpAmhmHSNZFM7bD6ofENfWbU7GD1JcuwwXEmuUtp"
PUBLIC, PRIVATE, LOOPBACK = "45.10.0.1", "192.168.7.2", "127.0.0.1"


def report(observed: str, *ports: int) -> ProbeReport:
    return ProbeReport(PEER, observed, ports, False)


@pytest.mark.parametrize(
    ("reports", "direct", "known"),
    [
        ([], False, False),
        ([report("")], False, False),
        ([report(PUBLIC)], False, True),
        ([report(PUBLIC), report(PUBLIC, 4001)], True, True),
        ([report(PRIVATE, 4001)], True, True),
        ([report(PRIVATE, 4001), report(PUBLIC)], False, True),
        ([report(PRIVATE), report(PUBLIC, 4001)], True, True),
        ([report(LOOPBACK)], True, True),
        ([report(LOOPBACK), report(PRIVATE)], False, True),
        ([report("2a00::1", 4001), report("")], True, True),
    ],
)
def test_the_peers_from_farthest_away_decide(reports: list[ProbeReport], direct: bool, known: bool) -> None:
    success, reason = judge(reports)
    assert (success is not None, bool(reason)) == (direct, known)


def test_hosts_and_ports_of_addresses() -> None:
    circuit = f"/ip4/45.10.0.1/tcp/31337/p2p/{PEER}/p2p-circuit"
    assert host_of("/ip4/45.10.0.1/tcp/1") == "45.10.0.1"
    assert host_of("/ip6/2a00::1/tcp/1") == "2a00::1"
    assert [host_of(address) for address in (circuit, "/dns4/example.org/tcp/1", "")] == ["", "", ""]
    own = [f"/ip4/1.2.3.4/tcp/{port}/p2p/{PEER}" for port in (5, 6, 5, 7, 8, 9)]
    assert tcp_ports([circuit, "/ip4/1.2.3.4/udp/4/quic-v1", *own]) == (5, 6, 7, 8)


@on_loop
async def test_an_address_that_stays_silent_holds_up_neither_those_that_answer_nor_their_peers_dial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refusal(address: str) -> str:
        if "silent" in address:
            await asyncio.sleep(3600)  # pytest's timeout ends a test that waits for it.
        return "refused" if "closed" in address else ""

    monkeypatch.setattr(reachability, "tcp_refusal", refusal)
    monkeypatch.setattr(reachability, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(reachability, "ANSWER_SECONDS", 0.2)
    found, refusals = await answering(["silent", "open", "closed"])
    assert found == ["open"]
    assert sorted(refusals) == ["refused", "silent does not answer"]
    assert await answering(["silent"]) == ([], ["silent does not answer"])
    assert await answering([]) == ([], [])
    assert len(asyncio.all_tasks()) == 1


@on_loop
async def test_only_something_that_speaks_libp2p_counts_as_this_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "ANSWER_SECONDS", 0.3)

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6 and so on\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(other, LOOPBACK)
    async with server:
        assert not await speaks_libp2p(LOOPBACK, server.sockets[0].getsockname()[1])
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        port = silent.getsockname()[1]
        assert not await speaks_libp2p(LOOPBACK, port)
        silent.listen()
        assert not await speaks_libp2p(LOOPBACK, port)


def test_a_name_is_looked_up_and_giving_that_up_leaves_no_error_behind() -> None:
    """The errors of uvloop's own look-ups are nobody's when the connection that wanted them is cancelled."""
    nobodys: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: nobodys.append(context["message"]))
        no_name = f"/dns4/{'.'.join(['x' * 60] * 5)}/tcp/1"  # Too long: refused here, without asking a server.
        asking = asyncio.create_task(reachability.tcp_refusal(no_name))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await reachability.tcp_refusal(no_name)
        assert "cannot be looked up" in await reachability.tcp_refusal(f"/dns4/{'x' * 70}/tcp/1")
        gc.collect()
        with socket.create_server((LOOPBACK, 0)) as server:
            assert await reachability.tcp_refusal(f"/dns4/localhost/tcp/{server.getsockname()[1]}") == ""

    uvloop.run(main())
    assert nobodys == []
