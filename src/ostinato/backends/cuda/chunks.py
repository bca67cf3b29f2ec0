"""Chunks on a GPU, through kernels whose rows are independent of each other: one graph per bucket of rows.

The rows of all parts lie one after the other, padded to a bucket of 64 to 512; every product has fixed tiles and no
split, and attention walks the past in blocks from position 0, so the bits of a position depend on its tokens and on
nothing else: not on where the prompt was cut, nor on the bucket, nor on the other parts. All memory is made here, once,
for the largest bucket, and the others use its first rows: no launch allocates, so graphs keep no memory but their own.
A chunk copies its ids and pages in and replays; what is asked for of its rows follows (`outputs.py`).

Matrices that no kernel here reads where they lie are unpacked right before their products (`scratch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.base import CHUNK_ROWS, ChunkOutput, ChunkPart, ChunkWant, output_rows
from ostinato.backends.cuda.latent import LatentBuffers, latent_heads_of, latent_kv_of, latent_stages
from ostinato.backends.cuda.launch import launches_in
from ostinato.backends.cuda.mixers import (
    MixerBuffers,
    MixerStages,
    ProductStage,
    columns,
    stages_of,
    states_of,
    with_factor,
)
from ostinato.backends.cuda.outputs import ChunkOutputs
from ostinato.backends.cuda.plan import flat, heads_of, paged_kv_of, plain_layer, rows_normed
from ostinato.backends.cuda.ready import check_ready
from ostinato.backends.cuda.scratch import Scratch
from ostinato.backends.torch.allocate import pinned_zeros, zeros
from ostinato.backends.torch.first_token import FirstToken
from ostinato.backends.torch.kernels import Kernels, Launch, play
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.chunk_attention import Chunk, chunk_tables
from ostinato.backends.torch.ops.matmul import n_stats
from ostinato.backends.torch.ops.runs import ChunkRuns
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import shape_of
from ostinato.errors import InternalError, first_line
from ostinato.loop.layout import Tables
from ostinato.loop.plan import Buffer, without_repeats
from ostinato.models.blocks import (
    MLP,
    Attention,
    Experts,
    GatedMLP,
    LatentAttention,
    Layer,
    Linear,
    Mixer,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    PlainMLP,
)
from ostinato.models.shape import Shape

BUCKETS: Final = (64, 128, 256, CHUNK_ROWS["cuda"])


class FusedChunks:
    """Chunks by kernels. `run` and `first` enqueue on the current stream and return at once."""

    any_cut = True

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        tables: Tables,
        n_tokens: int,
        kernels: Kernels,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self._model, self._memory, self._tables = model, memory, tables
        self._kernels, self._buckets = kernels, tuple(buckets)
        self.rows = most = self._buckets[-1]
        shape, device = model.shape, model.device
        max_pages, n_groups = tables.layout.max_pages, tables.layout.n_groups

        def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros(size, dtype, device)

        # What a chunk brings, in one copy: how many rows, tiles and runs, the runs of recurrent layers, the tiles, ids,
        # positions, parts and rope sets of the rows, and the parts' page tables, as many as there are. The staged side
        # is ours and stays, because the copy runs on when the caller has gone (E-34).
        n_slots = tables.layout.n_slots
        size = 4 + 4 * n_slots + 8 * most + most * n_groups * max_pages
        on_gpu = device.type == "cuda"
        self._staged = (
            pinned_zeros((size,), torch.int32, "chunks of prompts") if on_gpu else made(size, dtype=torch.int32)
        )
        self._brought = made(size, dtype=torch.int32)
        self._to_stage, brought = (
            _Brought.over(memory, most, n_slots, n_groups, max_pages) for memory in (self._staged, self._brought)
        )
        self._n, self._tokens, self._positions = brought.n, brought.tokens, brought.positions
        of_rows = brought.n, brought.n_tiles, brought.tiles, brought.positions, brought.parts
        self._chunks = [Chunk(*of_rows, brought.pages[:, group], brought.rope_set) for group in range(n_groups)]

        wide = model.dtype if model.dtype == torch.float32 else torch.bfloat16
        self._x, self._y = made(most, shape.hidden), made(most, shape.hidden)
        self._h = made(most, shape.hidden, dtype=wide)
        self._qkv = made(most, max(1, shape.widest(lambda a: a.qkv_width if a.latent is None else 0)), dtype=wide)
        self._q = made(most, max(1, shape.widest(lambda a: a.n_heads * a.head_width)), dtype=wide)
        self._attended = made(most, max(1, shape.widest(lambda a: a.out_width)), dtype=wide)
        inner = 1 if shape.experts is not None and not shape.experts.dense_layers else max(1, shape.widest_ff)
        self._inner = made(most, 2 * inner, dtype=wide)
        self._act = made(most, inner, dtype=wide)
        self._runs = ChunkRuns(brought.n, brought.n_runs, brought.runs, brought.parts)
        self._mixing = MixerBuffers.of(shape.recurrent.values(), most, wide, device) if shape.recurrent else None
        self._latent = LatentBuffers.of(shape, most, wide, device)
        self._stats = made(most, n_stats(shape.hidden), 2)  # which the embedding leaves, and prompts need not
        self._row_slot = torch.arange(most, dtype=torch.int32, device=device)  # a row of a prompt is its own slot
        self._routed = _Routed.of(shape, most, device, wide)
        self._last = made(tables.layout.n_slots, shape.hidden)
        parts_width = shape.n_layers * shape.per_layer_width
        self._parts = made(shape.n_layers, most, shape.per_layer_width)
        self._projected, self._own_parts = (made(most, parts_width) for _ in range(2))
        self._own_stats = made(most, n_stats(parts_width), 2)
        self._part = made(most, shape.per_layer_width, dtype=wide)
        self._scratch = Scratch(model)
        self._launches = {rows: self._bound(rows) for rows in self._buckets}
        self._graphs: dict[int, Any] = {}
        self.failures: Mapping[int, str] = {}  # buckets that could not be captured: they go node by node (E-57, E-58)
        self._first = self._first_token(n_tokens)
        bound = tensors_of([self._launches, self._first.launches], "chunk")
        self.captured = tuple(without_repeats([Buffer.of(name, tensor) for name, tensor in bound]))
        self._outputs = ChunkOutputs(model, kernels, most, self._scratch)
        self.max_outputs = self._outputs.max_outputs
        self._n_copies = 0

    def bound(self) -> list[Any]:
        """Everything that chunks and their outputs launch."""
        return [self._launches, self._first.launches, self._outputs.bound()]

    def capture(self, stream: Any) -> None:
        """Warm and capture every bucket on this stream, and what follows a chunk: nothing is compiled here or later."""
        check_ready(launches_in(self.bound()), self._model.device)
        with torch.cuda.stream(stream):
            self._outputs.warm(self._x)
        for rows, launches in self._launches.items():
            with torch.cuda.stream(stream):
                self._brought.zero_()
                play(launches)
                self._first.play()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    play(launches)
                self._graphs[rows] = graph
            except RuntimeError as error:
                self.failures = {**self.failures, rows: first_line(error)}

    @property
    def routes(self) -> Tensor | None:
        """Which experts the rows of the last chunk went to, int32 [n_layers, rows, n_used]; None without experts."""
        return None if self._routed is None else self._routed.chosen

    def rows_for(self, n_prompt: int) -> int:
        return self.rows  # of a chunk; its bits are the same in any bucket

    @property
    def n_copies(self) -> int:
        return self._n_copies + self._outputs.n_copies

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        counts = [len(part.tokens) for part in parts]
        asked = output_rows(parts, want, self.max_outputs, self._model.shape.vocab)
        if any(len(part.page_tables) != len(self._chunks) for part in parts):
            raise InternalError(f"a part lacks a page table; the layers have {len(self._chunks)}")
        bucket = next((size for size in self._buckets if size >= sum(counts) > 0), None)
        if bucket is None:
            raise InternalError(f"a chunk of {sum(counts)} tokens; 1 to {self.rows} go at once")
        n_brought = self._to_stage.fill(parts, counts, recurs=self._mixing is not None)
        self._brought[:n_brought].copy_(self._staged[:n_brought], non_blocking=True)
        self._n_copies += 1
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            play(self._launches[bucket])
        for part, stop in zip(parts, accumulate(counts), strict=True):
            if part.slot is not None:
                self._last[part.slot].copy_(self._x[stop - 1])
        return ChunkOutput() if want is None else self._outputs.of_rows(self._x, asked, want)

    def first(self, slot: int) -> None:
        self._first.choose(slot, self._last[slot : slot + 1])

    def _first_token(self, n_tokens: int) -> FirstToken:
        """By the step's own head, behind the last norm."""
        model, norm, head = self._model, self._model.norm, self._model.head
        assert norm is not None
        assert head is not None
        row, logits = (zeros((1, n), torch.float32, model.device) for n in (model.shape.hidden, model.shape.vocab))
        normed, one = torch.zeros_like(row), self._count(1)
        words = {"bias": head.bias, "scale": head.scale, "softcap": model.shape.logit_softcap}

        def product(weight: Weight, out: Tensor) -> Launch:
            return self._kernels.matmul(normed, weight, out, one, **words)

        norming = self._kernels.norm(row, normed, norm.weight, norm.bias, norm.eps)
        launches = (norming, self._scratch.product(head.weight, logits, product))
        return FirstToken(row, logits, launches, self._tables, n_tokens, self._kernels)

    # The launches of a bucket

    def _bound(self, rows: int) -> list[Launch]:
        launches: list[Launch] = [self._embedding(rows)]
        if (norm := self._model.embedding_norm) is not None:
            launches.append(self._after(norm, self._x[:rows]))
        if (parts := self._model.per_layer) is not None:
            launches += self._embed_parts(parts, rows)
        for number, layer in enumerate(self._model.layers):
            launches += self._layer(number, plain_layer(layer), rows)
        return launches

    def _embed_parts(self, block: PerLayerEmbedding, rows: int) -> list[Launch]:
        projected, own, norm = self._projected[:rows], self._own_parts[:rows], block.norm
        placed, given, x = self._placed(rows), self._h[:rows], self._x[:rows]
        stats, tokens, scale = self._own_stats[:rows], self._tokens[:rows], block.scale
        return [
            self._kernels.embed(block.embedding, own, stats, placed, tokens, scale=scale),
            lambda: given.copy_(x),
            self._product(given, block.project, projected),
            self._kernels.join_parts(projected, own, self._parts, norm.weight, norm.eps, self._count(rows)),
        ]

    def _from_part(self, block: PerLayerInput, rows: int) -> list[Launch]:
        """What a layer adds of its part of the second embedding."""
        act, x, given = self._part[:rows], self._x[:rows], self._h[:rows]
        own = self._parts[block.layer, :rows]
        return [
            lambda: given.copy_(x),
            self._product(given, block.gate, act),
            self._kernels.activate(act, act, block.activation),
            lambda: act.mul_(own),
            *self._into_residual(act, block.out, block.norm, rows),
        ]

    def _placed(self, rows: int) -> StepRows:
        return StepRows(self._count(rows), self._row_slot[:rows], self._positions[:rows], self._chunks[0].pages)

    def _embedding(self, rows: int) -> Launch:
        model, placed = self._model, self._placed(rows)
        return self._kernels.embed(
            model.embedding,
            self._x[:rows],
            self._stats[:rows],
            placed,
            self._tokens[:rows],
            scale=model.shape.embedding_scale,
            positions=model.position_embedding,
        )

    def _count(self, rows: int) -> Tensor:
        return torch.full((1,), rows, dtype=torch.int32, device=self._model.device)

    def _layer(self, number: int, layer: Layer, rows: int) -> list[Launch]:
        launches, x, scale = self._halves(number, layer, rows), self._x[:rows], layer.out_scale
        if layer.per_layer is not None:
            launches += self._from_part(layer.per_layer, rows)
        return launches if scale is None else [*launches, lambda: x.mul_(scale)]

    def _halves(self, number: int, layer: Layer, rows: int) -> list[Launch]:
        attention, mixer, mlp = layer.attention, layer.mixer, layer.mlp
        if attention is None and mixer is None:
            return [] if mlp is None else self._mlp(number, mlp, layer.mlp_norm, layer.after_mlp, rows)
        norm, given = self._normed(layer.attention_norm, rows)
        # Attention and a mixer take in the same rows: neither adds to them before both have.
        into, attend = list[Launch](norm), list[Launch]()
        if mixer is not None:
            stages = self._stages(mixer, rows)
            into.append(self._product(given, with_factor(mixer.into, layer.mixer_in), stages.into))
            attend += self._mixer(mixer, stages, layer.after_attention, rows)
        if isinstance(attention, LatentAttention):
            into += self._into_latent(attention, given, layer.attention_in, rows)
            attend += self._latent_attention(attention, layer.after_attention, rows)
        elif attention is not None:
            qkv = with_factor(attention.qkv, layer.attention_in)
            into.append(self._product(given, qkv, self._qkv_of(attention, rows)))
            attend += self._attention(attention, layer.after_attention, rows)
        if mlp is None:
            return [*into, *attend]
        if not layer.parallel:
            return [*into, *attend, *self._mlp(number, mlp, layer.mlp_norm, layer.after_mlp, rows)]
        # The feed-forward block takes in the row before attention adds to it.
        assert isinstance(mlp, GatedMLP | PlainMLP)
        own_norm, given = ([], given) if layer.mlp_norm is None else self._normed(layer.mlp_norm, rows)
        first, last = self._into(mlp, given, *self._between(mlp, rows)), self._out_of(mlp, None, rows)
        return [*into, *own_norm, *first, *attend, *last]

    def _stages(self, mixer: Mixer, rows: int) -> MixerStages:
        assert self._mixing is not None
        states = states_of(self._memory, mixer.layer)
        return stages_of(mixer, self._mixing.first(rows), states, self._runs, self._kernels)

    def _mixer(self, mixer: Mixer, stages: MixerStages, after: Norm | None, rows: int) -> list[Launch]:
        between = [
            self._product(stage.given, stage.linear, stage.out) if isinstance(stage, ProductStage) else stage.launch
            for stage in stages.stages
        ]
        return [*between, *self._into_residual(stages.gated, mixer.out, after, rows)]

    def _qkv_of(self, attention: Attention, rows: int) -> Tensor:
        return columns(self._qkv[:rows], attention.shape.qkv_width)

    def _attention(self, attention: Attention, after: Norm | None, rows: int) -> list[Launch]:
        kernels, number, s = self._kernels, attention.kv_layer, attention.shape
        heads, kv = heads_of(self._model, attention), paged_kv_of(self._memory, number)
        qkv, attended = self._qkv_of(attention, rows), columns(self._attended[:rows], s.out_width)
        q = columns(self._q[:rows], s.n_heads * s.head_width).view(rows, s.n_heads, s.head_width)
        chunk = self._chunks[self._memory.group_of[number]]
        return [
            *(
                kernels.norm(own := qkv[:, at], own, n.weight, n.bias, n.eps)
                for at, n in rows_normed(attention).values()
            ),
            kernels.append_chunk(qkv, q, kv, chunk, heads),
            kernels.attend_chunk(q, attended, kv, chunk, heads),
            *([kernels.gate_heads(qkv, attended, heads, chunk.n)] if heads.gated else []),
            *self._into_residual(attended, attention.out, after, rows),
        ]

    def _latent_of(self, attention: LatentAttention, rows: int) -> LatentBuffers:
        assert self._latent is not None
        return self._latent.for_layer(attention.shape, rows)

    def _into_latent(self, attention: LatentAttention, given: Tensor, factor: float, rows: int) -> list[Launch]:
        """Queries and compressed rows."""
        own, norm = self._latent_of(attention, rows), attention.q_a_norm
        row = self._product(given, with_factor(attention.kv_a, factor), own.row)
        if attention.q_a is None or norm is None:
            return [self._product(given, with_factor(attention.q_b, factor), own.heads), row]
        return [
            self._product(given, with_factor(attention.q_a, factor), own.low),
            self._after(norm, own.low),
            self._product(own.low, attention.q_b, own.heads),
            row,
        ]

    def _latent_attention(self, attention: LatentAttention, after: Norm | None, rows: int) -> list[Launch]:
        own, s, latent = self._latent_of(attention, rows), attention.shape, latent_heads_of(self._model, attention)
        kv, chunk = latent_kv_of(self._memory, attention.layer), self._chunks[self._memory.group_of[attention.layer]]
        query, seen = columns(self._q[:rows], s.n_heads * s.head_width), columns(self._attended[:rows], s.out_width)
        attend = self._kernels.attend_latent_chunk(query, seen, kv, chunk, latent)
        stages = latent_stages(attention, latent, own, query, seen, kv, chunk, self._kernels, attend)
        into_residual = self._into_residual(own.expanded, attention.out, after, rows)
        return [*(stage.launch for stage in stages), *into_residual]

    def _mlp(self, number: int, mlp: MLP, before: Norm | None, after: Norm | None, rows: int) -> list[Launch]:
        norm, given = self._normed(before, rows)
        if isinstance(mlp, Experts):
            return [*norm, *self._experts(number, after, mlp, given, rows)]
        return [*norm, *self._into(mlp, given, *self._between(mlp, rows)), *self._out_of(mlp, after, rows)]

    def _between(self, mlp: GatedMLP | PlainMLP, rows: int) -> tuple[Tensor, Tensor]:
        """Where a block leaves its first product, and what the last one takes in."""
        return self._inner[:rows], columns(self._act[:rows], shape_of(mlp.down.weight)[1])

    def _out_of(self, mlp: GatedMLP | PlainMLP, after: Norm | None, rows: int) -> list[Launch]:
        return self._into_residual(self._between(mlp, rows)[1], mlp.down, after, rows)

    def _into(self, mlp: MLP, given: Tensor, inner: Tensor, act: Tensor) -> list[Launch]:
        """A feed-forward block up to its activation."""
        match mlp:
            case GatedMLP():
                inner = columns(inner, 2 * act.shape[1])
                return [self._product(given, mlp.gate_up, inner), self._kernels.gated(inner, act, mlp.activation)]
            case PlainMLP():
                inner = columns(inner, act.shape[1])
                return [self._product(given, mlp.up, inner), self._kernels.activate(inner, act, mlp.activation)]
        raise InternalError(f"a feed-forward block of kind {type(mlp).__name__} has no kernels")

    def _experts(self, number: int, after: Norm | None, mlp: Experts, h: Tensor, rows: int) -> list[Launch]:
        """Each row through its own experts, by the step's kernels, which serve rows of a prompt too."""
        kernels, x, y, routed = self._kernels, self._x[:rows], self._y[:rows], self._routed
        assert routed is not None
        shape, n_rows, scores, act = mlp.experts, self._count(rows), routed.scores[:rows], routed.act[:rows]
        chosen, shares, shared = routed.chosen[number, :rows], routed.shares[:rows], routed.shared_share[:rows]
        how: dict[str, Any] = {"shape": shape, "bias": mlp.choice_bias, "scales": mlp.share_scales}
        how["shared"] = shared if shape.shared_gate else None
        launches: list[Launch] = []
        if mlp.norms is not None:  # all take in the same rows, each by its own norm
            assert mlp.shared is not None
            launches += self._beside_experts(mlp.shared, h, routed, rows, gated=None)
            launches += [self._after(mlp.norms.after_shared, routed.shared_out[:rows])]
            launches += self._normed(mlp.norms.router, rows)[0]
        launches += [self._product(h, mlp.router, scores), kernels.route(scores, chosen, shares, n_rows, **how)]
        if mlp.norms is not None:
            launches += self._normed(mlp.norms.experts, rows)[0]
        given, sums = h, y
        if mlp.into_latent is not None:
            given, sums = routed.latent[:rows], routed.latent_sum[:rows]
            launches.append(self._product(h, mlp.into_latent, given))
        into: dict[str, Any] = {"bias": mlp.gate_up_bias, "gated": shape.gated, "activation": mlp.activation}
        out_of: dict[str, Any] = {"bias": mlp.down_bias, "epilogue": "store"}
        launches += [
            kernels.experts_gate_up(given, flat(mlp.gate_up), act, chosen, n_rows, **into),
            kernels.experts_down(act, flat(mlp.down), sums, chosen, shares, n_rows, **out_of),
        ]
        if mlp.out_of_latent is not None:
            narrow = routed.latent[:rows]  # the sums as a product takes them in
            launches += [lambda: narrow.copy_(sums), self._product(narrow, mlp.out_of_latent, y)]
        if mlp.norms is not None:
            beside = routed.shared_out[:rows]
            launches += [self._after(mlp.norms.after_experts, y), lambda: y.add_(beside)]
        elif mlp.shared is not None:
            launches += self._beside_experts(mlp.shared, h, routed, rows, gated=shape.shared_gate)
        if after is not None:
            launches.append(self._after(after, y))
        return [*launches, lambda: x.add_(y)]

    def _beside_experts(
        self, mlp: GatedMLP | PlainMLP, given: Tensor, routed: _Routed, rows: int, *, gated: bool | None
    ) -> list[Launch]:
        """The shared block, added to what the experts gave; with None for `gated`, not yet."""
        y, out, share = self._y[:rows], routed.shared_out[:rows], routed.shared_share[:rows, None]
        act = routed.shared_act[:rows]
        down = self._product(act, mlp.down, out)
        launches = [*self._into(mlp, given, routed.shared_inner[:rows], act), down]
        if gated is None:
            return launches
        return [*launches, (lambda: y.addcmul_(out, share)) if gated else (lambda: y.add_(out))]

    def _after(self, norm: Norm, y: Tensor) -> Launch:
        return self._kernels.norm(y, y, norm.weight, norm.bias, norm.eps)

    def _normed(self, norm: Norm | None, rows: int) -> tuple[list[Launch], Tensor]:
        """The launch of a norm, where there is one, and what the product behind it takes in."""
        x, h = self._x[:rows], self._h[:rows]
        if norm is None:
            return [], x
        return [self._kernels.norm(x, h, norm.weight, norm.bias, norm.eps)], h

    def _into_residual(self, given: Tensor, linear: Linear, after: Norm | None, rows: int) -> list[Launch]:
        x, y = self._x[:rows], self._y[:rows]
        launches = [self._product(given, linear, y)]
        if after is not None:
            launches.append(self._after(after, y))
        return [*launches, lambda: x.add_(y)]

    def _product(self, given: Tensor, linear: Linear, out: Tensor) -> Launch:
        def bind(weight: Weight, out: Tensor) -> Launch:
            return self._kernels.gemm(given, weight, out, bias=linear.bias, scale=linear.scale)

        return self._scratch.product(linear.weight, out, bind)


