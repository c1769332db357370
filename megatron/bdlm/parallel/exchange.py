"""Moving clean keys and values, and their gradients, between context-parallel ranks: verbs, no attention math.

An `Exchange` serves one attention call in one direction. Rows travel packed, K and V of a token side by side
(`[rows, h, d + dv]`), so a piece is one message. What may leave a rank at all are its *shared* rows
(`program.shared[rank]`: under csbp the clean ones), and every index here counts in them.

    exchange = open_exchange(transport, program, link, needed)   # transport_choice.py
    exchange.post(packed_shared_rows)           # the first transfer is under way
    ...                                         # work on what is here
    for arrival in exchange.arrivals():         # the next transfer is posted before each piece is handed out
        ...                                     # work on arrival.rows; in backward fill arrival.gradient
    exchange.collect()                          # backward: sum of what peers computed for the shared rows

In backward the gradient that the loop body leaves in `arrival.gradient` goes back to the owner as soon as the loop asks
for the next piece, and is summed there in float32 (float64 for float64 inputs); `wire_dtype` concerns the wire only.

Every rank runs the same steps in the same order, sends and receives of a step in one batch, so that neither gloo nor
NCCL can deadlock. A wait blocks the host with gloo; with NCCL, where the exchange has a group of its own (`device`), it
is a dependency of the current stream.
Counters: `traffic()`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from megatron.bdlm.parallel.device import exchange_group, to_device
from megatron.bdlm.platform.ranges import span

TRANSPORTS = ("auto", "direct", "hierarchical", "ring", "allgather")


class ExchangeError(ValueError):
    """A transport that is unknown or does not fit the process group; names flag, value, rule and a legal value."""


# ---- counters -----------------------------------------------------------------------------------

_COUNTS = ("sent", "received", "sent_intra_node", "sent_inter_node", "received_intra_node", "received_inter_node")
_traffic = {direction: dict.fromkeys(_COUNTS, 0) for direction in ("forward", "backward")}


def traffic() -> dict[str, dict[str, int]]:
    """Bytes this process sent and received for attention since the last call, by direction.

    Returns:
        {"forward": {"sent": .., "received": .., "sent_intra_node": .., "sent_inter_node": .., ..}, "backward": {..}}
    """
    counted = {direction: dict(counts) for direction, counts in _traffic.items()}
    for counts in _traffic.values():
        counts.update(dict.fromkeys(_COUNTS, 0))
    return counted


def count_all_reduce(direction: str, x: torch.Tensor, ranks: int) -> None:
    """Add what a ring all-reduce of `x` moves to the counters, each way: 2 (n - 1) / n of its bytes; the place is not known."""
    size = 2 * (ranks - 1) * x.numel() * x.element_size() // ranks
    for verb in ("sent", "received"):
        _traffic[direction][verb] += size


# ---- link: the process group as transports see it --------------------------------------------------


@dataclass
class Pending:
    """Transfers under way, and the tensors that must live until they are done (on a GPU: until the stream waits)."""

    works: list = field(default_factory=list)
    tensors: tuple = ()

    def wait(self) -> None:
        with span("bdlm/exchange wait"):
            for work in self.works:
                work.wait()
        self.works, self.tensors = [], ()


@dataclass(frozen=True)
class Link:
    """Ranks 0..size-1 of a context-parallel group, `ranks_per_node` consecutive ones on each node."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    ranks_per_node: int

    @staticmethod
    def of(group: dist.ProcessGroup | None, size: int, ranks_per_node: int | None = None) -> "Link":
        """Link of this process for a plan over `size` ranks; size 1 needs no process group.

        Raises:
            ExchangeError: the group has another size, or the ranks of a node do not divide it.
        """
        if size == 1:
            return Link(None, 0, 1, 1)
        present = dist.get_world_size(group) if dist.is_initialized() else 1
        if present != size:
            raise ExchangeError(
                f"--context-parallel-size {size}: the process group given to attention has {present} ranks; "
                f"it must have as many as the plan, {size}"
            )
        flag = "--bdlm-ranks-per-node" if ranks_per_node else "LOCAL_WORLD_SIZE"
        on_node = min(ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", size)), size)
        if on_node < 1 or size % on_node:
            raise ExchangeError(f"{flag} {on_node}: must divide --context-parallel-size {size}; a legal value: {size}")
        return Link(exchange_group(group), dist.get_rank(group), size, on_node)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def nodes(self) -> int:
        return self.size // self.ranks_per_node

    def transfer(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], direction: str, tag: int
    ) -> Pending:
        """Start sending to and receiving from peers, {peer: contiguous tensor}, as one batch."""
        operations = []
        for verb, operation, tensors in (("received", dist.irecv, receives), ("sent", dist.isend, sends)):
            for peer, tensor in tensors.items():
                if tensor.numel():
                    self.count(verb, direction, peer, tensor)
                    peer = dist.get_global_rank(self.group, peer) if self.group is not None else peer
                    operations.append(dist.P2POp(operation, tensor, peer, self.group, tag))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, (*sends.values(), *receives.values()))

    def count(self, verb: str, direction: str, peer: int, tensor: torch.Tensor) -> None:
        """Add the bytes of `tensor` to the counters of `traffic`."""
        size = tensor.numel() * tensor.element_size()
        place = "intra_node" if self.node(peer) == self.node(self.rank) else "inter_node"
        _traffic[direction][verb] += size
        _traffic[direction][f"{verb}_{place}"] += size


