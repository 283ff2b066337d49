// The page of `jaxrl view` and `jaxrl report`. Text from files becomes text nodes, never markup.
"use strict";

const main = document.getElementById("main");
const tip = document.getElementById("tip");
const dataElement = document.getElementById("data");
const embedded = dataElement && JSON.parse(dataElement.textContent);  // null on the live page
const settings = { smoothing: 5, isLog: false, isCombined: true };
const hiddenRuns = new Set();
const tables = [];  // trajectories, by run
let overview = null;
let update = null;  // function that redraws the current view after files have changed
let numViews = 0;

async function ask(address, names = []) {
  if (embedded) {
    const value = embedded[address];
    if (!value) throw new Error("Not included in this file; `jaxrl view` shows everything.");
    if (value.error) throw new Error(value.error);
    return value;
  }
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  const response = await fetch(`/api/${address}?${query}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

// ---------------------------------------------------------------- elements and numbers

const SVG = new Set(["svg", "g", "path", "line", "text", "circle", "title"]);

function el(tag, attributes, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

const div = (kind, ...children) => el("div", { class: kind }, ...children);
const said = (...children) => el("span", { class: "said" }, ...children);
const soft = (...children) => el("p", { class: "soft said" }, ...children);
const small = (...children) => el("small", {}, ...children);
const facts = (pairs) => div("facts", pairs.map(([label, value]) => el("span", {}, small(label), said(value))));
const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);
const words = (name) => String(name).replaceAll("_", " ");
const integer = (value) => Math.round(value).toLocaleString("en");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const unique = (values) => [...new Set(values)];
const objects = (value) => (Array.isArray(value) ? value : []).filter((item) => item && typeof item === "object");
const isNumber = (value) => typeof value === "number";
const score = (value) => (Math.abs(value) < 100 ? value.toFixed(3) : number(value));

function number(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e7 && (Number.isInteger(value) || size >= 1e4)) return integer(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds < 60) return seconds < 1 ? `${number(1000 * seconds, 2)} ms` : `${number(seconds, 3)} s`;
  const total = Math.round(seconds), minutes = Math.floor(total / 60), two = (value) => String(value).padStart(2, "0");
  return minutes < 60 ? `${minutes} min ${two(total % 60)} s` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

// A table: text in the first `numTexts` columns, numbers in the rest. Cells are values or [value, note].
function table(heads, rows, numTexts = 1) {
  const kind = (column) => (column < numTexts ? null : "n");
  const cell = (value, column) => el(column ? "td" : "th", { class: kind(column) },
    Array.isArray(value) ? [value[0], value[1] && small(value[1])] : value);
  return div("scroll", el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { class: kind(i) }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

const hash = (view, parameters) => `#${view}?${new URLSearchParams(parameters)}`;

function keepHash(view, parameters, inputs = []) {
  const filled = inputs.filter((input) => input.value).map((input) => [input.name, input.value]);
  history.replaceState(null, "", hash(view, [...parameters, ...filled]));
}

const input = (query, name, placeholder, type = "search") => el("input",
  { name, type, placeholder, "aria-label": placeholder, value: query.get(name) || "" });

const select = (query, name, options, value = query.get(name) || "") => el("select",
  { name, "aria-label": words(name) },
  options.map(([key, label]) => el("option", { value: key, selected: String(key) === value }, label)));

function debounce(run) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(run, 120); };
}

// ---------------------------------------------------------------- runs

const allRuns = () => overview.runs.map((_, run) => run);
const visibleRuns = () => allRuns().filter((run) => !hiddenRuns.has(run));
const isSingle = () => overview.runs.length === 1;
const hasSeeds = () => overview.groups.some((group) => group.runs.length > 1);
const groupOf = (run) => overview.groups.findIndex((group) => group.runs.includes(run));
const colorOf = (run) => (settings.isCombined && hasSeeds() ? groupOf(run) : run);
const dot = (color) => el("i", { class: `dot c${color % 8}` });
const chosenRun = (query) => Math.min(Number(query.get("run")) || 0, overview.runs.length - 1);
const suiteLabels = () => Object.assign({}, ...overview.runs.map((run) => run.suites));

function runSelect(query, view) {
  if (isSingle()) return null;
  const box = select(query, "run", overview.runs.map(({ name }, run) => [run, name]));
  box.addEventListener("input", () => { location.hash = hash(view, [["run", box.value]]); });
  return box;
}

function drawHeader() {
  document.title = `${overview.runs.map((run) => run.name).join(", ")} · jaxrl`;
  const toggle = (run) => () => {
    if (!hiddenRuns.delete(run)) hiddenRuns.add(run);
    drawHeader();
    route();
  };
  document.getElementById("runs").replaceChildren(...isSingle() ? [] : overview.runs.map((run, i) => el("button",
    { "aria-pressed": String(!hiddenRuns.has(i)), title: run.folder, onclick: toggle(i) },
    dot(colorOf(i)), run.name)));
  const [indexed, files] = ["num_indexed", "num_files"]
    .map((name) => sum(overview.runs.map((run) => run[name])));
  showStatus(indexed < files ? `Indexing trajectories: ${indexed} of ${files} files.` : "");
}

function showStatus(text) {
  Object.assign(document.getElementById("status"), { hidden: !text, textContent: text });
}

// ---------------------------------------------------------------- curves

