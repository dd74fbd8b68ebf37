"""What the decoders have in common: the parts of a layer, written as nodes of a graph.

A part's weights carry the names of Hugging Face's checkpoints ("model.layers.0.self_attn.q_proj.weight").
"""

from __future__ import annotations

from dataclasses import replace

from tricorn.models.config import Config, Shape, flag
from tricorn.models.graph import Graph, Node, Rope
from tricorn.models.rope import make_rope, rope_entries, stretched_context

EMBEDDING = "model.embed_tokens.weight"


class Writer:
    """Writes nodes one after another; each method returns the name of the value that its last node makes."""

    def __init__(self, shape: Shape, *ropes: Rope) -> None:
        self.shape = shape
        self.ropes = ropes
        self.nodes: list[Node] = []

    def node(self, op: str, output: str, *inputs: str, weights: tuple[str, ...] = (), **attrs: object) -> str:
        self.nodes.append(Node(op, output, inputs, weights, attrs))
        return output

    def embed(self, scale: float = 1.0) -> str:
        return self.node("embed", "embedding", weights=(EMBEDDING,), scale=scale, columns=self.shape.hidden)

    def norm(self, x: str, output: str, module: str, heads: int = 0) -> str:
        weights = (f"model.{module}.weight",)
        return self.node("rms_norm", output, x, weights=weights, eps=self.shape.eps, heads=heads)

    def linear(self, x: str, output: str, module: str, columns: int, bias: bool = False) -> str:
        weights = (f"model.{module}.weight", f"model.{module}.bias")
        return self.node("linear", output, x, weights=weights if bias else weights[:1], columns=columns)

    def add(self, a: str, b: str, output: str) -> str:
        return self.node("add", output, a, b)

    def attention(
        self,
        x: str,
        layer: int,
        *,
        window: int = 0,
        rope: int = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norms: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> str:
        """Grouped-query attention over rotated queries and keys; `scale` None is 1 / sqrt(head_dim)."""
        s, at = self.shape, f"layers.{layer}"
        q = self.linear(x, f"{at}.q", f"{at}.self_attn.q_proj", s.heads * s.head_dim, qkv_bias)
        k = self.linear(x, f"{at}.k", f"{at}.self_attn.k_proj", s.kv_heads * s.head_dim, qkv_bias)
        v = self.linear(x, f"{at}.v", f"{at}.self_attn.v_proj", s.kv_heads * s.head_dim, qkv_bias)
        if head_norms:
            q = self.norm(q, f"{at}.q_normed", f"{at}.self_attn.q_norm", s.heads)
            k = self.norm(k, f"{at}.k_normed", f"{at}.self_attn.k_norm", s.kv_heads)
        q = self.node("rope", f"{at}.q_rotated", q, heads=s.heads, rope=rope)
        k = self.node("rope", f"{at}.k_rotated", k, heads=s.kv_heads, rope=rope)
        seen = self.node(
            "attention",
            f"{at}.attention",
            *(q, k, v),
            layer=layer,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            scale=s.head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
        )
        return self.linear(seen, f"{at}.attention_out", f"{at}.self_attn.o_proj", s.hidden, output_bias)

    def mlp(self, x: str, layer: int, act: str, bias: bool = False) -> str:
        """The gated feed-forward part."""
        s, at = self.shape, f"layers.{layer}"
        gate = self.linear(x, f"{at}.gate", f"{at}.mlp.gate_proj", s.intermediate, bias)
        up = self.linear(x, f"{at}.up", f"{at}.mlp.up_proj", s.intermediate, bias)
        gated = self.node("act_mul", f"{at}.gated", gate, up, act=act)
        return self.linear(gated, f"{at}.mlp_out", f"{at}.mlp.down_proj", s.hidden, bias)

    def finish(self, x: str, softcap: float = 0.0) -> Graph:
        """The end of every decoder: last norm and head, for the sampled rows only; then the graph is whole."""
        s = self.shape
        x = self.norm(self.node("sampled", "last", x), "last_normed", "norm")
        head = EMBEDDING if s.tied else "lm_head.weight"
        x = self.node("linear", "logits", x, weights=(head,), columns=s.vocab)
        if softcap:
            self.node("softcap", "logits_capped", x, cap=softcap)
        return Graph(tuple(self.nodes), self.ropes, s.layers, s.kv_heads, s.head_dim, s.vocab, s.context)


def pre_norm_decoder(
    config: Config,
    shape: Shape,
    windows: list[int],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
) -> Graph:
    """The Llama family: norm, attention, add; norm, gated SiLU, add. `windows` has one entry per layer, 0 for none."""
    entries = rope_entries(config)
    shape = replace(shape, context=stretched_context(shape.context, entries))
    write = Writer(shape, make_rope(config, shape.head_dim, entries))
    mlp_bias = flag(config, "mlp_bias")
    x = write.embed()
    for layer, window in enumerate(windows):
        at = f"layers.{layer}"
        h = write.norm(x, f"{at}.attention_in", f"{at}.input_layernorm")
        h = write.attention(h, layer, window=window, qkv_bias=qkv_bias, output_bias=output_bias, head_norms=head_norms)
        x = write.add(x, h, f"{at}.attended")
        h = write.norm(x, f"{at}.mlp_in", f"{at}.post_attention_layernorm")
        h = write.mlp(h, layer, "silu", mlp_bias)
        x = write.add(x, h, f"{at}.out")
    return write.finish(x)
