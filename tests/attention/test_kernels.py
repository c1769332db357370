"""Kernel adapters: results where they run, signatures where they do not, and the choice between them."""

import ast
import importlib.util
import inspect
import types
from pathlib import Path

import pytest
import torch

from megatron.bdlm.attention import kernels
from megatron.bdlm.attention.kernels import flash_attn, transformer_engine
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.attention.kernels.flex import FlexKernel
from megatron.bdlm.attention.kernels.math import MathKernel
from megatron.bdlm.attention.kernels.torch_cpu import TorchCpuKernel
from megatron.bdlm.attention.kernels.torch_cuda import TorchCudnnKernel, TorchFlashKernel


def inputs(rows, keys, d, dv, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = ((rows, d), (keys, d), (keys, dv), (rows, dv))
    return (
        torch.randn(3, 2, length, size, generator=generator, dtype=torch.float64).to(dtype) for length, size in shapes
    )


def dense(q, k, v, scale, causal):
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def combined(kernel, q, k, v, dout, scale, causal):
    """Attention over k as two rectangles (one when causal) with a common log-sum-exp, gradients with final values."""
    cuts = [slice(0, k.shape[2])] if causal else [slice(0, 2), slice(2, k.shape[2])]
    parts = [kernel.forward(q, k[:, :, cut], v[:, :, cut], scale, causal) for cut in cuts]
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    out = sum(part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts).to(q.dtype)
    gradients = [kernel.backward(dout, q, k[:, :, cut], v[:, :, cut], out, lse, scale, causal) for cut in cuts]
    dq = sum(gradient[0] for gradient in gradients)
    dk, dv = (torch.cat([gradient[i] for gradient in gradients], 2) for i in (1, 2))
    return out, lse, dq, dk, dv


class PlainForwardFlex(FlexKernel):
    """FlexAttention refuses a backward on a CPU; the adapter's own part of it is the gradients of out and lse."""

    def forward(self, q, k, v, scale, causal):
        return dense(q, k, v, scale, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (8, 5), (4, 6)])
@pytest.mark.parametrize("kernel", [TorchCpuKernel(), MathKernel()], ids=lambda kernel: kernel.name)
def test_partial_attention_with_final_values_is_exact(kernel, d, dv, causal):
    rows = 7
    q, k, v, dout = inputs(rows, rows if causal else 9, d, dv)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, 0.4, causal)
    gradients = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        ours = combined(kernel, q, k, v, dout, 0.4, causal)
    for found, expected in zip(ours, (out, lse, *gradients)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_backward_from_final_values(causal):
    q, k, v, dout = inputs(9, 9, 8, 6, torch.float32)
    ours, expected = (combined(kernel, q, k, v, dout, 0.3, causal) for kernel in (PlainForwardFlex(), MathKernel()))
    for found, reference in zip(ours, expected):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_forward_call(causal, monkeypatch):
    from megatron.bdlm.attention.kernels import flex

    monkeypatch.setattr(flex, "_compiled", lambda: flex.flex_attention)
    q, k, v, _ = inputs(16, 16, 16, 16, torch.float32)
    for found, expected in zip(FlexKernel().forward(q, k, v, 0.3, causal), dense(q, k, v, 0.3, causal)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduced_precision_and_strided_inputs_on_a_cpu(dtype):
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(33, 20, 16, 16, dtype))
    ours = combined(TorchCpuKernel(), q, k, v, dout, 0.3, False)
    expected = combined(MathKernel(), *(x.double() for x in (q, k, v, dout)), 0.3, False)
    for found, reference in zip(ours, expected):
        torch.testing.assert_close(found.double(), reference, rtol=0, atol=0.05 if dtype != torch.float32 else 1e-5)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32


def test_math_kernel_in_chunks(monkeypatch):
    from megatron.bdlm.attention.kernels import math

    q, k, v, dout = inputs(11, 11, 8, 8)
    whole = combined(MathKernel(), q, k, v, dout, 0.4, True)
    monkeypatch.setattr(math, "SCORES_AT_A_TIME", 200)
    for found, expected in zip(combined(MathKernel(), q, k, v, dout, 0.4, True), whole):
        torch.testing.assert_close(found, expected)


# ---- adapters that need a GPU: the call must fit the real function ----------------------------------------


class Recorder:
    """Stands for a library: every call is bound to the real signature, then answered with `answer`."""

    def __init__(self, signatures, answers):
        self.calls, self.FusedAttnBackend = [], {"F16_arbitrary_seqlen": "arbitrary"}
        for name, signature in signatures.items():
            setattr(self, name, self._function(name, signature, answers[name]))

    def _function(self, name, signature, answer):
        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            self.calls.append((name, bound.arguments))
            return answer(bound.arguments)

        call.__signature__ = signature
        return call


def signature_of(source: str) -> inspect.Signature:
    """Signature written as Python parameters."""
    scope: dict = {}
    exec(f"def function({source}): pass", scope)
    return inspect.signature(scope["function"])


FA2 = {
    "_flash_attn_forward": signature_of(
        "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
        "softcap, alibi_slopes, return_softmax"
    ),
    "_flash_attn_backward": signature_of(
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
        "window_size_left, window_size_right, "
        "softcap, alibi_slopes, deterministic, rng_state=None"
    ),
}
FA3_OLD = {  # as in the source package flash-attn 2.8.3
    "_flash_attn_forward": signature_of(
        "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
        "max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, "
        "q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_backward": signature_of(
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "
        "dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0"
    ),
}
FA3 = {
    "_flash_attn_forward": signature_of(
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, "
        "seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
        "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, "
        "v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, "
        "window_size_right=-1, attention_chunk=0, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_backward": signature_of(
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
    ),
}
TE_NEW = {
    "fused_attn_fwd": signature_of(
        "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, "
        "fake_dtype, fused_attention_backend, "
        "attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, "
        "s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d', "
        "o_format='sbhd', attn_bias_type='no_bias', attn_mask_type='padding', "
        "softmax_type='vanilla', window_size=(-1, -1)"
    ),
    "fused_attn_bwd": signature_of(
        "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors, "
        "fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
        "s_quantizer=None, dp_quantizer=None, "
        "dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d', o_format='sbhd', "
        "do_format='sbhd', dqkv_layout='sbh3d', attn_bias_type='no_bias', "
        "attn_mask_type='padding', softmax_type='vanilla', "
        "window_size=(-1, -1), deterministic=False"
    ),
}
TE_OLD = {  # before the formats of output and gradients were arguments
    name: signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name not in transformer_engine.FORMATS]
    )
    for name, signature in TE_NEW.items()
}


def math_forward(q, k, v, scale, causal):
    """[n, r, h, d] in and out, log-sum-exp [n, h, r]."""
    out, lse = MathKernel().forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal)
    return out.transpose(1, 2), lse


