"""Tokenizers as this project needs them: which row is the mask token, how large the vocabulary is, and identity.

Tokenizers are the engine's (`MegatronTokenizerText`): a run's `--tokenizer-type/--tokenizer-model`
and the data tools build them through the same `build_tokenizer`. A mask token is needed that no text
contains: the tokenizer's own, a reserved special token that the user names, or one new row behind
the vocabulary.

    ids 0 .. n-1          tokens of the tokenizer (n = `vocabulary_size`)
    id  n                 the new mask row, only if the tokenizer has no mask token
    ids size .. padded-1  padding rows of the embedding: never a token, never a prediction
"""

import hashlib
import json
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from megatron.bdlm.data.documents import DataError

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
)

_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n\tdef f(x_1):\n        return x_1**2  # 0.5e-3\n",
    "naïve café, Füße, señor; 你好，世界; Привет, мир; مرحبا; こんにちは; 👩‍🔬🚀",
)
"""Text whose encoding tells two tokenizers apart that differ in normalization or splitting only."""


@dataclass(frozen=True)
class TokenizerSource:
    """What names a tokenizer on a command line; the fields are the engine's flags."""

    tokenizer_type: str = "HuggingFaceTokenizer"
    tokenizer_model: Optional[str] = None
    vocab_file: Optional[str] = None
    merge_file: Optional[str] = None
    vocab_size: Optional[int] = None


def load_tokenizer(source: TokenizerSource) -> Any:
    """The engine's tokenizer for a source, as a training run with the same flags builds it.

    Raises:
        DataError: unknown type, or the engine cannot load it.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    if source.tokenizer_type not in TOKENIZER_TYPES:
        raise DataError(f"--tokenizer-type {source.tokenizer_type}: known types are {', '.join(TOKENIZER_TYPES)}")
    if source.tokenizer_type == "NullTokenizer" and source.vocab_size is None:
        raise DataError("--tokenizer-type NullTokenizer: needs --vocab-size, for example 1024")
    if source.tokenizer_type not in ("NullTokenizer", "GPT2BPETokenizer") and source.tokenizer_model is None:
        raise DataError(f"--tokenizer-type {source.tokenizer_type}: needs --tokenizer-model, a local folder or file")
    if source.tokenizer_type == "HuggingFaceTokenizer" and not os.path.isdir(source.tokenizer_model):
        # Anything else is taken for the name of a hub repository and tried over the network for half a minute.
        raise DataError(
            f"--tokenizer-model {source.tokenizer_model}: no such local folder; download the tokenizer or train one "
            "(tools/train_tokenizer.py)"
        )
    defaults = dict(
        rank=0,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        pad_vocab_size=False,
        padded_vocab_size=None,
        metadata_path=None,
        special_tokens=None,
        chat_template=None,
        trust_remote_code=False,
        tokenizer_hf_no_use_fast=False,
        tokenizer_hf_no_include_special_tokens=False,
        tiktoken_pattern=None,
        tiktoken_num_special_tokens=1000,
        tokenizer_sentencepiece_legacy=False,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        null_tokenizer_eod_id=None,
        null_tokenizer_pad_id=-1,
    )
    try:
        return build_tokenizer(SimpleNamespace(**{**defaults, **vars(source)}))
    except Exception as error:
        raise DataError(
            f"--tokenizer-model {source.tokenizer_model}: {source.tokenizer_type} cannot load it: {error}"
        ) from error


def _token_id(tokenizer: Any, *names: str) -> Optional[int]:
    """First of the named ids that the tokenizer has; its libraries miss attributes, or say None or -1."""
    for name in names:
        try:
            value = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError, TypeError, ValueError, KeyError, IndexError):
            continue
        if value is not None and int(value) >= 0:
            return int(value)
    return None


def mask_token_id(tokenizer: Any) -> Optional[int]:
    """Id of the tokenizer's own mask token, None if it has none."""
    return _token_id(tokenizer, "mask")


def end_of_document_id(tokenizer: Any) -> Optional[int]:
    """Id of the end-of-document token, None if it has none."""
    return _token_id(tokenizer, "eod", "eos")


def padding_id(tokenizer: Any) -> Optional[int]:
    """Id of the padding token, None if it has none."""
    return _token_id(tokenizer, "pad")


