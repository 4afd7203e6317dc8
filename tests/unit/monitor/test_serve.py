"""The monitor's start."""

import asyncio

import pytest

from p2ptrain.errors import ResourceError
from p2ptrain.monitor.serve import serve
from p2ptrain.network.link import SwarmLink

LINK = SwarmLink(bytes(32), ("/ip4/127.0.0.1/tcp/1/p2p/QmZHepEU53WX4FouwkgctgJvcFK7amhhhf8ADBZPvGT1ZJ",))


def test_a_host_at_which_it_cannot_serve_is_refused_before_it_looks_for_the_swarm() -> None:
    opened = serve(LINK, "no host", 0, names=(), db=None, webhook=None, stall_seconds=1.0, on_ready=print)
    with pytest.raises(ResourceError, match=r"cannot serve at no host port 0 .*choose another --host or --port"):
        asyncio.run(opened)
