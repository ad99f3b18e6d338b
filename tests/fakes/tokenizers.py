"""Tiny tokenizers, trained by the library ``tokenizers`` as those of real models are, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

TEXT = (
    "the quick brown fox jumps over the lazy dog while a user asks the assistant for a story of the sea",
    "a system prompt says that answers are short, and that every answer names its source 0123456789",
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of many models (Qwen, SmolLM2): each turn begins and ends with a special token."""

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")


def byte_level_bpe() -> Tokenizer:
    """As Llama 3's and Qwen's: byte-level BPE, special tokens looked for in the raw text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return _finished(tokenizer)


def sentence_piece_bpe() -> Tokenizer:
    """As Llama 2's: marks in the place of spaces and before the text; BPE with bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.train_from_iterator(
        TEXT, BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return _finished(tokenizer)


def metaspace_unigram() -> Tokenizer:
    """As T5's and Gemma's kin: Unigram, and a space only before the very first word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        TEXT, UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return _finished(tokenizer)


def word_piece() -> Tokenizer:
    """As BERT's: lower case, words and punctuation, pieces of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXT, WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return _finished(tokenizer)


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    each.__name__: each for each in (byte_level_bpe, sentence_piece_bpe, metaspace_unigram, word_piece)
}


def write_model(directory: Path, tokenizer: Tokenizer | None = None, template: str = CHATML) -> Path:
    """Write what a model's directory holds of its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_bpe()).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    """Add special tokens, one of each behaviour, and the beginning that completions get."""
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", normalized=False, lstrip=True),
            AddedToken("<right>", normalized=False, rstrip=True),
            AddedToken("<word>", normalized=False, single_word=True),
            AddedToken("<|im_start|><s>", normalized=False),
            AddedToken("<|im", normalized=False),
        ]
    )
    tokenizer.add_tokens([AddedToken("Fox", normalized=True), AddedToken("<plain>", normalized=True)])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer
