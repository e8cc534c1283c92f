"""Expert slots of inference on one device: each holds one expert of one layer, and is filled while
programs read others.

`policies.py` decides which expert is in which slot; the runner multiplies tokens by the slots'
weights.

Legend:
  T  tokens
  D  hidden size
  M  slots
  E  experts of a layer
  R  bytes of a slot
"""

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.layers.slot_experts import (
    MATRICES,
    ExpertInputs,
    ExpertProducts,
    StoredExpert,
    add_expert_outputs_in_bundles,
    expert_outputs_by_slot_table,
)
from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from jmoe.offload.slot_arrays import (
    Arrays,
    DeviceSlotArrays,
    Fields,
    NamedArrays,
    dtype_of_stored_bits,
    jax_view,
)
from kernels_pallas.compressed import SCALES, format_of
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.native import (
    MAX_ROWS,
    SIZE_MULTIPLE,
    SLOT_ARRAYS,
    ExpertByteOffsets,
    has_wide_vectors,
    slot_mlp,
)

TABLE_TILE_ROWS = 64

# the slots of one device as an operand of a program: bytes [M, R], or arrays [M, ...] by name
SlotOperand = jax.Array | dict[str, jax.Array]


class ExpertSlots(ABC):
    """M slots for one expert each.

    native: the slots as operands of native CPU operations; None if these are not used. fp8_inputs:
    see `ExpertProducts`.
    """

    native: "NativeSlots | None" = None  # see the class docstring

    def __init__(self, num_slots: int, fields: Fields, *, fp8_inputs: bool = False) -> None:
        self.fp8_inputs = fp8_inputs
        expert_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
        self.num_slots, self.num_bytes = num_slots, num_slots * expert_bytes

    @abstractmethod
    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot; any thread may call this.

        On CPU no program that reads this slot may be running.
        """

    @abstractmethod
    def add_expert_outputs(
        self, routed: ExpertInputs, table_E: np.ndarray, activation: str
    ) -> jax.Array | WeightedOutputs:
        """Return float32 [T, D]: `routed.y_TD` plus the weighted sum of each token's experts;
        perhaps as summands, for the kernel of the next layer that adds them.

        table_E: the slot of each expert.
        """

    @abstractmethod
    def layout_and_program_operand(self) -> tuple[ExpertByteOffsets | None, SlotOperand]:
        """Return (layout, slots): the slots as an operand of programs that look experts up in a
        table.

        With a layout, the operand is bytes [M, R] for native operations. With None, it is arrays
        [M, ...] by name, for `expert_outputs_in_tiles`.
        """


class HostSlots(ExpertSlots):
    """Slots of the CPU backend: host memory that XLA reads as arrays without a copy.

    native: for few tokens, use a native operation that reads the experts through the table, so that
    the host need not read the tokens' choices. int8_activations: see `ExpertByteOffsets`.
    """

    def __init__(
        self,
        num_slots: int,
        fields: Fields,
        *,
        native: bool = False,
        int8_activations: bool = False,
        fp8_inputs: bool = False,
    ) -> None:
        super().__init__(num_slots, fields, fp8_inputs=fp8_inputs)
        cpu = jax.local_devices(backend="cpu")[0]
        layout, slot_bytes = _field_layout(fields)
        memory = allocate_slots(num_slots, slot_bytes)
        self._memory = [
            {
                name: slot[at : at + size].view(dtype).reshape(shape)
                for name, (at, size, shape, dtype) in layout.items()
            }
            for slot in memory
        ]
        self._stored = [
            {name: jax_view(m, cpu) for name, m in slot.items()} for slot in self._memory
        ]
        offsets = {name: first_byte for name, (first_byte, *_) in layout.items()}
        self.native = (
            NativeSlots(jax_view(memory, cpu), fields, offsets, int8_activations=int8_activations)
            if native
            else None
        )

    def write(self, slot: int, record: NamedArrays) -> None:
        for name, memory in self._memory[slot].items():
            np.copyto(memory, record[name])

    def add_expert_outputs(
        self, routed: ExpertInputs, table_E: np.ndarray, activation: str
    ) -> jax.Array:
        h_TD = routed.h_TD
        if self.native is not None and self.native.should_compute_experts(
            h_TD.shape[0], h_TD.shape[1], h_TD.dtype
        ):
            return _native_mlp(
                self.native.layout,
                activation,
                routed.y_TD,
                *routed[:3],
                self.native.slots_MR,
                table_E,
            )
        products = ExpertProducts(activation, self.fp8_inputs)
        return add_expert_outputs_in_bundles(
            routed, [self._stored[slot] for slot in table_E], products
        )

    def layout_and_program_operand(self) -> tuple[ExpertByteOffsets | None, SlotOperand]:
        assert self.native is not None
        return self.native.layout, self.native.slots_MR

    def slot_views(self, slot: int) -> StoredExpert:
        """Return a slot's arrays by name, aliasing the slot's memory."""
        return self._stored[slot]


class NativeSlots:
    """All slots of `HostSlots` as one byte array [M, R], for native operations."""

    def __init__(
        self,
        slots_MR: jax.Array,
        fields: Fields,
        offsets: Mapping[str, int],
        *,
        int8_activations: bool = False,
    ) -> None:
        self.slots_MR = slots_MR
        kinds = {name: dtype_of_stored_bits(dtype) for name, (_, dtype) in fields.items()}
        biases = {dtype for name, dtype in kinds.items() if name.startswith("b_")}
        is_compressed = "w_up" + SCALES in fields
        matrices = {dtype for name, dtype in kinds.items() if name in ("w_up", "w_down")}
        floats = {np.dtype(np.float32), np.dtype(jnp.bfloat16)}
        form = format_of(fields["w_up"][1], fields["w_up" + SCALES][1]) if is_compressed else None
        is_read = matrices <= floats if form is None else form.native is not None
        self._is_known = len(matrices) == 1 and len(biases) < 2 and is_read
        self._dtype = None if is_compressed else kinds["w_up"]
        at = {name: offsets.get(name, -1) for name in SLOT_ARRAYS}
        hidden = fields["w_down"][0][0] * (form.per_byte if form else 1)
        self.layout = ExpertByteOffsets(
            **at,
            hidden=hidden,
            wide_biases=biases == {np.dtype(np.float32)},
            form=form,
            int8_activations=int8_activations,
        )

    def supports(self, num_tokens: int, dtype: DTypeLike) -> bool:
        """Return True if a native operation takes this many tokens of this dtype.

        The operation takes up to `MAX_ROWS` tokens, of the weights' dtype; compressed weights take
        tokens of any dtype.
        """
        return num_tokens <= MAX_ROWS and self._supports_dtype(dtype)

    def should_compute_experts(self, num_tokens: int, hidden_size: int, dtype: DTypeLike) -> bool:
        """Return True if the native operation should compute the experts of this many tokens.

        True for up to `MAX_ROWS` tokens, and for any number with `int8_activations`; otherwise for
        more if the sizes are multiples of `SIZE_MULTIPLE` and the CPU has AVX2, so that the
        operation is faster than XLA.
        """
        fits = hidden_size % SIZE_MULTIPLE == 0 and self.layout.hidden % SIZE_MULTIPLE == 0
        many = fits and has_wide_vectors()
        many |= self.layout.int8_activations
        return self._supports_dtype(dtype) and (many or num_tokens <= MAX_ROWS)

    def _supports_dtype(self, dtype: DTypeLike) -> bool:
        return self._is_known and self._dtype in (None, dtype)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _native_mlp(
    layout: ExpertByteOffsets, activation: str, y_TD: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Return `y_TD` plus the weighted sum of each token's experts, by a native CPU operation."""
    h_TD, idx_TK, weights_TK, slots_MR, table_E = arrays
    return slot_mlp((h_TD, idx_TK, weights_TK, y_TD), slots_MR, table_E, layout, activation)


