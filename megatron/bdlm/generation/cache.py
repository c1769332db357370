"""Clean keys and values of the tokens sampled so far, one buffer a layer.

Sequences of a batch have different lengths. Sequence i's row of token t stands at index t of its column, so its
length is all that is needed to know what a cached row is. A forward writes the keys and values of its rows behind
the cached ones and attends to one slice of the buffer, without a copy; `advance` then keeps the clean rows, and the
next forward writes over the others (noisy rows, padding).

    cached 2 tokens, forward with clean rows 2, 3 and noisy rows 4', 5':   0 1 | 2 3 4' 5'
    advance by 2, next forward with noisy rows 4'', 5'':                   0 1 2 3 | 4'' 5''

Shapes: b sequences, s rows of this forward, k key-value heads, d head size.
"""

import torch


class KeyValueCache:
    """Clean K/V of `batch` sequences; layers appear when they are first written.

    Args:
        batch: number of sequences.
        device: where lengths and indices live; the buffers follow the keys they are given.
    """

    GROWTH = 1.5

    def __init__(self, batch: int, device: torch.device | str = "cpu"):
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put this forward's rows behind the cached ones of `layer`.

        Args:
            key, value: [s, b, k, d] and [s, b, k, d_v].

        Returns:
            Keys and values [longest + s, b, k, d or d_v]: views of the buffers, cached rows first.
        """
        rows, batch = key.shape[:2]
        if batch != self.lengths.numel():
            raise ValueError(f"a cache of {self.lengths.numel()} sequences was given keys of {batch}")
        stop = int(self.lengths.max()) + rows
        keys, values = self._room(layer, stop, key, value)
        index = self.lengths + torch.arange(rows, device=self.lengths.device)[:, None]  # [s, b]
        column = torch.arange(batch, device=self.lengths.device)
        keys[index, column] = key
        values[index, column] = value
        return keys[:stop], values[:stop]

    def advance(self, counts: torch.Tensor) -> None:
        """Keep the first `counts[i]` rows that the last forward wrote for sequence i; counts int64 [b]."""
        self.lengths = self.lengths + counts.to(self.lengths)

    def keep(self, sequences: list[int]) -> None:
        """Drop all sequences but these, in this order."""
        index = torch.tensor(sequences, dtype=torch.int64, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self._buffers = {layer: (k[:, index], v[:, index]) for layer, (k, v) in self._buffers.items()}

    def _room(self, layer: int, stop: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer, with at least `stop` rows."""
        old = self._buffers.get(layer)
        if old is not None and old[0].size(0) >= stop:
            return old
        capacity = stop if old is None else max(stop, int(self.GROWTH * old[0].size(0)))
        new = tuple(x.new_zeros((capacity, *x.shape[1:])) for x in (key, value))
        if old is not None:
            for source, target in zip(old, new):
                target[: source.size(0)] = source
        self._buffers[layer] = new
        return new