const CHARTS = [
  ["Reward", "mean of sampled trajectories", [["reward", "critic/rewards/mean"]], true],
  ["Trajectories with a signal", "share with an advantage", [["share", "rollout/informative_share"]], true],
  ["Response length", "sampled tokens", [["mean", "response_length/mean"], ["max", "response_length/max"]], true],
  ["Searches per question", "mean", [["searches", "num_searches/mean"]], true],
  ["Entropy", "nats per token", [["entropy", "actor/entropy"]], true],
  ["Episode outcomes", "share of trajectories",
    ["answered", "abstained", "malformed", "out_of_budget", "environment_error"]
      .map((name) => [words(name), `outcome/${name}`])],
  ["Groups by correctness", "share before filtering",
    ["mixed", "all_right", "all_wrong", "failed"].map((name) => [words(name), `filter/${name}_share`])],
  ["KL divergence", "nats per token",
    [["from the reference", "actor/kl_loss"], ["of the update", "actor/ppo_kl"]]],
  ["Gradient norm", "before clipping", [["gradient", "actor/grad_norm"]]],
  ["Sampler–trainer gap", "nats, same tokens",
    [["mean", "rollout_corr/logprob_diff_mean"], ["max", "rollout_corr/logprob_diff_max"]]],
  ["Throughput", "tokens per second", [["throughput", "perf/throughput"]]],
  ["Warm-start loss", "nats per token", [["loss", "sft/loss"]], false, "sft"],
].map(([title, unit, lines, isMain, stage = "train"]) => ({ title, unit, lines, isMain, stage }));

// Names of the environments of the visible runs that have several.
const environments = () => unique(visibleRuns()
  .flatMap((run) => (overview.runs[run].metrics.train || []).map((name) => /^env\/([^/]+)\/share$/.exec(name)))
  .filter(Boolean).map(([, name]) => name));

// The charts, after the first of them those of each environment.
function allCharts() {
  const own = environments().flatMap((name) => [
    { ...CHARTS[0], title: `Reward: ${name}`, lines: [["reward", `env/${name}/critic/rewards/mean`]] },
    { ...CHARTS[0], title: `Exact match in training: ${name}`, lines: [["exact match", `env/${name}/reward/exact_match/mean`]] },
  ]);
  return [CHARTS[0], ...own, ...CHARTS.slice(1)];
}

const MAX_CHARTS = 48;
const WIDTH = 420, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 20;

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  const first = Math.ceil(low / size - 1e-9), last = Math.floor(high / size + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * size);
}

// Use at least three digits, and more if rounding would move a label by a visible part of the gap.
function tickLabels(values) {
  const gap = values[1] - values[0] || Infinity;
  let digits = 3;
  const isOff = (value) => Math.abs(Number(value.toPrecision(digits)) - value) > 0.05 * gap;
  while (digits < 12 && values.some(isOff)) digits += 1;
  return values.map((value) => number(value, digits));
}

// Moving average. Near the ends the window shrinks and stays symmetric.
function smooth(points) {
  const half = Math.max(2, Math.round(points.length * settings.smoothing / 200));
  if (!settings.smoothing || points.length < 20) return null;
  const sums = [0];
  points.forEach((point) => sums.push(sums.at(-1) + point[1]));
  return points.map(([step], i) => {
    const side = Math.min(half, i, points.length - 1 - i);
    return [step, (sums[i + side + 1] - sums[i - side]) / (2 * side + 1)];
  });
}

function interpolate(points, step) {
  const next = Math.max(1, points.findIndex((point) => point[0] >= step));
  if (points.length === 1) return points[0][1];
  const [[x0, y0], [x1, y1]] = [points[next - 1], points[next]];
  return y0 + (y1 - y0) * (step - x0) / (x1 - x0);
}

// Mean, minimum and maximum of several seeds' curves, at steps that all of them have reached.
function combine(curves) {
  const filled = curves.filter((points) => points.length);
  if (filled.length < 2) return filled[0] || [];
  const start = Math.max(...filled.map((points) => points[0][0]));
  const end = Math.min(...filled.map((points) => points.at(-1)[0]));
  return filled[0].filter(([step]) => step >= start && step <= end).map(([step]) => {
    const values = filled.map((points) => interpolate(points, step));
    return [step, sum(values) / values.length, Math.min(...values), Math.max(...values)];
  });
}

// Files and addresses hold global steps. The page counts the steps of the stage `train`, so that the
// curves of runs with different warm starts align.
const stepsBefore = (run) => overview.runs[run].offset;
const shownStep = (run, step) => integer(step - stepsBefore(run));
const stepName = (run, step) => (step < stepsBefore(run) ? `warm-start step ${integer(step)}`
  : `step ${shownStep(run, step)}`);

// One line per label and visible run; combined seeds count as one run.
function makeLines(labels, pointsOf, isShifted = true) {
  const groups = settings.isCombined ? overview.groups : allRuns().map((run) => ({ runs: [run] }));
  return groups.flatMap(({ label: group, runs }) => labels.map((label, i) => {
    const shown = runs.filter((run) => !hiddenRuns.has(run));
    const name = group && shown.length === runs.length ? group : shown.map((run) => overview.runs[run].name).join(", ");
    const points = (run) => pointsOf(run, i).map(([step, ...values]) => [
      step - (isShifted ? stepsBefore(run) : 0), ...values]);
    return {
      label: isSingle() ? label : labels.length > 1 ? `${name}: ${label}` : name,
      color: isSingle() ? i : colorOf(runs[0]),
      dash: isSingle() ? 0 : i,
      points: combine(shown.map(points)),
    };
  })).filter((line) => line.points.length);
}

