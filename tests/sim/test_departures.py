"""Sites whose policy says what may leave, and whose logs say what did."""

import json
from typing import Any

import pytest

from p2ptrain.averaging.allreduce import streams
from p2ptrain.errors import ConfigError
from p2ptrain.manifest import AdmissionSpec, PrivateSpec, SecureAggregationSpec
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.node.site.chain import read_chain
from p2ptrain.node.site.site_reports import SITES_FILE
from tests.support.coroutines import simulated
from tests.support.sim.product_peers import Begin, ProductSwarm

TRAINING = {"every": 4, "warmup_steps": 0}
SITES = "abc"
POLICY = 'leave = ["*"]\nsamples = "bucketed"\n'


def _begin(begin: Begin, network: SimulatedNetwork, policy: str, **averaging: Any) -> ProductSwarm:
    sites = begin(network, TRAINING, private=PrivateSpec(), **averaging)
    (sites.folder / "policy.toml").write_text(policy)
    for name in SITES:
        (sites.folder / f"{name}.txt").write_text(" ".join(f"{name}{number}" for number in range(400)))
    return sites


def _start(sites: ProductSwarm, name: str, rounds: int) -> None:
    sites.start(name, rounds, data=sites.folder / f"{name}.txt", policy=sites.folder / "policy.toml")


def _log(sites: ProductSwarm, name: str) -> list[dict[str, Any]]:
    return read_chain(sites.folder / name / "left.jsonl", sites.nodes[name].identity).entries


@simulated(seed=5)
async def test_each_site_logs_before_and_after_what_it_sends_and_to_whom(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = _begin(begin, network, POLICY + "training_loss = true\n")
    sent: dict[tuple[str, int], dict[str, int]] = {}
    at_sending: list[tuple[str, bool]] = []
    send = streams.OutgoingStream._send_part

    async def observed(stream: streams.OutgoingStream, codec: Any) -> None:
        own = stream._session.own.ticket
        name = next(name for name, node in sites.nodes.items() if node.identity.peer_id == own.peer)
        logged = _log(sites, name)[-1]
        at_sending.append((logged["what"], logged["round"] == own.round))
        await send(stream, codec)
        part = stream._session.sent_parts[stream.member.index]
        sent.setdefault((own.peer, own.round), {})[stream.member.peer] = memoryview(part).nbytes

    monkeypatch.setattr(streams.OutgoingStream, "_send_part", observed)
    for name in SITES:
        _start(sites, name, 4)
    await sites.end()
    for name in SITES:
        entries = _log(sites, name)
        assert [entries[0]["what"], entries[-1]["what"]] == ["joined", "closed"]
        assert entries[0]["manifest"] == sites.manifest.digest.hex()
        own = sites.nodes[name].identity.peer_id
        for before, after in zip(entries[1:-1:2], entries[2:-1:2], strict=True):
            assert (before["what"], after["what"], after["round"]) == ("sending", "sent", before["round"])
            left = sent.get((own, before["round"]), {})
            assert set(left) == set(before["receivers"])
            assert sum(left.values()) == after["bytes"]
            assert before["metrics"]["evaluation"] is None
    assert set(at_sending) == {("sending", True)}, "the entry is there before the part leaves"


@simulated(seed=6)
async def test_a_policy_keeps_loss_and_measurements_out_of_all_records(network: SimulatedNetwork, begin: Begin) -> None:
    sites = _begin(begin, network, POLICY)
    told: list[tuple[float | None, object]] = []

    def look(name: str, trainer: object) -> None:
        for node in sites.nodes.values():
            told.extend((each.loss, each.evaluation) for each in node.membership.records())

    sites.before_step = look
    for name in SITES:
        _start(sites, name, 3)
    await sites.end()
    assert told
    assert set(told) == {(None, None)}
    assert all(trainer.progress.loss is not None for trainer in sites.trainers.values())
    for name in SITES:
        lines = [json.loads(line) for line in (sites.folder / name / SITES_FILE).read_text().splitlines()]
        assert {(each["evaluation"], each["privacy"]) for each in lines} == {(None, None)}, "and of the model cards"


@simulated(seed=7)
async def test_a_site_leaves_after_the_rounds_that_its_policy_allows_over_all_its_runs(
    network: SimulatedNetwork, begin: Begin
) -> None:
    sites = _begin(begin, network, POLICY + "max_rounds = 3\n")
    (sites.folder / "free.toml").write_text(POLICY)
    for name in "ab":
        sites.start(name, 12, data=sites.folder / f"{name}.txt", policy=sites.folder / "free.toml")
    await sites.until(lambda: sites.round("a") >= 1)
    _start(sites, "c", 12)
    await sites.until(lambda: "c" in sites.trainers)
    await sites.until(lambda: any(each["what"] == "sending" for each in _log(sites, "c")))
    await sites.drain("c")
    _start(sites, "c", 12)
    await sites.tasks["c"]
    rounds = {each["round"] for each in _log(sites, "c") if each["what"] == "sending"}
    assert 1 <= len(rounds) <= 3
    while len(rounds) < 3:
        _start(sites, "c", 12)
        await sites.tasks["c"]
        rounds = {each["round"] for each in _log(sites, "c") if each["what"] == "sending"}
    _start(sites, "c", 12)
    with pytest.raises(ConfigError, match="max_rounds"):
        await sites.tasks["c"]
    sites.tasks.pop("c")
    await sites.end()


@simulated(seed=8)
async def test_a_site_does_not_join_against_its_policy(network: SimulatedNetwork, begin: Begin) -> None:
    sites = _begin(begin, network, POLICY + 'require = ["dp"]\n')
    _start(sites, "a", 2)
    with pytest.raises(ConfigError, match="line 3: require"):
        await sites.tasks["a"]
    assert not hasattr(sites.nodes["a"], "presence"), "it had published nothing"
    (sites.folder / "policy.toml").write_text('samples = "exact"\nleave = ["embed*"]\n')
    _start(sites, "a", 2)
    with pytest.raises(ConfigError, match="line 2: leave"):
        await sites.tasks["a"]
    assert not (sites.folder / "a" / "left.jsonl").exists()


@simulated(seed=9)
async def test_sites_that_require_secure_aggregation_send_masked_parts_and_log_them(
    network: SimulatedNetwork, begin: Begin
) -> None:
    members = tuple(SimulatedSigner(network.seed, name, {}).peer_id for name in SITES)
    sites = _begin(
        begin, network, POLICY + 'require = ["secure_aggregation"]\n',
        admission=AdmissionSpec(mode="allowlist", members=members),
        secure_aggregation=SecureAggregationSpec(), aggregation="mean", codec="fp32", group_size=8, min_peers=3,
        spot_checks=0,
    )  # fmt: skip
    for name in SITES:
        _start(sites, name, 4)
    await sites.end()
    assert {sites.round(name) for name in SITES} == {4}
    assert len(sites.heads()) == 1
    for name in SITES:
        entries = _log(sites, name)
        assert {each["codec"] for each in entries if each["what"] == "sending"} == {"masked"}
        assert all(each["bytes"] > 0 for each in entries if each["what"] == "sent")
