"""`ringfort key`: what it prints where, and that it prints a secret only when asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from ringfort import NetworkNamespace
from ringfort.cli import app
from ringfort.identity.store import ClusterStore

VERBS = {"new": set(), "show": {"--qr", "--no-qr"}, "join": set(), "list": set(), "rotate": set()}
"""Scripts depend on these. Adding is free; removing or renaming one needs a note in the changelog."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    for name in ("RINGFORT_KEY", "RINGFORT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RINGFORT_HOME", str(home))
    return home


@pytest.fixture
def store(home: Path) -> ClusterStore:
    return ClusterStore(home)


def key(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["key", *arguments], input=stdin)


def ok(*arguments: str, stdin: str | None = None) -> Result:
    result = key(*arguments, stdin=stdin)
    assert (result.exit_code, result.exception) == (0, None), result.output
    return result


def refused(code: int, *arguments: str, stdin: str | None = None) -> str:
    result = key(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_the_verbs_and_their_options_are_these() -> None:
    group = typer.main.get_command(app).commands["key"]  # pyright: ignore[reportAttributeAccessIssue]
    found = {
        name: {text for item in command.params for text in (*item.opts, *item.secondary_opts) if text.startswith("-")}
        - {"--help", "-h"}
        for name, command in group.commands.items()
    }
    assert found == VERBS
    assert all(command.help for command in group.commands.values())
    assert all(item.help for command in group.commands.values() for item in command.params if item.name != "help")


def test_new_makes_a_cluster_and_does_not_print_its_secret(store: ClusterStore) -> None:
    result = ok("new", "lab")
    assert result.stdout == "created the cluster 'lab'\n"
    assert "ringfort key join" in result.stderr
    assert store.load("lab").join_code() not in result.output


def test_new_without_a_name_makes_the_default_one(store: ClusterStore) -> None:
    ok("new")
    assert store.names() == ["default"]


def test_new_does_not_touch_a_cluster_that_is_there(store: ClusterStore) -> None:
    cluster = store.create("lab")
    assert "already exists" in refused(2, "new", "lab")
    assert store.load("lab") == cluster


def test_show_prints_the_code_alone_on_standard_output_and_warns_on_the_other(store: ClusterStore) -> None:
    result = ok("show", "--no-qr")
    assert result.stdout == f"{store.load('default').join_code()}\n"
    assert "secret" in result.stderr


def test_show_takes_the_cluster_in_use_or_the_named_one(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, attic = store.create("lab"), store.create("attic")
    monkeypatch.setenv("RINGFORT_CLUSTER", "lab")
    assert ok("show").stdout == f"{lab.join_code()}\n"
    assert ok("show", "attic").stdout == f"{attic.join_code()}\n"


def test_show_draws_a_picture_in_a_terminal_unless_told_not_to(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(NetworkNamespace.generate("x" * 32))
    assert len(ok("show", "x" * 32).stdout.splitlines()) == 1
    monkeypatch.setattr("ringfort.cli.key.sys", _Terminal())
    _, *picture = ok("show", "x" * 32).stdout.splitlines()
    # It fits a small terminal, because the code is in capitals.
    assert 10 < len(picture) <= 24
    assert {len(line) for line in picture} == {len(picture[0])}
    assert len(picture[0]) < 80
    assert len(ok("show", "x" * 32, "--no-qr").stdout.splitlines()) == 1


class _Terminal:
    """A `sys` whose standard streams are terminals."""

    class stdout:  # noqa: N801
        @staticmethod
        def isatty() -> bool:
            return True

    stdin = stdout


def test_join_by_argument_stores_the_cluster(store: ClusterStore) -> None:
    cluster = NetworkNamespace.generate()
    result = ok("join", cluster.join_code())
    assert result.stdout == "joined the cluster 'default'\n"
    assert store.load("default") == cluster


def test_join_reads_a_pipe_so_that_the_code_stays_out_of_the_history(store: ClusterStore) -> None:
    cluster = NetworkNamespace.generate()
    ok("join", stdin=f"{cluster.join_code()}\n")
    assert store.load("default") == cluster


def test_join_asks_a_person_without_showing_what_is_typed(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = NetworkNamespace.generate()
    asked: list[dict[str, object]] = []

    def prompt(text: str, **options: object) -> str:
        asked.append({"text": text, **options})
        return cluster.join_code()

    monkeypatch.setattr("ringfort.cli.key.sys", _Terminal())
    monkeypatch.setattr("typer.prompt", prompt)
    ok("join")
    assert asked == [{"text": "join code", "hide_input": True, "err": True}]
    assert store.load("default") == cluster


def test_join_says_when_it_is_a_member_already_and_when_it_replaces_another(store: ClusterStore) -> None:
    cluster = store.load_or_create()
    assert "already" in ok("join", cluster.join_code()).stdout
    other = NetworkNamespace.generate()
    assert "in place of another cluster" in ok("join", other.join_code()).stdout
    assert store.load("default") == other


def test_join_says_how_to_use_a_cluster_of_another_name() -> None:
    assert "export RINGFORT_CLUSTER=lab" in ok("join", NetworkNamespace.generate("lab").join_code()).stderr
    assert "RINGFORT_CLUSTER" not in ok("join", NetworkNamespace.generate().join_code()).stderr


def test_a_mistyped_code_is_one_line_with_the_place_and_changes_nothing(home: Path) -> None:
    code = NetworkNamespace.generate().join_code()
    at = len(code) - len("abcd-abcd-abcd-abcd")  # the first letter of group 12
    wrong = code[:at] + ("z" if code[at] != "z" else "y") + code[at + 1 :]
    line = refused(2, "join", wrong)
    assert "group 12" in line
    assert "did you mean" in line
    assert code not in line
    assert wrong not in line
    assert not home.exists()


def test_an_empty_pipe_is_a_bad_code() -> None:
    assert "must begin with ringfort-" in refused(2, "join", stdin="")


def test_list_shows_names_and_public_ids_and_marks_the_one_in_use(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, default = store.create("lab"), store.create("default")
    assert ok("list").stdout == f"* default  {default.network_id.hex()}\n  lab      {lab.network_id.hex()}\n"
    monkeypatch.setenv("RINGFORT_CLUSTER", "lab")
    assert ok("list").stdout.splitlines()[1].startswith("* lab ")
    monkeypatch.setenv("RINGFORT_KEY", lab.join_code())
    result = ok("list")
    assert "*" not in result.stdout
    assert "RINGFORT_KEY is set" in result.stderr
    assert lab.join_code() not in result.output


def test_list_of_nothing_says_how_to_begin(home: Path) -> None:
    result = ok("list")
    assert result.stdout == ""
    assert "ringfort key new" in result.stderr
    assert not home.exists()


def test_rotate_makes_a_new_secret_and_says_what_to_do_elsewhere(store: ClusterStore) -> None:
    old = store.create("lab")
    result = ok("rotate", "lab")
    new = store.load("lab")
    assert new != old
    assert "old join code is invalid" in result.stdout
    assert "on every other machine: ringfort key join" in result.stderr
    assert old.join_code() not in result.output
    assert new.join_code() not in result.output


def test_what_is_not_there_is_one_line_and_exit_code_1() -> None:
    assert "not in a cluster 'lab'" in refused(1, "show", "lab")
    assert "not in a cluster 'lab'" in refused(1, "rotate", "lab")


@pytest.mark.parametrize("verb", ["new", "show", "rotate"])
def test_a_name_that_is_none_is_one_line_and_exit_code_2(verb: str) -> None:
    assert "cluster='../x'" in refused(2, verb, "../x")


def test_loose_permissions_are_one_line_with_the_command_that_mends_them(home: Path, store: ClusterStore) -> None:
    store.create("lab")
    home.chmod(0o755)
    assert f"chmod 700 {home}" in refused(1, "show", "lab")


def test_the_code_of_one_machine_joins_another_through_a_pipe(
    tmp_path: Path, store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ok("show").stdout
    monkeypatch.setenv("RINGFORT_HOME", str(tmp_path / "other machine"))
    ok("join", stdin=code)
    assert ok("show").stdout == code
    assert store.names() == ClusterStore(tmp_path / "other machine").names()
