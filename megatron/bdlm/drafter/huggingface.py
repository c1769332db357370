"""Real clients of an exported drafter: assisted generation of `transformers`, and the published reference package.

`transformers` (5.24) drafts with `assistant_model` and `speculation_type="dflash"`. Its one drafter class takes our weights
under two other names; it knows neither the selector nor a softcap, and its sliding mask is bidirectional, so it serves
DFlash drafters with full layers. DFlash2 goes through the package `dflash` (0.1.0, z-lab), of which one module is loaded.
"""

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import torch

from megatron.bdlm.drafter.format import ARCHITECTURES, DrafterConfig, DrafterError, read_config
from megatron.bdlm.drafter.model import Drafter

_RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant_of(drafter: Drafter) -> Any:
    """The drafter as the class that `transformers` ships, strictly loaded.

    Raises:
        DrafterError: a drafter that this client would run differently.
    """
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = drafter.shape
    _serves(config)
    made = MuseGlimmerAssistantConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps, max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, layer_types=list(config.layer_types),
        sliding_window=config.sliding_window or 1, block_size=config.block_size, mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
    )
    model = MuseGlimmerAssistantModel(made)
    tensors = {_RENAMED.get(name, name): tensor for name, tensor in drafter.state_dict().items()}
    model.load_state_dict(tensors, strict=True)
    return model.to(next(drafter.parameters()).dtype).eval()


def _serves(config: DrafterConfig) -> None:
    plain = config.output_multiplier == 1.0 and config.final_logit_softcapping is None and config.input_embedding_scale == 1.0
    if config.version != 1 or not plain or "sliding_attention" in config.layer_types or config.causal:
        raise DrafterError(
            "--client transformers: it runs DFlash with full, bidirectional layers and plain logits only. A legal value: --client reference"
        )


@contextmanager
def counted_verifications() -> Iterator[list[int]]:
    """Accepted lengths of every verification of `transformers` inside the block: matches + 1, without the prefill."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    lengths: list[int] = []
    stock = Generator.update_candidate_strategy

    def counting(self, input_ids, scores, num_matches):
        if not self.is_main_model_prefill:
            lengths.append(int(num_matches) + 1)
        return stock(self, input_ids, scores, num_matches)

    Generator.update_candidate_strategy = counting
    try:
        yield lengths
    finally:
        Generator.update_candidate_strategy = stock


@torch.no_grad()
def assisted(target: Any, assistant: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """(tokens behind the prompt, accepted length of each verification), greedy."""
    ids = torch.tensor([prompt], device=target.device)
    with counted_verifications() as lengths:
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, speculation_type="dflash", do_sample=False,
            max_new_tokens=new_tokens,
        )
    return out[0, len(prompt) :].tolist(), lengths


def reference_package() -> Any:
    """The module `dflash.model` of the installed package, without the package's other imports.

    Raises:
        DrafterError: the package is not installed.
    """
    found = importlib.util.find_spec("dflash")
    if found is None or not found.submodule_search_locations:
        raise DrafterError("--client reference: it needs the package dflash. A legal value: pip install --no-deps dflash==0.1.0")
    path = Path(found.submodule_search_locations[0]) / "model.py"
    spec = importlib.util.spec_from_file_location("dflash_reference_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def referenced(target: Any, folder: Path, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """(tokens behind the prompt, tokens produced by each verification) of the reference package, greedy, from an exported folder."""
    module = reference_package()
    model = getattr(module, ARCHITECTURES[read_config(folder).version]).from_pretrained(folder, dtype=target.dtype).to(target.device)
    ids = torch.tensor([prompt], device=target.device)
    stock = module._crop_to
    edges: list[int] = []

    def counting(cache, length):
        edges.append(int(length))
        return stock(cache, length)

    module._crop_to = counting
    out = model.spec_generate(target, ids, new_tokens, stop_token_ids=None)
    # the target's cache is cropped to the prompt, then after each verification; the drafter's in between to the anchor
    reached = sorted(set(edges))
    return out[0, len(prompt) :].tolist(), [after - before for before, after in zip(reached, reached[1:])]

