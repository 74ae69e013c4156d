// Lessons: text with live views in it, and questions before and after.

import { drawDocument, shelf } from "./document.js";
import { h2, holdFocus, html, muted, warning } from "./dom.js";
import { compute } from "./plane.js";
import { predictWeights } from "./predict.js";
import { load } from "./remote.js";

const read = (parameters) => ({ lesson: (parameters.get("name") ?? "").slice(0, 80) });
const write = (state) => new URLSearchParams(state.lesson ? { name: state.lesson } : {});

let quizzes = 0;

// A question with its answers; it says what is right after the learner has chosen.
function question({ answers, explanation }, [asked]) {
  quizzes += 1;
  const group = `quiz-${quizzes}`;
  const verdict = html("p", { "aria-live": "polite" });
  return html("fieldset", { class: "quiz" }, html("legend", {}, asked), answers.map((answer, k) => html("label", { class: "check" },
    html("input", { type: "radio", name: group, value: String(k), onchange: () => {
      verdict.className = answer.right ? "good" : "warn";
      verdict.textContent = `${answer.right ? "Right." : "Not quite."} ${explanation}`;
    } }), answer.text)), verdict);
}

let views = {};
let shown = [];
let active = null; // the live view that was touched last: its numbers are explained

// A live view inside the text. Its state is its own; a link opens it as a page.
function liveView({ view: name, state: query, predict }, [caption], data) {
  const view = views[name];
  if (!view) return warning(`There is no view ${name}.`);
  const state = view.read(new URLSearchParams(query));
  const touch = () => { active = { view, state }; };
  const box = html("div", { class: "live-view", onpointerdown: touch, onfocusin: touch });
  let redraw = () => {};
  let waiting = false;
  const update = (change) => {
    Object.assign(state, change);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; const giveBack = holdFocus(box); redraw(); giveBack(); });
  };
  const text = html("figcaption", {}, caption, " ", html("a", { href: `#${name}?${view.write(state)}`, class: "open-view", onclick: (event) => { event.target.href = `#${name}?${view.write(state)}`; } }, "Open as a page"));
  const open = () => { redraw = view.mount(box, state, update, data); redraw(); text.hidden = false; };
  text.hidden = predict; // what it says may be the answer
  if (predict) box.append(predictWeights(compute(state).scores, state.beta, open));
  else open();
  shown.push({ view, state });
  return html("figure", { class: "live" }, box, text);
}

function mount(element, state, update, data) {
  const list = html("div", {});
  const text = html("article", { class: "prose lesson" }, muted("Loading the lessons …"));
  element.append(html("div", { class: "library" }, list, text));
  let lessons = null;
  let before = null;
  load(data, "lessons").then((found) => { lessons = found; draw(); }, (error) => text.replaceChildren(warning(error.message)));

  function draw() {
    if (!lessons || state.lesson === before) return;
    before = state.lesson;
    const lesson = lessons.find((each) => each.name === state.lesson) ?? lessons[0];
    list.replaceChildren(h2("Lessons"), shelf("Lessons", [{ name: "All lessons", items: lessons.map((each) => ({ key: each.name, label: each.title })) }], lesson.name, (name) => update({ lesson: name })));
    shown = [];
    active = null;
    const nodes = (when) => lesson.content.filter((node) => Array.isArray(node) && node[0] === "question" && node[1].when === when);
    const body = lesson.content.filter((node) => !(Array.isArray(node) && node[0] === "question"));
    const quiz = (title, found) => (found.length ? [html("section", { class: "questions" }, h2(title), found.map(([, attributes, children]) => question(attributes, children)))] : []);
    text.replaceChildren(html("h1", {}, lesson.title), ...quiz("Before you start", nodes("before")), ...drawDocument(body, { view: (attributes, children) => liveView(attributes, children, data) }), ...quiz("Now that you know", nodes("after")));
  }
  return draw;
}

// The numbers and the code of a lesson are those of its first live view.
const table = () => (shown.length ? shown[0].view.table(shown[0].state) : { head: ["lesson"], rows: [] });
const python = () => shown.map(({ view, state }) => view.python(state)).join("\n") || "import regard\n";

export const lessonsView = { title: "Lessons", read, write, mount, why: (_, key, update, data) => active?.view.why(active.state, key, update, data) ?? null, table, python };

// The views that a lesson can have; app.js passes them, because it imports all views.
export function offer(known) { views = known; }
