"""``dynaplan profiles [show NAME | export NAME DIR]``: what planners have learnt of engines, and kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dynaplan.cli.main import LazyGroup
from dynaplan.cli.options import json_option
from dynaplan.config.settings.worker import engine_of
from dynaplan.engines.timing_model.learnt_timing import describe
from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.drawing.plots import plot_svg
from dynaplan.lab.profiling.learnt_profile import plot_of, profile_of
from dynaplan.lab.profiling.results import write_points
from dynaplan.planner.learnt_files import LearntFile, learnt_dir, list_files
from dynaplan.util import screen
from dynaplan.util.durations import clock
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.tables import text_table

ACTIONS = {
    "show": ("profiles:show", "Show all that is known of one."),
    "export": ("profiles:export", "Write one as a profile for serve and simulate."),
}

HEADINGS = ("NAME", "ENGINE", "MODEL", "ROLE", "MACHINE", "GPUS", "STEPS", "ERROR", "AGE")
DROPPED = ("MACHINE", "AGE", "ROLE", "GPUS", "MODEL")
"""The columns that a narrow screen does without, the first first."""


@click.command(cls=LazyGroup, table=ACTIONS, name="profiles", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List what planners have learnt of engines and kept in ~/.dynamo/learnt, the newest first.

    The next `serve` of the same engine, model, options and GPUs begins with it.
    """
    if context.invoked_subcommand:
        return
    found = list_files(learnt_dir(os.environ))
    if as_json:
        click.echo(json.dumps([_document(each) for each in found]))
    elif not found:
        click.echo("Nothing was learnt yet: a planner with targets (--Planner.policy=sla) learns.")
    else:
        click.echo(text_table([HEADINGS, *map(_cells, found)], width=screen.width(), dropping=DROPPED))


@click.command(name="show")
@click.argument("name")
@json_option
@click.option(
    "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw a step's time by its sequences."
)
def show(name: str, as_json: bool, svg: Path | None) -> None:
    """Show all that is known of NAME; its first letters are enough where no other begins so."""
    found = find_learnt(name)
    if svg:
        _draw(found, svg)
    if as_json:
        click.echo(json.dumps(_document(found)))
        return
    known = found.learnt
    a_step, *others = (f"{value:.4g} ms" for value in known.line.coefficients)
    rows = [
        *((key.replace("_", " "), _shown(value)) for key, value in found.of.items()),
        ("known", describe(known)),
        ("a step", a_step),
        *zip(
            ("each sequence", "each token of context", "each prompt token", "each prompt"),
            others,
            strict=True,
        ),
        ("error", f"{known.error:.0%} (of the prior {known.prior_error:.0%})"),
        ("KV cache", f"{known.kv_tokens:,} tokens" if known.kv_tokens else "not told by the engine"),
        ("request slots", str(known.request_slots or "not told by the engine")),
    ]
    click.echo("\n".join(f"{title:<22} {text}" for title, text in rows))


@click.command(name="export")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--prefill", help="The one of the prefill workers; default: NAME computes the prompts, too.")
@click.option(
    "--max-kv-tokens", type=click.IntRange(128), help="Tokens in the KV cache; default: as the engine told."
)
def export(name: str, directory: Path, prefill: str | None, max_kv_tokens: int | None) -> None:
    """Write NAME below DIRECTORY in the form of `profile-sla`.

    `serve --Planner.profile-results-dir=DIRECTORY` and `simulate --profile DIRECTORY` read it.
    """
    decode = find_learnt(name)
    other = find_learnt(prefill) if prefill else decode
    profile = write_profile(directory, decode, other, max_kv_tokens)
    click.echo(f"{directory}: {profile.origin}")


def write_profile(
    directory: Path, decode: LearntFile, other: LearntFile, max_kv_tokens: int | None = None
) -> MeasuredProfile:
    """Write what was learnt of decode and prefill workers as a profile, and return it; raises ConfigError."""
    kv_tokens = max_kv_tokens or decode.learnt.kv_tokens
    if not kv_tokens:
        raise ConfigError(
            f"{decode.path.stem} does not say how many tokens its KV cache holds",
            hint="Expected --max-kv-tokens, as the engine's log has it.",
        )
    profile = profile_of(
        decode.learnt,
        other.learnt,
        kv_tokens,
        decode_gpus=float(decode.of.get("gpus") or 0),
        prefill_gpus=float(other.of.get("gpus") or 0),
    )
    try:
        write_points(directory, profile)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}", hint="Expected a directory.") from error
    return profile


def newest_learnt(section: Mapping[str, Any], role: Role) -> LearntFile | None:
    """Return a role's newest learnt file, of the section's engine and model if it names one; None without."""
    for found in list_files(learnt_dir(os.environ)):
        is_same = not section.get("model") or (
            found.of.get("engine") == engine_of(section) and found.of.get("model") == str(section["model"])
        )
        if found.of.get("role") == role.value and is_same:
            return found
    return None


def find_learnt(name: str) -> LearntFile:
    """Return the file of that name, or the only one whose name begins so; raises ConfigError."""
    found = {each.path.stem: each for each in list_files(learnt_dir(os.environ))}
    begin = [each for stem, each in found.items() if stem.startswith(name)]
    if name in found:
        return found[name]
    if len(begin) == 1:
        return begin[0]
    if begin:
        several = ", ".join(each.path.stem for each in begin)
        raise ConfigError(f"{name!r} is the beginning of several: {several}", hint="Expected one of them.")
    raise ConfigError(
        f"nothing that was learnt is called {name!r}",
        hint=nearest(name, found) or "`dynaplan profiles` lists what there is.",
    )


def _document(found: LearntFile) -> dict[str, Any]:
    known = {"known": describe(found.learnt), "learnt": found.learnt.to_json()}
    return {"name": found.path.stem, "of": dict(found.of), **known, "age_s": round(_age_s(found))}


def _cells(found: LearntFile) -> tuple[str, ...]:
    of, known = found.of, found.learnt
    return (
        found.path.stem,
        f"{of.get('engine', '-')} {of.get('version', '')}".strip(),
        Path(str(of.get("model") or "-")).name,
        str(of.get("role", "-")),
        str(of.get("machine") or "-"),
        f"{of.get('gpus') or 0:g}",
        f"{known.steps:,}",
        f"{known.error:.0%}",
        clock(_age_s(found)),
    )


def _age_s(found: LearntFile) -> float:
    return max(0.0, time.time() - found.path.stat().st_mtime)


def _shown(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _draw(found: LearntFile, path: Path) -> None:
    try:
        path.write_text(plot_svg(plot_of(found.learnt, found.path.stem)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg: {path} cannot be written: {error.strerror}") from error
