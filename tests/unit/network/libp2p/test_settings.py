"""What a daemon is told to do."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from p2ptrain.errors import LinkError, ResourceError
from p2ptrain.network.libp2p import daemon
from p2ptrain.network.libp2p.settings import Libp2pSettings


def test_settings_refuse_what_is_not_an_address() -> None:
    with pytest.raises(LinkError, match="not a multiaddr"):
        Libp2pSettings(listen=("127.0.0.1:4001",))
    with pytest.raises(LinkError, match="does not end in /p2p"):
        Libp2pSettings(bootstrap=("/ip4/127.0.0.1/tcp/4001",))


def test_an_address_of_a_family_that_the_machine_lacks_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("p2ptrain.network.libp2p.daemon.socket.socket", refuse)
    with pytest.raises(ResourceError, match=r"cannot listen at /ip6/::/tcp/31337: .*choose another address"):
        daemon.check_ports_free(["/ip6/::/tcp/31337"])


def test_a_folder_whose_name_leaves_no_room_for_a_socket_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("d" * 70)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ResourceError, match="set TMPDIR to a shorter path"):
        asyncio.run(daemon.Daemon.start(Libp2pSettings(), b""))
    assert list(long.iterdir()) == []


def test_direct_connections_are_taken_where_the_daemon_listens_and_others_can_dial() -> None:
    listen = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::1/tcp/0", "/dns4/example.org/tcp/1")
    assert Libp2pSettings(listen=listen).direct_hosts == ("0.0.0.0", "::1")
    assert Libp2pSettings(listen=listen, direct="off").direct_hosts == ()
    assert Libp2pSettings(listen=listen, force_reachability="private").direct_hosts == ()


def test_nothing_speaks_to_the_gateway_unless_asked() -> None:
    arguments = Libp2pSettings().daemon_arguments()
    assert {"-natPortMap=0", "-autonat=0", "-relayService=0", "-autoRelay=0", "-relayDiscovery=0"} <= set(arguments)
    assert not any(argument.startswith(("-b", "-bootstrapPeers")) for argument in arguments)
