"""AdamW on the host's cores: numpy in float64, and XLA's bits on every instruction set.

Legend: W steps of a call.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import OptimizerConfig
from jmoe.offload.expert_updates import _bias_corrections
from jmoe.offload.lazy_adamw import MissedSteps, StepHistory, catch_up_arrays
from kernels_pallas import native
from kernels_pallas.native import adamw
from kernels_pallas.native.library import (
    FLAGS,
    INSTRUCTION_SETS,
    _find_compiler,
    usable_instruction_sets,
)

pytestmark = pytest.mark.usefixtures("full_compilation")  # whose bits they are
CONFIG = OptimizerConfig(weight_decay=0.2)
SETTINGS = native.AdamWSettings(CONFIG.beta1, CONFIG.beta2, CONFIG.eps, CONFIG.weight_decay)
BFLOAT16 = np.dtype(jnp.bfloat16)
SOURCES = Path(adamw.__file__).parent
# one number, parts of a register, registers, and several tasks with a part of a register
SIZES = (1, 3, 15, 16, 17, 31, 65, 1000, 2 * 32768 + 7)


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    try:
        return native.load()
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")


def drawn(size: int, seed: int = 0, smallest: int = 0) -> list[np.ndarray]:
    """(w, m, v, g), float32; of the last three numbers from 10^smallest on, zeros among them."""
    rng = np.random.default_rng(seed)
    w, *others = rng.normal(size=(4, size))
    scaled = [x * 10.0 ** rng.integers(smallest, 1, size) for x in others]
    m, v, g = (np.where(rng.random(size) < 0.1, 0, x) for x in scaled)
    return [x.astype(np.float32) for x in (w, m, v * v, g)]


def history(first: int, count: int) -> MissedSteps:
    rng = np.random.default_rng(first)
    lr, clip = rng.uniform(1e-4, 1e-2, count), rng.uniform(0.1, 1, count).astype(np.float32)
    (window,) = StepHistory(first, lr, clip.tolist()).missed_windows(
        range(first, first + count), pending=True
    )
    return window


def steps_of(window: MissedSteps) -> native.HostAdamWSteps:
    first, count = int(window.step), int(window.num_steps)  # type: ignore[arg-type]
    factors = np.array(
        [_bias_corrections(CONFIG, t) for t in range(first, first + count)], np.float32
    )
    lr_W = np.asarray(window.lr_W)[:count]
    return native.HostAdamWSteps(lr_W, *factors.T, clip=float(window.clip))  # type: ignore[arg-type]


def update(
    arrays: list[np.ndarray], window: MissedSteps, *, decay: bool = True, copy: Any = None
) -> list[np.ndarray]:
    """Return the new (w, m, v)."""
    *state, g = arrays
    w, m, v = (x.copy() for x in state)
    parameter = native.HostParameter(w, m, v, g, copy, decay)
    native.adamw_in_place([parameter], steps_of(window), SETTINGS)
    return [w, m, v]


def by_xla(arrays: list[np.ndarray], window: MissedSteps) -> list[np.ndarray]:
    """Return the new (w, m, v); weight decay applies."""
    named = [{"w": x.reshape(-1, 1)} for x in arrays]
    return [np.ravel(x["w"]) for x in catch_up_arrays(*named, [window], config=CONFIG)]


def assert_same_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "none"])
@pytest.mark.parametrize("decay", [True, False])
def test_it_is_adamw_in_float64(decay: bool, kind: str) -> None:
    for size in SIZES:
        w, m, v, g = drawn(size)
        g = g.astype(BFLOAT16) if kind == "bfloat16" else g
        window = history(3, 5)
        got = update([w, m, v, None if kind == "none" else g], window, decay=decay)  # type: ignore[list-item]
        want_w, want_m, want_v = (x.astype(np.float64) for x in (w, m, v))
        for i, lr in enumerate(np.asarray(window.lr_W, np.float64)[:5]):
            has = i == 0 and kind != "none"
            now = g.astype(np.float64) * float(window.clip) * has  # type: ignore[arg-type]
            want_m = CONFIG.beta1 * want_m + (1 - CONFIG.beta1) * now
            want_v = CONFIG.beta2 * want_v + (1 - CONFIG.beta2) * now * now
            t = 3 + i + 1
            step = want_m / (1 - CONFIG.beta1**t)
            step /= np.sqrt(want_v / (1 - CONFIG.beta2**t)) + CONFIG.eps
            want_w = want_w - lr * (step + decay * CONFIG.weight_decay * want_w)
        for ours, want in zip(got, (want_w, want_m, want_v), strict=True):
            np.testing.assert_allclose(ours, want, rtol=3e-5, atol=1e-6)


def test_its_bits_are_xlas() -> None:
    """With subnormal numbers and zeros, one step and many, early and late."""
    for size in SIZES:
        arrays = drawn(size, seed=size, smallest=-44)
        for first, count in ((0, 1), (5, 1), (700, 7), (20_000, 64)):
            window = history(first, count)
            assert_same_bits(update(arrays, window), by_xla(arrays, window))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("sse4", "avx2") else pytest.mark.slow)
        for name in usable_instruction_sets()
        if name != "native"
    ],
)
def test_every_instruction_set_has_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "adamw.so"
    files = [str(SOURCES / file) for file in ("adamw.cc", "parallel.cc")]
    command = [_find_compiler(), *FLAGS, *INSTRUCTION_SETS[name][1], "-shared", *files, "-o"]
    subprocess.run([*command, str(made)], check=True)
    library = adamw._open_library(made)
    monkeypatch.setattr(adamw, "_load_library", lambda: library)
    for size in SIZES:
        arrays, window = drawn(size, smallest=-44), history(9, 3)
        copy = np.zeros(size, BFLOAT16)
        ours = update(arrays, window, copy=copy)
        assert_same_bits(ours, by_xla(arrays, window))
        np.testing.assert_array_equal(copy.view(np.uint16), rounded(ours[0]))


def rounded(w: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, by XLA."""
    return np.asarray(jnp.asarray(w).astype(jnp.bfloat16)).view(np.uint16)


