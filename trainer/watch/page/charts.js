// Curves: one small chart a metric, one line a run, drawn as SVG. Text enters the page through textContent only.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 380, HEIGHT = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;
const hiddenRuns = new Set();
let smoothing = 0;
let axis = "step";
let redrawers = [];

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function format(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return String(x);
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(digits - 2) : String(Number(x.toPrecision(digits)));
}

// Labels of an axis, with as many digits as tell its numbers apart.
function labels(numbers) {
  for (let digits = 4; ; digits++) {
    const texts = numbers.map((x) => format(x, digits));
    if (digits === 12 || new Set(texts).size === texts.length) return texts;
  }
}

// Width of a label in units of the drawing; its font is that of "svg text" in the style sheet.
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "11px system-ui, sans-serif";
function widthOf(text) { return ruler.measureText(text).width; }

const tip = document.getElementById("tip");
function showTip(x, y, title, rows) {
  const body = element("table");
  for (const [name, value, colour] of rows) {
    const label = element("td");
    if (colour) {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = colour;
      label.append(swatch);
    }
    label.append(name);
    body.append(element("tr", {}, label, element("td", { class: "number" }, value)));
  }
  tip.replaceChildren(element("b", {}, title), body);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + "px";
}
function hideTip() { tip.hidden = true; }

function runColour(i) { return "var(--run-" + (i % 8) + ")"; }

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

// Exponential moving average with the weight of a start at zero divided out, as in Adam.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((x) => {
    mean = smoothing * mean + (1 - smoothing) * x;
    weight = smoothing * weight + (1 - smoothing);
    return mean / weight;
  });
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

// Where the steps of a run lie on the chosen axis.
function along(run, steps) {
  if (axis === "step") return steps;
  const [known, totals] = run.axes[axis];
  return steps.map((step) => (known.length ? totals[nearest(known, step)] : NaN)).filter(Number.isFinite);
}

