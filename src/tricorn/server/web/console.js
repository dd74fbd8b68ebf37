// The page as a whole: which view is shown, what is asked of the server and when, keys and colours.

import { keys, json, readiness, text } from "./api.js";
import { Chat } from "./chat.js";
import { $, el } from "./dom.js";
import { Load } from "./load.js";
import { History } from "./metrics.js";
import { Pages } from "./pages.js";
import { Requests } from "./requests.js";
import { Tree } from "./tree.js";

const VIEWS = ["chat", "load", "cache", "requests"];
const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const TREE_EVERY = 2; // rounds: the engine takes some milliseconds to tell its tree

const history = new History();
const load = new Load(history);
const chat = new Chat(() => openKeys("api-key"));
const pages = new Pages();
const tree = new Tree();
const requests = new Requests();
let current = "chat";
let round = 0;
let refused = null; // what the server said when it was last asked what is inside

// Views

function route() {
  const wanted = location.hash.slice(1);
  if (wanted && !VIEWS.includes(wanted)) return; // the link to the content
  current = wanted || "chat";
  for (const view of VIEWS) $(`view-${view}`).hidden = view !== current;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${current[0].toUpperCase()}${current.slice(1)} · Tricorn`;
  load.draw();
  look();
}

// What the server says

function state(word, kind) {
  if ($("status").textContent !== word) $("status").textContent = word;
  $("status").dataset.state = kind;
}

const WANTED = { "api-key": "This server asks for an API key.", "admin-key": "The admin key is needed to look inside and to abort." };

function trouble(error, field) {
  const box = $("trouble");
  const locked = error?.status === 401;
  const message = error?.message ?? "";
  const said = locked ? WANTED[field] : message && `${message[0].toUpperCase()}${message.slice(1)}.`;
  box.hidden = !error;
  if (box.dataset.said === said) return;
  box.dataset.said = said;
  const button = locked ? [el("button", { type: "button", class: "small", onclick: () => openKeys(field) }, "Enter keys")] : [];
  box.replaceChildren(el("span", {}, said), ...button);
}

// Without what it shows, a view would be an empty frame.
function lock(is) {
  for (const view of ["cache", "requests"]) $(`view-${view}`).classList.toggle("locked", is);
}

async function look(deep = true) {
  const mine = ++round;
  let wrong = null;
  const ready = await readiness(AbortSignal.timeout(PATIENCE_MS));
  try {
    history.add(performance.now() / 1000, await text("metrics", { signal: AbortSignal.timeout(PATIENCE_MS) }));
    load.head();
    load.draw();
    if (!$("model").options.length) served(await chat.models());
  } catch (error) {
    wrong = [error, "api-key"];
  }
  if (ready === "no connection") state(ready, "trouble");
  else if (ready === "ready" && wrong?.[0].status === 401) state("locked", "waiting");
  else state(ready, ready === "ready" ? "ready" : "waiting");
  const within = current === "cache" || current === "requests";
  if (within && deep && wrong?.[0].status !== 0) {
    refused = null;
    try {
      const found = await json(current === "cache" ? "debug/state?tree=1" : "debug/state", {
        admin: true,
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      if (mine !== round) return;
      lock(false);
      inside(found);
    } catch (error) {
      refused = [error, "admin-key"];
      if (error.status === 401 || error.status === 403) lock(true);
    }
  }
  if (mine === round) trouble(...(wrong ?? (within ? refused : null) ?? [null]));
}

function inside(found) {
  if (current === "requests") requests.show(found);
  if (current === "cache" && found.engine?.tree) {
    pages.show(found.engine.pages);
    tree.show(found.engine.tree);
    const { total, free } = found.engine.pages;
    $("cache-facts").textContent = `${(total - free).toLocaleString("en")} of ${total.toLocaleString("en")} pages in use or cached`;
  }
}

function served(models) {
  $("served").textContent = models.map(({ id }) => id).join(", ");
}

async function keepLooking() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    if (!document.hidden) await look(current !== "cache" || round % TREE_EVERY === 0);
  }
}

// Keys

function openKeys(field = "api-key") {
  $("api-key").value = keys.get("api");
  $("admin-key").value = keys.get("admin");
  if (!$("keys").open) $("keys").showModal();
  $(field).focus();
}

function keysChanged() {
  $("keys").close();
  history.samples = [];
  look();
}

$("open-keys").addEventListener("click", () => openKeys());
$("cancel-keys").addEventListener("click", () => $("keys").close());
$("forget-keys").addEventListener("click", () => {
  keys.forget();
  keysChanged();
});
$("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.set("api", $("api-key").value.trim());
  keys.set("admin", $("admin-key").value.trim());
  keysChanged();
});

// Colours

const THEMES = ["auto", "light", "dark"];

const theme = () => THEMES.find((each) => each === sessionStorage.getItem("tricorn-theme")) ?? "auto";

function paint(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  sessionStorage.setItem("tricorn-theme", theme);
  $("theme").replaceChildren(el("span", { class: "muted" }, "Theme "), theme);
  pages.draw();
}

$("theme").addEventListener("click", () => {
  paint(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pages.draw());

lock(true);
paint(theme());
addEventListener("hashchange", route);
route();
keepLooking();