// Draw lines of points [step, value, low, high]. Bounds are error bars for scores, else a band.
function chart({ title, unit, lines, signs = [], isScore = false }) {
  const isLog = settings.isLog && lines.every((line) => line.points.every((point) => point[1] > 0));
  const scale = isLog ? (value) => Math.log10(Math.max(value, Number.MIN_VALUE)) : (value) => value;
  const points = lines.flatMap((line) => line.points);
  const steps = points.map((point) => point[0]);
  let left = Math.min(...steps), right = Math.max(...steps);
  if (left === right) { left -= 1; right += 1; }
  const heights = points.flatMap((point) => point.slice(1)).filter(isNumber).map(scale);
  let low = Math.min(...heights), high = Math.max(...heights);
  if (isScore && low >= 0 && high <= 1) [low, high] = [0, 1];
  if (!isLog && low >= 0 && low < high / 2) low = 0;
  const pad = 0.05 * (high - low) || Math.abs(high) / 10 || 1;
  const bottom = low === 0 && !isLog ? 0 : low - pad, top = high + pad;
  const x = (step) => LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT);
  const yOf = (height) => TOP + (top - height) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
  const y = (value) => yOf(scale(value));
  const vertex = ([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
  const path = (of) => `M${of.map(vertex).join("L")}`;
  const style = ({ color, dash }) => `curve s${color % 8} d${(dash + Math.floor(color / 8)) % 4}`;

  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const rows = ticks(bottom, top, 4), names = tickLabels(rows.map((tick) => (isLog ? 10 ** tick : tick)));
  rows.forEach((tick, i) => svg.append(
    el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: yOf(tick), y2: yOf(tick) }),
    el("text", { class: "tick", x: LEFT - 6, y: yOf(tick) + 4, "text-anchor": "end" }, names[i])));
  for (const step of ticks(left, right, 5).filter(Number.isInteger)) {
    const anchor = x(step) > WIDTH - 25 ? "end" : "middle";
    svg.append(el("text", { x: x(step), y: HEIGHT - 4, "text-anchor": anchor }, integer(step)));
  }
  const seen = signs.filter(({ step }) => step >= left && step <= right);
  svg.append(...seen.map(({ step, sign, text }) => el("g", { class: "mark" },
    el("title", {}, `${sign}, step ${step}: ${text}`),
    el("line", { x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }))));
  for (const line of lines) {
    const bounded = line.points.filter((point) => isNumber(point[2]) && isNumber(point[3]));
    if (isScore) {
      svg.append(...bounded.map(([step, , from, to]) => el("path", { class: style(line),
        d: `M${x(step)} ${y(from)}V${y(to)}m-3 0h6M${x(step) - 3} ${y(from)}h6` })));
      svg.append(...line.points.map(([step, value]) => el("circle",
        { class: `point ${style(line)}`, cx: x(step), cy: y(value), r: 3 })));
    } else if (bounded.length > 1) {
      const back = bounded.map(([step, , from]) => [step, from]).reverse();
      const outline = [...bounded.map(([step, , , to]) => [step, to]), ...back];
      svg.append(el("path", { class: `band c${line.color % 8}`, d: `${path(outline)}Z` }));
    }
    const smoothed = isScore ? null : smooth(line.points);
    svg.append(el("path", { class: `${style(line)}${smoothed ? " pale" : ""}`, d: path(line.points) }));
    if (smoothed) svg.append(el("path", { class: style(line), d: path(smoothed) }));
  }
  const cursor = el("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  svg.append(cursor);

  const values = div("values");
  function showValues(at) {
    values.replaceChildren(...lines.map((line) => {
      const distance = (point) => Math.abs(point[0] - at);
      const point = line.points.reduce((best, other) => (distance(other) <= distance(best) ? other : best));
      return el("span", { "data-label": line.label, "data-value": point[1], title: `step ${number(point[0])}` },
        el("svg", { viewBox: "0 0 18 6" }, el("path", { class: style(line), d: "M0 3H18" })),
        line.label, el("b", {}, number(point[1])));
    }));
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * WIDTH;
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    showValues(left + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left));
  });
  svg.addEventListener("pointerleave", () => showValues(right));
  showValues(right);
  return el("figure", { class: "card", "data-chart": title },
    el("figcaption", {}, el("b", {}, title), " ", small(unit)), values, svg,
    seen.length ? small("Dashed: ", seen.slice(0, 3).map((one) => `${words(one.sign)} at ${one.step}`).join(", ")) : "");
}

function mainScores(run, dataSet = "all") {
  const rows = overview.runs[run].scores.filter((row) => row.data_set === dataSet);
  const exact = rows.filter((row) => row.measure === "exact_match");
  return exact.length ? exact : rows.filter((row) => row.weight);
}

const isCurve = ({ lines }) => lines.some((line) => line.points.length > 1);

// One chart per main measure, also of each environment, and with several runs per suite: then a color
// stands for a run.
function scoreCharts() {
  const rows = ["all", ...environments()].flatMap((name) => visibleRuns()
    .flatMap((run) => mainScores(run, name).map((row) => ({ run, ...row }))));
  const title = ({ measure, suite, data_set: name }) => [words(measure), name === "all" ? "" : name,
    isSingle() ? "" : suiteLabels()[suite]].filter(Boolean).join(": ");
  return unique(rows.map(title)).map((name) => {
    const shown = rows.filter((row) => title(row) === name), suites = unique(shown.map((row) => row.suite));
    const lines = makeLines(suites.map((suite) => suiteLabels()[suite]), (run, i) => {
      const row = shown.find((other) => other.run === run && other.suite === suites[i]);
      // If the same weights were evaluated twice, show the evaluation during training.
      const isFirst = (point, at, all) => all.findIndex((other) => other[0] === point[0]) === at;
      return row ? row.points.filter(isFirst).map((point) => point.slice(0, 4)) : [];
    });
    const unit = settings.isCombined && hasSeeds() ? "held-out, range of seeds" : "held-out, 95% interval";
    return { title: name, unit, lines, isScore: true };
  }).filter(isCurve).map(chart);
}

