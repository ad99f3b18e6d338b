"""The numbers of a model that its speed follows from, as its ``config.json`` states them.

For a decoder of ``L`` layers of width ``h`` with ``a`` heads and ``k`` KV heads of dimension ``d``, and a
gated feed-forward network of width ``f`` (Llama, Mistral, Qwen, Gemma and most since)::

    parameters of the layers = L (2 h a d + 2 h k d + 3 h f)         of the output layer = vocabulary x h

Embedding and output layer have 16 bits; ``quantization_config`` tells the bits of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.util.errors import ConfigError

REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""The keys that a config.json must have."""

UNFITTED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "layer_types": "layers of several kinds",
    "ssm_state_size": "recurrent layers",
    "mamba_d_state": "recurrent layers",
}
"""Keys of models whose speed follows from other numbers, and the thing that each key stands for."""

OUTPUT_BYTES = 2
"""Bytes of one parameter of the embedding and of the output layer."""


@dataclass(frozen=True)
class ModelShape:
    """One model. ``weight_bits`` and ``compute_bits`` are those of its layers; lengths are in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    weight_bits: int = 16
    compute_bits: int = 16
    ties_embeddings: bool = False
    context_tokens: int = 0

    @property
    def layer_parameters(self) -> float:
        """The parameters of all layers."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return float(self.layers * self.hidden * (attention + 3 * self.feed_forward))

    @property
    def read_bytes(self) -> float:
        """The bytes of weights that one step reads: layers and output layer."""
        return self.layer_parameters * self.weight_bits / 8 + self._output_bytes

    @property
    def held_bytes(self) -> float:
        """The bytes of weights in memory: as read, and the embedding where it is not the output layer."""
        return self.read_bytes + (0.0 if self.ties_embeddings else self._output_bytes)

    @property
    def _output_bytes(self) -> float:
        return float(self.vocabulary * self.hidden * OUTPUT_BYTES)

    def kv_token_bytes(self, tensor_parallel_size: int, value_bytes: float) -> float:
        """Return the bytes of one token's KV entries on one GPU; KV heads are kept more than once where
        there are fewer of them than GPUs."""
        heads = max(1.0, self.kv_heads / tensor_parallel_size)
        return 2 * self.layers * heads * self.head_dim * value_bytes


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read a ``config.json``; raises ConfigError, naming the file and keys, for one of no use."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) and "num_hidden_layers" not in config else config
    unfitted = {key: what for key, what in UNFITTED.items() if _is_set(text.get(key))}
    if unfitted:
        key, what = next(iter(unfitted.items()))
        raise ConfigError(
            f"{name} has {key}: {what}, which the roofline was not fitted to",
            hint="Expected a dense model of one kind of layer. `dynaplan profile-sla` without --estimate "
            "measures any model.",
        )
    wrong = [key for key in REQUIRED if not _whole(text.get(key))]
    if wrong:
        raise ConfigError(
            f"{name} lacks {', '.join(wrong)}", hint="Expected whole numbers, as Hugging Face writes them."
        )
    layers, hidden, heads, feed_forward, vocabulary = (_whole(text[key]) for key in REQUIRED)
    weight_bits, compute_bits = _bits(config.get("quantization_config") or {}, name)
    return ModelShape(
        layers,
        hidden,
        heads,
        _whole(text.get("num_key_value_heads")) or heads,
        _whole(text.get("head_dim")) or hidden // heads,
        feed_forward,
        vocabulary,
        weight_bits,
        compute_bits,
        config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True,
        _whole(text.get("max_position_embeddings")),
    )


def _bits(quantization: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the bits of a weight, and of the numbers that are multiplied: 8 only where both are FP8."""
    method = str(quantization.get("quant_method") or "").lower()
    if not quantization:
        return 16, 16
    if method == "fp8" or str(quantization.get("quant_algo")).upper() == "FP8":
        return 8, 8
    if method == "compressed-tensors":
        return _compressed_bits(quantization, name)
    bits = _whole(quantization.get("bits")) or _whole(quantization.get("w_bit"))
    if bits:
        return bits, 16
    raise _unknown(name, method)


def _compressed_bits(quantization: Mapping[str, Any], name: str) -> tuple[int, int]:
    groups = quantization.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights, activations = (
        (group.get(key) or {} for key in ("weights", "input_activations"))
        if isinstance(group, Mapping)
        else ({}, {})
    )
    bits = _whole(weights.get("num_bits"))
    if not bits:
        raise _unknown(name, "compressed-tensors")
    is_fp8 = bits == 8 and weights.get("type") == activations.get("type") == "float"
    return bits, 8 if is_fp8 else 16


def _unknown(name: str, method: str) -> ConfigError:
    return ConfigError(
        f"{name} has quantization_config with quant_method {method!r}, whose bits are not known",
        hint="Expected fp8, modelopt with FP8, compressed-tensors, or a method that states bits.",
    )


def _is_set(value: Any) -> bool:
    """Tell whether the key matters: more than one expert, and layer types that differ."""
    if isinstance(value, list):
        return len(set(map(str, value))) > 1
    return _whole(value) > 1


def _whole(value: Any) -> int:
    """Return a whole number from 1 on; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
