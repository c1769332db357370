"""Options of drafter training: one dataclass whose fields are flags, and what they resolve to for a target."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.bdlm.drafter.anchors import AnchorDraw
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError, default_layer_ids, read_config
from megatron.bdlm.drafter.objective import DraftObjective


SHAPE = (
    "dflash_version", "dflash_layers", "dflash_layer_ids", "dflash_block_size", "dflash_mask_token_id", "dflash_sliding_window",
    "dflash_conv_kernel_size", "dflash_conv_group_size", "dflash_selector_rank", "dflash_selector_top_k",
)  # fmt: skip
"""Options that say what a drafter is, not how it is trained."""


@dataclass
class DrafterOptions:
    """Options of a drafter, its target and its data; a field is a flag."""

    dflash_target: Optional[str] = None
    """Hugging Face folder of the frozen target: shape, embedding and output layer; its layers run where features are not prepared."""

    dflash_data: Optional[str] = None
    """Folder of samples that tools/generate_dflash_data.py wrote."""

    dflash_features: Optional[str] = None
    """Folder of tools/prepare_dflash_features.py; without it the target runs beside the drafter."""

    dflash_init: Optional[str] = None
    """Published drafter folder to start from; without it weights are drawn from --seed."""

    dflash_version: Literal[1, 2] = 1
    """1: DFlash. 2: DFlash2, with block-local convolutions and a candidate selector."""

    dflash_layers: int = 5
    """Draft layers n."""

    dflash_layer_ids: Optional[str] = None
    """Target layers whose outputs are the features, comma-separated, counted from 0. By default spread as published drafters have them."""

    dflash_block_size: int = 16
    """Rows of a block: the anchor and B - 1 masks."""

    dflash_mask_token_id: Optional[int] = None
    """Token whose embedding stands for a mask; one that text does not contain."""

    dflash_sliding_window: Optional[int] = None
    """Make every draft layer see the last so many tokens only, causal inside the block."""

    dflash_conv_kernel_size: int = 2
    """Taps of DFlash2's convolution."""

    dflash_conv_group_size: int = 64
    """Channels that share a dynamic tap of DFlash2's convolution; it divides the hidden size."""

    dflash_selector_rank: int = 256
    """Rank of DFlash2's codebooks."""

    dflash_selector_top_k: int = 16
    """Candidates of a row that DFlash2's selector scores."""

    dflash_anchors: int = 512
    """Most anchors of a sample, drawn anew in every epoch."""

    dflash_anchor_mode: Literal["uniform", "locality"] = "uniform"
    """uniform: without replacement. locality: a random start and strides of a block, so that windows overlap."""

    dflash_anchors_per: Literal["sample", "document"] = "sample"
    """What --dflash-anchors limits; document keeps packed short documents from starving."""

    dflash_loss: Literal["ce", "kl", "dpace"] = "ce"
    """ce: cross entropy with position weights. kl: KL to the target's distribution. dpace: weights by what can be reached."""

    dflash_gamma: Optional[float] = None
    """Decay of the position weights exp(-(k-1)/gamma); by default 7 at block size 16, 5 at 10, 4 at 8."""

    dflash_dpace_alpha: float = 0.5
    """D-PACE: share of a row that counts as accepted whatever its probability."""

    dflash_dpace_variant: Literal["suffix", "prefix", "continuation"] = "suffix"
    """D-PACE: the weight of row k is the sum of P_j from k on, P_k alone, or the sum divided by P_k."""

    dflash_lk_loss: Literal["none", "tv", "lambda"] = "none"
    """What of the label's likelihood p is minimised: -log p, 1 - p, or a mixture that follows the mean p."""

    dflash_selector_weight: float = 1.0
    """Factor of DFlash2's selector loss."""

    dflash_chunk: int = 1024
    """Draft rows whose logits exist at a time."""

    dflash_held_out: int = 0
    """Last samples of the folder, kept for validation."""

    dflash_transport: Literal["auto", "direct", "hierarchical", "ring", "allgather"] = "direct"
    """How context keys and values move between block-parallel ranks."""

    dflash_movement: Literal["auto", "keys", "queries"] = "auto"
    """What moves between block-parallel ranks: context keys and values, or queries and partial results; auto: what is less."""

    block_parallel_size: Optional[int] = None
    """Ranks over which anchors are dealt; it divides --context-parallel-size, which is the default. 1: every rank drafts all."""

    def check(self) -> None:
        """Raises DrafterError for what is missing."""
        for name, legal in (("dflash_target", "a Hugging Face folder"), ("dflash_data", "a folder of tools/generate_dflash_data.py")):
            if getattr(self, name) is None:
                raise DrafterError(f"--{name.replace('_', '-')}: it is needed. A legal value: {legal}")
        if self.dflash_mask_token_id is None and self.dflash_init is None:
            raise DrafterError("--dflash-mask-token-id: it is needed. A legal value: the id of a token that text does not contain")
        for name, legal in (("dflash_anchors", 512), ("dflash_layers", 5), ("dflash_chunk", 1024), ("dflash_sliding_window", 1024)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DrafterError(f"--{name.replace('_', '-')} {value}: at least one. A legal value: {legal}")
        if self.dflash_gamma is not None and self.dflash_gamma <= 0:
            raise DrafterError(f"--dflash-gamma {self.dflash_gamma}: weights fall with the place in the block. A legal value: 7.0")

    def check_same_shape(self, saved: "DrafterOptions", folder: str) -> None:
        """Refuse to go on from a checkpoint of another drafter (faults E5).

        Args:
            saved: the options inside the checkpoint of `folder`.

        Raises:
            DrafterError: naming the flag and both values.
        """
        for name in SHAPE:
            ours, theirs = getattr(self, name), getattr(saved, name)
            if ours != theirs:
                legal = "unset" if theirs is None else theirs
                raise DrafterError(
                    f"--{name.replace('_', '-')} {ours}: the checkpoint in {folder} is of a drafter with {theirs}. A legal value: {legal}"
                )

    def layer_ids(self) -> Optional[tuple[int, ...]]:
        """The layers asked for; None for the default."""
        if self.dflash_layer_ids is None:
            return None
        try:
            return tuple(int(part) for part in self.dflash_layer_ids.split(","))
        except ValueError:
            raise DrafterError(f"--dflash-layer-ids {self.dflash_layer_ids}: numbers and commas. A legal value: 1,9,17") from None

    def config(self) -> DrafterConfig:
        """The drafter's shape: that of --dflash-init, or made after the target's config.json."""
        if self.dflash_init is not None:
            return read_config(Path(self.dflash_init))
        target = target_config(Path(self.dflash_target))
        heads, layers = target["num_attention_heads"], target["num_hidden_layers"]
        rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise DrafterError(
                f"--dflash-target {self.dflash_target}: rotary positions of type {rope['rope_type']}; drafters have plain ones. "
                "A legal value: a target with rope_type default"
            )
        second = dict(
            conv_kernel_size=self.dflash_conv_kernel_size, conv_group_size=self.dflash_conv_group_size,
            selector_rank=self.dflash_selector_rank, selector_top_k=self.dflash_selector_top_k,
        )
        window = self.dflash_sliding_window
        return DrafterConfig(
            hidden_size=target["hidden_size"],
            intermediate_size=target["intermediate_size"],
            num_hidden_layers=self.dflash_layers,
            num_attention_heads=heads,
            num_key_value_heads=target.get("num_key_value_heads") or heads,
            head_dim=target.get("head_dim") or target["hidden_size"] // heads,
            vocab_size=target["vocab_size"],
            num_target_layers=layers,
            target_layer_ids=self.layer_ids() or default_layer_ids(layers, self.dflash_layers),
            mask_token_id=self.dflash_mask_token_id,
            block_size=self.dflash_block_size,
            rms_norm_eps=target.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
            max_position_embeddings=target.get("max_position_embeddings", 32768),
            layer_types=("sliding_attention",) * self.dflash_layers if window else (),
            sliding_window=window,
            **(second if self.dflash_version == 2 else {}),
        )

    def draw(self, seed: int, block_size: int) -> AnchorDraw:
        return AnchorDraw(self.dflash_anchors, block_size, self.dflash_anchor_mode, self.dflash_anchors_per, seed)

    def objective(self) -> DraftObjective:
        return DraftObjective(
            self.dflash_loss, self.dflash_gamma, self.dflash_dpace_alpha, self.dflash_dpace_variant, self.dflash_lk_loss,
            self.dflash_selector_weight, self.dflash_chunk,
        )


def target_config(folder: Path) -> dict[str, Any]:
    """config.json of a target; that of the text part where there are several."""
    path = folder / "config.json"
    if not path.is_file():
        raise DrafterError(f"--dflash-target {folder}: no config.json in it. A legal value: a Hugging Face folder of the target")
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("text_config", config)


def options_from_args(args: Any) -> DrafterOptions:
    """This group out of a parsed argument namespace, checked."""
    options = DrafterOptions(**{field.name: getattr(args, field.name) for field in fields(DrafterOptions)})
    options.check()
    return options