async function metricCharts(specs) {
  const names = unique(specs.flatMap((spec) => spec.lines.map((line) => line[1])));
  const curves = [];
  for (const run of visibleRuns()) curves[run] = await ask(`curves/${run}`, names);
  return specs.map((spec) => {
    // With several runs a color stands for a run, so a chart has one metric.
    const shown = isSingle() ? spec.lines : spec.lines.slice(0, 1);
    const title = shown.length < spec.lines.length ? `${spec.title}: ${shown[0][0]}` : spec.title;
    const signs = spec.stage === "train" ? visibleRuns().flatMap((run) => overview.runs[run].signs
      .map((sign) => ({ ...sign, step: sign.step - stepsBefore(run) }))) : [];
    const lines = makeLines(shown.map((line) => line[0]),
      (run, i) => curves[run][spec.stage]?.[shown[i][1]] || [], spec.stage === "train");
    return { ...spec, title, lines, signs };
  }).filter(isCurve).map(chart);
}

// Charts of metrics that contain all words of at least one comma-separated term.
function searchMetrics(text) {
  const terms = text.toLowerCase().split(",").map((term) => term.trim().split(/\s+/)).filter((term) => term[0]);
  const specs = new Map();
  for (const run of visibleRuns()) {
    for (const [stage, names] of Object.entries(overview.runs[run].metrics)) {
      for (const name of names) {
        const key = `${stage} ${name}`.toLowerCase();
        const isMatch = terms.some((term) => term.every((word) => key.includes(word)));
        if (isMatch) specs.set(key, { title: name, unit: stage, stage, lines: [[name, name]] });
      }
    }
  }
  return [...specs.values()];
}

async function curvesView(query, isCurrent) {
  const search = input(query, "q", "Find metrics: kl, grad norm");
  const slider = el("input", { type: "range", max: 30, value: settings.smoothing });
  const charts = div("charts"), about = small();
  let turn = 0;
  async function draw() {
    const mine = ++turn;
    keepHash("curves", [], [search]);
    const isSearch = search.value.trim() !== "";
    const specs = isSearch ? searchMetrics(search.value) : allCharts();
    const drawn = await metricCharts(specs.slice(0, MAX_CHARTS));
    if (!isCurrent() || mine !== turn) return;
    charts.replaceChildren(...isSearch ? [] : scoreCharts(), ...drawn);
    const metrics = unique(visibleRuns().flatMap((run) => Object.values(overview.runs[run].metrics).flat()));
    about.textContent = isSearch ? `${Math.min(specs.length, MAX_CHARTS)} of ${specs.length} found`
      : `search for any of ${metrics.length} metrics`;
  }
  const checkbox = (name, label) => el("label", {}, el("input", { type: "checkbox", checked: settings[name],
    oninput: (event) => { settings[name] = event.target.checked; drawHeader(); draw(); } }), label);
  search.addEventListener("input", debounce(draw));
  slider.addEventListener("input", debounce(() => { settings.smoothing = Number(slider.value); draw(); }));
  main.replaceChildren(div("toolbar", search, about, el("label", {}, "smoothing", slider),
    checkbox("isLog", "log scale"), hasSeeds() ? checkbox("isCombined", "combine seeds") : ""), charts);
  await draw();
  update = draw;
}

// ---------------------------------------------------------------- overview

const ABOUT = {
  Model: "model.path", Advantage: "advantage.name", Loss: "loss.name", Search: "search.engine",
  "Training tasks": "tasks.train.source", "Held-out tasks": "tasks.eval.source",
};

const interval = ([, , low, high]) => (isNumber(low) && isNumber(high) ? `${score(low)} to ${score(high)}` : "");
const badge = (isGood, text) => el("span", { class: `badge ${isGood ? "good" : "bad"}` }, text);
const suiteHeads = (suites) => ["", ...suites.map((suite) => suiteLabels()[suite])];
const fold = (title, ...content) => el("details", {}, el("summary", {}, title), ...content);

function alerts(run) {
  const { warnings, problems, signs, name } = overview.runs[run];
  const head = isSingle() ? "" : `${name}: `;
  const firsts = signs.filter(({ sign }, i) => signs.findIndex((other) => other.sign === sign) === i);
  return [
    ...warnings.map(([isSerious, text]) => (isSerious ? div("alert said", head, text) : soft(head, text))),
    ...firsts.map(({ sign, step, text, action }) => div("alert said", head,
      el("b", {}, `${words(sign)}, first at step ${shownStep(run, step)}`), `: ${text} (${action})`)),
    problems.length ? soft(head, "Unreadable: ", problems.join("; ")) : "",
  ];
}

function tiles(run) {
  return div("tiles", mainScores(run).map(({ measure, suite, points }) => {
    const first = points[0], last = points.at(-1), change = last[1] - first[1];
    const hasTwo = points.length > 1, sign = change < 0 ? "−" : "+";
    return div("card tile", small(`${words(measure)}, ${suiteLabels()[suite]}`),
      div("big", score(last[1]), hasTwo ? badge(change >= 0, sign + score(Math.abs(change))) : ""),
      small(hasTwo ? `${score(first[1])} at step ${shownStep(run, first[0])} · ` : "", interval(last) && `95%: ${interval(last)}`));
  }));
}

// First and last scores: one row per measure or data set, one column per suite.
function scoreTable(rows, key) {
  const suites = unique(rows.map((row) => row.suite));
  const cell = (suite, name) => {
    const points = rows.find((row) => row.suite === suite && row[key] === name)?.points;
    if (!points) return "–";
    const first = points.length > 1 ? `${score(points[0][1])} → ` : "";
    return [[first, el("b", {}, score(points.at(-1)[1]))], interval(points.at(-1))];
  };
  return table(suiteHeads(suites), unique(rows.map((row) => row[key])).map((name) => [
    words(name), ...suites.map((suite) => cell(suite, name))]));
}

