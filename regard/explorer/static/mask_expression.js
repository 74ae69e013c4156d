// Mask expressions, such as causal() & window(before=3) | global_tokens(1): parsed, never executed.
// A mask is a function (i, keys) -> sorted, disjoint intervals [start, stop) of visible key positions.

const MAX_DEPTH = 100;
const MAX_NUMBER = 2 ** 40;

export class MaskError extends Error {
  constructor(message, at, length = 1) {
    super(message);
    this.at = at; // where in the text, for the mark in the input field
    this.length = length;
  }
}

const clip = (start, stop, keys) => {
  const low = Math.max(0, start);
  const high = Math.min(keys, stop);
  return low < high ? [[low, high]] : [];
};

// The union of intervals that are sorted by their start.
function union(intervals) {
  const merged = [];
  for (const [start, stop] of intervals) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], stop);
    else merged.push([start, stop]);
  }
  return merged;
}

function either(a, b) {
  return union([...a, ...b].sort((x, y) => x[0] - y[0]));
}

function both(a, b) {
  const found = [];
  for (let x = 0, y = 0; x < a.length && y < b.length;) {
    const low = Math.max(a[x][0], b[y][0]);
    const high = Math.min(a[x][1], b[y][1]);
    if (low < high) found.push([low, high]);
    if (a[x][1] < b[y][1]) x += 1;
    else y += 1;
  }
  return found;
}

function inverse(a, keys) {
  const found = [];
  let from = 0;
  for (const [start, stop] of a) {
    if (start > from) found.push([from, start]);
    from = stop;
  }
  if (from < keys) found.push([from, keys]);
  return found;
}

// Runs of equal numbers become one interval each.
const matching = (ids, wanted, keys) => {
  const found = [];
  for (let j = 0; j < Math.min(ids.length, keys); j += 1) if (ids[j] === wanted) found.push([j, j + 1]);
  return union(found);
};

// Data of several sequences: the page draws the first.
const firstRow = (rows) => (Array.isArray(rows[0]) ? rows[0] : rows);

const multiples = (first, step, stop) => {
  const found = [];
  for (let j = first; j < stop; j += step) found.push([j, j + 1]);
  return step === 1 ? union(found) : found;
};

const whole = (least, what) => ({ kind: "integer", least, what });
const limit = (what) => ({ kind: "limit", least: 0, what });

const chunkRow = ({ size, before, after }) => (i, keys) => {
  const own = Math.floor(i / size);
  return clip(before === null ? 0 : (own - before) * size, after === null ? keys : (own + after + 1) * size, keys);
};

// name: parameters in order, with defaults, and the row function. The names and rules are those of regard.core.masks.forms.
export const FORMS = {
  full: { summary: "every query sees every key", parameters: {}, row: () => (i, keys) => clip(0, keys, keys) },
  causal: { summary: "j <= i", parameters: {}, row: () => (i, keys) => clip(0, i + 1, keys) },
  window: {
    summary: "i - before <= j <= i + after",
    parameters: { before: { ...limit("neighbours"), default: 0 }, after: { ...limit("neighbours"), default: 0 } },
    row: ({ before, after }) => (i, keys) => clip(before === null ? 0 : i - before, after === null ? keys : i + after + 1, keys),
  },
  dilated: {
    summary: "(i - j) is a multiple of step",
    parameters: { step: whole(1, "positions") },
    row: ({ step }) => (i, keys) => multiples(((i % step) + step) % step, step, keys),
  },
  strided: {
    summary: "j = i, or j <= i and j is a multiple of step",
    parameters: { step: whole(1, "positions") },
    row: ({ step }) => (i, keys) => either(multiples(0, step, Math.min(i + 1, keys)), clip(i, i + 1, keys)),
  },
  blocks: {
    summary: "j // size = i // size",
    parameters: { size: whole(1, "positions") },
    row: ({ size }) => chunkRow({ size, before: 0, after: 0 }),
  },
  chunks: {
    summary: "-before <= j // size - i // size <= after",
    parameters: { size: whole(1, "positions"), before: { ...limit("chunks"), default: 0 }, after: { ...limit("chunks"), default: 0 } },
    row: chunkRow,
  },
  global_tokens: {
    summary: "i < n or j < n",
    parameters: { n: whole(0, "positions") },
    row: ({ n }) => (i, keys) => (i < n ? clip(0, keys, keys) : clip(0, n, keys)),
  },
  prefix: {
    summary: "j < n",
    parameters: { n: whole(0, "positions") },
    row: ({ n }) => (i, keys) => clip(0, n, keys),
  },
  padding: {
    summary: "j < length: the sequence has this number of real keys (of several, the first is drawn)",
    parameters: { lengths: { kind: "list", what: "lengths" }, side: { kind: "word", words: ["right", "left"], default: "right" }, width: { ...limit("keys"), default: null } },
    row: ({ lengths, side, width }) => (i, keys) => (side === "right" ? clip(0, lengths[0], keys) : clip((width ?? keys) - lengths[0], keys, keys)),
  },
  key_padding: {
    summary: "real[j] is not 0: the attention_mask of a tokenizer (of several rows, the first is drawn)",
    parameters: { real: { kind: "rows", what: "zeros and ones" } },
    row: ({ real }) => (i, keys) => { const own = firstRow(real); return union(own.slice(0, keys).flatMap((seen, j) => (seen ? [[j, j + 1]] : []))); },
  },
  documents: {
    summary: "ids[i] = ids[j]: packed sequences (of several rows, the first is drawn)",
    parameters: { ids: { kind: "rows", what: "ids" } },
    row: ({ ids }) => (i, keys) => { const own = firstRow(ids); return matching(own, own[i], keys); },
  },
};

