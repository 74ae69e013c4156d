// Data that the views do not compute: embedded in the page (the export), or from the server.

const kept = new Map();

// Data by name: embedded in the page, or asked once from the server. Rejects with a sentence to show.
export function load(data, name) {
  if (!kept.has(name)) {
    const found = Object.hasOwn(data, name) ? Promise.resolve(data[name]) : data.api ? ask(`/api/${name}`) : Promise.reject(new Error("This page has no server. Start one with: regard explore"));
    kept.set(name, found);
    found.catch(() => kept.delete(name));
  }
  return kept.get(name);
}

// A request that was cancelled is no failure.
const noAnswer = (error) => { throw error.name === "AbortError" ? error : new Error("The server does not answer. Is regard explore still running?"); };

async function answerOf(response) {
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error ?? "The server refused the request.");
  return answer;
}

export async function ask(address, body = null) {
  const options = body === null ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return answerOf(await fetch(address, options).catch(noAnswer));
}

const client = () => {
  kept.set("client", kept.get("client") ?? crypto.randomUUID());
  return kept.get("client");
};

const queues = new Map();

// A long computation. The server runs one at a time for a client; the others wait.
export async function compute(task, body, progress, signal) {
  const before = queues.get(task);
  let done;
  queues.set(task, new Promise((resolve) => { done = resolve; }));
  try {
    await before;
    signal?.throwIfAborted();
    return await run(task, body, progress, signal);
  } finally {
    done();
  }
}

// progress({ text, done, total }) is called as events arrive; aborting the signal cancels it.
async function run(task, body, progress, signal) {
  const response = await fetch(`/api/jobs/${task}`, { method: "POST", headers: { "Content-Type": "application/json", "X-Client": client() }, body: JSON.stringify(body), signal }).catch(noAnswer);
  if (!response.ok) return answerOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read().catch(noAnswer);
    if (done) throw new Error("The server ended the computation without an answer.");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const kind = /^event: (\w+)$/m.exec(event)?.[1];
      const content = JSON.parse(/^data: (.*)$/m.exec(event)[1]);
      if (kind === "progress") progress(content);
      else if (kind === "error") throw new Error(content.error);
      else if (kind === "result") return content;
    }
  }
}
