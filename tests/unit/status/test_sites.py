"""The curves of a private swarm's sites, which stay bounded whatever records say."""

from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.sites import MAX_POINTS, MAX_SITES, SiteCurves
from tests.support.web.watched import trainer


def site(peer: str, round_: int, mean: float = 0.5, metric: str = "auc") -> PeerRecord:
    return trainer(peer, name=peer, evaluation=Evaluation(metric, round_, mean, 0.1, 64))


def test_each_site_has_a_curve_over_rounds_and_the_pooled_one_comes_first() -> None:
    curves = SiteCurves()
    for round_ in range(3):
        records = [site("b", round_, 0.5 + round_ / 10), site("a", round_, 0.7), trainer("c")]
        curves.learn(records)
        curves.learn(records)
    all_sites, a, b = curves.views()
    assert (all_sites.peer, a.name, b.name) == ("", "a", "b")
    assert [(point.round, point.mean) for point in b.points] == [(0, 0.5), (1, 0.6), (2, 0.7)]
    expected = pooled([each.evaluation for each in records if each.evaluation])
    assert expected is not None
    assert (all_sites.points[-1].mean, all_sites.points[-1].error) == (expected.mean, expected.error)


def test_a_long_curve_is_thinned_and_still_shows_its_beginning_and_its_end() -> None:
    curves = SiteCurves()
    for round_ in range(20 * MAX_POINTS):
        curves.learn([site("a", round_)])
        assert all(len(curve.points) <= MAX_POINTS for curve in curves.views())
    rounds = [point.round for point in curves.views()[1].points]
    assert (rounds[0], rounds[-1], rounds) == (0, 20 * MAX_POINTS - 1, sorted(set(rounds)))


def test_no_more_than_so_many_sites_are_kept_and_those_that_left_make_room() -> None:
    curves = SiteCurves()
    crowd = [site(f"{number:03}", 1) for number in range(2 * MAX_SITES)]
    curves.learn(crowd)
    assert len(curves.views()) == MAX_SITES + 1
    curves.learn([*crowd[1:MAX_SITES], site("new", 2)])
    names = {curve.name for curve in curves.views()}
    assert "new" in names
    assert "000" not in names
    assert len(names) == MAX_SITES + 1


def test_a_swarm_that_went_back_and_another_metric_begin_anew() -> None:
    curves = SiteCurves()
    for round_ in (1, 2, 3, 2):
        curves.learn([site("a", round_)])
    assert [point.round for point in curves.views()[1].points] == [1, 2]
    curves.learn([site("a", 3, metric="loss")])
    assert [(curve.metric, len(curve.points)) for curve in curves.views()] == [("loss", 1), ("loss", 1)]
