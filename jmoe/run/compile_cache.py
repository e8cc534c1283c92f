"""JAX's persistent compilation cache, so that a restarted process does not compile again."""

import errno
import logging
import os

import jax

from kernels_pallas import native

log = logging.getLogger("jmoe")


def enable_compile_cache() -> None:
    """Turn on JAX's compilation cache in $XDG_CACHE_HOME/jmoe/compiled, unless JAX already has a
    cache folder.

    If the folder cannot be made or written, programs are compiled at each start, and an info line
    says so. `JAX_COMPILATION_CACHE_DIR` selects another folder;
    `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = native.cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (native.NoWritableCacheError, OSError) as error:
        log.info("programs are compiled at each start: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
