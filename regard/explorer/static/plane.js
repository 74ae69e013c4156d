// Plane: attention in two dimensions. Drag keys, values and the query; the output moves inside the hull of the values.

import { asTable, betaSlider, category, checkbox, field, format, h2, help, html, math, number, svg } from "./dom.js";
import { attend, convexHull, dot, firstOrderChange, generator, norm, scale, add } from "./maths.js";

const UNIT = 100; // pixels
const HALF = 320;
const DRAWS = 200;
const MOST_KEYS = 12;
const FARTHEST = 3.1;

const BASE = {
  query: [1.2, 0.8], keys: [[1, 0], [0, 1], [-0.8, -0.6]], values: [[2, -0.6], [0.4, 2.2], [-2.2, 0.8]],
  beta: 2, tie: false, projections: false, second: null, spread: 0, along: -1, length: 0, seed: 0, nudged: null, nudge: [0, 0],
};
const ORTHONORMAL = { keys: [[1, 0], [0, 1]], values: [[2.2, -0.8], [-0.4, 2.2]] };

// Each preset answers a question of the course sheets; `text` says what to look for.
export const PRESETS = [
  { title: "Start", sheet: "", text: "Drag the query q, a key or a value, or choose a question here. Click a number to see how it is computed.", change: {} },
  { title: "What does beta do?", sheet: "000 1.1b", text: "Slide beta from 0 to infinity: the output moves from the mean of the values to one of them.", change: { beta: 0.5 } },
  { title: "Copy one value", sheet: "000 1.1c, 001 1a", text: "The query fits one key much better than the others, so the output is that key's value.", change: { query: [2.4, 0], beta: 4 } },
  { title: "Mean of all values", sheet: "000 1.1d", text: "At beta = 0 all weights are equal, whatever the scores are.", change: { beta: 0 } },
  { title: "Mean of two values", sheet: "001 1b", text: "The query is the sum of two keys, made long: both get half of the weight, the third nothing.", change: { query: [2, 2], beta: 3 } },
  { title: "Nudge a key", sheet: "000 1.1e", text: "Drag the nudged key. The hollow diamond is the first-order prediction, the full one the truth.", change: { beta: 1, nudged: "k0", nudge: [0.3, 0.2] } },
  { title: "Nudge the query", sheet: "002 1.1f", text: "The same for the query: now every score changes.", change: { beta: 1, nudged: "q", nudge: [0.3, -0.4] } },
  { title: "A longer key", sheet: "000 1.1f", text: "Drag a key outwards: its score is multiplied, so its weight grows where the score is positive and shrinks where it is negative.", change: { keys: [[2, 0], [0, 1], [-0.8, -0.6]], beta: 1 } },
  { title: "Noisy keys, one head", sheet: "001 1c-i", text: "Keys with little noise: the output stays near the mean of both values.", change: { ...ORTHONORMAL, query: [2, 2], beta: 5, spread: 0.01 } },
  { title: "A key of varying length", sheet: "001 1c-ii", text: "The length of key 1 varies between draws. One head jumps between both values.", change: { ...ORTHONORMAL, query: [2, 2], beta: 5, spread: 0.01, along: 0, length: 0.5 } },
  { title: "Two heads", sheet: "001 1d-i, 001 1d-ii", text: "One query per key, outputs averaged: the average stays near the mean, where one head jumps.", change: { ...ORTHONORMAL, query: [2.4, 0], second: [0, 2.4], beta: 5, spread: 0.01, along: 0, length: 0.5 } },
];

// The address of the preset for one of these questions, or nothing.
export const presetAddress = (places) => {
  const found = PRESETS.find(({ sheet }) => sheet.split(", ").some((place) => places.includes(place)));
  return found ? `#plane?${write({ ...BASE, ...found.change })}` : "";
};

const pair = ([x, y]) => `${Number(x.toFixed(3))},${Number(y.toFixed(3))}`;
const readPair = (text, fallback) => {
  const parts = (text ?? "").split(",").map(Number);
  return parts.length === 2 && parts.every(Number.isFinite) ? parts.map((x) => Math.max(-FARTHEST, Math.min(FARTHEST, x))) : fallback;
};
const readPairs = (text, fallback) => {
  if (!text) return fallback;
  const found = text.split(";").slice(0, MOST_KEYS).map((part) => readPair(part, null));
  return found.length && found.every(Boolean) ? found : fallback;
};
const readNumber = (text, fallback, least, most) => {
  const value = text === null || text === "" ? NaN : text === "inf" ? Infinity : Number(text);
  return Number.isNaN(value) ? fallback : Math.max(least, Math.min(most, value));
};

