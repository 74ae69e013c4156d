// An attention-only GPT in the browser: learned positions, pre-norm blocks of multi-head attention, a final norm.
// The tensors come from Python (explorer/views/browser_model.py); tests compare every number with torch.

import { dot, softmax, sum } from "./maths.js";

function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Float32Array.from(new Float32Array(bytes.buffer));
}

// A matrix of (rows, columns) as an array of rows.
function rowsOf(tensor) {
  const [rows, columns] = tensor.shape;
  const values = decode(tensor.data);
  return Array.from({ length: rows }, (_, r) => Array.from(values.subarray(r * columns, (r + 1) * columns)));
}

const vector = (tensor) => Array.from(decode(tensor.data));

export function readModel(stored) {
  const linear = ({ weight, bias }) => ({ weight: rowsOf(weight), bias: bias ? vector(bias) : null });
  const norm = ({ weight, bias }) => ({ weight: vector(weight), bias: bias ? vector(bias) : null });
  return {
    name: stored.name, vocabulary: stored.vocabulary, heads: stored.heads, eps: stored.eps, context: stored.context,
    tokens: rowsOf(stored.tokens), positions: rowsOf(stored.positions), unembedding: rowsOf(stored.unembedding), norm: norm(stored.norm),
    layers: stored.layers.map((layer) => ({ name: layer.name, norm: norm(layer.norm), q: linear(layer.q), k: linear(layer.k), v: linear(layer.v), o: linear(layer.o) })),
  };
}

const apply = ({ weight, bias }, x) => weight.map((row, r) => dot(row, x) + (bias ? bias[r] : 0));
const plus = (a, b) => a.map((x, c) => x + b[c]);

// Layer norm, with what is needed to pass a part of a sum through it: the mean is linear, the deviation is that of the sum.
function layerNorm({ weight, bias }, x, eps) {
  const mean = sum(x) / x.length;
  const deviation = Math.sqrt(x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length + eps);
  return { deviation, out: x.map((value, c) => ((value - mean) / deviation) * weight[c] + (bias ? bias[c] : 0)) };
}

export const encode = (model, text) => [...text].map((letter) => model.vocabulary.indexOf(letter));

export function checkText(model, text) {
  const letters = [...text];
  const unknown = letters.find((letter) => !model.vocabulary.includes(letter));
  if (unknown !== undefined) return `${JSON.stringify(unknown)} is not in the vocabulary of ${model.name}: ${model.vocabulary.join("")}`;
  if (letters.length < 2) return "Write at least two letters.";
  return letters.length > model.context ? `At most ${model.context} letters.` : null;
}

const sliceHead = (x, heads, h) => { const width = x.length / heads; return x.slice(h * width, (h + 1) * width); };
const edited = (edits, kind, layer, head) => edits.filter((edit) => edit.kind === kind && edit.layer === layer && (edit.head === null || edit.head === head));

