// The page pool as a map: one cell for each page.

import { $, el, whole } from "./dom.js";

const KINDS = { ".": ["free", "free"], c: ["cached", "cached"], h: ["held", "heldpage"], s: ["shared", "shared"] };
const SIZES = [16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2];
const HEIGHT = 170;

export class Pages {
  constructor() {
    this.map = "";
    this.total = 0;
    this.counts = {};
    this.swatches = {};
    for (const [kind, [name, color]] of Object.entries(KINDS)) {
      this.counts[kind] = el("b");
      this.swatches[kind] = el("i", { class: `swatch ${color}` });
      $("page-legend").append(el("li", {}, this.swatches[kind], `${name} `, this.counts[kind]));
    }
    $("pages").addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    $("pages").addEventListener("pointerleave", () => ($("page-hover").textContent = ""));
    new ResizeObserver(() => this.draw()).observe($("pages").parentElement);
  }

  show({ map, total }) {
    [this.map, this.total] = [map, total];
    const counts = Object.keys(KINDS).map((kind) => [kind, map.split(kind).length - 1]);
    for (const [kind, count] of counts) this.counts[kind].textContent = whole(count);
    const said = counts.map(([kind, count]) => `${count} ${KINDS[kind][0]}`).join(", ");
    $("pages").setAttribute("aria-label", `${whole(total)} pages: ${said}`);
    this.draw();
  }

  draw() {
    const canvas = $("pages");
    const width = canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft);
    if (width <= 0 || !this.map) return;
    const fits = (size) => Math.ceil(this.map.length / Math.floor(width / size)) * size <= HEIGHT;
    this.size = SIZES.find(fits) ?? SIZES.at(-1);
    this.columns = Math.floor(width / this.size);
    const height = Math.ceil(this.map.length / this.columns) * this.size;
    const scale = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [width * scale, height * scale];
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const gap = this.size > 3 ? 1 : 0;
    const colors = Object.fromEntries(Object.entries(this.swatches).map(([kind, node]) => [kind, getComputedStyle(node).backgroundColor]));
    for (let page = 0; page < this.map.length; page += 1) {
      context.fillStyle = colors[this.map[page]];
      context.fillRect((page % this.columns) * this.size, Math.floor(page / this.columns) * this.size, this.size - gap, this.size - gap);
    }
  }

  point(x, y) {
    const column = Math.floor(x / this.size);
    const page = Math.floor(y / this.size) * this.columns + column;
    const known = column < this.columns && this.map[page];
    $("page-hover").textContent = known ? `page ${whole(page)}, ${KINDS[known][0]}` : "";
  }
}
