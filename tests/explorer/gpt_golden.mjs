// Runs the GPT of the page: reads { model, tokens, edits, source, position, token }, writes what it computes.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { attribute, headNumbers, logitLens, readModel, run, weightGradients } = await import(pathToFileURL(`${process.argv[2]}/gpt.js`));
const asked = JSON.parse(readFileSync(0, "utf8"));
const model = readModel(asked.model);
const source = asked.source ? run(model, asked.source) : null;
const pass = run(model, asked.tokens, asked.edits, source);
process.stdout.write(JSON.stringify({
  logits: pass.logits,
  weights: pass.layers.map((layer) => layer.heads.map((head) => head.weights)),
  attribution: attribute(model, pass, asked.position, asked.token),
  gradients: weightGradients(model, pass, asked.position, asked.token, asked.edits),
  lens: logitLens(model, pass, asked.position).map((row) => row.top[0]),
  numbers: pass.layers.map((layer) => layer.heads.map((head) => headNumbers(head.weights, asked.tokens))),
}));
