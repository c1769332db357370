"""What a named range costs where no profiler runs: nanoseconds of each form, and their share of a small attention call.

    python benchmarks/ranges.py

One thread. `record_function` alone is what every range would cost without the question whether a profiler runs.
"""

import os
import timeit

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from megatron.bdlm.attention.functional import block_diffusion_attention  # noqa: E402
from megatron.bdlm.parallel.plan import SequencePlan  # noqa: E402
from megatron.bdlm.platform.ranges import span, spanned  # noqa: E402

CALLS, REPEATS = 20_000, 5


def nanoseconds(statement) -> float:
    return min(timeit.repeat(statement, number=CALLS, repeat=REPEATS)) / CALLS * 1e9


def with_span() -> None:
    with span("bdlm/step"):
        pass


def with_record_function() -> None:
    with torch.profiler.record_function("bdlm/step"):
        pass


def nothing() -> None:
    pass


decorated = spanned("bdlm/step")(nothing)


def attention_seconds() -> float:
    """Forward and backward of the smallest attention of the tests: L = 128, S = 8, 4 heads of 16."""
    plan = SequencePlan.build(128, 8)
    q, k, v = (torch.randn(plan.s_local, 1, heads, 16, requires_grad=True) for heads in (4, 2, 2))

    def call() -> None:
        block_diffusion_attention(q, k, v, plan).sum().backward()

    call()
    return min(timeit.repeat(call, number=20, repeat=REPEATS)) / 20


def main() -> None:
    torch.set_num_threads(1)
    empty = nanoseconds(nothing)
    costs = {"span": nanoseconds(with_span) - empty, "spanned": nanoseconds(decorated) - empty}
    costs["record_function alone"] = nanoseconds(with_record_function) - empty
    for name, cost in costs.items():
        print(f"{name:22} {cost:8.0f} ns")
    seconds = attention_seconds()
    ranges = 2 * costs["spanned"] * 2 + 5 * costs["span"]  # of one layer on one rank: attention and tiles twice, the exchange
    print(f"attention, L = 128      {seconds * 1e6:8.0f} us; its ranges {ranges * 1e-3:.2f} us, {ranges * 1e-9 / seconds:.3%}")


if __name__ == "__main__":
    main()