function read(parameters) {
  const keys = readPairs(parameters.get("k"), BASE.keys.map((key) => key.slice()));
  const tie = parameters.get("tie") === "1";
  let values = tie ? keys.map((key) => key.slice()) : readPairs(parameters.get("v"), BASE.values.map((value) => value.slice()));
  values = keys.map((key, j) => values[j] ?? key.slice());
  const [nudged, by] = (parameters.get("nudge") ?? "").split(":");
  const known = nudged === "q" || (/^k\d+$/.test(nudged) && Number(nudged.slice(1)) < keys.length);
  return {
    query: readPair(parameters.get("q"), BASE.query.slice()), keys, values, tie, beta: readNumber(parameters.get("b"), BASE.beta, 0, Infinity),
    projections: parameters.get("proj") === "1", second: readPair(parameters.get("q2"), null), spread: readNumber(parameters.get("spread"), 0, 0, 1),
    along: Math.trunc(readNumber(parameters.get("along"), -1, -1, keys.length - 1)), length: readNumber(parameters.get("len"), 0, 0, 2),
    seed: Math.trunc(readNumber(parameters.get("seed"), 0, 0, 2 ** 31)), nudged: known ? nudged : null, nudge: readPair(by, [0.3, 0.2]),
  };
}

function write(state) {
  const parameters = new URLSearchParams({ q: pair(state.query), k: state.keys.map(pair).join(";"), b: state.beta === Infinity ? "inf" : String(state.beta) });
  if (state.tie) parameters.set("tie", "1");
  else parameters.set("v", state.values.map(pair).join(";"));
  if (state.projections) parameters.set("proj", "1");
  if (state.second) parameters.set("q2", pair(state.second));
  if (state.spread) parameters.set("spread", String(state.spread));
  if (state.along >= 0 && state.length) { parameters.set("along", String(state.along)); parameters.set("len", String(state.length)); }
  if (state.seed) parameters.set("seed", String(state.seed));
  if (state.nudged) parameters.set("nudge", `${state.nudged}:${pair(state.nudge)}`);
  return parameters;
}

const mean = (points) => scale(points.reduce(add), 1 / points.length);

// Everything that is drawn, computed from the state.
export function compute(state) {
  const head = (query, keys) => {
    const { products, weights, output } = attend([query], keys, state.values, { beta: state.beta });
    return { scores: products[0], weights: weights[0], output: output[0] };
  };
  const first = head(state.query, state.keys);
  const second = state.second && head(state.second, state.keys);
  const output = second ? mean([first.output, second.output]) : first.output;
  const found = { ...first, second, output, first };
  if (state.nudged && Number.isFinite(state.beta)) {
    const which = state.nudged === "q" ? -1 : Number(state.nudged.slice(1));
    const keys = state.keys.map((key, j) => (j === which ? add(key, state.nudge) : key));
    const moved = [first, second].filter(Boolean).map(({ weights, output: old }, h) => {
      const query = h ? state.second : state.query;
      const step = which < 0 && !h ? state.nudge : [0, 0]; // of the query
      const change = state.keys.map((key, j) => dot(step, key) + (j === which ? dot(query, state.nudge) : 0));
      return { output: head(add(query, step), keys).output, predicted: add(old, firstOrderChange(weights, state.values, old, state.beta, change)) };
    });
    const [output, predicted] = ["output", "predicted"].map((name) => mean(moved.map((each) => each[name])));
    found.nudged = { output, predicted, error: norm(predicted.map((x, e) => x - output[e])) };
  }
  if (state.spread || (state.along >= 0 && state.length)) {
    const { normal } = generator(state.seed);
    const one = [];
    const two = [];
    for (let draw = 0; draw < DRAWS; draw += 1) {
      const keys = state.keys.map((key, j) => {
        const longer = j === state.along ? 1 + state.length * normal() : 1;
        return key.map((x) => x * longer + state.spread * normal());
      });
      one.push(head(state.second ? add(state.query, state.second) : state.query, keys).output);
      if (state.second) two.push(mean([state.query, state.second].map((query) => head(query, keys).output)));
    }
    found.clouds = [{ name: "one head", points: one }];
    if (state.second) found.clouds.push({ name: "two heads, averaged", points: two });
    for (const cloud of found.clouds) {
      const [x, y] = mean(cloud.points);
      cloud.deviation = Math.sqrt(mean(cloud.points.map((point) => [(point[0] - x) ** 2 + (point[1] - y) ** 2]))[0]);
    }
  }
  return found;
}

