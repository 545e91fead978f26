"""The report: what is in the page, and what a real browser makes of it."""

import json
import math
import re

import numpy as np
import pytest

from rlframe.config import ConfigError
from tests.support.browser import page
from trainer.cli.main import main
from trainer.watch import report, samples

NASTY = [
    "</script><script>window.owned = 1</script>",
    "<img src=x onerror=window.owned=1>",
    "<!--<script>",
    "]]>",
    "${window.owned = 1}",
    "$title",
    "&lt;b&gt;",
    "\u2028",
    "\x1b[31m",
    "\n",
    "'\"\\",
    "日本",
]
GIVEN = ["The ", "prompt"]


def row(step: int, reward: float) -> dict:
    pieces = GIVEN + NASTY
    count = len(pieces)
    sampled = [False] * len(GIVEN) + [True] * len(NASTY)

    def column(numbers):
        return [None] * len(GIVEN) + list(numbers)

    n = len(NASTY)
    tokens = {
        "piece": pieces,
        "id": list(range(100, 100 + count)),
        "sampled": sampled,
        "logprob": column(-0.25 * (t + 1) for t in range(n)),
        "trainer_logprob": column(-0.25 * (t + 1) + math.log(1.5) for t in range(n)),
        "ratio": column([1.5] * n),
        "advantage": column(0.5 - 0.125 * t for t in range(n)),
        "value": column(0.0625 * t for t in range(n)),
        "return": column([reward] * n),
        "version": column([step - 1] * n),
        "reward": [0.0] * (count - 1) + [reward],
        "entropy": column([0.75] * n),
    }
    return {
        "step": step,
        "prompt_id": "<b>p</b>",
        "index": step,
        "env": "env",
        "prompt": "".join(GIVEN),
        "response": "".join(NASTY),
        "reward": reward,
        "finish": "stop",
        "versions": [step - 1, step - 1],
        "length": count,
        "omitted": None,
        "tokens": tokens,
    }


def make_run(run_dir, rise: float, lr: float):
    (run_dir / "rollouts").mkdir(parents=True)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(41):
            metrics = {"step": step, "reward/mean": rise * step, "off_policy/max": min(step, 2), "time/values": 0.5}
            if rise == 0.01 and step:
                metrics |= {"time/step": 2.0, "perf/accepted_tokens_per_s": 50.0}
            metrics |= {"critic/explained_variance": None if step == 3 else step / 50, "rollout_corr/k3_kl": 0.001}
            if step % 20 == 0:
                metrics["eval/arithmetic/reward"] = rise * step
            file.write(json.dumps(metrics) + "\n")
        file.write('{"step": 41, "reward/me')  # the run is writing
    (run_dir / "config.yaml").write_text(
        f"name: {run_dir.name}\nactor:\n  optim:\n    lr: {lr}\ntask:\n  options:\n    api_key: k\n"
    )
    for step in (10, 20):
        samples.write(run_dir / "rollouts", step, [row(step, 0.0), row(step, 1.0)], 2**20)
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return make_run(root / "a&b", 0.01, 1e-5), make_run(root / "second", 0.02, 1e-4)


def data_of(text: str) -> dict:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(block)


def test_the_page_holds_the_numbers_and_nothing_of_it_can_end_a_script(runs, capsys):
    assert main(["report", str(runs[0])]) == 0
    output = runs[0] / "report.html"
    assert str(output) in capsys.readouterr().out
    text = output.read_text("utf-8")
    assert text.count("<script") == text.count("</script>") == 2 and "owned = 1<" not in text
    assert "<title>rlframe: a&amp;b</title>" in text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text.split('id="data">')[0])
    (run,) = data_of(text)["runs"]
    steps, values = run["metrics"]["reward/mean"]
    assert steps == list(range(41)) and values == pytest.approx([0.01 * step for step in steps])
    assert len(run["metrics"]["critic/explained_variance"][0]) == 40, "null is left out"
    assert [sample["step"] for sample in run["samples"]] == [10, 20]
    assert run["samples"][0]["rows"][0]["tokens"]["piece"][2:] == NASTY
    assert run["config"]["actor.optim.lr"] == "1e-05" and run["config"]["task.options.api_key"] == "***"
    assert run["axes"]["seconds"] == [steps, [2 * step for step in steps]]
    assert run["axes"]["tokens"] == [steps, [100 * step for step in steps]]
    assert run["summary"] == [40, 0, 0.4, 0.4, pytest.approx(0.355), pytest.approx(0.71), 0.001, 2]