@dataclass(frozen=True, slots=True)
class _Brought:
    """What a chunk brings, as pieces of one memory, int32."""

    n: Tensor
    n_tiles: Tensor
    n_runs: Tensor
    runs: Tensor  # [slots, 4]: of recurrent layers, as `ChunkRuns` has them
    tiles: Tensor  # [rows, 4]
    tokens: Tensor  # [rows], as the next three
    positions: Tensor
    parts: Tensor
    rope_set: Tensor
    pages: Tensor  # [parts, groups, max_pages], at most as many parts as rows

    @staticmethod
    def over(memory: Tensor, rows: int, n_slots: int, n_groups: int, max_pages: int) -> _Brought:
        n, n_tiles, n_runs, _, runs, tiles, tokens, positions, parts, rope_set, pages = memory.split(
            [1, 1, 1, 1, 4 * n_slots, 4 * rows, rows, rows, rows, rows, rows * n_groups * max_pages]
        )
        tables = pages.view(rows, n_groups, max_pages)
        of_runs = n_runs, runs.view(n_slots, 4)
        return _Brought(n, n_tiles, *of_runs, tiles.view(rows, 4), tokens, positions, parts, rope_set, tables)

    def fill(self, parts: Sequence[ChunkPart], counts: Sequence[int], *, recurs: bool) -> int:
        """Write a chunk's rows; returns how many numbers of the memory are to be copied."""
        placed = chunk_tables([part.start for part in parts], counts)
        n, n_tiles = sum(counts), len(placed.tiles)
        self.n.fill_(n)
        self.n_tiles.fill_(n_tiles)
        self.tiles.numpy()[:n_tiles] = placed.tiles
        if recurs:
            firsts = accumulate(counts[:-1], initial=0)
            runs = [
                (first, n, part.slot, part.start == 0) for first, n, part in zip(firsts, counts, parts, strict=True)
            ]
            if any(part.slot is None for part in parts):
                raise InternalError("a model that recurs has no state for a sequence without a slot")
            self.runs.numpy()[: len(runs)] = runs
            self.n_runs.fill_(len(runs))
        self.tokens.numpy()[:n] = [token for part in parts for token in part.tokens]
        self.positions.numpy()[:n] = placed.positions
        # Padding rows have the last position: any valid one will do, since their results are not read.
        self.positions.numpy()[n:] = placed.positions[-1]
        self.parts.numpy()[:n] = placed.parts
        self.rope_set.numpy()[:n] = [part.rope_set for part in parts for _ in part.tokens]
        for number, part in enumerate(parts):
            for group, table in enumerate(part.page_tables):
                self.pages.numpy()[number, group, : len(table)] = table
        return self.pages[: len(parts)].numel() + int(self.pages.storage_offset())


