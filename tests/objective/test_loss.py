"""(sum, count) losses: layouts and empty parts leave loss and gradient unchanged; identities of the NELBO.

`parts` stands for the engine: it adds sums, counts and gradients over parts (ranks and micro-batches) and divides once.
"""

import math

import numpy as np
import pytest
import torch

from megatron.bdlm.data.noise import VALIDATION_T_RANGE, corrupt
from megatron.bdlm.data.schedules import SCHEDULES
from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy
from megatron.bdlm.objective.loss import GlobalCounts, ScoredRows, block_diffusion_loss, sample_counts, select_rows
from megatron.bdlm.objective.targets import build_targets
from tests.objective.hand import all_rows, cost, make, targets_by_hand

VOCABULARY, HIDDEN = 40, 6


def network(seed=0):
    """A stand-in for the model: hidden states of global rows are fixed features times one trained matrix."""
    generator = torch.Generator().manual_seed(seed)
    trained = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    return trained, head


def features(sample, rows):
    generator = torch.Generator().manual_seed(100 + sample)
    return torch.randn(10_000, HIDDEN, generator=generator, dtype=torch.float64)[rows]


def engine(parts, config, counts):
    """(loss, gradients, metrics) of parts [(sample, targets, rows)]; each part is one rank's micro-batch."""
    trained, head = network()
    total, count, metrics = 0.0, 0, {}
    for sample, targets, rows in parts:
        selected = select_rows([targets], rows, share=1 / len(parts))
        hidden = (features(sample, rows) @ trained)[selected.index]
        nll = linear_cross_entropy(hidden, head, selected.target, chunk=5, excluded_token=9)
        loss, part_count, part_metrics = block_diffusion_loss(nll, selected, config, counts)
        assert part_count.dtype == torch.int
        loss.backward()
        total, count = total + loss.item(), count + part_count.item()
        for name, pair in part_metrics.items():
            metrics[name] = metrics.get(name, 0) + pair.double()
    divisor = max(1, count)  # the engine clamps
    return total / divisor, [trained.grad / divisor, head.grad / divisor], metrics


def split(targets, parts, seed=0):
    """Random disjoint row sets whose union is every row of the sample."""
    owner = np.random.default_rng(seed).integers(0, parts, targets.target.size)
    return [np.flatnonzero(owner == part) for part in range(parts)]


def batch_of(config, lengths=(24, 30, 7), prompt=3):
    out = []
    for index, length in enumerate(lengths):
        tokens, eligible = 10 + np.arange(length) % 30, np.arange(length) >= min(prompt, length)
        noised = corrupt(tokens, eligible, config, 1, index)
        out.append(build_targets(tokens, eligible, noised, None, config))
    return out


@pytest.mark.parametrize("recipe", ["bd3lm", "sdar", "fast-dllm-v2", "llada2-sft", "nemotron-joint", "i-dlm"])
def test_layouts_leave_loss_and_gradient_unchanged(recipe):
    """Faults B1, B6: whole samples on one rank against random shares of the rows on 4: 1e-12, and equal counts."""
    config = make(recipe, block_size=4)
    batch = batch_of(config)
    counts = sum(map(sample_counts, batch), GlobalCounts(0, 0))
    one = [(i, targets, all_rows(targets)) for i, targets in enumerate(batch)]
    many = [(i, targets, rows) for i, targets in enumerate(batch) for rows in split(targets, 4, i)]
    loss, gradients, metrics = engine(one, config, counts)
    loss_many, gradients_many, metrics_many = engine(many, config, counts)
    assert loss_many == pytest.approx(loss, rel=1e-12)
    for a, b in zip(gradients, gradients_many):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert metrics.keys() == metrics_many.keys()
    for name in metrics.keys() - {"parts without supervised tokens"}:  # that one counts parts
        torch.testing.assert_close(metrics[name], metrics_many[name], rtol=1e-5, atol=1e-6)


