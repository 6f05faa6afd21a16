"""GPTQ (arXiv 2210.17323): round column by column, each error spread over the columns that are still to come."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastea.quantize.forms import QuantizedWeight, Scheme, assemble, encode, padded, parameters

BLOCK = 128  # columns whose updates to the rest are made in one product


def gptq(weight: torch.Tensor, hessian: torch.Tensor, scheme: Scheme, damping: float = 0.01) -> QuantizedWeight:
    """Quantize so that X W^T changes little. weight: [N, K]; hessian: [K, K], the sum of x x^T over calibration rows.

    Inputs that were always zero are rounded on their own. damping: share of the mean diagonal added to it.
    """
    scheme = scheme.fitting(weight.shape[1])
    values = padded(weight.float(), scheme).clone()
    inputs = values.shape[1]
    short = inputs - weight.shape[1]
    matrix = F.pad(hessian.double(), (0, short, 0, short))
    diagonal = matrix.diagonal()
    diagonal += damping * diagonal.mean() + (diagonal == 0)
    # Row i of the inverse's upper Cholesky factor says how the columns after i make up for an error in column i.
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(matrix)), upper=True).float()
    codes, scales, minima = torch.empty_like(values), [], []
    for start in range(0, inputs, BLOCK):  # groups divide BLOCK, so none straddles two
        end = min(start + BLOCK, inputs)
        errors = torch.zeros(values.shape[0], end - start)
        for column in range(start, end):
            if column == 0 or (scheme.group and column % scheme.group == 0):
                width = scheme.group or inputs
                scale, minimum = parameters(values[:, column : column + width], scheme)
                scales.append(scale)
                if minimum is not None:
                    minima.append(minimum)
            codes[:, column], decoded = encode(values[:, column], scale, minimum, scheme)
            error = (values[:, column] - decoded) / spread[column, column]
            values[:, column:end] -= error[:, None] * spread[column, column:end]
            errors[:, column - start] = error
        values[:, end:] -= errors @ spread[start:end, end:]
    low = torch.stack(minima, dim=1) if minima else None
    return assemble(codes, torch.stack(scales, dim=1), low, scheme, weight.shape[1])
