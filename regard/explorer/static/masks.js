// Masks: an expression drawn exactly up to 65,536 positions, its visible pairs and cost, and a comparison with another mask.

import { asTable, checkbox, colourScale, field, format, h2, hatch, headRow, help, html, number, plural, sequential, svg, tbody, tr, warning } from "./dom.js";
import { MaskError, addMask, blockCounts, blockTable, completeMask, countPairs, denseMask, maskNames, parseMask, visibleRow } from "./mask_expression.js";
import { ask } from "./remote.js";

const PICTURE = 576;
const CELLS = 64; // blocks along a side beyond this length
const LONGEST = 65536;
const MOST_INTERVALS = 2e7;
const MOST_ROWS = 64;
const MOST_COMPARED = 4096; // keys
const BASE = { mask: "causal() & window(before=3) | global_tokens(1)", queries: 16, keys: 16, against: "", painted: "" };

const size = (text, fallback) => { const value = Number(text); return Number.isInteger(value) && value >= 1 && value <= LONGEST ? value : fallback; };

function read(parameters) {
  const keys = size(parameters.get("keys"), BASE.keys);
  return { mask: (parameters.get("mask") ?? BASE.mask).slice(0, 5000), keys, queries: Math.min(keys, size(parameters.get("queries"), keys)), against: (parameters.get("against") ?? "").slice(0, 5000), painted: /^[\d.,]*$/.test(parameters.get("painted") ?? "") ? parameters.get("painted") ?? "" : "" };
}

function write(state) {
  const parameters = new URLSearchParams({ mask: state.mask, keys: String(state.keys) });
  if (state.queries !== state.keys) parameters.set("queries", String(state.queries));
  if (state.against) parameters.set("against", state.against);
  if (state.painted) parameters.set("painted", state.painted);
  return parameters;
}

// The painted cells: in each of them the mask is the opposite of the expression.
const paintedCells = (state) => new Set(state.painted ? state.painted.split(",") : []);

function parse(text, state) {
  const mask = parseMask(text);
  if (mask.covered < state.keys) throw new MaskError(`the mask has data for ${mask.covered} positions, but there are ${state.keys}`, 0, text.length);
  // rows of many intervals (dilated masks at great lengths) are left to Python
  const sample = [0, 0.5, 1].map((share) => visibleRow(mask, Math.floor(share * (state.queries - 1)), state.queries, state.keys).length);
  if (Math.max(...sample) * state.queries > MOST_INTERVALS) throw new MaskError(`too many separate runs of keys to draw here; run: regard masks "${text}" --queries ${state.queries}`, 0, text.length);
  return mask;
}

function painted(mask, state) {
  const cells = paintedCells(state);
  if (!cells.size) return mask;
  const first = state.keys - state.queries;
  const base = mask.row;
  return { ...mask, row: (i, keys) => {
    const seen = Array(keys).fill(false);
    for (const [start, stop] of base(i, keys)) seen.fill(true, start, stop);
    for (let j = 0; j < keys; j += 1) if (cells.has(`${i - first}.${j}`)) seen[j] = !seen[j];
    return seen.flatMap((visible, j) => (visible ? [[j, j + 1]] : []));
  } };
}

// The first cell in which two masks differ, and the number of such cells.
export function difference(a, b, queries, keys) {
  let first = null;
  let count = 0;
  for (let r = 0; r < queries; r += 1) {
    const [x, y] = [a, b].map((mask) => visibleRow(mask, r, queries, keys));
    if (JSON.stringify(x) === JSON.stringify(y)) continue;
    const marks = new Map(); // changes of visibility along the row, for both masks
    for (const [which, runs] of [x, y].entries()) for (const [start, stop] of runs) for (const at of [start, stop]) marks.set(at, [...(marks.get(at) ?? []), which]);
    const seen = [false, false];
    const ends = [...marks.keys()].sort((p, q) => p - q);
    ends.forEach((at, k) => {
      for (const which of marks.get(at)) seen[which] = !seen[which];
      if (seen[0] === seen[1] || k + 1 >= ends.length) return;
      if (!first) first = { query: r, key: at, visible: seen[0] };
      count += ends[k + 1] - at;
    });
  }
  return { first, count };
}