const toPixel = ([x, y]) => [x * UNIT, -y * UNIT];

function arrow(tip, name, label) {
  const [x, y] = toPixel(tip);
  const length = Math.hypot(x, y) || 1;
  const [ux, uy] = [x / length, y / length];
  const head = Math.min(12, length);
  const points = [[x, y], [x - ux * head - uy * head * 0.45, y - uy * head + ux * head * 0.45], [x - ux * head + uy * head * 0.45, y - uy * head - ux * head * 0.45]];
  return [svg("line", { x1: 0, y1: 0, x2: x - ux * head * 0.8, y2: y - uy * head * 0.8, class: `arrow ${name}` }),
    svg("polygon", { points: points.map((point) => point.join(",")).join(" "), class: `arrow-head ${name}` }),
    svg("text", { x: x + ux * 16, y: y + uy * 16 + 5, class: "arrow-label" }, label)];
}

const diamond = ([x, y], size, name) => svg("polygon", { class: name, points: `${x},${y - size} ${x + size},${y} ${x},${y + size} ${x - size},${y}` });

function mount(element, state, update) {
  const scene = svg("g");
  const picture = svg("svg", { class: "picture plane", viewBox: `${-HALF} ${-HALF} ${2 * HALF} ${2 * HALF}`, role: "group", "aria-label": "Plane with keys, values and the query" }, scene);
  const side = html("div", { class: "side" });
  const tables = html("div");
  element.append(html("div", { class: "split" }, html("div", { class: "canvas" }, picture, tables), side));

  const positionOf = (handle) => {
    if (handle === "q") return state.query;
    if (handle === "q2") return state.second;
    if (handle === "n") return state.nudge;
    return handle[0] === "k" ? state.keys[Number(handle.slice(1))] : state.values[Number(handle.slice(1))];
  };
  const origin = (handle) => (handle !== "n" ? [0, 0] : state.nudged === "q" ? state.query : state.keys[Number(state.nudged.slice(1))]);
  const move = (handle, to) => {
    const limited = to.map((x) => Math.max(-FARTHEST, Math.min(FARTHEST, x)));
    if (handle === "q") update({ query: limited });
    else if (handle === "q2") update({ second: limited });
    else if (handle === "n") update({ nudge: limited });
    else {
      const j = Number(handle.slice(1));
      const replace = (list) => list.map((item, k) => (k === j ? limited : item));
      if (handle[0] === "k") update({ keys: replace(state.keys), ...(state.tie ? { values: replace(state.values) } : {}) });
      else update({ values: replace(state.values), ...(state.tie ? { keys: replace(state.keys) } : {}) });
    }
  };

  let dragged = null;
  picture.addEventListener("pointerdown", (event) => {
    const handle = event.target.closest("[data-handle]");
    if (!handle) return;
    dragged = handle.dataset.handle;
    picture.setPointerCapture(event.pointerId);
    handle.focus();
    event.preventDefault();
  });
  picture.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const box = picture.getBoundingClientRect();
    const at = [((event.clientX - box.left) / box.width) * 2 * HALF - HALF, HALF - ((event.clientY - box.top) / box.height) * 2 * HALF];
    const start = origin(dragged);
    move(dragged, at.map((x, c) => Number((x / UNIT - start[c]).toFixed(3))));
  });
  for (const name of ["pointerup", "pointercancel"]) picture.addEventListener(name, () => { dragged = null; });
  picture.addEventListener("keydown", (event) => {
    const handle = event.target.closest("[data-handle]")?.dataset.handle;
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!handle || !by) return;
    event.preventDefault();
    move(handle, add(positionOf(handle), scale(by, event.shiftKey ? 0.01 : 0.1)).map((x) => Number(x.toFixed(3))));
  });

  const grip = (handle, at, label, shape) => svg("g", { class: "grip", tabindex: "0", role: "img", "data-handle": handle, "aria-label": `${label} at ${format(positionOf(handle)[0])}, ${format(positionOf(handle)[1])}; arrow keys move it`, transform: `translate(${at.join(",")})` },
    svg("circle", { r: 18, class: "grip-area" }), shape);

  function drawScene(found) {
    const lines = [];
    for (let at = -3; at <= 3; at += 1) {
      lines.push(svg("line", { x1: at * UNIT, y1: -HALF, x2: at * UNIT, y2: HALF, class: at ? "grid" : "axis" }), svg("line", { x1: -HALF, y1: at * UNIT, x2: HALF, y2: at * UNIT, class: at ? "grid" : "axis" }));
      if (at) lines.push(svg("text", { x: at * UNIT, y: HALF - 4, class: "tick" }, format(at)), svg("text", { x: 4 - HALF, y: Math.max(22 - HALF, -4 - at * UNIT), class: "tick start" }, format(at)));
    }
    const output = toPixel(found.output);
    const hull = convexHull(state.values).map(toPixel);
    const shares = found.second ? found.weights.map((weight, j) => (weight + found.second.weights[j]) / 2) : found.weights;
    // values on a line leave no room inside the hull: the clouds are drawn beside it
    const along = hull.length === 2 ? [hull[1][0] - hull[0][0], hull[1][1] - hull[0][1]] : null;
    const offset = (k) => (along && norm(along) ? `translate(${scale([along[1], -along[0]], ((k ? -1 : 1) * 18) / norm(along)).join(",")})` : null);
    const clouds = (found.clouds ?? []).map((cloud, k) => svg("g", { class: `cloud cloud-${k}`, transform: offset(k) }, cloud.points.map((point) => { const [x, y] = toPixel(point); return svg("circle", { cx: x, cy: y, r: 3 }); })));
    const projections = state.projections && norm(state.query) > 0 ? state.keys.map((key) => {
      const foot = toPixel(scale(state.query, dot(state.query, key) / dot(state.query, state.query)));
      const tip = toPixel(key);
      return [svg("line", { x1: tip[0], y1: tip[1], x2: foot[0], y2: foot[1], class: "projection" }), svg("circle", { cx: foot[0], cy: foot[1], r: 4, class: "foot" })];
    }) : [];
    const nudge = found.nudged ? (() => {
      const start = toPixel(origin("n"));
      const end = toPixel(add(origin("n"), state.nudge));
      const predicted = toPixel(found.nudged.predicted);
      const truth = toPixel(found.nudged.output);
      return [svg("line", { x1: start[0], y1: start[1], x2: end[0], y2: end[1], class: "nudge" }),
        svg("line", { x1: output[0], y1: output[1], x2: predicted[0], y2: predicted[1], class: "nudge" }),
        diamond(predicted, 10, "predicted"), diamond(truth, 7, "truth"), grip("n", end, "Nudge", svg("circle", { r: 6, class: "nudge-end" }))];
    })() : [];
    scene.replaceChildren(...lines, hull.length > 2 ? svg("polygon", { points: hull.map((point) => point.join(",")).join(" "), class: "hull" }) : svg("polyline", { points: hull.map((point) => point.join(",")).join(" "), class: "hull" }), ...clouds,
      ...state.values.map((value, j) => { const [x, y] = toPixel(value); return svg("line", { x1: x, y1: y, x2: output[0], y2: output[1], class: "pull", stroke: category(j), "stroke-width": 0.5 + 9 * shares[j], opacity: 0.25 + 0.6 * shares[j] }); }),
      ...projections.flat(),
      // a key in the direction of the query stays in sight on the thicker arrow
      svg("g", {}, arrow(state.query, "query", state.second ? "q₁" : "q")), grip("q", toPixel(state.query), state.second ? "Query 1" : "Query", null),
      ...(state.second ? [svg("g", {}, arrow(state.second, "query", "q₂")), grip("q2", toPixel(state.second), "Query 2", null)] : []),
      ...state.keys.flatMap((key, j) => [svg("g", { style: { "--own": category(j) } }, arrow(key, "key", state.tie ? `k${j + 1} = v${j + 1}` : `k${j + 1}`)), grip(`k${j}`, toPixel(key), `Key ${j + 1}`, null)]),
      ...(state.tie ? [] : state.values.map((value, j) => grip(`v${j}`, toPixel(value), `Value ${j + 1}`, [svg("circle", { r: 9, fill: category(j), class: "value" }), svg("text", { x: 14, y: -10, class: "value-label" }, `v${j + 1}`)])).flat()),
      ...nudge, diamond(output, 9, "output"), svg("text", { x: output[0] + 13, y: output[1] + 20, class: "output-label" }, "output"));
  }

  const bars = html("div", { class: "bars" });
  const numbers = html("div", { class: "sentence" });
  const cloudText = html("div");
  const chosen = Math.max(0, PRESETS.findIndex((each) => write({ ...BASE, ...each.change }).toString() === write(state).toString()));
  const presetText = html("p", { class: "help plane-preset" }, PRESETS[chosen].text);
  const slider = betaSlider(state.beta, (beta) => update({ beta }));
  const presetList = html("select", { onchange: (event) => {
    const { change, text } = PRESETS[Number(event.target.value)];
    update({ ...structuredClone(BASE), ...structuredClone(change) });
    presetText.textContent = text;
  } }, PRESETS.map((preset, k) => html("option", { value: String(k), selected: k === chosen }, preset.sheet ? `${preset.title} (${preset.sheet})` : preset.title)));
  const options = html("div", { class: "options" });
  const noise = html("details", { open: Boolean(state.spread || state.length) });
  side.append(field("Question", presetList), presetText, field("Inverse temperature β", slider.input), slider.output,
    h2("Weights"), bars, h2("Output"), formula(), numbers, cloudText, options, noise);
  const range = (label, value, most, change) => field(label, html("input", { type: "range", min: "0", max: String(most), step: "0.01", value: String(value), oninput: (event) => change(Number(event.target.value)) }));

  function drawOptions() {
    const last = state.keys.length - 1;
    options.replaceChildren(
      html("button", { disabled: state.keys.length >= MOST_KEYS, onclick: () => { const angle = 2.4 * state.keys.length; const at = [Math.cos(angle), Math.sin(angle)].map((x) => Number(x.toFixed(2))); update({ keys: [...state.keys, at], values: [...state.values, state.tie ? at : scale(at, 2)] }); } }, "Add a key"),
      html("button", { disabled: state.keys.length < 2, onclick: () => update({ keys: state.keys.slice(0, -1), values: state.values.slice(0, -1), nudged: state.nudged === `k${last}` ? null : state.nudged, along: Math.min(state.along, last - 1) }) }, "Remove the last key"),
      checkbox("Values are the keys (k = v)", state.tie, (tie) => update({ tie, ...(tie ? { values: structuredClone(state.keys) } : {}) })),
      checkbox("Show scores as projections on the query", state.projections, (projections) => update({ projections })),
      checkbox("Second head", Boolean(state.second), (on) => update({ second: on ? [-state.query[1], state.query[0]] : null })),
      field("Nudge", html("select", { onchange: (event) => update({ nudged: event.target.value || null, nudge: [0.3, 0.2] }) },
        [["", "nothing"], ["q", "the query"], ...state.keys.map((_, j) => [`k${j}`, `key ${j + 1}`])].map(([value, label]) => html("option", { value, selected: value === (state.nudged ?? "") }, label)))));
    noise.replaceChildren(html("summary", {}, "Noise: 200 draws of the keys"),
      range(`Noise of every key: ${format(state.spread)}`, state.spread, 0.5, (spread) => update({ spread })),
      field("Key whose length varies", html("select", { onchange: (event) => update({ along: Number(event.target.value), length: state.length || 0.5 }) },
        [["-1", "none"], ...state.keys.map((_, j) => [String(j), `key ${j + 1}`])].map(([value, label]) => html("option", { value, selected: Number(value) === state.along }, label)))),
      range(`How much its length varies: ${format(state.length)}`, state.length, 1, (length) => update({ length })),
      html("button", { onclick: () => update({ seed: state.seed + 1 }) }, "Draw again"));
  }

  let structure = "";
  return function redraw() {
    const found = compute(state);
    drawScene(found);
    slider.set(state.beta);
    const shown = found.second ? [["head 1", found.first, "1"], ["head 2", found.second, "2"]] : [["", found.first, "1"]];
    bars.replaceChildren(...shown.flatMap(([title, head, h]) => [title && html("h3", {}, title), ...head.weights.map((weight, j) => html("div", { class: "bar" },
      html("span", { class: "swatch", style: { background: category(j) } }), html("span", {}, `k${j + 1}`),
      html("span", { class: "track" }, html("span", { class: "fill", style: { width: `${100 * weight}%`, background: category(j) } })), number(weight, `w.${h}.${j}`, `Weight of key ${j + 1}`)))]).filter(Boolean));
    numbers.replaceChildren(found.second ? "mean output of both heads = (" : "output = (", number(found.output[0], "o.0", "Output, x"), ", ", number(found.output[1], "o.1", "Output, y"), ")");
    if (found.nudged) numbers.append(help(`After the nudge: predicted (${found.nudged.predicted.map(format).join(", ")}), true (${found.nudged.output.map(format).join(", ")}), apart by ${format(found.nudged.error)}.`));
    cloudText.replaceChildren(...(found.clouds ?? []).map((cloud, k) => html("p", { class: `cloud-text cloud-${k}` }, `${cloud.name}: standard deviation ${format(cloud.deviation)} over ${DRAWS} draws`)));
    const now = JSON.stringify([state.keys.length, state.tie, state.projections, Boolean(state.second), state.nudged, state.along, state.spread, state.length]);
    if (now !== structure && !noise.contains(document.activeElement?.closest("input[type=range]"))) { structure = now; drawOptions(); }
    const table = planeView.table(state);
    tables.replaceChildren(asTable("Numbers of this state", table.head, table.rows));
  };
}

