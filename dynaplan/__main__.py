"""The command ``dynaplan``, and ``python -m dynaplan``.

Imports take most of a second on a busy machine. Meanwhile Ctrl-C ends the process by the signal, as in any
program that has not begun yet, and a closed terminal does not end ``serve``, as later on.
"""

import _signal  # type: ignore[import-not-found]  # not ``signal``: its enumerations take as long as the rest
import gc
import sys


def main() -> None:
    """Run the command line and exit."""
    is_pythons = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_pythons:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if sys.argv[1:2] == ["serve"]:
        _signal.signal(_signal.SIGHUP, lambda number, frame: None)  # what it starts does not inherit that
        gc.disable()  # until it serves: imports leave no garbage, and looking for it takes a seventh of them
    from dynaplan.cli import main as run

    if is_pythons:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