// Whether two masks show the same pairs; most masks differ in one of the first rows.
function equal(a, b, queries, keys) {
  for (let r = 0; r < queries; r += 1) {
    const [x, y] = [a, b].map((mask) => JSON.stringify(joined(visibleRow(mask, r, queries, keys))));
    if (x !== y) return false;
  }
  return true;
}

// Runs in order, without empty ones; runs that touch become one.
function joined(runs) {
  const found = [];
  for (const [start, stop] of [...runs].sort((a, b) => a[0] - b[0])) {
    if (start >= stop) continue;
    if (found.length && start <= found.at(-1)[1]) found.at(-1)[1] = Math.max(found.at(-1)[1], stop);
    else found.push([start, stop]);
  }
  return found;
}

// Usual mistakes between two masks: each changes `mine`; the one that gives `theirs` names the cause.
export function conventions(mine, theirs, queries, keys) {
  const shift = keys - queries;
  const inverted = (mask) => ({ row: (i, n) => { const runs = joined(mask.row(i, n)); return [0, ...runs.map(([, stop]) => stop)].map((start, k) => [start, runs[k]?.[0] ?? n]); } });
  // an empty row is a run of no keys that ends at the query
  const widened = (mask, before, after) => ({ row: (i, n) => {
    const runs = mask.row(i, n);
    return (runs.length ? runs : [[i, i]]).map(([start, stop]) => [Math.max(0, start - (runs.length ? before : 0)), Math.max(0, Math.min(n, stop + after))]);
  } });
  let columns = null; // the visible queries of each key, made when a row is asked for
  const turned = { row: (i, n) => {
    columns ??= Array.from({ length: n }, (_, j) => mine.row(j, n)).reduce((found, runs, j) => { for (const [start, stop] of runs) for (let k = start; k < stop; k += 1) found[k].push([j, j + 1]); return found; }, Array.from({ length: n }, () => []));
    return columns[i];
  } };
  const own = ": the window counts the query itself in one of them", strict = ": j <= i in one of them, j < i in the other";
  const changes = [
    ["inverted: True hides in one of them", inverted(mine)],
    ["queries are aligned to the first key (top-left) in one of them, to the last (bottom-right) in the other", shift ? { row: (i, n) => mine.row(i - shift, n) } : null],
    [`one more earlier key${own}`, widened(mine, 1, 0)],
    // keys that the first lacks at the edge cannot be taken away from it, so the second is widened
    [`one earlier key fewer${own}`, mine, widened(theirs, 1, 0)],
    [`one later key more${strict}`, widened(mine, 0, 1)],
    [`one later key fewer${strict}`, mine, widened(theirs, 0, 1)],
    ["transposed in one of them", queries === keys ? turned : null],
    ["the causal part is missing in the second", { row: (i, n) => mine.row(i, n).map(([start, stop]) => [start, Math.min(stop, i + 1)]).filter(([start, stop]) => start < stop) }],
  ];
  return changes.filter(([, mask, other = theirs]) => mask && equal(mask, other, queries, keys)).map(([name]) => name);
}

export function compute(state) {
  const parsed = (text, field) => {
    try {
      return { mask: parse(text, state) };
    } catch (error) {
      if (!(error instanceof MaskError)) throw error;
      return { error, field };
    }
  };
  const mine = parsed(state.mask, "mask");
  if (mine.error) return { error: mine.error, field: "mask" };
  const mask = painted(mine.mask, state);
  const found = { mask, pairs: countPairs(mask, state.queries, state.keys), all: state.queries * state.keys };
  found.empty = 0;
  for (let r = 0; r < state.queries; r += 1) found.empty += visibleRow(mask, r, state.queries, state.keys).length === 0;
  if (!state.against) return found;
  const other = parsed(state.against, "against");
  if (other.error) return { ...found, error: other.error, field: "against" };
  found.other = other.mask;
  found.difference = difference(mask, other.mask, state.queries, state.keys);
  found.conventions = found.difference.count && state.keys <= MOST_COMPARED ? conventions(mask, other.mask, state.queries, state.keys) : [];
  return found;
}

