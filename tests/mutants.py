"""Break the product on purpose, one behaviour at a time, and see that the named test notices.

``python -m tests.mutants`` runs all of them, ``--only WORD`` some, ``--list`` shows them. Each mutant replaces one
piece of the product's text in a copy of the tree; its test passes without the change and has to fail with it.
`tests/unit/test_mutants.py` checks that every mutant still applies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
TEST_SECONDS = 180.0
"""How long one test may take, of which most take seconds; a longer one counts as a failure of the list."""
ALL_SECONDS = 900.0
"""The same for the tests of all mutants, without a change."""
PASSES, FAILS = "passes", "fails"


@dataclass(frozen=True)
class Mutant:
    """One change to the product, and the test that catches it.

    Attributes:
        name: The behaviour that breaks.
        file: Below ``p2ptrain/``.
        before: A piece of that file's text that stands there once.
        after: What replaces it.
        test: What pytest is told to run, below ``tests/``; ``FILE -k WORDS`` selects.
    """

    name: str
    file: str
    before: str
    after: str
    test: str


MUTANTS = (
    Mutant(
        "a member that gives up says so while parts and means are on their way",
        "averaging/allreduce/incoming.py",
        "await channel.interrupt(session.given_up.result(), GAVE_UP)",
        "await tasks.close()",
        "sim/test_stragglers.py -k another_round_of_all_others",
    ),
    Mutant(
        "a certificate needs more than half of its roster",
        "averaging/protocol/certificate.py",
        "if len(signers) <= len(body.members) // 2:",
        "if len(signers) < len(body.members) // 2:",
        "unit/averaging/protocol/test_certificate.py -k more_than_half",
    ),
    Mutant(
        "a signature counts for one body only",
        "averaging/protocol/certificate.py",
        "if peer in body.members and verifier.verify(peer, message, proof)}",
        "if peer in body.members}",
        "unit/averaging/protocol/test_certificate.py -k another_body",
    ),
    Mutant(
        "a certificate is of one swarm",
        "averaging/protocol/certificate.py",
        "        if body.swarm != swarm:\n",
        "        if False:\n",
        "unit/averaging/protocol/test_certificate.py -k of_another_swarm_is_refused",
    ),
    Mutant(
        "a head follows from its certificate",
        "training/sync/heads.py",
        "if body.next_head(head.digest, head.certificate) != head:",
        "if False:",
        "sim/test_false_states.py -k certificate",
    ),
    Mutant(
        "a downloaded state has the digest that most announce",
        "training/sync/heads.py",
        "if votes and votes[head.digest] < max(votes.values()):",
        "if False:",
        "sim/test_false_states.py -k most_others",
    ),
    Mutant(
        "a downloaded state is finite",
        "training/sync/partial_download.py",
        "if not is_finite(self.specs, index, data):",
        "if False:",
        "sim/test_false_states.py -k finite",
    ),
    Mutant(
        "a replayed round that holds the residual drops it",
        "training/sync/replica.py",
        "if contributed:  # The old residual",
        "if False:  # The old residual",
        "sim/test_catching_up.py -k 'residual_whose_round_is_over and replay'",
    ),
    Mutant(
        "a downloaded state that holds the residual drops it",
        "training/sync/replica.py",
        "if part is None or not follows:",
        "if False:",
        "sim/test_catching_up.py -k 'residual_whose_round_is_over and download'",
    ),
    Mutant(
        "late gradients decay",
        "training/local_update.py",
        "if carry is not None and self.accumulated is not None and not contributed:",
        "if False:",
        "unit/training/sync/test_late_work.py",
    ),
    Mutant(
        "late gradients of a stage decay",
        "pipeline/stage/contribution.py",
        "torch.mul(carry[offset : offset + len(part)], max(self.tokens, 1) / self._scale, out=part)",
        "pass",
        "unit/training/sync/test_late_work.py",
    ),
    Mutant(
        "backward goes before forward",
        "pipeline/stage/device.py",
        "    BACKWARD = 1\n    FORWARD = 2\n",
        "    BACKWARD = 2\n    FORWARD = 1\n",
        "unit/pipeline/stage/test_device.py -k backward",
    ),
    Mutant(
        "a gradient that cannot be encoded adds nothing",
        "pipeline/stage/gradients.py",
        "            found = self._pass(added)\n            gradient",
        "            found = self._pass(added)\n            added.is_in = True\n"
        "            self.total.add(found.parameters, 1.0)\n            gradient",
        "unit/pipeline/stage/test_gradients.py",
    ),
    Mutant(
        "a pass whose microbatch is given up meanwhile leaves the sum",
        "pipeline/stage/gradients.py",
        "            self.take_out(added)\n            raise\n",
        "            raise\n",
        "unit/pipeline/stage/test_host.py -k bit_by_bit",
    ),
    Mutant(
        "a full round is no failure of a microbatch",
        "pipeline/client/sender.py",
        "            except OtherRoundError as error:\n                if round > full_round:",
        "            except OtherRoundError as error:\n                sends += 1\n"
        "                if sends > MAX_SENDS:\n                    raise\n                if round > full_round:",
        "unit/pipeline/client/test_sender.py -k waits",
    ),
    Mutant(
        "a trainer of a pipeline reads on",
        "training/data/windows.py",
        "        self._next = self._reserved = self._load()",
        "        self._next = self._reserved = 0",
        "unit/training/data/test_reading_position.py",
    ),
    Mutant(
        "strangers fill the directory to a bound",
        "network/libp2p/directory.py",
        "return len(stored.value) >= MAX_SUBKEYS and subkey not in stored.value",
        "return False",
        "unit/network/records/test_record_guard.py",
    ),
    Mutant(
        "History keeps what fits into its bytes",
        "averaging/commit/round_log.py",
        "            self._num_bytes() > self._max_bytes\n            or (",
        "            False\n            or (",
        "unit/averaging/commit/test_round_log.py -k fit",
    ),
    Mutant(
        "a checkpoint's tensors have its digest",
        "training/checkpoints/files.py",
        "    if not is_right:\n",
        "    if False:\n",
        "unit/training/checkpoints/test_files.py -k another_digest",
    ),
    Mutant(
        "a checkpoint's description is on the disk before the rename",
        "training/checkpoints/files.py",
        "        file.flush()\n        os.fsync(file.fileno())\n",
        "        file.flush()\n",
        "unit/training/checkpoints/test_files.py -k on_the_disk",
    ),
    Mutant(
        "a checkpoint's folder is on the disk before the rename",
        "training/checkpoints/files.py",
        "                _sync_folder(unfinished)\n",
        "",
        "unit/training/checkpoints/test_files.py -k on_the_disk",
    ),
    Mutant(
        "records expire",
        "averaging/grouping/membership.py",
        "return [self._known[peer].record for peer in sorted(self._known) if self._known[peer].expires_at > now]",
        "return [self._known[peer].record for peer in sorted(self._known)]",
        "unit/averaging/grouping/test_membership.py -k expired",
    ),
    Mutant(
        "a certificate holds one signature of a member",
        "averaging/protocol/certificate.py",
        "if len(proofs) > len(body.members) or len({peer for peer, _ in proofs}) < len(proofs):",
        "if False:",
        "unit/averaging/protocol/test_certificate.py -k repeated",
    ),
    Mutant(
        "a round moves the data position by the fastest reader for all members",
        "averaging/protocol/certificate.py",
        "return self.samples_before + sum(self.peers) * self.most_samples",
        "return self.samples_before + sum(samples for *_, samples in self.contributors)",
        "unit/averaging/protocol/test_certificate.py -k advances_the_data",
    ),
    Mutant(
        "a result of a part of the swarm ends no round",
        "averaging/protocol/certificate.py",
        "        if not self.is_last:\n",
        "        if False:\n",
        "unit/averaging/protocol/test_certificate.py -k part_of_the_swarm",
    ),
    Mutant(
        "more tokens win before more rounds",
        "averaging/protocol/head.py",
        "return (self.tokens, self.round, other.lineage) > (other.tokens, other.round, self.lineage)",
        "return (self.round, self.tokens, other.lineage) > (other.round, other.tokens, self.lineage)",
        "unit/averaging/protocol/test_certificate.py -k more_tokens_win",
    ),
    Mutant(
        "nobody renounces while another member may hold a result",
        "averaging/commit/recovery.py",
        "return all(standing.is_over for peer, standing in others.items() if peer not in silent)",
        "return True",
        "unit/averaging/commit/test_recovery.py -k nobody_renounces",
    ),
    Mutant(
        "a result that all others gave up is given up",
        "averaging/commit/recovery.py",
        "if attempt.certificate() is not None and await self._was_given_up(attempt, others):",
        "if False:",
        "unit/averaging/commit/test_recovery.py -k all_others_gave_up",
    ),
    Mutant(
        "a member that gave up hands out no signature",
        "averaging/commit/recovery.py",
        "        attempt.body, attempt.contributors, attempt.means = None, None, [None] * len(attempt.means)\n"
        "        attempt.proofs.clear()\n",
        "",
        "unit/averaging/commit/test_recovery.py -k hands_out_no_signature",
    ),
    Mutant(
        "a certificate is excluded once the rest is no majority",
        "averaging/commit/recovery.py",
        "return members - renounced >= majority and Standing.WITHHOLDS not in standings",
        "return members - renounced > majority and Standing.WITHHOLDS not in standings",
        "unit/averaging/commit/test_recovery.py -k is_excluded",
    ),
    Mutant(
        "a beat may be as late as the latest ones were",
        "averaging/timing/deadlines.py",
        ", LATENESSES * latest_seconds)",
        ")",
        "unit/averaging/timing/test_deadlines.py -k beat",
    ),
    Mutant(
        "the rest may take a fifth longer than the quorum",
        "averaging/timing/deadlines.py",
        "return grace_seconds + SLACK * seconds_until_quorum",
        "return grace_seconds",
        "unit/averaging/timing/test_deadlines.py -k fifth",
    ),
    Mutant(
        "a leader that stood still takes nobody for silent",
        "averaging/grouping/membership.py",
        "if now - asked <= 2 * patience_seconds:",
        "if True:",
        "unit/averaging/grouping/test_membership.py -k stood_still",
    ),
    Mutant(
        "older records are ignored",
        "averaging/grouping/membership.py",
        "elif sequence > known.sequence:",
        "else:",
        "unit/averaging/grouping/test_membership.py -k older_records",
    ),
    Mutant(
        "a suspect stays out for its back-off",
        "averaging/grouping/membership.py",
        "return self._runtime.now() < known.suspect_until or known.sequence",
        "return known.sequence",
        "unit/averaging/grouping/test_membership.py -k back_off",
    ),
    Mutant(
        "one leader's broken groups make no peer avoided",
        "averaging/grouping/membership.py",
        'known.broke_under.add(leader or f"itself {known.breaks}")',
        'known.broke_under.add(f"itself {known.breaks}")',
        "unit/averaging/grouping/test_membership.py -k one_leader",
    ),
    Mutant(
        "the number of known peers is bounded",
        "averaging/grouping/membership.py",
        "if len(self._known) >= MAX_KNOWN_PEERS:",
        "if False:",
        "unit/averaging/grouping/test_membership.py -k flood",
    ),
    Mutant(
        "a rule by votes counts no tokens",
        "averaging/vector/rules.py",
        "return [1 / len(tokens)] * len(tokens)",
        "return [count / sum(tokens) for count in tokens]",
        "unit/averaging/vector/test_rules.py -k claimed_tokens",
    ),
    Mutant(
        "tokens count up to a multiple of the median",
        "averaging/vector/aggregation.py",
        "min(float(count), spec.max_weight_ratio * usual) if usual else float(count)",
        "float(count)",
        "unit/averaging/vector/test_rules.py -k multiple_of_the_median",
    ),
    Mutant(
        "a norm that is not finite is out of proportion",
        "averaging/vector/aggregation.py",
        "if not norm <= max_ratio * usual",
        "if max_ratio * usual < norm < math.inf",
        "unit/averaging/vector/test_aggregation.py -k infinite",
    ),
    Mutant(
        "a round that too few are ready for is not formed",
        "averaging/grouping/pending_group.py",
        "    if situation.ready < spec.min_peers:\n",
        "    if False:\n",
        "unit/averaging/grouping/test_pending_group.py -k below_the_minimum",
    ),
    Mutant(
        "without a quorum the round is given up",
        "averaging/grouping/pending_group.py",
        "    if not has_quorum(situation, spec):\n        if out_of_time:",
        "    if not (out_of_time or has_quorum(situation, spec)):\n        if out_of_time:",
        "unit/averaging/grouping/test_pending_group.py -k without_a_quorum",
    ),
    Mutant(
        "half of the delegates are no quorum",
        "averaging/grouping/pending_group.py",
        "situation.ready <= situation.missing:",
        "situation.ready < situation.missing:",
        "unit/averaging/grouping/test_pending_group.py -k delegates",
    ),
    Mutant(
        "the group forms once the grace period is over",
        "averaging/grouping/pending_group.py",
        "if out_of_time or (situation.seconds_since_quorum or 0.0) >= spec.grace_seconds:",
        "if out_of_time:",
        "unit/averaging/grouping/test_pending_group.py -k grace",
    ),
    Mutant(
        "a round of local steps does not wait for a peer that says nothing",
        "averaging/timing/local_steps.py",
        "if now - self._heard_at(peer) < SILENT_SECONDS]",
        "]",
        "unit/averaging/timing/test_local_steps.py -k says_nothing",
    ),
    Mutant(
        "a round closes before a fast peer drifts away",
        "averaging/timing/local_steps.py",
        "min([wanted / rate, *to_most])",
        "wanted / rate",
        "unit/averaging/timing/test_local_steps.py -k drifts_away",
    ),
    Mutant(
        "a trainer that is behind ends its old round",
        "averaging/grouping/pacing.py",
        "is_over = self.is_behind() or (",
        "is_over = (",
        "unit/averaging/grouping/test_pacing.py -k is_behind",
    ),
    Mutant(
        "a trainer that caught up reports no steps of the old round",
        "averaging/grouping/pacing.py",
        "self._resting = 0 if self._resting is not None else None",
        "pass",
        "unit/averaging/grouping/test_pacing.py -k caught_up",
    ),
    Mutant(
        "a trainer that caught up does not wait for a silent leader",
        "averaging/grouping/pacing.py",
        "async with asyncio.timeout(max(LEAST_WAIT_SECONDS, OVERLAP * self._seconds)):",
        "async with asyncio.timeout(None):",
        "unit/averaging/grouping/test_pacing.py -k silent_leader",
    ),
    Mutant(
        "a trainer far away is not taken for silent",
        "averaging/grouping/pacing.py",
        "return min(MOST_PROBE_SECONDS, probe_seconds(self._context.spec) + DIALS * dial_seconds)",
        "return probe_seconds(self._context.spec)",
        "unit/averaging/grouping/test_pacing.py -k slow_link",
    ),
    Mutant(
        "work in a round that its peer did not see end is not brought again",
        "averaging/commit/contribution_log.py",
        "return any(body.members[index] == self._peer for index, *_ in body.contributors)",
        "return False",
        "sim/test_catching_up.py -k whose_end_was_not_seen",
    ),
    Mutant(
        "a residual decays",
        "averaging/vector/error_feedback.py",
        "if self._decay != 1.0:",
        "if False:",
        "unit/averaging/vector/test_error_feedback.py -k decays",
    ),
    Mutant(
        "means have the hashes of their certificate",
        "averaging/commit/result_chunks.py",
        "or not await self._runtime.offload(self._are_right, hashes):",
        "and not await self._runtime.offload(self._are_right, hashes):",
        "unit/averaging/commit/test_round_log.py -k other_means",
    ),
    Mutant(
        "a chunk of a result has its hash",
        "averaging/commit/result_chunks.py",
        "if await self._runtime.offload(_hash_of, self._spans[index], received) != self.hashes[index]:",
        "if False:",
        "unit/averaging/commit/test_result_chunks.py -k trusted",
    ),
    Mutant(
        "a peer gets its ration of transfers",
        "network/chunks/server.py",
        "or self._active[peer] >= ration.transfers_per_peer:",
        "or False:",
        "unit/network/chunks/test_fetch.py -k ration",
    ),
    Mutant(
        "a delegate brings its group's result",
        "averaging/commit/provenance.py",
        "if codec_here.encode(self._values(first, last, pieces)) != memoryview(part)[begin:end]:",
        "if self._values(first, last, pieces) is None:",
        "unit/averaging/commit/test_provenance.py -k a_change_is_found",
    ),
    Mutant(
        "a batch whose gradient is not finite takes no step",
        "training/optimizer.py",
        "if math.isfinite(clip_gradients(self._trained(), limit)):",
        "if clip_gradients(self._trained(), limit) is not None:",
        "unit/training/test_dropped_batches.py -k leaves_no_trace",
    ),
    Mutant(
        "many bad batches set the live model anew",
        "training/optimizer.py",
        "if self._dropped.in_a_row == DROPS_TO_BEGIN_ANEW:",
        "if False:",
        "unit/training/test_dropped_batches.py -k begins_anew",
    ),
    Mutant(
        "bad batches that never end end training",
        "training/dropped_batches.py",
        "if self.in_a_row >= MAX_DROPS:",
        "if False:",
        "unit/training/test_dropped_batches.py -k never_end",
    ),
    Mutant(
        "the learning rate follows the round",
        "training/optimizer.py",
        "return round_ * self._steps_per_round + min(self._work.steps, self._steps_per_round - 1)",
        "return self.total_steps",
        "unit/training/test_rates_by_round.py -k late_peer",
    ),
    Mutant(
        "a step counts within its round",
        "training/optimizer.py",
        "min(self._work.steps, self._steps_per_round - 1)",
        "self._work.steps",
        "unit/training/test_rates_by_round.py -k no_further",
    ),
    Mutant(
        "gradients are clipped",
        "training/optimizer.py",
        "limit = self._clip_norm if self._every > 1 and self._clip_norm else math.inf",
        "limit = math.inf",
        "unit/training/test_dropped_batches.py -k clipped_by_the_norm",
    ),
    Mutant(
        "a repeated row of a sparse gradient counts once in the norm",
        "training/gradients.py",
        "            parameter.grad = parameter.grad.coalesce()\n",
        "            parameter.grad = parameter.grad._coalesced_(True)\n",
        "unit/training/test_gradients.py -k repeated_rows",
    ),
    Mutant(
        "work that waits comes back with a checkpoint",
        "training/local_update.py",
        'self.pending, self.samples, self.steps = list(counts["pending"]), counts["samples"], counts["steps"]',
        "pass",
        "unit/training/checkpoints/test_saving.py -k had_not_stopped",
    ),
    Mutant(
        "what is not finite is neither saved nor restored",
        "training/checkpoints/saving.py",
        "if all(bool(tensor.isfinite().all()) for tensor in tensors.values()):",
        "if True:",
        "unit/training/checkpoints/test_saving.py -k not_finite",
    ),
    Mutant(
        "a restored state has the digest of its checkpoint",
        "training/checkpoints/saving.py",
        "if state.tree().root != checkpoint.head.digest:",
        "if False:",
        "unit/training/checkpoints/test_saving.py -k another_digest",
    ),
    Mutant(
        "a result is mixed into the live values",
        "training/local_update.py",
        "return live.sub_(shared).mul_(self._mixing).add_(shared)",
        "return shared",
        "unit/training/test_overlap.py -k mixed_in",
    ),
    Mutant(
        "a source below the least rate is given up",
        "network/rpc/pace.py",
        "if received - mark >= rate.bytes_per_second * rate.window_seconds:",
        "if received > mark:",
        "unit/training/sync/test_download.py -k least_rate",
    ),
    Mutant(
        "a chunk's proof leads to the digest",
        "training/sync/partial_download.py",
        "if not proves(self._description, leaf, index, self.cut.num_chunks, proof, stamp.digest):",
        "if False:",
        "unit/training/sync/test_download.py -k 'lying_source or only_liars'",
    ),
    Mutant(
        "members read different samples",
        "training/data/windows.py",
        "return self.at(cursor + rank + count * number)",
        "return self.at(cursor + rank + number)",
        "unit/training/data/test_windows.py -k read_nothing_twice",
    ),
    Mutant(
        "a trainer of a pipeline reserves positions before it reads",
        "training/data/windows.py",
        "        if self._next > self._reserved:\n",
        "        if False:\n",
        "unit/training/data/test_reading_position.py -k killed",
    ),
    Mutant(
        "a trainer of a pipeline that stops keeps its position",
        "pipeline/client/trainer.py",
        "        finally:\n            self._position.save()\n",
        "        finally:\n            pass\n",
        "sim/test_product_pipeline.py -k reads_on",
    ),
    Mutant(
        "a microbatch that runs is not settled",
        "pipeline/stage/ledger.py",
        "if entry is None or entry.state is State.RUNNING:\n            return False",
        "if entry is None:\n            return False",
        "unit/pipeline/stage/test_ledger.py -k Accounts",
    ),
    Mutant(
        "a round that closes takes out what nobody settled",
        "pipeline/stage/ledger.py",
        "unsettled = [id for id, entry in self._entries.items() if entry.state is not State.SETTLED]",
        "unsettled = [id for id, entry in self._entries.items() if entry.state is State.RUNNING]",
        "unit/pipeline/stage/test_host.py -k closes_takes_out",
    ),
    Mutant(
        "a microbatch counts in its own round only",
        "pipeline/stage/ledger.py",
        "if id.round != self.round or self.is_closed:",
        "if self.is_closed:",
        "unit/pipeline/stage/test_ledger.py -k Accounts",
    ),
    Mutant(
        "one trainer cannot fill a host",
        "pipeline/stage/ledger.py",
        "        if too_many or too_much:\n",
        "        if too_much:\n",
        "unit/pipeline/stage/test_ledger.py -k Accounts",
    ),
    Mutant(
        "a failed host is out until it publishes again",
        "pipeline/routing/router.py",
        "            if state.sequence <= failed_at:\n                continue\n",
        "",
        "unit/pipeline/routing/test_router.py -k publishes_again",
    ),
    Mutant(
        "what is under way does not gather at a slow host",
        "pipeline/routing/router.py",
        "if self._hosts[host].under_way <= share * rates[host]",
        "if share > 0",
        "unit/pipeline/routing/test_router.py -k gather",
    ),
    Mutant(
        "a new host does not make up for the time before",
        "pipeline/routing/router.py",
        "min((each.virtual_time for each in self._hosts.values()), default=0.0)",
        "0.0",
        "unit/pipeline/routing/test_router.py -k newcomer",
    ),
    Mutant(
        "a route that lacks a host counts nothing",
        "pipeline/routing/router.py",
        "        for stage in self.stages:\n            if not stage.hosts:\n                stage.draw(work)\n",
        "",
        "unit/pipeline/routing/test_router.py -k without_a_host",
    ),
    Mutant(
        "a small difference moves no host",
        "pipeline/placement.py",
        "<= slower * (1 + margin / math.sqrt(max(counts[target], 1))):",
        "<= slower:",
        "unit/pipeline/test_placement.py -k small_differences",
    ),
    Mutant(
        "text in a record is printable",
        "network/schema.py",
        "        if not values.isprintable():\n",
        "        if False:\n",
        "unit/network/records/test_record.py -k 'out_of_bounds and not stage'",
    ),
    Mutant(
        "a record names a stage once",
        "network/records/record.py",
        "        if len({stage.unit for stage in self.stages}) < len(self.stages):\n",
        "        if False:\n",
        "unit/network/records/test_record.py -k named_twice",
    ),
    Mutant(
        "a record is stored under its own peer's id",
        "node/presence.py",
        "if opened.peer != peer:",
        "if False:",
        "unit/node/test_presence.py -k another_peers_id",
    ),
    Mutant(
        "one peer's streams are bounded",
        "network/rpc/server.py",
        "if self._inbound[peer] >= self._limits.inbound_streams_per_peer:",
        "if False:",
        "unit/network/rpc/test_server.py -k flood",
    ),
    Mutant(
        "a header has a deadline",
        "network/rpc/server.py",
        "async with asyncio.timeout(self._limits.header_seconds):",
        "async with asyncio.timeout(None):",
        "unit/network/rpc/test_server.py -k slow_header",
    ),
    Mutant(
        "a request is no longer than its handler takes",
        "network/rpc/server.py",
        "        if length > max_bytes:\n",
        "        if False:\n",
        "unit/network/rpc/test_server.py -k garbage",
    ),
    Mutant(
        "a peer of another swarm is refused",
        "network/rpc/server.py",
        "        if header.swarm != self._swarm:\n",
        "        if False:\n",
        "unit/network/rpc/test_server.py -k strangers",
    ),
    Mutant(
        "what waits in an inbox is bounded",
        "network/rpc/inbox.py",
        "if self._items and self.num_bytes + num_bytes > self._max_bytes:",
        "if False:",
        "unit/network/rpc/test_receive.py -k bound",
    ),
    Mutant(
        "a peer that was stopped itself blames no other",
        "network/rpc/heartbeat.py",
        "        if now > self._due + min(LATE_SECONDS, LATE_SHARE * self.silence_seconds):\n",
        "        if False:\n",
        "unit/network/rpc/test_receive.py -k stood_still",
    ),
    Mutant(
        "a record's header is authenticated",
        "network/libp2p/direct_records.py",
        "record[HEADER.size :], record[: HEADER.size], into)",
        "record[HEADER.size :], HEADER.pack(len(into), 3), into)",
        "unit/network/libp2p/test_direct_records.py -k no_bit",
    ),
    Mutant(
        "a record is opened once",
        "network/libp2p/direct_records.py",
        'return self._num_records.to_bytes(NONCE_BYTES, "big")',
        "return bytes(NONCE_BYTES)",
        "unit/network/libp2p/test_direct_records.py -k 'comes and again'",
    ),
    Mutant(
        "each direction of a direct connection has a key of its own",
        "network/libp2p/direct_records.py",
        "Cipher(derived[KEY_BYTES : 2 * KEY_BYTES])",
        "Cipher(derived[:KEY_BYTES])",
        "unit/network/libp2p/test_direct_records.py -k sent_back",
    ),
    Mutant(
        "a direct connection that is cut has not ended",
        "network/libp2p/direct_records.py",
        "_cut = ConnectionResetError",
        "_cut = EOFError",
        "unit/network/libp2p/test_direct_records.py -k cut_is_no_end",
    ),
    Mutant(
        "an offer is good once",
        "network/libp2p/direct_listener.py",
        "return self._offers.pop(name)",
        "return self._offers[name]",
        "unit/network/libp2p/test_direct_listener.py -k good_once",
    ),
    Mutant(
        "a dialler has to show its key",
        "network/libp2p/direct_listener.py",
        "elif not offer.opening.opens(Kind.READY, record):",
        "elif False:",
        "unit/network/libp2p/test_direct_listener.py -k show_the_key",
    ),
    Mutant(
        "a key that others can read is refused",
        "network/identity.py",
        "    if mode & 0o077:\n",
        "    if False:\n",
        "unit/network/test_identity.py -k readable_by_others",
    ),
    Mutant(
        "a wrong peer id is remembered behind the daemon's back-off",
        "network/libp2p/wrong_peers.py",
        "elif _BACKOFF not in reason:",
        "else:",
        "unit/network/libp2p/test_wrong_peers.py -k behind_the_daemons_backoff",
    ),
    Mutant(
        "a manifest is signed by its organizer",
        "manifest/__init__.py",
        'if not verifier.verify(organizer, b"p2ptrain manifest" + actual, proof):',
        "if False:",
        "unit/test_manifest.py -k did_not_sign",
    ),
    Mutant(
        "a manifest has the digest of the link",
        "manifest/__init__.py",
        "if digest is not None and actual != digest:",
        "if False:",
        "unit/test_manifest.py -k another_manifest",
    ),
    Mutant(
        "a full disk has its exit code",
        "errors.py",
        "    exit_code = 7\n",
        "    exit_code = 1\n",
        "unit/test_errors.py -k exit_code",
    ),
    Mutant(
        "a drain saves for a training thread that is stuck",
        "node/draining.py",
        "if not (trainer.is_saving or trainer.is_saved or has_failed_to_save):",
        "if False:",
        "unit/node/test_draining.py -k stuck",
    ),
    Mutant(
        "a drain gives up a round that does not end",
        "node/draining.py",
        '    bridge.cancel("the peer leaves")\n',
        "",
        "unit/node/test_draining.py -k given_up_after_a_third",
    ),
    Mutant(
        "a peer whose network daemon ended asks to be started again",
        "node/run.py",
        'if signals.reason.startswith("the network daemon ended"):',
        "if False:",
        "sim/test_product_trainer.py -k daemon_ends",
    ),
    Mutant(
        "a trainer saves when it stops",
        "training/loop.py",
        '        with self._jobs("saving a checkpoint", ""):\n            self._save()\n',
        "",
        "sim/test_product_trainer.py -k 'hands_in and 4'",
    ),
    Mutant(
        "a swarm with a warning is not healthy",
        "status/headline.py",
        'return "degraded" if "warning" in severities else "healthy"',
        'return "healthy"',
        "unit/status/test_headline.py -k health",
    ),
    Mutant(
        "one peer does not make up the loss",
        "status/headline.py",
        "loss=statistics.median(losses) if losses else None",
        "loss=max(losses) if losses else None",
        "unit/status/test_headline.py -k one_liar",
    ),
    Mutant(
        "a second signal ends the process",
        "node/signals.py",
        'if self.requested.is_set() and self.reason == "signal":',
        "if False:",
        "unit/node/test_signals.py",
    ),
    Mutant(
        "a task that fails is told of",
        "tasks.py",
        '        logger.error("%s failed", task.get_name(), exc_info=error)\n',
        "        pass\n",
        "unit/test_tasks.py -k logged_with_its_trace",
    ),
    Mutant(
        "values that are not finite are not encoded",
        "codecs/dense.py",
        "            if not bool(np.isfinite(values[piece]).all()):\n                raise",
        "            if False:\n                raise",
        "unit/codecs/test_codecs.py -k 'not_finite_are_not_encoded and fp32'",
    ),
    Mutant(
        "no half byte of an encoding hides anything",
        "codecs/blockwise.py",
        '            raise CodecError(f"{self.name}: the unused half of a block\'s last byte is not zero")\n',
        "            pass\n",
        "unit/codecs/test_blockwise.py -k unused_half",
    ),
    Mutant(
        "a damaged library is not loaded",
        "native/load.py",
        "if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:",
        "if False:",
        "unit/native/test_load.py -k 'damaged_library_is_replaced and changed'",
    ),
    Mutant(
        "native codecs that compute something else are not used",
        "codecs/native.py",
        "if agree(codec, functions):",
        "if True:",
        "unit/codecs/test_native.py -k are_not_used",
    ),
    Mutant(
        "a host that leaves takes on nothing new",
        "pipeline/stage/host.py",
        "        self._is_leaving = True\n",
        "        self._is_leaving = False\n",
        "sim/test_pipeline_schedules.py -k loses_none",
    ),
    Mutant(
        "nobody waits for the batch of a peer that never reports",
        "averaging/timing/global_batch.py",
        "            began = self._began\n",
        "            began = now - min(one.batch_seconds for one in others)\n",
        "unit/averaging/timing/test_global_batch.py -k dead",
    ),
    Mutant(
        "a stage ends the last round with the others",
        "pipeline/stage/hosted_stage.py",
        "            if self._view.is_over(self.host.ledger.round, self.number):\n",
        "            if False:\n",
        "sim/test_product_pipeline.py -k lost_samples",
    ),
)


def occurrences(mutant: Mutant) -> int:
    """How often the text that a mutant replaces stands in its file."""
    return (ROOT / "p2ptrain" / mutant.file).read_text().count(mutant.before)


def run(mutants: tuple[Mutant, ...], jobs: int = 1) -> list[str]:
    """Run mutants in copies of the tree; what is wrong, one line each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(_copy_tree(Path(folder) / str(number)))
        began = time.monotonic()
        healthy, said = _with(copies, lambda copy: _pytest(copy, *_all_tests(mutants), seconds=ALL_SECONDS))
        wrong = [f"the tests do not pass without any change: pytest {healthy}\n{said}"] if healthy != PASSES else []
        print(f"all tests without any change: {time.monotonic() - began:.0f} s", flush=True)

        def judge(numbered: tuple[int, Mutant]) -> str:
            number, mutant = numbered
            began = time.monotonic()
            outcome = _with(copies, lambda copy: _broken_outcome(copy, mutant))
            verdict = "caught" if outcome == FAILS else "NOT CAUGHT"
            seconds = time.monotonic() - began
            print(f"{number:3} of {len(mutants)}  {seconds:5.1f} s  {verdict}  {mutant.name}", flush=True)
            return "" if outcome == FAILS else f"not caught by {mutant.test}, which {outcome}: {mutant.name}"

        return [*wrong, *filter(None, threads.map(judge, enumerate(mutants, 1)))]


