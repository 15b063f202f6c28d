"""The decoder: the paper's inventories, Hugging Face's logits, and weights that depend on nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.measures.groups import group_of
from halfulp.paper.models import decoder
from halfulp.paper.models.decoder import (
    CHARACTER,
    GPT2,
    LLAMA,
    MODERN,
    MODERN_17,
    NEOX,
    Decoder,
    DecoderConfig,
    Inventory,
    inventory,
)

SMALL = {"layers": 3, "heads": 4, "width": 64, "context": 32, "vocabulary": 97}
FAMILIES = {
    "gpt2": replace(GPT2, **SMALL, hidden=256),
    "modern": replace(MODERN, **SMALL, hidden=176),
    "neox": replace(NEOX, **SMALL, hidden=256, rotary_share=0.25),
    "llama": replace(LLAMA, **SMALL, hidden=176),
}


def on_meta(config: DecoderConfig) -> Inventory:
    return inventory(Decoder(config, device="meta"))


# ---- inventories (appendices C, E and F; one line a model) ----------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CHARACTER, Inventory(812_288, 811_136, 786_432, 1_065)),
        (GPT2, Inventory(124_373_760, 124_354_560, 84_934_656, 161_920)),
        (MODERN, Inventory(162_220_800, 162_201_600, 84_934_656, 211_200)),
        (MODERN_17, Inventory(197_617_920, 197_591_040, 120_324_096, 257_280)),
        (NEOX, Inventory(162_220_800, 162_201_600, 84_934_656, 211_200)),
        (LLAMA, Inventory(134_105_856, 134_086_656, 84_934_656, 174_592)),
    ],
)
def test_inventory(config: DecoderConfig, expected: Inventory) -> None:
    assert on_meta(config) == expected


def test_tied_matrix_is_one_parameter() -> None:
    """It is met once, costs what the paper says, and collects the gradient of both roles."""
    named = dict(Decoder(GPT2, device="meta").named_parameters())
    assert "lm_head.weight" not in named
    assert named["transformer.wte.weight"].numel() * 4 == 154_533_888
    assert len(list(Decoder(NEOX, device="meta").parameters())) == 12 * 6 + 3
    model = Decoder(FAMILIES["gpt2"], seed=1)
    model(torch.tensor([[5]])).sum().backward()
    grad = model.transformer.wte.weight.grad
    assert grad is not None
    assert bool((grad != 0).any(dim=1).all())  # as an output every row, as an input row 5 only


def test_neox_has_fifty_matrices() -> None:
    """Section 4, study 1: as many are stored as codes."""
    assert sum(p.dim() >= 2 for p in Decoder(NEOX, device="meta").parameters()) == 50


@pytest.mark.parametrize("family", FAMILIES)
def test_groups(family: str) -> None:
    """Every matrix of a block is attention or mlp; the others are embedding or head."""
    for name, p in Decoder(FAMILIES[family], device="meta").named_parameters():
        expected = (
            "norm" if p.dim() == 1
            else "attention" if ".attn." in name
            else "mlp" if ".mlp." in name
            else "head" if name.startswith("lm_head")
            else "embedding"
        )  # fmt: skip
        assert group_of(name, p) == expected, name


# ---- against Hugging Face -------------------------------------------------------------------------------


def hugging_face(family: str, config: DecoderConfig) -> Any:
    """Their model of the same sizes; its biases are zeroed, as ours has none."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": config.vocabulary, "attn_implementation": "eager"}
    if family == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.hidden,
                n_positions=config.context, activation_function="gelu", layer_norm_epsilon=config.epsilon,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes,
            )
        )  # fmt: skip
    elif family == "neox":
        made = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                hidden_size=config.width, num_hidden_layers=config.layers, hidden_act="gelu",
                num_attention_heads=config.heads, intermediate_size=config.hidden, use_parallel_residual=True,
                max_position_embeddings=config.context, layer_norm_eps=config.epsilon,
                rope_parameters={
                    "rope_type": "default", "rope_theta": config.rotary_base,
                    "partial_rotary_factor": config.rotary_share,
                },
                tie_word_embeddings=False, **sizes,
            )
        )  # fmt: skip
    else:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=config.width, num_hidden_layers=config.layers, rms_norm_eps=config.epsilon,
                num_attention_heads=config.heads, num_key_value_heads=config.heads,
                intermediate_size=config.hidden, max_position_embeddings=config.context,
                tie_word_embeddings=False, **sizes,
            )
        )  # fmt: skip
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    return made.eval()


