"""Chats in prompt files: who has the last word, messages and tools as JSON, arguments of the chat template."""

import json

import pytest

from rlframe.config import ConfigError
from tests.support.chatml import chatml_tokenizer
from workers.environments.chats import Chat
from workers.environments.registry import make_environment
from workers.environments.rendering import render
from workers.environments.settings import TaskConfig

USER = {"role": "user", "content": "2+2="}
ANSWER = {"role": "assistant", "content": "4"}
QUESTION = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", autouse=True)
def reward_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "chat_rewards.py").write_text("def zero(response, row):\n    return 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def read(tmp_path, *rows, tokenizer=None, **task):
    """Texts and rows of the training problems; one more row is held out."""
    tokenizer = tokenizer or chatml_tokenizer()
    for name, given in (("train", rows), ("eval", [{"prompt": "x"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    files = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")}
    config = TaskConfig(**{"name": "jsonl", "reward": "chat_rewards:zero", **files, **task})
    problems = make_environment(config, tokenizer, seed=0, eval_size=None).train_prompts()
    return [tokenizer.decode(p.tokens) for p in problems], [p.payload["row"] for p in problems]


def test_an_answer_at_the_end_of_a_prompt_is_refused_dropped_or_continued(tmp_path):
    rows = [{"prompt": [USER]}, {"prompt": [USER, ANSWER]}]
    with pytest.raises(
        ConfigError, match=r"^line 2 of train\.jsonl: .*the assistant's.*task\.last_assistant=drop .* or continue"
    ):
        read(tmp_path, *rows)
    texts, kept = read(tmp_path, *rows, last_assistant="drop")
    assert texts == [QUESTION, QUESTION] and [row.get("reference") for row in kept] == [None, "4"]
    texts, kept = read(tmp_path, *rows, last_assistant="continue")
    assert texts == [QUESTION, QUESTION + "4"] and "reference" not in kept[1]
    texts, _ = read(tmp_path, {"prompt": [USER, ANSWER | {"content": ""}]}, last_assistant="continue")
    assert texts == [QUESTION], "an empty beginning is no beginning"
    texts, kept = read(tmp_path, rows[1] | {"reference": "mine"}, last_assistant="drop")
    assert kept[0]["reference"] == "mine"


@pytest.mark.parametrize("messages", [[ANSWER], [USER, ANSWER, ANSWER]])
def test_there_must_be_something_to_answer(tmp_path, messages):
    with pytest.raises(ConfigError, match=r"line 1 of train\.jsonl: .*give a conversation that ends with a question"):
        read(tmp_path, {"prompt": messages}, last_assistant="drop")


def test_the_same_question_with_other_answers_is_one_prompt(tmp_path):
    rows = [{"prompt": [USER | {"content": f"{a}"}, ANSWER | {"content": answer}]} for a in range(4) for answer in "xyz"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(name="jsonl", train=str(tmp_path / "p.jsonl"), reward="chat_rewards:zero", last_assistant="drop")
    env = make_environment(task, chatml_tokenizer(), seed=0, eval_size=2)
    asked = {p.payload["row"]["prompt"][0]["content"] for p in env.eval_prompts()}
    assert len(asked) == 2 and len(env.train_prompts()) == 6
    assert not asked & {p.payload["row"]["prompt"][0]["content"] for p in env.train_prompts()}


def test_messages_written_as_json_are_messages(tmp_path):
    texts, rows = read(tmp_path, {"prompt": json.dumps([USER])}, {"prompt": " [ {'role' was: here"})
    assert texts == [QUESTION, " [ {'role' was: here"] and rows[0]["prompt"] == json.dumps([USER])
    for text in (str([USER]), '[{"role": "user", "content": "cut'):
        with pytest.raises(
            ConfigError, match=r"line 1 of train\.jsonl: the prompt begins like a list of messages, but is not JSON"
        ):
            read(tmp_path, {"prompt": text})
    with pytest.raises(ConfigError, match="neither a string nor a list of messages"):
        read(tmp_path, {"prompt": '[{"from": "human", "value": "2+2="}]'})
    with pytest.raises(ConfigError, match=r"task\.chat_template=false forbids"):
        read(tmp_path, {"prompt": json.dumps([USER])}, chat_template=False)


@pytest.mark.parametrize("write", [lambda tools: tools, json.dumps, lambda tools: [json.dumps(tool) for tool in tools]])
def test_tools_are_rendered(tmp_path, write):
    tools = [{"name": "add", "parameters": None}, {"name": "search"}]
    texts, _ = read(tmp_path, {"prompt": [USER], "tools": write(tools)}, {"prompt": [USER], "tools": None})
    assert texts == ["<|im_start|>tools\nadd\nsearch\n<|im_end|>\n" + QUESTION, QUESTION]
    texts, _ = read(tmp_path, {"prompt": [USER], "tools": write(tools)}, tools_key=None)
    assert texts == [QUESTION]
    texts, _ = read(tmp_path, {"prompt": [USER], "functions": write(tools)}, tools_key="functions")
    assert texts[0].startswith("<|im_start|>tools")


def test_tools_that_cannot_be_rendered_are_one_sentence(tmp_path):
    for tools in (["add"], 3, [3], "add"):
        with pytest.raises(ConfigError, match=r"line 1 of train\.jsonl: the column tools \(task\.tools_key\) is not"):
            read(tmp_path, {"prompt": [USER], "tools": tools})
    deaf = chatml_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"line 1 of train\.jsonl: .*chat template renders none; set task\.tools_key=null"):
        read(tmp_path, {"prompt": [USER], "tools": [{"name": "add"}]}, tokenizer=deaf)


def test_calls_of_tools_in_earlier_messages_are_messages_without_a_text(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    texts, _ = read(tmp_path, {"prompt": [USER, call, {"role": "tool", "content": "4", "tool_calls": None}]})
    said = [("user", "2+2="), ("assistant", ""), ("tool", "4")]
    assert texts == ["".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"]


def test_arguments_reach_the_chat_template_in_every_environment(tmp_path):
    arguments, closed = {"enable_thinking": False}, "<|im_start|>assistant\n<think></think>"
    texts, _ = read(tmp_path, {"prompt": [USER]}, template_args=arguments)
    assert texts[0].endswith(closed)
    tokenizer = chatml_tokenizer()
    for name, options in (("countdown", {"attempts": 2, "problems": 5}), ("wordle", {})):
        task = TaskConfig(name=name, chat_template=True, template_args=arguments, options=options)
        env = make_environment(task, tokenizer, seed=0, eval_size=1)
        assert tokenizer.decode(env.train_prompts()[0].tokens).endswith(closed)
        assert tokenizer.decode(env.replies("wrong", tokenizer("a", return_tensors="np").input_ids[0])).endswith(closed)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"enable_thinkin": False}, r"task\.template_args\.enable_thinkin is not read .*did you mean enable_thinking\?"),
        ({"language": "de"}, r"task\.template_args\.language is not read .*it reads enable_thinking\."),
        ({"tokenize": True}, r"task\.template_args\.tokenize is not an argument of the chat template"),
    ],
)
def test_arguments_that_the_template_does_not_read_are_refused(tmp_path, arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, {"prompt": [USER]}, template_args=arguments)
    with pytest.raises(ConfigError, match="has no chat template; leave it out"):
        read(tmp_path, {"prompt": "x"}, template_args=arguments, tokenizer=chatml_tokenizer(None))


def test_templates_with_tags_of_transformers_and_defaults_are_understood():
    template = (
        "{%- set style = style if style is defined else 'plain' %}{% for m in messages %}{%- generation -%}{{ m.content }}"
        "{%- endgeneration -%}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ style }}"
    )
    tokenizer = chatml_tokenizer(template)
    (tokens,) = render(tokenizer, [Chat([USER])], ["here"], None, {"style": "short"})
    assert tokenizer.decode(tokens) == "2+2=short"
