// The prefix tree as a picture: each run of tokens is a bar, which begins where the run that it goes on from ends.

import { $, el, number, still, svg, whole } from "./dom.js";
import { step } from "./chart.js";

const AXIS = 22;
const MOVE_MS = 180;

const shade = (hits) => (hits === 0 ? "h0" : hits < 4 ? "h1" : hits < 16 ? "h2" : "h3");

// Gives each run its place: `start` and `end` in tokens, `top` and `bottom` in leaves.
export function arrange(runs) {
  const nodes = runs.map((run) => ({ ...run, children: [], leaves: 0 }));
  const first = { page: -1, start: 0, end: 0, tokens: 0, children: [], parent: null };
  for (const node of nodes) {
    node.parent = nodes[node.parent] ?? first;
    node.parent.children.push(node);
    node.start = node.parent.end;
    node.end = node.start + node.tokens;
  }
  for (const node of nodes.toReversed()) {
    node.leaves = Math.max(1, node.leaves);
    node.far = Math.max(node.end, ...node.children.map(({ far }) => far));
    if (node.parent !== first) node.parent.leaves += node.leaves;
  }
  first.leaves = Math.max(1, first.children.reduce((sum, { leaves }) => sum + leaves, 0));
  first.far = Math.max(1, ...first.children.map(({ far }) => far));
  place(first, 0);
  return { first, nodes };
}

function place(node, top) {
  const left = [[node, top]];
  while (left.length) {
    const [each, at] = left.pop();
    [each.top, each.bottom] = [at, at + each.leaves];
    let below = at;
    each.children.sort((a, b) => b.hits - a.hits || b.far - a.far);
    for (const child of each.children) {
      left.push([child, below]);
      below += child.leaves;
    }
  }
}

const view = ({ start, far, top, bottom }) => ({ start, far, top, bottom });

export class Tree {
  constructor() {
    this.zoomed = this.chosen = -1; // pages: what has them stays the same when the tree is drawn anew
    this.svg = svg("svg", { role: "img", tabindex: 0, onkeydown: (event) => this.key(event) });
    $("tree").append(this.svg);
    $("zoom-in").addEventListener("click", () => this.zoom(this.chosen));
    $("zoom-out").addEventListener("click", () => this.zoom(this.find(this.zoomed).parent?.page ?? -1));
    $("zoom-all").addEventListener("click", () => this.zoom(-1));
    new ResizeObserver(() => this.draw()).observe($("tree"));
    this.show({ runs: [], pages: 0 });
  }

  show({ runs, pages }) {
    Object.assign(this, arrange(runs));
    this.left = pages - runs.reduce((sum, run) => sum + run.pages, 0);
    this.byPage = new Map([this.first, ...this.nodes].map((node) => [node.page, node]));
    this.seen = this.target = view(this.find(this.zoomed));
    this.draw();
    this.list();
  }

  find(page) {
    return this.byPage.get(page) ?? this.first;
  }

  // To a run and what goes on from it; where nothing does, to what it goes on from.
  zoom(page) {
    const found = this.find(page);
    const node = found.children.length || !found.parent ? found : found.parent;
    this.zoomed = node.page;
    [this.from, this.target, this.began] = [this.seen, view(node), performance.now()];
    if (still()) this.seen = this.target;
    this.move();
  }

  move() {
    const done = this.seen === this.target ? 1 : Math.min(1, (performance.now() - this.began) / MOVE_MS);
    const eased = 1 - (1 - done) ** 3;
    const mix = (name) => this.from[name] + (this.target[name] - this.from[name]) * eased;
    this.seen = done === 1 ? this.target : { start: mix("start"), far: mix("far"), top: mix("top"), bottom: mix("bottom") };
    this.draw();
    if (done < 1) requestAnimationFrame(() => this.move());
  }

