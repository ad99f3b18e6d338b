"""What a reader of a document types: its commands, and the files and YAML that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    *("cat", "circusctl", "curl", "docker", "dynaplan", "eval", "export", "kubectl", "ls", "nats", "openssl"),
    *("pip", "pipx", "podman", "prometheus", "python", "ssh", "tail", "tensorboard", "tox"),
)
"""The programs whose names begin a command in a block; other lines of the block are what it prints."""

ASSIGNED = re.compile(r"^\w+=\S* ")
OPERATORS = frozenset("|&;()")


def commands(document: Path) -> list[str]:
    """Return the commands of the document's blocks, in order, without comments; a long one whole.

    Blocks are indented by four, or fenced as ``bash`` or ``console``.
    """
    waiting = list(_lines_of_blocks(document))
    found: list[str] = []
    while waiting:
        line = waiting.pop(0).removeprefix("$ ")
        if is_command(line):
            while waiting and (line.endswith("\\") or line.count("'") % 2):
                line += "\n" + waiting.pop(0)
            found.append(re.sub(r"\s{2,}#.*|\s+# on \w+$", "", line, flags=re.M))
    return found


def is_command(line: str) -> bool:
    """Tell whether the line begins with a program, behind variables or a parenthesis."""
    while ASSIGNED.match(line):
        line = ASSIGNED.sub("", line)
    words = line.split(None, 1)
    return bool(words) and (words[0] in (*PROGRAMS, "\\") or line.startswith("(umask "))


def _lines_of_blocks(document: Path) -> Iterator[str]:
    fence = ""
    for line in document.read_text().splitlines():
        if line.startswith("```"):
            fence = "" if fence else line[3:] or "text"
        elif fence in ("bash", "console"):
            yield line
        elif not fence and line.startswith("    "):
            yield line[4:]


def fenced(document: Path, kind: str) -> list[str]:
    """Return the document's blocks that are fenced as this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", document.read_text(), re.M | re.S)


def files(document: Path) -> dict[str, str]:
    """Return the files that the document shows: Python blocks whose first line is a comment, its name."""
    named = (re.match(r"# (\w+\.py)\n", block) for block in fenced(document, "python"))
    return {match[1]: match.string for match in named if match}


def in_the_text(document: Path) -> list[str]:
    """Return the commands of dynaplan that stand in code within the text, each on one line."""
    without_blocks = re.sub(r"(?ms)^```.*?^```$|^    [^\n]*$", "", document.read_text())
    code = (" ".join(each.split()) for each in re.findall(r"`([^`]+)`", without_blocks))
    return [each for each in code if each.startswith("dynaplan ")]


def invocations(command: str, program: str = "dynaplan") -> list[list[str]]:
    """Return the arguments of each call of the program in a line of the shell."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= OPERATORS:
            calls.append([])
        else:
            calls[-1].append(word)
    typed = map(_arguments, calls)
    return [words[1:] for words in typed if words[:1] == [program] and len(words) > 1]


def _arguments(words: list[str]) -> list[str]:
    """Return the words without assignments before the program, and without redirections."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    kept = [
        word for place, word in enumerate(words) if place == 0 or words[place - 1] not in ("<", ">", ">>")
    ]
    return [word for word in kept if word not in ("<", ">", ">>")]
