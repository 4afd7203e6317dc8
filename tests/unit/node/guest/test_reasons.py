"""Reasons to pause that the machine tells, and how long they have to last."""

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from p2ptrain.config import GuestSection, PeerConfig, parse_schedule
from p2ptrain.errors import ConfigError
from p2ptrain.node.guest.reasons import OtherLoad, Reason, Watch, has_battery, on_battery, out_of_hours, reasons_of
from p2ptrain.node.guest.wishes import Wishes


def works_at(schedule: str, hour: int, minute: int = 0) -> bool:
    return not out_of_hours(schedule, datetime(2026, 3, 29, hour, minute))


def test_a_schedule_goes_across_midnight_and_has_several_windows() -> None:
    schedule = "22:00-07:00, 12:00-13:30"
    assert [hour for hour in range(24) if works_at(schedule, hour)] == [0, 1, 2, 3, 4, 5, 6, 12, 13, 22, 23]
    assert works_at(schedule, 13, 29)
    assert not works_at(schedule, 13, 30)
    assert works_at("00:00-24:00", 23, 59)


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(("month", "day", "utc_hour"), [(3, 28, 6), (3, 29, 5), (10, 24, 5), (10, 25, 6)])
def test_a_window_ends_by_the_clock_on_the_wall_on_both_sides_of_daylight_saving(
    month: int, day: int, utc_hour: int
) -> None:
    """At 07:00 in Berlin, which is an hour earlier or later in UTC than the day before."""
    at = datetime.fromisoformat(f"2026-{month:02}-{day:02}T{utc_hour:02}:00:00+00:00").timestamp()
    assert out_of_hours("22:00-07:00", datetime.fromtimestamp(at))
    assert not out_of_hours("22:00-07:00", datetime.fromtimestamp(at - 60))


@pytest.mark.parametrize("text", ["22-7", "25:00-07:00", "22:60-23:00", "07:00-07:00", "22:00-07:00,", "24:00-01:00"])
def test_a_schedule_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as '22:00-07:00'"):
        parse_schedule(text)
    with pytest.raises(ConfigError, match=r"guest\.schedule.*such as '22:00-07:00'"):
        PeerConfig.load(None, {"role": "trainer", "link": "p2ptrain://x", "guest.schedule": text})


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / name / file).write_text(f"{text}\n")


def test_a_laptop_pauses_on_its_battery_and_a_desktop_with_a_wireless_mouse_does_not(tmp_path: Path) -> None:
    laptop, plugged, desktop = tmp_path / "laptop", tmp_path / "plugged", tmp_path / "desktop"
    for folder, online in ((laptop, "0"), (plugged, "1")):
        supply(folder, "AC", type="Mains", online=online)
        supply(folder, "BAT0", type="Battery", status="Discharging")
    supply(desktop, "hidpp_battery_0", type="Battery", status="Discharging", scope="Device")
    assert on_battery(laptop) == "on battery"
    assert [has_battery(folder) for folder in (laptop, plugged, desktop)] == [True, True, False]
    assert [on_battery(folder) for folder in (plugged, desktop, tmp_path / "none")] == ["", "", ""]


class Machine:
    """A clock and CPU times that a test sets."""

    def __init__(self) -> None:
        self.seconds, self.all_work, self.own = 0.0, 0.0, 0.0

    def go_on(self, others: float, own: float, cores: int) -> None:
        """Advance ten seconds, in which these parts of all cores are taken."""
        self.seconds += 10.0
        self.own += 10.0 * own * cores
        self.all_work += 10.0 * (others + own) * cores

    def measure(self) -> tuple[float, float]:
        return self.all_work, self.own


def test_the_load_of_other_programs_counts_and_that_of_this_peer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    machine = Machine()
    load = OtherLoad(25.0, machine.measure, lambda: machine.seconds)
    assert load.look(False) == "", "no time has passed"
    found = []
    for others, own, counts in ((0.1, 0.9, False), (0.3, 0.7, False), (0.2, 0.0, True), (0.1, 0.0, True)):
        machine.go_on(others, own, 4)
        found.append(bool(load.look(counts)))
    assert found == [False, True, True, False]


def test_the_load_of_this_machine_can_be_measured() -> None:
    load = OtherLoad(100.0)
    assert load.look(False) == ""


def test_a_reason_counts_after_some_looks_and_is_withdrawn_after_more() -> None:
    wishes, told, text = Wishes(), list[bool](), ""
    wishes.join(told.append)
    watch = Watch([Reason("load", lambda counts: text, begins_after=2, ends_after=3)], wishes)
    watch.start()
    shown = []
    for text in ("busy", "", "busy", "busy", "", "", "busy", "", "", ""):  # noqa: B007
        watch.take(watch.look())
        shown.append(wishes.reason)
    assert shown == ["", "", "", "busy", "busy", "busy", "busy", "busy", "busy", ""]
    assert told == [True, False]


def test_a_peer_does_not_begin_to_work_on_a_battery() -> None:
    wishes, told = Wishes(), list[bool]()
    Watch([Reason("battery", lambda counts: "on battery")], wishes).start()
    wishes.join(told.append)
    assert told == [True]


def test_a_peer_rests_until_no_reason_is_left() -> None:
    wishes, told = Wishes(), list[bool]()
    wishes.join(told.append)
    wishes.set("owner", "by its owner")
    wishes.set("battery", "on battery")
    assert wishes.reason == "by its owner, on battery"
    wishes.set("owner", "")
    assert told == [True]
    wishes.set("battery", "")
    assert told == [True, False]


def test_a_part_is_finished_unless_it_rests() -> None:
    wishes, ended = Wishes(), list[str]()
    assert not wishes.finish(), "a peer without rounds leaves at once"
    wishes.join(lambda paused: None, lambda: ended.append("trainer"))
    wishes.set("owner", "by its owner")
    assert not wishes.finish()
    wishes.set("owner", "")
    assert wishes.finish()
    assert ended == ["trainer"]


@pytest.mark.parametrize(
    ("values", "sources"),
    [
        ({}, ["battery"]),
        ({"on_battery": True}, []),
        ({"schedule": "22:00-07:00", "only_when_idle": 30}, ["schedule", "load", "battery"]),
    ],
)
def test_only_the_reasons_of_the_configuration_are_looked_at(
    values: dict[str, object], sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Full")
    monkeypatch.setattr("p2ptrain.node.guest.reasons.POWER_SUPPLIES", tmp_path)
    assert [reason.source for reason in reasons_of(GuestSection.model_validate(values))] == sources
