// One number over the last two minutes: a line, or dots where there is a value only now and then.

import { make } from "./dom.js";
import { number } from "./format.js";

const SPAN_S = 120;
const GAP_S = 3.5; // a line joins samples up to this far apart
const WIDTH = 240, HEIGHT = 40; // in the drawing's own units
const HEAD = 0.25; // of the height stays free for the highest value's label
const SVG = "http://www.w3.org/2000/svg";

export class Plot {
  constructor(title, { dots = false, show = number } = {}) {
    this.title = title;
    this.dots = dots;
    this.show = show;
    this.points = []; // [seconds, value]
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 -1 ${WIDTH} ${HEIGHT + 2}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.path = this.svg.appendChild(document.createElementNS(SVG, "path"));
    this.path.setAttribute("class", dots ? "dots" : "line");
    this.now = make("b", {}, "–");
    this.top = make("span", { class: "top" });
    this.element = make("figure", { class: "plot" },
      make("figcaption", {}, make("span", {}, title), this.now), this.svg, this.top);
  }

  add(at, value) {
    if (typeof value === "number" && Number.isFinite(value)) this.points.push([at, value]);
  }

  clear() {
    this.points = [];
  }

  draw(at) {
    this.points = this.points.filter(([when]) => when > at - SPAN_S);
    const last = this.points.at(-1);
    const highest = Math.max(0, ...this.points.map(([, value]) => value));
    const x = (when) => (WIDTH * (1 - (at - when) / SPAN_S)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - (1 - HEAD) * value / (highest || 1))).toFixed(1);
    let before = -Infinity, drawn = "";
    for (const [when, value] of this.points) {
      if (this.dots) drawn += `M${x(when)} ${y(value)}h0`;
      else drawn += `${when - before > GAP_S ? "M" : "L"}${x(when)} ${y(value)}`;
      before = when;
    }
    this.path.setAttribute("d", drawn);
    const current = last ? this.show(last[1]) : "–";
    this.now.textContent = current;
    this.top.textContent = highest ? this.show(highest) : "";
    this.svg.setAttribute("aria-label", last
      ? `${this.title}, the last two minutes: ${this.dots ? "last" : "now"} ${current}, highest ${this.show(highest)}`
      : `${this.title}: nothing yet`);
  }
}
