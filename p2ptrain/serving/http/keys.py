"""API keys of a file: one a line, with an optional name and limits.

::

    # comment
    sk-2f7d0c5be1a94e63
    sk-81b4c9d04c7e4f2a name=ada tokens_per_minute=6000 requests=4

The file is read again when it changes. A file that cannot be used leaves the keys as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.errors import ConfigError, IdentityError, P2PTrainError
from p2ptrain.serving.errors import OverloadedError
from p2ptrain.serving.http.problems import RequestError

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
MAX_FILE_BYTES = 1 << 20
CHECK_SECONDS = 1.0
"""Time between two looks at the file."""
_LIMITS = ("tokens_per_minute", "requests")


@dataclass
class Client:
    """The holder of one key, or everybody where no keys are needed.

    Attributes:
        tokens_per_minute: Of prompts and answers together; 0 for no limit.
        requests: Largest number at once; 0 for no limit.
        digest: SHA-256 of the key.
    """

    name: str = ""
    tokens_per_minute: int = 0
    requests: int = 0
    digest: bytes = b""
    _open: int = 0
    _left: float = field(default=0.0, repr=False)
    _at: float | None = None

    @contextlib.contextmanager
    def requesting(self) -> Iterator[None]:
        """Count a request during the block; raise `OverloadedError` if it exceeds a limit."""
        self.check()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def check(self) -> None:
        """Raise `OverloadedError` if another request exceeds a limit."""
        if self.requests and self._open >= self.requests:
            raise OverloadedError(1.0, f"this key may have {self.requests} requests at once: try again later")
        left = self._tokens_left()
        if self.tokens_per_minute and left <= 0:
            seconds = (1 - left) * 60 / self.tokens_per_minute
            raise OverloadedError(seconds, f"this key may use {self.tokens_per_minute} tokens a minute: try later")

    def spend(self, num_tokens: int) -> None:
        """Take tokens from the budget, which may become negative: later requests wait for it."""
        if self.tokens_per_minute:
            self._left = self._tokens_left() - num_tokens

    def change_to(self, other: Client) -> Client:
        """Take over the settings of the same key in a changed file."""
        self.name, self.tokens_per_minute, self.requests = other.name, other.tokens_per_minute, other.requests
        return self

    def _tokens_left(self) -> float:
        now = asyncio.get_running_loop().time()
        most = float(self.tokens_per_minute)
        self._left = most if self._at is None else min(most, self._left + most * (now - self._at) / 60)
        self._at = now
        return self._left


class Keys:
    """The keys of a file; none are needed without a file.

    Raises `ConfigError` or `IdentityError` if the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._anybody = Client()
        self._clients: list[Client] = []
        self._state: object = None
        self._checked_at = 0.0
        if path is not None:
            self._state = _state_of(path)
            self._clients = read_keys(path)

    def client(self, authorization: str) -> Client:
        """Return the client of an ``Authorization`` header; raise `RequestError` (401) if its key is unknown."""
        if self._path is None:
            return self._anybody
        self._follow(self._path)
        scheme, _, key = authorization.strip().partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for client in self._clients:  # All of them, so that the time tells nothing.
            if hmac.compare_digest(client.digest, digest):
                found = client
        if found is None:
            text = "the API key is unknown" if key else "an API key is needed: send 'Authorization: Bearer KEY'"
            raise RequestError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found

    def _follow(self, path: Path) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        try:
            if (state := _state_of(path)) == self._state:
                return
            self._state = state
            clients = read_keys(path)
        except P2PTrainError as error:
            logger.error("%s; the keys stay as they were", error)
            return
        known = {client.digest: client for client in self._clients}
        self._clients = [known.get(client.digest, client).change_to(client) for client in clients]
        logger.info("%s has %d keys now", path, len(clients))


def read_keys(path: Path) -> list[Client]:
    """Return the clients of a file of keys; raise `ConfigError` or `IdentityError`."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the keys {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the keys {path} are not text") from error
    if mode & 0o077:
        raise IdentityError(f"the keys {path} can be read by other users: run 'chmod 600 {path}'")
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"the keys {path} exceed {MAX_FILE_BYTES >> 20} MiB")
    lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    clients = [_client(words, f"{path} line {number}") for number, words in lines if words]
    if not clients:
        raise ConfigError(f"the keys {path} hold no key: write one a line, of {MIN_KEY_CHARS} characters or more")
    if len({client.digest for client in clients}) < len(clients):
        raise ConfigError(f"the keys {path} hold a key twice")
    return clients


def _client(words: list[str], where: str) -> Client:
    key, *settings = words
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{where}: a key has {MIN_KEY_CHARS} characters or more")
    digest = _digest(key)
    client = Client(digest.hex()[:8], digest=digest)
    for name, _, value in (setting.partition("=") for setting in settings):
        if name == "name" and value:
            client.name = value
        elif name in _LIMITS and value.isascii() and value.isdigit() and 0 < int(value[:12]) <= 1 << 31:
            setattr(client, name, int(value))
        else:
            raise ConfigError(f"{where}: {name!r}: give name=TEXT, tokens_per_minute=N or requests=N after the key")
    return client


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _state_of(path: Path) -> object:
    """Return a value that changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
