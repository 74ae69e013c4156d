// Attention: Q, K, V as tables -> scores -> mask -> softmax -> weights -> output.

import { asTable, betaSlider, checkbox, colourScale, diverging, field, format, formatShort, hatch, help, html, select, sequential, svg, warning } from "./dom.js";
import { MaskError, denseMask, maskNames, parseMask } from "./mask_expression.js";
import { ask } from "./remote.js";
import { add, alibiBias, alibiSlopes, attend, dot, rotary, sinusoidal, t5Bucket, transpose } from "./maths.js";

const MOST = 12; // tokens
const WIDEST = 8;
const CELL = { width: 52, height: 30 };
const T5_BUCKETS = 8;
const T5_REACH = 16;
const SHAW_REACH = 2;

// The worked example `regard work three-tokens`.
const BASE = {
  tokens: ["1", "2", "3"], q: [[1, 3], [-1, 1], [2.5, -2]], k: [[3, -0.5], [2, -1.5], [-2.5, 3.5]], v: [[2.5, -1.5], [-1, 3], [-2, -3]],
  beta: 1, mask: "full()", positions: "none", heads: 1, head: 0, columns: false,
};
const POSITIONS = [["none", "none"], ["sinusoidal", "sinusoidal, added to q and k"], ["rotary", "rotary"], ["alibi", "ALiBi"], ["t5", "T5 buckets"], ["shaw", "Shaw's relative keys"]];

const rowsOf = (matrix) => matrix.map((row) => row.map((x) => Number(x.toPrecision(6))).join(",")).join(";");

function readMatrix(text, fallback, columns = null) {
  if (!text) return structuredClone(fallback);
  const rows = text.split(";").slice(0, MOST).map((row) => row.split(",").slice(0, WIDEST).map(Number));
  const width = columns ?? rows[0].length;
  const fits = rows.every((row) => row.length === width && row.every((x) => Number.isFinite(x) && Math.abs(x) < 1e6));
  return fits && width > 0 ? rows : structuredClone(fallback);
}

function read(parameters) {
  const q = readMatrix(parameters.get("q"), BASE.q);
  let k = readMatrix(parameters.get("k"), BASE.k, q[0].length);
  // queries are the last tokens, so there are as many keys or more
  if (k[0].length !== q[0].length || k.length < q.length) k = structuredClone(q);
  let v = readMatrix(parameters.get("v"), BASE.v);
  if (v.length !== k.length) v = k.map((row) => row.slice());
  const given = parameters.get("b");
  const beta = given === "inf" ? Infinity : given === null || Number.isNaN(Number(given)) ? BASE.beta : Math.max(0, Number(given));
  const wanted = Number(parameters.get("heads") ?? 1);
  const heads = headCounts(q, v).includes(wanted) ? wanted : 1;
  const tokens = parameters.get("t")?.split("\u001f").slice(0, MOST).map((token) => token.slice(0, 24)) ?? [];
  return {
    q, k, v, beta, heads, tokens: k.map((_, j) => tokens[j] ?? String(j + 1)), mask: (parameters.get("mask") ?? BASE.mask).slice(0, 500),
    positions: POSITIONS.some(([name]) => name === parameters.get("pos")) ? parameters.get("pos") : "none",
    head: Math.min(heads - 1, Math.max(0, Math.trunc(Number(parameters.get("head")) || 0))), columns: parameters.get("columns") === "1",
  };
}

function write(state) {
  const parameters = new URLSearchParams({ q: rowsOf(state.q), k: rowsOf(state.k), v: rowsOf(state.v), b: state.beta === Infinity ? "inf" : String(state.beta) });
  if (state.mask !== "full()") parameters.set("mask", state.mask);
  if (state.positions !== "none") parameters.set("pos", state.positions);
  if (state.heads > 1) { parameters.set("heads", String(state.heads)); parameters.set("head", String(state.head)); }
  if (state.columns) parameters.set("columns", "1");
  if (state.tokens.some((token, j) => token !== String(j + 1))) parameters.set("t", state.tokens.join("\u001f"));
  return parameters;
}

const headCounts = (q, v) => Array.from({ length: WIDEST }, (_, h) => h + 1).filter((h) => q[0].length % h === 0 && v[0].length % h === 0);

