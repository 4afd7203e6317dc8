"""A user-space relay of Ethernet frames: rate, delay and loss where the kernel has no ``netem``.

``python -m tests.lab.relay CABLES`` joins pairs of devices of its network namespace; ``CABLES`` is a JSON list of
`Cable`. With ``--plain DEVICE`` it turns off what a device leaves to hardware, such as checksums, so that a frame that
is read in user space is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import random
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

ETH_P_ALL = 3
PACKET_OUTGOING = 4
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)
"""ETHTOOL_STXCSUM, SSG, STSO, SGSO and SGRO, of linux/ethtool.h."""
FRAME_BYTES = 65536
QUEUE_SECONDS = 0.2
"""Frames that would wait longer than this for their turn are dropped, as at a router."""


class Cable(NamedTuple):
    """Two devices, and what a frame between them meets, in either direction."""

    near: str
    far: str
    megabits: float
    delay_seconds: float
    loss: float


@dataclass
class _End:
    source: socket.socket
    target: socket.socket
    cable: Cable
    free_at: float = 0.0


def make_plain(device: str) -> None:
    """Let the kernel compute checksums and segments itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # A device may not have it, which is as good.
                fcntl.ioctl(control, SIOCETHTOOL, request)


def relay(cables: list[Cable]) -> None:
    """Pass frames on until the process is killed."""
    selector, generator = selectors.DefaultSelector(), random.Random(1)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    for cable in cables:
        near, far = _open(cable.near), _open(cable.far)
        selector.register(near, selectors.EVENT_READ, _End(near, far, cable))
        selector.register(far, selectors.EVENT_READ, _End(far, near, cable))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    number = 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for key, _ in selector.select(pause):
            end: _End = key.data
            for frame in _arrived(end.source):
                now, cable = time.monotonic(), end.cable
                if end.free_at > now + QUEUE_SECONDS or generator.random() < cable.loss:
                    continue
                end.free_at = max(end.free_at, now) + len(frame) * 8e-6 / cable.megabits
                number += 1
                heapq.heappush(waiting, (end.free_at + cable.delay_seconds, number, end.target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # The cable is unplugged, or the frame too long: it is lost.
                target.send(frame)


def _open(device: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.bind((device, 0))
    found.setblocking(False)
    return found


def _arrived(source: socket.socket) -> list[bytes]:
    """Return the frames that came in; those that this process sent are not among them."""
    frames = []
    for _ in range(64):
        try:
            frame, (_, _, kind, *_) = source.recvfrom(FRAME_BYTES)
        except OSError:
            break
        if kind != PACKET_OUTGOING:
            frames.append(frame)
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.relay", description=__doc__)
    parser.add_argument("cables", nargs="?", default="[]")
    parser.add_argument("--plain", metavar="DEVICE")
    options = parser.parse_args()
    if options.plain:
        make_plain(options.plain)
    else:
        relay([Cable(*each) for each in json.loads(options.cables)])


if __name__ == "__main__":
    main()
