"""Break the product on purpose, one behaviour at a time, and see that the named test notices.

``python -m tests.mutants`` runs all of them, ``--only WORD`` some, ``--list`` shows them. Each mutant replaces one
piece of the product's text in a copy of the tree; its test passes without the change and has to fail with it.
`tests/unit/test_mutants.py` checks that every mutant still applies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST_SECONDS = 600.0


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
        "a certificate needs more than half of its roster",
        "averaging/certificate.py",
        "if len(signers) <= len(body.members) // 2:",
        "if len(signers) < len(body.members) // 2:",
        "unit/averaging/test_certificate.py -k more_than_half",
    ),
    Mutant(
        "a signature counts for one body only",
        "averaging/certificate.py",
        "peer for peer, proof in proofs if peer in body.members and verifier.verify(peer, vote(body_hash), proof)",
        "peer for peer, proof in proofs if peer in body.members",
        "unit/averaging/test_certificate.py -k another_body",
    ),
    Mutant(
        "a certificate is of one swarm",
        "averaging/certificate.py",
        "        if body.swarm != swarm:\n",
        "        if False:\n",
        "unit/averaging/test_certificate.py -k of_another_swarm_is_refused",
    ),
    Mutant(
        "a head follows from its certificate",
        "training/following.py",
        "if body.next_head(head.digest, head.certificate) != head:",
        "if False:",
        "sim/test_false_states.py -k certificate",
    ),
    Mutant(
        "a downloaded state has the digest that most announce",
        "training/following.py",
        "if votes and votes[head.digest] < max(votes.values()):",
        "if False:",
        "sim/test_false_states.py -k most_others",
    ),
    Mutant(
        "a downloaded state is finite",
        "training/partial_download.py",
        "if not is_finite(self.specs, index, data):",
        "if False:",
        "sim/test_false_states.py -k finite",
    ),
    Mutant(
        "a replayed round that holds the residual drops it",
        "training/following.py",
        "if contributed:  # What its last",
        "if False:  # What its last",
        "sim/test_catching_up.py -k 'residual_whose_round_is_over and replay'",
    ),
    Mutant(
        "a downloaded state that holds the residual drops it",
        "training/following.py",
        "if part is None or not follows:",
        "if False:",
        "sim/test_catching_up.py -k 'residual_whose_round_is_over and download'",
    ),
    Mutant(
        "late gradients decay",
        "training/local_work.py",
        "if carry is not None and self.accumulated is not None and not contributed:",
        "if False:",
        "unit/training/test_late_work.py",
    ),
    Mutant(
        "late gradients of a stage decay",
        "training/stage_work.py",
        "torch.mul(carry[offset : offset + len(part)], max(self.tokens, 1) / self._scale, out=part)",
        "pass",
        "unit/training/test_late_work.py",
    ),
    Mutant(
        "backward goes before forward",
        "pipeline/device.py",
        "    BACKWARD = 1\n    FORWARD = 2\n",
        "    BACKWARD = 2\n    FORWARD = 1\n",
        "unit/pipeline/test_device.py -k backward",
    ),
    Mutant(
        "a gradient that cannot be encoded leaves the sum",
        "pipeline/passes.py",
        "        except (CodecError, asyncio.CancelledError):\n            self.take_out(added)\n",
        "        except (CodecError, asyncio.CancelledError):\n",
        "unit/pipeline/test_passes.py",
    ),
    Mutant(
        "a full round is no failure of a microbatch",
        "pipeline/feeder.py",
        "            except OtherRoundError as error:\n                if round > full_round:",
        "            except OtherRoundError as error:\n                sends += 1\n"
        "                if sends > MAX_SENDS:\n                    raise\n                if round > full_round:",
        "unit/pipeline/test_feeder.py -k waits",
    ),
    Mutant(
        "a trainer of a pipeline reads on",
        "training/data.py",
        "        self._next = self._reserved = self._load()",
        "        self._next = self._reserved = 0",
        "unit/training/test_reading_position.py",
    ),
    Mutant(
        "strangers fill the directory to a bound",
        "network/libp2p_directory.py",
        "return len(stored.value) >= MAX_SUBKEYS and subkey not in stored.value",
        "return False",
        "unit/network/test_record_guard.py",
    ),
    Mutant(
        "History keeps what fits into its bytes",
        "averaging/history.py",
        "            self._num_bytes() > self._max_bytes\n            or (",
        "            False\n            or (",
        "unit/averaging/test_history.py -k fit",
    ),
    Mutant(
        "a checkpoint's tensors have its digest",
        "training/checkpoint.py",
        "    if not is_right:\n",
        "    if False:\n",
        "unit/training/test_checkpoint.py -k another_digest",
    ),
    Mutant(
        "a checkpoint's description is on the disk before the rename",
        "training/checkpoint.py",
        "        file.flush()\n        os.fsync(file.fileno())\n",
        "        file.flush()\n",
        "unit/training/test_checkpoint.py -k on_the_disk",
    ),
    Mutant(
        "a checkpoint's folder is on the disk before the rename",
        "training/checkpoint.py",
        "                _sync_folder(unfinished)\n",
        "",
        "unit/training/test_checkpoint.py -k on_the_disk",
    ),
    Mutant(
        "records expire",
        "averaging/membership.py",
        "return [self._known[peer].record for peer in sorted(self._known) if self._known[peer].expires_at > now]",
        "return [self._known[peer].record for peer in sorted(self._known)]",
        "unit/averaging/test_membership.py -k expired",
    ),
)


def occurrences(mutant: Mutant) -> int:
    """How often the text that a mutant replaces stands in its file."""
    return (ROOT / "p2ptrain" / mutant.file).read_text().count(mutant.before)


def run(mutants: tuple[Mutant, ...]) -> list[str]:
    """Run mutants one after another in a copy of the tree; what is wrong, one line each."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in ("p2ptrain", "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for test in sorted({mutant.test for mutant in mutants}):
            if _fails(copy, test):
                wrong.append(f"{test} fails without any change")
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            path = copy / "p2ptrain" / mutant.file
            text = path.read_text()
            path.write_text(text.replace(mutant.before, mutant.after, 1))
            is_caught = text.count(mutant.before) == 1 and _fails(copy, mutant.test)
            path.write_text(text)
            verdict = "caught" if is_caught else "NOT CAUGHT"
            seconds = time.monotonic() - began
            print(f"{number:3} of {len(mutants)}  {seconds:5.1f} s  {verdict}  {mutant.name}", flush=True)
            if not is_caught:
                wrong.append(f"not caught by {mutant.test}: {mutant.name}")
    return wrong


def _fails(copy: Path, test: str) -> bool:
    """Whether a test fails in the copy; a run that selects nothing is an error of the list."""
    file, _, words = test.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["-k", words.strip("'")] if words else []
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> int:
    """Run what the command line asks for; 1 if a mutant lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    options = parser.parse_args()
    chosen = tuple(mutant for mutant in MUTANTS if options.only in mutant.name)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}\n    {mutant.file}; tests/{mutant.test}")
        return 0
    wrong = run(chosen)
    print(f"{len(chosen) - sum(line.startswith('not') for line in wrong)} of {len(chosen)} mutants caught")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
