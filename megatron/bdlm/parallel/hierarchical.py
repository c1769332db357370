"""Transport for groups that span nodes: every needed row crosses a node boundary once.

Ranks are (node, index): M nodes of G ranks, rank = node * G + index. Rank (m, i) receives for its whole node the rows
that anybody on the node needs from the ranks (m', i) of the other nodes: it is their *landing*. So all G network
cards of a node carry an equal part, and a row crosses once instead of up to G times. From the landing, rows are
handed on inside the node, each rank getting what it needs.

A rank's rows cross in two parts, so that the second crosses while what needs the first is computed.

Order of steps (the same on every rank), j = node distance, c = part, t = index distance inside the node:

    j = 0          t = 1 .. G-1   own node: direct
    j = 1.., c     t = 0          landing of part c from node m-j: across, for the node
                   t = 1 .. G-1   handed on: to index i+t, from index i-t

In backward a rank's contribution to the gradient of a row goes to the row's landing on its own node; when all of the
node's have been summed there, one sum crosses back to the owner. The next crossing is under way while a landing is
computed. Forward computes j = 0 first, while the first rows cross. Backward keeps the larger half of it for the end,
while the last sum crosses.

    Example, M = 2, G = 2: rank 2 = (1, 0) is the landing of rank 0 = (0, 0) on node 1; it hands rank 0's rows to
    rank 3, adds rank 3's gradient of them to its own, and sends the sum to rank 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.bdlm.parallel.exchange import Arrival, Exchange, Pending, Rows, positions
from megatron.bdlm.parallel.program import Piece

ACROSS, INSIDE, SUM_ACROSS, GRADIENT_INSIDE = 3, 4, 5, 6  # message tags
PARTS = 2  # in which a rank's rows cross


@dataclass(frozen=True)
class Step:
    """One entry of the order of steps (module docstring)."""

    distance: int  # j
    part: int  # c; 0 on our own node, whose rows are not divided
    index: int  # t


@dataclass
class Landing:
    """Rows of a remote owner that this rank holds for its node."""

    owner: int
    part: int
    needed: np.ndarray  # local rows at the owner that the node needs, ascending
    pending: Pending
    rows: torch.Tensor
    total: torch.Tensor | None  # backward: the node's gradient sum of these rows


@dataclass
class Returning:
    """A gradient transfer under way: `rows` come in and are added to `where` of `total`."""

    pending: Pending
    rows: torch.Tensor
    where: Rows
    total: torch.Tensor

    def finish(self) -> None:
        self.pending.wait()
        self.where.add(self.total, self.rows)


Inside = tuple[Pending, torch.Tensor | None]


class HierarchicalExchange(Exchange):
    """See the module docstring; without remote nodes it is the direct exchange of one node."""

    def begin(self) -> None:
        self.per_node = self.link.ranks_per_node
        self.node, self.index = divmod(self.link.rank, self.per_node)
        self.landing: Landing | None = None  # what is computed; None: our own node
        self.inside: Inside = (Pending(), None)  # the next piece from a rank of our node
        self.order = self._order()
        self._post_next(0)
        self.crossing = self._post_across(1, 0)  # the next landing
        self.returning_inside: Returning | None = None  # gradient transfers under way
        self.returning_across: Returning | None = None

    def _order(self) -> list[Step]:
        """See the module docstring."""
        own = [Step(0, 0, index) for index in range(1, self.per_node)]
        distances, indices = range(1, self.link.nodes), range(self.per_node)
        others = [Step(distance, part, index) for distance in distances for part in range(PARTS) for index in indices]
        first = len(own) if self.wire is None or not others else len(own) // 2
        return own[:first] + others + own[first:]

    def _rank(self, node: int, index: int) -> int:
        return node % self.link.nodes * self.per_node + index % self.per_node

    def _part_of(self, owner: int, part: int) -> tuple[int, int]:
        """The owner's local rows [low, high) of a part: equal shares of its shared rows (half chunks if two-ended)."""
        rows = self.program.shared[owner]
        low, end = len(rows) * part // PARTS, len(rows) * (part + 1) // PARTS
        return (int(rows[low]), int(rows[end - 1]) + 1) if end > low else (0, 0)  # fewer rows than parts leave empty ones

    def _needs(self, rank: int, owner: int, part: int) -> np.ndarray:
        """Local rows of `owner` in this part that `rank` needs."""

        def needs() -> np.ndarray:
            rows = self.derived(("needed", rank, owner), lambda: self.needed(rank, owner))
            return rows[slice(*np.searchsorted(rows, self._part_of(owner, part)))]

        return self.derived(("needed", rank, owner, part), needs)

    def _node_needs(self, node: int, owner: int, part: int) -> np.ndarray:
        """Local rows of `owner` in this part that any rank of `node` needs, ascending."""
        ranks = [self._rank(node, index) for index in range(self.per_node)]
        return self.derived(
            ("node needs", self.per_node, ranks[0], owner, part),
            lambda: np.unique(np.concatenate([self._needs(rank, owner, part) for rank in ranks])),
        )

    def _of_node(self, node: int, part: int) -> Rows:
        """Our shared rows in this part that a remote node needs."""
        own = self.link.rank
        return self.cached(
            ("of node", self.per_node, node % self.link.nodes, part),
            lambda: positions(self._node_needs(node, own, part), self.program.shared[own]),
        )

    def _of_landing(self, rank: int, landing: Landing | None) -> Rows:
        """Which of the landing's rows (our own shared rows when there is none) `rank` needs."""
        if landing is None:
            return self.rows_for(rank, self.link.rank)
        return self.cached(
            ("of landing", self.per_node, rank, landing.owner, landing.part),
            lambda: positions(self._needs(rank, landing.owner, landing.part), landing.needed),
        )

    def _piece(self, step: Step) -> Piece | None:
        """What this rank computes in a step; None: nothing."""
        source = self._rank(self.node - step.distance, self.index - step.index)
        piece = self.pieces.get(source)
        if piece is not None and step.distance:
            bounds = self._part_of(source, step.part)
            piece = self.derived(("part", source, step.part), lambda: self.pieces[source].part(*bounds))
        return piece if piece is not None and len(piece.rows) else None

    # -- keys and values --

    def _post_across(self, distance: int, part: int) -> Landing | None:
        """Send node m + distance what it needs of our rows; receive what our node needs of our counterpart's."""
        if distance >= self.link.nodes:
            return None
        to = self._rank(self.node + distance, self.index)
        owner = self._rank(self.node - distance, self.index)
        needed = self._node_needs(self.node, owner, part)
        rows = self.buffer(len(needed))
        sent = self._of_node(self.node + distance, part).take(self.shared)
        pending = self.transfer({to: sent}, {owner: rows}, ACROSS)
        total = None
        if self.wire is not None:
            total = torch.zeros(rows.shape, dtype=self.wire.sum_dtype, device=rows.device)
        return Landing(owner, part, needed, pending, rows, total)

    def _post_next(self, place: int) -> None:
        """Post the transfer inside the node of the step at `place`; a landing's own rows (index 0) need none."""
        self.inside = (Pending(), None)
        if place < len(self.order) and self.order[place].index:
            self.inside = self._post_inside(self.order[place])

    def _post_inside(self, step: Step) -> Inside:
        """Hand rows of our landing (our own rows when there is none) to index i + t; receive from index i - t."""
        landing = self.landing if step.distance else None
        to = self._rank(self.node, self.index + step.index)
        source = self._rank(self.node, self.index - step.index)
        rows = self._of_landing(to, landing).take(self.shared if landing is None else landing.rows)
        piece = self._piece(step)
        received = None if piece is None else self.buffer(len(piece.rows))
        return self.transfer({to: rows}, {} if received is None else {source: received}, INSIDE), received

    def _land(self, step: Step) -> torch.Tensor:
        """Wait for a landing and post the next crossing; our own rows of the landing."""
        landing = self.landing = self.crossing
        landing.pending.wait()
        last = step.part == PARTS - 1
        self.crossing = self._post_across(step.distance + 1, 0) if last else self._post_across(step.distance, step.part + 1)
        return self._of_landing(self.link.rank, landing).take(landing.rows)

    def arrivals(self) -> Iterator[Arrival]:
        for place, step in enumerate(self.order):
            if step.index == 0:
                rows = self._land(step)
            else:
                pending, rows = self.inside
                pending.wait()
            self._post_next(place + 1)
            piece = self._piece(step)
            arrival = None if piece is None else self.arrival(piece, rows)
            if arrival is not None:
                yield arrival
            if self.wire is not None:
                self._give_back(step, arrival)
        self._take_back_inside()
        self._take_back_across()

    # -- gradients --

    def _give_back(self, step: Step, arrival: Arrival | None) -> None:
        """Let a finished piece's gradient go its way, and after a landing's last piece the node's sum."""
        landing = self.landing if step.distance else None
        if step.index:
            self._give_back_inside(step.index, arrival, landing)
        elif arrival is not None:
            self._of_landing(self.link.rank, landing).add(landing.total, arrival.gradient)
        if landing is not None and step.index == self.per_node - 1:
            self._give_back_across(step.distance, landing)
            self.landing = None

    def _give_back_inside(self, index: int, arrival: Arrival | None, landing: Landing | None) -> None:
        """Send a piece's gradient to its landing at index i - t; receive what index i + t computed for ours."""
        self._take_back_inside()
        to, source = self._rank(self.node, self.index + index), self._rank(self.node, self.index - index)
        sends = {} if arrival is None else {source: arrival.gradient.to(self.wire.wire_dtype)}
        where = self._of_landing(to, landing)
        rows = self.buffer(where.count, self.wire.wire_dtype)
        pending = self.transfer(sends, {to: rows}, GRADIENT_INSIDE)
        self.returning_inside = Returning(pending, rows, where, self.returned if landing is None else landing.total)

    def _give_back_across(self, distance: int, landing: Landing) -> None:
        """Send the node's sum to the owner; receive the sum of node m + distance for our own rows."""
        self._take_back_inside()  # the node's last contribution
        self._take_back_across()
        node = self.node + distance
        where = self._of_node(node, landing.part)
        rows = self.buffer(where.count, self.wire.wire_dtype)
        sends = {landing.owner: landing.total.to(self.wire.wire_dtype)}
        pending = self.transfer(sends, {self._rank(node, self.index): rows}, SUM_ACROSS)
        self.returning_across = Returning(pending, rows, where, self.returned)

    def _take_back_inside(self) -> None:
        if self.returning_inside is not None:
            self.returning_inside.finish()
            self.returning_inside = None

    def _take_back_across(self) -> None:
        if self.returning_across is not None:
            self.returning_across.finish()
            self.returning_across = None
