"""Whatever lies beside checkpoints and samples under another name is left alone, and never taken for one of them."""

import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import save
from trainer.run.checkpoints import Checkpoints
from trainer.run.failures import CheckpointError
from trainer.settings.sections import CheckpointConfig
from trainer.watch import samples
from trainer.watch.step_names import is_step_name

STRANGE = [
    "step_000007_backup", "step_7", "step_000007.old", "step_000007 (copy)", "step_", "step_0000007", "step_-00007",
    "step_00007a", "step_00000\N{ARABIC-INDIC DIGIT SEVEN}", "step_000007.tar", "Step_000007", "step_000007\n",
    "step_+00007", "step_000_007", "step_000007.bak.tmp",
]  # fmt: skip


@given(st.integers(0, 10**9))
def test_every_step_has_one_name(step):
    assert is_step_name(f"step_{step:06d}")
    assert (f"step_{step}" == f"step_{step:06d}") == is_step_name(f"step_{step}")
    assert not is_step_name(f"step_0{step:06d}")


@settings(max_examples=200)
@given(st.text() | st.from_regex(r"step_[0-9]*.*", fullmatch=True))
@example(name="step_000007")
def test_only_names_that_we_write_are_names_of_steps(name):
    digits = name.removeprefix("step_")
    ours = digits.isascii() and digits.isdigit() and name == "step_" + str(int(digits)).rjust(6, "0")
    assert is_step_name(name) == ours


@pytest.fixture
def crowded(tmp_path):
    """Checkpoints of steps 6 and 7, with copies and files under every strange name."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=0))
    save(checkpoints, 7)
    root = tmp_path / "checkpoints"
    for name in STRANGE:
        shutil.copytree(root / "step_000007", root / name)
    (root / "step_000099").write_text("a file")
    (root / "notes.tmp").mkdir()
    return checkpoints


def test_copies_are_neither_used_nor_removed(crowded):
    newest, skipped = crowded.newest()
    assert (newest.name, skipped) == ("step_000007", [])
    with pytest.raises(CheckpointError, match=r"There is no checkpoint of step 8 .* there are: 7\.$"):
        crowded.at(8)
    save(crowded, 8)
    left = {path.name for path in crowded.root.iterdir()}
    assert left == {"step_000008", "LATEST", "step_000099", "notes.tmp", *STRANGE}
    assert (crowded.root / "LATEST").read_text() == "step_000008\n" and crowded.newest()[0].name == "step_000008"


def test_a_copy_under_the_name_of_another_step_is_not_that_step(crowded):
    shutil.copytree(crowded.root / "step_000007", crowded.root / "step_000050")
    newest, skipped = crowded.newest()
    assert newest.name == "step_000007"
    assert skipped == ["step_000050 was skipped: it is a copy of the checkpoint of step 7."]


@pytest.mark.parametrize("text", ["[]", "null", '{"format": 2, "files": []}', "7"])
def test_a_manifest_that_is_something_else_is_a_damaged_checkpoint(crowded, text):
    (crowded.root / "step_000007" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="step_000007 was skipped: its manifest is not one of a checkpoint"):
        crowded.newest()


def test_copies_of_samples_are_neither_shown_nor_removed(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    strange = [f"{name}.jsonl" for name in STRANGE if "\n" not in name]
    for name in ["step_000007.jsonl", "step_000012.jsonl", *strange]:
        (folder / name).write_text("")
    assert samples.sampled_steps(tmp_path) == {7: folder / "step_000007.jsonl", 12: folder / "step_000012.jsonl"}
    samples.drop_after(folder, 7)
    samples.write(folder, 9, [], 1)
    assert {path.name for path in folder.iterdir()} == {"step_000007.jsonl", "step_000009.jsonl", *strange}


def test_the_file_of_a_sample_is_written_by_the_same_rule(tmp_path):
    samples.write(tmp_path, 1234567, [], 1)
    assert [Path(path).stem for path in tmp_path.iterdir()] == ["step_1234567"] and is_step_name("step_1234567")
