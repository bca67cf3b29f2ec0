"""The products of a decode step, in torch: y = epilogue(norm(x) W^T) for the first n_rows rows; the twin of
`triton/matmul.py` and `triton/experts.py`.

x is float32 (or bfloat16) [n_slots, in], W a dense tensor or packed blocks [out, in], sums are float32. Activations
are rounded to bfloat16 before the product with bfloat16 or packed weights and stay float32 otherwise; packed weights
are not rounded. Rows from n_rows on are neither read nor written. Bound by reading W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from ostinato.backends.torch.ops.activation import activate_torch, beside_gate_torch, gated_torch
from ostinato.backends.torch.ops.experts import expert_of, route_torch
from ostinato.backends.torch.weight import Weight, dense_of, dtype_of
from ostinato.backends.weights import Stack
from ostinato.models.shape import Activation, ExpertShape

STATS_BLOCK: Final = 16  # columns that share one (sum, sum of squares)

Epilogue = Literal["store", "add", "gated", "act", "multiply", "act_multiply"]


@dataclass(frozen=True, slots=True)
class InputNorm:
    """The norm of a product's input, made from what the writer of x left in `stats`.

    RMS norm, or layer norm where there is a bias. weight None says that x is bfloat16 and was multiplied by the norm's
    weight already (`PreparedInput`); only the root is left to divide by.
    """

    stats: Tensor  # float32 [n_slots, n_stats, 2]: sum and sum of squares of each STATS_BLOCK columns of x
    weight: Tensor | None  # [in]
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """What "add" also leaves for the next product: out = bfloat16(x * weight), so that it need not multiply again."""

    out: Tensor  # bfloat16 [n_slots, hidden]
    weight: Tensor  # [hidden], of the next RMS norm


def n_stats(width: int) -> int:
    """How many pairs of partial sums a row of `width` columns has.

    >>> n_stats(2048), n_stats(100)
    (128, 7)
    """
    return -(-width // STATS_BLOCK)


def stats_torch(x: Tensor) -> Tensor:
    """The partial sums of x, float32 [rows, width]: [rows, n_stats, 2]."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % STATS_BLOCK))
    blocks = padded.view(len(x), n_stats(x.shape[1]), STATS_BLOCK)
    return torch.stack((blocks.sum(-1), blocks.square().sum(-1)), -1)


def leave_torch(v: Tensor, rows: slice, stats: Tensor | None, prepared: PreparedInput | None) -> None:
    """What a writer of these rows of x, float32 [rows, width], leaves beside them for the products that follow."""
    if stats is not None:
        stats[rows] = stats_torch(v)
    if prepared is not None:
        prepared.out[rows] = (v * prepared.weight.float()).to(prepared.out.dtype)


def matmul_torch(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    n_rows: Tensor,
    *,
    epilogue: Epilogue = "store",
    norm: InputNorm | None = None,
    bias: Tensor | None = None,
    scale: Tensor | float | None = None,
    share: Tensor | None = None,
    softcap: float | None = None,
    activation: Activation | None = None,
    stats: Tensor | None = None,
    prepared: PreparedInput | None = None,
) -> None:
    """v = (norm(x) W^T + bias) * scale * share, soft-capped, then into out[:n_rows] by the epilogue; scale has a factor
    for each output, or one for all, and share [n_slots] one for each row:

    store: out = v. add: out += v. act: out = act(v). multiply: out *= v. act_multiply: out *= act(v). gated: out =
    act(v[:, :half]) * v[:, half:].
    An activation that changes what its gate is multiplied by does so in "gated" and "multiply".
    stats [n_slots, n_stats, 2] gains the partial sums of what out holds then, `prepared` that times a norm's weight.
    """
    rows = int(n_rows)
    v = product_torch(x[:rows], weight, None if norm is None else replace(norm, stats=norm.stats[:rows]))
    v = v if bias is None else v + bias.float()
    v = v if scale is None else v * scale
    v = v if share is None else v * share[:rows, None]
    v = v if softcap is None else torch.tanh(v / softcap) * softcap
    if epilogue == "add":
        v = out[:rows].float() + v
    elif epilogue in ("act", "gated"):
        assert activation is not None, "this epilogue needs an activation"
        v = gated_torch(v, activation) if epilogue == "gated" else activate_torch(v, activation)
    elif epilogue == "act_multiply":
        assert activation is not None, "this epilogue needs an activation"
        v = out[:rows].float() * activate_torch(v, activation)
    elif epilogue == "multiply":
        v = out[:rows].float() * (v if activation is None else beside_gate_torch(v, activation))
    out[:rows] = v.to(out.dtype)
    leave_torch(v, slice(rows), stats, prepared)


def product_torch(x: Tensor, weight: Weight, norm: InputNorm | None) -> Tensor:
    """norm(x) W^T of x [rows, in], in float32."""
    parts = weight.parts if isinstance(weight, Stack) else (weight,)
    return torch.cat([_product(x, part, dense_of(part, torch.float32), norm) for part in parts], 1)


