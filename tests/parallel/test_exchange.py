"""Transports alone: who gets which rows, gradient sums, exact bytes, and an order of transfers that cannot deadlock.

The ranks are threads of one process over mailboxes, so groups of 8 cost nothing; gloo runs the same code in
tests/attention/test_functional.py.
"""

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron.bdlm.parallel import exchange as E
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.parallel.transport_choice import open_exchange

H, D, D_V = 2, 4, 3  # heads, head sizes of k and v


class Mailboxes:
    """First in, first out between every two threads and for every tag."""

    def __init__(self):
        self.boxes = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, *key) -> queue.Queue:
        with self.lock:
            return self.boxes[key]


@dataclass
class Delivery:
    box: queue.Queue
    into: torch.Tensor

    def wait(self) -> None:
        self.into.copy_(self.box.get(timeout=20))


@dataclass(frozen=True)
class ThreadLink(E.Link):
    """A link between threads that counts its bytes and notes its batches."""

    mail: Mailboxes = None
    bytes: dict = field(default_factory=lambda: defaultdict(int))
    batches: list = field(default_factory=list)

    def transfer(self, sends, receives, direction, tag):
        sends = {peer: x for peer, x in sends.items() if x.numel()}
        receives = {peer: x for peer, x in receives.items() if x.numel()}
        for peer, x in sends.items():
            assert x.is_contiguous()
            self.count("sent", direction, peer, x)
            self.mail.box(self.rank, peer, tag).put(x.clone())
        for peer, x in receives.items():
            self.count("received", direction, peer, x)
        if sends or receives:
            self.batches.append(
                ({peer: x.numel() for peer, x in sends.items()}, {peer: x.numel() for peer, x in receives.items()})
            )
        return E.Pending([Delivery(self.mail.box(peer, self.rank, tag), x) for peer, x in receives.items()])

    def count(self, verb, direction, peer, tensor):
        place = "intra_node" if self.node(peer) == self.node(self.rank) else "inter_node"
        for key in ((direction, verb), (direction, verb, place)):
            self.bytes[key] += tensor.numel() * tensor.element_size()


def values(rank: int, rows: np.ndarray) -> torch.Tensor:
    """What rank holds in its local rows: every entry names rank, row and column."""
    columns = torch.arange(H * (D + D_V), dtype=torch.float64)
    return (rank * 1e6 + torch.from_numpy(rows)[:, None] * 1e3 + columns).view(-1, H, D + D_V)


def share(rank: int, rows: np.ndarray) -> torch.Tensor:
    """Gradient that `rank` computes for some local rows of another rank."""
    return (torch.from_numpy(rows).double() + 1)[:, None, None] * (rank + 1) * torch.ones(1, H, D + D_V)


def one_rank(link, transport, plan, dtype, answers):
    """Forward and backward of one rank; checks what arrives, returns the gradient sum of its shared rows."""
    program = plan.program()
    shared = program.shared[link.rank]
    needed = lambda rank, source: plan.needed_rows(rank, source)
    for wire in (None, E.Wire(torch.float64, dtype)):
        exchange = open_exchange(transport, program, link, needed, wire)
        exchange.post(values(link.rank, shared))
        arrived = defaultdict(list)
        for arrival in exchange.arrivals():
            source, rows = arrival.piece.source, arrival.piece.rows
            arrived[source].append(rows)
            torch.testing.assert_close(arrival.rows, values(source, rows), rtol=0, atol=0)
            assert (arrival.gradient is None) == (wire is None)
            if wire is not None:
                arrival.gradient += share(link.rank, rows)
        assert sorted(arrived) == sorted(piece.source for piece in program.remote)
        for piece in program.remote:  # whole or in parts, each row once
            assert np.array_equal(np.concatenate(arrived[piece.source]), piece.rows)
    answers[link.rank] = (program, exchange.collect())


def run(transport, size, ranks_per_node=None, dtype=torch.float64, **plan_arguments):
    """All ranks as threads; returns links (bytes, batches), programs and gradient sums by rank."""
    mail, answers, failures = Mailboxes(), {}, []
    links = [ThreadLink(None, rank, size, ranks_per_node or size, mail) for rank in range(size)]

    def body(link):
        try:
            plan = SequencePlan.build(**plan_arguments, context_parallel_size=size, rank=link.rank)
            one_rank(link, transport, plan, dtype, answers)
        except BaseException as error:  # raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=body, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return links, [answers[rank][0] for rank in range(size)], [answers[rank][1] for rank in range(size)]


