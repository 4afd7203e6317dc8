import argparse
import errno
import resource
import subprocess
import sys

import pytest

from p2ptrain._version import __version__
from p2ptrain.cli import main as cli
from p2ptrain.cli.commands import monitor
from p2ptrain.errors import ConfigError, IntegrityError, P2PTrainError, ResourceError
from tests.support.processes.commands import ROOT, assert_one_line_error, p2ptrain

NO_NAMES = ("http://page.example", "page.example:80", "")
NO_HOOKS = ("example.org/hook", "file:///etc/passwd", "http://", "http://::1]/", "http://example.org:port/")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["up", "--help"]], ids=" ".join)
def test_help_and_version_take_less_than_a_third_of_a_second(arguments: list[str]) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert p2ptrain(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # Processor time, and the best of a few: what else the machine does must not decide.
    assert min(seconds() for _ in range(5)) < 0.3


def test_the_version_is_the_packages() -> None:
    assert p2ptrain("--version").stdout == f"p2ptrain {__version__}\n"


def test_by_default_only_this_machine_can_see_the_monitor_s_page() -> None:
    parser = argparse.ArgumentParser()
    monitor.add_arguments(parser)
    assert parser.parse_args(["p2ptrain://nonsense"]).host == "127.0.0.1"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_documents_itself_its_log_options_and_the_exit_codes(name: str) -> None:
    text = p2ptrain(name, "--help").stdout
    assert "--log-format {text,json}" in text
    assert cli.EXIT_CODES in text
    assert f"usage: p2ptrain {name}" in text
    assert len(text.partition("\n\n")[2]) > 200


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["joyn"], 2, "did you mean 'join'"),
        (["xyzzy"], 2, "p2ptrain --help"),
        (["status"], 2, "p2ptrain status --help"),
        (["status", "http://x"], 3, "p2ptrain://"),
        (["status", "p2ptrain://abc"], 3, "link"),
        (["join", "p2ptrain://", "--yes"], 3, "link"),
        (["peer", "none.toml"], 3, "no such file"),
        (["peer", "peers/trainer.toml"], 3, "link"),
        (["peer", "peers/bootstrap.toml"], 3, "p2ptrain seed"),
        (["peer", "peers/trainer.toml", "--threads", "-3"], 3, "command line: resources.threads"),
        (["peer", "peers/trainer.toml", "--listen", "localhost:80"], 3, "not a multiaddr"),
        (["seed", "none"], 3, "p2ptrain init"),
        (["up", "--peers", "0"], 2, "--peers"),
        (["up", "--minutes", "-1"], 2, "--minutes"),
        (["up", "--set", "training.every"], 2, "KEY=VALUE"),
        (["up", "--summary", "/dev/null/summary.json"], 3, "choose another path"),
        (["up", "--run-dir", "README.md"], 3, "README.md: File exists"),
        (["up", "--summary", "tests"], 2, "--summary tests"),
        (["up", "--data", "/no/such/path"], 2, "--data"),
        (["up", "--manifest", "none.toml"], 3, "no such file"),
        (["up", "--set", "training.evry=3"], 3, "did you mean 'every'"),
        (["checkpoint", "ls", "none"], 3, "is not there"),
        (["checkpoint", "ls", "tests"], 8, "no checkpoint"),
        (["checkpoint", "export", "none"], 2, "OUTPUT"),
        (["checkpoint", "mend", "none"], 2, "mend"),
        (["monitor", "p2ptrain://nonsense"], 3, "link"),
        *((["monitor", "p2ptrain://nonsense", f"--port={port}"], 2, "from 0 to 65535") for port in (65536, -1)),
        *((["monitor", "p2ptrain://nonsense", f"--stall-minutes={time}"], 2, "above 0") for time in (0, "nan")),
        *(
            (["monitor", "p2ptrain://nonsense", f"--host-name={name}"], 2, "without http:// and port")
            for name in NO_NAMES
        ),
        *((["monitor", "p2ptrain://nonsense", f"--webhook={url}"], 2, f"--webhook {url}") for url in NO_HOOKS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_line_and_its_exit_code(arguments: list[str], code: int, words: str) -> None:
    assert_one_line_error(p2ptrain(*arguments), code, words)


def test_an_interrupted_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert cli.main(["up"]) == 130


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["up"])


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, ResourceError) for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE)),
        *((number, ConfigError) for number in (errno.EACCES, errno.EROFS)),
        (errno.EIO, None),
    ],
)
def test_the_systems_errors_get_a_remedy(number: int, kind: type[P2PTrainError] | None) -> None:
    explained = cli.explain_error(OSError(number, "why", "where"))
    assert (type(explained) if explained is not None else None) is kind
    if explained is not None:
        assert "where" in str(explained)


def test_who_names_a_file_for_a_folder_is_not_told_to_choose_one_that_exists() -> None:
    explained = cli.explain_error(FileExistsError(errno.EEXIST, "File exists", "model"))
    assert str(explained) == "model: File exists: choose another path"


def test_an_exception_group_is_explained_only_if_every_part_is() -> None:
    deliberate = IntegrityError("bad bytes")
    assert cli.explain_error(ExceptionGroup("g", [ExceptionGroup("h", [deliberate])])) is deliberate
    assert cli.explain_error(ExceptionGroup("g", [deliberate, ZeroDivisionError()])) is None


def test_output_into_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m p2ptrain --help | true", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_two_arguments_of_a_command_share_a_value(name: str) -> None:
    parser = argparse.ArgumentParser()
    cli.module_of(name).add_arguments(parser)
    values = [action.dest for action in parser._actions]
    assert len(set(values)) == len(values)
