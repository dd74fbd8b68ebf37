// Prometheus's text into numbers, and their history into rates and quantiles.

export const KEPT_SECONDS = 900;
const RATE_SECONDS = 2; // over how long a rate is taken
const QUANTILE_SECONDS = 15; // and a quantile: requests are fewer than tokens

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Name and labels (but the model's, which all have) to value: `steps{kind="decode"}`.
export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const labels = [...(found[2] ?? "").matchAll(LABEL)].filter(([, name]) => name !== "model_name");
    const shown = labels.map(([, name, value]) => `${name}="${value}"`).join(",");
    values.set(shown ? `${found[1]}{${shown}}` : found[1], Number(found[3].replace("Inf", "Infinity")));
  }
  return values;
}

// The buckets of a histogram: rising borders, and how many values lie at or below each.
function buckets(values, name) {
  const found = [];
  for (const [key, count] of values) {
    const border = key.startsWith(`${name}_bucket{le="`) && key.slice(name.length + 12, -2);
    if (border) found.push([border === "+Inf" ? Infinity : Number(border), count]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}

// From the counts between two samples, as if the values lay evenly in each bucket. Null without any.
export function quantile(before, after, share) {
  const counts = after.map(([border, count], place) => [border, count - (before[place]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [border, count] of counts) {
    if (count >= share * total) {
      return border === Infinity ? low : low + (border - low) * ((share * total - below) / (count - below || 1));
    }
    [low, below] = [border, count];
  }
  return low;
}

const HISTOGRAMS = {
  first: "vllm:time_to_first_token_seconds",
  between: "vllm:inter_token_latency_seconds",
  queue: "vllm:request_queue_time_seconds",
  whole: "vllm:e2e_request_latency_seconds",
};

export class History {
  constructor() {
    this.samples = []; // { at (seconds), values, and the buckets of each histogram }
  }

  get last() {
    return this.samples.at(-1);
  }

  add(at, text) {
    const values = parse(text);
    const sample = { at, values };
    for (const [name, metric] of Object.entries(HISTOGRAMS)) sample[name] = buckets(values, metric);
    for (const key of values.keys()) if (key.includes("_bucket{")) values.delete(key);
    const restarted = this.last && values.get("process_start_time_seconds") !== this.last.values.get("process_start_time_seconds");
    if (restarted) this.samples = [];
    this.samples.push(sample);
    while (this.samples[0].at < at - KEPT_SECONDS) this.samples.shift();
  }

  value(place, key) {
    return this.samples[place].values.get(key) ?? 0;
  }

  // The sample that lies so long before another; null when that is not known, or nobody looked in between.
  before(place, span) {
    let found = place;
    while (found > 0 && this.samples[place].at - this.samples[found].at < span) {
      if (this.samples[found].at - this.samples[found - 1].at > 5) return found === place ? null : found;
      found -= 1;
    }
    return found === place ? null : found;
  }

  rise(place, keys, span = RATE_SECONDS) {
    const from = this.before(place, span);
    if (from === null) return null;
    return [keys].flat().reduce((sum, key) => sum + this.value(place, key) - this.value(from, key), 0);
  }

  rate(place, keys) {
    const from = this.before(place, RATE_SECONDS);
    return from === null ? null : this.rise(place, keys) / (this.samples[place].at - this.samples[from].at);
  }

  share(place, keys, of, span) {
    const total = this.rise(place, of, span);
    return total ? this.rise(place, keys, span) / total : null;
  }

  quantile(place, name, share) {
    const from = this.before(place, QUANTILE_SECONDS);
    return from === null ? null : quantile(this.samples[from][name], this.samples[place][name], share);
  }
}
