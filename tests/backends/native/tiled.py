"""A model of ours with its matrices in tiles, as the CPU's native loop takes them, and back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.native.tiles import TILE_ROWS, TileMatrix, empty_tiles, fill_tiles
from ostinato.backends.torch import read_only as read_only  # norms of these models are tensors
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.weight import Weight, dense_of
from ostinato.backends.weights import Stack
from ostinato.files.quants import BLOCKS
from ostinato.lab.random_weights import random_blocks
from ostinato.models.blocks import MLP, AnyLayer, Attention, Experts, LatentAttention, Layer, Linear, Mixer, PlainMLP

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Pack = Callable[[Tensor], TileMatrix]
LATENT = ("into_latent", "out_of_latent")  # products of experts that work in a space of their own


def pack_tiles(type: str, raw: Tensor, *, wide: bool = True, n_threads: int = 1) -> TileMatrix:
    """The tiles of raw, uint8 [rows, row_bytes] as in the file; raw is not kept."""
    block = BLOCKS[type]
    rows, row_bytes = raw.shape
    tiles = empty_tiles(type, rows, row_bytes // block.n_bytes * block.elements, wide=wide)
    blocks = raw.numpy()
    step = -(-tiles.n_tiles // n_threads) * TILE_ROWS
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(lambda start: fill_tiles(tiles, blocks[start : start + step], start), range(0, rows, step)))
    return tiles


def plain_tiles(type: str = "F32", *, wide: bool = True) -> Pack:
    """Packs a matrix as numbers of one of the plain types."""

    def pack(weight: Tensor) -> TileMatrix:
        raw = weight.to(_PLAIN[type]).contiguous().view(torch.uint8).view(len(weight), -1)
        return pack_tiles(type, raw, wide=wide)

    return pack


def packed_blocks(type: str, *, wide: bool) -> Pack:
    """Random blocks of a type in place of each matrix that it is asked for."""
    chance = np.random.default_rng(3)

    def pack(weight: Tensor) -> TileMatrix:
        if type in ("F32", "F16", "BF16"):
            return plain_tiles(type, wide=wide)(weight)
        rows, cols = weight.shape
        return pack_tiles(type, torch.from_numpy(random_blocks(type, rows, cols, chance)), wide=wide)

    return pack


def tiled(model: Model, pack: Pack | None = None) -> Model:
    """The model with every matrix in tiles: q, k and v apart, gate and up too, each expert by itself."""
    pack = pack or plain_tiles()
    assert isinstance(model.embedding, Tensor)

    def halves(gate_up: Tensor) -> Stack:
        return Stack(tuple(pack(half) for half in gate_up.chunk(2)))

    def one(linear: Linear) -> Linear:
        assert isinstance(linear.weight, Tensor)
        return replace(linear, weight=pack(linear.weight))

    def attention(block: Attention) -> Attention:
        assert isinstance(block.qkv.weight, Tensor)
        widths = [width for width in block.shape.qkv_widths if width]
        parts = Stack(tuple(pack(part) for part in torch.split(block.qkv.weight, widths)))
        return replace(block, qkv=replace(block.qkv, weight=parts), out=one(block.out))

    def latent(block: LatentAttention) -> LatentAttention:
        q_a = None if block.q_a is None else one(block.q_a)
        block = replace(block, k_b=tuple(map(pack, block.k_b)), v_b=tuple(map(pack, block.v_b)))
        return replace(block, q_a=q_a, q_b=one(block.q_b), kv_a=one(block.kv_a), out=one(block.out))

    def mlp(block: MLP) -> MLP:
        if isinstance(block, PlainMLP):
            return replace(block, up=one(block.up), down=one(block.down))
        if isinstance(block, Experts):
            assert isinstance(block.gate_up, Tensor)
            assert isinstance(block.down, Tensor)
            gate_ups, downs = (
                tuple(map(halves if block.experts.gated else pack, block.gate_up)),
                tuple(map(pack, block.down)),
            )
            latent: dict[str, Any] = {
                name: one(linear) for name in LATENT if (linear := getattr(block, name)) is not None
            }
            shared = None if block.shared is None else mlp(block.shared)
            assert not isinstance(shared, Experts)
            return replace(block, router=one(block.router), gate_up=gate_ups, down=downs, shared=shared, **latent)
        assert isinstance(block.gate_up.weight, Tensor)
        return replace(block, gate_up=replace(block.gate_up, weight=halves(block.gate_up.weight)), down=one(block.down))

    def mixer(block: Mixer) -> Mixer:
        parts = {f.name: getattr(block, f.name) for f in fields(block)}
        changed: dict[str, Any] = {name: one(part) for name, part in parts.items() if isinstance(part, Linear)}
        return replace(block, **changed)

    def layer(block: AnyLayer) -> AnyLayer:
        made: dict[str, Any] = {}
        if isinstance(block.attention, Attention):
            made["attention"] = attention(block.attention)
        elif isinstance(block.attention, LatentAttention):
            made["attention"] = latent(block.attention)
        if block.mlp is not None:
            made["mlp"] = mlp(block.mlp)
        if isinstance(block, Layer) and block.mixer is not None:
            made["mixer"] = mixer(block.mixer)
        if isinstance(block, Layer) and (part := block.per_layer) is not None:
            made["per_layer"] = replace(part, gate=one(part.gate), out=one(part.out))
        return replace(block, **made)

    parts = model.per_layer
    if parts is not None:
        assert isinstance(parts.embedding, Tensor)
        parts = replace(parts, embedding=pack(parts.embedding), project=one(parts.project))
    embedding, head = pack(model.embedding), model.head
    if head is not None:
        head = replace(head, weight=embedding) if head.weight is model.embedding else one(head)
    layers = [layer(block) for block in model.layers]
    return replace(model, embedding=embedding, layers=layers, head=head, per_layer=parts)


def dense(model: Model) -> Model:
    """The other way: the numbers that the tiles hold, as torch's own blocks multiply them."""

    def of(weight: Weight) -> Tensor:
        return dense_of(weight, torch.float32)

    def one(linear: Linear) -> Linear:
        return replace(linear, weight=of(linear.weight))

    def feed_forward(mlp: MLP) -> MLP:
        if isinstance(mlp, Experts):
            assert isinstance(mlp.gate_up, tuple)
            assert isinstance(mlp.down, tuple)
            ups, downs = torch.stack([of(w) for w in mlp.gate_up]), torch.stack([of(w) for w in mlp.down])
            latent: dict[str, Any] = {
                name: one(linear) for name in LATENT if (linear := getattr(mlp, name)) is not None
            }
            shared = None if mlp.shared is None else feed_forward(mlp.shared)
            assert not isinstance(shared, Experts)
            return replace(mlp, router=one(mlp.router), gate_up=ups, down=downs, shared=shared, **latent)
        if isinstance(mlp, PlainMLP):
            return replace(mlp, up=one(mlp.up), down=one(mlp.down))
        return replace(mlp, gate_up=one(mlp.gate_up), down=one(mlp.down))

    def layer(block: AnyLayer) -> AnyLayer:
        made: dict[str, Any] = {}
        if isinstance(block.attention, Attention):
            made["attention"] = replace(block.attention, qkv=one(block.attention.qkv), out=one(block.attention.out))
        if block.mlp is not None:
            made["mlp"] = feed_forward(block.mlp)
        return replace(block, **made)

    layers = [layer(block) for block in model.layers]
    head = None if model.head is None else one(model.head)
    return replace(model, embedding=of(model.embedding), layers=layers, head=head)