function mount(element, state, update, data) {
  for (const given of data.masks ?? []) addMask(given.name, given);
  const picture = svg("svg", { class: "picture masks", role: "group", "aria-label": "The mask: rows are queries, columns are keys" });
  const message = warning();
  const facts = html("div", { class: "facts" });
  const legend = html("div", { class: "scales" });
  const tables = html("div");
  const growth = html("div");
  const kernels = html("div");
  const blocks = html("div");
  const side = html("div", { class: "side" });
  const split = html("div", { class: "split" }, html("div", { class: "canvas" }, message, picture, legend, tables), side);
  element.append(split);
  const completions = html("div", { class: "completions", role: "group", "aria-label": "Completions" });
  // completions of the word at the caret; their buttons come next in the order of the Tab key
  const complete = (input, change) => completions.replaceChildren(...(document.activeElement === input ? completeMask(input.value, input.selectionStart) : []).map((option) => html("button", { title: option.summary, onclick: () => {
    input.value = option.text;
    input.focus();
    input.setSelectionRange(option.caret, option.caret);
    change(option.text);
    complete(input, change);
  } }, option.label)));
  const expression = (value, change, placeholder = "") => { const input = html("input", { type: "text", value, placeholder, spellcheck: "false", autocomplete: "off", oninput: () => { change(input.value); complete(input, change); }, onfocus: () => complete(input, change) }); return input; };
  const maskInput = expression(state.mask, (mask) => update({ mask, painted: "" }));
  const againstInput = expression(state.against, (against) => update({ against }), "another mask, to compare");
  const lengthInput = (name, label) => field(label, html("input", { type: "number", min: "1", max: String(LONGEST), value: String(state[name]), onchange: (event) => {
    const value = size(event.target.value, state[name]);
    event.target.value = String(value);
    update(name === "keys" ? { keys: value, queries: Math.min(value, state.queries === state.keys ? value : state.queries), painted: "" } : { queries: Math.min(value, state.keys), painted: "" });
  } }));
  const lengths = html("div", { class: "row" });
  side.append(field("Mask", maskInput, "Combine with & | ~. True means visible."), completions,
    lengths, facts, field("Compare with", againstInput, "Write the mask you meant. regard.show(mask, against=...) opens a mask from your own code."), growth, blocks, kernels);
  split.append(html("section", { class: "more" }, h2("Gallery"), html("div", { class: "gallery" }, (data.gallery ?? []).map((text) => html("button", { onclick: () => { maskInput.value = text; update({ mask: text, keys: 16, queries: 16, painted: "" }); } }, thumbnail(text), html("code", {}, text.length > 44 ? `${text.slice(0, 42)}…` : text))))));

  picture.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell");
    if (cell && event.key === " ") { event.preventDefault(); flip(cell); }
  });
  function flip(cell) {
    const key = `${cell.dataset.row}.${cell.dataset.column}`;
    const cells = paintedCells(state);
    if (!cells.delete(key)) cells.add(key);
    update({ painted: [...cells].join(",") });
  }
  let painting = false;
  let touched = ""; // a redraw under the pointer is not a new cell
  const paint = (event) => {
    const cell = painting && event.buttons === 1 && event.target.closest(".cell");
    if (!cell || touched === cell.dataset.why) return;
    touched = cell.dataset.why;
    flip(cell);
  };
  picture.addEventListener("pointerdown", (event) => { touched = ""; paint(event); });
  picture.addEventListener("pointerover", paint);
  picture.addEventListener("click", (event) => { if (painting) event.stopPropagation(); });
  const brush = checkbox("Paint: click cells or drag over them; by keyboard, Space on a cell", false, (on) => { painting = on; });
  lengths.after(brush);

  function drawCells(found, pattern) {
    const seen = denseMask(found.mask, state.queries, state.keys);
    const other = found.other && denseMask(found.other, state.queries, state.keys);
    const step = PICTURE / Math.max(state.queries, state.keys);
    const gap = step > 8 ? 1 : 0;
    const first = state.keys - state.queries;
    const cells = seen.flatMap((row, r) => row.map((visible, c) => {
      const differs = other && other[r][c] !== visible;
      const name = differs ? (visible ? "only-first" : "only-second") : visible ? "visible" : "";
      return svg("g", { class: "cell", "data-row": r, "data-column": c, "data-why": `m.${r}.${c}`, tabindex: r || c ? "-1" : "0", role: "button", "aria-label": `query ${first + r}, key ${c}: ${visible ? "visible" : "hidden"}${differs ? ", the other mask differs" : ""}` },
        svg("rect", { x: c * step, y: r * step, width: step - gap, height: step - gap, class: name, fill: visible || differs ? null : pattern.fill }));
    }));
    picture.replaceChildren(pattern.defs, ...axis(step, first), ...cells);
  }

  // Positions along both axes; a cell of the picture is a block of `unit` positions, named by its first.
  function axis(step, first, unit = 1) {
    const most = state.keys > 999 ? 8 : 16; // labels
    const every = unit * Math.max(1, Math.ceil(state.keys / unit / most));
    const labels = [];
    for (let c = 0; c < state.keys; c += every) labels.push(svg("text", { x: (c / unit + 0.5) * step, y: -6, class: "label" }, String(c)));
    for (let r = 0; r < state.queries; r += every) labels.push(svg("text", { x: -6, y: (r / unit + 0.5) * step + 4, class: "label end" }, String(first + r)));
    const titles = ["key", "query"].map((name) => (unit > 1 ? `${name}, in blocks of ${unit}` : name));
    return [svg("text", { x: PICTURE / 2, y: -28, class: "title middle" }, titles[0]), svg("text", { x: -52, y: PICTURE / 2, class: "title middle", transform: `rotate(-90 -52 ${PICTURE / 2})` }, titles[1]), ...labels];
  }

  function drawBlocks(found, pattern) {
    const grid = blockCounts(found.mask, state.queries, state.keys, CELLS);
    const other = found.other && blockCounts(found.other, state.queries, state.keys, CELLS);
    const step = PICTURE / Math.max(grid.rows, grid.columns);
    const cells = [];
    for (let r = 0; r < grid.rows; r += 1) {
      for (let c = 0; c < grid.columns; c += 1) {
        const area = (Math.min(state.queries, (r + 1) * grid.size) - r * grid.size) * (Math.min(state.keys, (c + 1) * grid.size) - c * grid.size);
        const share = grid.counts[r][c] / area;
        const differs = other && other.counts[r][c] !== grid.counts[r][c];
        cells.push(svg("rect", { x: c * step, y: r * step, width: step - 0.5, height: step - 0.5, fill: share ? sequential(0.25 + 0.75 * share).fill : pattern.fill, class: differs ? "differs" : "" }, svg("title", {}, `queries ${r * grid.size} to ${Math.min(state.queries, (r + 1) * grid.size) - 1}, keys ${c * grid.size} to ${Math.min(state.keys, (c + 1) * grid.size) - 1}: ${grid.counts[r][c].toLocaleString("en")} of ${area.toLocaleString("en")} pairs visible`)));
      }
    }
    picture.replaceChildren(pattern.defs, ...axis(step, state.keys - state.queries, grid.size), ...cells);
  }

  // Visible pairs at growing lengths, drawn on logarithmic axes beside those of full attention.
  function drawGrowth() {
    const rows = growthOf(state);
    if (rows.length < 2) { growth.replaceChildren(); return; }
    const [low, high] = [Math.log(rows[0][0]), Math.log(rows.at(-1)[0])];
    const most = 2 * high;
    const least = Math.log(Math.max(1, rows[0][0]));
    const at = ([length, pairs]) => [40 + (200 * (Math.log(length) - low)) / (high - low), 8 + (96 * (most - Math.log(Math.max(1, pairs)))) / (most - least)];
    const line = (points, name) => svg("polyline", { points: points.map((point) => at(point).join(",")).join(" "), class: `growth-line ${name}` });
    const square = rows.map(([length]) => [length, length * length]);
    const short = (length) => (length >= 1024 ? `${length / 1024}k` : String(length));
    const exponent = exponentOf(rows);
    growth.replaceChildren(h2("Cost against length"), svg("svg", { class: "growth", viewBox: "0 0 250 128", role: "img", "aria-label": `Visible pairs at growing lengths, growing like n to the power ${exponent.toFixed(2)}` },
      line(square, "all"), line(rows, "own"), rows.map((row) => svg("circle", { cx: at(row)[0], cy: at(row)[1], r: 3, class: "growth-point" }, svg("title", {}, `${row[1].toLocaleString("en")} pairs at ${row[0].toLocaleString("en")}`))),
      rows.map(([length]) => svg("text", { x: at([length, 1])[0], y: 122, class: "tick" }, short(length))), svg("text", { x: 36, y: 16, class: "tick end" }, "n²"), svg("text", { x: 36, y: at(rows[0])[1] + 4, class: "tick end" }, "pairs")),
    help("Pairs grow like n^", number(exponent, "g", "Exponent of the growth"), `: ${rows.at(-1)[1].toLocaleString("en")} at ${rows.at(-1)[0].toLocaleString("en")}.`), asTable("Visible pairs", ["length", "pairs", "share of n²"], rows.map(([length, pairs]) => [String(length), pairs, pairs / length ** 2])));
  }

  function drawBlockTable(found) {
    const sizes = [2, 4, 8, 16, 32, 64, 128].filter((size) => 2 * size <= Math.max(4, state.keys)).slice(-3);
    const rows = sizes.map((size) => blockTable(found.mask, state.queries, state.keys, size));
    blocks.replaceChildren(html("table", { class: "blocks" }, html("caption", {}, "Block table: a block-sparse kernel skips empty blocks and needs no mask in full ones"), headRow(["size", "full", "partial", "empty", "skipped"]),
      tbody(rows.map(({ size, full, partial, empty }) => tr(String(size), [full, partial, empty].map((count) => html("td", {}, count.toLocaleString("en"))), html("td", {}, `${((100 * empty) / (full + partial + empty)).toFixed(1)} %`))))));
  }

  // Which kernel runs: the server knows; a page without one shows the command.
  let asked = "";
  let waiting = 0;
  function drawKernels() {
    const request = JSON.stringify({ mask: state.mask, queries: state.queries, keys: state.keys });
    if (request === asked) return;
    asked = request;
    if (parseMask(state.mask).given) { kernels.replaceChildren(); return; } // Python knows no expression for it
    const shape = `--shape 1,8,${state.queries},64${state.queries === state.keys ? "" : ` --kv 8,${state.keys},64`}`;
    const command = help("Which kernel runs, and why the others refuse: ", html("code", {}, `regard explain ${shape} --mask "${state.mask}"`));
    const stored = data.stored?.[`explain|${state.mask}|${state.queries}|${state.keys}`];
    if (stored) { showKernels(stored); return; }
    if (!data.api) { kernels.replaceChildren(command); return; }
    clearTimeout(waiting);
    const current = (act) => (found) => { if (request === asked) act(found); }; // the mask may change meanwhile
    waiting = setTimeout(() => ask("/api/explain", JSON.parse(request)).then(current(showKernels), current((error) => kernels.replaceChildren(warning(error.message), command))), 200);
  }

  const amount = (entries) => (entries >= 1e9 ? `${(entries / 1e9).toFixed(1)} billion` : entries >= 1e6 ? `${(entries / 1e6).toFixed(1)} million` : Math.round(entries).toLocaleString("en"));
  function showKernels(found) {
    kernels.replaceChildren(html("table", { class: "kernels" }, html("caption", {}, "Kernels for 8 heads of width 64"), tbody(found.answers.map(({ kernel, reasons, work, memory }) =>
      html("tr", { class: kernel === found.chosen ? "good" : "" }, html("th", { scope: "row" }, kernel === found.chosen ? `→ ${kernel}` : kernel),
        html("td", { class: "reason" }, reasons.length ? `refuses: ${reasons.join("; ")}` : `${kernel === found.chosen ? "runs" : "could run"}: ${amount(work)} entries, ${memory < 2 ** 30 ? `${(memory / 2 ** 20).toFixed(memory < 2 ** 20 ? 3 : 1)} MiB` : `${(memory / 2 ** 30).toFixed(1)} GiB`}`))))));
  }

  let shownMask = null;
  return function redraw() {
    const found = compute(state);
    for (const [input, name] of [[maskInput, "mask"], [againstInput, "against"]]) {
      if (document.activeElement !== input) input.value = state[name];
      input.setAttribute("aria-invalid", String(found.field === name));
    }
    message.hidden = !found.error;
    message.textContent = found.error ? `${found.error.message}${found.error.length ? ` (at character ${found.error.at + 1})` : ""}` : "";
    lengths.replaceChildren(lengthInput("keys", "Keys"), lengthInput("queries", "Queries"));
    if (!found.mask) return;
    const pattern = hatch();
    picture.setAttribute("viewBox", `-68 -48 ${PICTURE + 72} ${(PICTURE * state.queries) / Math.max(state.queries, state.keys) + 52}`);
    const exact = Math.max(state.queries, state.keys) <= CELLS;
    brush.hidden = !exact;
    (exact ? drawCells : drawBlocks)(found, pattern);
    if (shownMask !== `${state.mask} ${state.keys}`) { shownMask = `${state.mask} ${state.keys}`; drawGrowth(); }
    drawBlockTable(found);
    drawKernels();
    const share = (100 * found.pairs) / found.all;
    facts.replaceChildren(
      html("p", {}, html("button", { class: "number", "data-why": "c", "aria-label": `${found.pairs} visible pairs. Why this number?` }, html("strong", {}, found.pairs.toLocaleString("en"))), ` of ${found.all.toLocaleString("en")} pairs visible (${share.toFixed(share < 1 ? 3 : 1)} %)`),
      found.empty ? html("p", { class: "warn" }, `${found.empty === 1 ? "1 query sees" : `${found.empty.toLocaleString("en")} queries see`} nothing: the output there is zero.`) : "",
      found.difference ? comparison(found) : "");
    legend.replaceChildren(...(found.other
      ? [["visible", "visible in both"], ["only-first", "only in the first"], ["only-second", "only in the second"], ["hatched-key", "hidden in both"]]
      : [["visible", "visible"], ["hatched-key", "hidden"]]).filter(([name]) => exact || name !== "visible" || found.other).map(([name, text]) => html("span", { class: `key-item ${name}` }, text)), exact ? "" : colourScale((share) => sequential(0.25 + 0.75 * share), 0, 1, "share of a block that is visible"));
    const table = masksView.table(state);
    tables.replaceChildren(asTable("Visible keys of each query", table.head, table.rows));
  };

  function comparison(found) {
    if (!found.difference.count) return html("p", { class: "good" }, "Both masks are equal.");
    const { first, count } = found.difference;
    const at = state.keys - state.queries + first.query;
    const now = String(write(state)), note = (now === (data.first ??= now) && data.note) || "";
    return html("div", {}, html("p", { class: "warn" }, `${plural(count, "cell")} differ${count > 1 ? "" : "s"}. The first: the query at ${at} ${first.visible ? "sees" : "does not see"} key ${first.key} in the first mask, ${first.visible ? "not in the second" : "but in the second"}.`),
      found.conventions.length ? [html("p", {}, "One convention explains all of it:"), html("ul", {}, found.conventions.map((name) => html("li", {}, name)))]
        : note ? "" : help(state.keys <= MOST_COMPARED ? "No usual convention explains it." : `Compared up to ${MOST_COMPARED} keys.`), html("p", {}, note));
  }
}

