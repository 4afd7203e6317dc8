"""Indexes of public swarms: what each signature holds, and files and servers that are something else."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from p2ptrain.errors import ConfigError, IntegrityError, TemporaryError
from p2ptrain.manifest import AdmissionSpec, Manifest, SignedManifest
from p2ptrain.network import swarm_index
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.schema import from_json
from p2ptrain.network.swarm_index import (
    MAX_ENTRIES,
    MAX_INDEX_BYTES,
    MAX_LIFETIME_SECONDS,
    MAX_SKEW_SECONDS,
    Entry,
    Index,
    check_host,
    read_index,
    sign_entry,
    sign_index,
    to_text,
    verify_entry,
    with_entries,
)

ORGANIZER, OTHER, HOST = Identity.ephemeral(), Identity.ephemeral(), Identity.ephemeral()
NOW = 1_800_000_000
ADDRESS = f"/ip4/192.0.2.1/tcp/31337/p2p/{HOST.peer_id}"


def entry_of(
    name: str = "demo", organizer: Identity = ORGANIZER, signer: Identity | None = None, at: int = NOW
) -> Entry:
    manifest = Manifest(name=name, admission=AdmissionSpec(mode="open"))
    signed = SignedManifest.create(manifest, organizer, HOST.peer_id)
    link = SwarmLink(signed.manifest.digest, (ADDRESS,))
    entry = Entry(str(link), signed.to_bytes(), at, at + 86400, "healthy", 3, 2, 7)
    return sign_entry(entry, signer or organizer)


ENTRY, OF_OTHER = entry_of(), entry_of(organizer=OTHER)
SIGNED = sign_index(Index((ENTRY, OF_OTHER)), HOST, NOW)


def test_an_entry_is_read_as_it_was_signed() -> None:
    index = from_json(Index, to_text(SIGNED))
    check_host(index, HOST.peer_id, OTHER)
    listed = verify_entry(index.entries[0], NOW + 1, OTHER)
    assert (listed.manifest.name, listed.manifest.organizer) == ("demo", ORGANIZER.peer_id)
    assert listed.link.digest == listed.manifest.digest
    assert listed.entry == ENTRY


@pytest.mark.parametrize(
    "change",
    [
        {"link": OF_OTHER.link},
        {"link": ENTRY.link.replace("31337", "31338")},
        {"manifest": OF_OTHER.manifest},
        {"link": OF_OTHER.link, "manifest": OF_OTHER.manifest},
        {"announced": NOW - 1},
        {"expires": NOW + 86401},
        {"health": "degraded"},
        {"peers": 4},
        {"training": 3},
        {"round": 8},
        {"proof": OF_OTHER.proof},
        {"proof": b""},
    ],
    ids=lambda change: " and ".join(change),
)
def test_an_entry_with_another_value_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        verify_entry(replace(ENTRY, **change), NOW, OTHER)


def test_nobody_but_its_organizer_announces_a_swarm() -> None:
    with pytest.raises(IntegrityError, match="organizer"):
        verify_entry(entry_of(signer=OTHER), NOW, HOST)


@pytest.mark.parametrize(
    ("announced", "expires", "why"),
    [
        (NOW - 86400, NOW, "expired"),
        (NOW + MAX_SKEW_SECONDS + 1, NOW + 86400, "future"),
        (NOW, NOW + MAX_LIFETIME_SECONDS + 1, "30 days"),
        (NOW, NOW, "no time"),
    ],
)
def test_an_entry_counts_for_a_bounded_time(announced: int, expires: int, why: str) -> None:
    entry = sign_entry(replace(ENTRY, announced=announced, expires=expires), ORGANIZER)
    with pytest.raises(IntegrityError, match=why):
        verify_entry(entry, NOW, OTHER)


def test_a_link_in_an_entry_loses_its_invite() -> None:
    link = SwarmLink.parse(ENTRY.link)
    entry = sign_entry(replace(ENTRY, link=str(SwarmLink(link.digest, link.addresses, invite=b"x" * 64))), ORGANIZER)
    assert verify_entry(entry, NOW, OTHER).link.invite == b""


@given(data=st.data())
def test_whatever_is_changed_in_a_signed_file_is_noticed(data: st.DataObject) -> None:
    text = bytearray(to_text(SIGNED))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[place]))
    try:
        index = from_json(Index, bytes(text))
        check_host(index, HOST.peer_id, OTHER)
    except IntegrityError:
        return
    assert index == SIGNED  # Such as another space between two values.


@pytest.mark.parametrize(
    "index",
    [
        Index((ENTRY,)),
        sign_index(Index((ENTRY,)), OTHER, NOW),
        replace(SIGNED, entries=SIGNED.entries[:1]),
        replace(SIGNED, entries=SIGNED.entries[::-1]),
        replace(SIGNED, issued=NOW + 1),
        replace(SIGNED, proof=b""),
        replace(sign_index(Index((ENTRY,)), OTHER, NOW), host=HOST.peer_id),
    ],
    ids=["unsigned", "another key", "one left out", "another order", "another time", "no proof", "a false name"],
)
def test_a_pinned_host_is_answerable_for_the_choice_of_entries(index: Index) -> None:
    with pytest.raises(IntegrityError):
        check_host(index, HOST.peer_id, ORGANIZER)


def test_without_a_pin_an_index_needs_no_signature_but_no_false_one_either() -> None:
    check_host(Index((ENTRY,)), "", OTHER)
    with pytest.raises(IntegrityError, match="changed"):
        check_host(replace(SIGNED, issued=NOW + 1), "", OTHER)


def test_a_new_entry_replaces_the_swarms_and_others_that_must_not_be_used_are_left_out() -> None:
    last = sign_entry(replace(ENTRY, announced=NOW + 60, round=9), ORGANIZER)
    expired = sign_entry(replace(entry_of("gone"), announced=NOW - 99, expires=NOW - 9), ORGANIZER)
    index, reasons = with_entries(Index((ENTRY, OF_OTHER, expired)), [last, entry_of("Another")], NOW + 60, HOST)
    assert [verify_entry(each, NOW + 60, HOST).manifest.name for each in index.entries] == ["Another", "demo", "demo"]
    assert last in index.entries
    assert ENTRY not in index.entries
    assert len(reasons) == 1
    assert "expired" in reasons[0]


def test_an_older_entry_replaces_no_newer_one_and_a_false_one_is_not_taken() -> None:
    newer = sign_entry(replace(ENTRY, announced=NOW + 60), ORGANIZER)
    with pytest.raises(ConfigError, match="newer"):
        with_entries(Index((newer,)), [ENTRY], NOW + 60, HOST)
    with pytest.raises(IntegrityError):
        with_entries(Index(()), [replace(ENTRY, peers=99)], NOW, HOST)


def test_a_thousand_swarms_fit_into_an_index_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(to_text(Index((ENTRY,) * MAX_ENTRIES))) <= MAX_INDEX_BYTES
    monkeypatch.setattr(swarm_index, "MAX_ENTRIES", 1)
    with pytest.raises(ConfigError, match="another file"):
        with_entries(Index((ENTRY,)), [OF_OTHER], NOW, HOST)


NO_INDEXES = {
    "no JSON": b"<html>",
    "another form": b'{"entries": [], "format": "p2ptrain index 2"}',
    "too deep": b"[" * 100_000,
    "too many": to_text(Index((ENTRY,))).replace(b"[", b"[" + b"{}," * MAX_ENTRIES, 1),
    "too large": b" " * (MAX_INDEX_BYTES + 1),
    "not printable": to_text(Index((ENTRY,))).replace(b"p2ptrain://", b"\\u001b[2J", 1),
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("content", NO_INDEXES.values(), ids=list(NO_INDEXES))
def test_a_file_that_is_no_index_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ConfigError, match="no index of swarms"):
        asyncio.run(read_index(str(tmp_path / "index.json")))
    with pytest.raises(ConfigError, match="https"):
        asyncio.run(read_index(str(tmp_path / "none.json")))


@contextlib.asynccontextmanager
async def server(answer: Callable[[Request], Response]) -> AsyncIterator[str]:
    async def respond(request: Request) -> Response:
        return await asyncio.to_thread(answer, request)

    listener = listen("127.0.0.1", 0, "port")
    async with serving(Starlette(routes=[Route("/{path:path}", respond)]), listener):
        yield f"{url_of(listener)}/index.json"


def read_from(answer: Callable[[Request], Response]) -> Index:
    async def read() -> Index:
        async with server(answer) as url:
            return await read_index(url)

    return asyncio.run(read())


def test_an_index_is_read_from_a_server_on_this_machine_also_where_it_leads_on() -> None:
    def answer(request: Request) -> Response:
        return Response(to_text(SIGNED)) if request.url.path == "/there" else RedirectResponse("/there")

    assert read_from(answer) == SIGNED


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (lambda request: Response(status_code=404), ConfigError, "HTTP 404"),
        (lambda request: Response(status_code=503), TemporaryError, "try again later"),
        (lambda request: RedirectResponse("/again"), ConfigError, "leads on"),
        (lambda request: RedirectResponse("http://192.0.2.1/index.json"), ConfigError, "over https"),
        (lambda request: RedirectResponse("file:///etc/passwd"), ConfigError, "over https"),
        (lambda request: Response(b" " * (MAX_INDEX_BYTES + 1)), ConfigError, "no index of swarms"),
    ],
    ids=["not found", "down", "in circles", "to http", "to a file", "too large"],
)
def test_what_a_server_cannot_give_is_said_in_one_line(
    answer: Callable[[Request], Response], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_from(answer)


def test_a_server_that_cannot_give_it_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def answer(request: Request) -> Response:
        over.wait(30)
        return Response()

    async def read() -> None:
        async with server(answer) as url:
            try:
                await read_index(url)
            finally:
                over.set()

    monkeypatch.setattr(swarm_index, "FETCH_SECONDS", 0.5)
    with pytest.raises(TemporaryError, match="try again later"):
        asyncio.run(read())


@pytest.mark.parametrize("url", ["http://192.0.2.1/i.json", "http://example.org", "ftp://127.0.0.1/i", "http://[::2]/"])
def test_addresses_without_encryption_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="over https"):
        asyncio.run(read_index(url))


def test_an_https_address_leads_to_no_http_one_not_even_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(302, headers={"Location": "http://127.0.0.1/index.json"})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    with pytest.raises(ConfigError, match="over https"):
        asyncio.run(read_index("https://example.org/index.json"))
    assert asked == ["https://example.org/index.json"]