// The forward pass with everything it passes through. Edits act as those of regard.intervene:
// { kind: "ablate" | "mean" | "beta" | "hide" | "patch", layer, head, value }; `source` is the pass to patch from.
export function run(model, tokens, edits = [], source = null) {
  const n = tokens.length;
  const embedded = tokens.map((token, i) => plus(model.tokens[token], model.positions[i]));
  let x = embedded;
  const layers = model.layers.map((layer, at) => {
    const input = x;
    const normed = x.map((row) => layerNorm(layer.norm, row, model.eps).out);
    const project = (part) => normed.map((row) => apply(part, row));
    const [q, k, v] = [project(layer.q), project(layer.k), project(layer.v)];
    const heads = Array.from({ length: model.heads }, (_, h) => {
      const own = (rows) => rows.map((row) => sliceHead(row, model.heads, h));
      const [hq, hk, hv] = [own(q), own(k), own(v)];
      const factor = edited(edits, "beta", at, h).reduce((product, edit) => product * edit.value, 1);
      const beta = factor / Math.sqrt(hq[0].length);
      const hidden = new Set(edited(edits, "hide", at, h).map((edit) => edit.value));
      const scores = hq.map((query) => hk.map((key) => dot(query, key)));
      const weights = scores.map((row, i) => softmax(row, beta, row.map((_, j) => j <= i && !hidden.has(j))));
      let out = weights.map((row) => hv[0].map((_, e) => row.reduce((sum, weight, j) => (weight ? sum + weight * hv[j][e] : sum), 0)));
      if (edited(edits, "ablate", at, h).length) out = out.map((row) => row.map(() => 0));
      if (edited(edits, "mean", at, h).length) { const mean = out[0].map((_, e) => out.reduce((sum, row) => sum + row[e], 0) / n); out = out.map(() => mean.slice()); }
      if (edited(edits, "patch", at, h).length && source) out = out.map((row, i) => source.layers[at].heads[h].out[i] ?? row);
      return { q: hq, k: hk, v: hv, beta, scores, weights, out };
    });
    const width = heads[0].out[0].length;
    // what each head adds to the residual stream: its columns of the output matrix times its output
    const written = heads.map((head, h) => head.out.map((z) => layer.o.weight.map((row) => { let sum = 0; for (let e = 0; e < width; e += 1) sum += row[h * width + e] * z[e]; return sum; })));
    x = input.map((row, i) => { let sum = row; for (const part of written) sum = plus(sum, part[i]); return layer.o.bias ? plus(sum, layer.o.bias) : sum; });
    return { name: layer.name, input, heads, written, bias: layer.o.bias };
  });
  const last = x.map((row) => layerNorm(model.norm, row, model.eps));
  const logits = last.map(({ out }) => model.unembedding.map((row) => dot(row, out)));
  return { tokens, embedded, layers, residual: x, last, logits };
}

export const probabilities = (logits) => softmax(logits);

// Top predictions at a position, and those of `more` ids.
export function predictions(model, logits, count = 8, more = []) {
  const share = probabilities(logits);
  const all = share.map((probability, token) => ({ token: model.vocabulary[token], id: token, probability, logit: logits[token] })).sort((a, b) => b.probability - a.probability);
  return all.filter((each, rank) => rank < count || more.includes(each.id));
}

// A part of the residual stream through the final norm to one logit. The parts sum to the logit exactly.
export function partLogit(model, pass, position, part, token) {
  const mean = sum(part) / part.length;
  const { deviation } = pass.last[position];
  return part.reduce((sum, value, c) => sum + ((value - mean) / deviation) * model.norm.weight[c] * model.unembedding[token][c], 0);
}

// Direct logit attribution: the embedding, each head, the biases; they sum to the logit.
export function attribute(model, pass, position, token) {
  const parts = [{ name: "token", value: partLogit(model, pass, position, model.tokens[pass.tokens[position]], token) }, { name: "position", value: partLogit(model, pass, position, model.positions[position], token) }];
  pass.layers.forEach((layer, at) => {
    layer.written.forEach((rows, h) => parts.push({ name: `layer ${at + 1} head ${h + 1}`, layer: at, head: h, value: partLogit(model, pass, position, rows[position], token) }));
    if (layer.bias) parts.push({ name: `layer ${at + 1} bias`, value: partLogit(model, pass, position, layer.bias, token) });
  });
  if (model.norm.bias) parts.push({ name: "bias of the final norm", value: dot(model.norm.bias, model.unembedding[token]) });
  return parts;
}

// Logit lens: the residual stream after each layer, read by the final norm and the output layer.
export function logitLens(model, pass, position) {
  const states = [["embedding", pass.embedded], ...pass.layers.slice(1).map((layer, at) => [`after layer ${at + 1}`, layer.input]), [`after layer ${pass.layers.length}`, pass.residual]];
  return states.map(([name, rows]) => {
    const { out } = layerNorm(model.norm, rows[position], model.eps);
    return { name, top: predictions(model, model.unembedding.map((row) => dot(row, out)), 4) };
  });
}

// Gradient through a layer norm of x with respect to x, given that with respect to its output.
function normGradient({ weight }, x, deviation, gradient) {
  const mean = sum(x) / x.length;
  const scaled = gradient.map((g, c) => g * weight[c]);
  const average = sum(scaled) / x.length;
  const along = scaled.reduce((sum, g, c) => sum + (g * (x[c] - mean)) / deviation, 0) / x.length;
  return scaled.map((g, c) => (g - average - ((x[c] - mean) / deviation) * along) / deviation);
}

