"""The reference of the `ringfort` commands as Markdown, made from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


def command_reference() -> str:
    """A section for each command: what it does, how it is called, its arguments and its options."""
    import typer.main

    from ringfort.cli.app import app

    root = typer.main.get_command(app)
    return "\n".join(_sections("ringfort", root))


def _sections(path: str, command: Any) -> Iterator[str]:
    context: Any = command.make_context(path.rsplit(maxsplit=1)[-1], [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context)).replace("[[", "[").replace("]]", "]")
    yield f"## {path}\n\n{_text(command.help)}\n\n```\n{path} {usage}\n```\n"
    rows = [_row(parameter, context) for parameter in command.params]
    if rows:
        yield "| | |\n| --- | --- |\n" + "".join(rows)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _sections(f"{path} {name}", inner)


def _row(parameter: Any, context: Any) -> str:
    name, text = parameter.get_help_record(context)
    if parameter.param_type_name == "option":
        name = ", ".join(re.split(r", | / ", name))
    name = re.sub(r"[^,]+", lambda part: f" `{part[0].strip()}`", name).strip()
    return f"| {_cell(name)} | {_cell(_text(text))} |\n"


def _text(text: str | None) -> str:
    """Help as Markdown: click shows it as it stands, so nothing in it is markup."""
    paragraphs = re.split(r"\n\s*\n", (text or "").replace("\b\n", "").strip())
    return "\n\n".join(re.sub(r"([*_<>\[\]])", r"\\\1", " ".join(part.split())) for part in paragraphs)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
