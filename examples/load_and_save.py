"""Load a Hugging Face checkpoint, compute logits, and save a copy.

Usage: python examples/load_and_save.py FOLDER COPY
"""

import sys

import jax.numpy as jnp

import jmoe

if len(sys.argv) != 3:
    sys.exit(__doc__)
folder, copy = sys.argv[1:]
model = jmoe.load_pretrained(folder, dtype="float32")
tokens_BS = jnp.arange(8, dtype=jnp.int32)[None]
logits_BSV = model(tokens_BS)
print(f"most likely next tokens {logits_BSV.argmax(axis=-1)[0].tolist()}")
jmoe.save_pretrained(model, copy)
print(
    f"the copy gives the same: {bool((jmoe.load_pretrained(copy)(tokens_BS) == logits_BSV).all())}"
)
