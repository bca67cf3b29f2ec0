"""The way from a checkpoint to a model: its blocks, and the loader of the backend that will run it."""

from __future__ import annotations

from ostinato.backends.cuda.load import PackedLoader
from ostinato.backends.loading import Progress
from ostinato.backends.native.tile_weights import load_tiles
from ostinato.backends.tape.load import load_on_host
from ostinato.backends.torch.load import DenseLoader, load, reading_threads
from ostinato.backends.torch.model import Device, DType, Model
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.registry import describe
from ostinato.models.shape import Shape
from ostinato.options import Activations


def build_model(
    checkpoint: Checkpoint,
    shape: Shape,
    *,
    dtype: DType,
    device: Device,
    context: int,
    progress: Progress | None = None,
    packed: bool = False,
    tiles: Activations | None = None,
    on_host: bool = False,
) -> Model:
    """The model with its weights on `device` in `dtype`, for an engine of that context.

    `packed`: matrices stay in the file's own type where kernels multiply it. `tiles`: they are packed into the tiles
    of the CPU's native loop, to be multiplied with such activations. `on_host`: matrices stay in the host's memory,
    for whoever takes one at a time to the device; the embedding and vectors are there.
    """
    blocks, table = describe(checkpoint, shape)
    if tiles is not None:
        loaded = load_tiles(blocks, table, tiles, reading_threads(device), progress)
        return Model.of(loaded, dtype=dtype, device=device, context=context)
    loader, way = PackedLoader if packed else DenseLoader, load_on_host if on_host else load
    return way(blocks, table, dtype=dtype, device=device, context=context, progress=progress, loader=loader)
