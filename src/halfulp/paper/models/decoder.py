"""One decoder; every transformer of every study is a config of it.

Tokens are embedded, pass through blocks of causal attention and a feed-forward network, are
normalised and compared with the rows of an output matrix. What differs between the families is data:

    family           norm    positions          feed-forward     residual     output
    GPT-2            layer   learned            GELU, 4 widths   sequential   tied to the input
    modern, Llama    RMS     rotary             SwiGLU           sequential   its own
    GPT-NeoX         layer   rotary on a share  GELU, 4 widths   parallel     its own

Sequential: x += attention(norm x), then x += mlp(norm x). Parallel: both read the same x.

There are no biases and there is no dropout, as in the paper: a parameter is a matrix, which a study
stores on a grid, or a norm's weight, which stays in float32. Names are nanoGPT's. A tied output
matrix is not registered a second time, so whoever enumerates parameters meets it once, under its first
name ``transformer.wte.weight``, with the gradient of both its roles.

Initial weights are a function of config and seed: a normal distribution (0.02 by default), narrower by the
root of the number of residual additions for the matrices that write into the residual stream. They are drawn
on the CPU by a generator of their own, whatever the device, in the order of the parameters.

>>> inventory(Decoder(GPT2, device="meta"))
Inventory(parameters=124373760, eligible=124354560, core=84934656, tiles=161920)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from torch.utils.checkpoint import checkpoint

from halfulp.errors import UsageError
from halfulp.kernels import tiles_of
from halfulp.measures.groups import CORE, group_of

CHOICES = {
    "norm": ("layer", "rms"), "positions": ("learned", "rotary"), "mlp": ("gelu", "swiglu"),
    "activations": ("float", "int8"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder: its sizes, and one choice for each part."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    hidden: int
    """Width inside the feed-forward network."""
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rotary"] = "learned"
    rotary_share: float = 1.0
    """The share of every head's dimensions that is rotated, from the first on."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    parallel: bool = False
    tied: bool = True
    activations: Literal["float", "int8"] = "float"
    """int8: what enters a block's matrices is rounded to 8 bits a token, as DQT does."""
    std: float = 0.02
    """The standard deviation of the initial weights."""
    epsilon: float = 1e-5
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"a decoder's {name} is {' or '.join(allowed)}, not {getattr(self, name)!r}."
                )

    @property
    def rotated(self) -> int:
        """The rotated dimensions of a head."""
        return int(self.width // self.heads * self.rotary_share) if self.positions == "rotary" else 0


CHARACTER = DecoderConfig(layers=4, heads=4, width=128, context=128, vocabulary=65, hidden=512)
GPT2 = DecoderConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50304, hidden=3072)
MODERN = DecoderConfig(
    layers=12, heads=12, width=768, context=1024, vocabulary=50304, hidden=2048,
    norm="rms", positions="rotary", mlp="swiglu", tied=False,
)  # fmt: skip
MODERN_17 = replace(MODERN, layers=17)
NEOX = DecoderConfig(
    layers=12, heads=12, width=768, context=1024, vocabulary=50304, hidden=3072,
    positions="rotary", rotary_share=0.25, parallel=True, tied=False,
)  # fmt: skip
LLAMA = replace(MODERN, vocabulary=32000, activations="int8", epsilon=1e-6)
"""DQT's model of 134.1 million parameters."""


class Decoder(nn.Module):
    """Logits for every position: ``model(tokens)`` of (batch, length) is (batch, length, vocabulary)."""

    def __init__(self, config: DecoderConfig, *, seed: int = 0, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.config = config
        self.transformer = Trunk(config, device)
        self.lm_head = None if config.tied else Matrix(config.width, config.vocabulary, device)
        if torch.device(device).type != "meta":
            self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0)
                continue
            residual = name.endswith("c_proj.weight")
            std = self.config.std / (2 * self.config.layers) ** 0.5 if residual else self.config.std
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        output = self.transformer.wte if self.lm_head is None else self.lm_head
        logits: torch.Tensor = output(self.transformer(tokens))
        return logits

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of the token that follows each position."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class Trunk(nn.Module):
    """Everything but the output matrix."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: DecoderConfig, device: str | torch.device) -> None:
        super().__init__()
        learned = config.positions == "learned"
        self.checkpointing = False
        self.wte = Embedding(config.vocabulary, config.width, device)
        self.wpe = Embedding(config.context, config.width, device) if learned else None
        self.h = nn.ModuleList([Block(config, device) for _ in range(config.layers)])
        self.ln_f = Norm(config, device)
        for name, table in zip(("cos", "sin"), _angles(config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last layer's activations."""
        length = tokens.shape[1]
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(length, device=tokens.device))
        turn = (self.cos[:length], self.sin[:length])
        for block in self.h:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, turn, use_reentrant=False)
            else:
                x = block(x, turn)
        out: torch.Tensor = self.ln_f(x)
        return out


