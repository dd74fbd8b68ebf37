// Elements out of names, attributes and children; text goes in as text and never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const $ = (id) => document.getElementById(id);
export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Numbers for people.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 10_000) return Math.round(value).toLocaleString("en");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(places, 2) });
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (value < 1) return `${number(value * 1000)} ms`;
  if (value < 120) return `${number(value)} s`;
  return value < 7200 ? `${Math.floor(value / 60)} min` : `${Math.floor(value / 3600)} h`;
}

export const percent = (value) => (value === null || Number.isNaN(value) ? "–" : `${number(value * 100)} %`);
export const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
