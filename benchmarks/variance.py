"""Variance of the training loss and its gradient under different noise: what clipping and stratifying t buy.

    python benchmarks/variance.py --output benchmarks/results/variance      # writes .json and .png

For each block size a small byte-level model is trained with the linear schedule on text that every machine has
(Python's own documentation topics). Then its weights and one batch of that text stay fixed, and each kind of noise is
drawn many times over it:

    loss variance       of the batch's loss
    gradient variance   E |g - E g|^2 / |E g|^2

The model is plain PyTorch over the dense mask of the oracle: nothing here depends on the engine, only on noise and
objective.

Shapes: b samples, L tokens, R = 2L rows [xt; x0], h hidden size.
"""

import argparse
import dataclasses
import json
import pydoc_data.topics
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.noise import corrupt
from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy
from megatron.bdlm.objective.loss import block_diffusion_loss, select_rows
from megatron.bdlm.objective.targets import build_targets
from megatron.bdlm.testing.oracle import visible

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

MASK = 256  # behind the bytes
LENGTH, HIDDEN, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16

LINEAR = "linear, t in [.001, 1]"
KINDS = {
    LINEAR: {},
    "clipped, t in [.3, .8]": dict(bdlm_t_min=0.3, bdlm_t_max=0.8),
    "clipped, t in [.45, .95]": dict(bdlm_t_min=0.45, bdlm_t_max=0.95),
    "cosine": dict(bdlm_noise_schedule="cosine"),
    "linear, independent draws": dict(bdlm_noise_draw="uniform"),
}
TITLES = {"loss variance": "variance of a batch's loss", "gradient variance": "relative variance of the gradient"}
CLIPPED = {4: "clipped, t in [.45, .95]", 16: "clipped, t in [.3, .8]"}  # the published ranges


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [b, R, h], [R, R]
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Rows [xt; x0] with learned positions, attending as the oracle's mask says."""

    def __init__(self, block_size: int):
        super().__init__()
        self.embedding = nn.Embedding(MASK + 1, HIDDEN)
        self.position = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, MASK + 1, bias=False)
        self.register_buffer("mask", visible(seq_length=LENGTH, block_size=block_size))

    def forward(self, ids: Tensor) -> Tensor:  # [b, R] -> [b, R, h]
        x = self.embedding(ids) + self.position(torch.arange(LENGTH).repeat(2))
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.norm(x)


class Text:
    """Samples of the corpus by index."""

    def __init__(self, seed: int):
        text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        self.bytes = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        self.seed = seed

    def batch(self, step: int) -> list[np.ndarray]:
        starts = np.random.default_rng([self.seed, step]).integers(0, len(self.bytes) - LENGTH, BATCH)
        return [self.bytes[start : start + LENGTH] for start in starts]


def loss_of(model: Model, samples: list[np.ndarray], config: BDLMConfig, step: int) -> Tensor:
    """The training loss of one batch."""
    eligible = np.ones(LENGTH, bool)
    noised = [corrupt(tokens, eligible, config, 1234, step * BATCH + i) for i, tokens in enumerate(samples)]
    targets = [build_targets(tokens, eligible, noise, None, config) for tokens, noise in zip(samples, noised)]
    rows = select_rows(targets, np.arange(2 * LENGTH))
    ids = torch.from_numpy(np.stack([np.concatenate([noise.xt[0], tokens]) for noise, tokens in zip(noised, samples)]))
    hidden = model(ids).transpose(0, 1).flatten(0, 1)  # the rows' index counts [R, b]
    nll = linear_cross_entropy(hidden[rows.index], model.head.weight, rows.target, excluded_token=MASK)
    total, count, _ = block_diffusion_loss(nll, rows, config, diagnostics=False)
    return total / count


def train(model: Model, config: BDLMConfig, steps: int) -> float:
    """Train in place; the mean loss of the last tenth."""
    text = Text(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses = []
    for step in tqdm(range(steps), desc=f"train S={config.bdlm_block_size}", mininterval=5):
        loss = loss_of(model, text.batch(step), config, step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-steps // 10 :]))


def measure(model: Model, config: BDLMConfig, draws: int) -> dict[str, float]:
    """Mean and variances over `draws` noises of one batch, weights fixed."""
    samples = Text(seed=1).batch(0)
    losses, mean, square = [], None, 0.0
    for draw in range(draws):
        model.zero_grad()
        loss = loss_of(model, samples, config, 1_000_000 + draw)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        mean = gradient / draws if mean is None else mean + gradient / draws
        square += gradient.square().sum().item() / draws
        losses.append(loss.item())
    norm = mean.square().sum().item()
    # the squared norm of a mean of n draws holds 1/n of the variance
    variance = (square - norm) * draws / (draws - 1)
    return {
        "mean loss": float(np.mean(losses)),
        "loss variance": float(np.var(losses, ddof=1)),
        "gradient variance": variance / (norm - variance / draws),
    }


def plot(results: dict, path: Path) -> None:
    sizes = list(results["block sizes"])
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, name in zip(axes, TITLES):
        for shift, kind in enumerate(KINDS):
            values = [results["block sizes"][size][kind][name] for size in sizes]
            axis.bar(np.arange(len(sizes)) + 0.16 * (shift - 2), values, width=0.15, label=kind)
        axis.set_xticks(range(len(sizes)), [f"S = {size}" for size in sizes])
        axis.set_title(TITLES[name])
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each model")
    parser.add_argument("--draws", type=int, default=200, help="noises over which variances are taken")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/variance"), help="path without suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {"steps": args.steps, "draws": args.draws, "tokens per batch": BATCH * LENGTH, "block sizes": {}}
    for size in args.block_sizes:
        torch.manual_seed(0)
        config = BDLMConfig(bdlm_block_size=size, bdlm_mask_token_id=MASK)
        model = Model(size)
        final = train(model, config, args.steps)
        print(f"S = {size}: trained to {final:.3f} nats a token")
        results["block sizes"][size] = {}
        for kind, options in KINDS.items():
            row = measure(model, dataclasses.replace(config, **options), args.draws)
            results["block sizes"][size][kind] = row
            print(f"  {kind:28s}" + "  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.output.with_suffix(".png"))
    for size, clipped in CLIPPED.items():
        if size in results["block sizes"]:
            row = results["block sizes"][size]
            ratios = [f"{name} x {row[clipped][name] / row[LINEAR][name]:.2f}" for name in TITLES]
            print(f"S = {size}: {clipped} against linear: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