def test_one_masked_token_here_and_31_there():
    """Fault B1: 32 corrupted tokens, one of them on the first rank: the mean over 32, not the mean of two means."""
    config = make(block_size=32, t_min=1.0)
    targets = batch_of(config, lengths=(32,), prompt=0)[0]
    rows = all_rows(targets)
    counts = sample_counts(targets)
    whole = engine([(0, targets, rows)], config, counts)
    parts = engine([(0, targets, rows[:1]), (0, targets, rows[1:])], config, counts)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    for a, b in zip(whole[1], parts[1]):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_rows_of_samples_with_plans_of_their_own():
    """Two samples in a micro-batch, each with its rows and padding: index points into [s_local, b] flattened."""
    config = make(block_size=2)
    samples = [targets_by_hand(config, 4, [view], [0.5] * 4) for view in ([0, 3], [1])]
    rows = np.array([[3, 0, -1], [-1, 1, 2]])  # [b, s_local]
    selected = select_rows(samples, rows)
    # local row 0 of sample 0 is token 3; local row 1 of sample 0 is token 0, of sample 1 token 1
    assert selected.index.tolist() == [0 * 2 + 0, 1 * 2 + 0, 1 * 2 + 1]
    assert selected.target.tolist() == [13, 10, 11]
    assert selected.counts == GlobalCounts(4, 0) and selected.masked == 3
    assert selected.bucket_supervised.tolist() == [0, 0, 0, 0, 0, 4, 0, 0, 0, 0]


def test_replicated_clean_rows_are_scored_once():
    """Every rank holds the clean stream (strategy bp): `scored_clean` says whose loss it is."""
    config = make("nemotron-joint", block_size=2)
    targets = targets_by_hand(config, 4, [[1, 2]], [0.5] * 4)
    left, right = np.array([0, 1, 4, 5, 6, 7]), np.array([2, 3, 4, 5, 6, 7])
    mine = [np.array([True] * 4 + [False] * 2), np.array([False] * 4 + [True] * 2)]
    one, two = select_rows([targets], left, mine[0]), select_rows([targets], right, mine[1])
    assert one.counts + two.counts == sample_counts(targets) == GlobalCounts(4, 3)
    assert one.target[one.clean].tolist() + two.target[two.clean].tolist() == [11, 12, 13]


@pytest.mark.parametrize("recipe", ["bd3lm", "fast-dllm-v2", "llada2-sft", "nemotron-joint"])
def test_nothing_supervised(recipe):
    """Fault B3: no supervised token here, or anywhere: finite zero, zero gradients on every parameter, a counter."""
    config = make(recipe, block_size=4)
    empty = batch_of(config, lengths=(8,), prompt=8)[0]
    loss, gradients, metrics = engine([(0, empty, all_rows(empty))], config, sample_counts(empty))
    assert loss == 0.0
    for gradient in gradients:
        assert gradient is not None and (gradient == 0).all()
    assert metrics["parts without supervised tokens"].tolist() == [1.0, 1.0]
    assert all(torch.isfinite(pair).all() for pair in metrics.values())
    full = batch_of(config, lengths=(16,))[0]
    alone = engine([(0, full, all_rows(full))], config, sample_counts(full))
    beside = engine([(0, full, all_rows(full)), (1, empty, all_rows(empty))], config, sample_counts(full))
    assert beside[0] == alone[0]
    for a, b in zip(alone[1], beside[1]):
        assert torch.equal(a, b)


def test_clean_loss_alone_when_nothing_is_corrupted_or_counted():
    """N_d = 0 with the masked denominator: the engine divides by 1, and the clean part is still w_c S_c / N_c."""
    joint = dict(clean_attention="token-causal", clean_loss_weight=0.5)
    config = make(block_size=4, loss_denominator="masked", loss_weight="unit", **joint)
    targets = targets_by_hand(config, 5, [[]], [0.5] * 5)
    rows = select_rows([targets], all_rows(targets))
    total, count, _ = block_diffusion_loss(cost(rows), rows, config, sample_counts(targets))
    # rows 0..3 predict tokens 1..4 at .2 + .3 + .4 + .5 = 1.4 over 4, times .5
    assert count.item() == 0 and total.item() == pytest.approx(0.5 * 1.4 / 4)


