"""Chat templates render as in the library that they were written for, and do no harm."""

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.models.chat_template import CONTINUES, compile_template, names_in, reads_tools
from gateway.models.model_files import ModelFiles, read_model_files
from gateway.models.tokenizer import ModelTokenizer
from services.runtime.errors import InvalidRequest, ModelError


@pytest.fixture(scope="module")
def reference(model_folder):
    return PreTrainedTokenizerFast.from_pretrained(model_folder)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.content == 'x' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ bos_token }}{{ messages | tojson }}{{ messages[0]['content'] | trim }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}",
    ],
)
async def test_templates_render_as_in_transformers(model_folder, reference, source):
    files = read_model_files(model_folder)
    model = ModelTokenizer(ModelFiles(files.folder, files.facts, files.tokenizer_json, source, files.special_tokens))
    chat = [{"role": "user", "content": " ab "}, {"role": "user", "content": "x"}]
    expected = reference.apply_chat_template(chat, chat_template=source, add_generation_prompt=True, return_dict=False)
    assert await model.encode_chat(chat) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.x }}",
        "{{ raise_exception('no') }}",
        "{{ range(10**9) | list }}",
    ],
)
async def test_hostile_or_broken_template_is_the_requests_error(model_folder, source):
    model = ModelTokenizer(ModelFiles(None, None, read_model_files(model_folder).tokenizer_json, source))
    with pytest.raises(InvalidRequest) as refused:
        await model.encode_chat([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"


def test_what_is_told_from_the_source():
    source = "{% set x = 1 %}{{ x, messages }}{% if tools %}{{ enable_thinking }}{% endif %}{{ strftime_now('%Y') }}"
    assert names_in(source) == {"messages", "tools", "enable_thinking"}
    assert reads_tools(source)
    assert not reads_tools("{{ messages }} tools")


def test_no_template_at_all():
    with pytest.raises(ModelError, match="not valid Jinja"):
        compile_template("{% for %}")
    assert names_in("{% for %}") == frozenset()


BEGUN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]


@pytest.mark.parametrize("content", ["Well,", "<|end|> 🙂", "a" * 5000])
async def test_an_answer_continues_the_last_message_as_in_transformers(model_folder, reference, content):
    chat = [BEGUN[0], {**BEGUN[1], "content": content}]
    token_ids = await ModelTokenizer(read_model_files(model_folder)).encode_chat(chat, more={CONTINUES: True})
    text = reference.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert reference.decode(token_ids) == text


@pytest.mark.parametrize(("content", "ends"), [("Well, ", "\nWell, "), ("", "<|assistant|>\n")])
async def test_white_space_at_the_end_stays_and_a_message_may_be_empty(model_folder, reference, content, ends):
    model = ModelTokenizer(read_model_files(model_folder))
    token_ids = await model.encode_chat([BEGUN[0], {**BEGUN[1], "content": content}], more={CONTINUES: True})
    assert reference.decode(token_ids).endswith(ends)


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[1].content * 2 }}"])
async def test_a_template_that_does_not_show_the_message_once_cannot_continue_it(model_folder, source):
    files = read_model_files(model_folder)
    model = ModelTokenizer(ModelFiles(files.folder, files.facts, files.tokenizer_json, source, files.special_tokens))
    with pytest.raises(InvalidRequest):
        await model.encode_chat(BEGUN, more={CONTINUES: True})
