// The page of `jaxrl view`. Texts of models and data become text nodes, never markup: elements are
// made by `el`, and the page's Content-Security-Policy forbids every other way.
"use strict";

const NUM_COLORS = 6;
const POLL_MS = 1500;
const main = document.getElementById("main");
const tip = document.getElementById("tip");
let state = { runs: [] };
let hidden = new Set();  // runs that are switched off
let shown = null;  // of the view: what to do when the state has changed
let turn = 0;  // counts views, so that a late answer to an earlier one is dropped

function el(tag, attributes = {}, ...children) {
  const element = /^(svg|g|path|line|text|circle|title)$/.test(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== ""));
  return element;
}

async function ask(address, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(query ? `${address}?${query}` : address);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return String(Number(value.toPrecision(Math.min(digits, 3)))).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

const count = (value) => value.toLocaleString("en");
const words = (name) => name.replaceAll("_", " ");
const debounced = (run, ms = 150) => {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(run, ms); };
};

// ---------------------------------------------------------------- addresses, runs, changes

function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "curves", query: new URLSearchParams(query || "") };
}

function address(view, parameters) {
  const query = new URLSearchParams(parameters).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// Changes the address without a new view.
function keep(view, parameters) {
  history.replaceState(null, "", address(view, parameters));
}

function dot(run) {
  return el("i", { class: `dot p${run % NUM_COLORS}`, title: state.runs[run]?.name });
}

function drawRuns() {
  const chips = state.runs.map((run, index) => {
    const where = run.records ? `step ${count(run.step)}` : "no record yet";
    return el("button", {
      class: "run", "aria-pressed": String(!hidden.has(index)), title: run.folder,
      onclick: () => {
        if (hidden.has(index)) hidden.delete(index); else hidden.add(index);
        drawRuns();
        shown?.(true);
      },
    }, dot(index), run.name, el("small", {}, `${where} · ${count(run.trajectories)} trajectories`));
  });
  document.getElementById("runs").replaceChildren(...chips);
  document.title = `${state.runs.map((run) => run.name).join(", ")} · jaxrl view`;
  const notes = [];
  const files = state.runs.reduce((sum, run) => sum + run.files, 0);
  const indexed = state.runs.reduce((sum, run) => sum + run.indexed, 0);
  if (indexed < files) {
    notes.push(el("span", {}, el("progress", { max: files, value: indexed }),
      ` ${count(indexed)} of ${count(files)} files of trajectories are indexed; lists are not whole yet `));
  }
  state.runs.forEach((run) => run.problems.forEach((text) => {
    notes.push(el("span", { class: "bad" }, `${run.name}: ${text}. `));
  }));
  (state.failures || []).forEach((text) => notes.push(el("span", { class: "bad" }, `${text}. `)));
  document.getElementById("told").replaceChildren(...notes);
}

async function poll() {
  if (!document.hidden) {
    try {
      const before = JSON.stringify(state);
      state = await ask("/api/state");
      if (JSON.stringify(state) !== before) {
        drawRuns();
        await shown?.(false);
      }
    } catch (error) {
      document.getElementById("told").replaceChildren(
        el("span", { class: "bad" }, `No answer: ${error.message}. Start jaxrl view again.`));
    }
  }
  setTimeout(poll, POLL_MS);
}

async function route() {
  const mine = ++turn;
  const { view, query } = place();
  const tab = { trajectory: "trajectories", question: "questions" }[view] || view;
  document.querySelectorAll("[data-tab]").forEach((link) => {
    if (link.dataset.tab === tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  tip.hidden = true;
  shown = null;
  const views = { curves, trajectories, trajectory, questions, question };
  try {
    await (views[view] || curves)(query, () => mine === turn);
  } catch (error) {
    if (mine === turn) main.replaceChildren(el("p", { class: "bad" }, error.message));
  }
  if (mine === turn) {
    document.documentElement.dataset.ready = view;
    document.documentElement.dataset.ms = performance.now().toFixed(0);
  }
}

// ---------------------------------------------------------------- curves

const WIDTH = 400, HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 14, BOTTOM = 18;

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const values = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-9; value += size) {
    values.push(Math.abs(value) < size * 1e-9 ? 0 : value);
  }
  return values;
}

// Smallest and largest value of each column of pixels, in order: what a line through all points shows.
function reduced(points) {
  const columns = WIDTH * 2;
  if (points.length <= 2 * columns) return points;
  const first = points[0][0], span = points.at(-1)[0] - first || 1, kept = [];
  let column = -1, least, most;
  const close = () => {
    if (column < 0) return;
    kept.push(...(least[0] <= most[0] ? [least, most] : [most, least]));
  };
  for (const point of points) {
    const own = Math.floor((point[0] - first) / span * columns);
    if (own !== column) { close(); column = own; least = most = point; }
    if (point[1] < least[1]) least = point;
    if (point[1] > most[1]) most = point;
  }
  close();
  return kept;
}

function smoothed(points) {
  const half = Math.max(2, Math.floor(points.length / 40));
  if (points.length < 20) return points;
  const sums = [0];
  points.forEach(([, value]) => sums.push(sums.at(-1) + value));
  return points.map(([step], i) => {
    const low = Math.max(0, i - half), high = Math.min(points.length, i + half + 1);
    return [step, (sums[high] - sums[low]) / (high - low)];
  });
}

function chart(name, lines, marks, isSmooth) {
  const all = lines.flatMap((line) => line.points);
  const caption = el("figcaption", {}, name);
  const values = el("div", { class: "values" });
  const figure = el("figure", { class: "card", "data-metric": name }, caption, values);
  if (!all.length) {
    values.append("no value in the chosen runs");
    return figure;
  }
  const range = (i) => all.reduce(([a, b], p) => [Math.min(a, p[i]), Math.max(b, p[i])], [Infinity, -Infinity]);
  let [left, right] = range(0);
  let [low, high] = range(1);
  if (left === right) { left -= 1; right += 1; }
  if (low >= 0 && low < 0.5 * high) low = 0;
  if (low === 0 && high === 0) high = 1;
  if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
  const pad = 0.04 * (high - low);
  const top = high + pad, bottom = low === 0 ? 0 : low - pad;
  const x = (step) => LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (top - value) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  for (const value of ticks(bottom, top, 4)) {
    svg.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      el("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, number(value, 3)));
  }
  for (const step of ticks(left, right, 5).filter(Number.isInteger)) {
    const isLast = x(step) > WIDTH - RIGHT - 12;
    svg.append(el("text", { x: x(step), y: HEIGHT - 5, "text-anchor": isLast ? "end" : "middle" }, count(step)));
  }
  const path = (points) => reduced(points)
    .map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  for (const { run, points } of lines) {
    const style = `s${run % NUM_COLORS} d${Math.floor(run / NUM_COLORS) % 4}`;
    const isDrawn = isSmooth && points.length >= 20;
    svg.append(el("path", { class: `curve ${style}${isDrawn ? " pale" : ""}`, d: path(points) }));
    if (isDrawn) svg.append(el("path", { class: `curve ${style}`, d: path(smoothed(points)) }));
    if (points.length <= 30) {
      points.forEach(([step, value]) => svg.append(
        el("circle", { class: `point ${style}`, cx: x(step), cy: y(value), r: 2 })));
    }
  }
  // Labels of marks that are near each other would lie on one another: the first of them has one.
  let taken = -Infinity;
  for (const mark of marks.filter((one) => one.step >= left && one.step <= right)) {
    const place = x(mark.step);
    const about = [`${mark.name} at step ${mark.step}`, mark.text,
      mark.action && `then: ${mark.action}`, `run: ${state.runs[mark.run].name}`];
    const drawn = el("g", { class: "mark", "data-step": mark.step },
      el("title", {}, about.filter(Boolean).join("\n")),
      el("line", { x1: place, x2: place, y1: TOP, y2: HEIGHT - BOTTOM }));
    // A label near the right edge stands left of its mark, where an earlier one may end.
    const isRight = place > WIDTH * 0.7, length = 6 * mark.name.length;
    if ((isRight ? place - length : place) > taken) {
      drawn.append(el("text", { x: place + (isRight ? -2 : 2), y: TOP - 4, "text-anchor": isRight ? "end" : "start" }, mark.name));
      taken = isRight ? place : place + length;
    }
    svg.append(drawn);
  }
  const cursor = el("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  svg.append(cursor);
  const tell = (at) => {
    values.replaceChildren(...lines.filter((line) => line.points.length).map(({ run, points }) => {
      const point = at === null ? points.at(-1)
        : points.reduce((best, one) => Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
      return el("span", { title: state.runs[run].name, "data-run": run, "data-value": point[1] },
        dot(run), el("b", {}, number(point[1])), `step ${count(point[0])}`);
    }));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * WIDTH;
    const at = left + (place - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
    tell(at);
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; tell(null); });
  tell(null);
  figure.append(svg);
  return figure;
}

async function curves(query, isShown) {
  let metrics = { names: [], defaults: [], marks: [] };
  let chosen = query.getAll("m");
  let isSmooth = query.get("smooth") !== "0";
  const known = [];  // by run: generation, records, points by metric
  const search = el("input", { type: "search", placeholder: "search metrics", "aria-label": "search metrics" });
  const list = el("ul", { class: "card" });
  const seen = el("details", { class: "marks" }), charts = el("div", { class: "charts" });
  const smooth = el("input", { type: "checkbox", checked: isSmooth });
  const names = () => chosen.length ? chosen : metrics.defaults;

  function drawList() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = metrics.names.filter((name) => wanted.every((word) => name.toLowerCase().includes(word)));
    const on = new Set(names());
    matching.sort((a, b) => on.has(b) - on.has(a));
    list.replaceChildren(...matching.slice(0, 300).map((name) => el("li", {}, el("label", {},
      el("input", { type: "checkbox", checked: on.has(name), onchange: () => {
        chosen = on.has(name) ? names().filter((one) => one !== name) : [name, ...names()];
        update();
      } }), name))));
    if (!matching.length) list.append(el("li", { class: "soft" }, "no metric has these words"));
    if (matching.length > 300) list.append(el("li", { class: "soft" }, `and ${matching.length - 300} more: search`));
  }

  async function load() {
    const wanted = names();
    const missing = wanted.some((name) => known.some((run) => !run.points.has(name)));
    const since = missing ? [] : known.map((run, i) => ["since", `${i}.${run.generation}.${run.records}`]);
    const answer = await ask("/api/series", [...wanted.map((name) => ["name", name]), ...since]);
    answer.runs.forEach((run, index) => {
      if (run.from === 0 || !known[index]) known[index] = { points: new Map() };
      Object.assign(known[index], { generation: run.generation, records: run.records });
      for (const [name, { steps, values }] of Object.entries(run.series)) {
        const points = steps.map((step, i) => [step, values[i]]);
        const before = run.from === 0 ? [] : known[index].points.get(name) || [];
        known[index].points.set(name, before.concat(points));
      }
    });
  }

  function draw() {
    const marks = metrics.marks.flatMap((of, run) => hidden.has(run) ? [] : of.map((mark) => ({ ...mark, run })));
    marks.sort((a, b) => a.step - b.step);
    seen.hidden = !marks.length;
    seen.replaceChildren(el("summary", {}, `${count(marks.length)} marks of the sentinel`),
      ...marks.slice(-200).map((mark) => el("div", { class: "said", "data-mark": mark.name },
        dot(mark.run), ` step ${count(mark.step)}: `, el("b", {}, words(mark.name)), mark.text && `: ${mark.text}`,
        mark.action && el("span", { class: "soft" }, ` → ${mark.action}`))));
    charts.replaceChildren(...names().map((name) => {
      const lines = known.map((run, index) => ({ run: index, points: run.points.get(name) || [] }));
      return chart(name, lines.filter((line) => !hidden.has(line.run)), marks, isSmooth);
    }));
    if (!names().length) {
      charts.append(el("p", { class: "soft" }, metrics.names.length
        ? "Choose a metric on the left." : "No record is written yet; curves appear with the first one."));
    }
  }

  async function update() {
    keep("curves", [...chosen.map((name) => ["m", name]), ...(isSmooth ? [] : [["smooth", "0"]])]);
    await load();
    if (!isShown()) return;
    drawList();
    draw();
  }

  search.addEventListener("input", drawList);
  smooth.addEventListener("change", () => { isSmooth = smooth.checked; update(); });
  metrics = await ask("/api/metrics");
  await load();
  if (!isShown()) return;
  main.replaceChildren(el("div", { class: "curves" },
    el("div", { class: "choice" }, search,
      el("div", { class: "row" }, el("label", {}, smooth, " smooth"),
        el("button", { onclick: () => { chosen = []; update(); } }, "defaults")),
      list),
    el("div", {}, seen, charts)));
  drawList();
  draw();
  shown = async (isByHand) => {
    if (!isByHand) {
      const next = await ask("/api/metrics");
      await load();
      if (!isShown()) return;
      const isNew = next.names.length !== metrics.names.length;
      metrics = next;
      await load();
      if (isNew) drawList();
    }
    if (isShown()) draw();
  };
}

// ---------------------------------------------------------------- the list of trajectories

function verdict(correct) {
  return correct === 1 ? el("span", { class: "good", title: "right" }, "✓")
    : correct === 0 ? el("span", { class: "bad", title: "wrong" }, "✗")
      : el("span", { class: "soft", title: "not scored" }, "–");
}

function field(query, name, attributes) {
  return el("input", { name, value: query.get(name) || "", ...attributes });
}

async function trajectories(query, isShown) {
  const text = field(query, "text", { type: "search", placeholder: "text of the question", "aria-label": "text of the question" });
  const bounds = ["reward_min", "reward_max", "step_min", "step_max"].map((name) => field(query, name, {
    class: "small", inputmode: "decimal", "aria-label": words(name), placeholder: name.endsWith("min") ? "from" : "to" }));
  const select = (name, options, label) => el("select", { name, "aria-label": label },
    ...Object.entries(options).map(([value, shownAs]) => el("option", { value, selected: (query.get(name) || "") === value }, shownAs)));
  const correct = select("correct", { "": "right or wrong", right: "right", wrong: "wrong", unscored: "not scored" }, "correctness");
  const sort = select("sort", { "": "by step", reward: "by reward", advantage: "by advantage", length: "by length" }, "order");
  const order = select("order", { "": "largest first", up: "smallest first" }, "direction");
  const outcomes = new Set(query.getAll("outcome"));
  let page = Number(query.get("page")) || 0;
  const chips = el("span", { class: "row" }), summary = el("p", { class: "soft", id: "counts" });
  const body = el("tbody"), pager = el("div", { class: "pager" });
  const inputs = [text, ...bounds, correct, sort, order];

  async function update() {
    const parameters = inputs.filter((input) => input.value).map((input) => [input.name, input.value.trim()]);
    parameters.push(...[...outcomes].map((one) => ["outcome", one]));
    if (page) parameters.push(["page", page]);
    keep("trajectories", parameters);
    const runs = state.runs.map((_, index) => index).filter((index) => !hidden.has(index));
    const mine = ++update.turn;
    const began = performance.now();
    let answer;
    try {
      answer = await ask("/api/trajectories", [...parameters, ...runs.map((run) => ["run", run])]);
    } catch (error) {
      summary.replaceChildren(el("span", { class: "bad" }, error.message));
      return;
    }
    if (!isShown() || mine !== update.turn) return;
    if (page >= answer.pages) page = Math.max(0, answer.pages - 1);
    chips.replaceChildren(...answer.known_outcomes.map((name) => el("button", {
      class: "chip", "aria-pressed": String(outcomes.has(name)),
      onclick: () => { if (outcomes.has(name)) outcomes.delete(name); else outcomes.add(name); page = 0; update(); },
    }, words(name), " ", el("small", {}, count(answer.outcomes[name] || 0)))));
    const { right, wrong, unscored } = answer.correct;
    summary.replaceChildren(el("b", { "data-count": answer.count }, count(answer.count)), ` of ${count(answer.total)} trajectories · `,
      `${count(right)} right · ${count(wrong)} wrong · ${count(unscored)} not scored · mean reward ${number(answer.mean_reward)}`);
    body.replaceChildren(...answer.rows.map((row) => {
      const to = address("trajectory", [["run", row.run], ["step", row.step], ["line", row.line]]);
      return el("tr", { class: "go", onclick: (event) => { if (!event.target.closest("a")) location.hash = to; } },
        el("td", {}, dot(row.run)),
        el("td", { class: "n" }, el("a", { href: to }, count(row.step))),
        el("td", {}, verdict(row.correct)),
        el("td", { class: "n" }, number(row.reward)),
        el("td", { class: "n" }, number(row.advantage)),
        el("td", {}, words(row.outcome)),
        el("td", { class: "n" }, `${count(row.sampled)} / ${count(row.tokens)}`),
        el("td", { class: "n" }, count(row.turns)),
        el("td", { class: "text said", title: row.question }, el("a", { href: address("question", [["key", row.key]]) }, row.question || row.task)),
        el("td", { class: "text said", title: row.answer }, row.answer));
    }));
    const go = (to) => () => { page = to; update(); };
    pager.replaceChildren(
      el("button", { disabled: page <= 0, onclick: go(page - 1) }, "previous"),
      el("span", {}, answer.pages ? `page ${count(page + 1)} of ${count(answer.pages)}` : "nothing has these properties"),
      el("button", { disabled: page + 1 >= answer.pages, onclick: go(page + 1) }, "next"),
      el("span", { class: "soft" }, `${answer.took_ms.toFixed(0)} ms`));
    document.documentElement.dataset.filterMs = (performance.now() - began).toFixed(0);
  }
  update.turn = 0;

  const later = debounced(() => { page = 0; update(); });
  inputs.forEach((input) => input.addEventListener("input", later));
  main.replaceChildren(
    el("div", { class: "filters" }, text, correct,
      el("label", {}, "reward", bounds[0], bounds[1]), el("label", {}, "step", bounds[2], bounds[3]), sort, order),
    el("div", { class: "filters" }, chips), summary,
    el("div", { class: "scroll card" }, el("table", {}, el("thead", {}, el("tr", {},
      ...[["", ""], ["step", "n"], ["", ""], ["reward", "n"], ["advantage", "n"], ["outcome", ""],
        ["sampled / tokens", "n"], ["turns", "n"], ["question", ""], ["answer", ""]]
        .map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)))), body)), pager);
  await update();
  shown = update;
}

// ---------------------------------------------------------------- one trajectory

const STRONGEST = 0.8;

function scaleOf(quantity) {
  const values = quantity.values.filter((value) => value !== null)
    .map((value) => Math.abs(quantity.scale === "ratio" ? Math.log(value) : value)).sort((a, b) => a - b);
  // A few outliers would leave all others pale; the legend says that its end is "or more".
  const most = values.at(-1) || 0, usual = values[Math.floor(0.98 * (values.length - 1))] || 0;
  return { limit: usual || most || 1, isOpen: usual > 0 && usual < most };
}

function color(quantity, value, limit) {
  if (value === null) return "";
  if (quantity.scale === "flag") return value ? `rgba(var(--flag), ${value === 1 ? 0.55 : 0.85})` : "";
  const amount = quantity.scale === "ratio" ? Math.log(value) : value;
  const strength = Math.min(1, Math.abs(amount) / limit) * STRONGEST;
  const hue = quantity.scale === "amount" ? "--amount" : amount < 0 ? "--minus" : "--plus";
  return strength ? `rgba(var(${hue}), ${strength.toFixed(3)})` : "";
}

function legendOf(quantity) {
  const { limit, isOpen } = scaleOf(quantity);
  const ends = (value, sign) => {
    const shownAs = quantity.scale === "ratio" ? Math.exp(sign * limit) : sign * value;
    return number(shownAs, 3);
  };
  const cells = (from) => {
    const drawn = el("span", { class: "cells" });
    for (let i = 0; i <= 8; i++) {
      const value = (from + (1 - from) * i / 8) * limit;
      const cell = el("i");
      const shownAs = quantity.scale === "ratio" ? Math.exp(value) : value;
      cell.style.background = color(quantity, shownAs, limit);
      drawn.append(cell);
    }
    return drawn;
  };
  const unit = quantity.unit ? ` ${quantity.unit}` : "";
  const more = isOpen ? " and beyond" : "";
  const parts = [el("b", {}, quantity.label)];
  if (quantity.scale === "flag") {
    const cell = el("i");
    cell.style.background = color(quantity, 1, 1);
    const num = quantity.values.filter((value) => value).length;
    parts.push(el("span", { class: "ramp" }, el("span", { class: "cells" }, cell),
      `${count(num)} of ${count(quantity.values.filter((value) => value !== null).length)} tokens`));
  } else if (quantity.scale === "amount") {
    const isNegative = quantity.values.some((value) => value < 0);
    parts.push(el("span", { class: "ramp" }, "0", cells(0), `${isNegative ? ends(limit, -1) : ends(limit, 1)}${unit}${more}`));
  } else {
    parts.push(el("span", { class: "ramp" }, ends(limit, -1), cells(-1), `${ends(limit, 1)}${unit}${more}`));
  }
  const values = quantity.values.filter((value) => value !== null);
  if (values.length && quantity.scale !== "flag") {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const [least, most] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    parts.push(el("span", { class: "soft" }, `mean ${number(mean)}, ${number(least)} to ${number(most)}`));
  }
  return parts;
}

// A token as it is shown: line ends have a sign, the rest of a character that is in several tokens a dot.
function shownToken(text, isPiece) {
  return text === "" && isPiece ? "·" : text.replaceAll("\n", "↵\n");
}

function segmentsOf(tokens) {
  const segments = [];
  tokens.sampled.forEach((isSampled, i) => {
    const isAgain = tokens.contexts.some(([start, repeated]) => i >= start && i < start + repeated);
    const kind = isSampled ? "model" : i < (tokens.prompt_length || 0) ? "prompt" : isAgain ? "again" : "inserted";
    if (!segments.length || segments.at(-1).kind !== kind) segments.push({ kind, start: i });
    segments.at(-1).end = i + 1;
  });
  return segments;
}

function tokenView(answer, by) {
  const { tokens } = answer;
  const spans = tokens.texts.map((text, i) => {
    const isPiece = tokens.bytes[i] !== null;
    return el("span", { "data-i": i, class: isPiece && text === "" ? "piece" : null }, shownToken(text, isPiece));
  });
  const legend = el("div", { class: "legend", id: "legend" });
  const buttons = answer.quantities.map((quantity) => el("button", {
    "data-by": quantity.name, disabled: quantity.values === null, title: quantity.why || quantity.label,
    onclick: () => paint(quantity.name),
  }, words(quantity.name)));

  function paint(name) {
    const quantity = answer.quantities.find((one) => one.name === name && one.values)
      || answer.quantities.find((one) => one.values);
    by = quantity?.name;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.by === by)));
    if (!quantity) {
      legend.replaceChildren("No quantity is recorded for these tokens.");
      return;
    }
    const { limit } = scaleOf(quantity);
    spans.forEach((span, i) => { span.style.background = color(quantity, quantity.values[i], limit); });
    legend.replaceChildren(...legendOf(quantity));
    keep("trajectory", [["run", answer.run], ["step", answer.step], ["line", answer.line], ["by", by]]);
  }

  const box = el("div", { class: "card", id: "tokens" }, ...segmentsOf(tokens).map(({ kind, start, end }) => {
    const held = el("div", { class: "tokens" }, ...spans.slice(start, end));
    const label = el("div", { class: "whose" }, kind, el("br", {}), `${count(end - start)} tokens`);
    if (kind === "model" || end - start <= 400) return el("div", { class: `segment ${kind === "model" ? "" : "given"}` }, label, held);
    held.hidden = true;
    const more = el("button", { onclick: () => { held.hidden = !held.hidden; } }, "show or hide");
    return el("div", { class: "segment given" }, label, el("div", {}, more, held));
  }));
  box.addEventListener("pointermove", (event) => {
    const span = event.target.closest("[data-i]");
    if (!span) { tip.hidden = true; return; }
    const i = Number(span.dataset.i);
    const rows = answer.quantities.filter((one) => one.values && one.values[i] !== null).map((one) => el("tr", { class: one.name === by ? "on" : null },
      el("td", {}, words(one.name)), el("td", { class: "n" }, `${number(one.values[i], 6)}${one.unit ? ` ${one.unit}` : ""}`)));
    tip.replaceChildren(el("div", {}, el("b", { class: "said" }, JSON.stringify(tokens.texts[i])), ` id ${tokens.ids[i]}, place ${i}`),
      tokens.bytes[i] === null ? "" : el("div", { class: "soft" }, `part of a character; its bytes: ${tokens.bytes[i]}`),
      rows.length ? el("table", {}, el("tbody", {}, ...rows)) : el("div", { class: "soft" }, "not sampled by the policy"));
    tip.hidden = false;
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const y = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${x}px`;
    tip.style.top = `${y}px`;
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  const lacking = answer.quantities.filter((one) => one.values === null);
  paint(by);
  return [
    el("div", { class: "by", role: "group", "aria-label": "colour by" }, ...buttons), legend,
    lacking.length ? el("details", { class: "soft" }, el("summary", {}, `${lacking.length} not available: ${lacking.map((one) => words(one.name)).join(", ")}`),
      ...lacking.map((one) => el("div", { "data-why": one.name }, `${words(one.name)}: ${one.why}`))) : null,
    answer.has_tokenizer ? null : el("p", { class: "bad" }, answer.tokenizer),
    box,
    answer.has_tokenizer ? null : el("div", {}, el("h2", {}, "Text"), el("pre", { class: "card turn" }, String(answer.record.generated_text || ""))),
  ];
}

// Lists and objects of a record, which may hold anything.
const listed = (value) => Array.isArray(value) ? value : [];
const objects = (value) => listed(value).filter((one) => one !== null && typeof one === "object");

function turnView(turnOf, index, record) {
  const recorded = objects(turnOf.records);
  const calls = recorded.length ? recorded : turnOf.tool_call !== null && turnOf.tool_call !== undefined
    ? [{ tool: turnOf.tool, call: turnOf.tool_call }] : [];
  const facts = [["reward", record.turn_rewards?.[index]], ["advantage", record.turn_advantages?.[index]]]
    .filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${number(value)}`);
  if (turnOf.latency_s) facts.push(`${number(turnOf.latency_s, 3)} s`);
  if (turnOf.is_cut) facts.push("cut by the budget of tokens");
  return el("div", { class: "card turn" },
    el("h3", {}, `turn ${index + 1} `, el("small", {}, facts.join(" · "))),
    ...calls.map((call) => el("div", { class: "call" },
      el("small", {}, `${call.tool || "search"}${call.source ? ` · ${call.source}` : ""}${call.attempts > 1 ? ` · ${call.attempts} attempts` : ""}${call.waited_s ? ` · waited ${number(call.waited_s, 3)} s` : ""}`),
      el("pre", {}, String(call.call)), call.error ? el("div", { class: "bad" }, call.error) : null)),
    turnOf.observation ? el("pre", { class: "found" }, String(turnOf.observation).replace(/^\n+|\n+$/g, "")) : null,
    turnOf.error ? el("div", { class: "bad said" }, turnOf.error) : null,
    calls.length || turnOf.observation ? null : el("pre", { class: "soft" }, String(turnOf.text ?? "")));
}