def test_joint_gradient_has_two_denominators():
    """d loss / d nll over a batch of two samples: w_d * weight / N_d on noisy rows, w_c / N_c on clean rows."""
    config = make("nemotron-joint", block_size=4)
    batch = [targets_by_hand(config, 6, [[1, 4]], [0.5] * 6), targets_by_hand(config, 3, [[0]], [0.25] * 3)]
    counts = sum(map(sample_counts, batch), GlobalCounts(0, 0))
    assert counts == GlobalCounts(6 + 3, 5 + 2)
    for targets in batch:
        rows = select_rows([targets], all_rows(targets))
        nll = cost(rows)
        loss, _, _ = block_diffusion_loss(nll, rows, config, counts)
        (loss / 9).backward()
        expected = torch.where(rows.clean, 1.0 / 7, 0.3 * rows.weight.double() / 9)
        torch.testing.assert_close(nll.grad, expected, rtol=1e-14, atol=0)


def test_joint_loss_without_global_counts_is_refused():
    config = make("nemotron-joint")
    rows = select_rows([targets_by_hand(config, 4, [[1]], [0.5] * 4)], np.arange(8))
    with pytest.raises(ValueError, match="--bdlm-clean-loss-weight 1.0: the loss on clean rows has its own denom"):
        block_diffusion_loss(cost(rows), rows, config)


def test_wrong_number_of_values_is_refused():
    config = make()
    rows = select_rows([targets_by_hand(config, 4, [[1]], [0.5] * 4)], np.arange(8))
    with pytest.raises(ValueError, match=r"nll \(3,\): expected \(1,\)"):
        block_diffusion_loss(torch.zeros(3), rows, config)


def test_both_denominators_have_their_own_names():
    """Fault B5: 8 supervised tokens, 3 corrupted, unit weight: 11 nats are 11/8 and 11/3, whichever is trained on."""
    for denominator, count in (("supervised", 8.0), ("masked", 3.0)):
        config = make(block_size=4, loss_weight="unit", loss_denominator=denominator)
        targets = targets_by_hand(config, 8, [[1, 2, 5]], [0.5] * 8)
        rows = select_rows([targets], all_rows(targets))
        _, _, metrics = block_diffusion_loss(cost(rows), rows, config)
        assert metrics["lm loss"].tolist() == [11.0, count]
        assert metrics["diffusion loss per supervised token"].tolist() == [11.0, 8.0]
        assert metrics["diffusion loss per masked token"].tolist() == [11.0, 3.0]


def test_metric_names_are_frozen():
    targets = targets_by_hand(config := make("nemotron-joint"), 4, [[1]], [0.5] * 4)
    rows = select_rows([targets], all_rows(targets))
    losses = [
        "lm loss",
        "diffusion loss per supervised token",
        "diffusion loss per masked token",
        "masked cross entropy",
        "nelbo",
        "clean cross entropy",
    ]
    counters = ["masked fraction", "supervised tokens", "parts without supervised tokens"]
    buckets = [f"nelbo t 0.{i}-{'1.0' if i == 9 else f'0.{i + 1}'}" for i in range(10)]
    counts = sample_counts(targets)
    assert list(block_diffusion_loss(cost(rows), rows, config, counts)[2]) == losses + counters + buckets
    assert list(block_diffusion_loss(cost(rows), rows, config, counts, diagnostics=False)[2]) == losses


def test_three_values_of_which_the_second_is_what_the_engine_adds_up():
    """Fault B2: sum, count, metrics; the engine adds the counts of micro-batches in an int32. One tuple of another length
    would be read as a mean already, and scaled again; the flag under which that happens is refused at start.
    """
    config = make()
    targets = targets_by_hand(config, 4, [[1, 3]], [0.5] * 4)
    rows = select_rows([targets], all_rows(targets))
    loss, count, metrics = block_diffusion_loss(cost(rows), rows, config, sample_counts(targets))
    assert loss.dim() == 0 and count.dtype == torch.int32 and int(count) == 4 and isinstance(metrics, dict)
    total = torch.zeros([], dtype=torch.int)
    total += count
    assert int(total) == 4


def test_rows_move_to_a_device():
    rows = select_rows([targets_by_hand(make(), 4, [[1]], [0.5] * 4)], np.arange(8))
    moved = rows.to("meta")
    assert isinstance(moved, ScoredRows) and moved.weight.is_meta and moved.index.is_meta
    assert moved.counts == rows.counts


# ---- identities ------------------------------------------------------------------------------------


