"""An exported Hugging Face folder as the sampler's model: `transformers` runs it, the engine is not needed.

`transformers` knows the folder as an autoregressive model. Its layers take the attention function by name, and hand on
keyword arguments that they do not know, so the block diffusion rules enter there: every layer's attention calls
`SamplingParams.attend`, on the rows, positions and cache of the sampler. Everything else (projections, rotary, MLP) is
the library's own code, which makes this an independent check of an export.

Shapes: b sequences, s rows of a forward, n query heads, k key-value heads, d head size.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from megatron.bdlm.checkpoint.model_options import BDLM_KEYS
from megatron.bdlm.generation.rows import BlockRules, SamplingParams

ATTENTION = "bdlm_sampling"
"""Name of our attention function in `transformers`; it builds no mask for a name that it does not know one for."""

_KINDS = {"label_shift": str, "clean_attention": str, "noisy_attention": str, "corruption": str, "keep_mask_logit": bool}

RULES = {name: _KINDS.get(name, int) for name in BDLM_KEYS}
"""Keys of config.json that an export has for a block diffusion model, and their types."""


class FolderError(ValueError):
    """A folder that cannot be sampled from; the message says why."""


def block_rules(folder: Path) -> BlockRules:
    """What an exported folder's config.json fixes.

    Raises:
        FolderError: no such file, keys that an export of this project has are missing or of another type, or a corruption
            that block by block unmasking does not serve.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FolderError(f"--hf {folder}: no config.json in it; a legal value is a folder of `convert_checkpoint.py export`")
    config = json.loads(path.read_text(encoding="utf-8"))
    faulty = sorted(name for name, kind in RULES.items() if not isinstance(config.get(name), kind))
    if faulty:
        raise FolderError(
            f"--hf {folder}: config.json has no valid {', '.join(faulty)}; it is no export of a block diffusion model "
            "(`tools/convert_checkpoint.py export` writes them)"
        )
    values = {name: config[name] for name in RULES}
    corruption = values.pop("corruption")
    if corruption != "absorbing":
        raise FolderError(
            f"--hf {folder}: config.json says corruption {corruption}; the sampler fills masks, which this model never saw. "
            "A legal value: absorbing (in training)"
        )
    return BlockRules(vocab_size=values.pop("candidate_tokens"), **values)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    *,
    sampling: SamplingParams,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention signature; [b, n, s, d], [b, k, s, d] twice -> [b, s, n, d]."""
    query, key, value = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out = sampling.attend(
        query, key, value, layer_number=module.layer_idx + 1, softmax_scale=scaling, window=sliding_window
    )
    return out.permute(1, 0, 2, 3).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True)
class TransformersSampler:
    """The sampler's `Model` over a model of `transformers` that was made with our attention function."""

    model: torch.nn.Module

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """int64 [b, s] twice -> [b, s, vocabulary]; see `sampler.Model`."""
        return self.model(input_ids, position_ids=position_ids, use_cache=False, sampling=params).logits


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | str = "auto") -> TransformersSampler:
    """The model of an exported folder.

    Args:
        dtype: type to compute in; 'auto' takes that of the files.

    Raises:
        FolderError: tensors that are missing, unexpected or of another shape, by name.
    """
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True, output_loading_info=True
    )
    faults = {kind: sorted(map(str, names)) for kind, names in told.items() if names}
    if faults:
        raise FolderError(f"--hf {folder}: " + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults.items()))
    return TransformersSampler(model.to(device).eval())


def load_tokenizer(folder: Path, flag: str = "--hf") -> Any:
    """The tokenizer of an exported folder, or of another one that `flag` names.

    Raises:
        FolderError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{flag} {folder}: transformers finds no tokenizer in it: {error}. A legal value: a folder with tokenizer.json"
        ) from error