def _copy_tree(copy: Path) -> Path:
    made = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    return Path(shutil.copytree(ROOT, copy, ignore=made))


def _with(copies: SimpleQueue[Path], work: Callable[[Path], T]) -> T:
    """Do ``work`` in a copy that no other thread uses."""
    copy = copies.get()
    try:
        return work(copy)
    finally:
        copies.put(copy)


def _broken_outcome(copy: Path, mutant: Mutant) -> str:
    path = copy / "p2ptrain" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        return "does not fit the product any more"
    path.write_text(text.replace(mutant.before, mutant.after, 1))
    try:
        return _outcome(copy, mutant.test)
    finally:
        path.write_text(text)


def _outcome(copy: Path, test: str) -> str:
    file, words = _parts(test)
    return _pytest(copy, "-x", f"tests/{file}", *(("-k", words) if words else ()), seconds=TEST_SECONDS)[0]


def _all_tests(mutants: tuple[Mutant, ...]) -> list[str]:
    """Arguments that select at least the tests of all mutants, so that one process runs them."""
    tests = sorted({_parts(mutant.test) for mutant in mutants})
    words = sorted({words or Path(file).stem for file, words in tests})
    return [*sorted({f"tests/{file}" for file, _ in tests}), "-k", " or ".join(f"({each})" for each in words)]


def _parts(test: str) -> tuple[str, str]:
    file, _, words = test.partition(" -k ")
    return file, words.strip("'")


def _pytest(copy: Path, *arguments: str, seconds: float) -> tuple[str, str]:
    """How pytest ends in the copy (it passes, or fails, or is of no use to the list), and the end of what it says."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "CI": "true",
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # With all that the tests started.
            return f"takes more than {seconds:g} s", ""
    if process.returncode not in (0, 1):
        return f"does not run: {said[-1000:]}", ""
    return FAILS if process.returncode else PASSES, said[-3000:]


def main() -> int:
    """Run what the command line asks for; 1 if a mutant lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="tests at a time")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    options = parser.parse_args()
    chosen = tuple(mutant for mutant in MUTANTS if options.only in mutant.name)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}\n    {mutant.file}; tests/{mutant.test}")
        return 0
    wrong = run(chosen, options.jobs)
    print(f"{len(chosen) - sum(line.startswith('not') for line in wrong)} of {len(chosen)} mutants caught")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
