// The way to the server: keys, requests, and answers that come in pieces.

const KEYS = ["api", "admin"];

export const keys = {
  get: (name) => sessionStorage.getItem(`tricorn-${name}-key`) ?? "",
  set(name, value) {
    if (value) sessionStorage.setItem(`tricorn-${name}-key`, value);
    else sessionStorage.removeItem(`tricorn-${name}-key`);
  },
  forget: () => KEYS.forEach((name) => keys.set(name, "")),
};

// What the server says instead of an answer. A status of 0: it cannot be reached.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// `admin` tells which key a route wants; whoever has only one gives that.
function headers(admin) {
  const key = admin ? keys.get("admin") || keys.get("api") : keys.get("api") || keys.get("admin");
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, { admin = false, body, signal } = {}) {
  const options = { headers: headers(admin), signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, error.name === "TimeoutError" ? "the server does not answer" : "the server cannot be reached");
  }
  if (!answer.ok) throw new Refusal(answer.status, await said(answer));
  return answer;
}

async function said(answer) {
  try {
    const { error } = await answer.json();
    return error?.message ?? String(error);
  } catch {
    return `status ${answer.status}`;
  }
}

// "ready", or why not. Open to anybody.
export async function readiness(signal) {
  try {
    const answer = await fetch("ready", { signal, cache: "no-store", credentials: "omit" });
    return (await answer.json()).status ?? "unknown";
  } catch {
    return "no connection";
  }
}

export const text = async (path, options) => (await ask(path, options)).text();
export const json = async (path, options) => (await ask(path, options)).json();

// The values of a stream of server-sent events, up to its end. Throws a Refusal that comes in place of one.
export async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(answer.status, event.error.message);
      yield event;
    }
  }
}
