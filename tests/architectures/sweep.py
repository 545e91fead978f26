"""`make test-architectures`: try every causal language model of the installed transformers tiny, and write docs/models.md.

Each runs in a process of its own (`one`), two at a time, so that one that dies is a row and not the end. What was tried is kept
in ``--rows`` (JSON lines), and taken from there on the next call: delete the file to begin again. Ends with an error when
something that loads gives other numbers than transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = Path(__file__).parent
CLOSE = 1e-4
"""Nats."""
MOVED = 1e-3
"""Nats: less than that, and a comparison of exports would say nothing."""
TIMEOUT_S = 240
HEAD = """# Models

Which architectures of transformers train here, tried and not claimed: `{command}` builds every causal language
model of transformers {transformers} tiny (PEFT {peft}, vLLM {vllm}), and wrote this page. {trained} of {total} train,
{packed} of them packed.

- **trajectories**: *packed* shares a pass between several; *one at a time* gives the same numbers with smaller passes (the
  architecture does not keep neighbours apart); *refused* is said before anything is loaded, with this reason. The comparison is
  with transformers' eager attention on a small copy, to 1e-4 nats (`rlframe.exactness`).
- **adapters**: what `lora.targets=all-linear` adapts. Stacked parameters (the experts of a mixture) are no layers; where there
  are some they are named in the last column, to be given as `lora.target_parameters`. A run and `--dry-run` say what share of
  *your* model's weights that is; the shares of a tiny copy would say nothing.
- **exports**: a moved LoRA session as a PEFT adapter (A), merged into a Hugging Face folder (M), and a moved session on all
  weights as a folder (F), each loaded with plain transformers and PEFT and compared with the session, to 1e-4 nats.
- **torch**: `rollout.engine=torch` took the session's weights with the right checksum, and sampled with the numbers of eager
  passes; *no cache* means that it computes every token from the whole prefix, because a cache would change numbers.
- **vLLM**: *listed* is in vLLM's registry, and was not run; *ran* means that the real vLLM on a CPU loaded the tiny model and
  its log-probabilities agreed with transformers to 1e-3 nats. Whether your model's shapes have a kernel is up to vLLM.

| architecture | trajectories | adapters | exports | torch | vLLM | stacked |
|---|---|---|---|---|---|---|
"""


KNOWN = {
    ("laguna", "lora_adapter"): "PEFT renames shared_experts when it loads an adapter, its own too, and leaves them out",
}
"""Faults of other packages that only they can fix: the table shows them, the sweep does not end with an error."""


def try_one(kind: str, script: str = "one.py") -> dict[str, Any]:
    """The row of an architecture, whatever its process does."""
    row = {"kind": kind, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}
    command = [sys.executable, str(HERE / script), kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return row | {"unbuilt": f"it took more than {TIMEOUT_S} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        said = done.stderr.strip().rpartition("\n")[2][:200]
        return row | {"unbuilt": f"its process ended with {done.returncode}: {said}"}
    return json.loads(last)


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with an architecture that loads: numbers that differ, and failures that are no refusal."""
    found = []
    if row.get("refused") and not row["refused_cleanly"]:
        found.append(f"loading fails without a refusal: {row['refused']}")
    if "packs" not in row:
        return found
    for step in ("adapters", "exports"):
        if row.get(step):
            found.append(f"{step}: {row[step]}")
    for key in ("lora_adapter", "lora_merged", "full_merged"):
        value = row.get(key)
        if (row["kind"], key) in KNOWN:
            continue
        if isinstance(value, str) or (value is not None and not value <= CLOSE):
            found.append(f"{key}: {value if isinstance(value, str) else f'{value:.2g} nats off'}")
    for key in ("lora_moved", "full_moved"):
        if key in row and not row[key] >= MOVED:
            found.append(f"{key}: the session changed by {row[key]:.1g} nats only")
    for key in ("lora_engine", "full_engine"):
        value = row.get(key)
        if isinstance(value, str) or (value and not (value["checksum"] and value["difference"] <= CLOSE)):
            found.append(f"{key}: {value}")
    return found