// Queries are the last rows of the keys, so that query r is at position keys - queries + r.
const queryPositions = (state) => state.q.map((_, r) => state.k.length - state.q.length + r);
const slice = (matrix, heads, h) => { const width = matrix[0].length / heads; return matrix.map((row) => row.slice(h * width, (h + 1) * width)); };
const shawKeys = (width) => sinusoidal(2 * SHAW_REACH + 1, width + (width % 2)).map((row) => row.slice(0, width));
const t5Table = () => Array.from({ length: T5_BUCKETS }, (_, bucket) => -0.5 * (bucket % (T5_BUCKETS / 2)));

const queryTokens = (state) => queryPositions(state).map((i) => state.tokens[i]);

// Every matrix of the chosen head, or the reason why there are none.
export function compute(state) {
  let mask;
  try {
    mask = parseMask(state.mask);
    if (mask.covered < state.k.length) throw new MaskError(`the mask has data for ${mask.covered} positions, but there are ${state.k.length}`, 0, state.mask.length);
  } catch (error) {
    if (!(error instanceof MaskError)) throw error;
    return { error };
  }
  const [rows, keys] = [queryPositions(state), state.k.map((_, j) => j)];
  const width = state.q[0].length / state.heads;
  if (state.positions === "rotary" && width % 2) return { error: new MaskError(`rotary positions turn pairs, so a head needs an even width, not ${width}`, 0, 0) };
  if (state.positions === "sinusoidal" && state.q[0].length % 2) return { error: new MaskError(`sinusoidal positions need an even width, not ${state.q[0].length}`, 0, 0) };
  const visible = denseMask(mask, state.q.length, state.k.length);
  let [q, k] = [state.q, state.k];
  if (state.positions === "sinusoidal") {
    const table = sinusoidal(state.k.length, state.q[0].length);
    q = q.map((row, r) => add(row, table[rows[r]]));
    k = k.map((row, j) => add(row, table[j]));
  }
  const heads = Array.from({ length: state.heads }, (_, h) => {
    let [own, key] = [slice(q, state.heads, h), slice(k, state.heads, h)];
    if (state.positions === "rotary") { own = rotary(own, rows); key = rotary(key, keys); }
    let bias = null;
    if (state.positions === "alibi") bias = alibiBias(rows, keys, alibiSlopes(state.heads)[h]);
    if (state.positions === "t5") bias = rows.map((i) => keys.map((j) => t5Table()[t5Bucket(j - i, T5_BUCKETS, T5_REACH)]));
    if (state.positions === "shaw") {
      const relative = shawKeys(width);
      const distance = (i, j) => Math.max(-SHAW_REACH, Math.min(SHAW_REACH, j - i)) + SHAW_REACH;
      bias = rows.map((i, r) => keys.map((j) => (Number.isFinite(state.beta) ? state.beta : 1) * dot(own[r], relative[distance(i, j)])));
    }
    const v = slice(state.v, state.heads, h);
    return { q: own, k: key, v, bias, ...attend(own, key, v, { beta: state.beta, visible, bias }) };
  });
  const scores = heads.map((head) => head.products.map((row, i) => row.map((x, j) => (Number.isFinite(state.beta) ? state.beta * x : x) + (head.bias ? head.bias[i][j] : 0))));
  const output = state.q.map((_, i) => heads.flatMap((head) => head.output[i]));
  return { heads, scores, visible, output, head: heads[state.head], score: scores[state.head] };
}

// One matrix as SVG cells; `transposed` is the column convention.
function matrix({ title, rows, colour, key, hidden = null, rowLabels, columnLabels, transposed = false, hatching }) {
  const shown = transposed ? transpose(rows) : rows;
  const [down, across] = transposed ? [columnLabels, rowLabels] : [rowLabels, columnLabels];
  const left = 30;
  const top = 44;
  const cells = shown.flatMap((row, r) => row.map((value, c) => {
    const [i, j] = transposed ? [c, r] : [r, c];
    const isHidden = hidden && !hidden[i][j];
    const paint = isHidden ? { fill: hatching, text: "currentColor" } : colour(value);
    const place = { x: left + c * CELL.width, y: top + r * CELL.height };
    return svg("g", { class: "cell", "data-why": `${key}.${i}.${j}`, tabindex: r || c ? "-1" : "0", role: "button", "aria-label": `${title}, row ${r + 1}, column ${c + 1}: ${isHidden ? "hidden" : format(value)}. Why this number?`, "data-row": r, "data-column": c },
      svg("rect", { ...place, width: CELL.width - 2, height: CELL.height - 2, fill: paint.fill }),
      svg("text", { x: place.x + CELL.width / 2 - 1, y: place.y + CELL.height / 2 + 3, style: { fill: paint.text }, class: isHidden ? "hidden-value" : "" }, isHidden ? "hidden" : formatShort(value)));
  }));
  const labels = [...down.map((label, r) => svg("text", { x: left - 6, y: top + r * CELL.height + CELL.height / 2 + 3, class: "label end" }, label.slice(0, 5))),
    ...across.map((label, c) => svg("text", { x: left + c * CELL.width + CELL.width / 2 - 1, y: top - 6, class: "label" }, label.slice(0, 7)))];
  return { width: left + shown[0].length * CELL.width, height: top + shown.length * CELL.height, element: svg("g", { class: "matrix", "data-matrix": key }, svg("text", { x: left, y: 14, class: "title" }, title), labels, cells) };
}

