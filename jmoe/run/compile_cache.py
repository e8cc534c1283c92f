"""Compiled programs kept on disk from one process to the next."""

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Let JAX keep every program in $XDG_CACHE_HOME/jmoe/compiled, unless it has been given a folder already.

    `JAX_COMPILATION_CACHE_DIR` chooses another one, `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jmoe" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
