"""The step of attention models as fused kernels: five nodes a layer for a llama, each bound to its buffers here.

    product   norm, q k v, bias          attend   QK norm, rotary, append, attention over pages
    product   output, residual           product  norm, gate and up, activation          product  down, residual

A norm needs no node: the node that writes the residual stream also writes partial sums of it (`stats`). Families with a
norm after a block have one node more for it, experts two, latent attention five (`latent.py`). `kernels` are Triton's
on a GPU; with the twins the same plan runs anywhere, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.cuda.latent import LatentBuffers, latent_heads_of, latent_kv_of, latent_stages
from ostinato.backends.cuda.launch import Launches
from ostinato.backends.cuda.mixers import (
    MixerBuffers,
    MixerStages,
    ProductStage,
    columns,
    stages_of,
    states_of,
    with_factor,
)
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.kernels import Kernels
from ostinato.backends.torch.kv_store import ValuesInKeys
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows
from ostinato.backends.torch.ops.matmul import InputNorm, PreparedInput, n_stats
from ostinato.backends.torch.ops.runs import StepRuns
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import memory_tensors, tensors_of
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack, shape_of
from ostinato.errors import InternalError
from ostinato.loop.layout import SampledRows, Tables
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import (
    AnyLayer,
    Attention,
    ExpertNorms,
    Experts,
    GatedMLP,
    LatentAttention,
    Layer,
    Linear,
    Mixer,
    Norm,
    PerLayerEmbedding,
    PlainMLP,
)
from ostinato.models.shape import ExpertShape, Shape


@dataclass(frozen=True, slots=True)
class Fusions:
    """What is done in one node that could be done in two; all on, except to measure what each is worth (E-81).

    `gated`: gate, up and activation in one product (of dense weights; packed ones always). `ahead`: the node that
    writes the residual stream multiplies it by the weight of the next norm, instead of every product after it.
    """

    gated: bool = True
    ahead: bool = True


ALL_FUSIONS: Final = Fusions()


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The buffers between nodes, by row."""

    x: Tensor
    stats: Tensor
    h: Tensor  # x times the weight of the norm that comes next, as the next product takes it in
    qkv: Tensor
    attended: Tensor
    act: Tensor
    y: Tensor
    y_stats: Tensor
    scores: Tensor
    experts: Tensor  # [n_layers, n_slots or more, n_used]: of every layer, to be seen after a step
    shares: Tensor
    expert_act: Tensor
    shared_act: Tensor
    shared_share: Tensor  # [n_slots]: how much a row takes of a shared block that has a gate
    latent: Tensor
    latent_out: Tensor
    beside: Tensor  # what experts and the dense block beside them give, each normed
    beside_stats: Tensor
    parts: Tensor  # [n_layers, n_slots, width] of a second embedding: every layer changes its own when it takes it
    projected: Tensor  # [n_slots, n_layers * width]: what of it is a product of the first one; own_parts: what is not
    own_parts: Tensor
    own_stats: Tensor
    logits: Tensor

    @staticmethod
    def of(s: Shape, n_slots: int, device: torch.device) -> StepBuffers:
        def rows(*width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros((n_slots, *width), dtype, device)

        experts = s.experts or ExpertShape(1, 1, 1, renormalise=False)
        parts_width = max(1, s.n_layers * s.per_layer_width)
        return StepBuffers(
            x=rows(s.hidden),
            stats=rows(n_stats(s.hidden), 2),
            h=rows(s.hidden, dtype=torch.bfloat16),
            qkv=rows(max(1, s.widest(lambda a: a.qkv_width))),
            attended=rows(max(1, s.widest(lambda a: a.out_width))),
            act=rows(max(1, s.widest_ff)),
            y=rows(s.hidden),
            y_stats=rows(n_stats(s.hidden), 2),
            scores=rows(experts.n_scores),
            # Rows to whole words of 16 bytes: every layer's begin as a kernel was compiled for.
            experts=zeros((s.n_layers if s.experts else 1, -(-n_slots // 4) * 4, experts.n_used), torch.int32, device),
            shares=rows(experts.n_used),
            expert_act=rows(experts.n_used, experts.ff_width),
            shared_act=rows(experts.shared_width or 1),
            shared_share=rows(),
            latent=rows(experts.latent_width or 1),
            latent_out=rows(experts.latent_width or 1),
            beside=rows(s.hidden if experts.share_scales else 1),
            beside_stats=rows(n_stats(s.hidden) if experts.share_scales else 1, 2),
            parts=zeros((s.n_layers, n_slots, s.per_layer_width or 1), torch.float32, device),
            projected=rows(parts_width),
            own_parts=rows(parts_width),
            own_stats=rows(n_stats(parts_width), 2),
            logits=rows(s.vocab),
        )

    @property
    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in StepBuffers.__dataclass_fields__}


class FusedPlan:
    """Collects the nodes of one model's step. `n_tokens`: what the tokenizer knows, ids beyond it are never chosen."""

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        tables: Tables,
        n_tokens: int,
        kernels: Kernels,
        fusions: Fusions = ALL_FUSIONS,
    ) -> None:
        self._fusions = fusions
        self._model, self._memory, self._kernels = model, memory, kernels
        self._kept = dict(memory_tensors(memory))
        self._table, self._tables, self._n_tokens = tables.table, tables, n_tokens
        self._n_slots = tables.layout.n_slots
        self.step = StepBuffers.of(model.shape, self._n_slots, model.device)
        self._n_rows = self._table["n_rows"]
        self._rows = StepRows.of(self._table)
        self._buffers: dict[str, Tensor] = {
            "table": tables.table.memory,
            "admissions": tables.admissions.memory,
            "rings": tables.rings.memory,
            **self.step.named,
        }
        self._nodes: list[Node] = []
        self._mixing: MixerBuffers | None = None
        if model.shape.recurrent:
            shapes = model.shape.recurrent.values()
            self._mixing = MixerBuffers.of(shapes, self._n_slots, torch.float32, model.device)
            self._buffers |= self._mixing.named
        self._latent = LatentBuffers.of(model.shape, self._n_slots, torch.float32, model.device)
        if self._latent is not None:
            self._buffers |= self._latent.named
        attending = [layer.attention for layer in map(plain_layer, model.layers)]
        self._heads = {own.layer: heads_of(model, own) for own in attending if isinstance(own, Attention)}
        self._latents = {
            own.layer: latent_heads_of(model, own) for own in attending if isinstance(own, LatentAttention)
        }
        heads, latents = [*self._heads.values()], [*self._latents.values()]
        self._workspace = kernels.attend_workspace(self._n_slots, heads, model.device) if heads else None
        self._latent_workspace = kernels.latent_workspace(self._n_slots, latents, model.device) if latents else None
        self._sample_workspace = kernels.sample_workspace(self._n_slots, model.shape.vocab, model.device)
        self._experts_workspace = None
        if (experts := model.shape.experts) is not None:
            sizes = self._n_slots, experts.n_used, experts.ff_width, experts.latent_width or model.shape.hidden
            self._experts_workspace = kernels.experts_workspace(*sizes, model.device)
        workspaces = {
            **{"attend": self._workspace, "latent": self._latent_workspace},
            **{"sample": self._sample_workspace, "experts": self._experts_workspace},
        }
        for owner, made in workspaces.items():
            for number, (_, tensor) in enumerate(tensors_of(made, "")):
                self._buffers[f"{owner}.workspace.{number}"] = tensor

    def plan(self) -> Plan:
        """All nodes of the step, in order, and the memory that they use."""
        self.nodes()
        named = [Buffer.of(name, tensor) for name, tensor in self._buffers.items()]
        # What nodes use without having listed it: norms, frequencies, and what launches keep for themselves.
        bound = tensors_of([node.run for node in self._nodes], "launch")
        rest = [Buffer.of(name, tensor, is_weight=True) for name, tensor in tensors_of(self._model, "model")]
        rest += [Buffer.of(name, tensor) for name, tensor in bound]
        known = {buffer.address for buffer in named}
        buffers = (*named, *(buffer for buffer in without_repeats(rest) if buffer.address not in known))
        constants = f"{self._model.shape}, {self._n_tokens} tokens, fused"
        return Plan(str(self._model.device), buffers, tuple(self._nodes), self._memory.page_tokens, constants)

    def nodes(self) -> Sequence[Node]:
        """All nodes of the step, in order, bound once. Of a model without memory, what a node reads and writes has no
        name that means anything; its launches are those of the same model with memory."""
        if not self._nodes:
            self._embed()
            for number, layer in enumerate(self._model.layers):
                self._layer(number, plain_layer(layer))
            self._head()
            self._sample()
        return self._nodes

    # Nodes

    def _add(
        self,
        name: str,
        kind: str,
        run: Callable[[], object],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        weights: Mapping[str, Any] | None = None,
        share: float = 1.0,
    ) -> None:
        """`share`: of the weights that a row uses; less than all of routed experts."""
        n_bytes = 0
        names = []
        for label, weight in (weights or {}).items():
            for number, (_, tensor) in enumerate(tensors_of(weight, "")):
                self._buffers.setdefault(f"{label}.{number}", tensor)
                names.append(f"{label}.{number}")
                n_bytes += tensor.nbytes
        n_launches = len(run.parts) if isinstance(run, Launches) else 1
        routed = n_bytes if share < 1 else 0
        read = (*reads, "table", *names)
        self._nodes.append(Node(name, kind, run, read, writes, n_bytes, n_launches, routed, share))

    def _scratch(self, owner: str) -> tuple[str, ...]:
        """The buffers of a workspace by name."""
        return tuple(name for name in self._buffers if name.startswith(f"{owner}.workspace"))

    def _embed(self) -> None:
        model = self._model
        norm, following = model.embedding_norm, self._next_norm(-1)
        out, stats, prepared = self._residual_or_y(norm, following)
        run = self._kernels.embed(
            model.embedding,
            out,
            stats,
            self._rows,
            self._table["token"],
            scale=model.shape.embedding_scale,
            positions=model.position_embedding,
            prepared=prepared,
        )
        # A row of the embedding is read, not all of it.
        self._add("embed", "embed", run, (), ("x", *self._beside_x) if norm is None else ("y", "y_stats"))
        if norm is not None:
            self._add_norm("embed", norm, following, fresh=True)
        if model.per_layer is not None:
            self._embed_parts(model.per_layer)

    def _embed_parts(self, block: PerLayerEmbedding) -> None:
        s, rows = self.step, self._rows
        token, scale = self._table["token"], block.scale
        run = self._kernels.embed(block.embedding, s.own_parts, s.own_stats, rows, token, scale=scale)
        self._add("embed.parts", "embed", run, (), ("own_parts", "own_stats"))
        self._product("embed.project", "embed", s.x, block.project, s.projected)
        norm, reads = block.norm, ("projected", "own_parts")
        run = self._kernels.join_parts(s.projected, s.own_parts, s.parts, norm.weight, norm.eps, self._n_rows)
        self._add("embed.join", "norm", run, reads, ("parts",), {"embed.join": norm.weight})

    def _layer(self, number: int, layer: Layer) -> None:
        """A layer's own input and factor come in the end, with the norm that its last block has then."""
        part, following = layer.per_layer, self._next_norm(number)
        self._halves(number, layer, following if part is None else None, layer.out_scale if part is None else None)
        if part is None:
            return
        s, at = self.step, f"layer.{number}.part"
        own = s.parts[number]
        gated: dict[str, Any] = {"epilogue": "act_multiply", "activation": part.activation}
        self._product(f"{at}.gate", "gate_up", s.x, part.gate, own, **gated)
        self._product(f"{at}.out", "down", own, part.out, s.y, stats=s.y_stats)
        self._add_norm(at, part.norm, following, scale=layer.out_scale)

    def _halves(self, number: int, layer: Layer, following: Norm | None, scale: Tensor | None) -> None:
        attention, mixer, mlp = layer.attention, layer.mixer, layer.mlp
        at = f"layer.{number}"
        if attention is None and mixer is None:
            self._mlp(number, layer, following, scale)
            return
        given, norm = self._normed(layer.attention_norm)
        then = following if mlp is None else layer.mlp_norm
        # Attention and a mixer take in the same rows: neither adds to them before both have.
        stages = None if mixer is None else self._stages(mixer)
        if mixer is not None and stages is not None:
            into = with_factor(mixer.into, layer.mixer_in)
            self._product(f"{at}.mixer.in", "mixer", given, into, stages.into, norm=norm)
        if isinstance(attention, LatentAttention):
            assert not layer.parallel
            expanded = self._attend_latent(at, attention, given, norm, layer.attention_in)
            self._into_residual(f"{at}.out", "out", expanded, attention.out, layer.after_attention, then)
        elif attention is not None:
            qkv = columns(self.step.qkv, attention.shape.qkv_width)
            attended = columns(self.step.attended, attention.shape.out_width)
            into_qkv = with_factor(attention.qkv, layer.attention_in)
            self._product(f"{at}.qkv", "qkv", given, into_qkv, qkv, norm=norm)
            if layer.parallel:
                # Before attention adds to the row that both take in. A norm of its own finds no row weighted ahead for
                # it.
                assert isinstance(mlp, GatedMLP | PlainMLP)
                own, act = layer.mlp_norm, self._act_of(mlp)
                self._inner(at, mlp, *((given, norm) if own is None else (self.step.x, self._whole_norm(own))), act)
                self._attend(f"{at}.attend", attention, qkv, attended)
                self._into_residual(f"{at}.out", "out", attended, attention.out, None, None)
                self._into_residual(f"{at}.down", "down", act, mlp.down, None, following)
                return
            self._attend(f"{at}.attend", attention, qkv, attended)
            self._into_residual(f"{at}.out", "out", attended, attention.out, layer.after_attention, then)
        if mixer is not None and stages is not None:
            self._mix(f"{at}.mixer", mixer, stages, layer.after_attention, then)
        self._mlp(number, layer, following, scale)

    def _stages(self, mixer: Mixer) -> MixerStages:
        assert self._mixing is not None
        table, states = self._table, states_of(self._memory, mixer.layer)
        runs = StepRuns(self._n_rows, table["row_slot"], table["position"])
        return stages_of(mixer, self._mixing, states, runs, self._kernels)

    def _mix(self, at: str, mixer: Mixer, stages: MixerStages, after: Norm | None, following: Norm | None) -> None:
        names = {name: kept for name, kept in self._kept.items() if name.startswith(f"memory.{mixer.layer}.state")}
        self._buffers |= names
        for stage in stages.stages:
            name = f"{at}.{stage.name}"
            if isinstance(stage, ProductStage):
                self._product(name, "mixer", stage.given, stage.linear, stage.out)
                continue
            reads, writes = (tuple(map(self._name_of, tensors)) for tensors in (stage.reads, stage.writes))
            if stage.states:
                reads, writes = (*reads, *names), (*writes, *names)
            self._add(name, "mixer", stage.launch, reads, writes, {name: stage.weights})
        self._into_residual(f"{at}.out", "mixer", stages.gated, mixer.out, after, following)

    def _attend(self, name: str, attention: Attention, qkv: Tensor, attended: Tensor) -> None:
        number, heads = attention.kv_layer, self._heads[attention.layer]
        names = {name: kept for name, kept in self._kept.items() if name.startswith(f"memory.{number}.")}
        self._buffers |= names
        for part, (place, norm) in rows_normed(attention).items():
            own = qkv[:, place]
            run = self._kernels.norm(own, own, norm.weight, norm.bias, norm.eps, self._n_rows)
            self._add(f"{name}.{part}_norm", "norm", run, ("qkv",), ("qkv",), {f"{name}.{part}_norm": norm.weight})
        kv = paged_kv_of(self._memory, number)
        rows = StepRows.of(self._table, self._memory.group_of[number])
        run = self._kernels.attend(qkv, attended, kv, rows, heads, self._workspace)
        scratch = self._scratch("attend")
        self._add(name, "attend", run, ("qkv", *names, *scratch), ("attended", *names, *scratch))
        if attention.shape.gated:
            opened = self._kernels.gate_heads(qkv, attended, heads, self._n_rows)
            self._add(f"{name}.gate", "attend", opened, ("qkv", "attended"), ("attended",))

    def _attend_latent(
        self, at: str, attention: LatentAttention, given: Tensor, norm: InputNorm | None, factor: float
    ) -> Tensor:
        """Latent attention up to what its last product takes in. The norm of compressed queries needs no node: their
        product leaves partial sums of them."""
        assert self._latent is not None
        own, s, latent = self._latent.for_layer(attention.shape), attention.shape, self._latents[attention.layer]
        into_query, q_norm = with_factor(attention.q_b, factor) if attention.q_a is None else attention.q_b, norm
        inside = given
        if attention.q_a is not None and attention.q_a_norm is not None:
            low = with_factor(attention.q_a, factor)
            self._product(f"{at}.q_a", "qkv", given, low, own.low, norm=norm, stats=own.low_stats)
            inside, q_norm = own.low, InputNorm(own.low_stats, attention.q_a_norm.weight, None, attention.q_a_norm.eps)
        self._product(f"{at}.q_b", "qkv", inside, into_query, own.heads, norm=q_norm)
        self._product(f"{at}.kv_a", "qkv", given, with_factor(attention.kv_a, factor), own.row, norm=norm)
        query = columns(self.step.qkv, s.n_heads * s.head_width)
        seen = columns(self.step.attended, s.out_width)
        names = {name: kept for name, kept in self._kept.items() if name.startswith(f"memory.{attention.layer}.")}
        self._buffers |= names
        kv = latent_kv_of(self._memory, attention.layer)
        rows = StepRows.of(self._table, self._memory.group_of[attention.layer])
        attend = self._kernels.attend_latent(query, seen, kv, rows, latent, self._latent_workspace)
        scratch = self._scratch("latent")
        for stage in latent_stages(attention, latent, own, query, seen, kv, rows, self._kernels, attend):
            reads, writes = (tuple(map(self._name_of, tensors)) for tensors in (stage.reads, stage.writes))
            kept = (*names, *scratch) if stage.states else ()
            name = f"{at}.{stage.name}"
            weights = {name: stage.weights} if stage.weights is not None else None
            self._add(name, "attend", stage.launch, (*reads, *kept), (*writes, *kept), weights)
        return own.expanded

    def _mlp(self, number: int, layer: Layer, following: Norm | None, scale: Tensor | None) -> None:
        mlp, at = layer.mlp, f"layer.{number}"
        if mlp is None:
            return
        given, norm = self._normed(layer.mlp_norm)
        if isinstance(mlp, Experts):
            self._experts(number, layer, mlp, given, norm, following, scale)
            return
        act = self._act_of(mlp)
        self._inner(at, mlp, given, norm, act)
        self._into_residual(f"{at}.down", "down", act, mlp.down, layer.after_mlp, following, scale)

    def _act_of(self, mlp: GatedMLP | PlainMLP) -> Tensor:
        return columns(self.step.act, shape_of(mlp.down.weight)[1])

    def _inner(self, at: str, mlp: GatedMLP | PlainMLP, given: Tensor, norm: InputNorm | None, out: Tensor) -> None:
        """A feed-forward block up to its activation."""
        if isinstance(mlp, GatedMLP):
            self._gated(f"{at}.gate_up", mlp, given, norm, out)
            return
        act = {"epilogue": "act", "activation": mlp.activation}
        self._product(f"{at}.up", "gate_up", given, mlp.up, out, norm=norm, **act)

    def _gated(self, name: str, mlp: GatedMLP, given: Tensor, norm: InputNorm | None, out: Tensor) -> None:
        parts, activation = _apart(mlp.gate_up, halved=not self._fusions.gated), mlp.activation
        if len(parts) == 1:
            gated = {"epilogue": "gated", "activation": activation}
            self._product(name, "gate_up", given, mlp.gate_up, out, norm=norm, **gated)
            return
        # Gate and up of different types: one after the other, the second multiplied into the first.
        gate, up = parts
        into: dict[str, Any] = {"norm": norm, "activation": activation}
        self._product(f"{name}.gate", "gate_up", given, gate, out, epilogue="act", **into)
        self._product(f"{name}.up", "gate_up", given, up, out, epilogue="multiply", **into)

    def _experts(
        self,
        number: int,
        layer: Layer,
        mlp: Experts,
        given: Tensor,
        norm: InputNorm | None,
        following: Norm | None,
        scale: Tensor | None,
    ) -> None:
        """What reads the residual stream comes before what adds to it: the shared block, then the sum of experts."""
        s, kernels, at, shape = self.step, self._kernels, f"layer.{number}", mlp.experts
        chosen, shared_share = s.experts[number], s.shared_share if shape.shared_gate else None
        to_router = to_experts = given, norm
        if mlp.norms is not None:
            to_router, to_experts = ((s.x, self._whole_norm(n)) for n in (mlp.norms.router, mlp.norms.experts))
        self._product(f"{at}.router", "route", to_router[0], mlp.router, s.scores, norm=to_router[1])
        how: dict[str, Any] = {"shape": shape, "bias": mlp.choice_bias, "shared": shared_share}
        how["scales"] = mlp.share_scales
        run = kernels.route(s.scores, chosen, s.shares, self._n_rows, **how)
        self._add(f"{at}.route", "route", run, ("scores",), ("experts", "shares", "shared_share"))
        if mlp.shared is not None:
            self._inner(f"{at}.shared", mlp.shared, given, norm, s.shared_act)
        given, norm = to_experts
        if mlp.into_latent is not None:
            self._product(f"{at}.into_latent", "gate_up", given, mlp.into_latent, s.latent, norm=norm)
            given, norm = s.latent, None
        gate_up, share = flat(mlp.gate_up), shape.n_used / shape.n_experts
        into: dict[str, Any] = {"norm": norm, "bias": mlp.gate_up_bias, "gated": shape.gated}
        into |= {"activation": mlp.activation, "workspace": self._experts_workspace}
        run = kernels.experts_gate_up(given, gate_up, s.expert_act, chosen, self._n_rows, **into)
        scratch = self._scratch("experts")
        reads = (self._name_of(given), *(() if norm is None else ("stats",)), "experts", *scratch)
        writes = ("expert_act", *scratch)
        self._add(f"{at}.gate_up", "gate_up", run, reads, writes, {f"{at}.gate_up": gate_up}, share)
        if mlp.shared is not None:
            self._shared_down(f"{at}.shared.down", mlp.shared, layer.after_mlp, shared_share, mlp.norms)
        self._experts_down(number, layer, mlp, share, following, scale)

    def _shared_down(
        self, name: str, mlp: GatedMLP | PlainMLP, after: Norm | None, share: Tensor | None, norms: ExpertNorms | None
    ) -> None:
        """The first part of what experts give; no stats yet."""
        s = self.step
        if norms is not None:
            self._product(name, "down", s.shared_act, mlp.down, s.y, stats=s.y_stats)
            self._beside(name, norms.after_shared, fresh=True)
            return
        out, epilogue = (s.x, "add") if after is None else (s.y, "store")
        self._product(name, "down", s.shared_act, mlp.down, out, epilogue=epilogue, share=share)

    def _beside(self, name: str, norm: Norm, *, fresh: bool) -> None:
        """What one side of experts and a dense block gives, normed, to what the other one does."""
        s = self.step
        into = s.beside, s.y, s.y_stats, norm.weight, norm.eps, s.beside_stats, self._rows
        run = self._kernels.add_norm(*into, fresh=fresh)
        reads, writes = ("beside", "y", "y_stats"), ("beside", "beside_stats")
        self._add(f"{name}.norm", "norm", run, reads, writes, {f"{name}.norm": norm.weight})

    def _experts_down(
        self, number: int, layer: Layer, mlp: Experts, share: float, following: Norm | None, scale: Tensor | None
    ) -> None:
        s, at, after = self.step, f"layer.{number}", layer.after_mlp
        adds = after is None or (mlp.shared is not None and mlp.norms is None)
        out, stats, prepared = self._residual_or_y(after, following)
        left: dict[str, Any] = {"epilogue": "add" if adds else "store", "stats": stats, "prepared": prepared}
        writes, scratch = self._name_of(out), self._scratch("experts")
        reads = ("expert_act", "experts", "shares", *scratch)
        beside = (*self._beside_x, writes, "y_stats", *scratch)
        given, chosen = (s.expert_act, flat(mlp.down)), (s.experts[number], s.shares, self._n_rows)
        down = partial(self._kernels.experts_down, bias=mlp.down_bias, workspace=self._experts_workspace)
        if mlp.out_of_latent is None:
            run = down(*given, out, *chosen, **left)
            self._add(f"{at}.down", "down", run, (*reads, writes), beside, {f"{at}.down": given[1]}, share)
        else:
            run = down(*given, s.latent_out, *chosen, epilogue="store")
            self._add(f"{at}.down", "down", run, reads, ("latent_out", *scratch), {f"{at}.down": given[1]}, share)
            self._product(f"{at}.out_of_latent", "down", s.latent_out, mlp.out_of_latent, out, **left)
        if mlp.norms is not None:
            assert after is not None
            self._beside(f"{at}.experts", mlp.norms.after_experts, fresh=False)
            self._add_norm(f"{at}.down", after, following, scale=scale, of=(s.beside, s.beside_stats))
        elif after is not None:
            self._add_norm(f"{at}.down", after, following, scale=scale)

    def _into_residual(
        self,
        name: str,
        kind: str,
        given: Tensor,
        linear: Linear,
        after: Norm | None,
        following: Norm | None,
        scale: Tensor | None = None,
    ) -> None:
        """Add to the residual stream, and leave what the norm that follows needs of it."""
        assert scale is None or after is not None, "a layer with a factor ends with a norm"
        out, stats, prepared = self._residual_or_y(after, following)
        left: dict[str, Any] = {"epilogue": "add" if after is None else "store", "stats": stats, "prepared": prepared}
        self._product(name, kind, given, linear, out, **left)
        if after is not None:
            self._add_norm(name, after, following, scale=scale)

    def _residual_or_y(self, after: Norm | None, following: Norm | None) -> tuple[Tensor, Tensor, PreparedInput | None]:
        """Where the last product of a block writes, and what it leaves beside: the residual stream, or `y` where a norm
        comes between."""
        s = self.step
        return (s.x, s.stats, self._prepared(following)) if after is None else (s.y, s.y_stats, None)

    def _add_norm(
        self,
        name: str,
        after: Norm,
        following: Norm | None,
        *,
        fresh: bool = False,
        scale: Tensor | None = None,
        of: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`of`: what is normed, and its partial sums; y unless given."""
        s, prepared = self.step, self._prepared(following)
        y, y_stats = of or (s.y, s.y_stats)
        how: dict[str, Any] = {"prepared": prepared, "fresh": fresh, "scale": scale}
        run = self._kernels.add_norm(s.x, y, y_stats, after.weight, after.eps, s.stats, self._rows, **how)
        reads, writes = ("x", self._name_of(y), self._name_of(y_stats)), ("x", *self._beside_x)
        self._add(f"{name}.norm", "norm", run, reads, writes, {f"{name}.norm": after.weight})

    def _head(self) -> None:
        model, s = self._model, self.step
        assert model.head is not None
        assert model.norm is not None
        (given, norm), cap = self._normed(model.norm), model.shape.logit_softcap
        self._product("head", "head", given, model.head, s.logits, norm=norm, softcap=cap)

    def _sample(self) -> None:
        if self._tables.grammars is not None:
            self._buffers["grammars"] = as_tensor(self._tables.grammars.plain_words)
            used = ("table", "grammars")
            self._add("masks", "masks", self._kernels.masks(self._tables), used, used)
        given = self.step.logits, self._table, self._sample_workspace, SampledRows.of(self._table)
        launches = self._kernels.sample(*given, n_tokens=self._n_tokens)
        scratch = self._scratch("sample")
        for name, run in launches:
            self._add(f"sample.{name}", "sample", run, ("logits", *scratch), ("table", *scratch))

    def _product(
        self,
        name: str,
        kind: str,
        given: Tensor,
        linear: Linear,
        out: Tensor,
        *,
        norm: InputNorm | None = None,
        **more: Any,
    ) -> None:
        """One launch for each weight type in the stack: its rows of the output, one part after the other."""
        reads = [self._name_of(given), *([] if norm is None else [self._name_of(norm.stats)])]
        target = self._name_of(out)
        writes = [target, *(self._name_of(t) for key, t in more.items() if key == "stats")]
        if more.get("prepared") is not None:
            writes.append("h")
        if more.get("epilogue") in ("add", "multiply", "act_multiply"):
            reads.append(target)
        run = self._kernels.matmul(
            given, linear.weight, out, self._n_rows, norm=norm, bias=linear.bias, scale=linear.scale, **more
        )
        self._add(name, kind, run, tuple(reads), tuple(writes), {name: linear})

    def _name_of(self, buffer: Tensor) -> str:
        """Of a buffer, or of a part of one."""
        at = buffer.data_ptr()
        return next(
            name
            for name, tensor in self._buffers.items()
            if tensor.data_ptr() <= at < tensor.data_ptr() + max(1, tensor.nbytes)
        )

    # Norms: of partial sums, and where products are bfloat16 of an input that its writer has weighted already

    def _next_norm(self, number: int) -> Norm | None:
        """The norm that comes after this layer, or after the embedding (-1)."""
        model = self._model
        for layer in model.layers[number + 1 :]:
            if layer.attention is not None or layer.mixer is not None:
                return layer.attention_norm
            if layer.mlp is not None:
                return layer.mlp_norm
        return model.norm

    def _prepared(self, norm: Norm | None) -> PreparedInput | None:
        return PreparedInput(self.step.h, norm.weight) if norm is not None and self._weights_ahead(norm) else None

    def _normed(self, norm: Norm | None) -> tuple[Tensor, InputNorm | None]:
        """What a product behind this norm takes in, and what is left of the norm for it to do."""
        s = self.step
        if norm is None:
            return s.x, None
        if self._weights_ahead(norm):
            return s.h, InputNorm(s.stats, None, None, norm.eps)
        return s.x, self._whole_norm(norm)

    def _whole_norm(self, norm: Norm) -> InputNorm:
        return InputNorm(self.step.stats, norm.weight, norm.bias, norm.eps)

    def _weights_ahead(self, norm: Norm) -> bool:
        return self._fusions.ahead and norm.bias is None and self._model.dtype == torch.bfloat16

    @property
    def _beside_x(self) -> tuple[str, ...]:
        return ("stats", "h") if self._model.dtype == torch.bfloat16 else ("stats",)


def plain_layer(layer: AnyLayer) -> Layer:
    """A layer as the fused kernels take it: norms before its halves."""
    if not isinstance(layer, Layer):
        raise InternalError(f"a GPU's kernels were given a layer of kind {type(layer).__name__} that they do not know")
    return layer


def heads_of(model: Model, attention: Attention) -> Heads:
    """How a layer attends."""
    s, rope, q_norm, k_norm = attention.shape, attention.shape.rope, attention.q_norm, attention.k_norm
    if rows_normed(attention):  # before the heads are apart
        q_norm, k_norm = None, None
    return Heads(
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads,
        head_width=s.head_width,
        scale=s.query_scale,
        softcap=s.softcap,
        window=s.window,
        frequencies=None if rope is None else model.frequencies[rope],
        amplitude=1.0 if rope is None else rope.amplitude,
        pairing="halves" if rope is None else rope.pairing,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        norm_eps=model.shape.norm_eps if q_norm is None else q_norm.eps,
        gated=s.gated,
        one_gate=s.one_gate,
        gate_activation=s.gate_activation,
        gates_apart=s.gates_apart,
        norm_last=s.qk_norm == "after_rope",
        temperature=None if s.temperature is None else (s.temperature.scale, s.temperature.span),
        sinks=attention.sinks,
        value_norm=s.value_norm,
        reads_kv=s.kv_from is not None,
    )


def rows_normed(attention: Attention) -> dict[str, tuple[slice, Norm]]:
    """The columns of q, k and v side by side that are normed as one, by whose they are; none where heads are."""
    shape = attention.shape
    if shape.qk_norm != "rows" or attention.q_norm is None or attention.k_norm is None:
        return {}
    n_queries, n_keys, _ = shape.qkv_widths
    return {
        "q": (slice(n_queries), attention.q_norm),
        "k": (slice(n_queries, n_queries + n_keys), attention.k_norm),
    }


def paged_kv_of(memory: PagedMemory, number: int) -> PagedKV:
    """Keys and values of a layer, as kernels take them."""
    assert memory.kv is not None
    keys, values = memory.kv.keys[number], memory.kv.values[number]
    assert not isinstance(values, ValuesInKeys)
    scales = (None if half.scales is None else half.scales[0] for half in (keys, values))
    return PagedKV(keys.values[0], values.values[0], memory.page_tokens, *scales)


def _apart(linear: Linear, *, halved: bool) -> list[Linear]:
    """A product for each part of a stack, with its share of bias and scale; with `halved`, of a dense one too."""
    weight = linear.weight
    parts = weight.parts if isinstance(weight, Stack) else (weight,)
    if halved and len(parts) == 1 and isinstance(weight, Tensor):
        parts = weight.chunk(2)
    if len(parts) == 1:
        return [linear]
    made, at = [], 0
    for part in parts:
        mine = slice(at, at + shape_of(part)[0])
        bias = None if linear.bias is None else linear.bias[mine]
        scale = linear.scale[mine] if isinstance(linear.scale, Tensor) else linear.scale
        made.append(Linear(part, bias, scale))
        at = mine.stop
    return made


def flat(weight: Weight | tuple[Weight, ...]) -> Weight:
    """Experts' matrices [experts, rows, cols] on top of each other; packed ones stand so already."""
    if isinstance(weight, tuple):
        raise InternalError("a GPU's kernels were given one matrix for each expert, as the CPU has them")
    return weight.flatten(0, 1) if isinstance(weight, Tensor) else weight