function tokenize(source) {
  const pattern = /\s*(?:([A-Za-z_]\w*)|(-?\d+(?:\.\d+)?)|("\w*"|'\w*')|([&|~(),=[\]]))/y;
  const tokens = [];
  while (pattern.lastIndex < source.length) {
    const from = pattern.lastIndex;
    const found = pattern.exec(source);
    if (!found) {
      const at = from + source.slice(from).search(/\S/);
      if (at < from) break;
      throw new MaskError(`${JSON.stringify(source[at])} is not part of a mask expression`, at);
    }
    const [word, number, text, symbol] = found.slice(1);
    const value = word ?? number ?? text ?? symbol;
    tokens.push({ kind: word ? "word" : number ? "number" : text ? "text" : symbol, value, at: pattern.lastIndex - value.length });
  }
  tokens.push({ kind: "end", value: "the end", at: source.length });
  return tokens;
}

// The nearest known name, by the number of single-character edits.
export function nearest(name, known) {
  const distance = (a, b) => {
    let row = Array.from({ length: b.length + 1 }, (_, j) => j);
    for (let i = 1; i <= a.length; i += 1) {
      const next = [i];
      for (let j = 1; j <= b.length; j += 1) next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1])));
      row = next;
    }
    return row[b.length];
  };
  const best = known.map((other) => [distance(name, other), other]).sort((a, b) => a[0] - b[0])[0];
  return best && best[0] <= Math.max(1, name.length / 3) ? best[1] : null;
}

