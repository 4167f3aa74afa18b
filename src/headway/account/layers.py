"""What one layer of a language model is made of: weight matrices, attention, MLP. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention_in", "attention_mid", "attention_out", "router", "mlp_in", "mlp_out", "outer"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight matrix, or `copies` equal ones of which a token passes through `active` (experts).

    `name` is the path inside the layer as transformers names the module, so that LoRA targets can be matched.
    """

    name: str
    inputs: int
    outputs: int
    role: Role
    copies: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        """Weights held in memory."""
        return self.inputs * self.outputs * self.copies

    @property
    def active_parameters(self) -> int:
        """Weights one token is multiplied with."""
        return self.inputs * self.outputs * self.active


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of one layer. Scores are computed once per *query* head, whatever `kv_heads` is.

    `qk_dim` and `v_dim` are per head and differ under multi-head latent attention (MLA), whose ranks are kept for
    memory models. `window`: a token sees itself and the `window - 1` tokens before it. `chunk`: a token sees only its
    own chunk of the document.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    chunk: int | None = None
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Feed-forward block: dense when `experts` is 0, else `experts` of `width`, `top_k` of them per token.

    `shared_width` is the summed width of the experts every token passes through. `gated` is SwiGLU and its kin
    (three matrices), otherwise two.
    """

    width: int
    gated: bool
    experts: int = 0
    top_k: int = 0
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """A recurrence over the sequence, computed chunk by chunk (Mamba-2, gated delta rule), forward, per token.

    `flops` of its matrix products; `states`: fp32 elements of the states kept at chunk borders; `stream`: elements of
    the compute dtype that its kernels read and write.
    """

    flops: float
    states: float
    stream: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `vectors` counts what is no matrix: norms, biases, attention sinks.

    `parallel` layers feed attention and MLP from the same input (GPT-NeoX, Cohere). `attention` is None where tokens
    are mixed by something else (a recurrence: `scan`, where its sizes are known), whose FLOPs beyond its matrices are
    not counted as useful.
    """

    attention: Attention | None
    mlp: Mlp | None
    weights: tuple[Weight, ...]
    vectors: int
    parallel: bool = False
    scan: Scan | None = None

    @property
    def parameters(self) -> int:
        return self.vectors + sum(weight.parameters for weight in self.weights)

    @property
    def matmul_parameters(self) -> int:
        return sum(weight.parameters for weight in self.weights)

    @property
    def active_matmul_parameters(self) -> int:
        return sum(weight.active_parameters for weight in self.weights)
