// Models: layers x heads of a trained model, one head, edits with the predictions before and after, flow, generation.

import { BROWSER_MODEL, analyse, prepare, whyNumber } from "./browser_engine.js";
import { asTable, checkbox, colourScale, diverging, field, format, h2, hatch, headRow, help, holdFocus, html, muted, number, script, select, sequential, svg, tbody, tr, warning } from "./dom.js";
import { generator } from "./maths.js";
import { compute, load } from "./remote.js";

const EXAMPLE = "Kx7mQzPvR Kx7mQz"; // from the model card
const SHOWS = [["overview", "Overview"], ["head", "Head"], ["edit", "Edit and rerun"], ["flow", "Flow"], ["generate", "Generate"]];
const SORTS = [["layer", "layer and head"], ["spread", "spread"], ["previous", "previous token"], ["first", "first token"], ["induction", "induction"]];
const KINDS = { ablate: "set to zero", mean: "mean over positions", beta: "β ×", hide: "hide key", patch: "patch from the other text" };
const LABELS = "The number beside a label is the mean weight of the head on that pattern: the first token, the token before, or what followed the same token before (induction). A mixed or uniform head gives no pattern half of its weight. Its number is the spread: the entropy of the weights divided by its maximum, 0 for one key, 1 for equal weights.";
const readHeads = (text) => (text ?? "").split(",").slice(0, 64).map((part) => part.split(".").map((x) => whole(x, 999))).filter((pair) => pair.length === 2 && pair.every((x) => x !== null));

const whole = (text, most) => { const value = Number(text); return text !== null && text !== "" && Number.isInteger(value) && value >= 0 && value <= most ? value : null; };

function readEdits(text) {
  const found = (text ?? "").split(";").slice(0, 64).filter(Boolean).map((part) => {
    const [kind, place, value] = part.split(":");
    const [layer, head] = (place ?? "").split(".");
    const edit = { kind, layer: whole(layer ?? null, 999), head: head === "all" ? null : whole(head ?? null, 999), value: value === undefined ? null : Number(value) };
    const fits = Object.hasOwn(KINDS, kind) && edit.layer !== null && (edit.head !== null || head === "all") && (edit.value === null || Number.isFinite(edit.value)) && (edit.value !== null || (kind !== "beta" && kind !== "hide"));
    return fits ? edit : part;
  });
  return { edits: found.filter((edit) => typeof edit === "object"), unread: found.filter((edit) => typeof edit === "string").join(";").slice(0, 200) };
}
const writeEdits = (edits) => edits.map((edit) => `${edit.kind}:${edit.layer}.${edit.head ?? "all"}${edit.value === null ? "" : `:${edit.value}`}`).join(";");

function read(parameters) {
  const show = parameters.get("show");
  return {
    model: (parameters.get("model") ?? BROWSER_MODEL).slice(0, 400), text: (parameters.get("text") ?? (parameters.has("model") && parameters.get("model") !== BROWSER_MODEL ? "" : EXAMPLE)).slice(0, 1500000), source: (parameters.get("source") ?? "").slice(0, 20000),
    show: SHOWS.some(([name]) => name === show) ? show : "overview", layer: whole(parameters.get("layer"), 999) ?? 0, head: whole(parameters.get("head"), 999) ?? 0,
    ...readEdits(parameters.get("edit")), position: whole(parameters.get("at"), 1 << 20), target: (parameters.get("target") ?? "").slice(0, 60), sort: SORTS.some(([name]) => name === parameters.get("sort")) ? parameters.get("sort") : "layer",
    sinks: parameters.get("sinks") === "1", lines: parameters.get("lines") === "1", row: whole(parameters.get("row"), 1 << 20), brush: readHeads(parameters.get("brush")), seed: whole(parameters.get("seed"), 2 ** 31) ?? 0,
  };
}

function write(state) {
  const parameters = new URLSearchParams({ model: state.model, text: state.text });
  if (state.show !== "overview") parameters.set("show", state.show);
  if (state.layer) parameters.set("layer", String(state.layer));
  if (state.head) parameters.set("head", String(state.head));
  if (state.edits.length || state.unread) parameters.set("edit", [writeEdits(state.edits), state.unread].filter(Boolean).join(";"));
  if (state.source) parameters.set("source", state.source);
  if (state.position !== null) parameters.set("at", String(state.position));
  if (state.target) parameters.set("target", state.target);
  if (state.sort !== "layer") parameters.set("sort", state.sort);
  if (state.sinks) parameters.set("sinks", "1");
  if (state.lines) parameters.set("lines", "1");
  if (state.row !== null) parameters.set("row", String(state.row));
  if (state.brush.length) parameters.set("brush", state.brush.map((head) => head.join(".")).join(","));
  if (state.seed) parameters.set("seed", String(state.seed));
  return parameters;
}

const answers = new WeakMap(); // the last answer of each state, for "why", the table and the export: two states can be shown

// Without the first token: attention sinks make everything else look faint.
const withoutFirst = (rows) => rows.map((row) => { const rest = row.slice(1).reduce((sum, x) => sum + x, 0); return row.map((x, j) => (j === 0 ? 0 : rest > 0 ? x / rest : 0)); });

