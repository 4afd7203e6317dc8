"""The interface of a generator: the swarm's client is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from p2ptrain.serving.sampling import Sampling


class Token(NamedTuple):
    """A drawn token.

    Attributes:
        position: Of the token in the session; the first one after the prompt has the prompt's length.
        logprob: In nats, before temperature and filters; 0 if the sampling does not ask for it.
        top: Ids and log-probabilities of the most likely tokens, the likeliest first.
    """

    position: int
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Load(NamedTuple):
    """The sums of a stage's hosts, by their records; drafts are those of all clients since the hosts started."""

    kv_pages: int = 0
    kv_free_pages: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Generation(Protocol):
    """A running generation; iterating over it yields its tokens, and leaving its context cancels it.

    Attributes:
        route: Ids of the peers that compute it now, one a stage.
        failovers: How often another host took a failed one's place.
        cached: Tokens of the prompt whose rows the first stage's host had from an earlier one.
        version: Round and digest of the weights, and the arithmetic: answers with equal versions can be reproduced.
    """

    @property
    def route(self) -> tuple[str, ...]: ...

    @property
    def failovers(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def version(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Token]: ...


class Generator(Protocol):
    """Generates tokens with one model.

    Attributes:
        model: The model's name.
        context: Largest number of positions of a session; 0 while it is unknown.
        vocabulary: Number of token ids.
        audits: Audits by their result; see `p2ptrain.serving.client.audit.Auditor`.
        loads: Of each stage's hosts, now.
    """

    @property
    def model(self) -> str: ...

    @property
    def context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def audits(self) -> Mapping[str, int]: ...

    @property
    def loads(self) -> Sequence[Load]: ...

    def generate(
        self, ids: Sequence[int], sampling: Sampling, *, max_tokens: int, stops: Sequence[int] = (), key: str = ""
    ) -> AbstractAsyncContextManager[Generation]:
        """Generate up to ``max_tokens`` tokens after ``ids``; the last one may be one of ``stops``.

        Args:
            key: Whose request it is; one key's requests do not starve another's, and share no prefix with them.
        """
        ...

    async def known_context(self) -> int:
        """Return ``context`` once it is known; raise as the generation does if it stays unknown."""
        ...

    async def probe(self) -> None:
        """Generate one token; raise a `p2ptrain.errors.P2PTrainError` that says what to do if none is possible."""
        ...
