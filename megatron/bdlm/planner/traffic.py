"""Bytes that attention moves, per rank: exact from a sequence plan, and in closed form for two-ended placement.

`exact` counts what the transports send, message by message: it equals `parallel.exchange.traffic()` after one forward and
backward of one layer. The closed form (`needs`) serves a search over thousands of layouts: it holds exactly when
2P divides the number of blocks.

    P ranks, c = L/(2P) tokens of a half chunk; rank a holds half chunks a and 2P-1-a; M nodes of G ranks
    Example: P = 4, rank 1 holds half chunks 1 and 6. It needs half chunk 0 of rank 0, both (2, 5) of rank 2, both
    (3, 4) of rank 3: 5c rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import numpy as np

from megatron.bdlm.parallel.plan import SequencePlan


@dataclass(frozen=True)
class Sizes:
    """Bytes of one K/V row: as it travels, as its gradient travels, and as gradients are summed."""

    row: int
    gradient: int
    summed: int

    @staticmethod
    def of(key_heads: int, head_size: int, value_head_size: int, item: int, gradient_item: int = 4, summed_item: int = 4) -> "Sizes":
        width = key_heads * (head_size + value_head_size)
        return Sizes(width * item, width * gradient_item, width * summed_item)


@dataclass(frozen=True)
class Rows:
    """Rows one rank sends and receives when K/V travel once; gradients travel the other way."""

    sent: int
    received: int
    sent_between_nodes: int
    received_between_nodes: int


# ---- exact -----------------------------------------------------------------------------------------


def exact(
    plan: SequencePlan, transport: str, sizes: Sizes, ranks_per_node: int, window: Optional[int] = None, queries: str = "all"
) -> dict[str, dict[str, int]]:
    """What `traffic()` counts on the plan's rank after forward and backward of one layer.

    Returns:
        {"forward": {"sent", "received", "sent_intra_node", "sent_inter_node", ..}, "backward": {..}}
    """
    size = plan.context_parallel_size
    messages = _Messages(plan.rank, ranks_per_node)
    program = plan.program(window, queries)
    if size > 1 and any(len(rows) for rows in program.shared):
        _TRANSPORTS[transport](messages, plan, program, window, queries)
    forward = messages.total(sizes.row, 0, 0)
    backward = messages.total(sizes.row, sizes.gradient, sizes.summed)
    return {"forward": forward, "backward": backward}


class _Messages:
    """Rows by (verb, within the node or between, what they are: K/V, gradient, sum)."""

    def __init__(self, rank: int, ranks_per_node: int):
        self.rank, self.per_node = rank, ranks_per_node
        self.rows: dict[tuple[str, str, str], int] = {}

    def add(self, verb: str, peer: int, what: str, rows: int) -> None:
        place = "intra" if peer // self.per_node == self.rank // self.per_node else "inter"
        key = verb, place, what
        self.rows[key] = self.rows.get(key, 0) + rows

    def total(self, row: int, gradient: int, summed: int) -> dict[str, int]:
        size = {"kv": row, "gradient": gradient, "sum": summed}
        found = {}
        for verb in ("sent", "received"):
            for place in ("intra", "inter"):
                found[f"{verb}_{place}_node"] = sum(
                    self.rows.get((verb, place, what), 0) * bytes_ for what, bytes_ in size.items()
                )
            found[verb] = found[f"{verb}_intra_node"] + found[f"{verb}_inter_node"]
        return found

    def both_ways(self, verb: str, peer: int, rows: int) -> None:
        """K/V one way, their gradient the other."""
        self.add(verb, peer, "kv", rows)
        self.add("received" if verb == "sent" else "sent", peer, "gradient", rows)


def _direct(messages, plan, program, window, queries) -> None:
    for peer, rows in program.sends.items():
        messages.both_ways("sent", peer, len(rows))
    for piece in program.remote:
        messages.both_ways("received", piece.source, len(piece.rows))


def _ring(messages, plan, program, window, queries) -> None:
    size, rank = plan.context_parallel_size, plan.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    rows = [len(shared) for shared in program.shared]
    for step in range(1, size):
        messages.add("sent", right, "kv", rows[(rank - step + 1) % size])
        messages.add("received", left, "kv", rows[(rank - step) % size])
        messages.add("sent", right, "gradient", rows[(rank - step) % size])
        messages.add("received", left, "gradient", rows[(rank - step - 1) % size])


def _allgather(messages, plan, program, window, queries) -> None:
    longest = max(len(rows) for rows in program.shared)
    for peer in range(plan.context_parallel_size):
        if peer != plan.rank:
            for verb in ("sent", "received"):
                messages.add(verb, peer, "kv", longest)
                messages.add(verb, peer, "sum", longest)


def _hierarchical(messages, plan, program, window, queries) -> None:
    per_node, size = messages.per_node, plan.context_parallel_size
    nodes, (node, index) = size // per_node, divmod(plan.rank, per_node)

    def rank_of(node: int, index: int) -> int:
        return node % nodes * per_node + index % per_node

    def needs(rank: int, owner: int) -> int:
        return len(plan.needed_rows(rank, owner, window, queries))

    def node_needs(node: int, owner: int) -> int:
        ranks = [rank_of(node, i) for i in range(per_node)]
        return len(np.unique(np.concatenate([plan.needed_rows(rank, owner, window, queries) for rank in ranks])))

    for distance in range(nodes):
        landing = rank_of(node - distance, index)
        if distance:
            to = rank_of(node + distance, index)
            messages.both_ways("sent", to, node_needs(node + distance, plan.rank))
            messages.both_ways("received", landing, node_needs(node, landing))
        for step in range(1, per_node):
            to, source = rank_of(node, index + step), rank_of(node, index - step)
            messages.both_ways("sent", to, needs(to, landing))
            messages.both_ways("received", source, needs(plan.rank, rank_of(node - distance, index - step)))


_TRANSPORTS = {"direct": _direct, "ring": _ring, "allgather": _allgather, "hierarchical": _hierarchical}


# ---- closed form -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Rows that travel when K/V travel once: of the busiest rank (`most`) and on average; and between nodes, per rank."""

    most: float
    mean: float
    most_between: float
    mean_between: float


