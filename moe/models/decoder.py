"""The decoder that all families share: norm, attention, norm, experts, with residuals.

Its own file because it is the whole model: parameters are declared (`declare_params`), loaded elsewhere, and used
here. It never touches streams, turns or ranks; a ubatch yields inside `MoELayer`, through `Work` alone, and the same
code runs with one ubatch or several.

Shapes: T tokens with padding, H hidden, Q num_heads, K num_kv_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.context import note_layer
from dbo.offload import Offloader
from moe.all2all.base import All2All
from moe.attention.base import AttentionBackend, AttentionPlan
from moe.attention.choice import choose_attention
from moe.attention.rotary import Rotary
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.experts import ExpertWeights
from moe.kv_cache import KVCache
from moe.layer import MoELayer
from moe.linear import Linear, make_head, make_linear
from moe.models.family import Family
from moe.norm import add_rms_norm
from moe.router import Router
from moe.swiglu import swiglu
from moe.weights import Param, Piece

Params = dict[str, Tensor]
Norm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # see `add_rms_norm`


class Model:
    """A language model as one rank holds it: everything but the other ranks' experts."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        all2all: All2All,
        *,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Take the tensors of `declare_params` out of `params`, so that a packed one is in memory once."""
        self.config = config
        self.embedding = params.pop("embedding")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.layers = [_make_layer(config, _take(params, f"layers.{i}."), all2all, i) for i in range(config.num_layers)]
        self.attention = attention or choose_attention(self.device, self.dtype, batch_invariant=config.batch_invariant)
        self._rotary = Rotary(config, self.device)
        self.offloader: Offloader | None = None  # of weights that are not always here
        self._final_norm = _make_norm(config, params.pop("final_norm"))
        head = self.embedding if config.tie_embeddings else params.pop("head")
        self._head = make_head(head, batch_invariant=config.batch_invariant)

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """One forward: [T, H] hidden states before the last norm, undefined in rows of padding; writes `kv`.

        One or more yield points a layer. Does not wait for a device.
        """
        plan = self.attention(self.config, batch, kv)
        angles = self._rotary.angles(batch.positions, self.dtype)
        x = F.embedding(batch.input_ids, self.embedding)
        residual = None
        for index, layer in enumerate(self.layers):
            note_layer(index)
            x, residual = layer(x, residual, angles, plan, batch)
        return x if residual is None else x + residual

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, in order: for experiments that put another router or transport into them."""
        return [layer.mlp.moe for layer in self.layers if isinstance(layer.mlp, RoutedMLP)]

    @torch.inference_mode()
    def compute_logits(self, rows: Tensor) -> Tensor:
        """rows [n, H] of what the forward returned -> [n, vocab_size] float32."""
        return self._head(self._final_norm(rows, None)[0])


@dataclass(kw_only=True)
class Layer:
    """One decoder layer."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: Callable[[Tensor, ForwardBatch], Tensor]
    mlp_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], what the part before gave, and the stream it is yet to be added to -> the same after this layer.

        Both are given away: the stream is added to in place where the device can.
        """
        normed, residual = self.attention_norm(x, residual)
        normed, residual = self.mlp_norm(self.attention(normed, angles, plan), residual)
        return self.mlp(normed, batch), residual


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention of one layer, with q/k norms if the family has them."""

    index: int
    qkv: Linear  # H -> (Q + 2 K) D
    out: Linear  # Q D -> H
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """x [T, H], normed -> [T, H] without the residual."""
        return self.out(plan.attend(self.index, self.qkv(x), self.q_norm, self.k_norm, angles))


@dataclass(frozen=True)
class RoutedMLP:
    """The experts of one layer, called as an MLP is."""

    moe: MoELayer

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, H] -> [T, H] without the residual; two yield points."""
        return self.moe(x, batch.num_routed, batch.num_tokens_per_rank, batch.slot_mapping)


def _take(params: Params, prefix: str) -> Params:
    """Move the parameters under `prefix` out of `params`."""
    return {name.removeprefix(prefix): params.pop(name) for name in list(params) if name.startswith(prefix)}


def _make_layer(config: ModelConfig, params: Params, all2all: All2All, index: int) -> Layer:
    linear = partial(make_linear, batch_invariant=config.batch_invariant)
    return Layer(
        attention=SelfAttention(
            index=index,
            qkv=linear(params["qkv"], params.get("qkv_bias")),
            out=linear(params["out"], params.get("out_bias")),
            q_norm=params.get("q_norm"),
            k_norm=params.get("k_norm"),
        ),
        attention_norm=_make_norm(config, params["attention_norm"]),
        mlp=_dense_mlp(config, params) if index in config.dense_layers else _routed_mlp(config, params, all2all),
        mlp_norm=_make_norm(config, params["mlp_norm"]),
    )


def _make_norm(config: ModelConfig, weight: Tensor) -> Norm:
    eps, batch_invariant = config.rms_norm_eps, config.batch_invariant
    return lambda x, residual: add_rms_norm(x, residual, weight, eps, batch_invariant=batch_invariant)


def _dense_mlp(config: ModelConfig, params: Params) -> Callable[[Tensor, ForwardBatch], Tensor]:
    mlp = _make_mlp(config, params["w_gate_up"], params["w_down"])
    return lambda x, batch: mlp(x)


