"""Files of other tools that cannot be served: what each is, and what to do with it here."""

from __future__ import annotations

from collections.abc import Collection

AS_MODELS = "Write Models: {NAME: {model: /path/to/model.gguf}}, a key for each model"

KNOWN = (
    (
        {"apiVersion", "kind", "spec"},
        "an object of Kubernetes",
        "Apply it to a cluster with kubectl. Here, the graph itself is served: `dynaplan serve "
        "graphs.agg:Frontend`, with a section for each service's options.",
    ),
    (
        {"model_list"},
        "a configuration of LiteLLM's proxy, which asks servers that run already",
        f"{AS_MODELS} that is to run here. LiteLLM can ask dynaplan: api_base: http://localhost:8000/v1.",
    ),
    (
        {"services"},
        "a compose file",
        "Start it with docker compose, or have dynaplan start a container as a model's command: "
        "Models: {NAME: {command: docker run ...}}.",
    ),
)
"""The keys at the top by which a file is known, what it is, and what to do."""

MODELS_AS_LIST = ("a configuration of llama_cpp.server, whose models are a list", f"{AS_MODELS}.")


def recognise_file(keys: Collection[str], lists: Collection[str]) -> tuple[str, str] | None:
    """Return what another tool's file with these top-level keys is, and what to do; None if not known.

    ``lists`` are the keys whose values are lists.
    """
    if "models" in lists:
        return MODELS_AS_LIST
    return next(((what, advice) for known, what, advice in KNOWN if known <= set(keys)), None)


def recognise_name(name: str) -> tuple[str, str] | None:
    """Return what another tool's file of that name is, and what to do; None if not known."""
    if name.rpartition("/")[2].startswith("Modelfile"):
        return (
            "a Modelfile of Ollama",
            "Serve what its FROM names, by path or Ollama's name: `dynaplan serve MODEL`.",
        )
    if name.endswith(".kcpps"):
        command = f"koboldcpp --config {name} --port ${{PORT}}"
        return (
            "a configuration of koboldcpp",
            f"Write in a YAML file below Models, NAME: `command: {command}`.",
        )
    return None