// Visible pairs at 64, 256, ... positions, and the exponent between the last two.
function growthOf(state) {
  return [64, 256, 1024, 4096, 16384, LONGEST].filter((length) => length <= Math.max(4096, state.keys)).flatMap((length) => {
    try {
      const mask = parse(state.mask, { ...state, keys: length, queries: length });
      return mask.given ? [] : [[length, countPairs(mask, length, length)]]; // a matrix has one length
    } catch { return []; }
  });
}
function exponentOf(rows) {
  const [[n0, p0], [n1, p1]] = rows.slice(-2);
  return p0 && p1 ? Math.log(p1 / p0) / Math.log(n1 / n0) : NaN;
}

function thumbnail(text) {
  const mask = parseMask(text);
  const cells = denseMask(mask, 16, 16);
  return svg("svg", { viewBox: "0 0 16 16", class: "thumbnail", "aria-hidden": "true" }, cells.flatMap((row, r) => row.map((visible, c) => (visible ? svg("rect", { x: c, y: r, width: 0.92, height: 0.92, class: "visible" }) : null))));
}

function why(state, key) {
  const found = compute(state);
  if (!found.mask) return null;
  const first = state.keys - state.queries;
  const runsOf = (r) => visibleRow(found.mask, r, state.queries, state.keys);
  const counted = (r) => runsOf(r).reduce((sum, [start, stop]) => sum + stop - start, 0);
  if (key === "c") return { title: "visible pairs", value: found.pairs, formula: "the sum over the queries of the keys that each one sees", note: state.queries > MOST_ROWS ? `The first ${MOST_ROWS} of ${state.queries} queries:` : null, parts: Array.from({ length: Math.min(MOST_ROWS, state.queries) }, (_, r) => ({ label: `query ${first + r}`, value: counted(r), key: `r.${r}` })) };
  if (key === "g") { const rows = growthOf(state); return rows.length < 2 ? null : { title: "exponent", value: exponentOf(rows), formula: "log(p₂ / p₁) / log(n₂ / n₁) of the last two lengths", parts: rows.slice(-2).flatMap(([length, pairs], k) => [{ label: `n${"₁₂"[k]}`, value: length }, { label: `p${"₁₂"[k]}, visible pairs`, value: pairs }]) }; }
  const [kind, r, c] = key.split(".").map((part, k) => (k ? Number(part) : part));
  if (kind === "r" && r < state.queries) return { title: `keys that query ${first + r} sees`, value: counted(r), formula: "the lengths of the visible runs", parts: runsOf(r).map(([start, stop]) => ({ label: stop - start > 1 ? `keys ${start} to ${stop - 1}` : `key ${start}`, value: stop - start })) };
  if (!(r < state.queries && c < state.keys)) return null;
  const visible = runsOf(r).some(([start, stop]) => c >= start && c < stop);
  return { title: `query at ${first + r}, key at ${c}`, value: visible ? 1 : 0, formula: visible ? "visible" : "hidden",
    note: `Row ${r} of ${state.queries} is position ${first + r}: queries are aligned to the end of the keys.`,
    parts: [{ label: "i, position of the query", value: first + r }, { label: "j, position of the key", value: c }, { label: "i − j", value: first + r - c }, { label: "keys this query sees", value: counted(r), key: `r.${r}` }] };
}

