"""From the words of a command line to a frozen dataclass, by tyro; what is wrong with them is said in one line."""

import contextlib
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from jaxgpt.errors import UserError

F = TypeVar("F")
T = TypeVar("T")
_MISSING = re.compile(r"(--[a-z-]+|\b[A-Z]+) (?:(?<=[a-z] )[A-Z]+ )?(.*?)\.? \(required\)")
"""What tyro says of one that is missing, a flag with the name of its type behind it or one without dashes."""


def given(verb: str, kind: type, args: list[str]) -> dict[str, str | None]:
    """The flags in args by field name, each with its text, None where that is missing.

    Raises UserError for a flag that the dataclass `kind` does not have, with the closest one that it has.
    """
    found: dict[str, str | None] = {}
    hints = get_type_hints(kind)
    known = {"--" + field.name.replace("_", "-"): field.name for field in fields(kind)} | {"--help": "help"}
    known |= {f"--no-{flag[2:]}": name for flag, name in known.items() if hints.get(name) is bool}
    likely = [flag for flag in known if flag != "--help"]  # which is as near as any to what another verb has
    for arg, after in itertools.zip_longest(args, args[1:]):
        if arg.startswith("--"):
            flag, equals, text = arg.partition("=")
            name = known.get(flag.replace("_", "-"))
            if name is None:
                hint = nearest(flag, likely) or "a value that begins with dashes is given as --flag=VALUE; "
                raise UserError(f"{flag}: no such flag of {verb}; {hint}see jaxgpt {verb} --help")
            found[name] = text if equals else None if after is None or after.startswith("--") else after
    return found


def parse(verb: str, kind: type[F], args: list[str], default: Any = tyro.MISSING_NONPROP) -> F:
    """The flags in args as a `kind`, from `default` where they are silent; --help prints and exits.

    Raises UserError, in one line, for what tyro would draw a box around.
    """
    flags, said = given(verb, kind, args), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=f"jaxgpt {verb}", args=args, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(_complaint(verb, get_type_hints(kind), flags, said.getvalue()))


def _complaint(verb: str, hints: dict[str, Any], flags: dict[str, str | None], box: str) -> str:
    """One line out of the box: the flag it names, its text, and what is allowed; else its first paragraph."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in plain.splitlines()[1:]]  # the first is the box's title
    body = itertools.dropwhile(_is_rule, lines)
    said = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body))
    for flag in re.findall(r"--[a-z][a-z0-9-]*", said):
        name = flag[2:].replace("-", "_")
        if name in flags:
            text = flags[name]
            problem = f"{flag}: a value is missing" if text is None else f"{flag} {text}: not allowed"
            return f"{problem}; give {_allowed(hints[name])}"
    if missing := _MISSING.findall(said):
        said = ", ".join(f"{name} is missing ({what})" for name, what in missing)
    return f"{verb}: {said}; see jaxgpt {verb} --help"


def _is_rule(line: str) -> bool:
    return set(line) <= set("─-")


def _allowed(hint: Any) -> str:
    """What a flag of that type takes, in words."""
    words = {int: "a whole number", float: "a number", str: "a text", Path: "a path", type(None): "None"}
    if get_origin(hint) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(hint))}"
    return words[hint] if hint in words else " or ".join(_allowed(each) for each in get_args(hint))


def verb_of(
    verbs: Mapping[str, T], args: Sequence[str], help_text: str, of: str = ""
) -> tuple[T, str, list[str]] | None:
    """What a verb at the head of args stands for, its name with `of` before it, and what follows it; None where help
    was asked for, or nothing, and has been printed. Raises UserError for one that is not known."""
    verb, *rest = args or ["--help"]
    if verb in ("-h", "--help"):
        print(help_text)
        return None
    name = f"{of} {verb}".strip()
    if verb not in verbs:
        raise UserError(f"{name}: no such verb; {nearest(verb, verbs)}known are {', '.join(verbs)}")
    return verbs[verb], name, rest


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean ...? ", or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}? " if close else ""
