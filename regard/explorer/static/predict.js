// Predict, then reveal: the learner sets the bars first; the page shows the truth and names the likely mistake.

import { category, format, html } from "./dom.js";
import { softmax } from "./maths.js";

const normalized = (parts) => { const total = parts.reduce((sum, part) => sum + part, 0); return total > 0 ? parts.map((part) => part / total) : null; };

// Wrong ways to turn scores into weights, with the sentence that names them. The names are those of regard work --check.
export function mistakes(scores, beta) {
  const scaled = scores.map((score) => beta * score);
  const largest = Math.max(...scaled);
  return [
    ["the weights are equal, as if beta were 0", scores.map(() => 1 / scores.length)],
    ["the scores were not multiplied by beta", softmax(scores, 1)],
    ["the largest score takes everything, as if beta were infinite", softmax(scores, Infinity)],
    ["the scores were divided by beta instead of multiplied", beta > 0 ? softmax(scores, 1 / beta) : null],
    ["powers of 10 instead of e", normalized(scaled.map((score) => 10 ** (score - largest)))],
    ["powers of 2 instead of e", normalized(scaled.map((score) => 2 ** (score - largest)))],
    ["the scores were divided by their sum, without exp", scaled.every((score) => score >= 0) ? normalized(scaled) : null],
    ["the sign of the scores is turned round", softmax(scores, -beta)],
    ["the order of the keys is turned round", softmax(scores, beta).reverse()],
  ].filter(([, weights]) => weights !== null);
}

const distance = (a, b) => Math.max(...a.map((x, j) => Math.abs(x - b[j])));

// The judgement of a guess: whether it is right, and otherwise the mistake that gives nearly these weights.
export function judge(guess, scores, beta, tolerance = 0.06) {
  const truth = softmax(scores, beta);
  if (distance(guess, truth) <= tolerance) return { right: true, text: "That is right.", truth };
  const total = guess.reduce((sum, x) => sum + x, 0);
  if (Math.abs(total - 1) > 0.1) return { right: false, text: `Your weights sum to ${format(total)}. Weights sum to 1.`, truth };
  const [name, weights] = mistakes(scores, beta).sort((a, b) => distance(guess, a[1]) - distance(guess, b[1]))[0];
  const near = distance(guess, weights) <= tolerance && distance(weights, truth) > tolerance;
  return { right: false, text: near ? `Your weights fit this mistake: ${name}.` : `The largest difference is ${format(distance(guess, truth))}.`, truth };
}

// Bars to drag before the truth is shown; `reveal` is called once.
export function predictWeights(scores, beta, reveal) {
  let guess = scores.map(() => 1 / scores.length);
  const total = html("output", { class: "muted tabular" });
  const show = () => { total.textContent = `Sum of your weights: ${format(guess.reduce((sum, x) => sum + x, 0))}`; };
  const rows = guess.map((value, j) => html("label", { class: "bar" }, html("span", { class: "swatch", style: { background: category(j) } }), `a${j + 1}`,
    html("input", { type: "range", min: "0", max: "1", step: "0.01", value: String(value), "aria-label": `Your weight of key ${j + 1}`, oninput: (event) => { guess = guess.with(j, Number(event.target.value)); event.target.nextSibling.textContent = format(guess[j]); show(); } }), html("output", { class: "tabular" }, format(value))));
  const verdict = html("div", { "aria-live": "polite" });
  show();
  return html("div", { class: "predict" }, html("p", {}, html("strong", {}, "Predict first: "), "set the weights as you expect them, then compare."), rows, total,
    html("button", { type: "button", onclick: (event) => {
      const found = judge(guess, scores, beta);
      event.target.disabled = true;
      verdict.replaceChildren(html("p", { class: found.right ? "good" : "warn" }, found.text), html("p", {}, `Yours: ${guess.map(format).join(", ")}. Computed: ${found.truth.map(format).join(", ")}.`));
      reveal();
    } }, "Compare"), verdict);
}