function formula() {
  const [mi, mo, mrow, msub] = ["mi", "mo", "mrow", "msub"].map((tag) => (...children) => math(tag, {}, ...children));
  const sub = (name) => msub(mi(name), mi("j"));
  const sum = math("munder", {}, mo("∑"), mi("j"));
  return math("math", { display: "block", "aria-label": "output = sum over j of a_j v_j, where a = softmax of beta times q dot k_j" },
    mrow(mi("output"), mo("="), sum, sub("a"), sub("v"), mo(","), math("mspace", { width: "1em" }), sub("a"), mo("="),
      math("mfrac", {}, mrow(mi("exp"), mo("("), mi("β"), mi("q"), mo("·"), sub("k"), mo(")")), mrow(sum.cloneNode(true), mi("exp"), mo("("), mi("β"), mi("q"), mo("·"), sub("k"), mo(")")))));
}

function why(state, key) {
  const found = compute(state);
  const [kind, a, b] = key.split(".");
  const axis = ["x", "y"];
  if (kind === "o" && found.second) {
    const e = Number(a);
    return { title: `output ${axis[e]}`, value: found.output[e], formula: "the mean of both heads' outputs", parts: [1, 2].map((h) => ({ label: `head ${h}`, value: (h === 1 ? found.first : found.second).output[e], key: `h.${h}.${e}` })) };
  }
  const headOf = (h) => (h === "2" ? found.second : found.first);
  if (kind === "o" || kind === "h") {
    const e = Number(kind === "o" ? a : b);
    const h = kind === "o" ? "1" : a;
    const head = headOf(h);
    if (!head) return null;
    return { title: `${kind === "h" ? `head ${h}, ` : ""}output ${axis[e]}`, value: head.output[e], formula: `Σⱼ aⱼ vⱼ[${axis[e]}]`,
      parts: head.weights.flatMap((weight, j) => [{ label: `a${j + 1}`, value: weight, key: `w.${h}.${j}` }, { label: `× v${j + 1}[${axis[e]}]`, value: state.values[j][e] }, { label: "= share", value: weight * state.values[j][e] }]) };
  }
  const head = headOf(a);
  const j = Number(b);
  if (!head || !(j < state.keys.length)) return null;
  if (kind === "w") {
    const { beta } = state;
    const scored = head.scores.map((score, k) => ({ label: `score s${k + 1} = q · k${k + 1}`, value: score, key: `s.${a}.${k}` }));
    if (beta === Infinity) return { title: `weight a${j + 1}`, value: head.weights[j], formula: "β = ∞: the largest score takes all, ties share", parts: scored };
    const largest = Math.max(...head.scores);
    const [shift, less] = Math.abs(beta * largest) > 300 ? [largest, " − max"] : [0, ""]; // exp would overflow
    const exps = head.scores.map((score) => Math.exp(beta * (score - shift)));
    const name = (k) => (less ? `exp(β (s${k}${less}))` : `exp(β s${k})`);
    return { title: `weight a${j + 1}`, value: head.weights[j], formula: `${name(j + 1)} / Σⱼ ${name("ⱼ")}, β = ${format(beta)}`, note: `= ${format(exps[j])} / (${exps.map(format).join(" + ")})`,
      parts: scored.flatMap((part, k) => [part, { label: name(k + 1), value: exps[k] }]) };
  }
  if (kind === "s") {
    const query = a === "2" ? state.second : state.query;
    return { title: `score s${j + 1}`, value: head.scores[j], formula: `q · k${j + 1} = Σ_c q[c] k${j + 1}[c]`,
      parts: query.flatMap((x, c) => [{ label: `q[${axis[c]}]`, value: x }, { label: `× k${j + 1}[${axis[c]}]`, value: state.keys[j][c] }, { label: "= product", value: x * state.keys[j][c] }]) };
  }
  return null;
}

