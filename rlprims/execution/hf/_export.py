"""Make a Hugging Face model from the shards of a checkpoint, in one process without ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from rlprims.execution.hf._adapters import adapt, check_base, checksum, load_adapter, lora_of, merged
from rlprims.execution.hf._models import adapter_of, shards_of


def models_in_shards(checkpoint: Path) -> list[str]:
    """The names of the models that a checkpoint stores in shards: ``policy``, ``critic``."""
    names = (path.name.removesuffix("_shards") for path in checkpoint.glob("*_shards"))
    return sorted(name for name in names if not name.endswith("_optimizer"))


def export_model(model: Path, folder: Path) -> None:
    """Write a model of a checkpoint, for example ``step_000050/policy``, as a Hugging Face model into a new folder.

    Shards need memory for one whole copy. Adapters are merged into the base model, which must still be there.

    Raises:
        ValueError: the checkpoint has no such model, or the folder exists.
        OSError: the files cannot be written, for example because the disk is full.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: expected a new folder")
    shards = shards_of(model)
    if model.is_dir():
        shutil.copytree(model, folder)
        return
    if not shards.is_dir():
        raise ValueError(f"{model.parent} has no model {model.name!r}: it has {models_in_shards(model.parent)}")
    shutil.copytree(shards, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = transformers.AutoConfig.from_pretrained(shards)
    kind = getattr(transformers, config.architectures[0])
    module, state = (_merged if adapter_of(model).exists() else _joined)(kind, config, model)
    if (shards / "generation_config.json").exists():
        module.generation_config = transformers.GenerationConfig.from_pretrained(shards)
    module.save_pretrained(folder, state_dict=state)


def _joined(kind: Any, config: Any, model: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return a module without data, and its whole tensors, read from the files of all ranks."""
    reader = HuggingFaceStorageReader(str(shards_of(model)))
    state: dict[str, Tensor] = {
        name: torch.empty(found.size, dtype=found.properties.dtype)  # type: ignore[union-attr]
        for name, found in reader.read_metadata().state_dict_metadata.items()
    }
    load_shards(state, storage_reader=reader, no_dist=True)
    with torch.device("meta"):
        module = kind(config)
    return module.to(next(x.dtype for x in state.values() if x.is_floating_point())), state


def _merged(kind: Any, config: Any, model: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the base model with the adapter of a checkpoint, and its state dict after the adapter is merged."""
    adapter = adapter_of(model)
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    module = adapt(kind.from_pretrained(base, config=config, dtype=config.dtype), lora_of(adapter))
    load_adapter(module, adapter)
    check_base(module, adapter, checksum(module))
    return module, merged(module, module.state_dict())