// A key after the query, in a model that looks at earlier tokens only.
const isHidden = (found, rows, i, j) => found.causal !== false && j > i + (rows[0].length - rows.length);

// Hidden cells stay transparent: the hatching behind the map is seen there.
function paint(found, rows, title) {
  const canvas = html("canvas", { width: rows[0]?.length ?? 1, height: rows.length || 1, class: "map", ...(title ? { role: "img", "aria-label": title } : { "aria-hidden": "true" }) });
  const context = canvas.getContext("2d");
  rows.forEach((row, i) => row.forEach((value, j) => { if (isHidden(found, rows, i, j)) return; context.fillStyle = sequential(value).fill; context.fillRect(j, i, 1, 1); }));
  return canvas;
}

// Make new lines and outer spaces visible.
const visible = (token) => token.replaceAll("\n", "⏎").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));

const isEdited = (state, layer, head) => state.edits.some((edit) => edit.layer === layer && (edit.head === null || edit.head === head));

const isBrushed = (state, layer, head) => state.brush.some(([l, h]) => l === layer && h === head);
const brushed = (state, layer, head, on) => { const rest = state.brush.filter(([l, h]) => l !== layer || h !== head); return on ? [...rest, [layer, head]] : rest; };

function overview(found, state, update) {
  const cells = found.layers.flatMap((layer, l) => layer.heads.map((head, h) => ({ layer: l, head: h, ...head })));
  if (state.sort !== "layer") cells.sort((a, b) => (b.numbers[state.sort] ?? -1) - (a.numbers[state.sort] ?? -1));
  const editing = state.show === "edit";
  const choose = (cell) => (event) => {
    if (editing && event.shiftKey) update({ brush: brushed(state, cell.layer, cell.head, !isBrushed(state, cell.layer, cell.head)) });
    else update({ layer: cell.layer, head: cell.head, row: null, show: editing ? "edit" : "head" });
  };
  // dragging over heads brushes them
  const drag = (cell) => (event) => { if (editing && event.buttons === 1 && !isBrushed(state, cell.layer, cell.head)) { Object.assign(state, { brush: brushed(state, cell.layer, cell.head, true) }); event.currentTarget.classList.add("brushed"); } };
  const classes = (cell) => ["tile", state.layer === cell.layer && state.head === cell.head && "chosen", isEdited(state, cell.layer, cell.head) && "edited", editing && isBrushed(state, cell.layer, cell.head) && "brushed"].filter(Boolean).join(" ");
  const button = (cell) => html("button", { class: classes(cell), "data-head": `${cell.layer}.${cell.head}`,
    "aria-label": `Layer ${cell.layer + 1} head ${cell.head + 1}: ${cell.label} ${format(cell.value)}${editing && isBrushed(state, cell.layer, cell.head) ? ", brushed" : ""}`, onclick: choose(cell), onpointerleave: drag(cell), onpointerenter: drag(cell), onpointerup: (event) => { if (editing && state.brush.length && !event.shiftKey) update({ brush: [...state.brush] }); } },
  paint(found, state.sinks ? withoutFirst(cell.map) : cell.map, ""), html("span", { class: "tile-name" }, `${cell.layer + 1}.${cell.head + 1}`), html("span", { class: "tile-label" }, `${cell.label} ${format(cell.value)}`));
  const table = headTable(found, state);
  return [html("div", { class: "tiles", style: { "--across": String(Math.min(12, state.sort === "layer" ? found.layers[0].heads.length : cells.length)) } }, cells.map(button)), colourScale((x) => sequential(x), 0, 1, `weight; each map is a head, rows are queries, columns keys${found.causal === false ? "" : "; hatched: hidden"}`),
    help(LABELS), asTable("Heads", table.head, table.rows)];
}

const headTable = (found) => ({ head: ["head", "kind", "number", "spread", "previous token", "first token", "induction"],
  rows: found.layers.flatMap((layer, l) => layer.heads.map((head, h) => [`${l + 1}.${h + 1}`, head.label, head.value, head.numbers.spread, head.numbers.previous ?? "", head.numbers.first ?? "", head.numbers.induction ?? ""])) });

