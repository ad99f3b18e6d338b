"""The keys of the stock services' sections, loaded when a configuration is checked, by no worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.domain.settings.fields import Options


def known(table: str) -> Options:
    """The table of that name in ``options/stock.py``."""
    from dynaplan.options import stock

    options: Options = getattr(stock, table)
    return options
