from dataclasses import replace

from p2ptrain.manifest import Manifest, ModelSpec, PipelineSpec, TrainingSpec
from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.status.progress import RoundGoal, round_goal, seconds_to_round, tokens_in_round
from tests.unit.cli.screen.test_table import COMMITTED, TRAINER


def test_the_next_round_is_told_from_the_last_ones() -> None:
    reports = [replace(COMMITTED, compute_seconds=seconds) for seconds in (9.0, 10.0, 30.0)]
    assert seconds_to_round(reports, 100.0, 104.0) == 6.0
    assert seconds_to_round(reports, 100.0, 200.0) == 0.0
    assert seconds_to_round([], 100.0, 104.0) is None
    assert seconds_to_round(reports, None, 104.0) is None


def test_a_round_is_due_at_a_number_of_tokens_that_the_peers_reach_together() -> None:
    model = ModelSpec(context=128)
    shared = round_goal(Manifest(name="x", model=model, training=TrainingSpec(every=1, global_batch=10)))
    own = round_goal(Manifest(name="x", model=model, training=TrainingSpec(every=4, local_batch=2)))
    assert (shared, own) == (RoundGoal(1280, True), RoundGoal(1024, False))
    records = [replace(TRAINER, round_tokens=700), replace(TRAINER, round_tokens=2000),
               replace(TRAINER, round=9), replace(TRAINER, state="syncing", round_tokens=500)]  # fmt: skip
    assert tokens_in_round(records, 5, shared) == (2700, 1280)
    assert tokens_in_round(records, 5, own) == (2700, 2048), "a fast peer does what a slow one does not"
    assert tokens_in_round(records, 6, own) == (0, 0)
    assert tokens_in_round(records, 5, RoundGoal(0, False)) == (2700, 0)


def test_the_round_of_a_pipeline_is_as_far_as_the_hosts_of_its_first_stage() -> None:
    manifest = Manifest(
        name="x", model=ModelSpec(context=128), training=TrainingSpec(every=1, global_batch=12),
        pipeline=PipelineSpec(stages=2),
    )  # fmt: skip
    goal = round_goal(manifest)
    assert goal == RoundGoal(1536, True, 128)

    def host(unit: int, round_: int, samples: int, state: str = "training") -> PeerRecord:
        stage = StageReport(unit, round_, bytes(32), bytes(32), 0, samples=samples)
        return replace(TRAINER, role="stage", state=state, round=round_, stages=(stage,))

    feeder = replace(TRAINER, round=0)
    records = [host(0, 5, 3), host(0, 5, 4), host(0, 4, 10), host(0, 5, 9, "draining"), host(1, 5, 10), feeder]
    assert tokens_in_round(records, 0, goal) == (7 * 128, 1536)
    assert tokens_in_round([host(1, 5, 10), feeder], 5, goal) == (0, 0)