function matrixPicture(found, state, rows, title, keyOf) {
  const size = Math.max(16, Math.min(48, Math.floor(400 / rows.length)));
  const long = found.tokens.some((token) => token.length > 2);
  const [left, top] = [58, long ? 62 : 24];
  const hatching = hatch();
  const largest = Math.max(1e-12, ...rows.flat());
  const cells = rows.flatMap((row, i) => row.map((value, j) => {
    const hidden = isHidden(found, rows, i, j);
    return svg("g", { class: "cell", tabindex: i || j ? "-1" : "0", role: "button", "data-row": i, "data-column": j, ...(keyOf && !hidden ? { "data-why": keyOf(i, j) } : {}), "aria-label": `${found.tokens[i]} to ${found.tokens[j]}: ${hidden ? "hidden" : format(value)}` },
      svg("rect", { x: left + j * size, y: top + i * size, width: size - 1, height: size - 1, fill: hidden ? hatching.fill : sequential(value, largest).fill }), svg("title", {}, `${found.tokens[i]} → ${found.tokens[j]}: ${hidden ? "hidden" : format(value)}`));
  }));
  const label = (token) => visible(token.length > 6 ? `${token.slice(0, 5)}…` : token);
  const texts = found.tokens.flatMap((token, k) => [svg("text", { x: left - 6, y: top + k * size + size / 2 + 4, class: "label end" }, label(token)), svg("text", { x: left + k * size + size / 2, y: top - 6, class: long ? "tick start" : "label", transform: long ? `rotate(-60 ${left + k * size + size / 2} ${top - 6})` : null }, label(token))]);
  const [width, height] = [left + rows[0].length * size + 24, top + rows.length * size + 8];
  return html("div", {}, html("h3", {}, title), html("div", { class: "scroll" }, svg("svg", { class: "picture attention", viewBox: `0 0 ${width} ${height}`, style: { "--natural": `${width}px` }, role: "group", "aria-label": title }, hatching.defs, texts, cells)), colourScale((x) => sequential(x, largest), 0, largest, title));
}

function linesPicture(found, rows, title) {
  const largest = Math.max(1e-12, ...rows.flat());
  const step = 26;
  const height = found.tokens.length * step + 20;
  const at = (i) => 20 + i * step;
  const strokes = rows.flatMap((row, i) => row.map((weight, j) => (weight > 0.02 * largest ? svg("line", { x1: 120, y1: at(i), x2: 300, y2: at(j), class: "token-line", "stroke-width": 0.5 + (5 * weight) / largest, opacity: 0.15 + (0.85 * weight) / largest }, svg("title", {}, `${found.tokens[i]} → ${found.tokens[j]}: ${format(weight)}`)) : null)));
  const words = found.tokens.flatMap((token, i) => [svg("text", { x: 112, y: at(i) + 4, class: "label end" }, visible(token.slice(0, 14))), svg("text", { x: 308, y: at(i) + 4, class: "tick start" }, visible(token.slice(0, 14)))]);
  return html("div", {}, html("h3", {}, title), svg("svg", { class: "picture lines", viewBox: `0 0 420 ${height}`, role: "img", "aria-label": `${title}: lines from queries at the left to keys at the right` }, strokes, words), help(`Queries at the left, keys at the right. The thickest line is ${format(largest)}.`));
}

const headMaps = (found, state) => {
  const { weights, contribution, relevance } = found.head;
  return [["Weight", state.sinks ? withoutFirst(weights) : weights], ["Weight × size of the value" + (found.pass ? " after W_o" : ""), contribution], [`Weight × gradient of the logit of “${visible(found.target)}”`, relevance]].filter(([, rows]) => rows);
};

function headView(found, state, update) {
  const { weights } = found.head;
  const own = found.layers[state.layer].heads[state.head];
  const title = h2(`Layer ${state.layer + 1} head ${state.head + 1}: ${own.label} ${format(own.value)}`);
  const table = weightTable(found);
  if (found.head.image) return [title, help("Hover a patch of the picture, or move to it with Tab. The copy beside it shows where the patch looks."), imageHead(found, state), asTable("Weights", table.head, table.rows)];
  if (found.head.pooled) return [title, pooledHead(found, state, update)];
  const keyOf = state.sinks ? null : (i, j) => `weight.${state.layer}.${state.head}.${i}.${j}`;
  const maps = headMaps(found, state);
  const pictures = maps.map(([name, rows], k) => state.lines ? linesPicture(found, rows, name) : matrixPicture(found, state, rows, name, k ? null : keyOf));
  return [title, help("A weight is not a contribution: a token with a large weight and a small value adds little, and what it adds may not reach the prediction. The second map multiplies each weight by the size of what it brings, the third by its effect on the predicted logit (Chefer et al. 2021, positive part)."), html("div", { class: "maps equal" }, pictures),
    asTable(`Weights of layer ${state.layer + 1} head ${state.head + 1}`, table.head, table.rows)];
}

const weightTable = (found) => (found.head.pooled
  ? { head: ["key", `weight of query ${found.head.row + 1}`], rows: found.head.exact.map((weight, j) => [`${j + 1}: ${visible(found.tokens[j] ?? "")}`, weight]) }
  : { head: ["query", ...found.tokens.map(visible)], rows: found.head.weights.map((row, i) => [`${i + 1}: ${visible(found.tokens[i] ?? "")}`, ...row]) });