function lay(row, y) {
  let x = 0;
  const height = Math.max(...row.filter((part) => typeof part !== "string").map((part) => part.height));
  const placed = row.map((part) => {
    if (typeof part === "string") {
      const sign = svg("text", { x: x + 22, y: y + height / 2 + 20, class: "sign" }, part);
      x += 44;
      return sign;
    }
    part.element.setAttribute("transform", `translate(${x},${y})`);
    x += part.width;
    return part.element;
  });
  return { placed, width: x, height };
}

function mount(element, state, update, data) {
  const picture = svg("svg", { class: "picture attention", role: "group", "aria-label": "Attention as connected matrices" });
  const message = warning();
  const scales = html("div", { class: "scales" });
  const tables = html("div");
  const side = html("div", { class: "side" });
  const scrolled = html("div", { class: "scroll" }, picture);
  const editors = html("div", { class: "editors" });
  const hint = html("p", { class: "help", hidden: true }, "Scroll the matrices sideways to see the rest.");
  element.append(html("div", { class: "attention-split split" }, html("div", { class: "canvas" }, message, scrolled, hint, scales, editors, tables), side));
  const slider = betaSlider(state.beta, (beta) => update({ beta }));
  const usual = () => Number(((state.q[0].length / state.heads) ** -0.5).toPrecision(6));
  const maskInput = html("input", { type: "text", value: state.mask, spellcheck: "false", autocomplete: "off", oninput: (event) => update({ mask: event.target.value }) });
  const choices = html("div");
  side.append(field("Inverse temperature β", slider.input, "0 is the mean of what is visible, ∞ hard attention; 1/√c is usual."), html("div", { class: "beta" }, slider.output, html("button", { onclick: () => update({ beta: usual() }) }, "Use 1/√c")),
    field("Mask", maskInput, "for instance causal(), window(before=1), causal() & ~window()"), choices);

  // the worked solution and the check of a student's numbers are those of `regard work`
  const worked = html("details", { class: "worked" });
  const stepSelect = select([["weights", "weights A"], ["scores", "scores"], ["result", "output H"]], "weights", () => {});
  const answerInput = html("input", { type: "text", placeholder: "0.5,0.5;1,0", spellcheck: "false", autocomplete: "off" });
  const workedText = html("pre", { class: "script", tabindex: "0" });
  const review = html("p", { role: "status" });
  const askWork = async (answer) => {
    const [q, k, v] = [state.q, state.k, state.v].map(rowsOf);
    const { mask, beta, heads } = state;
    const stored = answer ? null : data.stored?.[`work|${JSON.stringify([q, k, v, mask, beta, heads])}`];
    if (stored) { workedText.textContent = stored.text; return; }
    if (!data.api) { workedText.textContent = beta === 1 || beta === usual() ? `regard work --q="${q}" --k="${k}" --v="${v}" --mask="${mask}" --heads=${heads} ${beta === 1 ? "--unscaled" : "--scaled"}` : "A worked solution has β = 1 or 1/√c."; return; }
    try {
      const found = await ask("/api/work", { q, k, v, mask, beta: Number.isFinite(beta) ? Math.max(1e-6, beta) : 1e6, heads, step: stepSelect.value, answer });
      workedText.textContent = found.text;
      review.textContent = found.review;
    } catch (error) { review.textContent = error.message; }
  };
  worked.append(html("summary", {}, "As worked solution"), help("Every step on paper, as regard work writes it. Positions other than none are not worked out."), html("button", { onclick: () => askWork("") }, "Work it out"),
    html("div", { class: "row" }, field("Check mine", stepSelect), field("My numbers", answerInput, "Rows are separated by semicolons.")), html("button", { onclick: () => askWork(answerInput.value) }, "Check"), review, workedText);
  tables.before(worked);

  function editor(name, label) {
    const rows = state[name];
    const change = (r, c) => (event) => {
      const value = Number(event.target.value.replace(",", "."));
      const valid = event.target.value.trim() !== "" && Number.isFinite(value) && Math.abs(value) < 1e6;
      event.target.setAttribute("aria-invalid", String(!valid));
      if (valid) update({ [name]: rows.map((row, i) => (i === r ? row.map((x, j) => (j === c ? value : x)) : row)) });
    };
    return html("fieldset", {}, html("legend", {}, label), html("div", { class: "grid-input", style: { "--columns": String(rows[0].length) } },
      rows.flatMap((row, r) => row.map((x, c) => html("input", { type: "text", inputmode: "decimal", value: String(x), "aria-label": `${label}, row ${r + 1}, column ${c + 1}`, onchange: change(r, c) })))));
  }

  function resize(tokens, width) {
    const fit = (matrix, rows, columns) => Array.from({ length: rows }, (_, r) => Array.from({ length: columns }, (_, c) => matrix[r]?.[c] ?? [1, 0, -1, 0.5][(r + c) % 4]));
    const q = fit(state.q, tokens, width);
    const v = fit(state.v, tokens, width);
    update({ q, k: fit(state.k, tokens, width), v, heads: headCounts(q, v).includes(state.heads) ? state.heads : 1, head: 0, tokens: q.map((_, j) => state.tokens[j] ?? String(j + 1)) });
  }

  function drawChoices() {
    const counts = (most) => Array.from({ length: most }, (_, k) => [String(k + 1), String(k + 1)]);
    choices.replaceChildren(
      html("div", { class: "seldom" }, field("Tokens", select(counts(MOST), String(state.k.length), (value) => resize(Number(value), state.q[0].length)))),
      html("div", { class: "seldom" }, field("Width", select(counts(WIDEST), String(state.q[0].length), (value) => resize(state.k.length, Number(value))))),
      field("Positions", select(POSITIONS, state.positions, (positions) => update({ positions })),
        { t5: "The learned table is −0.5 × the distance bucket here.", shaw: "The learned keys are sinusoids of the distance here." }[state.positions]),
      field("Heads", select(headCounts(state.q, state.v).map((h) => [String(h), String(h)]), String(state.heads), (value) => update({ heads: Number(value), head: 0 })), "Each head takes an equal part of the columns of Q, K and V."),
      state.heads > 1 ? field("Head shown", select(Array.from({ length: state.heads }, (_, h) => [String(h), String(h + 1)]), String(state.head), (value) => update({ head: Number(value) }))) : "",
      html("div", { class: "seldom" }, checkbox("Tokens in columns, as in the sheets and textbooks", state.columns, (columns) => update({ columns }))));
    editors.replaceChildren(editor("q", "Queries Q"), editor("k", "Keys K"), editor("v", "Values V"));
  }

  let structure = "";
  return function redraw() {
    const found = compute(state);
    slider.set(state.beta);
    if (document.activeElement !== maskInput) maskInput.value = state.mask;
    maskInput.setAttribute("aria-invalid", String(Boolean(found.error)));
    message.textContent = found.error ? found.error.message : "";
    message.hidden = !found.error;
    const now = JSON.stringify([state.q, state.k, state.v, state.positions, state.heads, state.head, state.columns]);
    if (now !== structure && !editors.contains(document.activeElement)) { structure = now; drawChoices(); }
    if (found.error) return;
    const { head, visible } = found;
    const pattern = hatch();
    const inputs = Math.max(1e-9, ...[head.q, head.k, head.v, head.output].flat(2).map(Math.abs));
    const scores = Math.max(1e-9, ...found.score.flat().map(Math.abs).filter(Number.isFinite));
    const signed = (largest) => (value) => diverging(value, largest);
    const names = state.tokens;
    const own = queryTokens(state);
    const dimensions = (rows) => rows[0].map((_, c) => `${c + 1}`);
    const transposed = state.columns;
    const piece = (title, rows, key, colour, rowLabels, columnLabels, hidden = null, turned = transposed) => matrix({ title, rows, key, colour, rowLabels, columnLabels, hidden, transposed: turned, hatching: pattern.fill });
    const q = piece(state.positions === "rotary" ? "Q, turned" : "Q", head.q, "q", signed(inputs), own, dimensions(head.q));
    const k = piece(state.positions === "rotary" ? "Kᵀ, turned" : "Kᵀ", head.k, "k", signed(inputs), names, dimensions(head.k), null, !transposed);
    const s = piece(`scores ${Number.isFinite(state.beta) ? "β " : ""}${transposed ? "KᵀQ" : "QKᵀ"}${head.bias ? " + bias" : ""}`, found.score, "s", signed(scores), own, names, visible);
    const a = piece("weights A = softmax", head.weights, "a", (value) => sequential(value), own, names, visible);
    const v = piece("V", head.v, "v", signed(inputs), names, dimensions(head.v));
    const h = piece(state.heads > 1 ? `output of head ${state.head + 1}` : "output H", head.output, "h", signed(inputs), own, dimensions(head.v));
    const room = scrolled.clientWidth || innerWidth; // on a phone results and wide matrices come below
    const split = (line) => (room > 520 ? [line] : line[0].width + line[2].width > 1.1 * room ? [[line[0]], line.slice(1, 3), line.slice(3)] : [line.slice(0, 3), line.slice(3)]);
    const lines = (transposed ? [[k, "·", q, "→", s], [v, "·", a, "=", h]] : [[q, "·", k, "→", s], [a, "·", v, "=", h]]).flatMap(split);
    const size = [0, 0];
    const placed = lines.flatMap((line) => { const row = lay(line, size[1]); size[0] = Math.max(size[0], row.width + 8); size[1] += row.height + 28; return row.placed; });
    picture.setAttribute("viewBox", `0 0 ${size[0]} ${size[1] - 16}`);
    picture.style.setProperty("--natural", `${Math.round(size[0] * (size[0] < 500 ? 1.5 : size[0] < 760 ? 1.2 : 1))}px`);
    picture.style.setProperty("--least", `${Math.round(size[0] * 0.8)}px`);
    picture.replaceChildren(pattern.defs, ...placed);
    hint.hidden = scrolled.scrollWidth <= scrolled.clientWidth;
    scales.replaceChildren(colourScale((value) => sequential(value), 0, 1, "weights"), colourScale((value) => diverging(value, scores), -scores, scores, "scores"), colourScale((value) => diverging(value, inputs), -inputs, inputs, "Q, K, V and output"), html("span", { class: "hatched-key" }, "hatched: hidden by the mask"));
    const table = attentionView.table(state);
    tables.replaceChildren(asTable("Weights and output", table.head, table.rows));
  };
}