function partsTable(record) {
  const parts = Object.entries(record.reward_parts || {});
  return el("table", { class: "parts" }, el("tbody", {}, ...parts.map(([name, value]) => el("tr", {},
    el("th", { scope: "row" }, name), el("td", { class: "n" }, number(value))))));
}

const OWN = new Set(["task_id", "question", "query", "answers", "outcome", "reward", "reward_parts", "final_answer",
  "is_correct", "advantage", "generated_text", "turns", "prompt_length", "turn_rewards", "turn_advantages", "reward_records",
  "uid", "global_id", "ground_truth", "accuracy"]);

async function trajectory(query, isShown) {
  const answer = await ask("/api/trajectory", ["run", "step", "line"].map((name) => [name, query.get(name) ?? ""]));
  if (!isShown()) return;
  const { record } = answer;
  const correct = record.outcome === "environment_error" ? -1 : Number(record.is_correct === true);
  const others = Object.entries(record).filter(([name]) => !OWN.has(name));
  main.replaceChildren(
    el("h1", { class: "said" }, String(record.query || record.question || record.task_id)),
    el("div", { class: "facts" },
      el("span", {}, dot(answer.run), ` ${state.runs[answer.run]?.name ?? ""}, step ${count(answer.step)}, line ${answer.line + 1}`),
      el("span", {}, verdict(correct), " answered ", el("b", { class: "said" }, record.final_answer || "nothing"),
        el("span", { class: "soft said" }, ` accepted: ${listed(record.answers).slice(0, 4).join(" | ") || "–"}`)),
      el("span", {}, words(String(record.outcome))),
      el("span", {}, "reward ", el("b", { id: "reward" }, number(record.reward))),
      el("span", {}, "advantage ", el("b", {}, number(record.advantage))),
      el("a", { href: address("question", [["key", answer.key]]) }, "this question over steps")),
    el("div", { class: "group" }, el("span", { class: "soft" }, "same question, same step:"),
      ...answer.group.map((row) => el("a", {
        href: address("trajectory", [["run", row.run], ["step", row.step], ["line", row.line], ...(query.get("by") ? [["by", query.get("by")]] : [])]),
        title: row.answer, "aria-current": row.line === answer.line ? "true" : null,
      }, verdict(row.correct), ` ${number(row.reward)}`))),
    el("div", { class: "two" },
      el("div", {}, ...tokenView(answer, query.get("by") || "advantage").filter(Boolean)),
      el("aside", {},
        el("h2", {}, "Parts of the reward"), partsTable(record),
        el("h2", {}, "Turns"), ...objects(record.turns).map((one, index) => turnView(one, index, record)),
        objects(record.reward_records).length ? el("h2", {}, "Judges") : null,
        ...objects(record.reward_records).map((call) => el("div", { class: "card turn call" }, el("small", {}, `${call.tool}`), el("pre", {}, String(call.call)))),
        el("details", {}, el("summary", {}, "further fields"), el("pre", {}, JSON.stringify(Object.fromEntries(others), null, 1))))));
}