def expected_gradients(programs) -> list[torch.Tensor]:
    """Sum over the ranks of what each returns for its piece of an owner, over the owner's shared rows."""
    totals = [torch.zeros(len(rows), H, D + D_V, dtype=torch.float64) for rows in programs[0].shared]
    for rank, program in enumerate(programs):
        for piece in program.remote:
            where = torch.from_numpy(np.searchsorted(programs[0].shared[piece.source], piece.rows))
            totals[piece.source][where] += share(rank, piece.rows)
    return totals


PLANS = {
    "csbp": dict(seq_length=64, block_size=4),
    "csbp ragged documents": dict(seq_length=61, block_size=3, documents=[20, 9, 32], views=2),
    "cp": dict(seq_length=64, block_size=4, strategy="cp"),
    "hybrid": dict(seq_length=60, block_size=10, strategy="hybrid", block_parallel_size=2),
}
WAYS = {
    "direct": ("direct", None),
    "ring": ("ring", None),
    "hierarchical 2 a node": ("hierarchical", 2),
    "hierarchical 4 a node": ("hierarchical", 4),
    "hierarchical 1 a node": ("hierarchical", 1),
}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLANS)
def test_rows_arrive_gradients_return_and_nothing_can_deadlock(name, way, size):
    transport, ranks_per_node = WAYS[way]
    ranks_per_node = ranks_per_node and min(ranks_per_node, size)
    links, programs, gradients = run(transport, size, ranks_per_node, **PLANS[name])
    for ours, expected in zip(gradients, expected_gradients(programs)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert_no_deadlock([link.batches for link in links])


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_an_owner_of_one_row_is_seen_once(ranks_per_node):
    """Fewer rows than the parts in which they cross: the row must not cross in two of them (fault A7)."""
    plan = dict(seq_length=8, block_size=5, strategy="hybrid", block_parallel_size=2, views=2, target_blocks=[0])
    links, programs, gradients = run("hierarchical", 4, ranks_per_node, **plan)
    assert 1 in {len(rows) for rows in programs[0].shared}
    for ours, expected in zip(gradients, expected_gradients(programs)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def assert_no_deadlock(batches):
    """NCCL's rule: a rank's batches run in order, each until all of its sends and receives have met their partner."""
    left = [[(dict(sends), dict(receives)) for sends, receives in of_rank] for of_rank in batches]
    moved = True
    while moved:
        moved = False
        for rank, of_rank in enumerate(left):
            for peer, count in list(of_rank[0][0].items()) if of_rank else ():
                if left[peer] and rank in left[peer][0][1]:
                    assert left[peer][0][1].pop(rank) == count, "two ranks disagree about a message's size"
                    of_rank[0][0].pop(peer)
                    moved = True
        for of_rank in left:
            while of_rank and not of_rank[0][0] and not of_rank[0][1]:
                of_rank.pop(0)
                moved = True
    assert not any(left), f"ranks wait for each other: {left}"


# ---- bytes -------------------------------------------------------------------------------------------

ITEM = 8  # float64
TOKEN = H * (D + D_V) * ITEM  # K and V of one token


def total(links, *key):
    return sum(link.bytes[key] for link in links)


def test_direct_moves_the_needed_rows_only_and_three_eighths_of_the_conventional_ring():
    size, length = 4, 64
    half_chunk = length // (2 * size)
    direct, programs, _ = run("direct", size, seq_length=length, block_size=4)
    ring, _, _ = run("ring", size, seq_length=length, block_size=4, strategy="cp")
    # semantics: rank a needs half chunk s of rank s < a, both half chunks of rank s > a
    for link in direct:
        needed = sum((1 if source < link.rank else 2) * half_chunk for source in range(size) if source != link.rank)
        assert link.bytes["forward", "received"] == needed * TOKEN
        assert link.bytes["backward", "received"] >= needed * TOKEN
    forward = 1.5 * (size - 1) * half_chunk * TOKEN * size
    assert total(direct, "forward", "sent") == total(direct, "forward", "received") == forward
    assert total(direct, "backward", "sent") == 2 * forward  # K/V again and dK/dV
    assert total(ring, "forward", "sent") == (size - 1) * 4 * half_chunk * TOKEN * size
    assert total(direct, "forward", "sent") * 8 == total(ring, "forward", "sent") * 3
    assert total(direct, "backward", "sent") * 8 == total(ring, "backward", "sent") * 3


def test_bytes_do_not_depend_on_the_views_and_csbp_never_sends_noisy_rows():
    counts = []
    for views in (1, 2):
        links, programs, _ = run("direct", 4, seq_length=64, block_size=4, views=views)
        counts.append([dict(link.bytes) for link in links])
        for rank, program in enumerate(programs):
            plan = SequencePlan.build(64, 4, 4, rank=rank, views=views)
            for rows in program.sends.values():
                assert plan.is_clean[torch.from_numpy(rows)].all()
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("size", "ranks_per_node"), [(4, 2), (8, 4)])
def test_hierarchical_crosses_a_node_boundary_once_per_row(size, ranks_per_node):
    arguments = dict(seq_length=16 * size, block_size=4)
    direct, _, _ = run("direct", size, ranks_per_node, **arguments)
    ours, programs, _ = run("hierarchical", size, ranks_per_node, **arguments)
    crossing = 0  # tokens: for every node, the union of what its ranks need from each rank elsewhere
    for first in range(0, size, ranks_per_node):
        node = range(first, first + ranks_per_node)
        for source in set(range(size)) - set(node):
            needs = [piece.rows for rank in node for piece in programs[rank].remote if piece.source == source]
            crossing += len(np.unique(np.concatenate(needs))) if needs else 0
    assert total(ours, "forward", "sent", "inter_node") == crossing * TOKEN
    assert total(ours, "backward", "sent", "inter_node") == 2 * crossing * TOKEN  # one copy and one sum
    for direction in ("forward", "backward"):
        fraction = total(ours, direction, "sent", "inter_node") / total(direct, direction, "sent", "inter_node")
        assert fraction == 1 / ranks_per_node
    per_card = {link.bytes["forward", "sent", "inter_node"] for link in ours}
    assert max(per_card) <= 2 * min(per_card)


def test_wire_type_halves_gradient_bytes_only():
    full, _, _ = run("direct", 4, seq_length=64, block_size=4)
    half, _, sums = run("direct", 4, dtype=torch.float32, seq_length=64, block_size=4)
    assert total(full, "forward", "sent") == total(half, "forward", "sent")
    assert total(half, "backward", "sent") == total(full, "backward", "sent") * 3 / 4
    assert all(x.dtype == torch.float64 for x in sums)


# ---- small parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[], [3], [2, 3, 4], [0, 2, 3, 7]])
def test_rows_take_and_add(rows):
    x = torch.arange(16.0).view(8, 2)
    some = E.Rows(np.array(rows, dtype=np.int64), x.device)
    assert torch.equal(some.take(x), x[rows] if rows else x[:0])
    changed = x.clone()
    some.add(changed, torch.ones(len(rows), 2))
    assert torch.equal(changed - x, torch.stack([torch.full((2,), float(i in rows)) for i in range(8)]))


@pytest.mark.parametrize(
    ("environment", "argument", "message"),
    [
        (None, 3, "--bdlm-ranks-per-node 3: must divide --context-parallel-size 4"),
        ("3", None, "LOCAL_WORLD_SIZE 3: must divide --context-parallel-size 4"),
    ],
)
def test_ranks_per_node_must_divide_the_group(monkeypatch, environment, argument, message):
    monkeypatch.setattr(E.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(E.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(E.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(E, "exchange_group", lambda group: group)
    if environment:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", environment)
    with pytest.raises(E.ExchangeError, match=message):
        E.Link.of(None, 4, argument)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # a node that is larger than the group
    assert E.Link.of(None, 4).ranks_per_node == 4


def test_auto_is_hierarchical_only_between_nodes():
    plan = SequencePlan.build(64, 4, 4, rank=0)
    chosen = [
        type(open_exchange("auto", plan.program(), E.Link(None, 0, 4, on_node), plan.needed_rows)).__name__
        for on_node in (4, 2)
    ]
    assert chosen == ["DirectExchange", "HierarchicalExchange"]


def test_traffic_is_reset_by_reading():
    E.traffic()
    link = E.Link(None, 0, 4, 2)
    link.count("sent", "forward", 1, torch.zeros(3))
    link.count("sent", "forward", 2, torch.zeros(5))
    counted = E.traffic()["forward"]
    assert (counted["sent"], counted["sent_intra_node"], counted["sent_inter_node"]) == (32, 12, 20)
    assert E.traffic()["forward"]["sent"] == 0
