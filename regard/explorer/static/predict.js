// Predict, then reveal: the learner sets bars, then the page shows the truth and names the likely mistake.

import { category, format, html } from "./dom.js";
import { softmax, sum } from "./maths.js";

const ratio = (parts) => { const total = sum(parts); return total ? parts.map((part) => part / total) : null; };

// Wrong weights of one query: [name, explanation, weights], as in regard.work.common_mistakes; a test compares them.
export function mistakes(scores, beta) {
  const scaled = scores.map((score) => beta * score);
  const largest = Math.max(...scaled);
  const truth = softmax(scores, beta);
  const power = (base) => ratio(scaled.map((score) => base ** (score - largest)));
  const exps = scaled.map((score) => Math.exp(Math.min(score, 700)));
  return [
    ["missing scale", "the weights were calculated from the scores, not from the scaled scores", softmax(scores, 1)],
    ["inverted scale", "the scores were divided by beta instead of multiplied", beta > 0 ? softmax(scores, 1 / beta) : null],
    ["softmax over the other axis", "the weights of each key add up to 1, but those of each query should", scores.map(() => 1)],
    ["all weight on the largest score", "the largest score of each query got all the weight; softmax gives every score a share", softmax(scores, Infinity)],
    ["no softmax", "these are the scores themselves", scaled],
    ["no softmax", "these are the scores, neither scaled nor passed through the softmax", scores],
    ["no normalisation", "the exponentials were not divided by their sum", exps],
    ["no normalisation", "the exponentials of scores minus the largest were not divided by their sum", scaled.map((score) => Math.exp(score - largest))],
    ["no exponentials", "the scores were divided by their sum without exponentials", ratio(scaled)],
    ["divided by the length", "the exponentials were divided by the root of the sum of their squares, not by their sum", exps.map((x) => x / Math.hypot(...exps))],
    ["divided by the number of keys", "the exponentials were divided by the number of keys, not by their sum", exps.map((x) => x / exps.length)],
    ["sigmoid instead of softmax", "the sigmoid of each score was taken alone; the exponentials of a query should be divided by their sum", scaled.map((x) => 1 / (1 + Math.exp(-x)))],
    ["logarithm of the weights", "these are the logarithms of the weights", truth.map(Math.log)],
    ["softmax twice", "softmax was applied twice; apply it once", softmax(truth)],
    ["percent", "the weights are in percent; those of a query should add up to 1, not to 100", truth.map((x) => 100 * x)],
    ["another base", "these are powers of 2 instead of powers of e", power(2)],
    ["another base", "these are powers of 10 instead of powers of e", power(10)],
    ["sign", "the scores have the wrong sign", softmax(scores, -beta)],
    ["equal weights", "all keys have the same weight, as if every score were the same", scores.map(() => 1 / scores.length)],
    // only in the page
    ["order", "the order of the keys is turned round", truth.slice().reverse()],
  ].filter(([, , weights]) => weights !== null && weights.every(Number.isFinite));
}

const distance = (a, b) => Math.max(...a.map((x, j) => Math.abs(x - b[j])));

// Whether a guess is right, else the mistake that gives nearly these weights.
export function judge(guess, scores, beta, tolerance = 0.06) {
  const truth = softmax(scores, beta);
  if (distance(guess, truth) <= tolerance) return { right: true, text: "That is right.", truth };
  const [name, explanation, weights] = mistakes(scores, beta).sort((a, b) => distance(guess, a[2]) - distance(guess, b[2]))[0];
  if (distance(guess, weights) <= tolerance && distance(weights, truth) > tolerance) return { right: false, text: `Your weights fit this mistake (${name}): ${explanation}.`, truth };
  const total = sum(guess);
  if (Math.abs(total - 1) > 0.1) return { right: false, text: `Your weights sum to ${format(total)}. Weights sum to 1.`, truth };
  return { right: false, text: `The largest difference is ${format(distance(guess, truth))}.`, truth };
}

// Bars to drag before the truth is shown; `reveal` is called once.
export function predictWeights(scores, beta, reveal) {
  let guess = scores.map(() => 1 / scores.length);
  const total = html("output", { class: "muted tabular" });
  const show = () => { total.textContent = `Sum of your weights: ${format(sum(guess))}`; };
  const rows = guess.map((value, j) => html("label", { class: "bar" }, html("span", { class: "swatch", style: { background: category(j) } }), `a${j + 1}`,
    html("input", { type: "range", min: "0", max: "1", step: "0.01", value: String(value), "aria-label": `Your weight of key ${j + 1}`, oninput: (event) => { guess = guess.with(j, Number(event.target.value)); event.target.nextSibling.textContent = format(guess[j]); show(); } }), html("output", { class: "tabular" }, format(value))));
  const verdict = html("div", { "aria-live": "polite" });
  show();
  return html("div", { class: "predict" }, html("p", {}, html("strong", {}, "Predict first: "), "set the weights as you expect them, then compare."), rows, html("p", {}, total),
    html("button", { onclick: (event) => {
      const found = judge(guess, scores, beta);
      event.target.disabled = true;
      verdict.replaceChildren(html("p", { class: found.right ? "good" : "warn" }, found.text), html("p", {}, `Yours: ${guess.map(format).join(", ")}. Computed: ${found.truth.map(format).join(", ")}.`));
      reveal();
    } }, "Compare"), verdict);
}
