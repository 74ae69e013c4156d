// The models that run in the page: the same answers as the server's, computed here.

import { attribute, checkText, encode, headLabel, headNumbers, logitLens, partLogit, predictions, readModel, run, weightGradients } from "./gpt.js";
import { norm } from "./maths.js";
import { load } from "./remote.js";

export const BROWSER_MODEL = "induction-gpt";
let model = null;

export async function prepare(data) {
  model = model ?? readModel(await load(data, "browser_model"));
  return model;
}

// What the Models view shows for a state. Throws an error with a sentence if it cannot read the text.
export function analyse(state) {
  const wrong = checkText(model, state.text) ?? (state.source ? checkText(model, state.source) : null);
  if (wrong) throw new Error(wrong);
  const heads = model.heads;
  if (!state.source && state.edits.some(({ kind }) => kind === "patch")) throw new Error("Patching needs the other text, from which the output is taken.");
  const missing = [...state.edits.map((edit) => [edit.layer, edit.head ?? 0]), ...state.brush, ...(state.show === "head" ? [[state.layer, state.head]] : [])].find(([layer, head]) => layer >= model.layers.length || head >= heads);
  if (missing) throw new Error(`There is no layer ${missing[0] + 1} head ${missing[1] + 1}: ${model.name} has ${model.layers.length} layers with ${heads} heads each. The address counts both from 0.`);
  const tokens = encode(model, state.text);
  const far = state.edits.find(({ kind, value }) => kind === "hide" && value >= tokens.length);
  if (far) throw new Error(`There is no key ${far.value + 1} to hide: the text has ${tokens.length} tokens.`);
  const source = state.source ? run(model, encode(model, state.source)) : null;
  const clean = run(model, tokens);
  const pass = state.edits.length ? run(model, tokens, state.edits, source) : clean;
  const position = Math.min(state.position ?? tokens.length - 1, tokens.length - 1);
  const letters = tokens.map((token) => model.vocabulary[token]);
  const layers = pass.layers.map((layer) => ({ name: layer.name, heads: layer.heads.map((head) => { const numbers = headNumbers(head.weights, tokens); return { numbers, ...headLabel(numbers), map: head.weights }; }) }));
  const target = state.target && model.vocabulary.includes(state.target) ? model.vocabulary.indexOf(state.target) : predictions(model, clean.logits[position], 1)[0].id;
  const chosen = pass.layers[state.layer]?.heads[state.head];
  return {
    tokens: letters, position, layers, pass, clean, target: model.vocabulary[target], targetId: target, cacheBytes: 2 * 4 * model.layers.length * tokens.length * model.tokens[0].length,
    before: predictions(model, clean.logits[position], 8, topIds(pass, position)), after: predictions(model, pass.logits[position], 8, topIds(clean, position)),
    logits: { before: clean.logits[position], after: pass.logits[position] }, vocabulary: model.vocabulary,
    head: chosen && { weights: chosen.weights, relevance: weightGradients(model, pass, position, target, state.edits)[state.layer][state.head].map((row, i) => row.map((gradient, j) => Math.max(0, gradient * chosen.weights[i][j]))), contribution: chosen.weights.map((row) => row.map((weight, j) => weight * norm(written(state.layer, state.head, chosen.v[j])))) },
    lens: () => logitLens(model, pass, position), attribution: () => attribute(model, pass, position, target),
    ablations: () => ablations(state, pass, tokens, source, position, target),
  };
}

// The change of the target's logit for each head set to zero, and for all brushed heads.
function ablations(state, pass, tokens, source, position, target) {
  const heads = state.brush.length ? state.brush : pass.layers.flatMap((layer, at) => layer.heads.map((_, h) => [at, h]));
  const groups = [...heads.map((head) => [head]), ...(state.brush.length > 1 ? [heads] : [])];
  return groups.map((group) => ({ ...(group.length === 1 ? { layer: group[0][0], head: group[0][1] } : {}), heads: group.length,
    change: run(model, tokens, [...state.edits, ...group.map(([layer, head]) => ({ kind: "ablate", layer, head }))], source).logits[position][target] - pass.logits[position][target] }));
}

const topIds = (pass, position) => predictions(model, pass.logits[position]).map((each) => each.id);

// What a vector of a head adds to the residual stream.
function written(layer, head, z) {
  const width = z.length;
  return model.layers[layer].o.weight.map((row) => z.reduce((sum, value, e) => sum + row[head * width + e] * value, 0));
}

// One step of "why this number?": logit -> heads -> keys -> weight -> score -> components of q . k.
export function whyNumber(found, key) {
  const [kind, ...rest] = key.split(".");
  const at = rest.map(Number);
  const { pass, position } = found;
  const letter = (i) => `${found.tokens[i]}${i + 1}`;
  if (kind === "logit") {
    const token = at[0];
    const parts = attribute(model, pass, position, token);
    return { title: `logit of ${model.vocabulary[token]}`, value: pass.logits[position][token], formula: "the parts of the residual stream, each through the final norm and the output layer",
      parts: parts.map((part) => ({ label: part.name, value: part.value, key: part.layer === undefined ? null : `head.${part.layer}.${part.head}.${token}` })) };
  }
  if (kind === "head") {
    const [layer, head, token] = at;
    const own = pass.layers[layer].heads[head];
    const parts = own.weights[position].map((weight, j) => ({ label: `from ${letter(j)}: weight × value`, value: weight * partLogit(model, pass, position, written(layer, head, own.v[j]), token), key: `weight.${layer}.${head}.${position}.${j}` })).filter((_, j) => j <= position);
    return { title: `layer ${layer + 1} head ${head + 1} → ${model.vocabulary[token]}`, value: partLogit(model, pass, position, pass.layers[layer].written[head][position], token), formula: "Σⱼ aⱼ · (value j through W_o, norm and output layer)",
      note: "After an ablation the head writes 0, whatever these parts are.", parts: parts.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)) };
  }
  const [layer, head, i, j] = at;
  const own = pass.layers[layer]?.heads[head];
  if (!own || !(i < own.weights.length)) return null;
  if (kind === "weight") {
    return { title: `weight ${letter(i)} → ${letter(j)}`, value: own.weights[i][j], formula: j > i ? "hidden: a later token has weight 0" : "exp(β sⱼ) / Σ exp(β s)",
      parts: own.scores[i].slice(0, i + 1).map((score, other) => ({ label: `score of ${letter(other)}`, value: score, key: `score.${layer}.${head}.${i}.${other}` })) };
  }
  if (kind === "score") {
    return { title: `score ${letter(i)} · ${letter(j)}`, value: own.scores[i][j], formula: `q · k = Σ_c q[c] k[c], β = ${own.beta.toFixed(4)}`,
      parts: own.q[i].map((x, c) => ({ label: `q[${c}] × k[${c}]`, value: x * own.k[j][c] })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)) };
  }
  return null;
}
