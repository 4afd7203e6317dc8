"""Swarm links print, parse, and refuse what is not one."""

import hashlib

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import LinkError
from p2ptrain.network.link import MAX_ADDRESSES, MAX_INVITE_BYTES, SwarmLink, check_peer_address

PEER = base58.b58encode(b"\x12\x20" + hashlib.sha256(b"peer").digest()).decode()
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}"
RELAYED = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
DIGEST = hashlib.sha256(b"manifest").digest()


@given(
    digest=st.binary(min_size=32, max_size=32),
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=5),
    host=st.sampled_from(["/ip4/10.0.0.1", "/ip6/::1", "/dns4/seed.example.org", "/dns/x.example"]),
    invite=st.binary(max_size=MAX_INVITE_BYTES),
    directory=st.sampled_from(["", "https://lab.example:8080/swarm/", "http://[::1]:80", "redis:a,b", "own"]),
)
def test_parsing_inverts_printing(digest: bytes, ports: list[int], host: str, directory: str, invite: bytes) -> None:
    link = SwarmLink(digest, tuple(f"{host}/tcp/{port}/p2p/{PEER}" for port in ports), directory, invite)
    assert SwarmLink.parse(f" {link}\n") == link
    assert "invite" not in str(link.plain)
    assert SwarmLink.parse(str(link.plain)) == SwarmLink(digest, link.addresses, directory)


@pytest.mark.parametrize("address", [ADDRESS, RELAYED, f"/ip4/1.2.3.4/udp/4/quic-v1/p2p/{PEER}"])
def test_the_last_peer_id_names_the_peer(address: str) -> None:
    assert check_peer_address(address) == PEER


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start with p2ptrain://"),
        ("https://example.org", "does not start with p2ptrain://"),
        ("p2ptrain://", "digest"),
        ("p2ptrain://0OIl?b=" + ADDRESS, "not base58"),
        (f"p2ptrain://{base58.b58encode(DIGEST[:31]).decode()}?b={ADDRESS}", "31 bytes"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}", "cut off"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?b=", "not a multiaddr"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?c={ADDRESS}", "unknown part"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?b=/ip4/1.2.3.4/tcp/1", "does not end in /p2p"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?b=/ip4/1.2.3.456/tcp/1/p2p/{PEER}", "not a multiaddr"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?b=/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "not a multiaddr"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?b={ADDRESS},{ADDRESS}", "not a multiaddr"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?d=HTTP://x&b={ADDRESS}", "no URL"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?d=a&d=b&b={ADDRESS}", "unknown part"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?invite=a&invite=b&b={ADDRESS}", "unknown part"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?invite=0OIl&b={ADDRESS}", "not base58"),
        (f"p2ptrain://{base58.b58encode(DIGEST).decode()}?invite={'z' * 900}&b={ADDRESS}", "longer than 600"),
        ("p2ptrain://" + "1" * 9000, "longer than"),
    ],
)
def test_wrong_links_get_one_line_that_says_what_to_do(text: str, reason: str) -> None:
    with pytest.raises(LinkError, match=reason) as caught:
        SwarmLink.parse(text)
    assert "\n" not in str(caught.value)
    assert "copy the whole link" in str(caught.value) or "looks like" in str(caught.value)


def test_every_truncation_is_refused() -> None:
    text = str(SwarmLink(DIGEST, (ADDRESS,), "https://lab.example"))
    for length in range(len(text)):
        with pytest.raises(LinkError):
            SwarmLink.parse(text[:length])


@given(st.text(max_size=300))
def test_arbitrary_text_raises_link_errors_only(text: str) -> None:
    with pytest.raises(LinkError):
        SwarmLink.parse("p2ptrain://" + text)


def test_too_many_addresses_are_refused() -> None:
    with pytest.raises(LinkError, match=f"1 to {MAX_ADDRESSES}"):
        SwarmLink(DIGEST, (ADDRESS,) * (MAX_ADDRESSES + 1))
    with pytest.raises(LinkError, match=f"1 to {MAX_ADDRESSES}"):
        SwarmLink(DIGEST, ())
