"""What stands in llama-swap's files, and stopped them here once: each is served, or said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment

SERVE = "sh serve ${PORT}"


def dry_run(directory: Path, text: str) -> tuple[dict[str, Any], str]:
    """Return the configuration that ``serve --dry-run`` shows of the file, and what it says beside it."""
    file = directory / "config.yaml"
    file.write_text(text)
    with Deployment(directory, str(file), "") as deployment:
        done = deployment.run(*deployment.command[1:], "--dry-run")
        assert done.returncode == 0, done.stderr
        shown = done.stdout[done.stdout.index("{") :]
        document, _ = json.JSONDecoder().raw_decode(shown)
        return dict(document), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("cmd", "command"),
    [
        (">\n      sh serve   # leased\n      ${PORT}  # the last", "sh serve '${PORT}'"),
        ("|\n      # ${gone} was before\n      ${new} -v", "sh serve '${PORT}' -v"),
        ("|\n      sh serve \\\n      ${PORT} 'a # b'", "sh serve '${PORT}' 'a # b'"),
    ],
    ids=["at a line's end", "with a macro", "in quotes"],
)
def test_comments_in_commands_are_no_words_of_them(tmp_path: Path, cmd: str, command: str) -> None:
    config, _ = dry_run(tmp_path, f"macros: {{new: '{SERVE}'}}\nmodels:\n  one:\n    cmd: {cmd}\n")
    assert config["Models"]["one"]["command"] == command


def test_a_file_of_another_version_is_served_and_says_what_has_no_meaning(tmp_path: Path) -> None:
    config, said = dry_run(
        tmp_path,
        f"""
host: 0.0.0.0
port: 18000
peer: {{far: {{proxy: 'http://192.0.2.1', models: [m]}}}}
models:
  one:
    cmd: {SERVE}
    aliases: [fast]
    filters: {{strip_params: top_p, setParams: {{"top_k?": 40}}}}
  two: {{cmd: "sh run -p 9501:9501 --port 9501", proxy: "http://127.0.0.1:9501", checkEndpoint: none}}
  three: {{cmd: "OLLAMA_HOST=127.0.0.1:${{PORT}} sh serve", concurrencyLimit: 2}}
matrix: {{sets: {{base: fast, rest: "+undefined & +base"}}, evict_costs: {{fast: 5}}}}
hooks: {{on_startup: {{preload: [fast]}}}}
""",
    )
    models = config["Models"]
    assert (models["one"]["preload"], models["one"]["priority"]) == (True, 5)
    assert (models["one"]["strip-params"], models["one"]["set-params"]) == (["top_p"], {"top_k?": 40})
    assert (models["two"]["url"], models["two"]["check"]) == ("http://127.0.0.1:9501", "none")
    assert models["three"]["concurrency-limit"] == 2
    assert config["ModelSets"]["together"] == [["one"], ["one", "two"], ["one", "three"]]
    for key in ("host", "port", "peer"):
        assert f"{key}: " in said


def test_a_model_that_nobody_has_is_said_wherever_it_is_named(tmp_path: Path) -> None:
    _, said = dry_run(
        tmp_path,
        f"""
models: {{one: {{cmd: '{SERVE}'}}}}
groups: {{all: {{members: [one, onne]}}}}
hooks: {{on_startup: {{preload: [other]}}}}
""",
    )
    assert "groups.all.members: no model is called 'onne', so it is left out. Did you mean 'one'?" in said
    assert "hooks.on_startup.preload: no model is called 'other'" in said
