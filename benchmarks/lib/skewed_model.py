"""Models of random weights whose routers choose experts as often as asked for: checkpoints for load
that is skewed.

Legend: L layers, E experts, T tokens, K choices a token.
"""

from pathlib import Path

import numpy as np

from benchmarks.lib.report import JsonObject

SAMPLE = (16, 128)  # prompts, tokens of each: what routers' biases are made for
PASSES, ROUNDS = 3, 200


def zipf_shares(num_layers: int, num_experts: int, exponent: float, seed: int) -> np.ndarray:
    """Return [L, E] shares of a layer's choices, Zipf by rank; ranks are drawn for each layer."""
    ranked_E = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(ranked_E / ranked_E.sum()) for _ in range(num_layers)])


def write_skewed_checkpoint(
    folder: Path, shares_LE: np.ndarray, seed: int = 0, **fields: int
) -> None:
    """Write a gpt-oss checkpoint whose router biases give each expert its share of the choices.

    fields: of its `config.json`. The shares hold over random tokens; no expert can have more than 1
    / K.
    """
    import flax.nnx as nnx
    import jax.numpy as jnp

    from jmoe.models.decoder import Decoder
    from jmoe.models.huggingface import model_config
    from jmoe.models.pretrained import LanguageModel, save_pretrained

    described: JsonObject = {"model_type": "gpt_oss", "num_hidden_layers": shares_LE.shape[0]}
    described |= {
        "num_local_experts": shares_LE.shape[1],
        "sliding_window": 128,
        "eos_token_id": 0,
    } | fields
    config = model_config(described)
    model = LanguageModel(Decoder(config, rngs=nnx.Rngs(seed)))
    tokens_BS = np.random.default_rng(seed).integers(1, config.vocab_size, SAMPLE)
    bias = model.decoder.moe_layers.moe.router.bias
    for _ in range(PASSES):  # what reaches a layer depends on the choices before it
        logits_LTE = (
            np.asarray(model.routing(tokens_BS).logits_TE, np.float64)
            - np.asarray(bias[...])[:, None]
        )
        pairs = zip(logits_LTE, shares_LE, strict=True)
        bias[...] = jnp.asarray(
            [_router_bias_for_shares(*pair, config.num_experts_per_tok) for pair in pairs]
        )
    save_pretrained(model, folder)


def _router_bias_for_shares(logits_TE: np.ndarray, share_E: np.ndarray, k: int) -> np.ndarray:
    """Return float32 [E] to add to these logits so that top-K choices have the wanted shares."""
    bias_E, step = np.zeros(share_E.size), 0.5
    for _ in range(ROUNDS):
        chosen_TK = np.argpartition(-(logits_TE + bias_E), k - 1, axis=1)[:, :k]
        found_E = (np.bincount(chosen_TK.ravel(), minlength=share_E.size) + 0.5) / chosen_TK.size
        bias_E += step * logits_TE.std() * np.log(share_E / found_E)
        step = max(0.05, 0.97 * step)
    return (bias_E - bias_E.mean()).astype(np.float32)