def line(row: dict[str, Any], registry: set[str], ran: dict[str, Any]) -> str:
    """A row of the table."""
    kind = f"`{row['kind']}` {row['class']}"
    tried = ran.get(row["kind"])
    listed = "listed" if row["class"] in registry else "no"
    served = "ran" if tried is True else f"listed; did not run tiny here: {_cell(tried)[:120]}" if tried else listed
    if "packs" not in row:
        reason = row.get("refused") or f"cannot be built tiny: {row.get('unbuilt')}"
        word = "refused" if "refused" in row else "not tried"
        return f"| {kind} | {word}: {_cell(reason)} | | | | {served} | |"
    exports = "".join(
        letter
        for letter, key in (("A", "lora_adapter"), ("M", "lora_merged"), ("F", "full_merged"))
        if isinstance(row.get(key), float) and row[key] <= CLOSE
    )
    engines = [row.get(key) for key in ("lora_engine", "full_engine")]
    good = [e for e in engines if isinstance(e, dict) and e["checksum"] and e["difference"] <= CLOSE]
    if notes := [reason for (other, _), reason in KNOWN.items() if other == row["kind"]]:
        exports += f" ({notes[0]})"
    torch = "no" if len(good) < 2 else "yes" if good[0]["keeps_states"] else "yes, no cache"
    targets = " ".join(row.get("targets") or []) or _cell(str(row.get("adapters") or ""))
    way = "packed" if row["packs"] else "one at a time"
    return f"| {kind} | {way} | {targets} | {exports} | {torch} | {served} | {' '.join(row.get('stacked') or [])} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _version(module: str) -> str:
    """Of the distribution that ships ``module``; vLLM's build for CPUs has another name."""
    found = packages_distributions().get(module)
    return version(found[0]) if found else "not installed"


def _registry() -> set[str]:
    code = "from vllm import ModelRegistry; import json; print(json.dumps(sorted(ModelRegistry.get_supported_archs())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return set(json.loads(done.stdout.strip().rpartition("\n")[2])) if done.returncode == 0 else set()


def page(rows: list[dict[str, Any]], ran: dict[str, Any]) -> str:
    """docs/models.md."""
    registry = _registry()
    trained = [row for row in rows if "packs" in row]
    head = HEAD.format(
        command="make test-architectures",
        transformers=_version("transformers"),
        peft=_version("peft"),
        vllm=_version("vllm"),
        trained=len(trained),
        total=len(rows),
        packed=sum(row["packs"] for row in trained),
    )
    return head + "\n".join(line(row, registry, ran) for row in rows) + "\n"


def _kept(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["kind"]: row for row in map(json.loads, lines)}


def sweep(kinds: list[str], path: Path, script: str) -> dict[str, dict[str, Any]]:
    """Try what ``path`` does not have yet; returns all rows by architecture."""
    rows = _kept(path)
    with ThreadPoolExecutor(2) as pool, path.open("a") as file:
        missing = [kind for kind in kinds if kind not in rows]
        for row in pool.map(lambda kind: try_one(kind, script), missing):
            rows[row["kind"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['kind']}: {row.get('vllm') or '; '.join(faults(row)) or 'as it should be'}", flush=True)
    return rows


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help="architectures; all by default, and then the page is written")
    parser.add_argument("--rows", type=Path, default=Path("build/architectures.jsonl"), help="what was tried before")
    parser.add_argument("--vllm", action="store_true", help="instead, load those that vLLM lists in the real vLLM on this CPU")
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    kinds = options.kinds or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    engines = options.rows.with_name(f"{options.rows.stem}-vllm.jsonl")
    if options.vllm:
        trained, registry = _kept(options.rows), _registry()
        listed = [kind for kind in kinds if "packs" in trained.get(kind, {}) and trained[kind]["class"] in registry]
        for kind, row in sweep(listed, engines, "served.py").items():
            print(kind, row.get("vllm"))
        return 0
    rows = sweep(kinds, options.rows, "one.py")
    if not options.kinds:
        ran = {kind: row.get("vllm") for kind, row in _kept(engines).items()}
        options.page.write_text(page([rows[kind] for kind in kinds], ran))
    return int(any(faults(rows[kind]) for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
