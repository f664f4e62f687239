"""Rendered chats equal those of transformers; bad input gives one line."""

import pytest
import transformers

from molora_jax.config import UserError
from molora_jax.text import chat
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny

CHATML = """
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for m in messages %}
    {% if m.role == 'user' %}
<|im_start|>user{{ ' ' + m.name if m.name is defined }}
{{ m.content }}<|im_end|>
    {% else %}
        {#- one message a line #}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate\\nuser/assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}
            {{ part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

MISTRAL = """
{%- set ns = namespace(system="", turn=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- set ns.system = message.content + "\\n\\n" %}
    {%- elif message.role == "user" %}
        {%- set ns.turn = ns.turn + 1 %}
        {{- "[INST] " + (ns.system if loop.last or ns.turn == 1 else "") + message.content + " [/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content + eos_token }}
    {%- else %}
        {{- raise_exception("Only user, system and assistant roles are supported!") }}
    {%- endif %}
    {%- if ns.turn > 3 %}{% break %}{% endif %}
{%- endfor %}
"""

TEMPLATES = dict(chatml=CHATML, llama3=LLAMA3, gemma=GEMMA, mistral=MISTRAL)
SYSTEM = dict(role="system", content=" Answer in <b>rhyme</b> & 'verse'. ")
HELLO = dict(role="user", content='Grüß dich! <3 "x" {{ 7 * 7 }}\n')
ANSWER = dict(role="assistant", content="  Hi 👋 ")
CHATS = [[HELLO], [SYSTEM, HELLO], [HELLO, ANSWER, HELLO], [SYSTEM, HELLO, ANSWER, HELLO, ANSWER]]
TOOLS = [dict(type="function", function=dict(name="größe", description="a < b & 'c'", parameters=dict(x=[1, None])))]


@pytest.fixture(scope="module")
def reference():
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.sentencepiece(), **names)


def both(reference, template, messages, **variables):
    """Our rendering, checked against that of transformers."""
    text = chat.render(template, messages, bos_token="<s>", eos_token="</s>", **variables)
    variables = dict(add_generation_prompt=True) | variables
    assert text == reference.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_agrees_with_transformers(reference, template, messages, prompt):
    text = both(reference, TEMPLATES[template], messages, add_generation_prompt=prompt)
    assert HELLO["content"].strip() in text


def test_variables_tools_and_tool_calls_reach_the_template(reference):
    assert both(reference, CHATML, [HELLO], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "user ada\n" in both(reference, CHATML, [HELLO | dict(name="ada")])
    assert "user\n" in both(reference, CHATML, [HELLO | dict(name=None)])
    call = dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="größe", arguments=dict(x="<é>")))])
    text = both(reference, LLAMA3, [HELLO, call, dict(role="tool", content="2 m")], tools=TOOLS, date_string="1999")
    assert '"description": "a < b & \'c\'"' in text
    assert '{"name": "größe", "parameters": {"x": "<é>"}}<|eot_id|><|start_header_id|>tool' in text
    assert "Year: 1999" in text


def test_content_may_be_a_list_of_parts(reference):
    parts = [dict(type="text", text="one"), dict(type="image"), dict(type="text", text="two")]
    assert "onetwo<end_of_turn>" in both(reference, GEMMA, [dict(role="user", content=parts)])


def test_a_model_without_bos_leaves_it_out_of_the_text():
    text = chat.render(MISTRAL, [HELLO], bos_token=None, eos_token=None)
    assert text.startswith("[INST]")


def test_a_rendered_chat_has_one_bos_when_encoded(tmp_path):
    names = dict(bos_token="<s>", eos_token="</s>", chat_template=MISTRAL)
    tok = Tokenizer.load(tiny.write(tmp_path, tiny.with_bos(tiny.sentencepiece(), "<s>"), tokenizer_config=names))
    text = chat.render(tok.chat_template, [HELLO], bos_token=tok.bos_token, eos_token=tok.eos_token)
    assert tok.encode(text, special=False) == tok.encode(text)
    assert tok.encode(text)[0] == tok.bos
    assert tok.encode(text).count(tok.bos) == 1


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [HELLO], "the model has no chat template"),
        (GEMMA, [ANSWER], "does not take these messages: Roles must alternate user/assistant"),
        (MISTRAL, [dict(role="tool", content="x")], "Only user, system and assistant roles are supported!"),
        (MISTRAL, [dict(role="user", content=[dict(type="text")])], "does not take these messages: can only"),
        ("{% if %}", [HELLO], "not valid Jinja, line 1:"),
        ("{{ messages.append(1) }}", [HELLO], "does not take these messages: .*append"),
        ("{{ ''.__class__.__mro__ }}", [HELLO], "does not take these messages: .*unsafe"),
        (CHATML, "Hi", "got something of type str, expected a list of messages"),
        (CHATML, [], "got an empty list, expected a list of messages"),
        (CHATML, ["Hi"], "message 0 is 'Hi', expected"),
        (CHATML, [HELLO, dict(role="user")], "message 1 is {'role': 'user'}, expected"),
        (CHATML, [dict(content="Hi")], "message 0 is {'content': 'Hi'}, expected"),
        (CHATML, [dict(role=3, content="Hi")], "message 0 is {'role': 3, 'content': 'Hi'}, expected"),
        (CHATML, [dict(role="user", content=3)], "the content of message 0 is of type int, expected a string"),
    ],
)
def test_bad_input_gives_one_line(template, messages, message):
    with pytest.raises(UserError, match=f"^chat: .*{message}") as error:
        chat.render(template, messages, bos_token="<s>", eos_token="</s>")
    assert "\n" not in str(error.value)
