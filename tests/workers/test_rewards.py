"""Reward functions in killable processes: how they may look, and what a hang, a crash or a leak costs."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rlframe.config import ConfigError
from workers.environments.settings import TaskConfig
from workers.rewards.pool import RewardFailed, RewardPool, check_reward

MODULE = """
import asyncio, os, time
from fractions import Fraction

def length(response, row): return len(response) / row["wanted"]
async def later(response, row):
    await asyncio.sleep(0.001)
    return {"score": True, "words": 3, "note": "x"}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth and data_source == "gsm" and extra_info == {"i": 1})
def everything(solution_str, **kwargs): return float(set(kwargs) == {"data_source", "ground_truth", "extra_info"})
def rational(response, row): return Fraction(1, 4)
def one_parameter(response): return 1.0
def three(response, row, more): return 1.0
def hashed(response, row): return hash("a word")
def pid(response, row):
    print("a user prints")
    return os.getpid()
def behave(response, row):
    if response == "hang":
        while True: pass
    if response == "until":
        while not os.path.exists(row["file"]): time.sleep(0.01)
    if response == "fork":
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        open(row["file"], "w").write(str(child.pid))
        time.sleep(600)
    if response == "exit": os._exit(7)
    if response == "sys.exit": raise SystemExit(3)
    if response == "segv": os.kill(os.getpid(), 11)
    if response == "memory": return len(bytearray(400 * 2**20))
    if response == "raise": return 1 / 0
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "0.5", "list": [1], "dict": {"reward": 1}}
    return values.get(response, 1)
number = 3
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_reward.py").write_text(MODULE)
    (folder / "broken_reward.py").write_text("import no_such_package_at_all\n")
    (folder / "dying_reward.py").write_text("import os; os._exit(4)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield TaskConfig(name="jsonl", reward_workers=1, reward_timeout_s=1.0)


def scores(task, function, *responses, row=None, fresh=None):
    """One pool, one call after the other; a failure is its text."""

    async def run():
        pool = RewardPool(replace(task, reward=f"user_reward:{function}", **(fresh or {})))
        results = []
        for response in responses:
            try:
                results.append(await pool.score(response, row or {}))
            except RewardFailed as error:
                results.append(str(error))
        pool.close()
        return results

    return asyncio.run(run())


def values(*args, **kwargs):
    return [score.value for score in scores(*args, **kwargs)]


def test_a_function_of_response_and_row(task):
    assert values(task, "length", "abcd", "a", row={"wanted": 8}) == [0.5, 0.125]
    assert values(task, "rational", "") == [0.25]


def test_a_coroutine_and_a_dict_with_more_numbers(task):
    (score,) = scores(task, "later", "")
    assert (score.value, score.extras) == (1.0, {"words": 3.0})


def test_verl_s_signature_is_called_as_verl_calls_it(task):
    row = {"data_source": "gsm", "reward_model": {"ground_truth": "7"}, "extra_info": {"i": 1}}
    assert values(task, "compute_score", "7", "8", row=row) == [1.0, 0.0]
    assert values(task, "everything", "7", row=row) == [1.0]
    assert check_reward(replace(task, reward="user_reward:compute_score"))
    assert not check_reward(replace(task, reward="user_reward:length"))


def test_one_process_serves_many_calls_and_it_is_not_ours(task):
    one, two = values(task, "pid", "", "")
    assert one == two != os.getpid()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", r"ZeroDivisionError: division by zero \(.*user_reward.py, line \d+\)"),
        ("sys.exit", "SystemExit"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("none", "NoneType None"),
        ("text", "'0.5', which is not a number"),
        ("list", "list"),
        ("dict", "without 'score'"),
    ],
)
def test_what_is_not_a_finite_number_is_a_failure_and_the_process_continues(task, response, reason):
    failure, after = scores(task, "behave", response, "fine")
    assert isinstance(failure, str) and after.value == 1
    assert re.search(reason, failure), failure


