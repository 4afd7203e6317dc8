"""Three shops train one recommender day by day, while their customers ask it what to buy.

All purchases are generated. Each day new customers come to each shop. A customer has eight tastes, drawn around those
of the shop, and an item eight traits. A customer buys one of 400 items, drawn by the softmax of tastes times traits.
The shop knows twelve noisy mixtures of the tastes. Each night the traits drift, so a model that is left as it is grows
stale. A round is a day. Each shop trains on the purchases until yesterday, while its customers ask for ten items over
HTTP, on loopback. The model of the round before answers. One tower reads what is known of a customer, the other an
item's vector.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from torch import nn

from examples import sites
from p2ptrain import Swarm

SHOPS, CUSTOMERS = 3, (150, 60, 30)  # A day, by shop.
DAYS, STEPS, BATCH = 40, 10, 64
ITEMS, TASTES, KNOWN, SHOWN = 400, 8, 12, 10
UNLIKE, DRIFT, WINDOW, FROZEN = 0.5, 0.1, 20, 15
MANIFEST = {
    "name": "recommender",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": STEPS, "local_batch": BATCH, "rounds": DAYS},
    "averaging": {"codec": "int8", "aggregation": "mean", "min_peers": SHOPS, "quorum": 1.0},
    "private": {"weights": "samples"},
}
Shop = tuple[torch.Tensor, torch.Tensor]
"""What is known of each day's customers, ``[days, customers, KNOWN]``, and what each buys, ``[days, customers]``."""


def load(seed: int) -> Shop:
    """Return the customers of all shops and what they buy; a shop's customers stand side by side."""
    draws = np.random.default_rng(seed)
    kinds = UNLIKE * np.repeat(draws.normal(size=(SHOPS, TASTES)), CUSTOMERS, 0)
    told = draws.normal(size=(TASTES, KNOWN)) / TASTES**0.5
    traits, known, bought = draws.normal(size=(ITEMS, TASTES)), [], []
    for _ in range(DAYS + 1):
        tastes = (kinds + draws.normal(size=kinds.shape)) / (1 + UNLIKE**2) ** 0.5
        known.append(tastes @ told + 0.3 * draws.normal(size=(len(tastes), KNOWN)))
        noise = draws.gumbel(size=(len(tastes), ITEMS))  # The largest of these sums is a draw of the softmax.
        bought.append((tastes @ traits.T + noise).argmax(1))
        traits = (1 - DRIFT**2) ** 0.5 * traits + DRIFT * draws.normal(size=traits.shape)
    return torch.from_numpy(np.stack(known)).float(), torch.from_numpy(np.stack(bought))


def of_shop(site: int, seed: int) -> Shop:
    """Return the customers of one shop and what they buy."""
    first = sum(CUSTOMERS[:site])
    known, bought = (each[:, first : first + CUSTOMERS[site]] for each in load(seed))
    return known, bought


def last_days(day: int) -> slice:
    """Return the days that a shop trains on during the next one."""
    return slice(max(0, day + 1 - WINDOW), day + 1)


class Towers(nn.Module):
    """A network of what is known of a customer, and one of an item's vector, which is learned."""

    def __init__(self, width: int = 16) -> None:
        """Make towers that meet in so many numbers."""
        super().__init__()
        self.customer = nn.Sequential(nn.Linear(KNOWN, 64), nn.ReLU(), nn.Linear(64, width))
        self.item = nn.Sequential(nn.Embedding(ITEMS, width), nn.Linear(width, width))

    def forward(self, known: torch.Tensor) -> torch.Tensor:
        """``[customers, KNOWN]`` to scores of all items, ``[customers, ITEMS]``."""
        scores: torch.Tensor = self.customer(known) @ self.item(torch.arange(ITEMS)).T
        return scores


def make_model() -> Towers:
    """Return a model; all peers begin with the same weights."""
    torch.manual_seed(0)
    return Towers()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, shop: Shop, days: slice, size: int) -> None:
    """Take one step on so many random purchases of these days."""
    known, bought = (each[days].flatten(0, 1) for each in shop)
    chosen = torch.randint(len(bought), (size,))
    nn.functional.cross_entropy(model(known[chosen]), bought[chosen]).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def recommend(model: nn.Module, known: torch.Tensor) -> torch.Tensor:
    """Return the items with the highest scores, ``[customers, SHOWN]``."""
    return torch.topk(model(known), SHOWN).indices


def recall(shown: torch.Tensor, bought: torch.Tensor) -> float:
    """Return the share of customers who buy, ``[customers]``, one of the items shown, ``[customers, SHOWN]``."""
    return float((bought[:, None] == shown).any(1).float().mean())


