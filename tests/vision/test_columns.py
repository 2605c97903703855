"""The law of columns with images: whatever a batch goes through, every row keeps its images, and a group has them once.

It also binds pixels as other trainers keep them: a jagged column with another number of patches in each row.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig
from rlprims.execution.hf._micro_batches import SINGLE_PROCESS, parts_of
from rlprims.runs.checkpoint import load_groups, save_groups
from rlprims.trainer.old_groups import OldGroups, OldGroupsConfig
from rlprims.trainer.scoring.columns import by_group, same_widths
from rlprims.trainer.scoring.groups import join_groups
from rlprims.trainer.update import mini_batches

GROUPS, SIZE = 6, 4
BYTES = 10_000
"""Of an image."""


def images_of(group: int) -> tuple[bytes, ...]:
    """Of group 0 none, of the others one or two."""
    generator = np.random.Generator(np.random.Philox(group))
    return tuple(generator.bytes(BYTES) for _ in range(group if group < 2 else 1 + group % 2))


def pixels_of(group: int) -> torch.Tensor:
    """As many patches as the number of the group says, of two numbers each."""
    return torch.arange(2.0 * group).reshape(group, 2) + 100 * group


def group_rows(group: int) -> DataProto:
    images, ids = images_of(group), torch.arange(SIZE)
    attention = torch.ones(SIZE, 7, dtype=torch.bool)
    return DataProto.from_dict(
        {
            "group": torch.full((SIZE,), group),
            "sample_id": SIZE * group + ids,
            "prompts": torch.full((SIZE, 4), group),
            "responses": torch.ones(SIZE, 3, dtype=torch.int64),
            "attention_mask": attention,
            "response_mask": attention[:, 4:],
            "weights_version": torch.zeros(SIZE, dtype=torch.int64),
            "pixel_values": torch.nested.nested_tensor([pixels_of(group)] * SIZE, layout=torch.jagged),
        },
        {"images": [images] * SIZE},
    )


GROUP = [group_rows(group) for group in range(GROUPS)]
BATCH = DataProto.concat(GROUP)


def holds(batch: DataProto, rows: int = GROUPS * SIZE) -> None:
    """The law."""
    assert len(batch) == rows
    for i, group in enumerate(batch["group"].tolist()):
        assert batch["images"][i] == images_of(group)
        assert torch.equal(batch[i].batch["pixel_values"], pixels_of(group))


ORDER = np.random.Generator(np.random.Philox(3)).permutation(GROUPS * SIZE)
MOVES: dict[str, tuple[Callable[[DataProto], DataProto], int]] = {
    "as it is": (lambda batch: batch, 24),
    "a slice": (lambda batch: batch[5:17], 12),
    "a mask": (lambda batch: batch[batch["sample_id"] % 3 == 0], 8),
    "chosen rows": (lambda batch: batch.select_idxs([23, 0, 0, 7]), 4),
    "chosen columns": (lambda batch: batch.select(["group", "pixel_values"], ["images"]), 24),
    "reordered": (lambda batch: batch.select_idxs(ORDER), 24),
    "joined with columns": (lambda batch: batch.union(DataProto.from_dict({"scores": torch.zeros(24)})), 24),
    "concatenated": (lambda batch: DataProto.concat([batch[20:], batch[:20]]), 24),
    "chunks": (lambda batch: DataProto.concat(batch.chunk(4)[::-1]), 24),
    "parts": (lambda batch: DataProto.concat(batch.split(7)[::-1]), 24),
    "repeated": (lambda batch: batch.repeat(3), 72),
    "padded to a multiple": (lambda batch: batch.pad_to_divisor(9)[0], 27),
    "padded and unpadded": (lambda batch: batch.pad_to_divisor(9)[0].unpad(3), 24),
    "by group": (lambda batch: DataProto.concat(list(by_group(batch).values())), 24),
    "a micro-batch of rows": (
        lambda batch: batch.select_idxs(micro_batches([4] * 24, [3] * 24, None, max_tokens=30)[2]),
        4,
    ),
    "a pickle": (lambda batch: pickle.loads(pickle.dumps(batch)), 24),  # noqa: S301 - its own
    "joined groups": (lambda batch: join_groups(list(by_group(batch).values())), 24),
}


@pytest.mark.parametrize("name", MOVES)
def test_images_move_with_their_rows(name: str) -> None:
    move, rows = MOVES[name]
    holds(move(BATCH), rows)
    holds(BATCH)  # which the move did not change


def test_wider_prompts_and_responses_leave_images_as_they_are() -> None:
    wide = GROUP[2].select(["prompts", "responses", "attention_mask", "group"], ["images"])
    longer = DataProto.from_dict(
        {**dict(wide.batch), "responses": torch.ones(SIZE, 5, dtype=torch.int64)}, {"images": wide["images"]}
    )
    longer["attention_mask"] = torch.ones(SIZE, 9, dtype=torch.bool)
    small, same = same_widths([wide, longer], pad_token_id=0)
    assert small["responses"].shape == (SIZE, 5)
    assert list(small["images"]) == list(same["images"]) == [images_of(2)] * SIZE


def test_a_saved_batch(tmp_path: Path) -> None:
    BATCH.save(tmp_path / "batch")
    holds(DataProto.load(tmp_path / "batch"))


def test_groups_of_a_checkpoint(tmp_path: Path) -> None:
    save_groups(GROUP, tmp_path)
    groups = load_groups(tmp_path)
    assert [len(group) for group in groups] == [SIZE] * GROUPS
    holds(DataProto.concat(groups))


def test_old_groups() -> None:
    old = OldGroups(OldGroupsConfig(share=0.5, max_age=5, capacity=4), in_batch=6, seed=0)
    old.add(GROUP)
    drawn = old.draw(version=1)
    holds(DataProto.concat(drawn), len(drawn) * SIZE)
    assert len(drawn) == 3


def test_mini_batches() -> None:
    config: Any = SimpleNamespace(algorithm=SimpleNamespace(mini_batches=3, epochs=1), seed=0)
    minis = list(mini_batches(config, BATCH, step=1, epoch=0))
    holds(DataProto.concat([mini.select(["group", "pixel_values"], ["images"]) for mini in minis]))


@pytest.mark.parametrize("ranks", [1, 2, 5, 7])
def test_ranks_get_whole_rows(ranks: int) -> None:
    rows = pytest.importorskip("rlprims.execution.ray._worker_group", reason="needs Ray")
    parts = rows.divided(rows.padded(BATCH, ranks), ranks, share_prompts=True)
    assert sorted(i for part in parts for i in part) == list(range(24))
    for part in parts:
        holds(BATCH.select_idxs(np.array(part)), len(part))


def test_micro_batches_of_the_execution_get_the_images_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, Any] = {}

    def inputs(model: Any, images: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        seen.update({int(row[0]): image for row, image in zip(input_ids, images, strict=True)})
        return {}

    monkeypatch.setattr("rlprims.execution.hf._micro_batches.image_inputs", inputs)
    model = ModelConfig(path="none", device="cpu", max_tokens_per_micro_batch=30)
    parts = list(parts_of(BATCH.select_idxs(ORDER), model, SINGLE_PROCESS, packing=False))
    assert len(parts) > 3
    assert seen == {group: images_of(group) for group in range(GROUPS)}


def test_a_group_has_its_images_once(tmp_path: Path) -> None:
    """Sent between processes, saved, and read again: one copy for all rows, whatever their order."""
    once = sum(len(image) for group in range(GROUPS) for image in images_of(group))
    shuffled = BATCH.select_idxs(ORDER)
    sent = pickle.dumps(shuffled, protocol=5)
    shuffled.save(tmp_path / "batch")
    assert once < len(sent) < 1.3 * once
    assert once < (tmp_path / "batch").stat().st_size < 1.6 * once  # base64 has four bytes for three
    for back in (pickle.loads(sent), DataProto.load(tmp_path / "batch")):  # noqa: S301 - its own
        holds(back)
        assert len({id(cell) for cell in back["images"]}) == GROUPS
        assert len(pickle.dumps(back, protocol=5)) < 1.3 * once
