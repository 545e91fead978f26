"""The user's own data: what a row becomes, what is held out, and one sentence for everything that can be wrong."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rlframe.config import ConfigError
from rlframe.models.characters import character_tokenizer
from rlframe.types import Prompt
from workers.environments.base import FatalRewardError, RewardError
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig

TOKENIZER = character_tokenizer()
REWARD = """
def length(response, row):
    return len(response) + row.get("bonus", 0)
def nan(response, row):
    return float("nan")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
VERL_ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2+2="}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="module", autouse=True)
def reward_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "prompt_rewards.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def write(path, rows):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
    return str(path)


def environment(path, rows=None, name="jsonl", eval_size=2, tokenizer=TOKENIZER, **task):
    train = write(path / "prompts.jsonl", rows) if rows is not None else str(path)
    task = TaskConfig(name=name, train=train, **{"reward": "prompt_rewards:length", **task})
    return make_environment(task, tokenizer, seed=0, eval_size=eval_size)


def text_of(problem):
    return TOKENIZER.decode(problem.tokens)


def step(environment, problem, response):
    prompt = Prompt(problem.id, 0, problem.tokens, "jsonl", problem.payload)
    action = np.array([*TOKENIZER(response).input_ids, TOKENIZER.eos_token_id], np.int32)

    async def run():
        try:
            return await environment.episode(prompt).step(action, "stop")
        finally:
            environment.close()

    return asyncio.run(run())


SUMS = [{"prompt": f"{a}+1=", "bonus": 10} for a in range(10)]


def test_strings_stay_as_they_are_and_rows_reach_the_reward(tmp_path):
    env = environment(tmp_path, ["\n", *SUMS])
    problems = [*env.train_prompts(), *env.eval_prompts()]
    assert sorted(map(text_of, problems)) == sorted(row["prompt"] for row in SUMS)
    assert {p.id for p in problems} == {f"prompts.jsonl:{n}" for n in range(2, 12)}, "lines count from 1, blank ones too"
    result = step(env, env.train_prompts()[0], "abc")
    assert (result.reward, result.done) == (13.0, True), "the stop token is no part of the response"


def test_held_out_problems_are_never_trained_on_and_do_not_depend_on_the_order(tmp_path):
    twice = [*SUMS, *SUMS]
    env = environment(tmp_path, twice, eval_size=4)
    held_out = [text_of(p) for p in env.eval_prompts()]
    assert len(set(held_out)) == 4 and len(env.train_prompts()) == 12
    assert not set(held_out) & {text_of(p) for p in env.train_prompts()}
    again = environment(tmp_path, twice[::-1], eval_size=4)
    assert [text_of(p) for p in again.eval_prompts()] == held_out


def test_a_file_of_held_out_prompts_is_used_whole_unless_a_sample_is_asked_for(tmp_path):
    texts = [f"{a}+9=" for a in range(40)]
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": text} for text in texts])
    env = environment(tmp_path, SUMS, eval=held_out, eval_size=None)
    assert len(env.train_prompts()) == 10 and [text_of(p) for p in env.eval_prompts()] == texts and env.notes == []
    env = environment(tmp_path, SUMS, eval=held_out, eval_size=10)
    some = [text_of(p) for p in env.eval_prompts()]
    assert some == sorted(some, key=texts.index) and len(set(some)) == 10 and some not in (texts[:10], texts[-10:])
    assert env.notes == [
        f"Evaluations use 10 of the 40 rows of task.eval={held_out} (eval.size=10): a random sample, the same in every run."
    ]
    write(tmp_path / "held_out.jsonl", [{"prompt": text} for text in texts[::-1]])
    assert {text_of(p) for p in environment(tmp_path, SUMS, eval=held_out, eval_size=10).eval_prompts()} == set(some)
    env = environment(tmp_path, SUMS, eval=held_out, eval_size=50)
    assert len(env.eval_prompts()) == 40 and "40 of the 40 rows" in env.notes[0]


def test_what_is_held_out_does_not_depend_on_how_it_is_rendered(tmp_path):
    """The template of tomorrow, another template and another tokenizer's ids hold out the same rows."""
    held_out, contents = set(), set()
    for template in (
        "today {{ messages[0]['content'] }}",
        "tomorrow {{ messages[0]['content'] }}",
        "[{{ messages[-1]['content'] }}]",
    ):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = template
        env = environment(tmp_path, SUMS, eval_size=4, tokenizer=tokenizer, chat_template=True)
        held_out.add(tuple(p.payload["row"]["prompt"] for p in env.eval_prompts()))
        contents.add(tuple(p.content for p in env.train_prompts()))
        assert "4 of the 10 rows of task.train=" in env.notes[0] and "6 are trained on" in env.notes[0]
    assert len(held_out) == len(contents) == 1


def test_a_row_that_renders_to_a_held_out_prompt_is_not_trained_on(tmp_path):
    """The character tokenizer folds upper case."""
    rows = [{"prompt": letter} for letter in "abcdABCD"]
    env = environment(tmp_path, rows, eval_size=3)
    assert not {text_of(p) for p in env.eval_prompts()} & {text_of(p) for p in env.train_prompts()}
    with pytest.raises(ConfigError, match="no prompt that differs from these once it is rendered"):
        environment(tmp_path, [{"prompt": "a"}, {"prompt": "A"}], eval_size=1).train_prompts()


def test_a_row_is_the_same_under_another_name_and_with_its_keys_in_another_order(tmp_path):
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved" / "other.jsonl", [dict(reversed(row.items())) for row in SUMS])
    here = environment(tmp_path, SUMS).train_prompts()
    there = make_environment(
        TaskConfig(name="jsonl", train=moved, reward="prompt_rewards:length"), TOKENIZER, seed=1, eval_size=2
    ).train_prompts()
    assert [p.content for p in here] == [p.content for p in there] and here[0].id != there[0].id
    changed = environment(tmp_path, [row | {"bonus": 11} for row in SUMS]).train_prompts()
    assert not {p.content for p in here} & {p.content for p in changed}