// Many tokens: a pooled map; a click, or the number field, asks for one exact row.
function pooledHead(found, state, update) {
  const { weights, row, exact } = found.head;
  const count = found.tokens.length;
  const map = paint(found, state.sinks ? withoutFirst(weights) : weights, `Weights of ${count} tokens, pooled`);
  map.addEventListener("click", (event) => update({ row: Math.min(count - 1, Math.floor((event.offsetY / map.clientHeight) * count)) }));
  const shown = exact.map((weight, j) => ({ weight, j })).sort((a, b) => b.weight - a.weight).slice(0, 12);
  const largest = Math.max(1e-12, shown[0].weight);
  const strip = svg("svg", { class: "picture row-strip", viewBox: "0 0 600 60", preserveAspectRatio: "none", role: "img", "aria-label": `Weights of query ${row + 1}` }, svg("path", { class: "strip-line", d: `M${exact.map((weight, j) => `${((j + 0.5) * 600) / count} 60V${(60 - (58 * weight) / largest).toFixed(2)}`).join("M")}` }));
  return html("div", { class: "maps" }, html("div", {}, help(`${count.toLocaleString("en")} tokens, drawn in ${weights.length} × ${weights[0].length} cells. Click a row to see it exactly.`), map, colourScale((x) => sequential(x), 0, 1, "weight in a cell, mean over its queries")),
    html("div", { class: "exact-row" }, field("Exact row of query", html("input", { type: "number", min: "1", max: String(count), value: String(row + 1), onchange: (event) => update({ row: Math.max(0, Math.min(count, Math.trunc(Number(event.target.value)) || 1) - 1) }) })), strip,
      html("table", {}, html("caption", {}, `The largest weights of query ${row + 1}, “${visible(found.tokens[row] ?? "")}”`), tbody(shown.map(({ weight, j }) => tr(`${j + 1}: ${visible(found.tokens[j] ?? "")}`, html("td", {}, number(weight, `weight.${state.layer}.${state.head}.${row}.${j}`, `Weight on key ${j + 1}`))))))));
}

// The picture, and the same under the weights of the patch that is hovered or focused.
function imageHead(found, state) {
  const { rows, columns, address } = found.head.image;
  const extra = found.head.weights[0].length - rows * columns; // the class token
  const size = 40;
  const [width, height] = [columns * size, rows * size];
  const place = (p) => ({ x: (p % columns) * size, y: Math.floor(p / columns) * size, width: size, height: size });
  const shades = Array.from({ length: rows * columns }, (_, p) => svg("rect", { ...place(p), class: "patch" }));
  const mark = svg("rect", { width: size, height: size, class: "patch-mark" });
  const name = html("p", { class: "muted" });
  const scale = html("div");
  const show = (query) => {
    const weights = found.head.weights[query];
    const largest = Math.max(1e-12, ...weights.slice(extra));
    shades.forEach((shade, p) => { shade.setAttribute("opacity", String(0.7 * (weights[p + extra] / largest))); });
    const p = query - extra;
    mark.setAttribute("visibility", p < 0 ? "hidden" : "visible");
    for (const side of ["x", "y"]) mark.setAttribute(side, String(place(Math.max(0, p))[side]));
    name.textContent = `Query: ${p < 0 ? "class token" : `patch in row ${Math.floor(p / columns) + 1}, column ${(p % columns) + 1}`}`;
    scale.replaceChildren(colourScale((x) => ({ fill: `color-mix(in srgb, #d55e00 ${(70 * x) / largest}%, #fff)` }), 0, largest, "weight"));
  };
  const hits = shades.map((_, p) => svg("rect", { ...place(p), class: "patch-hit", tabindex: "0", role: "img", "aria-label": `Patch in row ${Math.floor(p / columns) + 1}, column ${(p % columns) + 1}`, onpointerenter: () => show(p + extra), onfocus: () => show(p + extra) }));
  show(Math.min(state.position ?? 0, found.head.weights.length - 1));
  return html("div", {}, svg("svg", { class: "picture image-head", viewBox: `-2 -2 ${2 * width + 24} ${height + 4}`, role: "group", "aria-label": "The picture, and the attention of one patch over it" }, [0, width + 20].map((x) => svg("image", { x, href: address, width, height, class: "pixels" })), svg("g", { transform: `translate(${width + 20})` }, shades), mark, hits), name, scale);
}

const predictionTable = (found) => {
  const rows = new Map(found.before.map((each) => [each.token, { token: each.token, before: each.probability, after: 0, id: each.id, logit: each.logit }]));
  for (const each of found.after) rows.set(each.token, { before: 0, ...rows.get(each.token), token: each.token, after: each.probability, id: each.id, logit: each.logit });
  return [...rows.values()].sort((a, b) => Math.max(b.after, b.before) - Math.max(a.after, a.before)).slice(0, 10);
};

function predictionsView(found, state) {
  if (!found.after.length) return null;
  const rows = predictionTable(found);
  const largest = Math.max(1e-12, ...rows.map((row) => Math.abs(row.after - row.before)));
  const edits = state.edits.length > 0;
  return html("div", { class: "scroll" }, html("table", { class: "compare predictions" }, html("caption", {}, found.image ? "What the picture shows" : `${found.causal === false ? "Token at" : "Next token after"} “${visible(found.tokens[found.position] ?? "")}”`), headRow([found.image ? "class" : "token", ...(edits ? ["probability before", "probability after", "change", "logit after"] : ["probability", "logit"])]),
    tbody(rows.map((row) => { const colour = diverging(row.after - row.before, largest); return tr(html("code", {}, visible(row.token)), html("td", {}, format(row.before)), edits ? [html("td", {}, format(row.after)), html("td", { style: { background: colour.fill, color: colour.text } }, format(row.after - row.before))] : null, html("td", {}, number(row.logit, `logit.${row.id}`, `Logit of ${row.token}`))); }))));
}

