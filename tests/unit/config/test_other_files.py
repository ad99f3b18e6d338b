"""Files of other tools that cannot be served are called by their names."""

from __future__ import annotations

import pytest

from dynaplan.config.other_files import recognise_name
from dynaplan.config.yaml_file import read_sections
from dynaplan.util.errors import ConfigError

DYNAMO = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nspec: {services: {Frontend: {}}}"
LITELLM = "model_list: [{model_name: a, litellm_params: {model: openai/a}}]"
COMPOSE = "services: {llama: {image: llama.cpp, command: -m a.gguf}}"
LLAMA_CPP_PYTHON = "host: 0.0.0.0\nmodels: [{model: a.gguf, n_ctx: 2048}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DYNAMO, r"an object of Kubernetes\s+.*kubectl.*graphs.agg:Frontend"),
        (LITELLM, r"a configuration of LiteLLM's proxy.*\s+Write Models: .*api_base"),
        (COMPOSE, r"a compose file\s+.*docker compose"),
        (LLAMA_CPP_PYTHON, r"a configuration of llama_cpp.server.*\s+Write Models: "),
    ],
)
def test_a_yaml_file_of_another_tool_is_named_and_told_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^x.yaml is {said}"):
        read_sections(text, "x.yaml")


@pytest.mark.parametrize(
    ("name", "what", "advice"),
    [
        ("Modelfile", "a Modelfile of Ollama", "FROM"),
        ("in/my.kcpps", "a configuration of koboldcpp", "koboldcpp --config in/my.kcpps --port ${PORT}"),
    ],
)
def test_a_file_that_is_no_yaml_is_known_by_its_name(name: str, what: str, advice: str) -> None:
    found = recognise_name(name)
    assert found
    assert found[0] == what
    assert advice in found[1]


def test_other_names_say_nothing() -> None:
    assert recognise_name("model.txt") is None