class Counter(ThreadingHTTPServer):
    """A shop's recommender, which answers a customer's numbers with items. Its ``model`` may be replaced meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        """Listen on a free port of loopback."""
        super().__init__(("127.0.0.1", 0), Answer)
        self.model = model


class Answer(BaseHTTPRequestHandler):
    """One customer's question."""

    server: Counter

    def do_POST(self) -> None:
        """Answer ``KNOWN`` numbers with the numbers of ``SHOWN`` items."""
        known = torch.tensor([json.loads(self.rfile.read(int(self.headers["Content-Length"])))])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(recommend(self.server.model, known)[0].tolist()).encode())

    def log_message(self, *_: Any) -> None:
        """Keep silent."""


def ask(port: int, customers: list[list[float]], answers: list[tuple[list[int], float]]) -> None:
    """Ask for each customer in turn; add the items shown, and the seconds that the answer took."""
    for known in customers:
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", json.dumps(known).encode(), timeout=60) as answer:
            answers.append((json.load(answer), time.perf_counter() - began))


def train(swarm: Swarm, site: int, seed: int) -> dict[str, Any]:
    """Train as one shop while its customers ask; return the recall of each day, and the seconds to each answer."""
    known, bought = own = of_shop(site, seed)
    model = make_model()
    torch.manual_seed(seed + site)
    inner = torch.optim.AdamW(model.parameters(), 2e-2)
    opt = swarm.optimizer(model, inner, tokens_per_step=BATCH, site_samples=CUSTOMERS[site])
    counter, served, frozen, seconds = Counter(copy.deepcopy(model)), [], [], []
    threading.Thread(target=counter.serve_forever, daemon=True).start()
    while opt.round < DAYS:
        day, answers = opt.round, list[tuple[list[int], float]]()
        asking = threading.Thread(target=ask, args=(counter.server_port, known[day + 1].tolist(), answers))
        asking.start()
        while opt.round == day:
            train_step(model, opt, own, last_days(day), BATCH)
        asking.join()
        served.append(recall(torch.tensor([items for items, _ in answers]), bought[day + 1]))
        seconds += [each for _, each in answers]
        if day <= FROZEN:
            stale = counter.model
        frozen.append(recall(recommend(stale, known[day + 1]), bought[day + 1]))
        counter.model = copy.deepcopy(model)
    counter.shutdown()
    return {"served": served, "frozen": frozen, "seconds": seconds}


def train_alone(site: int | None, seed: int) -> list[list[float]]:
    """Return each shop's recall of each day: of a model of one shop's purchases, or, for None, of all shops'."""
    shops = [of_shop(number, seed) for number in (range(SHOPS) if site is None else [site])]
    together = torch.cat([known for known, _ in shops], 1), torch.cat([bought for _, bought in shops], 1)
    model, curves = make_model(), list[list[float]]()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    for day in range(DAYS):
        curves.append([recall(recommend(model, known[day + 1]), bought[day + 1]) for known, bought in shops])
        for _ in range(STEPS):
            train_step(model, optimizer, together, last_days(day), len(shops) * BATCH)
    return [list(each) for each in zip(*curves, strict=True)]


def smooth(curves: list[list[float]]) -> list[float]:
    """Return the mean over shops and over the five days until each."""
    days = np.mean(curves, 0)
    return [float(days[max(0, day - 4) : day + 1].mean()) for day in range(DAYS)]


def compare(found: dict[str, list[Any]], seed: int) -> sites.Curves:
    """Return the recall of what the swarm served, of one machine, of each shop alone, and of a model left as it was."""
    results = found["recommender"]
    pooled, *alone = sites.in_parallel(train_alone, [(site, seed) for site in (None, *range(SHOPS))])
    milliseconds = 1000 * np.array([each for result in results for each in result["seconds"]])
    return {
        "served": smooth([result["served"] for result in results]),
        "pooled": smooth(pooled),
        "alone": smooth([curve for (curve,) in alone]),
        f"not_updated_after_day_{FROZEN}": smooth([result["frozen"] for result in results]),
        "answers": [len(milliseconds)],
        "milliseconds_median": [float(np.median(milliseconds))],
        "milliseconds_of_99_in_100": [float(np.quantile(milliseconds, 0.99))],
    }


if __name__ == "__main__":
    sites.main(__doc__ or "", train, [MANIFEST], SHOPS, compare, f"recall@{SHOWN}, mean of five days")