function why(state, key) {
  const found = compute(state);
  if (found.error) return null;
  const [kind, a, b] = key.split(".");
  const [i, j] = [Number(a), Number(b)];
  const { head } = found;
  const [query, token] = [queryTokens(state)[i], state.tokens[j]];
  if (kind === "h" && head.output[i]?.[j] !== undefined) {
    return { title: `output of ${query}, component ${j + 1}`, value: head.output[i][j], formula: `Σⱼ A[${query}, j] V[j, ${j + 1}]`, note: found.visible[i].some(Boolean) ? null : "This query sees no key, so its output is zero.",
      parts: head.weights[i].flatMap((weight, m) => [{ label: `weight of ${state.tokens[m]}`, value: weight, key: `a.${i}.${m}` }, { label: `× V[${state.tokens[m]}, ${j + 1}]`, value: head.v[m][j] }, { label: "= share", value: weight * head.v[m][j] }]) };
  }
  if (kind === "a" && head.weights[i]?.[j] !== undefined) {
    const rows = found.score[i].map((score, m) => ({ score, m })).filter(({ m }) => found.visible[i][m]);
    const largest = Math.max(...rows.map(({ score }) => score));
    return { title: `weight of ${query} on ${token}`, value: head.weights[i][j], formula: state.beta === Infinity ? "β = ∞: the largest score takes all, ties share" : "exp(s − max) / Σ exp(s − max) over the visible keys",
      note: found.visible[i][j] ? "Subtracting the largest score changes no weight and prevents overflow." : "The mask hides this key, so its weight is zero.",
      parts: rows.flatMap(({ score, m }) => [{ label: `score of ${state.tokens[m]}`, value: score, key: `s.${i}.${m}` }, ...(Number.isFinite(state.beta) ? [{ label: "exp(s − max)", value: Math.exp(score - largest) }] : [])]) };
  }
  if (kind === "s" && found.score[i]?.[j] !== undefined) {
    return { title: `score of ${query} for ${token}`, value: found.score[i][j], formula: `${Number.isFinite(state.beta) ? "β " : ""}q · k${head.bias ? " + bias" : ""}`,
      parts: [...(Number.isFinite(state.beta) ? [{ label: "β", value: state.beta }] : []), { label: "q · k", value: head.products[i][j], key: `p.${i}.${j}` }, ...(head.bias ? [{ label: "bias of the positions", value: head.bias[i][j] }] : [])] };
  }
  if (kind === "p" && head.products[i]?.[j] !== undefined) {
    return { title: `q · k of ${query} and ${token}`, value: head.products[i][j], formula: "Σ_c q[c] k[c]",
      parts: head.q[i].flatMap((x, c) => [{ label: `q[${c + 1}]`, value: x }, { label: `× k[${c + 1}]`, value: head.k[j][c] }, { label: "= product", value: x * head.k[j][c] }]) };
  }
  const inputs = { q: head.q, k: head.k, v: head.v }[kind];
  return inputs?.[i]?.[j] === undefined ? null : { title: `${kind.toUpperCase()}[${i + 1}, ${j + 1}]`, value: inputs[i][j], formula: "an input of attention", parts: [] };
}

