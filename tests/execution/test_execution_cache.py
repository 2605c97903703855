"""The sampler's cache is a copy-free one, and what it saves: each prompt is read once, finished rows leave."""

import torch
from execution_contract import local, prompts
from transformers.cache_utils import DynamicLayer

from rlprims import algorithms
from rlprims.execution import Sampling
from rlprims.execution.hf._cache import RoomyLayer


def test_it_holds_what_one_that_copies_holds():
    torch.manual_seed(0)
    layers = DynamicLayer(), RoomyLayer()
    for step in range(12):
        new = torch.randn(2, 3 if step < 6 else 2, 1, 5 if step == 0 else 1, 4)
        if step == 6:
            for layer in layers:
                layer.batch_select_indices(torch.tensor([2, 0]))
        (keys, values), roomy = (layer.update(*new) for layer in layers)
        assert torch.equal(keys, roomy[0])
        assert torch.equal(values, roomy[1])
        assert layers[0].get_seq_length() == layers[1].get_seq_length()


def test_a_prompt_is_read_once_and_finished_rows_leave(model_path):
    execution, shapes = local(model_path, algorithms.reinforce()), []
    module = execution.training.policy.module
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = prompts(["1+2=", "7-3="] * 20)
    batch = execution.generate(rows, Sampling(max_new_tokens=24), seed=0, prompt_width=4)
    hook.remove()
    assert shapes[0] == (2, 4)
    assert shapes[1] == (40, 1)
    read = [rows for rows, _ in shapes[1:]]
    going = [int((batch["response_mask"].sum(-1) > t).sum()) for t in range(1, len(shapes))]
    assert read == sorted(read, reverse=True)
    assert all(alive <= lanes <= alive / (7 / 8) + 1 for alive, lanes in zip(going, read, strict=True))
    assert read[-1] < 40