def _routed_mlp(config: ModelConfig, params: Params, all2all: All2All) -> RoutedMLP:
    shared = None
    if config.shared_expert_width:
        shared = _make_mlp(config, params["shared_gate_up"], params["shared_down"])
    router = Router(
        gate=params["router"],
        num_topk=config.num_topk,
        norm_topk_prob=config.norm_topk_prob,
        batch_invariant=config.batch_invariant,
    )
    experts = ExpertWeights(w_gate_up=params["w_gate_up"], w_down=params["w_down"])
    return RoutedMLP(MoELayer(router, experts, all2all, shared, batch_invariant=config.batch_invariant))


def _make_mlp(config: ModelConfig, w_gate_up: Tensor, w_down: Tensor) -> Linear:
    batch_invariant = config.batch_invariant
    gate_up, down = (make_linear(weight, batch_invariant=batch_invariant) for weight in (w_gate_up, w_down))
    return lambda x: down(swiglu(gate_up(x), batch_invariant=batch_invariant))


# ------------------------------------------------------------------------------------------------ parameters


def declare_params(config: ModelConfig, family: Family, experts: range) -> dict[str, Param]:
    """Every parameter of a rank that holds `experts` of each layer, with the tensors on disk that make it up."""
    c, table = config, (config.vocab_size, config.hidden)
    params = {
        "embedding": _stack(Piece("model.embed_tokens.weight", table)),
        "final_norm": _ones("model.norm.weight", c.hidden),
    }
    if not c.tie_embeddings:
        params["head"] = _stack(Piece("lm_head.weight", table))
    for index in range(c.num_layers):
        source = f"model.layers.{index}."
        layer = _attention_params(c, source)
        if index in c.dense_layers:
            layer |= _mlp_params(c.hidden, c.dense_width, source + "mlp.", "w_")
        else:
            layer |= _expert_params(c, family, source, experts)
            if c.shared_expert_width:
                shared = f"{source}{family.moe_module}.shared_experts."
                layer |= _mlp_params(c.hidden, c.shared_expert_width, shared, "shared_")
        params |= {f"layers.{index}.{name}": param for name, param in layer.items()}
    return params


def _attention_params(c: ModelConfig, source: str) -> dict[str, Param]:
    attn = source + "self_attn."
    widths = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
    widths = {name: heads * c.head_dim for name, heads in widths.items()}
    params = {
        "attention_norm": _ones(source + "input_layernorm.weight", c.hidden),
        "mlp_norm": _ones(source + "post_attention_layernorm.weight", c.hidden),
        "qkv": _stack(*(Piece(f"{attn}{name}.weight", (width, c.hidden)) for name, width in widths.items())),
        "out": _stack(Piece(attn + "o_proj.weight", (c.hidden, c.num_heads * c.head_dim))),
    }
    if c.attention_bias:
        params["qkv_bias"] = _stack(*(Piece(f"{attn}{name}.bias", (width,)) for name, width in widths.items()))
        params["out_bias"] = _stack(Piece(attn + "o_proj.bias", (c.hidden,)))
    if c.qk_norm:
        params["q_norm"] = _ones(attn + "q_norm.weight", c.head_dim)
        params["k_norm"] = _ones(attn + "k_norm.weight", c.head_dim)
    return params


def _mlp_params(hidden: int, width: int, source: str, prefix: str) -> dict[str, Param]:
    up = (width, hidden)
    return {
        prefix + "gate_up": _stack(Piece(source + "gate_proj.weight", up), Piece(source + "up_proj.weight", up)),
        prefix + "down": _stack(Piece(source + "down_proj.weight", up[::-1])),
    }


def _expert_params(c: ModelConfig, family: Family, source: str, experts: range) -> dict[str, Param]:
    """Checkpoints hold each expert's matrices apart, or (newer) those of all experts in one tensor."""
    module, up = source + family.moe_module + ".", (c.expert_width, c.hidden)
    gate_name, up_name, down_name = family.expert_names

    def gate_up_of(expert: int) -> list[Piece]:
        return [Piece(f"{module}experts.{expert}.{name}.weight", up) for name in (gate_name, up_name)]

    def down_of(expert: int) -> list[Piece]:
        return [Piece(f"{module}experts.{expert}.{down_name}.weight", up[::-1])]

    def held(pieces_of: Callable[[int], list[Piece]], fused: str, shape: tuple[int, int]) -> Param:
        return Param(
            shape=(len(experts), *shape),
            pieces=tuple(piece for expert in experts for piece in pieces_of(expert)),
            fused=tuple(Piece(f"{source}mlp.experts.{fused}", (c.num_experts, *shape), experts) for _ in (0,)),
            needed=tuple(p for e in range(c.num_experts) if e not in experts for p in pieces_of(e)),
        )

    return {
        "router": _stack(Piece(module + "gate.weight", (c.num_experts, c.hidden))),
        "w_gate_up": held(gate_up_of, "gate_up_proj", (2 * c.expert_width, c.hidden)),
        "w_down": held(down_of, "down_proj", (c.hidden, c.expert_width)),
    }


def _stack(*pieces: Piece) -> Param:
    """Matrices with the same columns, one above the other."""
    rows = sum(piece.shape[0] for piece in pieces)
    return Param(shape=(rows, *pieces[0].shape[1:]), pieces=pieces)


def _ones(name: str, width: int) -> Param:
    return Param(shape=(width,), pieces=(Piece(name, (width,)),), ones=True)