function scoresCard(run) {
  const { scores } = overview.runs[run], all = scores.filter((row) => row.data_set === "all");
  const others = all.filter((row) => row.weight === null);
  const bySet = scores.filter((row) => row.data_set !== "all" && row.measure === all[0]?.measure);
  const weights = unique(all.filter((row) => row.weight).map((row) => `${words(row.measure)} × ${row.weight}`));
  return all.length ? card("Held-out scores", scoreTable(all.filter((row) => row.weight !== null), "measure"),
    soft("First → last evaluation, 95% interval of the last. Reward: ", weights.join(" + ") || "–"),
    unique(bySet.map((row) => row.data_set)).length > 1 ? fold("By data set", scoreTable(bySet, "data_set")) : "",
    others.length ? fold("Other measures", scoreTable(others, "measure")) : "") : "";
}

function failuresCard(run) {
  const { failures } = overview.runs[run], suites = Object.keys(failures);
  const kinds = Object.entries(overview.failures).filter(([kind]) => suites.some((suite) => failures[suite][kind]));
  const rows = kinds.map(([kind, [label, meaning]]) => [
    [el("a", { href: hash("answers", [["run", run], ["show", kind]]) }, label), meaning],
    ...suites.map((suite) => integer(failures[suite][kind] || 0))]);
  const totals = suites.map((suite) => integer(sum(Object.values(failures[suite]))));
  return suites.length
    ? card("Failed answers", table(suiteHeads(suites), [...rows, ["total answers", ...totals]])) : "";
}

function costsCard({ costs, times }) {
  const text = (parts) => Object.entries(parts).map(([part, seconds]) => `${part} ${duration(seconds)}`).join(", ");
  const rows = times.map(({ stage, parts }) => [[stage, text(parts)], duration(sum(Object.values(parts)))]);
  rows.push(...costs.map(([label, total]) => [words(label), number(total)]));
  return rows.length ? card("Time and costs, evaluations included", table(["", "total"], rows)) : "";
}

async function overviewView(query, isCurrent) {
  const run = isSingle() || query.has("run") ? chosenRun(query) : null;
  update = async () => {
    const metrics = allCharts().filter((spec) => spec.isMain);
    const charts = run === null || isSingle() ? [scoreCharts(), await metricCharts(metrics)].flat() : [];
    if (!isCurrent()) return;
    const content = run === null ? comparison() : runOverview(run);
    main.replaceChildren(...content.slice(0, -1).filter(Boolean), div("charts", charts), content.at(-1));
  };
  await update();
}

function runOverview(run) {
  const summary = overview.runs[run], config = Object.fromEntries(summary.config);
  const stage = ({ stage: name, num_done: done, num_planned: planned, stopped_early: stopped }) => [
    `${name}: ${integer(done)}`, isNumber(planned) ? ` of ${integer(planned)}` : "",
    isNumber(stopped) ? `, stopped early at step ${shownStep(run, stopped)}` : ""].join("");
  return [
    el("h1", {}, summary.name, badge(summary.is_finished, summary.is_finished ? "finished" : "not finished")),
    soft(summary.stages.map(stage).join(" · ")),
    facts(Object.entries(ABOUT).filter(([, key]) => config[key])
      .map(([label, key]) => [label, String(config[key]).split("/").slice(-2).join("/")])),
    ...alerts(run), tiles(run),
    div("columns", div("", scoresCard(run), failuresCard(run)), costsCard(summary))];
}

function comparison() {
  const { columns, rows } = overview.comparison;
  const title = ({ run, group, cells: [[name, below]] }) => [run === null ? [dot(group), el("i", {}, name)]
    : [dot(colorOf(run)), el("a", { href: hash("overview", [["run", run]]) }, name)], said(below)];
  const shown = rows.filter(({ run }) => run === null || !hiddenRuns.has(run));
  return [el("h1", {}, `${overview.runs.length} runs`),
    soft("Runs that differ only in the seed form a group. The buttons above hide runs; click a name to open a run."),
    card("Comparison", table(columns, shown.map((row) => [title(row), ...row.cells.slice(1)]))),
    ...visibleRuns().flatMap(alerts), ""];
}

// ---------------------------------------------------------------- answers

const verdict = (isRight) => (isRight ? el("span", { class: "good", title: "right" }, "✓")
  : isNumber(isRight) || isRight === false ? el("span", { class: "bad", title: "wrong" }, "✗")
    : el("span", { class: "soft", title: "not scored" }, "–"));

const hasText = (values, part) => values.some((value) => value.toLowerCase().includes(part.toLowerCase()));

function changeOf({ before, is_right: isRight }) {
  if (isRight === null) return "not scored";
  if (typeof before?.is_right !== "boolean") return isRight ? "right" : "wrong";
  if (before.is_right !== isRight) return isRight ? "became right" : "became wrong";
  return isRight ? "right both times" : "wrong both times";
}

function answerView({ record, segments }) {
  const labels = { information: "result", forged: "result, forged by the model", text: "untagged" };
  return [
    ...segments.map(([kind, text]) => div(`segment ${kind}`, small(labels[kind] || kind), div("said", text))),
    soft(`outcome: ${words(record.outcome)}, ${record.num_sampled} tokens. ${record.error || ""}`)];
}

async function openAnswer(details, addresses) {
  if (!details.open || details.childElementCount > 1) return;
  const columns = details.appendChild(div("columns"));
  for (const [i, address] of addresses.entries()) {
    const content = await ask(address).then(answerView, (error) => [soft(error.message)]);
    const title = i + 1 < addresses.length ? "First evaluation" : "Last evaluation";
    columns.append(div("", el("h3", {}, title), ...content));
  }
}

