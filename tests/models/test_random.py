"""Models with random weights: sizes as published, sane numbers, the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.backends.cuda.packed import PACKED_TYPES, Packed
from ostinato.backends.native.tiles import TileMatrix, tile_bytes
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.weight import dense_of
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.flow import DecodeFlow
from ostinato.decoder.cells.memories import memory_for
from ostinato.decoder.cells.settings import settle
from ostinato.errors import UnknownName
from ostinato.files.quants import dequantize
from ostinato.lab.random_weights import RandomLoader, RandomSpec, kept_as, random_blocks, random_model, random_tensors
from ostinato.models.blocks import Experts, Layer
from ostinato.models.named_shapes import SHAPES, named_shape
from ostinato.models.shape import Shape
from ostinato.models.tensors import Matrices, StackedTensors

CPU = torch.device("cpu")


def n_bytes(shape: Shape, dtype: torch.dtype, mix: str | None = None) -> int:
    """What the weights of a model take, by their listing."""
    return sum(info.n_bytes for info in random_tensors(shape, dtype, mix).values())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_named_shape_has_as_many_parameters_as_the_published_model(name: str, published: int) -> None:
    assert n_bytes(SHAPES[name], torch.float32) == 4 * published


@pytest.mark.parametrize("name", ["tiny", "tiny-mixtral", "tiny-qwen3moe"])
@pytest.mark.parametrize("mix", [None, "q4_k_m", "q8_0"])
def test_the_bytes_of_a_model_are_known_before_it_is_made(name: str, mix: str | None) -> None:
    model = random_model(name, torch.bfloat16, CPU, mix=mix)
    held = {t.data_ptr(): t.numel() * t.element_size() for name, t in tensors_of(model, "") if "freq" not in name}
    assert n_bytes(model.shape, torch.bfloat16, mix) == sum(held.values())


@pytest.mark.parametrize("mix", [None, "q4_k_m", "q4_1"])
def test_so_they_are_in_tiles(mix: str | None) -> None:
    model = random_model("tiny", torch.bfloat16, CPU, mix=mix, tiles="int8")
    held = {t.data_ptr(): t.numel() * t.element_size() for name, t in tensors_of(model, "") if "freq" not in name}
    listed = random_tensors(model.shape, torch.bfloat16, mix).values()
    in_tiles = [tile_bytes(one.type, *one.shape) if len(one.shape) > 1 else one.n_bytes for one in listed]
    assert sum(in_tiles) == sum(held.values())
    assert isinstance(model.embedding, TileMatrix)
    assert model.embedding.type == {None: "BF16", "q4_k_m": "Q6_K", "q4_1": "Q4_1"}[mix]
    assert (model.embedding.wide, model.dtype) == (False, torch.float32)


@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0"])
def test_tiles_hold_the_numbers_that_a_gpus_planes_hold(mix: str) -> None:
    tiles = random_model("tiny", torch.float32, CPU, mix=mix, tiles="wide")
    planes = random_model("tiny", torch.float32, CPU, mix=mix)
    for one, other in zip(tiles.layers, planes.layers, strict=True):
        assert isinstance(one, Layer)
        assert isinstance(other, Layer)
        for ours, theirs in ((one.attention.qkv, other.attention.qkv), (one.attention.out, other.attention.out)):
            assert torch.equal(dense_of(ours.weight, torch.float32), dense_of(theirs.weight, torch.float32))


def test_four_bits_take_what_such_files_take() -> None:
    """4.8 to 4.9 bits a weight, with the head at six."""
    n_bits = 8 * n_bytes(SHAPES["llama-8b"], torch.bfloat16, "q4_k_m")
    assert 4.8 < n_bits / 8_030_261_248 < 4.95


def test_q4_k_m_gives_more_bits_to_half_of_the_layers_and_to_the_head() -> None:
    shape = SHAPES["llama-1b"]
    types = [kept_as("q4_k_m", f"blk.{layer}.ffn_down.weight", 8192, shape) for layer in range(16)]
    assert [layer for layer, type in enumerate(types) if type == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert kept_as("q4_k_m", "blk.0.attn_q.weight", 2048, shape) == "Q4_K"
    assert kept_as("q4_k_m", "token_embd.weight", 2048, shape) == "Q6_K"  # it is the head too
    assert kept_as("q4_k_m", "token_embd.weight", 4096, SHAPES["llama-8b"]) == "Q4_K"
    assert kept_as("q4_k_m", "output.weight", 4096, SHAPES["llama-8b"]) == "Q6_K"


def test_q4_k_m_of_eight_experts_gives_attention_more_and_routers_all_bits() -> None:
    shape = SHAPES["mixtral-8x7b"]
    assert kept_as("q4_k_m", "blk.9.attn_v.weight", 4096, shape) == "Q8_0"
    assert kept_as("q4_k_m", "blk.9.attn_output.weight", 4096, shape) == "Q5_K"
    assert kept_as("q4_k_m", "blk.9.ffn_gate_exps.weight", 4096, shape) == "Q4_K"
    assert kept_as("q4_k_m", "blk.0.ffn_down_exps.weight", 4096, shape) == "Q6_K"
    assert kept_as("q4_k_m", "blk.8.attn_v.weight", 4096, SHAPES["llama-8b"]) == "Q4_K"
    layer = random_model("tiny-mixtral", torch.bfloat16, CPU, mix="q4_k_m").layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mlp, Experts)
    assert isinstance(layer.mlp.router.weight, torch.Tensor)
    assert isinstance(layer.mlp.gate_up, Packed)
    assert (layer.mlp.gate_up.rows, layer.mlp.gate_up.cols) == (4 * 2 * 512, 256)


def test_rows_that_are_no_whole_blocks_get_a_type_with_smaller_ones() -> None:
    shape = SHAPES["smollm2-135m"]
    assert kept_as("q4_k_m", "blk.9.attn_q.weight", 576, shape) == "Q5_0"
    assert kept_as("q4_k_m", "token_embd.weight", 576, shape) == "Q8_0"
    assert kept_as("q4_k_m", "blk.0.ffn_down.weight", 1536, shape) == "Q6_K"


@pytest.mark.parametrize("type", PACKED_TYPES)
def test_random_blocks_of_every_type_have_sane_values(type: str) -> None:
    raw = random_blocks(type, 64, 512, torch.Generator().manual_seed(1))
    values = dequantize(raw.numpy(), type)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(512**-0.5, rel=0.05)
    assert abs(values.mean()) < 0.15 * values.std()  # the middle of 16 steps is none of them


def test_an_unknown_shape_is_refused_with_the_nearest_first() -> None:
    with pytest.raises(UnknownName, match=r"no shape is called 'lama-1b'; known: llama-1b \(the nearest\)"):
        named_shape("lama-1b")


@pytest.mark.parametrize("name", ["tiny", "tiny-mixtral", "tiny-qwen3moe"])
@pytest.mark.parametrize(
    ("dtype", "mix"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "q4_k_m"), (torch.float32, "q8_0")],
)
def test_logits_of_random_weights_are_sane(name: str, dtype: torch.dtype, mix: str | None) -> None:
    model = random_model(name, dtype, CPU, mix=mix)
    settings = settle(n_ctx=64, n_seq_max=1, unified=True)
    flow = DecodeFlow(model, settings, memory_for(model, settings, "f32"))
    flow.decode(Batch(token=[5, 900, 31, 7]))
    logits = flow.outputs.logits(-1).value
    assert logits is not None
    assert bool(logits.isfinite().all())
    assert 0.3 < float(logits.std()) < 3.0


def test_the_same_seed_gives_the_same_weights_in_any_order() -> None:
    first, second, other = (RandomLoader(RandomSpec(SHAPES["tiny"], torch.float32), CPU, seed) for seed in (3, 3, 4))
    up, down = StackedTensors(("up.weight",), ((8, 16),)), StackedTensors(("down.weight",), ((8, 16),))
    made = [first.leaf(up), first.leaf(down)]
    assert torch.equal(second.leaf(down), made[1])
    assert torch.equal(second.leaf(up), made[0])
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(other.leaf(up), made[0])


def test_stacked_weights_are_the_single_ones_on_top_of_each_other() -> None:
    loader = RandomLoader(RandomSpec(SHAPES["tiny"], torch.bfloat16), CPU, 0)
    stacked = loader.leaf(Matrices(("a.weight", "b.weight"), ((4, 16), (2, 16))))
    a, b = loader.leaf(Matrices(("a.weight",), ((4, 16),))), loader.leaf(Matrices(("b.weight",), ((2, 16),)))
    assert torch.equal(stacked, torch.cat([a, b]))
