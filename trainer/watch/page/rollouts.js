// The token-level viewer of rollouts: every sampled token coloured by one number, all its numbers on hover or focus.
const NUMBERS = {
  advantage: { label: "advantage", kind: "signed", centre: 0 },
  ratio: { label: "ratio, trainer / sampler", kind: "signed", centre: 0, of: (x) => Math.log(x) },
  value: { label: "value", kind: "range" },
  return: { label: "return", kind: "range" },
  logprob: { label: "log-prob of the sampler", kind: "range" },
  trainer_logprob: { label: "log-prob of the trainer", kind: "range" },
  entropy: { label: "entropy", kind: "range" },
  version: { label: "policy version", kind: "range" },
  reward: { label: "reward", kind: "signed", centre: 0 },
};
const view = { run: 0, sample: Infinity, row: 0, by: "advantage" };  // Infinity: the newest

function mark(piece) {
  // What would be invisible, or would move the text around, is shown by a sign.
  return piece.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu, (c) =>
    c === "\n" ? "↵\n" : c === "\t" ? "→\t" : "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
}

function scale(tokens, by) {
  const { kind, of } = NUMBERS[by];
  const numbers = (tokens[by] || []).map((x, t) => (x === null || !tokens.sampled[t] ? null : of ? of(x) : x));
  const seen = numbers.filter((x) => x !== null && Number.isFinite(x));
  if (!seen.length) return null;
  const low = seen.reduce((a, b) => Math.min(a, b)), high = seen.reduce((a, b) => Math.max(a, b));
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const colour = (x) => {
    if (x === null || !Number.isFinite(x)) return "";
    if (kind === "signed") return `rgba(var(${x >= 0 ? "--plus" : "--minus"}), ${(0.6 * Math.abs(x) / most).toFixed(3)})`;
    return `rgba(var(--one), ${(0.06 + 0.5 * (high > low ? (x - low) / (high - low) : 0.5)).toFixed(3)})`;
  };
  return { numbers, low: kind === "signed" ? -most : low, high: kind === "signed" ? most : high, colour, back: of ? Math.exp : (x) => x };
}

function tokenRows(tokens, t) {
  const rows = [["token id", format(tokens.id[t])]];
  for (const [name, { label }] of Object.entries(NUMBERS)) {
    if (tokens[name] && (tokens.sampled[t] || name === "reward")) rows.push([label, format(tokens[name][t])]);
  }
  return rows;
}

function drawTokens(row) {
  const tokens = row.tokens, ramp = scale(tokens, view.by);
  const box = element("div", { class: "tokens" });
  tokens.piece.forEach((piece, t) => {
    if (row.omitted && t === row.omitted[0]) {
      box.append(element("span", { class: "mark" }, ` … ${row.omitted[1]} tokens left out … `));
    }
    const sampled = tokens.sampled[t];
    const span = element("span", { class: sampled ? "sampled" : "given" }, mark(piece) || "·");
    if (sampled) {
      span.tabIndex = 0;
      if (ramp) span.style.background = ramp.colour(ramp.numbers[t]);
    }
    const show = (x, y) => showTip(x, y, (sampled ? "" : "not sampled: ") + JSON.stringify(piece), tokenRows(tokens, t));
    span.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
    span.addEventListener("pointerleave", hideTip);
    span.addEventListener("focus", () => { const at = span.getBoundingClientRect(); show(at.left, at.bottom - 12); });
    span.addEventListener("blur", hideTip);
    box.append(span);
  });
  box.addEventListener("keydown", (event) => {
    const side = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!side || !event.target.classList.contains("sampled")) return;
    const spans = [...box.querySelectorAll(".sampled")];
    spans[spans.indexOf(event.target) + side]?.focus();
    event.preventDefault();
  });
  return box;
}

function drawRamp(row) {
  const ramp = scale(row.tokens, view.by);
  if (!ramp) return element("span", { class: "note" }, "this run has no such number");
  const strip = element("i", { class: "ramp" });
  const { low, high } = ramp, stops = [0, 0.25, 0.5, 0.75, 1].map((f) => ramp.colour(low + f * (high - low)));
  strip.style.background = `linear-gradient(to right, ${stops.join(",")})`;
  return element("span", { class: "note" }, format(ramp.back(low)), strip, format(ramp.back(high)));
}

function choice(label, options, chosen, change) {
  const select = element("select", { "aria-label": label });
  options.forEach(([value, text]) => select.append(element("option", { value }, text)));
  select.value = chosen;
  select.addEventListener("change", () => { change(select.value); drawRollouts(); });
  return element("label", {}, label + " ", select);
}

function drawRollouts() {
  const place = document.getElementById("rollouts");
  for (const old of [...place.children].slice(1)) old.remove();
  const runs = DATA.runs.map((run, i) => [i, run]).filter(([, run]) => run.samples.length);
  if (!runs.length) {
    place.append(element("p", { class: "note" }, "These runs have no samples of rollouts (log.rollouts_every)."));
    return;
  }
  if (!DATA.runs[view.run].samples.length) view.run = runs[0][0];
  const run = DATA.runs[view.run];
  view.sample = Math.min(view.sample, run.samples.length - 1);
  const sample = run.samples[view.sample];
  view.row = Math.min(view.row, sample.rows.length - 1);
  const row = sample.rows[view.row];
  const bar = element("div", { class: "bar" });
  if (runs.length > 1) bar.append(choice("Run", runs.map(([i, r]) => [i, r.name]), view.run, (v) => { view.run = Number(v); view.sample = Infinity; }));
  bar.append(choice("Step", run.samples.map((s, i) => [i, s.step]), view.sample, (v) => { view.sample = Number(v); }));
  bar.append(choice("Colour by", Object.entries(NUMBERS).map(([k, n]) => [k, n.label]), view.by, (v) => { view.by = v; }), drawRamp(row));
  const list = element("div", { class: "list", role: "group", "aria-label": "Rollouts of this step" });
  sample.rows.forEach((r, i) => {
    const button = element("button", { "aria-pressed": String(i === view.row), title: r.prompt }, `${format(r.reward)}  ${mark(r.response).trim() || "(empty)"}`);
    button.addEventListener("click", () => { view.row = i; drawRollouts(); });
    list.append(button);
  });
  const versions = row.versions ? (row.versions[0] === row.versions[1] ? row.versions[0] : row.versions.join(" to ")) : "–";
  const facts = `prompt ${row.prompt_id}, reward ${format(row.reward)}, ended by ${row.finish}, ${row.length} tokens, policy version ${versions}`
    + Object.entries(row.reward_extra || {}).map(([name, x]) => `, ${mark(name)} ${format(x)}`).join("")
    + (row.reward_failure ? `, no reward: ${mark(row.reward_failure)}` : "");
  const shown = element("div", {}, element("div", { class: "note" }, facts), drawTokens(row));
  place.append(bar, element("div", { class: "viewer" }, list, shown),
    element("p", { class: "note" }, "Grey text was given (prompt, observations); underlined tokens were sampled. Hover a token, or Tab to one and use the arrow keys."));
}

drawRollouts();
