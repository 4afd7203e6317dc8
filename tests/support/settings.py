"""Settings of tests over those that a test has by default."""

from typing import Any

from p2ptrain.manifest import TrainingSpec


def training_over(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``base``, without keys of ``base`` that are unused beside what is given."""
    merged = {**base, **given}
    # Without "outer", which every = 1 does not use, its momentum is unused, too.
    while unused := set(TrainingSpec.model_construct(**merged).unused) & set(merged) - set(given):
        merged = {key: value for key, value in merged.items() if key not in unused}
    return merged