// ---------------------------------------------------------------- questions

async function questions(query, isShown) {
  const text = field(query, "text", { type: "search", placeholder: "text or id of the question", "aria-label": "text or id of the question" });
  const summary = el("span", { class: "soft" }), body = el("tbody");
  async function update() {
    keep("questions", text.value ? [["text", text.value]] : []);
    const runs = state.runs.map((_, index) => index).filter((index) => !hidden.has(index));
    const mine = ++update.turn;
    const answer = await ask("/api/questions", [["text", text.value], ...runs.map((run) => ["run", run])]);
    if (!isShown() || mine !== update.turn) return;
    summary.replaceChildren(`${count(answer.count)} questions${answer.count > answer.rows.length ? `, the first ${count(answer.rows.length)}` : ""}`);
    body.replaceChildren(...answer.rows.map((row) => el("tr", {},
      el("td", {}, dot(row.run)),
      el("td", { class: "text said", title: row.question }, el("a", { href: address("question", [["key", row.key]]) }, row.question || row.task)),
      el("td", { class: "text said soft" }, row.task),
      el("td", { class: "n" }, count(row.count)), el("td", { class: "n" }, count(row.steps)),
      el("td", { class: "n" }, row.steps > 1 ? `${number(row.first, 3)} → ${number(row.last, 3)}` : number(row.last, 3)),
      el("td", { class: "n" }, count(row.answers)))));
  }
  update.turn = 0;
  text.addEventListener("input", debounced(update));
  main.replaceChildren(el("div", { class: "filters" }, text, summary),
    el("div", { class: "scroll card" }, el("table", {}, el("thead", {}, el("tr", {},
      ...[["", ""], ["question", ""], ["id", ""], ["trajectories", "n"], ["steps", "n"], ["mean reward, first → last step", "n"], ["evaluation answers", "n"]]
        .map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)))), body)));
  await update();
  shown = update;
}

