"""Models that exist for one table of results/: a file for each model file that they change."""


def replace_attention(model, attention):
    """Another class of attention in every layer, which starts with the weights that are there."""
    weights = model.state_dict()
    for layer, block in enumerate(model.h):
        block.attn = attention(model.config, layer)
    model.load_state_dict(weights)
