"""The model over two ranks: loss and every gradient as published, tensors kept (tests 8 and 9 of the model)."""

import json
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

pytest.importorskip("transformers.models.diffusion_gemma")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from megatron.bdlm.checkpoint import diffusion_gemma_files as files  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.safetensors_folder import SafetensorsFolder  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.model.diffusion_gemma import models  # noqa: E402
from tests.model.diffusion_gemma.test_published import cross_entropy, published_logits, sample  # noqa: E402

LENGTH, FIRST, SIZE = 24, 5, 6
KEY_HEADS = dict(key_heads=2)  # of full layers: tensor parallel 2 must divide them
LAYOUTS = {
    "csbp": dict(context_parallel_size=2),
    "cp": dict(context_parallel_size=2),
    "tensor": dict(tensor_model_parallel_size=2),
    "expert": dict(expert_model_parallel_size=2),
    "pipeline": dict(pipeline_model_parallel_size=2),
}


def _model(layout):
    sequence = layout.get("tensor_model_parallel_size", 1) > 1
    choices = models.options(
        bdlm_freeze_router=False, bdlm_diffusion_gemma=json.dumps({**models.OPTIONS, "full_key_heads": 2})
    )
    model = models.ours(bdlm=choices, sequence_parallel=sequence, pipeline_dtype=torch.float32, **layout)
    return model.train()


def _loss(model, plan, x0, xt, **kwargs):
    """Sum over this rank's rows: a noisy row predicts its token, a clean one the next."""
    targets = torch.full((2, LENGTH), -1)
    targets[0, FIRST:], targets[1, :-1] = x0[0, FIRST:], x0[0, 1:]
    local = plan.take(targets.flatten(), -1)
    index = (local >= 0).nonzero().flatten()
    rows = type("Rows", (), dict(index=index, target=local[index]))
    group = parallel_state.get_context_parallel_group()
    return models.run(model, plan, x0, xt, group, scored_rows=rows, **kwargs).sum()


def _summed_gradients(model):
    """What the engine does behind backward, with the same sample on both ranks where experts are shared out."""
    tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # an expert that no row of this rank chose
            parameter.grad = torch.zeros_like(parameter)
        marked = getattr(parameter, "sequence_parallel", False) and model.config.sequence_parallel
        if marked or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(parameter.grad, group=tensor)
        dist.all_reduce(parameter.grad, group=context)
        if "local_experts" in name:
            parameter.grad /= parallel_state.get_expert_model_parallel_world_size()


def _pipeline_logits(model, plan, x0, xt):
    """Logits on the last stage; hidden states go over by hand."""
    if parallel_state.is_pipeline_first_stage():
        dist.send(models.run(model, plan, x0, xt).contiguous(), dst=1)
        return None
    hidden = torch.empty(plan.s_local, 1, 32)
    dist.recv(hidden, src=0)
    model.set_input_tensor(hidden)
    return models.run(model, plan, x0, xt)


def _shards(state):
    """Every sharded tensor of a state."""
    if isinstance(state, ShardedTensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _shards(value)]
    if isinstance(state, (list, tuple)):
        return [tensor for value in state for tensor in _shards(value)]
    return _shards(state.build()) if hasattr(state, "build") else []


def _errors(model, expected):
    """Relative error of this rank's shards by name, `expected` whole; and the names."""
    found = {}
    for tensor in _shards(model.sharded_state_dict()):
        wanted = expected[tensor.key][tensor.global_slice()]
        error = (tensor.data - wanted).norm() / wanted.norm().clamp(min=1e-6)
        found[tensor.key] = max(found.get(tensor.key, 0.0), float(error))
    return found