async function answersView(query, isCurrent) {
  const run = chosenRun(query), { suites, failures } = overview.runs[run], names = Object.keys(suites);
  const suite = Math.max(0, names.indexOf(query.get("suite")));
  const rows = names.length ? await ask(`answers/${run}/${suite}`) : [];
  if (!isCurrent()) return;
  const labels = Object.fromEntries(rows.map(changeOf).sort().map((change) => [change, change]));
  rows.filter((row) => row.failure).forEach((row) => { labels[row.failure] = overview.failures[row.failure][0]; });
  const isShown = (row, key) => !key || changeOf(row) === key || row.failure === key;
  const options = Object.entries(labels).map(([key, label]) => [
    key, `${label} (${rows.filter((row) => isShown(row, key)).length})`]);
  const suiteBox = select(query, "suite", Object.entries(suites));
  const text = input(query, "text", "Question, answer or id");
  const showBox = select(query, "show", [["", "all answers"], ...options]);
  const body = div("card"), count = soft(), total = sum(Object.values(failures[names[suite]] || {}));
  const answer = (row) => [verdict(row.is_right), " ", row.answer || "no answer"];
  function draw() {
    keepHash("answers", [["run", run]], [suiteBox, text, showBox]);
    const shown = rows.filter((row) => isShown(row, showBox.value)
      && hasText([row.question, row.answer, row.task_id, ...row.accepted], text.value));
    const part = total > rows.length ? `; this file has only the first ${integer(rows.length)} of ${integer(total)}` : "";
    count.textContent = `${integer(shown.length)} of ${integer(rows.length)} answers${part}`;
    body.replaceChildren(...shown.slice(0, 500).map((row) => el("details",
      { ontoggle: (event) => openAnswer(event.target, row.addresses) },
      el("summary", { class: "answer" }, said(row.question),
        said(row.before ? [answer(row.before), " → "] : "", answer(row)),
        el("small", { class: "said" }, `accepted: ${row.accepted.join(" | ")}`),
        small(labels[row.failure] || changeOf(row))))), shown.length > 500 ? soft("Only the first 500 are shown.") : "");
  }
  text.addEventListener("input", debounce(draw));
  showBox.addEventListener("input", draw);
  suiteBox.addEventListener("input", () => {
    location.hash = hash("answers", [["run", run], ["suite", suiteBox.value]]);
  });
  main.replaceChildren(div("toolbar", runSelect(query, "answers"), suiteBox, text, showBox), count, body);
  draw();
}

// ---------------------------------------------------------------- trajectories

const PAGE_ROWS = 50;
const SORTS = ["step", "reward", "advantage", "sampled"].flatMap((name) => [
  [name, `${name}: largest first`], [`-${name}`, `${name}: smallest first`]]);

async function loadTrajectories(run) {
  const known = tables[run] || { generation: 0, rows: [], tasks: [] };
  const sizes = embedded ? [0, 0, 0] : [known.generation, known.rows.length, known.tasks.length];
  const more = await ask(`trajectories/${run}/${sizes.join("/")}`), [numRows, numTasks] = more.num_known;
  const named = (values) => ({ run, ...Object.fromEntries(overview.columns.map((name, i) => [name, values[i]])) });
  tables[run] = {
    generation: more.generation,
    rows: [...known.rows.slice(0, numRows), ...more.rows.map(named)],
    tasks: [...known.tasks.slice(0, numTasks), ...more.tasks],
  };
}

const trajectoryHash = ({ run, step, line }) => hash("trajectory", [["run", run], ["step", step], ["line", line]]);

async function trajectoriesView(query, isCurrent) {
  const text = input(query, "text", "Question, answer or id");
  const outcomeBox = select(query, "outcome", [["", "all outcomes"]]);
  const correctBox = select(query, "correct",
    [["", "right or wrong"], ["1", "right"], ["0", "wrong"], ["null", "not scored"]]);
  const bounds = ["step from", "step to", "reward from", "reward to"].map((name) => input(query, name, name, "number"));
  const sortBox = select(query, "sort", SORTS);
  const inputs = [text, outcomeBox, correctBox, ...bounds, sortBox];
  const body = div("card"), count = soft(), pager = div("toolbar");
  const task = (row) => tables[row.run].tasks[row.task];
  const allRows = () => visibleRuns().flatMap((run) => tables[run].rows);
  let page = 0;
  function selectRows() {
    const [stepLow, stepHigh, rewardLow, rewardHigh] = bounds.map((box) => box.value);
    const isWithin = (value, low, high) => (low === "" && high === "") || (isNumber(value)
      && (low === "" || value >= Number(low)) && (high === "" || value <= Number(high)));
    const key = sortBox.value.replace("-", ""), sign = sortBox.value === key ? -1 : 1;
    return allRows().filter((row) => (!outcomeBox.value || row.outcome === outcomeBox.value)
      && (!correctBox.value || String(row.correct) === correctBox.value)
      && isWithin(row.step - stepsBefore(row.run), stepLow, stepHigh) && isWithin(row.reward, rewardLow, rewardHigh)
      && hasText([...task(row), row.answer], text.value))
      .sort((a, b) => (a[key] === null) - (b[key] === null) || sign * (a[key] - b[key]) || a.line - b.line);
  }
  function draw() {
    keepHash("trajectories", [], inputs);
    const rows = selectRows(), rewards = rows.map((row) => row.reward).filter(isNumber);
    const numHeld = allRows().length, total = sum(visibleRuns().map((run) => overview.runs[run].num_trajectories));
    const numRight = rows.filter((row) => row.correct).length;
    count.replaceChildren(el("b", { id: "count" }, integer(rows.length)), ` of ${integer(numHeld)} trajectories · `,
      `${integer(numRight)} right · mean reward ${number(sum(rewards) / rewards.length)}`,
      embedded && total > numHeld ? ` · this file has ${numHeld} of ${integer(total)}; jaxrl view shows all` : "");
    const numPages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
    page = Math.max(0, Math.min(page, numPages - 1));
    const columns = ["step", "reward", "advantage", "sampled", "tokens", "turns"];
    body.replaceChildren(table(["", "question", "answer", "outcome", ...columns],
      rows.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS).map((row) => [
        [[isSingle() ? "" : dot(colorOf(row.run)), verdict(row.correct)]],
        el("a", { class: "said line", href: trajectoryHash(row) }, task(row)[1] || "(no question)"),
        el("span", { class: "said line" }, row.answer), words(row.outcome),
        shownStep(row.run, row.step), ...columns.slice(1).map((name) => number(row[name]))]), 4));
    const go = (label, to) => el("button",
      { disabled: to < 0 || to >= numPages, onclick: () => { page = to; draw(); } }, label);
    pager.replaceChildren(go("previous", page - 1), `page ${page + 1} of ${numPages}`, go("next", page + 1));
  }
  async function reload() {
    for (const run of visibleRuns()) await loadTrajectories(run);
    if (!isCurrent()) return;
    const outcomes = unique(allRows().map((row) => row.outcome)).sort().map((name) => [name, words(name)]);
    const chosen = outcomeBox.value || query.get("outcome") || "";
    outcomeBox.replaceChildren(...select(query, "", [["", "all outcomes"], ...outcomes]).children);
    outcomeBox.value = chosen;
    draw();
  }
  inputs.forEach((box) => box.addEventListener("input", debounce(() => { page = 0; draw(); })));
  main.replaceChildren(div("toolbar", ...inputs), count, body, pager);
  await reload();
  update = reload;
}

