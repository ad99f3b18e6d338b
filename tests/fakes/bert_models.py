"""BERT in a GGUF file, as llama.cpp takes it: a random ranker, and a real model converted from safetensors.

The layout is that of llama.cpp's own converter: ``##ing`` of WordPiece becomes ``ing``, and a token that
begins a word gets a ``▁`` in front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_bert(
    path: Path, config: Mapping[str, int], tokens: Sequence[str], tensors: Tensors, pooling: Any
) -> Path:
    """Write a GGUF file. ``config`` has the names of Hugging Face, ``tensors`` those of GGUF."""
    import gguf

    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(path.stem)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_word_pieces(writer, tokens)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_word_pieces(writer: Any, tokens: Sequence[str]) -> None:
    import gguf

    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([_piece(token) for token in tokens])
    writer.add_token_types(kinds)
    for name, add in (
        ("[UNK]", writer.add_unk_token_id),
        ("[SEP]", writer.add_sep_token_id),
        ("[PAD]", writer.add_pad_token_id),
        ("[MASK]", writer.add_mask_token_id),
        ("[CLS]", writer.add_bos_token_id),
        ("[SEP]", writer.add_eos_token_id),
    ):
        add(tokens.index(name))


def _piece(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


# -- a random ranker: the form of an answer, and no meaning ------------------------------------------------

RANKER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def tiny_ranker(directory: Path) -> Path:
    """Write ``ranker.gguf`` there: BERT with a head that gives a pair of texts one number."""
    import gguf

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
    random = np.random.default_rng(7)

    def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    width, inner = RANKER["hidden_size"], RANKER["intermediate_size"]
    tensors = {
        "token_embd.weight": weights(len(tokens), width),
        "token_types.weight": weights(2, width),
        "position_embd.weight": weights(RANKER["max_position_embeddings"], width),
        **_norm("token_embd_norm", width),
        "cls.weight": weights(width, width),
        "cls.bias": np.zeros(width, np.float32),
        "cls.output.weight": weights(1, width),
        "cls.output.bias": np.zeros(1, np.float32),
    }
    for layer in range(RANKER["num_hidden_layers"]):
        block = f"blk.{layer}"
        shapes = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width)}
        shapes |= {"attn_output": (width, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        for name, shape in shapes.items():
            tensors[f"{block}.{name}.weight"] = weights(*shape)
            tensors[f"{block}.{name}.bias"] = np.zeros(shape[0], np.float32)
        tensors |= _norm(f"{block}.attn_output_norm", width) | _norm(f"{block}.layer_output_norm", width)
    return write_bert(directory / "ranker.gguf", RANKER, tokens, tensors, gguf.PoolingType.RANK)


def _norm(name: str, width: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}


# -- a real model, from its Hugging Face directory ---------------------------------------------------------


def convert_bert(directory: Path, path: Path) -> Path:
    """Convert a directory as Hugging Face has it; texts are pooled by the mean."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    tensors = {}
    for name, tensor in read_safetensors(directory / "model.safetensors").items():
        found = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if found and "pooler" not in name:
            tensors[found] = tensor
    return write_bert(path, config, tokens, tensors, gguf.PoolingType.MEAN)


def read_safetensors(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Read the 32 bit tensors of a file: eight bytes of length, a JSON header, and the data."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, begin = json.loads(data[8 : 8 + length]), 8 + length
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            first, last = (begin + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[first:last], np.float32).reshape(entry["shape"])
    return found
