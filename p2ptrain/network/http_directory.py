"""`Directory` on a web server that all peers can reach (``[network] directory = "https://…"``).

The server is not trusted: peers verify each record, so it can hide peers but not invent them.
`examples/loops/http_directory.py` is such a server.

::

    POST URL/KEY   body: a sealed record   ──▶ 204; 4xx with a reason in text if the server refuses it
    GET  URL/KEY                           ──▶ msgpack: ``{"now": …, "records": [a sealed record of each peer, …]}``

``now`` is the server's clock, which decides about expiry. Peers correct their clocks by it.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from typing import Annotated

import httpx
import msgpack
from msgspec import Meta

from p2ptrain.errors import ConfigError, IntegrityError
from p2ptrain.network.directory import MAX_SUBKEYS, Directory, Entry, Sample
from p2ptrain.network.factory import DirectoryOptions
from p2ptrain.network.records.record import MAX_RECORD_BYTES, RecordGuard
from p2ptrain.network.schema import Amount, Message, from_wire

logger = logging.getLogger(__name__)

START_SECONDS = 5.0
MAX_ANSWER_BYTES = (MAX_SUBKEYS + 1) * (MAX_RECORD_BYTES + 64)
MAX_REASON_CHARS = 200

SealedRecord = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class Answer(Message, frozen=True):
    """The server's records under one key, and its wall clock in seconds."""

    now: Amount
    records: Annotated[list[SealedRecord], Meta(max_length=MAX_SUBKEYS)]


class RefusedError(Exception):
    """HTTP status 4xx."""


FAILURES = (RefusedError, IntegrityError, httpx.HTTPError, TimeoutError)


class HttpDirectory(Directory):
    """Publishes and looks up records at a web server. Create one with `start`."""

    def __init__(self, options: DirectoryOptions) -> None:
        self.guard = RecordGuard(options.swarm, options.verifier, options.runtime.now)
        self._url = options.name.rstrip("/")
        self._runtime = options.runtime
        # Callers set deadlines. `MAX_ANSWER_BYTES` bounds the raw body, so the server must not compress.
        self._client = httpx.AsyncClient(timeout=None, headers={"Accept-Encoding": "identity"})
        self._clock_skew: float | None = None
        self._answers = True

    @classmethod
    async def start(cls, options: DirectoryOptions) -> HttpDirectory:
        """Contact the server, which may answer later; raise `ConfigError` if the URL leads to no directory."""
        directory = cls(options)
        try:
            async with asyncio.timeout(START_SECONDS):
                await directory._ask("start")
        except (RefusedError, IntegrityError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            await directory.close()
            raise ConfigError(f"{options.name} is no directory ({error}): correct network.directory") from error
        except (httpx.HTTPError, TimeoutError) as error:
            directory._note(error)
        return directory

    @property
    def clock_skew_seconds(self) -> float | None:
        """Skew against the server's clock; its error is about half a round trip."""
        return self._clock_skew

    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._request("POST", key, value)
        except FAILURES as error:
            self._note(error)
            return False
        return True

    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._ask(key)
        except FAILURES as error:
            self._note(error)
            return None
        self._note(None)
        now, sample = self._runtime.now(), Sample(key)
        for value in answer.records:
            try:
                peer, expires_at = self.guard.check(value)
            except IntegrityError as error:
                self.guard.refused += 1
                logger.debug("record refused: %s", error)
                continue
            sample.put(peer, Entry(value, expires_at), now)
        return sample.entries(now)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, key: str) -> Answer:
        before = self._runtime.clock()
        body = await self._request("GET", key)
        middle = (before + self._runtime.clock()) / 2
        try:
            answer = from_wire(Answer, msgpack.unpackb(body, raw=False))
        except (ValueError, msgpack.UnpackException) as error:
            raise IntegrityError(f"it answers something else: {error}") from error
        self._clock_skew = middle - answer.now
        return answer

    async def _request(self, method: str, key: str, content: bytes = b"") -> bytes:
        """Return the body of the server's answer; raise one of `FAILURES`."""
        url, body = f"{self._url}/{urllib.parse.quote(key, safe='')}", bytearray()
        async with self._client.stream(method, url, content=content) as response:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise IntegrityError(f"it answers with more than {MAX_ANSWER_BYTES} bytes")
        if response.is_client_error:
            reason = body[:MAX_REASON_CHARS].decode(errors="replace").strip()
            raise RefusedError(f"HTTP {response.status_code}: {reason!r}")
        response.raise_for_status()
        return bytes(body)

    def _note(self, error: Exception | None) -> None:
        if (error is None) != self._answers:
            self._answers = error is None
            if error is None:
                logger.info("the directory %s answers again", self._url)
            else:
                reason = str(error) or type(error).__name__
                logger.warning("the directory %s does not answer (%s): asking again", self._url, reason)