// ---------------------------------------------------------------- one trajectory

// Colors are strongest at `limit`, which few tokens exceed. Ratios use a logarithmic scale.
function shade({ scale }, amount, limit) {
  const strength = Math.min(1, Math.abs(amount) / limit) * 0.8;
  const color = scale === "amount" ? "amount" : amount < 0 ? "minus" : "plus";
  return strength ? `rgb(var(--${color}) / ${strength.toFixed(3)})` : "";
}

function legendOf(quantity, limit) {
  const values = quantity.values.filter(isNumber), from = quantity.scale === "amount" ? 0 : -limit;
  const cells = Array.from({ length: 9 }, (_, i) => {
    const cell = el("i", { class: "cell" });
    cell.style.background = shade(quantity, from + (limit - from) * i / 8, limit);
    return cell;
  });
  const isNegative = quantity.scale === "amount" && values.some((value) => value < 0);
  const end = (amount) => number(quantity.scale === "ratio" ? Math.exp(amount) : isNegative ? -amount : amount, 3);
  return [el("b", {}, quantity.label), end(from), el("span", {}, cells), `${end(limit)} ${quantity.unit}`,
    small(`mean ${number(sum(values) / values.length)}`)];
}

// Consecutive tokens of one kind: prompt, sampled by the model, inserted, or repeated.
function tokenSegments({ is_sampled: isSampled, record }) {
  const segments = [], contexts = objects(record.contexts);
  isSampled.forEach((flag, i) => {
    const isRepeated = contexts.some(([start, repeated]) => i >= start && i < start + repeated);
    const kind = flag ? "model" : i < record.prompt_length ? "prompt" : isRepeated ? "repeated" : "inserted";
    if (segments.at(-1)?.kind !== kind) segments.push({ kind, start: i });
    segments.at(-1).end = i + 1;
  });
  return segments;
}

