"""Which exchange serves an attention call: the transport by name, `auto`, or none at all."""

from megatron.bdlm.parallel.exchange import TRANSPORTS, Exchange, ExchangeError, Link, Needed, NothingToExchange, Wire
from megatron.bdlm.parallel.hierarchical import HierarchicalExchange
from megatron.bdlm.parallel.transports import AllGatherExchange, DirectExchange, RingExchange

CLASSES = {
    "direct": DirectExchange,
    "ring": RingExchange,
    "allgather": AllGatherExchange,
    "hierarchical": HierarchicalExchange,
}


def open_exchange(transport: str, program, link: Link, needed: Needed, wire: Wire | None = None) -> Exchange:
    """Exchange of one attention call; `wire` given means backward.

    Args:
        program: this rank's `AttentionProgram`.
        needed: who needs what, for any pair of ranks (only `hierarchical` asks).

    Raises:
        ExchangeError: unknown transport.
    """
    if transport == "auto":
        transport = "hierarchical" if link.nodes > 1 else "direct"
    if transport not in CLASSES:
        raise ExchangeError(f"--bdlm-transport {transport}: no such transport; legal values: {', '.join(TRANSPORTS)}")
    if link.size == 1 or not any(len(rows) for rows in program.shared):
        return NothingToExchange(program, link, wire, needed)
    return CLASSES[transport](program, link, wire, needed)
