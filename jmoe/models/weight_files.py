"""The tensors of a model's folder, from safetensors files or a GGUF file."""

from pathlib import Path

from jmoe.models.folder import has_file
from jmoe.models.gguf.file import read_gguf
from jmoe.models.gguf.names import split_heads
from jmoe.models.safetensors_io import StoredTensor, read_headers

GGUF_LINK = "model.gguf"  # a link to the weights in the folder that `gguf_folder` writes


def read_weight_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by name.

    Raises ValueError naming the file that is missing, truncated or inconsistent.
    """
    if has_file(folder / GGUF_LINK):
        return split_heads(read_gguf(folder / GGUF_LINK).tensors)
    return read_headers(folder)