def test_a_hang_is_ended_after_its_time_limit_and_never_blocks_the_loop(task):
    async def run():
        pool = RewardPool(replace(task, reward="user_reward:behave"))
        beats = 0

        async def heart():
            nonlocal beats
            while True:
                await asyncio.sleep(0.02)
                beats += 1

        pulse = asyncio.create_task(heart())
        with pytest.raises(RewardFailed, match="reward_timeout_s=1"):
            await pool.score("hang", {})
        pulse.cancel()
        after = await pool.score("fine", {})
        pool.close()
        return beats, after.value

    beats, after = asyncio.run(run())
    assert after == 1
    assert beats >= 2, "a blocked loop has none"


@pytest.mark.parametrize(("response", "cause"), [("exit", "exit code 7"), ("segv", "SIGSEGV")])
def test_a_crash_is_a_failure_and_the_next_call_gets_a_new_process(task, response, cause):
    failure, after = scores(task, "behave", response, "fine")
    assert cause in failure and after.value == 1


def test_memory_is_limited(task):
    failure, after = scores(task, "behave", "memory", "fine", fresh={"reward_memory_mb": 128})
    assert "task.reward_memory_mb" in failure and after.value == 1
    assert values(task, "behave", "memory", fresh={"reward_timeout_s": 10}) == [400 * 2**20]


def test_what_a_hanging_function_started_ends_with_it(task, tmp_path):
    (failure,) = scores(task, "behave", "fork", row={"file": str(tmp_path / "pid")})
    assert "reward_timeout_s" in failure
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_slow_call_occupies_one_process_and_the_others_continue(task, tmp_path):
    async def run():
        pool = RewardPool(replace(task, reward="user_reward:behave", reward_workers=2, reward_timeout_s=250))
        slow = asyncio.create_task(pool.score("until", {"file": str(tmp_path / "done")}))
        fine = [(await pool.score("fine", {})).value for _ in range(20)]
        assert not slow.done()
        (tmp_path / "done").touch()
        await slow
        pool.close()
        return fine

    assert asyncio.run(run()) == [1] * 20


def test_strings_hash_alike_in_every_process(task, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    first = values(task, "hashed", "")
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert values(task, "hashed", "") == first


ORPHANS = """
import asyncio, os, signal, sys
from workers.rewards import pool, process
from workers.environments.settings import TaskConfig
process.GRACE_S = 0.5
async def main():
    hanging, idle = (pool.RewardPool(TaskConfig(name="jsonl", reward="user_reward:behave")) for _ in range(2))
    hanging.task.reward_timeout_s = 1.0
    await hanging.score("fine", {})
    print(hanging._idle[0].process.pid, flush=True)
    call = asyncio.create_task(hanging.score("hang", {}))
    await idle.score("fine", {})
    print(idle._idle[0].process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_processes_end_with_their_parent_also_one_in_a_call_that_never_returns(task):
    parent = subprocess.run(
        [sys.executable, "-c", ORPHANS], env=environment_of_user(), capture_output=True, text=True, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(_runs(int(pid)) for pid in parent.stdout.split()):
        time.sleep(0.05)
    assert len(parent.stdout.split()) == 2 and not any(_runs(int(pid)) for pid in parent.stdout.split())


def environment_of_user():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def test_a_cancelled_call_leaves_no_answer_for_the_next_one(task):
    async def run():
        pool = RewardPool(replace(task, reward="user_reward:length", reward_timeout_s=30))
        await pool.score("a", {"wanted": 1})
        call = asyncio.create_task(pool.score("abc", {"wanted": 1}))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        score = await pool.score("ab", {"wanted": 1})
        pool.close()
        return score.value

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("user_reward", "is not module:function"),
        ("no_such_reward:f", "no module no_such_reward, neither in the current directory nor installed"),
        ("user_reward.sub:f", "no module user_reward.sub"),
        ("broken_reward:f", "importing broken_reward failed: ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("dying_reward:f", "importing it failed: it ended its process .exit code 4"),
        ("user_reward:lenght", "has no lenght; did you mean length"),
        ("user_reward:number", "is not a function"),
        ("user_reward:one_parameter", r"takes \(response\), but"),
        ("user_reward:three", r"takes \(response, row, more\), but"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_sentence(task, reward, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_reward(replace(task, reward=reward))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"task.reward={reward}")
