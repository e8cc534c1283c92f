"""Planned memory of gated delta networks in training: what a layer saves for its backward pass, and
what its gradient uses at once.
"""

from jmoe.config import ModelConfig

# Float32 elements in use at once by a network's gradient in the chunked delta rule (operands of all
# chunks, their gradients, the states between chunks), for an element of a token's keys as value
# heads read them, of its values, and of its scores in a chunk. Fitted to compiled gradients: for an
# H100 they are 1 to 2 % more.
_ON_GPU = (11, 9, 2)
_ON_CPU = (24, 19, 5)
_CHUNK = 64  # tokens; of `layers/gated_delta_rule.py`


def saved_linear_attention_elements(model: ModelConfig) -> int:
    """Return the elements of a token that a network saves for its backward pass: its projections
    and its heads' outputs.
    """
    keys, values = model.linear_key_dim, model.linear_value_dim
    return 2 * keys + 3 * values + 2 * model.linear_num_value_heads


def linear_attention_bytes_in_use(model: ModelConfig, *, on_gpu: bool) -> int:
    """Return the bytes in use at once by the gradient of a network, per token; 0 for a model
    without networks.
    """
    if not model.has_linear_attention:
        return 0
    heads = model.linear_num_value_heads
    of_keys, of_values, of_scores = _ON_GPU if on_gpu else _ON_CPU
    elements = of_keys * heads * model.linear_key_head_dim
    elements += of_values * model.linear_value_dim + of_scores * heads * _CHUNK
    return 4 * (elements + 4 * model.hidden_size)
