"""The oracle against masks written out by hand, the definition's properties, and torch's own attention."""

import pytest
import torch

from megatron.bdlm.testing.oracle import LARGEST_ROWS, dense_block_diffusion_attention, tokens_of_sample, visible


def drawn(rows_of_text: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in line.split()[0]] for line in rows_of_text.strip().splitlines()])


def test_block_causal_by_hand():
    """4 tokens, S = 2, rows [xt; x0]."""
    assert torch.equal(visible(seq_length=4, block_size=2), drawn("""
        xx......
        xx......
        ..xxxx..
        ..xxxx..
        ....xx..
        ....xx..
        ....xxxx
        ....xxxx
    """))


def test_token_causal_and_noisy_causal_by_hand():
    mask = visible(seq_length=4, block_size=2, clean_attention="token-causal", noisy_attention="causal")
    assert torch.equal(mask, drawn("""
        x.......
        xx......
        ..x.xx..
        ..xxxx..
        ....x...
        ....xx..
        ....xxx.
        ....xxxx
    """))


def test_two_views_share_the_clean_stream():
    assert torch.equal(visible(seq_length=3, block_size=2, views=2), drawn("""
        xx.......
        xx.......
        ..x...xx.
        ...xx....
        ...xx....
        .....xxx.
        ......xx.
        ......xx.
        ......xxx
    """))


def test_documents_and_targets_by_hand():
    """Documents of 3 and 2 tokens, S = 2; only block 1 (token 2) has a noisy row."""
    assert torch.equal(visible(seq_length=5, block_size=2, documents=[3, 2], target_blocks=[1])[2:], drawn("""
        ..x..xx...
        ..........
        ..........
        .....xx...
        .....xx...
        .....xxx..
        ........xx
        ........xx
    """))


def test_window_by_hand():
    """W = 2: a noisy row sees one clean row before its block; a clean row none more than one position back."""
    assert torch.equal(visible(seq_length=6, block_size=3, window=2), drawn("""
        xxx.........
        xxx.........
        xxx.........
        ...xxx..x...
        ...xxx..x...
        ...xxx..x...
        ......xxx...
        ......xxx...
        .......xx...
        ........xxxx
        .........xxx
        ..........xx
    """))


def test_blocks_from_an_origin_and_a_restart():
    assert [token.block for token in tokens_of_sample(9, 3, block_origin=2)] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [token.block for token in tokens_of_sample(9, 3, block_restarts=[4])] == [0, 0, 0, 1, 2, 2, 2, 3, 3]
    assert [token.position for token in tokens_of_sample(5, 3, documents=[2, 0, 3])] == [0, 1, 0, 1, 2]


def test_properties_of_the_definition():
    """Semantics section 2, on 24 tokens with S = 4 and two documents."""
    mask = visible(seq_length=24, block_size=4, documents=[10, 14], views=2)
    clean = mask[48:]
    assert not clean[:, :48].any(), "clean rows do not see noisy ones"
    assert not mask[:24, 24:48].any() and not mask[24:48, :24].any(), "views do not see each other"
    block = torch.tensor([token.block for token in tokens_of_sample(24, 4, documents=[10, 14])])
    sees_clean = mask[:24, 48:]
    assert not sees_clean[block[:, None] <= block[None]].any(), "x0 of block b changes noisy outputs only in blocks > b"
    assert torch.equal(mask[:24, :24], block[:, None] == block[None])
    assert mask.any(dim=1).all()


def test_block_of_the_whole_length_sees_no_clean_row():
    assert not visible(seq_length=8, block_size=8)[:8, 8:].any()


def test_blocks_of_one_token_are_autoregressive():
    mask = visible(seq_length=6, block_size=1)
    assert torch.equal(mask[:6, 6:], torch.ones(6, 6).tril(-1).bool())
    assert torch.equal(mask[6:, 6:], torch.ones(6, 6).tril().bool())


def test_attention_against_torch():
    torch.manual_seed(0)
    sample = dict(seq_length=7, block_size=3, views=2, window=4)
    q, k, v = (torch.randn(21, 2, heads, size, dtype=torch.float64) for heads, size in ((4, 5), (2, 5), (2, 3)))
    out = dense_block_diffusion_attention(q, k, v, **sample, softmax_scale=0.3)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), attn_mask=visible(**sample), scale=0.3, enable_gqa=True
    )
    assert torch.allclose(out, wanted.permute(2, 0, 1, 3), rtol=0, atol=1e-14)


def test_rows_that_do_not_exist_are_zero_and_without_gradient():
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = dense_block_diffusion_attention(q, k, v, seq_length=8, block_size=4, target_blocks=[1])
    assert not out[:4].any() and out[4:].abs().sum(dim=(1, 2, 3)).gt(0).all()
    out.square().sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all() and not x.grad[:4].any()


def test_documents_packed_are_documents_alone():
    """Fault C5, in numbers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(22, 1, 1, 4, dtype=torch.float64) for _ in range(3))
    packed = dense_block_diffusion_attention(q, k, v, seq_length=11, block_size=4, documents=[3, 0, 5, 1, 2])
    first = 0
    for length in (3, 5, 1, 2):
        rows = torch.cat((torch.arange(first, first + length), torch.arange(11 + first, 11 + first + length)))
        alone = dense_block_diffusion_attention(q[rows], k[rows], v[rows], seq_length=length, block_size=4)
        assert torch.allclose(packed[rows], alone, rtol=0, atol=1e-15)
        first += length


def test_refusals():
    with pytest.raises(ValueError, match=f"refuses above {LARGEST_ROWS} rows. A legal seq_length: 2048"):
        visible(seq_length=4096, block_size=4)
    with pytest.raises(ValueError, match="q has 9 rows"):
        dense_block_diffusion_attention(*(torch.zeros(9, 1, 1, 2) for _ in range(3)), seq_length=4, block_size=2)
    with pytest.raises(ValueError, match="documents sum to 5, not to seq_length 4"):
        visible(seq_length=4, block_size=2, documents=[5])
    with pytest.raises(ValueError, match="clean_attention 'full': block-causal or token-causal"):
        visible(seq_length=4, block_size=2, clean_attention="full")
    with pytest.raises(ValueError, match="noisy_attention 'full': bidirectional or causal"):
        visible(seq_length=4, block_size=2, noisy_attention="full")
