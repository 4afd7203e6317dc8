"""Every error that p2ptrain raises on purpose.

::

    P2PTrainError                 exit code 1
    ├── UsageError                2    the arguments of a command are wrong
    ├── ConfigError               3    a file or value cannot be used
    │   ├── LinkError                  a swarm link cannot be parsed
    │   ├── ManifestError              a manifest is malformed, unsigned or of another swarm
    │   └── NotAdmittedError           the swarm does not admit this peer
    ├── BootstrapError            4    no bootstrap peer can be reached
    ├── IdentityError             5    a key file is unusable or in use
    ├── IncompatibleError         6    protocol, model, codec or stage differ from the swarm's
    ├── ResourceError             7    memory, disk, port, file limit or daemon missing
    ├── IntegrityError            8    bytes do not match their hash or signature
    │   └── CheckpointError            a checkpoint is torn, tampered with or missing
    ├── DivergedError             9    this peer's updates stay non-finite or refused
    └── TemporaryError            75   a later retry may succeed
        ├── DeadlineError              a deadline passed
        └── PeerError                  another peer failed
            ├── PeerUnreachableError   it cannot be dialled
            │   ├── NotListeningError  no TCP connection to any of its addresses
            │   └── WrongPeerError     another peer answers at its addresses
            ├── PeerLostError          its stream ended
            │   └── PeerSilentError    its stream is open but silent
            ├── PeerRefusedError       it refused, with a reason
            │   └── PeerBusyError          it serves as many streams as it may
            └── ProtocolError          it violated the protocol

A message names the fault and the remedy in one line. The command line exits with ``exit_code``.
"""

from __future__ import annotations


class P2PTrainError(Exception):
    """Base of all deliberate errors; catch it to catch them all."""

    exit_code = 1


class UsageError(P2PTrainError):
    """A command was called with arguments that cannot work together."""

    exit_code = 2


class ConfigError(P2PTrainError):
    """A configuration file or value cannot be used."""

    exit_code = 3


class LinkError(ConfigError):
    """A swarm link cannot be parsed."""


class ManifestError(ConfigError):
    """A manifest is malformed, unsigned, or of another swarm."""


class NotAdmittedError(ConfigError):
    """The swarm does not admit this peer, or does so no longer."""


class BootstrapError(P2PTrainError):
    """None of the swarm's bootstrap addresses answers."""

    exit_code = 4


class IdentityError(P2PTrainError):
    """A key file is unusable, readable by others, or in use by another process."""

    exit_code = 5


class IncompatibleError(P2PTrainError):
    """This peer and the swarm differ in protocol, model, codec or stage."""

    exit_code = 6


class ResourceError(P2PTrainError):
    """The machine lacks something: memory, disk, a port, file descriptors, the daemon."""

    exit_code = 7


class IntegrityError(P2PTrainError):
    """Bytes do not match their hash or signature."""

    exit_code = 8


class CheckpointError(IntegrityError):
    """A checkpoint is torn, tampered with, or missing."""


class DivergedError(P2PTrainError):
    """This peer's updates are repeatedly not finite, or refused by other peers."""

    exit_code = 9


class TemporaryError(P2PTrainError):
    """A failure that a later retry may not meet."""

    exit_code = 75


class DeadlineError(TemporaryError):
    """A deadline passed."""


class PeerError(TemporaryError):
    """Another peer failed.

    Args:
        peer: The peer's id, or ``"?"`` while it is unknown.
        message: The fault and the remedy, without the peer's id.
    """

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer[-8:]}: {message}")
        self.peer = peer
        self.reason = message


class PeerUnreachableError(PeerError):
    """The peer cannot be dialled."""


class NotListeningError(PeerUnreachableError):
    """None of the peer's addresses takes a TCP connection: the peer is down, or a firewall is in between."""


class WrongPeerError(PeerUnreachableError):
    """Another peer answers at the peer's addresses; ``holder`` is its id."""

    def __init__(self, peer: str, holder: str) -> None:
        super().__init__(peer, f"its address is held by peer {holder}")
        self.holder = holder


class PeerLostError(PeerError):
    """The peer's stream ended before its end mark, or hit the silence timeout."""


class PeerSilentError(PeerLostError):
    """The peer's stream is open but hit the silence timeout: the peer froze or is cut off."""


class PeerRefusedError(PeerError):
    """The peer refused; ``reason`` is the peer's text, truncated."""


class PeerBusyError(PeerRefusedError):
    """The peer serves as many streams as it may: a later retry may succeed."""


class ProtocolError(PeerError):
    """The peer sent malformed, excessive or misplaced data, which no honest peer sends."""
