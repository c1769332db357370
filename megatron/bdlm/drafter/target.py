"""The frozen target, run by `transformers`: hidden states of chosen layers, greedy answers.

    S tokens     D hidden     m feature layers

The feature of layer i is the output of decoder layer i (from 0), before the final norm. Documents of a sample are run
one by one, so that none sees another. Every rank runs whole samples: for long contexts prepare features once
(`features`), where each rank reads its own rows.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.bdlm.drafter.anchors import Segments
from megatron.bdlm.drafter.batch import DraftSample
from megatron.bdlm.drafter.format import DrafterError

KEPT = 8  # samples whose hidden states are kept: a micro-batch asks for features, then for last hidden states


def load_target(folder: Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> Any:
    """The model of a Hugging Face folder, frozen.

    Raises:
        DrafterError: transformers finds none.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise DrafterError(f"--dflash-target {folder}: no config.json in it. A legal value: a Hugging Face folder of the target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


class OnlineFeatures:
    """`batch.FeatureSource` that runs the target."""

    def __init__(self, target: Any, layer_ids: Sequence[int], dtype: torch.dtype):
        layers = target.base_model.layers
        self.target, self.dtype = target, dtype
        self._caught: dict[int, Tensor] = {}
        self._kept: OrderedDict[tuple, tuple[Tensor, Tensor]] = OrderedDict()
        self.layer_ids = tuple(layer_ids)
        for layer in self.layer_ids:
            if not 0 <= layer < len(layers):
                raise DrafterError(f"--dflash-layer-ids {layer}: layers 0..{len(layers) - 1} of the target. A legal value: {len(layers) // 2}")
            layers[layer].register_forward_hook(self._catcher(layer))

    def features(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), m * D]."""
        return self._states(sample)[0][torch.from_numpy(tokens)]

    def last_hidden(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), D], behind the final norm."""
        return self._states(sample)[1][torch.from_numpy(tokens)]

    def _catcher(self, layer: int):
        def catch(module, inputs, output):
            self._caught[layer] = output[0] if isinstance(output, tuple) else output

        return catch

    @torch.no_grad()
    def _states(self, sample: DraftSample) -> tuple[Tensor, Tensor]:
        key = (sample.sample_index, len(sample.tokens), hash(sample.tokens.tobytes()))
        if key not in self._kept:
            segments = Segments.of(sample.documents)
            parts = [
                self._run(sample.tokens[start:stop], bool(segments.is_text[start]))
                for start, stop in sorted(set(zip(segments.starts.tolist(), segments.stops.tolist())))
            ]
            self._kept[key] = tuple(torch.cat(part) for part in zip(*parts))
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _run(self, tokens: np.ndarray, is_text: bool) -> tuple[Tensor, Tensor]:
        """One document: features [S, m * D] and last hidden states [S, D]; zeros for padding, which nobody sees."""
        if not is_text:
            size = self.target.config.hidden_size
            return torch.zeros(len(tokens), len(self.layer_ids) * size, dtype=self.dtype), torch.zeros(len(tokens), size, dtype=self.dtype)
        ids = torch.from_numpy(np.ascontiguousarray(tokens))[None].to(self.target.device)
        last = self.target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        caught = torch.cat([self._caught[layer][0] for layer in self.layer_ids], -1)
        self._caught.clear()
        return caught.to(self.dtype).cpu(), last.to(self.dtype).cpu()


@torch.no_grad()
def greedy_answers(target: Any, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int = 16) -> list[list[int]]:
    """What the target itself says after each prompt, `new_tokens` at most; prompts of one length run together.

    Returns:
        Token ids behind each prompt, up to and with the end-of-sequence token.
    """
    stop = target.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [] if stop is None else [stop])
    answers: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), batch):
            some = numbers[start : start + batch]
            ids = torch.tensor([list(prompts[number]) for number in some], device=target.device)
            pad = min(stops) if stops else 0
            out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=pad)
            for number, row in zip(some, out[:, ids.shape[1] :].tolist()):
                end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
                answers[number] = row[:end]
    return answers
