"""Shared by the plan's tests: the plans of all ranks, their pairs counted, random samples."""

import numpy as np
from hypothesis import strategies as st

from megatron.bdlm.parallel.batches import RectangleBatch
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.oracle import visible

ORACLE_ARGUMENTS = (
    "seq_length", "block_size", "views", "documents", "clean_attention", "noisy_attention", "block_origin",
    "block_restarts", "target_blocks",
)


def plans_of(**arguments) -> list[SequencePlan]:
    """The plan of every rank."""
    return [SequencePlan.build(rank=rank, **arguments) for rank in range(arguments["context_parallel_size"])]


def pairs_of(batch: RectangleBatch) -> tuple[np.ndarray, np.ndarray]:
    """Every (query row, key) of a batch."""
    row, key = np.mgrid[: batch.queries, : batch.keys]
    kept = {"full": row >= 0, "causal": key <= row, "anticausal": key >= row}[batch.kind]
    return (batch.query_starts[:, None] + row[kept]).ravel(), (batch.key_starts[:, None] + key[kept]).ravel()


def counted_pairs(plans: list[SequencePlan], window=None, queries="all") -> np.ndarray:
    """How often each (global query row, global key row) is computed, over all ranks and pieces."""
    size = (plans[0].views + 1) * plans[0].seq_length
    count = np.zeros((size, size), np.int64)
    for plan in plans:
        program = plan.program(window, queries)
        for piece in (program.local, *program.remote):
            key_rows = plans[piece.source].rows.numpy()[piece.rows]
            for batch in piece.batches:
                query, key = pairs_of(batch)
                np.add.at(count, (plan.rows.numpy()[query], key_rows[key]), 1)
    return count


def allowed_pairs(window=None, queries="all", **arguments) -> np.ndarray:
    """How often each pair must be computed, by the oracle; bp computes clean rows on every rank."""
    wanted = visible(window=window, **{k: v for k, v in arguments.items() if k in ORACLE_ARGUMENTS}).numpy().astype(int)
    clean = arguments.get("views", 1) * arguments["seq_length"]
    if arguments.get("strategy") == "bp":
        wanted[clean:] *= arguments["context_parallel_size"]
    if queries == "noisy":
        wanted[clean:] = 0
    return wanted


@st.composite
def samples(draw, longest=36) -> dict:
    """Arguments of a sample and its layout; some cannot be built (fewer blocks than ranks)."""
    length, size = draw(st.integers(1, longest)), draw(st.sampled_from([1, 2, 3, 4, 5, 8, longest]))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    strategy = draw(st.sampled_from(["csbp", "cp", "bp", "hybrid"]))
    slots = {"cp": 1, "hybrid": draw(st.sampled_from([k for k in (1, 2, 3, 4) if ranks % k == 0]))}.get(strategy, ranks)
    documents = None
    if draw(st.booleans()):
        documents = []
        while sum(documents) < length:
            wanted = draw(st.sampled_from([0, 1, size - 1, size, size + 1, 7]))
            documents.append(min(wanted, length - sum(documents)))
    arguments = dict(
        seq_length=length, block_size=size, context_parallel_size=ranks, block_parallel_size=slots, strategy=strategy,
        views=draw(st.integers(1, 2)), documents=documents,
        clean_attention=draw(st.sampled_from(["block-causal", "token-causal"])),
        noisy_attention=draw(st.sampled_from(["bidirectional", "causal"])),
        block_origin=draw(st.sampled_from([0, 0, 1, 3, 6])),
        block_restarts=draw(st.none() | st.lists(st.integers(0, length - 1), max_size=2)),
    )
    if draw(st.booleans()):
        whole = dict(arguments, context_parallel_size=1, block_parallel_size=1)
        blocks = len(SequencePlan.build(**whole).block_starts)
        chosen = draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
        arguments["target_blocks"] = [block for block in range(blocks) if chosen[block]]
    return arguments


windows = st.sampled_from([None, None, 1, 2, 3, 5, 8, 13, 30, 64])