function grouped(rows, key) {
  const groups = new Map();
  rows.forEach((row) => groups.set(key(row), [...(groups.get(key(row)) || []), row]));
  return [...groups];
}

async function question(query, isShown) {
  const answer = await ask("/api/question", [["key", query.get("key") ?? ""]]);
  if (!isShown()) return;
  const mean = (rows) => {
    const paid = rows.map((row) => row.reward).filter((reward) => reward !== null);
    return paid.length ? number(paid.reduce((sum, one) => sum + one, 0) / paid.length, 3) : "–";
  };
  const kind = (is) => is === 1 ? "right" : is === 0 ? "wrong" : "";
  const column = (title, rows, cards) => el("div", {}, el("h3", {}, title, el("small", {}, `mean ${mean(rows)}`)), ...cards);
  const sections = [];
  answer.runs.forEach(({ run, rows, left_out: leftOut }) => {
    if (!rows.length || hidden.has(run)) return;
    sections.push(el("h2", {}, dot(run), ` ${state.runs[run]?.name ?? ""}: training`,
      leftOut ? el("small", {}, ` ${count(leftOut)} earlier ones are left out`) : null));
    sections.push(el("div", { class: "steps" }, ...grouped(rows, (row) => row.step).map(([step, own]) => column(`step ${count(step)}`, own,
      own.map((row) => el("a", { class: `one card ${kind(row.correct)}`, href: address("trajectory", [["run", row.run], ["step", row.step], ["line", row.line]]) },
        el("span", { class: "top" }, el("b", {}, number(row.reward)), el("small", {}, `advantage ${number(row.advantage, 3)}`)),
        el("span", { class: "said" }, row.answer || words(row.outcome))))))));
  });
  answer.evaluations.forEach(({ run, answers }) => {
    if (!answers.length || hidden.has(run)) return;
    sections.push(el("h2", {}, dot(run), ` ${state.runs[run]?.name ?? ""}: evaluations`));
    sections.push(el("div", { class: "steps" }, ...grouped(answers, (one) => `${one.stage} ${one.step}`).map(([title, own]) => column(title, own,
      own.map((one) => {
        const more = el("pre", { hidden: true });
        return el("div", {}, el("button", { class: `one card ${kind(one.exact_match)}`, title: "show the response", onclick: async () => {
          if (!more.hidden) { more.hidden = true; return; }
          try {
            const record = await ask("/api/answer", [["run", run], ["stage", one.stage], ["step", one.step], ["suite", one.suite], ["row", one.row]]);
            more.replaceChildren(String(record.response ?? ""));
          } catch (error) {
            more.replaceChildren(error.message);
          }
          more.hidden = false;
        } }, el("span", { class: "top" }, el("b", {}, number(one.reward)), el("small", {}, `${words(one.suite)} · ${one.num_searches} searches`)),
        el("span", { class: "said" }, one.answer || words(one.outcome))), more);
      })))));
  });
  main.replaceChildren(el("h1", { class: "said" }, answer.question || answer.task),
    el("p", { class: "soft said" }, `${answer.task} · accepted: ${answer.accepted.join(" | ") || "–"}`),
    ...sections, sections.length ? "" : el("p", { class: "soft" }, "No chosen run has this question."));
}

// ---------------------------------------------------------------- begin

addEventListener("hashchange", route);
(async () => {
  try {
    state = await ask("/api/state");
  } catch (error) {
    state = { runs: [] };
  }
  drawRuns();
  await route();
  setTimeout(poll, POLL_MS);
})();
