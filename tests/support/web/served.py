"""What a peer reports that serves so many requests a second, at latencies as they are usually spread."""

import math

from p2ptrain.network.records.serving import BOUNDS, Latencies, ServingReport, ServingTotals

TOKENS, PROMPT_TOKENS = 64, 200
"""Of each request."""


def served(seconds: float, per_second: float = 0.5, first_token: float = 0.4, token: float = 0.04) -> ServingReport:
    """The report of a peer that started to serve ``seconds`` ago; what it counts grows with that and never falls.

    ``first_token`` and ``token`` are the middles of the times to the first token and to further ones, in seconds.
    """
    requests = int(seconds * per_second)
    failed = requests // 50
    done = requests - failed
    totals = ServingTotals(
        requests, failed, TOKENS * done, PROMPT_TOKENS * requests, spread(done, first_token),
        spread((TOKENS - 1) * done, token),
    )  # fmt: skip
    return ServingReport(min(requests, math.ceil(per_second * 4)), totals)


def spread(number: int, middle: float) -> Latencies:
    """At most so many latencies around a middle, in seconds; their logarithms are spread normally."""

    def below(seconds: float) -> float:
        return 0.5 + 0.5 * math.erf(math.log(seconds / middle) / math.sqrt(2) / 0.7)

    shares = [below(high) - (below(low) if low else 0.0) for low, high in zip((0.0, *BOUNDS), BOUNDS, strict=False)]
    counts = (*(int(number * share) for share in shares), 0)
    return Latencies(counts, sum(count * high for count, high in zip(counts, BOUNDS, strict=False)))
