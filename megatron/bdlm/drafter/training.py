"""Drafter training in the engine's loop: arguments, model, micro-batch, loss.

The drafter's weights are replicated over all ranks; data and context parallelism share the work. The target is frozen and
no part of the model: only the drafter is in a checkpoint.

The loss is divided once, by the sum of the weights over the whole global batch (`WeightSum`), which the engine's own
integer count of tokens could not hold.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Iterator, Optional

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.argument_utils import ArgumentGroupFactory, gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from megatron.bdlm.attention.functional import DraftLink
from megatron.bdlm.drafter.attention import PlannedAttention
from megatron.bdlm.drafter.batch import Cell, DraftBatch, FeatureSource, build_batch
from megatron.bdlm.drafter.data import DraftDataset, PreparedFeatures, read_samples, samples_of, split_numbers
from megatron.bdlm.drafter.folder import read_drafter, target_tables
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError
from megatron.bdlm.drafter.model import Drafter
from megatron.bdlm.drafter.objective import draft_forward, draft_loss
from megatron.bdlm.drafter.options import DrafterOptions, options_from_args
from megatron.bdlm.drafter.target import OnlineFeatures, load_target
from megatron.bdlm.parallel.state import get_block_parallel_group, hierarchical_sizes
from megatron.bdlm.platform import cpu
from megatron.bdlm.training import hooks
from megatron.bdlm.training.arguments import ENGINE_DEFAULTS
from megatron.bdlm.training.options import checkpoint_arguments, starting_folder

_VOCABULARY_NOBODY_USES = 2  # the engine wants a tokenizer; ids come from the samples


# ---- arguments ----------------------------------------------------------------------------------


def _provider(parser, defaults: dict[str, Any]):
    ArgumentGroupFactory(DrafterOptions).build_group(parser, "dflash")
    parser.set_defaults(**ENGINE_DEFAULTS)
    if cpu.is_active():
        parser.set_defaults(**cpu.CPU_DEFAULTS)
    parser.set_defaults(**defaults)
    return parser


def prepare() -> Any:
    """Parse, validate, and build the engine's configuration container; the model's shape comes from the target.

    Raises:
        DrafterError: options that cannot run.
    """
    given = parse_args(functools.partial(_provider, defaults={}), ignore_unknown_args=True)
    options = options_from_args(given)
    config, samples = options.config(), read_samples(options.dflash_data)
    shape = dict(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, kv_channels=config.head_dim, group_query_attention=True,
        num_query_groups=config.num_key_value_heads, seq_length=samples.seq_length, max_position_embeddings=samples.seq_length,
        swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True,
        tokenizer_type="NullTokenizer", vocab_size=_VOCABULARY_NOBODY_USES,
    )
    args = parse_and_validate_args(extra_args_provider=functools.partial(_provider, defaults=shape))
    check_layout(args, options)
    folder = starting_folder(args.load, args.pretrained_checkpoint)
    saved = checkpoint_arguments(folder)
    if saved is not None:
        options.check_same_shape(options_from_args(saved), folder)
    options.objective()  # an unknown combination is refused before any rank starts
    size = args.context_parallel_size
    args.block_parallel_size = options.block_parallel_size = options.block_parallel_size or size
    args.hierarchical_context_parallel_sizes = hierarchical_sizes(size, args.block_parallel_size)
    model_config = gpt_config_from_args(args, model_config_cls=DrafterModelConfig)
    model_config.drafter, model_config.init, model_config.seed = config, options.dflash_init, args.seed
    hooks.install(draft_rows, weights)
    return pretrain_cfg_container_from_args(args, model_config)


def check_layout(args: Any, options: DrafterOptions) -> None:
    """Refuse layouts that the drafter does not serve.

    Raises:
        DrafterError: naming the flag, its value, the rule and a legal value.
    """
    for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        if getattr(args, flag) != 1:
            raise DrafterError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: a drafter's weights are whole on every rank. A legal value: 1")
    size, slots = args.context_parallel_size, options.block_parallel_size
    if slots is not None and (slots < 1 or size % slots):
        raise DrafterError(f"--block-parallel-size {slots}: it must divide --context-parallel-size {size}. A legal value: {size}")
    if args.fp16:
        raise DrafterError("--fp16: the loss is scaled once, after all ranks. A legal value: --bf16")


# ---- model --------------------------------------------------------------------------------------


class DrafterModel(MegatronModule):
    """The drafter as the engine's model: `forward` takes a batch and gives the hidden states of its draft rows."""

    def __init__(self, config: Any, drafter: Drafter, pg_collection: Any):
        super().__init__(config=config)
        self.drafter = drafter
        self.pg_collection = pg_collection  # the engine asks the model for its process groups
        self.share_embeddings_and_output_weights = False

    def set_input_tensor(self, input_tensor: Any) -> None:
        """For the engine: there is one pipeline stage, nothing comes in."""

    def forward(self, batch: DraftBatch, embedding: torch.Tensor, attend: PlannedAttention) -> torch.Tensor:
        return draft_forward(self.drafter, batch, embedding, attend)


@dataclass(kw_only=True)
class DrafterModelConfig(GPTModelConfig):
    """The engine's configuration and the drafter's shape."""

    builder: ClassVar[str] = "megatron.bdlm.drafter.training.DrafterModelBuilder"
    drafter: Optional[DrafterConfig] = None
    init: Optional[str] = None
    seed: int = 1234