// Parse an expression. Returns { row: (i, keys) => intervals, needs: positions that documents cover, or null }.
export function parseMask(text) {
  if (!text.trim()) throw new MaskError("write a mask, for instance causal() & window(before=3)", 0);
  const tokens = tokenize(text);
  let place = 0;
  let covered = Infinity;
  let given = false;
  const peek = () => tokens[place];
  const take = (kind) => {
    const token = tokens[place];
    if (token.kind === "end" && (kind === ")" || kind === "]")) throw new MaskError(`"${kind}" is missing at the end`, token.at);
    if (token.kind !== kind) throw new MaskError(`expected ${kind === "word" ? "the name of a mask" : `"${kind}"`}, found ${token.kind === "end" ? "the end" : `"${token.value}"`}`, token.at, token.value.length);
    place += 1;
    return token;
  };

  function value() {
    const token = peek();
    if (token.kind === "[") {
      take("[");
      const items = [];
      while (peek().kind !== "]") {
        if (peek().kind === "end") take("]");
        items.push(value());
        if (peek().kind !== "]" && peek().kind !== "end") take(",");
      }
      take("]");
      return items;
    }
    if (token.kind === "text") return take("text").value.slice(1, -1);
    if (token.kind === "word" && token.value === "None") { take("word"); return null; }
    if (token.kind !== "number") throw new MaskError(`expected a number, None or a list, found "${token.value}"`, token.at, token.value.length);
    const number = Number(take("number").value);
    if (Math.abs(number) > MAX_NUMBER) throw new MaskError(`${number} is larger than any position`, token.at, token.value.length);
    return number;
  }

  function check(name, parameter, rule, given, token) {
    const fail = (expected) => { throw new MaskError(`${name}(${parameter}) needs ${expected}, not ${JSON.stringify(given)}`, token.at, token.value.length); };
    const wholes = (list) => Array.isArray(list) && list.length > 0 && list.every((item) => Number.isInteger(item) && item >= 0);
    if (rule.kind === "word") {
      if (!rule.words.includes(given)) fail(rule.words.map((word) => JSON.stringify(word)).join(" or "));
    } else if (rule.kind === "rows") {
      if (!wholes(given) && !(Array.isArray(given) && given.length && given.every(wholes))) fail("a list of ids, such as [0, 0, 1]");
    } else if (rule.kind === "list") {
      if (!wholes(given)) fail(`a list of ${rule.what}, such as [3]`);
    } else if (!(given === null && rule.kind === "limit") && !(Number.isInteger(given) && given >= rule.least)) {
      fail(`a whole number of ${rule.what}, at least ${rule.least}${rule.kind === "limit" ? ", or None" : ""}`);
    }
  }

  function call() {
    const token = take("word");
    const name = token.value;
    const form = Object.hasOwn(FORMS, name) ? FORMS[name] : null;
    if (!form) {
      const near = nearest(name, Object.keys(FORMS));
      const hint = name === "random_links" ? "; it is drawn by Python: regard masks" : near ? `; did you mean ${near}?` : "";
      throw new MaskError(`there is no mask ${name}${hint}`, token.at, name.length);
    }
    if (peek().kind !== "(") throw new MaskError(`${name} is a function that makes a mask; write ${name}(...)`, token.at, name.length);
    take("(");
    const names = Object.keys(form.parameters);
    const settings = {};
    let position = 0;
    while (peek().kind !== ")") {
      if (peek().kind === "end") take(")");
      const start = peek();
      let parameter = names[position];
      if (start.kind === "word" && tokens[place + 1].kind === "=") {
        parameter = take("word").value;
        take("=");
        if (!names.includes(parameter)) throw new MaskError(`${name} has no setting ${parameter}; it takes ${names.join(", ") || "nothing"}`, start.at, parameter.length);
      } else if (position >= names.length) {
        throw new MaskError(`${name} takes ${names.length ? names.join(", ") : "no settings"}`, start.at, start.value.length);
      }
      if (Object.hasOwn(settings, parameter)) throw new MaskError(`${name} is given ${parameter} twice`, start.at, start.value.length);
      settings[parameter] = value();
      check(name, parameter, form.parameters[parameter], settings[parameter], start);
      position += 1;
      if (peek().kind !== ")" && peek().kind !== "end") take(",");
    }
    take(")");
    for (const parameter of names) {
      if (Object.hasOwn(settings, parameter)) continue;
      if (!("default" in form.parameters[parameter])) throw new MaskError(`${name} needs ${parameter}: ${name}(${parameter}=...)`, token.at, name.length);
      settings[parameter] = form.parameters[parameter].default;
    }
    // documents and key_padding know the positions of their data only
    for (const parameter of names) if (form.parameters[parameter].kind === "rows") covered = Math.min(covered, firstRow(settings[parameter]).length);
    if (form.given) [covered, given] = [Math.min(covered, form.keys), true];
    return form.row(settings);
  }

  function unary(depth) {
    if (depth > MAX_DEPTH) throw new MaskError(`the expression nests deeper than ${MAX_DEPTH} levels`, peek().at);
    if (peek().kind === "~") {
      take("~");
      const inner = unary(depth + 1);
      return (i, keys) => inverse(inner(i, keys), keys);
    }
    if (peek().kind === "(") {
      take("(");
      const inner = alternatives(depth + 1);
      take(")");
      return inner;
    }
    const token = peek();
    if (token.kind === "word" && ["and", "or", "not"].includes(token.value)) {
      throw new MaskError("masks combine with & | ~, not with and, or, not", token.at, token.value.length);
    }
    return call();
  }

  const chain = (part, symbol, combine) => (depth) => {
    let left = part(depth);
    while (peek().kind === symbol) {
      take(symbol);
      const [first, second] = [left, part(depth)];
      left = (i, keys) => combine(first(i, keys), second(i, keys));
    }
    return left;
  };
  const alternatives = (depth) => chain(chain(unary, "&", both), "|", either)(depth);

  const row = alternatives(0);
  const rest = peek();
  if (rest.kind !== "end") {
    const hint = ["and", "or"].includes(rest.value) ? "masks combine with & | ~" : `unexpected ${rest.value}`;
    throw new MaskError(hint, rest.at, rest.value.length);
  }
  return { row, covered, given };
}

