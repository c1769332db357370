"""What we add around the engine's training step, in one place.

`install` wraps `megatron.training.training.train_step`, the one function through which every
iteration passes, and adds to it:

* a batch without any supervised token leaves the weights, the optimizer state and the learning
  rate alone (the engine would still decay weights and apply momentum); it is counted as a
  skipped iteration in the log;
* derived metrics beside the reduced losses, so that they appear in the engine's log line, in
  TensorBoard and in W&B: `ppl bound`, `clean tokens/s`, `processed rows/s`, `peak memory GiB`;
* averages over no token at all, which the engine computes as 0/0, are zero in such a batch;
* with experts, how evenly rows were spread over them (`expert load clean`, ..);
* losses by noise level (`nelbo t 0.0-0.1`, ..) go to TensorBoard and W&B only, and only where
  the batch had a token of that level: an average of undefined values is never logged.

`install_json_log` wraps the engine's two functions that log an iteration and an evaluation: what they hand to
TensorBoard becomes a line of --bdlm-json-log.
"""

import math
import time
from typing import Any, Callable, Optional

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training import training as engine_training

from megatron.bdlm.model.router import expert_load
from megatron.bdlm.platform.cpu import peak_memory_bytes
from megatron.bdlm.platform.ranges import span, spanned
from megatron.bdlm.training.expert_load import load_metrics
from megatron.bdlm.training.json_log import JsonLog, tee_scalars

PPL_BOUND_OF = "nelbo"
"""The loss whose exponential is the perplexity bound."""

BUCKET_PREFIX = "nelbo t "
"""Names of losses by noise level begin with this."""


class RowCounter:
    """Rows that this rank has processed since the last `take`; filled by the training step's batches."""

    def __init__(self) -> None:
        self._rows = 0

    def add(self, rows: int) -> None:
        self._rows += rows

    def take(self) -> int:
        rows, self._rows = self._rows, 0
        return rows


class TokenCount:
    """Finalises gradients through the engine and remembers the global number of supervised tokens."""

    def __init__(self) -> None:
        self.tokens: Optional[torch.Tensor] = None

    def finalize(self, model, num_tokens: Optional[torch.Tensor] = None, **kwargs) -> None:
        """For the engine's `finalize_model_grads_func`; the engine reduces `num_tokens` in place."""
        with span("bdlm/reduction"):
            finalize_model_grads(model, num_tokens, **kwargs)
        self.tokens = num_tokens

    def value(self) -> int:
        return 0 if self.tokens is None else int(self.tokens.item())


def install(rows: RowCounter, count: Optional[TokenCount] = None) -> None:
    """Wrap the engine's training step; see the module docstring.

    Args:
        count: finalises gradients and knows what they were divided by; None: supervised tokens.
    """
    stock_train_step = engine_training.train_step
    count = count or TokenCount()

    @spanned("bdlm/step")
    def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs):
        config.finalize_model_grads_func = count.finalize
        _skip_empty_batches(optimizer, count)
        start = time.perf_counter()
        result = stock_train_step(
            forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs
        )
        losses = result[0]
        processed = rows.take()
        load = _expert_load(config)
        if losses:  # on the last pipeline stage
            losses.update(load)
            _add_metrics(losses, processed, time.perf_counter() - start)
        return result

    engine_training.train_step = train_step


def install_json_log(log: JsonLog) -> None:
    """Append a line to `log` whenever the engine has logged an iteration or an evaluation; on the rank that logs."""
    stock_training_log, stock_evaluation = engine_training.training_log, engine_training.evaluate_and_print_results
    stock_train = engine_training.train

    def write(kind: str, iteration: int) -> None:
        values = tee_scalars().take()
        if values:
            log.write(kind, iteration, get_args().consumed_train_samples, values)

    def train(*args, **kwargs):
        tee_scalars()
        started = get_args()
        log.write("start", started.iteration, started.consumed_train_samples, {"world size": started.world_size})
        return stock_train(*args, **kwargs)

    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
        result = stock_training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        write("train", iteration)
        return result

    def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
        tee_scalars().take()
        stock_evaluation(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)
        write("test" if "test set" in prefix else "validation", iteration)

    engine_training.train = train
    engine_training.training_log = training_log
    engine_training.evaluate_and_print_results = evaluate_and_print_results


def _skip_empty_batches(optimizer: Any, count: TokenCount) -> None:
    """Make `optimizer.step` do nothing when the global batch has no supervised token."""
    if getattr(optimizer, "skips_empty_batches", False):
        return
    stock_step: Callable = optimizer.step

    def step():
        if count.value() == 0:
            return False, 0.0, 0
        with span("bdlm/optimizer"):
            return stock_step()

    optimizer.step = step
    optimizer.skips_empty_batches = True


def _expert_load(config: Any) -> dict[str, torch.Tensor]:
    """How evenly rows were spread over experts; a sum over all ranks, so that every pipeline stage takes part."""
    if config.num_moe_experts is None:
        return {}
    rows = expert_load.take(config.num_layers, config.num_moe_experts)
    torch.distributed.all_reduce(rows)
    return load_metrics(rows)


def _add_metrics(losses: dict[str, torch.Tensor], processed: int, seconds: float) -> None:
    """Move the losses by noise level out of `losses` and add the derived metrics to it, in place."""
    args = get_args()
    _write_buckets({name: losses.pop(name) for name in list(losses) if name.startswith(BUCKET_PREFIX)})
    if losses["supervised tokens"].item() == 0:
        losses.update({name: torch.nan_to_num(value, nan=0.0) for name, value in losses.items()})
    like = losses["lm loss"]
    shares = args.tensor_model_parallel_size * args.pipeline_model_parallel_size  # ranks that share the work on a row
    derived = {
        "clean tokens/s": get_current_global_batch_size() * args.seq_length / args.world_size / seconds,
        "processed rows/s": processed / shares / seconds,
        "peak memory GiB": peak_memory_bytes() / 2**30,
    }
    if PPL_BOUND_OF in losses:
        derived["ppl bound"] = math.exp(min(20.0, losses[PPL_BOUND_OF].item()))
    for name, value in derived.items():
        losses[name] = torch.tensor([value], dtype=torch.float, device=like.device)


def _write_buckets(buckets: dict[str, torch.Tensor]) -> None:
    args, writer, wandb = get_args(), get_tensorboard_writer(), get_wandb_writer()
    iteration = args.curr_iteration + 1
    if writer is None or iteration % args.tensorboard_log_interval:
        return
    for name, tensor in buckets.items():
        value = tensor.item()
        if not math.isnan(value):
            writer.add_scalar(name, value, iteration)
            if wandb:
                wandb.log({name: value}, iteration)
