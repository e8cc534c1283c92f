"""Multiplications in one call of a kernel, from its name and the shapes of its operands.

`jmoe.collectives.schedule` weighs with them how much communication a call can hide.

Axes: M rows, K and N columns of a product, G groups; B batch, S positions, H heads, d and e sizes
of keys and values.
"""

import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def count_op_multiplications(name: str, shapes: Sequence[Shape]) -> int:
    """Return the number of multiplications in one call of an FFI target: a native operation of
    training, or cuDNN's causal attention.

    0 for other targets. Rows beyond the groups count; masked scores do not.
    """
    gradient = name.lower().endswith(("_gradient", "backward"))
    if name.startswith(("jmoe_causal_attention", "__cudnn$fmha")):
        (b, s, h, d), _, (*_, e) = shapes[:3]
        return b * h * s * (s + 1) // 2 * (3 * d + 2 * e if gradient else d + e)
    if name.startswith("jmoe_grouped_mlp"):
        (num_tokens, d), (chosen,), _, (*_, u), (_, f, _) = shapes[:5]
        return (chosen or num_tokens) * d * (u + f) * (2 if gradient else 1)
    return 0


def count_kernel_multiplications(name: str, shapes: Sequence[Shape], result: Shape) -> int:
    """Return the number of multiplications in one launch of a Pallas kernel.

    name: of the kernel, `grouped_matmul_kernel` or `weight_gradient_kernel`; 0 for others. result:
    shape of its first result. Rows beyond the groups count. Weights of four bits, two in a byte,
    count half; training has none.
    """
    if name == "grouped_matmul_kernel":  # (count,) tiles, rows, weights [G, K, N], ...
        weights = shapes[3 if len(shapes[0]) == 1 else 2]
        return result[0] * math.prod(weights[1:])
    if name == "weight_gradient_kernel":  # bounds, rows [M, K], gradients [M, N]
        return math.prod(shapes[2]) * shapes[1][-1]
    return 0