function chart(key) {
  const meaning = DATA.meanings[key] || "";
  const figure = element("figure", { "data-metric": key }, element("figcaption", {}, element("b", {}, key), meaning));
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": key });
  figure.append(svg);
  let lines = [], toStep = null;

  function draw() {
    svg.replaceChildren();
    lines = DATA.runs
      .map((run, i) => ({ name: run.name, colour: runColour(i), i, run, series: run.metrics[key] }))
      .filter((line) => line.series && !hiddenRuns.has(line.i))
      .map((line) => ({ ...line, x: along(line.run, line.series[0]) }))
      .filter((line) => line.x.length);
    if (!lines.length) return;
    const xs = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
    let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Infinity, y1 = -Infinity;
    for (const line of lines) for (const y of line.series[1]) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 1; y0 -= room; y1 += room; }
    const pad = (y1 - y0) * 0.06; y0 -= pad; y1 += pad;
    const levels = ticks(y0, y1, 4), names = labels(levels);
    const left = Math.max(LEFT, ...names.map((name) => widthOf(name) + 6)), across = WIDTH - left - RIGHT;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * across;
    const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
    toStep = (ratio) => x0 + ((ratio * WIDTH - left) / across) * (x1 - x0);
    levels.forEach((y, i) => {
      svg.append(shape("line", { class: "axis", x1: left, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }));
      svg.append(shape("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, names[i]));
    });
    const marks = ticks(x0, x1, 5), texts = labels(marks);
    let end = 0;
    marks.forEach((x, i) => {
      const width = widthOf(texts[i]), middle = Math.min(px(x), WIDTH - width / 2 - 1);
      if (middle - width / 2 < end + 4) return;  // no room beside the one before
      end = middle + width / 2;
      svg.append(shape("text", { x: middle, y: HEIGHT - 6, "text-anchor": "middle" }, texts[i]));
    });
    for (const line of lines) {
      const steps = line.x, values = line.series[1];
      const path = (numbers) => "M" + numbers.map((y, k) => px(steps[k]).toFixed(1) + "," + py(y).toFixed(1)).join("L");
      const stroke = line.colour;
      const raw = shape("path", { class: smoothing ? "raw faint" : "raw", d: path(values) });
      raw.style.stroke = stroke;
      svg.append(raw);
      if (smoothing) {
        const smooth = shape("path", { class: "smooth", d: path(smoothed(values)) });
        smooth.style.stroke = stroke;
        svg.append(smooth);
      }
      if (steps.length <= 30) for (let k = 0; k < steps.length; k++) {
        const dot = shape("circle", { cx: px(steps[k]), cy: py(values[k]), r: 2 });
        dot.style.fill = stroke;
        svg.append(dot);
      }
    }
    svg.append(shape("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }));
    svg.toPixel = px;
  }

  svg.addEventListener("pointermove", (event) => {
    if (!lines.length) return;
    const box = svg.getBoundingClientRect();
    const step = toStep((event.clientX - box.left) / box.width);
    const rows = lines.map((line) => [line, nearest(line.x, step)]);
    const closest = rows.map(([line, k]) => line.x[k]).reduce((a, b) => (Math.abs(a - step) <= Math.abs(b - step) ? a : b));
    const cross = svg.querySelector(".cross"), x = svg.toPixel(closest);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) cross.setAttribute(name, value);
    showTip(event.clientX, event.clientY, axis + " " + format(closest), rows.map(([line, k]) => {
      const at = line.x[k];
      return [line.name, format(line.series[1][k]) + (at === closest ? "" : " (" + axis + " " + format(at) + ")"), line.colour];
    }));
  });
  svg.addEventListener("pointerleave", () => { hideTip(); svg.querySelector(".cross")?.setAttribute("visibility", "hidden"); });
  redrawers.push(draw);
  draw();
  return figure;
}

function redraw() { for (const draw of redrawers) draw(); }

function tableOf(head, rows, numberFrom = 1) {
  const table = element("table", {}, element("tr", {}, ...head.map((h, i) => element("th", i < numberFrom ? {} : { class: "number" }, h))));
  for (const cells of rows) {
    table.append(element("tr", {}, ...cells.map((cell, i) => element("td", i < numberFrom ? {} : { class: "number" }, cell))));
  }
  return element("div", { class: "scroll" }, table);
}

function drawSummary() {
  const rows = DATA.runs.map((run) => [run.name, ...run.summary.map((x) => format(x))]);
  document.getElementById("summary").append(tableOf(["run", ...DATA.summary], rows));
}

function drawControls() {
  DATA.runs.forEach((run, i) => {
    const box = element("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => { box.checked ? hiddenRuns.delete(i) : hiddenRuns.add(i); redraw(); });
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = runColour(i);
    document.getElementById("legend").append(element("label", {}, box, swatch, run.name));
  });
  const select = document.getElementById("axis");
  select.addEventListener("change", () => { axis = select.value; redraw(); });
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    document.getElementById("smoothing-value").textContent = slider.value;
    redraw();
  });
}

function drawCharts() {
  const known = new Set(DATA.runs.flatMap((run) => Object.keys(run.metrics)));
  for (const section of DATA.sections) {
    const keys = section.keys.filter((key) => known.delete(key));
    if (!keys.length) continue;
    document.getElementById("charts").append(
      element("section", {}, element("h2", {}, section.title), element("div", { class: "grid" }, ...keys.map(chart))));
  }
  const others = document.getElementById("others"), grid = others.querySelector(".grid"), filter = document.getElementById("filter");
  others.addEventListener("toggle", () => { if (others.open && !grid.children.length) grid.append(...[...known].sort().map(chart)); });
  filter.addEventListener("input", () => {
    for (const figure of grid.children) figure.hidden = !figure.dataset.metric.includes(filter.value.trim());
  });
}

function drawSettings() {
  const place = document.getElementById("settings"), keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.config)))];
  const cells = (key) => [key, ...DATA.runs.map((run) => (key in run.config ? run.config[key] : "–"))];
  const names = DATA.runs.map((run) => run.name);
  const all = keys.map(cells);
  if (DATA.runs.length > 1) {
    const differing = all.filter(([, ...values]) => new Set(values).size > 1);
    place.append(element("p", { class: "note" }, "What differs between these runs:"), tableOf(["setting", ...names], differing, 99));
  }
  place.append(element("details", {}, element("summary", {}, "All settings"), tableOf(["setting", ...names], all, 99)));
}

drawSummary();
drawControls();
drawCharts();
drawSettings();
