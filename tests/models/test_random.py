"""Models with random weights: sizes as published, sane numbers, the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.torch.weight import dense_of
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.errors import UnknownName
from ostinato.files.quants import dequantize
from ostinato.lab.random_weights import DTYPES, MIXES, RandomFile, kept_as, random_blocks
from ostinato.models.blocks import Attention, Experts, Layer
from ostinato.models.named_shapes import SHAPES, named_shape
from tests.named_model import named_model


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("smollm3-3b", 3_075_098_624),
        ("gemma2-2b", 2_614_341_888),
        ("gemma3-1b", 999_885_952),
        ("glm4-9b", 9_400_279_040),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_named_shape_has_as_many_parameters_as_the_published_model(name: str, published: int) -> None:
    assert sum(tensor.n_elements for tensor in RandomFile(SHAPES[name], "f32").tensors.values()) == published


@pytest.mark.parametrize("mix", ["bf16", "q4_k_m", "q4_1"])
def test_tiles_are_of_the_type_that_was_asked_for(mix: str) -> None:
    model = named_model("tiny", torch.bfloat16, mix=mix, tiles="int8")
    assert isinstance(model.embedding, TileMatrix)
    assert model.embedding.type == {"bf16": "BF16", "q4_k_m": "Q6_K", "q4_1": "Q4_1"}[mix]
    assert (model.embedding.wide, model.dtype) == (False, torch.float32)


@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0"])
def test_tiles_hold_the_numbers_that_a_gpus_planes_hold(mix: str) -> None:
    tiles = named_model("tiny", torch.float32, mix=mix, tiles="wide")
    planes = named_model("tiny", torch.float32, mix=mix)
    for one, other in zip(tiles.layers, planes.layers, strict=True):
        a, b = one.attention, other.attention
        assert isinstance(a, Attention)
        assert isinstance(b, Attention)
        for ours, theirs in ((a.qkv, b.qkv), (a.out, b.out)):
            assert torch.equal(dense_of(ours.weight, torch.float32), dense_of(theirs.weight, torch.float32))


def test_four_bits_take_what_such_files_take() -> None:
    """4.8 to 4.9 bits a weight, with the head at six."""
    n_bits = 8 * sum(tensor.n_bytes for tensor in RandomFile(SHAPES["llama-8b"], "q4_k_m").tensors.values())
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
    layer = named_model("tiny-mixtral", torch.bfloat16, mix="q4_k_m").layers[0]
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
    values = dequantize(random_blocks(type, 64, 512, np.random.default_rng(1)), type)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(512**-0.5, rel=0.05)
    assert abs(values.mean()) < 0.15 * values.std()  # the middle of 16 steps is none of them


def test_an_unknown_shape_is_refused_with_the_nearest_first() -> None:
    with pytest.raises(UnknownName, match=r"no shape is called 'lama-1b'; known: llama-1b \(the nearest\)"):
        named_shape("lama-1b")


@pytest.mark.parametrize("name", ["tiny", "tiny-mixtral", "tiny-qwen3moe", "tiny-deepseek2"])
@pytest.mark.parametrize(
    ("dtype", "mix"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "q4_k_m"), (torch.float32, "q8_0")],
)
def test_logits_of_random_weights_are_sane(name: str, dtype: torch.dtype, mix: str | None) -> None:
    model = named_model(name, dtype, mix=mix)
    decoder = Decoder(model, n_ctx=64)
    decoder.decode(Batch(token=[5, 900, 31, 7]))
    logits = decoder.logits(-1)
    assert logits is not None
    assert bool(logits.isfinite().all())
    assert 0.3 < float(logits.std()) < 3.0


def test_what_can_be_made_is_what_kernels_multiply() -> None:
    assert ("q4_k_m", *map(str.lower, PACKED_TYPES)) == MIXES


@pytest.mark.parametrize("type", ["f32", "bf16", "q8_0"])
def test_the_same_seed_gives_the_same_bytes_in_any_order(type: str) -> None:
    first, second, other = (RandomFile(SHAPES["tiny"], type, seed) for seed in (3, 3, 4))
    names = [name for name in first.tensors if name.endswith(("attn_q.weight", "ffn_up.weight"))]
    made = [first.raw(name).copy() for name in names]
    assert len({one.tobytes() for one in made}) == len(names) > 1
    for name, one in reversed(list(zip(names, made, strict=True))):
        assert np.array_equal(second.raw(name), one)
        assert not np.array_equal(other.raw(name), one)


@pytest.mark.parametrize("type", DTYPES)
def test_plain_numbers_are_normally_distributed(type: str) -> None:
    file = RandomFile(SHAPES["tiny"], type)
    for name, middle, spread in (("blk.0.ffn_up.weight", 0.0, 256**-0.5), ("blk.0.ffn_norm.weight", 1.0, 0.1)):
        values = np.empty(file.tensors[name].shape, np.float32)
        file.read(name, values)
        assert values.mean() == pytest.approx(middle, abs=4 * spread / values.size**0.5 + 1e-4)
        assert values.std() == pytest.approx(spread, rel=0.15)
