"""Row-wise kernels on a GPU: right by float64, or by their parts, and a row's bits depend on that row alone."""

import pytest
import torch

from nanospec_fn.kernels import kv, rows, vocab
from tests.gpu.compare import relative_error, same_bits
from tests.gpu.shapes import noise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]


def test_rows_joined_have_the_bits_of_their_parts():
    table, x, mine, theirs = noise(500, 4096), noise(70, 4096, seed=1), noise(4096, seed=2), noise(4096, seed=3)
    token = torch.randint(0, 500, (70,), device="cuda", dtype=torch.int32)
    want = torch.cat((rows.rms_norm(table[token], mine, 1e-5), rows.rms_norm(x, theirs, 1e-5)), dim=1)
    assert same_bits(rows.embed_beside(table, token, mine, x, theirs, 1e-5), want)
    position = torch.arange(0, 70000, 1000, device="cuda", dtype=torch.int32)
    freq = (1 / 500000 ** (torch.arange(0, 128, 2).double() / 128)).float().cuda()
    cos, sin = rows.angles(position, freq)
    phase = (position.float()[:, None] * freq).double()
    assert float((cos.double() - phase.cos()).abs().max()) < 1e-6
    assert float((sin.double() - phase.sin()).abs().max()) < 1e-6
    assert same_bits(rows.angles(position[9:12], freq)[0], cos[9:12])

    qkv, size = noise(70, 48, 128), 16
    at = torch.arange(70, dtype=torch.int32, device="cuda")[None]
    seen = torch.where(at % 7 == 3, -1, at)
    pages = torch.randperm(5, device="cuda").to(torch.int32)[None] + 1
    turned = rows.rope(qkv[:, :40], cos, sin)
    pools = [torch.full((6, 2, size, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    kv.write(pools[0], turned[:, 32:], qkv[:, 40:], at, seen, pages)
    q, arrived = kv.turn_and_write(qkv, cos, sin, pools[1], at, seen, pages)
    assert same_bits(q, turned[:, :32].contiguous())
    assert same_bits(*pools)
    assert not arrived.any()


@pytest.mark.parametrize("e", [72, 576, 4096, 8192])
def test_row_functions_stand_alone(e):
    x, weight = noise(1000, e), 1 + noise(e, seed=1, scale=0.1)
    wide = x.double()
    norm = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)) * weight.double()
    gate, up = x.double().chunk(2, dim=-1)
    for function, want, limit in (
        (lambda x: rows.rms_norm(x, weight, 1e-5), norm, 6e-3),
        (rows.silu_mul, gate * gate.sigmoid() * up, 6e-3),
        (lambda x: vocab.log_sum_exp(x.float())[:, None], torch.logsumexp(wide, -1)[:, None], 1e-6),
    ):
        whole = function(x)
        assert relative_error(whole, want) < limit
        for n in (1, 2, 3, 8, 33, 70):
            assert same_bits(function(x[7 : 7 + n]), whole[7 : 7 + n])


def test_rope_stands_alone_and_matches():
    x = noise(300, 48, 128)
    phase = torch.rand(300, 64, device="cuda") * 2000
    whole = rows.rope(x[:, :40], phase.cos(), phase.sin())
    a, b = x[:, :40].double().chunk(2, dim=-1)
    c, s = phase.double().cos()[:, None], phase.double().sin()[:, None]
    assert relative_error(whole, torch.cat((a * c - b * s, b * c + a * s), -1)) < 3e-3
    for n in (1, 2, 9, 64):
        part = rows.rope(x[n : 2 * n, :40], phase[n : 2 * n].cos(), phase[n : 2 * n].sin())
        assert same_bits(part, whole[n : 2 * n])
