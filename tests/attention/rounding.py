"""How far a kernel in a 16-bit type may be from exact attention: bounds from the type's unit roundoff, not guessed.

With u the unit roundoff (2^-8 for bfloat16, 2^-11 for float16), P the probabilities, O = P V, and every product summed in
float32, first-order bounds on what is rounded to 16 bits, element by element (|.| taken of every factor):

    out   probabilities (u), a rectangle's output (u), the merged output (u)           3 u P |V|
    dP    delta = rowsum(dout * out) takes over out's error                            E = |dout| . 3 u P |V|, a number a row
    dS    probabilities and dS itself                                                  e = s P E + 2 u |dS|
    dq    dS, a rectangle's dq, the sum of two rectangles                              e |K| + 2 u |dS| |K|
    dk    dS, the sums of two blocks of rows                                           e^T |Q| + 2 u |dS|^T |Q|
    dv    probabilities, the sums of two blocks of rows                                3 u P^T |dout|

The log-sum-exp is never rounded to 16 bits. `FLOAT32` covers sums and exponentials in float32.
"""

import torch

FLOAT32 = 2.0**-16  # relative to the largest entry: 2^-24 for each of a few hundred additions


def exact_and_bounds(q, k, v, dout, scale, causal, dtype):
    """Exact (out, lse, dq, dk, dv) in float64 on the CPU, and how far each may be off; inputs [n, h, rows, d] of `dtype`."""
    u = torch.finfo(dtype).eps / 2
    q, k, v, dout = (x.detach().double().cpu() for x in (q, k, v, dout))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    lse, p = scores.logsumexp(-1), scores.softmax(-1)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    exact = (out, lse, ds @ k, ds.mT @ q, p.mT @ dout)
    off_out = 3 * u * (p @ v.abs())
    off_ds = scale * p * (dout.abs() * off_out).sum(-1, keepdim=True) + 2 * u * ds.abs()
    bounds = (
        off_out,
        torch.zeros_like(lse),
        off_ds @ k.abs() + 2 * u * ds.abs() @ k.abs(),
        off_ds.mT @ q.abs() + 2 * u * ds.abs().mT @ q.abs(),
        3 * u * p.mT @ dout.abs(),
    )
    return exact, tuple(bound + FLOAT32 * value.abs().max() for bound, value in zip(bounds, exact))


def assert_within(found, exact, bounds) -> None:
    """Every element within its bound; the message gives the worst one."""
    for name, ours, value, bound in zip(("out", "lse", "dq", "dk", "dv"), found, exact, bounds):
        excess = ((ours.detach().double().cpu() - value).abs() / bound).max().item()
        assert excess <= 1, f"{name}: {excess:.2f} times the bound"