function editView(found, state, update) {
  const has = (kind) => state.edits.find((edit) => edit.kind === kind && edit.layer === state.layer && edit.head === state.head);
  const without = (edit) => state.edits.filter((each) => each !== edit);
  const set = (kind, value, neutral) => { const rest = without(has(kind)); update({ edits: value === neutral ? rest : [...rest, { kind, layer: state.layer, head: state.head, value }] }); };
  const toggle = (kind) => set(kind, null, has(kind) && null);
  const name = `layer ${state.layer + 1} head ${state.head + 1}`;
  const patch = checkbox("patch its output from the other text", Boolean(has("patch")), () => toggle("patch"));
  patch.firstChild.disabled = !state.source;
  const controls = html("fieldset", {}, html("legend", {}, `Edit ${name}`),
    checkbox("set its output to zero", Boolean(has("ablate")), () => toggle("ablate")), checkbox("replace its output by the mean over positions", Boolean(has("mean")), () => toggle("mean")),
    field(`β × ${format(has("beta")?.value ?? 1)}`, html("input", { type: "range", min: "-2", max: "2", step: "0.05", value: String(Math.log10(Math.max(0.01, has("beta")?.value ?? 1))), onchange: (event) => set("beta", Number((10 ** Number(event.target.value)).toPrecision(3)), 1) })),
    field("Hide one key", select([["", "none"], ...found.tokens.map((token, j) => [String(j), `${j + 1}: ${visible(token)}`])], String(has("hide")?.value ?? ""), (value) => set("hide", value === "" ? null : Number(value), null))),
    field("Other text, to patch from", html("input", { type: "text", value: state.source, spellcheck: false, onchange: (event) => update({ source: event.target.value }) }), "The head's output is taken from this text, position by position."),
    patch);
  const list = html("ul", { class: "edits" }, state.edits.map((edit) => html("li", {}, `${edit.layer + 1}.${edit.head === null ? "all" : edit.head + 1}: ${KINDS[edit.kind]}${edit.value === null ? "" : ` ${format(edit.kind === "hide" ? edit.value + 1 : edit.value)}`} `, html("button", { "aria-label": "Undo this edit", onclick: () => update({ edits: without(edit) }) }, "undo"))));
  const together = state.brush.length ? html("div", { class: "actions brush" }, html("span", {}, `${state.brush.length} brushed: ${state.brush.map(([l, h]) => `${l + 1}.${h + 1}`).join(", ")}`), html("button", { onclick: () => update({ edits: [...state.edits.filter((edit) => edit.kind !== "ablate" || !isBrushed(state, edit.layer, edit.head)), ...state.brush.map(([layer, head]) => ({ kind: "ablate", layer, head, value: null }))], brush: [] }) }, "Set them to zero"), html("button", { onclick: () => update({ brush: [] }) }, "Clear")) : help("Drag over several heads, or use Shift and a click, to brush them and compare their effects.");
  return [html("div", { class: "split edit-split" }, html("div", {}, overview(found, state, update).slice(0, 2), together, predictionsView(found, state), ablationsView(found, state, update)), html("div", { class: "side" }, controls, state.edits.length ? [h2("Edits"), list, html("button", { onclick: () => update({ edits: [] }) }, "Undo all")] : muted("No edits yet. Choose a head in the grid."), h2("The same in Python"), script(python(state))))];
}

function bars(rows, title, choose) {
  const largest = Math.max(1e-12, ...rows.map((row) => Math.abs(row.value)));
  return html("div", { class: "signed-bars", role: "group", "aria-label": title }, rows.map((row) => html("div", { class: "signed-bar" }, choose && row.layer !== undefined ? html("button", { class: "link", onclick: () => choose(row) }, row.name) : html("span", {}, row.name),
    html("span", { class: "signed-track" }, html("span", { class: `signed-fill ${row.value < 0 ? "negative" : ""}`, style: { width: `${(50 * Math.abs(row.value)) / largest}%` } })), row.key ? number(row.value, row.key, row.name) : html("span", { class: "tabular" }, format(row.value)))));
}

const ablationRows = (found) => found.ablations().map((each, at) => ({ ...each, key: `ablation.${at}`, name: each.heads > 1 ? `all ${each.heads} together` : `layer ${each.layer + 1} head ${each.head + 1}`, value: each.change })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));

function ablationsView(found, state, update) {
  if (!found.ablations) return help("This model has many heads: brush some of them to see the effect of each.");
  const rows = ablationRows(found);
  const table = { head: ["head set to zero", `change of the logit of ${found.target}`], rows: rows.map((row) => [row.name, row.value]) };
  return [h2(`Each head alone set to zero${state.edits.length ? ", besides the edits" : ""}: change of the logit of “${visible(found.target)}”`), bars(rows, "Change of the logit by head", (row) => update({ layer: row.layer, head: row.head })), asTable("Change of the logit", table.head, table.rows)];
}

