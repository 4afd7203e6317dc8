import argparse
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from p2ptrain.cli import terms
from p2ptrain.cli.commands.up import add_arguments, run
from p2ptrain.cli.main import Parser
from p2ptrain.cli.plan import DEFAULT_MINUTES, DEMO_SETTINGS, make_plan
from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ResourceError, UsageError
from p2ptrain.manifest import SIGNED_FILE, SignedManifest
from p2ptrain.network.identity import IDENTITY_FILE, Identity


def arguments(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = Parser()
    add_arguments(parser)
    parser.set_defaults(log_format=None, log_level=None)
    return parser.parse_args(["--run-dir", str(tmp_path), *words])


def test_the_plan_has_one_role_file_for_each_peer_and_all_listen_on_loopback(tmp_path: Path) -> None:
    plan = make_plan(arguments(tmp_path, "--peers", "2", "--threads", "1"))
    configs = [PeerConfig.load(path) for path in (plan.bootstrap, *plan.trainers)]
    assert [(config.role, config.name) for config in configs] == [
        ("bootstrap", "bootstrap"),
        ("trainer", "trainer-1"),
        ("trainer", "trainer-2"),
    ]
    assert {config.network.listen for config in configs} == {("/ip4/127.0.0.1/tcp/0",)}
    assert len({config.run_dir for config in configs}) == 3
    assert all(config.manifest == tmp_path / "manifest.bin" for config in configs)
    assert not any(config.network.nat_port_map or config.network.auto_nat for config in configs)


def test_the_bootstrap_peer_founds_the_swarm_and_a_second_run_continues_it(tmp_path: Path) -> None:
    with Identity.ephemeral() as verifier:
        first, second = (
            (make_plan(arguments(tmp_path)), SignedManifest.from_bytes(path.read_bytes(), None, verifier).manifest)[1]
            for path in [tmp_path / SIGNED_FILE] * 2
        )
    with Identity.create_or_load(tmp_path / "bootstrap" / IDENTITY_FILE) as seed:
        assert first.founders == (seed.peer_id,)
    assert first.digest == second.digest


def test_its_peers_may_read_what_its_own_manifest_names_and_nothing_else(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.touch()
    for words, allowed in ((["--data", str(text)], (text,)), ([], ())):
        plan = make_plan(arguments(tmp_path, *words))
        assert {PeerConfig.load(path).allow_path for path in plan.trainers} == {allowed}


@pytest.mark.parametrize(
    ("words", "minutes", "rounds"),
    [([], DEFAULT_MINUTES, 0), (["--rounds", "5"], 0.0, 5), (["--minutes", "0.5", "--rounds", "5"], 0.5, 5)],
)
def test_it_ends_after_the_minutes_or_the_rounds_that_were_asked_for(
    tmp_path: Path, words: list[str], minutes: float, rounds: int
) -> None:
    plan = make_plan(arguments(tmp_path, "--peers", "1", *words))
    assert (plan.goal.minutes, plan.goal.rounds) == (minutes, rounds)
    stop = PeerConfig.load(plan.trainers[0]).stop_after
    # All trainers stop at the same round, whichever they came in.
    assert (stop.rounds, stop.at_round) == (0, rounds)


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ([], [("trainer", -1)] * 3),
        (["--stages", "2"], [("both", 0), ("both", 1), ("both", 0)]),
        (["--set", "lora.targets=['q_proj']"], [("both", 0)] * 3),
    ],
    ids=["whole model", "two stages", "adapters"],
)
def test_each_peer_hosts_a_stage_where_there_are_any(
    tmp_path: Path, words: list[str], roles: list[tuple[str, int]]
) -> None:
    configs = [PeerConfig.load(file) for file in make_plan(arguments(tmp_path, "--peers", "3", *words)).trainers]
    assert [(config.role, config.pipeline.stage) for config in configs] == roles


def test_rounds_count_from_what_a_former_run_left_unless_it_trained_something_else(tmp_path: Path) -> None:
    def goal(*words: str) -> int:
        return make_plan(arguments(tmp_path, "--peers", "1", "--rounds", "5", *words)).goal.rounds

    assert goal() == 5
    for name in ("000001-round-4", "000002-round-12"):
        (tmp_path / "trainer-1" / "checkpoints" / name).mkdir(parents=True)
    assert goal() == 17
    assert goal("--every", "2") == 5


def test_the_manifests_own_limit_is_part_of_the_goal(tmp_path: Path) -> None:
    plan = make_plan(arguments(tmp_path, "--peers", "1", "--rounds", "5", "--set", "training.rounds=3"))
    assert plan.goal.rounds == 3


