"""The command line: its verbs and options are frozen, and a bad argument is one line and exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ringfort.cli import app
from ringfort.cli.outcome import Commands
from ringfort.errors import PeerLostError
from ringfort.launch.run_options import ElasticOptions, RunOptions

COMMANDS = {
    "bench": {
        "--op",
        "--sizes",
        "--ranks",
        "--dtype",
        "--strategy",
        "--against",
        "--repeat",
        "--encryption",
        "--shared-memory",
        "--connections",
        "--min-time",
        "--json",
        "--plot",
        "--explain",
    },
    "checkpoint": set(),  # its own verbs are in test_checkpoint.py
    "dash": {"--run", "--peer", "--interface", "--port", "--open", "--no-browser", "--record", "--lan"},
    "demo": {"--framework", "--ranks", "--steps", "--seed", "--live", "--no-live", "--json", "--web"},
    "doctor": {"--peer", "--interface", "--json"},
    "key": set(),  # its own verbs are in test_key.py
    "witness": {"--name", "--peer", "--interface"},
    "top": {"--run", "--peer", "--interface", "--record", "--once", "--json"},
    "peers": {"--watch", "--json", "--peer", "--interface", "--seconds"},
    "run": {
        *("-n", "--local", "--nodes", "-m", "--module", "--peer", "--interface", "--timeout"),
        *("--restart-without", "--name", "--patience", "--max-restarts", "--elastic"),
        *("--log-dir", "--tee", "--torch-backend", "--no-status", "--metrics-port"),
    },
    "trace": {"--steps", "-o", "--output", "--run", "--timeout", "--peer", "--interface"},
}
"""Scripts depend on these. Adding is free; removing or renaming one needs a note in the changelog."""


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_the_verbs_and_their_options_are_these() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # pyright: ignore[reportAttributeAccessIssue]
    found = {
        name: {text for option in command.params for text in (*option.opts, *option.secondary_opts) if text[0] == "-"}
        - {"--help", "-h"}
        for name, command in commands.items()
    }
    assert found == COMMANDS


def test_the_version_is_the_packages() -> None:
    assert invoke("--version") == (0, f"ringfort {version('ringfort')}\n", "")


def test_without_a_command_it_prints_the_five_commands_that_a_newcomer_needs_in_order() -> None:
    code, out, err = invoke()
    assert (code, err) == (0, "")
    steps = [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ringfort")]
    first_words = [" ".join(step.split()[1:]) for step in steps]
    assert first_words == ["demo", "key show", "key join", "run --nodes 2 train.py", "doctor"]
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_help_names_all_verbs() -> None:
    _, out, _ = invoke("--help")
    assert all(verb in out for verb in COMMANDS)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help_and_a_sentence_for_each_option(verb: str) -> None:
    code, out, _ = invoke(verb, "--help")
    assert code == 0
    assert all(option in out for option in COMMANDS[verb])
    command = typer.main.get_command(app).commands[verb]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(option.help for option in command.params if option.name != "help")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--op", "all_reduc"], "op='all_reduc': must be all_reduce, broadcast"),
        (["bench", "--sizes", "4,x"], "sizes='x': must be bytes"),
        (["bench", "--ranks", "0"], "ranks='0': must be a whole number of at least 1"),
        (["bench", "--dtype", "float8"], "dtype='float8'"),
        (["bench", "--strategy", "star"], "strategy='star'"),
        (["bench", "--op", "gather", "--strategy", "ring"], "strategy='ring': gather has no strategies"),
        (["bench", "--against", "nccl"], "against='nccl': choose one of: tcp"),
        (["bench", "--repeat", "0"], "repeat=0"),
        (["bench", "--explain", "--op", "gather"], "op='gather': has no strategies; choose one of: all_reduce"),
        (["bench", "--min-time", "-1"], "min_time=-1.0"),
        (["bench", "--plot", "picture.gif"], "plot='picture.gif': must end in .png or .svg"),
        (["bench", "--op", "barrier", "--plot", "picture.png"], "a barrier has no sizes"),
        (["bench", "--json", "/no/such/folder/file.json"], "the folder /no/such/folder does not exist"),
        (["bench", "--json", "/"], "is a folder"),
        (["demo", "--ranks", "0"], "ranks=0"),
        (["demo", "--steps", "0"], "steps=0"),
        (["demo", "--seed", "-1"], "seed=-1"),
        (["demo", "--framework", "jax"], "framework='jax'"),
        (["peers", "--seconds", "0"], "seconds=0.0"),
        (["peers", "--peer", "a b"], "peer='a b'"),
        (["peers", "--interface", "eth99"], "interfaces='eth99'"),
        (["run", "no_such_script.py"], "script='no_such_script.py': file not found"),
        (["run", "/"], "script='/': is a folder"),
        (["run", "-n", "0", __file__], "local=0"),
        (["run", "--nodes", "3:2", __file__], "nodes='3:2'"),
        (["run", "--nodes", "two", __file__], "nodes='two'"),
        (["run", "--timeout", "0", __file__], "timeout=0.0"),
        (["run", "--elastic", "--timeout", "9", __file__], "timeout=9.0: invalid with --elastic"),
        (["run", "--elastic", "--nodes", "3:2", __file__], "nodes='3:2'"),
        (["run", "--elastic", "-n", "3", "--nodes", "1:2", __file__], "each rank is a member"),
        (["run", "--elastic", "--peer", "a b", __file__], "peer='a b'"),
        (["run", "--elastic", "--interface", "eth99", __file__], "interfaces='eth99'"),
        (["run", "--nodes", "2", "--peer", "a b", __file__], "peer='a b'"),
        (["run", "--nodes", "2", "--interface", "eth99", __file__], "interfaces='eth99'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line_that_names_it(arguments: list[str], words: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [["bench", "--ops", "x"], ["demo", "--steps", "many"], ["no-such-verb"], ["run", "-n", "many"]],
    ids=str,
)
def test_a_usage_error_is_exit_code_2_without_a_traceback(arguments: list[str]) -> None:
    code, _, err = invoke(*arguments)
    assert code == 2
    assert arguments[-1] in err or arguments[-2] in err
    assert "Traceback" not in err


def test_a_run_passes_on_which_machines_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunOptions] = []
    monkeypatch.setattr("ringfort.launch.launcher.run_job", lambda options: asked.append(options) or 0)
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    assert invoke("run", "--restart-without", "shed", "--restart-without", "a.b", script, "--restart-without")[0] == 0
    assert (asked[0].restart_without, asked[0].arguments) == (("shed", "a.b"), ("--restart-without",))


def test_an_elastic_run_has_its_own_launcher_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ElasticOptions] = []
    monkeypatch.setattr("ringfort.launch.elastic_launcher.run_elastic", lambda options: asked.append(options) or 3)
    assert invoke("run", "--elastic", "--nodes", "2:8", "-n", "2", __file__, "--elastic")[0] == 3
    assert invoke("run", "--elastic", "--max-restarts", "0", "--name", "mine", __file__)[0] == 3
    assert asked == [
        ElasticOptions(script=__file__, arguments=("--elastic",), nodes="2:8", local=2, max_restarts=3,
                       peers=(), interfaces=(), restart_without=()),
        ElasticOptions(script=__file__, name="mine", max_restarts=0),
    ]  # fmt: skip


def test_a_run_of_nothing_is_exit_code_2() -> None:
    code, _, err = invoke("run", "-n", "2")
    assert code == 2
    assert "Missing argument 'SCRIPT'" in err


def test_a_file_that_may_not_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    code, _, err = invoke("bench", "--json", str(tmp_path / "out.json"))
    assert code == 2
    assert "is not writable" in err


def test_a_missing_plotting_library_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.bench.plot.find_spec", lambda _: None)
    code, _, err = invoke("bench", "--plot", "picture.png")
    assert code == 1
    assert "pip install 'ringfort[plot]'" in err


def test_an_engine_that_is_asked_for_and_missing_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise PeerLostError(1, "no need to measure")

    monkeypatch.setattr("ringfort.bench.engines.base.find_spec", lambda _: None)
    monkeypatch.setattr("ringfort.bench.runner.run_bench", stop)
    _, _, err = invoke("bench", "--against", "gloo")
    assert "gloo is not installed and is left out; to install it: pip install 'ringfort[torch]'" in err


def ended_with(error: BaseException) -> tuple[int, str]:
    """The exit code and the standard error of a command that raises `error`."""
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.callback()
    def root() -> None: ...

    @failing.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(failing, ["fail"], catch_exceptions=False)
    return result.exit_code, result.stderr


def test_what_ringfort_raises_becomes_a_line_and_exit_code_1() -> None:
    assert ended_with(PeerLostError(2, "its process died")) == (
        1,
        "error: Lost rank 2: its process died. Its own log says why.\n",
    )


def test_ctrl_c_is_exit_code_130() -> None:
    assert ended_with(KeyboardInterrupt()) == (130, "interrupted\n")


def test_a_fault_in_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        ended_with(ZeroDivisionError())


def test_the_command_line_loads_neither_torch_nor_matplotlib_nor_the_verbs_own_needs() -> None:
    heavy = "{'torch', 'matplotlib', 'psutil', 'pydoc_data'}"
    code = f"import sys, ringfort.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_run_without_the_package_for_metrics_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ringfort.launch.metrics_server", raising=False)
    code, out, err = invoke("run", "--metrics-port", "0", __file__)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert "pip install 'ringfort[metrics]'" in err


def test_run_with_a_port_or_a_folder_that_cannot_be_had_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it was started')")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for elastic in ((), ("--elastic",)):
            code, out, err = invoke("run", *elastic, "--metrics-port", str(port), str(script))
            assert (code, out) == (1, "")
            assert err.startswith(f"error: cannot serve metrics at 127.0.0.1:{port}: Address already in use.")
    code, out, err = invoke("run", "--log-dir", str(script), str(script))
    assert (code, out) == (2, "")
    assert err.startswith("error: log_dir=")
    assert "File exists; name a folder" in err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("ringfort che", ["checkpoint"]), ("ringfort run --torch", ["--torch-backend"]), ("ringfort key sh", ["show"])],
)
def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, offered: list[str]
) -> None:
    monkeypatch.setenv("_RINGFORT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    with pytest.raises(SystemExit):
        app(prog_name="ringfort")
    assert capsys.readouterr().out.split() == offered