# ---- rows ------------------------------------------------------------------------------------------


class Rows:
    """Some rows of a tensor: a slice when they are consecutive (a view), else an index."""

    def __init__(self, rows: np.ndarray, device: torch.device):
        self.count = len(rows)
        consecutive = self.count > 0 and int(rows[-1]) - int(rows[0]) == self.count - 1
        if consecutive or not self.count:
            start = int(rows[0]) if self.count else 0
            self.where: slice | torch.Tensor = slice(start, start + self.count)
        else:
            self.where = to_device(torch.as_tensor(rows, dtype=torch.int64), device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.where] if isinstance(self.where, slice) else x.index_select(0, self.where)

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """x[rows] += part; the rows are distinct."""
        if isinstance(self.where, slice):
            x[self.where] += part
        else:
            x.index_add_(0, self.where, part.to(x.dtype))


def positions(rows: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Where each of `rows` stands in the ascending `among`, which holds them all."""
    return np.searchsorted(among, rows)


# ---- exchange ----------------------------------------------------------------------------------------


_NO_ROWS = np.zeros(0, np.int64)


@dataclass
class Arrival:
    """K/V rows of one peer, ready to be used."""

    piece: object  # the program's Piece: source, rows, rectangles
    rows: torch.Tensor  # [len(piece.rows), h, d + dv]
    gradient: torch.Tensor | None  # backward: zeros of that shape, to be filled, in the accumulation type


@dataclass(frozen=True)
class Wire:
    """How gradients travel: None in forward."""

    sum_dtype: torch.dtype  # in which the owner sums
    wire_dtype: torch.dtype  # in which they travel


Needed = Callable[[int, int], np.ndarray]  # (rank, source) -> local rows at the source that the rank needs

# program -> what transports derive from it (index tensors, needs of other ranks): made once, not in every layer
_derived: WeakKeyDictionary = WeakKeyDictionary()


class Exchange(ABC):
    """One attention call's transfers in one direction; see the module docstring for the verbs."""

    def __init__(self, program, link: Link, wire: Wire | None, needed: Needed):
        self.program, self.link, self.wire, self.needed = program, link, wire, needed
        self.direction = "forward" if wire is None else "backward"
        self.pieces = {piece.source: piece for piece in program.remote}
        self.returned: torch.Tensor | None = None  # gradient sums of the shared rows

    def post(self, shared: torch.Tensor) -> None:
        """Start: `shared` are this rank's packed shared rows [m, h, d + dv], contiguous."""
        self.shared = shared
        if self.wire is not None:
            self.returned = torch.zeros(shared.shape, dtype=self.wire.sum_dtype, device=shared.device)
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Post the first transfer."""

    @abstractmethod
    def arrivals(self) -> Iterator[Arrival]:
        """Yield the pieces this rank needs, each once."""

    def collect(self) -> torch.Tensor:
        """Backward, after the last arrival: gradients of the shared rows, summed over the peers that used them."""
        return self.returned

    # -- for the transports --

    def arrival(self, piece, rows: torch.Tensor) -> Arrival:
        gradient = None
        if self.wire is not None:
            gradient = torch.zeros(rows.shape, dtype=self.wire.sum_dtype, device=rows.device)
        return Arrival(piece, rows, gradient)

    def buffer(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised packed rows to receive into."""
        return self.shared.new_empty((rows, *self.shared.shape[1:]), dtype=dtype or self.shared.dtype)

    def transfer(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], tag: int) -> Pending:
        return self.link.transfer(sends, receives, self.direction, tag)

    def rows_for(self, user: int, owner: int) -> Rows:
        """What `user` needs of `owner` (one of them is this rank), as positions among the owner's shared rows."""
        rows = self.pieces[owner].rows if user == self.link.rank else self.program.sends.get(user, _NO_ROWS)
        return self.cached((user, owner), lambda: positions(rows, self.program.shared[owner]))

    def cached(self, key: tuple, make: Callable[[], np.ndarray]) -> Rows:
        """`Rows` of what `make` returns, made once per program, device and key."""
        device = self.shared.device
        return self.derived(("rows", device, *key), lambda: Rows(make(), device))

    def derived(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once per program and key."""
        known = _derived.setdefault(self.program, {})
        if key not in known:
            known[key] = make()
        return known[key]


class NothingToExchange(Exchange):
    """One rank, or a replicated clean stream: everything is here."""

    def begin(self) -> None:
        pass

    def arrivals(self) -> Iterator[Arrival]:
        return iter(())
