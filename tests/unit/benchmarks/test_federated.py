"""The task of `benchmarks.bench_federated`: all of its sites start alike, and each trains on samples of its own."""

import torch

from benchmarks.federated_task import DIGITS, Options, Task


def test_sites_start_with_one_model_of_the_size_asked_for_and_share_no_sample() -> None:
    tasks = [Task(Options(site, sites=3, values=50_000, rounds=1, steps=1)) for site in range(3)]
    sizes = {sum(each.numel() for each in task.model.parameters()) for task in tasks}
    assert all(abs(size - 50_000) < 100 for size in sizes)
    first, *others = (torch.nn.utils.parameters_to_vector(task.model.parameters()) for task in tasks)
    assert all(torch.equal(first, each) for each in others)
    rows = [tuple(row.tolist()) for task in tasks for row in task._inputs]
    assert len(set(rows)) == len(rows), "no sample is at two sites"
    assert all(len(set(task._targets.tolist())) < DIGITS for task in tasks), "each lacks some digits"
