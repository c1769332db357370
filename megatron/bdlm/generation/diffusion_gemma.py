"""Sampling from DiffusionGemma: canvas after canvas, each denoised from random tokens (docs/diffusion_gemma.md).

    clean run of what is new (the prompt, then each finished canvas) -> its keys and values go to the cache
    x = random tokens; for c = N .. 1 (steps that remain):
        z = logits(x, signal of the step before) / T(c)          T(c) = t_min + (t_max - t_min) c / N
        y = a token per row from softmax(z), g = argmax z, H = entropy of each row
        accept rows in ascending order of H while the sum of the entropies before them is within the bound
        x = accepted ? y : a fresh random token                  not sticky: every row may be drawn again
        stop a sequence whose g did not change and whose mean H is below a threshold; its canvas stays g
        signal = z

The canvas is g, not x. Source: the published `generate` of transformers; random numbers are drawn in its order, so that
the same seed gives the same tokens.

Shapes: b sequences, S canvas length, V vocabulary.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.bdlm.generation.cache import KeyValueCache
from megatron.bdlm.generation.rows import masked_attention


@dataclass(frozen=True)
class CanvasOptions:
    """How canvases are sampled; defaults are the published ones."""

    max_new_tokens: int = 256  # rounded up to whole canvases
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1  # steps over which the most probable canvas must not change
    confidence_threshold: float = 0.005  # mean entropy below which a sequence may stop
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: Optional[int] = None  # fills what stands behind an end of text; None: nothing is replaced

    def __post_init__(self):
        for name in ("max_new_tokens", "max_denoising_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least one. A legal value: {CanvasOptions.__dataclass_fields__[name].default}")

    @classmethod
    def of_folder(cls, folder: Optional[Path], **wishes: Any) -> "CanvasOptions":
        """Values of generation_config.json in `folder` (token ids else of config.json), over them the wishes that are not None."""
        values: dict[str, Any] = {}
        if folder is not None and (folder / "config.json").is_file():
            text = json.loads((folder / "config.json").read_text()).get("text_config", {})
            values = {name: text.get(name) for name in ("eos_token_id", "pad_token_id")}
        if folder is not None and (folder / "generation_config.json").is_file():
            values |= json.loads((folder / "generation_config.json").read_text())
        known = {name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        known |= {name: value for name, value in (values.get("sampler_config") or {}).items() if name == "entropy_bound"}
        if values.get("eos_token_id") is not None:
            given = values["eos_token_id"]
            known["eos_token_ids"] = tuple(given) if isinstance(given, list) else (given,)
        return cls(**known | {name: value for name, value in wishes.items() if value is not None})


# ---- rules of a step ---------------------------------------------------------------------------


def temperature(remaining: int, options: CanvasOptions) -> float:
    """T(c) with c = `remaining` steps, from N down to 1: 0.8 to 0.4083 for the defaults, never t_min itself."""
    return options.t_min + (options.t_max - options.t_min) * remaining / options.max_denoising_steps


def entropies(logits: Tensor) -> Tensor:
    """Entropy of each row in nats, [.., V] -> [..]."""
    logs = logits.log_softmax(-1, dtype=torch.float32)
    return -(logs.exp() * logs).sum(-1)


def accepted(entropy: Tensor, bound: float) -> Tensor:
    """Which rows are accepted, [b, S] -> bool: in ascending order, while the sum before a row is within the bound.

    Entropies .0079 .0560 .1985 .6730 and bound .1: the sums before them are 0, .0079, .0639, .2624; three are accepted.
    """
    ordered, index = entropy.sort(-1)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(index, dtype=torch.bool).scatter(-1, index, before <= bound)


class Stopping:
    """Which sequences have settled: the same most probable canvas for some steps, and little entropy."""

    def __init__(self, options: CanvasOptions):
        self.options, self.history = options, []

    def settled(self, canvas: Tensor, entropy: Tensor) -> Tensor:
        """bool [b] for the step's most probable canvas [b, S] and entropies [b, S]; the first step never is, with a threshold."""
        wanted = self.options.stability_threshold
        stable = torch.full(canvas.shape[:1], len(self.history) >= wanted, device=canvas.device)
        for earlier in self.history[len(self.history) - wanted :] if wanted else ():
            stable &= (earlier == canvas).all(-1)
        self.history.append(canvas)
        return stable & (entropy.mean(-1) < self.options.confidence_threshold)


# ---- rows --------------------------------------------------------------------------------------


