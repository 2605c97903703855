"""Chat templates of the shapes that are in use, written for these tests, and a tokenizer that has their tokens."""

from functools import cache
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
GROUPED_TOOLS = (  # answers of tools that follow each other are in one turn of the user
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN_TOOLS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    + TOOL_CALLS
    + "<|im_end|>\n"
    + GROUPED_TOOLS
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_THINKING = (  # reasoning stays after the last question of the user only
    "{% set ns = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.question and (reasoning or loop.last) %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}"
    "{{ content }}"
    + TOOL_CALLS
    + "<|im_end|>\n"
    + GROUPED_TOOLS
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA_3 = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK_CHAT = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_REASONING = DEEPSEEK_CHAT.replace(  # no reasoning is ever shown
    "<｜Assistant｜>{{ m.content }}", "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
).replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}")
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (  # no special tokens: the turn ends with a stop text
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (system if loop.first else '') + m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
LLAMA_3_DATE = (  # with today's date in the system message, tools, and calls whose arguments are named parameters
    "<|begin_of_text|>{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}\n\n"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ system }}<|eot_id|>" + LLAMA_3.removeprefix("<|begin_of_text|>")
)
MISTRAL_TOOLS = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
GEMMA_2 = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + GEMMA.removeprefix("<bos>")
)
GEMMA_3 = (  # the system message begins the first message of the user
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (  # nothing ends a message: the tag of the next role does
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COMMAND_R = (
    "<s>{% for m in messages %}<|START_OF_TURN_TOKEN|><|"
    "{{ {'assistant': 'CHATBOT', 'system': 'SYSTEM'}.get(m.role, 'USER') }}_TOKEN|>"
    "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
GPT_OSS = (  # the last answer ends with another token than the earlier ones
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN_3 = (  # the last answer has an empty thought before it, which the prompt opens only without thinking
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
END_OF_CHAT = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}<|endoftext|>{% endif %}")


class Family(NamedTuple):
    """A template, and the text that ends the assistant's turn when the sampler stops by itself."""

    template: str
    end: str


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>"),
    "qwen tools": Family(QWEN_TOOLS, "<|im_end|>"),
    "qwen thinking": Family(QWEN_THINKING, "<|im_end|>"),
    "llama 3": Family(LLAMA_3, "<|eot_id|>"),
    "deepseek chat": Family(DEEPSEEK_CHAT, "<｜end▁of▁sentence｜>"),
    "gemma": Family(GEMMA, "<end_of_turn>"),
    "mistral": Family(MISTRAL, "</s>"),
    "phi": Family(PHI, "<|end|>"),
    "zephyr": Family(ZEPHYR, "</s>"),
    "plain": Family(PLAIN, ""),
}

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|observation|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *(
        "<|CHATBOT_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|start|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
    ),
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
]
CORPUS = [
    "HAVING more than one way to write a word: HAV ING HAVING, 12 + 30 = 42.\n\n",
    'assistant user system tool the answer is seven \n <tool_call> {"name": "add", "arguments": {}} </tool_call>',
    "User: what is it?\n\nAssistant: it is so.\n\nTool: 7\n\n<think>\nlet me see\n</think>\n\n",
]


@cache
def _model() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    return tokenizer


def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of all families."""
    template, end = FAMILIES[name]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=_model(), eos_token=end or "<|endoftext|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    return wrapped


def metaspace_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """BPE in the way of SentencePiece: a text begins with a space that nobody wrote."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    alphabet = sorted(
        {c for text in CORPUS for c in text.replace(" ", "▁")} | set("abcdefghijklmnopqrstuvwxyz0123456789[]/:")
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = FAMILIES[name].template
    return wrapped
