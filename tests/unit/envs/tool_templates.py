"""Chat templates that write calls of tools, each as the family of models that its name says, and their tokenizers."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- '<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\n' + content +"
    " '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and message.reasoning_content %}"
    "{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
    "{%- for call in message.tool_calls or [] %}{%- if (loop.first and content) or not loop.first %}{{- '\n' }}"
    "{%- endif %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{{- '<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' + (call.arguments | tojson) +"
    " '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA31 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools %}{%- for tool in tools %}"
    "{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}{{- system + '<|eot_id|>' }}{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim +"
    " '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}"
    "{{- '<|eom_id|>' }}{%- elif message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable "
    "%}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{%- set ns = namespace(index=0) %}{%- for message in rest %}"
    "{%- if not (message.role == 'tool' or message.tool_calls is defined) %}"
    "{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}"
    "{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for message in rest %}"
    "{%- if message.role == 'user' %}{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS] [' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
    "{{- '][/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- elif message.tool_calls is defined %}"
    "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}"
    "{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}"
    "{%- endif %}"
    "{{- ', \"id\": \"' + call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}"
    "{%- endif %}"
    "{%- endfor %}{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + ', ' }}"
    "{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}"
    "{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- '\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- else %}"
    "{{- raise_exception('Only user, assistant and tool roles are supported') }}{%- endif %}{%- endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] }}"
    "{%- elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{ '<|Assistant|>' + message['content'] + '<|calls_begin|>' }}"
    "{%- for tool in message['tool_calls'] %}"
    "{{ '<|call_begin|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + "
    "'\n```json\n' + tool['function']['arguments'] + '\n```' + '<|call_end|>' }}{%- endfor %}"
    "{{ '<|calls_end|><|end|>' }}{%- elif message['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + message['content'] + '<|end|>' }}{%- elif message['role'] == 'tool' %}"
    "{{ '<|output_begin|>' + message['content'] + '<|output_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{%- endif %}"
)
KNOWS_DEVELOPER = (
    "{%- for message in messages %}{%- if message.role == 'developer' %}{{- '<|developer|>' }}{%- else %}"
    "{{- '<|' + message.role + '|>' }}{%- endif %}{{- message.content or '' }}{%- if message.mood %}"
    "{{- '[' + message.mood + ']' }}{%- endif %}{%- for call in message.tool_calls or [] %}"
    "{{- '<|call|>' + call.function.name + '~' }}{{- call.function.arguments ~ '' }}{%- endfor %}{{- '<|return|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
TEMPLATES: dict[str, tuple[str, str | None, str, list[str], list[str]]] = {
    # template, beginning of sequence, end of sequence, special tokens, added tokens that are none
    "qwen": (QWEN, None, "<|im_end|>", ["<|im_start|>"], ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "llama-3.1": (LLAMA31, "<|begin|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"], []),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], []),
    "deepseek": (DEEPSEEK, "<|begin|>", "<|end|>", ["<|User|>", "<|Assistant|>"],
                 ["<|calls_begin|>", "<|call_begin|>", "<|call_end|>", "<|calls_end|>"]),
    "developer": (KNOWS_DEVELOPER, None, "<|return|>", ["<|developer|>", "<|user|>", "<|assistant|>"], []),
}


def tool_tokenizer(name: str) -> Any:
    """A tokenizer with this template, a token for each byte, and its special ones."""
    template, bos, eos, special, added = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, additional_special_tokens=special,
        chat_template=template,
    )
    tokenizer.add_tokens(added)
    return tokenizer