def test_chats_go_through_the_chat_template_and_strings_only_if_asked(tmp_path):
    chat = {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]}
    plain = {"prompt": "1+2="}
    env = environment(tmp_path, [chat, plain, *SUMS], eval_size=1)
    assert {"add\n1+1=\n", "1+2="} <= set(map(text_of, [*env.train_prompts(), *env.eval_prompts()]))
    env = environment(tmp_path, [plain, *SUMS], chat_template=True)
    assert all(text_of(p).endswith("=\n") for p in env.train_prompts())


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer()
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    env = environment(tmp_path, [{"prompt": "1+1="}, {"prompt": f"{bos}2+2="}, {"prompt": "3+3="}], tokenizer=tokenizer)
    assert all(p.tokens.tolist().count(bos_id) == 1 for p in [*env.train_prompts(), *env.eval_prompts()])


def test_verl_s_parquet_layout_as_it_is(tmp_path):
    rows = [VERL_ROW | {"prompt": [{"role": "user", "content": f"{a}+{4 - a}="}]} for a in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    env = environment(tmp_path / "train.parquet", name="parquet", reward="prompt_rewards:compute_score")
    assert env.name == "parquet" and env.train_prompts()[0].payload["place"].startswith("row ")
    assert step(env, env.train_prompts()[0], "4").reward == 1
    assert step(env, env.train_prompts()[0], "5").reward == 0


@pytest.mark.parametrize("policy", ["raise", "drop", "zero"])
def test_a_reward_of_nan_names_the_prompt_and_its_line_and_follows_the_policy(tmp_path, policy):
    env = environment(tmp_path, SUMS, reward="prompt_rewards:nan", on_reward_failure=policy)
    problem, held_out = env.train_prompts()[0], env.eval_prompts()[0]
    line = problem.id.split(":")[1]
    sentence = rf"prompt_rewards:nan failed on line {line} of prompts.jsonl \(prompt '\d\+1='\): it returned nan"
    if policy == "zero":
        result = step(env, problem, "abc")
        assert result.reward == 0 and "nan" in result.metadata["reward_failure"]
    else:
        with pytest.raises(RewardError, match=sentence) as caught:
            step(env, problem, "abc")
        assert isinstance(caught.value, FatalRewardError) == (policy == "raise")
    if policy == "drop":
        assert step(env, held_out, "abc").reward == 0, "an evaluation is over all its problems"


@pytest.mark.parametrize(
    ("rows", "task", "sentence"),
    [
        ([*SUMS, "{'a': 1}\n"], {}, r"line 11 of prompts.jsonl is not JSON"),
        (['["a"]\n'], {}, "line 1 of prompts.jsonl is not a JSON object"),
        (
            [SUMS[0], {"promt": "1"}],
            {},
            r"line 2 of prompts.jsonl has no column prompt; did you mean promt\? \(task.prompt_key",
        ),
        ([], {}, "has no prompts"),
        ([SUMS[0], {"prompt": "  "}], {}, "line 2 of prompts.jsonl: the prompt is empty"),
        ([{"prompt": []}], {}, "line 1 of prompts.jsonl: the prompt is empty"),
        ([{"prompt": 3}], {}, "line 1 of prompts.jsonl: the prompt is neither a string nor a list of messages"),
        ([{"prompt": [{"content": "x"}]}], {}, "line 1 of prompts.jsonl: the prompt is neither"),
        ([VERL_ROW], {"chat_template": False}, "task.chat_template=false forbids"),
        ([{"prompt": "1"}], {"reward": "prompt_rewards:compute_score"}, "line 1 of prompts.jsonl has no column reward_model"),
        (SUMS, {"reward": "prompt_rewards:lenght"}, "did you mean length"),
        (SUMS, {"eval_size": 10}, "only 10 different prompts.* lower eval.size, or give held-out prompts with task.eval"),
        (SUMS, {"options": {"low": 1}}, "task.options.low is not an option of the environment jsonl"),
        (SUMS, {"eval": "no_such.jsonl"}, "task.eval=no_such.jsonl does not exist .looked in"),
    ],
)
def test_data_that_cannot_be_used_is_one_sentence(tmp_path, rows, task, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        environment(tmp_path, rows, **task).train_prompts()
    assert "\n" not in str(caught.value)


def test_files_of_another_kind_are_told_apart(tmp_path):
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.parquet is not a parquet file"):
        environment(tmp_path / "a.parquet", name="parquet").train_prompts()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW]), tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="choose task=parquet"):
        environment(tmp_path / "b.jsonl").train_prompts()
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "a"}\n\xff\xfe\n')
    with pytest.raises(ConfigError, match=r"line 2 of c.jsonl is not UTF-8"):
        environment(tmp_path / "c.jsonl").train_prompts()
    with pytest.raises(ConfigError, match="is a folder"):
        environment(tmp_path).train_prompts()


def test_a_chat_needs_a_chat_template_and_every_tokenizer_an_end(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"line 1 of prompts\.jsonl: .* has no chat template"):
        environment(tmp_path, [VERL_ROW], tokenizer=tokenizer).train_prompts()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"line 1 of prompts\.jsonl: .*roles must alternate"):
        environment(tmp_path, [VERL_ROW], tokenizer=tokenizer).train_prompts()
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        environment(tmp_path, SUMS, tokenizer=SimpleNamespace(eos_token_id=None, name_or_path=str(tmp_path)))
