"""The metrics of choices by cached prefixes, under the names of Dynamo's router."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

PREFIX = "dynamo_component_router_"
LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")

HIT_RATE = tuple(step / 20 for step in range(21))
BLOCKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def router_namespace(namespace: str) -> str:
    """Return the namespace as Dynamo's router has it in its labels."""
    return namespace.replace("-", "_")


class RouterMetrics:
    """Observes each choice of a worker by what it has cached.

    ``kv_hit_rate`` is each request's own; ``overlap_blocks_total`` over ``prompt_blocks_total`` is the rate
    over all blocks, which is what prefill work depends on.
    """

    def __init__(self, namespace: str, component: str, registry: CollectorRegistry) -> None:
        labels = (router_namespace(namespace), component, "generate")

        def counter(name: str, about: str) -> Counter:
            return Counter(PREFIX + name, about, LABELS, registry=registry).labels(*labels)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, about, LABELS, registry=registry, buckets=buckets).labels(*labels)

        self._hit_rate = histogram("kv_hit_rate", "Part of a prompt that its worker had cached", HIT_RATE)
        self._lost = histogram(
            "overlap_blocks_lost", "Blocks that another worker had cached beyond the chosen one's", BLOCKS
        )
        self._non_max = counter(
            "non_max_overlap_selections", "Choices of a worker although another had cached more"
        )
        self._prompt_blocks = counter("prompt_blocks", "KV blocks of prompts")
        self._overlap_blocks = counter("overlap_blocks", "KV blocks of prompts that their worker had cached")

    def chosen(self, prompt_blocks: int, overlap_blocks: int, most_blocks: int) -> None:
        """Note a choice: the blocks of the prompt, those cached by the worker, the most that any had."""
        if not prompt_blocks:
            return
        self._hit_rate.observe(overlap_blocks / prompt_blocks)
        self._lost.observe(most_blocks - overlap_blocks)
        self._prompt_blocks.inc(prompt_blocks)
        self._overlap_blocks.inc(overlap_blocks)
        if overlap_blocks < most_blocks:
            self._non_max.inc()
