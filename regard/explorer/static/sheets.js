// Sheets and lab: questions of the course sheets with answers, and the claims that measure them.

import { drawDocument, shelf } from "./document.js";
import { asTable, h2, help, html, muted, number, warning, withCode } from "./dom.js";
import { presetAddress } from "./plane.js";
import { compute, load } from "./remote.js";

const read = (parameters) => ({ place: (parameters.get("q") ?? "").slice(0, 40), claim: (parameters.get("claim") ?? "").slice(0, 60) });
function write(state) {
  const parameters = new URLSearchParams();
  if (state.claim) parameters.set("claim", state.claim);
  else if (state.place) parameters.set("q", state.place);
  return parameters;
}

const VERDICTS = ["supported", "refuted", "undecided"];

// A claim: the learner predicts the result, then sees the figure and the verdict, and can run the claim.
function claimCard(claim, data) {
  const outcome = html("div", { hidden: true });
  const figure = html("figure", {});
  const running = html("div", { class: "muted", "aria-live": "polite" });
  let shown = false;
  const reveal = (guess) => {
    outcome.hidden = false;
    const found = VERDICTS.find((word) => claim.verdict === word) ?? claim.verdict;
    outcome.querySelector(".guess").textContent = guess === null ? "" : guess === found ? "Your prediction was right." : `You predicted “${guess}”.`;
    if (shown) return;
    shown = true;
    load(data, `figures/${claim.id}`).then((answer) => figure.replaceChildren(html("img", { src: answer.address, alt: `Figure: ${claim.question}` })), (error) => figure.replaceChildren(muted(error.message)));
  };
  outcome.append(html("p", { class: "guess muted" }), html("p", {}, html("strong", { class: `verdict ${claim.verdict}` }, claim.verdict), " ", withCode(claim.sentence)), figure, claim.numbers.length ? asTable("Numbers of the figure", ["number", "value"], claim.numbers.map(([name, value], k) => [name, typeof value === "number" ? number(value, `n.${claim.id}.${k}`, name) : String(value)])) : "");
  let stop = null;
  const run = html("button", { onclick: async () => {
    if (stop) { stop.abort(); return; }
    stop = new AbortController();
    run.textContent = "Cancel";
    running.textContent = "Starting …";
    try {
      const answer = await compute("claim", { claim: claim.id }, ({ text }) => { running.textContent = text; }, stop.signal);
      running.replaceChildren(html("p", {}, `Run now in ${answer.seconds.toFixed(1)} s: `, html("strong", {}, answer.verdict), ` ${answer.sentence}`), html("img", { src: answer.figure, alt: `Figure of the new run: ${claim.question}` }));
    } catch (error) {
      running.textContent = error.name === "AbortError" ? "Cancelled." : error.message;
    }
    stop = null;
    run.textContent = "Run it now";
  } }, "Run it now");
  return html("article", { class: "card" }, h2(claim.question), html("p", {}, withCode(claim.claim)),
    help("Measured: ", withCode(claim.measures)),
    html("div", { class: "actions", role: "group", "aria-label": "Predict the verdict" }, VERDICTS.slice(0, 2).map((word) => html("button", { onclick: () => reveal(word) }, `I predict: ${word}`)), html("button", { onclick: () => reveal(null) }, "Show the result")),
    outcome, html("p", { class: "command" }, html("code", {}, claim.command)), data.api ? run : null, running);
}

function erratum(found) {
  return html("aside", { class: "erratum" }, html("p", {}, `Sheet ${found.source}, ${found.place}: `, html("q", {}, found.quote)),
    html("p", {}, html("strong", {}, found.status === "wrong" ? "Wrong. " : `${found.status[0].toUpperCase()}${found.status.slice(1)}. `), found.counter_example), html("p", {}, html("strong", {}, "Correct: "), found.right));
}

let table = { head: ["question", "claims"], rows: [] };
let known = new Map();
let measuring = "beta"; // the first claim of the question that is shown

function mount(element, state, update, data) {
  const list = html("div", {});
  const text = html("article", { class: "prose" }, muted("Loading the sheets …"));
  element.append(html("div", { class: "library" }, list, text));
  let found = null;
  Promise.all([load(data, "sheets"), load(data, "claims")]).then(([sheets, claims]) => { found = { sheets, claims: new Map(claims.map((claim) => [claim.id, claim])) }; known = found.claims; draw(); },
    (error) => text.replaceChildren(warning(error.message)));
  let before = null;

  function draw() {
    const now = JSON.stringify(state);
    if (!found || now === before) return;
    before = now;
    const groups = found.sheets.map((sheet) => ({ name: `Sheet ${sheet.sheet}`, items: sheet.questions.map((question) => ({ key: question.place, label: `${question.place.slice(4)}  ${question.question}` })) }));
    const chapters = [...Map.groupBy(found.claims.values(), (claim) => claim.chapter)].map(([name, claims]) => ({ name, items: claims.map((claim) => ({ key: claim.id, label: claim.question })) }));
    list.replaceChildren(h2("Sheets"), shelf("Questions of the sheets", groups, state.claim ? null : state.place, (place) => update({ place, claim: "" })),
      h2("Lab"), shelf("Claims of the lab", chapters, state.claim, (claim) => update({ claim })));
    table = { head: ["question", "claims"], rows: found.sheets.flatMap((sheet) => sheet.questions.map((question) => [question.place, question.claims.join(" ")])) };
    if (state.claim) {
      const claim = found.claims.get(state.claim);
      text.replaceChildren(claim ? claimCard(claim, data) : warning(`There is no claim ${state.claim}.`));
      return;
    }
    const sheet = found.sheets.find((each) => state.place.startsWith(each.sheet));
    const question = sheet?.questions.find((each) => each.place === state.place);
    if (!question) {
      text.replaceChildren(html("h1", {}, "The five course sheets"), html("p", {}, "Every question of the sheets has an answer: definition, formula, reasons, and numbers that this package measured. Choose one from the list."),
        html("dl", {}, found.sheets.map((each) => [html("dt", {}, each.sheet), html("dd", {}, `${each.title}. ${each.questions.length} questions.`)])));
      return;
    }
    measuring = question.claims[0] ?? measuring;
    const view = presetAddress(question.places) || question.view;
    text.replaceChildren(muted(`Sheet ${sheet.sheet}, question ${question.place.slice(4)}`), html("h1", {}, question.question), ...drawDocument(question.content), ...question.errata.map(erratum),
      html("p", { class: "command" }, html("code", {}, question.command), view ? [" ", html("a", { href: view }, "See it in the explorer")] : ""),
      ...question.claims.map((name) => found.claims.get(name)).filter(Boolean).map((claim) => claimCard(claim, data)));
  }
  return draw;
}

// A measured number: what was measured, by which command and from which part of the result.
function why(_, key) {
  const [kind, id, k] = key.split(".");
  const [name, value] = known.get(id)?.numbers[Number(k)] ?? [];
  if (kind !== "n" || name === undefined) return null;
  return { title: name, value, formula: `measured by ${known.get(id).command}`, note: known.get(id).measures, parts: [], end: "Copy Python runs it again." };
}

const claimTable = (state) => (known.get(state.claim)?.numbers.length ? { head: ["number", "value"], rows: known.get(state.claim).numbers } : table);

const python = (state) => `from regard.lab.claim import claims\n\nclaim = claims()[${JSON.stringify(state.claim || measuring)}]\noutcome = claim.run(claim.setup())\nprint(outcome.verdict.word, outcome.numbers)\n`;

export const sheetsView = { title: "Sheets", read, write, mount, why, table: claimTable, python };