def _product(x: Tensor, weight: Weight, wide: Tensor, norm: InputNorm | None) -> Tensor:
    """norm(x) times some rows of a weight, `wide` in float32."""
    narrow = dtype_of(weight) == torch.bfloat16
    inside, after = _normed(x, norm)
    inside = inside.bfloat16().float() if narrow else inside
    return (inside @ wide.T) * after


def _normed(x: Tensor, norm: InputNorm | None) -> tuple[Tensor, Tensor | float]:
    """What goes into the product, and what it is multiplied by afterwards: the RMS norm's root waits until then."""
    wide = x.float()
    if norm is None:
        return wide, 1.0
    width = x.shape[1]
    total, squares = norm.stats.sum(1).unbind(-1)
    if norm.bias is None:
        root = torch.rsqrt(squares / width + norm.eps)[:, None]
        return (wide if norm.weight is None else wide * norm.weight.float()), root
    assert norm.weight is not None, "layer norm has a weight"
    mean = (total / width)[:, None]
    root = torch.rsqrt((squares / width)[:, None] - mean * mean + norm.eps)
    return (wide - mean) * root * norm.weight.float() + norm.bias.float(), 1.0


def route_rows_torch(
    scores: Tensor,
    experts: Tensor,
    shares: Tensor,
    n_rows: Tensor,
    *,
    shape: ExpertShape,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    shared: Tensor | None = None,
) -> None:
    """The experts that each row of scores [n_slots, n_scores] goes to: ids int32, shares float32 [n_slots, n_used].

    In the order of their ids, which is the order in which their outputs are added. `shared` [n_slots] gets how much a
    row takes of a shared block that has a gate.
    """
    rows = int(n_rows)
    strength, chosen = route_torch(scores[:rows], shape, bias, scales)
    order = chosen.argsort(-1)
    experts[:rows] = chosen.gather(-1, order).int()
    shares[:rows] = strength.gather(-1, order)
    if shared is not None:
        shared[:rows] = scores[:rows, -1].float().sigmoid()


def experts_gate_up_torch(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    experts: Tensor,
    n_rows: Tensor,
    *,
    norm: InputNorm | None = None,
    bias: Tensor | None = None,
    gated: bool = True,
    activation: Activation,
) -> None:
    """out[row, j] = act(gate_e norm(x)) * (up_e norm(x)) for e = experts[row, j]; or act(up_e norm(x)), not `gated`.

    weight [n_experts * 2 * ff, in] holds for each expert its gate, then its up; a `Stack` is (gate, up) of all experts,
    each [n_experts * ff, in]. bias is [n_experts, 2 * ff], out [n_slots, n_used, ff].
    """
    width = (1 + gated) * out.shape[-1]
    for row in range(int(n_rows)):
        own = None if norm is None else replace(norm, stats=norm.stats[row : row + 1])
        for place, expert in enumerate(experts[row].tolist()):
            v = _of_expert(x[row : row + 1], weight, expert, width, own)
            v = v if bias is None else v + bias[expert].float()
            v = gated_torch(v, activation) if gated else activate_torch(v, activation)
            out[row, place] = v[0].to(out.dtype)


def _of_expert(x: Tensor, weight: Weight, expert: int, n_rows: int, norm: InputNorm | None) -> Tensor:
    """norm(x) through one expert's rows, [1, n_rows]; of a `Stack`, through its share of every part."""
    parts = weight.parts if isinstance(weight, Stack) else (weight,)
    share = n_rows // len(parts)
    products = [_product(x, p, expert_of(p, expert, share, torch.float32), norm) for p in parts]
    return torch.cat(products, 1)


def experts_down_torch(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    experts: Tensor,
    shares: Tensor,
    n_rows: Tensor,
    *,
    epilogue: Literal["store", "add"] = "add",
    bias: Tensor | None = None,
    stats: Tensor | None = None,
    prepared: PreparedInput | None = None,
) -> None:
    """out[row] = or += sum over j of shares[row, j] * (down_e x[row, j] + bias_e) for e = experts[row, j], in the order
    of j.

    x is [n_slots, n_used, ff], weight [n_experts * hidden, ff], bias [n_experts, hidden], out [n_slots, hidden]; stats
    as in `matmul_torch`.
    """
    for row in range(int(n_rows)):
        total = torch.zeros_like(out[row], dtype=torch.float32)
        for place, expert in enumerate(experts[row].tolist()):
            y = _of_expert(x[row, place : place + 1], weight, expert, out.shape[1], None)[0]
            y = y if bias is None else y + bias[expert].float()
            total += y * shares[row, place]
        v = out[row].float() + total if epilogue == "add" else total
        out[row] = v.to(out.dtype)
        leave_torch(v[None], slice(row, row + 1), stats, prepared)
