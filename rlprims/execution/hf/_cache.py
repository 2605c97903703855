"""See :class:`RoomyLayer`."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer with room for more: a token is written into it, and nothing before it is copied."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        used, total = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self._room is None or total > self._room[0].shape[-2]:
            self._room = _with_room(self.keys, total + total // 2), _with_room(self.values, total + total // 2)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., used:total, :] = new
        self.keys, self.values = (room[..., :total, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._room is None:
            super().batch_select_indices(indices)
            return
        total = self.keys.shape[-2]
        self._room = self._room[0].index_select(0, indices), self._room[1].index_select(0, indices)
        self.keys, self.values = (room[..., :total, :] for room in self._room)


def _with_room(x: Tensor, length: int) -> Tensor:
    room = x.new_empty(*x.shape[:-2], length, x.shape[-1])
    room[..., : x.shape[-2], :] = x
    return room
