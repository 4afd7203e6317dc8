"""What peers say of what they train and hold is refused, or within its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.network.schema import Message
from p2ptrain.training.sync.state_server import HeldHead, HeldState, LayoutReply
from tests.support.fuzz import check


@pytest.mark.parametrize("schema", [LayoutReply, HeldHead, HeldState])
@given(data=st.data())
def test_messages_are_read_as_they_were_sent_and_others_refused(schema: type[Message], data: st.DataObject) -> None:
    check(schema, data)
