// A conversation with the model, and what each answer cost.

import { events, json } from "./api.js";
import { $, el, number, seconds, whole } from "./dom.js";

const FENCE = /```[^\n]*\n([\s\S]*?)(?:```|$)/g;

// Text, with what stands between ``` fences as code.
function parts(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(FENCE)) {
    if (found.index > end) nodes.push(el("div", { class: "text" }, text.slice(end, found.index).trimEnd()));
    nodes.push(el("pre", { tabindex: 0 }, el("code", {}, found[1])));
    end = found.index + found[0].length;
  }
  const rest = text.slice(end);
  if (rest.trim() || !nodes.length) nodes.push(el("div", { class: "text" }, end ? rest.trimStart() : rest));
  return nodes;
}

// One answer: what came so far, and when.
class Answer {
  constructor() {
    Object.assign(this, { text: "", thought: "", tokens: 0, usage: null, reason: null, began: performance.now(), first: null, last: null });
  }

  take(event) {
    const choice = event.choices?.[0];
    if (event.usage) this.usage = event.usage;
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta ?? {};
    const tokens = choice.token_ids?.length ?? (content || reasoning ? 1 : 0);
    if (tokens) {
      this.last = performance.now();
      this.first ??= this.last;
      this.opening ??= tokens;
      this.tokens += tokens;
    }
    this.text += content ?? "";
    this.thought += reasoning ?? "";
    this.reason = choice.finish_reason ?? this.reason;
  }

  // Name and text of each figure. The speed is that of the tokens after the first ones.
  get figures() {
    const took = (this.last - this.first) / 1000;
    const speed = took > 0 ? (this.tokens - this.opening) / took : null;
    const found = [
      ["tokens/s", number(speed)],
      ["first token", this.first === null ? "…" : seconds((this.first - this.began) / 1000)],
      ["tokens", whole(this.usage?.completion_tokens ?? this.tokens)],
    ];
    if (this.usage) {
      found.push(["prompt", whole(this.usage.prompt_tokens)]);
      found.push(["cached", whole(this.usage.prompt_tokens_details?.cached_tokens ?? 0)]);
    }
    if (this.reason && this.reason !== "stop") found.push(["", `ended by ${this.reason}`]);
    return found;
  }
}

export class Chat {
  constructor(onRefused) {
    this.onRefused = onRefused;
    this.messages = [];
    this.stopping = null;
    this.empty = $("messages").firstElementChild;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("input", () => this.grow());
    $("stop").addEventListener("click", () => this.stopping?.abort());
    $("clear").addEventListener("click", () => this.clear());
    const wide = matchMedia("(min-width: 761px)");
    $("settings").open = wide.matches;
    wide.addEventListener("change", () => ($("settings").open = wide.matches));
  }

  async models() {
    const { data } = await json("v1/models");
    $("model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    return data;
  }

  grow() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }

  clear() {
    this.stopping?.abort();
    this.messages = [];
    $("messages").replaceChildren(this.empty);
    $("prompt").focus();
  }

  body() {
    const system = $("system").value.trim();
    const body = {
      model: $("model").value || undefined,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
    };
    for (const [name, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"], ["seed", "seed"]]) {
      if ($(id).value !== "") body[name] = Number($(id).value);
    }
    return body;
  }

  async send() {
    const text = $("prompt").value.trim();
    if (!text || this.stopping) return;
    $("prompt").value = "";
    this.grow();
    if (!this.messages.length) $("messages").replaceChildren();
    const mine = this.messages;
    const asked = { role: "user", content: text };
    mine.push(asked);
    this.put("You", "user", parts(text));
    const answer = new Answer();
    const shown = this.put("Model", "live", []);
    const stopping = (this.stopping = new AbortController());
    this.busy(true);
    const drawing = this.draw(answer, shown);
    let failure = null;
    try {
      for await (const event of events("v1/chat/completions", { body: this.body(), signal: stopping.signal })) answer.take(event);
    } catch (error) {
      if (error.name === "AbortError") answer.reason = "you";
      else failure = error;
    }
    drawing.stop();
    shown.classList.remove("live");
    if (failure) this.fail(failure, shown);
    if (answer.text) mine.push({ role: "assistant", content: answer.text });
    else mine.splice(mine.indexOf(asked), 1); // it was not answered, and a turn of the user is not followed by another
    this.stopping = null;
    this.busy(false);
    const figures = answer.figures.map(([name, value]) => `${name} ${value}`).join(", ");
    $("chat-status").textContent = failure ? `Failed: ${failure.message}` : `Answered: ${figures}`;
  }

  fail(error, shown) {
    shown.append(el("p", { class: "error" }, error.message));
    if (error.status === 401) this.onRefused(error);
  }

  put(who, kind, nodes) {
    const shown = el("article", { class: `message ${kind}`, "aria-label": who }, el("h3", {}, who), ...nodes);
    $("messages").append(shown);
    $("messages").scrollTop = $("messages").scrollHeight;
    return shown;
  }

  // Shows an answer as it grows, at most once in a frame.
  draw(answer, shown) {
    let seen = -1;
    let live = true;
    const frame = () => {
      const size = answer.tokens + answer.text.length + (answer.usage ? 1 : 0);
      if (size !== seen) this.render(answer, shown);
      seen = size;
      if (live) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    return {
      stop: () => {
        live = false;
        this.render(answer, shown);
      },
    };
  }

  render(answer, shown) {
    const box = $("messages");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const figures = answer.figures.map(([name, value]) => el("span", {}, el("b", {}, value), name && ` ${name}`));
    const thought = answer.thought ? [el("div", { class: "thought" }, answer.thought)] : [];
    shown.replaceChildren(shown.firstElementChild, ...thought, ...parts(answer.text), el("p", { class: "figures" }, ...figures));
    if (follows) box.scrollTop = box.scrollHeight;
  }

  busy(is) {
    $("messages").setAttribute("aria-busy", is); // a screen reader then reads the answer as a whole
    $("send").hidden = is;
    $("stop").hidden = !is;
    const focused = [$("send"), $("stop"), document.body].includes(document.activeElement);
    if (focused) $("prompt").focus();
    if (is) $("chat-status").textContent = "The model answers";
  }
}
