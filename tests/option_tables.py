"""Write the guide's tables of options, of what the fields declare: ``python -m tests.option_tables``.

A table stands between the lines ``<!-- options: NAME -->`` and ``<!-- end of options -->``; the names are the
keys of ``TABLES``. Options of the original that have no effect are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dynaplan.config.settings.fields import NO_EFFECT, Option, Options, options_of
from dynaplan.config.settings.frontend import DisaggregationSettings, FrontendSettings, RoutingSettings
from dynaplan.config.settings.keys import KeySettings
from dynaplan.config.settings.models import OnDemandSettings
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import (
    CommandSettings,
    EngineOptions,
    Resources,
    ServiceArgs,
    SimulationOptions,
    WorkerSettings,
)
from dynaplan.config.stock import OWN_OPTIONS, LlamaCppOptions, OtherServerOptions, VllmOptions

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "configuration.md"

TABLES: Mapping[str, Options] = {
    "service-args": options_of(ServiceArgs, Resources),
    "worker": options_of(WorkerSettings, CommandSettings),
    "engine": options_of(EngineOptions, VllmOptions, OtherServerOptions),
    "simulated": options_of(SimulationOptions),
    "llamacpp": options_of(LlamaCppOptions),
    "routing": options_of(RoutingSettings, DisaggregationSettings),
    "frontend": {
        name: each
        for name, each in options_of(FrontendSettings).items()
        if name not in options_of(RoutingSettings, DisaggregationSettings)
    },
    "planner": options_of(PlannerSettings),
    "keys": options_of(KeySettings),
    "models": options_of(OnDemandSettings),
}

PLACE = re.compile(r"(<!-- options: ([\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The guide's text with every table as the options are now."""
    return PLACE.sub(lambda place: f"{place[1]}\n{_table(TABLES[place[2]])}\n{place[3]}", text)


def _table(options: Options) -> str:
    rows = [_row(each) for each in options.values() if not each.about.startswith(NO_EFFECT)]
    return "".join(["| key | default | meaning |\n|---|---|---|\n", *rows])


def _row(option: Option) -> str:
    names = {} if option.name in OWN_OPTIONS else option.names
    own = (f"{engine}'s `{'`, `'.join(its)}`" for engine, its in names.items())
    meaning = "; ".join((option.meaning, *own))
    return f"| `{option.name}` | {option.default_words} | {meaning} |\n"


def main(guide: Path = GUIDE) -> None:
    """Bring the tables of a guide up to date."""
    guide.write_text(with_tables(guide.read_text()))


if __name__ == "__main__":
    main()