function flowView(found, state, update) {
  const lens = found.lens();
  const parts = found.attribution();
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const rows = parts.map((part) => ({ ...part, key: part.layer === undefined ? null : `head.${part.layer}.${part.head}.${found.targetId}` }));
  return [h2("Logit lens: what each layer would predict"), html("div", { class: "scroll" }, html("table", { class: "lens" }, headRow(["read", "1st", "2nd", "3rd", "4th"]), tbody(lens.map((row, l) => tr(row.name, row.top.map((each, k) => { const colour = sequential(each.probability); return html("td", { style: { background: colour.fill, color: colour.text } }, html("code", {}, visible(each.token)), " ", number(each.probability, `lens.${l}.${k}`, `Probability of ${each.token}, ${row.name}`)); })))))),
    colourScale((x) => sequential(x), 0, 1, "probability"),
    h2(`Which part raises the logit of “${visible(found.target)}”`), html("div", { class: "flow-field" }, field(found.image ? "Class" : "Token", select(found.before.map((each) => [each.token, visible(each.token)]), found.target, (target) => update({ target })))), bars(rows, "Direct logit attribution", (row) => update({ layer: row.layer, head: row.head, show: "head" })), help("The parts sum to the logit, ", number(total, `logit.${found.targetId}`, `Logit of ${found.target}`), "."),
    asTable("Parts of the logit", ["part", "value"], parts.map((part) => [part.name, part.value]))];
}

function generateView(found, state, update) {
  const append = (token) => update({ text: state.text + token, position: null, seed: state.seed + 1 });
  const top = found.after.slice(0, 8);
  const draw = () => { let left = generator(state.seed + 1).uniform() * top.reduce((sum, each) => sum + each.probability, 0); return top.find((each) => (left -= each.probability) <= 0) ?? top[0]; };
  const last = found.tokens.at(-1);
  return [html("p", { class: "generated" }, html("code", {}, state.text), html("span", { class: "cursor" }, "▏")), predictionsView(found, state), html("div", { class: "actions" }, html("button", { onclick: () => append(found.after[0].token) }, `Append “${visible(found.after[0].token)}”, the most likely`), html("button", { onclick: () => append(draw().token) }, `Draw one of the ${top.length} likeliest`), html("button", { disabled: found.tokens.length < 2 || !state.text.endsWith(last), onclick: () => update({ text: state.text.slice(0, -last.length), position: null }) }, "Remove the last token")),
    help(`A draw takes each token in proportion to its probability. The cache holds keys and values of ${found.tokens.length} tokens: ${found.cacheBytes.toLocaleString("en")} bytes.`)];
}

const DRAW = { overview: (found, state, update) => html("div", { class: "model-overview" }, html("div", {}, overview(found, state, update)), predictionsView(found, state)), head: headView, edit: editView, flow: flowView, generate: generateView };

