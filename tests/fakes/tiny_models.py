"""Models small enough to make on the spot: random weights from a fixed seed, no meaning, real engines.

``tiny_gguf`` is what llama.cpp takes: one GGUF file of about 1.5 MB. ``tiny_hf`` is what vLLM and SGLang take
with ``--load-format dummy``: a directory of the Hugging Face kind without weights.

Both read and write bytes, so a text has as many tokens as bytes, short of a few merged pairs. The GGUF never
ends an answer by itself and writes printable ASCII only: an answer has exactly the tokens that were asked
for, and each of them is a chunk of a stream, as no character takes two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 2
WIDTH = 128
HEADS, KV_HEADS = 4, 2
FEED_FORWARD = 256
CONTEXT_TOKENS = 8192
VOCABULARY = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNWANTED = -8.0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def split_gguf(directory: Path) -> list[Path]:
    """Write the same model in parts, ``tiny-00001-of-0000N.gguf`` and so on; return them in order."""
    tiny_gguf(directory, split_max_tensors=10)
    return sorted(directory.glob("tiny-*-of-*.gguf"))


def tiny_gguf(directory: Path, architecture: str = "llama", **options: Any) -> Path:
    """Write ``tiny.gguf`` there; the same bytes every time. ``options`` are the writer's.

    ``architecture`` ``qwen2`` differs by the biases of its attention.
    """
    import gguf

    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer)
    for name, tensor in _tensors().items():
        writer.add_tensor(name, tensor)
        if architecture == "qwen2" and name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            writer.add_tensor(name.replace("weight", "bias"), np.zeros(len(tensor), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_hf(directory: Path) -> Path:
    """Fill the directory with a config and a tokenizer, and no weights; returns the directory."""
    tokens, merges = _vocabulary()
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", HF_CONFIG)
    _write(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    _write(directory / "tokenizer.json", _hf_tokenizer(tokens, merges))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(directory / "tokenizer_config.json", tokenizer_config)
    return directory


HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def _bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in kept)
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens in the order of their ids: special ones, bytes, merged pairs; and the merges."""
    letters = "etaoinsr"
    pairs = [(first, second) for first in letters for second in letters]
    merges = pairs[: VOCABULARY - len(SPECIALS) - 256]
    return [*SPECIALS, *_bytes_to_unicode().values(), *("".join(pair) for pair in merges)], merges


def _add_tokenizer(writer: Any) -> None:
    import gguf

    tokens, merges = _vocabulary()
    kinds = [
        gguf.TokenType.CONTROL if index < len(SPECIALS) else gguf.TokenType.NORMAL
        for index in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(20)

    def weights(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    kv_width = WIDTH * KV_HEADS // HEADS
    tensors = {"token_embd.weight": weights(VOCABULARY, WIDTH) * 8, "output_norm.weight": ones}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": weights(WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": weights(kv_width, WIDTH),
            f"blk.{layer}.attn_v.weight": weights(kv_width, WIDTH),
            f"blk.{layer}.attn_output.weight": weights(WIDTH, WIDTH),
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": weights(FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_up.weight": weights(FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_down.weight": weights(WIDTH, FEED_FORWARD),
        }
    # The first number of every hidden state is the same large one, which makes a bias of that column.
    tensors["token_embd.weight"][:, 0] = 8
    output = weights(VOCABULARY, WIDTH)
    output[:, 0] = [0 if _is_wanted(token) else UNWANTED for token in _vocabulary()[0]]
    return tensors | {"output.weight": output}


def _is_wanted(token: str) -> bool:
    return token not in SPECIALS and all("!" <= letter <= "~" for letter in token)


def _hf_tokenizer(tokens: list[str], merges: list[tuple[str, str]]) -> dict[str, Any]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": token, **special} for n, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1))
