"""Which rank owns which block."""

import numpy as np


def place(areas: np.ndarray, rows: np.ndarray, ranks: int) -> np.ndarray:
    """Owner of each block, int64 [B]."""
    count = len(areas)
    if count % (2 * ranks) == 0:
        owner = two_ended(count, ranks)
        load = np.bincount(owner, areas, ranks)
        if load.max() * ranks <= 1.02 * load.sum():
            return owner
    owner = np.zeros(count, np.int64)
    load = np.zeros(ranks)
    for block in np.argsort(-areas, kind="stable"):
        lightest = int(np.argmin(load))
        owner[block] = lightest
        load[lightest] += areas[block]
    return owner


def two_ended(count: int, ranks: int) -> np.ndarray:
    """Half chunks a and 2P-1-a to rank a; `count` is a multiple of 2P."""
    chunk = np.arange(count) // (count // (2 * ranks))
    return np.minimum(chunk, 2 * ranks - 1 - chunk)
