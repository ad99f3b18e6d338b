"""The keys of the stock services' sections, loaded when a configuration is checked, by no worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.config.settings.fields import Options


def known(table: str) -> Options:
    """The table of that name in ``config/stock.py``."""
    from dynaplan.config import stock

    options: Options = getattr(stock, table)
    return options