@dataclass
class CanvasParams(PackedSeqParams):
    """Sequence parameters of one forward: either clean rows that extend the cache, or one canvas after it."""

    cache: Optional[KeyValueCache] = None
    position_ids: Optional[Tensor] = None  # int64 [s]
    is_clean: Optional[Tensor] = None  # bool [s]
    clean: bool = False
    _masks: dict[Optional[int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: KeyValueCache, rows: int, clean: bool) -> "CanvasParams":
        """Parameters of `rows` rows behind the cached ones; all sequences of the cache have one length."""
        first, device = int(cache.lengths[0]), cache.lengths.device
        return cls(
            qkv_format="sbhd", max_seqlen_q=rows, max_seqlen_kv=first + rows, cache=cache, clean=clean,
            position_ids=torch.arange(first, first + rows, device=device),
            is_clean=torch.full((rows,), clean, device=device),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer_number: int, softmax_scale: Optional[float],
        window: Optional[int], final: bool = False,
    ) -> Tensor:
        """Attention of one layer: [s, b, n, d], [s, b, k, d], [s, b, k, d_v] -> [s, b, n, d_v].

        A clean row sees W keys up to itself; a row of a canvas sees the last W - 1 cached ones and the whole canvas.
        """
        keys, values = self.cache.write(layer_number, key, value)
        if window not in self._masks:
            self._masks[window] = self._visible(keys.size(0), window)
        return masked_attention(query, keys, values, self._masks[window], softmax_scale)

    def _visible(self, keys: int, window: Optional[int]) -> Tensor:
        """bool [1, s, m]"""
        index = torch.arange(keys, device=self.position_ids.device)
        position = self.position_ids[:, None]
        if not self.clean:
            first = int(self.position_ids[0]) - keys if window is None else int(self.position_ids[0]) - (window - 1)
            return (index >= first).expand(1, len(position), -1)
        visible = index <= position
        return (visible if window is None else visible & (index > position - window))[None]


# ---- the loop ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CanvasResult:
    """What `sample_canvases` made."""

    sequences: Tensor  # int64 [b, prompt + new tokens], padded behind the end of a sequence
    decoder_passes: Tensor  # int64 [b], denoising steps of each sequence while it was not finished
    new_tokens: Tensor  # int64 [b], without padding

    @property
    def tokens_per_forward(self) -> Tensor:
        return self.new_tokens / self.decoder_passes


@torch.no_grad()
def sample_canvases(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]] | Tensor, canvas_length: int, options: CanvasOptions,
    device: torch.device | str = "cpu",
) -> CanvasResult:
    """Continue prompts of one length.

    Args:
        model: a `DiffusionGemmaModel` on one pipeline stage, logits not split over the vocabulary.
        prompts: token ids, all of one length, not empty.

    Raises:
        ValueError: prompts of different lengths.
    """
    if not torch.is_tensor(prompts):
        if len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
            raise ValueError("prompts: canvases start at one token, so prompts sampled together have one length of at least 1")
        prompts = torch.tensor(prompts)
    sequences = prompts.to(device)
    batch = len(sequences)
    cache = KeyValueCache(batch, device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    passes = torch.zeros(batch, dtype=torch.int64, device=device)
    new = sequences
    for _ in range(math.ceil(options.max_new_tokens / canvas_length)):
        _encode(model, new, cache)
        canvas, steps = _denoise(model, cache, canvas_length, options, finished)
        passes += steps
        new, finished = _finished(canvas, finished, options)
        sequences = torch.cat((sequences, new), dim=1)
        if finished.all():
            break
    added = sequences[:, prompts.size(1) :]
    real = torch.ones_like(added) if options.pad_token_id is None else (added != options.pad_token_id)
    return CanvasResult(sequences, passes, real.sum(1))


def _encode(model: torch.nn.Module, tokens: Tensor, cache: KeyValueCache) -> None:
    """Extend the cache by clean rows [b, s]."""
    params = CanvasParams.of(cache, tokens.size(1), clean=True)
    positions = params.position_ids.expand(len(tokens), -1)
    model(tokens, positions, packed_seq_params=params, output_processor=lambda *, hidden_states, **_: hidden_states)
    cache.advance(torch.full_like(cache.lengths, tokens.size(1)))


def _denoise(
    model: torch.nn.Module, cache: KeyValueCache, length: int, options: CanvasOptions, finished: Tensor
) -> tuple[Tensor, Tensor]:
    """One canvas: its tokens [b, S] and the steps that each sequence took [b]."""
    vocabulary, batch, device = model.candidate_tokens, len(finished), finished.device

    def random_tokens() -> Tensor:
        return torch.randint(0, vocabulary, (batch, length), device=device)

    canvas, logits, stopping = random_tokens(), None, Stopping(options)
    best, done, steps = canvas, torch.zeros_like(finished), torch.zeros(batch, dtype=torch.int64, device=device)
    for remaining in range(options.max_denoising_steps, 0, -1):
        steps += ~(done | finished)
        params = CanvasParams.of(cache, length, clean=False)
        soft = None if logits is None else model.soft_of_logits(logits)
        raw = model(canvas, params.position_ids.expand(batch, -1), packed_seq_params=params, soft=soft)[..., :vocabulary]
        scaled = raw / temperature(remaining, options)
        sampled = torch.multinomial(scaled.softmax(-1, dtype=torch.float32).flatten(0, 1), 1).view(batch, length)
        take = accepted(entropies(scaled), options.entropy_bound)
        moved = torch.where(take, sampled, random_tokens())
        keep = done[:, None]
        best = torch.where(keep, best, scaled.argmax(-1))
        canvas = torch.where(keep, canvas, moved)
        logits = scaled if logits is None else torch.where(keep[..., None], logits, scaled)
        done = done | stopping.settled(best, entropies(logits))
        if done.all():
            break
    return best, steps


def _finished(canvas: Tensor, finished: Tensor, options: CanvasOptions) -> tuple[Tensor, Tensor]:
    """The canvas with padding behind the first end of text, and which sequences have ended."""
    ends = torch.isin(canvas, torch.tensor(options.eos_token_ids, device=canvas.device))
    if options.pad_token_id is not None:
        behind = ends.cumsum(-1) - ends.long() > 0
        canvas = canvas.masked_fill(behind | finished[:, None], options.pad_token_id)
    return canvas, finished | ends.any(-1)