def test_long_runs_are_thinned_and_keep_their_ends():
    steps, values = report._thinned(list(range(50_001)), [float(x) for x in range(50_001)])
    assert len(steps) == report.MAX_POINTS and (steps[0], steps[-1]) == (0, 50_000)
    assert values == steps and max(np.diff(steps)) - min(np.diff(steps)) <= 1


def test_what_is_no_run_is_one_sentence(tmp_path, runs):
    for make in (lambda: None, lambda: (tmp_path / "metrics.jsonl").touch()):
        make()
        with pytest.raises(ConfigError):
            report.write_report([tmp_path], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  const light = (c) => {
    const [r, g, b] = c.map((x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const worst = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("script, style, noscript, option")) continue;
    const layers = [];
    for (let e = node; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
    canvas.globalAlpha = 1;
    canvas.fillStyle = "white"; canvas.fillRect(0, 0, 1, 1);
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    const under = light([...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3));
    const style = getComputedStyle(node);
    canvas.globalAlpha = Number(style.opacity);
    canvas.fillStyle = node instanceof SVGElement ? style.fill : style.color; canvas.fillRect(0, 0, 1, 1);
    const over = light([...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3));
    const ratio = (Math.max(under, over) + 0.05) / (Math.min(under, over) + 0.05);
    const name = node.tagName + "." + (node.getAttribute("class") || "");
    if (!(name in worst) || ratio < worst[name]) worst[name] = ratio;
  }
  return worst;
})()"""


@pytest.mark.slow
def test_in_a_browser(runs, tmp_path):
    output = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "-o", str(output)]) == 0
    with page(tmp_path / "profile") as tab:
        tab.open(output.as_uri())

        # Both runs are in one chart, and a box hides one of them.
        paths = "document.querySelectorAll('figure[data-metric=\"reward/mean\"] path').length"
        assert tab.run(paths) == 2
        assert tab.run("[...document.querySelectorAll('#legend label')].map((e) => e.textContent)") == ["a&b", "second"]
        tab.run("document.querySelector('#legend input').click()")
        assert tab.run(paths) == 1
        tab.run("document.querySelector('#legend input').click()")
        assert tab.run("document.querySelectorAll('#charts figure').length") == 7
        tab.run("document.querySelector('#others').open = true; new Promise((r) => setTimeout(r))")
        assert tab.run("[...document.querySelectorAll('#others figure')].map((e) => e.dataset.metric)") == ["time/values"]

        # The crosshair names the step under the mouse and both runs' numbers there: the axis has 320 of the
        # drawing's 380 units and begins at 52, so the middle of the drawing is step (190 - 52) / 320 * 40 = 17.25.
        tab.hover('figure[data-metric="reward/mean"] svg')
        shown = tab.run("document.querySelector('#tip').textContent")
        step = int(re.match(r"step (\d+)", shown)[1])
        assert step == 17
        assert tab.run("[...document.querySelectorAll('#tip td.number')].map((e) => Number(e.textContent))") == pytest.approx(
            [0.01 * step, 0.02 * step]
        )

        # Over seconds only the run that measured them is left; over steps it is at the same place as before.
        tab.run(CHOOSE.format("#axis", "seconds"))
        assert tab.run(paths) == 1
        tab.hover('figure[data-metric="reward/mean"] svg')
        assert tab.run("document.querySelector('#tip').textContent") == "seconds 34a&b0.17"
        tab.run(CHOOSE.format("#axis", "step"))
        assert tab.run(paths) == 2

        tokens_are_text(tab)

        # Settings that differ are listed, and everything can be read in light and dark.
        assert tab.run("document.querySelector('#settings table').innerText").split() == [
            "setting", "a&b", "second", "name", "a&b", "second", "actor.optim.lr", "1e-05", "0.0001"
        ]  # fmt: skip
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            worst = tab.run(CONTRAST)
            assert len(worst) > 10 and min(worst.values()) >= 4.5, (scheme, sorted(worst.items(), key=lambda w: w[1])[:5])

        assert tab.run("window.owned === undefined")
        assert tab.problems == [] and tab.requests == [output.as_uri()]


def tokens_are_text(tab):
    """Whatever tokens say, they are text; a token's numbers appear under the mouse."""
    pieces = tab.run("[...document.querySelectorAll('.tokens .sampled')].map((e) => e.textContent)")
    assert pieces[:7] == NASTY[:7] and pieces[7:10] == ["\\u2028", "\\u001b[31m", "↵\n"] and pieces[10:] == NASTY[10:]
    assert tab.run("[...document.querySelectorAll('.tokens .given')].map((e) => e.textContent)") == GIVEN
    tab.hover(".tokens .sampled", 5)
    tip = tab.run("[...document.querySelectorAll('#tip tr')].map((r) => [...r.cells].map((c) => c.textContent))")
    assert dict(tip) == {
        "token id": "107",
        "advantage": "-0.125",
        "ratio, trainer / sampler": "1.5",
        "value": "0.3125",
        "return": "0",
        "log-prob of the sampler": "-1.5",
        "log-prob of the trainer": f"{-1.5 + math.log(1.5):.4g}",
        "entropy": "0.75",
        "policy version": "19",
        "reward": "0",
    }
    background = "getComputedStyle(document.querySelectorAll('.tokens .sampled')[0]).backgroundColor"
    by_advantage = tab.run(background)
    tab.run(CHOOSE.format('[aria-label="Colour by"]', "value"))
    assert tab.run(background) != by_advantage
    tab.run("document.querySelectorAll('.list button')[1].click()")
    assert "reward 1," in tab.run("document.querySelector('.viewer .note').textContent")


CHOOSE = "(() => {{ const s = document.querySelector('{}'); s.value = '{}'; s.dispatchEvent(new Event('change')); }})()"
LABELS = """[...document.querySelectorAll("figure svg")].map((svg) => [...svg.querySelectorAll("text")].map((text) => {
  const box = text.getBBox();
  return [text.textContent, box.x, box.y, box.x + box.width, box.y + box.height];
}))"""
SCALES = {
    "reward/mean": lambda step: step / 1000,
    "actor/entropy": lambda step: 1000.1 + step * 3e-4,
    "rollout_corr/kl": lambda step: -1.25e-5 * step,
    "rollout_corr/k3_kl": lambda step: 1e-9 * (1 + step),
    "actor/grad_norm": lambda step: -1.5e6 + 12345 * step,
    "off_policy/mean": lambda step: 3e11 + 1e8 * step,
    "idle/trainer": lambda step: 0.5,
}
"""Curves whose labels are long, or alike in their first digits."""


@pytest.mark.slow
def test_the_labels_of_every_chart_lie_within_it_apart_and_differ(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(0, 1001, 50):
            row = {"step": step, "time/step": 3e5, "perf/accepted_tokens_per_s": 1e5}
            file.write(json.dumps(row | {key: scale(step) for key, scale in SCALES.items()}) + "\n")
    output = tmp_path / "report.html"
    report.write_report([tmp_path], output)
    with page(tmp_path / "profile") as tab:
        tab.open(output.as_uri())
        for axis in ("step", "seconds", "tokens"):
            tab.run(CHOOSE.format("#axis", axis))
            charts = tab.run(LABELS)
            assert len(charts) >= len(SCALES)
            for labels in charts:
                assert len(labels) >= 6, "both axes are labelled"
                for i, (text, left, top, right, bottom) in enumerate(labels):
                    assert left >= 0 and top >= 0 and right <= 380 and bottom <= 190, (axis, text, left, top, right, bottom)
                    for other, left2, top2, right2, bottom2 in labels[:i]:
                        apart = right <= left2 or right2 <= left or bottom <= top2 + 1 or bottom2 <= top + 1
                        assert apart, (axis, text, other)
                # Labels of one axis differ; those below have one height.
                below = max(top for _, _, top, _, _ in labels)
                for row in (True, False):
                    texts = [text for text, _, top, _, _ in labels if (top > below - 1) == row]
                    assert len(set(texts)) == len(texts) >= 2, (axis, texts)
        assert tab.problems == []