function table(state) {
  const found = compute(state);
  if (found.error) return { head: ["error"], rows: [[found.error.message]] };
  const own = queryTokens(state);
  return {
    head: ["query", ...state.tokens.map((token) => `weight on ${token}`), ...found.output[0].map((_, e) => `output ${e + 1}`)],
    rows: own.map((token, i) => [`${token}`, ...found.head.weights[i], ...found.output[i]]),
  };
}

function python(state) {
  const list = (rows) => JSON.stringify(rows).replaceAll(",", ", ");
  const tensor = (name) => `${name} = torch.tensor(${list(state[name])}, dtype=torch.float64)`;
  const width = state.q[0].length / state.heads;
  const first = state.k.length - state.q.length;
  const terms = {
    alibi: `regard.alibi(heads=${state.heads})`,
    t5: `regard.t5_buckets(torch.tensor([${t5Table().join(", ")}], dtype=torch.float64)[:, None].expand(-1, ${state.heads}), max_distance=${T5_REACH})`,
    shaw: `regard.shaw(torch.tensor(${list(shawKeys(width))}, dtype=torch.float64))`,
  };
  return [
    "import torch", "import regard", `from regard import ${maskNames(state.mask)}`, "", tensor("q"), tensor("k"), tensor("v"),
    ...(state.positions === "sinusoidal" ? [`table = regard.sinusoidal(${state.k.length}, ${state.q[0].length})`, `q, k = q + table[${first}:], k + table`] : []),
    `q, k, v = (x.unflatten(1, (${state.heads}, -1)).transpose(0, 1)[None] for x in (q, k, v))  # (b, h, n, c)`,
    ...(state.positions === "rotary" ? ["rope = regard.rotary()", `q, k = rope(q, ${first}), rope(k)`] : []),
    `rules = dict(mask=${state.mask}, beta=${state.beta === Infinity ? 'float("inf")' : state.beta}${terms[state.positions] ? `, scores=${terms[state.positions]}` : ""})`,
    `print(regard.attend(q, k, torch.eye(${state.k.length}, dtype=torch.float64).expand(1, ${state.heads}, -1, -1), **rules)[0])  # weights (h, i, j)`,
    "print(regard.attend(q, k, v, **rules)[0].transpose(0, 1).flatten(1))  # (n, e), heads side by side", "",
  ].join("\n");
}

function maps(state) {
  const found = compute(state);
  if (found.error) return [];
  const own = queryTokens(state);
  const columns = found.head.v[0].map((_, e) => String(e + 1));
  return [{ title: "weights", rows: found.head.weights, down: own, across: state.tokens, isHidden: (i, j) => !found.visible[i][j] }, { title: "output", rows: found.head.output, down: own, across: columns }];
}

export const attentionView = { title: "Attention", read, write, mount, why, table, maps, python };
