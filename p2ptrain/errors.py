"""Every error that p2ptrain raises on purpose.

::

    P2PTrainError                 exit code 1
    ├── UsageError                2    a command was called wrongly
    ├── ConfigError               3    a file or value cannot be used
    │   ├── LinkError                  a swarm link cannot be parsed
    │   └── ManifestError              a manifest is malformed, unsigned or not the one asked for
    ├── BootstrapError            4    no bootstrap peer can be reached
    ├── IdentityError             5    a key file is unusable or in use
    ├── IncompatibleError         6    protocol, model, codec or stage differ from the swarm's
    ├── ResourceError             7    memory, disk, port, file limit or daemon missing
    ├── IntegrityError            8    bytes do not match their hash or signature
    │   └── CheckpointError            a checkpoint is torn, tampered with or missing
    ├── DivergedError             9    this peer's training gives values that cannot count
    └── TemporaryError            75   trying again later may work
        ├── DeadlineError              something did not happen in time
        ├── PeerError                  another peer failed
        │   ├── PeerUnreachableError   it cannot be dialled
        │   │   └── WrongPeerError     another peer answers at its addresses
        │   ├── PeerLostError          its stream ended
        │   │   └── PeerSilentError    the stream stands, and nothing comes
        │   ├── PeerRefusedError       it answered no, with a reason
        │   └── ProtocolError          it sent something that no honest peer sends
        └── PausedError                the swarm is below its minimum of peers

A message says what happened and what to do next, in one line. ``exit_code`` is what the command line returns.
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
    """A manifest is malformed, unsigned, or not the one that was asked for."""


class BootstrapError(P2PTrainError):
    """None of the swarm's known addresses answers."""

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
    """Bytes do not match the hash or the signature that vouches for them."""

    exit_code = 8


class CheckpointError(IntegrityError):
    """A checkpoint is torn, tampered with, or not there."""


class DivergedError(P2PTrainError):
    """What this peer's training gives cannot count, again and again: it is not finite, or the others refuse it."""

    exit_code = 9


class TemporaryError(P2PTrainError):
    """Trying again later may work."""

    exit_code = 75


class DeadlineError(TemporaryError):
    """Something did not happen within its deadline."""


class PeerError(TemporaryError):
    """Another peer failed; ``peer`` says which.

    Args:
        peer: The peer's id, or ``"?"`` where it is not known yet.
        message: What happened, and what to do next.
    """

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer[-8:]}: {message}")
        self.peer = peer
        self.reason = message


class PeerUnreachableError(PeerError):
    """The peer cannot be dialled."""


class WrongPeerError(PeerUnreachableError):
    """Another peer answers at the peer's addresses; ``holder`` is its id."""

    def __init__(self, peer: str, holder: str) -> None:
        super().__init__(peer, f"its address is held by peer {holder}")
        self.holder = holder


class PeerLostError(PeerError):
    """The peer's stream ended before its end mark, or it went silent."""


class PeerSilentError(PeerLostError):
    """The peer's stream stands, and nothing came for longer than a live peer stays silent: it froze, or is cut off."""


class PeerRefusedError(PeerError):
    """The peer answered no; ``reason`` is its own words, cut to a bounded length."""


class ProtocolError(PeerError):
    """The peer sent what no honest peer sends: garbage, too much, or out of order."""


class PausedError(TemporaryError):
    """The swarm has fewer peers than its manifest asks for, and the manifest says to wait."""