def math_backward(dout, q, k, v, out, lse, scale, causal):
    gradients = MathKernel().backward(*(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse, scale, causal)
    return tuple(x.transpose(1, 2) for x in gradients)


def flash_forward(a):
    return *math_forward(a["q"], a["k"], a["v"], a["softmax_scale"], a["causal"]), torch.empty(0), torch.empty(0)


def flash_backward(a):
    causal = a["is_causal"] if "is_causal" in a else a["causal"]
    found = math_backward(a["dout"], a["q"], a["k"], a["v"], a["out"], a["softmax_lse"], a["softmax_scale"], causal)
    for into, gradient in zip((a["dq"], a["dk"], a["dv"]), found):
        into.copy_(gradient)


FLASH_ANSWERS = {"_flash_attn_forward": flash_forward, "_flash_attn_backward": flash_backward}


def te_forward(a):
    out, lse = math_forward(a["q"], a["k"], a["v"], a["attn_scale"], a["attn_mask_type"] == "causal")
    return out, [lse.unsqueeze(-1), torch.zeros(2)]


def te_backward(a):
    lse = a["aux_ctx_tensors"][0].squeeze(-1)
    causal = a["attn_mask_type"] == "causal"
    return [*math_backward(a["d_o"], a["q"], a["k"], a["v"], a["o"], lse, a["attn_scale"], causal), None]


TE_ANSWERS = {"fused_attn_fwd": te_forward, "fused_attn_bwd": te_backward}
LIBRARIES = {
    "flash_attn 2": (flash_attn.FlashAttention2Kernel, flash_attn, FA2, FLASH_ANSWERS, (8, 6)),
    "flash_attn 3": (flash_attn.FlashAttention3Kernel, flash_attn, FA3, FLASH_ANSWERS, (8, 8)),
    "flash_attn 3, older": (flash_attn.FlashAttention3Kernel, flash_attn, FA3_OLD, FLASH_ANSWERS, (8, 8)),
    "transformer_engine": (transformer_engine.TransformerEngineKernel, transformer_engine, TE_NEW, TE_ANSWERS, (8, 6)),
    "transformer_engine, older": (
        transformer_engine.TransformerEngineKernel,
        transformer_engine,
        TE_OLD,
        TE_ANSWERS,
        (8, 8),
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_calls_fit_the_library_and_layouts_come_back_right(library, causal, monkeypatch):
    """Against the published signatures, with plain matrix products in place of the GPU kernel."""
    make, module, signatures, answers, (d, dv) = LIBRARIES[library]
    recorder = Recorder(signatures, answers)
    monkeypatch.setattr(module, "load", lambda *_: recorder)
    q, k, v, dout = inputs(6, 6, d, dv)
    ours, expected = (combined(kernel, q, k, v, dout, 0.4, causal) for kernel in (make(), MathKernel()))
    for found, reference in zip(ours, expected):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-13)
    assert recorder.calls


PACKAGES = {
    "flash_attn 2": flash_attn.VERSION_2,
    "flash_attn 3": flash_attn.VERSION_3,
    "transformer_engine": transformer_engine.MODULE,
}


def written_signatures(module: str, functions) -> dict[str, inspect.Signature] | str:
    """Signatures as the installed package's Python file has them, or why there is none.

    The file is read, not imported: the Python of these packages is there without the binary that only a GPU can use.
    """
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package)
    if found is None:
        return f"{package} is not installed: its calls are bound to the published signature only"
    folders = found.submodule_search_locations
    path = Path(folders[0], *rest.split(".")).with_suffix(".py") if folders else Path(found.origin)
    if not path.is_file():
        return f"{package} is installed without {path}: its calls are bound to the published signature only"
    written = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            written[node.name] = signature_of(without_annotations(node.args))
    return written


def without_annotations(arguments: ast.arguments) -> str:
    """The parameters as Python source, every default None."""
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("library", PACKAGES)
def test_calls_bind_to_the_installed_package(library, causal, monkeypatch):
    """The same against the package's own signatures; the skip's reason names what could not be bound."""
    make, module, published, answers, (d, dv) = LIBRARIES[library]
    signatures = written_signatures(PACKAGES[library], published)
    if isinstance(signatures, str):
        pytest.skip(signatures)
    assert set(signatures) == set(published)
    recorder = Recorder(signatures, answers)
    monkeypatch.setattr(module, "load", lambda *_: recorder)
    q, k, v, dout = inputs(6, 6, d, dv)
    for found, reference in zip(*(combined(kernel, q, k, v, dout, 0.4, causal) for kernel in (make(), MathKernel()))):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-13)
    assert {name for name, _ in recorder.calls} == set(published)


