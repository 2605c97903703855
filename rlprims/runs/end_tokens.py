"""The tokens that end a response, and whether the files of a model agree about them."""

from pathlib import Path
from typing import Any

from rlprims._storage import local_copy
from rlprims.turns.tokens import Chat, encode


def load_end_tokens(model: str) -> tuple[Any, list[int]]:
    """The tokenizer of a model, and the tokens that end a response according to its generation config."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    model = local_copy(model, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {model!r}: {str(error).splitlines()[0]}") from None
    try:
        settings = GenerationConfig.from_pretrained(model)
    except OSError:  # without the file, transformers uses the model's config
        settings = GenerationConfig.from_model_config(config)
    ends = settings.eos_token_id
    return tokenizer, [] if ends is None else list(ends) if isinstance(ends, list) else [ends]


def load_tokenizer(path: str, console: Any, model: Any = None) -> tuple[Any, list[int], int]:
    """The tokenizer of ``model.path``, the tokens that end a response, and the window; a warning if files disagree.

    A note says if ``packing: null`` in the settings ``model`` pads this type. Refused types and tokens that the model
    does not have are errors.
    """
    from transformers import AutoConfig

    from rlprims.execution.hf._alone import window_of
    from rlprims.execution.hf._families import check_type, why_padded

    path = local_copy(path, weights=False)
    _find_model(path, console)
    try:
        tokenizer, ends = load_end_tokens(path)
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from None
    if (wrong := end_token_mismatch(tokenizer, ends)) is not None:
        console.print(f"warning: {path}: {wrong}", style="yellow", highlight=False, soft_wrap=True)
    settings = AutoConfig.from_pretrained(path)
    check_type(settings)
    check_vocabulary(tokenizer, settings.get_text_config().vocab_size)
    if model is not None and model.packing is None and (note := why_padded(settings, model)) is not None:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    window = window_of(settings)
    if window < (positions := getattr(settings.get_text_config(), "max_position_embeddings", window)):
        text = f"rows end at {window} of {positions} tokens, where its longrope changes; see docs/trainer.md"
        console.print(f"note: {path}: {text}", style="yellow", highlight=False, soft_wrap=True)
    return tokenizer, ends, window


def tokens_beyond(tokenizer: Any, rows: int) -> list[str]:
    """The tokens of texts for which an embedding of so many rows has none.

    A placeholder of images or sounds is not among them: Gemma 3's text models have one in their tokenizer alone.
    """
    apart = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    return [token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in apart]


def check_vocabulary(tokenizer: Any, rows: int) -> None:
    """Raise an error if a text can have a token for which the embedding has no row."""
    if beyond := tokens_beyond(tokenizer, rows):
        raise ValueError(
            f"model.path: the tokenizer has {len(beyond)} tokens, such as {beyond[0]!r}, beyond the {rows} rows of the "
            "embedding: save the model after resize_token_embeddings(len(tokenizer)), or use the model's own tokenizer"
        )


def _find_model(path: str, console: Any) -> None:
    """Say before the hub is asked that there is no such folder; a ValueError if it cannot be a name of the hub."""
    from rlprims.execution.hf._models import only_in_shards

    if Path(path).exists():
        return
    shards = only_in_shards(path)
    if shards or Path(path).is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise ValueError(f"model.path: cannot load {path!r}: there is no such folder{shards}")
    console.print(f"model.path: there is no folder {path!r} here: the hub is asked", soft_wrap=True, highlight=False)


def end_token_mismatch(tokenizer: Any, ends: list[int]) -> str | None:
    """How the tokenizer and the tokens that end a response differ; None if they agree.

    Responses end by the generation config. If the tokenizer has another end token, code that uses it, such as many
    trainers, finds no end. If the template closes a message with another, every response reaches the length limit.
    """
    if not ends:
        return "nothing ends a response: set eos_token_id in generation_config.json"

    def name(ids: list[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(number)} ({number})" for number in ids)

    if tokenizer.eos_token_id is None:
        return f"the tokenizer has no end of sequence, and responses end at {name(ends)}"
    if tokenizer.eos_token_id not in ends:
        message = f"the tokenizer says that {name([tokenizer.eos_token_id])} ends a sequence, and the generation config"
        return f"{message} that {name(ends)} does"
    closing = closing_tokens(tokenizer)
    if closing and not set(closing) & set(ends):
        return f"the chat template closes a message with {name(closing)}, and responses end at {name(ends)}"
    return None


def closing_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the chat template writes after a message of the assistant; none without a template."""
    if not tokenizer.chat_template:
        return []
    answer = "ANSWER"
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": answer}]
    try:
        text = Chat(tokenizer).text(messages)
    except ValueError:  # it refuses these messages, not those of every file
        return []
    after = encode(tokenizer, text.rpartition(answer)[2])
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return list(dict.fromkeys(token for token in after if token in special))