function tokenView(answer, query) {
  const { texts, ids, quantities } = answer;
  const spans = texts.map((text, i) => el("span", { "data-i": i }, text.replaceAll("\n", "↵\n") || "·"));
  const legend = div("toolbar");
  const [available, missing] = [true, false].map((has) => quantities.filter(({ values }) => Boolean(values) === has));
  const buttons = available.map((quantity) => el("button",
    { "data-by": quantity.name, onclick: () => paint(quantity) }, words(quantity.name)));
  function paint(quantity) {
    const amount = (value) => (quantity.scale === "ratio" ? Math.log(value) : value);
    const amounts = quantity.values.map((value) => (isNumber(value) ? amount(value) : 0));
    const sizes = amounts.map(Math.abs).filter(Boolean).sort((a, b) => a - b);
    const limit = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
    spans.forEach((span, i) => { span.style.background = shade(quantity, amounts[i], limit); });
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.by === quantity.name)));
    legend.replaceChildren(...legendOf(quantity, limit));
    query.set("by", quantity.name);
    keepHash("trajectory", [...query]);
  }
  const box = el("section", { class: "card", id: "tokens" }, tokenSegments(answer).map(({ kind, start, end }) => {
    const tokens = div("tokens", spans.slice(start, end));
    const isLong = kind !== "model" && end - start > 400;
    return div(`tokens-row ${kind}`, div("", small(kind), small(`${integer(end - start)} tokens`)),
      isLong ? fold("show", tokens) : tokens);
  }));
  box.addEventListener("pointermove", (event) => {
    const i = event.target.closest("[data-i]")?.dataset.i;
    tip.hidden = i === undefined;
    if (tip.hidden) return;
    const rows = available.filter(({ values }) => isNumber(values[i]))
      .map(({ label, unit, values }) => [label, `${number(values[i], 6)} ${unit}`]);
    tip.replaceChildren(el("b", { class: "said" }, JSON.stringify(texts[i])), small(` id ${ids[i]}, position ${i}`),
      rows.length ? table(["", ""], rows) : small(", not sampled by the policy"));
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (available.length) paint(available.find(({ name }) => name === query.get("by")) || available[0]);
  return [div("toolbar", small("color by"), ...buttons), legend,
    answer.problem ? div("alert said", answer.problem) : "", box,
    missing.length ? fold(`${missing.length} quantities are missing`,
      missing.map(({ label, why }) => soft(`${label}: ${why}.`))) : ""];
}

function turnView(turn, i, record) {
  const recorded = objects(turn.records);
  const calls = recorded.length || !turn.tool_call ? recorded : [{ tool: turn.tool, call: turn.tool_call }];
  const text = (call) => [call.tool || "search", call.source, call.error].filter(Boolean).join(", ");
  const numbers = ["reward", "advantage"].filter((name) => isNumber(record[`turn_${name}s`]?.[i]))
    .map((name) => `${name} ${number(record[`turn_${name}s`][i])}`);
  return card([`Turn ${i + 1} `, small(numbers.join(", "))],
    calls.length ? "" : el("pre", {}, String(turn.text ?? "")),
    calls.map((call) => [small(text(call)), el("pre", { class: "call" }, String(call.call))]),
    turn.observation ? el("pre", { class: "result" }, String(turn.observation).trim()) : "",
    turn.error ? div("alert said", turn.error) : "");
}

async function trajectoryView(query, isCurrent) {
  const [run, step, line] = ["run", "step", "line"].map((name) => Number(query.get(name)));
  const answer = await ask(`trajectory/${run}/${step}/${line}`);
  await loadTrajectories(run);
  if (!isCurrent()) return;
  const { record } = answer, { rows } = tables[run];
  const row = rows.find((other) => other.step === step && other.line === line);
  const same = rows.filter((other) => other.task === row?.task);
  const parts = Object.entries(record.reward_parts || {}).map(([name, value]) => [name, number(value)]);
  const shown = ["turns", "reward_parts", "generated_text", "question", "query", "reward_records"];
  const others = Object.entries(record).filter(([name]) => !shown.includes(name));
  const chip = (other) => el("a", { class: "chip", href: trajectoryHash(other), "aria-current": String(other === row) },
    `step ${shownStep(run, other.step)} `, verdict(other.correct), ` ${number(other.reward, 3)}`);
  main.replaceChildren(el("h1", { class: "said" }, String(record.query || record.question || record.task_id)),
    facts([["run", overview.runs[run].name], ["step", shownStep(run, step)], ["outcome", words(record.outcome)],
      ["answer", [verdict(row?.correct), " ", record.final_answer || "nothing"]],
      ["accepted", [record.answers].flat().slice(0, 4).join(" | ")],
      ["reward", [number(record.reward), record.reward_reason && small(` ${record.reward_reason}`)]], ["advantage", number(record.advantage)]]),
    div("toolbar", small(`${same.length} trajectories of this question`), same.slice(0, 60).map(chip)),
    div("reading", div("", ...tokenView(answer, query).filter(Boolean)), div("",
      card("Reward", table(["part", "value"], parts)),
      objects(record.turns).map((turn, i) => turnView(turn, i, record)),
      objects(record.reward_records).map((call) => card(`Judge ${call.tool}`, el("pre", {}, String(call.call)))),
      fold("Other fields", el("pre", {}, JSON.stringify(Object.fromEntries(others), null, 1))))));
}

// ---------------------------------------------------------------- details

function detailsView(query) {
  const run = chosenRun(query), { config, changes, starts, folder } = overview.runs[run];
  const code = (value) => el("code", {}, JSON.stringify(value));
  const search = input(query, "q", "Find keys"), body = div("");
  function draw() {
    const part = search.value.trim();
    const rows = config.filter(([key, , , isChanged]) => (part ? key.includes(part) : isChanged));
    body.replaceChildren(table(["key", "value", "default"],
      rows.map(([key, value, standard]) => [key, code(value), code(standard)]), 3));
  }
  search.addEventListener("input", draw);
  draw();
  const flat = (value, head = "") => Object.entries(value).flatMap(([key, inner]) => (
    inner && typeof inner === "object" ? flat(inner, `${head}${key}.`) : [[`${head}${key}`, code(inner)]]));
  main.replaceChildren(div("toolbar", runSelect(query, "details"), soft(folder)),
    card("Configuration", soft(`Keys that differ from their defaults; search all ${config.length}.`), search, body),
    ...changes.map((change) => card(`Settings changed after ${stepName(run, change.step)}`,
      table(["key", "before", "after"], Object.entries(change.changes)
        .map(([key, value]) => [key, code(value?.before), code(value?.now)]), 3))),
    ...starts.map((start, i) => card(`${i ? "Restart" : "Start"} ${start.started ?? ""}`,
      fold("Versions, machine, model", table(["", ""], flat(start), 2)))));
}

// ---------------------------------------------------------------- views and changes

const VIEWS = {
  overview: overviewView, curves: curvesView, answers: answersView, trajectories: trajectoriesView,
  trajectory: trajectoryView, details: detailsView,
};

async function route() {
  const mine = ++numViews, isCurrent = () => mine === numViews;
  const [name, query] = location.hash.slice(1).split("?");
  const view = VIEWS[name] ? name : "overview";
  for (const link of document.querySelectorAll("nav a")) {
    const isOpen = view.startsWith(link.hash.slice(1, 9));
    link.setAttribute("aria-current", isOpen ? "page" : "false");
  }
  tip.hidden = true;
  update = null;
  try {
    await VIEWS[view](new URLSearchParams(query), isCurrent);
  } catch (error) {
    if (isCurrent()) main.replaceChildren(div("alert said", error.message));
  }
  if (isCurrent()) document.documentElement.dataset.ready = view;
}

// On the live page, redraw when the files of the runs have changed.
async function poll() {
  let pause = 1500;
  try {
    const state = document.hidden ? null : await ask("state");
    if (state && state.version !== overview.version) {
      overview = await ask("overview");
      drawHeader();
      if (update) await update();
    }
    if (state?.is_indexing) pause = 100;
  } catch (error) {
    showStatus(`jaxrl view does not respond (${error.message}); restart it.`);
  }
  setTimeout(poll, pause);
}

async function start() {
  if (!embedded) await ask("state");
  overview = await ask("overview");
  drawHeader();
  addEventListener("hashchange", route);
  await route();
  if (!embedded) setTimeout(poll, 100);
}

start();
