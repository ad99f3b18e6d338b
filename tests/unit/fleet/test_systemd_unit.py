"""How the unit's template is filled in; the whole unit is tested with ``dynaplan export systemd``."""

from dynaplan.fleet.systemd_unit import fill_lines


def test_a_line_is_there_once_for_each_item_and_no_value_is_read_as_a_template() -> None:
    template = "[Unit]\nWants=${empty}\nEnvironment=${list}\nName=%${name}.service\n"
    values: dict[str, str | list[str]] = {"empty": [], "list": ["A=${name}", "B=$x"], "name": "box"}
    assert fill_lines(template, values) == [
        "[Unit]",
        "Environment=A=${name}",
        "Environment=B=$x",
        "Name=%box.service",
    ]
