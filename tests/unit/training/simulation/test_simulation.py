"""Simulated sites: how samples are dealt, and what a run depends on."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant

from p2ptrain.averaging.protocol.table import SLEEP_ROUNDS
from p2ptrain.cli.commands.private.simulate import _as_json
from p2ptrain.cli.main import main
from p2ptrain.errors import DivergedError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.training.simulation.partition import LEAST, partition
from p2ptrain.training.simulation.rounds import RoundReport, Simulation
from p2ptrain.training.simulation.tasks import Task, classification

LABELS = np.repeat(np.arange(4), 100)


@pytest.mark.parametrize("form", ["iid", "dirichlet:0.05", "dirichlet:100", "sizes:zipf"])
def test_each_sample_is_at_one_site_and_no_site_is_empty(form: str) -> None:
    dealt = partition(form, LABELS, 30, seed=3)
    assert sorted(np.concatenate(dealt)) == list(range(len(LABELS)))
    assert min(map(len, dealt)) >= LEAST
    assert all(np.array_equal(*pair) for pair in zip(dealt, partition(form, LABELS, 30, seed=3), strict=True))


def test_a_small_alpha_makes_sites_unlike_and_zipf_makes_them_unequal() -> None:
    def most_common(form: str) -> float:
        parts = partition(form, LABELS, 8, seed=1)
        return float(np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts]))

    assert most_common("dirichlet:0.05") > 0.7
    assert most_common("dirichlet:1000") < most_common("iid") + 0.1 < 0.6
    sizes = [len(part) for part in partition("sizes:zipf", LABELS, 8, seed=1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.8 * sizes[1]


@pytest.mark.parametrize("form", ["", "dirichlet", "dirichlet:0", "dirichlet:x", "dirichlet:nan", "zipf"])
def test_unknown_partitions_are_refused(form: str) -> None:
    with pytest.raises(UsageError, match="--partition"):
        partition(form, LABELS, 4, seed=1)


def test_more_sites_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match=f"200 sites.* give 1 to {len(LABELS) // LEAST} sites"):
        partition("iid", LABELS, 200, seed=1)
    with pytest.raises(UsageError, match="1 sites with 2 samples: each needs 3; give more data"):
        partition("iid", LABELS[:2], 1, seed=1)


def _run(
    rounds: int = 3,
    seed: int = 1,
    scale: float = 1.0,
    averaging: object = None,
    privacy: object = None,
    **private: object,
) -> tuple[Simulation, list[RoundReport]]:
    manifest = Manifest.model_validate(
        {
            "model": {"family": "custom"}, "data": {"source": "custom", "held_out_fraction": 0.2},
            "private": {"weights": "samples", **private}, "averaging": averaging or {},
            "training": {"every": 3, "local_batch": 8, "learning_rate": 0.01, "warmup_steps": 0},
            "differential_privacy": privacy,
        }
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(400, 6, generator=generator) * scale
    inputs[:, 0] += torch.from_numpy(LABELS)
    torch.manual_seed(2)
    norm = torch.nn.BatchNorm1d(8) if privacy is None else torch.nn.LayerNorm(8)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), norm, torch.nn.Linear(8, 4))
    task = classification(model, inputs, torch.from_numpy(LABELS))
    simulation = Simulation(manifest, task, partition("dirichlet:0.3", LABELS, 9, seed), seed)
    return simulation, list(simulation.run(rounds))


def test_a_run_follows_from_its_seed() -> None:
    (first, reports), (again, same), (other, _) = _run(), _run(), _run(seed=2)
    assert torch.equal(first.state.vector, again.state.vector)
    assert reports == same
    assert not torch.equal(first.state.vector, other.state.vector)


def test_sites_learn_together_and_personal_tensors_are_not_averaged() -> None:
    simulation, reports = _run(15, personal=["1.*"])
    assert {entry.name.split(".")[0] for entry in simulation.state.layout.entries} == {"0", "2"}
    first, last = reports[0].pooled, reports[-1].pooled
    assert first is not None
    assert last is not None
    assert last.mean > first.mean + 0.2
    own = [site.personal["personal.buffer.1.running_mean"] for site in simulation.sites]
    assert not torch.equal(own[0], own[1])


def test_a_proximal_term_holds_sites_back() -> None:
    (free, _), (held, _) = _run(1), _run(1, proximal=100.0)
    start = _run(0)[0].state.vector
    assert torch.dist(held.state.vector, start) < torch.dist(free.state.vector, start)


CURVATURES, CENTERS = torch.tensor([[1.0], [9.0]]), torch.tensor([[4.0, 0.0], [-1.0, 2.0]])


def test_drift_correction_leads_unlike_sites_to_the_optimum_of_all() -> None:
    def error(corrects: bool) -> float:
        manifest = Manifest.model_validate(
            {
                "model": {"family": "custom"}, "data": {"source": "custom"},
                "training": {"every": 20, "local_batch": 1, "clip_norm": 0},
                "averaging": {"codec": "fp32", "aggregation": "mean"},
                "private": {"weights": "equal", "drift_correction": corrects},
            }
        )  # fmt: skip
        model = torch.nn.Linear(2, 1, bias=False)

        def loss(model: torch.nn.Linear, curvature: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
            return (curvature / 2 * (model.weight - center).square()).sum()

        samples = (CURVATURES.repeat(5, 1), CENTERS.repeat(5, 1))
        task = Task(model, samples, np.arange(10) % 2, loss, lambda model, *batch: torch.zeros(len(batch[0])), "none",
                    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05))  # fmt: skip
        simulation = Simulation(manifest, task, [np.arange(0, 10, 2), np.arange(1, 10, 2)])
        list(simulation.run(60))
        optimum = (CURVATURES * CENTERS).sum(0) / CURVATURES.sum()
        return float(torch.dist(simulation.state.vector, optimum))

    assert error(corrects=True) < 1e-3
    assert error(corrects=False) > 0.5


PRIVACY = {"epsilon": 4.0, "delta": 1e-3, "noise_multiplier": 1.0}


def test_differential_privacy_follows_from_the_seed_and_is_counted_by_its_accountant() -> None:
    (first, reports), (again, same) = _run(4, privacy=PRIVACY), _run(4, privacy=PRIVACY)
    assert torch.equal(first.state.vector, again.state.vector)
    assert reports == same
    quiet, _ = _run(4, privacy=PRIVACY | {"noise_multiplier": 0.1, "epsilon": 1000})
    assert not torch.equal(first.state.vector, quiet.state.vector)
    for site in first.sites:
        accountant = RDPAccountant()
        steps = min(12, _most_steps(len(site.train)))
        accountant.history = [(1.0, min(1.0, 8 / len(site.train)), steps)]
        assert reports[-1].epsilon[site.name] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-6)


def _most_steps(num_samples: int) -> int:
    accountant, steps = RDPAccountant(), 0
    while steps < 100:
        accountant.history = [(1.0, min(1.0, 8 / num_samples), steps + 1)]
        if accountant.get_epsilon(1e-3) > PRIVACY["epsilon"]:
            break
        steps += 1
    return steps


def test_sites_stop_once_their_privacy_budget_is_spent_and_so_does_the_run() -> None:
    simulation, reports = _run(1000, privacy=PRIVACY)
    assert len(reports) < 1000
    assert all(loss <= PRIVACY["epsilon"] for report in reports for loss in report.epsilon.values())
    taking_part = [len(report.sent_bytes) for report in reports]
    assert taking_part == sorted(taking_part, reverse=True)
    assert taking_part[0] == 9 > taking_part[-1]
    assert all(site.is_spent for site in simulation.sites)


def test_partial_participation_trains_a_part_of_the_sites_and_forgets_none() -> None:
    simulation, reports = _run(60, participation=0.3)
    assert set(reports[0].sent_bytes) == {site.name for site in simulation.sites}, "all are new"
    numbers = [len(report.sent_bytes) for report in reports[1:]]
    assert min(numbers) == 3
    assert sum(numbers) / len(numbers) < 3.6
    for site in simulation.sites:
        rounds = [report.round for report in reports if site.name in report.sent_bytes]
        assert max(later - earlier for earlier, later in pairwise(rounds)) <= SLEEP_ROUNDS + 1
        assert len(rounds) < 35
    assert _run(60, participation=0.3)[1] == reports
    fewest = [len(report.sent_bytes) for report in _run(10, participation=0.01, averaging={"min_peers": 5})[1]]
    assert min(fewest) == 5


def test_a_site_that_diverges_is_named() -> None:
    with pytest.raises(DivergedError, match="site00000"):
        _run(scale=float("nan"))


def test_a_loss_that_is_not_finite_is_none_in_json() -> None:
    """As with a bad sample under differential privacy, which a step leaves out."""
    assert _as_json(RoundReport(1, float("nan"), None, {}, {}, 0))["loss"] is None


def test_an_update_beyond_the_manifests_bound_is_told_in_words() -> None:
    with pytest.raises(DivergedError, match=r"round 0: .* averaging.max_value"):
        _run(averaging={"max_value": 1e-6})


SCRIPT = """
import torch
from p2ptrain.training.simulation.tasks import classification

def task(manifest):
    labels = torch.arange(60) % 3
    return classification(torch.nn.Linear(3, 3), torch.nn.functional.one_hot(labels, 3).float(), labels)
"""


def test_the_command_prints_a_line_a_round_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, script, out = tmp_path / "run.toml", tmp_path / "task.py", tmp_path / "out.json"
    run.write_text('[model]\nfamily = "custom"\n[data]\nsource = "custom"\n[private]\n[training]\nevery = 2\n')
    script.write_text(SCRIPT)
    given = ["simulate", str(run), "--script", str(script), "--sites", "5", "--rounds", "2", "--json", str(out)]
    assert main(given) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[2:4]] == ["1", "2"]
    assert '"rounds"' in out.read_text()
    assert main([*given[:-1], str(tmp_path)]) == UsageError.exit_code
    for text, words in (("task = None", "define task(manifest)"), ("import no_such", "no_such"), ("1 +", "line 1")):
        script.write_text(text)
        assert main(given) == UsageError.exit_code
        assert words in capsys.readouterr().err
    run.write_text("[training]\nevery = 2\n")
    script.write_text(SCRIPT)
    assert main(given) == UsageError.exit_code
    assert "[private]" in capsys.readouterr().err
