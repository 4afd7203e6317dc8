"""Checks of the installed packages that a manifest needs."""

from __future__ import annotations

from p2ptrain.averaging.vector.rules import RULES, get_rule
from p2ptrain.codecs import CODECS, get_codec
from p2ptrain.errors import ManifestError
from p2ptrain.extensions import check_packages
from p2ptrain.manifest import Manifest
from p2ptrain.models import FAMILIES


def check_extensions(manifest: Manifest) -> None:
    """Check that this machine has the manifest's model family, codec and rule, in the pinned versions.

    Raises:
        IncompatibleError: One is missing; the message says what to install.
        ManifestError: The codec and the rule are incompatible.
    """
    check_packages(manifest.packages)
    spec = manifest.averaging
    if manifest.model.family != "custom":
        FAMILIES.find(manifest.model.family)
    CODECS.find(spec.codec)
    rule = get_rule(spec)
    if spec.codec in CODECS.own and spec.aggregation in RULES.own:
        return  # The manifest validates built-in ones itself, without an import of torch.
    if get_codec(spec.codec).sparse and rule.by_coordinate:
        raise ManifestError(
            f"averaging.aggregation = {spec.aggregation!r} makes zeros of what averaging.codec = {spec.codec!r} sends, "
            "because most peers leave out any one value: use norm_clip or centered_clip"
        )


def with_packages(manifest: Manifest) -> Manifest:
    """Return the manifest with pins of the installed packages that provide its model family, codec and rule.

    Raises:
        IncompatibleError, ManifestError: As in `check_extensions`.
    """
    check_extensions(manifest)
    brought = [CODECS.package_of(manifest.averaging.codec), RULES.package_of(manifest.averaging.aggregation)]
    if manifest.model.family != "custom":
        brought.append(FAMILIES.package_of(manifest.model.family))
    pinned = {package.partition("==")[0] for package in manifest.packages}
    added = (package for package in brought if package and package.partition("==")[0] not in pinned)
    packages = tuple(dict.fromkeys([*manifest.packages, *added]))
    return manifest.model_copy(update={"packages": packages})
