"use strict";
/* Small SVG charts: scales, axes, lines with bands, points, a cursor with a note. No library. */
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const HOUR = 3600, DAY = 86400;

  const make = (name, attributes, parent, text) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };

  const digits = (value, places = 3) => {
    if (value === 0) return "0";
    const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
    const fixed = Math.min(8, Math.max(0, places - whole));
    return value.toLocaleString("en", { maximumFractionDigits: fixed });
  };
  const time = (s, places = 3) => {
    if (s === null || s === undefined) return "–";
    if (s < 1e-3) return digits(s * 1e6, places) + " µs";
    if (s < 1) return digits(s * 1e3, places) + " ms";
    if (s < 120) return digits(s, places) + " s";
    if (s < 2 * HOUR) return digits(s / 60, places) + " min";
    if (s < 3 * DAY) return digits(s / HOUR, places) + " h";
    return digits(s / DAY, places) + " days";
  };
  const bytes = (b, places = 3) => {
    if (b === null || b === undefined) return "–";
    return b >= 1e9 ? digits(b / 1e9, places) + " GB" : digits(b / 1e6, places) + " MB";
  };
  const money = (usd) => {
    if (usd === null || usd === undefined) return "–";
    return usd >= 1000 ? "$" + digits(Math.round(usd), 7) : "$" + digits(usd, 3);
  };
  const count = (n) => n.toLocaleString("en");

  /* Scales map a value to pixels; ticks are those a person would draw. */
  const TIMES = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, .01, .02,
    .05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, HOUR, 2 * HOUR, 5 * HOUR,
    10 * HOUR, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 20 * DAY, 50 * DAY, 100 * DAY, 300 * DAY, 1000 * DAY];
  const decades = () => {
    const out = [];
    for (let power = -9; power < 13; power++) for (const step of [1, 2, 5]) out.push(step * 10 ** power);
    return out;
  };
  const thin = (ticks, most) => {
    let every = 1;
    while (ticks.length / every > most) every++;
    return ticks.filter((_, at) => at % every === 0);
  };
  const FEWEST = 3;
  /** Even steps, for less than a decade: in hours where hours are what is read, and so on. */
  const even = (low, high, most, unit) => {
    const rough = (high - low) / unit / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * .999) * unit;
    const out = [];
    for (let at = Math.ceil(low / step); at * step <= high * 1.001; at++) if (at > 0) out.push(at * step);
    return out;
  };
  const timeUnit = (s) => (s < 120 ? 1 : s < 2 * HOUR ? 60 : s < 3 * DAY ? HOUR : DAY);
  const logScale = (low, high, from, to, { ticks, most, format, unit }) => {
    const a = Math.log(low), b = Math.log(high > low ? high : low * 2);
    const scale = (value) => from + (to - from) * (Math.log(value) - a) / (b - a);
    const inside = ticks.filter((tick) => tick >= low * .999 && tick <= high * 1.001);
    const shown = unit && inside.length < FEWEST ? even(low, high, Math.min(most, 6), unit(high)) : thin(inside, most);
    return Object.assign(scale, { ticks: shown, format, low, high });
  };
  const linearScale = (high, from, to, { most, format }) => {
    const rough = high / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const ticks = [];
    for (let value = 0; value <= high; value += step) ticks.push(value);
    return Object.assign((value) => from + (to - from) * value / high, { ticks, format, low: 0, high });
  };
  const powers = Array.from({ length: 41 }, (_, at) => 2 ** at);

  const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  /** One chart in `box`: draws again when its width changes. */
  class Chart {
    constructor(box, draw, label) {
      this.box = box;
      this.draw = draw;
      this.label = label;
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      box.append(this.tip);
      new ResizeObserver(() => this.show()).observe(box);
    }

    show(data) {
      if (data) this.data = data;
      const width = Math.round(this.box.clientWidth);
      if (!this.data || !width) return;
      const height = Math.round(Math.min(380, Math.max(240, width * (this.box.id === "chart-time" ? .42 : .62))));
      this.tip.hidden = true;
      this.svg?.remove();
      this.svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.label });
      this.area = { left: 58, right: width - 14, top: 26, bottom: height - 42, width, height };
      this.targets = [];
      this.draw(this, this.data);
      this.box.prepend(this.svg);
      this.cursor();
    }

    axes(x, y, xTitle, yTitle) {
      const { left, right, top, bottom } = this.area;
      for (const tick of y.ticks) {
        make("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid-line" }, this.svg);
        make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, this.svg, y.format(tick));
      }
      for (const tick of x.ticks) {
        make("line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4, class: "axis-line" }, this.svg);
        make("text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, this.svg, x.format(tick));
      }
      make("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis-line" }, this.svg);
      make("text", { x: (left + right) / 2, y: bottom + 37, "text-anchor": "middle", class: "title" }, this.svg, xTitle);
      make("text", { x: left - 50, y: top - 13, class: "title" }, this.svg, yTitle);
      this.clip = `clip-${this.box.id}`;
      const clip = make("clipPath", { id: this.clip }, this.svg);
      make("rect", { x: left, y: top - 6, width: right - left, height: bottom - top + 6 }, clip);
      this.inner = make("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    }

    band(points) {
      const known = points.filter((p) => p[1] !== null && p[2] !== null);
      if (known.length < 2) return;
      const edge = known.map(([x, low]) => [x, low]).concat(known.map(([x, , high]) => [x, high]).reverse());
      make("path", { d: path(edge) + "Z", class: "band" }, this.inner);
    }

    /** A curve, dashed where `beyond` says so; the dashes begin at the last solid point. */
    curve(points, beyond, chosen) {
      let from = 0;
      for (let at = 1; at <= points.length; at++) {
        if (at < points.length && beyond[at] === beyond[at - 1]) continue;
        const last = beyond[at - 1] ? Math.min(at + 1, points.length) : at;
        const first = beyond[at - 1] ? Math.max(0, from - 1) : from;
        const part = points.slice(first, last).filter((p) => p[1] !== null);
        const kind = `curve${chosen ? " chosen" : ""}${beyond[at - 1] ? " dashed" : ""}`;
        if (part.length > 1) make("path", { d: path(part), class: kind }, this.inner);
        from = at;
      }
    }

    dot(x, y, kind, radius = 4) {
      return make("circle", { cx: x, cy: y, r: radius, class: `dot ${kind}` }, this.inner);
    }

    star(x, y) {
      const spokes = Array.from({ length: 10 }, (_, at) => {
        const angle = Math.PI * (at / 5 - .5), radius = at % 2 ? 4.4 : 10;
        return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
      });
      make("path", { d: path(spokes) + "Z", class: "star", "stroke-linejoin": "round" }, this.svg);
    }

    cross(x, y) {
      make("path", { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, class: "cross" }, this.inner);
    }

    across(y, text, shadeAbove) {
      const { left, right, top, bottom } = this.area;
      if (y < top - 6 || y > bottom) return;
      if (shadeAbove) make("rect", { x: left, y: top - 6, width: right - left, height: y - top + 6, class: "beyond" }, this.inner);
      make("line", { x1: left, x2: right, y1: y, y2: y, class: "limit" }, this.inner);
      make("text", { x: right - 4, y: y < top + 12 ? y + 14 : y - 6, "text-anchor": "end", class: "limit-text" }, this.svg, text);
    }

    upright(x, text, kind) {
      const { left, right, top, bottom } = this.area;
      if (x < left || x > right) return;
      make("line", { x1: x, x2: x, y1: top - 6, y2: bottom, class: kind }, this.inner);
      const end = x > right - 80;
      make("text", { x: end ? x - 6 : x + 6, y: top + 6, "text-anchor": end ? "end" : "start", class: `${kind}-text` }, this.svg, text);
    }

    /** A place that the pointer finds: position and lines of text. */
    target(x, y, lines) {
      if (Number.isFinite(x) && Number.isFinite(y)) this.targets.push({ x, y, lines });
    }

    cursor() {
      const { width, height } = this.area;
      const ring = make("circle", { r: 8, fill: "none", class: "axis-line", visibility: "hidden" }, this.svg);
      const move = (event) => {
        const frame = this.svg.getBoundingClientRect();
        const px = (event.clientX - frame.left) * width / frame.width;
        const py = (event.clientY - frame.top) * height / frame.height;
        let best = null, least = 60 ** 2;
        for (const one of this.targets) {
          const far = (one.x - px) ** 2 + ((one.y - py) * .6) ** 2;
          if (far < least) { least = far; best = one; }
        }
        ring.setAttribute("visibility", best ? "visible" : "hidden");
        this.tip.hidden = !best;
        if (!best) return;
        ring.setAttribute("cx", best.x);
        ring.setAttribute("cy", best.y);
        this.tip.replaceChildren(...best.lines.filter(Boolean).map((line, at) => {
          const row = document.createElement(at ? "div" : "b");
          row.textContent = line;
          return row;
        }));
        const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
        const x = best.x + 14 + wide > width ? best.x - 14 - wide : best.x + 14;
        this.tip.style.left = `${Math.max(0, x)}px`;
        this.tip.style.top = `${Math.max(0, Math.min(height - high, best.y - high / 2))}px`;
      };
      this.svg.addEventListener("pointermove", move);
      this.svg.addEventListener("pointerdown", move);
      this.svg.addEventListener("pointerleave", () => {
        this.tip.hidden = true;
        ring.setAttribute("visibility", "hidden");
      });
    }
  }

  window.tulaCharts = { Chart, make, logScale, linearScale, powers, TIMES, timeUnit, decades, time, bytes, money, count, digits };
})();
