"""Weight-only quantization: one canonical form per scheme, layout-free, in which weights are stored and compared.

A weight [N, K] (outputs, inputs) is cut into groups of `group` inputs; a group of one output has one scale and, in a
scheme with minimum, one minimum. With code q of input k in group g = k // group:

    int8                w[n, k] = scale[n, g] * q                q in -128 .. 127, int8 [N, K']
    int4, symmetric     w[n, k] = scale[n, g] * (q - 8)          q in 0 .. 15, two a byte, uint8 [N, K' / 2]
    int4 with minimum   w[n, k] = scale[n, g] * q + minimum[n, g]

K' is K padded with zeros to a multiple of the group; byte j of a row holds the codes of inputs 2j (low nibble) and
2j + 1. int8 may have one group for the whole row (group = K'). scale and minimum, [N, K' / group], keep the precision
they came with (fp16 where made here or read from GGUF). The decoded value is computed in fp32.

On disk: safetensors, weight `x` as `x.codes`, `x.scale`, `x.minimum` and its shape and scheme in config.json under
"fastea_quantization". What a device's kernels want to read is made at load and never stored
(`fastea.kernels.lowbit`).
"""

from fastea.quantize.forms import SCHEMES, QuantizedWeight, Scheme, nearest

__all__ = ["SCHEMES", "QuantizedWeight", "Scheme", "nearest"]
