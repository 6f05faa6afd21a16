"""The attention operator and the row-independent linear layer, against fp64 and against single rows."""

import math

import pytest
import torch

from conftest import random_paths
from fastea.cache import KVCache
from fastea.kernels.attention import attend, attend_alone, expand_words, sight
from fastea.kernels.rows import cancelling, find_row_sizes, product_rows, rows_equal
from fastea.quantize.forms import Scheme, nearest
from fastea.tree import Tree


def reference(q, k, v, mask):
    """One sequence in fp64 with expanded heads. q: [R, H, D]; k, v: [L, KV, D]; mask: [R, L] booleans."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("rhd,lhd->hrl", q.double(), k) / q.shape[2] ** 0.5
    probs = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return torch.einsum("hrl,lhd->rhd", probs, v)


def rows_of(q, k, v, caches, start, words, offset=0, exact=False):
    """Attention as a layer asks for it."""
    rows = q.shape[1]
    at = start[:, None] + offset + torch.arange(rows)
    seen = sight(words, start, offset, rows, q.shape[2] // k.shape[2], caches[0])
    return (attend_alone if exact else attend)(q, k, v, *caches, at, seen)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("exact", [False, True])
def test_tree_rows_see_the_prefix_and_their_ancestors(heads, exact):
    torch.manual_seed(0)
    h, kv = heads
    for seed in range(6):
        tree = Tree(random_paths(seed), "random")
        rows, lengths, dim = len(tree), [0, 5, 31][: 1 + seed % 3], 8
        batch = len(lengths)
        caches = [torch.randn(batch, kv, 100, dim) for _ in range(2)]
        before = [c.clone() for c in caches]
        q, k, v = (torch.randn(batch, rows, n, dim) for n in (h, kv, kv))
        words = tree.words.expand(batch, -1)
        out = rows_of(q, k, v, caches, torch.tensor(lengths), words, exact=exact)
        mask = expand_words(tree.words, rows)
        for b, length in enumerate(lengths):
            keys, values = (
                torch.cat((c[b, :, :length].transpose(0, 1), new[b])) for c, new in zip(before, (k, v), strict=True)
            )
            whole = torch.cat((torch.ones(rows, length, dtype=torch.bool), mask), dim=1)
            torch.testing.assert_close(out[b].double(), reference(q[b], keys, values, whole), atol=1e-5, rtol=1e-5)
            for cache, old, new in zip(caches, before, (k, v), strict=True):
                assert torch.equal(cache[b, :, length : length + rows], new[b].transpose(0, 1))
                assert torch.equal(cache[b, :, :length], old[b, :, :length])
                assert torch.equal(cache[b, :, length + rows :], old[b, :, length + rows :])


def test_causal_chunk_and_draft_offset():
    """Without words row r sees the new rows 0..r; with an offset, bits count from the tree region's first slot."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 3, 2, 8) for _ in range(3))
    caches = [torch.randn(1, 2, 20, 8) for _ in range(2)]
    old = [c.clone() for c in caches]
    out = rows_of(q, k, v, caches, torch.tensor([4]), None)
    keys, values = (torch.cat((c[0, :, :4].transpose(0, 1), n[0])) for c, n in zip(old, (k, v), strict=True))
    mask = torch.cat((torch.ones(3, 4), torch.ones(3, 3).tril()), dim=1).bool()
    torch.testing.assert_close(out[0].double(), reference(q[0], keys, values, mask), atol=1e-5, rtol=1e-5)
    q2, k2, v2 = (torch.randn(1, 2, 2, 8) for _ in range(3))
    words = torch.tensor([[0b01001, 0b10010]])  # slots 0 and 3; slots 1 and 4
    out = rows_of(q2, k2, v2, caches, torch.tensor([4]), words, 3)
    keys, values = (torch.cat((a, n[0])) for a, n in zip((keys, values), (k2, v2), strict=True))
    mask = torch.cat((torch.ones(2, 4), torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]])), dim=1).bool()
    torch.testing.assert_close(out[0].double(), reference(q2[0], keys, values, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_keep_their_bits(dtype):
    """A node of a scattered tree equals plain decoding along its path, bit for bit."""
    torch.manual_seed(2)
    for seed in range(4):
        tree = Tree(random_paths(seed), "random")
        rows, length, dim = len(tree), 37, 16
        base = [torch.randn(1, 2, 128, dim).to(dtype) for _ in range(2)]
        q, k, v = (torch.randn(1, rows, n, dim).to(dtype) for n in (6, 2, 2))
        out = rows_of(q, k, v, [c.clone() for c in base], torch.tensor([length]), tree.words[None], exact=True)
        for node in range(rows):
            caches = [c.clone() for c in base]
            path = expand_words(tree.words[node], rows).nonzero().flatten().tolist()
            for step, slot in enumerate(path):
                at = torch.tensor([length + step])
                one = [t[:, slot : slot + 1] for t in (q, k, v)]
                single = rows_of(*one, caches, at, torch.ones(1, 1, dtype=torch.int64), exact=True)
            assert torch.equal(single[0, 0], out[0, node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (320, 576), (50, 36)])
def test_linear_rows_keep_their_bits(dtype, shape):
    matrix, rows = cancelling(*shape)
    weight, x = matrix.to(dtype), rows.to(dtype)

    def product(rows):
        return torch.nn.functional.linear(rows, weight)

    found = find_row_sizes([(product, x)])
    torch.manual_seed(3)
    weight, x = torch.randn(shape).to(dtype), torch.randn(64, shape[1]).to(dtype)
    for candidate in {(1,), found}:
        alone = torch.cat([product_rows(product, x[i : i + 1], candidate) for i in range(64)])
        for count in range(1, 65):
            assert torch.equal(product_rows(product, x[:count], candidate), alone[:count])
        many = torch.cat((x, x[:14]))[None]  # more than 64 rows, with a batch dimension
        assert torch.equal(product_rows(product, many, candidate)[0], torch.cat((alone, alone[:14])))
    torch.testing.assert_close(
        alone.double(), x.double() @ weight.double().T, atol=0.5 if dtype != torch.float32 else 1e-3, rtol=0.05
    )


def test_row_probe_sees_a_backend_that_depends_on_rows():
    """A product that sums in another order for a single row must not pass as row-equal without padding, not even in
    bf16, where ordinary sums of both orders are equal."""
    weight, x = cancelling(8, 96)

    def split(x, weight=weight):
        terms = (x[:, None] * weight).unbind(-1)
        return sum(reversed(terms) if x.shape[0] == 1 else terms).bfloat16()

    assert not rows_equal(split, x, (1, 2)) and rows_equal(split, x, (2, 4, 8, 16, 32, 64))
    assert find_row_sizes([(split, x)]) == (2, 4, 8, 16, 32, 64)
    ordinary = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    assert rows_equal(lambda x: split(x, ordinary[:8]), ordinary, (1, 2))


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(8, 32), Scheme(4, 32, True), Scheme(4, 128)])
def test_the_probe_cancels_after_quantizing_too(scheme):
    """The exact products are zero, so that only the order of the sum is left."""
    for inputs in (96, 576, 100):
        matrix, rows = cancelling(20, inputs)
        for weight in (matrix, matrix.bfloat16(), nearest(matrix, scheme).dequantized()):
            exact = [math.fsum(products) for products in (rows[0].double() * weight.double()).tolist()]
            assert exact == [0.0] * 20 and (weight != 0).any()


