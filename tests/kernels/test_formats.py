"""The table of compressed formats: one row has everything, and nothing else lists the formats."""

import re
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config.engine import EngineConfig
from jmoe.deploy.expert_layouts import LAYOUTS
from jmoe.models.mxfp4 import decode_mxfp4
from jmoe.offload.slots import HostSlots
from kernels_pallas import compressed
from kernels_pallas.compressed import SCALES, compress, decode_e2m1, decompress, stored_fields
from kernels_pallas.formats import EXPERT_DTYPES, FORMATS, Format, FormatName
from kernels_pallas.grouped_matmul import triton
from kernels_pallas.grouped_matmul.mosaic_gpu import WeightSlots, grouped_matmul
from tests.tiny_engines import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
formats = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


def test_names() -> None:
    assert list(FORMATS) == list(get_args(FormatName)) == [f.name for f in FORMATS.values()]
    assert set(EXPERT_DTYPES) == {"wide", *FORMATS}
    given: list[Any] = list(EXPERT_DTYPES)
    assert all(EngineConfig(expert_dtype=name).expert_dtype == name for name in given)


def test_a_format_is_told_by_the_dtypes_of_its_arrays() -> None:
    assert len({(f.values, f.scales) for f in FORMATS.values()}) == len(FORMATS)


def test_every_format_has_its_functions() -> None:
    assert compressed._CODECS.keys() == FORMATS.keys()
    assert LAYOUTS.keys() <= FORMATS.keys()
    assert all(layout.kind is FORMATS[name] for name, layout in LAYOUTS.items())


@formats
def test_the_numbers_of_the_native_kernels(kind: Format) -> None:
    """As `rows.h` has them."""
    text = (ROOT / "kernels_pallas" / "native" / "rows.h").read_text()
    (names,) = re.findall(r"enum class Format \{(.*?)\}", text)
    numbers = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", names)}
    assert numbers.get(kind.name.capitalize()) == kind.native


@formats
def test_bits_per_weight(kind: Format) -> None:
    """As the arrays have them, and as the page and the option's comment say."""
    stored = compress(np.ones((256, 128), np.float32), kind)
    assert kind.bits_per_weight == 8 * sum(x.nbytes for x in stored) / (256 * 128)
    row = f"| `{kind.name}` | {kind.bits_per_weight:g} |"
    assert row in (ROOT / "docs" / "inference.md").read_text()
    assert f"{kind.bits_per_weight:g}" in (ROOT / "jmoe" / "config" / "engine.py").read_text()


def test_all_codes_of_four_bit_floats() -> None:
    """Bit for bit: on the host, on the device, and as an array of float4."""
    codes = np.arange(256, dtype=np.uint8)
    low_first = np.stack([codes & 15, codes >> 4], axis=1).reshape(1, -1)
    expected = low_first.view(jnp.float4_e2m1fn).astype(np.float32)
    found = decode_mxfp4(codes[None], np.full((1, 16), 127, np.uint8))
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    on_device = np.asarray(decode_e2m1(jnp.asarray(low_first)))
    assert np.array_equal(on_device.view(np.uint32), expected.view(np.uint32))


def test_all_bytes_of_eight_bit_floats() -> None:
    values = np.arange(256, dtype=np.uint8)[:, None]
    wide = decompress(jnp.asarray(values), jnp.ones((2, 1), jnp.float32), jnp.float32)
    expected = values.view(jnp.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(np.asarray(wide).view(np.uint32), expected.view(np.uint32))


def test_all_scales_of_mxfp4() -> None:
    """2^(s - 127), of every byte, on the host; 0 and 255 are beyond float32's normal numbers."""
    scales = np.arange(256, dtype=np.uint8)[None]
    ones = np.full((1, 256 * 16), 0x22, np.uint8)  # two values of 1.0 a byte
    with np.errstate(over="ignore"):
        found = decode_mxfp4(ones, scales)[0, ::32]
        assert np.array_equal(found, np.ldexp(np.float32(1), np.arange(256) - 127))


def test_kernels_leave_a_format_that_they_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes it then: neither C++ nor Mosaic GPU nor Triton decodes it as another."""
    needs_compiler()
    kind = Format("int6", 1, "int8", "float32", 64)  # type: ignore[arg-type]
    monkeypatch.setitem(FORMATS, kind.name, kind)
    fields = stored_fields(kind, "w_up", (64, 128)) | stored_fields(kind, "w_down", (64, 64))
    slots = HostSlots(1, fields, native=True).native
    assert slots is not None and not slots.supports(1, jnp.bfloat16)
    assert not slots.should_compute_experts(1, 64, jnp.bfloat16)
    w = jnp.zeros((1, 64, 128), jnp.int8)
    scales = jnp.zeros((1, 1, 128), jnp.float32)
    x, one = jnp.zeros((8, 64), jnp.bfloat16), jnp.ones(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="weights in the format int6"):
        grouped_matmul(x, w, 8 * one, slots=WeightSlots(0 * one, scales))
    with pytest.raises(NotImplementedError, match="weights in the format int6"):
        triton.grouped_matmul(x, w, 8 * one, slots=WeightSlots(0 * one, scales))
    assert w.dtype == fields["w_up"][1] and scales.dtype == fields["w_up" + SCALES][1]