@dataclass(frozen=True, slots=True)
class _Routed:
    """What routed experts need between their launches."""

    scores: Tensor
    chosen: Tensor  # [n_layers, rows, n_used]: of every layer, to be seen after a chunk
    shares: Tensor
    act: Tensor
    latent: Tensor
    latent_sum: Tensor
    shared_inner: Tensor
    shared_act: Tensor
    shared_out: Tensor
    shared_share: Tensor  # [rows]

    @staticmethod
    def of(shape: Shape, rows: int, device: torch.device, wide: torch.dtype) -> _Routed | None:
        """`wide`: what products take in."""
        experts = shape.experts
        if experts is None:
            return None

        def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros(size, dtype, device)

        used, shared, latent = experts.n_used, experts.shared_width, experts.latent_width or 0
        return _Routed(
            scores=made(rows, experts.n_scores),
            chosen=made(shape.n_layers, rows, used, dtype=torch.int32),
            shares=made(rows, used),
            act=made(rows, used, experts.ff_width),
            latent=made(rows, latent, dtype=wide),
            latent_sum=made(rows, latent),
            shared_inner=made(rows, 2 * shared, dtype=wide),
            shared_act=made(rows, shared, dtype=wide),
            shared_out=made(rows, shape.hidden if shared else 0),
            shared_share=made(rows),
        )
