"""The reader of GGUF headers: right on real files, and total on any bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.engines.gguf import MAX_ARRAY_LENGTH, TENSOR_TYPES, min_file_bytes, read_metadata
from dynaplan.engines.model_files import check_model
from dynaplan.engines.model_memory import gguf_shape
from dynaplan.util.errors import ConfigError
from tests.attack.fuzzing import MAX_EXAMPLES
from tests.fakes.tiny_models import CONTEXT_TOKENS, HEADS, KV_HEADS, LAYERS, WIDTH, tiny_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(*pairs: bytes, version: int = 3, keys: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if keys is None else keys) + b"".join(pairs)


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def array(name: str, kind: int, length: int, content: bytes) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, length) + content


def written(directory: Path, content: bytes) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return path


def test_a_file_of_ggufs_own_writer_is_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tiny_gguf(tmp_path)
    metadata = read_metadata(path)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == CONTEXT_TOKENS
    shape = gguf_shape(path)
    assert shape
    assert (shape.kv_heads, shape.key_dim, shape.value_dim) == (
        (KV_HEADS,) * LAYERS,
        WIDTH // HEADS,
        WIDTH // HEADS,
    )
    assert (shape.trained_tokens, shape.is_exact) == (CONTEXT_TOKENS, True)


def test_values_are_kept_arrays_of_texts_passed_over_and_the_tokenizer_ends_it(tmp_path: Path) -> None:
    tags = array("general.tags", 8, 2, text("a") + text("b"))
    heads = array("x.heads", 4, 3, struct.pack("<III", 8, 0, 4))
    longer = array("x.long", 0, MAX_ARRAY_LENGTH + 1, bytes(MAX_ARRAY_LENGTH + 1))
    name = text("general.architecture") + struct.pack("<I", 8) + text("x")
    end = array("tokenizer.ggml.tokens", 8, 2**40, b"")
    path = written(
        tmp_path, gguf(name, tags, longer, heads, number("x.layers", 3), end, number("x.never", 1))
    )
    assert read_metadata(path) == {"general.architecture": "x", "x.heads": (8, 0, 4), "x.layers": 3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(60),
        gguf(number("a", 1), version=1),
        gguf(version=3, keys=2**63),
        gguf(text("a") + struct.pack("<I", 99)),
        gguf(array("a", 9, 1, bytes(20))),
        gguf(array("a", 0, 2**63, b"")),
        gguf(text("a") + struct.pack("<IQ", 8, 2**60)),
    ],
)
def test_what_is_no_header_has_no_values(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    assert read_metadata(path) == {}
    assert gguf_shape(path) is None


def test_a_file_that_is_not_there_has_no_values(tmp_path: Path) -> None:
    assert read_metadata(tmp_path / "none.gguf") == {} == read_metadata(tmp_path)


GOOD = gguf(
    text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    number("llama.block_count", 2),
    number("llama.embedding_length", 64),
    array("llama.attention.head_count_kv", 4, 2, struct.pack("<II", 2, 2)),
    number("llama.attention.head_count", 4),
)


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: GOOD[:60] + tail))
def test_any_bytes_are_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    shape = gguf_shape(path)
    assert shape is None or shape.bytes_per_token() >= 0
    assert min_file_bytes(path) >= 0


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_good_header_with_some_other_bytes_is_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD)
    for place, byte in changes:
        content[place] = byte
    shape = gguf_shape(written(tmp_path_factory.getbasetemp(), bytes(content)))
    assert shape is None or shape.bytes_per_token() >= 0


def tensor(name: str, kind: int, offset: int, *dimensions: int) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def test_the_tensors_tell_how_long_the_file_must_be(tmp_path: Path) -> None:
    tokens = array("tokenizer.ggml.tokens", 8, 2, text("a") + text("b"))
    infos = tensor("a", 0, 0, 8, 2) + tensor("b", 2, 64, 64)
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + number("general.alignment", 64) + tokens + infos
    begin = -(-len(header) // 64) * 64
    assert min_file_bytes(written(tmp_path, header)) == begin + 64 + 2 * 18
    unknown = header.replace(struct.pack("<IQ", 2, 64), struct.pack("<IQ", 99, 64))
    assert min_file_bytes(written(tmp_path, unknown)) == begin + 64
    for cut in range(len(header)):
        assert min_file_bytes(written(tmp_path, header[:cut])) == 0
    assert min_file_bytes(written(tmp_path, header.replace(struct.pack("<I", 1), struct.pack("<I", 9)))) == 0


def test_a_whole_file_of_ggufs_own_writer_is_as_long_as_it_must_be(tmp_path: Path) -> None:
    gguf_package = pytest.importorskip("gguf")
    path = tiny_gguf(tmp_path)
    assert 0 < min_file_bytes(path) <= path.stat().st_size < min_file_bytes(path) + 32
    known = {int(kind): sizes for kind, sizes in gguf_package.GGML_QUANT_SIZES.items()}
    assert {kind: known[kind] for kind in TENSOR_TYPES if kind in known} == {
        kind: sizes for kind, sizes in TENSOR_TYPES.items() if kind in known
    }
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"is cut off: it has .* bytes, and its tensors end at"):
        check_model("llamacpp", str(path))


def test_the_good_header_is_good(tmp_path: Path) -> None:
    shape = gguf_shape(written(tmp_path, GOOD))
    assert shape
    assert shape.bytes_per_token() == 2 * 2 * (16 * 2 + 16 * 2)
