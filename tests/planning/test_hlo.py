"""What an optimized module says of loops, fusions, slices and updates in place."""

import pytest

from jmoe.planning.hlo import HloArray, dot_flops, parse_hlo

MODULE = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,1024]{1,0})->f32[8,1024]{1,0}}

%sliced (p0: f32[8,1024], p1: s32[], p2: f32[1,1024]) -> f32[8,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %p2 = f32[1,1024]{1,0} parameter(2)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,1024}
  %sum = f32[1,1024]{1,0} add(%row, %p2)
  ROOT %put = f32[8,1024]{1,0} dynamic-update-slice(%p0, %sum, %p1, %zero)
}

%widened (q0: bf16[8,1024]) -> (f32[8,1024], bf16[4,1024]) {
  %q0 = bf16[8,1024]{1,0} parameter(0)
  %wide = f32[8,1024]{1,0} convert(%q0)
  %half = bf16[4,1024]{1,0} slice(%q0), slice={[0:4], [0:1024]}
  ROOT %both = (f32[8,1024]{1,0}, /*index=1*/bf16[4,1024]{1,0}) tuple(%wide, %half)
}

%scattered (s0: f32[4096,64], s1: s32[16], s2: f32[16,64]) -> f32[4096,64] {
  %s0 = f32[4096,64]{1,0} parameter(0)
  %s1 = s32[16]{0} parameter(1)
  %s2 = f32[16,64]{1,0} parameter(2)
  ROOT %add = f32[4096,64]{1,0} scatter(%s0, %s1, %s2), to_apply=%plus
}

%body (at: (s32[], f32[8,1024])) -> (s32[], f32[8,1024]) {
  %at = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%at), index=0
  %x = f32[8,1024]{1,0} get-tuple-element(%at), index=1
  %new = f32[8,1024]{1,0} fusion(%x, %i, %row), kind=kLoop, calls=%sliced
  ROOT %out = (s32[], f32[8,1024]{1,0}) tuple(%i, %new)
}

ENTRY %main (x: f32[8,1024]) -> f32[8,1024] {
  %x.1 = f32[8,1024]{1,0} parameter(0), metadata={op_name="x"}
  %pair = (s32[], f32[8,1024]{1,0}) tuple(%zero.1, %x.1)
  %loop = (s32[], f32[8,1024]{1,0}) while(%pair), condition=%test, body=%body, \
metadata={op_name="jit(step)/loss/while"}, backend_config={"known_trip_count":{"n":"12"}}
  %product = f32[16,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %result = f32[8,1024]{1,0} get-tuple-element(%loop), index=1
}
"""
ROW = 1024 * 4


def test_operations_and_loops() -> None:
    module = parse_hlo(MODULE)
    loop = module.entry["loop"]
    assert (loop.kind, loop.known_trip_count, loop.scope) == ("while", 12, "jit(step)/loss/while")
    assert module.called_computation(loop, "body")["new"].operands == ("x", "i", "row")
    assert module.entry["product"].known_trip_count is None
    assert loop.results == (HloArray("s32", ()), HloArray("f32", (8, 1024)))
    assert module.entry.root.name == "result"


def test_a_slice_counts_by_its_own_size_and_an_update_by_what_it_writes() -> None:
    body = parse_hlo(MODULE).computations["sliced"]
    assert body.read_bytes() == ROW + ROW + 4  # a row of p0, p2, the index
    assert body.written_bytes() == ROW


def test_what_is_read_whole_counts_once() -> None:
    body = parse_hlo(MODULE).computations["widened"]
    assert body.read_bytes() == 8 * 1024 * 2
    assert body.written_bytes() == 8 * ROW + 4 * 1024 * 2


def test_a_scatter_moves_its_updates_alone() -> None:
    body = parse_hlo(MODULE).computations["scattered"]
    assert body.read_bytes() == 16 * 4 + 16 * 64 * 4
    assert body.written_bytes() == 2 * 16 * 64 * 4


def test_flops_of_a_product() -> None:
    product = parse_hlo(MODULE).entry["product"]
    assert dot_flops(product, HloArray("bf16", (16, 64))) == 2 * 16 * 32 * 64


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bf16", 6), ("s4", 1.5), ("f8e4m3fn", 3), ("f64", 24)]
)
def test_bytes_by_dtype(dtype: str, num_bytes: float) -> None:
    assert parse_hlo(f"ENTRY %e (p: s32[]) -> s32[] {{\n  ROOT %a = {dtype}[3]{{0}} f()\n}}").entry[
        "a"
    ].num_bytes == (num_bytes)


def test_a_text_that_is_no_module() -> None:
    with pytest.raises(ValueError, match="module: must be the text of an XLA module"):
        parse_hlo("module @jit_step {}")