def vocabulary_size(tokenizer: Any) -> int:
    """Tokens of the tokenizer, added ones included, padding rows not."""
    return int(tokenizer.vocab_size)


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the embedding that mean something: `size` of them, the mask token among them."""

    size: int
    mask_token_id: int
    eod_token_id: Optional[int]
    tokenizer_size: int

    @property
    def mask_is_new_row(self) -> bool:
        """Whether the mask token is a row behind the tokenizer's vocabulary."""
        return self.mask_token_id >= self.tokenizer_size

    def padded(self, divisible_by: int, tensor_model_parallel_size: int = 1) -> int:
        """Embedding rows: `size` rounded up as the engine does (--make-vocab-size-divisible-by times TP)."""
        multiple = divisible_by * tensor_model_parallel_size
        return -(-self.size // multiple) * multiple

    def check_padded(self, padded_vocab_size: int) -> None:
        """Refuse an embedding that lacks rows of the vocabulary.

        Raises:
            DataError: the mask token or another token would lie outside.
        """
        if padded_vocab_size < self.size:
            raise DataError(
                f"--padded-vocab-size {padded_vocab_size}: the vocabulary has {self.size} rows (mask token "
                f"{self.mask_token_id}); a legal value: {self.padded(128)}"
            )


def resolve_vocabulary(tokenizer: Any, requested: Optional[int] = None) -> Vocabulary:
    """Vocabulary of a run: the mask token is `requested`, else the tokenizer's own, else a new row behind it.

    Raises:
        DataError: the requested id is outside, is the end-of-document token, or is an ordinary token.
    """
    size, own, eod = vocabulary_size(tokenizer), mask_token_id(tokenizer), end_of_document_id(tokenizer)
    legal = size if own is None else own
    mask = legal if requested is None else requested
    flag = f"--bdlm-mask-token-id {mask}"
    if not 0 <= mask <= size:
        raise DataError(
            f"{flag}: it must be one of the tokenizer's {size} ids or {size}, one new row behind them, and not in the "
            f"padding rows. A legal value: {legal}"
        )
    if mask == eod:
        raise DataError(
            f"{flag}: it is the end-of-document token, which text contains. A legal value: "
            f"{legal if legal != eod else size}"
        )
    if mask != own and mask < size and not _is_reserved(tokenizer, mask):
        raise DataError(
            f"{flag}: it is an ordinary token of the tokenizer, so that text could contain it. A legal value: {legal}"
        )
    return Vocabulary(size=max(size, mask + 1), mask_token_id=mask, eod_token_id=eod, tokenizer_size=size)


def vocabulary_without_mask(tokenizer: Any, rows: int) -> Vocabulary:
    """Vocabulary of a model that has no mask token (id -1) and `rows` tokens, of which the tokenizer may use fewer.

    Raises:
        DataError: the tokenizer has more.
    """
    used = vocabulary_size(tokenizer)
    if used > rows:
        raise DataError(f"--bdlm-diffusion-gemma: vocab_size {rows}, but the tokenizer has {used} tokens. A legal value: {used}")
    return Vocabulary(size=rows, mask_token_id=-1, eod_token_id=end_of_document_id(tokenizer), tokenizer_size=rows)


def _is_reserved(tokenizer: Any, token: int) -> bool:
    """Whether a token is a special one that no role uses; libraries that cannot tell say no."""
    inner = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    added = getattr(inner, "added_tokens_decoder", {}).get(token)
    roles = {_token_id(tokenizer, name) for name in ("eod", "eos", "bos", "pad", "unk", "cls", "sep")}
    return added is not None and added.special and token not in roles


def _vocabulary_items(tokenizer: Any) -> list[tuple[int, str]]:
    """(id, token) pairs in the order of ids; empty where the library does not list them."""
    inner = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    if hasattr(inner, "get_vocab"):
        return sorted((index, token) for token, index in inner.get_vocab().items())
    try:
        return list(enumerate(map(str, tokenizer.vocab)))
    except (AttributeError, NotImplementedError, TypeError):
        return []


def _merges(tokenizer: Any) -> list[str]:
    """Merge rules of a fast Hugging Face BPE, in order and in one notation; empty for others."""
    backend = getattr(getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def tokenizer_identity(tokenizer: Any, source: TokenizerSource) -> dict[str, Any]:
    """What tells two tokenizers apart: class, path, sizes, special ids, and a hash of vocabulary and behaviour.

    The hash covers the vocabulary, the merges and the encoding of probe texts, not file bytes: a moved folder, another
    chat template or another version of the library leave it alone, other merges or another normalizer do not.
    """
    probes = (
        []
        if source.tokenizer_type == "NullTokenizer"
        else [list(map(int, tokenizer.tokenize(text))) for text in _PROBES]
    )
    content = {
        "size": vocabulary_size(tokenizer),
        "vocabulary": _vocabulary_items(tokenizer),
        "merges": _merges(tokenizer),
        "probes": probes,
    }
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()
    model = source.tokenizer_model or source.vocab_file
    return {
        "type": source.tokenizer_type,
        "model": os.path.abspath(model) if model else None,
        "vocabulary_size": vocabulary_size(tokenizer),
        "eod_token_id": end_of_document_id(tokenizer),
        "mask_token_id": mask_token_id(tokenizer),
        "content_sha256": digest,
    }
