"""What peers ask and tell each other about reaching one another keeps its bounds."""

import pytest

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import from_wire, to_wire
from p2ptrain.node.nat.probing import ProbeReply

REPLY = ProbeReply("192.0.2.1", (22,), is_relay=True)


@pytest.mark.parametrize("observed", ["", "192.0.2.1", "2001:db8::1"])
def test_a_reply_names_an_ip_address_or_none(observed: str) -> None:
    reply = {**to_wire(REPLY), "observed": observed}
    assert from_wire(ProbeReply, reply).observed == observed


@pytest.mark.parametrize("change", [{"observed": "a/b"}, {"observed": "1" * 65}, {"reachable": [0]}])
def test_a_reply_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        from_wire(ProbeReply, {**to_wire(REPLY), **change})