def test_signatures_are_read_from_a_package_that_does_not_import(tmp_path, monkeypatch):
    folder = tmp_path / "half_installed" / "inner"
    folder.mkdir(parents=True)
    (folder / "file.py").write_text("import a_binary_for_gpus\n\ndef call(q: Tensor, k=DEFAULT, *, scale: float = 1.0): ...\n")
    (tmp_path / "half_installed" / "__init__.py").write_text("import a_binary_for_gpus\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = written_signatures("half_installed.inner.file", ["call"])
    assert str(found["call"]) == "(q, k=None, *, scale=None)"
    assert "half_installed is installed without" in written_signatures("half_installed.other", ["call"])
    assert "nowhere is not installed" in written_signatures("nowhere.file", ["call"])


class SchemaOperator:
    """An aten operator whose call is bound to its real schema; defaults filled in."""

    def __init__(self, name, answer):
        self.schema, self.answer = getattr(torch.ops.aten, name).default._schema, answer

    def default(self, *args, **kwargs):
        arguments = {a.name: a.default_value for a in self.schema.arguments if a.has_default_value()}
        positional = [a.name for a in self.schema.arguments if not a.kwarg_only]
        assert len(args) <= len(positional)
        arguments.update(zip(positional, args), **kwargs)
        assert set(arguments) == {a.name for a in self.schema.arguments}
        for a in self.schema.arguments:
            kind, value = str(a.type), arguments[a.name]
            expected = {"Tensor": (torch.Tensor, type(None)), "bool": bool, "float": float, "int": int}.get(kind)
            assert expected is None or isinstance(value, expected), f"{a.name}: {kind} got {value!r}"
        return self.answer(arguments)


def aten_answers(statistics):
    """Stand-ins for the two pairs of operators; `statistics` shapes the log-sum-exp."""

    def forward(a):
        out, lse = MathKernel().forward(a["query"], a["key"], a["value"], a["scale"], a["is_causal"])
        return (out, statistics(lse), *[None] * 7)

    def backward(a):
        lse = a["logsumexp"].reshape(a["query"].shape[:3])
        assert a["logsumexp"].shape == statistics(lse).shape
        return MathKernel().backward(
            a["grad_out"], a["query"], a["key"], a["value"], a["out"], lse, a["scale"], a["is_causal"]
        )

    return forward, backward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "name", "statistics", "sizes"),
    [
        (TorchFlashKernel(), "_scaled_dot_product_flash_attention", lambda lse: lse, (8, 5)),
        (TorchCudnnKernel(), "_scaled_dot_product_cudnn_attention", lambda lse: lse.unsqueeze(-1), (8, 16)),
    ],
    ids=("flash", "cudnn"),
)
def test_torch_gpu_calls_fit_their_schemas(kernel, name, statistics, sizes, causal, monkeypatch):
    forward, backward = aten_answers(statistics)
    operators = {name: SchemaOperator(name, forward), f"{name}_backward": SchemaOperator(f"{name}_backward", backward)}
    q, k, v, dout = inputs(6, 6, *sizes)
    expected = combined(MathKernel(), q, k, v, dout, 0.4, causal)
    from megatron.bdlm.attention.kernels import torch_cuda

    fake_torch = types.SimpleNamespace(
        ops=types.SimpleNamespace(aten=types.SimpleNamespace(**operators)),
        empty=torch.empty,
        zeros=torch.zeros,
        uint64=torch.uint64,
        int64=torch.int64,
    )
    monkeypatch.setattr(torch_cuda, "torch", fake_torch)
    for found, reference in zip(combined(kernel, q, k, v, dout, 0.4, causal), expected):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-13)


