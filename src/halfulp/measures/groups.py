"""Groups: the part of a network that a tensor belongs to, by its name and the module that owns it.

The groups are ``embedding``, ``attention``, ``mlp``, ``norm``, ``head`` and ``other``. The rules look at the
parts of a dotted name, from the innermost module outwards, so that ``transformer.h.3.attn.c_proj.weight`` is
attention and ``transformer.h.3.mlp.c_proj.weight`` is mlp although both end alike. A tensor that is used
twice (tied embedding and head) is one tensor, under its first name.

``core`` is attention and mlp together, weighted by coordinates.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

GROUPS = ("embedding", "attention", "mlp", "norm", "head", "other")
CORE = ("attention", "mlp")

_NORM = re.compile(
    r"(^|_)(layer_?norm|rms_?norm|batch_?norm|group_?norm|norm\d*|ln|ln_?[a-z0-9]+|bn\d*)($|_)|norm$"
)
_EMBEDDING = re.compile(r"embed|^(wte|wpe|wtt|emb|tok_emb|pos_emb|tokens?|positions?)$")
_HEAD = re.compile(r"(^|_)(lm_head|head|heads|classifier|score|embed_out|output_layer|unembed|logits)($|_)")
_ATTENTION = re.compile(
    r"att(n|ention)|^([qkvo](_?proj)?|qkv(_?proj)?|wqkv|w[qkvo]|query|key|value|query_key_value|in_proj|out_proj|kv_proj)$"
)
_MLP = re.compile(
    r"mlp|ffn?$|ff_|feed_?forward|intermediate|^(c_fc|fc_?\d*|fc_in|fc_out|w[123]|gate_proj|up_proj|down_proj|gate|"
    r"dense_h_to_4h|dense_4h_to_h|linear_?[12]|experts?|moe|dense[a-z]+dense)$"
)

Rules = Callable[[str, torch.Tensor], str]


def group_of(name: str, tensor: torch.Tensor, module: torch.nn.Module | None = None) -> str:
    """Return the group of a tensor.

    >>> w = torch.empty(4, 4)
    >>> names = ("transformer.wte.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_proj.weight")
    >>> [group_of(n, w) for n in names]
    ['embedding', 'attention', 'mlp']
    >>> group_of("model.layers.1.self_attn.q_norm.weight", torch.empty(4))
    'norm'
    >>> names = (
    ...     "encoder.layer.0.output.dense.weight",
    ...     "layer.0.attention.output.dense.weight",
    ...     "output.weight",
    ... )
    >>> [group_of(n, w) for n in names]
    ['mlp', 'attention', 'head']
    """
    kind = "" if module is None else type(module).__name__.lower()
    parts = [p.lower() for p in name.split(".")]
    owners = parts[:-1] or parts
    if "norm" in kind or (owners and _NORM.search(owners[-1])):
        return "norm"
    if kind.startswith("embedding"):
        return "embedding"
    for i, part in reversed(list(enumerate(owners))):
        if part == "output":  # of a numbered layer: the second half of BERT's mlp; of the model: Llama's head
            if "attention" in owners[:i]:
                return "attention"
            return "mlp" if i and owners[i - 1].isdigit() else "head"
        for pattern, group in (
            (_HEAD, "head"),
            (_EMBEDDING, "embedding"),
            (_ATTENTION, "attention"),
            (_MLP, "mlp"),
        ):
            if pattern.search(part):
                return group
    return "other"