def constant_nll(targets, candidates=VOCABULARY):
    """NLL of a head whose logits are all zero, the mask (one of `candidates` + 1 ids) excluded."""
    rows = select_rows([targets], all_rows(targets))
    hidden = torch.zeros(len(rows.index), HIDDEN, dtype=torch.float64)
    head = torch.zeros(candidates + 1, HIDDEN, dtype=torch.float64)
    nll = linear_cross_entropy(hidden, head, rows.target, excluded_token=9)
    return nll, rows


def nelbo(targets, config):
    nll, rows = constant_nll(targets)
    counts = sample_counts(targets)
    total, count = block_diffusion_loss(nll, rows, config, counts, diagnostics=False)[2]["nelbo"].double().tolist()
    return total / count


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", [1, 4, 32])
def test_constant_logits_give_exactly_ln_n_at_t_one(schedule, block):
    """t = 1 corrupts everything with weight 1."""
    config = make(block_size=block, noise_schedule=schedule, t_min=1.0)
    targets = batch_of(config, lengths=(32,), prompt=4)[0]
    assert nelbo(targets, config) == pytest.approx(math.log(VOCABULARY), rel=1e-6)


def test_constant_logits_give_exactly_ln_n_when_the_mask_realises_p():
    """p = 1/2 (eps = 0), weight 2, and exactly half of the 8 tokens corrupted."""
    config = make(block_size=4, noise_eps=0.0)
    targets = targets_by_hand(config, 8, [[0, 3, 4, 5]], [0.5] * 8)
    assert nelbo(targets, config) == pytest.approx(math.log(VOCABULARY), rel=1e-6)


def test_constant_logits_give_exactly_ln_n_over_complementary_views():
    """Every supervised token is scored once with weight 1: the training loss is ln n for every draw."""
    config = make("fast-dllm-v2", block_size=4, keep_mask_logit=False)
    for targets in batch_of(config):
        nll, rows = constant_nll(targets)
        total, count, _ = block_diffusion_loss(nll, rows, config)
        assert total.item() / count.item() == pytest.approx(math.log(VOCABULARY), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", [1, 16, 512])
def test_constant_logits_give_ln_n_within_sampling_error(schedule, block):
    """200 samples of 512 tokens with validation noise; the standard error comes from the samples' own spread."""
    config = make(block_size=block, noise_schedule=schedule, t_min=0.3, t_max=0.8)
    tokens, eligible = 10 + np.arange(512) % 30, np.ones(512, bool)
    values = []
    for index in range(200):
        noised = corrupt(tokens, eligible, config, 3, index, t_range=VALIDATION_T_RANGE, purpose="validation")
        targets = build_targets(tokens, eligible, noised, None, config)
        values.append(float((targets.nelbo_weight[0].astype(np.float64)).sum()) / 512)
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - 1.0) <= 4 * error, (np.mean(values), error)


def test_block_size_one_at_t_one_is_the_autoregressive_likelihood():
    """Noisy row i of a model conditioned on clean tokens before i, against a loop over log-softmaxes."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    config = make(block_size=1, t_min=1.0)
    tokens = 10 + np.random.default_rng(0).integers(0, 30, 12)
    ids = torch.from_numpy(tokens)
    noised = corrupt(tokens, np.ones(12, bool), config)
    targets = build_targets(tokens, np.ones(12, bool), noised, None, config)
    rows = select_rows([targets], all_rows(targets))
    nothing = torch.zeros(1, HIDDEN, dtype=torch.float64)
    prefix = torch.cat([nothing, embedding[ids].cumsum(0)[:-1]])  # what row i may see
    nll = linear_cross_entropy(torch.tanh(prefix)[rows.index], head, rows.target, excluded_token=9)
    total, count, _ = block_diffusion_loss(nll, rows, config)

    expected = 0.0
    for i in range(12):
        logits = [float(head[v] @ torch.tanh(sum((embedding[ids[j]] for j in range(i)), torch.zeros(HIDDEN).double())))
                  for v in range(VOCABULARY)]  # fmt: skip
        normaliser = math.log(sum(math.exp(x) for v, x in enumerate(logits) if v != 9))
        expected += normaliser - logits[tokens[i]]
    assert total.item() / count.item() == pytest.approx(expected / 12, rel=1e-12)
