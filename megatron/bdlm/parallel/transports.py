"""Transports on one level: `direct`, `ring`, `allgather` (terms and verbs: `exchange`).

direct      only needed rows, from owner to user; bytes on average 3/4 of a ring's
ring        the shared rows of a rank travel past everybody; in backward their gradient sum travels with them
allgather   all shared rows at once (memory of size L), gradients by reduce-scatter
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.bdlm.parallel.exchange import Arrival, Exchange, Pending

KV, GRADIENT = 1, 2  # message tags


class DirectExchange(Exchange):
    """Step t: send to rank + t what it needs, receive from rank - t. One step in flight beside the current one."""

    def begin(self) -> None:
        self.outgoing = {peer: self.rows_for(peer, self.link.rank) for peer in self.program.sends}
        self.next = self._post(1)
        self.returning: tuple[Pending, int, torch.Tensor | None] = (Pending(), -1, None)

    def _peers(self, step: int) -> tuple[int, int]:
        return (self.link.rank + step) % self.link.size, (self.link.rank - step) % self.link.size

    def _post(self, step: int) -> tuple[Pending, torch.Tensor | None]:
        to, source = self._peers(step)
        sends = {to: self.outgoing[to].take(self.shared)} if to in self.outgoing else {}
        rows = self.buffer(len(self.pieces[source].rows)) if source in self.pieces else None
        return self.transfer(sends, {} if rows is None else {source: rows}, KV), rows

    def arrivals(self) -> Iterator[Arrival]:
        for step in range(1, self.link.size):
            to, source = self._peers(step)
            pending, rows = self.next
            pending.wait()
            if step + 1 < self.link.size:
                self.next = self._post(step + 1)
            arrival = None
            if rows is not None:
                arrival = self.arrival(self.pieces[source], rows)
                yield arrival
            if self.wire is not None:
                self._give_back(to, source, arrival)
        if self.wire is not None:
            self._take_back()

    def _give_back(self, to: int, source: int, arrival: Arrival | None) -> None:
        """Return the piece's gradient to its owner, and post the receive of what `to` computed for our rows."""
        self._take_back()
        sends = {} if arrival is None else {source: arrival.gradient.to(self.wire.wire_dtype)}
        rows = self.buffer(self.outgoing[to].count, self.wire.wire_dtype) if to in self.outgoing else None
        self.returning = self.transfer(sends, {} if rows is None else {to: rows}, GRADIENT), to, rows

    def _take_back(self) -> None:
        """Finish the gradient transfer under way and add what it brought."""
        pending, peer, rows = self.returning
        pending.wait()
        if rows is not None:
            self.outgoing[peer].add(self.returned, rows)
        self.returning = (Pending(), -1, None)


class RingExchange(Exchange):
    """Step t: rank holds the shared rows of rank - t, and passes them to rank + 1.

    The gradient sum of an owner's rows starts at its right neighbour, travels with the rows, grows by each rank's
    contribution, and comes home from the left: P - 1 hops each for rows and gradients.
    """

    def begin(self) -> None:
        self.right, self.left = (self.link.rank + 1) % self.link.size, (self.link.rank - 1) % self.link.size
        self.next = self._post(1, self.shared)

    def _owner(self, step: int) -> int:
        return (self.link.rank - step) % self.link.size

    def _shape(self, step: int) -> int:
        return len(self.program.shared[self._owner(step)])

    def _post(self, step: int, held: torch.Tensor) -> tuple[Pending, torch.Tensor]:
        """Pass on what is held, receive what step `step` works on."""
        rows = self.buffer(self._shape(step))
        return self.transfer({self.right: held}, {self.left: rows}, KV), rows

    def arrivals(self) -> Iterator[Arrival]:
        travelling, incoming = Pending(), None  # gradient sum of the current owner, on its way from the left
        for step in range(1, self.link.size):
            owner = self._owner(step)
            pending, held = self.next
            pending.wait()
            if step + 1 < self.link.size:
                self.next = self._post(step + 1, held)
            arrival, where = None, None
            if owner in self.pieces:
                where = self.rows_for(self.link.rank, owner)
                arrival = self.arrival(self.pieces[owner], where.take(held))
                yield arrival
            if self.wire is not None:
                travelling.wait()
                travelling, incoming = self._pass_gradient(step, incoming, arrival, where)
        if self.wire is not None:
            travelling.wait()
            self.returned += incoming

    def _pass_gradient(self, step, incoming, arrival, where) -> tuple[Pending, torch.Tensor]:
        """Add our contribution to the owner's sum and pass it on; the sum of the next step's owner comes in."""
        if incoming is None:
            total = torch.zeros(
                self._shape(step), *self.shared.shape[1:], dtype=self.wire.sum_dtype, device=self.shared.device
            )
        else:
            total = incoming.to(self.wire.sum_dtype)
        if arrival is not None:
            where.add(total, arrival.gradient)
        rows = self.buffer(self._shape(step + 1), self.wire.wire_dtype)
        return self.transfer({self.right: total.to(self.wire.wire_dtype)}, {self.left: rows}, GRADIENT), rows


class AllGatherExchange(Exchange):
    """One all-gather of the shared rows, padded to the longest; gradients are reduce-scattered in the summing type."""

    def begin(self) -> None:
        self.longest = max(len(rows) for rows in self.program.shared)
        mine = self.shared
        if len(mine) < self.longest:
            mine = self.buffer(self.longest)
            mine[: len(self.shared)] = self.shared
            mine[len(self.shared) :] = 0
        self.gathered = self.buffer(self.longest * self.link.size)
        self._count(mine, mine)
        work = dist.all_gather_into_tensor(self.gathered, mine, group=self.link.group, async_op=True)
        self.pending = Pending([work], (mine,))

    def _count(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        for peer in range(self.link.size):
            if peer != self.link.rank:
                self.link.count("sent", self.direction, peer, sent)
                self.link.count("received", self.direction, peer, received)

    def arrivals(self) -> Iterator[Arrival]:
        self.pending.wait()
        gradients = None
        if self.wire is not None:
            gradients = torch.zeros(self.gathered.shape, dtype=self.wire.sum_dtype, device=self.gathered.device)
        for step in range(1, self.link.size):
            owner = (self.link.rank - step) % self.link.size
            if owner not in self.pieces:
                continue
            span = slice(owner * self.longest, (owner + 1) * self.longest)
            where = self.rows_for(self.link.rank, owner)
            arrival = self.arrival(self.pieces[owner], where.take(self.gathered[span]))
            yield arrival
            if gradients is not None:
                where.add(gradients[span], arrival.gradient)
        if gradients is not None:
            total = self.buffer(self.longest, self.wire.sum_dtype)
            self._count(total, total)
            dist.reduce_scatter_tensor(total, gradients, group=self.link.group)
            self.returned += total[: len(self.shared)]
