"""Train a tokenizer: byte-level BPE, or plain bytes, saved as a folder that `AutoTokenizer` loads.

The special tokens stand behind the trained vocabulary, so that id 0 is an ordinary token and the
mask token is the last row but one. Every text can be encoded (bytes are the alphabet) and decodes
to itself. Training is deterministic: the same documents give the same file.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.partial import partial_output

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK, PAD)
BYTES = 256


def train_byte_pair_encoding(
    texts: Iterable[str], vocab_size: int, extra_tokens: Sequence[str] = (), progress: bool = True
) -> Tokenizer:
    """Byte-level BPE over `texts` with at most `vocab_size` tokens, special tokens included.

    A small corpus may run out of pairs before `vocab_size` is reached.

    Raises:
        DataError: the size leaves no room for the 256 bytes and the special tokens.
    """
    specials = len(SPECIAL_TOKENS) + len(extra_tokens)
    if vocab_size < BYTES + specials:
        raise DataError(
            f"--vocab-size {vocab_size}: it must hold {BYTES} bytes and {specials} special tokens; the least legal "
            f"value is {BYTES + specials}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - specials,
        show_progress=progress,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_special_tokens(tokenizer, extra_tokens)


def byte_tokenizer(extra_tokens: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer whose tokens are the 256 bytes: token id = byte value, special tokens behind them."""
    tokenizer = Tokenizer(models.BPE({character: value for value, character in enumerate(_byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special_tokens(tokenizer, extra_tokens)


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte value.

    Printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on (GPT-2's table).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(BYTES, 2 * BYTES))
    return [chr(value) if value in printable else chr(next(shifted)) for value in range(BYTES)]


def _with_special_tokens(tokenizer: Tokenizer, extra_tokens: Sequence[str]) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *extra_tokens)]
    )
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, chat_template: str | None = None, overwrite: bool = False
) -> None:
    """Save as a Hugging Face folder; it appears under its name only when it is complete.

    Raises:
        DataError: the folder exists already and `overwrite` is off.
    """
    if folder.exists() and not overwrite:
        raise DataError(f"--output {folder}: it exists already; give another folder or --overwrite")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, mask_token=MASK, pad_token=PAD)
    if chat_template is not None:
        fast.chat_template = chat_template
    with partial_output(folder) as partial:
        fast.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