// Completions before the caret: mask names, or settings of the call there.
export function completeMask(text, caret) {
  const before = text.slice(0, caret);
  const word = /[A-Za-z_]*$/.exec(before)[0];
  const call = /([A-Za-z_]+)\(([^()]*)$/.exec(before);
  const options = call && Object.hasOwn(FORMS, call[1])
    ? Object.keys(FORMS[call[1]].parameters).filter((name) => !call[2].includes(`${name}=`)).map((name) => ({ label: `${name}=`, insert: `${name}=`, summary: `setting of ${call[1]}` }))
    : Object.entries(FORMS).map(([name, form]) => ({ label: name, insert: Object.keys(form.parameters).length ? `${name}(` : `${name}()`, summary: form.summary }));
  return options.filter(({ label }) => label.startsWith(word) && label !== word).slice(0, 6)
    .map(({ label, insert, summary }) => ({ label, summary, text: text.slice(0, caret - word.length) + insert + text.slice(caret), caret: caret - word.length + insert.length }));
}

// The mask functions that an expression calls, for the copied import line.
export const maskNames = (text) => Object.keys(FORMS).filter((name) => !FORMS[name].given && new RegExp(`\\b${name}\\(`).test(text)).join(", ");

// Queries are aligned to the end of the keys: query r is at position keys - queries + r.
export const visibleRow = (mask, r, queries, keys) => mask.row(keys - queries + r, keys);

export function denseMask(mask, queries, keys) {
  return Array.from({ length: queries }, (_, r) => {
    const cells = Array(keys).fill(false);
    for (const [start, stop] of visibleRow(mask, r, queries, keys)) cells.fill(true, start, stop);
    return cells;
  });
}

export function countPairs(mask, queries, keys) {
  let pairs = 0;
  for (let r = 0; r < queries; r += 1) for (const [start, stop] of visibleRow(mask, r, queries, keys)) pairs += stop - start;
  return pairs;
}

// Exact numbers of visible pairs in a grid of at most `most` x `most` blocks.
export function blockCounts(mask, queries, keys, most, size = Math.ceil(Math.max(queries, keys) / most)) {
  const rows = Math.ceil(queries / size);
  const columns = Math.ceil(keys / size);
  const counts = Array.from({ length: rows }, () => new Float64Array(columns));
  for (let r = 0; r < queries; r += 1) {
    const into = counts[Math.floor(r / size)];
    for (const [start, stop] of visibleRow(mask, r, queries, keys)) {
      const first = Math.floor(start / size);
      const last = Math.floor((stop - 1) / size);
      for (let c = first; c <= last; c += 1) into[c] += Math.min(stop, (c + 1) * size) - Math.max(start, c * size);
    }
  }
  return { size, rows, columns, counts };
}

// How many blocks of a size are full, partly visible and empty.
export function blockTable(mask, queries, keys, size) {
  const { rows, columns, counts } = blockCounts(mask, queries, keys, 0, size);
  const found = { size, full: 0, partial: 0, empty: 0 };
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < columns; c += 1) {
      const area = Math.min(size, queries - r * size) * Math.min(size, keys - c * size);
      found[counts[r][c] === 0 ? "empty" : counts[r][c] === area ? "full" : "partial"] += 1;
    }
  }
  return found;
}

// Masks from one's own code: each becomes a name without settings, for instance my_mask().
export function addMask(name, { queries, keys: size, rows }) {
  FORMS[name] = { summary: "a mask from your code", given: true, keys: size, parameters: {}, row: () => (i, keys) => rows[i - keys + queries] ?? [] };
}
