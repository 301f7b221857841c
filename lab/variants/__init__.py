"""
Models that exist for one table of results/: a file for each model file that they change. What their
attention shares with that of every model file stands here, so that a variant shows what differs.
"""
from torch.nn import functional as F


def heads(attn, x, cache):
    """x (B, T, C) -> q (B, H, T, d), and k, v of all tokens so far."""
    B, T, C = x.shape
    qkv = attn.c_attn(x).view(B, T, 3 * attn.n_head, C // attn.n_head)
    q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
    if attn.qk_norm:  # .to: autocast would leave them in float32
        q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
    if cache is not None:
        k, v = cache.append(f"k{attn.layer}", k), cache.append(f"v{attn.layer}", v)
    return q, k, v


def joined(attn, y):
    """y (B, H, T, d) -> what the layer adds to the residual stream, (B, T, C)."""
    return attn.resid_dropout(attn.c_proj(y.transpose(1, 2).flatten(2)))


def replace_attention(model, attention):
    """Another class of attention in every layer, which starts with the weights that are there."""
    weights = model.state_dict()
    for layer, block in enumerate(model.h):
        block.attn = attention(model.config, layer)
        block.attn.config = model.config
    model.load_state_dict(weights)
