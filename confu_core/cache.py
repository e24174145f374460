"""Keys and values of one run: fixed slots, committed slots, pending rows.

This is the only file in which rows of a cache move. The layout along the slot axis is

    | fixed F | committed P | pending R |  free ...

* *fixed* slots are constant for a run or a round: the soft prompts in the target's cache, the
  future token's entry in the draft's. They stand first so that passes which may not see them
  simply start their view behind them.
* *committed* slots hold the text so far.
* *pending* rows belong to the pass under way; `commit` keeps some and forgets the rest.

Sizes: L layers, B sequences, K key/value heads, D head width.
"""

from __future__ import annotations

import torch

from confu_core.errors import SettingsError


class KVCache:
    """A preallocated key/value cache that never grows: it is sized before the first pass.

    Args:
        layers, kv_heads, head_dim: sizes L, K, D.
        capacity: slots for committed and pending rows together (fixed slots come on top).
        fixed: number F of fixed slots.
        batch: number B of sequences that advance in step (decoding uses 1).
        device, dtype: where and how keys and values are kept.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        fixed: int = 0,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (2, layers, batch, kv_heads, fixed + capacity, head_dim)
        self._slots = torch.zeros(shape, device=device, dtype=dtype)
        self.fixed = fixed
        self.capacity = capacity
        self.length = 0
        self.pending = 0
        self._view_start = fixed

    def set_fixed(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the fixed slots; both tensors are (L, K, F, D), shared by all sequences."""
        self._slots[0, :, :, :, : self.fixed] = keys.unsqueeze(1)
        self._slots[1, :, :, :, : self.fixed] = values.unsqueeze(1)

    def open(self, rows: int, see_fixed: bool = False) -> None:
        """Make room for a pass of `rows` rows behind what is committed and pending.

        `see_fixed`: whether the pass views the fixed slots at all; its mask then says which of
        its rows may.

        Raises:
            SettingsError: the run needs more room than was reserved for it.
        """
        needed = self.length + self.pending + rows
        if needed > self.capacity:
            raise SettingsError(
                f"This run needs {needed} cache slots, but {self.capacity} were reserved. "
                "Lower the number of new tokens or the tree size."
            )
        self.pending += rows
        self._view_start = 0 if see_fixed else self.fixed

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the newest rows of one layer, return everything a row of this pass can reach.

        Args:
            keys, values: (B, K, R, D), the rows that the last `open` made room for.

        Returns:
            Two views (B, K, [F +] P + pending, D). No copy is made.
        """
        end = self.fixed + self.length + self.pending
        start = end - keys.shape[2]
        layer_keys, layer_values = self._slots[0, layer], self._slots[1, layer]
        layer_keys[:, :, start:end] = keys
        layer_values[:, :, start:end] = values
        first = self._view_start
        return layer_keys[:, :, first:end], layer_values[:, :, first:end]

    def commit(self, rows: list[int]) -> None:
        """Keep these pending rows, in this order, as committed; drop all other pending rows.

        `rows` are indices into the pending rows, strictly ascending, so a path of a tree whose
        parents come first can be kept as it is.
        """
        if rows != list(range(len(rows))):  # a leading run already stands where it belongs
            start = self.fixed + self.length
            source = torch.tensor(rows, device=self._slots.device) + start
            # index_select copies before the slice is overwritten, so overlap is harmless
            kept = self._slots.index_select(4, source)
            self._slots[:, :, :, :, start : start + len(rows)] = kept
        self.length += len(rows)
        self.pending = 0

    def select(self, sequences: torch.Tensor) -> None:
        """Keep these sequences of the batch (ascending indices) and forget the others."""
        self._slots = self._slots.index_select(2, sequences)

    def drop_pending(self) -> None:
        """Forget all pending rows (a draft tree's own rows, or a pass that was given up)."""
        self.pending = 0

    def keep(self, length: int) -> None:
        """Keep the first `length` committed rows."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} committed rows")
        self.length = length
        self.pending = 0

    def committed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the committed keys and values, both (L, B, K, P, D); for checks and reuse."""
        view = self._slots[:, :, :, :, self.fixed : self.fixed + self.length]
        return view[0], view[1]
