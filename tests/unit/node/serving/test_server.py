"""Hosts that only serve spread over the stages by themselves."""

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.node.serving.server import better_stage


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_hosts_that_move_one_after_another_end_alike_and_leave_no_stage_alone(begin: list[int], random: object) -> None:
    stages = {f"peer{number:02}": stage for number, stage in enumerate(begin)}

    def hosts(without: str) -> dict[int, set[str]]:
        return {stage: {peer for peer, at in stages.items() if at == stage and peer != without} for stage in range(4)}

    for _ in range(100):
        wanted = {peer: better_stage(peer, stage, hosts(peer), range(4)) for peer, stage in stages.items()}
        movers = {peer: turn for peer, (stage, turn) in wanted.items() if stage != stages[peer]}
        if not movers:
            break
        by_turn = {stage: sorted(movers[p] for p in movers if stages[p] == stage) for stage in range(4)}
        assert all(turns == list(range(len(turns))) for turns in by_turn.values()), "hosts of a stage take turns"
        first = min(movers, key=lambda peer: (movers[peer], peer))
        alone = sum(stage == stages[first] for stage in stages.values()) == 1
        assert not alone, "the last host of a stage stays"
        stages[first] = wanted[first][0]
    counts = [sum(stage == at for at in stages.values()) for stage in range(4)]
    assert max(counts) - min(counts) <= 1


def test_a_host_moves_to_stages_that_fit_alone() -> None:
    hosts = {0: {"a", "b", "c"}, 1: set[str](), 2: {"d"}}
    assert better_stage("e", 0, hosts, [0, 1, 2]) == (1, 3)
    assert better_stage("e", 0, hosts, [0, 2]) == (2, 3)
    assert better_stage("e", 0, hosts, [0]) == (0, 3)
    assert better_stage("d", 2, {**hosts, 2: set()}, [0, 1, 2]) == (2, 0)
