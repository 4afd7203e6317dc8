"""The daemon under a transport: how it starts, what happens when it dies, and that it never outlives its owner."""

import asyncio
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from p2ptrain.errors import PeerLostError, PeerUnreachableError, ResourceError, TemporaryError
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p import daemon as daemon_module
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from tests.support.coroutines import on_loop, on_uvloop
from tests.support.processes.daemons import (
    ECHO,
    LOOPBACK,
    ROOT,
    connected,
    echo,
    echoes,
    free_port,
    is_alive,
    loopback_transport,
    peer_process,
    wait_until,
)

PEER = """
import asyncio, json, os, sys
from pathlib import Path
from tests.support.processes.daemons import ECHO, echo, loopback_transport

async def main():
    async with loopback_transport(Path(sys.argv[1])) as (_, transport):
        await transport.serve(ECHO, echo)
        child = 0
        if "fork" in sys.argv:
            go_on, say = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(say, b"x")
                os.read(0, 1)
                os._exit(0)
            os.read(go_on, 1)
        told = {"daemon": transport.daemon.process_id, "directory": str(transport.daemon.directory), "child": child}
        print(json.dumps({**told, "addresses": await transport.addresses()}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@on_loop
async def test_two_daemons_never_share_a_port() -> None:
    listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
    async with loopback_transport(listen=listen):
        with pytest.raises(ResourceError, match="is taken"):
            async with loopback_transport(listen=listen):
                pass
    async with loopback_transport(listen=listen):  # free again at once
        pass


@on_uvloop
async def test_a_daemon_that_ends_with_the_timeout_for_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "END_SECONDS", 0.001)
    async with loopback_transport() as (_, transport):
        # The loop stands still while the daemon ends, and then learns of the timeout and of the end at once.
        status = Path(f"/proc/{transport.daemon.process_id}/stat")
        asyncio.get_running_loop().call_soon(wait_until, lambda: status.read_text().rpartition(") ")[2][0] == "Z")
        await transport.daemon.stop()


@on_loop
async def test_a_full_disk_is_no_defect_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("p2ptrain.network.libp2p.daemon.tempfile.mkdtemp", refuse)
    with pytest.raises(ResourceError, match=os.strerror(errno.ENOSPC)):
        async with loopback_transport():
            pass


def fake_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "p2pd"
    path.write_text(f"#!/bin/sh\necho x >> {tmp_path}/starts\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(daemon_module, "_binary", lambda: str(path))


@pytest.mark.fault(5, 25)
@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo the disk is on fire; exit 3", "the disk is on fire"), ("echo hm; exec sleep 60", "no answer.*hm")],
)
@on_loop
async def test_a_daemon_that_does_not_start_is_tried_three_times_and_its_words_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    fake_daemon(tmp_path, monkeypatch, script)
    with Identity.ephemeral() as identity, pytest.raises(ResourceError, match=reason):
        await Libp2pTransport.start(identity, Libp2pSettings(listen=LOOPBACK, startup_timeout_seconds=0.5))
    assert (tmp_path / "starts").read_text().count("x") == 3


@on_loop
async def test_a_daemon_that_fails_once_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = daemon_module._binary()
    fake_daemon(tmp_path, monkeypatch, f'[ $(wc -l < {tmp_path}/starts) -ge 2 ] && exec {real} "$@"; exit 1')
    async with loopback_transport() as (identity, transport):
        assert transport.peer_id == identity.peer_id


@pytest.mark.fault(25)
@on_loop
async def test_a_killed_daemon_is_noticed_and_can_be_replaced() -> None:
    reasons = asyncio.Queue[str]()
    async with loopback_transport() as (_, b), loopback_transport() as (identity, a):
        await b.serve(ECHO, echo)
        a.on_lost(reasons.put_nowait)
        peer = await a.connect(await b.addresses(), 10)
        stream = await a.open(peer, ECHO, 10)
        reading = asyncio.create_task(stream.read(1))
        os.kill(a.daemon.process_id, signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(PeerLostError):
                await reading
            assert "signal 9" in await reasons.get()
        assert reasons.empty()
        with pytest.raises(PeerLostError):
            await stream.write(b"x")
        with pytest.raises(PeerUnreachableError, match="signal 9"):
            await a.open(peer, ECHO, 10)
        with pytest.raises(TemporaryError):
            await a.addresses()
        await a.close()
        replacement = await Libp2pTransport.start(identity, Libp2pSettings(listen=LOOPBACK))
        assert await echoes(await replacement.open(await replacement.connect(await b.addresses(), 10), ECHO, 10))
        await replacement.close()


@pytest.mark.fault(1)
@pytest.mark.parametrize("mode", ["alone", "fork"])
@on_loop
async def test_no_daemon_survives_its_killed_owner(tmp_path: Path, mode: str) -> None:
    """With ``fork``, a child (as a data loader's worker) lives on and must not hold daemon, streams or identity."""
    key = tmp_path / "peer.key"
    async with loopback_transport() as (_, transport):
        with peer_process(PEER, str(key), mode) as (process, told):
            try:
                stream = await transport.open(await transport.connect(told["addresses"], 10), ECHO, 10)
                assert await echoes(stream)
                process.kill()
                await asyncio.to_thread(process.wait)
                async with asyncio.timeout(30):
                    with pytest.raises(PeerLostError):
                        await stream.read(1)
                stream.abort()
                await asyncio.to_thread(wait_until, lambda: not is_alive(told["daemon"]))
                if mode == "fork":
                    assert is_alive(told["child"])
                Identity.create_or_load(key).close()
            finally:
                if told["child"]:
                    os.kill(told["child"], signal.SIGKILL)
    async with loopback_transport():
        assert not os.path.exists(told["directory"])  # noqa: ASYNC240 - the next peer cleans up after the killed one


@on_loop
async def test_a_forked_child_has_no_descriptor_of_the_daemons_sockets() -> None:
    async with connected() as (a, b):
        stream = await a.open(b.peer_id, ECHO, 10)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, str(len(_daemon_sockets(str(a.daemon.directory)))).encode())
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert os.read(read_end, 10) == b"0"
        os.close(read_end)
        os.close(write_end)
        assert _daemon_sockets(str(a.daemon.directory))
        assert await echoes(stream)
        stream.abort()


def _daemon_sockets(directory: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                ends = f"{copy.getsockname()} {copy.getpeername()}"
        except OSError:
            continue
        if directory in ends:
            found.append(name)
    return found


def test_a_daemon_ends_with_its_owner_although_a_library_took_the_handler_of_sigchld() -> None:
    script = """
        import signal
        from tests.support.coroutines import on_uvloop
        from tests.swarm.test_daemon import Libp2pSettings, Libp2pTransport, LOOPBACK, Identity

        @on_uvloop
        async def main():
            transport = await Libp2pTransport.start(Identity.ephemeral(), Libp2pSettings(listen=LOOPBACK))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            await transport.close()
            print("ended")

        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr


def test_several_event_loops_of_a_process_start_daemons_at_once() -> None:
    """Peers of a script run in threads of their own; uvloop refuses to start two processes at once."""
    ready = threading.Barrier(6)

    async def start_one() -> None:
        ready.wait(60)
        async with loopback_transport():
            pass

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(start_one())

    with ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(run) for _ in range(6)]:
            each.result()