# ---- the choice ------------------------------------------------------------------------------------------


def case(device="cpu", dtype=torch.float32, head=64, value_head=64, capability=None):
    return KernelCase(device, dtype, head, value_head, capability)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (case(), TorchCpuKernel),
        (case(dtype=torch.float64), TorchCpuKernel),
        (case("cuda", torch.bfloat16, capability=(9, 0)), TorchCudnnKernel),
        (case("cuda", torch.bfloat16, capability=(8, 0)), TorchFlashKernel),
        (case("cuda", torch.bfloat16, 256, 256, (9, 0)), TorchFlashKernel),
        (case("cuda", torch.float32, capability=(9, 0)), FlexKernel),
        (case("cuda", torch.float64, capability=(9, 0)), MathKernel),
    ],
    ids=str,
)
def test_auto_picks_by_device_type_and_head_size(asked, expected, monkeypatch):
    monkeypatch.setattr(flash_attn, "load", lambda module: f"{module} does not import (not installed)")
    monkeypatch.setattr(transformer_engine, "load", lambda: "transformer_engine does not import (not installed)")
    choice = kernels.choose("auto", asked)
    assert type(choice.kernel) is expected
    line = kernels.describe("auto", asked)
    assert expected.__name__ in line and choice.reason in line and str(asked) in line


def test_describe_says_what_was_passed_over_and_why():
    line = kernels.describe("auto", case("cuda", torch.float64, capability=(9, 0)))
    assert "TorchCudnnKernel serves float16 and bfloat16, not float64" in line
    assert "FlexKernel has no float64 version" in line


def test_the_table_lists_every_adapter_in_order_and_marks_what_auto_takes():
    for asked in (case(), case("cuda", torch.float64, capability=(9, 0))):
        title, *lines = kernels.table(asked).splitlines()
        assert str(asked) in title and len(lines) == len(kernels.PREFERENCE)
        assert [line.split()[0] == "->" for line in lines].count(True) == 1
        (marked,) = (line for line in lines if line.startswith("->"))
        assert type(kernels.choose("auto", asked).kernel).__name__ in marked and "yes: " in marked


def test_an_installed_flash_attention_3_comes_first_on_hopper(monkeypatch):
    monkeypatch.setattr(flash_attn, "load", lambda module: types.SimpleNamespace())
    asked = case("cuda", torch.bfloat16, capability=(9, 0))
    assert type(kernels.choose("auto", asked).kernel) is flash_attn.FlashAttention3Kernel
    assert type(kernels.choose("flash_attn", case("cuda", torch.bfloat16, capability=(8, 0))).kernel) is (
        flash_attn.FlashAttention2Kernel
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pigeon", "--bdlm-attention-kernel pigeon: no such kernel; legal values: auto, torch, flash_attn"),
        (
            "transformer_engine",
            "--bdlm-attention-kernel transformer_engine: "
            "cannot serve cpu, float32.*legal values here: auto, torch, math",
        ),
        ("flex", "--bdlm-attention-kernel flex: cannot serve cpu, float32, head size 64 .*no backward on a CPU"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(name, message):
    with pytest.raises(kernels.KernelUnavailable, match=message):
        kernels.choose(name, case())
