"""Whatever a reward function does, a call gives its own score or fails as a reward does, and the next call is right."""

import asyncio
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlframe.config import ConfigError
from trainer.settings.checks import check
from trainer.settings.config import Config
from workers.environments.settings import TaskConfig
from workers.rewards.pool import MAX_EXTRAS, RewardFailed, RewardPool, Score, check_reward, read_score
from workers.rewards.process import HEADER, MAX_MB

MODULE = """
import ctypes, json, os, signal, sys, threading, time
import numpy as np
from decimal import Decimal
from fractions import Fraction

FD = json.loads(sys.argv[1])["fd"]

class Odd:
    def __float__(self): raise ValueError("no")
    def __repr__(self): raise KeyError("no repr")
class Silent(Exception):
    def __str__(self): raise RuntimeError
def nested(depth):
    value = []
    for _ in range(depth): value = [value]
    return value
def throw(error): raise error
def later(action): threading.Thread(target=lambda: (time.sleep(0.05), action())).start()
def evaluate(response, row):
    if "raw" in row: os.write(FD, bytes(row["raw"]))
    return eval(response)

def length(response, row): return len(response)
def forks(response, row):
    i = int(response)
    if i == 1 and not fork(row["how"]):
        return -1
    return i
def fork(how):
    pid = os.fork() if how == "os.fork" else ctypes.CDLL(None).fork()
    if pid: os.waitpid(pid, 0)
    return pid
def forks_many(response, row):
    for _ in range(30):
        if not os.fork(): return -1
    return int(response)
def threads(response, row):
    def work():
        time.sleep(0.02)
        print("a thread writes")
        row["late"] = -1
        raise SystemExit
    for _ in range(5): threading.Thread(target=work).start()
    return int(response)
def dies_later(response, row):
    if response == "1": later(lambda: os._exit(3))
    return int(response)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "replying_reward.py").write_text(MODULE)
    (folder / "slow_reward.py").write_text("import time\ntime.sleep(600)\n")
    (folder / "chatty_reward.py").write_text("import json, os, sys\nos.write(json.loads(sys.argv[1])['fd'], b'hello ' * 9)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield TaskConfig(name="jsonl", reward_workers=1, reward_timeout_s=60.0)


def ask(task, function, *calls):
    """One pool, one call (response, row) after the other; a failure is its text."""

    async def run():
        pool = RewardPool(replace(task, reward=f"replying_reward:{function}"))
        try:
            return [await outcome(pool, response, row) for response, row in calls]
        finally:
            pool.close()

    return asyncio.run(run())


async def outcome(pool, response, row):
    try:
        score = await pool.score(response, row)
    except RewardFailed as error:
        assert str(error) == str(error).encode().decode() and "\n" not in str(error) and len(str(error)) < 3000
        return str(error)
    with np.errstate(over="ignore"):
        assert isinstance(score, Score) and math.isfinite(np.float32(score.value)), score
    return score.value


@pytest.mark.parametrize("how", ["os.fork", "ctypes"])
def test_a_function_whose_forked_copy_returns_too_shifts_no_reward(task, how):
    assert ask(task, "forks", *((str(i), {"how": how}) for i in range(6))) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("function", ["forks_many", "threads"])
def test_copies_and_threads_that_outlive_a_call_change_no_reward(task, function):
    assert ask(task, function, *((str(i), {}) for i in range(6))) == [0, 1, 2, 3, 4, 5]


def test_a_process_that_ends_between_two_calls_costs_neither(task):
    async def run():
        pool = RewardPool(replace(task, reward="replying_reward:dies_later"))
        first = await pool.score("1", {})
        process = pool._idle[0].process
        while process.poll() is None:
            await asyncio.sleep(0.01)
        second = await pool.score("2", {})
        pool.close()
        return first.value, second.value

    assert asyncio.run(run()) == (1, 2)


def test_idle_copies_and_threads_end_with_the_pool(task, tmp_path):
    late = f"later(lambda: (time.sleep(1), open({str(tmp_path / 'late')!r}, 'w'))) or 1"
    assert ask(task, "evaluate", (late, {})) == [1]
    time.sleep(1.5)
    assert not (tmp_path / "late").exists()


VALUES = {
    "1e39": "1e+39, which is not finite as float32",
    "3.4028235677973366e38": "not finite as float32",
    "10**400": "not a finite number",
    "-float('inf')": "not a finite number",
    "None": "NoneType None",
    "b'1'": "bytes",
    "'1'": "which is not a number",
    "np.str_('1')": "which is not a number",
    "np.zeros(3)": "ndarray",
    "1j": "complex",
    "Odd()": "KeyError",
    "nested(10**5)": "list|RecursionError",
    "{}": "without 'score' .keys: none",
    "{'score': nested(10)}": "list",
    "dict.fromkeys(range(10**6))": "without 'score'",
    "throw(Silent())": "Silent",
    "throw(KeyboardInterrupt())": "KeyboardInterrupt",
    "throw(SystemExit(3))": "SystemExit: 3",
    "throw(ValueError('x' * 2**23))": "ValueError: xxx",
    r"throw(ValueError('\ud800\n\x1b[2J'))": "ValueError",
    "os.close(FD)": "closed the connection|ended its process",
    "os.closerange(0, 4096)": "closed the connection|ended its process",
    "os._exit(0)": "exit code 0",
    "os.kill(os.getpid(), 40)": "signal 40",
    "(signal.setitimer(signal.ITIMER_REAL, 0.01), time.sleep(60))": "SIGALRM",
}


def test_what_is_no_float32_is_a_failure_that_says_so_and_the_next_call_is_right(task):
    calls = [(call, {}) for value in VALUES for call in (value, "7")]
    answers = ask(task, "evaluate", *calls)
    assert answers[1::2] == [7] * len(VALUES)
    for (value, reason), answer in zip(VALUES.items(), answers[::2], strict=True):
        assert isinstance(answer, str), value
        assert any(part in answer for part in reason.replace(".keys", "(keys").split("|")), (value, answer)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ("True", 1),
        ("np.float32(0.5)", 0.5),
        ("np.int64(-3)", -3),
        ("np.bool_(True)", 1),
        ("__import__('torch').tensor(0.25)", 0.25),
        ("Decimal('0.5')", 0.5),
        ("Fraction(1, 4)", 0.25),
        ("3.4028234e38", 3.4028234e38),
        ("{'score': np.float64(2), 'more': nested(9)}", 2),
        ("print('x' * 2**22) or 1", 1),
        ("later(lambda: throw(SystemExit())) or 1", 1),
    ],
)
def test_numbers_of_any_type_are_scores(task, value, score):
    assert ask(task, "evaluate", (value, {})) == [score]


@pytest.mark.parametrize(
    ("response", "row", "reason"),
    [
        ("1", {(1, 2): 3}, "cannot be written as JSON"),
        ("1", {"a": type("Bad", (), {"__str__": lambda self: 1 / 0})()}, "ZeroDivisionError"),
        ("1", {"a": 10**5000}, "cannot be written as JSON"),
        ("1", {"a": "x" * (MAX_MB * 2**20)}, f"more than {MAX_MB}"),
    ],
)
def test_a_row_that_cannot_be_sent_is_a_failure(task, response, row, reason):
    answer, after = ask(task, "evaluate", (response, row), ("7", {}))
    assert reason in answer and after == 7


def test_a_circular_and_a_deep_row_are_failures(task):
    circular, deep = {}, []
    circular["self"] = circular
    for _ in range(10**5):
        deep = [deep]
    *failed, after = ask(task, "evaluate", ("1", circular), ("1", {"deep": deep}), ("7", {}))
    assert all("cannot be written as JSON" in reason for reason in failed) and after == 7


def test_large_rows_and_lone_surrogates_arrive_whole(task):
    assert ask(task, "evaluate", ("len(row['a'])", {"a": "x" * 2**23})) == [2**23]
    assert ask(task, "evaluate", ("row['a'] == '\\ud800'", {"a": "\ud800"})) == [1]
    assert ask(task, "length", ("a\ud800", {})) == [2]


def test_other_numbers_are_kept_up_to_a_bound(task):
    async def run():
        pool = RewardPool(replace(task, reward="replying_reward:evaluate"))
        score = await pool.score(
            "{'score': 1, 'n': np.int64(3), 'f': 0.5, 'b': True, 'nan': float('nan'), 't': 'x', 'o': Odd()}", {}
        )
        dictionary = "{'score': 1, **{f'{i} ' + 'k' * 999: i for i in range(int(row['n']))}}"
        many = await pool.score(dictionary, {"n": 10**4})
        with pytest.raises(RewardFailed, match=f"more than {MAX_MB} MiB"):
            await pool.score(dictionary, {"n": 10**5})
        pool.close()
        return score.extras, many.extras

    few, many = asyncio.run(run())
    assert few == {"n": 3.0, "f": 0.5, "b": 1.0}
    assert len(many) == MAX_EXTRAS and set(many.values()) == set(range(MAX_EXTRAS)) and max(map(len, many)) <= 64


class Asked:
    """One loop and one pool for all examples of a property."""

    def __init__(self, task):
        self.loop = asyncio.new_event_loop()
        self.pool = RewardPool(replace(task, reward="replying_reward:evaluate", reward_timeout_s=5.0))

    def __call__(self, response, row):
        return self.loop.run_until_complete(outcome(self.pool, response, row))


@pytest.fixture(scope="module")
def asked(task):
    asked = Asked(task)
    yield asked
    asked.pool.close()
    asked.loop.close()


SPOKEN = st.one_of(
    st.floats().map(lambda x: f"float('{x}')"),
    st.integers().map(str),
    st.sampled_from([*VALUES, "os.kill(os.getpid(), signal.SIGKILL)", "{'score': 1, 'x': nested(10**5)}"]),
    st.text(max_size=5).map(repr),
    st.dictionaries(st.sampled_from(["score", "a"]), st.floats() | st.none() | st.booleans()).map(repr),
)
RAW = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda call, data: HEADER.pack(call, len(data)) + data,
        st.integers(0, 2**64 - 1),
        st.binary(max_size=20),
    ),
    st.just(b"x" * (2**20 + 1)),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SPOKEN, st.none() | RAW)
def test_any_answer_is_a_score_or_a_failure_and_the_next_call_is_right(asked, expression, raw):
    answer = asked(expression, {} if raw is None else {"raw": list(raw)})
    if isinstance(answer, float) and raw is None:
        nan = math.nan
        assert answer == float(_score(eval(expression, {"nan": nan, "inf": math.inf, "nested": lambda depth: []})))
    assert asked("7", {}) == 7


def _score(value):
    return value["score"] if isinstance(value, dict) else value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@given(st.dictionaries(st.sampled_from(["score", "extras", "error", "x"]), JSON | st.just({"k": 1e39})))
def test_any_json_object_is_read_as_a_score_or_a_failure(reply):
    reply = json.loads(json.dumps(reply))
    try:
        score = read_score(reply)
    except RewardFailed as failed:
        str(failed).encode()
        return
    assert score.value == reply["score"] and "error" not in reply
    assert all(math.isfinite(x) for x in score.extras.values()) and "".join(score.extras).isprintable()


def test_the_import_has_a_limit_of_its_own_that_the_sentence_names(task):
    slow = replace(task, reward="slow_reward:f", reward_startup_timeout_s=0.3)
    with pytest.raises(ConfigError, match=r"slow_reward:f: importing it took longer than task.reward_startup_timeout_s=0.3"):
        check_reward(slow)

    async def run():
        with pytest.raises(RewardFailed, match=r"task.reward_startup_timeout_s=0.3"):
            await RewardPool(slow).score("", {})

    asyncio.run(run())
    config = Config()
    config.model.builder, config.task.reward_startup_timeout_s = "tiny", 0
    with pytest.raises(ConfigError, match=r"task.reward_startup_timeout_s=0 is out of range"):
        check(config)


def test_a_module_that_writes_into_the_connection_is_refused_in_one_sentence(task):
    with pytest.raises(
        ConfigError, match=r"chatty_reward:f: importing it failed: its process sent something other than the answer"
    ):
        check_reward(replace(task, reward="chatty_reward:f"))


def test_a_machine_without_free_processes_is_a_failure_of_the_call(task, monkeypatch):
    monkeypatch.setattr(
        "workers.rewards.process.subprocess.Popen", lambda *_, **__: (_ for _ in ()).throw(BlockingIOError(11, "x"))
    )
    (answer,) = ask(task, "evaluate", ("1", {}))
    assert "BlockingIOError" in answer


def test_a_stopped_process_is_ended_after_the_limit(task):
    quick = replace(task, reward_timeout_s=0.5)
    answer, after = ask(quick, "evaluate", ("os.kill(os.getpid(), signal.SIGSTOP)", {}), ("7", {}))
    assert "reward_timeout_s=0.5" in answer and after == 7
