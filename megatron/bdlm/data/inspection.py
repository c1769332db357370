"""Look at indexed data: statistics, one sample as training sees it with its noise, and a picture.

| t=0.31 |def f(x):\\n | t=0.87 | ret[urn] [x]...      corrupted tokens stand out, each block shows its noise level
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.indexed import check_pair
from megatron.bdlm.data.noise import Noised, corrupt
from megatron.bdlm.data.preprocess import unigram_entropy
from megatron.bdlm.data.pretraining import BDLMDatasetConfig, Sample, build_numbered_datasets, document_lengths
from megatron.bdlm.data.tokenizers import vocabulary_size
from megatron.bdlm.data.verification import sequence_lengths, token_chunks

BLOCK, CORRUPTED, PLAIN = "\x1b[36m", "\x1b[1;31m", "\x1b[0m"


@dataclass(frozen=True)
class Statistics:
    """What a prefix holds."""

    documents: int
    tokens: int
    dtype: str
    length_quantiles: dict[str, int]
    """Document lengths: least, 25%, median, 75%, 99%, most."""
    entropy: float
    """Unigram entropy in nats per token."""
    distinct: int
    frequent: list[tuple[int, float]]
    """Most frequent ids with their shares."""


def statistics(prefix: str, top: int = 10, progress: bool = False) -> Statistics:
    """Statistics of a prefix, every token read once.

    Raises:
        DataError: the pair is damaged.
    """
    summary = check_pair(prefix)
    lengths = sequence_lengths(prefix, summary)
    frequencies = np.zeros(0, dtype=np.int64)
    for _, part in token_chunks(prefix, summary, progress):
        counted = np.bincount(part.astype(np.int64))
        if counted.size > frequencies.size:
            frequencies = np.pad(frequencies, (0, counted.size - frequencies.size))
        frequencies[: counted.size] += counted
    names = {"least": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "99%": 0.99, "most": 1.0}
    quantiles = np.quantile(lengths, list(names.values()), method="lower")
    order = np.argsort(-frequencies, kind="stable")[:top]
    return Statistics(
        documents=len(lengths),
        tokens=summary.tokens,
        dtype=summary.dtype.name,
        length_quantiles=dict(zip(names, map(int, quantiles))),
        entropy=unigram_entropy(frequencies),
        distinct=int((frequencies > 0).sum()),
        frequent=[(int(token), float(frequencies[token] / summary.tokens)) for token in order if frequencies[token]],
    )


def training_sample(
    prefix: str, tokenizer: Any, index: int, seq_length: int, seed: int, separate_documents: bool = False
) -> Sample:
    """Sample `index` of one training pass over the whole prefix.

    Raises:
        DataError: the data give fewer samples.
    """
    with tempfile.TemporaryDirectory() as cache:
        config = BDLMDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            blend=([prefix], None),
            split="1,0,0",
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            path_to_cache=cache,
            separate_documents=separate_documents,
        )
        train, _, _ = build_numbered_datasets(config, (1, 0, 0), evaluation_samples=0)
        if not 0 <= index < len(train):
            raise DataError(
                f"--sample {index}: {prefix} gives {len(train)} samples of {seq_length} tokens; a legal value: 0"
            )
        return train[index]


def noised_sample(sample: Sample, config: BDLMConfig, seed: int, vocabulary: int) -> Noised:
    """The noise that training puts on a sample."""
    documents = document_lengths(sample["documents"]) if "documents" in sample else None
    return corrupt(
        sample["tokens"].numpy(),
        sample["eligible"].numpy(),
        config,
        seed,
        int(sample["sample_index"]),
        int(sample["epoch"]),
        documents=documents,
        vocab_size=vocabulary,
    )


def render(sample: Sample, noised: Noised, decode: Callable[[int], str], view: int = 0, colour: bool = True) -> str:
    """One noisy stream as text: block starts with their noise level, corrupted tokens marked (the clean text is shown).

    Without colour a corrupted token stands in brackets.
    """
    starts = set(noised.block_starts.tolist())
    tokens, corrupted, level = sample["tokens"].numpy(), noised.corrupted[view], noised.t[view]
    parts = []
    for place, token in enumerate(tokens.tolist()):
        if place in starts:
            bar = f"|{level[place]:.2f}|"
            parts.append(f"{BLOCK}{bar}{PLAIN}" if colour else bar)
        text = decode(token).replace("\r", "\\r").replace("\n", "\\n\n")
        if corrupted[place]:
            text = f"{CORRUPTED}{text}{PLAIN}" if colour else f"[{text}]"
        parts.append(text)
    return "".join(parts)


def plot(prefix: str, path: Path, levels: Optional[np.ndarray] = None) -> None:
    """Histograms to a PNG: document lengths (logarithmic), and noise levels `levels` if given."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sequence_lengths(prefix, check_pair(prefix))
    figure, axes = pyplot.subplots(
        1, 1 if levels is None else 2, figsize=(6 if levels is None else 11, 4), squeeze=False
    )
    edges = np.unique(np.geomspace(1, max(2, lengths.max()) + 1, 50).astype(np.int64))
    axes[0, 0].hist(np.maximum(lengths, 1), bins=edges)
    axes[0, 0].set(xscale="log", xlabel="tokens in a document", ylabel="documents", title=f"{len(lengths)} documents")
    if levels is not None:
        axes[0, 1].hist(levels, bins=np.linspace(0, 1, 41))
        axes[0, 1].set(
            xlabel="noise level t of a block", ylabel="blocks", title=f"{levels.size} blocks, mean {levels.mean():.3f}"
        )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def block_levels(sample_indices: range, length: int, config: BDLMConfig, seed: int) -> np.ndarray:
    """Noise levels of all blocks of some samples of `length` eligible tokens, float32."""
    tokens, eligible = np.zeros(length, dtype=np.int64), np.ones(length, dtype=bool)
    levels = []
    for index in sample_indices:
        noised = corrupt(tokens, eligible, config, seed, index, 0, mask_token_id=1, vocab_size=2)
        levels.append(noised.t[0][noised.block_starts])
    return np.concatenate(levels)


def decoder(tokenizer: Any) -> Callable[[int], str]:
    """One id -> text; ids that are no token of the tokenizer, and special tokens, show as such."""
    size = vocabulary_size(tokenizer)

    def decode(token: int) -> str:
        if not 0 <= token < size:
            return f"<{token}>"
        text = tokenizer.detokenize([token])
        return text if text else f"<{token}>"

    return decode