const columnsTimes = (weight, gradient) => { const sum = Array(weight[0].length).fill(0); weight.forEach((row, r) => { if (gradient[r]) row.forEach((w, c) => { sum[c] += w * gradient[r]; }); }); return sum; };

// The gradient of one logit by every weight, by layer and head: a backward pass through the edited model.
export function weightGradients(model, pass, position, token, edits = []) {
  let dx = pass.residual.map((x, i) => (i === position ? normGradient(model.norm, x, pass.last[i].deviation, model.unembedding[token]) : x.map(() => 0)));
  const found = [];
  for (let at = model.layers.length - 1; at >= 0; at -= 1) {
    const [layer, run] = [model.layers[at], pass.layers[at]];
    const width = run.heads[0].out[0].length;
    const parts = { q: [], k: [], v: [] };
    found[at] = run.heads.map((head, h) => {
      let dout = dx.map((row) => Array.from({ length: width }, (_, e) => row.reduce((sum, g, c) => sum + g * layer.o.weight[c][h * width + e], 0)));
      if (edited(edits, "mean", at, h).length) { const mean = dout[0].map((_, e) => dout.reduce((sum, row) => sum + row[e], 0) / dout.length); dout = dout.map(() => mean); }
      if (edited(edits, "ablate", at, h).length || edited(edits, "patch", at, h).length) dout = dout.map((row) => row.map(() => 0));
      const dweights = dout.map((row) => head.v.map((value) => dot(row, value)));
      const dscores = head.weights.map((row, i) => { const mean = dot(row, dweights[i]); return row.map((a, j) => head.beta * a * (dweights[i][j] - mean)); });
      const sum = (rows, by) => rows[0].map((_, c) => rows.reduce((total, row, j) => total + row[c] * by(j), 0));
      parts.q.push(dscores.map((row) => sum(head.k, (j) => row[j])));
      parts.k.push(dscores.map((_, j) => sum(head.q, (i) => dscores[i][j])));
      parts.v.push(dout.map((_, j) => sum(dout, (i) => head.weights[i][j])));
      return dweights;
    });
    dx = dx.map((row, i) => {
      const normed = ["q", "k", "v"].map((name) => columnsTimes(layer[name].weight, parts[name].flatMap((rows) => rows[i]))).reduce(plus);
      const { deviation } = layerNorm(layer.norm, run.input[i], model.eps);
      return plus(row, normGradient(layer.norm, run.input[i], deviation, normed));
    });
  }
  return found;
}

const meanOf = (values) => (values.length ? sum(values) / values.length : null);

// Numbers of a head: mean entropy relative to its largest value, weight on the previous and first token, and on the
// token after the last occurrence of the current one (the induction score of Olsson et al. 2022).
export function headNumbers(weights, tokens) {
  // 0 for the first query, which sees one key
  const spread = meanOf(weights.map((row, i) => (i ? row.reduce((sum, a) => sum - (a > 0 ? a * Math.log(a) : 0), 0) / Math.log(i + 1) : 0)));
  const previous = meanOf(weights.slice(1).map((row, i) => row[i]));
  const first = meanOf(weights.slice(1).map((row) => row[0]));
  const repeated = tokens.map((token, i) => tokens.lastIndexOf(token, i - 1)).map((before, i) => (i > 0 && before >= 0 ? weights[i][before + 1] : null)).filter((x) => x !== null);
  return { spread, previous, first, induction: meanOf(repeated) };
}

// The kind of a head by its largest number, if that is at least one half.
export function headLabel(numbers) {
  const kinds = [["induction", numbers.induction], ["previous token", numbers.previous], ["first token", numbers.first]];
  const [label, value] = kinds.map(([kind, x]) => [kind, x ?? 0]).sort((a, b) => b[1] - a[1])[0];
  return value >= 0.5 ? { label, value } : { label: numbers.spread >= 0.95 ? "uniform" : "mixed", value: numbers.spread };
}
