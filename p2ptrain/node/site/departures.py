"""The departures of a site: its policy is enforced, and each departure is logged before its first byte.

What writes the log waits for the disk: call it off the event loop.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from p2ptrain.averaging.context import Sending
from p2ptrain.errors import ConfigError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.site.chain import Chain
from p2ptrain.node.site.policy import SitePolicy
from p2ptrain.node.site.site_reports import SITES_FILE, SiteReports
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

LOG_FILE = "left.jsonl"


class Departures:
    """One peer's policy and log in a private swarm; either may be missing.

    The log has an entry ``joined``, for each attempt ``sending`` (before it) and ``sent`` (after it), and ``closed``.
    An attempt without ``sent`` was cut by a crash: all of it may have left.

    Attributes:
        reports: What all sites told, for the model card; None without a log.
    """

    def __init__(
        self,
        manifest: Manifest,
        policy: SitePolicy | None,
        chain: Chain | None = None,
        rounds: Collection[int] = (),
        reports: SiteReports | None = None,
    ) -> None:
        """``rounds`` are those of earlier runs in which the site contributed."""
        self._manifest = manifest
        self._policy = policy
        self._chain = chain
        self.reports = reports
        self._rounds = set(rounds)
        self._metrics: dict[str, Any] = {}
        self._tensors = ""

    @classmethod
    def of(cls, manifest: Manifest, options: PeerOptions, signer: Signer, runtime: Runtime) -> Departures:
        """Check the policy of a peer, and open its log if it trains in a private swarm.

        Raises:
            ConfigError: The policy forbids to take part.
            UsageError: There is a policy, and no run directory.
            IntegrityError: The log was changed.
            ResourceError: The log cannot be written.
        """
        policy, run_dir = options.policy, options.run_dir
        if policy is not None:
            policy.check(manifest)
            if run_dir is None:
                raise UsageError(f"{policy.path}: a site with a policy needs a run_dir, for the log of what left it")
        if manifest.private is None or run_dir is None or options.role != "trainer":
            return cls(manifest, policy)
        run_dir.mkdir(parents=True, exist_ok=True)
        chain, entries = Chain.go_on(run_dir / LOG_FILE, signer, runtime.now)
        rounds = {each["round"] for each in entries if each["what"] == "sending"}
        reports = SiteReports(run_dir / SITES_FILE, signer.peer_id if policy is not None else "")
        departures = cls(manifest, policy, chain, rounds, reports)
        departures.last_round(0)
        return departures

    @property
    def is_logged(self) -> bool:
        return self._chain is not None

    def joined(self, names: Collection[str]) -> None:
        """Check the shared tensors, by name, and log the beginning; raise `ConfigError` if the policy keeps one."""
        if self._policy is not None:
            self._policy.check_tensors(names)
        self._tensors = hashlib.sha256("\n".join(names).encode()).hexdigest()
        self._log(
            "joined", manifest=self._manifest.digest.hex(), policy=self._policy.digest if self._policy else None,
            tensors=self._tensors,
        )  # fmt: skip

    def withheld(self, record: PeerRecord) -> PeerRecord:
        """Return the record as it may leave, and remember its measurements for the log."""
        record = self._policy.withheld(record) if self._policy is not None else record
        # A loss that is not finite leaves as ``diverged`` alone.
        self._metrics = {
            "loss": record.loss if record.loss is not None and math.isfinite(record.loss) else None,
            "evaluation": asdict(record.evaluation) if record.evaluation is not None else None,
            "privacy": asdict(record.privacy) if record.privacy is not None else None,
        }
        return record

    def last_round(self, now: int) -> int:
        """Return the first round to which the policy lets this site contribute no more, if ``now`` is next; 0 for none.

        Raises:
            ConfigError: The site has contributed in as many rounds as it may.
        """
        limit = self._policy.settings.max_rounds if self._policy is not None else 0
        if not limit:
            return 0
        left = limit - len(self._rounds)
        if left <= 0:
            raise ConfigError(f"this site contributed in {limit} rounds, and its policy allows no more: max_rounds")
        return now + left

    def sending(self, sending: Sending) -> None:
        """Log that parts are about to leave; raise `ResourceError`, so that they stay, if the log does not take it."""
        self._rounds.add(sending.round)
        self._log("sending", **asdict(sending), tensors=self._tensors, metrics=self._metrics)

    def sent(self, sending: Sending, parts: Mapping[int, memoryview]) -> None:
        """Log which parts left complete, by share."""
        whole = hashlib.sha256()
        for _, part in sorted(parts.items()):
            whole.update(part)
        self._log(
            "sent", round=sending.round, level=sending.level, shares=sorted(parts),
            bytes=sum(part.nbytes for part in parts.values()), sha256=whole.hexdigest(),
        )  # fmt: skip

    def close(self) -> None:
        """Log the end, and tell the hash of the last line, so that a later cut of the log can be proved."""
        if self.reports is not None:
            self.reports.writer.close()
        if self._chain is not None and self._tensors:
            self._log("closed")
            logger.info("%s: %d entries, head %s", self._chain.path, self._chain.size, self._chain.head)

    def _log(self, what: str, **values: Any) -> None:
        if self._chain is not None:
            self._chain.append(what, **values)
