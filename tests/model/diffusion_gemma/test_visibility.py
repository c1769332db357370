"""Who sees whom in our model, by perturbation (test 13), and what the builder refuses."""

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.config import BDLMConfigError  # noqa: E402
from tests.model.diffusion_gemma import models  # noqa: E402

LENGTH, FIRST, SIZE = 31, 7, 6  # canvases [7, 13) [13, 19) [19, 25) [25, 31)


def moved_rows(model, plan, x0, xt, *, clean=None, noisy=None):
    """Tokens whose noisy rows, and whose clean rows, move when one token of x0 or of xt is replaced."""
    with torch.no_grad():
        before = models.run(model, plan, x0, xt)
        x0, xt = x0.clone(), xt.clone()
        changed = x0 if clean is not None else xt
        changed[0, clean if clean is not None else noisy] = (changed[0, clean if clean is not None else noisy] + 1) % models.VOCABULARY
        moved = (models.run(model, plan, x0, xt) - before).abs().amax(-1)[0] > 1e-4  # experts multiply other numbers of rows, which rounds otherwise
    return set((FIRST + moved[: LENGTH - FIRST].nonzero().flatten()).tolist()), set(moved[LENGTH - FIRST :].nonzero().flatten().tolist())


def random_model(**kwargs):
    torch.manual_seed(4)
    model = models.ours(**kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.fixture
def rows():
    models.start()
    generator = torch.Generator().manual_seed(1)
    x0, xt = (torch.randint(1, models.VOCABULARY, (1, LENGTH), generator=generator) for _ in range(2))
    return models.plan_of(LENGTH, FIRST, SIZE), x0, xt


def test_canvases_see_earlier_clean_rows_only(rows):
    model = random_model(window=8)
    noisy, clean = moved_rows(model, *rows, clean=14)
    assert noisy and min(noisy) == 19  # canvases that start at or before token 14 do not move
    assert min(clean) == 14


def test_a_canvas_sees_itself_and_is_seen_by_nobody_else(rows):
    model = random_model(window=3)  # shorter than a canvas, which it does not limit
    noisy, clean = moved_rows(model, *rows, noisy=13)
    assert noisy == set(range(13, 19)) and not clean


def test_the_window_is_anchored_at_the_block(rows):
    """One sliding layer, W = 5: the canvas at 19 sees clean rows 15 to 18, all of its rows the same ones."""
    model = random_model(window=5, layers=1, window_attn_skip_freq=None)
    for token, sees in ((14, False), (15, True), (18, True)):
        noisy, _ = moved_rows(model, *rows, clean=token)
        assert noisy.intersection(range(19, 25)) == (set(range(19, 25)) if sees else set())
    _, clean = moved_rows(model, *rows, clean=14)
    assert clean == set(range(14, 19))


def test_routers_are_frozen_by_the_recipe(rows):
    frozen = {name.split("router.")[1] for name, parameter in random_model().named_parameters() if not parameter.requires_grad}
    assert frozen == {"weight", "scale", "per_expert_scale"}
    assert all(parameter.requires_grad for parameter in random_model(bdlm=models.options(bdlm_freeze_router=False)).parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(qk_layernorm=False), "--qk-layernorm False: .* A legal value: True"),
        (dict(window_size=None, window_attn_skip_freq=None), "--window-size None: most of its layers have a window. A legal value: 1023,0"),
        (dict(moe_shared_expert_intermediate_size=None), "--moe-shared-expert-intermediate-size None: .* A legal value: 2112"),
        (dict(recompute_granularity="selective", recompute_modules=["layernorm"]), "--recompute-modules layernorm: .* A legal value: core_attn"),
        (dict(tensor_model_parallel_size=2, sequence_parallel=True), "--tensor-model-parallel-size 2: it must divide the 1 key-value heads"),
    ],
)
def test_flags_of_another_model_are_refused(changes, message):
    models.start()
    with pytest.raises(BDLMConfigError, match=message):
        models.ours(**changes)