@lru_cache(maxsize=None)
def needs(
    length: int, ranks: int, ranks_per_node: int, transport: str, streams: int = 1, window: Optional[int] = None
) -> Needs:
    """Rows received per rank, two-ended placement.

    Args:
        streams: copies of the sequence that travel: 1 under csbp (clean), V + 1 under cp; only ring and allgather
            move more than the clean one.
        window: sliding window; only direct and hierarchical profit from it.
    """
    if ranks == 1:
        return Needs(0, 0, 0, 0)
    nodes = max(1, ranks // ranks_per_node)
    if transport in ("ring", "allgather"):
        rows = (ranks - 1) * streams * length / ranks
        between = rows if nodes > 1 else 0.0
        # on a ring the node's last rank pushes all of it to the next node through one card
        return Needs(rows, rows, between, between / ranks_per_node if transport == "ring" else rows * (nodes - 1) / nodes)
    received = np.array([_received(length, ranks, ranks_per_node, rank, window) for rank in range(ranks)])
    total, between = received[:, 0], received[:, 1]
    if transport == "hierarchical" and nodes > 1:
        across = [_landed(length, ranks, ranks_per_node, rank, window) for rank in range(ranks)]
        between = np.array(across)
    return Needs(float(total.max()), float(total.mean()), float(between.max()), float(between.mean()))


def _half_chunks(ranks: int, rank: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _owner(chunk: int, ranks: int) -> int:
    return min(chunk, 2 * ranks - 1 - chunk)


def _seen(chunk: int, c: float, window: Optional[int]) -> list[tuple[int, float]]:
    """(earlier half chunk, rows of it) that a half chunk sees; every one in full without a window."""
    if window is None:
        return [(earlier, c) for earlier in range(chunk)]
    first = max(0.0, chunk * c - (window - 1))
    return [(earlier, min(c, (earlier + 1) * c - first)) for earlier in range(int(first // c), chunk)]


def _received(length: int, ranks: int, per_node: int, rank: int, window: Optional[int]) -> tuple[float, float]:
    """Rows a rank needs from others, and from other nodes."""
    c = length / (2 * ranks)
    if window is None:
        first = rank // per_node * per_node
        behind = ranks - min(ranks, first + per_node)
        return c * (rank + 2 * (ranks - 1 - rank)), c * (first + 2 * behind)
    wanted = _wanted([rank], ranks, c, window)
    others = {chunk: rows for chunk, rows in wanted.items() if _owner(chunk, ranks) != rank}
    away = [rows for chunk, rows in others.items() if _owner(chunk, ranks) // per_node != rank // per_node]
    return sum(others.values()), sum(away)


def _wanted(users: list[int], ranks: int, c: float, window: Optional[int]) -> dict[int, float]:
    """Rows of every half chunk that any of the users sees (the last rows of it: a suffix)."""
    wanted: dict[int, float] = {}
    for user in users:
        for chunk in _half_chunks(ranks, user):
            for earlier, rows in _seen(chunk, c, window):
                wanted[earlier] = max(wanted.get(earlier, 0.0), rows)
    return wanted


def _landed(length: int, ranks: int, per_node: int, rank: int, window: Optional[int]) -> float:
    """Rows that land at a rank for its node under `hierarchical`: of its counterparts on other nodes."""
    c, (node, index) = length / (2 * ranks), divmod(rank, per_node)
    nodes = ranks // per_node
    if window is None:
        return c * (node + 2 * (nodes - 1 - node))
    wanted = _wanted(list(range(node * per_node, (node + 1) * per_node)), ranks, c, window)
    owners = {other * per_node + index for other in range(nodes) if other != node}
    return sum(rows for chunk, rows in wanted.items() if _owner(chunk, ranks) in owners)