def through_layout(name, folder, x0, xt, weights, gradients, save=False):
    """One layout on two ranks: errors of weights and gradients, loss with and without self-conditioning, or logits."""
    layout, source = LAYOUTS[name], folder / "imported" / "release"
    models.start(**layout)
    model = _model(layout)
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(source))["model"])
    found = dict(weights=_errors(model, weights))
    if save:
        multiprocessing.current_process()._config["daemon"] = False  # the engine's writer starts a process of its own
        args = dist_checkpointing.load_common_state_dict(str(source))["args"]
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        dist.barrier()
        dist_checkpointing.save({"args": args, "model": model.sharded_state_dict()}, str(folder / name), async_strategy="mcore")
    plan = models.plan_of(
        LENGTH, FIRST, SIZE, context_parallel_size=layout.get("context_parallel_size", 1),
        rank=parallel_state.get_context_parallel_rank(), strategy="cp" if name == "cp" else "csbp",
        row_multiple=layout.get("tensor_model_parallel_size", 1),
    )
    if name == "pipeline":
        return found | dict(logits=_pipeline_logits(model.eval(), plan, x0, xt))
    with torch.no_grad():
        conditioned = _loss(model, plan, x0, xt, self_conditioned=torch.tensor([True]))
    loss = _loss(model, plan, x0, xt)
    loss.backward()
    _summed_gradients(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return found | dict(gradients=_errors(model, gradients), loss=float(loss), conditioned=float(conditioned))


def _through_layouts(*given):
    return {name: through_layout(name, *given, save=name == "tensor") for name in LAYOUTS}


def prepare(folder):
    """The published model, imported; rows of a sample; what every layout must find."""
    theirs = models.published(**KEY_HEADS)
    theirs.save_pretrained(folder / "source")
    files.import_model(folder / "source", folder / "imported", arguments_of)
    x0, xt = sample(LENGTH)
    xt[0, 9] = 0
    noisy, clean = published_logits(theirs, x0, xt, FIRST, SIZE)
    loss = cross_entropy(noisy, x0[:, FIRST:]) + cross_entropy(clean[:, :-1], x0[:, 1:])
    loss.backward()
    with torch.no_grad():
        again, _ = published_logits(theirs, x0, xt, FIRST, SIZE, self_conditioning_logits=noisy.detach())
        conditioned = cross_entropy(again, x0[:, FIRST:]) + cross_entropy(clean[:, :-1], x0[:, 1:])
    gradients = {
        each: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for each, parameter in theirs.named_parameters(remove_duplicate=False)
    }
    gradients |= {each: buffer for each, buffer in theirs.named_buffers() if each.endswith("layer_scalar")}
    wanted = dict(loss=float(loss), conditioned=float(conditioned), logits=torch.cat((noisy, clean), 1).detach())
    return (folder, x0, xt, _whole(theirs.state_dict()), _whole(gradients)), wanted, theirs


def _whole(theirs):
    """Tensors under our names, the embedding with its padding rows."""
    return {each.target: each.join(theirs).detach() for each in models.tensors(**KEY_HEADS)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    given, wanted, theirs = prepare(tmp_path_factory.mktemp("layouts"))
    return given[0], theirs, run_distributed(_through_layouts, 2, *given, timeout=300), wanted


def check(name, ranks, wanted):
    """Everything that a layout must have in common with the published model."""
    names = set()
    for rank in ranks:
        assert max(rank["weights"].values()) == 0
        names |= set(rank["weights"])
    assert names == {each.target for each in models.tensors(**KEY_HEADS)}
    if name == "pipeline":
        torch.testing.assert_close(ranks[-1]["logits"][..., : models.VOCABULARY], wanted["logits"], rtol=0, atol=5e-5)
        return
    copies = 1 if name in ("csbp", "cp") else 2
    for value in ("loss", "conditioned"):
        assert sum(rank[value] for rank in ranks) / copies == pytest.approx(wanted[value], rel=1e-5)
    for rank in ranks:
        worst = max(rank["gradients"], key=rank["gradients"].get)
        assert rank["gradients"][worst] < 1e-5, (worst, rank["gradients"][worst])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_the_published_model(name, runs):
    _, _, found, wanted = runs
    check(name, [rank[name] for rank in found], wanted)


def test_an_export_of_two_ranks_is_the_same_model_in_transformers(runs):
    from transformers import DiffusionGemmaForBlockDiffusion

    folder, theirs, _, _ = runs
    files.export_model(CheckpointFolder(folder / "tensor"), folder / "exported", tokenizer=folder / "imported" / "tokenizer")
    result = compare_tensors(SafetensorsFolder(folder / "source"), SafetensorsFolder(folder / "exported"))
    assert result.identical and len(result.same) > 60, result.text()
    again = DiffusionGemmaForBlockDiffusion.from_pretrained(folder / "exported").eval()
    x0, xt = sample(12)
    with torch.no_grad():
        torch.testing.assert_close(
            again(input_ids=x0[:, :6], decoder_input_ids=xt[:, 6:]).logits,
            theirs(input_ids=x0[:, :6], decoder_input_ids=xt[:, 6:]).logits, rtol=0, atol=1e-5,
        )