@torch.no_grad()
def copy_weights(family: str, ours: Decoder, theirs: Any) -> None:
    """Put our weights into their names and layouts."""
    heads, width = ours.config.heads, ours.config.width
    trunk = ours.transformer

    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        assert p.shape == w.shape
        p.copy_(w)

    if family == "gpt2":  # matrices are transposed
        put(theirs.transformer.wte.weight, trunk.wte.weight)
        put(theirs.transformer.wpe.weight, trunk.wpe.weight)
        put(theirs.transformer.ln_f.weight, trunk.ln_f.weight)
        for a, b in zip(trunk.h, theirs.transformer.h, strict=True):
            put(b.ln_1.weight, a.ln_1.weight)
            put(b.ln_2.weight, a.ln_2.weight)
            for x, y in ((a.attn.c_attn, b.attn.c_attn), (a.attn.c_proj, b.attn.c_proj),
                         (a.mlp.c_fc, b.mlp.c_fc), (a.mlp.c_proj, b.mlp.c_proj)):  # fmt: skip
                put(y.weight, x.weight.T)
        return
    body = theirs.gpt_neox if family == "neox" else theirs.model
    put((body.embed_in if family == "neox" else body.embed_tokens).weight, trunk.wte.weight)
    put((body.final_layer_norm if family == "neox" else body.norm).weight, trunk.ln_f.weight)
    put(theirs.get_output_embeddings().weight, ours.lm_head.weight)
    for a, b in zip(trunk.h, body.layers, strict=True):
        put(b.input_layernorm.weight, a.ln_1.weight)
        put(b.post_attention_layernorm.weight, a.ln_2.weight)
        if family == "neox":  # queries, keys and values head by head
            qkv = a.attn.c_attn.weight.view(3, heads, width // heads, width)
            put(b.attention.query_key_value.weight, qkv.transpose(0, 1).reshape(3 * width, width))
            put(b.attention.dense.weight, a.attn.c_proj.weight)
            put(b.mlp.dense_h_to_4h.weight, a.mlp.c_fc.weight)
            put(b.mlp.dense_4h_to_h.weight, a.mlp.c_proj.weight)
        else:
            for p, w in zip(("q_proj", "k_proj", "v_proj"), a.attn.c_attn.weight.chunk(3), strict=True):
                put(getattr(b.self_attn, p).weight, w)
            put(b.self_attn.o_proj.weight, a.attn.c_proj.weight)
            put(b.mlp.gate_proj.weight, a.mlp.c_gate.weight)
            put(b.mlp.up_proj.weight, a.mlp.c_fc.weight)
            put(b.mlp.down_proj.weight, a.mlp.c_proj.weight)


@pytest.mark.filterwarnings("ignore")  # of imports, not ours
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_hugging_faces(family: str) -> None:
    """The same function of the same random weights, norms included.

    The tolerance is what float32 itself costs: how far our float32 logits are from our float64 ones. Two
    float32 computations of one function, each that far from it, differ by twice that; a factor of two
    more because theirs sums in another order.
    """
    config = replace(FAMILIES[family], activations="float")
    theirs, ours = hugging_face(family, config), Decoder(config, seed=3)
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():  # larger weights than an initialisation, and norms that are not all ones
        for p in ours.parameters():
            p.copy_(torch.randn(p.shape, generator=drawn) * (0.2 if p.dim() > 1 else 0.3) + (p.dim() == 1))
    tokens = torch.randint(0, config.vocabulary, (2, config.context), generator=drawn)
    copy_weights(family, ours, theirs)
    with torch.no_grad():
        logits, expected = ours(tokens), theirs(tokens).logits
        rounding = float((logits - ours.double()(tokens)).abs().max())
    assert 0 < rounding < 1e-4 < float(logits.std())
    assert float((logits - expected).abs().max()) <= 4 * rounding


# ---- itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_causal(family: str) -> None:
    """What comes later changes nothing."""
    model = Decoder(FAMILIES[family], seed=0)
    tokens = torch.arange(20)[None] % 97
    changed = tokens.clone()
    changed[0, 12:] += 1
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.equal(a[:, 12], b[:, 12])


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_are_a_function_of_the_seed(family: str) -> None:
    """The same whatever the global generator holds, which is left alone; of the stated width."""
    config = replace(FAMILIES[family], width=256, vocabulary=400)
    state = torch.get_rng_state()
    first = Decoder(config, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second, other = Decoder(config, seed=7), Decoder(config, seed=8)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        if a.dim() == 1:
            assert bool((a == 1).all())
            continue
        assert not torch.equal(a, c)
        std = 0.02 / 6**0.5 if name.endswith("c_proj.weight") else 0.02
        # The spread of a sample deviation is std / sqrt(2n); six of them, n from 8192 up.
        assert abs(float(a.detach().std()) - std) < 6 * std / (2 * a.numel()) ** 0.5, name
    torch.set_rng_state(state)


def test_loss_is_the_mean_cross_entropy() -> None:
    model = Decoder(FAMILIES["gpt2"], seed=0)
    tokens = torch.arange(33)[None]
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    by_hand = -torch.log_softmax(model(tokens[:, :-1]).double(), dim=-1)[
        0, torch.arange(32), tokens[0, 1:]
    ].mean()
    torch.testing.assert_close(loss.double(), by_hand, rtol=1e-6, atol=0)  # a float32 mean of 32 terms


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_the_same_function(family: str) -> None:
    """Every matrix is reached through its module, the tied one in both roles: codes may stand in for it."""
    losses: dict[str, list[float]] = {}
    tokens = torch.arange(33)[None]
    for storage in ("container", "packed"):
        model = Decoder(FAMILIES[family], seed=0)
        optimizer = hu.WriteBack(
            torch.optim.AdamW(model.parameters(), lr=1e-2), "e4m3@128", "sr", model=model, storage=storage
        )
        losses[storage] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            losses[storage].append(float(loss.detach()))
    assert losses["container"] == losses["packed"]
    assert losses["packed"][0] > losses["packed"][-1]


def test_int8_activations() -> None:
    """Whole multiples of max / 127 a token, within half a step; the gradient is that of the identity."""
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = decoder.int8_activations(x)
    step = x.detach().abs().amax(dim=-1, keepdim=True) / 127
    # One rounding of x * s, one of the quotient: a few units of 2**-24 at most 127 steps from zero.
    assert float(((y - x).detach().abs() / step).max()) <= 0.5 + 1e-4
    torch.testing.assert_close((y / step).round() * step, y, rtol=1e-6, atol=0)
    y.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())
    assert torch.equal(decoder.int8_activations(torch.zeros(1, 4)), torch.zeros(1, 4))


def test_a_choice_that_there_is_not_is_refused() -> None:
    wrong: dict[str, Any] = {"norm": "batch"}
    with pytest.raises(UsageError, match="norm is layer or rms, not 'batch'"):
        replace(FAMILIES["gpt2"], **wrong)
