"""Models of files as their backends load them, in the dtype and layout that a test asks for."""

from typing import Literal

import torch

from ostinato.backends.base import Settled, WeightLayout
from ostinato.backends.torch.backend import model_of
from ostinato.backends.torch.model import Model
from ostinato.engine.load import load_blocks
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.registry import describe
from ostinato.models.shape import Shape
from ostinato.options import Activations


def build_model(
    checkpoint: Checkpoint,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    packed: bool = False,
    tiles: Activations | None = None,
    on_host: bool = False,
) -> Model:
    """Dense, `packed` for a GPU's kernels, in the native loop's `tiles`, or with matrices `on_host` for the tape."""
    weights: WeightLayout = "tiles" if tiles else "packed" if packed else "dense"
    prompts: Literal["plain", "tape"] = "tape" if on_host else "plain"
    settled = Settled(
        device=str(device),
        backend="native" if tiles else "tape" if on_host else "cuda" if packed else "torch",
        mode="eager",
        dtype=str(dtype).removeprefix("torch."),
        kv_type="f32",
        context=context,
        weights=weights,
        activations=tiles or "wide",
        prompts=prompts,
        threads=torch.get_num_threads(),
    )
    return model_of(load_blocks(*describe(checkpoint, shape), settled), settled)
