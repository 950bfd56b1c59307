// Line charts of the last five minutes, with bounds.

import { clock, number } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const WINDOW_S = 300;
const GAP_S = 3; // the line breaks where points are further apart
const MARGINS = { left: 34, right: 8, top: 6, bottom: 17 };
// A small chart stands in a row of a table. Its size is fixed: measuring each row would lay the page out anew.
const SMALL = { left: 0, right: 0, top: 2, bottom: 1, width: 120, height: 24 };

export class History {
  /** Keeps points that are more than `stepS` seconds apart. */
  constructor(stepS = 0) {
    this.stepS = stepS;
    this.points = [];
  }

  add(point) {
    if (this.points.length && point.at <= this.points.at(-1).at + this.stepS) return;
    this.points.push(point);
    while (this.points[0].at < point.at - WINDOW_S) this.points.shift();
  }
}

export class Chart {
  /**
   * Draws `value` of the history's points into `box`; `bounds` are keys drawn as dashed lines. The node `reading`
   * shows the figures under the pointer; a chart without it is small and has no axes.
   */
  constructor(box, history, value, bounds, reading = null) {
    Object.assign(this, { box, history, value, bounds, reading }, reading ? MARGINS : SMALL);
    this.svg = box.appendChild(node("svg", { "aria-hidden": "true" })); // text beside the chart states the figures
    if (!reading) {
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      return;
    }
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("pointermove", (event) => this.point(event.offsetX));
    box.addEventListener("pointerleave", () => this.point(null));
  }

  draw() {
    const { points } = this.history;
    if (this.reading) Object.assign(this, { width: this.box.clientWidth, height: this.box.clientHeight });
    this.end = points.at(-1)?.at ?? 0;
    const keys = [this.value, ...this.bounds];
    this.most = nice(points.reduce((most, each) => Math.max(most, ...keys.map((key) => each[key] ?? 0)), 1));
    const drawn = this.reading ? [...this.grid()] : [];
    if (points.length) {
      drawn.push(node("path", { class: "area", d: this.area() }));
      for (const key of this.bounds) drawn.push(node("path", { class: `bound ${key}`, d: this.path(key) }));
      drawn.push(node("path", { class: "line", d: this.path(this.value) }));
    }
    if (this.at) drawn.push(node("line", { class: "at", x1: this.x(this.at.at), x2: this.x(this.at.at), y1: 4, y2: this.y(0) }));
    this.svg.replaceChildren(...drawn);
  }

  point(offset) {
    const { points } = this.history;
    const wanted = offset === null ? null : this.end - ((this.width - this.right - offset) / (this.width - this.left - this.right)) * WINDOW_S;
    const near = (best, each) => (Math.abs(each.at - wanted) < Math.abs(best.at - wanted) ? each : best);
    this.at = wanted === null || !points.length ? null : points.reduce(near);
    this.reading.textContent = this.at ? `${clock(this.at.at)}: ${[this.value, ...this.bounds].map((key) => `${key} ${number(this.at[key])}`).join(", ")}` : "";
    this.draw();
  }

  x(at) {
    return (this.left + (1 - (this.end - at) / WINDOW_S) * (this.width - this.left - this.right)).toFixed(1);
  }

  y(value) {
    return (this.top + (1 - value / this.most) * (this.height - this.bottom - this.top)).toFixed(1);
  }

  /** The SVG path of a step line, flat from each known value to the next. `begin(x, y)` starts each line. */
  path(key, begin = (x, y) => `M${x} ${y}`) {
    const known = this.history.points.filter((each) => typeof each[key] === "number");
    const steps = known.map((each, at) => {
      const joined = at > 0 && each.at - known[at - 1].at <= this.history.stepS + GAP_S;
      const [x, y] = [this.x(each.at), this.y(each[key])];
      return joined ? `H${x}V${y}` : begin(x, y);
    });
    return steps.join("");
  }

  /** The SVG path of the area below the line. */
  area() {
    const floor = this.y(0);
    const steps = this.path(this.value, (x, y) => `V${floor}H${x}V${y}`);
    return `M${this.x(this.history.points[0].at)} ${floor}${steps}V${floor}Z`;
  }

  *grid() {
    const steps = this.height < 100 ? [0, 1] : [0, 0.5, 1];
    for (const share of steps) {
      const y = this.y(share * this.most);
      yield node("line", { class: "grid", x1: this.left, x2: this.width - this.right, y1: y, y2: y });
      yield text(this.left - 6, Number(y) + 4, "end", number(share * this.most));
    }
    const minutes = this.width < 420 ? [0, 2, 4] : [0, 1, 2, 3, 4, 5];
    for (const ago of minutes) {
      const said = ago ? `−${ago} min` : "now";
      yield text(this.x(this.end - ago * 60), this.height - 2, ago === 5 ? "start" : ago ? "middle" : "end", said);
    }
  }
}

/** A round number somewhat above `value`, for the top of the axis. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 1.02 || step === 10);
}

function node(tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(x, y, anchor, said) {
  const made = node("text", { x, y, "text-anchor": anchor });
  made.textContent = said;
  return made;
}
