"""Reasons to pause that the machine tells: the time of day, other programs' load, the battery, and the GPU's heat.

`Watch` looks at all of them every `LOOK_SECONDS`. A reason counts after some looks in a row, and is withdrawn after
more of them, so that a peer does not pause and resume all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from p2ptrain.config import GuestSection, parse_schedule
from p2ptrain.node.guest.wishes import Wishes

LOOK_SECONDS = 5.0
LEAST_SECONDS = 1.0
"""Interval from which CPU times, of 10 ms each, tell a load."""
POWER_SUPPLIES = Path("/sys/class/power_supply")
RESUME_SHARE = 0.6
"""Part of the limit below which the load of other programs has to fall before the peer resumes."""


class Reason(NamedTuple):
    """A reason to pause.

    Attributes:
        look: Returns the reason in words, empty for none; it takes True if the reason counts now.
        begins_after, ends_after: Looks in a row with and without it, after which it counts, and is withdrawn.
    """

    source: str
    look: Callable[[bool], str]
    begins_after: int = 2
    ends_after: int = 6


def reasons_of(guest: GuestSection, celsius: Callable[[], float] | None = None) -> list[Reason]:
    """Return the reasons that a configuration asks for; ``celsius`` reads the GPU's temperature, if there is one."""
    found = []
    if guest.schedule:
        found.append(Reason("schedule", lambda _: out_of_hours(guest.schedule, datetime.now()), 1, 1))
    if guest.only_when_idle:
        found.append(Reason("load", OtherLoad(guest.only_when_idle).look))
    if not guest.on_battery and has_battery(POWER_SUPPLIES):
        found.append(Reason("battery", lambda _: on_battery(POWER_SUPPLIES)))
    if guest.gpu_celsius and celsius is not None:
        from p2ptrain.node.guest.gpu import Heat

        found.append(Reason("heat", Heat(guest.gpu_celsius, celsius).look))
    return found


class Watch:
    """Looks at reasons, and sets the owner's wishes by them."""

    def __init__(self, reasons: list[Reason], wishes: Wishes) -> None:
        self._reasons = reasons
        self._wishes = wishes
        self._looks = {reason.source: 0 for reason in reasons}

    def start(self) -> None:
        """Look for the first time: a reason counts at once, so that a peer does not begin to work on a battery."""
        for reason in self._reasons:
            self._wishes.set(reason.source, reason.look(False))

    def look(self) -> list[str]:
        """Return each reason in words, empty for none; safe from any thread."""
        return [reason.look(reason.source in self._wishes.reasons) for reason in self._reasons]

    def take(self, texts: list[str]) -> None:
        """Set or withdraw the reasons that one more look confirms."""
        for reason, text in zip(self._reasons, texts, strict=True):
            counts = reason.source in self._wishes.reasons
            self._looks[reason.source] = self._looks[reason.source] + 1 if bool(text) != counts else 0
            if self._looks[reason.source] >= (reason.ends_after if counts else reason.begins_after):
                self._looks[reason.source] = 0
                self._wishes.set(reason.source, text)

    async def run(self) -> None:
        """Look every `LOOK_SECONDS`."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.take(await asyncio.to_thread(self.look))


def out_of_hours(schedule: str, now: datetime) -> str:
    """Return the reason if ``now``, in local time, is in no window of the schedule; else an empty text.

    Clock times are compared, so daylight saving time shifts no window.
    """
    minute = 60 * now.hour + now.minute
    for first, end in parse_schedule(schedule):
        if first <= minute < end or (end < first and not end <= minute < first):
            return ""
    return f"out of its hours ({schedule})"


def has_battery(supplies: Path) -> bool:
    """True if this machine has a battery of its own."""
    with contextlib.suppress(OSError):
        return any(_is_battery(supply) for supply in supplies.iterdir())
    return False


def _is_battery(supply: Path) -> bool:
    return _read(supply / "type") == "Battery" and _read(supply / "scope") != "Device"


def on_battery(supplies: Path) -> str:
    """Return the reason if this machine runs on its battery; batteries of mice and other devices do not count."""
    is_discharging = False
    with contextlib.suppress(OSError):
        for supply in sorted(supplies.iterdir()):
            if _read(supply / "type") in ("Mains", "USB") and _read(supply / "online") == "1":
                return ""
            is_discharging |= _is_battery(supply) and _read(supply / "status") == "Discharging"
    return "on battery" if is_discharging else ""


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


class OtherLoad:
    """The CPU time of all processes but this one and those below it, between two looks."""

    def __init__(
        self,
        limit: float,
        measure: Callable[[], tuple[float, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limit: Percent of all cores' time.
            measure: Returns seconds of all processes' work and of this peer's; by default those of this machine.
        """
        self._limit = limit
        self._measure = measure or _cpu_seconds
        self._clock = clock
        self._last = (*self._measure(), clock())
        self._cores = psutil.cpu_count() or 1

    def look(self, counts: bool) -> str:
        """Return the reason if other programs take more than the limit; less of it if the reason ``counts`` already."""
        before, self._last = self._last, (*self._measure(), self._clock())
        all_work, own, seconds = (now - then for now, then in zip(self._last, before, strict=True))
        percent = 100 * (all_work - own) / (seconds * self._cores) if seconds > LEAST_SECONDS else 0.0
        limit = self._limit * (RESUME_SHARE if counts else 1.0)
        return f"other programs take more than {self._limit:.0f} % of the CPU" if percent > limit else ""


def _cpu_seconds() -> tuple[float, float]:
    """Return seconds of work since the machine started: of all processes, and of this one and those below it."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Also in `user` and `nice`.
    own = 0.0
    process = psutil.Process()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            used = each.cpu_times()
            own += used.user + used.system + (used.children_user + used.children_system if each == process else 0.0)
    return sum(times) - idle - guest, own
