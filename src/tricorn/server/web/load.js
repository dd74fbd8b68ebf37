// The charts, and the figures at the top of the page: all out of /metrics.

import { Chart } from "./chart.js";
import { $, el, number, percent, seconds, whole } from "./dom.js";

const GENERATED = "vllm:generation_tokens_total";
const QUERIES = "vllm:prefix_cache_queries_total";
const HITS = "vllm:prefix_cache_hits_total";
const rows = (phase) => `tricorn:step_rows_total{phase="${phase}"}`;
const steps = (kind) => `tricorn:steps_total{kind="${kind}"}`;
const time = (kind) => `tricorn:step_seconds_total{kind="${kind}"}`;
const pages = (state) => `tricorn:pages{state="${state}"}`;
const STEPS = ["decode", "mixed", "prefill"].map(steps);
const PAGES = ["held", "cached", "free"].map(pages);

const gauge = (key) => (history, place) => history.value(place, key);
const rate = (key) => (history, place) => history.rate(place, key);
const average = (key) => (history, place) => (history.rise(place, STEPS) ? history.share(place, key, STEPS) : null);
const part = (key) => (history, place) => {
  const all = PAGES.reduce((sum, each) => sum + history.value(place, each), 0);
  return all ? history.value(place, key) / all : null;
};
const quantiles = (name) => [
  { name: "p50", color: "s1", at: (history, place) => history.quantile(place, name, 0.5) },
  { name: "p95", color: "s2", dashed: true, at: (history, place) => history.quantile(place, name, 0.95) },
];

// Shares of time may be told a little late, and then add up to more than the time.
const busy = (kind) => (history, place) => {
  const all = history.rate(place, ["decode", "mixed", "prefill"].map(time));
  return all === null ? null : history.rate(place, time(kind)) / Math.max(1, all);
};

const CHARTS = [
  {
    title: "Throughput",
    note: "tokens per second",
    least: 10,
    series: [
      { name: "generated", color: "s1", at: rate(GENERATED) },
      { name: "prompt", color: "s2", at: rate(rows("prefill")) },
      { name: "cached", color: "s3", dashed: true, at: rate(HITS) },
    ],
  },
  {
    title: "Queue",
    note: "sequences",
    least: 4,
    format: (value) => number(value),
    series: [
      { name: "running", color: "s1", at: gauge("vllm:num_requests_running") },
      { name: "waiting", color: "s2", dashed: true, at: gauge("vllm:num_requests_waiting") },
    ],
  },
  {
    title: "Time to first token",
    note: "over 15 s",
    least: 0.02,
    format: seconds,
    series: quantiles("first"),
  },
  {
    title: "Between tokens",
    note: "over 15 s",
    least: 0.005,
    format: seconds,
    series: quantiles("between"),
  },
  {
    title: "Wait in the queue",
    note: "over 15 s",
    least: 0.005,
    format: seconds,
    series: quantiles("queue"),
  },
  {
    title: "End to end",
    note: "over 15 s",
    least: 0.1,
    format: seconds,
    series: quantiles("whole"),
  },
  {
    title: "Step composition",
    note: "token rows per step",
    stacked: true,
    least: 8,
    series: [
      { name: "decode", color: "s1", at: average(rows("decode")) },
      { name: "prefill", color: "s2", at: average(rows("prefill")) },
    ],
  },
  {
    title: "Where the time goes",
    note: "the rest is idle",
    stacked: true,
    most: 1,
    format: percent,
    series: [
      { name: "decode", color: "s1", at: busy("decode") },
      { name: "mixed", color: "s4", at: busy("mixed") },
      { name: "prefill", color: "s2", at: busy("prefill") },
    ],
  },
  {
    title: "KV pages",
    note: "of the pool",
    stacked: true,
    most: 1,
    format: percent,
    series: [
      { name: "held", color: "s2", at: part(pages("held")) },
      { name: "cached", color: "s1", at: part(pages("cached")) },
    ],
  },
];

const VITALS = [
  ["Tokens/s", (h, at) => number(h.rate(at, GENERATED))],
  ["Running", (h, at) => whole(h.value(at, "vllm:num_requests_running"))],
  ["Waiting", (h, at) => whole(h.value(at, "vllm:num_requests_waiting"))],
  ["First token", (h, at) => seconds(h.quantile(at, "first", 0.5)), "p50"],
  ["Token gap", (h, at) => seconds(h.quantile(at, "between", 0.5)), "p50"],
  ["KV held", (h, at) => percent(part(pages("held"))(h, at))],
  ["KV cached", (h, at) => percent(part(pages("cached"))(h, at))],
  ["Cache hits", (h, at) => percent(h.value(at, QUERIES) ? h.value(at, HITS) / h.value(at, QUERIES) : NaN)],
];

export class Load {
  constructor(history) {
    this.history = history;
    this.charts = CHARTS.map((each) => new Chart(each));
    this.vitals = VITALS.map(() => el("span", {}, "–"));
    this.notes = VITALS.map(([, , note]) => el("small", { hidden: true }, ` ${note}`));
    $("charts").append(...this.charts.map(({ node }) => node));
    $("vitals").append(
      ...VITALS.map(([name, , note], place) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, this.vitals[place], note ? this.notes[place] : "")),
      ),
    );
    $("span").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe($("charts"));
  }

  head() {
    const last = this.history.samples.length - 1;
    if (last < 0) return;
    VITALS.forEach(([, value], place) => {
      const said = value(this.history, last);
      this.vitals[place].textContent = said;
      this.notes[place].hidden = said === "–";
    });
  }

  draw() {
    if ($("view-load").hidden) return;
    const span = Number(document.querySelector("[name=span]:checked").value);
    this.charts.forEach((chart) => chart.show(this.history, span));
  }
}
