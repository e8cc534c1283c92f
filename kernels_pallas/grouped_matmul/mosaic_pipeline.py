"""The pipeline of the Hopper kernels: one warpgroup copies, two multiply what it copied.

A kernel describes its tiles as a `Pipeline`: how a step is copied and multiplied, and how a tile's
sums are stored. Copies run up to as many steps ahead as there are stages, across the end of a tile,
so that the tensor cores do not wait while a finished tile is stored.

Legend: N rows sorted by group, E groups, M tiles; wg: a warpgroup, 128 threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import Launch, Ref, Scratch

ALIGN = 8
ROWS = 128
BAND = 16  # consecutive row tiles that use the same column tile of the weights
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 40, 232
Place = tuple[jax.Array, ...]  # the location of a tile, as a kernel describes it


@dataclass(frozen=True)
class Pipeline:
    """The tiles of one block, and what its warpgroups do with them.

    steps_and_place_of(i): (number of steps, place) of the block's i-th tile.
    copy(place, k, stage, barrier): starts the copies of step k into buffer `stage`.
    multiply(accumulators, place, k, stage): starts `num_products` products into
    accumulators of `sums_shapes`. store(sums, place): stores a tile.
    """

    num_tiles: jax.Array
    steps_and_place_of: Callable[[jax.Array], tuple[jax.Array | int, Place]]
    copy: Callable[[Place, jax.Array, jax.Array, Ref], None]
    multiply: Callable[[Sequence[Ref], Place, jax.Array, jax.Array], None]
    store: Callable[[list[jax.Array], Place], None]
    sums_shapes: Sequence[tuple[int, int]]
    num_products: int = 1

    def run(self, wg: jax.Array, full: Ref, empty: Ref) -> None:
        """Run warpgroup `wg` of the block. full: barriers of steps that have arrived; empty: of
        steps that both multiplying warpgroups released.
        """

        @pl.when(wg == 2)
        def copy_tiles() -> None:
            self._copy_tiles(full, empty)

        @pl.when(wg < 2)
        def multiply_tiles() -> None:
            self._multiply_tiles(full, empty)

    def _copy_tiles(self, full: Ref, empty: Ref) -> None:
        """Copy all steps of all tiles, as far ahead as there are stages."""
        num_stages = full.shape[0]
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

        def copy_tile(i: jax.Array, done: jax.Array) -> jax.Array:
            num_steps, place = self.steps_and_place_of(i)

            def copy_step(k: jax.Array, done: jax.Array) -> jax.Array:
                stage = lax.rem(done, jnp.int32(num_stages))

                @pl.when(done >= num_stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[stage])

                self.copy(place, k, stage, full.at[stage])
                return done + 1

            return lax.fori_loop(0, num_steps, copy_step, done)

        lax.fori_loop(0, self.num_tiles, copy_tile, jnp.int32(0))

    def _multiply_tiles(self, full: Ref, empty: Ref) -> None:
        """Wait for each step, multiply it, and release the previous step's buffer; store each
        tile.
        """
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        num_stages = full.shape[0]

        def multiply_tile(i: jax.Array, done: jax.Array) -> jax.Array:
            num_steps, place = self.steps_and_place_of(i)

            def accumulate_steps(*accs: Ref) -> list[jax.Array]:
                def multiply_step(k: jax.Array, done: jax.Array) -> jax.Array:
                    stage = lax.rem(done, jnp.int32(num_stages))
                    plgpu.barrier_wait(full.at[stage])
                    self.multiply(accs, place, k, stage)
                    plgpu.wgmma_wait(self.num_products)

                    @pl.when(k > 0)
                    def _() -> None:
                        _release_previous(empty, done)

                    return done + 1

                lax.fori_loop(0, num_steps, multiply_step, done)
                return [acc[...] for acc in accs]

            accumulators = [
                plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in self.sums_shapes
            ]
            sums = pl.run_scoped(accumulate_steps, *accumulators)
            done = done + num_steps

            @pl.when(num_steps > 0)
            def _() -> None:
                _release_previous(empty, done)

            self.store(sums, place)
            return done

        lax.fori_loop(0, self.num_tiles, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _release_previous(empty: Ref, done: jax.Array) -> None:
    """Release the buffer of the step before step `done`."""
    num_stages = empty.shape[0]
    plgpu.barrier_arrive(empty.at[lax.rem(done + (num_stages - 1), jnp.int32(num_stages))])


def pipelined_kernel(
    body: Callable[..., None],
    out_type: jax.ShapeDtypeStruct,
    scratch: Sequence[Scratch],
    launch: Launch,
    *,
    copies_per_step: int,
    num_stages: int,
) -> Callable[..., jax.Array]:
    """Return a kernel whose body runs a `Pipeline`. The body's last two references are its barriers
    `full` and `empty`.

    copies_per_step: copies that a step waits for, of x, weights and scales.
    """
    barriers = [
        plgpu.Barrier(num_arrivals=n, num_barriers=num_stages) for n in (copies_per_step, 2)
    ]
    return launch.make_kernel(body, out_type, [*scratch, *barriers], num_warpgroups=3)


def pad_to_whole_tiles(x_ND: jax.Array) -> jax.Array:
    """Return x with zero rows appended if a tile would reach past its end."""
    num_rows = x_ND.shape[0]
    wanted = max(ROWS, pl.cdiv(num_rows, ALIGN) * ALIGN)
    return x_ND if wanted == num_rows else jnp.pad(x_ND, ((0, wanted - num_rows), (0, 0)))


def group_bounds(group_sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each group's (first row, end row, first row rounded down to a multiple of ALIGN)."""
    ends_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    starts_E = ends_E - group_sizes_E.astype(jnp.int32)
    return starts_E, ends_E, starts_E // ALIGN * ALIGN


def row_tiles(group_sizes_E: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return (number of tiles [1], tiles [4, M]): each tile's group, first row, and the start and
    end of the group's rows in it.
    """
    num_groups = group_sizes_E.shape[0]
    starts_E, ends_E, aligned_E = group_bounds(group_sizes_E)
    tiles_E = jnp.where(group_sizes_E > 0, pl.cdiv(ends_E - aligned_E, jnp.int32(ROWS)), 0)
    tile_ends_E = jnp.cumsum(tiles_E, dtype=jnp.int32)
    at_M = jnp.arange((num_rows + (ALIGN - 1) * num_groups) // ROWS + num_groups, dtype=jnp.int32)
    group_M = (at_M[:, None] >= tile_ends_E).sum(axis=-1, dtype=jnp.int32)
    group_M = jnp.minimum(group_M, num_groups - 1)
    first_M = aligned_E[group_M] + (at_M - (tile_ends_E - tiles_E)[group_M]) * ROWS
    from_M = jnp.maximum(first_M, starts_E[group_M])
    to_M = jnp.minimum(first_M + ROWS, ends_E[group_M])
    first_M = jnp.minimum(first_M, num_rows - ROWS)
    return tile_ends_E[-1:], jnp.stack([group_M, first_M, from_M, to_M])


def snake_tile(index: jax.Array, num_m: jax.Array | int, num_n: int) -> tuple[jax.Array, jax.Array]:
    """Return tile (m, n) of an index that runs down BAND rows of tiles, then to the next column."""
    band = index // (BAND * num_n)
    height = jnp.minimum(BAND, num_m - band * BAND)
    within = index - band * (BAND * num_n)
    n = within // height
    return band * BAND + within - n * height, n