def test_row_sizes_are_the_longest_run_that_all_products_share():
    """One backend changes its order at 16 rows, another at 2."""
    weight, x = torch.randn(8, 8), torch.randn(64, 8)

    def changing(at):
        return lambda x: (x.double() @ weight.double().T * (1 + 1e-6 * (x.shape[0] >= at))).float()

    assert find_row_sizes([(changing(16), x)]) == (1, 2, 4, 8)
    assert find_row_sizes([(changing(16), x), (changing(2), x)]) == (2, 4, 8)
    by_count = (lambda x: (x.double() @ weight.double().T * (1 + 1e-6 * x.shape[0])).float(), x)
    assert find_row_sizes([by_count]) == (1,)


def test_compaction_moves_accepted_rows_only():
    cache = KVCache(2, 3, 1, 10, 4, torch.bfloat16)
    for t in cache.keys + cache.values:
        t.copy_(torch.arange(t.shape[2])[None, None, :, None].expand_as(t))
    cache.compact(torch.tensor([3, 5, 2]), torch.tensor([[0, 2, 6], [0, 1, 4], [0, 2, 3]]))
    for t in cache.keys + cache.values:
        assert t[0, 0, :, 0].tolist()[:7] == [0, 1, 2, 3, 5, 9, 6]
        assert t[1, 0, :, 0].tolist()[:9] == [0, 1, 2, 3, 4, 5, 6, 9, 8]
        assert t[2, 0, :, 0].tolist()[:7] == [0, 1, 2, 4, 5, 5, 6]  # read before it is written
