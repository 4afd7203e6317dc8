"""Joining of stage checkpoints to one model: a pure function that selects them, or explains its failure.

A complete list (`p2ptrain.training.checkpoints.stage_list`) names the states that belong together. Any checkpoint with
a listed digest fits, with a list of its own or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import CheckpointError
from p2ptrain.training.checkpoints.stage_list import StageList

_States = dict[tuple[str, int], dict[bytes, list[Path]]]
"""Paths of checkpoints by folder and round, then by digest."""


@dataclass(frozen=True)
class Found:
    """A checkpoint of one stage, saved at the start of ``round``, as it describes itself.

    Attributes:
        name: Name of the stage's folder.
        digest: Of its state, 32 bytes.
        listed: The list beside it; None if there is none, or one of another swarm.
    """

    name: str
    path: Path
    round: int
    digest: bytes
    listed: StageList | None = None


@dataclass(frozen=True)
class Joined:
    """Checkpoints that form one model, all saved at the start of ``round``.

    Attributes:
        paths: By stage folder: interchangeable copies of its state.
        is_complete: True if hosts agreed on the digests; False if only the round connects them.
    """

    round: int
    paths: Mapping[str, Sequence[Path]]
    is_complete: bool


def join(found: Sequence[Found], names: Sequence[str], by_round: bool = False) -> Joined:
    """Return the newest round with matching checkpoints of all stages.

    Args:
        names: Folders of all parts of the model.
        by_round: Match by round alone, for a finished run without a complete checkpoint.

    Raises:
        CheckpointError: No round qualifies; the message names the missing part and the remedy.
    """
    there: _States = {}
    for each in found:
        there.setdefault((each.name, each.round), defaultdict(list))[each.digest].append(each.path)
    absent = [name for name in names if all(each.name != name for each in found)]
    if absent:
        raise CheckpointError(
            f"there are no checkpoints of all stages (missing: {', '.join(absent)}): put the run directories of a host"
            " of each stage into one folder, and give that"
        )
    if by_round:
        return _join_by_round(there, names)
    lists = [each.listed for each in found if each.listed is not None and set(names) <= each.listed.digests.keys()]
    lists.sort(key=lambda listed: -listed.round)
    for listed in lists:
        paths = {name: there.get((name, listed.round), {}).get(listed.digests[name], []) for name in names}
        if all(paths.values()):
            return Joined(listed.round, paths, True)
    if lists:
        raise CheckpointError(_why_not(lists[0], there, names))
    common = _common_rounds(there, names)
    hint = f"; --by-round joins round {max(common)} all the same, and is for runs that are over" if common else ""
    raise CheckpointError(
        "none of these checkpoints is complete: no host heard that all stages had saved its round, so nothing says"
        f" that they are of one run: wait until the swarm has saved another one, and take that{hint}"
    )


def _why_not(listed: StageList, there: _States, names: Sequence[str]) -> str:
    """Describe the missing part of a complete round."""
    for name in names:
        others = there.get((name, listed.round), {})
        if listed.digests[name] in others:
            continue
        if others:
            digest = next(iter(others)).hex()[:8]
            return (
                f"{name} of round {listed.round} has the digest {digest}, and the other stages go with"
                f" {listed.digests[name].hex()[:8]}: it is of another part of a swarm that was split; add the run"
                f" directory of another host of {name}"
            )
        return (
            f"{name} is missing of round {listed.round}, the last complete one here: add the run directory of another"
            f" host of {name}, or wait until the swarm has saved another round"
        )
    raise AssertionError("all of it is there")


def _common_rounds(there: _States, names: Sequence[str]) -> set[int]:
    return set.intersection(*({round for name, round in there if name == wanted} for wanted in names))


def _join_by_round(there: _States, names: Sequence[str]) -> Joined:
    common = _common_rounds(there, names)
    if not common:
        raise CheckpointError(
            "no round was saved by all stages: put the run directories of other hosts of the stages beside these"
        )
    round, chosen = max(common), {}
    for name in names:
        states = there[name, round]
        if len(states) > 1:
            paths = [str(path) for paths in states.values() for path in paths]
            raise CheckpointError(
                f"{name} of round {round} has several states, and nothing says which goes with the other stages: move"
                f" all but one of {', '.join(sorted(paths))} away"
            )
        (chosen[name],) = states.values()
    return Joined(round, chosen, False)
