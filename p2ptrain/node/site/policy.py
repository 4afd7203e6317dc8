"""A site's policy: the file in which a site says what may leave its machine in a private swarm.

Whatever the file does not allow stays. `SitePolicy.refusals` compares it with a manifest.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import Manifest, explain
from p2ptrain.manifest.sections import Section
from p2ptrain.network.records.record import PeerRecord

DEMANDS = {"dp": "differential_privacy", "secure_aggregation": "secure_aggregation"}
"""The manifest's section that meets each demand."""
SAMPLES = ("no", "bucketed", "exact")
TELLS = {"equal": "no", "bucketed": "bucketed", "samples": "exact"}
"""How much of the number of samples each value of ``private.weights`` tells."""


class PolicyFile(Section):
    """The settings of a policy file."""

    leave: tuple[str, ...] = ()
    """Patterns of the names of tensors whose updates may leave, such as ``["*"]``."""
    stay: tuple[str, ...] = ()
    """Patterns of tensors that must stay, even if ``leave`` allows them; the manifest keeps them by
    ``private.personal``."""
    training_loss: bool = False
    """The training loss may leave."""
    held_out_metrics: bool = False
    """The mean over held-out samples, its error, and their rounded number may leave."""
    samples: Literal["no", "bucketed", "exact"] = "no"
    """The precision to which the number of training samples may leave; ``bucketed`` is a power of two."""
    max_rounds: int = Field(0, ge=0, le=1 << 40)
    """The site contributes in at most so many rounds, over all its runs; 0 sets no limit."""
    min_sites: int = Field(1, ge=1, le=256)
    """A round of fewer sites gets no contribution."""
    require: tuple[Literal["dp", "secure_aggregation"], ...] = ()
    """Protections that the swarm must have."""

    @model_validator(mode="after")
    def _metrics_tell_samples(self) -> PolicyFile:
        if self.held_out_metrics and self.samples == "no":
            raise ValueError(
                'held_out_metrics = true with samples = "no": a measurement tells the rounded number of held-out'
                ' samples; set held_out_metrics = false, or samples = "bucketed"'
            )
        return self


@dataclass(frozen=True)
class SitePolicy:
    """A policy, and where it stands.

    Attributes:
        digest: SHA-256 of the file, in hexadecimal.
    """

    path: Path
    text: str
    settings: PolicyFile
    digest: str

    @classmethod
    def load(cls, path: Path) -> SitePolicy:
        """Return the policy of a TOML file; raise `ConfigError` if it cannot be read, or is invalid."""
        try:
            data = path.read_bytes()
            text = data.decode()
            settings = PolicyFile.model_validate(tomllib.loads(text))
        except ValidationError as error:
            raise ConfigError(explain(error, str(path), PolicyFile)) from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"policy {path}: {reason}; give the path of a TOML file") from error
        return cls(path, text, settings, hashlib.sha256(data).hexdigest())

    def check(self, manifest: Manifest) -> None:
        """Raise `ConfigError` with all `refusals`, if there are any."""
        if found := self.refusals(manifest):
            raise ConfigError("; ".join(found))

    def refusals(self, manifest: Manifest) -> list[str]:
        """Return why the policy forbids to take part: its line, and the manifest's setting; empty if it allows it."""
        own, spec, found = self.settings, manifest.private, []
        if spec is None:
            return [f"{self.path}: the swarm has no section [private], and a policy is for private swarms alone"]
        told = TELLS[spec.weights]
        if SAMPLES.index(told) > SAMPLES.index(own.samples):
            found.append(f"{self._line('samples')}, and the manifest's private.weights = {spec.weights!r} tells more")
        if manifest.averaging.min_peers < own.min_sites:
            found.append(
                f"{self._line('min_sites')}, and the manifest's averaging.min_peers ="
                f" {manifest.averaging.min_peers} commits rounds of fewer"
            )
        if own.stay and not spec.personal:
            found.append(f"{self._line('stay')}, and the manifest has no private.personal: all tensors leave")
        for demand in own.require:
            if getattr(manifest, DEMANDS[demand]) is None:
                found.append(f"{self._line('require')}, and the manifest has no section [{DEMANDS[demand]}]")
        return found

    def check_tensors(self, names: Iterable[str]) -> None:
        """Raise `ConfigError` if the policy keeps a tensor whose updates would leave.

        Args:
            names: The shared tensors, by their names in the model.
        """
        for name in names:
            for key, is_kept in (("stay", self._matches("stay", name)), ("leave", not self._matches("leave", name))):
                if is_kept:
                    raise ConfigError(
                        f"{self._line(key)}, and updates of {name!r} would leave: the manifest keeps tensors by"
                        " private.personal"
                    )

    def withheld(self, record: PeerRecord) -> PeerRecord:
        """Return a record without the values that the policy keeps."""
        own = self.settings
        return replace(
            record,
            loss=record.loss if own.training_loss else None,
            evaluation=record.evaluation if own.held_out_metrics else None,
            # With the number of steps it tells the exact number of samples.
            privacy=record.privacy if own.samples == "exact" else None,
        )

    def _matches(self, key: str, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in getattr(self.settings, key))

    def _line(self, key: str) -> str:
        """Return the line of a key, or that it is missing."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if re.match(rf"\s*{key}\s*=", line):
                return f"{self.path}, line {number}: {line.strip()}"
        return f"{self.path} has no line {key} = …, which means {getattr(self.settings, key)!r}"