function table(state) {
  const found = compute(state);
  const rows = found.scores.flatMap((score, j) => [[`score of key ${j + 1}`, score], [`weight of key ${j + 1}`, found.weights[j]]]);
  if (found.second) rows.push(...found.second.weights.map((weight, j) => [`weight of key ${j + 1}, head 2`, weight]));
  rows.push(["output x", found.output[0]], ["output y", found.output[1]]);
  for (const cloud of found.clouds ?? []) rows.push([`standard deviation, ${cloud.name}`, cloud.deviation]);
  return { head: ["number", "value"], rows };
}

function python(state) {
  const list = (rows) => JSON.stringify(rows).replaceAll(",", ", ");
  const queries = [state.query, ...(state.second ? [state.second] : [])];
  const beta = state.beta === Infinity ? 'float("inf")' : state.beta;
  const call = (v) => `attend(q[None, :, None], k[None, None], ${v}[None, None], beta=${beta})`;
  const output = `${call("v")}${state.second ? ".mean(1)[0, 0]" : "[0, 0, 0]"}`;
  const [moved, row] = state.nudged === "q" ? ["q", 0] : ["k", (state.nudged ?? "").slice(1)];
  const noisy = state.spread || (state.along >= 0 && state.length);
  return [
    "import torch", "from regard import attend", ...(noisy ? ["from regard.explorer.noise import standard_deviation"] : []), "",
    `q = torch.tensor(${list(queries)}, dtype=torch.float64)  # ${queries.length === 2 ? "one query per head" : "one query"}`,
    `k = torch.tensor(${list(state.keys)}, dtype=torch.float64)`, `v = torch.tensor(${list(state.values)}, dtype=torch.float64)`,
    `print(${call(`torch.eye(${state.keys.length}, dtype=torch.float64)`)}[0, :, 0])  # weights (h, j)`,
    `print(${output})${state.second ? "  # the mean of both heads" : ""}`,
    ...(noisy ? [`noise = dict(beta=${beta}, spread=${state.spread}, along=${state.along}, length=${state.length}, seed=${state.seed})`, "print(standard_deviation(q.sum(0, keepdim=True), k, v, **noise))  # of the outputs of one head", ...(state.second ? ["print(standard_deviation(q, k, v, **noise))  # of two heads, averaged"] : [])] : []),
    ...(state.nudged && Number.isFinite(state.beta) ? [`step = torch.zeros_like(${moved})`, `step[${row}] = torch.tensor([${state.nudge.join(", ")}])`, `print(sum(torch.func.jvp(lambda ${moved}: ${output}, (${moved},), (step,))))  # predicted to first order`, `${moved} += step`, `print(${output})  # after the nudge`] : []), "",
  ].join("\n");
}

export const planeView = { title: "Plane", read, write, mount, why, table, python };
