"""`Meter`: a host's totals of served requests."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from p2ptrain.network.records.serving import BOUNDS, NO_COUNTS, Latencies, ServingTotals


@dataclass
class Timer:
    """A histogram of seconds that grows."""

    counts: list[int] = field(default_factory=lambda: list(NO_COUNTS))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += max(0.0, seconds)

    def latencies(self) -> Latencies:
        return Latencies(tuple(self.counts), self.seconds)


@dataclass
class Meter:
    """Requests and tokens of one host of the last stage, drafts of one of the first; others would count them again."""

    requests: int = 0
    failed_requests: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_token: Timer = field(default_factory=Timer)
    token: Timer = field(default_factory=Timer)

    def count_request(self, prompt: int, cached: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def count_token(self, seconds: float, *, is_first: bool) -> None:
        """Count a token, drawn so long after the request or the token before it."""
        self.generated_tokens += 1
        (self.first_token if is_first else self.token).add(seconds)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count drafts of the first stage."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def totals(self) -> ServingTotals:
        return ServingTotals(
            self.requests, self.failed_requests, self.generated_tokens, self.prompt_tokens,
            self.first_token.latencies(), self.token.latencies(), self.cached_tokens, self.drafted_tokens,
            self.accepted_tokens,
        )  # fmt: skip