function mount(element, state, update, data) {
  const bar = html("div", { class: "model-bar" });
  const tabs = html("div", { class: "tabs", role: "tablist" });
  const body = html("div", { "aria-live": "off" }, muted("Loading the model …"));
  element.append(bar, tabs, body);
  let before = null;
  let asking = null;
  let waiting = 0;
  let held = null; // gives the focus back when Python has answered
  let names = [{ name: BROWSER_MODEL, what: "runs in this page" }];
  let listed = !data.api && !Object.hasOwn(data, "models");
  if (!listed) load(data, "models").then((found) => { names = found; if (!state.text) state.text = names.find((each) => each.name === state.model)?.example ?? ""; }, () => {}).finally(() => { listed = true; drawBar(); draw(true); });
  const upload = html("input", { type: "file", accept: "image/*", onchange: (event) => {
    const reader = new FileReader();
    reader.onload = () => update({ text: reader.result, position: null });
    if (event.target.files[0]) reader.readAsDataURL(event.target.files[0]);
  } });
  const takesImage = () => /\.(png|jpg|wav)$/.test(names.find((each) => each.name === state.model)?.example ?? "") || state.text.startsWith("data:");
  const input = html("input", { type: "text", value: state.text, spellcheck: false, maxlength: 20000, oninput: (event) => update({ text: event.target.value, position: null }) });

  const typing = () => document.activeElement === input;

  function drawBar() {
    if (!typing()) input.value = state.text;
    const giveBack = holdFocus(bar);
    bar.replaceChildren(field("Model", select(names.map(({ name }) => [name, name]), state.model, (model) => { update({ model, edits: [], unread: "", layer: 0, head: 0, text: names.find((each) => each.name === model)?.example ?? EXAMPLE, position: null, target: "", row: null, brush: [] }); drawBar(); }), names.find((each) => each.name === state.model)?.what), data.tabs ? "" : takesImage() ? field("Picture", upload) : field("Text", input),
      field("Sort heads by", select(SORTS, state.sort, (sort) => update({ sort }))), checkbox("Hide the first token and renormalise (S)", state.sinks, (sinks) => update({ sinks })), checkbox("Lines instead of a matrix (L)", state.lines, (lines) => update({ lines })));
    giveBack();
  }
  drawBar();

  function show(found) {
    answers.set(state, found);
    const giveBack = held ?? holdFocus(element);
    held = null;
    update({}); // the comparison and the inspector follow
    if (document.activeElement !== input) input.value = state.text;
    // an encoder, such as a Vision Transformer, has no next token
    tabs.replaceChildren(...SHOWS.filter(([name]) => (!data.tabs || data.tabs.includes(name)) && (name !== "generate" || found.causal !== false)).map(([name, label]) => html("button", { role: "tab", "aria-selected": String(state.show === name), onclick: () => update({ show: name }) }, label)));
    body.replaceChildren(...[DRAW[state.show === "generate" && found.causal === false ? "overview" : state.show](found, state, update)].flat(Infinity).filter((part) => part !== null && part !== undefined));
    giveBack();
  }
  const fail = (error) => { answers.delete(state); body.replaceChildren(warning(error.message), state.edits.length || state.brush.length || state.unread ? html("button", { onclick: () => update({ edits: [], brush: [], unread: "" }) }, "Undo all edits") : ""); };

  function draw(force = false) {
    const now = write(state).toString();
    if (now === before && !force) return;
    before = now;
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    clearTimeout(waiting);
    if (state.unread) fail(new Error(`This edit in the address cannot be read: ${state.unread}. Write for instance edit=ablate:1.0, for layer 2 head 1; the kinds are ${Object.keys(KINDS).join(", ")}, and beta and hide need a number, as in beta:1.0:2.`));
    else if (state.model === BROWSER_MODEL) prepare(data).then(() => { if (!signal.aborted) show(analyse(state)); }).catch(fail);
    else if (Object.hasOwn(data.stored ?? {}, storedKey(state))) show(fromServer(data.stored[storedKey(state)]));
    else if (!data.api) fail(new Error(`This needs Python. Start it with: regard explore ${state.model}`));
    else if (listed) waiting = setTimeout(() => askServer(signal), typing() ? 500 : 0); // not for every letter that is typed
  }

  function askServer(signal) {
    const note = muted("Computing …");
    held ??= holdFocus(element);
    body.replaceChildren(note, html("button", { onclick: () => asking.abort() }, "Cancel"));
    compute("model", requestOf(state), ({ text: progress }) => { note.textContent = progress; }, signal)
      .then((answer) => { if (!signal.aborted) show(fromServer(answer)); })
      .catch((error) => { if (asking.signal !== signal) return; if (error.name === "AbortError") body.replaceChildren(muted("Cancelled."), html("button", { onclick: () => draw(true) }, "Compute again")); else fail(error); });
  }
  draw.stop = () => { clearTimeout(waiting); asking?.abort(); };
  return draw;
}

const requestOf = ({ model, text, show, layer, head, edits, source, position, target, row, brush }) => ({ model, text, show, layer, head, edits, source, position, target, row, brush });

// Results that an exported page holds are those of states without edits.
const storedKey = (state) => (state.edits.length || state.brush.length || state.position !== null || state.target || state.row !== null ? "" : [state.model, state.text, state.show, ...(state.show === "head" ? [state.layer, state.head] : [])].join("|"));

const fromServer = (answer) => ({ ...answer, asked: new Map(), lens: () => answer.lens, attribution: () => answer.attribution, ablations: answer.ablations ? () => answer.ablations : null });

// Why a number: computed here, or asked from Python once and shown when it has come.
function why(state, key, update, data) {
  const found = answers.get(state);
  if (!found) return null;
  const [kind, row, place] = key.split(".");
  if (kind === "ablation") return whyAblation(found, Number(row));
  if (kind === "lens") return whyLens(found, Number(row), Number(place));
  if (found.pass) return whyNumber(found, key);
  if (!found.asked.has(key)) {
    found.asked.set(key, { title: "this number", value: null, formula: data.api ? "Computing …" : `This needs Python. Start it with: regard explore ${state.model}`, parts: null });
    const keep = (answer) => { found.asked.set(key, answer); update({}); };
    if (data.api) compute("model", { ...requestOf(state), show: "why", why: key }, () => {}, null).then(keep, (error) => keep({ title: "this number", value: null, formula: error.message, parts: null }));
  }
  return found.asked.get(key);
}

// What a head does to the logit: the logit without it, minus the logit with it.
function whyAblation(found, at) {
  const each = found.ablations?.()[at];
  if (!each) return null;
  const name = each.heads > 1 ? `${each.heads} heads` : `layer ${each.layer + 1} head ${each.head + 1}`;
  const now = found.after.find(({ token }) => token === found.target);
  return { title: `change by ${name}`, value: each.change, formula: `logit of ${visible(found.target)} with the output of ${name} set to zero, minus the logit as it is`,
    parts: now ? [{ label: "set to zero", value: now.logit + each.change }, { label: "− as it is", value: now.logit, key: `logit.${now.id}` }] : null };
}

