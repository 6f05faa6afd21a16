"""Do a row's bits depend on the rows computed beside it? The experiment behind --exact.

    python scripts/rows.py > benchmarks/rows.md

For each operator and dtype one row is computed alone and among 2 .. 64 rows; the table says for which row counts all
rows are equal bit for bit (torch.equal); weights and rows cancel, so that the order of a sum shows in 16 bits too.
Results belong to this machine's processor and libraries.
"""

from __future__ import annotations

import platform
from functools import partial

import torch
import torch.nn.functional as F

from fastea.cache import cache_rows
from fastea.kernels.attention import attend, attend_alone, sight
from fastea.kernels.packed import fast_bf16, fast_half, layout, product
from fastea.kernels.rows import cancelling, find_row_sizes
from fastea.tree import Tree, chain, parse_tree

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate and up": (3072, 576), "down": (576, 1536), "LM head": (49152, 576)}
COUNTS = [2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 26, 32, 48, 64]


def compact(counts: list[int]) -> str:
    return "all" if counts == COUNTS else ", ".join(map(str, counts)) or "none"


def linear_table() -> None:
    print("| weight | dtype | form | equal to the row alone at M = | equal to M = 64 at M = | row sizes |")
    print("| --- | --- | --- | --- | --- | --- |")
    forms = [(torch.float32, "matrix"), (torch.float32, "blocks"), (torch.bfloat16, "matrix")]
    if fast_half():
        forms.insert(2, (torch.float32, "fp16"))
    if fast_bf16():
        forms.append((torch.bfloat16, "oneDNN"))
    for kind, form in forms:
        for name, (outputs, inputs) in SHAPES.items():
            weight, x = (t.to(kind) for t in cancelling(outputs, inputs))
            tensors = {"matrix": weight} if form == "matrix" else layout(weight, kind, "cpu", half=form == "fp16")
            call = partial(product, tensors=tensors, outputs=outputs)
            products = {m: call(x[:m].clone()) for m in COUNTS}
            alone = torch.cat([call(x[i : i + 1].clone()) for i in range(64)])
            equal = [m for m in COUNTS if torch.equal(products[m], alone[:m])]
            to_full = [m for m in COUNTS if torch.equal(products[m], products[64][:m])]
            sizes = ", ".join(map(str, find_row_sizes([(call, x)])))
            print(f"| {name} | {str(kind)[6:]} | {form} | {compact(equal)} | {compact(to_full)} | {sizes} |")


def packed_table() -> None:
    print("| packed operator, 3072 x 576, bf16 | equal to the row alone at M = |")
    print("| --- | --- |")
    x = torch.randn(64, 576).bfloat16()
    codes = torch.randint(-127, 127, (3072, 576), dtype=torch.int8)
    scales = torch.rand(3072).bfloat16()

    def int8(rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(rows, codes, scales)

    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 15, (3072, 576), dtype=torch.int32), 1)
    scales_and_zeros = torch.rand(576 // 32, 3072, 2).bfloat16()

    def int4(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, 32, scales_and_zeros)

    for name, op in (("int8 per channel", int8), ("int4 group 32", int4)):
        alone = torch.cat([op(x[i : i + 1].clone()) for i in range(64)])
        print(f"| {name} | {compact([m for m in COUNTS if torch.equal(op(x[:m].clone()), alone[:m])])} |")


def rowwise_table() -> None:
    print("| row-wise operator | dtype | equal to the row alone |")
    print("| --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(64, 576).to(dtype), torch.randn(576).to(dtype)
        gate = torch.randn(64, 3072).to(dtype)
        operators = {
            "rms_norm": lambda rows, w=weight: F.rms_norm(rows, (576,), w, 1e-5),
            "silu x mul": lambda rows: F.silu(rows[:, :1536]) * rows[:, 1536:],
            "log_softmax": lambda rows: torch.log_softmax(rows.float(), -1),
        }
        for name, op in operators.items():
            rows = gate if name == "silu x mul" else x
            same = torch.equal(op(rows), torch.cat([op(rows[i : i + 1].clone()) for i in range(64)]))
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {'yes' if same else 'no'} |")


def attention_table() -> None:
    print("| attention | dtype | context | rows of the tree equal to plain decoding along their paths |")
    print("| --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        for tree in (chain(7), parse_tree("eagle1")):
            for exact in (False, True):
                for length in (37, 256, 700):
                    equal = attention_rows(tree, dtype, exact, length)
                    name = f"{tree.name}, {'path order (--exact)' if exact else 'tree order (fast)'}"
                    print(f"| {name} | {str(dtype).removeprefix('torch.')} | {length} | {equal} of {len(tree)} |")


def attention_rows(tree: Tree, dtype: torch.dtype, exact: bool, length: int) -> int:
    n = len(tree)
    base = [torch.randn(1, 3, cache_rows(length), 64).to(dtype) for _ in range(2)]
    q, k, v = (torch.randn(1, n, heads, 64).to(dtype) for heads in (9, 3, 3))
    mix = attend_alone if exact else attend

    def rows(new: list[torch.Tensor], caches: list[torch.Tensor], start: int, words: torch.Tensor) -> torch.Tensor:
        at = start + torch.arange(words.shape[1])[None]
        return mix(*new, *caches, at, sight(words, torch.tensor([start]), 0, words.shape[1], 3, caches[0]))

    out = rows([q, k, v], [c.clone() for c in base], length, tree.words[None])
    equal = 0
    for node, path in enumerate(tree.paths):
        caches = [c.clone() for c in base]
        for step in range(len(path) + 1):
            slot = tree.paths.index(path[:step])
            one = [t[:, slot : slot + 1] for t in (q, k, v)]
            alone = rows(one, caches, length + step, torch.ones(1, 1, dtype=torch.int64))
        equal += torch.equal(alone[0, 0], out[0, node])
    return equal


def main() -> None:
    torch.manual_seed(0)
    print("# Rows and their neighbours\n")
    print("Command: `python scripts/rows.py > benchmarks/rows.md`. "
          f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
          f"{torch.get_num_threads()} threads.\n")  # fmt: skip
    print("## Matrix products: `F.linear` over a matrix, and over blocks of 16 outputs\n")
    linear_table()
    print("\nRow sizes: the row counts to which --exact pads products with this weight; 1 alone = row by row.\n")
    packed_table()
    print("\n## Row-wise operators\n")
    rowwise_table()
    print("\n## Attention\n")
    attention_table()
    print(
        "\nWhat follows: a product's rows are equal if they are padded to some of the row counts, which are found anew"
        "\non every machine at load; attention needs path order, one row a call. Both together are `--exact`."
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
