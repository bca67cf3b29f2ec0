"""Multi-head latent attention: what a position keeps, what a state of it is, and files that contradict themselves."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from ostinato import LLM
from ostinato.backends.native.pages import PAGE_TOKENS, NativePages
from ostinato.backends.native.sequence_copy import NativeSequenceCopy
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import memory_tensors
from ostinato.backends.torch.sequence_copy import TorchSequenceCopy
from ostinato.cache.groups import one_group
from ostinato.cache.kv_bytes import cell_bytes, page_bytes
from ostinato.engine.verify import twin_logits
from ostinato.files.checkpoint import open_checkpoint
from ostinato.loop.memory import memory_in
from ostinato.models.registry import read_shape
from ostinato.options import KVType
from tests.backends.families import family_model
from tests.backends.native.tiled import tiled
from tests.models import tiny, tiny_gguf
from tests.models.test_refusals import refusal, setting, spoiled_folder, spoiled_gguf

WRONG_SETTINGS: Final = [
    ("deepseek2.attention.key_length_mla", 16),  # nothing of a head that is not rotated
    ("deepseek2.attention.key_length_mla", 40),
    ("deepseek2.attention.value_length_mla", 16),
    ("deepseek2.attention.kv_lora_rank", 32),
    ("deepseek2.attention.q_lora_rank", None),
    ("deepseek2.attention.head_count", 2),
    ("deepseek2.rope.dimension_count", 7),
    ("deepseek2.leading_dense_block_count", 2),
]
WRONG_CONFIGS: Final = [
    ("deepseek-v3", "kv_lora_rank", 32),
    ("deepseek-v3", "q_lora_rank", None),
    ("deepseek-v3", "v_head_dim", 16),
    ("deepseek-v3", "qk_rope_head_dim", 0),
    ("deepseek-v2", "n_routed_experts", 5),
    ("glm-4.7-flash", "mlp_layer_types", ["dense", "thin", "sparse"]),
    ("glm-4.7-flash", "mlp_layer_types", ["sparse"] * 3),
]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_a_position_keeps_its_compressed_row_and_nothing_else_in_every_backend(kv_type: KVType) -> None:
    model = family_model("deepseek2")
    shape, groups = model.shape, one_group((0, 1), 3)
    assert {one.own_value_width for one in shape.attention.values()} == {0}
    native = NativePages.of(shape, groups, n_slots=1, kv_type=kv_type)
    paged = PagedMemory.of(model, groups, n_slots=1, kv_type=kv_type, page_tokens=PAGE_TOKENS)
    expected = 3 * page_bytes(shape, kv_type, PAGE_TOKENS)
    assert sum(array.nbytes for _, array in memory_in(native.layers, "")) == expected
    assert sum(tensor.nbytes for _, tensor in memory_tensors(paged)) == expected
    ours, theirs = NativeSequenceCopy(native).kv_cells([0, 1]), TorchSequenceCopy(paged).kv_cells([0, 1])
    assert ours == theirs  # so that a state of one is loaded by the other
    if kv_type == "f32":
        assert cell_bytes(shape.attention[0], kv_type) == 4 * (48 + 16)
        assert [cell.shape for cell in ours] == [(1, 64), (1, 64)]


@pytest.mark.parametrize(("key", "value"), WRONG_SETTINGS, ids=str)
def test_metadata_that_contradicts_tensors_is_refused(key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    refusal(spoiled_gguf(tmp_path, tiny_files, name="deepseek-v3", metadata=setting(key, value)))


@pytest.mark.parametrize(("name", "key", "value"), WRONG_CONFIGS, ids=str)
def test_a_config_that_contradicts_tensors_is_refused(
    name: str, key: str, value: Any, tmp_path: Path, tiny_files: Path
) -> None:
    refusal(spoiled_folder(tmp_path, tiny_files, name=name, config=lambda c: c.update({key: value})))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "loop"])
@pytest.mark.parametrize(
    ("name", "storage"), [("deepseek-v3", "F32"), ("deepseek-v2-lite", "F32"), ("glm-4.7-flash", "F16")]
)
def test_one_tensor_that_expands_keys_and_values_gives_the_logits_of_two(
    name: str, storage: str, mode: str, tmp_path: Path, tiny_files: Path
) -> None:
    """As files of DeepSeek V2, V3 and R1 had it until April 2025."""
    config, tensors = tiny.parts_of(name, tiny_files)
    rows = []
    for whole in (False, True):
        path = tmp_path / f"{whole}.gguf"
        tiny_gguf.write(path, "deepseek2", {**config, "kv_b_whole": whole}, tensors, storage=storage)
        with LLM(path, device="cpu", mode=mode) as llm:
            rows.append(llm.logits(tiny.prompt(name)))
    np.testing.assert_allclose(rows[1], rows[0], rtol=0, atol=tiny.TOLERANCE)


def test_sizes_may_be_given_layer_by_layer(tmp_path: Path, tiny_files: Path) -> None:
    """As GGUF files of models whose layers differ have them."""

    def lists(metadata: dict[str, Any]) -> None:
        for key, numbers in (("attention.head_count_kv", [2, 2, 2]), ("feed_forward_length", [96, 96, 96])):
            setting(f"llama.{key}", numbers)(metadata)

    with open_checkpoint(spoiled_gguf(tmp_path, tiny_files)) as plain:
        expected = read_shape(plain)
    with open_checkpoint(spoiled_gguf(tmp_path, tiny_files, metadata=lists)) as listed:
        assert read_shape(listed) == expected


def test_the_reference_multiplies_heads_that_the_native_loop_has_one_by_one() -> None:
    """As `ostinato verify` compares them on a CPU."""
    model = family_model("deepseek2")
    plain, tiles = (twin_logits(one, [5, 9, 2, 77], "f32", 64)[1] for one in (model, tiled(model)))
    np.testing.assert_allclose(tiles, plain, rtol=1e-4, atol=1e-4)
