"""The memory of a model: what its KV entries and its weights take, and the longest context that fits.

For each token, each layer keeps one key and one value per KV head::

    bytes per token = sum over layers of kv_heads x (key_dim x bytes_of_key + value_dim x bytes_of_value)

With multi-head attention ``kv_heads`` is the number of heads; with grouped-query attention (GQA) it is
smaller; with equal dimensions and types this is the well-known ``2 x layers x kv_heads x head_dim x bytes``.
Multi-head latent attention (MLA, DeepSeek) keeps one latent vector per layer and token instead, of
``kv_lora_rank + qk_rope_head_dim`` values, for all heads together. Layers with a sliding window keep the
window's tokens only, and recurrent layers keep a state whose size does not depend on the context: for both
the formula gives an upper bound, which ``is_exact`` says.

Sources: Kwon et al. 2023 (PagedAttention), section 3; Ainslie et al. 2023 (GQA); DeepSeek-V2 (2024), section
2.1; the block sizes of quantised types are ggml's (``ggml-common.h``: q8_0 is 34 bytes for 32 values).
"""

from __future__ import annotations

from dataclasses import dataclass

TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one value by ggml's name of its type."""


@dataclass(frozen=True)
class KvShape:
    """The KV entries of one token. ``kv_heads`` are the KV heads of each layer; dimensions are per head.

    ``latent_dim`` is the length of MLA's latent vector, 0 without; it replaces heads and dimensions.
    ``trained_tokens`` is the context that the model was trained for, 0 when not known.
    """

    kv_heads: tuple[int, ...]
    key_dim: int
    value_dim: int
    latent_dim: int = 0
    trained_tokens: int = 0
    is_exact: bool = True

    def bytes_per_token(self, key_bytes: float = 2.0, value_bytes: float = 2.0) -> float:
        """Return the memory of one token's KV entries in bytes, given the bytes of one value of each kind."""
        if self.latent_dim:
            return len(self.kv_heads) * self.latent_dim * key_bytes
        return sum(self.kv_heads) * (self.key_dim * key_bytes + self.value_dim * value_bytes)


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that one worker takes at its start, in bytes.

    ``context_tokens`` tokens are kept for each of ``sequences`` requests, at ``token_bytes`` each.
    ``is_certain`` says that the engine takes all of this at once, or refuses to start: with no option that
    would make it smaller, and a model whose KV entries are known exactly. ``gpu_fraction`` is the part of the
    memory of its GPUs that the engine may use.
    """

    weights_bytes: float
    token_bytes: float
    context_tokens: int
    sequences: int = 1
    is_certain: bool = False
    gpu_fraction: float = 1.0

    @property
    def kv_bytes(self) -> float:
        """The memory of the KV entries in bytes."""
        return self.token_bytes * self.context_tokens * self.sequences

    @property
    def total_bytes(self) -> float:
        """The memory of weights and KV entries in bytes."""
        return self.weights_bytes + self.kv_bytes


def longest_context(kv_bytes: float, token_bytes: float) -> int:
    """Return the longest context in tokens whose KV entries take ``kv_bytes``; 0 when none does.

    ``token_bytes`` are the bytes of one more token of context, over all requests and workers. Rounded down to
    256, the step in which llama.cpp takes a context.
    """
    return max(0, int(kv_bytes / token_bytes)) // 256 * 256 if token_bytes > 0 else 0
