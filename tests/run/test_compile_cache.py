"""Where compiled programs are kept."""

from pathlib import Path

import jax
import pytest

from jmoe.run.compile_cache import enable_compile_cache

FOLDER = "jax_compilation_cache_dir"
SETTINGS = (
    FOLDER,
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def test_programs_are_kept_in_the_users_cache_unless_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: jax.config.values[name] for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update(FOLDER, str(tmp_path / "given"))
        enable_compile_cache()
        assert jax.config.values[FOLDER] == str(tmp_path / "given")
        jax.config.update(FOLDER, None)
        enable_compile_cache()
        assert [jax.config.values[name] for name in SETTINGS] == [
            str(tmp_path / "jmoe" / "compiled"),
            0,
            -1,
        ]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
