"""``p2ptrain verify-log RUN_DIR``

Verify the log of what left a site, 'left.jsonl' in its run directory, and show what it holds. Each entry is signed by
the peer's key, and names the hash of the one before it. Note the head that this prints: with --head, a later call also
proves that nothing was cut off since.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the peer's run directory")
    parser.add_argument("--head", metavar="HASH", help="a head that was printed before, which the log must still hold")


def run(arguments: argparse.Namespace) -> int:
    """Verify and print.

    Raises:
        ConfigError: There is no log.
        IntegrityError: The log was changed, or does not hold the head.
    """
    from p2ptrain.errors import ConfigError, IntegrityError
    from p2ptrain.network.identity import Identity
    from p2ptrain.node.site.chain import read_chain
    from p2ptrain.node.site.departures import LOG_FILE
    from p2ptrain.status.formats import human_bytes, human_count, utc

    path = arguments.run_dir / LOG_FILE
    try:
        with Identity.ephemeral() as verifier:
            found = read_chain(path, verifier)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a site's peer writes it in a private swarm") from error
    if arguments.head and arguments.head not in found.hashes:
        raise IntegrityError(f"{path} does not hold the head {arguments.head}: lines were cut off or replaced")
    if not found.entries:
        raise ConfigError(f"{path} is empty")
    sending = [entry for entry in found.entries if entry["what"] == "sending"]
    sent = [entry for entry in found.entries if entry["what"] == "sent"]
    receivers = {peer for entry in sending for peer in entry["receivers"]}
    rounds = {entry["round"] for entry in sending}
    policies = {entry["policy"] or "none" for entry in found.entries if entry["what"] == "joined"}
    first, last = (utc(found.entries[index]["at"]) for index in (0, -1))
    print(f"{path}: {len(found.entries)} entries verified, {human_bytes(size)}, from {first} to {last}")
    print(f"  signed by  {found.entries[0]['peer']}")
    print(f"  policy     {', '.join(sorted(policies))}")
    print(
        f"  left       {human_bytes(sum(entry['bytes'] for entry in sent))} of updates in {len(rounds)} rounds", end=""
    )
    print(f", {human_count(len(sending))} attempts, of which {len(sending) - len(sent)} were cut by a crash")
    print(f"  seen by    {', '.join(sorted(receivers)) or 'nobody'}")
    cuts = sum(entry["what"] == "cut" for entry in found.entries) + bool(found.torn_bytes)
    print(f"  torn lines {cuts}")
    print(f"  head       {found.head}")
    return 0