def test_arrays_may_begin_anywhere() -> None:
    for size in SIZES:
        arrays, window = drawn(size), history(2, 2)
        aligned = update(arrays, window)
        moved = [np.zeros(size + 1, np.float32)[1:] for _ in range(3)]
        for to, x in zip(moved, arrays, strict=False):
            to[:] = x
        wide = np.zeros(4 * size + 3, np.uint8)
        g = np.frombuffer(wide.data, np.float32, size, offset=3)  # at an odd address
        wide[3:] = arrays[3].view(np.uint8)
        copy = np.frombuffer(bytearray(2 * size + 1), BFLOAT16, size, offset=1)
        parameter = native.HostParameter(*moved, g, copy, True)
        native.adamw_in_place([parameter], steps_of(window), SETTINGS)
        assert_same_bits(moved, aligned)
        np.testing.assert_array_equal(np.frombuffer(copy.tobytes(), np.uint16), rounded(aligned[0]))


def test_several_parameters_at_once() -> None:
    """Each with its own size and its own answers, beside one another on all cores."""
    window, all_arrays = history(4, 2), [drawn(size, seed=size) for size in SIZES]
    states = [[x.copy() for x in arrays[:3]] for arrays in all_arrays]
    parameters = [
        native.HostParameter(*state, arrays[3], None, True)
        for state, arrays in zip(states, all_arrays, strict=True)
    ]
    native.adamw_in_place(parameters, steps_of(window), SETTINGS)
    for state, arrays in zip(states, all_arrays, strict=True):
        assert_same_bits(state, update(arrays, window))


def test_two_threads_at_once() -> None:
    window = history(1, 1)
    each = [drawn(100_003, seed=seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(partial(update, window=window), each))
    for ours, arrays in zip(together, each, strict=True):
        assert_same_bits(ours, update(arrays, window))


def test_the_caller_still_has_subnormal_numbers() -> None:
    update(drawn(100), history(0, 1))
    assert np.float32(1e-40) * np.float32(1) > 0


def test_rounding_to_bfloat16() -> None:
    for size in SIZES:
        w = drawn(size)[0]
        w[:: max(1, size // 3)] = np.float32(-0.0)
        w[-1] = np.inf
        to = np.zeros(size, BFLOAT16)
        native.round_to_bfloat16([(w, to)])
        np.testing.assert_array_equal(to.view(np.uint16), rounded(w))
    to = np.zeros(17, BFLOAT16)
    native.round_to_bfloat16([(np.full(17, np.nan, np.float32), to)])
    assert np.isnan(to.astype(np.float32)).all()


@pytest.mark.parametrize(
    "change",
    [
        {"w": np.zeros(4)},
        {"m": np.zeros(3, np.float32)},
        {"v": np.zeros(8, np.float32)[::2]},
        {"g": np.zeros(4, np.float16)},
        {"copy": np.zeros(4, np.uint16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_arrays_are_refused(change: dict[str, Any]) -> None:
    """Their memory would be read as something else, or beyond its end."""
    zeros = [np.zeros(4, np.float32) for _ in range(4)]
    parameter = native.HostParameter(*zeros, np.zeros(4, BFLOAT16), True)._replace(**change)
    with pytest.raises(ValueError, match="must be C-contiguous, of 4 elements and one of"):
        native.adamw_in_place([parameter], steps_of(history(0, 1)), SETTINGS)
