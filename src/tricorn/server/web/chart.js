// A chart over time: lines, or areas on top of each other. SVG, drawn anew each second.

import { el, number, svg } from "./dom.js";

const HEIGHT = 150;
const EDGE = { left: 54, right: 6, top: 6, bottom: 20 };

// The step between lines of a grid: 1, 2 or 5 times a power of ten.
export function step(most, lines) {
  const power = 10 ** Math.floor(Math.log10(most / lines));
  return power * [1, 2, 5, 10].find((factor) => power * factor * lines >= most);
}

export class Chart {
  // `series`: {name, color: "s1", dashed, at: (history, place) => value or null}. `format` writes a value with its unit,
  // `least` is the least height of the scale, `stacked` lays the series on each other.
  constructor({ title, note = "", series, format = number, least = 1, most, stacked = false }) {
    Object.assign(this, { title, series, format, least, most, stacked });
    this.cursor = null; // the time that is looked at, in seconds; null is now
    this.points = [];
    this.values = series.map(() => el("b"));
    this.when = el("span", { class: "muted" }, note);
    this.note = note;
    this.svg = svg("svg", {
      role: "img",
      tabindex: 0,
      onpointermove: (event) => this.point(event.offsetX),
      onpointerleave: () => this.look(null),
      onblur: () => this.look(null),
      onkeydown: (event) => this.key(event),
    });
    const kind = stacked ? "area" : "line";
    const legend = series.map(({ name, color, dashed }, place) =>
      el("li", {}, el("i", { class: `key ${color} ${stacked ? "area" : dashed ? "dashed" : ""}` }), name, this.values[place]),
    );
    this.node = el("figure", { class: `chart ${kind}` }, el("figcaption", {}, title, this.when), el("ul", { class: "legend" }, ...legend), this.svg);
  }

  // `span` is the time shown, in seconds.
  show(history, span) {
    this.now = history.last?.at ?? 0;
    this.span = span;
    this.points = history.samples
      .map((sample, place) => ({ at: sample.at, place }))
      .filter(({ at }) => at >= this.now - span - 2)
      .map(({ at, place }) => ({ at, values: this.series.map((each) => each.at(history, place)) }));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth || 400;
    const [w, h] = [width - EDGE.left - EDGE.right, HEIGHT - EDGE.top - EDGE.bottom];
    const heights = this.points.map(({ values }) => (this.stacked ? values.reduce((a, b) => a + (b ?? 0), 0) : Math.max(...values.map((v) => v ?? 0))));
    const highest = this.most ?? Math.max(this.least, ...heights);
    const grid = step(highest, 3);
    const top = this.most ?? Math.ceil(highest / grid - 1e-9) * grid;
    this.x = (at) => EDGE.left + (1 - (this.now - at) / this.span) * w;
    const y = (value) => EDGE.top + (1 - value / top) * h;
    const parts = [];
    for (let value = 0; value <= top * 1.0001; value += grid) {
      parts.push(svg("line", { class: "grid", x1: EDGE.left, x2: EDGE.left + w, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { x: EDGE.left - 7, y: y(value) + 4, "text-anchor": "end" }, this.format(value)));
    }
    const minutes = this.span / 60;
    parts.push(svg("text", { x: EDGE.left, y: HEIGHT - 4 }, `${minutes} min ago`));
    parts.push(svg("text", { x: EDGE.left + w, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    const clip = (node) => svg("svg", { x: EDGE.left, y: 0, width: w, height: HEIGHT, viewBox: `${EDGE.left} 0 ${w} ${HEIGHT}` }, ...node);
    parts.push(clip(this.stacked ? this.areas(y) : this.lines(y)));
    const seen = this.seen();
    if (this.cursor !== null && seen) {
      parts.push(svg("line", { class: "cursor", x1: this.x(seen.at), x2: this.x(seen.at), y1: EDGE.top, y2: EDGE.top + h }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    this.tell(seen);
  }

  // Runs of points with values in them.
  runs(place) {
    const runs = [[]];
    let last = null;
    for (const point of this.points) {
      const known = point.values[place] !== null && point.values[place] !== undefined;
      if (!known || (last !== null && point.at - last > 5)) runs.push([]);
      if (known) runs.at(-1).push(point);
      last = point.at;
    }
    return runs.filter((run) => run.length > 0);
  }

  lines(y) {
    return this.series.flatMap(({ color, dashed }, place) =>
      this.runs(place).map((run) =>
        svg("path", {
          class: `stroke ${color} ${dashed ? "dashed" : ""}`,
          d: `M${run.map(({ at, values }) => `${this.x(at).toFixed(1)} ${y(values[place]).toFixed(1)}`).join("L")}${run.length === 1 ? "h0" : ""}`,
        }),
      ),
    );
  }

  areas(y) {
    return this.series.flatMap(({ color }, place) =>
      this.runs(place).map((run) => {
        const below = ({ values }) => values.slice(0, place).reduce((a, b) => a + (b ?? 0), 0);
        const upper = run.map((point) => `${this.x(point.at).toFixed(1)} ${y(below(point) + point.values[place]).toFixed(1)}`);
        const lower = run.map((point) => `${this.x(point.at).toFixed(1)} ${y(below(point)).toFixed(1)}`);
        return svg("path", { class: `fill ${color}`, d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` });
      }),
    );
  }

  // The point that is looked at.
  seen() {
    if (this.cursor === null) return this.points.at(-1);
    const far = ({ at }) => Math.abs(at - this.cursor);
    return this.points.reduce((best, point) => (!best || far(point) < far(best) ? point : best), null);
  }

  tell(seen) {
    const texts = this.series.map((_, place) => this.format(seen?.values[place] ?? null));
    texts.forEach((text, place) => (this.values[place].textContent = text));
    const when = this.cursor === null || !seen ? "" : `${Math.round(this.now - seen.at)} s ago`;
    this.when.textContent = when || this.note;
    this.svg.setAttribute("aria-label", `${this.title}, ${when || "now"}: ${this.series.map(({ name }, place) => `${name} ${texts[place]}`).join(", ")}`);
  }

  look(at) {
    if (at === this.cursor) return;
    this.cursor = at;
    this.draw();
  }

  point(x) {
    if (this.points.length) this.look(this.now - (1 - (x - EDGE.left) / (this.svg.clientWidth - EDGE.left - EDGE.right)) * this.span);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by && this.points.length) {
      const place = this.points.indexOf(this.seen()) + by;
      this.look(place >= this.points.length ? null : this.points[Math.max(0, place)].at);
    } else if (event.key === "Escape") this.look(null);
    else return;
    event.preventDefault();
  }
}
