"""Write a checkpoint of random bfloat16 weights.

    python benchmarks/serve/random_model.py CONFIG.json FOLDER

CONFIG.json is that of a Hugging Face model. The last line is one JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import json
from pathlib import Path

from benchmarks.lib import report


def main() -> None:
    """Draw the weights on the device and write them."""
    import flax.nnx as nnx
    import jax
    import jax.numpy as jnp

    from jmoe.models.decoder import Decoder
    from jmoe.models.huggingface import model_config
    from jmoe.models.pretrained import LanguageModel, save_pretrained

    parser = report.parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    a = parser.parse_args()

    @nnx.jit
    def draw() -> Decoder:
        decoder = Decoder(model_config(json.loads(a.config.read_text())), rngs=nnx.Rngs(0))
        narrow = lambda w: w.astype(jnp.bfloat16) if w.dtype == jnp.float32 else w  # noqa: E731
        nnx.update(decoder, jax.tree.map(narrow, nnx.state(decoder)))
        return decoder

    save_pretrained(LanguageModel(draw()), a.folder)
    files = sorted(a.folder.glob("*.safetensors"))
    report.finish({"folder": str(a.folder), "bytes": sum(file.stat().st_size for file in files)})


if __name__ == "__main__":
    main()
