"""A model that says what a test wants: the token at a position depends on the position alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer

import jmoe
from jmoe.data.tokenizer import train_bpe
from jmoe.models.decoder import Decoder
from jmoe.models.pretrained import LanguageModel

HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
POSITIONS = 128
ROUTING = {"router", "feed_forward_norm"}  # weights that choose experts


def harmony_tokenizer() -> Tokenizer:
    """Every byte a token, and the special tokens of gpt-oss."""
    tokenizer = train_bpe(["assistant analysis final commentary"], 300)
    tokenizer.add_special_tokens([AddedToken(name) for name in HARMONY])
    return tokenizer


def save_scripted_model(
    folder: Path,
    tokenizer: Tokenizer,
    prompt_tokens: int,
    script: Sequence[int],
    positions: int = POSITIONS,
    *,
    layers: int = 1,
    experts: int = 2,
) -> None:
    """Write a model that, after a prompt of so many tokens, most likely says the script, and then
    its last token again.

    The likeliest token has about a third of the probability, so that draws depart from it soon.
    Experts add nothing; which of them a token chooses is random where there are more than two.
    """
    vocab_size, hidden = tokenizer.get_vocab_size(with_added_tokens=True), positions
    config = jmoe.ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        moe_intermediate_size=16,
        intermediate_size=16,
        num_experts=experts,
        num_experts_per_tok=1,
        hidden_act="gelu",
        norm="layernorm",
        position="learned",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    blocks = decoder.moe_layers
    nnx.update(
        blocks,
        nnx.map_state(
            lambda path, w: (
                w if experts > 2 and ROUTING & {*path} else w.replace(jnp.zeros_like(w[...]))
            ),
            nnx.state(blocks),
        ),
    )
    places, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((hidden, positions)))
    following = [*script, *[script[-1]] * positions][: positions - prompt_tokens + 1]
    table = np.zeros((vocab_size, hidden), np.float32)
    for position, token in enumerate(following, prompt_tokens - 1):
        table[token] += places[:, position]
    size = hidden**0.5  # of what the last norm gives
    decoder.embedding[...] = jnp.asarray(table * 5 / size)
    # beside which tokens count for nothing
    decoder.positions[...] = jnp.asarray(places.T * 100, jnp.float32)
    jmoe.save_pretrained(LanguageModel(decoder), folder, eos_token_id=0)
    tokenizer.save(str(folder / "tokenizer.json"))


def describe(
    folder: Path, tokenizer_config: dict[str, Any], generation_config: dict[str, Any]
) -> None:
    """Write the files beside a model that say how it is used."""
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