function table(state) {
  const found = compute(state);
  if (!found.mask) return { head: ["error"], rows: [[found.error.message]] };
  const most = Math.min(state.queries, 64);
  const first = state.keys - state.queries;
  const rows = Array.from({ length: most }, (_, r) => {
    const runs = visibleRow(found.mask, r, state.queries, state.keys);
    return [`query ${first + r}`, runs.reduce((sum, [start, stop]) => sum + stop - start, 0), runs.slice(0, 12).map(([start, stop]) => (stop - start > 1 ? `${start}–${stop - 1}` : `${start}`)).join(", ") + (runs.length > 12 ? ", …" : "")];
  });
  return { head: ["query", "visible keys", "which"], rows };
}

function python(state) {
  const names = maskNames(`${state.mask} ${state.against}`);
  const lines = ["import regard", names ? `from regard import ${names}` : "", ...(/\bmy_mask\(|\bother_mask\(/.test(`${state.mask} ${state.against}`) ? ["# my_mask and other_mask return the masks that were given to regard.show"] : []), `mask = ${state.mask}`];
  if (state.painted) {
    lines.push(`cells = mask.dense(${state.queries}, ${state.keys})`, `for i, j in ${JSON.stringify([...paintedCells(state)].map((cell) => cell.split(".").map(Number)))}:  # painted`, "    cells[i, j] = ~cells[i, j]", `mask = regard.Mask.of("painted", lambda i, j: cells[i - ${state.keys - state.queries}, j])`);
  }
  lines.push(`print(mask.count(${state.queries}, ${state.keys}), "visible pairs")`, state.keys <= 64 ? `print(mask.draw(${state.queries}, ${state.keys}))` : "");
  if (state.against) lines.push(`other = ${state.against}`, `print((mask & ~other | ~mask & other).count(${state.queries}, ${state.keys}), "cells differ")`, state.keys <= MOST_COMPARED ? `print((mask.dense(${state.queries}, ${state.keys}) != other.dense(${state.queries}, ${state.keys})).nonzero()[:1])  # the first` : "");
  return `${lines.filter(Boolean).join("\n")}\n`;
}

function maps(state) {
  const found = compute(state);
  if (!found.mask || state.keys > CELLS) return [];
  return [{ title: "visible cells", rows: denseMask(found.mask, state.queries, state.keys).map((row) => row.map(Number)), down: Array.from({ length: state.queries }, (_, r) => String(state.keys - state.queries + r)), across: Array.from({ length: state.keys }, (_, j) => String(j)) }];
}

export const masksView = { title: "Masks", read, write, mount, why, table, maps, python };
