"""Whether this machine has what a manifest names of installed packages."""

from __future__ import annotations

from p2ptrain.averaging.vector.rules import RULES, get_rule
from p2ptrain.codecs import CODECS, get_codec
from p2ptrain.errors import ManifestError
from p2ptrain.extensions import check_packages
from p2ptrain.manifest import Manifest
from p2ptrain.models import FAMILIES


def check_extensions(manifest: Manifest) -> None:
    """Refuse a manifest whose model family, codec or rule this machine does not have, or not in the pinned version.

    Raises:
        IncompatibleError: Says what is missing, and what to install.
        ManifestError: Its codec and its rule do not go together.
    """
    check_packages(manifest.packages)
    spec = manifest.averaging
    if manifest.model.family != "custom":
        FAMILIES.find(manifest.model.family)
    CODECS.find(spec.codec)
    rule = get_rule(spec)
    if spec.codec in CODECS.own and spec.aggregation in RULES.own:
        return  # The manifest checked itself, and torch is not imported yet.
    if get_codec(spec.codec).sparse and rule.by_coordinate:
        raise ManifestError(
            f"averaging.aggregation = {spec.aggregation!r} makes zeros of what averaging.codec = {spec.codec!r} sends, "
            "because most peers leave out any one value: use norm_clip or centered_clip"
        )


def with_packages(manifest: Manifest) -> Manifest:
    """Return a manifest that pins the installed packages which bring what it names.

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
