"""The flags of ``dynaplan worker`` and ``dynaplan frontend``."""

from __future__ import annotations

from typing import Any

import click
import pytest

from dynaplan.cli.components import frontend, worker
from dynaplan.cli.components.flags import FLAGS, Flags, known_flags
from dynaplan.config import stock


def flags_of(command: click.Command, *arguments: str) -> Flags:
    context = click.Context(command)
    command.parse_args(context, list(arguments))
    flags: Flags = context.meta[FLAGS]
    return flags


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--model", "llama", "--max-model-len=4096"], {"model": "llama", "max-model-len": 4096}),
        (["--max_num_seqs", "8"], {"max-num-seqs": 8}),
        (["--enable-prefix-caching"], {"enable-prefix-caching": True}),
        (["--no-enable-prefix-caching"], {"enable-prefix-caching": False}),
        (["--enable-prefix-caching=false"], {"enable-prefix-caching": False}),
        (["--model", "7"], {"model": "7"}),
        (["--seed", "3", "--namespace", "box", "--role", "prefill"], {"seed": 3}),
    ],
)
def test_every_option_of_a_workers_section_is_a_flag(arguments: list[str], known: dict[str, Any]) -> None:
    flags = flags_of(worker.command, *arguments)
    assert (flags.known, flags.others) == (known, {})


def test_what_no_section_knows_is_kept_apart_for_an_engine_that_may() -> None:
    flags = flags_of(worker.command, "--swap-spaces", "4", "--verbose-engine", "--seed", "1", "--scale=-2")
    assert flags.others == {"swap-spaces": 4, "verbose-engine": True, "scale": -2}
    assert flags.known == {"seed": 1}


@pytest.mark.parametrize(("typed", "meant"), [("max-model-lem", "max-model-len"), ("namespce", "namespace")])
def test_an_unknown_flag_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    context = click.Context(worker.command)
    worker.command.parse_args(context, [f"--{typed}", "4"])
    with pytest.raises(click.UsageError, match=rf"No such option '--{typed}'.*'--{meant}'"):
        known_flags(context)
    assert known_flags(worker.command.make_context("worker", ["--seed", "4"])) == {"seed": 4}


def test_the_originals_name_of_the_routing_mode_is_known() -> None:
    assert flags_of(frontend.command, "--router-mode", "kv").known == {"router": "kv"}


def test_overrides_of_a_section_are_no_flags() -> None:
    context = click.Context(worker.command)
    worker.command.parse_args(context, ["--VllmWorker.seed=4"])
    assert context.obj == ["--VllmWorker.seed=4"]
    assert context.meta[FLAGS] == Flags()


def test_the_help_page_lists_the_sections_options() -> None:
    text = worker.command.get_help(click.Context(worker.command))
    assert "--max-model-len" in text
    assert "--max-waiting-requests" in frontend.command.get_help(click.Context(frontend.command))
    assert {"engine", "model"} <= stock.WORKER.keys()
