// Small plots of the last hour: a line with gaps for unknown values, and the interval expected for the next hour.

import { clock, h, s } from "./dom.js";

const WIDTH = 320, HEIGHT = 44, AHEAD = 80;

/**
 * Plot ratios over times (seconds by the extender's clock, as the browser's may differ); null is a gap.
 * `ahead` is the interval of the next hour, with its words; null without a forecast.
 */
export function plot(name, times, values, ahead = null) {
  const now = times.at(-1) ?? Date.now() / 1000;
  const from = now - 3600;
  const x = (at) => ((at - from) / 3600) * WIDTH;
  const y = (value) => HEIGHT - 1 - Math.min(1, value) * (HEIGHT - 2);
  const runs = [];
  let run = null, before = 0;
  times.forEach((at, step) => {
    const value = values[step];
    if (value === null || value === undefined || at < from) return (run = null);
    if (!run || at - before > 200) runs.push((run = []));
    run.push([x(at), y(value)]);
    before = at;
  });
  const known = values.filter((value) => value !== null && value !== undefined);
  const last = known.at(-1);
  const words = known.length ? `${name}: now ${Math.round(last * 100)} %, at most ${Math.round(Math.max(...known) * 100)} % in the last hour` : `${name}: no data for the last hour`;
  const width = WIDTH + (ahead ? AHEAD : 0);
  const path = (points) => points.map(([a, b], at) => `${at ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const area = (points) => `${path(points)}L${points.at(-1)[0].toFixed(1)} ${HEIGHT}L${points[0][0].toFixed(1)} ${HEIGHT}Z`;
  return h("figure", { class: "plot" },
    h("figcaption", {}, h("span", {}, name), h("span", { class: "num" }, known.length ? `${Math.round(last * 100)} %` : "unknown")),
    s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": ahead ? `${words}; next hour: ${ahead.words}` : words },
      ahead ? s("rect", { x: WIDTH, width: AHEAD, y: y(ahead.high).toFixed(1), height: Math.max(1, y(ahead.low) - y(ahead.high)).toFixed(1), class: "ahead" }) : null,
      s("line", { x1: 0, x2: width, y1: HEIGHT / 2, y2: HEIGHT / 2, class: "rule" }),
      [0.25, 0.5, 0.75].map((part) => s("line", { x1: part * WIDTH, x2: part * WIDTH, y1: 0, y2: HEIGHT, class: "rule" })),
      runs.map((points) => [points.length > 1 ? s("path", { d: area(points), class: "area" }) : null, s("path", { d: points.length > 1 ? path(points) : `${path(points)}h1.5`, class: "curve" })])),
    h("div", { class: ahead ? "axis ahead" : "axis" }, h("span", {}, clock(from * 1000).slice(0, 5)), h("span", {}, "now"), ahead ? h("span", {}, "next hour") : null));
}
