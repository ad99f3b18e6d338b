"""``python -m dynaplan.fleet.plugin``: the process of the fleet plugin, as circus starts it."""

from __future__ import annotations

from circus.plugins import main

if __name__ == "__main__":
    main()  # type: ignore[no-untyped-call]  # (circus is not typed)