class Block(nn.Module):
    """Attention and feed-forward network, added to the residual stream."""

    def __init__(self, config: DecoderConfig, device: str | torch.device) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.ln_1, self.attn = Norm(config, device), Attention(config, device)
        self.ln_2, self.mlp = Norm(config, device), Mlp(config, device)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Add attention and the feed-forward layers."""
        seen: torch.Tensor = x + self.attn(self.ln_1(x), turn)
        out: torch.Tensor = seen + self.mlp(self.ln_2(x if self.parallel else seen))
        return out


class Attention(nn.Module):
    """Causal attention with several heads; queries, keys and values are one matrix."""

    def __init__(self, config: DecoderConfig, device: str | torch.device) -> None:
        super().__init__()
        self.heads, self.rotated = config.heads, config.rotated
        self.c_attn = Matrix(config.width, 3 * config.width, device, config.activations)
        self.c_proj = Matrix(config.width, config.width, device, config.activations)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend to the tokens so far."""
        b, t, width = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.rotated:
            q, k = self._turned(q, *turn), self._turned(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, width))
        return out

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate dimension i with dimension i + half, as in the released models of both families."""
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        a, b = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Mlp(nn.Module):
    """The feed-forward network: GELU, or SiLU of one matrix times another."""

    def __init__(self, config: DecoderConfig, device: str | torch.device) -> None:
        super().__init__()
        self.c_fc = Matrix(config.width, config.hidden, device, config.activations)
        gated = config.mlp == "swiglu"
        self.c_gate = Matrix(config.width, config.hidden, device, config.activations) if gated else None
        self.c_proj = Matrix(config.hidden, config.width, device, config.activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward layers."""
        h = self.c_fc(x)
        out: torch.Tensor = self.c_proj(F.gelu(h) if self.c_gate is None else F.silu(self.c_gate(x)) * h)
        return out


class Norm(nn.Module):
    """Layer norm or RMS norm, with a weight and no bias."""

    def __init__(self, config: DecoderConfig, device: str | torch.device) -> None:
        super().__init__()
        self.kind, self.epsilon = config.norm, config.epsilon
        self.weight = nn.Parameter(torch.empty(config.width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last axis."""
        if self.kind == "layer":
            return F.layer_norm(x, self.weight.shape, self.weight, None, self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Embedding(nn.Module):
    """Rows by number; called with vectors it compares them with every row, which is a tied output.

    Both go through ``forward``, because hooks there are how packed or sharded weights come to be.
    """

    def __init__(self, rows: int, width: int, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look tokens up, or multiply activations by the table."""
        return F.linear(x, self.weight) if x.is_floating_point() else F.embedding(x, self.weight)


class Matrix(nn.Module):
    """A linear map; not ``nn.Linear``, which draws its weights from the global generator."""

    def __init__(
        self, inputs: int, outputs: int, device: str | torch.device, activations: str = "float"
    ) -> None:
        super().__init__()
        self.int8 = activations == "int8"
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        return F.linear(int8_activations(x) if self.int8 else x, self.weight)


def int8_activations(x: torch.Tensor) -> torch.Tensor:
    """Round every token to 8 bits at the scale 127 / max |x|; the gradient passes straight through.

    >>> int8_activations(torch.tensor([[1.0, 0.5039, -1.0]]))
    tensor([[ 1.0000,  0.5039, -1.0000]])
    """
    still = x.detach()
    scale = 127.0 / still.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)  # a token of zeros stays zeros
    return (still * scale).round().clamp(-128, 127) / scale + (x - still)


def _angles(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine by position and rotated dimension; empty where positions are learned."""
    pairs = torch.arange(0, config.rotated, 2, dtype=torch.float32)
    speed = 1.0 / config.rotary_base ** (pairs / max(config.rotated, 1))
    angle = torch.outer(torch.arange(config.context, dtype=torch.float32), speed).repeat(1, 2)
    return angle.cos(), angle.sin()


# ---- counting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inventory:
    """The numbers of coordinates of a model, each physical one counted once."""

    parameters: int
    eligible: int
    """Those of tensors with two or more dimensions, which a study stores on a grid."""
    core: int
    """Those of attention and feed-forward network."""
    tiles: int
    """Tiles of 768 eligible coordinates; none crosses a tensor's boundary."""


def inventory(model: nn.Module) -> Inventory:
    """Count a model; the meta device will do."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.dim() >= 2]
    return Inventory(
        parameters=sum(p.numel() for _, p in named),
        eligible=sum(p.numel() for _, p in matrices),
        core=sum(p.numel() for name, p in matrices if group_of(name, p) in CORE),
        tiles=sum(tiles_of(p.numel()) for _, p in matrices),
    )


def normal_at_start(smallest: float) -> float:
    """Return the share of GPT-2 124M's initial matrix weights that are normal: at least ``smallest``.

    The expectation under the declared initial distribution, which does not need the 124 million weights.
    """
    width, layers = GPT2.width, GPT2.layers
    into_residual = layers * width * (width + GPT2.hidden)  # these start narrower
    others = layers * width * (3 * width + GPT2.hidden) + (GPT2.vocabulary + GPT2.context) * width
    spread = {others: GPT2.std, into_residual: GPT2.std / math.sqrt(2 * layers)}
    return sum(n * math.erfc(smallest / s / math.sqrt(2)) for n, s in spread.items()) / sum(spread)