def test_an_option_that_a_peer_would_refuse_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device"):
        make_plan(arguments(tmp_path, "--device", "gpu"))


def test_a_served_model_has_hosts_of_two_stages_that_do_not_train(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    plan = make_plan(arguments(tmp_path / "run", "--serve", "--model", str(folder)))
    hosts = [PeerConfig.load(path) for path in plan.trainers]
    assert [(host.role, host.name, host.pipeline.stage) for host in hosts] == [
        ("stage", "host-1", 0),
        ("stage", "host-2", 1),
        ("stage", "host-3", 0),
    ]
    assert all(host.serving.enabled and host.weights == folder for host in hosts)
    assert plan.chat == ("--weights", str(folder))
    assert plan.goal.minutes == 0
    assert "model.hidden" not in DEMO_SETTINGS  # Of the next demo.


def test_a_manifest_that_is_served_is_trained_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "own"\n')
    plan = make_plan(arguments(tmp_path / "run", "--serve", "--manifest", str(tmp_path / "run.toml")))
    trainer = PeerConfig.load(plan.trainers[0])
    assert (trainer.role, trainer.serving.enabled, plan.chat) == ("trainer", True, None)


PRIVATE = ("--every", "4", "--set", "data.source=own", "--set", "private.weights=samples")


def write_texts(folder: Path) -> Path:
    """Write 3 folders of text, in which no line is twice."""
    for name in "abc":
        (folder / name).mkdir(parents=True)
        (folder / name / "text.txt").write_text("".join(f"{name} line {number}\n" for number in range(10_000)))
    return folder


def test_each_line_is_at_one_site_of_a_private_swarm_and_no_peer_is_told_where_it_came_from(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text")
    words = ("--peers", "4", *PRIVATE, "--data", str(text), "--partition", "dirichlet:0.1")
    plan = make_plan(arguments(tmp_path / "run", *words))
    configs = [PeerConfig.load(path) for path in plan.trainers]
    assert [config.name for config in configs] == ["site-1", "site-2", "site-3", "site-4"]
    parts = [config.data.read_text().splitlines() for config in configs if config.data is not None]
    lines = [line for part in parts for line in part]
    assert len(lines) == len(set(lines)) == 30_000
    assert {len({line[0] for line in part}) for part in parts} != {3}, "dirichlet:0.1 makes sites unlike"
    assert plan.manifest.data.source == "own"
    assert not any(config.allow_path for config in configs)
    assert PeerConfig.load(plan.bootstrap).data is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "iid"], "add \\[private\\]"),
        ([*PRIVATE, "--set", "data.source=custom"], "run the script"),
        ([*PRIVATE, "--partition", "zipf"], "--partition 'zipf' is unknown"),
        ([*PRIVATE, "--peers", "40"], "40 sites with"),
        ([*PRIVATE, "--set", "model.context=8192"], "too short.*fewer --peers"),
    ],
    ids=["no sites", "a script's data", "unknown", "too many sites", "too short"],
)
def test_sites_that_cannot_have_text_of_their_own_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=message):
        make_plan(arguments(tmp_path / "run", "--data", str(write_texts(tmp_path / "text")), *words))


def test_a_swarm_that_cannot_run_is_refused_and_its_new_folder_removed(tmp_path: Path) -> None:
    for words, message in (
        (("--peers", "100000"), "each needs about .* is free"),
        (("--stages", "9"), "1 to 6 stages"),
    ):
        with pytest.raises((ConfigError, ResourceError), match=message):
            make_plan(arguments(tmp_path / "run", *words))
        assert not (tmp_path / "run").exists()


def test_the_memory_of_a_swarm_is_that_of_its_trainers_and_of_their_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = terms.needs_of(make_plan(arguments(tmp_path / "run")).manifest).memory
    for spare, refused in ((terms.DAEMON_BYTES, nullcontext()), (0, pytest.raises(ResourceError, match="start fewer"))):
        monkeypatch.setattr(terms, "available_memory", lambda spare=spare: 3 * (trainer + spare))
        with refused:
            make_plan(arguments(tmp_path / f"run-{spare}", "--peers", "3"))


@pytest.mark.parametrize("words", [["--model", "x"], ["--serve", "--model", "x", "--manifest", "run.toml"]])
def test_a_model_goes_with_serving_alone(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UsageError, match="--model goes with --serve"):
        run(arguments(tmp_path, *words))
