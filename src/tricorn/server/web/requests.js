// The requests that live, and the end of one.

import { json } from "./api.js";
import { $, el, number, seconds, whole } from "./dom.js";

const SHOWN = 200;
const CONFIRM_MS = 4000;
const GENERATES = new Set(["tokenizing", "waiting", "generating"]);

// Brings the rows of a table up to date, and leaves those alone that stay: focus and clicks must not get lost.
function update(table, found, key, make) {
  const body = table.tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = found.map((each) => {
    const row = rows.get(String(key(each))) ?? make(each);
    row.dataset.key = key(each);
    row.fill(each);
    return row;
  });
  for (const row of [...body.rows]) if (!wanted.includes(row)) row.remove();
  wanted.forEach((row, place) => body.rows[place] !== row && body.insertBefore(row, body.rows[place] ?? null));
}

function row(columns, ...more) {
  const cells = columns.map(([label, kind]) => el("td", { class: kind, "data-label": label || undefined }));
  const node = el("tr", {}, ...cells, ...more);
  node.fill = (each) => columns.forEach(([, , text], place) => {
    const said = text(each);
    if (cells[place].textContent !== said) cells[place].textContent = said;
  });
  return node;
}

function nothing(table, text) {
  const none = el("tr", {}, el("td", { class: "none", colspan: table.tHead.rows[0].cells.length }, text));
  none.dataset.key = "none";
  none.fill = () => {};
  return none;
}

const REQUEST = [
  ["", "id", ({ id }) => id],
  ["Route", "", ({ route }) => route],
  ["Phase", "", ({ phase }) => phase],
  ["Age", "n", ({ age }) => seconds(age)],
  ["Prompt", "n", (each) => whole(each.prompt_tokens)],
  ["Output", "n", (each) => whole(each.output_tokens)],
  ["Tokens/s", "n", ({ rate }) => number(rate ?? null)],
];

const SEQUENCE = [
  ["", "id", ({ id }) => id],
  ["Phase", "", ({ phase }) => phase ?? "waiting"],
  ["Prompt", "n", (each) => whole(each.prompt_tokens)],
  ["Cached", "n", (each) => whole(each.cached_tokens)],
  ["Computed", "n", (each) => whole(each.computed_tokens ?? 0)],
  ["Output", "n", (each) => `${whole(each.output_tokens)} of ${whole(each.max_tokens)}`],
  ["Pages", "n", (each) => whole(each.pages?.length ?? 0)],
  ["Priority", "n", (each) => whole(each.priority)],
];

export class Requests {
  constructor() {
    this.past = new Map(); // output tokens by number, as they were a moment ago
  }

  show({ server, engine }) {
    const now = performance.now() / 1000;
    const live = server.requests.filter(({ phase }) => GENERATES.has(phase));
    for (const each of live) this.rate(each, now);
    this.past = new Map([...this.past].filter(([number]) => live.some((each) => each.number === number)));
    const { sequences, capacity } = server.gate;
    $("request-facts").textContent = `${whole(live.length)} live, ${whole(sequences)} of ${whole(capacity)} places taken`;
    this.fill($("requests"), live, (each) => each.number, (each) => this.row(each), "No request is under way");
    const all = engine ? [...engine.requests.running, ...engine.requests.waiting] : [];
    this.fill($("sequences"), all, (each) => each.id, () => row(SEQUENCE), engine ? "The engine is idle" : "The engine does not answer now");
  }

  fill(table, found, key, make, empty) {
    const shown = found.slice(0, SHOWN);
    if (shown.length) update(table, shown, key, make);
    else update(table, [{}], () => "none", () => nothing(table, empty));
  }

  rate(each, now) {
    const seen = (this.past.get(each.number) ?? []).filter(({ at }) => now - at < 5);
    const [first] = seen;
    seen.push({ at: now, tokens: each.output_tokens });
    this.past.set(each.number, seen);
    if (first && each.phase === "generating") each.rate = (each.output_tokens - first.tokens) / (now - first.at);
  }

  row(each) {
    const button = el("button", { type: "button", class: "small danger", "aria-label": `Abort ${each.id}` }, "Abort");
    let timer = null;
    button.addEventListener("click", () => {
      clearTimeout(timer);
      if (button.textContent === "Abort") {
        button.textContent = "Really abort?";
        button.setAttribute("aria-label", `Really abort ${each.id}?`);
        timer = setTimeout(() => this.reset(button, each), CONFIRM_MS);
      } else this.abort(each, button);
    });
    return row(REQUEST, el("td", { class: "act" }, button));
  }

  reset(button, each) {
    button.textContent = "Abort";
    button.setAttribute("aria-label", `Abort ${each.id}`);
  }

  async abort(each, button) {
    button.disabled = true;
    try {
      await json("debug/abort", { admin: true, body: { number: each.number } });
      $("abort-status").textContent = `${each.id} is aborted`;
      $("requests-title").focus();
    } catch (error) {
      $("abort-status").textContent = `${each.id} is not aborted: ${error.message}`;
      button.disabled = false;
      this.reset(button, each);
      button.title = error.message;
    }
  }
}