  draw() {
    const [width, height] = [this.svg.clientWidth, this.svg.clientHeight];
    if (!width) return;
    const { start, far, top, bottom } = this.seen;
    const x = (token) => ((token - start) / (far - start || 1)) * width;
    const y = (leaf) => AXIS + ((leaf - top) / (bottom - top || 1)) * (height - AXIS);
    const parts = this.ticks(x, width, height);
    for (const node of this.nodes) {
      const box = { x: Math.max(x(node.start), -2), y: y(node.top), w: 0, h: 0 };
      box.w = Math.min(x(node.end), width + 2) - box.x;
      box.h = y(node.bottom) - box.y;
      if (box.w > 0.3 && box.y < height && box.y + box.h > AXIS) parts.push(...this.bar(node, box, height));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.tell();
  }

  ticks(x, width, height) {
    const { start, far } = this.seen;
    const apart = Math.max(1, step(far - start, Math.max(2, width / 120)));
    const parts = [];
    for (let token = Math.ceil(start / apart) * apart; token <= far; token += apart) {
      parts.push(svg("line", { class: "tick", x1: x(token), x2: x(token), y1: AXIS - 4, y2: height }));
      const anchor = x(token) < 20 ? "start" : x(token) > width - 60 ? "end" : "middle";
      parts.push(svg("text", { x: x(token), y: 12, "text-anchor": anchor }, token ? whole(token) : "0 tokens"));
    }
    return parts;
  }

  bar(node, { x, y, w, h }, height) {
    const [upper, lower] = [Math.max(y, AXIS), Math.min(y + h, height)];
    const tall = Math.max(lower - upper, 0.5);
    const parts = [
      svg("rect", { class: `run ${shade(node.hits)}`, x, y: upper, width: w, height: tall, "data-page": node.page, "stroke-width": tall > 4 ? 1 : 0,
        onclick: () => this.click(node.page) }),
    ];
    if (node.holders) parts.push(svg("rect", { class: "mark", x, y: upper + tall - Math.min(3, tall / 3), width: w, height: Math.min(3, tall / 3) }));
    const label = node.hits ? `${whole(node.tokens)} tok · ${whole(node.hits)} ${node.hits === 1 ? "hit" : "hits"}` : `${whole(node.tokens)} tok`;
    if (tall > 17 && w > label.length * 6.5 + 12) {
      const on = shade(node.hits) === "h3" ? "on-h3" : "";
      parts.push(svg("text", { class: `label ${on}`, x: Math.max(x, 0) + 6, y: (upper + lower) / 2 + 4 }, label));
    }
    if (node.page === this.chosen) parts.push(svg("rect", { class: "chosen", x: x + 1, y: upper + 1, width: Math.max(1, w - 2), height: Math.max(1, tall - 2) }));
    return parts;
  }

  click(page) {
    this.choose(page);
    this.zoom(page);
  }

  choose(page) {
    this.chosen = page;
    this.draw();
  }

  key(event) {
    const at = this.find(this.chosen);
    const siblings = at.parent?.children ?? [];
    const near = (by) => siblings[siblings.indexOf(at) + by] ?? at;
    const to = {
      ArrowRight: () => this.choose((at.children[0] ?? at).page),
      ArrowLeft: () => this.choose((at.parent === this.first || !at.parent ? at : at.parent).page),
      ArrowUp: () => this.choose(near(-1).page),
      ArrowDown: () => this.choose(near(1).page),
      Enter: () => this.zoom(this.chosen),
      Escape: () => this.zoom(this.find(this.zoomed).parent?.page ?? -1),
      Home: () => this.click(-1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    to();
  }

  tell() {
    const node = this.byPage.get(this.chosen);
    const most = this.nodes.length ? `${whole(this.nodes.length)} runs of cached tokens` : "Nothing is cached yet";
    const left = this.left > 0 ? `; ${whole(this.left)} pages with fewer hits are not shown` : "";
    const facts = node && node !== this.first ? describe(node) : `${most}${left}.`;
    if ($("tree-facts").textContent !== facts) $("tree-facts").textContent = facts;
    this.svg.setAttribute("aria-label", `Prefix tree: ${most}. Arrow keys choose a run, Enter zooms in, Escape zooms out`);
    $("zoom-in").disabled = !node?.children.length || node === this.first || this.zoomed === this.chosen;
    $("zoom-out").disabled = $("zoom-all").disabled = this.find(this.zoomed) === this.first;
  }

  // The same in words, for those who cannot see or point.
  list() {
    const rows = this.nodes.filter(({ hits }) => hits).slice(0, 8).map((node) =>
      el("tr", {},
        el("td", {}, `${whole(node.start)} to ${whole(node.end)}`),
        el("td", {}, whole(node.hits)),
        el("td", {}, whole(node.holders)),
        el("td", {}, whole(node.pages)),
        el("td", {}, ago(node)),
        el("td", { class: "act" }, el("button", { type: "button", class: "small", "aria-label": `Show tokens ${node.start} to ${node.end}`,
          onclick: () => this.click(node.page) }, "Show")),
      ),
    );
    const body = $("most-hit").tBodies[0];
    if (body.contains(document.activeElement)) return; // not under the hands of whoever uses it
    body.replaceChildren(...(rows.length ? rows : [el("tr", {}, el("td", { class: "none", colspan: 6 }, "No prompt has found anything yet"))]));
  }
}

const ago = ({ idle }) => (idle ? `${whole(idle)} ${idle === 1 ? "lookup" : "lookups"} ago` : "in the last lookup");

function describe(node) {
  const facts = [
    `Tokens ${whole(node.start)} to ${whole(node.end)}`,
    `${whole(node.pages)} ${node.pages === 1 ? "page" : "pages"}`,
    `${whole(node.hits)} ${node.hits === 1 ? "hit" : "hits"}`,
    node.holders ? `held by ${whole(node.holders)}` : "held by none",
    `last used ${ago(node)}`,
    `retention ${node.retention}`,
  ];
  if (node.pinned) facts.push(`pinned for ${number(node.pinned)} s`);
  return facts.join(" · ");
}