class DrafterModelBuilder(GPTModelBuilder):
    """Builds the one stage of a drafter."""

    def build_model(self, pg_collection: Any, pre_process=None, post_process=None, vp_stage=None) -> DrafterModel:
        config = self._model_config
        if config.init is not None:
            drafter = read_drafter(config.init, torch.float32)
        else:
            drafter = Drafter(config.drafter).initialise(config.seed, config.transformer.init_method_std)
        return DrafterModel(config.transformer, drafter, pg_collection)


# ---- target and data ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The frozen side of this rank."""

    embedding: torch.Tensor  # [V, D]
    head: torch.Tensor  # [V, D]
    source: FeatureSource


@functools.lru_cache(maxsize=1)
def frozen_target() -> Target:
    """Embedding, output layer and features of the run's target, in the run's type on this rank's device."""
    args = get_args()
    options, device = options_from_args(args), torch.device(torch.cuda.current_device())
    config, dtype = options.config(), args.params_dtype
    if options.dflash_features is not None:
        source = PreparedFeatures(options.dflash_features, read_samples(options.dflash_data), config.target_layer_ids, dtype)
    else:
        source = OnlineFeatures(load_target(options.dflash_target, dtype, device), config.target_layer_ids, dtype)
    embedding, head = (table.to(device, dtype) for table in target_tables(options.dflash_target))
    return Target(embedding, head, source)


def build_datasets(args: Any, sample_counts: tuple) -> tuple[Any, Any, Any]:
    """Train and validation samples; every rank reads its own."""
    options = options_from_args(args)
    samples = read_samples(options.dflash_data)
    train, held_out = split_numbers(len(samples), options.dflash_held_out)
    wanted, validation = sample_counts[0], sample_counts[1] or 0
    if validation and held_out is None:
        raise DrafterError(f"--dflash-held-out 0: --eval-iters {args.eval_iters} asks for validation. A legal value: --eval-iters 0")
    once = args.eval_iters * getattr(args, "eval_global_batch_size", args.global_batch_size)
    return (
        DraftDataset(samples, train, wanted, args.seed),
        DraftDataset(samples, held_out, validation, repeat=once) if validation else None,
        None,
    )


# ---- a micro-batch ------------------------------------------------------------------------------


draft_rows = hooks.RowCounter()
"""Draft rows of the current iteration on this rank."""


class WeightSum(hooks.TokenCount):
    """Divides gradients by the sum of weights over the global batch; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: Optional[torch.Tensor] = None

    def add(self, weight: torch.Tensor) -> None:
        """Weights of one micro-batch of this rank, []."""
        weight = weight.detach().double()
        self._pending = weight if self._pending is None else self._pending + weight

    def finalize(self, model, num_tokens: Optional[torch.Tensor] = None, **kwargs) -> None:
        """For the engine's `finalize_model_grads_func`."""
        finalize_model_grads(model, None, **kwargs)
        total, self._pending = self._pending, None
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        scale = torch.where(total > 0, 1 / total, 0).float()
        for chunk in model:
            chunk.scale_gradients(scale)
        self.tokens = total

    def value(self) -> float:
        return 0.0 if self.tokens is None else float(self.tokens)


weights = WeightSum()


def draft_link(options: DrafterOptions) -> DraftLink:
    """The process groups of this rank."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return DraftLink()
    inner = parallel_state.get_hierarchical_context_parallel_groups()[0]
    return DraftLink(get_block_parallel_group(), inner, options.dflash_transport, movement=options.dflash_movement)


def next_batch(data_iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> DraftBatch:
    """The next micro-batch of this rank."""
    args = get_args()
    options, config = options_from_args(args), unwrap_model(model).drafter.shape
    cell = Cell(
        parallel_state.get_context_parallel_world_size(), options.block_parallel_size, parallel_state.get_context_parallel_rank()
    )
    batch = build_batch(
        samples_of(next(data_iterator)), frozen_target().source, config, options.draw(args.seed, config.block_size), cell,
        teacher=options.dflash_loss == "kl", device=torch.device(torch.cuda.current_device()),
    )
    if model.training:
        draft_rows.add(batch.plan.draft_rows)
    return batch


def forward(batch: DraftBatch, model: Any) -> torch.Tensor:
    """Hidden states of the batch's draft rows."""
    attend = PlannedAttention(batch.plan, unwrap_model(model).drafter.shape, draft_link(options_from_args(get_args())))
    return model(batch, frozen_target().embedding, attend)


def batch_loss(batch: DraftBatch, model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum, count, metrics) for the engine; pairs [sum, sum of weights] in metrics are averaged over the global batch."""
    args = get_args()
    loss = draft_loss(hidden, batch, frozen_target().head, unwrap_model(model).drafter, options_from_args(args).objective())
    pairs = {"lm loss": (loss.total, loss.weight), **loss.parts}
    if model.training:
        weights.add(loss.weight)
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        supervised = batch.scored.sum() * batch.share
        pairs["supervised tokens"] = (supervised, torch.tensor(1.0 / (get_num_microbatches() * ranks)))
        pairs["anchors"] = (torch.tensor(np.sum(batch.plan.local_anchors >= 0) * batch.share), pairs["supervised tokens"][1])
    metrics = {
        name: torch.stack([part.detach().float().to(hidden.device) for part in pair]) for name, pair in pairs.items()
    }
    count = batch.scored.sum().to(torch.int)
    return loss.total, count, metrics
