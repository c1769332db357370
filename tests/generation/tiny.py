"""A tiny float64 transformer and a sampler written plainly, to hold the real sampler against.

`TinyModel` has what a Megatron model has for the sampler: rotary positions, grouped-query attention through
`params.attend`, logits over a padded vocabulary. `DenseRows` is attention over a mask written pair by pair, for
training and for the plain sampler; nothing of it comes from the code under test.
"""

import math

import torch
from torch import nn

VOCAB, PADDED, MASK = 40, 48, 39


class DenseRows:
    """Attention over rows given as (kind, position) pairs, kind 'clean' or 'noisy', visible pair by pair."""

    def __init__(self, rows, block_size, clean_attention="block-causal", noisy_attention="bidirectional"):
        self.mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        for i, (kind, position) in enumerate(rows):
            for j, (other, there) in enumerate(rows):
                block, its_block = position // block_size, there // block_size
                if kind == "clean":
                    sees = its_block <= block if clean_attention == "block-causal" else there <= position
                    self.mask[i, j] = other == "clean" and sees
                elif other == "clean":
                    self.mask[i, j] = its_block < block
                else:
                    self.mask[i, j] = its_block == block and (noisy_attention == "bidirectional" or there <= position)

    def attend(self, query, key, value, *, layer_number, softmax_scale, window, final=False):
        share = query.size(2) // key.size(2)
        key, value = (x.repeat_interleave(share, 2) for x in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(query.size(-1))
        weights = scores.masked_fill(~self.mask, -math.inf).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, value)


class TinyLayer(nn.Module):
    def __init__(self, hidden, heads, groups):
        super().__init__()
        self.size = hidden // heads
        self.q, self.kv = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * groups * self.size)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x, positions, params, number):  # x [s, b, h], positions [b, s]
        normed = self.norm(x)
        query = self.q(normed).unflatten(-1, (-1, self.size))
        key, value = self.kv(normed).unflatten(-1, (2, -1, self.size)).unbind(2)
        query, key = rotate(query, positions), rotate(key, positions)
        attended = params.attend(query, key, value, layer_number=number, softmax_scale=None, window=None, final=False)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(x)


def rotate(x, positions):
    half = x.size(-1) // 2
    angles = positions.T[:, :, None, None] * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class TinyModel(nn.Module):
    """`model(input_ids [b, s], position_ids [b, s], params) -> logits [b, s, PADDED]`."""

    def __init__(self, seed=0, hidden=32, layers=2, heads=4, groups=2):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(PADDED, hidden)
        self.layers = nn.ModuleList(TinyLayer(hidden, heads, groups) for _ in range(layers))
        self.head = nn.Linear(hidden, PADDED)
        self.double()

    def forward(self, input_ids, position_ids, params):
        x = self.embedding(input_ids).transpose(0, 1)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, position_ids, params, number)
        return self.head(x).transpose(0, 1)


def plain_greedy(model, prompt, count, block_size, shift="none", clean_attention="block-causal", noisy_attention="bidirectional"):
    """One token a step, the most confident, every row recomputed each time.

    Returns:
        the new tokens and the logits [steps, S, PADDED] of the noisy rows of each step.
    """
    tokens, logged = list(prompt), []
    while len(tokens) < len(prompt) + count:
        start = len(tokens) // block_size * block_size
        clean, block = tokens[:start], tokens[start:] + [MASK] * (start + block_size - len(tokens))
        open_places = [i for i in range(len(tokens) - start, block_size) if start + i < len(prompt) + count]
        while open_places:
            rows = [("clean", i) for i in range(start)] + [("noisy", start + i) for i in range(block_size)]
            params = DenseRows(rows, block_size, clean_attention, noisy_attention)
            ids, positions = torch.tensor([clean + block]), torch.tensor([[p for _, p in rows]])
            with torch.no_grad():
                logits = model(ids, positions, params)[0]
            logged.append(logits[start:])
            best = None
            for place in open_places:
                row = logits[start + place - (1 if shift == "next" else 0)][:MASK].softmax(-1)
                if best is None or row.max() > best[0]:
                    best = (row.max(), place, int(row.argmax()))
            block[best[1]] = best[2]
            open_places.remove(best[1])
        tokens = clean + block[: len(prompt) + count - start]
    return tokens[len(prompt) :], torch.stack(logged)


def overfit(sample, block_size, shift, steps=150):
    """A model trained on one sample with the whole [xt; x0], t uniform per block."""
    model = TinyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    length = len(sample)
    rows = [("noisy", i) for i in range(length)] + [("clean", i) for i in range(length)]
    params, positions = DenseRows(rows, block_size), torch.tensor([[p for _, p in rows]])
    clean = torch.tensor(sample)
    for _ in range(steps):
        noise_level = torch.rand(-(-length // block_size), generator=generator).repeat_interleave(block_size)[:length]
        corrupted = torch.rand(length, generator=generator) < noise_level
        if shift == "next":
            corrupted[0] = False
        ids = torch.cat([torch.where(corrupted, MASK, clean), clean])[None]
        logits = model(ids, positions, params)[0, :length]
        if shift == "next":
            logits = logits.roll(1, 0)
        loss = nn.functional.cross_entropy(logits[corrupted], clean[corrupted], reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