def _field_layout(
    fields: Fields,
) -> tuple[dict[str, tuple[int, int, tuple[int, ...], np.dtype]], int]:
    """Return ({name: (first byte, bytes, shape, dtype)}, bytes of a slot).

    Each array begins at a page: XLA aliases only memory that is aligned to 64 bytes.
    """
    layout, end = {}, 0
    for name, (shape, dtype) in fields.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        layout[name] = (end, num_bytes, shape, dtype)
        end += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return layout, end


class DeviceSlots(ExpertSlots):
    """Slots in an accelerator's memory.

    The device runs an update in order with the programs that read the slots. as_bits: see
    `DeviceSlotArrays`.
    """

    def __init__(
        self,
        num_slots: int,
        fields: Fields,
        device: jax.Device,
        *,
        as_bits: bool = True,
        fp8_inputs: bool = False,
    ) -> None:
        super().__init__(num_slots, fields, fp8_inputs=fp8_inputs)
        flipped = MATRICES if fp8_inputs else ()
        self._slots = DeviceSlotArrays(
            num_slots, fields, device, as_bits=as_bits, transposed=flipped
        )
        # an update donates the arrays, so no program may be launched with them meanwhile
        self._lock = threading.Lock()

    def write(self, slot: int, record: NamedArrays) -> None:
        sent = self._slots.copy_to_device(record)
        with self._lock:
            self._slots.store_in_slot(slot, sent)

    def add_expert_outputs(
        self, routed: ExpertInputs, table_E: np.ndarray, activation: str
    ) -> jax.Array | WeightedOutputs:
        products = ExpertProducts(activation, self.fp8_inputs)
        with self._lock:
            return expert_outputs_in_tiles(products, routed, self._slots.arrays, table_E)

    def layout_and_program_operand(self) -> tuple[ExpertByteOffsets | None, SlotOperand]:
        return None, self._slots.arrays

    @contextlib.contextmanager
    def locked_arrays(self) -> Iterator[Arrays]:
        """Yield the arrays [M, ...] by name; until the block ends, no write replaces them."""
        with self._lock:
            yield self._slots.arrays


@partial(jax.jit, static_argnums=0)
def expert_outputs_in_tiles(
    products: ExpertProducts,
    routed: ExpertInputs,
    slots: dict[str, jax.Array],
    table_E: jax.Array,
) -> jax.Array | WeightedOutputs:
    """Return the result of `expert_outputs_by_slot_table`, with tiles of at most `TABLE_TILE_ROWS`
    tokens.
    """
    tile_rows = min(TABLE_TILE_ROWS, routed.h_TD.shape[0])
    return expert_outputs_by_slot_table(
        routed, slots, table_E, products=products, tile_rows=tile_rows
    )