// A probability of the logit lens: a layer's residual stream through the final norm and the output layer.
function whyLens(found, at, place) {
  const each = found.lens?.()?.[at]?.top[place];
  if (!each) return null;
  return { title: `probability of ${visible(each.token)}`, value: each.probability, formula: "exp(logit) / Σ exp(logits)", note: "The residual stream at this layer goes through the final norm and the output layer, as if no layer followed.",
    parts: [{ label: "logit", value: each.logit }, { label: "log Σ exp(logits)", value: each.logit - Math.log(each.probability) }] };
}

function table(state) {
  const found = answers.get(state);
  if (!found) return { head: ["token"], rows: [] };
  if (state.show === "overview") return headTable(found);
  if (state.show === "head" && found.head) return weightTable(found);
  if (state.show === "flow") return { head: ["part", `logit of ${found.target}`], rows: found.attribution().map((part) => [part.name, part.value]) };
  return { head: ["token", "probability before", "probability after"], rows: predictionTable(found).map((row) => [row.token, row.before, row.after]) };
}

function maps(state) {
  const found = answers.get(state);
  if (!found) return [];
  if (state.show === "head" && found.head && !found.head.image) return headMaps(found, state).map(([title, rows]) => ({ title, rows, down: found.tokens, across: found.tokens, isHidden: (i, j) => isHidden(found, rows, i, j) }));
  return found.layers.flatMap((layer, l) => layer.heads.map((head, h) => ({ title: `${l + 1}.${h + 1}`, rows: head.map, small: true, isHidden: (i, j) => isHidden(found, head.map, i, j) })));
}

const text = (value) => JSON.stringify(value);

function python(state) {
  const calls = { ablate: () => 'how="zero"', mean: () => 'how="mean"', beta: (edit) => `factor=${edit.value}`, hide: (edit) => `keys=[${edit.value}]`, patch: () => "source=other" };
  const verbs = { ablate: "ablate", mean: "ablate", beta: "scale_beta", hide: "hide", patch: "patch" };
  const latest = answers.get(state);
  const own = state.model === BROWSER_MODEL || !latest?.setup;
  const lines = own ? ["import torch", "import regard", "from regard.data.tokenizers import load_tokenizer", "from regard.models.saving import pretrained_folder", "", `model = regard.load(${text(state.model)})`, `words = load_tokenizer(pretrained_folder(${text(state.model)}))`, `tokens = torch.tensor([words.encode(${text(state.text)})])`] : latest.setup.split("\n");
  const call = own ? "model(tokens)" : latest.call;
  const name = own ? "tokens" : /^(\w+) = torch\.tensor\(\[words\.encode/m.exec(latest.setup)?.[1];
  if (name && state.edits.some((edit) => edit.kind === "patch")) lines.push(`first, ${name} = ${name}, torch.tensor([words.encode(${text(state.source)})])`, "with torch.no_grad(), regard.watch(model) as other:", `    ${call}`, `${name} = first`);
  const edits = state.edits.map((edit) => `    edit.${verbs[edit.kind]}(${edit.layer}, ${edit.head === null ? "" : `heads=[${edit.head}], `}${calls[edit.kind](edit)})`);
  lines.push("with torch.no_grad(), regard.watch(model) as seen:", `    before = ${call}`, `print(seen.table(${name ?? ""}))`);
  const last = state.edits.length ? "after" : "before";
  if (state.edits.length) lines.push("with torch.no_grad(), regard.intervene(model) as edit, regard.watch(model) as seen:", ...edits, `    after = ${call}`);
  if (latest?.after.length) {
    // the numbers of the page: the probabilities of the outputs that are likely before or after
    const row = (result) => `${own ? result : `getattr(${result}, "logits", ${result})`}[${latest.image ? "0" : `0, ${latest.position}`}].softmax(-1)`;
    lines.push(state.edits.length ? `old, new = ${row("before")}, ${row("after")}` : `old = new = ${row(last)}`, "for token in torch.maximum(old, new).topk(8).indices.tolist():", `    print(${name ? "repr(words.decode([token]))" : "token"}, f"{old[token]:.3f}"${state.edits.length ? ', f"{new[token]:.3f}"' : ""})`);
  }
  if (state.show === "head") lines.push(`print(seen.records[${state.layer}].weights()[0, ${state.head}])`);
  if (state.show === "flow" && latest?.targetId !== undefined) {
    const flow = `flow = regard.see.direct_logit_attribution(model, lambda: ${call}, ${latest.targetId}, position=${latest.image ? -1 : latest.position})`;
    const lens = `print(regard.see.logit_lens(model, lambda: ${call}, progress=False)[:, 0${latest.image ? "" : `, ${latest.position}`}].softmax(-1).topk(4))`;
    lines.push(...(edits.length ? ["with regard.intervene(model) as edit:", ...edits, `    ${flow}`, `    ${lens}`] : [flow, lens]), "for part, value in zip(flow.parts, flow.values[0].tolist()):", '    print(part, f"{value:.3f}")');
  }
  return `${lines.join("\n")}\n`;
}

const keys = { s: ["hide the first token and renormalise (attention sinks)", (state) => ({ sinks: !state.sinks })], l: ["lines instead of a matrix", (state) => ({ lines: !state.lines })] };

export const modelsView = { title: "Models", read, write, mount, why, table, maps, python, keys };
