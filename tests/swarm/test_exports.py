"""Sites train a module of their own script; a command exports it, and plain torch loads it."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain import Manifest, Swarm, pooled
from p2ptrain.cli.main import main
from p2ptrain.network.records.evaluation import Evaluation
from tests.support.processes.swarmlet import make_manifest, nothing_left_behind

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ROUNDS, SITES, SAMPLES = 3, 3, 40
PRIVATE = {"model": {"family": "custom"}, "data": {"source": "custom"}}
POLICY = 'leave = ["*"]\nstay = ["norm.*"]\n'


class Classifier(nn.Module):
    """Layers of all kinds: personal, tied, frozen, in bf16, with an integer buffer of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.norm = nn.BatchNorm1d(4)
            self.inner = nn.Linear(4, 4)
            self.twin = self.inner
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.last = nn.Linear(4, 2).to(torch.bfloat16)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.twin(self.frozen(self.inner(self.norm(values)).tanh()))
        logits: torch.Tensor = self.last(hidden.to(torch.bfloat16))
        return logits.float()


class Trained:
    """One site's model after its last round, and its last word on each metric."""

    def __init__(self, swarm: Swarm, number: int, together: threading.Barrier) -> None:
        samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(number)) + number
        labels = samples.sum(1).gt(4 * number).long()
        model, self.peer = Classifier(), swarm.peer_id
        opt = swarm.optimizer(model, torch.optim.SGD(model.parameters(), 0.1), site_samples=SAMPLES)
        while opt.round < ROUNDS:
            before = opt.round
            loss = nn.functional.cross_entropy(model.train()(samples[::2]), labels[::2])
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
            if opt.round != before:
                model.eval()
                right = model(samples[1::2]).argmax(1).eq(labels[1::2]).float().tolist()
                self.told: Evaluation = opt.report(right, "accuracy")
        wait_until(lambda: [each.round for each in opt.evaluations().values()].count(ROUNDS) >= SITES - 1)
        together.wait(60)
        self.state = {name: value.clone() for name, value in model.state_dict().items()}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def snippet(card: str) -> str:
    return card.partition("```python\n")[2].partition("```")[0]


def export(run_dir: Path) -> str:
    """Export by the command into a folder beside the run directory; return the card."""
    output = run_dir.with_suffix(".model")
    assert main(["checkpoint", "export", str(run_dir), str(output)]) == 0
    return (output / "README.md").read_text()


def test_a_script_s_module_is_exported_with_all_that_the_sites_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = {"weights": "equal", "personal": ["norm.*"]}
    made = make_manifest(training={"every": 4}, averaging={"codec": "fp32", "aggregation": "mean", "min_peers": SITES})
    manifest = Manifest.model_validate({**made, **PRIVATE, "private": private})
    (tmp_path / "policy.toml").write_text(POLICY)
    folders = [tmp_path / name for name in ("open", "second", "silent")]
    together, started, links, swarms = threading.Barrier(SITES), threading.Event(), list[str](), list[Swarm]()

    def train(number: int) -> Trained:
        rules = tmp_path / "policy.toml" if number == 2 else None
        with (
            Swarm.create(manifest, run_dir=folders[0], listen=LOOPBACK)
            if number == 0
            else Swarm.join(links[0], run_dir=folders[number], listen=LOOPBACK, policy=rules)
        ) as swarm:
            swarms.append(swarm)
            if number == 0:
                links.append(swarm.link)
                started.set()
            return Trained(swarm, number, together)

    with nothing_left_behind(), ThreadPoolExecutor(SITES) as pool:
        first = pool.submit(train, 0)
        assert started.wait(60)
        trained = [first, *(pool.submit(train, number) for number in (1, 2))]
        if failed := [each for each in wait(trained, return_when=FIRST_EXCEPTION).done if each.exception()]:
            for swarm in swarms:  # Without one site, the others wait for ever.
                swarm.close()
        sites = [each.result() for each in (*failed, *trained)][-SITES:]
    cards = [export(folder) for folder in folders]
    for site, folder, card in zip(sites, folders, cards, strict=True):
        monkeypatch.chdir(folder.with_suffix(".model"))
        values: dict[str, Any] = {"make_model": Classifier}
        exec(snippet(card), values)
        assert set(values["missing"]) == {"twin.weight", "twin.bias", "frozen.weight", "frozen.bias"}
        for name, value in values["model"].state_dict().items():
            assert torch.equal(value, site.state[name]), name
            assert value.dtype == site.state[name].dtype
    assert not torch.equal(sites[0].state["norm.running_mean"], sites[1].state["norm.running_mean"]), "each has its own"

    whole = pooled([site.told for site in sites[:2]])
    assert whole is not None
    for card in cards:
        assert "| sites | 3 |" in card
        assert f"| parameters | {sum(p.numel() for p in Classifier().parameters() if p.requires_grad):,} |" in card
        assert "| personal tensors | `norm.*`, of the site that exported them |" in card
        told = [line for line in card.splitlines() if "`accuracy`" in line]
        assert told == [
            f"| 2 sites | `accuracy` | {whole.mean:.3f} ± {whole.interval:.3f} | 32 | {ROUNDS} |",
            *sorted(
                f"| `{site.peer}` | `accuracy` | {site.told.mean:.3f} ± {site.told.interval:.3f} | 16 | {ROUNDS} |"
                for site in sites[:2]
            ),
        ]


@pytest.mark.parametrize("samples", ["", "bucketed"], ids=["no policy", "a policy that keeps the exact number"])
def test_the_card_tells_the_epsilon_that_is_spent_unless_the_policy_keeps_it(tmp_path: Path, samples: str) -> None:
    sections = {**PRIVATE, "private": {}, "differential_privacy": {"epsilon": 8.0, "delta": 1e-3}}
    made = make_manifest(training={"every": 2, "local_batch": 4, "warmup_steps": 0}, averaging={"codec": "fp32"})
    manifest = Manifest.model_validate({**made, **sections})
    policy = tmp_path / "policy.toml" if samples else None
    if policy is not None:
        policy.write_text(f'leave = ["*"]\nsamples = "{samples}"\n')
    model, values = nn.Linear(4, 1), torch.randn(64, 4)
    run_dir = tmp_path / "site"
    with (
        nothing_left_behind(),
        Swarm.create(manifest, run_dir=tmp_path / "seed", listen=LOOPBACK) as seed,
        Swarm.join(seed.link, run_dir=run_dir, listen=LOOPBACK, policy=policy) as swarm,
    ):
        opt = swarm.optimizer(model, torch.optim.SGD(model.parameters(), 0.1), site_samples=len(values))
        for chosen in itertools.islice(swarm.batches(values), 6):
            model(values[chosen]).square().mean().backward()
            opt.step()
            opt.zero_grad()
        spent = opt.privacy
        assert spent is not None
        assert opt.round == 3
    card = export(run_dir)
    assert "ε at most 8, δ 0.001" in card
    if policy is None:
        assert f"| `{swarm.peer_id}` | {spent} | 3 |" in card
    else:
        assert "ε" not in card.replace("ε at most 8, δ 0.001", "")
