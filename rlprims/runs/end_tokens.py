"""The tokens that end a response, and whether the files of a model agree about them."""

from typing import Any

from rlprims.turns.tokens import Chat, encode


def load_end_tokens(model: str) -> tuple[Any, list[int]]:
    """The tokenizer of a model, and the tokens that end a response according to its generation config.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

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


def end_token_mismatch(tokenizer: Any, ends: list[int]) -> str | None:
    """How the tokenizer and the tokens that end a response differ; None if they agree.

    Responses end according to the generation config. If the tokenizer has another end token, code that uses the
    tokenizer, such as many trainers and data scripts, does not find the end. If the chat template closes a message with
    another token, that token does not end the response, and every response reaches the length limit.
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
